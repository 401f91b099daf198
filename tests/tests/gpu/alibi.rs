//! ALiBi and maximum logits on a GPU: every row, dense and packed, both passes, long distances, garbage under the mask, outputs that
//! no query writes.

use hopper_attention::reference::Tensor;
use hopper_attention::{AlibiSlopes, Arch, BackwardProblem, Corner, DType, Device, KernelInfo, Mask, MaskClass};
use hopper_attention_tests::alibi::{Alibi, cases, empty_sequences, garbage_in_scores, packed_cases};
use hopper_attention_tests::data::{Garbage, Input, Values};
use hopper_attention_tests::gpu::Gpu;
use hopper_attention_tests::problems::{Case, Grid};

use crate::by_type::{
    BACKWARD, FORWARD, fitting, judged, judged_backward, judged_backward_edited, judged_edited, modifying,
    planned_or_named, take,
};
use crate::packed::packing_rows;
use crate::{mask_of, with_dtype};

/// The rows that compute some problem with ALiBi.
fn biasing(gpu: &Gpu, rows: Vec<KernelInfo>, backward: bool) -> Vec<KernelInfo> {
    modifying(gpu, rows, backward, |options| options.alibi(AlibiSlopes::PerHead).max_logits(!backward))
}

#[test]
fn every_row_takes_slopes_and_maximum_logits() {
    let Some(gpu) = Gpu::open("every_row_takes_slopes_and_maximum_logits") else { return };
    let rows = biasing(&gpu, gpu.modified_rows(), false);
    take(&gpu, &rows, &cases(Grid::from_env()), "forward with ALiBi", FORWARD);
}

#[test]
fn every_packing_row_takes_slopes_and_maximum_logits() {
    let Some(gpu) = Gpu::open("every_packing_row_takes_slopes_and_maximum_logits") else { return };
    let rows = packing_rows(biasing(&gpu, gpu.modified_rows(), false));
    take(&gpu, &rows, &packed_cases(Grid::from_env()), "packed forward with ALiBi", FORWARD);
}

/// Gradients have nothing to do with maximum logits.
fn with_slopes(rows: &[KernelInfo], cases: Vec<Case>) -> Vec<Case> {
    let cases = fitting(rows, cases).into_iter().map(|case| case.max_logits(false));
    cases.filter(|case| !case.alibi.is_none()).collect()
}

#[test]
fn every_backward_row_takes_slopes() {
    let Some(gpu) = Gpu::open("every_backward_row_takes_slopes") else { return };
    let rows = biasing(&gpu, gpu.modified_backward_rows(), true);
    let cases = with_slopes(&rows, cases(Grid::from_env()));
    take(&gpu, &rows, &cases, "backward with ALiBi", BACKWARD);
}

#[test]
fn every_packing_backward_row_takes_slopes() {
    let Some(gpu) = Gpu::open("every_packing_backward_row_takes_slopes") else { return };
    let rows = packing_rows(biasing(&gpu, gpu.modified_backward_rows(), true));
    let cases = with_slopes(&rows, packed_cases(Grid::from_env()));
    take(&gpu, &rows, &cases, "packed backward with ALiBi", BACKWARD);
}

/// The rows of one head dim, which is enough where head dims make no difference.
fn narrow(rows: Vec<KernelInfo>) -> impl Iterator<Item = KernelInfo> {
    rows.into_iter().filter(|row| row.head_dim_qk() == 64 && row.head_dim_vo() == 64)
}

/// Few queries that are far from most keys, and queries that are far from all keys that they keep. So the biases are some thousands,
/// and the LSE is right to its last bits.
#[test]
fn long_distances_lose_no_bits() {
    let Some(gpu) = Gpu::open("long_distances_lose_no_bits") else { return };
    let far = Mask::Window { left: None, right: Some(0), corner: Corner::TopLeft };
    let sizes = [
        (3, 131_072, Mask::Full),
        (3, 131_072, Mask::causal()),
        (3, 131_072, Mask::window(Some(130_000), Some(0))),
        // The last queries stand thousands of keys behind the last key.
        (9000, 70, far),
        (9000, 70, Mask::Full),
    ];
    let mut cases = Vec::new();
    for (dim, (seqlen_q, seqlen_kv, mask)) in [64, 128].into_iter().flat_map(|dim| sizes.map(|size| (dim, size))) {
        for alibi in [Alibi::Standard, Alibi::Negative] {
            let case = Case::new(seqlen_q, seqlen_kv, dim, mask).heads(1, 4, 2).alibi(alibi);
            // Twice, as half of them are f16. Without maximum logits it is the kernel for ALiBi alone, where a row has one.
            cases.extend([true, true, false, false].map(|looks| case.clone().max_logits(looks)));
        }
    }
    let equal = |row: &KernelInfo| row.head_dim_qk() == row.head_dim_vo() && row.head_dim_qk() <= 128;
    let rows: Vec<_> = biasing(&gpu, gpu.modified_rows(), false).into_iter().filter(equal).collect();
    take(&gpu, &rows, &cases, "forward with ALiBi over long distances", FORWARD);
    let far = [(300, 9000, Mask::Full), (300, 9000, Mask::causal()), (9000, 70, Mask::Full)];
    let mut cases = Vec::new();
    for (dim, (seqlen_q, seqlen_kv, mask)) in [64, 128].into_iter().flat_map(|dim| far.map(|size| (dim, size))) {
        for alibi in [Alibi::Standard, Alibi::Negative] {
            let case = Case::new(seqlen_q, seqlen_kv, dim, mask).heads(1, 4, 2).alibi(alibi);
            cases.extend([case.clone(), case]);
        }
    }
    let rows = biasing(&gpu, gpu.modified_backward_rows(), true).into_iter().filter(equal).collect::<Vec<_>>();
    take(&gpu, &rows, &cases, "backward with ALiBi over long distances", BACKWARD);
}

/// Softmax scales so large or small that no f32 holds a slope divided by them. Queries of zeros have scores of 0, and weights from the
/// slopes alone. With the small scales so do those of normal numbers.
#[test]
fn extreme_scales_keep_the_slopes() {
    let Some(gpu) = Gpu::open("extreme_scales_keep_the_slopes") else { return };
    let zeros = |input: Input, tensor: &mut Tensor| {
        if input == Input::Q {
            let [_, queries, heads, _] = tensor.shape();
            (0..queries).for_each(|query| (0..heads).for_each(|head| tensor.row_mut(0, query, head).fill(0.0)));
        }
    };
    let cases = |row: &KernelInfo| {
        let case = Case::new(200, 290, row.head_dim_qk(), mask_of(row.mask())).head_dim_vo(row.head_dim_vo());
        let case = case.heads(1, 6, 2).alibi(Alibi::Mixed);
        // (2^91 and 2^-91 are the first that a kernel for ALiBi alone is not given.)
        [-100, -91, -90, 90, 91, 100]
            .map(|exponent| (exponent, Case { scale: Some(2.0_f32.powi(exponent)), ..case.clone() }))
    };
    for row in biasing(&gpu, gpu.modified_rows(), false) {
        for (exponent, case) in cases(&row) {
            with_dtype!(row.dtype(), judged_edited(&gpu, &row, &case, zeros));
            if exponent < 0 {
                with_dtype!(row.dtype(), judged(&gpu, &row, &case));
            }
        }
    }
    // (sm80 kernels make dS of the rounded P, so that queries with equal weights share an error. They have none for ALiBi alone.)
    let hopper = |row: &KernelInfo| row.arch() == Arch::Sm90;
    for row in biasing(&gpu, gpu.modified_backward_rows(), true).into_iter().filter(hopper) {
        for (exponent, case) in cases(&row) {
            with_dtype!(row.dtype(), judged_backward_edited(&gpu, &row, &case, zeros));
            if exponent < 0 {
                with_dtype!(row.dtype(), judged_backward(&gpu, &row, &case));
            }
        }
    }
}

#[test]
fn garbage_under_the_mask_reaches_no_biased_row() {
    let Some(gpu) = Gpu::open("garbage_under_the_mask_reaches_no_biased_row") else { return };
    for row in biasing(&gpu, gpu.modified_rows(), false).into_iter().filter(|row| row.mask() != MaskClass::Full) {
        hidden(&row).for_each(|case| with_dtype!(row.dtype(), judged(&gpu, &row, &case)));
    }
    for row in biasing(&gpu, gpu.modified_backward_rows(), true).into_iter().filter(|row| row.mask() != MaskClass::Full)
    {
        hidden(&row).for_each(|case| with_dtype!(row.dtype(), judged_backward(&gpu, &row, &case.max_logits(false))));
    }
}

/// With maximum logits and without: then it is the kernel for ALiBi alone, where a row has one.
fn hidden(row: &KernelInfo) -> impl Iterator<Item = Case> + use<> {
    let case = Case::new(197, 290, row.head_dim_qk(), mask_of(row.mask())).heads(2, 6, 2);
    let case = case.head_dim_vo(row.head_dim_vo());
    let kinds = Alibi::ALL.into_iter().filter(|kind| !kind.is_none());
    Garbage::ALL.into_iter().zip(kinds.cycle()).flat_map(move |(garbage, alibi)| {
        let case = case.clone().alibi(alibi);
        [(Input::K, true), (Input::K, false), (Input::V, true), (Input::V, false)]
            .map(|(input, looks)| Case { values: Values::Garbage(input, garbage), ..case.clone().max_logits(looks) })
    })
}

/// Maximum logits are -inf where a head has no keys, or no queries.
#[test]
fn maximum_logits_of_nothing() {
    let Some(gpu) = Gpu::open("maximum_logits_of_nothing") else { return };
    for row in narrow(biasing(&gpu, gpu.modified_rows(), false)).filter(|row| row.mask() == MaskClass::Full) {
        for (batch, seqlen_q, seqlen_kv) in [(2, 40, 0), (2, 0, 40), (0, 40, 40)] {
            let case = Case::new(seqlen_q, seqlen_kv, 64, Mask::Full).heads(batch, 4, 2).max_logits(true);
            with_dtype!(row.dtype(), judged(&gpu, &row, &case));
            with_dtype!(row.dtype(), judged(&gpu, &row, &case.alibi(Alibi::Mixed)));
        }
    }
}

/// The same of sequences without queries: the launch of a packed forward has no kernel to start, or one without tiles.
#[test]
fn maximum_logits_of_empty_sequences() {
    let Some(gpu) = Gpu::open("maximum_logits_of_empty_sequences") else { return };
    let rows = packing_rows(biasing(&gpu, gpu.modified_rows(), false));
    let mut taken = 0;
    for row in narrow(rows).filter(|row| row.mask() == MaskClass::Full) {
        empty_sequences(64).iter().for_each(|case| with_dtype!(row.dtype(), judged(&gpu, &row, case)));
        taken += 1;
    }
    assert!(taken > 0);
}

/// Scores that are infinite or overflow count, and NaN does not. Where a sum overflows in one order alone, what each order gives
/// is right.
#[test]
fn maximum_logits_of_garbage() {
    let Some(gpu) = Gpu::open("maximum_logits_of_garbage") else { return };
    for row in narrow(biasing(&gpu, gpu.modified_rows(), false)) {
        let cases = garbage_in_scores(mask_of(row.mask()), 64);
        cases.iter().for_each(|case| with_dtype!(row.dtype(), judged(&gpu, &row, case)));
    }
}

/// The library's own choice takes slopes, or says by name what it lacks.
#[test]
fn a_biased_problem_has_a_plan_or_a_name() {
    let Some(gpu) = Gpu::open("a_biased_problem_has_a_plan_or_a_name") else { return };
    planned_or_named(&gpu, &cases(Grid::Full));
}

/// The sm80 backward has registers for one of softcap and ALiBi.
#[test]
fn sm80_gradients_with_a_cap_and_slopes_are_refused_by_name() {
    let Some(gpu) = Gpu::open("sm80_gradients_with_a_cap_and_slopes_are_refused_by_name") else { return };
    let device = Device::Cuda(gpu.device.clone());
    let options = Case::new(200, 200, 64, Mask::causal()).alibi(Alibi::Standard).options(DType::BF16);
    let planned = |options: hopper_attention::ForwardProblemBuilder, arch| {
        let problem = options.arch(arch).build().unwrap();
        problem.plan(&device).unwrap();
        BackwardProblem::builder(&problem).build().unwrap().plan(&device).map(drop)
    };
    planned(options.clone(), Arch::Sm80).unwrap();
    planned(options.clone().softcap(30.0), Arch::Sm90).unwrap();
    let text = planned(options.softcap(30.0), Arch::Sm80).unwrap_err().to_string();
    assert!(text.starts_with("unsupported: softcap and alibi together with backward sm80 kernels for bf16"), "{text}");
}
