//! What a launch of the backward pass does: the CPU's inputs and outputs, and the kernels' parameters.

#[cfg(feature = "cuda")]
use std::ffi::c_void;

#[cfg(feature = "cuda")]
use super::{KernelArgs, blocks, dropout, edges, rows_of_sequences, sequences, small};
use super::{Launch, RawArgs, not_computed, required};
#[cfg(feature = "cuda")]
use crate::arch::Arch;
use crate::cpu::{self, BackwardInputs, BackwardOutputs};
use crate::dtype::{DType, Float, bf16, f16};
use crate::error::Result;
use crate::operand::Slot;
use crate::plan::{BackwardChoice, BackwardPlan, Planned};
use crate::problem::ForwardProblem;
#[cfg(feature = "cuda")]
use crate::sequences::Side;
#[cfg(feature = "cuda")]
use crate::sys;

impl Launch for BackwardPlan {
    type Choice = BackwardChoice;

    fn planned(&self) -> &Planned<BackwardChoice> {
        self.planned()
    }

    fn of_forward(&self) -> &ForwardProblem {
        self.problem().forward()
    }

    fn has_nothing_to_do(&self) -> bool {
        self.problem().is_empty()
    }

    unsafe fn on_cpu(&self, args: &RawArgs) -> Result<()> {
        // SAFETY: the caller's promise. The type is the one that the operands were checked to have.
        unsafe {
            match self.problem().dtype() {
                DType::F16 => backward::<f16>(self, args),
                DType::BF16 => backward::<bf16>(self, args),
                DType::F32 => backward::<f32>(self, args),
                got => Err(not_computed(got)),
            }
        }
    }

    #[cfg(feature = "cuda")]
    unsafe fn on_gpu(&self, choice: &BackwardChoice, args: &KernelArgs, stream: *mut c_void) -> Result<()> {
        let params = params(self, choice, args)?;
        // SAFETY: the caller's promise covers memory and stream. The fields satisfy params.rs of the sys crate: the
        // problem, the selection and the operands were checked.
        unsafe { sys::launch_backward(choice.kernel.row, &choice.kernel, &params, stream) }
    }
}

/// # Safety
/// As [`Launch::on_cpu`], with operands of `T`.
unsafe fn backward<T: Float>(plan: &BackwardPlan, args: &RawArgs) -> Result<()> {
    // SAFETY: the caller's promise.
    let (inputs, outputs) = unsafe {
        (
            BackwardInputs::<T> {
                q: required(Slot::Q, args.read(Slot::Q))?,
                k: required(Slot::K, args.read(Slot::K))?,
                v: required(Slot::V, args.read(Slot::V))?,
                o: required(Slot::O, args.read(Slot::O))?,
                lse: required(Slot::Lse, args.read(Slot::Lse))?,
                d_o: required(Slot::DO, args.read(Slot::DO))?,
                d_lse: args.read(Slot::DLse),
                lengths: args.lengths(),
                sinks: args.sinks(plan.problem().forward().sinks()),
                bias: args.bias(plan.problem().forward().bias()),
                alibi: args.read(Slot::AlibiSlopes),
                lists: args.lists(),
                dropout_state: args.dropout_state(),
            },
            BackwardOutputs::<T> {
                d_q: required(Slot::DQ, args.write(Slot::DQ))?,
                d_k: required(Slot::DK, args.write(Slot::DK))?,
                d_v: required(Slot::DV, args.write(Slot::DV))?,
                d_sinks: args.write(Slot::DSinks),
                d_bias: args.d_bias(plan.problem().forward().bias()),
            },
        )
    };
    cpu::backward(plan.problem(), &inputs, outputs)
}

/// The parameters of the plan's kernel. `hopper-attention-sys/src/params.rs` says what each field means.
#[cfg(feature = "cuda")]
fn params(plan: &BackwardPlan, choice: &BackwardChoice, args: &KernelArgs) -> Result<sys::BwdParams> {
    let problem = plan.problem();
    let dims = problem.dims();
    let parts = choice.parts();
    let part = |offset: usize| args.workspace + offset as u64;
    let operand = |slot| args.get(slot).into();
    let tensor = |slot, side| rows_of_sequences(problem.forward(), slot, side, args.get(slot)).map(Into::into);
    let mut sequences = sequences(problem.forward(), args, parts.table.map_or(0, part), 0)?;
    if let Some(packed) = choice.packed {
        sequences.list_size = small("tiles", packed.list_size)?;
        sequences.block_list_size = small("blocks", packed.block_list_size)?;
        sequences.sum_blocks = small("blocks with sums", packed.sum_blocks)?;
    }
    Ok(sys::BwdParams {
        q: tensor(Slot::Q, Side::Q)?,
        k: tensor(Slot::K, Side::Kv)?,
        v: tensor(Slot::V, Side::Kv)?,
        o: tensor(Slot::O, Side::Q)?,
        lse: operand(Slot::Lse),
        d_o: tensor(Slot::DO, Side::Q)?,
        d_lse: operand(Slot::DLse),
        d_q: tensor(Slot::DQ, Side::Q)?,
        d_k: tensor(Slot::DK, Side::Kv)?,
        d_v: tensor(Slot::DV, Side::Kv)?,
        batch: small("batch", dims.batch)?,
        heads_q: small("heads_q", dims.heads_q)?,
        heads_kv: small("heads_kv", dims.heads_kv)?,
        seqlen_q: small("seqlen_q", dims.seqlen_q)?,
        seqlen_kv: small("seqlen_kv", dims.seqlen_kv)?,
        head_dim_qk: small("head_dim_qk", dims.head_dim_qk)?,
        head_dim_vo: small("head_dim_vo", dims.head_dim_vo)?,
        softmax_scale: problem.softmax_scale(),
        diagonal_offset: choice.bounds.diagonal_offset,
        window_left: choice.bounds.window_left,
        window_right: choice.bounds.window_right,
        edges: edges(&choice.bounds),
        grid: choice.grid,
        shares: choice.shares,
        cut_tiles: choice.cut_tiles,
        cluster: choice.cluster,
        heads_per_group: choice.heads_per_group,
        groups: choice.groups,
        statistics: part(parts.statistics),
        sums: part(parts.sums),
        progress: part(parts.progress),
        share_list: if choice.kernel.arch == Arch::Sm90 { part(parts.share_list) } else { 0 },
        key_sums: if choice.sums_keys() { part(parts.key_sums) } else { 0 },
        leak_flag: part(parts.leak_flag),
        ordered: choice.turns,
        tile_counter: if choice.tile_counter { args.workspace } else { 0 },
        sequences,
        sinks: operand(Slot::Sinks),
        sinks_dtype: sys::sinks_dtype(problem.forward()),
        d_sinks: operand(Slot::DSinks),
        softcap: problem.forward().softcap(),
        alibi: operand(Slot::AlibiSlopes),
        blocks: blocks(args, choice.lists.as_ref(), parts.lists)?,
        dropout: dropout(problem.forward(), args),
        bias: operand(Slot::Bias),
        bias_dtype: sys::bias_dtype(problem.forward()),
        // (Of a gradient without elements a kernel would take a dimension of 0 for one that is shared.)
        d_bias: if problem.forward().bias_shape().contains(&0) { Default::default() } else { operand(Slot::DBias) },
    })
}
