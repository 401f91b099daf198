//! The arguments of a run by address: [`RawArgs`].

use std::fmt;

use crate::dtype::DType;
use crate::layout::{DynLayout, Layout};
use crate::operand::{Slot, SlotMap};

/// The memory that an address belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Place {
    /// Memory that the cores of this machine can access.
    Cpu,
    /// Memory that the GPU with this ordinal can access.
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

/// A tensor, given by the address of its first element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawTensor {
    pub(crate) address: u64,
    pub(crate) dtype: DType,
    pub(crate) place: Place,
    pub(crate) layout: DynLayout,
}

impl RawTensor {
    /// The tensor whose first element is at `address`.
    ///
    /// The dimensions of `layout` are in the order that [`Slot::axes`] gives. A tensor without elements may have any address.
    ///
    /// The address of memory of this program is `pointer as u64`, or `pointer.expose_provenance() as u64`. For an output the
    /// pointer must be one that may be written through, such as one from `as_mut_ptr`. The number that `pointer.addr()` gives
    /// is not enough, because a run on the CPU makes a pointer of the address again.
    pub fn new<const R: usize>(address: u64, dtype: DType, place: Place, layout: Layout<R>) -> Self {
        Self { address, dtype, place, layout: layout.into() }
    }
}

/// The arguments of a run by address: a tensor for each operand, and scratch memory (the workspace).
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

/// Scratch memory, given by its address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RawWorkspace {
    pub address: u64,
    pub bytes: usize,
}

impl RawArgs {
    /// Arguments without any tensor.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the tensor for an operand. It replaces an earlier tensor for the same operand.
    #[must_use]
    pub fn with(mut self, slot: Slot, tensor: RawTensor) -> Self {
        self.tensors.set(slot, tensor);
        self
    }

    /// Removes the tensor for an operand.
    #[must_use]
    pub fn without(mut self, slot: Slot) -> Self {
        self.tensors.remove(slot);
        self
    }

    /// Sets the scratch memory, which must be on the plan's device.
    ///
    /// - `address`: the first byte. On a GPU it is a multiple of 16. It may be 0 where the plan needs no workspace.
    /// - `bytes`: the size, at least the plan's `workspace_bytes()`.
    #[must_use]
    pub fn with_workspace(mut self, address: u64, bytes: usize) -> Self {
        self.workspace = RawWorkspace { address, bytes };
        self
    }

    /// The tensor for an operand. `None` where none was given.
    pub fn get(&self, slot: Slot) -> Option<&RawTensor> {
        self.tensors.get(slot)
    }
}
