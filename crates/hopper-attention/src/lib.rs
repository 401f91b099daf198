//! Exact fused attention for NVIDIA Hopper, with a CPU backend: `O = softmax(mask(softmax_scale * Q K^T)) V` and its
//! gradients, without ever holding the `seqlen_q x seqlen_kv` matrix. Every combination of arguments either computes what
//! it says or is refused, by name, before anything is launched.
//!
//! ```
//! use hopper_attention::*;
//!
//! # fn main() -> Result<()> {
//! let dims = Dims::new(1, 4, 2, 8).with_seqlen_kv(6).with_heads_kv(1); // one sequence of 4 queries and 6 keys
//! let problem = ForwardProblem::builder(DType::BF16, dims).mask(Mask::causal()).lse(true).build()?;
//! let device = Device::cpu(); // or Device::cuda(0)?
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
//! # The way through the crate
//!
//! A [`ForwardProblem`] is what to compute: numbers, checked when it is made. A [`ForwardPlan`] is how a device computes
//! it: a pure function of the problem and the device's facts, which prints itself. [`TensorRef`] and [`TensorMut`] are
//! borrowed memory, on the host or on a GPU, with a [`Layout`] checked against it. [`ForwardPlan::run`] brings them
//! together. [`BackwardProblem`], [`BackwardPlan`] and [`BackwardArgs`] do the same for the gradients. [`raw`] takes
//! addresses instead of tensors; [`reference`](mod@reference) is the f64 oracle that all results are held against. The
//! feature `cuda` adds the GPU kernels and re-exports the `cudarc` whose types appear in this API; without it no C++
//! compiler is needed and everything runs on the CPU.
//!
//! # Semantics
//!
//! - A tensor's logical order is `[batch, seqlen, heads, head_dim]`; how it lies in memory is its strides, counted in
//!   elements. The innermost stride is 1.
//! - Query head `h` reads key head `h / (heads_q / heads_kv)`.
//! - Causal masks and windows are aligned to the bottom-right corner unless [`Corner::TopLeft`] is asked for.
//! - The log-sum-exp of a row is `ln(sum(exp(softmax_scale * q . k)))` over the keys that the mask keeps: natural log,
//!   f32, `[batch, heads_q, seqlen_q]`.
//! - A row that keeps no key has output 0 and log-sum-exp -inf, and no part in any gradient. Sequences may be empty.
//! - Products of 16-bit inputs and the softmax are accumulated in f32; the output has the type of the input.
//! - The same inputs, plan and device give the same bits; for gradients on a GPU, where a problem asks for it with
//!   [`deterministic(true)`](BackwardProblemBuilder::deterministic).
//!
//! # Gradients
//!
//! From the forward pass a backward pass needs O and the LSE. With `P = exp(softmax_scale * Q K^T - LSE)` where the mask
//! keeps a pair, 0 elsewhere, and gradients `dO` and (where it is given, else 0) `dLSE` of a loss,
//!
//! ```text
//! delta = rowsum(dO * O) - dLSE        dQ = softmax_scale * dS K
//! dS = P * (dO V^T - delta)            dK = softmax_scale * dS^T Q        dV = P^T dO
//! ```
//!
//! where dK and dV are summed over the query heads that read a key head. Products and sums are accumulated in f32;
//! gradients have the type of the inputs.
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
//! // Keys are alike, so every weight is a quarter, O is 2 and the LSE ln(4).
//! let (q, k, v, o, lse) = ([1.0; 4], [0.0; 4], [2.0; 4], [2.0; 4], [4f32.ln(); 4]);
//! let d_o = [1.0; 4];
//! let (mut d_q, mut d_k, mut d_v) = ([f32::NAN; 4], [f32::NAN; 4], [f32::NAN; 4]);
//! let (of_q, of_kv) = (Layout::contiguous(forward.q_shape())?, Layout::contiguous(forward.k_shape())?);
//! let args = BackwardArgs::new(
//!     [TensorRef::host(&q, of_q)?, TensorRef::host(&k, of_kv)?, TensorRef::host(&v, of_kv)?],
//!     TensorRef::host(&o, of_q)?,
//!     TensorRef::host(&lse, Layout::contiguous(forward.lse_shape())?)?,
//!     TensorRef::host(&d_o, of_q)?,
//!     [TensorMut::host(&mut d_q, of_q)?, TensorMut::host(&mut d_k, of_kv)?, TensorMut::host(&mut d_v, of_kv)?],
//! );
//! plan.run(&stream, &mut workspace, args)?;
//! assert_eq!((d_q, d_k), ([0.0; 4], [0.0; 4])); // the mean of equal values stays what it is
//! assert!(d_v.iter().all(|d_v| (d_v - 1.0).abs() < 1e-6)); // four rows, a quarter of each
//! # Ok(()) }
//! ```
//!
//! # FP8
//!
//! [`E4M3`] operands come with f32 factors: a real value of Q, K or V is what is stored times its descale factor, shared per
//! tensor, per head or per block of 128 rows as the problem's [`Scaling`] says. The output is bf16, f16, or e4m3 after a
//! factor of its own. A [`Quantizer`] makes its operands, the same bytes on the CPU and on a GPU. Products of stored values
//! are summed in f32 (on a GPU as its
//! tensor cores do it, who cut such sums off at some 13 bits) and P is rounded to e4m3. GPU kernels take head dims that are
//! multiples of 16. There is no backward pass.
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
//! Rows are computed block by block of keys with the online softmax of Milakov and Gimelshein, *Online normalizer
//! calculation for softmax* (2018): a running maximum and a running sum, rescaled when the maximum grows. Tiling, the
//! normalisation at the end and the log-sum-exp as the only thing kept of a row are those of Dao, *FlashAttention-2:
//! Faster Attention with Better Parallelism and Work Partitioning* (2023). The Hopper kernels map that onto TMA and
//! WGMMA in the way of Shah et al., *FlashAttention-3* (2024). The backward pass, which computes P again from the
//! log-sum-exp, is that of *FlashAttention-2*, section 3.1.2; that `rowsum(dO * O)` is the `rowsum(P * dP)` of the softmax's
//! derivative is from Dao et al., *FlashAttention* (2022), appendix B. The LSE's derivative with respect to a score is P,
//! so its gradient joins delta. Factors per block and the rotation of Q and K by random signs and a Hadamard transform before
//! they are quantised are those of *FlashAttention-3*, section 3.3.
//!
//! # Errors
//!
//! Every fallible function returns [`Error`]: what was wrong, what it was, and what is allowed. [`Error::Unsupported`]
//! is a legal problem without a kernel, so that a caller may compute it elsewhere; there is no silent fallback. The
//! library does not panic, print or exit, and a machine without a GPU or a driver gets [`Error::NoDevice`].
//!
//! # Soundness: a kernel outlives the borrows it was given
//!
//! On a GPU [`ForwardPlan::run`] returns before the kernel has run. What the safe API guarantees all the same, and how:
//!
//! - *Memory is not freed early, nor used while the kernel uses it.* Every pointer is taken through cudarc's
//!   `device_ptr` or `device_ptr_mut` on the launch's stream, which waits for earlier uses on other streams, and all the
//!   guards live until after the launch, where they record this use. Freeing memory and using it again are themselves
//!   stream operations that wait for what was recorded. Nothing depends on a destructor that a caller could leak.
//! - *Memory is not exceeded.* A layout is checked against its memory where the tensor is made and cannot be changed
//!   afterwards; what is written must not overlap itself, and is borrowed exclusively.
//! - *The right GPU is used.* Stream, tensors, workspace and plan are compared before the launch; tensors and stream must
//!   come from one `CudaContext` object, since it is what counts streams and decides whether to record events.
//! - *A launch allocates nothing, loads nothing and waits for nothing on the host*, so that it can be captured in a
//!   graph. While cudarc is managing events for several streams a capture is refused with [`Error::Capture`]: waits
//!   and records would become part of the graph, or refer to work outside of it.
//!
//! The guarantee rests on cudarc (0.19), and stops where cudarc's own does:
//!
//! - after `unsafe CudaContext::disable_event_tracking`, with borrowed streams and raw views, and in [`raw`]: the
//!   caller orders uses;
//! - a graph replays addresses: whoever launches it keeps the captured buffers alive, which cudarc does not check;
//! - the per-thread default stream is another stream on every thread while it compares equal;
//! - events are kept only while streams made with `new_stream` exist: keep the stream of a launch alive until it is done;
//! - a buffer remembers its latest reader only: order readers on several streams before writing or freeing it.

#![deny(missing_docs)]

// In the order in which they depend on each other: a module uses those above it alone (tests/tests/dependencies.rs).
mod arch;
mod cpu;
mod device;
mod dtype;
mod error;
mod launch;
mod layout;
mod mask;
mod operand;
mod plan;
mod problem;
pub mod raw;
pub mod reference;
mod run;
mod scaling;
#[cfg(feature = "cuda")]
mod sys;
mod table;
mod tensor;
mod workspace;

#[cfg(feature = "cuda")]
pub use cudarc;

pub use arch::{Arch, ComputeCapability, DeviceFacts, DeviceInfo, MaskClass, Pass};
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
    BackwardProblem, BackwardProblemBuilder, Dims, ForwardProblem, ForwardProblemBuilder, Quantizer, QuantizerBuilder,
};
pub use run::{Args, BackwardArgs, Descale, ForwardArgs, QuantizeArgs};
pub use scaling::{SCALE_BLOCK, Scaling};
pub use table::{KernelInfo, backward_kernels, kernels, support_table};
pub use tensor::{TensorMut, TensorRef};
pub use workspace::Workspace;

/// What the tests, benches and tools of this repository look at. No part of the public API: it changes without notice.
#[doc(hidden)]
pub mod internal {
    pub use crate::plan::{BackwardChoice, Choice, Fallback, candidates, mask_class, select, select_backward};

    /// How a plan's kernel is scheduled; `None` on the CPU.
    pub fn choice(plan: &crate::ForwardPlan) -> Option<&Choice> {
        plan.choice()
    }

    /// How a backward plan's kernel is scheduled; `None` on the CPU.
    pub fn backward_choice(plan: &crate::BackwardPlan) -> Option<&BackwardChoice> {
        plan.choice()
    }
}

/// The README's example is compiled and run with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
