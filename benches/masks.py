#!/usr/bin/env python3
"""Times masks that `hattn bench` lacks: chunks, a prefix, documents, spans and slices.

- Documents: a query sees the keys of its own document up to its own. Spans: runs of tokens that see each other in both
  directions, in a causal mask. Slices: pairs of a range of queries and a range of keys.
- Each mask is timed in turn with the problem without a mask (`full`), and with --flex beside PyTorch's FlexAttention.
- Work is counted in blocks of 128 queries and 128 keys that hold a kept pair. A line has the mask, the part of all blocks
  that do (`blocks`), the times in us, and blocks * full / ours: the rate relative to that without a mask. 1 is ideal.

    HOPPER_ATTENTION_LIBRARY=libhopper_attention.so PYTHONPATH=python python3 benches/masks.py --seqlens 1024,8192 --dims 64,128
"""

import argparse
import sys

import hopper_attention
import torch

import timing

BLOCK = 128


def masks(keys):
    """Names of masks, what `attention` gets, and a function that says of queries and keys whether a pair is kept."""
    position = torch.arange(keys, device="cuda")
    # Documents of uneven lengths, whose borders are not those of blocks. Every second one is a span, too.
    borders = [int(part * keys) for part in (0, 0.07, 0.21, 0.33, 0.5, 0.81, 1)]
    document = sum((position >= border).int() for border in borders[1:-1])
    spans = list(zip(borders, borders[1:]))[::2]
    chunk, prefix, window, half = keys // 8 + 3, keys // 4 + 5, keys // 8, keys // 2

    def both(i, j):  # in one span
        return (document[i] == document[j]) & (document[i] % 2 == 0)

    yield "causal", {"causal": True}, lambda i, j: i >= j
    yield f"window {window}", {"causal": True, "window": (window, None)}, lambda i, j: (i >= j) & (i - j <= window)
    yield f"chunks of {chunk}", {"window": hopper_attention.Chunked(chunk)}, lambda i, j: (i >= j) & (i // chunk == j // chunk)
    yield f"prefix of {prefix}", {"window": hopper_attention.Prefix(prefix)}, lambda i, j: (i >= j) | (j < prefix)
    lists = hopper_attention.block_lists_from_documents(document[None], device="cuda")
    yield "documents", {"causal": True, "block_mask": lists}, lambda i, j: (i >= j) & (document[i] == document[j])
    lists = hopper_attention.block_lists_from_spans([spans], keys, device="cuda")
    yield "spans", {"block_mask": lists}, lambda i, j: (i >= j) | both(i, j)
    ranges = [[0, half], [half, keys]], [[0, half], [half // 2, keys]]
    lists = hopper_attention.block_lists_from_slices(*ranges, [0, 1], keys, device="cuda")
    yield "two slices", {"block_mask": lists}, lambda i, j: ((i < half) & (j < half)) | ((i >= j) & (i >= half) & (j >= half // 2))


def blocks(kept):
    """The part of blocks that hold a kept pair."""
    size = kept.shape[0]
    padded = torch.nn.functional.pad(kept, (0, -size % BLOCK, 0, -size % BLOCK))
    count = padded.shape[0] // BLOCK
    return padded.view(count, BLOCK, count, BLOCK).any(3).any(1).float().mean().item()


def flex_call(keeps, q, k, v, d_o):
    """A call of FlexAttention with the same mask, and its O. With d_o a backward."""
    from torch.nn.attention import flex_attention as flex

    keys = q.shape[1]
    mask = flex.create_block_mask(lambda b, h, i, j: keeps(i, j), None, None, keys, keys, device="cuda")
    attend = torch.compile(flex.flex_attention, dynamic=False)
    heads_first = timing.leaves(d_o, *(x.transpose(1, 2) for x in (q, k, v)))
    gradient = None if d_o is None else d_o.transpose(1, 2)
    call, o = timing.recorded(lambda: attend(*heads_first, block_mask=mask), heads_first, gradient)
    return call, o.transpose(1, 2)


def ours_call(options, q, k, v, d_o):
    """The same of ours, with these options of `attention`."""
    inputs = timing.leaves(d_o, q, k, v)
    return timing.recorded(lambda: hopper_attention.attention(*inputs, **options), inputs, d_o)


def check(o, kept, q, k, v):
    """Holds some queries of one head against the definition."""
    rows = torch.arange(0, q.shape[1], max(1, q.shape[1] // 61), device="cuda")
    scores = (q[0, rows, 0].float() @ k[0, :, 0].float().T) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~kept[rows], float("-inf")).softmax(-1).nan_to_num()
    expected = weights @ v[0, :, 0].float()
    error = ((expected - o[0, rows, 0].float()).norm() / expected.norm()).item()
    if not error < 1e-2:
        sys.exit(f"masks: o is wrong by {error} of its size")


def numbers(text):
    return [int(number) for number in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlens", type=numbers, default=[1024, 8192])
    parser.add_argument("--dims", type=numbers, default=[64, 128])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--flex", action="store_true")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, bf16, {options.tokens} tokens, 2048 / head dim heads")
    flush = timing.flush_memory()
    for direction in ("fwd", "bwd"):
        for dim in options.dims:
            for keys in options.seqlens:
                shape = (max(1, options.tokens // keys), keys, 2048 // dim, dim)
                q, k, v, d_o = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
                d_o = d_o if direction == "bwd" else None
                plain, _ = ours_call({}, q, k, v, d_o)
                position = torch.arange(keys, device="cuda")
                for name, wanted, keeps in masks(keys):
                    kept = keeps(position[:, None], position[None])
                    call, o = ours_call(wanted, q, k, v, d_o)
                    check(o.detach(), kept, q, k, v)
                    calls, said = [plain, call], ""
                    if options.flex:
                        try:
                            peer, o = flex_call(keeps, q, k, v, d_o)
                            check(o.detach(), kept, q, k, v)
                            calls.append(peer)
                        except Exception as error:  # a peer may fail in any way, and is then named as such
                            said = f"; flex: {type(error).__name__}"
                    part = blocks(kept)
                    full, own, *others = timing.times(calls, options.rounds, flush)
                    said += "".join(f"; flex {other:.1f}, {other / own:.2f} of ours" for other in others)
                    rate = f"{part * full / own:.3f} of the plain rate"
                    point = f"{direction} d{dim} s{keys} {name}"
                    print(f"{point}: blocks {part:.3f}; full {full:.1f}, ours {own:.1f}: {rate}{said}", flush=True)
                    if options.flex:
                        torch._dynamo.reset()


if __name__ == "__main__":
    main()
