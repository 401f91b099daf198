//! Dropout on a GPU: every row that takes it, dense and packed, both passes, and garbage in what is dropped.

use hopper_attention::{Arch, DType, Device, Dropout, KernelInfo};
use hopper_attention_tests::data::{Garbage, Input, Values};
use hopper_attention_tests::dropout::{cases, packed_cases};
use hopper_attention_tests::gpu::Gpu;
use hopper_attention_tests::problems::{Case, Grid};

use crate::by_type::{BACKWARD, FORWARD, fitting, judged, judged_backward, modifying, take};
use crate::packed::packing_rows;
use crate::{mask_of, with_dtype};

/// The rows that take dropout.
fn dropping(gpu: &Gpu, rows: Vec<KernelInfo>, backward: bool) -> Vec<KernelInfo> {
    modifying(gpu, rows, backward, |options| options.dropout(Some(Dropout::new(0.5).unwrap())))
}

/// The same with sequences of lengths that the device knows.
fn packed_dropping(gpu: &Gpu, rows: Vec<KernelInfo>, backward: bool) -> Vec<KernelInfo> {
    packing_rows(dropping(gpu, rows, backward)).into_iter().filter(|row| row.drops(true)).collect()
}

#[test]
fn every_row_drops() {
    let Some(gpu) = Gpu::open("every_row_drops") else { return };
    let rows = dropping(&gpu, gpu.modified_rows(), false);
    take(&gpu, &rows, &cases(Grid::from_env()), "forward with dropout", FORWARD);
}

#[test]
fn every_packing_row_drops() {
    let Some(gpu) = Gpu::open("every_packing_row_drops") else { return };
    let rows = packed_dropping(&gpu, gpu.modified_rows(), false);
    take(&gpu, &rows, &packed_cases(Grid::from_env()), "packed forward with dropout", FORWARD);
}

#[test]
fn every_backward_row_drops() {
    let Some(gpu) = Gpu::open("every_backward_row_drops") else { return };
    let rows = dropping(&gpu, gpu.modified_backward_rows(), true);
    let cases = fitting(&rows, cases(Grid::from_env()));
    take(&gpu, &rows, &cases, "backward with dropout", BACKWARD);
}

#[test]
fn every_packing_backward_row_drops() {
    let Some(gpu) = Gpu::open("every_packing_backward_row_drops") else { return };
    let rows = packed_dropping(&gpu, gpu.modified_backward_rows(), true);
    let cases = fitting(&rows, packed_cases(Grid::from_env()));
    take(&gpu, &rows, &cases, "packed backward with dropout", BACKWARD);
}

/// NaN, infinity and the largest numbers reach the rows that do not drop them, and no others.
#[test]
fn garbage_reaches_no_row_that_drops_it() {
    let Some(gpu) = Gpu::open("garbage_reaches_no_row_that_drops_it") else { return };
    for row in dropping(&gpu, gpu.modified_rows(), false) {
        for input in [Input::K, Input::V] {
            spoiled(&row, input).for_each(|case| with_dtype!(row.dtype(), judged(&gpu, &row, &case)));
        }
    }
    for row in dropping(&gpu, gpu.modified_backward_rows(), true) {
        for input in Input::ALL {
            spoiled(&row, input).for_each(|case| with_dtype!(row.dtype(), judged_backward(&gpu, &row, &case)));
        }
    }
}

fn spoiled(row: &KernelInfo, input: Input) -> impl Iterator<Item = Case> + use<> {
    let case = Case::new(197, 290, row.head_dim_qk(), mask_of(row.mask())).heads(2, 6, 2);
    let case = case.head_dim_vo(row.head_dim_vo());
    // And where no pair stays: what spoils dV then does not spoil dK. Under a causal mask four of the queries have no key.
    let (qk, vo) = (row.head_dim_qk(), row.head_dim_vo());
    let few = Case::new(5, 1, qk, mask_of(row.mask())).head_dim_vo(vo).heads(2, 6, 2);
    Garbage::ALL.into_iter().zip([0.5, 0.9, 0.1, 0.5]).flat_map(move |(garbage, p)| {
        [(&case, p), (&few, 0.999)].map(|(case, p)| {
            let case = Case { values: Values::Garbage(input, garbage), ..case.clone() };
            case.dropout(p)
        })
    })
}

/// The library's own choice takes dropout. Where no sm90 kernel does (windows above head dim 128, packed ones above 64), an sm80
/// kernel runs. Who asks for sm90 is told what it lacks.
#[test]
fn every_problem_with_dropout_has_a_plan() {
    let Some(gpu) = Gpu::open("every_problem_with_dropout_has_a_plan") else { return };
    let device = Device::Cuda(gpu.device.clone());
    let mut by_older = 0;
    for case in [cases(Grid::Full), packed_cases(Grid::Full)].concat() {
        let problem = case.problem(DType::BF16);
        let plan = problem.plan(&device).unwrap_or_else(|error| panic!("{problem}: {error}"));
        if plan.kernel().unwrap().arch() == Arch::Sm80 {
            by_older += 1;
            let asks = problem.to_builder().arch(Arch::Sm90).build().unwrap();
            let text = asks.plan(&device).unwrap_err().to_string();
            assert!(text.starts_with("unsupported: dropout with sm90 kernels"), "{problem}: {text}");
        }
    }
    assert!(by_older > 0);
}
