"""attention() on dense torch tensors with attention sinks, and what torch is told about its operators.

hopper_attention::forward_sinks and backward_sinks have the same two implementations as the operators of _torch.py, which
defines them. Packed sequences with sinks go through _varlen.py.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from ._plans import Window
from ._torch import (
    _autocast,
    _backward_numbers,
    _check,
    _empty,
    _library,
    _numbers_of,
    call,
    check_gradients,
    is_recorded,
)


def operand(s_aux: Any, device: torch.device) -> torch.Tensor:
    """Sinks as the library reads them: f32 or bf16, of one dimension without gaps, on the device of the operands."""
    if not isinstance(s_aux, torch.Tensor) or not s_aux.is_floating_point():
        what = s_aux.dtype if isinstance(s_aux, torch.Tensor) else type(s_aux).__name__
        raise TypeError(f"s_aux: {what}; allowed: tensors of floating-point numbers")
    if s_aux.ndim != 1:
        raise ValueError(f"s_aux: {s_aux.ndim} dimensions; allowed: 1, [heads_q]")
    # f16 fits f32, as the library reads it.
    dtype = s_aux.dtype if s_aux.dtype in (torch.float32, torch.bfloat16) else torch.float32
    return s_aux.to(device=device, dtype=dtype).contiguous()


def attention_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s_aux: torch.Tensor,
    causal: bool,
    window: Window,
    top_left: bool,
    scale: Optional[float],
    return_lse: bool,
    sm_margin: int,
) -> Any:
    """attention() with sinks."""
    _check(q, k, v)
    q, k, v = _autocast(q, k, v)
    numbers = _numbers_of(causal, window, top_left, scale, sm_margin)
    sinks = operand(s_aux, q.device)
    recorded = is_recorded(q, k, v, sinks)
    if recorded and not torch.compiler.is_compiling():
        check_gradients(q, k, v, numbers)
    o, lse = call(_forward_op, recorded, q, k, v, sinks, *numbers)
    return (o, lse) if return_lse else o


_forward_op = torch.ops.hopper_attention.forward_sinks.default


@torch.library.register_fake("hopper_attention::forward_sinks", lib=_library)
def _fake_forward(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    return tuple(_empty(q, v, True))


@torch.library.register_fake("hopper_attention::backward_sinks", lib=_library)
def _fake_backward(d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, sinks: Any, *rest: Any) -> Any:
    return *(t.new_empty(t.shape) for t in (q, k, v)), torch.empty_like(sinks, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.numbers = tuple(inputs[4:])
    # An output that nobody used then has the gradient None, and not a tensor of zeros.
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_o: Any, d_lse: Any) -> tuple:
    q, k, v, sinks, o, lse = ctx.saved_tensors
    if d_o is None:
        d_o = torch.zeros_like(o)
    numbers = _backward_numbers(ctx.numbers, torch.are_deterministic_algorithms_enabled())
    *others, d_sinks = torch.ops.hopper_attention.backward_sinks(d_o, d_lse, q, k, v, sinks, o, lse, *numbers)
    # That of sinks is f32.
    made = (*others, d_sinks.to(sinks.dtype))
    nothing = (None,) * (len(ctx.needs_input_grad) - 4)
    return *(d if wanted else None for d, wanted in zip(made, ctx.needs_input_grad)), *nothing


def _second(ctx: Any, *_: Any) -> None:
    raise NotImplementedError("attention: a second derivative was asked for; allowed: gradients of first order")


torch.library.register_autograd("hopper_attention::forward_sinks", _gradients, setup_context=_keep, lib=_library)
torch.library.register_autograd("hopper_attention::backward_sinks", _second, lib=_library)


__all__ = ["attention_sinks", "operand"]
