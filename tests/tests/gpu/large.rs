//! Tensors that reach past 2^31 elements, where 32-bit offsets wrap.

use hopper_attention::cudarc::driver::{CudaSlice, DevicePtrMut, result};
use hopper_attention::reference::{Expected, Tensor};
use hopper_attention::{
    Dims, ForwardArgs, ForwardProblem, KernelInfo, Layout, Operand, TensorMut, TensorRef, Workspace,
};
use hopper_attention_tests::data::{Input, Poison, Values};
use hopper_attention_tests::gpu::Gpu;
use hopper_attention_tests::problems::Grid;
use rayon::prelude::*;

use crate::{mask_of, with_dtype};

/// Elements of each tensor's memory: past 2^31, with room for the last row.
const ELEMENTS: usize = (1 << 31) + (1 << 27);
/// Elements that are checked at a time.
const CHUNK: usize = 1 << 27;

/// Which dimension has the huge stride.
#[derive(Clone, Copy, Debug)]
enum Axis {
    Batch,
    Seqlen,
    Heads,
}

#[test]
fn offsets_past_2_31_elements() {
    let Some(gpu) = Gpu::open("offsets_past_2_31_elements") else { return };
    if Grid::from_env() == Grid::Small {
        // Minutes under a sanitizer.
        hopper_attention_tests::say("skipped: HATTN_TEST_GRID=small (offsets_past_2_31_elements)");
        return;
    }
    let (free, _) = gpu.device.context().mem_get_info().unwrap();
    let need = 4 * ELEMENTS * 2 + (1 << 30);
    if free < need {
        let required = std::env::var("HATTN_REQUIRE_GPU").is_ok_and(|value| value == "1");
        assert!(!required, "{free} bytes free, {need} needed");
        hopper_attention_tests::say("skipped: too little device memory (offsets_past_2_31_elements)");
        return;
    }
    // One row of each mask class: type and head dim make no difference to addresses.
    let mut seen = Vec::new();
    for row in gpu.rows() {
        if !seen.contains(&row.mask) {
            seen.push(row.mask);
            with_dtype!(row.dtype, large(&gpu, &row));
        }
    }
}

/// Memory of a tensor, every byte 0xff, which is a NaN in each of the 16-bit types.
fn memory<T: Poison>(gpu: &Gpu) -> CudaSlice<T> {
    // SAFETY: every element is written by the next call on the same stream.
    let mut slice = unsafe { gpu.stream.alloc::<T>(ELEMENTS) }.expect("device memory");
    let (address, _guard) = slice.device_ptr_mut(&gpu.stream);
    // SAFETY: the memory is ELEMENTS elements long and is being held for writing.
    unsafe { result::memset_d8_async(address, 0xff, ELEMENTS * size_of::<T>(), gpu.stream.cu_stream()) }
        .expect("a fill");
    drop(_guard);
    slice
}

fn layout(axis: Axis, shape: [usize; 4]) -> Layout<4> {
    let [batch, seqlen, heads, dim] = shape;
    let row = dim as i64;
    // The last index of the axis lies past 2^31.
    let huge = |size: usize| (((1_u64 << 31) / (size as u64 - 1)).next_multiple_of(8) + 64) as i64;
    let stride = match axis {
        Axis::Batch => [huge(batch), row * heads as i64, row, 1],
        Axis::Seqlen => [row * heads as i64, huge(seqlen), row, 1],
        Axis::Heads => [row * seqlen as i64, row, huge(heads), 1],
    };
    Layout::with_strides(shape, stride).unwrap()
}

fn large<T: Poison + Operand<Out = T>>(gpu: &Gpu, row: &KernelInfo) {
    let [mut q, mut k, mut v, mut o] = [(); 4].map(|()| memory::<T>(gpu));
    for axis in [Axis::Batch, Axis::Seqlen, Axis::Heads] {
        let dims = Dims {
            batch: 2,
            seqlen_q: 150,
            seqlen_kv: 170,
            heads_q: 4,
            heads_kv: 2,
            head_dim_qk: row.head_dim_qk,
            head_dim_vo: row.head_dim_vo,
        };
        let problem = ForwardProblem::new(T::DTYPE, dims).unwrap().mask(mask_of(row.mask)).lse(true);
        let plan = problem.plan_with_row(&gpu.device, row).unwrap();
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        let mut inputs = Vec::new();
        for (input, shape, slice) in [
            (Input::Q, problem.q_shape(), &mut q),
            (Input::K, problem.k_shape(), &mut k),
            (Input::V, problem.v_shape(), &mut v),
        ] {
            let values = Values::Normal.tensor(input, shape, 3);
            let rounded =
                Tensor::from_fn(shape, |[b, s, h, d]| f64::from(T::from_f32(values.row(b, s, h)[d] as f32).to_f32()));
            each_row(shape, |b, s, h| {
                let start = layout(axis, shape).offset([b, s, h, 0]).unwrap();
                let data: Vec<T> = rounded.row(b, s, h).iter().map(|&x| T::from_f32(x as f32)).collect();
                gpu.stream.memcpy_htod(&data, &mut slice.slice_mut(start..start + data.len())).unwrap();
            });
            inputs.push(rounded);
        }
        let o_layout = layout(axis, problem.o_shape());
        assert!(o_layout.span() > 1 << 31 && o_layout.span() <= ELEMENTS, "{o_layout:?}");
        let lse_layout = Layout::contiguous(problem.lse_shape()).unwrap();
        let mut lse = gpu.stream.clone_htod(&vec![f32::POISON; lse_layout.span()]).unwrap();
        let args = ForwardArgs {
            q: TensorRef::cuda(q.slice(..), layout(axis, problem.q_shape())).unwrap(),
            k: TensorRef::cuda(k.slice(..), layout(axis, problem.k_shape())).unwrap(),
            v: TensorRef::cuda(v.slice(..), layout(axis, problem.v_shape())).unwrap(),
            o: TensorMut::cuda(o.slice_mut(..), o_layout).unwrap(),
            lse: Some(TensorMut::cuda(lse.slice_mut(..), lse_layout).unwrap()),
        };
        plan.run(&gpu.lane(), &mut workspace, args).unwrap();
        gpu.stream.synchronize().unwrap();

        let mut got = Tensor::zeros(problem.o_shape());
        each_row(problem.o_shape(), |b, s, h| {
            let start = o_layout.offset([b, s, h, 0]).unwrap();
            let data = gpu.stream.clone_dtoh(&o.slice(start..start + dims.head_dim_vo)).unwrap();
            for (to, from) in got.row_mut(b, s, h).iter_mut().zip(data) {
                *to = from.to_f32().into();
            }
            // Filled again, so that in the end the memory must be as it was in the beginning.
            let fill = vec![T::from_f32(f32::NAN); dims.head_dim_vo];
            gpu.stream.memcpy_htod(&fill, &mut o.slice_mut(start..start + fill.len())).unwrap();
        });
        let lse: Vec<f64> = gpu.stream.clone_dtoh(&lse).unwrap().into_iter().map(f64::from).collect();
        let report =
            Expected::new(&problem, &inputs[0], &inputs[1], &inputs[2]).unwrap().check(&got, Some(&lse)).unwrap();
        assert!(report.passed(), "{row}, huge stride in {axis:?}: {report}");
    }
    // Everything that was not a row of O is still the NaN of the fill.
    for start in (0..ELEMENTS).step_by(CHUNK) {
        let chunk = gpu.stream.clone_dtoh(&o.slice(start..ELEMENTS.min(start + CHUNK))).unwrap();
        let stray = chunk.par_iter().position_any(|x| !x.to_f32().is_nan());
        assert!(stray.is_none(), "{row}: a stray write at element {}", start + stray.unwrap());
    }
}

fn each_row(shape: [usize; 4], mut f: impl FnMut(usize, usize, usize)) {
    for b in 0..shape[0] {
        for s in 0..shape[1] {
            for h in 0..shape[2] {
                f(b, s, h);
            }
        }
    }
}
