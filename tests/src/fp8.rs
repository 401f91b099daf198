//! Ways in which a kernel may get e4m3 operands and their factors wrong.

use hopper_attention::reference::{Plain, Tensor, forward_plain};

use crate::data::Input;

pub use hopper_attention_verify::fp8::{Operands, Output, dense, for_row, half_scores_of, shapes};

/// Makes 0 of what a factor of 0 leaves: such a factor counts as 2^-100 of the largest of its head.
pub fn forget_dust(o: &mut Tensor) {
    o.data_mut().iter_mut().filter(|x| x.abs() < 1e-25).for_each(|x| *x = 0.0);
}

/// A way of getting e4m3 operands wrong.
pub struct Mutation {
    /// What is wrong.
    pub name: &'static str,
    /// The broken output and log-sum-exp; `None` where this cannot be distinguished from a correct result.
    pub apply: fn(&Operands) -> Option<Output>,
}

/// All of them, beside [those of every type](crate::mutations).
pub const MUTATIONS: [Mutation; 9] = [
    Mutation { name: "stored values taken for real ones", apply: |o| computed(o, stored_as_real(o)) },
    Mutation { name: "the factors of Q forgotten", apply: |o| computed(o, one_forgotten(o, 0)) },
    Mutation { name: "the factors of K forgotten", apply: |o| computed(o, one_forgotten(o, 1)) },
    Mutation { name: "the factors of V forgotten", apply: |o| computed(o, one_forgotten(o, 2)) },
    Mutation { name: "the factors of Q of the next block", apply: |o| next_block(o, Input::Q) },
    Mutation { name: "the factors of K of the next block", apply: |o| next_block(o, Input::K) },
    Mutation { name: "the factors of V of the next block", apply: |o| next_block(o, Input::V) },
    Mutation { name: "the factors of the next head", apply: next_head },
    Mutation { name: "the row sum with the factors of V in it", apply: wrong_sum },
];

fn computed(operands: &Operands, [q, k, v]: [Tensor; 3]) -> Option<Output> {
    let Plain { o, lse, .. } = forward_plain(operands.problem(), &q, &k, &v).expect("matching shapes");
    Some((o, lse))
}

fn stored_as_real(operands: &Operands) -> [Tensor; 3] {
    let shapes = shapes(operands.problem());
    [0, 1, 2].map(|i| Tensor::from_strided(&operands.stored()[i], &dense(shapes[i].0)))
}

fn one_forgotten(operands: &Operands, which: usize) -> [Tensor; 3] {
    let mut tensors = operands.real();
    let [q, k, v] = stored_as_real(operands);
    tensors[which] = [q, k, v].into_iter().nth(which).expect("one of three");
    tensors
}

fn next_block(operands: &Operands, of: Input) -> Option<Output> {
    let moved = |input, [b, h, i]: [usize; 3]| if input == of { [b, h, i + 1] } else { [b, h, i] };
    differing(operands, operands.real_by(moved))
}

fn next_head(operands: &Operands) -> Option<Output> {
    differing(operands, operands.real_by(|_, [b, h, i]| [b, h + 1, i]))
}

fn differing(operands: &Operands, tensors: [Tensor; 3]) -> Option<Output> {
    if tensors == operands.real() { None } else { computed(operands, tensors) }
}

/// What a kernel gives that sums weights after it has folded the factors of V into them.
fn wrong_sum(operands: &Operands) -> Option<Output> {
    let dims = operands.problem().dims();
    // The sum of the right weights, each times its block's factor, is an output of a value of 1.
    let [q, k, v] = operands.real();
    let Plain { mut o, lse, .. } = forward_plain(operands.problem(), &q, &k, &v).expect("matching shapes");
    let factors = dense(operands.problem().descale_v_shape());
    let folded = Tensor::from_fn(v.shape(), |_| 1.0).descaled(|row| {
        operands.descale()[2][factors
            .offset(operands.place(Input::V, row, 1).expect("a row of a sequence"))
            .expect("within the factors")]
    });
    let sums = forward_plain(operands.problem(), &q, &k, &folded).expect("matching shapes").o;
    let largest = operands.descale()[2].iter().copied().fold(0.0, f32::max);
    let mut differs = false;
    for ((b, s), h) in (0..dims.batch)
        .flat_map(|b| (0..dims.seqlen_q).map(move |s| (b, s)))
        .flat_map(|bs| (0..dims.heads_q).map(move |h| (bs, h)))
    {
        let factor = f64::from(largest) / sums.row(b, s, h)[0];
        differs |= factor > 1.5;
        o.row_mut(b, s, h).iter_mut().for_each(|o| *o *= factor);
    }
    differs.then_some((o, lse))
}
