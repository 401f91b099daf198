//! Lists of blocks of slices, as MagiAttention's flexible flash attention (FFA) describes masks.

use std::fmt;
use std::ops::Range;

use super::owned::{Keys, OwnedBlockLists};
use crate::error::{Error, Result};
use crate::problem::{BlockMask, Dims, MASK_BLOCK};

/// Which pairs of a slice are kept.
///
/// A slice has the queries from `q0` to below `q1` and the keys from `k0` to below `k1`.
///
/// | number | kind | keeps query `q` and key `k` of the slice if | that is |
/// | --- | --- | --- | --- |
/// | 0 | [`Full`](Self::Full) | always | the rectangle |
/// | 1 | [`Causal`](Self::Causal) | `k - k1 <= q - q1` | the diagonal ends in the bottom right corner: the last query sees the last key |
/// | 2 | [`InverseCausal`](Self::InverseCausal) | `k - k0 >= q - q0` | the diagonal begins in the top left corner: the first query sees every key |
/// | 3 | [`BiCausal`](Self::BiCausal) | both | the band between the two diagonals. Nothing, with more queries than keys |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SliceKind {
    /// All pairs.
    #[default]
    Full,
    /// Keys up to the diagonal that ends in the bottom right corner.
    Causal,
    /// Keys from the diagonal on that begins in the top left corner.
    InverseCausal,
    /// Keys between both diagonals.
    BiCausal,
}

impl TryFrom<i32> for SliceKind {
    type Error = Error;

    /// The kind with this number, as MagiAttention's `attn_type_map` has it.
    fn try_from(number: i32) -> Result<Self> {
        match number {
            0 => Ok(Self::Full),
            1 => Ok(Self::Causal),
            2 => Ok(Self::InverseCausal),
            3 => Ok(Self::BiCausal),
            _ => {
                let allowed = "0 (full), 1 (causal), 2 (inverse causal) or 3 (both)".into();
                Err(Error::Value { what: "type of a slice", got: number.to_string(), allowed })
            }
        }
    }
}

/// A slice of the pairs of queries and keys, for [`OwnedBlockLists::from_slices`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct AttnSlice {
    /// The queries.
    pub queries: Range<usize>,
    /// The keys.
    pub keys: Range<usize>,
    /// Which of their pairs are kept.
    pub kind: SliceKind,
}

impl AttnSlice {
    /// A slice of these queries and keys.
    pub const fn new(queries: Range<usize>, keys: Range<usize>, kind: SliceKind) -> Self {
        Self { queries, keys, kind }
    }

    /// The keys that a query of the slice keeps.
    fn keys_of(&self, query: usize) -> Keys {
        let Range { start, end } = self.keys;
        // The first query of the slice has the first key behind it, and the last one the last key.
        let (before, behind) = (query - self.queries.start, self.queries.end - 1 - query);
        match self.kind {
            SliceKind::Full => [start, end],
            SliceKind::Causal => [start, end.saturating_sub(behind)],
            SliceKind::InverseCausal => [start + before, end],
            SliceKind::BiCausal => [start + before, end.saturating_sub(behind)],
        }
    }

    fn check(&self, number: usize, dims: &Dims) -> Result<()> {
        for (name, range, seqlen) in [("queries", &self.queries, dims.seqlen_q), ("keys", &self.keys, dims.seqlen_kv)] {
            if range.start > range.end || range.end > seqlen {
                let got = format!("{name} {} to {} of slice {number}", range.start, range.end);
                let allowed = format!("0 to {seqlen}, and no end before its start");
                return Err(Error::Value { what: "slices", got, allowed });
            }
        }
        Ok(())
    }
}

impl fmt::Display for AttnSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            SliceKind::Full => "full",
            SliceKind::Causal => "causal",
            SliceKind::InverseCausal => "inverse causal",
            SliceKind::BiCausal => "bi-causal",
        };
        let Self { queries, keys, .. } = self;
        write!(f, "{kind} queries {} to {} keys {} to {}", queries.start, queries.end, keys.start, keys.end)
    }
}

impl OwnedBlockLists {
    /// The lists that keep the pairs that one of the slices keeps. [`SliceKind`] says which those are. All batch entries and
    /// heads share the lists.
    ///
    /// Queries of several slices have one row of lists: they are computed in one pass, and no partial results are merged. A
    /// query of no slice keeps nothing. The problem's own mask holds beside the lists, and is usually
    /// [`Mask::Full`](crate::Mask::Full).
    ///
    /// # Errors
    /// - [`Error::Value`]: a range is not within the sequences, or ends before it starts. Two slices keep one pair, which
    ///   MagiAttention would count twice: the error names both and a pair. Slices whose rectangles overlap are no error where they
    ///   keep no pair in common.
    /// - As [`from_predicate`](Self::from_predicate).
    pub fn from_slices(dims: Dims, slices: &[AttnSlice]) -> Result<Self> {
        dims.check()?;
        let mut of_blocks: Vec<Vec<usize>> = vec![Vec::new(); dims.seqlen_q.div_ceil(MASK_BLOCK)];
        for (number, slice) in slices.iter().enumerate() {
            slice.check(number, &dims)?;
            if !slice.queries.is_empty() {
                let blocks = slice.queries.start / MASK_BLOCK..slice.queries.end.div_ceil(MASK_BLOCK);
                of_blocks[blocks].iter_mut().for_each(|numbers| numbers.push(number));
            }
        }
        let mut numbered: Vec<(Keys, usize)> = Vec::new();
        Self::from_keys(dims, BlockMask::new(0), |[_, _, query], kept| {
            let its = of_blocks[query / MASK_BLOCK].iter().map(|&number| (&slices[number], number));
            let its = its.filter(|(slice, _)| slice.queries.contains(&query));
            numbered.clear();
            numbered.extend(
                its.map(|(slice, number)| (slice.keys_of(query), number)).filter(|([first, end], _)| first < end),
            );
            numbered.sort_unstable();
            if let Some(both) = numbered.windows(2).find(|both| both[1].0[0] < both[0].0[1]) {
                return Err(twice(slices, [both[0].1, both[1].1], [query, both[1].0[0]]));
            }
            kept.extend(numbered.iter().map(|(keys, _)| keys));
            Ok(())
        })
    }
}

/// Two slices that keep one pair.
fn twice(slices: &[AttnSlice], mut numbers: [usize; 2], [query, key]: [usize; 2]) -> Error {
    numbers.sort_unstable();
    let [a, b] = numbers;
    let got = format!("slice {a} ({}) and slice {b} ({}) both keep query {query} and key {key}", slices[a], slices[b]);
    Error::Value { what: "slices", got, allowed: "slices that have no pair in common".into() }
}
