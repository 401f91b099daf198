//! e4m3 operands of packed sequences, on the CPU: the quantiser stores the bytes of a sequence by itself, attention has the bits of
//! a problem of its own, and factors of no sequence are neither read nor written.

use hopper_attention::{
    DType, Descale, Device, Dims, E4M3, ForwardArgs, ForwardProblem, Lengths, Mask, QuantizeArgs, Quantizer, Result,
    Scaling, SequenceOffsets, SequenceRows, Stream, TensorMut, TensorRef, Workspace, bf16,
};

mod common;

use common::{dense, values};

/// Four sequences, one of them empty, one longer than a block of factors; gaps before and after.
const CUTS: [i32; 5] = [3, 4, 4, 300, 310];
const ROWS: usize = 320;
const DIMS: Dims = Dims::new(4, ROWS, 4, 16).with_heads_kv(2);
/// What outputs hold before: 240 as e4m3. No result is this number.
const UNWRITTEN: u8 = 0x77;

/// Operands and factors of one problem.
#[derive(Clone, Debug, PartialEq)]
struct Operands {
    /// Of q, k and v.
    stored: [Vec<u8>; 3],
    descale: [Vec<f32>; 3],
    counts: Vec<f32>,
}

fn offsets() -> SequenceOffsets {
    SequenceOffsets::new(&Stream::Cpu, &CUTS).unwrap()
}

fn no_workspace() -> Workspace<'static> {
    Workspace::alloc(&Stream::Cpu, 0).unwrap()
}

fn shapes(problem: &ForwardProblem) -> [([usize; 4], [usize; 3]); 3] {
    [
        (problem.q_shape(), problem.descale_q_shape()),
        (problem.k_shape(), problem.descale_k_shape()),
        (problem.v_shape(), problem.descale_v_shape()),
    ]
}

/// Quantises values of q, k and v. Factors are given, or made.
fn quantise(
    problem: &ForwardProblem,
    hadamard: bool,
    inputs: &[Vec<bf16>; 3],
    given: Option<&[Vec<f32>; 3]>,
) -> Result<Operands> {
    let packed = problem.is_packed_q();
    let per_block = packed && problem.scaling() == Some(Scaling::PerBlock);
    let mut stored = inputs.each_ref().map(|x| vec![E4M3::from_bits(UNWRITTEN); x.len()]);
    let mut descale = shapes(problem).map(|(_, factors)| vec![-1.0; factors.iter().product()]);
    if let Some(given) = given {
        descale.clone_from(given);
    }
    let mut counts = vec![-1.0; 6];
    let options = Quantizer::builder(problem, DType::BF16);
    let plan = if hadamard { options.hadamard(7) } else { options }.build()?.plan(&Device::cpu())?;
    let offsets = offsets();
    let mut args = QuantizeArgs::new().counts(TensorMut::host(&mut counts, dense([3, 2]))?);
    if packed {
        args = args.cu_seqlens_q(&offsets).cu_seqlens_kv(&offsets);
    }
    for (i, ((values, stored), descale)) in inputs.iter().zip(&mut stored).zip(&mut descale).enumerate() {
        let (shape, factors) = shapes(problem)[i];
        let [_, rows, heads, dim] = shape;
        let descale = match (per_block, given.is_some()) {
            (true, false) => Descale::PackedFromAmax(TensorMut::host(descale, dense([factors[1], factors[2]]))?),
            (true, true) => Descale::PackedGiven(TensorRef::host(descale, dense([factors[1], factors[2]]))?),
            (false, false) => Descale::FromAmax(TensorMut::host(descale, dense(factors))?),
            (false, true) => Descale::Given(TensorRef::host(descale, dense(factors))?),
        };
        args = if packed {
            let (values, stored) = (
                TensorRef::host(values, dense([rows, heads, dim]))?,
                TensorMut::host(stored, dense([rows, heads, dim]))?,
            );
            [QuantizeArgs::q, QuantizeArgs::k, QuantizeArgs::v][i](args, values, stored, descale)
        } else {
            let (values, stored) = (TensorRef::host(values, dense(shape))?, TensorMut::host(stored, dense(shape))?);
            [QuantizeArgs::q, QuantizeArgs::k, QuantizeArgs::v][i](args, values, stored, descale)
        };
    }
    plan.run(&Stream::Cpu, &mut no_workspace(), args)?;
    let stored = stored.map(|stored| stored.iter().map(E4M3::to_bits).collect());
    Ok(Operands { stored, descale, counts })
}

/// O and the LSE.
fn attention(problem: &ForwardProblem, operands: &Operands) -> Result<(Vec<bf16>, Vec<f32>)> {
    let packed = problem.is_packed_q();
    let per_block = packed && problem.scaling() == Some(Scaling::PerBlock);
    let stored = operands.stored.each_ref().map(|x| x.iter().map(|&x| E4M3::from_bits(x)).collect::<Vec<_>>());
    let mut o = vec![bf16::from_f32(-1024.0); problem.o_shape().iter().product()];
    let mut lse = vec![-1024.0; problem.lse_shape().iter().product()];
    let offsets = offsets();
    let shapes = shapes(problem);
    let plan = problem.plan(&Device::cpu())?;
    let args = if packed {
        let rows = |i: usize| {
            let [_, rows, heads, dim] = shapes[i].0;
            TensorRef::host(&stored[i], dense([rows, heads, dim]))
        };
        let [_, rows_q, heads, dim] = problem.o_shape();
        let o = TensorMut::host(&mut o, dense([rows_q, heads, dim]))?;
        let args = ForwardArgs::packed(rows(0)?, rows(1)?, rows(2)?, o);
        args.lse_packed(TensorMut::host(&mut lse, dense([heads, rows_q]))?)
            .cu_seqlens_q(&offsets)
            .cu_seqlens_kv(&offsets)
    } else {
        let tensor = |i: usize| TensorRef::host(&stored[i], dense(shapes[i].0));
        let args =
            ForwardArgs::new(tensor(0)?, tensor(1)?, tensor(2)?, TensorMut::host(&mut o, dense(problem.o_shape()))?);
        args.lse(TensorMut::host(&mut lse, dense(problem.lse_shape()))?)
    };
    let args = if per_block {
        let factors = |i: usize| TensorRef::host(&operands.descale[i], dense([shapes[i].1[1], shapes[i].1[2]]));
        args.descale_packed(factors(0)?, factors(1)?, factors(2)?)
    } else {
        let factors = |i: usize| TensorRef::host(&operands.descale[i], dense(shapes[i].1));
        args.descale(factors(0)?, factors(1)?, factors(2)?)
    };
    plan.run(&Stream::Cpu, &mut no_workspace(), args)?;
    Ok((o, lse))
}

fn problem(scaling: Scaling, fill: bool) -> ForwardProblem {
    let options = ForwardProblem::builder(DType::E4M3, DIMS).packed(true).scaling(scaling).fill_gaps(fill);
    options.mask(Mask::causal()).lse(true).build().unwrap()
}

fn sequences(problem: &ForwardProblem) -> Vec<SequenceRows> {
    let lengths = Lengths { cu_seqlens_q: Some(&CUTS), cu_seqlens_kv: Some(&CUTS), ..Lengths::default() };
    lengths.sequences(problem).map(|[q, _]| q).collect()
}

fn alone(problem: &ForwardProblem, len: usize) -> ForwardProblem {
    let dims = DIMS.with_batch(1).with_seqlen_q(len).with_seqlen_kv(len);
    let options = ForwardProblem::builder(DType::E4M3, dims).scaling(problem.scaling().unwrap());
    options.mask(problem.mask()).lse(true).build().unwrap()
}

/// The rows of a sequence.
fn rows_of<T: Clone>(data: &[T], heads: usize, rows: &SequenceRows) -> Vec<T> {
    let row = heads * DIMS.head_dim_qk;
    data[rows.begin * row..(rows.begin + rows.len) * row].to_vec()
}

/// The index of a sequence's factors, `[heads, blocks]`, in the list of all factors.
fn factors_of(problem: &ForwardProblem, which: usize, rows: &SequenceRows) -> Vec<usize> {
    let [_, heads, blocks] = shapes(problem)[which].1;
    let tokens = || (0..rows.len).step_by(128);
    match problem.scaling().unwrap() {
        Scaling::PerTensor => vec![0],
        Scaling::PerHead => (0..heads).map(|head| rows.sequence * heads + head).collect(),
        _ => {
            let first = (rows.begin + 127 * rows.sequence) / 128;
            (0..heads).flat_map(|head| tokens().map(move |token| head * blocks + first + token / 128)).collect()
        }
    }
}

/// Values with NaN in all rows of no sequence, which must reach nobody.
fn inputs() -> [Vec<bf16>; 3] {
    [(1, 4), (2, 2), (3, 2)].map(|(seed, heads)| {
        let mut data = values::<bf16>(ROWS * heads * 16, seed);
        for (row, values) in data.chunks_exact_mut(heads * 16).enumerate() {
            // Blocks differ in size, so that factors do.
            values.iter_mut().for_each(|x| *x = bf16::from_f32(x.to_f32() * (1 + row / 50) as f32));
            if row < CUTS[0] as usize || row >= CUTS[4] as usize {
                values.fill(bf16::NAN);
            }
        }
        data
    })
}

#[test]
fn each_sequence_is_quantised_and_computed_by_itself() {
    let inputs = inputs();
    for (scaling, fill, hadamard) in Scaling::ALL.into_iter().flat_map(|s| [(s, false, true), (s, true, false)]) {
        let problem = problem(scaling, fill);
        let operands = quantise(&problem, hadamard, &inputs, None).unwrap();
        let (o, lse) = attention(&problem, &operands).unwrap();
        assert_eq!(operands.counts, [0.0; 6], "what belongs to no sequence is not counted");
        let mut used = operands.descale.each_ref().map(|factors| vec![false; factors.len()]);
        for rows in sequences(&problem) {
            let alone = alone(&problem, rows.len);
            let values = [(0, 4), (1, 2), (2, 2)].map(|(i, heads)| rows_of(&inputs[i], heads, &rows));
            let factors = [0, 1, 2].map(|i| {
                let places = factors_of(&problem, i, &rows);
                places.iter().for_each(|&place| used[i][place] = true);
                places.iter().map(|&place| operands.descale[i][place]).collect::<Vec<_>>()
            });
            // One factor of the tensor is that of all sequences.
            let given = (scaling == Scaling::PerTensor).then_some(&factors);
            let want = quantise(&alone, hadamard, &values, given).unwrap();
            let stored = [(0, 4), (1, 2), (2, 2)].map(|(i, heads)| rows_of(&operands.stored[i], heads, &rows));
            assert_eq!((&stored, &factors), (&want.stored, &want.descale), "{problem}: {rows:?}");
            let (want_o, want_lse) = attention(&alone, &want).unwrap();
            assert_eq!(rows_of(&o, 4, &rows), want_o, "{problem}: {rows:?}");
            let lse: Vec<f32> = (0..4).flat_map(|head| lse[head * ROWS + rows.begin..][..rows.len].to_vec()).collect();
            assert_eq!(lse, want_lse, "{problem}: {rows:?}");
        }
        // Factors of no sequence are those of zeros, or not written.
        let unused = if fill { f32::MIN_POSITIVE } else { -1.0 };
        for (factors, used) in operands.descale.iter().zip(&used) {
            assert!(
                factors.iter().zip(used).all(|(&factor, used)| *used || factor == unused),
                "{problem}: {factors:?}"
            );
        }
        let (gap, o_gap) = if fill { (0, 0.0) } else { (UNWRITTEN, -1024.0) };
        for row in (0..CUTS[0] as usize).chain(CUTS[4] as usize..ROWS) {
            assert!(operands.stored[0][row * 64..(row + 1) * 64].iter().all(|&x| x == gap), "{problem}: row {row}");
            assert!(o[row * 64..(row + 1) * 64].iter().all(|x| x.to_f32() == o_gap), "{problem}: row {row}");
        }
    }
}

#[test]
fn factors_of_no_sequence_are_not_read() {
    let problem = problem(Scaling::PerBlock, false);
    let mut operands = quantise(&problem, false, &inputs(), None).unwrap();
    let want = attention(&problem, &operands).unwrap();
    // -1 is no factor. Those of sequences were made above.
    assert!(operands.descale[1].contains(&-1.0));
    let rows = sequences(&problem)[2];
    let own = factors_of(&problem, 1, &rows)[1];
    let before = std::mem::replace(&mut operands.descale[1][own], f32::NAN);
    let error = attention(&problem, &operands).unwrap_err().to_string();
    assert!(error.starts_with("descale_k: NaN at [0, 0, "), "{error}");
    operands.descale[1][own] = before;
    assert_eq!(attention(&problem, &operands).unwrap(), want);
    let error = quantise(&problem, false, &inputs(), Some(&operands.descale.clone().map(|_| vec![-1.0; 12])));
    assert!(error.is_err());
}

#[test]
fn a_quantiser_asks_for_the_sequences_of_what_it_quantises() {
    let problem = problem(Scaling::PerHead, false);
    let plan = Quantizer::builder(&problem, DType::BF16).build().unwrap().plan(&Device::cpu()).unwrap();
    let (values, offsets) = (&inputs()[1], offsets());
    let run = |with_kv: bool, with_q: bool| {
        let mut stored = vec![E4M3::from_bits(UNWRITTEN); values.len()];
        let mut descale = [-1.0; 8];
        let args = QuantizeArgs::new().k(
            TensorRef::host(values, dense([ROWS, 2, 16])).unwrap(),
            TensorMut::host(&mut stored, dense([ROWS, 2, 16])).unwrap(),
            Descale::FromAmax(TensorMut::host(&mut descale, dense([4, 2, 1])).unwrap()),
        );
        let args = if with_kv { args.cu_seqlens_kv(&offsets) } else { args };
        plan.run(&Stream::Cpu, &mut no_workspace(), if with_q { args.cu_seqlens_q(&offsets) } else { args })
    };
    assert_eq!((run(true, false), run(true, true)), (Ok(()), Ok(())));
    let error = run(false, true).unwrap_err().to_string();
    assert_eq!(error, "cu_seqlens_kv: missing; allowed: the sequences of k.values");
}
