//! Block-sparse masks of files: which lists a file has, and what they keep.

use anyhow::{Result, bail, ensure};
use hopper_attention::{BlockLists, BlockMask, DType, ForwardProblem, MASK_BLOCK, MASK_BLOCK_WORDS, Slot};

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

/// How many pairs of a query and a key the mask and the lists keep, in all heads of all batch entries. Lists with wrong contents
/// are read by the rule of [`BlockMask`].
pub fn kept_pairs(problem: &ForwardProblem, form: BlockMask, lists: &BlockLists<'_>) -> u64 {
    let dims = problem.dims();
    let band = problem.mask().band(dims.seqlen_q, dims.seqlen_kv);
    let [queries, keys] = [dims.seqlen_q, dims.seqlen_kv].map(|length| length.div_ceil(MASK_BLOCK));
    let own = |own: bool, size: usize| if own { size } else { 1 };
    let (batch, heads) = (own(form.is_per_batch(), dims.batch), own(form.is_per_head(), dims.heads_q));
    let clamped = |count: i32, most: usize| usize::try_from(count).unwrap_or(0).min(most);
    let mut kept = 0;
    for row in 0..batch * heads * queries {
        // What is known of each block: `None`, full, or its place in the list of partial blocks.
        let mut blocks: Vec<Option<Option<usize>>> = vec![None; keys];
        let listed = |indices: &[i32], n: usize| usize::try_from(indices[row * keys + n]).ok().filter(|&at| at < keys);
        if let Some((counts, indices)) = lists.full {
            for at in (0..clamped(counts[row], keys)).filter_map(|n| listed(indices, n)) {
                blocks[at] = Some(None);
            }
        }
        for n in 0..clamped(lists.counts[row], form.most_partial()) {
            let Some(at) = listed(lists.indices, n) else { continue };
            blocks[at] = blocks[at].or(Some(Some(n)));
        }
        let bits = |n: usize| &lists.bits[(row * form.most_partial() + n) * MASK_BLOCK_WORDS..][..MASK_BLOCK_WORDS];
        let first_query = row % queries * MASK_BLOCK;
        for query in first_query..(first_query + MASK_BLOCK).min(dims.seqlen_q) {
            let (first, end) = band.keys(query, dims.seqlen_kv);
            for (block, kind) in blocks.iter().enumerate().filter_map(|(block, kind)| Some((block, (*kind)?))) {
                let (from, to) = (first.max(block * MASK_BLOCK), end.min((block + 1) * MASK_BLOCK));
                kept += match kind {
                    None => to.saturating_sub(from),
                    Some(n) => {
                        let words = &bits(n)[query % MASK_BLOCK * (MASK_BLOCK / 32)..];
                        let is_kept = |key: usize| words[key % MASK_BLOCK / 32] as u32 >> (key % 32) & 1 == 1;
                        (from..to).filter(|&key| is_kept(key)).count()
                    }
                } as u64;
            }
        }
    }
    kept * (dims.batch / batch.max(1) * (dims.heads_q / heads.max(1))) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use hopper_attention::{Dims, Mask};
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
}
