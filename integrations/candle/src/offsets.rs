//! Where packed sequences begin: candle's u32 tensors as offsets of ours.

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::{DType, Device, Result, Storage, Tensor};
use hopper_attention::{Args, Error, SequenceOffsets, Slot, Stream};
#[cfg(feature = "cuda")]
use hopper_attention::{Layout, TensorRef};

use crate::error::refusal;

/// The offsets of one side, on the device of its tensors.
pub enum Offsets {
    /// Offsets that were in host memory. They were checked.
    Checked(SequenceOffsets),
    /// A copy of offsets that were in GPU memory. Nobody looks at them on the host.
    #[cfg(feature = "cuda")]
    Unchecked(CudaSlice<i32>),
}

impl Offsets {
    /// Takes a tensor `[batch + 1]` of u32, for operands on `device`.
    pub fn new(name: &'static str, seqlens: &Tensor, device: &Device) -> Result<Self> {
        let refuse =
            |got: String, allowed: &str| Err(refusal(Error::Value { what: name, got, allowed: allowed.into() }));
        if seqlens.dtype() != DType::U32 || seqlens.dims().len() != 1 || seqlens.elem_count() == 0 {
            return refuse(
                format!("{:?} {:?}", seqlens.dtype(), seqlens.dims()).to_lowercase(),
                "u32 [batch + 1], one element or more",
            );
        }
        let seqlens = seqlens.contiguous()?;
        let (storage, layout) = seqlens.storage_and_layout();
        let rows = layout.start_offset()..layout.start_offset() + seqlens.elem_count();
        let stream = match device {
            Device::Cpu => Stream::Cpu,
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Stream::Cuda(device.cuda_stream()),
            _ => return refuse("on a device that is not taken".into(), "the CPU or a CUDA GPU"),
        };
        match &*storage {
            Storage::Cpu(memory) => {
                let numbers = memory.as_slice::<u32>()?[rows].iter();
                let numbers = numbers.map(|&offset| i32::try_from(offset).map_err(|_| offset));
                match numbers.collect::<std::result::Result<Vec<_>, _>>() {
                    Ok(numbers) => Ok(Self::Checked(SequenceOffsets::new(&stream, &numbers).map_err(refusal)?)),
                    Err(offset) => refuse(offset.to_string(), "below 2^31"),
                }
            }
            #[cfg(feature = "cuda")]
            Storage::Cuda(memory) if device.is_cuda() => {
                let (view, count) = (memory.as_cuda_slice::<u32>()?.slice(rows), seqlens.elem_count());
                // SAFETY: a u32 and an i32 have the same size, and every bit pattern is an i32. An offset of 2^31 or more
                // becomes one below 0. Either is outside of every tensor.
                let view = unsafe { view.transmute::<i32>(count) };
                // A copy: the caller may write to the tensor before the gradients are computed.
                let copy = memory.device.cuda_stream().clone_dtod(&view.expect("as many bytes"));
                Ok(Self::Unchecked(copy.map_err(candle_core::Error::wrap)?))
            }
            _ => refuse("on another device".into(), "the device of q, k and v, or the CPU"),
        }
    }

    /// The number of sequences.
    pub fn sequences(&self) -> usize {
        match self {
            Self::Checked(offsets) => offsets.sequences(),
            #[cfg(feature = "cuda")]
            Self::Unchecked(offsets) => offsets.len() - 1,
        }
    }

    /// Adds the offsets to the arguments of a run.
    pub fn lend<'a>(&'a self, args: Args<'a>, slot: Slot) -> Result<Args<'a>> {
        Ok(match self {
            Self::Checked(offsets) => args.offsets(slot, offsets),
            #[cfg(feature = "cuda")]
            Self::Unchecked(offsets) => {
                let layout = Layout::contiguous([offsets.len()]).map_err(refusal)?;
                let numbers = TensorRef::cuda(offsets.as_view(), layout).map_err(refusal)?;
                // SAFETY: the numbers do not change, since nobody else has this copy. That they are offsets of the tensors
                // is the caller's to see to, as `attention_varlen` says. The kernels clamp others: results are then wrong,
                // and no memory outside of the tensors is used.
                unsafe { args.lengths_unchecked(slot, numbers) }
            }
        })
    }
}

/// The offsets of both sides of a call.
pub struct Packing {
    /// Of Q and O.
    pub q: Offsets,
    /// Of K and V.
    pub kv: Offsets,
}

impl Packing {
    /// Adds all offsets to the arguments of a run.
    pub fn lend<'a>(packing: Option<&'a Self>, args: Args<'a>) -> Result<Args<'a>> {
        match packing {
            None => Ok(args),
            Some(Self { q, kv }) => kv.lend(q.lend(args, Slot::CuSeqlensQ)?, Slot::CuSeqlensKv),
        }
    }
}
