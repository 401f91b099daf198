//! Inputs at the edges of what a pass defines: scores that are all -inf, log-sum-exps far from 0, sums near the end of a type.
//!
//! Each is a case whose inputs are changed by hand. The CPU's tests and the GPU's hold both passes to the oracle on them.

use hopper_attention::reference::Tensor;
use hopper_attention::{Mask, MaskClass};

use crate::backward::Prepared as Backward;
use crate::data::{Input, Poison};
use crate::problems::Case;
use crate::runner::Prepared as Forward;

/// A case whose inputs are changed.
#[derive(Clone, Copy, Debug)]
pub struct Edge {
    /// What stands at which edge.
    pub name: &'static str,
    case: fn(MaskClass, usize) -> Case,
    edit: fn(MaskClass, Input, &mut Tensor),
    /// Whether the backward takes it. (The oracle reads what a forward would have given.)
    pub backward: bool,
}

/// Before this key all have a score of -inf for every query in the first batch entry, in the second all keys, in the third those
/// from `SEEN` on.
const HIDDEN: usize = 100;
const SEEN: usize = 50;
/// A masked key behind them, in a block that some of their queries visit.
const GARBAGE: usize = 110;

/// All of them.
pub const EDGES: [Edge; 5] = [
    Edge { name: "kept scores of -inf", case: hidden_case, edit: hide, backward: true },
    Edge { name: "kept scores of -inf, V garbage", case: hidden_case, edit: hide_beside_garbage, backward: false },
    Edge { name: "LSE of -inf, dO garbage", case: hidden_case, edit: hide_with_bad_gradients, backward: true },
    Edge { name: "a scale below the normal range", case: small_scale_case, edit: enlarge, backward: true },
    Edge { name: "the smallest scale", case: smallest_scale_case, edit: |_, _, _| {}, backward: true },
];

impl Edge {
    /// The case of a mask class and a head dim.
    pub fn case(&self, class: MaskClass, head_dim: usize) -> Case {
        (self.case)(class, head_dim)
    }

    /// A forward of it.
    pub fn forward<T: Poison>(&self, class: MaskClass, head_dim: usize) -> Forward<T> {
        Forward::edited(&self.case(class, head_dim), |input, tensor| (self.edit)(class, input, tensor))
    }

    /// A backward.
    pub fn backward<T: Poison>(&self, class: MaskClass, head_dim: usize) -> Backward<T> {
        Backward::edited(&self.case(class, head_dim), |input, tensor| (self.edit)(class, input, tensor))
    }
}

/// Whether each query with keys has a log-sum-exp that f32's exponential makes 0 or infinite, and nothing exact is NaN.
pub fn is_extreme<T>(prepared: &Forward<T>) -> bool {
    let exact = prepared.expected.oracle();
    let far = |lse: &f64| *lse == f64::NEG_INFINITY || lse.abs() > 88.7;
    exact.lse.iter().all(far) && exact.o.data().iter().all(|o| o.is_finite())
}

/// A mask of each class that bites.
fn mask_of(class: MaskClass) -> Mask {
    match class {
        MaskClass::Full => Mask::Full,
        MaskClass::Causal => Mask::causal(),
        _ => Mask::window(Some(100), Some(5)),
    }
}

fn hidden_case(class: MaskClass, head_dim: usize) -> Case {
    Case::new(300, 300, head_dim, mask_of(class)).heads(3, 2, 1)
}

/// All keys weigh the same. dQ and dK are normal numbers of bf16 all the same, as Q and K are large.
fn small_scale_case(class: MaskClass, head_dim: usize) -> Case {
    Case { scale: Some(2e-39), ..Case::new(150, 203, head_dim, mask_of(class)).heads(1, 2, 1) }
}

fn smallest_scale_case(class: MaskClass, head_dim: usize) -> Case {
    Case { scale: Some(f32::from_bits(1)), ..Case::new(150, 203, head_dim, mask_of(class)).heads(1, 2, 1) }
}

fn enlarge(_: MaskClass, input: Input, tensor: &mut Tensor) {
    if matches!(input, Input::Q | Input::K) {
        tensor.data_mut().iter_mut().for_each(|x| *x *= 1024.0);
    }
}

/// Makes -inf of the scores of some keys: an infinity in one column, in which every query has the same positive number.
///
/// Under a mask some queries see no other key. So O is 0, the LSE -inf, and they have no part in any gradient.
fn hide(_: MaskClass, input: Input, tensor: &mut Tensor) {
    const COLUMN: usize = 3;
    let [batch, seqlen, heads, _] = tensor.shape();
    for (b, s, h) in places([batch, seqlen, heads]) {
        match input {
            Input::Q => tensor.row_mut(b, s, h)[COLUMN] = 1.0,
            Input::K if b == 1 || s < HIDDEN && (b == 0 || s >= SEEN) => {
                tensor.row_mut(b, s, h)[COLUMN] = f64::NEG_INFINITY
            }
            _ => {}
        }
    }
}

/// Besides, NaN in V of a key that such rows do not see, in a block that they visit.
fn hide_beside_garbage(class: MaskClass, input: Input, tensor: &mut Tensor) {
    hide(class, input, tensor);
    if input == Input::V && class != MaskClass::Full {
        let [batch, _, heads, _] = tensor.shape();
        places([batch, 1, heads]).for_each(|(b, _, h)| tensor.row_mut(b, GARBAGE, h).fill(f64::NAN));
    }
}

/// Besides, NaN and infinity in dO of rows without a weight, which have no part in any gradient.
fn hide_with_bad_gradients(class: MaskClass, input: Input, tensor: &mut Tensor) {
    hide(class, input, tensor);
    if input == Input::DO && tensor.shape()[3] > 1 {
        let [batch, seqlen, heads, _] = tensor.shape();
        for (b, s, h) in places([batch, seqlen, heads]) {
            // Under a mask the queries whose keys all are hidden; the second batch entry's in any case.
            let without_weight = b == 1 || (b == 0 && class != MaskClass::Full && s < HIDDEN - 5);
            if without_weight && s % 7 == 2 {
                tensor.row_mut(b, s, h).fill([f64::NAN, f64::INFINITY][s % 2]);
            }
        }
    }
}

fn places([batch, seqlen, heads]: [usize; 3]) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..batch).flat_map(move |b| (0..seqlen).flat_map(move |s| (0..heads).map(move |h| (b, s, h))))
}
