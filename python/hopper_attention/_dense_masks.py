"""Masks of transformers that are no band: 4-d tensors, and torch's BlockMask. They become lists of blocks."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ._block_lists import BlockLists, of_four
from ._blocks import kept_lists, lists_of_mask
from ._modified import Modifiers, attention_modified
from ._torch import readable


def takes(mask: Any) -> bool:
    """Whether an attention_mask is one of these."""
    if isinstance(mask, torch.Tensor):
        return mask.ndim == 4 and (mask.dtype == torch.bool or mask.is_floating_point())
    if type(mask).__name__ != "BlockMask":
        return False
    from torch.nn.attention.flex_attention import BlockMask

    return isinstance(mask, BlockMask)


def tensor_of(mask_function: Any, sizes: dict, attention_mask: Optional[torch.Tensor], more: dict) -> torch.Tensor:
    """A mask of booleans as transformers makes it for SDPA: [batch, 1, q_length, kv_length]."""
    from transformers.masking_utils import sdpa_mask

    whole = {**more, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    padding = None if attention_mask is None else attention_mask != 0
    return sdpa_mask(**sizes, mask_function=mask_function, attention_mask=padding, **whole)


def attention_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: Optional[float],
    s_aux: Optional[torch.Tensor],
    softcap: Optional[float],
    dropout: float,
) -> torch.Tensor:
    """Attention to [batch, heads, seqlen, head_dim] with one of these masks. Gives [batch, seqlen, heads, head_dim].

    The mask says all: transformers' other functions look at no window and at no positions beside it, either.
    """
    q, k, v = (readable(t.transpose(1, 2)) for t in (query, key, value))
    block_mask = mask
    if isinstance(mask, torch.Tensor):
        block_mask = _lists(mask, (*query.shape[:3], key.shape[2]), query.device)
    options = (False, None, False, scaling, False, 0, softcap)
    modifiers = Modifiers(dropout=(dropout, None, None), block_mask=block_mask)
    return attention_modified(q, k, v, s_aux, *options, modifiers)


def _lists(mask: torch.Tensor, sizes: tuple, device: torch.device) -> BlockLists:
    batch, heads, rows, columns = sizes
    # A mask may have more keys than there are yet, as in transformers' own functions.
    shape = of_four((*mask.shape[:3], 1 if mask.shape[3] == 1 else min(mask.shape[3], columns)), sizes)

    def make() -> BlockLists:
        its = mask[..., :columns]
        kept = its if its.dtype == torch.bool else _kept_by(its)
        return lists_of_mask(kept.to(device).expand(shape))

    # Layers share one mask. What its numbers are is looked at once.
    return kept_lists(mask, sizes, device, make)


@torch.compiler.disable
def _kept_by(bias: torch.Tensor) -> torch.Tensor:
    """What a mask keeps that is added to the scores. It is read, which waits for a GPU."""
    kept = bias == 0
    hidden = (bias == -torch.inf) | (bias == torch.finfo(bias.dtype).min)
    if not bool((kept | hidden).all()):
        raise NotImplementedError(
            "hopper_attention in transformers: an attention_mask with numbers that are added to scores; allowed: booleans, "
            f"or 0 and {torch.finfo(bias.dtype).min} or -inf"
        )
    return kept


__all__ = ["attention_masked", "takes", "tensor_of"]
