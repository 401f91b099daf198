//! The unsafe layer: addresses instead of borrowed tensors, for C, for stacks with memory of their own, and for stacks on
//! another version of cudarc, none of whose types appears here.
//!
//! Problems and plans are the safe ones, and so is every check that numbers allow: types, shapes, strides, alignment,
//! places and sizes are compared with the problem before anything is launched. What an address leads to cannot be
//! checked; that is the caller's promise. With another cudarc, say, whose `CudaContext::new` retains the same primary
//! context as [`Device::cuda`](crate::Device::cuda) does:
//!
//! ```
//! use hopper_attention::raw::{Place, RawArgs, RawTensor};
//! use hopper_attention::{DType, ForwardPlan, Layout, Result, Slot};
//!
//! /// The four addresses and the workspace's, from `device_ptr(&stream).0` there, whose guards live until this returns;
//! /// `stream` from `stream.cu_stream().cast()`.
//! unsafe fn attention(plan: &ForwardPlan, [q, k, v, o, scratch]: [u64; 5], stream: *mut std::ffi::c_void) -> Result<()> {
//!     let problem = plan.problem();
//!     let tensor = |address, shape| {
//!         Ok(RawTensor::new(address, DType::BF16, Place::Cuda(0), Layout::contiguous(shape)?))
//!     };
//!     let args = RawArgs::new()
//!         .with(Slot::Q, tensor(q, problem.q_shape())?)
//!         .with(Slot::K, tensor(k, problem.k_shape())?)
//!         .with(Slot::V, tensor(v, problem.v_shape())?)
//!         .with(Slot::O, tensor(o, problem.o_shape())?)
//!         .with_workspace(scratch, plan.workspace_bytes());
//!     // SAFETY: the caller's promise.
//!     unsafe { plan.run_raw(&args, stream) }
//! }
//! ```

pub use crate::launch::{Place, RawArgs, RawTensor};
