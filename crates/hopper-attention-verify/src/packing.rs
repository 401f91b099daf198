//! Packed sequences and used lengths of a case, and the arguments of a run with such tensors.

use std::sync::Arc;

use hopper_attention::{
    Args, DType, Dims, Element, ForwardProblem, ForwardProblemBuilder, Layout, Lengths, Result, Slot, TensorMut,
    TensorRef,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

/// Offsets and used lengths, and what happens to rows of no sequence. Nothing for a case whose sequences are all alike.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Packing {
    /// Where sequences of queries begin, if they are packed.
    pub cu_seqlens_q: Option<Vec<i32>>,
    /// Where sequences of keys begin, if they are packed.
    pub cu_seqlens_kv: Option<Vec<i32>>,
    /// How many queries of each sequence are used.
    pub seqused_q: Option<Vec<i32>>,
    /// How many keys of each sequence are used.
    pub seqused_kv: Option<Vec<i32>>,
    /// Whether rows of no sequence are filled.
    pub fill_gaps: bool,
    /// What the problem is told about the queries of the longest sequence, where that side has lists. It may be wrong.
    pub max_seqlen_q: Option<usize>,
    /// The same of keys.
    pub max_seqlen_kv: Option<usize>,
}

/// Which lists a random packing has.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Kind {
    /// Of packed Q, and of packed K and V.
    pub packed: [bool; 2],
    /// Of used queries, and of used keys.
    pub used: [bool; 2],
    /// Whether rows of no sequence are filled.
    pub fill_gaps: bool,
}

/// The most queries and the most keys that one of these sequences has.
pub fn longest(sequences: &[[usize; 2]]) -> [usize; 2] {
    [0, 1].map(|side| sequences.iter().map(|len| len[side]).max().unwrap_or(0))
}

impl Packing {
    /// Random legal lists for `batch` sequences in so many rows of each side. Some sequences are empty, and some rows may be
    /// of no sequence.
    pub fn random(kind: Kind, batch: usize, rows: [usize; 2], seed: u64) -> Self {
        Self::drawn(kind, batch, rows, seed, true)
    }

    /// The same without gaps: every row of a packed side belongs to a sequence, if there is one.
    pub fn whole(kind: Kind, batch: usize, rows: [usize; 2], seed: u64) -> Self {
        Self::drawn(kind, batch, rows, seed, false)
    }

    fn drawn(kind: Kind, batch: usize, rows: [usize; 2], seed: u64, gaps: bool) -> Self {
        let mut rng = StdRng::seed_from_u64(seed ^ 0x9ac_4ed);
        let mut side = |side: usize| {
            let rows = rows[side];
            let offsets = kind.packed[side].then(|| {
                // One list in three has gaps at its ends.
                let (first, last) =
                    if gaps && rng.random_range(0..3) == 0 { (rows / 7, rows - rows / 5) } else { (0, rows) };
                let mut cuts: Vec<usize> = (0..batch + 1).map(|_| rng.random_range(first..=last)).collect();
                cuts.sort_unstable();
                (cuts[0], cuts[batch]) = if batch == 0 { (first, first) } else { (first, last) };
                cuts.into_iter().map(|cut| cut as i32).collect::<Vec<_>>()
            });
            let used = kind.used[side].then(|| {
                let len = |i: usize| offsets.as_ref().map_or(rows as i32, |offsets| offsets[i + 1] - offsets[i]);
                (0..batch).map(|i| rng.random_range(0..=len(i))).collect()
            });
            (offsets, used)
        };
        let ((cu_seqlens_q, seqused_q), (cu_seqlens_kv, seqused_kv)) = (side(0), side(1));
        let some = kind.packed.iter().chain(&kind.used).any(|&list| list);
        let fill_gaps = kind.fill_gaps && some;
        Self { cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, fill_gaps, ..Self::default() }
    }

    /// The same with hints of the longest sequence, which follow from a seed: none, 0, 1, less than some have, more than there can
    /// be.
    #[must_use]
    pub fn hinted(mut self, seed: u64) -> Self {
        let hint = |number: u64| [None, Some(0), Some(1), Some(20), Some(i32::MAX as usize)][(number % 5) as usize];
        let has = |lists: [&Option<Vec<i32>>; 2]| lists.into_iter().any(Option::is_some);
        self.max_seqlen_q = hint(seed).filter(|_| has([&self.cu_seqlens_q, &self.seqused_q]));
        self.max_seqlen_kv = hint(seed / 5).filter(|_| has([&self.cu_seqlens_kv, &self.seqused_kv]));
        self
    }

    /// The legal lists that these stand for, which may hold any numbers: those that a GPU makes of them.
    pub fn clamped(&self, problem: &ForwardProblem) -> Self {
        let own: Vec<_> = self.lengths().sequences(problem).collect();
        let whole: Vec<_> =
            Lengths { seqused_q: None, seqused_kv: None, ..self.lengths() }.sequences(problem).collect();
        let number = |row: usize| i32::try_from(row).expect("a row of a tensor");
        let offsets = |list: &Option<Vec<i32>>, side: usize| {
            list.as_ref().map(|list| {
                let begins = whole.iter().map(|rows| rows[side].begin);
                let end = whole.last().map_or(0, |rows| rows[side].range().end);
                begins.chain([end]).take(list.len()).map(number).collect()
            })
        };
        let used = |list: &Option<Vec<i32>>, side: usize| {
            list.as_ref().map(|_| own.iter().map(|rows| number(rows[side].len)).collect())
        };
        Self {
            cu_seqlens_q: offsets(&self.cu_seqlens_q, 0),
            cu_seqlens_kv: offsets(&self.cu_seqlens_kv, 1),
            seqused_q: used(&self.seqused_q, 0),
            seqused_kv: used(&self.seqused_kv, 1),
            ..self.clone()
        }
    }

    /// Whether there is no list.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// The lists, as the oracle takes them.
    pub fn lengths(&self) -> Lengths<'_> {
        Lengths {
            cu_seqlens_q: self.cu_seqlens_q.as_deref(),
            cu_seqlens_kv: self.cu_seqlens_kv.as_deref(),
            seqused_q: self.seqused_q.as_deref(),
            seqused_kv: self.seqused_kv.as_deref(),
        }
    }

    /// How many queries and keys each sequence of a problem of these sizes has.
    ///
    /// # Errors
    /// No problem has these sizes.
    pub fn sequences(&self, dims: Dims) -> Result<Vec<[usize; 2]>> {
        let problem = self.options(ForwardProblem::builder(DType::F32, dims)).build()?;
        Ok(self.lengths().sequences(&problem).map(|sides| sides.map(|rows| rows.len)).collect())
    }

    /// The lists by the names of their operands.
    pub fn lists(&self) -> impl Iterator<Item = (Slot, &[i32])> {
        let Lengths { cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, .. } = self.lengths();
        let lists = [
            (Slot::CuSeqlensQ, cu_seqlens_q),
            (Slot::CuSeqlensKv, cu_seqlens_kv),
            (Slot::SequsedQ, seqused_q),
            (Slot::SequsedKv, seqused_kv),
        ];
        lists.into_iter().filter_map(|(slot, list)| Some((slot, list?)))
    }

    /// A problem with these lists as operands.
    pub fn options(&self, options: ForwardProblemBuilder) -> ForwardProblemBuilder {
        let options = self.lists().fold(options, |options, (slot, _)| options.operand(slot, true));
        let options = if self.fill_gaps { options.fill_gaps(true) } else { options };
        let options = self.max_seqlen_q.into_iter().fold(options, |options, hint| options.max_seqlen_q(hint));
        self.max_seqlen_kv.into_iter().fold(options, |options, hint| options.max_seqlen_kv(hint))
    }

    /// Adds the lists, in host memory, to the arguments of a run.
    pub fn host_args<'a>(&'a self, args: Args<'a>) -> Args<'a> {
        self.lists().fold(args, |args, (slot, list)| {
            let layout = Layout::contiguous([list.len()]).expect("a short list");
            args.read(slot, TensorRef::host(list, layout).expect("a fitting layout"))
        })
    }

    /// Which rows of Q and of K belong to a sequence. `None` for a case without lists.
    pub fn belonging(&self, problem: &ForwardProblem) -> Option<[Rows; 2]> {
        if self.is_none() {
            return None;
        }
        let shapes = [problem.q_shape(), problem.k_shape()];
        let mut belongs = shapes.map(|[batch, seqlen, ..]| vec![false; batch * seqlen]);
        for rows in self.lengths().sequences(problem) {
            for ((belongs, [_, seqlen, ..]), rows) in belongs.iter_mut().zip(shapes).zip(rows) {
                rows.range().for_each(|row| belongs[rows.batch * seqlen + row] = true);
            }
        }
        let [q, kv] = belongs;
        Some([q, kv].map(|belongs| Rows { belongs: belongs.into(), filled: self.fill_gaps }))
    }
}

/// Which rows `[batch, seqlen]` of a tensor belong to a sequence.
#[derive(Clone, Debug)]
pub struct Rows {
    belongs: Arc<[bool]>,
    filled: bool,
}

impl Rows {
    /// Whether a row belongs to a sequence. `row` is `batch * seqlen + token`.
    pub fn belongs(&self, row: usize) -> bool {
        self.belongs[row]
    }

    /// Whether a run writes the row of an output.
    pub fn is_written(&self, row: usize) -> bool {
        self.filled || self.belongs[row]
    }
}

/// A layout without its first dimension, which has size 1.
pub(crate) fn without_batch<const R: usize, const S: usize>(layout: Layout<R>) -> Layout<S> {
    let (shape, stride) = (layout.shape(), layout.stride());
    assert!(shape[0] == 1 && S + 1 == R, "{layout:?}");
    let rest = |all: &[i64]| all[1..].to_vec().try_into().expect("one dimension less");
    let shape = shape[1..].to_vec().try_into().expect("one dimension less");
    Layout::with_strides(shape, rest(&stride)).expect("a part of a legal layout")
}

macro_rules! given {
    ($($read:ident $write:ident: $rank:literal $packed:literal;)*) => {$(
        /// Adds a tensor in host memory that is read. The layout has a batch, also where the tensor is packed.
        pub fn $read<'a, T: Element>(
            args: Args<'a>,
            slot: Slot,
            data: &'a [T],
            layout: Layout<$rank>,
            packed: bool,
        ) -> Args<'a> {
            if packed {
                let layout = without_batch::<$rank, $packed>(layout);
                return args.read(slot, TensorRef::host(data, layout).expect("a fitting layout"));
            }
            args.read(slot, TensorRef::host(data, layout).expect("a fitting layout"))
        }

        /// The same for a tensor that is written.
        pub fn $write<'a, T: Element>(
            args: Args<'a>,
            slot: Slot,
            data: &'a mut [T],
            layout: Layout<$rank>,
            packed: bool,
        ) -> Args<'a> {
            if packed {
                let layout = without_batch::<$rank, $packed>(layout);
                return args.write(slot, TensorMut::host(data, layout).expect("a fitting layout"));
            }
            args.write(slot, TensorMut::host(data, layout).expect("a fitting layout"))
        }
    )*};
}

given! {
    read write: 4 3;
    read_numbers write_numbers: 3 2;
}

#[cfg(test)]
mod tests {
    use hopper_attention::{DType, Dims};

    use super::*;

    #[test]
    fn clamped_lists_are_legal_and_of_the_same_rows() {
        let garbage = Packing {
            cu_seqlens_q: Some(vec![5, i32::MIN, 9, 4, i32::MAX]),
            seqused_q: Some(vec![7, 2, -1, 3]),
            seqused_kv: Some(vec![i32::MAX, -3, 4, 0]),
            ..Packing::default()
        };
        let problem = garbage.options(ForwardProblem::builder(DType::BF16, Dims::new(4, 12, 1, 8))).build().unwrap();
        let clamped = garbage.clamped(&problem);
        clamped.lengths().check(&problem).unwrap();
        assert!(clamped.lengths().sequences(&problem).eq(garbage.lengths().sequences(&problem)));
        assert_eq!(clamped.cu_seqlens_q.as_deref(), Some(&[5, 5, 9, 9, 12][..]));
        assert_eq!(clamped.seqused_q.as_deref(), Some(&[0, 2, 0, 3][..]));
        assert_eq!(clamped.clamped(&problem), clamped);
    }

    /// Every hint for either side is drawn, and none for a side without lists, which no problem takes.
    #[test]
    fn hints_are_drawn_for_sides_that_have_lists() {
        let dims = Dims::new(3, 90, 1, 8);
        for (packed, used) in [([true; 2], [false; 2]), ([true, false], [false; 2]), ([false; 2], [false, true])] {
            let kind = Kind { packed, used, fill_gaps: false };
            let mut seen = [Vec::new(), Vec::new()];
            for seed in 0..25 {
                let packing = Packing::random(kind, 3, [90; 2], seed).hinted(seed);
                packing.options(ForwardProblem::builder(DType::BF16, dims)).build().unwrap();
                seen[0].push(packing.max_seqlen_q);
                seen[1].push(packing.max_seqlen_kv);
            }
            for (side, mut hints) in seen.into_iter().enumerate() {
                hints.sort_unstable();
                hints.dedup();
                assert_eq!(hints.len(), if packed[side] || used[side] { 5 } else { 1 }, "{hints:?}");
            }
        }
    }
}
