"""attention_varlen() on torch tensors, and attention() on nested ones: packed sequences and used lengths.

The operators hopper_attention::varlen_forward, varlen_forward_lse and varlen_backward call the library through ctypes.
Their shapes follow from the shapes of their inputs alone, never from offsets. So torch.compile traces them, and nothing
waits for a GPU.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from . import abi
from ._block_lists import fields_of
from ._calls import Call, prepared
from ._plans import (
    Hints,
    Window,
    alibi_of,
    bias_fields,
    check_list,
    hints_of,
    lists_of,
    output_shapes,
    packed_problem,
    softcap_of,
)
from ._sinks import operand
from ._torch import (
    DTYPES,
    _autocast,
    _check,
    _check_operand,
    _key,
    _library,
    _NUMBERS,
    _numbers_of,
    call,
    described,
    is_jagged,
    is_recorded,
    ordinal,
    readable,
    require_gradients,
    run,
)

_I32 = torch.iinfo(torch.int32)


def arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: tuple,
    causal: bool,
    window: Window,
    top_left: bool,
    scale: Optional[float],
    max_seqlens: tuple,
    deterministic: bool,
    fill_gaps: bool,
    sm_margin: int,
    softcap: Optional[float],
) -> tuple:
    """q, k and v, and the other arguments of an operator. `lists` are those of `abi.LENGTHS`."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        _check_operand(name, t)
    named = lists_of(q, k, v, lists)  # type: ignore[arg-type]
    numbers = _numbers_of(causal, window, top_left, scale, sm_margin)
    hints = hints_of(*max_seqlens, fill_gaps)
    q, k, v = _autocast(q, k, v)
    return q, k, v, (*lengths_on(named, q.device), *hints, bool(deterministic), *numbers, softcap_of(softcap))


def without_lengths(numbers: tuple, softcap: float, deterministic: bool = False) -> tuple:
    """The arguments of an operator on dense tensors after q, k and v. `numbers` are those of `_numbers_of`."""
    return (None, None, None, None, 0, 0, False, deterministic, *numbers, softcap)


def dense_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: Window,
    top_left: bool,
    scale: Optional[float],
    sm_margin: int,
    softcap: Optional[float],
) -> tuple:
    """As `arguments`, of dense tensors."""
    _check(q, k, v)
    numbers = _numbers_of(causal, window, top_left, scale, sm_margin)
    return *_autocast(q, k, v), without_lengths(numbers, softcap_of(softcap))


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Optional[torch.Tensor],
    cu_seqlens_kv: Optional[torch.Tensor] = None,
    causal: bool = False,
    window: Window = None,
    top_left: bool = False,
    scale: Optional[float] = None,
    return_lse: bool = False,
    seqused_q: Optional[torch.Tensor] = None,
    seqused_kv: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_kv: Optional[int] = None,
    deterministic: bool = False,
    fill_gaps: bool = True,
    sm_margin: int = 0,
    s_aux: Optional[torch.Tensor] = None,
    softcap: Optional[float] = None,
    attend: Optional[tuple] = None,
) -> Any:
    """See hopper_attention.attention_varlen.

    `attend`: the function that computes it in place of `_plain`, and its last arguments.
    """
    lists, longest = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv), (max_seqlen_q, max_seqlen_kv)
    mask = (causal, window, top_left)
    q, k, v, rest = arguments(q, k, v, lists, *mask, scale, longest, deterministic, fill_gaps, sm_margin, softcap)
    compute, *more = attend or (_plain,)
    return compute(q, k, v, s_aux, rest, return_lse, *more)


def _plain(q: Any, k: Any, v: Any, s_aux: Any, rest: tuple, return_lse: bool) -> Any:
    if s_aux is not None:
        return _with_sinks(q, k, v, s_aux, rest, return_lse)
    recorded = is_recorded(q, k, v)
    ops = torch.ops.hopper_attention
    if not (recorded or return_lse):
        return _call(ops.varlen_forward.default, recorded, (q, k, v), rest)
    o, lse = _call(ops.varlen_forward_lse.default, recorded, (q, k, v), rest)
    return (o, lse) if return_lse else o


def _call(operator: Any, recorded: bool, tensors: tuple, rest: tuple) -> Any:
    """Calls an operator on q, k, v (and more tensors) and the rest of its arguments."""
    if recorded and tensors[0].is_cuda and not torch.compiler.is_compiling():
        _Run(rest).check_gradients(*tensors[:3])
    return call(operator, recorded, *tensors, *rest)


def attention_capped(
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
) -> Any:
    """attention() with a softcap, and maybe sinks. Its operators are those of packed sequences, without offsets."""
    q, k, v, rest = dense_arguments(q, k, v, causal, window, top_left, scale, sm_margin, softcap)
    return _plain(q, k, v, s_aux, rest, return_lse)


def _with_sinks(q: Any, k: Any, v: Any, s_aux: Any, rest: tuple, return_lse: bool) -> Any:
    sinks = operand(s_aux, q.device)
    tensors = (q, k, v, sinks)
    o, lse = _call(torch.ops.hopper_attention.sinks_forward.default, is_recorded(*tensors), tensors, rest)
    return (o, lse) if return_lse else o


def _list(name: str, given: Optional[torch.Tensor], device: torch.device) -> Optional[torch.Tensor]:
    """Offsets or used lengths as the library reads them: int32 on the device of the operands.

    Numbers that int32 does not hold become its largest or smallest, which are no rows of a tensor.
    """
    if given is None:
        return None
    if not isinstance(given, torch.Tensor) or given.dtype not in (torch.int32, torch.int64):
        what = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
        raise TypeError(f"{name}: {what}; allowed: tensors of torch.int32 or torch.int64")
    check_list(name, given.shape)
    if given.dtype == torch.int64:
        given = given.clamp(_I32.min, _I32.max)
    return given.to(device=device, dtype=torch.int32).contiguous()


def lengths_on(named: dict, device: torch.device) -> tuple:
    """The offsets and used lengths of `lists_of` as the library reads them. One tensor for both sides stays one."""
    here = {name: _list(name, given, device) for name, given in named.items()}
    if named["cu_seqlens_kv"] is named["cu_seqlens_q"]:
        here["cu_seqlens_kv"] = here["cu_seqlens_q"]
    return tuple(here.values())


def _empty(q: torch.Tensor, v: torch.Tensor) -> list:
    o, lse = output_shapes(q.shape, v.shape)
    return [q.new_empty(o), q.new_empty(lse, dtype=torch.float32)]


class _Run:
    """The arguments of an operator after its tensors, and how it calls the library."""

    def __init__(self, arguments: tuple) -> None:
        self.lists = dict(zip(abi.LENGTHS, arguments[:4]))
        self.hints, self.deterministic = Hints(*arguments[4:7]), bool(arguments[7])
        # The dispatcher may leave the cap out where it is 0. Some operators have neither dropout nor a limit of the workspace.
        self.numbers, last = arguments[8:14], arguments[14:]
        self.softcap, self.dropout, self.workspace_limit = (*last, *(0.0, 0.0, 0)[len(last) :])

    def _problem(self, q: Any, k: Any, v: Any, lse: bool, given: Any = ()) -> Any:
        """The problem. `given` has its other tensors by their names, of which some change it."""
        sinks, slopes = (given[name] if name in given else None for name in ("sinks", "alibi_slopes"))
        scale, mask, corner, left, right, sm_margin = self.numbers
        bias = given["bias"] if "bias" in given else None
        return packed_problem(
            q,
            k,
            v,
            self.lists,
            self.hints,
            dtype=DTYPES[q.dtype],
            softmax_scale=scale,
            softcap=self.softcap,
            mask=mask,
            corner=corner,
            window_left=left,
            window_right=right,
            sm_margin=sm_margin,
            workspace_limit=self.workspace_limit,
            lse=int(lse),
            sinks=0 if sinks is None else DTYPES[sinks.dtype],
            alibi=alibi_of(slopes),
            max_logits=int("max_logits" in given),
            dropout=self.dropout,
            **fields_of(given),
            **({} if bias is None else bias_fields(DTYPES[bias.dtype], bias.shape, self.lists)),
        )

    def check_gradients(self, q: Any, k: Any, v: Any, given: Any = ()) -> None:
        """Refuses what the device computes without gradients only. `given` has other tensors by their names."""

        def problems() -> tuple:
            forward = self._problem(q, k, v, True, dict(given))
            return forward, abi.BackwardProblem.of(forward, deterministic=int(self.deterministic))

        lists = tuple(None if t is None else t.shape for t in self.lists.values())
        key = (q.dtype, q.device, q.shape, k.shape, v.shape, lists, self.hints, self.deterministic, self.numbers)
        key = (*key, self.softcap, self.dropout, self.workspace_limit, tuple((name, t.dtype, t.shape) for name, t in dict(given).items()))
        require_gradients(key, ordinal(q.device), problems)

    def __call__(self, args: Any, tensors: dict, **more: int) -> None:
        """Runs a pass on its tensors by their names. `more` are fields of a backward problem."""
        given = {name: t for name, t in {**tensors, **self.lists}.items() if t is not None}
        q, k, v = tensors["q"], tensors["k"], tensors["v"]

        def make() -> Call:
            problem = self._problem(q, k, v, "lse" in given, given)
            if args is abi.BackwardArgs:
                problem = abi.BackwardProblem.of(problem, **more)
            return Call(args, problem, ordinal(q.device), {name: described(t) for name, t in given.items()})

        numbers = (self.numbers, self.softcap, self.dropout, self.workspace_limit)
        key = (args, self.hints, numbers, tuple(more.items()), tuple(given), _key(tuple(given.values())))
        run(prepared(key, make), q, tuple(given.values()))


def _forward(q: Any, k: Any, v: Any, *arguments: Any) -> Any:
    o, _ = _empty(q, v)
    _Run(arguments)(abi.ForwardArgs, {"q": q, "k": k, "v": v, "o": o})
    return o


def _forward_lse(q: Any, k: Any, v: Any, *arguments: Any) -> Any:
    o, lse = _empty(q, v)
    _Run(arguments)(abi.ForwardArgs, {"q": q, "k": k, "v": v, "o": o, "lse": lse})
    return o, lse


def _forward_sinks(q: Any, k: Any, v: Any, sinks: Any, *arguments: Any) -> Any:
    o, lse = _empty(q, v)
    _Run(arguments)(abi.ForwardArgs, {"q": q, "k": k, "v": v, "o": o, "lse": lse, "sinks": sinks})
    return o, lse


def readable_rows(t: torch.Tensor) -> torch.Tensor:
    """As `readable`, of operands of 4 dimensions or packed ones of 3."""
    return readable(t) if t.ndim == 4 else readable(t[None])[0]


def _backward(d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *arguments: Any) -> Any:
    return _gradients_of(d_o, d_lse, q, k, v, o, lse, {}, arguments)


def _backward_sinks(
    d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, sinks: Any, o: Any, lse: Any, *arguments: Any
) -> Any:
    d_sinks = torch.empty_like(sinks, dtype=torch.float32)
    own = {"sinks": sinks, "d_sinks": d_sinks}
    return *_gradients_of(d_o, d_lse, q, k, v, o, lse, own, arguments), d_sinks


def _gradients_of(
    d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, more: dict, arguments: tuple
) -> tuple:
    d_q, d_k, d_v = (t.new_empty(t.shape) for t in (q, k, v))
    call = _Run(arguments)
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "o": o,
        "lse": lse,
        "d_o": readable_rows(d_o),
        "d_q": d_q,
        "d_k": d_k,
        "d_v": d_v,
        **more,
    }
    if d_lse is not None:
        # Heads by rows, or with a batch: no operand, so its elements need no alignment.
        tensors["d_lse"] = d_lse if d_lse.stride(-1) == 1 else d_lse.contiguous()
    wanted = {"d_sinks": int("d_sinks" in more), "d_bias": int("dbias" in more)}
    call(abi.BackwardArgs, tensors, d_lse=int(d_lse is not None), deterministic=int(call.deterministic), **wanted)
    return d_q, d_k, d_v


# -- nested tensors


def nested(q: Any, k: Any, v: Any, return_lse: bool, **options: Any) -> Any:
    """attention() of nested tensors of the layout torch.jagged, [batch, seqlen, heads, head_dim] with seqlen ragged.

    `options` are those of `attention_varlen`.
    """
    rows, lengths = [], {}
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not is_jagged(t):
            raise TypeError(
                f"{name}: no nested tensor of the layout torch.jagged; allowed: q, k and v that are as q is"
            )
        if t.dim() != 4 or t._ragged_idx != 1:
            ragged = f"{t.dim()} dimensions, of which {t._ragged_idx} is ragged"
            raise ValueError(f"{name}: {ragged}; allowed: [batch, seqlen, heads, head_dim] with seqlen ragged")
        rows.append(t.values())
    # torch gives sequences of the same lengths one symbol.
    if k.shape[1] != v.shape[1]:
        raise ValueError("v: other offsets than those of k; allowed: the same, as nested tensors that share them have")
    for side, t in (("q", q), ("kv", k)):
        lengths[f"cu_seqlens_{side}"], lengths[f"seqused_{side}"] = t.offsets(), t.lengths()
    made = attention_varlen(*rows, return_lse=return_lse, **lengths, **options)
    if not isinstance(made, tuple):
        return _jagged(made, q)
    o, *others = made
    if return_lse:
        others[0] = _jagged(others[0].transpose(0, 1), q).transpose(1, 2)
    return _jagged(o, q), *others


def _jagged(rows: torch.Tensor, like: Any) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(rows, like.offsets(), like.lengths())


# -- what torch is told about the operators

_ARGUMENTS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? seqused_q, Tensor? seqused_kv, SymInt max_seqlen_q, "
    f"SymInt max_seqlen_kv, bool fill_gaps, bool deterministic, {_NUMBERS}, int sm_margin, float softcap=0.0"
)
for _schema, _function in (
    (f"varlen_forward(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> Tensor", _forward),
    (f"varlen_forward_lse(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor)", _forward_lse),
    (
        "varlen_backward(Tensor d_o, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
        f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
        _backward,
    ),
    (
        f"sinks_forward(Tensor q, Tensor k, Tensor v, Tensor sinks, {_ARGUMENTS}) -> (Tensor, Tensor)",
        _forward_sinks,
    ),
    (
        "sinks_backward(Tensor d_o, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor o, Tensor lse, "
        f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
        _backward_sinks,
    ),
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    for _device in ("CPU", "CUDA"):
        _library.impl(_schema.split("(")[0], _function, _device)


@torch.library.register_fake("hopper_attention::varlen_forward", lib=_library)
def _fake_forward(q: Any, k: Any, v: Any, *arguments: Any) -> Any:
    return _empty(q, v)[0]


@torch.library.register_fake("hopper_attention::varlen_forward_lse", lib=_library)
def _fake_forward_lse(q: Any, k: Any, v: Any, *arguments: Any) -> Any:
    return tuple(_empty(q, v))


@torch.library.register_fake("hopper_attention::varlen_backward", lib=_library)
def _fake_backward(d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


@torch.library.register_fake("hopper_attention::sinks_forward", lib=_library)
def _fake_forward_sinks(q: Any, k: Any, v: Any, *arguments: Any) -> Any:
    return tuple(_empty(q, v))


@torch.library.register_fake("hopper_attention::sinks_backward", lib=_library)
def _fake_backward_sinks(d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, sinks: Any, *rest: Any) -> Any:
    return *(t.new_empty(t.shape) for t in (q, k, v)), torch.empty_like(sinks, dtype=torch.float32)


class _Gradients:
    """The autograd formula of an operator on so many `operands`: q, k, v, and maybe sinks."""

    def __init__(self, operands: int, backward: Any) -> None:
        self.operands, self.backward = operands, backward

    def keep(self, ctx: Any, inputs: tuple, output: tuple) -> None:
        tensors = self.operands + len(abi.LENGTHS)
        ctx.save_for_backward(*inputs[:tensors], *output)
        ctx.rest = inputs[tensors:]
        # An output that nobody used then has the gradient None, and not a tensor of zeros.
        ctx.set_materialize_grads(False)

    def __call__(self, ctx: Any, d_o: Any, d_lse: Any) -> tuple:
        *given, o, lse = ctx.saved_tensors
        operands, lists = given[: self.operands], given[self.operands :]
        if d_o is None:
            d_o = torch.zeros_like(o)
        *hints, deterministic = ctx.rest[:4]
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        made = self.backward(d_o, d_lse, *operands, o, lse, *lists, *hints, deterministic, *ctx.rest[4:])
        # That of sinks is f32.
        gradients = (d.to(t.dtype) for d, t in zip(made, operands))
        nothing = (None,) * (len(ctx.needs_input_grad) - self.operands)
        return *(d if wanted else None for d, wanted in zip(gradients, ctx.needs_input_grad)), *nothing


def _no_lse(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "hopper_attention::varlen_forward keeps no log-sum-exp, so it has no gradient; use varlen_forward_lse"
    )


def _second(ctx: Any, *_: Any) -> None:
    raise NotImplementedError("attention_varlen: a second derivative was asked for; allowed: gradients of first order")


for _name, _own in (
    ("varlen_forward_lse", _Gradients(3, torch.ops.hopper_attention.varlen_backward.default)),
    ("sinks_forward", _Gradients(4, torch.ops.hopper_attention.sinks_backward.default)),
):
    torch.library.register_autograd(f"hopper_attention::{_name}", _own, setup_context=_own.keep, lib=_library)
torch.library.register_autograd("hopper_attention::varlen_forward", _no_lse, lib=_library)
torch.library.register_autograd("hopper_attention::varlen_backward", _second, lib=_library)
torch.library.register_autograd("hopper_attention::sinks_backward", _second, lib=_library)


__all__ = [
    "arguments",
    "attention_capped",
    "attention_varlen",
    "dense_arguments",
    "lengths_on",
    "nested",
    "readable_rows",
    "without_lengths",
]
