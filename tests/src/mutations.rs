//! Ways in which a kernel may be broken, applied to a correct result: the tolerance must notice every one.

use hopper_attention::reference::{Plain, Tensor, forward_plain};
use hopper_attention::{Corner, DType, Dims, ForwardProblem, Mask};

/// A problem, its inputs and a correct result.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// The problem.
    pub problem: &'a ForwardProblem,
    /// Queries.
    pub q: &'a Tensor,
    /// Keys.
    pub k: &'a Tensor,
    /// Values.
    pub v: &'a Tensor,
    /// The correct output.
    pub o: &'a Tensor,
    /// The correct log-sum-exp.
    pub lse: &'a [f64],
}

/// One way of being broken.
pub struct Mutation {
    /// What is wrong.
    pub name: &'static str,
    /// The broken output and log-sum-exp; `None` where this cannot be distinguished from a correct result.
    pub apply: fn(Subject<'_>) -> Option<(Tensor, Vec<f64>)>,
}

/// All of them.
pub const ALL: [Mutation; 21] = [
    Mutation { name: "all zero", apply: |s| Some((Tensor::zeros(s.o.shape()), vec![0.0; s.lse.len()])) },
    Mutation { name: "two heads swapped", apply: swapped_heads },
    Mutation { name: "a tile of queries from its neighbour", apply: repeated_tile },
    Mutation { name: "the last block of keys dropped", apply: |s| fewer_keys(s, 64) },
    Mutation { name: "the last key dropped", apply: |s| fewer_keys(s, 1) },
    Mutation { name: "the other corner", apply: other_corner },
    Mutation { name: "the diagonal off by one", apply: diagonal_off_by_one },
    Mutation { name: "the mask forgotten", apply: |s| with_mask(s, Mask::Full) },
    Mutation { name: "unscaled", apply: |s| scaled(s, 1.0 / s.problem.softmax_scale()) },
    Mutation { name: "the scale of another head dim", apply: |s| scaled(s, 1.1) },
    Mutation { name: "a key in the middle dropped", apply: middle_key_dropped },
    Mutation { name: "O too large by a common factor", apply: |s| times(s, 1.0 + small(s)) },
    Mutation { name: "O too small by a common factor", apply: |s| times(s, 1.0 - small(s)) },
    Mutation {
        name: "the lse off by a common factor",
        apply: |s| Some((s.o.clone(), times_lse(s.lse, 1.0 + small(s)))),
    },
    Mutation { name: "a column too large", apply: |s| column(s, |row, dim| row[dim] * (1.0 + small_in_column(s))) },
    Mutation { name: "a column of its neighbour", apply: |s| column(s, |row, dim| row[(dim + 1) % row.len()]) },
    Mutation { name: "sums rescaled by the factor of another block", apply: late_factor },
    Mutation { name: "a block of queries too large", apply: tile_too_large },
    Mutation { name: "the last row not written", apply: unwritten_row },
    Mutation { name: "the lse in base 2", apply: base_2 },
    Mutation { name: "the lse without the row maximum's scale", apply: |s| Some((s.o.clone(), times_lse(s.lse, 0.5))) },
];

fn swapped_heads(s: Subject<'_>) -> Option<(Tensor, Vec<f64>)> {
    let [_, seqlen, heads, _] = s.o.shape();
    let other = |head: usize| match head {
        0 => 1,
        1 => 0,
        head => head,
    };
    let o = Tensor::from_fn(s.o.shape(), |[b, q, h, d]| s.o.row(b, q, other(h))[d]);
    let lse = (0..s.lse.len())
        .map(|i| {
            let (row, head) = (i % seqlen, i / seqlen % heads);
            s.lse[(i / seqlen - head + other(head)) * seqlen + row]
        })
        .collect();
    (heads > 1).then_some((o, lse))
}

fn repeated_tile(s: Subject<'_>) -> Option<(Tensor, Vec<f64>)> {
    let seqlen = s.o.shape()[1];
    let o = Tensor::from_fn(s.o.shape(), |[b, q, h, d]| s.o.row(b, if q >= 64 { q - 64 } else { q }, h)[d]);
    (seqlen > 64).then_some((o, s.lse.to_vec()))
}

fn fewer_keys(s: Subject<'_>, keys: usize) -> Option<(Tensor, Vec<f64>)> {
    let dims = s.problem.dims();
    // Masks move with the length; only where there is none are fewer keys a problem of their own.
    if s.problem.mask() != Mask::Full || dims.seqlen_kv <= keys {
        return None;
    }
    let seqlen_kv = dims.seqlen_kv - keys;
    let shorter = |t: &Tensor| {
        let [batch, _, heads, dim] = t.shape();
        Tensor::from_fn([batch, seqlen_kv, heads, dim], |[b, k, h, d]| t.row(b, k, h)[d])
    };
    let options = ForwardProblem::builder(s.problem.dtype(), dims.with_seqlen_kv(seqlen_kv));
    let problem = options.softmax_scale(s.problem.softmax_scale()).build().ok()?;
    computed(&problem, s.q, &shorter(s.k), &shorter(s.v))
}

fn other_corner(s: Subject<'_>) -> Option<(Tensor, Vec<f64>)> {
    with_mask(s, masks::other_corner(s.problem.mask())?)
}

fn diagonal_off_by_one(s: Subject<'_>) -> Option<(Tensor, Vec<f64>)> {
    with_mask(s, masks::off_by_one(s.problem.mask())?)
}

fn with_mask(s: Subject<'_>, mask: Mask) -> Option<(Tensor, Vec<f64>)> {
    if !masks::differ(s.problem.dims(), s.problem.mask(), mask) {
        return None;
    }
    computed(&s.problem.to_builder().mask(mask).build().ok()?, s.q, s.k, s.v)
}

/// Masks, and those that they are taken for.
pub mod masks {
    use super::*;

    /// One of every kind, and both corners: no mutation may pass under any of them.
    pub const ALL: [Mask; 7] = [
        Mask::Full,
        Mask::causal(),
        Mask::Causal { corner: Corner::TopLeft },
        Mask::window(Some(40), Some(5)),
        Mask::Window { left: Some(9), right: None, corner: Corner::TopLeft },
        Mask::chunked(24),
        Mask::prefix(50),
    ];

    /// Aligned to the other corner.
    pub(crate) fn other_corner(mask: Mask) -> Option<Mask> {
        let other = |corner| match corner {
            Corner::BottomRight => Corner::TopLeft,
            Corner::TopLeft => Corner::BottomRight,
        };
        match mask {
            Mask::Causal { corner } => Some(Mask::Causal { corner: other(corner) }),
            Mask::Window { left, right, corner } => Some(Mask::Window { left, right, corner: other(corner) }),
            Mask::Chunked { chunk, corner } => Some(Mask::Chunked { chunk, corner: other(corner) }),
            Mask::Prefix { keys, corner } => Some(Mask::Prefix { keys, corner: other(corner) }),
            _ => None,
        }
    }

    /// With one key more for each query, for a chunk, or in the prefix.
    pub(crate) fn off_by_one(mask: Mask) -> Option<Mask> {
        match mask {
            Mask::Causal { corner } => Some(Mask::Window { left: None, right: Some(1), corner }),
            Mask::Window { left: Some(left), right, corner } => {
                Some(Mask::Window { left: Some(left + 1), right, corner })
            }
            Mask::Chunked { chunk, corner } => Some(Mask::Chunked { chunk: chunk + 1, corner }),
            Mask::Prefix { keys, corner } => Some(Mask::Prefix { keys: keys + 1, corner }),
            _ => None,
        }
    }

    /// Whether some query keeps other keys.
    pub(crate) fn differ(dims: Dims, one: Mask, other: Mask) -> bool {
        (0..dims.seqlen_q).any(|q| {
            let keep = |mask: Mask, kv| mask.keep(q, kv, dims.seqlen_q, dims.seqlen_kv);
            (0..dims.seqlen_kv).any(|kv| keep(one, kv) != keep(other, kv))
        })
    }
}

fn scaled(s: Subject<'_>, factor: f32) -> Option<(Tensor, Vec<f64>)> {
    let problem = s.problem.to_builder().softmax_scale(s.problem.softmax_scale() * factor).build().ok()?;
    computed(&problem, s.q, s.k, s.v)
}

/// The common factor, minus 1, that must be noticed: 0.5%, and 2% where P is rounded to the three bits of e4m3.
pub(crate) fn small(s: Subject<'_>) -> f64 {
    if s.problem.dtype() == DType::E4M3 { 0.02 } else { 0.005 }
}

/// Likewise for one column, which has fewer elements. With fewer than 100 rows, 0.5% is within the noise that is allowed.
fn small_in_column(s: Subject<'_>) -> f64 {
    match s.problem.dtype() {
        DType::E4M3 => 0.25,
        _ if s.problem.dims().seqlen_q < 100 => 0.0075,
        _ => 0.005,
    }
}

fn times(s: Subject<'_>, factor: f64) -> Option<(Tensor, Vec<f64>)> {
    let mut o = s.o.clone();
    o.data_mut().iter_mut().for_each(|x| *x *= factor);
    Some((o, s.lse.to_vec()))
}

/// The last column of the last head is another one.
fn column(s: Subject<'_>, value: impl Fn(&[f64], usize) -> f64) -> Option<(Tensor, Vec<f64>)> {
    let [_, _, heads, dims] = s.o.shape();
    let o = Tensor::from_fn(s.o.shape(), |[b, q, h, d]| {
        let row = s.o.row(b, q, h);
        if (h, d) == (heads - 1, dims - 1) { value(row, d) } else { row[d] }
    });
    Some((o, s.lse.to_vec()))
}

/// Some queries of one head, as if another block's row sums had been read.
fn tile_too_large(s: Subject<'_>) -> Option<(Tensor, Vec<f64>)> {
    let heads = s.o.shape()[2];
    let factor = if s.problem.dtype() == DType::E4M3 { 1.1 } else { 1.005 };
    let first = full_block(s.o)?;
    let wrong = |q: usize, h: usize| h == heads - 1 && (first..first + 64).contains(&q);
    let o = Tensor::from_fn(s.o.shape(), |[b, q, h, d]| s.o.row(b, q, h)[d] * if wrong(q, h) { factor } else { 1.0 });
    Some((o, s.lse.to_vec()))
}

/// The first of 64 tokens, whose number is a multiple of 64, that have a part in a result.
pub(crate) fn full_block(tensor: &Tensor) -> Option<usize> {
    let [_, seqlen, heads, _] = tensor.shape();
    let full =
        |first: &usize| (*first..first + 64).all(|token| tensor.row(0, token, heads - 1).iter().any(|x| *x != 0.0));
    (0..seqlen / 64).map(|block| block * 64).find(full)
}

fn middle_key_dropped(s: Subject<'_>) -> Option<(Tensor, Vec<f64>)> {
    let dims = s.problem.dims();
    if s.problem.mask() != Mask::Full || dims.seqlen_kv < 2 {
        return None;
    }
    let dropped = dims.seqlen_kv / 2;
    let shorter = |t: &Tensor| {
        let [batch, seqlen, heads, dim] = t.shape();
        Tensor::from_fn([batch, seqlen - 1, heads, dim], |[b, k, h, d]| t.row(b, k + usize::from(k >= dropped), h)[d])
    };
    let options = ForwardProblem::builder(s.problem.dtype(), dims.with_seqlen_kv(dims.seqlen_kv - 1));
    let problem = options.softmax_scale(s.problem.softmax_scale()).build().ok()?;
    computed(&problem, s.q, &shorter(s.k), &shorter(s.v))
}

/// When the last 64 keys were added, the sums so far were divided by the factor of the block before.
fn late_factor(s: Subject<'_>) -> Option<(Tensor, Vec<f64>)> {
    let dims = s.problem.dims();
    let group = s.problem.group_size();
    let mut differs = false;
    let mut o = s.o.clone();
    for (batch, head, query) in places(s.problem.lse_shape()) {
        let keep = |key: &usize| s.problem.mask().keep(query, *key, dims.seqlen_q, dims.seqlen_kv);
        let keys: Vec<usize> = (0..dims.seqlen_kv).filter(keep).collect();
        let q_row = s.q.row(batch, query, head);
        let score = |&key: &usize| {
            let products = q_row.iter().zip(s.k.row(batch, key, head / group)).map(|(q, k)| q * k);
            f64::from(s.problem.softmax_scale()) * products.sum::<f64>()
        };
        let scores: Vec<f64> = keys.iter().map(score).collect();
        let Some(last) = keys.len().checked_sub(64).filter(|&last| last > 64) else { continue };
        let largest = |scores: &[f64]| scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        // The maximum grows in the last block but one, by this factor.
        let factor = (largest(&scores[..last - 64]) - largest(&scores[..last])).exp();
        let row_max = largest(&scores);
        let weights: Vec<f64> = scores.iter().map(|score| (score - row_max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        differs |= factor < 0.8;
        let o_row = o.row_mut(batch, query, head);
        for (key, weight) in keys[..last].iter().zip(&weights) {
            let values = s.v.row(batch, *key, head / group);
            o_row.iter_mut().zip(values).for_each(|(o, v)| *o += weight / sum * v * (factor - 1.0));
        }
    }
    differs.then(|| (o, s.lse.to_vec()))
}

/// All places `(batch, head, token)` of a shape `[batch, heads, tokens]`.
pub(crate) fn places([batch, heads, tokens]: [usize; 3]) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..batch * heads * tokens).map(move |i| (i / tokens / heads, i / tokens % heads, i % tokens))
}

fn times_lse(lse: &[f64], factor: f64) -> Vec<f64> {
    lse.iter().map(|lse| lse * factor).collect()
}

fn unwritten_row(s: Subject<'_>) -> Option<(Tensor, Vec<f64>)> {
    let [batch, seqlen, heads, _] = s.o.shape();
    let mut o = s.o.clone();
    o.row_mut(batch - 1, seqlen - 1, heads - 1).fill(f64::NAN);
    Some((o, s.lse.to_vec()))
}

fn base_2(s: Subject<'_>) -> Option<(Tensor, Vec<f64>)> {
    Some((s.o.clone(), s.lse.iter().map(|lse| lse * std::f64::consts::LOG2_E).collect()))
}

fn computed(problem: &ForwardProblem, q: &Tensor, k: &Tensor, v: &Tensor) -> Option<(Tensor, Vec<f64>)> {
    let Plain { o, lse, .. } = forward_plain(problem, q, k, v).ok()?;
    Some((o, lse))
}
