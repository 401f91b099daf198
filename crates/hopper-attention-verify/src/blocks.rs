//! Block-sparse masks of a case: the lists of blocks and their bits, in guarded memory.

use std::fmt;
use std::str::FromStr;

use hopper_attention::{Args, BlockLists, BlockMask, Dims, Layout, MASK_BLOCK, MASK_BLOCK_WORDS, Slot, TensorRef};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::data::GUARD;

/// What the lists of a case keep. The seed says whether batch entries and heads have lists of their own, and whether there are
/// lists of full blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Blocks {
    /// The problem has none.
    #[default]
    None,
    /// So many in a hundred blocks. Some of them are full, of others some pairs or no pair is kept.
    Random(u8),
    /// Documents: tokens attend to those of their own, of some dozens to hundreds.
    Documents,
    /// Every block, all of its pairs.
    All,
    /// No block at all.
    Nothing,
    /// Every second block of queries has no block.
    Striped,
}

impl Blocks {
    /// All kinds that there are.
    pub const ALL: [Self; 9] = [
        Self::None,
        Self::Random(3),
        Self::Random(15),
        Self::Random(50),
        Self::Random(90),
        Self::Documents,
        Self::All,
        Self::Nothing,
        Self::Striped,
    ];

    /// The word for it on a command line.
    pub fn name(self) -> String {
        match self {
            Self::None => "none".into(),
            Self::Random(percent) => format!("random:{percent}"),
            Self::Documents => "documents".into(),
            Self::All => "all".into(),
            Self::Nothing => "nothing".into(),
            Self::Striped => "striped".into(),
        }
    }

    /// Whether the problem has none.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }

    /// The lists of a problem of these sizes. The same seed gives the same lists on every machine.
    pub fn image(self, dims: Dims, seed: u64) -> Option<BlocksImage> {
        (!self.is_none()).then(|| BlocksImage::new(self, dims, seed))
    }
}

impl fmt::Display for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

impl FromStr for Blocks {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let percent = text.strip_prefix("random:").and_then(|percent| percent.parse().ok());
        if let Some(percent @ 0..=100) = percent {
            return Ok(Self::Random(percent));
        }
        let others = Self::ALL.into_iter().filter(|kind| !matches!(kind, Self::Random(_)));
        let kinds: Vec<Self> = others.collect();
        kinds.iter().copied().find(|kind| kind.name() == text).ok_or_else(|| {
            let allowed: Vec<_> = kinds.iter().map(|kind| kind.name()).collect();
            format!("lists of blocks `{text}`; allowed: random:PERCENT, {}", allowed.join(", "))
        })
    }
}

/// Memory of lists, between guard bands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlocksImage {
    /// The form of the lists.
    pub mask: BlockMask,
    shape: [usize; 4],
    /// Of each operand, guard bands included.
    lists: Vec<(Slot, Vec<i32>)>,
}

/// What is known of a block when lists are made.
enum Block {
    Hidden,
    Full,
    Partial(Vec<i32>),
}

/// The bits of a block that keep the pairs that `keep` keeps.
fn bits(mut keep: impl FnMut(usize, usize) -> bool) -> Vec<i32> {
    let mut words = vec![0; MASK_BLOCK_WORDS];
    for (i, j) in (0..MASK_BLOCK).flat_map(|i| (0..MASK_BLOCK).map(move |j| (i, j))) {
        words[i * (MASK_BLOCK / 32) + j / 32] |= i32::from(keep(i, j)) << (j % 32);
    }
    words
}

impl BlocksImage {
    fn new(kind: Blocks, dims: Dims, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed ^ 0x0062_6c6f_636b_7300);
        let [per_batch, per_head] = [rng.random::<bool>(), rng.random::<bool>()];
        let full_blocks = rng.random_range(0..4) != 0;
        let (batch, heads) = (if per_batch { dims.batch } else { 1 }, if per_head { dims.heads_q } else { 1 });
        let [queries, keys] = [dims.seqlen_q, dims.seqlen_kv].map(|len| len.div_ceil(MASK_BLOCK));
        let mut rows = Vec::new();
        for list in 0..batch * heads {
            // Where documents begin, of both sides.
            let mut ends = vec![0];
            while ends[ends.len() - 1] < dims.seqlen_q.max(dims.seqlen_kv) + MASK_BLOCK {
                ends.push(ends[ends.len() - 1] + rng.random_range(20..400));
            }
            let document = |token: usize| ends.partition_point(|&end| end <= token);
            for query in 0..queries {
                let mut entries: Vec<(i32, Block)> = Vec::new();
                for key in 0..keys {
                    let block = match kind {
                        Blocks::None | Blocks::Nothing => Block::Hidden,
                        Blocks::All => Block::Full,
                        Blocks::Striped if (query + list) % 2 == 1 => Block::Hidden,
                        Blocks::Striped => random_block(&mut rng),
                        Blocks::Random(percent) if rng.random_range(0..100) < percent => random_block(&mut rng),
                        Blocks::Random(_) => Block::Hidden,
                        Blocks::Documents => {
                            let of = |block: usize, token: usize| document(block * MASK_BLOCK + token);
                            let last = MASK_BLOCK - 1;
                            if of(query, 0) == of(query, last)
                                && of(key, 0) == of(key, last)
                                && of(query, 0) == of(key, 0)
                            {
                                Block::Full
                            } else if of(query, last) < of(key, 0) || of(key, last) < of(query, 0) {
                                Block::Hidden
                            } else {
                                Block::Partial(bits(|i, j| of(query, i) == of(key, j)))
                            }
                        }
                    };
                    let block = match block {
                        Block::Full if !full_blocks => Block::Partial(vec![-1; MASK_BLOCK_WORDS]),
                        block => block,
                    };
                    entries.push((key as i32, block));
                }
                entries.shuffle(&mut rng);
                rows.push(entries);
            }
        }
        let most_partial = |row: &Vec<(i32, Block)>| row.iter().filter(|(_, b)| matches!(b, Block::Partial(_))).count();
        let most_partial = rows.iter().map(most_partial).max().unwrap_or(0);
        let guarded = || vec![i32::MIN; GUARD];
        let [mut counts, mut indices, mut words, mut full_counts, mut full] = [(); 5].map(|()| guarded());
        for row in rows {
            // What is past the count of a list is never read as an index.
            let (mut partial, mut whole, mut of_row) = (Vec::new(), Vec::new(), Vec::new());
            for (key, block) in row {
                match block {
                    Block::Hidden => {}
                    Block::Full => whole.push(key),
                    Block::Partial(words) => {
                        partial.push(key);
                        of_row.extend(words);
                    }
                }
            }
            counts.push(partial.len() as i32);
            full_counts.push(whole.len() as i32);
            partial.resize(keys, i32::MAX);
            whole.resize(keys, i32::MIN);
            of_row.resize(most_partial * MASK_BLOCK_WORDS, -1);
            indices.extend(partial);
            full.extend(whole);
            words.extend(of_row);
        }
        let mut lists = vec![(Slot::MaskBlockCnt, counts), (Slot::MaskBlockIdx, indices), (Slot::MaskBits, words)];
        if full_blocks {
            lists.extend([(Slot::FullBlockCnt, full_counts), (Slot::FullBlockIdx, full)]);
        }
        lists.iter_mut().for_each(|(_, list)| list.extend(guarded()));
        let mask = BlockMask::new(most_partial).per_batch(per_batch).per_head(per_head).full_blocks(full_blocks);
        Self { mask, shape: [batch, heads, queries, keys], lists }
    }

    /// Makes every list one of a single partial block, of which the pairs are kept that `keep` keeps: it has query and key in
    /// the block.
    pub fn keep_one_block(&mut self, block: i32, keep: impl Fn(usize, usize) -> bool) {
        let [batch, heads, queries, keys] = self.shape;
        let rows = batch * heads * queries;
        let words = bits(keep);
        let guarded = |inner: Vec<i32>| {
            let guard = vec![i32::MIN; GUARD];
            [guard.clone(), inner, guard].concat()
        };
        self.mask = BlockMask::new(1).per_batch(self.mask.is_per_batch()).per_head(self.mask.is_per_head());
        self.lists = vec![
            (Slot::MaskBlockCnt, guarded(vec![1; rows])),
            (Slot::MaskBlockIdx, guarded(vec![block; rows * keys])),
            (Slot::MaskBits, guarded(words.repeat(rows))),
        ];
    }

    /// The memory of an operand without guard bands. Empty where there is none.
    pub fn inner(&self, slot: Slot) -> &[i32] {
        let list = self.lists.iter().find(|(of, _)| *of == slot);
        list.map_or(&[], |(_, list)| &list[GUARD..list.len() - GUARD])
    }

    /// The same to be changed.
    pub fn inner_mut(&mut self, slot: Slot) -> Option<&mut [i32]> {
        let (_, list) = self.lists.iter_mut().find(|(of, _)| *of == slot)?;
        let end = list.len() - GUARD;
        Some(&mut list[GUARD..end])
    }

    /// Each operand's memory, guard bands included.
    pub fn lists(&self) -> &[(Slot, Vec<i32>)] {
        &self.lists
    }

    /// The lists as the oracle reads them.
    pub fn borrowed(&self) -> BlockLists<'_> {
        let full = self.mask.has_full_blocks();
        BlockLists {
            counts: self.inner(Slot::MaskBlockCnt),
            indices: self.inner(Slot::MaskBlockIdx),
            bits: self.inner(Slot::MaskBits),
            full: full.then(|| (self.inner(Slot::FullBlockCnt), self.inner(Slot::FullBlockIdx))),
        }
    }

    /// The layouts of the counts, of the indices and of the bits.
    pub fn layouts(&self) -> (Layout<3>, Layout<4>, Layout<4>) {
        let [batch, heads, queries, keys] = self.shape;
        let words = self.mask.most_partial() * MASK_BLOCK_WORDS;
        let list = |last| Layout::contiguous([batch, heads, queries, last]).expect("a small tensor");
        (Layout::contiguous([batch, heads, queries]).expect("a small tensor"), list(keys), list(words))
    }

    /// Adds the lists to the arguments of a run in host memory.
    pub fn add_to<'a>(&'a self, mut args: Args<'a>) -> Args<'a> {
        let (counts, indices, words) = self.layouts();
        for (slot, _) in &self.lists {
            let data = self.inner(*slot);
            args = match slot {
                Slot::MaskBlockCnt | Slot::FullBlockCnt => {
                    args.read(*slot, TensorRef::host(data, counts).expect("a fitting layout"))
                }
                Slot::MaskBits => args.read(*slot, TensorRef::host(data, words).expect("a fitting layout")),
                _ => args.read(*slot, TensorRef::host(data, indices).expect("a fitting layout")),
            };
        }
        args
    }
}

/// A block that is listed: full, or with some of its pairs, or with none.
fn random_block(rng: &mut StdRng) -> Block {
    match rng.random_range(0..8) {
        0..3 => Block::Full,
        3 => Block::Partial(vec![0; MASK_BLOCK_WORDS]),
        4 => {
            // Whole queries and keys are left out.
            let [queries, keys] = [(); 2].map(|()| [(); MASK_BLOCK].map(|()| rng.random_range(0..4) != 0));
            Block::Partial(bits(|i, j| queries[i] && keys[j]))
        }
        5 => {
            let diagonal = rng.random_range(0..2 * MASK_BLOCK);
            Block::Partial(bits(|i, j| i + j < diagonal))
        }
        _ => {
            let percent = rng.random_range(1..100);
            Block::Partial(bits(|_, _| rng.random_range(0..100) < percent))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_names() {
        for kind in Blocks::ALL.into_iter().chain([Blocks::Random(0), Blocks::Random(100)]) {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        for wrong in ["", "random", "random:", "random:101", "random:-1", "Documents"] {
            let text = "allowed: random:PERCENT, none, documents, all, nothing, striped";
            assert!(wrong.parse::<Blocks>().unwrap_err().ends_with(text));
        }
    }

    #[test]
    fn lists_follow_from_the_seed_and_have_the_sizes_of_their_problem() {
        let dims = Dims::new(2, 300, 4, 64).with_seqlen_kv(500).with_heads_kv(2);
        for (kind, seed) in Blocks::ALL.into_iter().flat_map(|kind| (0..8).map(move |seed| (kind, seed))) {
            let image = kind.image(dims, seed);
            assert_eq!(image, kind.image(dims, seed));
            let Some(image) = image else { continue };
            let rows: usize = image.shape[..3].iter().product();
            assert_eq!(image.inner(Slot::MaskBlockCnt).len(), rows);
            assert_eq!(image.inner(Slot::MaskBlockIdx).len(), rows * 4);
            let kept = image.inner(Slot::MaskBlockCnt).iter().chain(image.inner(Slot::FullBlockCnt)).any(|&n| n > 0);
            // Some in a hundred of a dozen blocks may be none.
            assert!(kept != (kind == Blocks::Nothing) || matches!(kind, Blocks::Random(_)), "{kind:?} {seed}");
        }
        let shapes: Vec<_> = (0..40).map(|seed| Blocks::All.image(dims, seed).unwrap().shape[..2].to_vec()).collect();
        assert!([[1, 1], [2, 1], [1, 4], [2, 4]].iter().all(|shape| shapes.iter().any(|of| of == shape)));
    }
}
