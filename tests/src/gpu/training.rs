//! The library's attention on the GPU, for models that learn with it.

use hopper_attention::cudarc::driver::CudaSlice;
use hopper_attention::{BackwardProblem, DType, Device, ForwardArgs, ForwardProblem, Result, Workspace, bf16};

use crate::gpu::{Gpu, dense, whole, whole_mut};
use crate::training::{Attention, Setup, floats, halves};

/// Ours in bf16 on the GPU.
pub struct OnGpu<'a> {
    gpu: &'a Gpu,
    problem: ForwardProblem,
}

impl<'a> OnGpu<'a> {
    /// Of a setup.
    ///
    /// # Errors
    /// As [`ForwardProblemBuilder::build`](hopper_attention::ForwardProblemBuilder::build).
    pub fn new(gpu: &'a Gpu, setup: &Setup) -> Result<Self> {
        Ok(Self { gpu, problem: setup.problem(DType::BF16)? })
    }

    fn up(&self, data: &[f32]) -> CudaSlice<bf16> {
        self.gpu.stream.clone_htod(&halves(data)).expect("device memory")
    }

    fn poisoned(&self, shape: [usize; 4]) -> CudaSlice<bf16> {
        self.gpu.stream.clone_htod(&vec![bf16::NAN; shape.iter().product()]).expect("device memory")
    }

    fn down(&self, slice: &CudaSlice<bf16>) -> Vec<f32> {
        floats(&self.gpu.stream.clone_dtoh(slice).expect("a copy"))
    }
}

impl Attention for OnGpu<'_> {
    fn forward(&mut self, q: &[f32], k: &[f32], v: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let (problem, stream) = (&self.problem, self.gpu.lane());
        let plan = problem.plan(&Device::Cuda(self.gpu.device.clone()))?;
        let mut workspace = Workspace::alloc(&stream, plan.workspace_bytes())?;
        let [q, k, v] = [q, k, v].map(|x| self.up(x));
        let mut o = self.poisoned(problem.o_shape());
        let nothing = vec![f32::NAN; problem.lse_shape().iter().product()];
        let mut lse = self.gpu.stream.clone_htod(&nothing).expect("device memory");
        let args = ForwardArgs::new(
            whole(&q, problem.q_shape())?,
            whole(&k, problem.k_shape())?,
            whole(&v, problem.v_shape())?,
            whole_mut(&mut o, problem.o_shape())?,
        );
        plan.run(&stream, &mut workspace, args.lse(whole_mut(&mut lse, problem.lse_shape())?))?;
        Ok((self.down(&o), self.gpu.stream.clone_dtoh(&lse).expect("a copy")))
    }

    fn backward(&mut self, inputs: [&[f32]; 3], o: &[f32], lse: &[f32], d_o: &[f32]) -> Result<[Vec<f32>; 3]> {
        let (forward, stream) = (&self.problem, self.gpu.lane());
        let problem = BackwardProblem::builder(forward).build()?;
        let plan = problem.plan(&Device::Cuda(self.gpu.device.clone()))?;
        let mut workspace = Workspace::alloc(&stream, plan.workspace_bytes())?;
        let ([q, k, v], o, d_o) = (inputs.map(|x| self.up(x)), self.up(o), self.up(d_o));
        let lse = self.gpu.stream.clone_htod(lse).expect("device memory");
        let [mut d_q, mut d_k, mut d_v] =
            [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()].map(|shape| self.poisoned(shape));
        plan.run(
            &stream,
            &mut workspace,
            dense(&problem, [&q, &k, &v, &o, &d_o], &lse, [&mut d_q, &mut d_k, &mut d_v])?,
        )?;
        Ok([&d_q, &d_k, &d_v].map(|x| self.down(x)))
    }
}
