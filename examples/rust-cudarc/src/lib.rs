//! Hopper Attention in a Rust stack: what the attention layers of a model need around the library.
//!
//! [`PlanCache`] keeps plans by shape; `gpu::Step` holds a model's buffers on a GPU, with one workspace and one
//! CUDA graph for all its calls; [`cpu::run`] computes the same where there is no GPU.

pub mod cache;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod gpu;

pub use cache::PlanCache;

use hopper_attention::reference::{Expected, Report, Tensor};
use hopper_attention::{DType, Dims, ForwardProblem, Layout, Mask, Result, bf16};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};

/// One attention call of a model, with its inputs in host memory: dense, `[batch, seqlen, heads, head_dim]`.
pub struct Call {
    /// What it computes.
    pub problem: ForwardProblem,
    /// Queries.
    pub q: Vec<bf16>,
    /// Keys.
    pub k: Vec<bf16>,
    /// Values.
    pub v: Vec<bf16>,
}

/// What a call gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The output, in the order of the queries.
    pub o: Vec<bf16>,
    /// The log-sum-exp of each row, `[batch, heads_q, seqlen_q]`.
    pub lse: Vec<f32>,
}

/// The calls of one step of a small made-up model: two decoder layers of one shape, a windowed one, and cross-attention.
///
/// # Errors
/// None for these sizes; what the problem's builder would refuse.
pub fn step(seed: u64) -> Result<Vec<Call>> {
    let own = Dims::new(2, 197, 8, 128).with_heads_kv(2);
    let cross = Dims::new(2, 197, 8, 64).with_seqlen_kv(333);
    let layers =
        [(own, Mask::causal()), (own, Mask::causal()), (own, Mask::window(Some(64), Some(0))), (cross, Mask::Full)];
    let mut random = StdRng::seed_from_u64(seed);
    let mut normal = |shape: [usize; 4]| -> Vec<bf16> {
        let count = shape.iter().product();
        let values = Distribution::<f32>::sample_iter(StandardNormal, &mut random);
        values.take(count).map(bf16::from_f32).collect()
    };
    let mut calls = Vec::new();
    for (dims, mask) in layers {
        let problem = ForwardProblem::builder(DType::BF16, dims).mask(mask).lse(true).build()?;
        let (q, k, v) = (normal(problem.q_shape()), normal(problem.k_shape()), normal(problem.v_shape()));
        calls.push(Call { problem, q, k, v });
    }
    Ok(calls)
}

/// Holds an outcome against the f64 oracle, under the library's tolerance.
///
/// # Errors
/// When a length is not the problem's.
pub fn check(call: &Call, outcome: &Outcome) -> Result<Report> {
    let problem = &call.problem;
    let tensor = |values: &[bf16], shape| Ok(Tensor::from_strided(values, &Layout::contiguous(shape)?));
    let q = tensor(&call.q, problem.q_shape())?;
    let k = tensor(&call.k, problem.k_shape())?;
    let v = tensor(&call.v, problem.v_shape())?;
    let o = tensor(&outcome.o, problem.o_shape())?;
    let lse: Vec<f64> = outcome.lse.iter().map(|&x| x.into()).collect();
    Expected::new(problem, &q, &k, &v)?.check(&o, Some(&lse))
}
