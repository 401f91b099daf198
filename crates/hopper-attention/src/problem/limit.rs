//! The most workspace that a plan may need.

use super::forward::{ForwardProblem, ForwardProblemBuilder};

impl ForwardProblemBuilder {
    /// The most bytes that the workspace of a plan may have (default: `None`, as many as the fastest plan needs).
    ///
    /// Plans for Hopper GPUs cut tiles where that is faster. Several CTAs (thread blocks) then compute one tile, and leave
    /// partial sums in the workspace:
    /// - Gradients: the tiles of keys have shares. A share is some query heads, or some blocks of queries.
    /// - Forward passes in 16 bits where few queries see many keys: several clusters share a tile's keys.
    /// - e4m3 operands: the last tiles are split by blocks of keys.
    ///
    /// With a limit, a plan takes the fastest cut whose whole workspace has at most so many bytes. Where there is none, its tiles
    /// are not cut. Where the workspace has more bytes even then, planning is [`Error::Value`](crate::Error::Value), which names
    /// both numbers.
    ///
    /// - A limit chooses among cuts alone, and not among kernels. A plan that meets the limit without it is the same with it.
    /// - Other plans never cut tiles in this way: those for sm80 kernels, packed sequences, used lengths, lists of blocks, and in the
    ///   forward pass modified scores and 16-bit head dims above 128. Their workspace is only compared. CTAs that share a tile through
    ///   shared memory need no workspace.
    /// - On the CPU a plan needs no workspace, and meets every limit.
    /// - `Some(0)` asks for a plan without a workspace. Gradients on a GPU always need one.
    ///
    /// A backward problem made from this one has the same limit, unless it is given another one. A [`Quantizer`](crate::Quantizer)
    /// has none.
    pub fn workspace_limit(mut self, bytes: Option<u64>) -> Self {
        self.workspace_limit = bytes;
        self
    }
}

impl ForwardProblem {
    /// The most bytes that the workspace of a plan may have. `None`: any number.
    pub fn workspace_limit(&self) -> Option<u64> {
        self.workspace_limit
    }
}
