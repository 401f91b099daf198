//! What a run is given by address.

use std::fmt;

use crate::dtype::DType;
use crate::layout::{DynLayout, Layout};
use crate::operand::{Slot, SlotMap};

/// Where an address leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Place {
    /// Memory that the cores of this machine read.
    Cpu,
    /// Memory that the GPU with this ordinal reads.
    Cuda(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// A tensor by the address of its first element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawTensor {
    pub(crate) address: u64,
    pub(crate) dtype: DType,
    pub(crate) place: Place,
    pub(crate) layout: DynLayout,
}

impl RawTensor {
    /// The tensor whose first element is at `address`, which may be anything where there is no element. The dimensions of
    /// `layout` are in the order that the operand's [`axes`](Slot::axes) give.
    pub fn new<const R: usize>(address: u64, dtype: DType, place: Place, layout: Layout<R>) -> Self {
        Self { address, dtype, place, layout: layout.into() }
    }
}

/// What a run reads and writes, by address: tensors by the names of their operands, and scratch memory.
///
/// ```
/// use hopper_attention::raw::{Place, RawArgs, RawTensor};
/// use hopper_attention::{DType, Layout, Slot};
/// # fn main() -> hopper_attention::Result<()> {
/// let q = RawTensor::new(0x1000, DType::BF16, Place::Cuda(0), Layout::contiguous([1, 128, 8, 64])?);
/// let args = RawArgs::new().with(Slot::Q, q).with_workspace(0x8000, 4);
/// assert_eq!(args.get(Slot::Q), Some(&q));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RawArgs {
    pub(crate) tensors: SlotMap<RawTensor>,
    pub(crate) workspace: RawWorkspace,
}

/// Scratch memory by address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RawWorkspace {
    pub address: u64,
    pub bytes: usize,
}

impl RawArgs {
    /// Without any tensor.
    pub fn new() -> Self {
        Self::default()
    }

    /// With a tensor as this operand, in place of one that was given before.
    #[must_use]
    pub fn with(mut self, slot: Slot, tensor: RawTensor) -> Self {
        self.tensors.set(slot, tensor);
        self
    }

    /// Without the tensor that was given as this operand.
    #[must_use]
    pub fn without(mut self, slot: Slot) -> Self {
        self.tensors.remove(slot);
        self
    }

    /// With scratch memory where the plan is: the address of its first byte (of 16-byte alignment on a GPU; 0 where the plan
    /// needs none), and at least the plan's `workspace_bytes()`.
    #[must_use]
    pub fn with_workspace(mut self, address: u64, bytes: usize) -> Self {
        self.workspace = RawWorkspace { address, bytes };
        self
    }

    /// The tensor that was given as an operand.
    pub fn get(&self, slot: Slot) -> Option<&RawTensor> {
        self.tensors.get(slot)
    }
}
