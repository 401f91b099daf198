//! Tensors that reach past 2^31 elements, where 32-bit offsets wrap.

use hopper_attention::cudarc::driver::{CudaSlice, DevicePtrMut, result};
use hopper_attention::reference::{Expected, Tensor};
use hopper_attention::{
    BackwardArgs, BackwardProblem, DType, Dims, ForwardArgs, ForwardProblem, KernelInfo, Layout, Mask, MaskClass,
    SequenceOffsets, TensorMut, TensorRef, Workspace, bf16,
};
use hopper_attention_tests::backward::Prepared;
use hopper_attention_tests::data::{Input, Poison, Values};
use hopper_attention_tests::gpu::{Gpu, dense};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::say;
use rayon::prelude::*;

use crate::{mask_of, with_dtype};

/// Elements of each tensor's memory: past 2^31, and enough for the last row.
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
    if !may_run(&gpu, 4 * ELEMENTS * 2 + (1 << 30), "offsets_past_2_31_elements") {
        return;
    }
    // One row of each mask class up to head dim 128, and one above, where kernels compute the addresses of O themselves. The type
    // makes no difference to addresses.
    let mut seen = Vec::new();
    for row in gpu.rows() {
        let kind = (row.mask(), row.head_dim_qk() > 128);
        if !seen.contains(&kind) {
            seen.push(kind);
            with_dtype!(row.dtype(), large(&gpu, &row));
        }
    }
}

/// Whether the card has the memory, and the time is there; says so if not.
fn may_run(gpu: &Gpu, need: usize, test: &str) -> bool {
    if Grid::from_env() == Grid::Small {
        // Minutes under a sanitizer.
        say(&format!("skipped: HATTN_TEST_GRID=small ({test})"));
        return false;
    }
    let (free, _) = gpu.device.context().mem_get_info().unwrap();
    if free < need {
        let required = std::env::var("HATTN_REQUIRE_GPU").is_ok_and(|value| value == "1");
        assert!(!required, "{free} bytes free, {need} needed");
        say(&format!("skipped: too little device memory ({test})"));
        return false;
    }
    true
}

/// A batch so large that the sums of dQ, and each tensor, have more than 2^31 elements. All its members are the same, and
/// so must be their gradients.
#[test]
fn gradients_past_2_31_elements() {
    let Some(gpu) = Gpu::open("gradients_past_2_31_elements") else { return };
    // Eight tensors of 16 bits, sums of 32, statistics.
    if !may_run(&gpu, ELEMENTS * (8 * 2 + 4) + (2 << 30), "gradients_past_2_31_elements") {
        return;
    }
    let causal = |row: &KernelInfo| row.mask() == MaskClass::Causal && row.dtype() == DType::BF16;
    for row in gpu.backward_rows().into_iter().filter(causal) {
        large_batch(&gpu, &row, false);
        if row.packs() {
            large_batch(&gpu, &row, true);
        }
    }
}

/// `count` copies of `one`, one behind the other.
fn repeated<T: Poison>(gpu: &Gpu, one: &[T], count: usize) -> CudaSlice<T> {
    let from = gpu.stream.clone_htod(one).unwrap();
    // SAFETY: every element is written by the copies below, on the same stream.
    let mut to = unsafe { gpu.stream.alloc::<T>(one.len() * count) }.expect("device memory");
    for i in 0..count {
        gpu.stream.memcpy_dtod(&from, &mut to.slice_mut(i * one.len()..(i + 1) * one.len())).unwrap();
    }
    to
}

/// Member `i` of `count` that lie one behind the other.
fn member<T: Poison>(gpu: &Gpu, slice: &CudaSlice<T>, i: usize, count: usize) -> Vec<T> {
    let size = slice.len() / count;
    gpu.stream.clone_dtoh(&slice.slice(i * size..(i + 1) * size)).unwrap()
}

/// The problem of so many members: as a batch, or packed.
fn of_members(case: &Case, count: usize, packed: bool) -> ForwardProblem {
    let dims = match packed {
        false => case.dims.with_batch(count),
        true => {
            let dims = case.dims.with_batch(count).with_seqlen_q(count * case.dims.seqlen_q);
            dims.with_seqlen_kv(count * case.dims.seqlen_kv)
        }
    };
    ForwardProblem::builder(DType::BF16, dims).mask(Mask::causal()).lse(true).packed(packed).build().unwrap()
}

/// Where sequences of `len` rows begin.
fn equal_lengths(gpu: &Gpu, len: usize, count: usize) -> SequenceOffsets {
    SequenceOffsets::from_lengths(&gpu.lane(), std::iter::repeat_n(len, count)).unwrap()
}

/// The sequences of packed tensors with more than 2^31 elements. All are the same, and so must be their outputs: those of a
/// tensor with one sequence.
#[test]
fn packed_outputs_past_2_31_elements() {
    let Some(gpu) = Gpu::open("packed_outputs_past_2_31_elements") else { return };
    // Q and K have half as many again where V and O have 2^31.
    if !may_run(&gpu, ELEMENTS * 5 * 2 + (1 << 30), "packed_outputs_past_2_31_elements") {
        return;
    }
    let causal = |row: &KernelInfo| row.mask() == MaskClass::Causal && row.dtype() == DType::BF16 && row.packs();
    for row in gpu.rows().into_iter().filter(causal) {
        large_packed(&gpu, &row);
    }
}

fn large_packed(gpu: &Gpu, row: &KernelInfo) {
    let heads = 1024 / row.head_dim_qk();
    let case = Case::new(1000, 1000, row.head_dim_qk(), Mask::causal()).head_dim_vo(row.head_dim_vo());
    let one = Prepared::<bf16>::new(&case.heads(1, heads, heads));
    let case = &one.case;
    let run = |count: usize| {
        let problem = of_members(case, count, true);
        let plan = problem.plan_with_row(&gpu.device, row).unwrap();
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        let [q, k, v] = [&one.q, &one.k, &one.v].map(|x| repeated(gpu, x.inner(), count));
        let mut o = repeated(gpu, &vec![bf16::POISON; 1000 * heads * row.head_dim_vo()], count);
        let mut lse = gpu.stream.clone_htod(&vec![f32::POISON; heads * 1000 * count]).unwrap();
        let [of_qk, of_vo] = [row.head_dim_qk(), row.head_dim_vo()]
            .map(|head_dim| Layout::contiguous([1000 * count, heads, head_dim]).unwrap());
        let of_lse = Layout::contiguous([heads, 1000 * count]).unwrap();
        let offsets = equal_lengths(gpu, 1000, count);
        let [q, k, v] =
            [(&q, of_qk), (&k, of_qk), (&v, of_vo)].map(|(x, layout)| TensorRef::cuda(x.slice(..), layout).unwrap());
        let args = ForwardArgs::packed(q, k, v, TensorMut::cuda(o.slice_mut(..), of_vo).unwrap())
            .lse_packed(TensorMut::cuda(lse.slice_mut(..), of_lse).unwrap())
            .cu_seqlens_q(&offsets)
            .cu_seqlens_kv(&offsets);
        plan.run(&gpu.lane(), &mut workspace, args).unwrap();
        gpu.stream.synchronize().unwrap();
        (o, gpu.stream.clone_dtoh(&lse).unwrap())
    };
    let (o, lse) = run(1);
    let first = member(gpu, &o, 0, 1);
    assert!(!first.iter().any(|x| x.is_poison()), "{row}: not written");
    let count = ELEMENTS / first.len() + 1;
    let (all_o, all_lse) = run(count);
    for i in (0..count).filter(|i| i % 16 == 0 || i + 140 > count) {
        assert!(member(gpu, &all_o, i, count) == first, "{row}: O of sequence {i} is not that of one alone");
    }
    for (i, of_sequence) in all_lse.chunks(1000).enumerate() {
        let head = i / count;
        assert!(of_sequence == &lse[head * 1000..][..1000], "{row}: LSE of sequence {}, head {head}", i % count);
    }
}

fn large_batch(gpu: &Gpu, row: &KernelInfo, packed: bool) {
    let heads = 1024 / row.head_dim_qk();
    let mut case = Case::new(1000, 1000, row.head_dim_qk(), Mask::causal()).heads(1, heads, heads);
    case.dims.head_dim_vo = row.head_dim_vo();
    case.lse = false;
    let one = Prepared::<bf16>::new(&case);
    let batch = ELEMENTS / one.q.inner().len() + 1;
    let forward = of_members(&case, batch, packed);
    let problem = BackwardProblem::builder(&forward).deterministic(true).build().unwrap();
    let plan = problem.plan_with_row(&gpu.device, row).unwrap();
    assert!(plan.workspace_bytes() > ELEMENTS * 4, "{plan}");
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();

    let [q, k, v, o, d_o] = [&one.q, &one.k, &one.v, &one.o, &one.d_o].map(|x| repeated(gpu, x.inner(), batch));
    let lse = match packed {
        false => repeated(gpu, one.lse.inner(), batch),
        true => {
            let heads = one.lse.inner().chunks(case.dims.seqlen_q);
            gpu.stream.clone_htod(&heads.flat_map(|head| head.repeat(batch)).collect::<Vec<_>>()).unwrap()
        }
    };
    let [mut d_q, mut d_k, mut d_v] = [&one.q, &one.k, &one.v].map(|x| {
        let poison = vec![bf16::POISON; x.inner().len()];
        repeated(gpu, &poison, batch)
    });
    let offsets = equal_lengths(gpu, case.dims.seqlen_q, batch);
    let args = match packed {
        false => dense(&problem, [&q, &k, &v, &o, &d_o], &lse, [&mut d_q, &mut d_k, &mut d_v]).unwrap(),
        true => {
            let rows = case.dims.seqlen_q * batch;
            let layout = Layout::contiguous([rows, heads, row.head_dim_qk()]).unwrap();
            let read = |x| TensorRef::cuda(CudaSlice::slice(x, ..), layout).unwrap();
            let lse = TensorRef::cuda(lse.slice(..), Layout::contiguous([heads, rows]).unwrap()).unwrap();
            let gradients = [&mut d_q, &mut d_k, &mut d_v].map(|x| TensorMut::cuda(x.slice_mut(..), layout).unwrap());
            BackwardArgs::packed([read(&q), read(&k), read(&v)], read(&o), lse, read(&d_o), gradients)
                .cu_seqlens_q(&offsets)
                .cu_seqlens_kv(&offsets)
        }
    };
    plan.run(&gpu.lane(), &mut workspace, args).unwrap();
    gpu.stream.synchronize().unwrap();

    let of = |i| [&d_q, &d_k, &d_v].map(|slice| member(gpu, slice, i, batch));
    let first = of(0);
    let tensor = |data: &Vec<bf16>, shape: [usize; 4]| {
        let data: Vec<f32> = data.iter().map(|x| x.to_f32()).collect();
        Tensor::from_strided(&data, &Layout::contiguous(shape).unwrap())
    };
    let small = &one.problem;
    let [got_q, got_k, got_v] = [
        tensor(&first[0], small.d_q_shape()),
        tensor(&first[1], small.d_k_shape()),
        tensor(&first[2], small.d_v_shape()),
    ];
    let report = one.expected.check(&got_q, &got_k, &got_v).unwrap();
    assert!(report.passed(), "{row}: {report}");
    for i in (0..batch).filter(|i| i % 16 == 0 || i + 140 > batch) {
        assert!(of(i) == first, "{row}: the gradients of member {i} are not those of the first");
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

fn large<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let [mut q, mut k, mut v, mut o] = [(); 4].map(|()| memory::<T>(gpu));
    for axis in [Axis::Batch, Axis::Seqlen, Axis::Heads] {
        let dims = Dims::new(2, 150, 4, row.head_dim_qk())
            .with_seqlen_kv(170)
            .with_heads_kv(2)
            .with_head_dim_vo(row.head_dim_vo());
        let problem = ForwardProblem::builder(T::DTYPE, dims).mask(mask_of(row.mask())).lse(true).build().unwrap();
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
        let args = ForwardArgs::new(
            TensorRef::cuda(q.slice(..), layout(axis, problem.q_shape())).unwrap(),
            TensorRef::cuda(k.slice(..), layout(axis, problem.k_shape())).unwrap(),
            TensorRef::cuda(v.slice(..), layout(axis, problem.v_shape())).unwrap(),
            TensorMut::cuda(o.slice_mut(..), o_layout).unwrap(),
        );
        let args = args.lse(TensorMut::cuda(lse.slice_mut(..), lse_layout).unwrap());
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
