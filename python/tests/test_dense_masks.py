"""transformers' models with masks that are no band: 4-d masks, torch's BlockMask, holes in padding."""

import gc
import types
import unittest
import warnings
import weakref
from unittest import mock

import hopper_attention

try:
    import torch
    import transformers
except ImportError as error:
    WHY = str(error)
else:
    WHY = None
    import models
    from hopper_attention import _blocks, _dense_masks, _transformers
    from torch.nn.attention.flex_attention import create_block_mask
    from transformers import masking_utils
NO_GPU = WHY or (None if torch.cuda.is_available() else "no GPU")


@unittest.skipIf(WHY, WHY)
class Models(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        hopper_attention.register_transformers()
        warnings.filterwarnings("ignore")

    def make(self, kind):
        settings = models.config(kind, 64, 4, 2, 2, window=7)
        return settings, models.model(kind, settings)

    def compare(self, kind, mask, rows=None, beside="sdpa", **options):
        """Logits and gradients of a model, beside those of transformers' own attention. `rows`: those that count."""
        settings, model = self.make(kind)
        inputs = models.inputs(kind, settings, 2, 20) | options | {"attention_mask": mask}
        found = []
        for name in (beside, "hopper_attention"):
            model.set_attn_implementation(name)
            logits = model(**inputs).logits
            logits = logits if rows is None else logits[rows]
            found.append((logits.detach(), torch.autograd.grad(logits.square().mean(), list(model.parameters()))))
        torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(found[1][1], found[0][1]):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-6)
        return found[1][0]

    def kept(self):
        kept = torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(1)) > 0.5
        return kept | torch.eye(20, dtype=torch.bool)

    def test_four_dimensions(self):
        for kind in ("llama", "mistral"):
            kept = self.kept()
            logits = self.compare(kind, kept)
            for hidden in (torch.finfo(torch.float32).min, -torch.inf):
                bias = torch.zeros(kept.shape).masked_fill(~kept, hidden)
                self.assertTrue(torch.equal(self.compare(kind, bias), logits))
            # The mask says all: no other one gives the same.
            self.assertGreater((self.compare(kind, kept & kept.mT) - logits).abs().max().item(), 1e-3)

    def added(self, heads=1, queries=20, dtype="float32", hidden=-float("inf")):
        """A mask with numbers that are added to the scores, some of which hide. hidden: None is the type's smallest number."""
        generator = torch.Generator().manual_seed(2)
        bias = torch.randn(2, heads, queries, 20, generator=generator).to(getattr(torch, dtype))
        hidden = torch.finfo(bias.dtype).min if hidden is None else hidden
        return bias.masked_fill(~self.kept()[:, :, :queries], hidden)

    def test_numbers_that_are_added(self):
        """Of all types, with sizes of 1 and without, in both passes, beside eager attention."""
        for kind, options in (
            ("llama", {}),
            ("llama", {"heads": 4}),
            ("llama", {"heads": 4, "queries": 1}),
            ("llama", {"dtype": "bfloat16", "hidden": None}),
            ("llama", {"dtype": "float16", "hidden": None}),
            ("llama", {"dtype": "float64"}),
            ("mistral", {"hidden": None}),
            ("gemma2", {}),
            ("bert", {"heads": 4}),
        ):
            with self.subTest(kind=kind, **options):
                bias = self.added(**options)
                logits = self.compare(kind, bias, beside="eager")
                # The numbers matter, and do not only hide.
                kept = torch.zeros_like(bias).masked_fill(bias < -1e4, -torch.inf)
                self.assertGreater((self.compare(kind, kept, beside="eager") - logits).abs().max().item(), 1e-3)

    def test_numbers_with_sinks_and_dropout(self):
        """A mask's numbers beside sinks, a cap and dropout: attention() with the same bias."""
        module, bias = types.SimpleNamespace(is_causal=True), self.added(heads=4)
        q, k, v = (torch.randn(2, heads, 20, 8) for heads in (4, 2, 2))
        options = {"s_aux": torch.randn(4), "softcap": 2.0, "scaling": 0.7}
        torch.manual_seed(3)
        o, _ = _transformers.attention_forward(module, q, k, v, bias, dropout=0.25, **options)
        torch.manual_seed(3)
        options["scale"] = options.pop("scaling")
        rows = (t.transpose(1, 2) for t in (q, k, v))
        want = hopper_attention.attention(*rows, bias=bias, dropout_p=0.25, **options)
        self.assertTrue(torch.equal(o, want))
        for name in options:
            rows = (t.transpose(1, 2) for t in (q, k, v))
            other = hopper_attention.attention(*rows, bias=bias, **{**options, name: None})
            self.assertFalse(torch.allclose(o, other))

    def test_a_mask_is_read_as_it_is(self):
        """Its sizes of 1 stay 1, and its type stays. The smallest number hides as -inf does: such a row gives 0."""
        module = types.SimpleNamespace(is_causal=True)
        q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8)
        given = []

        def spy(*arguments):
            given.append(arguments[-1])
            return real(*arguments)

        real = _dense_masks.attention_modified
        with mock.patch.object(_dense_masks, "attention_modified", spy):
            for shape in ((1, 1, 5, 9), (2, 1, 1, 9), (1, 4, 1, 9), (2, 4, 5, 12), (1, 1, 5, 1)):
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    with self.subTest(shape=shape, dtype=dtype):
                        bias = torch.randn(shape).to(dtype)
                        bias[0, 0, 0] = torch.finfo(dtype).min
                        o, _ = _transformers.attention_forward(module, q, k, k, bias)
                        its = given[-1].bias
                        self.assertEqual((its.shape, its.dtype), ((*shape[:3], min(shape[3], 9)), dtype))
                        self.assertIsNone(given[-1].block_mask)
                        self.assertTrue((its[0, 0, 0] == -torch.inf).all())
                        self.assertTrue((o[0, 0, 0] == 0).all())
                        scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5 + its.float()
                        want = scores.softmax(-1).nan_to_num() @ k.repeat_interleave(2, 1)
                        torch.testing.assert_close(o.transpose(1, 2), want)
            # Numbers that keep or hide, and no others, stay lists of blocks.
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                bias = torch.zeros(1, 1, 5, 9, dtype=dtype)
                bias[..., 3:], bias[..., 5:] = torch.finfo(dtype).min, -torch.inf
                _transformers.attention_forward(module, q, k, k, bias)
                self.assertIsNone(given[-1].bias)
                self.assertIsInstance(given[-1].block_mask, hopper_attention.BlockLists)

    def test_the_gradient_of_a_mask(self):
        """One for all layers, whose numbers are learned; and one of zeros, which is a mask to learn as well."""
        settings, model = self.make("llama")
        inputs = models.inputs("llama", settings, 2, 20)
        for start in (self.added(heads=4), torch.zeros(1, 4, 20, 20)):
            found = []
            for name in ("eager", "hopper_attention"):
                model.set_attn_implementation(name)
                bias = start.clone().requires_grad_()
                loss = model(**inputs, attention_mask=bias).logits.square().mean()
                found.append(torch.autograd.grad(loss, bias)[0])
            self.assertGreater(found[0].abs().max().item(), 1e-5)
            torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-8)

    def test_masks_of_transformers(self):
        """What transformers' own mask functions give for SDPA and for eager attention, as a 4-d mask."""
        padding = torch.ones(2, 20, dtype=torch.bool)
        padding[1, 15:] = False
        sizes = {"batch_size": 2, "q_length": 20, "kv_length": 20, "q_offset": 0, "kv_offset": 0}
        for function in (
            masking_utils.causal_mask_function,
            masking_utils.sliding_window_causal_mask_function(5),
            masking_utils.bidirectional_mask_function,
        ):
            options = {**sizes, "mask_function": function, "attention_mask": padding}
            for of, more in (
                (masking_utils.sdpa_mask, {"allow_is_causal_skip": False}),
                (masking_utils.eager_mask, {"dtype": torch.float32}),
                (masking_utils.eager_mask, {"dtype": torch.bfloat16}),
            ):
                with self.subTest(function=function.__qualname__, of=of.__name__):
                    given = of(**options, **more)
                    if given.dtype == torch.bfloat16:
                        self.assertTrue(_dense_masks.takes(given))
                        self.assertTrue(torch.equal(_dense_masks._kept_by(given), given == 0))
                    else:
                        self.compare("llama", given, rows=padding)

    def of_16_bits(self, device):
        """The errors of a bf16 model with numbers that are added, of eager attention and of ours, in both passes."""
        settings = models.config("llama", 256, 4, 2, 2)
        inputs = models.inputs("llama", settings, 2, 20, device)
        exact = None
        model = models.model("llama", settings).to(device)
        for dtype, name in ((torch.float32, "eager"), (torch.bfloat16, "eager"), (torch.bfloat16, "hopper_attention")):
            model = model.to(dtype)
            model.set_attn_implementation(name)
            logits = model(**inputs, attention_mask=self.added(heads=4).to(device, dtype)).logits.float()
            found = [logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()))]
            exact = exact or found
            yield [((a.float() - b).square().sum() / b.square().sum()).sqrt().item() for a, b in zip(found, exact)]

    def check_16_bits(self, device):
        zeros, eager, ours = self.of_16_bits(device)
        self.assertEqual(set(zeros), {0})
        # Of logits, and of the gradients of all parameters together.
        self.assertLess(ours[0], 1.2 * eager[0])
        self.assertLess(sum(ours[1:]), 1.2 * sum(eager[1:]))

    def test_numbers_of_16_bits(self):
        self.check_16_bits("cpu")

    @unittest.skipIf(NO_GPU, NO_GPU)
    def test_numbers_on_a_gpu(self):
        """As on the CPU. Only the first layer waits."""
        self.check_16_bits("cuda")
        module, bias = types.SimpleNamespace(is_causal=True), self.added(heads=4).cuda()
        q, k, v = (torch.randn(2, heads, 20, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
        first, _ = _transformers.attention_forward(module, q, k, v, bias)
        torch.cuda.set_sync_debug_mode("error")
        try:
            again, _ = _transformers.attention_forward(module, q, k, v, bias)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.assertTrue(torch.equal(again, first))

    def test_a_block_mask(self):
        settings, model = self.make("llama")
        inputs = models.inputs("llama", settings, 2, 20)
        documents = torch.arange(20) // 7
        block_mask = create_block_mask(
            lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j), None, None, 20, 20, device="cpu"
        )
        same = (documents[:, None] == documents) & torch.ones(20, 20, dtype=torch.bool).tril()
        model.set_attn_implementation("hopper_attention")
        got = model(**(inputs | {"attention_mask": block_mask})).logits
        want = model(**(inputs | {"attention_mask": same[None, None]})).logits
        self.assertTrue(torch.equal(got, want))

    def test_holes_in_padding(self):
        padding = torch.ones(2, 20, dtype=torch.long)
        padding[0, 5:9] = 0
        padding[1, 12] = 0
        self.compare("llama", padding, rows=padding != 0)

    def test_lists_are_made_once_for_all_layers(self):
        settings, model = self.make("llama")
        model.set_attn_implementation("hopper_attention")
        inputs = models.inputs("llama", settings, 2, 20)
        kept = self.kept()
        for given in (kept, torch.zeros(kept.shape).masked_fill(~kept, -torch.inf)):
            with mock.patch.object(_dense_masks, "lists_of_mask", wraps=_blocks.lists_of_mask) as made:
                model(**(inputs | {"attention_mask": given}))
                model(**(inputs | {"attention_mask": given}))
                self.assertEqual(made.call_count, 1)
        bias = self.added()
        with mock.patch.object(_dense_masks, "_bias_of", wraps=_dense_masks._bias_of) as made:
            first = model(**inputs, attention_mask=bias).logits
            self.assertTrue(torch.equal(model(**inputs, attention_mask=bias).logits, first))
            self.assertEqual(made.call_count, 1)
            # Other contents are looked at anew.
            bias.mul_(0.5)
            self.assertFalse(torch.allclose(model(**inputs, attention_mask=bias).logits, first))
            self.assertEqual(made.call_count, 2)
        # What was made of a mask goes with it.
        kept, gone = _blocks._kept._lists, weakref.ref(bias)
        self.assertIn(id(bias), kept)
        number = id(bias)
        del bias, made
        gc.collect()
        self.assertIsNone(gone())
        self.assertNotIn(number, kept)

    def test_numbers_in_inference_mode(self):
        settings, model = self.make("llama")
        inputs = models.inputs("llama", settings, 2, 20)
        found = []
        with torch.inference_mode():
            bias = self.added()
            for name in ("eager", "hopper_attention"):
                model.set_attn_implementation(name)
                found.append(model(**inputs, attention_mask=bias).logits)
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)

    def test_compiled(self):
        settings, model = self.make("llama")
        model.set_attn_implementation("hopper_attention")
        inputs = models.inputs("llama", settings, 2, 20) | {"attention_mask": self.kept()}
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)
        inputs["attention_mask"] = self.added()
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)

    def test_sizes(self):
        """A mask of other sizes, and one with more keys than there are yet."""
        module = types.SimpleNamespace(is_causal=True)
        q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
        kept = torch.rand(1, 1, 5, 12) > 0.3
        o, _ = _transformers.attention_forward(module, q, k, k, kept)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=kept[..., :9])
        torch.testing.assert_close(o.transpose(1, 2), want.nan_to_num())
        for shape in ((1, 1, 4, 9), (1, 3, 5, 9), (2, 1, 5, 9), (1, 1, 5, 8)):
            for of in (torch.ones(shape, dtype=torch.bool), torch.ones(shape), torch.ones(shape, requires_grad=True)):
                with self.assertRaisesRegex(ValueError, "attn_mask: shape"):
                    _transformers.attention_forward(module, q, k, k, of)


if __name__ == "__main__":
    unittest.main()
