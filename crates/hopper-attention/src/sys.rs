//! The only file that names `hopper_attention_sys`: its table rows as [`KernelInfo`], and a launch from checked numbers.

use std::ffi::c_void;

use hopper_attention_sys as ffi;

use crate::plan::{BackwardChoice, Choice, FALLBACK_COUNTER_OFFSET};
use crate::quantize::{self, NAMES};
use crate::raw::{
    BackwardKernelArgs, Factors, KernelArgs, KernelFp8, KernelTensor, QuantizeKernelArgs, QuantizeKernelTensor,
    RowValues,
};
use crate::{
    Arch, BackwardProblem, DType, Error, ForwardProblem, KernelInfo, MaskClass, Pass, Quantizer, Result, Scaling,
};

/// The forward's launch table. A row of a kind that is not known here (the enums of the bridge are open) is left out,
/// which only hides it: rows carry their index.
pub(crate) fn forward_rows() -> Vec<KernelInfo> {
    rows(Pass::Forward, ffi::fwd_rows())
}

/// The backward's, likewise.
pub(crate) fn backward_rows() -> Vec<KernelInfo> {
    rows(Pass::Backward, ffi::bwd_rows())
}

fn rows(pass: Pass, table: Vec<ffi::RowInfo>) -> Vec<KernelInfo> {
    (0..).zip(table).filter_map(|(index, row)| kernel_info(index, pass, &row)).collect()
}

fn kernel_info(row: u32, pass: Pass, info: &ffi::RowInfo) -> Option<KernelInfo> {
    let count = |value: i32| usize::try_from(value).ok();
    Some(KernelInfo {
        row,
        pass,
        arch: arch(info.arch)?,
        dtype: dtype(info.dtype)?,
        mask: match info.mask {
            ffi::MaskClass::Full => MaskClass::Full,
            ffi::MaskClass::Causal => MaskClass::Causal,
            ffi::MaskClass::Window => MaskClass::Window,
            _ => return None,
        },
        head_dim_qk: count(info.head_dim_qk)?,
        head_dim_vo: count(info.head_dim_vo)?,
        tile_m: count(info.tile_m)?,
        tile_n: count(info.tile_n)?,
        stages: count(info.stages)?,
        threads: count(info.threads)?,
        smem_bytes: count(info.smem_bytes)?,
        scores: match info.scores {
            ffi::Scores::F32 => DType::F32,
            ffi::Scores::F16 => DType::F16,
            _ => return None,
        },
        share_bytes: count(info.share_bytes)?,
    })
}

fn arch(arch: ffi::Arch) -> Option<Arch> {
    match arch {
        ffi::Arch::Sm80 => Some(Arch::Sm80),
        ffi::Arch::Sm90 => Some(Arch::Sm90),
        _ => None,
    }
}

fn dtype(dtype: ffi::DType) -> Option<DType> {
    match dtype {
        ffi::DType::F16 => Some(DType::F16),
        ffi::DType::BF16 => Some(DType::BF16),
        ffi::DType::E4M3 => Some(DType::E4M3),
        ffi::DType::F32 => Some(DType::F32),
        _ => None,
    }
}

/// The quantiser's table, likewise.
pub(crate) fn quantize_rows() -> Vec<quantize::Row> {
    let row = |(row, info): (u32, ffi::QuantizeRowInfo)| {
        Some(quantize::Row { row, arch: arch(info.arch)?, source: dtype(info.source)? })
    };
    (0..).zip(ffi::quantize_rows()).filter_map(row).collect()
}

/// Loads a row's kernels on the thread's current context.
pub(crate) fn prepare_quantize(row: &quantize::Row) -> Result<()> {
    status("prepare", row, ffi::quantize_prepare(row.row))
}

/// Loads a kernel on the thread's current context, so that launching it loads nothing.
pub(crate) fn prepare(kernel: &KernelInfo) -> Result<()> {
    let prepared = match kernel.pass {
        Pass::Forward => ffi::fwd_prepare(kernel.row),
        Pass::Backward => ffi::bwd_prepare(kernel.row),
    };
    status("prepare", kernel, prepared)
}

/// Enqueues the chosen kernel in the thread's current context, and its fallback behind it.
///
/// # Safety
/// As [`ForwardPlan::run_raw`](crate::ForwardPlan::run_raw), with `args` checked as it does, a problem that has rows,
/// and a choice that was made for it.
pub(crate) unsafe fn launch(
    problem: &ForwardProblem,
    choice: &Choice,
    args: &KernelArgs,
    stream: *mut c_void,
) -> Result<()> {
    let dims = problem.dims();
    let KernelFp8 { descale: [descale_q, descale_k, descale_v], scale_o, amax } = args.fp8.unwrap_or_default();
    let descale_q_group = match problem.scaling_value() {
        // A key head's factor of Q is for all query heads that read it.
        Some(Scaling::PerHead) => small("heads_q / heads_kv", problem.group_size())?,
        _ => 1,
    };
    let params = ffi::FwdParams {
        q: tensor(&args.q),
        k: tensor(&args.k),
        v: tensor(&args.v),
        o: tensor(&args.o),
        lse: args.lse.map(rows_of_queries).unwrap_or_default(),
        batch: small("batch", dims.batch)?,
        heads_q: small("heads_q", dims.heads_q)?,
        heads_kv: small("heads_kv", dims.heads_kv)?,
        seqlen_q: small("seqlen_q", dims.seqlen_q)?,
        seqlen_kv: small("seqlen_kv", dims.seqlen_kv)?,
        head_dim_qk: small("head_dim_qk", dims.head_dim_qk)?,
        head_dim_vo: small("head_dim_vo", dims.head_dim_vo)?,
        softmax_scale: problem.softmax_scale_value(),
        diagonal_offset: choice.diagonal_offset,
        window_left: choice.window_left,
        window_right: choice.window_right,
        grid: choice.grid,
        heads_per_group: choice.heads_per_group,
        groups: choice.groups,
        tile_counter: if choice.tile_counter { args.workspace } else { 0 },
        shared_tiles: choice.shared_tiles,
        output: match problem.output_dtype() {
            DType::F16 => ffi::DType::F16,
            DType::BF16 => ffi::DType::BF16,
            DType::E4M3 => ffi::DType::E4M3,
            DType::F32 => ffi::DType::F32,
        },
        descale_q: factors(&descale_q),
        descale_k: factors(&descale_k),
        descale_v: factors(&descale_v),
        descale_q_group,
        scale_o: number(scale_o),
        amax: number(amax),
        range_check: if choice.fallback.is_some() { args.workspace } else { 0 },
        range_grid: choice.grid,
    };
    let launch = |kernel: &KernelInfo, params: &ffi::FwdParams| {
        // SAFETY: the caller's promise covers memory and stream; the fields satisfy kernels.hpp because the problem, the
        // selection and the raw layer checked them.
        let result = unsafe { ffi::fwd_launch(kernel.row, params, stream.cast()) };
        status("launch", kernel, result)
    };
    launch(&choice.kernel, &params)?;
    let Some(fallback) = &choice.fallback else { return Ok(()) };
    let behind = ffi::FwdParams {
        grid: fallback.grid,
        tile_counter: if fallback.tile_counter { args.workspace + FALLBACK_COUNTER_OFFSET } else { 0 },
        shared_tiles: 0,
        ..params
    };
    launch(&fallback.kernel, &behind)
}

/// Enqueues the chosen backward kernels in the thread's current context.
///
/// # Safety
/// As [`BackwardPlan::run_raw`](crate::BackwardPlan::run_raw), with `args` checked as it does, a problem that has
/// gradients, and a choice that was made for it.
pub(crate) unsafe fn launch_backward(
    problem: &BackwardProblem,
    choice: &BackwardChoice,
    args: &BackwardKernelArgs,
    stream: *mut c_void,
) -> Result<()> {
    let dims = problem.dims();
    let parts = choice.parts();
    let part = |offset: usize| args.workspace + offset as u64;
    let params = ffi::BwdParams {
        q: tensor(&args.q),
        k: tensor(&args.k),
        v: tensor(&args.v),
        o: tensor(&args.o),
        lse: rows_of_queries(args.lse),
        d_o: tensor(&args.d_o),
        d_lse: args.d_lse.map(rows_of_queries).unwrap_or_default(),
        d_q: tensor(&args.d_q),
        d_k: tensor(&args.d_k),
        d_v: tensor(&args.d_v),
        batch: small("batch", dims.batch)?,
        heads_q: small("heads_q", dims.heads_q)?,
        heads_kv: small("heads_kv", dims.heads_kv)?,
        seqlen_q: small("seqlen_q", dims.seqlen_q)?,
        seqlen_kv: small("seqlen_kv", dims.seqlen_kv)?,
        head_dim_qk: small("head_dim_qk", dims.head_dim_qk)?,
        head_dim_vo: small("head_dim_vo", dims.head_dim_vo)?,
        softmax_scale: problem.softmax_scale_value(),
        diagonal_offset: choice.diagonal_offset,
        window_left: choice.window_left,
        window_right: choice.window_right,
        grid: choice.grid,
        heads_per_group: choice.heads_per_group,
        groups: choice.groups,
        statistics: part(parts.statistics),
        sums: part(parts.sums),
        progress: part(parts.progress),
        ordered: choice.turns,
        tile_counter: if choice.tile_counter { args.workspace } else { 0 },
    };
    // SAFETY: the caller's promise covers memory and stream; the fields satisfy kernels.hpp because the problem, the
    // selection and the raw layer checked them.
    let result = unsafe { ffi::bwd_launch(choice.kernel.row, &params, stream.cast()) };
    status("launch", &choice.kernel, result)
}

/// Enqueues the quantisation of what there is in the thread's current context.
///
/// # Safety
/// As [`QuantizePlan::run_raw`](crate::QuantizePlan::run_raw), with `args` checked as it does and a choice that was made
/// for the quantizer.
pub(crate) unsafe fn quantize(
    quantizer: &Quantizer,
    choice: &quantize::Choice,
    args: &QuantizeKernelArgs,
    stream: *mut c_void,
) -> Result<()> {
    let problem = quantizer.problem();
    let scaling = problem.scaling_value().unwrap_or_default();
    let one = |index: usize| -> Result<ffi::QuantizeTensor> {
        let (of, Some(QuantizeKernelTensor { values, stored, descale, given })) = (&NAMES[index], &args.tensors[index])
        else {
            return Ok(ffi::QuantizeTensor::default());
        };
        let [batch, seqlen, heads, head_dim] = (of.shape)(problem);
        let group = if scaling == Scaling::PerHead { heads / problem.dims().heads_kv } else { 1 };
        Ok(ffi::QuantizeTensor {
            values: tensor(values),
            stored: tensor(stored),
            descale: factors(descale),
            given: *given,
            rotated: of.scored && quantizer.hadamard_value().is_some(),
            wanted: true,
            most: quantizer.most(of),
            batch: small("batch", batch)?,
            seqlen: small("seqlen", seqlen)?,
            heads: small("heads", heads)?,
            head_dim: small("head_dim", head_dim)?,
            group: small("heads_q / heads_kv", group)?,
            state: args.workspace + choice.state[index] as u64,
        })
    };
    let params = ffi::QuantizeParams {
        q: one(0)?,
        k: one(1)?,
        v: one(2)?,
        scaling: match scaling {
            Scaling::PerTensor => ffi::Scaling::PerTensor,
            Scaling::PerHead => ffi::Scaling::PerHead,
            Scaling::PerBlock => ffi::Scaling::PerBlock,
        },
        seed: quantizer.hadamard_value().unwrap_or(0),
        counts: ffi::TensorDesc { stride_batch: args.counts.1, ..number(args.counts.0) },
        workspace: args.workspace,
        workspace_bytes: choice.workspace_bytes as u64,
        multiprocessors: small("multiprocessors", choice.multiprocessors)?,
    };
    // SAFETY: the caller's promise covers memory and stream; the fields satisfy kernels.hpp because the problem, the
    // selection and the raw layer checked them.
    let result = unsafe { ffi::quantize_launch(choice.row.row, &params, stream.cast()) };
    status("launch", &choice.row, result)
}

fn tensor(tensor: &KernelTensor) -> ffi::TensorDesc {
    let KernelTensor { address, stride_batch, stride_seqlen, stride_head } = *tensor;
    ffi::TensorDesc { address, stride_batch, stride_row: stride_seqlen, stride_head }
}

fn factors(factors: &Factors) -> ffi::TensorDesc {
    let Factors { address, stride_batch, stride_head, stride_block } = *factors;
    ffi::TensorDesc { address, stride_batch, stride_row: stride_block, stride_head }
}

/// A log-sum-exp or its gradient.
fn rows_of_queries((address, stride_batch, stride_head): RowValues) -> ffi::TensorDesc {
    ffi::TensorDesc { address, stride_batch, stride_row: 1, stride_head }
}

/// A single number; address 0: it is not there.
fn number(address: u64) -> ffi::TensorDesc {
    ffi::TensorDesc { address, ..Default::default() }
}

/// Problems are checked to be this small; an error all the same, since a wrapped number would address wild memory.
fn small(what: &'static str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::Value { what, got: value.to_string(), allowed: "below 2^31".into() })
}

fn status(what: &'static str, kernel: &impl std::fmt::Display, status: ffi::Status) -> Result<()> {
    match status.code {
        ffi::StatusCode::Ok => Ok(()),
        _ => Err(Error::Launch { what, kernel: kernel.to_string(), text: ffi::status_text(status) }),
    }
}
