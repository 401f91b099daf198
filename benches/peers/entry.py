"""The C entry of hattn_peer.h, seen from Python: the argument struct and a loader. Needs ctypes only."""

import ctypes
import itertools
import math
import os

import dropout

STATUS = {0: "ok", 1: "invalid argument", 2: "unsupported problem", 3: "a CUDA call failed"}
DTYPES = {"f16": 0, "bf16": 1, "e4m3": 2, "f32": 3}
SCALINGS = {"tensor": 0, "head": 1, "block": 2}
MASKS = {"full": 0, "causal": 1, "window": 2}
WORKSPACE_BYTES = 16 << 20


# What all structs end with: packed sequences.
PACKING = [("cu_seqlens", ctypes.c_void_p), ("longest", ctypes.c_int32), ("reserved_2", ctypes.c_int32)]


# What the structs of 16-bit operands have after that: slopes, lists of blocks, and the seed and the offset of dropout.
LISTS = ["full_block_cnt", "full_block_idx", "mask_block_cnt"]
MODIFIERS = [(name, ctypes.c_void_p) for name in ["alibi_slopes", *LISTS, "dropout_state"]]
# And the probability of dropout, and last the bias.
MODIFIERS += [("dropout", ctypes.c_float), ("reserved_3", ctypes.c_int32)]
MODIFIERS += [("bias", ctypes.c_void_p), ("bias_dtype", ctypes.c_int32), ("bias_dims", ctypes.c_int32)]
# Queries of a block, and its keys.
BLOCK = 128


def fields(addresses, tensors, more=(), newer=()):
    """The fields of an argument struct: the addresses, the strides of these tensors, and what all structs have after them, with more
    numbers in it. `newer` were added later, before packed sequences."""
    ints = ["batch", "seqlen_q", "seqlen_kv", "heads_q", "heads_kv", "head_dim_qk", "head_dim_vo"]
    ints += ["dtype", "mask", "corner", "window_left", "window_right"]
    return [
        ("struct_bytes", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in addresses),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in tensors),
        *((name, ctypes.c_int32) for name in ints),
        ("softmax_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_int32) for name in more),
        ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in newer),
        *PACKING,
    ]


class Args(ctypes.Structure):
    """hattn_peer_fwd_args; test_sweep.py checks its size and offsets against the header's."""

    _fields_ = [*fields(["q", "k", "v", "o", "lse"], ["q", "k", "v", "o"]), *MODIFIERS]


class BackwardArgs(ctypes.Structure):
    """hattn_peer_bwd_args. A test compares it with the header."""

    _fields_ = [
        *fields(
            ["q", "k", "v", "o", "d_o", "lse", "d_q", "d_k", "d_v"],
            ["q", "k", "v", "o", "d_o", "d_q", "d_k", "d_v"],
        ),
        *MODIFIERS,
        ("d_bias", ctypes.c_void_p),
    ]


class Fp8Args(ctypes.Structure):
    """hattn_peer_fwd_fp8_args. A test compares it with the header."""

    _fields_ = [
        *fields(
            ["q", "k", "v", "o", "lse", "q_descale", "k_descale", "v_descale"],
            ["q", "k", "v", "o"],
            ["scaling", "o_dtype"],
            ["half_scores", "wish"],
        ),
        *((name, ctypes.c_void_p) for name in LISTS),
    ]


def values(p):
    """The head dim of V and O: that of Q and K, if the point does not say otherwise."""
    return p.get("head_dim_vo", p["head_dim"])


def like_output(p, q, torch, dtype=None):
    """Memory for O or its gradient, in the order in which Q lies, with the head dim of V."""
    dtype, d = dtype or q.dtype, values(p)
    if d == p["head_dim"]:
        return torch.empty_strided(q.size(), q.stride(), dtype=dtype, device=q.device)
    # The dimensions of Q from the outermost to the innermost.
    order = sorted(range(4), key=lambda axis: (-q.stride(axis), axis))
    shape = (*q.shape[:3], d)
    o = torch.empty([shape[axis] for axis in order], dtype=dtype, device=q.device)
    return o.permute([order.index(axis) for axis in range(4)])


def scale(p):
    """The softmax scale: 1 / sqrt(head dim), if the point's file does not say otherwise."""
    return p.get("file", {}).get("scale", 1.0 / math.sqrt(p["head_dim"]))


def keywords_of_scale(p, name):
    """The softmax scale as a keyword argument of this name for a library. Nothing where it is the default, which all of them have."""
    return {name: scale(p)} if "scale" in p.get("file", {}) else {}


def queries(p):
    """The queries of a sequence: as many as keys, if the point does not say otherwise."""
    return p.get("queries", p["seqlen"])


def lengths(p):
    """The lengths of a point's packed sequences, or None. `hattn` chose them. Tensors have a batch of 1, with the rows of all."""
    return p["packed"]["lengths"] if "packed" in p else None


def offsets(p, torch):
    """Where each packed sequence begins and the last one ends, on the GPU, or None."""
    if lengths(p) is None:
        return None
    return torch.tensor([0, *itertools.accumulate(lengths(p))], dtype=torch.int32, device="cuda")


def dense(p):
    """The dense point beside a packed one, which our second run computes."""
    batch, seqlen = p["packed"]["dense"]
    return {**{name: x for name, x in p.items() if name != "packed"}, "batch": batch, "seqlen": seqlen, "beside": True}


def slopes(p, torch, device="cuda"):
    """ALiBi's slopes of a point, f32 [heads_q]: 2^(-8 h / heads) of head h, from 1 on. None if it has none."""
    if not p.get("alibi"):
        return None
    heads = p["heads_q"]
    return torch.tensor([2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)], dtype=torch.float32, device=device)


def biased(p, scores, head, own, torch):
    """Scores of a head that are not masked yet with the point's biases, if it has any. `own`: the keys that the queries of the rows
    stand at, of keys from 0 on."""
    if not p.get("alibi"):
        return scores
    distance = (own[:, None] - torch.arange(scores.size(-1), device=scores.device)[None, :]).abs()
    return scores - 2.0 ** (-8.0 * (head + 1) / p["heads_q"]) * distance


def is_listed(one_in, query, key):
    """Whether lists of one in so many blocks have a block of keys for a block of queries. benches/src/point/blocks.rs has the same."""
    word = 0xFFFFFFFF
    mixed = (query * 0x9E3779B1 & word) ^ (key * 0x85EBCA77 & word)
    for factor in (0x2C1B3C6D, 0x297A2D39):
        mixed = (mixed ^ mixed >> 15) * factor & word
    return query == key or (mixed ^ mixed >> 15) % one_in == 0


def table(p, torch, device="cuda"):
    """Which blocks of keys a point's blocks of queries see, [queries, keys]. None if it has no lists of blocks."""
    if not p.get("blocks"):
        return None
    blocks = range((p["seqlen"] + BLOCK - 1) // BLOCK)
    listed = [[is_listed(p["blocks"], query, key) for key in blocks] for query in blocks]
    return torch.tensor(listed, dtype=torch.bool, device=device)


def unlisted(p, scores, rows, torch):
    """Scores of the queries `rows`, with -inf where the point's lists of blocks, if it has any, hide a key."""
    listed = table(p, torch, scores.device)
    if listed is None:
        return scores
    columns = torch.arange(scores.size(-1), device=scores.device) // BLOCK
    return scores.masked_fill(~listed[rows[:, None] // BLOCK, columns[None, :]], float("-inf"))


def lists(p, torch, device="cuda"):
    """The lists of blocks of a point: counts and indices of full blocks, and counts of partial ones. None if it has none."""
    if not p.get("blocks"):
        return None
    listed = table(p, torch, device)
    counts = listed.sum(1, dtype=torch.int32)
    # The listed ones first, in order.
    indices = torch.argsort(~listed, dim=1, stable=True).to(torch.int32).contiguous()
    return counts, indices, torch.zeros_like(counts)


def filled(kind, p, tensors, lse, stream, offsets=None, slopes=None, lists=None, state=None):
    """The arguments of a point: tensors by name, logically [batch, seqlen, heads, head_dim]; scratch is the caller's to add."""
    a = kind()
    a.struct_bytes = ctypes.sizeof(kind)
    for field, tensor in tensors.items():
        setattr(a, field, tensor.data_ptr())
        getattr(a, field + "_stride")[:] = list(tensor.stride()[:3])
    a.lse = lse.data_ptr()
    a.batch, a.seqlen_q, a.seqlen_kv = p["batch"], queries(p), p["seqlen"]
    if offsets is not None:
        a.batch, a.cu_seqlens, a.longest = len(lengths(p)), offsets.data_ptr(), max(lengths(p))
    a.heads_q, a.heads_kv = p["heads_q"], p["heads_kv"]
    a.head_dim_qk, a.head_dim_vo = p["head_dim"], values(p)
    a.dtype = DTYPES[p["dtype"]]
    window = p.get("window")
    a.mask = MASKS["window" if window is not None else "causal" if p["causal"] else "full"]
    a.window_left, a.window_right = (-1, -1) if window is None else (window, 0)
    a.softmax_scale = scale(p)
    a.softcap = p.get("softcap", 0)
    if slopes is not None:
        a.alibi_slopes = slopes.data_ptr()
    for field, list_ in zip(LISTS, lists or ()):
        setattr(a, field, list_.data_ptr())
    if state is not None:
        a.dropout_state, a.dropout = state.data_ptr(), p["dropout"] / 100
    a.stream = stream
    return a


def capped(p, scores, torch):
    """Scores that are not masked yet with the point's cap, if it has one; and the derivative of the cap."""
    if "softcap" not in p:
        return scores, 1.0
    t = torch.tanh(scores / p["softcap"])
    return p["softcap"] * t, 1.0 - t * t


class Library:
    """A shared object that exports hattn_peer_fwd and hattn_peer_name, the backward's functions where it computes
    gradients, and hattn_peer_fwd_fp8 where it takes e4m3 operands. Raises OSError or AttributeError when it does not."""

    def __init__(self, path):
        self.path = os.path.abspath(path)
        # RTLD_LOCAL, so that two libraries with the same inner symbols do not see each other's.
        self._handle = ctypes.CDLL(self.path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        name = self._handle.hattn_peer_name
        name.restype, name.argtypes = ctypes.c_char_p, []
        self.name = name().decode()
        self._fwd = self._handle.hattn_peer_fwd
        self._fwd.restype, self._fwd.argtypes = ctypes.c_int, [ctypes.POINTER(Args)]
        self._bwd = getattr(self._handle, "hattn_peer_bwd", None)
        if self._bwd is not None:
            self._bwd.restype, self._bwd.argtypes = ctypes.c_int, [ctypes.POINTER(BackwardArgs)]
        self._scratch = getattr(self._handle, "hattn_peer_bwd_workspace", None)
        if self._scratch is not None:
            self._scratch.restype = ctypes.c_int
            self._scratch.argtypes = [ctypes.POINTER(BackwardArgs), ctypes.POINTER(ctypes.c_uint64)]
        self._fp8 = getattr(self._handle, "hattn_peer_fwd_fp8", None)
        if self._fp8 is not None:
            self._fp8.restype, self._fp8.argtypes = ctypes.c_int, [ctypes.POINTER(Fp8Args)]
        packs = getattr(self._handle, "hattn_peer_packs", None)
        self.packs = packs is not None and packs() == 1
        caps = getattr(self._handle, "hattn_peer_caps", None)
        self.caps = caps is not None and caps() == 1
        biases = getattr(self._handle, "hattn_peer_biases", None)
        self.biases = biases is not None and biases() == 1
        listed = getattr(self._handle, "hattn_peer_lists", None)
        self.listed = listed is not None and listed() == 1
        drops = getattr(self._handle, "hattn_peer_drops", None)
        self.drops = drops is not None and drops() == 1
        adds = getattr(self._handle, "hattn_peer_adds", None)
        self.adds = adds is not None and adds() == 1
        self._error = getattr(self._handle, "hattn_peer_last_error", None)
        if self._error is not None:
            self._error.restype, self._error.argtypes = ctypes.c_char_p, []

    def offsets(self, p, torch):
        """`offsets` of a point; raises a RuntimeError where its sequences are packed, or its scores capped, and this library knows
        nothing of that."""
        if "softcap" in p and not self.caps:
            raise RuntimeError(f"{STATUS[2]}: {self.name} exports no hattn_peer_caps")
        if lengths(p) is not None and not self.packs:
            raise RuntimeError(f"{STATUS[2]}: {self.name} exports no hattn_peer_packs")
        return offsets(p, torch)

    def slopes(self, p, torch):
        """`slopes` of a point; raises a RuntimeError where it has some and this library knows nothing of that."""
        if p.get("alibi") and not self.biases:
            raise RuntimeError(f"{STATUS[2]}: {self.name} exports no hattn_peer_biases")
        return slopes(p, torch)

    def lists(self, p, torch):
        """`lists` of a point; raises a RuntimeError where it has some and this library knows nothing of that."""
        if p.get("blocks") and not self.listed:
            raise RuntimeError(f"{STATUS[2]}: {self.name} exports no hattn_peer_lists")
        return lists(p, torch)

    def state(self, p, torch):
        """The seed and the offset of dropout of a point; raises a RuntimeError where it has some and this library knows nothing of
        that."""
        if p.get("dropout") and not self.drops:
            raise RuntimeError(f"{STATUS[2]}: {self.name} exports no hattn_peer_drops")
        return dropout.state(p, torch)

    def forward(self, args):
        """Enqueues the forward that `args` describes; returns the status code."""
        return self._fwd(ctypes.byref(args))

    @property
    def has_backward(self):
        return self._bwd is not None

    def backward(self, args):
        """Enqueues the backward that `args` describes; returns the status code."""
        return self._bwd(ctypes.byref(args))

    @property
    def has_fp8(self):
        return self._fp8 is not None

    def forward_fp8(self, args):
        """Enqueues the forward of e4m3 operands that `args` describes; returns the status code."""
        return self._fp8(ctypes.byref(args))

    def backward_workspace(self, args):
        """The status code, and the bytes of scratch that the backward needs."""
        if self._scratch is None:
            return 0, WORKSPACE_BYTES
        need = ctypes.c_uint64()
        code = self._scratch(ctypes.byref(args), ctypes.byref(need))
        return code, need.value

    def complaint(self, code):
        """What a status means, with the library's own words where it has some."""
        text = STATUS.get(code, f"status {code}")
        own = self._error() if self._error is not None else None
        return f"{text}: {own.decode(errors='replace')}" if own else text


def label_and_path(text):
    """`NAME=PATH` or `PATH`; a path with '=' in it needs a name before it."""
    label, equals, path = text.partition("=")
    if equals and "/" not in label:
        return label, path
    return None, text
