//! Cases through the C ABI, called as C would call it.

use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::ptr::null;

use hopper_attention::{
    AlibiSlopes, Arch, BackwardProblem, Bias, BlockMask, Corner, DType, ForwardProblem, Layout, Mask, Quantizer,
    Scaling, Slot,
};
use hopper_attention_capi::*;

use crate::blocks::BlocksImage;

pub mod host;

/// A status and the text that came with it.
pub type Refusal = (hattn_status, String);

/// What `hattn_last_error` says on this thread.
pub fn last_error() -> String {
    // SAFETY: a string of this thread, which is copied before its next failure.
    unsafe { CStr::from_ptr(hattn_last_error()) }.to_str().expect("UTF-8").to_owned()
}

/// A status as a result.
///
/// # Errors
/// Every status but `HATTN_OK`, with the text.
pub fn checked(status: hattn_status) -> Result<(), Refusal> {
    if status == HATTN_OK { Ok(()) } else { Err((status, last_error())) }
}

fn signed(size: usize) -> i64 {
    i64::try_from(size).expect("a small size")
}

fn dtype(dtype: DType) -> hattn_dtype {
    match dtype {
        DType::F16 => HATTN_F16,
        DType::BF16 => HATTN_BF16,
        DType::F32 => HATTN_F32,
        DType::E4M3 => HATTN_E4M3,
        DType::I32 => HATTN_I32,
        other => panic!("no tests of {other}"),
    }
}

/// The form of lists of blocks in C's words.
fn block_mask(mask: BlockMask) -> hattn_block_mask {
    let flags = [
        (true, HATTN_BLOCK_MASK_LISTS),
        (mask.is_per_batch(), HATTN_BLOCK_MASK_PER_BATCH),
        (mask.is_per_head(), HATTN_BLOCK_MASK_PER_HEAD),
        (mask.has_full_blocks(), HATTN_BLOCK_MASK_FULL_BLOCKS),
    ];
    flags.into_iter().filter(|&(has, _)| has).map(|(_, flag)| flag).sum()
}

/// The dimensions of a bias in C's words.
fn bias_dims(bias: Bias) -> hattn_bias_dims {
    let flags = [
        (bias.is_per_batch(), HATTN_BIAS_PER_BATCH),
        (bias.is_per_head(), HATTN_BIAS_PER_HEAD),
        (bias.is_per_query(), HATTN_BIAS_PER_QUERY),
    ];
    flags.into_iter().filter(|&(has, _)| has).map(|(_, flag)| flag).sum()
}

/// A problem in C's words.
pub fn problem(problem: &ForwardProblem) -> hattn_forward_problem {
    let dims = problem.dims();
    let covered =
        |side: usize| problem.bias().and_then(|bias| bias.covered()).map_or(0, |covered| signed(covered[side]));
    let corner_of = |corner| if corner == Corner::TopLeft { HATTN_TOP_LEFT } else { HATTN_BOTTOM_RIGHT };
    // Past the largest number that C can say, a bound is none.
    let bound = |keys| i64::try_from(keys).unwrap_or(i64::MAX);
    let (mask, corner, left, right) = match problem.mask() {
        Mask::Causal { corner } => (HATTN_MASK_CAUSAL, corner_of(corner), None, None),
        Mask::Window { left, right, corner } => (HATTN_MASK_WINDOW, corner_of(corner), left, right),
        Mask::Chunked { chunk, corner } => (HATTN_MASK_CHUNKED, corner_of(corner), Some(chunk), None),
        Mask::Prefix { keys, corner } => (HATTN_MASK_PREFIX, corner_of(corner), Some(keys), None),
        Mask::Full => (HATTN_MASK_FULL, HATTN_BOTTOM_RIGHT, None, None),
        other => panic!("no number for {other}"),
    };
    hattn_forward_problem {
        struct_size: size_of::<hattn_forward_problem>() as u32,
        abi_version: HATTN_ABI_VERSION,
        dtype: dtype(problem.dtype()),
        mask,
        corner,
        lse: i32::from(problem.wants_lse()),
        batch: signed(dims.batch),
        seqlen_q: signed(dims.seqlen_q),
        seqlen_kv: signed(dims.seqlen_kv),
        heads_q: signed(dims.heads_q),
        heads_kv: signed(dims.heads_kv),
        head_dim_qk: signed(dims.head_dim_qk),
        head_dim_vo: signed(dims.head_dim_vo),
        window_left: left.map_or(HATTN_UNBOUNDED, bound),
        window_right: right.map_or(HATTN_UNBOUNDED, bound),
        softmax_scale: problem.softmax_scale(),
        arch: match problem.arch() {
            None => HATTN_ARCH_OWN,
            Some(Arch::Sm80) => HATTN_ARCH_SM80,
            Some(Arch::Sm90) => HATTN_ARCH_SM90,
            Some(other) => panic!("no number for {other}"),
        },
        output: dtype(problem.output_dtype()),
        scaling: match problem.scaling() {
            Some(Scaling::PerHead) => HATTN_PER_HEAD,
            Some(Scaling::PerBlock) => HATTN_PER_BLOCK,
            _ => HATTN_PER_TENSOR,
        },
        amax: i32::from(problem.wants_amax()),
        half_scores: i32::from(problem.allows_half_scores()),
        sm_margin: i32::try_from(problem.sm_margin()).expect("a small margin"),
        // No workspace has 1 byte, so that 1 is as 0 in Rust.
        workspace_limit: problem.workspace_limit().map_or(0, |bytes| bytes.max(1)),
        fill_gaps: i32::from(problem.fills_gaps()),
        cu_seqlens_q: i32::from(problem.wants(Slot::CuSeqlensQ)),
        cu_seqlens_kv: i32::from(problem.wants(Slot::CuSeqlensKv)),
        seqused_q: i32::from(problem.wants(Slot::SequsedQ)),
        seqused_kv: i32::from(problem.wants(Slot::SequsedKv)),
        max_seqlen_q: problem.max_seqlen_q().map_or(0, signed),
        max_seqlen_kv: problem.max_seqlen_kv().map_or(0, signed),
        sinks: problem.sinks().map_or(0, dtype),
        softcap: problem.softcap(),
        alibi: match problem.alibi() {
            None => HATTN_ALIBI_NONE,
            Some(AlibiSlopes::PerBatch) => HATTN_ALIBI_PER_BATCH,
            Some(_) => HATTN_ALIBI_PER_HEAD,
        },
        max_logits: i32::from(problem.wants_max_logits()),
        block_mask: problem.block_mask().map_or(HATTN_BLOCK_MASK_NONE, block_mask),
        block_mask_most_partial: problem.block_mask().map_or(0, |mask| mask.most_partial() as i32),
        bias: problem.bias().map_or(0, |bias| dtype(bias.dtype())),
        bias_dims: problem.bias().map_or(0, bias_dims),
        dropout: problem.dropout().map_or(0.0, |dropout| dropout.probability()),
        reserved: 0,
        bias_queries: covered(0),
        bias_keys: covered(1),
    }
}

/// A problem of gradients in C's words.
pub fn backward_problem(problem: &BackwardProblem) -> hattn_backward_problem {
    let forward = self::problem(problem.forward());
    hattn_backward_problem {
        struct_size: size_of::<hattn_backward_problem>() as u32,
        abi_version: forward.abi_version,
        dtype: forward.dtype,
        mask: forward.mask,
        corner: forward.corner,
        d_lse: i32::from(problem.takes_d_lse()),
        batch: forward.batch,
        seqlen_q: forward.seqlen_q,
        seqlen_kv: forward.seqlen_kv,
        heads_q: forward.heads_q,
        heads_kv: forward.heads_kv,
        head_dim_qk: forward.head_dim_qk,
        head_dim_vo: forward.head_dim_vo,
        window_left: forward.window_left,
        window_right: forward.window_right,
        softmax_scale: forward.softmax_scale,
        deterministic: i32::from(problem.is_deterministic()),
        arch: forward.arch,
        sm_margin: forward.sm_margin,
        workspace_limit: forward.workspace_limit,
        cu_seqlens_q: forward.cu_seqlens_q,
        cu_seqlens_kv: forward.cu_seqlens_kv,
        seqused_q: forward.seqused_q,
        seqused_kv: forward.seqused_kv,
        max_seqlen_q: forward.max_seqlen_q,
        max_seqlen_kv: forward.max_seqlen_kv,
        fill_gaps: forward.fill_gaps,
        softcap: forward.softcap,
        alibi: forward.alibi,
        d_bias: i32::from(problem.wants_d_bias()),
        block_mask: forward.block_mask,
        block_mask_most_partial: forward.block_mask_most_partial,
        bias: forward.bias,
        bias_dims: forward.bias_dims,
        dropout: forward.dropout,
        reserved: 0,
        bias_queries: forward.bias_queries,
        bias_keys: forward.bias_keys,
        sinks: forward.sinks,
        d_sinks: i32::from(problem.wants_d_sinks()),
    }
}

/// A tensor in C's words.
pub fn tensor<const R: usize>(address: u64, element: DType, device: hattn_device, layout: Layout<R>) -> hattn_tensor {
    // What lies past the dimensions must not matter.
    let (mut shape, mut stride) = ([-99; 4], [-99; 4]);
    for axis in 0..R {
        (shape[axis], stride[axis]) = (signed(layout.shape()[axis]), layout.stride()[axis]);
    }
    hattn_tensor {
        struct_size: size_of::<hattn_tensor>() as u32,
        abi_version: HATTN_ABI_VERSION,
        data: address as *mut c_void,
        dtype: dtype(element),
        device,
        ndim: R as i32,
        reserved: 0,
        shape,
        stride,
    }
}

/// A packed tensor in C's words: without its first dimension, which is the batch of size 1.
pub fn without_batch(tensor: hattn_tensor) -> hattn_tensor {
    let hattn_tensor { ndim, shape: [batch, shape @ ..], stride: [_, stride @ ..], .. } = tensor;
    assert!(batch == 1 && ndim > 1, "{tensor:?}");
    let up = |[a, b, c]: [i64; 3]| [a, b, c, -99];
    hattn_tensor { ndim: ndim - 1, shape: up(shape), stride: up(stride), ..tensor }
}

/// The lists with the lengths of sequences: of packed queries and keys, and of used queries and keys.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct LengthsMemory {
    pub cu_seqlens: [Option<hattn_tensor>; 2],
    pub seqused: [Option<hattn_tensor>; 2],
}

impl LengthsMemory {
    /// The pointers of a run, in the order of the ABI.
    fn pointers(&self) -> [*const hattn_tensor; 4] {
        let [cu_seqlens_q, cu_seqlens_kv] = &self.cu_seqlens;
        let [seqused_q, seqused_kv] = &self.seqused;
        [cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv].map(|list| address(list.as_ref()))
    }
}

/// The tensors and the workspace of a run.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Memory {
    pub q: hattn_tensor,
    pub k: hattn_tensor,
    pub v: hattn_tensor,
    pub o: hattn_tensor,
    pub lse: Option<hattn_tensor>,
    pub sinks: Option<hattn_tensor>,
    pub alibi_slopes: Option<hattn_tensor>,
    pub max_logits: Option<hattn_tensor>,
    pub bias: Option<hattn_tensor>,
    pub blocks: Option<BlocksMemory>,
    pub dropout_state: Option<hattn_tensor>,
    pub workspace: u64,
    pub workspace_bytes: usize,
}

/// The tensors and the workspace of a backward run.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct BackwardMemory {
    pub q: hattn_tensor,
    pub k: hattn_tensor,
    pub v: hattn_tensor,
    pub o: hattn_tensor,
    pub lse: hattn_tensor,
    pub d_o: hattn_tensor,
    pub d_lse: Option<hattn_tensor>,
    pub d_q: hattn_tensor,
    pub d_k: hattn_tensor,
    pub d_v: hattn_tensor,
    pub sinks: Option<[hattn_tensor; 2]>,
    pub alibi_slopes: Option<hattn_tensor>,
    pub bias: Option<[hattn_tensor; 2]>,
    pub blocks: Option<BlocksMemory>,
    pub dropout_state: Option<hattn_tensor>,
    pub workspace: u64,
    pub workspace_bytes: usize,
}

/// The lists of a block-sparse mask: counts, indices and bits, and counts and indices of full blocks.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct BlocksMemory {
    pub partial: [hattn_tensor; 3],
    pub full: Option<[hattn_tensor; 2]>,
}

impl BlocksMemory {
    /// The lists of an image. `place` is where the memory of an operand lies on the device.
    pub fn new(image: &BlocksImage, device: hattn_device, place: impl Fn(Slot) -> u64) -> Self {
        let (counts, indices, bits) = image.layouts();
        let listed = |slot, layout| tensor(place(slot), DType::I32, device, layout);
        let counted = |slot| tensor(place(slot), DType::I32, device, counts);
        let partial = [counted(Slot::MaskBlockCnt), listed(Slot::MaskBlockIdx, indices), listed(Slot::MaskBits, bits)];
        let full = || [counted(Slot::FullBlockCnt), listed(Slot::FullBlockIdx, indices)];
        Self { partial, full: image.mask.has_full_blocks().then(full) }
    }

    /// The pointers of a run, in the order of the ABI.
    fn pointers(blocks: Option<&Self>) -> [*const hattn_tensor; 5] {
        let Some(Self { partial: [counts, indices, bits], full }) = blocks else { return [null(); 5] };
        let [full_counts, full] = full.as_ref().map_or([null(); 2], |[counts, indices]| [&raw const *counts, indices]);
        [counts, indices, bits, full_counts, full]
    }
}

/// `hattn_*_plan_create` of a pass.
pub type Create<P> = unsafe extern "C" fn(*const P, hattn_device, *mut *mut <P as Pass>::Plan) -> hattn_status;
/// `hattn_*_plan_destroy`.
pub type Destroy<P> = unsafe extern "C" fn(*mut <P as Pass>::Plan);
/// `hattn_*_plan_describe`.
pub type Describe<P> = unsafe extern "C" fn(*const <P as Pass>::Plan, *mut c_char, usize, *mut usize) -> hattn_status;
/// `hattn_*_plan_workspace_size`.
pub type WorkspaceSize<P> = unsafe extern "C" fn(*const <P as Pass>::Plan, *mut usize) -> hattn_status;

/// A pass of the ABI by its problem: the entries that both have.
#[allow(missing_docs)]
pub trait Pass: Sized {
    type Plan;
    const CREATE: Create<Self>;
    const DESTROY: Destroy<Self>;
    const DESCRIBE: Describe<Self>;
    const WORKSPACE_SIZE: WorkspaceSize<Self>;
}

impl Pass for hattn_forward_problem {
    type Plan = hattn_forward_plan;
    const CREATE: Create<Self> = hattn_forward_plan_create;
    const DESTROY: Destroy<Self> = hattn_forward_plan_destroy;
    const DESCRIBE: Describe<Self> = hattn_forward_plan_describe;
    const WORKSPACE_SIZE: WorkspaceSize<Self> = hattn_forward_plan_workspace_size;
}

impl Pass for hattn_backward_problem {
    type Plan = hattn_backward_plan;
    const CREATE: Create<Self> = hattn_backward_plan_create;
    const DESTROY: Destroy<Self> = hattn_backward_plan_destroy;
    const DESCRIBE: Describe<Self> = hattn_backward_plan_describe;
    const WORKSPACE_SIZE: WorkspaceSize<Self> = hattn_backward_plan_workspace_size;
}

impl Pass for hattn_quantize_problem {
    type Plan = hattn_quantize_plan;
    const CREATE: Create<Self> = hattn_quantize_plan_create;
    const DESTROY: Destroy<Self> = hattn_quantize_plan_destroy;
    const DESCRIBE: Describe<Self> = hattn_quantize_plan_describe;
    const WORKSPACE_SIZE: WorkspaceSize<Self> = hattn_quantize_plan_workspace_size;
}

/// A quantiser in C's words, of a forward problem in them.
pub fn quantize_problem(quantizer: &Quantizer, forward: &hattn_forward_problem) -> hattn_quantize_problem {
    hattn_quantize_problem {
        struct_size: size_of::<hattn_quantize_problem>() as u32,
        abi_version: HATTN_ABI_VERSION,
        forward,
        source: dtype(quantizer.source()),
        hadamard: i32::from(quantizer.hadamard().is_some()),
        seed: quantizer.hadamard().unwrap_or(0),
    }
}

/// What e4m3 operands have beside the tensors of [`Memory`].
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Fp8Memory {
    pub descale: [hattn_tensor; 3],
    pub scale_o: Option<hattn_tensor>,
    pub amax: Option<hattn_tensor>,
}

/// The tensors and the workspace of a run of a quantiser.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct QuantizeMemory {
    /// Of q, k and v: values, what is stored, factors, and whether these are given.
    pub tensors: [Option<([hattn_tensor; 3], bool)>; 3],
    pub counts: Option<hattn_tensor>,
    pub workspace: u64,
    pub workspace_bytes: usize,
}

/// A plan that frees itself.
pub struct Plan<P: Pass = hattn_forward_problem>(*mut P::Plan);

// SAFETY: the ABI says that a plan may be used by any threads at once.
unsafe impl<P: Pass> Send for Plan<P> {}
// SAFETY: as above.
unsafe impl<P: Pass> Sync for Plan<P> {}

impl<P: Pass> Plan<P> {
    /// A plan for a problem.
    ///
    /// # Errors
    /// What the library refused.
    pub fn new(given: &P, device: hattn_device) -> Result<Self, Refusal> {
        let mut plan = std::ptr::dangling_mut();
        // SAFETY: both point to live values.
        let status = unsafe { P::CREATE(given, device, &raw mut plan) };
        assert_eq!(plan.is_null(), status != HATTN_OK, "a plan exactly when there is no failure");
        checked(status).map(|()| Self(plan))
    }

    /// What the plan says of itself.
    pub fn describe(&self) -> String {
        let mut text = [1u8; 512];
        let mut length = 0;
        // SAFETY: a live plan, and a buffer of as many bytes as the call is given.
        let status = unsafe { P::DESCRIBE(self.0, text.as_mut_ptr().cast(), text.len(), &raw mut length) };
        checked(status).expect("a live plan describes itself");
        let text = CStr::from_bytes_until_nul(&text).expect("a final 0").to_str().expect("UTF-8");
        assert_eq!(text.len(), length);
        text.to_owned()
    }

    /// How large a workspace must be.
    pub fn workspace_bytes(&self) -> usize {
        let mut bytes = usize::MAX;
        // SAFETY: a live plan, and a live place for the size.
        checked(unsafe { P::WORKSPACE_SIZE(self.0, &raw mut bytes) }).expect("a live plan");
        bytes
    }
}

impl Memory {
    /// The arguments of a run.
    fn args(&self, lengths: &LengthsMemory) -> hattn_forward_args {
        let [cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv] = lengths.pointers();
        let [mask_block_cnt, mask_block_idx, mask_bits, full_block_cnt, full_block_idx] =
            BlocksMemory::pointers(self.blocks.as_ref());
        hattn_forward_args {
            struct_size: size_of::<hattn_forward_args>() as u32,
            abi_version: HATTN_ABI_VERSION,
            q: &raw const self.q,
            k: &raw const self.k,
            v: &raw const self.v,
            o: &raw const self.o,
            lse: address(self.lse.as_ref()),
            cu_seqlens_q,
            cu_seqlens_kv,
            seqused_q,
            seqused_kv,
            sinks: address(self.sinks.as_ref()),
            alibi_slopes: address(self.alibi_slopes.as_ref()),
            max_logits: address(self.max_logits.as_ref()),
            bias: address(self.bias.as_ref()),
            mask_block_cnt,
            mask_block_idx,
            mask_bits,
            full_block_cnt,
            full_block_idx,
            dropout_state: address(self.dropout_state.as_ref()),
            workspace: self.workspace as *mut c_void,
            workspace_bytes: self.workspace_bytes,
            ..Default::default()
        }
    }
}

impl Plan<hattn_forward_problem> {
    /// Runs the plan.
    ///
    /// # Errors
    /// What the library refused, or what failed.
    ///
    /// # Safety
    /// As [`hattn_forward_run`], for what the tensors lead to.
    pub unsafe fn run(&self, memory: &Memory, stream: *mut c_void) -> Result<(), Refusal> {
        // SAFETY: the caller's promise.
        unsafe { self.run_packed(memory, &LengthsMemory::default(), stream) }
    }

    /// Runs the plan, of packed sequences or used lengths.
    ///
    /// # Errors
    /// What the library refused, or what failed.
    ///
    /// # Safety
    /// As [`hattn_forward_run`], for what the tensors and the lists lead to.
    pub unsafe fn run_packed(
        &self,
        memory: &Memory,
        lengths: &LengthsMemory,
        stream: *mut c_void,
    ) -> Result<(), Refusal> {
        // SAFETY: a live plan and live structs; the caller's promise for the rest.
        checked(unsafe { hattn_forward_run(self.0, &memory.args(lengths), stream.cast()) })
    }

    /// Runs the plan, of e4m3 operands.
    ///
    /// # Errors
    /// What the library refused, or what failed.
    ///
    /// # Safety
    /// As [`hattn_forward_run`], for what the tensors lead to.
    pub unsafe fn run_fp8(&self, memory: &Memory, fp8: &Fp8Memory, stream: *mut c_void) -> Result<(), Refusal> {
        // SAFETY: the caller's promise.
        unsafe { self.run_packed_fp8(memory, fp8, &LengthsMemory::default(), stream) }
    }

    /// Runs the plan, of e4m3 operands with packed sequences or used lengths.
    ///
    /// # Errors
    /// What the library refused, or what failed.
    ///
    /// # Safety
    /// As [`hattn_forward_run`], for what the tensors and the lists lead to.
    pub unsafe fn run_packed_fp8(
        &self,
        memory: &Memory,
        fp8: &Fp8Memory,
        lengths: &LengthsMemory,
        stream: *mut c_void,
    ) -> Result<(), Refusal> {
        let [descale_q, descale_k, descale_v] = &fp8.descale;
        let args = hattn_forward_args {
            descale_q,
            descale_k,
            descale_v,
            scale_o: address(fp8.scale_o.as_ref()),
            amax: address(fp8.amax.as_ref()),
            ..memory.args(lengths)
        };
        // SAFETY: a live plan and live structs; the caller's promise for the rest.
        checked(unsafe { hattn_forward_run(self.0, &args, stream.cast()) })
    }
}

fn address<T>(place: Option<&T>) -> *const T {
    place.map_or(null(), |place| &raw const *place)
}

impl Plan<hattn_quantize_problem> {
    /// Runs the plan.
    ///
    /// # Errors
    /// What the library refused, or what failed.
    ///
    /// # Safety
    /// As [`hattn_quantize_run`], for what the tensors lead to.
    pub unsafe fn run(&self, memory: &QuantizeMemory, stream: *mut c_void) -> Result<(), Refusal> {
        // SAFETY: the caller's promise.
        unsafe { self.run_packed(memory, &LengthsMemory::default(), stream) }
    }

    /// Runs the plan, of packed sequences or used lengths.
    ///
    /// # Errors
    /// What the library refused, or what failed.
    ///
    /// # Safety
    /// As [`hattn_quantize_run`], for what the tensors and the lists lead to.
    pub unsafe fn run_packed(
        &self,
        memory: &QuantizeMemory,
        lengths: &LengthsMemory,
        stream: *mut c_void,
    ) -> Result<(), Refusal> {
        let [cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv] = lengths.pointers();
        let tensors = memory.tensors.each_ref().map(|tensor| {
            tensor.as_ref().map(|([values, stored, descale], given)| hattn_quantize_tensor {
                struct_size: size_of::<hattn_quantize_tensor>() as u32,
                abi_version: HATTN_ABI_VERSION,
                values,
                stored,
                descale,
                given: i32::from(*given),
                reserved: 0,
            })
        });
        let [q, k, v] = &tensors;
        let args = hattn_quantize_args {
            struct_size: size_of::<hattn_quantize_args>() as u32,
            abi_version: HATTN_ABI_VERSION,
            q: address(q.as_ref()),
            k: address(k.as_ref()),
            v: address(v.as_ref()),
            counts: address(memory.counts.as_ref()),
            workspace: memory.workspace as *mut c_void,
            workspace_bytes: memory.workspace_bytes,
            cu_seqlens_q,
            cu_seqlens_kv,
            seqused_q,
            seqused_kv,
        };
        // SAFETY: a live plan and live structs; the caller's promise for the rest.
        checked(unsafe { hattn_quantize_run(self.0, &args, stream.cast()) })
    }
}

impl Plan<hattn_backward_problem> {
    /// Runs the plan.
    ///
    /// # Errors
    /// What the library refused, or what failed.
    ///
    /// # Safety
    /// As [`hattn_backward_run`], for what the tensors lead to.
    pub unsafe fn run(&self, memory: &BackwardMemory, stream: *mut c_void) -> Result<(), Refusal> {
        // SAFETY: the caller's promise.
        unsafe { self.run_packed(memory, &LengthsMemory::default(), stream) }
    }

    /// Runs the plan, of packed sequences or used lengths.
    ///
    /// # Errors
    /// What the library refused, or what failed.
    ///
    /// # Safety
    /// As [`hattn_backward_run`], for what the tensors and the lists lead to.
    pub unsafe fn run_packed(
        &self,
        memory: &BackwardMemory,
        lengths: &LengthsMemory,
        stream: *mut c_void,
    ) -> Result<(), Refusal> {
        let [cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv] = lengths.pointers();
        let [mask_block_cnt, mask_block_idx, mask_bits, full_block_cnt, full_block_idx] =
            BlocksMemory::pointers(memory.blocks.as_ref());
        let args = hattn_backward_args {
            struct_size: size_of::<hattn_backward_args>() as u32,
            abi_version: HATTN_ABI_VERSION,
            q: &raw const memory.q,
            k: &raw const memory.k,
            v: &raw const memory.v,
            o: &raw const memory.o,
            lse: &raw const memory.lse,
            d_o: &raw const memory.d_o,
            d_lse: address(memory.d_lse.as_ref()),
            d_q: &raw const memory.d_q,
            d_k: &raw const memory.d_k,
            d_v: &raw const memory.d_v,
            workspace: memory.workspace as *mut c_void,
            workspace_bytes: memory.workspace_bytes,
            cu_seqlens_q,
            cu_seqlens_kv,
            seqused_q,
            seqused_kv,
            sinks: address(memory.sinks.as_ref().map(|[sinks, _]| sinks)),
            d_sinks: address(memory.sinks.as_ref().map(|[_, d_sinks]| d_sinks)),
            alibi_slopes: address(memory.alibi_slopes.as_ref()),
            bias: address(memory.bias.as_ref().map(|[bias, _]| bias)),
            dbias: address(memory.bias.as_ref().map(|[_, d_bias]| d_bias)),
            mask_block_cnt,
            mask_block_idx,
            mask_bits,
            full_block_cnt,
            full_block_idx,
            dropout_state: address(memory.dropout_state.as_ref()),
        };
        // SAFETY: a live plan and live structs; the caller's promise for the rest.
        checked(unsafe { hattn_backward_run(self.0, &args, stream.cast()) })
    }
}

impl<P: Pass> fmt::Debug for Plan<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe())
    }
}

impl<P: Pass> Drop for Plan<P> {
    fn drop(&mut self) {
        // SAFETY: it came from the library, and its owner is going.
        unsafe { P::DESTROY(self.0) };
    }
}
