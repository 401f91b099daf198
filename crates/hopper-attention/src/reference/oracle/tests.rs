//! The oracle's products against plain loops.

mod by_row;

use super::super::sample::{Given, inputs, normal};
use super::*;
use crate::mask::{Corner, Mask};
use crate::problem::{BackwardProblem, Dims};

/// More keys than a tile of queries has, several tiles, and head dims that no vector register fits.
const DIMS: Dims =
    Dims { batch: 2, seqlen_q: 75, seqlen_kv: 131, heads_q: 4, heads_kv: 2, head_dim_qk: 24, head_dim_vo: 40 };

const MASKS: [Mask; 6] = [
    Mask::Full,
    Mask::Causal { corner: Corner::BottomRight },
    Mask::Causal { corner: Corner::TopLeft },
    Mask::Window { left: Some(5), right: Some(3), corner: Corner::BottomRight },
    Mask::Window { left: Some(0), right: Some(0), corner: Corner::TopLeft },
    Mask::Window { left: Some(2), right: None, corner: Corner::TopLeft },
];

/// Numbers that differ only by what sums in another order cost, among numbers of the size of `scale`.
fn near(what: &str, got: f64, want: f64, scale: f64) {
    let same = got == want || got.is_nan() && want.is_nan() || (got - want).abs() <= 1e-12 * scale.max(want.abs());
    assert!(same, "{what}: {got:e}, and {want:e} by rows");
}

/// The same of a row. `least` is the least size that its terms are taken to have.
fn all_near(what: &str, got: &[f64], want: &[f64], least: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let scale = want.iter().filter(|x| x.is_finite()).fold(least, |max: f64, x| max.max(x.abs()));
    got.iter().zip(want).for_each(|(got, want)| near(what, *got, *want, scale));
}

fn compare_forward(problem: &ForwardProblem, [q, k, v]: &[Tensor; 3]) {
    let oracle = forward(problem, q, k, v).unwrap();
    let shape = problem.lse_shape();
    for i in 0..shape.iter().product() {
        let [batch, head, query] = super::super::place(shape, i);
        let want = by_row::row(problem, q, k, v, batch, head, query);
        let of = |tensor: &Tensor| tensor.row(batch, query, head).to_vec();
        all_near("o", &of(&oracle.o), &want.o, 0.0);
        all_near("weighted", &of(&oracle.weighted), &want.weighted, 0.0);
        all_near("lost", &of(&oracle.lost), &want.lost, 1e-3);
        near("lse", oracle.lse[i], want.lse, 1.0);
        let (got, want) = (oracle.scales[i], want.scale);
        for (what, got, want) in [
            ("score", got.score, want.score),
            ("along", got.along, want.along),
            ("row_max", got.row_max, want.row_max),
            ("alike", got.alike, want.alike),
            ("cap", got.cap, want.cap),
        ] {
            near(what, got, want, 1.0);
        }
        assert_eq!(got.keys, want.keys);
    }
}

fn compare_backward(problem: &BackwardProblem, given: &Given) {
    let Given { q, k, v, d_o, d_lse } = given;
    let oracle = backward(problem, q, k, v, d_o, d_lse.as_deref()).unwrap();
    let (queries, keys) = by_row::backward(problem, [q, k, v, d_o], d_lse.as_deref());
    let (d_k, d_v): (Vec<_>, Vec<_>) = keys.into_iter().unzip();
    // dS is a difference, so that small gradients have the rounding errors of large terms.
    let roundoff = unit_roundoff(problem.dtype());
    for (name, values, noise, rows) in [
        ("d_q", &oracle.d_q, &oracle.d_q_noise, queries),
        ("d_k", &oracle.d_k, &oracle.d_k_noise, d_k),
        ("d_v", &oracle.d_v, &oracle.d_v_noise, d_v),
    ] {
        let [batch, seqlen, heads, _] = values.shape();
        for (i, want) in rows.iter().enumerate() {
            let [batch, head, token] = super::super::place([batch, heads, seqlen], i);
            let of = |tensor: &Tensor| tensor.row(batch, token, head).to_vec();
            let roots = |squares: &[f64]| squares.iter().map(|x| x.sqrt()).collect::<Vec<_>>();
            all_near(name, &of(values), &want.values, 1.0);
            all_near(&format!("{name} deviation"), &of(&noise.deviation), &roots(&want.noise_squares), roundoff);
            all_near(&format!("{name} weighted"), &of(&noise.weighted), &roots(&want.squares), 1.0);
            all_near(&format!("{name} of_delta"), &of(&noise.of_delta), &want.of_delta, roundoff);
            near(&format!("{name} alike"), noise.alike[i], want.alike, 1.0);
            assert_eq!(noise.terms[i], want.terms, "{name}");
        }
    }
}

fn problem(dtype: DType, mask: Mask) -> ForwardProblem {
    ForwardProblem::builder(dtype, DIMS).mask(mask).lse(true).build().unwrap()
}

#[test]
fn tiles_give_what_rows_give() {
    for (seed, mask) in MASKS.into_iter().enumerate() {
        for dtype in [DType::BF16, DType::F32, DType::E4M3] {
            let problem = problem(dtype, mask);
            compare_forward(&problem, &inputs(&problem, seed as u64));
        }
        let problem = problem(DType::BF16, mask);
        let problem = BackwardProblem::builder(&problem).d_lse(true).build().unwrap();
        compare_backward(&problem, &Given::normal(&problem, seed as u64));
    }
}

/// Scores that a cap hardly bends, bends, and cuts off; and elements that are not finite.
#[test]
fn also_with_a_cap() {
    for (seed, mask) in MASKS.into_iter().enumerate() {
        for (dtype, cap, deviation) in
            [(DType::BF16, 50.0, 1.0), (DType::F32, 1.0, 1.0), (DType::F16, 15.0, 30.0), (DType::BF16, 0.125, 9.0)]
        {
            let problem = problem(dtype, mask).to_builder().softcap(cap).build().unwrap();
            let backward = BackwardProblem::builder(&problem).d_lse(true).build().unwrap();
            let mut given = Given::normal(&backward, seed as u64);
            given.k = normal(dtype, problem.k_shape(), deviation, 2);
            compare_forward(&problem, &[given.q.clone(), given.k.clone(), given.v.clone()]);
            compare_backward(&backward, &given);
            let length = given.k.data().len();
            given.k.data_mut()[(length / 3 + 7 * seed) % length] = [f64::INFINITY, f64::NEG_INFINITY][seed % 2];
            compare_forward(&problem, &[given.q.clone(), given.k.clone(), given.v.clone()]);
        }
    }
}

/// Equal keys, whose weights are rounded alike, and scores whose exponentials underflow.
#[test]
fn also_of_equal_keys_and_of_large_scores() {
    for deviation in [0.0, 30.0] {
        for mask in MASKS {
            let problem = problem(DType::BF16, mask);
            let [q, _, v] = inputs(&problem, 1);
            let k = normal(DType::BF16, problem.k_shape(), deviation, 2);
            compare_forward(&problem, &[q.clone(), k.clone(), v.clone()]);
            let problem = BackwardProblem::builder(&problem).build().unwrap();
            let given = Given { q, k, v, ..Given::normal(&problem, 3) };
            compare_backward(&problem, &given);
        }
    }
}

/// What is not finite reaches the rows that keep it, and no other.
#[test]
fn also_of_what_is_not_finite() {
    let values = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
    for (i, mask) in MASKS.into_iter().enumerate() {
        let problem = problem(DType::F16, mask);
        let backward = BackwardProblem::builder(&problem).d_lse(true).build().unwrap();
        for which in 0..4 {
            let mut given = Given::normal(&backward, 7);
            let tensors = [&mut given.q, &mut given.k, &mut given.v, &mut given.d_o];
            let tensor = tensors.into_iter().nth(which).unwrap();
            let length = tensor.data().len();
            tensor.data_mut()[(length / 3 + 7 * i) % length] = values[(i + which) % 3];
            tensor.data_mut()[(length / 2 + 5 * i) % length] = values[(i + which + 1) % 3];
            compare_forward(&problem, &[given.q.clone(), given.k.clone(), given.v.clone()]);
            compare_backward(&backward, &given);
        }
    }
}

#[test]
fn progress_goes_from_nothing_to_all() {
    use std::sync::Mutex;

    use crate::reference::{BackwardExpected, Expected};

    let problem = problem(DType::BF16, Mask::causal());
    let [q, k, v] = inputs(&problem, 1);
    let shares = Mutex::new(Vec::new());
    let told = |share: f64| shares.lock().unwrap().push(share);
    let most = || shares.lock().unwrap().drain(..).fold(0.0, f64::max);
    Expected::with_progress(&problem, &q, &k, &v, &told).unwrap();
    assert!(shares.lock().unwrap().iter().all(|share| (0.0..=1.0).contains(share)));
    assert_eq!(most(), 1.0);
    let problem = BackwardProblem::builder(&problem).build().unwrap();
    let given = Given::normal(&problem, 3);
    BackwardExpected::with_progress(&problem, [&q, &k, &v, &given.d_o], None, &told).unwrap();
    assert!(shares.lock().unwrap().iter().any(|share| *share < 0.2));
    assert_eq!(most(), 1.0);
}
