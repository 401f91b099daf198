"""transformers' models with masks that are no band: 4-d masks, torch's BlockMask, holes in padding."""

import types
import unittest
import warnings
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


@unittest.skipIf(WHY, WHY)
class Models(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        hopper_attention.register_transformers()
        warnings.filterwarnings("ignore")

    def make(self, kind):
        settings = models.config(kind, 64, 4, 2, 2, window=7)
        return settings, models.model(kind, settings)

    def compare(self, kind, mask, rows=None, **options):
        """Logits and gradients of a model, beside those of transformers' own attention. `rows`: those that count."""
        settings, model = self.make(kind)
        inputs = models.inputs(kind, settings, 2, 20) | options | {"attention_mask": mask}
        found = []
        for name in ("sdpa", "hopper_attention"):
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

    def test_compiled(self):
        settings, model = self.make("llama")
        model.set_attn_implementation("hopper_attention")
        inputs = models.inputs("llama", settings, 2, 20) | {"attention_mask": self.kept()}
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
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
            with self.assertRaisesRegex(ValueError, "attn_mask: shape"):
                _transformers.attention_forward(module, q, k, k, torch.ones(shape, dtype=torch.bool))


if __name__ == "__main__":
    unittest.main()
