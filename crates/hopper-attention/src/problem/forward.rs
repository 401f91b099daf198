//! What a forward pass computes: [`ForwardProblem`], and the builder that checks it.

use std::fmt;

use super::bias::Bias;
use super::block_mask::BlockMask;
use super::dims::Dims;
use super::dropout::Dropout;
use super::fp8::Fp8;
use super::modifiers::{self, AlibiSlopes};
use super::packing::{LENGTHS, Packing, batch_of};
use super::scale::{self, Scale};
use crate::arch::Arch;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::mask::Mask;
use crate::operand::{Operand, Operands, Slot, SlotSet};
use crate::scaling::{Rows, Scaling};

/// A forward pass `O = softmax(mask(softmax_scale * Q K^T)) V`: sizes, element type, mask and options.
///
/// Options change the scores in this order: the softmax scale, the [`softcap`](ForwardProblemBuilder::softcap), the
/// [`bias`](ForwardProblemBuilder::bias), [`alibi`](ForwardProblemBuilder::alibi), the mask. Then come the softmax, with
/// [`sinks`](ForwardProblemBuilder::sinks) where there are any, and [`dropout`](ForwardProblemBuilder::dropout).
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
    /// The cap of the scores. 0 where there is none.
    pub(super) softcap: Scale,
    /// The optional operands that were asked for.
    asked_for: SlotSet,
    arch: Option<Arch>,
    pub(super) sm_margin: usize,
    pub(super) workspace_limit: Option<u64>,
    packing: Packing,
    /// `None` for operands that are not e4m3.
    fp8: Option<Fp8>,
    /// The element type of the attention sinks. `None` where there are none.
    pub(super) sinks: Option<DType>,
    /// Which ALiBi slopes there are. `None` where there are none.
    pub(super) alibi: Option<AlibiSlopes>,
    /// The form of the lists of blocks. `None` where there are none.
    pub(super) block_mask: Option<BlockMask>,
    /// The form of the additive bias. `None` where there is none.
    pub(super) bias: Option<Bias>,
    /// The dropout of the weights. `None` where there is none.
    pub(super) dropout: Option<Dropout>,
}

/// The options of a [`ForwardProblem`]. [`build`](Self::build) checks them.
#[derive(Clone, Debug)]
#[must_use]
pub struct ForwardProblemBuilder {
    dtype: DType,
    dims: Dims,
    mask: Mask,
    softmax_scale: Option<f32>,
    /// The cap of the scores, not yet checked. 0 where there is none.
    pub(super) softcap: f32,
    asked_for: SlotSet,
    arch: Option<Arch>,
    pub(super) sm_margin: usize,
    pub(super) workspace_limit: Option<u64>,
    packing: Packing,
    output: Option<DType>,
    scaling: Option<Scaling>,
    half_scores: bool,
    /// The element type of the attention sinks, where they were asked for.
    pub(super) sinks: DType,
    /// Which ALiBi slopes there are, where they were asked for.
    pub(super) alibi: AlibiSlopes,
    pub(super) block_mask: Option<BlockMask>,
    pub(super) bias: Option<Bias>,
    pub(super) dropout: Option<Dropout>,
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

    /// Adds or removes an optional operand by its name. `operand(Slot::Lse, true)` is the same as `lse(true)`,
    /// `operand(Slot::Sinks, true)` the same as `sinks(DType::F32)`, and `operand(Slot::AlibiSlopes, true)` the same as
    /// `alibi(AlibiSlopes::PerHead)`.
    pub fn operand(self, slot: Slot, wanted: bool) -> Self {
        Self { asked_for: self.asked_for.with(slot, wanted), ..self }
    }

    /// Restricts plans to kernels of one instruction set (default: the newest one that the GPU runs and that has a kernel for the
    /// problem).
    ///
    /// If there is no such kernel for the problem and the GPU, planning fails. The CPU refuses a problem with this
    /// option. A backward problem made from this one has the same restriction.
    pub fn arch(self, arch: Arch) -> Self {
        Self { arch: Some(arch), ..self }
    }

    /// Packs the sequences of Q, K and V: the same as `packed_q(packed)` and `packed_kv(packed)`.
    ///
    /// On a GPU a tile of queries belongs to one sequence. A batch of thousands of sequences with a few rows each is faster as one
    /// sequence with the lists of documents: [`OwnedBlockLists::from_documents`](crate::OwnedBlockLists::from_documents).
    pub fn packed(self, packed: bool) -> Self {
        self.packed_q(packed).packed_kv(packed)
    }

    /// Whether the sequences of Q follow each other in one tensor, without padding (default: no).
    ///
    /// - [`Dims::seqlen_q`] is then the number of rows of all sequences together (`total_q`). [`Dims::batch`] is the number of
    ///   sequences.
    /// - Q and O are `[total_q, heads_q, head_dim]`, and the LSE is `[heads_q, total_q]`. Gradients have the shapes of what
    ///   they are gradients of.
    /// - A run reads the operand [`Slot::CuSeqlensQ`]. Offset `i` of it is the first row of sequence `i`, and offset `i + 1`
    ///   the row after its last one. A sequence may be empty.
    /// - Each sequence attends to its own keys alone, with its own mask: its last query stands at its last key, if the mask is
    ///   bottom-right.
    /// - Rows before the first offset and from the last offset on belong to no sequence (*gaps*). They are not read, and not
    ///   written unless [`fill_gaps`](Self::fill_gaps) says so.
    /// - On a GPU a stride in `seqlen` is below 2^32 elements. Where a tensor of such a problem has a batch dimension, its stride is a
    ///   multiple of that in `seqlen`, and `(batch - 1) * stride_batch / stride_seqlen + seqlen` is below 2^31 - 1. A run refuses
    ///   others by name. Problems with used lengths have the same rules.
    ///
    /// Q may be packed where K and V are not, and the other way round.
    pub fn packed_q(self, packed: bool) -> Self {
        self.operand(Slot::CuSeqlensQ, packed)
    }

    /// As [`packed_q`](Self::packed_q), for K and V: `[total_kv, heads_kv, head_dim]`, with [`Dims::seqlen_kv`] as `total_kv`
    /// and the operand [`Slot::CuSeqlensKv`].
    pub fn packed_kv(self, packed: bool) -> Self {
        self.operand(Slot::CuSeqlensKv, packed)
    }

    /// Whether each sequence uses only its first rows of Q (default: no). A run then reads how many: the operand
    /// [`Slot::SequsedQ`].
    ///
    /// - The numbers shorten the sequences. They do not move where a sequence begins.
    /// - The mask of a sequence has the used lengths as its sizes.
    /// - The rows after the used ones are a gap: see [`packed_q`](Self::packed_q).
    /// - Q may be packed or not.
    pub fn used_q(self, used: bool) -> Self {
        self.operand(Slot::SequsedQ, used)
    }

    /// As [`used_q`](Self::used_q), for K and V: the operand [`Slot::SequsedKv`].
    pub fn used_kv(self, used: bool) -> Self {
        self.operand(Slot::SequsedKv, used)
    }

    /// Whether rows of outputs that belong to no sequence are filled (default: no, they are not written).
    ///
    /// O and gradients get zeros there, and the LSE -inf. For problems with packed tensors or used lengths only.
    pub fn fill_gaps(self, fill: bool) -> Self {
        Self { packing: Packing { fill_gaps: fill, ..self.packing }, ..self }
    }

    /// About how many queries the longest sequence has (default: unknown). For packed queries and used lengths only.
    ///
    /// It is a hint for the choice of kernels. Results are right whatever it is.
    pub fn max_seqlen_q(self, queries: usize) -> Self {
        Self { packing: Packing { max_seqlen_q: Some(queries), ..self.packing }, ..self }
    }

    /// As [`max_seqlen_q`](Self::max_seqlen_q), for the keys of the longest sequence.
    pub fn max_seqlen_kv(self, keys: usize) -> Self {
        Self { packing: Packing { max_seqlen_kv: Some(keys), ..self.packing }, ..self }
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
    /// [`Quantizer`](crate::Quantizer) for a problem with this option stores no larger elements. (The sums fit up to head dim
    /// 334. Kernels have smaller head dims.)
    ///
    /// With short sequences or few heads a plan takes scores in f32 all the same, which is faster there. With scores that are far
    /// apart f16 takes up to 2.9 times as long as f32 (`docs/fp8.md`): allow it if you know that yours are not.
    ///
    /// Results are right for any elements. The kernel checks every element of Q and K that it reads. A second kernel, with
    /// scores in f32, is launched after the first. If an element is larger in magnitude than 14 or NaN, the second kernel
    /// computes everything again, and the run takes more than twice as long. Otherwise the second kernel returns at once. The
    /// CPU always sums in f32. So does a GPU with packed sequences, used lengths, a [`softcap`](Self::softcap) or a
    /// [`block_mask`](Self::block_mask).
    pub fn half_scores(self, allowed: bool) -> Self {
        Self { half_scores: allowed, ..self }
    }

    /// Checks the options and makes the problem.
    ///
    /// # Errors
    /// [`Error::Value`]:
    /// - `heads_q` or `heads_kv` is 0, or `heads_q` is not a multiple of `heads_kv`;
    /// - a head dim is 0 or reaches 2^31 (that a GPU has no kernel for a smaller one is an error of
    ///   [`plan`](ForwardProblem::plan): see [`Dims`]);
    /// - `seqlen_q + seqlen_kv` reaches 2^30, or `batch * heads_q` reaches 2^31;
    /// - the softmax scale is not finite and above 0;
    /// - the [`softcap`](Self::softcap) is neither 0 nor in its range;
    /// - the mask has chunks of 0 keys;
    /// - an option for e4m3 operands is set for other operands;
    /// - `fill_gaps` or a longest sequence is given for a problem without packed tensors and used lengths;
    /// - an operand was asked for that is not an optional operand of a forward pass.
    ///
    /// [`Error::Dtype`]: Q, K and V cannot have this type, or the output type is not one that these operands may have, or the
    /// sinks are not f32 or bf16, or the bias is not f32, bf16 or f16.
    ///
    /// [`Error::Unsupported`]: ALiBi slopes, the maximum logit, a [`bias`](Self::bias) or [`dropout`](Self::dropout) with e4m3
    /// operands; a [`block_mask`](Self::block_mask) with packed tensors or used lengths.
    pub fn build(self) -> Result<ForwardProblem> {
        let Self { dtype, dims, mask, asked_for, arch, sm_margin, packing, output, scaling, half_scores, .. } = self;
        let (softmax_scale, softcap, workspace_limit) = (self.softmax_scale, self.softcap, self.workspace_limit);
        let sinks = asked_for.contains(Slot::Sinks).then_some(self.sinks);
        if let Some(got) = sinks.filter(|dtype| !matches!(dtype, DType::F32 | DType::BF16)) {
            return Err(Error::Dtype { what: "sinks", got, allowed: "f32, bf16".into() });
        }
        if dtype == DType::I32 {
            let allowed = "f16, bf16, e4m3, f32".into();
            return Err(Error::Dtype { what: "q, k and v", got: dtype, allowed });
        }
        dims.check()?;
        mask.check()?;
        let softmax_scale = softmax_scale.unwrap_or((1.0 / (dims.head_dim_qk as f64).sqrt()) as f32);
        if !(softmax_scale.is_finite() && softmax_scale > 0.0) {
            let (got, allowed) = (softmax_scale.to_string(), "finite and above 0".into());
            return Err(Error::Value { what: "softmax_scale", got, allowed });
        }
        let [cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv] = LENGTHS;
        let lengths = [cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv];
        let others = [Slot::Lse, Slot::Amax, Slot::Sinks, Slot::AlibiSlopes, Slot::MaxLogits];
        asked_for.check_among(&[&others[..2], &lengths[..], &others[2..]].concat())?;
        packing.check(asked_for)?;
        let fp8 = Fp8::checked(dtype, output, scaling, asked_for.contains(Slot::Amax), half_scores)?;
        let softcap = scale::softcap(softcap, softmax_scale)?;
        let alibi = modifiers::alibi(asked_for, self.alibi, dtype)?;
        modifiers::max_logits(asked_for, dtype)?;
        let softmax_scale = Scale(softmax_scale);
        let (block_mask, dropout) = (self.block_mask, self.dropout);
        block_mask.map_or(Ok(()), |block_mask| block_mask.check(&dims, asked_for))?;
        let bias = self.bias;
        bias.map_or(Ok(()), |bias| bias.check(dtype, &dims, asked_for))?;
        dropout.map_or(Ok(()), |dropout| dropout.check(dtype))?;
        Ok(ForwardProblem {
            dtype,
            dims,
            mask,
            softmax_scale,
            softcap,
            asked_for,
            arch,
            sm_margin,
            workspace_limit,
            packing,
            fp8,
            sinks,
            alibi,
            block_mask,
            bias,
            dropout,
        })
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
            softcap: 0.0,
            asked_for: SlotSet::default(),
            arch: None,
            sm_margin: 0,
            workspace_limit: None,
            packing: Packing::default(),
            output: None,
            scaling: None,
            half_scores: false,
            sinks: DType::F32,
            alibi: AlibiSlopes::default(),
            block_mask: None,
            bias: None,
            dropout: None,
        }
    }

    /// A builder with the options of this problem, to make a similar one.
    pub fn to_builder(&self) -> ForwardProblemBuilder {
        ForwardProblemBuilder {
            dtype: self.dtype,
            dims: self.dims,
            mask: self.mask,
            softmax_scale: Some(self.softmax_scale.0),
            softcap: self.softcap.0,
            asked_for: self.asked_for,
            arch: self.arch,
            sm_margin: self.sm_margin,
            workspace_limit: self.workspace_limit,
            packing: self.packing,
            output: Some(self.output_dtype()),
            scaling: self.scaling(),
            half_scores: self.allows_half_scores(),
            sinks: self.sinks.unwrap_or(DType::F32),
            alibi: self.alibi.unwrap_or_default(),
            block_mask: self.block_mask,
            bias: self.bias,
            dropout: self.dropout,
        }
    }

    /// The tensors that the pass reads and writes. [`Slot::axes`] names the dimensions of each.
    pub fn operands(&self) -> Operands {
        let (dtype, fp8) = (self.dtype, self.fp8.is_some());
        let (q, kv) = (self.is_packed_q(), self.is_packed_kv());
        let (q_blocks, kv_blocks) = (q && self.has_factors_per_block(), kv && self.has_factors_per_block());
        let of_fp8 = |slot, shape| Operand::read(slot, DType::F32, shape).of_kind(fp8, "e4m3 operands");
        let [cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv] = self.lengths();
        let [mask_block_cnt, mask_block_idx, mask_bits, full_block_cnt, full_block_idx] = self.block_operands();
        Operands::of([
            Operand::read(Slot::Q, dtype, self.q_shape()).packed(q),
            Operand::read(Slot::K, dtype, self.k_shape()).packed(kv),
            Operand::read(Slot::V, dtype, self.v_shape()).packed(kv),
            Operand::write(Slot::O, self.output_dtype(), self.o_shape()).packed(q),
            Operand::write(Slot::Lse, DType::F32, self.lse_shape()).packed(q).when(self.wants(Slot::Lse), "lse"),
            of_fp8(Slot::DescaleQ, self.descale_q_shape()).packed(q_blocks),
            of_fp8(Slot::DescaleK, self.descale_k_shape()).packed(kv_blocks),
            of_fp8(Slot::DescaleV, self.descale_v_shape()).packed(kv_blocks),
            Operand::read(Slot::ScaleO, DType::F32, [1]).when(self.takes_scale_o(), "an e4m3 output"),
            Operand::write(Slot::Amax, DType::F32, [1]).when(self.wants(Slot::Amax), "amax"),
            cu_seqlens_q,
            cu_seqlens_kv,
            seqused_q,
            seqused_kv,
            self.sinks_operand().when(self.wants(Slot::Sinks), "sinks"),
            self.alibi_operand(),
            Operand::write(Slot::MaxLogits, DType::F32, [self.dims.heads_q])
                .when(self.wants_max_logits(), "max_logits"),
            mask_block_cnt,
            mask_block_idx,
            mask_bits,
            full_block_cnt,
            full_block_idx,
            self.bias_operand(),
            self.dropout_operand(),
        ])
    }

    /// One sequence of the problem, with these lengths, as a problem of its own without packed tensors and used lengths.
    pub(crate) fn of_sequence(&self, seqlen_q: usize, seqlen_kv: usize) -> Self {
        let dims = self.dims.with_batch(1).with_seqlen_q(seqlen_q).with_seqlen_kv(seqlen_kv);
        let asked_for = LENGTHS.iter().fold(self.asked_for, |asked_for, &slot| asked_for.with(slot, false));
        Self { dims, asked_for, packing: Packing::default(), bias: self.bias.map(Bias::of_sequence), ..self.clone() }
    }

    /// The problem with other sizes and without a mask. `None` where there can be no such problem.
    pub(crate) fn unmasked(&self, dims: Dims) -> Option<Self> {
        dims.check().ok()?;
        Some(Self { dims, mask: Mask::Full, ..self.clone() })
    }

    /// The operands with offsets and lengths of sequences, which every pass of the problem reads.
    pub(super) fn lengths(&self) -> [Operand; 4] {
        LENGTHS.map(|slot| {
            let (count, option) = match slot {
                Slot::CuSeqlensQ => (self.dims.batch + 1, "packed queries"),
                Slot::CuSeqlensKv => (self.dims.batch + 1, "packed keys and values"),
                Slot::SequsedQ => (self.dims.batch, "used_q"),
                _ => (self.dims.batch, "used_kv"),
            };
            Operand::read(slot, DType::I32, [count]).when(self.wants(slot), option)
        })
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

    /// The number of query heads that read one KV head: `heads_q / heads_kv`.
    pub fn group_size(&self) -> usize {
        self.dims.group_size()
    }

    /// Whether the sequences of Q are packed: see [`packed_q`](ForwardProblemBuilder::packed_q).
    pub fn is_packed_q(&self) -> bool {
        self.wants(Slot::CuSeqlensQ)
    }

    /// Whether the sequences of K and V are packed: see [`packed_kv`](ForwardProblemBuilder::packed_kv).
    pub fn is_packed_kv(&self) -> bool {
        self.wants(Slot::CuSeqlensKv)
    }

    /// Whether sequences may have different lengths: packed tensors, or used lengths, on either side.
    pub fn has_lengths(&self) -> bool {
        LENGTHS.iter().any(|&slot| self.wants(slot))
    }

    /// Whether rows of outputs that belong to no sequence are filled: see [`fill_gaps`](ForwardProblemBuilder::fill_gaps).
    pub fn fills_gaps(&self) -> bool {
        self.packing.fill_gaps
    }

    /// About how many queries the longest sequence has. `None` where nobody said.
    pub fn max_seqlen_q(&self) -> Option<usize> {
        self.packing.max_seqlen_q
    }

    /// About how many keys the longest sequence has. `None` where nobody said.
    pub fn max_seqlen_kv(&self) -> Option<usize> {
        self.packing.max_seqlen_kv
    }

    /// The shape of Q: `[batch, seqlen_q, heads_q, head_dim_qk]`.
    ///
    /// The shapes of packed tensors (here and below) have a batch of 1: `[1, total_q, heads_q, head_dim_qk]`. The tensors of
    /// a run leave this dimension out, as [`operands`](Self::operands) says.
    pub fn q_shape(&self) -> [usize; 4] {
        let d = &self.dims;
        [batch_of(d, self.is_packed_q()), d.seqlen_q, d.heads_q, d.head_dim_qk]
    }

    /// The shape of K: `[batch, seqlen_kv, heads_kv, head_dim_qk]`.
    pub fn k_shape(&self) -> [usize; 4] {
        let d = &self.dims;
        [batch_of(d, self.is_packed_kv()), d.seqlen_kv, d.heads_kv, d.head_dim_qk]
    }

    /// The shape of V: `[batch, seqlen_kv, heads_kv, head_dim_vo]`.
    pub fn v_shape(&self) -> [usize; 4] {
        let d = &self.dims;
        [batch_of(d, self.is_packed_kv()), d.seqlen_kv, d.heads_kv, d.head_dim_vo]
    }

    /// The shape of O: `[batch, seqlen_q, heads_q, head_dim_vo]`.
    pub fn o_shape(&self) -> [usize; 4] {
        let d = &self.dims;
        [batch_of(d, self.is_packed_q()), d.seqlen_q, d.heads_q, d.head_dim_vo]
    }

    /// The shape of the log-sum-exp: `[batch, heads_q, seqlen_q]`.
    pub fn lse_shape(&self) -> [usize; 3] {
        let d = &self.dims;
        [batch_of(d, self.is_packed_q()), d.heads_q, d.seqlen_q]
    }

    /// Whether there is no query to compute. A problem with queries and no keys is not empty: O is zeros, the LSE is -inf. Nor
    /// is one whose rows are all a gap that is to be filled.
    pub fn is_empty(&self) -> bool {
        self.dims.seqlen_q == 0 || (self.dims.batch == 0 && !(self.is_packed_q() && self.fills_gaps()))
    }

    /// The problem as text, without what does not change which kernel is the fastest: the scale, the LSE, the
    /// instruction set, the margin and the limit of the workspace. [`Tuning`](crate::Tuning) files its measurements under this text.
    pub(crate) fn shape(&self) -> String {
        format!("forward {}", self.numbers())
    }

    /// Prints what plans are restricted to, if anything: the instruction set, the margin and the limit of the workspace.
    pub(super) fn write_restrictions(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(arch) = self.arch {
            write!(f, " on {arch}")?;
        }
        if self.sm_margin > 0 {
            write!(f, " sm_margin {}", self.sm_margin)?;
        }
        self.workspace_limit.map_or(Ok(()), |bytes| write!(f, " workspace_limit {bytes}"))
    }

    /// Prints whether gaps are filled.
    pub(super) fn write_fill_gaps(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.packing)
    }

    /// The part of a problem's text that forward and backward problems share: everything up to the scale.
    pub(super) fn numbers(&self) -> String {
        let d = &self.dims;
        let amax = if self.wants_amax() { " amax" } else { "" };
        format!(
            "{}{}{amax} batch {} seqlen {}x{}{} heads {}/{} head_dim {}/{} {}{}{}{}{}{}{}",
            self.dtype,
            self.fp8.map_or(String::new(), |fp8| fp8.to_string()),
            d.batch,
            d.seqlen_q,
            d.seqlen_kv,
            self.packing.text(self.asked_for),
            d.heads_q,
            d.heads_kv,
            d.head_dim_qk,
            d.head_dim_vo,
            self.mask,
            self.softcap_text(),
            self.block_mask_text(),
            self.bias_text(),
            self.alibi_text(),
            if self.wants_max_logits() { " max_logits" } else { "" },
            self.dropout_text()
        )
    }
}

impl fmt::Display for ForwardProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lse = if self.wants_lse() { " lse" } else { "" };
        write!(f, "{} scale {}{lse}", self.shape(), self.softmax_scale())?;
        self.write_sinks(f)?;
        self.write_fill_gaps(f)?;
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
    ///
    /// For packed queries with factors per block it is `[1, heads_q, blocks]`. The tensor of a run leaves the first dimension
    /// out.
    pub fn descale_q_shape(&self) -> [usize; 3] {
        self.descale_shape(self.q_shape(), self.is_packed_q())
    }

    /// The shape `[batch, heads, blocks]` of K's descale factors: see [`Scaling`]. `[0, 0, 0]` if K is not e4m3.
    pub fn descale_k_shape(&self) -> [usize; 3] {
        self.descale_shape(self.k_shape(), self.is_packed_kv())
    }

    /// The shape `[batch, heads, blocks]` of V's descale factors: see [`Scaling`]. `[0, 0, 0]` if V is not e4m3.
    pub fn descale_v_shape(&self) -> [usize; 3] {
        self.descale_shape(self.v_shape(), self.is_packed_kv())
    }

    pub(super) fn has_factors_per_block(&self) -> bool {
        self.scaling() == Some(Scaling::PerBlock)
    }

    fn descale_shape(&self, [_, rows, heads, _]: [usize; 4], packed: bool) -> [usize; 3] {
        let Dims { batch, heads_kv, .. } = self.dims();
        let of = if packed { Rows::Packed { total: rows } } else { Rows::Padded { seqlen: rows } };
        self.fp8.map_or([0; 3], |fp8| fp8.scaling.shape(batch, of, heads, heads_kv))
    }
}

#[cfg(test)]
#[path = "forward_tests.rs"]
mod tests;
