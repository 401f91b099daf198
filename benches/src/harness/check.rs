//! A look at the output before it is timed: a fast wrong kernel must not become a figure.
//!
//! This is not the test suite (that holds every row to a tolerance law): a few rows against f64, and no NaN left.

use std::collections::BTreeMap;

use hopper_attention::{DType, Layout, Operand};

use crate::Point;

/// Q, K, V as they lie in memory.
pub(super) struct Inputs<'a, T> {
    pub(super) q: &'a [T],
    pub(super) k: &'a [T],
    pub(super) v: &'a [T],
    pub(super) q_layout: Layout<4>,
    pub(super) kv_layout: Layout<4>,
}

/// Relative error allowed to a row: well above rounding, two orders below a wrong mask or a lost block of keys.
fn bound(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 6e-3,
        DType::F32 => 1e-4,
        _ => 3e-2,
    }
}

/// The LSE is f32 throughout; this is a wrong normalisation, not rounding.
const LSE_BOUND: f64 = 2e-3;

/// The errors found, by name, and a complaint when they are too large.
///
/// `o` lies as Q does; `lse` is contiguous.
pub(super) fn check<T: Operand<Out = T>>(
    point: &Point,
    inputs: &Inputs<'_, T>,
    o: &[T],
    lse: &[f32],
) -> (BTreeMap<String, serde_json::Value>, Option<String>) {
    let unwritten = o.iter().filter(|x| x.to_f32().is_nan()).count() + lse.iter().filter(|x| x.is_nan()).count();
    let (mut row_error, mut lse_error) = (0.0f64, 0.0f64);
    for [batch, head, query] in rows(point) {
        let (expected, expected_lse) = oracle(point, inputs, batch, head, query);
        let (mut distance, mut norm) = (0.0, 0.0);
        for (dim, expected) in expected.iter().enumerate() {
            let at = inputs.q_layout.offset([batch, query, head, dim]);
            let got = at.and_then(|at| o.get(at)).map_or(f64::NAN, |x| f64::from(x.to_f32()));
            distance += (got - expected).powi(2);
            norm += expected.powi(2);
        }
        row_error = worse(row_error, (distance / norm).sqrt());
        let at = (batch * point.heads_q + head) * point.seqlen + query;
        let got = lse.get(at).map_or(f64::NAN, |&x| f64::from(x));
        lse_error = worse(lse_error, (got - expected_lse).abs());
    }
    let mut complaints = Vec::new();
    if unwritten > 0 {
        complaints.push(format!("{unwritten} elements are NaN"));
    }
    for (name, error, bound) in [("row", row_error, bound(T::DTYPE)), ("lse", lse_error, LSE_BOUND)] {
        // A NaN is larger than any bound.
        if error.is_nan() || error > bound {
            complaints.push(format!("{name} {error:.3e} > {bound:.0e}"));
        }
    }
    let numbers = [("unwritten", unwritten.into()), ("row", json(row_error)), ("lse", json(lse_error))];
    let numbers = numbers.map(|(name, value)| (name.to_owned(), value)).into();
    (numbers, (!complaints.is_empty()).then(|| complaints.join("; ")))
}

/// Holds the whole of an output against another library's, row by row; a complaint when they are too far apart.
pub(super) fn cross<T: Operand<Out = T>>(
    point: &Point,
    layout: &Layout<4>,
    o: &[T],
    other: &[T],
    numbers: &mut BTreeMap<String, serde_json::Value>,
) -> Option<String> {
    let mut worst = 0.0f64;
    for (batch, query, head) in
        (0..point.batch).flat_map(|b| (0..point.seqlen).flat_map(move |q| (0..point.heads_q).map(move |h| (b, q, h))))
    {
        let row = |data: &'_ [T]| -> Option<Vec<f64>> {
            let start = layout.offset([batch, query, head, 0])?;
            Some(data.get(start..start + point.head_dim)?.iter().map(|x| f64::from(x.to_f32())).collect())
        };
        let distance = match (row(o), row(other)) {
            (Some(a), Some(b)) => {
                let distance: f64 = a.iter().zip(&b).map(|(a, b)| (a - b).powi(2)).sum();
                (distance / b.iter().map(|b| b * b).sum::<f64>()).sqrt()
            }
            _ => f64::NAN,
        };
        worst = worse(worst, distance);
    }
    numbers.insert("cross".into(), json(worst));
    let bound = bound(T::DTYPE);
    (worst.is_nan() || worst > bound).then(|| format!("cross {worst:.3e} > {bound:.0e}"))
}

/// JSON has no NaN.
fn json(x: f64) -> serde_json::Value {
    if x.is_finite() { x.into() } else { x.to_string().into() }
}

/// The larger of two errors; NaN is larger than everything.
fn worse(a: f64, b: f64) -> f64 {
    if b.is_nan() || b > a { b } else { a }
}

/// `[batch, head, query]` of the first and last heads, at both ends and around the middle, where tiles meet.
fn rows(point: &Point) -> Vec<[usize; 3]> {
    let last = point.seqlen - 1;
    let queries = [0, 1, last / 2, (last / 2 + 1).min(last), last.saturating_sub(1), last].map(|query| query.min(last));
    let heads = [[0, 0], [point.batch - 1, point.heads_q - 1], [point.batch / 2, point.heads_q / 3]];
    heads.iter().flat_map(|&[batch, head]| queries.map(|query| [batch, head, query])).collect()
}

/// One output row and its LSE in f64, from the definition.
fn oracle<T: Operand>(
    point: &Point,
    inputs: &Inputs<'_, T>,
    batch: usize,
    head: usize,
    query: usize,
) -> (Vec<f64>, f64) {
    let dims = point.head_dim;
    let kv_head = head / (point.heads_q / point.heads_kv);
    let row = |data: &[T], layout: &Layout<4>, at: usize, head: usize| -> Vec<f64> {
        let start = layout.offset([batch, at, head, 0]).unwrap_or(usize::MAX);
        let row = start.checked_add(dims).and_then(|end| data.get(start..end)).unwrap_or(&[]);
        row.iter().map(|x| f64::from(x.to_f32())).collect()
    };
    let q = row(inputs.q, &inputs.q_layout, query, head);
    let scores: Vec<f64> = point
        .keys(query)
        .map(|key| {
            let k = row(inputs.k, &inputs.kv_layout, key, kv_head);
            q.iter().zip(&k).map(|(a, b)| a * b).sum::<f64>() / (dims as f64).sqrt()
        })
        .collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    let mut out = vec![0.0; dims];
    for (key, score) in point.keys(query).zip(&scores) {
        let weight = (score - max).exp() / sum;
        for (out, v) in out.iter_mut().zip(row(inputs.v, &inputs.kv_layout, key, kv_head)) {
            *out += weight * v;
        }
    }
    (out, max + sum.ln())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Order, Precision, Sweep};

    fn point() -> Point {
        let sweep = Sweep {
            hidden: 8,
            tokens: 8,
            batch: Some(2),
            seqlens: vec![4],
            dims: vec![4],
            gqa: vec![2],
            ..Sweep::small()
        };
        let points = sweep.points().unwrap();
        points.into_iter().find(|p| p.causal && p.dtype == Precision::Bf16).unwrap()
    }

    /// With equal keys every weight is the same, so that the answer is known without any oracle.
    fn means() -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let v: Vec<f32> = (0..point().elements(1)).map(|i| i as f32).collect();
        let mut o = vec![f32::NAN; point().elements(2)];
        let mut lse = vec![f32::NAN; 2 * 2 * 4];
        for (batch, head, query, dim) in (0..64).map(|i| (i / 32, i / 16 % 2, i / 4 % 4, i % 4)) {
            let mean = (0..=query).map(|key| v[(batch * 4 + key) * 4 + dim]).sum::<f32>() / (query + 1) as f32;
            o[((batch * 2 + head) * 4 + query) * 4 + dim] = mean;
            lse[(batch * 2 + head) * 4 + query] = 1.0 + ((query + 1) as f32).ln(); // 4 * 0.5 * 1.0 / sqrt(4)
        }
        (v, o, lse)
    }

    fn complaint(change: impl Fn(&mut Vec<f32>, &mut Vec<f32>)) -> Option<String> {
        let [q_layout, kv_layout] = [2, 1].map(|heads| point().layout(heads, Order::Bhsd).unwrap());
        let (v, mut o, mut lse) = means();
        let (q, k) = (vec![0.5f32; o.len()], vec![1.0f32; v.len()]);
        change(&mut o, &mut lse);
        check(&point(), &Inputs { q: &q, k: &k, v: &v, q_layout, kv_layout }, &o, &lse).1
    }

    #[test]
    fn the_definition_passes() {
        assert_eq!(complaint(|_, _| ()), None);
    }

    #[test]
    fn wrong_outputs_do_not() {
        assert!(complaint(|o, _| o[0] = f32::NAN).unwrap().contains("1 elements are NaN"));
        assert!(complaint(|o, _| o[63] += 1.0).unwrap().starts_with("row "));
        assert!(complaint(|_, lse| lse[15] += 0.01).unwrap().starts_with("lse "));
        assert!(complaint(|o, _| o.truncate(1)).unwrap().starts_with("row NaN"));
        assert!(complaint(|o, lse| (o.fill(0.0), lse.fill(0.0)).1).is_some());
    }

    #[test]
    fn every_row_is_held_against_the_others() {
        let layout = point().layout(2, Order::Bhsd).unwrap();
        let (_, o, _) = means();
        let against = |change: fn(&mut Vec<f32>)| {
            let (mut changed, mut numbers) = (o.clone(), BTreeMap::new());
            change(&mut changed);
            let complaint = cross(&point(), &layout, &changed, &o, &mut numbers);
            assert!(numbers.contains_key("cross"));
            complaint
        };
        assert_eq!(against(|_| ()), None);
        // Row 9 of 16 is none of those that are held against f64.
        assert!(against(|o| o[9 * 4] += 1.0).unwrap().starts_with("cross "));
        assert!(against(|o| o.truncate(60)).unwrap().starts_with("cross NaN"));
    }
}
