//! A backward pass by address.

use std::ffi::c_void;

use super::{RawTensor, RawWorkspace, check_place, check_row_values, check_written, cpu};
use crate::backward::Layouts;
use crate::{BackwardPlan, Result, checks};

/// What a backward pass reads and writes, by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawBackward {
    /// `[batch, seqlen_q, heads_q, head_dim_qk]`.
    pub q: RawTensor<4>,
    /// `[batch, seqlen_kv, heads_kv, head_dim_qk]`.
    pub k: RawTensor<4>,
    /// `[batch, seqlen_kv, heads_kv, head_dim_vo]`.
    pub v: RawTensor<4>,
    /// `[batch, seqlen_q, heads_q, head_dim_vo]`, what the forward pass gave.
    pub o: RawTensor<4>,
    /// f32 `[batch, heads_q, seqlen_q]`, what the forward pass gave.
    pub lse: RawTensor<3>,
    /// `[batch, seqlen_q, heads_q, head_dim_vo]`.
    pub d_o: RawTensor<4>,
    /// f32 `[batch, heads_q, seqlen_q]`; given exactly when the problem announces it.
    pub d_lse: Option<RawTensor<3>>,
    /// `[batch, seqlen_q, heads_q, head_dim_qk]`, written.
    pub d_q: RawTensor<4>,
    /// `[batch, seqlen_kv, heads_kv, head_dim_qk]`, written.
    pub d_k: RawTensor<4>,
    /// `[batch, seqlen_kv, heads_kv, head_dim_vo]`, written.
    pub d_v: RawTensor<4>,
    /// Scratch memory.
    pub workspace: RawWorkspace,
}

impl BackwardPlan {
    /// [`run`](Self::run) by address. On the CPU it is done on return, and neither the stream nor the workspace is looked
    /// at.
    ///
    /// # Errors
    /// As [`run`](Self::run); beyond that [`Error::Layout`](crate::Error::Layout) for an address that is not a multiple of the element's size,
    /// for an output that uses an element twice, and on the CPU for an output whose range of addresses meets another
    /// tensor's; [`Error::Device`](crate::Error::Device) for a tensor that is not in the plan's place.
    ///
    /// # Safety
    /// - Each tensor's memory is where it says, and valid from now until the work is done, for every element that its
    ///   layout reaches. Inputs are initialised by then.
    /// - The workspace is valid for as long, in the plan's place.
    /// - Nothing writes the inputs, and nothing else reads or writes the outputs and the workspace, until then.
    /// - Outputs and workspace share no element with each other or with an input.
    /// - `stream` is a live `CUstream` (or `cudaStream_t`), or null for the default stream.
    pub unsafe fn run_raw(&self, args: &RawBackward, stream: *mut c_void) -> Result<()> {
        check(self, args)?;
        // No plan is a GPU's yet, so there is no stream to launch on.
        let _ = stream;
        // SAFETY: the caller's promise; `check` compared types, shapes and places with the problem.
        unsafe { cpu::backward(self, args) }
    }
}

/// Types, shapes, and that the memory is where the plan is.
fn check(plan: &BackwardPlan, args: &RawBackward) -> Result<()> {
    let problem = plan.problem();
    let RawBackward { q, k, v, o, lse, d_o, d_lse, d_q, d_k, d_v, .. } = *args;
    Layouts {
        q: q.layout,
        k: k.layout,
        v: v.layout,
        o: o.layout,
        lse: lse.layout,
        d_o: d_o.layout,
        d_lse: d_lse.map(|d_lse| d_lse.layout),
        d_q: d_q.layout,
        d_k: d_k.layout,
        d_v: d_v.layout,
    }
    .check(problem)?;
    let outputs = [("d_q", d_q), ("d_k", d_k), ("d_v", d_v)];
    for (what, tensor) in [("q", q), ("k", k), ("v", v), ("o", o), ("d_o", d_o)].into_iter().chain(outputs) {
        checks::dtype(what, tensor.dtype, problem.dtype(), "the problem's")?;
        check_place(plan.target(), what, tensor.place)?;
    }
    check_row_values(plan.target(), "lse", lse)?;
    d_lse.map_or(Ok(()), |d_lse| check_row_values(plan.target(), "d_lse", d_lse))?;
    outputs.into_iter().try_for_each(|(what, tensor)| check_written(what, tensor.layout))
}
