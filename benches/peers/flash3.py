"""FlashAttention-3 in the wheel of xformers, which has it compiled: operators of PyTorch, called here without xformers' own code."""

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import sys

import additive
import backward
import entry
import sdpa

# Of the wheel. With PyTorch's stable ABI, so it loads into later versions of PyTorch, too.
OPERATORS = os.path.join("flash_attn_3", "_C.so")
RUNTIME = os.path.join("nvidia", "cuda_runtime", "lib", "libcudart.so.12")


def load(torch):
    """The operators `fwd` and `bwd`. Raises an ImportError where there is no such wheel, and an OSError where it does not load."""
    spec = importlib.util.find_spec("xformers")
    files = [os.path.join(folder, OPERATORS) for folder in (spec.submodule_search_locations or [])] if spec else []
    found = next(filter(os.path.exists, files), None)
    if found is None:
        raise ImportError("neither flash_attn_interface nor an xformers that has flash_attn_3 (0.0.34) is here")
    # The wheel is for CUDA 12. A PyTorch for CUDA 13 brings no runtime of that name.
    runtime = next(filter(os.path.exists, (os.path.join(folder, RUNTIME) for folder in sys.path)), None)
    if runtime is not None:
        ctypes.CDLL(runtime, ctypes.RTLD_GLOBAL)
    torch.ops.load_library(found)
    return torch.ops.flash_attn_3


def keywords(p, torch):
    """What a point asks for beside tensors, in the words of both operators. Raises a RuntimeError for what neither has."""
    additive.refuse("fa3", p)
    sdpa.refuse_options("flash_attn_3", p, ("alibi", "blocks", "dropout"))
    said = {"is_causal": p["causal"], "softcap": float(p.get("softcap", 0.0))}
    said.update(entry.keywords_of_scale(p, "softmax_scale"))
    if p.get("window") is not None:
        said.update(is_causal=False, window_size_left=p["window"], window_size_right=0)
    if entry.lengths(p) is not None:
        offsets, longest = entry.offsets(p, torch), max(entry.lengths(p))
        said.update(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest)
    return said


def rows(p, *tensors):
    """Tensors as the operators want them: without a batch where sequences are packed."""
    return [x.squeeze(0) for x in tensors] if entry.lengths(p) is not None else list(tensors)


class Flash3:
    """Its forward. It writes O into a tensor that was poisoned with NaN."""

    name, role = "fa3", "peer"

    def __init__(self, torch):
        self.torch, self.operators = torch, load(torch)

    def origin(self):
        return {"file": "xformers' flash_attn_3", "version": importlib.metadata.version("xformers")}

    def prepare(self, p, q, k, v, bias=None):
        sdpa.refuse_dims(self.name, p)
        self.keywords = keywords(p, self.torch)
        self.o = entry.like_output(p, q, self.torch).fill_(float("nan"))
        *self.qkv, self.keywords["out"] = rows(p, q, k, v, self.o)
        self.packed, self.lse = entry.lengths(p) is not None, None

    def context(self):
        return contextlib.nullcontext()

    def call(self):
        # 0: it chooses itself whether to share out the keys, as its decoding does.
        lse = self.operators.fwd(*self.qkv, num_splits=0, **self.keywords)[1]
        self.lse = lse.unsqueeze(0) if self.packed else lse
        return self.o

    def backward(self):
        return Flash3Backward(self)


class Flash3Backward:
    """Its backward, of the O and the LSE that the sweep gives, into gradients that were poisoned with NaN."""

    def __init__(self, inner):
        self.name, self.role, self.torch, self.operators = inner.name, inner.role, inner.torch, inner.operators

    def prepare(self, p, given):
        self.gradients = backward.poisoned(given, self.torch)
        sdpa.refuse_dims(self.name, p)
        self.keywords = keywords(p, self.torch)
        lse = given["lse"].squeeze(0) if entry.lengths(p) is not None else given["lse"]
        self.given = (*rows(p, *(given[name] for name in ("d_o", "q", "k", "v", "o"))), lse)
        self.keywords.update(zip(("dq", "dk", "dv"), rows(p, *self.gradients)))

    def context(self):
        return contextlib.nullcontext()

    def call(self):
        self.operators.bwd(*self.given, **self.keywords)
        return self.gradients
