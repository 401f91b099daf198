//! What a computation reads and writes on the host, and how it lies there.

use std::time::Duration;

use anyhow::Result;
use hopper_attention::reference::Tensor;
use hopper_attention::{E4M3, ForwardProblem, Layout};

use crate::args::FileLayout;
use crate::layout::strided;
use crate::values::{GivenGradients, Qkv, Value, filled};

/// What came out, in the file's order of dimensions.
pub struct Computed<T> {
    /// As `problem.o_shape()`, laid out like the input.
    pub o: Vec<T>,
    /// `[batch, heads_q, seqlen_q]`.
    pub lse: Vec<f32>,
    /// The median over the runs: wall time on a CPU, time between CUDA events on a GPU; copies are not counted.
    pub time: Duration,
    /// With `--fp8`, what q, k and v were quantised to.
    pub operands: Option<Operands>,
}

impl<T: Value> Computed<T> {
    /// NaN, so that an element that is never written cannot pass for a result.
    pub(super) fn poisoned(layouts: &Layouts) -> Result<Self> {
        let o = filled(T::from_f32(f32::NAN), layouts.o.span())?;
        let lse = filled(f32::NAN, layouts.lse.span())?;
        Ok(Self { o, lse, time: Duration::ZERO, operands: None })
    }
}

/// Gradients in the order in which they are computed.
pub const GRADIENTS: [&str; 3] = ["d_q", "d_k", "d_v"];

/// The gradients that came out, each laid out as the input that it is the gradient of.
pub struct Gradients<T> {
    /// d_q, d_k and d_v.
    pub data: [Vec<T>; 3],
    /// As [`Computed::time`].
    pub time: Duration,
}

impl<T: Value> Gradients<T> {
    /// NaN, as in [`Computed::poisoned`].
    pub(super) fn poisoned(layouts: &Layouts) -> Result<Self> {
        let poisoned = |elements| filled(T::from_f32(f32::NAN), elements);
        let data = [poisoned(layouts.q.span())?, poisoned(layouts.k.span())?, poisoned(layouts.v.span())?];
        Ok(Self { data, time: Duration::ZERO })
    }
}

/// What a backward pass reads.
pub(super) struct Inputs<'a, T> {
    pub qkv: &'a Qkv<T>,
    pub given: &'a GivenGradients<T>,
    pub forward: &'a Computed<T>,
}

/// Where the tensors of a problem lie; a gradient lies as what it is of.
pub(super) struct Layouts {
    pub q: Layout<4>,
    pub k: Layout<4>,
    pub v: Layout<4>,
    pub o: Layout<4>,
    pub lse: Layout<3>,
}

impl Layouts {
    pub fn new(problem: &ForwardProblem, layout: FileLayout) -> Result<Self> {
        Ok(Self {
            q: strided(layout, problem.q_shape())?,
            k: strided(layout, problem.k_shape())?,
            v: strided(layout, problem.v_shape())?,
            o: strided(layout, problem.o_shape())?,
            lse: Layout::contiguous(problem.lse_shape())?,
        })
    }
}

/// What q, k and v were quantised to, in the file's order of dimensions, with their factors `[batch, heads, blocks]`.
pub struct Operands {
    pub(super) stored: [Vec<E4M3>; 3],
    pub(super) descale: [Vec<f32>; 3],
}

impl Operands {
    /// Zeros, as many as there are values, and as many factors as `of_factors` reaches.
    pub(super) fn zeros<T>(qkv: &Qkv<T>, [of_q, of_k, of_v]: [Layout<3>; 3]) -> Result<Self> {
        let zero = E4M3::from_bits(0);
        let [q, k, v] = &qkv.data;
        Ok(Self {
            stored: [filled(zero, q.len())?, filled(zero, k.len())?, filled(zero, v.len())?],
            descale: [filled(0.0, of_q.span())?, filled(0.0, of_k.span())?, filled(0.0, of_v.span())?],
        })
    }

    /// The real values that they stand for.
    pub fn real(&self, problem: &ForwardProblem, layout: FileLayout) -> Result<[Tensor; 3]> {
        let Layouts { q, k, v, .. } = Layouts::new(problem, layout)?;
        let ([stored_q, stored_k, stored_v], [of_q, of_k, of_v]) = (&self.stored, factors(problem)?);
        let [descale_q, descale_k, descale_v] = &self.descale;
        let scaling = problem.scaling_value().unwrap_or_default();
        let real = |stored: &[E4M3], layout: Layout<4>, descale: &[f32], of: Layout<3>, group: usize| {
            Tensor::from_strided(stored, &layout).descaled(|[batch, token, head]| {
                let place = of.offset(scaling.index(batch, head, group, token));
                place.map_or(f32::NAN, |place| descale[place])
            })
        };
        Ok([
            real(stored_q, q, descale_q, of_q, problem.group_size()),
            real(stored_k, k, descale_k, of_k, 1),
            real(stored_v, v, descale_v, of_v, 1),
        ])
    }
}

/// Where the factors of q, k and v lie.
pub(super) fn factors(problem: &ForwardProblem) -> hopper_attention::Result<[Layout<3>; 3]> {
    Ok([
        Layout::contiguous(problem.descale_q_shape())?,
        Layout::contiguous(problem.descale_k_shape())?,
        Layout::contiguous(problem.descale_v_shape())?,
    ])
}

pub(super) fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
