"""Exact fused attention for NVIDIA Hopper, other GPUs since compute capability 8.0, and the CPU.

    import hopper_attention

    o = hopper_attention.attention(q, k, v, causal=True)     # torch tensors, [batch, seqlen, heads, head_dim]

- `attention`: the forward pass. On torch tensors autograd records it.
- `attention_backward`: the gradients, for arrays of frameworks other than torch.
- `attention_varlen`, `attention_varlen_backward`: the same for packed sequences, and for used lengths.
- `quantize`, `quantize_varlen`, `attention_fp8`: FP8 operands of 16-bit tensors, packed or not, and attention on them.
- `BlockLists`, `block_lists`: block-sparse masks, made once for many calls.
- `block_lists_from_slices`, `block_lists_from_documents`, `block_lists_from_prefixes`, `block_lists_from_spans`: the same
  without a dense mask.
- `dropout_mask`: which pairs a call with dropout keeps.
- `register_sdpa`: torch's scaled_dot_product_attention calls this library.
- `register_transformers`: Hugging Face models run with attn_implementation="hopper_attention".
- `abi`: the C ABI itself.
"""

from __future__ import annotations

import warnings
from typing import Any

from . import _arrays, _philox, abi
from ._block_lists import BlockLists
from ._made_lists import (
    block_lists_from_documents,
    block_lists_from_prefixes,
    block_lists_from_slices,
    block_lists_from_spans,
)
from ._plans import Chunked, Prefix, Window, dropped_of
from .abi import HattnError

__all__ = [
    "BlockLists",
    "Chunked",
    "HattnError",
    "Prefix",
    "abi",
    "attention",
    "attention_backward",
    "attention_fp8",
    "attention_varlen",
    "attention_varlen_backward",
    "block_lists",
    "block_lists_from_documents",
    "block_lists_from_prefixes",
    "block_lists_from_slices",
    "block_lists_from_spans",
    "device_count",
    "dropout_mask",
    "quantize",
    "quantize_varlen",
    "register_sdpa",
    "register_transformers",
    "torch_operators",
    "version",
]

#: Why torch tensors are not taken. None if they are.
_no_torch = None
try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]
    _no_torch = "torch is not installed"
else:
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 8):
        _no_torch = f"torch is {torch.__version__}; this package needs 2.8 or later"
        warnings.warn(f"hopper_attention: {_no_torch}", RuntimeWarning, stacklevel=2)
    else:
        from . import _fp8, _modified, _sinks, _torch, _varlen
        from ._fp8 import Quantized as Quantized

# What _is_torch would take time for in the usual call.
_Tensor = None if _no_torch else torch.Tensor


def _is_torch(*tensors: Any) -> bool:
    if torch is None or not any(isinstance(t, torch.Tensor) for t in tensors):
        return False
    if _no_torch is not None:
        raise ImportError(_no_torch)
    return True


def _need_torch() -> None:
    if _no_torch is not None:
        raise ImportError(_no_torch)


def attention(
    q: Any,
    k: Any,
    v: Any,
    causal: bool = False,
    window: Window = None,
    top_left: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    *,
    out: Any = None,
    lse_out: Any = None,
    stream: int | None = None,
    sm_margin: int = 0,
    workspace_limit: int | None = None,
    s_aux: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    return_max_logits: bool = False,
    max_logits_out: Any = None,
    attn_mask: Any = None,
    block_mask: Any = None,
    bias: Any = None,
    dropout_p: float = 0.0,
    dropout_state: Any = None,
    generator: Any = None,
) -> Any:
    """softmax(mask(scale * q k^T)) v.

    q is [batch, seqlen_q, heads_q, head_dim]. k and v are [batch, seqlen_kv, heads_kv, head_dim]. heads_q is a
    multiple of heads_kv. The head_dim of v may differ. The CPU takes any head dims, and a GPU those of its kernels. The
    innermost stride is 1, and on a GPU the others are multiples of 16 bytes. So a transposed [batch, heads, seqlen,
    head_dim] is read where it lies. Nothing is copied. A call that the library cannot compute raises HattnError.

    - causal: bottom-right aligned. Query i sees keys up to i + seqlen_kv - seqlen_q, its position.
    - window: (left, right) keeps left keys before and right keys after the query's position, and the key at the
      position. None stands for all keys. With causal, both apply. Chunked(keys) is chunked local attention: a query sees
      the keys of its position's chunk up to its position, and chunks have so many keys each, from key 0 on. Prefix(keys)
      lets all queries see the first keys, and the keys up to their positions. Both are causal.
    - top_left: the position of query i is i instead.
    - scale: 1 / sqrt(head_dim) if None.
    - return_lse: gives (o, lse).
    - sm_margin: the number of multiprocessors of a Hopper GPU that the kernels leave to others, such as those of NCCL.
      Gradients leave as many. Older GPUs refuse a margin above 0. The CPU ignores it.
    - workspace_limit: the most bytes that the workspace of a pass may have, its scratch memory on a GPU. Gradients have
      the same limit. Where several thread blocks would compute one tile and leave partial sums there, fewer do, which
      may be slower. A pass that needs more bytes even without that raises HattnError. None: no limit.
    - s_aux: attention sinks, [heads_q]: a logit for each query head, which takes part in the softmax of all its rows and
      has no value. exp(lse) has exp(s_aux) in it. Neither scale nor mask touches it. A query that sees no key has o = 0
      and lse = s_aux. f32 and bf16. Other torch tensors are cast to f32.
    - softcap: a cap c of the scores, finite and above 0: c * tanh(scale * q k / c) takes the place of scale * q k,
      before the mask. None and 0 stand for no cap. Sinks are not capped.
    - alibi_slopes: attention with linear biases (ALiBi), [heads_q] or [batch, heads_q] in f32: a score loses
      alibi_slopes * |i + seqlen_kv - seqlen_q - j| (with top_left and a mask |i - j|), after the cap and before the mask.
      The lse has the whole bias in it. Slopes have no gradient. Other torch tensors are cast to f32.
    - return_max_logits: gives (o, max_logits), or (o, lse, max_logits): the largest score of each query head over the
      batch, its queries and the keys that they see, f32 [heads_q]. -inf if there is none. Scores are those that enter the
      softmax. Sinks do not count. It has no gradient.
    - attn_mask: booleans that broadcast to [batch, heads_q, seqlen_q, seqlen_kv]: True keeps a pair. causal and window
      apply as well. Blocks of 128 queries and 128 keys without a True take no time. A floating-point attn_mask is a bias.
    - block_mask: in its place the BlockMask of torch.nn.attention.flex_attention.create_block_mask, with blocks of 128 x
      128, or `BlockLists`. The mask_mod of a BlockMask is asked once, and what it says of the pairs is kept with the
      BlockMask. So make a new one where tensors that the mask_mod reads change.
    - bias: numbers that broadcast to [batch, heads_q, seqlen_q, seqlen_kv], added to the scores after the cap: f32, bf16 or
      f16, whatever the type of q. -inf hides a pair as a mask does. On torch tensors it has a gradient, in its shape and
      type: computed where the bias requires one. A GPU refuses gradients with softcap by name. With nested tensors it is
      as in `attention_varlen`.
    - dropout_p: dropout: the probability, 0 to below 1, with which a weight becomes 0. The others are multiplied by
      1 / (1 - dropout_p). It is rounded to a multiple of 1/32768. lse, max_logits and the part of sinks are as without.
      A GPU computes it with all masks and lengths. On a Hopper GPU windows above head dim 128 (of packed sequences above
      64), and a bias with lists of blocks, run in sm80 kernels then, which are slower.
    - dropout_state: the seed and the offset of dropout, int64 [2]. `dropout_mask` says which pairs they keep. None: on
      torch tensors they are drawn from the generator, and gradients have the same. Arrays must have them, or their
      four words as int32 [4].
    - generator: a torch.Generator to draw from. None: torch's own of the device.

    o is [batch, seqlen_q, heads_q, head_dim of v] and dense. lse is the log-sum-exp of the scores: f32, [batch,
    heads_q, seqlen_q]. A query that sees no key has o = 0 and lse = -inf.

    On torch tensors:

    - f16 and bf16. On the CPU also f32. Autocast casts all three.
    - The work runs on the device of the tensors, on its current stream.
    - Autograd records the call. o and lse have gradients of first order, also with respect to s_aux.
    - Under torch.use_deterministic_algorithms gradients are the same bits every time.
    - torch.compile takes the call without a graph break.
    - Nested tensors of the layout torch.jagged, with seqlen ragged, are computed as `attention_varlen` does. o is nested
      as q is, and lse is nested, [batch, heads_q, seqlen_q].
    - A CUDA graph can capture it. Run the same shape once before capture: the first run loads the kernel.

    On arrays with __dlpack__ (numpy, CuPy and others) the types are float16 and bfloat16, and float32 on the CPU.
    These options apply, too:

    - out, lse_out, max_logits_out: where o, lse and max_logits are written. numpy and CuPy arrays are allocated if they are missing.
    - stream: a CUDA stream as an integer. None stands for the default stream.
    """
    if type(q) is _Tensor or _is_torch(q, k, v):
        _no_outputs(out, lse_out, stream, max_logits_out)
        modifiers = _modified.Modifiers(
            alibi_slopes,
            return_max_logits,
            (dropout_p, dropout_state, generator),
            bias,
            attn_mask,
            block_mask,
            workspace_limit,
        )
        if type(q) is not _Tensor and _torch.is_jagged(q):
            if attn_mask is not None or block_mask is not None:
                name = "attn_mask" if block_mask is None else "block_mask"
                raise NotImplementedError(f"{name}: given with nested tensors; allowed: dense tensors, or no such mask")
            mask = {"causal": causal, "window": window, "top_left": top_left}
            more = {"sm_margin": sm_margin, "s_aux": s_aux, "softcap": softcap}
            return _varlen.nested(q, k, v, return_lse, scale=scale, attend=modifiers.attend(), **more, **mask)
        numbers = (causal, window, top_left, scale, return_lse, sm_margin)
        if modifiers.any():
            return _modified.attention_modified(q, k, v, s_aux, *numbers, softcap, modifiers)
        if softcap:
            return _varlen.attention_capped(q, k, v, s_aux, *numbers, softcap)
        if s_aux is not None:
            return _sinks.attention_sinks(q, k, v, s_aux, *numbers)
        return _torch.attention(q, k, v, causal, window, top_left, scale, return_lse, sm_margin)
    _no_generator(generator)
    rest = (out, lse_out, stream, sm_margin, s_aux, softcap, alibi_slopes, (return_max_logits, max_logits_out))
    rest = (*rest, (attn_mask, block_mask), bias, (dropout_p, dropout_state), workspace_limit)
    return _arrays.attention(q, k, v, causal, window, top_left, scale, return_lse, *rest)


def attention_backward(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    d_o: Any,
    d_lse: Any = None,
    *,
    causal: bool = False,
    window: Window = None,
    top_left: bool = False,
    scale: float | None = None,
    deterministic: bool = False,
    out: Any = None,
    stream: int | None = None,
    sm_margin: int = 0,
    workspace_limit: int | None = None,
    s_aux: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    attn_mask: Any = None,
    block_mask: Any = None,
    bias: Any = None,
    return_d_bias: bool = False,
    dropout_p: float = 0.0,
    dropout_state: Any = None,
) -> Any:
    """The gradients (d_q, d_k, d_v) of `attention` on arrays with __dlpack__.

    For torch tensors autograd computes them.

    o and lse are what `attention` gave with return_lse and the same options. d_o is the gradient of o, and d_lse that
    of lse. out: three arrays that the gradients are written to. numpy and CuPy arrays are allocated if they are
    missing. sm_margin and workspace_limit need not be those of `attention`. With s_aux there is a fourth gradient, d_s_aux, in f32.
    With return_d_bias the last one is the gradient of the bias, in its shape and type. dropout_state is the one that
    `attention` read.
    """
    if _is_torch(q, k, v):
        raise TypeError("attention_backward: not for torch tensors; call attention(), and backward() of what it gives")
    masks = (attn_mask, block_mask)
    rest = (deterministic, out, stream, sm_margin, s_aux, softcap, alibi_slopes, masks, bias, return_d_bias)
    rest = (*rest, (dropout_p, dropout_state), workspace_limit)
    return _arrays.attention_backward(q, k, v, o, lse, d_o, d_lse, causal, window, top_left, scale, *rest)


def block_lists(mask: Any, q: Any, k: Any) -> BlockLists:
    """The `BlockLists` of a mask for operands of the shapes of q and k: for `block_mask` of many calls.

    mask is what attn_mask or block_mask takes. `attention` makes the lists of a torch mask once by itself, but where
    torch.compile traces it: a call with a BlockMask breaks its graph, and one with these lists does not.
    """
    if _is_torch(q, k):
        booleans = isinstance(mask, torch.Tensor)
        return _blocks.lists_for(None if booleans else mask, mask if booleans else None, q, k)
    return _arrays.lists_for(mask, None, q, q.shape, k.shape)


def dropout_mask(
    dropout_p: float, dropout_state: Any, batch: int, heads_q: int, seqlen_q: int, seqlen_kv: int
) -> Any:
    """Which pairs a call with this dropout keeps: booleans, [batch, heads_q, seqlen_q, seqlen_kv].

    dropout_state is what `attention` takes: int64 [2], the seed and the offset. Of a torch tensor the mask is a tensor
    on its device, and of anything else with two numbers it is a numpy array. The mask does not depend on the device of
    the call, and not on how sequences are packed: of packed sequences the batch is the number of the sequence.
    """
    seed, offset = (int(number) for number in dropout_state)
    sizes = (batch, heads_q, seqlen_q, seqlen_kv)
    if torch is not None and isinstance(dropout_state, torch.Tensor):
        where = {"device": dropout_state.device}
        return _philox.dropout_mask(torch, where, dropped_of(dropout_p), seed, offset, *sizes)
    import numpy

    return _philox.dropout_mask(numpy, {}, dropped_of(dropout_p), seed, offset, *sizes)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any = None,
    causal: bool = False,
    window: Window = None,
    top_left: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    *,
    seqused_q: Any = None,
    seqused_kv: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    deterministic: bool = False,
    fill_gaps: bool = True,
    out: Any = None,
    lse_out: Any = None,
    stream: int | None = None,
    sm_margin: int = 0,
    workspace_limit: int | None = None,
    s_aux: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    return_max_logits: bool = False,
    max_logits_out: Any = None,
    bias: Any = None,
    dropout_p: float = 0.0,
    dropout_state: Any = None,
    generator: Any = None,
) -> Any:
    """`attention` to packed sequences: each query sees the keys of its own sequence alone.

    q is [total_q, heads_q, head_dim]. k and v are [total_kv, heads_kv, head_dim]. Sequence i has the rows from
    cu_seqlens_q[i] to below cu_seqlens_q[i + 1] of q, and those of cu_seqlens_kv of k and v. A sequence may be empty.
    Masks are as in `attention`, and each sequence has its own corner.

    - cu_seqlens_q, cu_seqlens_kv: [batch + 1], the offsets. They do not decrease, and lie in 0 to total. Without
      cu_seqlens_kv packed keys have the offsets of the queries.
    - seqused_q, seqused_kv: [batch]. Each sequence uses that many of its first rows alone. Mask and corner are those
      of the used rows.
    - max_seqlen_q, max_seqlen_kv: about the length of the longest sequence. A hint for speed alone.
    - fill_gaps: rows that belong to no sequence, and rows that are not used, get zeros in o and in gradients, and -inf
      in lse. False: they are not written, and hold whatever was in memory.
    - s_aux: as in `attention`. Rows that belong to no sequence have no sink.
    - softcap, return_max_logits, dropout_p, dropout_state, generator, workspace_limit: as in `attention`.
    - alibi_slopes: as in `attention`, [heads_q] or [batch, heads_q]: of each sequence its own. Distances are those of the
      sequence.
    - bias: as in `attention`, but [1 or batch, 1 or heads_q, 1 or queries, keys]. A batch entry is a sequence. Query 0
      and key 0 are the first ones of each sequence. So a bias as large as the longest sequence serves all of them: T5's
      is [1, heads_q, longest, longest]. Missing dimensions on the left are 1. The keys are not expanded. The queries or
      keys of a dense side are as in `attention`. Numbers that no sequence reaches have gradient 0. The CPU refuses
      sequences that are longer than the bias. A GPU does not look. It leaves out the rows that the bias has no numbers
      for.
    - deterministic: gradients of torch tensors are the same bits every time, as under
      torch.use_deterministic_algorithms.

    One side may have a dense tensor, [batch, seqlen, heads, head_dim], and None as its offsets: q with cu_seqlens_q
    None, or k and v without cu_seqlens_kv. seqused shortens its sequences, too.

    o is [total_q, heads_q, head_dim of v] and lse is f32, [heads_q, total_q]. Of a dense q they are as in `attention`.

    Offsets and used lengths are int32 or int64 tensors of one dimension. Those of int64 are cast where they are. Those
    on the CPU are copied to the GPU of the operands, which waits. Nothing waits for those that are on the GPU.

    The CPU refuses offsets that decrease or lie outside of the tensors, and used lengths that are longer than their
    sequences (HattnError). A GPU does not look: it clamps them. Then o is wrong, and no other memory is touched.

    All else is as in `attention`, the options out, lse_out and stream of arrays included. A second derivative is
    refused.

    - ValueError: the number of dimensions of a tensor does not fit; all four lengths are None; a hint is below 0.
    - TypeError: a tensor has a type that is not taken; an option is not for these tensors.
    - HattnError: the library cannot compute the call, or refuses its numbers.
    """
    if type(q) is _Tensor or _is_torch(q, k, v):
        _no_outputs(out, lse_out, stream, max_logits_out)
        dropout = (dropout_p, dropout_state, generator)
        modifiers = _modified.Modifiers(
            alibi_slopes, return_max_logits, dropout, bias, workspace_limit=workspace_limit
        )
        return _varlen.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_kv,
            causal,
            window,
            top_left,
            scale,
            return_lse,
            seqused_q,
            seqused_kv,
            max_seqlen_q,
            max_seqlen_kv,
            deterministic,
            fill_gaps,
            sm_margin,
            s_aux,
            softcap,
            modifiers.attend(),
        )
    if deterministic:
        raise TypeError("deterministic: for torch tensors; of arrays it is an option of attention_varlen_backward")
    lists, longest = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv), (max_seqlen_q, max_seqlen_kv)
    mask = (causal, window, top_left)
    rest = (fill_gaps, out, lse_out, stream, sm_margin, s_aux, softcap)
    _no_generator(generator)
    more = (alibi_slopes, (return_max_logits, max_logits_out), bias, (dropout_p, dropout_state), workspace_limit)
    return _arrays.attention_varlen(q, k, v, lists, *mask, scale, return_lse, longest, *rest, *more)


def attention_varlen_backward(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    d_o: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any = None,
    d_lse: Any = None,
    *,
    causal: bool = False,
    window: Window = None,
    top_left: bool = False,
    scale: float | None = None,
    seqused_q: Any = None,
    seqused_kv: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    deterministic: bool = False,
    fill_gaps: bool = True,
    out: Any = None,
    stream: int | None = None,
    sm_margin: int = 0,
    workspace_limit: int | None = None,
    s_aux: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    return_d_bias: bool = False,
    dropout_p: float = 0.0,
    dropout_state: Any = None,
) -> Any:
    """The gradients (d_q, d_k, d_v) of `attention_varlen` on arrays with __dlpack__.

    For torch tensors autograd computes them.

    The lengths and options are those of `attention_varlen`, and o and lse are what it gave. d_o and d_lse have the
    shapes of o and lse. The rest is as in `attention_backward`, return_d_bias included. Errors are as in
    `attention_varlen`.
    """
    if _is_torch(q, k, v):
        raise TypeError(
            "attention_varlen_backward: not for torch tensors; call attention_varlen(), and backward() of what it gives"
        )
    lists, longest = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv), (max_seqlen_q, max_seqlen_kv)
    mask = (causal, window, top_left)
    rest = (deterministic, fill_gaps, out, stream, sm_margin, s_aux, softcap, alibi_slopes, bias, return_d_bias)
    rest = (*rest, (dropout_p, dropout_state), workspace_limit)
    return _arrays.attention_varlen_backward(q, k, v, o, lse, d_o, d_lse, lists, *mask, scale, longest, *rest)


def _no_generator(generator: Any) -> None:
    if generator is not None:
        raise TypeError("generator: for torch tensors; arrays take a dropout_state")


def _no_outputs(out: Any, lse_out: Any, stream: Any, max_logits_out: Any) -> None:
    options = {"out": out, "lse_out": lse_out, "stream": stream, "max_logits_out": max_logits_out}
    for name in (name for name, given in options.items() if given is not None):
        raise TypeError(f"{name}: not for torch tensors; allocator and stream are torch's")


def quantize(
    q: Any, k: Any, v: Any, scaling: str = "per_block", hadamard: int | None = None, half_scores: bool = False
) -> Any:
    """Makes FP8 (E4M3) operands of 16-bit torch tensors. On the CPU also of f32.

    - scaling: which elements share a factor: "per_tensor", "per_head", or "per_block" (128 rows of a head).
    - hadamard: a seed. Queries and keys are rotated first, which spreads outliers. The scores stay the same.
    - half_scores: stores Q and K so that the GPU may use f16 score accumulation, which is faster.

    Gives a `Quantized`, which `attention_fp8` takes.
    """
    _need_torch()
    return _fp8.quantize(q, k, v, scaling, hadamard, half_scores)


def quantize_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any = None,
    scaling: str = "per_block",
    hadamard: int | None = None,
    half_scores: bool = False,
    *,
    seqused_q: Any = None,
    seqused_kv: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    fill_gaps: bool = True,
) -> Any:
    """`quantize` of packed sequences, and of used lengths.

    The tensors, offsets, used lengths and hints are those of `attention_varlen`. The `Quantized` keeps the lengths, so
    that `attention_fp8` of it is attention to packed sequences. Values and factors of a sequence are those that it has
    by itself. Rows that belong to no sequence are not read, and have no part in a factor.

    - scaling: "per_tensor" is one factor for all sequences, "per_head" one for each sequence and KV head, [batch,
      heads_kv, 1]. With "per_block" a packed tensor has the factors [heads, floor((total + 127 * batch) / 128)]: those of
      sequence i, whose first row is `begin`, are from floor((begin + 127 * i) / 128) on, one for each 128 of its rows.
    - hadamard, half_scores: as in `quantize`.
    - fill_gaps: rows that belong to no sequence, and rows that are not used, are 0. False: they are not written, nor are
      the factors of blocks that belong to no sequence.

    Offsets that the CPU refuses, and what a GPU does with them, are as in `attention_varlen`, and so are the errors.
    """
    _need_torch()
    lists, longest = (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv), (max_seqlen_q, max_seqlen_kv)
    return _fp8.quantize(q, k, v, scaling, hadamard, half_scores, lists, longest, fill_gaps, packed=True)


def attention_fp8(
    operands: Any,
    causal: bool = False,
    window: Window = None,
    top_left: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    *,
    out_dtype: Any = None,
    scale_o: Any = None,
    return_amax: bool = False,
    sm_margin: int = 0,
    workspace_limit: int | None = None,
    s_aux: Any = None,
    softcap: float | None = None,
    attn_mask: Any = None,
    block_mask: Any = None,
    fill_gaps: bool = True,
) -> Any:
    """`attention` on operands that `quantize` made, and `attention_varlen` on those of `quantize_varlen`. It has no gradient.

    - out_dtype: torch.bfloat16 (the default), torch.float16 or torch.float8_e4m3fn.
    - scale_o: f32 [1], with FP8 outputs: the factor on o before it is rounded.
    - return_amax: gives the largest magnitude of o too, f32 [1], before scale_o.
    - s_aux: attention sinks as in `attention`, without a gradient.
    - softcap: a cap of the scores as in `attention`.
    - workspace_limit: as in `attention`. It can leave long sequences without the split of their last tiles.
    - attn_mask, block_mask: as in `attention`, but no floating-point attn_mask. Not for operands of `quantize_varlen`.
    - fill_gaps: as in `attention_varlen`, for operands of `quantize_varlen`.

    Gives o, or a tuple of o, lse and amax with those that were asked for.
    """
    _need_torch()
    out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
    return _fp8.attention_fp8(
        operands,
        causal,
        window,
        top_left,
        scale,
        return_lse,
        out_dtype,
        scale_o,
        return_amax,
        sm_margin,
        s_aux,
        softcap,
        attn_mask,
        block_mask,
        fill_gaps,
        workspace_limit,
    )


def register_sdpa() -> Any:
    """Makes torch's scaled_dot_product_attention call this library where it chose its flash backend, on CUDA tensors.

    Gives a handle. handle.remove() puts torch's own kernels back. Needs
    torch.nn.attention.register_flash_attention_impl.
    """
    _need_torch()
    from . import _sdpa

    return _sdpa.register()


def register_transformers(name: str = "hopper_attention") -> None:
    """Registers attention and its mask function with Hugging Face transformers.

    Then `model.set_attn_implementation("hopper_attention")`, or attn_implementation="hopper_attention" where a model
    is made. Padding, packed sequences by cu_seq_lens_q and cu_seq_lens_k or by position_ids, softcap and s_aux are
    computed. So is attention_dropout, in training, and a 4-d attention_mask, whose numbers may be added to the scores.
    What the library does not compute raises NotImplementedError: the argument position_bias.
    """
    _need_torch()
    from . import _transformers

    _transformers.register(name)


def device_count() -> int:
    """The number of GPUs that the driver shows. 0 without a driver."""
    return abi.load().device_count()


def torch_operators() -> str:
    """Which operators torch calls: "compiled", or "ctypes: " and why. The ctypes ones cost more time a call.

    "compiled, recorded in Python: " and why, if torch lacks the operator that eager calls on a GPU go through.
    """
    _need_torch()
    if _torch.fallback is not None:
        return f"ctypes: {_torch.fallback}"
    return "compiled" if _torch.no_direct is None else f"compiled, recorded in Python: {_torch.no_direct}"


def version() -> str:
    """The version of the shared library."""
    return abi.load().version
