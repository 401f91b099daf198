//! How tensors are quantised on one device: [`QuantizePlan`].

use std::fmt;

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

/// How a GPU quantises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuantizeChoice {
    pub row: QuantizeInfo,
    pub multiprocessors: usize,
    /// Where in the workspace the shared factors of q, k and v are.
    pub state: [usize; 3],
    pub workspace_bytes: usize,
}

/// The row that does it, with the workspace that it needs.
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
    for (of, state) in TENSORS.iter().zip(&mut state) {
        let ([batch, seqlen, heads, _], [batches, factor_heads, _]) = ((of.shape)(problem), (of.factors)(problem));
        let blocks = batch.checked_mul(heads).and_then(|rows| rows.checked_mul(seqlen.div_ceil(SCALE_BLOCK)));
        if blocks.is_none_or(|blocks| blocks >= 1 << 30) {
            return Err(refuse(format!("below 2^30 blocks of {SCALE_BLOCK} rows in {}", of.values)));
        }
        *state = workspace_bytes;
        if problem.scaling() != Some(Scaling::PerBlock) {
            let twice = COUNTER_BYTES + SHARED_FACTOR_BYTES * batches * factor_heads;
            let tiles = batch * heads * seqlen.div_ceil(TILE_ROWS);
            workspace_bytes += twice.max(TILE_BYTES * tiles).next_multiple_of(16);
        }
    }
    Ok(QuantizeChoice { row: **row, multiprocessors: gpu.multiprocessors.max(1), state, workspace_bytes })
}

/// How tensors are quantised on one device: made once, and run as often as wanted, from any thread and on any stream of the
/// device. It holds no device memory, and prints itself.
#[derive(Clone, Debug)]
pub struct QuantizePlan {
    quantizer: Quantizer,
    planned: Planned<QuantizeChoice>,
}

impl Quantizer {
    /// Picks how the device does it, and loads its kernels, so that a later run loads nothing.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the GPU has no kernel for it, with what it has; [`Error::Driver`] and [`Error::Launch`]
    /// when one cannot be loaded.
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

    /// The plan that [`plan`](Self::plan) makes on a GPU with these facts. It can be looked at and printed, and needs no
    /// GPU; running it is refused, since it was loaded nowhere.
    ///
    /// # Errors
    /// [`Error::Unsupported`] as for [`plan`](Self::plan).
    pub fn plan_for(&self, facts: &DeviceFacts) -> Result<QuantizePlan> {
        Ok(self.planned(Target::described(select(self, facts, quantize_kernels())?)))
    }

    fn planned(&self, target: Target<QuantizeChoice>) -> QuantizePlan {
        let planned = Planned::new(target, self.operands(), |choice| choice.workspace_bytes);
        QuantizePlan { quantizer: self.clone(), planned }
    }
}

impl QuantizePlan {
    /// What it does.
    pub fn quantizer(&self) -> &Quantizer {
        &self.quantizer
    }

    /// What a run reads and writes.
    pub fn operands(&self) -> &Operands {
        &self.planned.operands
    }

    /// What a [`Workspace`](crate::Workspace) must hold, in bytes: none on the CPU; on a GPU enough for factors of all three
    /// operands that tiles share, and for counts.
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
            Some(choice) => write!(f, "{}", choice.row)?,
        }
        write!(f, ", workspace {} bytes", self.workspace_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{Arch, ComputeCapability};
    use crate::dtype::DType;
    use crate::problem::{Dims, ForwardProblem};

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
        assert_eq!(block.row.to_string(), "sm90 quantise f16 to e4m3");
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
            "unsupported: quantise bf16 to e4m3 per-head with head_dim 24 on sm_90; nearest: multiples of 16 up to 128"
        );
        assert!(text(Dims { head_dim_qk: 144, ..DIMS }, DType::BF16, &h100, &ROWS).contains("head_dim 144"));
        let ada = DeviceFacts { arch: ComputeCapability { major: 8, minor: 9 }, ..h100 };
        assert!(text(DIMS, DType::BF16, &ada, &ROWS).ends_with("on sm_89; nearest: Device::cpu()"));
        assert!(text(DIMS, DType::BF16, &h100, &[]).ends_with("nearest: Device::cpu()"));
    }
}
