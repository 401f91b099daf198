//! The oracle: attention in f64 from plain loops, the plain same-precision computation, and the tolerance law that
//! compares anything with them.
//!
//! It shares nothing with the kernels, the plans or the CPU backend, so that it is able to disagree with them: it knows
//! a problem's numbers and asks [`Mask::keep`](crate::Mask::keep) for every query and key. It is meant for tests and
//! for `hattn check`, not for speed: the cost is that of the textbook, some seconds for `4096 x 4096` and two heads.
//!
//! ```
//! use hopper_attention::reference::{Expected, Tensor};
//! use hopper_attention::{DType, Dims, ForwardProblem};
//!
//! let dims =
//!     Dims { batch: 1, seqlen_q: 3, seqlen_kv: 5, heads_q: 2, heads_kv: 1, head_dim_qk: 8, head_dim_vo: 8 };
//! let problem = ForwardProblem::new(DType::BF16, dims)?;
//! // Values that bf16 holds exactly: the oracle must see what the kernel sees.
//! let q = Tensor::from_fn([1, 3, 2, 8], |[_, s, h, d]| (s + h + d) as f64 * 0.125);
//! let k = Tensor::from_fn([1, 5, 1, 8], |[_, s, _, d]| (s * d) as f64 * 0.125);
//! let v = Tensor::from_fn([1, 5, 1, 8], |[_, s, _, d]| s as f64 - d as f64);
//! let expected = Expected::new(&problem, &q, &k, &v)?;
//! // The plain computation obeys the law, zeros do not.
//! let plain = expected.plain();
//! assert!(expected.check(&plain.o, Some(&plain.lse))?.passed());
//! assert!(!expected.check(&Tensor::zeros([1, 3, 2, 8]), Some(&plain.lse))?.passed());
//! # Ok::<(), hopper_attention::Error>(())
//! ```

mod oracle;
mod plain;
#[cfg(test)]
pub(crate) mod sample;
mod tensor;
pub mod tolerance;

pub use oracle::{Oracle, RowScale, forward};
pub use plain::{Plain, forward_plain};
pub use tensor::Tensor;
pub use tolerance::{Expected, Report};

use crate::{Dims, Error, ForwardProblem, Result};

/// Queries that one task computes; the rows of a task share the keys in the cache.
const ROWS_PER_TASK: usize = 32;

/// The units of work of a problem: `(batch, query head, first query, queries)`, in the order of the LSE's rows.
fn tasks(dims: &Dims) -> Vec<(usize, usize, usize, usize)> {
    let mut tasks = Vec::new();
    for batch in 0..dims.batch {
        for head in 0..dims.heads_q {
            for first in (0..dims.seqlen_q).step_by(ROWS_PER_TASK) {
                tasks.push((batch, head, first, ROWS_PER_TASK.min(dims.seqlen_q - first)));
            }
        }
    }
    tasks
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

fn shape_error(tensor: &'static str, got: [usize; 4], want: [usize; 4]) -> Error {
    Error::Shape { tensor, got: got.to_vec(), want: want.to_vec(), axes: "[batch, seqlen, heads, head_dim]" }
}
