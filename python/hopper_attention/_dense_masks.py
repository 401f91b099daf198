"""Masks of transformers that are no band: 4-d tensors, and torch's BlockMask.

They become lists of blocks. A 4-d mask with numbers that are added to the scores becomes a bias.
"""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from ._block_lists import BlockLists, of_four
from ._blocks import kept_lists, lists_of_mask
from ._modified import Modifiers, attention_modified
from ._torch import is_recorded, readable


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
    if isinstance(mask, torch.Tensor):
        mask = _part_of(mask, (*query.shape[:3], key.shape[2]), query.device)
    options = (False, None, False, scaling, False, 0, softcap)
    part = {"bias" if isinstance(mask, torch.Tensor) else "block_mask": mask}
    return attention_modified(q, k, v, s_aux, *options, Modifiers(dropout=(dropout, None, None), **part))


def _part_of(mask: torch.Tensor, sizes: tuple, device: torch.device) -> Union[BlockLists, torch.Tensor]:
    """What a call reads of a 4-d mask: lists of blocks, or a bias where its numbers do more than keep and hide."""
    batch, heads, rows, columns = sizes
    # A mask may have more keys than there are yet, as in transformers' own functions.
    shape = of_four((*mask.shape[:3], 1 if mask.shape[3] == 1 else min(mask.shape[3], columns)), sizes)
    if is_recorded(mask):
        # Its numbers have a gradient, whatever they are. Each call has its own part of the graph.
        return _bias_of(mask[..., :columns], device)

    def make() -> Union[BlockLists, torch.Tensor]:
        its = mask[..., :columns]
        kept = its if its.dtype == torch.bool else _kept_by(its)
        return _bias_of(its, device) if kept is None else lists_of_mask(kept.to(device).expand(shape))

    # Layers share one mask. What its numbers are is looked at once.
    return kept_lists(mask, sizes, device, make)


@torch.compiler.disable
def _kept_by(bias: torch.Tensor) -> Optional[torch.Tensor]:
    """What a mask keeps that is added to the scores. None: it has other numbers than 0 and those that hide.

    It is read, which waits for a GPU.
    """
    kept = bias == 0
    return kept if bool((kept | _hidden(bias)).all()) else None


def _hidden(bias: torch.Tensor) -> torch.Tensor:
    """Where a mask that is added to the scores hides a pair: its type's smallest number does that, as -inf does."""
    return (bias == -torch.inf) | (bias == torch.finfo(bias.dtype).min)


def _bias_of(bias: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A mask as the library adds it, where -inf alone hides. It is a copy: what is kept must not hold the mask itself."""
    return bias.masked_fill(_hidden(bias), -torch.inf).to(device)


__all__ = ["attention_masked", "takes", "tensor_of"]
