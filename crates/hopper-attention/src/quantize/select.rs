//! What a quantiser's plan decides, as pure functions of numbers, and what it knows of each operand.

use std::fmt;

use crate::{Arch, DType, DeviceFacts, Error, ForwardProblem, Layout, Quantizer, Result, SCALE_BLOCK, Scaling, checks};

/// E4m3 rows are stored 16 bytes at a time, and a row of this many elements is what a few lanes hold.
const HEAD_DIM_STEP: usize = 16;
const LARGEST_HEAD_DIM: usize = 128;
/// Of the workspace: counts as integers.
const COUNTS_BYTES: usize = 64;
/// Of a tensor whose tiles are read twice: a counter of tiles, and for each factor the largest magnitude and how many tiles
/// went into it.
const COUNTER_BYTES: usize = 16;
const SHARED_FACTOR_BYTES: usize = 8;
/// Of one whose tiles are read once: the largest magnitude of each, which has so many rows or more.
const TILE_BYTES: usize = 4;
const TILE_ROWS: usize = 64;

/// The kernels for one source type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// The index in the table.
    pub row: u32,
    pub arch: Arch,
    pub source: DType,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} quantise {} to e4m3", self.arch, self.source)
    }
}

/// The rows of this build. Empty without the feature `cuda`.
pub(crate) fn rows() -> &'static [Row] {
    #[cfg(feature = "cuda")]
    {
        static ROWS: std::sync::OnceLock<Vec<Row>> = std::sync::OnceLock::new();
        ROWS.get_or_init(crate::sys::quantize_rows)
    }
    #[cfg(not(feature = "cuda"))]
    &[]
}

/// How a GPU quantises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub row: Row,
    pub multiprocessors: usize,
    /// Where in the workspace the shared factors of q, k and v are.
    pub state: [usize; 3],
    pub workspace_bytes: usize,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.row.fmt(f)
    }
}

/// The row that does it, with the workspace that it needs.
pub(crate) fn select(quantizer: &Quantizer, gpu: &DeviceFacts, rows: &[Row]) -> Result<Choice> {
    let refuse = |nearest: String| Error::Unsupported { wanted: format!("{quantizer} on {}", gpu.arch), nearest };
    let here: Vec<&Row> = rows.iter().filter(|row| row.arch.runs_on(gpu.arch)).collect();
    let Some(row) = here.iter().find(|row| row.source == quantizer.source()) else {
        let sources: Vec<&str> = here.iter().map(|row| row.source.name()).collect();
        return Err(refuse(if sources.is_empty() { "Device::cpu()".into() } else { sources.join(", ") }));
    };
    let problem = quantizer.problem();
    let dims = problem.dims();
    for head_dim in [dims.head_dim_qk, dims.head_dim_vo] {
        if head_dim % HEAD_DIM_STEP != 0 || head_dim > LARGEST_HEAD_DIM {
            let wanted = format!("{quantizer} with head_dim {head_dim} on {}", gpu.arch);
            let nearest = format!("multiples of {HEAD_DIM_STEP} up to {LARGEST_HEAD_DIM}");
            return Err(Error::Unsupported { wanted, nearest });
        }
    }
    let mut workspace_bytes = COUNTS_BYTES;
    let mut state = [0; 3];
    for (of, state) in NAMES.iter().zip(&mut state) {
        let ([batch, seqlen, heads, _], [batches, factor_heads, _]) = ((of.shape)(problem), (of.factors)(problem));
        let blocks = batch.checked_mul(heads).and_then(|rows| rows.checked_mul(seqlen.div_ceil(SCALE_BLOCK)));
        if blocks.is_none_or(|blocks| blocks >= 1 << 30) {
            return Err(refuse(format!("below 2^30 blocks of {SCALE_BLOCK} rows in {}", of.values)));
        }
        *state = workspace_bytes;
        if problem.scaling_value() != Some(Scaling::PerBlock) {
            let twice = COUNTER_BYTES + SHARED_FACTOR_BYTES * batches * factor_heads;
            let tiles = batch * heads * seqlen.div_ceil(TILE_ROWS);
            workspace_bytes += twice.max(TILE_BYTES * tiles).next_multiple_of(16);
        }
    }
    Ok(Choice { row: **row, multiprocessors: gpu.multiprocessors.max(1), state, workspace_bytes })
}

/// What errors call a tensor and its parts, and where its shapes are.
pub(crate) struct Name {
    pub values: &'static str,
    pub stored: &'static str,
    pub descale: &'static str,
    pub shape: fn(&ForwardProblem) -> [usize; 4],
    pub factors: fn(&ForwardProblem) -> [usize; 3],
    /// Whether scores are made of it: Q and K, which are rotated, and smaller for scores in f16.
    pub scored: bool,
}

/// Of q, k and v.
pub(crate) const NAMES: [Name; 3] = [
    Name {
        values: "q.values",
        stored: "q.stored",
        descale: "q.descale",
        shape: ForwardProblem::q_shape,
        factors: ForwardProblem::descale_q_shape,
        scored: true,
    },
    Name {
        values: "k.values",
        stored: "k.stored",
        descale: "k.descale",
        shape: ForwardProblem::k_shape,
        factors: ForwardProblem::descale_k_shape,
        scored: true,
    },
    Name {
        values: "v.values",
        stored: "v.stored",
        descale: "v.descale",
        shape: ForwardProblem::v_shape,
        factors: ForwardProblem::descale_v_shape,
        scored: false,
    },
];

/// Whether a tensor and its parts have the problem's shapes.
pub(crate) fn check_tensor(
    of: &Name,
    problem: &ForwardProblem,
    values: Layout<4>,
    stored: Layout<4>,
    descale: Layout<3>,
) -> Result<()> {
    let shape = (of.shape)(problem);
    checks::shape(of.values, values.shape(), shape)?;
    checks::shape(of.stored, stored.shape(), shape)?;
    checks::factors(of.descale, descale.shape(), (of.factors)(problem))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ComputeCapability, Dims};

    const DIMS: Dims =
        Dims { batch: 2, seqlen_q: 300, seqlen_kv: 129, heads_q: 6, heads_kv: 2, head_dim_qk: 80, head_dim_vo: 16 };
    const ROWS: [Row; 2] =
        [Row { row: 0, arch: Arch::Sm90, source: DType::BF16 }, Row { row: 1, arch: Arch::Sm90, source: DType::F16 }];

    fn quantizer(dims: Dims, scaling: Scaling, source: DType) -> Quantizer {
        let problem = ForwardProblem::new(DType::E4M3, dims).unwrap().scaling(scaling).unwrap();
        Quantizer::of(&problem, source).unwrap()
    }

    #[test]
    fn the_workspace_has_room_for_what_tiles_share() {
        let h100 = DeviceFacts::h100_sxm();
        let choice = |scaling| select(&quantizer(DIMS, scaling, DType::F16), &h100, &ROWS).unwrap();
        let block = choice(Scaling::PerBlock);
        assert_eq!((block.row.row, block.workspace_bytes, block.state), (1, 64, [64; 3]));
        // Of q 60 tiles, of k and v twelve, which is as much as a counter and four factors.
        assert_eq!((choice(Scaling::PerTensor).workspace_bytes, choice(Scaling::PerTensor).state[1]), (400, 304));
        assert_eq!((choice(Scaling::PerHead).workspace_bytes, choice(Scaling::PerHead).state[1]), (400, 304));
        // Of q eight tiles, of k and v four, which is less than a counter and a factor; a counter and four factors.
        let short = Dims { seqlen_q: 65, seqlen_kv: 64, heads_q: 2, ..DIMS };
        let short = |scaling| select(&quantizer(short, scaling, DType::F16), &h100, &ROWS).unwrap().state;
        assert_eq!((short(Scaling::PerTensor), short(Scaling::PerHead)), ([64, 96, 128], [64, 112, 160]));
        assert_eq!(block.to_string(), "sm90 quantise f16 to e4m3");
    }

    #[test]
    fn what_no_kernel_does_is_refused_by_name() {
        let h100 = DeviceFacts::h100_sxm();
        let text = |dims, source, gpu: &DeviceFacts, rows: &[Row]| {
            select(&quantizer(dims, Scaling::PerHead, source), gpu, rows).unwrap_err().to_string()
        };
        assert_eq!(
            text(DIMS, DType::F32, &h100, &ROWS),
            "unsupported: quantise f32 to e4m3 per-head on sm_90; nearest: bf16, f16"
        );
        assert_eq!(
            text(Dims { head_dim_vo: 24, ..DIMS }, DType::BF16, &h100, &ROWS),
            "unsupported: quantise bf16 to e4m3 per-head with head_dim 24 on sm_90; nearest: multiples of 16 up to 128"
        );
        assert!(text(Dims { head_dim_qk: 144, ..DIMS }, DType::BF16, &h100, &ROWS).contains("head_dim 144"));
        let ada = DeviceFacts { arch: ComputeCapability { major: 8, minor: 9 }, ..h100 };
        assert!(text(DIMS, DType::BF16, &ada, &ROWS).ends_with("on sm_89; nearest: Device::cpu()"));
        assert!(text(DIMS, DType::BF16, &h100, &[]).ends_with("nearest: Device::cpu()"));
    }
}
