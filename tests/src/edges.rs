//! Inputs at the edges of what a pass defines: scores that are all -inf, log-sum-exps far from 0, sums near the end of a type.
//!
//! Each is a case whose inputs are changed by hand. The CPU's tests and the GPU's hold both passes to the oracle on them.

use hopper_attention::reference::Tensor;
use hopper_attention::{DType, Mask, MaskClass, bf16};

use crate::alibi::Alibi;
use crate::backward::{self, Prepared as Backward};
use crate::data::{Image, Input, Poison, Values};
use crate::inputs::Class;
use crate::packing::Packing;
use crate::problems::{Case, extremes};
use crate::runner::{Outputs, Prepared as Forward};
use crate::sinks::Sinks;

/// A case whose inputs are changed.
#[derive(Clone, Copy, Debug)]
pub struct Edge {
    /// What stands at which edge.
    pub name: &'static str,
    case: fn(MaskClass, HeadDims) -> Case,
    edit: fn(MaskClass, Input, &mut Tensor),
    /// Whether the backward takes it. (The oracle reads what a forward would have given.)
    pub backward: bool,
}

/// The head dim of Q and K, and that of V and O.
pub type HeadDims = [usize; 2];

/// Before this key all have a score of -inf for every query in the first batch entry, in the second all keys, in the third those
/// from `SEEN` on.
const HIDDEN: usize = 100;
const SEEN: usize = 50;
/// A masked key behind them, in a block that some of their queries visit.
const GARBAGE: usize = 110;

/// All of them.
pub const EDGES: [Edge; 6] = [
    Edge { name: "kept scores of -inf", case: hidden_case, edit: hide, backward: true },
    Edge { name: "kept scores of -inf, V garbage", case: hidden_case, edit: hide_beside_garbage, backward: false },
    Edge { name: "LSE of -inf, dO garbage", case: hidden_case, edit: hide_with_bad_gradients, backward: true },
    Edge { name: "a scale below the normal range", case: small_scale_case, edit: enlarge, backward: true },
    Edge { name: "the smallest scale", case: smallest_scale_case, edit: |_, _, _| {}, backward: true },
    Edge { name: "a sink equal to the maximum", case: equal_sink_case, edit: score_at_most_zero, backward: true },
];

impl Edge {
    /// The case of a mask class and head dims.
    pub fn case(&self, class: MaskClass, head_dims: HeadDims) -> Case {
        (self.case)(class, head_dims)
    }

    /// The same modified. `None` where that is no problem: a cap beside a scale that is no normal number.
    pub fn modified(&self, class: MaskClass, head_dims: HeadDims, modifier: fn(Case) -> Case) -> Option<Case> {
        let case = modifier(self.case(class, head_dims));
        case.options(DType::BF16).build().is_ok().then_some(case)
    }

    /// Whether the backward takes a modified case. Where all keys of a row score -inf, a sink makes its LSE finite. Its weights are 0, so
    /// that the oracle has 0 for dQ, and 0 times a K of -inf, which is NaN, is what the CPU has.
    pub fn takes_backward(&self, case: &Case) -> bool {
        self.backward && (case.sinks.is_none() || !self.name.contains("-inf"))
    }

    /// A forward of it.
    pub fn forward<T: Poison>(&self, class: MaskClass, head_dims: HeadDims) -> Forward<T> {
        self.forward_of(class, self.case(class, head_dims))
    }

    /// A forward of the case after it was modified.
    pub fn forward_of<T: Poison>(&self, class: MaskClass, case: Case) -> Forward<T> {
        Forward::edited(&case, |input, tensor| (self.edit)(class, input, tensor))
    }

    /// A backward.
    pub fn backward<T: Poison>(&self, class: MaskClass, head_dims: HeadDims) -> Backward<T> {
        self.backward_of(class, self.case(class, head_dims))
    }

    /// A backward of the case after it was modified.
    pub fn backward_of<T: Poison>(&self, class: MaskClass, case: Case) -> Backward<T> {
        Backward::edited(&case, |input, tensor| (self.edit)(class, input, tensor))
    }
}

/// What modifies the scores of an edge: a cap, ALiBi, a bias that hides some pairs, a sink, and some of them together. (Where all products
/// count as 0, the standard slopes give each row the same weights. These are rounded alike, which the tolerance takes for a factor.)
pub const MODIFIERS: [fn(Case) -> Case; 6] = [
    |case| case.softcap(30.0),
    |case| case.alibi(Alibi::Large),
    |case| case.bias("f32:hq:hidden".parse().expect("a bias")),
    |case| Case { sinks: Sinks::Normal, ..case },
    |case| case.softcap(50.0).alibi(Alibi::Negative),
    |case| Case { sinks: Sinks::Ten, ..case.bias("bf16:q".parse().expect("a bias")) },
];

/// Log-sum-exps past 88.7 of modified scores: caps that hardly bend them, slopes and biases that are small beside them. And sinks, beside
/// which such scores are nothing or all.
pub fn modified_extremes(head_dims: &[usize]) -> Vec<Case> {
    // A cap of 30,000 makes 999.6 of 1000.
    let modifiers: [fn(Case) -> Case; 6] = [
        |case| case.softcap(30_000.0),
        |case| case.alibi(Alibi::Standard),
        |case| case.bias("f32:hq".parse().expect("a bias")),
        |case| case.softcap(30_000.0).alibi(Alibi::Negative),
        |case| Case { sinks: Sinks::Large, ..case },
        |case| Case { sinks: Sinks::Ten, ..case },
    ];
    let loud = |case: &Case| matches!(case.values, Values::Sloped { first, .. } if first.abs() == 1000);
    let turned = |(turn, case): (usize, Case)| modifiers[turn % modifiers.len()](case);
    // Fourteen cases have a mask and a head dim in common. Each group begins with another modifier.
    let cases = extremes(head_dims).into_iter().filter(loud).enumerate();
    cases.map(|(i, case)| turned((i + i / 14, case))).collect()
}

/// Whether each query with keys has a log-sum-exp that f32's exponential makes 0 or infinite, and nothing exact is NaN.
pub fn is_extreme<T>(prepared: &Forward<T>) -> bool {
    let exact = prepared.expected.oracle();
    let far = |lse: &f64| *lse == f64::NEG_INFINITY || lse.abs() > 88.7;
    exact.lse.iter().all(far) && exact.o.data().iter().all(|o| o.is_finite())
}

/// Rows that see one key: some of a causal problem, all of the others.
pub fn one_key([qk, vo]: HeadDims) -> Vec<Case> {
    let sizes = [
        (77, 1, Mask::Full),
        (203, 203, Mask::window(Some(0), Some(0))),
        (130, 130, Mask::causal()),
        (300, 70, Mask::causal()),
    ];
    let values = [Values::Normal, Values::Like(Class::Peaky), Values::Sloped { first: -150, last: 150 }];
    let cases = sizes.into_iter().flat_map(|(seqlen_q, seqlen_kv, mask)| {
        values.map(|values| Case { values, lse: false, ..Case::new(seqlen_q, seqlen_kv, qk, mask).head_dim_vo(vo) })
    });
    cases.collect()
}

/// The key of each query that sees one key, as `(batch, head, query, key)`.
fn only_keys(case: &Case) -> Vec<[usize; 4]> {
    let (dims, mask) = (case.dims, case.mask);
    let only = |query| {
        let mut keys = (0..dims.seqlen_kv).filter(|&key| mask.keep(query, key, dims.seqlen_q, dims.seqlen_kv));
        let first = keys.next()?;
        keys.next().is_none().then_some((query, first))
    };
    let keys: Vec<_> = (0..dims.seqlen_q).filter_map(only).collect();
    let heads = (0..dims.batch).flat_map(|batch| (0..dims.heads_q).map(move |head| (batch, head)));
    heads.flat_map(|(batch, head)| keys.iter().map(move |&(query, key)| [batch, head, query, key])).collect()
}

/// O of a row that sees one key is V of that key, bit for bit: its weight is 1.
///
/// # Errors
/// Where it is not.
pub fn one_key_gives_its_value<T: Poison>(prepared: &Forward<T>, outputs: &Outputs<T>) -> Result<(), String> {
    let (o, v, case) = (outputs.o.tensor(), prepared.v.tensor(), &prepared.case);
    let only = only_keys(case);
    assert!(!only.is_empty(), "{case}: no row sees one key");
    for [batch, head, query, key] in only {
        let value = v.row(batch, key, head / (case.dims.heads_q / case.dims.heads_kv));
        if let Some((got, want)) = o.row(batch, query, head).iter().zip(value).find(|(got, want)| got != want) {
            return Err(format!("query {query}, head {head}: {got} for {want}, which is V of key {key}"));
        }
    }
    Ok(())
}

/// dS of a row that sees one key is 0: it is what is left of dP and delta, which are the same sum. Tensor cores, and delta's own sum,
/// leave roundings of f32. In simulation (24 bits, cut off towards 0) they are at most 7 * 2^-24 of the norms of dO and V, with one
/// cut off bit fewer. One element of O that is off by its last bit would leave 2^-11 (f16) of a product of two elements.
const LEFT: f64 = 1.0 / (1 << 19) as f64;

/// dQ of such a row, and dK of a key that no other rows see, are 0 but for roundings of f32.
///
/// # Errors
/// Where they are not.
pub fn one_key_has_no_gradient<T: Poison>(
    prepared: &Backward<T>,
    outputs: &backward::Outputs<T>,
) -> Result<(), String> {
    let case = &prepared.case;
    let dims = case.dims;
    let scale = f64::from(prepared.problem.softmax_scale());
    let [q, k, v, d_o] = [&prepared.q, &prepared.k, &prepared.v, &prepared.d_o].map(Image::tensor);
    let (d_q, d_k) = (outputs.d_q.tensor(), outputs.d_k.tensor());
    let norm = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>().sqrt();
    // Of dK, where every row that sees the key sees no other.
    let mut of_keys = Tensor::zeros(d_k.shape());
    let only = only_keys(case);
    assert!(!only.is_empty(), "{case}: no row sees one key");
    let check = |what: &str, got: &[f64], most: &mut dyn Iterator<Item = f64>| {
        // dS and the gradient are rounded, and f16 has numbers down to 6e-8.
        let far = got.iter().zip(most).find(|(got, most)| got.is_nan() || got.abs() > 1.02 * most + 1e-7);
        far.map_or(Ok(()), |(got, most)| Err(format!("{what}: {got}, at most {most} of roundings in f32")))
    };
    for &[batch, head, query, key] in &only {
        let of_kv = head / (dims.heads_q / dims.heads_kv);
        let d_s = scale * LEFT * norm(d_o.row(batch, query, head)) * norm(v.row(batch, key, of_kv));
        let mut most = k.row(batch, key, of_kv).iter().map(|k| d_s * k.abs());
        check(&format!("dQ of query {query}, head {head}"), d_q.row(batch, query, head), &mut most)?;
        let sums = of_keys.row_mut(batch, key, of_kv).iter_mut();
        sums.zip(q.row(batch, query, head)).for_each(|(sum, q)| *sum += d_s * q.abs());
    }
    let sees_more = dims.seqlen_q * dims.heads_q * dims.batch > only.len();
    for (batch, key, head) in places([dims.batch, dims.seqlen_kv, dims.heads_kv]).filter(|_| !sees_more) {
        let mut most = of_keys.row(batch, key, head).iter().copied();
        check(&format!("dK of key {key}, head {head}"), d_k.row(batch, key, head), &mut most)?;
    }
    Ok(())
}

/// A mask of each class that bites.
fn mask_of(class: MaskClass) -> Mask {
    match class {
        MaskClass::Full => Mask::Full,
        MaskClass::Causal => Mask::causal(),
        _ => Mask::window(Some(100), Some(5)),
    }
}

fn hidden_case(class: MaskClass, [qk, vo]: HeadDims) -> Case {
    Case::new(300, 300, qk, mask_of(class)).head_dim_vo(vo).heads(3, 2, 1)
}

/// All keys weigh the same. dQ and dK are normal numbers of bf16 all the same, as Q and K are large.
fn small_scale_case(class: MaskClass, [qk, vo]: HeadDims) -> Case {
    Case { scale: Some(2e-39), ..Case::new(150, 203, qk, mask_of(class)).head_dim_vo(vo).heads(1, 2, 1) }
}

fn smallest_scale_case(class: MaskClass, [qk, vo]: HeadDims) -> Case {
    Case { scale: Some(f32::from_bits(1)), ..Case::new(150, 203, qk, mask_of(class)).head_dim_vo(vo).heads(1, 2, 1) }
}

fn equal_sink_case(class: MaskClass, [qk, vo]: HeadDims) -> Case {
    let case = Case::new(150, 203, qk, mask_of(class)).head_dim_vo(vo).heads(2, 2, 1);
    Case { sinks: Sinks::Zero, ..case }
}

/// The largest score of a row is 0, as its sink is: of one key in five. The others score below it, some of them hardly.
fn score_at_most_zero(_: MaskClass, input: Input, tensor: &mut Tensor) {
    let [batch, seqlen, heads, _] = tensor.shape();
    for (b, s, h) in places([batch, seqlen, heads]) {
        match input {
            Input::Q => tensor.row_mut(b, s, h)[0] = 8.0,
            Input::K => {
                let row = tensor.row_mut(b, s, h);
                row.fill(0.0);
                row[0] = [0.0, -0.125, -0.5, -4.0, -0.25][s % 5];
            }
            _ => {}
        }
    }
}

fn enlarge(_: MaskClass, input: Input, tensor: &mut Tensor) {
    if matches!(input, Input::Q | Input::K) {
        tensor.data_mut().iter_mut().for_each(|x| *x *= 1024.0);
    }
}

/// The length of the sequence that the cases below are about.
const LONG: usize = 640;

/// A case of one sequence, or of two that are packed, the second without anything special. A window keeps `right` keys behind a
/// query.
fn long_case(class: MaskClass, right: usize, [qk, vo]: HeadDims, packed: bool) -> Case {
    let mask = if class == MaskClass::Window { Mask::window(Some(600), Some(right)) } else { mask_of(class) };
    if !packed {
        return Case::new(LONG, LONG, qk, mask).head_dim_vo(vo);
    }
    let total = LONG + 200;
    let offsets = Some(vec![0, LONG as i32, total as i32]);
    let packing = Packing { cu_seqlens_q: offsets.clone(), cu_seqlens_kv: offsets, ..Packing::default() };
    Case { packing, ..Case::new(total, total, qk, mask).head_dim_vo(vo).heads(2, 2, 1) }
}

/// What 8 in a column of Q is to be multiplied by in K, to give a score of 1.
fn unit(head_dim: usize) -> f64 {
    (head_dim as f64).sqrt() / 8.0
}

/// A forward of bf16 whose sums of weights and values overflow f32 unless the weights are relative to a row's maximum, although O
/// does not. One row in 16 has keys that stand further and further out, so that an sm90 kernel gives up looking for them. Then one
/// stands out by 20 for all other rows, and V is of 3e31.
pub fn large_sums(class: MaskClass, head_dims: HeadDims, packed: bool) -> Forward<bf16> {
    let unit = unit(head_dims[0]);
    Forward::edited(&long_case(class, 5, head_dims, packed), |input, tensor| {
        let [batch, seqlen, heads, _] = tensor.shape();
        for (b, s, h) in places([batch, seqlen, heads]) {
            let row = tensor.row_mut(b, s, h);
            let alone = s % 16 == 0;
            match (input, s) {
                (Input::Q, _) => row[..2].copy_from_slice(if alone { &[0.0, 8.0] } else { &[8.0, 0.0] }),
                (Input::K, 400) => row[..2].copy_from_slice(&[0.0, 12.0 * unit]),
                (Input::K, 270) => row[..2].copy_from_slice(&[0.0, 24.0 * unit]),
                (Input::K, 140) => row[..2].copy_from_slice(&[0.0, 36.0 * unit]),
                (Input::K, 45) => row[..2].copy_from_slice(&[20.0 * unit, 0.0]),
                (Input::K, _) => row[..2].fill(0.0),
                (Input::V, _) => row.iter_mut().for_each(|v| *v *= 3e31),
                _ => {}
            }
        }
    })
}

/// The same with weights that are not large, only above 1, and values of 4e35 that all have one sign. A kernel begins with the last
/// keys, and takes their score for the reference. The other keys weigh 12 times as much: too little for a row to move.
///
/// For one row in four a key stands out that is visited last. Its row moves when the sum has overflowed. V also has an infinity and
/// a NaN, which belong into O.
pub fn large_values(class: MaskClass, head_dims: HeadDims, packed: bool) -> Forward<bf16> {
    let unit = unit(head_dims[0]);
    Forward::edited(&long_case(class, 0, head_dims, packed), |input, tensor| {
        let [batch, seqlen, heads, _] = tensor.shape();
        for (b, s, h) in places([batch, seqlen, heads]) {
            let row = tensor.row_mut(b, s, h);
            match input {
                Input::Q => row[..2].copy_from_slice(if s % 4 == 1 { &[8.0, 8.0] } else { &[8.0, 0.0] }),
                Input::K => {
                    row.fill(0.0);
                    row[0] = if s < LONG - 128 { 2.5 * unit } else { 0.0 };
                    row[1] = if s == 20 { 30.0 * unit } else { 0.0 };
                }
                Input::V => {
                    row.iter_mut().for_each(|v| *v = 4e35 * v.abs());
                    match s {
                        300 => row[5] = f64::INFINITY,
                        310 => row[7] = f64::NAN,
                        _ => {}
                    }
                }
                Input::DO => {}
            }
        }
    })
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
