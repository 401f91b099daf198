//! Capped scores on a GPU: every row, dense and packed, both passes, and garbage under masks.

use hopper_attention::{KernelInfo, MaskClass};
use hopper_attention_tests::case::random::CAPS;
use hopper_attention_tests::data::{Garbage, Input, Values};
use hopper_attention_tests::gpu::Gpu;
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::softcap::{cases, changing_cases, packed_cases};

use crate::by_type::{BACKWARD, FORWARD, fitting, judged, judged_backward, modifying, planned_or_named, take};
use crate::e4m3::take_e4m3;
use crate::packed::packing_rows;
use crate::{mask_of, with_dtype};

/// The rows that compute some capped problem.
fn capping(gpu: &Gpu, rows: Vec<KernelInfo>, backward: bool) -> Vec<KernelInfo> {
    modifying(gpu, rows, backward, |options| options.softcap(50.0))
}

#[test]
fn every_row_takes_a_softcap() {
    let Some(gpu) = Gpu::open("every_row_takes_a_softcap") else { return };
    let rows = capping(&gpu, gpu.modified_rows(), false);
    take(&gpu, &rows, &cases(Grid::from_env()), "forward with softcap", FORWARD);
}

/// A kernel expects of a block what it has seen in the one before, and computes it again where that was wrong.
#[test]
fn scores_may_change_from_block_to_block() {
    let Some(gpu) = Gpu::open("scores_may_change_from_block_to_block") else { return };
    let rows = capping(&gpu, gpu.modified_rows(), false);
    // Twice, as half of them are f16.
    let cases: Vec<_> = changing_cases().into_iter().flat_map(|case| [case.clone(), case]).collect();
    take(&gpu, &rows, &cases, "forward with a softcap and scores that change", FORWARD);
}

#[test]
fn every_packing_row_takes_a_softcap() {
    let Some(gpu) = Gpu::open("every_packing_row_takes_a_softcap") else { return };
    let rows = packing_rows(capping(&gpu, gpu.modified_rows(), false));
    take(&gpu, &rows, &packed_cases(Grid::from_env()), "packed forward with softcap", FORWARD);
}

#[test]
fn every_backward_row_takes_a_softcap() {
    let Some(gpu) = Gpu::open("every_backward_row_takes_a_softcap") else { return };
    let rows = capping(&gpu, gpu.modified_backward_rows(), true);
    let cases = fitting(&rows, cases(Grid::from_env()));
    take(&gpu, &rows, &cases, "backward with softcap", BACKWARD);
}

#[test]
fn every_packing_backward_row_takes_a_softcap() {
    let Some(gpu) = Gpu::open("every_packing_backward_row_takes_a_softcap") else { return };
    let rows = packing_rows(capping(&gpu, gpu.modified_backward_rows(), true));
    let cases = fitting(&rows, packed_cases(Grid::from_env()));
    take(&gpu, &rows, &cases, "packed backward with softcap", BACKWARD);
}

#[test]
fn every_e4m3_row_takes_a_softcap() {
    let Some(gpu) = Gpu::open("every_e4m3_row_takes_a_softcap") else { return };
    let rows: Vec<_> = gpu.all_fp8_rows().into_iter().filter(|row| row.needs_modifiers()).collect();
    let grid = Grid::from_env();
    take_e4m3(&gpu, &rows, &[cases(grid), packed_cases(grid)].concat(), "e4m3 forward with softcap", |_, _| Some(1));
}

/// NaN, infinity and the largest numbers, in K or V of keys that the mask hides, and in rows of Q and dO, which have results of their own
/// alone.
#[test]
fn garbage_under_the_mask_reaches_no_capped_row() {
    let Some(gpu) = Gpu::open("garbage_under_the_mask_reaches_no_capped_row") else { return };
    for row in capping(&gpu, gpu.modified_rows(), false).into_iter().filter(|row| row.mask() != MaskClass::Full) {
        // (No forward reads dO.)
        let cases = hidden(&row).filter(|case| !matches!(case.values, Values::Garbage(Input::DO, _)));
        cases.for_each(|case| with_dtype!(row.dtype(), judged(&gpu, &row, &case)));
    }
    for row in capping(&gpu, gpu.modified_backward_rows(), true).into_iter().filter(|row| row.mask() != MaskClass::Full)
    {
        hidden(&row).for_each(|case| with_dtype!(row.dtype(), judged_backward(&gpu, &row, &case)));
    }
}

fn hidden(row: &KernelInfo) -> impl Iterator<Item = Case> + use<> {
    let case = Case::new(197, 290, row.head_dim_qk(), mask_of(row.mask())).heads(2, 6, 2);
    let case = case.head_dim_vo(row.head_dim_vo());
    Garbage::ALL.into_iter().zip(CAPS.into_iter().cycle()).flat_map(move |(garbage, cap)| {
        let case = case.clone();
        Input::ALL.map(|input| Case { values: Values::Garbage(input, garbage), ..case.clone().softcap(cap) })
    })
}

/// The library's own choice takes a cap, or says by name what it lacks.
#[test]
fn a_capped_problem_has_a_plan_or_a_name() {
    let Some(gpu) = Gpu::open("a_capped_problem_has_a_plan_or_a_name") else { return };
    planned_or_named(&gpu, &cases(Grid::Full));
}
