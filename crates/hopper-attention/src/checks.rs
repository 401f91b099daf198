//! What forward and backward check alike of their arguments, on every device.

use crate::tensor::{HostMut, HostRef};
use crate::{DType, Element, Error, Result, TensorMut, TensorRef};

/// Whether a tensor has the type that it must have; `whose` says why.
pub(crate) fn dtype(what: &'static str, got: DType, want: DType, whose: &str) -> Result<()> {
    if got == want {
        return Ok(());
    }
    Err(Error::Dtype { what, got, allowed: format!("{want}, {whose}") })
}

/// Whether a tensor has the problem's shape; three dimensions are those of a log-sum-exp.
pub(crate) fn shape<const R: usize>(tensor: &'static str, got: [usize; R], want: [usize; R]) -> Result<()> {
    let axes = if R == 3 { "[batch, heads, seqlen]" } else { "[batch, seqlen, heads, head_dim]" };
    shape_of(tensor, got, want, axes)
}

/// Whether the factors of an operand have the shape that the problem's scaling gives.
pub(crate) fn factors(tensor: &'static str, got: [usize; 3], want: [usize; 3]) -> Result<()> {
    shape_of(tensor, got, want, "[batch, heads, blocks]")
}

/// Whether a tensor with these axes has the problem's shape.
pub(crate) fn shape_of<const R: usize>(
    tensor: &'static str,
    got: [usize; R],
    want: [usize; R],
    axes: &'static str,
) -> Result<()> {
    if got == want {
        return Ok(());
    }
    Err(Error::Shape { tensor, got: got.into(), want: want.into(), axes })
}

/// Whether a tensor is given exactly when the problem was made with the option of its name; `verb` is what is done to it.
pub(crate) fn presence(what: &'static str, wanted: bool, given: bool, verb: &str) -> Result<()> {
    let refuse = |got: &str, allowed: String| Err(Error::Value { what, got: got.into(), allowed });
    match (wanted, given) {
        (true, false) => refuse("missing", format!("the tensor that the problem, made with {what}(true), {verb}")),
        (false, true) => refuse("given", format!("none, since the problem was made without {what}(true)")),
        _ => Ok(()),
    }
}

/// The memory of an input of a plan for the CPU.
pub(crate) fn host<'a, T: Element, const R: usize>(
    what: &'static str,
    tensor: &TensorRef<'a, T, R>,
) -> Result<HostRef<'a, T, R>> {
    tensor.as_host().ok_or_else(|| elsewhere(what))
}

/// The memory of an output of a plan for the CPU.
pub(crate) fn host_mut<'t, T: Element, const R: usize>(
    what: &'static str,
    tensor: &'t mut TensorMut<'_, T, R>,
) -> Result<HostMut<'t, T, R>> {
    tensor.as_host().ok_or_else(|| elsewhere(what))
}

fn elsewhere(what: &'static str) -> Error {
    Error::Device { what, got: "a GPU".into(), allowed: "cpu, the plan's".into() }
}
