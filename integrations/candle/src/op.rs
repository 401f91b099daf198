//! Attention as an operation of candle's graph, and its gradients as another.

use std::sync::OnceLock;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor};
use hopper_attention::{BackwardProblem, Error, bf16, f16};

use crate::alibi;
use crate::blocks::{BlockLists, Lists};
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{missing, refusal};
use crate::offsets::{Packing, is_packed};
use crate::problem::{Beside, Options, dims};
use crate::sinks::Sinks;

/// The forward pass of one call.
pub struct Attention {
    options: Options,
    wants_lse: bool,
    /// The offsets of packed sequences.
    packing: Option<Packing>,
    /// The sinks. The second tensor of the operation is then their knot, in the place of K.
    sinks: Option<Sinks>,
    /// ALiBi's slopes, in f32 without gaps.
    slopes: Option<Tensor>,
    /// A block-sparse mask.
    blocks: Option<BlockLists>,
    /// The LSE, once the forward pass has run. candle has no place for it beside the output.
    lse: OnceLock<Tensor>,
}

impl Attention {
    pub fn new(options: &Options, wants_lse: bool, packing: Option<Packing>) -> Self {
        let options = options.clone();
        Self { options, wants_lse, packing, sinks: None, slopes: None, blocks: None, lse: OnceLock::new() }
    }

    /// With sinks, whose knot then stands in the place of K.
    pub fn with_sinks(self, sinks: Sinks) -> Self {
        Self { sinks: Some(sinks), ..self }
    }

    /// With ALiBi, if there are slopes.
    pub fn with_slopes(self, slopes: Option<Tensor>) -> Self {
        Self { slopes, ..self }
    }

    /// With a block-sparse mask, if there is one.
    pub fn with_blocks(self, blocks: Option<BlockLists>) -> Self {
        Self { blocks, ..self }
    }

    fn beside(&self) -> Beside {
        beside(self.sinks.as_ref(), self.slopes.as_ref(), self.blocks.as_ref())
    }

    fn lists(&self) -> Lists<'_> {
        let (packing, blocks) = (self.packing.as_ref(), self.blocks.as_ref());
        Lists { packing, blocks, dropout_state: self.options.dropout_state() }
    }

    /// The LSE, after a forward pass that wanted it.
    pub fn into_lse(self) -> Result<Tensor> {
        self.lse.into_inner().ok_or_else(|| missing("lse"))
    }

    fn keep(&self, lse: Option<Storage>, shape: [usize; 3]) {
        if let Some(lse) = lse {
            // An operation runs once. If it ran again, for the same tensors, it would have the same LSE.
            let _ = self.lse.set(tensor(lse, dims(&shape, is_packed(self.packing.as_ref())[0])));
        }
    }
}

/// Computes an expression with a tensor's memory of one kind, `Cpu` or `Cuda`, and its layout: `None` without the tensor. The
/// memory is locked meanwhile.
macro_rules! with_memory {
    ($tensor:expr, $kind:ident, $given:ident => $body:expr) => {
        match $tensor.map(Tensor::storage_and_layout) {
            None => {
                let $given = None;
                $body
            }
            Some((storage, layout)) => match &*storage {
                Storage::$kind(memory) => {
                    let $given = Some((memory, layout));
                    $body
                }
                _ => Err(elsewhere()),
            },
        }
    };
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
        let (packing, sinks) = (self.packing.as_ref(), self.sinks.as_ref());
        with_memory!(sinks.map(|sinks| &sinks.k), Cpu, held => {
            let (k, of_k) = held.unwrap_or((k, of_k));
            let logits = sinks.map(|sinks| &sinks.logits);
            let (beside, lists) = (self.beside(), self.lists());
            let problem = self.options.forward(q.dtype(), [of_q, of_k, of_v], beside, self.wants_lse, packing)?;
            let qkv = [(q, of_q), (k, of_k), (v, of_v)];
            let (o, lse) = with_memory!(logits, Cpu, logits => {
                with_memory!(self.slopes.as_ref(), Cpu, slopes => {
                    by_type!(q.dtype(), cpu::forward(&problem, lists, qkv, [logits, slopes]))
                })
            })?;
            self.keep(lse.map(Storage::Cpu), problem.lse_shape());
            Ok((o, dims(&problem.o_shape(), is_packed(packing)[0]).into()))
        })
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
        let (packing, sinks) = (self.packing.as_ref(), self.sinks.as_ref());
        with_memory!(sinks.map(|sinks| &sinks.k), Cuda, held => {
            let (k, of_k) = held.unwrap_or((k, of_k));
            let logits = sinks.map(|sinks| &sinks.logits);
            let (beside, lists) = (self.beside(), self.lists());
            let problem = self.options.forward(q.dtype(), [of_q, of_k, of_v], beside, self.wants_lse, packing)?;
            let qkv = [(q, of_q), (k, of_k), (v, of_v)];
            let (o, lse) = with_memory!(logits, Cuda, logits => {
                with_memory!(self.slopes.as_ref(), Cuda, slopes => {
                    by_type!(q.dtype(), cuda::forward(&problem, lists, qkv, [logits, slopes]))
                })
            })?;
            self.keep(lse.map(Storage::Cuda), problem.lse_shape());
            Ok((o, dims(&problem.o_shape(), is_packed(packing)[0]).into()))
        })
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
        let sinks = self.sinks.as_ref();
        let (options, slopes, rest) = (&self.options, self.slopes.as_ref(), OnceLock::new());
        let lists = self.lists();
        let gradients = Gradients { options, lists, sinks, slopes, o, lse, d_o: &d_o, rest };
        // As an operation on Q, K and V, which may share their memory: candle then locks it once for all of them.
        let d_q = q.apply_op3_no_bwd(sinks.map_or(k, |sinks| &sinks.k), v, &gradients)?;
        let Rest { d_k, d_v, d_sinks } = gradients.rest.into_inner().ok_or_else(|| missing("d_k and d_v"))?;
        let second = match sinks {
            None => Some(d_k),
            // Neither K nor the sinks want a gradient.
            Some(_) if !k.track_op() => None,
            Some(sinks) => Some(sinks.leave(k, d_k, d_sinks)?),
        };
        Ok((Some(d_q), second, Some(d_v)))
    }
}

/// The backward pass of one call: an operation on Q, K and V whose output is dQ.
struct Gradients<'a> {
    options: &'a Options,
    lists: Lists<'a>,
    sinks: Option<&'a Sinks>,
    slopes: Option<&'a Tensor>,
    o: &'a Tensor,
    lse: &'a Tensor,
    d_o: &'a Tensor,
    /// The other gradients, once it has run.
    rest: OnceLock<Rest>,
}

/// The gradients beside dQ.
struct Rest {
    d_k: Tensor,
    d_v: Tensor,
    /// In f32.
    d_sinks: Option<Tensor>,
}

impl Gradients<'_> {
    fn problem(&self, dtype: DType, qkv: [&Layout; 3]) -> Result<BackwardProblem> {
        let wants_d_sinks = self.sinks.is_some_and(|sinks| sinks.has_gradient);
        let beside = beside(self.sinks, self.slopes, self.lists.blocks);
        self.options.backward(dtype, qkv, beside, wants_d_sinks, self.lists.packing)
    }

    fn keep(&self, problem: &BackwardProblem, [d_k, d_v]: [Storage; 2], d_sinks: Option<Storage>) {
        let [_, is_packed] = is_packed(self.lists.packing);
        let d_k = tensor(d_k, dims(&problem.d_k_shape(), is_packed));
        let d_v = tensor(d_v, dims(&problem.d_v_shape(), is_packed));
        let d_sinks = d_sinks.map(|d_sinks| tensor(d_sinks, &[problem.dims().heads_q]));
        // It runs once.
        let _ = self.rest.set(Rest { d_k, d_v, d_sinks });
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
        let problem = self.problem(q.dtype(), [of_q, of_k, of_v])?;
        let (o, lse, d_o) = (self.o.storage_and_layout(), self.lse.storage_and_layout(), self.d_o.storage_and_layout());
        let (Storage::Cpu(o_memory), Storage::Cpu(lse), Storage::Cpu(d_o_memory)) = (&*o.0, &*lse.0, &*d_o.0) else {
            return Err(elsewhere());
        };
        let qkv = [(q, of_q), (k, of_k), (v, of_v)];
        let (o, d_o) = ((o_memory, o.1), (d_o_memory, d_o.1));
        let logits = self.sinks.map(|sinks| &sinks.logits);
        let ([d_q, d_k, d_v], d_sinks) = with_memory!(logits, Cpu, logits => {
            with_memory!(self.slopes, Cpu, slopes => {
                by_type!(q.dtype(), cpu::backward(&problem, self.lists, qkv, [logits, slopes], o, lse, d_o))
            })
        })?;
        self.keep(&problem, [d_k, d_v].map(Storage::Cpu), d_sinks.map(Storage::Cpu));
        Ok((d_q, dims(&problem.d_q_shape(), is_packed(self.lists.packing)[0]).into()))
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
        let problem = self.problem(q.dtype(), [of_q, of_k, of_v])?;
        let (o, lse, d_o) = (self.o.storage_and_layout(), self.lse.storage_and_layout(), self.d_o.storage_and_layout());
        let (Storage::Cuda(o_memory), Storage::Cuda(lse), Storage::Cuda(d_o_memory)) = (&*o.0, &*lse.0, &*d_o.0) else {
            return Err(elsewhere());
        };
        let qkv = [(q, of_q), (k, of_k), (v, of_v)];
        let (o, d_o) = ((o_memory, o.1), (d_o_memory, d_o.1));
        let logits = self.sinks.map(|sinks| &sinks.logits);
        let ([d_q, d_k, d_v], d_sinks) = with_memory!(logits, Cuda, logits => {
            with_memory!(self.slopes, Cuda, slopes => {
                by_type!(q.dtype(), cuda::backward(&problem, self.lists, qkv, [logits, slopes], o, lse, d_o))
            })
        })?;
        self.keep(&problem, [d_k, d_v].map(Storage::Cuda), d_sinks.map(Storage::Cuda));
        Ok((d_q, dims(&problem.d_q_shape(), is_packed(self.lists.packing)[0]).into()))
    }
}

/// What a problem with these has beside its tensors.
fn beside(sinks: Option<&Sinks>, slopes: Option<&Tensor>, blocks: Option<&BlockLists>) -> Beside {
    let sinks = sinks.map(|sinks| sinks.logits.dtype());
    Beside { sinks, alibi: slopes.map(alibi::option), blocks: blocks.map(BlockLists::option) }
}

/// A tensor without gaps that is no part of a graph.
fn tensor(storage: Storage, shape: &[usize]) -> Tensor {
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}

/// The error for tensors of one call on several devices. candle has compared those of Q, K and V.
fn elsewhere() -> candle_core::Error {
    let (got, allowed) = ("another device".into(), "the device of q, k and v".into());
    refusal(Error::Device { what: "o, lse, d_o, sinks and alibi_slopes", got, allowed })
}
