//! From checked tensors to the descriptors that kernels read: an address and strides, both checked for alignment.

use super::raw::{Place, RawArgs, RawTensor, RawWorkspace};
use crate::error::{Error, Result};
use crate::operand::{MAX_RANK, Slot, SlotMap};

/// TMA needs addresses and strides that are multiples of this many bytes.
const ALIGNMENT: u64 = 16;
/// The strides of a TMA tensor map are below this, in bytes.
const STRIDE_END: i64 = 1 << 40;

/// The arguments of a kernel: a descriptor for each tensor that was given, and the workspace.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "read by the launch"))]
pub(crate) struct KernelArgs {
    descriptors: SlotMap<Descriptor>,
    /// The words of the seed and the offset of dropout, where they are on the host.
    pub dropout_words: Option<[i32; 4]>,
    /// The address of the workspace.
    pub workspace: u64,
}

/// A tensor as kernels read it. Strides count elements.
///
/// A row is one index of the dimension that is neither batch nor head:
/// - a token of Q, K, V, O and of their gradients;
/// - a query of a log-sum-exp;
/// - a block of a tensor of descale factors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Descriptor {
    /// Address of the first element. 0: the tensor was not given.
    pub address: u64,
    pub stride_batch: i64,
    pub stride_row: i64,
    pub stride_head: i64,
}

impl Descriptor {
    /// The tensor with every so many heads as the rows of one head. With more than one it has one row, whose stride says nothing.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "for a launch"))]
    pub fn with_heads_as_rows(self, heads: usize) -> Self {
        if heads == 1 {
            return self;
        }
        let heads = i64::try_from(heads).unwrap_or(i64::MAX);
        Self { stride_row: self.stride_head, stride_head: self.stride_head.saturating_mul(heads), ..self }
    }
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "read by the launch"))]
impl KernelArgs {
    /// Whether an operand was given.
    pub fn has(&self, slot: Slot) -> bool {
        self.descriptors.get(slot).is_some()
    }

    /// The descriptor of an operand. All zeros where the operand was not given.
    pub fn get(&self, slot: Slot) -> Descriptor {
        self.descriptors.get(slot).copied().unwrap_or_default()
    }
}

/// Describes the given tensors. `workspace_bytes` is what the plan needs of the workspace. What is on the host is read.
///
/// # Safety
/// A tensor on the host is of the type and shape of its slot, which the checks have seen, and may be read.
pub(crate) unsafe fn describe(args: &RawArgs, workspace_bytes: usize) -> Result<KernelArgs> {
    let mut descriptors = SlotMap::default();
    for (slot, tensor) in args.tensors.iter() {
        descriptors.set(*slot, descriptor(*slot, tensor)?);
    }
    let on_the_host = args.get(Slot::DropoutState).is_some_and(|state| state.place == Place::Cpu);
    // SAFETY: the caller's promise. The address was checked above.
    let dropout_words = if on_the_host { unsafe { args.dropout_state() } } else { None };
    Ok(KernelArgs { descriptors, dropout_words, workspace: workspace(args.workspace, workspace_bytes)? })
}

fn descriptor(slot: Slot, raw: &RawTensor) -> Result<Descriptor> {
    match slot.rank() {
        _ if is_listed(slot) => list(slot, raw),
        MAX_RANK => moved_by_tma(slot, raw),
        _ => read_by_element(slot, raw),
    }
}

/// Whether the dimensions of a tensor with four are not those of Q: lists of blocks, and a bias.
fn is_listed(slot: Slot) -> bool {
    use Slot::{Bias, DBias, FullBlockIdx, MaskBits, MaskBlockIdx};
    matches!(slot, MaskBlockIdx | FullBlockIdx | MaskBits | Bias | DBias)
}

/// The descriptor of a tensor `[batch, seqlen, heads, head_dim]`, or of a packed one, which has no `batch`. Kernels move it with
/// TMA, in units of 16 bytes.
fn moved_by_tma(slot: Slot, raw: &RawTensor) -> Result<Descriptor> {
    let (shape, strides) = (raw.layout.shape(), raw.layout.stride());
    let head_dim = shape.last().copied().unwrap_or(0);
    // A dimension of size 1 never uses its stride, so the caller's may be anything. TMA still needs a legal one. This is a multiple
    // of 32 bytes, so that it does not look as if it put rows in the middle of a sector (rotation.hpp of the kernels).
    let mut regular = [i64::try_from(head_dim.next_multiple_of(16)).unwrap_or(i64::MAX); 3];
    if !raw.layout.is_empty() {
        check_address(slot, raw, ALIGNMENT)?;
        let missing = MAX_RANK.saturating_sub(shape.len());
        for (at, name) in ["batch", "seqlen", "heads"].into_iter().enumerate().skip(missing) {
            if shape[at - missing] > 1 {
                regular[at] = check_stride(slot, name, strides[at - missing], raw)?;
            }
        }
    }
    let [stride_batch, stride_row, stride_head] = regular;
    Ok(Descriptor { address: raw.address, stride_batch, stride_row, stride_head })
}

/// The descriptor of a tensor with fewer dimensions: `[batch, heads, rows]` or smaller, or a packed `[heads, rows]`. Kernels
/// access it element by element.
///
/// A dimension of size 1, or one that the tensor does not have, gets stride 0. All indices then read the one element, as
/// those that share a descale factor must, and batches that share ALiBi slopes. The only dimension of sinks, of their gradient and
/// of maximum logits is the heads.
fn read_by_element(slot: Slot, raw: &RawTensor) -> Result<Descriptor> {
    if !raw.layout.is_empty() {
        check_address(slot, raw, raw.dtype.bytes() as u64)?;
    }
    let (shape, strides) = (raw.layout.shape(), raw.layout.stride());
    // A packed tensor lacks the first dimension of its slot.
    let missing = slot.rank().saturating_sub(shape.len());
    let stride = |at: usize| match at.checked_sub(missing).and_then(|axis| Some((shape.get(axis)?, strides.get(axis)?)))
    {
        Some((&size, &stride)) if size > 1 => stride,
        _ => 0,
    };
    let address = raw.address;
    if matches!(slot, Slot::Sinks | Slot::DSinks | Slot::MaxLogits) {
        return Ok(Descriptor { address, stride_head: stride(0), ..Descriptor::default() });
    }
    Ok(Descriptor { address, stride_batch: stride(0), stride_head: stride(1), stride_row: stride(2) })
}

/// The descriptor of lists `[batch, heads, blocks of queries, elements]`. Kernels read an index at a time, and the bits of a query
/// in 16 bytes. A dimension of size 1 gets stride 0: all batch entries or heads then share its lists. A bias has queries in the place
/// of blocks of queries.
fn list(slot: Slot, raw: &RawTensor) -> Result<Descriptor> {
    let (shape, strides) = (raw.layout.shape(), raw.layout.stride());
    let mut used = [0; 3];
    if !raw.layout.is_empty() {
        let is_bits = slot == Slot::MaskBits;
        check_address(slot, raw, if is_bits { ALIGNMENT } else { raw.dtype.bytes() as u64 })?;
        for (at, name) in ["batch", "heads", "blocks of queries"].into_iter().enumerate() {
            if shape.get(at).is_some_and(|&size| size > 1) {
                used[at] = if is_bits { check_stride(slot, name, strides[at], raw)? } else { strides[at] };
            }
        }
    }
    let [stride_batch, stride_head, stride_row] = used;
    Ok(Descriptor { address: raw.address, stride_batch, stride_row, stride_head })
}

fn check_address(slot: Slot, raw: &RawTensor, alignment: u64) -> Result<()> {
    if raw.address != 0 && raw.address.is_multiple_of(alignment) {
        return Ok(());
    }
    Err(Error::Layout {
        tensor: slot.name(),
        got: format!("address {:#x}", raw.address),
        allowed: format!("multiples of {alignment} bytes, not 0"),
    })
}

fn check_stride(slot: Slot, axis: &str, stride: i64, raw: &RawTensor) -> Result<i64> {
    let bytes = stride.checked_mul(raw.dtype.bytes() as i64);
    match bytes {
        Some(bytes) if (0..STRIDE_END).contains(&bytes) && bytes % ALIGNMENT as i64 == 0 => Ok(stride),
        _ => Err(Error::Layout {
            tensor: slot.name(),
            got: format!("stride {stride} in {axis}, of {} elements", raw.dtype),
            allowed: format!(
                "on a GPU, multiples of {} elements (16 bytes) from 0 to below 2^40 bytes",
                ALIGNMENT as usize / raw.dtype.bytes()
            ),
        }),
    }
}

/// Checks the workspace against what the plan needs, in bytes. Returns its address.
fn workspace(workspace: RawWorkspace, need: usize) -> Result<u64> {
    let RawWorkspace { address, bytes } = workspace;
    if bytes < need || (need > 0 && address == 0) {
        return Err(Error::Workspace { need, have: if address == 0 { 0 } else { bytes } });
    }
    if need > 0 && !address.is_multiple_of(ALIGNMENT) {
        return Err(Error::Layout {
            tensor: "workspace",
            got: format!("address {address:#x}"),
            allowed: "multiples of 16 bytes".into(),
        });
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::layout::Layout;

    fn raw<const R: usize>(address: u64, dtype: DType, layout: Layout<R>) -> RawTensor {
        RawTensor::new(address, dtype, Place::Cuda(0), layout)
    }

    fn dense(address: u64, shape: [usize; 4]) -> RawTensor {
        raw(address, DType::BF16, Layout::contiguous(shape).unwrap())
    }

    fn described(slot: Slot, raw: RawTensor) -> Result<Descriptor> {
        // SAFETY: nothing is on the host.
        unsafe { describe(&RawArgs::new().with(slot, raw), 0) }.map(|args| args.get(slot))
    }

    fn refused(slot: Slot, raw: RawTensor) -> String {
        described(slot, raw).unwrap_err().to_string()
    }

    #[test]
    fn dense_tensors_pass_unchanged() {
        let q = described(Slot::Q, dense(0x1000, [2, 3, 4, 64])).unwrap();
        assert_eq!(q, Descriptor { address: 0x1000, stride_batch: 768, stride_row: 256, stride_head: 64 });
        // SAFETY: there is no tensor.
        let args = unsafe { describe(&RawArgs::new(), 0).unwrap() };
        assert_eq!(args.get(Slot::Q), Descriptor::default());
    }

    #[test]
    fn the_state_of_dropout_is_read_from_the_host() {
        let words = [1, -2, 3, i32::MIN];
        let described = |address: u64, place| {
            let state = RawTensor::new(address, DType::I32, place, Layout::contiguous([4]).unwrap());
            // SAFETY: what is on the host are those words.
            unsafe { describe(&RawArgs::new().with(Slot::DropoutState, state), 0) }
        };
        let address = words.as_ptr().expose_provenance() as u64;
        assert_eq!(described(address, Place::Cpu).unwrap().dropout_words, Some(words));
        assert!(described(address + 1, Place::Cpu).is_err() && described(0, Place::Cpu).is_err());
        assert_eq!(described(0x1000, Place::Cuda(0)).unwrap().dropout_words, None);
    }

    #[test]
    fn heads_become_rows() {
        let strided = Layout::with_strides([2, 1, 8, 64], [4096, 7, 128, 1]).unwrap();
        let q = described(Slot::Q, raw(0x1000, DType::BF16, strided)).unwrap();
        let of_four = Descriptor { address: 0x1000, stride_batch: 4096, stride_row: 128, stride_head: 512 };
        assert_eq!((q.with_heads_as_rows(4), q.with_heads_as_rows(1)), (of_four, q));
        let lse = raw(0x100, DType::F32, Layout::with_strides([2, 8, 1], [32, 3, 1]).unwrap());
        let of_four = Descriptor { address: 0x100, stride_batch: 32, stride_row: 3, stride_head: 12 };
        assert_eq!(described(Slot::Lse, lse).unwrap().with_heads_as_rows(4), of_four);
    }

    #[test]
    fn addresses_are_aligned() {
        let text = refused(Slot::K, dense(0x1008, [2, 5, 1, 64]));
        assert_eq!(text, "k: address 0x1008; allowed: multiples of 16 bytes, not 0");
        assert!(refused(Slot::K, dense(0, [2, 5, 1, 64])).starts_with("k: address 0x0"));
        // A tensor without keys has no element, so its address is not checked.
        assert!(described(Slot::K, dense(0, [2, 0, 1, 64])).is_ok());
    }

    #[test]
    fn strides_are_aligned_where_they_are_used() {
        let strided = |stride| raw(0x1000, DType::BF16, Layout::with_strides([2, 5, 1, 64], stride).unwrap());
        assert_eq!(
            refused(Slot::V, strided([340, 68, 64, 1])),
            "v: stride 340 in batch, of bf16 elements; allowed: on a GPU, multiples of 8 elements (16 bytes) \
             from 0 to below 2^40 bytes"
        );
        // Stride 0 of the keys is legal: all keys have the same value. The stride of a single head is replaced.
        assert_eq!(described(Slot::V, strided([320, 0, 3, 1])).unwrap().stride_head, 64);
        let text = refused(Slot::V, strided([1 << 39, 64, 64, 1]));
        assert!(text.starts_with("v: stride 549755813888 in batch"), "{text}");
    }

    #[test]
    fn what_is_read_by_element_is_aligned_to_it() {
        let lse = Layout::contiguous([2, 4, 3]).unwrap();
        let found = described(Slot::Lse, raw(0x104, DType::F32, lse)).unwrap();
        assert_eq!(found, Descriptor { address: 0x104, stride_batch: 12, stride_head: 3, stride_row: 1 });
        let text = refused(Slot::Lse, raw(0x102, DType::F32, lse));
        assert_eq!(text, "lse: address 0x102; allowed: multiples of 4 bytes, not 0");
        // One factor for the whole tensor.
        let factor = raw(0x104, DType::F32, Layout::contiguous([1, 1, 1]).unwrap());
        assert_eq!(described(Slot::DescaleQ, factor).unwrap(), Descriptor { address: 0x104, ..Default::default() });
        let counts = raw(0x104, DType::F32, Layout::with_strides([3, 2], [5, 1]).unwrap());
        let found = described(Slot::Counts, counts).unwrap();
        assert_eq!((found.stride_batch, found.stride_head, found.stride_row), (5, 1, 0));
        let sinks = raw(0x102, DType::BF16, Layout::contiguous([4]).unwrap());
        let found = described(Slot::Sinks, sinks).unwrap();
        assert_eq!(found, Descriptor { address: 0x102, stride_head: 1, ..Default::default() });
        let strided = |stride| Layout::with_strides([4], [stride]).unwrap();
        let max_logits = raw(0x104, DType::F32, strided(1));
        let found = described(Slot::MaxLogits, max_logits).unwrap();
        assert_eq!(found, Descriptor { address: 0x104, stride_head: 1, ..Default::default() });
        // All batches share them, or each has its own.
        let slopes = raw(0x104, DType::F32, strided(1));
        let found = described(Slot::AlibiSlopes, slopes).unwrap();
        assert_eq!(found, Descriptor { address: 0x104, stride_head: 1, ..Default::default() });
        let slopes = raw(0x104, DType::F32, Layout::with_strides([2, 4], [20, 1]).unwrap());
        let found = described(Slot::AlibiSlopes, slopes).unwrap();
        assert_eq!(found, Descriptor { address: 0x104, stride_batch: 20, stride_head: 1, stride_row: 0 });
    }

    #[test]
    fn packed_tensors_have_no_batch() {
        let q = raw(0x1000, DType::BF16, Layout::with_strides([9, 4, 64], [512, 128, 1]).unwrap());
        let found = described(Slot::Q, q).unwrap();
        assert_eq!(found, Descriptor { address: 0x1000, stride_batch: 64, stride_row: 512, stride_head: 128 });
        let odd = raw(0x1000, DType::BF16, Layout::with_strides([9, 1, 64], [68, 64, 1]).unwrap());
        assert!(refused(Slot::Q, odd).starts_with("q: stride 68 in seqlen"));
        for slot in [Slot::Lse, Slot::DescaleQ] {
            let numbers = raw(0x1004, DType::F32, Layout::with_strides([4, 9], [16, 1]).unwrap());
            let found = described(slot, numbers).unwrap();
            assert_eq!(found, Descriptor { address: 0x1004, stride_batch: 0, stride_head: 16, stride_row: 1 });
        }
        let offsets = raw(0x1004, DType::I32, Layout::contiguous([3]).unwrap());
        assert_eq!(described(Slot::CuSeqlensQ, offsets).unwrap().address, 0x1004);
    }

    #[test]
    fn a_workspace_is_there_aligned_and_large_enough() {
        let at = |address, bytes| RawWorkspace { address, bytes };
        assert_eq!(workspace(at(0, 0), 0), Ok(0));
        assert_eq!(workspace(at(0x100, 8), 4), Ok(0x100));
        assert_eq!(workspace(at(0, 4), 4), Err(Error::Workspace { need: 4, have: 0 }));
        assert_eq!(workspace(at(0x100, 3), 4), Err(Error::Workspace { need: 4, have: 3 }));
        let text = workspace(at(0x104, 4), 4).unwrap_err().to_string();
        assert_eq!(text, "workspace: address 0x104; allowed: multiples of 16 bytes");
    }
}
