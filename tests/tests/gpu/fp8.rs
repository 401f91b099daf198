//! The rows of e4m3 operands.

use hopper_attention::internal::{choice, plan_with_shares};
use hopper_attention::{
    DType, Device, E4M3, Element, ForwardPlan, ForwardProblem, ForwardProblemBuilder, KernelInfo, Mask, MaskClass,
    Scaling, Stream, Workspace, bf16, f16,
};
use hopper_attention_tests::fp8::{Operands, for_row, half_scores_of};
use hopper_attention_tests::gpu::fp8::{OnDevice, Outputs, Written, takes};
use hopper_attention_tests::gpu::{Gpu, supported};
use hopper_attention_tests::problems::{Case, Grid, Tiles, cases, fitting};
use hopper_attention_tests::runner::Runner;
use hopper_attention_tests::say;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;

/// Scratch for every plan of a test, never cleaned.
const WORKSPACE_BYTES: usize = 1 << 12;

fn options(case: &Case, scaling: Scaling) -> ForwardProblemBuilder {
    case.options(DType::E4M3).lse(true).scaling(scaling)
}

fn problem(case: &Case, scaling: Scaling) -> ForwardProblem {
    options(case, scaling).build().unwrap()
}

/// A mask that a row computes: of a window so many keys before a query's own.
/// A case of the row's head dims, both less `less`.
fn case_for(row: &KernelInfo, seqlen_q: usize, seqlen_kv: usize, less: usize, mask: Mask) -> Case {
    Case::new(seqlen_q, seqlen_kv, row.head_dim_qk() - less, mask).head_dim_vo(row.head_dim_vo() - less)
}

fn mask_for(row: &KernelInfo, before: usize) -> Mask {
    match row.mask() {
        MaskClass::Full => Mask::Full,
        MaskClass::Causal => Mask::causal(),
        _ => Mask::window(Some(before), Some(3)),
    }
}

#[test]
fn every_e4m3_row_takes_the_grid() {
    let Some(gpu) = Gpu::open("every_e4m3_row_takes_the_grid") else { return };
    let rows = gpu.fp8_rows();
    assert!(!rows.is_empty(), "no row of e4m3 operands runs here");
    let all = fitting(&rows, cases(Grid::from_env(), &Tiles::of(&rows)));
    // The grid is that of every type; what e4m3 has of its own are the factors, which take turns.
    let some: Vec<(usize, Case)> = all.into_iter().step_by(Grid::from_env().pick(1, 3)).enumerate().collect();
    let mut runner = Runner::new(&rows);
    let mut workspace = Workspace::alloc(&gpu.lane(), WORKSPACE_BYTES).unwrap();
    let mut other_head_dims = 0;
    // Where a row's tiles can be shared, each second case has 1 to 8 shares in turn, whatever the plan would choose.
    let mut runs = 0;
    // Rows with scores in f16 have operands of their own, up to 14; the others' go up to 448.
    let halves = half_scores_of(&rows);
    for cases in some.chunks(64) {
        let taken: Vec<_> = cases.iter().filter(|(_, case)| takes(&problem(case, Scaling::PerTensor))).collect();
        other_head_dims += cases.len() - taken.len();
        let prepared: Vec<_> = taken
            .par_iter()
            .flat_map(|(i, case)| {
                halves.par_iter().map(move |&half| {
                    let problem = options(case, Scaling::ALL[i % 3]).half_scores(half).build().unwrap();
                    let hadamard = (case.seed % 2 == 1).then_some(case.seed);
                    let operands = Operands::of_case(case, &problem, hadamard);
                    let expected = operands.expected();
                    (case, half, operands, expected)
                })
            })
            .collect();
        for (case, half, operands, expected) in &prepared {
            let on_device = OnDevice::new(&gpu.stream, operands);
            for (i, row) in rows.iter().enumerate().filter(|(_, row)| (row.scores() == DType::F16) == *half) {
                runs += usize::from(row.most_shares() > 1);
                let planned = match runs % 2 == 1 && row.most_shares() > 1 {
                    true => plan_with_shares(operands.problem(), &gpu.device, row, 1 + runs / 2 % row.most_shares()),
                    false => operands.problem().plan_with_row(&gpu.device, row),
                };
                let Ok(plan) = planned else { continue };
                assert!(plan.workspace_bytes() <= WORKSPACE_BYTES, "{plan}");
                let verdict = on_device.judged::<bf16>(&gpu.stream, &mut workspace, &plan, expected);
                runner.take(i, case, DType::E4M3, verdict);
            }
        }
    }
    say(&format!("{other_head_dims} cases have head dims that are no multiples of 16, which e4m3 kernels do not take"));
    runner.record("forward of e4m3", Grid::from_env(), &gpu.card(), &gpu.driver());
    runner.finish();
}

/// f16 and e4m3 outputs are the bf16 one's values in their own precision; amax is the largest of them.
#[test]
fn outputs_of_every_type_and_amax() {
    let Some(gpu) = Gpu::open("outputs_of_every_type_and_amax") else { return };
    let device = Device::Cuda(gpu.device.clone());
    let mut workspace = Workspace::alloc(&gpu.lane(), WORKSPACE_BYTES).unwrap();
    let masks = [Mask::Full, Mask::causal(), Mask::window(Some(100), Some(20))];
    let settings = Scaling::ALL.into_iter().zip(masks).flat_map(|setting| [(setting, false), (setting, true)]);
    let settings = settings.flat_map(|setting| [(128, 128), (192, 128), (240, 256)].map(|dims| (setting, dims)));
    for (((scaling, mask), half), (qk, vo)) in settings {
        let case = Case::new(300, 517, qk, mask).head_dim_vo(vo).heads(2, 4, 2);
        let problem = options(&case, scaling).half_scores(half).build().unwrap();
        let operands = Operands::of_case(&case, &problem, None);
        let on_device = OnDevice::new(&gpu.stream, &operands);
        let exact = operands.expected().oracle().o.clone();
        let largest = exact.data().iter().fold(0.0_f64, |most, o| most.max(o.abs()));
        let plan = problem.to_builder().output(DType::F16).amax(true).build().unwrap().plan(&device).unwrap();
        let half: Written<f16> = on_device.run(&gpu.stream, &mut workspace, &plan, None).unwrap();
        let amax = f64::from(half.amax.unwrap());
        let of_half = half.o.iter().fold(0.0_f64, |most, o| most.max(f64::from(o.to_f32()).abs()));
        assert!((amax - of_half).abs() <= amax / 2048.0, "{plan}: amax {amax}, largest of O {of_half}");
        assert!((amax - largest).abs() <= largest / 8.0, "{plan}: amax {amax}, of the oracle {largest}");

        let scale_o = 300.0 / half.amax.unwrap();
        let plan = problem.to_builder().output(DType::E4M3).build().unwrap().plan(&device).unwrap();
        let bytes: Written<E4M3> = on_device.run(&gpu.stream, &mut workspace, &plan, Some(scale_o)).unwrap();
        for (stored, exact) in bytes.o.iter().zip(&half.o) {
            let (got, want) = (Element::to_f32(*stored) / scale_o, exact.to_f32());
            // Half an ulp of e4m3, that of f16, and the smallest step.
            assert!(
                (got - want).abs() <= want.abs() * (1.0 / 16.0 + 1e-3) + 1.0 / (512.0 * scale_o),
                "{got} for {want}"
            );
        }
        assert_eq!(bytes.lse, half.lse);
        // Larger than e4m3's largest value saturates.
        let bytes: Written<E4M3> = on_device.run(&gpu.stream, &mut workspace, &plan, Some(1e6)).unwrap();
        assert!(bytes.o.iter().all(|o| Element::to_f32(*o).abs() <= 448.0), "{plan}");
        assert!(bytes.o.iter().any(|o| Element::to_f32(*o).abs() == 448.0), "{plan}");
    }
}

/// Without keys O is 0 in every type, without queries amax is 0.
#[test]
fn nothing_to_sum() {
    let Some(gpu) = Gpu::open("nothing_to_sum (e4m3)") else { return };
    let device = Device::Cuda(gpu.device.clone());
    let mut workspace = Workspace::alloc(&gpu.lane(), WORKSPACE_BYTES).unwrap();
    for (seqlen_q, seqlen_kv, half) in [(70, 0, false), (0, 70, false), (70, 0, true), (0, 70, true)] {
        let case = Case::new(seqlen_q, seqlen_kv, 64, Mask::Full).heads(2, 4, 2);
        let options = options(&case, Scaling::PerBlock).output(DType::E4M3).amax(true);
        let problem = options.half_scores(half).build().unwrap();
        let operands = Operands::of_case(&case, &problem, None);
        let plan = problem.plan(&device).unwrap();
        let on_device = OnDevice::new(&gpu.stream, &operands);
        let written: Written<E4M3> = on_device.run(&gpu.stream, &mut workspace, &plan, Some(2.0)).unwrap();
        assert!(written.o.iter().all(|o| Element::to_f32(*o) == 0.0), "{plan}");
        assert!(written.lse.iter().all(|lse| *lse == f32::NEG_INFINITY), "{plan}");
        assert_eq!(written.amax, Some(0.0), "{plan}");
    }
}

/// Zeros have the smallest factors, whose product is 0: every key weighs the same, masked ones nothing.
#[test]
fn keys_of_zeros_weigh_the_same() {
    let Some(gpu) = Gpu::open("keys_of_zeros_weigh_the_same (e4m3)") else { return };
    let mut workspace = Workspace::alloc(&gpu.lane(), WORKSPACE_BYTES).unwrap();
    let mut taken = 0;
    for row in gpu.fp8_rows() {
        let mask = mask_for(&row, 150);
        for (scaling, less) in Scaling::ALL.into_iter().zip([0, 16, 0]) {
            let case = case_for(&row, 300, 333, less, mask).heads(2, 4, 2);
            let problem = for_row(problem(&case, scaling), &row);
            let operands = Operands::of_zeros(&case, &problem);
            let plan = supported(problem.plan_with_row(&gpu.device, &row), || row.to_string());
            let Some(plan) = plan else { continue };
            let on_device = OnDevice::new(&gpu.stream, &operands);
            let (o, lse) = on_device.run::<bf16>(&gpu.stream, &mut workspace, &plan, None).unwrap().output(&problem);
            let report = operands.expected().check(&o, Some(&lse)).unwrap();
            assert!(report.passed(), "{plan}: {report}");
            taken += 1;
        }
    }
    assert!(taken > 0, "no row took a case");
}

/// The same bits on every run, whatever the workspace held.
#[test]
fn e4m3_runs_repeat() {
    let Some(gpu) = Gpu::open("e4m3_runs_repeat") else { return };
    let device = Device::Cuda(gpu.device.clone());
    let mut workspace = Workspace::alloc(&gpu.lane(), WORKSPACE_BYTES).unwrap();
    for mask in [Mask::Full, Mask::causal(), Mask::window(Some(700), None)] {
        let head_dims = [(64, 64), (128, 128), (192, 128), (256, 256)];
        for ((qk, vo), half) in head_dims.into_iter().flat_map(|dims| [(dims, false), (dims, true)]) {
            let case = Case::new(1500, 1500, qk, mask).head_dim_vo(vo).heads(4, 8, 4);
            let problem = options(&case, Scaling::PerBlock).half_scores(half).build().unwrap();
            let operands = Operands::of_case(&case, &problem, None);
            let plan = problem.plan(&device).unwrap();
            let on_device = OnDevice::new(&gpu.stream, &operands);
            let mut run = || on_device.run::<bf16>(&gpu.stream, &mut workspace, &plan, None).unwrap();
            let first = run();
            for _ in 0..20 {
                let again = run();
                assert!(again.o == first.o && again.lse == first.lse, "{plan}");
            }
        }
    }
}

/// Whether plans split the last tiles in this row. Asked of a plan for two and a half rounds of long tiles.
fn splits(gpu: &Gpu, row: &KernelInfo) -> bool {
    let multiprocessors = gpu.device.info().facts.multiprocessors;
    let heads = (2 * multiprocessors + multiprocessors / 2).next_multiple_of(2);
    let case = case_for(row, row.tile_m(), 6003, 0, mask_for(row, 100)).heads(1, heads, 2);
    let plan = for_row(problem(&case, Scaling::PerTensor), row).plan_with_row(&gpu.device, row).unwrap();
    choice(&plan).unwrap().split_tiles > 0
}

/// Tiles that are split, so that two CTAs compute a piece each: against the oracle, the same bits on every run, and with half of the
/// multiprocessors taken by another launch, so that blocks come late.
#[test]
fn split_tiles_match_the_oracle() {
    let Some(gpu) = Gpu::open("split_tiles_match_the_oracle") else { return };
    let rows: Vec<_> = gpu.fp8_rows().into_iter().filter(|row| splits(&gpu, row)).collect();
    assert!(!rows.is_empty(), "no row splits tiles");
    let multiprocessors = gpu.device.info().facts.multiprocessors;
    let other = gpu.device.context().new_stream().unwrap();
    let mut split = 0;
    for row in rows {
        let (busy, held) = {
            // A tile for each of half the multiprocessors, some of a millisecond long.
            let case = case_for(&row, row.tile_m(), 1 << 16, 0, Mask::Full).heads(1, multiprocessors / 2, 1);
            let problem = for_row(problem(&case, Scaling::PerTensor), &row);
            let plan = problem.plan_with_row(&gpu.device, &row).unwrap();
            (OnDevice::new(&other, &Operands::of_zeros(&case, &problem)), plan)
        };
        let lane = Stream::Cuda(other.clone());
        let mut scratch = Workspace::alloc(&lane, held.workspace_bytes()).unwrap();
        // Few queries make a tile as long as any. One tile left over, and half a round; a part of a block of keys, and of a
        // unit of blocks.
        let cases = [
            (1, 1, 3072, Scaling::PerTensor),
            (3, multiprocessors / 2, 6003, Scaling::PerBlock),
            (row.tile_m() + 1, multiprocessors / 4, 5120 + 129, Scaling::PerHead),
            (5, 17, 4999, Scaling::PerBlock),
        ];
        for (i, (seqlen_q, rest, seqlen_kv, scaling)) in cases.into_iter().enumerate() {
            let heads = ((2 * multiprocessors + rest) / seqlen_q.div_ceil(row.tile_m())).next_multiple_of(2);
            let case = case_for(&row, seqlen_q, seqlen_kv, 16 * (i % 2), Mask::Full).heads(1, heads, 2);
            let problem = for_row(problem(&case, scaling), &row).to_builder().amax(true).build().unwrap();
            let operands = Operands::of_case(&case, &problem, None);
            let plan = problem.plan_with_row(&gpu.device, &row).unwrap();
            split += usize::from(choice(&plan).is_some_and(|choice| choice.split_tiles > 0));
            let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
            let on_device = OnDevice::new(&gpu.stream, &operands);
            let first = on_device.run::<bf16>(&gpu.stream, &mut workspace, &plan, None).unwrap();
            let (o, lse) = first.output(&problem);
            let report = operands.expected().check(&o, Some(&lse)).unwrap();
            assert!(report.passed(), "{plan}: {report}");
            let largest = first.o.iter().fold(0.0_f32, |most, o| most.max(o.to_f32().abs()));
            assert!(
                (first.amax.unwrap() - largest).abs() <= largest / 256.0,
                "{plan}: amax {:?}, {largest}",
                first.amax
            );
            for run in 0..Grid::from_env().pick(2, 10) {
                let mut outputs = Outputs::<bf16>::new(&other, held.problem(), None);
                if run % 2 == 1 {
                    held.run(&lane, &mut scratch, outputs.args(busy.inputs(held.problem()))).unwrap();
                    std::thread::sleep(std::time::Duration::from_micros(100));
                }
                let again = on_device.run::<bf16>(&gpu.stream, &mut workspace, &plan, None).unwrap();
                assert!(again.same_bits(&first), "{plan}: run {run} gives other bits");
                other.synchronize().unwrap();
            }
        }
    }
    assert!(split >= 4, "plans that split tiles: {split}");
}

/// Where an element of Q or K, wherever it is, is too large for scores in f16, the kernel behind computes all of it: its bits
/// come out. Where none is, they do not.
#[test]
fn what_is_too_large_for_f16_is_computed_in_f32() {
    let Some(gpu) = Gpu::open("what_is_too_large_for_f16_is_computed_in_f32") else { return };
    let multiprocessors = gpu.device.info().facts.multiprocessors;
    let (mut found, mut split) = (0, 0);
    let halves = gpu.fp8_rows().into_iter().filter(|row| row.scores() == DType::F16);
    for (number, row) in halves.enumerate() {
        let mask = mask_for(&row, 100);
        let mut cases = vec![
            case_for(&row, 700, 700, 0, mask).heads(2, 4, 4),
            case_for(&row, 1000, 1000, 16, mask).heads(1, 6, 2),
            case_for(&row, 130, 130, 0, mask).heads(30, 8, 2),
        ];
        if mask == Mask::Full {
            // More tiles than blocks of keys, and fewer.
            cases.push(case_for(&row, 1500, 150, 0, mask).heads(1, 2, 1));
            cases.push(case_for(&row, 1, 3000, 0, mask).heads(1, 4, 4));
        }
        if splits(&gpu, &row) {
            // Tiles of 192 queries make two rounds and a half, those of 128 five.
            let heads = 2 * multiprocessors + multiprocessors / 2;
            cases.push(case_for(&row, 150, 6003, 0, mask).heads(1, heads, 2));
        }
        for case in cases {
            let half = options(&case, Scaling::PerBlock).half_scores(true).amax(true).build().unwrap();
            let plan = half.plan_with_row(&gpu.device, &row).unwrap();
            let chosen = *choice(&plan).unwrap();
            // Of whole tiles, as the launch behind.
            let behind = plan_with_shares(&half, &gpu.device, &chosen.fallback.unwrap().kernel, 1).unwrap();
            assert_eq!(choice(&behind).unwrap().split_tiles, 0, "{behind}");
            split += usize::from(chosen.split_tiles > 0);
            let bytes = plan.workspace_bytes().max(behind.workspace_bytes());
            let mut workspace = Workspace::alloc(&gpu.lane(), bytes).unwrap();
            let mut run = |plan: &ForwardPlan, operands: &Operands| {
                let on_device = OnDevice::new(&gpu.stream, operands);
                on_device.run::<bf16>(&gpu.stream, &mut workspace, plan, None).unwrap()
            };
            let fits = Operands::of_case(&case, &half, None);
            assert!(!run(&plan, &fits).same_bits(&run(&behind, &fits)), "{plan}: computed twice");

            let mut rng = StdRng::seed_from_u64(case.seed + number as u64);
            let shapes = [half.q_shape(), half.k_shape()];
            for i in 0..Grid::from_env().pick(8, 40) {
                let which = i % 2;
                // The first and the last element of each, then any.
                let index = shapes[which].map(|size| match i / 2 {
                    0 => 0,
                    1 => size - 1,
                    _ => rng.random_range(0..size),
                });
                let mut operands = fits.clone();
                // 14 fits, 15 does not, -448 does not, and a NaN is of none.
                operands.put(which, index, E4M3::from_bits([0x56, 0x57, 0xfe, 0x7f][i / 2 % 4]));
                let same = run(&plan, &operands).same_bits(&run(&behind, &operands));
                assert_eq!(same, i / 2 % 4 > 0, "{plan}: tensor {which} at {index:?}, number {i}");
                found += 1;
            }
            // Sums that f16 does not hold.
            let mut operands = fits.clone();
            for i in 0..half.dims().head_dim_qk {
                let index = |size: [usize; 4]| [size[0] - 1, size[1] / 2, size[2] - 1, i];
                operands.put(0, index(shapes[0]), E4M3::from_bits(0x7e));
                operands.put(1, index(shapes[1]), E4M3::from_bits(0xfe));
            }
            let written = run(&plan, &operands);
            let (o, lse) = written.output(&half);
            let report = operands.expected().check(&o, Some(&lse)).unwrap();
            assert!(report.passed(), "{plan}: {report}");
            let largest = written.o.iter().fold(0.0_f32, |most, o| most.max(o.to_f32().abs()));
            assert!((written.amax.unwrap() - largest).abs() <= largest / 256.0, "{plan}: amax {:?}", written.amax);
        }
    }
    assert!(found > 0 && split > 0, "elements {found}, plans that split tiles {split}");
}
