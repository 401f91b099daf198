"""Lists of blocks that are made on the host of slices, documents, prefixes and spans.

The Rust crate's `OwnedBlockLists` has the same four, with the same rules. A mask is here what each query keeps: intervals
of keys. An interval is looked at where it ends, and not pair by pair. So the cost grows with queries and blocks.
"""

from __future__ import annotations

import array
import operator
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from . import abi
from ._arrays import _numpy_of
from ._block_lists import BLOCK, WORDS, BlockLists, blocks
from ._plans import Mask, Window, mask_of

#: The first key, and the one after the last.
Keys = Tuple[int, int]
#: The keys that a query of a batch entry keeps. They may overlap, be empty, and be in any order.
KeysOf = Callable[[int, int], Sequence[Keys]]

_FULL, _CAUSAL, _INVERSE, _BOTH = range(4)


# -- from keys to lists


def _made(keys_of: KeysOf, batch: int, seqlen_q: int, seqlen_kv: int, like: Sequence[Any], device: Any) -> BlockLists:
    """The lists of these keys, as arrays of the framework of `like`."""
    q_blocks, kv_blocks = blocks(seqlen_q), blocks(seqlen_kv)
    partial: List[List[int]] = []
    full: List[List[int]] = []
    bits: List[bytes] = []
    for b in range(batch):
        for first in range(0, seqlen_q, BLOCK):
            rows = [_merged(keys_of(b, q), seqlen_kv) for q in range(first, min(first + BLOCK, seqlen_q))]
            whole, touched = [0] * (kv_blocks + 1), set()
            for begin, end in (keys for row in rows for keys in row):
                touched |= {begin // BLOCK, (end - 1) // BLOCK}
                # The last block may have fewer keys.
                inner, until = blocks(begin), kv_blocks if end == seqlen_kv else end // BLOCK
                if inner < until:
                    whole[inner] += 1
                    whole[until] -= 1
            some, every, queries = [], [], 0
            for block in range(kv_blocks):
                queries += whole[block]
                if queries == len(rows):
                    every.append(block)
                elif queries or block in touched:
                    some.append(block)
            partial.append(some)
            full.append(every)
            bits.append(b"".join(_bits(rows, block * BLOCK) for block in some))
    most = max(map(len, partial), default=0)
    of_rows = (batch, 1, q_blocks)

    def padded(lists: List[List[int]]) -> bytes:
        return array.array("i", [at for one in lists for at in one + [0] * (kv_blocks - len(one))]).tobytes()

    def counts(lists: List[List[int]]) -> bytes:
        return array.array("i", map(len, lists)).tobytes()

    words = b"".join(one.ljust(most * WORDS * 4, b"\0") for one in bits)
    return BlockLists(
        *(
            _array(memory, shape, like, device)
            for memory, shape in (
                (counts(partial), of_rows),
                (padded(partial), (*of_rows, kv_blocks)),
                (words, (*of_rows, most * WORDS)),
                (counts(full), of_rows),
                (padded(full), (*of_rows, kv_blocks)),
            )
        )
    )


def _merged(keys: Sequence[Keys], seqlen_kv: int) -> List[Keys]:
    """The same keys in order, with gaps between them."""
    made: List[Keys] = []
    for begin, end in sorted(keys):
        begin, end = max(begin, 0), min(end, seqlen_kv)
        if begin >= end:
            continue
        if made and begin <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((begin, end))
    return made


def _bits(rows: List[List[Keys]], first: int) -> bytes:
    """The bits of a block of keys: 16 bytes for each query."""
    words = []
    for row in rows:
        bits = 0
        for begin, end in row:
            begin, end = max(begin - first, 0), min(end - first, BLOCK)
            if begin < end:
                bits |= (1 << end) - (1 << begin)
        words.append(bits.to_bytes(BLOCK // 8, "little"))
    return b"".join(words).ljust(WORDS * 4, b"\0")


def _array(memory: bytes, shape: tuple, like: Sequence[Any], device: Any) -> Any:
    """int32 numbers as an array: of torch if one of `like` is or a device is named, of numpy or CuPy if one of `like` is,
    else of torch, or of numpy without torch."""
    torch = _torch_of(like, device)
    if torch is not None:
        if not memory:
            return torch.zeros(shape, dtype=torch.int32, device=device)
        made = torch.frombuffer(bytearray(memory), dtype=torch.int32).reshape(shape)
        first = next((t for t in like if isinstance(t, torch.Tensor)), made)
        return made.to(first.device if device is None else device)
    import numpy

    made = numpy.frombuffer(bytearray(memory), dtype="<i4").reshape(shape) if memory else numpy.zeros(shape, "<i4")
    ours = next((_numpy_of(a) for a in like if _numpy_of(a) is not None), numpy)
    return ours.asarray(made)


def _torch_of(like: Sequence[Any], device: Any) -> Any:
    """torch, if the lists shall be its tensors."""
    if device is None and any(_numpy_of(a) is not None for a in like):
        return None
    try:
        import torch
    except ImportError:
        if device is not None:
            raise
        return None
    return torch


# -- numbers


def _numbers(name: str, given: Any) -> list:
    """Nested lists of whole numbers, of an array or of lists."""
    nested = given.tolist() if hasattr(given, "tolist") else list(given)

    def whole(one: Any) -> Any:
        if hasattr(one, "tolist"):
            one = one.tolist()
        return [whole(its) for its in one] if isinstance(one, (list, tuple)) else operator.index(one)

    try:
        return [whole(one) for one in nested]
    except TypeError as error:
        raise TypeError(f"{name}: {error}; allowed: whole numbers") from None


def _size(name: str, given: Any) -> int:
    size = operator.index(given)
    if not 0 <= size < 2**30:
        raise ValueError(f"{name}: {size}; allowed: 0 to 2^30 - 1")
    return size


def _pairs(name: str, given: Any, seqlen: int, of: str = "") -> List[Keys]:
    """Ranges [n, 2]: first and end of each. Those that are not within the sequence are refused."""
    pairs = _numbers(name, given)
    for i, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"{name}: {pair} at {i}{of}; allowed: [n, 2], the first and the one after the last")
        if not 0 <= pair[0] <= pair[1] <= seqlen:
            raise ValueError(f"{name}: {pair[0]} to {pair[1]} at {i}{of}; allowed: 0 to {seqlen}, and no end before its start")
    return [(first, end) for first, end in pairs]


def _kept(mask: Mask, seqlen_q: int, seqlen_kv: int) -> Callable[[int], Keys]:
    """The keys that a query keeps under a mask of the ABI. They may lie outside of those that there are."""
    offset = 0 if mask.corner == abi.TOP_LEFT else seqlen_kv - seqlen_q

    def keys(q: int) -> Keys:
        own = q + offset
        if mask.mask == abi.MASK_FULL:
            return 0, seqlen_kv
        if mask.mask == abi.MASK_CHUNKED:
            return own - own % mask.window_left, own + 1
        if mask.mask == abi.MASK_PREFIX:
            return 0, max(own + 1, mask.window_left)
        if mask.mask == abi.MASK_CAUSAL:
            return 0, own + 1
        left, right = mask.window_left, mask.window_right
        return 0 if left == abi.UNBOUNDED else own - left, seqlen_kv if right == abi.UNBOUNDED else own + right + 1

    return keys


# -- the descriptions


def block_lists_from_slices(
    q_ranges: Any, k_ranges: Any, types: Any, seqlen_q: int, seqlen_kv: Optional[int] = None, *, device: Any = None
) -> BlockLists:
    """The lists that keep the pairs that one of n slices keeps, as MagiAttention's flexible flash attention has them.

    q_ranges and k_ranges are [n, 2]: slice i has the queries from q0 to below q1 and the keys from k0 to below k1. types is
    [n]. Of the slice's queries q and keys k are kept

    - 0, full: all.
    - 1, causal: those with k - k1 <= q - q1. The diagonal ends in the bottom right corner of the slice.
    - 2, inverse causal: those with k - k0 >= q - q0. The diagonal begins in the top left corner.
    - 3, both: those of 1 that 2 keeps, too. Nothing, with more queries than keys.

    Slices may share queries. Slices that keep one pair twice are refused (ValueError, which names both and a pair). All
    batch entries and heads share the lists. The other arguments of `attention` apply beside them, such as causal.

    seqlen_kv is seqlen_q where it is missing. The numbers are read on the host: of those on a GPU this waits. The lists are
    tensors of torch if one of the arrays is, on its device or on `device`, and else arrays of numpy or CuPy. Of plain lists
    they are torch's where torch is installed.
    """
    seqlen_q, seqlen_kv = _size("seqlen_q", seqlen_q), _size("seqlen_kv", seqlen_q if seqlen_kv is None else seqlen_kv)
    queries, keys = _pairs("q_ranges", q_ranges, seqlen_q), _pairs("k_ranges", k_ranges, seqlen_kv)
    kinds = _numbers("types", types)
    if not len(queries) == len(keys) == len(kinds):
        got = f"{len(queries)} and {len(keys)} ranges, and {len(kinds)} types"
        raise ValueError(f"q_ranges, k_ranges, types: {got}; allowed: as many of each")
    for i, kind in enumerate(kinds):
        if kind not in (_FULL, _CAUSAL, _INVERSE, _BOTH):
            raise ValueError(f"types: {kind} at {i}; allowed: 0 (full), 1 (causal), 2 (inverse causal) or 3 (both)")
    of_blocks: List[List[int]] = [[] for _ in range(blocks(seqlen_q))]
    for i, (first, end) in enumerate(queries):
        if first < end:
            for block in range(first // BLOCK, blocks(end)):
                of_blocks[block].append(i)

    def keys_of(_: int, q: int) -> List[Keys]:
        its = []
        for i in of_blocks[q // BLOCK]:
            (q0, q1), (begin, end) = queries[i], keys[i]
            if q0 <= q < q1:
                begin += q - q0 if kinds[i] in (_INVERSE, _BOTH) else 0
                end -= q1 - 1 - q if kinds[i] in (_CAUSAL, _BOTH) else 0
                if begin < end:
                    its.append((begin, end, i))
        its.sort()
        for (_, end, a), (begin, _, b) in zip(its, its[1:]):
            if begin < end:
                a, b = sorted((a, b))
                raise ValueError(
                    f"slices {a} and {b} both keep query {q} and key {begin}; allowed: slices that have no pair in common"
                )
        return [(begin, end) for begin, end, _ in its]

    return _made(keys_of, 1, seqlen_q, seqlen_kv, (q_ranges, k_ranges, types), device)


def block_lists_from_documents(q_ids: Any, kv_ids: Any = None, *, device: Any = None) -> BlockLists:
    """The lists that keep the pairs of a query and a key of one document: those with equal numbers.

    q_ids is [B, seqlen_q] and kv_ids is [B, seqlen_kv], or the same as q_ids. B is the batch, or 1 if all batch entries
    share them. A negative number keeps nothing, such as that of padding. A document need not be in one piece. With
    causal=True, `attention` lets tokens see earlier ones of their document.

    Where the numbers are read and what the lists are: see `block_lists_from_slices`.
    """
    of_q, of_kv = (_ids(name, ids) for name, ids in (("q_ids", q_ids), ("kv_ids", q_ids if kv_ids is None else kv_ids)))
    if len(of_q) != len(of_kv):
        raise ValueError(f"kv_ids: {len(of_kv)} batch entries; allowed: {len(of_q)}, as q_ids has")
    documents: List[Dict[int, List[Keys]]] = []
    for ids in of_kv:
        runs: Dict[int, List[Keys]] = {}
        first = 0
        for k in range(1, len(ids) + 1):
            if k == len(ids) or ids[k] != ids[first]:
                runs.setdefault(ids[first], []).append((first, k))
                first = k
        documents.append(runs)

    def keys_of(b: int, q: int) -> List[Keys]:
        number = of_q[b][q]
        return documents[b].get(number, []) if number >= 0 else []

    lengths = (len(ids[0]) if ids else 0 for ids in (of_q, of_kv))
    return _made(keys_of, len(of_q), *lengths, (q_ids, kv_ids), device)


def _ids(name: str, given: Any) -> List[List[int]]:
    ids = _numbers(name, given)
    if any(not isinstance(its, list) or len(its) != len(ids[0]) or any(isinstance(one, list) for one in its) for its in ids):
        raise ValueError(f"{name}: not of two dimensions; allowed: [B, seqlen]")
    return ids


def block_lists_from_prefixes(
    prefixes: Any,
    seqlen_q: int,
    seqlen_kv: Optional[int] = None,
    causal: bool = True,
    window: Window = None,
    top_left: bool = False,
    *,
    device: Any = None,
) -> BlockLists:
    """The lists that keep a pair if a mask keeps it, or the key is in the prefix of its batch entry.

    prefixes is [batch]: the lengths. causal, window and top_left say what the mask is, as in `attention`. Lists only narrow
    the mask of a call, so call `attention` with these lists, and without causal and window.

    Where the numbers are read and what the lists are: see `block_lists_from_slices`.
    """
    seqlen_q, seqlen_kv = _size("seqlen_q", seqlen_q), _size("seqlen_kv", seqlen_q if seqlen_kv is None else seqlen_kv)
    lengths = _numbers("prefixes", prefixes)
    for b, length in enumerate(lengths):
        if isinstance(length, list) or not 0 <= length <= seqlen_kv:
            raise ValueError(f"prefixes: {length} of batch entry {b}; allowed: 0 to {seqlen_kv}")
    kept = _kept(mask_of(causal, window, top_left), seqlen_q, seqlen_kv)

    def keys_of(b: int, q: int) -> List[Keys]:
        return [(0, lengths[b]), kept(q)]

    return _made(keys_of, len(lengths), seqlen_q, seqlen_kv, (prefixes,), device)


def block_lists_from_spans(
    spans: Any,
    seqlen_q: int,
    seqlen_kv: Optional[int] = None,
    causal: bool = True,
    window: Window = None,
    top_left: bool = False,
    *,
    within: Window = None,
    device: Any = None,
) -> BlockLists:
    """The lists that keep a pair if (a mask keeps it, or both are in one span) and `within` keeps it.

    A span is a run of tokens that see each other in both directions, such as an image. spans has [N, 2] for each batch
    entry, or once for all of them: the first key, and the one after the last. Spans may overlap. A query is in a span if its
    position is: i + seqlen_kv - seqlen_q, with top_left i.

    causal, window and top_left say what the mask is, as in `attention`, and `within` is a window, too. Models compose a
    window with the spans in two ways:

    - (causal and window) or span, as FlashInfer does it: window=(left, 0).
    - (causal or span) and window, as Gemma 4 does it: within=(left, None).

    Lists only narrow the mask of a call, so call `attention` with these lists, and without causal and window.

    Where the numbers are read and what the lists are: see `block_lists_from_slices`.
    """
    seqlen_q, seqlen_kv = _size("seqlen_q", seqlen_q), _size("seqlen_kv", seqlen_q if seqlen_kv is None else seqlen_kv)
    entries = list(spans)
    of_batch = [_pairs("spans", its, seqlen_kv, f" of batch entry {b}") for b, its in enumerate(entries)]
    offset = 0 if top_left else seqlen_kv - seqlen_q
    kept, inside = (
        _kept(mask_of(*options), seqlen_q, seqlen_kv)
        for options in ((causal, window, top_left), (False, within, top_left))
    )

    def keys_of(b: int, q: int) -> List[Keys]:
        own = q + offset
        first, end = inside(q)
        its = (kept(q), *(span for span in of_batch[b] if span[0] <= own < span[1]))
        return [(max(begin, first), min(until, end)) for begin, until in its]

    return _made(keys_of, len(entries), seqlen_q, seqlen_kv, (spans, *entries), device)


__all__ = ["block_lists_from_documents", "block_lists_from_prefixes", "block_lists_from_slices", "block_lists_from_spans"]
