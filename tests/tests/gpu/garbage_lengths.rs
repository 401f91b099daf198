//! Offsets and used lengths that hold any numbers, of every kind of packing: results are those of the clamped lists. Rows of no clamped
//! sequence are filled or stay as they are, in O, the LSE and the gradients, and so do the guard bands.

use hopper_attention::cudarc::driver::CudaSlice;
use hopper_attention::{Args, DType, ForwardProblem, KernelInfo, Scaling, Slot, Workspace, bf16};
use hopper_attention_tests::alibi::Alibi;
use hopper_attention_tests::backward;
use hopper_attention_tests::data::Poison;
use hopper_attention_tests::fp8::{Operands, for_row};
use hopper_attention_tests::gpu::fp8::{OnDevice as Fp8OnDevice, Outputs as Fp8Outputs};
use hopper_attention_tests::gpu::{Gpu, OnDevice, backward as of_backward, planned};
use hopper_attention_tests::packing::{Kind, Packing};
use hopper_attention_tests::problems::{Case, Grid, random};
use hopper_attention_tests::runner::Prepared;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::packed::{hostile, list, packing_rows};
use crate::{mask_of, with_dtype};

const BOTH: [bool; 2] = [true; 2];
const NEITHER: [bool; 2] = [false; 2];

/// Which sides are packed, which have used lengths, and whether gaps are filled.
const KINDS: [Kind; 9] = [
    Kind { packed: BOTH, used: NEITHER, fill_gaps: true },
    Kind { packed: BOTH, used: BOTH, fill_gaps: true },
    Kind { packed: BOTH, used: [true, false], fill_gaps: false },
    Kind { packed: [true, false], used: NEITHER, fill_gaps: true },
    Kind { packed: [true, false], used: [false, true], fill_gaps: false },
    Kind { packed: [false, true], used: NEITHER, fill_gaps: false },
    Kind { packed: [false, true], used: [true, false], fill_gaps: true },
    Kind { packed: NEITHER, used: BOTH, fill_gaps: true },
    Kind { packed: NEITHER, used: [false, true], fill_gaps: false },
];

/// A case of the lists that garbage stands for, and the garbage.
fn drawn(row: &KernelInfo, kind: Kind, rng: &mut StdRng) -> (Case, Packing) {
    let batches: &[usize] = if kind.packed == BOTH { &[1, 3, 40, 1100] } else { &[1, 3, 7] };
    let batch = batches[rng.random_range(0..batches.len())];
    let rows =
        [0, 1].map(|side| if kind.packed[side] { [105, 330, 700] } else { [105, 130, 210] }[rng.random_range(0..3)]);
    let mut offsets = |side: usize| kind.packed[side].then(|| hostile(rng, batch + 1, rows[side]));
    let [cu_seqlens_q, cu_seqlens_kv] = [offsets(0), offsets(1)];
    let mut used = |side: usize| kind.used[side].then(|| hostile(rng, batch, rows[side]));
    let [seqused_q, seqused_kv] = [used(0), used(1)];
    let fill_gaps = kind.fill_gaps;
    let garbage = Packing { cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, fill_gaps, ..Packing::default() };
    let case = Case::new(rows[0], rows[1], row.head_dim_qk(), mask_of(row.mask())).heads(batch, 2, 1);
    let case = case.head_dim_vo(row.head_dim_vo());
    let problem = garbage.options(ForwardProblem::builder(DType::BF16, case.dims)).build().unwrap();
    // A hint changes nothing, and no byte of the workspace is missed where it is too small.
    let clamped = garbage.clamped(&problem).hinted(rng.random_range(0..25));
    (Case { packing: clamped, ..case }, garbage)
}

/// Something that rows for modified scores compute. Others have plain scores.
fn modified(row: &KernelInfo, case: Case, turn: usize) -> Case {
    match (row.needs_modifiers(), turn % 4) {
        (false, _) => case,
        (_, 0) => case.softcap(15.0),
        (_, 1) => case.alibi(Alibi::Standard),
        (_, 2) => case.bias("bf16:hq".parse().expect("a bias")),
        _ => case.dropout(0.3),
    }
}

/// The arrays of a launch.
struct Arrays(Vec<(Slot, CudaSlice<i32>)>);

impl Arrays {
    fn new(gpu: &Gpu, garbage: &Packing) -> Self {
        Self(garbage.lists().map(|(slot, list)| (slot, gpu.stream.clone_htod(list).unwrap())).collect())
    }

    fn add_to<'a>(&'a self, args: Args<'a>) -> Args<'a> {
        // SAFETY: wrong numbers are what is tested. All memory of outputs is looked at, and nothing else relies on them.
        self.0.iter().fold(args, |args, (slot, array)| unsafe { args.lengths_unchecked(*slot, list(array)) })
    }
}

/// What a workspace and the bytes around it hold before a run.
const FILL: u8 = 0xa5;
/// Bytes before the workspace, and behind it.
const BAND: usize = 256;

/// A workspace of just the bytes that a plan asks for, whatever the lengths turn out to be.
struct Exact(CudaSlice<u8>);

impl Exact {
    fn new(gpu: &Gpu, bytes: usize) -> Self {
        Self(gpu.stream.clone_htod(&vec![FILL; bytes + 2 * BAND]).expect("device memory"))
    }

    fn lend(&mut self) -> Workspace<'_> {
        let end = self.0.len() - BAND;
        Workspace::cuda(self.0.slice_mut(BAND..end))
    }

    /// Whether nothing was written beside it.
    fn is_kept(&self, gpu: &Gpu) -> bool {
        let all = gpu.stream.clone_dtoh(&self.0).expect("a copy");
        all[..BAND].iter().chain(&all[all.len() - BAND..]).all(|&byte| byte == FILL)
    }
}

/// Takes rows through draws of every kind. `run` says whether the row takes the case.
fn each(rows: Vec<KernelInfo>, run: impl Fn(&KernelInfo, &Case, &Packing, usize) -> bool) {
    assert!(!rows.is_empty());
    let mut rng = StdRng::seed_from_u64(random::seed());
    let draws = Grid::from_env().pick(1, 3);
    for row in rows {
        let mut taken = 0;
        for (turn, kind) in KINDS.into_iter().cycle().take(draws * KINDS.len()).enumerate() {
            let (case, garbage) = drawn(&row, kind, &mut rng);
            taken += usize::from(run(&row, &modified(&row, case, turn), &garbage, turn));
        }
        assert!(taken > 0, "{row} took no case");
    }
}

#[test]
fn results_of_garbage_lengths_are_those_of_clamped_ones() {
    let Some(gpu) = Gpu::open("results_of_garbage_lengths_are_those_of_clamped_ones") else { return };
    let rows = packing_rows([gpu.rows(), gpu.modified_rows()].concat());
    each(rows, |row, case, garbage, _| with_dtype!(row.dtype(), forward(&gpu, row, case, garbage)));
}

fn forward<T: Poison>(gpu: &Gpu, row: &KernelInfo, case: &Case, garbage: &Packing) -> bool {
    let prepared = Prepared::<T>::new(case);
    let Some(plan) = planned(prepared.problem.plan_with_row(&gpu.device, row), row, case) else { return false };
    let mut workspace = Exact::new(gpu, plan.workspace_bytes());
    let (mut on_device, arrays) = (OnDevice::new(&gpu.stream, &prepared), Arrays::new(gpu, garbage));
    plan.run(&gpu.lane(), &mut workspace.lend(), arrays.add_to(on_device.args(&prepared))).unwrap();
    let outputs = on_device.outputs(&gpu.stream, &prepared);
    let outputs = outputs.unwrap_or_else(|why| panic!("{row}, {case}, given {garbage:?}: {why}"));
    let report = prepared.judge(&outputs);
    assert!(report.passed(), "{row}, {case}, given {garbage:?}: {report}");
    on_device.check_inputs(&gpu.stream, &prepared).unwrap();
    assert!(workspace.is_kept(gpu), "{row}, {case}, given {garbage:?}: written beside the workspace");
    true
}

#[test]
fn gradients_of_garbage_lengths_are_those_of_clamped_ones() {
    let Some(gpu) = Gpu::open("gradients_of_garbage_lengths_are_those_of_clamped_ones") else { return };
    let rows = packing_rows([gpu.backward_rows(), gpu.modified_backward_rows()].concat());
    each(rows, |row, case, garbage, turn| with_dtype!(row.dtype(), gradients(&gpu, row, case, garbage, turn % 2 == 0)));
}

fn gradients<T: Poison>(gpu: &Gpu, row: &KernelInfo, case: &Case, garbage: &Packing, deterministic: bool) -> bool {
    let prepared = backward::Prepared::<T>::new(case);
    let problem = prepared.problem.to_builder().deterministic(deterministic).build().unwrap();
    let Some(plan) = planned(problem.plan_with_row(&gpu.device, row), row, case) else { return false };
    let mut workspace = Exact::new(gpu, plan.workspace_bytes());
    let (mut on_device, arrays) = (of_backward::OnDevice::new(&gpu.stream, &prepared), Arrays::new(gpu, garbage));
    plan.run(&gpu.lane(), &mut workspace.lend(), arrays.add_to(on_device.args(&prepared))).unwrap();
    let outputs = on_device.outputs(&gpu.stream, &prepared);
    let outputs = outputs.unwrap_or_else(|why| panic!("{row}, {case}, given {garbage:?}: {why}"));
    let report = prepared.judge(&outputs);
    assert!(report.passed(), "{row}, {case}, given {garbage:?}: {report}");
    on_device.check_inputs(&gpu.stream, &prepared).unwrap();
    assert!(workspace.is_kept(gpu), "{row}, {case}, given {garbage:?}: written beside the workspace");
    true
}

#[test]
fn e4m3_results_of_garbage_lengths_are_those_of_clamped_ones() {
    let Some(gpu) = Gpu::open("e4m3_results_of_garbage_lengths_are_those_of_clamped_ones") else { return };
    each(packing_rows(gpu.fp8_rows()), |row, case, garbage, turn| {
        e4m3(&gpu, row, case, garbage, Scaling::ALL[turn % 3])
    });
}

fn e4m3(gpu: &Gpu, row: &KernelInfo, case: &Case, garbage: &Packing, scaling: Scaling) -> bool {
    let problem = case.options(DType::E4M3).lse(true).scaling(scaling).build().unwrap();
    let operands = Operands::of_case(case, &for_row(problem, row), None);
    let Some(plan) = planned(operands.problem().plan_with_row(&gpu.device, row), row, case) else { return false };
    let mut workspace = Exact::new(gpu, plan.workspace_bytes());
    let (on_device, arrays) = (Fp8OnDevice::new(&gpu.stream, &operands), Arrays::new(gpu, garbage));
    let mut outputs = Fp8Outputs::<bf16>::new(&gpu.stream, plan.problem(), None);
    plan.run(&gpu.lane(), &mut workspace.lend(), arrays.add_to(on_device.args(plan.problem(), &mut outputs))).unwrap();
    gpu.stream.synchronize().unwrap_or_else(|error| panic!("{row}, {case}, given {garbage:?}: {error}"));
    let written = outputs.written(&gpu.stream).unwrap_or_else(|why| panic!("{row}, {case}, given {garbage:?}: {why}"));
    // Rows of no sequence are NaN before, and what is expected of them where they are not filled.
    let belonging = operands.packing().belonging(plan.problem()).expect("a case with lists");
    let [_, seqlen, heads, dim] = plan.problem().o_shape();
    for (row_number, own) in written.o.chunks(heads * dim).enumerate() {
        let is_left = own.iter().all(|o| o.is_nan());
        let own_lse =
            (0..heads).map(|head| written.lse[(row_number / seqlen * heads + head) * seqlen + row_number % seqlen]);
        let is_left = is_left && own_lse.into_iter().all(f32::is_nan);
        assert!(belonging[0].is_written(row_number) || is_left, "{row}, {case}, given {garbage:?}: row {row_number}");
    }
    let (o, lse) = written.output(plan.problem());
    let report = operands.expected().check(&o, Some(&lse)).unwrap();
    assert!(report.passed(), "{row}, {case}, given {garbage:?}: {report}");
    assert!(workspace.is_kept(gpu), "{row}, {case}, given {garbage:?}: written beside the workspace");
    true
}
