//! FP8 through the C ABI on the CPU: the bits that Rust gives, of the quantiser as of the forward pass.

use std::collections::BTreeSet;
use std::ptr::null_mut;

use hopper_attention::raw::{Place, RawArgs, RawTensor};
use hopper_attention::reference::Tensor;
use hopper_attention::{
    DType, Device, Dims, E4M3, Element, ForwardProblem, Layout, Mask, Quantizer, Scaling, Slot, bf16,
};
use hopper_attention_capi::{
    HATTN_CPU, HATTN_ERROR_ARGUMENT, HATTN_ERROR_SHAPE, HATTN_ERROR_VALUE, hattn_forward_problem, hattn_tensor,
};
use hopper_attention_tests::allocations::{Counting, counted};
use hopper_attention_tests::blocks::{Blocks, BlocksImage};
use hopper_attention_tests::c::host::lengths;
use hopper_attention_tests::c::{
    BlocksMemory, Fp8Memory, LengthsMemory, Memory, Plan, QuantizeMemory, problem, quantize_problem, tensor,
    without_batch,
};
use hopper_attention_tests::fp8::{Operands, shapes};
use hopper_attention_tests::packed;
use hopper_attention_tests::packing::Packing;
use hopper_attention_tests::problems::{Case, Grid};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Of a tensor in host memory.
fn host<T: Element, const R: usize>(data: &[T], shape: [usize; R]) -> hattn_tensor {
    tensor(data.as_ptr() as u64, T::DTYPE, HATTN_CPU, Layout::contiguous(shape).unwrap())
}

/// The same of memory that is written.
fn host_mut<T: Element, const R: usize>(data: &mut [T], shape: [usize; R]) -> hattn_tensor {
    tensor(data.as_mut_ptr() as u64, T::DTYPE, HATTN_CPU, Layout::contiguous(shape).unwrap())
}

#[test]
fn c_gives_the_bits_of_rust() {
    for (scaling, hadamard) in
        [(Scaling::PerTensor, None), (Scaling::PerHead, Some(5)), (Scaling::PerBlock, Some(u64::MAX))]
    {
        for (head_dim_qk, head_dim_vo) in [(48, 48), (192, 128), (264, 512)] {
            let mut case = Case::new(150, 131, head_dim_qk, Mask::causal()).heads(2, 4, 2);
            case.dims.head_dim_vo = head_dim_vo;
            let options = case.options(DType::E4M3).lse(true).scaling(scaling);
            same_bits(&options.clone().half_scores(true).build().unwrap(), hadamard, None);
            same_bits(&options.build().unwrap(), hadamard, None);
            let listed = case.blocks(Blocks::Random(60));
            let problem = listed.options(DType::E4M3).lse(true).scaling(scaling).build().unwrap();
            same_bits(&problem, hadamard, listed.block_lists());
        }
    }
}

fn same_bits(given: &ForwardProblem, hadamard: Option<u64>, lists: Option<BlocksImage>) {
    let shapes = [given.q_shape(), given.k_shape(), given.v_shape()];
    let of_factors = [given.descale_q_shape(), given.descale_k_shape(), given.descale_v_shape()];
    let inputs = [0, 1, 2].map(|i| {
        Tensor::from_fn(shapes[i], |[b, s, h, d]| ((b * 31 + s * 7 + h * 13 + d * 3 + i) % 29) as f64 / 7.0 - 2.0)
    });
    let expected = Operands::quantised(given, inputs.each_ref(), hadamard).with_blocks(lists.clone());

    let values = inputs.each_ref().map(|x| x.data().iter().map(|&x| bf16::from_f64(x)).collect::<Vec<_>>());
    let mut stored = inputs.each_ref().map(|x| vec![E4M3::from_bits(0x55); x.data().len()]);
    let mut descale = of_factors.map(|shape| vec![f32::NAN; shape.iter().product()]);
    let mut counts = [f32::NAN; 6];
    let options = Quantizer::builder(given, DType::BF16);
    let quantizer = hadamard.map_or(options.clone(), |seed| options.hadamard(seed)).build().unwrap();
    let forward = problem(given);
    let quantise = Plan::new(&quantize_problem(&quantizer, &forward), HATTN_CPU).unwrap();
    assert_eq!((quantise.describe(), quantise.workspace_bytes()), (format!("{quantizer}: cpu, workspace 0 bytes"), 0));
    let mut memory = QuantizeMemory { tensors: [None; 3], counts: None, workspace: 0, workspace_bytes: 0 };
    for i in 0..3 {
        let one = [
            host(&values[i], shapes[i]),
            host_mut(&mut stored[i], shapes[i]),
            host_mut(&mut descale[i], of_factors[i]),
        ];
        memory.tensors[i] = Some((one, false));
    }
    memory.counts = Some(host_mut(&mut counts, [3, 2]));
    // SAFETY: the memory is that of the vectors above, which nothing else uses meanwhile.
    unsafe { quantise.run(&memory, null_mut()) }.unwrap();
    assert_eq!(counts, [0.0; 6]);
    for (i, (stored, want)) in stored.iter().zip(expected.stored()).enumerate() {
        assert!(stored.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()), "{quantizer}: operand {i}");
    }
    assert_eq!(&descale, expected.descale(), "{quantizer}");

    let plan = Plan::new(&forward, HATTN_CPU).unwrap();
    let mut o = vec![bf16::from_f32(f32::NAN); given.o_shape().iter().product()];
    let mut lse = vec![f32::NAN; given.lse_shape().iter().product()];
    let memory = Memory {
        q: host(&stored[0], shapes[0]),
        k: host(&stored[1], shapes[1]),
        v: host(&stored[2], shapes[2]),
        o: host_mut(&mut o, given.o_shape()),
        lse: Some(host_mut(&mut lse, given.lse_shape())),
        sinks: None,
        alibi_slopes: None,
        max_logits: None,
        bias: None,
        blocks: lists
            .as_ref()
            .map(|lists| BlocksMemory::new(lists, HATTN_CPU, |slot| lists.inner(slot).as_ptr() as u64)),
        dropout_state: None,
        workspace: 0,
        workspace_bytes: 0,
    };
    let fp8 = Fp8Memory { descale: [0, 1, 2].map(|i| host(&descale[i], of_factors[i])), scale_o: None, amax: None };
    // SAFETY: as above.
    unsafe { plan.run_fp8(&memory, &fp8, null_mut()) }.unwrap();
    let (want_o, want_lse) = expected.run();
    assert_eq!(o.iter().map(|&o| f64::from(o.to_f32())).collect::<Vec<_>>(), want_o.data(), "{given}");
    assert_eq!(lse.iter().map(|&lse| f64::from(lse)).collect::<Vec<_>>(), want_lse, "{given}");

    // Without its factors it is refused, and so are factors that were not asked for.
    // SAFETY: refused before any address is used.
    let (status, text) = unsafe { plan.run(&memory, null_mut()) }.unwrap_err();
    assert!(status == HATTN_ERROR_ARGUMENT && text.starts_with("descale_q: a null pointer"), "{text}");
    let surplus = Fp8Memory { amax: Some(fp8.descale[0]), ..fp8 };
    // SAFETY: as above.
    let (status, text) = unsafe { plan.run_fp8(&memory, &surplus, null_mut()) }.unwrap_err();
    assert!(status == HATTN_ERROR_ARGUMENT && text.starts_with("amax: ndim 3"), "{text}");
    let mut one = [0.0];
    let surplus = Fp8Memory { amax: Some(host_mut(&mut one, [1])), ..fp8 };
    // SAFETY: as above.
    let (status, text) = unsafe { plan.run_fp8(&memory, &surplus, null_mut()) }.unwrap_err();
    assert!(status == HATTN_ERROR_VALUE && text.starts_with("amax: given"), "{text}");
}

/// The CPU's computation allocates, so a run through C is held to the same run of the raw layer.
#[test]
fn the_way_through_c_allocates_nothing() {
    assert_ne!(counted(|| Box::new(1)).1, 0, "allocations are not counted");
    let given = ForwardProblem::builder(DType::E4M3, Dims::new(1, 8, 2, 16)).build().unwrap();
    let quantizer = Quantizer::builder(&given, DType::BF16).build().unwrap();
    let (shape, of_factors) = (given.q_shape(), given.descale_q_shape());
    let values = vec![bf16::from_f32(1.0); shape.iter().product()];
    let mut stored = [(); 3].map(|()| vec![E4M3::from_bits(0); values.len()]);
    let mut descale = [[0.0f32]; 3];
    let mut counts = [0.0f32; 6];
    let mut tensors = [None; 3];
    let mut args = RawArgs::new();
    let raw = |address, dtype, layout: Layout<4>| RawTensor::new(address, dtype, Place::Cpu, layout);
    let slots = [
        [Slot::QValues, Slot::QStored, Slot::QDescale],
        [Slot::KValues, Slot::KStored, Slot::KDescale],
        [Slot::VValues, Slot::VStored, Slot::VDescale],
    ];
    let layout = Layout::contiguous(shape).unwrap();
    for (i, [of_values, of_stored, of_descale]) in slots.into_iter().enumerate() {
        let factors = Layout::contiguous(of_factors).unwrap();
        let factors = RawTensor::new(descale[i].as_mut_ptr() as u64, DType::F32, Place::Cpu, factors);
        args = args
            .with(of_values, raw(values.as_ptr() as u64, DType::BF16, layout))
            .with(of_stored, raw(stored[i].as_mut_ptr() as u64, DType::E4M3, layout))
            .with(of_descale, factors);
        let written = [host_mut(&mut stored[i], shape), host_mut(&mut descale[i], of_factors)];
        tensors[i] = Some(([host(&values, shape), written[0], written[1]], false));
    }
    let of_counts = Layout::contiguous([3, 2]).unwrap();
    args = args.with(Slot::Counts, RawTensor::new(counts.as_mut_ptr() as u64, DType::F32, Place::Cpu, of_counts));
    let memory =
        QuantizeMemory { tensors, counts: Some(host_mut(&mut counts, [3, 2])), workspace: 0, workspace_bytes: 0 };

    let forward = problem(&given);
    let through_c = Plan::new(&quantize_problem(&quantizer, &forward), HATTN_CPU).unwrap();
    let plan = quantizer.plan(&Device::cpu()).unwrap();
    // The threads' queue allocates now and then, and the first runs start the threads. So the least counts decide.
    let mut least = [u64::MAX; 2];
    for _ in 0..6 {
        // SAFETY: the memory is that of the vectors above, which nothing else uses meanwhile.
        let (ran, of_raw) = counted(|| unsafe { plan.run_raw(&args, null_mut()) });
        ran.unwrap();
        // SAFETY: as above.
        let (ran, of_c) = counted(|| unsafe { through_c.run(&memory, null_mut()) });
        ran.unwrap();
        least = [least[0].min(of_raw), least[1].min(of_c)];
    }
    let [of_raw, of_c] = least;
    assert_eq!(of_c, of_raw, "calls of the allocator through C, and of the raw layer");
}

/// Of a tensor in host memory, whose shape has a batch of 1 where it is packed.
fn rows<T: Element, const R: usize>(data: &[T], shape: [usize; R], packed: bool) -> hattn_tensor {
    if packed { without_batch(host(data, shape)) } else { host(data, shape) }
}

/// The same of memory that is written.
fn rows_mut<T: Element, const R: usize>(data: &mut [T], shape: [usize; R], packed: bool) -> hattn_tensor {
    if packed { without_batch(host_mut(data, shape)) } else { host_mut(data, shape) }
}

/// What is in rows of no sequence before a run. The same as the safe crate's memory has here.
const UNWRITTEN: E4M3 = E4M3::from_bits(0x7f);

/// Packed tensors and used lengths with operands of e4m3, in host memory.
struct Packed {
    given: ForwardProblem,
    packing: Packing,
    quantizer: Quantizer,
    /// q, k and v. NaN in rows of no sequence.
    values: [Vec<bf16>; 3],
    /// What the safe crate makes of them.
    expected: Operands,
}

impl Packed {
    fn new(case: &Case, given: ForwardProblem, hadamard: Option<u64>) -> Self {
        let belonging = case.packing.belonging(&given).expect("a packed case");
        let inputs = [0, 1, 2].map(|i| {
            let (shape, _) = shapes(&given)[i];
            Tensor::from_fn(shape, |[b, s, h, d]| match belonging[i.min(1)].belongs(b * shape[1] + s) {
                true => ((b * 31 + s * 7 + h * 13 + d * 3 + i) % 29) as f64 / 7.0 - 2.0,
                false => f64::NAN,
            })
        });
        let values = inputs.each_ref().map(|x| x.data().iter().map(|&x| bf16::from_f64(x)).collect::<Vec<_>>());
        let expected = Operands::quantised_of(&given, &case.packing, inputs.each_ref(), hadamard);
        let options = Quantizer::builder(&given, DType::BF16);
        let quantizer = hadamard.map_or(options.clone(), |seed| options.hadamard(seed)).build().unwrap();
        Self { given, packing: case.packing.clone(), quantizer, values, expected }
    }

    /// Whether the rows, and the factors, of q, k and v are packed.
    fn are_packed(&self) -> [[bool; 2]; 3] {
        let per_block = self.given.scaling() == Some(Scaling::PerBlock);
        let of = |rows| [rows, rows && per_block];
        [of(self.given.is_packed_q()), of(self.given.is_packed_kv()), of(self.given.is_packed_kv())]
    }

    /// Stored elements and factors that were not written yet.
    fn unwritten(&self) -> Quantised {
        let all = shapes(&self.given);
        Quantised {
            stored: all.map(|(shape, _)| vec![UNWRITTEN; shape.iter().product()]),
            descale: all.map(|(_, factors)| vec![f32::NAN; factors.iter().product()]),
            counts: [f32::NAN; 6],
        }
    }

    fn memory(&self, to: &mut Quantised) -> QuantizeMemory {
        let mut memory = QuantizeMemory { tensors: [None; 3], counts: None, workspace: 0, workspace_bytes: 0 };
        for (i, [of_rows, of_factors]) in self.are_packed().into_iter().enumerate() {
            let (shape, factors) = shapes(&self.given)[i];
            let one = [
                rows(&self.values[i], shape, of_rows),
                rows_mut(&mut to.stored[i], shape, of_rows),
                rows_mut(&mut to.descale[i], factors, of_factors),
            ];
            memory.tensors[i] = Some((one, false));
        }
        memory.counts = Some(host_mut(&mut to.counts, [3, 2]));
        memory
    }

    fn plan(&self) -> Plan<hopper_attention_capi::hattn_quantize_problem> {
        let forward = problem(&self.given);
        Plan::new(&quantize_problem(&self.quantizer, &forward), HATTN_CPU).unwrap()
    }
}

/// What a quantiser writes.
struct Quantised {
    stored: [Vec<E4M3>; 3],
    descale: [Vec<f32>; 3],
    counts: [f32; 6],
}

impl Quantised {
    /// All bits.
    fn bits(&self) -> ([Vec<u8>; 3], [Vec<u32>; 3]) {
        (bytes(&self.stored), factor_bits(&self.descale))
    }
}

fn bytes(stored: &[Vec<E4M3>; 3]) -> [Vec<u8>; 3] {
    stored.each_ref().map(|one| one.iter().map(|x| x.to_bits()).collect())
}

fn factor_bits(descale: &[Vec<f32>; 3]) -> [Vec<u32>; 3] {
    descale.each_ref().map(|one| one.iter().map(|x| x.to_bits()).collect())
}

/// One case of each kind of lists, short enough for the oracle.
fn one_of_each_kind() -> Vec<Case> {
    let mut kinds = BTreeSet::new();
    let all = packed::cases(Grid::from_env()).into_iter();
    let work = |case: &Case| -> usize {
        case.packing.sequences(case.dims).unwrap().iter().map(|[q, kv]| q * kv * case.dims.heads_q).sum()
    };
    let is_new = |packing: &Packing, kinds: &mut BTreeSet<Vec<String>>| {
        let lists = packing.lists().map(|(slot, _)| slot.to_string());
        kinds.insert(lists.chain(packing.fill_gaps.then(|| "fill_gaps".into())).collect())
    };
    let cases: Vec<Case> =
        all.filter(|case| work(case) < 200_000).filter(|case| is_new(&case.packing, &mut kinds)).collect();
    assert_eq!(cases.len(), 8);
    cases
}

#[test]
fn packed_sequences_and_used_lengths_give_the_bits_of_rust() {
    for (turn, case) in one_of_each_kind().iter().enumerate() {
        for scaling in Scaling::ALL {
            let options = case.options(DType::E4M3).lse(true).max_logits(false).scaling(scaling);
            let given = options.half_scores(turn % 2 == 1).build().unwrap();
            packed_bits(&Packed::new(case, given, (turn % 3 == 1).then_some(7)));
        }
    }
}

/// Both passes through C: the quantiser, then the forward of what it made.
fn packed_bits(of: &Packed) {
    let Packed { given, packing, expected, .. } = of;
    let lists = lengths(packing);
    let mut to = of.unwritten();
    // SAFETY: the memory is that of live vectors, which nothing else uses meanwhile.
    unsafe { of.plan().run_packed(&of.memory(&mut to), &lists, null_mut()) }.unwrap();
    assert_eq!(to.counts, [0.0; 6], "{given}");
    assert!(bytes(&to.stored) == bytes(expected.stored()), "{given}: stored elements");
    assert_eq!(factor_bits(&to.descale), factor_bits(expected.descale()), "{given}");
    let belonging = packing.belonging(given).unwrap();
    for (i, (shape, _)) in shapes(given).into_iter().enumerate() {
        let filled = if packing.fill_gaps { 0 } else { UNWRITTEN.to_bits() };
        for (row, own) in to.stored[i].chunks(shape[2] * shape[3]).enumerate() {
            let is_filled = own.iter().all(|x| x.to_bits() == filled);
            assert!(belonging[i.min(1)].belongs(row) || is_filled, "{given}: row {row} of operand {i}");
        }
    }

    let packed = given.is_packed_q();
    let mut o = vec![bf16::from_f32(f32::NAN); given.o_shape().iter().product()];
    let mut lse = vec![f32::NAN; given.lse_shape().iter().product()];
    let mut amax = [f32::NAN];
    let [q, k, v] = [0, 1, 2].map(|i| rows(&to.stored[i], shapes(given)[i].0, of.are_packed()[i][0]));
    let memory = Memory {
        q,
        k,
        v,
        o: rows_mut(&mut o, given.o_shape(), packed),
        lse: Some(rows_mut(&mut lse, given.lse_shape(), packed)),
        sinks: None,
        alibi_slopes: None,
        max_logits: None,
        bias: None,
        blocks: None,
        dropout_state: None,
        workspace: 0,
        workspace_bytes: 0,
    };
    let descale = [0, 1, 2].map(|i| rows(&to.descale[i], shapes(given)[i].1, of.are_packed()[i][1]));
    let fp8 = Fp8Memory { descale, scale_o: None, amax: Some(host_mut(&mut amax, [1])) };
    let plan = Plan::new(&hattn_forward_problem { amax: 1, ..problem(given) }, HATTN_CPU).unwrap();
    // SAFETY: as above.
    unsafe { plan.run_packed_fp8(&memory, &fp8, &lists, null_mut()) }.unwrap();
    let (want_o, want_lse) = expected.run();
    let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let got_o = Tensor::from_strided(&o, &Layout::contiguous(given.o_shape()).unwrap());
    let got_lse: Vec<f64> = lse.iter().map(|&lse| f64::from(lse)).collect();
    assert!(bits(got_o.data()) == bits(want_o.data()), "{given}: o");
    assert!(bits(&got_lse) == bits(&want_lse), "{given}: lse");
    let report = expected.expected().check(&got_o, Some(&got_lse)).unwrap();
    assert!(report.passed(), "{given}: {report}");
    // NaN, as before the run, or 0.
    let of_row = given.o_shape()[2] * given.o_shape()[3];
    for (row, own) in o.chunks(of_row).enumerate().filter(|&(row, _)| !belonging[0].belongs(row)) {
        let is_right = |x: &bf16| if packing.fill_gaps { x.to_f32() == 0.0 } else { x.to_f32().is_nan() };
        assert!(own.iter().all(is_right), "{given}: row {row} of o");
    }
    // The largest magnitude is that of the rows of sequences, before rounding.
    let largest = got_o.data().iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
    assert!((f64::from(amax[0]) - largest).abs() <= largest / 256.0, "{given}: amax {amax:?} for {largest}");
}

/// Lists that a quantiser refuses, and what it says.
type Wrong = (fn(&mut Packing), &'static str);

#[test]
fn lengths_of_e4m3_are_refused_by_name_and_nothing_is_written() {
    let packing = Packing {
        cu_seqlens_q: Some(vec![1, 5, 5, 12]),
        cu_seqlens_kv: Some(vec![0, 3, 9, 14]),
        seqused_kv: Some(vec![3, 0, 4]),
        ..Packing::default()
    };
    let case = Case { packing, ..Case::new(13, 15, 16, Mask::causal()).heads(3, 4, 2) };
    let given = case.options(DType::E4M3).scaling(Scaling::PerBlock).build().unwrap();
    let of = Packed::new(&case, given, None);
    let plan = of.plan();
    let unwritten = of.unwritten().bits();
    let refused = |lists: &LengthsMemory, edit: &dyn Fn(&mut QuantizeMemory), status, text: &str| {
        let mut to = of.unwritten();
        let mut memory = of.memory(&mut to);
        edit(&mut memory);
        // SAFETY: live vectors, or refused before an address is used.
        let got = unsafe { plan.run_packed(&memory, lists, null_mut()) }.unwrap_err();
        assert!(got.0 == status && got.1.contains(text), "{got:?}, expected {status}: {text}");
        assert!(to.bits() == unwritten && to.counts.iter().all(|x| x.is_nan()), "{text}: something was written");
    };
    let wrong: [Wrong; 5] = [
        (|p| p.cu_seqlens_q = None, "cu_seqlens_q: missing"),
        (|p| p.seqused_kv = None, "seqused_kv: missing"),
        (|p| p.seqused_q = Some(vec![0, 0, 1]), "seqused_q: given"),
        (|p| p.cu_seqlens_kv = Some(vec![0, 9, 3, 14]), "cu_seqlens_kv: 3 at 2, after 9"),
        (|p| p.seqused_kv = Some(vec![3, 0, 6]), "seqused_kv: 6 at 2; allowed: 0 to 5"),
    ];
    for (edit, text) in wrong {
        let mut packing = case.packing.clone();
        edit(&mut packing);
        refused(&lengths(&packing), &|_| {}, HATTN_ERROR_VALUE, text);
    }
    // Packed factors per block have no batch: 13 rows of 3 sequences have up to 3 blocks in all, 15 rows as well.
    let right = lengths(&case.packing);
    let blocks = |memory: &mut QuantizeMemory| memory.tensors[0].as_mut().unwrap().0[2].shape[1] = 2;
    refused(&right, &blocks, HATTN_ERROR_SHAPE, "q.descale: shape [4, 2], expected [4, 3]");
    let dense = |memory: &mut QuantizeMemory| memory.tensors[1].as_mut().unwrap().0[1].ndim = 4;
    refused(&right, &dense, HATTN_ERROR_ARGUMENT, "k.stored: ndim 4; allowed: 3");
}
