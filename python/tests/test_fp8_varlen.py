"""Tests of FP8 with packed sequences and used lengths on torch tensors. test_fp8.py has dense operands."""

import math
import unittest

import hopper_attention
from hopper_attention import abi

try:
    import torch
except ImportError as error:
    NO_TORCH = str(error)
else:
    from hopper_attention import attention_fp8, attention_varlen, quantize, quantize_varlen

    NO_TORCH = None
NO_GPU = NO_TORCH or (None if torch.cuda.is_available() else "no GPU")

# Sequences of both sides: rows, and used rows. Factors per block are of 128 rows.
ROWS_Q, ROWS_KV = (3, 0, 300, 4, 150), (5, 2, 270, 0, 131)
USED_Q, USED_KV = (2, 0, 257, 1, 0), (5, 0, 129, 0, 131)
HEADS, HEADS_KV, DIM = 4, 2, 16
SCALINGS = ("per_tensor", "per_head", "per_block")


@unittest.skipIf(NO_TORCH, NO_TORCH)
class Packed(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        # One row before the first sequence, and two after the last.
        self.cu_q, self.cu_kv = (torch.tensor((1, *rows)).cumsum(0) for rows in (ROWS_Q, ROWS_KV))
        shapes = ((460, HEADS, DIM), (411, HEADS_KV, DIM), (411, HEADS_KV, DIM))
        self.qkv = [torch.randn(shape).bfloat16() for shape in shapes]
        # Sequences that differ in magnitude, so that their factors differ.
        for t, cu, step in zip(self.qkv, (self.cu_q, self.cu_kv, self.cu_kv), (0.1, 0.1, 1)):
            for i, (begin, end) in enumerate(zip(cu[:-1], cu[1:])):
                t[begin:end] *= 1 + i * step

    def used(self, used):
        return {"seqused_q": torch.tensor(USED_Q), "seqused_kv": torch.tensor(USED_KV)} if used else {}

    def sequences(self, used):
        """The rows of each sequence that count: of q, and of k and v."""
        of_q, of_kv = (USED_Q, USED_KV) if used else (ROWS_Q, ROWS_KV)
        for b, n, b_kv, n_kv in zip(self.cu_q.tolist(), of_q, self.cu_kv.tolist(), of_kv):
            yield slice(b, b + n), slice(b_kv, b_kv + n_kv)

    def factors(self, made, scaling, i):
        """The factors of sequence i as those of its own operands, [1, heads, blocks]."""
        for factors, cu, used in zip(made[3:6], (self.cu_q, self.cu_kv, self.cu_kv), (0, 1, 1)):
            if scaling == "per_head":
                yield factors[i : i + 1]
            else:
                first = (cu[i].item() + 127 * i) // 128
                rows = [slice.stop - slice.start for slice in list(self.sequences(self.is_used))[i]][used]
                yield factors[None, :, first : first + -(-rows // 128)]

    def test_each_sequence_is_quantised_and_computed_by_itself(self):
        """The bytes, the factors and the bits of O are those of the sequence alone."""
        shapes = {
            "per_head": [(5, HEADS_KV, 1)] * 3,
            "per_block": [(HEADS, (460 + 127 * 5) // 128), *[(HEADS_KV, (411 + 127 * 5) // 128)] * 2],
        }
        for scaling, of_factors in shapes.items():
            for self.is_used in (False, True):
                for hadamard, half_scores in ((None, False), (5, True)):
                    with self.subTest(scaling=scaling, used=self.is_used, hadamard=hadamard):
                        options = {"scaling": scaling, "hadamard": hadamard, "half_scores": half_scores}
                        made = quantize_varlen(*self.qkv, self.cu_q, self.cu_kv, **options, **self.used(self.is_used))
                        self.assertEqual([tuple(t.shape) for t in made[3:6]], of_factors)
                        self.assertEqual(made.counts.abs().sum(), 0)
                        o, lse = attention_fp8(made, causal=True, return_lse=True)
                        self.assertEqual((o.shape, lse.shape), ((460, HEADS, DIM), (HEADS, 460)))
                        for i, (rows, keys) in enumerate(self.sequences(self.is_used)):
                            q, k, v = self.qkv
                            own = quantize(q[None, rows], k[None, keys], v[None, keys], **options)
                            for got, want, at in zip(made[:3], own[:3], (rows, keys, keys)):
                                self.assertTrue(torch.equal(got[at].view(torch.uint8), want[0].view(torch.uint8)))
                            for got, want in zip(self.factors(made, scaling, i), own[3:6]):
                                self.assertTrue(torch.equal(got, want))
                            own_o, own_lse = attention_fp8(own, causal=True, return_lse=True)
                            self.assertTrue(torch.equal(o[rows], own_o[0]) and torch.equal(lse[:, rows], own_lse[0]))

    def test_one_factor_for_all_sequences(self):
        """That of the rows which are used."""
        for used in (False, True):
            made = quantize_varlen(*self.qkv, self.cu_q, self.cu_kv, "per_tensor", **self.used(used))
            for values, descale, of_kv in zip(self.qkv, made[3:6], (0, 1, 1)):
                largest = max(values[at[of_kv]].abs().amax().item() for at in self.sequences(used) if values[at[of_kv]].numel())
                self.assertEqual(tuple(descale.shape), (1, 1, 1))
                self.assertAlmostEqual(descale.item(), largest / 448, delta=1e-6 * largest)

    def check_error(self, device):
        """Beside packed attention in f32, for each scaling."""
        qkv = [t.to(device) for t in self.qkv]
        qkv = [torch.nn.functional.pad(t, (0, 64 - DIM)) for t in qkv]
        for used in (False, True):
            lengths = {"cu_seqlens_kv": self.cu_kv, **self.used(used)}
            want = attention_varlen(*(t.cpu().float() for t in qkv), self.cu_q, causal=True, **lengths)
            for scaling in SCALINGS:
                for half_scores in (False, True):
                    with self.subTest(scaling=scaling, used=used, half_scores=half_scores):
                        lengths["max_seqlen_q"] = 300
                        made = quantize_varlen(*qkv, self.cu_q, scaling=scaling, half_scores=half_scores, **lengths)
                        o = attention_fp8(made, causal=True).cpu().float()
                        self.assertLess(((o - want).square().mean() / want.square().mean()).sqrt().item(), 0.08)

    def test_errors(self):
        self.check_error("cpu")

    @unittest.skipIf(NO_GPU, NO_GPU)
    def test_on_a_gpu(self):
        """Its results, the bytes of the CPU's quantiser, and a graph that serves other lengths."""
        self.check_error("cuda")
        qkv = [torch.nn.functional.pad(t, (0, 64 - DIM)) for t in self.qkv]
        for scaling in SCALINGS:
            options = {"scaling": scaling, "hadamard": 3, **self.used(True)}
            want = quantize_varlen(*qkv, self.cu_q, self.cu_kv, **options)
            made = quantize_varlen(*(t.cuda() for t in qkv), self.cu_q, self.cu_kv, **options)
            for got, its in zip(made[:3], want[:3]):
                self.assertTrue(torch.equal(got.cpu().view(torch.uint8), its.view(torch.uint8)))
        q, k, v = (t.cuda() for t in qkv)
        cu = self.cu_kv.int().cuda()

        def both():
            return attention_fp8(quantize_varlen(q[:411], k, v, cu, hadamard=3), causal=True)

        both()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = both()
        for rows in (ROWS_KV, (100, 100, 0, 100, 7)):
            cu.copy_(torch.tensor((0, *rows)).cumsum(0))
            graph.replay()
            self.assertTrue(torch.equal(o, both()))

    def test_packed_keys_have_the_offsets_of_the_queries(self):
        q, k, v = self.qkv
        rows = q[: len(k)]
        made = quantize_varlen(rows, k, v, self.cu_kv)
        want = quantize_varlen(rows, k, v, self.cu_kv, self.cu_kv)
        self.assertIs(made.cu_seqlens_kv, made.cu_seqlens_q)
        self.assertEqual(made.cu_seqlens_q.dtype, torch.int32)
        self.assertTrue(torch.equal(attention_fp8(made), attention_fp8(want)))

    def test_the_number_of_blocks(self):
        """floor((total + 127 * batch) / 128): where a few rows are left over, and for as many sequences as rows."""
        for rows, blocks in (((100, 0, 10, 10, 10), 5), ((128, 0, 0, 0, 0), 5), ((1,) * 130, 130), ((129, 1), 3)):
            q, k, v = (torch.randn(sum(rows), heads, DIM) for heads in (4, 2, 2))
            made = quantize_varlen(q, k, v, torch.tensor((0, *rows)).cumsum(0))
            self.assertEqual((made.descale_q.shape, made.descale_v.shape), ((4, blocks), (2, blocks)))
            self.assertLess((attention_fp8(made) - attention_varlen(q, k, v, made.cu_seqlens_q)).abs().mean(), 0.1)

    def test_dense_sides(self):
        """Dense tensors with used lengths, and dense queries with packed keys."""
        q, k, v = (torch.randn(2, rows, heads, DIM).bfloat16() for rows, heads in ((140, 4), (150, 2), (150, 2)))
        used = {"seqused_q": torch.tensor([140, 3]), "seqused_kv": torch.tensor([129, 150])}
        cu = torch.tensor([0, 150, 300])
        shapes = {
            "per_tensor": [(1, 1, 1)] * 3,
            "per_head": [(2, 2, 1)] * 3,
            "per_block": [(2, 4, 2), (2, 2, 2), (2, 2, 2)],
        }
        for scaling, of_factors in shapes.items():
            with self.subTest(scaling=scaling):
                dense = quantize_varlen(q, k, v, None, scaling=scaling, **used)
                self.assertEqual([tuple(t.shape) for t in dense[3:6]], of_factors)
                mixed = quantize_varlen(q, k.flatten(0, 1), v.flatten(0, 1), None, cu, scaling, **used)
                self.assertEqual(tuple(mixed.descale_q.shape), of_factors[0])
                if scaling == "per_block":
                    self.assertEqual(tuple(mixed.descale_k.shape), (2, (300 + 254) // 128))
                found = [attention_fp8(made, causal=True, return_lse=True) for made in (dense, mixed)]
                self.assertEqual((found[0][0].shape, found[0][1].shape), ((2, 140, 4, DIM), (2, 4, 140)))
                for got, want in zip(found[1], found[0]):
                    self.assertTrue(torch.equal(got, want))
                self.assertTrue((found[0][0][1, 3:] == 0).all())
                if scaling != "per_tensor":
                    own = quantize(q[1:, :3], k[1:], v[1:], scaling)
                    self.assertTrue(torch.equal(found[0][0][1:, :3], attention_fp8(own, causal=True)))

    def test_gaps(self):
        """Nothing reads them. They are zeros, or are left as they are."""
        clean = quantize_varlen(*self.qkv, self.cu_q, self.cu_kv)
        for t in self.qkv:
            t[0], t[-1] = math.nan, math.inf
        made = quantize_varlen(*self.qkv, self.cu_q, self.cu_kv)
        self.assertEqual(made.counts.abs().sum(), 0)
        for got, want in zip(made[:6], clean[:6]):
            self.assertTrue(torch.equal(got.float(), want.float()))
        self.assertTrue(all((t.float()[[0, -1, -2]] == 0).all() for t in made[:3]))
        o, lse = attention_fp8(made, return_lse=True)
        self.assertTrue((o[[0, -1, -2]] == 0).all() and (lse[:, [0, -1, -2]] == -math.inf).all())
        unwritten = quantize_varlen(*self.qkv, self.cu_q, self.cu_kv, fill_gaps=False)
        some = attention_fp8(unwritten, fill_gaps=False)
        self.assertTrue(torch.equal(some[1:458], o[1:458]))

    def test_outputs(self):
        """Types, the largest magnitude, sinks, a cap and windows, beside packed attention with the same ones."""
        made = quantize_varlen(*self.qkv, self.cu_q, self.cu_kv, hadamard=1)
        lengths = (self.cu_q, self.cu_kv)
        for options in ({"s_aux": torch.tensor([0.0, 3.0, -2.0, 8.0])}, {"softcap": 2.0}, {"window": (20, 3)}, {"scale": 0.1}):
            with self.subTest(options=tuple(options)):
                o, lse, amax = attention_fp8(made, return_lse=True, return_amax=True, out_dtype=torch.float16, **options)
                want, want_lse = attention_varlen(*(t.float() for t in self.qkv), *lengths, return_lse=True, **options)
                self.assertEqual((o.dtype, amax.shape), (torch.float16, (1,)))
                self.assertLess((o.float() - want).square().mean(), 0.01 * want.square().mean())
                self.assertAlmostEqual(amax.item(), o.float().abs().max().item(), delta=1e-2)
                seen = want_lse > -math.inf
                self.assertTrue(torch.equal(lse > -math.inf, seen))
                self.assertLess((lse - want_lse)[seen].abs().mean(), 0.2)
                other = attention_varlen(*(t.float() for t in self.qkv), *lengths)
                self.assertGreater((o.float() - other).square().mean(), 0.01 * want.square().mean())
        scale = 448 / attention_fp8(made, return_amax=True)[1]
        eighth = attention_fp8(made, out_dtype=torch.float8_e4m3fn, scale_o=scale)
        want = attention_fp8(made).float()
        self.assertLess((eighth.float() / scale - want).square().mean(), 0.01 * want.square().mean())
        self.assertTrue(torch.equal(attention_fp8(made, sm_margin=8), attention_fp8(made)))

    def test_no_rows(self):
        q, k, v = self.qkv
        for scaling in SCALINGS:
            made = quantize_varlen(q[:0], k[:0], v[:0], torch.zeros(1, dtype=torch.long), scaling=scaling)
            o, lse = attention_fp8(made, return_lse=True)
            self.assertEqual((o.shape, lse.shape), ((0, 4, DIM), (4, 0)))
            made = quantize_varlen(q, k, v, torch.zeros(1, dtype=torch.long), scaling=scaling)
            self.assertTrue((attention_fp8(made) == 0).all())

    def test_compiled(self):
        """One graph for other lengths, and the operators are what torch is told."""
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        def compute(q, k, v, cu, used):
            made = quantize_varlen(q, k, v, cu, hadamard=3, seqused_kv=used, max_seqlen_q=300)
            return attention_fp8(made, causal=True, return_lse=True)

        for target in ("aot_eager", backend):
            torch._dynamo.reset()
            compiled = torch.compile(compute, backend=target, fullgraph=True, dynamic=True)
            for rows in (ROWS_Q, (6, 1, 130), (2, 2)):
                cu = torch.tensor((0, *rows)).cumsum(0)
                q, k, v = (torch.randn(sum(rows), heads, DIM).bfloat16() for heads in (4, 2, 2))
                arguments = (q, k, v, cu, torch.tensor(rows) // 2)
                for got, want in zip(compiled(*arguments), compute(*arguments)):
                    self.assertTrue(torch.equal(got, want))
        self.assertEqual(len(graphs), 1)
        lists = (self.cu_q.int(), self.cu_kv.int(), None, torch.tensor(USED_KV, dtype=torch.int32))
        operators = torch.ops.hopper_attention
        for scaling in (abi.PER_TENSOR, abi.PER_HEAD, abi.PER_BLOCK):
            numbers = (scaling, True, 3, False, *lists, 300, 0, True)
            torch.library.opcheck(operators.quantize, (*self.qkv, *numbers), test_utils=("test_schema", "test_faketensor"))
            made = operators.quantize(*self.qkv, *numbers)
            rest = (None, 0.0, abi.MASK_CAUSAL, 0, 0, 0, scaling, abi.BF16, True, False, False, 0, None, 0.0)
            arguments = (*made[:6], *rest, *(None for _ in abi.BLOCK_LISTS), *lists, 300, 0, True)
            # (torch compares no tensors of e4m3, as its check of schemas does.)
            torch.library.opcheck(operators.forward_fp8, arguments, test_utils=("test_faketensor",))

    def test_refusals(self):
        q, k, v = self.qkv
        cu, cu_kv = self.cu_q, self.cu_kv
        made = quantize_varlen(q, k, v, cu, cu_kv)
        ragged = torch.nested.nested_tensor([torch.randn(3, 4, DIM)], layout=torch.jagged)
        for error, words, arguments, options in (
            (ValueError, "q: 4 dimensions; allowed: 3, .*with cu_seqlens_q", (q[None], k, v, cu), {}),
            (ValueError, "q: 3 dimensions; allowed: 4, .*without cu_seqlens_q", (q, k, v, None, cu_kv), {}),
            (ValueError, r"cu_seqlens_q: missing.*; quantize\(\) takes", (q[None], k[None], v[None], None), {}),
            (ValueError, r"cu_seqlens_q: shape \[1, 6\]", (q, k, v, cu[None]), {}),
            (ValueError, "max_seqlen_kv: -1", (q, k, v, cu), {"max_seqlen_kv": -1}),
            (ValueError, "scaling: 'rows'", (q, k, v, cu), {"scaling": "rows"}),
            (ValueError, "v: it requires a gradient", (q, k, v.clone().requires_grad_(), cu), {}),
            (TypeError, "cu_seqlens_q: list", (q, k, v, [0, 3]), {}),
            (TypeError, "seqused_q: torch.float32", (q, k, v, cu), {"seqused_q": torch.ones(5)}),
            (TypeError, "k: torch.float64", (q, k.double(), v, cu), {}),
            (TypeError, "q: a nested tensor", (ragged, ragged, ragged, cu), {}),
            (abi.HattnError, "cu_seqlens_kv", (q, k, v, cu, cu_kv[:-1]), {}),
            (abi.HattnError, "seqused_q", (q, k, v, cu, cu_kv), {"seqused_q": torch.tensor([4, 0, 300, 4, 150])}),
            (abi.HattnError, "cu_seqlens_q", (q, k, v, cu + 3, cu_kv), {}),
        ):
            with self.subTest(words=words):
                self.assertRaisesRegex(error, words, quantize_varlen, *arguments, **options)
        for error, words, operands, options in (
            (NotImplementedError, "attn_mask: given with packed", made, {"attn_mask": torch.ones(460, 411) > 0}),
            (NotImplementedError, "block_mask: given with packed", made, {"block_mask": ()}),
            (ValueError, "q: 3 dimensions; allowed: 4, .*packed ones", made._replace(cu_seqlens_q=None, cu_seqlens_kv=None), {}),
            (ValueError, "max_seqlen_q: -3", made._replace(max_seqlen_q=-3), {}),
            (abi.HattnError, "descale_k: shape", made._replace(descale_k=made.descale_k[:, :-1]), {}),
            (abi.HattnError, "cu_seqlens_q", made._replace(cu_seqlens_q=made.cu_seqlens_q.flip(0)), {}),
            (abi.HattnError, "scale_o", made, {"out_dtype": torch.float8_e4m3fn}),
        ):
            with self.subTest(words=words):
                self.assertRaisesRegex(error, words, attention_fp8, operands, **options)
        with self.assertRaisesRegex(ValueError, "q: 3 dimensions; allowed: 4, .*quantize_varlen"):
            quantize(q, k, v)
        with self.assertRaisesRegex(TypeError, "q: a nested tensor"):
            quantize(ragged, ragged, ragged)
        self.assertIs(hopper_attention.quantize_varlen, quantize_varlen)


if __name__ == "__main__":
    unittest.main()
