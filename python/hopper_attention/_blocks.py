"""Block-sparse masks as torch tensors have them: torch's BlockMask, boolean masks, and lists of blocks.

`lists_for` makes the lists that the library reads.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Hashable, Tuple

import torch

from ._block_lists import BLOCK, WORDS, BlockLists, blocks, of_four, one_of
from ._torch import _raw_stream

#: The partial blocks of which a mask_mod is asked at a time, and the pairs of which a boolean mask is read at a time.
#: They bound the temporary memory: some 100 MB.
_BLOCKS_AT_A_TIME, _PAIRS_AT_A_TIME = 128, 2**25


# -- from masks to lists


def lists_for(block_mask: Any, attn_mask: Any, q: Any, k: Any) -> BlockLists:
    """The lists of a call on q and k, of which one of both masks is given."""
    one_of(block_mask, attn_mask)
    sizes = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if attn_mask is not None:
        return _of_bools(attn_mask, sizes, q.device)
    if isinstance(block_mask, BlockLists):
        return _of_lists(block_mask, q.device)
    return _of_block_mask(block_mask, sizes, q.device)


def _of_lists(lists: BlockLists, device: torch.device) -> BlockLists:
    for name, given in zip(BlockLists._fields, lists):
        if given is None and name.startswith("full_"):
            continue
        if not isinstance(given, torch.Tensor) or given.dtype not in (torch.int32, torch.int64):
            what = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
            raise TypeError(f"block_mask.{name}: {what}; allowed: tensors of torch.int32 or torch.int64")
        if given.ndim != (3 if name.endswith("counts") else 4):
            allowed = "3, [B, H, Qb]" if name.endswith("counts") else "4, [B, H, Qb, ...]"
            raise ValueError(f"block_mask.{name}: {given.ndim} dimensions; allowed: {allowed}")
    _both_full(lists.full_counts, lists.full_indices)
    return BlockLists(*(None if t is None else _int32(t, device) for t in lists))


def _both_full(counts: Any, indices: Any) -> None:
    if (counts is None) != (indices is None):
        raise ValueError("block_mask: one of the counts and the indices of full blocks is missing; allowed: both, or none")


def _int32(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    if t.dtype == torch.int64:
        # Numbers that int32 does not hold become its largest or smallest, which are no blocks.
        t = t.clamp(torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max)
    return t.to(device=device, dtype=torch.int32).contiguous()


class _Kept:
    """The lists of masks that live. Layers and steps share a mask, so that its lists are made once.

    A mask is known by itself, the version of its contents, and where and for which sizes the lists are: also the stream
    on which they were made, since no other one waits for it.
    """

    def __init__(self) -> None:
        self._lists: dict = {}

    def get(self, mask: Any, version: Hashable, sizes: tuple, device: torch.device, make: Callable) -> Any:
        stream = _raw_stream(device.index) if device.type == "cuda" else None
        key = (version, sizes, device, stream)
        of_mask = self._lists.get(id(mask))
        if of_mask is not None and of_mask[0]() is mask and key in of_mask[1]:
            return of_mask[1][key]
        lists = _normally(make)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # They are memory of the graph's own.
            return lists
        if of_mask is None or of_mask[0]() is not mask:
            mine, number = self._lists, id(mask)
            of_mask = (weakref.ref(mask, lambda _: mine.pop(number, None)), {})
            mine[number] = of_mask
        elif any(its[0] != version for its in of_mask[1]):
            # Of contents that are no more.
            of_mask[1].clear()
        of_mask[1][key] = lists
        return lists


_kept = _Kept()


def _normally(make: Callable) -> Any:
    """Makes lists that autograd can save, and that are no part of a graph."""
    with torch.inference_mode(False), torch.no_grad():
        return make()


def _transformed() -> bool:
    """Whether the call is in one of torch.func's transformations, whose tensors are no others'."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _of_bools(mask: Any, sizes: Tuple[int, int, int, int], device: torch.device) -> BlockLists:
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        what = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(f"attn_mask: {what}; allowed: tensors of torch.bool (True keeps a pair) or of floating-point numbers")
    shape = of_four(mask.shape, sizes)

    def make() -> BlockLists:
        return lists_of_mask(mask.to(device).expand(shape))

    return kept_lists(mask, sizes, device, make)


def kept_lists(mask: torch.Tensor, sizes: tuple, device: torch.device, make: Callable) -> Any:
    """The lists of a tensor for operands of these sizes, or what else `make` makes of it where nothing is kept.

    Tensors of inference mode have no version, so that their lists are made each time.
    """
    if torch.compiler.is_compiling() or _transformed() or mask.is_inference():
        return make()
    return _kept.get(mask, mask._version, sizes, device, make)


def _packed(pairs: torch.Tensor) -> torch.Tensor:
    """The bits of [..., 8 * n] booleans as bytes, [..., n]. The lowest bit is the first."""
    # (Made on the device: a copy of numbers from the host would wait for it.)
    places = torch.arange(8, dtype=torch.uint8, device=pairs.device)
    weights = torch.ones_like(places) << places
    return (pairs.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)


def lists_of_mask(mask: torch.Tensor) -> BlockLists:
    """The lists of booleans [B, H, seqlen_q, seqlen_kv]. Nothing waits for a GPU: the lists are as long as those of all blocks."""
    batch, heads, rows, columns = mask.shape
    q_blocks, k_blocks = blocks(rows), blocks(columns)
    at_a_time = max(1, _PAIRS_AT_A_TIME // max(1, batch * heads * BLOCK * k_blocks * BLOCK))
    parts = [
        _lists_of_rows(mask[:, :, begin * BLOCK : (begin + at_a_time) * BLOCK]) for begin in range(0, q_blocks, at_a_time)
    ]
    if not parts or not k_blocks:
        counts = torch.zeros((batch, heads, q_blocks), dtype=torch.int32, device=mask.device)
        indices = counts.new_zeros((*counts.shape, k_blocks))
        bits = counts.new_zeros((*counts.shape, k_blocks * WORDS))
        return BlockLists(counts, indices, bits, counts.clone(), indices.clone())
    return BlockLists(*(one[0] if len(parts) == 1 else torch.cat(one, 2) for one in zip(*parts)))


def _lists_of_rows(mask: torch.Tensor) -> tuple:
    """`lists_of_mask` of some blocks of queries."""
    *_, rows, columns = mask.shape
    q_blocks, k_blocks = blocks(rows), blocks(columns)
    # Pairs past the ends of the sequences are 0, and are not counted.
    padded = torch.nn.functional.pad(mask, (0, k_blocks * BLOCK - columns, 0, q_blocks * BLOCK - rows))
    padded = padded.unflatten(2, (q_blocks, BLOCK)).unflatten(4, (k_blocks, BLOCK))
    kept = padded.sum((3, 5))
    in_rows, in_columns = (
        (n - torch.arange(of, device=mask.device) * BLOCK).clamp(max=BLOCK)
        for n, of in ((rows, q_blocks), (columns, k_blocks))
    )
    pairs = in_rows[:, None] * in_columns
    bits = _packed(padded).transpose(3, 4).contiguous().view(torch.int32).flatten(4)

    def listed(wanted: torch.Tensor) -> tuple:
        # The blocks that are wanted come first, in order.
        order = torch.sort(wanted.to(torch.int8), dim=-1, descending=True, stable=True).indices
        return wanted.sum(-1, dtype=torch.int32), order

    full = listed(kept == pairs)
    counts, order = listed((kept > 0) & (kept < pairs))
    bits = bits.gather(3, order[..., None].expand(bits.shape)).flatten(3)
    return counts, order.to(torch.int32), bits, full[0], full[1].to(torch.int32)


# -- from torch's BlockMask


@torch.compiler.disable
def _of_block_mask(block_mask: Any, sizes: Tuple[int, int, int, int], device: torch.device) -> BlockLists:
    """The lists of a BlockMask. torch.compile breaks its graph here, as nothing else of BlockLists does."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        what = type(block_mask).__name__
        raise TypeError(f"block_mask: {what}; allowed: torch's BlockMask and hopper_attention.BlockLists")
    its = tuple(block_mask.BLOCK_SIZE)
    if its != (BLOCK, BLOCK):
        raise NotImplementedError(f"block_mask: BLOCK_SIZE {its}; allowed: ({BLOCK}, {BLOCK}), as create_block_mask has it")
    for name, length, size in zip(("queries", "keys"), block_mask.seq_lengths, sizes[2:]):
        if length < size or blocks(length) != blocks(size):
            raise ValueError(f"block_mask: made for {length} {name}; allowed: {size}, which q, k and v have")
    _both_full(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    if _transformed():
        return _lists_of_block_mask(block_mask, sizes, device)
    return _kept.get(block_mask, None, sizes, device, lambda: _lists_of_block_mask(block_mask, sizes, device))


def _lists_of_block_mask(block_mask: Any, sizes: Tuple[int, int, int, int], device: torch.device) -> BlockLists:
    counts, indices = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, sizes, device)
    full: tuple = (None, None)
    if block_mask.full_kv_num_blocks is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, sizes, device)
    # The bits are made where the mask is: that is where the tensors of its mask_mod are.
    where = block_mask.kv_num_blocks.device
    bits = _bits_of(block_mask.mask_mod, counts.to(where), indices.to(where), sizes[2:])
    return BlockLists(counts, indices, bits.to(device), *full)


def _listed(counts: torch.Tensor, indices: torch.Tensor, sizes: tuple, device: torch.device) -> tuple:
    """Counts [B, H, Qb] and indices [B, H, Qb, Kb] of a BlockMask, which may have fewer dimensions, and fewer columns."""
    if counts.ndim > 3 or indices.ndim != counts.ndim + 1:
        shapes = f"kv_num_blocks of {counts.ndim} and kv_indices of {indices.ndim}"
        raise ValueError(f"block_mask: {shapes} dimensions; allowed: up to 3, [B, H, blocks of queries], and one more")
    counts, indices = (_int32(t, device).reshape((1,) * (n - t.ndim) + t.shape) for t, n in ((counts, 3), (indices, 4)))
    lacking = blocks(sizes[3]) - indices.shape[3]
    if lacking < 0 or counts.shape[2] != blocks(sizes[2]):
        got = f"{counts.shape[2]} x {indices.shape[3]} blocks"
        raise ValueError(f"block_mask: {got}; allowed: {blocks(sizes[2])} x {blocks(sizes[3])}, which q, k and v have")
    return counts, torch.nn.functional.pad(indices, (0, lacking)).contiguous()


def _indexing() -> Any:
    """In it, tensors are indexed by numbers that are mapped over, as torch's create_mask does it."""
    try:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    except ImportError:
        return contextlib.nullcontext()
    return TransformGetItemToIndex()


def _bits_of(mask_mod: Any, counts: torch.Tensor, indices: torch.Tensor, lengths: Tuple[int, int]) -> torch.Tensor:
    """The bits of the partial blocks: [B, H, Qb, most * 512]. They are read once from a GPU, which waits.

    Lists may hold anything. Counts that no list can have are clamped, and so are indices. The library refuses them, or
    leaves them out.
    """
    shape, device = counts.shape, counts.device
    counts = counts.clamp(0, indices.shape[3])
    most = int(counts.max()) if counts.numel() else 0
    bits = torch.zeros((*shape, most, WORDS), dtype=torch.int32, device=device)
    if not most:
        return bits.flatten(3)
    of_keys = mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        of_keys = torch.vmap(of_keys, in_dims=dims)
    places = (torch.arange(most, device=device) < counts[..., None]).nonzero()
    within = torch.arange(BLOCK, device=device)
    for at in places.split(_BLOCKS_AT_A_TIME):
        b, h, row, place = at.unbind(1)
        blocks_of_keys = indices[b, h, row, place].long()
        # Past the ends of the sequences the mask_mod's tensors may end, too. Those bits are not used.
        q, kv = (
            (block[:, None] * BLOCK + within).clamp(0, length - 1)
            for block, length in ((row, lengths[0]), (blocks_of_keys, lengths[1]))
        )
        with _indexing():
            kept = of_keys(b, h, q, kv)
        bits[b, h, row, place] = _packed(kept.bool()).view(torch.int32).flatten(1)
    return bits.flatten(3)


__all__ = ["kept_lists", "lists_for", "lists_of_mask"]
