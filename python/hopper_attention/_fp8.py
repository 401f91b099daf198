"""FP8 on torch tensors: the quantiser, and attention on what it gives."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Optional

import torch

from . import abi
from ._block_lists import fields_of
from ._blocks import lists_for
from ._calls import Call, prepared
from ._plans import Window, descale_shape, margin_of, mask_of, plans, scale_of, scaling_of, softcap_of
from ._sinks import operand
from ._torch import DTYPES, _library, described, ordinal, problem_of, run

_SOURCES = (torch.float16, torch.bfloat16, torch.float32)
_OUTPUTS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


class Quantized(NamedTuple):
    """Operands of E4M3 with their descale factors.

    `attention_fp8` takes them. A real value is the stored one times its factor.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    descale_q: torch.Tensor
    descale_k: torch.Tensor
    descale_v: torch.Tensor
    scaling: str
    half_scores: bool
    #: f32 [3, 2], for q, k and v: elements stored as the largest value because they were above it; elements not
    #: finite.
    counts: torch.Tensor


def _check(**tensors: torch.Tensor) -> None:
    for name, t in tensors.items():
        if t.ndim != 4:
            raise ValueError(f"{name}: {t.ndim} dimensions; allowed: 4, [batch, seqlen, heads, head_dim]")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: it requires a gradient, and FP8 has none; detach it, or use torch.no_grad()")


def quantize(q: Any, k: Any, v: Any, scaling: str, hadamard: Optional[int], half_scores: bool) -> Quantized:
    """See hopper_attention.quantize."""
    _check(q=q, k=k, v=v)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dtype not in _SOURCES:
            raise TypeError(f"{name}: {t.dtype}; allowed: {', '.join(map(str, _SOURCES))}")
    results = torch.ops.hopper_attention.quantize(
        q, k, v, scaling_of(scaling), hadamard is not None, hadamard or 0, half_scores
    )
    return Quantized(*results[:6], scaling, half_scores, results[6])


def attention_fp8(
    operands: Quantized,
    causal: bool,
    window: Window,
    top_left: bool,
    scale: Optional[float],
    return_lse: bool,
    out_dtype: Any,
    scale_o: Optional[torch.Tensor],
    return_amax: bool,
    sm_margin: int,
    s_aux: Optional[torch.Tensor] = None,
    softcap: Optional[float] = None,
    attn_mask: Any = None,
    block_mask: Any = None,
) -> Any:
    """See hopper_attention.attention_fp8."""
    _check(q=operands.q, k=operands.k, v=operands.v)
    if out_dtype not in _OUTPUTS:
        raise TypeError(f"out_dtype: {out_dtype}; allowed: {', '.join(map(str, _OUTPUTS))}")
    sinks = None
    if s_aux is not None:
        sinks = operand(s_aux, operands.q.device)
        if s_aux.requires_grad and torch.is_grad_enabled():
            raise ValueError("s_aux: it requires a gradient, and FP8 has none; detach it, or use torch.no_grad()")
    lists = {}
    if attn_mask is not None or block_mask is not None:
        if isinstance(attn_mask, torch.Tensor) and attn_mask.is_floating_point():
            raise TypeError(f"attn_mask: {attn_mask.dtype}; allowed with FP8: tensors of torch.bool (True keeps a pair)")
        lists = lists_for(block_mask, attn_mask, operands.q, operands.k).named()
    o, lse, amax = torch.ops.hopper_attention.forward_fp8(
        operands.q,
        operands.k,
        operands.v,
        operands.descale_q,
        operands.descale_k,
        operands.descale_v,
        scale_o,
        scale_of(scale),
        *mask_of(causal, window, top_left),
        scaling_of(operands.scaling),
        DTYPES[out_dtype],
        return_lse,
        return_amax,
        operands.half_scores,
        margin_of(sm_margin),
        sinks,
        softcap_of(softcap),
        *(lists.get(name) for name in abi.BLOCK_LISTS),
    )
    results = (o, *([lse] if return_lse else []), *([amax] if return_amax else []))
    return results if len(results) > 1 else o


_library.define(
    "quantize(Tensor q, Tensor k, Tensor v, int scaling, bool hadamard, int seed, bool half_scores)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "forward_fp8(Tensor q, Tensor k, Tensor v, Tensor descale_q, Tensor descale_k, Tensor descale_v, Tensor? scale_o,"
    " float scale, int mask, int corner, int window_left, int window_right, int scaling, int output, bool lse, bool amax,"
    " bool half_scores, int sm_margin=0, Tensor? sinks=None, float softcap=0.0,"
    f" {', '.join(f'Tensor? {name}=None' for name in abi.BLOCK_LISTS)}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _quantize_outputs(q: Any, k: Any, v: Any, scaling: int) -> list:
    stored = [t.new_empty(t.shape, dtype=torch.float8_e4m3fn) for t in (q, k, v)]
    shapes = [descale_shape(scaling, t.shape[0], t.shape[2], k.shape[2], t.shape[1]) for t in (q, k, v)]
    return [
        *stored,
        *(q.new_empty(shape, dtype=torch.float32) for shape in shapes),
        q.new_empty((3, 2), dtype=torch.float32),
    ]


def _quantize(q: Any, k: Any, v: Any, scaling: int, hadamard: bool, seed: int, half_scores: bool) -> tuple:
    outputs = _quantize_outputs(q, k, v, scaling)
    forward = abi.ForwardProblem.of(q, k, v, dtype=abi.E4M3, scaling=scaling, half_scores=int(half_scores))
    problem = abi.QuantizeProblem(
        forward=ctypes.pointer(forward), source=DTYPES[q.dtype], hadamard=int(hadamard), seed=seed if hadamard else 0
    )
    plan = plans().get(ordinal(q.device), problem)
    structs = [_struct(t) for t in (q, k, v, *outputs)]
    pointers = [ctypes.pointer(struct) for struct in structs]
    ones = [abi.QuantizeTensor(values=pointers[i], stored=pointers[3 + i], descale=pointers[6 + i]) for i in range(3)]
    workspace = q.new_empty((plan.workspace_bytes,), dtype=torch.uint8)
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else None
    address = workspace.data_ptr() if plan.workspace_bytes else None
    plan.run(*ones, structs[9], address, plan.workspace_bytes, stream)
    return tuple(outputs)


def _struct(t: torch.Tensor) -> abi.Tensor:
    dtype, device, shape, stride = described(t)
    return abi.tensor(t.data_ptr(), dtype, shape, stride, device)


def _fp8_outputs(q: Any, v: Any, output: int, lse: bool, amax: bool) -> list:
    dtype = next(kind for kind, number in DTYPES.items() if number == output)
    return [
        q.new_empty((*q.shape[:3], v.shape[3]), dtype=dtype),
        q.new_empty((q.shape[0], q.shape[2], q.shape[1]) if lse else (0,), dtype=torch.float32),
        q.new_empty((1,) if amax else (0,), dtype=torch.float32),
    ]


def _forward_fp8(q: Any, k: Any, v: Any, dq: Any, dk: Any, dv: Any, scale_o: Any, *rest: Any) -> tuple:
    # The dispatcher leaves out what is as it is by default, from the end: the margin, the sinks, the softcap and the lists.
    numbers, (scaling, output, lse, amax, half_scores) = rest[:5] + rest[10:11], rest[5:10]
    usual = (None, 0.0, *(None for _ in abi.BLOCK_LISTS))
    sinks, softcap, *lists = *rest[11:], *usual[len(rest[11:]) :]
    o, lse_out, amax_out = outputs = _fp8_outputs(q, v, output, lse, amax)
    given = {"q": q, "k": k, "v": v, "o": o, "descale_q": dq, "descale_k": dk, "descale_v": dv}
    given |= {"lse": lse_out} if lse else {}
    given |= {"scale_o": scale_o} if scale_o is not None else {}
    given |= {"amax": amax_out} if amax else {}
    given |= {"sinks": sinks} if sinks is not None else {}
    given |= {name: t for name, t in zip(abi.BLOCK_LISTS, lists) if t is not None}

    def make() -> Call:
        options = {
            "lse": int(lse),
            "amax": int(amax),
            "output": output,
            "scaling": scaling,
            "half_scores": int(half_scores),
            "sinks": 0 if sinks is None else DTYPES[sinks.dtype],
            "softcap": softcap,
            **fields_of(given),
        }
        problem = problem_of(q, k, v, *numbers, **options)
        return Call(abi.ForwardArgs, problem, ordinal(q.device), {name: described(t) for name, t in given.items()})

    key = (rest[:11], softcap, *((name, t.dtype, t.device, t.shape, t.stride()) for name, t in given.items()))
    run(prepared(key, make), q, tuple(given.values()))
    return tuple(outputs)


for _name, _function in (("quantize", _quantize), ("forward_fp8", _forward_fp8)):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _function, _device)


@torch.library.register_fake("hopper_attention::quantize", lib=_library)
def _fake_quantize(q: Any, k: Any, v: Any, scaling: int, *rest: Any) -> tuple:
    return tuple(_quantize_outputs(q, k, v, scaling))


@torch.library.register_fake("hopper_attention::forward_fp8", lib=_library)
def _fake_forward_fp8(q: Any, k: Any, v: Any, dq: Any, dk: Any, dv: Any, scale_o: Any, *rest: Any) -> tuple:
    output, lse, amax = rest[6:9]
    return tuple(_fp8_outputs(q, v, output, lse, amax))
