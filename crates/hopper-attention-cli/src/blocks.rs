//! Block-sparse masks of files and of the command line: which lists there are, and what they keep.

use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};
use hopper_attention::{
    AttnSlice, BlockLists, BlockMask, DType, Dims, ForwardProblem, MASK_BLOCK, MASK_BLOCK_WORDS, Mask, OwnedBlockLists,
    SliceKind, Slot,
};
use hopper_attention_benches::text;
use hopper_attention_verify::blocks::BlocksImage;

use crate::args::BlockMaskArg;
use crate::input::TensorFile;
use crate::values::{Tensors, Values};

/// The lists of a block-sparse mask.
const SLOTS: [Slot; 5] =
    [Slot::MaskBlockCnt, Slot::MaskBlockIdx, Slot::MaskBits, Slot::FullBlockCnt, Slot::FullBlockIdx];

/// Whether a tensor is one of the lists.
pub fn is_list(slot: Slot) -> bool {
    SLOTS.contains(&slot)
}

/// The form of the lists of a file, from the shapes of its tensors. `None` where it has none of them.
pub fn form(input: &TensorFile) -> Result<Option<BlockMask>> {
    if !SLOTS.iter().any(|slot| input.has(slot.name())) {
        return Ok(None);
    }
    let name = Slot::MaskBits.name();
    let (dtype, shape) = input.tensor(name)?;
    ensure!(dtype == DType::I32, "tensor `{name}` has dtype {dtype}; allowed: i32");
    let &[batch, heads, _, words] = shape else {
        bail!("tensor `{name}` has shape {shape:?}; allowed: {}", Slot::MaskBits.axes());
    };
    ensure!(
        words % MASK_BLOCK_WORDS == 0,
        "tensor `{name}` has shape {shape:?}; allowed: a last dimension that is a multiple of {MASK_BLOCK_WORDS}"
    );
    let full = [Slot::FullBlockCnt, Slot::FullBlockIdx].iter().any(|slot| input.has(slot.name()));
    let form = BlockMask::new(words / MASK_BLOCK_WORDS).per_batch(batch != 1).per_head(heads != 1);
    Ok(Some(form.full_blocks(full)))
}

/// The lists, where the file has any.
pub fn lists(tensors: &Tensors) -> Option<BlockLists<'_>> {
    let list = |slot| match tensors.get(&slot) {
        Some(Values::I32(list)) => Some(&list[..]),
        _ => None,
    };
    Some(BlockLists {
        counts: list(Slot::MaskBlockCnt)?,
        indices: list(Slot::MaskBlockIdx)?,
        bits: list(Slot::MaskBits)?,
        full: list(Slot::FullBlockCnt).zip(list(Slot::FullBlockIdx)),
    })
}

/// Lists that a command line asks for.
#[derive(Debug)]
pub enum Lists {
    /// Drawn at random.
    Drawn(BlocksImage),
    /// Made of a description.
    Made(OwnedBlockLists),
}

impl Lists {
    /// The lists of a problem of these sizes, if there are any.
    pub fn new(kind: &BlockMaskArg, dims: Dims, seed: u64) -> Result<Option<Self>> {
        Ok(match kind {
            BlockMaskArg::Kind(kind) => kind.image(dims, seed).map(Self::Drawn),
            BlockMaskArg::Slices(path) => {
                let name = || format!("slices {}", path.display());
                let slices = slices(&text::read(path).with_context(name)?).with_context(name)?;
                Some(Self::Made(OwnedBlockLists::from_slices(dims, &slices).with_context(name)?))
            }
            BlockMaskArg::Prefixes(prefixes) => {
                Some(Self::Made(OwnedBlockLists::from_prefixes(dims, Mask::causal(), prefixes)?))
            }
            // All batch entries have the same spans.
            BlockMaskArg::Spans(spans) => {
                Some(Self::Made(OwnedBlockLists::from_spans(dims, Mask::causal(), &[spans], Mask::Full)?))
            }
        })
    }

    /// Their form.
    pub fn form(&self) -> BlockMask {
        match self {
            Self::Drawn(image) => image.mask,
            Self::Made(lists) => lists.block_mask(),
        }
    }

    /// One of them. Empty where there is none.
    pub fn of(&self, slot: Slot) -> &[i32] {
        match self {
            Self::Drawn(image) => image.inner(slot),
            Self::Made(lists) => {
                lists.operands().into_iter().find(|(of, ..)| *of == slot).map_or(&[], |(_, _, list)| list)
            }
        }
    }

    /// All of them.
    pub fn borrowed(&self) -> BlockLists<'_> {
        match self {
            Self::Drawn(image) => image.borrowed(),
            Self::Made(lists) => lists.as_lists(),
        }
    }
}

/// The slices of a text: one a line, five numbers each. `#` begins a comment.
fn slices(text: &str) -> Result<Vec<AttnSlice>> {
    let mut slices = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let words: Vec<&str> = line.split('#').next().unwrap_or_default().split_whitespace().collect();
        if words.is_empty() {
            continue;
        }
        let numbers = words.iter().map(|word| word.parse().ok()).collect::<Option<Vec<usize>>>();
        let Some([q0, q1, k0, k1, kind]) = numbers.and_then(|numbers| <[usize; 5]>::try_from(numbers).ok()) else {
            bail!("line {number}: `{}`; allowed: five numbers, Q0 Q1 K0 K1 TYPE", text::excerpt(line, 60));
        };
        let kind = SliceKind::try_from(i32::try_from(kind).unwrap_or(i32::MAX));
        slices.push(AttnSlice::new(q0..q1, k0..k1, kind.with_context(|| format!("line {number}"))?));
    }
    Ok(slices)
}

/// What lists say of each block. Lists with wrong contents are read by the rule of [`BlockMask`].
pub struct Table<'a> {
    lists: BlockLists<'a>,
    form: BlockMask,
    /// `[B, H, Qb, Kb]`.
    shape: [usize; 4],
    /// Of each block: `None` where it is hidden, else where its bits are. A full one has none.
    blocks: Vec<Option<Option<usize>>>,
}

impl<'a> Table<'a> {
    /// The table of the lists of a problem of these sizes.
    pub fn new(dims: Dims, form: BlockMask, lists: BlockLists<'a>) -> Self {
        let [queries, keys] = [dims.seqlen_q, dims.seqlen_kv].map(|length| length.div_ceil(MASK_BLOCK));
        let own = |own: bool, size: usize| if own { size } else { 1 };
        let shape = [own(form.is_per_batch(), dims.batch), own(form.is_per_head(), dims.heads_q), queries, keys];
        let clamped = |count: i32, most: usize| usize::try_from(count).unwrap_or(0).min(most);
        let mut blocks = vec![None; shape.iter().product()];
        for row in 0..shape[..3].iter().product() {
            let its: &mut [Option<Option<usize>>] = &mut blocks[row * keys..(row + 1) * keys];
            let listed =
                |indices: &[i32], n: usize| usize::try_from(indices[row * keys + n]).ok().filter(|&at| at < keys);
            if let Some((counts, indices)) = lists.full {
                for at in (0..clamped(counts[row], keys)).filter_map(|n| listed(indices, n)) {
                    its[at] = Some(None);
                }
            }
            for n in 0..clamped(lists.counts[row], form.most_partial()) {
                let Some(at) = listed(lists.indices, n) else { continue };
                its[at] = its[at].or(Some(Some(row * form.most_partial() + n)));
            }
        }
        Self { lists, form, shape, blocks }
    }

    /// How many of some keys the lists keep for a query of a batch entry and head.
    pub fn kept(&self, [batch, head, query]: [usize; 3], keys: Range<usize>) -> usize {
        let [_, heads, queries, of_row] = self.shape;
        let own = |own: bool, at: usize| if own { at } else { 0 };
        let (batch, head) = (own(self.form.is_per_batch(), batch), own(self.form.is_per_head(), head));
        let row = (batch * heads + head) * queries + query / MASK_BLOCK;
        let blocks = if keys.is_empty() { 0..0 } else { keys.start / MASK_BLOCK..keys.end.div_ceil(MASK_BLOCK) };
        let kept = |block: usize| {
            let (from, to) = (keys.start.max(block * MASK_BLOCK), keys.end.min((block + 1) * MASK_BLOCK));
            match self.blocks[row * of_row + block] {
                None => 0,
                Some(None) => to - from,
                Some(Some(bits)) => {
                    let words = &self.lists.bits[bits * MASK_BLOCK_WORDS + query % MASK_BLOCK * (MASK_BLOCK / 32)..];
                    let is_kept = |key: usize| words[key % MASK_BLOCK / 32] as u32 >> (key % 32) & 1 == 1;
                    (from..to).filter(|&key| is_kept(key)).count()
                }
            }
        };
        blocks.map(kept).sum()
    }
}

/// How many pairs of a query and a key the mask and the lists keep, in all heads of all batch entries. Lists with wrong contents
/// are read by the rule of [`BlockMask`].
pub fn kept_pairs(problem: &ForwardProblem, form: BlockMask, lists: &BlockLists<'_>) -> u64 {
    let dims = problem.dims();
    let band = problem.mask().band(dims.seqlen_q, dims.seqlen_kv);
    let table = Table::new(dims, form, *lists);
    let [batch, heads, ..] = table.shape;
    let mut kept = 0;
    for (batch, head) in (0..batch).flat_map(|batch| (0..heads).map(move |head| (batch, head))) {
        for query in 0..dims.seqlen_q {
            let (first, end) = band.keys(query, dims.seqlen_kv);
            kept += table.kept([batch, head, query], first..end) as u64;
        }
    }
    kept * (dims.batch / batch.max(1) * (dims.heads_q / heads.max(1))) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use hopper_attention_verify::blocks::Blocks;

    #[test]
    fn pairs_are_those_of_the_mask_in_the_blocks_of_the_lists() {
        let dims = Dims::new(2, 130, 2, 8).with_seqlen_kv(300);
        let kept = |mask, form, lists: &BlockLists<'_>| {
            let problem = ForwardProblem::builder(DType::F32, dims).mask(mask).block_mask(Some(form)).build();
            kept_pairs(&problem.expect("a legal problem"), form, lists)
        };
        for seed in 0..8 {
            let image = Blocks::All.image(dims, seed).expect("it has lists");
            assert_eq!(kept(Mask::Full, image.mask, &image.borrowed()), 4 * 130 * 300);
            let image = Blocks::Nothing.image(dims, seed).expect("it has lists");
            assert_eq!(kept(Mask::Full, image.mask, &image.borrowed()), 0);
        }
        // The first block of queries has the second block of keys as a full one. Of the second, query 129 has keys 256 and 299.
        let mut bits = vec![0; 2 * MASK_BLOCK_WORDS];
        bits[MASK_BLOCK_WORDS + 4] = 1;
        bits[MASK_BLOCK_WORDS + 5] = 1 << (299 - 256 - 32);
        let (counts, indices, full) = ([-5, 3], [9, 9, 9, 2, 2, 9], [1, 9, 9, 9, 9, 9]);
        let lists = BlockLists { counts: &counts, indices: &indices, bits: &bits, full: Some((&[1, 0], &full)) };
        let form = BlockMask::new(1).full_blocks(true);
        assert_eq!(kept(Mask::Full, form, &lists), 4 * (128 * 128 + 2));
        // Query i sees keys up to i + 170.
        assert_eq!(kept(Mask::causal(), form, &lists), 4 * ((43..128).sum::<u64>() + 43 * 128 + 2));
    }

    #[test]
    fn slices_are_lines_of_five_numbers() {
        let read = slices("# a comment\n0 5 2 9 1  # causal\n\n 5 6 0 0 0\n").unwrap();
        let causal = AttnSlice::new(0..5, 2..9, SliceKind::Causal);
        assert_eq!(read, [causal, AttnSlice::new(5..6, 0..0, SliceKind::Full)]);
        let refused = |text: &str| format!("{:#}", slices(text).unwrap_err());
        assert_eq!(refused("\n1 2 3 4"), "line 2: `1 2 3 4`; allowed: five numbers, Q0 Q1 K0 K1 TYPE");
        assert!(refused("1 2 -3 4 0").starts_with("line 1: `1 2 -3 4 0`"));
        assert!(refused("1 2 3 4 5").starts_with("line 1: type of a slice: 5; allowed: 0 (full)"));
    }
}
