//! Running a forward plan.

#[cfg(feature = "cuda")]
mod cuda;

use crate::plan::Target;
use crate::{
    DType, Error, ForwardPlan, ForwardProblem, Layout, Operand, Result, Stream, TensorMut, TensorRef, Workspace, cpu,
};

#[cfg(feature = "cuda")]
pub(crate) use cuda::{refuse_capture, same_context};

/// What a forward pass reads and writes. Every tensor's logical order is `[batch, seqlen, heads, head_dim]`, whatever
/// its strides.
pub struct ForwardArgs<'a, T: Operand> {
    /// Queries, `[batch, seqlen_q, heads_q, head_dim_qk]`.
    pub q: TensorRef<'a, T, 4>,
    /// Keys, `[batch, seqlen_kv, heads_kv, head_dim_qk]`.
    pub k: TensorRef<'a, T, 4>,
    /// Values, `[batch, seqlen_kv, heads_kv, head_dim_vo]`. A NaN or infinity reaches the rows that keep its key; on a
    /// GPU also rows that mask it but share a block of keys with it, since the product takes whole blocks.
    pub v: TensorRef<'a, T, 4>,
    /// The output, `[batch, seqlen_q, heads_q, head_dim_vo]`.
    pub o: TensorMut<'a, T::Out, 4>,
    /// The log-sum-exp of each row of scores, natural log, `[batch, heads_q, seqlen_q]`: given exactly when the problem
    /// was made with [`lse(true)`](ForwardProblem::lse).
    pub lse: Option<TensorMut<'a, f32, 3>>,
}

impl ForwardPlan {
    /// Computes the problem. On the CPU it is done on return. On a GPU it is enqueued on the stream, without allocating,
    /// waiting or loading anything; the borrows may end at once (the crate's documentation says why that is sound).
    ///
    /// # Errors
    /// Before anything is launched: [`Error::Dtype`], [`Error::Shape`] and [`Error::Value`] for arguments that are not
    /// the problem's; [`Error::Device`] for a stream, workspace or tensor that is not where the plan is;
    /// [`Error::Workspace`] for one that is too small; [`Error::Layout`] for addresses and strides that are not
    /// multiples of 16 bytes on a GPU; [`Error::Capture`] while the stream is captured and cudarc tracks events;
    /// [`Error::Driver`] for errors of the driver, including those of earlier work that surface now.
    /// [`Error::Launch`] when the launch itself fails.
    pub fn run<T: Operand>(&self, stream: &Stream, workspace: &mut Workspace, args: ForwardArgs<'_, T>) -> Result<()> {
        check(self.problem(), &args)?;
        match (self.target(), stream) {
            (Target::Cpu, Stream::Cpu) => {
                workspace.check(self.workspace_bytes(), stream)?;
                run_cpu(self.problem(), args)
            }
            #[cfg(feature = "cuda")]
            (Target::Gpu(gpu), Stream::Cuda(cuda)) => {
                let device = gpu.device.as_ref().ok_or_else(|| crate::raw::not_on_a_gpu(self.target()))?;
                same_gpu(device, cuda)?;
                workspace.check(self.workspace_bytes(), stream)?;
                cuda::run(self, cuda, workspace, args)
            }
            (target, stream) => Err(Error::Device {
                what: "stream",
                got: stream.to_string(),
                allowed: format!("{target}, which the plan was made for"),
            }),
        }
    }
}

#[cfg(feature = "cuda")]
use cuda::same_gpu;

fn run_cpu<T: Operand>(problem: &ForwardProblem, mut args: ForwardArgs<'_, T>) -> Result<()> {
    let elsewhere = |what| Error::Device { what, got: "a GPU".into(), allowed: "cpu, the plan's".into() };
    let q = args.q.as_host().ok_or_else(|| elsewhere("q"))?;
    let k = args.k.as_host().ok_or_else(|| elsewhere("k"))?;
    let v = args.v.as_host().ok_or_else(|| elsewhere("v"))?;
    let o = args.o.as_host().ok_or_else(|| elsewhere("o"))?;
    let lse = match &mut args.lse {
        Some(lse) => Some(lse.as_host().ok_or_else(|| elsewhere("lse"))?),
        None => None,
    };
    if problem.is_empty() {
        return Ok(());
    }
    cpu::forward(problem, q, k, v, o, lse)
}

/// What every device checks: types, shapes, and that the LSE is given exactly when it was asked for.
fn check<T: Operand>(problem: &ForwardProblem, args: &ForwardArgs<'_, T>) -> Result<()> {
    check_dtype("q, k and v", T::DTYPE, problem.dtype(), "the problem's")?;
    let layouts = [args.q.layout(), args.k.layout(), args.v.layout(), args.o.layout()];
    check_shapes(problem, layouts, args.lse.as_ref().map(TensorMut::layout))
}

pub(crate) fn check_dtype(what: &'static str, got: DType, want: DType, whose: &str) -> Result<()> {
    if got == want {
        return Ok(());
    }
    Err(Error::Dtype { what, got, allowed: format!("{want}, {whose}") })
}

/// Layouts of q, k, v and o, and of the LSE if it was given.
pub(crate) fn check_shapes(problem: &ForwardProblem, given: [Layout<4>; 4], lse: Option<Layout<3>>) -> Result<()> {
    let [q, k, v, o] = given.map(|layout| layout.shape());
    shape("q", q, problem.q_shape())?;
    shape("k", k, problem.k_shape())?;
    shape("v", v, problem.v_shape())?;
    shape("o", o, problem.o_shape())?;
    if let Some(lse) = lse {
        shape("lse", lse.shape(), problem.lse_shape())?;
    }
    check_lse_presence(problem, lse.is_some())
}

fn shape<const R: usize>(tensor: &'static str, got: [usize; R], want: [usize; R]) -> Result<()> {
    if got == want {
        return Ok(());
    }
    let axes = if R == 3 { "[batch, heads, seqlen]" } else { "[batch, seqlen, heads, head_dim]" };
    Err(Error::Shape { tensor, got: got.into(), want: want.into(), axes })
}

fn check_lse_presence(problem: &ForwardProblem, given: bool) -> Result<()> {
    let refuse = |got: &str, allowed: &str| Err(Error::Value { what: "lse", got: got.into(), allowed: allowed.into() });
    match (problem.wants_lse(), given) {
        (true, false) => refuse("missing", "the tensor that the problem, made with lse(true), writes"),
        (false, true) => refuse("given", "none, since the problem was made without lse(true)"),
        _ => Ok(()),
    }
}
