"""Hugging Face transformers: an attention function and the mask function that belongs to it.

transformers describes a mask as a function of indices, a tree of closures. `band_of` reads the tree. A mask that is a
band (causal, bidirectional, sliding windows) or has chunks (Llama 4) is passed on as a `BandMask`, together with the
padding. Any other mask becomes a tensor of booleans, as for transformers' SDPA, and then lists of blocks
(`_dense_masks.py`). So do 4-d masks that a model is given, unless their numbers are added to the scores: those are a
bias.

Packed sequences come as cu_seq_lens_q and cu_seq_lens_k, or as position_ids that begin again within a row. Both become
offsets of attention_varlen. So does padding: offsets and used lengths leave it out where it lies, and nothing is moved.
"""

from __future__ import annotations

import weakref
from typing import Any, List, Optional, Tuple, Union

import torch

from . import _dense_masks
from ._plans import Chunked
from ._torch import attention, readable
from ._sinks import attention_sinks
from ._modified import Modifiers, attention_modified
from ._varlen import attention_capped, attention_varlen, readable_rows

OLDEST = (5, 17)


def _refuse(what: str, allowed: str) -> None:
    raise NotImplementedError(f"hopper_attention in transformers: {what}; allowed: {allowed}")


class NoTensor(AttributeError, NotImplementedError):
    """A model uses its mask as a tensor.

    An AttributeError, so that a model may ask whether there is such an attribute.
    """


class BandMask:
    """What the mask function gives the attention function in place of a tensor of booleans.

    Query i attends to the keys from i + shift - left to i + shift + right, where shift is kv_length - q_length. None:
    no bound. `chunk`: of these keys, those of the query's chunk alone, where chunks have so many keys. None: there are no
    chunks. `ranges` has, for each sequence, the first key that is no padding, and the one after the last. None: there is
    no padding. `packing` has the lengths that attention_varlen takes, for all rows of the batch one after another.
    None: every row of the batch is one sequence.
    """

    def __init__(
        self,
        left: Any,
        right: Any,
        q_length: int,
        kv_length: int,
        ranges: Any,
        had_padding_mask: bool,
        packing: Optional[dict] = None,
        chunk: Optional[int] = None,
    ) -> None:
        self.left, self.right, self.q_length, self.kv_length = left, right, q_length, kv_length
        self.ranges, self.had_padding_mask, self.packing = ranges, had_padding_mask, packing
        self.chunk = chunk

    def __getitem__(self, index: Any) -> Any:
        _refuse("the model slices its mask", "models that pass the mask on as it is")

    def __getattr__(self, name: str) -> Any:
        raise NoTensor(
            f"hopper_attention in transformers: the mask was used as a tensor (.{name}), by the model or by generate() with a "
            "static cache; allowed: models that pass the mask on as it is, and dynamic caches"
        )


# -- from transformers' mask functions to a band


def _bidirectional() -> Any:
    from transformers.masking_utils import bidirectional_mask_function

    return bidirectional_mask_function


def _meet(a: Optional[int], b: Optional[int]) -> Optional[int]:
    return min((bound for bound in (a, b) if bound is not None), default=None)


def _closure(function: Any) -> dict:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells)}


def band_of(function: Any) -> Tuple[Optional[int], Optional[int]]:
    """The keys before and after a query's own that a mask function keeps. None: no bound. Raises _NoBand for others."""
    name = getattr(function, "__qualname__", type(function).__name__)
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        raise _NoBand(name)
    name = name.split(".<locals>")[0]
    if name == "causal_mask_function":
        return None, 0
    if name == "bidirectional_mask_function":
        return None, None
    closure = _closure(function)
    if name == "sliding_window_overlay":
        # The window counts the query's own key.
        return int(closure["sliding_window"]) - 1, None
    if name == "sliding_window_bidirectional_overlay":
        return int(closure["sliding_window"]), int(closure["sliding_window"])
    if name == "and_masks":
        bands = [band_of(one) for one in closure["mask_functions"]]
        left = right = None
        for its_left, its_right in bands:
            left, right = _meet(left, its_left), _meet(right, its_right)
        return left, right
    if name == "remap_positions_for_packed_sequence":
        # Positions of one sequence are consecutive, so the band stays the band.
        return band_of(closure["mask_function"])
    if name in ("packed_sequence_mask_function", "chunked_overlay"):
        # `found_in` has the sequences, and the chunks.
        return None, None
    raise _NoBand(name)


def found_in(function: Any, wanted: str, of_it: str) -> Any:
    """A value of the first part by the name `wanted` of a mask that `band_of` took. None: there is no such part."""
    name = function.__qualname__.split(".<locals>")[0]
    if name == wanted:
        return _closure(function)[of_it]
    if name == "remap_positions_for_packed_sequence":
        return found_in(_closure(function)["mask_function"], wanted, of_it)
    inner = _closure(function)["mask_functions"] if name == "and_masks" else ()
    return next((found for one in inner if (found := found_in(one, wanted, of_it)) is not None), None)


def _starts(chunk: int, padded: List[int], q_offset: int, kv_offset: int) -> List[int]:
    """The first key of the chunk of a query at `q_offset`. The chunks of a sequence begin behind its padding."""
    return [first + (q_offset - first) // chunk * chunk - kv_offset for first in padded]


def _packing_of(begins: torch.Tensor) -> Optional[dict]:
    """The packing of tokens, [batch, seqlen], that are True where a sequence begins. None: one sequence a row.

    The number of sequences is read: one wait for the GPU.
    """
    rows, seqlen = begins.shape
    if seqlen == 0:
        return None
    begins[:, 0] = True
    found = begins.flatten().nonzero().flatten()
    if found.shape[0] == rows:
        return None
    return {"cu_seqlens_q": torch.nn.functional.pad(found, (0, 1), value=rows * seqlen).to(torch.int32)}


def _padding_of(
    ranges: List[Tuple[int, int]], banded: bool, q_length: int, kv_length: int, device: torch.device
) -> dict:
    """The packing of a padded batch: a sequence begins behind its padding, and uses the rows up to that at its end."""
    lists: List[List[int]] = [[], [], [], []]
    for i, (first, after) in enumerate(ranges):
        begin, end = _queries(first, after, banded, q_length, kv_length)
        row = (i * q_length + begin, i * kv_length + first, end - begin, after - first)
        for one, number in zip(lists, row):
            one.append(number)
    cu_q, cu_kv, used_q, used_kv = lists
    cu_q.append(len(ranges) * q_length)
    cu_kv.append(len(ranges) * kv_length)
    named = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv, "seqused_q": used_q, "seqused_kv": used_kv}
    # One copy to the GPU for all of them.
    numbers = torch.tensor(cu_q + cu_kv + used_q + used_kv, dtype=torch.int32, device=device)
    on_device = dict(zip(named, numbers.split([len(one) for one in lists])))
    return {**on_device, "max_seqlen_q": max(used_q), "max_seqlen_kv": max(used_kv)}


def _queries(first: int, after: int, banded: bool, q_length: int, kv_length: int) -> Tuple[int, int]:
    """The queries of a sequence with the keys from `first` to below `after`."""
    if not banded:
        return 0, q_length
    # Query i meets key i + kv_length - q_length. The last query that is kept meets the last key that is.
    end = max(after - (kv_length - q_length), 0)
    return min(max(first - (kv_length - q_length), 0), end), end


def _ranges(padding: torch.Tensor, kv_length: int, kv_offset: int) -> Optional[List[Tuple[int, int]]]:
    """The keys of each sequence that are no padding, read from the 2-d mask. One wait for the GPU."""
    padding = padding[:, kv_offset : kv_offset + kv_length] != 0
    if padding.shape[1] < kv_length:
        padding = torch.nn.functional.pad(padding, (0, kv_length - padding.shape[1]))
    ones = padding.to(torch.int32)
    bounds = (ones.argmax(1), kv_length - ones.flip(1).argmax(1), ones.sum(1))
    found = torch.stack(bounds, 1).tolist()
    ranges = []
    for first, after, count in found:
        if count == 0:
            first = after = 0
        if after - first != count:
            raise _NoBand("zeros between ones")
        ranges.append((first, after))
    return None if all(one == (0, kv_length) for one in ranges) else ranges


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> Union[BandMask, torch.Tensor]:
    """The mask function. transformers calls it once a forward pass for each kind of layer."""
    if attention_mask is None and mask_function is _bidirectional():
        # Nothing to look into, so torch.compile can trace it.
        return BandMask(None, None, q_length, kv_length, None, False)
    offsets = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    return _mask({"batch_size": batch_size, **offsets}, mask_function, attention_mask, kwargs)


@torch.compiler.disable
def _mask(sizes: dict, mask_function: Any, attention_mask: Any, more: dict) -> Union[BandMask, torch.Tensor]:
    """A mask that must be looked into: closures, and the elements of a padding mask.

    torch.compile breaks its graph here.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        _refuse(f"an attention_mask of {attention_mask.ndim} dimensions", "2, [batch, seqlen], or 4")
    numbers = {name: size for name, size in sizes.items() if name != "batch_size"}
    try:
        return _band_mask(**numbers, mask_function=mask_function, attention_mask=attention_mask)
    except _NoBand:
        return _dense_masks.tensor_of(mask_function, sizes, attention_mask, more)


class _NoBand(Exception):
    """A mask is no `BandMask`."""


def _band_mask(
    q_length: int, kv_length: int, q_offset: Any, kv_offset: int, mask_function: Any, attention_mask: Any
) -> BandMask:
    """The band of a mask function, with its padding, packing and chunks. Raises _NoBand where there is none."""
    left, right = band_of(mask_function)
    chunk = found_in(mask_function, "chunked_overlay", "chunk_size")
    if chunk is not None and (left, right) != (None, 0):
        raise _NoBand("chunks that are not causal, or with a sliding window")
    if (left, right) != (None, None) and int(q_offset) + q_length != kv_offset + kv_length:
        # Booleans would serve here. But generate() with such a cache hands masks on as tensors, and its last step has a band.
        where = f"queries up to {int(q_offset) + q_length} and keys up to {kv_offset + kv_length}"
        _refuse(f"a cache with room beyond the last token (static), {where}", "caches that end with the last query")
    ranges = packing = None
    if attention_mask is not None:
        ranges = _ranges(attention_mask, kv_length, kv_offset)
    if chunk is not None and q_length == 1:
        # All keys behind the first of the chunk. A cache may begin anywhere, behind the padding, too.
        padded = [0]
        if attention_mask is not None:
            padded = found_in(mask_function, "chunked_overlay", "left_padding").tolist()
        starts = _starts(chunk, padded, int(q_offset), kv_offset)
        if len(set(starts)) == 1:
            left = int(q_offset) - kv_offset - starts[0]
        else:
            ranges = ranges or [(0, kv_length)] * len(starts)
            ranges = [(max(first, min(start, after)), after) for (first, after), start in zip(ranges, starts)]
        chunk = None
    elif chunk is not None and kv_offset != 0:
        raise _NoBand("chunks, and a cache that has lost its first keys")
    if ranges is not None:
        banded = left is not None or right is not None
        packing = _padding_of(ranges, banded, q_length, kv_length, attention_mask.device)
    packed = found_in(mask_function, "packed_sequence_mask_function", "packed_sequence_mask")
    if packed is not None:
        if ranges is not None:
            raise _NoBand("padding of packed sequences")
        packing = _packing_of(packed.diff(dim=-1, prepend=packed[:, :1]) != 0)
    return BandMask(left, right, q_length, kv_length, ranges, attention_mask is not None, packing, chunk)


# -- the attention function

# Arguments of models that change nothing about attention, or that reach us in another way.
_NO_PART = frozenset(
    "cache cache_position cache_params config layer_idx logits_to_keep num_items_in_batch output_hidden_states "
    "output_router_logits past_key_values position_embeddings return_dict training use_cache".split()
)
_LACKING = {
    "sinks": "attention sinks by another name than s_aux",
    "position_bias": "a position bias",
    "attention_bias": "an attention bias",
    "head_mask": "a head mask",
    "seq_idx": "packed sequences by seq_idx alone",
    "output_attentions": "output_attentions: the weights are never stored",
}
# What comes with cu_seq_lens. The lengths say nothing without them.
_WITH_PACKED = frozenset(("max_length_q", "max_length_k", "seq_idx"))


def _refuse_lacking(arguments: dict, packed: bool) -> None:
    for name, given in arguments.items():
        if given is None or given is False or name in _NO_PART:
            continue
        if name in _WITH_PACKED and (packed or name != "seq_idx"):
            continue
        if name in _LACKING:
            _refuse(_LACKING[name], "models without it; set another attn_implementation")
        _refuse(f"the argument {name}", "the arguments that transformers' own functions take")


# The positions that were read last: a weak reference, the version of their contents and the batch, and their packing.
_last_positions: Tuple[Any, Any, Optional[dict]] = (lambda: None, None, None)


@torch.compiler.disable
def _packing_of_positions(positions: torch.Tensor, batch: int) -> Optional[dict]:
    """The packing of rows whose positions begin again. None: one sequence a row.

    Layers share one tensor of positions, so this waits for the GPU once a forward pass. Tensors of inference mode have
    no version, so they are read in every layer.
    """
    global _last_positions
    version = None if positions.is_inference() else (positions._version, batch)
    seen, seen_version, packing = _last_positions
    if seen() is positions and seen_version == version and version is not None:
        return packing
    # The positions are sometimes just unsqueezed, without being expanded.
    its, positions = positions, positions.expand(batch, -1)
    packing = _packing_of(positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1)
    _last_positions = (weakref.ref(its), version, packing)
    return packing


def _packing_of_lengths(cu_seq_lens_q: Any, cu_seq_lens_k: Any, max_length_q: Any, max_length_k: Any) -> Optional[dict]:
    """The packing of the arguments that transformers' FlashAttention takes. None: they are not given."""
    if cu_seq_lens_q is None and cu_seq_lens_k is None:
        return None
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        _refuse("one of cu_seq_lens_q and cu_seq_lens_k", "both")
    # A tensor on a GPU would be waited for, and is a hint alone.
    longest = [n if isinstance(n, int) else None for n in (max_length_q, max_length_k)]
    return {
        "cu_seqlens_q": cu_seq_lens_q,
        "cu_seqlens_kv": cu_seq_lens_k,
        "max_seqlen_q": longest[0],
        "max_seqlen_kv": longest[1],
    }


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    sliding_window: Optional[int] = None,
    is_causal: Optional[bool] = None,
    position_ids: Optional[torch.Tensor] = None,
    cu_seq_lens_q: Optional[torch.Tensor] = None,
    cu_seq_lens_k: Optional[torch.Tensor] = None,
    s_aux: Optional[torch.Tensor] = None,
    softcap: Optional[float] = None,
    **kwargs: Any,
) -> Tuple[torch.Tensor, None]:
    """The attention function, on [batch, heads, seqlen, head_dim].

    With cu_seq_lens_q and cu_seq_lens_k, [sequences + 1], the rows of the batch one after another are packed sequences.
    max_length_q and max_length_k are hints for speed. s_aux, [heads], has the attention sinks, as gpt-oss has them.
    softcap is the cap of the scores, as Gemma 2 has it. None and 0 stand for no cap. dropout is the probability, which
    models give in training; torch's default generator of the device says which weights become 0.
    """
    longest = kwargs.get("max_length_q"), kwargs.get("max_length_k")
    packing = _packing_of_lengths(cu_seq_lens_q, cu_seq_lens_k, *longest)
    _refuse_lacking(kwargs, packing is not None)
    q_length, kv_length = query.shape[2], key.shape[2]
    ranges = chunk = None
    if isinstance(attention_mask, BandMask):
        if (attention_mask.q_length, attention_mask.kv_length) != (q_length, kv_length):
            made = f"{attention_mask.q_length} x {attention_mask.kv_length}"
            _refuse(f"a mask of {made} for scores of {q_length} x {kv_length}", "a mask of the same size")
        left, right, ranges = attention_mask.left, attention_mask.right, attention_mask.ranges
        chunk = attention_mask.chunk
        if packing is None:
            packing = attention_mask.packing
        elif ranges is not None:
            _refuse("cu_seq_lens_q with a padding mask", "one of both")
        if sliding_window is not None and sliding_window < kv_length and left != sliding_window - 1:
            _refuse(
                f"sliding_window {sliding_window} with a mask that keeps {left} keys before a query",
                "the same window in both",
            )
    elif _dense_masks.takes(attention_mask):
        if packing is not None:
            _refuse("cu_seq_lens_q with a 4-d mask", "one of both")
        return _dense_masks.attention_masked(query, key, value, attention_mask, scaling, s_aux, softcap, dropout), None
    elif attention_mask is not None:
        shape = tuple(getattr(attention_mask, "shape", ()))
        _refuse(
            f"attention_mask is a {type(attention_mask).__name__} {shape}",
            "none, a 2-d mask given to the model, 4-d booleans or floats, or torch's BlockMask",
        )
    else:
        # The model makes no mask, as vision models do.
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if packing is None and causal and q_length != kv_length and q_length != 1:
            _refuse(
                f"causal attention without a mask, {q_length} queries and {kv_length} keys",
                "equal numbers, or 1 query",
            )
        left = right = None if sliding_window is None else sliding_window - 1
        right = 0 if causal else right
    if (
        packing is None
        and position_ids is not None
        and position_ids.ndim == 2
        and q_length > 1
        and not getattr(attention_mask, "had_padding_mask", False)
    ):
        # Compiled without a cache, the mask function has read them. Compiled with one, nobody does, as in transformers'
        # own masks.
        if not torch.compiler.is_compiling():
            packing = _packing_of_positions(position_ids, query.shape[0])
            if packing is not None and q_length != kv_length:
                lengths = f"{q_length} queries and {kv_length} keys"
                _refuse(
                    f"packed sequences by position_ids, {lengths}", "equal numbers, or cu_seq_lens_q and cu_seq_lens_k"
                )
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if ranges is not None:
        # Padding at the end: causal queries never see it. What padding rows give is never used.
        if all(first == 0 for first, _ in ranges) and right == 0 and q_length == kv_length:
            packing = None
        else:
            if (left, right) != (None, None) and right != 0 and q_length != kv_length:
                _refuse(f"a window of both sides on padding, {q_length} queries and {kv_length} keys", "equal numbers")
    return _band(q, k, v, left, right, scaling, packing, s_aux, softcap, chunk, dropout), None


def _band(
    q: Any,
    k: Any,
    v: Any,
    left: Optional[int],
    right: Optional[int],
    scaling: Optional[float],
    packing: Optional[dict] = None,
    s_aux: Optional[torch.Tensor] = None,
    softcap: Optional[float] = None,
    chunk: Optional[int] = None,
    dropout: float = 0.0,
) -> Any:
    """Attention to [batch, seqlen, heads, head_dim]. With a packing, the rows of the batch follow each other."""
    plain = left is None and (right is None or right == 0)
    mask: dict = {"causal": right == 0} if plain else {"window": (left, right)}
    if chunk is not None:
        mask = {"window": Chunked(chunk)}
    modifiers = Modifiers(dropout=(dropout, None, None))
    if packing is None:
        q, k, v = map(readable, (q, k, v))
        numbers = (mask.get("causal", False), mask.get("window"), False, scaling, False, 0)
        if modifiers.any():
            return attention_modified(q, k, v, s_aux, *numbers, softcap, modifiers)
        if softcap:
            return attention_capped(q, k, v, s_aux, *numbers, softcap)
        if s_aux is not None:
            return attention_sinks(q, k, v, s_aux, *numbers)
        return attention(q, k, v, scale=scaling, **mask)
    # The rows of a projection follow each other already. Those of a cache are copied.
    rows = (readable_rows(t.reshape(-1, *t.shape[2:])) for t in (q, k, v))
    numbers = {"scale": scaling, "softcap": softcap, **mask, **packing}
    o = attention_varlen(*rows, s_aux=s_aux, attend=modifiers.attend(), **numbers)
    return o.view(*q.shape[:3], o.shape[-1])


def register(name: str) -> None:
    """See hopper_attention.register_transformers."""
    try:
        import transformers
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            f"register_transformers: {error}; it needs transformers {'.'.join(map(str, OLDEST))} or later"
        ) from None
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise ImportError(
            f"register_transformers: transformers is {transformers.__version__}; it needs {wanted} or later"
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, mask)


__all__ = ["BandMask", "attention_forward", "band_of", "mask", "register"]
