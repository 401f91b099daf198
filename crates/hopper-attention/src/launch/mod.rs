//! From addresses to work.
//!
//! The steps are the same for every pass:
//! 1. check the arguments against the plan's list of operands (`check.rs`);
//! 2. on a GPU: describe the tensors for the kernels (`describe.rs`), and enqueue the kernels;
//! 3. on the CPU: compute.
//!
//! An `impl` of [`Launch`] for each plan has what differs between the passes.

mod backward;
mod check;
mod describe;
mod forward;
mod quantize;
mod raw;

use std::ffi::c_void;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use crate::cpu::{Additive, AdditiveMut, HostMut, HostRef, ListInputs, Sinks};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::operand::Slot;
use crate::plan::{Planned, Target, not_on_a_gpu};
use crate::problem::{Bias, ForwardProblem};
use crate::sequences::Lengths;
#[cfg(feature = "cuda")]
use crate::sequences::Side;

pub(crate) use check::Given;
#[cfg(feature = "cuda")]
pub(crate) use describe::KernelArgs;
pub(crate) use describe::describe;
pub use raw::{Place, RawArgs, RawTensor};

/// The part of a run that differs between the passes. Each plan implements it.
pub(crate) trait Launch {
    /// The plan's choice for a GPU: the kernels and their schedule.
    type Choice;

    /// The plan's device, operands and workspace size.
    fn planned(&self) -> &Planned<Self::Choice>;

    /// The forward problem whose tensors the pass has. It says which sequences there are.
    fn of_forward(&self) -> &ForwardProblem;

    /// Whether every output is empty.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "asked before a launch"))]
    fn has_nothing_to_do(&self) -> bool;

    /// Checks which optional operands must be given together. The list of operands cannot say that. `is_given` says whether
    /// an operand was given.
    fn check_together(&self, is_given: &dyn Fn(Slot) -> bool) -> Result<()> {
        let _ = is_given;
        Ok(())
    }

    /// Computes on the cores of this machine.
    ///
    /// # Safety
    /// As [`run_raw`]. The arguments have passed the checks of [`run_raw`].
    unsafe fn on_cpu(&self, args: &RawArgs) -> Result<()>;

    /// Enqueues the kernels. The plan's context is the thread's current one.
    ///
    /// # Safety
    /// As [`run_raw`]. The arguments have passed the checks of [`run_raw`], and `choice` was made for this plan's problem.
    #[cfg(feature = "cuda")]
    unsafe fn on_gpu(&self, choice: &Self::Choice, args: &KernelArgs, stream: *mut c_void) -> Result<()>;
}

/// Refuses tensors that are not what the plan's problem asks for.
pub(crate) fn check<'g, P: Launch>(plan: &P, given: impl Iterator<Item = Given<'g>> + Clone) -> Result<()> {
    check::operands(plan.planned(), given.clone())?;
    plan.check_together(&|slot| given.clone().any(|given| given.slot == slot))
}

/// Checks the arguments, then enqueues the work on the stream (GPU) or computes (CPU).
///
/// # Safety
/// The same as [`ForwardPlan::run_raw`](crate::ForwardPlan::run_raw), for the plan of any pass.
pub(crate) unsafe fn run_raw<P: Launch>(plan: &P, args: &RawArgs, stream: *mut c_void) -> Result<()> {
    check(plan, args.tensors.iter().map(Given::from))?;
    let Planned { target, operands, workspace_bytes } = plan.planned();
    match target {
        Target::Cpu => {
            check::apart(operands, args)?;
            // SAFETY: the caller's promise, and the checks above.
            unsafe { plan.on_cpu(args) }
        }
        Target::Gpu(gpu) => {
            // SAFETY: the caller's promise, and the checks above.
            let args = unsafe { describe(args, *workspace_bytes)? };
            #[cfg(feature = "cuda")]
            {
                let device = gpu.device.as_ref().ok_or_else(|| not_on_a_gpu(target))?;
                if plan.has_nothing_to_do() {
                    return Ok(());
                }
                // The launchers use the CUDA runtime, which launches into the thread's current context.
                let _current = device.make_current()?;
                device.check_stream(stream)?;
                // SAFETY: the caller's promise, and the checks above.
                unsafe { plan.on_gpu(&gpu.choice, &args, stream) }
            }
            #[cfg(not(feature = "cuda"))]
            {
                let _ = (gpu, args, stream);
                Err(not_on_a_gpu(target))
            }
        }
    }
}

impl RawArgs {
    /// An operand that the CPU reads. `None` where it was not given. A packed tensor gets a batch of 1.
    ///
    /// # Safety
    /// As [`run_raw`]. The operand's element type was checked to be `T`, and its shape was checked too.
    unsafe fn read<'a, T, const R: usize>(&self, slot: Slot) -> Option<HostRef<'a, T, R>> {
        let tensor = self.get(slot)?;
        // SAFETY: the caller's promise.
        Some(unsafe { HostRef::new(with_exposed_provenance(tensor.address as usize), tensor.layout.with_batch()?) })
    }

    /// An operand that the CPU writes. `None` where it was not given.
    ///
    /// # Safety
    /// As [`read`](Self::read).
    unsafe fn write<'a, T, const R: usize>(&self, slot: Slot) -> Option<HostMut<'a, T, R>> {
        let tensor = self.get(slot)?;
        // SAFETY: the caller's promise.
        Some(unsafe { HostMut::new(with_exposed_provenance_mut(tensor.address as usize), tensor.layout.with_batch()?) })
    }

    /// The attention sinks, if they were given.
    ///
    /// # Safety
    /// As [`read`](Self::read): they were checked to be of `dtype`, f32 or bf16.
    unsafe fn sinks<'a>(&self, dtype: Option<DType>) -> Sinks<'a> {
        // SAFETY: the caller's promise.
        unsafe {
            match dtype {
                Some(DType::BF16) => self.read(Slot::Sinks).map_or(Sinks::None, Sinks::Bf16),
                _ => self.read(Slot::Sinks).map_or(Sinks::None, Sinks::F32),
            }
        }
    }

    /// The additive bias, if it was given.
    ///
    /// # Safety
    /// As [`read`](Self::read): it was checked to be of the type that `bias` says, f32, bf16 or f16.
    unsafe fn bias<'a>(&self, bias: Option<Bias>) -> Additive<'a> {
        // SAFETY: the caller's promise.
        unsafe {
            match bias.map(|bias| bias.dtype()) {
                Some(DType::BF16) => self.read(Slot::Bias).map_or(Additive::None, Additive::Bf16),
                Some(DType::F16) => self.read(Slot::Bias).map_or(Additive::None, Additive::F16),
                _ => self.read(Slot::Bias).map_or(Additive::None, Additive::F32),
            }
        }
    }

    /// The gradient of the additive bias, if it was given.
    ///
    /// # Safety
    /// As [`bias`](Self::bias).
    unsafe fn d_bias<'a>(&self, bias: Option<Bias>) -> Option<AdditiveMut<'a>> {
        // SAFETY: the caller's promise.
        unsafe {
            match bias.map(|bias| bias.dtype()) {
                Some(DType::BF16) => self.write(Slot::DBias).map(AdditiveMut::Bf16),
                Some(DType::F16) => self.write(Slot::DBias).map(AdditiveMut::F16),
                _ => self.write(Slot::DBias).map(AdditiveMut::F32),
            }
        }
    }

    /// The lists of blocks, if they were given.
    ///
    /// # Safety
    /// As [`read`](Self::read): they were checked to be of `i32`.
    unsafe fn lists<'a>(&self) -> Option<ListInputs<'a>> {
        // SAFETY: the caller's promise.
        unsafe {
            Some(ListInputs {
                counts: self.read(Slot::MaskBlockCnt)?,
                indices: self.read(Slot::MaskBlockIdx)?,
                bits: self.read(Slot::MaskBits)?,
                full: self.read(Slot::FullBlockCnt).zip(self.read(Slot::FullBlockIdx)),
            })
        }
    }

    /// The words of the seed and the offset of dropout, if they were given.
    ///
    /// # Safety
    /// As [`read`](Self::read): they were checked to be four of `i32`.
    unsafe fn dropout_state(&self) -> Option<[i32; 4]> {
        // SAFETY: the caller's promise.
        let words = unsafe { self.read::<i32, 1>(Slot::DropoutState) }?;
        Some([0, 1, 2, 3].map(|word| words.at([word])))
    }

    /// The offsets and used lengths that were given.
    ///
    /// # Safety
    /// As [`read`](Self::read): they were checked to be lists of `i32`.
    unsafe fn lengths<'a>(&self) -> Lengths<'a> {
        // SAFETY: the caller's promise.
        let list = |slot| unsafe { self.read::<i32, 1>(slot) }.map(|list| list.all());
        Lengths {
            cu_seqlens_q: list(Slot::CuSeqlensQ),
            cu_seqlens_kv: list(Slot::CuSeqlensKv),
            seqused_q: list(Slot::SequsedQ),
            seqused_kv: list(Slot::SequsedKv),
        }
    }
}

/// A descriptor of Q, K, V, O or a gradient, as kernels take it that read the lengths of sequences.
///
/// They count rows from the tensor's first: a packed tensor has no batch stride, and another's is a whole number of rows.
#[cfg(feature = "cuda")]
fn rows_of_sequences(
    problem: &ForwardProblem,
    slot: Slot,
    side: Side,
    mut descriptor: describe::Descriptor,
) -> Result<describe::Descriptor> {
    if !problem.has_lengths() {
        return Ok(descriptor);
    }
    let [offsets, _] = side.slots();
    let rows = side.rows(problem) as i64;
    let batches = problem.dims().batch as i64;
    if problem.wants(offsets) || batches <= 1 {
        descriptor.stride_batch = 0;
    } else if rows <= 1 {
        // The one row of a batch element may lie anywhere.
        descriptor.stride_row = descriptor.stride_batch;
    }
    let describe::Descriptor { stride_batch, stride_row, .. } = descriptor;
    let refuse = |nearest: &str| {
        let wanted =
            format!("{slot} with stride {stride_batch} in batch and {stride_row} in seqlen, beside lengths in memory");
        Err(Error::Unsupported { wanted, nearest: nearest.into() })
    };
    // A tensor map of such rows has no room for longer ones (`encode_packed_map` of the kernels).
    if stride_row >= 1 << 32 {
        return refuse("strides in seqlen below 2^32 elements");
    }
    if stride_batch == 0 {
        return Ok(descriptor);
    }
    if stride_row == 0 || stride_batch % stride_row != 0 {
        return refuse("a stride in batch that is a multiple of the one in seqlen");
    }
    // Rows are counted as i32.
    if (batches - 1).saturating_mul(stride_batch / stride_row).saturating_add(rows) >= i64::from(i32::MAX) {
        return refuse("fewer than 2^31 - 1 rows from the first to the last");
    }
    Ok(descriptor)
}

/// The edges of a mask, as kernels take them.
#[cfg(feature = "cuda")]
fn edges(bounds: &crate::plan::Bounds) -> crate::sys::MaskEdges {
    let (multiplier, shift) = bounds.reciprocal();
    crate::sys::MaskEdges { step: bounds.step, multiplier, shift, prefix_last: bounds.prefix - 1 }
}

/// Where kernels find the lengths of sequences, and where they make the table of them.
#[cfg(feature = "cuda")]
fn sequences(problem: &ForwardProblem, args: &KernelArgs, table: u64, list_size: i32) -> Result<crate::sys::Sequences> {
    let address = |slot| args.get(slot).address;
    Ok(crate::sys::Sequences {
        cu_seqlens_q: address(Slot::CuSeqlensQ),
        cu_seqlens_kv: address(Slot::CuSeqlensKv),
        seqused_q: address(Slot::SequsedQ),
        seqused_kv: address(Slot::SequsedKv),
        most_queries: small("queries", Side::Q.most_rows(problem))?,
        most_keys: small("keys", Side::Kv.most_rows(problem))?,
        table: if problem.has_lengths() { table } else { 0 },
        list_size,
        block_list_size: 0,
        sum_blocks: 0,
        fill_gaps: problem.fills_gaps(),
        // Without a mask the diagonal matters for the distances of ALiBi alone.
        bottom_right: problem.mask().is_bottom_right()
            || (problem.alibi().is_some() && problem.mask().corner().is_none()),
    })
}

/// The lists of a block-sparse mask, and where kernels make their own of them.
#[cfg(feature = "cuda")]
fn blocks(
    args: &KernelArgs,
    lists: Option<&crate::plan::Lists>,
    parts: Option<crate::plan::ListParts>,
) -> Result<crate::sys::BlockLists> {
    let (Some(lists), Some(parts)) = (lists, parts) else { return Ok(crate::sys::BlockLists::default()) };
    let operand = |slot| args.get(slot).into();
    let is_backward = lists.m_blocks > 0;
    let part = |offset: usize| args.workspace + offset as u64;
    let of_backward = |offset| if is_backward { part(offset) } else { 0 };
    Ok(crate::sys::BlockLists {
        mask_block_cnt: operand(Slot::MaskBlockCnt),
        mask_block_idx: operand(Slot::MaskBlockIdx),
        mask_bits: operand(Slot::MaskBits),
        full_block_cnt: operand(Slot::FullBlockCnt),
        full_block_idx: operand(Slot::FullBlockIdx),
        batch: small("lists per batch entry", lists.shape[0])?,
        heads: small("lists per head", lists.shape[1])?,
        q_blocks: small("blocks of queries", lists.q_blocks)?,
        k_blocks: small("blocks of keys", lists.k_blocks)?,
        m_blocks: small("blocks of queries", lists.m_blocks)?,
        most_partial: small("partial blocks", lists.most_partial)?,
        counts: part(parts.counts),
        entries: part(parts.entries),
        key_counts: of_backward(parts.key_counts),
        key_entries: of_backward(parts.key_entries),
        key_bits: of_backward(parts.key_bits),
    })
}

/// The dropout of a pass. All zeros where nothing is dropped.
#[cfg(feature = "cuda")]
fn dropout(problem: &ForwardProblem, args: &KernelArgs) -> crate::sys::Dropout {
    let Some(dropout) = problem.drops() else { return crate::sys::Dropout::default() };
    let number = |low: i32, high: i32| u64::from(high as u32) << 32 | u64::from(low as u32);
    let (state, [seed, offset]) = match args.dropout_words {
        Some([a, b, c, d]) => (0, [number(a, b), number(c, d)]),
        None => (args.get(Slot::DropoutState).address, [0; 2]),
    };
    crate::sys::Dropout { state, seed, offset, dropped: dropout.dropped() as i32, factor: problem.dropout_factor() }
}

/// An operand that the checks have found to be given, so that the error never occurs.
fn required<T>(slot: Slot, operand: Option<T>) -> Result<T> {
    let missing = || Error::Value { what: slot.name(), got: "missing".into(), allowed: "the operand".into() };
    operand.ok_or_else(missing)
}

/// The error for a type that the CPU does not compute with.
fn not_computed(got: DType) -> Error {
    Error::Dtype { what: "q, k and v", got, allowed: "f16, bf16, f32".into() }
}

/// A size of a problem as `i32`. Problems are checked to be small enough. The conversion is checked again, because a number
/// that wraps would make a kernel access wrong addresses.
#[cfg(feature = "cuda")]
fn small(what: &'static str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::Value { what, got: value.to_string(), allowed: "below 2^31".into() })
}

#[cfg(feature = "cuda")]
impl From<describe::Descriptor> for crate::sys::TensorDesc {
    fn from(descriptor: describe::Descriptor) -> Self {
        let describe::Descriptor { address, stride_batch, stride_row, stride_head } = descriptor;
        Self { address, stride_batch, stride_row, stride_head }
    }
}
