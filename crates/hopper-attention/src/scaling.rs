//! How many elements share a descale factor.

use std::fmt;

/// Rows (queries of Q, keys of K and V) that share a factor under [`Scaling::PerBlock`].
pub const SCALE_BLOCK: usize = 128;

/// How many elements of e4m3 operands share an f32 descale factor: a real value is `stored * descale`.
///
/// Factors are tensors `[batch, heads, blocks]`, with sizes of 1 where all share one:
///
/// | | `descale_q` | `descale_k`, `descale_v` |
/// |---|---|---|
/// | per tensor | `[1, 1, 1]` | `[1, 1, 1]` |
/// | per head | `[batch, heads_kv, 1]` | `[batch, heads_kv, 1]` |
/// | per block | `[batch, heads_q, ceil(seqlen_q / 128)]` | `[batch, heads_kv, ceil(seqlen_kv / 128)]` |
///
/// Per head, the query heads that read a key head share its factor of Q. Per block, block `i` is the rows `128 * i` to
/// `128 * i + 127` of one head, as far as they exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scaling {
    /// One factor for each of Q, K and V.
    #[default]
    PerTensor,
    /// One for each sequence and key head.
    PerHead,
    /// One for each block of 128 rows of a head.
    PerBlock,
}

impl Scaling {
    /// All of them, from coarse to fine.
    pub const ALL: [Self; 3] = [Self::PerTensor, Self::PerHead, Self::PerBlock];

    /// The name that [`Display`](fmt::Display) prints: `per-tensor`, `per-head` or `per-block`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PerTensor => "per-tensor",
            Self::PerHead => "per-head",
            Self::PerBlock => "per-block",
        }
    }

    /// Where the factor of a row is, `[batch, head, block]`, in a tensor that has `group` heads to a key head: 1 for K and V,
    /// `heads_q / heads_kv` for Q.
    pub const fn index(self, batch: usize, head: usize, group: usize, token: usize) -> [usize; 3] {
        match self {
            Self::PerTensor => [0, 0, 0],
            Self::PerHead => [batch, head / group, 0],
            Self::PerBlock => [batch, head, token / SCALE_BLOCK],
        }
    }

    /// The shape of the factors of a tensor `[batch, seqlen, heads, head_dim]`.
    pub(crate) fn shape(self, [batch, seqlen, heads, _]: [usize; 4], heads_kv: usize) -> [usize; 3] {
        match self {
            Self::PerTensor => [1, 1, 1],
            Self::PerHead => [batch, heads_kv, 1],
            Self::PerBlock => [batch, heads, seqlen.div_ceil(SCALE_BLOCK)],
        }
    }
}

impl fmt::Display for Scaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
