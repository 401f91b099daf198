//! Attention sinks on a GPU: every row, dense and packed, both passes, FP8, tiles that CTAs share.

use hopper_attention::internal::plan_with_splits;
use hopper_attention::{Device, KernelInfo, Mask, MaskClass, Stream, Workspace, bf16};
use hopper_attention_tests::backward;
use hopper_attention_tests::blocks::Blocks;
use hopper_attention_tests::data::{Garbage, Image, Input, Poison, Values};
use hopper_attention_tests::gpu::{Gpu, OnDevice, backward as of_backward, planned, same_bits};
use hopper_attention_tests::packing::{Kind, Packing};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::Prepared;
use hopper_attention_tests::say;
use hopper_attention_tests::sinks::{Sinks, cases, packed_cases};

use crate::by_type::{BACKWARD, FORWARD, judged, judged_backward, take};
use crate::e4m3::take_e4m3;
use crate::packed::packing_rows;
use crate::{mask_of, with_dtype};

/// What stands beside garbage in turn.
const BESIDE_GARBAGE: [Sinks; 4] = [Sinks::Normal, Sinks::Ten, Sinks::Large, Sinks::Mixed];

#[test]
fn every_row_takes_sinks() {
    let Some(gpu) = Gpu::open("every_row_takes_sinks") else { return };
    take(&gpu, &gpu.rows(), &cases(Grid::from_env()), "forward with sinks", FORWARD);
}

#[test]
fn every_packing_row_takes_sinks() {
    let Some(gpu) = Gpu::open("every_packing_row_takes_sinks") else { return };
    let rows = packing_rows(gpu.rows());
    take(&gpu, &rows, &packed_cases(Grid::from_env()), "packed forward with sinks", FORWARD);
}

#[test]
fn every_backward_row_takes_sinks() {
    let Some(gpu) = Gpu::open("every_backward_row_takes_sinks") else { return };
    take(&gpu, &gpu.backward_rows(), &cases(Grid::from_env()), "backward with sinks", BACKWARD);
}

#[test]
fn every_packing_backward_row_takes_sinks() {
    let Some(gpu) = Gpu::open("every_packing_backward_row_takes_sinks") else { return };
    let rows = packing_rows(gpu.backward_rows());
    take(&gpu, &rows, &packed_cases(Grid::from_env()), "packed backward with sinks", BACKWARD);
}

#[test]
fn every_e4m3_row_takes_sinks() {
    let Some(gpu) = Gpu::open("every_e4m3_row_takes_sinks") else { return };
    let grid = Grid::from_env();
    // The last one has tiles that are split, where the row splits. It is for those rows alone.
    let mut split = Case::new(1111, 1024, 128, Mask::Full).heads(1, 16, 4);
    split.sinks = Sinks::Mixed;
    let all = [cases(grid), packed_cases(grid), vec![split]].concat();
    let last = all.len() - 1;
    // Where tiles can be shared they are, by 1 to 8 CTAs in turn. (Those that are split are not shared.)
    let shares = |turn, row: &KernelInfo| match turn == last {
        true => (row.split_bytes() > 0).then_some(1),
        false => Some(1 + turn % row.most_shares()),
    };
    take_e4m3(&gpu, &gpu.fp8_rows(), &all, "e4m3 forward with sinks", shares);
}

/// Where CTAs share a tile's keys, the sink is added once, however many there are.
#[test]
fn shares_add_a_sink_once() {
    let Some(gpu) = Gpu::open("shares_add_a_sink_once") else { return };
    for row in gpu.rows().into_iter().filter(|row| row.most_shares() > 1) {
        with_dtype!(row.dtype(), shared(&gpu, &row));
    }
}

fn shared<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    for sinks in Sinks::ALL {
        let mut case = Case::new(64, 1024, row.head_dim_qk(), mask_of(row.mask())).heads(1, 6, 2);
        case.dims.head_dim_vo = row.head_dim_vo();
        case.sinks = sinks;
        let prepared = Prepared::<T>::new(&case);
        let mut on_device = OnDevice::new(&gpu.stream, &prepared);
        for (shares, splits) in (1..=row.most_shares()).map(|shares| (shares, 1)).chain([(2, 2), (2, 3)]) {
            let plan = plan_with_splits(&prepared.problem, &gpu.device, row, shares, splits).unwrap();
            let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
            let outputs = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
            let report = prepared.judge(&outputs);
            assert!(report.passed(), "{row}, {shares} shares, {splits} clusters, {case}: {report}");
        }
    }
}

/// What the mask hides is put right in rows with sinks, too: such elements of O are computed again, with the sink. Garbage in a row of Q or
/// dO spoils the results of that row alone.
#[test]
fn garbage_under_the_mask_reaches_no_row_with_a_sink() {
    let Some(gpu) = Gpu::open("garbage_under_the_mask_reaches_no_row_with_a_sink") else { return };
    for row in gpu.rows().into_iter().filter(|row| row.mask() != MaskClass::Full) {
        hidden(&row, &[Input::Q, Input::K, Input::V])
            .for_each(|case| with_dtype!(row.dtype(), judged(&gpu, &row, &case)));
    }
    for row in gpu.backward_rows().into_iter().filter(|row| row.mask() != MaskClass::Full) {
        hidden(&row, &Input::ALL).for_each(|case| with_dtype!(row.dtype(), judged_backward(&gpu, &row, &case)));
    }
    // The same where queries have no key, one kind of garbage a row: the oracle takes long.
    for (turn, row) in gpu.rows().into_iter().filter(|row| row.mask() != MaskClass::Full).enumerate() {
        with_dtype!(row.dtype(), judged(&gpu, &row, &without_keys(&row, Input::Q, turn)));
    }
    for (turn, row) in gpu.backward_rows().into_iter().filter(|row| row.mask() != MaskClass::Full).enumerate() {
        for input in [Input::Q, Input::DO] {
            with_dtype!(row.dtype(), judged_backward(&gpu, &row, &without_keys(&row, input, turn)));
        }
    }
}

/// A case with more queries than keys, and garbage in an input. With garbage in dO it would have some in dLSE, too.
/// dLSE is a part of the sink's gradient also in a query without keys. So there is no dLSE then.
fn without_keys(row: &KernelInfo, input: Input, turn: usize) -> Case {
    let case = Case::new(290, 197, row.head_dim_qk(), mask_of(row.mask())).heads(1, 6, 2);
    let (garbage, sinks) = (Garbage::ALL[turn % 4], BESIDE_GARBAGE[turn / 4 % 4]);
    let case = Case { values: Values::Garbage(input, garbage), sinks, lse: input != Input::DO, ..case };
    case.head_dim_vo(row.head_dim_vo())
}

fn hidden(row: &KernelInfo, inputs: &'static [Input]) -> impl Iterator<Item = Case> + use<> {
    let case = Case::new(197, 290, row.head_dim_qk(), mask_of(row.mask())).heads(2, 6, 2);
    let case = case.head_dim_vo(row.head_dim_vo());
    Garbage::ALL.into_iter().zip(BESIDE_GARBAGE).flat_map(move |(garbage, sinks)| {
        let case = case.clone();
        inputs.iter().map(move |&input| Case { sinks, values: Values::Garbage(input, garbage), ..case.clone() })
    })
}

/// A query without keys has an O' of 0 and an LSE' of the sink, whatever is stored. So garbage in its Q, dO and O
/// reaches no gradient: all are those of clean inputs, also that of the sink. The mask, an empty sequence, a bias or
/// lists take its keys.
#[test]
fn garbage_in_queries_without_keys_reaches_no_gradient() {
    let Some(gpu) = Gpu::open("garbage_in_queries_without_keys_reaches_no_gradient") else { return };
    // The oracle takes long. Rows of the same sizes and mask share it, and so does all garbage.
    let mut groups: Vec<(Case, Vec<KernelInfo>)> = Vec::new();
    let mut add = |row: KernelInfo, case: Case| {
        let is_same = |(of, rows): &&mut (Case, Vec<KernelInfo>)| *of == case && rows[0].dtype() == row.dtype();
        match groups.iter_mut().find(is_same) {
            Some((_, rows)) => rows.push(row),
            None => groups.push((case, vec![row])),
        }
    };
    for row in gpu.backward_rows() {
        if row.mask() != MaskClass::Full {
            add(row, more_queries(&row));
        }
        if row.packs() {
            add(row, more_packed_queries(&row));
        }
    }
    for row in gpu.modified_backward_rows().into_iter().filter(|row| row.mask() == MaskClass::Window) {
        add(row, more_queries(&row).softcap(15.0));
        if row.adds_bias(false) {
            add(row, more_queries(&row).bias("f32:hq:mask".parse().expect("a bias")));
        }
    }
    for row in gpu.listed_backward_rows() {
        let case = Case { mask: Mask::causal(), ..more_queries(&row) };
        add(row, case.blocks(Blocks::Striped));
    }
    let mut runs = 0;
    for (turn, (case, rows)) in groups.iter().enumerate() {
        let sinks = BESIDE_GARBAGE[turn % 4];
        let case = Case { sinks, lse: turn % 3 != 1, ..case.clone() };
        runs += with_dtype!(rows[0].dtype(), clean_gradients(&gpu, rows, &case));
    }
    say(&format!("garbage in queries without keys: {} cases, {runs} runs", groups.len()));
}

/// More queries than keys: the first ones have none.
fn more_queries(row: &KernelInfo) -> Case {
    Case::new(290, 150, row.head_dim_qk(), mask_of(row.mask())).head_dim_vo(row.head_dim_vo()).heads(1, 6, 2)
}

/// The same in packed sequences. One has no key at all.
fn more_packed_queries(row: &KernelInfo) -> Case {
    let case = Case::new(461, 172, row.head_dim_qk(), mask_of(row.mask())).head_dim_vo(row.head_dim_vo());
    let packing = Packing {
        cu_seqlens_q: Some(vec![0, 70, 360, 361, 461]),
        cu_seqlens_kv: Some(vec![0, 0, 110, 119, 172]),
        ..Packing::default()
    };
    Case { packing, ..case.heads(4, 6, 2) }
}

/// Runs a case with each kind of garbage, and judges it by what clean inputs give. Returns how many runs these were.
fn clean_gradients<T: Poison>(gpu: &Gpu, rows: &[KernelInfo], case: &Case) -> usize {
    // Without sinks the LSE of a query without keys is -inf.
    let bare = backward::Prepared::<T>::new(&Case { sinks: Sinks::None, ..case.clone() });
    let without_keys: Vec<bool> = bare.lse.values().into_iter().map(|lse| lse == f64::NEG_INFINITY).collect();
    assert!(without_keys.contains(&true) && without_keys.contains(&false), "{case}");
    let clean = backward::Prepared::<T>::new(case);
    let mut runs = 0;
    for row in rows {
        let plan = clean.problem.plan_with_row(&gpu.device, row);
        let Some(plan) = planned(plan, row, case) else {
            say(&format!("skipped: {row} does not take {case}"));
            continue;
        };
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        for garbage in Garbage::ALL {
            let mut prepared = clean.clone();
            for image in [&mut prepared.q, &mut prepared.d_o, &mut prepared.o] {
                spoil(image, &without_keys, garbage.of());
            }
            let mut on_device = of_backward::OnDevice::new(&gpu.stream, &prepared);
            let outputs = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
            let report = prepared.judge(&outputs);
            assert!(report.passed(), "{row}, {case}, {garbage:?} in queries without keys: {report}");
            runs += 1;
        }
    }
    runs
}

/// Fills the rows of some queries of some heads. `which`: `[batch, heads, seqlen]`.
fn spoil<T: Poison>(image: &mut Image<T, 4>, which: &[bool], with: T) {
    let [_, seqlen, heads, head_dim] = image.layout().shape();
    let mut elements = image.elements_of_rows(1, |_| true);
    for (i, row) in elements.chunks_exact_mut(head_dim).enumerate() {
        let (batch, query, head) = (i / heads / seqlen, i / heads % seqlen, i % heads);
        if which[(batch * heads + head) * seqlen + query] {
            row.fill(with);
        }
    }
    image.put_into_rows(1, |_| true, elements);
}

/// A sink of -inf changes no bit.
#[test]
fn a_sink_of_minus_infinity_changes_nothing() {
    let Some(gpu) = Gpu::open("a_sink_of_minus_infinity_changes_nothing") else { return };
    for row in gpu.rows() {
        with_dtype!(row.dtype(), nothing(&gpu, &row));
    }
}

fn nothing<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let mut case = Case::new(200, 300, row.head_dim_qk(), mask_of(row.mask())).heads(2, 4, 2);
    case.dims.head_dim_vo = row.head_dim_vo();
    let [with, without] = [Sinks::Nothing, Sinks::None].map(|sinks| {
        let prepared = Prepared::<T>::new(&Case { sinks, ..case.clone() });
        let plan = prepared.problem.plan_with_row(&gpu.device, row).unwrap();
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        OnDevice::new(&gpu.stream, &prepared).run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap()
    });
    assert!(same_bits(&with, &without), "{row}");
}

/// The gradient of the sinks has the same bits in every run, also where the table of sequences is in another order, and also
/// where the pass is not deterministic.
#[test]
fn the_gradient_of_sinks_repeats() {
    let Some(gpu) = Gpu::open("the_gradient_of_sinks_repeats") else { return };
    let both = Kind { packed: [true; 2], used: [false; 2], fill_gaps: false };
    let mut dense = Case::new(300, 300, 64, Mask::causal()).heads(3, 6, 2);
    dense.sinks = Sinks::Normal;
    let mut packed = Case::new(3000, 3000, 64, Mask::causal()).heads(90, 6, 2);
    packed.sinks = Sinks::Normal;
    packed.packing = Packing::random(both, 90, [3000; 2], 7);
    for case in [dense, packed] {
        let prepared = backward::Prepared::<bf16>::new(&case);
        let plan = prepared.problem.plan(&Device::Cuda(gpu.device.clone())).unwrap();
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        let mut on_device = of_backward::OnDevice::new(&gpu.stream, &prepared);
        let mut run = || on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
        let first = run();
        assert!(prepared.judge(&first).passed(), "{case}: {}", prepared.judge(&first));
        for number in 1..Grid::from_env().pick(5, 50) {
            assert!(of_backward::same_sums(&first, &run()), "{case}: run {number} gave other bits");
        }
    }
}

/// Without rows there is a gradient of the sinks all the same: 0.
#[test]
fn no_rows_give_a_gradient_of_zero() {
    let Some(gpu) = Gpu::open("no_rows_give_a_gradient_of_zero") else { return };
    for (batch, seqlen_q, seqlen_kv) in [(2, 0, 100), (2, 0, 0), (0, 100, 100), (2, 100, 0)] {
        let mut case = Case::new(seqlen_q, seqlen_kv, 64, Mask::Full).heads(batch, 4, 2);
        case.sinks = Sinks::Normal;
        let prepared = backward::Prepared::<bf16>::new(&case);
        let plan = prepared.problem.plan(&Device::Cuda(gpu.device.clone())).unwrap();
        let mut workspace = Workspace::alloc(&Stream::Cuda(gpu.stream.clone()), plan.workspace_bytes()).unwrap();
        let mut on_device = of_backward::OnDevice::new(&gpu.stream, &prepared);
        let outputs = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
        let report = prepared.judge(&outputs);
        assert!(report.passed(), "{case}: {report}");
        let zeros = outputs.d_sinks.unwrap().values().iter().all(|&x| x == 0.0);
        assert_eq!(zeros, batch * seqlen_q == 0, "{case}");
    }
}
