"""The state of dropout on torch tensors: the seed and the offset of its random numbers."""

from __future__ import annotations

from typing import Any

import torch


def state_of(dropout_state: Any, generator: Any, device: torch.device) -> torch.Tensor:
    """The seed and the offset, int64 [2], on the device of the operands. Without one they are drawn from the generator."""
    if dropout_state is None:
        drawn = torch.empty(2, dtype=torch.int64, device=device if generator is None else generator.device)
        return drawn.random_(generator=generator).to(device)
    if generator is not None:
        raise ValueError("generator: given beside dropout_state; allowed: one of both")
    if not isinstance(dropout_state, torch.Tensor) or dropout_state.dtype != torch.int64:
        what = dropout_state.dtype if isinstance(dropout_state, torch.Tensor) else type(dropout_state).__name__
        raise TypeError(f"dropout_state: {what}; allowed: tensors of torch.int64")
    if tuple(dropout_state.shape) != (2,):
        raise ValueError(f"dropout_state: shape {list(dropout_state.shape)}; allowed: [2], the seed and the offset")
    return dropout_state.to(device).contiguous()


def words_of(state: torch.Tensor) -> torch.Tensor:
    """The four words of a state, as the library reads them. They are the memory of the two numbers."""
    return state.view(torch.int32)


__all__ = ["state_of", "words_of"]
