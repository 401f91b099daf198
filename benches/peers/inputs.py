"""What Q, K and V hold at a point: the classes of crates/hopper-attention-verify/src/inputs.rs, whose comments say what each is
for, or the tensors of a file. Scores of the classes are at the default softmax scale, in natural units."""

import math

CLASSES = ("normal", "peaky", "sink", "late", "nan")
# Q and K times this.
PEAKY = 3.0
# How far all queries lie along a common direction, so that a key along it has the same score for all of them on average.
ALONG = 4.0
# The mean score of the first key, and the largest one of a late key.
SINK, LATE = 15.0, 25.0
KEYS_TO_A_LATE_ONE, QUERIES_TO_A_NAN = 64, 128


def of(p):
    """The class of a point."""
    return p.get("inputs", "normal")


def is_normal(p):
    """Whether Q, K and V of a point are normal numbers."""
    return of(p) == "normal" and "file" not in p


def of_file(p, name, layout, torch, device="cuda"):
    """A tensor of the point's file: `q`, `k`, `v` or `d_o`. It is f32, logically [batch, seqlen, heads, head_dim], and stored as the
    layout says. The file's sequences are repeated along the batch. None if the point has no file, or the file no such tensor."""
    tensors = p["file"]["tensors"] if "file" in p else {}
    if name not in tensors:
        return None
    with open(tensors[name]["path"], "rb") as file:
        x = torch.frombuffer(bytearray(file.read()), dtype=torch.float32).reshape(tensors[name]["shape"])
    x = x.to(device)[torch.arange(p["batch"], device=device) % p["file"]["sequences"]]
    return x if layout == "bshd" else x.transpose(1, 2).contiguous().transpose(1, 2)


def words(points):
    """What inputs hold, in the words of a report; benches/src/harness/mod.rs has the same."""
    files = list(dict.fromkeys(p["file"]["name"] for p in points if "file" in p))
    if files:
        return f"inputs of files, repeated along the batch: {', '.join(files)}"
    changed = list(dict.fromkeys(of(p) for p in points if of(p) != "normal"))
    return "unit-variance normal inputs" + (f", or these as {', '.join(changed)}" if changed else "")


def change(p, q, k, torch):
    """Makes the point's class of normal Q and K, in place: f32, logically [batch, seqlen, heads, head_dim]."""
    name = of(p)
    if name == "peaky":
        q *= PEAKY
        k *= PEAKY
    elif name == "nan":
        q[:, ::QUERIES_TO_A_NAN] = float("nan")
    elif name in ("sink", "late"):
        direction = torch.randn(p["head_dim"], dtype=torch.float32, device=q.device)
        direction /= torch.linalg.vector_norm(direction)
        unit = math.sqrt(p["head_dim"]) / ALONG  # a key of this length has a mean score of 1
        q += ALONG * direction
        if name == "sink":
            k[:, 0] = SINK * unit * direction
        else:
            for heads in k:  # of each sequence, [seqlen, heads, head_dim]
                for head in heads.unbind(1):
                    count = max(head.size(0) // KEYS_TO_A_LATE_ONE, 1)
                    keys = torch.randperm(head.size(0), device=q.device)[:count]
                    head[keys] = torch.rand(count, 1, device=q.device) * (LATE * unit) * direction
    elif name != "normal":
        raise RuntimeError(f"inputs {name}; allowed: {', '.join(CLASSES)}")


def nan_rows(p):
    """The queries of each sequence that are NaN, as a slice; None where none is."""
    return slice(None, None, QUERIES_TO_A_NAN) if of(p) == "nan" else None
