"""An additive bias as torch tensors have it: a term of each pair of a query and a key, with a gradient of its own."""

from __future__ import annotations

from typing import Any

import torch

from ._plans import bias_shape, bias_sizes

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def bias_of(bias: Any, q: torch.Tensor, k: torch.Tensor, lists: dict, name: str = "bias") -> torch.Tensor:
    """A bias as the library reads it: [1 or batch, 1 or heads_q, 1 or seqlen_q, seqlen_kv], on the device of the operands.

    `lists` are as in `bias_sizes`. Autograd records what is done to the bias here.
    """
    if not isinstance(bias, torch.Tensor) or not bias.is_floating_point():
        what = bias.dtype if isinstance(bias, torch.Tensor) else type(bias).__name__
        raise TypeError(f"{name}: {what}; allowed: tensors of floating-point numbers")
    shape = bias_shape(name, bias.shape, bias_sizes(q, k, lists))
    bias = bias.to(device=q.device, dtype=bias.dtype if bias.dtype in _DTYPES else torch.float32)
    bias = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
    if bias.shape[3] != shape[3]:
        bias = bias.expand(*bias.shape[:3], shape[3])
    # The last stride is 1. All else may lie as it likes.
    return bias if bias.stride(3) == 1 or shape[3] == 1 else bias.contiguous()


__all__ = ["bias_of"]
