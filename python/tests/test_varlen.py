"""Tests of packed sequences on torch tensors, on the CPU. test_varlen_arrays.py has those of numpy arrays."""

import itertools
import math
import unittest
from unittest import mock

from hopper_attention import abi

try:
    import torch
except ImportError:
    torch = None
else:
    from definition import causal_keep, reference
    from hopper_attention import _varlen, attention, attention_varlen

# Sequences of both sides: rows, and used rows. Two are empty on one side, and the last one is not used at all.
ROWS_Q, ROWS_KV = (3, 0, 9, 4, 5), (5, 2, 9, 0, 6)
USED_Q, USED_KV = (2, 0, 9, 1, 0), (5, 0, 7, 0, 6)
MASKS = ({}, {"causal": True}, {"window": (3, 1)}, {"causal": True, "top_left": True}, {"scale": 0.5})


class Base(unittest.TestCase):
    def setUp(self):
        if torch is None:
            self.skipTest("no torch")
        torch.manual_seed(0)
        # One row before the first sequence, and two after the last.
        self.cu_q = torch.tensor((1, *ROWS_Q)).cumsum(0)
        self.cu_kv = torch.tensor((1, *ROWS_KV)).cumsum(0)

    def qkv(self, dtype=None, grad=False, device="cpu"):
        rows = (24, 25, 25)
        made = [torch.randn(n, heads, 16).to(dtype or torch.float32) for n, heads in zip(rows, (4, 2, 2))]
        return [t.to(device).requires_grad_(grad) for t in made]

    def lengths(self, used):
        more = {"seqused_q": torch.tensor(USED_Q), "seqused_kv": torch.tensor(USED_KV)} if used else {}
        return {"cu_seqlens_q": self.cu_q, "cu_seqlens_kv": self.cu_kv, **more}

    def one_by_one(self, q, k, v, used, **options):
        """O and log-sum-exp of the packed tensors, with a call of attention for each sequence."""
        o, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), -math.inf, device=q.device)
        o, lse = o + 0 * q, lse.clone()  # parts of the graph, so that slices may be written
        of_q, of_kv = (USED_Q, USED_KV) if used else (ROWS_Q, ROWS_KV)
        for b, n, b_kv, n_kv in zip(self.cu_q.tolist(), of_q, self.cu_kv.tolist(), of_kv):
            given = q[None, b : b + n], k[None, b_kv : b_kv + n_kv], v[None, b_kv : b_kv + n_kv]
            own, own_lse = attention(*given, return_lse=True, **options)
            o[b : b + n], lse[:, b : b + n] = own[0], own_lse[0]
        return o, lse


class Varlen(Base):
    def test_each_sequence_is_attention_of_its_own(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for used in (False, True):
                for options in MASKS:
                    with self.subTest(dtype=dtype, used=used, **options):
                        inputs = self.qkv(dtype, grad=True)
                        found = []
                        for compute in (
                            lambda: attention_varlen(*inputs, **self.lengths(used), return_lse=True, **options),
                            lambda: self.one_by_one(*inputs, used, **options),
                        ):
                            o, lse = compute()
                            torch.manual_seed(1)
                            d_o, d_lse = torch.randn_like(o), torch.randn_like(lse)
                            # The log-sum-exp of a row without keys has no gradient.
                            seen = lse > -math.inf
                            loss = (o * d_o).sum() + (lse[seen] * d_lse[seen]).sum()
                            found.append((o, lse, *torch.autograd.grad(loss, inputs)))
                        self.assertGreater(found[0][0].abs().max().item(), 0.1)
                        for got, want in zip(*found):
                            self.assertEqual((got.shape, got.dtype), (want.shape, want.dtype))
                            self.assertTrue(torch.equal(got, want))

    def test_head_dims(self):
        for head_dim, head_dim_vo in ((192, 128), (256, 256), (8, 512)):
            with self.subTest(head_dim=head_dim, head_dim_vo=head_dim_vo):
                q, k, v = torch.randn(24, 4, head_dim), torch.randn(25, 2, head_dim), torch.randn(25, 2, head_dim_vo)
                o = attention_varlen(q, k, v, **self.lengths(False), causal=True)
                self.assertEqual(o.shape, (24, 4, head_dim_vo))
                for b, n, b_kv, n_kv in zip(self.cu_q.tolist(), ROWS_Q, self.cu_kv.tolist(), ROWS_KV):
                    own = q[None, b : b + n], k[None, b_kv : b_kv + n_kv], v[None, b_kv : b_kv + n_kv]
                    self.assertTrue(torch.equal(o[b : b + n], attention(*own, causal=True)[0]))

    def test_packed_keys_have_the_offsets_of_the_queries(self):
        q, k, v = self.qkv()
        self.assertTrue(
            torch.equal(attention_varlen(q, k, v, self.cu_q), attention_varlen(q, k, v, self.cu_q, self.cu_q.clone()))
        )

    def test_only_the_output_and_only_the_lse_is_used(self):
        q, k, v = self.qkv(grad=True)

        def compute(*inputs):
            return attention_varlen(*inputs, self.cu_q, self.cu_kv, return_lse=True)

        d_qkv = torch.autograd.grad(compute(q, k, v)[0].sum(), (q, k, v))
        only_o = torch.autograd.grad(attention_varlen(q, k, v, self.cu_q, self.cu_kv).sum(), (q, k, v))
        for got, want in zip(only_o, d_qkv):
            self.assertTrue(torch.equal(got, want))
        _, d_k, d_v = torch.autograd.grad(compute(q, k, v)[1][:, 1:4].sum(), (q, k, v))
        self.assertTrue(d_k[1:6].abs().min() > 0 and (d_k[6:] == 0).all() and (d_v == 0).all())
        # One input alone wants a gradient.
        (got,) = torch.autograd.grad(compute(q.detach(), k, v.detach())[0].sum(), (k,))
        self.assertTrue(torch.equal(got, d_qkv[1]))

    def test_deterministic_reaches_the_library(self):
        made = []
        of = abi.BackwardProblem.of
        with mock.patch.object(abi.BackwardProblem, "of", lambda *a, **more: made.append(more) or of(*a, **more)):
            for i, (own, torchs) in enumerate(((False, False), (True, False), (False, True))):
                q = torch.randn(31 + i, 2, 8, requires_grad=True)
                torch.use_deterministic_algorithms(torchs)
                try:
                    o = attention_varlen(q, q, q, torch.tensor([0, 9, 31]), deterministic=own)
                    o.sum().backward()
                finally:
                    torch.use_deterministic_algorithms(False)
        self.assertEqual([more["deterministic"] for more in made], [0, 1, 1])

    def test_the_cpu_ignores_a_margin(self):
        """Both passes are asked for it, alone, with sinks and with a bias, and give the same bits."""
        asked = []
        of = _varlen.packed_problem

        def noted(*arguments, **fields):
            asked.append(fields["sm_margin"])
            return of(*arguments, **fields)

        for more in ({}, {"s_aux": torch.randn(4)}, {"bias": torch.randn(4, 1, 12)}, {"softcap": 3.0}):
            leaves = self.qkv(grad=True)
            found = []
            for margin in (0, 500):
                asked.clear()
                with mock.patch.object(_varlen, "packed_problem", noted):
                    options = {"causal": True, "return_lse": True, "sm_margin": margin, **more}
                    o, lse = attention_varlen(*leaves, self.cu_q, self.cu_kv, **options)
                    gradients = torch.autograd.grad(o.sum() + lse[:, 1:3].sum(), leaves)
                # (Calls without a margin may be prepared already.)
                self.assertEqual(asked, [margin, margin] if margin else [0] * len(asked))
                found.append((o, lse, *gradients))
            for got, want in zip(*found):
                self.assertTrue(torch.equal(got, want))
        for margin in (-1, 2**31, 2**32):
            with self.assertRaisesRegex(ValueError, f"sm_margin: {margin}; allowed: 0 to"):
                attention_varlen(*self.qkv(), self.cu_q, self.cu_kv, sm_margin=margin)

    def test_the_cpu_meets_every_limit(self):
        """Alone, with sinks and with a bias."""
        for more in ({}, {"s_aux": torch.randn(4)}, {"bias": torch.randn(4, 1, 12)}):
            leaves, found = self.qkv(grad=True), []
            for limit in (None, 1):
                o = attention_varlen(*leaves, self.cu_q, self.cu_kv, workspace_limit=limit, **more)
                found.append((o, *torch.autograd.grad(o.sum(), leaves)))
            for got, want in zip(*found):
                self.assertTrue(torch.equal(got, want))
        with self.assertRaisesRegex(ValueError, "workspace_limit: 0; allowed: None, or 1 to"):
            attention_varlen(*self.qkv(), self.cu_q, self.cu_kv, workspace_limit=0)

    def test_types_of_offsets(self):
        q, k, v = self.qkv()
        want = attention_varlen(q, k, v, self.cu_q, self.cu_kv)
        wide = torch.zeros(6, 2, dtype=torch.int32)
        wide[:, 0] = self.cu_q
        self.assertTrue(torch.equal(attention_varlen(q, k, v, wide[:, 0], self.cu_kv.int()), want))
        # A list of one number, whose stride is 2.
        one = {"seqused_q": torch.tensor([5, 0], dtype=torch.int32)[::2]}
        got = attention_varlen(q, k, v, torch.tensor([0, 24]), torch.tensor([0, 25]), **one)
        self.assertTrue(torch.equal(got[:5], attention(q[None, :5], k[None], v[None])[0]) and (got[5:] == 0).all())

    def test_dense_sides(self):
        q, k, v = torch.randn(3, 8, 4, 16), torch.randn(3, 10, 2, 16), torch.randn(3, 10, 2, 16)
        used_q, used_kv = torch.tensor([8, 3, 0]), torch.tensor([4, 10, 1])
        inputs = [t.requires_grad_() for t in (q, k, v)]
        options = {"seqused_q": used_q, "seqused_kv": used_kv, "causal": True, "return_lse": True}
        o, lse = attention_varlen(q, k, v, None, **options)
        self.assertEqual((o.shape, lse.shape), ((3, 8, 4, 16), (3, 4, 8)))
        packed, _ = attention_varlen(q.flatten(0, 1), k, v, torch.arange(0, 25, 8), **options)
        want = []
        for i, (n, keys) in enumerate(zip(used_q.tolist(), used_kv.tolist())):
            own = attention(q[i : i + 1, :n], k[i : i + 1, :keys], v[i : i + 1, :keys], causal=True)
            want.append(torch.nn.functional.pad(own, (0, 0, 0, 0, 0, 8 - n)))
        want = torch.cat(want)
        d_o = torch.randn_like(o)
        gradients = [torch.autograd.grad(t, inputs, d_o) for t in (o, packed.unflatten(0, (3, 8)), want)]
        for got, got_gradients in zip((o, packed.unflatten(0, (3, 8))), gradients):
            self.assertTrue(torch.equal(got, want))
            for one, other in zip(got_gradients, gradients[2]):
                self.assertTrue(torch.equal(one, other))

    def test_gaps_are_zeros(self):
        q, k, v = self.qkv(grad=True)
        with torch.no_grad():
            for t in (q, k, v):
                t[0], t[-1] = math.nan, math.inf
        o, lse = attention_varlen(q, k, v, self.cu_q, self.cu_kv, return_lse=True)
        gradients = torch.autograd.grad(o.sum(), (q, k, v))
        for t in (o, lse.T.masked_fill(lse.T == -math.inf, 0), *gradients):
            self.assertTrue(torch.isfinite(t).all() and (t[0] == 0).all() and (t[-1] == 0).all())
        self.assertTrue((lse[:, (0, -1)] == -math.inf).all())
        some = attention_varlen(q, k, v, self.cu_q, self.cu_kv, fill_gaps=False)
        self.assertTrue(torch.equal(some[1:22], o[1:22]))

    def test_autocast(self):
        q, k, v = self.qkv()
        with torch.autocast("cpu", torch.bfloat16):
            o = attention_varlen(q, k, v, self.cu_q, self.cu_kv)
        self.assertTrue(torch.equal(o, attention_varlen(*(t.bfloat16() for t in (q, k, v)), self.cu_q, self.cu_kv)))

    def test_strided_operands_and_gradients(self):
        together = torch.randn(24, 3, 4, 16, requires_grad=True)
        o = attention_varlen(*together.unbind(1), self.cu_q)
        want = attention_varlen(*(t.contiguous() for t in together.unbind(1)), self.cu_q)
        self.assertTrue(torch.equal(o, want))
        # Strides of 0, and heads that lie first.
        for d_o in (torch.ones(()).expand(o.shape), torch.randn(4, 24, 16).transpose(0, 1)):
            got, dense = (torch.autograd.grad(t, together, g) for t, g in ((o, d_o), (want, d_o.contiguous())))
            self.assertTrue(torch.equal(got[0], dense[0]))
            o, want = (attention_varlen(*together.unbind(1), self.cu_q) for _ in range(2))

    def test_no_rows(self):
        q, k, v = self.qkv()
        o, lse = attention_varlen(q[:0], k[:0], v[:0], torch.zeros(1, dtype=torch.long), return_lse=True)
        self.assertEqual((o.shape, lse.shape), ((0, 4, 16), (4, 0)))
        o = attention_varlen(q, k, v, torch.zeros(1, dtype=torch.long))
        self.assertTrue((o == 0).all())

    def test_the_operators_are_what_torch_is_told(self):
        q, k, v = self.qkv(grad=True)
        lists = [self.cu_q.int(), self.cu_kv.int(), None, torch.tensor(USED_KV, dtype=torch.int32)]
        arguments = (q, k, v, *lists, 9, 0, True, False, 0.0, abi.MASK_CAUSAL, 0, 0, 0, 0)
        torch.library.opcheck(torch.ops.hopper_attention.varlen_forward_lse, arguments)
        plain = [t.detach() for t in (q, k, v)]
        torch.library.opcheck(torch.ops.hopper_attention.varlen_forward, (*plain, *arguments[3:]))

    def test_compiled(self):
        torch._dynamo.reset()
        calls = []

        def backend(graph, inputs):
            calls.append(graph)
            return graph.forward

        def compute(q, k, v, cu):
            return attention_varlen(q, k, v, cu, causal=True, return_lse=True, max_seqlen_q=9)

        for target in ("aot_eager", backend):
            compiled = torch.compile(compute, backend=target, fullgraph=True, dynamic=True)
            for rows in (ROWS_Q, (6, 1, 30), (2, 2)):
                cu = torch.tensor((0, *rows)).cumsum(0)
                q, k, v = (torch.randn(sum(rows), h, 16, requires_grad=True) for h in (4, 2, 2))
                found = [f(q, k, v, cu) for f in (compute, compiled)]
                gradients = [torch.autograd.grad(o.sum() + lse[:, :2].sum(), (q, k, v)) for o, lse in found]
                for got, want in zip((*found[1], *gradients[1]), (*found[0], *gradients[0])):
                    self.assertTrue(torch.equal(got, want))
                with torch.no_grad():
                    self.assertTrue(torch.equal(compiled(q, k, v, cu)[0], found[0][0]))
        # Other lengths are no other graph: one with gradients, and one without.
        self.assertEqual(len(calls), 2)

    def test_refusals(self):
        q, k, v = self.qkv()
        cu, cu_kv = self.cu_q, self.cu_kv
        for error, words, arguments, options in (
            (ValueError, "q: 4 dimensions; allowed: 3, .*with cu_seqlens_q", (q[None], k, v, cu), {}),
            (ValueError, "q: 3 dimensions; allowed: 4, .*without cu_seqlens_q", (q, k, v, None), {}),
            (ValueError, "cu_seqlens_q: missing", (q[None], k[None], v[None], None), {}),
            (ValueError, r"cu_seqlens_q: shape \[1, 6\]", (q, k, v, cu[None]), {}),
            (ValueError, r"cu_seqlens_q: shape \[0\]", (q, k, v, cu[:0]), {}),
            (ValueError, "max_seqlen_q: -1", (q, k, v, cu), {"max_seqlen_q": -1}),
            (TypeError, "cu_seqlens_q: list", (q, k, v, [0, 3]), {}),
            (TypeError, "seqused_q: torch.float32", (q, k, v, cu), {"seqused_q": torch.ones(5)}),
            (TypeError, "k: torch.float64", (q, k.double(), v, cu), {}),
            (TypeError, "out: not for torch", (q, k, v, cu), {"out": q}),
            (abi.HattnError, "cu_seqlens_kv", (q, k, v, cu, cu_kv[:-1]), {}),
            (abi.HattnError, "seqused_q", (q, k, v, cu, cu_kv), {"seqused_q": torch.tensor([4, 0, 9, 4, 5])}),
            (abi.HattnError, "cu_seqlens_q", (q, k, v, cu + 3, cu_kv), {}),
            (abi.HattnError, "cu_seqlens_q", (q, k, v, cu.flip(0), cu_kv), {}),
            # Cast without care, these would be the offsets themselves.
            (abi.HattnError, "cu_seqlens_q", (q, k, v, cu + 2**32, cu_kv), {}),
            (abi.HattnError, "cu_seqlens_q", (q, k, v, cu - 2**32, cu_kv), {}),
        ):
            with self.subTest(words=words):
                self.assertRaisesRegex(error, words, attention_varlen, *arguments, **options)
        q.requires_grad_()
        (d_q,) = torch.autograd.grad(attention_varlen(q, k, v, cu).sum(), q, create_graph=True)
        self.assertRaisesRegex(NotImplementedError, "second derivative", torch.autograd.grad, d_q.sum(), q)


class Biased(Base):
    """An additive bias, whose query 0 and key 0 are the first of each sequence. test_bias.py has dense tensors."""

    #: More queries and keys than the longest sequence has.
    QUERIES, KEYS = 11, 12

    def bias(self, own=(False, True, True), dtype=None, grad=False):
        """A bias with the dimensions of sequences, heads and queries, or with some of them."""
        sizes = (len(ROWS_Q), 4, self.QUERIES)
        bias = torch.randn(*(size if has else 1 for has, size in zip(own, sizes)), self.KEYS)
        bias[..., 1] = -math.inf
        return bias.to(dtype or torch.float32).requires_grad_(grad)

    def definition(self, q, k, v, bias, used, causal=False, slopes=None, **options):
        """O and log-sum-exp by the definition, one sequence after another."""
        o, lse = torch.zeros_like(q) + 0 * q, torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=q.dtype)
        begins, begins_kv = self.cu_q.tolist(), self.cu_kv.tolist()
        of_q, of_kv = (USED_Q, USED_KV) if used else (ROWS_Q, ROWS_KV)
        for i, (b, n, b_kv, n_kv) in enumerate(zip(begins, of_q, begins_kv, of_kv)):
            if n == 0 or n_kv == 0:
                continue
            given = q[None, b : b + n], k[None, b_kv : b_kv + n_kv], v[None, b_kv : b_kv + n_kv]
            keep = causal_keep(n, n_kv) if causal else torch.ones(n, n_kv, dtype=torch.bool)
            part = bias[i if bias.shape[0] > 1 else 0, :, :n, :n_kv]
            own, own_lse, _ = reference(*given, keep, None if slopes is None else slopes[i], bias=part, **options)
            o[b : b + n], lse[:, b : b + n] = own[0], own_lse[0]
        return o, lse

    def compare(self, own, dtype, used, causal, s_aux=None, softcap=None, alibi_slopes=None):
        leaves = [*self.qkv(grad=True), self.bias(own, dtype, grad=True), *([] if s_aux is None else [s_aux])]
        o, lse = attention_varlen(
            *leaves[:3],
            **self.lengths(used),
            bias=leaves[3],
            causal=causal,
            return_lse=True,
            s_aux=s_aux,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
        )
        exact = [t.detach().double().requires_grad_() for t in leaves]
        sinks = None if s_aux is None else exact[4]
        want, want_lse = self.definition(
            *exact[:4], used, causal=causal, slopes=alibi_slopes, cap=softcap, sinks=sinks
        )
        self.assertGreater(o.abs().max().item(), 0.1)
        torch.testing.assert_close(o.double(), want, atol=1e-5, rtol=1e-5)
        seen = want_lse > -math.inf
        if s_aux is None:
            self.assertTrue((lse[~seen] == -math.inf).all())
        torch.testing.assert_close(lse[seen].double(), want_lse[seen], atol=1e-5, rtol=1e-5)
        d_o, d_lse = torch.randn_like(o), torch.randn_like(lse)
        loss = (o * d_o).sum() + (lse[seen] * d_lse[seen]).sum()
        exact_loss = (want * d_o).sum() + (want_lse[seen] * d_lse[seen]).sum()
        gradients = torch.autograd.grad(loss, leaves)
        for t, got, its in zip(leaves, gradients, torch.autograd.grad(exact_loss, exact)):
            self.assertEqual((got.shape, got.dtype), (t.shape, t.dtype))
            rounding = torch.finfo(t.dtype).eps
            torch.testing.assert_close(got.double(), its, atol=3e-5, rtol=max(1e-5, rounding))
        return gradients[3]

    def test_each_sequence_has_the_first_numbers(self):
        for own in itertools.product((False, True), repeat=3):
            for used, causal in itertools.product((False, True), repeat=2):
                with self.subTest(own=own, used=used, causal=causal):
                    d_bias = self.compare(own, torch.float32, used, causal)
                    # What is hidden, and what no sequence reaches.
                    self.assertTrue((d_bias[..., 1] == 0).all() and (d_bias[..., 9:] == 0).all())
                    if own[2]:
                        self.assertTrue((d_bias[:, :, 9:] == 0).all())

    def test_types_of_a_bias(self):
        for dtype in (torch.bfloat16, torch.float16):
            with self.subTest(dtype=dtype):
                self.compare((False, True, True), dtype, used=False, causal=True)

    def test_with_sinks_a_cap_and_slopes(self):
        for used in (False, True):
            sinks = torch.randn(4, requires_grad=True)
            slopes = torch.rand(len(ROWS_Q), 4)
            self.compare((True, True, True), torch.float32, used, True, sinks, 1.5, slopes)

    def test_types_of_operands(self):
        bias = self.bias()
        for dtype, bound in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
            q, k, v = self.qkv(dtype)
            o = attention_varlen(q, k, v, self.cu_q, self.cu_kv, bias=bias)
            self.assertEqual(o.dtype, dtype)
            want, _ = self.definition(*(t.double() for t in (q, k, v)), bias, False)
            torch.testing.assert_close(o.double(), want, atol=bound, rtol=bound)

    def test_forms(self):
        q, k, v = self.qkv()

        def compute(bias):
            return attention_varlen(q, k, v, self.cu_q, self.cu_kv, causal=True, bias=bias)

        bias = self.bias((False, False, True))
        want = compute(bias)
        transposed = bias[0, 0].T.contiguous().T
        for name, same in {
            "2 dimensions": bias[0, 0],
            "3 dimensions": bias[0],
            "expanded": bias.expand(5, 4, -1, -1),
            "transposed": transposed,
            "f64": bias.double(),
            "as long as the longest sequence": bias[..., :9, :9],
        }.items():
            with self.subTest(name):
                self.assertTrue(torch.equal(compute(same), want))
        rows = self.bias((False, True, False), grad=True)
        (d_rows,) = torch.autograd.grad(compute(rows[0]).sum(), rows)
        self.assertEqual(d_rows.shape, rows.shape)
        # Without a gradient for the bias the others have theirs.
        q.requires_grad_()
        self.assertEqual(torch.autograd.grad(compute(bias).sum(), q)[0].shape, q.shape)

    def test_dense_sides(self):
        q, k, v = torch.randn(3, 8, 4, 16), torch.randn(3, 10, 2, 16), torch.randn(3, 10, 2, 16)
        used_q, used_kv = torch.tensor([8, 3, 0]), torch.tensor([4, 10, 1])
        options = {"seqused_q": used_q, "seqused_kv": used_kv, "causal": True}
        cu = torch.arange(0, 25, 8), torch.arange(0, 31, 10)
        rows = [t.flatten(0, 1) for t in (q, k, v)]
        for shape in ((3, 4, 8, 10), (1, 4, 1, 10), (8, 1)):
            with self.subTest(shape=shape):
                bias = torch.randn(shape, requires_grad=True)
                whole = bias if shape[-1] == 10 else bias.expand(1, 1, 8, 10)
                # Longer than a packed side needs it.
                longer = torch.nn.functional.pad(whole, (0, 3, 0, 0 if whole.shape[2] == 1 else 5))
                want = []
                for i, (n, keys) in enumerate(zip(used_q.tolist(), used_kv.tolist())):
                    part = whole[i if whole.shape[0] > 1 else 0][None, :, :n, :keys]
                    own = q[i : i + 1, :n], k[i : i + 1, :keys], v[i : i + 1, :keys]
                    made = attention(*own, causal=True, bias=part) if n else own[0]
                    want.append(torch.nn.functional.pad(made, (0, 0, 0, 0, 0, 8 - n)))
                want = torch.cat(want)
                d_o = torch.randn_like(want)
                (d_bias,) = torch.autograd.grad(want, bias, d_o, retain_graph=True)
                for o in (
                    attention_varlen(q, k, v, None, bias=bias, **options),
                    attention_varlen(rows[0], k, v, cu[0], bias=longer[..., :10], **options).view_as(want),
                    attention_varlen(q, *rows[1:], None, cu[1], bias=longer[:, :, :8], **options),
                    attention_varlen(*rows, *cu, bias=longer, **options).view_as(want),
                ):
                    self.assertTrue(torch.equal(o, want))
                    (got,) = torch.autograd.grad(o, bias, d_o, retain_graph=True)
                    torch.testing.assert_close(got, d_bias, atol=1e-5, rtol=1e-5)

    def test_no_sequences(self):
        q, k, v = (t[:0] for t in self.qkv())
        bias = self.bias(grad=True)
        o = attention_varlen(q, k, v, torch.zeros(1, dtype=torch.long), bias=bias)
        (d_bias,) = torch.autograd.grad(o.sum(), bias)
        self.assertTrue(torch.equal(d_bias, torch.zeros_like(bias)))

    def test_nested_tensors(self):
        q = torch.nested.nested_tensor([torch.randn(n, 4, 16) for n in (3, 7)], layout=torch.jagged)
        k, v = (torch.nested.nested_tensor_from_jagged(torch.randn(10, 2, 16), q.offsets()) for _ in range(2))
        bias = torch.randn(4, 7, 7, requires_grad=True)
        o = attention(q, k, v, causal=True, bias=bias).values()
        want = attention_varlen(*(t.values() for t in (q, k, v)), q.offsets(), causal=True, bias=bias)
        self.assertTrue(torch.equal(o, want))
        self.assertTrue(torch.equal(*(torch.autograd.grad(t.sum(), bias)[0] for t in (o, want))))

    def test_the_operators_are_what_torch_is_told(self):
        lists = [self.cu_q.int(), self.cu_kv.int(), None, torch.tensor(USED_KV, dtype=torch.int32)]
        numbers = (9, 0, True, False, 0.0, abi.MASK_CAUSAL, 0, 0, 0, 0, 0.0, 0.0, 0, False)
        for own in ((False, True, True), (True, False, False)):
            given = (*self.qkv(grad=True), None, None, self.bias(own, grad=True), *(None,) * 6, *lists, *numbers)
            torch.library.opcheck(torch.ops.hopper_attention.modified_forward, given)

    def test_compiled(self):
        torch._dynamo.reset()
        calls = []

        def backend(graph, inputs):
            calls.append(graph)
            return graph.forward

        def compute(q, k, v, cu, bias):
            return attention_varlen(q, k, v, cu, causal=True, bias=bias)

        for target in ("aot_eager", backend):
            compiled = torch.compile(compute, backend=target, fullgraph=True, dynamic=True)
            for rows, longest in ((ROWS_Q, 9), ((6, 1, 30), 32), ((2, 2), 3)):
                cu = torch.tensor((0, *rows)).cumsum(0)
                q, k, v = (torch.randn(sum(rows), h, 16, requires_grad=True) for h in (4, 2, 2))
                bias = torch.randn(4, longest, longest, requires_grad=True)
                found = [f(q, k, v, cu, bias) for f in (compute, compiled)]
                gradients = [torch.autograd.grad(o.sum(), (q, k, v, bias)) for o in found]
                for got, want in zip((found[1], *gradients[1]), (found[0], *gradients[0])):
                    self.assertTrue(torch.equal(got, want))
        self.assertEqual(len(calls), 1)

    def test_refusals(self):
        q, k, v = self.qkv()
        wanted = r"allowed: one that broadcasts to \[batch, heads_q, seqlen_q, seqlen_kv\], \[5, 4, any, any\]"
        for error, words, shape in (
            (abi.HattnError, "cu_seqlens_kv: 9 rows at 2; allowed: at most 8, which the bias has numbers for", (9, 8)),
            (abi.HattnError, "cu_seqlens_q: 9 rows at 2; allowed: at most 8, which the bias has numbers for", (8, 9)),
            # Keys are not expanded.
            (abi.HattnError, "cu_seqlens_kv: 5 rows at 0; allowed: at most 1", (9, 1)),
            (ValueError, rf"bias: shape \[3, 1, 1, 9\]; {wanted}", (3, 1, 1, 9)),
            (ValueError, rf"bias: shape \[2, 9, 9\]; {wanted}", (2, 9, 9)),
            (ValueError, rf"bias: shape \[1, 1, 1, 9, 9\]; {wanted}", (1, 1, 1, 9, 9)),
        ):
            with self.subTest(words=words), self.assertRaisesRegex(error, words):
                attention_varlen(q, k, v, self.cu_q, self.cu_kv, bias=torch.zeros(shape))
        self.assertRaises(TypeError, attention_varlen, q, k, v, self.cu_q, self.cu_kv, bias=[0.0])
        # Used lengths make sequences short enough.
        lengths = {**self.lengths(True), "seqused_q": torch.tensor((2, 0, 8, 1, 0))}
        o = attention_varlen(q, k, v, **lengths, bias=torch.zeros(8, 7))
        torch.testing.assert_close(o, attention_varlen(q, k, v, **lengths))

    def test_on_a_gpu(self):
        if not torch.cuda.is_available():
            self.skipTest("no GPU")
        rows = (120, 0, 300, 64)
        cu = torch.tensor((0, *rows)).cumsum(0)
        for dtype, bound in ((torch.bfloat16, 2e-2), (torch.float16, 4e-3)):
            inputs = [torch.randn(sum(rows), heads, 64).to(dtype) for heads in (4, 2, 2, 4)]
            for shape in ((4, 4, 300, 320), (4, 300, 300), (4, 1, 1, 310)):
                runs = []
                bias = torch.randn(shape)
                for device, of_run in (("cuda", dtype), ("cpu", torch.float32)):
                    q, k, v, d_o = (t.to(device, of_run).requires_grad_() for t in inputs)
                    of_device = bias.to(device).requires_grad_()
                    o = attention_varlen(q, k, v, cu.to(device), causal=True, bias=of_device)
                    gradients = torch.autograd.grad(o, (q, k, v, of_device), d_o.detach())
                    runs.append([t.detach().cpu().float() for t in (o, *gradients)])
                for got, want in zip(*runs):
                    self.assertLess((got - want).abs().max(), bound * want.abs().max())
        # The rows of a sequence that the bias does not cover count as rows after its used length.
        q, k, v = (t.cuda() for t in inputs[:3])
        cu, bias = cu.cuda(), torch.randn(4, 100, 200, device="cuda")
        most = {"seqused_q": 100, "seqused_kv": 200}
        used = {name: torch.tensor(rows).clamp(max=of_it).cuda() for name, of_it in most.items()}
        got, want = (attention_varlen(q, k, v, cu, causal=True, bias=bias, **more) for more in ({}, used))
        self.assertTrue(torch.equal(got, want))


class Nested(Base):
    """attention() of nested tensors."""

    def nested(self, rows, heads, grad=True):
        return torch.nested.nested_tensor(
            [torch.randn(n, heads, 16) for n in rows], layout=torch.jagged, requires_grad=grad
        )

    def test_nested_tensors_are_packed_sequences(self):
        q, k = self.nested(ROWS_Q, 4), self.nested(ROWS_KV, 2)
        v = torch.nested.nested_tensor_from_jagged(torch.randn(22, 2, 16), k.offsets()).requires_grad_()
        for options in MASKS:
            with self.subTest(**options):
                o = attention(q, k, v, **options)
                # torch adds nested tensors of one shape alone.
                self.assertEqual(((o + q).shape, o.layout), (q.shape, torch.jagged))
                both, lse = attention(q, k, v, return_lse=True, **options)
                want, want_lse = attention_varlen(
                    *(t.values() for t in (q, k, v)), q.offsets(), k.offsets(), return_lse=True, **options
                )
                for got in (o, both):
                    self.assertTrue(torch.equal(got.values(), want))
                self.assertTrue(torch.equal(lse.transpose(1, 2).values(), want_lse.T))
                d_o = torch.randn_like(want)
                got = torch.autograd.grad((o.values() * d_o).sum(), (q, k, v))
                gradients = torch.autograd.grad((want * d_o).sum(), (q, k, v))
                for one, other in zip(got, gradients):
                    self.assertTrue(one.is_nested and torch.equal(one.values(), other.values()))
                    self.assertGreater(one.values().abs().max().item(), 0)

    def test_parts_of_dense_tensors(self):
        begins, rows = torch.tensor([1, 0, 2]), torch.tensor([3, 5, 8])
        dense = [torch.randn(3, 10, 2, 16) for _ in range(3)]
        q = torch.nested.narrow(dense[0], 1, begins, rows, layout=torch.jagged)
        # The same lengths, so that the three have the same symbol of a shape.
        k, v = (torch.nested.nested_tensor_from_jagged(t.flatten(0, 1), q.offsets(), q.lengths()) for t in dense[1:])
        o = attention(q, k, v, causal=True)
        for i, (part, begin, n) in enumerate(zip(o.unbind(), begins.tolist(), rows.tolist())):
            want = attention(*(t[i : i + 1, begin : begin + n] for t in dense), causal=True)
            self.assertTrue(torch.equal(part, want[0]))

    def test_what_is_not_taken(self):
        q, dense = self.nested((3, 5), 2), torch.randn(2, 5, 2, 16)
        other = self.nested((4, 4), 2)
        strided = torch.nested.nested_tensor([torch.randn(n, 2, 16) for n in (3, 5)])
        for error, words, arguments in (
            (TypeError, "k: no nested tensor of the layout torch.jagged", (q, dense, dense)),
            (TypeError, "k: a nested tensor of the layout torch.jagged; allowed: dense", (dense, q, q)),
            (TypeError, "q: a nested tensor of the layout torch.strided", (strided, strided, strided)),
            (ValueError, "q: 4 dimensions, of which 2 is ragged", (q.transpose(1, 2), q, q)),
            (ValueError, "v: other offsets than those of k", (q, q, other)),
        ):
            with self.subTest(words=words):
                self.assertRaisesRegex(error, words, attention, *arguments)


if __name__ == "__main__":
    unittest.main()
