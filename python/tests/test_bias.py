"""The additive bias and its gradient: arrays and torch tensors against the definition, for each shared dimension.

test_varlen.py and test_varlen_arrays.py have those of packed sequences.
"""

import itertools
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

#: Of batch, heads_q, seqlen_q and seqlen_kv.
SIZES = (2, 4, 9, 11)


@unittest.skipIf(NO_NUMPY, NO_NUMPY)
class Arrays(unittest.TestCase):
    def setUp(self):
        random = numpy.random.default_rng(3)
        self.draw = lambda *shape: random.standard_normal(shape).astype("float32")
        self.qkv = self.draw(2, 9, 4, 16), self.draw(2, 11, 2, 16), self.draw(2, 11, 2, 16)

    def plain(self, bias, causal):
        """O and the log-sum-exp by numpy, in f64."""
        q, k, v = (t.astype("float64").swapaxes(1, 2) for t in self.qkv)
        k, v = (t.repeat(2, axis=1) for t in (k, v))
        scores = q @ k.swapaxes(2, 3) / 4 + bias
        if causal:
            scores = numpy.where(numpy.tril(numpy.ones((9, 11), bool), 2), scores, -numpy.inf)
        largest = numpy.maximum(scores.max(-1, keepdims=True), -1e30)
        weights = numpy.exp(scores - largest)
        total = weights.sum(-1, keepdims=True)
        with numpy.errstate(divide="ignore", invalid="ignore"):
            lse, weights = numpy.log(total) + largest, numpy.where(total > 0, weights / total, 0)
        return (weights @ v).swapaxes(1, 2), lse[..., 0]

    def test_each_shared_dimension(self):
        for own in itertools.product((False, True), repeat=3):
            with self.subTest(own=own):
                shape = [size if mine else 1 for mine, size in zip((*own, True), SIZES)]
                bias = self.draw(*shape)
                bias[..., 3] = -numpy.inf
                for causal in (False, True):
                    o, lse = hopper_attention.attention(*self.qkv, causal=causal, return_lse=True, bias=bias)
                    want, want_lse = self.plain(bias, causal)
                    numpy.testing.assert_allclose(o, want, atol=1e-5)
                    numpy.testing.assert_allclose(lse, want_lse, atol=1e-5)
                    d_o = self.draw(*o.shape)
                    *_, d_bias = hopper_attention.attention_backward(
                        *self.qkv, o, lse, d_o, causal=causal, bias=bias, return_d_bias=True
                    )
                    self.assertEqual(d_bias.shape, bias.shape)
                    self.assertTrue((d_bias[..., 3] == 0).all())
                    # The quotient of differences along a random direction.
                    direction = self.draw(*shape).astype("float64")
                    step, losses = 1e-4, []
                    for sign in (1, -1):
                        losses.append((self.plain(bias.astype("float64") + sign * step * direction, causal)[0] * d_o).sum())
                    found = (losses[0] - losses[1]) / (2 * step)
                    self.assertAlmostEqual((d_bias * direction).sum(), found, delta=2e-3)

    def test_forms(self):
        bias = self.draw(9, 11)
        o = hopper_attention.attention(*self.qkv, bias=bias)
        same = hopper_attention.attention(*self.qkv, attn_mask=bias)
        self.assertTrue((o == same).all())
        wide = hopper_attention.attention(*self.qkv, bias=numpy.broadcast_to(bias, SIZES).astype("float64"))
        self.assertTrue((o == wide).all())
        half = hopper_attention.attention(*self.qkv, bias=bias.astype("float16"))
        numpy.testing.assert_allclose(half, o, atol=1e-2)
        # A column that all keys share changes nothing.
        column = hopper_attention.attention(*self.qkv, bias=self.draw(9, 1))
        numpy.testing.assert_allclose(column, hopper_attention.attention(*self.qkv), atol=1e-5)
        # Beside a mask of booleans.
        kept = self.draw(9, 11) > -0.5
        both = hopper_attention.attention(*self.qkv, bias=bias, attn_mask=kept)
        hidden = hopper_attention.attention(*self.qkv, bias=numpy.where(kept, bias, -numpy.inf))
        numpy.testing.assert_allclose(both, hidden, atol=1e-6)

    def test_refusals(self):
        with self.assertRaisesRegex(ValueError, r"bias: shape \[9, 10\]; allowed: one that broadcasts"):
            hopper_attention.attention(*self.qkv, bias=self.draw(9, 10))
        with self.assertRaisesRegex(ValueError, "attn_mask: floating-point numbers, beside a bias"):
            hopper_attention.attention(*self.qkv, bias=self.draw(9, 11), attn_mask=self.draw(9, 11))
        with self.assertRaisesRegex(TypeError, "bias: an element type that is not taken"):
            hopper_attention.attention(*self.qkv, bias=numpy.zeros((9, 11), "int64"))
        o, lse = hopper_attention.attention(*self.qkv, return_lse=True)
        with self.assertRaisesRegex(hopper_attention.HattnError, "d_bias: asked for"):
            hopper_attention.attention_backward(*self.qkv, o, lse, o, return_d_bias=True)


@unittest.skipIf(NO_TORCH, NO_TORCH)
class Tensors(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(3)
        self.qkv = torch.randn(2, 9, 4, 16), torch.randn(2, 11, 2, 16), torch.randn(2, 11, 2, 16)

    def test_gradients_of_each_shared_dimension(self):
        for own in itertools.product((False, True), repeat=3):
            with self.subTest(own=own):
                shape = [size if mine else 1 for mine, size in zip((*own, True), SIZES)]
                bias = torch.randn(shape).requires_grad_()
                sinks = torch.randn(4).requires_grad_()
                leaves = [t.clone().requires_grad_() for t in self.qkv]
                options = {"causal": True, "softcap": 1.5, "s_aux": sinks, "alibi_slopes": torch.tensor([0.5, 0.25, 0, 1])}
                o, lse, largest = hopper_attention.attention(
                    *leaves, return_lse=True, return_max_logits=True, bias=bias, **options
                )
                exact = [t.detach().double().requires_grad_() for t in (*leaves, sinks, bias)]
                want = reference(*exact[:3], causal_keep(9, 11), options["alibi_slopes"], 1.5, exact[3], bias=exact[4])
                for got, its in zip((o, lse, largest), want):
                    torch.testing.assert_close(got.double(), its.double(), atol=1e-5, rtol=1e-5)
                d_o, d_lse = torch.randn_like(o), torch.randn_like(lse)
                loss = (o * d_o).sum() + (lse * d_lse).sum()
                found = torch.autograd.grad(loss, (*leaves, sinks, bias))
                loss = (want[0] * d_o).sum() + (want[1] * d_lse).sum()
                for got, its in zip(found, torch.autograd.grad(loss, exact)):
                    torch.testing.assert_close(got.double(), its, atol=3e-5, rtol=1e-5)

    def test_a_float_mask_is_a_bias(self):
        bias = torch.randn(9, 11, requires_grad=True)
        q, k, v = self.qkv
        o = hopper_attention.attention(q, k, v, attn_mask=bias)
        (d_bias,) = torch.autograd.grad(o.sum(), bias)
        heads = (t.transpose(1, 2) for t in (q, k, v))
        want = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=bias, enable_gqa=True)
        torch.testing.assert_close(o, want.transpose(1, 2), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(d_bias, torch.autograd.grad(want.sum(), bias)[0], atol=1e-5, rtol=1e-4)

    def test_what_hides_and_what_lies_otherwise(self):
        q, k, v = self.qkv
        kept = torch.rand(2, 1, 9, 11) < 0.6
        kept[:, :, 4] = False
        hidden = torch.zeros(kept.shape).masked_fill(~kept, -torch.inf)
        o, lse = hopper_attention.attention(q, k, v, bias=hidden, return_lse=True)
        want, want_lse = hopper_attention.attention(q, k, v, attn_mask=kept, return_lse=True)
        torch.testing.assert_close(o, want)
        torch.testing.assert_close(lse, want_lse)
        self.assertTrue((o[:, 4] == 0).all() and (lse[:, :, 4] == -torch.inf).all())
        # Types of its own, transposed, expanded, of one column, and beside lists of blocks.
        bias = torch.randn(11, 9, dtype=torch.bfloat16).t()
        o = hopper_attention.attention(q, k, v, bias=bias)
        torch.testing.assert_close(o, hopper_attention.attention(q, k, v, bias=bias.float().contiguous()))
        torch.testing.assert_close(o, hopper_attention.attention(q, k, v, bias=bias.expand(2, 4, 9, 11)))
        column = torch.randn(9, 1, requires_grad=True)
        made = hopper_attention.attention(q, k, v, bias=column)
        torch.testing.assert_close(made, hopper_attention.attention(q, k, v), atol=1e-5, rtol=1e-5)
        self.assertEqual(torch.autograd.grad(made.sum(), column)[0].shape, (9, 1))
        both = hopper_attention.attention(q, k, v, bias=bias, attn_mask=kept)
        torch.testing.assert_close(both, hopper_attention.attention(q, k, v, bias=bias.float() + hidden))

    def test_the_gradient_is_computed_where_it_is_wanted(self):
        q, k, v = (t.clone().requires_grad_() for t in self.qkv)
        hopper_attention.attention(q, k, v, bias=torch.randn(9, 11)).sum().backward()
        self.assertIsNotNone(q.grad)
        bias = torch.randn(4, 1, 11, requires_grad=True)
        hopper_attention.attention(*self.qkv, bias=bias).sum().backward()
        self.assertEqual(bias.grad.shape, (4, 1, 11))

    def test_torchs_own_checks_of_the_operators(self):
        bias = torch.randn(1, 4, 1, 11, requires_grad=True)
        leaves = [t.clone().requires_grad_() for t in self.qkv]
        rest = (*(None,) * 10, 0, 0, False, False, 0.0, 1, 0, 0, 0, 0, 0.0, 0.0, 0, False)
        operator = torch.ops.hopper_attention.modified_forward.default
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(operator, (*leaves, None, None, bias, *rest), test_utils=checks)

    def test_refusals(self):
        for error, text, given in (
            (ValueError, r"bias: shape \[9, 10\]; allowed: one that broadcasts", {"bias": torch.zeros(9, 10)}),
            (TypeError, "bias: torch.int64; allowed: tensors of floating-point", {"bias": torch.zeros(9, 11).long()}),
            (TypeError, "bias: list", {"bias": [0.0]}),
            (ValueError, "beside a bias", {"bias": torch.zeros(9, 11), "attn_mask": torch.zeros(9, 11)}),
        ):
            with self.subTest(text=text), self.assertRaisesRegex(error, text):
                hopper_attention.attention(*self.qkv, **given)
        ragged = torch.nested.nested_tensor([torch.randn(3, 4, 16)], layout=torch.jagged)
        with self.assertRaisesRegex(NotImplementedError, "attn_mask: given with nested tensors"):
            hopper_attention.attention(ragged, ragged, ragged, attn_mask=torch.zeros(3, 3))

    @unittest.skipIf(NO_GPU, NO_GPU)
    def test_a_gpu_adds_what_the_cpu_adds(self):
        for dtype, bound in ((torch.bfloat16, 2e-2), (torch.float16, 4e-3)):
            for shape in ((2, 4, 260, 390), (1, 4, 1, 390), (260, 390)):
                inputs = [torch.randn(2, rows, heads, 64) for rows, heads in ((260, 4), (390, 2), (390, 2), (260, 4))]
                bias = torch.randn(shape)
                bias[..., 7] = -torch.inf
                runs = []
                for device, of_run in (("cuda", dtype), ("cpu", torch.float32)):
                    q, k, v, d_o = (t.to(dtype).to(device, of_run).requires_grad_() for t in inputs)
                    of_device = bias.to(device).requires_grad_()
                    o = hopper_attention.attention(q, k, v, True, bias=of_device)
                    gradients = torch.autograd.grad(o, (q, k, v, of_device), d_o.detach())
                    runs.append([t.detach().cpu().float() for t in (o, *gradients)])
                for got, want in zip(*runs):
                    self.assertLess((got - want).abs().max(), bound * want.abs().max())

    @unittest.skipIf(NO_GPU, NO_GPU)
    def test_a_gpu_refuses_the_rest_by_name(self):
        q, k, v = (torch.randn(1, 40, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))
        with self.assertRaisesRegex(hopper_attention.HattnError, "softcap and a bias together"):
            hopper_attention.attention(q, k, v, softcap=20.0, bias=torch.zeros(40, device="cuda"))


if __name__ == "__main__":
    unittest.main()
