//! Where a problem is computed: devices, what plans need to know of them, and streams.

use std::fmt;

use crate::Result;
#[cfg(feature = "cuda")]
use crate::cuda::CudaDevice;

/// A device that plans are made for.
#[derive(Clone, Debug)]
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
    #[cfg(feature = "cuda")]
    pub fn cuda(ordinal: usize) -> Result<Self> {
        CudaDevice::open(ordinal).map(Self::Cuda)
    }

    /// The GPU with this ordinal, in the driver's order; opens its primary context, which PyTorch and candle share.
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) when this build has no GPU side, the machine has no driver or no
    /// such GPU; [`Error::Driver`](crate::Error::Driver) when the GPU cannot be opened.
    #[cfg(not(feature = "cuda"))]
    pub fn cuda(ordinal: usize) -> Result<Self> {
        Err(crate::Error::NoDevice {
            wanted: format!("cuda:{ordinal}"),
            found: "this build is without the feature `cuda`".into(),
        })
    }

    /// The GPUs of this machine, by ordinal, whether or not there is a kernel for them. Empty without a GPU, without a
    /// driver and without the feature `cuda`; [`Device::cuda`] says which. Opens no context.
    pub fn available() -> Vec<DeviceInfo> {
        #[cfg(feature = "cuda")]
        return crate::cuda::devices();
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
            Self::Cuda(device) => {
                device.context().new_stream().map(Stream::Cuda).map_err(crate::cuda::driver("making a stream"))
            }
        }
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
            Self::Cuda(stream) => stream.synchronize().map_err(crate::cuda::driver("waiting for a stream")),
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

/// A GPU's compute capability, printed as `sm_90`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComputeCapability {
    /// 9 for Hopper.
    pub major: u32,
    /// 0 for Hopper.
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.major, self.minor)
    }
}

/// All that a plan takes into account of a GPU. The same facts give the same plan, with or without a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceFacts {
    /// The compute capability, which decides the kernels that run.
    pub arch: ComputeCapability,
    /// Streaming multiprocessors.
    pub multiprocessors: usize,
    /// Second-level cache, in bytes.
    pub l2_bytes: usize,
    /// The most shared memory a block may ask for, in bytes.
    pub smem_bytes_per_block: usize,
}

impl DeviceFacts {
    /// An H100 SXM: 132 multiprocessors, 50 MiB of second-level cache, 227 KiB of shared memory a block.
    pub const fn h100_sxm() -> Self {
        Self {
            arch: ComputeCapability { major: 9, minor: 0 },
            multiprocessors: 132,
            l2_bytes: 50 << 20,
            smem_bytes_per_block: 227 << 10,
        }
    }
}

impl fmt::Display for DeviceFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { arch, multiprocessors, l2_bytes, smem_bytes_per_block } = self;
        let (l2, smem) = (l2_bytes >> 20, smem_bytes_per_block >> 10);
        write!(f, "{arch}, {multiprocessors} multiprocessors, {l2} MiB L2, {smem} KiB shared memory a block")
    }
}

/// A GPU of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// What [`Device::cuda`] takes.
    pub ordinal: usize,
    /// The driver's name for it.
    pub name: String,
    /// What plans take into account.
    pub facts: DeviceFacts,
    /// Device memory, in bytes.
    pub memory_bytes: usize,
    /// The newest CUDA version that the driver supports: major, minor.
    pub driver: (u32, u32),
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ordinal, name, facts, memory_bytes, driver: (major, minor) } = self;
        write!(f, "cuda:{ordinal} {name}: {facts}, {} MiB, driver for CUDA {major}.{minor}", memory_bytes >> 20)
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

    #[test]
    fn facts_print_themselves() {
        let text = "sm_90, 132 multiprocessors, 50 MiB L2, 227 KiB shared memory a block";
        assert_eq!(DeviceFacts::h100_sxm().to_string(), text);
    }
}
