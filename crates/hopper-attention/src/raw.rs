//! The unsafe layer: runs that take addresses in place of borrowed tensors.
//!
//! It is for C, for programs that manage their own memory, and for programs with another version of cudarc. No type of
//! cudarc appears here.
//!
//! Problems and plans are those of the safe layer. Types, shapes, strides, alignment, places and sizes are checked against
//! the problem before anything is launched. The memory behind an address cannot be checked. The caller promises that the
//! memory is valid.
//!
//! An example with another version of cudarc. Its `CudaContext::new` retains the same primary context as
//! [`Device::cuda`](crate::Device::cuda):
//!
//! ```
//! use hopper_attention::raw::{Place, RawArgs, RawTensor};
//! use hopper_attention::{DType, ForwardPlan, Layout, Result, Slot};
//!
//! /// The addresses of four tensors and of the workspace are from the other cudarc's `device_ptr(&stream).0`. The guards
//! /// live until this function returns. `stream` is from `stream.cu_stream().cast()`.
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
