//! Block-sparse masks: lists of blocks of candle's tensors, or of a mask of u8.

use std::fmt;
use std::sync::Arc;

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::{DType, Device, Result, Storage, Tensor};
use hopper_attention::{Args, BlockMask, Dims, Error, Layout, MASK_BLOCK_WORDS, OwnedBlockLists, Slot, TensorRef};

use crate::error::refusal;
use crate::offsets::Packing;

/// A block-sparse mask: which blocks of 128 keys each block of 128 queries attends to.
/// [`attention_with_blocks`](crate::attention_with_blocks) takes it. A clone shares the memory.
///
/// [`hopper_attention::BlockMask`] says what the lists are, which pairs they keep, and what wrong numbers in them do. The CPU
/// refuses those. A GPU leaves them out, and nobody looks at the lists on the host.
#[derive(Clone)]
pub struct BlockLists(Arc<Copies>);

struct Copies {
    /// `[B, H, Qb, Kb]`.
    shape: [usize; 4],
    mask: BlockMask,
    /// A copy of each list: slot, shape and numbers. The caller may write to the tensors before gradients are computed.
    lists: Vec<(Slot, Vec<usize>, Numbers)>,
}

/// Whole numbers, where the tensor has them.
enum Numbers {
    Host(Vec<i32>),
    #[cfg(feature = "cuda")]
    Gpu(CudaSlice<i32>),
}

impl BlockLists {
    /// Lists of partial blocks: the numbers of blocks `[B, H, Qb]`, the blocks `[B, H, Qb, Kb]`, and their bits
    /// `[B, H, Qb, 512 * most]`, all of i32 and on the device of Q, K and V.
    ///
    /// `B` is 1 or the batch, `H` is 1 or the number of query heads, `Qb` and `Kb` are the blocks of queries and of keys, and
    /// `most` is the largest number of partial blocks that a list has. The tensors are copied.
    ///
    /// # Errors
    /// A tensor is not of i32, or not on a device that is taken. The shapes do not fit each other.
    pub fn new(counts: &Tensor, indices: &Tensor, bits: &Tensor) -> Result<Self> {
        let slot = Slot::MaskBlockIdx;
        let shape: [usize; 4] = match indices.dims() {
            &[batch, heads, queries, keys] => [batch, heads, queries, keys],
            dims => {
                return refuse(slot, format!("{dims:?}"), "4 dimensions, [B, H, blocks of queries, blocks of keys]");
            }
        };
        let [batch, heads, queries, _] = shape;
        let words = bits.dims().last().copied().unwrap_or(0);
        let mask = BlockMask::new(words / MASK_BLOCK_WORDS).per_batch(batch != 1).per_head(heads != 1);
        let wanted = [batch, heads, queries, words / MASK_BLOCK_WORDS * MASK_BLOCK_WORDS];
        let lists = vec![
            list(Slot::MaskBlockCnt, counts, &shape[..3], indices)?,
            list(slot, indices, &shape, indices)?,
            list(Slot::MaskBits, bits, &wanted, indices)?,
        ];
        Ok(Self(Arc::new(Copies { shape, mask, lists })))
    }

    /// With lists of full blocks: their numbers `[B, H, Qb]`, and the blocks `[B, H, Qb, Kb]`.
    ///
    /// # Errors
    /// As [`new`](Self::new). Also: there are lists of full blocks already.
    pub fn with_full_blocks(self, counts: &Tensor, indices: &Tensor) -> Result<Self> {
        let Copies { shape, mask, .. } = *self.0;
        if mask.has_full_blocks() {
            return refuse(Slot::FullBlockIdx, "given twice".into(), "lists of full blocks once");
        }
        let mut lists = Vec::with_capacity(5);
        for (slot, shape, numbers) in &self.0.lists {
            lists.push((*slot, shape.clone(), numbers.copy()?));
        }
        lists.push(list(Slot::FullBlockCnt, counts, &shape[..3], counts)?);
        lists.push(list(Slot::FullBlockIdx, indices, &shape, counts)?);
        Ok(Self(Arc::new(Copies { shape, mask: mask.full_blocks(true), lists })))
    }

    /// The lists of a mask `[B, H, seqlen_q, seqlen_kv]` of u8: a pair is kept where it is not 0. `B` is 1 or the batch, and
    /// `H` is 1 or the number of query heads.
    ///
    /// The mask is read on the host: of one on a GPU this waits. So make the lists once for all layers and steps.
    ///
    /// # Errors
    /// The mask is not of u8, does not have four dimensions, or is not on a device that is taken.
    pub fn from_mask(mask: &Tensor) -> Result<Self> {
        let what = "mask";
        let &[batch, heads, rows, columns] = mask.dims() else {
            let got = format!("{:?}", mask.dims());
            let allowed = "4 dimensions, [1 or batch, 1 or heads_q, seqlen_q, seqlen_kv]".into();
            return Err(refusal(Error::Value { what, got, allowed }));
        };
        if mask.dtype() != DType::U8 {
            let (got, allowed) = (format!("dtype {:?}", mask.dtype()).to_lowercase(), "u8".into());
            return Err(refusal(Error::Value { what, got, allowed }));
        }
        let kept = mask.flatten_all()?.to_vec1::<u8>()?;
        // Head dims do not matter to lists.
        let dims = Dims::new(batch, rows, heads, 1).with_seqlen_kv(columns);
        let lists = OwnedBlockLists::from_predicate(dims, batch != 1, heads != 1, |batch, head, query, key| {
            kept[((batch * heads + head) * rows + query) * columns + key] != 0
        });
        Self::from_owned(&lists.map_err(refusal)?, mask.device())
    }

    /// Lists that were made on the host: of slices, documents, prefixes of batch entries, or spans. They are copied to the device.
    ///
    /// # Errors
    /// The device is not one that is taken, or has no memory for them.
    pub fn from_owned(lists: &OwnedBlockLists, device: &Device) -> Result<Self> {
        let tensors = lists.operands().map(|(_, shape, list)| Tensor::from_slice(list, shape, device));
        let [counts, indices, bits, full_counts, full] = tensors;
        Self::new(&counts?, &indices?, &bits?)?.with_full_blocks(&full_counts?, &full?)
    }

    /// What a problem with these lists has.
    pub(crate) fn option(&self) -> BlockMask {
        self.0.mask
    }

    /// Adds the lists to the arguments of a run.
    fn lend<'a>(lists: Option<&'a Self>, mut args: Args<'a>) -> Result<Args<'a>> {
        for (slot, shape, numbers) in lists.map_or(&[][..], |lists| &lists.0.lists) {
            args = match *shape.as_slice() {
                [batch, heads, queries] => lend(args, *slot, [batch, heads, queries], numbers)?,
                [batch, heads, queries, last] => lend(args, *slot, [batch, heads, queries, last], numbers)?,
                // `list` makes no others.
                _ => args,
            };
        }
        Ok(args)
    }
}

impl fmt::Debug for BlockLists {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockLists").field("shape", &self.0.shape).field("mask", &self.0.mask).finish_non_exhaustive()
    }
}

impl Numbers {
    fn copy(&self) -> Result<Self> {
        Ok(match self {
            Self::Host(numbers) => Self::Host(numbers.clone()),
            #[cfg(feature = "cuda")]
            Self::Gpu(numbers) => Self::Gpu(numbers.try_clone().map_err(candle_core::Error::wrap)?),
        })
    }
}

/// A copy of a list of the shape `shape`, on the device of `like`.
fn list(slot: Slot, tensor: &Tensor, shape: &[usize], like: &Tensor) -> Result<(Slot, Vec<usize>, Numbers)> {
    if tensor.dtype() != DType::I32 || tensor.dims() != shape {
        let got = format!("{:?} {:?}", tensor.dtype(), tensor.dims()).to_lowercase();
        return refuse(slot, got, &format!("i32 {shape:?}"));
    }
    if !tensor.device().same_device(like.device()) {
        let (got, allowed) = ("another device".into(), "the device of the other lists".into());
        return Err(refusal(Error::Device { what: slot.name(), got, allowed }));
    }
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + tensor.elem_count();
    let numbers = match &*storage {
        Storage::Cpu(memory) => Numbers::Host(memory.as_slice::<i32>()?[range].to_vec()),
        #[cfg(feature = "cuda")]
        Storage::Cuda(memory) => {
            let view = memory.as_cuda_slice::<i32>()?.slice(range);
            Numbers::Gpu(memory.device.cuda_stream().clone_dtod(&view).map_err(candle_core::Error::wrap)?)
        }
        _ => return refuse(slot, "on a device that is not taken".into(), "the CPU or a CUDA GPU"),
    };
    Ok((slot, shape.to_vec(), numbers))
}

fn lend<'a, const R: usize>(args: Args<'a>, slot: Slot, shape: [usize; R], numbers: &'a Numbers) -> Result<Args<'a>> {
    let layout = Layout::contiguous(shape).map_err(refusal)?;
    let list = match numbers {
        Numbers::Host(numbers) => TensorRef::host(numbers, layout),
        #[cfg(feature = "cuda")]
        Numbers::Gpu(numbers) => TensorRef::cuda(numbers.as_view(), layout),
    };
    Ok(args.read(slot, list.map_err(refusal)?))
}

/// What a run reads of lists beside its tensors.
#[derive(Clone, Copy)]
pub struct Lists<'a> {
    pub packing: Option<&'a Packing>,
    pub blocks: Option<&'a BlockLists>,
    /// The seed and the offset of dropout, in host memory.
    pub dropout_state: Option<&'a [i32; 4]>,
}

impl<'a> Lists<'a> {
    /// Adds all of them to the arguments of a run.
    pub fn lend(self, args: Args<'a>) -> Result<Args<'a>> {
        let args = BlockLists::lend(self.blocks, Packing::lend(self.packing, args)?)?;
        let Some(state) = self.dropout_state else { return Ok(args) };
        let layout = Layout::contiguous([state.len()]).map_err(refusal)?;
        Ok(args.read(Slot::DropoutState, TensorRef::host(state, layout).map_err(refusal)?))
    }
}

/// Refuses lists on another device than the operands of a call.
pub fn check(lists: &BlockLists, like: &Tensor) -> Result<()> {
    let same = lists.0.lists.iter().all(|(_, _, numbers)| match (numbers, like.device()) {
        (Numbers::Host(_), Device::Cpu) => true,
        #[cfg(feature = "cuda")]
        (Numbers::Gpu(numbers), Device::Cuda(device)) => numbers.context() == device.cuda_stream().context(),
        _ => false,
    });
    if same {
        return Ok(());
    }
    let (got, allowed) = ("another device".into(), "the device of q, k and v".into());
    Err(refusal(Error::Device { what: "block lists", got, allowed }))
}

fn refuse<T>(slot: Slot, got: String, allowed: &str) -> Result<T> {
    Err(refusal(Error::Value { what: slot.name(), got, allowed: allowed.into() }))
}
