//! What a launch of the quantiser does: the CPU's tasks, and the kernels' parameters.

#[cfg(feature = "cuda")]
use std::ffi::c_void;

#[cfg(feature = "cuda")]
use super::{KernelArgs, sequences, small};
use super::{Launch, RawArgs, not_computed, required};
use crate::cpu::{self, Factors, QuantizeTask, Sequences};
use crate::dtype::{DType, Float, bf16, f16};
use crate::error::{Error, Result};
use crate::operand::Slot;
use crate::plan::{Planned, QuantizeChoice, QuantizePlan};
use crate::problem::{ForwardProblem, Source, TENSORS};
use crate::sequences::Side;
#[cfg(feature = "cuda")]
use crate::{scaling::Scaling, sys};

impl Launch for QuantizePlan {
    type Choice = QuantizeChoice;

    fn planned(&self) -> &Planned<QuantizeChoice> {
        self.planned()
    }

    fn of_forward(&self) -> &ForwardProblem {
        self.quantizer().problem()
    }

    /// Never: counts must be written even where every tensor is empty.
    fn has_nothing_to_do(&self) -> bool {
        false
    }

    /// A tensor that is quantised has three operands: its values, its stored elements, and its factors. The factors are
    /// either written (`descale`) or read (`given`). A tensor that is not quantised has no operand at all.
    fn check_together(&self, is_given: &dyn Fn(Slot) -> bool) -> Result<()> {
        for Source { values, stored, descale, given, lengths, .. } in TENSORS {
            let factors = [descale, given].into_iter().filter(|&slot| is_given(slot)).count();
            let [has_values, has_stored] = [values, stored].map(is_given);
            let refuse = |slot: Slot, got: &str, allowed: String| {
                Err(Error::Value { what: slot.name(), got: got.into(), allowed })
            };
            match (has_values, has_stored, factors) {
                (false, false, 0) | (true, true, 1) => {}
                (_, _, 2) => return refuse(given, "given twice", "factors to be written, or to be read".into()),
                (false, ..) => return refuse(values, "missing", format!("what {stored} and {descale} are made of")),
                (_, false, _) => return refuse(stored, "missing", format!("where {values} is stored")),
                _ => return refuse(descale, "missing", format!("the factors of {values}")),
            }
            // The list of operands knows of lists that this problem may have. It does not know which tensors are given.
            let problem = self.quantizer().problem();
            let missing = lengths.into_iter().find(|&slot| has_values && problem.wants(slot) && !is_given(slot));
            if let Some(slot) = missing {
                return refuse(slot, "missing", format!("the sequences of {values}"));
            }
        }
        Ok(())
    }

    unsafe fn on_cpu(&self, args: &RawArgs) -> Result<()> {
        // SAFETY: the caller's promise. The type is the one that the values were checked to have.
        unsafe {
            match self.quantizer().source() {
                DType::F16 => quantize::<f16>(self, args),
                DType::BF16 => quantize::<bf16>(self, args),
                DType::F32 => quantize::<f32>(self, args),
                got => Err(not_computed(got)),
            }
        }
    }

    #[cfg(feature = "cuda")]
    unsafe fn on_gpu(&self, choice: &QuantizeChoice, args: &KernelArgs, stream: *mut c_void) -> Result<()> {
        let params = params(self, choice, args)?;
        // SAFETY: the caller's promise covers memory and stream. The fields satisfy params.rs of the sys crate: the
        // quantiser, the selection and the operands were checked.
        unsafe { sys::launch_quantize(choice.row.row, &choice.row, &params, stream) }
    }
}

/// # Safety
/// As [`Launch::on_cpu`], with values of `T`.
unsafe fn quantize<T: Float>(plan: &QuantizePlan, args: &RawArgs) -> Result<()> {
    // SAFETY: the caller's promise.
    let (lengths, mut counts) = unsafe { (args.lengths(), args.write::<f32, 2>(Slot::Counts)) };
    let problem = plan.quantizer().problem();
    // The lists of a side of which nothing is quantised are not looked at.
    let of_side = |side, of: &[Slot]| {
        let wanted = of.iter().any(|&slot| args.get(slot).is_some());
        wanted.then(|| Sequences::of_side(problem, &lengths, side)).transpose()
    };
    let of_q = of_side(Side::Q, &[Slot::QValues])?;
    let of_kv = of_side(Side::Kv, &[Slot::KValues, Slot::VValues])?;
    let [q, k, v] = &TENSORS;
    // SAFETY: as above.
    let tasks = unsafe {
        [
            task::<T>(plan, args, q, of_q.as_ref(), Side::Q)?,
            task::<T>(plan, args, k, of_kv.as_ref(), Side::Kv)?,
            task::<T>(plan, args, v, of_kv.as_ref(), Side::Kv)?,
        ]
    };
    let found = cpu::quantize(tasks)?;
    if let Some(counts) = &mut counts {
        for [row, column] in counts.layout().indices() {
            counts.set([row, column], found[row][column] as f32);
        }
    }
    Ok(())
}

/// The CPU's task for one tensor. `None` where the tensor is not given.
///
/// # Safety
/// As [`Launch::on_cpu`], with values of `T`.
unsafe fn task<'a, T: Float>(
    plan: &QuantizePlan,
    args: &RawArgs,
    tensor: &Source,
    sequences: Option<&'a Sequences>,
    side: Side,
) -> Result<Option<QuantizeTask<'a, T>>> {
    // SAFETY: the caller's promise, here and below.
    let values = unsafe { args.read::<T, 4>(tensor.values) };
    let (Some(values), Some(sequences)) = (values, sequences) else { return Ok(None) };
    let (quantizer, problem) = (plan.quantizer(), plan.quantizer().problem());
    // SAFETY: as above.
    let descale = match unsafe { args.read(tensor.given) } {
        Some(descale) => {
            // Factors of an empty tensor are not read.
            if !values.layout().is_empty() {
                let scaling = problem.scaling().unwrap_or_default();
                cpu::check_factors(tensor.given.name(), &descale, scaling, sequences, side, false)?;
            }
            Factors::Given(descale)
        }
        // SAFETY: as above.
        None => Factors::FromAmax(required(tensor.descale, unsafe { args.write(tensor.descale) })?),
    };
    Ok(Some(QuantizeTask {
        values,
        // SAFETY: as above.
        stored: required(tensor.stored, unsafe { args.write(tensor.stored) })?,
        descale,
        scaling: problem.scaling().unwrap_or_default(),
        group: (tensor.shape)(problem)[2] / problem.dims().heads_kv,
        rotation: quantizer.hadamard().filter(|_| tensor.scored),
        most: quantizer.largest_stored(tensor),
        sequences,
        side,
        fills_gaps: problem.fills_gaps(),
    }))
}

/// The parameters of the kernels. `hopper-attention-sys/src/params.rs` says what each field means.
#[cfg(feature = "cuda")]
fn params(plan: &QuantizePlan, choice: &QuantizeChoice, args: &KernelArgs) -> Result<sys::QuantizeParams> {
    let (quantizer, problem) = (plan.quantizer(), plan.quantizer().problem());
    let scaling = problem.scaling().unwrap_or_default();
    let one = |index: usize| -> Result<sys::QuantizeTensor> {
        let tensor = &TENSORS[index];
        let given = args.get(tensor.given);
        let is_given = args.has(tensor.given);
        if !args.has(tensor.values) {
            return Ok(sys::QuantizeTensor::default());
        }
        let [_, seqlen, heads, head_dim] = (tensor.shape)(problem);
        let packed = (tensor.packed)(problem);
        let rows = |slot| {
            let mut descriptor = args.get(slot);
            if packed {
                descriptor.stride_batch = 0; // rows count from the tensor's first
            }
            descriptor
        };
        let group = if scaling == Scaling::PerHead { heads / problem.dims().heads_kv } else { 1 };
        Ok(sys::QuantizeTensor {
            values: rows(tensor.values).into(),
            stored: rows(tensor.stored).into(),
            descale: if is_given { given.into() } else { args.get(tensor.descale).into() },
            given: is_given,
            rotated: tensor.scored && quantizer.hadamard().is_some(),
            wanted: true,
            most: quantizer.largest_stored(tensor),
            batch: small("batch", problem.dims().batch)?,
            seqlen: small("seqlen", seqlen)?,
            heads: small("heads", heads)?,
            head_dim: small("head_dim", head_dim)?,
            group: small("heads_q / heads_kv", group)?,
            state: args.workspace + choice.state[index] as u64,
        })
    };
    let mut lengths = sys::Sequences::default();
    let mut workspace_bytes = choice.workspace_bytes;
    if let Some(packed) = choice.packed {
        let [of_q, of_kv] = packed.blocks;
        workspace_bytes = packed.table;
        lengths = sequences(problem, args, args.workspace + packed.table as u64, small("blocks of keys", of_kv)?)?;
        lengths.block_list_size = small("blocks of queries", of_q)?;
        // The lists of a side of which nothing is quantised are not looked at.
        if !args.has(Slot::QValues) {
            (lengths.cu_seqlens_q, lengths.seqused_q) = (0, 0);
        }
        if !args.has(Slot::KValues) && !args.has(Slot::VValues) {
            (lengths.cu_seqlens_kv, lengths.seqused_kv) = (0, 0);
        }
    }
    Ok(sys::QuantizeParams {
        q: one(0)?,
        k: one(1)?,
        v: one(2)?,
        scaling: sys::to_scaling(scaling),
        seed: quantizer.hadamard().unwrap_or(0),
        counts: args.get(Slot::Counts).into(),
        workspace: args.workspace,
        workspace_bytes: workspace_bytes as u64,
        multiprocessors: small("multiprocessors", choice.multiprocessors)?,
        sequences: lengths,
    })
}
