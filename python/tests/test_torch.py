"""Tests of attention on torch tensors, on the CPU. test_cuda.py has those of a GPU."""

import math
import threading
import unittest
from unittest import mock

from hopper_attention import abi
from hopper_attention._plans import PlanCache, plans

try:
    import torch
except ImportError:
    torch = None
else:
    from hopper_attention import _torch, _varlen, attention


class Torch(unittest.TestCase):
    def setUp(self):
        if torch is None:
            self.skipTest("no torch")
        torch.manual_seed(0)

    def tensors(self, dtype=None, seqlen_q=33):
        shapes = ((2, seqlen_q, 6, 16), (2, 47, 2, 16), (2, 47, 2, 16))
        return tuple(torch.randn(shape).to(dtype or torch.float32) for shape in shapes)

    def exact(self, q, k, v, keep=None):
        q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        if keep is not None:
            scores = scores.masked_fill(~keep, -math.inf)
        return (torch.softmax(scores, -1) @ v).transpose(1, 2), torch.logsumexp(scores, -1)

    def close(self, got, want, tolerance):
        self.assertEqual(got.shape, want.shape)
        self.assertLessEqual((got.double() - want).abs().max().item(), tolerance)

    def test_types_and_masks(self):
        own = torch.arange(33)[:, None] + 47 - 33
        keys = torch.arange(47)
        masks = [({}, None), ({"causal": True}, keys <= own), ({"causal": True, "top_left": True}, keys <= own - 14)]
        masks += [
            ({"window": (5, 2)}, (keys >= own - 5) & (keys <= own + 2)),
            ({"window": (5, None), "causal": True}, (keys >= own - 5) & (keys <= own)),
        ]
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.004)):
            for options, keep in masks:
                with self.subTest(dtype=dtype, **options):
                    q, k, v = self.tensors(dtype)
                    o, lse = attention(q, k, v, return_lse=True, **options)
                    self.assertEqual((o.dtype, lse.dtype), (dtype, torch.float32))
                    exact_o, exact_lse = self.exact(q, k, v, keep)
                    self.close(o, exact_o, tolerance)
                    self.close(lse, exact_lse, 1e-4)

    def test_strides(self):
        q, k, v = self.tensors()
        want = attention(q, k, v)
        heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        self.assertTrue(torch.equal(attention(*heads_first), want))
        together = torch.randn(2, 33, 3, 6, 16)
        self.close(attention(*together.unbind(2)), self.exact(*together.unbind(2))[0], 1e-5)
        one_key = k[:, :1].expand(-1, 47, -1, -1)
        self.close(attention(q, one_key, v), self.exact(q, one_key, v)[0], 1e-5)
        thin = q[..., 3:4], k[..., 3:4], v
        self.close(attention(*thin), self.exact(*thin)[0], 1e-5)

    def test_a_scale(self):
        q, k, v = self.tensors()
        self.close(attention(q, k, v, scale=0.5), self.exact(q * 2, k, v)[0], 1e-5)

    def test_no_elements(self):
        q, k, v = self.tensors()
        self.assertEqual(attention(q[:0], k[:0], v[:0]).shape, (0, 33, 6, 16))
        o, lse = attention(q, k[:, :0], v[:, :0], return_lse=True)
        self.assertTrue((o == 0).all() and (lse == -math.inf).all())

    def test_plans_are_kept(self):
        if _torch.fallback is None:
            self.skipTest("the compiled operators keep their own plans")
        cache = plans()
        q, k, v = self.tensors(seqlen_q=19)
        made = cache.made
        for options in ({}, {}, {"causal": True}, {"causal": True}):
            attention(q, k, v, **options)
        self.assertEqual(cache.made, made + 2)

    def test_refusals(self):
        q, k, v = self.tensors()
        for error, words, args, options in (
            (TypeError, "float64", (q.double(), k, v), {}),
            (ValueError, "3 dimensions", (q[0], k, v), {}),
            (ValueError, "window: left -3", (q, k, v), {"window": (-3, 0)}),
            (ValueError, "scale: 0", (q, k, v), {"scale": 0}),
            (ValueError, "sm_margin: -1; allowed: 0 to", (q, k, v), {"sm_margin": -1}),
            (ValueError, "sm_margin: 4294967296", (q, k, v), {"sm_margin": 2**32}),
            (ValueError, "workspace_limit: 0; allowed: None, or 1 to", (q, k, v), {"workspace_limit": 0}),
            (ValueError, "workspace_limit: 9223372036854775808", (q, k, v), {"workspace_limit": 2**63}),
            (abi.HattnError, "k: shape", (q, k[:1], v), {}),
            (abi.HattnError, "f16", (q, k.half(), v), {}),
            (abi.HattnError, "q", (q.transpose(1, 3).contiguous().transpose(1, 3), k, v), {}),
            (abi.HattnError, "heads_q", (q[:, :, :5], k, v), {}),
        ):
            with self.subTest(words=words):
                self.assertRaisesRegex(error, words, attention, *args, **options)

    def gradients(self, compute, inputs, d_o, d_lse=None):
        """The gradients of what compute gives, o and the log-sum-exp."""
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        outputs = compute(*leaves)
        used, given = zip(*[(o, d) for o, d in zip(outputs, (d_o, d_lse)) if d is not None])
        return torch.autograd.grad(used, leaves, given)

    def test_gradients(self):
        own, keys = torch.arange(33)[:, None] + 47 - 33, torch.arange(47)
        masks = [
            ({}, None),
            ({"causal": True}, keys <= own),
            ({"window": (5, 2)}, (keys >= own - 5) & (keys <= own + 2)),
        ]
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.06), (torch.float16, 0.008)):
            for options, keep in masks:
                for with_lse in (False, True):
                    with self.subTest(dtype=dtype, with_lse=with_lse, **options):
                        inputs = self.tensors(dtype)
                        d_o = torch.randn(inputs[0].shape).to(dtype)
                        d_lse = torch.randn(2, 6, 33) if with_lse else None
                        got = self.gradients(lambda *t: attention(*t, return_lse=True, **options), inputs, d_o, d_lse)
                        doubles = [t.double() for t in inputs]
                        want = self.gradients(
                            lambda *t: self.exact(*t, keep),
                            doubles,
                            d_o.double(),
                            None if d_lse is None else d_lse.double(),
                        )
                        for mine, exact, t in zip(got, want, inputs):
                            self.assertEqual(mine.dtype, t.dtype)
                            self.close(mine, exact, tolerance * exact.abs().max().item())

    def test_head_dims(self):
        """Any on the CPU, that of v another one."""
        pairs = [(dim, dim) for dim in (8, 96, 136, 256, 512)] + [(192, 128), (128, 192), (12, 520)]
        for head_dim, head_dim_vo in pairs:
            for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 0.06), (torch.float16, 0.008)):
                with self.subTest(head_dim=head_dim, head_dim_vo=head_dim_vo, dtype=dtype):
                    shapes = ((1, 33, 4, head_dim), (1, 47, 2, head_dim), (1, 47, 2, head_dim_vo))
                    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
                    d_o = torch.randn(1, 33, 4, head_dim_vo).to(dtype)
                    o, lse = attention(*inputs, causal=True, return_lse=True)
                    keep = torch.arange(47) <= torch.arange(33)[:, None] + 14
                    exact_o, exact_lse = self.exact(*inputs, keep)
                    self.close(o, exact_o, tolerance)
                    self.close(lse, exact_lse, 1e-4)
                    got = self.gradients(lambda *t: (attention(*t, causal=True),), inputs, d_o)
                    doubles = [t.double() for t in inputs]
                    want = self.gradients(lambda *t: self.exact(*t, keep)[:1], doubles, d_o.double())
                    for mine, exact in zip(got, want):
                        self.close(mine, exact, tolerance * exact.abs().max().item())

    def test_what_has_no_gradients_is_refused_before_the_forward_pass(self):
        """As on a GPU, whose forward kernels take more head dims than its backward kernels."""
        library, asked = abi.load(), []

        def supported(problem, device):
            asked.append(type(problem))
            return computed[type(problem)]

        problems = (abi.ForwardProblem(), abi.BackwardProblem())
        cases = ((True, True), (True, False), (False, False))
        for forward, backward in cases:
            computed = {abi.ForwardProblem: forward, abi.BackwardProblem: backward}
            key = ("a test", forward, backward)
            with mock.patch.object(library, "supported", supported), mock.patch.object(abi, "load", lambda: library):
                if forward and not backward:
                    words = "Without gradients, as under torch.no_grad\\(\\), it is computed"
                    for _ in range(2):
                        with self.assertRaisesRegex(abi.HattnError, words) as raised:
                            _torch.require_gradients(key, 0, lambda: problems)
                        self.assertEqual(raised.exception.status, abi.ERROR_UNSUPPORTED)
                    continue
                # A forward pass that is refused says so itself.
                _torch.require_gradients(key, 0, lambda: problems)
                asked.clear()
                _torch.require_gradients(key, 0, lambda: problems)
                self.assertEqual(asked, [])

    def test_the_cpu_meets_every_limit(self):
        """Both passes are asked for it, compiled, too, and give the same bits."""
        inputs = self.tensors()
        d_o = torch.randn(inputs[0].shape)
        asked = []
        of = _varlen.packed_problem

        def noted(*arguments, **fields):
            asked.append(fields["workspace_limit"])
            return of(*arguments, **fields)

        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        with mock.patch.object(_varlen, "packed_problem", noted):
            for limit, call in ((1, attention), (2**63 - 1, attention), (12345, compiled)):
                asked.clear()
                want = self.gradients(lambda *t: (attention(*t, causal=True),), inputs, d_o)
                got = self.gradients(lambda *t, n=limit: (call(*t, causal=True, workspace_limit=n),), inputs, d_o)
                self.assertEqual(asked, [limit, limit])
                for one, other in zip(got, want):
                    torch.testing.assert_close(one, other, rtol=0, atol=0)

    def test_the_cpu_ignores_a_margin(self):
        inputs = self.tensors()
        d_o = torch.randn(inputs[0].shape)
        for options in ({}, {"causal": True}, {"window": (5, 2)}):
            with self.subTest(**options):
                want = attention(*inputs, **options)
                self.assertTrue(torch.equal(attention(*inputs, **options, sm_margin=16), want))
                o, _ = attention(*inputs, **options, sm_margin=16, return_lse=True)
                self.assertTrue(torch.equal(o, want))
                got, want = (
                    self.gradients(lambda *t, n=n: (attention(*t, **options, sm_margin=n),), inputs, d_o)
                    for n in (16, 0)
                )
                for one, other in zip(got, want):
                    self.assertTrue(torch.equal(one, other))

    def test_gradients_are_those_of_sdpa(self):
        def sdpa(q, k, v):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
            return (torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2),)

        inputs = self.tensors()
        d_o = torch.randn(inputs[0].shape)
        got = self.gradients(lambda *t: (attention(*t, causal=True, top_left=True),), inputs, d_o)
        for mine, theirs in zip(got, self.gradients(sdpa, inputs, d_o)):
            self.close(mine, theirs.double(), 1e-5)

    def test_gradients_of_any_strides(self):
        q, k, v = (t.requires_grad_() for t in self.tensors())
        want = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))  # the gradient of a sum has strides of 0
        ones = torch.ones(2, 33, 6, 16)
        for d_o in (
            ones.transpose(1, 2).contiguous().transpose(1, 2),
            torch.ones(ones.numel() + 1)[1:].view(ones.shape),
        ):
            got = torch.autograd.grad(attention(q, k, v), (q, k, v), d_o)
            self.assertTrue(all(map(torch.equal, got, want)))
        together = torch.randn(2, 33, 3, 6, 16, requires_grad=True)
        attention(*together.unbind(2)).sum().backward()
        apart = [t.detach().requires_grad_() for t in together.unbind(2)]
        attention(*apart).sum().backward()
        self.assertTrue(torch.equal(together.grad, torch.stack([t.grad for t in apart], 2)))

    def test_gradients_that_are_not_asked_for(self):
        q, k, v = self.tensors()
        self.assertFalse(attention(q, k, v).requires_grad)
        with torch.no_grad():
            self.assertFalse(attention(q.clone().requires_grad_(), k, v).requires_grad)
        all_three = [t.clone().requires_grad_() for t in (q, k, v)]
        attention(*all_three).square().sum().backward()
        alone = k.clone().requires_grad_()
        attention(q, alone, v).square().sum().backward()
        self.assertTrue(torch.equal(alone.grad, all_three[1].grad))
        # The log-sum-exp alone: V has no part in it.
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        attention(*leaves, return_lse=True)[1].sum().backward()
        self.assertTrue(leaves[0].grad.abs().max() > 0.01 and (leaves[2].grad == 0).all())
        with self.assertRaisesRegex(RuntimeError, "second derivative|derivative for aten::_scaled_dot"):
            leaf = q.clone().requires_grad_()
            first = torch.autograd.grad(attention(leaf, k, v).square().sum(), leaf, create_graph=True)[0]
            first.sum().backward()

    def test_an_input_that_was_changed_is_noticed(self):
        q, k, v = self.tensors()
        leaf = q.clone().requires_grad_()
        o = attention(leaf, k, v)
        k.add_(1)
        self.assertRaisesRegex(RuntimeError, "inplace operation", o.sum().backward)

    def test_determinism_is_asked_for(self):
        q, k, v = (t.requires_grad_() for t in self.tensors(seqlen_q=21))
        attention(q, k, v).sum().backward()
        made, before = plans().made, q.grad.clone()
        self.addCleanup(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(True)
        q.grad = None
        attention(q, k, v).sum().backward()
        self.assertEqual(plans().made, made + (_torch.fallback is not None))
        self.assertTrue(torch.equal(q.grad, before))


class Plans(unittest.TestCase):
    def test_the_cache_drops_the_oldest(self):
        library = abi.load()
        small = PlanCache(library, capacity=2)

        def one(seqlen_kv):
            sizes = {"heads_q": 1, "heads_kv": 1, "head_dim_qk": 8, "head_dim_vo": 8, "batch": 1, "seqlen_q": 1}
            return abi.ForwardProblem(dtype=abi.F32, seqlen_kv=seqlen_kv, **sizes)

        first = small.get(abi.CPU, one(1))
        for seqlen_kv in (2, 1, 3):  # 3 takes the place of 2, the one not used for longest
            small.get(abi.CPU, one(seqlen_kv))
        self.assertEqual((len(small), small.made), (2, 3))
        self.assertIs(small.get(abi.CPU, one(1)), first)
        # The same bytes as another struct are another plan.
        self.assertIsNot(small.get(abi.CPU, abi.BackwardProblem.of(one(1))), first)


class Operators(unittest.TestCase):
    """What torch asks of an operator."""

    def setUp(self):
        if torch is None:
            self.skipTest("no torch")
        torch.manual_seed(0)
        torch._dynamo.reset()

    def tensors(self, dtype=None, grad=True):
        shapes = ((2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 8))
        return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in shapes]

    def test_opcheck(self):
        q, k, v = self.tensors()
        numbers = (0.0, abi.MASK_CAUSAL, 0, 0, 0)
        torch.library.opcheck(torch.ops.hopper_attention.forward_lse.default, (q, k, v, *numbers))
        with torch.no_grad():
            o, lse = torch.ops.hopper_attention.forward_lse(q, k, v, *numbers)
        plain = [t.detach() for t in (q, k, v)]
        torch.library.opcheck(torch.ops.hopper_attention.forward.default, (*plain, *numbers))
        torch.library.opcheck(
            torch.ops.hopper_attention.backward.default, (torch.randn_like(o), None, *plain, o, lse, *numbers, False)
        )
        # With a margin, the last argument.
        torch.library.opcheck(torch.ops.hopper_attention.forward_lse.default, (q, k, v, *numbers, 8))
        torch.library.opcheck(
            torch.ops.hopper_attention.backward.default, (torch.randn_like(o), None, *plain, o, lse, *numbers, True, 8)
        )

    def test_compiled_in_one_graph(self):
        q, k, v = self.tensors()

        def step(q, k, v):
            o, lse = attention(q * 2, k, v, causal=True, return_lse=True)
            return o.sin().sum() + lse.sum()

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        want = torch.autograd.grad(step(q, k, v), (q, k, v))
        for mine, theirs in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v)), want):
            torch.testing.assert_close(mine, theirs)
        with torch.no_grad():
            without = torch.compile(
                lambda q, k, v: attention(q, k, v, window=(3, 0)) + 1, fullgraph=True, backend="aot_eager"
            )
            torch.testing.assert_close(without(q, k, v), attention(q, k, v, window=(3, 0)) + 1)
        with_margin = torch.compile(
            lambda q, k, v: attention(q, k, v, causal=True, sm_margin=8), fullgraph=True, backend="aot_eager"
        )
        want = torch.autograd.grad(attention(q, k, v, causal=True).sum(), (q, k, v))
        for mine, theirs in zip(torch.autograd.grad(with_margin(q, k, v).sum(), (q, k, v)), want):
            torch.testing.assert_close(mine, theirs)

    def test_compiled_with_dynamic_shapes(self):
        compiled = torch.compile(
            lambda q, k, v: attention(q, k, v, causal=True) * 2, fullgraph=True, dynamic=True, backend="aot_eager"
        )
        for seqlen in (5, 9, 14):
            q = torch.randn(2, seqlen, 4, 16)
            torch.testing.assert_close(compiled(q, q, q), attention(q, q, q, causal=True) * 2)

    def test_autocast(self):
        q, k, v = self.tensors()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o = attention(q, k, v)
            compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend="aot_eager")(q, k, v)
        self.assertEqual((o.dtype, compiled.dtype), (torch.bfloat16, torch.bfloat16))
        self.assertTrue(torch.equal(o, compiled))
        want = attention(*(t.bfloat16() for t in (q, k, v)))
        self.assertTrue(torch.equal(o, want))
        self.assertEqual(torch.autograd.grad(o.float().sum(), q)[0].dtype, torch.float32)

    def test_shapes_without_memory(self):
        q, k, v = (t.detach().to("meta") for t in self.tensors())
        o, lse = attention(q, k, v, return_lse=True)
        self.assertEqual((o.shape, lse.shape, o.device.type), ((2, 9, 4, 8), (2, 4, 9), "meta"))

    def test_checkpointed(self):
        q, k, v = self.tensors()
        want = torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v))
        o = torch.utils.checkpoint.checkpoint(attention, q, k, v, use_reentrant=False)
        for mine, theirs in zip(torch.autograd.grad(o.square().sum(), (q, k, v)), want):
            self.assertTrue(torch.equal(mine, theirs))

    def test_threads(self):
        q, k, v = self.tensors()
        want = torch.autograd.grad(attention(q, k, v, causal=True).square().sum(), (q, k, v))
        wrong = []

        def work():
            for _ in range(20):
                leaves = [t.detach().requires_grad_() for t in (q, k, v)]
                got = torch.autograd.grad(attention(*leaves, causal=True).square().sum(), leaves)
                wrong.extend(None for a, b in zip(got, want) if not torch.equal(a, b))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_what_is_not_for_torch(self):
        q, k, v = self.tensors(grad=False)
        self.assertRaisesRegex(TypeError, "out: not for torch", attention, q, k, v, out=q)
        self.assertRaisesRegex(TypeError, "attention_fp8", attention, q.to(torch.float8_e4m3fn), k, v)
