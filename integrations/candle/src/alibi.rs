//! ALiBi's slopes.

use candle_core::{DType, Result, Tensor};
use hopper_attention::{AlibiSlopes, Error};

use crate::error::refusal;
use crate::modifiers::on_one_device;

/// Slopes as a run reads them: f32 without gaps, `[heads_q]` or `[batch, heads_q]`.
///
/// # Errors
/// They have another number of dimensions, are on another device than `like`, or want a gradient.
pub fn slopes(alibi_slopes: &Tensor, like: &Tensor) -> Result<Tensor> {
    let refuse =
        |got: String, allowed: &str| Err(refusal(Error::Value { what: "alibi_slopes", got, allowed: allowed.into() }));
    let dims = alibi_slopes.dims();
    if !matches!(dims.len(), 1 | 2) {
        let got = format!("{} dimensions, {dims:?}", dims.len());
        return refuse(got, "1, [heads_q], or 2, [batch, heads_q]");
    }
    on_one_device("alibi_slopes", alibi_slopes, like)?;
    if alibi_slopes.track_op() {
        return refuse("part of a graph with gradients".into(), "detached slopes, since they have no gradient");
    }
    Ok(alibi_slopes.to_dtype(DType::F32)?.contiguous()?.detach())
}

/// Which slopes a problem with these has.
pub fn option(slopes: &Tensor) -> AlibiSlopes {
    if slopes.dims().len() == 1 { AlibiSlopes::PerHead } else { AlibiSlopes::PerBatch }
}
