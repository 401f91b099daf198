//! Points of the sweep, and what they cost.

use hopper_attention::{DType, Dims, ForwardProblem, Layout, Mask, Result};
use serde::{Deserialize, Serialize};

/// Tokens a batch in the papers' setting: the batch shrinks as sequences grow.
pub const TOKENS: usize = 16384;
/// Hidden size in the papers' setting: `heads_q * head_dim`.
pub const HIDDEN: usize = 2048;

/// In which order the elements of Q, K, V and O lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Layouts {
    /// `[batch, seqlen, heads, head_dim]`.
    Bshd,
    /// `[batch, heads, seqlen, head_dim]`.
    Bhsd,
}

/// One point of a forward sweep: equal query and key lengths, equal head dims.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Point {
    /// Sequences in the batch.
    pub batch: usize,
    /// Queries and keys in a sequence.
    pub seqlen: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key heads, a divisor of `heads_q`.
    pub heads_kv: usize,
    /// Length of a query, key, value and output row.
    pub head_dim: usize,
    /// Whether a query sees the keys up to its own only.
    pub causal: bool,
}

impl Point {
    /// The point with `tokens / seqlen` sequences (at least one) and `hidden / head_dim` query heads (at least one);
    /// `heads_kv` is as many as query heads unless given.
    pub fn new(tokens: usize, hidden: usize, seqlen: usize, head_dim: usize, heads_kv: Option<usize>) -> Self {
        let heads_q = (hidden / head_dim.max(1)).max(1);
        let batch = (tokens / seqlen.max(1)).max(1);
        Self { batch, seqlen, heads_q, heads_kv: heads_kv.unwrap_or(heads_q), head_dim, causal: false }
    }

    /// Floating-point operations of the forward as the papers count them: two products of two operations a
    /// multiply-add, `4 * seqlen^2 * head_dim * heads_q * batch`, halved when causal.
    pub fn forward_flops(&self) -> u64 {
        let all = 4 * (self.seqlen as u64).pow(2) * (self.head_dim * self.heads_q * self.batch) as u64;
        if self.causal { all / 2 } else { all }
    }

    /// The fewest bytes that the forward moves: Q, K and V read once, O written once.
    pub fn forward_bytes(&self, dtype: DType) -> u64 {
        let rows = self.batch * self.seqlen * self.head_dim * dtype.bytes();
        2 * (rows * (self.heads_q + self.heads_kv)) as u64
    }

    /// The problem to plan, with the LSE (every training forward writes it, and so do the peers).
    ///
    /// # Errors
    /// Those of [`ForwardProblem::new`].
    pub fn problem(&self, dtype: DType) -> Result<ForwardProblem> {
        let dims = Dims {
            batch: self.batch,
            seqlen_q: self.seqlen,
            seqlen_kv: self.seqlen,
            heads_q: self.heads_q,
            heads_kv: self.heads_kv,
            head_dim_qk: self.head_dim,
            head_dim_vo: self.head_dim,
        };
        let mask = if self.causal { Mask::causal() } else { Mask::Full };
        Ok(ForwardProblem::new(dtype, dims)?.mask(mask).lse(true))
    }

    /// The layout of a tensor with this many heads, logically `[batch, seqlen, heads, head_dim]`.
    ///
    /// # Errors
    /// When the sizes overflow.
    pub fn layout(&self, heads: usize, order: Layouts) -> Result<Layout<4>> {
        let shape = [self.batch, self.seqlen, heads, self.head_dim];
        let [s, h, d] = [self.seqlen, heads, self.head_dim].map(|n| n as i64);
        match order {
            Layouts::Bshd => Layout::contiguous(shape),
            Layouts::Bhsd => Layout::with_strides(shape, [s * h * d, d, s * d, 1]),
        }
    }

    /// Elements of a tensor with this many heads.
    pub fn elements(&self, heads: usize) -> usize {
        self.batch * self.seqlen * heads * self.head_dim
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paper(seqlen: usize, head_dim: usize) -> Point {
        Point::new(TOKENS, HIDDEN, seqlen, head_dim, None)
    }

    #[test]
    fn flops_of_the_papers_points() {
        let p = paper(16384, 128);
        assert_eq!((p.batch, p.heads_q, p.heads_kv), (1, 16, 16));
        assert_eq!(p.forward_flops(), 2_199_023_255_552); // 4 * 16384^2 * 2048
        assert_eq!(Point { causal: true, ..p }.forward_flops(), 1_099_511_627_776);
        // At a fixed hidden size the head dim does not matter, and twice the length is twice the work.
        assert_eq!(paper(512, 64).forward_flops(), paper(512, 128).forward_flops());
        assert_eq!(paper(1024, 64).forward_flops(), 2 * paper(512, 64).forward_flops());
    }

    #[test]
    fn bytes_count_each_tensor_once() {
        assert_eq!(paper(512, 64).forward_bytes(DType::BF16), 268_435_456);
        let grouped = Point::new(TOKENS, HIDDEN, 512, 64, Some(8));
        assert_eq!(grouped.forward_bytes(DType::BF16), 268_435_456 * 40 / 64);
    }

    #[test]
    fn both_orders_are_the_same_tensor() {
        let p = Point::new(64, 128, 16, 32, None);
        let [a, b] = [Layouts::Bshd, Layouts::Bhsd].map(|order| p.layout(p.heads_q, order).unwrap());
        assert_eq!(a.offset([1, 2, 3, 4]), Some(((16 + 2) * 4 + 3) * 32 + 4));
        assert_eq!(b.offset([1, 2, 3, 4]), Some(((4 + 3) * 16 + 2) * 32 + 4));
        assert_eq!(p.elements(p.heads_q), 64 * 128);
    }

    #[test]
    fn too_few_tokens_still_make_a_sequence() {
        let p = Point::new(16, 32, 64, 64, None);
        assert_eq!((p.batch, p.heads_q), (1, 1));
        assert!(p.problem(DType::BF16).unwrap().wants_lse());
        assert!(Point { heads_kv: 2, ..p }.problem(DType::BF16).is_err());
    }
}
