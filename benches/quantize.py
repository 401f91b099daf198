#!/usr/bin/env python3
"""How fast the quantiser is, beside a copy within the device that moves as many bytes as it must: two read and one written an element.

    benches/quantize.py [--library libhopper_attention.so] [--seqlen N] [--batch N] [--heads N] [--head-dim N] [--layout bshd|bhsd]

Through the C ABI (python/hopper_attention finds the library) on PyTorch's memory and stream. Medians of --iters calls, with L2
emptied before each (timing.py). The copy takes turns with the quantiser. A factor of a large tensor needs a second
reading, which is not counted as needed: the last column has what share of the copy's rate all that is moved comes to without L2's help
(a factor per head none up to some 38000 rows a head).
"""
import argparse
import ctypes
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../python"))
from hopper_attention import abi as hattn  # noqa: E402
import torch  # noqa: E402

import timing  # noqa: E402


DTYPES = {torch.bfloat16: hattn.BF16, torch.float16: hattn.F16, torch.uint8: hattn.E4M3, torch.float32: hattn.F32}


def described(tensor):
    made = hattn.Tensor(data=tensor.data_ptr(), dtype=DTYPES[tensor.dtype], device=0, ndim=tensor.dim())
    for axis in range(tensor.dim()):
        made.shape[axis], made.stride[axis] = tensor.shape[axis], tensor.stride(axis)
    return made


class Quantiser:
    """One tensor, as keys; ready to be called again and again."""

    def __init__(self, library, values, stored, scaling, hadamard, given):
        batch, seqlen, heads, head_dim = values.shape
        forward = hattn.ForwardProblem(dtype=hattn.E4M3, scaling=scaling, batch=batch, seqlen_q=seqlen, seqlen_kv=seqlen, heads_q=heads,
                                       heads_kv=heads, head_dim_qk=head_dim, head_dim_vo=head_dim)
        problem = hattn.QuantizeProblem(forward=ctypes.pointer(forward), source=DTYPES[values.dtype], hadamard=int(hadamard), seed=7)
        self.library, self.plan, size = library, ctypes.c_void_p(), ctypes.c_size_t()
        self.check(library.hattn_quantize_plan_create(ctypes.byref(problem), 0, ctypes.byref(self.plan)))
        self.check(library.hattn_quantize_plan_workspace_size(self.plan, ctypes.byref(size)))
        blocks = -(-seqlen // 128)
        shape = {hattn.PER_TENSOR: (1, 1, 1), hattn.PER_HEAD: (batch, heads, 1), hattn.PER_BLOCK: (batch, heads, blocks)}[scaling]
        self.descale = torch.full(shape, 0.01, device="cuda")
        self.workspace = torch.empty(size.value, dtype=torch.uint8, device="cuda")
        self.tensors = [described(tensor) for tensor in (values, stored, self.descale)]
        self.one = hattn.QuantizeTensor(**dict(zip(("values", "stored", "descale"), map(ctypes.pointer, self.tensors))), given=int(given))
        self.args = hattn.QuantizeArgs(k=ctypes.pointer(self.one), workspace=self.workspace.data_ptr(), workspace_bytes=size.value)

    def check(self, status):
        if status:
            raise RuntimeError(self.library.hattn_last_error().decode())

    def __call__(self):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.check(self.library.hattn_quantize_run(self.plan, ctypes.byref(self.args), stream))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default=os.environ.get(hattn.VARIABLE, hattn.SONAME))
    for name, value in (("batch", 16), ("seqlen", 8192), ("heads", 16), ("head-dim", 128), ("iters", 15)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--layout", choices=("bshd", "bhsd"), default="bshd")
    args = parser.parse_args()
    library = ctypes.CDLL(args.library)
    library.hattn_last_error.restype = ctypes.c_char_p
    batch, seqlen, heads, head_dim = args.batch, args.seqlen, args.heads, args.head_dim

    def memory(dtype):
        shape = (batch, seqlen, heads, head_dim) if args.layout == "bshd" else (batch, heads, seqlen, head_dim)
        made = torch.randn(shape, device="cuda").to(dtype) if dtype.is_floating_point else torch.empty(shape, dtype=dtype, device="cuda")
        return made if args.layout == "bshd" else made.transpose(1, 2)

    values, stored = memory(torch.bfloat16), memory(torch.uint8)
    needed = 3 * values.numel()
    source = torch.empty(needed // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    calls = {"copy": (lambda: target.copy_(source), needed)}
    for scaling, name, read in ((hattn.PER_BLOCK, "per-block", 2), (hattn.PER_HEAD, "per-head", 2), (hattn.PER_TENSOR, "per-tensor", 4)):
        for hadamard in (False, True):
            moved = (read + 1) * values.numel()
            calls[name + " hadamard" * hadamard] = (Quantiser(library, values, stored, scaling, hadamard, False), moved)
    calls["per-block given"] = (Quantiser(library, values, stored, hattn.PER_BLOCK, False, True), needed)
    medians = timing.times([call for call, _ in calls.values()], args.iters, timing.flush_memory())
    copy = medians[0]
    print(f"{torch.cuda.get_device_name()}: bf16 [{batch}, {seqlen}, {heads}, {head_dim}] {args.layout}, {needed / 1e6:.0f} MB needed")
    print(f"{'':22} {'us':>8} {'GB/s':>8} {'of copy':>8} {'moved':>8}")
    for (name, (_, moved)), time in zip(calls.items(), medians):
        print(f"{name:22} {time:8.1f} {needed / time / 1e3:8.0f} {copy / time:8.3f} {moved / needed * copy / time:8.3f}")


if __name__ == "__main__":
    main()
