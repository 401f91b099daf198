//! What is to be computed, as numbers: [`ForwardProblem`] and [`BackwardProblem`].

mod backward;
mod fp8;

use std::fmt;

use crate::{Arch, DType, Error, Mask, Result};

pub use backward::BackwardProblem;

use fp8::Fp8;

/// The sizes of a problem.
///
/// Q is `[batch, seqlen_q, heads_q, head_dim_qk]`, K `[batch, seqlen_kv, heads_kv, head_dim_qk]`,
/// V `[batch, seqlen_kv, heads_kv, head_dim_vo]`, O `[batch, seqlen_q, heads_q, head_dim_vo]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dims {
    /// Sequences in the batch; may be 0.
    pub batch: usize,
    /// Queries in a sequence; may be 0.
    pub seqlen_q: usize,
    /// Keys in a sequence; may be 0.
    pub seqlen_kv: usize,
    /// Query heads, a multiple of `heads_kv`: head `h` reads key head `h / (heads_q / heads_kv)`.
    pub heads_q: usize,
    /// Key and value heads.
    pub heads_kv: usize,
    /// Length of a query and of a key.
    pub head_dim_qk: usize,
    /// Length of a value and of an output.
    pub head_dim_vo: usize,
}

/// The forward pass `O = softmax(mask(softmax_scale * Q K^T)) V`: sizes, element type, mask and options.
///
/// It holds numbers and no memory, is checked when it is made, and is the same for every device.
///
/// ```
/// use hopper_attention::{DType, Dims, ForwardProblem, Mask};
/// # fn main() -> hopper_attention::Result<()> {
/// let dims = Dims { batch: 2, seqlen_q: 512, seqlen_kv: 512, heads_q: 8, heads_kv: 2, head_dim_qk: 64, head_dim_vo: 64 };
/// let problem = ForwardProblem::new(DType::BF16, dims)?.mask(Mask::causal()).lse(true);
/// assert_eq!(problem.softmax_scale_value(), 0.125);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ForwardProblem {
    dtype: DType,
    dims: Dims,
    mask: Mask,
    softmax_scale: f32,
    lse: bool,
    arch: Option<Arch>,
    fp8: Option<Fp8>,
}

/// Both lengths together stay below this, so that kernels may count keys and mask bounds in 32 bits.
const SEQLEN_SUM_END: usize = 1 << 30;

impl ForwardProblem {
    /// A problem without a mask, with the scale `1 / sqrt(head_dim_qk)` and without the LSE.
    ///
    /// # Errors
    /// [`Error::Value`] when a head count or head dim is 0, `heads_q` is not a multiple of
    /// `heads_kv`, `seqlen_q + seqlen_kv` reaches 2^30, or `batch * heads_q` reaches 2^31.
    pub fn new(dtype: DType, dims: Dims) -> Result<Self> {
        let value = |what, got: String, allowed: &str| Err(Error::Value { what, got, allowed: allowed.into() });
        let Dims { batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim_qk, head_dim_vo } = dims;
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
        let softmax_scale = (1.0 / (head_dim_qk as f64).sqrt()) as f32;
        Ok(Self { dtype, dims, mask: Mask::Full, softmax_scale, lse: false, arch: None, fp8: Fp8::of(dtype) })
    }

    /// The same problem with this mask.
    #[must_use]
    pub fn mask(self, mask: Mask) -> Self {
        Self { mask, ..self }
    }

    /// The same problem with this factor on `Q K^T`.
    ///
    /// # Errors
    /// [`Error::Value`] unless it is finite and above 0.
    pub fn softmax_scale(self, softmax_scale: f32) -> Result<Self> {
        if !(softmax_scale.is_finite() && softmax_scale > 0.0) {
            return Err(Error::Value {
                what: "softmax_scale",
                got: softmax_scale.to_string(),
                allowed: "finite and above 0".into(),
            });
        }
        Ok(Self { softmax_scale, ..self })
    }

    /// The same problem with or without the log-sum-exp of each row: natural log, f32, `[batch, heads_q, seqlen_q]`.
    #[must_use]
    pub fn lse(self, wanted: bool) -> Self {
        Self { lse: wanted, ..self }
    }

    /// The same problem for kernels of this instruction set alone, in place of the best that the GPU runs: plans find
    /// those or refuse. It is no number of the problem, but where a problem is to be computed in one way, its gradients
    /// are too.
    #[must_use]
    pub fn arch(self, arch: Arch) -> Self {
        Self { arch: Some(arch), ..self }
    }

    /// The element type of Q, K and V.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The sizes.
    pub fn dims(&self) -> Dims {
        self.dims
    }

    /// The mask that was set with [`mask`](Self::mask).
    pub fn mask_value(&self) -> Mask {
        self.mask
    }

    /// The factor on `Q K^T`.
    pub fn softmax_scale_value(&self) -> f32 {
        self.softmax_scale
    }

    /// Whether the log-sum-exp is an output.
    pub fn wants_lse(&self) -> bool {
        self.lse
    }

    /// The instruction set that was set with [`arch`](Self::arch).
    pub fn arch_value(&self) -> Option<Arch> {
        self.arch
    }

    /// Query heads that share a key head.
    pub fn group_size(&self) -> usize {
        self.dims.heads_q / self.dims.heads_kv
    }

    /// `[batch, seqlen_q, heads_q, head_dim_qk]`.
    pub fn q_shape(&self) -> [usize; 4] {
        let d = &self.dims;
        [d.batch, d.seqlen_q, d.heads_q, d.head_dim_qk]
    }

    /// `[batch, seqlen_kv, heads_kv, head_dim_qk]`.
    pub fn k_shape(&self) -> [usize; 4] {
        let d = &self.dims;
        [d.batch, d.seqlen_kv, d.heads_kv, d.head_dim_qk]
    }

    /// `[batch, seqlen_kv, heads_kv, head_dim_vo]`.
    pub fn v_shape(&self) -> [usize; 4] {
        let d = &self.dims;
        [d.batch, d.seqlen_kv, d.heads_kv, d.head_dim_vo]
    }

    /// `[batch, seqlen_q, heads_q, head_dim_vo]`.
    pub fn o_shape(&self) -> [usize; 4] {
        let d = &self.dims;
        [d.batch, d.seqlen_q, d.heads_q, d.head_dim_vo]
    }

    /// `[batch, heads_q, seqlen_q]`.
    pub fn lse_shape(&self) -> [usize; 3] {
        let d = &self.dims;
        [d.batch, d.heads_q, d.seqlen_q]
    }

    /// Whether there is no output row to compute. (A problem without keys has rows: zeros, with LSE -inf.)
    pub fn is_empty(&self) -> bool {
        self.dims.batch == 0 || self.dims.seqlen_q == 0
    }

    /// What decides which kernel is the fastest: all but the scale and the LSE.
    pub(crate) fn shape(&self) -> String {
        format!("forward {}", self.numbers())
    }

    /// The instruction set, where one was asked for.
    fn write_arch(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.arch.map_or(Ok(()), |arch| write!(f, " on {arch}"))
    }

    /// What a forward and a backward problem print alike, but for the scale.
    fn numbers(&self) -> String {
        let d = &self.dims;
        format!(
            "{}{} batch {} seqlen {}x{} heads {}/{} head_dim {}/{} {}",
            self.dtype,
            self.fp8.map_or(String::new(), |fp8| fp8.to_string()),
            d.batch,
            d.seqlen_q,
            d.seqlen_kv,
            d.heads_q,
            d.heads_kv,
            d.head_dim_qk,
            d.head_dim_vo,
            self.mask
        )
    }
}

impl fmt::Display for ForwardProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lse = if self.lse { " lse" } else { "" };
        write!(f, "{} scale {}{lse}", self.shape(), self.softmax_scale)?;
        self.write_arch(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DIMS: Dims =
        Dims { batch: 2, seqlen_q: 5, seqlen_kv: 7, heads_q: 6, heads_kv: 2, head_dim_qk: 16, head_dim_vo: 8 };

    fn refused(dims: Dims) -> String {
        ForwardProblem::new(DType::BF16, dims).unwrap_err().to_string()
    }

    #[test]
    fn shapes_follow_the_dims() {
        let problem = ForwardProblem::new(DType::F16, DIMS).unwrap();
        assert_eq!((problem.q_shape(), problem.k_shape()), ([2, 5, 6, 16], [2, 7, 2, 16]));
        assert_eq!((problem.v_shape(), problem.o_shape()), ([2, 7, 2, 8], [2, 5, 6, 8]));
        assert_eq!((problem.lse_shape(), problem.group_size()), ([2, 6, 5], 3));
        assert_eq!((problem.softmax_scale_value(), problem.wants_lse()), (0.25, false));
    }

    #[test]
    fn bad_numbers_are_refused_by_name() {
        assert_eq!(refused(Dims { heads_q: 5, ..DIMS }), "heads_q: 5 with heads_kv 2; allowed: a multiple of heads_kv");
        assert_eq!(refused(Dims { heads_kv: 0, ..DIMS }), "heads_kv: 0; allowed: 1 and above");
        assert!(refused(Dims { head_dim_qk: 0, ..DIMS }).starts_with("head_dim_qk: 0"));
        assert!(refused(Dims { head_dim_vo: 1 << 31, ..DIMS }).starts_with("head_dim_vo: 2147483648"));
        assert!(refused(Dims { seqlen_q: 1 << 29, seqlen_kv: 1 << 29, ..DIMS }).contains("below 2^30"));
        assert!(refused(Dims { seqlen_q: usize::MAX, ..DIMS }).contains("below 2^30"));
        assert!(refused(Dims { batch: 1 << 29, ..DIMS }).starts_with("batch * heads_q: 536870912 * 6"));
    }

    #[test]
    fn the_scale_is_finite_and_above_zero() {
        let problem = ForwardProblem::new(DType::F32, DIMS).unwrap();
        assert_eq!(problem.clone().softmax_scale(2.0).unwrap().softmax_scale_value(), 2.0);
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(problem.clone().softmax_scale(scale).is_err(), "{scale}");
        }
    }

    #[test]
    fn empty_means_no_output_rows() {
        let empty = |dims| ForwardProblem::new(DType::F16, dims).unwrap().is_empty();
        assert!(empty(Dims { batch: 0, ..DIMS }) && empty(Dims { seqlen_q: 0, ..DIMS }));
        assert!(!empty(Dims { seqlen_kv: 0, ..DIMS }));
    }

    #[test]
    fn display() {
        let problem = ForwardProblem::new(DType::BF16, DIMS).unwrap().mask(Mask::causal()).lse(true);
        let text = "forward bf16 batch 2 seqlen 5x7 heads 6/2 head_dim 16/8 causal scale 0.25 lse";
        assert_eq!(problem.to_string(), text);
        assert_eq!(problem.arch(Arch::Sm80).to_string(), format!("{text} on sm80"));
    }

    proptest! {
        #[test]
        fn any_numbers_give_a_problem_or_an_error(n in any::<[usize; 7]>(), shift in 0u32..64) {
            let n = n.map(|n| n >> shift);
            let dims = Dims { batch: n[0], seqlen_q: n[1], seqlen_kv: n[2], heads_q: n[3], heads_kv: n[4],
                              head_dim_qk: n[5], head_dim_vo: n[6] };
            if let Ok(problem) = ForwardProblem::new(DType::BF16, dims) {
                prop_assert_eq!(problem.dims(), dims);
                prop_assert!(dims.heads_q.is_multiple_of(dims.heads_kv));
                prop_assert!(problem.softmax_scale_value() > 0.0);
            }
        }
    }
}
