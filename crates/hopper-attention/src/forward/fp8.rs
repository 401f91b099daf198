//! Running a forward plan of e4m3 operands.

use super::check_shapes;
use crate::cpu::{self, Fp8Inputs, Fp8Outputs};
use crate::{
    E4M3, Error, ForwardPlan, ForwardProblem, Fp8Output, Layout, Result, Stream, TensorMut, TensorRef, Workspace,
    checks,
};

/// What a forward pass of e4m3 operands reads and writes. Every tensor's logical order is
/// `[batch, seqlen, heads, head_dim]`, whatever its strides; factors are `[batch, heads, blocks]` in the shapes that
/// [`Scaling`](crate::Scaling) gives. They are finite and above 0, which the CPU checks and a GPU takes for granted.
pub struct Fp8ForwardArgs<'a, O: Fp8Output> {
    /// Queries, `[batch, seqlen_q, heads_q, head_dim_qk]`.
    pub q: TensorRef<'a, E4M3, 4>,
    /// Keys, `[batch, seqlen_kv, heads_kv, head_dim_qk]`.
    pub k: TensorRef<'a, E4M3, 4>,
    /// Values, `[batch, seqlen_kv, heads_kv, head_dim_vo]`. What a NaN reaches is as for
    /// [`ForwardArgs`](crate::ForwardArgs).
    pub v: TensorRef<'a, E4M3, 4>,
    /// A stored query times this is the query: [`descale_q_shape`](ForwardProblem::descale_q_shape).
    pub descale_q: TensorRef<'a, f32, 3>,
    /// A stored key times this is the key: [`descale_k_shape`](ForwardProblem::descale_k_shape).
    pub descale_k: TensorRef<'a, f32, 3>,
    /// A stored value times this is the value: [`descale_v_shape`](ForwardProblem::descale_v_shape).
    pub descale_v: TensorRef<'a, f32, 3>,
    /// The output, `[batch, seqlen_q, heads_q, head_dim_vo]`, of the type that the problem
    /// [chose](ForwardProblem::output).
    pub o: TensorMut<'a, O, 4>,
    /// The log-sum-exp of each row of scores, natural log, `[batch, heads_q, seqlen_q]`: given exactly when the problem
    /// was made with [`lse(true)`](ForwardProblem::lse).
    pub lse: Option<TensorMut<'a, f32, 3>>,
    /// What O is multiplied by before it is rounded to e4m3, `[1]`: given exactly when the output is e4m3. What is beyond
    /// 448 then is stored as 448.
    pub scale_o: Option<TensorRef<'a, f32, 1>>,
    /// The largest magnitude of O, `[1]`: given exactly when the problem was made with
    /// [`amax(true)`](ForwardProblem::amax).
    pub amax: Option<TensorMut<'a, f32, 1>>,
}

impl ForwardPlan {
    /// [`run`](Self::run) of a problem with e4m3 operands.
    ///
    /// # Errors
    /// As [`run`](Self::run), and on the CPU [`Error::Value`] for a factor that is not finite and above 0.
    pub fn run_fp8<O: Fp8Output>(
        &self,
        stream: &Stream,
        workspace: &mut Workspace,
        args: Fp8ForwardArgs<'_, O>,
    ) -> Result<()> {
        check(self.problem(), &args)?;
        self.target().accept(stream, workspace, self.workspace_bytes())?;
        match stream {
            Stream::Cpu => run_cpu(self.problem(), args),
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => super::cuda::run_fp8(self, stream, workspace, args),
        }
    }
}

fn run_cpu<O: Fp8Output>(problem: &ForwardProblem, mut args: Fp8ForwardArgs<'_, O>) -> Result<()> {
    let inputs = Fp8Inputs {
        q: checks::host("q", &args.q)?,
        k: checks::host("k", &args.k)?,
        v: checks::host("v", &args.v)?,
        descale_q: checks::host("descale_q", &args.descale_q)?,
        descale_k: checks::host("descale_k", &args.descale_k)?,
        descale_v: checks::host("descale_v", &args.descale_v)?,
        scale_o: match &args.scale_o {
            Some(scale_o) => checks::host("scale_o", scale_o)?.data[0],
            None => 1.0,
        },
    };
    let outputs = Fp8Outputs {
        o: checks::host_mut("o", &mut args.o)?,
        lse: args.lse.as_mut().map(|lse| checks::host_mut("lse", lse)).transpose()?,
        amax: args.amax.as_mut().map(|amax| checks::host_mut("amax", amax)).transpose()?,
    };
    cpu::forward_fp8(problem, &inputs, outputs)
}

/// What every device checks: types, shapes, and that options are given exactly when they were asked for.
fn check<O: Fp8Output>(problem: &ForwardProblem, args: &Fp8ForwardArgs<'_, O>) -> Result<()> {
    checks::dtype("q, k and v", crate::DType::E4M3, problem.dtype(), "the problem's")?;
    checks::dtype("o", O::DTYPE, problem.output_dtype(), "the problem's")?;
    let layouts = [args.q.layout(), args.k.layout(), args.v.layout(), args.o.layout()];
    check_shapes(problem, layouts, args.lse.as_ref().map(TensorMut::layout))?;
    let factors = [args.descale_q.layout(), args.descale_k.layout(), args.descale_v.layout()];
    let scale_o = args.scale_o.as_ref().map(TensorRef::layout);
    check_factors(problem, factors, scale_o, args.amax.as_ref().map(TensorMut::layout))
}

/// Layouts of the factors of q, k and v, and of scale_o and amax where they were given.
pub(crate) fn check_factors(
    problem: &ForwardProblem,
    factors: [Layout<3>; 3],
    scale_o: Option<Layout<1>>,
    amax: Option<Layout<1>>,
) -> Result<()> {
    let [q, k, v] = factors.map(|layout| layout.shape());
    checks::factors("descale_q", q, problem.descale_q_shape())?;
    checks::factors("descale_k", k, problem.descale_k_shape())?;
    checks::factors("descale_v", v, problem.descale_v_shape())?;
    for (tensor, given) in [("scale_o", scale_o), ("amax", amax)] {
        if let Some(layout) = given {
            checks::shape_of(tensor, layout.shape(), [1], "[1]")?;
        }
    }
    match (problem.takes_scale_o(), scale_o) {
        (true, None) => Err(Error::Value {
            what: "scale_o",
            got: "missing".into(),
            allowed: "the factor of an output of e4m3".into(),
        }),
        (false, Some(_)) => Err(Error::Value {
            what: "scale_o",
            got: "given".into(),
            allowed: format!("none, since the output is {}", problem.output_dtype()),
        }),
        _ => checks::presence("amax", problem.wants_amax(), amax.is_some(), "writes"),
    }
}
