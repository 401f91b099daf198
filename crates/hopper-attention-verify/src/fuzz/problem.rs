//! A problem with everything that decides how it is run; how one is drawn; and its form as JSON.

use std::fmt;

use hopper_attention::{Arch, BackwardProblem, Corner, DType, Dims, Dropout, ForwardProblem, Mask, Scaling};
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use crate::alibi::Alibi;
use crate::bias::Bias;
use crate::blocks::Blocks;
use crate::case::{Case, random};
use crate::data::Values;
use crate::layouts::Placement;
use crate::packing::Packing;
use crate::sinks::Sinks;

/// What is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// The output and the LSE, of operands of 16 or 32 bits.
    Forward,
    /// The gradients.
    Backward,
    /// The output and the LSE, of e4m3 operands.
    Fp8,
    /// e4m3 operands of others. A GPU must give the CPU's bytes.
    Quantize,
}

/// What only e4m3 operands have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fp8 {
    /// Which elements share a factor.
    pub scaling: Scaling,
    /// Whether scores may be summed in f16.
    pub half_scores: bool,
    /// The signs of a rotation of Q and K.
    pub hadamard: Option<u64>,
}

/// How a GPU runs the problem. A CPU ignores it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Launch {
    /// One of the kernels that compute the problem, by its number among them, counted in a circle. `None` for the library's
    /// choice.
    pub kernel: Option<u8>,
    /// On a stream of its own, not the default one.
    pub second_stream: bool,
    /// Captured into a graph, which is then launched.
    pub graph: bool,
    /// What the workspace is filled with before.
    pub poison: u8,
}

/// A problem, its inputs, and how it is run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Record", into = "Record")]
pub struct Problem {
    /// What is computed.
    pub pass: Pass,
    /// The type of the operands; for e4m3 operands that of the output and of what is quantised.
    pub dtype: DType,
    /// Sizes, mask, layouts and values.
    pub case: Case,
    /// What only e4m3 operands have.
    pub fp8: Fp8,
    /// The instruction set, if it is not the library's choice.
    pub arch: Option<Arch>,
    /// How many multiprocessors of a GPU its kernels leave to others.
    pub sm_margin: usize,
    /// The most bytes of its workspace on a GPU, if there is a limit.
    pub workspace_limit: Option<u64>,
    /// Whether gradients must be the same on every run.
    pub deterministic: bool,
    /// How a GPU runs it.
    pub launch: Launch,
}

impl Problem {
    /// The forward problem.
    pub fn forward(&self) -> ForwardProblem {
        self.built().expect("a drawn problem is legal")
    }

    /// The forward problem, or why it is none.
    ///
    /// # Errors
    /// As `ForwardProblemBuilder::build`.
    pub fn built(&self) -> hopper_attention::Result<ForwardProblem> {
        let options = match self.pass {
            Pass::Fp8 | Pass::Quantize => {
                let Fp8 { scaling, half_scores, .. } = self.fp8;
                let options = self.case.options(DType::E4M3).lse(true).output(self.dtype);
                options.scaling(scaling).half_scores(half_scores)
            }
            _ => self.case.options(self.dtype),
        };
        let options = match self.arch {
            Some(arch) => options.arch(arch),
            None => options,
        };
        options.sm_margin(self.sm_margin).workspace_limit(self.workspace_limit).build()
    }

    /// The backward problem, with the gradients of sinks and of a bias where there are such.
    ///
    /// # Errors
    /// As `BackwardProblemBuilder::build`, and where there is no forward problem.
    pub fn backward(&self) -> hopper_attention::Result<BackwardProblem> {
        let case = &self.case;
        let options = BackwardProblem::builder(&self.built()?).d_lse(case.lse).d_sinks(!case.sinks.is_none());
        options.d_bias(!case.bias.is_none()).deterministic(self.deterministic).build()
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pass, dtype, case, fp8, arch, sm_margin, workspace_limit, deterministic, launch } = self;
        write!(f, "{} {dtype} {case}", format!("{pass:?}").to_lowercase())?;
        if matches!(pass, Pass::Fp8 | Pass::Quantize) {
            write!(f, " {}", fp8.scaling)?;
            f.write_str(if fp8.half_scores { " half_scores" } else { "" })?;
            if let Some(seed) = fp8.hadamard {
                write!(f, " hadamard {seed}")?;
            }
        }
        if let Some(arch) = arch {
            write!(f, " {arch}")?;
        }
        if *sm_margin > 0 {
            write!(f, " sm_margin {sm_margin}")?;
        }
        if let Some(bytes) = workspace_limit {
            write!(f, " workspace_limit {bytes}")?;
        }
        f.write_str(if *deterministic { " deterministic" } else { "" })?;
        if let Some(kernel) = launch.kernel {
            write!(f, " kernel {kernel}")?;
        }
        f.write_str(if launch.second_stream { " on a second stream" } else { "" })?;
        f.write_str(if launch.graph { " in a graph" } else { "" })
    }
}

/// Problems for a GPU, or for the CPU.
pub(super) fn any(for_gpu: bool) -> impl Strategy<Value = Problem> {
    let passes = if for_gpu {
        vec![Pass::Forward, Pass::Backward, Pass::Fp8, Pass::Quantize]
    } else {
        vec![Pass::Forward, Pass::Backward, Pass::Fp8]
    };
    // GPUs have no kernels for f32.
    let dtypes = if for_gpu { vec![DType::BF16, DType::F16] } else { vec![DType::BF16, DType::F16, DType::F32] };
    let fp8 = (
        proptest::sample::select(Scaling::ALL.to_vec()),
        proptest::bool::ANY,
        proptest::option::of(proptest::num::u64::ANY),
    );
    let arch = prop_oneof![3 => Just(None), 1 => Just(Some(Arch::Sm90)), 1 => Just(Some(Arch::Sm80))];
    // Up to all but one of an H100's multiprocessors.
    let margin = prop_oneof![5 => Just(0), 1 => 1usize..132];
    // From 256 KiB, which few gradients get by with, to 128 MiB, which nearly all do.
    let limit = prop_oneof![9 => Just(None), 1 => (18u32..28).prop_map(|log| Some(1u64 << log))];
    let launch =
        (proptest::option::of(0u8..32), proptest::bool::ANY, proptest::bool::weighted(0.2), proptest::num::u8::ANY);
    let values = prop_oneof![
        12 => Just(None),
        1 => Just(Some(Values::Large)),
        1 => Just(Some(Values::Tiny)),
        1 => Just(Some(Values::Constant)),
    ];
    let choices = (proptest::sample::select(passes), proptest::sample::select(dtypes), arch, proptest::bool::ANY);
    // Head dims that kernels take, and any on the CPU.
    let cases = if for_gpu { random::case_of_kernels(256).boxed() } else { random::case_on_cpu().boxed() };
    let cases = (cases, random::packing(), random::sinks())
        .prop_map(|(case, packing, sinks)| Case { sinks, ..random::packed(case, packing) });
    let of_pairs = (random::blocks(), random::bias(), random::dropout());
    let cases = (cases, ((random::softcap(), of_pairs), random::biases()));
    (choices, cases, values, fp8, (launch, margin, limit)).prop_map(
        move |(
            (pass, dtype, arch, deterministic),
            (case, ((softcap, (blocks, bias, dropout)), biases)),
            values,
            (scaling, half_scores, hadamard),
            last,
        )| {
            let (launch, sm_margin, limit) = last;
            let (kernel, second_stream, graph, poison) = launch;
            let fp8 = matches!(pass, Pass::Fp8 | Pass::Quantize);
            // e4m3 operands have no ALiBi and no maximum logits.
            let (alibi, max_logits) = biases;
            let case = if fp8 { case } else { Case { alibi, max_logits, ..case } };
            let mut case = random::capped(case, softcap);
            let widest = case.dims.head_dim_qk.max(case.dims.head_dim_vo);
            if pass != Pass::Quantize {
                case = random::listed(case, blocks);
            }
            // e4m3 operands have no additive bias. Kernels of other types have one, but none in the backward beside a cap.
            if !fp8 && (!for_gpu || case.softcap == 0.0 || pass == Pass::Forward) {
                case = case.bias(bias);
            }
            // And dropout. Forwards for sm90 have it beside windows up to some head dim. Above, those for sm80 run.
            let is_wide = pass == Pass::Forward && widest > widest_with_dropout(&case);
            if !(fp8 || for_gpu && is_wide && arch == Some(Arch::Sm90)) {
                // A factor of 1000 takes dS of f16 beyond its range (docs/numerics.md).
                let is_narrow = for_gpu && pass == Pass::Backward && dtype == DType::F16;
                case.dropout = if is_narrow { dropout.min(0.9) } else { dropout };
            }
            case.values = values.unwrap_or(case.values);
            if for_gpu && pass == Pass::Backward {
                // Backward kernels have no head dims above 128.
                let dims = case.dims;
                case.dims =
                    dims.with_head_dim_qk(dims.head_dim_qk.min(128)).with_head_dim_vo(dims.head_dim_vo.min(128));
            }
            if fp8 && for_gpu {
                // Kernels move rows of e4m3 in steps of 16 bytes, too.
                let dims = case.dims;
                case.dims = dims.with_head_dim_qk(dims.head_dim_qk.next_multiple_of(16));
                case.dims = case.dims.with_head_dim_vo(dims.head_dim_vo.next_multiple_of(16));
            }
            // Where a margin is computed: by kernels for sm90.
            let by_sm80 = arch == Some(Arch::Sm80) || (is_wide && case.dropout > 0.0);
            let honours = for_gpu && pass != Pass::Quantize && !by_sm80;
            Problem {
                pass,
                dtype: if fp8 && dtype == DType::F32 { DType::BF16 } else { dtype },
                case,
                fp8: Fp8 { scaling, half_scores, hadamard },
                arch: if fp8 { None } else { arch.filter(|_| for_gpu) },
                sm_margin: if honours { sm_margin } else { 0 },
                // Other passes have no tiles that a limit leaves whole.
                workspace_limit: limit.filter(|_| for_gpu && matches!(pass, Pass::Backward | Pass::Fp8)),
                deterministic: deterministic && pass == Pass::Backward,
                launch: Launch { kernel, second_stream: second_stream || graph, graph, poison },
            }
        },
    )
}

/// The largest head dim that kernels take with dropout and the mask of a case. Those that add a bias
/// take it as with windows.
fn widest_with_dropout(case: &Case) -> usize {
    match (case.mask, case.packing == Packing::default()) {
        _ if !case.blocks.is_none() && !case.bias.is_none() => 0,
        _ if !case.blocks.is_none() => 256,
        (Mask::Full | Mask::Causal { .. }, _) if case.bias.is_none() => 256,
        (_, true) => 128,
        (_, false) => 64,
    }
}

/// A problem as JSON.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    pass: Pass,
    dtype: String,
    batch: usize,
    seqlen_q: usize,
    seqlen_kv: usize,
    heads_q: usize,
    heads_kv: usize,
    head_dim_qk: usize,
    head_dim_vo: usize,
    mask: MaskRecord,
    scale: Option<f32>,
    lse: bool,
    placement: Placement,
    values: Values,
    seed: u64,
    scaling: String,
    half_scores: bool,
    hadamard: Option<u64>,
    arch: Option<String>,
    /// Older files have none.
    #[serde(default)]
    sm_margin: usize,
    /// Older files have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    workspace_limit: Option<u64>,
    deterministic: bool,
    launch: Launch,
    /// Older files have none.
    #[serde(default, skip_serializing_if = "Packing::is_none")]
    packing: Packing,
    /// Older files have none.
    #[serde(default, skip_serializing_if = "Sinks::is_none")]
    sinks: Sinks,
    /// Older files have none.
    #[serde(default, skip_serializing_if = "is_zero")]
    softcap: f32,
    /// Older files have none.
    #[serde(default, skip_serializing_if = "Alibi::is_none")]
    alibi: Alibi,
    /// Older files have none.
    #[serde(default, skip_serializing_if = "is_false")]
    max_logits: bool,
    /// Older files have none.
    #[serde(default, skip_serializing_if = "Blocks::is_none")]
    blocks: Blocks,
    /// Older files have none.
    #[serde(default, skip_serializing_if = "Bias::is_none")]
    bias: Bias,
    #[serde(default, skip_serializing_if = "is_zero")]
    dropout: f32,
}

fn is_false(wanted: &bool) -> bool {
    !wanted
}

fn is_zero(number: &f32) -> bool {
    *number == 0.0
}

/// The same of a mask. Bounds that are `null` keep all keys.
#[derive(Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum MaskRecord {
    Full,
    Causal { top_left: bool },
    Window { left: Option<usize>, right: Option<usize>, top_left: bool },
    Chunked { chunk: usize, top_left: bool },
    Prefix { keys: usize, top_left: bool },
}

impl From<Problem> for Record {
    fn from(problem: Problem) -> Self {
        let Problem { pass, dtype, case, fp8, arch, sm_margin, workspace_limit, deterministic, launch } = problem;
        let top_left = |corner| corner == Corner::TopLeft;
        Self {
            pass,
            dtype: dtype.to_string(),
            batch: case.dims.batch,
            seqlen_q: case.dims.seqlen_q,
            seqlen_kv: case.dims.seqlen_kv,
            heads_q: case.dims.heads_q,
            heads_kv: case.dims.heads_kv,
            head_dim_qk: case.dims.head_dim_qk,
            head_dim_vo: case.dims.head_dim_vo,
            mask: match case.mask {
                Mask::Causal { corner } => MaskRecord::Causal { top_left: top_left(corner) },
                Mask::Window { left, right, corner } => MaskRecord::Window { left, right, top_left: top_left(corner) },
                Mask::Chunked { chunk, corner } => MaskRecord::Chunked { chunk, top_left: top_left(corner) },
                Mask::Prefix { keys, corner } => MaskRecord::Prefix { keys, top_left: top_left(corner) },
                _ => MaskRecord::Full,
            },
            scale: case.scale,
            lse: case.lse,
            placement: case.placement,
            values: case.values,
            seed: case.seed,
            scaling: fp8.scaling.to_string(),
            half_scores: fp8.half_scores,
            hadamard: fp8.hadamard,
            arch: arch.map(|arch| arch.to_string()),
            sm_margin,
            workspace_limit,
            deterministic,
            launch,
            packing: case.packing,
            sinks: case.sinks,
            softcap: case.softcap,
            alibi: case.alibi,
            max_logits: case.max_logits,
            blocks: case.blocks,
            bias: case.bias,
            dropout: case.dropout,
        }
    }
}

/// The value that prints as this word.
fn named<T: fmt::Display + Copy>(what: &str, word: &str, all: &[T]) -> Result<T, String> {
    all.iter().copied().find(|value| value.to_string() == word).ok_or_else(|| {
        let allowed: Vec<_> = all.iter().map(T::to_string).collect();
        format!("{what}: {word:?}; allowed: {}", allowed.join(", "))
    })
}

impl TryFrom<Record> for Problem {
    type Error = String;

    fn try_from(record: Record) -> Result<Self, String> {
        Dropout::new(record.dropout).map_err(|error| error.to_string())?;
        let corner = |top_left| if top_left { Corner::TopLeft } else { Corner::BottomRight };
        let dims = Dims::new(record.batch, record.seqlen_q, record.heads_q, record.head_dim_qk)
            .with_seqlen_kv(record.seqlen_kv)
            .with_heads_kv(record.heads_kv)
            .with_head_dim_vo(record.head_dim_vo);
        let case = Case {
            dims,
            mask: match record.mask {
                MaskRecord::Full => Mask::Full,
                MaskRecord::Causal { top_left } => Mask::Causal { corner: corner(top_left) },
                MaskRecord::Window { left, right, top_left } => Mask::Window { left, right, corner: corner(top_left) },
                MaskRecord::Chunked { chunk, top_left } => Mask::Chunked { chunk, corner: corner(top_left) },
                MaskRecord::Prefix { keys, top_left } => Mask::Prefix { keys, corner: corner(top_left) },
            },
            scale: record.scale,
            lse: record.lse,
            placement: record.placement,
            values: record.values,
            seed: record.seed,
            packing: record.packing,
            sinks: record.sinks,
            softcap: record.softcap,
            alibi: record.alibi,
            max_logits: record.max_logits,
            blocks: record.blocks,
            bias: record.bias,
            dropout: record.dropout,
        };
        let problem = Self {
            pass: record.pass,
            dtype: named("dtype", &record.dtype, &[DType::BF16, DType::F16, DType::F32])?,
            case,
            fp8: Fp8 {
                scaling: named("scaling", &record.scaling, &Scaling::ALL)?,
                half_scores: record.half_scores,
                hadamard: record.hadamard,
            },
            arch: record.arch.map(|arch| named("arch", &arch, &[Arch::Sm80, Arch::Sm90])).transpose()?,
            sm_margin: record.sm_margin,
            workspace_limit: record.workspace_limit,
            deterministic: record.deterministic,
            launch: record.launch,
        };
        // What a file says may be no legal problem.
        let elements =
            [dims.batch, dims.seqlen_q.max(dims.seqlen_kv), dims.heads_q, dims.head_dim_qk.max(dims.head_dim_vo)];
        if elements
            .iter()
            .try_fold(1_usize, |product, &x| product.checked_mul(x))
            .is_none_or(|product| product > 1 << 32)
        {
            return Err(format!("sizes {elements:?}; allowed: at most 2^32 elements"));
        }
        let dtype = if matches!(problem.pass, Pass::Fp8 | Pass::Quantize) { DType::E4M3 } else { problem.dtype };
        let forward = problem.case.options(dtype).build().map_err(|error| error.to_string())?;
        problem.case.packing.lengths().check(&forward).map_err(|error| error.to_string())?;
        Ok(problem)
    }
}

#[cfg(test)]
mod tests {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    use super::*;
    use crate::inputs::Class;

    #[test]
    fn margins_are_drawn_where_kernels_leave_multiprocessors() {
        let mut runner = TestRunner::deterministic();
        let mut drawn = |for_gpu| (0..300).map(|_| any(for_gpu).new_tree(&mut runner).unwrap().current()).collect();
        let (on_gpu, on_cpu): (Vec<Problem>, Vec<Problem>) = (drawn(true), drawn(false));
        let margins: Vec<_> = on_gpu.iter().filter(|problem| problem.sm_margin > 0).collect();
        assert!((10..100).contains(&margins.len()), "{}", margins.len());
        assert!(margins.iter().all(|problem| problem.pass != Pass::Quantize && problem.arch != Some(Arch::Sm80)));
        assert!(margins.iter().all(|problem| problem.forward().sm_margin() == problem.sm_margin));
        assert!(on_cpu.iter().all(|problem| problem.sm_margin == 0));
        let limits: Vec<_> = on_gpu.iter().filter(|problem| problem.workspace_limit.is_some()).collect();
        assert!((5..50).contains(&limits.len()), "{}", limits.len());
        assert!(limits.iter().all(|problem| matches!(problem.pass, Pass::Backward | Pass::Fp8)));
        assert!(limits.iter().all(|problem| problem.forward().workspace_limit() == problem.workspace_limit));
        assert!(on_cpu.iter().all(|problem| problem.workspace_limit.is_none()));
    }

    #[test]
    fn wide_head_dims_are_drawn_for_the_cpu() {
        let mut runner = TestRunner::deterministic();
        let mut drawn = |for_gpu| (0..400).map(|_| any(for_gpu).new_tree(&mut runner).unwrap().current()).collect();
        let (on_gpu, on_cpu): (Vec<Problem>, Vec<Problem>) = (drawn(true), drawn(false));
        let widest = |problem: &Problem| problem.case.dims.head_dim_qk.max(problem.case.dims.head_dim_vo);
        // All but backward kernels, of either instruction set, have head dims above 128.
        let wide: Vec<_> = on_gpu.iter().filter(|problem| widest(problem) > 128).collect();
        assert!(wide.iter().all(|problem| problem.pass != Pass::Backward && widest(problem) <= 256));
        for arch in [None, Some(Arch::Sm90), Some(Arch::Sm80)] {
            assert!(wide.iter().any(|problem| problem.arch == arch && problem.pass == Pass::Forward), "{arch:?}");
        }
        for pass in [Pass::Fp8, Pass::Quantize] {
            let of_pass = || wide.iter().filter(|problem| problem.pass == pass);
            assert!(of_pass().count() > 5 && of_pass().any(|problem| problem.fp8.hadamard.is_some()), "{pass:?}");
            assert!(of_pass().any(|problem| problem.forward().has_lengths()), "{pass:?}");
        }
        for pass in [Pass::Forward, Pass::Backward, Pass::Fp8] {
            let wide: Vec<_> = on_cpu.iter().filter(|problem| problem.pass == pass && widest(problem) > 256).collect();
            assert!(wide.len() > 5 && wide.iter().any(|problem| problem.forward().has_lengths()), "{pass:?}");
            let dims = |problem: &&Problem| (problem.case.dims.head_dim_qk, problem.case.dims.head_dim_vo);
            assert!(wide.iter().map(dims).any(|(qk, vo)| qk < vo), "{pass:?}");
            assert!(wide.iter().map(dims).any(|(qk, vo)| qk > vo), "{pass:?}");
        }
        // A rotation is drawn for head dims that are no power of two, and rows of e4m3 that no kernel takes.
        let fp8 = |problem: &&Problem| problem.pass == Pass::Fp8;
        let rotated = |problem: &Problem| problem.fp8.hadamard.is_some() && problem.case.dims.head_dim_qk % 16 == 8;
        assert!(on_cpu.iter().filter(fp8).any(rotated) && !on_gpu.iter().filter(fp8).any(rotated));
    }

    #[test]
    fn packed_sequences_are_drawn() {
        let mut runner = TestRunner::deterministic();
        let mut drawn = |for_gpu| (0..300).map(|_| any(for_gpu).new_tree(&mut runner).unwrap().current()).collect();
        let (on_gpu, on_cpu): (Vec<Problem>, Vec<Problem>) = (drawn(true), drawn(false));
        for passes in [&[Pass::Forward, Pass::Backward][..], &[Pass::Fp8], &[Pass::Quantize]] {
            let has_lengths = |problem: &&Problem| passes.contains(&problem.pass) && problem.forward().has_lengths();
            assert!(on_gpu.iter().filter(has_lengths).count() > 10, "{passes:?}");
        }
        let packed: Vec<_> = on_cpu.iter().filter(|problem| problem.forward().has_lengths()).collect();
        assert!((50..150).contains(&packed.len()), "{}", packed.len());
        for pass in [Pass::Forward, Pass::Backward, Pass::Fp8] {
            let of_pass = || packed.iter().filter(|problem| problem.pass == pass);
            assert!(of_pass().any(|problem| problem.forward().is_packed_q() && problem.forward().is_packed_kv()));
            assert!(of_pass().any(|problem| problem.forward().fills_gaps()), "{pass:?}");
            assert!(of_pass().any(|problem| problem.case.packing.seqused_kv.is_some()), "{pass:?}");
        }
        // A file whose lists are wrong is refused.
        let problem = packed.iter().find(|problem| problem.forward().is_packed_q() && problem.case.dims.batch > 0);
        let mut wrong = (**problem.unwrap()).clone();
        wrong.case.packing.cu_seqlens_q.as_mut().unwrap()[0] = -1;
        let text = serde_json::to_string(&wrong).unwrap();
        let error = serde_json::from_str::<Problem>(&text).unwrap_err().to_string();
        assert!(error.contains("cu_seqlens_q: -1 at 0"), "{error}");
    }

    #[test]
    fn every_kind_of_sinks_is_drawn_for_every_pass() {
        let mut runner = TestRunner::deterministic();
        let drawn: Vec<_> = (0..600).map(|_| any(true).new_tree(&mut runner).unwrap().current()).collect();
        for pass in [Pass::Forward, Pass::Backward, Pass::Fp8] {
            let of_pass = || drawn.iter().filter(|problem| problem.pass == pass);
            assert!(Sinks::ALL.into_iter().all(|kind| of_pass().any(|problem| problem.case.sinks == kind)), "{pass:?}");
            assert!(of_pass().any(|problem| problem.forward().sinks().is_some() && problem.forward().has_lengths()));
        }
    }

    #[test]
    fn caps_are_drawn_for_every_pass() {
        let mut runner = TestRunner::deterministic();
        let mut drawn = |for_gpu| (0..600).map(|_| any(for_gpu).new_tree(&mut runner).unwrap().current()).collect();
        let both: [Vec<Problem>; 2] = [drawn(true), drawn(false)];
        let passes = [Pass::Forward, Pass::Backward, Pass::Fp8];
        for (drawn, pass) in both.iter().flat_map(|drawn| passes.map(|pass| (drawn, pass))) {
            let of_pass = || drawn.iter().filter(|problem| problem.pass == pass);
            let capped = |problem: &&Problem| problem.forward().softcap() != 0.0;
            let share = of_pass().filter(capped).count() as f64 / of_pass().count() as f64;
            assert!((0.1..0.4).contains(&share), "{pass:?} {share}");
            assert!(random::CAPS.iter().all(|cap| of_pass().any(|problem| problem.case.softcap == *cap)), "{pass:?}");
            let saturated =
                |problem: &&Problem| problem.case.scale.is_some_and(|scale| scale > problem.case.softcap / 3.0);
            assert!(of_pass().filter(capped).any(|problem| saturated(&problem)), "{pass:?}");
            assert!(of_pass().filter(capped).any(|problem| problem.forward().sinks().is_some()), "{pass:?}");
            assert!(of_pass().filter(capped).any(|problem| problem.forward().has_lengths()), "{pass:?}");
        }
    }

    #[test]
    fn slopes_and_maximum_logits_are_drawn_for_passes_that_have_them() {
        let mut runner = TestRunner::deterministic();
        let mut drawn = |for_gpu| (0..600).map(|_| any(for_gpu).new_tree(&mut runner).unwrap().current()).collect();
        let both: [Vec<Problem>; 2] = [drawn(true), drawn(false)];
        let fp8 = |problem: &&Problem| matches!(problem.pass, Pass::Fp8 | Pass::Quantize);
        for (drawn, pass) in both.iter().flat_map(|drawn| [Pass::Forward, Pass::Backward].map(|pass| (drawn, pass))) {
            let of_pass = || drawn.iter().filter(|problem| problem.pass == pass);
            let share = |of: fn(&Case) -> bool| {
                of_pass().filter(|problem| of(&problem.case)).count() as f64 / of_pass().count() as f64
            };
            let shares = [share(|case| !case.alibi.is_none()), share(|case| case.max_logits)];
            assert!(shares.iter().all(|share| (0.1..0.4).contains(share)), "{pass:?} {shares:?}");
            assert!(share(|case| case.alibi.is_none() && case.softcap == 0.0 && !case.max_logits) > 0.35, "{pass:?}");
            assert!(Alibi::ALL.iter().all(|kind| of_pass().any(|problem| problem.case.alibi == *kind)), "{pass:?}");
            for with in [
                |case: &Case| case.softcap != 0.0,
                |case: &Case| !case.sinks.is_none(),
                |case: &Case| case.packing != Packing::default(),
                |case: &Case| case.max_logits,
            ] {
                assert!(of_pass().any(|problem| !problem.case.alibi.is_none() && with(&problem.case)), "{pass:?}");
            }
        }
        assert!(
            both.iter().flatten().filter(fp8).all(|problem| problem.case.alibi.is_none() && !problem.case.max_logits)
        );
        // A file that wants them of e4m3 operands is refused by name.
        let fp8 = both.iter().flatten().find(fp8).unwrap();
        for (case, what) in [
            (fp8.case.clone().alibi(Alibi::Standard), "alibi with e4m3 operands"),
            (fp8.case.clone().max_logits(true), "max_logits with e4m3 operands"),
            (fp8.case.clone().dropout(0.5), "dropout with e4m3 operands"),
        ] {
            let text = serde_json::to_string(&Problem { case, ..fp8.clone() }).unwrap();
            let error = serde_json::from_str::<Problem>(&text).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }

    #[test]
    fn biases_are_drawn() {
        let mut runner = TestRunner::deterministic();
        let mut drawn = |for_gpu| (0..900).map(|_| any(for_gpu).new_tree(&mut runner).unwrap().current()).collect();
        let (on_gpu, on_cpu): (Vec<Problem>, Vec<Problem>) = (drawn(true), drawn(false));
        // What kernels do not have of it is not drawn for them.
        for pass in [Pass::Forward, Pass::Backward] {
            let with = |problem: &&Problem| problem.pass == pass && !problem.case.bias.is_none();
            assert!(on_gpu.iter().filter(with).count() > 20, "{pass:?}");
            for problem in on_gpu.iter().filter(with) {
                assert!(pass == Pass::Forward || problem.case.softcap == 0.0, "{}", problem.case);
            }
            let of_pass = || on_cpu.iter().filter(|problem| problem.pass == pass);
            let with: Vec<_> = of_pass().filter_map(|problem| problem.forward().bias()).collect();
            let share = with.len() as f64 / of_pass().count() as f64;
            assert!((0.1..0.4).contains(&share), "{pass:?} {share}");
            for own in [
                hopper_attention::Bias::is_per_batch,
                hopper_attention::Bias::is_per_head,
                hopper_attention::Bias::is_per_query,
            ] {
                assert!([false, true].iter().all(|&is| with.iter().any(|bias| own(bias) == is)), "{pass:?}");
            }
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                assert!(with.iter().any(|bias| bias.dtype() == dtype), "{pass:?} {dtype}");
            }
            for with in [
                |case: &Case| case.softcap != 0.0,
                |case: &Case| !case.sinks.is_none(),
                |case: &Case| !case.alibi.is_none(),
                |case: &Case| !case.blocks.is_none(),
            ] {
                assert!(of_pass().any(|problem| !problem.case.bias.is_none() && with(&problem.case)), "{pass:?}");
            }
        }
        // A file that wants one of e4m3 operands is refused by name.
        let fp8 = on_cpu.iter().find(|problem| problem.pass == Pass::Fp8).unwrap();
        let case = fp8.case.clone().bias("f32:h".parse().unwrap());
        let text = serde_json::to_string(&Problem { case, ..fp8.clone() }).unwrap();
        let error = serde_json::from_str::<Problem>(&text).unwrap_err().to_string();
        assert!(error.contains("a bias with e4m3 operands"), "{error}");
    }

    #[test]
    fn dropout_is_drawn() {
        let mut runner = TestRunner::deterministic();
        let mut drawn = |for_gpu| (0..600).map(|_| any(for_gpu).new_tree(&mut runner).unwrap().current()).collect();
        let (on_gpu, on_cpu): (Vec<Problem>, Vec<Problem>) = (drawn(true), drawn(false));
        // What kernels do not have of it is not drawn for them.
        let dropping = || on_gpu.iter().filter(|problem| problem.case.dropout != 0.0);
        assert!(dropping().count() > 20, "{}", dropping().count());
        assert!(dropping().any(|problem| !problem.case.blocks.is_none()));
        for problem in dropping() {
            let is_narrow = problem.pass == Pass::Backward && problem.dtype == DType::F16;
            assert!(!is_narrow || problem.case.dropout <= 0.9, "{}", problem.case);
            let dims = problem.case.dims;
            let widest = dims.head_dim_qk.max(dims.head_dim_vo);
            // Wide forwards are not of sm90, and leave no multiprocessors.
            let is_wide = problem.pass == Pass::Forward && widest > widest_with_dropout(&problem.case);
            assert!(!is_wide || (problem.arch != Some(Arch::Sm90) && problem.sm_margin == 0), "{}", problem.case);
        }
        let packed = |problem: &&Problem| problem.arch == Some(Arch::Sm80) && !problem.case.packing.is_none();
        assert!(dropping().any(|problem| packed(&problem)));
        for pass in [Pass::Forward, Pass::Backward] {
            let of_pass = || on_cpu.iter().filter(|problem| problem.pass == pass);
            let share =
                of_pass().filter(|problem| problem.case.dropout > 0.0).count() as f64 / of_pass().count() as f64;
            assert!((0.15..0.35).contains(&share), "{pass:?}: {share}");
            assert!(random::DROPOUTS.iter().all(|p| of_pass().any(|problem| problem.case.dropout == *p)), "{pass:?}");
        }
        // A file that has no probability is refused by name.
        let with = on_cpu.iter().find(|problem| problem.case.dropout == 0.5).unwrap();
        let text = serde_json::to_string(with).unwrap();
        assert_eq!(serde_json::from_str::<Problem>(&text).unwrap(), *with);
        let error = serde_json::from_str::<Problem>(&text.replace("\"dropout\":0.5", "\"dropout\":1.5")).unwrap_err();
        assert!(error.to_string().contains("dropout: 1.5; allowed: 0 to below 1"), "{error}");
    }

    #[test]
    fn every_class_of_inputs_is_drawn() {
        let mut runner = TestRunner::deterministic();
        let mut values = || any(true).new_tree(&mut runner).unwrap().current().case.values;
        let drawn: Vec<_> = (0..300).map(|_| values()).collect();
        assert!(Class::ALL.into_iter().all(|class| drawn.contains(&Values::Like(class))));
    }

    #[test]
    fn problems_come_back_from_json() {
        let mut runner = TestRunner::deterministic();
        for i in 0..200 {
            let problem = any(i % 2 == 0).new_tree(&mut runner).unwrap().current();
            let text = serde_json::to_string(&problem).unwrap();
            assert_eq!(serde_json::from_str::<Problem>(&text).unwrap(), problem, "{text}");
        }
        let problem = Problem { sm_margin: 0, ..any(true).new_tree(&mut runner).unwrap().current() };
        let text = serde_json::to_string(&problem).unwrap();
        let older = text.replacen("\"sm_margin\":0,", "", 1);
        assert!(older != text && serde_json::from_str::<Problem>(&older).unwrap() == problem, "{older}");
        for (from, to) in
            [("\"dtype\":\"", "\"dtype\":\"x"), ("\"heads_q\":", "\"heads_q\":0"), ("{\"pass\"", "{\"x\":1,\"pass\"")]
        {
            let wrong = text.replacen(from, to, 1);
            assert!(wrong != text && serde_json::from_str::<Problem>(&wrong).is_err(), "{wrong}");
        }
    }
}
