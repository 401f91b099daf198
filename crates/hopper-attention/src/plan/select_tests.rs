use super::*;
use crate::arch::{Arch, ComputeCapability, Modifiers, Pass};
use crate::device::Device;
use crate::mask::{Corner, Mask};
use crate::plan::fitting::mask_class;
use crate::plan::schedule::{Bounds, UNBOUNDED};
use crate::problem::Dims;
use proptest::prelude::*;

pub(super) const H100: DeviceFacts = DeviceFacts::h100_sxm();

pub(super) fn row(row: u32, mask: MaskClass, head_dim: usize, tile_m: usize) -> KernelInfo {
    KernelInfo {
        row,
        pass: Pass::Forward,
        arch: Arch::Sm90,
        dtype: DType::BF16,
        mask,
        head_dim_qk: head_dim,
        head_dim_vo: head_dim,
        tile_m,
        tile_n: 128,
        stages: 2,
        threads: 128 + tile_m * 2,
        smem_bytes: 200 << 10,
        scores: DType::F32,
        split_bytes: 0,
        most_shares: 1,
        sums_bytes: 0,
        packs: false,
        drops: [false; 2],
        adds_bias: [false; 2],
        modifiers: Modifiers::Either,
    }
}

/// A made-up table. The numbers of the real table do not matter here.
pub(super) fn table() -> Vec<KernelInfo> {
    let classes = [MaskClass::Full, MaskClass::Causal, MaskClass::Window];
    let mut rows = Vec::new();
    for dtype in [DType::BF16, DType::F16] {
        for mask in classes {
            for (head_dim, tile_m) in [(64, 192), (128, 128)] {
                let index = rows.len() as u32;
                rows.push(KernelInfo { dtype, ..row(index, mask, head_dim, tile_m) });
            }
        }
    }
    rows
}

pub(super) const DIMS: Dims =
    Dims { batch: 2, seqlen_q: 1000, seqlen_kv: 3000, heads_q: 16, heads_kv: 4, head_dim_qk: 128, head_dim_vo: 128 };

pub(super) fn problem(dims: Dims, mask: Mask) -> ForwardProblem {
    ForwardProblem::builder(DType::BF16, dims).mask(mask).build().unwrap()
}

fn chosen(dims: Dims, mask: Mask) -> String {
    select(&problem(dims, mask), &H100, &table()).unwrap().to_string()
}

pub(super) fn refused(problem: &ForwardProblem, gpu: &DeviceFacts, rows: &[KernelInfo]) -> String {
    select(problem, gpu, rows).unwrap_err().to_string()
}

#[test]
fn golden_plans() {
    assert_eq!(
        chosen(DIMS, Mask::Full),
        "sm90 fwd bf16 full head_dim 128/128 tile 128x128 stages 2, \
         grid 132 for 256 tiles (8 a head, 24 queries of padding), heads a group 1, groups 32, fixed order"
    );
    assert_eq!(
        chosen(DIMS, Mask::causal()),
        "sm90 fwd bf16 causal head_dim 128/128 tile 128x128 stages 2, \
         grid 132 for 256 tiles (8 a head, 24 queries of padding), heads a group 16, groups 1, fixed order, keys to +2000+0"
    );
    assert_eq!(
        chosen(Dims { head_dim_qk: 64, head_dim_vo: 40, ..DIMS }, Mask::window(Some(256), Some(3))),
        "sm90 fwd bf16 window head_dim 64/64 tile 192x128 stages 2, \
         grid 132 for 192 tiles (6 a head, 152 queries of padding), heads a group 16, groups 1, fixed order, \
         keys from +2000-256 to +2000+3"
    );
    let top_left = Mask::Window { left: Some(5), right: None, corner: Corner::TopLeft };
    assert_eq!(
        chosen(Dims { batch: 1, heads_q: 4, ..DIMS }, top_left),
        "sm90 fwd bf16 window head_dim 128/128 tile 128x128 stages 2, \
         grid 32 for 32 tiles (8 a head, 24 queries of padding), heads a group 4, groups 1, fixed order, keys from +0-5"
    );
}

#[test]
fn unequal_tiles_are_drawn_where_a_fixed_order_does_not_pair_them() {
    let choice = |batch, mask| select(&problem(Dims { batch, ..DIMS }, mask), &H100, &table()).unwrap();
    let order = |choice: Choice| (choice.tiles, choice.tile_counter, choice.workspace_bytes());
    assert_eq!(order(choice(1, Mask::causal())), (128, false, 0));
    assert_eq!(order(choice(2, Mask::causal())), (256, false, 0));
    assert_eq!(order(choice(2, Mask::window(Some(300), Some(0)))), (256, false, 0));
    assert_eq!(order(choice(3, Mask::causal())), (384, true, 4));
    assert_eq!(order(choice(3, Mask::window(Some(3), None))), (384, true, 4));
    assert_eq!(order(choice(2, Mask::Full)), (256, false, 0));
    assert_eq!(order(choice(3, Mask::Full)), (384, false, 0));
    // The last queries of such a window see the fewest keys. Tiles of chunks go up and down, too, and so do those whose last
    // queries see none.
    assert_eq!(order(choice(2, Mask::window(Some(3), None))), (256, true, 4));
    let above = Mask::Window { left: Some(200), right: Some(0), corner: Corner::TopLeft };
    let many = Dims { batch: 2, seqlen_kv: 500, ..DIMS };
    assert_eq!(order(select(&problem(many, above), &H100, &table()).unwrap()), (256, true, 4));
    assert_eq!(order(choice(2, Mask::chunked(700))), (256, true, 4));
    assert_eq!(order(choice(2, Mask::prefix(2500))), (256, false, 0));
    let long = problem(Dims { seqlen_q: 20_000, seqlen_kv: 20_000, ..DIMS }, Mask::causal());
    assert_eq!(select(&long, &H100, &table()).unwrap().heads_per_group, 16);
}

#[test]
fn the_last_group_has_the_heads_that_the_cache_holds() {
    let groups = |batch, seqlen, heads_kv, mask| {
        let dims = Dims { batch, seqlen_q: seqlen, seqlen_kv: seqlen, heads_q: 16, heads_kv, ..DIMS };
        let choice = select(&problem(dims, mask), &H100, &table()).unwrap();
        (choice.heads_per_group, choice.groups)
    };
    // A key and its value take 512 bytes. The last group has as many heads as fit 32 MiB: 32 of 2k keys, 64 of 1k keys, no more
    // than 64 of 512 keys, and no more than there are.
    assert_eq!(groups(8, 2048, 16, Mask::causal()), (16, 7));
    assert_eq!(groups(16, 1024, 16, Mask::causal()), (16, 13));
    assert_eq!(groups(32, 512, 16, Mask::causal()), (16, 29));
    assert_eq!(groups(2, 512, 16, Mask::causal()), (16, 1));
    // The last group never has fewer heads than the others.
    assert_eq!(groups(2, 16384, 16, Mask::causal()), (16, 2));
    // Two query heads that read one KV head share its keys, so each counts with half of them.
    assert_eq!(groups(8, 2048, 8, Mask::causal()), (16, 5));
    assert_eq!(groups(8, 2048, 16, Mask::Full), (1, 128));
}

#[test]
fn a_larger_tile_is_worth_some_padding() {
    let rows = [row(0, MaskClass::Causal, 64, 192), row(1, MaskClass::Causal, 64, 128)];
    let tile = |seqlen| {
        let dims = Dims { seqlen_q: seqlen, seqlen_kv: seqlen, head_dim_qk: 64, head_dim_vo: 64, ..DIMS };
        select(&problem(dims, Mask::causal()), &H100, &rows).unwrap().kernel.tile_m
    };
    assert_eq!([512, 1024, 2048, 4096, 16384].map(tile), [128, 128, 192, 192, 192]);
}

#[test]
fn candidates_come_in_the_rules_order() {
    for dims in [DIMS, Dims { head_dim_qk: 64, head_dim_vo: 64, seqlen_q: 128, ..DIMS }] {
        let rows = [table(), vec![row(12, MaskClass::Causal, 64, 128)]].concat();
        let problem = problem(dims, Mask::causal());
        let mut left: Vec<_> = rows.iter().copied().filter(|row| row.mask == MaskClass::Causal).collect();
        let mut taken = Vec::new();
        while let Ok(choice) = select(&problem, &H100, &left) {
            left.retain(|row| *row != choice.kernel);
            taken.push(choice.kernel);
        }
        assert_eq!(candidates(&problem, &H100, &rows).unwrap(), taken);
        assert_eq!(taken.len(), if dims.head_dim_qk == 64 { 3 } else { 1 });
    }
    let full = problem(DIMS, Mask::Full);
    assert_eq!(candidates(&full, &H100, &[]).unwrap_err(), select(&full, &H100, &[]).unwrap_err());
}

/// Rows for e4m3 operands. Those with scores in f32 cover every mask class. Those with scores in f16 have tiles of two sizes.
fn fp8_rows() -> Vec<KernelInfo> {
    let (f32, f16) = (DType::F32, DType::F16);
    let rows = [
        (MaskClass::Full, 64, 128, f32),
        (MaskClass::Full, 128, 128, f32),
        (MaskClass::Causal, 64, 128, f32),
        (MaskClass::Causal, 128, 128, f32),
        (MaskClass::Window, 64, 128, f32),
        (MaskClass::Full, 64, 192, f16),
        (MaskClass::Full, 64, 128, f16),
        (MaskClass::Causal, 64, 192, f16),
        (MaskClass::Causal, 64, 128, f16),
        (MaskClass::Full, 128, 128, f16),
        (MaskClass::Full, 128, 192, f16),
        (MaskClass::Causal, 128, 128, f16),
        (MaskClass::Causal, 128, 192, f16),
    ];
    let made = |(i, (mask, head_dim, tile_m, scores))| KernelInfo {
        dtype: DType::E4M3,
        scores,
        ..row(i as u32, mask, head_dim, tile_m)
    };
    rows.into_iter().enumerate().map(made).collect()
}

#[test]
fn long_tiles_of_e4m3_are_drawn_though_they_are_equal() {
    let drawn = |batch, seqlen| {
        let dims = Dims { batch, seqlen_q: seqlen, seqlen_kv: seqlen, ..DIMS };
        let problem = ForwardProblem::builder(DType::E4M3, dims).half_scores(true).build().unwrap();
        select(&problem, &H100, &fp8_rows()).unwrap().tile_counter
    };
    assert_eq!([512, 1024, 4096].map(|seqlen| drawn(8, seqlen)), [false, true, true]);
    assert!(!drawn(1, 1024), "there is one round");
}

#[test]
fn the_last_tiles_are_split_where_ctas_would_idle() {
    let row = KernelInfo { dtype: DType::E4M3, split_bytes: 1000, ..row(0, MaskClass::Full, 128, 192) };
    let split = |row, [batch, heads_q, seqlen_q, seqlen_kv]: [usize; 4]| {
        let dims = Dims { batch, heads_q, heads_kv: heads_q, seqlen_q, seqlen_kv, ..DIMS };
        let choice = select(&ForwardProblem::builder(DType::E4M3, dims).build().unwrap(), &H100, &[row]).unwrap();
        (choice.tiles, choice.split_tiles, choice.workspace_bytes())
    };
    // 76 of 132 CTAs would have no eleventh tile. A tile has 128 or 64 key blocks.
    assert_eq!(split(row, [1, 16, 16384, 16384]), (1376, 132 + 56, 16 + 132 * 1000));
    assert_eq!(split(row, [2, 16, 8192, 8192]), (1376, 132 + 56, 16 + 132 * 1000));
    assert_eq!(split(KernelInfo { split_bytes: 0, ..row }, [1, 16, 16384, 16384]), (1376, 0, 4));
    // Not split: too few key blocks; a whole number of rounds; less than two rounds. Then just over two rounds, which is split.
    assert_eq!(split(row, [4, 16, 4096, 4096]), (1408, 0, 4));
    assert_eq!(split(row, [2, 132, 192, 16384]), (264, 0, 0));
    assert_eq!(split(row, [1, 140, 192, 16384]), (140, 0, 0));
    assert_eq!(split(row, [1, 265, 192, 16384]), (265, 133, 16 + 132 * 1000));
    let dims = Dims { batch: 1, seqlen_q: 16384, seqlen_kv: 16384, ..DIMS };
    let choice = select(&ForwardProblem::builder(DType::E4M3, dims).build().unwrap(), &H100, &[row]).unwrap();
    assert!(choice.to_string().ends_with(", drawn order, the last 188 split"), "{choice}");
}

#[test]
fn scores_in_f16_are_for_those_who_ask() {
    let of = |mask, head_dim, seqlen, half| {
        let dims = Dims { head_dim_qk: head_dim, head_dim_vo: head_dim, seqlen_q: seqlen, seqlen_kv: seqlen, ..DIMS };
        ForwardProblem::builder(DType::E4M3, dims).mask(mask).half_scores(half).build().unwrap()
    };
    let taken = |mask, head_dim, seqlen, half| {
        let kernel = select(&of(mask, head_dim, seqlen, half), &H100, &fp8_rows()).unwrap().kernel;
        (kernel.scores, kernel.head_dim_qk, kernel.tile_m)
    };
    for (mask, head_dim) in [(Mask::Full, 64), (Mask::Full, 128), (Mask::causal(), 32), (Mask::causal(), 80)] {
        assert_eq!(taken(mask, head_dim, 4096, false), (DType::F32, if head_dim > 64 { 128 } else { 64 }, 128));
    }
    // The table has no row for windows with scores in f16.
    assert_eq!(taken(Mask::window(Some(7), Some(0)), 64, 4096, true), (DType::F32, 64, 128));
    // Rows with scores in f32 are candidates too. They come last where sequences are long, and first where they are short.
    let problem = of(Mask::Full, 64, 4096, true);
    let scores = |problem: &ForwardProblem| {
        candidates(problem, &H100, &fp8_rows()).unwrap().iter().map(|row| row.scores).collect::<Vec<_>>()
    };
    assert_eq!(scores(&problem)[..3], [DType::F16, DType::F16, DType::F32]);
    assert_eq!(scores(&of(Mask::Full, 64, 512, true))[0], DType::F32);
    assert!(candidates(&of(Mask::Full, 64, 4096, false), &H100, &fp8_rows()).unwrap().iter().all(|row| row.row < 5));
    assert!(select(&problem, &H100, &fp8_rows()[..1]).is_ok());
    // A kernel with scores in f16 has a fallback with scores in f32. Other kernels have none.
    let choice = select(&problem, &H100, &fp8_rows()).unwrap();
    let behind = choice.fallback.unwrap();
    assert_eq!((behind.kernel, behind.grid, behind.tile_counter), (fp8_rows()[0], 132, true));
    assert_eq!(choice.workspace_bytes(), 16 + 4 * 132);
    let words = format!("drawn order, and where scores do not fit f16 {}, grid 132", fp8_rows()[0]);
    assert!(choice.to_string().ends_with(&words), "{choice}");
    let in_f32 = select(&of(Mask::Full, 64, 4096, false), &H100, &fp8_rows()).unwrap();
    assert_eq!((in_f32.kernel, in_f32.fallback, in_f32.workspace_bytes()), (behind.kernel, None, 4));
    let named = select_row(&problem, &H100, &fp8_rows()[6], None, &fp8_rows()).unwrap();
    assert_eq!((named.kernel, named.fallback), (fp8_rows()[6], choice.fallback));
    assert!(refused(&problem, &H100, &fp8_rows()[5..7]).starts_with("unsupported: "));
    assert_eq!(
        refused(&of(Mask::Full, 64, 4096, false), &H100, &fp8_rows()[5..]),
        "unsupported: e4m3 operands without half_scores on a GPU; nearest: with half_scores"
    );
}

/// At points where one of the two was measured to be faster by 3% or more (benches/LOG.md): 16k tokens, as many sequences as that is.
#[test]
fn scores_in_f16_are_for_long_sequences() {
    let chosen = |mask, head_dim: usize, seqlen| {
        let heads = 2048 / head_dim;
        let dims = Dims::new(16384 / seqlen, seqlen, heads, head_dim);
        let problem = ForwardProblem::builder(DType::E4M3, dims).mask(mask).half_scores(true).build().unwrap();
        let choice = select(&problem, &H100, &fp8_rows()).unwrap();
        assert_eq!(choice.fallback.is_some(), choice.kernel.scores == DType::F16, "{choice}");
        (choice.kernel.scores, choice.kernel.tile_m)
    };
    let (f32, f16) = ((DType::F32, 128), (DType::F16, 192));
    for (head_dim, mask, wanted) in [
        (64, Mask::Full, [(512, f32), (2048, f16), (4096, f16), (16384, f16)]),
        (64, Mask::causal(), [(512, f32), (1024, f32), (2048, f32), (8192, f16)]),
        (128, Mask::Full, [(512, f32), (2048, f16), (4096, f16), (16384, f16)]),
        (128, Mask::causal(), [(512, f32), (1024, f32), (2048, f32), (8192, f16)]),
    ] {
        assert_eq!(wanted.map(|(seqlen, _)| (seqlen, chosen(mask, head_dim, seqlen))), wanted, "{head_dim} {mask}");
    }
}

/// Few tiles of e4m3: with scores in f32, and shared where a row may be. The launch behind a kernel with scores in f16 has whole tiles.
#[test]
fn few_tiles_of_e4m3_have_scores_in_f32_and_are_shared() {
    let rows: Vec<_> = fp8_rows()
        .into_iter()
        .map(|row| KernelInfo { most_shares: if row.scores == DType::F32 { 8 } else { 1 }, ..row })
        .collect();
    let problem = |heads, seqlen, head_dim, half| {
        let dims = Dims::new(1, seqlen, heads, head_dim);
        ForwardProblem::builder(DType::E4M3, dims).mask(Mask::causal()).half_scores(half).build().unwrap()
    };
    for half in [false, true] {
        let chosen = |heads, seqlen, head_dim| {
            let choice = select(&problem(heads, seqlen, head_dim, half), &H100, &rows).unwrap();
            (choice.kernel.scores, choice.kernel.tile_m, choice.shares, choice.grid)
        };
        // 64 tiles of up to 16 blocks: 66 clusters of two run at a time. With 8 heads they would take two rounds.
        assert_eq!(chosen(4, 2048, 64), (DType::F32, 128, 2, 128));
        assert_eq!(chosen(4, 2048, 128), (DType::F32, 128, 2, 128));
        assert_eq!(chosen(8, 2048, 128), (DType::F32, 128, 1, 128));
        assert_eq!(chosen(4, 512, 64), (DType::F32, 128, 4, 64));
    }
    let long = problem(16, 8192, 128, true);
    let choice = select(&long, &H100, &rows).unwrap();
    let behind = choice.fallback.unwrap();
    assert_eq!((choice.shares, behind.kernel.most_shares, behind.grid), (1, 8, 132));
    // Also where the kernel is named, and few tiles would be shared if it were alone.
    let few = problem(4, 2048, 128, true);
    let named =
        rows.iter().find(|row| row.scores == DType::F16 && row.mask == MaskClass::Causal && row.head_dim_qk == 128);
    let choice = select_row(&few, &H100, named.unwrap(), None, &rows).unwrap();
    assert_eq!((choice.shares, choice.fallback.unwrap().grid), (1, 64));
}

#[test]
fn the_class_is_what_the_mask_keeps() {
    let class = |mask, seqlen_q, seqlen_kv| mask_class(&problem(Dims { seqlen_q, seqlen_kv, ..DIMS }, mask));
    assert_eq!(class(Mask::causal(), 1, 100), MaskClass::Full); // A decode step sees every key.
    assert_eq!(class(Mask::causal(), 2, 100), MaskClass::Causal);
    assert_eq!(class(Mask::Causal { corner: Corner::TopLeft }, 1, 100), MaskClass::Causal);
    assert_eq!(class(Mask::window(None, Some(7)), 100, 100), MaskClass::Causal);
    assert_eq!(class(Mask::window(Some(99), Some(0)), 100, 100), MaskClass::Causal);
    assert_eq!(class(Mask::window(Some(98), Some(0)), 100, 100), MaskClass::Window);
    assert_eq!(class(Mask::window(Some(99), Some(99)), 100, 100), MaskClass::Full);
    assert_eq!(class(Mask::window(Some(0), Some(0)), 100, 0), MaskClass::Full);
    assert_eq!(class(Mask::chunked(100), 100, 100), MaskClass::Causal); // All in the first chunk.
    assert_eq!(class(Mask::chunked(99), 100, 100), MaskClass::Window);
    assert_eq!(class(Mask::chunked(8), 1, 8), MaskClass::Full);
    assert_eq!(class(Mask::chunked(8), 1, 9), MaskClass::Window);
    assert_eq!(class(Mask::prefix(0), 100, 100), MaskClass::Causal);
    assert_eq!(class(Mask::prefix(1), 100, 100), MaskClass::Causal); // The first query keeps its own key anyway.
    assert_eq!(class(Mask::prefix(2), 100, 100), MaskClass::Window);
    assert_eq!(class(Mask::prefix(50), 50, 100), MaskClass::Causal);
    assert_eq!(class(Mask::prefix(100), 100, 100), MaskClass::Full);
}

#[test]
fn the_class_of_packed_sequences_serves_all_of_them() {
    let class = |mask, seqlen_q, seqlen_kv| {
        let dims = Dims { batch: 4, seqlen_q, seqlen_kv, ..DIMS };
        mask_class(&ForwardProblem::builder(DType::BF16, dims).mask(mask).packed(true).build().unwrap())
    };
    // Of 50 queries and 100 keys in all, a sequence may have as many queries as keys.
    assert_eq!(class(Mask::prefix(50), 50, 100), MaskClass::Window);
    assert_eq!(class(Mask::prefix(0), 50, 100), MaskClass::Causal);
    assert_eq!(class(Mask::prefix(100), 50, 100), MaskClass::Full);
    assert_eq!(class(Mask::chunked(100), 50, 100), MaskClass::Causal);
    assert_eq!(class(Mask::chunked(99), 50, 100), MaskClass::Window);
}

#[test]
fn edges_reach_the_kernel() {
    let bounds = |mask| select(&problem(DIMS, mask), &H100, &table()).unwrap().bounds;
    let of = |window_left, step, prefix| Bounds { diagonal_offset: 2000, window_left, window_right: 0, step, prefix };
    assert_eq!(bounds(Mask::chunked(64)), of(63, 64, 0));
    assert_eq!(bounds(Mask::chunked(1)), of(0, 1, 0));
    assert_eq!(bounds(Mask::chunked(usize::MAX)), of(UNBOUNDED, 1, 0));
    assert_eq!(bounds(Mask::prefix(2500)), of(UNBOUNDED, 1, 2500));
    assert_eq!(bounds(Mask::prefix(2000)), of(UNBOUNDED, 1, 0));
    let text = |mask| select(&problem(DIMS, mask), &H100, &table()).unwrap().to_string();
    assert!(text(Mask::chunked(64)).ends_with(", keys from +2000-63 to +2000+0, chunks of 64"));
    assert!(text(Mask::prefix(2500)).ends_with(", keys to +2000+0, and the first 2500"));
}

#[test]
fn bounds_reach_the_kernel() {
    let choice = |mask| select(&problem(DIMS, mask), &H100, &table()).unwrap();
    let bounds = |Choice { bounds, .. }: Choice| {
        assert_eq!((bounds.step, bounds.prefix), (1, 0));
        (bounds.diagonal_offset, bounds.window_left, bounds.window_right)
    };
    assert_eq!(bounds(choice(Mask::causal())), (2000, UNBOUNDED, 0));
    assert_eq!(bounds(choice(Mask::Causal { corner: Corner::TopLeft })), (0, UNBOUNDED, 0));
    assert_eq!(bounds(choice(Mask::window(Some(7), None))), (2000, 7, UNBOUNDED));
    assert_eq!(bounds(choice(Mask::window(Some(usize::MAX), Some(9)))), (2000, UNBOUNDED, 9));
    let longer = Dims { seqlen_q: 3000, seqlen_kv: 1000, ..DIMS };
    assert_eq!(bounds(select(&problem(longer, Mask::causal()), &H100, &table()).unwrap()), (-2000, UNBOUNDED, 0));
}

#[test]
fn the_smallest_head_dim_that_has_both_is_taken() {
    let taken = |head_dim_qk, head_dim_vo| {
        let choice = select(&problem(Dims { head_dim_qk, head_dim_vo, ..DIMS }, Mask::Full), &H100, &table()).unwrap();
        choice.kernel.head_dim_qk
    };
    assert_eq!((taken(8, 8), taken(64, 64), taken(72, 8), taken(8, 72), taken(128, 128)), (64, 64, 128, 128, 128));
}

#[test]
fn less_padding_wins_and_then_the_larger_tile() {
    // Kernels whose time is not known from a fit.
    let row = |index, tile_m| KernelInfo { dtype: DType::E4M3, ..row(index, MaskClass::Full, 256, tile_m) };
    let rows = [row(0, 64), row(1, 192), row(2, 128)];
    let taken = |seqlen_q| {
        let problem = ForwardProblem::builder(DType::E4M3, Dims { seqlen_q, ..DIMS }).build().unwrap();
        select(&problem, &H100, &rows).unwrap().kernel.tile_m
    };
    // 64 and 128 queries fill a tile of that size. 192 fill one tile of 192 or three of 64. 200 are padded to 256 with tiles of
    // 64 or 128.
    assert_eq!((taken(1), taken(64), taken(128), taken(192), taken(200), taken(384)), (64, 64, 128, 192, 128, 192));
}

#[test]
fn shares_of_a_tile_are_a_cluster_each() {
    let row = KernelInfo { most_shares: 8, ..row(0, MaskClass::Full, 128, 128) };
    let few = Dims { batch: 1, seqlen_q: 128, seqlen_kv: 16384, heads_q: 32, ..DIMS };
    let with = |dims, shares: Option<usize>| {
        select_row(&problem(dims, Mask::Full), &H100, &row, shares.map(Sharing::cluster), &[row]).unwrap()
    };
    let choice = with(few, None);
    assert_eq!((choice.tiles, choice.shares, choice.grid, choice.tile_counter), (32, 3, 96, false));
    assert!(
        choice.to_string().contains("grid 96 for 32 tiles") && choice.to_string().contains(", 3 shares"),
        "{choice}"
    );
    // As asked, within what the kernel allows; none where tiles are many.
    assert_eq!([1, 5, 99].map(|shares| with(few, Some(shares)).grid), [32, 160, 256]);
    assert_eq!(with(Dims { seqlen_q: 16384, ..few }, None).shares, 1);
    let never = KernelInfo { most_shares: 1, ..row };
    assert_eq!(
        select_row(&problem(few, Mask::Full), &H100, &never, Some(Sharing::cluster(4)), &[never]).unwrap().shares,
        1
    );
}

#[test]
fn shares_stay_within_a_margin() {
    let wide = KernelInfo { most_shares: 8, ..row(0, MaskClass::Full, 128, 128) };
    let narrow = KernelInfo { row: 1, most_shares: 4, tile_m: 64, ..wide };
    let few = Dims { batch: 1, seqlen_q: 128, seqlen_kv: 16384, heads_q: 32, ..DIMS };
    let of = |margin| problem(few, Mask::Full).to_builder().sm_margin(margin).build().unwrap();
    // 32 tiles of 128 queries, or 64 of 64. 128 CTAs share them where they may.
    let chosen = |margin| {
        let choice = select(&of(margin), &H100, &[wide, narrow]).unwrap();
        (choice.kernel.tile_m, choice.shares, choice.grid)
    };
    assert_eq!(chosen(0), (64, 2, 128));
    assert!([1, 36, 68, 100, 131].map(chosen).iter().zip([131, 96, 64, 32, 1]).all(|(choice, left)| choice.2 <= left));
    assert_eq!(
        refused(&of(100), &H100, &[narrow]),
        format!(
            "unsupported: sm_margin 100 with {narrow}, 64 CTAs that compute a share each; \
             nearest: up to 32 such CTAs, or another kernel"
        )
    );
}

#[test]
fn empty_problems_have_empty_grids() {
    for dims in [Dims { batch: 0, ..DIMS }, Dims { seqlen_q: 0, ..DIMS }] {
        let choice = select(&problem(dims, Mask::causal()), &H100, &table()).unwrap();
        assert_eq!((choice.tiles, choice.grid), (0, 0));
    }
}

#[test]
fn a_margin_leaves_multiprocessors_to_others() {
    let margin = |problem: &ForwardProblem, margin| problem.to_builder().sm_margin(margin).build().unwrap();
    let few = |multiprocessors| DeviceFacts { multiprocessors, ..H100 };
    let fp8 = ForwardProblem::builder(DType::E4M3, Dims { seqlen_q: 8000, seqlen_kv: 8000, ..DIMS });
    let in_f16 = fp8.clone().half_scores(true).build().unwrap();
    let cases = [
        (problem(DIMS, Mask::Full), table()),
        (problem(DIMS, Mask::causal()), table()),
        (problem(Dims { seqlen_q: 100, ..DIMS }, Mask::causal()), table()),
        (fp8.build().unwrap(), fp8_rows().into_iter().map(|row| KernelInfo { split_bytes: 1000, ..row }).collect()),
        (in_f16, fp8_rows()),
    ];
    for (problem, rows) in cases {
        // As on a GPU that has no more. H100s have 132 or 114 multiprocessors.
        for (all, left) in [(132, 0), (132, 1), (132, 16), (132, 131), (114, 16), (114, 113), (78, 8)] {
            let choice = select(&margin(&problem, left), &few(all), &rows).unwrap();
            assert_eq!(select(&problem, &few(all - left), &rows), Ok(choice));
            assert_eq!(choice.grid, choice.tiles.min((all - left) as i32), "{choice}");
            assert!(choice.fallback.is_none_or(|behind| behind.grid <= (all - left) as i32), "{choice}");
        }
        for (left, all) in [(132, 132), (133, 132), (usize::MAX, 114), (114, 114), (1, 1), (1, 0)] {
            let got = refused(&margin(&problem, left), &few(all), &rows);
            let (most, all) = (all.max(1) - 1, all.max(1));
            let text = format!("sm_margin: {left}; allowed: 0 to {most}, since the GPU has {all} multiprocessors");
            assert_eq!(got, text);
        }
        // A CPU has none to leave.
        assert_eq!(margin(&problem, 500).plan(&Device::cpu()).unwrap().workspace_bytes(), 0);
    }
}

#[test]
fn kernels_with_a_cta_for_each_tile_leave_no_multiprocessor() {
    let of = |margin| problem(DIMS, Mask::causal()).to_builder().sm_margin(margin).build().unwrap();
    let text = "unsupported: sm_margin 8 with sm80 kernels, which have a CTA for each tile; \
                nearest: sm_margin 0, or sm90 kernels";
    assert_eq!(refused(&of(8), &A100, &both()), text);
    let asked = of(8).to_builder().arch(Arch::Sm80).build().unwrap();
    assert_eq!(refused(&asked, &H100, &both()), text);
    assert!(select(&of(0), &A100, &both()).is_ok() && select(&of(8), &H100, &both()).is_ok());
}

#[test]
fn what_no_row_has_is_named_with_the_nearest() {
    let full = problem(DIMS, Mask::Full);
    assert_eq!(
        refused(&full, &H100, &[]),
        "unsupported: sm_90, 132 multiprocessors, 50 MiB L2, 227 KiB shared memory a block, \
         in a build without GPU kernels; nearest: the CPU, or a build with CUDA"
    );
    let blackwell = DeviceFacts { arch: ComputeCapability { major: 10, minor: 0 }, ..H100 };
    assert_eq!(refused(&full, &blackwell, &table()), "unsupported: a GPU of sm_100; nearest: sm_90");
    let single = ForwardProblem::builder(DType::F32, DIMS).build().unwrap();
    assert_eq!(refused(&single, &H100, &table()), "unsupported: f32 operands on a GPU; nearest: bf16, f16");
    assert_eq!(
        refused(&problem(DIMS, Mask::causal()), &H100, &[row(0, MaskClass::Full, 64, 128)]),
        "unsupported: mask class causal for bf16; nearest: full"
    );
    assert_eq!(
        refused(&problem(Dims { head_dim_qk: 192, ..DIMS }, Mask::Full), &H100, &table()),
        "unsupported: head_dim_qk 192 with head_dim_vo 128 for bf16, full, on sm90; \
         nearest: up to 64 with 64, up to 128 with 128"
    );
    assert_eq!(
        refused(&problem(Dims { head_dim_vo: 100, ..DIMS }, Mask::Full), &H100, &table()),
        "unsupported: head_dim_vo 100 on a GPU; nearest: 104 (multiples of 8: GPU rows are moved in 16-byte steps)"
    );
    assert!(refused(&problem(Dims { head_dim_qk: 3, ..DIMS }, Mask::Full), &H100, &table()).contains("nearest: 8 "));
    assert!(refused(&problem(Dims { head_dim_qk: 17, ..DIMS }, Mask::Full), &H100, &table()).contains("nearest: 16 "));
    let small = DeviceFacts { smem_bytes_per_block: 100 << 10, ..H100 };
    assert_eq!(
        refused(&full, &small, &table()),
        "unsupported: 204800 bytes of shared memory a block, which the smallest kernel for this asks for; \
         nearest: 102400 bytes on this GPU"
    );
}

/// Head dims that the CPU computes and no row has: each is named, with what there is, also where only one of the two is too large.
#[test]
fn head_dims_beyond_those_of_all_rows_are_refused_by_name() {
    for (qk, vo) in [(136, 136), (192, 128), (128, 192), (256, 256), (512, 512), (8, 520), (132, 12)] {
        for (mask, class) in
            [(Mask::Full, "full"), (Mask::causal(), "causal"), (Mask::window(Some(9), Some(9)), "window")]
        {
            let problem = problem(Dims { head_dim_qk: qk, head_dim_vo: vo, ..DIMS }, mask);
            let allowed = format!("for bf16, {class}, on sm90; nearest: up to 64 with 64, up to 128 with 128");
            let text = format!("unsupported: head_dim_qk {qk} with head_dim_vo {vo} {allowed}");
            assert_eq!(refused(&problem, &H100, &table()), text);
            assert!(problem.plan(&crate::Device::cpu()).is_ok());
        }
    }
    let odd = Dims { head_dim_qk: 12, head_dim_vo: 12, ..DIMS };
    assert_eq!(
        refused(&problem(odd, Mask::Full), &H100, &table()),
        "unsupported: head_dim_qk 12 on a GPU; nearest: 16 (multiples of 8: GPU rows are moved in 16-byte steps)"
    );
    let fp8 = |qk, vo| {
        let dims = Dims { head_dim_qk: qk, head_dim_vo: vo, ..DIMS };
        ForwardProblem::builder(DType::E4M3, dims).half_scores(true).build().unwrap()
    };
    for (qk, vo) in [(192, 128), (256, 256), (8, 512)] {
        let text = refused(&fp8(qk, vo), &H100, &fp8_rows());
        let what = format!("unsupported: head_dim_qk {qk} with head_dim_vo {vo} for e4m3, full, on sm90");
        assert!(text.starts_with(&what) && text.contains("up to 128 with 128"), "{text}");
    }
}

#[path = "select_dims_tests.rs"]
mod dims;
#[path = "select_gather_tests.rs"]
mod gather;
use dims::wide;

const A100: DeviceFacts = gpu(8, 0, 108, 163);
const A10: DeviceFacts = gpu(8, 6, 72, 99);
const L40S: DeviceFacts = gpu(8, 9, 142, 99);
const T4: DeviceFacts = gpu(7, 5, 40, 64);

const fn gpu(major: u32, minor: u32, multiprocessors: usize, smem_kib: usize) -> DeviceFacts {
    let arch = ComputeCapability { major, minor };
    DeviceFacts { arch, multiprocessors, l2_bytes: 40 << 20, smem_bytes_per_block: smem_kib << 10 }
}

/// The rows of [`table`], then rows for sm80 with the real sizes.
fn both() -> Vec<KernelInfo> {
    let mut rows = table();
    for mask in [MaskClass::Full, MaskClass::Causal] {
        for (head_dim, stages, kib) in [(64, 2, 48), (128, 2, 96), (128, 1, 64)] {
            let sm80 = row(rows.len() as u32, mask, head_dim, 128);
            rows.push(KernelInfo { arch: Arch::Sm80, tile_n: 64, stages, threads: 128, smem_bytes: kib << 10, ..sm80 });
        }
        for (head_dim, kib) in [(64, 40), (128, 80)] {
            let small = row(rows.len() as u32, mask, head_dim, 64);
            rows.push(KernelInfo { arch: Arch::Sm80, tile_n: 64, threads: 128, smem_bytes: kib << 10, ..small });
        }
    }
    rows
}

#[test]
fn each_gpu_has_its_instruction_set_and_its_stages() {
    let of = |gpu, head_dim| {
        let dims = Dims { head_dim_qk: head_dim, head_dim_vo: head_dim, ..DIMS };
        let kernel = select(&problem(dims, Mask::causal()), gpu, &both()).unwrap().kernel;
        (kernel.arch, kernel.stages)
    };
    assert_eq!([64, 128].map(|head_dim| of(&H100, head_dim)), [(Arch::Sm90, 2); 2]);
    // Two CTAs with one stage share a multiprocessor of an A100. A GPU with shared memory for one CTA only gets two stages.
    assert_eq!([64, 128].map(|head_dim| of(&A100, head_dim)), [(Arch::Sm80, 2), (Arch::Sm80, 1)]);
    for gpu in [&A10, &L40S] {
        assert_eq!([64, 128].map(|head_dim| of(gpu, head_dim)), [(Arch::Sm80, 2); 2]);
    }
    let blackwell = DeviceFacts { arch: ComputeCapability { major: 10, minor: 0 }, ..H100 };
    assert_eq!([64, 128].map(|head_dim| of(&blackwell, head_dim)), [(Arch::Sm80, 2); 2]);
    let refusal = "unsupported: a GPU of sm_75; nearest: sm_90, sm_80 and later";
    assert_eq!(refused(&problem(DIMS, Mask::Full), &T4, &both()), refusal);
}

/// sm80: smaller tiles where there are few, or where a tile of 128 queries would be half empty.
#[test]
fn few_tiles_of_sm80_are_small() {
    let tile = |batch, heads, seqlen, head_dim| {
        let dims = Dims::new(batch, seqlen, heads, head_dim).with_seqlen_kv(2048);
        select(&problem(dims, Mask::Full), &A100, &both()).unwrap().kernel.tile_m
    };
    for head_dim in [64, 128] {
        assert_eq!(tile(1, 4, 2048, head_dim), 64); // 64 tiles of 128 queries
        assert_eq!(tile(1, 6, 2048, head_dim), 64); // 96
        assert_eq!(tile(4, 32, 2048, head_dim), 128);
        assert_eq!(tile(64, 16, 64, head_dim), 64);
        assert_eq!(tile(64, 16, 77, head_dim), 128);
    }
}

#[test]
fn a_problem_may_ask_for_an_instruction_set() {
    let asked = |arch| problem(DIMS, Mask::causal()).to_builder().arch(arch).build().unwrap();
    assert_eq!(
        select(&asked(Arch::Sm80), &H100, &both()).unwrap().to_string(),
        "sm80 fwd bf16 causal head_dim 128/128 tile 128x64 stages 2, \
         grid 256 for 256 tiles (8 a head, 24 queries of padding), heads a group 16, groups 1, fixed order, \
         keys to +2000+0"
    );
    assert_eq!(select(&asked(Arch::Sm90), &H100, &both()), select(&problem(DIMS, Mask::causal()), &H100, &both()));
    assert_eq!(candidates(&asked(Arch::Sm80), &H100, &both()).unwrap().len(), 3);
    let refusal = "unsupported: sm80 kernels on a GPU of sm_90; nearest: sm90";
    assert_eq!(refused(&asked(Arch::Sm80), &H100, &table()), refusal);
    let refusal = "unsupported: sm90 kernels on a GPU of sm_80; nearest: sm80";
    assert_eq!(refused(&asked(Arch::Sm90), &A100, &both()), refusal);
    // A table with one row of sm80 is enough: the choice is then that row, though it is not the best.
    let row = both().into_iter().find(|row| row.arch == Arch::Sm80 && row.mask == MaskClass::Causal).unwrap();
    let narrow = problem(Dims { head_dim_qk: 64, head_dim_vo: 64, ..DIMS }, Mask::causal());
    assert_eq!(select(&narrow, &H100, &[row]).unwrap().kernel, row);
}

#[test]
fn the_cpu_has_no_instruction_set() {
    let error =
        problem(DIMS, Mask::Full).to_builder().arch(Arch::Sm80).build().unwrap().plan(&Device::cpu()).unwrap_err();
    assert_eq!(error.to_string(), "unsupported: sm80 kernels on the CPU; nearest: a GPU of sm_80 and later");
}

#[test]
fn more_tiles_than_a_kernel_counts_are_refused() {
    let dims = Dims { batch: 1 << 20, seqlen_q: 1 << 28, heads_q: 4, ..DIMS };
    assert!(refused(&problem(dims, Mask::Full), &H100, &table()).contains("below 2^31 - 2^20 tiles"));
    // A tile for each head. The CTAs of a grid count on past the last.
    let of = |heads| problem(Dims::new(1, 1, heads, 64), Mask::Full);
    let most = (1 << 31) - (1 << 20) - 2;
    assert_eq!(select(&of(most), &H100, &table()).unwrap().tiles as usize, most);
    assert!(refused(&of(most + 1), &H100, &table()).contains("below 2^31 - 2^20 tiles"));
}

/// Lists of blocks have rows of their own, whatever the mask beside them is, and a place in the workspace.
#[test]
fn lists_of_blocks_take_rows_of_their_class() {
    let mask = crate::problem::BlockMask::new(2).per_head(true).full_blocks(true);
    for beside in [Mask::Full, Mask::causal(), Mask::window(Some(5), None), Mask::chunked(70), Mask::prefix(9)] {
        let listed = problem(DIMS, beside).to_builder().block_mask(Some(mask)).build().unwrap();
        assert_eq!(mask_class(&listed), MaskClass::Blocks);
        let text = "unsupported: mask class blocks for bf16; nearest: full, causal, window";
        assert_eq!(refused(&listed, &H100, &table()), text);
        let mut rows = table();
        rows.push(row(rows.len() as u32, MaskClass::Blocks, 128, 128));
        let choice = select(&listed, &H100, &rows).unwrap();
        assert_eq!((choice.kernel.mask, choice.shares, choice.tile_counter), (MaskClass::Blocks, 1, true));
        let lists = choice.parts().lists.unwrap();
        // 8 blocks of queries of 16 heads, each with 24 blocks of keys.
        assert_eq!((lists.counts, lists.entries, lists.end), (16, 16 + 8 * 128, 16 + 8 * 128 + 4 * 128 * 24));
        assert_eq!(choice.workspace_bytes(), lists.end);
        assert!(choice.to_string().ends_with("drawn order, blocks of lists"), "{choice}");
        assert_eq!(select(&problem(DIMS, beside), &H100, &rows).unwrap().lists, None);
    }
}

fn masks() -> impl Strategy<Value = Mask> {
    let corner = || prop_oneof![Just(Corner::BottomRight), Just(Corner::TopLeft)];
    let bound = || proptest::option::of(prop_oneof![0usize..40, Just(usize::MAX)]);
    prop_oneof![
        Just(Mask::Full),
        corner().prop_map(|corner| Mask::Causal { corner }),
        (bound(), bound(), corner()).prop_map(|(left, right, corner)| Mask::Window { left, right, corner }),
        (1usize..40, corner()).prop_map(|(chunk, corner)| Mask::Chunked { chunk, corner }),
        (0usize..40, corner()).prop_map(|(keys, corner)| Mask::Prefix { keys, corner }),
    ]
}

proptest! {
    #[test]
    fn what_the_kernel_is_told_keeps_what_the_mask_keeps(mask in masks(), seqlen_q in 1usize..30, seqlen_kv in 0usize..30) {
        let problem = problem(Dims { seqlen_q, seqlen_kv, ..DIMS }, mask);
        let choice = select(&problem, &H100, &table()).unwrap();
        for q in 0..seqlen_q {
            for kv in 0..seqlen_kv {
                // As params.rs of the sys crate defines the bounds, in the 32-bit arithmetic of the kernels.
                let (q32, kv32) = (q as i32, kv as i32);
                let bounds = choice.bounds;
                let own = q32 + bounds.diagonal_offset;
                let from = (own - bounds.window_left).max(0);
                let from = (from + bounds.step - 1) / bounds.step * bounds.step;
                let to = (own + bounds.window_right).max(bounds.prefix - 1);
                let kept = match choice.kernel.mask {
                    MaskClass::Full => true,
                    MaskClass::Causal => kv32 <= to,
                    MaskClass::Window => from <= kv32 && kv32 <= to,
                    MaskClass::Blocks => unreachable!("no problem here has lists"),
                };
                prop_assert_eq!(kept, mask.keep(q, kv, seqlen_q, seqlen_kv), "{} q {} kv {}", choice, q, kv);
            }
        }
    }

    #[test]
    fn schedules_cover_every_query_and_stay_in_range(
        batch in 0usize..70, seqlen_q in 0usize..20000, seqlen_kv in 0usize..20000, heads_kv in 1usize..9,
        group in 1usize..9, qk in 1usize..33, vo in 1usize..33, multiprocessors in 1usize..200, mask in masks(),
        margin in 0usize..200,
    ) {
        let dims = Dims { batch, seqlen_q, seqlen_kv, heads_q: heads_kv * group, heads_kv,
                          head_dim_qk: qk * 8, head_dim_vo: vo * 8 };
        let gpu = DeviceFacts { multiprocessors: multiprocessors + margin, ..H100 };
        let problem = problem(dims, mask).to_builder().sm_margin(margin).build().unwrap();
        let choice = select(&problem, &gpu, &wide()).unwrap();
        prop_assert_eq!(choice, select(&problem, &gpu, &wide()).unwrap());
        let kernel = choice.kernel;
        prop_assert!(kernel.head_dim_qk >= dims.head_dim_qk && kernel.head_dim_vo >= dims.head_dim_vo);
        prop_assert_eq!(kernel.mask, mask_class(&problem));
        let covered = choice.m_tiles as usize * kernel.tile_m;
        prop_assert_eq!(covered - choice.padding as usize, seqlen_q);
        prop_assert!((choice.padding as usize) < kernel.tile_m);
        prop_assert_eq!(choice.tiles as usize, choice.m_tiles as usize * batch * dims.heads_q);
        prop_assert!(choice.grid as usize <= multiprocessors && (choice.grid > 0) == (choice.tiles > 0));
        let heads = (batch * dims.heads_q) as i32;
        prop_assert!((1..=heads.max(1)).contains(&choice.heads_per_group));
        // Every group has at least `heads_per_group` heads, if there are any heads.
        prop_assert!(choice.groups >= 1 && (choice.heads_per_group * choice.groups <= heads || heads == 0));
    }
}

/// Kernels with scores in f16 do not pack: a packed problem that allows them takes one with scores in f32.
#[test]
fn packed_e4m3_problems_take_the_row_that_packs() {
    let e4m3 = |index, tile_m, scores, packs| KernelInfo {
        dtype: DType::E4M3,
        scores,
        packs,
        split_bytes: 1000,
        ..row(index, MaskClass::Full, 128, tile_m)
    };
    let rows = [e4m3(0, 192, DType::F16, false), e4m3(1, 128, DType::F32, true)];
    let options = ForwardProblem::builder(DType::E4M3, Dims { seqlen_q: 40_000, seqlen_kv: 40_000, ..DIMS })
        .half_scores(true)
        .mask(Mask::Full);
    let dense = select(&options.clone().build().unwrap(), &H100, &rows).unwrap();
    assert_eq!((dense.kernel.row, dense.fallback.map(|fallback| fallback.kernel.row)), (0, Some(1)));
    let problem = options.packed(true).build().unwrap();
    let packed = select(&problem, &H100, &rows).unwrap();
    assert_eq!((packed.kernel.row, packed.fallback, packed.split_tiles, packed.packed), (1, None, 0, Some(2)));
    assert_eq!(packed.parts().table, Some(0));
    let refused = refused(&problem, &H100, &rows[..1]);
    assert!(refused.contains("packed sequences"), "{refused}");
}

/// The sm80 kernels with dropout are of class window, whatever the mask.
#[test]
fn dropout_of_sm80_takes_rows_of_class_window() {
    let rows: Vec<_> = table()
        .into_iter()
        .map(|row| KernelInfo { arch: Arch::Sm80, drops: [row.mask == MaskClass::Window, false], ..row })
        .collect();
    for mask in [Mask::Full, Mask::causal(), Mask::window(Some(5), None)] {
        let dropped = problem(DIMS, mask).to_builder().dropout(Some(crate::problem::Dropout::new(0.5).unwrap()));
        let chosen = select(&dropped.build().unwrap(), &H100, &rows).unwrap();
        assert_eq!((chosen.kernel.mask, chosen.kernel.arch), (MaskClass::Window, Arch::Sm80));
    }
}
