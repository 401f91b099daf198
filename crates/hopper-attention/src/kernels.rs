//! The kernels of this build, as data: one row a kernel, read by plans, tests, benches and the README's support table.

use std::fmt::{self, Write as _};

use crate::{ComputeCapability, DType, DeviceFacts};

/// The instruction set that a kernel is written for. Of those that a GPU runs, plans take the greatest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Arch {
    /// Compute capability 8.0 and later: from 8.0 to 9.0 as machine code where the build has it, else as PTX, which the
    /// driver compiles when a plan loads it.
    Sm80,
    /// Compute capability 9.0 (sm_90a), and nothing else.
    Sm90,
}

impl Arch {
    /// Whether kernels of this kind run on a GPU.
    pub fn runs_on(self, gpu: ComputeCapability) -> bool {
        match self {
            Self::Sm80 => gpu.major >= 8,
            Self::Sm90 => (gpu.major, gpu.minor) == (9, 0),
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Sm80 => "sm80",
            Self::Sm90 => "sm90",
        })
    }
}

/// How a kernel's loop over blocks of keys is shaped; the bounds themselves are run-time values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MaskClass {
    /// Every key.
    Full,
    /// Keys up to a diagonal, wherever it lies.
    Causal,
    /// A band of keys around a diagonal.
    Window,
}

impl fmt::Display for MaskClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Full => "full",
            Self::Causal => "causal",
            Self::Window => "window",
        })
    }
}

/// What a kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pass {
    /// O and the log-sum-exp.
    Forward,
    /// The gradients of Q, K and V.
    Backward,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Forward => "fwd",
            Self::Backward => "bwd",
        })
    }
}

/// A kernel that was compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelInfo {
    /// The index in the launch table of its pass.
    pub row: u32,
    /// What it computes.
    pub pass: Pass,
    /// The GPUs that it runs on.
    pub arch: Arch,
    /// The element type of Q, K, V, O and the gradients.
    pub dtype: DType,
    /// The masks that it computes.
    pub mask: MaskClass,
    /// The largest head dim of Q and K that it takes.
    pub head_dim_qk: usize,
    /// The largest head dim of V and O that it takes.
    pub head_dim_vo: usize,
    /// Queries in a tile (forward) or a block (backward).
    pub tile_m: usize,
    /// Keys in a block (forward) or a tile (backward).
    pub tile_n: usize,
    /// Blocks in flight: of K, and of V; in the backward of Q, and of dO.
    pub stages: usize,
    /// Threads in a CUDA block.
    pub threads: usize,
    /// Shared memory that a CUDA block asks for, in bytes.
    pub smem_bytes: usize,
    /// What scores are summed in: f32, or, of e4m3 operands whose problem
    /// [asks for it](crate::ForwardProblem::half_scores), f16.
    pub scores: DType,
    /// Workspace that a CUDA block needs where the last tiles are
    /// [shared out](crate::plan::Choice::shared_tiles), in bytes; 0: they are not.
    pub share_bytes: usize,
}

impl KernelInfo {
    /// Whether a GPU can run it: its arch, and the shared memory that it needs.
    pub fn runs_on(&self, gpu: &DeviceFacts) -> bool {
        self.arch.runs_on(gpu.arch) && self.smem_bytes <= gpu.smem_bytes_per_block
    }
}

impl fmt::Display for KernelInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { arch, pass, dtype, mask, head_dim_qk, head_dim_vo, tile_m, tile_n, stages, scores, .. } = self;
        let scores = if *scores == DType::F16 { " scores f16" } else { "" };
        write!(
            f,
            "{arch} {pass} {dtype} {mask} head_dim {head_dim_qk}/{head_dim_vo} tile {tile_m}x{tile_n} stages {stages}{scores}"
        )
    }
}

/// The forward kernels of this build, in the launch table's order. Empty without the feature `cuda`.
pub fn kernels() -> &'static [KernelInfo] {
    #[cfg(feature = "cuda")]
    {
        static ROWS: std::sync::OnceLock<Vec<KernelInfo>> = std::sync::OnceLock::new();
        ROWS.get_or_init(crate::sys::forward_rows)
    }
    #[cfg(not(feature = "cuda"))]
    &[]
}

/// The backward kernels of this build, in the launch table's order. Empty without the feature `cuda`.
pub fn backward_kernels() -> &'static [KernelInfo] {
    #[cfg(feature = "cuda")]
    {
        static ROWS: std::sync::OnceLock<Vec<KernelInfo>> = std::sync::OnceLock::new();
        ROWS.get_or_init(crate::sys::backward_rows)
    }
    #[cfg(not(feature = "cuda"))]
    &[]
}

/// Rows as a Markdown table: what the README shows of [`kernels()`] and [`backward_kernels()`].
pub fn support_table<'a>(rows: impl IntoIterator<Item = &'a KernelInfo>) -> String {
    let mut table = String::from(
        "| arch | pass | dtype | mask | head_dim_qk | head_dim_vo | tile (queries x keys) | stages | shared memory |\n\
         |------|------|-------|------|-------------|-------------|-----------------------|--------|---------------|\n",
    );
    for row in rows {
        let KernelInfo {
            arch,
            pass,
            dtype,
            mask,
            head_dim_qk,
            head_dim_vo,
            tile_m,
            tile_n,
            stages,
            smem_bytes,
            scores,
            ..
        } = row;
        // Rows are moved in steps of 16 bytes.
        let least = 16 / dtype.bytes();
        let scores = if *scores == DType::F16 { ", f16 scores" } else { "" };
        // Writing to a String cannot fail.
        let _ = writeln!(
            table,
            "| {arch} | {pass} | {dtype}{scores} | {mask} | {least} to {head_dim_qk} | {least} to {head_dim_vo} | {tile_m} x {tile_n} | {stages} \
             | {:.1} KiB |",
            *smem_bytes as f64 / 1024.0
        );
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: KernelInfo = KernelInfo {
        row: 0,
        pass: Pass::Forward,
        arch: Arch::Sm90,
        dtype: DType::BF16,
        mask: MaskClass::Causal,
        head_dim_qk: 128,
        head_dim_vo: 128,
        tile_m: 128,
        tile_n: 176,
        stages: 2,
        threads: 384,
        smem_bytes: 213 << 10,
        scores: DType::F32,
        share_bytes: 0,
    };

    #[test]
    fn a_kernel_needs_its_arch_and_its_shared_memory() {
        let h100 = DeviceFacts::h100_sxm();
        assert!(ROW.runs_on(&h100));
        assert!(!KernelInfo { smem_bytes: (227 << 10) + 1, ..ROW }.runs_on(&h100));
        assert!(KernelInfo { arch: Arch::Sm80, ..ROW }.runs_on(&h100));
        let blackwell = DeviceFacts { arch: ComputeCapability { major: 10, minor: 0 }, ..h100 };
        assert!(!ROW.runs_on(&blackwell) && KernelInfo { arch: Arch::Sm80, ..ROW }.runs_on(&blackwell));
        let ada = DeviceFacts { arch: ComputeCapability { major: 8, minor: 9 }, ..h100 };
        assert!(!ROW.runs_on(&ada) && KernelInfo { arch: Arch::Sm80, ..ROW }.runs_on(&ada));
        let turing = DeviceFacts { arch: ComputeCapability { major: 7, minor: 5 }, ..h100 };
        assert!(!ROW.runs_on(&turing) && !KernelInfo { arch: Arch::Sm80, ..ROW }.runs_on(&turing));
    }

    #[test]
    fn rows_print_themselves() {
        assert_eq!(ROW.to_string(), "sm90 fwd bf16 causal head_dim 128/128 tile 128x176 stages 2");
        let line = "| sm90 | fwd | bf16 | causal | 8 to 128 | 8 to 128 | 128 x 176 | 2 | 213.0 KiB |";
        assert_eq!(support_table(&[ROW]).lines().last(), Some(line));
        let row = KernelInfo { dtype: DType::E4M3, scores: DType::F16, ..ROW };
        assert_eq!(row.to_string(), "sm90 fwd e4m3 causal head_dim 128/128 tile 128x176 stages 2 scores f16");
        let line = "| sm90 | fwd | e4m3, f16 scores | causal | 16 to 128 | 16 to 128 | 128 x 176 | 2 | 213.0 KiB |";
        assert_eq!(support_table(&[row]).lines().last(), Some(line));
    }

    #[test]
    fn rows_know_their_place() {
        for (pass, kernels) in [(Pass::Forward, kernels()), (Pass::Backward, backward_kernels())] {
            let in_place = |(i, kernel): (usize, &KernelInfo)| kernel.row as usize == i && kernel.pass == pass;
            assert!(kernels.iter().enumerate().all(in_place));
            assert_eq!(kernels.is_empty(), !cfg!(feature = "cuda"));
        }
    }
}
