#!/usr/bin/env python3
"""Times attention forwards against each other over the paper's sweep, in one process, in turn. See README.md beside this file."""

import argparse
import contextlib
import datetime
import hashlib
import json
import math
import os
import sys
import time

sys.dont_write_bytecode = True  # the repository may be read-only
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import card as cards
import entry
import stats

SEQLENS = [512, 1024, 2048, 4096, 8192, 16384]
# Bounds of the check: relative Frobenius error against f64 (whole slice), the worst row against f64, the worst row
# against another library, and the LSE's absolute error. A wrong mask or a lost block is two orders above them.
BOUNDS = {
    "bf16": {"slice": 1e-2, "row": 3e-2, "cross": 3e-2, "lse": 2e-3},
    "f16": {"slice": 2e-3, "row": 6e-3, "cross": 6e-3, "lse": 2e-3},
}
WARM_UPS = 3
EVICT_BYTES = 256 << 20


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours", action="append", default=[], metavar="[NAME=]PATH", help="our shared object; repeat it for variants: the ratios are the first one's")
    parser.add_argument("--peer", action="append", default=[], metavar="[NAME=]PATH", help="a peer's shared object, repeatable")
    parser.add_argument("--no-sdpa", action="store_true", help="leave PyTorch's cuDNN and FlashAttention-2 out")
    parser.add_argument("--seqlens", type=lambda t: [int(x) for x in t.split(",")], default=None, help="comma separated, default 512..16384")
    parser.add_argument("--dims", type=lambda t: [int(x) for x in t.split(",")], default=[64, 128])
    parser.add_argument("--causal", choices=["both", "yes", "no"], default="both")
    parser.add_argument("--dtype", choices=["bf16", "f16"], default="bf16")
    parser.add_argument("--heads-kv", type=int, default=None, help="key heads, default as many as query heads")
    parser.add_argument("--tokens", type=int, default=stats.TOKENS, help="tokens a batch")
    parser.add_argument("--layout", choices=["bshd", "bhsd"], default="bshd", help="storage order; every library sees strides, nobody copies")
    parser.add_argument("--iters", type=int, default=None, help="timings of each library a point, default 20, at least 12")
    parser.add_argument("--quick", action="store_true", help="512, 2048 and 8192 only, 12 timings")
    parser.add_argument("--evict", choices=["write", "read", "none"], default="write", help="how L2 is emptied before a timing; 'write' leaves dirty lines, as the published figures do")
    parser.add_argument("--time-wrong", action="store_true", help="time a library whose output is wrong too; it never counts in a ratio")
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock, and recorded")
    parser.add_argument("--commit", default=None, help="recorded in the JSON")
    parser.add_argument("--json", default=None, metavar="OUT", help="raw samples and everything else, rewritten after every point")
    options = parser.parse_args(argv)
    if options.iters is None:
        options.iters = 12 if options.quick else 20
    if options.iters < 12:
        parser.error("--iters: fewer than 12 timings are not reported")
    if options.seqlens is None:
        options.seqlens = [512, 2048, 8192] if options.quick else SEQLENS
    if options.seed is None:
        options.seed = time.time_ns() % (1 << 31)
    return options


class Entry:
    """A shared object with the C entry."""

    poisoned = True

    def __init__(self, library, name, role, torch):
        self.library, self.name, self.role, self.torch = library, name, role, torch
        self.workspace = torch.empty(entry.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def origin(self):
        with open(self.library.path, "rb") as file:
            return {"file": os.path.basename(self.library.path), "sha256": hashlib.sha256(file.read()).hexdigest()}

    def prepare(self, p, q, k, v, dtype):
        torch = self.torch
        self.o = torch.empty_strided(q.size(), q.stride(), dtype=q.dtype, device="cuda")
        self.lse = torch.empty(p["batch"], p["heads_q"], p["seqlen"], dtype=torch.float32, device="cuda")
        self.poison()
        a = entry.Args()
        a.struct_bytes = entry.ctypes.sizeof(entry.Args)
        for field, tensor in (("q", q), ("k", k), ("v", v), ("o", self.o)):
            setattr(a, field, tensor.data_ptr())
            getattr(a, field + "_stride")[:] = list(tensor.stride()[:3])
        a.lse = self.lse.data_ptr()
        a.batch, a.seqlen_q, a.seqlen_kv = p["batch"], p["seqlen"], p["seqlen"]
        a.heads_q, a.heads_kv = p["heads_q"], p["heads_kv"]
        a.head_dim_qk = a.head_dim_vo = p["head_dim"]
        a.dtype = entry.DTYPES[dtype]
        a.mask = entry.MASKS["causal" if p["causal"] else "full"]
        a.window_left = a.window_right = -1
        a.softmax_scale = 1.0 / math.sqrt(p["head_dim"])
        a.stream = torch.cuda.current_stream().cuda_stream
        a.workspace, a.workspace_bytes = self.workspace.data_ptr(), self.workspace.numel()
        self.args = a

    def poison(self):
        self.o.fill_(float("nan"))
        self.lse.fill_(float("nan"))

    def context(self):
        return contextlib.nullcontext()

    def call(self):
        code = self.library.forward(self.args)
        if code != 0:
            raise RuntimeError(self.library.complaint(code))
        return self.o


class Sdpa:
    """One backend of PyTorch's scaled_dot_product_attention. It allocates its own output, so that cannot be poisoned."""

    poisoned = False
    role = "peer"
    lse = None

    def __init__(self, name, backend, torch):
        self.name, self.backend, self.torch = name, backend, torch
        self.sdpa_kernel = torch.nn.attention.sdpa_kernel
        self.attend = torch.nn.functional.scaled_dot_product_attention

    def origin(self):
        return {"file": "torch"}

    def prepare(self, p, q, k, v, dtype):
        # Views: SDPA's logical order is BHSD, and both backends take any strides with a unit inner one.
        self.qkv = tuple(x.transpose(1, 2) for x in (q, k, v))
        self.keywords = {"is_causal": p["causal"]}
        if p["heads_q"] != p["heads_kv"]:
            self.keywords["enable_gqa"] = True

    def poison(self):
        pass

    def context(self):
        return self.sdpa_kernel(self.backend)

    def call(self):
        return self.attend(*self.qkv, **self.keywords).transpose(1, 2)


def load(options, torch):
    """Every contestant that was asked for, and the names and reasons of those that would not load."""
    found, failed = [], []
    for role, texts in (("ours", options.ours), ("peer", options.peer)):
        for text in texts:
            label, path = entry.label_and_path(text)
            try:
                library = entry.Library(path)
                found.append(Entry(library, label or library.name, role, torch))
            except (OSError, AttributeError) as error:
                failed.append({"name": label or os.path.basename(path), "role": role, "error": str(error)})
    if not options.no_sdpa:
        for name, backend in (("cudnn", "CUDNN_ATTENTION"), ("fa2", "FLASH_ATTENTION")):
            try:
                found.append(Sdpa(name, getattr(torch.nn.attention.SDPBackend, backend), torch))
            except AttributeError as error:
                failed.append({"name": name, "role": "peer", "error": str(error)})
    taken = set()
    for x in found:
        # Variants of one library share its name: the file tells them apart.
        if x.name in taken and isinstance(x, Entry):
            x.name += ":" + os.path.basename(x.library.path)
        if x.name in taken:
            raise SystemExit(f"two libraries are called {x.name}: name one, as in NAME=PATH")
        taken.add(x.name)
    return found, failed


def evicter(how, torch):
    """Something that pushes earlier data out of L2."""
    buffer = torch.zeros(EVICT_BYTES // 4, dtype=torch.int32, device="cuda")
    if how == "write":
        return buffer.zero_
    if how == "read":
        return buffer.max
    return lambda: None


def inputs(p, options, torch):
    """Unit-variance normal Q, K, V in logical [batch, seqlen, heads, head_dim], stored as --layout says."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[options.dtype]
    out = []
    for heads in (p["heads_q"], p["heads_kv"], p["heads_kv"]):
        b, s, h, d = p["batch"], p["seqlen"], heads, p["head_dim"]
        shape = (b, s, h, d) if options.layout == "bshd" else (b, h, s, d)
        x = torch.randn(shape, dtype=torch.float32, device="cuda").to(dtype)
        out.append(x if options.layout == "bshd" else x.transpose(1, 2))
    return out


def oracle(p, q, k, v, torch):
    """f64 attention of some rows (the first, the last and random ones) of three (batch, head) pairs."""
    s = p["seqlen"]
    edge = torch.arange(min(s, 96), device="cuda")
    rows = torch.unique(torch.cat([edge, s - 1 - edge, torch.randint(s, (128,), device="cuda")]))
    last_b, last_h = p["batch"] - 1, p["heads_q"] - 1
    out = []
    for b, h in sorted({(0, 0), (last_b, last_h), (last_b // 2, last_h // 3)}):
        kv = h // (p["heads_q"] // p["heads_kv"])
        scores = q[b, rows, h].double() @ k[b, :, kv].double().T / math.sqrt(p["head_dim"])
        if p["causal"]:
            scores.masked_fill_(torch.arange(s, device="cuda")[None, :] > rows[:, None], float("-inf"))
        out.append((b, h, rows, torch.softmax(scores, -1) @ v[b, :, kv].double(), torch.logsumexp(scores, -1)))
    return out


def worst_row(a, b, torch):
    """The largest relative distance of two rows."""
    a, b = a.float(), b.float()
    distance = torch.linalg.vector_norm(a - b, dim=-1) / torch.linalg.vector_norm(b, dim=-1).clamp_min(1e-30)
    return float("nan") if bool(torch.isnan(distance).any()) else float(distance.max())


def check(contestant, o, reference, agreed, bounds, torch):
    """Errors of one output. `agreed` is an output that passed before, or None. Returns (numbers, complaint or None)."""
    numbers = {"unwritten": int(torch.isnan(o).sum())}
    slices, rows, lses = [], [], []
    for b, h, at, expected, lse in reference:
        got = o[b, at, h].double()
        slices.append(float((got - expected).norm() / expected.norm()))
        rows.append(worst_row(got, expected, torch))
        if contestant.lse is not None:
            lses.append(float((contestant.lse[b, h, at].double() - lse).abs().max()))
    # max() of a list with a NaN depends on the order; a NaN must win.
    worst = lambda values: next((x for x in values if math.isnan(x)), max(values))
    numbers["slice"], numbers["row"] = worst(slices), worst(rows)
    if lses:
        numbers["lse"] = worst(lses)
        numbers["unwritten"] += int(torch.isnan(contestant.lse).sum())
    if agreed is not None:
        # One batch at a time: f32 copies of everything would need four times the memory.
        numbers["cross"] = worst([worst_row(o[b], agreed[b], torch) for b in range(o.size(0))])
    wrong = [f"{key} {numbers[key]:.3g} > {bound:g}" for key, bound in bounds.items() if key in numbers and not numbers[key] <= bound]
    if numbers["unwritten"]:
        wrong.append(f"{numbers['unwritten']} elements are NaN")
    # JSON has no NaN.
    return {key: x if math.isfinite(x) else str(x) for key, x in numbers.items()}, "; ".join(wrong) or None


def time_point(runners, evict, iters, card, torch):
    """`iters` timings of each runner, in turn, the order rotating. Returns samples, host times and the card's states while busy."""
    samples = {x.name: [] for x in runners}
    host = {x.name: [] for x in runners}
    busy = []
    for i in range(WARM_UPS + iters):
        pending = []
        for x in runners[i % len(runners):] + runners[: i % len(runners)]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with x.context():
                evict()
                start.record()
                before = time.perf_counter()
                x.call()
                after = time.perf_counter()
                end.record()
            pending.append((x.name, start, end, (after - before) * 1e6))
        if card is not None:
            busy.append(card.busy())
        torch.cuda.synchronize()
        if i >= WARM_UPS:
            for name, start, end, host_us in pending:
                samples[name].append(start.elapsed_time(end))
                host[name].append(host_us)
    return samples, host, busy


def run_point(p, found, options, evict, card, torch):
    """Checks and times every contestant at one point."""
    q, k, v = inputs(p, options, torch)
    reference = oracle(p, q, k, v, torch)
    flops = stats.forward_flops(p)
    runs, runners, agreed, checked = [], [], None, {}
    for x in found:
        run = {"name": x.name, "role": x.role, "status": "ok"}
        runs.append(run)
        try:
            x.prepare(p, q, k, v, options.dtype)
            with x.context():
                o = x.call()
            torch.cuda.synchronize()
        except Exception as error:  # a library that fails is named in the table, and the others go on
            run["status"] = "unsupported" if entry.STATUS[2] in str(error) else "failed"
            run["error"] = f"{type(error).__name__}: {error}"
            try:
                torch.cuda.synchronize()
            except Exception as after:  # nothing that follows in this process could be believed
                raise RuntimeError(f"{x.name} lost the CUDA context ({error})") from after
            continue
        run["check"], complaint = check(x, o, reference, agreed, BOUNDS[options.dtype], torch)
        if complaint:
            run["status"], run["error"] = "wrong", complaint
            if not options.time_wrong:
                continue
        elif agreed is None:
            agreed = o
        if x.poisoned:
            checked[x.name] = o.clone()
        runners.append(x)
    before = card.state() if card else None
    samples, host, busy = time_point(runners, evict, options.iters, card, torch) if runners else ({}, {}, [])
    after = card.state() if card else None
    for run in runs:
        if run["name"] in samples:
            run.update(stats.summarise(samples[run["name"]], flops))
            run["host_us"] = stats.quantile(host[run["name"]], 0.5)
    for x in runners:
        if x.poisoned:
            run = next(r for r in runs if r["name"] == x.name)
            run["repeatable"] = bool(torch.equal(x.o, checked[x.name]))
    return {
        "point": p,
        "flops": flops,
        "runs": runs,
        "busy": busy,
        "state_before": before,
        "state_after": after,
    }


def ceilings(torch):
    """What the card reaches: a bf16 8192^3 product (TFLOP/s) and a copy of 1 GiB (TB/s, read plus written)."""
    def timed(call):
        ms = []
        for i in range(WARM_UPS + 10):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if i >= WARM_UPS:
                ms.append(start.elapsed_time(end))
        return stats.quantile(ms, 0.5)

    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    gemm = 2 * 8192**3 / timed(lambda: torch.matmul(a, b, out=c)) * 1e-9
    source = torch.randint(1 << 30, (1 << 28,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * (1 << 30) / timed(lambda: target.copy_(source)) * 1e-9
    return {"gemm_bf16_8192_tflops": gemm, "copy_tb_per_s": copy}


def describe(options, torch):
    """What has to be known to read the numbers later."""
    properties = torch.cuda.get_device_properties(0)
    notes = []
    try:
        card = cards.Card("GPU-" + str(properties.uuid).removeprefix("GPU-"))
        driver = card.driver()
    except (OSError, RuntimeError, AttributeError) as error:
        card, driver = None, None
        notes.append(f"NVML is not to be had ({error}): no clocks, power or throttle reasons")
    return card, {
        "schema": "hattn-sweep/1",
        "commit": options.commit,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver": driver,
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()},
        "method": f"in turn, iteration by iteration, one process, order rotating; CUDA events, median of {options.iters}; L2: {options.evict}"
        f" {EVICT_BYTES >> 20} MiB before each; a wait after each round; unit-variance normal inputs; forward FLOPs 4*s*s*d*h*b, halved when causal",
        "options": {key: value for key, value in vars(options).items() if key not in ("ours", "peer", "json")},
        "notes": notes,
    }


def save(report, path):
    """Writes beside and renames, so that a session cut off leaves the last whole file."""
    if path:
        with open(path + ".part", "w") as file:
            json.dump(report, file, indent=1)
        os.replace(path + ".part", path)


def show(report, names, ours):
    print(stats.table(report["points"], names, ours))
    for key, what in (("best_peer", "ours / best peer"), ("fa2", "ours / fa2")):
        s = report["summary"][key]
        if s["points"]:
            print(f"{what}: min {s['min']:.3f}, geometric mean {s['geomean']:.3f}, over {s['points']} of {s['of']} points")
        else:
            print(f"{what}: no point has both")
    if "ceilings" in report:
        print("ceilings: {gemm_bf16_8192_tflops:.0f} TFLOP/s (bf16 8192^3), {copy_tb_per_s:.2f} TB/s (copy of 1 GiB, read + written)".format(**report["ceilings"]))
    busy = [x for r in report["points"] for x in r["busy"]]
    if busy:
        clocks = [x["sm_mhz"] for x in busy]
        reasons = sorted({x["reasons"] for x in busy})
        print(f"while busy: SM clock {min(clocks)}..{max(clocks)} MHz, median {stats.quantile(clocks, 0.5):.0f}; reasons seen: {', '.join(reasons)}")
    for key in ("state_before", "state_after"):
        print(f"{key}: {report[key]}")
    seen, slow = set(), {}
    for result in report["points"]:
        for run in result["runs"]:
            where = "hd{head_dim} s{seqlen} {mask}".format(mask="causal" if result["point"]["causal"] else "full", **result["point"])
            if run["status"] != "ok" and (run["name"], run["error"]) not in seen:
                seen.add((run["name"], run["error"]))
                print(f"NOT TIMED OR WRONG: {run['name']} ({run['status']}, first at {where}): {run['error'][:300]}")
            if run.get("repeatable") is False:
                print(f"NOT REPEATABLE: {run['name']} at {where}: the output changed between runs on the same inputs")
            slow[run["name"]] = max(slow.get(run["name"], 0), run.get("host_us", 0))
    for name, host_us in slow.items():
        # The flush takes about 95 us; an enqueue near that leaves the GPU waiting inside the timed region.
        if host_us > 60:
            print(f"HOST-BOUND? {name}: a call took up to {host_us:.0f} us on the host (median of a point)")
    for x in report["missing"]:
        print(f"MISSING: {x['name']} ({x['role']}): {x['error']}")
    for note in report["notes"]:
        print(f"note: {note}")


def main(argv=None):
    options = arguments(argv)
    try:
        import torch
        import torch.nn.attention
    except ImportError as error:
        raise SystemExit(f"this sweep needs PyTorch: {error}")
    if not torch.cuda.is_available():
        raise SystemExit("this sweep needs a CUDA device")
    torch.set_grad_enabled(False)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    card, report = describe(options, torch)
    lost = None
    with torch.cuda.stream(torch.cuda.Stream()):
        found, report["missing"] = load(options, torch)
        names = [x.name for x in found]
        report["libraries"] = [{"name": x.name, "role": x.role, **x.origin()} for x in found]
        ours = next((x.name for x in found if x.role == "ours"), None)
        if ours is None:
            report["notes"].append("no library of ours was loaded: no ratios")
        report["points"] = []
        report["ceilings"] = ceilings(torch)  # first: it also brings the clocks up
        report["state_before"] = card.state() if card else None
        evict = evicter(options.evict, torch)
        for head_dim in options.dims:
            for causal in {"both": [False, True], "yes": [True], "no": [False]}[options.causal]:
                for seqlen in options.seqlens:
                    p = stats.point(seqlen, head_dim, causal, options.heads_kv, options.tokens)
                    try:
                        report["points"].append(run_point(p, found, options, evict, card, torch))
                    except Exception as error:
                        lost = f"at {p}: {type(error).__name__}: {error}"
                        break
                    report["summary"] = stats.summary(report["points"], ours)
                    save(report, options.json)
                if lost:
                    break
            if lost:
                break
        report["state_after"] = card.state() if card else None
    if lost:
        report["notes"].append(f"THE SWEEP STOPPED {lost}")
    report["summary"] = stats.summary(report["points"], ours)
    save(report, options.json)
    show(report, names, ours)
    wrong = any(run["status"] == "wrong" or run.get("repeatable") is False for r in report["points"] for run in r["runs"])
    failed = any(run["role"] == "ours" and run["status"] != "ok" for r in report["points"] for run in r["runs"])
    return 1 if lost or wrong or failed or any(x["role"] == "ours" for x in report["missing"]) else 0


if __name__ == "__main__":
    sys.exit(main())
