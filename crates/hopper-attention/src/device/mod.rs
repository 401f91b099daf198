//! Where problems are computed: devices and streams.

#[cfg(feature = "cuda")]
mod cuda;

use std::fmt;

use crate::arch::DeviceInfo;
use crate::error::Result;

#[cfg(feature = "cuda")]
pub use cuda::CudaDevice;
#[cfg(feature = "cuda")]
pub(crate) use cuda::{OthersError, alloc_zeros, driver, is_captured, same_context, upload};

/// A device that plans are made for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Device {
    /// The cores of this machine. This device always exists.
    Cpu,
    /// A GPU.
    #[cfg(feature = "cuda")]
    Cuda(CudaDevice),
}

impl Device {
    /// The cores of this machine.
    pub const fn cpu() -> Self {
        Self::Cpu
    }

    /// The GPU with this ordinal: its number in the driver's order, from 0.
    ///
    /// The call opens the GPU's primary context. PyTorch and candle use the same context.
    ///
    /// # Errors
    /// - [`Error::NoDevice`](crate::Error::NoDevice) when this build is without the feature `cuda`, or when the machine has
    ///   no driver or no such GPU.
    /// - [`Error::Driver`](crate::Error::Driver) when the GPU cannot be opened.
    pub fn cuda(ordinal: usize) -> Result<Self> {
        #[cfg(feature = "cuda")]
        return CudaDevice::open(ordinal).map(Self::Cuda);
        #[cfg(not(feature = "cuda"))]
        Err(without_cuda(ordinal))
    }

    /// As [`cuda`](Self::cuda), but the GPU is opened once and kept until the process ends.
    ///
    /// Every caller gets the same context object. So a plan of one caller accepts tensors and streams of another.
    ///
    /// # Errors
    /// As [`cuda`](Self::cuda).
    pub fn shared_cuda(ordinal: usize) -> Result<Self> {
        #[cfg(feature = "cuda")]
        return CudaDevice::shared(ordinal).map(Self::Cuda);
        #[cfg(not(feature = "cuda"))]
        Err(without_cuda(ordinal))
    }

    /// The GPUs of this machine, by ordinal. The list includes GPUs that no kernel of this build runs on.
    ///
    /// The list is empty without a GPU, without a driver, or without the feature `cuda`. The error of [`Device::cuda`] says
    /// which of these is the case. This function opens no context.
    pub fn available() -> Vec<DeviceInfo> {
        #[cfg(feature = "cuda")]
        return cuda::devices();
        #[cfg(not(feature = "cuda"))]
        Vec::new()
    }

    /// The properties of the GPU. `None` for the CPU.
    pub fn info(&self) -> Option<&DeviceInfo> {
        match self {
            Self::Cpu => None,
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => Some(device.info()),
        }
    }

    /// The stream that always exists: [`Stream::Cpu`] on the CPU, the default stream on a GPU.
    pub fn default_stream(&self) -> Stream {
        match self {
            Self::Cpu => Stream::Cpu,
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => Stream::Cuda(device.context().default_stream()),
        }
    }

    /// A new stream. On a GPU its work runs beside the work of other streams. On the CPU it is [`Stream::Cpu`].
    ///
    /// Once a context has such a stream, cudarc records an event for every use of memory. This takes a few microseconds a
    /// launch.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) when the driver cannot make a stream.
    pub fn new_stream(&self) -> Result<Stream> {
        match self {
            Self::Cpu => Ok(Stream::Cpu),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => cuda::new_stream(device.context()).map(Stream::Cuda),
        }
    }
}

/// The error for a GPU that was asked for in a build without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
fn without_cuda(ordinal: usize) -> crate::error::Error {
    crate::error::Error::NoDevice {
        wanted: format!("cuda:{ordinal}"),
        found: "this build is without CUDA".into(),
        source: None,
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => write!(f, "{device}"),
        }
    }
}

/// A queue of work. On the CPU, work is done when the call returns. A stream on a GPU does its work in order, later.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Stream {
    /// The cores of this machine. Each call finishes its work before it returns.
    Cpu,
    /// A CUDA stream.
    #[cfg(feature = "cuda")]
    Cuda(std::sync::Arc<cudarc::driver::CudaStream>),
}

impl Stream {
    /// Waits until all enqueued work is done.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) when that work failed.
    pub fn synchronize(&self) -> Result<()> {
        match self {
            Self::Cpu => Ok(()),
            #[cfg(feature = "cuda")]
            Self::Cuda(stream) => cuda::synchronize(stream),
        }
    }
}

#[cfg(feature = "cuda")]
impl From<std::sync::Arc<cudarc::driver::CudaStream>> for Stream {
    fn from(stream: std::sync::Arc<cudarc::driver::CudaStream>) -> Self {
        Self::Cuda(stream)
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            #[cfg(feature = "cuda")]
            Self::Cuda(stream) => write!(f, "cuda:{}", stream.context().ordinal()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_has_an_error_and_no_panic() {
        let count = Device::available().len();
        let error = Device::cuda(count).unwrap_err();
        assert!(matches!(error, crate::Error::NoDevice { .. }), "{error}");
        assert!(error.to_string().starts_with(&format!("no device: cuda:{count}; ")), "{error}");
    }

    #[test]
    fn the_cpu_is_always_there() {
        let device = Device::cpu();
        assert_eq!((device.to_string(), device.info().is_none()), ("cpu".into(), true));
        device.new_stream().unwrap().synchronize().unwrap();
    }
}
