"""A cap of the scores: arrays and torch tensors against the definition, gradients, packed sequences, Gemma 2."""

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
        self.options = {"causal": True, "softcap": 1.5, "scale": 0.75}

    def exact(self, leaves, sinks=None):
        return reference(*leaves, causal_keep(9, 6), None, 1.5, sinks, 0.75)[:2]

    def test_attention_and_gradients(self):
        for sinks in (None, numpy.array([0.0, 1.5, -2.0, 3.0], "float32")):
            with self.subTest(sinks=sinks is not None):
                options = {**self.options, "s_aux": sinks}
                o, lse = hopper_attention.attention(*self.qkv, return_lse=True, **options)
                leaves = [torch.tensor(t, dtype=torch.float64, requires_grad=True) for t in self.qkv]
                its = None if sinks is None else torch.tensor(sinks, dtype=torch.float64, requires_grad=True)
                want, want_lse = self.exact(leaves, its)
                numpy.testing.assert_allclose(o, want.detach(), atol=1e-5)
                numpy.testing.assert_allclose(lse, want_lse.detach(), atol=1e-5)
                d_o, d_lse = self.draw(*o.shape), self.draw(*lse.shape)
                if sinks is None:
                    # Rows without keys have no gradient, whatever is given; torch's would be NaN.
                    rows = want_lse.detach() == -torch.inf
                    loss = (want * torch.tensor(d_o)).sum()
                    loss = loss + (torch.where(rows, 0, want_lse) * torch.tensor(d_lse)).sum()
                else:
                    loss = (want * torch.tensor(d_o)).sum() + (want_lse * torch.tensor(d_lse)).sum()
                found = torch.autograd.grad(loss, [*leaves, *([] if its is None else [its])])
                got = hopper_attention.attention_backward(*self.qkv, o, lse, d_o, d_lse, **options)
                self.assertEqual(len(got), len(found))
                for mine, exact in zip(got, found):
                    numpy.testing.assert_allclose(mine, exact.nan_to_num(), atol=2e-5)

    def test_packed(self):
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in self.qkv)
        lengths = {"cu_seqlens_q": numpy.array([0, 9, 18]), "cu_seqlens_kv": numpy.array([0, 6, 12])}
        o, lse = hopper_attention.attention_varlen(q, k, v, **lengths, return_lse=True, **self.options)
        want, want_lse = hopper_attention.attention(*self.qkv, return_lse=True, **self.options)
        self.assertTrue((o.reshape(want.shape) == want).all())
        self.assertTrue((lse.reshape(4, 2, 9).transpose(1, 0, 2) == want_lse).all())
        d = hopper_attention.attention_varlen_backward(q, k, v, o, lse, o, **lengths, **self.options)
        want = hopper_attention.attention_backward(*self.qkv, want, want_lse, want, **self.options)
        for mine, exact in zip(d, want):
            self.assertTrue((mine.reshape(exact.shape) == exact).all())

    def test_none_and_0_are_no_cap(self):
        none = hopper_attention.attention(*self.qkv)
        for softcap in (None, 0, 0.0, -0.0):
            self.assertTrue((hopper_attention.attention(*self.qkv, softcap=softcap) == none).all())
        self.assertGreater(abs(hopper_attention.attention(*self.qkv, softcap=0.5) - none).max(), 0.05)

    def test_refusals(self):
        for softcap in (-1.0, float("nan"), float("inf"), 1e-42):
            with self.assertRaisesRegex(hopper_attention.HattnError, "softcap: .*allowed: 0 .none., or finite and above 0"):
                hopper_attention.attention(*self.qkv, softcap=softcap)
        self.assertRaises((TypeError, ValueError), hopper_attention.attention, *self.qkv, softcap="fifty")


@unittest.skipIf(NO_TORCH, NO_TORCH)
class Torch(unittest.TestCase):
    def inputs(self, scale=3.0):
        torch.manual_seed(1)
        shapes = (2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 16)
        q, k, v = (torch.randn(shape) for shape in shapes)
        return [t.requires_grad_() for t in (scale * q, k, v)] + [torch.randn(4).requires_grad_()]

    def test_outputs_and_gradients(self):
        keeps = {False: torch.ones(9, 13, dtype=torch.bool), True: causal_keep(9, 13)}
        for cap in (1.0, 15.0, 50.0):
            for causal, with_sinks in ((False, False), (True, False), (True, True)):
                with self.subTest(cap=cap, causal=causal, with_sinks=with_sinks):
                    *qkv, sinks = self.inputs()
                    leaves = [*qkv, sinks] if with_sinks else qkv
                    s_aux = sinks if with_sinks else None
                    options = {"causal": causal, "softcap": cap, "s_aux": s_aux}
                    got = hopper_attention.attention(*qkv, return_lse=True, **options)
                    want = reference(*qkv, keeps[causal], None, cap, s_aux)[:2]
                    alone = hopper_attention.attention(*qkv, **options)
                    self.assertTrue(torch.equal(alone, got[0]))
                    for mine, exact in zip(got, want):
                        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-5)
                    weights = [torch.randn_like(t) for t in want]
                    found = [torch.autograd.grad(outputs, leaves, weights) for outputs in (got, want)]
                    for mine, exact in zip(*found):
                        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-5)

    def test_packed_and_nested(self):
        q, k, v, _ = self.inputs()
        packed = [t.detach().flatten(0, 1).requires_grad_() for t in (q, k, v)]
        cu_q, cu_kv = torch.tensor([0, 9, 18]), torch.tensor([0, 13, 26])
        o = hopper_attention.attention_varlen(*packed, cu_q, cu_kv, causal=True, softcap=2.0)
        want = hopper_attention.attention(q, k, v, causal=True, softcap=2.0)
        torch.testing.assert_close(o.view(want.shape), want, rtol=0, atol=0)
        gradients = torch.autograd.grad(o.square().sum(), packed)
        for mine, exact in zip(gradients, torch.autograd.grad(want.square().sum(), (q, k, v))):
            torch.testing.assert_close(mine.view(exact.shape), exact, rtol=1e-5, atol=1e-6)
        ragged = [torch.nested.as_nested_tensor(list(t.detach()), layout=torch.jagged) for t in (q, k)]
        # Nested tensors of the same lengths share their offsets.
        ragged.append(torch.nested.nested_tensor_from_jagged(v.detach().flatten(0, 1), ragged[1].offsets()))
        nested = hopper_attention.attention(*ragged, causal=True, softcap=2.0)
        torch.testing.assert_close(nested.values().view(want.shape), want.detach(), rtol=0, atol=0)

    def test_the_operators_are_sound(self):
        q, k, v, sinks = self.inputs()
        rest = (None, None, None, None, 0, 0, False, False, 0.0, 0, 0, 0, 0, 0, 2.0)
        ops = torch.ops.hopper_attention
        torch.library.opcheck(ops.varlen_forward_lse.default, (q, k, v, *rest))
        torch.library.opcheck(ops.sinks_forward.default, (q, k, v, sinks, *rest))
        # The cap came last, and may be left out.
        o = ops.varlen_forward.default(*(t.detach() for t in (q, k, v)), *rest[:-1])
        self.assertTrue(torch.equal(o, hopper_attention.attention(q, k, v).detach()))

    def test_compiled(self):
        q, k, v, _ = self.inputs()

        def function(q, k, v):
            return hopper_attention.attention(q, k, v, causal=True, softcap=2.0) * 2

        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        found = [torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v)) for call in (function, compiled)]
        torch.testing.assert_close(compiled(q, k, v), function(q, k, v), rtol=0, atol=0)
        for mine, exact in zip(*found):
            torch.testing.assert_close(mine, exact, rtol=0, atol=0)

    def test_refusals(self):
        q, k, v, _ = self.inputs()
        for softcap in (-1.0, float("nan")):
            with self.assertRaisesRegex(hopper_attention.HattnError, "softcap: "):
                hopper_attention.attention(q, k, v, softcap=softcap)


@unittest.skipIf(NO_TORCH, NO_TORCH)
class Gemma2(unittest.TestCase):
    """Small random models with caps that bend their scores, as transformers' own attention computes them."""

    def model(self, head_dim, cap):
        try:
            from transformers import Gemma2Config, Gemma2ForCausalLM
        except ImportError as error:
            self.skipTest(str(error))
        warnings.filterwarnings("ignore")
        hopper_attention.register_transformers()
        torch.manual_seed(2)
        sizes = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim}
        more = {"query_pre_attn_scalar": head_dim, "sliding_window": 7, "attn_logit_softcapping": cap}
        model = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, **more)).eval()
        for layer in model.model.layers:
            # Scores of some units: a cap of 1 bends them, and one of 50 hardly does.
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                torch.nn.init.normal_(projection.weight, std=0.2)
        return model

    def compare(self, head_dim, gradients, cap=1.0, **options):
        model = self.model(head_dim, cap)
        tokens = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(3))
        mask = options.get("attention_mask")
        found = []
        for name in ("eager", "hopper_attention"):
            model.set_attn_implementation(name)
            with torch.set_grad_enabled(gradients):
                logits = model(input_ids=tokens, **options).logits
            logits = logits if mask is None else logits * mask[..., None]
            made = torch.autograd.grad(logits.square().mean(), list(model.parameters())) if gradients else ()
            found.append((logits.detach(), made))
        (want, their), (got, own) = found
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        for mine, exact in zip(own, their):
            torch.testing.assert_close(mine, exact, rtol=1e-3, atol=1e-6)
        return model, tokens, got

    def test_head_dim_256(self):
        """Without gradients as in generate(), and with those of all parameters. The cap is used in both."""
        _, _, logits = self.compare(256, False)
        model, tokens, recorded = self.compare(256, True)
        self.assertTrue(torch.equal(recorded, logits))
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        with torch.no_grad():
            self.assertGreater((model(input_ids=tokens).logits - logits).abs().max().item(), 1e-3)

    def test_head_dim_64_with_gradients(self):
        model, tokens, logits = self.compare(64, True)
        # The cap is used: without it the logits are others.
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        with torch.no_grad():
            self.assertGreater((model(input_ids=tokens).logits - logits).abs().max().item(), 1e-3)

    def test_the_cap_of_the_models(self):
        self.compare(64, True, cap=50.0)

    def test_padding_and_packed_sequences(self):
        padding = torch.ones(3, 20, dtype=torch.int64)
        padding[1, :6] = padding[2, :11] = 0
        for head_dim in (64, 256):
            self.compare(head_dim, True, attention_mask=padding)
        positions = torch.cat([torch.arange(n) for n in (7, 4, 9)]).expand(3, -1)
        self.compare(64, True, position_ids=positions, use_cache=False)


@unittest.skipIf(NO_GPU, NO_GPU)
class Cuda(unittest.TestCase):
    def test_outputs_and_gradients(self):
        for dtype in (torch.bfloat16, torch.float16):
            for head_dim, cap, causal, with_sinks in ((64, 1.0, True, False), (128, 15.0, False, True), (128, 50.0, True, True)):
                with self.subTest(dtype=dtype, head_dim=head_dim, cap=cap):
                    torch.manual_seed(4)
                    shapes = (2, 200, 4, head_dim), (2, 300, 2, head_dim), (2, 300, 2, head_dim)
                    qkv = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]
                    sinks = torch.randn(4, device="cuda", requires_grad=True) if with_sinks else None
                    leaves = qkv if sinks is None else [*qkv, sinks]
                    options = {"scale": cap / head_dim**0.5, "causal": causal}
                    o = hopper_attention.attention(*qkv, softcap=cap, s_aux=sinks, **options)
                    wide = [t.detach().double().requires_grad_() for t in leaves]
                    keep = causal_keep(200, 300, "cuda") if causal else torch.ones(200, 300, dtype=torch.bool, device="cuda")
                    its = wide[3] if with_sinks else None
                    want, _, _ = reference(*wide[:3], keep, None, cap, its, options["scale"])
                    d_o = torch.randn_like(o)
                    found = torch.autograd.grad(o, leaves, d_o), torch.autograd.grad(want, wide, d_o.double())
                    for mine, exact in zip((o, *found[0]), (want, *found[1])):
                        error = (mine.double() - exact).norm() / exact.norm()
                        self.assertLess(error.item(), 0.02 if dtype == torch.bfloat16 else 0.003)

    def test_packed_and_head_dim_256(self):
        torch.manual_seed(5)
        rows = [torch.randn(300, heads, 256, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
        offsets = torch.tensor([0, 120, 300], device="cuda")
        o = hopper_attention.attention_varlen(*rows, offsets, causal=True, softcap=50.0)
        for first, after in ((0, 120), (120, 300)):
            one = [t[None, first:after].double() for t in rows]
            want, _, _ = reference(*one, causal_keep(after - first, after - first, "cuda"), None, 50.0)
            error = (o[None, first:after].double() - want).norm() / want.norm()
            self.assertLess(error.item(), 0.01)


if __name__ == "__main__":
    unittest.main()
