"""The backward points of sweep.py: who computes gradients, and what they are held against."""

import contextlib
import itertools
import math

import additive
import dropout
import entry

# As the forward's bounds (sweep.py): relative Frobenius error of a head against f64, and of its worst block of rows
# against f64 and against another library. A row alone would not do: the only key of a query leaves it a gradient of 0.
BOUNDS = {
    "bf16": {"slice": 1e-2, "block": 3e-2, "cross": 3e-2},
    "f16": {"slice": 2e-3, "block": 6e-3, "cross": 6e-3},
}
# An ulp of 1: what sums that differ in their last bits may differ by once they are rounded.
ULPS = {"bf16": 2.0**-7, "f16": 2.0**-10}
# Where inputs are not normal, heads are compared, and the bounds of dQ and dK are those of a block times this: most rows may be what is
# left of terms that cancel, and O is rounded. 0.22 was measured of a right dQ in bf16, and 0.04 of dK. dV has no such terms.
WIDER = 20
# Rows of a block, and the size of an element below which gradients of unit-variance inputs are rounding alone.
BLOCK, SMALLEST = 64, 1e-4
# Queries whose pairs with every key are in memory at once, in f64.
CHUNK = 1024
NAMES = ("d_q", "d_k", "d_v")


def poisoned(given, torch):
    """Memory for dQ, dK and dV, laid out as Q, K and V and full of NaN. Raises a RuntimeError where no forward gave an O."""
    if given["o"] is None:
        raise RuntimeError(given["why"])
    empty = lambda x: torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device).fill_(float("nan"))
    return tuple(empty(given[name]) for name in ("q", "k", "v"))


class EntryBackward:
    """A shared object with the C entry, which writes into gradients that were poisoned with NaN."""

    def __init__(self, inner):
        if not inner.library.has_backward:
            raise RuntimeError(f"{entry.STATUS[2]}: {inner.name} exports no hattn_peer_bwd")
        self.name, self.role, self.library, self.torch = inner.name, inner.role, inner.library, inner.torch

    def prepare(self, p, given):
        torch = self.torch
        self.gradients = poisoned(given, torch)
        tensors = {name: given[name] for name in ("q", "k", "v", "o", "d_o")}
        tensors.update(zip(NAMES, self.gradients))
        self.offsets = self.library.offsets(p, torch)
        stream = torch.cuda.current_stream().cuda_stream
        self.more = [of(p, torch) for of in (self.library.slopes, self.library.lists, self.library.state)]
        self.args = entry.filled(entry.BackwardArgs, p, tensors, given["lse"], stream, self.offsets, *self.more)
        if given.get("bias") is not None:
            additive.give(self.args, p, given["bias"], self.library)
            self.gradients += (torch.full_like(given["bias"], float("nan")),)
            self.args.d_bias = self.gradients[3].data_ptr()
        self.given = given  # what the addresses lead to
        code, need = self.library.backward_workspace(self.args)
        self.refuse(code)
        self.workspace = torch.empty(max(need, 1), dtype=torch.uint8, device=given["q"].device)
        self.args.workspace, self.args.workspace_bytes = self.workspace.data_ptr(), need

    def context(self):
        return contextlib.nullcontext()

    def call(self):
        self.refuse(self.library.backward(self.args))
        return self.gradients

    def refuse(self, code):
        if code != 0:
            raise RuntimeError(self.library.complaint(code))


class AutogradBackward:
    """A forward of PyTorch or of a package, whose gradients PyTorch asks for: the forward ran once, before the timing."""

    def __init__(self, inner, torch):
        self.name, self.role, self.inner, self.torch = inner.name, inner.role, inner, torch

    def prepare(self, p, given):
        torch = self.torch
        inputs = [given[name] for name in ("q", "k", "v")]
        if given.get("bias") is not None:
            own = getattr(self.inner, "leaf", lambda p, bias, q: bias)
            inputs.append(own(p, given["bias"], given["q"]))
        self.leaves = tuple(x.detach().requires_grad_() for x in inputs)
        with torch.enable_grad():
            self.inner.prepare(p, *self.leaves)
            with self.inner.context():
                self.o = self.forward()
        # In the order of its own output, so that no copy of it is timed.
        d_o = given["d_o"]
        self.d_o = torch.empty_strided(self.o.size(), self.o.stride(), dtype=d_o.dtype, device=d_o.device).copy_(d_o)

    def forward(self):
        try:
            return self.inner.call()
        except RuntimeError as error:
            # How PyTorch says that a backend takes no mask whose gradient is asked for.
            if len(self.leaves) == 4 and any(words in str(error) for words in ("No available kernel", "not differentiable")):
                raise RuntimeError(f"{entry.STATUS[2]}: with a gradient of attn_mask: {error}") from error
            raise

    def context(self):
        return self.inner.context()

    def call(self):
        return self.torch.autograd.grad(self.o, self.leaves, self.d_o, retain_graph=True)


def contestant(x, torch):
    """The backward of a library; raises a RuntimeError where it has none."""
    if hasattr(x, "backward"):
        return x.backward()
    return EntryBackward(x) if hasattr(x, "library") else AutogradBackward(x, torch)


def saved(p, q, k, v, forwards, judge, torch, bias=None):
    """O, laid out as Q, and the contiguous LSE: of the first library with the C entry whose forward is right, else of
    PyTorch's FlashAttention-2. `judge` complains of a forward's output. Raises a RuntimeError when there is none."""
    why = []
    for x in forwards:
        try:
            x.prepare(p, q, k, v, *([] if bias is None else [bias]))
            o = x.call()
            torch.cuda.synchronize()
            complaint = judge(x, o)
        except Exception as error:  # it is named when it computes the backward, or its forward is timed
            complaint = str(error)
        if complaint is None:
            return o.clone(), x.lse.clone()
        why.append(f"{x.name}: {complaint}")
    try:
        return flash_saved(p, q, k, v, torch)
    except Exception as error:  # a PyTorch or a card without it
        why.append(f"PyTorch's FlashAttention-2: {error}")
    raise RuntimeError(f"no forward gave the O and the LSE that gradients need: {'; '.join(why)}")


def flash_saved(p, q, k, v, torch):
    """O, laid out as Q, and the contiguous LSE of PyTorch's FlashAttention-2."""
    if "softcap" in p or p.get("alibi") or p.get("blocks"):
        raise RuntimeError("it has no softcap, no ALiBi and no blocks here")
    additive.refuse("it", p)
    if p.get("dropout"):
        raise RuntimeError("it draws the pairs that dropout keeps itself")
    if entry.lengths(p) is not None:
        return flash_saved_packed(p, q, k, v, torch)
    if p.get("window") is not None:
        raise RuntimeError("it has no window")
    if p["causal"] and entry.queries(p) != p["seqlen"]:
        raise RuntimeError("its causal mask lies at the other corner")
    # It takes as many key heads as query heads, in the order [batch, heads, seqlen, head_dim].
    group = p["heads_q"] // p["heads_kv"]
    heads_first = [q.transpose(1, 2), *(x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (k, v))]
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first, is_causal=p["causal"], **entry.keywords_of_scale(p, "scale"))[:2]
    o = entry.like_output(p, q, torch).copy_(o.transpose(1, 2))
    return o, lse[:, :, : entry.queries(p)].contiguous()


def flash_saved_packed(p, q, k, v, torch):
    """The same of packed sequences."""
    offsets, longest, window = entry.offsets(p, torch), max(entry.lengths(p)), p.get("window")
    keywords = {} if window is None else {"window_size_left": window, "window_size_right": 0}
    causal = p["causal"] and window is None
    rows = [x.squeeze(0) for x in (q, k, v)]
    o, lse = torch.ops.aten._flash_attention_forward(*rows, offsets, offsets, longest, longest, 0.0, causal, False, **keywords)[:2]
    if lse.dim() == 3:  # an older PyTorch: [sequences, heads, longest]
        lse = torch.cat([x[:, :length] for x, length in zip(lse, entry.lengths(p))], 1)
    o = entry.like_output(p, q, torch).copy_(o.unsqueeze(0))
    return o, lse[:, : q.size(1)].unsqueeze(0).contiguous()


def oracle(p, q, k, v, d_o, torch, variances=None, bias=None):
    """f64 gradients of the first and the last key head and their query heads, from the definition: (batch, key head,
    query heads, dQ [heads, seqlen, dim], dK [seqlen, dim], dV). With a list of `variances` they are those without dropout, and the
    list gets (dQ, dK, dV) with the variances over all draws of what dropout keeps."""
    group = p["heads_q"] // p["heads_kv"]
    lengths = entry.lengths(p) or [max(p["seqlen"], entry.queries(p))]
    sequences = [slice(end - length, end) for end, length in zip(itertools.accumulate(lengths), lengths)]
    out = []
    for b, kv in sorted({(0, 0), (p["batch"] - 1, p["heads_kv"] - 1)}):
        heads = range(kv * group, (kv + 1) * group)
        of = lambda x, rows, heads: x[b, rows, heads.start : heads.stop].transpose(0, 1).double()
        one = range(kv, kv + 1)
        sides = [(of(q, x, heads), of(k, x, one)[0], of(v, x, one)[0], of(d_o, x, heads)) for x in sequences]
        several = len(sides) > 1
        more = variances is not None, bias
        makes = [exact(p, *side, torch, heads.start, n if several else b, *more) for n, side in enumerate(sides)]
        d_q, d_k, d_v = zip(*(made for made, _ in makes))
        if variances is not None:
            of_q, of_k, of_v = zip(*(variance for _, variance in makes))
            variances.append((torch.cat(of_q, 1), torch.cat(of_k), torch.cat(of_v)))
        out.append((b, kv, heads, torch.cat(d_q, 1), torch.cat(d_k), torch.cat(d_v)))
    return out


def drawn(gradients, mean, variances):
    """Gradients, their mean over all draws and their variance, of each tensor and pair of batch and key head."""
    d_q, d_k, d_v = gradients[:3]
    for (b, kv, heads, *means), of in zip(mean, variances):
        got = (d_q[b, :, heads.start : heads.stop].transpose(0, 1), d_k[b, :, kv], d_v[b, :, kv])
        yield from zip(got, means, of)


def exact(p, q, keys, values, d_o, torch, first_head=0, batch=0, of_draws=False, bias=None):
    """dQ [heads, queries, dim], dK [keys, dim] and dV of one sequence and a key head, in f64, and their variances. `first_head`:
    that of q. `batch`: the number of the sequence. With `of_draws` there is no dropout; the variances, else None, are those that it
    has over all draws."""
    s, queries, scale = keys.size(0), q.size(1), entry.scale(p)
    columns = torch.arange(s, device=q.device)
    own = torch.arange(queries, device=q.device) + (s - queries)  # of each query: the last sees the last key
    d_k, d_v = torch.zeros_like(keys), torch.zeros_like(values)
    d_q, of_q, of_k, of_v = [], [], torch.zeros_like(keys), torch.zeros_like(values)
    for head, (of_head, d_o_of_head) in enumerate(zip(q, d_o), first_head):
        chunks, of_chunks = [], []
        for first in range(0, queries, CHUNK):
            rows = slice(first, first + CHUNK)
            some, gradient = of_head[rows], d_o_of_head[rows]
            scores, slope = entry.capped(p, scale * some @ keys.T, torch)
            scores = entry.biased(p, scores, head, own[rows], torch)
            numbers = torch.arange(queries, device=q.device)[rows]
            scores = additive.added(bias, scores, batch, head, numbers)
            if p["causal"]:
                before = own[rows, None] - columns[None, :]
                scores.masked_fill_((before < 0) | (before > p.get("window", s)), float("-inf"))
            scores = entry.unlisted(p, scores, numbers, torch)
            weights = additive.softmax(scores, bias, torch)
            d_p = gradient @ values.T
            if of_draws:
                kept = 1.0
                parts = dropout.gradients(p, weights, d_p, keys, some, gradient)
                of_chunks.append(scale**2 * parts[0])
                of_k, of_v = of_k + scale**2 * parts[1], of_v + parts[2]
            else:
                kept = dropout.kept(p, batch, head, numbers[:, None], columns[None, :], torch)
                d_p = kept * d_p
            d_s = weights * (d_p - (weights * d_p).sum(-1, keepdim=True)) * slope
            chunks.append(scale * d_s @ keys)
            d_k += scale * d_s.T @ some
            d_v += (kept * weights).T @ gradient
        d_q.append(torch.cat(chunks))
        of_q += [torch.cat(of_chunks)] if of_draws else []
    return (torch.stack(d_q), d_k, d_v), (torch.stack(of_q), of_k, of_v) if of_draws else None


def apart(a, b, torch, by_head=False):
    """The largest relative distance of two blocks of rows, or of two heads: a and b are [..., seqlen, dim]."""
    block = a.size(-2) if by_head else BLOCK
    x, y = (z.float().reshape(-1, z.size(-1)) for z in (a, b))
    rows, dim = x.size(0), x.size(1)
    whole_blocks = rows - rows % block
    # The last block reaches back instead of being short: it might be one row alone.
    parts = [(x[:whole_blocks], y[:whole_blocks])] + ([(x[-block:], y[-block:])] if rows % block else [])
    worst = 0.0
    for x, y in parts:
        if x.size(0) == 0:
            continue
        x, y = (z.reshape(-1, min(block, z.size(0)) * dim) for z in (x, y))
        norm = torch.linalg.vector_norm(y, dim=-1).clamp_min(SMALLEST * math.sqrt(y.size(-1)))
        distance = torch.linalg.vector_norm(x - y, dim=-1) / norm
        worst = larger(worst, float("nan") if bool(torch.isnan(distance).any()) else float(distance.max()))
    return worst


def larger(a, b):
    """The larger of two errors; NaN is larger than everything."""
    return a if math.isnan(a) or a > b else b


def whole(a, b, torch, by_head=False):
    """`apart` of two gradients in the logical order, a batch at a time: f32 copies of everything would need much memory."""
    worst = 0.0
    for x, y in zip(a, b):
        worst = larger(worst, apart(x.transpose(0, 1), y.transpose(0, 1), torch, by_head))
    return worst


def of_bias(p, q, k, v, d_o, bias, torch):
    """What the gradient of the bias is held against, see `additive.gradient`. Empty without a bias."""
    if bias is None:
        return []
    columns = lambda keys: torch.arange(keys, device=q.device)[None, :]
    kept = lambda n, h, rows, keys: dropout.kept(p, n, h, rows[:, None], columns(keys), torch)
    return additive.gradient(p, q, k, v, d_o, bias, kept, torch)


def whole_bias(p, a, b, torch):
    """`apart` of two gradients of a bias, a head at a time. Of packed sequences a head of all of them, since some are short."""
    if entry.lengths(p) is None:
        pairs, by_head = zip(a.flatten(0, 1), b.flatten(0, 1)), False
    else:
        pairs, by_head = zip(*(x.transpose(0, 1).flatten(1, 2) for x in (a, b))), True
    worst = 0.0
    for x, y in pairs:
        worst = larger(worst, apart(x, y, torch, by_head))
    return worst


def check(p, gradients, reference, agreed, bounds, torch, normal=True, biases=()):
    """Errors of the gradients. `agreed` are some that passed before, or None. Where inputs are not normal, whole heads are compared in
    place of blocks. `biases`: of_bias. Returns (numbers, complaint or None)."""
    numbers = {"unwritten": sum(int(torch.isnan(x).sum()) for x in gradients), "slice": 0.0}
    d_q, d_k, d_v = gradients[:3]
    blocks = dict.fromkeys(NAMES, 0.0)
    for b, kv, heads, *expected in reference:
        # A key head's queries' heads, then the key head itself, as [..., seqlen, dim].
        got = (d_q[b, :, heads.start : heads.stop].transpose(0, 1), d_k[b, :, kv], d_v[b, :, kv])
        for name, x, y in zip(NAMES, got, expected):
            norm = max(float(y.norm()), SMALLEST * math.sqrt(y.numel()))
            numbers["slice"] = larger(numbers["slice"], float((x.double() - y).norm()) / norm)
            blocks[name] = larger(blocks[name], apart(x, y, torch, not normal))
    for b, h, rows, expected in biases:
        got = gradients[3][b, h]
        blocks["d_bias"] = larger(blocks.get("d_bias", 0.0), apart(got if rows is None else got[rows], expected, torch))
    numbers.update(blocks)
    if agreed is not None:
        numbers["cross"] = 0.0
        for x, y in zip(gradients[:3], agreed):
            numbers["cross"] = larger(numbers["cross"], whole(x, y, torch, not normal))
        for x, y in zip(gradients[3:], agreed[3:]):
            numbers["cross"] = larger(numbers["cross"], whole_bias(p, x, y, torch))
    if normal:
        limits = {"slice": bounds["slice"], **dict.fromkeys((*NAMES, "d_bias"), bounds["block"]), "cross": bounds["cross"]}
    else:
        limits = {**dict.fromkeys(("slice", "d_q", "d_k", "d_bias", "cross"), WIDER * bounds["block"]), "d_v": bounds["block"]}
    wrong = [f"{key} {numbers[key]:.3g} > {limit:g}" for key, limit in limits.items() if key in numbers and not numbers[key] <= limit]
    if numbers["unwritten"]:
        wrong.append(f"{numbers['unwritten']} elements are NaN")
    # JSON has no NaN.
    return {key: x if math.isfinite(x) else str(x) for key, x in numbers.items()}, "; ".join(wrong) or None


def changed(p, before, after, torch):
    """The names of gradients that are not what they were on the same inputs. They may be summed in any order, and so
    differ in their last bits."""
    pairs = zip((*NAMES, "d_bias"), before, after)
    far = lambda name, x, y: whole_bias(p, y, x, torch) if name == "d_bias" else whole(y, x, torch)
    moved = [name for name, x, y in pairs if not torch.equal(x, y) and not far(name, x, y) <= ULPS[p["dtype"]]]
    return moved
