"""The e4m3 points of sweep.py: the operands, the libraries that take them, and the exact result to compare with."""

import contextlib
import math
import re

import entry
import inputs

# As the 16-bit bounds of sweep.py, with the error of rounding the softmax's weights to e4m3 in them: at most 2^-4 of a
# weight, 2.5% of it on average, and that is the error of a row too, however many keys it has. A peer that writes O as e4m3
# adds as much (5% were measured of a row then, 4% without). 128 lost keys of 16384 are 9% of a row, a wrong mask or factor more. An LSE
# whose exponentials are of f16 is off by up to 2.4e-3 (crates/hopper-attention/src/reference/tolerance.rs), and a score of 5,
# the largest here, by 5 * 2^-11 more once it is rounded to f16 (2.9e-3 were measured); 128 lost keys of 16384 are 7.8e-3.
BOUNDS = {"slice": 4.5e-2, "row": 7e-2, "cross": 1.1e-1, "lse": 5e-3}
# Where inputs are not normal, two or three keys may have all of a row's weight, so that no others average out their errors. Scores
# reach 100, and are off by 100 * 2^-11 in f16: 4.8e-2 of an LSE were measured, at two kernels.
BOUNDS_OF_OTHERS = {"slice": 6e-2, "row": 1.2e-1, "cross": 2e-1, "lse": 6e-2}
LARGEST = 448.0
# The largest stored element of Q and K: less than LARGEST by a factor of 32, so that f16 holds sums of their products. All
# libraries get the same operands and may use that. Only elements below a thousandth of the largest lose precision.
LARGEST_HALF_SCORES = 14.0
BLOCK = 128  # rows that share a factor
SMALLEST = 2.0**-126
# What `hattn bench` calls the second run of our libraries at each point.
SUFFIX = "-block"
# The peers in Python that compute e4m3 operands.
PEERS = ("cudnn",)


def quantised(x, scaling, largest, heads_kv, torch):
    """x, logically [batch, seqlen, heads, head_dim], as e4m3 with the strides that it has, and its factors [batch, heads,
    blocks]: the largest magnitude that shares one becomes `largest`. NaN stays NaN and counts for nothing."""
    b, s, h, _ = x.size()
    magnitudes = x.abs().nan_to_num(0.0)
    if scaling == "tensor":
        factors = (magnitudes.amax() / largest).clamp_min(SMALLEST).view(1, 1, 1)
    elif scaling == "head":
        most = magnitudes.amax((1, 3)).view(b, heads_kv, -1).amax(-1)
        factors = (most / largest).clamp_min(SMALLEST).view(b, heads_kv, 1)
    else:
        most = magnitudes.amax(-1).transpose(1, 2)
        most = torch.nn.functional.pad(most, (0, -s % BLOCK)).view(b, h, -1, BLOCK).amax(-1)
        factors = (most / largest).clamp_min(SMALLEST).contiguous()
    stored = torch.empty_strided(x.size(), x.stride(), dtype=torch.float8_e4m3fn, device=x.device)
    stored.copy_((x * (1.0 / spread(factors, s, h))).clamp(-largest, largest))
    return stored, factors


def spread(factors, seqlen, heads):
    """The factor of each row, to be multiplied with a tensor [batch, seqlen, heads, head_dim]."""
    if 1 < factors.size(1) < heads:
        factors = factors.repeat_interleave(heads // factors.size(1), 1)
    if factors.size(2) > 1:
        factors = factors.repeat_interleave(BLOCK, 2)[:, :, :seqlen]
    return factors.transpose(1, 2)[..., None]


class Operands:
    """Q, K and V with the factors of a scaling, and f64 attention of what they stand for."""

    def __init__(self, p, scaling, real, oracle, torch):
        self.p, self.scaling = p, scaling
        largest = (LARGEST_HALF_SCORES, LARGEST_HALF_SCORES, LARGEST)
        pairs = (quantised(x, scaling, most, p["heads_kv"], torch) for x, most in zip(real, largest))
        self.stored, self.factors = zip(*pairs)
        dequantised = [x.float() * spread(factors, x.size(1), x.size(2)) for x, factors in zip(self.stored, self.factors)]
        self.reference = oracle(p, *dequantised, torch)


def wish_of(name):
    """The kernel that a library's name asks for (`wish` in hattn_peer.h): x@f32 has scores in f32, x@f16-192 tiles of 192 queries,
    x@f32-128x2 has two CTAs share a tile. A name without @ asks for none."""
    wish = re.search(r"@(f16|f32)(?:-(\d+)(?:x(\d+))?)?$", name.removesuffix(SUFFIX))
    if wish is None:
        if "@" in name:
            raise RuntimeError(f"{entry.STATUS[1]}: {name}; allowed after @: f16 or f32, with -TILE or -TILExSHARES")
        return 0
    scores, tile, shares = wish.groups()
    return {"f16": 1, "f32": 2}[scores] + 16 * int(tile or 0) + 65536 * int(shares or 0)


class EntryFp8:
    """A shared object with the C entry for e4m3 operands, which writes bf16 into an output that was poisoned with NaN."""

    def __init__(self, inner, scaling, name):
        if not inner.library.has_fp8:
            raise RuntimeError(f"{entry.STATUS[2]}: {inner.name} exports no hattn_peer_fwd_fp8")
        self.name, self.role, self.library, self.torch, self.scaling = name, inner.role, inner.library, inner.torch, scaling
        self.workspace = inner.workspace

    def prepare(self, operands):
        torch, p = self.torch, operands.p
        q, k, v = operands.stored
        self.operands = operands  # what the addresses lead to
        self.o = entry.like_output(p, q, torch, torch.bfloat16).fill_(float("nan"))
        self.lse = torch.full((p["batch"], p["heads_q"], p["seqlen"]), float("nan"), dtype=torch.float32, device=q.device)
        tensors = {"q": q, "k": k, "v": v, "o": self.o}
        self.offsets = self.library.offsets(p, torch)
        self.lists = self.library.lists(p, torch)
        stream = torch.cuda.current_stream().cuda_stream
        self.args = entry.filled(entry.Fp8Args, p, tensors, self.lse, stream, self.offsets, lists=self.lists)
        for field, factors in zip(("q_descale", "k_descale", "v_descale"), operands.factors):
            setattr(self.args, field, factors.data_ptr())
        # Kernels of packed sequences have scores in f32. So has the dense batch that they are held against.
        self.args.half_scores = 0 if "packed" in p or "beside" in p or p.get("f32_scores") else 1
        self.args.wish = wish_of(self.name)
        self.args.scaling, self.args.o_dtype = entry.SCALINGS[self.scaling], entry.DTYPES["bf16"]
        self.args.workspace, self.args.workspace_bytes = self.workspace.data_ptr(), self.workspace.numel()

    def context(self):
        return contextlib.nullcontext()

    def call(self):
        code = self.library.forward_fp8(self.args)
        if code != 0:
            raise RuntimeError(self.library.complaint(code))
        return self.o

    def real(self, o):
        """What an output stands for."""
        return o


class Blocks:
    """The same library once more, with a factor a block of 128 rows instead of one a tensor."""

    def __init__(self, inner):
        self.inner, self.name, self.role = inner, inner.name + SUFFIX, inner.role

    def origin(self):
        return self.inner.origin()


class Frontend:
    """cuDNN's attention of e4m3 operands, which PyTorch does not call: through NVIDIA's own nvidia-cudnn-frontend."""

    def __init__(self):
        try:
            import cudnn
        except ImportError as error:
            raise RuntimeError(f"e4m3 operands need nvidia-cudnn-frontend, which scripts/bench.sh fetches ({error})") from error
        self.cudnn, self.version = cudnn, f"{cudnn.__version__}, cuDNN {cudnn.backend_version_string()}"
        self.handle = cudnn.create_handle()


class CudnnFp8:
    """cuDNN at one point, with a factor a tensor. On Hopper it writes O as e4m3 alone: with the factor of V, since O is a mean
    of values. It gives the LSE, and the largest magnitudes of its weights and of O, without which it has no kernel."""

    role, scaling = "peer", "tensor"

    def __init__(self, frontend, name, torch):
        self.frontend, self.name, self.torch = frontend, name, torch

    def prepare(self, operands):
        torch, cudnn, p = self.torch, self.frontend.cudnn, operands.p
        if entry.lengths(p) is not None:
            raise RuntimeError(f"{entry.STATUS[2]}: the sweep gives cuDNN no packed e4m3 operands")
        if "softcap" in p or p.get("blocks"):
            raise RuntimeError(f"{entry.STATUS[2]}: cuDNN has neither a softcap nor lists of blocks")
        if p.get("window") is not None:
            raise RuntimeError(f"{entry.STATUS[2]}: the sweep asks cuDNN for no window of e4m3 operands")
        e4m3, f32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        cudnn.set_stream(self.frontend.handle, torch.cuda.current_stream().cuda_stream)
        graph = cudnn.pygraph(
            io_data_type=e4m3, intermediate_data_type=f32, compute_data_type=f32, handle=self.frontend.handle
        )
        self.operands, self.pack = operands, {}

        def given(name, tensor, dim, stride, dtype):
            node = graph.tensor(name=name, dim=dim, stride=stride, data_type=dtype)
            self.pack[node] = tensor
            return node

        # cuDNN's logical order is [batch, heads, seqlen, head_dim].
        heads_first = lambda x: ([x.size(i) for i in (0, 2, 1, 3)], [x.stride(i) for i in (0, 2, 1, 3)])
        number = lambda name, x: given(name, x, [1] * 4, [1] * 4, f32)
        constant = lambda x: torch.full((1, 1, 1, 1), x, dtype=torch.float32, device="cuda")
        q, k, v = (given(name, x, *heads_first(x), e4m3) for name, x in zip("qkv", operands.stored))
        descales = [number(f"descale_{name}", x.view(1, 1, 1, 1)) for name, x in zip("qkv", operands.factors)]
        weights = [number("descale_s", constant(1.0 / LARGEST)), number("scale_s", constant(LARGEST))]
        scale_o = number("scale_o", 1.0 / operands.factors[2].view(1, 1, 1, 1))
        o, stats, *largest = graph.sdpa_fp8(
            q, k, v, *descales, *weights, scale_o, generate_stats=True, attn_scale=1.0 / math.sqrt(p["head_dim"]),
            use_causal_mask=p["causal"],
        )  # fmt: skip
        like = operands.stored[0]
        self.o = entry.like_output(p, like, torch)
        self.o.view(torch.uint8).fill_(0x7F)  # NaN
        self.stats = torch.full((p["batch"], p["heads_q"], p["seqlen"], 1), float("nan"), dtype=torch.float32, device="cuda")
        self.lse = self.stats[..., 0]

        def wanted(node, tensor, dim, stride, dtype):
            node.set_output(True).set_dim(dim).set_stride(stride).set_data_type(dtype)
            self.pack[node] = tensor

        wanted(o, self.o, *heads_first(self.o), e4m3)
        wanted(stats, self.stats, list(self.stats.size()), list(self.stats.stride()), f32)
        for node in largest:
            wanted(node, constant(0.0), [1] * 4, [1] * 4, f32)
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
        except cudnn.cudnnGraphNotSupportedError as error:
            raise RuntimeError(f"{entry.STATUS[2]}: {error}") from error
        self.workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
        self.graph = graph

    def context(self):
        return contextlib.nullcontext()

    def call(self):
        self.graph.execute(self.pack, self.workspace, handle=self.frontend.handle)
        return self.o

    def real(self, o):
        """What an output stands for."""
        return o.float() * self.operands.factors[2].view(1, 1, 1, 1)


def contestant(x, frontend, torch, scaling="tensor"):
    """What a library does at a point of e4m3 operands; raises a RuntimeError where it does nothing. `scaling` is for those that take
    more than one."""
    if isinstance(x, Blocks):
        return EntryFp8(x.inner, "block", x.name)
    if hasattr(x, "library"):
        return EntryFp8(x, scaling, x.name)
    if x.name == "cudnn":
        if frontend is None:
            raise RuntimeError(f"{entry.STATUS[2]}: nvidia-cudnn-frontend is missing")
        return CudnnFp8(frontend, x.name, torch)
    raise RuntimeError(f"{entry.STATUS[2]}: the sweep knows no way to give {x.name} e4m3 operands")


class Point:
    """The inputs of a forward of e4m3 operands, and the judge of its outputs. `oracle`, `judge` and `error_of_o` are sweep.py's."""

    def __init__(self, p, real, frontend, oracle, judge, error_of_o, torch):
        self.p, self.frontend, self.oracle, self.judge, self.torch = p, frontend, oracle, judge, torch
        self.error_of_o = error_of_o
        self.real, self.operands, self.agreed = real, {}, {}
        self.normal = inputs.of(p) == "normal"

    def contestant(self, x):
        # A head with larger values than others keeps them from using the whole range of a common factor.
        return contestant(x, self.frontend, self.torch, "tensor" if self.normal else "head")

    def prepare(self, x):
        if x.scaling not in self.operands:
            self.operands[x.scaling] = Operands(self.p, x.scaling, self.real, self.oracle, self.torch)
        x.prepare(self.operands[x.scaling])

    def check(self, x, outputs, _):
        # The other scalings' operands stand for other numbers: only outputs of the same ones are held against each other.
        o = x.real(outputs[0])
        reference, agreed = self.operands[x.scaling].reference, self.agreed.get(x.scaling)
        bounds = BOUNDS if self.normal else BOUNDS_OF_OTHERS
        numbers, complaint = self.judge(x, o, reference, agreed, bounds, self.torch, inputs.nan_rows(self.p))
        if complaint is None and agreed is None:
            self.agreed[x.scaling] = o.clone()
        numbers["o"] = str(outputs[0].dtype).removeprefix("torch.")
        return numbers, complaint

    def error(self, x, outputs):
        return self.error_of_o(x.real(outputs[0]), self.operands[x.scaling].reference, self.torch)

    def changed(self, before, after):
        kind = {1: self.torch.uint8, 2: self.torch.int16}
        bits = [x.view(kind[x.element_size()]) for x in (before[0], after[0])]
        return [] if self.torch.equal(*bits) else ["o"]
