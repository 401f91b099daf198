//! A small model that learns: what gradients are for. Two layers of causal attention over bytes, trained with our kernels
//! and once more with the oracle in their place; the loss curves must be each other's within the noise of 16-bit
//! attention.
//!
//! A token is the sum of its byte's and its place's embedding. A layer adds `attention(x Wq, x Wk, x Wv) Wo` to the
//! stream `x`, after dividing it by its root mean square, and the logits are products with the byte embeddings. Adam
//! (Kingma and Ba, 2015, algorithm 1) minimises the cross-entropy of the next byte.

use hopper_attention::reference::{self, Tensor};
use hopper_attention::{
    BackwardArgs, BackwardProblem, DType, Device, Dims, ForwardArgs, ForwardProblem, Layout, Mask, Result, TensorMut,
    TensorRef, Workspace, bf16,
};
use plotters::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use serde::Serialize;

/// Sizes of the model and of its training.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Sequences a step.
    pub batch: usize,
    /// Tokens of a sequence.
    pub seqlen: usize,
    /// Query heads of a layer.
    pub heads_q: usize,
    /// Key heads of a layer.
    pub heads_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of a token.
    pub width: usize,
    /// Steps of training.
    pub steps: usize,
}

impl Setup {
    fn tokens(&self) -> usize {
        self.batch * self.seqlen
    }

    /// The attention of a layer.
    ///
    /// # Errors
    /// As [`ForwardProblemBuilder::build`](hopper_attention::ForwardProblemBuilder::build).
    pub fn problem(&self, dtype: DType) -> Result<ForwardProblem> {
        let &Self { batch, seqlen, heads_q, heads_kv, head_dim, .. } = self;
        let dims = Dims::new(batch, seqlen, heads_q, head_dim).with_heads_kv(heads_kv);
        ForwardProblem::builder(dtype, dims).mask(Mask::causal()).lse(true).build()
    }
}

/// Causal attention and its gradients on `[batch, seqlen, heads, head_dim]` in f32, dense.
pub trait Attention {
    /// The output, and what the backward needs beside it.
    ///
    /// # Errors
    /// What the computation refused.
    fn forward(&mut self, q: &[f32], k: &[f32], v: &[f32]) -> Result<(Vec<f32>, Vec<f32>)>;

    /// The gradients of q, k and v, from the output, its log-sum-exp and the output's gradient.
    ///
    /// # Errors
    /// What the computation refused.
    fn backward(&mut self, inputs: [&[f32]; 3], o: &[f32], lse: &[f32], d_o: &[f32]) -> Result<[Vec<f32>; 3]>;
}

/// The oracle in place of attention, on unrounded inputs or on those of a 16-bit kernel.
pub struct Oracle {
    problem: ForwardProblem,
    rounds: Option<f32>,
}

impl Oracle {
    /// Of a setup. `rounds`: inputs and outputs are rounded to bf16, multiplied by this while they are. Nothing in between is
    /// rounded. Other factors round other numbers up.
    ///
    /// # Errors
    /// As [`ForwardProblemBuilder::build`](hopper_attention::ForwardProblemBuilder::build).
    pub fn new(setup: &Setup, rounds: Option<f32>) -> Result<Self> {
        Ok(Self { problem: setup.problem(DType::F32)?, rounds })
    }

    fn rounded(&self, x: f32) -> f32 {
        self.rounds.map_or(x, |factor| bf16::from_f32(x * factor).to_f32() / factor)
    }

    fn tensor(&self, data: &[f32], shape: [usize; 4]) -> Result<Tensor> {
        let data: Vec<f32> = data.iter().map(|&x| self.rounded(x)).collect();
        Ok(Tensor::from_strided(&data, &Layout::contiguous(shape)?))
    }

    fn numbers(&self, tensor: &Tensor) -> Vec<f32> {
        tensor.data().iter().map(|&x| self.rounded(x as f32)).collect()
    }
}

impl Attention for Oracle {
    fn forward(&mut self, q: &[f32], k: &[f32], v: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let problem = &self.problem;
        let [q, k, v] = [
            self.tensor(q, problem.q_shape())?,
            self.tensor(k, problem.k_shape())?,
            self.tensor(v, problem.v_shape())?,
        ];
        let exact = reference::forward(problem, &q, &k, &v)?;
        Ok((self.numbers(&exact.o), exact.lse.iter().map(|&x| x as f32).collect()))
    }

    fn backward(&mut self, [q, k, v]: [&[f32]; 3], _o: &[f32], _lse: &[f32], d_o: &[f32]) -> Result<[Vec<f32>; 3]> {
        let forward = &self.problem;
        let problem = BackwardProblem::builder(forward).build()?;
        let [q, k, v, d_o] = [
            self.tensor(q, forward.q_shape())?,
            self.tensor(k, forward.k_shape())?,
            self.tensor(v, forward.v_shape())?,
            self.tensor(d_o, forward.o_shape())?,
        ];
        let exact = reference::backward(&problem, &q, &k, &v, &d_o, None)?;
        Ok([&exact.d_q, &exact.d_k, &exact.d_v].map(|tensor| self.numbers(tensor)))
    }
}

pub(crate) fn halves(data: &[f32]) -> Vec<bf16> {
    data.iter().map(|&x| bf16::from_f32(x)).collect()
}

pub(crate) fn floats(data: &[bf16]) -> Vec<f32> {
    data.iter().map(|x| x.to_f32()).collect()
}

/// Ours in bf16 on the CPU.
pub struct OnCpu {
    problem: ForwardProblem,
}

impl OnCpu {
    /// Of a setup.
    ///
    /// # Errors
    /// As [`ForwardProblemBuilder::build`](hopper_attention::ForwardProblemBuilder::build).
    pub fn new(setup: &Setup) -> Result<Self> {
        Ok(Self { problem: setup.problem(DType::BF16)? })
    }
}

impl Attention for OnCpu {
    fn forward(&mut self, q: &[f32], k: &[f32], v: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let problem = &self.problem;
        let device = Device::cpu();
        let (plan, stream) = (problem.plan(&device)?, device.default_stream());
        let mut workspace = Workspace::alloc(&stream, plan.workspace_bytes())?;
        let [q, k, v] = [q, k, v].map(halves);
        let of = |shape| Layout::contiguous(shape);
        let mut o = vec![bf16::NAN; problem.o_shape().iter().product()];
        let mut lse = vec![f32::NAN; problem.lse_shape().iter().product()];
        let args = ForwardArgs::new(
            TensorRef::host(&q, of(problem.q_shape())?)?,
            TensorRef::host(&k, of(problem.k_shape())?)?,
            TensorRef::host(&v, of(problem.v_shape())?)?,
            TensorMut::host(&mut o, of(problem.o_shape())?)?,
        );
        let args = args.lse(TensorMut::host(&mut lse, Layout::contiguous(problem.lse_shape())?)?);
        plan.run(&stream, &mut workspace, args)?;
        Ok((floats(&o), lse))
    }

    fn backward(&mut self, inputs: [&[f32]; 3], o: &[f32], lse: &[f32], d_o: &[f32]) -> Result<[Vec<f32>; 3]> {
        let forward = &self.problem;
        let problem = BackwardProblem::builder(forward).build()?;
        let device = Device::cpu();
        let (plan, stream) = (problem.plan(&device)?, device.default_stream());
        let mut workspace = Workspace::alloc(&stream, plan.workspace_bytes())?;
        let ([q, k, v], o, d_o) = (inputs.map(halves), halves(o), halves(d_o));
        let of = |shape| Layout::contiguous(shape);
        let [mut d_q, mut d_k, mut d_v] = [&q, &k, &v].map(|x| vec![bf16::NAN; x.len()]);
        let args = BackwardArgs::new(
            [
                TensorRef::host(&q, of(forward.q_shape())?)?,
                TensorRef::host(&k, of(forward.k_shape())?)?,
                TensorRef::host(&v, of(forward.v_shape())?)?,
            ],
            TensorRef::host(&o, of(forward.o_shape())?)?,
            TensorRef::host(lse, Layout::contiguous(forward.lse_shape())?)?,
            TensorRef::host(&d_o, of(forward.o_shape())?)?,
            [
                TensorMut::host(&mut d_q, of(problem.d_q_shape())?)?,
                TensorMut::host(&mut d_k, of(problem.d_k_shape())?)?,
                TensorMut::host(&mut d_v, of(problem.d_v_shape())?)?,
            ],
        );
        plan.run(&stream, &mut workspace, args)?;
        Ok([d_q, d_k, d_v].map(|x| floats(&x)))
    }
}

/// `[rows, inner] x [inner, columns]`.
fn product(a: &[f32], b: &[f32], inner: usize, columns: usize) -> Vec<f32> {
    let mut out = vec![0.0; a.len() / inner * columns];
    out.par_chunks_mut(columns).zip(a.par_chunks(inner)).for_each(|(out, a)| {
        for (&a, b) in a.iter().zip(b.chunks(columns)) {
            out.iter_mut().zip(b).for_each(|(out, b)| *out += a * b);
        }
    });
    out
}

fn transposed(a: &[f32], columns: usize) -> Vec<f32> {
    let rows = a.len() / columns;
    (0..a.len()).map(|i| a[i % rows * columns + i / rows]).collect()
}

fn add(to: &mut [f32], from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

/// A matrix that learns.
struct Weight {
    value: Vec<f32>,
    gradient: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
    columns: usize,
}

impl Weight {
    fn new(rows: usize, columns: usize, scale: f32, rng: &mut StdRng) -> Self {
        let normal = |rng: &mut StdRng| -> f32 { StandardNormal.sample(rng) };
        let value: Vec<f32> = (0..rows * columns).map(|_| normal(rng) * scale).collect();
        let zeros = vec![0.0; value.len()];
        Self { value, gradient: zeros.clone(), first: zeros.clone(), second: zeros, columns }
    }

    /// `x W`.
    fn apply(&self, x: &[f32]) -> Vec<f32> {
        product(x, &self.value, self.value.len() / self.columns, self.columns)
    }

    /// From the gradient of `x W`: adds to that of W and returns that of x.
    fn back(&mut self, x: &[f32], d_y: &[f32]) -> Vec<f32> {
        let rows = self.value.len() / self.columns;
        let gradient = product(&transposed(x, rows), d_y, x.len() / rows, self.columns);
        add(&mut self.gradient, &gradient);
        product(d_y, &transposed(&self.value, self.columns), self.columns, rows)
    }

    /// A step of Adam with its usual decays, and no gradient after it.
    fn step(&mut self, rate: f32, step: i32) {
        let (bias_1, bias_2) = (1.0 - 0.9f32.powi(step), 1.0 - 0.999f32.powi(step));
        for i in 0..self.value.len() {
            let gradient = std::mem::take(&mut self.gradient[i]);
            self.first[i] += 0.1 * (gradient - self.first[i]);
            self.second[i] += 0.001 * (gradient * gradient - self.second[i]);
            self.value[i] -= rate * (self.first[i] / bias_1) / ((self.second[i] / bias_2).sqrt() + 1e-8);
        }
    }
}

/// Each row over its root mean square.
fn normalised(x: &[f32], width: usize) -> Vec<f32> {
    x.chunks(width).flat_map(|row| row.iter().map(|x| x / root_mean_square(row))).collect()
}

fn root_mean_square(row: &[f32]) -> f32 {
    (row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32 + 1e-5).sqrt()
}

/// The gradient of x from that of `normalised(x)`.
fn normalised_back(x: &[f32], d_y: &[f32], width: usize) -> Vec<f32> {
    let row = |(x, d_y): (&[f32], &[f32])| {
        let rms = root_mean_square(x);
        let along = x.iter().zip(d_y).map(|(x, d)| x * d).sum::<f32>() / (width as f32 * rms * rms);
        x.iter().zip(d_y).map(|(x, d)| (d - x * along) / rms).collect::<Vec<_>>()
    };
    x.chunks(width).zip(d_y.chunks(width)).flat_map(row).collect()
}

struct Layer {
    q: Weight,
    k: Weight,
    v: Weight,
    o: Weight,
}

/// What a layer's backward needs of its forward.
struct Kept {
    x: Vec<f32>,
    normal: Vec<f32>,
    qkv: [Vec<f32>; 3],
    o: Vec<f32>,
    lse: Vec<f32>,
}

struct Model {
    setup: Setup,
    bytes: Weight,
    places: Weight,
    layers: Vec<Layer>,
}

impl Model {
    fn new(setup: Setup, seed: u64) -> Self {
        let rng = &mut StdRng::seed_from_u64(seed);
        let Setup { width, heads_q, heads_kv, head_dim, seqlen, .. } = setup;
        let scale = (1.0 / width as f32).sqrt();
        let layer = |rng: &mut StdRng| Layer {
            q: Weight::new(width, heads_q * head_dim, scale, rng),
            k: Weight::new(width, heads_kv * head_dim, scale, rng),
            v: Weight::new(width, heads_kv * head_dim, scale, rng),
            o: Weight::new(heads_q * head_dim, width, scale, rng),
        };
        let layers = vec![layer(rng), layer(rng)];
        Self {
            setup,
            bytes: Weight::new(256, width, 0.5 * scale, rng),
            places: Weight::new(seqlen, width, 0.5 * scale, rng),
            layers,
        }
    }

    /// The mean cross-entropy of the next bytes, in nats, and all gradients.
    fn loss(&mut self, attention: &mut dyn Attention, text: &[Vec<u8>]) -> Result<f64> {
        let Setup { width, seqlen, .. } = self.setup;
        let mut x = Vec::with_capacity(self.setup.tokens() * width);
        for (place, &byte) in text.iter().flat_map(|text| text[..seqlen].iter().enumerate()) {
            let (byte, place) = (usize::from(byte) * width, place * width);
            x.extend((0..width).map(|i| self.bytes.value[byte + i] + self.places.value[place + i]));
        }
        let mut kept = Vec::new();
        for layer in &self.layers {
            let normal = normalised(&x, width);
            let qkv = [&layer.q, &layer.k, &layer.v].map(|weight| weight.apply(&normal));
            let (o, lse) = attention.forward(&qkv[0], &qkv[1], &qkv[2])?;
            let after: Vec<f32> = x.iter().zip(layer.o.apply(&o)).map(|(x, y)| x + y).collect();
            kept.push(Kept { x: std::mem::replace(&mut x, after), normal, qkv, o, lse });
        }

        let normal = normalised(&x, width);
        let mut logits = product(&normal, &transposed(&self.bytes.value, width), width, 256);
        let targets = text.iter().flat_map(|text| text[1..=seqlen].iter());
        let mut loss = 0.0;
        let tokens = self.setup.tokens() as f32;
        for (row, &target) in logits.chunks_mut(256).zip(targets) {
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = row.iter().map(|x| (x - max).exp()).sum();
            loss += f64::from(sum.ln() + max - row[usize::from(target)]);
            row.iter_mut().for_each(|x| *x = (*x - max).exp() / sum / tokens);
            row[usize::from(target)] -= 1.0 / tokens;
        }

        let d_logits = logits;
        add(&mut self.bytes.gradient, &product(&transposed(&d_logits, 256), &normal, self.setup.tokens(), width));
        let d_normal = product(&d_logits, &self.bytes.value, 256, width);
        let mut d_x = normalised_back(&x, &d_normal, width);
        for (layer, kept) in self.layers.iter_mut().zip(&kept).rev() {
            let d_o = layer.o.back(&kept.o, &d_x);
            let [q, k, v] = &kept.qkv;
            let [d_q, d_k, d_v] = attention.backward([q, k, v], &kept.o, &kept.lse, &d_o)?;
            let mut d_normal = layer.q.back(&kept.normal, &d_q);
            add(&mut d_normal, &layer.k.back(&kept.normal, &d_k));
            add(&mut d_normal, &layer.v.back(&kept.normal, &d_v));
            add(&mut d_x, &normalised_back(&kept.x, &d_normal, width));
        }
        let tokens = text.iter().flat_map(|text| text[..seqlen].iter().enumerate());
        for ((place, &byte), d_x) in tokens.zip(d_x.chunks(width)) {
            add(&mut self.bytes.gradient[usize::from(byte) * width..][..width], d_x);
            add(&mut self.places.gradient[place * width..][..width], d_x);
        }
        Ok(loss / self.setup.tokens() as f64)
    }

    fn weights(&mut self) -> impl Iterator<Item = &mut Weight> {
        let layers = self.layers.iter_mut().flat_map(|layer| [&mut layer.q, &mut layer.k, &mut layer.v, &mut layer.o]);
        [&mut self.bytes, &mut self.places].into_iter().chain(layers)
    }
}

/// Trains a model from the same start on the same pieces of a text, whoever computes attention; the loss of each step, in
/// nats a byte.
///
/// # Errors
/// What attention refused.
fn train(setup: Setup, text: &[u8], attention: &mut dyn Attention) -> Result<Vec<f64>> {
    let mut model = Model::new(setup, 1);
    let mut rng = StdRng::seed_from_u64(2);
    let mut losses = Vec::with_capacity(setup.steps);
    for step in 1..=setup.steps {
        let pieces: Vec<Vec<u8>> = (0..setup.batch)
            .map(|_| {
                let from = rng.random_range(0..text.len() - setup.seqlen - 1);
                text[from..=from + setup.seqlen].to_vec()
            })
            .collect();
        losses.push(model.loss(attention, &pieces)?);
        // The rate rises over the first tenth.
        let rate = 3e-3 * (10.0 * step as f32 / setup.steps as f32).min(1.0);
        for weight in model.weights() {
            weight.step(rate, i32::try_from(step).unwrap_or(i32::MAX));
        }
    }
    Ok(losses)
}

/// Text to learn: files of this repository, one after the other.
const TEXT: &str = concat!(
    include_str!("../../ARCHITECTURE.md"),
    include_str!("../../CONTRIBUTING.md"),
    include_str!("../../README.md")
);

/// For each of [`Curves::rounded`]: what numbers are multiplied by while they are rounded.
const ROUNDINGS: [f32; 3] = [1.0, 1.2, 1.6];

/// The losses of one model trained several times, with attention computed by:
#[derive(Debug, Serialize)]
pub struct Curves {
    /// the oracle,
    pub exact: Vec<f64>,
    /// the oracle with its inputs and outputs rounded to 16 bits, in several ways, which is the noise of any 16-bit attention (a
    /// single curve may happen to stay near the exact one),
    pub rounded: Vec<Vec<f64>>,
    /// the library.
    pub ours: Vec<f64>,
}

impl Curves {
    /// Trains on the repository's own text.
    ///
    /// # Errors
    /// What attention refused.
    pub fn new(setup: Setup, ours: &mut dyn Attention) -> Result<Self> {
        let text = TEXT.as_bytes();
        Ok(Self {
            exact: train(setup, text, &mut Oracle::new(&setup, None)?)?,
            rounded: ROUNDINGS
                .into_par_iter()
                .map(|factor| train(setup, text, &mut Oracle::new(&setup, Some(factor))?))
                .collect::<Result<_>>()?,
            ours: train(setup, text, ours)?,
        })
    }

    /// The same with another attention in ours' place.
    ///
    /// # Errors
    /// What attention refused.
    pub fn with(&self, setup: Setup, other: &mut dyn Attention) -> Result<Self> {
        let (exact, rounded) = (self.exact.clone(), self.rounded.clone());
        Ok(Self { exact, rounded, ours: train(setup, TEXT.as_bytes(), other)? })
    }

    /// That our gradients teach what the exact ones do, within the noise, and that this is something, where there were steps
    /// enough for it; in words.
    ///
    /// # Errors
    /// What is wrong.
    pub fn verdict(&self) -> std::result::Result<String, String> {
        let ends = |losses: &[f64]| {
            let tenth = losses.len().div_ceil(10);
            [mean(&losses[..tenth]), mean(&losses[losses.len() - tenth..])]
        };
        let ([_, exact], [start, end]) = (ends(&self.exact), ends(&self.ours));
        let error = distance(&self.ours, &self.exact);
        let noise = self.rounded.iter().map(|rounded| distance(rounded, &self.exact)).fold(0.0, f64::max);
        let words = format!(
            "{} steps: loss {start:.3} -> {end:.3} nats a byte (exact {exact:.3}); curves {error:.4} apart, by rounding alone {noise:.4}",
            self.ours.len()
        );
        // Two roundings drift apart as far as one does from none; three, and a floor for curves that hardly part.
        let learned = self.ours.len() < 100 || end < 0.8 * start;
        if learned && error <= 3.0 * noise + 0.005 { Ok(words) } else { Err(words) }
    }

    /// The curves as an SVG.
    ///
    /// # Errors
    /// What the drawing failed at.
    pub fn chart(&self, title: &str) -> std::result::Result<String, Box<dyn std::error::Error>> {
        let mut svg = String::new();
        {
            let root = SVGBackend::with_string(&mut svg, (680, 430)).into_drawing_area();
            root.fill(&WHITE)?;
            let most = self.exact.iter().copied().fold(0.0, f64::max);
            let mut chart = ChartBuilder::on(&root)
                .caption(title, ("sans-serif", 18))
                .margin(10)
                .x_label_area_size(40)
                .y_label_area_size(50)
                .build_cartesian_2d(1.0..self.ours.len() as f64, 0.0..most * 1.05)?;
            chart.configure_mesh().light_line_style(WHITE).x_desc("step").y_desc("nats a byte").draw()?;
            let lines = [
                ("exact gradients", &self.exact, RGBColor(188, 76, 0), 5),
                ("exact, rounded to 16 bits", &self.rounded[0], RGBColor(26, 127, 55), 3),
                ("ours", &self.ours, RGBColor(9, 105, 218), 1),
            ];
            for (name, losses, color, width) in lines {
                let points = losses.iter().enumerate().map(|(i, &loss)| (i as f64 + 1.0, loss));
                chart
                    .draw_series(LineSeries::new(points, color.stroke_width(width)))?
                    .label(name)
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(width)));
            }
            chart.configure_series_labels().border_style(BLACK.mix(0.2)).background_style(WHITE).draw()?;
            root.present()?;
        }
        Ok(svg)
    }
}

fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len() as f64
}

/// How far two loss curves are apart: the largest difference of their means over a tenth of the steps.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    let window = a.len().div_ceil(10);
    let apart = a.chunks(window).zip(b.chunks(window)).map(|(a, b)| (mean(a) - mean(b)).abs());
    // A NaN is far away, and f64::max would drop it.
    apart.max_by(f64::total_cmp).unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curves(of: impl Fn(f64) -> f64) -> Curves {
        let exact: Vec<f64> = (0..100).map(|step| 5.0 - 0.03 * f64::from(step)).collect();
        Curves {
            rounded: vec![exact.iter().map(|loss| loss + 0.002).collect()],
            ours: exact.iter().map(|&loss| of(loss)).collect(),
            exact,
        }
    }

    #[test]
    fn the_verdict_sees_what_went_wrong() {
        assert!(curves(|loss| loss - 0.006).verdict().is_ok());
        assert!(curves(|loss| loss + 0.05).verdict().is_err(), "it lags");
        assert!(curves(|_| 5.0).verdict().is_err(), "it does not learn");
        assert!(curves(|_| f64::NAN).verdict().is_err(), "it breaks down");
        let few = |of: fn(f64) -> f64| {
            let Curves { exact, rounded, ours } = curves(of);
            let few = |losses: Vec<f64>| losses[..20].to_vec();
            Curves { exact: few(exact), rounded: rounded.into_iter().map(few).collect(), ours: few(ours) }.verdict()
        };
        assert!(few(|loss| loss).is_ok() && few(|_| 5.0).is_err() && few(|_| f64::NAN).is_err());
    }

    #[test]
    fn the_chart_names_its_curves() {
        let svg = curves(|loss| loss).chart("Training").unwrap();
        for name in ["Training", "exact gradients", "exact, rounded to 16 bits", "ours"] {
            assert!(svg.contains(name), "{name}: {svg}");
        }
    }
}
