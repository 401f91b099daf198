//! Exact fused attention for NVIDIA Hopper GPUs, with a CPU backend.
//!
//! The crate computes `O = softmax(mask(softmax_scale * Q K^T)) V` and the gradients of Q, K and V. It never holds the
//! `seqlen_q x seqlen_kv` matrix of scores in memory. A call either computes what its arguments say, or is refused before
//! anything is launched, with an error that says why.
//!
//! ```
//! use hopper_attention::*;
//!
//! # fn main() -> Result<()> {
//! let dims = Dims::new(1, 4, 2, 8).with_seqlen_kv(6).with_heads_kv(1); // one sequence of 4 queries and 6 keys
//! let problem = ForwardProblem::builder(DType::BF16, dims).mask(Mask::causal()).lse(true).build()?;
//! let device = Device::cpu();
//! let plan = problem.plan(&device)?; // once for many runs
//! let stream = device.default_stream();
//! let mut workspace = Workspace::alloc(&stream, plan.workspace_bytes())?;
//!
//! let (q, k, v) = (vec![bf16::ONE; 64], vec![bf16::ONE; 48], vec![bf16::from_f32(0.5); 48]);
//! let (mut o, mut lse) = (vec![bf16::ZERO; 64], vec![0.0; 8]);
//! let args = ForwardArgs::new(
//!     TensorRef::host(&q, Layout::contiguous(problem.q_shape())?)?,
//!     TensorRef::host(&k, Layout::contiguous(problem.k_shape())?)?,
//!     TensorRef::host(&v, Layout::contiguous(problem.v_shape())?)?,
//!     TensorMut::host(&mut o, Layout::contiguous(problem.o_shape())?)?,
//! );
//! let args = args.lse(TensorMut::host(&mut lse, Layout::contiguous(problem.lse_shape())?)?);
//! plan.run(&stream, &mut workspace, args)?;
//! assert!(o.iter().all(|x| x.to_f32() == 0.5)); // the mean of equal values
//! # Ok(()) }
//! ```
//!
//! On a GPU the device is `Device::cuda(0)?`, or a `CudaDevice`. `TensorRef::cuda` and `TensorMut::cuda` then make the tensors
//! from the GPU's memory. The README has that program.
//!
//! # The main types
//!
//! 1. A [`ForwardProblem`] says what to compute. It holds numbers only. Its builder checks them.
//! 2. A [`ForwardPlan`] says how one device computes a problem. The same problem and GPU model give the same plan, unless
//!    a [`Tuning`] is used. A plan can be printed.
//! 3. A [`TensorRef`] or [`TensorMut`] borrows memory on the host or on a GPU. Its [`Layout`] (shape and strides) is
//!    checked against that memory.
//! 4. A [`Workspace`] is scratch memory that the caller owns. The plan says how large it must be.
//! 5. [`ForwardPlan::run`] takes a [`Stream`], a workspace and [`ForwardArgs`] (the tensors), and computes.
//!
//! The gradients have the same steps: [`BackwardProblem`], [`BackwardPlan`], [`BackwardArgs`]. So has quantising to FP8:
//! [`Quantizer`], [`QuantizePlan`], [`QuantizeArgs`].
//!
//! [`raw`] takes addresses in place of tensors. [`reference`](mod@reference) has the oracle: a plain computation in f64.
//! Results are compared with it.
//!
//! The feature `cuda` adds the GPU kernels. It also re-exports `cudarc`, whose types appear in this API. Run
//! `scripts/bootstrap.sh` once before a build with `cuda`: it fetches what Cargo does not, the CUDA toolkit and CUTLASS.
//! Without `cuda` the crate needs no C++ compiler, and everything runs on the CPU.
//!
//! # Which device
//!
//! | function | when |
//! | --- | --- |
//! | [`Device::cpu`] | the CPU |
//! | [`Device::cuda`] | a GPU. Compiles in every build: without the feature it returns [`Error::NoDevice`] |
//! | `CudaDevice::open` | the same as a `CudaDevice`, whose `context()` makes cudarc's streams and buffers |
//! | `CudaDevice::from_context` | your program already has a cudarc context. Tensors, streams and plan must share that object |
//! | [`Device::shared_cuda`] | independent parts of one program: all get the same context object, kept until the process ends |
//!
//! # Semantics
//!
//! - The logical order of a tensor's dimensions is `[batch, seqlen, heads, head_dim]`. Strides say how the tensor lies in
//!   memory. They count elements. The innermost stride is 1.
//! - Query head `h` reads KV head `h / (heads_q / heads_kv)`.
//! - Masks are bottom-right aligned: with a causal mask, query `i` sees keys up to
//!   `i + seqlen_kv - seqlen_q`. With [`Corner::TopLeft`] it sees keys up to `i`.
//! - The log-sum-exp (LSE) of a query is `ln(sum(exp(softmax_scale * q . k)))` over the keys that the mask keeps. It uses
//!   the natural logarithm and is f32, `[batch, heads_q, seqlen_q]`.
//! - Options of the problem change the scores: a [`softcap`](ForwardProblemBuilder::softcap), an additive
//!   [`bias`](ForwardProblemBuilder::bias), linear biases ([`alibi`](ForwardProblemBuilder::alibi)).
//!   [`sinks`](ForwardProblemBuilder::sinks) are added to the softmax. [`dropout`](ForwardProblemBuilder::dropout) makes weights
//!   0 after it. The LSE and the gradients are those of the changed scores, and of the softmax with sinks. The LSE is that
//!   without dropout.
//! - A [`block_mask`](ForwardProblemBuilder::block_mask) keeps only the pairs that its lists of blocks keep.
//!   [`max_logits`](ForwardProblemBuilder::max_logits) asks for the largest score of each query head.
//! - Sequences may be [`packed`](ForwardProblemBuilder::packed) into one tensor. Each attends to its own keys alone.
//! - A query that keeps no key has output 0 and LSE -inf. It has no part in any gradient. Sequences may be empty.
//! - A pair of a query and a key that the mask hides has no effect on any result, whatever the two rows hold: NaN and
//!   infinity, too.
//! - For f16, bf16 and f32 inputs, products and the softmax are accumulated in f32. The output has the type of the inputs.
//!   Where a score or a sum does not fit f32, the result is infinite, NaN or 0: see `docs/numerics.md`.
//! - The same inputs, plan and device give the same bits. Gradients on a GPU do so only if the problem asks for it with
//!   [`deterministic(true)`](BackwardProblemBuilder::deterministic).
//!
//! # Gradients
//!
//! A backward pass needs O and the LSE of the forward pass. `dO` is the gradient of a loss with respect to O. `dLSE` is the
//! gradient with respect to the LSE, or 0 where none is given. `P`, the softmax probabilities, is
//! `exp(softmax_scale * Q K^T - LSE)` for each query and each key that it keeps, and 0 for all other pairs. (With a softcap,
//! biases, sinks or dropout: `docs/numerics.md` has the formulas.) Then
//!
//! ```text
//! delta = rowsum(dO * O) - dLSE        dQ = softmax_scale * dS K
//! dS = P * (dO V^T - delta)            dK = softmax_scale * dS^T Q        dV = P^T dO
//! ```
//!
//! dK and dV are summed over the query heads that read the KV head. Products and sums are accumulated in f32. Gradients
//! have the type of the inputs.
//!
//! ```
//! use hopper_attention::*;
//!
//! # fn main() -> Result<()> {
//! let dims = Dims::new(1, 2, 2, 1).with_seqlen_kv(4).with_heads_kv(1);
//! let forward = ForwardProblem::builder(DType::F32, dims).build()?;
//! let problem = BackwardProblem::builder(&forward).deterministic(true).build()?;
//! let device = Device::cpu();
//! let plan = problem.plan(&device)?; // on a GPU: bf16 or f16
//! let stream = device.default_stream();
//! let mut workspace = Workspace::alloc(&stream, plan.workspace_bytes())?;
//!
//! // Keys are alike, so every probability is a quarter, O is 2 and the LSE ln(4).
//! let (q, k, v, o, lse) = ([1.0; 4], [0.0; 4], [2.0; 4], [2.0; 4], [4f32.ln(); 4]);
//! let d_o = [1.0; 4];
//! let (mut d_q, mut d_k, mut d_v) = ([f32::NAN; 4], [f32::NAN; 4], [f32::NAN; 4]);
//! let (q_layout, kv_layout) = (Layout::contiguous(forward.q_shape())?, Layout::contiguous(forward.k_shape())?);
//! let args = BackwardArgs::new(
//!     [TensorRef::host(&q, q_layout)?, TensorRef::host(&k, kv_layout)?, TensorRef::host(&v, kv_layout)?],
//!     TensorRef::host(&o, q_layout)?,
//!     TensorRef::host(&lse, Layout::contiguous(forward.lse_shape())?)?,
//!     TensorRef::host(&d_o, q_layout)?,
//!     [TensorMut::host(&mut d_q, q_layout)?, TensorMut::host(&mut d_k, kv_layout)?, TensorMut::host(&mut d_v, kv_layout)?],
//! );
//! plan.run(&stream, &mut workspace, args)?;
//! assert_eq!((d_q, d_k), ([0.0; 4], [0.0; 4])); // the mean of equal values stays what it is
//! assert!(d_v.iter().all(|d_v| (d_v - 1.0).abs() < 1e-6)); // four rows, a quarter of each
//! # Ok(()) }
//! ```
//!
//! # FP8
//!
//! Q, K and V may be [`E4M3`], an 8-bit float. Each then comes with f32 descale factors: a real value is the stored value
//! times its descale factor. The problem's [`Scaling`] says which elements share a factor: a whole tensor, a head, or a
//! block of 128 rows of a head.
//!
//! - The output is bf16, f16 or e4m3. An e4m3 output is O times a factor that the caller gives
//!   ([`scale_o`](ForwardArgs::scale_o)), rounded.
//! - A [`Quantizer`] makes e4m3 tensors from wider ones. It gives the same bytes on the CPU and on a GPU.
//! - The CPU sums products of stored values in f32. The tensor cores of a GPU keep only about 13 bits of such a sum.
//! - F16 score accumulation: a GPU sums scores in f16, which is faster, if the problem allows it
//!   ([`half_scores`](ForwardProblemBuilder::half_scores)).
//! - The softmax probabilities (P) are rounded to e4m3 before they are multiplied with V.
//! - GPU kernels take head dims that are multiples of 16. The CPU takes any.
//! - There is no backward pass.
//!
//! ```
//! use hopper_attention::*;
//!
//! # fn main() -> Result<()> {
//! let dims = Dims::new(1, 2, 2, 1).with_seqlen_kv(4).with_heads_kv(1);
//! let problem = ForwardProblem::builder(DType::E4M3, dims).scaling(Scaling::PerHead).build()?; // bf16 out
//! let plan = problem.plan(&Device::cpu())?;
//! let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
//!
//! // Keys are alike, so O is the mean of the values, 2 stored times a half.
//! let (q, k, v) = ([E4M3::ONE; 4], [E4M3::ONE; 4], [E4M3::from_f32(2.0); 4]);
//! let mut o = [bf16::ZERO; 4];
//! let args = ForwardArgs::new(
//!     TensorRef::host(&q, Layout::contiguous(problem.q_shape())?)?,
//!     TensorRef::host(&k, Layout::contiguous(problem.k_shape())?)?,
//!     TensorRef::host(&v, Layout::contiguous(problem.v_shape())?)?,
//!     TensorMut::host(&mut o, Layout::contiguous(problem.o_shape())?)?,
//! );
//! let args = args.descale(
//!     TensorRef::host(&[1.0], Layout::contiguous(problem.descale_q_shape())?)?,
//!     TensorRef::host(&[1.0], Layout::contiguous(problem.descale_k_shape())?)?,
//!     TensorRef::host(&[0.5], Layout::contiguous(problem.descale_v_shape())?)?,
//! );
//! plan.run(&Stream::Cpu, &mut workspace, args)?;
//! assert_eq!(o, [bf16::ONE; 4]);
//! # Ok(()) }
//! ```
//!
//! # Sources
//!
//! - The online softmax is from Milakov and Gimelshein, *Online normalizer calculation for softmax* (2018). Each query
//!   visits the keys block by block, with a running maximum and a running sum. Both are rescaled when the maximum grows.
//! - Three ideas are from Dao, *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning* (2023):
//!   the tiling, the division by the sum at the end, and the LSE as all that is kept of a query's scores. The backward
//!   pass computes P again from the LSE, as section 3.1.2 of that paper does.
//! - The Hopper kernels map these onto TMA and WGMMA in the way of Shah et al., *FlashAttention-3* (2024). Factors per
//!   block are from section 3.3 of that paper. So is the rotation of Q and K before they are quantised: random signs,
//!   then a Hadamard transform.
//! - The derivative of the softmax contains `rowsum(P * dP)`. Dao et al., *FlashAttention* (2022), appendix B, shows that it
//!   equals `rowsum(dO * O)`.
//! - The derivative of the LSE with respect to a score is P. So `dLSE` adds `P * dLSE` to dS, which is the same as to
//!   subtract `dLSE` within delta.
//!
//! # Errors
//!
//! Every fallible function returns [`Error`]: what was wrong, what it was, and what is allowed. [`Error::Unsupported`]
//! stands for a legal problem that no kernel here computes. A caller may then compute the problem elsewhere. The library
//! never falls back to another device by itself. It does not panic, print or exit. A machine without a GPU or a driver
//! gets [`Error::NoDevice`].
//!
//! # Lifetimes on a GPU
//!
//! On a GPU [`ForwardPlan::run`] returns before the kernel has run. Keep nothing alive by hand: cudarc orders frees after
//! the run. In these cases you order the uses of memory, and keep it alive:
//!
//! - after `unsafe CudaContext::disable_event_tracking`;
//! - with streams and views that borrow raw handles;
//! - in [`raw`];
//! - with a CUDA graph: keep the captured buffers alive while the graph runs.
//!
//! `docs/soundness.md` in the repository has the argument, and the gaps of cudarc that remain.

#![deny(missing_docs)]

// No two modules use each other, directly or through others (tests/tests/dependencies.rs).
mod arch;
mod block_lists;
mod blocks;
mod cpu;
mod device;
mod dtype;
mod error;
mod launch;
mod layout;
mod mask;
mod memory;
mod operand;
mod philox;
mod plan;
mod problem;
pub mod raw;
pub mod reference;
mod run;
mod scaling;
mod sequences;
#[cfg(feature = "cuda")]
mod sys;
mod table;
mod tensor;
mod workspace;

#[cfg(feature = "cuda")]
pub use cudarc;

pub use arch::{Arch, ComputeCapability, DeviceFacts, DeviceInfo, MaskClass, Pass};
pub use block_lists::{AttnSlice, OwnedBlockLists, SliceKind};
pub use blocks::BlockLists;
#[cfg(feature = "cuda")]
pub use device::CudaDevice;
pub use device::{Device, Stream};
pub use dtype::{DType, E4M3, E4M3_HALF_SCORES_MAX, E4M3_MAX, Element, Float, OutputOf, bf16, f16};
pub use error::{Error, ErrorSource, Result};
pub use layout::Layout;
pub use mask::{Band, Corner, Mask};
pub use operand::{Access, Operand, Operands, Presence, Slot};
pub use plan::{BackwardPlan, ForwardPlan, QuantizePlan, Tuning};
pub use problem::{
    AlibiSlopes, BackwardProblem, BackwardProblemBuilder, Bias, BlockMask, Dims, Dropout, ForwardProblem,
    ForwardProblemBuilder, MASK_BLOCK, MASK_BLOCK_WORDS, Quantizer, QuantizerBuilder, dropout_state,
};
pub use run::{Args, BackwardArgs, Descale, ForwardArgs, QuantizeArgs, SequenceOffsets, UsedLengths};
pub use scaling::{SCALE_BLOCK, Scaling};
pub use sequences::{Lengths, SequenceRows, clamp_sequences};
pub use table::{KernelInfo, backward_kernels, kernels, support_table};
pub use tensor::{TensorMut, TensorRef};
pub use workspace::Workspace;

/// What the tests, benches and tools of this repository need from inside. It is not part of the public API, and changes
/// without notice.
#[doc(hidden)]
pub mod internal {
    pub use crate::plan::{BackwardChoice, Bounds, Choice, Fallback, candidates, mask_class, select, select_backward};

    /// Whether a CTA of the kernel computes one tile and ends, however many there are.
    pub fn has_one_tile(row: &crate::KernelInfo) -> bool {
        row.has_one_tile()
    }

    /// As `plan_with_row`, with so many CTAs of a cluster that share a tile. More than the row allows are as many as it allows.
    ///
    /// # Errors
    /// As `plan_with_row`.
    #[cfg(feature = "cuda")]
    pub fn plan_with_shares(
        problem: &crate::ForwardProblem,
        device: &crate::CudaDevice,
        row: &crate::KernelInfo,
        shares: usize,
    ) -> crate::Result<crate::ForwardPlan> {
        problem.plan_with_shares(device, row, shares, 1)
    }

    /// The same with so many clusters that share a tile, at most 32. They have two CTAs or more where tiles have 128 queries. Where the
    /// row allows one cluster, it is one.
    ///
    /// # Errors
    /// As `plan_with_row`.
    #[cfg(feature = "cuda")]
    pub fn plan_with_splits(
        problem: &crate::ForwardProblem,
        device: &crate::CudaDevice,
        row: &crate::KernelInfo,
        shares: usize,
        splits: usize,
    ) -> crate::Result<crate::ForwardPlan> {
        problem.plan_with_shares(device, row, shares, splits)
    }

    /// As `plan_with_row`, with tiles that are cut into so many shares, which the CTAs of a cluster have or not. More than the
    /// row allows are as many as it allows. A deterministic pass has no clusters: there the plan chooses.
    ///
    /// # Errors
    /// As `plan_with_row`.
    #[cfg(feature = "cuda")]
    pub fn plan_backward_with_shares(
        problem: &crate::BackwardProblem,
        device: &crate::CudaDevice,
        row: &crate::KernelInfo,
        shares: usize,
        in_cluster: bool,
    ) -> crate::Result<crate::BackwardPlan> {
        problem.plan_with_shares(device, row, shares, in_cluster)
    }

    /// The same where only the last `last` tiles are cut. Not in a deterministic pass: there the plan chooses.
    ///
    /// # Errors
    /// As `plan_with_row`.
    #[cfg(feature = "cuda")]
    pub fn plan_backward_with_last_cut(
        problem: &crate::BackwardProblem,
        device: &crate::CudaDevice,
        row: &crate::KernelInfo,
        shares: usize,
        last: usize,
    ) -> crate::Result<crate::BackwardPlan> {
        problem.plan_with_last_cut(device, row, shares, last)
    }

    /// The kernel of a forward plan and the schedule of its tiles. `None` on the CPU.
    pub fn choice(plan: &crate::ForwardPlan) -> Option<&Choice> {
        plan.choice()
    }

    /// The kernel of a backward plan and the schedule of its tiles. `None` on the CPU.
    pub fn backward_choice(plan: &crate::BackwardPlan) -> Option<&BackwardChoice> {
        plan.choice()
    }
}

/// Makes the README's examples doc tests. One of them needs a GPU's types. The other one, which is also the example `cpu`, is
/// a doc test without the feature, too.
#[cfg(doctest)]
#[cfg_attr(feature = "cuda", doc = include_str!("../../../README.md"))]
#[cfg_attr(not(feature = "cuda"), doc = concat!("```\n", include_str!("../examples/cpu.rs"), "```\n"))]
struct Readme;
