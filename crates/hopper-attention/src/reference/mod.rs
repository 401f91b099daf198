//! When a result counts as right: the oracle, the plain computation, and the tolerance.
//!
//! - The *oracle* ([`forward`], [`backward`]) computes attention and its gradients in f64, from the definition.
//! - The *plain computation* ([`forward_plain`], [`backward_plain`]) does the same in the precision of the problem, without
//!   tiling. It shows how much rounding costs.
//! - The [`tolerance`] says how far a result may be from the oracle. [`Expected`] and [`BackwardExpected`] apply it.
//!
//! The oracle shares no code with the kernels, the plans or the CPU backend. So a mistake in these does not hide in the oracle
//! too. The oracle reads a problem's numbers, and asks [`Mask::keep`](crate::Mask::keep) for every query and key, and the lists
//! of blocks where there are any. The oracle of
//! a backward pass computes O and the LSE anew. So it also finds a backward pass that was given a wrong O or LSE.
//!
//! Problems with packed sequences or used lengths take the [`Lengths`](crate::Lengths) of their sequences too:
//! [`forward_of`], [`backward_of`], [`Expected::of`] and others. Each sequence is computed as a problem of its own. Rows of no
//! sequence are judged only where the problem fills gaps.
//!
//! Problems with [`Modifiers`] (attention sinks, a bias, ALiBi slopes, lists of blocks, dropout) take these too:
//! [`forward_with`], [`backward_with`], [`Expected::with`] and others. [`DropoutMask`] is the definition of which pairs dropout
//! keeps.
//!
//! This module is for tests and for `hattn check`. It is slow: some seconds of a core for 4096 queries, 4096 keys and
//! two heads, and two to three times that for gradients.
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

mod additive;
mod alibi;
mod blocks;
mod dropout;
mod oracle;
mod packed;
mod plain;
mod product;
mod rounding;
#[cfg(test)]
pub(crate) mod sample;
mod softcap;
mod tensor;
pub mod tolerance;
mod work;

pub use dropout::DropoutMask;
pub use oracle::{
    BackwardOracle, BiasNoise, MaxLogit, Noise, Oracle, RowScale, SinkNoise, backward, backward_of, backward_with,
    forward, forward_of, forward_with,
};
pub use plain::{
    BackwardPlain, Plain, backward_plain, backward_plain_of, backward_plain_with, forward_plain, forward_plain_of,
    forward_plain_with,
};
pub use tensor::Tensor;
pub use tolerance::{BackwardExpected, BackwardReport, Expected, Report};

use rayon::prelude::*;

use product::Tokens;
use work::Work;

use crate::blocks::BlockLists;
use crate::error::{Error, Result};
use crate::operand::{Presence, Slot};
use crate::problem::{AlibiSlopes, BackwardProblem, ForwardProblem};

/// What a problem reads beside Q, K and V that changes its softmax. The default is nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Modifiers<'a> {
    /// The attention sinks, `[heads_q]`, as the tested computation reads them: already rounded to their type. Given exactly where
    /// the problem has [`sinks`](crate::ForwardProblemBuilder::sinks).
    pub sinks: Option<&'a [f64]>,
    /// The ALiBi slopes, `[heads_q]` or `[batch, heads_q]` as the problem has them. Given exactly where the problem has
    /// [`alibi`](crate::ForwardProblemBuilder::alibi).
    pub alibi_slopes: Option<&'a [f64]>,
    /// The additive bias, `[1 or batch, 1 or heads_q, 1 or seqlen_q, seqlen_kv]` in row-major order, as the tested computation reads
    /// it: already rounded to its type. Given exactly where the problem has a [`bias`](crate::ForwardProblemBuilder::bias).
    pub bias: Option<&'a [f64]>,
    /// The lists of blocks. Given exactly where the problem has a [`block_mask`](crate::ForwardProblemBuilder::block_mask).
    pub blocks: Option<BlockLists<'a>>,
    /// Which pairs dropout keeps. Given exactly where the problem has [`dropout`](crate::ForwardProblemBuilder::dropout).
    pub dropout: Option<DropoutMask>,
}

impl<'a> Modifiers<'a> {
    /// Those of one sequence, which is a problem of its own.
    fn of_sequence(self, problem: &ForwardProblem, piece: &'a packed::Piece) -> Self {
        let heads = problem.dims().heads_q;
        let first = if problem.alibi() == Some(AlibiSlopes::PerBatch) { piece.sequence * heads } else { 0 };
        Self {
            alibi_slopes: self.alibi_slopes.map(|slopes| &slopes[first..first + heads]),
            bias: piece.bias.as_deref(),
            dropout: self.dropout.map(|mask| mask.of_sequence(piece.sequence)),
            ..self
        }
    }
}

impl Modifiers<'_> {
    /// What dropout multiplies the weights of a query and these keys by: 0 where it drops the pair, and 1 where there is none.
    fn dropped(&self, place: [usize; 2], query: usize, keys: Tokens) -> Vec<f64> {
        let keys = keys.first..keys.first + keys.count;
        self.dropout.map_or_else(|| vec![1.0; keys.len()], |mask| mask.factors(place, query, keys.clone()))
    }

    /// The sink of a query head. -inf, which changes nothing, where there are none.
    fn sink(&self, head: usize) -> f64 {
        self.sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[head])
    }

    /// Refuses what is not the problem's.
    fn check(&self, problem: &ForwardProblem) -> Result<()> {
        match (problem.block_mask(), &self.blocks) {
            (_, Some(lists)) => lists.check(problem)?,
            (Some(_), None) => {
                let (what, allowed) = ("block lists", "the lists, which the problem reads".into());
                return Err(Error::Value { what, got: "missing".into(), allowed });
            }
            (None, None) => {}
        }
        DropoutMask::check(self.dropout.as_ref(), problem)?;
        let given = [(Slot::Sinks, self.sinks), (Slot::AlibiSlopes, self.alibi_slopes), (Slot::Bias, self.bias)];
        given.into_iter().try_for_each(|(slot, list)| check_list(problem, slot, list))
    }
}

/// Refuses a list of an optional operand that is missing, that the problem does not read, or that is of another length.
fn check_list(problem: &ForwardProblem, slot: Slot, list: Option<&[f64]>) -> Result<()> {
    let operands = problem.operands();
    let Some(operand) = operands.find(slot) else { return Ok(()) };
    let name = slot.name();
    let refuse = |got: &str, allowed| Err(Error::Value { what: name, got: got.into(), allowed });
    match (operand.presence() == Presence::Required, list) {
        (true, None) => refuse("missing", format!("the {name}, which the problem reads")),
        (false, Some(_)) => refuse("given", format!("none, since the problem has no {name}")),
        (true, Some(list)) if list.len() != operand.shape().iter().product::<usize>() => Err(Error::Shape {
            tensor: name,
            got: vec![list.len()],
            want: operand.shape().into(),
            axes: operand.axes(),
        }),
        _ => Ok(()),
    }
}

/// The least number of tokens that a task computes. Neighbouring tokens read the same data, which then stays in the cache.
const ROWS_PER_TASK: usize = 32;

/// The number of pairs of a query and a key in a tile, at most, and the least and the largest number of rows in a tile. A
/// tile has some tables with a number for each pair. They shall stay in the cache. More rows share the copy that a product
/// makes of the other side's vectors.
const PAIRS_PER_TILE: usize = 1 << 17;
const ROWS_PER_TILE: [usize; 2] = [8, 64];

/// Calls `row` for every token of `shape`, which is `[batch, heads, seqlen]`, on all cores. The results are in the order of
/// `[batch, head, token]`, as in the LSE. `work` is told `units` for each row.
fn each_row<R: Send>(shape: [usize; 3], work: &Work<'_>, units: u64, row: impl Fn([usize; 3]) -> R + Sync) -> Vec<R> {
    let rows = shape.iter().product::<usize>();
    let row = |i| {
        let row = row(place(shape, i));
        work.add(units);
        row
    };
    (0..rows).into_par_iter().with_min_len(ROWS_PER_TASK).map(row).collect()
}

/// As [`each_row`], for tiles: `tile` gets the batch and the head, and some neighbouring tokens, and gives their rows.
/// Each of them is paired with `others` tokens.
fn each_tile<R: Send>(
    shape: [usize; 3],
    others: usize,
    work: &Work<'_>,
    units: u64,
    tile: impl Fn([usize; 2], Tokens) -> Vec<R> + Sync,
) -> Vec<R> {
    let [batch, heads, seqlen] = shape;
    let rows = (PAIRS_PER_TILE / others.max(1)).clamp(ROWS_PER_TILE[0], ROWS_PER_TILE[1]);
    let tiles = seqlen.div_ceil(rows);
    let tile = |i: usize| {
        let first = i % tiles * rows;
        let tokens = Tokens { first, count: rows.min(seqlen - first) };
        let of_head = i / tiles;
        let results = tile([of_head / heads, of_head % heads], tokens);
        work.add(units * tokens.count as u64);
        results
    };
    let tiles: Vec<Vec<R>> = (0..batch * heads * tiles).into_par_iter().map(tile).collect();
    tiles.into_iter().flatten().collect()
}

/// The `[batch, head, token]` of row number `row` in the order of [`each_row`].
fn place([_, heads, seqlen]: [usize; 3], row: usize) -> [usize; 3] {
    [row / seqlen / heads, row / seqlen % heads, row % seqlen]
}

/// A tensor `[batch, seqlen, heads, head_dim]` from rows in the order of [`each_row`]. `write` copies one row.
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

/// Refuses inputs of a backward pass whose shapes are not the problem's. Refuses a missing gradient of the LSE too, and one
/// that the problem does not read.
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
        (true, false) => refuse("missing", "the gradient of the LSE, which the problem reads"),
        (false, true) => refuse("given", "none, since the problem does not read it"),
        _ => Ok(()),
    }
}

fn shape_error(tensor: &'static str, got: [usize; 4], want: [usize; 4]) -> Error {
    Error::Shape { tensor, got: got.to_vec(), want: want.to_vec(), axes: "[batch, seqlen, heads, head_dim]" }
}
