"""Block-sparse masks: boolean masks, torch's BlockMask and lists of blocks against torch's own attention, and gradients."""

import gc
import unittest
from unittest import mock

import hopper_attention
from hopper_attention import BlockLists, HattnError, abi

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
    from hopper_attention import _blocks
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
NO_GPU = NO_TORCH or (None if torch.cuda.is_available() else "no GPU")

HEADS, HEADS_KV, DIM = 4, 2, 16


def tensors(seqlen_q, seqlen_kv, device="cpu", dtype=None, batch=2):
    generator = torch.Generator().manual_seed(1)
    shapes = (batch, seqlen_q, HEADS, DIM), (batch, seqlen_kv, HEADS_KV, DIM), (batch, seqlen_kv, HEADS_KV, DIM)
    dtype = dtype or torch.float32
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def sdpa(q, k, v, kept):
    """torch's own attention in f64. Rows without keys give 0, and have no part in gradients."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    some = kept.any(-1, keepdim=True)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept | ~some, enable_gqa=True)
    return torch.where(some, o, 0).transpose(1, 2)


def random_blocks(seqlen_q, seqlen_kv, batch, heads, of=128, seed=0):
    """A third of the blocks full, a third empty, and a third random pairs; and rows without keys."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, -(-seqlen_q // of), -(-seqlen_kv // of))
    kinds = torch.randint(0, 3, shape, generator=generator)
    kinds = kinds.repeat_interleave(of, 2).repeat_interleave(of, 3)[:, :, :seqlen_q, :seqlen_kv]
    kept = (kinds == 2) | ((kinds == 1) & (torch.rand(kinds.shape, generator=generator) > 0.5))
    kept[:, :, 7:10] = False
    return kept


@unittest.skipIf(NO_TORCH, NO_TORCH)
class Torch(unittest.TestCase):
    def same(self, got, want, leaves, atol=2e-5):
        torch.testing.assert_close(got.double(), want, atol=atol, rtol=0)
        d_o = torch.randn(want.shape, generator=torch.Generator().manual_seed(2)).to(got.device)
        mine = torch.autograd.grad(got, leaves, d_o.to(got.dtype))
        for a, b in zip(mine, torch.autograd.grad(want, leaves, d_o.double())):
            torch.testing.assert_close(a.double(), b.double(), atol=4 * atol, rtol=atol)

    def check_bools(self, attention, device="cpu", dtype=None, atol=2e-5):
        for seqlen_q, seqlen_kv in ((300, 400), (128, 256), (1, 130), (257, 5)):
            *_, b, h, m, n = (0, 2, HEADS, seqlen_q, seqlen_kv)
            masks = {
                "of all": random_blocks(m, n, b, h),
                "shared by heads": random_blocks(m, n, b, 1, seed=3),
                "shared": random_blocks(m, n, 1, 1, seed=4),
                "of heads": random_blocks(m, n, 1, h, seed=5)[0],
                "of keys": torch.rand(b, 1, 1, n) > 0.4,
                "of queries": torch.rand(m, 1) > 0.4,
                "all": torch.ones(m, n, dtype=torch.bool),
                "none": torch.zeros(m, n, dtype=torch.bool),
            }
            for name, kept in masks.items():
                with self.subTest(name=name, sizes=(m, n)):
                    q, k, v = tensors(m, n, device, dtype)
                    kept = kept.to(device)
                    want = sdpa(q, k, v, kept.expand(*kept.shape[:-2], m, n))
                    self.same(attention(q, k, v, attn_mask=kept), want, (q, k, v), atol)

    def check_block_masks(self, attention, device="cpu", dtype=None, atol=2e-5):
        size = 390
        documents = torch.tensor([100, 3, 150, 137]).repeat_interleave(torch.tensor([100, 3, 150, 137])).to(device)
        per_batch = torch.stack((documents, documents.flip(0)))
        table = torch.rand(HEADS, size, size, generator=torch.Generator().manual_seed(6)).to(device) > 0.5
        masks = {
            "causal": (lambda b, h, i, j: i >= j, None, None, size),
            "documents": (lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j), None, None, size),
            "documents of each batch": (lambda b, h, i, j: per_batch[b, i] == per_batch[b, j], 2, None, size),
            "prefix": (lambda b, h, i, j: (j < 140) | (i >= j), None, None, size),
            "window": (lambda b, h, i, j: (i - j).abs() <= 40, None, None, size),
            "of heads": (lambda b, h, i, j: table[h, i, j], None, HEADS, size),
            "of both": (lambda b, h, i, j: table[h, i, j] & (per_batch[b, i] == per_batch[b, j]), 2, HEADS, size),
            "more keys": (lambda b, h, i, j: i + 130 >= j, None, None, size + 130),
            "no keys": (lambda b, h, i, j: (i >= 200) & (i >= j), None, None, size),
        }
        for name, (mask_mod, batch, heads, keys) in masks.items():
            with self.subTest(name=name):
                block_mask = create_block_mask(mask_mod, batch, heads, size, keys, device=device)
                q, k, v = tensors(size, keys, device, dtype)
                kept = create_mask(mask_mod, batch, heads, size, keys, device=device)
                got = attention(q, k, v, block_mask=block_mask)
                self.same(got, sdpa(q, k, v, kept), (q, k, v), atol)

    def test_boolean_masks(self):
        self.check_bools(hopper_attention.attention)

    def test_block_masks(self):
        self.check_block_masks(hopper_attention.attention)

    def test_in_small_parts(self):
        """Memory is bounded: masks are read, and mask_mods asked, a part at a time."""
        with mock.patch.multiple(_blocks, _PAIRS_AT_A_TIME=1, _BLOCKS_AT_A_TIME=2):
            self.check_bools(hopper_attention.attention)
            self.check_block_masks(hopper_attention.attention)

    def test_as_flex_attention(self):
        """flex_attention itself, uncompiled."""
        documents = torch.arange(300) // 70
        block_mask = create_block_mask(
            lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j), None, None, 300, 300, device="cpu"
        )
        q, k, v = (t.detach() for t in tensors(300, 300))
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]
        with mock.patch.object(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True):
            want, want_lse = flex_attention(*heads_first, block_mask=block_mask, enable_gqa=True, return_lse=True)
        o, lse = hopper_attention.attention(q, k, v, block_mask=block_mask, return_lse=True)
        torch.testing.assert_close(o, want.transpose(1, 2), atol=2e-5, rtol=0)
        torch.testing.assert_close(lse, want_lse, atol=2e-5, rtol=0)

    def test_with_all_else(self):
        """A mask of both kinds, and on the CPU sinks, a softcap, ALiBi and the maximum logits beside lists."""
        q, k, v = tensors(200, 260)
        sinks = torch.randn(HEADS).requires_grad_()
        kept = random_blocks(200, 260, 2, 1)
        causal = torch.ones(200, 260, dtype=torch.bool).tril(60)
        slopes = torch.tensor([0.5, 0.25, -0.125, 0.0])
        got = hopper_attention.attention(q, k, v, attn_mask=kept, causal=True, window=None)
        self.same(got, sdpa(q, k, v, kept & causal), (q, k, v))
        options = {"s_aux": sinks, "softcap": 2.0, "alibi_slopes": slopes, "return_max_logits": True}
        o, lse, largest = hopper_attention.attention(q, k, v, attn_mask=kept, return_lse=True, **options)
        x, y, z = (t.double().transpose(1, 2) for t in (q, *(t.repeat_interleave(2, 2) for t in (k, v))))
        scores = 2 * torch.tanh(x @ y.mT * DIM**-0.5 / 2)
        distances = (torch.arange(200)[:, None] + 60 - torch.arange(260)).abs()
        scores = (scores - slopes.double()[:, None, None] * distances).masked_fill(~kept, -torch.inf)
        torch.testing.assert_close(largest.double(), scores.detach().amax((0, 2, 3)), atol=1e-5, rtol=0)
        scores = torch.cat((scores, sinks.double()[None, :, None, None].expand(2, HEADS, 200, 1)), -1)
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=0)
        self.same(o, (scores.softmax(-1)[..., :260] @ z).transpose(1, 2), (q, k, v, sinks))

    def test_lists_are_made_once(self):
        q, k, v = tensors(300, 300)
        asked = []

        def mask_mod(b, h, i, j):
            asked.append(1)
            return i >= j

        block_mask = create_block_mask(mask_mod, None, None, 300, 300, device="cpu")
        asked.clear()
        first = hopper_attention.attention(q, k, v, block_mask=block_mask)
        times = len(asked)
        self.assertGreater(times, 0)
        with torch.inference_mode():
            again = hopper_attention.attention(q, k, v, block_mask=block_mask)
        self.assertTrue(torch.equal(first, again))
        self.assertEqual(len(asked), times)
        # Lists that were made in inference mode can be saved for gradients.
        other = create_block_mask(mask_mod, None, None, 300, 300, device="cpu")
        with torch.inference_mode():
            hopper_attention.attention(q, k, v, block_mask=other)
        torch.autograd.grad(hopper_attention.attention(q, k, v, block_mask=other).sum(), q)
        # Those of a boolean mask, until it changes. They go where their mask goes.
        kept = torch.ones(300, 300, dtype=torch.bool)
        with mock.patch.object(_blocks, "lists_of_mask", wraps=_blocks.lists_of_mask) as made:
            for _ in range(2):
                hopper_attention.attention(q, k, v, attn_mask=kept)
            self.assertEqual(made.call_count, 1)
            kept[:, 50:] = False
            o = hopper_attention.attention(q, k, v, attn_mask=kept)
            self.assertEqual(made.call_count, 2)
        torch.testing.assert_close(o.double(), sdpa(q, k, v, kept), atol=2e-5, rtol=0)
        numbers = {id(block_mask), id(other), id(kept)}
        self.assertTrue(numbers <= set(_blocks._kept._lists))
        # (The spy keeps what it was called with.)
        del block_mask, other, kept, made
        gc.collect()
        self.assertFalse(numbers & set(_blocks._kept._lists))

    def test_lists(self):
        q, k, v = tensors(300, 300)
        kept = random_blocks(300, 300, 1, HEADS)
        want = hopper_attention.attention(q, k, v, attn_mask=kept)
        lists = hopper_attention.block_lists(kept, q, k)
        self.assertTrue(torch.equal(hopper_attention.attention(q, k, v, block_mask=lists), want))
        wide = BlockLists(*(t.long() for t in lists))
        self.assertTrue(torch.equal(hopper_attention.attention(q, k, v, block_mask=wide), want))
        # Without lists of full blocks: all blocks are partial.
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 300, 300, device="cpu")
        whole = BlockMask.from_kv_blocks(
            torch.tensor([[[1, 2, 3]]], dtype=torch.int32),
            torch.tensor([[[[0, 0, 0], [1, 0, 0], [2, 1, 0]]]], dtype=torch.int32),
            mask_mod=block_mask.mask_mod,
            seq_lengths=(300, 300),
        )
        got = [hopper_attention.attention(q, k, v, block_mask=one) for one in (block_mask, whole)]
        self.assertTrue(torch.equal(*got))
        # As many blocks, for sequences that are a little longer.
        longer = create_block_mask(lambda b, h, i, j: i >= j, None, None, 384, 384, device="cpu")
        self.assertTrue(torch.equal(hopper_attention.attention(q, k, v, block_mask=longer), got[0]))

    def test_compiled(self):
        q, k, v = tensors(300, 300)
        kept = random_blocks(300, 300, 2, 1)
        lists = hopper_attention.block_lists(kept, q, k)
        for mask in ({"attn_mask": kept}, {"block_mask": lists}):
            torch._dynamo.reset()
            compiled = torch.compile(hopper_attention.attention, fullgraph=True, backend="aot_eager")
            self.same(compiled(q, k, v, **mask), sdpa(q, k, v, kept), (q, k, v))
        # A BlockMask breaks the graph.
        torch._dynamo.reset()
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 300, 300, device="cpu")
        compiled = torch.compile(hopper_attention.attention, backend="aot_eager")
        causal = torch.ones(300, 300, dtype=torch.bool).tril()
        self.same(compiled(q, k, v, block_mask=block_mask), sdpa(q, k, v, causal), (q, k, v))

    def test_operators_are_what_torch_expects(self):
        q, k, v = tensors(130, 140)
        lists = hopper_attention.block_lists(random_blocks(130, 140, 1, 1), q, k)
        sinks, slopes = torch.randn(HEADS).requires_grad_(), torch.ones(HEADS)
        numbers = (0.25, abi.MASK_CAUSAL, 0, 0, 0, 0, 0.0)
        for own, of, wanted in ((None, None, False), (sinks, slopes, True)):
            rest = (None, None, None, None, 0, 0, False, False, *numbers, 0.0, 0, wanted)
            arguments = (q, k, v, own, of, None, None, *lists, *rest)
            torch.library.opcheck(torch.ops.hopper_attention.modified_forward, arguments)

    def test_empty(self):
        for seqlen_q, seqlen_kv, batch in ((0, 5, 2), (5, 0, 2), (5, 5, 0)):
            q, k, v = tensors(seqlen_q, seqlen_kv, batch=batch)
            kept = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool)
            o = hopper_attention.attention(q, k, v, attn_mask=kept)
            self.assertTrue(o.shape == q.shape and (o == 0).all())
            for gradient in torch.autograd.grad(o.sum(), (q, k, v)):
                self.assertTrue((gradient == 0).all())

    def test_refusals(self):
        q, k, v = tensors(300, 300)
        call = hopper_attention.attention
        kept = torch.ones(300, 300, dtype=torch.bool)
        lists = hopper_attention.block_lists(kept.tril(), q, k)

        def causal(b, h, i, j):
            return i >= j

        def blocks(rows, keys, **options):
            return create_block_mask(causal, options.pop("B", None), None, rows, keys, device="cpu", **options)

        wrong = lists._replace(indices=lists.indices + 3)
        twice = lists._replace(full_counts=lists.full_counts + 3)
        narrow = blocks(300, 300, BLOCK_SIZE=(64, 128))
        negative = lists._replace(counts=lists.counts - 5)
        for kind, words, options in (
            (ValueError, "block_mask: given, and so is attn_mask", {"attn_mask": kept, "block_mask": lists}),
            (TypeError, "attn_mask: torch.int32", {"attn_mask": kept.int()}),
            (TypeError, "attn_mask: list", {"attn_mask": [True]}),
            (ValueError, r"attn_mask: shape \[3, 300, 300\]", {"attn_mask": kept.expand(3, 300, 300)}),
            (ValueError, r"attn_mask: shape \[300, 299\]", {"attn_mask": kept[:, 1:]}),
            (ValueError, r"attn_mask: shape \[1, 1, 1, 300, 300\]", {"attn_mask": kept[None, None, None]}),
            (TypeError, "block_mask: Tensor; allowed: torch's BlockMask and", {"block_mask": kept}),
            (TypeError, "block_mask.bits: torch.float32", {"block_mask": lists._replace(bits=lists.bits.float())}),
            (ValueError, "block_mask.counts: 1 dimensions", {"block_mask": lists._replace(counts=torch.zeros(3).int())}),
            (ValueError, "full blocks is missing", {"block_mask": lists._replace(full_counts=None)}),
            (NotImplementedError, r"BLOCK_SIZE \(64, 128\); allowed: \(128, 128\)", {"block_mask": narrow}),
            (ValueError, "made for 200 queries; allowed: 300", {"block_mask": blocks(200, 300)}),
            (ValueError, "made for 600 keys; allowed: 300", {"block_mask": blocks(300, 600)}),
            (HattnError, r"mask_block_cnt: shape \[3, 1, 3\], expected \[2, 1, 3\]", {"block_mask": blocks(300, 300, B=3)}),
            (HattnError, "mask_block_idx: .* at", {"block_mask": wrong}),
            (HattnError, "a block that is listed once", {"block_mask": twice}),
            (HattnError, "mask_block_cnt: -", {"block_mask": negative}),
        ):
            with self.subTest(words=words):
                self.assertRaisesRegex(kind, words, call, q, k, v, **options)
        ragged = torch.nested.nested_tensor([q[0].detach(), q[1].detach()], layout=torch.jagged)
        with self.assertRaisesRegex(NotImplementedError, "attn_mask: given with nested tensors"):
            call(ragged, ragged, ragged, attn_mask=kept)
        o = call(q, k, v, attn_mask=kept)
        (first,) = torch.autograd.grad(o.sum(), q, create_graph=True)
        with self.assertRaisesRegex(NotImplementedError, "a second derivative"):
            first.sum().backward()

    @unittest.skipIf(NO_GPU, NO_GPU)
    def test_on_a_gpu(self):
        for dtype in (torch.bfloat16, torch.float16):
            self.check_bools(self.on_a_gpu, "cuda", dtype, 0.05)
            self.check_block_masks(self.on_a_gpu, "cuda", dtype, 0.05)

    def on_a_gpu(self, q, k, v, **options):
        """The head dim of kernels: zeros behind the others change nothing but the scale."""
        q, k, v = (torch.nn.functional.pad(t, (0, 64 - DIM)) for t in (q, k, v))
        return hopper_attention.attention(q, k, v, scale=DIM**-0.5, **options)[..., :DIM]

    @unittest.skipIf(NO_GPU, NO_GPU)
    def test_nothing_waits_for_a_gpu(self):
        """A call whose lists are made waits for nothing, nor does a boolean mask in any call. A graph can capture both."""
        q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        kept = random_blocks(300, 300, 1, 1).cuda()
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 300, 300, device="cuda")
        causal = torch.ones(300, 300, dtype=torch.bool, device="cuda").tril()
        want = [hopper_attention.attention(q, k, v, attn_mask=mask) for mask in (kept, causal)]
        masks = [{"attn_mask": kept.clone()}, {"block_mask": block_mask}]
        hopper_attention.attention(q, k, v, block_mask=block_mask)
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = [hopper_attention.attention(q, k, v, **mask) for mask in masks]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        # (The lists of a BlockMask have other full blocks at the ends, and so another order.)
        self.assertTrue(torch.equal(got[0], want[0]))
        self.assertLess((got[1] - want[1]).abs().max(), 0.02)
        lists = hopper_attention.block_lists(block_mask, q, k)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = [
                hopper_attention.attention(q, k, v, attn_mask=kept),
                hopper_attention.attention(q, k, v, block_mask=lists),
            ]
        for t in captured:
            t.zero_()
        graph.replay()
        for a, b in zip(captured, got):
            self.assertTrue(torch.equal(a, b))

    @unittest.skipIf(NO_GPU, NO_GPU)
    def test_what_a_gpu_refuses(self):
        q, k, v = (torch.randn(1, 130, 4, 192, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        kept = torch.ones(130, 130, dtype=torch.bool, device="cuda").tril()
        o = hopper_attention.attention(q, k, v, attn_mask=kept)
        causal = hopper_attention.attention(q, k, v, causal=True)
        self.assertLess((o - causal).abs().max(), 0.02 * causal.abs().max())
        biased = hopper_attention.attention(q, k, v, attn_mask=kept, bias=torch.zeros(130, 130, device="cuda"))
        self.assertLess((biased - causal).abs().max(), 0.02 * causal.abs().max())
        # The backward of a bias beside a cap. (It is asked for where gradients are.)
        q, k, v = (x[..., :64].contiguous().requires_grad_() for x in (q, k, v))
        with self.assertRaises(HattnError) as refused:
            bias = torch.zeros(130, 130, device="cuda")
            hopper_attention.attention(q, k, v, attn_mask=kept, bias=bias, softcap=9.0).sum().backward()
        self.assertEqual(refused.exception.status, abi.ERROR_UNSUPPORTED)

    @unittest.skipIf(NO_GPU, NO_GPU)
    def test_modifiers_on_a_gpu(self):
        """What is done to scores and weights beside a mask, as on the CPU."""
        kept = random_blocks(300, 400, 1, HEADS)
        slopes = torch.tensor([0.5, 0.1, 0.02, -0.01])
        state = torch.tensor([7, 3])
        kinds = {
            "softcap": ({"softcap": 5.0}, {}),
            "alibi": ({}, {"alibi_slopes": slopes}),
            "dropout": ({"dropout_p": 0.3}, {"dropout_state": state}),
            "all": ({"softcap": 5.0, "dropout_p": 0.3}, {"alibi_slopes": slopes, "dropout_state": state}),
        }
        for dim in (64, 128):
            generator = torch.Generator().manual_seed(5)
            shapes = (2, 300, HEADS, dim), (2, 400, HEADS_KV, dim), (2, 400, HEADS_KV, dim)
            qkv = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
            d_o = torch.randn(shapes[0], generator=generator).bfloat16()
            for name, (numbers, of_device) in kinds.items():
                with self.subTest(name=name, dim=dim):
                    results = []
                    for device in ("cpu", "cuda"):
                        leaves = [t.to(device).requires_grad_() for t in qkv]
                        there = {key: t.to(device) for key, t in of_device.items()}
                        o = hopper_attention.attention(*leaves, attn_mask=kept.to(device), **numbers, **there)
                        results.append([o, *torch.autograd.grad(o, leaves, d_o.to(device))])
                    for want, got in zip(*results):
                        torch.testing.assert_close(got.cpu().float(), want.float(), atol=0.06, rtol=0.03)


@unittest.skipIf(NO_NUMPY, NO_NUMPY)
class Arrays(unittest.TestCase):
    def setUp(self):
        random = numpy.random.default_rng(3)
        self.random = random
        shapes = (2, 300, HEADS, DIM), (2, 200, HEADS_KV, DIM), (2, 200, HEADS_KV, DIM)
        self.qkv = [random.standard_normal(shape).astype("float32") for shape in shapes]

    def masks(self):
        draw = self.random.random
        yield draw((300, 200)) > 0.5
        kept = draw((2, HEADS, 300, 200)) > 0.5
        kept[:, 1:, :128, :128] = True
        kept[:, :, 128:256, :128] = False
        kept[1, :, 270:] = False
        yield kept
        yield numpy.arange(200) < 150
        yield numpy.zeros((300, 200), bool)

    def plain(self, kept):
        """O and the weights in f64."""
        q, k, v = (t.astype("float64") for t in (self.qkv[0], *(t.repeat(2, 2) for t in self.qkv[1:])))
        weights = numpy.where(kept, numpy.exp(numpy.einsum("bqhd,bkhd->bhqk", q, k) / 4), 0)
        sums = weights.sum(-1, keepdims=True)
        weights = weights / numpy.where(sums == 0, 1, sums)
        return numpy.einsum("bhqk,bkhd->bqhd", weights, v), weights

    def test_attention_and_gradients(self):
        for kept in self.masks():
            with self.subTest(shape=kept.shape):
                o, lse = hopper_attention.attention(*self.qkv, return_lse=True, attn_mask=kept)
                want, weights = self.plain(kept)
                numpy.testing.assert_allclose(o, want, atol=1e-5)
                d_o = self.random.standard_normal(o.shape).astype("float32")
                found = hopper_attention.attention_backward(*self.qkv, o, lse, d_o, attn_mask=kept)
                # By the definition: dV = P^T dO, dS = P (dO V^T - rowsum(dO O)).
                q, k, v = (t.astype("float64") for t in (self.qkv[0], *(t.repeat(2, 2) for t in self.qkv[1:])))
                d_weights = numpy.einsum("bqhd,bkhd->bhqk", d_o, v)
                sums = numpy.einsum("bqhd,bqhd->bhq", d_o, want)
                d_scores = weights * (d_weights - sums[..., None]) / 4
                grouped = (2, 200, HEADS_KV, 2, DIM)
                exact = (
                    numpy.einsum("bhqk,bkhd->bqhd", d_scores, k),
                    numpy.einsum("bhqk,bqhd->bkhd", d_scores, q).reshape(grouped).sum(3),
                    numpy.einsum("bhqk,bqhd->bkhd", weights, d_o).reshape(grouped).sum(3),
                )
                for mine, its in zip(found, exact):
                    numpy.testing.assert_allclose(mine, its, atol=3e-5)

    def test_lists(self):
        kept = next(self.masks())
        lists = hopper_attention.block_lists(kept, *self.qkv[:2])
        self.assertEqual([t.shape for t in lists[:3]], [(1, 1, 3), (1, 1, 3, 2), (1, 1, 3, 1024)])
        want = hopper_attention.attention(*self.qkv, attn_mask=kept)
        self.assertTrue((hopper_attention.attention(*self.qkv, block_mask=lists) == want).all())
        # The bit of query 5 and key 130: word 0 of the query's four of the second block.
        bits = lists.bits.view("uint32").reshape(3, 2, 128, 4)
        self.assertEqual(bool(bits[0, 1, 5, 0] >> 2 & 1), bool(kept[5, 130]))

    @unittest.skipIf(NO_TORCH, NO_TORCH)
    def test_lists_are_those_of_torch(self):
        for kept in self.masks():
            mine = hopper_attention.block_lists(kept, *self.qkv[:2])
            q, k = (torch.from_numpy(t) for t in self.qkv[:2])
            theirs = hopper_attention.block_lists(torch.from_numpy(kept), q, k)
            for name in ("counts", "indices", "full_counts", "full_indices"):
                self.assertTrue((getattr(mine, name) == getattr(theirs, name).numpy()).all(), name)
            most = mine.bits.shape[-1]
            self.assertTrue((mine.bits == theirs.bits.numpy()[..., :most]).all())

    def test_refusals(self):
        kept = next(self.masks())
        lists = hopper_attention.block_lists(kept, *self.qkv[:2])
        for kind, words, options in (
            (ValueError, "block_mask: given, and so is attn_mask", {"attn_mask": kept, "block_mask": lists}),
            (TypeError, "attn_mask: int32; allowed: booleans", {"attn_mask": kept.astype("int32")}),
            (TypeError, "attn_mask: list; allowed: arrays of numpy", {"attn_mask": [True]}),
            (ValueError, r"attn_mask: shape \[300, 199\]", {"attn_mask": kept[:, 1:]}),
            (TypeError, "block_mask: ndarray; allowed for these arrays", {"block_mask": kept}),
            (TypeError, "mask_block_cnt: an element type", {"block_mask": lists._replace(counts=lists.counts * 1.0)}),
            (HattnError, "full_block_idx", {"block_mask": lists._replace(full_indices=None)}),
            (HattnError, "mask_bits: shape", {"block_mask": lists._replace(bits=lists.bits[:, :, :2])}),
        ):
            with self.subTest(words=words):
                self.assertRaisesRegex(kind, words, hopper_attention.attention, *self.qkv, **options)


if __name__ == "__main__":
    unittest.main()
