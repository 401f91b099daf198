//! Which elements of an e4m3 tensor share a descale factor: [`Scaling`].

use std::fmt;

/// Rows (queries of Q, keys of K and V) that share a descale factor under [`Scaling::PerBlock`].
pub const SCALE_BLOCK: usize = 128;

/// Which elements of an e4m3 operand share an f32 descale factor. A real value is `stored * descale`.
///
/// The factors of an operand are a tensor `[batch, heads, blocks]`. A dimension has size 1 where all of its entries share
/// the factor:
///
/// | | `descale_q` | `descale_k`, `descale_v` |
/// |---|---|---|
/// | per tensor | `[1, 1, 1]` | `[1, 1, 1]` |
/// | per head | `[batch, heads_kv, 1]` | `[batch, heads_kv, 1]` |
/// | per block | `[batch, heads_q, ceil(seqlen_q / 128)]` | `[batch, heads_kv, ceil(seqlen_kv / 128)]` |
///
/// - Per head, all query heads that read one KV head share one factor of Q.
/// - Per block, block `i` of a head has the rows `128 * i` to `128 * i + 127`. The last block may be shorter.
/// - Packed sequences with factors per block: the factors are `[heads, blocks]`, and each sequence has blocks of its own. The
///   first block of sequence `i` is block `floor((begin + 127 i) / 128)`, with `begin` as its first row. There are
///   `floor((total + 127 batch) / 128)` blocks. Some of them may belong to no sequence: their factors are neither read nor
///   checked. Per tensor and per head the shapes are those of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scaling {
    /// One factor for each of Q, K and V.
    #[default]
    PerTensor,
    /// One factor for each sequence and KV head.
    PerHead,
    /// One factor for each block of 128 rows of a head.
    PerBlock,
}

impl Scaling {
    /// All scalings, from coarse to fine.
    pub const ALL: [Self; 3] = [Self::PerTensor, Self::PerHead, Self::PerBlock];

    /// The name that [`Display`](fmt::Display) prints: `per-tensor`, `per-head` or `per-block`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PerTensor => "per-tensor",
            Self::PerHead => "per-head",
            Self::PerBlock => "per-block",
        }
    }

    /// The index `[batch, head, block]` of a row's factor in the tensor of factors.
    ///
    /// `batch`, `head` and `token` name the row. `group` is the number of heads for each KV head: `heads_q / heads_kv` for Q,
    /// 1 for K and V.
    pub const fn index(self, batch: usize, head: usize, group: usize, token: usize) -> [usize; 3] {
        match self {
            Self::PerTensor => [0, 0, 0],
            Self::PerHead => [batch, head / group, 0],
            Self::PerBlock => [batch, head, token / SCALE_BLOCK],
        }
    }

    /// The shape of the factors of a tensor with `batch` sequences. For packed rows with factors per block the batch of the
    /// shape is 1.
    pub(crate) fn shape(self, batch: usize, rows: Rows, heads: usize, heads_kv: usize) -> [usize; 3] {
        match (self, rows) {
            (Self::PerTensor, _) => [1, 1, 1],
            (Self::PerHead, _) => [batch, heads_kv, 1],
            (Self::PerBlock, Rows::Padded { seqlen }) => [batch, heads, seqlen.div_ceil(SCALE_BLOCK)],
            (Self::PerBlock, Rows::Packed { total }) => [1, heads, first_block(total, batch)],
        }
    }
}

/// The rows of a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rows {
    /// Each sequence has as many.
    Padded { seqlen: usize },
    /// Those of all sequences together.
    Packed { total: usize },
}

/// The first block of factors of sequence `i` of a packed tensor, which begins with row `begin`. For `begin` as the number of
/// all rows and `i` as the number of sequences it is the number of blocks.
pub(crate) const fn first_block(begin: usize, i: usize) -> usize {
    begin.saturating_add(i.saturating_mul(SCALE_BLOCK - 1)) / SCALE_BLOCK
}

impl fmt::Display for Scaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
