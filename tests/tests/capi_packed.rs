//! Packed sequences and used lengths through the C ABI on the CPU: the oracle's results, the bits of the safe crate, rows of no
//! sequence, hints that change nothing, and what is refused.

use std::collections::BTreeSet;
use std::ptr::null_mut;

use hopper_attention::{DType, Mask, bf16, f16};
use hopper_attention_capi::*;
use hopper_attention_tests::c::host::{backward_memory, bits, lengths, list_input, memory};
use hopper_attention_tests::c::{
    BackwardMemory, LengthsMemory, Memory, Plan, Refusal, backward_problem, problem, without_batch,
};
use hopper_attention_tests::data::{Image, Poison};
use hopper_attention_tests::packing::{Packing, Rows, longest};
use hopper_attention_tests::problems::{Case, Grid, random};
use hopper_attention_tests::runner::{Outputs, Prepared, Ready};
use hopper_attention_tests::{backward, bias, packed};
use rayon::prelude::*;

/// Of queries and of keys: how long the longest sequence is said to be. 0 is no hint.
type Hints = [i64; 2];

const NO_HINTS: Hints = [0; 2];

/// A pass of a case that goes through C.
trait ThroughC: Ready {
    /// The inputs. What must come out is not computed yet.
    fn of_inputs(case: &Case) -> Self;
    /// Runs the case through C.
    fn run(&self, hints: Hints, outputs: &mut Self::Outputs) -> Result<(), Refusal>;
    /// All memory of the outputs by name, with gaps and guard bands.
    fn memory(outputs: &Self::Outputs) -> Vec<(&'static str, Vec<u64>)>;
    /// The elements in rows of no sequence, and what they are where gaps are filled.
    fn in_gaps(&self, outputs: &Self::Outputs, rows: &[Rows; 2]) -> Vec<(f64, f64)>;
}

impl<T: Poison> ThroughC for Prepared<T> {
    fn of_inputs(case: &Case) -> Self {
        Self::new(case)
    }

    fn run(&self, [max_seqlen_q, max_seqlen_kv]: Hints, outputs: &mut Outputs<T>) -> Result<(), Refusal> {
        let given = hattn_forward_problem { max_seqlen_q, max_seqlen_kv, ..problem(&self.problem) };
        let plan = Plan::new(&given, HATTN_CPU)?;
        assert_eq!(plan.workspace_bytes(), 0);
        let memory = memory(self, outputs);
        // SAFETY: the addresses and layouts are those of live images and lists.
        unsafe { plan.run_packed(&memory, &lengths(&self.case.packing), null_mut()) }
    }

    fn memory(outputs: &Outputs<T>) -> Vec<(&'static str, Vec<u64>)> {
        let lse = outputs.lse.as_ref().map(wide_bits).unwrap_or_default();
        let max_logits = outputs.max_logits.as_ref().map(wide_bits).unwrap_or_default();
        vec![("o", wide_bits(&outputs.o)), ("lse", lse), ("max_logits", max_logits)]
    }

    fn in_gaps(&self, outputs: &Outputs<T>, [of_q, _]: &[Rows; 2]) -> Vec<(f64, f64)> {
        let lse = outputs.lse.iter().flat_map(|lse| of_no_sequence(lse, of_q, 2, f64::NEG_INFINITY));
        of_no_sequence(&outputs.o, of_q, 1, 0.0).into_iter().chain(lse).collect()
    }
}

impl<T: Poison> ThroughC for backward::Prepared<T> {
    fn of_inputs(case: &Case) -> Self {
        Self::new(case)
    }

    fn run(&self, [max_seqlen_q, max_seqlen_kv]: Hints, outputs: &mut Self::Outputs) -> Result<(), Refusal> {
        let given = hattn_backward_problem { max_seqlen_q, max_seqlen_kv, ..backward_problem(&self.problem) };
        let plan = Plan::new(&given, HATTN_CPU)?;
        assert_eq!(plan.workspace_bytes(), 0);
        let memory = backward_memory(self, outputs);
        // SAFETY: as above.
        unsafe { plan.run_packed(&memory, &lengths(&self.case.packing), null_mut()) }
    }

    fn memory(outputs: &Self::Outputs) -> Vec<(&'static str, Vec<u64>)> {
        let d_sinks = outputs.d_sinks.as_ref().map(wide_bits).unwrap_or_default();
        let d_bias = outputs.d_bias.iter().flat_map(|d_bias| d_bias.values()).map(f64::to_bits).collect();
        let of_rows = [("d_q", &outputs.d_q), ("d_k", &outputs.d_k), ("d_v", &outputs.d_v)];
        let of_rows = of_rows.into_iter().map(|(name, image)| (name, wide_bits(image)));
        of_rows.chain([("d_sinks", d_sinks), ("d_bias", d_bias)]).collect()
    }

    fn in_gaps(&self, outputs: &Self::Outputs, [of_q, of_kv]: &[Rows; 2]) -> Vec<(f64, f64)> {
        let all = [(&outputs.d_q, of_q), (&outputs.d_k, of_kv), (&outputs.d_v, of_kv)];
        all.into_iter().flat_map(|(image, rows)| of_no_sequence(image, rows, 1, 0.0)).collect()
    }
}

fn wide_bits<T: Poison, const R: usize>(image: &Image<T, R>) -> Vec<u64> {
    bits(image).into_iter().map(u64::from).collect()
}

/// The elements of a tensor that belong to no sequence, each with what it is where gaps are filled. `axis` is that of the rows.
fn of_no_sequence<T: Poison, const R: usize>(
    image: &Image<T, R>,
    rows: &Rows,
    axis: usize,
    filled: f64,
) -> Vec<(f64, f64)> {
    let shape = image.layout().shape();
    let place = |i: usize, axis: usize| i / shape[axis + 1..].iter().product::<usize>() % shape[axis];
    let belongs = |i: usize| rows.belongs(place(i, 0) * shape[axis] + place(i, axis));
    image.values().into_iter().enumerate().filter(|&(i, _)| !belongs(i)).map(|(_, x)| (x, filled)).collect()
}

/// Fails unless a run through C left all memory outside of the sequences as it must. Returns how many elements it has.
fn check_gaps<P: ThroughC>(prepared: &P, outputs: &P::Outputs) -> usize {
    let case = prepared.case();
    let problem = case.problem(DType::F32);
    let Some(rows) = case.packing.belonging(&problem) else { return 0 };
    let gaps = prepared.in_gaps(outputs, &rows);
    // Poison is a NaN, and `check_memory` has seen that it is the poison of before, or that none is left.
    let is_right = |&(got, filled): &(f64, f64)| if case.packing.fill_gaps { got == filled } else { got.is_nan() };
    assert!(gaps.iter().all(is_right), "{} {case}: rows of no sequence", P::DTYPE);
    gaps.len()
}

/// A run through C gives the bits of the safe crate, leaves all other memory as it was, and keeps the tolerance. Returns how many
/// elements are in rows of no sequence.
fn through_c<P: ThroughC>(case: &Case, is_judged: bool) -> usize {
    let prepared = if is_judged { P::of(case) } else { P::of_inputs(case) };
    let (before, mut outputs, mut safe) = (prepared.clone(), prepared.poisoned(), prepared.poisoned());
    let own = problem(&case.problem(DType::F32));
    let hints = [own.max_seqlen_q, own.max_seqlen_kv];
    prepared.run(hints, &mut outputs).unwrap_or_else(|why| panic!("{} {case}: {why:?}", P::DTYPE));
    prepared.check_memory(&before, &outputs).unwrap_or_else(|why| panic!("{} {case}: {why}", P::DTYPE));
    prepared.compute(&mut safe).unwrap();
    for ((name, got), (_, want)) in P::memory(&outputs).iter().zip(P::memory(&safe)) {
        assert!(*got == want, "{} {case}: {name} differs from the safe crate's", P::DTYPE);
    }
    if is_judged {
        let wrong = prepared.verdict(&outputs).wrong;
        assert!(wrong.is_none(), "{} {case}: {wrong:?}", P::DTYPE);
    }
    check_gaps(&prepared, &outputs)
}

/// Which lists a case has, and whether its gaps are filled.
fn kind(packing: &Packing) -> [bool; 5] {
    let lists = [&packing.cu_seqlens_q, &packing.cu_seqlens_kv, &packing.seqused_q, &packing.seqused_kv];
    let [cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv] = lists.map(Option::is_some);
    [cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, packing.fill_gaps]
}

/// How many products of elements the scores of a case take: the oracle's time.
fn work(case: &Case) -> usize {
    let pairs: usize = case.packing.sequences(case.dims).unwrap().iter().map(|[q, kv]| q * kv).sum();
    pairs * case.dims.heads_q * (case.dims.head_dim_qk + case.dims.head_dim_vo)
}

/// What was run of some cases.
#[derive(Default)]
struct Ran {
    kinds: BTreeSet<[bool; 5]>,
    judged: usize,
    /// Elements in rows of no sequence: left as they were, and filled.
    gaps: [usize; 2],
}

/// Both passes of these cases. The oracle judges those that take it at most so much work.
fn both_passes<'a>(cases: impl Iterator<Item = &'a Case>, most_work: usize) -> Ran {
    let cases: Vec<&Case> = cases.collect();
    let ran = cases.par_iter().enumerate().map(|(i, case)| {
        let (forward, backward) = (work(case) <= 4 * most_work, work(case) <= most_work);
        let gaps = match i % 3 {
            0 => through_c::<Prepared<bf16>>(case, forward) + through_c::<backward::Prepared<f32>>(case, backward),
            1 => through_c::<Prepared<f16>>(case, forward) + through_c::<backward::Prepared<bf16>>(case, backward),
            _ => through_c::<Prepared<f32>>(case, forward) + through_c::<backward::Prepared<f16>>(case, backward),
        };
        (kind(&case.packing), usize::from(backward), gaps)
    });
    let mut all = Ran::default();
    for (kind, judged, gaps) in ran.collect::<Vec<_>>() {
        all.kinds.insert(kind);
        all.judged += judged;
        all.gaps[usize::from(kind[4])] += gaps;
    }
    all
}

#[test]
fn packed_sequences_and_used_lengths_through_c_are_the_safe_crates() {
    let cases = packed::cases(Grid::from_env());
    // Eleven shares no divisor with the number of kinds.
    let ran = both_passes(cases.iter().step_by(11), Grid::from_env().pick(12_000_000, 3_000_000));
    assert!(ran.kinds.len() == 8 && ran.judged > 4 && ran.gaps.iter().all(|&gaps| gaps > 1000));
}

#[test]
fn random_lengths_through_c_are_the_safe_crates() {
    let cases = packed::drawn(random::seed(), 128, Grid::from_env().pick(16, 200));
    let ran = both_passes(cases.iter(), 3_000_000);
    assert!(ran.kinds.len() > 3 && ran.judged > 3);
}

/// A bias has numbers for the longest sequence, or for a few more rows.
#[test]
fn biases_of_packed_sequences_through_c_are_the_safe_crates() {
    let cases = bias::packed_cases(Grid::from_env());
    let some = || cases.iter().step_by(109);
    let covered = |case: &&Case| {
        let given = problem(&case.problem(DType::F32));
        let of_gradients = backward_problem(&backward::Prepared::<f32>::new(case).problem);
        assert_eq!([of_gradients.bias_queries, of_gradients.bias_keys], [given.bias_queries, given.bias_keys]);
        given.bias_keys > 0 && given.bias_keys < given.seqlen_kv
    };
    let ran = both_passes(some(), Grid::from_env().pick(12_000_000, 2_000_000));
    assert!(some().filter(covered).count() > 4 && ran.kinds.len() == 3 && ran.judged > 3);
}

/// The longest sequence is a hint: a right one, none, and wrong ones give the same bits.
#[test]
fn hints_change_no_result() {
    let cases = packed::cases(Grid::from_env());
    let cheap = |case: &&Case| work(case) < 20_000_000;
    let mut kinds = BTreeSet::new();
    // One of each kind.
    for case in cases.iter().filter(cheap).filter(|case| kinds.insert(kind(&case.packing))) {
        same_with_hints::<Prepared<bf16>>(case);
        same_with_hints::<backward::Prepared<f32>>(case);
    }
    assert_eq!(kinds.len(), 8);
}

fn same_with_hints<P: ThroughC>(case: &Case) {
    let packing = &case.packing;
    let sides = [(&packing.cu_seqlens_q, &packing.seqused_q), (&packing.cu_seqlens_kv, &packing.seqused_kv)];
    // A side of equal lengths has no hint.
    let hints = |hints: Hints| {
        let of = |side: usize| if sides[side].0.is_some() || sides[side].1.is_some() { hints[side] } else { 0 };
        [of(0), of(1)]
    };
    let prepared = P::of_inputs(case);
    let run = |given: Hints| {
        let mut outputs = prepared.poisoned();
        prepared.run(hints(given), &mut outputs).unwrap_or_else(|why| panic!("{case}, {given:?}: {why:?}"));
        prepared.check_memory(&prepared, &outputs).unwrap_or_else(|why| panic!("{case}, {given:?}: {why}"));
        P::memory(&outputs)
    };
    let want = run(NO_HINTS);
    let right = longest(&packing.sequences(case.dims).unwrap()).map(|rows| rows as i64);
    for given in [right, [1, 1], right.map(|rows| rows / 2), [1 << 40, i64::MAX]] {
        assert!(run(given) == want, "{} {case}: other results with {given:?}", P::DTYPE);
    }
    let text = prepared.run(hints([-2, -2]), &mut prepared.poisoned()).unwrap_err().1;
    assert!(text.starts_with("max_seqlen_") && text.contains("-2; allowed: 0 and above"), "{text}");
    // Of a side without lists a hint has no meaning.
    let refused = sides.map(|(offsets, used)| if offsets.is_none() && used.is_none() { 9 } else { 0 });
    if refused != NO_HINTS {
        let text = prepared.run(refused, &mut prepared.poisoned()).unwrap_err().1;
        assert!(text.starts_with("max_seqlen_") && text.contains(": 9; allowed: with packed"), "{text}");
    }
}

/// Queries and keys of three sequences, with used lengths of the keys.
fn small() -> Case {
    let packing = Packing {
        cu_seqlens_q: Some(vec![1, 5, 5, 12]),
        cu_seqlens_kv: Some(vec![0, 3, 9, 14]),
        seqused_kv: Some(vec![3, 0, 4]),
        ..Packing::default()
    };
    Case { packing, ..Case::new(13, 15, 16, Mask::causal()).heads(3, 4, 2) }
}

/// Lists that a run refuses, each with what it says.
type Refused = (fn(&mut Packing), hattn_status, &'static str);

const REFUSED: [Refused; 11] = [
    (|p| p.cu_seqlens_q = None, HATTN_ERROR_VALUE, "cu_seqlens_q: missing"),
    (|p| p.cu_seqlens_kv = None, HATTN_ERROR_VALUE, "cu_seqlens_kv: missing"),
    (|p| p.seqused_kv = None, HATTN_ERROR_VALUE, "seqused_kv: missing"),
    (|p| p.seqused_q = Some(vec![1, 0, 1]), HATTN_ERROR_VALUE, "seqused_q: given"),
    (
        |p| of(&mut p.cu_seqlens_q)[2] = 4,
        HATTN_ERROR_VALUE,
        "cu_seqlens_q: 4 at 2, after 5; allowed: offsets that do not",
    ),
    (|p| of(&mut p.cu_seqlens_q)[3] = 14, HATTN_ERROR_VALUE, "cu_seqlens_q: 14 at 3; allowed: 0 to 13"),
    (|p| of(&mut p.cu_seqlens_kv)[0] = -1, HATTN_ERROR_VALUE, "cu_seqlens_kv: -1 at 0; allowed: 0 to 15"),
    (|p| of(&mut p.cu_seqlens_kv)[1] = i32::MIN, HATTN_ERROR_VALUE, "cu_seqlens_kv: -2147483648 at 1"),
    (|p| of(&mut p.seqused_kv)[2] = 6, HATTN_ERROR_VALUE, "seqused_kv: 6 at 2; allowed: 0 to 5, the length"),
    (|p| of(&mut p.seqused_kv)[1] = -3, HATTN_ERROR_VALUE, "seqused_kv: -3 at 1"),
    (|p| of(&mut p.cu_seqlens_q).push(13), HATTN_ERROR_SHAPE, "cu_seqlens_q: shape [5], expected [4]"),
];

fn of(list: &mut Option<Vec<i32>>) -> &mut Vec<i32> {
    list.as_mut().unwrap()
}

/// Tensors of lists that a run refuses.
type RefusedTensor = (fn(&mut LengthsMemory), hattn_status, &'static str);

const REFUSED_TENSORS: [RefusedTensor; 5] = [
    (
        |l| l.cu_seqlens[0].as_mut().unwrap().dtype = HATTN_F32,
        HATTN_ERROR_DTYPE,
        "cu_seqlens_q: dtype f32; allowed: i32",
    ),
    (|l| l.cu_seqlens[1].as_mut().unwrap().device = 0, HATTN_ERROR_DEVICE, "cu_seqlens_kv: on device cuda:0"),
    (|l| l.seqused[1].as_mut().unwrap().ndim = 2, HATTN_ERROR_ARGUMENT, "seqused_kv: ndim 2; allowed: 1"),
    (|l| l.seqused[1].as_mut().unwrap().data = null_mut(), HATTN_ERROR_LAYOUT, "seqused_kv: address 0x0"),
    (|l| l.cu_seqlens[0].as_mut().unwrap().struct_size = 8, HATTN_ERROR_ABI, "cu_seqlens_q: struct_size 8"),
];

/// Fails unless these lists are refused and nothing was written.
fn refuses<P: ThroughC>(prepared: &P, run: impl Fn(&Packing, &mut P::Outputs, &dyn Fn(&mut LengthsMemory)) -> Refusal) {
    let refused = |packing: &Packing, edit: &dyn Fn(&mut LengthsMemory), (status, text): (hattn_status, &str)| {
        let mut outputs = prepared.poisoned();
        let got = run(packing, &mut outputs, edit);
        assert!(got.0 == status && got.1.contains(text), "{got:?}, expected {status}: {text}");
        assert!(P::memory(&outputs) == P::memory(&prepared.poisoned()), "{text}: something was written");
    };
    for (edit, status, text) in REFUSED {
        let mut packing = prepared.case().packing.clone();
        edit(&mut packing);
        refused(&packing, &|_| {}, (status, text));
    }
    for (edit, status, text) in REFUSED_TENSORS {
        refused(&prepared.case().packing, &edit, (status, text));
    }
}

#[test]
fn lengths_are_refused_by_name_and_nothing_is_written() {
    let forward = Prepared::<f32>::new(&small());
    let plan = Plan::new(&problem(&forward.problem), HATTN_CPU).unwrap();
    let run = |packing: &Packing, outputs: &mut Outputs<f32>, edit: &dyn Fn(&mut LengthsMemory)| {
        let mut lengths = lengths(packing);
        edit(&mut lengths);
        // SAFETY: live images and lists, or refused before an address is used.
        unsafe { plan.run_packed(&memory(&forward, outputs), &lengths, null_mut()) }.unwrap_err()
    };
    refuses(&forward, run);
    let of_gradients = backward::Prepared::<f32>::new(&small());
    let plan = Plan::new(&backward_problem(&of_gradients.problem), HATTN_CPU).unwrap();
    let run = |packing: &Packing, outputs: &mut backward::Outputs<f32>, edit: &dyn Fn(&mut LengthsMemory)| {
        let mut lengths = lengths(packing);
        edit(&mut lengths);
        // SAFETY: as above.
        unsafe { plan.run_packed(&backward_memory(&of_gradients, outputs), &lengths, null_mut()) }.unwrap_err()
    };
    refuses(&of_gradients, run);
}

/// Packed tensors have no batch, dense ones have one, and lists are for problems that ask for them.
#[test]
fn packed_and_dense_tensors_are_told_apart() {
    let prepared = Prepared::<f32>::new(&small());
    let plan = Plan::new(&problem(&prepared.problem), HATTN_CPU).unwrap();
    let refused = |edit: &dyn Fn(&mut Memory), status: hattn_status, text: &str| {
        let mut outputs = prepared.outputs();
        let mut memory = memory(&prepared, &mut outputs);
        edit(&mut memory);
        // SAFETY: as above.
        let got = unsafe { plan.run_packed(&memory, &lengths(&small().packing), null_mut()) }.unwrap_err();
        assert!(got.0 == status && got.1.contains(text), "{got:?}, expected {status}: {text}");
        assert!(Prepared::memory(&outputs) == Prepared::memory(&prepared.outputs()), "{text}: something was written");
    };
    let with_batch = |t: hattn_tensor| {
        let ([a, b, c, _], [x, y, z, _]) = (t.shape, t.stride);
        hattn_tensor { ndim: t.ndim + 1, shape: [1, a, b, c], stride: [0, x, y, z], ..t }
    };
    refused(&|m| m.q = with_batch(m.q), HATTN_ERROR_ARGUMENT, "q: ndim 4; allowed: 3, [total, heads, head_dim]");
    refused(&|m| m.v = with_batch(m.v), HATTN_ERROR_ARGUMENT, "v: ndim 4; allowed: 3, [total, heads, head_dim]");
    refused(&|m| m.lse = m.lse.map(with_batch), HATTN_ERROR_ARGUMENT, "lse: ndim 3; allowed: 2, [heads, total]");
    refused(&|m| m.o.shape[0] = 12, HATTN_ERROR_SHAPE, "o: shape [12, 4, 16], expected [13, 4, 16]");
    refused(&|m| m.o.stride[0] = 0, HATTN_ERROR_LAYOUT, "o: shape [13, 4, 16] with strides");
    let dense = Prepared::<f32>::new(&Case { packing: Packing::default(), ..small().heads(1, 4, 2) });
    let plan = Plan::new(&problem(&dense.problem), HATTN_CPU).unwrap();
    let mut outputs = dense.outputs();
    let good = memory(&dense, &mut outputs);
    let packed = Memory { k: without_batch(good.k), ..good };
    // SAFETY: as above.
    let got = unsafe { plan.run(&packed, null_mut()) }.unwrap_err();
    assert!(got.0 == HATTN_ERROR_ARGUMENT && got.1.contains("k: ndim 3; allowed: 4"), "{got:?}");
    let list = [0, 13];
    let lists = LengthsMemory { cu_seqlens: [Some(list_input(&list)), None], ..LengthsMemory::default() };
    // SAFETY: as above.
    let got = unsafe { plan.run_packed(&good, &lists, null_mut()) }.unwrap_err();
    assert!(got.0 == HATTN_ERROR_VALUE && got.1.contains("cu_seqlens_q: given"), "{got:?}");
}

/// A bias must have numbers for the longest sequence.
#[test]
fn a_bias_that_is_too_small_is_refused() {
    let case = small().bias("f32:hq".parse().unwrap());
    let given = problem(&case.problem(DType::F32));
    assert!(given.bias_queries >= 7 && given.bias_keys >= 4, "{given:?}");
    let prepared = Prepared::<f32>::new(&case);
    let of_gradients = backward::Prepared::<f32>::new(&case);
    // As many numbers as the longest sequence has used rows, and one less.
    for (queries, keys, says) in [
        (7, 4, ""),
        (6, 4, "cu_seqlens_q: 7 rows at 2; allowed: at most 6, which the bias has numbers for"),
        (7, 3, "cu_seqlens_kv: 4 rows at 2; allowed: at most 3, which the bias has numbers for"),
    ] {
        let cut = |bias: hattn_tensor| hattn_tensor { shape: [1, 4, queries, keys], ..bias };
        let lengths = lengths(&case.packing);
        let mut outputs = prepared.outputs();
        let all = memory(&prepared, &mut outputs);
        let memory = Memory { bias: all.bias.map(cut), ..all };
        let plan = Plan::new(
            &hattn_forward_problem { bias_queries: queries, bias_keys: keys, ..problem(&prepared.problem) },
            HATTN_CPU,
        );
        // SAFETY: as above. A smaller bias is a part of the image.
        let ran = unsafe { plan.unwrap().run_packed(&memory, &lengths, null_mut()) };
        assert_eq!(ran, if says.is_empty() { Ok(()) } else { Err((HATTN_ERROR_VALUE, says.into())) });
        let mut outputs = of_gradients.outputs();
        let all = backward_memory(&of_gradients, &mut outputs);
        let memory = BackwardMemory { bias: all.bias.map(|both| both.map(cut)), ..all };
        let given = backward_problem(&of_gradients.problem);
        let given = hattn_backward_problem { bias_queries: queries, bias_keys: keys, ..given };
        // SAFETY: as above.
        let ran = unsafe { Plan::new(&given, HATTN_CPU).unwrap().run_packed(&memory, &lengths, null_mut()) };
        assert_eq!(ran, if says.is_empty() { Ok(()) } else { Err((HATTN_ERROR_VALUE, says.into())) });
    }
}
