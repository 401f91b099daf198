//! Attention as an operation of candle's graph, and its gradients as another.

use std::sync::OnceLock;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor};
use hopper_attention::{Error, bf16, f16};

use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::refusal;
use crate::offsets::Packing;
use crate::problem::{Options, dims};

/// The forward pass of one call.
pub struct Attention {
    options: Options,
    wants_lse: bool,
    /// The offsets of packed sequences.
    packing: Option<Packing>,
    /// The LSE, once the forward pass has run. candle has no place for it beside the output.
    lse: OnceLock<Tensor>,
}

impl Attention {
    pub fn new(options: &Options, wants_lse: bool, packing: Option<Packing>) -> Self {
        Self { options: options.clone(), wants_lse, packing, lse: OnceLock::new() }
    }

    /// The LSE, after a forward pass that wanted it.
    pub fn into_lse(self) -> Result<Tensor> {
        self.lse.into_inner().ok_or_else(|| missing("lse"))
    }

    fn keep(&self, lse: Option<Storage>, shape: [usize; 3]) {
        if let Some(lse) = lse {
            // An operation runs once. If it ran again, for the same tensors, it would have the same LSE.
            let _ = self.lse.set(tensor(lse, dims(&shape, self.packing.is_some())));
        }
    }
}

/// Calls a function for the type of the elements. The problem has refused other types.
macro_rules! by_type {
    ($dtype:expr, $($function:ident)::+ ($($argument:expr),*)) => {
        match $dtype {
            DType::F16 => $($function)::+::<f16>($($argument),*),
            DType::BF16 => $($function)::+::<bf16>($($argument),*),
            _ => $($function)::+::<f32>($($argument),*),
        }
    };
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "hopper-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        of_q: &Layout,
        k: &CpuStorage,
        of_k: &Layout,
        v: &CpuStorage,
        of_v: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (qkv, packing) = ([(q, of_q), (k, of_k), (v, of_v)], self.packing.as_ref());
        let problem = self.options.forward(q.dtype(), [of_q, of_k, of_v], self.wants_lse, packing)?;
        let (o, lse) = by_type!(q.dtype(), cpu::forward(&problem, packing, qkv))?;
        self.keep(lse.map(Storage::Cpu), problem.lse_shape());
        Ok((o, dims(&problem.o_shape(), packing.is_some()).into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        of_q: &Layout,
        k: &CudaStorage,
        of_k: &Layout,
        v: &CudaStorage,
        of_v: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (qkv, packing) = ([(q, of_q), (k, of_k), (v, of_v)], self.packing.as_ref());
        let problem = self.options.forward(q.dtype(), [of_q, of_k, of_v], self.wants_lse, packing)?;
        let (o, lse) = by_type!(q.dtype(), cuda::forward(&problem, packing, qkv))?;
        self.keep(lse.map(Storage::Cuda), problem.lse_shape());
        Ok((o, dims(&problem.o_shape(), packing.is_some()).into()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        o: &Tensor,
        d_o: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        // candle detaches gradients, unless the variable CANDLE_GRAD_DO_NOT_DETACH asks for gradients of gradients.
        if d_o.track_op() {
            return Err(refusal(Error::Unsupported {
                wanted: "a gradient of a gradient (CANDLE_GRAD_DO_NOT_DETACH is set)".into(),
                nearest: "first derivatives".into(),
            }));
        }
        let lse = self.lse.get().ok_or_else(|| missing("lse"))?;
        let d_o = d_o.contiguous()?; // a copy only where strides of 0 repeat the gradient of a sum
        let packing = self.packing.as_ref();
        let gradients = Gradients { options: &self.options, packing, o, lse, d_o: &d_o, rest: OnceLock::new() };
        // As an operation on Q, K and V, which may share their memory: candle then locks it once for all of them.
        let d_q = q.apply_op3_no_bwd(k, v, &gradients)?;
        let [d_k, d_v] = gradients.rest.into_inner().ok_or_else(|| missing("d_k and d_v"))?;
        Ok((Some(d_q), Some(d_k), Some(d_v)))
    }
}

/// The backward pass of one call: an operation on Q, K and V whose output is dQ.
struct Gradients<'a> {
    options: &'a Options,
    packing: Option<&'a Packing>,
    o: &'a Tensor,
    lse: &'a Tensor,
    d_o: &'a Tensor,
    /// dK and dV, once it has run.
    rest: OnceLock<[Tensor; 2]>,
}

impl Gradients<'_> {
    fn keep(&self, rest: [(Storage, [usize; 4]); 2]) {
        // It runs once.
        let _ = self.rest.set(rest.map(|(storage, shape)| tensor(storage, dims(&shape, self.packing.is_some()))));
    }
}

impl CustomOp3 for Gradients<'_> {
    fn name(&self) -> &'static str {
        "hopper-attention, gradients"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        of_q: &Layout,
        k: &CpuStorage,
        of_k: &Layout,
        v: &CpuStorage,
        of_v: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let problem = self.options.backward(q.dtype(), [of_q, of_k, of_v], self.packing)?;
        let (o, lse, d_o) = (self.o.storage_and_layout(), self.lse.storage_and_layout(), self.d_o.storage_and_layout());
        let (Storage::Cpu(o_memory), Storage::Cpu(lse), Storage::Cpu(d_o_memory)) = (&*o.0, &*lse.0, &*d_o.0) else {
            return Err(elsewhere("cpu"));
        };
        let qkv = [(q, of_q), (k, of_k), (v, of_v)];
        let (o, d_o) = ((o_memory, o.1), (d_o_memory, d_o.1));
        let [d_q, d_k, d_v] = by_type!(q.dtype(), cpu::backward(&problem, self.packing, qkv, o, lse, d_o))?;
        self.keep([(Storage::Cpu(d_k), problem.d_k_shape()), (Storage::Cpu(d_v), problem.d_v_shape())]);
        Ok((d_q, dims(&problem.d_q_shape(), self.packing.is_some()).into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        of_q: &Layout,
        k: &CudaStorage,
        of_k: &Layout,
        v: &CudaStorage,
        of_v: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let problem = self.options.backward(q.dtype(), [of_q, of_k, of_v], self.packing)?;
        let (o, lse, d_o) = (self.o.storage_and_layout(), self.lse.storage_and_layout(), self.d_o.storage_and_layout());
        let (Storage::Cuda(o_memory), Storage::Cuda(lse), Storage::Cuda(d_o_memory)) = (&*o.0, &*lse.0, &*d_o.0) else {
            return Err(elsewhere("a GPU"));
        };
        let qkv = [(q, of_q), (k, of_k), (v, of_v)];
        let (o, d_o) = ((o_memory, o.1), (d_o_memory, d_o.1));
        let [d_q, d_k, d_v] = by_type!(q.dtype(), cuda::backward(&problem, self.packing, qkv, o, lse, d_o))?;
        self.keep([(Storage::Cuda(d_k), problem.d_k_shape()), (Storage::Cuda(d_v), problem.d_v_shape())]);
        Ok((d_q, dims(&problem.d_q_shape(), self.packing.is_some()).into()))
    }
}

/// A tensor without gaps that is no part of a graph.
fn tensor(storage: Storage, shape: &[usize]) -> Tensor {
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}

/// The error for what a pass has not left. No pass of this crate does so.
fn missing(what: &'static str) -> candle_core::Error {
    let (got, allowed) = ("missing".into(), "gradients after a forward pass that kept the LSE".into());
    refusal(Error::Value { what, got, allowed })
}

fn elsewhere(allowed: &str) -> candle_core::Error {
    refusal(Error::Device {
        what: "o, lse and d_o",
        got: "another device".into(),
        allowed: format!("{allowed}, as q, k and v"),
    })
}
