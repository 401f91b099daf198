"""The additive bias of points: its numbers, what peers get of it, and its gradient in f64.

A point has it as text, `f32:bhq` or `bf16:h:hidden`: a type, the dimensions that it has beside the keys, and what it holds.
crates/hopper-attention-verify/src/bias.rs says what that means. A shared object gets it in its type. PyTorch's SDPA wants a mask in
the type of Q, so its backends get the numbers rounded to that. FlexAttention reads them in their type. A bias of packed sequences
covers the longest of them, and each counts from its own first row."""

import itertools

import entry

# Queries whose pairs with every key are in memory at once, in f64.
CHUNK = 1024


def form(p):
    """The type's name, the letters of the dimensions and what it holds. None without a bias."""
    if not p.get("bias"):
        return None
    dtype, letters, holds = (*p["bias"].split(":"), "", "")[:3]
    return dtype, letters, holds or "normal"


def sizes(p):
    """How many queries and keys have numbers."""
    lengths = entry.lengths(p)
    return (entry.queries(p), p["seqlen"]) if lengths is None else (max(lengths),) * 2


def shape(p):
    """[1 or batch, 1 or query heads, 1 or queries, keys]. Packed sequences are batch entries."""
    letters, (queries, keys) = form(p)[1], sizes(p)
    batch = p["batch"] if entry.lengths(p) is None else len(entry.lengths(p))
    own = zip("bhq", (batch, p["heads_q"], queries))
    return (*(size if letter in letters else 1 for letter, size in own), keys)


def seen(p, rows, torch, length=None):
    """Which keys the mask and the lists of blocks let these queries see, [rows, keys]. None where they hide no key. `length`: that of
    the packed sequence, which has as many queries as keys."""
    queries, keys = sizes(p)
    columns = torch.arange(keys, device=rows.device)[None, :]
    kept = None if length is None or length == keys else (rows[:, None] < length) & (columns < length)
    if p["causal"]:
        before = rows[:, None] + (keys - queries) - columns
        own = (before >= 0) & (before <= p.get("window", keys))
        kept = own if kept is None else kept & own
    listed = entry.table(p, torch, rows.device)
    if listed is None:
        return kept
    own = listed[rows[:, None] // entry.BLOCK, columns // entry.BLOCK]
    return own if kept is None else kept & own


def kept_of(p, number, torch, device):
    """Which pairs read the numbers of one of the bias's own batch entries: [queries, keys], or [1, keys] where all queries share them.
    None for all of them. Packed sequences that share numbers are a part of the longest."""
    letters, lengths = form(p)[1], entry.lengths(p)
    length = None if lengths is None else lengths[number] if "b" in letters else max(lengths)
    kept = seen(p, torch.arange(sizes(p)[0], device=device), torch, length)
    return kept if kept is None or "q" in letters else kept.any(0, keepdim=True)


def made(p, torch, device="cuda"):
    """The numbers, contiguous. None without a bias."""
    if not p.get("bias"):
        return None
    dtype, letters, holds = form(p)
    bias = torch.empty(shape(p), dtype={"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype], device=device)
    for number, part in enumerate(bias.flatten(0, 1)):  # f32 copies of everything would need much memory
        kept = kept_of(p, number // bias.size(1), torch, device) if holds == "hidden" else None
        numbers = 2 * torch.randn(part.shape, dtype=torch.float32, device=device)
        # A row that all queries share would hide everything.
        whole = torch.randint(8, (part.size(0), 1), device=device) == 7
        places = torch.rand(part.shape, device=device) < {"hidden": 0.25, "mask": 0.5}.get(holds, 0)
        if holds == "mask":
            numbers.zero_()
        if holds != "normal":
            numbers.masked_fill_(places | whole if "q" in letters else places, float("-inf"))
        if kept is not None:
            numbers.masked_fill_(~kept, float("nan"))
        part.copy_(numbers)
    return bias


def of(bias, b, h):
    """The numbers that a batch entry and a query head read, [1 or queries, keys]."""
    return bias[min(b, bias.size(0) - 1), min(h, bias.size(1) - 1)]


def added(bias, scores, b, h, rows):
    """Scores of these queries of a sequence that are not masked yet, with the bias, if there is one."""
    if bias is None:
        return scores
    own = of(bias, b, h)[:, : scores.size(-1)]
    return scores + (own if own.size(0) == 1 else own[rows]).to(scores.dtype)


def added_packed(bias, scores, number, starts, h, rows, torch):
    """The same of rows of packed sequences and the keys of all of them. `number`: of the sequence of every row; `starts`: where each
    begins. Pairs of two sequences get some number."""
    if bias is None:
        return scores
    batches, heads, queries, keys = bias.shape
    sequence, first = number[rows], starts[number[rows]]
    columns = (torch.arange(scores.size(-1), device=rows.device)[None, :] - first[:, None]).clamp(0, keys - 1)
    place = (sequence if batches > 1 else 0 * sequence, min(h, heads - 1), rows - first if queries > 1 else 0 * rows)
    return scores + bias[place[0][:, None], place[1], place[2][:, None], columns].to(scores.dtype)


def softmax(scores, bias, torch):
    """Weights of masked scores. Those of a row that a bias hides are 0, and not NaN."""
    weights = torch.softmax(scores, -1)
    return weights if bias is None else weights.masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)


def give(args, p, bias, library):
    """Tells the C entry of the bias; raises a RuntimeError where there is one and the library knows nothing of that."""
    if bias is None:
        return
    if not library.adds:
        raise RuntimeError(f"{entry.STATUS[2]}: {library.name} exports no hattn_peer_adds")
    dtype, letters, _ = form(p)
    args.bias, args.bias_dtype = bias.data_ptr(), entry.DTYPES[dtype]
    args.bias_dims = sum(1 << i for i, letter in enumerate("bhq") if letter in letters)


def refuse(name, p):
    """Raises a RuntimeError where a peer that has no bias is asked for one."""
    if p.get("bias"):
        raise RuntimeError(f"{entry.STATUS[2]}: {name} has no bias")


def leaf(p, bias, q, torch):
    """What SDPA's gradient of the mask is asked of: the bias in the type of Q. Where each query has numbers of its own, they are -inf
    where the mask hides a pair, so that no such filling is timed."""
    mine = bias.to(q.dtype)
    return filled(p, mine, torch) if bias.size(2) > 1 else mine


def filled(p, mask, torch):
    """A mask with -inf where the point's mask hides a pair: SDPA takes no other mask beside an attn_mask."""
    kept = seen(p, torch.arange(entry.queries(p), device=mask.device), torch)
    return mask if kept is None else mask.masked_fill(~kept, float("-inf"))


def attn_mask(p, mine, torch):
    """SDPA's attn_mask, made of a `leaf`. PyTorch broadcasts dimensions of 1 itself."""
    return mine if mine.size(2) > 1 else filled(p, mine, torch)


def sides(p):
    """Of each sequence: the batch entry of Q, its queries and its keys."""
    if entry.lengths(p) is None:
        return [(b, slice(0, entry.queries(p)), slice(0, p["seqlen"])) for b in range(p["batch"])]
    rows = [slice(end - n, end) for end, n in zip(itertools.accumulate(entry.lengths(p)), entry.lengths(p))]
    return [(0, own, own) for own in rows]


def gradient(p, q, k, v, d_o, bias, factors, torch):
    """The gradient in f64 of the first and the last batch entry and head of the bias: (batch entry, head, rows, [rows, keys]). Of packed
    sequences the longest two: of a short one little more is left than rounding. `rows` are the first and the last queries. `factors`
    gives what dropout multiplies weights by, of a sequence, a head, rows of queries and so many keys."""
    batches, heads, queries, width = bias.shape
    group, scale, count = p["heads_q"] // p["heads_kv"], entry.scale(p), sizes(p)[0]
    sequences = sides(p)
    chunks = [torch.arange(first, min(first + CHUNK, count), device=q.device) for first in range(0, count, CHUNK)]
    if queries > 1:
        chunks = [chunks[0]] if len(chunks) == 1 else [chunks[0], torch.arange(count - CHUNK, count, device=q.device)]
    out = []
    own = range(batches) if batches == 1 or entry.lengths(p) is None else sorted(range(batches), key=lambda n: entry.lengths(p)[n])[-2:]
    for own_b, own_h in sorted({(own[0], 0), (own[-1], heads - 1)}):
        parts = [torch.zeros(1 if queries == 1 else rows.numel(), width, dtype=torch.float64, device=q.device) for rows in chunks]
        for n in range(len(sequences)) if batches == 1 else [own_b]:
            b, of_queries, of_keys = sequences[n]
            length, shift = of_queries.stop - of_queries.start, of_keys.stop - of_keys.start - of_queries.stop + of_queries.start
            for h in range(p["heads_q"]) if heads == 1 else [own_h]:
                of_head, gradient = (x[b, of_queries, h].double() for x in (q, d_o))
                keys, values = (x[b, of_keys, h // group].double() for x in (k, v))
                for rows, part in zip(chunks, parts):
                    rows = rows[rows < length]
                    scores, _ = entry.capped(p, scale * of_head[rows] @ keys.T, torch)
                    scores = entry.biased(p, scores, h, rows + shift, torch)
                    scores = added(bias, scores, n, h, rows)
                    kept = seen(p, rows, torch)
                    if kept is not None:
                        scores.masked_fill_(~kept[:, : scores.size(-1)], float("-inf"))
                    weights = softmax(scores, bias, torch)
                    d_p = factors(n, h, rows, scores.size(-1)) * (gradient[rows] @ values.T)
                    d_s = weights * (d_p - (weights * d_p).sum(-1, keepdim=True))
                    part[: len(d_s) if queries > 1 else 1, : scores.size(-1)] += d_s if queries > 1 else d_s.sum(0, keepdim=True)
        if queries == 1:
            out.append((own_b, own_h, None, sum(parts)))
        else:
            out += [(own_b, own_h, rows, part) for rows, part in zip(chunks, parts)]
    return out
