//! Points of a sweep, and what they cost.

mod bias;
mod blocks;
mod dropout;
mod file;
mod head_dims;
mod mask;
mod names;
mod packed;

use std::fmt;
use std::ops::Range;

use anyhow::{Context as _, Result, ensure};
use hopper_attention::{BackwardProblem, DType, Dims, ForwardProblem, Layout, Mask, Slot};
use hopper_attention_verify::alibi::standard;
use hopper_attention_verify::bias::Bias;
use hopper_attention_verify::inputs::Class;
use serde::{Deserialize, Serialize};

pub(crate) use bias::BiasTensor;
pub use blocks::FullBlocks;
pub use file::{InputFile, Scale};
pub use head_dims::HeadDims;
pub use mask::PointMask;
pub use packed::{DENSE, Kind, Packed};

/// The largest size of a dimension, as the library has it.
const MAX_SIZE: usize = i32::MAX as usize;
/// Elements of Q: with as many of the other tensors, their bytes can be counted and addressed.
const MAX_ELEMENTS: u128 = 1 << 56;
/// Operations of a backward without a mask.
const MAX_OPERATIONS: u128 = 1 << 63;

/// Which pass is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// O and the LSE from Q, K and V.
    Fwd,
    /// The gradients of Q, K and V, from Q, K, V, O, the LSE and the gradient of O.
    Bwd,
}

impl Direction {
    /// Both, in the order of tables.
    pub const ALL: [Self; 2] = [Self::Fwd, Self::Bwd];

    /// "forward" or "backward".
    pub fn word(self) -> &'static str {
        match self {
            Self::Fwd => "forward",
            Self::Bwd => "backward",
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fwd => "fwd",
            Self::Bwd => "bwd",
        })
    }
}

/// The element type of Q, K, V, O and the gradients; of e4m3 operands O is bf16, and there are no gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// FP8 with 4 exponent and 3 mantissa bits, and descale factors.
    E4m3,
}

impl Precision {
    /// The library's word for it.
    pub fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
            Self::E4m3 => DType::E4M3,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.dtype().name())
    }
}

/// In which order the elements of Q, K, V, O and the gradients lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// `[batch, seqlen, heads, head_dim]`.
    Bshd,
    /// `[batch, heads, seqlen, head_dim]`.
    Bhsd,
}

/// One point of a sweep: equal head dims but where `head_dim_vo` says otherwise, and equal query and key lengths but where `queries`
/// does.
///
/// The tensors of a packed point have one batch element, with the rows of all sequences.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// The pass.
    pub direction: Direction,
    /// Type of Q, K, V, O and the gradients.
    pub dtype: Precision,
    /// Query heads.
    pub heads_q: usize,
    /// Key heads, a divisor of `heads_q`.
    pub heads_kv: usize,
    /// Length of a query and a key, and of a value and an output where `head_dim_vo` is not given.
    pub head_dim: usize,
    /// Length of a value and an output, where it is not `head_dim`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim_vo: Option<usize>,
    /// Whether a query sees the keys up to its own only.
    pub causal: bool,
    /// With `causal`: how many keys before its own a query sees; all of them without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// Keys in a sequence, and queries where `queries` is not given. Of packed sequences: all their tokens.
    pub seqlen: usize,
    /// Queries in a sequence, where they are not as many as keys. The last query then sees the last key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queries: Option<usize>,
    /// Sequences in the batch. 1 where they are packed.
    pub batch: usize,
    /// The cap of the scores, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub softcap: Option<u32>,
    /// Whether scores have ALiBi's biases, with the slopes of models.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub alibi: bool,
    /// Whether ours is not told that f16 holds the scores. Of e4m3 operands.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub f32_scores: bool,
    /// What is added to the scores. A backward also computes its gradient.
    #[serde(default, skip_serializing_if = "Bias::is_none")]
    pub bias: Bias,
    /// The percentage of weights that dropout makes 0, where there is dropout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropout: Option<u32>,
    /// Lists of full blocks, one in so many of all, and those of the diagonal: see [`FullBlocks`]. Without `causal`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<u32>,
    /// What Q, K and V hold.
    #[serde(default, skip_serializing_if = "Class::is_normal")]
    pub inputs: Class,
    /// The file that has Q, K and V, where they are not drawn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<InputFile>,
    /// The sequences, where they are packed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed: Option<Packed>,
}

impl Point {
    /// A point of these sizes, heads as `[heads_q, heads_kv]`, with a full mask, normal inputs, and nothing else that a point may have.
    pub(crate) fn plain(
        (direction, dtype): (Direction, Precision),
        [heads_q, heads_kv]: [usize; 2],
        HeadDims { qk, vo }: HeadDims,
        [batch, seqlen]: [usize; 2],
    ) -> Self {
        Self {
            direction,
            dtype,
            heads_q,
            heads_kv,
            head_dim: qk,
            head_dim_vo: (vo != qk).then_some(vo),
            causal: false,
            window: None,
            seqlen,
            queries: None,
            batch,
            softcap: None,
            alibi: false,
            f32_scores: false,
            bias: Bias::NONE,
            dropout: None,
            blocks: None,
            inputs: Class::Normal,
            file: None,
            packed: None,
        }
    }

    /// Whether the point's sizes make a problem whose operations and bytes can be counted. Whoever has a point from outside
    /// asks this first: the other methods take it for granted.
    ///
    /// # Errors
    /// Where a size is 0 or past the library's limit, where heads do not divide, or where the sizes are too large together.
    pub fn check(&self) -> Result<()> {
        let Self { heads_q, heads_kv, head_dim, seqlen, batch, causal, .. } = *self;
        let (queries, HeadDims { vo, .. }) = (self.seqlen_q(), self.head_dims());
        for (name, size) in [
            ("heads_q", heads_q),
            ("heads_kv", heads_kv),
            ("head_dim", head_dim),
            ("head_dim_vo", vo),
            ("seqlen", seqlen),
            ("queries", queries),
            ("batch", batch),
        ] {
            ensure!((1..=MAX_SIZE).contains(&size), "{name} {size}; allowed: 1 to {MAX_SIZE}");
        }
        ensure!(heads_q % heads_kv == 0, "heads_q {heads_q} with heads_kv {heads_kv}; allowed: a multiple of heads_kv");
        ensure!(!causal || queries <= seqlen, "{queries} queries on {seqlen} keys, causal; allowed: as many or fewer");
        let elements = [batch, seqlen.max(queries), heads_q, head_dim.max(vo)]
            .into_iter()
            .map(|size| size as u128)
            .product::<u128>();
        ensure!(elements < MAX_ELEMENTS, "q of {elements} elements; allowed: below {MAX_ELEMENTS}");
        let operations = 10 * elements * seqlen as u128;
        ensure!(operations < MAX_OPERATIONS, "{operations} operations; allowed: below {MAX_OPERATIONS}");
        let dense = !causal && self.queries.is_none() && self.packed.is_none();
        ensure!(
            self.blocks.is_none_or(|one_in| one_in > 0 && dense),
            "blocks {:?}; allowed: 1 and above, with as many queries as keys, neither causal nor packed",
            self.blocks
        );
        ensure!(
            self.dropout.is_none_or(|percent| (1..100).contains(&percent)),
            "dropout {} percent; allowed: 1 to 99",
            self.dropout.unwrap_or_default()
        );
        self.file.as_ref().map_or(Ok(()), InputFile::check)?;
        let Some(packed) = &self.packed else { return Ok(()) };
        ensure!(batch == 1, "batch {batch} of packed sequences; allowed: 1");
        ensure!(self.queries.is_none(), "{queries} queries in packed sequences; allowed: as many as keys");
        packed.check(seqlen)?;
        self.dense().map_or(Ok(()), |dense| dense.check().context("the dense batch of packed sequences"))
    }

    /// The point, if its sizes can be counted.
    pub(crate) fn checked(self) -> Result<Self> {
        self.check().with_context(|| format!("the point {self}"))?;
        Ok(self)
    }

    /// The head dim of Q and K, and that of V and O.
    pub fn head_dims(&self) -> HeadDims {
        HeadDims { qk: self.head_dim, vo: self.head_dim_vo.unwrap_or(self.head_dim) }
    }

    /// Queries in a sequence.
    pub fn seqlen_q(&self) -> usize {
        self.queries.unwrap_or(self.seqlen)
    }

    /// "512", or "128x512" for 128 queries on 512 keys, or "lognormal512/t16384" for packed sequences of so many
    /// tokens.
    pub fn lengths(&self) -> String {
        match (&self.packed, self.queries) {
            (Some(packed), _) => format!("{}/t{}", packed.kind, self.seqlen),
            (None, Some(queries)) => format!("{queries}x{}", self.seqlen),
            (None, None) => self.seqlen.to_string(),
        }
    }

    /// Sequences in the batch, packed or not.
    pub fn sequences(&self) -> usize {
        self.packed.as_ref().map_or(self.batch, |packed| packed.lengths.len())
    }

    /// The dense point beside a packed one: see [`Packed::dense`].
    pub fn dense(&self) -> Option<Self> {
        let [batch, seqlen] = self.packed.as_ref()?.dense;
        Some(Self { batch, seqlen, packed: None, ..self.clone() })
    }

    /// Query heads that share a key head.
    pub fn group(&self) -> usize {
        self.heads_q / self.heads_kv
    }

    /// "full", "causal", "window1024", or "blocks16" for lists of one in 16 blocks.
    pub fn mask_name(&self) -> String {
        match (self.causal, self.window, self.blocks) {
            (false, _, Some(one_in)) => format!("blocks{one_in}"),
            (false, _, None) => "full".into(),
            (true, None, _) => "causal".into(),
            (true, Some(keys), _) => format!("window{keys}"),
        }
    }

    /// Floating-point operations as the papers count them: two products of two operations a multiply-add,
    /// `4 * seqlen^2 * head_dim * heads_q * batch`, halved when causal. With a window, or causal with fewer queries than keys, 4
    /// for each of the head dim's elements and each pair of a query and a key that it sees. Where head dims differ, half of
    /// them are of either. The backward has five products: 2.5 times the forward's, three with the head dim of Q and K and
    /// two with that of V. Packed sequences are counted one by one. With lists of blocks the pairs of listed blocks are
    /// counted.
    pub fn flops(&self) -> u64 {
        let HeadDims { qk, vo } = self.head_dims();
        let columns = match self.direction {
            Direction::Fwd => qk + vo,
            Direction::Bwd => 3 * qk + 2 * vo,
        };
        let each = 2 * (columns * self.heads_q) as u64;
        match &self.packed {
            Some(packed) => packed.lengths.iter().map(|&length| self.flops_of_one(each, [length; 2])).sum(),
            None => self.flops_of_one(each * self.batch as u64, [self.seqlen_q(), self.seqlen]),
        }
    }

    /// The operations of one sequence, with so many for a pair of a query and a key: an even number.
    fn flops_of_one(&self, each: u64, lengths: [usize; 2]) -> u64 {
        if let Some(one_in) = self.blocks {
            return each * self.listed_pairs(one_in);
        }
        let [queries, keys] = lengths.map(|length| length as u64);
        match (self.causal, self.window, self.queries) {
            (false, ..) => each * queries * keys,
            (true, None, None) => each * keys.pow(2) / 2,
            (true, window, _) => {
                // The first queries see `first`, `first + 1`, ... keys, and those after them all of the window and their own.
                let full = window.map_or(keys, |window| (window as u64).saturating_add(1).min(keys));
                let first = keys - queries + 1;
                let rising = full.saturating_sub(first).min(queries);
                (rising * (2 * first + rising).saturating_sub(1) / 2 + (queries - rising) * full) * each
            }
        }
    }

    /// The operations that a library does here: those of the dense batch for our second run at a packed point.
    pub fn flops_by(&self, library: &str) -> u64 {
        match self.dense() {
            Some(dense) if library.ends_with(DENSE) => dense.flops(),
            _ => self.flops(),
        }
    }

    /// The keys that a query sees, if the lists of blocks keep the pair.
    pub fn keys(&self, query: usize) -> Range<usize> {
        let sequence = self.sequence(query);
        let own = query + self.seqlen.saturating_sub(self.seqlen_q());
        let first = self.window.map_or(0, |keys| own.saturating_sub(keys));
        if self.causal { first.max(sequence.start)..own + 1 } else { sequence }
    }

    /// The queries that see a key.
    pub fn queries_of(&self, key: usize) -> impl Iterator<Item = usize> + '_ {
        let sequence = if self.packed.is_some() { self.sequence(key) } else { 0..self.seqlen_q() };
        sequence.filter(move |&query| self.sees(query, key))
    }

    /// Whether a query sees a key.
    pub fn sees(&self, query: usize, key: usize) -> bool {
        self.keys(query).contains(&key) && self.lists_keep(query, key)
    }

    /// The rows of the packed sequence that has this one. All keys where sequences are not packed.
    pub fn sequence(&self, row: usize) -> Range<usize> {
        self.packed.as_ref().map_or(0..self.seqlen, |packed| packed.sequence(row))
    }

    /// The fewest bytes that must be moved: Q, K and V read once, O and the LSE written once; in the backward Q, K, V,
    /// O, dO and the LSE read once, dQ, dK and dV written once. A bias is read once, and its gradient written once.
    pub fn bytes(&self) -> u64 {
        let HeadDims { qk, vo } = self.head_dims();
        let tensors = match self.direction {
            Direction::Fwd => 1, // of each head dim with the heads of Q, and as many with those of K
            Direction::Bwd => 2,
        };
        let [queries, keys] = [self.seqlen_q(), self.seqlen].map(|length| self.batch * length);
        let elements = tensors * (qk + vo) * (queries * self.heads_q + keys * self.heads_kv);
        let lse = queries * self.heads_q * size_of::<f32>();
        // O of e4m3 operands has 16 bits; their few factors are not counted.
        let wider = if self.dtype == Precision::E4m3 { queries * vo * self.heads_q } else { 0 };
        (elements * self.dtype.dtype().bytes() + wider + lse + tensors * self.bias_bytes()) as u64
    }

    /// The cap of the scores, 0 where there is none.
    pub(crate) fn cap(&self) -> f32 {
        self.softcap.map_or(0.0, |cap| cap as f32)
    }

    /// The score of a query and a key of a head with this product, and what its gradient is multiplied by: in f64, from the
    /// definition.
    pub(crate) fn score(&self, product: f64, [head, query, key]: [usize; 3]) -> [f64; 2] {
        let (score, cap) = (product * self.scale(), f64::from(self.cap()));
        let (score, slope) = if cap == 0.0 {
            (score, 1.0)
        } else {
            let t = (score / cap).tanh();
            (cap * t, 1.0 - t * t)
        };
        // The last query stands at the last key. Packed sequences have as many queries as keys.
        let distance = (query + self.seqlen) as f64 - (self.seqlen_q() + key) as f64;
        let bias = self.slopes().map_or(0.0, |slopes| f64::from(slopes[head]) * distance.abs());
        [score - bias, slope]
    }

    /// ALiBi's slopes, `[heads_q]`: those of models. `None` where there are none.
    pub(crate) fn slopes(&self) -> Option<Vec<f32>> {
        self.alibi.then(|| standard(self.heads_q).map(|slope| slope as f32).collect())
    }

    /// The forward problem, with the LSE: every training forward writes it, and so do the peers.
    ///
    /// # Errors
    /// Those of [`build`](hopper_attention::ForwardProblemBuilder::build).
    pub fn problem(&self) -> hopper_attention::Result<ForwardProblem> {
        let dims = Dims::new(self.sequences(), self.seqlen_q(), self.heads_q, self.head_dim)
            .with_seqlen_kv(self.seqlen)
            .with_heads_kv(self.heads_kv)
            .with_head_dim_vo(self.head_dims().vo);
        let mask = match (self.causal, self.window) {
            (false, _) => Mask::Full,
            (true, None) => Mask::causal(),
            (true, Some(keys)) => Mask::window(Some(keys), Some(0)),
        };
        let options = ForwardProblem::builder(self.dtype.dtype(), dims).mask(mask).lse(true).softcap(self.cap());
        let options =
            options.operand(Slot::AlibiSlopes, self.alibi).block_mask(self.blocks.map(|_| FullBlocks::form()));
        let mut options = options.bias(self.bias_form()).dropout(self.probability()?);
        if let Some(scale) = self.own_scale() {
            options = options.softmax_scale(scale);
        }
        match self.packed.as_ref().map(Packed::longest) {
            Some(longest) => options.packed(true).max_seqlen_q(longest).max_seqlen_kv(longest).build(),
            None => options.build(),
        }
    }

    /// The problem whose gradients a backward point computes.
    ///
    /// # Errors
    /// Those of [`build`](hopper_attention::BackwardProblemBuilder::build), for the forward and for the gradients.
    pub fn backward_problem(&self) -> hopper_attention::Result<BackwardProblem> {
        BackwardProblem::builder(&self.problem()?).d_bias(!self.bias.is_none()).build()
    }

    /// The layout of Q and dQ, logically `[batch, seqlen_q, heads_q, head_dim]`.
    ///
    /// # Errors
    /// When the sizes overflow.
    pub fn q_layout(&self, order: Order) -> hopper_attention::Result<Layout<4>> {
        self.layout([self.seqlen_q(), self.heads_q, self.head_dim], order)
    }

    /// The layout of K and dK, logically `[batch, seqlen, heads_kv, head_dim]`.
    ///
    /// # Errors
    /// When the sizes overflow.
    pub fn k_layout(&self, order: Order) -> hopper_attention::Result<Layout<4>> {
        self.layout([self.seqlen, self.heads_kv, self.head_dim], order)
    }

    /// The layout of V and dV: that of K with the head dim of V.
    ///
    /// # Errors
    /// When the sizes overflow.
    pub fn v_layout(&self, order: Order) -> hopper_attention::Result<Layout<4>> {
        self.layout([self.seqlen, self.heads_kv, self.head_dims().vo], order)
    }

    /// The layout of O and dO: that of Q with the head dim of V.
    ///
    /// # Errors
    /// When the sizes overflow.
    pub fn o_layout(&self, order: Order) -> hopper_attention::Result<Layout<4>> {
        self.layout([self.seqlen_q(), self.heads_q, self.head_dims().vo], order)
    }

    fn layout(&self, sizes: [usize; 3], order: Order) -> hopper_attention::Result<Layout<4>> {
        let [seqlen, heads, head_dim] = sizes;
        let shape = [self.batch, seqlen, heads, head_dim];
        let [s, h, d] = sizes.map(|n| n as i64);
        match order {
            Order::Bshd => Layout::contiguous(shape),
            Order::Bhsd => Layout::with_strides(shape, [s * h * d, d, s * d, 1]),
        }
    }

    /// Elements of a tensor with this many heads, of queries or of keys, whichever are more, and of the larger head dim. Of a
    /// packed point also of its dense one.
    pub fn elements(&self, heads: usize) -> usize {
        let HeadDims { qk, vo } = self.head_dims();
        let own = self.batch * self.seqlen.max(self.seqlen_q()) * heads * qk.max(vo);
        self.dense().map_or(own, |dense| own.max(dense.elements(heads)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sweep;

    fn paper(seqlen: usize, head_dim: usize) -> Point {
        let sweep = Sweep {
            seqlens: vec![seqlen],
            dims: vec![head_dim.into()],
            masks: vec![PointMask::Full],
            ..Sweep::papers()
        };
        sweep.points().unwrap().remove(0)
    }

    #[test]
    fn a_quarter_as_many_queries_as_keys() {
        let masks = vec![PointMask::Full, PointMask::Causal, PointMask::Window(3)];
        let sweep =
            Sweep { quarter: true, masks, seqlens: vec![8, 3], dims: vec![64.into()], hidden: 128, ..Sweep::papers() };
        for point in sweep.points().unwrap() {
            let (queries, keys) = (point.seqlen_q(), point.seqlen);
            assert_eq!(queries, (keys / 4).max(1));
            let pairs: usize = (0..queries).map(|query| point.keys(query).len()).sum();
            assert_eq!(point.flops(), (4 * 64 * 2 * point.batch * pairs) as u64, "{point}");
            let mask = point.problem().unwrap().mask();
            let sees = |q, kv| mask.keep(q, kv, queries, keys) == point.keys(q).contains(&kv);
            assert!((0..queries).all(|q| (0..keys).all(|kv| sees(q, kv))), "{point}");
            assert_eq!(point.q_layout(Order::Bhsd).unwrap().shape(), [point.batch, queries, 2, 64]);
            assert_eq!(point.k_layout(Order::Bshd).unwrap().shape(), [point.batch, keys, 2, 64]);
            let text = serde_json::to_string(&point).unwrap();
            assert_eq!(serde_json::from_str::<Point>(&text).unwrap(), point);
        }
        let more = Point { queries: Some(9), ..sweep.points().unwrap().remove(2) };
        assert_eq!((more.causal, more.check().is_err()), (true, true));
    }

    #[test]
    fn flops_of_the_papers_points() {
        let p = paper(16384, 128);
        assert_eq!(p.flops(), 2_199_023_255_552); // 4 * 16384^2 * 2048
        assert_eq!(Point { causal: true, ..p }.flops(), 1_099_511_627_776);
        // At a fixed hidden size the head dim does not matter, and twice the length is twice the work.
        assert_eq!(paper(512, 64).flops(), paper(512, 128).flops());
        assert_eq!(paper(1024, 64).flops(), 2 * paper(512, 64).flops());
    }

    #[test]
    fn backward_points_are_named_and_counted() {
        let sweep = Sweep {
            directions: Direction::ALL.to_vec(),
            masks: vec![PointMask::Full, PointMask::Causal, PointMask::Window(100)],
            seqlens: vec![512],
            ..Sweep::papers()
        };
        let points = sweep.points().unwrap();
        let (forward, backward) = points.split_at(2 * 2 * 3);
        assert_eq!(backward[1].to_string(), "bwd/bf16/d64/causal/s512/b32/h32/kv32");
        assert_eq!(backward[2].family(), "bwd-bf16-d64-window100");
        for (forward, backward) in forward.iter().zip(backward) {
            assert_eq!(backward, &Point { direction: Direction::Bwd, ..forward.clone() });
            assert_eq!(2 * backward.flops(), 5 * forward.flops());
            assert_eq!(backward.backward_problem().unwrap().forward(), &forward.problem().unwrap());
        }
        // Q, K, V, O, dO, dQ, dK and dV of 16384 x 2048 in 16 bits, and the LSE.
        let (tensor, lse) = (16384 * 2048 * 2, 16384 * 32 * 4);
        assert_eq!(backward[0].bytes(), 8 * tensor + lse);
        assert_eq!(Point { heads_kv: 8, ..backward[0].clone() }.bytes(), 4 * tensor + 4 * tensor / 4 + lse);
        let filtered = Sweep { filters: vec!["bwd/d128/full".into()], ..sweep }.points().unwrap();
        assert!(filtered.len() == 2 && filtered.iter().all(|p| p.direction == Direction::Bwd));
        let text = serde_json::to_string(&backward[0]).unwrap();
        assert!(text.starts_with(r#"{"direction":"bwd","dtype":"bf16","#), "{text}");
        assert_eq!(serde_json::from_str::<Point>(&text).unwrap(), backward[0]);
    }

    #[test]
    fn windows_count_the_pairs_that_they_keep() {
        let masks = ["window:2", "window:100"].map(|text| text.parse().unwrap());
        let sweep =
            Sweep { masks: masks.to_vec(), seqlens: vec![8], dims: vec![64.into()], hidden: 64, ..Sweep::papers() };
        let [narrow, wide] = sweep.points().unwrap()[..2].to_vec().try_into().unwrap();
        assert_eq!(narrow.to_string(), "fwd/bf16/d64/window2/s8/b2048/h1/kv1");
        assert_eq!((0..8).map(|query| narrow.keys(query)).collect::<Vec<_>>()[..4], [0..1, 0..2, 0..3, 1..4]);
        let pairs = |p: &Point| p.flops() / (4 * 64 * 2048);
        assert_eq!((pairs(&narrow), pairs(&wide)), (1 + 2 + 6 * 3, 36));
        for keys in [0, 1, 6, 7, 8, usize::MAX] {
            let point = Point { window: Some(keys), ..narrow.clone() };
            assert_eq!(pairs(&point), (0..8).map(|query| point.keys(query).len() as u64).sum::<u64>(), "{keys}");
        }
        let mask = narrow.problem().unwrap().mask();
        assert!((0..8).all(|q| (0..8).all(|kv| mask.keep(q, kv, 8, 8) == narrow.keys(q).contains(&kv))));
        // A report says no more of other points than it did before windows could be timed.
        let text = |p: &Point| serde_json::to_string(p).unwrap();
        assert!(text(&narrow).contains("\"window\":2") && !text(&paper(512, 64)).contains("window"));
        assert_eq!(serde_json::from_str::<Point>(&text(&narrow)).unwrap(), narrow);
        for wrong in ["window", "window:", "window:-1", "Full", ""] {
            assert!(wrong.parse::<PointMask>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn packed_sequences_are_counted_and_masked_one_by_one() {
        let lengths = vec![3, 1, 4];
        let packed = Some(Packed { kind: Kind::Long, lengths, dense: [3, 3] });
        let point = Point { seqlen: 8, batch: 1, packed, ..paper(512, 64) };
        point.check().unwrap();
        assert_eq!(point.to_string(), "fwd/bf16/d64/full/long/t8/b3/h32/kv32");
        // 4 for each of 2048 elements and each of 9 + 1 + 16 pairs. Half of that under a causal mask, as the papers
        // count.
        let causal = Point { causal: true, ..point.clone() };
        let window = Point { window: Some(1), ..causal.clone() };
        assert_eq!((point.flops(), causal.flops()), (4 * 2048 * 26, 2 * 2048 * 26));
        assert_eq!(window.flops(), 4 * 2048 * (5 + 1 + 7));
        assert_eq!(Point { direction: Direction::Bwd, ..point.clone() }.flops(), 10 * 2048 * 26);
        assert_eq!((point.flops_by("x-dense"), point.flops_by("x")), (4 * 2048 * 27, point.flops()));
        assert_eq!(paper(512, 64).flops_by("x-dense"), paper(512, 64).flops());

        let keys = |point: &Point| (0..8).map(|query| point.keys(query)).collect::<Vec<_>>();
        assert_eq!(keys(&point), [0..3, 0..3, 0..3, 3..4, 4..8, 4..8, 4..8, 4..8]);
        assert_eq!(keys(&causal), [0..1, 0..2, 0..3, 3..4, 4..5, 4..6, 4..7, 4..8]);
        assert_eq!(keys(&window), [0..1, 0..2, 1..3, 3..4, 4..5, 4..6, 5..7, 6..8]);
        assert_eq!(window.queries_of(4).collect::<Vec<_>>(), [4, 5]);
        assert_eq!(point.queries_of(2).collect::<Vec<_>>(), [0, 1, 2]);
        let mask = window.problem().unwrap().mask();
        assert!((0..4).all(|q| (0..4).all(|kv| mask.keep(q, kv, 4, 4) == window.keys(4 + q).contains(&(4 + kv)))));

        let text = serde_json::to_string(&point).unwrap();
        assert!(text.ends_with(r#""packed":{"kind":"long","lengths":[3,1,4],"dense":[3,3]}}"#), "{text}");
        assert!(!serde_json::to_string(&paper(512, 64)).unwrap().contains("packed"));
        let refused = |point: Point| format!("{:#}", point.check().unwrap_err());
        assert_eq!(refused(Point { batch: 2, ..point.clone() }), "batch 2 of packed sequences; allowed: 1");
        assert_eq!(
            refused(Point { seqlen: 9, ..point.clone() }),
            "packed sequences of 8 tokens; allowed: 9, the point's"
        );
        assert!(refused(Point { queries: Some(8), ..point.clone() }).starts_with("8 queries in packed sequences"));
        let packed = point.packed.clone().map(|packed| Packed { dense: [0, 1], ..packed });
        assert!(refused(Point { packed, ..point }).starts_with("the dense batch of packed sequences: batch 0"));
    }

    #[test]
    fn bytes_count_each_tensor_once() {
        let lse = 16384 * 32 * 4;
        assert_eq!(paper(512, 64).bytes(), 268_435_456 + lse);
        let grouped = Point { heads_kv: 8, ..paper(512, 64) };
        assert_eq!(grouped.bytes(), 268_435_456 * 40 / 64 + lse);
    }

    #[test]
    fn e4m3_points_have_half_the_operands_and_no_backward() {
        let sweep = Sweep { dtypes: vec![Precision::E4m3], ..Sweep::papers() };
        let points = sweep.points().unwrap();
        assert_eq!((points.len(), points[0].to_string().as_str()), (24, "fwd/e4m3/d64/full/s512/b32/h32/kv32"));
        assert_eq!(points[0].flops(), paper(512, 64).flops());
        // Q, K and V of 16384 x 2048 in 8 bits, O in 16, and the LSE.
        assert_eq!(points[0].bytes(), 5 * 16384 * 2048 + 16384 * 32 * 4);
        assert_eq!(
            Point { heads_kv: 8, ..points[0].clone() }.bytes(),
            3 * 16384 * 2048 + 16384 * 1024 + 16384 * 32 * 4
        );
        let refused = Sweep { directions: Direction::ALL.to_vec(), ..sweep }.points().unwrap_err().to_string();
        assert!(refused.contains("e4m3 operands have no gradients"), "{refused}");
        assert_eq!(serde_json::to_string(&Precision::E4m3).unwrap(), "\"e4m3\"");
    }

    /// Whatever the sizes, a point is refused with words, or all that is counted of it fits its type.
    #[test]
    fn sizes_that_cannot_be_counted_are_refused() {
        let point = paper(512, 64);
        let changed = |change: fn(&mut Point)| {
            let mut point = point.clone();
            change(&mut point);
            point.check().expect_err("it was taken").to_string()
        };
        assert_eq!(changed(|p| p.heads_kv = 0), "heads_kv 0; allowed: 1 to 2147483647");
        assert_eq!(changed(|p| p.seqlen = 1 << 31), "seqlen 2147483648; allowed: 1 to 2147483647");
        assert_eq!(changed(|p| p.heads_kv = 5), "heads_q 32 with heads_kv 5; allowed: a multiple of heads_kv");
        assert!(changed(|p| p.batch = MAX_SIZE).ends_with(" operations; allowed: below 9223372036854775808"));
        let huge = i32::MAX as usize;
        for sizes in
            [[huge; 5], [huge, 1, huge, 1, 1], [1, huge, 1, 1, huge], [1, huge, 1, 8, 64], [1 << 30, 1, 1, 1, 8]]
        {
            let [batch, seqlen, heads_q, heads_kv, head_dim] = sizes;
            for (direction, window) in Direction::ALL.into_iter().flat_map(|way| [(way, None), (way, Some(3))]) {
                let causal = window.is_some();
                let point =
                    Point { direction, batch, seqlen, heads_q, heads_kv, head_dim, causal, window, ..point.clone() };
                if point.check().is_ok() {
                    // Overflows panic here.
                    assert!(point.flops() > 0 && point.bytes() > 0 && point.elements(heads_q) > 0);
                }
            }
        }
        let sweep = Sweep { hidden: 64, dims: vec![64.into()], seqlens: vec![usize::MAX >> 1], ..Sweep::small() };
        let refused = format!("{:#}", sweep.points().expect_err("it was taken"));
        assert!(
            refused.contains("/s9223372036854775807/b1/h1/kv1: seqlen 9223372036854775807; allowed: 1 to"),
            "{refused}"
        );
        let sweep = Sweep { seqlens: vec![1; 2000], masks: vec![PointMask::Full; 50], ..Sweep::papers() };
        let refused = sweep.points().expect_err("it was taken").to_string();
        assert_eq!(refused, "a sweep of 400000 points; allowed: up to 100000");
    }

    #[test]
    fn pairs_of_head_dims_are_named_and_counted() {
        let dims = HeadDims { qk: 192, vo: 128 };
        assert_eq!(
            ("192x128".parse(), "128".parse::<HeadDims>(), dims.to_string().as_str()),
            (Ok(dims), Ok(128.into()), "192x128")
        );
        for wrong in ["", "x", "192x", "192x128x64", "-1"] {
            assert!(wrong.parse::<HeadDims>().is_err(), "{wrong}");
        }
        let sweep = Sweep { dims: vec![dims, 192.into()], seqlens: vec![16384], ..Sweep::papers() };
        let [pair, square] = [0, 2].map(|i| sweep.points().unwrap().swap_remove(i));
        assert_eq!(pair.to_string(), "fwd/bf16/d192x128/full/s16384/b1/h16/kv16");
        assert_eq!((pair.family(), square.family()), ("fwd-bf16-d192x128-full".into(), "fwd-bf16-d192-full".into()));
        // Two products over 192 and 128 columns; three and two in the backward.
        let pairs = 16 * 16384_u64.pow(2);
        let backward = Point { direction: Direction::Bwd, ..pair.clone() };
        assert_eq!((pair.flops(), backward.flops()), (2 * 320 * pairs, 2 * (3 * 192 + 2 * 128) * pairs));
        assert_eq!(pair.bytes(), (2 * 320 * 2 + 4) * 16 * 16384);
        let shape = |layout: hopper_attention::Result<Layout<4>>| layout.unwrap().shape();
        let order = Order::Bhsd;
        assert_eq!(shape(pair.q_layout(order)), [1, 16384, 16, 192]);
        assert_eq!(shape(pair.o_layout(order)), [1, 16384, 16, 128]);
        assert_eq!(shape(pair.v_layout(order)), shape(pair.o_layout(order)));
        assert_eq!(pair.problem().unwrap().v_shape(), [1, 16384, 16, 128]);
        let text = serde_json::to_string(&pair).unwrap();
        assert!(text.contains(r#""head_dim":192,"head_dim_vo":128"#), "{text}");
        assert_eq!(serde_json::from_str::<Point>(&text).unwrap(), pair);
        assert!(!serde_json::to_string(&square).unwrap().contains("head_dim_vo"));
        assert!(serde_json::to_string(&sweep).unwrap().contains(r#""dims":["192x128",192]"#));
    }

    #[test]
    fn both_orders_are_the_same_tensor() {
        let p = Point { batch: 4, heads_q: 4, heads_kv: 4, head_dim: 32, seqlen: 16, ..paper(512, 64) };
        let [a, b] = [Order::Bshd, Order::Bhsd].map(|order| p.q_layout(order).unwrap());
        assert_eq!(a.offset([1, 2, 3, 4]), Some(((16 + 2) * 4 + 3) * 32 + 4));
        assert_eq!(b.offset([1, 2, 3, 4]), Some(((4 + 3) * 16 + 2) * 32 + 4));
        assert!(p.problem().unwrap().wants_lse());
        assert!(Point { heads_kv: 3, ..p }.problem().is_err());
    }
}
