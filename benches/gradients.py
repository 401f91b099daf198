#!/usr/bin/env python3
"""Errors of gradients, of ours and of other libraries, each with its own O and LSE.

- A problem has one sequence and as many KV heads as query heads. Q, K and V are of a class of inputs (peers/inputs.py), dO is normal.
- Each gradient is compared with that in f64. The *relative RMSE* is the norm of the error divided by the norm of the gradient. The
  *largest error* is the largest absolute error divided by the gradient's root mean square. Both are means over several draws.
- A line begins with our relative RMSE, the mean of dQ, dK and dV. For each library and gradient it then has our error divided by that
  library's: the relative RMSE, and in parentheses the largest error. Below 1, ours is the smaller.
- The last lines have the largest of these ratios for each class and library.

    HOPPER_ATTENTION_LIBRARY=libhopper_attention.so PYTHONPATH=python python3 benches/gradients.py --classes normal,peaky
"""

import argparse
import collections

import torch

import scores  # finds peers/

import inputs  # noqa: E402

HEADS = 4
GRADIENTS = ("dq", "dk", "dv")
PEERS = ("fa3", "fa4")


def exact(q, k, v, d_o, causal):
    """The gradients in f64."""
    leaves = [x.detach().double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    logits = leaves[0] @ leaves[1].transpose(2, 3) * q.shape[-1] ** -0.5
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[2:], dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    o = logits.softmax(-1) @ leaves[2]
    return [x.transpose(1, 2) for x in torch.autograd.grad(o, leaves, d_o.double().transpose(1, 2))]


def found(library, q, k, v, d_o, causal):
    """The gradients of `ours`, or of a peer."""
    make = scores.ours if library == "ours" else scores.PEERS[library][0]
    run = make(scores.Modifier("plain", causal=causal), q, k, v, d_o)
    return run.gradients(run.call())


def errors(made, wanted):
    """The relative RMSE and the largest error of each gradient."""
    both = []
    for own, other in zip(made, wanted):
        off = own.double() - other
        rms = other.square().mean().sqrt()
        both.append((off.square().mean().sqrt() / rms, off.abs().max() / rms))
    return torch.tensor(both, dtype=torch.float64)


def point(options, name, dtype, dim, causal, keys, worst):
    sums = collections.defaultdict(lambda: torch.zeros(3, 2, dtype=torch.float64))
    refused = {}
    for draw in range(options.draws):
        torch.manual_seed(1000 * draw + keys)
        q, k, v, d_o = (torch.randn(1, keys, HEADS, dim, device="cuda") for _ in range(4))
        inputs.change({"inputs": name, "head_dim": dim}, q, k, torch)
        given = [x.to(dtype) for x in (q, k, v, d_o)]
        wanted = exact(*given, causal)
        for library in ("ours", *options.peers):
            if library in refused:
                continue
            try:
                sums[library] += errors(found(library, *given, causal), wanted) / options.draws
            except Exception as error:  # a peer may fail in any way, and is then named as such
                if library == "ours":
                    raise
                refused[library] = f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"[:160]
    own = sums.pop("ours")
    text = f"{name} {str(dtype).split('.')[-1]} d{dim} {'causal' if causal else 'full'} s{keys}: ours {own[:, 0].mean():.2e}"
    for library, theirs in sums.items():
        if library in refused:
            continue
        ratios = own / theirs
        worst[name, library] = torch.maximum(worst[name, library], ratios.max(0).values)
        text += f"; over {library} " + ", ".join(f"{g} {r:.3f} ({m:.2f})" for g, (r, m) in zip(GRADIENTS, ratios.tolist()))
    for library, why in refused.items():
        text += f"; {library} {why}"
    print(text, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    classes = [name for name in inputs.CLASSES if name != "nan"]
    parser.add_argument("--classes", type=scores.words(classes), default=classes, help="classes of inputs")
    parser.add_argument("--dtypes", type=scores.words(("bfloat16", "float16")), default=["bfloat16", "float16"])
    parser.add_argument("--dims", type=scores.words(), default=[64, 128], help="head dims")
    parser.add_argument("--masks", type=scores.words(("full", "causal")), default=["full", "causal"])
    parser.add_argument("--seqlens", type=scores.words(), default=[512, 2048], help="sequence lengths")
    parser.add_argument("--peers", type=scores.words(PEERS), default=list(PEERS), help="other libraries")
    parser.add_argument("--draws", type=int, default=8, help="draws of the inputs")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {HEADS} heads, {options.draws} draws", flush=True)
    worst = collections.defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    for name in options.classes:
        for keys in options.seqlens:
            for dim in options.dims:
                for dtype in options.dtypes:
                    for mask in options.masks:
                        point(options, name, getattr(torch, dtype), dim, mask == "causal", keys, worst)
    print("\nThe largest ratio of ours to a library's: relative RMSE (largest error)")
    for (name, library), (rmse, most) in worst.items():
        print(f"{name}, {library}: {rmse:.3f} ({most:.2f})")


if __name__ == "__main__":
    main()
