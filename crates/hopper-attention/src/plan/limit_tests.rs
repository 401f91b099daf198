//! Plans under a limit of the workspace.

use super::*;
use crate::arch::{MaskClass, Pass};
use crate::device::Device;
use crate::dtype::DType;
use crate::mask::Mask;
use crate::plan::{BackwardChoice, Choice, select, select_backward};
use crate::problem::{BackwardProblem, Dims};
use crate::table::tests::ROW;

const H100: DeviceFacts = DeviceFacts::h100_sxm();

/// Backward rows at head dim 128. `most_shares`: the largest cluster.
fn rows(arch: Arch, most_shares: usize) -> Vec<KernelInfo> {
    let of = |mask| KernelInfo { pass: Pass::Backward, arch, mask, tile_m: 64, tile_n: 128, most_shares, ..ROW };
    [MaskClass::Full, MaskClass::Causal, MaskClass::Window].map(of).to_vec()
}

fn backward(dims: [usize; 4], mask: Mask, deterministic: bool) -> BackwardProblem {
    let [batch, seqlen, heads_q, heads_kv] = dims;
    let dims = Dims::new(batch, seqlen, heads_q, 128).with_heads_kv(heads_kv);
    let forward = ForwardProblem::builder(DType::BF16, dims).mask(mask).build().unwrap();
    BackwardProblem::builder(&forward).deterministic(deterministic).build().unwrap()
}

fn limited(problem: &BackwardProblem, limit: usize, rows: &[KernelInfo]) -> Result<BackwardChoice> {
    let problem = problem.to_builder().workspace_limit(Some(limit as u64)).build()?;
    select_backward(&problem, &H100, rows)
}

/// What a plan needs without cut tiles, as the refusal of a limit of 0 says.
fn least(refused: Error) -> usize {
    let Error::Value { what: "workspace_limit", got, allowed } = &refused else { panic!("{refused}") };
    let (bytes, rest) = allowed.split_once(' ').unwrap();
    assert_eq!((got.as_str(), rest), ("0", "and above, the bytes that the plan needs without cut tiles"));
    bytes.parse().unwrap()
}

/// Few tiles, with shares that are summed in memory and in clusters; in turns, where each share has sums of its own; many tiles of
/// which the last are cut.
fn cut_problems() -> Vec<(BackwardProblem, Vec<KernelInfo>)> {
    let rows = |most_shares| rows(Arch::Sm90, most_shares);
    vec![
        (backward([1, 2048, 8, 1], Mask::causal(), false), rows(1)),
        (backward([1, 2048, 4, 4], Mask::causal(), false), rows(1)),
        (backward([1, 8192, 8, 1], Mask::causal(), true), rows(1)),
        (backward([1, 512, 16, 16], Mask::causal(), false), rows(8)),
        (backward([1, 512, 4, 2], Mask::Full, false), rows(8)),
        (backward([1, 16384, 16, 16], Mask::Full, false), rows(1)),
        (backward([1, 65536, 8, 1], Mask::Full, false), rows(1)),
    ]
}

#[test]
fn gradients_take_the_best_cut_within_the_limit() {
    let (mut clusters, mut last) = (0, 0);
    for (problem, rows) in cut_problems() {
        let free = select_backward(&problem, &H100, &rows).unwrap();
        let most = free.workspace_bytes();
        clusters += usize::from(free.cluster > 1);
        last += usize::from(0 < free.cut_tiles && free.cut_tiles < free.tiles);
        assert!(free.shares > 1, "{free}");
        // A limit that the plan meets changes nothing.
        for limit in [most, most + 1, usize::MAX] {
            assert_eq!(limited(&problem, limit, &rows), Ok(free));
        }
        let whole = least(limited(&problem, 0, &rows).unwrap_err());
        assert!(whole < most, "{whole} {free}");
        let uncut = limited(&problem, whole, &rows).unwrap();
        assert_eq!((uncut.shares, uncut.cut_tiles, uncut.cluster, uncut.workspace_bytes()), (1, 0, 1, whole));
        let text = format!(
            "workspace_limit: {}; allowed: {whole} and above, the bytes that the plan needs without cut tiles",
            whole - 1
        );
        assert_eq!(limited(&problem, whole - 1, &rows).unwrap_err().to_string(), text);
        for part in 0..=64 {
            let limit = whole + (most - 1 - whole) * part / 64;
            let choice = limited(&problem, limit, &rows).unwrap();
            assert!(choice.workspace_bytes() <= limit, "{limit}: {choice}");
            // All else is chosen as before.
            assert_eq!((choice.kernel, choice.tiles, choice.blocks), (free.kernel, free.tiles, free.blocks));
            assert!(choice.shares == 1 || choice.tile_counter || choice.grid <= choice.tiles * choice.shares);
        }
    }
    assert!(clusters > 0 && last > 0, "{clusters} {last}");
}

/// In turns each share of a tile has sums of its own, so that the shares follow the limit.
#[test]
fn fewer_shares_need_less() {
    let problem = backward([1, 8192, 8, 1], Mask::causal(), true);
    let rows = rows(Arch::Sm90, 1);
    let free = select_backward(&problem, &H100, &rows).unwrap();
    let whole = least(limited(&problem, 0, &rows).unwrap_err());
    let sums = free.tiles as usize * 128 * 256 * size_of::<f32>();
    // The list of shares is small beside the sums.
    let shares = [1, 2, 4, 8].map(|copies| limited(&problem, whole + (copies + 1) * sums - 1, &rows).unwrap().shares);
    assert_eq!((shares, free.shares), ([1, 2, 4, 8], 8));
}

#[test]
fn what_has_no_shares_is_compared_with_the_limit() {
    let listed = crate::problem::BlockMask::new(4);
    let forward = ForwardProblem::builder(DType::BF16, Dims::new(2, 512, 2, 128)).mask(Mask::causal());
    let problems = [
        (forward.clone().arch(Arch::Sm80), rows(Arch::Sm80, 1)),
        (forward.clone().packed(true), rows(Arch::Sm90, 8)),
        (forward.block_mask(Some(listed)), rows(Arch::Sm90, 8)),
    ];
    for (forward, mut rows) in problems {
        rows.push(KernelInfo { mask: MaskClass::Blocks, ..rows[0] });
        rows.iter_mut().for_each(|row| row.packs = true);
        let problem = BackwardProblem::builder(&forward.build().unwrap()).build().unwrap();
        let free = select_backward(&problem, &H100, &rows).unwrap();
        let whole = least(limited(&problem, 0, &rows).unwrap_err());
        assert_eq!((whole, free.shares), (free.workspace_bytes(), 1));
        assert_eq!(limited(&problem, whole, &rows), Ok(free));
        assert!(limited(&problem, whole - 1, &rows).is_err());
    }
}

fn forward(problem: &ForwardProblem, limit: u64, rows: &[KernelInfo]) -> Result<Choice> {
    select(&problem.to_builder().workspace_limit(Some(limit)).build()?, &H100, rows)
}

#[test]
fn e4m3_tiles_are_split_within_the_limit() {
    let dims = Dims::new(1, 16384, 16, 128);
    let row = |scores| KernelInfo { dtype: DType::E4M3, scores, split_bytes: 1000, tile_n: 128, ..ROW };
    // With scores in f16 the workspace also has the words of the range check.
    for (half_scores, header) in [(false, 4), (true, 16 + 528)] {
        let first = row(if half_scores { DType::F16 } else { DType::F32 });
        let rows = [(first, 192), (row(DType::F32), 128)];
        let rows = rows.map(|(row, tile_m)| KernelInfo { mask: MaskClass::Full, tile_m, ..row });
        let problem = ForwardProblem::builder(DType::E4M3, dims).half_scores(half_scores).build().unwrap();
        let free = select(&problem, &H100, &rows).unwrap();
        assert_eq!((free.split_tiles, free.fallback.is_some()), (188, half_scores));
        let most = free.workspace_bytes() as u64;
        assert_eq!(most, 132_000 + if half_scores { header } else { 16 });
        assert_eq!([most, u64::MAX].map(|limit| forward(&problem, limit, &rows)), [Ok(free), Ok(free)]);
        for limit in [most - 1, header] {
            let whole = forward(&problem, limit, &rows).unwrap();
            assert_eq!((whole.workspace_bytes() as u64, whole), (header, Choice { split_tiles: 0, ..free }));
        }
        let text = format!(
            "workspace_limit: {}; allowed: {header} and above, the bytes that the plan needs without cut tiles",
            header - 1
        );
        assert_eq!(forward(&problem, header - 1, &rows).unwrap_err().to_string(), text);
        assert_eq!(least(forward(&problem, 0, &rows).unwrap_err()) as u64, header);
    }
}

/// Clusters that share a tile of a forward pass in 16 bits sum through the workspace. The CTAs of a cluster do not, so that a limit
/// leaves them.
#[test]
fn a_forward_in_16_bits_keeps_its_shares() {
    let row = KernelInfo { mask: MaskClass::Full, tile_n: 128, most_shares: 4, ..ROW };
    let problem = ForwardProblem::builder(DType::BF16, Dims::new(1, 128, 4, 128).with_seqlen_kv(8192)).build().unwrap();
    let free = select(&problem, &H100, &[row]).unwrap();
    assert_eq!((free.shares > 1, free.workspace_bytes()), (true, 0));
    assert_eq!(forward(&problem, 0, &[row]), Ok(free));
    let several = KernelInfo { sums_bytes: 73728, ..row };
    let cut = select(&problem, &H100, &[several]).unwrap();
    let bytes = cut.workspace_bytes();
    assert!(cut.splits > 1 && bytes > 73728, "{cut}");
    assert_eq!(forward(&problem, bytes as u64, &[several]), Ok(cut));
    let within = forward(&problem, bytes as u64 - 1, &[several]).unwrap();
    assert!(within.workspace_bytes() < bytes, "{within}");
    assert_eq!(forward(&problem, 0, &[several]), Ok(Choice { kernel: several, ..free }));
}

#[test]
fn the_cpu_meets_every_limit() {
    let problem = backward([1, 512, 4, 2], Mask::causal(), false);
    let problem = problem.to_builder().workspace_limit(Some(0)).build().unwrap();
    assert_eq!(problem.plan(&Device::cpu()).unwrap().workspace_bytes(), 0);
    assert_eq!(problem.forward().plan(&Device::cpu()).unwrap().workspace_bytes(), 0);
}
