//! FP8 through the C ABI on a GPU: quantised and attended to on one stream, with the bits that Rust gives.

use std::ffi::c_void;

use hopper_attention::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use hopper_attention::reference::Tensor;
use hopper_attention::{DType, Device, E4M3, Element, Layout, Mask, Quantizer, Scaling, Workspace, bf16};
use hopper_attention_capi::{HATTN_ERROR_LAYOUT, HATTN_ERROR_UNSUPPORTED, HATTN_ERROR_WORKSPACE, hattn_tensor};
use hopper_attention_tests::allocations::counted;
use hopper_attention_tests::c::{Fp8Memory, Memory, Plan, QuantizeMemory, problem, quantize_problem, tensor};
use hopper_attention_tests::fp8::Operands;
use hopper_attention_tests::gpu::Gpu;
use hopper_attention_tests::gpu::fp8::OnDevice;
use hopper_attention_tests::problems::Case;

/// A tensor at the beginning of a slice. What wrote the slice is ordered before what uses the stream.
fn read<T: Element, const R: usize>(gpu: &Gpu, slice: &CudaSlice<T>, shape: [usize; R]) -> hattn_tensor {
    tensor(slice.device_ptr(&gpu.stream).0, T::DTYPE, 0, Layout::contiguous(shape).unwrap())
}

fn written<T: Element, const R: usize>(gpu: &Gpu, slice: &mut CudaSlice<T>, shape: [usize; R]) -> hattn_tensor {
    tensor(slice.device_ptr_mut(&gpu.stream).0, T::DTYPE, 0, Layout::contiguous(shape).unwrap())
}

#[test]
fn c_quantises_and_attends_as_rust_does() {
    let Some(gpu) = Gpu::open("c_quantises_and_attends_as_rust_does") else { return };
    let stream: *mut c_void = gpu.stream.cu_stream().cast();
    for (scaling, output) in Scaling::ALL.into_iter().zip([DType::BF16, DType::F16, DType::E4M3]) {
        let (qk, vo) = if output == DType::F16 { (192, 128) } else { (112, 112) };
        let case = Case::new(300, 517, qk, Mask::causal()).head_dim_vo(vo).heads(2, 4, 2);
        let options = case.options(DType::E4M3).lse(true).scaling(scaling).output(output).amax(true);
        let given = options.half_scores(scaling == Scaling::PerHead).build().unwrap();
        let shapes = [given.q_shape(), given.k_shape(), given.v_shape()];
        let of_factors = [given.descale_q_shape(), given.descale_k_shape(), given.descale_v_shape()];
        let inputs = [0, 1, 2].map(|i| {
            Tensor::from_fn(shapes[i], |[b, s, h, d]| ((b * 31 + s * 7 + h * 13 + d * 3 + i) % 29) as f64 / 7.0 - 2.0)
        });
        let expected = Operands::quantised(&given, inputs.each_ref(), Some(3));
        let quantizer = Quantizer::builder(&given, DType::BF16).hadamard(3).build().unwrap();

        let forward = problem(&given);
        let quantise = Plan::new(&quantize_problem(&quantizer, &forward), 0).unwrap();
        assert!(quantise.describe().contains("sm90 quantise bf16 to e4m3, workspace"), "{}", quantise.describe());
        let plan = Plan::new(&forward, 0).unwrap();
        let values = inputs.each_ref().map(|x| {
            let values: Vec<bf16> = x.data().iter().map(|&x| bf16::from_f64(x)).collect();
            gpu.stream.clone_htod(&values).unwrap()
        });
        let mut stored = inputs.each_ref().map(|x| gpu.stream.alloc_zeros::<E4M3>(x.data().len()).unwrap());
        let mut descale = of_factors.map(|shape| gpu.stream.alloc_zeros::<f32>(shape.iter().product()).unwrap());
        let mut counts = gpu.stream.clone_htod(&[f32::NAN; 6]).unwrap();
        let (quantise_bytes, bytes) = (quantise.workspace_bytes(), plan.workspace_bytes());
        let mut scratch = gpu.stream.alloc_zeros::<u8>(quantise_bytes.max(bytes).max(16)).unwrap();
        let workspace = scratch.device_ptr_mut(&gpu.stream).0;
        let mut memory =
            QuantizeMemory { tensors: [None; 3], counts: None, workspace, workspace_bytes: quantise_bytes };
        for i in 0..3 {
            let one = [
                read(&gpu, &values[i], shapes[i]),
                written(&gpu, &mut stored[i], shapes[i]),
                written(&gpu, &mut descale[i], of_factors[i]),
            ];
            memory.tensors[i] = Some((one, false));
        }
        memory.counts = Some(written(&gpu, &mut counts, [3, 2]));

        let elements: usize = given.o_shape().iter().product();
        let mut o = gpu.stream.alloc_zeros::<u8>(elements * output.bytes()).unwrap();
        let mut lse = gpu.stream.alloc_zeros::<f32>(given.lse_shape().iter().product()).unwrap();
        let mut amax = gpu.stream.alloc_zeros::<f32>(1).unwrap();
        let scale_o = gpu.stream.clone_htod(&[40.0f32]).unwrap();
        let o_address = o.device_ptr_mut(&gpu.stream).0;
        let attend = Memory {
            q: read(&gpu, &stored[0], shapes[0]),
            k: read(&gpu, &stored[1], shapes[1]),
            v: read(&gpu, &stored[2], shapes[2]),
            o: tensor(o_address, output, 0, Layout::contiguous(given.o_shape()).unwrap()),
            lse: Some(written(&gpu, &mut lse, given.lse_shape())),
            sinks: None,
            alibi_slopes: None,
            max_logits: None,
            bias: None,
            blocks: None,
            dropout_state: None,
            workspace,
            workspace_bytes: bytes,
        };
        let fp8 = Fp8Memory {
            descale: [0, 1, 2].map(|i| read(&gpu, &descale[i], of_factors[i])),
            scale_o: given.takes_scale_o().then(|| read(&gpu, &scale_o, [1])),
            amax: Some(written(&gpu, &mut amax, [1])),
        };
        // SAFETY: the memory is that of the slices above, which outlive the work; it is waited for below.
        let (ran, calls) = counted(|| unsafe {
            quantise.run(&memory, stream)?;
            plan.run_fp8(&attend, &fp8, stream)
        });
        ran.unwrap();
        assert_eq!(calls, 0, "{given}: a run through C called the allocator");
        gpu.stream.synchronize().unwrap();

        for i in 0..3 {
            let got = gpu.stream.clone_dtoh(&stored[i]).unwrap();
            let same = got.iter().zip(&expected.stored()[i]).all(|(got, want)| got.to_bits() == want.to_bits());
            assert!(same, "{quantizer}: operand {i}");
            assert_eq!(gpu.stream.clone_dtoh(&descale[i]).unwrap(), expected.descale()[i], "{quantizer}: factors {i}");
        }
        assert_eq!(gpu.stream.clone_dtoh(&counts).unwrap(), [0.0; 6]);
        let device = Device::Cuda(gpu.device.clone());
        let rust = given.plan(&device).unwrap();
        let mut workspace = Workspace::alloc(&gpu.lane(), rust.workspace_bytes()).unwrap();
        let on_device = OnDevice::new(&gpu.stream, &expected);
        let o = gpu.stream.clone_dtoh(&o).unwrap();
        let (want, want_lse, want_amax) = match output {
            DType::BF16 => bits(on_device.run::<bf16>(&gpu.stream, &mut workspace, &rust, None).unwrap(), |o| {
                o.to_bits().to_le_bytes().to_vec()
            }),
            DType::F16 => {
                bits(on_device.run::<hopper_attention::f16>(&gpu.stream, &mut workspace, &rust, None).unwrap(), |o| {
                    o.to_bits().to_le_bytes().to_vec()
                })
            }
            _ => bits(on_device.run::<E4M3>(&gpu.stream, &mut workspace, &rust, Some(40.0)).unwrap(), |o| {
                vec![o.to_bits()]
            }),
        };
        assert!(o == want && gpu.stream.clone_dtoh(&lse).unwrap() == want_lse, "{given}");
        assert_eq!(gpu.stream.clone_dtoh(&amax).unwrap()[0], want_amax, "{given}");

        // What only a GPU refuses.
        let short = QuantizeMemory { workspace_bytes: quantise_bytes - 1, ..memory };
        // SAFETY: refused before any address is used.
        let (status, text) = unsafe { quantise.run(&short, stream) }.unwrap_err();
        assert_eq!(status, HATTN_ERROR_WORKSPACE, "{text}");
        let mut askew = memory;
        if let Some((one, _)) = &mut askew.tensors[0] {
            one[0].data = one[0].data.wrapping_byte_add(2);
        }
        // SAFETY: as above.
        let (status, text) = unsafe { quantise.run(&askew, stream) }.unwrap_err();
        assert!(status == HATTN_ERROR_LAYOUT && text.starts_with("q.values: address"), "{text}");
    }
    let odd = Case::new(30, 51, 24, Mask::Full).problem(DType::E4M3);
    let quantizer = Quantizer::builder(&odd, DType::BF16).build().unwrap();
    let (status, text) = Plan::new(&quantize_problem(&quantizer, &problem(&odd)), 0).err().unwrap();
    assert!(status == HATTN_ERROR_UNSUPPORTED && text.contains("head_dim 24"), "{text}");
}

/// What a run through Rust wrote, as bytes of O.
fn bits<O: Copy>(
    written: hopper_attention_tests::gpu::fp8::Written<O>,
    bytes: impl Fn(O) -> Vec<u8>,
) -> (Vec<u8>, Vec<f32>, f32) {
    (written.o.iter().flat_map(|&o| bytes(o)).collect(), written.lse, written.amax.expect("asked for"))
}
