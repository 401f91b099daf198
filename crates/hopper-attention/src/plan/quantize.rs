//! How one device quantises Q, K and V: [`QuantizePlan`].
//!
//! On a GPU a tensor is cut into tiles: some neighbouring rows of one head. Where several tiles share a descale factor, they
//! exchange their largest magnitudes through the workspace. Where sequences have lengths of their own, a table in the workspace
//! says which tiles there are.

use std::fmt;

use super::packed::{most_tiles, table_bytes};
use super::target::{Planned, Target};
use crate::arch::DeviceFacts;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::operand::Operands;
use crate::problem::{Quantizer, TENSORS};
use crate::scaling::{SCALE_BLOCK, Scaling};
#[cfg(feature = "cuda")]
use crate::sys;
use crate::table::{QuantizeInfo, quantize_kernels};

/// Head dims are multiples of this, because the kernels store e4m3 rows in steps of 16 bytes.
const HEAD_DIM_STEP: usize = 16;
/// The largest head dim, because a few lanes hold a whole row in registers.
const LARGEST_HEAD_DIM: usize = 256;
/// Size in bytes of the workspace's first part: the counts, as integers.
const COUNTS_BYTES: usize = 64;
/// What a tensor needs of the workspace where its tiles are read twice, in bytes: a counter of tiles, and for each factor the
/// largest magnitude and the number of tiles that it was taken over.
const COUNTER_BYTES: usize = 16;
const SHARED_FACTOR_BYTES: usize = 8;
/// What a tensor needs of the workspace where its tiles are read once, in bytes: the largest magnitude of each tile.
const TILE_BYTES: usize = 4;
/// The rows of such a tile, at least: of head dims up to 128, and of larger ones.
const TILE_ROWS: usize = 64;
const TILE_ROWS_OF_WIDE: usize = 32;

/// How a GPU quantises: the kernels and the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuantizeChoice {
    pub row: QuantizeInfo,
    pub multiprocessors: usize,
    /// The parts of the workspace for what the tiles of q, k and v share, as offsets in bytes.
    pub state: [usize; 3],
    /// Where the kernels read lengths of sequences from memory.
    pub packed: Option<Packed>,
    pub workspace_bytes: usize,
}

/// The sizes where the kernels read lengths of sequences from memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    /// The number of sequences.
    pub sequences: usize,
    /// The most blocks of 128 queries, and of 128 keys, that all sequences can have together. 0 for a side without lengths.
    pub blocks: [usize; 2],
    /// The part of the workspace for the table of sequences, as an offset in bytes. It is the last.
    pub table: usize,
}

/// Chooses the row for the quantiser's source type, and lays out the workspace.
///
/// The launch decides whether tiles are read once or twice, so each part of the workspace is large enough for both.
fn select(quantizer: &Quantizer, gpu: &DeviceFacts, rows: &[QuantizeInfo]) -> Result<QuantizeChoice> {
    let refuse = |nearest: String| Error::Unsupported { wanted: format!("{quantizer} on {}", gpu.arch), nearest };
    let here: Vec<&QuantizeInfo> = rows.iter().filter(|row| row.arch.runs_on(gpu.arch)).collect();
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
    let mut blocks = [0; 2];
    // k and v are of one side.
    for ((of, side), state) in TENSORS.iter().zip([0, 1, 1]).zip(&mut state) {
        let ([batch, seqlen, heads, head_dim], [batches, factor_heads, _]) =
            ((of.shape)(problem), (of.factors)(problem));
        let has_lengths = of.lengths.iter().any(|&slot| problem.wants(slot));
        let of_head = most_tiles((of.packed)(problem), dims.batch, seqlen, SCALE_BLOCK);
        if of_head.checked_mul(heads).is_none_or(|blocks| blocks >= 1 << 30) {
            return Err(refuse(format!("below 2^30 blocks of {SCALE_BLOCK} rows in {}", of.values)));
        }
        if has_lengths {
            blocks[side] = of_head;
        }
        *state = workspace_bytes;
        if problem.scaling() != Some(Scaling::PerBlock) {
            let twice = COUNTER_BYTES + SHARED_FACTOR_BYTES * batches * factor_heads;
            let tile_rows = if head_dim > 128 { TILE_ROWS_OF_WIDE } else { TILE_ROWS };
            let tiles = if has_lengths { 0 } else { batch * heads * seqlen.div_ceil(tile_rows) };
            workspace_bytes += twice.max(TILE_BYTES * tiles).next_multiple_of(16);
        }
    }
    let packed = problem.has_lengths().then_some(Packed { sequences: dims.batch, blocks, table: workspace_bytes });
    if packed.is_some() {
        workspace_bytes += table_bytes(dims.batch, blocks[1], blocks[0]);
    }
    Ok(QuantizeChoice { row: **row, multiprocessors: gpu.multiprocessors.max(1), state, packed, workspace_bytes })
}

/// How one device quantises Q, K and V.
///
/// A plan is made once and run any number of times, from any thread and on any stream of the device. It holds no device
/// memory. Printed, it names the kernels.
#[derive(Clone, Debug)]
pub struct QuantizePlan {
    quantizer: Quantizer,
    planned: Planned<QuantizeChoice>,
}

impl Quantizer {
    /// Makes the plan for a device. On a GPU it chooses the kernels and loads them, so that a later run loads nothing.
    ///
    /// # Errors
    /// - [`Error::Unsupported`]: the GPU has no kernel for the source type or the head dims. The error names the nearest that
    ///   the GPU has.
    /// - [`Error::Driver`] or [`Error::Launch`]: a kernel cannot be loaded.
    pub fn plan(&self, device: &Device) -> Result<QuantizePlan> {
        let target = match device {
            Device::Cpu => Target::Cpu,
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let choice = select(self, &device.info().facts, quantize_kernels())?;
                Target::loaded(choice, device, |choice| sys::prepare_quantize(choice.row.row, &choice.row))?
            }
        };
        Ok(self.planned(target))
    }

    /// The plan that [`plan`](Self::plan) makes on a GPU with these facts. This needs no GPU.
    ///
    /// The plan can be inspected and printed. It cannot be run, because its kernels were not loaded.
    ///
    /// # Errors
    /// [`Error::Unsupported`], as [`plan`](Self::plan).
    pub fn plan_for(&self, facts: &DeviceFacts) -> Result<QuantizePlan> {
        Ok(self.planned(Target::described(select(self, facts, quantize_kernels())?)))
    }

    fn planned(&self, target: Target<QuantizeChoice>) -> QuantizePlan {
        let planned = Planned::new(target, self.operands(), |choice| choice.workspace_bytes);
        QuantizePlan { quantizer: self.clone(), planned }
    }
}

impl QuantizePlan {
    /// The quantiser that the plan was made for.
    pub fn quantizer(&self) -> &Quantizer {
        &self.quantizer
    }

    /// The tensors that a run reads and writes.
    pub fn operands(&self) -> &Operands {
        &self.planned.operands
    }

    /// The size of the [`Workspace`](crate::Workspace) that a run needs, in bytes.
    ///
    /// It is 0 on the CPU. On a GPU it is enough for the counts and for what the tiles of Q, K and V share, so that a run may
    /// quantise any of the three. With packed sequences or used lengths it also holds 32 bytes, 48 for each sequence, and 4 for
    /// each block of 128 queries and of 128 keys that a head can have. (And 48 more for each sequence, above 1024 of them.)
    pub fn workspace_bytes(&self) -> usize {
        self.planned.workspace_bytes
    }

    pub(crate) fn planned(&self) -> &Planned<QuantizeChoice> {
        &self.planned
    }
}

impl fmt::Display for QuantizePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.planned.target.choice() {
            None => f.write_str("cpu")?,
            Some(choice) => {
                write!(f, "{}", choice.row)?;
                if let Some(Packed { sequences, .. }) = choice.packed {
                    write!(f, ", lengths of {sequences} sequences in memory")?;
                }
            }
        }
        write!(f, ", workspace {} bytes", self.workspace_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{Arch, ComputeCapability};
    use crate::dtype::DType;
    use crate::problem::{Dims, ForwardProblem, ForwardProblemBuilder};

    const DIMS: Dims =
        Dims { batch: 2, seqlen_q: 300, seqlen_kv: 129, heads_q: 6, heads_kv: 2, head_dim_qk: 80, head_dim_vo: 16 };
    const ROWS: [QuantizeInfo; 2] = [
        QuantizeInfo { row: 0, arch: Arch::Sm90, source: DType::BF16 },
        QuantizeInfo { row: 1, arch: Arch::Sm90, source: DType::F16 },
    ];

    fn quantizer(dims: Dims, scaling: Scaling, source: DType) -> Quantizer {
        let problem = ForwardProblem::builder(DType::E4M3, dims).scaling(scaling).build().unwrap();
        Quantizer::builder(&problem, source).build().unwrap()
    }

    #[test]
    fn the_workspace_holds_what_tiles_share() {
        let h100 = DeviceFacts::h100_sxm();
        let choice = |scaling| select(&quantizer(DIMS, scaling, DType::F16), &h100, &ROWS).unwrap();
        let block = choice(Scaling::PerBlock);
        assert_eq!((block.row.row, block.workspace_bytes, block.state), (1, 64, [64; 3]));
        // q has 60 tiles (240 bytes). k and v have 12 each (48 bytes). A counter and four factors take 48 bytes too.
        assert_eq!((choice(Scaling::PerTensor).workspace_bytes, choice(Scaling::PerTensor).state[1]), (400, 304));
        assert_eq!((choice(Scaling::PerHead).workspace_bytes, choice(Scaling::PerHead).state[1]), (400, 304));
        // q has 8 tiles (32 bytes). k and v have 4 each (16 bytes). A counter and one factor (per tensor) take 24 bytes, a
        // counter and four factors (per head) 48. The larger number counts, rounded up to a multiple of 16.
        let short = Dims { seqlen_q: 65, seqlen_kv: 64, heads_q: 2, ..DIMS };
        let short = |scaling| select(&quantizer(short, scaling, DType::F16), &h100, &ROWS).unwrap().state;
        assert_eq!((short(Scaling::PerTensor), short(Scaling::PerHead)), ([64, 96, 128], [64, 112, 160]));
        assert_eq!(block.row.to_string(), "sm90 quantise f16 to e4m3");
        // Above head dim 128 a tile has half as many rows: q has 24 tiles of 32 of its 65 rows, v 16.
        let of = |head_dim_qk, head_dim_vo| {
            let dims = Dims { seqlen_q: 65, seqlen_kv: 65, heads_kv: 4, heads_q: 4, head_dim_qk, head_dim_vo, ..DIMS };
            select(&quantizer(dims, Scaling::PerTensor, DType::BF16), &h100, &ROWS).unwrap()
        };
        assert_eq!((of(144, 128).state, of(144, 128).workspace_bytes), ([64, 160, 256], 320));
        assert_eq!((of(128, 256).state, of(128, 256).workspace_bytes), ([64, 128, 192], 288));
        assert_eq!((of(16, 128).state, of(256, 256).state), ([64, 128, 192], [64, 160, 256]));
    }

    /// The choice for sequences with lengths in memory, of the kind that `with` asks for.
    fn packed(scaling: Scaling, with: impl Fn(ForwardProblemBuilder) -> ForwardProblemBuilder) -> QuantizeChoice {
        let problem = with(ForwardProblem::builder(DType::E4M3, DIMS).scaling(scaling)).build().unwrap();
        let quantizer = Quantizer::builder(&problem, DType::F16).build().unwrap();
        select(&quantizer, &DeviceFacts::h100_sxm(), &ROWS).unwrap()
    }

    #[test]
    fn lengths_in_memory_have_a_table() {
        let both = |scaling| packed(scaling, |options| options.packed(true));
        // Two sequences in 300 queries have up to 4 blocks of 128. In 129 keys they have up to 3.
        let table =
            |choice: QuantizeChoice| choice.packed.map(|packed| (packed.sequences, packed.blocks, packed.table));
        assert_eq!(table(both(Scaling::PerBlock)), Some((2, [4, 3], 64)));
        assert_eq!(both(Scaling::PerBlock).workspace_bytes, 64 + 32 + 2 * 48 + 4 * (4 + 4));
        // A largest magnitude and a number for one factor, or for those of 2 sequences with 2 heads each: no word for a tile.
        let (one, four) = (both(Scaling::PerTensor), both(Scaling::PerHead));
        assert_eq!((one.state, table(one)), ([64, 96, 128], Some((2, [4, 3], 160))));
        assert_eq!((four.state, table(four)), ([64, 112, 160], Some((2, [4, 3], 208))));
        assert_eq!(four.workspace_bytes, 208 + 160);
        // A side without lengths has no blocks in the table, and words for its tiles.
        let queries = packed(Scaling::PerHead, |options| options.used_q(true));
        assert_eq!((queries.state, table(queries)), ([64, 112, 160], Some((2, [6, 0], 208))));
        let keys = packed(Scaling::PerTensor, |options| options.packed_kv(true).used_kv(true));
        assert_eq!((keys.state, table(keys)), ([64, 304, 336], Some((2, [0, 3], 368))));
        let problem = ForwardProblem::builder(DType::E4M3, DIMS).packed(true).build().unwrap();
        let dense = ForwardProblem::builder(DType::E4M3, DIMS).build().unwrap();
        let text = |problem: &ForwardProblem| {
            let quantizer = Quantizer::builder(problem, DType::F16).build().unwrap();
            let target = Target::described(select(&quantizer, &DeviceFacts::h100_sxm(), &ROWS).unwrap());
            quantizer.planned(target).to_string()
        };
        assert_eq!(text(&problem), "sm90 quantise f16 to e4m3, lengths of 2 sequences in memory, workspace 320 bytes");
        assert_eq!(text(&dense), "sm90 quantise f16 to e4m3, workspace 400 bytes");
    }

    #[test]
    fn more_blocks_than_are_counted_are_refused() {
        let refused = |dims| {
            let problem = ForwardProblem::builder(DType::E4M3, dims).packed(true).build().unwrap();
            let quantizer = Quantizer::builder(&problem, DType::F16).build().unwrap();
            select(&quantizer, &DeviceFacts::h100_sxm(), &ROWS).unwrap_err().to_string()
        };
        // Each sequence may have a block that is not full.
        let text = refused(Dims::new(1 << 29, 1000, 2, 64));
        assert!(text.ends_with("nearest: below 2^30 blocks of 128 rows in q.values"), "{text}");
    }

    #[test]
    fn what_no_kernel_does_is_refused_by_name() {
        let h100 = DeviceFacts::h100_sxm();
        let text = |dims, source, gpu: &DeviceFacts, rows: &[QuantizeInfo]| {
            select(&quantizer(dims, Scaling::PerHead, source), gpu, rows).unwrap_err().to_string()
        };
        assert_eq!(
            text(DIMS, DType::F32, &h100, &ROWS),
            "unsupported: quantise f32 to e4m3 per-head on sm_90; nearest: bf16, f16"
        );
        assert_eq!(
            text(Dims { head_dim_vo: 24, ..DIMS }, DType::BF16, &h100, &ROWS),
            "unsupported: quantise bf16 to e4m3 per-head with head_dim 24 on sm_90; nearest: multiples of 16 up to 256"
        );
        for (head_dim_qk, head_dim_vo) in [(144, 16), (16, 192), (192, 128), (256, 256)] {
            assert!(
                select(
                    &quantizer(Dims { head_dim_qk, head_dim_vo, ..DIMS }, Scaling::PerHead, DType::BF16),
                    &h100,
                    &ROWS
                )
                .is_ok()
            );
        }
        for (head_dim_qk, head_dim_vo) in [(272, 16), (16, 264), (512, 512)] {
            let refused = text(Dims { head_dim_qk, head_dim_vo, ..DIMS }, DType::BF16, &h100, &ROWS);
            let named =
                format!("head_dim {} on sm_90; nearest: multiples of 16 up to 256", head_dim_qk.max(head_dim_vo));
            assert!(refused.ends_with(&named), "{refused}");
        }
        let ada = DeviceFacts { arch: ComputeCapability { major: 8, minor: 9 }, ..h100 };
        assert!(text(DIMS, DType::BF16, &ada, &ROWS).ends_with("on sm_89; nearest: Device::cpu()"));
        assert!(text(DIMS, DType::BF16, &h100, &[]).ends_with("nearest: Device::cpu()"));
    }
}
