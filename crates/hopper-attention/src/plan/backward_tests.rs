//! Tests of backward plans.

use super::*;
use crate::arch::{ComputeCapability, Modifiers, Pass};
use crate::dtype::DType;
use crate::mask::Mask;
use crate::operand::Slot;
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
                split_bytes: 0,
                most_shares: 1,
                sums_bytes: 0,
                packs: false,
                drops: [false; 2],
                adds_bias: [false; 2],
                modifiers: Modifiers::Never,
            });
        }
    }
    rows
}

/// A capped problem takes a row for capped scores, and any other problem one that is not for these alone.
#[test]
fn rows_for_capped_scores_are_for_them_alone() {
    let problem = |cap: f32| {
        let forward = ForwardProblem::builder(DType::BF16, DIMS).mask(Mask::causal()).softcap(cap).build().unwrap();
        BackwardProblem::builder(&forward).build().unwrap()
    };
    let with = |modifiers| rows().into_iter().map(move |row| KernelInfo { row: row.row + 6, modifiers, ..row });
    let both: Vec<_> = rows().into_iter().chain(with(Modifiers::Always)).collect();
    for (cap, modifiers) in [(0.0, Modifiers::Never), (50.0, Modifiers::Always)] {
        let choice = select_backward(&problem(cap), &H100, &both).unwrap();
        assert_eq!((choice.kernel.modifiers, choice.kernel.mask), (modifiers, MaskClass::Causal));
        let either: Vec<_> = with(Modifiers::Either).collect();
        assert_eq!(select_backward(&problem(cap), &H100, &either).unwrap().kernel.modifiers, Modifiers::Either);
    }
    let refused = |cap, rows: &[KernelInfo]| select_backward(&problem(cap), &H100, rows).unwrap_err().to_string();
    let text = "unsupported: softcap 50 with backward sm90 kernels for bf16; nearest: no softcap, or Device::cpu()";
    assert_eq!(refused(50.0, &rows()), text);
    let text = "unsupported: backward sm90 kernels for bf16 without softcap, alibi, bias, max_logits and dropout; nearest: with one of them";
    assert_eq!(refused(0.0, &both[6..]), text);
    // So does a bias. Rows that add one are of class window, and have no cap beside it.
    let biased = |softcap| {
        let forward = ForwardProblem::builder(DType::BF16, DIMS).bias(Some(crate::problem::Bias::new(DType::F16)));
        BackwardProblem::builder(&forward.softcap(softcap).build().unwrap()).d_bias(true).build().unwrap()
    };
    let text = "unsupported: a bias with backward sm90 kernels for bf16; nearest: no bias, or Device::cpu()";
    assert_eq!(select_backward(&biased(0.0), &H100, &rows()).unwrap_err().to_string(), text);
    let adding = |row| KernelInfo { adds_bias: [true, false], mask: MaskClass::Window, ..row };
    let adding: Vec<_> = with(Modifiers::Always).map(adding).collect();
    assert!(select_backward(&biased(0.0), &H100, &adding).unwrap().kernel.adds_bias(false));
    let text = "unsupported: softcap and a bias together with backward sm90 kernels for bf16; \
                nearest: one of the two, or Device::cpu()";
    assert_eq!(select_backward(&biased(30.0), &H100, &adding).unwrap_err().to_string(), text);
    // ALiBi needs such a row, too. The maximum logit is no matter of gradients.
    let of = |alibi: bool, softcap: f32| {
        let forward = ForwardProblem::builder(DType::BF16, DIMS).mask(Mask::causal()).softcap(softcap);
        let forward = forward.operand(Slot::AlibiSlopes, alibi).max_logits(true).build().unwrap();
        BackwardProblem::builder(&forward).build().unwrap()
    };
    assert_eq!(select_backward(&of(true, 0.0), &H100, &both).unwrap().kernel.modifiers, Modifiers::Always);
    assert_eq!(select_backward(&of(false, 0.0), &H100, &both).unwrap().kernel.modifiers, Modifiers::Never);
    let text = "unsupported: softcap 50 and alibi with backward sm90 kernels for bf16; nearest: no softcap, alibi, or Device::cpu()";
    assert_eq!(select_backward(&of(true, 50.0), &H100, &rows()).unwrap_err().to_string(), text);
}

/// Dropout needs a row for modified scores that has it. With a probability of 0 nothing is dropped.
#[test]
fn dropout_needs_a_row_that_has_it() {
    let problem = |p| {
        let dropout = Some(crate::problem::Dropout::new(p).unwrap());
        let forward = ForwardProblem::builder(DType::BF16, DIMS).mask(Mask::causal()).dropout(dropout).build().unwrap();
        BackwardProblem::builder(&forward).build().unwrap()
    };
    let selected = |p, rows: &[KernelInfo]| select_backward(&problem(p), &H100, rows);
    let modified = |drops| {
        rows().into_iter().map(|row| KernelInfo { modifiers: Modifiers::Always, drops, ..row }).collect::<Vec<_>>()
    };
    assert_eq!(selected(0.0, &rows()).unwrap().kernel.modifiers, Modifiers::Never);
    let text = "unsupported: dropout 0.5 with backward sm90 kernels for bf16; nearest: no dropout, or Device::cpu()";
    assert_eq!(selected(0.5, &rows()).unwrap_err().to_string(), text);
    for drops in [[false; 2], [false, true]] {
        let text = selected(0.5, &modified(drops)).unwrap_err().to_string();
        let (start, end) = (
            "unsupported: dropout with backward sm90 kernels for bf16, causal, head_dim ",
            "no dropout, or Device::cpu()",
        );
        assert!(text.starts_with(start) && text.ends_with(end), "{text}");
    }
    assert_eq!(selected(0.5, &modified([true, false])).unwrap().kernel.modifiers, Modifiers::Always);
}

/// Rows for sm80 with the real tiles, for one mask class.
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
        "sm90 bwd bf16 full head_dim 64/64 tile 128x128 stages 2, grid 132 for 192 tiles of 2 shares, \
         256 blocks of queries, heads a group 16, groups 1, drawn order"
    );
    let wide = Dims { head_dim_vo: 72, ..DIMS };
    assert_eq!(
        chosen(&deterministic(&problem(wide, Mask::causal()))).to_string(),
        "sm90 bwd bf16 causal head_dim 128/128 tile 64x128 stages 2, grid 132 for 192 tiles, 512 blocks of queries, \
         heads a group 8, groups 1, drawn order, dQ in turns, keys to +2000+0"
    );
    assert_eq!(
        chosen(&problem(Dims { batch: 1, ..DIMS }, Mask::window(Some(5), None))).to_string(),
        "sm90 bwd bf16 window head_dim 64/64 tile 128x128 stages 2, grid 132 for 96 tiles of 4 shares, \
         128 blocks of queries, heads a group 16, groups 1, drawn order, keys from +2000-5"
    );
}

#[test]
fn few_tiles_are_clusters_unless_they_take_turns() {
    let dims =
        Dims { batch: 1, seqlen_q: 512, seqlen_kv: 512, heads_q: 16, heads_kv: 16, head_dim_qk: 128, head_dim_vo: 128 };
    let rows: Vec<KernelInfo> = rows().into_iter().map(|row| KernelInfo { most_shares: 8, ..row }).collect();
    let of = |problem: &BackwardProblem| select_backward(problem, &H100, &rows).unwrap();
    let choice = of(&problem(dims, Mask::causal()));
    assert_eq!(
        choice.to_string(),
        "sm90 bwd bf16 causal head_dim 128/128 tile 64x128 stages 2, grid 128 for 64 tiles of 2 shares in a cluster, \
         128 blocks of queries, heads a group 16, groups 1, fixed order, keys to +0+0"
    );
    assert!(
        choice.cluster == 2
            && !choice.tile_counter
            && choice.parts().key_sums == choice.parts().end.next_multiple_of(256)
    );
    let in_turns = of(&deterministic(&problem(dims, Mask::causal())));
    assert!(in_turns.cluster == 1 && in_turns.tile_counter);
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
        // A head dim in between takes the row of the next larger head dim.
        assert_eq!((tile(8, &facts), tile(72, &facts)), (narrow, wide), "{major}.{minor}");
    }
    // One CTA for each tile, drawn tiles where they take turns, and 8 bytes of statistics for a query.
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

/// What the tiles of a group access stays in the second-level cache, however long a packed sequence may be.
#[test]
fn packed_heads_are_grouped_for_the_longest_sequence() {
    let rows = rows().into_iter().map(|row| KernelInfo { packs: true, ..row }).collect::<Vec<_>>();
    let heads = |longest: Option<usize>| {
        let dims = Dims::new(100, 64 << 10, 16, 128);
        let options = ForwardProblem::builder(DType::BF16, dims).mask(Mask::causal()).packed(true).lse(true);
        let options = longest.into_iter().fold(options, |options, hint| options.max_seqlen_q(hint));
        let problem = BackwardProblem::builder(&options.build().unwrap()).build().unwrap();
        select_backward(&problem, &H100, &rows).unwrap().heads_per_group
    };
    // Of 16k queries the tiles of a head access 16 MiB.
    assert_eq!([512, 8 << 10, 16 << 10, 32 << 10].map(|longest| heads(Some(longest))), [16, 8, 4, 4]);
    assert_eq!(heads(None), 4);
}

/// What is under way fits into the second-level cache, but for the longest sequences.
#[test]
fn heads_are_grouped_by_what_their_tiles_access() {
    let heads = |seqlen: usize| {
        let dims = Dims::new(1, seqlen, 32, 128);
        let choice = chosen(&problem(dims, Mask::causal()));
        (choice.heads_per_group, choice.groups)
    };
    assert_eq!([4, 8, 16, 32, 128, 256, 512].map(|k| heads(k << 10).0), [16, 8, 4, 4, 4, 2, 1]);
    assert_eq!(heads(16 << 10), (4, 8));
}

#[test]
fn turns_are_taken_by_more_heads_the_less_they_share() {
    let groups = |seqlen: usize, batch: usize, mask: Mask| {
        let dims = Dims { batch, seqlen_q: seqlen, seqlen_kv: seqlen, heads_q: 32, heads_kv: 32, ..DIMS };
        let choice = chosen(&deterministic(&problem(dims, mask)));
        (choice.heads_per_group, choice.groups)
    };
    // 1024 heads whose tiles read 256 KiB in common, 256 heads of 1 MiB, 128 of 2 MiB, 32 of 8 MiB.
    assert_eq!(groups(512, 32, Mask::causal()), (64, 16));
    assert_eq!(groups(2048, 8, Mask::causal()), (64, 4));
    assert_eq!(groups(4096, 4, Mask::causal()), (32, 4));
    assert_eq!(groups(16384, 1, Mask::causal()), (32, 1));
    assert_eq!(groups(512, 32, Mask::Full), (64, 16));
    assert_eq!(groups(2048, 8, Mask::Full), (16, 16));
    // The last group has the heads that are left.
    assert_eq!(groups(2048, 3, Mask::causal()), (64, 2));
}

#[test]
fn the_workspace_has_its_parts_one_after_the_other() {
    let choice = chosen(&problem(DIMS, Mask::Full));
    // 1000 queries are 8 blocks of 128, in each of 32 heads.
    let queries: usize = 8 * 128 * 32;
    let sums = 256 + queries * 16;
    let end = sums + queries * 64 * 4;
    // 24 tiles of keys in each of 8 heads.
    let list = (end + 8 * 32 * 4).next_multiple_of(256);
    let whole = BackwardChoice { shares: 1, ..choice };
    let after = (list + 24 * 8 * 32).next_multiple_of(256);
    let parts = Parts {
        leak_flag: 128,
        statistics: 256,
        sums,
        progress: end,
        share_list: list,
        key_sums: after,
        table: None,
        lists: None,
        end: list + 24 * 8 * 32,
    };
    assert_eq!(whole.parts(), parts);
    assert_eq!(whole.workspace_bytes(), parts.end);
    // Shares: a longer list, and sums of dK and dV. In turns each share has its own.
    let tile = 128 * (64 + 64) * 4;
    let shared = BackwardChoice { shares: 3, ..choice };
    let key_sums = (list + 3 * 24 * 8 * 32).next_multiple_of(256);
    assert_eq!(shared.parts(), Parts { key_sums, end: key_sums + 24 * 8 * tile, ..parts });
    let in_turns = BackwardChoice { turns: true, ..shared };
    assert_eq!(in_turns.parts(), Parts { key_sums, end: key_sums + 3 * 24 * 8 * tile, ..parts });
    // Clusters sum through shared memory.
    let clusters = BackwardChoice { cluster: 3, ..in_turns };
    assert_eq!(clusters.parts(), Parts { key_sums, end: list + 3 * 24 * 8 * 32, ..parts });
    let in_turns = chosen(&deterministic(&problem(DIMS, Mask::Full)));
    assert!(in_turns.tile_counter && choice.tile_counter);
    let few = chosen(&problem(DIMS.with_seqlen_q(256).with_seqlen_kv(256), Mask::Full));
    assert!(!few.tile_counter, "as many tiles as multiprocessors, or fewer than two for each: {few}");
    // The kernels copy and add 16 bytes at a time, so every part begins at a multiple of 16.
    for choice in [choice, in_turns, chosen(&problem(Dims { seqlen_q: 1, ..DIMS }, Mask::causal()))] {
        let Parts { statistics, sums, progress, share_list, key_sums, .. } = choice.parts();
        assert!([statistics, sums, progress, share_list, key_sums].iter().all(|at| at.is_multiple_of(16)), "{choice}");
    }
}

#[test]
fn what_no_row_has_is_named_with_the_nearest() {
    let refused = |problem: BackwardProblem| select_backward(&problem, &H100, &rows()).unwrap_err().to_string();
    let text = refused(problem(Dims { head_dim_qk: 136, ..DIMS }, Mask::Full));
    let end = "a backward pass of bf16, full, on sm90; nearest: up to 64 with 64, up to 128 with 128";
    assert!(text.ends_with(end), "{text}");
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
    // A build without sm80 kernels.
    let refusal = "unsupported: backward sm80 kernels on a GPU of sm_90; nearest: sm90";
    assert_eq!(chosen(Arch::Sm80).unwrap_err().to_string(), refusal);
    let a100 = DeviceFacts { arch: ComputeCapability { major: 8, minor: 0 }, ..H100 };
    let error = select_backward(&problem(DIMS, Mask::Full), &a100, &rows());
    assert_eq!(error.unwrap_err().to_string(), "unsupported: backward kernels for a GPU of sm_80; nearest: sm_90");
    // A build with both: the GPU's newest instruction set, or the one that the forward problem asks for.
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
fn a_margin_leaves_multiprocessors_to_others() {
    let margin = |problem: &BackwardProblem, margin| problem.to_builder().sm_margin(margin).build().unwrap();
    let few = |multiprocessors| DeviceFacts { multiprocessors, ..H100 };
    let problems = [problem(DIMS, Mask::Full), problem(Dims { batch: 1, seqlen_kv: 512, ..DIMS }, Mask::causal())];
    for problem in problems.iter().flat_map(|problem| [problem.clone(), deterministic(problem)]) {
        // As on a GPU that has no more.
        for (all, left) in [(132, 0), (132, 1), (132, 16), (132, 131), (114, 16), (78, 8)] {
            let choice = select_backward(&margin(&problem, left), &few(all), &rows()).unwrap();
            assert_eq!(select_backward(&problem, &few(all - left), &rows()), Ok(choice));
            assert_eq!(choice.grid, (choice.tiles * choice.shares).min((all - left) as i32), "{choice}");
        }
        let refused = |left, all| select_backward(&margin(&problem, left), &few(all), &rows()).unwrap_err();
        let text = "sm_margin: 132; allowed: 0 to 131, since the GPU has 132 multiprocessors";
        assert_eq!(refused(132, 132).to_string(), text);
        assert!(matches!(refused(usize::MAX, 114), crate::Error::Value { what: "sm_margin", .. }));
        assert_eq!(margin(&problem, 500).plan(&Device::cpu()).unwrap().workspace_bytes(), 0);
    }
    let sm80 = margin(&with_arch(Some(Arch::Sm80)), 1);
    let text = "unsupported: sm_margin 1 with sm80 kernels, which have a CTA for each tile; \
                nearest: sm_margin 0, or sm90 kernels";
    assert_eq!(select_backward(&sm80, &H100, &sm80_rows()).unwrap_err().to_string(), text);
}

/// The order of turns must be the order of the list: shares that are not whole query heads are all in one group.
#[test]
fn shares_in_turns_are_listed_in_the_order_of_their_turns() {
    let mut cut = 0;
    for (heads_q, heads_kv) in [(8, 1), (6, 2), (1, 1), (12, 3), (64, 1)] {
        for seqlen in [1, 300, 1000, 4096, 20000] {
            for mask in [Mask::Full, Mask::causal(), Mask::window(Some(500), Some(0))] {
                let dims = Dims { batch: 1, seqlen_q: seqlen, seqlen_kv: seqlen, heads_q, heads_kv, ..DIMS };
                let choice = chosen(&deterministic(&problem(dims, mask)));
                let group = (heads_q / heads_kv) as i32;
                assert!(choice.groups == 1 || group % choice.shares == 0, "{choice}");
                let heads = heads_kv as i32 * choice.shares;
                assert!(choice.heads_per_group * choice.groups >= heads, "{choice}");
                assert!(choice.grid == (choice.tiles * choice.shares).min(132) && choice.tile_counter, "{choice}");
                let Parts { share_list, key_sums, end, .. } = choice.parts();
                assert!(choice.shares == 1 || end > key_sums && key_sums > share_list, "{choice}");
                cut += usize::from(choice.shares > 1);
            }
        }
    }
    assert!(cut > 20, "{cut}");
}

#[test]
fn a_described_gpu_is_planned_for_with_the_kernels_of_the_build() {
    match problem(DIMS, Mask::Full).plan_for(&H100) {
        Ok(plan) => assert!(backward_kernels().contains(&plan.choice().unwrap().kernel)),
        Err(error) => assert!(backward_kernels().is_empty(), "{error}"),
    }
}

/// With lists of blocks a group has the heads whose tiles access 16 MiB in common, and one at least: each CTA is elsewhere in its
/// lists, so that all of it is in use at a time.
#[test]
fn lists_of_blocks_have_small_groups() {
    let mask = crate::problem::BlockMask::new(2).per_head(true).full_blocks(true);
    let listed: Vec<_> = rows().into_iter().map(|row| KernelInfo { mask: MaskClass::Blocks, ..row }).collect();
    let group = |seqlen: usize, head_dim: usize, lists| {
        let dims = Dims::new(1, seqlen, 2048 / head_dim, head_dim);
        let forward =
            ForwardProblem::builder(DType::BF16, dims).mask(Mask::causal()).block_mask(lists).build().unwrap();
        let table = if lists.is_some() { &listed } else { &rows() };
        select_backward(&BackwardProblem::builder(&forward).build().unwrap(), &H100, table).unwrap().heads_per_group
    };
    // A query takes 8 bytes a column: Q and dO two each, and the sum of dQ four.
    assert_eq!([64, 128].map(|head_dim| group(16384, head_dim, Some(mask))), [2, 1]);
    assert_eq!([64, 128].map(|head_dim| group(4096, head_dim, Some(mask))), [8, 4]);
    assert_eq!([64, 128].map(|head_dim| group(4096, head_dim, None)), [16, 16]);
}

/// The bound that [`BackwardPlan::workspace_bytes`] states, from few heads to many and to long sequences. A gradient of the bias adds
/// nothing to it, whatever dimensions it is summed over: so nothing of the size of all pairs is in the workspace.
#[test]
fn the_workspace_is_as_bounded_as_stated() {
    let adding = |row: KernelInfo| KernelInfo { modifiers: Modifiers::Always, adds_bias: [true, false], ..row };
    let table: Vec<_> = rows().into_iter().chain(rows().into_iter().map(adding)).collect();
    let mut cut = 0;
    for (heads_q, heads_kv) in [(1, 1), (8, 1), (32, 8), (64, 64)] {
        for (seqlen, head_dim) in [(512, 64), (4096, 128), (65536, 64), (200_000, 128)] {
            let dims = Dims::new(1, seqlen, heads_q, head_dim).with_heads_kv(heads_kv);
            for (mask, turns) in
                [(Mask::Full, false), (Mask::causal(), false), (Mask::window(Some(500), Some(0)), true)]
            {
                for dimensions in [None, Some([false; 3]), Some([true, true, false]), Some([false, true, true])] {
                    let bias = dimensions.map(|[batch, head, query]| {
                        crate::problem::Bias::new(DType::F32).per_batch(batch).per_head(head).per_query(query)
                    });
                    let forward = ForwardProblem::builder(DType::BF16, dims).mask(mask).bias(bias).build().unwrap();
                    let options = BackwardProblem::builder(&forward).deterministic(turns).d_bias(bias.is_some());
                    let choice = select_backward(&options.build().unwrap(), &H100, &table).unwrap();
                    let blocks = seqlen.div_ceil(choice.kernel.tile_m) * heads_q;
                    let sums = blocks * choice.kernel.tile_m * 4 * head_dim;
                    let shares = (choice.tiles * choice.shares) as usize;
                    let stated = sums + blocks * (16 * choice.kernel.tile_m + 4) + 32 * shares + sums.max(256 << 20);
                    let got = choice.workspace_bytes();
                    assert!(got <= stated + 8 * 256, "{choice}: {got} of {stated}");
                    assert!(got > sums, "{choice}: {got}");
                    cut += usize::from(choice.shares > 1);
                }
            }
        }
    }
    // Some have shares, whose sums are a part of it.
    assert!(cut > 20, "{cut}");
}
