//! The C ABI on the CPU: the grid's cases through it, and what it refuses.

use std::ptr::{null, null_mut};
use std::sync::Barrier;

use hopper_attention::{Corner, DType, Device, Dims, ForwardProblem, Layout, Mask, Stream, Workspace, bf16, f16};
use hopper_attention_capi::*;
use hopper_attention_tests::backward;
use hopper_attention_tests::bias::{self, BiasImage};
use hopper_attention_tests::c::host::{backward_memory, bits, blocks_input, memory};
use hopper_attention_tests::c::{
    BackwardMemory, BlocksMemory, Memory, Plan, Refusal, backward_problem, checked, problem, tensor,
};
use hopper_attention_tests::data::Poison;
use hopper_attention_tests::problems::{Case, Grid, Tiles, cases, wide};
use hopper_attention_tests::runner::{Prepared, Ready};
use hopper_attention_tests::{alibi, blocks, dropout, sinks, softcap};
use rayon::prelude::*;

/// A run through C gives what the safe crate gives, bit for bit, gaps and guard bands included. What the safe crate gives for
/// these lists of cases is judged by the tests `cpu` and `cpu_more`.
fn same_results<T: Poison>(case: &Case) {
    let prepared = Prepared::<T>::new(case);
    let [mut through_c, mut safe] = [prepared.outputs(), prepared.outputs()];
    let memory = memory(&prepared, &mut through_c);
    let plan = Plan::new(&problem(&prepared.problem), HATTN_CPU).unwrap();
    assert_eq!(plan.workspace_bytes(), 0);
    // SAFETY: the addresses and layouts are those of live images.
    unsafe { plan.run(&memory, null_mut()) }.unwrap_or_else(|why| panic!("{} {case}: {why:?}", T::DTYPE));
    prepared.compute(&mut safe).unwrap();
    assert!(bits(&through_c.o) == bits(&safe.o), "{} {case}: o differs", T::DTYPE);
    assert!(through_c.lse.as_ref().map(bits) == safe.lse.as_ref().map(bits), "{} {case}: lse differs", T::DTYPE);
    let [got, want] = [&through_c, &safe].map(|outputs| outputs.max_logits.as_ref().map(bits));
    assert!(got == want, "{} {case}: max_logits differ", T::DTYPE);
    through_c.check_written().unwrap_or_else(|why| panic!("{} {case}: {why}", T::DTYPE));
}

/// Both passes of these cases, in types that the list of cases has.
fn same_in_both_passes<'a>(cases: impl Iterator<Item = &'a Case>) {
    let cases: Vec<&Case> = cases.collect();
    assert!(cases.len() >= 3, "{} cases", cases.len());
    cases.par_iter().for_each(|case| {
        same_results::<bf16>(case);
        same_gradients::<f32>(case);
    });
}

#[test]
fn results_through_c_are_the_safe_crates() {
    let all = cases(Grid::from_env(), &Tiles { m: vec![64], n: vec![128] });
    // Head dims above those of kernels, too.
    let wide = wide();
    let some: Vec<&Case> = all.iter().step_by(7).chain(wide.iter().step_by(4)).collect();
    assert!(some.len() >= 3, "{} cases", some.len());
    some.par_iter().enumerate().for_each(|(i, case)| match i % 3 {
        0 => same_results::<bf16>(case),
        1 => same_results::<f16>(case),
        _ => same_results::<f32>(case),
    });
}

#[test]
fn biases_through_c_are_the_safe_crates() {
    same_in_both_passes(bias::cases(Grid::from_env()).iter().step_by(97));
}

#[test]
fn biases_are_refused_by_name_through_c() {
    let case = Case::new(5, 7, 8, Mask::Full).bias("f16:hq".parse().unwrap());
    let given = problem(&case.problem(DType::F32));
    assert_eq!((given.bias, given.bias_dims), (HATTN_F16, HATTN_BIAS_PER_HEAD | HATTN_BIAS_PER_QUERY));
    let refused = |edit: &dyn Fn(&mut hattn_forward_problem)| {
        let mut wrong = given;
        edit(&mut wrong);
        Plan::new(&wrong, HATTN_CPU).unwrap_err().1
    };
    let text = "bias: 4; allowed: 0 (none), HATTN_F16 (1), HATTN_BF16 (2), HATTN_F32 (3)";
    assert_eq!(refused(&|p| p.bias = HATTN_E4M3), text);
    for edit in [|p: &mut hattn_forward_problem| p.bias_dims = 8, |p: &mut hattn_forward_problem| p.bias = 0] {
        let text = refused(&edit);
        assert!(text.starts_with("bias_dims: ") && text.contains("HATTN_BIAS_PER_QUERY (4)"), "{text}");
    }
    assert!(refused(&|p| (p.dtype, p.output) = (HATTN_E4M3, 0)).contains("a bias with e4m3 operands"));
    assert!(refused(&|p| p.bias_keys = 8).contains("bias: covering 8 keys; allowed: 7"));
    assert!(refused(&|p| p.bias_queries = -1).contains("bias_queries"));
    let text = refused(&|p| (p.bias, p.bias_dims, p.bias_keys) = (0, 0, 7));
    assert!(text.contains("0, without a bias"), "{text}");
    let prepared = Prepared::<f32>::new(&case);
    let mut outputs = prepared.outputs();
    let without = Memory { bias: None, ..memory(&prepared, &mut outputs) };
    // SAFETY: as above.
    let (_, text) = unsafe { Plan::new(&given, HATTN_CPU).unwrap().run(&without, null_mut()) }.unwrap_err();
    assert!(text.contains("bias: missing"), "{text}");
    let of_gradients = backward::Prepared::<f32>::new(&case);
    let mut outputs = of_gradients.outputs();
    let mut plain = backward_problem(&of_gradients.problem);
    plain.d_bias = 0;
    let all = backward_memory(&of_gradients, &mut outputs);
    // SAFETY: as above.
    let (_, text) = unsafe { Plan::new(&plain, HATTN_CPU).unwrap().run(&all, null_mut()) }.unwrap_err();
    assert!(text.contains("dbias: given"), "{text}");
    let mut wrong = backward_problem(&of_gradients.problem);
    (wrong.bias, wrong.bias_dims) = (0, 0);
    assert!(Plan::new(&wrong, HATTN_CPU).unwrap_err().1.contains("d_bias: asked for"));
    wrong.d_bias = 2;
    assert!(Plan::new(&wrong, HATTN_CPU).unwrap_err().1.contains("d_bias: 2"));
}

#[test]
fn sinks_through_c_are_the_safe_crates() {
    same_in_both_passes(sinks::cases(Grid::from_env()).iter().step_by(5));
}

#[test]
fn capped_scores_through_c_are_the_safe_crates() {
    let cheap = |case: &&Case| case.dims.seqlen_q * case.dims.seqlen_kv < 60_000;
    same_in_both_passes(softcap::cases(Grid::from_env()).iter().filter(cheap).step_by(23));
}

#[test]
fn biased_scores_through_c_are_the_safe_crates() {
    let cheap = |case: &&Case| case.dims.seqlen_q * case.dims.seqlen_kv < 60_000;
    same_in_both_passes(alibi::cases(Grid::from_env()).iter().filter(cheap).step_by(17));
}

#[test]
fn lists_of_blocks_through_c_are_the_safe_crates() {
    let cheap = |case: &&Case| case.dims.seqlen_q * case.dims.seqlen_kv < 120_000;
    let cases = blocks::cases(Grid::from_env());
    let some = || cases.iter().filter(cheap).step_by(13);
    let mut forms = [0; 4];
    for form in some().map(|case| case.block_lists().unwrap().mask) {
        let has = [form.most_partial() > 0, form.has_full_blocks(), form.is_per_batch(), form.is_per_head()];
        forms.iter_mut().zip(has).for_each(|(count, has)| *count += usize::from(has));
    }
    assert!(forms.iter().all(|&count| count > 2), "{forms:?}");
    same_in_both_passes(some());
}

#[test]
fn lists_of_blocks_are_refused_by_name_through_c() {
    let case = Case::new(200, 300, 8, Mask::Full).blocks(blocks::Blocks::Documents);
    // A seed with lists of full blocks.
    let with_full = |seed| Case { seed, ..case.clone() };
    let case = (0..).map(with_full).find(|case| case.block_lists().unwrap().mask.has_full_blocks()).unwrap();
    let given = problem(&case.problem(DType::F32));
    let refused = |edit: &dyn Fn(&mut hattn_forward_problem)| {
        let mut wrong = given;
        edit(&mut wrong);
        Plan::new(&wrong, HATTN_CPU).unwrap_err().1
    };
    for flags in [-1, 2, 8, 16, 17] {
        assert!(refused(&|p| p.block_mask = flags).starts_with(&format!("block_mask: {flags}; allowed: 0, or")));
    }
    let text = "block_mask_most_partial: 1; allowed: 0 without a block_mask";
    assert_eq!(refused(&|p| (p.block_mask, p.block_mask_most_partial) = (0, 1)), text);
    assert_eq!(refused(&|p| p.block_mask_most_partial = -1), "block_mask_most_partial: -1; allowed: 0 and above");
    let text = refused(&|p| p.block_mask_most_partial = 4);
    assert!(text.contains("block_mask.most_partial: 4; allowed: 0 to 3, the blocks of keys"), "{text}");
    let text = refused(&|p| p.seqused_kv = 1);
    assert!(text.contains("a block mask with packed sequences or used lengths"), "{text}");
    let prepared = Prepared::<f32>::new(&case);
    let mut outputs = prepared.outputs();
    let all = memory(&prepared, &mut outputs);
    let run = |memory: Memory| {
        // SAFETY: as above.
        unsafe { Plan::new(&given, HATTN_CPU).unwrap().run(&memory, null_mut()) }.unwrap_err().1
    };
    let text = run(Memory { blocks: None, ..all });
    assert!(text.contains("mask_block_cnt: missing"), "{text}");
    let lists = all.blocks.unwrap();
    let text = run(Memory { blocks: Some(BlocksMemory { full: None, ..lists }), ..all });
    assert!(text.contains("full_block_cnt: missing"), "{text}");
    let [counts, mut indices, bits] = lists.partial;
    indices.shape[3] += 1;
    let text = run(Memory { blocks: Some(BlocksMemory { partial: [counts, indices, bits], ..lists }), ..all });
    assert!(text.contains("mask_block_idx: shape"), "{text}");
    // Numbers that are no block are an error on the CPU.
    let mut spoilt = prepared.blocks.clone().unwrap();
    spoilt.inner_mut(hopper_attention::Slot::MaskBlockCnt).unwrap()[0] = -1;
    let text = run(Memory { blocks: Some(blocks_input(&spoilt)), ..all });
    assert!(text.contains("mask_block_cnt: -1 at [0, 0, 0]"), "{text}");
    let mut without = problem(&case.problem(DType::F32));
    (without.block_mask, without.block_mask_most_partial) = (0, 0);
    // SAFETY: as above.
    let ran = unsafe { Plan::new(&without, HATTN_CPU).unwrap().run(&all, null_mut()) };
    assert!(ran.unwrap_err().1.contains("mask_block_cnt: given"));
}

#[test]
fn slopes_and_maximum_logits_are_refused_by_name_through_c() {
    let case = Case::new(5, 7, 8, Mask::Full).alibi(alibi::Alibi::Standard).max_logits(true);
    let given = problem(&case.problem(DType::F32));
    let refused = |edit: &dyn Fn(&mut hattn_forward_problem)| {
        let mut wrong = given;
        edit(&mut wrong);
        Plan::new(&wrong, HATTN_CPU).unwrap_err().1
    };
    let text = "alibi: -1; allowed: HATTN_ALIBI_NONE (0), HATTN_ALIBI_PER_HEAD (1), HATTN_ALIBI_PER_BATCH (2)";
    assert_eq!(refused(&|p| p.alibi = -1), text);
    assert!(refused(&|p| p.max_logits = 2).starts_with("max_logits: 2"));
    let text = refused(&|p| (p.dtype, p.output, p.max_logits) = (HATTN_E4M3, 0, 0));
    assert!(text.contains("alibi with e4m3 operands"), "{text}");
    let prepared = Prepared::<f32>::new(&case);
    let mut outputs = prepared.outputs();
    let all = memory(&prepared, &mut outputs);
    let run = |memory: Memory| {
        // SAFETY: as above.
        unsafe { Plan::new(&given, HATTN_CPU).unwrap().run(&memory, null_mut()) }.unwrap_err().1
    };
    let text = run(Memory { alibi_slopes: None, ..all });
    assert!(text.contains("alibi_slopes: missing"), "{text}");
    let text = run(Memory { max_logits: None, ..all });
    assert!(text.contains("max_logits: missing"), "{text}");
    assert!(refused(&|p| p.reserved = 1).contains("reserved 0x1"));
}

#[test]
fn dropout_through_c_is_the_safe_crates() {
    // 0 stands for no dropout in C, so there is none with a probability that is rounded to 0.
    let cheap = |case: &&Case| case.dims.seqlen_q * case.dims.seqlen_kv < 60_000 && case.dropout > 1e-4;
    same_in_both_passes(dropout::cases(Grid::from_env()).iter().filter(cheap).step_by(11));
}

#[test]
fn dropout_is_refused_by_name_through_c() {
    let case = Case::new(5, 7, 8, Mask::Full).dropout(0.5);
    let given = problem(&case.problem(DType::F32));
    let refused = |edit: &dyn Fn(&mut hattn_forward_problem)| {
        let mut wrong = given;
        edit(&mut wrong);
        Plan::new(&wrong, HATTN_CPU).unwrap_err().1
    };
    assert_eq!(refused(&|p| p.dropout = 1.0), "dropout: 1; allowed: 0 to below 1");
    assert_eq!(refused(&|p| p.dropout = f32::NAN), "dropout: NaN; allowed: 0 to below 1");
    let text = refused(&|p| (p.dtype, p.output) = (HATTN_E4M3, 0));
    assert!(text.contains("dropout with e4m3 operands"), "{text}");
    let prepared = Prepared::<f32>::new(&case);
    let mut outputs = prepared.outputs();
    let all = memory(&prepared, &mut outputs);
    let run = |given: &hattn_forward_problem, memory: Memory| {
        // SAFETY: as above.
        unsafe { Plan::new(given, HATTN_CPU).unwrap().run(&memory, null_mut()) }.unwrap_err().1
    };
    let text = run(&given, Memory { dropout_state: None, ..all });
    assert!(text.contains("dropout_state: missing"), "{text}");
    let mut without = given;
    without.dropout = -0.0;
    assert!(run(&without, all).contains("dropout_state: given"));
    // The two 64-bit numbers themselves, and not their words.
    let words = all.dropout_state.map(|state| hattn_tensor { shape: [2, 0, 0, 0], ..state });
    let text = run(&given, Memory { dropout_state: words, ..all });
    assert!(text.contains("dropout_state: shape [2], expected [4]"), "{text}");
}

#[test]
fn sinks_are_refused_by_name_through_c() {
    let mut case = Case::new(5, 7, 8, Mask::Full);
    case.sinks = sinks::Sinks::Normal;
    let given = problem(&case.problem(DType::F32));
    let refused = |edit: &dyn Fn(&mut hattn_forward_problem)| {
        let mut wrong = given;
        edit(&mut wrong);
        Plan::new(&wrong, HATTN_CPU).unwrap_err().1
    };
    let text = "sinks: 1; allowed: 0 (none), HATTN_BF16 (2), HATTN_F32 (3)";
    assert_eq!(refused(&|p| p.sinks = HATTN_F16), text);
    let prepared = Prepared::<f32>::new(&case);
    let mut outputs = prepared.outputs();
    let memory = Memory { sinks: None, ..memory(&prepared, &mut outputs) };
    // SAFETY: as above.
    let (_, text) = unsafe { Plan::new(&given, HATTN_CPU).unwrap().run(&memory, null_mut()) }.unwrap_err();
    assert!(text.contains("sinks: missing"), "{text}");
    let mut without = backward_problem(&backward::Prepared::<f32>::new(&case).problem);
    without.sinks = 0;
    let (_, text) = Plan::new(&without, HATTN_CPU).unwrap_err();
    assert!(text.contains("d_sinks: asked for"), "{text}");
}

/// Two threads use one plan at the same time. Each of them fills one head of the same tensors.
#[test]
fn two_threads_fill_two_heads_of_one_tensor() {
    let both = Dims::new(2, 150, 2, 8);
    let options = |dims| ForwardProblem::builder(DType::F32, dims).mask(Mask::causal()).lse(true).build().unwrap();
    let numbers = |seed: u32| -> Vec<f32> {
        let mixed = |i: u32| (i ^ seed).wrapping_mul(2_654_435_761).rotate_left(13).wrapping_mul(2_246_822_519);
        (0..2 * 150 * 2 * 8).map(|i| mixed(i) as f32 / u32::MAX as f32 - 0.5).collect()
    };
    let inputs = [numbers(1), numbers(2), numbers(3)];
    let outputs = || (vec![f32::NAN; inputs[0].len()], vec![f32::NAN; 2 * 2 * 150]);
    let tensors = |layout, of_lse: Layout<3>, o: u64, lse: u64, head: u64| {
        let at = |address: u64| tensor(address + head * 8 * 4, DType::F32, HATTN_CPU, layout);
        let [q, k, v] = inputs.each_ref().map(|input| at(input.as_ptr() as u64));
        let lse = Some(tensor(lse + head * 150 * 4, DType::F32, HATTN_CPU, of_lse));
        Memory {
            q,
            k,
            v,
            o: at(o),
            lse,
            sinks: None,
            alibi_slopes: None,
            max_logits: None,
            bias: None,
            blocks: None,
            dropout_state: None,
            workspace: 0,
            workspace_bytes: 0,
        }
    };
    let plan = |dims| Plan::new(&problem(&options(dims)), HATTN_CPU).unwrap();

    let (mut want_o, mut want_lse) = outputs();
    let dense = Layout::contiguous([2, 150, 2, 8]).unwrap();
    let (o, lse) = (want_o.as_mut_ptr() as u64, want_lse.as_mut_ptr() as u64);
    let memory = tensors(dense, Layout::contiguous([2, 2, 150]).unwrap(), o, lse, 0);
    // SAFETY: the memory is that of the vectors above, which nothing else uses meanwhile.
    unsafe { plan(both).run(&memory, null_mut()) }.unwrap();

    let one_head = plan(both.with_heads_q(1).with_heads_kv(1));
    let layout = Layout::with_strides([2, 150, 1, 8], dense.stride()).unwrap();
    let of_lse = Layout::with_strides([2, 1, 150], [300, 150, 1]).unwrap();
    for _ in 0..20 {
        let (mut got_o, mut got_lse) = outputs();
        let (o, lse) = (got_o.as_mut_ptr() as u64, got_lse.as_mut_ptr() as u64);
        let start = Barrier::new(2);
        std::thread::scope(|scope| {
            for head in [0, 1] {
                let (plan, start, tensors) = (&one_head, &start, &tensors);
                scope.spawn(move || {
                    let memory = tensors(layout, of_lse, o, lse, head);
                    start.wait();
                    // SAFETY: as above. No element belongs to both heads.
                    unsafe { plan.run(&memory, null_mut()) }.unwrap();
                });
            }
        });
        assert!(got_o == want_o && got_lse == want_lse);
    }
}

/// The gradients through C are those of the safe crate, bit for bit, gaps and guard bands included.
fn same_gradients<T: Poison>(case: &Case) {
    let prepared = backward::Prepared::<T>::new(case);
    let [mut through_c, mut safe] = [prepared.outputs(), prepared.outputs()];
    let plan = Plan::new(&backward_problem(&prepared.problem), HATTN_CPU).unwrap();
    assert_eq!(plan.workspace_bytes(), 0);
    let direct = prepared.problem.plan(&Device::cpu()).unwrap();
    assert_eq!(plan.describe(), format!("{}: {direct}", prepared.problem));
    let memory = backward_memory(&prepared, &mut through_c);
    // SAFETY: the addresses and layouts are those of live images.
    unsafe { plan.run(&memory, null_mut()) }.unwrap();
    let mut workspace = Workspace::alloc(&Stream::Cpu, 0).unwrap();
    direct.run(&Stream::Cpu, &mut workspace, prepared.host_args(&mut safe)).unwrap();
    for (name, got, want) in
        [("d_q", &through_c.d_q, &safe.d_q), ("d_k", &through_c.d_k, &safe.d_k), ("d_v", &through_c.d_v, &safe.d_v)]
    {
        assert!(bits(got) == bits(want), "{} {case}: {name} differs", T::DTYPE);
    }
    let [got, want] = [&through_c, &safe].map(|outputs| outputs.d_sinks.as_ref().map(bits));
    assert!(got == want, "{} {case}: d_sinks differ", T::DTYPE);
    let values = |bias: &BiasImage| bias.values().into_iter().map(f64::to_bits).collect::<Vec<_>>();
    let [got, want] = [&through_c, &safe].map(|outputs| outputs.d_bias.as_ref().map(values));
    assert!(got == want, "{} {case}: dbias differs", T::DTYPE);
    through_c.check_written().unwrap_or_else(|why| panic!("{} {case}: {why}", T::DTYPE));
}

#[test]
fn gradients_through_c_are_the_safe_crates() {
    let all = cases(Grid::from_env(), &Tiles { m: vec![64], n: vec![128] });
    let short = |case: &&Case| case.dims.seqlen_q * case.dims.seqlen_kv * case.dims.heads_q < 100_000;
    let some: Vec<&Case> = all.iter().filter(short).step_by(13).collect();
    assert!(some.len() >= 3, "{} cases", some.len());
    some.par_iter().enumerate().for_each(|(i, case)| match i % 3 {
        0 => same_gradients::<bf16>(case),
        1 => same_gradients::<f16>(case),
        _ => same_gradients::<f32>(case),
    });
}

fn case() -> Case {
    Case::new(5, 7, 16, Mask::Causal { corner: Corner::TopLeft }).heads(2, 4, 2)
}

#[test]
fn a_plan_says_what_it_is() {
    let given = Prepared::<f32>::new(&case());
    let plan = Plan::new(&problem(&given.problem), HATTN_CPU).unwrap();
    let text = plan.describe();
    assert_eq!(text, format!("{}: {}", given.problem, given.problem.plan(&Device::cpu()).unwrap()));
    // A short buffer gets what fits, and no buffer the length alone.
    let mut raw = null_mut();
    // SAFETY: live places, and buffers as large as they are said to be.
    unsafe {
        checked(hattn_forward_plan_create(&problem(&given.problem), HATTN_CPU, &raw mut raw)).unwrap();
        let mut buffer = [b'x'; 8];
        let mut length = 0;
        checked(hattn_forward_plan_describe(raw, buffer.as_mut_ptr().cast(), 7, &raw mut length)).unwrap();
        assert_eq!((&buffer[..6], &buffer[6..], length), (&text.as_bytes()[..6], &b"\0x"[..], text.len()));
        checked(hattn_forward_plan_describe(raw, null_mut(), 0, &raw mut length)).unwrap();
        checked(hattn_forward_plan_describe(raw, null_mut(), 0, null_mut())).unwrap();
        hattn_forward_plan_destroy(raw);
        hattn_forward_plan_destroy(null_mut());
    }
}

fn planned(edit: impl FnOnce(&mut hattn_forward_problem)) -> Refusal {
    let mut given = problem(&Prepared::<f32>::new(&case()).problem);
    edit(&mut given);
    let refusal = Plan::new(&given, HATTN_CPU).unwrap_err();
    // SAFETY: a live struct.
    let supported = checked(unsafe { hattn_forward_supported(&given, HATTN_CPU) });
    assert_eq!(supported, Err(refusal.clone()), "the query and the plan refuse alike");
    refusal
}

#[test]
fn bad_problems_are_refused() {
    let refused = |edit: fn(&mut hattn_forward_problem), status: hattn_status, text: &str| {
        let got = planned(edit);
        assert!(got.0 == status && got.1 == text, "{got:?}, expected {status}: {text}");
    };
    refused(
        |p| p.struct_size = 8,
        HATTN_ERROR_ABI,
        "problem: struct_size 8; allowed: 104, 112, 120, 128, 136, 144, 152, 160, 168, 176, 184, 192, 200, 208, 216, 224 \
         (sizeof(hattn_forward_problem)), or a larger multiple of 8 up to \
         4096 if the fields that this library does not know are 0",
    );
    refused(|p| p.abi_version = 0, HATTN_ERROR_ABI, "problem: abi_version 0; allowed: 1");
    refused(
        |p| p.dtype = 0,
        HATTN_ERROR_ARGUMENT,
        "dtype: 0; allowed: HATTN_F16 (1), HATTN_BF16 (2), HATTN_E4M3 (4), on the CPU also HATTN_F32 (3)",
    );
    refused(|p| p.dtype = HATTN_E4M3, HATTN_ERROR_DTYPE, "o: dtype f32; allowed: bf16, f16, e4m3");
    refused(
        |p| p.scaling = 3,
        HATTN_ERROR_ARGUMENT,
        "scaling: 3; allowed: HATTN_PER_TENSOR (0), HATTN_PER_HEAD (1), HATTN_PER_BLOCK (2)",
    );
    refused(
        |p| p.scaling = HATTN_PER_BLOCK,
        HATTN_ERROR_VALUE,
        "scaling: per-block, with f32 operands; allowed: with e4m3 operands only",
    );
    refused(
        |p| p.mask = 5,
        HATTN_ERROR_ARGUMENT,
        "mask: 5; allowed: HATTN_MASK_FULL (0), HATTN_MASK_CAUSAL (1), HATTN_MASK_WINDOW (2), HATTN_MASK_CHUNKED (3), \
         HATTN_MASK_PREFIX (4)",
    );
    refused(|p| p.corner = -1, HATTN_ERROR_ARGUMENT, "corner: -1; allowed: HATTN_BOTTOM_RIGHT (0), HATTN_TOP_LEFT (1)");
    refused(|p| p.lse = 2, HATTN_ERROR_ARGUMENT, "lse: 2; allowed: 0 (not wanted), 1 (wanted)");
    let archs = "arch: 70; allowed: HATTN_ARCH_OWN (0), HATTN_ARCH_SM80 (80), HATTN_ARCH_SM90 (90)";
    refused(|p| p.arch = 70, HATTN_ERROR_ARGUMENT, archs);
    let on_cpu = "unsupported: sm90 kernels on the CPU; nearest: a GPU of sm_90";
    refused(|p| p.arch = HATTN_ARCH_SM90, HATTN_ERROR_UNSUPPORTED, on_cpu);
    refused(|p| p.sm_margin = -1, HATTN_ERROR_VALUE, "sm_margin: -1; allowed: 0 and above");
    refused(|p| p.fill_gaps = 2, HATTN_ERROR_ARGUMENT, "fill_gaps: 2; allowed: 0 (not wanted), 1 (wanted)");
    refused(|p| p.batch = -1, HATTN_ERROR_VALUE, "batch: HATTN_UNSET (-1); allowed: 0 and above");
    refused(|p| p.heads_q = 3, HATTN_ERROR_VALUE, "heads_q: 3 with heads_kv 2; allowed: a multiple of heads_kv");
    refused(|p| p.softmax_scale = f32::NAN, HATTN_ERROR_VALUE, "softmax_scale: NaN; allowed: finite and above 0");
    let cap = "softcap: -inf; allowed: 0 (none), or finite and above 0, with softmax_scale / softcap and \
               softcap * log2(e) normal f32 numbers";
    refused(|p| p.softcap = f32::NEG_INFINITY, HATTN_ERROR_VALUE, cap);
    let window = |p: &mut hattn_forward_problem| (p.mask, p.window_left) = (HATTN_MASK_WINDOW, -2);
    refused(window, HATTN_ERROR_VALUE, "window_left: -2; allowed: 0 and above, HATTN_UNBOUNDED (-1)");
    let chunks = |p: &mut hattn_forward_problem| (p.mask, p.window_left) = (HATTN_MASK_CHUNKED, 0);
    refused(chunks, HATTN_ERROR_VALUE, "window_left: 0; allowed: 1 and above with this mask");
    let prefix = |p: &mut hattn_forward_problem| (p.mask, p.window_left) = (HATTN_MASK_PREFIX, HATTN_UNBOUNDED);
    refused(prefix, HATTN_ERROR_VALUE, "window_left: -1; allowed: 0 and above with this mask");
}

/// 0 is no limit. The CPU meets every other.
#[test]
fn the_limit_of_the_workspace_reaches_the_problem() {
    let forward = problem(&Prepared::<f32>::new(&case()).problem);
    let gradients = backward_problem(&backward::Prepared::<f32>::new(&case()).problem);
    assert_eq!((forward.workspace_limit, gradients.workspace_limit), (0, 0));
    for (limit, text) in
        [(0, String::new()), (1, " workspace_limit 1".into()), (u64::MAX, format!(" workspace_limit {}", u64::MAX))]
    {
        let forward = hattn_forward_problem { workspace_limit: limit, ..forward };
        let gradients = hattn_backward_problem { workspace_limit: limit, ..gradients };
        for described in
            [Plan::new(&forward, HATTN_CPU).unwrap().describe(), Plan::new(&gradients, HATTN_CPU).unwrap().describe()]
        {
            assert!(described.contains(&format!("{text}: cpu")), "{described}");
            assert!(described.contains("workspace_limit") != text.is_empty(), "{described}");
        }
    }
}

#[test]
fn the_scale_is_the_usual_one_unless_given() {
    let given = Prepared::<f32>::new(&case()).problem;
    let scale = |softmax_scale| {
        Plan::new(&hattn_forward_problem { softmax_scale, ..problem(&given) }, HATTN_CPU).unwrap().describe()
    };
    assert!(scale(0.0).contains("scale 0.25 "), "{}", scale(0.0));
    assert!(scale(0.5).contains("scale 0.5 "), "{}", scale(0.5));
}

#[test]
fn devices_that_are_not_there_are_refused() {
    let given = problem(&Prepared::<bf16>::new(&case()).problem);
    let mut count = -1;
    // SAFETY: live places and structs.
    unsafe {
        checked(hattn_device_count(&raw mut count)).unwrap();
        assert_eq!(count as usize, Device::available().len());
        let (status, text) = checked(hattn_forward_supported(&given, count)).unwrap_err();
        assert!(status == HATTN_ERROR_NO_DEVICE && text.starts_with(&format!("no device: cuda:{count}; ")), "{text}");
        assert_eq!(checked(hattn_device_count(null_mut())).unwrap_err().0, HATTN_ERROR_ARGUMENT);
    }
    let (status, text) = Plan::new(&given, count).unwrap_err();
    assert!(status == HATTN_ERROR_NO_DEVICE && text.starts_with(&format!("no device: cuda:{count}; ")), "{text}");
    let (status, text) = Plan::new(&given, -2).unwrap_err();
    assert_eq!(
        (status, text.as_str()),
        (HATTN_ERROR_ARGUMENT, "device: -2; allowed: HATTN_CPU (-1), or the ordinal of a GPU, 0 and above")
    );
}

#[test]
fn null_pointers_are_refused() {
    let given = problem(&Prepared::<f32>::new(&case()).problem);
    let (mut plan, mut none) = (null_mut(), null_mut());
    let mut bytes = 0;
    // SAFETY: null pointers are what is tested; the others are live.
    let statuses = unsafe {
        checked(hattn_forward_plan_create(&given, HATTN_CPU, &raw mut plan)).unwrap();
        let args: hattn_forward_args = std::mem::zeroed();
        let args = hattn_forward_args { struct_size: 64, abi_version: HATTN_ABI_VERSION, ..args };
        let statuses = [
            hattn_forward_supported(null(), HATTN_CPU),
            hattn_forward_plan_create(&given, HATTN_CPU, null_mut()),
            hattn_forward_plan_create(null(), HATTN_CPU, &raw mut none),
            hattn_forward_plan_describe(null(), null_mut(), 0, null_mut()),
            hattn_forward_plan_workspace_size(null(), &raw mut bytes),
            hattn_forward_run(null(), &args, null_mut()),
            hattn_forward_run(plan, null(), null_mut()),
        ];
        hattn_forward_plan_destroy(plan);
        statuses
    };
    assert_eq!(statuses, [HATTN_ERROR_ARGUMENT; 7]);
}

#[test]
fn bad_tensors_are_refused_and_nothing_is_written() {
    let prepared = Prepared::<f32>::new(&case());
    let plan = Plan::new(&problem(&prepared.problem), HATTN_CPU).unwrap();
    let refused = |edit: &dyn Fn(&mut Memory), status: hattn_status, text: &str| {
        let mut outputs = prepared.outputs();
        let mut memory = memory(&prepared, &mut outputs);
        edit(&mut memory);
        // SAFETY: live images, or refused before an address is used.
        let got = unsafe { plan.run(&memory, null_mut()) }.unwrap_err();
        assert!(got.0 == status && got.1.contains(text), "{got:?}, expected {status}: {text}");
        let lse = outputs.lse.iter().flat_map(|lse| lse.data());
        assert!(outputs.o.data().iter().chain(lse).all(|x| x.is_poison()), "{text}: something was written");
    };
    refused(&|m| m.q.struct_size = 95, HATTN_ERROR_ABI, "q: struct_size 95; allowed: 96 (sizeof(hattn_tensor))");
    refused(&|m| m.o.abi_version = 7, HATTN_ERROR_ABI, "o: abi_version 7");
    refused(&|m| m.k.ndim = 3, HATTN_ERROR_ARGUMENT, "k: ndim 3; allowed: 4, [batch, seqlen, heads, head_dim]");
    refused(&|m| m.v.reserved = 1, HATTN_ERROR_ARGUMENT, "v: reserved 0x1; allowed: 0");
    refused(&|m| m.v.dtype = HATTN_BF16, HATTN_ERROR_DTYPE, "v: dtype bf16; allowed: f32, the problem's");
    refused(&|m| m.v.device = 0, HATTN_ERROR_DEVICE, "v: on device cuda:0; allowed: device cpu, the plan's");
    refused(&|m| m.k.shape[1] = 8, HATTN_ERROR_SHAPE, "k: shape [2, 8, 2, 16], expected [2, 7, 2, 16]");
    refused(&|m| m.k.shape[1] = -7, HATTN_ERROR_LAYOUT, "k: size -7 in dimension 1; allowed: 0 and above");
    refused(&|m| m.q.stride[3] = 2, HATTN_ERROR_LAYOUT, "q: shape [2, 5, 4, 16] with strides");
    refused(&|m| m.q.stride[1] = -16, HATTN_ERROR_LAYOUT, "allowed: strides of 0 and above");
    refused(&|m| m.o.stride[1] = 0, HATTN_ERROR_LAYOUT, "uses elements twice");
    refused(&|m| m.q.data = m.q.data.wrapping_byte_add(2), HATTN_ERROR_LAYOUT, "allowed: multiples of 4 bytes, not 0");
    refused(&|m| m.q.data = null_mut(), HATTN_ERROR_LAYOUT, "q: address 0x0");
    refused(&|m| m.o.data = m.q.data, HATTN_ERROR_LAYOUT, "which meet those of q");
    refused(&|m| m.lse = None, HATTN_ERROR_VALUE, "lse: missing");
    refused(&|m| m.lse.as_mut().unwrap().shape[2] = 4, HATTN_ERROR_SHAPE, "lse: shape [2, 4, 4], expected [2, 4, 5]");
}

#[test]
fn bad_backward_problems_are_refused() {
    let good = backward_problem(&backward::Prepared::<f32>::new(&case()).problem);
    let refused = |edit: fn(&mut hattn_backward_problem), status: hattn_status, text: &str| {
        let mut given = good;
        edit(&mut given);
        let got = Plan::new(&given, HATTN_CPU).unwrap_err();
        assert!(got.0 == status && got.1 == text, "{got:?}, expected {status}: {text}");
        // SAFETY: a live struct.
        assert_eq!(checked(unsafe { hattn_backward_supported(&given, HATTN_CPU) }), Err(got));
    };
    refused(
        |p| p.struct_size = 8,
        HATTN_ERROR_ABI,
        "problem: struct_size 8; allowed: 104, 112, 120, 128, 136, 144, 152, 160, 168, 176, 184, 192, 200, 208, 216 \
         (sizeof(hattn_backward_problem)), or a larger multiple of 8 up to 4096 if \
         the fields that this library does not know are 0",
    );
    refused(|p| p.d_lse = 2, HATTN_ERROR_ARGUMENT, "d_lse: 2; allowed: 0 (not given), 1 (given)");
    refused(|p| p.deterministic = -1, HATTN_ERROR_ARGUMENT, "deterministic: -1; allowed: 0 (not wanted), 1 (wanted)");
    refused(|p| p.sm_margin = -1, HATTN_ERROR_VALUE, "sm_margin: -1; allowed: 0 and above");
    refused(|p| p.dtype = HATTN_E4M3, HATTN_ERROR_DTYPE, "q, k and v: dtype e4m3; allowed: bf16, f16, f32");
    refused(|p| p.heads_q = 3, HATTN_ERROR_VALUE, "heads_q: 3 with heads_kv 2; allowed: a multiple of heads_kv");
}

#[test]
fn bad_backward_tensors_are_refused_and_nothing_is_written() {
    let prepared = backward::Prepared::<f32>::new(&case());
    let plan = Plan::new(&backward_problem(&prepared.problem), HATTN_CPU).unwrap();
    let refused = |edit: &dyn Fn(&mut BackwardMemory), status: hattn_status, text: &str| {
        let mut outputs = prepared.outputs();
        let mut memory = backward_memory(&prepared, &mut outputs);
        edit(&mut memory);
        // SAFETY: live images, or refused before an address is used.
        let got = unsafe { plan.run(&memory, null_mut()) }.unwrap_err();
        assert!(got.0 == status && got.1.contains(text), "{got:?}, expected {status}: {text}");
        let written = [&outputs.d_q, &outputs.d_k, &outputs.d_v].into_iter().flat_map(|image| image.data());
        assert!(written.into_iter().all(|x| x.is_poison()), "{text}: something was written");
    };
    refused(&|m| m.d_q.struct_size = 95, HATTN_ERROR_ABI, "d_q: struct_size 95; allowed: 96 (sizeof(hattn_tensor))");
    refused(&|m| m.d_o.ndim = 3, HATTN_ERROR_ARGUMENT, "d_o: ndim 3; allowed: 4, [batch, seqlen, heads, head_dim]");
    refused(&|m| m.d_v.dtype = HATTN_BF16, HATTN_ERROR_DTYPE, "d_v: dtype bf16; allowed: f32, the problem's");
    refused(&|m| m.d_k.device = 0, HATTN_ERROR_DEVICE, "d_k: on device cuda:0; allowed: device cpu, the plan's");
    refused(&|m| m.d_k.shape[1] = 8, HATTN_ERROR_SHAPE, "d_k: shape [2, 8, 2, 16], expected [2, 7, 2, 16]");
    refused(&|m| m.d_q.stride[1] = 0, HATTN_ERROR_LAYOUT, "uses elements twice");
    refused(&|m| m.d_o.data = null_mut(), HATTN_ERROR_LAYOUT, "d_o: address 0x0");
    refused(&|m| m.d_v.data = m.lse.data, HATTN_ERROR_LAYOUT, "d_v: addresses");
    refused(&|m| m.d_lse = None, HATTN_ERROR_VALUE, "d_lse: missing");
}
