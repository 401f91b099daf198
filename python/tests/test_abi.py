"""Tests of hopper_attention.abi on the CPU, with the standard library alone."""

import ast
import ctypes
import math
import os
import re
import threading
import unittest

from hopper_attention import abi as hattn
from memory import Memory, Problem, expected, expected_gradients

LIBRARY = None


def setUpModule():
    # Without the library this is an error and no skip: there would be nothing left to test.
    global LIBRARY
    LIBRARY = hattn.load()


class Structs(unittest.TestCase):
    def test_a_backward_problem_is_of_a_forward_one(self):
        beside = {"alibi": hattn.ALIBI_PER_BATCH, "block_mask": 3, "block_mask_most_partial": 1, "dropout": 0.5}
        beside.update(bias=3, bias_dims=5, bias_queries=7, bias_keys=9, workspace_limit=2**63)
        forward = Problem(mask=(hattn.MASK_WINDOW, 2, 1), softmax_scale=0.5, softcap=50.0, sm_margin=8, **beside).problem
        made = hattn.BackwardProblem.of(forward, d_lse=1)
        self.assertEqual(
            (made.struct_size, made.abi_version, made.d_lse, made.deterministic), (216, hattn.ABI_VERSION, 1, 0)
        )
        for name, _ in hattn.BackwardProblem._fields_:
            if name not in ("struct_size", "d_lse", "d_sinks", "d_bias", "deterministic"):
                self.assertEqual(getattr(made, name), getattr(forward, name), name)

    def test_misspelt_fields_are_refused(self):
        self.assertRaisesRegex(TypeError, "seqlen", hattn.ForwardProblem, seqlen=3)

    def test_dense_strides(self):
        made = hattn.tensor(0, hattn.F32, (2, 3, 4, 5))
        self.assertEqual((made.ndim, list(made.stride)), (4, [60, 20, 5, 1]))
        self.assertRaises(ValueError, hattn.tensor, 0, hattn.F32, ())
        self.assertRaises(ValueError, hattn.tensor, 0, hattn.F32, (2, 3), (1,))


class Header(unittest.TestCase):
    """The committed files of the C library that the binding must agree with."""

    FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../crates/hopper-attention-capi")

    def read(self, path):
        path = os.path.join(self.FOLDER, path)
        if not os.path.exists(path):
            self.skipTest(f"{os.path.basename(path)} is not beside the tests")
        with open(path, encoding="utf-8") as file:
            return file.read()

    def test_structs_lie_as_in_layout_def(self):
        text, seen = self.read("abi/layout.def"), set()
        for name, size in re.findall(r"^STRUCT\((\w+), \w+, (\d+)\)", text, re.M):
            seen.add(name)
            self.assertEqual(ctypes.sizeof(hattn.STRUCTS[name]), int(size), name)
            made = hattn.STRUCTS[name]()
            self.assertEqual((made.struct_size, made.abi_version), (int(size), hattn.ABI_VERSION))
        self.assertEqual(seen, set(hattn.STRUCTS))
        fields = {}
        for name, field, offset, size in re.findall(r"^FIELD\((\w+), (\w+), (\d+), (\d+)\)", text, re.M):
            fields.setdefault(name, []).append((field, int(offset), int(size)))
        for name, struct in hattn.STRUCTS.items():
            places = [getattr(struct, field[0]) for field in struct._fields_]
            ours = [(field[0], place.offset, place.size) for field, place in zip(struct._fields_, places)]
            self.assertEqual(ours, fields[name], name)

    def test_constants_are_those_of_the_header(self):
        found = re.findall(r"^#define HATTN_(\w+) \(?(-?\d+)\)?$", self.read("include/hopper_attention.h"), re.M)
        left_out = {"VERSION_MAJOR", "VERSION_MINOR", "ARCH_OWN", "ARCH_SM80", "ARCH_SM90"}
        self.assertGreater(len(found), 30)
        for name, value in found:
            if name not in left_out:
                self.assertEqual(getattr(hattn, name), int(value), name)

    def test_the_sources_are_python_3_9(self):
        folder = os.path.dirname(hattn.__file__)
        for name in os.listdir(folder):
            if name.endswith(".py"):
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    ast.parse(file.read(), name, feature_version=(3, 9))


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
        want = expected_gradients(
            case.q, case.k, case.v, case.d_o, case.d_lse if d_lse else None, case.mask, case.scale
        )
        for got, want in zip((case.d_q, case.d_k, case.d_v), want):
            self.close(got, want, tolerance)

    def test_f32(self):
        for mask in (
            (hattn.MASK_FULL, 0, 0),
            (hattn.MASK_CAUSAL, 0, 0),
            (hattn.MASK_WINDOW, 2, 1),
            (hattn.MASK_WINDOW, hattn.UNBOUNDED, 0),
        ):
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

    def test_the_cpu_ignores_a_margin_and_meets_a_limit(self):
        case = Problem(sm_margin=500, workspace_limit=1)
        self.compare(case, 1e-5)
        self.compare_gradients(case, 1e-5)
        for problem in (case.problem, hattn.BackwardProblem.of(case.problem)):
            self.assertIn(" sm_margin 500 workspace_limit 1: cpu", LIBRARY.plan(problem, hattn.CPU).describe())

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
        self.refused(hattn.ERROR_VALUE, ["sm_margin: -1", "0 and above"], plan, sm_margin=-1)
        self.refused(hattn.ERROR_ARGUMENT, ["fill_gaps: 2", "0 (not wanted)"], plan, fill_gaps=2)
        self.refused(hattn.ERROR_VALUE, ["fill_gaps", "packed tensors or used lengths"], plan, fill_gaps=1)
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

    def test_an_error_reads_well(self):
        error = hattn.HattnError(3, "HATTN_ERROR_SHAPE", "k: shape")
        self.assertEqual(
            (str(error), error.status, error.name), ("k: shape (HATTN_ERROR_SHAPE)", 3, "HATTN_ERROR_SHAPE")
        )
