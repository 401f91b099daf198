"""The plans and the mask options that the torch layer and the array layer share."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import threading
from typing import Any, NamedTuple, Optional, Tuple, Union

from . import abi

# A plan is small. Making one takes microseconds once its kernel is loaded. So this is enough for the shapes in use at
# a time.
PLANS_KEPT = 256


# (Not named tuples: caches of options must tell the two apart.)
@dataclasses.dataclass(frozen=True)
class Chunked:
    """Chunked local attention, for `window`: chunks of `keys` keys, 1 or more, from key 0 on.

    A query sees the keys of the chunk that its position is in, up to its position.
    """

    keys: int


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A prefix of `keys` keys that all queries see, for `window`. Behind it a query sees keys up to its position."""

    keys: int


Window = Union[None, Tuple[Optional[int], Optional[int]], Chunked, Prefix]


class PlanCache:
    """The plans that were used last. The key is the device and the whole problem. Threads share the plans."""

    def __init__(self, library: abi.Library, capacity: int = PLANS_KEPT) -> None:
        self._library, self._capacity = library, capacity
        self._plans: collections.OrderedDict = collections.OrderedDict()
        self._lock = threading.Lock()
        #: How many plans were made.
        self.made = 0

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, device: int, problem: Any) -> Any:
        """The plan of a problem on a device."""
        key: tuple = (device, type(problem), bytes(problem))
        if isinstance(problem, abi.QuantizeProblem):
            # The struct holds a pointer. Equal problems differ in it, and different ones may share it.
            numbers = (problem.source, problem.hadamard, problem.seed)
            key = (device, type(problem), numbers, bytes(problem.forward.contents))
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                # Under the lock, so that threads which come at once with one problem make one plan.
                plan = self._library.plan(problem, device)
                self.made += 1
                self._plans[key] = plan
                # A thread that runs the oldest plan right now holds it.
                while len(self._plans) > self._capacity:
                    self._plans.popitem(last=False)
            self._plans.move_to_end(key)
            return plan


_cache: Optional[PlanCache] = None
_making = threading.Lock()


def plans() -> PlanCache:
    """The plan cache of the package's library."""
    global _cache
    if _cache is None:
        library = abi.load()
        with _making:
            if _cache is None:
                _cache = PlanCache(library)
    return _cache


class Mask(NamedTuple):
    """A mask in the numbers of the ABI."""

    mask: int
    corner: int
    window_left: int
    window_right: int


FULL = Mask(abi.MASK_FULL, 0, 0, 0)


def mask_of(causal: bool, window: Window, top_left: bool) -> Mask:
    """The mask of the options of `attention`."""
    corner = abi.TOP_LEFT if top_left else abi.BOTTOM_RIGHT
    if window is None:
        # The corner says nothing without a mask. Left out, the same plan serves both corners.
        return Mask(abi.MASK_CAUSAL, corner, 0, 0) if causal else FULL
    if isinstance(window, (Chunked, Prefix)):
        # Both are causal, whether or not the caller says so.
        least = 1 if isinstance(window, Chunked) else 0
        if window.keys < least:
            raise ValueError(f"window: {window}; allowed: {least} keys and above")
        return Mask(abi.MASK_CHUNKED if least else abi.MASK_PREFIX, corner, window.keys, 0)
    left, right = window
    for name, keys in (("left", left), ("right", right)):
        # In the ABI -1 stands for all keys. Here only None does, so that a difference gone negative is noticed.
        if keys is not None and keys < 0:
            raise ValueError(f"window: {name} {keys}; allowed: 0 and above, or None for all keys")
    if causal:
        right = 0
    return Mask(
        abi.MASK_WINDOW, corner, abi.UNBOUNDED if left is None else left, abi.UNBOUNDED if right is None else right
    )


def softcap_of(softcap: Optional[float]) -> float:
    """A cap of the scores for the library, where 0 stands for none. The library refuses what no cap can be."""
    return 0.0 if softcap is None else float(softcap)


def dropout_of(probability: Optional[float], state: Any, *others: Any) -> float:
    """A probability of dropout for the library, where 0 stands for none. The library refuses what is no probability.

    Without dropout nobody reads a seed, an offset or a generator, so none is taken.
    """
    if probability:
        return float(probability)
    for name, given in zip(("dropout_state", "generator"), (state, *others)):
        if given is not None:
            raise ValueError(f"{name}: given with dropout_p {probability}; allowed: None, or a dropout_p above 0")
    return 0.0


def dropped_of(probability: float) -> int:
    """How many of 32768 weights are dropped with this probability, as the library rounds it."""
    single = ctypes.c_float(probability).value
    dropped = int(single * 32768 + 0.5) if 0 <= single < 1 else 32768
    if dropped == 32768:
        raise ValueError(f"dropout_p: {probability}; allowed: 0 to below 1, and what is not rounded to 1 in steps of 1/32768")
    return dropped


def alibi_of(slopes: Any) -> int:
    """Which slopes a tensor with a `shape` has, in the ABI's terms. None stands for no ALiBi."""
    if slopes is None:
        return abi.ALIBI_NONE
    if len(slopes.shape) not in (1, 2):
        raise ValueError(f"alibi_slopes: {len(slopes.shape)} dimensions; allowed: 1, [heads_q], or 2, [batch, heads_q]")
    return abi.ALIBI_PER_HEAD if len(slopes.shape) == 1 else abi.ALIBI_PER_BATCH


def bias_sizes(q: Any, k: Any, lists: dict) -> tuple:
    """What a bias of operands with a `shape` broadcasts to: batch, heads_q, seqlen_q and seqlen_kv.

    `lists` are those of `lists_of`, or nothing. The rows of a packed side are None: the bias says for how many rows of
    a sequence it has numbers.
    """
    rows = (None if packed else t.shape[-3] for packed, t in zip(_packed_sides(lists), (q, k)))
    return (_batch_of(q, lists), q.shape[-2], *rows)


def bias_shape(name: str, shape: Any, sizes: tuple) -> tuple:
    """The shape of an additive bias as the library reads it: [1 or batch, 1 or heads_q, 1 or seqlen_q, seqlen_kv].

    `shape` broadcasts to `sizes`, which are those of `bias_sizes`. A size of None may be any, and is kept.
    """
    four = (1,) * (4 - len(shape)) + tuple(shape)
    if len(four) != 4 or any(size is not None and its not in (1, size) for its, size in zip(four, sizes)):
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        allowed = f"one that broadcasts to [batch, heads_q, seqlen_q, seqlen_kv], [{wanted}]"
        raise ValueError(f"{name}: shape {list(shape)}; allowed: {allowed}")
    return (*four[:3], four[3] if sizes[3] is None else sizes[3])


def bias_fields(dtype: int, shape: Any, lists: dict) -> dict:
    """The fields of a forward problem with a bias of this type and shape. `lists` are as in `bias_sizes`."""
    flags = zip(shape, (abi.BIAS_PER_BATCH, abi.BIAS_PER_HEAD, abi.BIAS_PER_QUERY))
    fields = {"bias": dtype, "bias_dims": sum(flag for size, flag in flags if size != 1)}
    # Without packed sequences the library knows the rows.
    return {**fields, "bias_queries": shape[2], "bias_keys": shape[3]} if any(_packed_sides(lists)) else fields


def scale_of(scale: Optional[float]) -> float:
    """The scale in the ABI's terms. 0 there stands for the default, so a caller may not ask for it."""
    if scale is None:
        return 0.0
    if scale == 0:
        raise ValueError("scale: 0; allowed: finite and above 0, or None for 1 / sqrt(head_dim)")
    return float(scale)


def lists_of(q: Any, k: Any, v: Any, lists: Tuple[Any, Any, Any, Any], dense: str = "attention()") -> dict:
    """The offsets and used lengths of a call by their names (`abi.LENGTHS`), and the ranks of its tensors, checked.

    `dense`: what takes tensors without them. A side with offsets is packed: [total, heads, head_dim]. A side without is [batch, seqlen, heads, head_dim]. Packed
    keys without offsets of their own have those of the queries.
    """
    named = dict(zip(abi.LENGTHS, lists))
    if named["cu_seqlens_kv"] is None and len(k.shape) == 3:
        named["cu_seqlens_kv"] = named["cu_seqlens_q"]
    for name, t, offsets in (("q", q, "cu_seqlens_q"), ("k", k, "cu_seqlens_kv"), ("v", v, "cu_seqlens_kv")):
        packed = named[offsets] is not None
        if len(t.shape) != (3 if packed else 4):
            allowed = "3, [total, heads, head_dim], with" if packed else "4, [batch, seqlen, heads, head_dim], without"
            raise ValueError(f"{name}: {len(t.shape)} dimensions; allowed: {allowed} {offsets}")
    if all(given is None for given in named.values()):
        raise ValueError(f"cu_seqlens_q: missing, and so are the other lengths; {dense} takes tensors without them")
    return named


def _packed_sides(lists: dict) -> Tuple[bool, bool]:
    """Whether the queries are packed, and whether the keys are."""
    return lists.get("cu_seqlens_q") is not None, lists.get("cu_seqlens_kv") is not None


def _batch_of(q: Any, lists: dict) -> int:
    """The number of sequences of operands with these lengths."""
    offsets = lists.get("cu_seqlens_q")
    return q.shape[0] if offsets is None else offsets.shape[0] - 1


def check_list(name: str, shape: Any) -> None:
    """Refuses offsets and used lengths of a wrong shape. The library compares the number of entries with the batch."""
    if len(shape) != 1 or (shape[0] == 0 and name.startswith("cu_")):
        allowed = "[batch + 1], one entry or more" if name.startswith("cu_") else "[batch]"
        raise ValueError(f"{name}: shape {list(shape)}; allowed: {allowed}")


class Hints(NamedTuple):
    """The lengths of the longest sequences, 0 where they are unknown, and whether gaps are filled."""

    max_seqlen_q: int
    max_seqlen_kv: int
    fill_gaps: bool


def hints_of(max_seqlen_q: Optional[int], max_seqlen_kv: Optional[int], fill_gaps: bool) -> Hints:
    """The hints of `attention_varlen` in the ABI's terms."""
    for name, rows in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_kv", max_seqlen_kv)):
        if rows is not None and rows < 0:
            raise ValueError(f"{name}: {rows}; allowed: 0 and above, or None if it is not known")
    return Hints(max_seqlen_q or 0, max_seqlen_kv or 0, bool(fill_gaps))


def packed_problem(q: Any, k: Any, v: Any, lists: dict, hints: Hints, **more: Any) -> abi.ForwardProblem:
    """The problem of operands and lengths with a `shape`, as `lists_of` checked them. `more` are its other fields.

    The library refuses a hint for a side whose sequences all have one length.
    """
    given = {name: int(of is not None) for name, of in lists.items()}
    of_q, of_kv = (given[f"cu_seqlens_{side}"] or given[f"seqused_{side}"] for side in ("q", "kv"))
    return abi.ForwardProblem(
        batch=_batch_of(q, lists),
        seqlen_q=q.shape[-3],
        seqlen_kv=k.shape[-3],
        heads_q=q.shape[-2],
        heads_kv=k.shape[-2],
        head_dim_qk=q.shape[-1],
        head_dim_vo=v.shape[-1],
        max_seqlen_q=hints.max_seqlen_q if of_q else 0,
        max_seqlen_kv=hints.max_seqlen_kv if of_kv else 0,
        fill_gaps=int(hints.fill_gaps),
        **given,
        **more,
    )


def output_shapes(q_shape: Any, v_shape: Any) -> Tuple[tuple, tuple]:
    """The shapes of o and of the log-sum-exp, of packed queries and of others."""
    *outer, rows, heads, _ = q_shape
    return (*outer, rows, heads, v_shape[-1]), (*outer, heads, rows)


def margin_of(sm_margin: int) -> int:
    """The margin, checked: ctypes would cut off the upper bits of a larger number."""
    if not 0 <= sm_margin < 2**31:
        raise ValueError(f"sm_margin: {sm_margin}; allowed: 0 to 2^31 - 1")
    return sm_margin


def limit_of(workspace_limit: Optional[int]) -> int:
    """The limit of the workspace as the library has it, 0 where there is none. torch's operators take 63 bits."""
    if workspace_limit is None:
        return 0
    if not 1 <= workspace_limit < 2**63:
        raise ValueError(f"workspace_limit: {workspace_limit}; allowed: None, or 1 to 2^63 - 1")
    return workspace_limit


SCALINGS = {"per_tensor": abi.PER_TENSOR, "per_head": abi.PER_HEAD, "per_block": abi.PER_BLOCK}
#: Rows of a head that share a factor under "per_block".
BLOCK = 128


def scaling_of(scaling: str) -> int:
    """A scaling by its name."""
    if scaling not in SCALINGS:
        raise ValueError(f"scaling: {scaling!r}; allowed: {', '.join(SCALINGS)}")
    return SCALINGS[scaling]


def descale_shapes(scaling: int, q: Any, k: Any, v: Any, lists: dict) -> list:
    """The shapes of the descale factors of q, k and v with a `shape`. `lists` are those of `lists_of`, or nothing.

    Packed sequences with factors per block have blocks of their own: sequence i, from row `begin` on, those from
    floor((begin + 127 i) / 128) on.
    """
    batch, packed = _batch_of(q, lists), _packed_sides(lists)

    def of(t: Any, is_packed: bool) -> tuple:
        if scaling == abi.PER_TENSOR:
            return (1, 1, 1)
        if scaling == abi.PER_HEAD:
            return (batch, k.shape[-2], 1)
        rows, heads = t.shape[-3:-1]
        return (heads, (rows + (BLOCK - 1) * batch) // BLOCK) if is_packed else (batch, heads, -(-rows // BLOCK))

    return [of(q, packed[0]), of(k, packed[1]), of(v, packed[1])]
