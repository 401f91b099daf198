//! Dense f64 tensors. The oracle reads and writes them.

use crate::dtype::Element;
use crate::layout::Layout;

/// A dense f64 tensor `[batch, seqlen, heads, head_dim]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    shape: [usize; 4],
    data: Vec<f64>,
}

impl Tensor {
    /// A tensor of zeros.
    pub fn zeros(shape: [usize; 4]) -> Self {
        Self { shape, data: vec![0.0; shape.iter().product()] }
    }

    /// The tensor whose element at index `[batch, token, head, dim]` is `value(index)`.
    pub fn from_fn(shape: [usize; 4], mut value: impl FnMut([usize; 4]) -> f64) -> Self {
        let mut data = Vec::with_capacity(shape.iter().product());
        for b in 0..shape[0] {
            for s in 0..shape[1] {
                for h in 0..shape[2] {
                    data.extend((0..shape[3]).map(|d| value([b, s, h, d])));
                }
            }
        }
        Self { shape, data }
    }

    /// The elements of a slice that a layout reaches. The conversion to f64 is exact.
    ///
    /// # Panics
    /// When the layout reaches past the end of `data`. A layout that made a [`TensorRef`](crate::TensorRef) of `data` does not.
    pub fn from_strided<T: Element>(data: &[T], layout: &Layout<4>) -> Self {
        let (shape, stride) = (layout.shape(), layout.stride());
        Self::from_fn(shape, |index| {
            let offset: i64 = index.iter().zip(stride).map(|(&i, stride)| i as i64 * stride).sum();
            f64::from(data[offset as usize].to_f32())
        })
    }

    /// The real values of an e4m3 operand: each element times its descale factor. The products are exact.
    ///
    /// `descale` gives the factor of the row `[batch, token, head]`.
    #[must_use]
    pub fn descaled(&self, descale: impl Fn([usize; 3]) -> f32) -> Self {
        let mut real = self.clone();
        let [batch, seqlen, heads, _] = self.shape;
        for i in 0..batch * seqlen * heads {
            let [b, s, h] = [i / heads / seqlen, i / heads % seqlen, i % heads];
            // Once for a row: the caller may look for the row's sequence.
            let factor = f64::from(descale([b, s, h]));
            real.row_mut(b, s, h).iter_mut().for_each(|x| *x *= factor);
        }
        real
    }

    /// The shape `[batch, seqlen, heads, head_dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// All elements in row-major order.
    pub fn data(&self) -> &[f64] {
        &self.data
    }

    /// All elements, for writing.
    pub fn data_mut(&mut self) -> &mut [f64] {
        &mut self.data
    }

    /// The vector of one batch element, token and head.
    pub fn row(&self, batch: usize, seq: usize, head: usize) -> &[f64] {
        let start = self.row_start(batch, seq, head);
        &self.data[start..start + self.shape[3]]
    }

    /// The vector of one batch element, token and head, for writing.
    pub fn row_mut(&mut self, batch: usize, seq: usize, head: usize) -> &mut [f64] {
        let start = self.row_start(batch, seq, head);
        &mut self.data[start..start + self.shape[3]]
    }

    fn row_start(&self, batch: usize, seq: usize, head: usize) -> usize {
        let [_, seqlen, heads, head_dim] = self.shape;
        ((batch * seqlen + seq) * heads + head) * head_dim
    }
}
