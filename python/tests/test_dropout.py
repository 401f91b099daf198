"""Dropout: the mask, arrays and torch tensors against the definition, gradients, packed sequences, refusals."""

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

SEED, OFFSET = 0x0123456789ABCDEF, 0x100000005
DROPPED = 9830  # of 32768, with a probability of 0.3


def keeps(seed, offset, heads, batch, head, query, key):
    """Whether a pair is kept, number by number."""
    word = 0xFFFFFFFF
    a, b, c, d = key // 32 * 8 + key % 8, query // 16 * 8 + query % 8, batch * heads + head, offset & word
    low, high = seed & word, seed >> 32 ^ offset >> 32
    for _ in range(7):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second >> 32 ^ b ^ low, second & word, first >> 32 ^ d ^ high, first & word
        low, high = low + 0x9E3779B9 & word, high + 0xBB67AE85 & word
    return ((a, b, c, d)[key // 8 % 4] >> (0 if query // 8 % 2 == 0 else 16)) & 0x7FFF >= DROPPED


@unittest.skipIf(NO_NUMPY, NO_NUMPY)
class Arrays(unittest.TestCase):
    def setUp(self):
        random = numpy.random.default_rng(3)
        self.draw = lambda *shape: random.standard_normal(shape).astype("float32")
        # The first queries see no key: bottom-right.
        self.qkv = self.draw(2, 9, 4, 16), self.draw(2, 6, 2, 16), self.draw(2, 6, 2, 16)
        self.state = numpy.array([SEED, OFFSET], "int64")
        self.options = {"dropout_p": 0.3, "dropout_state": self.state}

    def test_the_mask(self):
        mask = hopper_attention.dropout_mask(0.3, self.state, 2, 3, 20, 70)
        self.assertEqual((mask.shape, mask.dtype), ((2, 3, 20, 70), bool))
        for place in numpy.ndindex(mask.shape):
            self.assertEqual(mask[place], keeps(SEED, OFFSET, 3, *place), place)
        self.assertTrue((mask == hopper_attention.dropout_mask(0.3, (SEED, OFFSET), 2, 3, 20, 70)).all())
        # Negative numbers are those with the same bits.
        state = numpy.array([-1, -(2**63)], "int64")
        mask = hopper_attention.dropout_mask(0.3, state, 1, 1, 9, 40)
        for place in numpy.ndindex(mask.shape):
            self.assertEqual(mask[place], keeps(2**64 - 1, 2**63, 1, *place), place)
        self.assertTrue(hopper_attention.dropout_mask(0.0, state, 1, 1, 9, 40).all())
        self.assertRaisesRegex(ValueError, "dropout_p: 1.0", hopper_attention.dropout_mask, 1.0, state, 1, 1, 1, 1)

    def test_the_mask_is_that_of_a_run(self):
        # Keys are alike, and the value of a key is 1 at its own place.
        zeros = numpy.zeros((2, 20, 3, 64), "float32")
        v = numpy.broadcast_to(numpy.eye(64, dtype="float32")[None, :, None], (2, 64, 3, 64)).copy()
        k = numpy.zeros_like(v)
        o, lse = hopper_attention.attention(zeros, k, v, return_lse=True, **self.options)
        mask = hopper_attention.dropout_mask(0.3, self.state, 2, 3, 20, 64).transpose(0, 2, 1, 3)
        numpy.testing.assert_allclose(o, mask * (32768 / (32768 - DROPPED) / 64), rtol=1e-6)
        numpy.testing.assert_allclose(lse, numpy.log(64), rtol=1e-6)

    def test_attention_and_gradients(self):
        q, k, v = (t.astype("float64") for t in self.qkv)
        k, v = (numpy.repeat(t, 2, 2) for t in (k, v))
        factors = hopper_attention.dropout_mask(0.3, self.state, 2, 4, 9, 6) * (32768 / (32768 - DROPPED))
        causal = numpy.tril(numpy.ones((9, 6)), -3)
        p = numpy.exp(numpy.einsum("bihd,bjhd->bhij", q, k) / 4) * causal
        sums = p.sum(-1, keepdims=True)
        p = p / numpy.where(sums == 0, 1, sums)
        o, lse = hopper_attention.attention(*self.qkv, causal=True, return_lse=True, **self.options)
        want = numpy.einsum("bhij,bjhd->bihd", p * factors, v)
        numpy.testing.assert_allclose(o, want, atol=1e-5)
        with numpy.errstate(divide="ignore"):
            numpy.testing.assert_allclose(lse, numpy.log(sums[..., 0]), atol=1e-5)
        d_o = self.draw(*o.shape)
        d_p = numpy.einsum("bihd,bjhd->bhij", d_o, v) * factors
        d_s = p * (d_p - (d_o * want).sum(-1).transpose(0, 2, 1)[..., None]) / 4
        pairs = lambda t: t.reshape(2, 6, 2, 2, 16).sum(3)
        exact = (
            numpy.einsum("bhij,bjhd->bihd", d_s, k),
            pairs(numpy.einsum("bhij,bihd->bjhd", d_s, q)),
            pairs(numpy.einsum("bhij,bihd->bjhd", p * factors, d_o)),
        )
        got = hopper_attention.attention_backward(*self.qkv, o, lse, d_o, causal=True, **self.options)
        for mine, its in zip(got, exact):
            numpy.testing.assert_allclose(mine, its, atol=2e-5)
        # The words are the memory of both numbers, and another offset is another mask.
        words = {"dropout_p": 0.3, "dropout_state": self.state.view("int32")}
        self.assertTrue((hopper_attention.attention(*self.qkv, causal=True, **words) == o).all())
        other = {"dropout_p": 0.3, "dropout_state": self.state + numpy.array([0, 1])}
        self.assertFalse((hopper_attention.attention(*self.qkv, causal=True, **other) == o).all())

    def test_packed(self):
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in self.qkv)
        lengths = {"cu_seqlens_q": numpy.array([0, 9, 18]), "cu_seqlens_kv": numpy.array([0, 6, 12])}
        o, lse = hopper_attention.attention_varlen(q, k, v, **lengths, return_lse=True, **self.options)
        want, want_lse = hopper_attention.attention(*self.qkv, return_lse=True, **self.options)
        self.assertTrue((o.reshape(want.shape) == want).all())
        d = hopper_attention.attention_varlen_backward(q, k, v, o, lse, o, **lengths, **self.options)
        want = hopper_attention.attention_backward(*self.qkv, want, want_lse, want, **self.options)
        for mine, exact in zip(d, want):
            self.assertTrue((mine.reshape(exact.shape) == exact).all())

    def test_refusals(self):
        attention = hopper_attention.attention
        self.assertRaisesRegex(TypeError, "dropout_state: missing", attention, *self.qkv, dropout_p=0.5)
        self.assertRaisesRegex(ValueError, "dropout_state: given", attention, *self.qkv, dropout_state=self.state)
        self.assertRaisesRegex(TypeError, "generator: for torch", attention, *self.qkv, generator=1)
        with self.assertRaisesRegex(ValueError, r"dropout_state: shape \[6\] of words"):
            attention(*self.qkv, dropout_p=0.5, dropout_state=numpy.arange(3))
        for probability in (1.0, -0.5, float("nan"), 0.99999):
            with self.assertRaisesRegex(hopper_attention.HattnError, "dropout: "):
                attention(*self.qkv, dropout_p=probability, dropout_state=self.state)


@unittest.skipIf(NO_TORCH, NO_TORCH)
class Torch(unittest.TestCase):
    SLOPES = (0.5, 0.25, -0.125, 4.0)

    def inputs(self):
        torch.manual_seed(1)
        shapes = (2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 16)
        return [torch.randn(shape).requires_grad_() for shape in shapes] + [torch.randn(4).requires_grad_()]

    def factors(self, probability, state, *sizes):
        kept = round(probability * 32768)
        return hopper_attention.dropout_mask(probability, state, *sizes).double() * (32768 / (32768 - kept))

    def check(self, attention):
        state = torch.tensor([SEED, OFFSET])
        for probability, causal, cap, more in ((0.3, False, None, False), (0.5, True, 15.0, True)):
            *qkv, sinks = self.inputs()
            leaves = [*qkv, sinks] if more else qkv
            slopes = torch.tensor(self.SLOPES) if more else None
            options = {"causal": causal, "softcap": cap, "s_aux": sinks if more else None, "alibi_slopes": slopes}
            dropout = {"dropout_p": probability, "dropout_state": state}
            o, lse, max_logits = attention(*qkv, return_lse=True, return_max_logits=True, **options, **dropout)
            exact = [t.detach().double().requires_grad_() for t in leaves]
            keep = causal_keep(9, 13) if causal else torch.ones(9, 13, dtype=torch.bool)
            factors = self.factors(probability, state, 2, 4, 9, 13)
            want = reference(*exact[:3], keep, slopes, cap, exact[3] if more else None, factors=factors)
            for mine, its_own in zip((o, lse, max_logits), want):
                torch.testing.assert_close(mine.double(), its_own, atol=2e-5, rtol=0)
            d_o, d_lse = torch.randn_like(o), torch.randn_like(lse)
            mine = torch.autograd.grad((o * d_o).sum() + (lse * d_lse).sum(), leaves)
            loss = (want[0] * d_o.double()).sum() + (want[1] * d_lse.double()).sum()
            for a, b in zip(mine, torch.autograd.grad(loss, exact)):
                torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=2e-5)

    def test_outputs_and_gradients(self):
        self.check(hopper_attention.attention)

    def test_compiled(self):
        def compiled(*operands, **options):
            torch._dynamo.reset()
            return torch.compile(hopper_attention.attention, fullgraph=True, backend="aot_eager")(*operands, **options)

        self.check(compiled)

    def test_with_masks_and_biases(self):
        state, probability = torch.tensor([SEED, OFFSET]), 0.25
        torch.manual_seed(2)
        kept, bias = torch.rand(2, 1, 9, 13) < 0.7, torch.randn(1, 4, 1, 13)
        factors = self.factors(probability, state, 2, 4, 9, 13)
        of_kept = torch.zeros(kept.shape).masked_fill(~kept, -torch.inf)
        for options, keeps, adds in (
            ({"attn_mask": kept}, True, False),
            ({"block_mask": hopper_attention.block_lists(kept, *self.inputs()[:2])}, True, False),
            ({"bias": bias.clone().requires_grad_()}, False, True),
            ({"attn_mask": bias.clone().requires_grad_()}, False, True),
            ({"attn_mask": kept, "bias": bias.clone().requires_grad_()}, True, True),
            ({"attn_mask": (of_kept + bias).requires_grad_()}, True, True),
        ):
            with self.subTest(options=list(options)):
                *qkv, _ = self.inputs()
                leaves = [*qkv, *(t for t in options.values() if isinstance(t, torch.Tensor) and t.requires_grad)]
                o, lse = hopper_attention.attention(
                    *qkv, return_lse=True, dropout_p=probability, dropout_state=state, **options
                )
                exact = [t.detach().double().requires_grad_() for t in leaves]
                keep = kept if keeps else torch.ones(9, 13, dtype=torch.bool)
                want = reference(*exact[:3], keep, bias=exact[3] if adds else None, factors=factors)
                torch.testing.assert_close(o.double(), want[0], atol=2e-5, rtol=0)
                torch.testing.assert_close(lse.double(), want[1], atol=2e-5, rtol=0)
                d_o = torch.randn_like(o)
                mine = torch.autograd.grad((o * d_o).sum(), leaves)
                for a, b in zip(mine, torch.autograd.grad((want[0] * d_o.double()).sum(), exact)):
                    torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=2e-5)

    def test_compiled_with_masks_and_biases(self):
        state, kept = torch.tensor([SEED, OFFSET]), torch.rand(1, 1, 9, 13) < 0.7
        options = {"dropout_p": 0.25, "dropout_state": state, "attn_mask": kept}
        found = []
        for attention in (
            hopper_attention.attention,
            torch.compile(hopper_attention.attention, fullgraph=True, backend="aot_eager"),
        ):
            torch.manual_seed(3)
            bias = torch.randn(1, 4, 9, 13, requires_grad=True)
            *qkv, _ = self.inputs()
            o = attention(*qkv, bias=bias, **options)
            found.append((o.detach(), *torch.autograd.grad(o.square().sum(), [*qkv, bias])))
        for mine, its_own in zip(*found):
            torch.testing.assert_close(mine, its_own)

    def test_operators_are_what_torch_expects(self):
        q, k, v, sinks = self.inputs()
        state, slopes = torch.tensor([SEED, OFFSET]), torch.tensor(self.SLOPES)
        numbers = (0.25, hopper_attention.abi.MASK_CAUSAL, 0, 0, 0, 0, 0.0)
        for own, of, wanted in ((sinks, slopes, True), (None, None, False)):
            arguments = (q, k, v, own, of, None, state, *(None,) * 9, 0, 0, False, False, *numbers, 0.3, 0, wanted)
            torch.library.opcheck(torch.ops.hopper_attention.modified_forward, arguments)

    def test_drawn_states(self):
        q, k, v, _ = self.inputs()
        attend = lambda **more: hopper_attention.attention(q, k, v, dropout_p=0.5, **more)
        torch.manual_seed(5)
        first, second = attend(), attend()
        torch.manual_seed(5)
        self.assertTrue(torch.equal(first, attend()) and not torch.equal(first, second))
        generator = torch.Generator().manual_seed(9)
        own = attend(generator=generator)
        self.assertTrue(torch.equal(own, attend(generator=torch.Generator().manual_seed(9))))
        self.assertFalse(torch.equal(own, attend(generator=generator)))
        # One drawn state serves both passes: with a loss of o, dV has the weights of o.
        values = v.detach().requires_grad_()
        direction = torch.randn_like(values)
        torch.manual_seed(5)
        before = hopper_attention.attention(q.detach(), k.detach(), v.detach(), dropout_p=0.5)
        torch.manual_seed(5)
        moved = hopper_attention.attention(q.detach(), k.detach(), (v.detach() + direction), dropout_p=0.5)
        torch.manual_seed(5)
        again = hopper_attention.attention(q.detach(), k.detach(), values, dropout_p=0.5)
        (d_v,) = torch.autograd.grad(again.sum(), values)
        torch.testing.assert_close((moved - before).sum(), (d_v * direction).sum(), atol=1e-3, rtol=1e-4)

    def test_packed_and_nested(self):
        q, k, v, _ = (t.detach() for t in self.inputs())
        dropout = {"dropout_p": 0.3, "dropout_state": torch.tensor([SEED, OFFSET])}
        want = hopper_attention.attention(q, k, v, **dropout)
        lengths = torch.tensor([0, 9, 18]), torch.tensor([0, 13, 26])
        packed = hopper_attention.attention_varlen(*(t.flatten(0, 1) for t in (q, k, v)), *lengths, **dropout)
        self.assertTrue(torch.equal(packed.reshape(want.shape), want))
        nested = [torch.nested.nested_tensor(list(t), layout=torch.jagged) for t in (q, k)]
        values = torch.nested.nested_tensor_from_jagged(v.flatten(0, 1), nested[1].offsets())
        o = hopper_attention.attention(*nested, values, **dropout)
        self.assertTrue(torch.equal(o.values().reshape(want.shape), want))

    def test_refusals(self):
        q, k, v, _ = self.inputs()
        attention, state = hopper_attention.attention, torch.tensor([1, 2])
        self.assertRaisesRegex(ValueError, "dropout_state: given with", attention, q, k, v, dropout_state=state)
        self.assertRaisesRegex(ValueError, "generator: given with", attention, q, k, v, generator=torch.Generator())
        for wrong in (state.int(), (1, 2)):
            with self.assertRaisesRegex(TypeError, "dropout_state: "):
                attention(q, k, v, dropout_p=0.5, dropout_state=wrong)
        with self.assertRaisesRegex(ValueError, r"dropout_state: shape \[3\]"):
            attention(q, k, v, dropout_p=0.5, dropout_state=torch.tensor([1, 2, 3]))
        with self.assertRaisesRegex(ValueError, "generator: given beside"):
            attention(q, k, v, dropout_p=0.5, dropout_state=state, generator=torch.Generator())
        with self.assertRaisesRegex(hopper_attention.HattnError, "dropout: 1"):
            attention(q, k, v, dropout_p=1.0)

    @unittest.skipIf(NO_GPU, NO_GPU)
    def test_a_gpu_drops_what_the_cpu_drops(self):
        for dtype, bound in ((torch.bfloat16, 2e-2), (torch.float16, 4e-3)):
            for causal in (False, True):
                inputs = [torch.randn(2, rows, heads, 64) for rows, heads in ((260, 4), (390, 2), (390, 2), (260, 4))]
                state = torch.tensor([5, 1 << 33])
                runs = []
                for device, of_run in (("cuda", dtype), ("cpu", torch.float32)):
                    q, k, v, d_o = (t.to(dtype).to(device, of_run).requires_grad_() for t in inputs)
                    o = hopper_attention.attention(q, k, v, causal, dropout_p=0.3, dropout_state=state)
                    gradients = torch.autograd.grad(o, (q, k, v), d_o.detach())
                    runs.append([t.detach().cpu().float() for t in (o, *gradients)])
                for got, want in zip(*runs):
                    self.assertLess((got - want).abs().max(), bound * want.abs().max())

    @unittest.skipIf(NO_GPU, NO_GPU)
    def test_a_gpu_takes_wide_windows_too(self):
        """By sm80 kernels."""
        inputs = [torch.randn(1, 140, 2, 192, dtype=torch.float16) for _ in range(3)]
        state = torch.tensor([5, 1 << 33])
        options = {"window": (90, 0), "dropout_p": 0.5, "dropout_state": state}
        got = hopper_attention.attention(*(t.cuda() for t in inputs), **options).cpu().float()
        want = hopper_attention.attention(*(t.float() for t in inputs), **options)
        self.assertLess((got - want).abs().max(), 4e-3 * want.abs().max())


if __name__ == "__main__":
    unittest.main()
