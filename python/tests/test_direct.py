"""Tests of the operator of torch that eager calls on a GPU go through, on the CPU.

torch has a kernel of that operator for the CPU, and uses it. So the tests replace it in a process of their own, and
run the tests of test_torch there.
"""

import operator
import os
import subprocess
import sys
import unittest

from hopper_attention import abi
from test_torch_op import growth

try:
    import torch
except ImportError:
    torch = None
else:
    from hopper_attention import _torch, attention

HERE = os.path.dirname(os.path.abspath(__file__))
NAME = "_scaled_dot_product_flash_attention_for_cpu"
# It compares with torch's SDPA, whose kernel is replaced.
LEFT_OUT = "test_gradients_are_those_of_sdpa"


def replace_on_the_cpu():
    """Lets calls on the CPU go the way of calls on a GPU, in the rest of this process."""
    why = _torch._register_direct("CPU")
    assert why is None, why
    _torch._takes_direct = operator.attrgetter("is_cpu")


class Direct(unittest.TestCase):
    def setUp(self):
        if torch is None:
            self.skipTest("no torch")
        if _torch.fallback is not None:
            self.skipTest(f"no compiled operators: {_torch.fallback}")

    def test_torch_has_the_operator(self):
        self.assertIsNone(_torch.no_direct)

    def test_nothing_of_torch_is_replaced(self):
        """The kernel for the CPU is torch's still: it has the heads before the rows."""
        q, k, v = (torch.randn(1, 3, 5, 8) for _ in range(3))
        got = getattr(torch, NAME)(q, k, v)[0]
        torch.testing.assert_close(got, torch.softmax(q @ k.transpose(2, 3) / 8**0.5, -1) @ v)

    def test_in_a_process_of_its_own(self):
        program = os.path.join(HERE, "test_direct.py")
        package = os.path.dirname(os.path.dirname(_torch.__file__))
        done = subprocess.run(
            [sys.executable, program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": package}
        )
        self.assertEqual(done.returncode, 0, done.stderr[-4000:])
        self.assertRegex(done.stderr, r"Ran [2-9]\d tests")


class Replaced(unittest.TestCase):
    """Runs where replace_on_the_cpu() was called."""

    def setUp(self):
        torch.manual_seed(0)
        self.q, self.k, self.v = (torch.randn(2, 9, 4, 8, requires_grad=True) for _ in range(3))

    def test_it_is_the_operator_that_records(self):
        all_options = [{}, {"causal": True}, {"window": (2, 1)}, {"causal": True, "top_left": True, "scale": 0.3}]
        for options in (*all_options, {"sm_margin": 8}, {"causal": True, "sm_margin": 8}):
            with self.subTest(**options):
                leaves = self.q, self.k[:, :7], self.v[:, :7]
                o = attention(*leaves, **options)
                want, _ = attention(*leaves, **options, return_lse=True)
                self.assertIn("ForCpuBackward", type(o.grad_fn).__name__)
                self.assertIn("Recorded", type(want.grad_fn).__name__)
                self.assertTrue(torch.equal(o, want))
                d_o = torch.randn_like(o)
                inputs = self.q, self.k, self.v
                for got, exact in zip(torch.autograd.grad(o, inputs, d_o), torch.autograd.grad(want, inputs, d_o)):
                    self.assertTrue(torch.equal(got, exact))

    def test_the_log_sum_exp_is_left_out_without_gradients(self):
        self.assertEqual(getattr(torch, NAME)(self.q, self.k, self.v)[1].shape, (2, 4, 9))
        with torch.no_grad():
            self.assertEqual(getattr(torch, NAME)(self.q, self.k, self.v)[1].shape, (0,))

    def test_gradients_stay_on(self):
        q, k, v = (t.detach() for t in (self.q, self.k, self.v))
        self.assertFalse(attention(q, k, v).requires_grad)
        self.assertTrue(torch.is_grad_enabled())
        with self.assertRaises(abi.HattnError):
            attention(q, k[:1], v)
        self.assertTrue(torch.is_grad_enabled())

    def test_functions_of_functions(self):
        """Gradients of each of a batch, by torch.func."""
        one = torch.func.grad(lambda q, k, v: attention(q[None], k[None], v[None], causal=True).square().sum())
        q, k, v = (t.detach() for t in (self.q, self.k, self.v))
        got = torch.func.vmap(one)(q, k, v)
        (want,) = torch.autograd.grad(attention(self.q, k, v, causal=True).square().sum(), self.q)
        torch.testing.assert_close(got, want)
        leaf = self.q
        through = torch.func.vmap(lambda q, k, v: attention(q[None], k[None], v[None], causal=True)[0])(leaf, k, v)
        (got,) = torch.autograd.grad(through.square().sum(), leaf)
        torch.testing.assert_close(got, want)

    def test_options_first_used_elsewhere(self):
        """The mask's tensor is one that autograd can save, wherever the options were used first."""
        with torch.inference_mode():
            attention(self.q.detach(), self.k.detach(), self.v.detach(), window=(3, 1))
        with torch.device("meta"):
            attention(self.q, self.k, self.v, window=(3, 2))
        with torch._subclasses.FakeTensorMode() as mode:
            fake = attention(*(mode.from_tensor(t) for t in (self.q, self.k, self.v)), window=(3, 3))
            self.assertEqual(fake.shape, (2, 9, 4, 8))
        gradients = torch.func.grad(lambda q: attention(q, self.k, self.v, window=(3, 4)).sum())(self.q.detach())
        for right in (1, 2, 3, 4):
            o = attention(self.q, self.k, self.v, window=(3, right))
            (d_q,) = torch.autograd.grad(o.sum(), self.q)
        self.assertTrue(torch.equal(d_q, gradients))

    def test_subclasses_and_modes_see_the_package_s_operator(self):
        class Sees(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        seen = []
        with Sees():
            attention(self.q, self.k, self.v)
        self.assertIn("hopper_attention.forward_lse.default", seen)

    def test_nothing_is_left_behind(self):
        q, k, v = (torch.randn(1, 64, 1, 64, requires_grad=True) for _ in range(3))

        def some():
            for right in range(300):
                o = attention(q, k, v, window=(right % 7, 1), scale=0.3)
                torch.autograd.grad(o, (q, k, v), o)
                attention(q.detach(), k, v.clone())
                attention(q.detach(), k.detach(), v.detach())
                with self.assertRaises(abi.HattnError):
                    attention(q.clone(), k[:, :, :, :3].clone(), v.clone(), window=(1, 1), scale=0.2)

        # One tensor of each call would be 5 MB.
        self.assertLess(growth(some), 3 << 20)

    def test_refusals(self):
        op = getattr(torch, NAME)
        with self.assertRaisesRegex(RuntimeError, "dropout_p"):
            op(self.q, self.k, self.v, 0.5)
        numbers = torch.zeros(10, dtype=torch.int64)
        for mask in (torch.zeros(9, 9), torch.zeros(5), numbers[::2], numbers[:4]):
            with self.assertRaisesRegex(RuntimeError, "attn_mask"):
                op(self.q, self.k, self.v, attn_mask=mask)
        with self.assertRaisesRegex(RuntimeError, "sm_margin: -1"):
            op(self.q, self.k, self.v, attn_mask=torch.tensor([0, 0, 0, 0, -1]))
        with self.assertRaisesRegex(abi.HattnError, "k: shape"):
            attention(self.q, self.k[:1], self.v)


def main():
    replace_on_the_cpu()
    import test_torch

    load = unittest.defaultTestLoader.loadTestsFromTestCase
    suites = [load(case) for case in (test_torch.Torch, test_torch.Operators, Replaced)]
    chosen = [test for suite in suites for test in suite if LEFT_OUT not in test.id()]
    return not unittest.TextTestRunner().run(unittest.TestSuite(chosen)).wasSuccessful()


def load_tests(loader, _tests, _pattern):
    return loader.loadTestsFromTestCase(Direct)


if __name__ == "__main__":
    sys.exit(main())
