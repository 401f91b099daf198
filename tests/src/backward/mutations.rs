//! Ways in which a backward kernel may be broken, applied to correct gradients: the tolerance must notice every one.

use hopper_attention::reference::{BackwardPlain, Tensor, backward_plain, forward, forward_plain};
use hopper_attention::{BackwardProblem, ForwardProblemBuilder, Mask};

use crate::mutations::{full_block, masks, places};

/// A problem, its inputs and correct gradients.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// The problem.
    pub problem: &'a BackwardProblem,
    /// Queries.
    pub q: &'a Tensor,
    /// Keys.
    pub k: &'a Tensor,
    /// Values.
    pub v: &'a Tensor,
    /// The gradient of the output.
    pub d_o: &'a Tensor,
    /// The gradient of the log-sum-exp.
    pub d_lse: Option<&'a [f64]>,
    /// The correct gradients.
    pub honest: &'a BackwardPlain,
    /// The root mean square of the plain computation's errors as a share of that of the gradient, for dQ, dK and dV.
    pub noise: [f64; 3],
}

/// One way of being broken.
pub struct Mutation {
    /// What is wrong.
    pub name: &'static str,
    /// The broken gradients; `None` where these cannot be distinguished from correct ones.
    pub apply: fn(Subject<'_>) -> Option<BackwardPlain>,
}

/// All of them.
pub const ALL: [Mutation; 28] = [
    Mutation { name: "all zero", apply: |s| scaled(s, [0.0; 3]) },
    Mutation { name: "dQ unscaled", apply: |s| scaled(s, [unscaled(s), 1.0, 1.0]) },
    Mutation { name: "dK unscaled", apply: |s| scaled(s, [1.0, unscaled(s), 1.0]) },
    Mutation { name: "dV with the softmax scale", apply: |s| scaled(s, [1.0, 1.0, 1.0 / unscaled(s)]) },
    Mutation { name: "dQ added to what was there", apply: |s| scaled(s, [2.0, 1.0, 1.0]) },
    Mutation { name: "dQ too large by 0.5%", apply: |s| slightly(s, Gradient::Q, 1.005) },
    Mutation { name: "dK too large by 0.5%", apply: |s| slightly(s, Gradient::K, 1.005) },
    Mutation { name: "dV too small by 0.5%", apply: |s| slightly(s, Gradient::V, 0.995) },
    Mutation { name: "a column of dQ too large by 2%", apply: |s| column(s, Gradient::Q) },
    Mutation { name: "a column of dK too large by 2%", apply: |s| column(s, Gradient::K) },
    Mutation { name: "a column of dV too large by 2%", apply: |s| column(s, Gradient::V) },
    Mutation { name: "a key in the middle missing in dQ", apply: missing_key },
    Mutation { name: "delta of another block", apply: delta_of_another_block },
    Mutation { name: "a block of queries too large in dQ", apply: block_too_large },
    Mutation { name: "the scale of another head dim", apply: other_scale },
    Mutation { name: "two query heads swapped in dQ", apply: swapped_query_heads },
    Mutation { name: "two key heads swapped in dK and dV", apply: swapped_key_heads },
    Mutation { name: "one query head of a group missing in dK and dV", apply: missing_head },
    Mutation { name: "the last query missing in dK and dV", apply: |s| missing_queries(s, 1) },
    Mutation { name: "the last block of queries missing in dK and dV", apply: |s| missing_queries(s, 64) },
    Mutation { name: "a tile of dQ from its neighbour", apply: repeated_tile },
    Mutation { name: "the last row of dK not written", apply: unwritten_row },
    Mutation { name: "the other corner", apply: |s| with_mask(s, masks::other_corner(s.problem.mask())?) },
    Mutation { name: "the diagonal off by one", apply: |s| with_mask(s, masks::off_by_one(s.problem.mask())?) },
    Mutation { name: "the mask forgotten", apply: |s| with_mask(s, Mask::Full) },
    Mutation { name: "delta forgotten", apply: without_delta },
    Mutation { name: "the gradient of the lse forgotten", apply: |s| with_d_lse(s, 0.0) },
    Mutation { name: "the gradient of the lse with the other sign", apply: |s| with_d_lse(s, -1.0) },
];

fn unscaled(s: Subject<'_>) -> f64 {
    1.0 / f64::from(s.problem.softmax_scale())
}

fn scaled(s: Subject<'_>, factors: [f64; 3]) -> Option<BackwardPlain> {
    let times = |tensor: &Tensor, factor: f64| {
        let mut tensor = tensor.clone();
        tensor.data_mut().iter_mut().for_each(|x| *x *= factor);
        tensor
    };
    let BackwardPlain { d_q, d_k, d_v, d_sinks, d_bias } = s.honest.clone();
    let (d_q, d_k, d_v) = (times(&d_q, factors[0]), times(&d_k, factors[1]), times(&d_v, factors[2]));
    Some(BackwardPlain { d_q, d_k, d_v, d_sinks, d_bias })
}

/// One of the gradients.
#[derive(Clone, Copy)]
enum Gradient {
    Q,
    K,
    V,
}

/// Whether correct gradients have errors that are as large as 0.5%. This is so where dP is nearly the same for all keys.
fn drowned(s: Subject<'_>, which: Gradient) -> bool {
    s.noise[which as usize] > 0.004
}

/// A gradient that is off by a common factor.
fn slightly(s: Subject<'_>, which: Gradient, factor: f64) -> Option<BackwardPlain> {
    let mut factors = [1.0; 3];
    factors[which as usize] = factor;
    if drowned(s, which) { None } else { scaled(s, factors) }
}

/// The last column of the last head is too large.
fn column(s: Subject<'_>, which: Gradient) -> Option<BackwardPlain> {
    if drowned(s, which) {
        return None;
    }
    let mut broken = s.honest.clone();
    let tensor = match which {
        Gradient::Q => &mut broken.d_q,
        Gradient::K => &mut broken.d_k,
        Gradient::V => &mut broken.d_v,
    };
    let [_, _, heads, dims] = tensor.shape();
    let all = heads * dims;
    tensor.data_mut().iter_mut().skip(all - 1).step_by(all).for_each(|x| *x *= 1.02);
    Some(broken)
}

/// dQ without the part of one key.
fn missing_key(s: Subject<'_>) -> Option<BackwardPlain> {
    let dims = s.problem.dims();
    let group = s.problem.forward().group_size();
    let scale = f64::from(s.problem.softmax_scale());
    let key = dims.seqlen_kv / 2;
    let keep = |q: usize| s.problem.mask().keep(q, key, dims.seqlen_q, dims.seqlen_kv);
    let exact = forward(s.problem.forward(), s.q, s.k, s.v).ok()?;
    let mut broken = s.honest.clone();
    for (i, (batch, head, query)) in places(s.problem.d_lse_shape()).enumerate().filter(|(_, (.., q))| keep(*q)) {
        let row = |tensor: &Tensor, token: usize, head: usize| tensor.row(batch, token, head).to_vec();
        let dot = |a: Vec<f64>, b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (k, d_o) = (row(s.k, key, head / group), row(s.d_o, query, head));
        let p = (scale * dot(row(s.q, query, head), &k) - exact.lse[i]).exp();
        let delta = dot(row(&exact.o, query, head), &d_o) - s.d_lse.map_or(0.0, |d_lse| d_lse[i]);
        let d_s = p * (dot(row(s.v, key, head / group), &d_o) - delta);
        broken.d_q.row_mut(batch, query, head).iter_mut().zip(k).for_each(|(x, k)| *x -= scale * d_s * k);
    }
    (dims.seqlen_kv > 1 && !drowned(s, Gradient::Q)).then_some(broken)
}

/// Queries 64 to 127 have delta of the block before.
fn delta_of_another_block(s: Subject<'_>) -> Option<BackwardPlain> {
    let delta = deltas(s)?;
    let [_, _, seqlen] = s.problem.d_lse_shape();
    let moved = |i: usize| if (64..128).contains(&(i % seqlen)) { delta[i] - delta[i - 64] } else { 0.0 };
    let d_lse: Vec<f64> = (0..delta.len()).map(|i| s.d_lse.map_or(0.0, |d_lse| d_lse[i]) + moved(i)).collect();
    if seqlen <= 127 {
        return None;
    }
    computed(Subject { problem: &s.problem.to_builder().d_lse(true).build().ok()?, d_lse: Some(&d_lse), ..s })
}

/// Some queries have a dQ that is too large by 0.5%.
fn block_too_large(s: Subject<'_>) -> Option<BackwardPlain> {
    let first = full_block(&s.honest.d_q)?;
    let factor = |q: usize| if (first..first + 64).contains(&q) { 1.005 } else { 1.0 };
    let d_q = Tensor::from_fn(s.honest.d_q.shape(), |[b, q, h, d]| s.honest.d_q.row(b, q, h)[d] * factor(q));
    (!drowned(s, Gradient::Q)).then(|| BackwardPlain { d_q, ..s.honest.clone() })
}

fn other_scale(s: Subject<'_>) -> Option<BackwardPlain> {
    of_forward(s, s.problem.forward().to_builder().softmax_scale(1.1 * s.problem.softmax_scale()))
}

fn swapped_heads(tensor: &Tensor) -> Option<Tensor> {
    let other = |head: usize| match head {
        0 => 1,
        1 => 0,
        head => head,
    };
    let [_, _, heads, _] = tensor.shape();
    (heads > 1).then(|| Tensor::from_fn(tensor.shape(), |[b, t, h, d]| tensor.row(b, t, other(h))[d]))
}

fn swapped_query_heads(s: Subject<'_>) -> Option<BackwardPlain> {
    Some(BackwardPlain { d_q: swapped_heads(&s.honest.d_q)?, ..s.honest.clone() })
}

fn swapped_key_heads(s: Subject<'_>) -> Option<BackwardPlain> {
    let (d_k, d_v) = (swapped_heads(&s.honest.d_k)?, swapped_heads(&s.honest.d_v)?);
    Some(BackwardPlain { d_k, d_v, ..s.honest.clone() })
}

/// dK and dV without the part that some queries `(head, query)` have in them.
fn without(s: Subject<'_>, dropped: impl Fn(usize, usize) -> bool) -> Option<BackwardPlain> {
    let [_, heads, seqlen] = s.problem.d_lse_shape();
    let d_o = Tensor::from_fn(s.d_o.shape(), |[b, q, h, d]| if dropped(h, q) { 0.0 } else { s.d_o.row(b, q, h)[d] });
    let place = |i: usize| (i / seqlen % heads, i % seqlen);
    let d_lse: Option<Vec<f64>> = s.d_lse.map(|d_lse| {
        let kept = |i: usize| {
            let (head, query) = place(i);
            !dropped(head, query)
        };
        d_lse.iter().enumerate().map(|(i, &x)| if kept(i) { x } else { 0.0 }).collect()
    });
    let BackwardPlain { d_k, d_v, .. } = computed(Subject { d_o: &d_o, d_lse: d_lse.as_deref(), ..s })?;
    Some(BackwardPlain { d_k, d_v, ..s.honest.clone() })
}

fn missing_head(s: Subject<'_>) -> Option<BackwardPlain> {
    let group = s.problem.forward().group_size();
    if group == 1 {
        return None;
    }
    without(s, |head, _| head % group == group - 1)
}

fn missing_queries(s: Subject<'_>, queries: usize) -> Option<BackwardPlain> {
    let dims = s.problem.dims();
    let first = dims.seqlen_q.checked_sub(queries).filter(|&first| first > 0)?;
    let keep = |q, kv| s.problem.mask().keep(q, kv, dims.seqlen_q, dims.seqlen_kv);
    // Queries that keep no key have no part.
    if !(first..dims.seqlen_q).any(|q| (0..dims.seqlen_kv).any(|kv| keep(q, kv))) {
        return None;
    }
    without(s, |_, query| query >= first)
}

fn repeated_tile(s: Subject<'_>) -> Option<BackwardPlain> {
    let d_q = &s.honest.d_q;
    let [_, seqlen, _, _] = d_q.shape();
    let repeated = Tensor::from_fn(d_q.shape(), |[b, q, h, d]| d_q.row(b, if q >= 64 { q - 64 } else { q }, h)[d]);
    (seqlen > 64).then(|| BackwardPlain { d_q: repeated, ..s.honest.clone() })
}

fn unwritten_row(s: Subject<'_>) -> Option<BackwardPlain> {
    let mut broken = s.honest.clone();
    let [batch, seqlen, heads, _] = broken.d_k.shape();
    broken.d_k.row_mut(batch - 1, seqlen - 1, heads - 1).fill(f64::NAN);
    Some(broken)
}

fn with_mask(s: Subject<'_>, mask: Mask) -> Option<BackwardPlain> {
    if !masks::differ(s.problem.dims(), s.problem.mask(), mask) {
        return None;
    }
    of_forward(s, s.problem.forward().to_builder().mask(mask))
}

/// For each query the sum over dO * O.
fn deltas(s: Subject<'_>) -> Option<Vec<f64>> {
    let o = forward_plain(s.problem.forward(), s.q, s.k, s.v).ok()?.o;
    let delta = |(batch, head, query)| {
        let products = o.row(batch, query, head).iter().zip(s.d_o.row(batch, query, head)).map(|(o, d_o)| o * d_o);
        products.sum()
    };
    Some(places(s.problem.d_lse_shape()).map(delta).collect())
}

/// A gradient of the LSE that cancels delta.
fn without_delta(s: Subject<'_>) -> Option<BackwardPlain> {
    let delta = deltas(s)?.into_iter().enumerate();
    let d_lse: Vec<f64> = delta.map(|(i, delta)| delta + s.d_lse.map_or(0.0, |d_lse| d_lse[i])).collect();
    computed(Subject { problem: &s.problem.to_builder().d_lse(true).build().ok()?, d_lse: Some(&d_lse), ..s })
}

fn with_d_lse(s: Subject<'_>, factor: f64) -> Option<BackwardPlain> {
    let d_lse: Vec<f64> = s.d_lse?.iter().map(|x| factor * x).collect();
    computed(Subject { d_lse: Some(&d_lse), ..s })
}

/// The gradients of another forward pass.
fn of_forward(s: Subject<'_>, forward: ForwardProblemBuilder) -> Option<BackwardPlain> {
    let options = BackwardProblem::builder(&forward.build().ok()?).d_lse(s.problem.takes_d_lse());
    computed(Subject { problem: &options.build().ok()?, ..s })
}

fn computed(s: Subject<'_>) -> Option<BackwardPlain> {
    backward_plain(s.problem, s.q, s.k, s.v, s.d_o, s.d_lse).ok()
}
