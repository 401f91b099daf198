//! A stream of a green context, which has a part of the multiprocessors: CTAs that wait for each other must all fit there.

use std::ptr::null_mut;

use hopper_attention::cudarc::driver::{DevicePtr, DevicePtrMut, sys};
use hopper_attention::raw::{Place, RawArgs, RawTensor};
use hopper_attention::{DType, Device, Dims, E4M3, Error, ForwardProblem, Layout, Quantizer, Scaling, Slot, bf16};
use hopper_attention_tests::gpu::Gpu;
use hopper_attention_tests::say;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Multiprocessors of the green context.
const FEW: u32 = 8;

/// A green context and a stream of it.
struct Green {
    context: sys::CUgreenCtx,
    stream: sys::CUstream,
}

impl Green {
    /// None where the driver or the GPU has no such contexts.
    fn new(ordinal: i32) -> Option<Self> {
        // SAFETY: plain data, for which zeros are a value.
        let [mut whole, mut part]: [sys::CUdevResource; 2] = unsafe { std::mem::zeroed() };
        let (mut description, mut groups) = (null_mut(), 1);
        let mut green = Self { context: null_mut(), stream: null_mut() };
        let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        let default_stream = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
        // SAFETY: places for the results, and handles that the calls before have made.
        let made = unsafe {
            sys::cuDeviceGetDevResource(ordinal, &raw mut whole, kind)
                .result()
                .and_then(|()| {
                    let of = &raw const whole;
                    sys::cuDevSmResourceSplitByCount(&raw mut part, &raw mut groups, of, null_mut(), 0, FEW).result()
                })
                .and_then(|()| sys::cuDevResourceGenerateDesc(&raw mut description, &raw mut part, 1).result())
                .and_then(|()| {
                    sys::cuGreenCtxCreate(&raw mut green.context, description, ordinal, default_stream).result()
                })
                .and_then(|()| sys::cuGreenCtxStreamCreate(&raw mut green.stream, green.context, 1, 0).result())
        };
        match made {
            Ok(()) => Some(green),
            Err(error) => {
                say(&format!("skipped: no green context: {error}"));
                None
            }
        }
    }
}

impl Drop for Green {
    fn drop(&mut self) {
        // SAFETY: made above, and dropped once. A null handle is an error of the driver, which is ignored.
        unsafe {
            let _ = sys::cuStreamDestroy_v2(self.stream);
            let _ = sys::cuGreenCtxDestroy(self.context);
        }
    }
}

/// Launched and captured, with more tiles to a factor than the part of the GPU can hold at a time, and with fewer: the same bytes as
/// on the whole GPU.
#[test]
fn a_quantiser_fits_a_part_of_the_gpu() {
    let Some(gpu) = Gpu::open("a_quantiser_fits_a_part_of_the_gpu") else { return };
    // SAFETY: everything of this context object is waited for before another stream takes it.
    unsafe { gpu.device.context().disable_event_tracking() };
    let Some(green) = Green::new(0) else { return };
    for (seqlen, hadamard) in [(300, None), (1500, Some(3)), (5000, None), (20_000, Some(5))] {
        let dims = Dims::new(1, seqlen, 4, 128);
        let problem = ForwardProblem::builder(DType::E4M3, dims).scaling(Scaling::PerTensor).build().unwrap();
        let options = Quantizer::builder(&problem, DType::BF16);
        let options = hadamard.map_or(options.clone(), |seed| options.hadamard(seed));
        let plan = options.build().unwrap().plan(&Device::Cuda(gpu.device.clone())).unwrap();
        let mut rng = StdRng::seed_from_u64(seqlen as u64);
        let count: usize = problem.q_shape().iter().product();
        let values: Vec<bf16> = (0..count).map(|_| bf16::from_f32(rng.random_range(-9.0..9.0))).collect();
        let values = gpu.stream.clone_htod(&values).unwrap();
        let mut stored = gpu.stream.alloc_zeros::<E4M3>(count).unwrap();
        let mut descale = gpu.stream.alloc_zeros::<f32>(1).unwrap();
        let mut workspace = gpu.stream.alloc_zeros::<u8>(plan.workspace_bytes()).unwrap();
        let tensor = |address, dtype| {
            RawTensor::new(address, dtype, Place::Cuda(0), Layout::contiguous(problem.q_shape()).unwrap())
        };
        let factor = RawTensor::new(
            descale.device_ptr_mut(&gpu.stream).0,
            DType::F32,
            Place::Cuda(0),
            Layout::contiguous(problem.descale_q_shape()).unwrap(),
        );
        let args = RawArgs::new()
            .with(Slot::QValues, tensor(values.device_ptr(&gpu.stream).0, DType::BF16))
            .with(Slot::QStored, tensor(stored.device_ptr_mut(&gpu.stream).0, DType::E4M3))
            .with(Slot::QDescale, factor)
            .with_workspace(workspace.device_ptr_mut(&gpu.stream).0, plan.workspace_bytes());
        gpu.device.context().synchronize().unwrap();

        let take = |stored: &mut _, descale: &mut _| {
            let bytes: Vec<u8> = gpu.stream.clone_dtoh(stored).unwrap().iter().map(|x: &E4M3| x.to_bits()).collect();
            let factor: Vec<f32> = gpu.stream.clone_dtoh(descale).unwrap();
            gpu.stream.memset_zeros(stored).unwrap();
            gpu.stream.memset_zeros(descale).unwrap();
            gpu.device.context().synchronize().unwrap();
            (bytes, factor)
        };
        // SAFETY: the tensors are alive, and what is enqueued is waited for before they are taken.
        unsafe { plan.run_raw(&args, gpu.stream.cu_stream().cast()) }.unwrap();
        let whole = take(&mut stored, &mut descale);
        assert!(whole.0.iter().any(|&byte| byte != 0), "{plan}: nothing was written");

        // SAFETY: as above.
        match unsafe { plan.run_raw(&args, green.stream.cast()) } {
            // Newer drivers name a context of its own for such a stream, which is not the plan's.
            Err(Error::Device { what: "stream", .. }) => {
                say(
                    "skipped: this driver's streams of a part of the GPU are refused (a_quantiser_fits_a_part_of_the_gpu)",
                );
                return;
            }
            ran => ran.unwrap(),
        }
        // SAFETY: a live stream.
        unsafe { sys::cuStreamSynchronize(green.stream) }.result().unwrap();
        assert!(take(&mut stored, &mut descale) == whole, "{plan}: other bytes on a part of the GPU");

        let (mut graph, mut ready) = (null_mut(), null_mut());
        // SAFETY: a live stream, places for the handles, and tensors as above.
        unsafe {
            sys::cuStreamBeginCapture_v2(green.stream, hopper_attention_tests::gpu::MODE).result().unwrap();
            let ran = plan.run_raw(&args, green.stream.cast());
            let captured = sys::cuStreamEndCapture(green.stream, &raw mut graph).result();
            ran.unwrap();
            captured.unwrap_or_else(|error| panic!("{plan}: the capture was spoilt: {error}"));
            sys::cuGraphInstantiateWithFlags(&raw mut ready, graph, 0).result().unwrap();
            sys::cuGraphLaunch(ready, green.stream).result().unwrap();
            sys::cuStreamSynchronize(green.stream).result().unwrap();
            sys::cuGraphExecDestroy(ready).result().unwrap();
            sys::cuGraphDestroy(graph).result().unwrap();
        }
        assert!(take(&mut stored, &mut descale) == whole, "{plan}: other bytes of a replay on a part of the GPU");
    }
}
