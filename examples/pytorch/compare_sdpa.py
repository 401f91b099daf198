#!/usr/bin/env python3
"""Holds attention() and torch's own scaled_dot_product_attention against the same thing computed in f64.

    python3 compare_sdpa.py [--device cpu] [--gradients] [--json FILE]

It needs the package hopper_attention: the wheel, or PYTHONPATH=python with
HOPPER_ATTENTION_LIBRARY=path/of/libhopper_attention.so.

On the GPU if there is one (bf16 and f16), else on the CPU. Each line has the largest absolute error and the relative
root-mean-square error of both. A case fails when our largest error is more than twice that of torch's best backend
plus two ulps of the largest output, or our RMSE more than twice torch's, or when the log-sum-exp is off. With
--gradients, those of q, k and v are held to the same and the rounding of the log-sum-exp, where a case is a plain
call.
"""

import argparse
import collections
import datetime
import json
import math
import subprocess
import sys
import threading

sys.dont_write_bytecode = True

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hopper_attention
from hopper_attention import abi, attention

Case = collections.namedtuple("Case", "dtype head_dim causal heads_kv layout how", defaults=(None, "bshd", "a call"))

ULPS = 2
# The magnitudes that a score sums up are about 10, and so is the log-sum-exp: a dozen of f32's roundings of that.
LSE_TOLERANCE = 2e-5
# The gradients are sums over exp(score - log-sum-exp), both about 10: half an ulp of each in f32, relative to the sum.
GRADIENT_TOLERANCE = 1e-6


def grid(gpu):
    """What is compared.

    `how` is the way in which the result is computed; all of them must give the same bits as a call.
    """
    ways = ["another stream", "a CUDA graph", "two threads"] if gpu else ["two threads"]
    for dtype in (torch.bfloat16, torch.float16) if gpu else (torch.float32, torch.bfloat16, torch.float16):
        for head_dim in (64, 128):
            for causal in (False, True):
                yield Case(dtype, head_dim, causal)
                yield Case(dtype, head_dim, causal, heads_kv=2)
                yield Case(dtype, head_dim, causal, layout="bhsd")
            yield Case(dtype, head_dim, True, heads_kv=1)
            yield Case(dtype, head_dim, True, layout="packed")
            for how in ways:
                yield Case(dtype, head_dim, True, heads_kv=2, how=how)


class Inputs:
    """q, k and v of a case, [batch, seqlen, heads, head_dim] in its layout, and a gradient of the output."""

    def __init__(self, case, device, seed):
        batch, seqlen, heads = (2, 1000, 8) if device.type == "cuda" else (1, 130, 4)
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(case.dtype)

        if case.layout == "packed":
            self.qkv = normal(batch, seqlen, 3, heads, case.head_dim).unbind(2)
        else:
            self.qkv = [
                normal(batch, seqlen, n, case.head_dim)
                for n in (heads, case.heads_kv or heads, case.heads_kv or heads)
            ]
        if case.layout == "bhsd":
            self.qkv = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in self.qkv]
        self.d_o = normal(batch, seqlen, heads, case.head_dim)


def exact(case, qkv):
    """o and lse in f64, one sequence at a time: the scores are large."""
    q, k, v = (t.double().transpose(1, 2) for t in qkv)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for b in range(q.shape[0]):
        scores = q[b] @ k[b].transpose(1, 2) / math.sqrt(case.head_dim)
        if case.causal:
            scores.masked_fill_(
                torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1), -math.inf
            )
        o[b], lse[b] = torch.softmax(scores, -1) @ v[b], torch.logsumexp(scores, -1)
    return o.transpose(1, 2), lse


def errors(got, want):
    """The largest absolute error, and the root-mean-square error relative to the exact result's own."""
    off = got.double() - want
    return {"max_abs": off.abs().max().item(), "rmse": (off.square().mean() / want.square().mean()).sqrt().item()}


def sdpa(case, qkv):
    """The errors' other side: each of torch's fused backends that takes the case, by name."""
    q, k, v = (t.transpose(1, 2) for t in qkv)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    names = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION} if q.is_cuda else {"cpu": None}
    found = {}
    for name, backend in names.items():
        try:
            if backend is None:
                o = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
            else:
                with sdpa_kernel(backend):
                    o = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
        except RuntimeError as error:
            print(f"  {name}: {str(error).splitlines()[0]}")
            continue
        found[name] = o.transpose(1, 2)
    if not found:
        raise RuntimeError("torch has no fused backend to compare with")
    return found


def allowed(case, peers, want, more=0.0):
    """How far off we may be, from the errors of torch's backends; more: relative to the largest output."""
    rounding = ULPS * torch.finfo(case.dtype).eps + more
    return {
        "max_abs": 2 * min(p["max_abs"] for p in peers.values()) + rounding * want.abs().max().item(),
        "rmse": 2 * min(p["rmse"] for p in peers.values()),
    }


def complaints_of(mine, bounds, what=""):
    # The other way round, a NaN would pass.
    return [
        f"{what}{name} {mine[name]:.3g}, allowed {bound:.3g}"
        for name, bound in bounds.items()
        if not mine[name] <= bound
    ]


def gradients(case, inputs):
    """The errors of d_q, d_k and d_v, each with torch's and what is allowed; and what is wrong with them."""
    leaves = [t.detach().requires_grad_() for t in inputs.qkv]
    with torch.enable_grad():
        mine = torch.autograd.grad(attention(*leaves, causal=case.causal), leaves, inputs.d_o)
        # The backends share the graph of what comes before them.
        peers = {
            name: torch.autograd.grad(o, leaves, inputs.d_o, retain_graph=True)
            for name, o in sdpa(case, leaves).items()
        }
        doubles = [t.detach().double().requires_grad_() for t in inputs.qkv]
        want = torch.autograd.grad(exact(case, doubles)[0], doubles, inputs.d_o.double())
    found, complaints = {}, []
    for i, name in enumerate(("d_q", "d_k", "d_v")):
        sides = {
            "ours": errors(mine[i], want[i]),
            "sdpa": {peer: errors(got[i], want[i]) for peer, got in peers.items()},
        }
        found[name] = sides | {"allowed": allowed(case, sides["sdpa"], want[i], GRADIENT_TOLERANCE)}
        complaints += complaints_of(sides["ours"], found[name]["allowed"], f"{name} ")
    return found, complaints


def ours(case, inputs):
    """o and lse as the case wants them computed, and what is wrong with that beside the numbers."""
    q, k, v = inputs.qkv

    def call():
        return attention(q, k, v, causal=case.causal, return_lse=True)

    direct = call()
    if case.how == "a call":
        return direct, []
    results = {"another stream": on_a_stream, "a CUDA graph": in_a_graph, "two threads": on_threads}[case.how](
        case, inputs, call
    )
    same = all(torch.equal(got, want) for result in results for got, want in zip(result, direct))
    return results[0], [] if same else [f"{case.how} gives other bits than a call"]


def on_a_stream(case, inputs, call):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Dropped at once: what takes their memory next must not disturb the call that still runs.
        results = [call() for _ in range(20)][-2:]
    torch.cuda.current_stream().wait_stream(stream)
    return results


def in_a_graph(case, inputs, call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call(), call()]
    kept = [t.clone() for t in inputs.qkv]
    # Replayed on other values, and then on the first ones again: a graph reads what the memory then holds.
    for t in inputs.qkv:
        t.normal_()
    graph.replay()
    torch.cuda.synchronize()
    direct = call()
    changed = all(torch.equal(got, want) for result in results for got, want in zip(result, direct))
    for t, before in zip(inputs.qkv, kept):
        t.copy_(before)
    for result in results:
        for t in result:
            t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    # An empty result equals nothing, which fails the case.
    return (
        [tuple(t.clone() for t in result) for result in results]
        if changed
        else [tuple(torch.empty(0) for _ in r) for r in results]
    )


def on_threads(case, inputs, call):
    """Two threads with one plan, each on a stream of its own where there are streams."""
    gpu = inputs.qkv[0].is_cuda
    results, failures = [None, None], []
    ready = torch.cuda.current_stream().record_event() if gpu else None

    def work(i):
        try:
            if gpu:
                stream = torch.cuda.Stream()
                stream.wait_event(ready)
                with torch.cuda.stream(stream):
                    for _ in range(20):
                        results[i] = call()
                stream.synchronize()
            else:
                for _ in range(20):
                    results[i] = call()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def compare(case, device, seed, with_gradients):
    """One case's record."""
    inputs = Inputs(case, device, seed)
    want_o, want_lse = exact(case, inputs.qkv)
    peers = {name: errors(o, want_o) for name, o in sdpa(case, inputs.qkv).items()}
    (o, lse), complaints = ours(case, inputs)
    mine = errors(o, want_o) if not complaints else {"max_abs": math.nan, "rmse": math.nan}
    mine["lse_max_abs"] = (lse.double() - want_lse).abs().max().item() if not complaints else math.nan
    bounds = allowed(case, peers, want_o) | {"lse_max_abs": LSE_TOLERANCE}
    complaints += complaints_of(mine, bounds)
    found = {}
    if with_gradients and case.how == "a call":
        found["gradients"], wrong = gradients(case, inputs)
        complaints += wrong
    fields = case._asdict() | {"dtype": str(case.dtype).removeprefix("torch."), "heads_kv": inputs.qkv[1].shape[2]}
    fields |= {"shape_q": list(inputs.qkv[0].shape), "stride_q": list(inputs.qkv[0].stride())}
    return fields | {"ours": mine, "sdpa": peers, "allowed": bounds} | found | {"complaints": complaints}


def about(device):
    """Where this runs, and on what."""
    library = abi.load()
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": str(device),
        "hopper_attention": hopper_attention.version(),
        "abi": library.abi_version,
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        record |= {"card": properties.name, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        record["multiprocessors"] = properties.multi_processor_count
        try:
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            record["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            record["driver"] = "unknown"
    return record


def line(record):
    """A case in one line."""

    def figures(e):
        return f"max {e['max_abs']:.2e} rmse {e['rmse']:.2e}"

    mask = "causal" if record["causal"] else "full"
    what = f"{record['dtype']:8} hd {record['head_dim']:3} {mask:6} heads {record['shape_q'][2]}/{record['heads_kv']} {record['layout']:6} {record['how']:14}"
    peers = "  ".join(f"{name} {figures(e)}" for name, e in record["sdpa"].items())
    for name, sides in record.get("gradients", {}).items():
        best = min(e["max_abs"] for e in sides["sdpa"].values())
        peers += f"  {name} {sides['ours']['max_abs']:.1e} (sdpa {best:.1e})"
    verdict = "ok" if not record["complaints"] else "FAILED: " + "; ".join(record["complaints"])
    return f"{what}  ours {figures(record['ours'])} lse {record['ours']['lse_max_abs']:.1e}  {peers}  {verdict}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gradients", action="store_true", help="compare the gradients too")
    parser.add_argument("--json", metavar="FILE", help="where to write the figures")
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        # The reference's products in f64 are exact enough with or without; nothing here is to depend on the default.
        torch.backends.cuda.matmul.allow_tf32 = False
    record = about(device) | {"cases": []}
    print(", ".join(f"{name} {value}" for name, value in record.items() if name != "cases"))
    with torch.no_grad():
        for seed, case in enumerate(grid(device.type == "cuda")):
            record["cases"].append(compare(case, device, seed, options.gradients))
            print(line(record["cases"][-1]), flush=True)
    failed = sum(bool(case["complaints"]) for case in record["cases"])
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            # A line a case: a record is read by people too.
            lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in record.items() if name != "cases"]
            cases = ",\n".join("  " + json.dumps(case) for case in record["cases"])
            file.write("{\n" + ",\n".join(lines) + f',\n "cases": [\n{cases}\n ]\n}}\n')
    print(f"{len(record['cases']) - failed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
