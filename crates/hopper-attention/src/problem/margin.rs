//! The multiprocessors that kernels leave to others.

use super::forward::{ForwardProblem, ForwardProblemBuilder};

impl ForwardProblemBuilder {
    /// The number of multiprocessors of the GPU that the kernels leave to others (default: 0).
    ///
    /// Other work needs free multiprocessors to run beside attention, such as the kernels of a collective operation
    /// (NCCL).
    ///
    /// - sm90 kernels have one CTA (thread block) a multiprocessor, which computes one tile after another. With a margin their
    ///   grid is at most `multiprocessors - sm_margin` CTAs. This holds for 16-bit and e4m3 operands. The margin must leave a
    ///   multiprocessor.
    /// - sm80 kernels have a CTA for each tile. They cannot leave a multiprocessor free, so a plan with a margin is refused.
    /// - On the CPU a margin has no meaning and is ignored. So one problem has plans for both devices.
    ///
    /// A backward problem made from this one has the same margin.
    ///
    /// The margin holds for the kernels that a plan names. Small kernels do not follow it: those of a backward pass that make
    /// statistics and convert sums to gradients, the one that makes a table of packed sequences, and those that fill outputs
    /// where there are no keys, or no sequence. Nor does the [`Quantizer`](crate::Quantizer), which takes all multiprocessors.
    ///
    /// Which multiprocessors stay free, the GPU decides.
    pub fn sm_margin(mut self, multiprocessors: usize) -> Self {
        self.sm_margin = multiprocessors;
        self
    }
}

impl ForwardProblem {
    /// The number of multiprocessors that the kernels leave to others.
    pub fn sm_margin(&self) -> usize {
        self.sm_margin
    }
}
