//! Rows of dQ, dK and dV.

use hopper_attention::Float;

use super::{Number, Row, dot, norm, places, values};
use crate::distinct;
use crate::harness::contest::{Pool, Task};

/// Some rows of each, from the definition with the O and the LSE that every library is given.
pub(super) fn rows<T: Float>(task: &Task<'_, T>, pool: &Pool<T>) -> Vec<Row> {
    let point = task.point;
    let queries = places(point, point.seqlen_q());
    let keys = places(point, point.seqlen).into_iter().map(|[batch, key, head]| [batch, key, head / point.group()]);
    let of_queries = queries.into_iter().map(|at| query_row(task, pool, at));
    of_queries.chain(keys.flat_map(|at| key_rows(task, pool, at))).collect()
}

/// A query's side of all its pairs.
struct Query {
    batch: usize,
    head: usize,
    query: usize,
    q: Vec<f64>,
    d_o: Vec<f64>,
    lse: f64,
    delta: f64,
    /// What the rounding error of `delta` is relative to: O is rounded, and its terms may cancel.
    delta_size: f64,
}

impl Query {
    fn new<T: Float>(task: &Task<'_, T>, pool: &Pool<T>, at: [usize; 3]) -> Self {
        let [batch, query, head] = at;
        let d_o = values(&pool.d_o, &task.o, at);
        let place = (batch * task.point.heads_q + head) * task.point.seqlen_q() + query;
        // NaN where no forward was run: then nothing passes.
        let (o, lse) = task.saved.map_or((vec![f64::NAN; d_o.len()], f64::NAN), |saved| {
            let o = saved.tensors.first().map_or(&[][..], Vec::as_slice);
            (values(o, &task.o, at), saved.lse.get(place).map_or(f64::NAN, |&lse| lse.into()))
        });
        let terms: Vec<f64> = d_o.iter().zip(&o).map(|(d_o, o)| d_o * o).collect();
        let delta = terms.iter().sum::<f64>();
        let delta_size = norm(&terms).max(delta.abs());
        Self { batch, head, query, q: values(&pool.q, &task.q, at), delta, delta_size, d_o, lse }
    }

    /// P with dropout, dS, and what dS would be at most if its terms did not cancel.
    fn pair<T>(&self, key: usize, k: &[f64], v: &[f64], task: &Task<'_, T>) -> [f64; 3] {
        let (point, added) = (task.point, task.added([self.batch, self.head, self.query, key]));
        if added == f64::NEG_INFINITY {
            return [0.0; 3];
        }
        let [score, slope] = point.score(dot(&self.q, k), [self.head, self.query, key]);
        let p = (score + added - self.lse).exp();
        let kept = point.kept([self.batch, self.head, self.query, key]);
        let d_p = kept * dot(&self.d_o, v);
        [kept * p, p * slope * (d_p - self.delta), p * slope * (d_p.abs() + self.delta_size)]
    }
}

/// A sum of weighted vectors.
struct Sum {
    terms: Vec<f64>,
    squares: f64,
}

impl Sum {
    fn new(dims: usize) -> Self {
        Self { terms: vec![0.0; dims], squares: 0.0 }
    }

    /// Adds a weighted vector. `size` is the magnitude that the rounding error of the weight is relative to.
    fn add(&mut self, weight: f64, size: f64, vector: &[f64]) {
        self.terms.iter_mut().zip(vector).for_each(|(sum, x)| *sum += weight * x);
        self.squares += (size * norm(vector)).powi(2);
    }

    fn row(self, tensor: usize, at: [usize; 3], scale: f64) -> Row {
        let exact = self.terms.into_iter().map(|sum| scale * sum).collect();
        Row { tensor, at, exact, size: scale * self.squares.sqrt() }
    }
}

fn query_row<T: Float>(task: &Task<'_, T>, pool: &Pool<T>, at: [usize; 3]) -> Row {
    let [batch, query, head] = at;
    let own = Query::new(task, pool, at);
    let mut d_q = Sum::new(task.point.head_dim);
    for key in task.point.keys(query).filter(|&key| task.point.sees(query, key)) {
        let at = [batch, key, head / task.point.group()];
        let [k, v] = [(&pool.k, &task.k), (&pool.v, &task.v)].map(|(x, layout)| values(x, layout, at));
        let [_, d_s, size] = own.pair(key, &k, &v, task);
        d_q.add(d_s, size, &k);
    }
    d_q.row(0, at, task.point.scale())
}

/// Of dK and of dV.
fn key_rows<T: Float>(task: &Task<'_, T>, pool: &Pool<T>, at: [usize; 3]) -> [Row; 2] {
    let [batch, key, head_kv] = at;
    let (point, group) = (task.point, task.point.group());
    let [k, v] = [(&pool.k, &task.k), (&pool.v, &task.v)].map(|(x, layout)| values(x, layout, at));
    let (mut d_k, mut d_v) = (Sum::new(point.head_dim), Sum::new(point.head_dims().vo));
    for head in head_kv * group..(head_kv + 1) * group {
        for query in point.queries_of(key) {
            let query = Query::new(task, pool, [batch, query, head]);
            let [p, d_s, size] = query.pair(key, &k, &v, task);
            d_k.add(d_s, size, &query.q);
            d_v.add(p, p, &query.d_o);
        }
    }
    [d_k.row(1, at, task.point.scale()), d_v.row(2, at, 1.0)]
}

/// Some numbers of the gradient of the bias, at both ends and in the middle of each dimension. A score has no cap here, so that they
/// are sums of dS.
pub(super) fn of_bias<T: Float>(task: &Task<'_, T>, pool: &Pool<T>) -> Vec<Number> {
    let point = task.point;
    let (shape, sides) = (point.bias_shape(), point.sides());
    let ends = |axis: usize| distinct([0, shape[axis] / 3, shape[axis] - 1]);
    let places = if shape.contains(&0) { vec![] } else { ends(0) };
    let places = places.into_iter().flat_map(|b| ends(1).into_iter().map(move |h| [b, h]));
    let places = places.flat_map(|[b, h]| ends(2).into_iter().map(move |q| [b, h, q]));
    let places = places.flat_map(|[b, h, q]| ends(3).into_iter().map(move |k| [b, h, q, k]));
    // Where a dimension is shared, all of it has a part in a number.
    let all = |axis: usize, size: usize, at: usize| if shape[axis] == 1 { 0..size } else { at..at + 1 };
    let number = |at: [usize; 4]| {
        let (mut exact, mut squares) = (0.0, 0.0);
        let sequences = &sides[all(0, sides.len(), at[0])];
        for ((batch, rows), head) in
            sequences.iter().flat_map(|of_one| all(1, point.heads_q, at[1]).map(move |head| (of_one, head)))
        {
            let (batch, key, first) = (*batch, rows.start + at[3], rows.start);
            if !rows.contains(&key) {
                continue;
            }
            let place = [batch, key, head / point.group()];
            let [k, v] = [(&pool.k, &task.k), (&pool.v, &task.v)].map(|(x, layout)| values(x, layout, place));
            let count = if point.packed.is_some() { rows.len() } else { point.seqlen_q() };
            let queries = all(2, count, at[2]).filter(|&query| query < count).map(|query| first + query);
            for query in queries.filter(|&query| point.sees(query, key)) {
                let [_, d_s, size] = Query::new(task, pool, [batch, query, head]).pair(key, &k, &v, task);
                (exact, squares) = (exact + d_s, squares + size * size);
            }
        }
        Number { at, exact, size: f64::sqrt(squares) }
    };
    places.map(number).collect()
}

#[cfg(test)]
mod tests {
    use hopper_attention::bf16;
    use hopper_attention::reference::{Tensor, backward, forward};

    use super::super::{BLOCK, Expected, changed, cross};
    use super::*;
    use crate::harness::Cpu;
    use crate::harness::contest::{Contestants, Outputs, Place as _};
    use crate::{Direction, Order, Point, PointMask, Sweep};

    fn point(mask: PointMask, seqlen: usize, group: usize) -> Point {
        let sweep = Sweep {
            directions: vec![Direction::Bwd],
            hidden: 64,
            batch: Some(2),
            seqlens: vec![seqlen],
            dims: vec![16.into()],
            gqa: vec![group],
            masks: vec![mask],
            ..Sweep::small()
        };
        sweep.points().unwrap().remove(0)
    }

    fn pool(point: &Point) -> Pool<f32> {
        let draw = |heads: usize, salt: usize| {
            let value = |i: usize| (((i * 7919 + salt * 104_729) % 2003) as f32 / 2003.0 - 0.5) * 3.4;
            (0..point.elements(heads)).map(value).collect()
        };
        let (q, kv) = (point.heads_q, point.heads_kv);
        Pool { q: draw(q, 1), k: draw(kv, 2), v: draw(kv, 3), d_o: draw(q, 4) }
    }

    /// What the library's oracle says of O and the LSE, and of the gradients, in bhsd.
    fn oracles(task: &Task<'_, f32>, pool: &Pool<f32>) -> [Outputs<f32>; 2] {
        let tensor = |data: &[f32], layout| Tensor::from_strided(data, layout);
        let [k, v] = [(&pool.k, &task.k), (&pool.v, &task.v)].map(|(data, layout)| tensor(data, layout));
        let [q, d_o] = [(&pool.q, &task.q), (&pool.d_o, &task.o)].map(|(data, layout)| tensor(data, layout));
        let problem = task.point.backward_problem().unwrap();
        let saved = forward(problem.forward(), &q, &k, &v).unwrap();
        let gradients = backward(&problem, &q, &k, &v, &d_o, None).unwrap();
        let narrow = |tensor: &Tensor| {
            let [batch, seqlen, heads, dims] = tensor.shape();
            let rows = (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..seqlen).map(move |s| [b, s, h])));
            rows.flat_map(|[b, s, h]| tensor.row(b, s, h)[..dims].iter().map(|&x| x as f32)).collect()
        };
        let tensors = [&gradients.d_q, &gradients.d_k, &gradients.d_v].map(narrow).into();
        [
            Outputs {
                tensors: vec![narrow(&saved.o)],
                lse: saved.lse.iter().map(|&x| x as f32).collect(),
                d_bias: None,
            },
            Outputs { tensors, lse: vec![], d_bias: None },
        ]
    }

    #[test]
    fn rows_are_those_of_the_library_s_oracle() {
        for (mask, group) in [(PointMask::Full, 1), (PointMask::Causal, 2), (PointMask::Window(3), 4)] {
            for seqlen in [1, 2, 9] {
                let point = point(mask, seqlen, group);
                let task = Task::new(&point, Order::Bhsd).unwrap();
                let pool = pool(&point);
                let [saved, gradients] = oracles(&task, &pool);
                let task = Task { saved: Some(&saved), ..task };
                let expected = Expected::new(&task, &pool);
                let (numbers, complaint) = expected.check(&gradients);
                assert_eq!(complaint, None, "{point}: {numbers:?}");
                for tensor in 0..3 {
                    for (what, change) in [("d_", 1.1f32), ("1 elements are NaN", f32::NAN)] {
                        let mut wrong = gradients.clone();
                        // In the last row, which is among those that are looked at.
                        let at = wrong.tensors[tensor].len() - 1;
                        wrong.tensors[tensor][at] = (wrong.tensors[tensor][at] + 1.0) * change;
                        let complaint = expected.check(&wrong).1;
                        assert!(complaint.is_some_and(|text| text.contains(what)), "{point} tensor {tensor}");
                    }
                }
            }
        }
    }

    /// Of every form, with hidden rows and without: the naive computation passes, and what is wrong does not.
    #[test]
    fn the_gradient_of_a_bias_is_looked_at() {
        for (bias, group) in [("f32:bhq", 1), ("bf16:h", 2), ("f16:q:hidden", 4), ("f32:b:mask", 2), ("f32", 1)] {
            let point = Point { bias: bias.parse().unwrap(), ..point(PointMask::Causal, 9, group) };
            let (numbers, wide) = (point.bias_numbers(3).unwrap(), pool(&point));
            // The backend takes no other type than the point's.
            let narrow = |data: Vec<f32>| data.into_iter().map(bf16::from_f32).collect();
            let pool = Pool { q: narrow(wide.q), k: narrow(wide.k), v: narrow(wide.v), d_o: narrow(wide.d_o) };
            let task = Task { bias: numbers.as_ref(), ..Task::new(&point, Order::Bhsd).unwrap() };
            let forward = Point { direction: Direction::Fwd, ..point.clone() };
            let of_forward = Task { point: &forward, ..task };
            let saved = of_one(Cpu.forwards(&pool).unwrap(), &of_forward);
            assert_eq!(Expected::new(&of_forward, &pool).check(&saved).1, None, "{point}");
            let task = Task { saved: Some(&saved), ..task };
            let gradients = of_one(Cpu.backwards(&pool).unwrap(), &task);
            let expected = Expected::new(&task, &pool);
            let (numbers, complaint) = expected.check(&gradients);
            assert_eq!(complaint, None, "{point}: {numbers:?}");
            let all = gradients.d_bias.as_ref().unwrap();
            let changed_by = |change: fn(f64) -> f64| {
                let wrong: Vec<f64> = all.widened().unwrap().into_iter().map(change).collect();
                Outputs { d_bias: Some(all.holding(&wrong).unwrap()), ..gradients.clone() }
            };
            let complaint = |outputs: &Outputs<bf16>| expected.check(outputs).1.unwrap();
            assert!(complaint(&changed_by(|x| x + 1.0)).contains("d_bias "), "{point}");
            assert!(complaint(&changed_by(|_| f64::NAN)).contains(" elements are NaN"), "{point}");
            assert!(complaint(&Outputs { d_bias: None, ..gradients.clone() }).contains("d_bias NaN"), "{point}");
            let mut found = Default::default();
            assert_eq!(cross(&task, &gradients, &gradients, &mut found), None);
            assert!(
                cross(&task, &changed_by(|x| 1.5 * x + 0.1), &gradients, &mut found).unwrap().starts_with("cross ")
            );
            let moved = changed(&task, &gradients, &changed_by(|x| 1.5 * x + 0.1)).unwrap();
            assert!(moved.ends_with(": d_bias"), "{moved}");
            assert_eq!(changed(&task, &gradients, &changed_by(|x| x)), None);
        }
    }

    /// What the first of several writes.
    fn of_one(mut all: Contestants<'_, bf16>, task: &Task<'_, bf16>) -> Outputs<bf16> {
        let one = &mut all[0];
        one.prepare(task).and_then(|()| one.call(task)).unwrap();
        one.outputs().unwrap()
    }

    #[test]
    fn nothing_passes_without_a_forward() {
        let point = point(PointMask::Full, 4, 1);
        let task = Task::new(&point, Order::Bhsd).unwrap();
        let pool = pool(&point);
        let [_, gradients] = oracles(&task, &pool);
        assert!(Expected::new(&task, &pool).check(&gradients).1.is_some_and(|text| text.starts_with("d_q NaN")));
    }

    /// The only key of query 0 leaves it a gradient of 0, of which two libraries have nothing but rounding.
    #[test]
    fn gradients_that_cancel_are_no_difference() {
        let point = point(PointMask::Causal, 100, 2);
        let task = Task::new(&point, Order::Bhsd).unwrap();
        let pool = pool(&point);
        let [saved, gradients] = oracles(&task, &pool);
        let task = Task { saved: Some(&saved), ..task };
        let mut other = gradients.clone();
        other.tensors[0][..16].fill(3e-6);
        assert_eq!(Expected::new(&task, &pool).check(&other).1, None);
        assert_eq!(cross(&task, &other, &gradients, &mut Default::default()), None);
        // A row past the first block, and of none that is held against f64.
        for tensor in 0..3 {
            let mut other = gradients.clone();
            other.tensors[tensor][(BLOCK + 3) * 16..][..16].fill(0.0);
            assert_eq!(Expected::new(&task, &pool).check(&other).1, None);
            assert!(cross(&task, &other, &gradients, &mut Default::default()).unwrap().starts_with("cross "));
        }
    }

    /// 65 tokens are a block and a row, and that row's gradient may cancel as any other's.
    #[test]
    fn no_block_is_one_row_alone() {
        let point = point(PointMask::Full, BLOCK + 1, 1);
        let task = Task::new(&point, Order::Bhsd).unwrap();
        let pool = pool(&point);
        let [_, mut one] = oracles(&task, &pool);
        let mut other = one.clone();
        for (outputs, value) in [(&mut one, 1e-6), (&mut other, -1e-6)] {
            outputs.tensors[1][BLOCK * 16..][..16].fill(value);
        }
        assert_eq!(cross(&task, &other, &one, &mut Default::default()), None);
        // It is looked at all the same.
        other.tensors[1][BLOCK * 16..][..16].fill(1.0);
        assert!(cross(&task, &other, &one, &mut Default::default()).is_some());
    }

    #[test]
    fn gradients_may_move_in_their_last_bits_alone() {
        let point = point(PointMask::Full, 8, 2);
        let task = Task::new(&point, Order::Bhsd).unwrap();
        let [_, before] = oracles(&task, &pool(&point));
        for (tensor, name) in ["d_q", "d_k", "d_v"].into_iter().enumerate() {
            let again = |change: fn(f32) -> f32| {
                let mut after = before.clone();
                after.tensors[tensor].iter_mut().for_each(|x| *x = change(*x));
                changed(&task, &before, &after)
            };
            assert_eq!(again(|x| x), None);
            assert_eq!(again(f32::next_up), None, "{name}");
            let far = again(|x| 1.001 * x).unwrap();
            assert_eq!(far, format!("the output changed between runs on the same inputs: {name}"));
        }
    }
}
