//! Where a problem is computed: devices and streams.

#[cfg(feature = "cuda")]
mod cuda;

use std::fmt;

use crate::arch::DeviceInfo;
use crate::error::Result;

#[cfg(feature = "cuda")]
pub use cuda::CudaDevice;
#[cfg(feature = "cuda")]
pub(crate) use cuda::{driver, refuse_capture, same_context};

/// A device that plans are made for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Device {
    /// The cores of this machine. Always there.
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

    /// The GPU with this ordinal, in the driver's order; opens its primary context, which PyTorch and candle share.
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) when this build has no GPU side, the machine has no driver or no
    /// such GPU; [`Error::Driver`](crate::Error::Driver) when the GPU cannot be opened.
    pub fn cuda(ordinal: usize) -> Result<Self> {
        #[cfg(feature = "cuda")]
        return CudaDevice::open(ordinal).map(Self::Cuda);
        #[cfg(not(feature = "cuda"))]
        Err(without_cuda(ordinal))
    }

    /// As [`cuda`](Self::cuda), but opened once and kept for the life of the process: every caller gets the same context
    /// object, so that tensors and streams of one caller may be used with plans of another.
    ///
    /// # Errors
    /// As [`cuda`](Self::cuda).
    pub fn shared_cuda(ordinal: usize) -> Result<Self> {
        #[cfg(feature = "cuda")]
        return CudaDevice::shared(ordinal).map(Self::Cuda);
        #[cfg(not(feature = "cuda"))]
        Err(without_cuda(ordinal))
    }

    /// The GPUs of this machine, by ordinal, whether or not there is a kernel for them. Empty without a GPU, without a
    /// driver and without the feature `cuda`; [`Device::cuda`] says which. Opens no context.
    pub fn available() -> Vec<DeviceInfo> {
        #[cfg(feature = "cuda")]
        return cuda::devices();
        #[cfg(not(feature = "cuda"))]
        Vec::new()
    }

    /// What is known of the GPU; `None` for the CPU.
    pub fn info(&self) -> Option<&DeviceInfo> {
        match self {
            Self::Cpu => None,
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => Some(device.info()),
        }
    }

    /// The stream that needs no making: synchronous on the CPU, the default stream of a GPU.
    pub fn default_stream(&self) -> Stream {
        match self {
            Self::Cpu => Stream::Cpu,
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => Stream::Cuda(device.context().default_stream()),
        }
    }

    /// A new stream, on a GPU one that runs beside the others. From the first one on, cudarc records events around every
    /// use of memory, which costs a few microseconds a launch.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) when the driver cannot make one.
    pub fn new_stream(&self) -> Result<Stream> {
        match self {
            Self::Cpu => Ok(Stream::Cpu),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => device.context().new_stream().map(Stream::Cuda).map_err(driver("making a stream")),
        }
    }
}

/// Why there is no GPU in a build for the CPU alone.
#[cfg(not(feature = "cuda"))]
fn without_cuda(ordinal: usize) -> crate::error::Error {
    crate::error::Error::NoDevice {
        wanted: format!("cuda:{ordinal}"),
        found: "this build is without the feature `cuda`".into(),
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

/// The order in which work is done. Work on the CPU is done when the call returns; a GPU's stream takes it in order.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Stream {
    /// Synchronous, on the cores of this machine.
    Cpu,
    /// A CUDA stream.
    #[cfg(feature = "cuda")]
    Cuda(std::sync::Arc<cudarc::driver::CudaStream>),
}

impl Stream {
    /// Waits until all that was enqueued is done.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) with whatever went wrong in that work.
    pub fn synchronize(&self) -> Result<()> {
        match self {
            Self::Cpu => Ok(()),
            #[cfg(feature = "cuda")]
            Self::Cuda(stream) => stream.synchronize().map_err(driver("waiting for a stream")),
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
