//! Which points a sweep has.

use anyhow::{Result, ensure};
use hopper_attention_verify::bias::Bias;
use hopper_attention_verify::inputs::Class;
use serde::Serialize;

use crate::{Direction, HeadDims, Packed, Point, PointMask, Precision};

/// Tokens a batch in the papers' setting: the batch shrinks as sequences grow.
pub const TOKENS: usize = 16384;
/// Hidden size in the papers' setting: `heads_q * head_dim`. See [`Sweep::hidden`].
pub const HIDDEN: usize = 2048;

/// Points of one sweep.
const MAX_POINTS: usize = 100_000;
/// Tokens from which packed batches are made: each may be a sequence of its own.
const MAX_PACKED_TOKENS: usize = 1 << 20;

/// Which points to take.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sweep {
    /// Classes of inputs.
    pub inputs: Vec<Class>,
    /// Passes.
    pub directions: Vec<Direction>,
    /// Types.
    pub dtypes: Vec<Precision>,
    /// Query heads that share a key head.
    pub gqa: Vec<usize>,
    /// Head dims.
    pub dims: Vec<HeadDims>,
    /// Masks.
    pub masks: Vec<PointMask>,
    /// Lengths.
    pub seqlens: Vec<usize>,
    /// Tokens a batch: the batch is `tokens / seqlen`, at least 1.
    pub tokens: usize,
    /// The batch, whatever the tokens.
    pub batch: Option<usize>,
    /// `heads_q * head_dim`, with the head dim of V. Where a head dim does not divide it, there are as many heads as the
    /// largest power of two that fits: 8 of 192 in 2048.
    pub hidden: usize,
    /// The heads and lengths of [`FEW_HEADS`] and [`FEW_SEQUENCES`], in place of `gqa`, `seqlens`, `tokens`, `batch`
    /// and `hidden`.
    pub few_heads: bool,
    /// Short and lopsided problems ([`SHORT`], [`LOPSIDED`] and [`LAST_PARTS`]), in place of all lengths and heads.
    pub lopsided: bool,
    /// A quarter as many queries as keys, at least 1. Not with `lopsided`.
    pub quarter: bool,
    /// Packed sequences: those of `seqlens`, and ragged batches of so many tokens. Their lengths follow from `tokens`.
    /// Empty: nothing is packed. Not with `few_heads`, `lopsided`, `quarter` and `batch`.
    pub packed: Vec<usize>,
    /// The cap of the scores of all points. Not with e4m3 operands.
    pub softcap: Option<u32>,
    /// Whether the scores of all points have ALiBi's biases. Not with e4m3 operands.
    pub alibi: bool,
    /// Whether no point says that f16 holds its scores. For e4m3 operands alone, and not with `packed`, where it is so anyway.
    pub f32_scores: bool,
    /// What is added to the scores of all points. Not with e4m3 operands, `packed` and `block_mask`, nor gradients with a `softcap`.
    pub bias: Bias,
    /// The percentage of the weights of all points that dropout makes 0. Not with e4m3 operands and with inputs that are not normal.
    pub dropout: Option<u32>,
    /// In place of masks: lists of full blocks, one in so many of all, at random. Not with `lopsided`, `quarter` and `packed`.
    pub block_mask: Vec<u32>,
    /// A point is taken when one of these fits its name, see [`Point`]; all are when there is none.
    pub filters: Vec<String>,
}

/// Query heads and KV heads of a card that has few: of models that are split over several cards, and of small ones.
pub const FEW_HEADS: [[usize; 2]; 5] = [[32, 8], [16, 4], [8, 1], [16, 16], [4, 4]];
/// Batch and sequence length of the same sweep.
pub const FEW_SEQUENCES: [[usize; 2]; 6] = [[1, 512], [1, 2048], [1, 4096], [1, 8192], [4, 2048], [1, 32768]];

/// Batch and sequence length of short problems whose lengths are no multiple of a tile: text and image encoders, among
/// others. They have the heads of the papers' hidden size.
pub const SHORT: [[usize; 2]; 9] =
    [[212, 77], [83, 197], [63, 257], [28, 577], [16, 1000], [15, 1025], [10, 1500], [7, 2049], [3, 4097]];
/// Batch, queries, keys, query heads and KV heads of problems without a mask: a prompt's last part, few queries on many
/// keys, cross-attention to few keys, and one or a few new tokens on a long past.
pub const LOPSIDED: [[usize; 5]; 12] = [
    [1, 128, 16384, 32, 8],
    [1, 512, 16384, 32, 8],
    [1, 2048, 16384, 32, 8],
    [8, 77, 4096, 16, 16],
    [4, 4096, 77, 16, 16],
    [16, 1024, 77, 16, 16],
    [2, 4096, 1024, 16, 16],
    [1, 1, 8192, 32, 8],
    [1, 1, 32768, 32, 8],
    [1, 1, 32768, 8, 1],
    [1, 64, 32768, 8, 1],
    [1, 16, 131072, 8, 1],
];
/// The same under a causal mask, whose last query sees the last key: a prompt's last part. Its queries see nearly as many keys
/// each.
pub const LAST_PARTS: [[usize; 5]; 4] =
    [[1, 512, 4096, 4, 4], [1, 512, 16384, 4, 4], [1, 512, 16384, 8, 1], [1, 512, 16384, 32, 8]];

impl Sweep {
    /// The papers' sweep.
    pub fn papers() -> Self {
        Self {
            inputs: vec![Class::Normal],
            directions: vec![Direction::Fwd],
            dtypes: vec![Precision::Bf16, Precision::F16],
            gqa: vec![1],
            dims: vec![64.into(), 128.into()],
            masks: vec![PointMask::Full, PointMask::Causal],
            seqlens: vec![512, 1024, 2048, 4096, 8192, 16384],
            tokens: TOKENS,
            batch: None,
            hidden: HIDDEN,
            few_heads: false,
            lopsided: false,
            quarter: false,
            packed: vec![],
            softcap: None,
            alibi: false,
            f32_scores: false,
            bias: Bias::NONE,
            dropout: None,
            block_mask: vec![],
            filters: vec![],
        }
    }

    /// Sizes that the CPU backend and the naive computation do in seconds.
    pub fn small() -> Self {
        Self { seqlens: vec![64, 128, 256], tokens: 256, hidden: 256, ..Self::papers() }
    }

    /// The points, in the order of the fields, the length fastest. All classes of inputs have the same points.
    ///
    /// # Errors
    /// When heads do not divide, sizes are too large, there are more than 100,000 points, or nothing is left to time.
    pub fn points(&self) -> Result<Vec<Point>> {
        ensure!(
            !(self.directions.contains(&Direction::Bwd) && self.dtypes.contains(&Precision::E4m3)),
            "--directions bwd --dtypes e4m3: e4m3 operands have no gradients; allowed: --directions fwd, or --dtypes bf16,f16"
        );
        ensure!(
            !((self.lopsided || self.quarter) && self.dtypes.contains(&Precision::E4m3)),
            "--lopsided or --quarter with --dtypes e4m3 is not timed; allowed: --dtypes bf16,f16"
        );
        ensure!(
            !self.alibi || !self.dtypes.contains(&Precision::E4m3),
            "--alibi with --dtypes e4m3: e4m3 operands have no ALiBi; allowed: --dtypes bf16,f16"
        );
        ensure!(
            !self.f32_scores || self.dtypes.iter().all(|dtype| *dtype == Precision::E4m3),
            "--f32-scores with 16-bit types: their scores are always in f32; allowed: --dtypes e4m3"
        );
        ensure!(
            self.dropout.is_none() || !self.dtypes.contains(&Precision::E4m3),
            "--dropout with --dtypes e4m3: e4m3 operands have no dropout; allowed: --dtypes bf16,f16"
        );
        ensure!(
            self.dropout.is_none() || self.inputs.iter().all(Class::is_normal),
            "--dropout with other --inputs is not timed; allowed: --inputs normal"
        );
        let refused =
            [(self.lopsided, "--lopsided"), (self.quarter, "--quarter"), (!self.packed.is_empty(), "--packed")];
        for (with, option) in refused {
            let lists = !self.block_mask.is_empty();
            ensure!(!(lists && with), "--block-mask with {option} is not timed; allowed: one of them");
        }
        self.check_bias()?;
        ensure!(
            self.packed.is_empty() || self.inputs.iter().all(Class::is_normal),
            "--packed with other --inputs is not timed; allowed: --inputs normal"
        );
        ensure!(
            self.packed.is_empty() || self.tokens <= MAX_PACKED_TOKENS,
            "--packed with {} tokens; allowed: up to {MAX_PACKED_TOKENS}",
            self.tokens
        );
        ensure!(
            !(self.directions.contains(&Direction::Bwd) && self.inputs.contains(&Class::Nan)),
            "--directions bwd --inputs nan: nearly all of dK and dV would be NaN, which cannot be checked; allowed: \
             --directions fwd, or --inputs {}",
            Class::ALL.iter().filter(|class| **class != Class::Nan).map(Class::to_string).collect::<Vec<_>>().join(",")
        );
        let groups = if self.few_heads { FEW_HEADS.len() } else { self.gqa.len() };
        let kinds = [self.directions.len(), self.dtypes.len(), groups, self.dims.len()];
        let each = self.kept().count().saturating_mul(self.sequences().len());
        let each = each.saturating_add(if self.lopsided { LOPSIDED.len() + LAST_PARTS.len() } else { 0 });
        let each = each.saturating_mul(self.inputs.len());
        let all = kinds.into_iter().fold(each, usize::saturating_mul);
        ensure!(all <= MAX_POINTS, "a sweep of {all} points; allowed: up to {MAX_POINTS}");
        let mut normal = Vec::new();
        for &direction in &self.directions {
            for &dtype in &self.dtypes {
                for (head_dims, heads) in self.heads() {
                    self.lengths(direction, dtype, heads?, head_dims, &mut normal)?;
                    if self.lopsided {
                        Self::lopsided(direction, dtype, head_dims, &mut normal)?;
                    }
                }
            }
        }
        let (softcap, alibi, bias, dropout) = (self.softcap, self.alibi, self.bias, self.dropout);
        let f32_scores = self.f32_scores;
        let of_class = |&inputs| {
            normal.iter().map(move |point: &Point| Point {
                inputs,
                softcap,
                alibi,
                f32_scores,
                bias,
                dropout,
                ..point.clone()
            })
        };
        let points: Result<Vec<Point>> = self.inputs.iter().flat_map(of_class).map(Point::checked).collect();
        let mut points = points?;
        points.retain(|point| self.filters.is_empty() || self.filters.iter().any(|filter| point.matches(filter)));
        ensure!(
            !points.is_empty(),
            "none of the {all} points fits --filter {}; a point is called fwd/bf16/d64/causal/s512/b32/h32/kv32, and a \
             filter names some of these words",
            self.filters.join(" ")
        );
        Ok(points)
    }

    /// Refuses what no kernel computes with a bias, and what cannot be checked.
    fn check_bias(&self) -> Result<()> {
        let Some(holds) = self.bias.holds() else { return Ok(()) };
        let gradients = self.directions.contains(&Direction::Bwd);
        ensure!(
            !self.dtypes.contains(&Precision::E4m3),
            "--bias with --dtypes e4m3: e4m3 operands have no bias; allowed: --dtypes bf16,f16"
        );
        ensure!(
            !gradients || self.softcap.is_none(),
            "--bias with --softcap and --directions bwd: no kernel has gradients of both; allowed: --directions fwd, or one of them"
        );
        ensure!(
            !self.inputs.contains(&Class::Nan),
            "--bias with --inputs nan is not timed: a bias may hide a query that is NaN; allowed: other --inputs"
        );
        ensure!(
            holds != "lowest",
            "--bias {}: numbers as low leave nothing of a score, and results cannot be checked; allowed: normal, hidden, mask",
            self.bias
        );
        Ok(())
    }

    /// Head dims, each with numbers of query heads and KV heads. They are errors where they do not divide.
    fn heads(&self) -> Vec<(HeadDims, Result<[usize; 2]>)> {
        if self.few_heads {
            return FEW_HEADS
                .into_iter()
                .flat_map(|heads| self.dims.iter().map(move |&dim| (dim, Ok(heads))))
                .collect();
        }
        let pairs = self.gqa.iter().flat_map(|&group| self.dims.iter().map(move |&dim| (dim, group)));
        pairs.map(|(dim, group)| (dim, self.heads_of(dim, group))).collect()
    }

    /// The heads of the hidden size.
    fn heads_of(&self, head_dims: HeadDims, group: usize) -> Result<[usize; 2]> {
        let (hidden, head_dim) = (self.hidden, head_dims.vo);
        ensure!(
            head_dim > 0 && head_dim <= hidden,
            "head dim {head_dims} in a hidden size of {hidden}; allowed: 1 to {hidden}, and --hidden sets another size"
        );
        let heads = hidden / head_dim;
        let heads_q = if heads * head_dim == hidden { heads } else { 1 << heads.ilog2() };
        ensure!(
            group > 0 && heads_q % group == 0,
            "--gqa {group} does not divide the {heads_q} query heads of head dim {head_dims}"
        );
        Ok([heads_q, heads_q / group])
    }

    /// The points of every mask and length.
    fn lengths(
        &self,
        direction: Direction,
        dtype: Precision,
        heads: [usize; 2],
        head_dims: HeadDims,
        points: &mut Vec<Point>,
    ) -> Result<()> {
        let sequences = self.sequences();
        for (causal, window, blocks) in self.kept() {
            for (batch, seqlen, packed) in sequences.clone() {
                let queries = self.quarter.then_some((seqlen / 4).max(1));
                let plain = Point::plain((direction, dtype), heads, head_dims, [batch, seqlen]);
                let point = Point { causal, window, queries, blocks, packed, ..plain };
                points.push(point.checked()?);
            }
        }
        Ok(())
    }

    /// Which keys are kept: whether a mask is causal, its window, and the lists of blocks.
    fn kept(&self) -> impl Iterator<Item = (bool, Option<usize>, Option<u32>)> + '_ {
        let masks = self.masks[..if self.block_mask.is_empty() { self.masks.len() } else { 0 }].iter();
        let masks = masks.map(|mask| mask.bounds()).map(|(causal, window)| (causal, window, None));
        masks.chain(self.block_mask.iter().map(|&one_in| (false, None, Some(one_in))))
    }

    /// Batch and sequence length of the points of every mask, and the sequences where they are packed.
    fn sequences(&self) -> Vec<(usize, usize, Option<Packed>)> {
        let batch = |seqlen: usize| self.batch.unwrap_or((self.tokens / seqlen.max(1)).max(1));
        let equal = || self.seqlens.iter().map(|&seqlen| [batch(seqlen), seqlen]);
        if !self.packed.is_empty() {
            let equal = equal().map(|[count, length]| (count * length, Packed::equal(count, length)));
            let ragged = self.packed.iter().flat_map(|&tokens| self.ragged(tokens).map(|packed| (tokens, packed)));
            return equal.chain(ragged).map(|(tokens, packed)| (1, tokens, Some(packed))).collect();
        }
        let dense: Vec<[usize; 2]> = match (self.few_heads, self.lopsided) {
            (true, _) => FEW_SEQUENCES.to_vec(),
            (false, true) => SHORT.to_vec(),
            (false, false) => equal().collect(),
        };
        dense.into_iter().map(|[batch, seqlen]| (batch, seqlen, None)).collect()
    }

    /// The ragged batches of so many tokens. With the papers' 16384 `tokens`: log-normal lengths of mean 512, 2k and
    /// 8k; one long sequence among ones of 64 to 512 tokens; documents of mean 2k that are cut at 4k.
    fn ragged(&self, tokens: usize) -> [Packed; 5] {
        let part = |of: usize| (self.tokens / of).max(1);
        let lognormal = |of| Packed::lognormal(tokens, part(of));
        [
            lognormal(32),
            lognormal(8),
            lognormal(2),
            Packed::long(tokens, part(256)..part(32) + 1),
            Packed::documents(tokens, part(8), part(4)),
        ]
    }

    /// The points of [`LOPSIDED`] and [`LAST_PARTS`].
    fn lopsided(direction: Direction, dtype: Precision, dims: HeadDims, points: &mut Vec<Point>) -> Result<()> {
        let all = LOPSIDED.map(|sizes| (sizes, false)).into_iter().chain(LAST_PARTS.map(|sizes| (sizes, true)));
        for ([batch, queries, seqlen, heads_q, heads_kv], causal) in all {
            let plain = Point::plain((direction, dtype), [heads_q, heads_kv], dims, [batch, seqlen]);
            let point = Point { queries: Some(queries), causal, ..plain };
            points.push(point.checked()?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_sweep() {
        let points = Sweep::papers().points().unwrap();
        assert_eq!(points.len(), 2 * 2 * 2 * 6);
        assert!(points.iter().all(|p| p.batch * p.seqlen == TOKENS && p.heads_q * p.head_dim == HIDDEN));
        assert_eq!(points[0].to_string(), "fwd/bf16/d64/full/s512/b32/h32/kv32");
        assert_eq!(points[47].to_string(), "fwd/f16/d128/causal/s16384/b1/h16/kv16");
    }

    #[test]
    fn each_class_of_inputs_has_the_points() {
        let sweep = Sweep { inputs: vec![Class::Normal, Class::Late], seqlens: vec![512], ..Sweep::papers() };
        let points = sweep.points().unwrap();
        let (normal, late) = points.split_at(8);
        assert_eq!(normal[0].to_string(), "fwd/bf16/d64/full/s512/b32/h32/kv32");
        assert_eq!(late[0].to_string(), "fwd/bf16/d64/full/s512/b32/h32/kv32/late");
        assert_eq!(
            (normal[3].family(), late[3].family()),
            ("fwd-bf16-d128-causal".into(), "fwd-bf16-d128-causal-late".into())
        );
        let json = |point| serde_json::to_string(point).unwrap();
        assert!(!json(&normal[0]).contains("inputs") && json(&late[0]).contains("\"inputs\":\"late\""));
        assert!(points.iter().all(|point| serde_json::from_str::<Point>(&json(point)).unwrap() == *point));
        assert!(normal.iter().zip(late).all(|(a, b)| Point { inputs: Class::Normal, ..b.clone() } == *a));
        assert_eq!(points.iter().filter(|point| point.matches("late/d64")).count(), 4);
        let nan = Sweep { inputs: vec![Class::Nan], directions: Direction::ALL.to_vec(), ..sweep };
        let refused = nan.points().unwrap_err().to_string();
        assert!(refused.ends_with("allowed: --directions fwd, or --inputs normal,peaky,sink,late"), "{refused}");
    }

    #[test]
    fn a_cap_is_a_part_of_each_point() {
        let sweep = Sweep { softcap: Some(50), inputs: vec![Class::Late], seqlens: vec![512], ..Sweep::papers() };
        let point = sweep.points().unwrap().remove(0);
        assert_eq!(point.to_string(), "fwd/bf16/d64/full/s512/b32/h32/kv32/softcap50/late");
        assert_eq!(point.family(), "fwd-bf16-d64-full-softcap50-late");
        assert_eq!(point.problem().unwrap().softcap(), 50.0);
        assert!(point.matches("softcap50/d64") && !point.matches("softcap5"));
        let json = serde_json::to_string(&point).unwrap();
        assert!(json.contains("\"softcap\":50") && serde_json::from_str::<Point>(&json).unwrap() == point);
        let point = Sweep { dtypes: vec![Precision::E4m3], ..sweep }.points().unwrap().remove(0);
        assert_eq!(
            (point.problem().unwrap().softcap(), point.family().as_str()),
            (50.0, "fwd-e4m3-d64-full-softcap50-late")
        );
        let sweep = Sweep { alibi: true, softcap: Some(50), seqlens: vec![512], ..Sweep::papers() };
        let point = &sweep.points().unwrap()[0];
        assert_eq!(point.to_string(), "fwd/bf16/d64/full/s512/b32/h32/kv32/softcap50/alibi");
        assert_eq!(point.family(), "fwd-bf16-d64-full-softcap50-alibi");
        assert!(point.problem().unwrap().alibi().is_some() && point.backward_problem().is_ok());
        // Head 1 of 32 has the slope 2^-0.5. The last query stands at the last key.
        let [near, far] = [500, 0].map(|key| point.score(0.0, [1, 500, key])[0]);
        assert!(near == 0.0 && (far + 500.0 * 0.5f64.sqrt()).abs() < 1e-4, "{far}");
        let json = serde_json::to_string(point).unwrap();
        assert!(json.contains("\"alibi\":true") && serde_json::from_str::<Point>(&json).unwrap() == *point);
        let refused = Sweep { alibi: true, dtypes: vec![Precision::E4m3], ..Sweep::papers() }.points().unwrap_err();
        assert!(refused.to_string().starts_with("--alibi with --dtypes e4m3"), "{refused}");
    }

    #[test]
    fn scores_of_e4m3_may_be_in_f32() {
        let sweep = Sweep { f32_scores: true, dtypes: vec![Precision::E4m3], ..Sweep::papers() };
        let point = &sweep.points().unwrap()[0];
        assert_eq!(point.to_string(), "fwd/e4m3/d64/full/s512/b32/h32/kv32/f32scores");
        assert_eq!(point.family(), "fwd-e4m3-d64-full-f32scores");
        let json = serde_json::to_string(point).unwrap();
        assert!(json.contains("\"f32_scores\":true") && serde_json::from_str::<Point>(&json).unwrap() == *point);
        let refused = Sweep { f32_scores: true, ..Sweep::papers() }.points().unwrap_err().to_string();
        assert!(refused.starts_with("--f32-scores with 16-bit types"), "{refused}");
    }

    #[test]
    fn dropout_is_a_part_of_each_point() {
        let sweep = Sweep { dropout: Some(10), alibi: true, seqlens: vec![512], ..Sweep::papers() };
        let point = &sweep.points().unwrap()[0];
        assert_eq!(point.to_string(), "fwd/bf16/d64/full/s512/b32/h32/kv32/alibi/dropout10");
        assert_eq!(point.family(), "fwd-bf16-d64-full-alibi-dropout10");
        assert!(point.matches("dropout10/d64") && !point.matches("dropout1"));
        assert_eq!(point.problem().unwrap().dropout().unwrap().dropped(), 3277);
        assert!(point.backward_problem().is_ok());
        let json = serde_json::to_string(point).unwrap();
        assert!(json.contains("\"dropout\":10") && serde_json::from_str::<Point>(&json).unwrap() == *point);
        let refused = |sweep: Sweep| sweep.points().unwrap_err().to_string();
        let fp8 = Sweep { dropout: Some(10), dtypes: vec![Precision::E4m3], ..Sweep::papers() };
        assert!(refused(fp8).starts_with("--dropout with --dtypes e4m3"));
        let peaky = Sweep { inputs: vec![Class::Peaky], ..sweep.clone() };
        assert!(refused(peaky).starts_with("--dropout with other --inputs"));
        let all = format!("{:#}", Sweep { dropout: Some(100), ..sweep }.points().unwrap_err());
        assert!(all.contains("dropout 100 percent; allowed: 1 to 99"), "{all}");
    }

    #[test]
    fn a_bias_is_a_part_of_each_point() {
        let sweep = Sweep { bias: "f32:bhq".parse().unwrap(), seqlens: vec![512], ..Sweep::papers() };
        let point = &sweep.points().unwrap()[0];
        assert_eq!(point.to_string(), "fwd/bf16/d64/full/s512/b32/h32/kv32/bias-f32-bhq");
        assert_eq!(point.family(), "fwd-bf16-d64-full-bias-f32-bhq");
        assert!(point.matches("bias-f32-bhq/d64") && !point.matches("bias-f32"));
        let plain = Point { bias: Bias::NONE, ..point.clone() };
        assert_eq!((point.flops(), plain.to_string().contains("bias")), (plain.flops(), false));
        assert_eq!(point.bytes() - plain.bytes(), 4 * 32 * 32 * 512 * 512);
        assert_eq!(point.problem().unwrap().bias(), sweep.bias.option());
        assert!(point.backward_problem().unwrap().wants_d_bias() && !plain.backward_problem().unwrap().wants_d_bias());
        let json = |point: &Point| serde_json::to_string(point).unwrap();
        assert!(json(point).contains("\"bias\":\"f32:bhq\"") && !json(&plain).contains("bias"));
        assert_eq!(serde_json::from_str::<Point>(&json(point)).unwrap(), *point);
        let masked = Sweep { bias: "f16::mask".parse().unwrap(), ..sweep.clone() }.points().unwrap().remove(0);
        assert_eq!(masked.family(), "fwd-bf16-d64-full-bias-f16-mask");
        let capped = Sweep { softcap: Some(50), ..sweep.clone() };
        assert!(capped.points().is_ok());
        let lowest = "bf16:q:lowest".parse().unwrap();
        for (wrong, part) in [
            (Sweep { dtypes: vec![Precision::E4m3], ..sweep.clone() }, "--bias with --dtypes e4m3"),
            (Sweep { directions: Direction::ALL.to_vec(), ..capped }, "--bias with --softcap and --directions bwd"),
            (Sweep { inputs: vec![Class::Nan], ..sweep.clone() }, "--bias with --inputs nan"),
            (Sweep { bias: lowest, ..sweep }, "--bias bf16:q:lowest"),
        ] {
            let refused = wrong.points().unwrap_err().to_string();
            assert!(refused.starts_with(part) && refused.contains("; allowed: "), "{refused}");
        }
    }

    #[test]
    fn the_sweep_of_few_heads() {
        let sweep =
            Sweep { few_heads: true, masks: vec![PointMask::Causal], dtypes: vec![Precision::Bf16], ..Sweep::papers() };
        let points = sweep.points().unwrap();
        assert_eq!(points.len(), 60);
        assert_eq!(points[0].to_string(), "fwd/bf16/d64/causal/s512/b1/h32/kv8");
        assert_eq!(points[59].to_string(), "fwd/bf16/d128/causal/s32768/b1/h4/kv4");
    }

    #[test]
    fn the_sweep_of_short_and_lopsided_problems() {
        let sweep = Sweep { lopsided: true, dtypes: vec![Precision::Bf16], ..Sweep::papers() };
        let points = sweep.points().unwrap();
        assert_eq!(points.len(), 68);
        assert_eq!(points[0].to_string(), "fwd/bf16/d64/full/s77/b212/h32/kv32");
        assert_eq!(points[18].to_string(), "fwd/bf16/d64/full/s128x16384/b1/h32/kv8");
        assert_eq!(points[29].to_string(), "fwd/bf16/d64/full/s16x131072/b1/h8/kv1");
        assert_eq!(points[30].to_string(), "fwd/bf16/d64/causal/s512x4096/b1/h4/kv4");
        assert_eq!(
            [58, 63, 66].map(|i| points[i].family()),
            ["fwd-bf16-d128-full-lopsided", "fwd-bf16-d128-full-gqa8-lopsided", "fwd-bf16-d128-causal-gqa8-lopsided"]
        );
        assert_eq!(points.iter().filter(|p| p.matches("s1024x77/d128")).count(), 1);
        let fp8 = Sweep { dtypes: vec![Precision::E4m3], ..sweep };
        assert!(fp8.points().unwrap_err().to_string().contains("--dtypes bf16,f16"));
    }

    #[test]
    fn the_sweep_of_packed_sequences() {
        let sweep = Sweep { packed: vec![16384, 65536], dtypes: vec![Precision::Bf16], ..Sweep::papers() };
        let points = sweep.points().unwrap();
        assert_eq!(points.len(), 2 * 2 * (6 + 2 * 5));
        assert_eq!(points[0].to_string(), "fwd/bf16/d64/full/equal512/t16384/b32/h32/kv32");
        assert_eq!(points[5].lengths(), "equal16384/t16384");
        let words: Vec<String> = points[6..16].iter().map(Point::lengths).collect();
        let ragged = ["lognormal512", "lognormal2048", "lognormal8192", "long", "documents4096"];
        let expected = ["t16384", "t65536"].into_iter().flat_map(|t| ragged.map(|kind| format!("{kind}/{t}")));
        assert_eq!(words, expected.collect::<Vec<_>>());
        assert_eq!(
            (points[0].family(), points[63].family()),
            ("fwd-bf16-d64-full-packed".into(), "fwd-bf16-d128-causal-ragged64k".into())
        );
        for point in &points {
            let packed = point.packed.as_ref().unwrap();
            assert_eq!(packed.lengths.iter().sum::<usize>(), point.seqlen, "{point}");
            let problem = point.problem().unwrap();
            assert!(problem.is_packed_q() && problem.is_packed_kv() && problem.dims().batch == packed.lengths.len());
            let text = serde_json::to_string(point).unwrap();
            assert_eq!(serde_json::from_str::<Point>(&text).unwrap(), *point);
        }
        // Both sweeps have the same problems of one length, packed and not.
        let dense = Sweep { packed: vec![], ..sweep.clone() }.points().unwrap();
        let equal: Vec<Point> = points.iter().filter(|p| p.family().ends_with("-packed")).cloned().collect();
        assert_eq!(equal.iter().map(|p| p.dense().unwrap()).collect::<Vec<_>>(), dense);
        assert!(equal.iter().zip(&dense).all(|(packed, dense)| packed.flops() == dense.flops()));
        assert!(equal.iter().zip(&dense).all(|(packed, dense)| packed.bytes() == dense.bytes()));
        let of = |filter: &str| points.iter().filter(|p| p.matches(filter)).count();
        assert_eq!((of("lognormal512/d64"), of("equal512"), of("t65536"), of("long/causal")), (4, 4, 20, 4));

        let refused = |sweep: Sweep| sweep.points().unwrap_err().to_string();
        assert!(refused(Sweep { inputs: vec![Class::Sink], ..sweep.clone() }).contains("allowed: --inputs normal"));
        assert!(refused(Sweep { tokens: 1 << 40, ..sweep }).contains("with 1099511627776 tokens; allowed: up to"));
    }

    /// On the CPU everything is as many times shorter as a batch has fewer tokens.
    #[test]
    fn small_packed_sequences() {
        let sweep = Sweep { packed: vec![256, 1024], dims: vec![64.into()], ..Sweep::small() };
        let points = sweep.points().unwrap();
        assert_eq!(points[3].lengths(), "lognormal8/t256");
        assert_eq!(points[12].lengths(), "documents64/t1024");
        let packed = points[12].packed.as_ref().unwrap();
        assert!(packed.longest() == 64 && packed.lengths.iter().sum::<usize>() == 1024);
        // Whatever there is to share, it is shared.
        for tokens in 1..40 {
            let tiny = Sweep { packed: vec![tokens, 4 * tokens], seqlens: vec![1], tokens, ..sweep.clone() };
            for point in tiny.points().unwrap() {
                assert_eq!(point.packed.as_ref().unwrap().lengths.iter().sum::<usize>(), point.seqlen, "{point}");
            }
        }
    }

    #[test]
    fn filters_and_families() {
        let filter = |filters: &[&str]| {
            let filters = filters.iter().map(|&f| f.into()).collect();
            Sweep { filters, gqa: vec![1, 8], ..Sweep::papers() }.points()
        };
        assert_eq!(filter(&["causal/d64/s512", "kv2/f16/full/s1024"]).unwrap().len(), 4 + 1);
        // A word is a whole word: s512 is no part of s5120.
        assert!(filter(&["s51"]).unwrap_err().to_string().contains("none of the 96 points"));
        let families: Vec<_> = filter(&["s512/bf16/d64/causal"]).unwrap().iter().map(Point::family).collect();
        assert_eq!(families, ["fwd-bf16-d64-causal", "fwd-bf16-d64-causal-gqa8"]);
    }

    #[test]
    fn what_does_not_divide_is_refused() {
        let refused = |sweep: Sweep| sweep.points().unwrap_err().to_string();
        assert!(
            refused(Sweep { dims: vec![96.into()], hidden: 64, ..Sweep::small() })
                .contains("head dim 96 in a hidden size of 64")
        );
        assert!(refused(Sweep { gqa: vec![5], ..Sweep::papers() }).contains("--gqa 5"));
    }

    #[test]
    fn batch_and_tokens() {
        let batches = |sweep: Sweep| sweep.points().unwrap().iter().map(|p| p.batch).collect::<Vec<_>>();
        let one = Sweep {
            dims: vec![64.into()],
            masks: vec![PointMask::Causal],
            dtypes: vec![Precision::F16],
            ..Sweep::papers()
        };
        assert_eq!(batches(Sweep { tokens: 2048, ..one.clone() }), [4, 2, 1, 1, 1, 1]);
        assert_eq!(batches(Sweep { batch: Some(3), ..one }), [3; 6]);
    }
}
