"""Tests of FP8 on torch tensors, on the CPU."""

import unittest

import hopper_attention
from hopper_attention import abi

try:
    import torch
except ImportError:
    torch = None


class Fp8(unittest.TestCase):
    def setUp(self):
        if torch is None:
            self.skipTest("no torch")
        torch.manual_seed(0)
        shapes = ((2, 150, 4, 32), (2, 170, 2, 32), (2, 170, 2, 32))
        self.qkv = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]

    def error(self, o, **options):
        want = hopper_attention.attention(*(t.float() for t in self.qkv), **options)
        return ((o.float() - want).square().mean() / want.square().mean()).sqrt().item()

    def test_scalings(self):
        shapes = {"per_tensor": (1, 1, 1), "per_head": (2, 2, 1), "per_block": (2, 4, 2)}
        for scaling, shape in shapes.items():
            for hadamard in (None, 5):
                for half_scores in (False, True):
                    with self.subTest(scaling=scaling, hadamard=hadamard, half_scores=half_scores):
                        made = hopper_attention.quantize(
                            *self.qkv, scaling=scaling, hadamard=hadamard, half_scores=half_scores
                        )
                        self.assertEqual((made.q.dtype, made.descale_q.shape), (torch.float8_e4m3fn, shape))
                        self.assertEqual(made.counts.abs().sum(), 0)
                        self.assertEqual(made.v.float().abs().max(), 448)
                        self.assertEqual(made.q.float().abs().max(), 14 if half_scores else 448)
                        o = hopper_attention.attention_fp8(made, causal=True)
                        self.assertEqual((o.dtype, o.shape), (torch.bfloat16, (2, 150, 4, 32)))
                        # e4m3 has 3 bits of mantissa: an element is off by 2^-4 of itself at most.
                        self.assertLess(self.error(o, causal=True), 0.08)

    def test_head_dims(self):
        for head_dim, head_dim_vo in ((8, 8), (192, 128), (256, 256), (136, 512)):
            for hadamard in (None, 5):
                with self.subTest(head_dim=head_dim, head_dim_vo=head_dim_vo, hadamard=hadamard):
                    shapes = ((1, 40, 4, head_dim), (1, 150, 2, head_dim), (1, 150, 2, head_dim_vo))
                    self.qkv = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
                    made = hopper_attention.quantize(*self.qkv, scaling="per_block", hadamard=hadamard)
                    o = hopper_attention.attention_fp8(made)
                    self.assertEqual(o.shape, (1, 40, 4, head_dim_vo))
                    self.assertLess(self.error(o), 0.08)

    def test_the_cpu_ignores_a_margin(self):
        made = hopper_attention.quantize(*self.qkv)
        want = hopper_attention.attention_fp8(made, causal=True)
        self.assertTrue(torch.equal(hopper_attention.attention_fp8(made, causal=True, sm_margin=8), want))
        with self.assertRaisesRegex(ValueError, "sm_margin: -1"):
            hopper_attention.attention_fp8(made, sm_margin=-1)

    def test_the_cpu_meets_every_limit(self):
        made = hopper_attention.quantize(*self.qkv)
        want = hopper_attention.attention_fp8(made, causal=True)
        for limit in (1, 2**40):
            o = hopper_attention.attention_fp8(made, causal=True, workspace_limit=limit)
            self.assertTrue(torch.equal(o, want))
        with self.assertRaisesRegex(ValueError, "workspace_limit: 0; allowed: None, or 1 to"):
            hopper_attention.attention_fp8(made, workspace_limit=0)

    def test_one_factor_gives_the_values_back(self):
        made = hopper_attention.quantize(*self.qkv, scaling="per_tensor")
        for values, stored, descale in zip(self.qkv, made[:3], made[3:6]):
            torch.testing.assert_close(
                stored.float() * descale, values.float(), rtol=2**-4, atol=descale.item() * 2**-9
            )

    def test_outputs(self):
        made = hopper_attention.quantize(*self.qkv)
        o, lse, amax = hopper_attention.attention_fp8(made, return_lse=True, return_amax=True, out_dtype=torch.float16)
        self.assertEqual((o.dtype, lse.shape, amax.shape), (torch.float16, (2, 4, 150), (1,)))
        self.assertAlmostEqual(amax.item(), o.float().abs().max().item(), delta=2e-3)
        scale = 448 / amax
        eighth = hopper_attention.attention_fp8(made, out_dtype=torch.float8_e4m3fn, scale_o=scale)
        self.assertEqual(eighth.dtype, torch.float8_e4m3fn)
        self.assertLess(self.error(eighth.float() / scale), 0.12)

    def test_sinks(self):
        """Those of all types, in all scalings, beside attention in f32 with the same sinks."""
        logits = torch.tensor([0.0, 3.0, -2.0, 8.0])
        made = {scaling: hopper_attention.quantize(*self.qkv, scaling=scaling) for scaling in ("per_head", "per_block")}
        for scaling, operands in made.items():
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                with self.subTest(scaling=scaling, dtype=dtype):
                    sinks = logits.to(dtype)
                    o, lse = hopper_attention.attention_fp8(operands, causal=True, return_lse=True, s_aux=sinks)
                    self.assertLess(self.error(o, causal=True, s_aux=logits), 0.08)
                    want = hopper_attention.attention(
                        *(t.float() for t in self.qkv), causal=True, return_lse=True, s_aux=logits
                    )[1]
                    torch.testing.assert_close(lse, want, rtol=0, atol=0.2)
                    self.assertGreater(self.error(o, causal=True), 0.3)
        operands = made["per_block"]
        none = torch.full((4,), -torch.inf)
        self.assertTrue(
            torch.equal(
                hopper_attention.attention_fp8(operands, s_aux=none, sm_margin=3), hopper_attention.attention_fp8(operands)
            )
        )

        def sunk(operands, sinks):
            return hopper_attention.attention_fp8(operands, causal=True, s_aux=sinks) * 2

        compiled = torch.compile(sunk, fullgraph=True, backend="aot_eager")
        self.assertTrue(torch.equal(compiled(operands, logits), sunk(operands, logits)))
        for error, words, sinks in (
            (TypeError, "s_aux: torch.int64", logits.long()),
            (ValueError, "s_aux: 2 dimensions", logits[None]),
            (ValueError, "s_aux: it requires a gradient", logits.clone().requires_grad_()),
            (abi.HattnError, "sinks: shape", logits[:3]),
        ):
            with self.subTest(words=words), self.assertRaisesRegex(error, words):
                hopper_attention.attention_fp8(operands, s_aux=sinks)

    def test_softcap(self):
        """Beside attention in f32 with the same cap, with sinks and without, eagerly and compiled."""
        operands = hopper_attention.quantize(*self.qkv, scaling="per_block", half_scores=True)
        sinks = torch.tensor([0.0, 3.0, -2.0, 8.0])
        for s_aux in (None, sinks):
            with self.subTest(sinks=s_aux is not None):
                options = {"causal": True, "scale": 1.0, "softcap": 1.5, "s_aux": s_aux}
                o, lse = hopper_attention.attention_fp8(operands, return_lse=True, **options)
                self.assertLess(self.error(o, **options), 0.08)
                want = hopper_attention.attention(*(t.float() for t in self.qkv), return_lse=True, **options)[1]
                torch.testing.assert_close(lse, want, rtol=0, atol=0.2)
                self.assertGreater(self.error(o, **{**options, "softcap": None}), 0.3)

                def twice(operands, options=options):
                    return hopper_attention.attention_fp8(operands, **options) * 2

                compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
                self.assertTrue(torch.equal(compiled(operands), o * 2))
        none = hopper_attention.attention_fp8(operands)
        self.assertTrue(torch.equal(hopper_attention.attention_fp8(operands, softcap=0), none))
        with self.assertRaisesRegex(abi.HattnError, "softcap: -1"):
            hopper_attention.attention_fp8(operands, softcap=-1.0)

    def test_masks(self):
        """Booleans, and lists of blocks, beside attention in f32 with the same mask."""
        operands = hopper_attention.quantize(*self.qkv, scaling="per_block")
        queries, keys = self.qkv[0].shape[1], self.qkv[1].shape[1]
        keep = torch.rand(2, 1, queries, keys) < 0.5
        keep[0, 0, 3] = False
        o, lse = hopper_attention.attention_fp8(operands, attn_mask=keep, return_lse=True)
        self.assertLess(self.error(o, attn_mask=keep), 0.1)
        self.assertGreater(self.error(o), 0.3)
        self.assertTrue((o[0, 3] == 0).all() and (lse[0, :, 3] == float("-inf")).all())
        lists = hopper_attention.block_lists(keep, *self.qkv[:2])
        self.assertTrue(torch.equal(hopper_attention.attention_fp8(operands, block_mask=lists), o))

        def twice(operands, keep):
            return hopper_attention.attention_fp8(operands, attn_mask=keep) * 2

        compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
        self.assertTrue(torch.equal(compiled(operands, keep), o * 2))
        for error, words, options in (
            (TypeError, "attn_mask: torch.float32", {"attn_mask": torch.zeros(queries, keys)}),
            (ValueError, "block_mask: given, and so is attn_mask", {"attn_mask": keep, "block_mask": lists}),
        ):
            with self.subTest(words=words), self.assertRaisesRegex(error, words):
                hopper_attention.attention_fp8(operands, **options)

    def test_compiled(self):
        def both(q, k, v):
            return hopper_attention.attention_fp8(hopper_attention.quantize(q, k, v, hadamard=3), causal=True) * 2

        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
        self.assertTrue(torch.equal(compiled(*self.qkv), both(*self.qkv)))

    def test_refusals(self):
        q, k, v = self.qkv
        made = hopper_attention.quantize(q, k, v)
        for error, words, call in (
            (ValueError, "scaling: 'rows'", lambda: hopper_attention.quantize(q, k, v, scaling="rows")),
            (TypeError, "q: torch.float64", lambda: hopper_attention.quantize(q.double(), k, v)),
            (
                ValueError,
                "q: it requires a gradient",
                lambda: hopper_attention.quantize(q.clone().requires_grad_(), k, v),
            ),
            (
                TypeError,
                "out_dtype: torch.float32",
                lambda: hopper_attention.attention_fp8(made, out_dtype=torch.float32),
            ),
            (abi.HattnError, "scale_o", lambda: hopper_attention.attention_fp8(made, out_dtype=torch.float8_e4m3fn)),
            (
                abi.HattnError,
                "descale_k",
                lambda: hopper_attention.attention_fp8(made._replace(descale_k=made.descale_k[:1])),
            ),
        ):
            with self.subTest(words=words):
                self.assertRaisesRegex(error, words, call)
