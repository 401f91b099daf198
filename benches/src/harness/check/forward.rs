//! Rows of O, and their LSE.

use hopper_attention::Float;

use super::{Row, dot, places, spread, values};
use crate::harness::contest::{Pool, Task};

/// Some rows, and the LSE beside its places.
pub(super) fn rows<T: Float>(task: &Task<'_, T>, pool: &Pool<T>) -> (Vec<Row>, Vec<(usize, f64)>) {
    let point = task.point;
    let places = places(point, point.seqlen_q()).into_iter().chain(spread(point, point.seqlen_q()));
    let each = places.map(|at| {
        let [batch, query, head] = at;
        let (exact, lse) = row(task, pool, at);
        let place = (batch * point.heads_q + head) * point.seqlen_q() + query;
        (Row { tensor: 0, at, exact, size: 0.0 }, (place, lse))
    });
    each.unzip()
}

/// One output row and its LSE in f64, from the definition.
fn row<T: Float>(task: &Task<'_, T>, pool: &Pool<T>, [batch, query, head]: [usize; 3]) -> (Vec<f64>, f64) {
    let point = task.point;
    let kv_head = head / point.group();
    let q = values(&pool.q, &task.q, [batch, query, head]);
    let added = |key| task.added([batch, head, query, key]);
    let product = |key| dot(&q, &values(&pool.k, &task.k, [batch, key, kv_head]));
    let score = |key| point.score(product(key), [head, query, key])[0] + added(key);
    let keys = point.keys(query).filter(|&key| point.sees(query, key));
    let keys: Vec<usize> = keys.filter(|&key| added(key) != f64::NEG_INFINITY).collect();
    let scores: Vec<f64> = keys.iter().copied().map(score).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    let mut out = vec![0.0; point.head_dims().vo];
    for (key, score) in keys.into_iter().zip(&scores) {
        let weight = (score - max).exp() / sum * point.kept([batch, head, query, key]);
        for (out, v) in out.iter_mut().zip(values(&pool.v, &task.v, [batch, key, kv_head])) {
            *out += weight * v;
        }
    }
    (out, max + sum.ln())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::{Expected, changed, cross};
    use super::*;
    use crate::harness::contest::Outputs;
    use crate::{Class, Order, Point, Precision, Sweep};

    fn point() -> Point {
        let sweep = Sweep {
            hidden: 8,
            tokens: 8,
            batch: Some(2),
            seqlens: vec![4],
            dims: vec![4.into()],
            gqa: vec![2],
            ..Sweep::small()
        };
        let points = sweep.points().unwrap();
        points.into_iter().find(|p| p.causal && p.dtype == Precision::Bf16).unwrap()
    }

    /// With equal keys every weight is the same, so that the answer is known without any oracle.
    fn means() -> (Vec<f32>, Outputs<f32>) {
        let v: Vec<f32> = (0..point().elements(1)).map(|i| i as f32).collect();
        let mut o = vec![f32::NAN; point().elements(2)];
        let mut lse = vec![f32::NAN; 2 * 2 * 4];
        for (batch, head, query, dim) in (0..64).map(|i| (i / 32, i / 16 % 2, i / 4 % 4, i % 4)) {
            let mean = (0..=query).map(|key| v[(batch * 4 + key) * 4 + dim]).sum::<f32>() / (query + 1) as f32;
            o[((batch * 2 + head) * 4 + query) * 4 + dim] = mean;
            lse[(batch * 2 + head) * 4 + query] = 1.0 + ((query + 1) as f32).ln(); // 4 * 0.5 * 1.0 / sqrt(4)
        }
        (v, Outputs { tensors: vec![o], lse, d_bias: None })
    }

    fn complaint(change: impl Fn(&mut Vec<f32>, &mut Vec<f32>)) -> Option<String> {
        let point = point();
        let task = Task::new(&point, Order::Bhsd).unwrap();
        let (v, mut outputs) = means();
        let pool = Pool { q: vec![0.5; outputs.tensors[0].len()], k: vec![1.0; v.len()], v, d_o: vec![] };
        change(&mut outputs.tensors[0], &mut outputs.lse);
        Expected::new(&task, &pool).check(&outputs).1
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
    fn nan_belongs_where_a_query_is_nan() {
        let point = Point { inputs: Class::Nan, ..point() };
        let task = Task::new(&point, Order::Bhsd).unwrap();
        let (v, right) = means();
        let mut pool = Pool { q: vec![0.5; right.tensors[0].len()], k: vec![1.0; v.len()], v, d_o: vec![] };
        // The first query of each sequence and head.
        let mut poisoned = right.clone();
        for head in 0..4 {
            pool.q[head * 16..head * 16 + 4].fill(f32::NAN);
            poisoned.tensors[0][head * 16..head * 16 + 4].fill(f32::NAN);
            poisoned.lse[head * 4] = f32::NAN;
        }
        let expected = Expected::new(&task, &pool);
        let check = |outputs: &Outputs<f32>| expected.check(outputs).1;
        assert_eq!(check(&poisoned), None);
        assert_eq!(check(&right).unwrap(), "20 elements of NaN queries are not NaN");
        let changed = |change: fn(&mut Outputs<f32>)| {
            let mut outputs = poisoned.clone();
            change(&mut outputs);
            check(&outputs).unwrap()
        };
        assert!(changed(|x| x.tensors[0][5] = f32::NAN).starts_with("1 elements are NaN; row NaN"));
        assert_eq!(changed(|x| x.tensors[0][0] = 1.0), "1 elements of NaN queries are not NaN");
        assert!(changed(|x| x.tensors[0][4] += 1.0).starts_with("row "));
        assert!(cross(&task, &poisoned, &poisoned, &mut BTreeMap::new()).is_none());
    }

    #[test]
    fn the_error_of_o_is_reported() {
        let point = point();
        let task = Task::new(&point, Order::Bhsd).unwrap();
        let (v, mut outputs) = means();
        let pool = Pool { q: vec![0.5; outputs.tensors[0].len()], k: vec![1.0; v.len()], v, d_o: vec![] };
        let expected = Expected::new(&task, &pool);
        let [rms, largest] = expected.error_of_o(&outputs).unwrap();
        assert!(rms < 1e-6 && largest < 1e-5, "{rms} {largest}");
        outputs.tensors[0].iter_mut().for_each(|x| *x *= 1.01);
        let [rms, largest] = expected.error_of_o(&outputs).unwrap();
        let most = outputs.tensors[0].iter().copied().fold(0.0, f32::max);
        assert!((rms - 0.01).abs() < 1e-6 && (largest / f64::from(most) - 0.01 / 1.01).abs() < 1e-6, "{rms} {largest}");
        assert_eq!(expected.check(&outputs).0["rms"].as_f64(), Some(rms));
        outputs.tensors[0][0] = f32::NAN;
        assert!(expected.error_of_o(&outputs).unwrap().iter().all(|error| error.is_nan()));
    }

    #[test]
    fn every_row_is_held_against_the_others() {
        let point = point();
        let task = Task::new(&point, Order::Bhsd).unwrap();
        let (_, outputs) = means();
        let against = |change: fn(&mut Vec<f32>)| {
            let (mut moved, mut numbers) = (means().1, BTreeMap::new());
            change(&mut moved.tensors[0]);
            let complaint = cross(&task, &moved, &outputs, &mut numbers);
            assert!(numbers.contains_key("cross"));
            complaint
        };
        assert_eq!(against(|_| ()), None);
        // Row 9 of 16 is none of those that are held against f64.
        assert!(against(|o| o[9 * 4] += 1.0).unwrap().starts_with("cross "));
        assert!(against(|o| o.truncate(60)).unwrap().starts_with("cross NaN"));
    }

    #[test]
    fn a_forward_gives_the_same_bits_again() {
        let point = point();
        let task = Task::new(&point, Order::Bhsd).unwrap();
        let again = |change: fn(&mut Outputs<f32>)| {
            let (before, mut after) = (means().1, means().1);
            change(&mut after);
            changed(&task, &before, &after)
        };
        assert_eq!(again(|_| ()), None);
        assert!(again(|x| x.tensors[0][5] = x.tensors[0][5].next_up()).unwrap().ends_with("inputs: o"));
        assert!(again(|x| x.lse[3] = x.lse[3].next_up()).unwrap().ends_with("inputs: lse"));
    }
}
