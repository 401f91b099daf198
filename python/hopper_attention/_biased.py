"""attention() and attention_varlen() on torch tensors with ALiBi or with the maximum logits.

The operators hopper_attention::biased_forward and biased_backward take what those of _varlen.py take, and sinks and slopes,
each of which may be missing. They call the library through ctypes.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from . import abi
from ._sinks import operand
from ._torch import _library, call, is_recorded
from ._varlen import _ARGUMENTS, _empty, _gradients_of, _Run


def slopes_of(alibi_slopes: Any, device: torch.device) -> Optional[torch.Tensor]:
    """Slopes as the library reads them: f32 without gaps, on the device of the operands."""
    if alibi_slopes is None:
        return None
    if not isinstance(alibi_slopes, torch.Tensor) or not alibi_slopes.is_floating_point():
        what = alibi_slopes.dtype if isinstance(alibi_slopes, torch.Tensor) else type(alibi_slopes).__name__
        raise TypeError(f"alibi_slopes: {what}; allowed: tensors of floating-point numbers")
    if alibi_slopes.ndim not in (1, 2):
        raise ValueError(f"alibi_slopes: {alibi_slopes.ndim} dimensions; allowed: 1, [heads_q], or 2, [batch, heads_q]")
    if is_recorded(alibi_slopes):
        raise NotImplementedError(
            "alibi_slopes: slopes that require a gradient; allowed: others, such as alibi_slopes.detach()"
        )
    return alibi_slopes.to(device=device, dtype=torch.float32).contiguous()


def biased(alibi_slopes: Any, return_max_logits: bool) -> Any:
    """What `attention_modified` and `attention_varlen` call with these two, or None where there is neither."""
    if alibi_slopes is None and not return_max_logits:
        return None
    return _attend, alibi_slopes, return_max_logits


def _attend(
    q: Any, k: Any, v: Any, s_aux: Any, rest: tuple, return_lse: bool, alibi_slopes: Any, return_max_logits: bool
) -> Any:
    """Calls the operator. `rest` are its arguments after the tensors, but the last one."""
    sinks = None if s_aux is None else operand(s_aux, q.device)
    slopes = slopes_of(alibi_slopes, q.device)
    tensors = (q, k, v, sinks, slopes)
    recorded = is_recorded(*(t for t in tensors if t is not None))
    if recorded and q.is_cuda and not torch.compiler.is_compiling():
        _Run(rest).check_gradients(q, k, v, {} if slopes is None else {"alibi_slopes": slopes})
    forward = torch.ops.hopper_attention.biased_forward.default
    o, lse, max_logits = call(forward, recorded, *tensors, *rest, return_max_logits)
    made = (o, *([lse] if return_lse else []), *([max_logits] if return_max_logits else []))
    return made if len(made) > 1 else o


def _all(given: tuple) -> tuple:
    """The arguments of biased_forward after the tensors. The dispatcher may leave out those at the end that are as usual."""
    without = len(abi.LENGTHS) + 10
    return (*given, *(0.0, False)[len(given) - without :])


def _max_logits(q: torch.Tensor, wanted: bool) -> torch.Tensor:
    """An output with the maximum logits, or without elements."""
    return q.new_empty((q.shape[-2] if wanted else 0,), dtype=torch.float32)


def _d_sinks(q: torch.Tensor, sinks: Optional[torch.Tensor]) -> torch.Tensor:
    """An output with the gradient of sinks, or without elements."""
    return q.new_empty((0 if sinks is None else sinks.shape[0],), dtype=torch.float32)


def _forward(q: Any, k: Any, v: Any, sinks: Any, slopes: Any, *given: Any) -> Any:
    *numbers, wanted = _all(given)
    o, lse = _empty(q, v)
    max_logits = _max_logits(q, wanted)
    more = {"sinks": sinks, "alibi_slopes": slopes, "max_logits": max_logits if wanted else None}
    _Run(tuple(numbers))(abi.ForwardArgs, {"q": q, "k": k, "v": v, "o": o, "lse": lse, **more})
    return o, lse, max_logits


def _backward(
    d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, sinks: Any, slopes: Any, o: Any, lse: Any, *given: Any
) -> Any:
    d_sinks = _d_sinks(q, sinks)
    own = {} if sinks is None else {"sinks": sinks, "d_sinks": d_sinks}
    own = own if slopes is None else {**own, "alibi_slopes": slopes}
    return *_gradients_of(d_o, d_lse, q, k, v, o, lse, own, given), d_sinks


# -- what torch is told about the operators

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi_slopes"
for _schema, _function in (
    (f"biased_forward({_TENSORS}, {_ARGUMENTS}, bool max_logits=False) -> (Tensor, Tensor, Tensor)", _forward),
    (
        f"biased_backward(Tensor d_o, Tensor? d_lse, {_TENSORS}, Tensor o, Tensor lse, {_ARGUMENTS}) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        _backward,
    ),
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    for _device in ("CPU", "CUDA"):
        _library.impl(_schema.split("(")[0], _function, _device)


@torch.library.register_fake("hopper_attention::biased_forward", lib=_library)
def _fake_forward(q: Any, k: Any, v: Any, sinks: Any, slopes: Any, *given: Any) -> Any:
    return *_empty(q, v), _max_logits(q, _all(given)[-1])


@torch.library.register_fake("hopper_attention::biased_backward", lib=_library)
def _fake_backward(d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, sinks: Any, slopes: Any, *rest: Any) -> Any:
    return *(t.new_empty(t.shape) for t in (q, k, v)), _d_sinks(q, sinks)


#: q, k, v, sinks and slopes.
_OPERANDS = 5


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    tensors = _OPERANDS + len(abi.LENGTHS)
    o, lse, max_logits = output
    ctx.save_for_backward(*inputs[:tensors], o, lse)
    ctx.rest = inputs[tensors:]
    ctx.mark_non_differentiable(max_logits)
    # An output that nobody used then has the gradient None, and not a tensor of zeros.
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_o: Any, d_lse: Any, _: Any) -> tuple:
    *given, o, lse = ctx.saved_tensors
    operands, lists = given[:_OPERANDS], given[_OPERANDS:]
    if d_o is None:
        d_o = torch.zeros_like(o)
    *hints, deterministic = ctx.rest[:4]
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    # All but the flag at the end, which gradients have no use for.
    numbers = ctx.rest[4:11]
    backward = torch.ops.hopper_attention.biased_backward.default
    *made, d_sinks = backward(d_o, d_lse, *operands, o, lse, *lists, *hints, deterministic, *numbers)
    sinks = operands[3]
    gradients = (*made, None if sinks is None else d_sinks.to(sinks.dtype), None)
    nothing = (None,) * (len(ctx.needs_input_grad) - _OPERANDS)
    return *(d if wanted else None for d, wanted in zip(gradients, ctx.needs_input_grad)), *nothing


def _second(ctx: Any, *_: Any) -> None:
    raise NotImplementedError("attention: a second derivative was asked for; allowed: gradients of first order")


torch.library.register_autograd("hopper_attention::biased_forward", _gradients, setup_context=_keep, lib=_library)
torch.library.register_autograd("hopper_attention::biased_backward", _second, lib=_library)


__all__ = ["biased", "slopes_of"]
