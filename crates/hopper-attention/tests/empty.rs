//! Problems without an element to compute, in sizes as large as problems may have: they are planned and run at once.

use std::ptr::null_mut;
use std::time::{Duration, Instant};

use hopper_attention::raw::{Place, RawArgs, RawTensor};
use hopper_attention::{
    BackwardProblem, DType, Device, DeviceFacts, Dims, ForwardProblem, Layout, Operand, Operands, Presence, Quantizer,
    Scaling, Slot,
};

/// The largest batch, number of heads and head dim.
const MOST: usize = i32::MAX as usize;
/// No token in any of many sequences or heads.
const NO_TOKENS: [Dims; 3] = {
    let dims = Dims::new(1, 0, 1, 16);
    [
        dims.with_batch(MOST),
        dims.with_heads_q(MOST),
        dims.with_heads_q(MOST).with_heads_kv(MOST).with_head_dim_qk(MOST).with_head_dim_vo(MOST),
    ]
};
/// No sequence, or no query but many keys.
const NO_QUERIES: [Dims; 2] =
    [Dims::new(0, 1 << 28, MOST, MOST), Dims::new(1, 0, MOST, 16).with_seqlen_kv((1 << 22) - 1)];

/// Memory for each operand. It begins with as many elements as a row of the tests has.
struct Memory(Vec<(Slot, Vec<f32>)>);

impl Memory {
    fn new(operands: &Operands) -> Self {
        Self(operands.into_iter().map(|operand| (operand.slot(), vec![1.0; 1 << 15])).collect())
    }

    /// Tensors for all operands that the problem has, but for those to leave out. All rows of a tensor are one row in memory, unless it has one row.
    fn args(&mut self, operands: &Operands, leave_out: &[Slot]) -> RawArgs {
        let wanted =
            |operand: &Operand| operand.presence() != Presence::Refused && !leave_out.contains(&operand.slot());
        let given = operands.into_iter().zip(&mut self.0).filter(|(operand, _)| wanted(operand));
        given.fold(RawArgs::new(), |args, (operand, (slot, memory))| {
            let (address, dtype) = (memory.as_mut_ptr() as u64, operand.dtype());
            args.with(
                *slot,
                match *operand.shape() {
                    [a, b, c, d] => tensor(address, dtype, Layout::with_strides([a, b, c, d], [0, 0, 0, 1])),
                    [a, b, c] => tensor(address, dtype, Layout::with_strides([a, b, c], [0, 0, 1])),
                    [a, b] => tensor(address, dtype, Layout::contiguous([a, b])),
                    [a] => tensor(address, dtype, Layout::contiguous([a])),
                    ref other => panic!("{other:?}"),
                },
            )
        })
    }

    fn of(&self, slot: Slot) -> &[f32] {
        &self.0.iter().find(|(of, _)| *of == slot).unwrap().1
    }
}

fn tensor<const R: usize>(address: u64, dtype: DType, layout: hopper_attention::Result<Layout<R>>) -> RawTensor {
    RawTensor::new(address, dtype, Place::Cpu, layout.unwrap())
}

/// The result of a call that must take no time worth mentioning.
fn at_once<R>(what: &str, call: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = call();
    assert!(start.elapsed() < Duration::from_secs(1), "{what} took {:?}", start.elapsed());
    result
}

fn forward(builder: hopper_attention::ForwardProblemBuilder) -> (ForwardProblem, Memory) {
    let problem = builder.lse(true).build().unwrap();
    let what = problem.to_string();
    let plan = at_once(&what, || problem.plan(&Device::cpu()).unwrap());
    // Without kernels in the build this is an error, which must come at once too.
    let _ = at_once(&what, || problem.plan_for(&DeviceFacts::h100_sxm()));
    let mut memory = Memory::new(plan.operands());
    let args = memory.args(plan.operands(), &[]);
    // SAFETY: the memory of each tensor is its own, begins with as many elements as the layout reaches, and is used by nothing
    // else meanwhile.
    at_once(&what, || unsafe { plan.run_raw(&args, null_mut()) }).unwrap();
    (problem, memory)
}

#[test]
fn forward_passes() {
    for dims in NO_TOKENS.into_iter().chain(NO_QUERIES) {
        forward(ForwardProblem::builder(DType::F32, dims));
    }
}

#[test]
fn forward_passes_of_e4m3() {
    for dims in NO_TOKENS.into_iter().chain(NO_QUERIES) {
        for scaling in Scaling::ALL {
            let builder = ForwardProblem::builder(DType::E4M3, dims).scaling(scaling).output(DType::E4M3).amax(true);
            let (problem, memory) = forward(builder);
            assert_eq!(memory.of(Slot::Amax)[..2], [0.0, 1.0], "{problem}: the largest magnitude of no element");
        }
    }
}

#[test]
fn gradients() {
    for dims in NO_TOKENS.into_iter().chain([NO_QUERIES[0]]) {
        let forward = ForwardProblem::builder(DType::F32, dims).build().unwrap();
        let problem = BackwardProblem::builder(&forward).d_lse(true).build().unwrap();
        let what = problem.to_string();
        let plan = at_once(&what, || problem.plan(&Device::cpu()).unwrap());
        let _ = at_once(&what, || problem.plan_for(&DeviceFacts::h100_sxm()));
        let mut memory = Memory::new(plan.operands());
        let args = memory.args(plan.operands(), &[]);
        // SAFETY: as for the forward pass.
        at_once(&what, || unsafe { plan.run_raw(&args, null_mut()) }).unwrap();
    }
}

#[test]
fn the_quantiser() {
    const MADE: [Slot; 3] = [Slot::QDescale, Slot::KDescale, Slot::VDescale];
    const GIVEN: [Slot; 3] = [Slot::QDescaleGiven, Slot::KDescaleGiven, Slot::VDescaleGiven];
    for dims in NO_TOKENS.into_iter().chain([NO_QUERIES[0]]) {
        for (scaling, leave_out) in Scaling::ALL.into_iter().flat_map(|scaling| [(scaling, MADE), (scaling, GIVEN)]) {
            if leave_out == GIVEN && scaling == Scaling::PerHead && dims.batch > 0 {
                continue; // There is a factor to write for each sequence and head.
            }
            let problem = ForwardProblem::builder(DType::E4M3, dims).scaling(scaling).build().unwrap();
            let quantizer = Quantizer::builder(&problem, DType::F32).hadamard(5).build().unwrap();
            let what = format!("{quantizer} of {problem}");
            let plan = at_once(&what, || quantizer.plan(&Device::cpu()).unwrap());
            let _ = at_once(&what, || quantizer.plan_for(&DeviceFacts::h100_sxm()));
            let mut memory = Memory::new(plan.operands());
            let args = memory.args(plan.operands(), &leave_out);
            // SAFETY: as for the forward pass.
            at_once(&what, || unsafe { plan.run_raw(&args, null_mut()) }).unwrap();
            assert_eq!(memory.of(Slot::Counts)[..7], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0], "{what}");
            if leave_out == GIVEN && scaling == Scaling::PerTensor {
                assert_eq!(memory.of(Slot::QDescale)[..2], [f32::MIN_POSITIVE, 1.0], "{what}");
            }
        }
    }
}
