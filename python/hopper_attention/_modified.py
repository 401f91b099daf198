"""attention() and attention_varlen() on torch tensors with what changes scores or weights.

That is masks, a bias, ALiBi, dropout and the maximum logits, and a limit of the workspace. The operators hopper_attention::modified_forward and
modified_backward take all of it, each of which may be missing, and offsets and lengths. They call the library through
ctypes. Autograd gives the backward pass the state of dropout of the forward pass.

Plain calls, and those with a softcap or sinks alone, have operators of their own (_torch.py, _sinks.py, _varlen.py):
these are cheaper to call.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch

from . import abi
from ._additive import bias_of
from ._blocks import lists_for
from ._dropout import state_of, words_of
from ._plans import Window, dropout_of, limit_of
from ._sinks import operand
from ._torch import _library, call, is_recorded
from ._varlen import _ARGUMENTS, _empty, _gradients_of, _Run, dense_arguments


class Beside(NamedTuple):
    """The tensors of an operator beside q, k and v."""

    sinks: Optional[torch.Tensor] = None
    alibi_slopes: Optional[torch.Tensor] = None
    bias: Optional[torch.Tensor] = None
    #: The seed and the offset of dropout, int64 [2].
    dropout_state: Optional[torch.Tensor] = None
    mask_block_cnt: Optional[torch.Tensor] = None
    mask_block_idx: Optional[torch.Tensor] = None
    mask_bits: Optional[torch.Tensor] = None
    full_block_cnt: Optional[torch.Tensor] = None
    full_block_idx: Optional[torch.Tensor] = None

    def named(self) -> dict:
        """What is given, by the library's names."""
        given = {name: t for name, t in self._asdict().items() if t is not None}
        if self.dropout_state is not None:
            given["dropout_state"] = words_of(self.dropout_state)
        return given


class Modifiers(NamedTuple):
    """What a caller gave beside q, k, v and sinks, as it gave it."""

    alibi_slopes: Any = None
    return_max_logits: bool = False
    #: dropout_p, dropout_state and generator.
    dropout: tuple = (0.0, None, None)
    bias: Any = None
    attn_mask: Any = None
    block_mask: Any = None
    workspace_limit: Optional[int] = None

    def any(self) -> bool:
        """Whether there is anything."""
        return (
            self.alibi_slopes is not None
            or self.bias is not None
            or self.attn_mask is not None
            or self.block_mask is not None
            or self.return_max_logits
            or self.workspace_limit is not None
            or bool(dropout_of(*self.dropout))
        )

    def attend(self) -> Optional[tuple]:
        """What `attention_varlen` takes as its `attend`."""
        return (_attend_packed, self) if self.any() else None


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


def attention_modified(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s_aux: Optional[torch.Tensor],
    causal: bool,
    window: Window,
    top_left: bool,
    scale: Optional[float],
    return_lse: bool,
    sm_margin: int,
    softcap: Optional[float],
    modifiers: Modifiers,
) -> Any:
    """attention() with any of `modifiers`. A floating-point attn_mask is the bias."""
    q, k, v, rest = dense_arguments(q, k, v, causal, window, top_left, scale, sm_margin, softcap)
    bias, attn_mask, name = modifiers.bias, modifiers.attn_mask, "bias"
    if isinstance(attn_mask, torch.Tensor) and attn_mask.is_floating_point():
        if bias is not None:
            raise ValueError("attn_mask: floating-point numbers, beside a bias; allowed: one of both")
        bias, attn_mask, name = attn_mask, None, "attn_mask"
    beside = Beside(bias=None if bias is None else bias_of(bias, q, k, {}, name))
    if modifiers.block_mask is not None or attn_mask is not None:
        beside = beside._replace(**lists_for(modifiers.block_mask, attn_mask, q, k).named())
    return attend(q, k, v, s_aux, rest, return_lse, modifiers, beside)


def _attend_packed(q: Any, k: Any, v: Any, s_aux: Any, rest: tuple, return_lse: bool, modifiers: Modifiers) -> Any:
    """attention_varlen() with any of `modifiers`, of which it takes no masks."""
    bias, lists = modifiers.bias, dict(zip(abi.LENGTHS, rest))
    beside = Beside(bias=None if bias is None else bias_of(bias, q, k, lists))
    return attend(q, k, v, s_aux, rest, return_lse, modifiers, beside)


def attend(
    q: Any,
    k: Any,
    v: Any,
    s_aux: Any,
    rest: tuple,
    return_lse: bool,
    modifiers: Modifiers,
    beside: Beside,
) -> Any:
    """Calls the operator. `rest` are its arguments from the offsets to the softcap. `beside` has the bias and masks."""
    probability, (_, *state) = dropout_of(*modifiers.dropout), modifiers.dropout
    beside = beside._replace(
        sinks=None if s_aux is None else operand(s_aux, q.device),
        alibi_slopes=slopes_of(modifiers.alibi_slopes, q.device),
        dropout_state=state_of(*state, q.device) if probability else None,
    )
    recorded = is_recorded(*(t for t in (q, k, v, beside.sinks, beside.bias) if t is not None))
    numbers = (*rest, probability, limit_of(modifiers.workspace_limit))
    if recorded and q.is_cuda and not torch.compiler.is_compiling():
        _Run(numbers).check_gradients(q, k, v, beside.named())
    forward = torch.ops.hopper_attention.modified_forward.default
    o, lse, max_logits = call(forward, recorded, q, k, v, *beside, *numbers, modifiers.return_max_logits)
    made = (o, *([lse] if return_lse else []), *([max_logits] if modifiers.return_max_logits else []))
    return made if len(made) > 1 else o


#: q, k and v, and those of Beside.
_OPERANDS = 3 + len(Beside._fields)
#: What comes after them: offsets and lengths, and then numbers.
_LENGTHS = len(abi.LENGTHS)


def _max_logits(q: torch.Tensor, wanted: bool) -> torch.Tensor:
    """An output with the maximum logits, or without elements."""
    return q.new_empty((q.shape[-2] if wanted else 0,), dtype=torch.float32)


def _d_sinks(q: torch.Tensor, beside: Beside) -> torch.Tensor:
    """An output with the gradient of sinks, or without elements."""
    return q.new_empty((0 if beside.sinks is None else beside.sinks.shape[0],), dtype=torch.float32)


def _d_bias(q: torch.Tensor, beside: Beside, wanted: bool) -> torch.Tensor:
    """An output with the gradient of the bias, or without elements."""
    return q.new_empty((0,)) if beside.bias is None or not wanted else beside.bias.new_empty(beside.bias.shape)


def _split(given: tuple) -> tuple:
    """The arguments after q, k and v: those of Beside, and the others."""
    return Beside(*given[: _OPERANDS - 3]), given[_OPERANDS - 3 :]


def _forward(q: Any, k: Any, v: Any, *given: Any) -> Any:
    beside, (*arguments, wanted) = _split(given)
    o, lse = _empty(q, v)
    max_logits = _max_logits(q, wanted)
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, **beside.named()}
    _Run(tuple(arguments))(abi.ForwardArgs, {**tensors, **({"max_logits": max_logits} if wanted else {})})
    return o, lse, max_logits


def _backward(d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, *given: Any) -> Any:
    beside, (o, lse, wants_d_bias, *arguments) = _split(given)
    d_sinks, d_bias = _d_sinks(q, beside), _d_bias(q, beside, wants_d_bias)
    own = beside.named()
    own |= {} if beside.sinks is None else {"d_sinks": d_sinks}
    own |= {"dbias": d_bias} if wants_d_bias and beside.bias is not None else {}
    return *_gradients_of(d_o, d_lse, q, k, v, o, lse, own, tuple(arguments)), d_sinks, d_bias


# -- what torch is told about the operators

_TENSORS = ", ".join(["Tensor q, Tensor k, Tensor v", *(f"Tensor? {name}" for name in Beside._fields)])
# Without values that stand for missing arguments: the dispatcher would leave out those that are as usual.
_OTHERS = f"{_ARGUMENTS.replace('=0.0', '')}, float dropout_p, int workspace_limit"
for _schema, _function in (
    (f"modified_forward({_TENSORS}, {_OTHERS}, bool max_logits) -> (Tensor, Tensor, Tensor)", _forward),
    (
        f"modified_backward(Tensor d_o, Tensor? d_lse, {_TENSORS}, Tensor o, Tensor lse, bool d_bias, {_OTHERS}) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        _backward,
    ),
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    for _device in ("CPU", "CUDA"):
        _library.impl(_schema.split("(")[0], _function, _device)


@torch.library.register_fake("hopper_attention::modified_forward", lib=_library)
def _fake_forward(q: Any, k: Any, v: Any, *given: Any) -> Any:
    return *_empty(q, v), _max_logits(q, given[-1])


@torch.library.register_fake("hopper_attention::modified_backward", lib=_library)
def _fake_backward(d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, *given: Any) -> Any:
    beside, (_, _, wants_d_bias, *_) = _split(given)
    return *(t.new_empty(t.shape) for t in (q, k, v)), _d_sinks(q, beside), _d_bias(q, beside, wants_d_bias)


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    o, lse, max_logits = output
    ctx.save_for_backward(*inputs[: _OPERANDS + _LENGTHS], o, lse)
    ctx.rest = inputs[_OPERANDS + _LENGTHS : -1]
    ctx.mark_non_differentiable(max_logits)
    # An output that nobody used then has the gradient None, and not a tensor of zeros.
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_o: Any, d_lse: Any, _: Any) -> tuple:
    *given, o, lse = ctx.saved_tensors
    operands, lengths = given[:_OPERANDS], given[_OPERANDS:]
    if d_o is None:
        d_o = torch.zeros_like(o)
    *hints, deterministic = ctx.rest[:4]
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    # The gradient of the bias takes time, so that it is computed where it is wanted alone.
    at = 3 + Beside._fields.index("bias")
    wants_d_bias = ctx.needs_input_grad[at]
    backward = torch.ops.hopper_attention.modified_backward.default
    rest = (*lengths, *hints, deterministic, *ctx.rest[4:])
    *made, d_sinks, d_bias = backward(d_o, d_lse, *operands, o, lse, wants_d_bias, *rest)
    sinks = operands[3]
    gradients = dict(enumerate(made))
    gradients[3] = None if sinks is None else d_sinks.to(sinks.dtype)
    gradients[at] = d_bias
    return tuple(gradients.get(i) if wanted else None for i, wanted in enumerate(ctx.needs_input_grad))


def _second(ctx: Any, *_: Any) -> None:
    raise NotImplementedError("attention: a second derivative was asked for; allowed: gradients of first order")


torch.library.register_autograd("hopper_attention::modified_forward", _gradients, setup_context=_keep, lib=_library)
torch.library.register_autograd("hopper_attention::modified_backward", _second, lib=_library)


__all__ = ["Modifiers", "attend", "attention_modified"]
