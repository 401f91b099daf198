"""Tests of packed sequences on numpy arrays. test_varlen.py has those of torch tensors."""

import unittest

from hopper_attention import abi

try:
    import numpy
except ImportError:
    numpy = None
else:
    from hopper_attention import attention, attention_backward, attention_varlen, attention_varlen_backward

# Sequences of both sides: rows, and used rows. Two are empty on one side, and the last one is not used at all.
ROWS_Q, ROWS_KV = (3, 0, 9, 4, 5), (5, 2, 9, 0, 6)
USED_Q, USED_KV = (2, 0, 9, 1, 0), (5, 0, 7, 0, 6)


class VarlenArrays(unittest.TestCase):
    def setUp(self):
        if numpy is None:
            self.skipTest("no numpy")
        self.random = numpy.random.default_rng(2)
        # One row before the first sequence, and two after the last.
        self.cu_q = numpy.cumsum((1, *ROWS_Q))
        self.cu_kv = numpy.cumsum((1, *ROWS_KV))
        rows = (self.cu_q[-1] + 2, self.cu_kv[-1] + 2, self.cu_kv[-1] + 2)
        self.qkv = [self.draw(n, heads, 16) for n, heads in zip(rows, (4, 2, 2))]

    def draw(self, *shape):
        return self.random.standard_normal(shape).astype("float32")

    def sequences(self, used):
        """The rows of each sequence, as slices of q and of k and v."""
        of_q, of_kv = (USED_Q, USED_KV) if used else (ROWS_Q, ROWS_KV)
        for begin, rows, begin_kv, rows_kv in zip(self.cu_q, of_q, self.cu_kv, of_kv):
            yield slice(begin, begin + rows), slice(begin_kv, begin_kv + rows_kv)

    def one(self, rows_q, rows_kv):
        q, k, v = self.qkv
        return q[None, rows_q], k[None, rows_kv], v[None, rows_kv]

    def lengths(self, used):
        more = {"seqused_q": numpy.array(USED_Q), "seqused_kv": numpy.array(USED_KV)} if used else {}
        return {"cu_seqlens_q": self.cu_q, "cu_seqlens_kv": self.cu_kv, **more}

    def test_each_sequence_is_attention_of_its_own(self):
        for used in (False, True):
            for options in ({}, {"causal": True}, {"window": (3, 1)}, {"causal": True, "top_left": True}):
                with self.subTest(used=used, **options):
                    o, lse = attention_varlen(*self.qkv, **self.lengths(used), return_lse=True, **options)
                    d_o, d_lse = self.draw(*o.shape), self.draw(*lse.shape)
                    d = attention_varlen_backward(
                        *self.qkv, o, lse, d_o, d_lse=d_lse, **self.lengths(used), **options, max_seqlen_q=9
                    )
                    self.assertEqual((o.shape, lse.shape), ((24, 4, 16), (4, 24)))
                    want_o, want_lse = numpy.zeros_like(o), numpy.full_like(lse, -numpy.inf)
                    want = [numpy.zeros_like(t) for t in self.qkv]
                    for of_q, of_kv in self.sequences(used):
                        given = self.one(of_q, of_kv)
                        own = attention(*given, return_lse=True, **options)
                        want_o[of_q], want_lse[:, of_q] = own[0][0], own[1][0]
                        ds = attention_backward(*given, *own, d_o[None, of_q], d_lse[None, :, of_q], **options)
                        for into, rows, gradient in zip(want, (of_q, of_kv, of_kv), ds):
                            into[rows] = gradient[0]
                    self.assertGreater(abs(want_o).max(), 0.1)
                    numpy.testing.assert_array_equal(o, want_o)
                    numpy.testing.assert_array_equal(lse, want_lse)
                    for got, gradient in zip(d, want):
                        numpy.testing.assert_array_equal(got, gradient)

    def test_types_of_offsets(self):
        want = attention_varlen(*self.qkv, self.cu_q, self.cu_kv)
        for dtype in ("int32", "uint32", "int64", "uint64", "int16"):
            wide = numpy.zeros((6, 2), dtype)
            wide[:, 0] = self.cu_q
            got = attention_varlen(*self.qkv, wide[:, 0], self.cu_kv.astype(dtype))
            self.assertTrue((got == want).all(), dtype)

    def test_a_bias(self):
        for shape in ((9, 9), (4, 11, 12), (1, 4, 1, 9), (5, 1, 11, 9), (5, 4, 9, 12)):
            for used in (False, True):
                with self.subTest(shape=shape, used=used):
                    bias = self.draw(*shape)
                    whole = bias.reshape((1,) * (4 - bias.ndim) + shape)
                    options = {"causal": True, "s_aux": self.draw(4)}
                    o, lse = attention_varlen(*self.qkv, **self.lengths(used), return_lse=True, bias=bias, **options)
                    d_o = self.draw(*o.shape)
                    found = attention_varlen_backward(
                        *self.qkv, o, lse, d_o, **self.lengths(used), bias=bias, return_d_bias=True, **options
                    )
                    want_o = numpy.zeros_like(o)
                    want_d = [numpy.zeros_like(t) for t in (*self.qkv, options["s_aux"], whole)]
                    for i, (of_q, of_kv) in enumerate(self.sequences(used)):
                        given, n, keys = self.one(of_q, of_kv), of_q.stop - of_q.start, of_kv.stop - of_kv.start
                        at = (slice(i, i + 1) if len(whole) > 1 else slice(None), slice(None), slice(n), slice(keys))
                        own = {"bias": whole[at], **options}
                        made = attention(*given, return_lse=True, **own)
                        want_o[of_q] = made[0][0]
                        *ds, d_sinks, d_bias = attention_backward(
                            *given, *made, d_o[None, of_q], return_d_bias=True, **own
                        )
                        for into, rows, gradient in zip(want_d, (of_q, of_kv, of_kv), ds):
                            into[rows] = gradient[0]
                        want_d[3] += d_sinks
                        want_d[4][at] += d_bias
                    numpy.testing.assert_array_equal(o, want_o)
                    for got, want in zip(found, want_d):
                        self.assertEqual(got.dtype, want.dtype)
                        numpy.testing.assert_allclose(got, want, atol=1e-5)

    def test_gaps_that_are_not_filled(self):
        o = numpy.full((24, 4, 16), 7, "float32")
        lse = numpy.full((4, 24), 7, "float32")
        given = attention_varlen(*self.qkv, **self.lengths(True), out=o, lse_out=lse, fill_gaps=False)
        self.assertIs(given[0], o)
        want = attention_varlen(*self.qkv, **self.lengths(True))
        gaps = numpy.ones(24, bool)
        for of_q, _ in self.sequences(True):
            gaps[of_q] = False
        self.assertEqual(gaps.sum(), 24 - sum(USED_Q))
        self.assertTrue((o[gaps] == 7).all() and (lse[:, gaps] == 7).all())
        self.assertTrue((o[~gaps] == want[~gaps]).all())

    def test_dense_sides(self):
        q, k, v = self.draw(3, 8, 4, 16), self.draw(3, 10, 2, 16), self.draw(3, 10, 2, 16)
        used_q, used_kv = numpy.array([8, 3, 0]), numpy.array([4, 10, 1])
        cu_q = numpy.array([0, 8, 16, 24])
        o, lse = attention_varlen(q, k, v, None, seqused_q=used_q, seqused_kv=used_kv, causal=True, return_lse=True)
        packed, packed_lse = attention_varlen(
            q.reshape(24, 4, 16), k, v, cu_q, seqused_q=used_q, seqused_kv=used_kv, causal=True, return_lse=True
        )
        for i in range(3):
            n, keys = used_q[i], used_kv[i]
            want = attention(q[i : i + 1, :n], k[i : i + 1, :keys], v[i : i + 1, :keys], causal=True, return_lse=True)
            self.assertTrue((o[i, :n] == want[0][0]).all() and (lse[i, :, :n] == want[1][0]).all())
            self.assertTrue((o[i, n:] == 0).all() and (lse[i, :, n:] == -numpy.inf).all())
        self.assertTrue((packed == o.reshape(24, 4, 16)).all())
        self.assertTrue((packed_lse == lse.transpose(1, 0, 2).reshape(4, 24)).all())

    def test_refusals(self):
        q, k, v = self.qkv
        cu, cu_kv, wrong = self.cu_q, self.cu_kv, self.draw(2, 1, 9, 9)
        for error, words, arguments, options in (
            (ValueError, "q: 4 dimensions; allowed: 3, .*with cu_seqlens_q", (q[None], k, v, cu), {}),
            (ValueError, "q: 3 dimensions; allowed: 4, .*without cu_seqlens_q", (q, k, v, None), {}),
            (ValueError, "v: 4 dimensions", (q, k, v[None], cu, cu_kv), {}),
            (ValueError, "cu_seqlens_q: missing", (q[None], k[None], v[None], None), {}),
            (ValueError, r"cu_seqlens_q: shape \[1, 6\]", (q, k, v, cu[None]), {}),
            (ValueError, r"cu_seqlens_kv: shape \[0\]", (q, k, v, cu, cu[:0]), {}),
            (ValueError, "max_seqlen_kv: -1", (q, k, v, cu), {"max_seqlen_kv": -1}),
            (TypeError, "cu_seqlens_q: list", (q, k, v, [0, 3]), {}),
            (TypeError, "cu_seqlens_q: an element type.*allowed: int32", (q, k, v, cu.astype("float32")), {}),
            (TypeError, "deterministic: for torch", (q, k, v, cu), {"deterministic": True}),
            (ValueError, r"bias: shape \[2, 1, 9, 9\].*\[5, 4, any, any\]", (q, k, v, cu), {"bias": wrong}),
            (abi.HattnError, "cu_seqlens_kv: 9 rows at 2.*at most 8", (q, k, v, cu), {"bias": self.draw(9, 8)}),
            (abi.HattnError, "cu_seqlens_q: 9 rows at 2.*at most 8", (q, k, v, cu), {"bias": self.draw(8, 9)}),
            (abi.HattnError, "cu_seqlens_kv", (q, k, v, cu, cu_kv[:-1]), {}),
            (abi.HattnError, "seqused_q", (q, k, v, cu, cu_kv), {"seqused_q": numpy.array([4, 0, 9, 4, 5])}),
            (abi.HattnError, "cu_seqlens_q", (q, k, v, cu + 3, cu_kv), {}),
            (abi.HattnError, "cu_seqlens_q", (q, k, v, cu[::-1], cu_kv), {}),
            # Cast without a check, these would be offsets of int32.
            (abi.HattnError, "cu_seqlens_q", (q, k, v, cu + 2**32, cu_kv), {}),
            (abi.HattnError, "cu_seqlens_q", (q, k, v, cu - 2**32, cu_kv), {}),
        ):
            with self.subTest(words=words):
                self.assertRaisesRegex(error, words, attention_varlen, *arguments, **options)


if __name__ == "__main__":
    unittest.main()
