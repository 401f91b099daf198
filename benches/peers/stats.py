"""Numbers of the sweep that need no GPU: FLOPs, order statistics, ratios and the printed table."""

import math

TOKENS = 16384
HIDDEN = 2048


def point(seqlen, head_dim, causal, heads_kv=None, tokens=TOKENS, hidden=HIDDEN):
    """One point of the paper's setting: `tokens` a batch, `hidden` = heads * head_dim."""
    heads_q = hidden // head_dim
    heads_kv = heads_q if heads_kv is None else heads_kv
    if heads_q * head_dim != hidden:
        raise ValueError(f"head_dim {head_dim} does not divide the hidden size {hidden}")
    if heads_kv < 1 or heads_q % heads_kv:
        raise ValueError(f"heads_kv {heads_kv} does not divide heads_q {heads_q}")
    return {
        "batch": max(1, tokens // seqlen),
        "seqlen": seqlen,
        "heads_q": heads_q,
        "heads_kv": heads_kv,
        "head_dim": head_dim,
        "causal": causal,
    }


def forward_flops(p):
    """4*s*s*d*h*b, halved when causal, as the papers count: two products, two operations a multiply-add."""
    flops = 4 * p["seqlen"] ** 2 * p["head_dim"] * p["heads_q"] * p["batch"]
    return flops // 2 if p["causal"] else flops


def forward_bytes(p, element_bytes=2):
    """Q, K, V read once, O written once."""
    rows = p["batch"] * p["seqlen"] * p["head_dim"] * element_bytes
    return 2 * rows * (p["heads_q"] + p["heads_kv"])


def quantile(samples, q):
    """Linear interpolation between order statistics."""
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("no samples")
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summarise(ms, flops):
    """Median, quartiles and the rate at the median of raw samples in milliseconds."""
    median = quantile(ms, 0.5)
    q1, q3 = quantile(ms, 0.25), quantile(ms, 0.75)
    return {
        "ms": ms,
        "median_ms": median,
        "q1_ms": q1,
        "q3_ms": q3,
        "iqr_percent": 100.0 * (q3 - q1) / median,
        "tflops": flops / median * 1e-9,
    }


def geometric_mean(values):
    """exp of the mean logarithm; None of nothing."""
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def rate(result, name):
    """TFLOP/s of `name` at a point, None when it has no timing there (or one that must not count)."""
    run = next((r for r in result["runs"] if r["name"] == name), None)
    return run["tflops"] if run and run["status"] == "ok" else None


def ratios(result, ours):
    """Our rate over the best peer's and over FA2's; None where either side has no timing."""
    own = rate(result, ours)
    peers = [r["tflops"] for r in result["runs"] if r["role"] == "peer" and r["status"] == "ok"]
    fa2 = rate(result, "fa2")
    return {
        "best_peer": own / max(peers) if own and peers else None,
        "fa2": own / fa2 if own and fa2 else None,
    }


def summary(results, ours):
    """Minimum and geometric mean of both ratios over the points that have them, and how many those are."""
    out = {}
    for key in ("best_peer", "fa2"):
        values = [x for x in (ratios(r, ours)[key] for r in results) if x is not None]
        out[key] = {
            "points": len(values),
            "of": len(results),
            "min": min(values) if values else None,
            "geomean": geometric_mean(values),
        }
    return out


def table(results, names, ours):
    """One line a point: TFLOP/s of each, then the two ratios. A run without a timing shows its status."""
    header = ["hd", "mask", "seqlen"] + names + ["ours/best", "ours/fa2", "iqr%"]
    lines = [header]
    for r in results:
        p = r["point"]
        cells = [str(p["head_dim"]), "causal" if p["causal"] else "full", str(p["seqlen"])]
        spreads = []
        for name in names:
            run = next((x for x in r["runs"] if x["name"] == name), None)
            if run is None:
                cells.append("absent")
            elif run.get("tflops") is None:
                cells.append(run["status"])
            else:
                cells.append(f"{run['tflops']:.1f}" + ("" if run["status"] == "ok" else "!" + run["status"]))
                spreads.append(run["iqr_percent"])
        for value in ratios(r, ours).values():
            cells.append("-" if value is None else f"{value:.3f}")
        cells.append(f"{max(spreads):.1f}" if spreads else "-")
        lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)
