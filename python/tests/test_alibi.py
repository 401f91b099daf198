"""ALiBi and the maximum logits: arrays and torch tensors against the definition, gradients, packed sequences."""

import unittest

import hopper_attention

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
    from definition import causal_keep, reference

    NO_TORCH = None
NO_GPU = NO_TORCH or (None if torch.cuda.is_available() else "no GPU")


@unittest.skipIf(NO_NUMPY or NO_TORCH, NO_NUMPY or NO_TORCH)
class Arrays(unittest.TestCase):
    def setUp(self):
        random = numpy.random.default_rng(3)
        self.draw = lambda *shape: random.standard_normal(shape).astype("float32")
        # The first queries see no key: bottom-right.
        self.qkv = self.draw(2, 9, 4, 16), self.draw(2, 6, 2, 16), self.draw(2, 6, 2, 16)
        self.shared = numpy.array([0.5, 0.25, -0.125, 4.0], "float32")
        self.per_batch = numpy.stack((self.shared, 2 * self.shared))

    def test_attention_and_gradients(self):
        for slopes in (self.shared, self.per_batch):
            for cap, sinks in ((None, None), (1.5, numpy.array([0.0, 1.5, -2.0, 3.0], "float32"))):
                with self.subTest(slopes=slopes.shape, cap=cap):
                    options = {"causal": True, "softcap": cap, "s_aux": sinks, "alibi_slopes": slopes}
                    o, lse, max_logits = hopper_attention.attention(
                        *self.qkv, return_lse=True, return_max_logits=True, **options
                    )
                    leaves = [torch.tensor(t, dtype=torch.float64, requires_grad=True) for t in self.qkv]
                    its = None if sinks is None else torch.tensor(sinks, dtype=torch.float64, requires_grad=True)
                    want = reference(*leaves, causal_keep(9, 6), torch.tensor(slopes), cap, its)
                    for got, exact in zip((o, lse, max_logits), want):
                        numpy.testing.assert_allclose(got, exact.detach(), atol=1e-5)
                    d_o = self.draw(*o.shape)
                    loss = (want[0] * torch.tensor(d_o)).sum()
                    found = torch.autograd.grad(loss, [*leaves, *([] if its is None else [its])])
                    got = hopper_attention.attention_backward(*self.qkv, o, lse, d_o, **options)
                    self.assertEqual(len(got), len(found))
                    for mine, exact in zip(got, found):
                        numpy.testing.assert_allclose(mine, exact.nan_to_num(), atol=2e-5)

    def test_what_is_given_back(self):
        o = hopper_attention.attention(*self.qkv)
        pair = hopper_attention.attention(*self.qkv, return_max_logits=True)
        self.assertTrue(len(pair) == 2 and (pair[0] == o).all() and pair[1].shape == (4,))
        into = numpy.full(4, numpy.nan, "float32")
        pair = hopper_attention.attention(*self.qkv, max_logits_out=into)
        self.assertIs(pair[1], into)
        self.assertFalse(numpy.isnan(into).any())

    def test_packed(self):
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in self.qkv)
        lengths = {"cu_seqlens_q": numpy.array([0, 9, 18]), "cu_seqlens_kv": numpy.array([0, 6, 12])}
        options = {"causal": True, "alibi_slopes": self.per_batch}
        more = {"return_lse": True, "return_max_logits": True}
        o, lse, max_logits = hopper_attention.attention_varlen(q, k, v, **lengths, **more, **options)
        want, want_lse, want_max = hopper_attention.attention(*self.qkv, **more, **options)
        self.assertTrue((o.reshape(want.shape) == want).all() and (max_logits == want_max).all())
        self.assertTrue((lse.reshape(4, 2, 9).transpose(1, 0, 2) == want_lse).all())
        d = hopper_attention.attention_varlen_backward(q, k, v, o, lse, o, **lengths, **options)
        want = hopper_attention.attention_backward(*self.qkv, want, want_lse, want, **options)
        for mine, exact in zip(d, want):
            self.assertTrue((mine.reshape(exact.shape) == exact).all())

    def test_refusals(self):
        with self.assertRaisesRegex(hopper_attention.HattnError, r"alibi_slopes: shape \[3\], expected \[4\]"):
            hopper_attention.attention(*self.qkv, alibi_slopes=self.shared[:3])
        with self.assertRaisesRegex(hopper_attention.HattnError, r"alibi_slopes: .*float16|alibi_slopes: dtype f16"):
            hopper_attention.attention(*self.qkv, alibi_slopes=self.shared.astype("float16"))
        with self.assertRaisesRegex(ValueError, "alibi_slopes: 3 dimensions"):
            hopper_attention.attention(*self.qkv, alibi_slopes=self.per_batch[None])
        self.assertRaises(TypeError, hopper_attention.attention, *self.qkv, alibi_slopes=[0.5] * 4)


@unittest.skipIf(NO_TORCH, NO_TORCH)
class Torch(unittest.TestCase):
    def inputs(self):
        torch.manual_seed(1)
        shapes = (2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 16)
        return [torch.randn(shape).requires_grad_() for shape in shapes] + [torch.randn(4).requires_grad_()]

    SLOPES = (0.5, 0.25, -0.125, 4.0)

    def check(self, attention, device="cpu", dtype=None, atol=2e-5):
        keeps = {False: torch.ones(9, 13, dtype=torch.bool), True: causal_keep(9, 13)}
        shared = torch.tensor(self.SLOPES)
        for slopes in (shared, torch.stack((shared, 2 * shared)), None):
            for causal, cap, with_sinks in ((False, None, False), (True, 15.0, False), (True, None, True)):
                with self.subTest(slopes=None if slopes is None else slopes.shape, causal=causal, with_sinks=with_sinks):
                    *qkv, sinks = (t.detach().to(device, dtype).requires_grad_() for t in self.inputs())
                    leaves = [*qkv, sinks] if with_sinks else qkv
                    s_aux, its = (sinks if with_sinks else None), None if slopes is None else slopes.to(device)
                    options = {"causal": causal, "softcap": cap, "s_aux": s_aux, "alibi_slopes": its}
                    got = attention(*qkv, return_lse=True, return_max_logits=True, **options)
                    exact = [t.detach().double().requires_grad_() for t in leaves]
                    s_aux = exact[3] if with_sinks else None
                    want = reference(*exact[:3], keeps[causal].to(device), its, cap, s_aux)
                    for mine, its_own in zip(got, want):
                        torch.testing.assert_close(mine.double(), its_own, atol=atol, rtol=0)
                    self.assertFalse(got[2].requires_grad)
                    d_o, d_lse = torch.randn_like(got[0]), torch.randn_like(got[1])
                    mine = torch.autograd.grad((got[0] * d_o).sum() + (got[1] * d_lse).sum(), leaves)
                    loss = (want[0] * d_o.double()).sum() + (want[1] * d_lse.double()).sum()
                    for a, b in zip(mine, torch.autograd.grad(loss, exact)):
                        torch.testing.assert_close(a.double(), b, atol=4 * atol, rtol=atol)

    def test_outputs_and_gradients(self):
        self.check(hopper_attention.attention)

    def test_compiled(self):
        def compiled(*operands, **options):
            # Each call has other options, of which one function would have too many.
            torch._dynamo.reset()
            return torch.compile(hopper_attention.attention, fullgraph=True, backend="aot_eager")(*operands, **options)

        self.check(compiled)

    def test_operators_are_what_torch_expects(self):
        q, k, v, sinks = self.inputs()
        slopes = torch.tensor(self.SLOPES)
        numbers = (0.25, hopper_attention.abi.MASK_CAUSAL, 0, 0, 0, 0, 0.0)
        for own, of, wanted in ((sinks, slopes, True), (None, slopes, False), (sinks, None, True), (None, None, True)):
            arguments = (q, k, v, own, of, *(None,) * 11, 0, 0, False, False, *numbers, 0.0, 0, wanted)
            torch.library.opcheck(torch.ops.hopper_attention.modified_forward, arguments)

    def test_packed_and_nested(self):
        q, k, v, _ = (t.detach() for t in self.inputs())
        rows = [t.reshape(-1, *t.shape[2:]) for t in (q, k, v)]
        lengths = {"cu_seqlens_q": torch.tensor([0, 9, 18]), "cu_seqlens_kv": torch.tensor([0, 13, 26])}
        slopes = torch.tensor(self.SLOPES)
        options = {"causal": True, "alibi_slopes": torch.stack((slopes, -slopes)), "return_max_logits": True}
        want, want_max = hopper_attention.attention(q, k, v, **options)
        o, max_logits = hopper_attention.attention_varlen(*rows, **lengths, **options)
        self.assertTrue(torch.equal(o.reshape(want.shape), want) and torch.equal(max_logits, want_max))
        ragged = [
            torch.nested.nested_tensor_from_jagged(t, lengths[name])
            for t, name in zip(rows, ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_kv"))
        ]
        ragged[2] = torch.nested.nested_tensor_from_jagged(rows[2], ragged[1].offsets())
        o, lse, max_logits = hopper_attention.attention(*ragged, return_lse=True, **options)
        self.assertTrue(torch.equal(o.values().reshape(want.shape), want) and torch.equal(max_logits, want_max))
        _, want_lse, _ = hopper_attention.attention_varlen(*rows, **lengths, return_lse=True, **options)
        self.assertTrue(torch.equal(lse.values(), want_lse))

    def test_refusals(self):
        q, k, v, _ = self.inputs()
        with self.assertRaisesRegex(NotImplementedError, "alibi_slopes: slopes that require a gradient"):
            hopper_attention.attention(q, k, v, alibi_slopes=torch.ones(4, requires_grad=True))
        with self.assertRaisesRegex(ValueError, "alibi_slopes: 0 dimensions"):
            hopper_attention.attention(q, k, v, alibi_slopes=torch.tensor(1.0))
        self.assertRaises(TypeError, hopper_attention.attention, q, k, v, alibi_slopes=0.5)
        with self.assertRaisesRegex(hopper_attention.HattnError, r"alibi_slopes: shape \[3\], expected \[4\]"):
            hopper_attention.attention(q, k, v, alibi_slopes=torch.ones(3))
        with self.assertRaisesRegex(TypeError, "max_logits_out: not for torch tensors"):
            hopper_attention.attention(q, k, v, max_logits_out=torch.ones(4))

    @unittest.skipIf(NO_GPU, NO_GPU)
    def test_on_a_gpu(self):
        for dtype in (torch.bfloat16, torch.float16):
            self.check(hopper_attention.attention, "cuda", dtype, 0.05)
