//! Descale factors that are no positive numbers: what docs/fp8.md says of them.

use hopper_attention::internal::plan_with_shares;
use hopper_attention::{DType, ForwardPlan, ForwardProblem, KernelInfo, Mask, MaskClass, Scaling, Workspace, bf16};
use hopper_attention_tests::data::Input;
use hopper_attention_tests::fp8::{Operands, for_row, forget_dust};
use hopper_attention_tests::gpu::Gpu;
use hopper_attention_tests::gpu::fp8::OnDevice;
use hopper_attention_tests::problems::Case;

const WORKSPACE_BYTES: usize = 1 << 12;
const QUERIES: usize = 300;
const KEYS: usize = 420;
/// Rows that share a factor.
const BLOCK: usize = 128;

/// A mask that a row computes. Some blocks of keys are hidden from some queries.
fn case(row: &KernelInfo) -> Case {
    let mask = match row.mask() {
        MaskClass::Full => Mask::Full,
        MaskClass::Causal => Mask::causal(),
        _ => Mask::window(Some(70), Some(3)),
    };
    let case = Case::new(QUERIES, KEYS, row.head_dim_qk(), mask).head_dim_vo(row.head_dim_vo()).heads(1, 4, 2);
    if row.needs_modifiers() { case.softcap(2.0) } else { case }
}

/// Operands that are fine, of the problem that a row is for. A power of two moves from the factors of K to those of Q, so that a
/// large factor of K makes a product which no f32 holds.
fn operands(row: &KernelInfo) -> Operands {
    let case = case(row);
    let problem = case.options(DType::E4M3).lse(true).scaling(Scaling::PerBlock).build().unwrap();
    let operands = Operands::of_case(&case, &for_row(problem, row), None);
    operands.with_factors_times(Input::Q, (1 << 20) as f32).with_factors_times(Input::K, 1.0 / (1 << 20) as f32)
}

/// Plans of each row: of whole tiles, and where they can be shared, also with 2, 3 and 8 shares. (There are four blocks of keys.)
fn plans(gpu: &Gpu) -> Vec<(KernelInfo, usize)> {
    let shares =
        |row: &KernelInfo| [1, 2, 3, 8].into_iter().filter(|&shares| shares <= row.most_shares()).collect::<Vec<_>>();
    gpu.all_fp8_rows().into_iter().flat_map(|row| shares(&row).into_iter().map(move |shares| (row, shares))).collect()
}

fn planned(gpu: &Gpu, problem: &ForwardProblem, row: &KernelInfo, shares: usize) -> ForwardPlan {
    plan_with_shares(problem, &gpu.device, row, shares).unwrap()
}

/// A factor that is negative, infinite or NaN makes NaN of O of the rows that keep a key of its block, and of their LSE if it is of
/// Q or K. So does one of K whose product with Q's is too large for f32. None has an effect on other rows.
#[test]
fn a_bad_factor_makes_nan_of_its_rows_alone() {
    let Some(gpu) = Gpu::open("a_bad_factor_makes_nan_of_its_rows_alone (e4m3)") else { return };
    let mut workspace = Workspace::alloc(&gpu.lane(), WORKSPACE_BYTES).unwrap();
    let (mut spoilt_rows, mut other_rows, mut wrong) = (0, 0, Vec::new());
    for (row, shares) in plans(&gpu) {
        let clean = operands(&row);
        let problem = clean.problem().clone();
        let plan = planned(&gpu, &problem, &row, shares);
        let mut run = |operands: &Operands| {
            let on_device = OnDevice::new(&gpu.stream, operands);
            on_device.run::<bf16>(&gpu.stream, &mut workspace, &plan, None).unwrap().output(&problem)
        };
        let (clean_o, clean_lse) = run(&clean);
        let expected = clean.expected();
        for (input, block, factor) in [
            (Input::K, 3, f32::NAN),
            (Input::K, 1, f32::INFINITY),
            (Input::K, 3, 3e38),
            (Input::K, 2, -1e-7),
            (Input::V, 3, f32::NAN),
            (Input::V, 2, f32::INFINITY),
            (Input::V, 3, -1.0),
            (Input::Q, 1, f32::NAN),
            (Input::Q, 0, f32::NEG_INFINITY),
            (Input::Q, 2, -3.0),
        ] {
            let spoilt = |query: usize, head: usize| {
                let keeps = |key| problem.mask().keep(query, key, QUERIES, KEYS);
                match input {
                    Input::Q => head / 2 == 1 && query / BLOCK == block,
                    _ => head / 2 == 1 && (block * BLOCK..KEYS.min((block + 1) * BLOCK)).any(keeps),
                }
            };
            // Heads of Q share the factors of their key head, or have their own.
            let heads: &[usize] = if input == Input::Q && problem.descale_q_shape()[1] == 4 { &[2, 3] } else { &[1] };
            let bad = heads.iter().fold(clean.clone(), |bad, &head| bad.with_factor(input, [0, head, block], factor));
            let (mut o, mut lse) = run(&bad);
            for (query, head) in (0..QUERIES).flat_map(|query| (0..4).map(move |head| (query, head))) {
                if !spoilt(query, head) {
                    other_rows += 1;
                    continue;
                }
                spoilt_rows += 1;
                let at = head * QUERIES + query;
                let numbers = o.row(0, query, head).iter().filter(|x| !x.is_nan()).count();
                if numbers > 0 || lse[at].is_nan() != (input != Input::V) {
                    let place = format!("{input:?} {block} {factor}, query {query}, head {head}");
                    wrong.push(format!("{plan}: {place}: {numbers} are not NaN, LSE {}", lse[at]));
                }
                o.row_mut(0, query, head).copy_from_slice(clean_o.row(0, query, head));
                lse[at] = clean_lse[at];
            }
            let report = expected.check(&o, Some(&lse)).unwrap();
            if !report.passed() {
                wrong.push(format!("{plan}: {input:?} {block} {factor}: {report}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} are wrong; the first:\n{}", wrong.len(), wrong[..wrong.len().min(5)].join("\n"));
    assert!(spoilt_rows > 0 && other_rows > 0, "rows spoilt {spoilt_rows}, others {other_rows}");
}

/// A factor of 0 makes zeros of its block, and so does one of -0, whatever the mask.
#[test]
fn factors_of_zero_make_zeros() {
    let Some(gpu) = Gpu::open("factors_of_zero_make_zeros (e4m3)") else { return };
    let mut workspace = Workspace::alloc(&gpu.lane(), WORKSPACE_BYTES).unwrap();
    let mut wrong = Vec::new();
    for (row, shares) in plans(&gpu) {
        let clean = operands(&row);
        let plan = planned(&gpu, clean.problem(), &row, shares);
        let mut check = |what: &str, operands: &Operands| {
            let on_device = OnDevice::new(&gpu.stream, operands);
            let written = on_device.run::<bf16>(&gpu.stream, &mut workspace, &plan, None).unwrap();
            let (mut o, lse) = written.output(operands.problem());
            forget_dust(&mut o);
            let report = operands.expected().check(&o, Some(&lse)).unwrap();
            if !report.passed() {
                wrong.push(format!("{plan}: {what}: {report}"));
            }
        };
        for zero in [0.0, -0.0] {
            for (input, block) in [(Input::Q, 1), (Input::K, 0), (Input::K, 3), (Input::V, 0), (Input::V, 3)] {
                let operands = clean.clone().with_factor(input, [0, 1, block], zero);
                check(&format!("{zero:?} for {input:?}, block {block}"), &operands);
            }
            check(&format!("{zero:?} for all of V"), &clean.clone().with_factors_times(Input::V, zero));
        }
    }
    assert!(wrong.is_empty(), "{} are wrong; the first:\n{}", wrong.len(), wrong[..wrong.len().min(5)].join("\n"));
}
