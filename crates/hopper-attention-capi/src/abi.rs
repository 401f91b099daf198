//! The structs and constants of the ABI, and their layout in bytes.
//!
//! `include/hopper_attention.h` is made of this file, with its comments. Write them for a C programmer. `abi/block_lists.rs` has
//! the structs of `include/hopper_attention_lists.h`.

use std::ffi::c_void;
use std::mem::offset_of;

use hopper_attention::Slot;

mod block_lists;
mod versioned;

pub use block_lists::*;
pub use versioned::StructLayout;
use versioned::{ALIGNMENT, MOST, layouts, size_of_field};
pub(crate) use versioned::{Versioned, fill, read};

/// The version of the ABI. Every struct carries it. It changes when something is removed or changes its meaning.
pub const HATTN_ABI_VERSION: u32 = 1;

/// An element type: HATTN_F16, HATTN_BF16, HATTN_F32, HATTN_E4M3 or HATTN_I32.
/// 0 is none of them, so that a forgotten field is refused.
pub type hattn_dtype = i32;
/// IEEE 754 half precision, 2 bytes.
pub const HATTN_F16: hattn_dtype = 1;
/// bfloat16, 2 bytes.
pub const HATTN_BF16: hattn_dtype = 2;
/// IEEE 754 single precision, 4 bytes.
pub const HATTN_F32: hattn_dtype = 3;
/// FP8 with 4 exponent and 3 mantissa bits, 1 byte. No infinity; the largest value is 448. CUDA: __nv_fp8_e4m3.
pub const HATTN_E4M3: hattn_dtype = 4;
/// 32-bit integer with sign, for the offsets and used lengths of sequences, and for lists of blocks.
pub const HATTN_I32: hattn_dtype = 5;

/// A device: HATTN_CPU, or the ordinal of a GPU, from 0, in the order of the CUDA driver and cudaSetDevice.
pub type hattn_device = i32;
/// The host: all cores of this machine.
pub const HATTN_CPU: hattn_device = -1;

/// Which keys a query attends to: HATTN_MASK_FULL, HATTN_MASK_CAUSAL, HATTN_MASK_WINDOW, HATTN_MASK_CHUNKED or
/// HATTN_MASK_PREFIX. All but the first are aligned to a corner (hattn_corner). The aligned key of query i is the key with
/// number i + seqlen_kv - seqlen_q (bottom-right) or i (top-left).
/// A query without keys gets output 0 and log-sum-exp -inf. A pair of a query and a key that the mask hides has no
/// effect on any result, whatever the two rows hold: NaN and infinity, too.
pub type hattn_mask = i32;
/// Every key.
pub const HATTN_MASK_FULL: hattn_mask = 0;
/// The keys up to the aligned key, with that key.
pub const HATTN_MASK_CAUSAL: hattn_mask = 1;
/// The keys from window_left before the aligned key to window_right after it, both included.
pub const HATTN_MASK_WINDOW: hattn_mask = 2;
/// Chunked local attention: the keys of the aligned key's chunk, up to the aligned key, with that key. Chunks have
/// window_left keys each, 1 or more, from key 0 on. A query whose aligned key is negative has no keys.
pub const HATTN_MASK_CHUNKED: hattn_mask = 3;
/// A prefix, and causal behind it: the first window_left keys, and the keys up to the aligned key, with that key.
pub const HATTN_MASK_PREFIX: hattn_mask = 4;

/// How masks are aligned: HATTN_BOTTOM_RIGHT or HATTN_TOP_LEFT. The two differ when seqlen_q and seqlen_kv differ.
pub type hattn_corner = i32;
/// Bottom-right aligned: a causal mask lets query i see keys up to i + seqlen_kv - seqlen_q.
pub const HATTN_BOTTOM_RIGHT: hattn_corner = 0;
/// Top-left aligned: a causal mask lets query i see keys up to i.
pub const HATTN_TOP_LEFT: hattn_corner = 1;

/// Which biases scores have (ALiBi): HATTN_ALIBI_NONE, HATTN_ALIBI_PER_HEAD or HATTN_ALIBI_PER_BATCH.
/// The score of query i and key j, which is softmax_scale * q k or capped, loses slope * |i + offset - j|, before the mask.
/// offset is seqlen_kv - seqlen_q, of each sequence its own where lengths may differ. It is 0 if a mask is top-left.
pub type hattn_alibi = i32;
/// No bias.
pub const HATTN_ALIBI_NONE: hattn_alibi = 0;
/// One slope for each query head: `[heads_q]`.
pub const HATTN_ALIBI_PER_HEAD: hattn_alibi = 1;
/// One slope for each batch and query head: `[batch, heads_q]`. Where sequences are packed, a batch is a sequence.
pub const HATTN_ALIBI_PER_BATCH: hattn_alibi = 2;

/// A block-sparse mask, as flags: 0, or HATTN_BLOCK_MASK_LISTS with any of the others added. A block is 128 queries and 128
/// keys. Each block of queries has lists of blocks of keys. A full block keeps all its pairs of a query and a key, a partial block
/// those whose bit is set, and a block in no list keeps none. The problem's mask must keep a pair, too.
/// With Qb = ceil(seqlen_q / 128), Kb = ceil(seqlen_kv / 128), and B and H as below, the operands are of HATTN_I32:
/// - mask_block_cnt, full_block_cnt: [B, H, Qb], how many blocks are listed
/// - mask_block_idx, full_block_idx: [B, H, Qb, Kb], which: so many entries of the last dimension, each 0 to Kb - 1
/// - mask_bits: [B, H, Qb, 512 * block_mask_most_partial], 512 words for each partial block in the order of the list: 4 for each
///   query. Bit j % 32 of word j / 32 is key j of the block.
///
/// The CPU refuses wrong numbers. A GPU clamps counts and leaves out what is no block. Of a block that is listed twice, the first
/// place counts. A block in both lists is full.
pub type hattn_block_mask = i32;
/// No lists.
pub const HATTN_BLOCK_MASK_NONE: hattn_block_mask = 0;
/// There are lists. B and H are 1: batch entries and heads share them.
pub const HATTN_BLOCK_MASK_LISTS: hattn_block_mask = 1;
/// Each batch entry has lists of its own: B is batch.
pub const HATTN_BLOCK_MASK_PER_BATCH: hattn_block_mask = 2;
/// Each query head has lists of its own: H is heads_q.
pub const HATTN_BLOCK_MASK_PER_HEAD: hattn_block_mask = 4;
/// There are lists of full blocks. Without this flag all listed blocks are partial.
pub const HATTN_BLOCK_MASK_FULL_BLOCKS: hattn_block_mask = 8;

/// Which dimensions an additive bias has, as flags: [B, H, Q, seqlen_kv]. Without a flag the dimension is 1, and shared.
pub type hattn_bias_dims = i32;
/// Each batch entry has a bias of its own: B is batch.
pub const HATTN_BIAS_PER_BATCH: hattn_bias_dims = 1;
/// Each query head has a bias of its own: H is heads_q.
pub const HATTN_BIAS_PER_HEAD: hattn_bias_dims = 2;
/// Each query has a bias of its own: Q is seqlen_q.
pub const HATTN_BIAS_PER_QUERY: hattn_bias_dims = 4;

/// The instruction set of the kernels that compute a problem: HATTN_ARCH_OWN, HATTN_ARCH_SM80 or HATTN_ARCH_SM90.
pub type hattn_arch = i32;
/// Use the newest instruction set of the GPU (default). On the CPU no other value is allowed.
pub const HATTN_ARCH_OWN: hattn_arch = 0;
/// Compute capability 8.0 and later.
pub const HATTN_ARCH_SM80: hattn_arch = 80;
/// Compute capability 9.0.
pub const HATTN_ARCH_SM90: hattn_arch = 90;

/// Which elements of a HATTN_E4M3 tensor share a descale factor: HATTN_PER_TENSOR, HATTN_PER_HEAD or HATTN_PER_BLOCK.
/// A real value is the stored value times its factor. Factors are HATTN_F32 tensors [batch, heads, blocks].
/// A dimension has size 1 where all of its entries share the factor.
pub type hattn_scaling = i32;
/// One factor for each of Q, K and V: [1, 1, 1].
pub const HATTN_PER_TENSOR: hattn_scaling = 0;
/// One factor for each sequence and KV head: [batch, heads_kv, 1]. Query heads that read one KV head share that of Q.
pub const HATTN_PER_HEAD: hattn_scaling = 1;
/// One factor for each block of 128 rows of a head. The last block may be shorter.
/// Q: [batch, heads_q, ceil(seqlen_q / 128)]. K and V: [batch, heads_kv, ceil(seqlen_kv / 128)].
/// Packed: [heads, floor((total + 127 * batch) / 128)]. Sequence i, from row begin on, has its own blocks from
/// floor((begin + 127 * i) / 128) on. Factors of no sequence are not read.
pub const HATTN_PER_BLOCK: hattn_scaling = 2;

/// No bound on this side of a window.
pub const HATTN_UNBOUNDED: i64 = -1;

/// What HATTN_FORWARD_PROBLEM_INIT and HATTN_BACKWARD_PROBLEM_INIT set batch, seqlen_q and seqlen_kv to.
/// Every call refuses it, so that a forgotten size is an error. (0 is a legal batch and a legal length.)
pub const HATTN_UNSET: i64 = -1;

/// What a CUstream or a cudaStream_t points to.
pub struct CUstream_st {
    _private: [u8; 0],
}

/// A forward pass, as numbers: O = softmax(mask(softmax_scale * Q K^T)) V. Begin with HATTN_FORWARD_PROBLEM_INIT.
///
/// Shapes:
/// - Q: [batch, seqlen_q, heads_q, head_dim_qk]. O: [batch, seqlen_q, heads_q, head_dim_vo]
/// - K: [batch, seqlen_kv, heads_kv, head_dim_qk]. V: [batch, seqlen_kv, heads_kv, head_dim_vo]
///
/// Limits: seqlen_q + seqlen_kv < 2^30, batch * heads_q < 2^31, head dims < 2^31.
/// The CPU takes any head dims. On a GPU they are multiples of 8 (16 for HATTN_E4M3), up to those of the compiled kernels.
#[repr(C)]
#[allow(missing_docs, reason = "some comments are about the field below, too")]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct hattn_forward_problem {
    /// sizeof(hattn_forward_problem), and HATTN_ABI_VERSION.
    pub struct_size: u32,
    pub abi_version: u32,
    /// Element type of Q, K and V: HATTN_F16, HATTN_BF16 or HATTN_E4M3 (with descale factors). On the CPU also HATTN_F32.
    pub dtype: hattn_dtype,
    /// Which keys a query attends to.
    pub mask: hattn_mask,
    /// How the mask is aligned. HATTN_MASK_FULL does not use it.
    pub corner: hattn_corner,
    /// 1: the log-sum-exp of each query is an output. 0: it is not.
    pub lse: i32,
    /// Number of sequences, 0 or more. With 0 there is nothing to compute: plans are made, and runs are HATTN_OK.
    pub batch: i64,
    /// Number of queries in each sequence, 0 or more.
    pub seqlen_q: i64,
    /// Number of keys in each sequence, 0 or more. With 0 no query has a key.
    pub seqlen_kv: i64,
    /// Number of query heads, a multiple of heads_kv. Query head h reads KV head h / (heads_q / heads_kv).
    pub heads_q: i64,
    /// Number of KV heads, which are the heads of K and V, 1 or more.
    pub heads_kv: i64,
    /// Number of elements of a query and of a key, 1 or more.
    pub head_dim_qk: i64,
    /// Number of elements of a value and of an output, 1 or more.
    pub head_dim_vo: i64,
    /// Number of keys that HATTN_MASK_WINDOW keeps before the aligned key (hattn_mask). HATTN_UNBOUNDED: all of them.
    /// With HATTN_MASK_CHUNKED: number of keys of a chunk. With HATTN_MASK_PREFIX: number of keys of the prefix.
    pub window_left: i64,
    /// Number of keys that HATTN_MASK_WINDOW keeps after the aligned key (hattn_mask). HATTN_UNBOUNDED: all of them.
    pub window_right: i64,
    /// The factor on Q K^T, finite and above 0. 0 stands for 1 / sqrt(head_dim_qk).
    pub softmax_scale: f32,
    /// Restricts plans to kernels of one instruction set. Planning fails if the GPU or the library has no such kernel.
    pub arch: hattn_arch,
    /// Element type of O. 0 stands for dtype, and for HATTN_BF16 with HATTN_E4M3 operands.
    /// HATTN_E4M3 operands may also have HATTN_F16 or HATTN_E4M3. Other operands have their own type only.
    pub output: hattn_dtype,
    /// Which elements share a descale factor. Must be 0 unless the operands are HATTN_E4M3.
    pub scaling: hattn_scaling,
    /// 1: the largest magnitude of O is an output. 0: it is not. Must be 0 unless the operands are HATTN_E4M3.
    pub amax: i32,
    /// 1: a GPU may sum Q K^T in f16, which is faster. 0: it sums in f32, as the CPU does. Must be 0 unless operands are HATTN_E4M3.
    /// Sums fit f16 where no stored element of Q or K is larger in magnitude than 14, and hattn_quantize_run then stores no larger
    /// ones. If one is larger or NaN, a second kernel computes everything again in f32. The run then takes more than twice as long.
    pub half_scores: i32,
    /// Number of multiprocessors of the GPU that the kernels leave to others, such as kernels of NCCL: 0 or more, and below the GPU's
    /// number. Kernels of HATTN_ARCH_SM90 then have at most as many thread blocks as are left. Those of HATTN_ARCH_SM80 leave none:
    /// planning fails unless this is 0. The CPU, the quantiser and the small kernels around a backward pass ignore it.
    pub sm_margin: i32,
    /// 1: rows of outputs that belong to no sequence are filled with 0 (log-sum-exp: -inf). 0: they are not written.
    pub fill_gaps: i32,
    /// 1: the sequences of Q are packed, without padding: Q and O are [total_q, heads_q, head_dim], the log-sum-exp is
    /// [heads_q, total_q]. seqlen_q is total_q. 0: they are not packed.
    pub cu_seqlens_q: i32,
    /// 1: the sequences of K and V are packed: [total_kv, heads_kv, head_dim], with seqlen_kv as total_kv. 0: they are not.
    pub cu_seqlens_kv: i32,
    /// 1: each sequence uses its first rows of Q (below: of K and V) only, packed or not. 0: it uses all of them.
    /// The mask of a sequence has the used lengths as its sizes.
    pub seqused_q: i32,
    pub seqused_kv: i32,
    /// About how many queries (below: keys) the longest sequence has. 0: unknown. A hint for speed, where lengths may differ.
    pub max_seqlen_q: i64,
    pub max_seqlen_kv: i64,
    /// Element type of the attention sinks, one number s for each query head: HATTN_F32 or HATTN_BF16. 0: there are none.
    /// A sink is one more score of each row of its head, with no value. Scale and mask do not apply to it.
    /// A query without keys has output 0 and log-sum-exp s. A NaN makes NaN of all rows of its head.
    pub sinks: hattn_dtype,
    /// Cap c of the scores, finite and above 0: c * tanh(softmax_scale * q k / c), before the mask. Gradients are of capped scores. 0: none.
    pub softcap: f32,
    /// Whether scores have ALiBi's bias, and which slopes. 0: none. Not for HATTN_E4M3. The log-sum-exp includes it. Slopes have no gradient.
    pub alibi: hattn_alibi,
    /// 1: the largest score of each query head is an output, over batches, queries and the keys that the mask keeps. A score is what
    /// enters the softmax: with scale, softcap, bias and ALiBi. Sinks do not count. 0: it is not. Must be 0 for HATTN_E4M3.
    pub max_logits: i32,
    /// Lists of blocks beside the mask. 0: none. Not for packed sequences or used lengths.
    pub block_mask: hattn_block_mask,
    /// The most partial blocks that the lists have for a block of queries, 0 to ceil(seqlen_kv / 128). 0 without lists.
    pub block_mask_most_partial: i32,
    /// Element type of an additive bias: HATTN_F32, HATTN_BF16 or HATTN_F16. 0: there is none. It is added to a score after scale and
    /// softcap. -inf hides its pair as a mask does. Not for HATTN_E4M3. On a GPU without gradients beside a softcap.
    pub bias: hattn_dtype,
    /// Which dimensions the bias has beside the keys. 0 without a bias.
    pub bias_dims: hattn_bias_dims,
    /// Probability, 0 to below 1, with which dropout makes a weight 0, rounded to a multiple of 1/32768. 0: no dropout.
    /// Others are multiplied by 1 / (1 - probability). The log-sum-exp is as without. Not for HATTN_E4M3. Limits of GPUs: docs/numerics.md.
    pub dropout: f32,
    /// Must be 0.
    pub reserved: i32,
    /// For how many queries and keys of a sequence the bias has numbers. 0: seqlen_q and seqlen_kv, as for sides that are not packed. A
    /// longer sequence is refused, or cut where the device alone knows it. bias_queries is not read where queries share their numbers.
    pub bias_queries: i64,
    pub bias_keys: i64,
    /// The most bytes of a plan's workspace. 0: any number. A plan for a GPU then cuts tiles less, which may be slower. It is refused
    /// with HATTN_ERROR_VALUE if it needs more even without cut tiles. The CPU needs none. The quantiser ignores the limit.
    pub workspace_limit: u64,
}

impl hattn_forward_problem {
    /// The optional operands that the problem may ask for, each with its field. A field is 0 or 1.
    pub(crate) fn asked_for(&self) -> impl IntoIterator<Item = (Slot, i32)> {
        [
            (Slot::Lse, self.lse),
            (Slot::Amax, self.amax),
            (Slot::CuSeqlensQ, self.cu_seqlens_q),
            (Slot::CuSeqlensKv, self.cu_seqlens_kv),
            (Slot::SequsedQ, self.seqused_q),
            (Slot::SequsedKv, self.seqused_kv),
            (Slot::MaxLogits, self.max_logits),
        ]
    }
}

/// The gradients of a forward pass with respect to Q, K and V, as numbers. Begin with HATTN_BACKWARD_PROBLEM_INIT.
///
/// dQ, dK, dV and dO (the gradient of the output) have the shapes of Q, K, V and O.
/// Fields without a comment mean the same as in hattn_forward_problem. The limits are the same, too.
#[repr(C)]
#[allow(missing_docs, reason = "the fields of hattn_forward_problem are explained there")]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct hattn_backward_problem {
    pub struct_size: u32,
    pub abi_version: u32,
    /// Element type of Q, K, V, O, dO, dQ, dK and dV: HATTN_F16 or HATTN_BF16. On the CPU also HATTN_F32.
    pub dtype: hattn_dtype,
    pub mask: hattn_mask,
    pub corner: hattn_corner,
    /// 1: a gradient of the log-sum-exp is an input. 0: it is not.
    pub d_lse: i32,
    pub batch: i64,
    pub seqlen_q: i64,
    pub seqlen_kv: i64,
    pub heads_q: i64,
    pub heads_kv: i64,
    pub head_dim_qk: i64,
    pub head_dim_vo: i64,
    pub window_left: i64,
    pub window_right: i64,
    pub softmax_scale: f32,
    /// 1: the same inputs, plan and device always give the same bits, as they do on the CPU. 0: a GPU may differ, and be faster.
    pub deterministic: i32,
    pub arch: hattn_arch,
    pub sm_margin: i32,
    pub cu_seqlens_q: i32,
    pub cu_seqlens_kv: i32,
    pub seqused_q: i32,
    pub seqused_kv: i32,
    pub max_seqlen_q: i64,
    pub max_seqlen_kv: i64,
    pub fill_gaps: i32,
    pub softcap: f32,
    pub sinks: hattn_dtype,
    /// 1: the gradient of the sinks is an output, and the sinks are an input. 0: neither. Must be 0 without sinks.
    pub d_sinks: i32,
    pub alibi: hattn_alibi,
    /// 1: the gradient of the bias is an output, of its shape and type. 0: it is not. Must be 0 without a bias.
    pub d_bias: i32,
    pub block_mask: hattn_block_mask,
    pub block_mask_most_partial: i32,
    pub bias: hattn_dtype,
    pub bias_dims: hattn_bias_dims,
    pub dropout: f32,
    /// Must be 0.
    pub reserved: i32,
    pub bias_queries: i64,
    pub bias_keys: i64,
    pub workspace_limit: u64,
}

/// How Q, K and V become operands of HATTN_E4M3, as numbers. Begin with HATTN_QUANTIZE_PROBLEM_INIT.
///
/// For the elements x that share a descale factor, where amax is the largest finite magnitude among them:
///
/// - limit is the largest stored magnitude: 448, or 14 for Q and K if the forward problem has half_scores.
/// - descale is max(amax / limit, the smallest normal float). The caller may give it instead.
/// - stored is x * (1 / descale), rounded to the nearest HATTN_E4M3, ties to even. Arithmetic is in single precision.
/// - An element that would round to a magnitude above limit is stored as limit, with its sign.
///   This happens only with factors that the caller gave.
/// - An element that is not finite is stored as NaN.
#[repr(C)]
#[allow(missing_docs, reason = "size and version are explained in hattn_forward_problem")]
#[derive(Clone, Copy, Debug)]
pub struct hattn_quantize_problem {
    pub struct_size: u32,
    pub abi_version: u32,
    /// The forward pass that takes the operands. Its dtype is HATTN_E4M3. It is read during the call only.
    pub forward: *const hattn_forward_problem,
    /// Element type of the values that are quantised: HATTN_F16 or HATTN_BF16. On the CPU also HATTN_F32.
    pub source: hattn_dtype,
    /// 1: rotate each query and key before it is quantised. 0: do not.
    /// Random signs and a Hadamard transform over the head dim leave Q K^T as it is, and spread outliers over their vectors.
    pub hadamard: i32,
    /// The seed of the random signs. Queries and keys of one forward pass need the same seed. Only hadamard uses it.
    pub seed: u64,
}

/// A tensor in the caller's memory. Begin with HATTN_TENSOR_INIT.
/// The offset of an element from data, in elements, is the sum of index times stride over all dimensions. Their order is:
/// - 4 dimensions: Q, K, V, O and their gradients, [batch, seqlen, heads, head_dim]
/// - 3 dimensions: a log-sum-exp or its gradient, [batch, heads, seqlen]; descale factors, [batch, heads, blocks]
/// - Packed sequences: Q, K, V, O and their gradients are [total, heads, head_dim], a log-sum-exp is [heads, total]
/// - All others, such as a bias: as the comment of the argument says
///
/// The order in memory follows from the strides. For memory that is [batch, heads, seqlen, head_dim], only they differ.
/// On a GPU, data and the outer strides of Q, K, V, O, their gradients (packed or not) and mask_bits are multiples of 16 bytes.
/// All other tensors are aligned to their elements, also a bias and the other lists of blocks.
/// No two elements of an output have the same address.
#[repr(C)]
#[allow(missing_docs, reason = "one comment is about size and version")]
#[derive(Clone, Copy, Debug)]
pub struct hattn_tensor {
    /// sizeof(hattn_tensor), and HATTN_ABI_VERSION.
    pub struct_size: u32,
    pub abi_version: u32,
    /// Address of the first element, on the host or on a GPU. Not used if there are none. Inputs are not written: a const pointer may be cast.
    pub data: *mut c_void,
    /// Element type.
    pub dtype: hattn_dtype,
    /// Where the memory is.
    pub device: hattn_device,
    /// Number of dimensions, 1 to 4.
    pub ndim: i32,
    /// Must be 0.
    pub reserved: i32,
    /// Size of each dimension, outermost first. Entries from ndim on are not used.
    pub shape: [i64; 4],
    /// Step in elements between neighbours, for each dimension. The last one is 1. Entries from ndim on are not used.
    /// hattn_tensor_contiguous fills in the strides of a row-major tensor without gaps.
    pub stride: [i64; 4],
}

/// What a forward pass reads and writes. Begin with HATTN_FORWARD_ARGS_INIT.
/// A tensor with a condition ("given exactly if") must be null where the condition does not hold.
#[repr(C)]
#[allow(missing_docs, reason = "size and version are explained in hattn_forward_problem")]
#[derive(Clone, Copy, Debug, Default)]
pub struct hattn_forward_args {
    pub struct_size: u32,
    pub abi_version: u32,
    /// Queries, read: [batch, seqlen_q, heads_q, head_dim_qk].
    pub q: *const hattn_tensor,
    /// Keys, read: [batch, seqlen_kv, heads_kv, head_dim_qk].
    pub k: *const hattn_tensor,
    /// Values, read: [batch, seqlen_kv, heads_kv, head_dim_vo].
    pub v: *const hattn_tensor,
    /// The output, written: [batch, seqlen_q, heads_q, head_dim_vo].
    pub o: *const hattn_tensor,
    /// The log-sum-exp of each query, written: natural logarithm, HATTN_F32 [batch, heads_q, seqlen_q]. Given exactly if lse is 1.
    pub lse: *const hattn_tensor,
    /// Scratch memory on the plan's device, aligned to 16 bytes. Null if the plan needs none. One for each run at a time.
    pub workspace: *mut c_void,
    /// Size of the workspace in bytes: at least what hattn_forward_plan_workspace_size gives.
    pub workspace_bytes: usize,
    /// Descale factors of Q, K and V, read: HATTN_F32, finite and 0 or more. hattn_scaling says which shape.
    /// Given exactly if the operands are HATTN_E4M3. The CPU refuses other values. A GPU makes NaN of what they enter.
    pub descale_q: *const hattn_tensor,
    pub descale_k: *const hattn_tensor,
    pub descale_v: *const hattn_tensor,
    /// The factor that O is multiplied by before it is rounded to HATTN_E4M3, read: HATTN_F32, 1 dimension of size 1.
    /// Given exactly if the output is HATTN_E4M3. A product with a magnitude above 448 is stored as 448 with its sign.
    pub scale_o: *const hattn_tensor,
    /// The largest magnitude of O before scale_o and rounding, written: HATTN_F32, 1 dimension of size 1. Given exactly if amax is 1.
    pub amax: *const hattn_tensor,
    /// Where each sequence of a packed Q begins, read: HATTN_I32 [batch + 1]. Sequence i has the rows from entry i to below
    /// entry i + 1. Given exactly if the problem's cu_seqlens_q is 1. Entries do not decrease, and are 0 to total_q.
    /// Only the CPU checks this. A GPU clamps them, so that no memory outside of the tensors is used.
    pub cu_seqlens_q: *const hattn_tensor,
    /// As cu_seqlens_q, for packed K and V.
    pub cu_seqlens_kv: *const hattn_tensor,
    /// Used rows of each sequence of Q (below: of K and V), read: HATTN_I32 `[batch]`, 0 to its length. Otherwise as cu_seqlens_q.
    pub seqused_q: *const hattn_tensor,
    pub seqused_kv: *const hattn_tensor,
    /// The attention sinks, read: `[heads_q]`, of the type in the problem's sinks. Given exactly if that is not 0.
    pub sinks: *const hattn_tensor,
    /// The ALiBi slopes, read: HATTN_F32 `[heads_q]` or `[batch, heads_q]`, of any sign. Given exactly as the problem's alibi says.
    pub alibi_slopes: *const hattn_tensor,
    /// The largest score of each query head, written: HATTN_F32 `[heads_q]`. -inf where a head has no kept key. A NaN does not count.
    /// Given exactly if the problem's max_logits is 1.
    pub max_logits: *const hattn_tensor,
    /// The lists of blocks, read: hattn_block_mask says what they are. Given exactly if the problem's block_mask is not 0, and
    /// the last two exactly if it has HATTN_BLOCK_MASK_FULL_BLOCKS.
    pub mask_block_cnt: *const hattn_tensor,
    pub mask_block_idx: *const hattn_tensor,
    pub mask_bits: *const hattn_tensor,
    pub full_block_cnt: *const hattn_tensor,
    pub full_block_idx: *const hattn_tensor,
    /// The additive bias, read: [B, H, Q, K] as the problem's bias_dims, bias_queries and bias_keys say. Given exactly if there is one.
    pub bias: *const hattn_tensor,
    /// Seed and offset of dropout, read: HATTN_I32 `[4]`, the words of two 64-bit numbers, low ones first. Given exactly if the problem's
    /// dropout is not 0. A backward pass reads those of the forward pass. A run on a GPU takes host memory, too, and reads it at once.
    pub dropout_state: *const hattn_tensor,
}

impl hattn_forward_args {
    /// The tensors, each with the operand that it is.
    pub(crate) fn tensors(&self) -> impl IntoIterator<Item = (Slot, *const hattn_tensor)> {
        [
            (Slot::Q, self.q),
            (Slot::K, self.k),
            (Slot::V, self.v),
            (Slot::O, self.o),
            (Slot::Lse, self.lse),
            (Slot::DescaleQ, self.descale_q),
            (Slot::DescaleK, self.descale_k),
            (Slot::DescaleV, self.descale_v),
            (Slot::ScaleO, self.scale_o),
            (Slot::Amax, self.amax),
            (Slot::CuSeqlensQ, self.cu_seqlens_q),
            (Slot::CuSeqlensKv, self.cu_seqlens_kv),
            (Slot::SequsedQ, self.seqused_q),
            (Slot::SequsedKv, self.seqused_kv),
            (Slot::Sinks, self.sinks),
            (Slot::AlibiSlopes, self.alibi_slopes),
            (Slot::MaxLogits, self.max_logits),
            (Slot::MaskBlockCnt, self.mask_block_cnt),
            (Slot::MaskBlockIdx, self.mask_block_idx),
            (Slot::MaskBits, self.mask_bits),
            (Slot::FullBlockCnt, self.full_block_cnt),
            (Slot::FullBlockIdx, self.full_block_idx),
            (Slot::Bias, self.bias),
            (Slot::DropoutState, self.dropout_state),
        ]
    }
}

/// What a backward pass reads and writes. Begin with HATTN_BACKWARD_ARGS_INIT.
#[repr(C)]
#[allow(missing_docs, reason = "the fields of hattn_forward_args are explained there")]
#[derive(Clone, Copy, Debug)]
pub struct hattn_backward_args {
    pub struct_size: u32,
    pub abi_version: u32,
    pub q: *const hattn_tensor,
    pub k: *const hattn_tensor,
    pub v: *const hattn_tensor,
    /// The output of the forward pass, read.
    pub o: *const hattn_tensor,
    /// The log-sum-exp of the forward pass, read: HATTN_F32 [batch, heads_q, seqlen_q].
    /// A query whose log-sum-exp is -inf has gradient 0 and adds nothing to any other gradient.
    pub lse: *const hattn_tensor,
    /// The gradient of the output, read.
    pub d_o: *const hattn_tensor,
    /// The gradient of the log-sum-exp, read: HATTN_F32 [batch, heads_q, seqlen_q].
    /// Given exactly if the problem's d_lse is 1, otherwise null.
    pub d_lse: *const hattn_tensor,
    /// The gradients of queries, keys and values, overwritten. d_k and d_v are sums over the query heads that read a KV head.
    pub d_q: *const hattn_tensor,
    pub d_k: *const hattn_tensor,
    pub d_v: *const hattn_tensor,
    /// Scratch memory on the plan's device, aligned to 16 bytes. Null if the plan needs none. One for each run at a time.
    pub workspace: *mut c_void,
    /// Size of the workspace in bytes: at least what hattn_backward_plan_workspace_size gives.
    pub workspace_bytes: usize,
    /// These four are as in hattn_forward_args.
    pub cu_seqlens_q: *const hattn_tensor,
    pub cu_seqlens_kv: *const hattn_tensor,
    pub seqused_q: *const hattn_tensor,
    pub seqused_kv: *const hattn_tensor,
    /// The attention sinks, and their gradient, overwritten: HATTN_F32 `[heads_q]`. Given exactly if the problem's d_sinks is 1.
    pub sinks: *const hattn_tensor,
    pub d_sinks: *const hattn_tensor,
    /// The ALiBi slopes and the lists of blocks are those of the forward pass, as in hattn_forward_args.
    pub alibi_slopes: *const hattn_tensor,
    pub mask_block_cnt: *const hattn_tensor,
    pub mask_block_idx: *const hattn_tensor,
    pub mask_bits: *const hattn_tensor,
    pub full_block_cnt: *const hattn_tensor,
    pub full_block_idx: *const hattn_tensor,
    /// The additive bias, as in hattn_forward_args, and its gradient, overwritten: given exactly if the problem's d_bias is 1.
    pub bias: *const hattn_tensor,
    pub dbias: *const hattn_tensor,
    pub dropout_state: *const hattn_tensor,
}

impl hattn_backward_args {
    /// The tensors, each with the operand that it is.
    pub(crate) fn tensors(&self) -> impl IntoIterator<Item = (Slot, *const hattn_tensor)> {
        [
            (Slot::Q, self.q),
            (Slot::K, self.k),
            (Slot::V, self.v),
            (Slot::O, self.o),
            (Slot::Lse, self.lse),
            (Slot::DO, self.d_o),
            (Slot::DLse, self.d_lse),
            (Slot::DQ, self.d_q),
            (Slot::DK, self.d_k),
            (Slot::DV, self.d_v),
            (Slot::CuSeqlensQ, self.cu_seqlens_q),
            (Slot::CuSeqlensKv, self.cu_seqlens_kv),
            (Slot::SequsedQ, self.seqused_q),
            (Slot::SequsedKv, self.seqused_kv),
            (Slot::Sinks, self.sinks),
            (Slot::DSinks, self.d_sinks),
            (Slot::AlibiSlopes, self.alibi_slopes),
            (Slot::MaskBlockCnt, self.mask_block_cnt),
            (Slot::MaskBlockIdx, self.mask_block_idx),
            (Slot::MaskBits, self.mask_bits),
            (Slot::FullBlockCnt, self.full_block_cnt),
            (Slot::FullBlockIdx, self.full_block_idx),
            (Slot::Bias, self.bias),
            (Slot::DBias, self.dbias),
            (Slot::DropoutState, self.dropout_state),
        ]
    }
}

/// One tensor to quantise. Begin with HATTN_QUANTIZE_TENSOR_INIT.
#[repr(C)]
#[allow(missing_docs, reason = "size and version are explained in hattn_forward_problem")]
#[derive(Clone, Copy, Debug)]
pub struct hattn_quantize_tensor {
    pub struct_size: u32,
    pub abi_version: u32,
    /// What is quantised, read. The element type is the problem's source, the shape that of Q, K or V.
    pub values: *const hattn_tensor,
    /// What it is quantised to, written: HATTN_E4M3, the same shape.
    pub stored: *const hattn_tensor,
    /// The descale factors: HATTN_F32. hattn_scaling says which shape.
    pub descale: *const hattn_tensor,
    /// 1: the factors are read. They are finite and above 0, which only the CPU checks.
    /// 0: the factors are made of the largest magnitudes, and written.
    pub given: i32,
    /// Must be 0.
    pub reserved: u32,
}

/// What a quantiser reads and writes. Begin with HATTN_QUANTIZE_ARGS_INIT.
#[repr(C)]
#[allow(missing_docs, reason = "the fields of hattn_forward_args are explained there")]
#[derive(Clone, Copy, Debug)]
pub struct hattn_quantize_args {
    pub struct_size: u32,
    pub abi_version: u32,
    /// Queries, keys and values. Null for each that is not quantised.
    pub q: *const hattn_quantize_tensor,
    pub k: *const hattn_quantize_tensor,
    pub v: *const hattn_quantize_tensor,
    /// Two numbers for each of q, k and v, written: HATTN_F32 [3, 2]. Null if they are not wanted.
    /// The first counts the elements that were stored as 448 (or 14) because they were too large.
    /// The second counts the elements that were not finite.
    pub counts: *const hattn_tensor,
    /// Scratch memory on the plan's device, aligned to 16 bytes. Null if the plan needs none. One for each run at a time.
    pub workspace: *mut c_void,
    /// Size of the workspace in bytes: at least what hattn_quantize_plan_workspace_size gives.
    pub workspace_bytes: usize,
    /// These four are as in hattn_forward_args.
    /// Given if the forward problem has them, and a tensor of that side is quantised.
    pub cu_seqlens_q: *const hattn_tensor,
    pub cu_seqlens_kv: *const hattn_tensor,
    pub seqused_q: *const hattn_tensor,
    pub seqused_kv: *const hattn_tensor,
}

layouts! {
    hattn_forward_problem: 104 to 224 bytes {
        struct_size 0, abi_version 4, dtype 8, mask 12, corner 16, lse 20,
        batch 24, seqlen_q 32, seqlen_kv 40, heads_q 48, heads_kv 56, head_dim_qk 64, head_dim_vo 72,
        window_left 80, window_right 88, softmax_scale 96, arch 100,
        output 104, scaling 108, amax 112, half_scores 116,
        sm_margin 120, fill_gaps 124,
        cu_seqlens_q 128, cu_seqlens_kv 132, seqused_q 136, seqused_kv 140, max_seqlen_q 144, max_seqlen_kv 152,
        sinks 160, softcap 164, alibi 168, max_logits 172,
        block_mask 176, block_mask_most_partial 180, bias 184, bias_dims 188, dropout 192, reserved 196,
        bias_queries 200, bias_keys 208, workspace_limit 216,
    }
    hattn_backward_problem: 104 to 216 bytes {
        struct_size 0, abi_version 4, dtype 8, mask 12, corner 16, d_lse 20,
        batch 24, seqlen_q 32, seqlen_kv 40, heads_q 48, heads_kv 56, head_dim_qk 64, head_dim_vo 72,
        window_left 80, window_right 88, softmax_scale 96, deterministic 100,
        arch 104, sm_margin 108,
        cu_seqlens_q 112, cu_seqlens_kv 116, seqused_q 120, seqused_kv 124, max_seqlen_q 128, max_seqlen_kv 136,
        fill_gaps 144, softcap 148, sinks 152, d_sinks 156, alibi 160, d_bias 164,
        block_mask 168, block_mask_most_partial 172, bias 176, bias_dims 180, dropout 184, reserved 188,
        bias_queries 192, bias_keys 200, workspace_limit 208,
    }
    hattn_quantize_problem: 32 to 32 bytes {
        struct_size 0, abi_version 4, forward 8, source 16, hadamard 20, seed 24,
    }
    hattn_tensor: 96 to 96 bytes {
        struct_size 0, abi_version 4, data 8, dtype 16, device 20, ndim 24, reserved 28, shape 32, stride 64,
    }
    hattn_forward_args: 64 to 216 bytes {
        struct_size 0, abi_version 4, q 8, k 16, v 24, o 32, lse 40, workspace 48, workspace_bytes 56,
        descale_q 64, descale_k 72, descale_v 80, scale_o 88, amax 96,
        cu_seqlens_q 104, cu_seqlens_kv 112, seqused_q 120, seqused_kv 128, sinks 136,
        alibi_slopes 144, max_logits 152, mask_block_cnt 160, mask_block_idx 168, mask_bits 176,
        full_block_cnt 184, full_block_idx 192, bias 200, dropout_state 208,
    }
    hattn_backward_args: 104 to 224 bytes {
        struct_size 0, abi_version 4, q 8, k 16, v 24, o 32, lse 40, d_o 48, d_lse 56, d_q 64, d_k 72, d_v 80,
        workspace 88, workspace_bytes 96,
        cu_seqlens_q 104, cu_seqlens_kv 112, seqused_q 120, seqused_kv 128, sinks 136, d_sinks 144,
        alibi_slopes 152, mask_block_cnt 160, mask_block_idx 168, mask_bits 176,
        full_block_cnt 184, full_block_idx 192, bias 200, dbias 208, dropout_state 216,
    }
    hattn_quantize_tensor: 40 to 40 bytes {
        struct_size 0, abi_version 4, values 8, stored 16, descale 24, given 32, reserved 36,
    }
    hattn_quantize_args: 56 to 88 bytes {
        struct_size 0, abi_version 4, q 8, k 16, v 24, counts 32, workspace 40, workspace_bytes 48,
        cu_seqlens_q 56, cu_seqlens_kv 64, seqused_q 72, seqused_kv 80,
    }
    hattn_slices: 56 to 56 bytes {
        struct_size 0, abi_version 4, seqlen_q 8, seqlen_kv 16, count 24, q_ranges 32, k_ranges 40, types 48,
    }
    hattn_documents: 48 to 48 bytes {
        struct_size 0, abi_version 4, batch 8, seqlen_q 16, seqlen_kv 24, q_ids 32, kv_ids 40,
    }
    hattn_prefixes: 64 to 64 bytes {
        struct_size 0, abi_version 4, batch 8, seqlen_q 16, seqlen_kv 24, prefixes 32,
        mask 40, corner 44, window_left 48, window_right 56,
    }
    hattn_spans: 96 to 96 bytes {
        struct_size 0, abi_version 4, batch 8, seqlen_q 16, seqlen_kv 24, counts 32, spans 40,
        mask 48, corner 52, window_left 56, window_right 64,
        within 72, within_corner 76, within_left 80, within_right 88,
    }
    hattn_dense_mask: 48 to 48 bytes {
        struct_size 0, abi_version 4, batch 8, heads_q 16, seqlen_q 24, seqlen_kv 32, kept 40,
    }
    hattn_block_arrays: 144 to 144 bytes {
        struct_size 0, abi_version 4, block_mask 8, block_mask_most_partial 12, shape 16, bits_shape 48,
        mask_block_cnt 80, mask_block_idx 88, mask_bits 96, full_block_cnt 104, full_block_idx 112,
        cnt_elements 120, idx_elements 128, bits_elements 136,
    }
}

#[cfg(test)]
mod tests;
