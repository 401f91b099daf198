//! Which pairs dropout keeps, as a tensor of an output.

use anyhow::{Context, Result, ensure};
use hopper_attention::ForwardProblem;
use hopper_attention::reference::DropoutMask;
use hopper_attention_benches::memory;
use hopper_attention_verify::packing::longest;

use crate::output::NamedTensor;
use crate::values::{Tensors, dropout_state, lengths};

/// The most pairs that are written.
const MOST: usize = 1 << 32;

/// A byte for each pair of a query and a key: 1 where dropout keeps it, else 0.
pub struct Kept {
    /// `[batch, heads_q, seqlen_q, seqlen_kv]`. Of packed sequences `[sequences, heads_q, longest, longest]`.
    pub shape: [usize; 4],
    bytes: Vec<u8>,
}

impl Kept {
    /// The name of the tensor.
    pub const NAME: &'static str = "dropout_mask";

    /// What the dropout of a problem keeps, with the seed and the offset that were read.
    pub fn new(problem: &ForwardProblem, tensors: &Tensors) -> Result<Self> {
        let mask = DropoutMask::of(problem, dropout_state(tensors)).context("the seed and the offset of dropout")?;
        let dims = problem.dims();
        let sequences: Vec<_> = lengths(tensors).sequences(problem).map(|sides| sides.map(|rows| rows.len)).collect();
        // A side that is not packed has the rows of its tensor, also where fewer are used.
        let [most_q, most_kv] = longest(&sequences);
        let queries = if problem.is_packed_q() { most_q } else { dims.seqlen_q };
        let keys = if problem.is_packed_kv() { most_kv } else { dims.seqlen_kv };
        let shape = [dims.batch, dims.heads_q, queries, keys];
        let pairs = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        let pairs = pairs.filter(|&pairs| pairs <= MOST);
        ensure!(pairs.is_some(), "--dropout-mask of {shape:?}; allowed: up to 2^32 pairs of query and key");
        let mut bytes = memory::reserved(pairs.unwrap_or(0))?;
        for row in 0..if keys == 0 { 0 } else { dims.batch * dims.heads_q * queries } {
            let (batch, head, query) = (row / queries / dims.heads_q, row / queries % dims.heads_q, row % queries);
            bytes.extend((0..keys).map(|key| u8::from(mask.keeps(batch, head, query, key))));
        }
        Ok(Self { shape, bytes })
    }

    /// As a tensor of a file.
    pub fn named(&self) -> NamedTensor<'_> {
        NamedTensor { name: Self::NAME, dtype: "u8", shape: self.shape.into(), bytes: &self.bytes }
    }
}
