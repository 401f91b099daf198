//! Points with lists of blocks: a block-sparse mask of full blocks alone, which all batch entries and heads share.

use hopper_attention::{Args, BlockLists, BlockMask, Layout, MASK_BLOCK, Slot, TensorRef};

use super::Point;

/// Whether lists of one in so many blocks have a block of keys for a block of queries. Those of the diagonal are listed always.
/// `peers/entry.py` has the same.
fn is_listed(one_in: u32, query: usize, key: usize) -> bool {
    let mut mixed = (query as u32).wrapping_mul(0x9e37_79b1) ^ (key as u32).wrapping_mul(0x85eb_ca77);
    for factor in [0x2c1b_3c6d, 0x297a_2d39] {
        mixed = (mixed ^ (mixed >> 15)).wrapping_mul(factor);
    }
    query == key || (mixed ^ (mixed >> 15)).is_multiple_of(one_in)
}

/// The lists of a point.
pub struct FullBlocks {
    /// `[Qb]`: how many blocks of keys each block of queries has.
    pub counts: Vec<i32>,
    /// `[Qb, Kb]`: which.
    pub indices: Vec<i32>,
    /// `[Qb]`: how many partial blocks there are. None.
    pub none: Vec<i32>,
}

impl FullBlocks {
    /// The form of the lists.
    pub fn form() -> BlockMask {
        BlockMask::new(0).full_blocks(true)
    }

    /// The lists as arguments of a run in host memory.
    pub(crate) fn add_to<'a>(&'a self, args: Args<'a>) -> hopper_attention::Result<Args<'a>> {
        let queries = self.counts.len();
        let count = |list: &'a [i32]| TensorRef::host(list, Layout::contiguous([1, 1, queries])?);
        let last = |list: &'a [i32], last| TensorRef::host(list, Layout::contiguous([1, 1, queries, last])?);
        let keys = self.indices.len() / queries.max(1);
        Ok(args
            .read(Slot::MaskBlockCnt, count(&self.none)?)
            .read(Slot::MaskBlockIdx, last(&self.indices, keys)?)
            .read(Slot::MaskBits, last(&[], 0)?)
            .read(Slot::FullBlockCnt, count(&self.counts)?)
            .read(Slot::FullBlockIdx, last(&self.indices, keys)?))
    }

    /// The lists as the reference takes them.
    pub(crate) fn borrowed(&self) -> BlockLists<'_> {
        let full = Some((&self.counts[..], &self.indices[..]));
        BlockLists { counts: &self.none, indices: &self.indices, bits: &[], full }
    }
}

impl Point {
    /// The lists of blocks, where there are any.
    pub fn full_blocks(&self) -> Option<FullBlocks> {
        let (one_in, blocks) = (self.blocks?, self.seqlen.div_ceil(MASK_BLOCK));
        let mut lists = FullBlocks { counts: vec![], indices: vec![], none: vec![0; blocks] };
        for query in 0..blocks {
            let listed = (0..blocks).filter(|&key| is_listed(one_in, query, key)).map(|key| key as i32);
            lists.indices.extend(listed);
            lists.counts.push((lists.indices.len() - query * blocks) as i32);
            lists.indices.resize((query + 1) * blocks, 0);
        }
        Some(lists)
    }

    /// Whether the lists of blocks, where there are any, keep a pair.
    pub fn lists_keep(&self, query: usize, key: usize) -> bool {
        self.blocks.is_none_or(|one_in| is_listed(one_in, query / MASK_BLOCK, key / MASK_BLOCK))
    }

    /// The pairs of a query and a key of a sequence that lists of one in so many blocks keep.
    pub(super) fn listed_pairs(&self, one_in: u32) -> u64 {
        let blocks = self.seqlen.div_ceil(MASK_BLOCK);
        // The last block may be shorter.
        let length = |block: usize| MASK_BLOCK.min(self.seqlen - block * MASK_BLOCK) as u64;
        let keys = |query| (0..blocks).filter(move |&key| is_listed(one_in, query, key)).map(length).sum::<u64>();
        (0..blocks).map(|query| length(query) * keys(query)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Direction, Precision, Sweep};

    fn sweep() -> Sweep {
        Sweep { block_mask: vec![1, 2, 16], seqlens: vec![2048], dtypes: vec![Precision::Bf16], ..Sweep::papers() }
    }

    #[test]
    fn operations_are_those_of_the_listed_blocks() {
        let points = sweep().points().unwrap();
        let names: Vec<String> = points[..3].iter().map(Point::to_string).collect();
        let name = |one_in| format!("fwd/bf16/d64/blocks{one_in}/s2048/b8/h32/kv32");
        assert_eq!(names, [1, 2, 16].map(name));
        assert_eq!(points[2].family(), "fwd-bf16-d64-blocks16");
        let full = Sweep { block_mask: vec![], ..sweep() }.points().unwrap().remove(0);
        assert_eq!((full.to_string(), points[0].flops()), ("fwd/bf16/d64/full/s2048/b8/h32/kv32".into(), full.flops()));
        for point in &points {
            let (lists, one_in) = (point.full_blocks().unwrap(), point.blocks.unwrap());
            let listed: u64 = lists.counts.iter().map(|&count| count as u64).sum();
            assert_eq!(
                point.flops(),
                full.flops() / 256 * listed * (point.head_dim as u64 / 64) / (32 / point.heads_q as u64)
            );
            // A block of the diagonal, and one in so many of the others.
            let expected = 16.0 + 240.0 / f64::from(one_in);
            assert!((listed as f64 - expected).abs() <= 3.0 * expected.sqrt(), "{listed} of {expected}");
            for (query, row) in lists.indices.chunks(16).enumerate() {
                let row = &row[..lists.counts[query] as usize];
                assert!(row.contains(&(query as i32)) && row.is_sorted());
                assert!(
                    (0..16).all(|key| point.lists_keep(128 * query, 128 * key + 127) == row.contains(&(key as i32)))
                );
            }
            let text = serde_json::to_string(point).unwrap();
            assert_eq!(serde_json::from_str::<Point>(&text).unwrap(), *point);
            assert!(point.problem().unwrap().block_mask() == Some(FullBlocks::form()));
        }
        let ragged = Point { seqlen: 300, blocks: Some(1), batch: 1, ..points[0].clone() };
        let backward = Point { direction: Direction::Bwd, ..ragged.clone() };
        assert_eq!((ragged.flops(), backward.flops()), (4 * 300 * 300 * 64 * 32, 10 * 300 * 300 * 64 * 32));
    }

    #[test]
    fn what_lists_are_not_timed_with_is_refused() {
        for (wrong, part) in [
            (Sweep { packed: vec![16384], ..sweep() }, "--packed"),
            (Sweep { lopsided: true, ..sweep() }, "--lopsided"),
            (Sweep { quarter: true, ..sweep() }, "--quarter"),
        ] {
            let refused = wrong.points().unwrap_err().to_string();
            assert!(refused.starts_with("--block-mask with ") && refused.contains(part), "{refused}");
        }
        let point = sweep().points().unwrap().remove(0);
        for wrong in [
            Point { blocks: Some(0), ..point.clone() },
            Point { causal: true, ..point.clone() },
            Point { queries: Some(7), ..point.clone() },
        ] {
            assert!(wrong.check().unwrap_err().to_string().contains("blocks"), "{wrong:?}");
        }
    }

    /// `peers/test_blocks.py` has the same numbers.
    #[test]
    fn python_has_the_same_lists() {
        let listed = |one_in, query| (0..20).filter(|&key| is_listed(one_in, query, key)).collect::<Vec<_>>();
        assert_eq!(listed(2, 0), [0, 1, 2, 3, 5, 6, 10, 11, 12, 16]);
        assert_eq!((listed(4, 7), listed(16, 19)), (vec![5, 7, 19], vec![5, 19]));
    }
}
