//! What plans and the table of kernels say about a GPU and about the kind of a kernel.

use std::fmt;

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

/// Everything about a GPU that a plan depends on. The same facts give the same plan, with or without a GPU.
///
/// To plan for a GPU that this machine does not have, take known facts such as [`h100_sxm`](Self::h100_sxm) and set fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct DeviceFacts {
    /// The compute capability. It decides which kernels run.
    pub arch: ComputeCapability,
    /// Number of streaming multiprocessors.
    pub multiprocessors: usize,
    /// Size of the second-level cache, in bytes.
    pub l2_bytes: usize,
    /// The most shared memory that a CTA (CUDA thread block) may ask for, in bytes.
    pub smem_bytes_per_block: usize,
}

impl DeviceFacts {
    /// An H100 SXM: 132 multiprocessors, 50 MiB of second-level cache, 227 KiB of shared memory for a CTA.
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
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The GPU's number in the driver's order, from 0. [`Device::cuda`](crate::Device::cuda) takes it.
    pub ordinal: usize,
    /// The name that the driver gives the GPU.
    pub name: String,
    /// The facts that plans depend on.
    pub facts: DeviceFacts,
    /// Size of the device memory, in bytes.
    pub memory_bytes: usize,
    /// The newest CUDA version that the driver supports: (major, minor).
    pub driver: (u32, u32),
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ordinal, name, facts, memory_bytes, driver: (major, minor) } = self;
        write!(f, "cuda:{ordinal} {name}: {facts}, {} MiB, driver for CUDA {major}.{minor}", memory_bytes >> 20)
    }
}

/// The instruction set that a kernel is written for. A plan takes the newest one that the GPU runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Arch {
    /// Compute capability 8.0 and later. A build may have machine code for capabilities from 8.0 to 9.0. Elsewhere the driver
    /// compiles the kernel from PTX when a plan loads it.
    Sm80,
    /// Compute capability 9.0 (sm_90a) only.
    Sm90,
}

impl Arch {
    /// Whether kernels of this instruction set run on a GPU.
    pub fn runs_on(self, gpu: ComputeCapability) -> bool {
        match self {
            Self::Sm80 => gpu.major >= 8,
            Self::Sm90 => (gpu.major, gpu.minor) == (9, 0),
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Sm80 => "sm80",
            Self::Sm90 => "sm90",
        })
    }
}

/// Which problems a kernel computes: those whose scores are `softmax_scale * Q K^T` and no more, or those with modified
/// scores (a softcap, ALiBi), or whose largest score is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(any(test, feature = "cuda")), allow(dead_code, reason = "there are no kernels"))]
pub(crate) enum Modifiers {
    /// Those without modifiers.
    Never,
    /// All.
    Either,
    /// Those with one modifier or more.
    Always,
}

/// Which masks a kernel computes. The class is compiled into the kernel; the bounds of the mask are run-time values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MaskClass {
    /// Masks that keep every key.
    Full,
    /// Masks that keep the keys up to a diagonal, anywhere.
    Causal,
    /// Masks that keep a band of keys around a diagonal.
    Window,
}

impl fmt::Display for MaskClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Full => "full",
            Self::Causal => "causal",
            Self::Window => "window",
        })
    }
}

/// What a kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pass {
    /// O and the log-sum-exp.
    Forward,
    /// The gradients of Q, K and V.
    Backward,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Forward => "fwd",
            Self::Backward => "bwd",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_print_themselves() {
        let text = "sm_90, 132 multiprocessors, 50 MiB L2, 227 KiB shared memory a block";
        assert_eq!(DeviceFacts::h100_sxm().to_string(), text);
    }
}
