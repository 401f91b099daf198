//! Runs of any pass on memory that a test may share, free and overwrite while the GPU works, and a gate that holds a stream back.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hopper_attention::cudarc::driver::{CudaEvent, CudaSlice, CudaStream, result};
use hopper_attention::{
    Access, Args, BackwardPlan, BackwardProblem, DType, E4M3, Element, ForwardPlan, KernelInfo, Mask, MaskClass,
    Operand, Operands, Presence, QuantizePlan, Quantizer, Result, Scaling, Slot, Stream, Workspace, bf16, f16,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::{Gpu, whole, whole_mut};
use crate::fp8::for_row;
use crate::problems::Case;

/// A plan of any pass.
pub enum Plan {
    /// A forward pass.
    Forward(ForwardPlan),
    /// A backward pass.
    Backward(BackwardPlan),
    /// A quantiser.
    Quantize(QuantizePlan),
}

impl Plan {
    /// Plans of all rows that the GPU runs, with a name for each: every pass, type and instruction set.
    pub fn all(gpu: &Gpu) -> Vec<(String, Self)> {
        let device = &gpu.device;
        let mut all = Vec::new();
        for row in gpu.rows() {
            let plan = case(&row).problem(row.dtype()).plan_with_row(device, &row).expect("a plan of the row");
            all.push((format!("forward {row}"), Self::Forward(plan)));
        }
        for row in gpu.fp8_rows() {
            let problem = case(&row).options(DType::E4M3).lse(true).scaling(Scaling::PerHead).build();
            let problem = for_row(problem.expect("a legal problem"), &row);
            let plan = problem.plan_with_row(device, &row).expect("a plan of the row");
            all.push((format!("forward {row}"), Self::Forward(plan)));
        }
        for row in gpu.backward_rows() {
            let forward = case(&row).problem(row.dtype());
            let problem = BackwardProblem::builder(&forward).deterministic(true).build().expect("a legal problem");
            let plan = problem.plan_with_row(device, &row).expect("a plan of the row");
            all.push((format!("backward {row}"), Self::Backward(plan)));
        }
        for row in gpu.modified_backward_rows().into_iter().filter(KernelInfo::needs_modifiers) {
            let forward = case(&row).softcap(30.0).problem(row.dtype());
            let problem = BackwardProblem::builder(&forward).deterministic(true).build().expect("a legal problem");
            let plan = problem.plan_with_row(device, &row).expect("a plan of the row");
            all.push((format!("backward {row}"), Self::Backward(plan)));
        }
        for (source, scaling) in [(DType::BF16, Scaling::PerTensor), (DType::F16, Scaling::PerBlock)] {
            let problem =
                Case::new(300, 333, 128, Mask::Full).heads(2, 4, 2).options(DType::E4M3).scaling(scaling).build();
            let quantizer = Quantizer::builder(&problem.expect("a legal problem"), source).build();
            let plan = quantizer.expect("a legal quantiser").plan(&hopper_attention::Device::Cuda(device.clone()));
            all.push((format!("quantise {source} {scaling}"), Self::Quantize(plan.expect("a plan"))));
        }
        all
    }

    fn operands(&self) -> &Operands {
        match self {
            Self::Forward(plan) => plan.operands(),
            Self::Backward(plan) => plan.operands(),
            Self::Quantize(plan) => plan.operands(),
        }
    }

    /// A workspace that is large enough.
    pub fn workspace(&self, stream: &Arc<CudaStream>) -> Workspace<'static> {
        let bytes = match self {
            Self::Forward(plan) => plan.workspace_bytes(),
            Self::Backward(plan) => plan.workspace_bytes(),
            Self::Quantize(plan) => plan.workspace_bytes(),
        };
        Workspace::alloc(&Stream::Cuda(stream.clone()), bytes).expect("device memory")
    }

    /// Runs it.
    ///
    /// # Errors
    /// What was refused or failed.
    pub fn run(
        &self,
        stream: &Arc<CudaStream>,
        workspace: &mut Workspace<'_>,
        inputs: &Tensors,
        outputs: &mut Tensors,
    ) -> Result<()> {
        let args = inputs.0.iter().fold(Args::new(), |args, (operand, memory)| memory.lend(args, operand));
        let args = outputs.0.iter_mut().fold(args, |args, (operand, memory)| memory.lend_mut(args, operand));
        let stream = Stream::Cuda(stream.clone());
        match self {
            Self::Forward(plan) => plan.run(&stream, workspace, args),
            Self::Backward(plan) => plan.run(&stream, workspace, args),
            Self::Quantize(plan) => plan.run(&stream, workspace, args),
        }
    }

    /// What a run gives that nothing disturbs, of the inputs that [`Tensors::inputs`] makes.
    pub fn expected(&self, stream: &Arc<CudaStream>) -> Vec<Vec<u8>> {
        let (inputs, mut outputs) = (Tensors::inputs(stream, self), Tensors::outputs(stream, self));
        self.run(stream, &mut self.workspace(stream), &inputs, &mut outputs).expect("an undisturbed run");
        outputs.bytes(stream)
    }
}

/// A case that fits a row.
fn case(row: &KernelInfo) -> Case {
    let mask = if row.mask() == MaskClass::Causal { Mask::causal() } else { Mask::window(Some(100), Some(20)) };
    let mask = if row.mask() == MaskClass::Full { Mask::Full } else { mask };
    let mut case = Case::new(300, 333, row.head_dim_qk(), mask).heads(2, 4, 2);
    case.dims.head_dim_vo = row.head_dim_vo();
    case
}

/// The tensors that a plan reads, or those that it writes.
pub struct Tensors(Vec<(Operand, Memory)>);

impl Tensors {
    /// Random inputs: the same ones each time.
    pub fn inputs(stream: &Arc<CudaStream>, plan: &Plan) -> Self {
        let mut rng = StdRng::seed_from_u64(1);
        Self::of(plan, Access::Read, |operand, len| Memory::random(stream, operand.dtype(), len, &mut rng))
    }

    /// Zeros.
    pub fn outputs(stream: &Arc<CudaStream>, plan: &Plan) -> Self {
        Self::of(plan, Access::Write, |operand, len| Memory::zeros(stream, operand.dtype(), len))
    }

    /// Zeros where inputs shall be.
    pub fn blank(stream: &Arc<CudaStream>, plan: &Plan) -> Self {
        Self::of(plan, Access::Read, |operand, len| Memory::zeros(stream, operand.dtype(), len))
    }

    fn of(plan: &Plan, access: Access, mut memory: impl FnMut(&Operand, usize) -> Memory) -> Self {
        let given = |operand: &&Operand| {
            // The quantiser makes its factors, so that none are given.
            let given = [Slot::QDescaleGiven, Slot::KDescaleGiven, Slot::VDescaleGiven].contains(&operand.slot());
            operand.access() == access && operand.presence() != Presence::Refused && !given
        };
        let operands = plan.operands().iter().filter(given);
        Self(operands.map(|operand| (*operand, memory(operand, operand.shape().iter().product()))).collect())
    }

    /// Writes zeros, through cudarc.
    pub fn overwrite(&mut self, stream: &Arc<CudaStream>) {
        self.0.iter_mut().for_each(|(_, memory)| memory.overwrite(stream));
    }

    /// Copies what others hold, through cudarc.
    pub fn copy(&mut self, stream: &Arc<CudaStream>, from: &Self) {
        self.0.iter_mut().zip(&from.0).for_each(|((_, to), (_, from))| to.copy(stream, from));
    }

    /// The elements, after what is enqueued on the stream.
    pub fn bytes(&self, stream: &Arc<CudaStream>) -> Vec<Vec<u8>> {
        self.0.iter().map(|(_, memory)| memory.bytes(stream)).collect()
    }
}

macro_rules! memory {
    ($($name:ident: $type:ty;)*) => {
        /// Memory of any element type.
        enum Memory {
            $($name(CudaSlice<$type>),)*
        }

        impl Memory {
            fn zeros(stream: &Arc<CudaStream>, dtype: DType, len: usize) -> Self {
                match dtype {
                    $(DType::$name => Self::$name(stream.alloc_zeros(len).expect("device memory")),)*
                    other => panic!("no tests of {other}"),
                }
            }

            fn random(stream: &Arc<CudaStream>, dtype: DType, len: usize, rng: &mut StdRng) -> Self {
                // Factors and log-sum-exps are f32, and not 0.
                let range = if dtype == DType::F32 { 0.5..1.5 } else { -1.0..1.0 };
                match dtype {
                    $(DType::$name => {
                        let values: Vec<_> = (0..len).map(|_| <$type>::from_f32(rng.random_range(range.clone()))).collect();
                        Self::$name(stream.clone_htod(&values).expect("a copy"))
                    })*
                    other => panic!("no tests of {other}"),
                }
            }

            fn lend<'a>(&'a self, args: Args<'a>, operand: &Operand) -> Args<'a> {
                match self {
                    $(Self::$name(slice) => read(args, operand, slice),)*
                }
            }

            fn lend_mut<'a>(&'a mut self, args: Args<'a>, operand: &Operand) -> Args<'a> {
                match self {
                    $(Self::$name(slice) => write(args, operand, slice),)*
                }
            }

            fn overwrite(&mut self, stream: &Arc<CudaStream>) {
                match self {
                    $(Self::$name(slice) => stream.memset_zeros(slice).expect("zeros"),)*
                }
            }

            fn copy(&mut self, stream: &Arc<CudaStream>, from: &Self) {
                match (self, from) {
                    $((Self::$name(to), Self::$name(from)) => stream.memcpy_dtod(from, to).expect("a copy"),)*
                    _ => panic!("tensors of two plans"),
                }
            }

            fn bytes(&self, stream: &Arc<CudaStream>) -> Vec<u8> {
                match self {
                    $(Self::$name(slice) => {
                        let values = stream.clone_dtoh(slice).expect("a copy");
                        stream.synchronize().expect("the GPU works");
                        values.iter().flat_map(|x| x.to_f32().to_bits().to_le_bytes()).collect()
                    })*
                }
            }
        }
    };
}

memory! {
    F16: f16;
    BF16: bf16;
    E4M3: E4M3;
    F32: f32;
}

fn sizes<const R: usize>(operand: &Operand) -> [usize; R] {
    operand.shape().try_into().expect("the operand's rank")
}

fn read<'a, T: Element>(args: Args<'a>, operand: &Operand, slice: &'a CudaSlice<T>) -> Args<'a> {
    let (slot, fits) = (operand.slot(), "memory of the operand's size");
    match operand.shape().len() {
        1 => args.read(slot, whole(slice, sizes::<1>(operand)).expect(fits)),
        2 => args.read(slot, whole(slice, sizes::<2>(operand)).expect(fits)),
        3 => args.read(slot, whole(slice, sizes::<3>(operand)).expect(fits)),
        _ => args.read(slot, whole(slice, sizes::<4>(operand)).expect(fits)),
    }
}

fn write<'a, T: Element>(args: Args<'a>, operand: &Operand, slice: &'a mut CudaSlice<T>) -> Args<'a> {
    let (slot, fits) = (operand.slot(), "memory of the operand's size");
    match operand.shape().len() {
        1 => args.write(slot, whole_mut(slice, sizes::<1>(operand)).expect(fits)),
        2 => args.write(slot, whole_mut(slice, sizes::<2>(operand)).expect(fits)),
        3 => args.write(slot, whole_mut(slice, sizes::<3>(operand)).expect(fits)),
        _ => args.write(slot, whole_mut(slice, sizes::<4>(operand)).expect(fits)),
    }
}

/// Holds a stream back until it is opened or dropped. Work that is enqueued on the stream meanwhile waits.
pub struct Gate(Arc<Held>);

#[derive(Default)]
struct Held {
    open: Mutex<bool>,
    opened: Condvar,
    gave_up: AtomicBool,
}

/// How long a gate stays closed. A test that waits for a stream which its own gate holds back would wait for ever.
pub const PATIENCE: Duration = Duration::from_secs(10);

impl Gate {
    /// Holds the stream back from here on. Its context must be current.
    pub fn hold(stream: &CudaStream) -> Self {
        let held = Arc::new(Held::default());
        let argument = Arc::into_raw(held.clone()).cast_mut().cast();
        // SAFETY: the stream is alive, and the function takes the reference that was made for it.
        unsafe { result::stream::launch_host_function(stream.cu_stream(), wait_for, argument) }
            .expect("a host function");
        Self(held)
    }

    /// Lets the stream go on.
    ///
    /// # Panics
    /// If the test took so long that the gate has opened by itself: then it has shown nothing.
    pub fn open(self) {
        assert!(!self.0.gave_up.load(Ordering::SeqCst), "the gate opened by itself: a call waited for the held stream");
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        *self.0.open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.opened.notify_all();
    }
}

unsafe extern "C" fn wait_for(argument: *mut c_void) {
    // SAFETY: `hold` made this reference for the one call of this function.
    let held = unsafe { Arc::from_raw(argument.cast_const().cast::<Held>()) };
    let open = held.open.lock().unwrap_or_else(PoisonError::into_inner);
    let waited = held.opened.wait_timeout_while(open, PATIENCE, |open| !*open);
    let (_open, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
    held.gave_up.store(timeout.timed_out(), Ordering::SeqCst);
}

/// Whether an event is reached within a time that is long for a memset, and short for a test.
pub fn is_reached(event: &CudaEvent) -> bool {
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(20) {
        if event.is_complete() {
            return true;
        }
        std::thread::yield_now();
    }
    false
}
