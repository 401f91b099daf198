//! The oracle: attention and its gradients in f64 from plain loops, the plain same-precision computation, and the
//! tolerance that compares anything with them.
//!
//! It shares nothing with the kernels, the plans or the CPU backend, so that it is able to disagree with them: it knows
//! a problem's numbers and asks [`Mask::keep`](crate::Mask::keep) for every query and key. It is meant for tests and
//! for `hattn check`, not for speed: the cost is that of the textbook, some seconds for `4096 x 4096` and two heads, and
//! five times that for gradients. [`BackwardExpected`] judges those; its oracle computes O and the LSE anew, so that it
//! disagrees with a backward pass that was given wrong ones.
//!
//! ```
//! use hopper_attention::reference::{Expected, Tensor};
//! use hopper_attention::{DType, Dims, ForwardProblem};
//!
//! let dims = Dims::new(1, 3, 2, 8).with_seqlen_kv(5).with_heads_kv(1);
//! let problem = ForwardProblem::builder(DType::BF16, dims).build()?;
//! // Values that bf16 holds exactly: the oracle must see what the kernel sees.
//! let q = Tensor::from_fn([1, 3, 2, 8], |[_, s, h, d]| (s + h + d) as f64 * 0.125);
//! let k = Tensor::from_fn([1, 5, 1, 8], |[_, s, _, d]| (s * d) as f64 * 0.125);
//! let v = Tensor::from_fn([1, 5, 1, 8], |[_, s, _, d]| s as f64 - d as f64);
//! let expected = Expected::new(&problem, &q, &k, &v)?;
//! // The plain computation keeps the tolerance, zeros do not.
//! let plain = expected.plain();
//! assert!(expected.check(&plain.o, Some(&plain.lse))?.passed());
//! assert!(!expected.check(&Tensor::zeros([1, 3, 2, 8]), Some(&plain.lse))?.passed());
//! # Ok::<(), hopper_attention::Error>(())
//! ```

mod oracle;
mod plain;
mod rounding;
#[cfg(test)]
pub(crate) mod sample;
mod tensor;
pub mod tolerance;

pub use oracle::{BackwardOracle, GradientScale, Oracle, RowScale, backward, forward};
pub use plain::{BackwardPlain, Plain, backward_plain, forward_plain};
pub use tensor::Tensor;
pub use tolerance::{BackwardExpected, BackwardReport, Expected, Report};

use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::problem::{BackwardProblem, ForwardProblem};

/// Tokens that one task computes at least; neighbours share what they read in the cache.
const ROWS_PER_TASK: usize = 32;

/// What `row` makes of every token `[batch, head, token]`, in this order, which is the LSE's, computed on all cores.
fn each_row<R: Send>(shape: [usize; 3], row: impl Fn([usize; 3]) -> R + Sync) -> Vec<R> {
    let rows = shape.iter().product::<usize>();
    (0..rows).into_par_iter().with_min_len(ROWS_PER_TASK).map(|i| row(place(shape, i))).collect()
}

/// `[batch, head, token]` of a row in this order.
fn place([_, heads, seqlen]: [usize; 3], row: usize) -> [usize; 3] {
    [row / seqlen / heads, row / seqlen % heads, row % seqlen]
}

/// A tensor of rows in this order; `write` copies one.
fn gather<R>(shape: [usize; 4], rows: &[R], write: impl Fn(&R, &mut [f64])) -> Tensor {
    let [batch, seqlen, heads, _] = shape;
    let mut tensor = Tensor::zeros(shape);
    for (i, row) in rows.iter().enumerate() {
        let [batch, head, token] = place([batch, heads, seqlen], i);
        write(row, tensor.row_mut(batch, token, head));
    }
    tensor
}

/// Refuses inputs whose shapes are not the problem's.
fn check_inputs(problem: &ForwardProblem, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
    let inputs = [("q", q, problem.q_shape()), ("k", k, problem.k_shape()), ("v", v, problem.v_shape())];
    for (tensor, got, want) in inputs {
        if got.shape() != want {
            return Err(shape_error(tensor, got.shape(), want));
        }
    }
    Ok(())
}

/// Refuses inputs of a backward pass whose shapes are not the problem's, and a gradient of the LSE where none belongs.
fn check_backward_inputs(problem: &BackwardProblem, inputs: [&Tensor; 4], d_lse: Option<&[f64]>) -> Result<()> {
    let [q, k, v, d_o] = inputs;
    check_inputs(problem.forward(), q, k, v)?;
    if d_o.shape() != problem.d_o_shape() {
        return Err(shape_error("d_o", d_o.shape(), problem.d_o_shape()));
    }
    let want = problem.d_lse_shape();
    if let Some(d_lse) = d_lse
        && d_lse.len() != want.iter().product::<usize>()
    {
        let axes = "[batch, heads_q, seqlen_q]";
        return Err(Error::Shape { tensor: "d_lse", got: vec![d_lse.len()], want: want.into(), axes });
    }
    let refuse =
        |got: &str, allowed: &str| Err(Error::Value { what: "d_lse", got: got.into(), allowed: allowed.into() });
    match (problem.takes_d_lse(), d_lse.is_some()) {
        (true, false) => refuse("missing", "the gradient that the problem, made with d_lse(true), reads"),
        (false, true) => refuse("given", "none, since the problem was made without d_lse(true)"),
        _ => Ok(()),
    }
}

fn shape_error(tensor: &'static str, got: [usize; 4], want: [usize; 4]) -> Error {
    Error::Shape { tensor, got: got.to_vec(), want: want.to_vec(), axes: "[batch, seqlen, heads, head_dim]" }
}
