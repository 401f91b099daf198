//! Problems on a GPU.

use std::sync::Arc;

use hopper_attention::cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use hopper_attention::{
    CudaDevice, DType, E4M3, Element, Error, KernelInfo, OutputOf, Quantizer, Stream, Workspace, backward_kernels,
    bf16, f16, kernels,
};
use rayon::prelude::*;

use super::{Launch, Outcome, Pass, Problem};
use crate::data::Poison;
use crate::fp8::Operands;
use crate::gpu::quantize::{Kind, Like, Sample};
use crate::gpu::{self, MODE, NO_FLAGS, fp8, quantize};
use crate::ready::{Ready, Verdict};
use crate::{backward, forward};

/// Problems whose inputs are held at a time.
const HELD: usize = 64;

/// A verdict that is still to be computed, on the CPU.
type Judging = Box<dyn FnOnce() -> Verdict + Send>;

/// What came of the GPU's part: a verdict to be computed, a refusal, or what went wrong.
type Ran = Result<Judging, Failed>;

enum Failed {
    Refused(String),
    Wrong(String),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        match error {
            Error::Unsupported { .. } => Self::Refused(error.to_string()),
            // The margin is all that this GPU has. A plan needs more than the limit even without cut tiles.
            Error::Value { what: "sm_margin" | "workspace_limit", .. } => Self::Refused(error.to_string()),
            _ => Self::Wrong(error.to_string()),
        }
    }
}

impl From<String> for Failed {
    fn from(why: String) -> Self {
        Self::Wrong(why)
    }
}

pub(super) struct Gpu {
    device: CudaDevice,
    default: Arc<CudaStream>,
    second: Arc<CudaStream>,
}

impl Gpu {
    pub(super) fn new(device: &CudaDevice) -> Result<Self, String> {
        // A context object of its own: what is set here is for nobody else.
        let context = CudaContext::new(device.info().ordinal).map_err(|error| error.to_string())?;
        let second = context.new_stream().map_err(|error| error.to_string())?;
        // SAFETY: every memory of this context object is allocated, used and freed on one of these two streams, and each problem
        // waits for its stream before it ends. No captured run meets an event so.
        unsafe { context.disable_event_tracking() };
        let device = CudaDevice::from_context(context).map_err(|error| error.to_string())?;
        Ok(Self { default: device.context().default_stream(), device, second })
    }

    pub(super) fn is_alive(&self) -> bool {
        self.default.synchronize().is_ok() && self.second.synchronize().is_ok()
    }

    pub(super) fn run(&mut self, problems: &[Problem]) -> Vec<Outcome> {
        let prepare = |problems: Option<&[Problem]>| -> Vec<Box<dyn Subject>> {
            problems.unwrap_or_default().par_iter().map(subject).collect()
        };
        let (mut outcomes, mut ran) = (Vec::new(), Vec::new());
        let mut rounds = problems.chunks(HELD);
        let mut round = rounds.next();
        let mut subjects = prepare(round);
        // While the GPU computes, the next inputs are made and the last results are judged.
        while let Some(problems) = round {
            let next = rounds.next();
            let last = std::mem::take(&mut ran);
            let (now, (prepared, judged)) =
                rayon::join(|| self.compute(problems, subjects), || rayon::join(|| prepare(next), || judged(last)));
            outcomes.extend(judged);
            if now.len() < problems.len() {
                // The GPU does not answer any more.
                outcomes.extend(self::judged(now));
                return outcomes;
            }
            (ran, subjects, round) = (now, prepared, next);
        }
        outcomes.extend(judged(ran));
        outcomes
    }

    /// The GPU's part. Fewer results than problems if it does not answer any more.
    fn compute(&self, problems: &[Problem], subjects: Vec<Box<dyn Subject>>) -> Vec<Ran> {
        let mut ran = Vec::with_capacity(problems.len());
        for (subject, problem) in subjects.into_iter().zip(problems) {
            let stream = if problem.launch.second_stream { &self.second } else { &self.default };
            let one = subject.run(&Lane { device: &self.device, stream, launch: problem.launch });
            let lost = matches!(one, Err(Failed::Wrong(_))) && !self.is_alive();
            ran.push(one);
            if lost {
                break;
            }
        }
        ran
    }
}

fn judged(ran: Vec<Ran>) -> Vec<Outcome> {
    let judge = |ran: Ran| match ran {
        Ok(judge) => Outcome::Judged(judge()),
        Err(Failed::Refused(why)) => Outcome::Refused(why),
        Err(Failed::Wrong(why)) => Outcome::Judged(Verdict::failed(why)),
    };
    ran.into_par_iter().map(judge).collect()
}

/// Where a problem is run, and how.
struct Lane<'a> {
    device: &'a CudaDevice,
    stream: &'a Arc<CudaStream>,
    launch: Launch,
}

impl Lane<'_> {
    fn stream(&self) -> Stream {
        Stream::Cuda(self.stream.clone())
    }

    /// A plan: of the kernel that was asked for, or the library's choice.
    fn plan<P>(
        &self,
        rows: &[KernelInfo],
        of_row: impl Fn(&KernelInfo) -> hopper_attention::Result<P>,
        chosen: impl FnOnce() -> hopper_attention::Result<P>,
    ) -> hopper_attention::Result<P> {
        let Some(number) = self.launch.kernel else { return chosen() };
        let facts = &self.device.info().facts;
        let mut plans: Vec<P> =
            rows.iter().filter(|row| row.runs_on(facts)).filter_map(|row| of_row(row).ok()).collect();
        if plans.is_empty() { chosen() } else { Ok(plans.swap_remove(usize::from(number) % plans.len())) }
    }

    /// Memory of this size, filled with the poison.
    fn scratch(&self, bytes: usize) -> Result<CudaSlice<u8>, String> {
        // A plan that needs none is lent a little, which it must leave alone.
        self.stream.clone_htod(&vec![self.launch.poison; bytes.max(16)]).map_err(|error| error.to_string())
    }

    /// Runs what `launch` enqueues, in a graph if the problem says so.
    fn launched(&self, mut launch: impl FnMut() -> hopper_attention::Result<()>) -> Result<(), Failed> {
        if !self.launch.graph {
            return Ok(launch()?);
        }
        let told = |error: hopper_attention::cudarc::driver::DriverError| Failed::Wrong(error.to_string());
        self.stream.synchronize().map_err(told)?;
        self.stream.begin_capture(MODE).map_err(told)?;
        let enqueued = launch();
        let graph = self.stream.end_capture(NO_FLAGS).map_err(told)?;
        enqueued?;
        let Some(graph) = graph else { return Err(Failed::Wrong("the capture gave no graph".into())) };
        graph.launch().map_err(told)?;
        self.stream.synchronize().map_err(told)
    }
}

/// A problem with its inputs.
trait Subject: Send {
    /// Runs it, twice where the results must have the same bits. The memory of the GPU is free again afterwards.
    fn run(self: Box<Self>, lane: &Lane<'_>) -> Ran;
}

fn subject(problem: &Problem) -> Box<dyn Subject> {
    fn of<T: Poison + OutputOf<E4M3>>(problem: &Problem) -> Box<dyn Subject> {
        match problem.pass {
            Pass::Forward => Box::new(Forward(forward::Prepared::<T>::of(&problem.case), problem.clone())),
            Pass::Backward => Box::new(Backward(backward::Prepared::<T>::of(&problem.case), problem.clone())),
            Pass::Fp8 => {
                let operands = Operands::of_case(&problem.case, &problem.forward(), problem.fp8.hadamard);
                Box::new(Fp8::<T> { expected: operands.expected(), operands, dtype: std::marker::PhantomData })
            }
            Pass::Quantize => {
                let sample = sample::<T>(problem);
                Box::new(Quantize { expected: sample.on_cpu(), sample })
            }
        }
    }
    if problem.dtype == DType::F16 { of::<f16>(problem) } else { of::<bf16>(problem) }
}

struct Forward<T>(forward::Prepared<T>, Problem);

impl<T: Poison> Subject for Forward<T> {
    fn run(self: Box<Self>, lane: &Lane<'_>) -> Ran {
        let Self(prepared, drawn) = *self;
        let problem = drawn.forward();
        let device = hopper_attention::Device::Cuda(lane.device.clone());
        let plan = lane.plan(kernels(), |row| problem.plan_with_row(lane.device, row), || problem.plan(&device))?;
        let mut scratch = lane.scratch(plan.workspace_bytes())?;
        let mut workspace = Workspace::cuda(scratch.slice_mut(..));
        let mut memory = gpu::OnDevice::new(lane.stream, &prepared);
        let mut results = Vec::new();
        for _ in 0..2 {
            memory.poison(lane.stream, &prepared);
            lane.launched(|| plan.run(&lane.stream(), &mut workspace, memory.args(&prepared)))?;
            results.push(memory.outputs(lane.stream, &prepared)?);
        }
        memory.check_inputs(lane.stream, &prepared)?;
        same(gpu::same_bits(&results[0], &results[1]))?;
        let outputs = results.swap_remove(0);
        Ok(Box::new(move || prepared.verdict(&outputs)))
    }
}

struct Backward<T>(backward::Prepared<T>, Problem);

impl<T: Poison> Subject for Backward<T> {
    fn run(self: Box<Self>, lane: &Lane<'_>) -> Ran {
        let Self(prepared, drawn) = *self;
        let problem = drawn.backward()?;
        let device = hopper_attention::Device::Cuda(lane.device.clone());
        let plan =
            lane.plan(backward_kernels(), |row| problem.plan_with_row(lane.device, row), || problem.plan(&device))?;
        let mut scratch = lane.scratch(plan.workspace_bytes())?;
        let mut workspace = Workspace::cuda(scratch.slice_mut(..));
        let mut memory = gpu::backward::OnDevice::new(lane.stream, &prepared);
        let mut results = Vec::new();
        for _ in 0..if drawn.deterministic { 2 } else { 1 } {
            memory.poison(lane.stream, &prepared);
            lane.launched(|| plan.run(&lane.stream(), &mut workspace, memory.args(&prepared)))?;
            results.push(memory.outputs(lane.stream, &prepared)?);
        }
        memory.check_inputs(lane.stream, &prepared)?;
        if let [first, second] = &results[..] {
            same(gpu::backward::same_bits(first, second) == [true; 2])?;
            same(gpu::backward::same_sums(first, second))?;
        }
        let outputs = results.swap_remove(0);
        Ok(Box::new(move || prepared.verdict(&outputs)))
    }
}

struct Fp8<O> {
    operands: Operands,
    expected: hopper_attention::reference::Expected,
    dtype: std::marker::PhantomData<O>,
}

impl<O: OutputOf<E4M3> + Element> Subject for Fp8<O> {
    fn run(self: Box<Self>, lane: &Lane<'_>) -> Ran {
        let problem = self.operands.problem();
        let device = hopper_attention::Device::Cuda(lane.device.clone());
        let plan = lane.plan(kernels(), |row| problem.plan_with_row(lane.device, row), || problem.plan(&device))?;
        let mut scratch = lane.scratch(plan.workspace_bytes())?;
        let mut workspace = Workspace::cuda(scratch.slice_mut(..));
        let memory = fp8::OnDevice::new(lane.stream, &self.operands);
        let mut outputs = fp8::Outputs::<O>::new(lane.stream, problem, None);
        let mut results = Vec::new();
        for _ in 0..2 {
            outputs.poison(lane.stream);
            lane.launched(|| plan.run(&lane.stream(), &mut workspace, memory.all_args(problem, &mut outputs)))?;
            results.push(outputs.written(lane.stream)?);
        }
        same(results[0].same_bits(&results[1]))?;
        let written = results.swap_remove(0);
        Ok(Box::new(move || {
            let (o, lse) = written.output(self.operands.problem());
            Verdict::from(&self.expected.check(&o, Some(&lse)).expect("matching shapes"))
        }))
    }
}

struct Quantize<T> {
    sample: Sample<T>,
    expected: quantize::Outcome,
}

fn sample<T: Poison>(problem: &Problem) -> Sample<T> {
    let forward = problem.forward();
    let options = Quantizer::builder(&forward, T::DTYPE);
    let options = match problem.fp8.hadamard {
        Some(seed) => options.hadamard(seed),
        None => options,
    };
    let seed = problem.case.seed;
    let kind = |i: u64| {
        let stored = match problem.case.placement {
            crate::layouts::Placement::SharedBatch | crate::layouts::Placement::SharedHeads => {
                crate::layouts::Placement::Bshd
            }
            other => other,
        };
        let like = Like::ALL[((seed >> (8 * i)) % 5) as usize];
        Some(Kind { values: problem.case.placement, stored, given: (seed >> (8 * i + 4)).is_multiple_of(2), like })
    };
    let quantizer = options.build().expect("e4m3 operands");
    let packing = problem.case.packing.clone();
    Sample::packed(quantizer, packing, [kind(0), kind(1), kind(2)], seed.is_multiple_of(3), seed)
}

impl<T: Poison> Subject for Quantize<T> {
    fn run(self: Box<Self>, lane: &Lane<'_>) -> Ran {
        let device = hopper_attention::Device::Cuda(lane.device.clone());
        let plan = self.sample.quantizer.plan(&device)?;
        let mut scratch = lane.scratch(plan.workspace_bytes())?;
        let mut workspace = Workspace::cuda(scratch.slice_mut(..));
        let mut memory = quantize::OnDevice::new(lane.stream, &self.sample);
        lane.launched(|| memory.run(lane.stream, &mut workspace, &plan, &self.sample))?;
        let outcome = memory.outcome(lane.stream);
        if outcome == self.expected {
            Ok(Box::new(Verdict::default))
        } else {
            Err(Failed::Wrong(format!("not the CPU's bytes: {}", outcome.difference(&self.expected))))
        }
    }
}

fn same(same: bool) -> Result<(), Failed> {
    if same { Ok(()) } else { Err(Failed::Wrong("a second run gave other bits".into())) }
}
