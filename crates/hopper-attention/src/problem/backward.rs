//! What a backward pass computes: [`BackwardProblem`], and the builder that checks it.

use std::fmt;

use super::dims::Dims;
use super::forward::ForwardProblem;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::mask::Mask;
use crate::operand::{Operand, Operands, Slot, SlotSet};

/// A backward pass: the gradients of a forward pass with respect to Q, K and V.
///
/// It holds the forward problem, and options of its own. The backward pass reads the forward's output and log-sum-exp
/// (LSE). So the problem that [`forward`](Self::forward) returns always has the LSE as an output. It never has the
/// [maximum logit](crate::ForwardProblemBuilder::max_logits), which has no part in gradients.
///
/// Packed tensors and used lengths are those of the forward problem. Each gradient has the shape of the tensor that it belongs
/// to. The rows of gradients that belong to no sequence are not written, unless the forward problem fills gaps.
///
/// ```
/// use hopper_attention::{BackwardProblem, DType, Dims, ForwardProblem, Mask};
/// # fn main() -> hopper_attention::Result<()> {
/// let dims = Dims::new(2, 512, 8, 64).with_heads_kv(2);
/// let forward = ForwardProblem::builder(DType::BF16, dims).mask(Mask::causal()).build()?;
/// let backward = BackwardProblem::builder(&forward).deterministic(true).build()?;
/// assert!(backward.forward().wants_lse());
/// assert_eq!((backward.d_q_shape(), backward.d_k_shape()), (forward.q_shape(), forward.k_shape()));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BackwardProblem {
    forward: ForwardProblem,
    /// The optional operands that were asked for.
    asked_for: SlotSet,
    deterministic: bool,
}

/// The options of a [`BackwardProblem`]. [`build`](Self::build) checks them.
#[derive(Clone, Debug)]
#[must_use]
pub struct BackwardProblemBuilder {
    forward: ForwardProblem,
    /// The optional operands that were asked for.
    asked_for: SlotSet,
    deterministic: bool,
    sm_margin: usize,
    workspace_limit: Option<u64>,
}

impl BackwardProblemBuilder {
    /// Whether the gradient of the LSE is an input: f32, `[batch, heads_q, seqlen_q]` (default: no).
    ///
    /// It is needed where the loss depends on the LSE itself, as in ring attention and some auxiliary losses.
    pub fn d_lse(self, given: bool) -> Self {
        self.operand(Slot::DLse, given)
    }

    /// Whether the gradient of the attention sinks is an output: f32, `[heads_q]` (default: no). The forward problem must have
    /// [`sinks`](crate::ForwardProblemBuilder::sinks), which the run then reads.
    ///
    /// With `P = exp(s - LSE')`, the weight of the sink in a row, and `delta = rowsum(dO * O') - dLSE`
    ///
    /// ```text
    /// dSink[h] = -sum of P * delta        over all rows of the query head, of all sequences
    /// ```
    ///
    /// Rows of a head are added in a fixed order in f64 on a GPU, and in f64 on the CPU. So the same inputs give the same bits,
    /// also without [`deterministic`](Self::deterministic). (The formula is that of MagiAttention's `attn_sink.md`, with dLSE.)
    ///
    /// - Where the sink is -inf its gradient is 0. A row with LSE -inf has no part in it.
    /// - Where the sink and LSE' are equal, also where both are inf, P is 1.
    /// - A row without keys has O' = 0 whatever the sink is. So dO has no part in it there, also where it is NaN. Its LSE' is the sink,
    ///   so it adds its dLSE.
    pub fn d_sinks(self, wanted: bool) -> Self {
        self.operand(Slot::DSinks, wanted)
    }

    /// Whether the gradient of the bias is an output, in the shape and type of the bias (default: no). The forward problem must have
    /// a [`bias`](crate::ForwardProblemBuilder::bias).
    ///
    /// ```text
    /// dBias = P * (dO V^T - delta)        summed over the batch entries, heads and queries that share a bias
    /// ```
    ///
    /// - It is the gradient of the loss with respect to the bias itself. The softmax scale and the derivative of a softcap are not
    ///   in it.
    /// - It is summed in f32, in a fixed order: the same inputs give the same bits, with any number of threads. No buffer grows with
    ///   `seqlen_q * seqlen_kv`.
    /// - Where all pairs that share a bias are hidden, the gradient is 0.
    /// - On the CPU it takes a third walk over all pairs.
    pub fn d_bias(self, wanted: bool) -> Self {
        self.operand(Slot::DBias, wanted)
    }

    /// Adds or removes an optional operand by its name. `operand(Slot::DLse, true)` is the same as `d_lse(true)`.
    pub fn operand(self, slot: Slot, wanted: bool) -> Self {
        Self { asked_for: self.asked_for.with(slot, wanted), ..self }
    }

    /// Whether the same inputs, plan and device must give the same bits (default: no).
    ///
    /// On an H200, with 512 to 16k tokens, this takes up to 4% more time without a mask and 3 to 11% more with a causal mask
    /// (`benches/log/entries-1-to-18.md`, entry 18). On the CPU results repeat in any case.
    pub fn deterministic(self, wanted: bool) -> Self {
        Self { deterministic: wanted, ..self }
    }

    /// The number of multiprocessors of the GPU that the main kernel leaves to others (default: that of the forward
    /// problem). [`ForwardProblemBuilder::sm_margin`](crate::ForwardProblemBuilder::sm_margin) says what it does.
    ///
    /// The problem that [`BackwardProblem::forward`] returns then has this margin, too.
    pub fn sm_margin(self, multiprocessors: usize) -> Self {
        Self { sm_margin: multiprocessors, ..self }
    }

    /// The most bytes that the workspace of a plan may have (default: the limit of the forward problem).
    /// [`ForwardProblemBuilder::workspace_limit`](crate::ForwardProblemBuilder::workspace_limit) says what it does.
    ///
    /// A GPU's gradients need much more workspace than a forward pass: see
    /// [`BackwardPlan::workspace_bytes`](crate::BackwardPlan::workspace_bytes). The problem that [`BackwardProblem::forward`]
    /// returns then has this limit, too.
    pub fn workspace_limit(self, bytes: Option<u64>) -> Self {
        Self { workspace_limit: bytes, ..self }
    }

    /// Checks the options and makes the problem.
    ///
    /// # Errors
    /// - [`Error::Dtype`] for a forward problem with e4m3 operands, which has no gradients.
    /// - [`Error::Value`] for an operand that is not an optional operand of a backward pass, and for the gradient of sinks or of a
    ///   bias where the forward problem has none.
    pub fn build(self) -> Result<BackwardProblem> {
        let Self { forward, asked_for, deterministic, sm_margin, workspace_limit } = self;
        asked_for.check_among(&[Slot::DLse, Slot::DSinks, Slot::DBias])?;
        if asked_for.contains(Slot::DBias) && forward.bias().is_none() {
            let allowed = "with a forward problem that was made with a bias only".into();
            return Err(Error::Value { what: "d_bias", got: "asked for".into(), allowed });
        }
        if asked_for.contains(Slot::DSinks) && forward.sinks().is_none() {
            let allowed = "with a forward problem that was made with sinks only".into();
            return Err(Error::Value { what: "d_sinks", got: "asked for".into(), allowed });
        }
        if forward.dtype() == DType::E4M3 {
            let allowed = "bf16, f16, f32".into();
            return Err(Error::Dtype { what: "q, k and v", got: DType::E4M3, allowed });
        }
        let options = forward.to_builder().lse(true).max_logits(false).sm_margin(sm_margin);
        let forward = options.workspace_limit(workspace_limit).build()?;
        Ok(BackwardProblem { forward, asked_for, deterministic })
    }
}

impl BackwardProblem {
    /// A builder for the gradients of this forward problem. `forward` need not have the LSE as an output.
    pub fn builder(forward: &ForwardProblem) -> BackwardProblemBuilder {
        BackwardProblemBuilder {
            forward: forward.clone(),
            asked_for: SlotSet::default(),
            deterministic: false,
            sm_margin: forward.sm_margin(),
            workspace_limit: forward.workspace_limit(),
        }
    }

    /// A builder with the options of this problem, to make a similar one.
    pub fn to_builder(&self) -> BackwardProblemBuilder {
        let Self { forward, asked_for, deterministic } = self.clone();
        let (sm_margin, workspace_limit) = (forward.sm_margin(), forward.workspace_limit());
        BackwardProblemBuilder { forward, asked_for, deterministic, sm_margin, workspace_limit }
    }

    /// The tensors that the pass reads and writes. Gradients are overwritten, not added to.
    pub fn operands(&self) -> Operands {
        let dtype = self.dtype();
        let (q, kv) = (self.forward.is_packed_q(), self.forward.is_packed_kv());
        let [cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv] = self.forward.lengths();
        let [mask_block_cnt, mask_block_idx, mask_bits, full_block_cnt, full_block_idx] = self.forward.block_operands();
        Operands::of([
            Operand::read(Slot::Q, dtype, self.forward.q_shape()).packed(q),
            Operand::read(Slot::K, dtype, self.forward.k_shape()).packed(kv),
            Operand::read(Slot::V, dtype, self.forward.v_shape()).packed(kv),
            Operand::read(Slot::O, dtype, self.forward.o_shape()).packed(q),
            Operand::read(Slot::Lse, DType::F32, self.forward.lse_shape()).packed(q),
            Operand::read(Slot::DO, dtype, self.d_o_shape()).packed(q),
            Operand::read(Slot::DLse, DType::F32, self.d_lse_shape()).packed(q).when(self.wants(Slot::DLse), "d_lse"),
            Operand::write(Slot::DQ, dtype, self.d_q_shape()).packed(q),
            Operand::write(Slot::DK, dtype, self.d_k_shape()).packed(kv),
            Operand::write(Slot::DV, dtype, self.d_v_shape()).packed(kv),
            cu_seqlens_q,
            cu_seqlens_kv,
            seqused_q,
            seqused_kv,
            self.forward.sinks_operand().when(self.wants_d_sinks(), "d_sinks"),
            Operand::write(Slot::DSinks, DType::F32, [self.dims().heads_q]).when(self.wants_d_sinks(), "d_sinks"),
            self.forward.alibi_operand(),
            mask_block_cnt,
            mask_block_idx,
            mask_bits,
            full_block_cnt,
            full_block_idx,
            self.forward.bias_operand(),
            Operand::write(Slot::DBias, self.forward.bias_dtype(), self.forward.bias_shape())
                .when(self.wants_d_bias(), "d_bias"),
            self.forward.dropout_operand(),
        ])
    }

    /// The forward problem whose outputs (O and the LSE) this pass reads.
    pub fn forward(&self) -> &ForwardProblem {
        &self.forward
    }

    /// The gradients of one sequence, whose forward problem this is.
    pub(crate) fn of_sequence(&self, forward: &ForwardProblem) -> Self {
        Self { forward: forward.clone(), ..self.clone() }
    }

    /// Whether the problem was made with this optional operand.
    pub fn wants(&self, slot: Slot) -> bool {
        self.asked_for.contains(slot)
    }

    /// Whether the gradient of the LSE is an input.
    pub fn takes_d_lse(&self) -> bool {
        self.wants(Slot::DLse)
    }

    /// Whether the gradient of the attention sinks is an output.
    pub fn wants_d_sinks(&self) -> bool {
        self.wants(Slot::DSinks)
    }

    /// Whether the gradient of the bias is an output.
    pub fn wants_d_bias(&self) -> bool {
        self.wants(Slot::DBias)
    }

    /// Whether every run must give the same bits.
    pub fn is_deterministic(&self) -> bool {
        self.deterministic
    }

    /// The number of multiprocessors that the main kernel leaves to others.
    pub fn sm_margin(&self) -> usize {
        self.forward.sm_margin()
    }

    /// The most bytes that the workspace of a plan may have. `None`: any number.
    pub fn workspace_limit(&self) -> Option<u64> {
        self.forward.workspace_limit()
    }

    /// The element type of Q, K, V, O and all gradients.
    pub fn dtype(&self) -> DType {
        self.forward.dtype()
    }

    /// The sizes.
    pub fn dims(&self) -> Dims {
        self.forward.dims()
    }

    /// The mask of the forward pass.
    pub fn mask(&self) -> Mask {
        self.forward.mask()
    }

    /// The factor on `Q K^T`.
    pub fn softmax_scale(&self) -> f32 {
        self.forward.softmax_scale()
    }

    /// Whether there is no gradient to compute. A problem with keys and no queries is not empty: dK and dV are zeros. Nor is
    /// one whose rows are all a gap that is to be filled, or one with a gradient of sinks, or of a bias that has elements.
    pub fn is_empty(&self) -> bool {
        let writes_d_bias = self.wants_d_bias() && !self.forward.bias_shape().contains(&0);
        if self.wants_d_sinks() || writes_d_bias {
            return false;
        }
        let (dims, forward) = (self.dims(), &self.forward);
        let is_empty = |seqlen, packed| seqlen == 0 || (dims.batch == 0 && !(packed && forward.fills_gaps()));
        is_empty(dims.seqlen_q, forward.is_packed_q()) && is_empty(dims.seqlen_kv, forward.is_packed_kv())
    }

    /// The shape of dO, the same as that of O: `[batch, seqlen_q, heads_q, head_dim_vo]`.
    pub fn d_o_shape(&self) -> [usize; 4] {
        self.forward.o_shape()
    }

    /// The shape of dLSE, the same as that of the LSE: `[batch, heads_q, seqlen_q]`.
    pub fn d_lse_shape(&self) -> [usize; 3] {
        self.forward.lse_shape()
    }

    /// The shape of dQ, the same as that of Q: `[batch, seqlen_q, heads_q, head_dim_qk]`.
    pub fn d_q_shape(&self) -> [usize; 4] {
        self.forward.q_shape()
    }

    /// The shape of dK, the same as that of K: `[batch, seqlen_kv, heads_kv, head_dim_qk]`.
    pub fn d_k_shape(&self) -> [usize; 4] {
        self.forward.k_shape()
    }

    /// The shape of dV, the same as that of V: `[batch, seqlen_kv, heads_kv, head_dim_vo]`.
    pub fn d_v_shape(&self) -> [usize; 4] {
        self.forward.v_shape()
    }
}

impl fmt::Display for BackwardProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let d_lse = if self.takes_d_lse() { " d_lse" } else { "" };
        let deterministic = if self.deterministic { " deterministic" } else { "" };
        write!(f, "backward {} scale {}{d_lse}", self.forward.numbers(), self.softmax_scale())?;
        self.forward.write_sinks(f)?;
        write!(f, "{}", if self.wants_d_sinks() { " d_sinks" } else { "" })?;
        write!(f, "{}{deterministic}", if self.wants_d_bias() { " d_bias" } else { "" })?;
        self.forward.write_fill_gaps(f)?;
        self.forward.write_restrictions(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Arch;

    const DIMS: Dims =
        Dims { batch: 2, seqlen_q: 5, seqlen_kv: 7, heads_q: 6, heads_kv: 2, head_dim_qk: 16, head_dim_vo: 8 };

    fn forward() -> ForwardProblem {
        ForwardProblem::builder(DType::BF16, DIMS).mask(Mask::causal()).softmax_scale(0.5).build().unwrap()
    }

    fn of(forward: &ForwardProblem) -> BackwardProblem {
        BackwardProblem::builder(forward).build().unwrap()
    }

    #[test]
    fn it_holds_the_forward_problem_with_its_lse() {
        let backward = of(&forward());
        let with_lse = forward().to_builder().lse(true).build().unwrap();
        assert_eq!(backward.forward(), &with_lse);
        assert_eq!(backward, of(&with_lse));
        assert_eq!((backward.dtype(), backward.dims(), backward.mask()), (DType::BF16, DIMS, Mask::causal()));
        assert_eq!((backward.softmax_scale(), backward.takes_d_lse()), (0.5, false));
        let other = backward.to_builder().d_lse(true).deterministic(true).build().unwrap();
        assert!(!backward.is_deterministic() && other.is_deterministic() && other.takes_d_lse());
        assert_eq!(other.to_builder().d_lse(false).deterministic(false).build().unwrap(), backward);
    }

    #[test]
    fn e4m3_operands_have_no_gradients() {
        let forward = ForwardProblem::builder(DType::E4M3, DIMS).build().unwrap();
        let error = BackwardProblem::builder(&forward).build().unwrap_err();
        assert_eq!(error.to_string(), "q, k and v: dtype e4m3; allowed: bf16, f16, f32");
    }

    #[test]
    fn gradients_have_the_shapes_of_what_they_are_gradients_of() {
        let backward = of(&forward());
        assert_eq!((backward.d_q_shape(), backward.d_k_shape()), ([2, 5, 6, 16], [2, 7, 2, 16]));
        assert_eq!((backward.d_v_shape(), backward.d_o_shape()), ([2, 7, 2, 8], [2, 5, 6, 8]));
        assert_eq!(backward.d_lse_shape(), [2, 6, 5]);
        let empty = |dims| of(&ForwardProblem::builder(DType::BF16, dims).build().unwrap()).is_empty();
        assert!(!empty(DIMS) && !empty(Dims { seqlen_q: 0, ..DIMS }) && !empty(Dims { seqlen_kv: 0, ..DIMS }));
        assert!(empty(Dims { batch: 0, ..DIMS }) && empty(Dims { seqlen_q: 0, seqlen_kv: 0, ..DIMS }));
    }

    #[test]
    fn lengths_are_those_of_the_forward_problem() {
        let forward = forward().to_builder().packed_kv(true).used_q(true).fill_gaps(true).build().unwrap();
        let backward = of(&forward);
        let operands = backward.operands();
        let shape = |slot| operands.find(slot).unwrap().shape();
        assert_eq!(
            (shape(Slot::K), shape(Slot::DK), shape(Slot::DV)),
            (&[7, 2, 16][..], &[7, 2, 16][..], &[7, 2, 8][..])
        );
        assert_eq!(
            (shape(Slot::DQ), shape(Slot::CuSeqlensKv), shape(Slot::SequsedQ)),
            (&[2, 5, 6, 16][..], &[3][..], &[2][..])
        );
        let required = |slot| operands.find(slot).unwrap().presence() == crate::operand::Presence::Required;
        assert_eq!([Slot::CuSeqlensKv, Slot::SequsedQ, Slot::CuSeqlensQ].map(required), [true, true, false]);
        let text =
            "backward bf16 batch 2 seqlen 5x7 packed kv used q heads 6/2 head_dim 16/8 causal scale 0.5 fill_gaps";
        assert_eq!(backward.to_string(), text);
        assert!(backward.forward().fills_gaps() && !backward.is_empty());
    }

    #[test]
    fn display() {
        let backward = of(&forward());
        let text = "backward bf16 batch 2 seqlen 5x7 heads 6/2 head_dim 16/8 causal scale 0.5";
        assert_eq!(backward.to_string(), text);
        let other = backward.to_builder().d_lse(true).deterministic(true).build().unwrap();
        assert_eq!(other.to_string(), format!("{text} d_lse deterministic"));
        let sm80 = forward().to_builder().arch(Arch::Sm80).build().unwrap();
        assert_eq!(of(&sm80).to_string(), format!("{text} on sm80"));
        let with_margin = backward.to_builder().sm_margin(16).build().unwrap();
        assert_eq!(with_margin.to_string(), format!("{text} sm_margin 16"));
        let limited = with_margin.to_builder().workspace_limit(Some(5000)).build().unwrap();
        assert_eq!(limited.to_string(), format!("{text} sm_margin 16 workspace_limit 5000"));
    }

    #[test]
    fn the_margin_is_that_of_the_forward_problem_or_its_own() {
        let forward = forward().to_builder().sm_margin(8).build().unwrap();
        assert_eq!(of(&forward).sm_margin(), 8);
        let other = BackwardProblem::builder(&forward).sm_margin(20).build().unwrap();
        assert_eq!((other.sm_margin(), other.forward().sm_margin()), (20, 20));
        assert_eq!(other.to_builder().build().unwrap(), other);
        assert_eq!(other.to_builder().sm_margin(8).build().unwrap(), of(&forward));
    }

    #[test]
    fn the_limit_is_that_of_the_forward_problem_or_its_own() {
        let forward = forward().to_builder().workspace_limit(Some(8)).build().unwrap();
        assert_eq!(of(&forward).workspace_limit(), Some(8));
        for limit in [None, Some(0), Some(u64::MAX)] {
            let other = BackwardProblem::builder(&forward).workspace_limit(limit).build().unwrap();
            assert_eq!((other.workspace_limit(), other.forward().workspace_limit()), (limit, limit));
            assert_eq!(other.to_builder().build().unwrap(), other);
            assert_eq!(other.to_builder().workspace_limit(Some(8)).build().unwrap(), of(&forward));
        }
    }
}
