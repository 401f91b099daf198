"""Tests of attention on numpy arrays and other DLPack exporters, on the CPU."""

import math
import types
import unittest
from unittest import mock

import hopper_attention
from hopper_attention import _arrays, abi

try:
    import numpy
except ImportError:
    numpy = None


def exact(q, k, v, keep=None):
    """o and lse in f64."""
    q, k, v = (t.astype(numpy.float64).transpose(0, 2, 1, 3) for t in (q, k, v))
    k, v = (t.repeat(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[3])
    if keep is not None:
        scores = numpy.where(keep, scores, -numpy.inf)
    top = scores.max(-1, keepdims=True)
    weights = numpy.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return (weights / total @ v).transpose(0, 2, 1, 3), (top + numpy.log(total))[..., 0]


class Arrays(unittest.TestCase):
    def setUp(self):
        if numpy is None:
            self.skipTest("no numpy")
        self.random = numpy.random.default_rng(1)

    def tensors(self, dtype="float32"):
        shapes = ((2, 9, 6, 16), (2, 13, 2, 16), (2, 13, 2, 16))
        return [self.random.standard_normal(shape).astype(dtype) for shape in shapes]

    def test_arrays_whose_memory_is_not_allocated_take_a_plan_without_scratch_memory(self):
        """JAX's, for one. The plans are made up, as the CPU's need none."""
        needs = lambda limit: types.SimpleNamespace(workspace_bytes=0 if limit else 4096)
        refused = mock.Mock(side_effect=lambda device, problem: needs(0) if not problem.workspace_limit else self.refuse())
        problem = abi.ForwardProblem(heads_q=3)
        for plans, like, bytes_ in (
            (lambda device, problem: needs(problem.workspace_limit), object(), 0),
            (lambda device, problem: needs(problem.workspace_limit), numpy.zeros(1), 4096),
            (refused, object(), 4096),
        ):
            with mock.patch.object(_arrays, "plans", lambda: types.SimpleNamespace(get=plans)):
                self.assertEqual(_arrays._plan(problem, like, 0).workspace_bytes, bytes_)
        self.assertEqual((problem.workspace_limit, refused.call_count), (0, 2))
        self.assertRaisesRegex(TypeError, "needs 4096 bytes", _arrays._workspace, needs(0), object(), None)

    @staticmethod
    def refuse():
        raise abi.HattnError(6, "HATTN_ERROR_VALUE", "workspace_limit: 1")

    def test_numpy(self):
        own, keys = numpy.arange(9)[:, None] + 4, numpy.arange(13)
        masks = [({}, None), ({"causal": True}, keys <= own), ({"causal": True, "top_left": True}, keys <= own - 4)]
        masks += [({"window": (5, 2)}, (keys >= own - 5) & (keys <= own + 2))]
        for dtype, tolerance in (("float32", 1e-5), ("float16", 4e-3)):
            for options, keep in masks:
                with self.subTest(dtype=dtype, **options):
                    q, k, v = self.tensors(dtype)
                    o, lse = hopper_attention.attention(q, k, v, return_lse=True, **options)
                    self.assertEqual((type(o), o.dtype, lse.dtype), (numpy.ndarray, q.dtype, numpy.float32))
                    want_o, want_lse = exact(q, k, v, keep)
                    numpy.testing.assert_allclose(o, want_o, atol=tolerance)
                    numpy.testing.assert_allclose(lse, want_lse, atol=1e-4)

    def test_head_dims(self):
        for head_dim, head_dim_vo in ((8, 8), (136, 136), (192, 128), (128, 192), (256, 256), (512, 512), (12, 520)):
            with self.subTest(head_dim=head_dim, head_dim_vo=head_dim_vo):
                shapes = ((1, 9, 4, head_dim), (1, 13, 2, head_dim), (1, 13, 2, head_dim_vo))
                q, k, v = (self.random.standard_normal(shape).astype("float32") for shape in shapes)
                o, lse = hopper_attention.attention(q, k, v, return_lse=True)
                want_o, want_lse = exact(q, k, v)
                numpy.testing.assert_allclose(o, want_o, atol=1e-5)
                numpy.testing.assert_allclose(lse, want_lse, atol=1e-4)
                gradients = hopper_attention.attention_backward(q, k, v, o, lse, numpy.ones_like(o))
                self.assertEqual([d.shape for d in gradients], [q.shape, k.shape, v.shape])
                # dO of ones: what a value gets are its weights, which sum to 1 over the keys of each query.
                numpy.testing.assert_allclose(gradients[2].sum((0, 1, 2)), 4 * 9, rtol=1e-5)

    def test_where_it_lies(self):
        q, k, v = self.tensors()
        want = hopper_attention.attention(q, k, v)
        turned = [numpy.ascontiguousarray(t.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for t in (q, k, v)]
        self.assertTrue((hopper_attention.attention(*turned) == want).all())
        wide = numpy.zeros((2, 9, 6, 48), "float32")
        wide[..., 16:32] = q
        self.assertTrue((hopper_attention.attention(wide[..., 16:32], k, v) == want).all())
        q.flags.writeable = False
        if numpy.lib.NumpyVersion(numpy.__version__) >= "2.1.0":  # before, numpy exports no read-only array
            self.assertTrue((hopper_attention.attention(q, k, v) == want).all())

    def test_outputs_of_the_caller(self):
        q, k, v = self.tensors()
        want, want_lse = hopper_attention.attention(q, k, v, return_lse=True)
        out, lse = numpy.empty_like(want), numpy.empty_like(want_lse)
        got, got_lse = hopper_attention.attention(q, k, v, out=out, lse_out=lse)
        self.assertIs(got, out)
        self.assertIs(got_lse, lse)
        self.assertTrue((out == want).all() and (lse == want_lse).all())
        out.flags.writeable = False
        with self.assertRaises(BufferError):
            hopper_attention.attention(q, k, v, out=out)

    def test_gradients(self):
        q, k, v = (t.astype("float32") for t in self.tensors())
        o, lse = hopper_attention.attention(q, k, v, causal=True, return_lse=True)
        d_o, d_lse = (
            self.random.standard_normal(o.shape).astype("float32"),
            self.random.standard_normal(lse.shape).astype("float32"),
        )
        d = hopper_attention.attention_backward(q, k, v, o, lse, d_o, d_lse, causal=True)
        keep = numpy.arange(13) <= numpy.arange(9)[:, None] + 4

        def loss(q, k, v):
            o, lse = exact(q, k, v, keep)
            return (o * d_o).sum() + (lse * d_lse).sum()

        for i, gradient in enumerate(d):
            for index in ((0, 3, 0, 5), (1, 8, 1, 15), (1, 0, 1, 0)):
                inputs = [t.astype("float64") for t in (q, k, v)]
                slopes = []
                for step in (1e-5, -1e-5):
                    moved = [t.copy() for t in inputs]
                    moved[i][index] += step
                    slopes.append(loss(*moved))
                self.assertAlmostEqual(gradient[index], (slopes[0] - slopes[1]) / 2e-5, delta=1e-3)

    def test_the_cpu_ignores_a_margin(self):
        q, k, v = self.tensors()
        o, lse = hopper_attention.attention(q, k, v, causal=True, return_lse=True)
        again = hopper_attention.attention(q, k, v, causal=True, return_lse=True, sm_margin=16)
        self.assertTrue((again[0] == o).all() and (again[1] == lse).all())
        gradients = hopper_attention.attention_backward(q, k, v, o, lse, o, causal=True)
        for got, want in zip(
            hopper_attention.attention_backward(q, k, v, o, lse, o, causal=True, sm_margin=24), gradients
        ):
            self.assertTrue((got == want).all())
        with self.assertRaisesRegex(ValueError, "sm_margin: -2"):
            hopper_attention.attention_backward(q, k, v, o, lse, o, sm_margin=-2)

    def test_the_cpu_meets_every_limit(self):
        q, k, v = self.tensors()
        o, lse = hopper_attention.attention(q, k, v, return_lse=True)
        again = hopper_attention.attention(q, k, v, return_lse=True, workspace_limit=1)
        self.assertTrue((again[0] == o).all() and (again[1] == lse).all())
        gradients = hopper_attention.attention_backward(q, k, v, o, lse, o)
        for got, want in zip(
            hopper_attention.attention_backward(q, k, v, o, lse, o, workspace_limit=2**40), gradients
        ):
            self.assertTrue((got == want).all())
        with self.assertRaisesRegex(ValueError, "workspace_limit: 0; allowed: None, or 1 to"):
            hopper_attention.attention_backward(q, k, v, o, lse, o, workspace_limit=0)

    def test_another_exporter(self):
        class Exporter:
            """An array of some framework: it has DLPack and nothing else, and knows no max_version."""

            def __init__(self, array):
                self.array = array

            def __dlpack__(self, stream=None):
                return self.array.__dlpack__()

            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

        q, k, v = self.tensors()
        want = hopper_attention.attention(q, k, v)
        with self.assertRaisesRegex(TypeError, "out: missing.*Exporter"):
            hopper_attention.attention(*map(Exporter, (q, k, v)))
        out = numpy.empty_like(want)
        hopper_attention.attention(*map(Exporter, (q, k, v)), out=Exporter(out))
        self.assertTrue((out == want).all())

    def test_refusals(self):
        q, k, v = self.tensors()
        for error, words, arguments, options in (
            (TypeError, "q: list", ([1.0], k, v), {}),
            (TypeError, "q: an element type", (q.astype("int32"), k, v), {}),
            (ValueError, "q: 3 dimensions", (q[0], k, v), {}),
            (abi.HattnError, r"k: shape \[1, 13", (q, k[:1], v), {}),
            (abi.HattnError, "heads_q", (q[:, :, :5], k, v), {}),
            (abi.HattnError, "q", (q.transpose(0, 3, 2, 1), k, v), {}),
            (ValueError, "window: left -3", (q, k, v), {"window": (-3, 0)}),
            (ValueError, "scale: 0", (q, k, v), {"scale": 0}),
            (ValueError, "sm_margin: -1; allowed: 0 to", (q, k, v), {"sm_margin": -1}),
            (ValueError, "sm_margin: 4294967296", (q, k, v), {"sm_margin": 2**32}),
            (ValueError, "workspace_limit: -1; allowed: None, or 1 to", (q, k, v), {"workspace_limit": -1}),
        ):
            with self.subTest(words=words):
                self.assertRaisesRegex(error, words, hopper_attention.attention, *arguments, **options)
