//! What the bits of a sequence must not depend on: values of its neighbours, and whether it lies in a batch at all.

use std::ops::Range;

use hopper_attention::reference::Tensor;
use hopper_attention::{E4M3, ForwardProblem, Mask};

use crate::alibi::Alibi;
use crate::backward;
use crate::data::{Garbage, Image, Input, Poison};
use crate::fp8::{Operands, Output};
use crate::packing::Packing;
use crate::problems::Case;
use crate::runner::{Outputs, Prepared, Ready};
use crate::sinks::Sinks;

/// The rows of a sequence, by their numbers `batch * seqlen + token`: those of queries, and those of keys.
pub fn rows_of(problem: &ForwardProblem, packing: &Packing, sequence: usize) -> [Range<usize>; 2] {
    let seqlens = [problem.dims().seqlen_q, problem.dims().seqlen_kv];
    let sides = packing.lengths().sequences(problem).nth(sequence).expect("a sequence");
    [0, 1].map(|side| {
        let first = sides[side].batch * seqlens[side] + sides[side].begin;
        first..first + sides[side].len
    })
}

/// Which rows of each side belong to another sequence than this one.
fn others(problem: &ForwardProblem, packing: &Packing, own: usize) -> [impl Fn(usize) -> bool + use<>; 2] {
    let count = packing.lengths().sequences(problem).count();
    let all: Vec<_> = (0..count).filter(|&other| other != own).map(|other| rows_of(problem, packing, other)).collect();
    [0, 1].map(|side| {
        let all = all.clone();
        move |row: usize| all.iter().any(|sides| sides[side].contains(&row))
    })
}

/// Bits by the names of the tensors that have them.
pub type Bits = Vec<(&'static str, Vec<u32>)>;

/// A case of several sequences, of which one is looked at.
pub trait OfSequences: Ready {
    /// The same with garbage in all rows of the other sequences, in every input. Rows of no sequence stay what they are.
    #[must_use]
    fn beside(&self, own: usize, garbage: Garbage) -> Self;

    /// The sequence as a dense problem of its own, with the same inputs. What must come out of it is unknown where there is a gradient of
    /// the LSE, or a bias.
    #[must_use]
    fn alone(&self, own: usize) -> Self;

    /// The batch without the rows of a packed sequence, which is empty then.
    #[must_use]
    fn without(&self, own: usize) -> Self;

    /// The bits of what a run wrote for a sequence.
    fn bits(&self, outputs: &Self::Outputs, own: usize) -> Bits;

    /// What a run of the whole batch wrote for the other sequences, as outputs of the batch without this one.
    fn outputs_without(&self, outputs: &Self::Outputs, own: usize, left: &Self) -> Self::Outputs;

    /// The bits of what it wrote for the other sequences.
    fn bits_of_others(&self, outputs: &Self::Outputs, own: usize) -> Bits;
}

fn bits_of<T: Poison, const R: usize>(image: &Image<T, R>, axis: usize, is_taken: impl Fn(usize) -> bool) -> Vec<u32> {
    image.elements_of_rows(axis, is_taken).into_iter().map(T::bits).collect()
}

fn fill<T: Poison, const R: usize>(image: &mut Image<T, R>, axis: usize, rows: impl Fn(usize) -> bool, with: Garbage) {
    image.put_into_rows(axis, rows, std::iter::repeat(with.of()));
}

/// Puts some rows into an image that has no others.
fn copy<T: Poison, const R: usize>(
    into: &mut Image<T, R>,
    from: &Image<T, R>,
    axis: usize,
    is_taken: impl Fn(usize) -> bool,
) {
    into.put_into_rows(axis, |_| true, from.elements_of_rows(axis, is_taken));
}

/// Fills a tensor that has some rows of another one alone.
fn take(into: &mut Tensor, from: &Tensor, is_taken: &dyn Fn(usize) -> bool) {
    let [_, _, heads, head_dim] = from.shape();
    let rows = from.data().chunks_exact(heads * head_dim).enumerate();
    let taken = rows.filter(|(row, _)| is_taken(*row)).flat_map(|(_, row)| row);
    into.data_mut().iter_mut().zip(taken).for_each(|(into, from)| *into = *from);
}

/// The case of a sequence by itself.
fn alone(case: &Case, [queries, keys]: &[Range<usize>; 2]) -> Case {
    let dims = case.dims.with_batch(1).with_seqlen_q(queries.len()).with_seqlen_kv(keys.len());
    Case { dims, packing: Packing::default(), ..case.clone() }
}

/// The case without the rows of a packed sequence.
fn without(case: &Case, own: usize, rows: &[Range<usize>; 2]) -> Case {
    let cut = |offsets: &Option<Vec<i32>>, rows: &Range<usize>| {
        let offsets = offsets.as_ref().expect("a packed side").iter().enumerate();
        Some(offsets.map(|(i, &offset)| if i > own { offset - rows.len() as i32 } else { offset }).collect())
    };
    let packing = Packing {
        cu_seqlens_q: cut(&case.packing.cu_seqlens_q, &rows[0]),
        cu_seqlens_kv: cut(&case.packing.cu_seqlens_kv, &rows[1]),
        ..Packing::default()
    };
    let dims = case.dims.with_seqlen_q(case.dims.seqlen_q - rows[0].len());
    let dims = dims.with_seqlen_kv(case.dims.seqlen_kv - rows[1].len());
    Case { dims, packing, ..case.clone() }
}

impl<T: Poison> OfSequences for Prepared<T> {
    fn beside(&self, own: usize, garbage: Garbage) -> Self {
        let mut spoiled = self.clone();
        let [q, kv] = others(&self.problem, &self.case.packing, own);
        fill(&mut spoiled.q, 1, q, garbage);
        fill(&mut spoiled.k, 1, &kv, garbage);
        fill(&mut spoiled.v, 1, &kv, garbage);
        spoiled
    }

    fn alone(&self, own: usize) -> Self {
        let rows = rows_of(&self.problem, &self.case.packing, own);
        forward_of(&alone(&self.case, &rows), self, rows.map(|rows| move |row: usize| rows.contains(&row)))
    }

    fn without(&self, own: usize) -> Self {
        let rows = rows_of(&self.problem, &self.case.packing, own);
        let left = without(&self.case, own, &rows);
        forward_of(&left, self, rows.map(|rows| move |row: usize| !rows.contains(&row)))
    }

    fn outputs_without(&self, outputs: &Self::Outputs, own: usize, left: &Self) -> Self::Outputs {
        let [queries, _] = rows_of(&self.problem, &self.case.packing, own);
        let (mut others, is_taken) = (left.poisoned(), |row: usize| !queries.contains(&row));
        copy(&mut others.o, &outputs.o, 1, is_taken);
        if let (Some(into), Some(from)) = (&mut others.lse, &outputs.lse) {
            copy(into, from, 2, is_taken);
        }
        others
    }

    fn bits(&self, outputs: &Self::Outputs, own: usize) -> Bits {
        let [queries, _] = rows_of(&self.problem, &self.case.packing, own);
        forward_bits(outputs, |row| queries.contains(&row))
    }

    fn bits_of_others(&self, outputs: &Self::Outputs, own: usize) -> Bits {
        let [queries, _] = rows_of(&self.problem, &self.case.packing, own);
        forward_bits(outputs, |row| !queries.contains(&row))
    }
}

/// A case with inputs from some rows of another.
fn forward_of<T: Poison>(case: &Case, from: &Prepared<T>, [q, kv]: [impl Fn(usize) -> bool; 2]) -> Prepared<T> {
    let tensors = from.tensors();
    let mut made = Prepared::edited(case, |input, tensor| {
        let (from, is_taken) =
            (&tensors[input as usize], if input == Input::Q { &q as &dyn Fn(usize) -> bool } else { &kv });
        take(tensor, from, is_taken);
    });
    if let (Some(bias), Some(of_all)) = (&mut made.bias, &from.bias) {
        bias.copy_from(of_all);
    }
    made
}

fn forward_bits<T: Poison>(outputs: &Outputs<T>, is_taken: impl Fn(usize) -> bool) -> Bits {
    let lse = outputs.lse.as_ref().map(|lse| ("lse", bits_of(lse, 2, &is_taken)));
    [("o", bits_of(&outputs.o, 1, &is_taken))].into_iter().chain(lse).collect()
}

impl<T: Poison> OfSequences for backward::Prepared<T> {
    fn beside(&self, own: usize, garbage: Garbage) -> Self {
        let mut spoiled = self.clone();
        let [q, kv] = others(self.problem.forward(), &self.case.packing, own);
        for image in [&mut spoiled.q, &mut spoiled.o, &mut spoiled.d_o] {
            fill(image, 1, &q, garbage);
        }
        for image in [&mut spoiled.k, &mut spoiled.v] {
            fill(image, 1, &kv, garbage);
        }
        for numbers in [Some(&mut spoiled.lse), spoiled.d_lse.as_mut()].into_iter().flatten() {
            fill(numbers, 2, &q, garbage);
        }
        spoiled
    }

    fn alone(&self, own: usize) -> Self {
        let rows = rows_of(self.problem.forward(), &self.case.packing, own);
        backward_of(&alone(&self.case, &rows), self, rows.map(|rows| move |row: usize| rows.contains(&row)))
    }

    fn without(&self, own: usize) -> Self {
        let rows = rows_of(self.problem.forward(), &self.case.packing, own);
        let left = without(&self.case, own, &rows);
        backward_of(&left, self, rows.map(|rows| move |row: usize| !rows.contains(&row)))
    }

    fn outputs_without(&self, outputs: &Self::Outputs, own: usize, left: &Self) -> Self::Outputs {
        let [queries, keys] = rows_of(self.problem.forward(), &self.case.packing, own);
        let mut others = left.poisoned();
        copy(&mut others.d_q, &outputs.d_q, 1, |row| !queries.contains(&row));
        copy(&mut others.d_k, &outputs.d_k, 1, |row| !keys.contains(&row));
        copy(&mut others.d_v, &outputs.d_v, 1, |row| !keys.contains(&row));
        others
    }

    fn bits(&self, outputs: &Self::Outputs, own: usize) -> Bits {
        let rows = rows_of(self.problem.forward(), &self.case.packing, own);
        backward_bits(outputs, rows.map(|rows| move |row: usize| rows.contains(&row)))
    }

    fn bits_of_others(&self, outputs: &Self::Outputs, own: usize) -> Bits {
        let rows = rows_of(self.problem.forward(), &self.case.packing, own);
        backward_bits(outputs, rows.map(|rows| move |row: usize| !rows.contains(&row)))
    }
}

/// A case with inputs from some rows of another, O and the LSE of a forward pass among them.
fn backward_of<T: Poison>(
    case: &Case,
    from: &backward::Prepared<T>,
    [q, kv]: [impl Fn(usize) -> bool; 2],
) -> backward::Prepared<T> {
    let tensors = [&from.q, &from.k, &from.v, &from.d_o].map(Image::tensor);
    let mut made = backward::Prepared::edited(case, |input, tensor| {
        let is_of_keys = matches!(input, Input::K | Input::V);
        take(tensor, &tensors[input as usize], if is_of_keys { &kv as &dyn Fn(usize) -> bool } else { &q });
    });
    copy(&mut made.o, &from.o, 1, &q);
    copy(&mut made.lse, &from.lse, 2, &q);
    if let (Some(into), Some(from)) = (&mut made.d_lse, &from.d_lse) {
        copy(into, from, 2, &q);
    }
    if let (Some(bias), Some(of_all)) = (&mut made.bias, &from.bias) {
        bias.copy_from(of_all);
    }
    made
}

fn backward_bits<T: Poison>(outputs: &backward::Outputs<T>, [q, kv]: [impl Fn(usize) -> bool; 2]) -> Bits {
    vec![
        ("d_q", bits_of(&outputs.d_q, 1, q)),
        ("d_k", bits_of(&outputs.d_k, 1, &kv)),
        ("d_v", bits_of(&outputs.d_v, 1, &kv)),
    ]
}

/// The bits of O and of the log-sum-exp of a sequence, of e4m3 operands.
pub fn fp8_bits(operands: &Operands, (o, lse): &Output, own: usize) -> Vec<u64> {
    let (problem, [_, heads, seqlen]) = (operands.problem(), operands.problem().lse_shape());
    let [queries, _] = rows_of(problem, operands.packing(), own);
    let rows = queries.flat_map(|row| (0..heads).map(move |head| (row / seqlen, row % seqlen, head)));
    let of_row = |(batch, query, head): (usize, usize, usize)| {
        let lse = lse[(batch * heads + head) * seqlen + query];
        o.row(batch, query, head).iter().copied().chain([lse]).map(f64::to_bits).collect::<Vec<_>>()
    };
    rows.flat_map(of_row).collect()
}

/// What stands in rows of e4m3 operands beside a sequence, and their factors. A GPU computes with any factor. The CPU takes finite
/// ones of 0 and more.
pub fn fp8_garbage(any_factor: bool) -> impl Iterator<Item = (E4M3, f32)> {
    // NaN, and the largest numbers of both signs.
    let elements = [0x7f, 0x7e, 0xfe, 0xff].map(E4M3::from_bits);
    let legal = [f32::MAX, 0.0, f32::MIN_POSITIVE, 1e30];
    let others = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0];
    let with = move |factors: [f32; 4]| elements.into_iter().zip(factors);
    with(legal).chain(with(others).filter(move |_| any_factor))
}

/// Sequences of these lengths, without gaps unless there are some at the ends.
fn packing(queries: &[usize], keys: &[usize], gap: usize) -> (Packing, [usize; 2]) {
    let offsets = |lengths: &[usize]| {
        let mut offsets = vec![gap as i32];
        lengths.iter().for_each(|&len| offsets.push(offsets[offsets.len() - 1] + len as i32));
        offsets
    };
    let (of_q, of_kv) = (offsets(queries), offsets(keys));
    let rows = [&of_q, &of_kv].map(|offsets| offsets[offsets.len() - 1] as usize + gap);
    (Packing { cu_seqlens_q: Some(of_q), cu_seqlens_kv: Some(of_kv), ..Packing::default() }, rows)
}

/// Batches of which a sequence is looked at, and which one. Neighbours begin and end in the middle of its tiles. Some are empty.
pub fn neighbours(head_dim: usize, head_dim_vo: usize, mask: Mask) -> Vec<(Case, usize)> {
    let case = |batch: usize, [queries, keys]: [usize; 2], packing: Packing| {
        let case = Case::new(queries, keys, head_dim, mask).head_dim_vo(head_dim_vo).heads(batch, 4, 2);
        Case { packing, seed: (queries + batch) as u64, ..case }
    };
    let (packed, rows) = packing(&[77, 150, 0, 131, 140], &[90, 230, 40, 0, 133], 0);
    let packed = case(5, rows, packed);
    let (used, rows) = packing(&[140, 163, 120], &[150, 257, 128], 9);
    let used = Packing { seqused_q: Some(vec![100, 139, 0]), seqused_kv: Some(vec![3, 201, 128]), ..used };
    let used = case(3, rows, Packing { fill_gaps: true, ..used });
    let of_dense = Packing { seqused_kv: Some(vec![140, 111, 0]), ..Packing::default() };
    let of_dense = case(3, [130, 140], of_dense);
    let (one_side, rows) = packing(&[20, 133, 58], &[0; 3], 4);
    let one_side = case(3, [rows[0], 150], Packing { cu_seqlens_kv: None, ..one_side });
    vec![(packed.clone(), 1), (packed.clone(), 0), (packed, 4), (used, 1), (of_dense, 1), (one_side, 1)]
}

/// Batches of packed sequences of which each is to have the bits of a dense problem: plain ones, and one of each modifier. Sequences
/// have many rows, so that their masks are of the same class.
pub fn like_dense(head_dim: usize, head_dim_vo: usize, mask: Mask) -> Vec<Case> {
    let (packing, rows) = packing(&[197, 128, 333], &[197, 140, 390], 0);
    let case = Case::new(rows[0], rows[1], head_dim, mask).head_dim_vo(head_dim_vo).heads(3, 4, 2);
    let plain = Case { packing, seed: 11, ..case };
    let bias = |text: &str| plain.clone().bias(text.parse().expect("a bias"));
    vec![
        plain.clone(),
        Case { sinks: Sinks::Normal, ..plain.clone() },
        plain.clone().softcap(15.0),
        plain.clone().alibi(Alibi::Standard),
        bias("f32:hq"),
        bias("bf16:h"),
    ]
}
