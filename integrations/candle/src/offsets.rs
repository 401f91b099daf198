//! Where packed sequences begin: candle's u32 tensors as offsets of ours.

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::{DType, Device, Result, Storage, Tensor};
use hopper_attention::{Args, Error, SequenceOffsets, Slot, Stream, UsedLengths};
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

/// How many rows of each sequence of padded queries are used, on the device of the tensors.
pub enum Lengths {
    /// Lengths of offsets that were in host memory. They were checked.
    Checked(UsedLengths),
    /// Lengths of offsets that were in GPU memory.
    #[cfg(feature = "cuda")]
    Unchecked(CudaSlice<i32>),
}

/// Whole numbers of a tensor, where the tensor has them.
enum Numbers {
    /// In host memory, for work on the stream.
    Host(Stream, Vec<i32>),
    /// A copy in GPU memory.
    #[cfg(feature = "cuda")]
    Gpu(CudaSlice<i32>),
}

impl Numbers {
    /// Takes a tensor `[batch + 1]` of u32, for operands on `device`.
    fn new(name: &'static str, seqlens: &Tensor, device: &Device) -> Result<Self> {
        if seqlens.dtype() != DType::U32 || seqlens.dims().len() != 1 || seqlens.elem_count() == 0 {
            let got = format!("{:?} {:?}", seqlens.dtype(), seqlens.dims()).to_lowercase();
            return refuse(name, got, "u32 [batch + 1], one element or more");
        }
        let seqlens = seqlens.contiguous()?;
        let (storage, layout) = seqlens.storage_and_layout();
        let rows = layout.start_offset()..layout.start_offset() + seqlens.elem_count();
        let stream = match device {
            Device::Cpu => Stream::Cpu,
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Stream::Cuda(device.cuda_stream()),
            _ => return refuse(name, "on a device that is not taken".into(), "the CPU or a CUDA GPU"),
        };
        match &*storage {
            Storage::Cpu(memory) => {
                let numbers = memory.as_slice::<u32>()?[rows].iter();
                let numbers = numbers.map(|&offset| i32::try_from(offset).map_err(|_| offset));
                match numbers.collect::<std::result::Result<Vec<_>, _>>() {
                    Ok(numbers) => Ok(Self::Host(stream, numbers)),
                    Err(offset) => refuse(name, offset.to_string(), "below 2^31"),
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
                Ok(Self::Gpu(copy.map_err(candle_core::Error::wrap)?))
            }
            _ => refuse(name, "on another device".into(), "the device of q, k and v, or the CPU"),
        }
    }
}

fn refuse<T>(what: &'static str, got: String, allowed: &str) -> Result<T> {
    Err(refusal(Error::Value { what, got, allowed: allowed.into() }))
}

impl Offsets {
    /// Takes a tensor `[batch + 1]` of u32, for operands on `device`.
    pub fn new(name: &'static str, seqlens: &Tensor, device: &Device) -> Result<Self> {
        Ok(match Numbers::new(name, seqlens, device)? {
            Numbers::Host(stream, numbers) => Self::Checked(SequenceOffsets::new(&stream, &numbers).map_err(refusal)?),
            #[cfg(feature = "cuda")]
            Numbers::Gpu(numbers) => Self::Unchecked(numbers),
        })
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
    fn lend<'a>(&'a self, args: Args<'a>, slot: Slot) -> Result<Args<'a>> {
        match self {
            Self::Checked(offsets) => Ok(args.offsets(slot, offsets)),
            #[cfg(feature = "cuda")]
            Self::Unchecked(offsets) => unchecked(offsets, args, slot),
        }
    }
}

impl Lengths {
    /// Takes the distances of a tensor `[batch + 1]` of u32, for padded queries on `device`: one or more sequences of at most
    /// `rows` rows.
    pub fn new(name: &'static str, seqlens: &Tensor, rows: usize, device: &Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if seqlens.device().is_cuda() && seqlens.dtype() == DType::U32 && seqlens.elem_count() > 1 {
            let sequences = seqlens.dim(0)? - 1;
            let lengths = (seqlens.narrow(0, 1, sequences)? - seqlens.narrow(0, 0, sequences)?)?;
            if let Numbers::Gpu(lengths) = Numbers::new(name, &lengths, device)? {
                return Ok(Self::Unchecked(lengths));
            }
        }
        match Numbers::new(name, seqlens, device)? {
            Numbers::Host(stream, numbers) => {
                let mut lengths = Vec::with_capacity(numbers.len() - 1);
                for pair in numbers.windows(2) {
                    match usize::try_from(pair[1] - pair[0]) {
                        Ok(length) if length <= rows => lengths.push(pair[1] - pair[0]),
                        _ => {
                            let got = format!("{} after {}", pair[1], pair[0]);
                            return refuse(name, got, &format!("from 0 to {rows} (the rows of q) more"));
                        }
                    }
                }
                Ok(Self::Checked(UsedLengths::new(&stream, &lengths).map_err(refusal)?))
            }
            #[cfg(feature = "cuda")]
            Numbers::Gpu(_) => refuse(name, "one element".into(), "an element more than sequences"),
        }
    }

    fn lend<'a>(&'a self, args: Args<'a>) -> Result<Args<'a>> {
        match self {
            Self::Checked(lengths) => Ok(args.used(Slot::SequsedQ, lengths)),
            #[cfg(feature = "cuda")]
            Self::Unchecked(lengths) => unchecked(lengths, args, Slot::SequsedQ),
        }
    }
}

#[cfg(feature = "cuda")]
fn unchecked<'a>(numbers: &'a CudaSlice<i32>, args: Args<'a>, slot: Slot) -> Result<Args<'a>> {
    let layout = Layout::contiguous([numbers.len()]).map_err(refusal)?;
    let numbers = TensorRef::cuda(numbers.as_view(), layout).map_err(refusal)?;
    // SAFETY: the numbers do not change, since nobody else has this copy. That they are offsets or lengths of the tensors
    // is the caller's to see to, as `attention_varlen` says. The kernels clamp others: results are then wrong, and no
    // memory outside of the tensors is used.
    Ok(unsafe { args.lengths_unchecked(slot, numbers) })
}

/// Which rows of Q and O are those of a sequence.
pub enum Queries {
    /// Sequences follow each other without padding.
    Packed(Offsets),
    /// Each sequence has the first rows of an entry of the batch.
    Padded(Lengths),
}

/// Where the sequences of both sides of a call are. K and V are packed.
pub struct Packing {
    /// Of Q and O.
    pub q: Queries,
    /// Of K and V.
    pub kv: Offsets,
}

impl Packing {
    /// The number of sequences: that of Q where Q is packed. The operands' checks compare the other side.
    pub fn sequences(&self) -> usize {
        match &self.q {
            Queries::Packed(offsets) => offsets.sequences(),
            Queries::Padded(_) => self.kv.sequences(),
        }
    }

    /// Adds all offsets and lengths to the arguments of a run.
    pub fn lend<'a>(packing: Option<&'a Self>, args: Args<'a>) -> Result<Args<'a>> {
        let Some(Self { q, kv }) = packing else { return Ok(args) };
        let args = match q {
            Queries::Packed(offsets) => offsets.lend(args, Slot::CuSeqlensQ)?,
            Queries::Padded(lengths) => lengths.lend(args)?,
        };
        kv.lend(args, Slot::CuSeqlensKv)
    }
}

/// Whether Q, and K with V, have no dimension `batch`.
pub fn is_packed(packing: Option<&Packing>) -> [bool; 2] {
    [matches!(packing, Some(Packing { q: Queries::Packed(_), .. })), packing.is_some()]
}
