//! FP8 through the C ABI on the CPU: the bits that Rust gives, of the quantiser as of the forward pass.

use std::ptr::null_mut;

use hopper_attention::raw::{Place, RawArgs, RawTensor};
use hopper_attention::reference::Tensor;
use hopper_attention::{
    DType, Device, Dims, E4M3, Element, ForwardProblem, Layout, Mask, Quantizer, Scaling, Slot, bf16,
};
use hopper_attention_capi::{HATTN_CPU, HATTN_ERROR_ARGUMENT, HATTN_ERROR_VALUE};
use hopper_attention_tests::allocations::{Counting, counted};
use hopper_attention_tests::blocks::{Blocks, BlocksImage};
use hopper_attention_tests::c::{
    BlocksMemory, Fp8Memory, Memory, Plan, QuantizeMemory, problem, quantize_problem, tensor,
};
use hopper_attention_tests::fp8::Operands;
use hopper_attention_tests::problems::Case;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Of a tensor in host memory.
fn host<T: Element, const R: usize>(data: &[T], shape: [usize; R]) -> hopper_attention_capi::hattn_tensor {
    tensor(data.as_ptr() as u64, T::DTYPE, HATTN_CPU, Layout::contiguous(shape).unwrap())
}

/// The same of memory that is written.
fn host_mut<T: Element, const R: usize>(data: &mut [T], shape: [usize; R]) -> hopper_attention_capi::hattn_tensor {
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
