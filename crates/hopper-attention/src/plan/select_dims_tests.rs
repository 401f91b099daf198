//! Head dim 96, and those above 128.

use super::*;

/// [`table`] with rows for head dim 96 and for larger ones, as `fwd.def` has them.
pub(super) fn wide() -> Vec<KernelInfo> {
    let mut rows: Vec<_> = table().into_iter().map(|row| KernelInfo { packs: true, ..row }).collect();
    for dtype in [DType::BF16, DType::F16] {
        for mask in [MaskClass::Full, MaskClass::Causal, MaskClass::Window] {
            let index = rows.len() as u32;
            let narrow = KernelInfo { dtype, stages: 3, most_shares: 8, packs: true, ..row(index, mask, 96, 128) };
            rows.push(narrow);
            if mask != MaskClass::Window {
                let three = row(index + 1, mask, 96, 192);
                rows.push(KernelInfo { dtype, tile_n: 96, stages: 3, ..three });
            }
            let largest = if mask == MaskClass::Window { 64 } else { 80 };
            for (qk, vo, tile_n) in [(192, 128, 128), (160, 160, 128), (192, 192, 96), (256, 256, largest)] {
                if qk == 160 && mask == MaskClass::Window {
                    continue;
                }
                let row = row(rows.len() as u32, mask, qk, 128);
                rows.push(KernelInfo { dtype, head_dim_vo: vo, tile_n, packs: true, ..row });
            }
        }
    }
    rows
}

/// The kernel of a pair of head dims is the smallest that has both.
#[test]
fn a_pair_of_head_dims_runs_in_the_smallest_row_that_has_both() {
    let of = |qk: usize, vo: usize, mask| {
        let kernel =
            select(&problem(Dims { head_dim_qk: qk, head_dim_vo: vo, ..DIMS }, mask), &H100, &wide()).unwrap().kernel;
        (kernel.head_dim_qk, kernel.head_dim_vo)
    };
    for mask in [Mask::Full, Mask::causal(), Mask::window(Some(100), Some(9))] {
        for dim in (8..=256).step_by(8) {
            let has = |&row: &usize| row >= dim && (row != 160 || !matches!(mask, Mask::Window { .. }));
            let row = [64, 96, 128, 160, 192, 256].into_iter().find(has).unwrap();
            assert_eq!(of(dim, dim, mask), (row, row), "{dim}, {mask}");
        }
        for (qk, vo, row) in [
            (192, 128, (192, 128)),
            (136, 8, (192, 128)),
            (192, 136, (192, 192)),
            (64, 192, (192, 192)),
            (192, 160, (192, 192)),
            (8, 256, (256, 256)),
            (200, 128, (256, 256)),
            (64, 128, (128, 128)),
            (96, 64, (96, 96)),
            (64, 96, (96, 96)),
            (72, 8, (96, 96)),
            (8, 72, (96, 96)),
            (96, 104, (128, 128)),
            (104, 96, (128, 128)),
        ] {
            assert_eq!(of(qk, vo, mask), row, "{qk}/{vo}, {mask}");
        }
    }
    for (mask, row) in [(Mask::Full, (160, 160)), (Mask::window(Some(9), None), (192, 192))] {
        assert_eq!((of(128, 136, mask), of(144, 160, mask)), (row, row), "{mask}");
    }
    for (qk, vo) in [(264, 8), (8, 264), (512, 512)] {
        let text = refused(&problem(Dims { head_dim_qk: qk, head_dim_vo: vo, ..DIMS }, Mask::Full), &H100, &wide());
        let nearest = "nearest: up to 64 with 64, up to 128 with 128, up to 96 with 96, up to 192 with 128, \
                       up to 160 with 160, up to 192 with 192, up to 256 with 256";
        assert!(text.contains(&format!("head_dim_qk {qk} with head_dim_vo {vo}")) && text.ends_with(nearest), "{text}");
    }
}

/// At head dim 96 three warpgroups take long sequences, and two take short ones, packed ones and windows.
#[test]
fn head_dim_96_has_two_tiles() {
    let tiles = |seqlen: usize, mask| {
        let dims = Dims { head_dim_qk: 96, head_dim_vo: 96, heads_kv: 16, seqlen_q: seqlen, seqlen_kv: seqlen, ..DIMS };
        let problem = problem(dims, mask);
        let of = |problem: &ForwardProblem| {
            let choice = select(problem, &H100, &wide()).unwrap();
            (choice.kernel.tile_m, choice.kernel.tile_n, choice.tile_counter)
        };
        (of(&problem), of(&problem.to_builder().packed(true).build().unwrap()).0)
    };
    assert_eq!(tiles(16384, Mask::Full), ((192, 96, false), 128));
    assert_eq!(tiles(16384, Mask::causal()), ((192, 96, true), 128));
    assert_eq!(tiles(16384, Mask::window(Some(99), None)), ((128, 128, true), 128));
    assert_eq!(tiles(512, Mask::causal()), ((128, 128, false), 128));
}

#[test]
fn packed_problems_of_large_head_dims_take_the_row_of_dense_ones() {
    let dims = Dims { head_dim_qk: 256, head_dim_vo: 256, seqlen_q: 8192, seqlen_kv: 8192, ..DIMS };
    for (mask, tile) in [(Mask::Full, 80), (Mask::causal(), 80), (Mask::window(Some(99), None), 64)] {
        let tile_n = |problem: &ForwardProblem| select(problem, &H100, &wide()).unwrap().kernel.tile_n;
        let problem = problem(dims, mask);
        assert_eq!(tile_n(&problem), tile, "{mask}");
        assert_eq!(tile_n(&problem.to_builder().packed(true).build().unwrap()), tile, "{mask}");
    }
}

/// The rows of [`both`], and those of head dim 96 and above 128 of both instruction sets. Those of sm80 have the real sizes.
fn wide_of_both() -> Vec<KernelInfo> {
    let mut rows = wide();
    rows.extend(both().into_iter().filter(|row| row.arch == Arch::Sm80));
    for mask in [MaskClass::Full, MaskClass::Causal] {
        for (qk, vo, tile_m, tile_n, stages, threads, kib) in [
            (96, 96, 128, 64, 2, 128, 96),
            (192, 128, 128, 64, 1, 128, 88),
            (192, 192, 64, 64, 1, 128, 72),
            (192, 192, 128, 64, 2, 256, 96),
            (256, 256, 64, 64, 1, 128, 96),
            (256, 256, 128, 32, 2, 256, 96),
        ] {
            let row = row(rows.len() as u32, mask, qk, tile_m);
            let smem_bytes = (kib << 10) + 256;
            let sm80 = KernelInfo { arch: Arch::Sm80, head_dim_vo: vo, tile_n, stages, threads, smem_bytes, ..row };
            rows.push(KernelInfo { packs: true, ..sm80 });
        }
    }
    rows
}

/// Every GPU of compute capability 8.0 and later runs every head dim. Tiles of 64 queries are for GPUs with shared memory for two
/// CTAs: with eight warps to a CTA, a tile of 128 queries is the better one where a multiprocessor has one CTA.
#[test]
fn larger_head_dims_run_on_every_gpu() {
    let rows = wide_of_both();
    // The tile and the CTAs of a multiprocessor, on 9.0, on 8.0 and on 8.6 or 8.9.
    for (qk, vo, row, [on_h100, on_a100, on_others]) in [
        (96, 96, (96, 96), [(128, 2), (128, 2), (128, 1)]),
        (80, 8, (96, 96), [(128, 2), (128, 2), (128, 1)]),
        (192, 128, (192, 128), [(128, 2), (128, 1), (128, 1)]),
        (136, 8, (192, 128), [(128, 2), (128, 1), (128, 1)]),
        (192, 136, (192, 192), [(64, 2), (64, 2), (128, 1)]),
        (64, 192, (192, 192), [(64, 2), (64, 2), (128, 1)]),
        (200, 72, (256, 256), [(64, 2), (128, 1), (128, 1)]),
        (256, 256, (256, 256), [(64, 2), (128, 1), (128, 1)]),
        (128, 128, (128, 128), [(128, 2), (128, 2), (128, 1)]),
    ] {
        let dims = Dims { head_dim_qk: qk, head_dim_vo: vo, ..DIMS };
        for mask in [Mask::Full, Mask::causal()] {
            let given = problem(dims, mask);
            assert_eq!(select(&given, &H100, &rows).unwrap().kernel.arch, Arch::Sm90);
            let asked = given.to_builder().arch(Arch::Sm80).build().unwrap();
            for (problem, gpu, (tile, ctas)) in [
                (&asked, &H100, on_h100),
                (&given, &A100, on_a100),
                (&given, &A10, on_others),
                (&given, &L40S, on_others),
            ] {
                let choice = select(problem, gpu, &rows).unwrap();
                let kernel = choice.kernel;
                // Of head dim 96 one CTA fits on 8.0, and two of a row of head dim 128.
                let row = if row.0 == 96 && gpu.arch == A100.arch { (128, 128) } else { row };
                assert_eq!((kernel.arch, kernel.head_dim_qk, kernel.head_dim_vo), (Arch::Sm80, row.0, row.1));
                let tiles = 32 * 1024 / tile as i32; // of 32 heads with 1000 queries
                assert_eq!((kernel.tile_m, choice.grid, choice.tiles), (tile, tiles, tiles), "{choice}");
                assert_eq!(resident(&kernel, gpu), ctas, "{kernel} on {:?}", gpu.arch);
            }
            if row.0 > 128 {
                let packed = asked.to_builder().packed(true).build().unwrap();
                assert_eq!(select(&packed, &H100, &rows).unwrap().kernel, select(&asked, &H100, &rows).unwrap().kernel);
            }
        }
    }
}

/// sm80: few tiles of head dim 96 run as tiles of 64 queries, which head dim 128 has.
#[test]
fn few_tiles_of_head_dim_96_are_small() {
    let row = |heads| {
        let dims = Dims::new(1, 2048, heads, 96);
        let asked = problem(dims, Mask::causal()).to_builder().arch(Arch::Sm80).build().unwrap();
        let kernel = select(&asked, &H100, &wide_of_both()).unwrap().kernel;
        (kernel.head_dim_qk, kernel.tile_m)
    };
    assert_eq!(row(4), (128, 64));
    assert_eq!(row(32), (96, 128));
}

/// What sm80 kernels do not have is refused by the name of the instruction set, also where sm90 kernels have it.
#[test]
fn larger_head_dims_are_refused_with_the_instruction_set() {
    let refusal = |head_dim: usize, nearest: &str| {
        format!(
            "unsupported: head_dim_qk {head_dim} with head_dim_vo {head_dim} for bf16, causal, on sm80; nearest: {nearest}"
        )
    };
    let of = |head_dim| problem(Dims { head_dim_qk: head_dim, head_dim_vo: head_dim, ..DIMS }, Mask::causal());
    // A build without the features of larger head dims, on sm80 alone.
    let mut narrow = wide();
    narrow.extend(both().into_iter().filter(|row| row.arch == Arch::Sm80));
    assert_eq!(select(&of(256), &H100, &narrow).unwrap().kernel.arch, Arch::Sm90);
    let up_to_128 = "up to 64 with 64, up to 128 with 128";
    let up_to_256 =
        &format!("{up_to_128}, up to 96 with 96, up to 192 with 128, up to 192 with 192, up to 256 with 256");
    for (rows, head_dim, nearest) in [(&narrow, 256, up_to_128), (&wide_of_both(), 264, up_to_256)] {
        let asked = of(head_dim).to_builder().arch(Arch::Sm80).build().unwrap();
        for (problem, gpu) in [(&asked, &H100), (&of(head_dim), &A100), (&of(head_dim), &L40S)] {
            assert_eq!(refused(problem, gpu, rows), refusal(head_dim, nearest));
        }
    }
}

/// The groups of heads follow from the bytes of K and V: a key and its value take 1 KiB at head dim 256, 640 bytes at 192/128.
#[test]
fn groups_of_heads_are_smaller_at_larger_head_dims() {
    let groups = |qk, vo, seqlen| {
        let dims = Dims {
            batch: 8,
            seqlen_q: seqlen,
            seqlen_kv: seqlen,
            heads_kv: 16,
            head_dim_qk: qk,
            head_dim_vo: vo,
            ..DIMS
        };
        let choice = select(&problem(dims, Mask::causal()), &H100, &wide()).unwrap();
        (choice.heads_per_group, choice.groups)
    };
    // 128 heads. The last group has as many as fit 32 MiB: 64, 32 and 16 at head dim 256; 51 of 1k keys at 192/128.
    assert_eq!([512, 1024, 2048].map(|seqlen| groups(256, 256, seqlen)), [(16, 5), (16, 7), (16, 8)]);
    assert_eq!(groups(192, 128, 1024), (16, 5));
}

/// Rows of e4m3 for head dims up to 64 and 128, and larger ones as `fp8.def` has them.
fn wide_fp8() -> Vec<KernelInfo> {
    let (f32, f16) = (DType::F32, DType::F16);
    let mut rows = Vec::new();
    for mask in [MaskClass::Full, MaskClass::Causal, MaskClass::Window] {
        for (qk, vo, tile_m, tile_n, scores) in [
            (64, 64, 128, 128, f32),
            (128, 128, 128, 128, f32),
            (192, 128, 128, 128, f32),
            (256, 256, 128, 64, f32),
            (192, 128, 192, 128, f16),
            (192, 128, 128, 128, f16),
            (256, 256, 128, 128, f16),
        ] {
            if mask == MaskClass::Window && tile_m == 192 {
                continue;
            }
            let packs = scores == f32;
            let row = row(rows.len() as u32, mask, qk, tile_m);
            rows.push(KernelInfo { dtype: DType::E4M3, head_dim_vo: vo, tile_n, scores, packs, ..row });
        }
    }
    rows
}

#[test]
fn e4m3_takes_head_dims_of_192_with_128_and_of_256() {
    let of = |qk: usize, vo: usize, seqlen: usize, mask, half: bool| {
        let dims = Dims { head_dim_qk: qk, head_dim_vo: vo, seqlen_q: seqlen, seqlen_kv: seqlen, ..DIMS };
        ForwardProblem::builder(DType::E4M3, dims).mask(mask).half_scores(half).build().unwrap()
    };
    let masks = [Mask::Full, Mask::causal(), Mask::window(Some(100), Some(9))];
    for mask in masks {
        for (qk, vo, row) in [
            (192, 128, (192, 128)),
            (144, 16, (192, 128)),
            (192, 144, (256, 256)),
            (128, 144, (256, 256)),
            (208, 64, (256, 256)),
            (16, 256, (256, 256)),
            (256, 256, (256, 256)),
            (64, 128, (128, 128)),
        ] {
            let choice = select(&of(qk, vo, 4096, mask, false), &H100, &wide_fp8()).unwrap();
            assert_eq!((choice.kernel.head_dim_qk, choice.kernel.head_dim_vo), row, "{qk}/{vo}, {mask}");
            assert_eq!(choice.fallback, None);
        }
        // Scores in f16 have the fallback of the same head dims, also where that one has other blocks of keys.
        for (qk, vo, tile_n) in [(192, 128, 128), (176, 112, 128), (256, 256, 64), (240, 240, 64)] {
            let choice = select(&of(qk, vo, 8192, mask, true), &H100, &wide_fp8()).unwrap();
            let behind = choice.fallback.unwrap().kernel;
            assert_eq!((choice.kernel.scores, behind.scores), (DType::F16, DType::F32), "{choice}");
            assert_eq!((choice.kernel.tile_n, behind.tile_n), (128, tile_n), "{choice}");
            assert_eq!(
                (behind.head_dim_qk, behind.head_dim_vo),
                (choice.kernel.head_dim_qk, choice.kernel.head_dim_vo)
            );
            // A packed problem takes the row that packs.
            let packed = of(qk, vo, 8192, mask, true).to_builder().packed(true).build().unwrap();
            assert_eq!(select(&packed, &H100, &wide_fp8()).unwrap().kernel, behind);
        }
    }
    // Three warpgroups take long sequences of head dims 192 and 128, two take short ones and windows.
    let tile_m = |seqlen, mask| select(&of(192, 128, seqlen, mask, true), &H100, &wide_fp8()).unwrap().kernel.tile_m;
    assert_eq!(masks.map(|mask| tile_m(16384, mask)), [192, 192, 128]);
    assert_eq!(masks.map(|mask| tile_m(512, mask)), [128, 128, 128]);
    for (qk, vo) in [(272, 16), (16, 272), (512, 512)] {
        let text = refused(&of(qk, vo, 512, Mask::Full, true), &H100, &wide_fp8());
        let nearest = "for e4m3, full, on sm90; nearest: up to 64 with 64, up to 128 with 128, up to 192 with 128, \
                       up to 256 with 256";
        assert!(text.contains(&format!("head_dim_qk {qk} with head_dim_vo {vo}")) && text.ends_with(nearest), "{text}");
    }
}

/// A wider class computes a mask where no kernel of the same head dims has a narrower one.
#[test]
fn the_narrowest_class_computes_a_mask() {
    let problem = |dim: usize, mask| problem(Dims { head_dim_qk: dim, head_dim_vo: dim, ..DIMS }, mask);
    let classes = [MaskClass::Full, MaskClass::Causal, MaskClass::Window];
    for (class, mask) in classes.into_iter().zip([Mask::Full, Mask::causal(), Mask::window(Some(9), Some(0))]) {
        for dim in [96, 128] {
            // Without the rows of some classes of this head dim.
            for there in 0..8_u32 {
                let there = |row: &KernelInfo| there >> row.mask as u32 & 1 != 0 || row.head_dim_qk != dim;
                let rows: Vec<_> = wide().into_iter().filter(there).collect();
                let least = classes.into_iter().find(|x| {
                    *x as u32 >= class as u32 && rows.iter().any(|row| row.mask == *x && row.head_dim_qk == dim)
                });
                let taken = candidates(&problem(dim, mask), &H100, &rows).unwrap();
                for row in taken.iter().filter(|row| row.head_dim_qk == dim) {
                    assert_eq!(Some(row.mask), least, "{mask}, {dim}");
                }
                let head_dim = taken[0].head_dim_qk;
                assert_eq!(head_dim == dim, least.is_some(), "{mask}, {dim}: {head_dim}");
            }
        }
    }
}
