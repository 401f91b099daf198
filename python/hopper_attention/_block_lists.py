"""Block-sparse masks without torch: what a run reads of one, and how boolean arrays become it."""

from __future__ import annotations

from typing import Any, NamedTuple, Tuple

from . import abi

#: The queries of a block, and its keys.
BLOCK = 128
#: The int32 words that hold the bits of a partial block: 4 for each query.
WORDS = BLOCK * BLOCK // 32


class BlockLists(NamedTuple):
    """Which blocks of keys each block of queries attends to, for `block_mask`. A block is 128 queries and 128 keys.

    With Qb = ceil(seqlen_q / 128) and Kb = ceil(seqlen_kv / 128), B 1 or the batch, and H 1 or heads_q:

    - counts: [B, H, Qb], the number of partial blocks.
    - indices: [B, H, Qb, Kb], the partial blocks. Of the last dimension the first counts are read.
    - bits: [B, H, Qb, most * 512], where most is the largest number of partial blocks of a list. Each has 512 words in
      the order of the list: 4 for each of its 128 queries. Bit j % 32 of word j / 32 of a query is key j, and a 1 keeps
      it. Bits past the ends of the sequences are not used.
    - full_counts, full_indices: as counts and indices, of blocks whose pairs are all kept. None: there are none.

    All are int32 and on the device of the operands. A block that is in no list keeps nothing.

    The CPU refuses counts that are below 0 or above most (or Kb, of full blocks), indices that are no block of keys, and
    blocks that are listed twice (HattnError). A GPU clamps such counts, leaves such indices out, and takes the first
    place of a block. It reads and writes no other memory in any case.
    """

    counts: Any
    indices: Any
    bits: Any
    full_counts: Any = None
    full_indices: Any = None

    def named(self) -> dict:
        """The given lists by the names of their operands."""
        return {name: given for name, given in zip(abi.BLOCK_LISTS, self) if given is not None}


def blocks(rows: int) -> int:
    """The number of blocks of so many queries or keys."""
    return -(-rows // BLOCK)


def fields_of(given: dict) -> dict:
    """The fields of a forward problem whose tensors by their names are `given`. Nothing where there are no lists.

    The library compares the shapes with those of the problem.
    """
    counts, bits = given.get("mask_block_cnt"), given.get("mask_bits")
    if counts is None or bits is None:
        return {}
    batch, heads = (*counts.shape, 1, 1)[:2]
    flags = abi.BLOCK_MASK_LISTS
    for has, flag in (
        (batch != 1, abi.BLOCK_MASK_PER_BATCH),
        (heads != 1, abi.BLOCK_MASK_PER_HEAD),
        (given.get("full_block_cnt") is not None, abi.BLOCK_MASK_FULL_BLOCKS),
    ):
        flags |= flag if has else 0
    # The field has 32 bits. The library refuses far smaller numbers.
    most = min(bits.shape[-1] // WORDS, 2**31 - 1)
    return {"block_mask": flags, "block_mask_most_partial": most}


def of_four(shape: Tuple[int, ...], sizes: Tuple[int, int, int, int]) -> Tuple[int, int, int, int]:
    """The shape of a mask as [B, H, seqlen_q, seqlen_kv], of one that broadcasts to `sizes`.

    B and H stay 1 where the mask has no size of its own there.
    """
    four = (1,) * (4 - len(shape)) + tuple(shape)
    if len(four) != 4 or any(its not in (1, size) for its, size in zip(four, sizes)):
        allowed = f"one that broadcasts to [batch, heads_q, seqlen_q, seqlen_kv], {list(sizes)}"
        raise ValueError(f"attn_mask: shape {list(shape)}; allowed: {allowed}")
    return four[0], four[1], sizes[2], sizes[3]


def one_of(block_mask: Any, attn_mask: Any) -> None:
    """Refuses two masks in one call."""
    if block_mask is not None and attn_mask is not None:
        raise ValueError("block_mask: given, and so is attn_mask; allowed: one of both")


def lists_of_array(xp: Any, mask: Any, sizes: Tuple[int, int, int, int]) -> BlockLists:
    """The lists of a boolean array of numpy or CuPy (`xp`), for operands of these sizes: True keeps a pair."""
    if mask.dtype != bool:
        raise TypeError(f"attn_mask: {mask.dtype}; allowed: booleans, where True keeps a pair, or floating-point numbers")
    batch, heads, rows, columns = of_four(mask.shape, sizes)
    q_blocks, k_blocks = blocks(rows), blocks(columns)
    # Pairs past the ends of the sequences are 0, and are not counted.
    padded = xp.zeros((batch, heads, q_blocks * BLOCK, k_blocks * BLOCK), dtype=bool)
    padded[:, :, :rows, :columns] = mask
    padded = padded.reshape(batch, heads, q_blocks, BLOCK, k_blocks, BLOCK)
    kept = padded.sum((3, 5))
    pairs = xp.outer(*(xp.clip(n - xp.arange(-(-n // BLOCK)) * BLOCK, 0, BLOCK) for n in (rows, columns)))
    weights = xp.array([1 << bit for bit in range(8)], dtype="uint8")
    packed = (padded.reshape(*padded.shape[:-1], 16, 8) * weights).sum(-1, dtype="uint8")
    bits = xp.ascontiguousarray(packed.transpose(0, 1, 2, 4, 3, 5)).view("int32").reshape(*kept.shape, WORDS)

    def listed(wanted: Any) -> tuple:
        # The blocks that are wanted come first, in order.
        order = xp.argsort(~wanted, axis=-1, kind="stable")
        return wanted.sum(-1).astype("int32"), order

    full = listed(kept == pairs)
    counts, order = listed((kept > 0) & (kept < pairs))
    most = int(counts.max()) if counts.size else 0
    bits = xp.take_along_axis(bits, order[..., :most, None], 3).reshape(batch, heads, q_blocks, most * WORDS)
    return BlockLists(counts, order.astype("int32"), xp.ascontiguousarray(bits), full[0], full[1].astype("int32"))


__all__ = ["BLOCK", "WORDS", "BlockLists", "blocks", "fields_of", "lists_of_array", "of_four", "one_of"]
