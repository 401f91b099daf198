//! A small language model of bytes, trained on the repository's own text through candle's autograd.

use std::collections::BTreeSet;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, loss::cross_entropy, ops::rms_norm_slow};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;

use crate::Attend;

/// What the model learns to write.
const TEXT: &str = concat!(
    include_str!("../../../ARCHITECTURE.md"),
    include_str!("../../../CONTRIBUTING.md"),
    include_str!("../../../benches/LOG.md"),
);

/// The sizes of a model and of its training.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Sequences in a step.
    pub batch: usize,
    /// Bytes in a sequence.
    pub seqlen: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key heads.
    pub heads_kv: usize,
    /// Elements in a head.
    pub head_dim: usize,
    /// Training steps.
    pub steps: usize,
    /// How far a step goes.
    pub learning_rate: f64,
}

/// The weights. All of them are variables of candle.
struct Model {
    setup: Setup,
    symbols: Var,
    positions: Var,
    layers: Vec<Layer>,
    norm: Var,
    output: Var,
}

struct Layer {
    norm_attention: Var,
    query: Var,
    key: Var,
    value: Var,
    context: Var,
    norm: Var,
    inner: Var,
    outer: Var,
}

impl Model {
    /// Weights that follow from the seed alone, on any device.
    fn new(setup: Setup, symbols: usize, seed: u64, device: &Device) -> Result<Self> {
        let mut random = StdRng::seed_from_u64(seed);
        let mut matrix = |rows: usize, columns: usize, scale: f64| {
            let values = (0..rows * columns).map(|_| (scale * random.sample::<f64, _>(StandardNormal)) as f32);
            Var::from_tensor(&Tensor::from_iter(values, device)?.reshape((rows, columns))?)
        };
        let Setup { seqlen, layers, heads_q, heads_kv, head_dim, .. } = setup;
        let width = heads_q * head_dim;
        let ones = || Var::ones(width, DType::F32, device);
        let scale = (width as f64).sqrt().recip();
        let mut layer = || -> Result<Layer> {
            Ok(Layer {
                norm_attention: ones()?,
                query: matrix(width, width, scale)?,
                key: matrix(width, heads_kv * head_dim, scale)?,
                value: matrix(width, heads_kv * head_dim, scale)?,
                context: matrix(width, width, scale / 2.0)?,
                norm: ones()?,
                inner: matrix(width, 4 * width, scale)?,
                outer: matrix(4 * width, width, scale / 4.0)?,
            })
        };
        let layers = (0..layers).map(|_| layer()).collect::<Result<_>>()?;
        Ok(Self {
            setup,
            symbols: matrix(symbols, width, 0.5)?,
            positions: matrix(seqlen, width, 0.5)?,
            layers,
            norm: ones()?,
            output: matrix(width, symbols, scale)?,
        })
    }

    fn variables(&self) -> Vec<Var> {
        let ends = [&self.symbols, &self.positions, &self.norm, &self.output];
        let of_layer = |l: &Layer| {
            [&l.norm_attention, &l.query, &l.key, &l.value, &l.context, &l.norm, &l.inner, &l.outer].map(Var::clone)
        };
        ends.into_iter().cloned().chain(self.layers.iter().flat_map(of_layer)).collect()
    }

    /// The scores of the next symbol at each place, `[batch * seqlen, symbols]`.
    fn forward(&self, symbols: &Tensor, attend: Attend<'_>) -> Result<Tensor> {
        let Setup { batch, seqlen, heads_q, heads_kv, head_dim, .. } = self.setup;
        let width = heads_q * head_dim;
        let x = self.symbols.index_select(&symbols.flatten_all()?, 0)?.reshape((batch, seqlen, width))?;
        let mut x = x.broadcast_add(&self.positions)?.reshape((batch * seqlen, width))?;
        for layer in &self.layers {
            let h = rms_norm_slow(&x, &layer.norm_attention, 1e-5)?;
            let heads = |weight: &Var, heads| h.matmul(weight)?.reshape((batch, seqlen, heads, head_dim));
            let o =
                attend(&heads(&layer.query, heads_q)?, &heads(&layer.key, heads_kv)?, &heads(&layer.value, heads_kv)?)?;
            x = (x + o.reshape((batch * seqlen, width))?.matmul(&layer.context)?)?;
            let h = rms_norm_slow(&x, &layer.norm, 1e-5)?;
            x = (x + h.matmul(&layer.inner)?.gelu()?.matmul(&layer.outer)?)?;
        }
        rms_norm_slow(&x, &self.norm, 1e-5)?.matmul(&self.output)
    }
}

/// Trains a model and returns the loss of every step, in nats a byte. Weights and batches are the same in every call.
///
/// # Errors
/// The attention or candle refuses.
pub fn train(setup: Setup, device: &Device, attend: Attend<'_>) -> Result<Vec<f32>> {
    let alphabet: Vec<u8> = TEXT.bytes().collect::<BTreeSet<_>>().into_iter().collect();
    let text: Vec<u32> = TEXT.bytes().map(|byte| alphabet.partition_point(|&other| other < byte) as u32).collect();
    let model = Model::new(setup, alphabet.len(), 1, device)?;
    let mut optimiser = AdamW::new(model.variables(), ParamsAdamW { lr: setup.learning_rate, ..Default::default() })?;
    let mut random = StdRng::seed_from_u64(2);
    let mut losses = Vec::new();
    for _ in 0..setup.steps {
        let starts: Vec<usize> = (0..setup.batch).map(|_| random.random_range(0..text.len() - setup.seqlen)).collect();
        let batch = |shift: usize| {
            let symbols = starts.iter().flat_map(|&start| text[start + shift..][..setup.seqlen].iter().copied());
            Tensor::from_iter(symbols, device)
        };
        let scores = model.forward(&batch(0)?.reshape((setup.batch, setup.seqlen))?, attend)?;
        let loss = cross_entropy(&scores, &batch(1)?)?;
        optimiser.backward_step(&loss)?;
        losses.push(loss.to_scalar()?);
    }
    Ok(losses)
}

/// Two trainings side by side.
#[derive(Debug)]
pub struct Verdict {
    /// Whether ours learns as candle's own does.
    pub passed: bool,
    /// The figures.
    pub text: String,
}

/// Compares the losses of a training with ours and of one with candle's own attention.
///
/// `early` bounds the difference of every one of the first 20 steps, before rounding has been amplified, and `late` that of the
/// means of the last 20 steps. That mean is at most 0.65 of the first step's loss, so that something was learnt.
pub fn verdict(ours: &[f32], own: &[f32], early: f32, late: f32) -> Verdict {
    let last = |losses: &[f32]| losses.iter().rev().take(20).sum::<f32>() / losses.len().min(20) as f32;
    let first = ours.iter().zip(own).take(20).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    let (mean, mean_own) = (last(ours), last(own));
    let learnt = mean_own <= 0.65 * own.first().copied().unwrap_or(f32::NAN);
    let text = format!(
        "{} steps, loss {:.4} at first; mean of the last 20: {mean:.4} with ours, {mean_own:.4} with candle's own \
         attention; the first 20 steps differ by at most {first:.1e}",
        ours.len(),
        own.first().copied().unwrap_or(f32::NAN),
    );
    Verdict { passed: first <= early && (mean - mean_own).abs() <= late && learnt, text }
}
