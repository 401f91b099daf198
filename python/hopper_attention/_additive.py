"""attention() on torch tensors with an additive bias: a term of each pair of a query and a key, with a gradient of its own.

The operators hopper_attention::additive_forward and additive_backward take what those of _blocks.py take, where the lists may be
missing, and the bias. They call the library through ctypes.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from . import abi
from ._biased import _d_sinks, _max_logits, slopes_of
from ._block_lists import BlockLists
from ._blocks import _all, _arguments, lists_for
from ._plans import Window, bias_shape, softcap_of
from ._sinks import operand
from ._torch import _NUMBERS, _autocast, _check, _library, _numbers_of, call, is_recorded
from ._varlen import _empty, _gradients_of, _Run

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def bias_of(bias: Any, q: torch.Tensor, k: torch.Tensor, name: str = "bias") -> torch.Tensor:
    """A bias as the library reads it: [1 or batch, 1 or heads_q, 1 or seqlen_q, seqlen_kv], on the device of the operands.

    Autograd records what is done to it here.
    """
    if not isinstance(bias, torch.Tensor) or not bias.is_floating_point():
        what = bias.dtype if isinstance(bias, torch.Tensor) else type(bias).__name__
        raise TypeError(f"{name}: {what}; allowed: tensors of floating-point numbers")
    shape = bias_shape(name, bias.shape, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    bias = bias.to(device=q.device, dtype=bias.dtype if bias.dtype in _DTYPES else torch.float32)
    bias = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
    if bias.shape[3] != shape[3]:
        bias = bias.expand(*bias.shape[:3], shape[3])
    # The last stride is 1. All else may lie as it likes.
    return bias if bias.stride(3) == 1 or shape[3] == 1 else bias.contiguous()


def attention_additive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: Any,
    block_mask: Any,
    attn_mask: Any,
    s_aux: Optional[torch.Tensor],
    causal: bool,
    window: Window,
    top_left: bool,
    scale: Optional[float],
    return_lse: bool,
    sm_margin: int,
    softcap: Optional[float] = None,
    alibi_slopes: Optional[torch.Tensor] = None,
    return_max_logits: bool = False,
) -> Any:
    """attention() with an additive bias, and maybe all else. A floating-point attn_mask is the bias."""
    _check(q, k, v)
    q, k, v = _autocast(q, k, v)
    numbers = (*_numbers_of(causal, window, top_left, scale, sm_margin), softcap_of(softcap))
    name = "bias"
    if isinstance(attn_mask, torch.Tensor) and attn_mask.is_floating_point():
        if bias is not None:
            raise ValueError("attn_mask: floating-point numbers, beside a bias; allowed: one of both")
        name, bias, attn_mask = "attn_mask", attn_mask, None
    bias = bias_of(bias, q, k, name)
    lists: tuple = (None,) * len(BlockLists._fields)
    if block_mask is not None or attn_mask is not None:
        lists = lists_for(block_mask, attn_mask, q, k)
    sinks = None if s_aux is None else operand(s_aux, q.device)
    slopes = slopes_of(alibi_slopes, q.device)
    recorded = is_recorded(*(t for t in (q, k, v, sinks, bias) if t is not None))
    forward = torch.ops.hopper_attention.additive_forward.default
    made = call(forward, recorded, q, k, v, sinks, slopes, bias, *lists, *numbers, return_max_logits)
    o, lse, max_logits = made
    made = (o, *([lse] if return_lse else []), *([max_logits] if return_max_logits else []))
    return made if len(made) > 1 else o


#: q, k, v, sinks, slopes and the bias, and the lists.
_OPERANDS = 6
_TENSORS = _OPERANDS + len(BlockLists._fields)


def _beside(sinks: Any, slopes: Any, bias: Any, lists: tuple) -> dict:
    """The tensors of a run beside q, k and v by their names, without the sinks of gradients."""
    named = {} if lists[0] is None else BlockLists(*lists).named()
    named["bias"] = bias
    return named if slopes is None else {**named, "alibi_slopes": slopes}


def _forward(q: Any, k: Any, v: Any, sinks: Any, slopes: Any, bias: Any, *given: Any) -> Any:
    lists, (*numbers, wanted) = given[:5], _all(given[5:])
    o, lse = _empty(q, v)
    max_logits = _max_logits(q, wanted)
    more = {"sinks": sinks, "max_logits": max_logits if wanted else None, **_beside(sinks, slopes, bias, lists)}
    _Run(_arguments(tuple(numbers)))(abi.ForwardArgs, {"q": q, "k": k, "v": v, "o": o, "lse": lse, **more})
    return o, lse, max_logits


def _d_bias(bias: torch.Tensor, wanted: bool) -> torch.Tensor:
    """An output with the gradient of the bias, or without elements."""
    return bias.new_empty(bias.shape if wanted else (0,))


def _backward(d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, sinks: Any, slopes: Any, bias: Any, *given: Any) -> Any:
    lists, (o, lse, wanted, deterministic, *numbers) = given[:5], given[5:]
    d_sinks, d_bias = _d_sinks(q, sinks), _d_bias(bias, wanted)
    own = _beside(sinks, slopes, bias, lists)
    own |= {} if sinks is None else {"sinks": sinks, "d_sinks": d_sinks}
    own |= {"dbias": d_bias} if wanted else {}
    arguments = _arguments(_all(tuple(numbers))[:7], deterministic)
    return *_gradients_of(d_o, d_lse, q, k, v, o, lse, own, arguments), d_sinks, d_bias


# -- what torch is told about the operators

_OF_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi_slopes, Tensor bias, Tensor? mask_block_cnt, "
    "Tensor? mask_block_idx, Tensor? mask_bits, Tensor? full_block_cnt, Tensor? full_block_idx"
)
_OF_NUMBERS = f"{_NUMBERS}, int sm_margin, float softcap=0.0"
for _schema, _function in (
    (f"additive_forward({_OF_OPERANDS}, {_OF_NUMBERS}, bool max_logits=False) -> (Tensor, Tensor, Tensor)", _forward),
    (
        f"additive_backward(Tensor d_o, Tensor? d_lse, {_OF_OPERANDS}, Tensor o, Tensor lse, bool d_bias, "
        f"bool deterministic, {_OF_NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        _backward,
    ),
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    for _device in ("CPU", "CUDA"):
        _library.impl(_schema.split("(")[0], _function, _device)


@torch.library.register_fake("hopper_attention::additive_forward", lib=_library)
def _fake_forward(q: Any, k: Any, v: Any, sinks: Any, slopes: Any, bias: Any, *given: Any) -> Any:
    return *_empty(q, v), _max_logits(q, _all(given[5:])[-1])


@torch.library.register_fake("hopper_attention::additive_backward", lib=_library)
def _fake_backward(
    d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, sinks: Any, slopes: Any, bias: Any, *rest: Any
) -> Any:
    return *(t.new_empty(t.shape) for t in (q, k, v)), _d_sinks(q, sinks), _d_bias(bias, rest[7])


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    o, lse, max_logits = output
    ctx.save_for_backward(*inputs[:_TENSORS], o, lse)
    ctx.numbers = _all(inputs[_TENSORS:])[:7]
    ctx.mark_non_differentiable(max_logits)
    # An output that nobody used then has the gradient None, and not a tensor of zeros.
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_o: Any, d_lse: Any, _: Any) -> tuple:
    *given, o, lse = ctx.saved_tensors
    if d_o is None:
        d_o = torch.zeros_like(o)
    backward = torch.ops.hopper_attention.additive_backward.default
    deterministic = torch.are_deterministic_algorithms_enabled()
    # The gradient of the bias takes time, so that it is computed where it is wanted alone.
    wanted = ctx.needs_input_grad[_OPERANDS - 1]
    *made, d_sinks, d_bias = backward(d_o, d_lse, *given, o, lse, wanted, deterministic, *ctx.numbers)
    sinks = given[3]
    gradients = (*made, None if sinks is None else d_sinks.to(sinks.dtype), None, d_bias)
    nothing = (None,) * (len(ctx.needs_input_grad) - len(gradients))
    return *(d if wanted else None for d, wanted in zip(gradients, ctx.needs_input_grad)), *nothing


def _second(ctx: Any, *_: Any) -> None:
    raise NotImplementedError("attention: a second derivative was asked for; allowed: gradients of first order")


torch.library.register_autograd("hopper_attention::additive_forward", _gradients, setup_context=_keep, lib=_library)
torch.library.register_autograd("hopper_attention::additive_backward", _second, lib=_library)


__all__ = ["attention_additive", "bias_of"]
