"""Tests of transformers' models on the CPU in f32: logits, gradients, generation, and what is refused."""

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
    from hopper_attention import _transformers
    from transformers import masking_utils

KINDS = {"llama": (64, 4, 2), "mistral": (64, 4, 2), "llama4": (64, 4, 2), "bert": (64, 4, 4), "vit": (64, 4, 4)}
# Models whose head dims are others than 64 and 128: `models.config` says which.
WIDE = {kind: (64, 2, 1) for kind in ("gemma2", "gemma3", "phi3", "deepseek_v3", "siglip")}
NAMES = ("eager", "sdpa", "hopper_attention")


@unittest.skipIf(WHY, WHY)
class Transformers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        hopper_attention.register_transformers()
        warnings.filterwarnings("ignore")

    def make(self, kind, **more):
        hidden, heads, heads_kv = (KINDS | WIDE)[kind]
        settings = models.config(kind, hidden, heads, heads_kv, 2, window=7, **more)
        return settings, models.model(kind, settings)

    def compare(self, kind, mask=None, batch=3, seqlen=20, **options):
        settings, model = self.make(kind)
        inputs = models.inputs(kind, settings, batch, seqlen) | options
        if mask is not None:
            inputs["attention_mask"] = mask
        found = []
        # transformers has no SDPA for Gemma 2, because of its softcap.
        for name in [name for name in NAMES if name != "sdpa" or model._supports_sdpa]:
            model.set_attn_implementation(name)
            logits = model(**inputs).logits
            if mask is not None:
                logits = logits * mask[..., None]
            gradients = torch.autograd.grad(logits.square().mean(), list(model.parameters()), allow_unused=True)
            found.append((logits.detach(), [g for g in gradients if g is not None]))
        for logits, gradients in found[1:]:
            torch.testing.assert_close(logits, found[0][0], rtol=1e-4, atol=1e-5)
            for mine, theirs in zip(gradients, found[0][1]):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-6)

    def test_dropout_in_training(self):
        kind = next(iter(KINDS))
        settings, model = self.make(kind)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        model.set_attn_implementation("hopper_attention")
        inputs = models.inputs(kind, settings, 2, 20)
        plain = model.eval()(**inputs).logits.detach()

        def trained(seed):
            model.zero_grad()
            torch.manual_seed(seed)
            logits = model.train()(**inputs).logits
            logits.square().mean().backward()
            return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

        first, again, other = trained(1), trained(1), trained(2)
        for mine, its in zip(first, again):
            self.assertTrue(torch.equal(mine, its))
        self.assertFalse(torch.allclose(first[0], other[0]))
        self.assertFalse(torch.allclose(first[0], plain))
        self.assertTrue(all(bool(t.isfinite().all()) for t in first))
        torch.testing.assert_close(model.eval()(**inputs).logits, plain)

    def test_models(self):
        for kind in KINDS:
            with self.subTest(kind=kind):
                self.compare(kind)

    def test_models_of_other_head_dims(self):
        """Gemma 2 and 3, Phi 3, DeepSeek V3 and SigLIP: 256, 96, 192 with 128, and 72."""
        found = {}
        inner = _transformers.attention

        def noted(q, k, v, **options):
            found.setdefault(kind, set()).add((q.shape[-1], v.shape[-1]))
            return inner(q, k, v, **options)

        with mock.patch.object(_transformers, "attention", noted):
            for kind in WIDE:
                with self.subTest(kind=kind):
                    self.compare(kind)
        dims = {"gemma2": 256, "gemma3": 256, "phi3": 96, "siglip": 72}
        want = {kind: {(dim, dim)} for kind, dim in dims.items()} | {"deepseek_v3": {(192, 128)}}
        self.assertEqual(found, want)

    def test_padding_and_a_cache_at_other_head_dims(self):
        for kind in WIDE.keys() - {"siglip"}:
            with self.subTest(kind=kind):
                self.compare(kind, models.padding(3, 20, "left"), use_cache=True)

    def test_a_window_is_a_window(self):
        settings, model = self.make("mistral")
        inputs = models.inputs("mistral", settings, 2, 20)
        model.set_attn_implementation("hopper_attention")
        narrow = model(**inputs).logits
        settings.sliding_window = None
        _, wide = self.make("mistral")
        wide.config.sliding_window = 100
        for layer in wide.model.layers:
            layer.self_attn.config.sliding_window = 100
        wide.set_attn_implementation("hopper_attention")
        self.assertGreater((wide(**inputs).logits - narrow).abs().max().item(), 1e-3)

    def test_padding(self):
        for kind in ("llama", "mistral", "llama4", "bert"):
            for side in ("left", "right"):
                for cache in (False, True) if kind != "bert" else (False,):
                    with self.subTest(kind=kind, side=side, cache=cache):
                        options = {"use_cache": cache} if kind != "bert" else {}
                        self.compare(kind, models.padding(3, 20, side), **options)
        self.compare("llama", torch.ones(3, 20, dtype=torch.long))

    def padded_and_packed(self, kind, name):
        """Calls of a model with the same sequences: its arguments, and where in its logits the tokens are."""
        settings, model = self.make(kind)
        model.set_attn_implementation("hopper_attention")
        mask = models.padding(3, 20, "right")
        inputs = models.inputs(kind, settings, 3, 20)
        lengths = mask.sum(1)
        self.assertEqual(lengths.tolist(), [20, 15, 10])
        ids = inputs["input_ids"][mask != 0][None]
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        packed = {
            "position_ids": {"position_ids": positions},
            "cu_seq_lens": {
                "position_ids": positions,
                **{"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 20, "max_length_k": 20},
            },
            # A tensor as the longest length, other numbers than int64, and the numbers that state-space layers take.
            "cu_seq_lens of int32": {
                "position_ids": positions,
                **{"cu_seq_lens_q": cu.int(), "cu_seq_lens_k": cu.int(), "max_length_q": torch.tensor(20)},
                "seq_idx": torch.zeros(1, 45, dtype=torch.int32),
            },
        }[name]
        return model, {**inputs, "attention_mask": mask}, mask != 0, {"input_ids": ids, **packed}

    def test_a_padding_free_batch_is_the_padded_one(self):
        for kind in ("llama", "mistral", "llama4"):
            for name in ("position_ids", "cu_seq_lens", "cu_seq_lens of int32"):
                for cache in (False, True):
                    if (kind, name, cache) == ("llama4", "position_ids", True):
                        # The layers of Llama 4 do not pass positions on. With a cache no mask function reads them,
                        # so that transformers' own attention takes a row for one sequence as well.
                        continue
                    with self.subTest(kind=kind, name=name, cache=cache):
                        model, padded, tokens, packed = self.padded_and_packed(kind, name)
                        found = []
                        for inputs, logits_of in ((padded, lambda x: x[tokens]), (packed, lambda x: x[0])):
                            logits = logits_of(model(**inputs, use_cache=cache).logits)
                            gradients = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
                            found.append((logits, *gradients))
                        self.assertEqual(found[1][0].shape, (45, 199))
                        torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
                        for got, want in zip(found[1][1:], found[0][1:]):
                            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)
                        # Without the positions, or the lengths, the sequences would see each other.
                        one = model(input_ids=packed["input_ids"], use_cache=cache).logits[0]
                        self.assertGreater((one - found[1][0]).abs().max().item(), 1e-2)

    def test_rows_of_several_sequences(self):
        """Rows that are packed differently, which are computed as the masks of other implementations say."""
        settings, model = self.make("mistral")
        ids = models.inputs("mistral", settings, 2, 20)["input_ids"]
        positions = torch.stack([torch.cat([torch.arange(a), torch.arange(20 - a)]) for a in (12, 3)])
        found = []
        for name in NAMES:
            model.set_attn_implementation(name)
            found.append(model(ids, position_ids=positions, use_cache=False).logits)
        for logits in found[1:]:
            torch.testing.assert_close(logits, found[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(ids, position_ids=positions, use_cache=True).logits, found[2])

    def test_positions_are_read_again_when_they_change(self):
        settings, model = self.make("llama")
        ids = models.inputs("llama", settings, 1, 20)["input_ids"]
        model.set_attn_implementation("hopper_attention")
        positions = torch.arange(20)[None]
        model(ids, position_ids=positions)
        for begin in (12, 5):
            packed = torch.cat([torch.arange(begin), torch.arange(20 - begin)])[None]
            want = model(ids, position_ids=packed, use_cache=False).logits
            for context in (torch.enable_grad, torch.inference_mode):
                with context():
                    positions.copy_(packed)
                    torch.testing.assert_close(model(ids, position_ids=positions).logits, want)
        inference = []
        with torch.inference_mode():
            positions = torch.arange(20)[None]
            for _ in range(2):
                inference.append(model(ids, position_ids=positions).logits)
                positions.copy_(packed)
        torch.testing.assert_close(inference[1], want)

    def test_a_compiled_padding_free_batch(self):
        model, _, _, packed = self.padded_and_packed("llama", "cu_seq_lens")
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(compiled(**packed).logits, model(**packed).logits)

    def test_generation(self):
        for kind in ("llama", "mistral", "llama4"):
            for side in (None, "left"):
                with self.subTest(kind=kind, side=side):
                    settings, model = self.make(kind)
                    ids = models.inputs(kind, settings, 3, 12)["input_ids"]
                    mask = torch.ones_like(ids) if side is None else models.padding(3, 12, side)
                    texts = []
                    for name in NAMES:
                        model.set_attn_implementation(name)
                        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
                        texts.append(model.generate(ids, attention_mask=mask, **options))
                    self.assertTrue(torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2]))

    def test_continued_with_a_cache(self):
        for kind in ("llama", "mistral"):
            settings, model = self.make(kind)
            ids = models.inputs(kind, settings, 2, 20)["input_ids"]
            model.set_attn_implementation("hopper_attention")
            whole = model(ids).logits
            first = model(ids[:, :11], use_cache=True)
            second = model(ids[:, 11:], past_key_values=first.past_key_values, use_cache=True)
            torch.testing.assert_close(second.logits, whole[:, 11:], rtol=1e-4, atol=1e-5)

    def test_compiled(self):
        settings, model = self.make("llama")
        ids = models.inputs("llama", settings, 2, 20)
        model.set_attn_implementation("hopper_attention")
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(**ids).logits, model(**ids).logits)

    def test_a_compiled_vit_is_one_graph(self):
        settings, model = self.make("vit")
        pixels = models.inputs("vit", settings, 2, 0)
        model.set_attn_implementation("hopper_attention")
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(**pixels).logits, model(**pixels).logits)

    def test_refusals_of_models(self):
        settings, model = self.make("llama")
        ids = models.inputs("llama", settings, 1, 20)["input_ids"]
        model.set_attn_implementation("hopper_attention")
        lengths = torch.tensor([0, 12, 20])
        for words, options in (
            ("one of cu_seq_lens_q and cu_seq_lens_k", {"cu_seq_lens_q": lengths}),
            ("packed sequences by seq_idx alone", {"seq_idx": torch.zeros(1, 20, dtype=torch.int32)}),
            (
                "cu_seq_lens_q with a padding mask",
                {
                    "cu_seq_lens_q": lengths,
                    "cu_seq_lens_k": lengths,
                    "attention_mask": torch.tensor([[0] * 3 + [1] * 17]),
                },
            ),
            ("attention_mask is a Tensor", {"attention_mask": torch.zeros(1, 1, 20, 20, dtype=torch.int64)}),
            ("output_attentions", {"output_attentions": True}),
        ):
            with self.subTest(words=words, **{name: type(given).__name__ for name, given in options.items()}):
                self.assertRaisesRegex(NotImplementedError, words, model, ids, **options)
        first = model(ids[:, :11], use_cache=True)
        packed = torch.tensor([[11, 12, 13, 14, 0, 1, 2, 3, 4]])
        with self.assertRaisesRegex(NotImplementedError, "by position_ids, 9 queries and 20 keys"):
            model(ids[:, 11:], position_ids=packed, past_key_values=first.past_key_values, use_cache=True)
        with self.assertRaisesRegex(NotImplementedError, "static"):
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=3,
                cache_implementation="static",
                pad_token_id=0,
            )
        four = torch.ones(1, 1, 20, 20, dtype=torch.bool)
        with self.assertRaisesRegex(NotImplementedError, "cu_seq_lens_q with a 4-d mask"):
            model(ids, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, attention_mask=four)


@unittest.skipIf(WHY, WHY)
class Functions(unittest.TestCase):
    """The two registered functions by themselves."""

    def call(self, mask=None, q_length=9, kv_length=9, **options):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, n, 8) for n in (q_length, kv_length, kv_length))
        o, none = _transformers.attention_forward(types.SimpleNamespace(is_causal=True), q, k, v, mask, **options)
        self.assertIsNone(none)
        return q, k, v, o

    def mask(self, function, q_length=9, kv_length=9, **options):
        return _transformers.mask(1, q_length, kv_length, mask_function=function, **options)

    def expect(self, q, k, v, o, keep=None):
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        torch.testing.assert_close(o.transpose(1, 2), want)

    def test_dropout(self):
        """The pairs are those of a state that torch's generator gives: without a mask, with one, and packed."""
        everything = torch.ones(1, 1, 9, 9, dtype=torch.bool)
        lengths = torch.tensor([0, 9], dtype=torch.int32)
        for mask, options in ((None, {}), (everything, {}), (None, {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths})):
            for softcap in (None, 5.0):
                torch.manual_seed(0)
                q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
                state = torch.empty(2, dtype=torch.int64)
                torch.manual_seed(5)
                state.random_()
                torch.manual_seed(5)
                module = types.SimpleNamespace(is_causal=False)
                o, _ = _transformers.attention_forward(module, q, k, v, mask, dropout=0.25, softcap=softcap, **options)
                scores = q @ k.mT / 8**0.5
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                kept = hopper_attention.dropout_mask(0.25, state, 1, 2, 9, 9)
                torch.testing.assert_close(o.transpose(1, 2), (scores.softmax(-1) * kept / 0.75) @ v)

    def test_a_window_needs_no_sliding_window(self):
        own, keys = torch.arange(9)[:, None], torch.arange(9)
        causal = masking_utils.sliding_window_causal_mask_function(3)
        for options in ({}, {"sliding_window": 3}):
            self.expect(*self.call(self.mask(causal), **options), (keys <= own) & (keys > own - 3))
        both = masking_utils.sliding_window_bidirectional_mask_function(3)
        self.expect(*self.call(self.mask(both)), (keys - own).abs() <= 3)

    def test_chunks(self):
        own, keys = torch.arange(9)[:, None], torch.arange(9)

        def of(padding, **options):
            function = masking_utils.chunked_causal_mask_function(4, torch.tensor([padding]))
            return self.mask(function, **options)

        self.expect(*self.call(of(0)), (keys <= own) & (keys // 4 == own // 4))
        # One query, whose cache begins within a chunk: position 9 of keys 3 to 9, then of keys 3 to 11.
        for position, kept in ((9, 2), (11, 4)):
            kv_length = position - 2
            mask = of(0, q_length=1, q_offset=position, kv_length=kv_length, kv_offset=3)
            keep = torch.arange(kv_length)[None] >= kv_length - kept
            self.expect(*self.call(mask, q_length=1, kv_length=kv_length), keep)
        # The same behind two keys of padding: the chunk of position 9 begins at key 6.
        padding = torch.tensor([[0, 0] + [1] * 8])
        mask = of(2, q_length=1, q_offset=9, kv_length=10, attention_mask=padding)
        self.expect(*self.call(mask, q_length=1, kv_length=10), torch.arange(10)[None] >= 6)
        # No band: a cache that has lost its first keys with several queries, and chunks that are not causal.
        mask = of(0, q_length=2, q_offset=8, kv_length=7, kv_offset=3)
        keep = torch.tensor([[key // 4 == own // 4 and key <= own for key in range(3, 10)] for own in (8, 9)])
        self.expect(*self.call(mask, q_length=2, kv_length=7), keep)
        mask = self.mask(masking_utils.chunked_overlay(4, torch.tensor([0])))
        self.expect(*self.call(mask), keys // 4 == own // 4)

    def test_without_a_mask(self):
        own, keys = torch.arange(9)[:, None], torch.arange(9)
        self.expect(*self.call(), keys <= own)
        self.expect(*self.call(is_causal=False))
        self.expect(*self.call(sliding_window=3), (keys <= own) & (keys > own - 3))
        self.expect(*self.call(is_causal=False, sliding_window=3), (keys - own).abs() <= 2)
        self.expect(*self.call(q_length=1))

    def test_a_padded_window_of_both_sides(self):
        both = masking_utils.sliding_window_bidirectional_mask_function(3)
        padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 0]])
        q, k, v, o = self.call(self.mask(both, attention_mask=padding))
        own, keys = torch.arange(9)[:, None], torch.arange(9)
        keep = ((keys - own).abs() <= 3) & (padding[0] != 0)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2)
        torch.testing.assert_close(o[:, 2:8], want[:, 2:8])
        self.assertEqual((o[:, :2].abs().sum(), o[:, 8:].abs().sum()), (0, 0))

    def test_padding_is_one_call_and_no_copy(self):
        """Padding before and after the tokens, of queries and keys that lie as projections leave them."""
        calls = []
        both = masking_utils.bidirectional_mask_function
        padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0, 0, 0], [0] * 9])
        torch.manual_seed(0)
        q, k, v = (torch.randn(3, 9, 2, 8) for _ in range(3))
        mask = _transformers.mask(3, 9, 9, mask_function=both, attention_mask=padding)
        real = _transformers.attention_varlen

        def spy(*rows, **options):
            calls.append([t.data_ptr() for t in rows])
            return real(*rows, **options)

        with mock.patch.object(_transformers, "attention_varlen", spy):
            heads_first = [t.transpose(1, 2) for t in (q, k, v)]
            o, _ = _transformers.attention_forward(types.SimpleNamespace(is_causal=False), *heads_first, mask)
        self.assertEqual(calls, [[t.data_ptr() for t in (q, k, v)]])
        keep = (padding != 0)[:, None, None, :]
        want = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=keep).transpose(1, 2)
        torch.testing.assert_close(o[:2], want[:2])
        self.assertTrue((o[2] == 0).all())

    def test_cross_attention(self):
        full = masking_utils.bidirectional_mask_function
        padding = torch.tensor([[1] * 5 + [0] * 4])
        mask = self.mask(full, q_length=4, attention_mask=padding)
        self.expect(*self.call(mask, q_length=4), (padding[0] != 0)[None].expand(4, 9))

    def test_masks_that_are_no_band(self):
        causal = masking_utils.causal_mask_function
        ids = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, 1, -1]])
        own, keys = torch.arange(9)[:, None], torch.arange(9)
        same = (ids[0][:, None] == ids[0]) & (ids[0] >= 0)
        kept = {
            "blocks": (masking_utils.or_masks(causal, masking_utils.blockwise_overlay(ids)), (keys <= own) | same),
            "or": (masking_utils.or_masks(causal, masking_utils.bidirectional_mask_function), keys >= 0),
            "own": (masking_utils.and_masks(causal, lambda b, h, q, k: k + 2 >= q), (keys <= own) & (keys + 2 >= own)),
        }
        for name, (function, keep) in kept.items():
            with self.subTest(name=name):
                mask = self.mask(function)
                self.assertEqual(mask.dtype, torch.bool)
                self.expect(*self.call(mask), keep.expand(9, 9))
        self.assertRaisesRegex(NotImplementedError, "static", self.mask, causal, q_length=3, kv_length=9, q_offset=2)
        holes = torch.tensor([[1, 1, 0, 1, 1, 0, 1, 1, 1]])
        keep = (keys <= own) & (holes[0] != 0)
        self.expect(*self.call(self.mask(causal, attention_mask=holes)), keep)
        with self.assertRaisesRegex(NotImplementedError, "an attention_mask of 3 dimensions"):
            self.mask(causal, attention_mask=holes[None])
        packed = masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2]]))
        self.assertEqual(_transformers.band_of(packed), (None, None))
        padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])
        mask = self.mask(masking_utils.and_masks(causal, packed), attention_mask=padding)
        of = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
        q, k, v, o = self.call(mask)
        want = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=(keys <= own) & (of[:, None] == of) & (padding[0] != 0)
        )
        torch.testing.assert_close(o.transpose(1, 2)[:, :, 2:], want[:, :, 2:])

    def test_arguments(self):
        causal = self.mask(masking_utils.causal_mask_function)
        for words, options in (
            ("attention sinks by another name", {"sinks": torch.zeros(2)}),
            ("a position bias", {"position_bias": torch.zeros(1, 2, 9, 9)}),
            ("the argument novelty", {"novelty": 1}),
            ("sliding_window 3 with a mask", {"sliding_window": 3}),
        ):
            with self.subTest(words=words):
                self.assertRaisesRegex(NotImplementedError, words, self.call, causal, **options)
        self.call(causal, softcap=None, use_cache=True, output_attentions=False, sliding_window=9)
        self.assertRaisesRegex(NotImplementedError, "a mask of 9 x 9", self.call, causal, kv_length=8)
        self.assertRaisesRegex(NotImplementedError, "4 queries and 9 keys", self.call, q_length=4)
        self.assertRaisesRegex(NotImplementedError, "slices its mask", lambda: causal[:, :, :, :4])
        self.assertRaisesRegex(NotImplementedError, "no tensor|as a tensor", lambda: causal.shape)
        self.assertIsNone(getattr(causal, "shape", None))
