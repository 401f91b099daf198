//! What a launch of the forward pass does: the CPU's inputs and outputs, and the kernels' parameters.

#[cfg(feature = "cuda")]
use std::ffi::c_void;

#[cfg(feature = "cuda")]
use super::{KernelArgs, blocks, dropout, edges, rows_of_sequences, sequences, small};
use super::{Launch, RawArgs, not_computed, required};
use crate::cpu::{self, Fp8Inputs, Fp8Outputs, Inputs, Outputs};
use crate::dtype::{DType, E4M3, Float, OutputOf, bf16, f16};
use crate::error::Result;
use crate::operand::Slot;
use crate::plan::{Choice, ForwardPlan, Planned};
use crate::problem::ForwardProblem;
#[cfg(feature = "cuda")]
use crate::{plan::gathered, scaling::Scaling, sequences::Side, sys};

impl Launch for ForwardPlan {
    type Choice = Choice;

    fn planned(&self) -> &Planned<Choice> {
        self.planned()
    }

    fn of_forward(&self) -> &ForwardProblem {
        self.problem()
    }

    fn has_nothing_to_do(&self) -> bool {
        // The largest magnitude of an empty O is 0, and its maximum logits are -inf. They must be written.
        self.problem().is_empty() && !self.problem().wants_amax() && !self.problem().wants_max_logits()
    }

    unsafe fn on_cpu(&self, args: &RawArgs) -> Result<()> {
        // SAFETY: the caller's promise. The type is the one that the operands were checked to have.
        unsafe {
            match (self.problem().dtype(), self.problem().output_dtype()) {
                (DType::F16, _) => forward::<f16>(self, args),
                (DType::BF16, _) => forward::<bf16>(self, args),
                (DType::F32, _) => forward::<f32>(self, args),
                (DType::E4M3, DType::F16) => forward_fp8::<f16>(self, args),
                (DType::E4M3, DType::BF16) => forward_fp8::<bf16>(self, args),
                (DType::E4M3, DType::E4M3) => forward_fp8::<E4M3>(self, args),
                (DType::E4M3, got) | (got @ DType::I32, _) => Err(not_computed(got)),
            }
        }
    }

    #[cfg(feature = "cuda")]
    unsafe fn on_gpu(&self, choice: &Choice, args: &KernelArgs, stream: *mut c_void) -> Result<()> {
        let params = params(self, choice, args)?;
        let launch = |kernel: &crate::table::KernelInfo, params: &sys::FwdParams| {
            // SAFETY: the caller's promise covers memory and stream. The fields satisfy params.rs of the sys crate: the
            // problem, the selection and the operands were checked.
            unsafe { sys::launch_forward(kernel.row, kernel, params, stream) }
        };
        launch(&choice.kernel, &params)?;
        let Some(fallback) = &choice.fallback else { return Ok(()) };
        let counter = choice.parts().fallback_counter;
        let behind = sys::FwdParams {
            grid: fallback.grid,
            tile_counter: counter.map_or(0, |offset| args.workspace + offset as u64),
            split_tiles: 0,
            shares: 1,
            splits: 1,
            split_sums: 0,
            ..params
        };
        launch(&fallback.kernel, &behind)
    }
}

/// # Safety
/// As [`Launch::on_cpu`], with operands of `T`.
unsafe fn forward<T: Float>(plan: &ForwardPlan, args: &RawArgs) -> Result<()> {
    // SAFETY: the caller's promise.
    let (inputs, outputs) = unsafe {
        (
            Inputs::<T> {
                q: required(Slot::Q, args.read(Slot::Q))?,
                k: required(Slot::K, args.read(Slot::K))?,
                v: required(Slot::V, args.read(Slot::V))?,
                lengths: args.lengths(),
                sinks: args.sinks(plan.problem().sinks()),
                lists: args.lists(),
                bias: args.bias(plan.problem().bias()),
                dropout_state: args.dropout_state(),
                alibi: args.read(Slot::AlibiSlopes),
            },
            Outputs::<T> {
                o: required(Slot::O, args.write(Slot::O))?,
                lse: args.write(Slot::Lse),
                max_logits: args.write(Slot::MaxLogits),
            },
        )
    };
    cpu::forward(plan.problem(), &inputs, outputs)
}

/// # Safety
/// As [`Launch::on_cpu`], with operands of e4m3 and an output of `O`.
unsafe fn forward_fp8<O: OutputOf<E4M3>>(plan: &ForwardPlan, args: &RawArgs) -> Result<()> {
    // SAFETY: the caller's promise.
    let (inputs, outputs) = unsafe {
        (
            Fp8Inputs {
                q: required(Slot::Q, args.read(Slot::Q))?,
                k: required(Slot::K, args.read(Slot::K))?,
                v: required(Slot::V, args.read(Slot::V))?,
                descale_q: required(Slot::DescaleQ, args.read(Slot::DescaleQ))?,
                descale_k: required(Slot::DescaleK, args.read(Slot::DescaleK))?,
                descale_v: required(Slot::DescaleV, args.read(Slot::DescaleV))?,
                scale_o: args.read::<f32, 1>(Slot::ScaleO).map_or(1.0, |scale_o| scale_o.at([0])),
                lengths: args.lengths(),
                sinks: args.sinks(plan.problem().sinks()),
                lists: args.lists(),
            },
            Fp8Outputs::<O> {
                o: required(Slot::O, args.write(Slot::O))?,
                lse: args.write(Slot::Lse),
                amax: args.write(Slot::Amax),
            },
        )
    };
    cpu::forward_fp8(plan.problem(), &inputs, outputs)
}

/// The parameters of the plan's kernel. `hopper-attention-sys/src/params.rs` says what each field means.
#[cfg(feature = "cuda")]
fn params(plan: &ForwardPlan, choice: &Choice, args: &KernelArgs) -> Result<sys::FwdParams> {
    let problem = plan.problem();
    let heads = choice.heads_as_queries as usize; // Never below 1.
    let dims = gathered(problem.dims(), heads);
    let parts = choice.parts();
    let part = |offset: Option<usize>| offset.map_or(0, |offset| args.workspace + offset as u64);
    let operand = |slot| args.get(slot).into();
    let tensor = |slot, side, heads| {
        rows_of_sequences(problem, slot, side, args.get(slot).with_heads_as_rows(heads)).map(Into::into)
    };
    Ok(sys::FwdParams {
        q: tensor(Slot::Q, Side::Q, heads)?,
        k: tensor(Slot::K, Side::Kv, 1)?,
        v: tensor(Slot::V, Side::Kv, 1)?,
        o: tensor(Slot::O, Side::Q, heads)?,
        lse: args.get(Slot::Lse).with_heads_as_rows(heads).into(),
        descale_q: operand(Slot::DescaleQ),
        descale_k: operand(Slot::DescaleK),
        descale_v: operand(Slot::DescaleV),
        scale_o: operand(Slot::ScaleO),
        amax: operand(Slot::Amax),
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
        splits: choice.splits,
        split_sums: part(parts.split_sums),
        heads_per_group: choice.heads_per_group,
        groups: choice.groups,
        tile_counter: part(parts.tile_counter),
        split_tiles: choice.split_tiles,
        output: sys::to_dtype(problem.output_dtype()).ok_or_else(|| not_computed(problem.output_dtype()))?,
        descale_q_group: match problem.scaling() {
            // All query heads that read one KV head share one factor of Q.
            Some(Scaling::PerHead) => small("heads_q / heads_kv", dims.group_size())?,
            _ => 1,
        },
        range_check: part(parts.range_check),
        range_grid: choice.grid,
        sequences: sequences(problem, args, part(parts.table), choice.m_tiles)?,
        sinks: operand(Slot::Sinks),
        sinks_dtype: sys::sinks_dtype(problem),
        softcap: problem.softcap(),
        alibi: operand(Slot::AlibiSlopes),
        max_logits: operand(Slot::MaxLogits),
        blocks: blocks(args, choice.lists.as_ref(), parts.lists)?,
        dropout: dropout(problem, args),
        bias: operand(Slot::Bias),
        bias_dtype: sys::bias_dtype(problem),
    })
}
