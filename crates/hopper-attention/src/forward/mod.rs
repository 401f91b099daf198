//! Running a forward plan.

#[cfg(feature = "cuda")]
mod cuda;
mod fp8;

use crate::{
    ForwardPlan, ForwardProblem, Layout, Operand, Result, Stream, TensorMut, TensorRef, Workspace, checks, cpu,
};

pub use fp8::Fp8ForwardArgs;
pub(crate) use fp8::check_factors;

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
    ///
    /// [`Error::Capture`]: crate::Error::Capture
    /// [`Error::Device`]: crate::Error::Device
    /// [`Error::Driver`]: crate::Error::Driver
    /// [`Error::Dtype`]: crate::Error::Dtype
    /// [`Error::Launch`]: crate::Error::Launch
    /// [`Error::Layout`]: crate::Error::Layout
    /// [`Error::Shape`]: crate::Error::Shape
    /// [`Error::Value`]: crate::Error::Value
    /// [`Error::Workspace`]: crate::Error::Workspace
    pub fn run<T: Operand>(&self, stream: &Stream, workspace: &mut Workspace, args: ForwardArgs<'_, T>) -> Result<()> {
        check(self.problem(), &args)?;
        self.target().accept(stream, workspace, self.workspace_bytes())?;
        match stream {
            Stream::Cpu => run_cpu(self.problem(), args),
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => cuda::run(self, stream, workspace, args),
        }
    }
}

fn run_cpu<T: Operand>(problem: &ForwardProblem, mut args: ForwardArgs<'_, T>) -> Result<()> {
    let q = checks::host("q", &args.q)?;
    let k = checks::host("k", &args.k)?;
    let v = checks::host("v", &args.v)?;
    let o = checks::host_mut("o", &mut args.o)?;
    let lse = args.lse.as_mut().map(|lse| checks::host_mut("lse", lse)).transpose()?;
    if problem.is_empty() {
        return Ok(());
    }
    cpu::forward(problem, q, k, v, o, lse)
}

/// What every device checks: types, shapes, and that the LSE is given exactly when it was asked for.
fn check<T: Operand>(problem: &ForwardProblem, args: &ForwardArgs<'_, T>) -> Result<()> {
    checks::dtype("q, k and v", T::DTYPE, problem.dtype(), "the problem's")?;
    let layouts = [args.q.layout(), args.k.layout(), args.v.layout(), args.o.layout()];
    check_shapes(problem, layouts, args.lse.as_ref().map(TensorMut::layout))
}

/// Layouts of q, k, v and o, and of the LSE if it was given.
pub(crate) fn check_shapes(problem: &ForwardProblem, given: [Layout<4>; 4], lse: Option<Layout<3>>) -> Result<()> {
    let [q, k, v, o] = given.map(|layout| layout.shape());
    checks::shape("q", q, problem.q_shape())?;
    checks::shape("k", k, problem.k_shape())?;
    checks::shape("v", v, problem.v_shape())?;
    checks::shape("o", o, problem.o_shape())?;
    if let Some(lse) = lse {
        checks::shape("lse", lse.shape(), problem.lse_shape())?;
    }
    checks::presence("lse", problem.wants_lse(), lse.is_some(), "writes")
}
