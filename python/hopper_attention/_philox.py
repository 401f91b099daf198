"""Which pairs dropout keeps, with the arrays of numpy or the tensors of torch."""

from __future__ import annotations

from typing import Any


_WORD = 0xFFFF_FFFF
_ROUNDS = 7


def _product(factor: int, x: Any) -> tuple:
    """The halves of the 64-bit product of a 32-bit number and an array of such numbers, in int64.

    The upper bits are cut off, and never the sign: with 16 bits at a time no product has more than 49 bits.
    """
    low, high = factor * (x & 0xFFFF), factor * (x >> 16)
    upper = high + (low >> 16)
    return upper >> 16, ((upper & 0xFFFF) << 16) | (low & 0xFFFF)


def _philox(a: Any, b: Any, c: Any, d: Any, low: int, high: int) -> tuple:
    """Philox-4x32 (Salmon, Moraes, Dror and Shaw, 2011)."""
    for _ in range(_ROUNDS):
        (first, first_low), (second, second_low) = _product(0xD2511F53, a), _product(0xCD9E8D57, c)
        a, b, c, d = second ^ b ^ low, second_low, first ^ d ^ high, first_low
        low, high = (low + 0x9E3779B9) & _WORD, (high + 0xBB67AE85) & _WORD
    return a, b, c, d


def dropout_mask(
    xp: Any, where: dict, dropped: int, seed: int, offset: int, batch: int, heads: int, seqlen_q: int, seqlen_kv: int
) -> Any:
    """Booleans [batch, heads, seqlen_q, seqlen_kv]. `xp` is numpy or torch, and `where` the device for torch's arange."""
    seed, offset = seed & (1 << 64) - 1, offset & (1 << 64) - 1
    count = [xp.arange(n, dtype=xp.int64, **where) for n in (batch * heads, seqlen_q, seqlen_kv)]
    plane, i, j = count[0].reshape(-1, 1, 1), count[1].reshape(1, -1, 1), count[2].reshape(1, 1, -1)
    key_patch, query_patch = j // 32 * 8 + j % 8, i // 16 * 8 + i % 8
    # Of the shape of all pairs.
    zero = (plane + i + j) * 0
    low, high = seed & _WORD, (seed >> 32) ^ (offset >> 32)
    words = _philox(key_patch + zero, query_patch + zero, plane + zero, zero + (offset & _WORD), low, high)
    number = j // 8 % 4 + zero
    word = sum(xp.where(number == n, of, zero) for n, of in enumerate(words))
    bits = xp.where(i // 8 % 2 + zero == 0, word & 0x7FFF, (word >> 16) & 0x7FFF)
    return (bits >= dropped).reshape(batch, heads, seqlen_q, seqlen_kv)


__all__ = ["dropout_mask"]
