"""Chunked local attention and prefixes: arrays and torch tensors against the definition, gradients, packed sequences."""

import unittest

import hopper_attention
from hopper_attention import Chunked, Prefix

try:
    import numpy
except ImportError as error:
    NO_NUMPY = str(error)
else:
    NO_NUMPY = None
try:
    import torch
except ImportError as error:
    NO_TORCH = str(error)
else:
    NO_TORCH = None

#: Differences of the lengths that are no multiple of a chunk, more queries than keys, and chunks of one key.
CASES = [(Chunked(4), 9, 14), (Chunked(3), 14, 9), (Chunked(1), 5, 7), (Prefix(6), 9, 11), (Prefix(2), 11, 9)]


def keep(window, seqlen_q, seqlen_kv, top_left):
    """Which keys each query keeps, as lists."""
    offset = 0 if top_left else seqlen_kv - seqlen_q
    if isinstance(window, Chunked):

        def keeps(own, key):
            return key <= own and key // window.keys == own // window.keys

    else:

        def keeps(own, key):
            return key < window.keys or key <= own

    return [[keeps(i + offset, j) for j in range(seqlen_kv)] for i in range(seqlen_q)]


@unittest.skipIf(NO_NUMPY, NO_NUMPY)
class Arrays(unittest.TestCase):
    def test_attention(self):
        random = numpy.random.default_rng(5)
        for window, seqlen_q, seqlen_kv in CASES:
            for top_left in (False, True):
                shapes = (2, seqlen_q, 4, 16), (2, seqlen_kv, 2, 16), (2, seqlen_kv, 2, 16)
                q, k, v = (random.standard_normal(shape).astype("float32") for shape in shapes)
                o = hopper_attention.attention(q, k, v, window=window, top_left=top_left)
                scores = numpy.einsum("bqhd,bkhd->bhqk", q, k.repeat(2, 2)) / 4
                kept = numpy.array(keep(window, seqlen_q, seqlen_kv, top_left))
                weights = numpy.where(kept, numpy.exp(scores), 0)
                sums = weights.sum(-1, keepdims=True)
                weights = weights / numpy.where(sums == 0, 1, sums)
                want = numpy.einsum("bhqk,bkhd->bqhd", weights, v.repeat(2, 2))
                numpy.testing.assert_allclose(o, want, atol=1e-5, err_msg=f"{window} {top_left}")

    def test_what_is_refused(self):
        t = numpy.zeros((1, 2, 1, 8), "float32")
        for window in (Chunked(0), Chunked(-1), Prefix(-1)):
            with self.assertRaisesRegex(ValueError, "allowed: . keys and above"):
                hopper_attention.attention(t, t, t, window=window)

    def test_the_two_are_told_apart(self):
        self.assertNotEqual(Chunked(3), Prefix(3))
        self.assertNotEqual(Chunked(3), (3,))


@unittest.skipIf(NO_TORCH, NO_TORCH)
class Torch(unittest.TestCase):
    def tensors(self, seqlen_q, seqlen_kv):
        generator = torch.Generator().manual_seed(1)
        shapes = (2, seqlen_q, 4, 16), (2, seqlen_kv, 2, 16), (2, seqlen_kv, 2, 16)
        return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]

    def plain(self, q, k, v, kept):
        """In torch. Queries without keys have no weight."""
        k, v = (t.repeat_interleave(2, 2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
        weights = torch.where(kept, scores.exp(), 0)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    def test_gradients(self):
        for window, seqlen_q, seqlen_kv in CASES:
            qkv = self.tensors(seqlen_q, seqlen_kv)
            o = hopper_attention.attention(*qkv, window=window)
            want = self.plain(*qkv, torch.tensor(keep(window, seqlen_q, seqlen_kv, False)))
            torch.testing.assert_close(o, want, atol=1e-5, rtol=1e-4)
            d_o = torch.randn_like(o)
            for d, d_want in zip(torch.autograd.grad(o, qkv, d_o), torch.autograd.grad(want, qkv, d_o)):
                torch.testing.assert_close(d, d_want, atol=1e-5, rtol=1e-4)

    def test_packed_sequences_have_masks_of_their_own(self):
        for window in (Chunked(3), Prefix(4)):
            with torch.no_grad():
                q, k, v = (t[0] for t in self.tensors(10, 12))
                cu_q, cu_kv = torch.tensor([0, 7, 10]).int(), torch.tensor([0, 4, 12]).int()
                o = hopper_attention.attention_varlen(q, k, v, cu_q, cu_kv, window=window)
                for i in range(2):
                    one, of = slice(cu_q[i], cu_q[i + 1]), slice(cu_kv[i], cu_kv[i + 1])
                    alone = hopper_attention.attention(q[None, one], k[None, of], v[None, of], window=window)
                    torch.testing.assert_close(o[one], alone[0])

    def test_compiled(self):
        qkv = [t.detach() for t in self.tensors(9, 14)]
        for window in (Chunked(4), Prefix(9)):
            eager = hopper_attention.attention(*qkv, window=window)
            compiled = torch.compile(hopper_attention.attention, backend="eager", fullgraph=True)
            torch.testing.assert_close(compiled(*qkv, window=window), eager)


if __name__ == "__main__":
    unittest.main()
