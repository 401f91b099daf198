//! Packed sequences and used lengths with e4m3 operands on a GPU.

use hopper_attention::{
    DType, Device, E4M3, Element, ForwardProblem, KernelInfo, OutputOf, Scaling, Workspace, bf16, f16,
};
use hopper_attention_tests::fp8::Operands;
use hopper_attention_tests::gpu::fp8::{OnDevice, Outputs, takes};
use hopper_attention_tests::gpu::{Gpu, supported};
use hopper_attention_tests::packed;
use hopper_attention_tests::packing::{Kind, Packing};
use hopper_attention_tests::problems::{Case, Grid, fitting, random};
use hopper_attention_tests::runner::{Runner, Verdict};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::mask_of;
use crate::packed::{LISTS, claims, hostile, list, of_lengths, packing_rows, uploaded};

fn problem(case: &Case, scaling: Scaling) -> ForwardProblem {
    case.options(DType::E4M3).lse(true).scaling(scaling).build().unwrap()
}

#[test]
fn every_packing_e4m3_row_takes_packed_cases() {
    let Some(gpu) = Gpu::open("every_packing_e4m3_row_takes_packed_cases") else { return };
    let rows = packing_rows(gpu.fp8_rows());
    assert!(rows.len() >= 8, "{rows:?}");
    let grid = Grid::from_env();
    let mut all = fitting(&rows, packed::cases(grid));
    all.extend(packed::drawn(random::seed(), 256, grid.pick(8, 200)));
    let mut runner = Runner::new(&rows);
    let taken = all.iter().filter(|case| takes(&problem(case, Scaling::PerTensor)));
    for (turn, case) in taken.enumerate() {
        let problem = problem(case, Scaling::ALL[turn % 3]).to_builder().amax(true).build().unwrap();
        let operands = Operands::of_case(case, &problem, (turn % 2 == 1).then_some(case.seed));
        for (i, row) in rows.iter().enumerate() {
            let verdict = match turn % 4 {
                0 => of::<f16>(&gpu, &operands, row),
                _ => of::<bf16>(&gpu, &operands, row),
            };
            if let Some(verdict) = verdict {
                runner.take(i, case, DType::E4M3, verdict);
            }
        }
    }
    runner.record("forward of packed e4m3", grid, &gpu.card(), &gpu.driver());
    runner.finish();
}

/// `None` where the row is for other problems.
fn of<O: OutputOf<E4M3>>(gpu: &Gpu, operands: &Operands, row: &KernelInfo) -> Option<Verdict> {
    let problem = operands.problem().to_builder().output(O::DTYPE).build().unwrap();
    let plan = supported(problem.plan_with_row(&gpu.device, row), || row.to_string())?;
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let on_device = OnDevice::new(&gpu.stream, operands);
    Some(on_device.judged::<O>(&gpu.stream, &mut workspace, &plan, &operands.expected()))
}

/// Ten thousand sequences of 1 to 16 tokens in three rows, one for each scaling. The others take a tenth of them: the
/// oracle takes long, and the table of sequences is the same for each row.
#[test]
fn many_short_sequences_of_e4m3() {
    let Some(gpu) = Gpu::open("many_short_sequences_of_e4m3") else { return };
    let most = Grid::from_env().pick(1500, 10_000);
    let mut rng = StdRng::seed_from_u64(9);
    let lengths: Vec<usize> = (0..most).map(|_| rng.random_range(1..17)).collect();
    let (mut rows, others): (Vec<_>, Vec<_>) =
        packing_rows(gpu.fp8_rows()).into_iter().partition(|row| row.head_dim_qk() == 64);
    assert!(rows.len() >= 3, "{rows:?}");
    rows.extend(others);
    for (i, row) in rows.iter().enumerate() {
        let count = if i < 3 { most } else { most / 10 };
        let case = of_lengths(row, &lengths[..count]).heads(count, 2, 1);
        let problem = problem(&case, Scaling::ALL[i % 3]);
        let verdict = of::<bf16>(&gpu, &Operands::of_case(&case, &problem, None), row);
        let verdict = verdict.unwrap_or_else(|| panic!("{row} does not take {count} sequences, {problem}"));
        assert!(verdict.wrong.is_none(), "{row}, {count} sequences, {problem}: {:?}", verdict.wrong);
    }
}

/// A problem that allows scores in f16 takes the kernel with scores in f32 where it is packed: no other packs.
#[test]
fn packed_problems_take_scores_in_f32() {
    let Some(gpu) = Gpu::open("packed_problems_take_scores_in_f32") else { return };
    let device = Device::Cuda(gpu.device.clone());
    for row in gpu.fp8_rows() {
        assert!(!row.packs() || row.scores() == DType::F32, "{row}");
        let case = Case::new(300, 300, row.head_dim_qk(), mask_of(row.mask()));
        let case = case.head_dim_vo(row.head_dim_vo()).heads(3, 2, 1);
        let problem = case.options(DType::E4M3).half_scores(true).packed(true).build().unwrap();
        let plan = problem.plan(&device).unwrap();
        assert!(plan.kernel().is_some_and(|kernel| kernel.scores() == DType::F32), "{plan}");
        if !row.packs() {
            let error = problem.plan_with_row(&gpu.device, &row).unwrap_err().to_string();
            assert!(error.contains("packed sequences"), "{error}");
        }
    }
}

/// Offsets and lengths that are garbage: only rows of clamped sequences are written, and nothing beside the tensors.
#[test]
fn garbage_lengths_write_only_rows_of_clamped_sequences() {
    let Some(gpu) = Gpu::open("garbage_lengths_write_only_rows_of_clamped_sequences (e4m3)") else { return };
    let mut rng = StdRng::seed_from_u64(random::seed());
    for row in packing_rows(gpu.all_fp8_rows()) {
        for draw in 0..Grid::from_env().pick(3, 30) {
            garbage(&gpu, &row, Scaling::ALL[draw % 3], &mut rng);
        }
    }
}

fn garbage(gpu: &Gpu, row: &KernelInfo, scaling: Scaling, rng: &mut StdRng) {
    let (batch, rows) = ([1, 3, 40, 1100][rng.random_range(0..4)], [105, 130, 700][rng.random_range(0..3)]);
    let case = Case::new(rows, rows, row.head_dim_qk(), mask_of(row.mask()));
    let mut case = case.head_dim_vo(row.head_dim_vo()).heads(batch, 2, 1);
    case.softcap = if row.needs_modifiers() { 15.0 } else { 0.0 };
    let kind = Kind { packed: [true; 2], used: [true; 2], fill_gaps: false };
    case.packing = Packing::random(kind, batch, [rows; 2], 1);
    let operands = Operands::of_case(&case, &problem(&case, scaling), None);
    let plan = operands.problem().plan_with_row(&gpu.device, row).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let on_device = OnDevice::new(&gpu.stream, &operands);
    let mut outputs = Outputs::<bf16>::new(&gpu.stream, plan.problem(), None);
    outputs.mark(&gpu.stream, MARK);
    let lists = [batch + 1, batch + 1, batch, batch].map(|count| hostile(rng, count, rows));
    let arrays = uploaded(&gpu.stream, &lists);
    let mut args = on_device.args(plan.problem(), &mut outputs);
    for (slot, array) in LISTS.into_iter().zip(&arrays) {
        // SAFETY: wrong numbers are what is tested. The rows of outputs are looked at, and nothing else relies on them.
        args = unsafe { args.lengths_unchecked(slot, list(array)) };
    }
    plan.run(&gpu.lane(), &mut workspace, args).unwrap();
    gpu.stream.synchronize().unwrap_or_else(|error| panic!("{row}: {error} with {lists:?}"));
    let written = outputs.written(&gpu.stream).unwrap();
    let of_row = written.o.len() / rows;
    let [of_q, _] = claims(plan.problem(), &lists);
    for (own, claimed) in written.o.chunks(of_row).zip(of_q) {
        let is_left = own.iter().all(|o| Element::to_f32(*o) == MARK);
        assert!(claimed || is_left, "{row}: written outside of sequences, with {lists:?}");
    }
}

/// What O is before a run, and rows of no sequence after it.
const MARK: f32 = 55.0;
