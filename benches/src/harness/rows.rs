//! The kernels of this build against each other, each through a plan of its own: what `hattn tune` measures.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use hopper_attention::cudarc::driver::CudaSlice;
use hopper_attention::{
    Args, Float, ForwardPlan, KernelInfo, Layout, Slot, Stream, TensorMut, TensorRef, Workspace, kernels,
};

use super::contest::{Contestant, Contestants, Outputs, Place, Pool, Refusal, Task};
use super::cuda::Cuda;
use super::events::EventClock;
use super::{Event, Harness, Job, Sink, turns};
use crate::Role;

/// Every kernel of this build on one GPU. A run is called what the kernel prints; a kernel that does not compute a point
/// is unsupported there.
pub struct Rows(Cuda);

impl Rows {
    /// On the GPU of this harness.
    pub fn new(gpu: Cuda) -> Self {
        Self(gpu)
    }
}

impl Harness for Rows {
    fn name(&self) -> &'static str {
        "rows"
    }

    fn run(&mut self, job: &Job, sink: Sink<'_>) -> Result<()> {
        turns::sixteen_bits(job)?;
        sink(Event::Ready(self.0.ready(job, vec![], vec![])))?;
        turns::run(self, job, sink)
    }
}

impl Place for Rows {
    type Clock = EventClock;

    fn clock(&self) -> Result<EventClock> {
        self.0.clock()
    }

    fn forwards<'a, T: Float>(&'a self, pool: &'a Pool<T>) -> Result<Contestants<'a, T>> {
        let inputs = self.0.upload(pool)?;
        let rows = kernels().iter().filter(|row| row.dtype() == T::DTYPE);
        let contestant = |row: &'a KernelInfo| {
            let inputs = inputs.clone();
            Box::new(Row { gpu: &self.0, name: row.to_string(), row, inputs, ready: None }) as Box<dyn Contestant<T>>
        };
        Ok(rows.map(contestant).collect())
    }

    /// None: a tuning holds forwards alone, and `hattn tune` refuses the others.
    fn backwards<'a, T: Float>(&'a self, _: &'a Pool<T>) -> Result<Contestants<'a, T>> {
        Ok(vec![])
    }
}

struct Row<'a, T> {
    gpu: &'a Cuda,
    name: String,
    row: &'a KernelInfo,
    inputs: Arc<Vec<CudaSlice<T>>>,
    ready: Option<Prepared<T>>,
}

/// For one point.
struct Prepared<T> {
    plan: ForwardPlan,
    workspace: Workspace<'static>,
    /// ALiBi's slopes and the state of dropout, where the point has them.
    slopes: Option<CudaSlice<f32>>,
    state: Option<CudaSlice<i32>>,
    o: CudaSlice<T>,
    lse: CudaSlice<f32>,
}

impl<T: Float> Contestant<T> for Row<'_, T> {
    fn name(&self) -> &str {
        &self.name
    }

    fn role(&self) -> Role {
        Role::Ours
    }

    fn prepare(&mut self, task: &Task<'_, T>) -> Result<(), Refusal> {
        self.ready = None; // a kernel that does not compute this point holds no memory
        let (stream, driver) = (self.gpu.stream(), anyhow::Error::from);
        let plan = task.point.problem()?.plan_with_row(self.gpu.device(), self.row)?;
        self.ready = Some(Prepared {
            workspace: Workspace::alloc(&Stream::Cuda(stream.clone()), plan.workspace_bytes())?,
            slopes: task.point.slopes().map(|slopes| stream.clone_htod(&slopes)).transpose().map_err(driver)?,
            state: task.point.dropout_state().map(|state| stream.clone_htod(&state)).transpose().map_err(driver)?,
            o: stream.clone_htod(&vec![T::from_f32(f32::NAN); task.o.span()]).map_err(driver)?,
            lse: stream.clone_htod(&vec![f32::NAN; task.lse.span()]).map_err(driver)?,
            plan,
        });
        Ok(())
    }

    fn call(&mut self, task: &Task<'_, T>) -> Result<(), Refusal> {
        let Prepared { plan, workspace, slopes, state, o, lse } = self.ready.as_mut().context("not prepared")?;
        let [q, k, v] = [0, 1, 2].map(|i| self.inputs[i].as_view());
        let args = match slopes {
            Some(slopes) => {
                let at = Layout::contiguous([slopes.len()])?;
                Args::new().read(Slot::AlibiSlopes, TensorRef::cuda(slopes.as_view(), at)?)
            }
            None => Args::new(),
        };
        let args = match state {
            Some(state) => {
                args.read(Slot::DropoutState, TensorRef::cuda(state.as_view(), Layout::contiguous([state.len()])?)?)
            }
            None => args,
        };
        let args = args
            .read(Slot::Q, TensorRef::cuda(q, task.q)?)
            .read(Slot::K, TensorRef::cuda(k, task.k)?)
            .read(Slot::V, TensorRef::cuda(v, task.v)?)
            .write(Slot::O, TensorMut::cuda(o.as_view_mut(), task.o)?)
            .write(Slot::Lse, TensorMut::cuda(lse.as_view_mut(), task.lse)?);
        Ok(plan.run(&Stream::Cuda(self.gpu.stream().clone()), workspace, args)?)
    }

    fn outputs(&mut self) -> Result<Outputs<T>> {
        let Prepared { o, lse, .. } = self.ready.as_ref().context("not prepared")?;
        let stream = self.gpu.stream();
        Ok(Outputs { tensors: vec![stream.clone_dtoh(o)?], lse: stream.clone_dtoh(lse)?, d_bias: None })
    }
}
