"""Tensors in host memory, and what attention gives on them by plain loops. For the tests of the ABI, without numpy."""

import array
import math
import random
import struct

from hopper_attention import abi as hattn


class Memory:
    """A tensor of f32 or bf16 in host memory, dense unless `stride` says where its elements are."""

    def __init__(self, shape, dtype=hattn.F32, stride=None, fill=math.nan):
        self.dtype, self.shape = dtype, tuple(shape)
        self.tensor = hattn.tensor(0, dtype, shape, stride)
        self.stride = tuple(self.tensor.stride[: len(self.shape)])
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride)) if 0 not in self.shape else 1
        # Room beyond the end shows what was written there.
        self.memory = array.array("f" if dtype == hattn.F32 else "H", [0] * (span + 8))
        for i in range(len(self.memory)):
            self.memory[i] = self._bits(fill)
        self.tensor.data = self.memory.buffer_info()[0]

    def _bits(self, value):
        if self.dtype == hattn.F32:
            return value
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        # Half of the last place is added before the lower half is cut off: nearest, ties to even. A NaN stays one.
        return bits >> 16 if math.isnan(value) else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16

    def _offset(self, index):
        return sum(i * s for i, s in zip(index, self.stride))

    def __getitem__(self, index):
        value = self.memory[self._offset(index)]
        return value if self.dtype == hattn.F32 else struct.unpack("<f", struct.pack("<I", value << 16))[0]

    def __setitem__(self, index, value):
        self.memory[self._offset(index)] = self._bits(value)

    def indices(self):
        """Every index, in order."""
        rest = [()]
        for size in self.shape:
            rest = [(*index, i) for index in rest for i in range(size)]
        return rest

    def randomise(self, seed):
        generator = random.Random(seed)
        for index in self.indices():
            self[index] = generator.gauss(0, 1)
        return self

    def bytes(self):
        return self.memory.tobytes()


def keeps(mask, q, kv, seqlen_q, seqlen_kv):
    """The definition of the masks, for (kind, left, right) at the bottom-right corner."""
    kind, left, right = mask
    own = q + seqlen_kv - seqlen_q
    if kind == hattn.MASK_FULL:
        return True
    if kind == hattn.MASK_CAUSAL:
        return kv <= own
    return (left < 0 or own - left <= kv) and (right < 0 or kv <= own + right)


def expected(q, k, v, mask, scale):
    """o and lse as dictionaries, by a plain loop in f64."""
    (batch, seqlen_q, heads_q, dim), (_, seqlen_kv, heads_kv, dim_vo) = q.shape, v.shape
    o, lse = {}, {}
    for b in range(batch):
        for h in range(heads_q):
            g = h // (heads_q // heads_kv)
            for i in range(seqlen_q):
                seen = [j for j in range(seqlen_kv) if keeps(mask, i, j, seqlen_q, seqlen_kv)]
                scores = [scale * sum(q[b, i, h, d] * k[b, j, g, d] for d in range(dim)) for j in seen]
                top = max(scores, default=0.0)
                weights = [math.exp(s - top) for s in scores]
                total = sum(weights)
                lse[b, h, i] = top + math.log(total) if seen else -math.inf
                for d in range(dim_vo):
                    o[b, i, h, d] = sum(w * v[b, j, g, d] for w, j in zip(weights, seen)) / total if seen else 0.0
    return o, lse


def expected_gradients(q, k, v, d_o, d_lse, mask, scale):
    """The gradients of q, k and v by the chain rule, by index; d_lse may be None."""
    (batch, seqlen_q, heads_q, dim), (_, seqlen_kv, heads_kv, dim_vo) = q.shape, v.shape
    o, lse = expected(q, k, v, mask, scale)
    d_q, d_k, d_v = ({index: 0.0 for index in t.indices()} for t in (q, k, v))
    for b, i, h, _ in (index for index in q.indices() if index[3] == 0):
        g = h // (heads_q // heads_kv)
        delta = sum(d_o[b, i, h, d] * o[b, i, h, d] for d in range(dim_vo)) - (d_lse[b, h, i] if d_lse else 0.0)
        for j in range(seqlen_kv):
            if not keeps(mask, i, j, seqlen_q, seqlen_kv):
                continue
            weight = math.exp(scale * sum(q[b, i, h, d] * k[b, j, g, d] for d in range(dim)) - lse[b, h, i])
            d_score = scale * weight * (sum(d_o[b, i, h, d] * v[b, j, g, d] for d in range(dim_vo)) - delta)
            for d in range(dim):
                d_q[b, i, h, d] += d_score * k[b, j, g, d]
                d_k[b, j, g, d] += d_score * q[b, i, h, d]
            for d in range(dim_vo):
                d_v[b, j, g, d] += weight * d_o[b, i, h, d]
    return d_q, d_k, d_v


class Problem:
    """A problem with its memory, a small one unless told otherwise."""

    def __init__(
        self, dtype=hattn.F32, mask=(hattn.MASK_FULL, 0, 0), sizes=(2, 5, 7, 4, 2, 8, 6), heads_first=False, **fields
    ):
        batch, seqlen_q, seqlen_kv, heads_q, heads_kv, dim, dim_vo = sizes
        kind, left, right = mask
        self.mask, self.scale = mask, fields.get("softmax_scale") or 1 / math.sqrt(dim)
        self.problem = hattn.ForwardProblem(
            dtype=dtype,
            mask=kind,
            window_left=left,
            window_right=right,
            lse=1,
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
            heads_q=heads_q,
            heads_kv=heads_kv,
            head_dim_qk=dim,
            head_dim_vo=dim_vo,
            **fields,
        )

        def memory(seqlen, heads, dim):
            # [batch, heads, seqlen, head_dim] in memory, with a gap after every row.
            stride = (heads * seqlen * (dim + 3), dim + 3, seqlen * (dim + 3), 1) if heads_first else None
            return Memory((batch, seqlen, heads, dim), dtype, stride)

        self.q = memory(seqlen_q, heads_q, dim).randomise(1)
        self.k = memory(seqlen_kv, heads_kv, dim).randomise(2)
        self.v = memory(seqlen_kv, heads_kv, dim_vo).randomise(3)
        self.o = memory(seqlen_q, heads_q, dim_vo)
        self.lse = Memory((batch, heads_q, seqlen_q))
        self.d_o = memory(seqlen_q, heads_q, dim_vo).randomise(4)
        self.d_lse = Memory((batch, heads_q, seqlen_q)).randomise(5)
        self.d_q, self.d_k, self.d_v = (
            memory(seqlen_q, heads_q, dim),
            memory(seqlen_kv, heads_kv, dim),
            memory(seqlen_kv, heads_kv, dim_vo),
        )

    def tensors(self, **others):
        return {name: getattr(self, name).tensor for name in ("q", "k", "v", "o", "lse")} | others

    def gradients(self, **others):
        """The arguments of a backward run."""
        return (
            self.tensors()
            | {name: getattr(self, name).tensor for name in ("d_o", "d_lse", "d_q", "d_k", "d_v")}
            | others
        )
