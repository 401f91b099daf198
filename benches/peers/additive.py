"""The additive bias of points: its numbers, what peers get of it, and its gradient in f64.

A point has it as text, `f32:bhq` or `bf16:h:hidden`: a type, the dimensions that it has beside the keys, and what it holds.
crates/hopper-attention-verify/src/bias.rs says what that means. A shared object gets it in its type. PyTorch's SDPA wants a mask in
the type of Q, so its backends get the numbers rounded to that. FlexAttention reads them in their type."""

import entry

# Queries whose pairs with every key are in memory at once, in f64.
CHUNK = 1024


def form(p):
    """The type's name, the letters of the dimensions and what it holds. None without a bias."""
    if not p.get("bias"):
        return None
    dtype, letters, holds = (*p["bias"].split(":"), "", "")[:3]
    return dtype, letters, holds or "normal"


def shape(p):
    """[1 or batch, 1 or query heads, 1 or queries, keys]."""
    letters = form(p)[1]
    own = zip("bhq", (p["batch"], p["heads_q"], entry.queries(p)))
    return (*(size if letter in letters else 1 for letter, size in own), p["seqlen"])


def seen(p, rows, torch):
    """Which keys the mask lets these queries see, [rows, keys]. None where it hides no key."""
    if not p["causal"]:
        return None
    before = rows[:, None] + (p["seqlen"] - entry.queries(p)) - torch.arange(p["seqlen"], device=rows.device)[None, :]
    return (before >= 0) & (before <= p.get("window", p["seqlen"]))


def made(p, torch, device="cuda"):
    """The numbers, contiguous. None without a bias."""
    if not p.get("bias"):
        return None
    dtype, letters, holds = form(p)
    sizes = shape(p)
    bias = torch.empty(sizes, dtype={"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype], device=device)
    kept = None
    if holds == "hidden":
        kept = seen(p, torch.arange(entry.queries(p), device=device), torch)
        if kept is not None and "q" not in letters:
            kept = kept.any(0, keepdim=True)
    for part in bias.flatten(0, 1):  # f32 copies of everything would need much memory
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
    """Scores of these queries that are not masked yet, with the bias, if there is one."""
    if bias is None:
        return scores
    own = of(bias, b, h)
    return scores + (own if own.size(0) == 1 else own[rows]).to(scores.dtype)


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


def gradient(p, q, k, v, d_o, bias, kept_of, torch):
    """The gradient in f64 of the first and the last batch entry and head of the bias: (batch entry, head, rows, [rows, keys]). `rows`
    are the first and the last queries. `kept_of` gives what dropout multiplies weights by, of a batch entry, head and rows."""
    batches, heads, queries, _ = bias.shape
    group, scale, count = p["heads_q"] // p["heads_kv"], p["head_dim"] ** -0.5, entry.queries(p)
    chunks = [torch.arange(first, min(first + CHUNK, count), device=q.device) for first in range(0, count, CHUNK)]
    if queries > 1:
        chunks = [chunks[0]] if len(chunks) == 1 else [chunks[0], torch.arange(count - CHUNK, count, device=q.device)]
    out = []
    for own_b, own_h in sorted({(0, 0), (batches - 1, heads - 1)}):
        parts = [torch.zeros(1 if queries == 1 else rows.numel(), p["seqlen"], dtype=torch.float64, device=q.device) for rows in chunks]
        for b in range(p["batch"]) if batches == 1 else [own_b]:
            for h in range(p["heads_q"]) if heads == 1 else [own_h]:
                keys, values = (x[b, :, h // group].double() for x in (k, v))
                for rows, part in zip(chunks, parts):
                    scores, _ = entry.capped(p, scale * q[b, rows, h].double() @ keys.T, torch)
                    scores = entry.biased(p, scores, h, rows + (p["seqlen"] - count), torch)
                    scores = added(bias, scores, b, h, rows)
                    kept = seen(p, rows, torch)
                    if kept is not None:
                        scores.masked_fill_(~kept, float("-inf"))
                    weights = softmax(scores, bias, torch)
                    d_p = kept_of(b, h, rows) * (d_o[b, rows, h].double() @ values.T)
                    d_s = weights * (d_p - (weights * d_p).sum(-1, keepdim=True))
                    part += d_s if queries > 1 else d_s.sum(0, keepdim=True)
        if queries == 1:
            out.append((own_b, own_h, None, sum(parts)))
        else:
            out += [(own_b, own_h, rows, part) for rows, part in zip(chunks, parts)]
    return out
