//! What a problem reads and writes, as a list: one row for each tensor. Everything that must be done once a tensor
//! (presence, type, shape, place, overlap, kernel descriptors, the C ABI's conversion) is one loop over this list.

use std::fmt;
use std::ops::Deref;

use arrayvec::ArrayVec;

use crate::dtype::DType;
use crate::error::{Error, Result};

/// The most operands that a problem has.
pub(crate) const MAX_OPERANDS: usize = 32;
/// The most dimensions that an operand has.
pub(crate) const MAX_RANK: usize = 4;

macro_rules! slots {
    ($($(#[$doc:meta])* $slot:ident => $name:literal, $axes:literal;)*) => {
        /// The name of an operand: which tensor of a pass is meant.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Slot {
            $($(#[$doc])* $slot,)*
        }

        impl Slot {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$slot),*];

            /// What errors call it: `q`, `d_lse`, `k.stored`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$slot => $name,)*
                }
            }

            /// The names of its dimensions, such as `[batch, seqlen, heads, head_dim]`.
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
    /// The log-sum-exp of each row of scores.
    Lse => "lse", "[batch, heads, seqlen]";
    /// The descale factors of e4m3 queries.
    DescaleQ => "descale_q", "[batch, heads, blocks]";
    /// The descale factors of e4m3 keys.
    DescaleK => "descale_k", "[batch, heads, blocks]";
    /// The descale factors of e4m3 values.
    DescaleV => "descale_v", "[batch, heads, blocks]";
    /// What an e4m3 output is multiplied by before it is rounded.
    ScaleO => "scale_o", "[number]";
    /// The largest magnitude of the output.
    Amax => "amax", "[number]";
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
    /// The factors of the queries, written.
    QDescale => "q.descale", "[batch, heads, blocks]";
    /// The factors of the queries, read.
    QDescaleGiven => "q.descale", "[batch, heads, blocks]";
    /// Keys to quantise.
    KValues => "k.values", "[batch, seqlen, heads, head_dim]";
    /// Quantised keys.
    KStored => "k.stored", "[batch, seqlen, heads, head_dim]";
    /// The factors of the keys, written.
    KDescale => "k.descale", "[batch, heads, blocks]";
    /// The factors of the keys, read.
    KDescaleGiven => "k.descale", "[batch, heads, blocks]";
    /// Values to quantise.
    VValues => "v.values", "[batch, seqlen, heads, head_dim]";
    /// Quantised values.
    VStored => "v.stored", "[batch, seqlen, heads, head_dim]";
    /// The factors of the values, written.
    VDescale => "v.descale", "[batch, heads, blocks]";
    /// The factors of the values, read.
    VDescaleGiven => "v.descale", "[batch, heads, blocks]";
    /// How many elements of q, k and v were saturated, and how many were not finite.
    Counts => "counts", "[q k v, saturated and not finite]";
}

impl Slot {
    /// How many dimensions it has.
    pub const fn rank(self) -> usize {
        let (axes, mut commas, mut at) = (self.axes().as_bytes(), 0, 0);
        while at < axes.len() {
            commas += (axes[at] == b',') as usize;
            at += 1;
        }
        commas + 1
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Some slots: the optional operands that a problem was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct SlotSet(u64);

const _: () = assert!(Slot::ALL.len() <= u64::BITS as usize);

impl SlotSet {
    /// The same set with or without a slot.
    pub const fn with(self, slot: Slot, present: bool) -> Self {
        let bit = 1 << slot as u64;
        Self(if present { self.0 | bit } else { self.0 & !bit })
    }

    /// Whether a slot is one of them.
    pub const fn contains(self, slot: Slot) -> bool {
        self.0 & 1 << slot as u64 != 0
    }

    /// Refuses a slot that is none of a problem's optional operands.
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

    /// All of them.
    pub fn iter(self) -> impl Iterator<Item = Slot> {
        Slot::ALL.iter().copied().filter(move |&slot| self.contains(slot))
    }
}

/// Something of each of some operands, such as the tensor that was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlotMap<T>(ArrayVec<(Slot, T), MAX_OPERANDS>);

const _: () = assert!(Slot::ALL.len() <= MAX_OPERANDS, "there is room for every slot once");

impl<T> Default for SlotMap<T> {
    fn default() -> Self {
        Self(ArrayVec::new())
    }
}

impl<T> SlotMap<T> {
    /// Puts it in, in place of what was there before.
    pub fn set(&mut self, slot: Slot, value: T) {
        match self.0.iter_mut().find(|(given, _)| *given == slot) {
            Some((_, place)) => *place = value,
            None => self.0.push((slot, value)),
        }
    }

    /// Takes it out.
    pub fn remove(&mut self, slot: Slot) {
        self.0.retain(|(given, _)| *given != slot);
    }

    /// What is there of an operand.
    pub fn get(&self, slot: Slot) -> Option<&T> {
        self.iter().find(|(given, _)| *given == slot).map(|(_, value)| value)
    }

    /// All of it, in the order in which it was put in.
    pub fn iter(&self) -> std::slice::Iter<'_, (Slot, T)> {
        self.0.iter()
    }

    /// As [`iter`](Self::iter), to be changed.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "addresses of cudarc's views are taken by `&mut`"))]
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, (Slot, T)> {
        self.0.iter_mut()
    }
}

/// The operands that arguments are given one by one: `setter: way tensor<type, rank> as slot`, each of which becomes a method of
/// the pass's arguments. (`run/args.rs` expands them; they stand here so that an operand is described in one place.)
macro_rules! operand_setters {
    (ForwardArgs, $expand:ident) => {
        $expand! { ForwardArgs
            /// The log-sum-exp of each row of scores, natural log, `[batch, heads_q, seqlen_q]`: given exactly when the problem
            /// was made with [`lse(true)`](crate::ForwardProblemBuilder::lse).
            lse: write TensorMut<f32, 3> as Lse;
            /// What O is multiplied by before it is rounded to e4m3, `[1]`: given exactly when the output is e4m3. What is
            /// beyond 448 then is stored as 448.
            scale_o: read TensorRef<f32, 1> as ScaleO;
            /// The largest magnitude of O, `[1]`: given exactly when the problem was made with
            /// [`amax(true)`](crate::ForwardProblemBuilder::amax).
            amax: write TensorMut<f32, 1> as Amax;
        }
    };
    (BackwardArgs, $expand:ident) => {
        $expand! { BackwardArgs
            /// The gradient of the log-sum-exp, `[batch, heads_q, seqlen_q]`: given exactly when the problem was made with
            /// [`d_lse(true)`](crate::BackwardProblemBuilder::d_lse).
            d_lse: read TensorRef<f32, 3> as DLse;
        }
    };
    (QuantizeArgs, $expand:ident) => {
        $expand! { QuantizeArgs
            /// Where to count, `[3, 2]`: for q, k and v, the elements whose magnitude was too large and was stored as 448 (or
            /// 14, see [`Quantizer`](crate::Quantizer)), and those that were not finite and were stored as NaN (with incoherent
            /// processing, after the rotation). In f32, so exact up to 2^24. 0 for what was not quantised.
            counts: write TensorMut<f32, 2> as Counts;
        }
    };
}
pub(crate) use operand_setters;

/// What a pass does to an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Access {
    /// It is only read.
    Read,
    /// Every element is written.
    Write,
}

/// Whether an operand is given to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Presence {
    /// Always.
    Required,
    /// Never: the problem was made without what the operand belongs to.
    Refused,
    /// As the caller likes.
    Optional,
}

/// One row of a problem's list: a tensor that the problem reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    slot: Slot,
    dtype: DType,
    access: Access,
    presence: Presence,
    /// What the problem must have been made with for this operand to be there, in words; empty where it always is.
    belongs_to: &'static str,
    /// Whether an option of the problem asks for it.
    is_option: bool,
    shape: [usize; MAX_RANK],
    rank: usize,
}

impl Operand {
    /// A tensor that is read, whatever the problem's options.
    pub(crate) fn read<const R: usize>(slot: Slot, dtype: DType, shape: [usize; R]) -> Self {
        const { assert!(R >= 1 && R <= MAX_RANK) };
        debug_assert!(R == slot.rank());
        let mut padded = [0; MAX_RANK];
        padded[..R].copy_from_slice(&shape);
        let (access, presence) = (Access::Read, Presence::Required);
        Self { slot, dtype, access, presence, belongs_to: "", is_option: false, shape: padded, rank: R }
    }

    /// A tensor that is written, whatever the problem's options.
    pub(crate) fn write<const R: usize>(slot: Slot, dtype: DType, shape: [usize; R]) -> Self {
        Self { access: Access::Write, ..Self::read(slot, dtype, shape) }
    }

    /// The same tensor, given exactly when the problem was made with `option`.
    pub(crate) fn when(self, made_with: bool, option: &'static str) -> Self {
        Self { is_option: true, ..self.of_kind(made_with, option) }
    }

    /// The same tensor, given exactly for problems of one kind.
    pub(crate) fn of_kind(self, is_of_kind: bool, kind: &'static str) -> Self {
        let presence = if is_of_kind { Presence::Required } else { Presence::Refused };
        Self { presence, belongs_to: kind, ..self }
    }

    /// The same tensor, given or not as the caller likes.
    pub(crate) fn optional(self) -> Self {
        Self { presence: Presence::Optional, ..self }
    }

    /// Which tensor it is.
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Whether it is read or written.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Whether a run must be given it.
    pub fn presence(&self) -> Presence {
        self.presence
    }

    /// Whether it must be given, and not because an option of the problem asks for it.
    pub fn is_always_required(&self) -> bool {
        self.presence == Presence::Required && !self.is_option
    }

    /// What a problem must have been made with to have it, such as `lse(true)`; empty where every problem has it.
    pub(crate) fn belongs_to(&self) -> &'static str {
        self.belongs_to
    }

    /// The size of each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
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

    /// The row of an operand; `None` for one of another pass.
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
            Operand::write(Slot::Lse, DType::F32, [1, 3, 2]).when(false, "lse(true)"),
            Operand::write(Slot::Counts, DType::F32, [3, 2]).optional(),
        ]);
        assert_eq!((list.len(), list[0].shape(), list[1].shape()), (3, &[1, 2, 3, 4][..], &[1, 3, 2][..]));
        let row = |slot| list.find(slot).map(|row| (row.access(), row.presence(), row.belongs_to()));
        assert_eq!(row(Slot::Q), Some((Access::Read, Presence::Required, "")));
        assert_eq!(row(Slot::Lse), Some((Access::Write, Presence::Refused, "lse(true)")));
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
