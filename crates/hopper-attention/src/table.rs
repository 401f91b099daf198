//! The kernels of this build, as data: one row for each kernel. Plans, tests, benches and the support table read the rows.

use std::fmt::{self, Write as _};

#[cfg(feature = "cuda")]
use once_cell::sync::Lazy;

use crate::arch::{Arch, DeviceFacts, MaskClass, Modifiers, Pass};
use crate::dtype::DType;
#[cfg(feature = "cuda")]
use crate::sys;

/// A compiled kernel: a row of [`kernels()`] or [`backward_kernels()`].
///
/// A program can read and copy a row. It can neither make nor change one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelInfo {
    /// The index in the launch table of its pass.
    pub(crate) row: u32,
    pub(crate) pass: Pass,
    pub(crate) arch: Arch,
    pub(crate) dtype: DType,
    pub(crate) mask: MaskClass,
    pub(crate) head_dim_qk: usize,
    pub(crate) head_dim_vo: usize,
    pub(crate) tile_m: usize,
    pub(crate) tile_n: usize,
    pub(crate) stages: usize,
    pub(crate) threads: usize,
    pub(crate) smem_bytes: usize,
    pub(crate) scores: DType,
    pub(crate) split_bytes: usize,
    pub(crate) most_shares: usize,
    pub(crate) sums_bytes: usize,
    pub(crate) packs: bool,
    /// Whether the kernel takes dropout: of whole tensors, and where the device knows the lengths of sequences.
    pub(crate) drops: [bool; 2],
    /// Whether it adds a bias, likewise.
    pub(crate) adds_bias: [bool; 2],
    pub(crate) modifiers: Modifiers,
}

impl KernelInfo {
    /// The pass that the kernel computes.
    pub fn pass(&self) -> Pass {
        self.pass
    }

    /// The instruction set that the kernel is written for.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// The element type of Q, K and V.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The class of masks that the kernel is made for. It also computes those of narrower classes: `Window` causal and full masks,
    /// and `Causal` full ones.
    pub fn mask(&self) -> MaskClass {
        self.mask
    }

    /// The largest head dim of Q and K that the kernel takes.
    pub fn head_dim_qk(&self) -> usize {
        self.head_dim_qk
    }

    /// The largest head dim of V and O that the kernel takes.
    pub fn head_dim_vo(&self) -> usize {
        self.head_dim_vo
    }

    /// Number of queries in a tile (forward) or in a block of queries (backward).
    ///
    /// A tile is the piece of work that a CTA (CUDA thread block) computes at a time. The CTA visits the other sequence
    /// block by block. A forward tile has queries and visits blocks of keys. A backward tile has keys and visits blocks of
    /// queries.
    pub fn tile_m(&self) -> usize {
        self.tile_m
    }

    /// Number of keys in a block of keys (forward) or in a tile (backward). See [`tile_m`](Self::tile_m).
    pub fn tile_n(&self) -> usize {
        self.tile_n
    }

    /// Number of stages: how many blocks of one operand are in shared memory at a time.
    ///
    /// In the forward K has this many stages, and V too. In the backward Q does, and dO.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Number of threads in a CTA.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Shared memory that a CTA asks for, in bytes.
    pub fn smem_bytes(&self) -> usize {
        self.smem_bytes
    }

    /// The type in which scores are summed: f32 or f16. Only kernels for e4m3 operands have f16. A plan takes these only if
    /// the problem [allows f16](crate::ForwardProblemBuilder::half_scores).
    pub fn scores(&self) -> DType {
        self.scores
    }

    /// Workspace that each CTA needs where the last tiles are split over all CTAs, in bytes. 0: the kernel never splits tiles.
    pub fn split_bytes(&self) -> usize {
        self.split_bytes
    }

    /// The most CTAs of a cluster that may share a tile. 1: none may. (Tiles of a backward pass may have shares outside of
    /// clusters, too.)
    pub fn most_shares(&self) -> usize {
        self.most_shares
    }

    /// Workspace that each cluster needs where several share a tile, in bytes. 0: only one may.
    pub fn sums_bytes(&self) -> usize {
        self.sums_bytes
    }

    /// Whether the kernel takes packed sequences and used lengths.
    pub fn packs(&self) -> bool {
        self.packs
    }

    /// Whether it takes dropout: beside packed sequences and used lengths, if `packed`, and else without them.
    pub fn drops(&self, packed: bool) -> bool {
        self.drops[usize::from(packed)]
    }

    /// Whether it takes an additive [`bias`](crate::ForwardProblemBuilder::bias): beside packed sequences and used lengths, if
    /// `packed`, and else without them.
    pub fn adds_bias(&self, packed: bool) -> bool {
        self.adds_bias[usize::from(packed)]
    }

    /// Whether the kernel takes *modified* problems: those with a [`softcap`](crate::ForwardProblemBuilder::softcap) or
    /// [`alibi`](crate::ForwardProblemBuilder::alibi), a [`bias`](crate::ForwardProblemBuilder::bias) or
    /// [`dropout`](crate::ForwardProblemBuilder::dropout), or with [`max_logits`](crate::ForwardProblemBuilder::max_logits).
    pub fn takes_modifiers(&self) -> bool {
        self.modifiers != Modifiers::Never
    }

    /// Whether the kernel takes such problems alone.
    pub fn needs_modifiers(&self) -> bool {
        self.modifiers == Modifiers::Always
    }

    /// Whether a CTA of the kernel computes one tile and ends, however many there are. The kernels with tiles of 64 queries are so:
    /// two warpgroups share a tile's keys.
    pub(crate) fn has_one_tile(&self) -> bool {
        self.pass == Pass::Forward && self.most_shares > 1 && self.tile_m <= 64
    }

    /// Whether a GPU can run the kernel: it has the instruction set, and enough shared memory for a CTA.
    pub fn runs_on(&self, gpu: &DeviceFacts) -> bool {
        self.arch.runs_on(gpu.arch) && self.smem_bytes <= gpu.smem_bytes_per_block
    }

    /// Whether the launch table has exactly this row at the row's index. A launch uses the index alone.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "nothing is launched"))]
    pub(crate) fn is_in_table(&self) -> bool {
        let table = match self.pass {
            Pass::Forward => kernels(),
            Pass::Backward => backward_kernels(),
        };
        table.get(self.row as usize) == Some(self)
    }

    #[cfg(feature = "cuda")]
    fn read(pass: Pass, row: u32, info: &sys::RowInfo) -> Option<Self> {
        let count = |value: i32| usize::try_from(value).ok();
        Some(Self {
            row,
            pass,
            arch: sys::arch(info.arch)?,
            dtype: sys::dtype(info.dtype)?,
            mask: sys::mask_class(info.mask)?,
            head_dim_qk: count(info.head_dim_qk)?,
            head_dim_vo: count(info.head_dim_vo)?,
            tile_m: count(info.tile_m)?,
            tile_n: count(info.tile_n)?,
            stages: count(info.stages)?,
            threads: count(info.threads)?,
            smem_bytes: count(info.smem_bytes)?,
            scores: sys::scores(info.scores)?,
            split_bytes: count(info.split_bytes)?,
            most_shares: count(info.most_shares)?,
            sums_bytes: count(info.sums_bytes)?,
            packs: info.packs,
            drops: [info.drops, info.drops_packed],
            adds_bias: [info.adds_bias, info.adds_bias_packed],
            modifiers: sys::modifiers(info.modifiers)?,
        })
    }
}

impl fmt::Display for KernelInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { arch, pass, dtype, mask, head_dim_qk, head_dim_vo, tile_m, tile_n, stages, scores, .. } = self;
        let scores = if *scores == DType::F16 { " scores f16" } else { "" };
        let modified = if self.needs_modifiers() { " modified" } else { "" };
        write!(
            f,
            "{arch} {pass} {dtype} {mask} head_dim {head_dim_qk}/{head_dim_vo} tile {tile_m}x{tile_n} stages \
             {stages}{scores}{modified}"
        )
    }
}

/// The forward kernels of this build, in the order of the launch table. Empty without the feature `cuda`.
pub fn kernels() -> &'static [KernelInfo] {
    #[cfg(feature = "cuda")]
    {
        static ROWS: Lazy<Vec<KernelInfo>> = Lazy::new(|| read(Pass::Forward, sys::fwd_rows()));
        &ROWS
    }
    #[cfg(not(feature = "cuda"))]
    &[]
}

/// The backward kernels of this build, in the order of the launch table. Empty without the feature `cuda`.
pub fn backward_kernels() -> &'static [KernelInfo] {
    #[cfg(feature = "cuda")]
    {
        static ROWS: Lazy<Vec<KernelInfo>> = Lazy::new(|| read(Pass::Backward, sys::bwd_rows()));
        &ROWS
    }
    #[cfg(not(feature = "cuda"))]
    &[]
}

/// The rows of a launch table.
///
/// The enums of the bridge are open: a row may have a value that this file does not know. Such a row is left out. The
/// others still have the right index, because each row carries its own.
#[cfg(feature = "cuda")]
fn read(pass: Pass, table: Vec<sys::RowInfo>) -> Vec<KernelInfo> {
    (0..).zip(table).filter_map(|(row, info)| KernelInfo::read(pass, row, &info)).collect()
}

/// The quantiser's kernels for one source type: a row of the quantiser's launch table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuantizeInfo {
    /// The index in the launch table.
    pub row: u32,
    pub arch: Arch,
    pub source: DType,
}

impl fmt::Display for QuantizeInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} quantise {} to e4m3", self.arch, self.source)
    }
}

/// The quantiser's kernels of this build. Empty without the feature `cuda`.
pub(crate) fn quantize_kernels() -> &'static [QuantizeInfo] {
    #[cfg(feature = "cuda")]
    {
        static ROWS: Lazy<Vec<QuantizeInfo>> = Lazy::new(|| {
            let row = |(row, info): (u32, sys::QuantizeRowInfo)| {
                Some(QuantizeInfo { row, arch: sys::arch(info.arch)?, source: sys::dtype(info.source)? })
            };
            (0..).zip(sys::quantize_rows()).filter_map(row).collect()
        });
        &ROWS
    }
    #[cfg(not(feature = "cuda"))]
    &[]
}

/// Rows as a Markdown table. `docs/kernels.md` shows this table of [`kernels()`] and [`backward_kernels()`].
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
        // Kernels move the vectors of Q, K, V and O in steps of 16 bytes.
        let least = 16 / dtype.bytes();
        let scores = if *scores == DType::F16 { ", f16 scores" } else { "" };
        let modified = if row.needs_modifiers() { ", modified" } else { "" };
        // Writing to a String cannot fail.
        let _ = writeln!(
            table,
            "| {arch} | {pass} | {dtype}{scores}{modified} | {mask} | {least} to {head_dim_qk} | {least} to {head_dim_vo} | {tile_m} x {tile_n} | {stages} \
             | {:.1} KiB |",
            *smem_bytes as f64 / 1024.0
        );
    }
    table
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::arch::ComputeCapability;

    pub(crate) const ROW: KernelInfo = KernelInfo {
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
        split_bytes: 0,
        most_shares: 1,
        sums_bytes: 0,
        packs: false,
        drops: [false; 2],
        adds_bias: [false; 2],
        modifiers: Modifiers::Either,
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
        let modified = KernelInfo { modifiers: Modifiers::Always, ..ROW };
        assert_eq!(modified.to_string(), "sm90 fwd bf16 causal head_dim 128/128 tile 128x176 stages 2 modified");
        assert!(support_table(&[modified]).contains("| bf16, modified | causal |"));
        let row = KernelInfo { dtype: DType::E4M3, scores: DType::F16, ..ROW };
        assert_eq!(row.to_string(), "sm90 fwd e4m3 causal head_dim 128/128 tile 128x176 stages 2 scores f16");
        let line = "| sm90 | fwd | e4m3, f16 scores | causal | 16 to 128 | 16 to 128 | 128 x 176 | 2 | 213.0 KiB |";
        assert_eq!(support_table(&[row]).lines().last(), Some(line));
    }

    #[test]
    fn a_forged_row_is_none_of_the_table() {
        assert!(!ROW.is_in_table());
        for &kernel in kernels().iter().chain(backward_kernels()) {
            assert!(kernel.is_in_table());
            let other = match kernel.pass {
                Pass::Forward => Pass::Backward,
                Pass::Backward => Pass::Forward,
            };
            for forged in [
                KernelInfo { row: kernel.row + 1, ..kernel },
                KernelInfo { row: u32::MAX, ..kernel },
                KernelInfo { pass: other, ..kernel },
                KernelInfo { head_dim_qk: kernel.head_dim_qk + 8, ..kernel },
            ] {
                assert!(!forged.is_in_table(), "{forged}");
            }
        }
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
