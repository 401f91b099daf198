//! The arguments of a run: a typed builder for each pass, and [`Args`], the list of borrowed tensors that each builder makes.

use std::fmt;

use crate::dtype::{E4M3, Element, Float, OutputOf};
use crate::operand::{Slot, SlotMap, operand_setters};
use crate::tensor::{AnyTensor, TensorMut, TensorRef};

/// Borrowed tensors, by the names of their operands.
///
/// [`ForwardArgs`], [`BackwardArgs`] and [`QuantizeArgs`] all become `Args`. Code that handles any problem by its list of
/// operands fills `Args` directly. The run checks types, shapes and access.
#[derive(Default)]
pub struct Args<'a>(pub(super) SlotMap<AnyTensor<'a>>);

impl<'a> Args<'a> {
    /// Arguments without any tensor.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor that is read. It replaces an earlier tensor for the same operand.
    #[must_use]
    pub fn read<T: Element, const R: usize>(self, slot: Slot, tensor: TensorRef<'a, T, R>) -> Self {
        self.with(slot, tensor.into())
    }

    /// Adds a tensor that is written. It replaces an earlier tensor for the same operand.
    #[must_use]
    pub fn write<T: Element, const R: usize>(self, slot: Slot, tensor: TensorMut<'a, T, R>) -> Self {
        self.with(slot, tensor.into())
    }

    /// Removes the tensor for an operand.
    #[must_use]
    pub fn without(mut self, slot: Slot) -> Self {
        self.0.remove(slot);
        self
    }

    /// Adds a tensor of any type.
    pub(super) fn with(mut self, slot: Slot, tensor: AnyTensor<'a>) -> Self {
        self.0.set(slot, tensor);
        self
    }

    /// The tensor for an operand.
    pub(super) fn get(&self, slot: Slot) -> Option<&AnyTensor<'a>> {
        self.0.get(slot)
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

/// The tensors that a forward pass reads and writes.
///
/// The dimensions of Q, K, V and O are in the logical order `[batch, seqlen, heads, head_dim]`, with any strides. The other
/// methods add the operands that the problem's options ask for.
///
/// A NaN or infinity in V reaches the output of each query that keeps its key, and no other.
#[derive(Debug)]
#[must_use]
pub struct ForwardArgs<'a>(pub(super) Args<'a>);

operand_setters!(ForwardArgs, setters);

impl<'a> ForwardArgs<'a> {
    /// The arguments that every forward pass has.
    ///
    /// - `q`: the queries, `[batch, seqlen_q, heads_q, head_dim_qk]`.
    /// - `k`: the keys, `[batch, seqlen_kv, heads_kv, head_dim_qk]`.
    /// - `v`: the values, `[batch, seqlen_kv, heads_kv, head_dim_vo]`.
    /// - `o`: the output, `[batch, seqlen_q, heads_q, head_dim_vo]`, written.
    pub fn new<T: Element, O: OutputOf<T>>(
        q: TensorRef<'a, T, 4>,
        k: TensorRef<'a, T, 4>,
        v: TensorRef<'a, T, 4>,
        o: TensorMut<'a, O, 4>,
    ) -> Self {
        Self::of(q, k, v, o)
    }

    /// The arguments of a forward pass whose sequences are all packed.
    ///
    /// - `q`: the queries, `[total_q, heads_q, head_dim_qk]`.
    /// - `k`: the keys, `[total_kv, heads_kv, head_dim_qk]`.
    /// - `v`: the values, `[total_kv, heads_kv, head_dim_vo]`.
    /// - `o`: the output, `[total_q, heads_q, head_dim_vo]`, written.
    ///
    /// [`cu_seqlens_q`](Self::cu_seqlens_q) and [`cu_seqlens_kv`](Self::cu_seqlens_kv) add where each sequence begins.
    pub fn packed<T: Element, O: OutputOf<T>>(
        q: TensorRef<'a, T, 3>,
        k: TensorRef<'a, T, 3>,
        v: TensorRef<'a, T, 3>,
        o: TensorMut<'a, O, 3>,
    ) -> Self {
        Self::of(q, k, v, o)
    }

    /// The arguments of a forward pass whose queries are packed. Keys and values are as for [`new`](Self::new), queries and
    /// the output as for [`packed`](Self::packed).
    pub fn packed_q<T: Element, O: OutputOf<T>>(
        q: TensorRef<'a, T, 3>,
        k: TensorRef<'a, T, 4>,
        v: TensorRef<'a, T, 4>,
        o: TensorMut<'a, O, 3>,
    ) -> Self {
        Self::of(q, k, v, o)
    }

    /// The arguments of a forward pass whose keys and values are packed. They are as for [`packed`](Self::packed), queries and
    /// the output as for [`new`](Self::new).
    pub fn packed_kv<T: Element, O: OutputOf<T>>(
        q: TensorRef<'a, T, 4>,
        k: TensorRef<'a, T, 3>,
        v: TensorRef<'a, T, 3>,
        o: TensorMut<'a, O, 4>,
    ) -> Self {
        Self::of(q, k, v, o)
    }

    /// The attention sinks, `[heads_q]`: f32 or bf16.
    ///
    /// They must be given exactly when the problem was made with [`sinks`](crate::ForwardProblemBuilder::sinks), with elements
    /// of that type.
    pub fn sinks<T: Element>(self, sinks: TensorRef<'a, T, 1>) -> Self {
        Self(self.0.read(Slot::Sinks, sinks))
    }

    /// The ALiBi slopes, `[heads_q]` or `[batch, heads_q]`.
    ///
    /// They must be given exactly when the problem was made with [`alibi`](crate::ForwardProblemBuilder::alibi), in the shape
    /// that it says.
    pub fn alibi_slopes<const R: usize>(self, slopes: TensorRef<'a, f32, R>) -> Self {
        Self(self.0.read(Slot::AlibiSlopes, slopes))
    }

    /// The additive bias, `[1 or batch, 1 or heads_q, 1 or seqlen_q, seqlen_kv]`: f32, bf16 or f16.
    ///
    /// It must be given exactly when the problem was made with a [`bias`](crate::ForwardProblemBuilder::bias), in the shape and type
    /// that it says.
    pub fn bias<T: Element>(self, bias: TensorRef<'a, T, 4>) -> Self {
        Self(self.0.read(Slot::Bias, bias))
    }

    fn of<T: Element, O: OutputOf<T>, const Q: usize, const KV: usize>(
        q: TensorRef<'a, T, Q>,
        k: TensorRef<'a, T, KV>,
        v: TensorRef<'a, T, KV>,
        o: TensorMut<'a, O, Q>,
    ) -> Self {
        Self(Args::new().read(Slot::Q, q).read(Slot::K, k).read(Slot::V, v).write(Slot::O, o))
    }

    /// The log-sum-exp of each packed query, written: natural logarithm, `[heads_q, total_q]`.
    ///
    /// It takes the place of [`lse`](Self::lse) where queries are packed.
    pub fn lse_packed(self, lse: TensorMut<'a, f32, 2>) -> Self {
        Self(self.0.write(Slot::Lse, lse))
    }

    /// Adds descale factors per block of packed Q, K and V, `[heads, blocks]`.
    ///
    /// [`Scaling`](crate::Scaling) says which block is whose. Other factors are added by [`descale`](Self::descale), also for
    /// packed tensors.
    pub fn descale_packed(self, q: TensorRef<'a, f32, 2>, k: TensorRef<'a, f32, 2>, v: TensorRef<'a, f32, 2>) -> Self {
        Self(self.0.read(Slot::DescaleQ, q).read(Slot::DescaleK, k).read(Slot::DescaleV, v))
    }

    /// Adds the descale factors of e4m3 Q, K and V. A real value is the stored value times its factor.
    ///
    /// Their shapes `[batch, heads, blocks]` follow from the problem's [`Scaling`](crate::Scaling). Every factor must be
    /// finite, and 0 or more. The CPU refuses others. A GPU makes NaN of the rows that they have a part in.
    pub fn descale(self, q: TensorRef<'a, f32, 3>, k: TensorRef<'a, f32, 3>, v: TensorRef<'a, f32, 3>) -> Self {
        Self(self.0.read(Slot::DescaleQ, q).read(Slot::DescaleK, k).read(Slot::DescaleV, v))
    }
}

/// The tensors that a backward pass reads and writes.
///
/// The dimensions of every 4-d tensor are in the logical order `[batch, seqlen, heads, head_dim]`, with any strides.
///
/// A NaN in an input reaches gradients through each pair of a query and a key that the mask keeps. Those gradients
/// become NaN. An infinity reaches the same gradients. They become infinities or NaN. No other gradients change.
#[derive(Debug)]
#[must_use]
pub struct BackwardArgs<'a>(pub(super) Args<'a>);

operand_setters!(BackwardArgs, setters);

impl<'a> BackwardArgs<'a> {
    /// The arguments that every backward pass has.
    ///
    /// - `qkv`: the queries `[batch, seqlen_q, heads_q, head_dim_qk]`, the keys `[batch, seqlen_kv, heads_kv, head_dim_qk]` and
    ///   the values `[batch, seqlen_kv, heads_kv, head_dim_vo]`.
    /// - `o`: the output of the forward pass, `[batch, seqlen_q, heads_q, head_dim_vo]`.
    /// - `lse`: the log-sum-exp of the forward pass, natural log, `[batch, heads_q, seqlen_q]`. A query with LSE -inf has no
    ///   part in any gradient, and its dQ is 0.
    /// - `d_o`: the gradient of the output, of the output's shape.
    /// - `d_qkv`: the gradients of queries, keys and values, written. Each has the shape of the tensor that it belongs to. The
    ///   gradients of keys and values are sums over the query heads that read the KV head. Old contents are overwritten,
    ///   not added to.
    pub fn new<T: Float>(
        qkv: [TensorRef<'a, T, 4>; 3],
        o: TensorRef<'a, T, 4>,
        lse: TensorRef<'a, f32, 3>,
        d_o: TensorRef<'a, T, 4>,
        d_qkv: [TensorMut<'a, T, 4>; 3],
    ) -> Self {
        let ([q, k, v], [d_q, d_k, d_v]) = (qkv, d_qkv);
        Self::of((q, [k, v]), o, lse, d_o, (d_q, [d_k, d_v]))
    }

    /// The arguments of a backward pass whose sequences are all packed.
    ///
    /// They are those of [`new`](Self::new), as `[total_q, heads_q, head_dim]` or `[total_kv, heads_kv, head_dim]`. The LSE is
    /// `[heads_q, total_q]`. [`cu_seqlens_q`](Self::cu_seqlens_q) and [`cu_seqlens_kv`](Self::cu_seqlens_kv) add where each
    /// sequence begins.
    pub fn packed<T: Float>(
        qkv: [TensorRef<'a, T, 3>; 3],
        o: TensorRef<'a, T, 3>,
        lse: TensorRef<'a, f32, 2>,
        d_o: TensorRef<'a, T, 3>,
        d_qkv: [TensorMut<'a, T, 3>; 3],
    ) -> Self {
        let ([q, k, v], [d_q, d_k, d_v]) = (qkv, d_qkv);
        Self::of((q, [k, v]), o, lse, d_o, (d_q, [d_k, d_v]))
    }

    /// The arguments of a backward pass whose queries are packed. Keys and values (`kv`, `d_kv`) are as for
    /// [`new`](Self::new), all other tensors as for [`packed`](Self::packed).
    pub fn packed_q<T: Float>(
        (q, kv): (TensorRef<'a, T, 3>, [TensorRef<'a, T, 4>; 2]),
        o: TensorRef<'a, T, 3>,
        lse: TensorRef<'a, f32, 2>,
        d_o: TensorRef<'a, T, 3>,
        (d_q, d_kv): (TensorMut<'a, T, 3>, [TensorMut<'a, T, 4>; 2]),
    ) -> Self {
        Self::of((q, kv), o, lse, d_o, (d_q, d_kv))
    }

    /// The arguments of a backward pass whose keys and values are packed. These (`kv`, `d_kv`) are as for
    /// [`packed`](Self::packed), all other tensors as for [`new`](Self::new).
    pub fn packed_kv<T: Float>(
        (q, kv): (TensorRef<'a, T, 4>, [TensorRef<'a, T, 3>; 2]),
        o: TensorRef<'a, T, 4>,
        lse: TensorRef<'a, f32, 3>,
        d_o: TensorRef<'a, T, 4>,
        (d_q, d_kv): (TensorMut<'a, T, 4>, [TensorMut<'a, T, 3>; 2]),
    ) -> Self {
        Self::of((q, kv), o, lse, d_o, (d_q, d_kv))
    }

    fn of<T: Float, const Q: usize, const KV: usize, const LSE: usize>(
        (q, [k, v]): (TensorRef<'a, T, Q>, [TensorRef<'a, T, KV>; 2]),
        o: TensorRef<'a, T, Q>,
        lse: TensorRef<'a, f32, LSE>,
        d_o: TensorRef<'a, T, Q>,
        (d_q, [d_k, d_v]): (TensorMut<'a, T, Q>, [TensorMut<'a, T, KV>; 2]),
    ) -> Self {
        let inputs = Args::new().read(Slot::Q, q).read(Slot::K, k).read(Slot::V, v).read(Slot::O, o);
        let inputs = inputs.read(Slot::Lse, lse).read(Slot::DO, d_o);
        Self(inputs.write(Slot::DQ, d_q).write(Slot::DK, d_k).write(Slot::DV, d_v))
    }

    /// The attention sinks of the forward pass, `[heads_q]`: f32 or bf16.
    ///
    /// They must be given exactly when the problem was made with [`d_sinks(true)`](crate::BackwardProblemBuilder::d_sinks).
    pub fn sinks<T: Element>(self, sinks: TensorRef<'a, T, 1>) -> Self {
        Self(self.0.read(Slot::Sinks, sinks))
    }

    /// The ALiBi slopes of the forward pass, `[heads_q]` or `[batch, heads_q]`.
    ///
    /// They must be given exactly when the forward problem was made with [`alibi`](crate::ForwardProblemBuilder::alibi).
    pub fn alibi_slopes<const R: usize>(self, slopes: TensorRef<'a, f32, R>) -> Self {
        Self(self.0.read(Slot::AlibiSlopes, slopes))
    }

    /// The additive bias of the forward pass: see [`ForwardArgs::bias`].
    ///
    /// It must be given exactly when the forward problem was made with a [`bias`](crate::ForwardProblemBuilder::bias).
    pub fn bias<T: Element>(self, bias: TensorRef<'a, T, 4>) -> Self {
        Self(self.0.read(Slot::Bias, bias))
    }

    /// The gradient of the additive bias, written, in the shape and type of the bias.
    ///
    /// It must be given exactly when the problem was made with [`d_bias(true)`](crate::BackwardProblemBuilder::d_bias).
    pub fn d_bias<T: Element>(self, d_bias: TensorMut<'a, T, 4>) -> Self {
        Self(self.0.write(Slot::DBias, d_bias))
    }

    /// The gradient of the log-sum-exp of packed queries, `[heads_q, total_q]`.
    ///
    /// It takes the place of [`d_lse`](Self::d_lse) where queries are packed.
    pub fn d_lse_packed(self, d_lse: TensorRef<'a, f32, 2>) -> Self {
        Self(self.0.read(Slot::DLse, d_lse))
    }
}

/// Where the descale factors of a quantised tensor come from.
#[derive(Debug)]
#[non_exhaustive]
pub enum Descale<'a> {
    /// The quantiser makes each factor from the largest finite magnitude of the elements that share it. It writes the
    /// factors here.
    FromAmax(TensorMut<'a, f32, 3>),
    /// The caller gives the factors. Each must be finite and above 0. The CPU checks this. A GPU does not.
    Given(TensorRef<'a, f32, 3>),
    /// As [`FromAmax`](Self::FromAmax), for factors per block of a packed tensor: `[heads, blocks]`.
    PackedFromAmax(TensorMut<'a, f32, 2>),
    /// As [`Given`](Self::Given), for factors per block of a packed tensor: `[heads, blocks]`.
    PackedGiven(TensorRef<'a, f32, 2>),
}

/// The tensors to quantise: any of Q, K and V.
///
/// For each of Q, K and V that is quantised, the caller gives three tensors:
/// - `values`, read, and `stored`, written: `[batch, seqlen, heads, head_dim]`, of the problem's shape for Q, K or V. Packed
///   tensors are `[total, heads, head_dim]`.
/// - `descale`: the factors, `[batch, heads, blocks]`, as [`Scaling`](crate::Scaling) says. [`Descale`] says whether
///   they are read or written.
#[derive(Debug)]
#[must_use]
pub struct QuantizeArgs<'a>(pub(super) Args<'a>);

operand_setters!(QuantizeArgs, setters);

impl<'a> QuantizeArgs<'a> {
    /// Arguments with nothing to quantise yet.
    pub fn new() -> Self {
        Self(Args::new())
    }

    /// Adds the queries.
    pub fn q<T: Float, const R: usize>(
        self,
        values: TensorRef<'a, T, R>,
        stored: TensorMut<'a, E4M3, R>,
        descale: Descale<'a>,
    ) -> Self {
        self.tensor([Slot::QValues, Slot::QStored, Slot::QDescale, Slot::QDescaleGiven], values, stored, descale)
    }

    /// Adds the keys.
    pub fn k<T: Float, const R: usize>(
        self,
        values: TensorRef<'a, T, R>,
        stored: TensorMut<'a, E4M3, R>,
        descale: Descale<'a>,
    ) -> Self {
        self.tensor([Slot::KValues, Slot::KStored, Slot::KDescale, Slot::KDescaleGiven], values, stored, descale)
    }

    /// Adds the values.
    pub fn v<T: Float, const R: usize>(
        self,
        values: TensorRef<'a, T, R>,
        stored: TensorMut<'a, E4M3, R>,
        descale: Descale<'a>,
    ) -> Self {
        self.tensor([Slot::VValues, Slot::VStored, Slot::VDescale, Slot::VDescaleGiven], values, stored, descale)
    }

    fn tensor<T: Float, const R: usize>(
        self,
        [of_values, of_stored, of_descale, of_given]: [Slot; 4],
        values: TensorRef<'a, T, R>,
        stored: TensorMut<'a, E4M3, R>,
        descale: Descale<'a>,
    ) -> Self {
        let args = self.0.read(of_values, values).write(of_stored, stored);
        Self(match descale {
            Descale::FromAmax(descale) => args.write(of_descale, descale),
            Descale::Given(descale) => args.read(of_given, descale),
            Descale::PackedFromAmax(descale) => args.write(of_descale, descale),
            Descale::PackedGiven(descale) => args.read(of_given, descale),
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
