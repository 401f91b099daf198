//! What a forward pass computes: [`ForwardProblem`], and the builder that checks it.

use std::fmt;
use std::hash::{Hash, Hasher};

use super::dims::Dims;
use super::fp8::Fp8;
use crate::arch::Arch;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::mask::Mask;
use crate::operand::{Operand, Operands, Slot, SlotSet};
use crate::scaling::Scaling;

/// A forward pass `O = softmax(mask(softmax_scale * Q K^T)) V`: sizes, element type, mask and options.
///
/// A problem holds numbers and no memory. It is checked when it is built. It does not depend on a device. It implements
/// `Eq` and `Hash`, so that a program can keep a map from problems to plans.
///
/// ```
/// use hopper_attention::{DType, Dims, ForwardProblem, Mask};
/// # fn main() -> hopper_attention::Result<()> {
/// let dims = Dims::new(2, 512, 8, 64).with_heads_kv(2);
/// let problem = ForwardProblem::builder(DType::BF16, dims).mask(Mask::causal()).lse(true).build()?;
/// assert_eq!(problem.softmax_scale(), 0.125);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ForwardProblem {
    dtype: DType,
    dims: Dims,
    mask: Mask,
    softmax_scale: Scale,
    /// The optional operands that were asked for.
    asked_for: SlotSet,
    arch: Option<Arch>,
    sm_margin: usize,
    /// `None` for operands that are not e4m3.
    fp8: Option<Fp8>,
}

/// A finite factor above 0. Two of them are equal when their bits are.
#[derive(Clone, Copy, Debug)]
struct Scale(f32);

impl PartialEq for Scale {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Scale {}

impl Hash for Scale {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

/// The options of a [`ForwardProblem`]. [`build`](Self::build) checks them.
#[derive(Clone, Debug)]
#[must_use]
pub struct ForwardProblemBuilder {
    dtype: DType,
    dims: Dims,
    mask: Mask,
    softmax_scale: Option<f32>,
    asked_for: SlotSet,
    arch: Option<Arch>,
    sm_margin: usize,
    output: Option<DType>,
    scaling: Option<Scaling>,
    half_scores: bool,
}

impl ForwardProblemBuilder {
    /// Which keys a query attends to (default: every key).
    pub fn mask(self, mask: Mask) -> Self {
        Self { mask, ..self }
    }

    /// The factor on `Q K^T`, finite and above 0 (default: `1 / sqrt(head_dim_qk)`).
    pub fn softmax_scale(self, softmax_scale: f32) -> Self {
        Self { softmax_scale: Some(softmax_scale), ..self }
    }

    /// Whether the log-sum-exp of each query is an output: natural log, f32, `[batch, heads_q, seqlen_q]` (default: no).
    pub fn lse(self, wanted: bool) -> Self {
        self.operand(Slot::Lse, wanted)
    }

    /// Adds or removes an optional operand by its name. `operand(Slot::Lse, true)` is the same as `lse(true)`.
    pub fn operand(self, slot: Slot, wanted: bool) -> Self {
        Self { asked_for: self.asked_for.with(slot, wanted), ..self }
    }

    /// Restricts plans to kernels of one instruction set (default: the newest one that the GPU runs).
    ///
    /// If there is no such kernel for the problem and the GPU, planning fails. The CPU refuses a problem with this
    /// option. A backward problem made from this one has the same restriction.
    pub fn arch(self, arch: Arch) -> Self {
        Self { arch: Some(arch), ..self }
    }

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
    /// statistics and convert sums to gradients, and the one that fills outputs where there are no keys. Nor does the
    /// [`Quantizer`](crate::Quantizer), which takes all multiprocessors.
    ///
    /// Which multiprocessors stay free, the GPU decides.
    pub fn sm_margin(self, multiprocessors: usize) -> Self {
        Self { sm_margin: multiprocessors, ..self }
    }

    /// The element type of O.
    ///
    /// - For e4m3 operands: bf16 (the default), f16 or e4m3. An e4m3 output stores O times
    ///   [`scale_o`](crate::ForwardArgs::scale_o), an argument of the run.
    /// - For other operands: their own type.
    pub fn output(self, dtype: DType) -> Self {
        Self { output: Some(dtype), ..self }
    }

    /// Which elements share a descale factor (default: all of a tensor). For e4m3 operands only.
    pub fn scaling(self, scaling: Scaling) -> Self {
        Self { scaling: Some(scaling), ..self }
    }

    /// Whether the largest magnitude of O is an output: f32, `[1]` (default: no). For e4m3 operands only.
    ///
    /// The magnitude is taken before O is multiplied by `scale_o` and rounded to its type. It is 0 if O is empty, and NaN if an
    /// element of O is NaN.
    pub fn amax(self, wanted: bool) -> Self {
        self.operand(Slot::Amax, wanted)
    }

    /// Allows f16 score accumulation (default: no). For e4m3 operands only.
    ///
    /// The tensor cores of a GPU sum FP8 products faster in f16 than in f32. The sums fit f16 where no stored element of Q
    /// or K is larger in magnitude than [`E4M3_HALF_SCORES_MAX`](crate::E4M3_HALF_SCORES_MAX), which is 14. A
    /// [`Quantizer`](crate::Quantizer) for a problem with this option stores no larger elements.
    ///
    /// Results are right for any elements. The kernel checks every element of Q and K that it reads. A second kernel, with
    /// scores in f32, is launched after the first. If an element is larger in magnitude than 14 or NaN, the second kernel
    /// computes everything again, and the run takes more than twice as long. Otherwise the second kernel returns at once. The
    /// CPU always sums in f32.
    pub fn half_scores(self, allowed: bool) -> Self {
        Self { half_scores: allowed, ..self }
    }

    /// Checks the options and makes the problem.
    ///
    /// # Errors
    /// [`Error::Value`]:
    /// - `heads_q` or `heads_kv` is 0, or `heads_q` is not a multiple of `heads_kv`;
    /// - a head dim is 0 or reaches 2^31;
    /// - `seqlen_q + seqlen_kv` reaches 2^30, or `batch * heads_q` reaches 2^31;
    /// - the softmax scale is not finite and above 0;
    /// - an option for e4m3 operands is set for other operands;
    /// - an operand was asked for that is not an optional operand of a forward pass.
    ///
    /// [`Error::Dtype`]: the output type is not one that these operands may have.
    pub fn build(self) -> Result<ForwardProblem> {
        let Self { dtype, dims, mask, softmax_scale, asked_for, arch, sm_margin, output, scaling, half_scores } = self;
        dims.check()?;
        let softmax_scale = softmax_scale.unwrap_or((1.0 / (dims.head_dim_qk as f64).sqrt()) as f32);
        if !(softmax_scale.is_finite() && softmax_scale > 0.0) {
            let (got, allowed) = (softmax_scale.to_string(), "finite and above 0".into());
            return Err(Error::Value { what: "softmax_scale", got, allowed });
        }
        asked_for.check_among(&[Slot::Lse, Slot::Amax])?;
        let fp8 = Fp8::checked(dtype, output, scaling, asked_for.contains(Slot::Amax), half_scores)?;
        Ok(ForwardProblem { dtype, dims, mask, softmax_scale: Scale(softmax_scale), asked_for, arch, sm_margin, fp8 })
    }
}

impl ForwardProblem {
    /// A builder for a problem with this type of Q, K and V and these sizes. All options have their defaults.
    pub fn builder(dtype: DType, dims: Dims) -> ForwardProblemBuilder {
        ForwardProblemBuilder {
            dtype,
            dims,
            mask: Mask::Full,
            softmax_scale: None,
            asked_for: SlotSet::default(),
            arch: None,
            sm_margin: 0,
            output: None,
            scaling: None,
            half_scores: false,
        }
    }

    /// A builder with the options of this problem, to make a similar one.
    pub fn to_builder(&self) -> ForwardProblemBuilder {
        ForwardProblemBuilder {
            dtype: self.dtype,
            dims: self.dims,
            mask: self.mask,
            softmax_scale: Some(self.softmax_scale.0),
            asked_for: self.asked_for,
            arch: self.arch,
            sm_margin: self.sm_margin,
            output: Some(self.output_dtype()),
            scaling: self.scaling(),
            half_scores: self.allows_half_scores(),
        }
    }

    /// The tensors that the pass reads and writes. [`Slot::axes`] names the dimensions of each.
    pub fn operands(&self) -> Operands {
        let (dtype, fp8) = (self.dtype, self.fp8.is_some());
        Operands::of([
            Operand::read(Slot::Q, dtype, self.q_shape()),
            Operand::read(Slot::K, dtype, self.k_shape()),
            Operand::read(Slot::V, dtype, self.v_shape()),
            Operand::write(Slot::O, self.output_dtype(), self.o_shape()),
            Operand::write(Slot::Lse, DType::F32, self.lse_shape()).when(self.wants(Slot::Lse), "lse"),
            Operand::read(Slot::DescaleQ, DType::F32, self.descale_q_shape()).of_kind(fp8, "e4m3 operands"),
            Operand::read(Slot::DescaleK, DType::F32, self.descale_k_shape()).of_kind(fp8, "e4m3 operands"),
            Operand::read(Slot::DescaleV, DType::F32, self.descale_v_shape()).of_kind(fp8, "e4m3 operands"),
            Operand::read(Slot::ScaleO, DType::F32, [1]).when(self.takes_scale_o(), "an e4m3 output"),
            Operand::write(Slot::Amax, DType::F32, [1]).when(self.wants(Slot::Amax), "amax"),
        ])
    }

    /// The element type of Q, K and V.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The sizes.
    pub fn dims(&self) -> Dims {
        self.dims
    }

    /// Which keys a query attends to.
    pub fn mask(&self) -> Mask {
        self.mask
    }

    /// The factor on `Q K^T`.
    pub fn softmax_scale(&self) -> f32 {
        self.softmax_scale.0
    }

    /// Whether the problem was made with this optional operand.
    pub fn wants(&self, slot: Slot) -> bool {
        self.asked_for.contains(slot)
    }

    /// Whether the log-sum-exp is an output.
    pub fn wants_lse(&self) -> bool {
        self.wants(Slot::Lse)
    }

    /// The instruction set that plans are restricted to. `None` where there is no restriction.
    pub fn arch(&self) -> Option<Arch> {
        self.arch
    }

    /// The number of multiprocessors that the kernels leave to others.
    pub fn sm_margin(&self) -> usize {
        self.sm_margin
    }

    /// The number of query heads that read one KV head: `heads_q / heads_kv`.
    pub fn group_size(&self) -> usize {
        self.dims.group_size()
    }

    /// The shape of Q: `[batch, seqlen_q, heads_q, head_dim_qk]`.
    pub fn q_shape(&self) -> [usize; 4] {
        let d = &self.dims;
        [d.batch, d.seqlen_q, d.heads_q, d.head_dim_qk]
    }

    /// The shape of K: `[batch, seqlen_kv, heads_kv, head_dim_qk]`.
    pub fn k_shape(&self) -> [usize; 4] {
        let d = &self.dims;
        [d.batch, d.seqlen_kv, d.heads_kv, d.head_dim_qk]
    }

    /// The shape of V: `[batch, seqlen_kv, heads_kv, head_dim_vo]`.
    pub fn v_shape(&self) -> [usize; 4] {
        let d = &self.dims;
        [d.batch, d.seqlen_kv, d.heads_kv, d.head_dim_vo]
    }

    /// The shape of O: `[batch, seqlen_q, heads_q, head_dim_vo]`.
    pub fn o_shape(&self) -> [usize; 4] {
        let d = &self.dims;
        [d.batch, d.seqlen_q, d.heads_q, d.head_dim_vo]
    }

    /// The shape of the log-sum-exp: `[batch, heads_q, seqlen_q]`.
    pub fn lse_shape(&self) -> [usize; 3] {
        let d = &self.dims;
        [d.batch, d.heads_q, d.seqlen_q]
    }

    /// Whether there is no query to compute. A problem with queries and no keys is not empty: O is zeros, the LSE is -inf.
    pub fn is_empty(&self) -> bool {
        self.dims.batch == 0 || self.dims.seqlen_q == 0
    }

    /// The problem as text, without what does not change which kernel is the fastest: the scale, the LSE, the
    /// instruction set and the margin. [`Tuning`](crate::Tuning) files its measurements under this text.
    pub(crate) fn shape(&self) -> String {
        format!("forward {}", self.numbers())
    }

    /// Prints what plans are restricted to, if anything: the instruction set and the margin.
    pub(super) fn write_restrictions(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(arch) = self.arch {
            write!(f, " on {arch}")?;
        }
        if self.sm_margin > 0 { write!(f, " sm_margin {}", self.sm_margin) } else { Ok(()) }
    }

    /// The part of a problem's text that forward and backward problems share: everything up to the scale.
    pub(super) fn numbers(&self) -> String {
        let d = &self.dims;
        let amax = if self.wants_amax() { " amax" } else { "" };
        format!(
            "{}{}{amax} batch {} seqlen {}x{} heads {}/{} head_dim {}/{} {}",
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
        let lse = if self.wants_lse() { " lse" } else { "" };
        write!(f, "{} scale {}{lse}", self.shape(), self.softmax_scale())?;
        self.write_restrictions(f)
    }
}

/// Problems with e4m3 operands (FP8).
///
/// A real value of Q, K or V is the stored value times its descale factor. For O see the builder's
/// [`output`](crate::ForwardProblemBuilder::output). There is no backward pass.
///
/// ```
/// use hopper_attention::{DType, Dims, ForwardProblem, Scaling};
/// # fn main() -> hopper_attention::Result<()> {
/// let dims = Dims::new(2, 512, 8, 64).with_seqlen_q(300).with_heads_kv(2);
/// let problem =
///     ForwardProblem::builder(DType::E4M3, dims).scaling(Scaling::PerBlock).output(DType::F16).build()?;
/// assert_eq!((problem.descale_q_shape(), problem.descale_k_shape()), ([2, 8, 3], [2, 2, 4]));
/// # Ok(()) }
/// ```
impl ForwardProblem {
    /// The element type of O. For e4m3 operands the builder's [`output`](crate::ForwardProblemBuilder::output) chose it. Other
    /// operands have an O of their own type.
    pub fn output_dtype(&self) -> DType {
        self.fp8.map_or(self.dtype(), |fp8| fp8.output)
    }

    /// Which elements share a descale factor. `None` for operands that are not e4m3.
    pub fn scaling(&self) -> Option<Scaling> {
        self.fp8.map(|fp8| fp8.scaling)
    }

    /// Whether the largest magnitude of O is an output.
    pub fn wants_amax(&self) -> bool {
        self.wants(Slot::Amax)
    }

    /// Whether scores may be summed in f16.
    pub fn allows_half_scores(&self) -> bool {
        self.fp8.is_some_and(|fp8| fp8.half_scores)
    }

    /// Whether `scale_o` is an input: the factor that O is multiplied by before it is rounded to e4m3. True exactly
    /// when the output is e4m3.
    pub fn takes_scale_o(&self) -> bool {
        self.output_dtype() == DType::E4M3
    }

    /// The shape `[batch, heads, blocks]` of Q's descale factors: see [`Scaling`]. `[0, 0, 0]` if Q is not e4m3.
    pub fn descale_q_shape(&self) -> [usize; 3] {
        self.descale_shape(self.q_shape())
    }

    /// The shape `[batch, heads, blocks]` of K's descale factors: see [`Scaling`]. `[0, 0, 0]` if K is not e4m3.
    pub fn descale_k_shape(&self) -> [usize; 3] {
        self.descale_shape(self.k_shape())
    }

    /// The shape `[batch, heads, blocks]` of V's descale factors: see [`Scaling`]. `[0, 0, 0]` if V is not e4m3.
    pub fn descale_v_shape(&self) -> [usize; 3] {
        self.descale_shape(self.v_shape())
    }

    fn descale_shape(&self, of: [usize; 4]) -> [usize; 3] {
        self.fp8.map_or([0; 3], |fp8| fp8.scaling.shape(of, self.dims().heads_kv))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DIMS: Dims =
        Dims { batch: 2, seqlen_q: 5, seqlen_kv: 7, heads_q: 6, heads_kv: 2, head_dim_qk: 16, head_dim_vo: 8 };

    fn refused(dims: Dims) -> String {
        ForwardProblem::builder(DType::BF16, dims).build().unwrap_err().to_string()
    }

    #[test]
    fn shapes_follow_the_dims() {
        let problem = ForwardProblem::builder(DType::F16, DIMS).build().unwrap();
        assert_eq!((problem.q_shape(), problem.k_shape()), ([2, 5, 6, 16], [2, 7, 2, 16]));
        assert_eq!((problem.v_shape(), problem.o_shape()), ([2, 7, 2, 8], [2, 5, 6, 8]));
        assert_eq!((problem.lse_shape(), problem.group_size()), ([2, 6, 5], 3));
        assert_eq!((problem.softmax_scale(), problem.wants_lse()), (0.25, false));
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
        let scaled = |scale| ForwardProblem::builder(DType::F32, DIMS).softmax_scale(scale).build();
        assert_eq!(scaled(2.0).unwrap().softmax_scale(), 2.0);
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(scaled(scale).is_err(), "{scale}");
        }
    }

    #[test]
    fn a_problem_is_a_key_and_comes_back_from_its_builder() {
        use std::collections::HashMap;
        let options = ForwardProblem::builder(DType::E4M3, DIMS).mask(Mask::causal()).softmax_scale(0.3).lse(true);
        let problem = options.scaling(Scaling::PerHead).output(DType::F16).amax(true).half_scores(true);
        let problem = problem.arch(Arch::Sm90).sm_margin(16).build().unwrap();
        assert_eq!(problem.to_builder().build().unwrap(), problem);
        let others = [
            problem.to_builder().softmax_scale(f32::from_bits(0.3f32.to_bits() + 1)),
            problem.to_builder().lse(false),
            problem.to_builder().mask(Mask::Full),
            problem.to_builder().amax(false),
            problem.to_builder().half_scores(false),
            problem.to_builder().arch(Arch::Sm80),
            problem.to_builder().sm_margin(0),
            problem.to_builder().output(DType::BF16),
        ];
        let mut plans = HashMap::from([(problem.clone(), 0)]);
        for (i, other) in others.into_iter().enumerate() {
            plans.insert(other.build().unwrap(), i + 1);
        }
        assert_eq!((plans.len(), plans[&problem]), (9, 0));
    }

    #[test]
    fn optional_operands_are_asked_for_by_name() {
        let options = ForwardProblem::builder(DType::BF16, DIMS);
        let problem = options.clone().operand(Slot::Lse, true).build().unwrap();
        assert_eq!(problem, options.clone().lse(true).build().unwrap());
        assert!(problem.wants(Slot::Lse) && !problem.wants(Slot::Amax));
        let text = options.operand(Slot::DQ, true).build().unwrap_err().to_string();
        assert_eq!(text, "d_q: asked for; allowed: lse, amax");
    }

    #[test]
    fn operands_are_there_as_the_options_say() {
        use crate::operand::Presence::{Refused, Required};
        let presence =
            |problem: &ForwardProblem| problem.operands().iter().map(|row| row.presence()).collect::<Vec<_>>();
        let plain = ForwardProblem::builder(DType::BF16, DIMS).build().unwrap();
        assert_eq!(presence(&plain)[..4], [Required; 4]);
        assert_eq!(presence(&plain)[4..], [Refused; 6]);
        let fp8 = ForwardProblem::builder(DType::E4M3, DIMS).lse(true).amax(true).output(DType::E4M3).build().unwrap();
        assert_eq!(presence(&fp8), [Required; 10]);
        let row = |slot| *fp8.operands().find(slot).unwrap();
        assert_eq!((row(Slot::O).dtype(), row(Slot::Lse).shape()), (DType::E4M3, &[2, 6, 5][..]));
    }

    #[test]
    fn empty_means_no_output_rows() {
        let empty = |dims| ForwardProblem::builder(DType::F16, dims).build().unwrap().is_empty();
        assert!(empty(Dims { batch: 0, ..DIMS }) && empty(Dims { seqlen_q: 0, ..DIMS }));
        assert!(!empty(Dims { seqlen_kv: 0, ..DIMS }));
    }

    #[test]
    fn display() {
        let options = ForwardProblem::builder(DType::BF16, DIMS).mask(Mask::causal()).lse(true);
        let problem = options.clone().build().unwrap();
        let text = "forward bf16 batch 2 seqlen 5x7 heads 6/2 head_dim 16/8 causal scale 0.25 lse";
        assert_eq!(problem.to_string(), text);
        let sm80 = options.clone().arch(Arch::Sm80);
        assert_eq!(sm80.clone().build().unwrap().to_string(), format!("{text} on sm80"));
        assert_eq!(sm80.sm_margin(7).build().unwrap().to_string(), format!("{text} on sm80 sm_margin 7"));
        let with_margin = options.sm_margin(16).build().unwrap();
        assert_eq!(with_margin.to_string(), format!("{text} sm_margin 16"));
        assert_eq!((with_margin.sm_margin(), problem.sm_margin(), with_margin.shape()), (16, 0, problem.shape()));
    }

    proptest! {
        #[test]
        fn any_numbers_give_a_problem_or_an_error(n in any::<[usize; 7]>(), shift in 0u32..64) {
            let n = n.map(|n| n >> shift);
            let dims = Dims { batch: n[0], seqlen_q: n[1], seqlen_kv: n[2], heads_q: n[3], heads_kv: n[4],
                              head_dim_qk: n[5], head_dim_vo: n[6] };
            if let Ok(problem) = ForwardProblem::builder(DType::BF16, dims).build() {
                prop_assert_eq!(problem.dims(), dims);
                prop_assert!(dims.heads_q.is_multiple_of(dims.heads_kv));
                prop_assert!(problem.softmax_scale() > 0.0);
            }
        }
    }
}
