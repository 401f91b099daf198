//! Lists of blocks of documents: tokens attend to those of their own document.

use std::collections::HashMap;

use super::owned::{Keys, OwnedBlockLists};
use crate::error::{Error, Result};
use crate::problem::{BlockMask, Dims};

impl OwnedBlockLists {
    /// The lists that keep the pairs of a query and a key of one document: those with equal numbers. A negative number keeps
    /// nothing, such as that of padding.
    ///
    /// `q_ids` is `[B, seqlen_q]` and `kv_ids` is `[B, seqlen_kv]`, where `B` is the batch, or 1 if all batch entries share them.
    /// A document need not be in one piece. The problem's own mask holds beside the lists: with a causal mask, tokens attend to
    /// earlier ones of their document.
    ///
    /// # Errors
    /// - [`Error::Shape`]: there is another number of ids.
    /// - As [`from_predicate`](Self::from_predicate).
    pub fn from_documents(dims: Dims, q_ids: &[i32], kv_ids: &[i32]) -> Result<Self> {
        dims.check()?;
        let shared = q_ids.len() == dims.seqlen_q && kv_ids.len() == dims.seqlen_kv;
        let batch = if shared { 1 } else { dims.batch };
        for (tensor, ids, seqlen) in [("q_ids", q_ids, dims.seqlen_q), ("kv_ids", kv_ids, dims.seqlen_kv)] {
            if batch.checked_mul(seqlen) != Some(ids.len()) {
                let (got, want) = (vec![ids.len()], vec![dims.batch, seqlen]);
                return Err(Error::Shape { tensor, got, want, axes: "[batch, seqlen]" });
            }
        }
        let mut of_documents: HashMap<(usize, i32), Vec<Keys>> = HashMap::new();
        for batch in 0..batch {
            let ids = &kv_ids[batch * dims.seqlen_kv..][..dims.seqlen_kv];
            let mut first = 0;
            for run in ids.chunk_by(|a, b| a == b) {
                of_documents.entry((batch, run[0])).or_default().push([first, first + run.len()]);
                first += run.len();
            }
        }
        let form = BlockMask::new(0).per_batch(batch != 1);
        Self::from_keys(dims, form, |[batch, _, query], kept| {
            let id = q_ids[batch * dims.seqlen_q + query];
            if let Some(runs) = of_documents.get(&(batch, id)).filter(|_| id >= 0) {
                kept.extend_from_slice(runs);
            }
            Ok(())
        })
    }
}
