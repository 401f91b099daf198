//! Mistakes in combinations of modifiers, which the tolerance must notice: one modifier forgotten beside each other one, sums of
//! packed sequences that are made as if dense, and lists of blocks that are read wrong.

use hopper_attention::reference::{self, BackwardOracle, BackwardReport, DropoutMask, Modifiers, Oracle, Tensor};
use hopper_attention::{BackwardProblem, ForwardProblem, Lengths, Mask, Slot, bf16, f16};
use hopper_attention_tests::alibi::{Alibi, AlibiImage};
use hopper_attention_tests::backward;
use hopper_attention_tests::bias::BiasImage;
use hopper_attention_tests::blocks::{Blocks, BlocksImage};
use hopper_attention_tests::data::{Image, Poison};
use hopper_attention_tests::packing::Packing;
use hopper_attention_tests::problems::Case;
use hopper_attention_tests::runner::Prepared;
use hopper_attention_tests::sinks::{Sinks, SinksImage};
use rayon::prelude::*;

use crate::blocks::MISTAKES;

/// What a case may have: its name, the case with it, and the case without it.
#[derive(Clone, Copy)]
struct Modifier {
    name: &'static str,
    with: fn(Case) -> Case,
    without: fn(Case) -> Case,
}

/// Each hides, moves or weighs what the others do in another way. Those with a mask exclude each other, and so do lists and packed
/// sequences, which the library refuses together.
const MODIFIERS: [Modifier; 11] = [
    Modifier { name: "softcap", with: |case| case.softcap(2.0), without: |case| case.softcap(0.0) },
    Modifier { name: "alibi", with: |case| case.alibi(Alibi::Standard), without: |case| case.alibi(Alibi::None) },
    Modifier { name: "bias", with: |case| case.bias(bias("f32:hq")), without: |case| case.bias(bias("none")) },
    Modifier {
        name: "sinks",
        // Beside a bias normal ones have less weight than the noise of a gradient.
        with: |case| Case { sinks: Sinks::Ten, ..case },
        without: |case| Case { sinks: Sinks::None, ..case },
    },
    Modifier { name: "dropout", with: |case| case.dropout(0.2), without: |case| case.dropout(0.0) },
    Modifier { name: "causal", with: |case| Case { mask: Mask::causal(), ..case }, without: full },
    Modifier { name: "window", with: |case| Case { mask: Mask::window(Some(20), Some(3)), ..case }, without: full },
    Modifier { name: "chunk", with: |case| Case { mask: Mask::chunked(40), ..case }, without: full },
    Modifier { name: "prefix", with: |case| Case { mask: Mask::prefix(30), ..case }, without: full },
    Modifier { name: "lists", with: |case| case.blocks(Blocks::Random(70)), without: |case| case.blocks(Blocks::None) },
    Modifier { name: "packed", with: packed, without: as_one_sequence },
];

fn bias(text: &str) -> hopper_attention_tests::bias::Bias {
    text.parse().expect("a kind of bias")
}

fn full(case: Case) -> Case {
    Case { mask: Mask::Full, ..case }
}

/// Three sequences, none of which is empty or has more queries than keys.
fn packed(mut case: Case) -> Case {
    case.dims = case.dims.with_batch(3);
    let (cu_seqlens_q, cu_seqlens_kv) = (Some(vec![0, 50, 90, 140]), Some(vec![0, 60, 105, 160]));
    Case { packing: Packing { cu_seqlens_q, cu_seqlens_kv, ..Packing::default() }, ..case }
}

/// The rows of all sequences as those of one: what a kernel computes that does not read the offsets.
fn as_one_sequence(mut case: Case) -> Case {
    case.dims = case.dims.with_batch(1);
    Case { packing: Packing::default(), ..case }
}

/// Two blocks of queries and two of keys. (The seed gives lists that hide pairs in each of the four.)
fn plain() -> Case {
    Case { seed: 3, ..Case::new(140, 160, 16, Mask::Full).heads(1, 4, 2) }
}

/// Pairs of modifiers that a case may have.
fn pairs() -> impl Iterator<Item = [Modifier; 2]> {
    let exclude = |a: &Modifier, b: &Modifier| {
        let both = |names: &[&str]| names.contains(&a.name) && names.contains(&b.name);
        both(&["causal", "window", "chunk", "prefix"]) || both(&["lists", "packed"])
    };
    let all = (0..MODIFIERS.len()).flat_map(|i| (i + 1..MODIFIERS.len()).map(move |j| [MODIFIERS[i], MODIFIERS[j]]));
    all.filter(move |[a, b]| !exclude(a, b))
}

/// A case with its inputs, and what must come out of both passes.
struct Subject<T> {
    forward: Prepared<T>,
    backward: backward::Prepared<T>,
}

impl<T: Poison> Subject<T> {
    fn new(case: &Case) -> Self {
        Self { forward: Prepared::new(case), backward: backward::Prepared::new(case) }
    }

    /// The bias of a problem: that of the case, or its numbers in turns where the problem has more rows.
    fn bias_of(&self, problem: &ForwardProblem) -> Option<Vec<f64>> {
        let values = self.forward.bias.as_ref().filter(|_| problem.bias().is_some()).map(BiasImage::values)?;
        let (own, [batch, heads, queries, keys]) = (self.forward.problem.bias_shape(), problem.bias_shape());
        let spread = |i: usize| {
            let place = [i / keys / queries / heads, i / keys / queries % heads, i / keys % queries, i % keys];
            values[within(own, place)]
        };
        Some((0..batch * heads * queries * keys).map(spread).collect())
    }

    /// Both passes in f64, of a case with the same inputs.
    fn computed(&self, case: &Case) -> (Oracle, BackwardOracle) {
        let Self { forward: prepared, backward } = self;
        let problem = case.problem(T::DTYPE);
        let sinks = prepared.sinks.as_ref().filter(|_| problem.sinks().is_some()).map(SinksImage::values);
        let slopes = prepared.alibi.as_ref().filter(|_| problem.alibi().is_some()).map(AlibiImage::values);
        let blocks = prepared.blocks.as_ref().filter(|_| problem.block_mask().is_some());
        let bias = self.bias_of(&problem);
        let modifiers = Modifiers {
            sinks: sinks.as_deref(),
            alibi_slopes: slopes.as_deref(),
            bias: bias.as_deref(),
            blocks: blocks.map(BlocksImage::borrowed),
            dropout: DropoutMask::of(&problem, prepared.dropout_state),
        };
        let ([q, k, v], d_o) = (prepared.tensors(), backward.d_o.tensor());
        let d_lse = backward.d_lse.as_ref().map(Image::values);
        let options = BackwardProblem::builder(&problem).d_lse(case.lse);
        let options = options.d_sinks(problem.sinks().is_some()).d_bias(problem.bias().is_some());
        let (gradients, lengths) = (options.build().unwrap(), case.packing.lengths());
        (
            reference::forward_with(&problem, &lengths, [&q, &k, &v], modifiers).unwrap(),
            reference::backward_with(&gradients, &lengths, [&q, &k, &v, &d_o], d_lse.as_deref(), modifiers).unwrap(),
        )
    }

    /// The verdict on the gradients of Q, K and V.
    fn judged(&self, got: &BackwardOracle) -> BackwardReport {
        self.backward.expected.check(&got.d_q, &got.d_k, &got.d_v).unwrap()
    }
}

/// The index of a place in a tensor of this shape. Places past the end of a dimension begin again.
fn within(shape: [usize; 4], place: [usize; 4]) -> usize {
    (0..4).fold(0, |at, axis| at * shape[axis] + place[axis] % shape[axis])
}

#[test]
fn a_forgotten_modifier_is_noticed_beside_each_other_one() {
    let pairs: Vec<_> = pairs().collect();
    // All pairs of eleven, but for six of masks, and for lists with packed sequences.
    assert_eq!(pairs.len(), 11 * 10 / 2 - 6 - 1);
    pairs.into_par_iter().for_each(|pair| {
        forgotten::<bf16>(pair);
        forgotten::<f16>(pair);
        forgotten::<f32>(pair);
    });
}

fn forgotten<T: Poison>([a, b]: [Modifier; 2]) {
    let case = (b.with)((a.with)(plain()));
    let subject = Subject::<T>::new(&case);
    let (o, gradients) = subject.computed(&case);
    let report = subject.forward.expected.check(&o.o, Some(&o.lse)).unwrap();
    assert!(report.passed(), "{} and {}, {}, {case}: {report}", a.name, b.name, T::DTYPE);
    let report = subject.judged(&gradients);
    assert!(report.passed(), "{} and {}, {}, {case}: {report}", a.name, b.name, T::DTYPE);
    for (lost, kept) in [(a, b), (b, a)] {
        let (o, gradients) = subject.computed(&(lost.without)(case.clone()));
        let what = || format!("{} forgotten beside {}, {}, {case}", lost.name, kept.name, T::DTYPE);
        let report = subject.forward.expected.check(&o.o, Some(&o.lse)).unwrap();
        assert!(!report.passed(), "{}: {report}", what());
        let report = subject.judged(&gradients);
        assert!(!report.passed(), "{}: {report}", what());
    }
}

/// dSinks and dBias of packed sequences are sums over all of them, of rows that are counted from the first of their sequence.
#[test]
fn sums_of_packed_sequences_as_if_dense_are_noticed() {
    as_if_dense::<bf16>();
    as_if_dense::<f16>();
    as_if_dense::<f32>();
}

fn as_if_dense<T: Poison>() {
    for (mask, alibi) in [(Mask::Full, Alibi::None), (Mask::causal(), Alibi::Standard)] {
        let case = Case { mask, alibi, sinks: Sinks::Normal, ..packed(plain().bias(bias("f32:hq"))) };
        let subject = Subject::<T>::new(&case);
        let expected = &subject.backward.expected;
        let honest = expected.plain();
        let of_sinks = |d_sinks: &[f64]| {
            expected.check_with(&honest.d_q, &honest.d_k, &honest.d_v, d_sinks).unwrap().d_sinks.unwrap().worst_ratio
        };
        let of_bias = |d_bias: &[f64]| expected.check_bias(d_bias).unwrap().worst_ratio;
        let held = |what: &str, right: bool, d_sinks: &[f64], d_bias: &[f64]| {
            let (sinks, bias) = (of_sinks(d_sinks), of_bias(d_bias));
            assert!((sinks <= 1.0) == right && (bias <= 1.0) == right, "{what}, {}: {sinks}, {bias}", T::DTYPE);
        };
        let (_, right) = subject.computed(&case);
        held("right", true, &right.d_sinks, &right.d_bias);

        // Without the offsets: one sequence, whose pairs are added to numbers of the bias in turns.
        let shape = subject.forward.problem.bias_shape();
        let dense = as_one_sequence(case.clone());
        let (_, wrong) = subject.computed(&dense);
        let [_, heads, queries, keys] = dense.problem(T::DTYPE).bias_shape();
        let mut folded = vec![0.0; right.d_bias.len()];
        for (i, x) in wrong.d_bias.iter().enumerate() {
            let place = [0, i / keys / queries % heads, i / keys % queries, i % keys];
            folded[within(shape, place)] += x;
        }
        held("without offsets", false, &wrong.d_sinks, &folded);

        // Of the first sequence, or of all but the last one.
        let used = |lengths: [i32; 3]| {
            let packing = Packing { seqused_q: Some(lengths.into()), ..case.packing.clone() };
            subject.computed(&Case { packing, ..case.clone() }).1
        };
        for (what, lengths) in [("of the first sequence", [50, 0, 0]), ("without the last sequence", [50, 40, 0])] {
            let wrong = used(lengths);
            held(what, false, &wrong.d_sinks, &wrong.d_bias);
        }

        // Each sequence adds to the rows and keys that it has in the tensors.
        let [_, _, queries, keys] = shape;
        let mut moved = vec![0.0; right.d_bias.len()];
        let sequences = [([50, 0, 0], 0, 0), ([0, 40, 0], 50, 60), ([0, 0, 50], 90, 105)];
        for (lengths, first_query, first_key) in sequences {
            let own = used(lengths).d_bias;
            for (i, x) in own.iter().enumerate() {
                let (query, key) = (i / keys % queries + first_query, i % keys + first_key);
                if query < queries && key < keys {
                    moved[within(shape, [0, i / keys / queries, query, key])] += x;
                }
            }
        }
        assert!(of_bias(&moved) > 1.0, "by rows of the tensors, {}: {}", T::DTYPE, of_bias(&moved));
    }
}

/// Lists that are read wrong spoil O or the LSE, and at least one of dQ, dK and dV.
#[test]
fn wrong_lists_spoil_both_passes() {
    wrong_lists::<bf16>();
    wrong_lists::<f16>();
    wrong_lists::<f32>();
}

fn wrong_lists<T: Poison>() {
    // Seeds with lists of full blocks, and more than one block of each kind.
    let mut seeds = (0..).map(|seed| Case { seed, ..Case::new(260, 900, 32, Mask::Full) }.blocks(Blocks::Random(90)));
    let fits = |case: &Case| {
        let lists = case.block_lists().unwrap();
        lists.mask.has_full_blocks() && lists.inner(Slot::MaskBlockCnt).iter().all(|&count| count > 1)
    };
    let case = seeds.find(fits).unwrap();
    let prepared = Subject::<T>::new(&case);
    let lists = prepared.forward.blocks.clone().unwrap();
    let right: (&str, fn(&mut BlocksImage)) = ("right", |_| {});
    for (name, mistake) in [right].into_iter().chain(MISTAKES) {
        let mut spoiled = lists.clone();
        mistake(&mut spoiled);
        let modifiers = Modifiers { blocks: Some(spoiled.borrowed()), ..Modifiers::default() };
        let Subject { forward, backward } = &prepared;
        let ([q, k, v], d_o): ([Tensor; 3], Tensor) = (forward.tensors(), backward.d_o.tensor());
        let lengths = Lengths::default();
        let got = reference::forward_with(&forward.problem, &lengths, [&q, &k, &v], modifiers).unwrap();
        let report = forward.expected.check(&got.o, Some(&got.lse)).unwrap();
        assert_eq!(report.passed(), name == "right", "{name}, {}, {case}: {report}", T::DTYPE);
        let d_lse = backward.d_lse.as_ref().map(Image::values);
        let inputs = [&q, &k, &v, &d_o];
        let got = reference::backward_with(&backward.problem, &lengths, inputs, d_lse.as_deref(), modifiers).unwrap();
        let report = prepared.judged(&got);
        assert_eq!(report.passed(), name == "right", "{name}, {}, {case}: {report}", T::DTYPE);
    }
}
