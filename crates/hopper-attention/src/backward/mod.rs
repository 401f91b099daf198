//! Running a backward plan.

#[cfg(feature = "cuda")]
mod cuda;

use crate::cpu::{self, BackwardInputs, BackwardOutputs};
use crate::{BackwardPlan, BackwardProblem, Layout, Operand, Result, Stream, TensorMut, TensorRef, Workspace, checks};

/// What a backward pass reads and writes. Every tensor's logical order is `[batch, seqlen, heads, head_dim]`, whatever
/// its strides.
///
/// A NaN in an input makes those gradients NaN that it reaches through a pair of query and key that the mask keeps; what
/// an infinity leads to in these places is an infinity or a NaN. On the CPU it reaches no others; on a GPU also those of
/// masked pairs that share a block with it, since the products take whole blocks, and what makes a query's
/// `rowsum(d_o * o) - d_lse` infinite or NaN reaches dV as well, since it is one operand with the query's LSE.
pub struct BackwardArgs<'a, T: Operand<Out = T>> {
    /// Queries, `[batch, seqlen_q, heads_q, head_dim_qk]`.
    pub q: TensorRef<'a, T, 4>,
    /// Keys, `[batch, seqlen_kv, heads_kv, head_dim_qk]`.
    pub k: TensorRef<'a, T, 4>,
    /// Values, `[batch, seqlen_kv, heads_kv, head_dim_vo]`.
    pub v: TensorRef<'a, T, 4>,
    /// The forward pass's output, `[batch, seqlen_q, heads_q, head_dim_vo]`.
    pub o: TensorRef<'a, T, 4>,
    /// The forward pass's log-sum-exp, natural log, `[batch, heads_q, seqlen_q]`. A row of -inf has no part in any
    /// gradient, and its own is 0.
    pub lse: TensorRef<'a, f32, 3>,
    /// The gradient of the output, `[batch, seqlen_q, heads_q, head_dim_vo]`.
    pub d_o: TensorRef<'a, T, 4>,
    /// The gradient of the log-sum-exp, `[batch, heads_q, seqlen_q]`: given exactly when the problem was made with
    /// [`d_lse(true)`](BackwardProblem::d_lse).
    pub d_lse: Option<TensorRef<'a, f32, 3>>,
    /// The gradient of the queries, `[batch, seqlen_q, heads_q, head_dim_qk]`.
    pub d_q: TensorMut<'a, T, 4>,
    /// The gradient of the keys, `[batch, seqlen_kv, heads_kv, head_dim_qk]`, summed over the query heads that read them.
    pub d_k: TensorMut<'a, T, 4>,
    /// The gradient of the values, `[batch, seqlen_kv, heads_kv, head_dim_vo]`, summed over the query heads that read
    /// them.
    pub d_v: TensorMut<'a, T, 4>,
}

impl BackwardPlan {
    /// Computes the gradients. On the CPU they are there on return. On a GPU the work is enqueued on the stream, without
    /// allocating, waiting or loading anything; the borrows may end at once (the crate's documentation says why that is
    /// sound). Outputs are overwritten, not added to.
    ///
    /// # Errors
    /// As [`ForwardPlan::run`](crate::ForwardPlan::run).
    pub fn run<T: Operand<Out = T>>(
        &self,
        stream: &Stream,
        workspace: &mut Workspace,
        args: BackwardArgs<'_, T>,
    ) -> Result<()> {
        check(self.problem(), &args)?;
        self.target().accept(stream, workspace, self.workspace_bytes())?;
        match stream {
            Stream::Cpu => run_cpu(self.problem(), args),
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => cuda::run(self, stream, workspace, args),
        }
    }
}

fn run_cpu<T: Operand<Out = T>>(problem: &BackwardProblem, mut args: BackwardArgs<'_, T>) -> Result<()> {
    let inputs = BackwardInputs {
        q: checks::host("q", &args.q)?,
        k: checks::host("k", &args.k)?,
        v: checks::host("v", &args.v)?,
        o: checks::host("o", &args.o)?,
        lse: checks::host("lse", &args.lse)?,
        d_o: checks::host("d_o", &args.d_o)?,
        d_lse: args.d_lse.as_ref().map(|d_lse| checks::host("d_lse", d_lse)).transpose()?,
    };
    let outputs = BackwardOutputs {
        d_q: checks::host_mut("d_q", &mut args.d_q)?,
        d_k: checks::host_mut("d_k", &mut args.d_k)?,
        d_v: checks::host_mut("d_v", &mut args.d_v)?,
    };
    cpu::backward(problem, &inputs, outputs)
}

/// What every device checks: types, shapes, and that the gradient of the LSE is given exactly when it was announced.
fn check<T: Operand<Out = T>>(problem: &BackwardProblem, args: &BackwardArgs<'_, T>) -> Result<()> {
    checks::dtype("q, k and v", T::DTYPE, problem.dtype(), "the problem's")?;
    Layouts::of(args).check(problem)
}

/// How the tensors of a backward pass lie in memory.
pub(crate) struct Layouts {
    pub q: Layout<4>,
    pub k: Layout<4>,
    pub v: Layout<4>,
    pub o: Layout<4>,
    pub lse: Layout<3>,
    pub d_o: Layout<4>,
    pub d_lse: Option<Layout<3>>,
    pub d_q: Layout<4>,
    pub d_k: Layout<4>,
    pub d_v: Layout<4>,
}

impl Layouts {
    fn of<T: Operand<Out = T>>(args: &BackwardArgs<'_, T>) -> Self {
        Self {
            q: args.q.layout(),
            k: args.k.layout(),
            v: args.v.layout(),
            o: args.o.layout(),
            lse: args.lse.layout(),
            d_o: args.d_o.layout(),
            d_lse: args.d_lse.as_ref().map(TensorRef::layout),
            d_q: args.d_q.layout(),
            d_k: args.d_k.layout(),
            d_v: args.d_v.layout(),
        }
    }

    /// Whether the shapes are the problem's.
    pub fn check(&self, problem: &BackwardProblem) -> Result<()> {
        let forward = problem.forward();
        crate::forward::check_shapes(forward, [self.q, self.k, self.v, self.o], Some(self.lse))?;
        checks::shape("d_o", self.d_o.shape(), problem.d_o_shape())?;
        checks::shape("d_q", self.d_q.shape(), problem.d_q_shape())?;
        checks::shape("d_k", self.d_k.shape(), problem.d_k_shape())?;
        checks::shape("d_v", self.d_v.shape(), problem.d_v_shape())?;
        if let Some(d_lse) = self.d_lse {
            checks::shape("d_lse", d_lse.shape(), problem.d_lse_shape())?;
        }
        checks::presence("d_lse", problem.takes_d_lse(), self.d_lse.is_some(), "reads")
    }
}
