"""Tests of the operators behind register_sdpa, on CPU tensors: the dispatcher brings only CUDA tensors to them."""

import unittest
from unittest import mock

try:
    import torch
except ImportError:
    torch = None
else:
    import torch.nn.functional as F
    from hopper_attention import HattnError, _sdpa, attention, attention_varlen, dropout_mask, register_sdpa
    from torch.nn.attention import SDPBackend


class Sdpa(unittest.TestCase):
    def setUp(self):
        if torch is None:
            self.skipTest("no torch")
        torch.manual_seed(0)
        # Sequences of one row of 21 tokens, of which one is empty.
        self.cu = torch.tensor([0, 4, 4, 13, 21], dtype=torch.int32)

    def tensors(self, turned):
        shapes = ((2, 6, 21, 16), (2, 2, 21, 16), (2, 2, 21, 16))
        made = [torch.randn(shape) for shape in shapes]
        return [t.transpose(1, 2).contiguous().transpose(1, 2) if turned else t for t in made]

    def test_both_passes(self):
        for turned in (False, True):
            for causal in (False, True):
                with self.subTest(turned=turned, causal=causal):
                    q, k, v = (t.requires_grad_() for t in self.tensors(turned))
                    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
                    d_o = torch.randn_like(want)
                    gradients = torch.autograd.grad(want, (q, k, v), d_o)
                    with torch.no_grad():
                        o, lse, _, _, max_q, max_k, seed, offset, _ = _sdpa.sdpa_forward(q, k, v, 0.0, causal)
                        d = _sdpa.sdpa_backward(
                            d_o, q, k, v, o, lse, None, None, max_q, max_k, 0.0, causal, seed, offset
                        )
                    torch.testing.assert_close(o, want)
                    # Compiled code takes the strides from torch's own description of the operators.
                    self.assertEqual(
                        [t.stride() for t in (o, *d)], [torch.empty_like(t).stride() for t in (q, q, k, v)]
                    )
                    for mine, theirs in zip(d, gradients):
                        torch.testing.assert_close(mine, theirs)

    def dropped(self, q, k, v, state):
        """Causal attention with a quarter of the weights dropped, from the definition."""
        k, v = (t.repeat_interleave(3, 1) for t in (k, v))
        scores = (q @ k.mT / 4).masked_fill(~torch.ones(21, 21, dtype=torch.bool).tril(), float("-inf"))
        kept = dropout_mask(0.25, state.view(torch.int64), 2, 6, 21, 21)
        return (scores.softmax(-1) * kept / 0.75) @ v

    def test_dropout(self):
        q, k, v = (t.requires_grad_() for t in self.tensors(True))
        with torch.no_grad():
            o, lse, _, _, max_q, max_k, state, unused, _ = _sdpa.sdpa_forward(q, k, v, 0.25, True)
            d_o = torch.randn_like(o)
            d = _sdpa.sdpa_backward(d_o, q, k, v, o, lse, None, None, max_q, max_k, 0.25, True, state, unused)
        want = self.dropped(q, k, v, state)
        torch.testing.assert_close(o, want)
        for mine, theirs in zip(d, torch.autograd.grad(want, (q, k, v), d_o)):
            torch.testing.assert_close(mine, theirs)

        def drawn(seed):
            torch.manual_seed(seed)
            return _sdpa.sdpa_forward(q.detach(), k.detach(), v.detach(), 0.25)[0]

        self.assertTrue(torch.equal(drawn(3), drawn(3)))
        self.assertFalse(torch.equal(drawn(3), drawn(4)))
        turned = [t.detach().transpose(1, 2) for t in (q, k, v)]
        below, _, state, *_ = _sdpa.flash_forward(*turned, None, None, 21, 21, 0.25, True, False)
        torch.testing.assert_close(below.transpose(1, 2), self.dropped(*(t.detach() for t in (q, k, v)), state))

    def test_the_operator_below(self):
        q, k, v = (t.transpose(1, 2) for t in self.tensors(False))
        o, lse, *random = _sdpa.flash_forward(
            q, k, v, None, None, 21, 21, 0.0, False, False, window_size_left=4, window_size_right=2
        )
        own, keys = torch.arange(21)[:, None], torch.arange(21)
        keep = (keys >= own - 4) & (keys <= own + 2)
        want = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=keep, enable_gqa=True
        ).transpose(1, 2)
        torch.testing.assert_close(o, want)
        d = _sdpa.flash_backward(
            torch.ones_like(o),
            q,
            k,
            v,
            o,
            lse,
            None,
            None,
            21,
            21,
            0.0,
            False,
            *random[:2],
            window_size_left=4,
            window_size_right=2,
        )
        self.assertEqual([t.shape for t in d], [q.shape, k.shape, v.shape])

    def rows(self, grad=False):
        """Packed rows, [total, heads, head_dim], with 3 query heads for each KV head."""
        return [torch.randn(21, heads, 16, requires_grad=grad) for heads in (6, 2, 2)]

    def test_packed_sequences(self):
        """As nested tensors come, beside attention_varlen: windows, causal masks, dropout, both passes."""
        for options, own in (
            ({}, {}),
            ({"is_causal": True}, {"causal": True}),
            ({"window_size_left": 3, "window_size_right": -1}, {"window": (3, None)}),
            ({"window_size_left": 2, "is_causal": True}, {"window": (2, 0)}),
            ({"scale": 0.5, "dropout_p": 0.25}, {"scale": 0.5, "dropout_p": 0.25}),
        ):
            with self.subTest(options=options):
                q, k, v = self.rows(grad=True)
                options = {"dropout_p": 0.0, "is_causal": False, **options}
                fixed = (self.cu, self.cu, 9, 0, options.pop("dropout_p"), options.pop("is_causal"))
                with torch.no_grad():
                    o, lse, state, unused, _ = _sdpa.flash_forward(q, k, v, *fixed, False, **options)
                if "dropout_p" in own:
                    own["dropout_state"] = state.view(torch.int64)
                want, want_lse = attention_varlen(q, k, v, self.cu, return_lse=True, **own)
                self.assertEqual(lse.shape, (6, 21))
                self.assertTrue(torch.equal(o, want) and torch.equal(lse, want_lse))
                d_o = torch.randn_like(o)
                with torch.no_grad():
                    d = _sdpa.flash_backward(d_o, q, k, v, o, lse, *fixed, state, unused, **options)
                for mine, theirs in zip(d, torch.autograd.grad(want, (q, k, v), d_o)):
                    self.assertTrue(torch.equal(mine, theirs))

    def test_used_lengths_and_slopes(self):
        """Of packed and of dense tensors, without gradients."""
        slopes, used = torch.rand(6), torch.tensor([3, 0, 9, 2])
        q, k, v = self.rows()
        for more, own in (
            ({"seqused_k": used.int()}, {"seqused_kv": used}),
            ({"alibi_slopes": slopes}, {"alibi_slopes": slopes}),
            ({"alibi_slopes": slopes.expand(4, -1), "seqused_k": used}, {"alibi_slopes": slopes, "seqused_kv": used}),
        ):
            o, lse, *_ = _sdpa.flash_forward(q, k, v, self.cu, self.cu, 9, 9, 0.0, True, False, **more)
            want, want_lse = attention_varlen(q, k, v, self.cu, causal=True, return_lse=True, **own)
            self.assertTrue(torch.equal(o, want) and torch.equal(lse, want_lse))
            self.assertFalse(torch.allclose(o, attention_varlen(q, k, v, self.cu, causal=True)))
        q, k, v = (t.transpose(1, 2) for t in self.tensors(False))
        dense = (None, None, 21, 21, 0.0, True, False)
        o, lse, *_ = _sdpa.flash_forward(q, k, v, *dense, alibi_slopes=slopes.double())
        want, want_lse = attention(q, k, v, causal=True, alibi_slopes=slopes, return_lse=True)
        self.assertTrue(torch.equal(o, want) and torch.equal(lse, want_lse))
        o, lse, *_ = _sdpa.flash_forward(q, k, v, *dense, seqused_k=torch.tensor([5, 21]))
        want = attention(q[:1], k[:1, :5], v[:1, :5], causal=True)
        self.assertTrue(torch.equal(o[:1], want))
        self.assertTrue(torch.equal(o[1:], attention(q[1:], k[1:], v[1:], causal=True)))

    def test_what_torch_packs(self):
        """torch.nn.attention.varlen, and SDPA of nested tensors where torch chose its flash backend."""
        if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
            self.skipTest(f"torch {torch.__version__} has no register_flash_attention_impl")
        from torch.nn.attention.varlen import varlen_attn

        overrides = _sdpa._Overrides("CPU")
        try:
            with self.subTest("varlen_attn"):
                q, k, v = self.rows(grad=True)
                for window, own in (((-1, -1), None), ((-1, 0), (None, 0)), ((3, 0), (3, 0))):
                    o = varlen_attn(q, k, v, self.cu, self.cu, 9, 9, window_size=window)
                    want = attention_varlen(q, k, v, self.cu, window=own)
                    torch.testing.assert_close(o, want)
                    d_o = torch.randn_like(o)
                    for got, theirs in zip(*(torch.autograd.grad(made, (q, k, v), d_o) for made in (o, want))):
                        torch.testing.assert_close(got, theirs)
            with self.subTest("nested"):
                parts = [[torch.randn(n, 3, 16) for n in (4, 9, 8)] for _ in range(3)]
                q, k, v = (torch.nested.nested_tensor(one, layout=torch.jagged, requires_grad=True) for one in parts)
                of = "torch.nested._internal.sdpa._select_sdp_backend"
                with mock.patch(of, lambda *arguments, **options: SDPBackend.FLASH_ATTENTION):
                    # torch compares the lengths of nested tensors that have offsets of their own.
                    k, v = (torch.nested.nested_tensor_from_jagged(t.values(), q.offsets()) for t in (k, v))
                    o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
                dense = [[t[None].transpose(1, 2) for t in one] for one in parts]
                for got, *qkv in zip(o.transpose(1, 2).unbind(), *dense):
                    want = F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2)
                    torch.testing.assert_close(got, want[0])
                (gradient,) = torch.autograd.grad(o.values().square().sum(), q)
                leaf = dense[0][0].requires_grad_()
                want = F.scaled_dot_product_attention(leaf, *(one[0] for one in dense[1:]), is_causal=True)
                want = torch.autograd.grad(want.square().sum(), leaf)[0]
                torch.testing.assert_close(gradient.unbind()[0], want[0].transpose(0, 1))
        finally:
            overrides.remove()

    def test_through_the_dispatcher(self):
        # torch has no kernels of these operators for CPU tensors. So ours can be registered and undone here too.
        forward = torch.ops.aten._scaled_dot_product_flash_attention
        q, k, v = (t.requires_grad_() for t in self.tensors(True))
        self.assertRaises(NotImplementedError, forward, q, k, v, 0.0, True)
        overrides = _sdpa._Overrides("CPU")
        try:
            want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.5)
            o = forward(q, k, v, 0.0, True, scale=0.5)[0]
            torch.testing.assert_close(o, want)
            for mine, theirs in zip(
                torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True), torch.autograd.grad(want.sum(), (q, k, v))
            ):
                torch.testing.assert_close(mine, theirs)
            turned = [t.transpose(1, 2) for t in (q, k, v)]
            below = torch.ops.aten._flash_attention_forward(*turned, None, None, 21, 21, 0.0, True, False, scale=0.5)
            torch.testing.assert_close(below[0].transpose(1, 2), want)
            torch.testing.assert_close(torch.autograd.grad(below[0].sum(), q), torch.autograd.grad(o.sum(), q))
            # torch gives the gradients the state of the forward pass.
            o, *_, state, _, _ = forward(q, k, v, 0.25, True)
            want = self.dropped(q, k, v, state)
            torch.testing.assert_close(o, want)
            for mine, theirs in zip(*(torch.autograd.grad(made.square().sum(), (q, k, v)) for made in (o, want))):
                torch.testing.assert_close(mine, theirs)
        finally:
            overrides.remove()
        self.assertRaises(NotImplementedError, forward, q, k, v, 0.0, True)

    def test_refusals(self):
        q, k, v = self.tensors(False)
        with self.assertRaisesRegex(NotImplementedError, "return_debug_mask"):
            _sdpa.sdpa_forward(q, k, v, 0.0, False, True)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        dense, packed = (None, None, 21, 21, 0.0, False), (self.cu, self.cu, 21, 21, 0.0, False)
        with self.assertRaisesRegex(NotImplementedError, "return_debug_mask"):
            _sdpa.flash_forward(q, k, v, *dense, True)
        with self.assertRaisesRegex(NotImplementedError, "novelty was given"):
            _sdpa.flash_forward(q, k, v, *dense, False, novelty=1)
        with self.assertRaisesRegex(ValueError, "q: 4 dimensions; allowed: 3, .*with cu_seqlens_q"):
            _sdpa.flash_forward(q, k, v, *packed, False)
        with self.assertRaisesRegex(HattnError, "cu_seqlens_q: 21 at 4; allowed: 0 to 20"):
            _sdpa.flash_forward(q[0, :20], k[0], v[0], *packed, False)
        with self.assertRaisesRegex(HattnError, "alibi_slopes"):
            _sdpa.flash_forward(q, k, v, *dense, False, alibi_slopes=torch.ones(5))
        # torch's backward operator is given neither of both. Without gradients they are computed.
        q.requires_grad_()
        for name, given in (("alibi_slopes", torch.ones(6)), ("seqused_k", torch.tensor([3, 21]))):
            with self.assertRaisesRegex(NotImplementedError, f"{name} in a call that autograd records.*no_grad"):
                _sdpa.flash_forward(q, k, v, *dense, False, **{name: given})
            with torch.no_grad():
                _sdpa.flash_forward(q, k, v, *dense, False, **{name: given})

    def test_registered_and_undone(self):
        if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
            self.assertRaisesRegex(NotImplementedError, "torch 2.11 has", register_sdpa)
            self.skipTest(f"torch {torch.__version__} has no register_flash_attention_impl")
        handle = register_sdpa()
        self.assertEqual(torch.nn.attention.current_flash_attention_impl(), "hopper_attention")
        handle.remove()
        handle.remove()
        self.assertIsNone(torch.nn.attention.current_flash_attention_impl())
        register_sdpa().remove()
        # The CPU's kernels are as they were.
        q, k, v = self.tensors(False)
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
