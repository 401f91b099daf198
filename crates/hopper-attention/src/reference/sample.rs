//! Random inputs for the unit tests of the tolerance and of the CPU backend.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;

use super::{BackwardExpected, BackwardPlain, Tensor, backward_plain};
use crate::dtype::{DType, Element, bf16, f16};
use crate::problem::{BackwardProblem, ForwardProblem};

/// A value, rounded to the nearest value of a type.
pub(crate) fn round(dtype: DType, value: f64) -> f64 {
    f64::from(match dtype {
        DType::F16 => f16::from_f64(value).to_f32(),
        DType::BF16 => <bf16 as Element>::from_f32(value as f32).to_f32(),
        _ => value as f32,
    })
}

/// Normally distributed values with this standard deviation, rounded to the type.
pub(crate) fn normal(dtype: DType, shape: [usize; 4], deviation: f64, seed: u64) -> Tensor {
    let mut rng = StdRng::seed_from_u64(seed);
    Tensor::from_fn(shape, |_| round(dtype, deviation * rng.sample::<f64, _>(StandardNormal)))
}

/// Normally distributed q, k and v for a problem.
pub(crate) fn inputs(problem: &ForwardProblem, seed: u64) -> [Tensor; 3] {
    [(problem.q_shape(), 1), (problem.k_shape(), 2), (problem.v_shape(), 3)]
        .map(|(shape, salt)| normal(problem.dtype(), shape, 1.0, seed * 8 + salt))
}

/// The inputs of a backward pass without O and the LSE.
#[derive(Clone)]
pub(crate) struct Given {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub d_o: Tensor,
    pub d_lse: Option<Vec<f64>>,
}

impl Given {
    /// Normally distributed inputs.
    pub fn normal(problem: &BackwardProblem, seed: u64) -> Self {
        let [q, k, v] = inputs(problem.forward(), seed);
        let d_o = normal(problem.dtype(), problem.d_o_shape(), 1.0, seed * 8 + 4);
        let [batch, heads, seqlen] = problem.d_lse_shape();
        let d_lse = || normal(DType::F32, [batch, heads, seqlen, 1], 1.0, seed * 8 + 5).data().to_vec();
        Self { q, k, v, d_o, d_lse: problem.takes_d_lse().then(d_lse) }
    }

    pub fn expected(&self, problem: &BackwardProblem) -> BackwardExpected {
        BackwardExpected::new(problem, &self.q, &self.k, &self.v, &self.d_o, self.d_lse.as_deref()).unwrap()
    }

    pub fn plain(&self, problem: &BackwardProblem) -> BackwardPlain {
        backward_plain(problem, &self.q, &self.k, &self.v, &self.d_o, self.d_lse.as_deref()).unwrap()
    }
}
