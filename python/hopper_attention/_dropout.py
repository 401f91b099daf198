"""attention() and attention_varlen() on torch tensors with dropout, and which pairs dropout keeps.

The operators hopper_attention::dropout_forward and dropout_backward take what those of _biased.py take, and the seed, the
offset and the probability. They call the library through ctypes. Autograd gives the backward pass the seed and the offset
of the forward pass.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from . import _biased, abi
from ._biased import _all, _d_sinks, _max_logits, slopes_of
from ._plans import dropout_of
from ._sinks import operand
from ._torch import _library, call, is_recorded
from ._varlen import _ARGUMENTS, _empty, _gradients_of, _Run


def state_of(dropout_state: Any, generator: Any, device: torch.device) -> torch.Tensor:
    """The seed and the offset, int64 [2], on the device of the operands. Without one they are drawn from the generator."""
    if dropout_state is None:
        drawn = torch.empty(2, dtype=torch.int64, device=device if generator is None else generator.device)
        return drawn.random_(generator=generator).to(device)
    if generator is not None:
        raise ValueError("generator: given beside dropout_state; allowed: one of both")
    if not isinstance(dropout_state, torch.Tensor) or dropout_state.dtype != torch.int64:
        what = dropout_state.dtype if isinstance(dropout_state, torch.Tensor) else type(dropout_state).__name__
        raise TypeError(f"dropout_state: {what}; allowed: tensors of torch.int64")
    if tuple(dropout_state.shape) != (2,):
        raise ValueError(f"dropout_state: shape {list(dropout_state.shape)}; allowed: [2], the seed and the offset")
    return dropout_state.to(device).contiguous()


def modified(alibi_slopes: Any, return_max_logits: bool, dropout: tuple) -> Any:
    """As `_biased.biased`, with dropout: the probability, the state and the generator."""
    probability, state, generator = dropout
    if not dropout_of(probability, state, generator):
        return _biased.biased(alibi_slopes, return_max_logits)
    return _attend, alibi_slopes, return_max_logits, (float(probability), state, generator)


def _attend(
    q: Any, k: Any, v: Any, s_aux: Any, rest: tuple, return_lse: bool, alibi_slopes: Any, wanted: bool, dropout: tuple
) -> Any:
    """Calls the operator. `rest` are its arguments after the tensors, but the last one."""
    probability, *state = dropout
    sinks = None if s_aux is None else operand(s_aux, q.device)
    slopes = slopes_of(alibi_slopes, q.device)
    recorded = is_recorded(*(t for t in (q, k, v, sinks) if t is not None))
    tensors = (q, k, v, sinks, slopes, state_of(*state, q.device))
    forward = torch.ops.hopper_attention.dropout_forward.default
    o, lse, max_logits = call(forward, recorded, *tensors, probability, *rest, wanted)
    made = (o, *([lse] if return_lse else []), *([max_logits] if wanted else []))
    return made if len(made) > 1 else o


def _words(state: torch.Tensor) -> torch.Tensor:
    """The four words that the library reads. They are the memory of the two numbers."""
    return state.view(torch.int32)


def _forward(q: Any, k: Any, v: Any, sinks: Any, slopes: Any, state: Any, probability: float, *given: Any) -> Any:
    *numbers, wanted = _all(given)
    o, lse = _empty(q, v)
    max_logits = _max_logits(q, wanted)
    more = {"sinks": sinks, "alibi_slopes": slopes, "max_logits": max_logits if wanted else None}
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, **more, "dropout_state": _words(state)}
    _Run((*numbers, probability))(abi.ForwardArgs, tensors)
    return o, lse, max_logits


def _backward(d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, sinks: Any, slopes: Any, state: Any, *rest: Any) -> Any:
    probability, o, lse, *given = rest
    d_sinks = _d_sinks(q, sinks)
    own = {"dropout_state": _words(state)}
    own = own if sinks is None else {**own, "sinks": sinks, "d_sinks": d_sinks}
    own = own if slopes is None else {**own, "alibi_slopes": slopes}
    # The dispatcher may leave the cap out where it is 0.
    arguments = (*(*given, 0.0)[: len(abi.LENGTHS) + 11], probability)
    return *_gradients_of(d_o, d_lse, q, k, v, o, lse, own, arguments), d_sinks


# -- what torch is told about the operators

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi_slopes, Tensor dropout_state, float dropout_p"
)
for _schema, _function in (
    (f"dropout_forward({_TENSORS}, {_ARGUMENTS}, bool max_logits=False) -> (Tensor, Tensor, Tensor)", _forward),
    (
        f"dropout_backward(Tensor d_o, Tensor? d_lse, {_TENSORS}, Tensor o, Tensor lse, {_ARGUMENTS}) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        _backward,
    ),
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    for _device in ("CPU", "CUDA"):
        _library.impl(_schema.split("(")[0], _function, _device)


@torch.library.register_fake("hopper_attention::dropout_forward", lib=_library)
def _fake_forward(q: Any, k: Any, v: Any, sinks: Any, slopes: Any, state: Any, probability: float, *given: Any) -> Any:
    return *_empty(q, v), _max_logits(q, _all(given)[-1])


@torch.library.register_fake("hopper_attention::dropout_backward", lib=_library)
def _fake_backward(d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, sinks: Any, *rest: Any) -> Any:
    return *(t.new_empty(t.shape) for t in (q, k, v)), _d_sinks(q, sinks)


#: q, k, v, sinks, slopes and the state.
_OPERANDS = 6


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    first = _OPERANDS + 1
    o, lse, max_logits = output
    ctx.save_for_backward(*inputs[:_OPERANDS], *inputs[first : first + len(abi.LENGTHS)], o, lse)
    ctx.probability, ctx.rest = inputs[_OPERANDS], inputs[first + len(abi.LENGTHS) :]
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
    backward = torch.ops.hopper_attention.dropout_backward.default
    rest = (ctx.probability, o, lse, *lists, *hints, deterministic, *numbers)
    *made, d_sinks = backward(d_o, d_lse, *operands, *rest)
    sinks = operands[3]
    gradients = (*made, None if sinks is None else d_sinks.to(sinks.dtype), None, None)
    nothing = (None,) * (len(ctx.needs_input_grad) - _OPERANDS)
    return *(d if wanted else None for d, wanted in zip(gradients, ctx.needs_input_grad)), *nothing


def _second(ctx: Any, *_: Any) -> None:
    raise NotImplementedError("attention: a second derivative was asked for; allowed: gradients of first order")


torch.library.register_autograd("hopper_attention::dropout_forward", _gradients, setup_context=_keep, lib=_library)
torch.library.register_autograd("hopper_attention::dropout_backward", _second, lib=_library)


__all__ = ["modified", "state_of"]
