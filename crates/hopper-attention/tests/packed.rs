//! Packed sequences and used lengths on the CPU: a sequence has the bits of a problem of its own, nothing else is read or
//! written, and wrong lengths are refused before an output is written.

use hopper_attention::{
    Args, BackwardProblem, DType, Device, Dims, Error, Float, ForwardArgs, ForwardProblem, Lengths, Mask, OutputOf,
    Result, SequenceOffsets, SequenceRows, Slot, Stream, TensorMut, TensorRef, UsedLengths, Workspace, bf16, f16,
};
use proptest::prelude::*;

mod common;

use common::{dense, masks, read, values, write};

/// What outputs hold before a run. No result is this number.
const UNWRITTEN: f32 = -1024.0;

/// Offsets and used lengths, owned.
#[derive(Clone, Debug, Default)]
struct Own {
    cu_seqlens_q: Option<Vec<i32>>,
    cu_seqlens_kv: Option<Vec<i32>>,
    seqused_q: Option<Vec<i32>>,
    seqused_kv: Option<Vec<i32>>,
}

impl Own {
    fn packed(q: &[i32], kv: &[i32]) -> Self {
        Self { cu_seqlens_q: Some(q.to_vec()), cu_seqlens_kv: Some(kv.to_vec()), ..Self::default() }
    }

    fn lengths(&self) -> Lengths<'_> {
        Lengths {
            cu_seqlens_q: self.cu_seqlens_q.as_deref(),
            cu_seqlens_kv: self.cu_seqlens_kv.as_deref(),
            seqused_q: self.seqused_q.as_deref(),
            seqused_kv: self.seqused_kv.as_deref(),
        }
    }

    fn lists(&self) -> [(Slot, Option<&[i32]>); 4] {
        let Lengths { cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, .. } = self.lengths();
        [
            (Slot::CuSeqlensQ, cu_seqlens_q),
            (Slot::CuSeqlensKv, cu_seqlens_kv),
            (Slot::SequsedQ, seqused_q),
            (Slot::SequsedKv, seqused_kv),
        ]
    }

    /// The problem with the operands of these lists.
    fn problem(&self, dtype: DType, dims: Dims, mask: Mask) -> ForwardProblem {
        let options = ForwardProblem::builder(dtype, dims).mask(mask).lse(true);
        self.lists()
            .iter()
            .fold(options, |options, (slot, list)| options.operand(*slot, list.is_some()))
            .build()
            .unwrap()
    }
}

/// The tensors of a forward and a backward pass, by the names of their operands.
struct Memory<T> {
    problem: BackwardProblem,
    inputs: Vec<(Slot, Vec<T>)>,
    d_lse: Vec<f32>,
    outputs: Vec<(Slot, Vec<T>)>,
    lse: Vec<f32>,
}

fn count(shape: &[usize]) -> usize {
    shape.iter().product()
}

impl<T: Float + OutputOf<T>> Memory<T> {
    /// Inputs that differ from place to place, and outputs that are not written.
    fn new(problem: &BackwardProblem, seed: u32) -> Self {
        let operands = problem.operands();
        let elements = |slot| count(operands.find(slot).unwrap().shape());
        let numbered = [Slot::Q, Slot::K, Slot::V, Slot::DO].into_iter().zip(seed..);
        let inputs = numbered.map(|(slot, seed)| (slot, values(elements(slot), seed))).collect();
        let unwritten = |slot| (slot, vec![T::from_f32(UNWRITTEN); elements(slot)]);
        Self {
            inputs,
            d_lse: values(elements(Slot::Lse), seed + 9),
            outputs: [Slot::O, Slot::DQ, Slot::DK, Slot::DV].map(unwritten).into(),
            lse: vec![UNWRITTEN; elements(Slot::Lse)],
            problem: problem.clone(),
        }
    }

    /// Runs the forward pass, then the backward pass. The lengths are host tensors that the run checks.
    fn run(&mut self, own: &Own) -> Result<()> {
        self.forward(own)?;
        self.backward(own)
    }

    fn lists<'a>(own: &'a Own, args: Args<'a>) -> Args<'a> {
        own.lists()
            .into_iter()
            .filter_map(|(slot, list)| Some((slot, list?)))
            .fold(args, |args, (slot, list)| args.read(slot, TensorRef::host(list, dense([list.len()])).unwrap()))
    }

    fn forward(&mut self, own: &Own) -> Result<()> {
        let problem = self.problem.forward().clone();
        let plan = problem.plan(&Device::cpu())?;
        let mut args = Args::new();
        for (slot, data) in self.inputs.iter().filter(|(slot, _)| *slot != Slot::DO) {
            args = read(args, *slot, data, problem.operands().find(*slot).unwrap().shape());
        }
        let (slot, o) = &mut self.outputs[0];
        args = write(args, *slot, o, problem.operands().find(*slot).unwrap().shape());
        args = write(args, Slot::Lse, &mut self.lse, problem.operands().find(Slot::Lse).unwrap().shape());
        plan.run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?, Self::lists(own, args))
    }

    fn backward(&mut self, own: &Own) -> Result<()> {
        let plan = self.problem.plan(&Device::cpu())?;
        let operands = self.problem.operands();
        let shape = |slot| operands.find(slot).unwrap().shape();
        let mut args = Args::new();
        for (slot, data) in &self.inputs {
            args = read(args, *slot, data, shape(*slot));
        }
        let (o, gradients) = self.outputs.split_first_mut().unwrap();
        args = read(args, Slot::O, &o.1, shape(Slot::O));
        args = read(args, Slot::Lse, &self.lse, shape(Slot::Lse));
        if self.problem.takes_d_lse() {
            args = read(args, Slot::DLse, &self.d_lse, shape(Slot::DLse));
        }
        for (slot, data) in gradients {
            args = write(args, *slot, data, shape(*slot));
        }
        plan.run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?, Self::lists(own, args))
    }

    fn untouched(&self) -> bool {
        let is_unwritten = |x: &T| x.to_f32() == UNWRITTEN;
        self.lse.iter().all(|&lse| lse == UNWRITTEN)
            && self.outputs.iter().all(|(_, data)| data.iter().all(is_unwritten))
    }

    /// Vectors of `row` elements, of the rows of a sequence: of an input or an output.
    fn rows_of(data: &[T], seqlen: usize, row: usize, rows: &SequenceRows) -> Vec<T> {
        let first = rows.batch * seqlen + rows.begin;
        data[first * row..(first + rows.len) * row].to_vec()
    }

    /// The numbers of a sequence's queries: `[heads, queries]`.
    fn numbers_of(&self, data: &[f32], rows: &SequenceRows) -> Vec<f32> {
        let dims = self.problem.dims();
        let of_head = |head: usize| {
            let first = (rows.batch * dims.heads_q + head) * dims.seqlen_q + rows.begin;
            data[first..first + rows.len].iter().copied()
        };
        (0..dims.heads_q).flat_map(of_head).collect()
    }
}

fn bits<T: hopper_attention::Element>(data: &[T]) -> Vec<u32> {
    data.iter().map(|x| x.to_f32().to_bits()).collect()
}

/// The side of a tensor, and the elements of one of its rows.
fn side_and_row(slot: Slot, dims: Dims) -> (usize, usize) {
    match slot {
        Slot::Q | Slot::DQ => (0, dims.heads_q * dims.head_dim_qk),
        Slot::O | Slot::DO => (0, dims.heads_q * dims.head_dim_vo),
        Slot::K | Slot::DK => (1, dims.heads_kv * dims.head_dim_qk),
        Slot::V | Slot::DV => (1, dims.heads_kv * dims.head_dim_vo),
        _ => unreachable!("{slot}"),
    }
}

/// Runs a problem with NaN in all rows of no sequence, and each sequence as a problem of its own. The bits must agree, and rows
/// of no sequence must not be written (or be filled).
fn check<T: Float + OutputOf<T>>(problem: &BackwardProblem, own: &Own) {
    let (dims, forward) = (problem.dims(), problem.forward());
    let sequences: Vec<_> = own.lengths().sequences(forward).collect();
    let seqlens = [dims.seqlen_q, dims.seqlen_kv];
    let mut memory = Memory::<T>::new(problem, 1);
    let mut belongs = [vec![false; count(&forward.q_shape()[..2])], vec![false; count(&forward.k_shape()[..2])]];
    for rows in &sequences {
        for side in 0..2 {
            let first = rows[side].batch * seqlens[side];
            rows[side].range().for_each(|row| belongs[side][first + row] = true);
        }
    }
    for (slot, data) in &mut memory.inputs {
        let (side, row) = side_and_row(*slot, dims);
        for (vectors, belongs) in data.chunks_exact_mut(row).zip(&belongs[side]) {
            if !belongs {
                vectors.fill(T::from_f32(f32::NAN));
            }
        }
    }
    memory.run(own).unwrap();

    let mut lse_want = vec![if forward.fills_gaps() { f32::NEG_INFINITY } else { UNWRITTEN }; memory.lse.len()];
    for [q, kv] in &sequences {
        let alone = dims.with_batch(1).with_seqlen_q(q.len).with_seqlen_kv(kv.len);
        let options = ForwardProblem::builder(forward.dtype(), alone).mask(forward.mask()).lse(true);
        let alone = options.softmax_scale(forward.softmax_scale()).build().unwrap();
        let alone = BackwardProblem::builder(&alone).d_lse(problem.takes_d_lse()).build().unwrap();
        let mut single = Memory::<T>::new(&alone, 1);
        for ((slot, data), (_, all)) in single.inputs.iter_mut().zip(&memory.inputs) {
            let (side, row) = side_and_row(*slot, dims);
            *data = Memory::rows_of(all, seqlens[side], row, [q, kv][side]);
        }
        single.d_lse = memory.numbers_of(&memory.d_lse, q);
        single.run(&Own::default()).unwrap();
        for ((slot, want), (_, all)) in single.outputs.iter().zip(&memory.outputs) {
            let (side, row) = side_and_row(*slot, dims);
            let got = Memory::rows_of(all, seqlens[side], row, [q, kv][side]);
            assert_eq!(bits(&got), bits(want), "{problem}: {slot} of sequence {}", q.sequence);
        }
        assert_eq!(bits(&memory.numbers_of(&memory.lse, q)), bits(&single.lse), "{problem}: sequence {}", q.sequence);
        for head in 0..dims.heads_q {
            let first = (q.batch * dims.heads_q + head) * dims.seqlen_q + q.begin;
            lse_want[first..first + q.len].copy_from_slice(&memory.lse[first..first + q.len]);
        }
    }
    assert_eq!(bits(&memory.lse), bits(&lse_want), "{problem}: the LSE of no sequence");
    let want = if forward.fills_gaps() { 0.0 } else { UNWRITTEN };
    for (slot, data) in &memory.outputs {
        let (side, row) = side_and_row(*slot, dims);
        for (vectors, _) in data.chunks_exact(row).zip(&belongs[side]).filter(|(_, belongs)| !**belongs) {
            assert!(vectors.iter().all(|x| x.to_f32() == want), "{problem}: {slot} of no sequence");
        }
    }
}

fn backward(own: &Own, dtype: DType, dims: Dims, mask: Mask, fill: bool) -> BackwardProblem {
    let forward = own.problem(dtype, dims, mask).to_builder().fill_gaps(fill).build().unwrap();
    BackwardProblem::builder(&forward).d_lse(true).deterministic(fill).build().unwrap()
}

const DIMS: Dims = Dims::new(3, 9, 4, 8).with_heads_kv(2).with_head_dim_vo(6);

#[test]
fn each_sequence_is_a_problem_of_its_own() {
    let cases = [
        // Empty on one side, and on both; gaps before and after.
        Own::packed(&[0, 4, 4, 9], &[0, 3, 9, 9]),
        Own::packed(&[1, 1, 1, 8], &[0, 0, 7, 8]),
        Own::packed(&[0, 0, 0, 0], &[5, 5, 5, 5]),
        Own {
            seqused_q: Some(vec![2, 0, 4]),
            seqused_kv: Some(vec![0, 5, 0]),
            ..Own::packed(&[0, 4, 4, 9], &[0, 3, 9, 9])
        },
        Own { cu_seqlens_q: Some(vec![0, 2, 6, 9]), ..Own::default() },
        Own { cu_seqlens_kv: Some(vec![1, 2, 6, 9]), seqused_q: Some(vec![9, 0, 3]), ..Own::default() },
        Own { seqused_q: Some(vec![9, 0, 3]), seqused_kv: Some(vec![0, 9, 5]), ..Own::default() },
    ];
    for own in &cases {
        for mask in [Mask::Full, Mask::causal(), Mask::window(Some(2), Some(0))] {
            for fill in [false, true] {
                check::<f32>(&backward(own, DType::F32, DIMS, mask, fill), own);
                check::<bf16>(&backward(own, DType::BF16, DIMS, mask, fill), own);
            }
        }
    }
}

/// Lengths around the sizes of the CPU's blocks.
#[test]
fn long_sequences_beside_short_ones() {
    let own = Own::packed(&[0, 1, 66, 266, 267], &[0, 300, 301, 601, 602]);
    let dims = DIMS.with_batch(4).with_seqlen_q(270).with_seqlen_kv(602);
    for mask in [Mask::Full, Mask::causal(), Mask::window(Some(70), Some(9))] {
        check::<f16>(&backward(&own, DType::F16, dims, mask, false), &own);
    }
}

#[test]
fn thousands_of_short_sequences() {
    let mut offsets = vec![0];
    for i in 0..3000_i32 {
        offsets.push(offsets[i as usize] + 1 + i * 7 % 16);
    }
    let total = offsets[3000] as usize;
    let own = Own::packed(&offsets, &offsets);
    let dims = Dims::new(3000, total, 2, 4).with_heads_kv(1);
    check::<bf16>(&backward(&own, DType::BF16, dims, Mask::causal(), false), &own);
}

#[test]
fn no_sequence_and_one() {
    for fill in [false, true] {
        let none = Own::packed(&[0], &[7]);
        check::<f32>(&backward(&none, DType::F32, DIMS.with_batch(0), Mask::Full, fill), &none);
        let one = Own::packed(&[0, 9], &[0, 9]);
        check::<f32>(&backward(&one, DType::F32, DIMS.with_batch(1), Mask::causal(), fill), &one);
    }
}

/// Cuts of `rows` rows into sequences: `batch + 1` offsets that do not decrease.
fn offsets(batch: usize, rows: usize) -> impl Strategy<Value = Vec<i32>> {
    proptest::collection::vec(0..=rows as i32, batch + 1).prop_map(|mut offsets| {
        offsets.sort_unstable();
        offsets
    })
}

/// Offsets or none, and used lengths or none, of one side.
fn side(batch: usize, rows: usize) -> impl Strategy<Value = [Option<Vec<i32>>; 2]> {
    let used = proptest::option::of(proptest::collection::vec(0..=rows as i32, batch));
    (proptest::option::of(offsets(batch, rows)), used).prop_map(move |(offsets, used)| {
        let len = |i: usize| offsets.as_ref().map_or(rows as i32, |offsets| offsets[i + 1] - offsets[i]);
        let used = used.map(|used| used.iter().enumerate().map(|(i, &used)| used.min(len(i))).collect());
        [offsets, used]
    })
}

fn problems() -> impl Strategy<Value = (Own, Dims)> {
    (0usize..5, 0usize..60, 0usize..60, 1usize..3, 1usize..4).prop_flat_map(|(batch, q, kv, heads_kv, group)| {
        let dims = Dims::new(batch, q, heads_kv * group, 5).with_seqlen_kv(kv).with_heads_kv(heads_kv);
        (side(batch, q), side(batch, kv)).prop_map(move |([cu_seqlens_q, seqused_q], [cu_seqlens_kv, seqused_kv])| {
            (Own { cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv }, dims.with_head_dim_vo(3))
        })
    })
}

/// Nothing, too little, about right, and more than there can be.
fn hint() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), Just(1), 1usize..80, Just(usize::MAX), any::<usize>()]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.min(96), ..common::kept() })]
    #[test]
    fn random_sequences_are_problems_of_their_own((own, dims) in problems(), mask in masks(), fill in any::<bool>(), dtype in 0..3) {
        let fill = fill && own.lists().iter().any(|(_, list)| list.is_some());
        match dtype {
            0 => check::<f16>(&backward(&own, DType::F16, dims, mask, fill), &own),
            1 => check::<bf16>(&backward(&own, DType::BF16, dims, mask, fill), &own),
            _ => check::<f32>(&backward(&own, DType::F32, dims, mask, fill), &own),
        }
    }

    /// What the problem is told about the longest sequence changes no bit, and no byte of the workspace, however wrong it is.
    #[test]
    fn wrong_hints_change_nothing(
        (own, dims) in problems(), mask in masks(), fill in any::<bool>(),
        of_q in hint(), of_kv in hint(),
    ) {
        let fill = fill && own.lists().iter().any(|(_, list)| list.is_some());
        let without = backward(&own, DType::BF16, dims, mask, fill);
        let mut options = without.forward().to_builder();
        if own.cu_seqlens_q.is_some() || own.seqused_q.is_some() {
            options = options.max_seqlen_q(of_q);
        }
        if own.cu_seqlens_kv.is_some() || own.seqused_kv.is_some() {
            options = options.max_seqlen_kv(of_kv);
        }
        let with = BackwardProblem::builder(&options.build().unwrap());
        let with = with.d_lse(true).deterministic(fill).build().unwrap();
        let of_forward = |problem: &BackwardProblem| problem.forward().plan(&Device::cpu()).unwrap().workspace_bytes();
        let of_backward = |problem: &BackwardProblem| problem.plan(&Device::cpu()).unwrap().workspace_bytes();
        prop_assert_eq!(of_forward(&with), of_forward(&without));
        prop_assert_eq!(of_backward(&with), of_backward(&without));
        // Each run has a workspace of just the bytes that its plan says.
        let results = [&with, &without].map(|problem| {
            let mut memory = Memory::<bf16>::new(problem, 1);
            memory.run(&own).unwrap();
            let outputs: Vec<_> = memory.outputs.iter().map(|(_, data)| bits(data)).collect();
            (outputs, bits(&memory.lse))
        });
        prop_assert!(results[0] == results[1], "{}", with);
    }

    /// Any numbers at all are computed or refused, and outputs of a refused run are not written.
    #[test]
    fn any_numbers_are_computed_or_refused(
        q in proptest::collection::vec(prop_oneof![-2i32..12, any::<i32>()], 4),
        used in proptest::collection::vec(prop_oneof![-2i32..12, any::<i32>()], 3),
    ) {
        let own = Own { seqused_kv: Some(used), cu_seqlens_q: Some(q), ..Own::default() };
        let problem = backward(&own, DType::F32, DIMS, Mask::causal(), false);
        let mut memory = Memory::<f32>::new(&problem, 1);
        let legal = own.lengths().check(problem.forward()).is_ok();
        match memory.run(&own) {
            Ok(()) => prop_assert!(legal),
            Err(error) => prop_assert!(!legal && memory.untouched() && matches!(error, Error::Value { .. }), "{}", error),
        }
    }
}

#[test]
fn hostile_lengths_are_refused_by_name() {
    let refused = |own: Own| {
        let problem = backward(&own, DType::F32, DIMS, Mask::Full, false);
        let mut memory = Memory::<f32>::new(&problem, 1);
        let forward = memory.forward(&own).unwrap_err();
        assert_eq!(memory.backward(&own).unwrap_err(), forward, "both passes refuse alike");
        assert!(memory.untouched());
        forward.to_string()
    };
    let q = |offsets: &[i32]| refused(Own::packed(offsets, &[0, 3, 9, 9]));
    assert_eq!(q(&[0, 5, 4, 9]), "cu_seqlens_q: 4 at 2, after 5; allowed: offsets that do not decrease");
    assert_eq!(q(&[-1, 5, 6, 9]), "cu_seqlens_q: -1 at 0; allowed: 0 to 9, the number of rows");
    assert_eq!(q(&[0, 5, 6, 10]), "cu_seqlens_q: 10 at 3; allowed: 0 to 9, the number of rows");
    assert!(q(&[i32::MIN, 5, 6, 9]).starts_with("cu_seqlens_q: -2147483648 at 0"));
    assert!(q(&[0, i32::MAX, 6, 9]).starts_with("cu_seqlens_q: 2147483647 at 1"));
    assert!(q(&[0, 5, 9]).starts_with("cu_seqlens_q: shape [3], expected [4] [batch + 1]"));
    assert!(refused(Own::packed(&[0, 5, 6, 9], &[0, 1, 0, 1])).starts_with("cu_seqlens_kv: 0 at 2, after 1"));
    let used =
        |used: &[i32]| refused(Own { seqused_q: Some(used.to_vec()), ..Own::packed(&[0, 4, 4, 9], &[0, 3, 9, 9]) });
    assert_eq!(used(&[4, 1, 5]), "seqused_q: 1 at 1; allowed: 0 to 0, the length of the sequence");
    assert!(used(&[4, 0, i32::MIN]).starts_with("seqused_q: -2147483648 at 2"));
    let padded = refused(Own { seqused_kv: Some(vec![9, 10, 0]), ..Own::default() });
    assert_eq!(padded, "seqused_kv: 10 at 1; allowed: 0 to 9, the length of the sequence");
}

/// The typed arguments, with checked offsets and lengths.
#[test]
fn typed_arguments_take_checked_offsets() {
    let own = Own { seqused_kv: Some(vec![3, 5, 0]), ..Own::packed(&[0, 4, 4, 9], &[0, 3, 9, 9]) };
    let problem = own.problem(DType::F32, DIMS, Mask::causal());
    let mut want = Memory::<f32>::new(&BackwardProblem::builder(&problem).build().unwrap(), 1);
    want.forward(&own).unwrap();

    let offsets = |numbers: &Option<Vec<i32>>| SequenceOffsets::new(&Stream::Cpu, numbers.as_ref().unwrap()).unwrap();
    let (of_q, of_kv) = (offsets(&own.cu_seqlens_q), offsets(&own.cu_seqlens_kv));
    let used = UsedLengths::new(&Stream::Cpu, &[3, 5, 0]).unwrap();
    let plan = problem.plan(&Device::cpu()).unwrap();
    let (mut o, mut lse) = (vec![UNWRITTEN; 9 * 4 * 6], vec![UNWRITTEN; 4 * 9]);
    let mut run = |of_q: &SequenceOffsets, used: &UsedLengths| {
        let args = ForwardArgs::packed(
            TensorRef::host(&want.inputs[0].1, dense([9, 4, 8])).unwrap(),
            TensorRef::host(&want.inputs[1].1, dense([9, 2, 8])).unwrap(),
            TensorRef::host(&want.inputs[2].1, dense([9, 2, 6])).unwrap(),
            TensorMut::host(&mut o, dense([9, 4, 6])).unwrap(),
        );
        let args = args.lse_packed(TensorMut::host(&mut lse, dense([4, 9])).unwrap());
        let args = args.cu_seqlens_q(of_q).cu_seqlens_kv(&of_kv).seqused_kv(used);
        plan.run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, 0).unwrap(), args)
    };
    let refused = |result: Result<()>| result.unwrap_err().to_string();
    // Offsets that are right, but of other tensors.
    let larger = SequenceOffsets::from_lengths(&Stream::Cpu, [4, 0, 6]).unwrap();
    assert_eq!(refused(run(&larger, &used)), "cu_seqlens_q: 10 at 3; allowed: 0 to 9, the number of rows");
    let longer = UsedLengths::new(&Stream::Cpu, &[3, 7, 0]).unwrap();
    assert_eq!(refused(run(&of_q, &longer)), "seqused_kv: 7 at 1; allowed: 0 to 6, the length of the sequence");
    let fewer = SequenceOffsets::from_lengths(&Stream::Cpu, [4, 5]).unwrap();
    assert!(refused(run(&fewer, &used)).starts_with("cu_seqlens_q: shape [3], expected [4]"));
    run(&of_q, &used).unwrap();
    assert_eq!((bits(&o), bits(&lse)), (bits(&want.outputs[0].1), bits(&want.lse)));
}

#[test]
fn checked_offsets_are_checked() {
    let made = |numbers: &[i32]| SequenceOffsets::new(&Stream::Cpu, numbers).map_err(|error| error.to_string());
    assert_eq!(made(&[0, 3, 3]).unwrap().sequences(), 2);
    assert_eq!(made(&[]).unwrap_err(), "offsets: no number; allowed: batch + 1 offsets");
    assert!(made(&[0, 3, 2]).unwrap_err().contains("offsets: 2 at 2, after 3"));
    assert!(made(&[-3]).unwrap_err().contains("-3 at 0"));
    let sum = SequenceOffsets::from_lengths(&Stream::Cpu, [1 << 30, 1 << 30]).unwrap_err().to_string();
    assert_eq!(sum, "lengths: 1073741824 rows and 1073741824 more; allowed: below 2^31 rows in all");
    assert!(UsedLengths::new(&Stream::Cpu, &[1, -1]).unwrap_err().to_string().starts_with("lengths: -1 at 1"));
}
