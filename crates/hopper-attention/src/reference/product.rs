//! Matrix products in f64 for the oracle, and sums of weighted vectors made of them.
//!
//! The `matrixmultiply` crate computes the products. The CPU backend uses this crate in f32. What the oracle computes
//! with it is compared with plain loops by a test (`oracle/tests.rs`).

use super::Tensor;

/// A matrix in a slice, with any strides.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    data: &'a [f64],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// `rows` x `columns` elements, row after row. `row_stride` is the distance between the first elements of two
    /// rows.
    fn new(data: &'a [f64], rows: usize, columns: usize, row_stride: usize) -> Self {
        let end = if rows * columns == 0 { 0 } else { (rows - 1) * row_stride + columns };
        // The slice ends where the matrix ends, so that no product reads past it.
        Self { data: &data[..end], rows, columns, row_stride, column_stride: 1 }
    }

    /// Row-major without gaps.
    pub(super) fn dense(data: &'a [f64], rows: usize, columns: usize) -> Self {
        Self::new(data, rows, columns, columns)
    }

    /// The vectors of these tokens of a head of a tensor. A row is a token.
    pub(super) fn of(tensor: &'a Tensor, batch: usize, head: usize, tokens: Tokens) -> Self {
        let [_, seqlen, heads, dim] = tensor.shape();
        let data = if tokens.count == 0 {
            &[]
        } else {
            &tensor.data()[((batch * seqlen + tokens.first) * heads + head) * dim..]
        };
        Self::new(data, tokens.count, dim, heads * dim)
    }

    pub(super) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// Neighbouring tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tokens {
    pub first: usize,
    pub count: usize,
}

impl Tokens {
    /// The tokens `0..seqlen` without those before the first and after the last that `wanted` takes.
    pub(super) fn of(seqlen: usize, wanted: impl Fn(usize) -> bool) -> Self {
        let first = (0..seqlen).find(|&token| wanted(token)).unwrap_or(seqlen);
        let end = (first..seqlen).rev().find(|&token| wanted(token)).map_or(first, |last| last + 1);
        Self { first, count: end - first }
    }

    pub(super) fn iter(self) -> impl Iterator<Item = usize> {
        self.first..self.first + self.count
    }
}

/// `out = a b + beta * out`. `out` is row-major without gaps. With `beta` 0 the old contents of `out` are not read.
pub(super) fn product(a: Matrix<'_>, b: Matrix<'_>, beta: f64, out: &mut [f64]) {
    assert_eq!(a.columns, b.rows, "inner sizes");
    let out = &mut out[..a.rows * b.columns];
    // SAFETY: a `Matrix` has at least as many elements as its sizes and strides address: `new` cuts the slice there,
    // and `transposed` swaps both. `out` holds a.rows x b.columns elements, which the strides (b.columns, 1) address.
    // It is borrowed mutably, so it overlaps neither `a` nor `b`. Strides are sizes of slices in memory, which fit an
    // isize.
    unsafe {
        matrixmultiply::dgemm(
            a.rows,
            a.columns,
            b.columns,
            1.0,
            a.data.as_ptr(),
            a.row_stride as isize,
            a.column_stride as isize,
            b.data.as_ptr(),
            b.row_stride as isize,
            b.column_stride as isize,
            beta,
            out.as_mut_ptr(),
            b.columns as isize,
            1,
        );
    }
}

/// A function of the elements of a tensor, head by head: `[batch, head, token, dim]`.
///
/// Elements that are not finite are kept apart, with 0 in their place. A product takes all pairs of a tile, also
/// masked ones, whose weight is 0. 0 times infinity is NaN. So these elements are added one by one, to the rows that
/// keep their token.
pub(super) struct Vectors {
    heads: usize,
    seqlen: usize,
    dim: usize,
    finite: Vec<f64>,
    /// For each head the token, the index in its vector, and the value.
    others: Vec<Vec<(usize, usize, f64)>>,
}

impl Vectors {
    pub(super) fn new(tensor: &Tensor, function: impl Fn(f64) -> f64) -> Self {
        let [batch, seqlen, heads, dim] = tensor.shape();
        let mut vectors = Self {
            heads,
            seqlen,
            dim,
            finite: Vec::with_capacity(tensor.data().len()),
            others: vec![Vec::new(); batch * heads],
        };
        for of_head in 0..batch * heads {
            for token in 0..seqlen {
                for (i, &x) in tensor.row(of_head / heads, token, of_head % heads).iter().enumerate() {
                    let value = function(x);
                    vectors.finite.push(if value.is_finite() { value } else { 0.0 });
                    if !value.is_finite() {
                        vectors.others[of_head].push((token, i, value));
                    }
                }
            }
        }
        vectors
    }

    /// The finite elements of these tokens of a head. A row is a token.
    pub(super) fn finite(&self, batch: usize, head: usize, tokens: Tokens) -> Matrix<'_> {
        let first = ((batch * self.heads + head) * self.seqlen + tokens.first) * self.dim;
        Matrix::dense(&self.finite[first..first + tokens.count * self.dim], tokens.count, self.dim)
    }

    /// Adds to each row of `out` the sum of these tokens' vectors with the row's weights. `weights` and `kept` have a
    /// row for each row of `out` and a column for each token. A weight that is not kept is 0.
    pub(super) fn add_weighted(
        &self,
        [batch, head]: [usize; 2],
        tokens: Tokens,
        weights: &[f64],
        kept: &[bool],
        out: &mut [f64],
    ) {
        let (dim, count) = (self.dim, tokens.count);
        if dim == 0 || count == 0 {
            return;
        }
        let rows = out.len() / dim;
        product(Matrix::dense(weights, rows, count), self.finite(batch, head, tokens), 1.0, out);
        for &(token, i, value) in &self.others[batch * self.heads + head] {
            let Some(column) = token.checked_sub(tokens.first).filter(|&column| column < count) else { continue };
            for row in 0..rows {
                if kept[row * count + column] {
                    out[row * dim + i] += weights[row * count + column] * value;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_by_hand() {
        let a = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let mut out = [f64::NAN; 4];
        let matrix = Matrix::dense(&a, 2, 3);
        product(matrix, matrix.transposed(), 0.0, &mut out);
        assert_eq!(out, [14.0, 32.0, 32.0, 77.0]);
        product(Matrix::dense(&a, 2, 1), Matrix::dense(&a, 1, 2), 1.0, &mut out);
        assert_eq!(out, [15.0, 34.0, 34.0, 81.0]);
        product(Matrix::dense(&[], 2, 0), Matrix::dense(&[], 0, 2), 0.0, &mut out);
        assert_eq!(out, [0.0; 4]);
    }

    #[test]
    fn a_head_of_a_tensor_is_a_matrix() {
        let tensor = Tensor::from_fn([2, 3, 2, 2], |[b, s, h, d]| (1000 * b + 100 * s + 10 * h + d) as f64);
        let identity = [1.0, 0.0, 0.0, 1.0];
        let tokens = Tokens { first: 1, count: 2 };
        let (mut out, mut copied) = ([0.0; 4], [0.0; 4]);
        product(Matrix::of(&tensor, 1, 1, tokens), Matrix::dense(&identity, 2, 2), 0.0, &mut out);
        assert_eq!(out, [1110.0, 1111.0, 1210.0, 1211.0]);
        let vectors = Vectors::new(&tensor, |x| x);
        product(vectors.finite(1, 1, tokens), Matrix::dense(&identity, 2, 2), 0.0, &mut copied);
        assert_eq!(out, copied);
    }

    #[test]
    fn what_is_not_finite_reaches_the_rows_that_keep_it() {
        let x =
            Tensor::from_fn([1, 3, 1, 2], |[_, s, _, d]| if (s, d) == (1, 0) { f64::INFINITY } else { s as f64 + 1.0 });
        let weights = [1.0, 0.0, 0.5, 1.0, 0.5, 0.5, 1.0, 0.0, 0.5];
        let kept = [true, false, true, true, true, true, true, true, true];
        let mut out = [0.0; 6];
        Vectors::new(&x, |x| x).add_weighted([0, 0], Tokens { first: 0, count: 3 }, &weights, &kept, &mut out);
        assert_eq!(out[..4], [2.5, 2.5, f64::INFINITY, 3.5]);
        // A key that is kept with weight 0.
        assert!(out[4].is_nan() && out[5] == 2.5);
    }

    #[test]
    fn ranges_of_tokens() {
        let range = |wanted: &[usize]| {
            let Tokens { first, count } = Tokens::of(6, |token| wanted.contains(&token));
            (first, count)
        };
        assert_eq!([range(&[2, 4]), range(&[0]), range(&[5])], [(2, 3), (0, 1), (5, 1)]);
        assert_eq!(range(&[]).1, 0);
    }
}
