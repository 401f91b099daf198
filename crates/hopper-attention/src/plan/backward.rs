//! From a backward problem to how it is computed: [`BackwardPlan`].

use std::cmp::Reverse;
use std::fmt;

use super::fitting::{self, fitting, unsupported};
use super::schedule::{bounds, groups, groups_in_turns, is_persistent, resident, small, write_keys};
use super::target::{Planned, Target};
use crate::arch::{Arch, DeviceFacts, MaskClass};
#[cfg(feature = "cuda")]
use crate::device::CudaDevice;
use crate::device::Device;
use crate::error::Result;
use crate::operand::Operands;
use crate::problem::BackwardProblem;
#[cfg(feature = "cuda")]
use crate::sys;
use crate::table::{KernelInfo, backward_kernels};

/// The counter that CUDA blocks draw tiles from, and room: the next parts begin with a cache line if the workspace does.
const COUNTER_BYTES: usize = 256;

/// What the kernels of an architecture keep of each query's LSE and delta: two numbers in f32, or as terms of a product.
fn statistics_bytes(arch: Arch) -> usize {
    match arch {
        Arch::Sm80 => 8,
        Arch::Sm90 => 16,
    }
}

/// How the gradients of one problem are computed on one device: made once, and run as often as wanted, from any thread
/// and on any stream of the device. It holds no device memory, and prints itself.
#[derive(Clone, Debug)]
pub struct BackwardPlan {
    problem: BackwardProblem,
    planned: Planned<BackwardChoice>,
}

/// A backward kernel for a problem and the schedule of its tiles.
///
/// A tile is `tile_n` keys of one key head; a CUDA block takes tile after tile (sm80: one), and walks the blocks of `tile_m`
/// queries that see it, of every query head of the group. Each tile adds to the sums of dQ of these blocks, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardChoice {
    /// The kernel.
    pub kernel: KernelInfo,
    /// The key at which query 0 stands.
    pub diagonal_offset: i32,
    /// Keys kept before a query's own; 2^30 for all.
    pub window_left: i32,
    /// Keys kept after a query's own; 2^30 for all.
    pub window_right: i32,
    /// Tiles in all.
    pub tiles: i32,
    /// CUDA blocks that walk them: one a multiprocessor, or on sm80 one a tile.
    pub grid: i32,
    /// Key heads whose tiles are walked together.
    pub heads_per_group: i32,
    /// Such groups; the last one has all heads that are left.
    pub groups: i32,
    /// Whether CUDA blocks draw tiles from a counter in the workspace.
    pub tile_counter: bool,
    /// Whether tiles take turns at the sums of dQ, which makes them the same on every run.
    pub turns: bool,
    /// Blocks of queries in all.
    pub blocks: usize,
}

/// Where the parts of a workspace are, in bytes from its start, and where it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    pub statistics: usize,
    pub sums: usize,
    pub progress: usize,
    pub end: usize,
}

impl BackwardChoice {
    /// What the kernel needs of a workspace, in bytes: for every query `4 * (4 + head_dim_qk of the kernel)` (sm80: 2 in
    /// place of 4), with lengths rounded up to whole blocks, and a little more.
    pub fn workspace_bytes(&self) -> usize {
        self.parts().end
    }

    pub(crate) fn parts(&self) -> Parts {
        let Self { kernel, blocks, .. } = self;
        let queries = blocks * kernel.tile_m;
        let statistics = COUNTER_BYTES;
        let sums = statistics + queries * statistics_bytes(kernel.arch);
        let after = sums + queries * kernel.head_dim_qk * size_of::<f32>();
        Parts { statistics, sums, progress: after, end: after + blocks * size_of::<i32>() }
    }
}

impl fmt::Display for BackwardChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, tiles, grid, heads_per_group, groups, blocks, .. } = self;
        write!(
            f,
            "{kernel}, grid {grid} for {tiles} tiles, {blocks} blocks of queries, heads a group {heads_per_group}, \
             groups {groups}, "
        )?;
        write!(f, "{} order", if self.tile_counter { "drawn" } else { "fixed" })?;
        write!(f, "{}", if self.turns { ", dQ in turns" } else { "" })?;
        write_keys(f, kernel.mask, [self.diagonal_offset, self.window_left, self.window_right])
    }
}

/// Picks the kernel with the smallest head dims that fit, then the one of which more threads share a multiprocessor, then
/// the one with the largest block of queries. A GPU's own instruction set comes before older ones that it runs too, unless
/// the problem asks for one.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) naming what no row has, and the nearest that one has.
pub fn select_backward(problem: &BackwardProblem, gpu: &DeviceFacts, rows: &[KernelInfo]) -> Result<BackwardChoice> {
    let dims = problem.dims();
    let kernel = *fitting(problem.forward(), gpu, rows)?
        .into_iter()
        .min_by_key(|row| {
            let threads = resident(row, gpu) * row.threads;
            (row.head_dim_qk + row.head_dim_vo, Reverse(threads), Reverse(row.tile_m), row.row)
        })
        .ok_or_else(|| unsupported(problem.to_string(), "no kernel".into()))?;
    let heads_kv = dims.batch * dims.heads_kv; // below 2^31: the problem was checked
    let count = |what: &str, per_head: usize, heads: usize| {
        per_head.checked_mul(heads).and_then(|all| i32::try_from(all).ok()).ok_or_else(|| {
            unsupported(format!("{per_head} {what} for each of {heads} heads"), "below 2^31 in all".into())
        })
    };
    let tiles = count("tiles of keys", dims.seqlen_kv.div_ceil(kernel.tile_n.max(1)), heads_kv)?;
    let heads_q = dims.batch * dims.heads_q;
    let blocks = count("blocks of queries", dims.seqlen_q.div_ceil(kernel.tile_m.max(1)), heads_q)?;
    let grid = if is_persistent(&kernel) { tiles.min(small(gpu.multiprocessors.max(1))) } else { tiles };
    let [diagonal_offset, window_left, window_right] = bounds(problem.forward());
    let even = kernel.mask == MaskClass::Full;
    let turns = problem.is_deterministic();
    // What is read of a query head, and the sums of its dQ.
    let width = (dims.head_dim_qk + dims.head_dim_vo) * kernel.dtype.bytes() + dims.head_dim_qk * size_of::<f32>();
    let bytes = dims.heads_q / dims.heads_kv.max(1) * dims.seqlen_q * width;
    let [heads_per_group, groups] =
        if turns { groups_in_turns(even, heads_kv, bytes) } else { groups(even, heads_kv, bytes) };
    Ok(BackwardChoice {
        kernel,
        diagonal_offset,
        window_left,
        window_right,
        tiles,
        grid,
        heads_per_group,
        groups,
        // Tiles that wait for each other are drawn, so that those they wait for run (tile_scheduler.hpp).
        tile_counter: turns || (!even && tiles > grid),
        turns,
        blocks: usize::try_from(blocks).unwrap_or(0),
    })
}

impl BackwardProblem {
    /// Picks how the device computes this problem, and loads the kernel, so that a later run loads nothing.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) when the GPU has no kernel for it, with the nearest that it
    /// has; the CPU computes every problem that asks for no instruction set of a GPU. [`Error::Driver`](crate::Error::Driver) and
    /// [`Error::Launch`](crate::Error::Launch) when the kernel cannot be loaded.
    pub fn plan(&self, device: &Device) -> Result<BackwardPlan> {
        match device {
            Device::Cpu => Ok(self.planned(fitting::cpu(self.forward())?)),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => self.plan_among(device, backward_kernels()),
        }
    }

    /// The plan with one row of [`backward_kernels()`] in place of the one that [`plan`](Self::plan) picks: for tests and
    /// benches, which want every row to work.
    ///
    /// # Errors
    /// As [`plan`](Self::plan) on a GPU, when this row is not one that computes the problem;
    /// [`Error::Value`](crate::Error::Value) for a row that is not one of [`backward_kernels()`].
    #[cfg(feature = "cuda")]
    pub fn plan_with_row(&self, device: &CudaDevice, row: &KernelInfo) -> Result<BackwardPlan> {
        self.plan_among(device, std::slice::from_ref(row))
    }

    #[cfg(feature = "cuda")]
    fn plan_among(&self, device: &CudaDevice, rows: &[KernelInfo]) -> Result<BackwardPlan> {
        let choice = select_backward(self, &device.info().facts, rows)?;
        let prepare = |choice: &BackwardChoice| {
            let kernel = &choice.kernel;
            fitting::check_row(kernel, crate::arch::Pass::Backward)?;
            sys::prepare(kernel.pass, kernel.row, kernel)
        };
        Ok(self.planned(Target::loaded(choice, device, prepare)?))
    }

    /// The plan that [`plan`](Self::plan) makes on a GPU with these facts. It can be looked at and printed, and needs no
    /// GPU; running it is refused, since it was loaded nowhere.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) as for [`plan`](Self::plan).
    pub fn plan_for(&self, facts: &DeviceFacts) -> Result<BackwardPlan> {
        Ok(self.planned(Target::described(select_backward(self, facts, backward_kernels())?)))
    }

    fn planned(&self, target: Target<BackwardChoice>) -> BackwardPlan {
        let planned = Planned::new(target, self.operands(), BackwardChoice::workspace_bytes);
        BackwardPlan { problem: self.clone(), planned }
    }
}

impl BackwardPlan {
    /// What it computes.
    pub fn problem(&self) -> &BackwardProblem {
        &self.problem
    }

    /// What a run reads and writes.
    pub fn operands(&self) -> &Operands {
        &self.planned.operands
    }

    /// The kernel that computes it; `None` on the CPU.
    pub fn kernel(&self) -> Option<&KernelInfo> {
        self.choice().map(|choice| &choice.kernel)
    }

    /// The kernel and its schedule; `None` on the CPU.
    pub(crate) fn choice(&self) -> Option<&BackwardChoice> {
        self.planned.target.choice()
    }

    /// What a [`Workspace`](crate::Workspace) must hold, in bytes: exact. 0 on the CPU. On a GPU it holds for every query
    /// `4 * (4 + head_dim_qk of the kernel)` (sm80: 2 in place of 4), with lengths rounded up to whole blocks, and a little more.
    pub fn workspace_bytes(&self) -> usize {
        self.planned.workspace_bytes
    }

    pub(crate) fn planned(&self) -> &Planned<BackwardChoice> {
        &self.planned
    }
}

impl fmt::Display for BackwardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.choice() {
            None => f.write_str("cpu, tiled recomputation in two passes")?,
            Some(choice) => write!(f, "{choice}")?,
        }
        write!(f, ", workspace {} bytes", self.workspace_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{ComputeCapability, Pass};
    use crate::dtype::DType;
    use crate::mask::Mask;
    use crate::problem::{Dims, ForwardProblem};

    const H100: DeviceFacts = DeviceFacts::h100_sxm();
    const DIMS: Dims =
        Dims { batch: 2, seqlen_q: 1000, seqlen_kv: 3000, heads_q: 16, heads_kv: 4, head_dim_qk: 64, head_dim_vo: 64 };

    /// A made-up table.
    fn rows() -> Vec<KernelInfo> {
        let mut rows = Vec::new();
        for mask in [MaskClass::Full, MaskClass::Causal, MaskClass::Window] {
            for (head_dim, tile_m) in [(64, 128), (128, 64)] {
                rows.push(KernelInfo {
                    row: rows.len() as u32,
                    pass: Pass::Backward,
                    arch: Arch::Sm90,
                    dtype: DType::BF16,
                    mask,
                    head_dim_qk: head_dim,
                    head_dim_vo: head_dim,
                    tile_m,
                    tile_n: 128,
                    stages: 2,
                    threads: 384,
                    smem_bytes: 200 << 10,
                    scores: DType::F32,
                    share_bytes: 0,
                });
            }
        }
        rows
    }

    /// The tiles of sm80, of one mask class.
    fn sm80_rows() -> Vec<KernelInfo> {
        let tiles = [(64, 64, 128, 128, 98), (64, 32, 128, 128, 81), (128, 64, 128, 256, 162), (128, 32, 64, 128, 81)];
        let row = |(i, &(head_dim, tile_m, tile_n, threads, kib)): (usize, &(usize, usize, usize, usize, usize))| {
            let like = rows()[0];
            KernelInfo {
                row: i as u32,
                arch: Arch::Sm80,
                head_dim_qk: head_dim,
                head_dim_vo: head_dim,
                tile_m,
                tile_n,
                threads,
                smem_bytes: kib << 10,
                ..like
            }
        };
        tiles.iter().enumerate().map(row).collect()
    }

    fn of(forward: &ForwardProblem) -> BackwardProblem {
        BackwardProblem::builder(forward).build().unwrap()
    }

    fn problem(dims: Dims, mask: Mask) -> BackwardProblem {
        of(&ForwardProblem::builder(DType::BF16, dims).mask(mask).build().unwrap())
    }

    fn deterministic(problem: &BackwardProblem) -> BackwardProblem {
        problem.to_builder().deterministic(true).build().unwrap()
    }

    fn with_arch(arch: Option<Arch>) -> BackwardProblem {
        let forward = ForwardProblem::builder(DType::BF16, DIMS);
        of(&arch.map_or(forward.clone(), |arch| forward.arch(arch)).build().unwrap())
    }

    fn chosen(problem: &BackwardProblem) -> BackwardChoice {
        select_backward(problem, &H100, &rows()).unwrap()
    }

    #[test]
    fn golden_plans() {
        assert_eq!(
            chosen(&problem(DIMS, Mask::Full)).to_string(),
            "sm90 bwd bf16 full head_dim 64/64 tile 128x128 stages 2, grid 132 for 192 tiles, 256 blocks of queries, \
             heads a group 1, groups 8, fixed order"
        );
        let wide = Dims { head_dim_vo: 72, ..DIMS };
        assert_eq!(
            chosen(&deterministic(&problem(wide, Mask::causal()))).to_string(),
            "sm90 bwd bf16 causal head_dim 128/128 tile 64x128 stages 2, grid 132 for 192 tiles, 512 blocks of queries, \
             heads a group 8, groups 1, drawn order, dQ in turns, keys to +2000+0"
        );
        assert_eq!(
            chosen(&problem(Dims { batch: 1, ..DIMS }, Mask::window(Some(5), None))).to_string(),
            "sm90 bwd bf16 window head_dim 64/64 tile 128x128 stages 2, grid 96 for 96 tiles, 128 blocks of queries, \
             heads a group 4, groups 1, fixed order, keys from +2000-5"
        );
    }

    #[test]
    fn sm80_tiles_are_those_that_fill_a_multiprocessor() {
        let facts = |major, minor, kib: usize| DeviceFacts {
            arch: ComputeCapability { major, minor },
            smem_bytes_per_block: kib << 10,
            ..H100
        };
        let tile = |head_dim: usize, facts: &DeviceFacts| {
            let dims = Dims { head_dim_qk: head_dim, head_dim_vo: head_dim, ..DIMS };
            let kernel = select_backward(&problem(dims, Mask::Full), facts, &sm80_rows()).unwrap().kernel;
            (kernel.tile_m, kernel.tile_n)
        };
        for (major, minor, kib, narrow, wide) in [
            (8, 0, 163, (32, 128), (64, 128)),
            (8, 6, 99, (64, 128), (32, 64)),
            (8, 9, 99, (64, 128), (32, 64)),
            (9, 0, 227, (64, 128), (64, 128)),
        ] {
            let facts = facts(major, minor, kib);
            assert_eq!((tile(64, &facts), tile(128, &facts)), (narrow, wide), "{major}.{minor}");
            // A head dim between takes the next row, of the same tiles.
            assert_eq!((tile(8, &facts), tile(72, &facts)), (narrow, wide), "{major}.{minor}");
        }
        // A block for each tile, drawn where they take turns, and 8 bytes of statistics.
        let a100 = facts(8, 0, 163);
        let choice = select_backward(&problem(DIMS, Mask::Full), &a100, &sm80_rows()).unwrap();
        assert_eq!((choice.grid, choice.tiles, choice.tile_counter), (192, 192, false));
        let queries = choice.blocks * 32;
        assert_eq!(choice.parts().sums, 256 + queries * 8);
        assert_eq!(choice.parts().progress, 256 + queries * (8 + 64 * 4));
        let in_turns = select_backward(&deterministic(&problem(DIMS, Mask::Full)), &a100, &sm80_rows()).unwrap();
        assert_eq!((in_turns.grid, in_turns.tile_counter, in_turns.turns), (192, true, true));
        let little = facts(8, 0, 48);
        let refusal = select_backward(&problem(DIMS, Mask::Full), &little, &sm80_rows()).unwrap_err().to_string();
        assert!(refusal.contains("82944 bytes of shared memory a block"), "{refusal}");
    }

    #[test]
    fn turns_are_taken_by_more_heads_the_less_they_share() {
        let groups = |seqlen: usize, batch: usize, mask: Mask| {
            let dims = Dims { batch, seqlen_q: seqlen, seqlen_kv: seqlen, heads_q: 32, heads_kv: 32, ..DIMS };
            let choice = chosen(&deterministic(&problem(dims, mask)));
            (choice.heads_per_group, choice.groups)
        };
        // 1024 heads of 256 KiB, 256 of 1 MiB, 128 of 2 MiB, 32 of 8 MiB.
        assert_eq!(groups(512, 32, Mask::causal()), (64, 16));
        assert_eq!(groups(2048, 8, Mask::causal()), (64, 4));
        assert_eq!(groups(4096, 4, Mask::causal()), (32, 4));
        assert_eq!(groups(16384, 1, Mask::causal()), (32, 1));
        assert_eq!(groups(512, 32, Mask::Full), (64, 16));
        assert_eq!(groups(2048, 8, Mask::Full), (16, 16));
        // Whatever is left is the last group's.
        assert_eq!(groups(2048, 3, Mask::causal()), (64, 2));
    }

    #[test]
    fn the_workspace_has_its_parts_one_after_the_other() {
        let choice = chosen(&problem(DIMS, Mask::Full));
        // 1000 queries are 8 blocks of 128, of 32 heads.
        let queries = 8 * 128 * 32;
        let sums = 256 + queries * 16;
        let end = sums + queries * 64 * 4;
        assert_eq!(choice.parts(), Parts { statistics: 256, sums, progress: end, end: end + 8 * 32 * 4 });
        assert_eq!(choice.workspace_bytes(), end + 8 * 32 * 4);
        let in_turns = chosen(&deterministic(&problem(DIMS, Mask::Full)));
        assert_eq!(in_turns.parts(), choice.parts());
        assert!(in_turns.tile_counter && !choice.tile_counter);
        // Copies and additions of 16 bytes.
        for choice in [choice, in_turns, chosen(&problem(Dims { seqlen_q: 1, ..DIMS }, Mask::causal()))] {
            let Parts { statistics, sums, progress, .. } = choice.parts();
            assert!([statistics, sums, progress].iter().all(|at| at.is_multiple_of(16)), "{choice}");
        }
    }

    #[test]
    fn what_no_row_has_is_named_with_the_nearest() {
        let refused = |problem: BackwardProblem| select_backward(&problem, &H100, &rows()).unwrap_err().to_string();
        let wide = problem(Dims { head_dim_qk: 136, ..DIMS }, Mask::Full);
        assert!(refused(wide).ends_with("nearest: up to 64 with 64, up to 128 with 128"));
        let many = Dims { batch: 1 << 20, seqlen_q: 1 << 28, ..DIMS };
        let text = refused(problem(many, Mask::Full));
        assert!(text.contains("blocks of queries for each of 16777216 heads") && text.contains("2^31"), "{text}");
        let half = of(&ForwardProblem::builder(DType::F16, DIMS).build().unwrap());
        assert_eq!(refused(half), "unsupported: f16 operands on a GPU; nearest: bf16");
    }

    #[test]
    fn gradients_are_of_the_same_instruction_set_or_refused() {
        let chosen = |arch| select_backward(&with_arch(Some(arch)), &H100, &rows());
        assert_eq!(chosen(Arch::Sm90), select_backward(&problem(DIMS, Mask::Full), &H100, &rows()));
        // A build without them.
        let refusal = "unsupported: backward sm80 kernels on a GPU of sm_90; nearest: sm90";
        assert_eq!(chosen(Arch::Sm80).unwrap_err().to_string(), refusal);
        let a100 = DeviceFacts { arch: ComputeCapability { major: 8, minor: 0 }, ..H100 };
        let error = select_backward(&problem(DIMS, Mask::Full), &a100, &rows());
        assert_eq!(error.unwrap_err().to_string(), "unsupported: backward kernels for a GPU of sm_80; nearest: sm_90");
        // One with both: a GPU's own, or what the forward asks for.
        let both: Vec<_> = rows().into_iter().chain(sm80_rows()).collect();
        let arch =
            |asked: Option<Arch>, gpu| select_backward(&with_arch(asked), gpu, &both).map(|choice| choice.kernel.arch);
        assert_eq!(arch(None, &H100), Ok(Arch::Sm90));
        assert_eq!(arch(Some(Arch::Sm80), &H100), Ok(Arch::Sm80));
        assert_eq!(arch(None, &a100), Ok(Arch::Sm80));
        let refusal = "unsupported: backward sm90 kernels on a GPU of sm_80; nearest: sm80";
        assert_eq!(arch(Some(Arch::Sm90), &a100).unwrap_err().to_string(), refusal);
        let on_cpu = with_arch(Some(Arch::Sm80));
        let refusal = "unsupported: sm80 kernels on the CPU; nearest: a GPU of sm_80 and later";
        assert_eq!(on_cpu.plan(&Device::cpu()).unwrap_err().to_string(), refusal);
    }

    #[test]
    fn the_cpu_takes_every_problem() {
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let forward = ForwardProblem::builder(dtype, DIMS).mask(Mask::causal()).build().unwrap();
            let problem = BackwardProblem::builder(&forward).d_lse(true).deterministic(true).build().unwrap();
            let plan = problem.plan(&Device::cpu()).unwrap();
            assert_eq!(plan.to_string(), "cpu, tiled recomputation in two passes, workspace 0 bytes");
            assert_eq!((plan.problem(), plan.workspace_bytes(), plan.choice()), (&problem, 0, None));
        }
    }

    #[test]
    fn a_described_gpu_is_planned_for_with_the_kernels_of_the_build() {
        match problem(DIMS, Mask::Full).plan_for(&H100) {
            Ok(plan) => assert!(backward_kernels().contains(&plan.choice().unwrap().kernel)),
            Err(error) => assert!(backward_kernels().is_empty(), "{error}"),
        }
    }
}
