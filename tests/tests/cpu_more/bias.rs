//! The additive bias and its gradient through the CPU backend, under the tolerance; and what the tolerance must notice.

use hopper_attention::reference::{self, BackwardPlain, Modifiers, tolerance::Figures};
use hopper_attention::{BackwardProblem, Lengths, Mask, bf16, f16};
use hopper_attention_tests::backward;
use hopper_attention_tests::bias::{BiasImage, MISTAKES, Mistake, Numbers, cases};
use hopper_attention_tests::case::random;
use hopper_attention_tests::data::{Image, Poison};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::Prepared;

/// Every 131st case, from this one on: 131 divides none of the numbers of sizes, masks and biases, so that these have all of them.
fn some(first: usize) -> Vec<Case> {
    cases(Grid::from_env()).into_iter().skip(first).step_by(131).collect()
}

#[test]
fn the_forward_keeps_the_tolerance() {
    crate::forwards(some);
}

#[test]
fn the_backward_keeps_the_tolerance() {
    crate::backwards(some);
}

/// What `hattn fuzz` draws.
#[test]
fn random_cases_keep_the_tolerance() {
    use proptest::strategy::{Strategy as _, ValueTree as _};
    let mut runner = random::runner(hopper_attention_tests::problems::random::seed());
    let lists = (random::blocks(), random::bias());
    let strategy = (random::case(128, 8), lists, random::sinks(), random::softcap(), random::biases());
    let drawn = std::iter::repeat_with(|| {
        let (case, (blocks, bias), sinks, softcap, (alibi, max_logits)) =
            strategy.new_tree(&mut runner).unwrap().current();
        random::capped(Case { sinks, alibi, max_logits, bias, ..random::listed(case, blocks) }, softcap)
    });
    let drawn: Vec<_> = drawn.filter(|case| !case.bias.is_none()).take(Grid::from_env().pick(15, 40)).collect();
    crate::both_passes(&drawn);
}

/// A case whose bias has every dimension, and no hidden pair.
fn case(mask: Mask, bias: &str) -> Case {
    Case::new(110, 130, 32, mask).heads(2, 4, 2).bias(bias.parse().unwrap()).softcap(20.0)
}

fn bad(figures: &Figures) -> bool {
    figures.worst_ratio > 1.0
}

/// Results with other biases fail, in O, in the LSE and in the gradients.
#[test]
fn wrong_biases_are_noticed() {
    for mask in [Mask::Full, Mask::causal()] {
        noticed::<bf16>(&case(mask, "bf16:bhq"));
        noticed::<f16>(&case(mask, "f16:bhq"));
        noticed::<f32>(&case(mask, "f32:bhq"));
    }
}

fn noticed<T: Poison>(case: &Case) {
    let of_o = Prepared::<T>::new(case);
    let of_gradients = backward::Prepared::<T>::new(case);
    let d_lse = of_gradients.d_lse.as_ref().map(Image::values);
    let lengths = Lengths::default();
    let [q, k, v] = &of_o.tensors();
    let values = of_o.bias.as_ref().map(BiasImage::values).expect("a bias");
    let (shape, scale) = (of_o.problem.bias_shape(), f64::from(of_o.problem.softmax_scale()));
    let numbers = Numbers { shape, values: &values, scale };
    let right: Mistake = ("right", |of, [batch, head, query, key]| {
        of.values[((batch * of.shape[1] + head) * of.shape[2] + query) * of.shape[3] + key]
    });
    for (what, mistake) in [right].into_iter().chain(MISTAKES) {
        let [_, heads, queries, keys] = shape;
        let place = |i: usize| [i / keys / queries / heads, i / keys / queries % heads, i / keys % queries, i % keys];
        let wrong: Vec<f64> = (0..values.len()).map(|i| mistake(&numbers, place(i))).collect();
        let modifiers = Modifiers { bias: Some(&wrong), ..Modifiers::default() };
        let got = reference::forward_with(&of_o.problem, &lengths, [q, k, v], modifiers).unwrap();
        let report = of_o.expected.check(&got.o, Some(&got.lse)).unwrap();
        let right = what == "right";
        let lse = report.lse.as_ref().expect("an LSE");
        assert!(bad(&report.o) != right && bad(lse) != right, "{what}, {}, {case}: {report}", T::DTYPE);
        let d_o = of_gradients.d_o.tensor();
        let inputs = [q, k, v, &d_o];
        let problem = &of_gradients.problem;
        let got = reference::backward_with(problem, &lengths, inputs, d_lse.as_deref(), modifiers).unwrap();
        let (d_q, d_k, d_v, d_sinks, d_bias) = (got.d_q, got.d_k, got.d_v, got.d_sinks, got.d_bias);
        let got = BackwardPlain { d_q, d_k, d_v, d_sinks, d_bias };
        let report = of_gradients.expected.check_all(&got).unwrap();
        for figures in [&report.d_q, &report.d_k, &report.d_v, report.d_bias.as_ref().expect("dBias")] {
            assert!(bad(figures) != right, "{what}, {}, {case}: {report}", T::DTYPE);
        }
    }
}

/// Gradients of the bias that are made wrongly fail, for each form.
#[test]
fn wrong_gradients_of_the_bias_are_noticed() {
    for dims in ["", "b", "h", "q", "bh", "bq", "hq", "bhq"] {
        gradients_noticed::<bf16>(&case(Mask::causal(), &format!("bf16:{dims}:hidden")));
        gradients_noticed::<f32>(&case(Mask::causal(), &format!("f32:{dims}:hidden")));
    }
}

fn gradients_noticed<T: Poison>(case: &Case) {
    let prepared = backward::Prepared::<T>::new(case);
    let values = prepared.bias.as_ref().map(BiasImage::values).expect("a bias");
    let form = case.bias.option().expect("a bias");
    let shape = prepared.problem.forward().bias_shape();
    let exact = prepared.expected.oracle().d_bias.clone();
    let ratio = |d_bias: &[f64]| prepared.expected.check_bias(d_bias).unwrap().worst_ratio;
    assert!(ratio(&exact) <= 1.0, "{case}");
    assert!(ratio(&prepared.expected.plain().d_bias) <= 1.0, "{case}");
    let times = |factor: f64| exact.iter().map(|x| x * factor).collect::<Vec<_>>();
    let mut wrong: Vec<(&str, Vec<f64>)> = vec![
        ("not written", vec![0.0; exact.len()]),
        ("multiplied by the scale", times(f64::from(prepared.problem.softmax_scale()))),
        ("with the other sign", times(-1.0)),
        ("added to what was there", times(2.0)),
        ("too large by 2%", times(1.02)),
    ];
    // The gradient of a bias that has every dimension, of which parts are left out of the sum.
    let all = hopper_attention::Bias::new(form.dtype()).per_batch(true).per_head(true).per_query(true);
    let own = prepared.problem.forward().to_builder().bias(Some(all));
    let gradients = |options: hopper_attention::ForwardProblemBuilder| {
        let forward = options.build().unwrap();
        let [batch, heads, queries, keys] = forward.bias_shape();
        let places: Vec<[usize; 4]> = (0..batch * heads * queries * keys)
            .map(|i| [i / keys / queries / heads, i / keys / queries % heads, i / keys % queries, i % keys])
            .collect();
        let spread: Vec<f64> = places.iter().map(|&place| values[within(shape, place)]).collect();
        let problem = BackwardProblem::builder(&forward).d_lse(prepared.problem.takes_d_lse()).d_bias(true);
        let inputs = [&prepared.q.tensor(), &prepared.k.tensor(), &prepared.v.tensor(), &prepared.d_o.tensor()];
        let d_lse = prepared.d_lse.as_ref().map(Image::values);
        let modifiers = Modifiers { bias: Some(&spread), ..Modifiers::default() };
        let lengths = Lengths::default();
        let oracle =
            reference::backward_with(&problem.build().unwrap(), &lengths, inputs, d_lse.as_deref(), modifiers).unwrap();
        (places, oracle.d_bias)
    };
    let (places, of_pairs) = gradients(own);
    let summed = |kept: &dyn Fn([usize; 4]) -> bool| {
        let mut sums = vec![0.0; exact.len()];
        for (&place, x) in places.iter().zip(&of_pairs).filter(|(place, _)| kept(**place)) {
            sums[within(shape, place)] += x;
        }
        sums
    };
    assert!(ratio(&summed(&|_| true)) <= 1.0, "{case}");
    if !form.is_per_batch() {
        wrong.push(("without the sum over batch entries", summed(&|place| place[0] == 0)));
    }
    if !form.is_per_head() {
        wrong.push(("without the sum over heads", summed(&|place| place[1] == 0)));
        wrong.push(("without the last head", summed(&|place| place[1] < 3)));
    }
    if !form.is_per_query() {
        wrong.push(("without the sum over queries", summed(&|place| place[2] == 50)));
        wrong.push(("without the last queries", summed(&|place| place[2] < 100)));
    }
    let moved: Vec<f64> = (0..exact.len()).map(|i| exact[(i + 1) % exact.len()]).collect();
    wrong.push(("of the next key", moved));
    let mut hidden = exact.clone();
    // A number of a hidden pair that is not 0, however small.
    if let Some(at) = exact.iter().position(|&x| x == 0.0) {
        hidden[at] = 1e-30;
        wrong.push(("a hidden pair with a gradient", hidden));
    }
    for (what, d_bias) in wrong {
        assert!(ratio(&d_bias) > 1.0, "{what}, {}, {case}: {}", T::DTYPE, ratio(&d_bias));
    }
}

/// The index of a place in a tensor of this shape, whose dimensions of 1 are shared.
fn within(shape: [usize; 4], place: [usize; 4]) -> usize {
    (0..4).fold(0, |at, axis| at * shape[axis] + if shape[axis] == 1 { 0 } else { place[axis] })
}

/// The cap's derivative is not in the gradient of the bias.
#[test]
fn a_gradient_with_the_derivative_of_the_cap_is_noticed() {
    let case = case(Mask::Full, "f32:bhq").softcap(1.0);
    let prepared = backward::Prepared::<f32>::new(&case);
    let [q, k] = [prepared.q.tensor(), prepared.k.tensor()];
    let scale = f64::from(prepared.problem.softmax_scale());
    let mut d_bias = prepared.expected.oracle().d_bias.clone();
    for (i, x) in d_bias.iter_mut().enumerate() {
        let [batch, head, query, key] = [i / 130 / 110 / 4, i / 130 / 110 % 4, i / 130 % 110, i % 130];
        let product: f64 = q.row(batch, query, head).iter().zip(k.row(batch, key, head / 2)).map(|(q, k)| q * k).sum();
        *x *= 1.0 - (scale * product).tanh().powi(2);
    }
    assert!(bad(&prepared.expected.check_bias(&d_bias).unwrap()));
}
