//! Block-sparse masks through the CPU backend, under the tolerance; and what the tolerance must notice.

use hopper_attention::reference::{self, Expected, Modifiers};
use hopper_attention::{DType, Lengths, MASK_BLOCK, Mask, Scaling, Slot, bf16, f16};
use hopper_attention_tests::backward;
use hopper_attention_tests::blocks::{Blocks, BlocksImage, cases, spoil};
use hopper_attention_tests::case::random;
use hopper_attention_tests::data::{Input, Values};
use hopper_attention_tests::fp8::Operands;
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::{Prepared, Runner, Verdict};

/// Every 17th case, from this one on. The oracle takes too long for all cases here. The kernels' tests take them.
fn some(first: usize) -> Vec<Case> {
    cases(Grid::from_env()).into_iter().skip(first).step_by(17).collect()
}

#[test]
fn the_forward_keeps_the_tolerance() {
    Runner::all_on_cpu::<Prepared<f32>>("cpu f32", &some(0));
    Runner::all_on_cpu::<Prepared<bf16>>("cpu bf16", &some(5));
}

#[test]
fn the_backward_keeps_the_tolerance() {
    Runner::all_on_cpu::<backward::Prepared<f32>>("cpu f32 backward", &some(9));
    Runner::all_on_cpu::<backward::Prepared<f16>>("cpu f16 backward", &some(13));
}

/// e4m3 operands, with every kind of factors in turn.
#[test]
fn e4m3_operands_keep_the_tolerance() {
    let cases = some(3);
    let mut runner = Runner::new(["cpu e4m3"]);
    for (i, case) in cases.iter().filter(|case| !matches!(case.values, Values::Garbage(..))).enumerate() {
        let options = case.options(DType::E4M3).lse(true).scaling(Scaling::ALL[i % 3]).half_scores(i % 2 == 0);
        // A cap comes before the lists.
        let problem = options.softcap(if i % 4 == 1 { 10.0 } else { 0.0 }).build().unwrap();
        let operands = Operands::of_case(case, &problem, (i % 2 == 1).then_some(case.seed));
        let (o, lse) = operands.run();
        runner.take(0, case, DType::E4M3, Verdict::from(&operands.expected().check(&o, Some(&lse)).unwrap()));
    }
    runner.finish();
}

/// Factors of 0 make products of 0, also where a pair is hidden.
#[test]
fn factors_of_zero_hide_nothing() {
    let case = Case::new(200, 400, 32, Mask::Full).blocks(Blocks::Random(60));
    let problem = case.options(DType::E4M3).lse(true).scaling(Scaling::PerBlock).build().unwrap();
    let operands = Operands::of_case(&case, &problem, None).with_factors_times(Input::K, 0.0);
    let (o, lse) = operands.run();
    let report = operands.expected().check(&o, Some(&lse)).unwrap();
    assert!(report.passed(), "{report}");
}

/// What `hattn fuzz` draws has lists.
#[test]
fn random_cases_keep_the_tolerance() {
    use proptest::strategy::{Strategy as _, ValueTree as _};
    let mut runner = random::runner(hopper_attention_tests::problems::random::seed());
    let strategy = (random::case(128, 8), random::blocks());
    let drawn: Vec<_> = (0..Grid::from_env().pick(20, 40))
        .map(|_| {
            let (case, blocks) = strategy.new_tree(&mut runner).unwrap().current();
            random::listed(case, blocks)
        })
        .collect();
    Runner::all_on_cpu::<Prepared<bf16>>("cpu bf16", &drawn);
    Runner::all_on_cpu::<backward::Prepared<bf16>>("cpu bf16 backward", &drawn);
}

/// A way to read lists wrong, by the name of what is wrong.
pub type Mistake = (&'static str, fn(&mut BlocksImage));

pub const MISTAKES: [Mistake; 5] = [
    ("the last full block is forgotten", |lists| {
        lists.inner_mut(Slot::FullBlockCnt).unwrap().iter_mut().for_each(|count| *count = (*count - 1).max(0));
    }),
    ("the last partial block is forgotten", |lists| {
        lists.inner_mut(Slot::MaskBlockCnt).unwrap().iter_mut().for_each(|count| *count = (*count - 1).max(0));
    }),
    ("bits are those of the neighbouring key", |lists| {
        lists.inner_mut(Slot::MaskBits).unwrap().iter_mut().for_each(|word| *word = word.rotate_left(1));
    }),
    ("bits are those of the neighbouring query", |lists| {
        lists.inner_mut(Slot::MaskBits).unwrap().rotate_left(4);
    }),
    ("bits are ignored", |lists| lists.inner_mut(Slot::MaskBits).unwrap().fill(-1)),
];

/// A kernel that reads the lists wrong fails.
#[test]
fn wrong_lists_are_noticed() {
    // Seeds with lists of full blocks, and more than one block of each kind.
    let mut seeds = (0..).map(|seed| Case { seed, ..Case::new(400, 900, 64, Mask::Full) }.blocks(Blocks::Random(90)));
    let fits = |case: &Case| {
        let lists = case.block_lists().unwrap();
        lists.mask.has_full_blocks() && lists.inner(Slot::MaskBlockCnt).iter().all(|&count| count > 1)
    };
    let case = seeds.find(fits).unwrap();
    let prepared = Prepared::<bf16>::new(&case);
    let [q, k, v] = &prepared.tensors();
    let lists = prepared.blocks.clone().unwrap();
    let plain = |lists: &BlocksImage| {
        let modifiers = Modifiers { blocks: Some(lists.borrowed()), ..Modifiers::default() };
        let plain = reference::forward_plain_with(&prepared.problem, &Lengths::default(), [q, k, v], modifiers);
        let plain = plain.unwrap();
        prepared.expected.check(&plain.o, Some(&plain.lse)).unwrap()
    };
    assert!(plain(&lists).passed());
    for (name, mistake) in MISTAKES {
        let mut wrong = lists.clone();
        mistake(&mut wrong);
        let report = plain(&wrong);
        assert!(!report.passed(), "{name}, {case}: {report}");
    }
}

/// The rule for wrong contents, in other words: of the blocks that are in range, the first place counts, and full ones before
/// partial ones.
#[test]
fn the_rule_for_wrong_contents_is_one_of_plain_lists() {
    let dims = hopper_attention::Dims::new(1, 300, 2, 8).with_seqlen_kv(700);
    for seed in 0..20 {
        let mut lists = Blocks::Random(50).image(dims, seed).unwrap();
        spoil(&mut lists, seed);
        let problem = hopper_attention::ForwardProblem::builder(DType::F32, dims).lse(true);
        let problem = problem.block_mask(Some(lists.mask)).build().unwrap();
        let tensors = [problem.q_shape(), problem.k_shape(), problem.v_shape()].map(|shape| {
            hopper_attention::reference::Tensor::from_fn(shape, |[b, s, h, d]| {
                ((b + 3 * s + 5 * h + 7 * d) % 11) as f64 * 0.1
            })
        });
        let [q, k, v] = &tensors;
        let modifiers = |lists| Modifiers { blocks: Some(lists), ..Modifiers::default() };
        let spoiled =
            Expected::with(&problem, &Lengths::default(), [q, k, v], modifiers(lists.borrowed()), 1.0, None).unwrap();
        // The same lists without what does not count.
        let mut clean = lists.clone();
        let (of_row, most) = (700usize.div_ceil(MASK_BLOCK), lists.mask.most_partial());
        let rows = lists.inner(Slot::MaskBlockCnt).len();
        for row in 0..rows {
            let mut seen = vec![false; of_row];
            let mut keep = |cnt: Slot, idx: Slot, most: usize| -> Vec<(usize, i32)> {
                let Some(&count) = lists.inner(cnt).get(row) else { return vec![] };
                let list = &lists.inner(idx)[row * of_row..][..usize::try_from(count).unwrap_or(0).min(most)];
                let counts = |&(_, &block): &(usize, &i32)| {
                    usize::try_from(block)
                        .is_ok_and(|block| block < of_row && !std::mem::replace(&mut seen[block], true))
                };
                list.iter().enumerate().filter(counts).map(|(n, &block)| (n, block)).collect()
            };
            let full = keep(Slot::FullBlockCnt, Slot::FullBlockIdx, of_row);
            let partial = keep(Slot::MaskBlockCnt, Slot::MaskBlockIdx, most);
            if let Some(counts) = clean.inner_mut(Slot::FullBlockCnt) {
                counts[row] = full.len() as i32;
                let indices = &mut clean.inner_mut(Slot::FullBlockIdx).unwrap()[row * of_row..];
                full.iter().enumerate().for_each(|(at, (_, block))| indices[at] = *block);
            }
            clean.inner_mut(Slot::MaskBlockCnt).unwrap()[row] = partial.len() as i32;
            for (at, (n, block)) in partial.into_iter().enumerate() {
                clean.inner_mut(Slot::MaskBlockIdx).unwrap()[row * of_row + at] = block;
                let words = lists.inner(Slot::MaskBits)[(row * most + n) * 512..][..512].to_vec();
                clean.inner_mut(Slot::MaskBits).unwrap()[(row * most + at) * 512..][..512].copy_from_slice(&words);
            }
        }
        let expected =
            Expected::with(&problem, &Lengths::default(), [q, k, v], modifiers(clean.borrowed()), 1.0, None).unwrap();
        assert_eq!(spoiled.oracle().o.data(), expected.oracle().o.data(), "seed {seed}");
        assert_eq!(spoiled.oracle().lse, expected.oracle().lse, "seed {seed}");
    }
}
