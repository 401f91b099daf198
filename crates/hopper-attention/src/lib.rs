//! Exact fused attention for NVIDIA Hopper, with a CPU backend.

#![deny(missing_docs)]

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod dtype;
mod error;
mod forward;
mod kernels;
mod layout;
mod mask;
pub mod plan;
mod problem;
pub mod raw;
pub mod reference;
#[cfg(feature = "cuda")]
mod sys;
mod tensor;
mod workspace;

#[cfg(feature = "cuda")]
pub use cudarc;

#[cfg(feature = "cuda")]
pub use cuda::CudaDevice;
pub use device::{ComputeCapability, Device, DeviceFacts, DeviceInfo, Stream};
pub use dtype::{DType, Element, Operand, bf16, f16};
pub use error::{Error, Result};
pub use forward::ForwardArgs;
pub use kernels::{Arch, KernelInfo, MaskClass, kernels, support_table};
pub use layout::Layout;
pub use mask::{Band, Corner, Mask};
pub use plan::ForwardPlan;
pub use problem::{Dims, ForwardProblem};
pub use tensor::{TensorMut, TensorRef};
pub use workspace::Workspace;
