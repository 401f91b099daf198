"""What a call costs the host: microseconds of Python, torch and the library, until the work is enqueued.

    HOPPER_ATTENTION_LIBRARY=.../libhopper_attention.so python host_cost.py [--device cuda:0] [--limit 1.2]

It times attention() of this package, and beside it torch's own scaled_dot_product_attention with each of its backends:
the forward pass, the forward pass that autograd records, and both passes. Tensors have the same shapes and types.

The calls take turns: a batch of each, round after round, in the other order every second round. So what slows the
machine for a while slows all of them. The ratio is that of the medians of a call and of SDPA's default backend over
the same rounds.

On a GPU only the enqueueing is timed. A batch of calls is so small that the GPU's queue never fills, and the GPU is
idle before the next batch. On the CPU a call includes the computation.

With --limit the exit status is 1 if the ratio of attention() is above it. With --ordinary attention() goes through the
package's own operators, as where torch's cannot serve.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import hopper_attention
from hopper_attention import _torch, abi
from hopper_attention._calls import Call

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
SDPA = torch.nn.functional.scaled_dot_product_attention
PASSES = ("forward", "forward, recorded", "forward and backward")
OURS, DEFAULT = "attention()", "SDPA, default"


class Ctypes(torch.autograd.Function):
    """What serves where the compiled operators cannot."""

    @staticmethod
    def forward(ctx, q, k, v, numbers):
        o, lse = _torch._forward_lse(q, k, v, *numbers)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.numbers = numbers
        return o

    @staticmethod
    def backward(ctx, d_o):
        q, k, v, o, lse = ctx.saved_tensors
        return *_torch._backward(d_o, None, q, k, v, o, lse, *ctx.numbers, False), None


def in_turn(calls, sync, count, rounds):
    """Times batches of `count` calls. Gives the microseconds a call of every round, by name.

    `calls` has a call and the backend that torch is held to, or None, by name.
    """
    times = {who: [] for who in calls}
    gc.collect()
    gc.disable()
    for turn in range(rounds + 3):
        for who in sorted(calls, reverse=turn % 2 == 1):
            call, backend = calls[who]
            with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
                sync()
                begin = time.perf_counter()
                for _ in range(count):
                    call()
                times[who].append((time.perf_counter() - begin) / count * 1e6)
    gc.enable()
    # The first rounds load and allocate.
    return {who: of_one[3:] for who, of_one in times.items()}


def refusal(call, backend):
    """What torch says where it refuses a backend, else None."""
    try:
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            call()
    except RuntimeError as error:
        return str(error).split("\n", 1)[0]
    return None


def library_alone(q, k, v, numbers):
    """A run through a struct that is filled in already: what the library takes of a call, and some ctypes."""
    o = torch.empty_like(q)
    tensors = dict(zip(("q", "k", "v", "o"), map(_torch.described, (q, k, v, o))))
    call = Call(abi.ForwardArgs, _torch.problem_of(q, k, v, *numbers), _torch.ordinal(q.device), tensors)
    addresses = [t.data_ptr() for t in (q, k, v, o)]
    workspace = torch.empty(max(call.workspace_bytes, 1), dtype=torch.uint8, device=q.device)
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else None
    # `o` is held, so that its memory is.
    return lambda o=o: call.run(addresses, workspace.data_ptr(), stream)


def below_autograd(operator, *arguments):
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def calls_of(device, dtype, shape, causal):
    """{pass: {who: (a call, the backend that torch is held to or None)}}"""
    batch, heads, seqlen, head_dim = shape
    gpu = device.type == "cuda"
    plain = [torch.randn(batch, seqlen, heads, head_dim, dtype=dtype, device=device) for _ in range(3)]
    grown = [t.clone().requires_grad_() for t in plain]
    d_o = torch.randn_like(plain[0])
    # torch's layout, in memory of its own: neither side pays for a transposition.
    theirs = [t.transpose(1, 2).contiguous() for t in plain]
    theirs_grown = [t.clone().requires_grad_() for t in theirs]
    theirs_d_o = d_o.transpose(1, 2).contiguous()
    numbers = (0.0, int(causal), 0, 0, 0)
    operators = torch.ops.hopper_attention
    grad = torch.autograd.grad

    forward, recorded, both = {}, {}, {}
    forward[OURS] = lambda: hopper_attention.attention(*plain, causal=causal)
    recorded[OURS] = lambda: hopper_attention.attention(*grown, causal=causal)
    both[OURS] = lambda: grad(hopper_attention.attention(*grown, causal=causal), grown, d_o)
    recorded["attention(), with LSE"] = lambda: hopper_attention.attention(*grown, causal=causal, return_lse=True)
    both["attention(), with LSE"] = lambda: grad(
        hopper_attention.attention(*grown, causal=causal, return_lse=True)[0], grown, d_o
    )
    forward["its own operator"] = lambda: below_autograd(operators.forward.default, *plain, *numbers)
    if gpu and _torch._direct is not None:
        direct = _torch._direct
        forward["torch's operator"] = lambda: direct(*plain, 0.0, causal)
        recorded["torch's operator"] = lambda: direct(*grown, 0.0, causal)
        both["torch's operator"] = lambda: grad(direct(*grown, 0.0, causal)[0], grown, d_o)
    forward["its library alone"] = library_alone(*plain, numbers)
    forward["torch.empty"] = lambda: torch.empty(plain[0].shape, dtype=dtype, device=device)
    # What autograd itself takes, with a gradient of two small kernels.
    recorded["q * k"] = lambda: grown[0] * grown[1]
    both["q * k"] = lambda: grad(grown[0] * grown[1], grown[:2], d_o)
    forward["its ctypes fallback"] = lambda: _torch._forward(*plain, *numbers)
    recorded["its ctypes fallback"] = lambda: Ctypes.apply(*grown, numbers)
    both["its ctypes fallback"] = lambda: grad(Ctypes.apply(*grown, numbers), grown, d_o)
    calls = {
        what: {who: (call, None) for who, call in of_pass.items()}
        for what, of_pass in zip(PASSES, (forward, recorded, both))
    }
    for name, backend in {"default": None, **BACKENDS}.items():
        who = f"SDPA, {name}"
        if not gpu and backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            continue
        calls[PASSES[0]][who] = (lambda: SDPA(*theirs, is_causal=causal), backend)
        calls[PASSES[1]][who] = (lambda: SDPA(*theirs_grown, is_causal=causal), backend)
        calls[PASSES[2]][who] = (
            lambda: grad(SDPA(*theirs_grown, is_causal=causal), theirs_grown, theirs_d_o),
            backend,
        )
    return calls


def main():
    parser = argparse.ArgumentParser(description="Times what a call of attention costs the host.")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default=None, help="batch,heads,seqlen,head_dim (1,8,128,64; on the CPU 1,1,16,64)")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--calls", type=int, default=50, help="calls in a batch (50)")
    parser.add_argument("--batches", type=int, default=60, help="rounds of a batch of each call (60)")
    parser.add_argument("--limit", type=float, help="the most that attention() may take, as a multiple of SDPA")
    parser.add_argument("--ordinary", action="store_true", help="attention() goes through the package's own operators")
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    if options.ordinary:
        _torch._direct, _torch.no_direct = None, "the package's own operators"

    device = torch.device(options.device)
    gpu = device.type == "cuda"
    shape = tuple(map(int, (options.shape or ("1,8,128,64" if gpu else "1,1,16,64")).split(",")))
    dtype = torch.bfloat16 if gpu else torch.float32
    name = torch.cuda.get_device_name(device) if gpu else "CPU"
    sync = (lambda: torch.cuda.synchronize(device)) if gpu else (lambda: None)
    torch.manual_seed(0)
    implementation = "compiled operator" if _torch.fallback is None else f"ctypes ({_torch.fallback})"
    direct = "through torch's operator" if gpu and not _torch.no_direct else _torch.no_direct or "not on the CPU"
    print(f"{name}; torch {torch.__version__}; {implementation}; eager calls: {direct}")
    print(f"batch, heads, seqlen, head_dim: {shape}; {dtype}{'; causal' if options.causal else ''}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"microseconds a call: least (median) of {options.batches} batches of {options.calls} calls")

    failed = False
    figures = []
    for what, calls in calls_of(device, dtype, shape, options.causal).items():
        print(f"\n{what}")
        refused = {who: why for who, call in calls.items() if (why := refusal(*call))}
        taken = {who: call for who, call in calls.items() if who not in refused}
        times = in_turn(taken, sync, options.calls, options.batches)
        default = times[DEFAULT]
        for who in calls:
            if who in refused:
                print(f"  {who:22s} skipped: {refused[who]}")
                continue
            least, median = min(times[who]), statistics.median(times[who])
            ratio = median / statistics.median(default)
            paired = statistics.median(one / other for one, other in zip(times[who], default))
            print(f"  {who:22s} {least:8.1f} ({median:.1f})   {ratio:5.2f} x SDPA")
            figures.append(
                {
                    "pass": what,
                    "call": who,
                    "least_us": least,
                    "median_us": median,
                    "of_default_sdpa": ratio,
                    "median_of_ratios": paired,
                    "ratio_of_leasts": least / min(default),
                }
            )
            if options.limit and who == OURS and ratio > options.limit:
                failed = True
    if options.json:
        facts = {
            "device": name,
            "torch": torch.__version__,
            "implementation": implementation,
            "eager_calls": direct,
            "shape": shape,
            "dtype": str(dtype),
            "causal": options.causal,
            "calls": options.calls,
            "batches": options.batches,
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({**facts, "figures": figures}, file, indent=1)
    if failed:
        print(f"\nattention() takes more than {options.limit} times SDPA's default")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
