//! The operands of a problem: the tensors that it reads and writes, as a list with one row for each.
//!
//! Whatever must be done for every tensor is one loop over this list: the checks of presence, type, shape, place and
//! overlap, the kernels' descriptors, and the conversion of the C ABI.

use std::fmt;
use std::ops::Deref;

use arrayvec::ArrayVec;

use crate::dtype::DType;
use crate::error::{Error, Result};

/// The most operands that a problem may have.
pub(crate) const MAX_OPERANDS: usize = 48;
/// The most dimensions that an operand may have.
pub(crate) const MAX_RANK: usize = 4;

macro_rules! slots {
    ($($(#[$doc:meta])* $slot:ident => $name:literal, $axes:literal;)*) => {
        /// The name of an operand: a tensor that a pass reads or writes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Slot {
            $($(#[$doc])* $slot,)*
        }

        impl Slot {
            /// All slots.
            pub const ALL: &'static [Self] = &[$(Self::$slot),*];

            /// The name that errors print, such as `q`, `d_lse` or `k.stored`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$slot => $name,)*
                }
            }

            /// The names of the tensor's dimensions, such as `[batch, seqlen, heads, head_dim]`.
            pub const fn axes(self) -> &'static str {
                match self {
                    $(Self::$slot => $axes,)*
                }
            }
        }
    };
}

slots! {
    /// Queries.
    Q => "q", "[batch, seqlen, heads, head_dim]";
    /// Keys.
    K => "k", "[batch, seqlen, heads, head_dim]";
    /// Values.
    V => "v", "[batch, seqlen, heads, head_dim]";
    /// The output.
    O => "o", "[batch, seqlen, heads, head_dim]";
    /// The log-sum-exp of each query's scores.
    Lse => "lse", "[batch, heads, seqlen]";
    /// The descale factors of e4m3 queries.
    DescaleQ => "descale_q", "[batch, heads, blocks]";
    /// The descale factors of e4m3 keys.
    DescaleK => "descale_k", "[batch, heads, blocks]";
    /// The descale factors of e4m3 values.
    DescaleV => "descale_v", "[batch, heads, blocks]";
    /// The factor that an e4m3 output is multiplied by before it is rounded.
    ScaleO => "scale_o", "[number]";
    /// The largest magnitude of the output, before it is scaled and rounded.
    Amax => "amax", "[number]";
    /// Where each sequence begins among the rows of a packed Q: `batch + 1` offsets that do not decrease. Sequence `i` has the
    /// rows from offset `i` to below offset `i + 1`.
    CuSeqlensQ => "cu_seqlens_q", "[batch + 1]";
    /// As [`CuSeqlensQ`](Self::CuSeqlensQ), for packed K and V.
    CuSeqlensKv => "cu_seqlens_kv", "[batch + 1]";
    /// How many rows of each sequence of Q are used, from its first row on.
    SequsedQ => "seqused_q", "[batch]";
    /// How many rows of each sequence of K and V are used, from its first row on.
    SequsedKv => "seqused_kv", "[batch]";
    /// The gradient of the output.
    DO => "d_o", "[batch, seqlen, heads, head_dim]";
    /// The gradient of the log-sum-exp.
    DLse => "d_lse", "[batch, heads, seqlen]";
    /// The gradient of the queries.
    DQ => "d_q", "[batch, seqlen, heads, head_dim]";
    /// The gradient of the keys.
    DK => "d_k", "[batch, seqlen, heads, head_dim]";
    /// The gradient of the values.
    DV => "d_v", "[batch, seqlen, heads, head_dim]";
    /// Queries to quantise.
    QValues => "q.values", "[batch, seqlen, heads, head_dim]";
    /// Quantised queries.
    QStored => "q.stored", "[batch, seqlen, heads, head_dim]";
    /// Descale factors of the queries, which the quantiser makes and writes.
    QDescale => "q.descale", "[batch, heads, blocks]";
    /// Descale factors of the queries, which the caller gives and the quantiser reads.
    QDescaleGiven => "q.descale", "[batch, heads, blocks]";
    /// Keys to quantise.
    KValues => "k.values", "[batch, seqlen, heads, head_dim]";
    /// Quantised keys.
    KStored => "k.stored", "[batch, seqlen, heads, head_dim]";
    /// Descale factors of the keys, which the quantiser makes and writes.
    KDescale => "k.descale", "[batch, heads, blocks]";
    /// Descale factors of the keys, which the caller gives and the quantiser reads.
    KDescaleGiven => "k.descale", "[batch, heads, blocks]";
    /// Values to quantise.
    VValues => "v.values", "[batch, seqlen, heads, head_dim]";
    /// Quantised values.
    VStored => "v.stored", "[batch, seqlen, heads, head_dim]";
    /// Descale factors of the values, which the quantiser makes and writes.
    VDescale => "v.descale", "[batch, heads, blocks]";
    /// Descale factors of the values, which the caller gives and the quantiser reads.
    VDescaleGiven => "v.descale", "[batch, heads, blocks]";
    /// The attention sink of each query head: see [`ForwardProblemBuilder::sinks`](crate::ForwardProblemBuilder::sinks).
    Sinks => "sinks", "[heads]";
    /// The gradient of the attention sinks.
    DSinks => "d_sinks", "[heads]";
    /// The ALiBi slope of each query head: see [`ForwardProblemBuilder::alibi`](crate::ForwardProblemBuilder::alibi). Slopes that
    /// all batches share have no `batch`.
    AlibiSlopes => "alibi_slopes", "[batch, heads]";
    /// The largest score of each query head: see [`ForwardProblemBuilder::max_logits`](crate::ForwardProblemBuilder::max_logits).
    MaxLogits => "max_logits", "[heads]";
    /// The number of partial blocks of each block of queries: see [`BlockMask`](crate::BlockMask).
    MaskBlockCnt => "mask_block_cnt", "[batch, heads, blocks of queries]";
    /// The partial blocks of each block of queries, as indices of blocks of keys.
    MaskBlockIdx => "mask_block_idx", "[batch, heads, blocks of queries, blocks of keys]";
    /// The number of full blocks of each block of queries.
    FullBlockCnt => "full_block_cnt", "[batch, heads, blocks of queries]";
    /// The full blocks of each block of queries, as indices of blocks of keys.
    FullBlockIdx => "full_block_idx", "[batch, heads, blocks of queries, blocks of keys]";
    /// The bits of the pairs of all partial blocks.
    MaskBits => "mask_bits", "[batch, heads, blocks of queries, words]";
    /// What is added to the scores: see [`Bias`](crate::Bias). A dimension of 1 is shared.
    Bias => "bias", "[batch, heads, seqlen_q, seqlen_kv]";
    /// The gradient of the bias.
    DBias => "dbias", "[batch, heads, seqlen_q, seqlen_kv]";
    /// The seed and the offset of dropout, as four words: see [`dropout_state`](crate::dropout_state). In host memory or, for a
    /// plan on a GPU, in the GPU's.
    DropoutState => "dropout_state", "[words of seed and offset]";
    /// The number of elements of q, k and v that were saturated, and that were not finite.
    Counts => "counts", "[q k v, saturated and not finite]";
}

impl Slot {
    /// The number of dimensions.
    pub const fn rank(self) -> usize {
        let (axes, mut commas, mut at) = (self.axes().as_bytes(), 0, 0);
        while at < axes.len() {
            commas += (axes[at] == b',') as usize;
            at += 1;
        }
        commas + 1
    }

    /// Whether a run on a GPU takes the operand from host memory, too, and reads it before the call returns.
    pub(crate) fn may_be_on_the_host(self) -> bool {
        self == Self::DropoutState
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A set of slots, such as the optional operands that a problem was made with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct SlotSet(u64);

const _: () = assert!(Slot::ALL.len() <= u64::BITS as usize);

impl SlotSet {
    /// The same set with or without a slot.
    pub const fn with(self, slot: Slot, present: bool) -> Self {
        let bit = 1 << slot as u64;
        Self(if present { self.0 | bit } else { self.0 & !bit })
    }

    /// Whether the set contains a slot.
    pub const fn contains(self, slot: Slot) -> bool {
        self.0 & 1 << slot as u64 != 0
    }

    /// Refuses a set with a slot that is not in `optional`, the optional operands of a problem.
    pub fn check_among(self, optional: &[Slot]) -> Result<()> {
        match self.iter().find(|slot| !optional.contains(slot)) {
            None => Ok(()),
            Some(other) => {
                let allowed: Vec<_> = optional.iter().map(|slot| slot.name()).collect();
                let (what, got) = (other.name(), "asked for".into());
                Err(Error::Value { what, got, allowed: allowed.join(", ") })
            }
        }
    }

    /// The slots of the set.
    pub fn iter(self) -> impl Iterator<Item = Slot> {
        Slot::ALL.iter().copied().filter(move |&slot| self.contains(slot))
    }
}

/// A map from slots to values, such as the tensors that were given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlotMap<T>(ArrayVec<(Slot, T), MAX_OPERANDS>);

const _: () = assert!(Slot::ALL.len() <= MAX_OPERANDS, "a map holds every slot once");

impl<T> Default for SlotMap<T> {
    fn default() -> Self {
        Self(ArrayVec::new())
    }
}

impl<T> SlotMap<T> {
    /// Sets the value of a slot. An earlier value is replaced.
    pub fn set(&mut self, slot: Slot, value: T) {
        match self.0.iter_mut().find(|(given, _)| *given == slot) {
            Some((_, place)) => *place = value,
            None => self.0.push((slot, value)),
        }
    }

    /// Removes the value of a slot, if there is one.
    pub fn remove(&mut self, slot: Slot) {
        self.0.retain(|(given, _)| *given != slot);
    }

    /// The value of a slot.
    pub fn get(&self, slot: Slot) -> Option<&T> {
        self.iter().find(|(given, _)| *given == slot).map(|(_, value)| value)
    }

    /// All slots that have a value, in the order in which they were first set.
    pub fn iter(&self) -> std::slice::Iter<'_, (Slot, T)> {
        self.0.iter()
    }

    /// As [`iter`](Self::iter), with values that may be changed.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "addresses of cudarc's views are taken by `&mut`"))]
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, (Slot, T)> {
        self.0.iter_mut()
    }
}

/// The operands that have a setter of their own in the arguments of a pass.
///
/// An entry is `setter: access tensor<type, rank> as slot`. It becomes a method with the name `setter`. `run/args.rs` expands
/// the entries. They stand here so that everything about an operand is in one file.
macro_rules! operand_setters {
    (ForwardArgs, $expand:ident) => {
        $expand! { ForwardArgs
            /// The log-sum-exp of each query, written: natural logarithm, `[batch, heads_q, seqlen_q]`.
            ///
            /// It must be given exactly when the problem was made with [`lse(true)`](crate::ForwardProblemBuilder::lse).
            lse: write TensorMut<f32, 3> as Lse;
            /// The factor that O is multiplied by before it is rounded to e4m3, `[1]`.
            ///
            /// It must be given exactly when the output is e4m3. A product with a magnitude above 448 is stored as 448.
            scale_o: read TensorRef<f32, 1> as ScaleO;
            /// The largest magnitude of O, written, `[1]`.
            ///
            /// It must be given exactly when the problem was made with [`amax(true)`](crate::ForwardProblemBuilder::amax).
            amax: write TensorMut<f32, 1> as Amax;
            /// The largest score of each query head, written, `[heads_q]`.
            ///
            /// It must be given exactly when the problem was made with
            /// [`max_logits(true)`](crate::ForwardProblemBuilder::max_logits).
            max_logits: write TensorMut<f32, 1> as MaxLogits;
            /// The seed and the offset of dropout, `[4]`: see [`dropout_state`](crate::dropout_state).
            ///
            /// A run on a GPU takes them from host memory, too. It reads them before it returns, and a CUDA graph keeps them.
            /// With a tensor on the GPU, each launch of a graph reads what is there then.
            ///
            /// They must be given exactly when the problem was made with
            /// [`dropout`](crate::ForwardProblemBuilder::dropout).
            dropout_state: read TensorRef<i32, 1> as DropoutState;
        }
    };
    (BackwardArgs, $expand:ident) => {
        $expand! { BackwardArgs
            /// The gradient of the log-sum-exp, `[batch, heads_q, seqlen_q]`.
            ///
            /// It must be given exactly when the problem was made with [`d_lse(true)`](crate::BackwardProblemBuilder::d_lse).
            d_lse: read TensorRef<f32, 3> as DLse;
            /// The gradient of the attention sinks, written, `[heads_q]`.
            ///
            /// It must be given exactly when the problem was made with
            /// [`d_sinks(true)`](crate::BackwardProblemBuilder::d_sinks).
            d_sinks: write TensorMut<f32, 1> as DSinks;
            /// The seed and the offset of dropout, `[4]`: those that the forward pass read.
            ///
            /// They must be given exactly when the forward problem was made with
            /// [`dropout`](crate::ForwardProblemBuilder::dropout).
            dropout_state: read TensorRef<i32, 1> as DropoutState;
        }
    };
    (QuantizeArgs, $expand:ident) => {
        $expand! { QuantizeArgs
            /// Two numbers for each of q, k and v, written, `[3, 2]`:
            ///
            /// 1. the elements whose magnitude was too large, so that they were stored as 448 (or 14, see
            ///    [`Quantizer`](crate::Quantizer));
            /// 2. the elements that were not finite, so that they were stored as NaN.
            ///
            /// With incoherent processing, elements are counted after the rotation. The numbers are f32, so they are exact up
            /// to 2^24. They are 0 for a tensor that is not quantised.
            counts: write TensorMut<f32, 2> as Counts;
        }
    };
}
pub(crate) use operand_setters;

/// What a pass does to an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Access {
    /// The pass only reads the operand.
    Read,
    /// The pass writes every element of the operand.
    Write,
}

/// Whether the caller gives an operand to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Presence {
    /// The caller must give the operand.
    Required,
    /// The caller must not give the operand. The operand belongs to an option that the problem was made without, or to
    /// another kind of problem.
    Refused,
    /// The caller may give the operand or not.
    Optional,
}

/// One row of a problem's list of operands: a tensor that the problem reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    slot: Slot,
    dtype: DType,
    access: Access,
    presence: Presence,
    /// The option or kind of problem that the operand belongs to, as errors print it. Empty where every problem has the
    /// operand.
    belongs_to: &'static str,
    /// Whether the operand belongs to an option of the problem, and not to its kind.
    is_option: bool,
    shape: [usize; MAX_RANK],
    rank: usize,
    /// Whether the tensor has no dimension `batch`: sequences are packed along its rows, or all batches share it.
    packed: bool,
}

impl Operand {
    /// A tensor that is read, with any options of the problem.
    pub(crate) fn read<const R: usize>(slot: Slot, dtype: DType, shape: [usize; R]) -> Self {
        const { assert!(R >= 1 && R <= MAX_RANK) };
        debug_assert!(R == slot.rank());
        let mut padded = [0; MAX_RANK];
        padded[..R].copy_from_slice(&shape);
        let (access, presence) = (Access::Read, Presence::Required);
        Self { slot, dtype, access, presence, belongs_to: "", is_option: false, shape: padded, rank: R, packed: false }
    }

    /// A tensor that is written, with any options of the problem.
    pub(crate) fn write<const R: usize>(slot: Slot, dtype: DType, shape: [usize; R]) -> Self {
        Self { access: Access::Write, ..Self::read(slot, dtype, shape) }
    }

    /// The same tensor, as one that must be given exactly when the problem was made with `option`.
    pub(crate) fn when(self, made_with: bool, option: &'static str) -> Self {
        Self { is_option: true, ..self.of_kind(made_with, option) }
    }

    /// The same tensor, as one that must be given exactly for problems of the kind `kind`.
    pub(crate) fn of_kind(self, is_of_kind: bool, kind: &'static str) -> Self {
        let presence = if is_of_kind { Presence::Required } else { Presence::Refused };
        Self { presence, belongs_to: kind, ..self }
    }

    /// The same tensor, as one that the caller may give or not.
    pub(crate) fn optional(self) -> Self {
        Self { presence: Presence::Optional, ..self }
    }

    /// The same tensor without its first dimension, where `is_packed`. That dimension is `batch`, and has size 1.
    pub(crate) fn packed(mut self, is_packed: bool) -> Self {
        if is_packed {
            debug_assert!(self.shape[0] == 1 && self.rank > 1 && !self.packed);
            self.shape.rotate_left(1);
            self.rank -= 1;
            self.packed = true;
        }
        self
    }

    /// The same tensor without its first dimension, where all batches share it. That dimension is `batch`, and has size 1.
    pub(crate) fn shared(self, is_shared: bool) -> Self {
        self.packed(is_shared)
    }

    /// The operand's name.
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Whether the tensor is read or written.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Whether the caller must, must not or may give the tensor to a run.
    pub fn presence(&self) -> Presence {
        self.presence
    }

    /// Whether the tensor must be given for every choice of the problem's options.
    pub fn is_always_required(&self) -> bool {
        self.presence == Presence::Required && !self.is_option
    }

    /// The option or kind of problem that the operand belongs to, such as `lse`. Empty where every problem has the
    /// operand.
    pub(crate) fn belongs_to(&self) -> &'static str {
        self.belongs_to
    }

    /// The size of each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// Whether sequences are packed along the rows of the tensor, or all batches share it. It then has one dimension less than
    /// [`Slot::rank`]: `batch` is left out.
    pub fn is_packed(&self) -> bool {
        self.packed
    }

    /// The names of the tensor's dimensions. They are those of [`Slot::axes`], or for a packed tensor without `batch`, such as
    /// `[total, heads, head_dim]`.
    pub fn axes(&self) -> &'static str {
        if !self.packed {
            return self.slot.axes();
        }
        match (self.slot.rank(), self.slot) {
            (4, _) => "[total, heads, head_dim]",
            (_, Slot::Lse | Slot::DLse) => "[heads, total]",
            (_, Slot::AlibiSlopes) => "[heads]",
            _ => "[heads, blocks]",
        }
    }
}

/// The operands of a problem, in the order in which they are checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operands(ArrayVec<Operand, MAX_OPERANDS>);

impl Operands {
    pub(crate) fn of<const N: usize>(operands: [Operand; N]) -> Self {
        const { assert!(N <= MAX_OPERANDS) };
        Self(operands.into_iter().collect())
    }

    /// The row with this name. `None` for an operand of another pass.
    pub fn find(&self, slot: Slot) -> Option<&Operand> {
        self.0.iter().find(|operand| operand.slot == slot)
    }
}

impl Deref for Operands {
    type Target = [Operand];

    fn deref(&self) -> &[Operand] {
        &self.0
    }
}

impl<'a> IntoIterator for &'a Operands {
    type Item = &'a Operand;
    type IntoIter = std::slice::Iter<'a, Operand>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_know_their_slot_shape_and_presence() {
        let list = Operands::of([
            Operand::read(Slot::Q, DType::BF16, [1, 2, 3, 4]),
            Operand::write(Slot::Lse, DType::F32, [1, 3, 2]).when(false, "lse"),
            Operand::write(Slot::Counts, DType::F32, [3, 2]).optional(),
        ]);
        assert_eq!((list.len(), list[0].shape(), list[1].shape()), (3, &[1, 2, 3, 4][..], &[1, 3, 2][..]));
        let row = |slot| list.find(slot).map(|row| (row.access(), row.presence(), row.belongs_to()));
        assert_eq!(row(Slot::Q), Some((Access::Read, Presence::Required, "")));
        assert_eq!(row(Slot::Lse), Some((Access::Write, Presence::Refused, "lse")));
        assert_eq!(row(Slot::Counts), Some((Access::Write, Presence::Optional, "")));
        assert_eq!(row(Slot::DQ), None);
    }

    #[test]
    fn a_set_holds_what_was_put_in() {
        let set =
            SlotSet::default().with(Slot::Lse, true).with(Slot::Counts, true).with(Slot::Q, true).with(Slot::Q, false);
        assert_eq!(set.iter().collect::<Vec<_>>(), [Slot::Lse, Slot::Counts]);
        assert!(set.contains(Slot::Lse) && !set.contains(Slot::Q));
    }

    #[test]
    fn every_slot_has_a_name_and_axes_of_a_possible_rank() {
        for &slot in Slot::ALL {
            assert!(!slot.name().is_empty() && slot.name() == slot.to_string());
            let axes = slot.axes();
            assert!(axes.starts_with('[') && axes.ends_with(']') && slot.rank() <= MAX_RANK, "{axes}");
        }
    }
}
