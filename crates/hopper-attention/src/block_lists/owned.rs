//! Lists of blocks in memory of their own, made of the keys that each query keeps.

use crate::blocks::BlockLists;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::memory::reserved;
use crate::operand::Slot;
use crate::problem::{BlockMask, Dims, MASK_BLOCK, MASK_BLOCK_WORDS};
use crate::run::Args;
use crate::tensor::TensorRef;

/// What the lists are called where memory lacks.
const LISTS: &str = "lists of blocks";
/// The words of a query in a partial block.
const QUERY_WORDS: usize = MASK_BLOCK / 32;

/// Some keys of a query: the first, and the one after the last.
pub(super) type Keys = [usize; 2];

/// Lists of blocks in host memory, made of another description of a mask. They are the operands of a problem with a
/// [`BlockMask`].
///
/// | made from | the lists keep a pair if | its cost grows with |
/// | --- | --- | --- |
/// | [`from_predicate`](Self::from_predicate) | the function says so | pairs |
/// | [`from_slices`](Self::from_slices) | a slice of queries and keys keeps it, as MagiAttention's FFA has them | queries and blocks |
/// | [`from_documents`](Self::from_documents) | query and key are of one document | queries, runs of a document, and blocks |
/// | [`from_prefixes`](Self::from_prefixes) | the mask keeps it, or the key is in the batch entry's prefix | queries and blocks |
/// | [`from_spans`](Self::from_spans) | the mask keeps it, or both are in one span, such as an image | queries, spans, and blocks |
///
/// A block whose pairs are all kept is a full block, whatever the description was. A block of which some pairs are kept is a
/// partial one. Blocks are in the order of their keys. What is past the end of a list is 0.
///
/// The lists are of one length for all blocks of queries. So [`block_mask`](Self::block_mask) follows from what the mask keeps, and
/// a mask with more partial blocks is another problem.
///
/// ```
/// use hopper_attention::*;
///
/// # fn main() -> Result<()> {
/// // 300 tokens of two documents. Causal within each of them.
/// let dims = Dims::new(1, 300, 2, 64);
/// let ids: Vec<i32> = (0..300).map(|token| i32::from(token >= 140)).collect();
/// let lists = OwnedBlockLists::from_documents(dims, &ids, &ids)?;
/// let options = ForwardProblem::builder(DType::F32, dims).mask(Mask::causal());
/// let problem = options.block_mask(Some(lists.block_mask())).build()?;
/// let layout = Layout::contiguous(problem.q_shape())?;
/// let (ones, mut o) = (vec![1f32; layout.span()], vec![0f32; layout.span()]);
/// let [q, k, v] = [(); 3].map(|()| TensorRef::host(&ones, layout));
/// let args = lists.add_to(ForwardArgs::new(q?, k?, v?, TensorMut::host(&mut o, layout)?))?;
/// let plan = problem.plan(&Device::cpu())?;
/// plan.run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?, args)?;
/// assert!((o[0] - 1.0).abs() < 1e-6);
/// # Ok(()) }
/// ```
///
/// On a GPU copy the lists of [`as_lists`](Self::as_lists) there, and give them as the operands that [`BlockMask`] names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedBlockLists {
    form: BlockMask,
    /// `[B, H, Qb, Kb]`.
    shape: [usize; 4],
    counts: Vec<i32>,
    indices: Vec<i32>,
    bits: Vec<i32>,
    full_counts: Vec<i32>,
    full_indices: Vec<i32>,
}

impl OwnedBlockLists {
    /// The lists that keep the pairs that `keep(batch, head, query, key)` keeps. `head` is a query head.
    ///
    /// Without `per_batch` all batch entries share the lists, and `keep` is asked with 0 for the batch entry. So is it with heads
    /// and `per_head`. Every pair is asked once: this is for tests, and for masks that the other functions do not have.
    ///
    /// # Errors
    /// - [`Error::Value`]: no problem has such sizes.
    /// - [`Error::Memory`]: the host has no memory for the lists.
    pub fn from_predicate(
        dims: Dims,
        per_batch: bool,
        per_head: bool,
        keep: impl Fn(usize, usize, usize, usize) -> bool,
    ) -> Result<Self> {
        let form = BlockMask::new(0).per_batch(per_batch).per_head(per_head);
        Self::from_keys(dims, form, |[batch, head, query], kept| {
            let mut first = None;
            for key in 0..=dims.seqlen_kv {
                let is_kept = key < dims.seqlen_kv && keep(batch, head, query, key);
                match first {
                    None if is_kept => first = Some(key),
                    Some(begin) if !is_kept => {
                        kept.push([begin, key]);
                        first = None;
                    }
                    _ => {}
                }
            }
            Ok(())
        })
    }

    /// The lists of the keys that `keys([batch, head, query], kept)` adds to `kept`. They may overlap, be empty, and be in any order.
    ///
    /// Intervals are counted at their ends alone: one that covers many blocks costs no more than a short one.
    pub(super) fn from_keys(
        dims: Dims,
        form: BlockMask,
        mut keys: impl FnMut([usize; 3], &mut Vec<Keys>) -> Result<()>,
    ) -> Result<Self> {
        dims.check()?;
        let shape = form.shape(&dims);
        let [batch, heads, q_blocks, kv_blocks] = shape;
        let rows = shape[..3].iter().fold(1usize, |rows, &size| rows.saturating_mul(size));
        let mut made = Self {
            form,
            shape,
            counts: reserved(LISTS, rows)?,
            indices: reserved(LISTS, rows.saturating_mul(kv_blocks))?,
            bits: Vec::new(),
            full_counts: reserved(LISTS, rows)?,
            full_indices: reserved(LISTS, rows.saturating_mul(kv_blocks))?,
        };
        let (mut of_rows, mut kept) = (Rows::new(kv_blocks)?, Vec::new());
        for (batch, head) in (0..batch).flat_map(|batch| (0..heads).map(move |head| (batch, head))) {
            for q_block in 0..q_blocks {
                of_rows.clear();
                let first = q_block * MASK_BLOCK;
                for query in first..dims.seqlen_q.min(first + MASK_BLOCK) {
                    kept.clear();
                    keys([batch, head, query], &mut kept)?;
                    of_rows.add(&mut kept, dims.seqlen_kv);
                }
                made.add(&of_rows)?;
            }
        }
        made.lay_out()?;
        Ok(made)
    }

    /// Adds the lists of a block of queries. The bits are those of the list alone, as long as they are.
    fn add(&mut self, rows: &Rows) -> Result<()> {
        let kv_blocks = self.shape[3];
        let (begin, full_begin) = (self.indices.len(), self.full_indices.len());
        let (mut whole, queries) = (0, rows.ends.len() as i32);
        for (kv_block, (&change, &touched)) in (0i32..).zip(rows.whole.iter().zip(&rows.touched)) {
            whole += change;
            if whole == queries {
                self.full_indices.push(kv_block);
            } else if whole > 0 || touched {
                self.indices.push(kv_block);
                let at = self.bits.len();
                let need = (at + MASK_BLOCK_WORDS).saturating_mul(size_of::<i32>());
                let short = |_| Error::Memory { what: LISTS, need };
                self.bits.try_reserve(MASK_BLOCK_WORDS).map_err(short)?;
                self.bits.resize(at + MASK_BLOCK_WORDS, 0);
                rows.bits(kv_block as usize, &mut self.bits[at..]);
            }
        }
        self.counts.push((self.indices.len() - begin) as i32);
        self.full_counts.push((self.full_indices.len() - full_begin) as i32);
        self.indices.resize(begin + kv_blocks, 0);
        self.full_indices.resize(full_begin + kv_blocks, 0);
        Ok(())
    }

    /// Makes the bits of all blocks of queries as long as the longest, and notes how many partial blocks that is.
    fn lay_out(&mut self) -> Result<()> {
        let most = self.counts.iter().copied().max().unwrap_or(0) as usize;
        self.form = BlockMask::new(most)
            .full_blocks(true)
            .per_batch(self.form.is_per_batch())
            .per_head(self.form.is_per_head());
        if self.counts.iter().all(|&count| count as usize == most) {
            return Ok(());
        }
        let words = most * MASK_BLOCK_WORDS;
        let mut bits = reserved(LISTS, self.counts.len().saturating_mul(words))?;
        let mut from = 0;
        for (row, &count) in self.counts.iter().enumerate() {
            let of_row = count as usize * MASK_BLOCK_WORDS;
            bits.extend_from_slice(&self.bits[from..from + of_row]);
            bits.resize((row + 1) * words, 0);
            from += of_row;
        }
        self.bits = bits;
        Ok(())
    }

    /// The form of the lists, for [`ForwardProblemBuilder::block_mask`](crate::ForwardProblemBuilder::block_mask). There always
    /// are lists of full blocks.
    pub fn block_mask(&self) -> BlockMask {
        self.form
    }

    /// The lists.
    pub fn as_lists(&self) -> BlockLists<'_> {
        let full = Some((&self.full_counts[..], &self.full_indices[..]));
        BlockLists { counts: &self.counts, indices: &self.indices, bits: &self.bits, full }
    }

    /// The operands of the lists: slot, shape and numbers.
    pub fn operands(&self) -> [(Slot, Vec<usize>, &[i32]); 5] {
        let of_rows = self.shape[..3].to_vec();
        let with = |last: usize| [&self.shape[..3], &[last]].concat();
        let words = self.form.most_partial() * MASK_BLOCK_WORDS;
        [
            (Slot::MaskBlockCnt, of_rows.clone(), &self.counts),
            (Slot::MaskBlockIdx, with(self.shape[3]), &self.indices),
            (Slot::MaskBits, with(words), &self.bits),
            (Slot::FullBlockCnt, of_rows, &self.full_counts),
            (Slot::FullBlockIdx, with(self.shape[3]), &self.full_indices),
        ]
    }

    /// Adds the lists to the arguments of a run on the CPU.
    ///
    /// # Errors
    /// [`Error::Layout`]: a list has more elements than a layout may have.
    pub fn add_to<'a>(&'a self, args: impl Into<Args<'a>>) -> Result<Args<'a>> {
        let [batch, heads, q_blocks, kv_blocks] = self.shape;
        let of_counts = Layout::contiguous([batch, heads, q_blocks])?;
        let of_indices = Layout::contiguous([batch, heads, q_blocks, kv_blocks])?;
        let of_bits = Layout::contiguous([batch, heads, q_blocks, self.form.most_partial() * MASK_BLOCK_WORDS])?;
        let args = args.into().read(Slot::MaskBlockCnt, TensorRef::host(&self.counts, of_counts)?);
        let args = args.read(Slot::MaskBlockIdx, TensorRef::host(&self.indices, of_indices)?);
        let args = args.read(Slot::MaskBits, TensorRef::host(&self.bits, of_bits)?);
        let args = args.read(Slot::FullBlockCnt, TensorRef::host(&self.full_counts, of_counts)?);
        Ok(args.read(Slot::FullBlockIdx, TensorRef::host(&self.full_indices, of_indices)?))
    }
}

/// What the queries of one block keep.
struct Rows {
    /// The keys of all queries, one after the other: in order, with gaps between them.
    kept: Vec<Keys>,
    /// For each query, where its keys end in `kept`.
    ends: Vec<usize>,
    /// For each block of keys, how many more queries keep all of it than of the block before it.
    whole: Vec<i32>,
    /// For each block of keys, whether keys of a query begin or end in it.
    touched: Vec<bool>,
}

impl Rows {
    fn new(kv_blocks: usize) -> Result<Self> {
        let mut whole = reserved(LISTS, kv_blocks.saturating_add(1))?;
        whole.resize(kv_blocks + 1, 0);
        Ok(Self { kept: Vec::new(), ends: Vec::new(), whole, touched: vec![false; kv_blocks] })
    }

    fn clear(&mut self) {
        self.kept.clear();
        self.ends.clear();
        self.whole.fill(0);
        self.touched.fill(false);
    }

    /// Adds the keys of the next query.
    fn add(&mut self, keys: &mut [Keys], seqlen_kv: usize) {
        keys.sort_unstable();
        let begin = self.kept.len();
        for [first, end] in
            keys.iter().map(|&[first, end]| [first, end.min(seqlen_kv)]).filter(|[first, end]| first < end)
        {
            // Keys that meet are one interval.
            match self.kept[begin..].last_mut() {
                Some(last) if first <= last[1] => last[1] = last[1].max(end),
                _ => self.kept.push([first, end]),
            }
        }
        self.ends.push(self.kept.len());
        for &[first, end] in &self.kept[begin..] {
            self.touched[first / MASK_BLOCK] = true;
            self.touched[(end - 1) / MASK_BLOCK] = true;
            // The last block may have fewer keys.
            let whole =
                first.div_ceil(MASK_BLOCK)..if end == seqlen_kv { self.touched.len() } else { end / MASK_BLOCK };
            if !whole.is_empty() {
                self.whole[whole.start] += 1;
                self.whole[whole.end] -= 1;
            }
        }
    }

    /// Sets the bits of a block of keys.
    fn bits(&self, kv_block: usize, words: &mut [i32]) {
        let [first, end] = [kv_block, kv_block + 1].map(|block| block * MASK_BLOCK);
        let mut begin = 0;
        for (&until, words) in self.ends.iter().zip(words.chunks_exact_mut(QUERY_WORDS)) {
            let its = &self.kept[begin..until];
            begin = until;
            let behind = its.partition_point(|keys| keys[1] <= first);
            for keys in its[behind..].iter().take_while(|keys| keys[0] < end) {
                set(words, keys[0].max(first) - first, keys[1].min(end) - first);
            }
        }
    }
}

/// Sets the bits from `first` to below `end`.
fn set(words: &mut [i32], first: usize, end: usize) {
    for (word, begin) in words.iter_mut().zip((0..).step_by(32)) {
        let [first, end] = [first, end].map(|bit: usize| bit.saturating_sub(begin).min(32));
        if first < end {
            *word |= (u32::MAX >> (32 - (end - first)) << first).cast_signed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_of_an_interval() {
        for (first, end) in (0..=128).flat_map(|first| (first..=128).map(move |end| (first, end))) {
            let mut words = [0; QUERY_WORDS];
            set(&mut words, first, end);
            let is_set = |bit: usize| words[bit / 32] as u32 >> (bit % 32) & 1 == 1;
            assert!((0..128).all(|bit| is_set(bit) == (first..end).contains(&bit)), "{first} to {end}: {words:x?}");
        }
    }

    #[test]
    fn keys_that_meet_or_overlap_are_one_interval() {
        let mut rows = Rows::new(3).unwrap();
        rows.add(&mut [[200, 300], [5, 5], [64, 128], [0, 70], [128, 130], [9, 3]], 290);
        rows.add(&mut [], 290);
        assert_eq!((&rows.kept[..], &rows.ends[..]), (&[[0, 130], [200, 290]][..], &[2, 2][..]));
        assert_eq!((&rows.whole[..], &rows.touched[..]), (&[1, -1, 1, -1][..], &[true; 3][..]));
    }

    #[test]
    fn sizes_that_no_problem_has_and_lists_that_are_too_long_are_refused() {
        let refused = |dims| OwnedBlockLists::from_predicate(dims, true, true, |_, _, _, _| true).unwrap_err();
        assert!(refused(Dims::new(1, usize::MAX, 1, 8)).to_string().starts_with("seqlen_q + seqlen_kv"));
        let huge = Dims::new(1 << 20, 1 << 28, 1 << 10, 8);
        assert!(matches!(refused(huge), Error::Memory { what: "lists of blocks", .. }));
    }
}
