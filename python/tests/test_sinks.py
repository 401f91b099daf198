"""Attention sinks: arrays and torch tensors against the definition, gradients, packed sequences, gpt-oss."""

import unittest
import warnings

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
    NO_TORCH = None


def exact(q, k, v, keep, sinks):
    """O and the log-sum-exp in f64: [batch, seqlen, heads, head_dim], with a key more that has no value."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (t.astype("float64") for t in (q, k.repeat(groups, 2), v.repeat(groups, 2)))
    scores = numpy.einsum("bqhd,bkhd->bhqk", q, k) / numpy.sqrt(q.shape[-1])
    scores = numpy.where(keep, scores, -numpy.inf)
    column = numpy.broadcast_to(sinks.astype("float64")[None, :, None, None], (*scores.shape[:3], 1))
    scores = numpy.concatenate((scores, column), -1)
    lse = numpy.log(numpy.exp(scores).sum(-1))
    weights = numpy.exp(scores - lse[..., None])[..., :-1]
    return numpy.einsum("bhqk,bkhd->bqhd", weights, v), lse


@unittest.skipIf(NO_NUMPY, NO_NUMPY)
class Arrays(unittest.TestCase):
    def setUp(self):
        random = numpy.random.default_rng(3)
        self.draw = lambda *shape: random.standard_normal(shape).astype("float32")
        self.qkv = self.draw(2, 9, 4, 16), self.draw(2, 6, 2, 16), self.draw(2, 6, 2, 16)
        # The first queries see no key: bottom-right.
        self.keep = numpy.arange(6) <= numpy.arange(9)[:, None] - 3
        self.sinks = numpy.array([0.0, 1.5, -2.0, 10.0], "float32")

    def test_attention(self):
        o, lse = hopper_attention.attention(*self.qkv, causal=True, return_lse=True, s_aux=self.sinks)
        want, want_lse = exact(*self.qkv, self.keep, self.sinks)
        numpy.testing.assert_allclose(o, want, atol=1e-5)
        numpy.testing.assert_allclose(lse, want_lse, atol=1e-5)
        self.assertTrue((o[:, :3] == 0).all() and (lse[:, :, 0] == self.sinks).all())
        none = hopper_attention.attention(*self.qkv, causal=True)
        nothing = numpy.full(4, -numpy.inf, "float32")
        self.assertTrue((hopper_attention.attention(*self.qkv, causal=True, s_aux=nothing) == none).all())
        self.assertGreater(abs(o - none).max(), 0.05)

    def test_gradients(self):
        o, lse = hopper_attention.attention(*self.qkv, causal=True, return_lse=True, s_aux=self.sinks)
        d_o, d_lse = self.draw(*o.shape), self.draw(*lse.shape)
        *_, d_sinks = hopper_attention.attention_backward(
            *self.qkv, o, lse, d_o, d_lse, causal=True, s_aux=self.sinks
        )
        self.assertEqual((d_sinks.shape, d_sinks.dtype), ((4,), numpy.dtype("float32")))
        for head in range(4):
            slopes = []
            for step in (1e-5, -1e-5):
                moved = self.sinks.astype("float64")
                moved[head] += step
                o_of, lse_of = exact(*self.qkv, self.keep, moved)
                slopes.append((o_of * d_o).sum() + (lse_of * d_lse).sum())
            self.assertAlmostEqual(d_sinks[head], (slopes[0] - slopes[1]) / 2e-5, delta=1e-3)

    def test_packed(self):
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in self.qkv)
        lengths = {"cu_seqlens_q": numpy.array([0, 9, 18]), "cu_seqlens_kv": numpy.array([0, 6, 12])}
        options = {"causal": True, "s_aux": self.sinks}
        o, lse = hopper_attention.attention_varlen(q, k, v, **lengths, return_lse=True, **options)
        want, want_lse = hopper_attention.attention(*self.qkv, return_lse=True, **options)
        self.assertTrue((o.reshape(want.shape) == want).all())
        self.assertTrue((lse.reshape(4, 2, 9).transpose(1, 0, 2) == want_lse).all())
        d = hopper_attention.attention_varlen_backward(q, k, v, o, lse, o, **lengths, **options)
        want = hopper_attention.attention_backward(*self.qkv, want, want_lse, want, **options)
        self.assertEqual(len(d), 4)
        numpy.testing.assert_allclose(d[3], want[3], rtol=1e-5)

    def test_refusals(self):
        with self.assertRaisesRegex(hopper_attention.HattnError, "sinks: shape"):
            hopper_attention.attention(*self.qkv, s_aux=self.sinks[:3])
        with self.assertRaisesRegex(hopper_attention.HattnError, "sinks"):
            hopper_attention.attention(*self.qkv, s_aux=self.sinks.astype("float16"))
        with self.assertRaisesRegex(ValueError, "s_aux: 2 dimensions"):
            hopper_attention.attention(*self.qkv, s_aux=self.sinks[None])


@unittest.skipIf(NO_TORCH, NO_TORCH)
class Torch(unittest.TestCase):
    def reference(self, q, k, v, sinks, causal):
        groups = q.shape[2] // k.shape[2]
        q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if causal:
            keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
            scores = scores.masked_fill(~keep, -torch.inf)
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
        return (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2), scores.logsumexp(-1)

    def inputs(self, dtype=torch.float32 if not NO_TORCH else None):
        torch.manual_seed(1)
        shapes = (2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 16)
        return [torch.randn(shape, requires_grad=True) for shape in shapes] + [
            torch.randn(4, dtype=dtype).requires_grad_()
        ]

    def test_outputs_and_gradients(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for causal in (False, True):
                with self.subTest(dtype=dtype, causal=causal):
                    q, k, v, sinks = self.inputs(dtype)
                    got = hopper_attention.attention(q, k, v, causal=causal, return_lse=True, s_aux=sinks)
                    want = self.reference(q, k, v, sinks, causal)
                    for mine, exact in zip(got, want):
                        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-5)
                    weights = [torch.randn_like(t) for t in want]
                    found = [
                        torch.autograd.grad(outputs, (q, k, v, sinks), weights) for outputs in (got, want)
                    ]
                    for mine, exact in zip(*found):
                        self.assertEqual(mine.dtype, exact.dtype)
                        rtol = 1e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-4
                        torch.testing.assert_close(mine, exact, rtol=rtol, atol=1e-5)

    def test_packed_and_nested(self):
        q, k, v, sinks = self.inputs()
        packed = [t.detach().flatten(0, 1).requires_grad_() for t in (q, k, v)]
        own = sinks.detach().clone().requires_grad_()
        cu_q, cu_kv = torch.tensor([0, 9, 18]), torch.tensor([0, 13, 26])
        o = hopper_attention.attention_varlen(*packed, cu_q, cu_kv, causal=True, s_aux=own)
        want = hopper_attention.attention(q, k, v, causal=True, s_aux=sinks)
        torch.testing.assert_close(o.view(want.shape), want, rtol=0, atol=0)
        o.square().sum().backward()
        want.square().sum().backward()
        torch.testing.assert_close(own.grad, sinks.grad, rtol=1e-5, atol=1e-6)
        ragged = [torch.nested.as_nested_tensor(list(t.detach()), layout=torch.jagged) for t in (q, k)]
        # Nested tensors of the same lengths share their offsets.
        ragged.append(torch.nested.nested_tensor_from_jagged(v.detach().flatten(0, 1), ragged[1].offsets()))
        nested = hopper_attention.attention(*ragged, causal=True, s_aux=sinks)
        torch.testing.assert_close(nested.values().view(want.shape), want.detach(), rtol=0, atol=0)

    def test_compiled_and_exported(self):
        """One graph, forward and backward, and the same numbers."""

        def loss(q, k, v, sinks):
            o, lse = hopper_attention.attention(q, k, v, causal=True, return_lse=True, s_aux=sinks)
            return o.square().sum() + lse.sin().sum()

        for dtype in (torch.float32, torch.bfloat16):
            inputs = self.inputs(dtype)
            want = loss(*inputs)
            exact = torch.autograd.grad(want, inputs)
            torch._dynamo.reset()
            got = torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs)
            torch.testing.assert_close(got, want, rtol=0, atol=0)
            for mine, other in zip(torch.autograd.grad(got, inputs), exact):
                self.assertEqual(mine.dtype, other.dtype)
                torch.testing.assert_close(mine, other, rtol=0, atol=0)

        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.sinks = torch.nn.Parameter(torch.randn(4))

            def forward(self, q, k, v):
                return hopper_attention.attention(q, k, v, causal=True, s_aux=self.sinks)

        layer, qkv = Layer(), [t.detach() for t in self.inputs()[:3]]
        exported = torch.export.export(layer, tuple(qkv))
        names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
        self.assertIn("hopper_attention.forward_sinks.default", names)
        torch.testing.assert_close(exported.module()(*qkv), layer(*qkv), rtol=0, atol=0)

    def test_second_derivatives_are_refused(self):
        q, k, v, sinks = self.inputs()
        o = hopper_attention.attention(q, k, v, s_aux=sinks)
        (gradient,) = torch.autograd.grad(o.square().sum(), sinks, create_graph=True)
        with self.assertRaisesRegex(NotImplementedError, "second derivative"):
            gradient.sum().backward()

    def test_the_operators_are_sound(self):
        q, k, v, sinks = self.inputs()
        torch.library.opcheck(torch.ops.hopper_attention.forward_sinks.default, (q, k, v, sinks, 0.0, 1, 0, 0, 0))
        arguments = (q, k, v, sinks, None, None, None, None, 0, 0, False, False, 0.0, 0, 0, 0, 0, 0)
        torch.library.opcheck(torch.ops.hopper_attention.sinks_forward.default, arguments)

    def test_refusals(self):
        q, k, v, sinks = self.inputs()
        self.assertRaisesRegex(TypeError, "s_aux: torch.int64", hopper_attention.attention, q, k, v, s_aux=sinks.long())
        self.assertRaisesRegex(ValueError, "s_aux: 2 dim", hopper_attention.attention, q, k, v, s_aux=sinks[None])
        with self.assertRaisesRegex(hopper_attention.HattnError, "sinks: shape"):
            hopper_attention.attention(q, k, v, s_aux=sinks[:2])

    def gpt_oss(self, window, masks, rows):
        """Logits and gradients of a small random model: as transformers' own attention. Gives the first logits."""
        try:
            from transformers import GptOssConfig, GptOssForCausalLM
        except ImportError as error:
            self.skipTest(str(error))
        warnings.filterwarnings("ignore")
        hopper_attention.register_transformers()
        torch.manual_seed(2)
        sizes = {"hidden_size": 32, "intermediate_size": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        config = GptOssConfig(vocab_size=50, num_hidden_layers=2, sliding_window=window, **sizes, **heads)
        self.assertEqual(config.layer_types, ["sliding_attention", "full_attention"])
        model = GptOssForCausalLM(config).eval()
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                torch.nn.init.normal_(projection.weight, std=0.3)
        ids = torch.randint(50, (3, rows))
        first = None
        for mask in masks:
            found = []
            for name in ("eager", "hopper_attention"):
                model.set_attn_implementation(name)
                logits = model(input_ids=ids, attention_mask=mask).logits
                if mask is not None:
                    logits = logits * mask[..., None]
                made = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
                found.append((logits.detach(), dict(zip((name for name, _ in model.named_parameters()), made))))
            torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
            for name, theirs in found[0][1].items():
                torch.testing.assert_close(found[1][1][name], theirs, rtol=1e-3, atol=1e-6)
                if "sinks" in name:
                    self.assertGreater(theirs.abs().max().item(), 0)
            first = found[1][0] if first is None else first
        return first

    def test_gpt_oss(self):
        """With padding and without, gradients of all parameters, those of the sinks too."""
        padding = torch.ones(3, 20, dtype=torch.long)
        padding[1, 15:] = 0
        padding[2, :6] = 0
        self.gpt_oss(5, (None, padding), 20)

    def test_gpt_oss_with_its_own_window(self):
        """128 keys, of more tokens than that: a query sees neither all keys nor, without a window, the same ones."""
        padding = torch.ones(3, 200, dtype=torch.long)
        padding[1, 150:] = 0
        padding[2, :40] = 0
        narrow = self.gpt_oss(128, (None, padding), 200)
        wide = self.gpt_oss(300, (None,), 200)
        self.assertTrue(torch.allclose(wide[:, :128], narrow[:, :128], rtol=1e-4, atol=1e-5))
        self.assertGreater((wide[:, 128:] - narrow[:, 128:]).abs().amax(-1).min().item(), 1e-5)


if __name__ == "__main__":
    unittest.main()
