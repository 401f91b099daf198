"""FP8 on torch tensors: the quantiser, and attention on what it gives. Both take packed sequences and used lengths."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Optional

import torch

from . import abi
from ._block_lists import fields_of
from ._blocks import lists_for
from ._calls import Call, prepared
from ._plans import (
    Hints,
    Mask,
    Window,
    descale_shapes,
    hints_of,
    lists_of,
    limit_of,
    margin_of,
    mask_of,
    output_shapes,
    packed_problem,
    plans,
    scale_of,
    scaling_of,
    softcap_of,
)
from ._sinks import operand
from ._torch import DTYPES, _library, described, ordinal, run
from ._varlen import lengths_on

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
    #: The lengths of `quantize_varlen`, int32 on the device of the operands. Factors per block belong to these offsets.
    cu_seqlens_q: Optional[torch.Tensor] = None
    cu_seqlens_kv: Optional[torch.Tensor] = None
    seqused_q: Optional[torch.Tensor] = None
    seqused_kv: Optional[torch.Tensor] = None
    #: The hints of `quantize_varlen`. 0: not known.
    max_seqlen_q: int = 0
    max_seqlen_kv: int = 0

    def lengths(self) -> tuple:
        """The offsets and used lengths, in the order of `abi.LENGTHS`."""
        return self.cu_seqlens_q, self.cu_seqlens_kv, self.seqused_q, self.seqused_kv


def _check(packed: bool, **tensors: torch.Tensor) -> None:
    for name, t in tensors.items():
        if t.is_nested:
            allowed = "dense tensors, and packed ones in quantize_varlen"
            raise TypeError(f"{name}: a nested tensor of the layout {t.layout}; allowed with FP8: {allowed}")
        if t.ndim != 4 and not packed:
            hint = "; packed ones of 3 go to quantize_varlen" if t.ndim == 3 else ""
            raise ValueError(f"{name}: {t.ndim} dimensions; allowed: 4, [batch, seqlen, heads, head_dim]{hint}")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: it requires a gradient, and FP8 has none; detach it, or use torch.no_grad()")


def quantize(
    q: Any,
    k: Any,
    v: Any,
    scaling: str,
    hadamard: Optional[int],
    half_scores: bool,
    lists: tuple = (None, None, None, None),
    longest: tuple = (None, None),
    fill_gaps: bool = False,
    packed: bool = False,
) -> Quantized:
    """See hopper_attention.quantize, and of `packed` tensors or used lengths hopper_attention.quantize_varlen."""
    _check(packed, q=q, k=k, v=v)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dtype not in _SOURCES:
            raise TypeError(f"{name}: {t.dtype}; allowed: {', '.join(map(str, _SOURCES))}")
    here = lengths_on(lists_of(q, k, v, lists, "quantize()"), q.device) if packed else lists
    hints = hints_of(*longest, fill_gaps)
    results = torch.ops.hopper_attention.quantize(
        q, k, v, scaling_of(scaling), hadamard is not None, hadamard or 0, half_scores, *here, *hints
    )
    return Quantized(*results[:6], scaling, half_scores, results[6], *here, *hints[:2])


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
    fill_gaps: bool = True,
    workspace_limit: Optional[int] = None,
) -> Any:
    """See hopper_attention.attention_fp8."""
    q, k, v, lengths = *operands[:3], operands.lengths()
    packed = any(given is not None for given in lengths)
    _check(packed, q=q, k=k, v=v)
    hints = Hints(0, 0, False)
    if packed:
        lengths = lengths_on(lists_of(q, k, v, lengths), q.device)
        hints = hints_of(operands.max_seqlen_q, operands.max_seqlen_kv, fill_gaps)
    if out_dtype not in _OUTPUTS:
        raise TypeError(f"out_dtype: {out_dtype}; allowed: {', '.join(map(str, _OUTPUTS))}")
    sinks = None
    if s_aux is not None:
        sinks = operand(s_aux, q.device)
        if s_aux.requires_grad and torch.is_grad_enabled():
            raise ValueError("s_aux: it requires a gradient, and FP8 has none; detach it, or use torch.no_grad()")
    lists = {}
    if attn_mask is not None or block_mask is not None:
        if packed:
            name = "attn_mask" if block_mask is None else "block_mask"
            allowed = "dense operands, or no such mask"
            raise NotImplementedError(f"{name}: given with packed sequences or used lengths; allowed: {allowed}")
        if isinstance(attn_mask, torch.Tensor) and attn_mask.is_floating_point():
            raise TypeError(f"attn_mask: {attn_mask.dtype}; allowed with FP8: tensors of torch.bool (True keeps a pair)")
        lists = lists_for(block_mask, attn_mask, q, k).named()
    o, lse, amax = torch.ops.hopper_attention.forward_fp8(
        q,
        k,
        v,
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
        *lengths,
        *hints,
        limit_of(workspace_limit),
    )
    results = (o, *([lse] if return_lse else []), *([amax] if return_amax else []))
    return results if len(results) > 1 else o


# They came later, and stand at the end, so that calls without them stay right.
_LENGTHS = (
    f"{', '.join(f'Tensor? {name}=None' for name in abi.LENGTHS)}, SymInt max_seqlen_q=0, SymInt max_seqlen_kv=0, "
    "bool fill_gaps=False"
)
_NO_LENGTHS = (None, None, None, None, 0, 0, False)
_library.define(
    f"quantize(Tensor q, Tensor k, Tensor v, int scaling, bool hadamard, int seed, bool half_scores, {_LENGTHS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "forward_fp8(Tensor q, Tensor k, Tensor v, Tensor descale_q, Tensor descale_k, Tensor descale_v, Tensor? scale_o,"
    " float scale, int mask, int corner, int window_left, int window_right, int scaling, int output, bool lse, bool amax,"
    " bool half_scores, int sm_margin=0, Tensor? sinks=None, float softcap=0.0,"
    f" {', '.join(f'Tensor? {name}=None' for name in abi.BLOCK_LISTS)}, {_LENGTHS}, int workspace_limit=0)"
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _lengths_of(rest: tuple) -> tuple:
    """The offsets and used lengths by their names, and the hints. The dispatcher leaves out, from the end, what is as usual."""
    *lists, max_seqlen_q, max_seqlen_kv, fill_gaps = *rest, *_NO_LENGTHS[len(rest) :]
    return dict(zip(abi.LENGTHS, lists)), Hints(max_seqlen_q, max_seqlen_kv, bool(fill_gaps))


def _quantize_outputs(q: Any, k: Any, v: Any, scaling: int, lists: dict) -> list:
    stored = [t.new_empty(t.shape, dtype=torch.float8_e4m3fn) for t in (q, k, v)]
    factors = (q.new_empty(shape, dtype=torch.float32) for shape in descale_shapes(scaling, q, k, v, lists))
    return [*stored, *factors, q.new_empty((3, 2), dtype=torch.float32)]


def _quantize(q: Any, k: Any, v: Any, scaling: int, hadamard: bool, seed: int, half_scores: bool, *rest: Any) -> tuple:
    lists, hints = _lengths_of(rest)
    outputs = _quantize_outputs(q, k, v, scaling, lists)
    options = {"dtype": abi.E4M3, "scaling": scaling, "half_scores": int(half_scores)}
    forward = packed_problem(q, k, v, lists, hints, **options)
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
    lengths = {name: _struct(t) for name, t in lists.items() if t is not None}
    plan.run(*ones, structs[9], address, plan.workspace_bytes, stream, **lengths)
    return tuple(outputs)


def _struct(t: torch.Tensor) -> abi.Tensor:
    dtype, device, shape, stride = described(t)
    return abi.tensor(t.data_ptr(), dtype, shape, stride, device)


def _fp8_outputs(q: Any, v: Any, output: int, lse: bool, amax: bool) -> list:
    dtype = next(kind for kind, number in DTYPES.items() if number == output)
    of_o, of_lse = output_shapes(q.shape, v.shape)
    return [
        q.new_empty(of_o, dtype=dtype),
        q.new_empty(of_lse if lse else (0,), dtype=torch.float32),
        q.new_empty((1,) if amax else (0,), dtype=torch.float32),
    ]


def _forward_fp8(q: Any, k: Any, v: Any, dq: Any, dk: Any, dv: Any, scale_o: Any, *rest: Any) -> tuple:
    # The dispatcher leaves out what is as it is by default, from the end.
    usual = (0, None, 0.0, *(None for _ in abi.BLOCK_LISTS))
    (scale, *mask), (scaling, output, lse, amax, half_scores) = rest[:5], rest[5:10]
    sm_margin, sinks, softcap, *blocks = *rest[10:18], *usual[len(rest[10:]) :]
    lists, hints = _lengths_of(rest[18:25])
    (workspace_limit,) = rest[25:] or (0,)
    o, lse_out, amax_out = outputs = _fp8_outputs(q, v, output, lse, amax)
    given = {"q": q, "k": k, "v": v, "o": o, "descale_q": dq, "descale_k": dk, "descale_v": dv}
    given |= {"lse": lse_out} if lse else {}
    given |= {"scale_o": scale_o} if scale_o is not None else {}
    given |= {"amax": amax_out} if amax else {}
    given |= {"sinks": sinks} if sinks is not None else {}
    given |= {name: t for name, t in (*zip(abi.BLOCK_LISTS, blocks), *lists.items()) if t is not None}

    def make() -> Call:
        options = {
            "dtype": DTYPES[q.dtype],
            "softmax_scale": scale,
            **dict(zip(Mask._fields, mask)),
            "sm_margin": margin_of(sm_margin),
            "workspace_limit": workspace_limit,
            "lse": int(lse),
            "amax": int(amax),
            "output": output,
            "scaling": scaling,
            "half_scores": int(half_scores),
            "sinks": 0 if sinks is None else DTYPES[sinks.dtype],
            "softcap": softcap,
            **fields_of(given),
        }
        problem = packed_problem(q, k, v, lists, hints, **options)
        return Call(abi.ForwardArgs, problem, ordinal(q.device), {name: described(t) for name, t in given.items()})

    numbers = (*rest[:10], sm_margin, workspace_limit, softcap, hints)
    key = (numbers, *((name, t.dtype, t.device, t.shape, t.stride()) for name, t in given.items()))
    run(prepared(key, make), q, tuple(given.values()))
    return tuple(outputs)


for _name, _function in (("quantize", _quantize), ("forward_fp8", _forward_fp8)):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _function, _device)


@torch.library.register_fake("hopper_attention::quantize", lib=_library)
def _fake_quantize(q: Any, k: Any, v: Any, scaling: int, hadamard: bool, seed: int, half: bool, *rest: Any) -> tuple:
    return tuple(_quantize_outputs(q, k, v, scaling, _lengths_of(rest)[0]))


@torch.library.register_fake("hopper_attention::forward_fp8", lib=_library)
def _fake_forward_fp8(q: Any, k: Any, v: Any, dq: Any, dk: Any, dv: Any, scale_o: Any, *rest: Any) -> tuple:
    output, lse, amax = rest[6:9]
    return tuple(_fp8_outputs(q, v, output, lse, amax))
