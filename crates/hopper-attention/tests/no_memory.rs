//! Runs on the CPU without enough memory: each is refused or right, and a later run works.
//!
//! The program's allocator gives out a limited number of bytes. The limit grows from run to run until the run succeeds. An
//! allocation that the library does not expect to fail ends the program, and so the test.

use std::alloc::{GlobalAlloc, Layout as Size, System};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use hopper_attention::{
    BackwardArgs, BackwardProblem, DType, Descale, Device, Dims, E4M3, Error, ForwardArgs, ForwardProblem, Mask,
    QuantizeArgs, Quantizer, Result, Scaling, Stream, TensorMut, TensorRef,
};

mod common;

use common::{dense, values, workspace};

/// An allocation of fewer bytes is always given: the bookkeeping of threads, and the texts of errors.
const SMALL: usize = 2048;

/// The bytes that are still given out to allocations of [`SMALL`] bytes and more.
static LEFT: AtomicUsize = AtomicUsize::new(usize::MAX / 2);

struct Limited;

#[global_allocator]
static ALLOCATOR: Limited = Limited;

// SAFETY: memory is from the system's allocator, or null, which says that there is none.
unsafe impl GlobalAlloc for Limited {
    // SAFETY: the caller's promises are those that the system's allocator asks for, here and below.
    unsafe fn alloc(&self, size: Size) -> *mut u8 {
        let take = |left: usize| left.checked_sub(size.size());
        if size.size() >= SMALL && LEFT.fetch_update(SeqCst, SeqCst, take).is_err() {
            return ptr::null_mut();
        }
        // SAFETY: passed on.
        unsafe { System.alloc(size) }
    }

    // SAFETY: as above.
    unsafe fn dealloc(&self, memory: *mut u8, size: Size) {
        if size.size() >= SMALL {
            LEFT.fetch_add(size.size(), SeqCst);
        }
        // SAFETY: passed on.
        unsafe { System.dealloc(memory, size) }
    }
}

/// What a call returns where the allocator gives out `bytes` more.
fn within<R>(bytes: usize, call: impl FnOnce() -> R) -> R {
    let left = LEFT.swap(bytes, SeqCst);
    let given = call();
    LEFT.fetch_add(left - bytes, SeqCst);
    given
}

/// Runs with more memory each time until a run succeeds. Each run before must be refused, with its outputs untouched.
///
/// `run` gets its outputs from `outputs`. Returns the bytes that the last run was given.
fn grow<O: Clone + PartialEq>(outputs: &O, run: impl Fn(&mut O) -> Result<()>) -> usize {
    let mut want = outputs.clone();
    run(&mut want).unwrap(); // This also starts the threads.
    assert!(want != *outputs, "a run writes something");
    let mut bytes = 0;
    loop {
        let mut got = outputs.clone();
        match within(bytes, || run(&mut got)) {
            Ok(()) => {
                assert!(bytes > 0, "a run allocates something");
                assert!(got == want, "another result with {bytes} bytes");
                return bytes;
            }
            Err(Error::Memory { need, .. }) => {
                assert!(need >= SMALL, "{need} of {bytes} bytes");
                assert!(got == *outputs, "an output was written with {bytes} bytes");
            }
            Err(other) => panic!("{other} with {bytes} bytes"),
        }
        bytes += (bytes / 32).max(3000);
    }
}

const DIMS: Dims = Dims::new(2, 70, 2, 16).with_seqlen_kv(300).with_heads_kv(1).with_head_dim_vo(24);

fn forward(dims: Dims) -> usize {
    let problem = ForwardProblem::builder(DType::F32, dims).mask(Mask::causal()).lse(true).build().unwrap();
    let plan = problem.plan(&Device::cpu()).unwrap();
    let [q, k, v] = [problem.q_shape(), problem.k_shape(), problem.v_shape()].map(dense);
    let (q_data, k_data, v_data) = (values(q.span(), 1), values(k.span(), 2), values(v.span(), 3));
    let (o, lse) = (dense(problem.o_shape()), dense(problem.lse_shape()));
    grow(&(vec![7f32; o.span()], vec![7f32; lse.span()]), |(o_data, lse_data)| {
        let args = ForwardArgs::new(
            TensorRef::host(&q_data, q)?,
            TensorRef::host(&k_data, k)?,
            TensorRef::host(&v_data, v)?,
            TensorMut::host(o_data, o)?,
        );
        plan.run(&Stream::Cpu, &mut workspace(), args.lse(TensorMut::host(lse_data, lse)?))
    })
}

fn fp8() {
    let problem = ForwardProblem::builder(DType::E4M3, DIMS).scaling(Scaling::PerBlock).lse(true).build().unwrap();
    let plan = problem.plan(&Device::cpu()).unwrap();
    let [q, k, v] = [problem.q_shape(), problem.k_shape(), problem.v_shape()].map(dense);
    let (q_data, k_data, v_data) = (values(q.span(), 1), values(k.span(), 2), values(v.span(), 3));
    let of_q = dense(problem.descale_q_shape());
    let of_keys = dense(problem.descale_k_shape());
    let factors = vec![0.5f32; of_q.span().max(of_keys.span())];
    let (o, lse) = (dense(problem.o_shape()), dense(problem.lse_shape()));
    grow(&(vec![hopper_attention::bf16::ONE; o.span()], vec![7f32; lse.span()]), |(o_data, lse_data)| {
        let args = ForwardArgs::new(
            TensorRef::<E4M3, 4>::host(&q_data, q)?,
            TensorRef::host(&k_data, k)?,
            TensorRef::host(&v_data, v)?,
            TensorMut::host(o_data, o)?,
        );
        let args = args.descale(
            TensorRef::host(&factors, of_q)?,
            TensorRef::host(&factors, of_keys)?,
            TensorRef::host(&factors, of_keys)?,
        );
        plan.run(&Stream::Cpu, &mut workspace(), args.lse(TensorMut::host(lse_data, lse)?))
    });
}

fn gradients() {
    let forward = ForwardProblem::builder(DType::F32, DIMS).mask(Mask::causal()).build().unwrap();
    let problem = BackwardProblem::builder(&forward).build().unwrap();
    let plan = problem.plan(&Device::cpu()).unwrap();
    let [q, k, v, o] = [forward.q_shape(), forward.k_shape(), forward.v_shape(), forward.o_shape()].map(dense);
    let (q_data, k_data, v_data) = (values(q.span(), 1), values(k.span(), 2), values(v.span(), 3));
    let (o_data, d_o_data) = (values(o.span(), 4), values(o.span(), 5));
    let lse = dense(forward.lse_shape());
    let lse_data = vec![3f32; lse.span()];
    let outputs = [q, k, v].map(|layout| vec![7f32; layout.span()]);
    grow(&outputs, |[d_q, d_k, d_v]| {
        let args = BackwardArgs::new(
            [TensorRef::host(&q_data, q)?, TensorRef::host(&k_data, k)?, TensorRef::host(&v_data, v)?],
            TensorRef::host(&o_data, o)?,
            TensorRef::host(&lse_data, lse)?,
            TensorRef::host(&d_o_data, o)?,
            [TensorMut::host(d_q, q)?, TensorMut::host(d_k, k)?, TensorMut::host(d_v, v)?],
        );
        plan.run(&Stream::Cpu, &mut workspace(), args)
    });
}

fn quantiser() {
    // A head dim whose signs and norms are no small allocations.
    let dims = DIMS.with_head_dim_qk(1024);
    let problem = ForwardProblem::builder(DType::E4M3, dims).build().unwrap();
    let plan = Quantizer::builder(&problem, DType::F32).hadamard(9).build().unwrap().plan(&Device::cpu()).unwrap();
    let (q, v) = (dense(problem.q_shape()), dense(problem.v_shape()));
    let (q_data, v_data) = (values::<f32>(q.span(), 1), values::<f32>(v.span(), 3));
    let outputs = [q, v].map(|layout| (vec![E4M3::ONE; layout.span()], [7f32]));
    grow(&outputs, |[(q_stored, q_factor), (v_stored, v_factor)]| {
        let factor = dense([1, 1, 1]);
        let args = QuantizeArgs::new()
            .q(
                TensorRef::host(&q_data, q)?,
                TensorMut::host(q_stored, q)?,
                Descale::FromAmax(TensorMut::host(q_factor, factor)?),
            )
            .v(
                TensorRef::host(&v_data, v)?,
                TensorMut::host(v_stored, v)?,
                Descale::FromAmax(TensorMut::host(v_factor, factor)?),
            );
        plan.run(&Stream::Cpu, &mut workspace(), args)
    });
}

/// One test, because the limit also holds for what other tests would allocate meanwhile.
#[test]
fn every_pass_is_refused_or_right() {
    forward(DIMS);
    fp8();
    gradients();
    quantiser();
    // Blocks of 64 queries and 256 keys of this head dim would take 180 MB for each thread.
    let threads = std::thread::available_parallelism().unwrap().get();
    let bytes = forward(Dims::new(1, 64, 1, 1 << 16).with_head_dim_vo(1 << 16));
    assert!(bytes < threads.min(4) * (32 << 20), "{bytes} bytes");
}
