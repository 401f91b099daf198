//! Attention sinks in candle's graph.
//!
//! An operation of candle's has three tensors at most, and Q, K and V are three. So K and the sinks meet in an operation of
//! their own. Its output, the *knot*, has one element, and stands where K does in the graph:
//!
//! ```text
//! forward     k, sinks -> knot        q, knot, v -> O        (the attention holds k and the sinks itself)
//! backward    dO -> dQ, dKnot, dV     dKnot -> dK, dSinks
//! ```
//!
//! The gradient of the knot says nothing. The backward pass of the attention leaves dK and dSinks with the knot's operation.
//! Nothing as large as K is copied.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use hopper_attention::Error;

use crate::error::{missing, refusal};

/// What an attention with sinks holds beside its place in the graph.
pub struct Sinks {
    /// The keys.
    pub k: Tensor,
    /// One logit for each query head: one dimension without gaps.
    pub logits: Tensor,
    /// Whether the gradient of the sinks is asked for.
    pub has_gradient: bool,
    left: Left,
}

/// dK and dSinks, by the thread that computes gradients: candle computes those of one graph on one thread, and another thread
/// may compute other gradients of the same graph.
type Left = Arc<Mutex<HashMap<ThreadId, (Tensor, Option<Tensor>)>>>;

impl Sinks {
    /// Takes the sinks, and ties the knot.
    ///
    /// # Errors
    /// The sinks do not have one dimension, or are on another device than K.
    pub fn new(k: &Tensor, sinks: &Tensor) -> Result<(Self, Tensor)> {
        if sinks.dims().len() != 1 {
            let got = format!("{} dimensions, {:?}", sinks.dims().len(), sinks.dims());
            return Err(refusal(Error::Value { what: "sinks", got, allowed: "1, [heads_q]".into() }));
        }
        if !sinks.device().same_device(k.device()) {
            let (got, allowed) = ("another device".into(), "the device of q, k and v".into());
            return Err(refusal(Error::Device { what: "sinks", got, allowed }));
        }
        let (sinks, left) = (sinks.contiguous()?, Left::default());
        let knot = k.apply_op2(&sinks, Knot(left.clone()))?;
        let has_gradient = sinks.track_op();
        Ok((Self { k: k.detach(), logits: sinks.detach(), has_gradient, left }, knot))
    }

    /// Leaves the gradients of K and of the sinks with the knot, and returns the knot's own.
    pub fn leave(&self, knot: &Tensor, d_k: Tensor, d_sinks: Option<Tensor>) -> Result<Tensor> {
        // candle's gradients have the type of what they are gradients of.
        let d_sinks = d_sinks.map(|d_sinks| d_sinks.to_dtype(self.logits.dtype())).transpose()?;
        let gradients = (d_k, d_sinks);
        self.left.lock().unwrap_or_else(PoisonError::into_inner).insert(thread::current().id(), gradients);
        knot.zeros_like()
    }
}

struct Knot(Left);

impl CustomOp2 for Knot {
    fn name(&self) -> &'static str {
        "hopper-attention, sinks"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), 1.into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, k: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let zero = k.device.alloc_zeros::<f32>(1)?;
        Ok((CudaStorage::wrap_cuda_slice(zero, k.device.clone()), 1.into()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let left = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&thread::current().id());
        let (d_k, d_sinks) = left.ok_or_else(|| missing("d_k and d_sinks"))?;
        Ok((Some(d_k), d_sinks))
    }
}
