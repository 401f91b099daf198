//! The sizes of a problem.

use crate::error::{Error, Result};

/// `seqlen_q + seqlen_kv` stays below this, so that kernels may count keys and mask bounds in 32 bits.
const SEQLEN_SUM_END: usize = 1 << 30;

/// The sizes of a problem.
///
/// | tensor | shape |
/// |---|---|
/// | Q | `[batch, seqlen_q, heads_q, head_dim_qk]` |
/// | K | `[batch, seqlen_kv, heads_kv, head_dim_qk]` |
/// | V | `[batch, seqlen_kv, heads_kv, head_dim_vo]` |
/// | O | `[batch, seqlen_q, heads_q, head_dim_vo]` |
///
/// The sizes are checked when a problem is built, not here:
/// `seqlen_q + seqlen_kv < 2^30`, `batch * heads_q < 2^31`, and every head dim is below 2^31.
///
/// # Head dims
///
/// `head_dim_vo` may be smaller or larger than `head_dim_qk`. Which pairs are computed depends on the device:
///
/// - The CPU takes every pair, in both passes and in the [`Quantizer`](crate::Quantizer). (It is tested with multiples of 8 up
///   to 512, and with some others.)
/// - A GPU takes multiples of 8, and of 16 for e4m3 operands, up to those of the compiled kernels
///   ([`kernels`](crate::kernels), [`backward_kernels`](crate::backward_kernels)): 256 in the forward, 128 in the
///   backward. A smaller head dim runs exactly in a larger kernel. Other head dims are refused
///   by name when a plan is made.
///
/// ```
/// use hopper_attention::Dims;
/// // Grouped queries: 32 query heads read 8 KV heads of 128, in 4 sequences of 2048.
/// let dims = Dims::new(4, 2048, 32, 128).with_heads_kv(8);
/// assert_eq!((dims.seqlen_kv, dims.head_dim_vo), (2048, 128));
/// // Queries and keys of 192 elements, values of 128.
/// assert_eq!(Dims::new(1, 2048, 16, 192).with_head_dim_vo(128).head_dim_qk, 192);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Dims {
    /// Sequences in the batch. May be 0.
    pub batch: usize,
    /// Queries in a sequence. May be 0.
    pub seqlen_q: usize,
    /// Keys in a sequence. May be 0.
    pub seqlen_kv: usize,
    /// Query heads, a multiple of `heads_kv`. Query head `h` reads KV head `h / (heads_q / heads_kv)`.
    pub heads_q: usize,
    /// Key and value heads, at least 1.
    pub heads_kv: usize,
    /// Elements in the vector of a query or a key, at least 1.
    pub head_dim_qk: usize,
    /// Elements in the vector of a value or an output, at least 1.
    pub head_dim_vo: usize,
}

impl Dims {
    /// The sizes of self-attention: as many keys as queries, as many KV heads as query heads, and one head dim for all.
    pub const fn new(batch: usize, seqlen: usize, heads: usize, head_dim: usize) -> Self {
        Self {
            batch,
            seqlen_q: seqlen,
            seqlen_kv: seqlen,
            heads_q: heads,
            heads_kv: heads,
            head_dim_qk: head_dim,
            head_dim_vo: head_dim,
        }
    }

    /// The same sizes with another number of sequences.
    #[must_use]
    pub const fn with_batch(self, batch: usize) -> Self {
        Self { batch, ..self }
    }

    /// The same sizes with another number of queries in a sequence.
    #[must_use]
    pub const fn with_seqlen_q(self, seqlen_q: usize) -> Self {
        Self { seqlen_q, ..self }
    }

    /// The same sizes with another number of keys in a sequence.
    #[must_use]
    pub const fn with_seqlen_kv(self, seqlen_kv: usize) -> Self {
        Self { seqlen_kv, ..self }
    }

    /// The same sizes with another number of query heads.
    #[must_use]
    pub const fn with_heads_q(self, heads_q: usize) -> Self {
        Self { heads_q, ..self }
    }

    /// The same sizes with another number of KV heads.
    #[must_use]
    pub const fn with_heads_kv(self, heads_kv: usize) -> Self {
        Self { heads_kv, ..self }
    }

    /// The same sizes with another head dim of Q and K.
    #[must_use]
    pub const fn with_head_dim_qk(self, head_dim_qk: usize) -> Self {
        Self { head_dim_qk, ..self }
    }

    /// The same sizes with another head dim of V and O.
    #[must_use]
    pub const fn with_head_dim_vo(self, head_dim_vo: usize) -> Self {
        Self { head_dim_vo, ..self }
    }

    /// The number of query heads that read one KV head: `heads_q / heads_kv`.
    pub const fn group_size(&self) -> usize {
        self.heads_q / self.heads_kv
    }

    /// Refuses sizes that no problem has.
    pub(crate) fn check(&self) -> Result<()> {
        let value = |what, got: String, allowed: &str| Err(Error::Value { what, got, allowed: allowed.into() });
        let Self { batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim_qk, head_dim_vo } = *self;
        for (what, got) in [("heads_q", heads_q), ("heads_kv", heads_kv)] {
            if got == 0 {
                return value(what, got.to_string(), "1 and above");
            }
        }
        for (what, got) in [("head_dim_qk", head_dim_qk), ("head_dim_vo", head_dim_vo)] {
            if got == 0 || got > i32::MAX as usize {
                return value(what, got.to_string(), "1 to 2^31 - 1");
            }
        }
        if !heads_q.is_multiple_of(heads_kv) {
            return value("heads_q", format!("{heads_q} with heads_kv {heads_kv}"), "a multiple of heads_kv");
        }
        if seqlen_q.checked_add(seqlen_kv).is_none_or(|sum| sum >= SEQLEN_SUM_END) {
            return value("seqlen_q + seqlen_kv", format!("{seqlen_q} + {seqlen_kv}"), "below 2^30");
        }
        if batch.max(1).checked_mul(heads_q).is_none_or(|heads| heads > i32::MAX as usize) || batch > i32::MAX as usize
        {
            return value("batch * heads_q", format!("{batch} * {heads_q}"), "below 2^31");
        }
        Ok(())
    }
}
