#!/usr/bin/env python3
"""Times attention forwards and backwards against each other in one process, in turn: what `hattn bench` runs where there is
PyTorch with a GPU. It reads a job (JSON) from stdin and writes events (JSON, one a line) to stdout; benches/src/harness says what
is in them. It measures and judges nothing: medians, ratios, tables and charts are made of its samples elsewhere."""

import contextlib
import glob
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import sys
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import additive
import backward
import dropout
import entry
import flash3
import flex
import fp8
import inputs
from sdpa import Sdpa, SdpaFlash, refuse_dims

# Bounds of the check: relative Frobenius error against f64 (whole slice), the worst row against f64, the worst row
# against another library, and the LSE's absolute error. A wrong mask or a lost block is two orders above them.
BOUNDS = {
    "bf16": {"slice": 1e-2, "row": 3e-2, "cross": 3e-2, "lse": 2e-3},
    "f16": {"slice": 2e-3, "row": 6e-3, "cross": 6e-3, "lse": 2e-3},
}
WARM_UPS = 3
EVICT_BYTES = 256 << 20
# Clock ticks for which the GPU spins before each timing (half a millisecond at 2 GHz), so that the call has been enqueued
# before the GPU gets to it: the events then see the GPU's work alone. `spin_ticks` makes it longer for slow Python.
SPIN_TICKS = 1_000_000
MOST_SPIN_TICKS = 10_000_000
TICKS_PER_US = 2_000
CEILING_ITERS = 10
SIZE = 8192
COPY_BYTES = 1 << 30
# How operations are counted, in the words of a report; benches/src/harness/mod.rs has the same.
FLOPS = (
    "forward FLOPs 2*s*s*(d_qk+d_vo)*h*b, halved when causal, of the pairs kept with a window or in listed blocks, "
    "packed sequences one by one; backward 2*s*s*(3*d_qk+2*d_vo)*h*b"
)

# What our second run at a packed point is called: our name and this. It computes the dense batch that `hattn` chose for the point.
DENSE = "-dense"


class Entry:
    """A shared object with the C entry, which writes into outputs that were poisoned with NaN."""

    def __init__(self, library, name, role, torch):
        self.library, self.name, self.role, self.torch = library, name, role, torch
        self.workspace = torch.empty(entry.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def origin(self):
        with open(self.library.path, "rb") as file:
            return {"file": os.path.basename(self.library.path), "sha256": hashlib.sha256(file.read()).hexdigest()}

    def prepare(self, p, q, k, v, bias=None):
        torch = self.torch
        self.offsets = self.library.offsets(p, torch)
        self.o = entry.like_output(p, q, torch).fill_(float("nan"))
        self.lse = torch.full((p["batch"], p["heads_q"], entry.queries(p)), float("nan"), dtype=torch.float32, device="cuda")
        tensors = {"q": q, "k": k, "v": v, "o": self.o}
        self.more = [of(p, torch) for of in (self.library.slopes, self.library.lists, self.library.state)]
        stream = torch.cuda.current_stream().cuda_stream
        self.args = entry.filled(entry.Args, p, tensors, self.lse, stream, self.offsets, *self.more)
        additive.give(self.args, p, bias, self.library)
        self.bias = bias  # what the address leads to
        self.args.workspace, self.args.workspace_bytes = self.workspace.data_ptr(), self.workspace.numel()

    def context(self):
        return contextlib.nullcontext()

    def call(self):
        code = self.library.forward(self.args)
        if code != 0:
            raise RuntimeError(self.library.complaint(code))
        return self.o


class Dense(Entry):
    """Our library once more, on the dense batch of each packed point."""


class Flash:
    """A `flash_attn_func` of Dao-AILab's packages, and `flash_attn_varlen_func` for packed sequences; some give the LSE beside the
    output, some do not."""

    role = "peer"
    lse = None

    def __init__(self, name, function, package, version, varlen=None, torch=None):
        self.name, self.dense, self.package, self.version = name, function, package, version
        self.varlen, self.torch = varlen, torch

    def origin(self):
        return {"file": self.package, "version": self.version}

    def prepare(self, p, q, k, v, bias=None):
        refuse_dims(self.name, p)
        additive.refuse(self.package, p)
        if p.get("blocks"):
            raise RuntimeError(f"{entry.STATUS[2]}: the sweep gives {self.package} no blocks")
        self.function, self.qkv, self.keywords = self.dense, (q, k, v), {"causal": p["causal"]}
        self.keywords.update(entry.keywords_of_scale(p, "softmax_scale"))
        if p.get("window") is not None:
            self.keywords["window_size"] = (p["window"], 0)
        self.packed = entry.lengths(p) is not None
        if self.packed:
            if self.varlen is None:
                raise RuntimeError(f"{entry.STATUS[2]}: {self.package} has no flash_attn_varlen_func")
            offsets, longest = entry.offsets(p, self.torch), max(entry.lengths(p))
            self.function, self.qkv = self.varlen, tuple(x.squeeze(0) for x in self.qkv)
            self.keywords.update(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest)
        if "softcap" in p:
            self.refuse_without("softcap")
            self.keywords["softcap"] = float(p["softcap"])
        if p.get("alibi"):
            self.refuse_without("alibi_slopes")
            self.keywords["alibi_slopes"] = entry.slopes(p, self.torch)
        if p.get("dropout"):
            self.refuse_without("dropout_p")
            self.keywords["dropout_p"] = dropout.probability(p)

    def refuse_without(self, option):
        if option not in inspect.signature(self.function).parameters:
            raise RuntimeError(f"{entry.STATUS[2]}: {self.package} has no {option}")

    def context(self):
        return contextlib.nullcontext()

    def call(self):
        out = self.function(*self.qkv, **self.keywords)
        out = out[0] if isinstance(out, (tuple, list)) else out
        return out.unsqueeze(0) if self.packed else out


def version_of(*packages):
    """The version of the first package that is installed."""
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return "unknown"


def flash(name, module, torch, *packages):
    package = importlib.import_module(module)
    varlen = getattr(package, "flash_attn_varlen_func", None)
    return Flash(name, package.flash_attn_func, module, version_of(*packages), varlen, torch)


def flash3_peer(torch):
    """FlashAttention-3: its package if it was built here, else what xformers has compiled."""
    if importlib.util.find_spec("flash_attn_interface") is not None:
        return flash("fa3", "flash_attn_interface", torch, "flash_attn_3", "flash-attn-3")
    return flash3.Flash3(torch)


def python_peers(torch):
    """Names, and what makes them."""
    backends = torch.nn.attention.SDPBackend
    return {
        "cudnn": lambda: Sdpa("cudnn", backends.CUDNN_ATTENTION, torch),
        "fa2": lambda: SdpaFlash(torch),
        "fa3": lambda: flash3_peer(torch),
        "fa4": lambda: flash("fa4", "flash_attn.cute", torch, "flash-attn-4", "flash-attn"),
    }


def sentence(error, most=400):
    """An exception in a line."""
    text = f"{type(error).__name__}: {error}" if not isinstance(error, str) else error
    return " ".join(text.split())[:most]


def dtypes(job):
    return {p["dtype"] for p in job.get("points", ())}


def load_frontend(job, missing):
    """What cuDNN computes e4m3 operands with. None if it was not asked for, or if it is missing, which is reported."""
    if not ("e4m3" in dtypes(job) and job["python_peers"]):
        return None
    try:
        return fp8.Frontend()
    except Exception as error:  # as of other packages
        missing.append({"name": "cudnn", "role": "peer", "error": sentence(error)})
        return None


def load(job, torch):
    """Everybody who was asked for or is found here, and the names and reasons of those who would not load."""
    found, missing = [], []
    for role, texts in (("ours", job["ours"]), ("peer", job["peers"])):
        for text in texts:
            label, path = entry.label_and_path(text)
            name = label or os.path.basename(path)
            try:
                library = entry.Library(path)
                name = label or library.name
                if any(x.name == name for x in found):
                    raise ValueError(f"another is called {name}: name one, as in NAME=PATH")
                found.append(Entry(library, name, role, torch))
            except (OSError, AttributeError, ValueError) as error:
                missing.append({"name": name, "role": role, "error": sentence(error)})
    if job["python_peers"]:
        packages = python_peers(torch)
        points = job.get("points", ())
        if any("softcap" in p or p.get("alibi") or p.get("blocks") or p.get("bias") for p in points):
            packages["flex"] = lambda: flex.Flex(torch)
        if any(p.get("bias") for p in points):
            packages["efficient"] = lambda: Sdpa("efficient", torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION, torch)
        for name, make in packages.items():
            if any(x.name == name for x in found):
                continue  # a shared object stands for it
            if dtypes(job) == {"e4m3"} and name not in fp8.PEERS:
                continue  # it could compute none of the points
            try:
                found.append(make())
            except Exception as error:  # whatever a package does on import
                missing.append({"name": name, "role": "peer", "error": sentence(error)})
    ours = [x for x in found if isinstance(x, Entry) and x.role == "ours"]
    if "e4m3" in dtypes(job):
        found += [fp8.Blocks(x) for x in ours]
    if any("packed" in p for p in job.get("points", ())):
        found += [Dense(x.library, x.name + DENSE, x.role, torch) for x in ours[:1]]
    return found, missing


def drawn(p, seqlen, heads, layout, torch, d=None):
    """A unit-variance normal tensor in f32, logically [batch, seqlen, heads, head_dim], stored as the layout says. `d`: another head
    dim than that of Q and K."""
    b, d = p["batch"], d or p["head_dim"]
    shape = (b, seqlen, heads, d) if layout == "bshd" else (b, heads, seqlen, d)
    x = torch.randn(shape, dtype=torch.float32, device="cuda")
    return x if layout == "bshd" else x.transpose(1, 2)


def rounded(p, x, torch):
    """A tensor in the point's type. e4m3 operands are quantised from f32, in more than one way."""
    return x.to({"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float32}[p["dtype"]])


def operands(p, layout, torch):
    """Q, K and V, of the point's class of inputs or of its file."""
    if "file" in p:
        return [rounded(p, inputs.of_file(p, name, layout, torch), torch) for name in ("q", "k", "v")]
    q = drawn(p, entry.queries(p), p["heads_q"], layout, torch)
    k, v = (drawn(p, p["seqlen"], p["heads_kv"], layout, torch, d) for d in (p["head_dim"], entry.values(p)))
    inputs.change(p, q, k, torch)
    return [rounded(p, x, torch) for x in (q, k, v)]


def oracle(p, q, k, v, torch, variances=None, bias=None):
    """f64 attention of some rows (the first, the last and random ones) of three (batch, head) pairs. With a list of `variances`
    it is that without dropout, and the list gets the variance of each pair's rows over all draws of what dropout keeps."""
    s, keys = entry.queries(p), p["seqlen"]
    edge = torch.arange(min(s, 96), device="cuda")
    rows = torch.cat([edge, s - 1 - edge, torch.randint(s, (128,), device="cuda")])
    number = starts = None  # of the sequence that each row belongs to, and where each begins
    if entry.lengths(p) is not None:
        lengths = torch.tensor(entry.lengths(p), device="cuda")
        number = torch.arange(len(lengths), device="cuda").repeat_interleave(lengths)
        starts = lengths.cumsum(0) - lengths
        rows = torch.cat([rows, (starts + lengths - 1)[:96], starts[:96]])  # the first and the last row of many
    rows = torch.unique(rows)
    last_b, last_h = p["batch"] - 1, p["heads_q"] - 1
    out = []
    for b, h in sorted({(0, 0), (last_b, last_h), (last_b // 2, last_h // 3)}):
        kv = h // (p["heads_q"] // p["heads_kv"])
        scores = q[b, rows, h].double() @ k[b, :, kv].double().T * entry.scale(p)
        scores, _ = entry.capped(p, scores, torch)
        scores = entry.biased(p, scores, h, rows + (keys - s), torch)
        packed = number is not None
        scores = additive.added_packed(bias, scores, number, starts, h, rows, torch) if packed else additive.added(bias, scores, b, h, rows)
        if p["causal"]:
            before = rows[:, None] + (keys - s) - torch.arange(keys, device="cuda")[None, :]
            scores.masked_fill_((before < 0) | (before > p.get("window", keys)), float("-inf"))
        scores = entry.unlisted(p, scores, rows, torch)
        if number is not None:
            scores.masked_fill_(number[rows, None] != number[None, :], float("-inf"))
        weights, values, lse = additive.softmax(scores, bias, torch), v[b, :, kv].double(), torch.logsumexp(scores, -1)
        if variances is None:
            weights = weights * dropout.kept_rows(p, b, h, rows, number, starts, torch)
        else:
            variances.append(dropout.variance_of_o(p, weights, values))
        out.append((b, h, rows, weights @ values, lse))
    return out


def worst_row(a, b, torch):
    """The largest relative distance of two rows."""
    a, b = a.float(), b.float()
    distance = torch.linalg.vector_norm(a - b, dim=-1) / torch.linalg.vector_norm(b, dim=-1).clamp_min(1e-30)
    return float("nan") if bool(torch.isnan(distance).any()) else float(distance.max())


def compared(o, reference, torch):
    """What an output has in the place of the exact rows, these rows, their LSE and their places (batch, head, rows), of each pair
    of batch and head. Rows of NaN queries are left out: all of them must be NaN."""
    for b, h, at, expected, lse in reference:
        there = ~torch.isnan(expected).any(-1)
        yield o[b, at[there], h].double(), expected[there], lse[there], (b, h, at[there])


def error_of_o(o, reference, torch):
    """The relative RMSE of an output on the exact rows, and its largest error."""
    squares = of_exact = largest = 0.0
    for got, expected, *_ in compared(o, reference, torch):
        squares += float((got - expected).square().sum())
        of_exact += float(expected.square().sum())
        largest = backward.larger(float((got - expected).abs().max()), largest)
    return math.sqrt(squares / of_exact), largest


def check(contestant, o, reference, agreed, bounds, torch, nan=None):
    """Errors of one output. `agreed` is an output that passed before, or None. `nan` are the queries that are NaN, or None.
    Returns (numbers, complaint or None)."""
    # Heads first, as the LSE is.
    written = [o.transpose(1, 2)] + ([] if contestant.lse is None else [contestant.lse])
    numbers, lost = {"unwritten": sum(int(torch.isnan(x).sum()) for x in written)}, 0
    if nan is not None:
        right = sum(int(torch.isnan(x[:, :, nan]).sum()) for x in written)
        lost = sum(x[:, :, nan].numel() for x in written) - right
        numbers["unwritten"] -= right
        keep = torch.ones(o.size(1), dtype=torch.bool, device=o.device)
        keep[nan] = False
    slices, rows, lses = [], [], []
    for got, expected, lse, (b, h, at) in compared(o, reference, torch):
        slices.append(float((got - expected).norm() / expected.norm()))
        rows.append(worst_row(got, expected, torch))
        if contestant.lse is not None:
            # Both are -inf where a bias hides a whole row.
            mine = contestant.lse[b, h, at].double()
            lses.append(float((mine - lse).abs().masked_fill(mine == lse, 0.0).max()))
    # max() of a list with a NaN depends on the order; a NaN must win.
    worst = lambda values: next((x for x in values if math.isnan(x)), max(values))
    numbers["slice"], numbers["row"] = worst(slices), worst(rows)
    numbers["rms"], numbers["max"] = error_of_o(o, reference, torch)
    if lses:
        numbers["lse"] = worst(lses)
    if agreed is not None:
        # One batch at a time: f32 copies of everything would need four times the memory.
        part = lambda x: x if nan is None else x[keep]
        numbers["cross"] = worst([worst_row(part(o[b]), part(agreed[b]), torch) for b in range(o.size(0))])
    wrong = [f"{key} {numbers[key]:.3g} > {bound:g}" for key, bound in bounds.items() if key in numbers and not numbers[key] <= bound]
    if numbers["unwritten"]:
        wrong.append(f"{numbers['unwritten']} elements are NaN")
    if lost:
        wrong.append(f"{lost} elements of NaN queries are not NaN")
    # JSON has no NaN.
    return {key: x if math.isfinite(x) else str(x) for key, x in numbers.items()}, "; ".join(wrong) or None


def spin_ticks(host_us):
    """The clock ticks of a spin that is twice as long as any of these calls took on the host."""
    return min(max(SPIN_TICKS, int(2 * TICKS_PER_US * max(host_us))), MOST_SPIN_TICKS)


def time_once(x, evict, torch, ticks=SPIN_TICKS):
    """Enqueues one timing: its events, and the microseconds that the call took on the host."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with x.context():
        torch.cuda._sleep(ticks)
        evict()
        start.record()
        before = time.perf_counter()
        x.call()
        after = time.perf_counter()
        end.record()
    return start, end, (after - before) * 1e6


def balanced(runners, i):
    """Round i of an order in which each comes first, and right after each other, as often as any (a Williams design: so it is
    after twice as many rounds as there are runners). Long calls make the card draw all the power that it may, and lower its
    clocks. Who always came after a call of little power would be up to a tenth faster (benches/LOG.md, 74)."""
    n = len(runners)
    row = [(i + ((j + 1) // 2 if j % 2 else n - j // 2)) % n for j in range(n)]
    if i // n % 2:
        row.reverse()
    return [runners[x] for x in row]


def turns(runners, i):
    """The order of round i. Where a library has a second run, on other operands, that takes the place of its first in a second
    lap of the round, so that both follow the same neighbours. The SMs' instruction caches hold the kernel of either when few
    have run since: 6 of 82 us were measured where one peer stood between, and not two (benches/LOG.md, 28)."""
    first = lambda x: x.name.removesuffix(fp8.SUFFIX).removesuffix(DENSE)
    seconds = {first(x): x for x in runners if x.name != first(x)}
    firsts = balanced([x for x in runners if x not in seconds.values()], i)
    lap = [seconds.pop(x.name, x) for x in firsts] if seconds else []
    return firsts + lap + list(seconds.values())  # the last: second runs whose first has failed


def time_point(runners, runs, evict, iters, torch):
    """`iters` rounds, put into the runs. In all of them the spin covers what the calls of the last warm-up took on the host."""
    ticks = SPIN_TICKS
    for i in range(WARM_UPS + iters):
        pending = [(x.name, *time_once(x, evict, torch, ticks)) for x in turns(runners, i)]
        torch.cuda.synchronize()
        if i == WARM_UPS - 1:
            ticks = spin_ticks([host_us for *_, host_us in pending])
        if i >= WARM_UPS:
            for name, start, end, host_us in pending:
                runs[name]["ms"].append(start.elapsed_time(end))
                runs[name]["host"].append(host_us)


class ForwardPoint:
    """The inputs of a forward, and the judge of its outputs."""

    def __init__(self, p, layout, torch):
        self.p, self.torch = p, torch
        self.qkv, self.bias = operands(p, layout, torch), additive.made(p, torch)
        self.reference, self.variances = oracle(p, *self.qkv, torch, None, self.bias), []
        # Of peers that draw the pairs themselves.
        self.mean = oracle(p, *self.qkv, torch, self.variances, self.bias) if p.get("dropout") else None

    def contestant(self, x):
        return x

    def prepare(self, x):
        x.prepare(self.p, *self.qkv, *([] if self.bias is None else [self.bias]))

    def check(self, x, outputs, agreed):
        if dropout.is_own(self.p, x):
            pairs = [(outputs[0][b, at, h], mean, var) for (b, h, at, mean, _), var in zip(self.mean, self.variances)]
            return dropout.check(self.p, pairs, outputs, self.torch)
        agreed = None if agreed is None else agreed[0]
        nan = inputs.nan_rows(self.p)
        return check(x, outputs[0], self.reference, agreed, BOUNDS[self.p["dtype"]], self.torch, nan)

    def error(self, x, outputs):
        return error_of_o(outputs[0], self.reference, self.torch)

    def changed(self, before, after):
        # Bits: NaN is not equal to itself.
        return [] if self.torch.equal(*(x[0].view(self.torch.int16) for x in (before, after))) else ["o"]


class BackwardPoint:
    """The inputs of a backward, O and the LSE of a forward among them, and the judge of its gradients."""

    def __init__(self, p, layout, forwards, torch):
        self.p, self.torch = p, torch
        forward = ForwardPoint(p, layout, torch)
        (q, k, v), bias = forward.qkv, forward.bias
        d_o = inputs.of_file(p, "d_o", layout, torch)
        if d_o is None:
            d_o = drawn(p, entry.queries(p), p["heads_q"], layout, torch, entry.values(p))
        d_o = rounded(p, d_o, torch)
        self.given = {"q": q, "k": k, "v": v, "o": None, "lse": None, "d_o": d_o, "bias": bias}
        judge = lambda x, o: forward.check(x, (o,), None)[1]
        try:
            self.given["o"], self.given["lse"] = backward.saved(p, q, k, v, forwards, judge, torch, bias)
        except RuntimeError as error:
            if not (p.get("dropout") or p.get("bias")):
                raise
            self.given["why"] = str(error)  # peers in Python have a forward of their own
        self.reference, self.variances = backward.oracle(p, q, k, v, d_o, torch, None, bias), []
        self.mean = backward.oracle(p, q, k, v, d_o, torch, self.variances, bias) if p.get("dropout") else None
        self.biases = backward.of_bias(p, q, k, v, d_o, bias, torch)

    def contestant(self, x):
        return backward.contestant(x, self.torch)

    def prepare(self, x):
        x.prepare(self.p, self.given)

    def check(self, x, outputs, agreed):
        if dropout.is_own(self.p, x):
            return dropout.check(self.p, backward.drawn(outputs, self.mean, self.variances), outputs, self.torch)
        normal = inputs.is_normal(self.p)
        return backward.check(self.p, outputs, self.reference, agreed, backward.BOUNDS[self.p["dtype"]], self.torch, normal, self.biases)

    def changed(self, before, after):
        return backward.changed(self.p, before, after, self.torch)


class Beside:
    """A packed point, and the dense one that our second run computes in turn with the others."""

    def __init__(self, packed, dense):
        self.packed, self.dense = packed, dense

    def of(self, x):
        return self.dense if x.name.endswith(DENSE) else self.packed

    def contestant(self, x):
        return self.of(x).contestant(x)

    def prepare(self, x):
        self.of(x).prepare(x)

    def check(self, x, outputs, agreed):
        # The others' outputs are of other inputs.
        return self.of(x).check(x, outputs, agreed if self.of(x) is self.packed else None)

    def error(self, x, outputs):
        return self.of(x).error(x, outputs)

    def changed(self, before, after):
        return self.packed.changed(before, after)


def called(x):
    """What a call gives, as a tuple of tensors."""
    with x.context():
        outputs = x.call()
    return outputs if isinstance(outputs, tuple) else (outputs,)


def note_failure(run, who, error, torch):
    """Names in a run why it failed; ends the process when nothing that follows in it could be believed."""
    run["status"] = "unsupported" if entry.STATUS[2] in str(error) else "failed"
    run["error"] = sentence(error)
    try:
        torch.cuda.synchronize()
    except Exception as after:
        raise SystemExit(f"{who} lost the CUDA context ({sentence(error)})") from after


def make_point(p, job, forwards, frontend, torch):
    """What every library computes at a point. `forwards` gives those that may make what a backward needs of a forward."""
    if "packed" in p:
        return Beside(*(make_one(x, job, forwards, frontend, torch) for x in (p, entry.dense(p))))
    return make_one(p, job, forwards, frontend, torch)


def make_one(p, job, forwards, frontend, torch):
    if p["direction"] == "bwd":
        return BackwardPoint(p, job["layout"], forwards(), torch)
    if p["dtype"] == "e4m3":
        return fp8.Point(p, operands(p, job["layout"], torch), frontend, oracle, check, error_of_o, torch)
    return ForwardPoint(p, job["layout"], torch)


def more_draws(p, job, runners, runs, frontend, torch):
    """Replaces the error of each O that is right by its mean over more draws of the inputs."""
    draws = job.get("draws", 1)
    runners = [x for x in runners if runs[x.name]["status"] == "ok" and not dropout.is_own(p, x)]
    if draws == 1 or p["direction"] == "bwd" or not runners:
        return
    sums = {x.name: [runs[x.name]["check"][key] for key in ("rms", "max")] for x in runners}
    for _ in range(draws - 1):
        point = make_point(p, job, None, frontend, torch)
        for x in runners:
            point.prepare(x)
            outputs = called(x)
            torch.cuda.synchronize()
            sums[x.name] = [before + more for before, more in zip(sums[x.name], point.error(x, outputs))]
    for name, sum_of in sums.items():
        means = {key: x / draws for key, x in zip(("rms", "max"), sum_of)}
        runs[name]["check"].update({key: x if math.isfinite(x) else str(x) for key, x in means.items()}, draws=draws)


def run_point(index, p, found, job, evict, tell, torch, frontend=None):
    """Checks and times every library at one point."""
    seconds = Dense if "packed" in p else fp8.Blocks if p["dtype"] == "e4m3" else ()
    found = [x for x in found if isinstance(x, seconds) or not isinstance(x, (Dense, fp8.Blocks))]
    runs = {x.name: {"name": x.name, "role": x.role, "status": "ok", "ms": [], "host": []} for x in found}
    runners, first, point = [], {}, None
    for name in job["banned"].keys() & runs.keys():
        runs[name].update(status="failed", error=job["banned"][name])
    found = [x for x in found if x.name not in job["banned"]]

    def forwards():
        for x in found:
            if isinstance(x, Entry):
                tell("library", index=index, name=x.name)
                yield x

    try:
        point = make_point(p, job, forwards, frontend, torch)
    except RuntimeError as error:  # no forward for the gradients, or no memory for the oracle
        for x in found:
            note_failure(runs[x.name], x.name, error, torch)
    for x in found if point else []:
        run = runs[x.name]
        tell("library", index=index, name=x.name)
        try:
            runner = point.contestant(x)
            # Before any timing: FlashAttention-4 compiles its kernels in these two calls.
            point.prepare(runner)
            outputs = called(runner)
            torch.cuda.synchronize()
        except Exception as error:  # a library that fails is named, and the others go on
            note_failure(run, x.name, error, torch)
            continue
        # Outputs of pairs that a library drew itself are like nobody else's.
        others = [first[other.name] for other in runners if not dropout.is_own(p, other)]
        agreed = others[0] if others else None
        run["check"], complaint = point.check(runner, outputs, agreed)
        if complaint:
            run["status"], run["error"] = "wrong", complaint
            continue
        first[x.name] = tuple(output.clone() for output in outputs)
        runners.append(runner)
    if runners:
        tell("timing", index=index)
        time_point(runners, runs, evict, job["iters"], torch)
    for x in runners:
        if p["direction"] == "fwd" and dropout.is_own(p, x):
            continue  # each call draws other pairs
        moved = point.changed(first[x.name], called(x))
        if moved:
            error = f"the output changed between runs on the same inputs: {', '.join(moved)}"
            runs[x.name].update(status="wrong", error=error)
    first, point = {}, None  # their memory is for more draws
    more_draws(p, job, runners, runs, frontend, torch)
    for run in runs.values():
        host = sorted(run.pop("host"))
        if host:
            run["host_us"] = host[len(host) // 2]
    tell("point", index=index, runs=list(runs.values()))


class Product:
    """A matrix product of 8192 x 8192 x 8192, random values: zeros draw less power and run faster."""

    def __init__(self, name, torch):
        self.what, self.work = f"product_{name}", 2 * SIZE**3
        a, b = (torch.randn(SIZE, SIZE, device="cuda") for _ in range(2))
        if name == "e4m3":
            a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
            one = torch.ones((), device="cuda")
            self.call = lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        else:
            dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[name]
            a, b, c = a.to(dtype), b.to(dtype), torch.empty(SIZE, SIZE, dtype=dtype, device="cuda")
            self.call = lambda: torch.matmul(a, b, out=c)

    def context(self):
        return contextlib.nullcontext()


class Copy:
    """A copy from device memory to device memory, counting bytes read and written."""

    what, work = "copy", 2 * COPY_BYTES

    def __init__(self, torch):
        source = torch.randint(1 << 30, (COPY_BYTES // 4,), dtype=torch.int32, device="cuda")
        target = torch.empty_like(source)
        self.call = lambda: target.copy_(source)

    def context(self):
        return contextlib.nullcontext()


def ceilings(job, evict, tell, torch):
    """What the card reaches, timed as the points are."""
    names = sorted(dtypes(job) | {"e4m3"})
    for what, make in [(f"product_{name}", lambda name=name: Product(name, torch)) for name in names] + [("copy", lambda: Copy(torch))]:
        try:
            x, ms = make(), []
            for i in range(WARM_UPS + CEILING_ITERS):
                start, end, _ = time_once(x, evict, torch)
                torch.cuda.synchronize()
                if i >= WARM_UPS:
                    ms.append(start.elapsed_time(end))
            tell("ceiling", what=what, work=x.work, ms=ms)
        except Exception as error:  # a card or a PyTorch without the type
            tell("ceiling", what=what, work=0, error=sentence(error))


def cupti():
    """CUPTI's library as a wheel beside PyTorch brings it, or None."""
    return next((path for place in sys.path for path in sorted(glob.glob(os.path.join(place, "nvidia", "*", "lib", "libcupti.so.*")))), None)


def open_torch(ordinal):
    """PyTorch on the GPU; raises a RuntimeError that says why not."""
    try:
        import torch
        import torch.nn.attention
    except ImportError as error:
        raise RuntimeError(f"python3 has no PyTorch ({error})") from error
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU")
    torch.cuda.set_device(ordinal)
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch


def ready(job, found, missing, frontend, torch):
    properties = torch.cuda.get_device_properties(job["ordinal"])
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if frontend is not None:
        versions["cudnn_frontend"] = frontend.version
    return {
        "device": properties.name,
        "uuid": "GPU-" + str(properties.uuid).removeprefix("GPU-"),
        "versions": versions,
        "method": f"in turn, iteration by iteration, one process, each after each other equally often; CUDA events around the call, median of {job['iters']} after {WARM_UPS} warm-ups; "
        f"{EVICT_BYTES >> 20} MiB written before each call to empty L2, a wait after each round; {inputs.words(job['points'])}; {FLOPS}",
        "libraries": [{"name": x.name, "role": x.role, **x.origin()} for x in found],
        "missing": missing,
        "cupti": cupti(),
    }


def run(job, tell):
    try:
        torch = open_torch(job["ordinal"])
    except RuntimeError as error:
        return tell("absent", error=str(error))
    with torch.cuda.stream(torch.cuda.Stream()):
        found, missing = load(job, torch)
        frontend = load_frontend(job, missing)
        torch.manual_seed(job["seed"])
        buffer = torch.zeros(EVICT_BYTES // 4, dtype=torch.int32, device="cuda")
        if job["first"] == 0:
            tell("ready", **ready(job, found, missing, frontend, torch))
            ceilings(job, buffer.zero_, tell, torch)  # first: it also brings the clocks up
        for index, p in enumerate(job["points"]):
            if index >= job["first"]:
                run_point(index, p, found, job, buffer.zero_, tell, torch, frontend)
        ceilings(job, buffer.zero_, tell, torch)


def main():
    # What libraries print goes to stderr: stdout is for events alone.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    run(json.load(sys.stdin), lambda event, **fields: print(json.dumps({"event": event, **fields}), file=events))


if __name__ == "__main__":
    main()
