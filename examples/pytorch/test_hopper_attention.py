"""Tests of the ctypes binding and, where torch is installed, of the layer on top:

    HOPPER_ATTENTION_LIBRARY=path/of/libhopper_attention.so python3 test_hopper_attention.py

They run on the CPU. compare_sdpa.py is the one for a GPU.
"""

import array
import ctypes
import math
import os
import random
import struct
import sys
import threading
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import hopper_attention as hattn

try:
    import torch
except ImportError:
    torch = None
else:
    from hopper_attention_torch import PlanCache, attention, load

LIBRARY = None


def setUpModule():
    # Without the library this is an error and no skip: there would be nothing left to test.
    global LIBRARY
    LIBRARY = hattn.Library()


class Memory:
    """A tensor of f32 or bf16 in host memory, dense unless `stride` says where its elements are."""

    def __init__(self, shape, dtype=hattn.F32, stride=None, fill=math.nan):
        self.dtype, self.shape = dtype, tuple(shape)
        self.tensor = hattn.tensor(0, dtype, shape, stride)
        self.stride = tuple(self.tensor.stride[: len(self.shape)])
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride)) if 0 not in self.shape else 1
        # Room beyond the end shows what was written there.
        self.memory = array.array("f" if dtype == hattn.F32 else "H", [0] * (span + 8))
        for i in range(len(self.memory)):
            self.memory[i] = self._bits(fill)
        self.tensor.data = self.memory.buffer_info()[0]

    def _bits(self, value):
        if self.dtype == hattn.F32:
            return value
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        # Half of the last place is added before the lower half is cut off: nearest, ties to even. A NaN stays one.
        return bits >> 16 if math.isnan(value) else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16

    def _offset(self, index):
        return sum(i * s for i, s in zip(index, self.stride))

    def __getitem__(self, index):
        value = self.memory[self._offset(index)]
        return value if self.dtype == hattn.F32 else struct.unpack("<f", struct.pack("<I", value << 16))[0]

    def __setitem__(self, index, value):
        self.memory[self._offset(index)] = self._bits(value)

    def indices(self):
        """Every index, in order."""
        rest = [()]
        for size in self.shape:
            rest = [(*index, i) for index in rest for i in range(size)]
        return rest

    def randomise(self, seed):
        generator = random.Random(seed)
        for index in self.indices():
            self[index] = generator.gauss(0, 1)
        return self

    def bytes(self):
        return self.memory.tobytes()


def keeps(mask, q, kv, seqlen_q, seqlen_kv):
    """The definition of the masks, for (kind, left, right) at the bottom-right corner."""
    kind, left, right = mask
    own = q + seqlen_kv - seqlen_q
    if kind == hattn.MASK_FULL:
        return True
    if kind == hattn.MASK_CAUSAL:
        return kv <= own
    return (left < 0 or own - left <= kv) and (right < 0 or kv <= own + right)


def expected(q, k, v, mask, scale):
    """o and lse as dictionaries, by a plain loop in f64."""
    (batch, seqlen_q, heads_q, dim), (_, seqlen_kv, heads_kv, dim_vo) = q.shape, v.shape
    o, lse = {}, {}
    for b in range(batch):
        for h in range(heads_q):
            g = h // (heads_q // heads_kv)
            for i in range(seqlen_q):
                seen = [j for j in range(seqlen_kv) if keeps(mask, i, j, seqlen_q, seqlen_kv)]
                scores = [scale * sum(q[b, i, h, d] * k[b, j, g, d] for d in range(dim)) for j in seen]
                top = max(scores, default=0.0)
                weights = [math.exp(s - top) for s in scores]
                total = sum(weights)
                lse[b, h, i] = top + math.log(total) if seen else -math.inf
                for d in range(dim_vo):
                    o[b, i, h, d] = sum(w * v[b, j, g, d] for w, j in zip(weights, seen)) / total if seen else 0.0
    return o, lse


def expected_gradients(q, k, v, d_o, d_lse, mask, scale):
    """The gradients of q, k and v by the chain rule, by index; d_lse may be None."""
    (batch, seqlen_q, heads_q, dim), (_, seqlen_kv, heads_kv, dim_vo) = q.shape, v.shape
    o, lse = expected(q, k, v, mask, scale)
    d_q, d_k, d_v = ({index: 0.0 for index in t.indices()} for t in (q, k, v))
    for b, i, h, _ in (index for index in q.indices() if index[3] == 0):
        g = h // (heads_q // heads_kv)
        delta = sum(d_o[b, i, h, d] * o[b, i, h, d] for d in range(dim_vo)) - (d_lse[b, h, i] if d_lse else 0.0)
        for j in range(seqlen_kv):
            if not keeps(mask, i, j, seqlen_q, seqlen_kv):
                continue
            weight = math.exp(scale * sum(q[b, i, h, d] * k[b, j, g, d] for d in range(dim)) - lse[b, h, i])
            d_score = scale * weight * (sum(d_o[b, i, h, d] * v[b, j, g, d] for d in range(dim_vo)) - delta)
            for d in range(dim):
                d_q[b, i, h, d] += d_score * k[b, j, g, d]
                d_k[b, j, g, d] += d_score * q[b, i, h, d]
            for d in range(dim_vo):
                d_v[b, j, g, d] += weight * d_o[b, i, h, d]
    return d_q, d_k, d_v


class Problem:
    """A problem with its memory, a small one unless told otherwise."""

    def __init__(self, dtype=hattn.F32, mask=(hattn.MASK_FULL, 0, 0), sizes=(2, 5, 7, 4, 2, 8, 6), heads_first=False, **fields):
        batch, seqlen_q, seqlen_kv, heads_q, heads_kv, dim, dim_vo = sizes
        kind, left, right = mask
        self.mask, self.scale = mask, fields.get("softmax_scale") or 1 / math.sqrt(dim)
        self.problem = hattn.ForwardProblem(
            dtype=dtype, mask=kind, window_left=left, window_right=right, lse=1,
            batch=batch, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, heads_q=heads_q, heads_kv=heads_kv,
            head_dim_qk=dim, head_dim_vo=dim_vo, **fields,
        )  # fmt: skip

        def memory(seqlen, heads, dim):
            # [batch, heads, seqlen, head_dim] in memory, with a gap after every row.
            stride = (heads * seqlen * (dim + 3), dim + 3, seqlen * (dim + 3), 1) if heads_first else None
            return Memory((batch, seqlen, heads, dim), dtype, stride)

        self.q = memory(seqlen_q, heads_q, dim).randomise(1)
        self.k = memory(seqlen_kv, heads_kv, dim).randomise(2)
        self.v = memory(seqlen_kv, heads_kv, dim_vo).randomise(3)
        self.o = memory(seqlen_q, heads_q, dim_vo)
        self.lse = Memory((batch, heads_q, seqlen_q))
        self.d_o = memory(seqlen_q, heads_q, dim_vo).randomise(4)
        self.d_lse = Memory((batch, heads_q, seqlen_q)).randomise(5)
        self.d_q, self.d_k, self.d_v = memory(seqlen_q, heads_q, dim), memory(seqlen_kv, heads_kv, dim), memory(seqlen_kv, heads_kv, dim_vo)

    def tensors(self, **others):
        return {name: getattr(self, name).tensor for name in ("q", "k", "v", "o", "lse")} | others

    def gradients(self, **others):
        """The arguments of a backward run."""
        return self.tensors() | {name: getattr(self, name).tensor for name in ("d_o", "d_lse", "d_q", "d_k", "d_v")} | others


class Structs(unittest.TestCase):
    def test_sizes_and_places(self):
        sizes = {hattn.ForwardProblem: 120, hattn.Tensor: 96, hattn.ForwardArgs: 104, hattn.BackwardProblem: 112, hattn.BackwardArgs: 104}
        for struct_type, size in sizes.items():
            self.assertEqual(ctypes.sizeof(struct_type), size)
            made = struct_type()
            self.assertEqual((made.struct_size, made.abi_version), (size, hattn.ABI_VERSION))
        problem = hattn.ForwardProblem
        places = [problem.lse, problem.batch, problem.window_left, problem.softmax_scale, hattn.Tensor.shape, hattn.ForwardArgs.workspace]
        self.assertEqual([field.offset for field in places], [20, 24, 80, 96, 32, 48])
        problem, args = hattn.BackwardProblem, hattn.BackwardArgs
        places = [problem.d_lse, problem.batch, problem.softmax_scale, problem.deterministic, args.d_o, args.d_v, args.workspace]
        self.assertEqual([field.offset for field in places], [20, 24, 96, 100, 48, 80, 88])

    def test_a_backward_problem_is_of_a_forward_one(self):
        forward = Problem(mask=(hattn.MASK_WINDOW, 2, 1), softmax_scale=0.5).problem
        made = hattn.BackwardProblem.of(forward, d_lse=1)
        self.assertEqual((made.struct_size, made.abi_version, made.d_lse, made.deterministic), (112, hattn.ABI_VERSION, 1, 0))
        for name, _ in hattn.BackwardProblem._fields_:
            if name not in ("struct_size", "d_lse", "deterministic", "reserved"):
                self.assertEqual(getattr(made, name), getattr(forward, name), name)

    def test_misspelt_fields_are_refused(self):
        self.assertRaisesRegex(TypeError, "seqlen", hattn.ForwardProblem, seqlen=3)

    def test_dense_strides(self):
        made = hattn.tensor(0, hattn.F32, (2, 3, 4, 5))
        self.assertEqual((made.ndim, list(made.stride)), (4, [60, 20, 5, 1]))
        self.assertRaises(ValueError, hattn.tensor, 0, hattn.F32, (2, 3))


class Binding(unittest.TestCase):
    def compare(self, case, tolerance):
        plan = LIBRARY.plan(case.problem, hattn.CPU)
        self.assertEqual(plan.workspace_bytes, 0)
        plan.run(**case.tensors())
        o, lse = expected(case.q, case.k, case.v, case.mask, case.scale)
        self.close(case.o, o, tolerance)
        self.close(case.lse, lse, tolerance)

    def close(self, got, want, tolerance):
        written = set()
        for index in got.indices():
            written.add(got._offset(index))
            exact = want[index]
            # An infinity must be that infinity; the difference of two would be a NaN.
            close = got[index] == exact or abs(got[index] - exact) <= tolerance * max(1, abs(exact))
            self.assertTrue(close, f"{index}: {got[index]}, expected {exact}")
        fill = Memory((1, 1, 1), got.dtype).memory[0]
        for place, value in enumerate(got.memory):
            same = value == fill or (value != value and fill != fill)
            self.assertTrue(place in written or same, f"element {place} was written")

    def compare_gradients(self, case, tolerance, d_lse=True):
        LIBRARY.plan(case.problem, hattn.CPU).run(**case.tensors())
        plan = LIBRARY.plan(hattn.BackwardProblem.of(case.problem, d_lse=int(d_lse)), hattn.CPU)
        self.assertEqual(plan.workspace_bytes, 0)
        plan.run(**case.gradients(**({} if d_lse else {"d_lse": None})))
        want = expected_gradients(case.q, case.k, case.v, case.d_o, case.d_lse if d_lse else None, case.mask, case.scale)
        for got, want in zip((case.d_q, case.d_k, case.d_v), want):
            self.close(got, want, tolerance)

    def test_f32(self):
        for mask in ((hattn.MASK_FULL, 0, 0), (hattn.MASK_CAUSAL, 0, 0), (hattn.MASK_WINDOW, 2, 1), (hattn.MASK_WINDOW, hattn.UNBOUNDED, 0)):
            for heads_first in (False, True):
                with self.subTest(mask=mask, heads_first=heads_first):
                    self.compare(Problem(mask=mask, heads_first=heads_first), 1e-5)

    def test_gradients(self):
        for mask in ((hattn.MASK_FULL, 0, 0), (hattn.MASK_CAUSAL, 0, 0), (hattn.MASK_WINDOW, 2, 1)):
            for heads_first in (False, True):
                for d_lse in (False, True):
                    with self.subTest(mask=mask, heads_first=heads_first, d_lse=d_lse):
                        self.compare_gradients(Problem(mask=mask, heads_first=heads_first), 1e-5, d_lse)
        self.compare_gradients(Problem(softmax_scale=0.5), 1e-5)
        # P, O and dS are rounded once before the gradients are.
        self.compare_gradients(Problem(dtype=hattn.BF16, mask=(hattn.MASK_CAUSAL, 0, 0)), 2**-5)
        for sizes in ((1, 6, 3, 2, 1, 4, 4), (1, 3, 0, 2, 1, 4, 4), (1, 0, 3, 2, 1, 4, 4), (0, 5, 7, 2, 1, 8, 8)):
            with self.subTest(sizes=sizes):
                self.compare_gradients(Problem(mask=(hattn.MASK_CAUSAL, 0, 0), sizes=sizes), 1e-5)

    def test_a_scale_of_ones_own(self):
        self.compare(Problem(softmax_scale=0.5), 1e-5)

    def test_rows_without_keys(self):
        self.compare(Problem(mask=(hattn.MASK_CAUSAL, 0, 0), sizes=(1, 6, 3, 2, 1, 4, 4)), 1e-5)
        self.compare(Problem(sizes=(1, 3, 0, 2, 1, 4, 4)), 1e-5)

    def test_bf16(self):
        # The output's own rounding is 2^-9 of it; P is rounded once before.
        self.compare(Problem(dtype=hattn.BF16, mask=(hattn.MASK_CAUSAL, 0, 0)), 2**-7)

    def test_nothing_to_do(self):
        for sizes in ((0, 5, 7, 2, 1, 8, 8), (2, 0, 7, 2, 1, 8, 8)):
            self.compare(Problem(sizes=sizes), 0)

    def test_versions_and_devices(self):
        self.assertEqual(LIBRARY.abi_version, hattn.ABI_VERSION)
        self.assertRegex(LIBRARY.version, r"^\d+\.\d+\.\d+$")
        self.assertGreaterEqual(LIBRARY.device_count(), 0)
        self.assertEqual(LIBRARY.status_name(hattn.ERROR_SHAPE), "HATTN_ERROR_SHAPE")

    def test_plans_describe_themselves(self):
        plan = LIBRARY.plan(Problem().problem, hattn.CPU)
        for part in ("seqlen 5x7 heads 4/2", "cpu, tiled online softmax", "workspace 0 bytes"):
            self.assertIn(part, plan.describe())
        plan = LIBRARY.plan(hattn.BackwardProblem.of(Problem().problem, deterministic=1), hattn.CPU)
        for part in ("backward f32", "deterministic: cpu", "workspace 0 bytes"):
            self.assertIn(part, plan.describe())

    def test_support_is_a_question(self):
        problem = Problem(dtype=hattn.BF16, sizes=(1, 64, 64, 2, 2, 64, 64)).problem
        self.assertTrue(LIBRARY.supported(problem, hattn.CPU))
        nowhere = LIBRARY.device_count()
        self.assertFalse(LIBRARY.supported(problem, nowhere))
        self.assertIn(f"cuda:{nowhere}", LIBRARY.last_error())
        gradients = hattn.BackwardProblem.of(problem)
        self.assertEqual([LIBRARY.supported(gradients, device) for device in (hattn.CPU, nowhere)], [True, False])
        problem.heads_q = 3
        self.assertRaises(hattn.HattnError, LIBRARY.supported, problem, hattn.CPU)

    def test_threads_share_a_plan(self):
        cases = [Problem(mask=(hattn.MASK_CAUSAL, 0, 0)) for _ in range(4)]
        plan = LIBRARY.plan(cases[0].problem, hattn.CPU)
        threads = [threading.Thread(target=plan.run, kwargs=case.tensors()) for case in cases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len({case.o.bytes() for case in cases}), 1)
        self.assertFalse(math.isnan(cases[0].o[0, 0, 0, 0]))


class Refusals(unittest.TestCase):
    def refused(self, status, words, call, *args, **kwargs):
        with self.assertRaises(hattn.HattnError) as caught:
            call(*args, **kwargs)
        self.assertEqual((caught.exception.status, caught.exception.name), (status, LIBRARY.status_name(status)))
        for word in words:
            self.assertIn(word, caught.exception.text)

    def test_problems(self):
        def plan(device=hattn.CPU, **fields):
            problem = Problem().problem
            for name, value in fields.items():
                setattr(problem, name, value)
            return LIBRARY.plan(problem, device)

        self.refused(hattn.ERROR_VALUE, ["heads_q", "3", "a multiple of heads_kv"], plan, heads_q=3)
        self.refused(hattn.ERROR_VALUE, ["softmax_scale", "-1", "above 0"], plan, softmax_scale=-1)
        self.refused(hattn.ERROR_DTYPE, ["o: ", "f32", "bf16, f16, e4m3"], plan, dtype=hattn.E4M3, output=hattn.F32)
        self.refused(hattn.ERROR_VALUE, ["scaling", "per-block", "e4m3 operands only"], plan, scaling=hattn.PER_BLOCK)
        self.refused(hattn.ERROR_ARGUMENT, ["dtype", "0"], plan, dtype=0)
        self.refused(hattn.ERROR_ARGUMENT, ["mask", "9"], plan, mask=9)
        self.refused(hattn.ERROR_ABI, ["struct_size", "103"], plan, struct_size=103)
        self.refused(hattn.ERROR_ABI, ["abi_version", "2"], plan, abi_version=2)
        self.refused(hattn.ERROR_NO_DEVICE, ["cuda:"], plan, device=LIBRARY.device_count())

    def test_arguments(self):
        case, other = Problem(), Problem(sizes=(2, 5, 6, 4, 2, 8, 6))
        plan = LIBRARY.plan(case.problem, hattn.CPU)
        before = case.o.bytes(), case.lse.bytes()
        halves = hattn.tensor(case.k.tensor.data, hattn.F16, case.k.shape)
        backwards = hattn.tensor(case.q.tensor.data, hattn.F32, case.q.shape, (160, 32, 8, 2))
        elsewhere = hattn.tensor(case.v.tensor.data, hattn.F32, case.v.shape, device=0)
        overlap = hattn.tensor(case.v.tensor.data, hattn.F32, case.o.shape)
        for status, words, others in (
            (hattn.ERROR_SHAPE, ["k: ", "[2, 6, 2, 8]", "[2, 7, 2, 8]"], {"k": other.k.tensor}),
            (hattn.ERROR_DTYPE, ["f16", "f32"], {"k": halves}),
            (hattn.ERROR_LAYOUT, ["q", "2"], {"q": backwards}),
            (hattn.ERROR_DEVICE, ["v: ", "cuda:0", "cpu"], {"v": elsewhere}),
            (hattn.ERROR_LAYOUT, ["o"], {"o": overlap}),
            (hattn.ERROR_VALUE, ["lse"], {"lse": None}),
            (hattn.ERROR_ARGUMENT, ["q"], {"q": None}),
        ):
            with self.subTest(words=words):
                self.refused(status, words, plan.run, **case.tensors(**others))
        self.assertEqual(before, (case.o.bytes(), case.lse.bytes()), "a refused call wrote something")
        plan.run(**case.tensors())
        self.assertNotEqual(before, (case.o.bytes(), case.lse.bytes()))

    def test_backward(self):
        case = Problem()
        gradients = hattn.BackwardProblem.of(case.problem, d_lse=1)
        plan = LIBRARY.plan(gradients, hattn.CPU)
        before = [t.bytes() for t in (case.d_q, case.d_k, case.d_v)]
        for status, words, others in (
            (hattn.ERROR_SHAPE, ["d_q: ", "[2, 7, 2, 8]", "[2, 5, 4, 8]"], {"d_q": case.k.tensor}),
            (hattn.ERROR_LAYOUT, ["d_v"], {"d_v": case.v.tensor}),
            (hattn.ERROR_VALUE, ["d_lse: missing"], {"d_lse": None}),
            (hattn.ERROR_ARGUMENT, ["lse: a null"], {"lse": None}),
        ):
            with self.subTest(words=words):
                self.refused(status, words, plan.run, **case.gradients(**others))
        self.assertEqual(before, [t.bytes() for t in (case.d_q, case.d_k, case.d_v)], "a refused call wrote something")
        gradients.deterministic = 2
        self.refused(hattn.ERROR_ARGUMENT, ["deterministic: 2"], LIBRARY.plan, gradients, hattn.CPU)

    def test_every_thread_has_its_own_last_error(self):
        self.refused(hattn.ERROR_ARGUMENT, ["dtype"], LIBRARY.plan, hattn.ForwardProblem(heads_q=1), hattn.CPU)
        here, there = LIBRARY.last_error(), []
        thread = threading.Thread(target=lambda: there.append(LIBRARY.last_error()))
        thread.start()
        thread.join()
        self.assertEqual((bool(here), there), (True, [""]))

    def test_a_library_that_is_not_there(self):
        with self.assertRaisesRegex(OSError, hattn.VARIABLE):
            hattn.Library("libhopper_attention_is_not_there.so")


class Torch(unittest.TestCase):
    def setUp(self):
        if torch is None:
            print(f"skipped: no torch ({self._testMethodName})", file=sys.stderr)
            self.skipTest("torch is not installed")
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
        masks += [({"window": (5, 2)}, (keys >= own - 5) & (keys <= own + 2)), ({"window": (5, None), "causal": True}, (keys >= own - 5) & (keys <= own))]
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
        cache = load()
        q, k, v = self.tensors(seqlen_q=19)
        made = cache.made
        for options in ({}, {}, {"causal": True}, {"causal": True}):
            attention(q, k, v, **options)
        self.assertEqual(cache.made, made + 2)
        small = PlanCache(LIBRARY, capacity=2)

        def one(seqlen_kv):
            sizes = {"heads_q": 1, "heads_kv": 1, "head_dim_qk": 8, "head_dim_vo": 8, "batch": 1, "seqlen_q": 1}
            return hattn.ForwardProblem(dtype=hattn.F32, seqlen_kv=seqlen_kv, **sizes)

        first = small.get(hattn.CPU, one(1))
        for seqlen_kv in (2, 1, 3):  # 3 takes the place of 2, the one not used for longest
            small.get(hattn.CPU, one(seqlen_kv))
        self.assertEqual((len(small), small.made), (2, 3))
        self.assertIs(small.get(hattn.CPU, one(1)), first)
        # The same bytes as another struct are another plan.
        self.assertIsNot(small.get(hattn.CPU, hattn.BackwardProblem.of(one(1))), first)

    def test_refusals(self):
        q, k, v = self.tensors()
        for error, words, args, options in (
            (TypeError, "float64", (q.double(), k, v), {}),
            (ValueError, "3 dimensions", (q[0], k, v), {}),
            (ValueError, "meta", (q.to("meta"), k, v), {}),
            (ValueError, "window: left -3", (q, k, v), {"window": (-3, 0)}),
            (ValueError, "scale: 0", (q, k, v), {"scale": 0}),
            (hattn.HattnError, "k: shape", (q, k[:1], v), {}),
            (hattn.HattnError, "f16", (q, k.half(), v), {}),
            (hattn.HattnError, "q", (q.transpose(1, 3).contiguous().transpose(1, 3), k, v), {}),
            (hattn.HattnError, "heads_q", (q[:, :, :5], k, v), {}),
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
        masks = [({}, None), ({"causal": True}, keys <= own), ({"window": (5, 2)}, (keys >= own - 5) & (keys <= own + 2))]
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
                            lambda *t: self.exact(*t, keep), doubles, d_o.double(), None if d_lse is None else d_lse.double()
                        )
                        for mine, exact, t in zip(got, want, inputs):
                            self.assertEqual(mine.dtype, t.dtype)
                            self.close(mine, exact, tolerance * exact.abs().max().item())

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
        for d_o in (ones.transpose(1, 2).contiguous().transpose(1, 2), torch.ones(ones.numel() + 1)[1:].view(ones.shape)):
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
        with self.assertRaisesRegex(RuntimeError, "once_differentiable"):
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
        cache = load()
        q, k, v = (t.requires_grad_() for t in self.tensors(seqlen_q=21))
        attention(q, k, v).sum().backward()
        made, before = cache.made, q.grad.clone()
        self.addCleanup(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(True)
        q.grad = None
        attention(q, k, v).sum().backward()
        self.assertEqual(cache.made, made + 1)
        self.assertTrue(torch.equal(q.grad, before))


if __name__ == "__main__":
    unittest.main()
