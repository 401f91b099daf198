//! What a run is given: a typed builder for each pass, and the list of borrowed tensors that they make.

use std::fmt;

use crate::dtype::{E4M3, Element, Float, OutputOf};
use crate::operand::{Slot, SlotMap, operand_setters};
use crate::tensor::{AnyTensor, TensorMut, TensorRef};

/// Borrowed tensors, by the names of their operands: what every builder here becomes. Code that handles any problem by its
/// list of operands makes it directly; types, shapes and access are checked by the run.
#[derive(Default)]
pub struct Args<'a>(pub(super) SlotMap<AnyTensor<'a>>);

impl<'a> Args<'a> {
    /// Without any tensor.
    pub fn new() -> Self {
        Self::default()
    }

    /// With a tensor that is read, in place of one that was given as this operand before.
    #[must_use]
    pub fn read<T: Element, const R: usize>(self, slot: Slot, tensor: TensorRef<'a, T, R>) -> Self {
        self.with(slot, tensor.into())
    }

    /// With a tensor that is written, in place of one that was given as this operand before.
    #[must_use]
    pub fn write<T: Element, const R: usize>(self, slot: Slot, tensor: TensorMut<'a, T, R>) -> Self {
        self.with(slot, tensor.into())
    }

    /// Without the tensor that was given as this operand.
    #[must_use]
    pub fn without(mut self, slot: Slot) -> Self {
        self.0.remove(slot);
        self
    }

    fn with(mut self, slot: Slot, tensor: AnyTensor<'a>) -> Self {
        self.0.set(slot, tensor);
        self
    }
}

impl fmt::Debug for Args<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.0.iter().map(|(slot, tensor)| (slot, tensor))).finish()
    }
}

macro_rules! setters {
    ($args:ident $($(#[$doc:meta])* $setter:ident: $way:ident $tensor:ident<$type:ty, $rank:literal> as $slot:ident;)*) => {
        impl<'a> $args<'a> {
            $($(#[$doc])*
            pub fn $setter(self, $setter: $tensor<'a, $type, $rank>) -> Self {
                Self(self.0.$way(Slot::$slot, $setter))
            })*
        }

        impl<'a> From<$args<'a>> for Args<'a> {
            fn from(args: $args<'a>) -> Self {
                args.0
            }
        }
    };
}

/// What a forward pass reads and writes. Every tensor's logical order is `[batch, seqlen, heads, head_dim]`, whatever its
/// strides. The operands that the problem's options ask for are given with the setters.
///
/// A NaN or infinity in V reaches the rows that keep its key; on a GPU also rows that mask it but share a block of keys with it,
/// since the product takes whole blocks.
#[derive(Debug)]
#[must_use]
pub struct ForwardArgs<'a>(Args<'a>);

operand_setters!(ForwardArgs, setters);

impl<'a> ForwardArgs<'a> {
    /// Queries `[batch, seqlen_q, heads_q, head_dim_qk]`, keys `[batch, seqlen_kv, heads_kv, head_dim_qk]`, values
    /// `[batch, seqlen_kv, heads_kv, head_dim_vo]`, and the output `[batch, seqlen_q, heads_q, head_dim_vo]`.
    pub fn new<T: Element, O: OutputOf<T>>(
        q: TensorRef<'a, T, 4>,
        k: TensorRef<'a, T, 4>,
        v: TensorRef<'a, T, 4>,
        o: TensorMut<'a, O, 4>,
    ) -> Self {
        Self(Args::new().read(Slot::Q, q).read(Slot::K, k).read(Slot::V, v).write(Slot::O, o))
    }

    /// The factors of e4m3 Q, K and V: what is stored times its factor is the real value. Their shapes `[batch, heads, blocks]`
    /// are those that the problem's [`Scaling`](crate::Scaling) gives. Factors are finite and above 0, which the CPU checks and
    /// a GPU takes for granted.
    pub fn descale(self, q: TensorRef<'a, f32, 3>, k: TensorRef<'a, f32, 3>, v: TensorRef<'a, f32, 3>) -> Self {
        Self(self.0.read(Slot::DescaleQ, q).read(Slot::DescaleK, k).read(Slot::DescaleV, v))
    }
}

/// What a backward pass reads and writes. Every tensor's logical order is `[batch, seqlen, heads, head_dim]`, whatever its
/// strides.
///
/// A NaN in an input makes those gradients NaN that it reaches through a pair of query and key that the mask keeps; what an
/// infinity leads to in these places is an infinity or a NaN. On the CPU it reaches no others. On a GPU it also reaches those
/// of masked pairs that share a block with it, since the products take whole blocks; and what makes a query's
/// `rowsum(d_o * o) - d_lse` infinite or NaN reaches dV as well, since it is one operand with the query's LSE.
#[derive(Debug)]
#[must_use]
pub struct BackwardArgs<'a>(Args<'a>);

operand_setters!(BackwardArgs, setters);

impl<'a> BackwardArgs<'a> {
    /// - `qkv`: queries `[batch, seqlen_q, heads_q, head_dim_qk]`, keys `[batch, seqlen_kv, heads_kv, head_dim_qk]` and values
    ///   `[batch, seqlen_kv, heads_kv, head_dim_vo]`.
    /// - `o`: the forward pass's output, `[batch, seqlen_q, heads_q, head_dim_vo]`.
    /// - `lse`: the forward pass's log-sum-exp, natural log, `[batch, heads_q, seqlen_q]`. A row of -inf has no part in any
    ///   gradient, and its own is 0.
    /// - `d_o`: the gradient of the output, of its shape.
    /// - `d_qkv`: the gradients of queries, keys and values, of their shapes; the latter two are summed over the query heads
    ///   that read a key head. They are overwritten, not added to.
    pub fn new<T: Float>(
        qkv: [TensorRef<'a, T, 4>; 3],
        o: TensorRef<'a, T, 4>,
        lse: TensorRef<'a, f32, 3>,
        d_o: TensorRef<'a, T, 4>,
        d_qkv: [TensorMut<'a, T, 4>; 3],
    ) -> Self {
        let ([q, k, v], [d_q, d_k, d_v]) = (qkv, d_qkv);
        let inputs = Args::new().read(Slot::Q, q).read(Slot::K, k).read(Slot::V, v).read(Slot::O, o);
        let inputs = inputs.read(Slot::Lse, lse).read(Slot::DO, d_o);
        Self(inputs.write(Slot::DQ, d_q).write(Slot::DK, d_k).write(Slot::DV, d_v))
    }
}

/// Where the factors of a tensor that is quantised come from.
#[derive(Debug)]
#[non_exhaustive]
pub enum Descale<'a> {
    /// From the largest finite magnitude that shares each: written.
    FromAmax(TensorMut<'a, f32, 3>),
    /// From the caller: read. Finite and above 0, which the CPU checks and a GPU takes for granted.
    Given(TensorRef<'a, f32, 3>),
}

/// What is quantised: any of Q, K and V. Values and what is stored of them are `[batch, seqlen, heads, head_dim]` in the shape
/// that the problem has for them; factors are `[batch, heads, blocks]` as [`Scaling`](crate::Scaling) says.
#[derive(Debug)]
#[must_use]
pub struct QuantizeArgs<'a>(Args<'a>);

operand_setters!(QuantizeArgs, setters);

impl<'a> QuantizeArgs<'a> {
    /// Nothing to quantise yet.
    pub fn new() -> Self {
        Self(Args::new())
    }

    /// Quantises queries.
    pub fn q<T: Float>(
        self,
        values: TensorRef<'a, T, 4>,
        stored: TensorMut<'a, E4M3, 4>,
        descale: Descale<'a>,
    ) -> Self {
        self.tensor([Slot::QValues, Slot::QStored, Slot::QDescale, Slot::QDescaleGiven], values, stored, descale)
    }

    /// Quantises keys.
    pub fn k<T: Float>(
        self,
        values: TensorRef<'a, T, 4>,
        stored: TensorMut<'a, E4M3, 4>,
        descale: Descale<'a>,
    ) -> Self {
        self.tensor([Slot::KValues, Slot::KStored, Slot::KDescale, Slot::KDescaleGiven], values, stored, descale)
    }

    /// Quantises values.
    pub fn v<T: Float>(
        self,
        values: TensorRef<'a, T, 4>,
        stored: TensorMut<'a, E4M3, 4>,
        descale: Descale<'a>,
    ) -> Self {
        self.tensor([Slot::VValues, Slot::VStored, Slot::VDescale, Slot::VDescaleGiven], values, stored, descale)
    }

    fn tensor<T: Float>(
        self,
        [of_values, of_stored, of_descale, of_given]: [Slot; 4],
        values: TensorRef<'a, T, 4>,
        stored: TensorMut<'a, E4M3, 4>,
        descale: Descale<'a>,
    ) -> Self {
        let args = self.0.read(of_values, values).write(of_stored, stored);
        Self(match descale {
            Descale::FromAmax(descale) => args.write(of_descale, descale),
            Descale::Given(descale) => args.read(of_given, descale),
        })
    }
}

impl Default for QuantizeArgs<'_> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;

    #[test]
    fn arguments_print_what_was_given() {
        let (data, mut out) = ([1f32; 4], [0f32; 4]);
        let layout = Layout::contiguous([1, 2, 1, 2]).unwrap();
        let q = TensorRef::host(&data, layout).unwrap();
        let args = ForwardArgs::new(q.clone(), q.clone(), q, TensorMut::host(&mut out, layout).unwrap());
        let text = format!("{args:?}");
        assert!(text.starts_with("ForwardArgs({Q: Tensor { dtype: F32, shape: [1, 2, 1, 2], "), "{text}");
        assert!(text.contains("O: Tensor {") && !text.contains("Lse"), "{text}");
    }

    #[test]
    fn an_operand_that_is_given_again_takes_the_place() {
        let (mut short, mut long) = ([0f32; 1], [0f32; 2]);
        let first = TensorMut::host(&mut short, Layout::contiguous([1]).unwrap()).unwrap();
        let second = TensorMut::host(&mut long, Layout::contiguous([2]).unwrap()).unwrap();
        let args = Args::new().write(Slot::Amax, first).write(Slot::Amax, second);
        let shapes: Vec<_> = args.0.iter().map(|(_, tensor)| tensor.layout.shape()).collect();
        assert_eq!(shapes, [&[2]]);
    }
}
