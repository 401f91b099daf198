//! Attention sinks and a bias in candle's graph.
//!
//! An operation of candle's has three tensors at most, and Q, K and V are three. So K, the sinks and the bias meet in
//! an operation of their own. Its output, the *knot*, has one element, and stands where K does in the graph:
//!
//! ```text
//! forward     k, sinks, bias -> knot      q, knot, v -> O
//! backward    dO -> dQ, dKnot, dV         dKnot -> dK, dSinks, dBias
//! ```
//!
//! The attention holds K, the sinks and the bias itself.
//!
//! The gradient of the knot says nothing. The backward pass of the attention leaves the other gradients with the
//! knot's operation. Nothing as large as K is copied.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor};

use crate::error::missing;

/// What an attention with sinks or a bias holds beside its place in the graph.
pub struct Held {
    /// The keys.
    pub k: Tensor,
    /// The sinks: one logit for each query head.
    pub sinks: Option<Operand>,
    /// The bias.
    pub bias: Option<Operand>,
    left: Left,
}

/// A tensor that meets K in a knot.
pub struct Operand {
    /// The tensor, as no part of a graph.
    pub tensor: Tensor,
    /// Whether its gradient is asked for.
    pub has_gradient: bool,
}

/// dK, dSinks and dBias.
type Gradients = (Tensor, Option<Tensor>, Option<Tensor>);

/// These gradients, by the thread that computes them: candle computes those of one graph on one thread, and another
/// thread may compute other gradients of the same graph.
type Left = Arc<Mutex<HashMap<ThreadId, Gradients>>>;

impl Held {
    /// Ties K with the sinks and the bias to a knot. `None` where there is neither: K then stands in the graph itself.
    ///
    /// # Errors
    /// candle's own.
    pub fn new(k: &Tensor, sinks: Option<&Tensor>, bias: Option<&Tensor>) -> Result<Option<(Self, Tensor)>> {
        let left = Left::default();
        let knot = match (sinks, bias) {
            (None, None) => return Ok(None),
            (Some(sinks), None) => k.apply_op2(sinks, Knot { left: left.clone(), second: Second::Sinks })?,
            (None, Some(bias)) => k.apply_op2(bias, Knot { left: left.clone(), second: Second::Bias })?,
            (Some(sinks), Some(bias)) => {
                k.apply_op3(sinks, bias, Knot { left: left.clone(), second: Second::Sinks })?
            }
        };
        let operand = |tensor: &Tensor| Operand { tensor: tensor.detach(), has_gradient: tensor.track_op() };
        Ok(Some((Self { k: k.detach(), sinks: sinks.map(operand), bias: bias.map(operand), left }, knot)))
    }

    /// Leaves the gradients of K, the sinks and the bias with the knot, and returns the knot's own.
    pub fn leave(&self, knot: &Tensor, (d_k, d_sinks, d_bias): Gradients) -> Result<Tensor> {
        // candle's gradients have the type of what they are gradients of.
        let d_sinks = match (d_sinks, &self.sinks) {
            (Some(d_sinks), Some(sinks)) => Some(d_sinks.to_dtype(sinks.tensor.dtype())?),
            _ => None,
        };
        let gradients = (d_k, d_sinks, d_bias);
        self.left.lock().unwrap_or_else(PoisonError::into_inner).insert(thread::current().id(), gradients);
        knot.zeros_like()
    }
}

/// The operation whose output is a knot. Its tensors are K, the sinks and the bias, or K and one of the two.
struct Knot {
    left: Left,
    second: Second,
}

/// What an operation on two tensors has beside K. One on three has both.
enum Second {
    Sinks,
    Bias,
}

const NAME: &str = "hopper-attention, sinks and bias";

impl Knot {
    fn take(&self) -> Result<Gradients> {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner).remove(&thread::current().id());
        left.ok_or_else(|| missing("d_k, d_sinks and d_bias"))
    }
}

fn knot() -> Result<(CpuStorage, Shape)> {
    Ok((CpuStorage::F32(vec![0.0]), 1.into()))
}

#[cfg(feature = "cuda")]
fn cuda_knot(k: &CudaStorage) -> Result<(CudaStorage, Shape)> {
    let zero = k.device.alloc_zeros::<f32>(1)?;
    Ok((CudaStorage::wrap_cuda_slice(zero, k.device.clone()), 1.into()))
}

impl CustomOp2 for Knot {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        knot()
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, k: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda_knot(k)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (d_k, d_sinks, d_bias) = self.take()?;
        let second = match self.second {
            Second::Sinks => d_sinks,
            Second::Bias => d_bias,
        };
        Ok((Some(d_k), second))
    }
}

impl CustomOp3 for Knot {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        knot()
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        k: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        cuda_knot(k)
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (d_k, d_sinks, d_bias) = self.take()?;
        Ok((Some(d_k), d_sinks, d_bias))
    }
}
