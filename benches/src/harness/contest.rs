//! Who takes part in the Rust harness: libraries at work on a point, the clock, and the inputs that they share.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use hopper_attention::{Float, Layout};
use hopper_attention_verify::inputs::Input;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use rand_distr::StandardNormal;

use crate::point::BiasTensor;
use crate::{Direction, FileTensors, Order, Point, Role, memory};

/// Why a library does not compute a point.
#[derive(Debug)]
pub(super) enum Refusal {
    /// It has no kernel for it.
    Unsupported(String),
    /// Its call failed.
    Failed(String),
}

impl From<hopper_attention::Error> for Refusal {
    fn from(error: hopper_attention::Error) -> Self {
        match error {
            hopper_attention::Error::Unsupported { .. } => Self::Unsupported(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

impl From<anyhow::Error> for Refusal {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(format!("{error:#}"))
    }
}

/// A point and where its tensors' elements lie.
pub(super) struct Task<'a, T> {
    pub point: &'a Point,
    /// Of Q and dQ.
    pub q: Layout<4>,
    /// Of K and dK.
    pub k: Layout<4>,
    /// Of V and dV.
    pub v: Layout<4>,
    /// Of O and dO.
    pub o: Layout<4>,
    pub lse: Layout<3>,
    /// The numbers of the bias, where the point has one.
    pub bias: Option<&'a BiasTensor>,
    /// What a backward reads besides the pool: a forward's outputs.
    pub saved: Option<&'a Outputs<T>>,
}

impl<'a, T> Task<'a, T> {
    pub(super) fn new(point: &'a Point, order: Order) -> hopper_attention::Result<Self> {
        Ok(Self {
            point,
            q: point.q_layout(order)?,
            k: point.k_layout(order)?,
            v: point.v_layout(order)?,
            o: point.o_layout(order)?,
            lse: Layout::contiguous([point.batch, point.heads_q, point.seqlen_q()])?,
            bias: None,
            saved: None,
        })
    }

    /// The number that the bias adds to the score of a batch entry, head, query and key. 0 where there is none.
    pub(super) fn added(&self, pair: [usize; 4]) -> f64 {
        self.bias.map_or(0.0, |bias| bias.at(self.point.in_sequence(pair)))
    }

    /// The forward's outputs that a backward needs.
    pub(super) fn saved(&self) -> Result<&'a Outputs<T>> {
        self.saved.context("no forward was run before this backward")
    }
}

/// What a library wrote.
#[derive(Clone)]
pub(super) struct Outputs<T> {
    /// O; or dQ, dK and dV, laid out as Q, K and V.
    pub tensors: Vec<Vec<T>>,
    /// The forward's LSE, contiguous.
    pub lse: Vec<f32>,
    /// The gradient of the bias, where there is one.
    pub d_bias: Option<BiasTensor>,
}

/// A library at work on one point after the other, all of one direction.
pub(super) trait Contestant<T> {
    fn name(&self) -> &str;
    fn role(&self) -> Role;
    /// Gets ready for a point; its outputs are full of NaN afterwards.
    fn prepare(&mut self, task: &Task<'_, T>) -> Result<(), Refusal>;
    /// One forward or backward, done or enqueued.
    fn call(&mut self, task: &Task<'_, T>) -> Result<(), Refusal>;
    /// What it wrote, once all calls are done.
    fn outputs(&mut self) -> Result<Outputs<T>>;
}

/// Several, over the same inputs.
pub(super) type Contestants<'a, T> = Vec<Box<dyn Contestant<T> + 'a>>;

/// What times calls.
pub(super) trait Clock {
    /// Makes a call, with the caches as a stranger leaves them.
    fn time(&mut self, call: &mut dyn FnMut() -> Result<(), Refusal>) -> Result<(), Refusal>;
    /// Waits until all is done; the milliseconds of each call since the last wait.
    fn wait(&mut self) -> Result<Vec<f64>>;
}

/// What the harness runs on.
pub(super) trait Place {
    type Clock: Clock;
    fn clock(&self) -> Result<Self::Clock>;
    /// The libraries' forwards, over inputs that the longest point just fills: a point takes the front.
    fn forwards<'a, T: Float>(&'a self, pool: &'a Pool<T>) -> Result<Contestants<'a, T>>;
    /// Their backwards, likewise.
    fn backwards<'a, T: Float>(&'a self, pool: &'a Pool<T>) -> Result<Contestants<'a, T>>;
}

/// Q, K and V, and dO where there are backward points: unit-variance normal values, or what a class of inputs makes of them.
pub(super) struct Pool<T> {
    pub q: Vec<T>,
    pub k: Vec<T>,
    pub v: Vec<T>,
    pub d_o: Vec<T>,
}

impl<T: Float> Pool<T> {
    /// The inputs of one point alone, of its class or of its file, where its layouts have them. A dO that the file lacks is drawn.
    pub(super) fn of(task: &Task<'_, T>, seed: u64, files: &[Arc<FileTensors>]) -> Result<Self> {
        let file = FileTensors::of(task.point, files)?;
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut draw = |input, layout: &Layout<4>| {
            let mut drawn = memory::filled(layout.span(), T::from_f32(f32::NAN))?;
            let [batch, seqlen, heads, head_dim] = layout.shape();
            let shaped = task.point.inputs.shaped(input, layout.shape(), seed);
            let of_file = file.and_then(|file| file.tensor(input));
            let mut row = memory::filled(head_dim, 0.0_f64)?;
            for (batch, token) in (0..batch).flat_map(|batch| (0..seqlen).map(move |token| (batch, token))) {
                for head in 0..heads {
                    let place = [batch, token, head];
                    if let Some(tensor) = of_file {
                        let values = tensor.row(place).filter(|values| values.len() == head_dim);
                        let values = values.context("a row of the file")?;
                        row.iter_mut().zip(values).for_each(|(x, &value)| *x = value.into());
                    } else {
                        row.iter_mut().for_each(|x| *x = rng.sample(StandardNormal));
                        shaped.row(place, &mut row);
                    }
                    let at = layout.offset([batch, token, head, 0]).context("a row within the layout")?;
                    drawn[at..at + head_dim].iter_mut().zip(&row).for_each(|(to, &x)| *to = T::from_f32(x as f32));
                }
            }
            anyhow::Ok(drawn)
        };
        Ok(Self {
            q: draw(Input::Q, &task.q)?,
            k: draw(Input::K, &task.k)?,
            v: draw(Input::V, &task.v)?,
            d_o: match task.point.direction {
                Direction::Fwd => vec![],
                Direction::Bwd => draw(Input::DO, &task.o)?,
            },
        })
    }

    /// Normal inputs, which the largest of these points fills and the others take the front of.
    pub(super) fn new(points: &[&Point], seed: u64) -> Result<Self> {
        let most = |points: &[&Point], heads: fn(&Point) -> usize| {
            points.iter().map(|p| p.elements(heads(p))).max().unwrap_or(0)
        };
        let backward: Vec<&Point> = points.iter().copied().filter(|p| p.direction == Direction::Bwd).collect();
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut draw = |count| {
            let mut drawn = memory::reserved(count)?;
            drawn.extend((0..count).map(|_| T::from_f32(rng.sample(StandardNormal))));
            anyhow::Ok(drawn)
        };
        Ok(Self {
            q: draw(most(points, |p| p.heads_q))?,
            k: draw(most(points, |p| p.heads_kv))?,
            v: draw(most(points, |p| p.heads_kv))?,
            d_o: draw(most(&backward, |p| p.heads_q))?,
        })
    }
}
