"""Tests of the operators behind register_sdpa, on CPU tensors: the dispatcher brings only CUDA tensors to them."""

import unittest

try:
    import torch
except ImportError:
    torch = None
else:
    import torch.nn.functional as F
    from hopper_attention import _sdpa, dropout_mask, register_sdpa


class Sdpa(unittest.TestCase):
    def setUp(self):
        if torch is None:
            self.skipTest("no torch")
        torch.manual_seed(0)

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
        lengths = torch.tensor([0, 21], dtype=torch.int32)
        with self.assertRaisesRegex(NotImplementedError, "cum_seq_q was given"):
            _sdpa.flash_forward(q[0], k[0], v[0], lengths, lengths, 21, 21, 0.0, False, False)
        with self.assertRaisesRegex(NotImplementedError, "alibi_slopes was given"):
            _sdpa.flash_forward(q, k, v, None, None, 21, 21, 0.0, False, False, alibi_slopes=torch.ones(6))

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
