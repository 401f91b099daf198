//! What a backward pass is to compute: [`BackwardProblem`].

use std::fmt;

use super::{Dims, ForwardProblem};
use crate::{DType, Mask};

/// The gradients of a forward pass with respect to Q, K and V: the forward problem itself, and options of its own.
///
/// Of the forward pass it needs the output and the log-sum-exp, so [`forward`](Self::forward) always wants the latter.
/// FP8 operands have no backward pass: no plan is made of such a problem, and no arguments can be.
///
/// ```
/// use hopper_attention::{BackwardProblem, DType, Dims, ForwardProblem, Mask};
/// # fn main() -> hopper_attention::Result<()> {
/// let dims = Dims { batch: 2, seqlen_q: 512, seqlen_kv: 512, heads_q: 8, heads_kv: 2, head_dim_qk: 64, head_dim_vo: 64 };
/// let forward = ForwardProblem::new(DType::BF16, dims)?.mask(Mask::causal());
/// let backward = BackwardProblem::of(&forward).deterministic(true);
/// assert!(backward.forward().wants_lse());
/// assert_eq!((backward.d_q_shape(), backward.d_k_shape()), (forward.q_shape(), forward.k_shape()));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct BackwardProblem {
    forward: ForwardProblem,
    d_lse: bool,
    deterministic: bool,
}

impl BackwardProblem {
    /// The gradients of this forward pass, whether or not it was made with its LSE: without a gradient of the LSE, and
    /// in whatever order of summation is fastest.
    #[must_use]
    pub fn of(forward: &ForwardProblem) -> Self {
        Self { forward: forward.clone().lse(true), d_lse: false, deterministic: false }
    }

    /// The same problem with or without a gradient of the LSE as an input, f32, `[batch, heads_q, seqlen_q]`: for what
    /// uses the LSE itself, such as ring attention and auxiliary losses.
    #[must_use]
    pub fn d_lse(self, given: bool) -> Self {
        Self { d_lse: given, ..self }
    }

    /// The same problem with or without the promise that the same inputs, plan and device give the same bits. On an H200
    /// it costs up to 4% without a mask and 3 to 11% under a causal one, from 512 to 16k tokens (`benches/LOG.md`, 18).
    /// The CPU keeps it in any case.
    #[must_use]
    pub fn deterministic(self, wanted: bool) -> Self {
        Self { deterministic: wanted, ..self }
    }

    /// The forward pass that leaves what this one reads.
    pub fn forward(&self) -> &ForwardProblem {
        &self.forward
    }

    /// Whether a gradient of the LSE is an input.
    pub fn takes_d_lse(&self) -> bool {
        self.d_lse
    }

    /// Whether the same bits are asked for on every run.
    pub fn is_deterministic(&self) -> bool {
        self.deterministic
    }

    /// The element type of Q, K, V, O and all gradients.
    pub fn dtype(&self) -> DType {
        self.forward.dtype()
    }

    /// The sizes.
    pub fn dims(&self) -> Dims {
        self.forward.dims()
    }

    /// The forward pass's mask.
    pub fn mask_value(&self) -> Mask {
        self.forward.mask_value()
    }

    /// The factor on `Q K^T`.
    pub fn softmax_scale_value(&self) -> f32 {
        self.forward.softmax_scale_value()
    }

    /// Whether there is no gradient to compute. (A problem with keys and no queries has some: zeros.)
    pub fn is_empty(&self) -> bool {
        let dims = self.dims();
        dims.batch == 0 || (dims.seqlen_q == 0 && dims.seqlen_kv == 0)
    }

    /// `[batch, seqlen_q, heads_q, head_dim_vo]`, as O.
    pub fn d_o_shape(&self) -> [usize; 4] {
        self.forward.o_shape()
    }

    /// `[batch, heads_q, seqlen_q]`, as the LSE.
    pub fn d_lse_shape(&self) -> [usize; 3] {
        self.forward.lse_shape()
    }

    /// `[batch, seqlen_q, heads_q, head_dim_qk]`, as Q.
    pub fn d_q_shape(&self) -> [usize; 4] {
        self.forward.q_shape()
    }

    /// `[batch, seqlen_kv, heads_kv, head_dim_qk]`, as K.
    pub fn d_k_shape(&self) -> [usize; 4] {
        self.forward.k_shape()
    }

    /// `[batch, seqlen_kv, heads_kv, head_dim_vo]`, as V.
    pub fn d_v_shape(&self) -> [usize; 4] {
        self.forward.v_shape()
    }
}

impl fmt::Display for BackwardProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let d_lse = if self.d_lse { " d_lse" } else { "" };
        let deterministic = if self.deterministic { " deterministic" } else { "" };
        write!(f, "backward {} scale {}{d_lse}{deterministic}", self.forward.numbers(), self.softmax_scale_value())?;
        self.forward.write_arch(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arch;

    const DIMS: Dims =
        Dims { batch: 2, seqlen_q: 5, seqlen_kv: 7, heads_q: 6, heads_kv: 2, head_dim_qk: 16, head_dim_vo: 8 };

    fn forward() -> ForwardProblem {
        ForwardProblem::new(DType::BF16, DIMS).unwrap().mask(Mask::causal()).softmax_scale(0.5).unwrap()
    }

    #[test]
    fn it_holds_the_forward_problem_with_its_lse() {
        let backward = BackwardProblem::of(&forward());
        assert_eq!(backward.forward(), &forward().lse(true));
        assert_eq!(backward, BackwardProblem::of(&forward().lse(true)));
        assert_eq!((backward.dtype(), backward.dims(), backward.mask_value()), (DType::BF16, DIMS, Mask::causal()));
        assert_eq!((backward.softmax_scale_value(), backward.takes_d_lse()), (0.5, false));
        assert!(!backward.is_deterministic() && backward.d_lse(true).deterministic(true).is_deterministic());
    }

    #[test]
    fn gradients_have_the_shapes_of_what_they_are_gradients_of() {
        let backward = BackwardProblem::of(&forward());
        assert_eq!((backward.d_q_shape(), backward.d_k_shape()), ([2, 5, 6, 16], [2, 7, 2, 16]));
        assert_eq!((backward.d_v_shape(), backward.d_o_shape()), ([2, 7, 2, 8], [2, 5, 6, 8]));
        assert_eq!(backward.d_lse_shape(), [2, 6, 5]);
        let of = |dims| BackwardProblem::of(&ForwardProblem::new(DType::BF16, dims).unwrap()).is_empty();
        assert!(!of(DIMS) && !of(Dims { seqlen_q: 0, ..DIMS }) && !of(Dims { seqlen_kv: 0, ..DIMS }));
        assert!(of(Dims { batch: 0, ..DIMS }) && of(Dims { seqlen_q: 0, seqlen_kv: 0, ..DIMS }));
    }

    #[test]
    fn display() {
        let backward = BackwardProblem::of(&forward());
        let text = "backward bf16 batch 2 seqlen 5x7 heads 6/2 head_dim 16/8 causal scale 0.5";
        assert_eq!(backward.to_string(), text);
        assert_eq!(backward.d_lse(true).deterministic(true).to_string(), format!("{text} d_lse deterministic"));
        assert_eq!(BackwardProblem::of(&forward().arch(Arch::Sm80)).to_string(), format!("{text} on sm80"));
    }
}
