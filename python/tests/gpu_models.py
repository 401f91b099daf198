#!/usr/bin/env python3
"""Compares whole models on a GPU: random models of transformers, on this library and on what transformers has.

    HOPPER_ATTENTION_LIBRARY=FILE python3 python/tests/gpu_models.py --json FILE [--text FILE]

Two parts:

1. Errors. A small model in bf16 is compared with the same weights in f32 and eager attention: logits and all
   gradients, for eager, SDPA and hopper_attention. The error of hopper_attention may be 1.2 times the larger one of
   the two. SDPA has neither the sinks of gpt-oss nor the softcap of Gemma 2: there it is the error of eager attention
   that counts. Models with head dims above 128 have no gradients on a GPU. They have on the CPU.
2. Speed. Training steps a second (forward, backward, AdamW) of a larger model in bf16, with hopper_attention, and with
   SDPA on its cuDNN backend and on its FlashAttention-2 backend. The three take turns; the figure is the median of the
   turns.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]

import hopper_attention
import models
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

VISION = ("vit", "siglip")
# kind -> heads_kv of 4 heads, the window or chunk
KINDS = {
    "llama": (2, None),
    "mistral": (2, 50),
    "bert": (4, None),
    "vit": (4, None),
    "gemma2": (2, 50),
    "gemma3": (2, 50),
    "phi3": (2, 50),
    "deepseek_v3": (4, None),
    "siglip": (4, None),
    "gpt_oss": (2, 128),
    "llama4": (2, 50),
}
# Masks of two dimensions, by the side of the padding, and of four.
PADDED = (None, "right", "left")
FOUR = ("4-d booleans", "4-d floats")
# Each has a bias beside other things: grouped heads, all heads of their own, head dim 256 with a softcap, and sinks.
WITH_FOUR = ("llama", "bert", "gemma2", "gpt_oss")
# Their head dims are above 128.
WIDE = ("gemma2", "gemma3", "deepseek_v3")
# What SDPA leaves out.
NOT_SDPA = ("gemma2", "gpt_oss")
NAMES = ("eager", "sdpa", "hopper_attention")
# kind -> hidden, heads, heads_kv, layers, batch, seqlen (of vit: the image's side; patches of 16), window
SPEED = {
    "llama": (2048, 16, 4, 8, 4, 2048, None),
    "mistral": (2048, 16, 4, 8, 2, 4096, 1024),
    "bert": (1024, 16, 16, 12, 16, 512, None),
    "vit": (768, 12, 12, 12, 64, 224, None),
}
SPEED_SMALL = {kind: (128, 2, 2, 1, 2, 64, 16) for kind in SPEED}
BACKENDS = {"sdpa cuDNN": SDPBackend.CUDNN_ATTENTION, "sdpa FlashAttention-2": SDPBackend.FLASH_ATTENTION}
# The errors of two right computations in bf16 differ by some percent.
ALLOWED = 1.2


def rmse(got, want):
    """The root-mean-square error of tensors, relative to the exact ones."""
    off = sum((a.double() - b.double()).square().sum().item() for a, b in zip(got, want))
    return (off / sum(b.double().square().sum().item() for b in want)) ** 0.5


def run(model, inputs, keep, with_gradients):
    """Logits where nothing is padding, and the gradients of a loss of these."""
    with torch.set_grad_enabled(with_gradients):
        logits = model(**inputs).logits.float()
    logits = logits if keep is None else logits[keep.bool()]
    if not with_gradients:
        return {"logits": [logits]}
    target = torch.linspace(-1, 1, logits.numel(), device=logits.device).view(logits.shape)
    gradients = torch.autograd.grad((logits - target).square().mean(), list(model.parameters()), allow_unused=True)
    return {"logits": [logits.detach()], "gradients": [g for g in gradients if g is not None]}


def of_eager(mask, dtype):
    """A 4-d mask as eager attention takes it: it adds whatever it is given."""
    floats = mask if mask.is_floating_point() else torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
    return floats.to(dtype)


def masks_of(kind):
    if kind in VISION:
        return (None,)
    return PADDED + (FOUR if kind in WITH_FOUR else ())


def errors(device, dtype, kinds):
    """Part 1: a record for each model and mask."""
    for kind in kinds:
        heads_kv, window = KINDS[kind]
        # Llama 4 has pairs of layers.
        layers = 2 if kind == "llama4" else 3
        # Gemma 2 itself has 50, which does not bend the scores of random weights: nobody would notice that it is missing.
        softcap = 10.0 if kind == "gemma2" else None
        settings = models.config(kind, 256, 4, heads_kv, layers, window=window, softcap=softcap)
        with_gradients = device.type == "cpu" or kind not in WIDE
        names = tuple(name for name in NAMES if name != "sdpa" or kind not in NOT_SDPA)
        for mask in masks_of(kind):
            exact_model = models.model(kind, settings).to(device)
            exact_model.set_attn_implementation("eager")
            inputs = models.inputs(kind, settings, 4, 200, device)
            keep = four = None
            if mask in FOUR:
                four = models.four_dimensions(4, 4, 200, mask == FOUR[1], device)
                inputs["attention_mask"] = of_eager(four, torch.float32)
            elif mask is not None:
                keep = inputs["attention_mask"] = models.padding(4, 200, mask, device)
            exact = run(exact_model, inputs, keep, with_gradients)
            model = models.model(kind, settings).to(device, dtype)
            inputs = {name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}
            found = {}
            for name in names:
                model.set_attn_implementation(name)
                if four is not None:
                    # SDPA takes floats of the type of its operands.
                    inputs["attention_mask"] = of_eager(four, dtype) if name == "eager" or four.is_floating_point() else four
                got = run(model, inputs, keep, with_gradients)
                found[name] = {what: rmse(tensors, exact[what]) for what, tensors in got.items()}
            bounds = {what: ALLOWED * max(found[name][what] for name in names[:-1]) for what in exact}
            wrong = [what for what, bound in bounds.items() if not found["hopper_attention"][what] <= bound]
            yield {"model": kind, "padding": mask, "rmse": found, "wrong": wrong}


def step_of(kind, size, device, dtype, name):
    """A function that makes a training step, with its optimizer. name: the attention implementation."""
    hidden, heads, heads_kv, layers, batch, seqlen, window = size
    patch = 16 if device.type == "cuda" else 8
    settings = models.config(
        kind,
        hidden,
        heads,
        heads_kv,
        layers,
        vocab=8192,
        window=window,
        positions=max(seqlen, 512),
        image=seqlen,
        patch=patch,
    )
    with device:
        # Weights are made where they are used: there are hundreds of millions.
        model = models.model(kind, settings).to(dtype).train()
    model.set_attn_implementation("hopper_attention" if name == "hopper_attention" else "sdpa")
    inputs = models.inputs(kind, settings, batch, seqlen, device)
    inputs = {key: t.to(dtype) if t.is_floating_point() else t for key, t in inputs.items()}
    if kind != "vit":
        inputs["labels"] = inputs["input_ids"]
    if kind in ("llama", "mistral"):
        inputs["use_cache"] = False
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=device.type == "cuda")

    def step():
        out = model(**inputs)
        loss = out.loss if kind != "vit" else out.logits.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def speed(device, dtype, sizes, turns, steps):
    """Part 2: a record for each model."""
    for kind, size in sizes.items():
        ways, refused = {}, {}
        for name in ("hopper_attention", *(BACKENDS if device.type == "cuda" else ("sdpa",))):
            step = step_of(kind, size, device, dtype, name)
            try:
                with context(name):
                    for _ in range(3):
                        step()
                wait(device)
                ways[name] = (step, [])
            except (RuntimeError, NotImplementedError) as error:
                # Such as: torch's backends take no mask, which a window is for SDPA.
                refused[name] = str(error).splitlines()[0]
        for _ in range(turns):
            for name, (step, seconds) in ways.items():
                wait(device)
                with context(name):
                    start = time.perf_counter()
                    for _ in range(steps):
                        step()
                    wait(device)
                seconds.append((time.perf_counter() - start) / steps)
        fields = dict(zip(("hidden", "heads", "heads_kv", "layers", "batch", "seqlen", "window"), size))
        if kind == "vit":
            fields["tokens"] = (size[5] // 16) ** 2 + 1
        rates = {name: 1 / statistics.median(seconds) for name, (_, seconds) in ways.items()}
        yield {"model": kind, **fields, "steps_a_second": rates, "refused": refused}
        del ways


def column(rmse_of, what):
    return f"{rmse_of[what]:11.3e}" if what in rmse_of else f"{'-':>11}"


def context(name):
    return sdpa_kernel(BACKENDS[name]) if name in BACKENDS else torch.enable_grad()


def about(device, dtype):
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": str(device),
        "dtype": str(dtype),
        "hopper_attention": hopper_attention.version(),
        "operators": hopper_attention.torch_operators(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if device.type == "cuda":
        record |= {
            "card": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            record["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            record["driver"] = "unknown"
    return record


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", metavar="FILE", help="where to write the figures")
    parser.add_argument("--text", metavar="FILE", help="where to write what is printed")
    parser.add_argument("--part", choices=("errors", "speed"), help="one part alone")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="these models alone, of the part errors")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: no GPU; --device cpu tries the program on a small size")
        return 1
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16
    hopper_attention.register_transformers()
    torch.backends.cuda.matmul.allow_tf32 = False
    lines, failed = [], 0

    def say(line):
        print(line, flush=True)
        lines.append(line)

    record = about(device, dtype) | {"errors": [], "speed": []}
    say(", ".join(f"{name} {value}" for name, value in record.items() if name not in ("errors", "speed")))
    if options.part != "speed":
        say("")
        say("relative root-mean-square errors against f32 and eager attention (logits / gradients)")
        say(f"{'model':11} {'padding':12} " + " ".join(f"{name:>23}" for name in NAMES))
        for one in errors(device, dtype, options.kinds or KINDS):
            record["errors"].append(one)
            failed += bool(one["wrong"])
            columns = " ".join(column(one["rmse"].get(name, {}), what) for name in NAMES for what in ("logits", "gradients"))
            verdict = "FAILED: " + ", ".join(one["wrong"]) if one["wrong"] else "ok"
            say(f"{one['model']:11} {one['padding'] or 'none':12} {columns}  {verdict}")
    if options.part != "errors":
        say("")
        say("training steps a second")
        for one in speed(device, dtype, SPEED if device.type == "cuda" else SPEED_SMALL, options.turns, options.steps):
            record["speed"].append(one)
            rates = one["steps_a_second"]
            failed += "hopper_attention" not in rates
            what = f"hidden {one['hidden']} heads {one['heads']}/{one['heads_kv']} layers {one['layers']} batch {one['batch']}"
            length = f"{one['tokens']} tokens" if "tokens" in one else f"seqlen {one['seqlen']}"
            say(
                f"{one['model']:8} {what} {length}" + (f" window {one['window']}" if one["model"] == "mistral" else "")
            )
            ours = rates.get("hopper_attention")
            for name, rate in rates.items():
                beside = "" if name == "hopper_attention" or not ours else f"  (ours: {ours / rate:.3f} of it)"
                say(f"    {name:22} {rate:9.3f}{beside}")
            for name, why in one["refused"].items():
                say(f"    {name:22} skipped: {why}")
    say(f"{len(record['errors']) + len(record['speed']) - failed} passed, {failed} failed, 0 skipped")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
    if options.text:
        with open(options.text, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
