//! The additive bias on a GPU: every row that adds one, both passes, garbage in what it hides, its gradient of every form.

use hopper_attention::{DType, Device, Error, KernelInfo, Mask, MaskClass, Workspace, bf16};
use hopper_attention_tests::backward;
use hopper_attention_tests::bias::{Bias, BiasImage, cases, listed_cases, packed_cases};
use hopper_attention_tests::blocks::Blocks;
use hopper_attention_tests::data::{Garbage, Input, Values};
use hopper_attention_tests::gpu::{Gpu, backward as of_backward};
use hopper_attention_tests::packing::{Kind, Packing};
use hopper_attention_tests::problems::{Case, Grid};

use crate::by_type::{BACKWARD, FORWARD, fitting, judged, judged_backward, take};
use crate::{mask_of, with_dtype};

const MASKS: [MaskClass; 3] = [MaskClass::Full, MaskClass::Causal, MaskClass::Window];

/// The rows that add a bias, of packed sequences or else of others. They do so with every mask.
pub(crate) fn adding(rows: Vec<KernelInfo>, packed: bool) -> Vec<KernelInfo> {
    adding_at(&[64, 128], rows, packed)
}

/// Of them, those with lists in the backward: at head dim 128 alone, which takes smaller ones, too.
fn adding_backward_lists(gpu: &Gpu) -> Vec<KernelInfo> {
    adding_at(&[128], gpu.listed_modified_backward_rows(), false)
}

fn adding_at(head_dims: &[usize], rows: Vec<KernelInfo>, packed: bool) -> Vec<KernelInfo> {
    let adding: Vec<_> = rows.into_iter().filter(|row| row.adds_bias(packed)).collect();
    for dtype in [DType::BF16, DType::F16] {
        for &head_dim in head_dims {
            assert!(
                adding.iter().any(|row| row.dtype() == dtype && row.head_dim_qk() == head_dim),
                "{dtype} {head_dim}"
            );
        }
    }
    adding
}

/// Every seventh case that kernels have: 7 divides none of the numbers of sizes, masks and biases.
fn some(cases: Vec<Case>, backward: bool) -> Vec<Case> {
    let have = |case: &Case| !(backward && case.softcap != 0.0);
    let every = Grid::from_env().pick(29, 7);
    cases.into_iter().filter(have).step_by(every).map(|case| forgetting(case, backward)).collect()
}

/// Gradients have nothing to do with maximum logits.
fn forgetting(case: Case, backward: bool) -> Case {
    if backward { case.max_logits(false) } else { case }
}

#[test]
fn every_row_adds_a_bias() {
    let Some(gpu) = Gpu::open("every_row_adds_a_bias") else { return };
    let rows = adding(gpu.modified_rows(), false);
    take(&gpu, &rows, &some(without_lists(), false), "forward with a bias", FORWARD);
}

fn without_lists() -> Vec<Case> {
    cases(Grid::from_env()).into_iter().filter(|case| case.blocks.is_none()).collect()
}

#[test]
fn every_listed_row_adds_a_bias() {
    let Some(gpu) = Gpu::open("every_listed_row_adds_a_bias") else { return };
    let rows = adding(gpu.listed_modified_rows(), false);
    let cases = fitting(&rows, some(listed_cases(Grid::from_env()), false));
    take(&gpu, &rows, &cases, "forward with a bias and lists of blocks", FORWARD);
}

#[test]
fn every_listed_backward_row_adds_a_bias() {
    let Some(gpu) = Gpu::open("every_listed_backward_row_adds_a_bias") else { return };
    let rows = adding_backward_lists(&gpu);
    let cases = fitting(&rows, some(listed_cases(Grid::from_env()), true));
    take(&gpu, &rows, &cases, "backward with a bias and lists of blocks", BACKWARD);
}

#[test]
fn every_packing_row_adds_a_bias() {
    let Some(gpu) = Gpu::open("every_packing_row_adds_a_bias") else { return };
    let rows = adding(gpu.modified_rows(), true);
    take(&gpu, &rows, &some(packed_cases(Grid::from_env()), false), "packed forward with a bias", FORWARD);
}

#[test]
fn every_backward_row_adds_a_bias() {
    let Some(gpu) = Gpu::open("every_backward_row_adds_a_bias") else { return };
    let rows = adding(gpu.modified_backward_rows(), false);
    let cases = fitting(&rows, some(without_lists(), true));
    take(&gpu, &rows, &cases, "backward with a bias", BACKWARD);
}

#[test]
fn every_packing_backward_row_adds_a_bias() {
    let Some(gpu) = Gpu::open("every_packing_backward_row_adds_a_bias") else { return };
    let rows = adding(gpu.modified_backward_rows(), true);
    let cases = fitting(&rows, some(packed_cases(Grid::from_env()), true));
    take(&gpu, &rows, &cases, "packed backward with a bias", BACKWARD);
}

/// NaN, infinity and the largest numbers reach the rows that do not hide them, and no others.
#[test]
fn garbage_reaches_no_row_that_hides_it() {
    let Some(gpu) = Gpu::open("garbage_reaches_no_row_that_hides_it") else { return };
    for row in [adding(gpu.modified_rows(), false), adding(gpu.listed_modified_rows(), false)].concat() {
        for (input, mask) in [Input::K, Input::V].into_iter().flat_map(|input| MASKS.map(|mask| (input, mask))) {
            spoiled(&row, input, mask).for_each(|case| with_dtype!(row.dtype(), judged(&gpu, &row, &case)));
        }
    }
    for row in [adding(gpu.modified_backward_rows(), false), adding_backward_lists(&gpu)].concat() {
        for (input, mask) in Input::ALL.into_iter().flat_map(|input| MASKS.map(|mask| (input, mask))) {
            spoiled(&row, input, mask).for_each(|case| with_dtype!(row.dtype(), judged_backward(&gpu, &row, &case)));
        }
    }
}

fn spoiled(row: &KernelInfo, input: Input, mask: MaskClass) -> impl Iterator<Item = Case> + use<> {
    let case = Case::new(197, 290, row.head_dim_qk(), mask_of(mask)).heads(2, 6, 2);
    let case = case.head_dim_vo(row.head_dim_vo());
    let case = if row.mask() == MaskClass::Blocks { case.blocks(Blocks::Random(60)) } else { case };
    let biases = ["f32:hq:hidden", "bf16:q:mask", "f16:bhq:hidden", "f32::mask", "bf16:bh:lowest"];
    let biases = biases.map(|bias| bias.parse::<Bias>().expect("a bias"));
    let packs = row.adds_bias(true);
    // Each kind of garbage meets one mask.
    let of_mask = Garbage::ALL.into_iter().enumerate().filter(move |(i, _)| MASKS[(i + input as usize) % 3] == mask);
    of_mask
        .map(|(_, garbage)| garbage)
        .zip(biases.into_iter().cycle())
        .map(move |(garbage, bias)| Case { values: Values::Garbage(input, garbage), ..case.clone() }.bias(bias))
        .flat_map(move |case| if packs { vec![packed(&case), case] } else { vec![case] })
}

/// The same with three packed sequences.
fn packed(case: &Case) -> Case {
    let kind = Kind { packed: [true; 2], used: [true; 2], fill_gaps: true };
    let rows = [case.dims.seqlen_q, case.dims.seqlen_kv];
    Case { packing: Packing::random(kind, 3, rows, case.seed), ..case.clone().heads(3, 6, 2) }
}

/// Gradients of every form, of more blocks than one kernel's CTA walks, in the library's own choice.
#[test]
fn gradients_of_every_form() {
    let Some(gpu) = Gpu::open("gradients_of_every_form") else { return };
    for (turn, bias) in Bias::all().enumerate().filter(|(turn, _)| turn % 3 == turn / 12 % 3) {
        let mask = [Mask::Full, Mask::causal(), Mask::window(Some(200), Some(50))][turn % 3];
        let case = Case::new(500 + turn, 700 - turn, [64, 128][turn % 2], mask).heads(3, 6, 2).bias(bias);
        let prepared = backward::Prepared::<bf16>::new(&case);
        let plan = prepared.problem.plan(&Device::Cuda(gpu.device.clone())).unwrap();
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        let mut on_device = of_backward::OnDevice::new(&gpu.stream, &prepared);
        let mut run = || on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
        let first = run();
        first.check_written().unwrap_or_else(|why| panic!("{case}: {why}"));
        assert!(prepared.judge(&first).passed(), "{case}: {}", prepared.judge(&first));
        // It has the same bits in every run, also where the pass is not deterministic.
        for number in 1..Grid::from_env().pick(2, 5) {
            assert!(of_backward::same_sums(&first, &run()), "{case}: run {number} gave other bits");
        }
    }
}

/// A bias whose queries or batch entries are none has a gradient all the same: 0.
#[test]
fn no_rows_give_a_gradient_of_zero() {
    let Some(gpu) = Gpu::open("no_rows_give_a_gradient_of_zero") else { return };
    for (batch, seqlen_q, seqlen_kv) in [(2, 0, 100), (2, 0, 0), (0, 100, 100), (2, 100, 0)] {
        for (bias, packs) in ["f32:h", "bf16", "f16:hq"].into_iter().flat_map(|bias| [(bias, false), (bias, true)]) {
            let case = Case::new(seqlen_q, seqlen_kv, 64, Mask::Full).heads(batch, 4, 2).bias(bias.parse().unwrap());
            let kind = Kind { packed: [packs; 2], ..Kind::default() };
            let case = Case { packing: Packing::random(kind, batch, [seqlen_q, seqlen_kv], 1), seed: 7, ..case };
            let prepared = backward::Prepared::<bf16>::new(&case);
            let plan = prepared.problem.plan(&Device::Cuda(gpu.device.clone())).unwrap();
            let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
            let mut on_device = of_backward::OnDevice::new(&gpu.stream, &prepared);
            let outputs = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
            outputs.check_written().unwrap_or_else(|why| panic!("{case}: {why}"));
            let zeros = outputs.d_bias.as_ref().map(BiasImage::values).expect("a gradient");
            assert!(zeros.iter().all(|&x| x == 0.0), "{case}");
        }
    }
}

/// The library's own choice takes a bias with every mask, or says by name what it lacks: in the backward, a cap, and head
/// dims above 128.
#[test]
fn a_problem_with_a_bias_has_a_plan_or_a_name() {
    let Some(gpu) = Gpu::open("a_problem_with_a_bias_has_a_plan_or_a_name") else { return };
    let device = Device::Cuda(gpu.device.clone());
    let (mut planned, mut named) = (0, 0);
    for case in cases(Grid::Full) {
        let problem = case.problem(DType::BF16);
        let backward = hopper_attention::BackwardProblem::builder(&problem).d_bias(true).build().unwrap();
        let wide = case.dims.head_dim_qk.max(case.dims.head_dim_vo) > 128;
        for (planned_as, lacks) in
            [(problem.plan(&device).map(drop), false), (backward.plan(&device).map(drop), case.softcap != 0.0 || wide)]
        {
            match planned_as {
                Ok(()) => planned += 1,
                Err(Error::Unsupported { wanted, .. }) => {
                    let by_name =
                        ["softcap and a bias together", "head_dim_qk"].iter().any(|name| wanted.starts_with(name));
                    assert!(lacks && by_name, "{problem}: {wanted}");
                    named += 1;
                }
                Err(error) => panic!("{problem}: {error}"),
            }
        }
    }
    assert!(planned > named && named > 0, "{planned} and {named}");
}
