//! Outputs of the raw layer may be memory that was never written. Miri finds a run that reads one before it has written it, or
//! that makes a slice of one: `scripts/sanitize.sh miri`.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

use hopper_attention::raw::{Place, RawArgs, RawTensor};
use hopper_attention::{BackwardProblem, DType, Device, Dims, E4M3, Element, ForwardProblem, Quantizer, Slot};

mod common;

use common::dense;

/// No stream: the CPU looks at none.
const NO_STREAM: *mut c_void = null_mut();

/// An input without gaps.
fn at<T: Element, const R: usize>(data: &[T], shape: [usize; R]) -> RawTensor {
    RawTensor::new(data.as_ptr() as u64, T::DTYPE, Place::Cpu, dense(shape))
}

/// Memory for an output.
struct Fresh<T>(Box<[MaybeUninit<T>]>);

impl<T: Element> Fresh<T> {
    fn new(elements: usize) -> Self {
        Self(Box::new_uninit_slice(elements))
    }

    fn tensor<const R: usize>(&mut self, shape: [usize; R]) -> RawTensor {
        RawTensor::new(self.0.as_mut_ptr() as u64, T::DTYPE, Place::Cpu, dense(shape))
    }

    /// # Safety
    /// A run has written every element.
    unsafe fn written(self) -> Vec<f32> {
        // SAFETY: the caller's promise.
        unsafe { self.0.assume_init() }.iter().map(|x| x.to_f32()).collect()
    }
}

#[test]
fn outputs_of_forward_passes_of_e4m3() {
    let dims = Dims::new(1, 1, 1, 1).with_seqlen_kv(2);
    let options = ForwardProblem::builder(DType::E4M3, dims).output(DType::E4M3).lse(true).amax(true);
    let problem = options.build().unwrap();
    let plan = problem.plan(&Device::cpu()).unwrap();
    let (zeros, one) = ([E4M3::from_bits(0); 2], [1f32]);
    let v = [2.0, -6.0].map(<E4M3 as Element>::from_f32);
    let (mut o, mut lse, mut amax) = (Fresh::<E4M3>::new(1), Fresh::<f32>::new(1), Fresh::<f32>::new(1));
    let args = RawArgs::new()
        .with(Slot::Q, at(&zeros[..1], problem.q_shape()))
        .with(Slot::K, at(&zeros, problem.k_shape()))
        .with(Slot::V, at(&v, problem.v_shape()))
        .with(Slot::O, o.tensor(problem.o_shape()))
        .with(Slot::Lse, lse.tensor(problem.lse_shape()))
        .with(Slot::DescaleQ, at(&one, [1, 1, 1]))
        .with(Slot::DescaleK, at(&one, [1, 1, 1]))
        .with(Slot::DescaleV, at(&one, [1, 1, 1]))
        .with(Slot::ScaleO, at(&one, [1]))
        .with(Slot::Amax, amax.tensor([1]));
    // SAFETY: the memory lives, and outputs have memory of their own.
    unsafe { plan.run_raw(&args, NO_STREAM) }.unwrap();
    // SAFETY: the run has written every output.
    let (o, lse, amax) = unsafe { (o.written(), lse.written(), amax.written()) };
    assert!(o == [-2.0] && (lse[0] - 2f32.ln()).abs() < 1e-6 && amax == [2.0], "{o:?} {lse:?} {amax:?}");
}

#[test]
fn outputs_of_backward_passes() {
    let forward = ForwardProblem::builder(DType::F32, Dims::new(1, 1, 1, 2)).build().unwrap();
    let problem = BackwardProblem::builder(&forward).build().unwrap();
    let plan = problem.plan(&Device::cpu()).unwrap();
    let (zeros, ones, lse) = ([0f32; 2], [1f32; 2], [0f32]);
    let mut gradients = [(); 3].map(|()| Fresh::<f32>::new(2));
    let [d_q, d_k, d_v] = gradients.each_mut().map(|fresh| fresh.tensor(forward.q_shape()));
    let args = RawArgs::new()
        .with(Slot::Q, at(&zeros, forward.q_shape()))
        .with(Slot::K, at(&zeros, forward.k_shape()))
        .with(Slot::V, at(&ones, forward.v_shape()))
        .with(Slot::O, at(&ones, forward.o_shape()))
        .with(Slot::Lse, at(&lse, forward.lse_shape()))
        .with(Slot::DO, at(&ones, problem.d_o_shape()))
        .with(Slot::DQ, d_q)
        .with(Slot::DK, d_k)
        .with(Slot::DV, d_v);
    // SAFETY: the memory lives, and outputs have memory of their own.
    unsafe { plan.run_raw(&args, NO_STREAM) }.unwrap();
    // SAFETY: the run has written every output.
    let gradients = gradients.map(|fresh| unsafe { fresh.written() });
    assert_eq!(gradients, [[0.0; 2], [0.0; 2], [1.0; 2]]);
}

#[test]
fn outputs_of_quantisers() {
    let problem = ForwardProblem::builder(DType::E4M3, Dims::new(1, 1, 1, 2)).build().unwrap();
    let plan = Quantizer::builder(&problem, DType::F32).build().unwrap().plan(&Device::cpu()).unwrap();
    let values = [224f32, -448.0];
    let (mut stored, mut descale, mut counts) = (Fresh::<E4M3>::new(2), Fresh::<f32>::new(1), Fresh::<f32>::new(6));
    let args = RawArgs::new()
        .with(Slot::KValues, at(&values, problem.k_shape()))
        .with(Slot::KStored, stored.tensor(problem.k_shape()))
        .with(Slot::KDescale, descale.tensor([1, 1, 1]))
        .with(Slot::Counts, counts.tensor([3, 2]));
    // SAFETY: the memory lives, and outputs have memory of their own.
    unsafe { plan.run_raw(&args, NO_STREAM) }.unwrap();
    // SAFETY: the run has written every output.
    let (stored, descale, counts) = unsafe { (stored.written(), descale.written(), counts.written()) };
    assert_eq!((stored, descale, counts), (vec![224.0, -448.0], vec![1.0], vec![0.0; 6]));
}
