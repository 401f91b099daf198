//! Attention as an operation of candle's graph, and its gradients as another.

use std::sync::OnceLock;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor};
use hopper_attention::{BackwardProblem, Error};

use crate::alibi;
use crate::blocks::{BlockLists, Lists};
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{missing, refusal};
use crate::knot::{Held, Operand};
use crate::offsets::{Packing, is_packed};
use crate::problem::{Beside, Options, bias_form, by_type, dims};

/// The forward pass of one call.
pub struct Attention {
    options: Options,
    wants_lse: bool,
    /// The offsets of packed sequences.
    packing: Option<Packing>,
    /// K, the sinks and the bias, if there is one of the last two. The second tensor of the operation is then their
    /// knot, in the place of K.
    held: Option<Held>,
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
        Self { options, wants_lse, packing, held: None, slopes: None, blocks: None, lse: OnceLock::new() }
    }

    /// With sinks or a bias, whose knot then stands in the place of K.
    pub fn with_held(self, held: Held) -> Self {
        Self { held: Some(held), ..self }
    }

    /// With ALiBi, if there are slopes.
    pub fn with_slopes(self, slopes: Option<Tensor>) -> Self {
        Self { slopes, ..self }
    }

    /// With a block-sparse mask, if there is one.
    pub fn with_blocks(self, blocks: Option<BlockLists>) -> Self {
        Self { blocks, ..self }
    }

    fn given(&self) -> Given<'_> {
        let (packing, blocks) = (self.packing.as_ref(), self.blocks.as_ref());
        let lists = Lists { packing, blocks, dropout_state: self.options.dropout_state() };
        Given { options: &self.options, lists, held: self.held.as_ref(), slopes: self.slopes.as_ref() }
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

/// What both passes have beside Q, K and V.
#[derive(Clone, Copy)]
struct Given<'a> {
    options: &'a Options,
    lists: Lists<'a>,
    held: Option<&'a Held>,
    slopes: Option<&'a Tensor>,
}

impl<'a> Given<'a> {
    fn sinks(self) -> Option<&'a Operand> {
        self.held.and_then(|held| held.sinks.as_ref())
    }

    fn bias(self) -> Option<&'a Operand> {
        self.held.and_then(|held| held.bias.as_ref())
    }

    /// The tensors that a run reads beside Q, K and V: the sinks, ALiBi's slopes and the bias.
    fn others(self) -> [Option<&'a Tensor>; 3] {
        let tensor = |operand: &'a Operand| &operand.tensor;
        [self.sinks().map(tensor), self.slopes, self.bias().map(tensor)]
    }

    /// What the problem has beside its tensors.
    fn beside(self) -> Result<Beside> {
        let [sinks, slopes, bias] = self.others();
        Ok(Beside {
            sinks: sinks.map(Tensor::dtype),
            alibi: slopes.map(alibi::option),
            bias: bias.map(|bias| bias_form(bias, self.lists.packing)).transpose()?,
            blocks: self.lists.blocks.map(BlockLists::option),
        })
    }
}

/// The memory of one kind, `Cpu` or `Cuda`, and the layout of an optional tensor that `storage_and_layout` has locked.
/// Returns an error from the function around it where the memory is of another kind.
macro_rules! memory {
    ($locked:expr, $kind:ident) => {
        match &$locked {
            None => None,
            Some((storage, layout)) => match &**storage {
                Storage::$kind(memory) => Some((memory, *layout)),
                _ => return Err(elsewhere()),
            },
        }
    };
}

/// The body of the forward pass for one kind of memory, with the module of that kind. One text for both, so that they
/// stay the same.
macro_rules! forward {
    ($op:expr, $kind:ident, $module:ident, [$q:expr, $k:expr, $v:expr]) => {{
        let (op, given) = ($op, $op.given());
        let held = given.held.map(|held| held.k.storage_and_layout());
        let [sinks, slopes, bias] = given.others().map(|other| other.map(Tensor::storage_and_layout));
        let others = [memory!(sinks, $kind), memory!(slopes, $kind), memory!(bias, $kind)];
        let qkv = [$q, memory!(held, $kind).unwrap_or($k), $v];
        let (dtype, layouts) = (qkv[0].0.dtype(), qkv.map(|(_, layout)| layout));
        let problem = op.options.forward(dtype, layouts, given.beside()?, op.wants_lse, given.lists.packing)?;
        let (o, lse) = by_type!(dtype, $module::forward(&problem, given.lists, qkv, others))?;
        op.keep(lse.map(Storage::$kind), problem.lse_shape());
        Ok((o, dims(&problem.o_shape(), is_packed(given.lists.packing)[0]).into()))
    }};
}

/// The body of the backward pass for one kind of memory, as [`forward`].
macro_rules! backward {
    ($op:expr, $kind:ident, $module:ident, $qkv:expr) => {{
        let (op, given, qkv) = ($op, $op.given, $qkv);
        let [o, lse, d_o] = [op.o, op.lse, op.d_o].map(|tensor| Some(tensor.storage_and_layout()));
        let [sinks, slopes, bias] = given.others().map(|other| other.map(Tensor::storage_and_layout));
        let others = [memory!(sinks, $kind), memory!(slopes, $kind), memory!(bias, $kind)];
        let (Some(o), Some((lse, _)), Some(d_o)) = (memory!(o, $kind), memory!(lse, $kind), memory!(d_o, $kind)) else {
            return Err(missing("o, lse and d_o"));
        };
        let dtype = qkv[0].0.dtype();
        let problem = op.problem(dtype, qkv.map(|(_, layout)| layout))?;
        let ([d_q, d_k, d_v], others) =
            by_type!(dtype, $module::backward(&problem, given.lists, qkv, others, o, lse, d_o))?;
        op.keep(&problem, [d_k, d_v].map(Storage::$kind), others.map(|gradient| gradient.map(Storage::$kind)));
        Ok((d_q, dims(&problem.d_q_shape(), is_packed(given.lists.packing)[0]).into()))
    }};
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
        forward!(self, Cpu, cpu, [(q, of_q), (k, of_k), (v, of_v)])
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
        forward!(self, Cuda, cuda, [(q, of_q), (k, of_k), (v, of_v)])
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
        let held = self.held.as_ref();
        let gradients = Gradients { given: self.given(), o, lse, d_o: &d_o, rest: OnceLock::new() };
        // As an operation on Q, K and V, which may share their memory: candle then locks it once for all of them.
        let d_q = q.apply_op3_no_bwd(held.map_or(k, |held| &held.k), v, &gradients)?;
        let Rest { d_k, d_v, d_sinks, d_bias } = gradients.rest.into_inner().ok_or_else(|| missing("d_k and d_v"))?;
        let second = match held {
            None => Some(d_k),
            // Neither K, nor the sinks, nor the bias want a gradient.
            Some(_) if !k.track_op() => None,
            Some(held) => Some(held.leave(k, (d_k, d_sinks, d_bias))?),
        };
        Ok((Some(d_q), second, Some(d_v)))
    }
}

/// The backward pass of one call: an operation on Q, K and V whose output is dQ.
struct Gradients<'a> {
    given: Given<'a>,
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
    /// In the type of the bias.
    d_bias: Option<Tensor>,
}

impl Gradients<'_> {
    fn problem(&self, dtype: DType, qkv: [&Layout; 3]) -> Result<BackwardProblem> {
        let Given { options, lists, .. } = self.given;
        let wanted = [self.given.sinks(), self.given.bias()].map(|of| of.is_some_and(|of| of.has_gradient));
        options.backward(dtype, qkv, self.given.beside()?, wanted, lists.packing)
    }

    fn keep(&self, problem: &BackwardProblem, [d_k, d_v]: [Storage; 2], [d_sinks, d_bias]: [Option<Storage>; 2]) {
        let [_, is_packed] = is_packed(self.given.lists.packing);
        let d_k = tensor(d_k, dims(&problem.d_k_shape(), is_packed));
        let d_v = tensor(d_v, dims(&problem.d_v_shape(), is_packed));
        let d_sinks = d_sinks.map(|d_sinks| tensor(d_sinks, &[problem.dims().heads_q]));
        let d_bias = d_bias.map(|d_bias| tensor(d_bias, &problem.forward().bias_shape()));
        // It runs once.
        let _ = self.rest.set(Rest { d_k, d_v, d_sinks, d_bias });
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
        backward!(self, Cpu, cpu, [(q, of_q), (k, of_k), (v, of_v)])
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
        backward!(self, Cuda, cuda, [(q, of_q), (k, of_k), (v, of_v)])
    }
}

/// A tensor without gaps that is no part of a graph.
fn tensor(storage: Storage, shape: &[usize]) -> Tensor {
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}

/// The error for tensors of one call on several devices. candle has compared those of Q, K and V.
fn elsewhere() -> candle_core::Error {
    let (got, allowed) = ("another device".into(), "the device of q, k and v".into());
    refusal(Error::Device { what: "o, lse, d_o, sinks, alibi_slopes and bias", got, allowed })
}
