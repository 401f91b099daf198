//! Options for sequences of different lengths: packed tensors, used lengths, and what happens to rows of no sequence.

use std::fmt;

use super::dims::Dims;
use crate::error::{Error, Result};
use crate::operand::{Slot, SlotSet};

/// The operands that give lengths and offsets of sequences.
pub(super) const LENGTHS: [Slot; 4] = [Slot::CuSeqlensQ, Slot::CuSeqlensKv, Slot::SequsedQ, Slot::SequsedKv];

/// The options that are not operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Packing {
    pub fill_gaps: bool,
    pub max_seqlen_q: Option<usize>,
    pub max_seqlen_kv: Option<usize>,
}

impl Packing {
    /// Refuses options that have no meaning for a problem with these operands.
    pub fn check(&self, asked_for: SlotSet) -> Result<()> {
        let has = |slots: &[Slot]| slots.iter().any(|&slot| asked_for.contains(slot));
        let refuse =
            |what, got: String, allowed: &str| Err(Error::Value { what, got, allowed: format!("with {allowed} only") });
        if self.fill_gaps && !has(&LENGTHS) {
            return refuse("fill_gaps", "asked for".into(), "packed tensors or used lengths");
        }
        let hints = [
            ("max_seqlen_q", self.max_seqlen_q, [Slot::CuSeqlensQ, Slot::SequsedQ], "packed queries, or used_q"),
            ("max_seqlen_kv", self.max_seqlen_kv, [Slot::CuSeqlensKv, Slot::SequsedKv], "packed keys, or used_kv"),
        ];
        for (what, hint, slots, allowed) in hints {
            if let Some(hint) = hint.filter(|_| !has(&slots)) {
                return refuse(what, hint.to_string(), allowed);
            }
        }
        Ok(())
    }

    /// Prints what can change which kernel is the fastest: the packed sides, the used lengths and the hints.
    pub fn text(&self, asked_for: SlotSet) -> String {
        let mut text = String::new();
        for (name, q, kv) in
            [("packed", Slot::CuSeqlensQ, Slot::CuSeqlensKv), ("used", Slot::SequsedQ, Slot::SequsedKv)]
        {
            match (asked_for.contains(q), asked_for.contains(kv)) {
                (false, false) => {}
                (true, true) => text += &format!(" {name} q kv"),
                (true, false) => text += &format!(" {name} q"),
                (false, true) => text += &format!(" {name} kv"),
            }
        }
        for (name, hint) in [("max_seqlen_q", self.max_seqlen_q), ("max_seqlen_kv", self.max_seqlen_kv)] {
            if let Some(hint) = hint {
                text += &format!(" {name} {hint}");
            }
        }
        text
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.fill_gaps { " fill_gaps" } else { "" })
    }
}

/// A shape `[batch, ..]` with the batch that a tensor has: 1 where its sequences are packed, so that all rows follow each other.
pub(super) fn batch_of(dims: &Dims, packed: bool) -> usize {
    if packed { 1 } else { dims.batch }
}
