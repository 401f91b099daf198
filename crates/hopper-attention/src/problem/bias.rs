//! The form of an additive bias of the scores.

use std::fmt;

use super::dims::Dims;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::operand::{Slot, SlotSet};

/// The form of an additive bias of the scores: its element type, and which dimensions it has.
///
/// The operand [`Slot::Bias`] is `[B, H, Q, seqlen_kv]`. `B` is 1 or `batch`, `H` is 1 or `heads_q`, and `Q` is 1 or `seqlen_q`. A
/// dimension of 1 is shared: all batch entries, query heads or queries read the same numbers.
///
/// ```text
/// S = mask(softcap(softmax_scale * q . k) + bias - slope * distance)        the last term where there is ALiBi
/// ```
///
/// - The softmax scale does not multiply the bias, and the softcap does not cap it.
/// - A bias of -inf hides its pair of a query and a key exactly as a mask does. Nothing of the pair reaches a result, NaN included.
///   A query whose pairs are all hidden has output 0, and LSE -inf or its sink.
/// - A bias of NaN or +inf of a pair that the mask keeps makes the results of its query NaN. It reaches no other query.
/// - Any type goes with Q, K and V of any type but e4m3. The bias is widened to f32 before it is added.
///
/// With packed sequences or used lengths, query 0 and key 0 of a bias are the first of each sequence, and batch entries are sequences.
/// [`covering`](Self::covering) says how long sequences may be.
///
/// GPUs have no backward pass with a bias and a softcap, also where the gradient of the bias is not asked for: a plan refuses it by
/// name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use]
pub struct Bias {
    dtype: DType,
    per_batch: bool,
    per_head: bool,
    per_query: bool,
    covering: Option<[usize; 2]>,
}

impl Bias {
    /// A bias of each key, which all batch entries, heads and queries share: `[1, 1, 1, seqlen_kv]`. Its type is f32, bf16 or f16.
    pub fn new(dtype: DType) -> Self {
        Self { dtype, per_batch: false, per_head: false, per_query: false, covering: None }
    }

    /// How many queries and keys of a sequence have numbers (default: `seqlen_q` and `seqlen_kv` of the problem).
    ///
    /// This is for packed sequences, where `seqlen_q` and `seqlen_kv` are the rows of all sequences together. A bias that is shared
    /// by all sequences, such as T5's, then has the size of the longest one: `[1, heads_q, queries, keys]`. A side that is not packed
    /// must be covered whole.
    ///
    /// - A sequence has at most `keys` keys, and where each query has numbers of its own, at most `queries` queries. Longer ones are
    ///   refused where the host knows the lengths.
    /// - Where the device alone knows them, a longer sequence is cut to the size of the bias. The rows of its queries and keys past
    ///   that are as those after a used length.
    /// - `queries` changes nothing where the queries share their numbers.
    pub fn covering(self, queries: usize, keys: usize) -> Self {
        Self { covering: Some([queries, keys]), ..self }
    }

    /// Whether each batch entry has a bias of its own (default: no).
    pub fn per_batch(self, own: bool) -> Self {
        Self { per_batch: own, ..self }
    }

    /// Whether each query head has a bias of its own (default: no).
    pub fn per_head(self, own: bool) -> Self {
        Self { per_head: own, ..self }
    }

    /// Whether each query has a bias of its own (default: no).
    pub fn per_query(self, own: bool) -> Self {
        Self { per_query: own, ..self }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Whether each batch entry has a bias of its own.
    pub fn is_per_batch(&self) -> bool {
        self.per_batch
    }

    /// Whether each query head has a bias of its own.
    pub fn is_per_head(&self) -> bool {
        self.per_head
    }

    /// Whether each query has a bias of its own.
    pub fn is_per_query(&self) -> bool {
        self.per_query
    }

    /// How many queries and keys of a sequence have numbers, where [`covering`](Self::covering) has said it.
    pub fn covered(&self) -> Option<[usize; 2]> {
        self.covering
    }

    /// The shape for these sizes: `[B, H, Q, K]`.
    pub(crate) fn shape(&self, dims: &Dims) -> [usize; 4] {
        let of = |own: bool, size: usize| if own { size } else { 1 };
        let (batch, heads) = (of(self.per_batch, dims.batch), of(self.per_head, dims.heads_q));
        let [queries, keys] = self.covering.unwrap_or([dims.seqlen_q, dims.seqlen_kv]);
        [batch, heads, of(self.per_query, queries), keys]
    }

    /// That of one sequence, which is a problem of its own.
    pub(super) fn of_sequence(self) -> Self {
        Self { covering: None, ..self }
    }

    /// Refuses a bias of another type, and one that the problem's other options do not go with.
    pub(super) fn check(&self, dtype: DType, dims: &Dims, asked_for: SlotSet) -> Result<()> {
        if !matches!(self.dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(Error::Dtype { what: "bias", got: self.dtype, allowed: "f32, bf16, f16".into() });
        }
        let unsupported = |with: &str, nearest: &str| {
            Err(Error::Unsupported { wanted: format!("a bias with {with}"), nearest: nearest.into() })
        };
        if dtype == DType::E4M3 {
            return unsupported("e4m3 operands", "bf16, f16 or f32 operands, or no bias");
        }
        let [queries, keys] = self.covering.unwrap_or([dims.seqlen_q, dims.seqlen_kv]);
        let sides = [
            ("queries", queries, dims.seqlen_q, Slot::CuSeqlensQ, self.per_query),
            ("keys", keys, dims.seqlen_kv, Slot::CuSeqlensKv, true),
        ];
        for (what, covered, rows, offsets, own) in sides {
            if own && covered != rows && !asked_for.contains(offsets) {
                let (got, allowed) =
                    (format!("covering {covered} {what}"), format!("{rows}, since they are not packed"));
                return Err(Error::Value { what: "bias", got, allowed });
            }
        }
        Ok(())
    }
}

impl fmt::Display for Bias {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, " bias {}", self.dtype)?;
        for (has, text) in
            [(self.per_batch, " per batch"), (self.per_head, " per head"), (self.per_query, " per query")]
        {
            f.write_str(if has { text } else { "" })?;
        }
        match self.covering {
            Some([queries, keys]) if self.per_query => write!(f, " covering {queries} {keys}"),
            Some([_, keys]) => write!(f, " covering {keys}"),
            None => Ok(()),
        }
    }
}
