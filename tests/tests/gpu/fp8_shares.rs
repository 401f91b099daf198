//! The rows of e4m3 operands in which the CTAs of a cluster share a tile's keys.

use hopper_attention::internal::{choice, plan_with_shares};
use hopper_attention::{DType, Device, E4M3, Element, KernelInfo, Mask, MaskClass, Scaling, Workspace, bf16};
use hopper_attention_tests::fp8::{Operands, for_row};
use hopper_attention_tests::gpu::Gpu;
use hopper_attention_tests::gpu::fp8::{OnDevice, Written};
use hopper_attention_tests::problems::{Case, Grid};

fn rows(gpu: &Gpu) -> Vec<KernelInfo> {
    let rows: Vec<_> = gpu.fp8_rows().into_iter().filter(|row| row.most_shares() > 1).collect();
    assert_eq!(rows.len(), 4, "rows that share: head dims 64 and 128, without a mask and causal");
    rows
}

fn mask_of(row: &KernelInfo) -> Mask {
    if row.mask() == MaskClass::Full { Mask::Full } else { Mask::causal() }
}

/// Every number of shares: against the oracle, the same bits on every run, and the largest magnitude that O has.
#[test]
fn shares_of_e4m3_tiles_match_the_oracle() {
    let Some(gpu) = Gpu::open("shares_of_e4m3_tiles_match_the_oracle") else { return };
    let runs = Grid::from_env().pick(3, 60);
    for row in rows(&gpu) {
        let (mask, head_dim) = (mask_of(&row), row.head_dim_qk());
        // Queries, keys, heads of Q, of K, and what is missing to the row's head dims.
        for (i, (queries, keys, heads_q, heads_kv, less)) in [
            (512, 512, 4, 4, 0),
            (128, 2048, 8, 1, 0),
            (300, 1111, 6, 2, 16),
            // One block, and fewer blocks than shares: shares without any.
            (70, 90, 4, 4, 0),
            (200, 300, 4, 2, 0),
            // Under a causal mask the first queries see no key, some of them in a tile with others.
            (700, 260, 2, 1, 0),
            (1, 1000, 3, 1, 0),
        ]
        .into_iter()
        .enumerate()
        {
            let case = Case::new(queries, keys, head_dim - less, mask).head_dim_vo(head_dim - less);
            let case = case.heads(1 + i % 2, heads_q, heads_kv);
            let options = case.options(DType::E4M3).lse(true).amax(true).scaling(Scaling::ALL[i % 3]);
            let problem = for_row(options.build().unwrap(), &row);
            let operands = Operands::of_case(&case, &problem, None);
            let (expected, on_device) = (operands.expected(), OnDevice::new(&gpu.stream, &operands));
            for shares in 1..=row.most_shares() {
                // (With one query every key is kept, which is no row's of causal masks.)
                let Ok(plan) = plan_with_shares(&problem, &gpu.device, &row, shares) else {
                    assert_eq!((queries, row.mask()), (1, MaskClass::Causal), "{row}");
                    continue;
                };
                assert_eq!(choice(&plan).unwrap().shares as usize, shares, "{plan}");
                let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
                let mut run = || on_device.run::<bf16>(&gpu.stream, &mut workspace, &plan, None).unwrap();
                let first = run();
                let (o, lse) = first.output(&problem);
                let report = expected.check(&o, Some(&lse)).unwrap();
                assert!(report.passed(), "{plan}, {case}: {report}");
                let largest = first.o.iter().fold(0.0_f32, |most, o| most.max(o.to_f32().abs()));
                let amax = first.amax.unwrap();
                assert!((amax - largest).abs() <= largest / 256.0, "{plan}, {case}: amax {amax}, {largest}");
                for number in 1..runs {
                    assert!(run().same_bits(&first), "{plan}, {case}: run {number} gives other bits");
                }
            }
        }
    }
}

/// e4m3 outputs of shared tiles are the bf16 ones, rounded.
#[test]
fn shares_write_every_output_type() {
    let Some(gpu) = Gpu::open("shares_write_every_output_type (e4m3)") else { return };
    for row in rows(&gpu) {
        let case = Case::new(200, 900, row.head_dim_qk(), mask_of(&row)).heads(1, 4, 2);
        let options = case.options(DType::E4M3).lse(true).scaling(Scaling::PerBlock);
        let problem = for_row(options.build().unwrap(), &row);
        let operands = Operands::of_case(&case, &problem, None);
        let on_device = OnDevice::new(&gpu.stream, &operands);
        let small = problem.to_builder().output(DType::E4M3).build().unwrap();
        let [wide, small] = [&problem, &small].map(|problem| plan_with_shares(problem, &gpu.device, &row, 3).unwrap());
        let mut workspace = Workspace::alloc(&gpu.lane(), wide.workspace_bytes().max(small.workspace_bytes())).unwrap();
        let wide: Written<bf16> = on_device.run(&gpu.stream, &mut workspace, &wide, None).unwrap();
        let bytes: Written<E4M3> = on_device.run(&gpu.stream, &mut workspace, &small, Some(64.0)).unwrap();
        assert_eq!(bytes.lse, wide.lse, "{row}");
        for (stored, exact) in bytes.o.iter().zip(&wide.o) {
            let (got, want) = (Element::to_f32(*stored) / 64.0, exact.to_f32());
            // Half an ulp of e4m3, that of bf16, and the smallest step.
            let allowed = want.abs() * (1.0 / 16.0 + 1.0 / 256.0) + 1.0 / (512.0 * 64.0);
            assert!((got - want).abs() <= allowed, "{row}: {got} for {want}");
        }
    }
}

/// Plans share the tiles of few heads, whether scores may be in f16 or not.
#[test]
fn plans_share_the_tiles_of_few_heads() {
    let Some(gpu) = Gpu::open("plans_share_the_tiles_of_few_heads (e4m3)") else { return };
    let device = Device::Cuda(gpu.device.clone());
    for (row, half) in rows(&gpu).into_iter().flat_map(|row| [(row, false), (row, true)]) {
        let case = Case::new(256, 4096, row.head_dim_qk(), mask_of(&row)).heads(1, 4, 4);
        let options = case.options(DType::E4M3).lse(true).scaling(Scaling::PerHead).half_scores(half);
        let problem = options.build().unwrap();
        let plan = problem.plan(&device).unwrap();
        let chosen = choice(&plan).unwrap();
        assert_eq!((chosen.kernel, chosen.fallback), (row, None), "{plan}");
        assert!(chosen.shares > 1, "{plan}");
        let operands = Operands::of_case(&case, &problem, None);
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        let on_device = OnDevice::new(&gpu.stream, &operands);
        let written = on_device.run::<bf16>(&gpu.stream, &mut workspace, &plan, None).unwrap();
        let (o, lse) = written.output(&problem);
        let report = operands.expected().check(&o, Some(&lse)).unwrap();
        assert!(report.passed(), "{plan}: {report}");
    }
}
