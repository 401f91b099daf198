"""Tests of the compiled operators of python/torch_op. What they compute is tested with the package."""

import ctypes
import gc
import os
import subprocess
import sys
import threading
import unittest

from hopper_attention import abi

try:
    import torch
except ImportError:
    torch = None
else:
    from hopper_attention import _torch

# scale, mask, corner, window_left, window_right
FULL = (0.0, 0, 0, 0, 0)
CAUSAL = (0.0, 1, 0, 0, 0)


def resident():
    """Bytes of memory that this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def growth(calls):
    """Bytes that the process has more after `calls`, when it has made them once before."""
    calls()
    gc.collect()
    before = resident()
    calls()
    gc.collect()
    return resident() - before


class Compiled(unittest.TestCase):
    def setUp(self):
        if torch is None:
            self.skipTest("no torch")
        if _torch.fallback is not None:
            self.skipTest(f"no compiled operators: {_torch.fallback}")
        torch.manual_seed(0)
        self.path = os.path.join(os.path.dirname(_torch.__file__), "_torch_op.so")
        self.ops = torch.ops.hopper_attention
        # Below autograd, so that the operators themselves are called.
        guard = torch._C._AutoDispatchBelowAutograd()
        guard.__enter__()
        self.addCleanup(guard.__exit__, None, None, None)

    def tensors(self, *shape, count=3, dtype=None):
        return [torch.randn(*shape).to(dtype or torch.float32) for _ in range(count)]

    def test_the_same_as_through_ctypes(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            q, k, v, d_o = self.tensors(2, 19, 3, 24, count=4, dtype=dtype)
            for numbers in (FULL, CAUSAL, (0.3, 2, 1, 4, 2), (0.0, 2, 0, -1, 3)):
                with self.subTest(dtype=dtype, numbers=numbers):
                    o, lse = self.ops.forward_lse(q, k, v, *numbers)
                    for got, want in zip((o, lse), _torch._forward_lse(q, k, v, *numbers)):
                        self.assertTrue(torch.equal(got, want))
                    self.assertTrue(torch.equal(self.ops.forward(q, k, v, *numbers), o))
                    for d_lse in (None, torch.randn_like(lse)):
                        saved = (q, k, v, o, lse)
                        got = self.ops.backward(d_o, d_lse, *saved, *numbers, True)
                        for one, want in zip(got, _torch._backward(d_o, d_lse, *saved, *numbers, True)):
                            self.assertTrue(torch.equal(one, want))

    def test_sinks_are_the_same_as_through_ctypes(self):
        q, k, v, d_o = self.tensors(2, 19, 3, 24, count=4, dtype=torch.bfloat16)
        for dtype in (torch.float32, torch.bfloat16):
            sinks = torch.tensor([0.0, 2.0, -torch.inf]).to(dtype)
            for numbers in (FULL, CAUSAL, (0.3, 2, 1, 4, 2)):
                o, lse = self.ops.forward_sinks(q, k, v, sinks, *numbers)
                for got, want in zip((o, lse), _torch._forward_sinks(q, k, v, sinks, *numbers)):
                    self.assertTrue(torch.equal(got, want))
                self.assertFalse(torch.equal(o, self.ops.forward(q, k, v, *numbers)))
                for d_lse in (None, torch.randn_like(lse)):
                    saved = (q, k, v, sinks, o, lse)
                    got = self.ops.backward_sinks(d_o, d_lse, *saved, *numbers, True)
                    self.assertEqual((len(got), got[3].shape, got[3].dtype), (4, (3,), torch.float32))
                    for one, want in zip(got, _torch._backward_sinks(d_o, d_lse, *saved, *numbers, True)):
                        self.assertTrue(torch.equal(one, want))
        for words, sinks in (("HATTN_ERROR_DTYPE", sinks.double()), ("sinks: 2 dimensions", sinks[None])):
            with self.assertRaisesRegex(RuntimeError, words):
                self.ops.forward_sinks(q, k, v, sinks, *FULL)
            with self.assertRaisesRegex(RuntimeError, words):
                self.ops.backward_sinks(d_o, None, q, k, v, sinks, o, lse, *FULL, False)
        for sinks in (torch.zeros(3).half(), torch.zeros(2)):
            with self.assertRaisesRegex(RuntimeError, "sinks.*HATTN_ERROR"):
                self.ops.forward_sinks(q, k, v, sinks, *FULL)

    def test_the_margin_reaches_the_library(self):
        """The CPU ignores a margin, but for one below 0, which no device takes."""
        q, k, v = self.tensors(1, 4, 2, 8)
        o, lse = self.ops.forward_lse(q, k, v, *CAUSAL)
        self.assertTrue(torch.equal(self.ops.forward(q, k, v, *CAUSAL, 7), o))
        for margin, words in ((-1, "sm_margin: -1"), (-(2**40), "sm_margin: -2147483648")):
            for call in (
                lambda: self.ops.forward(q, k, v, *CAUSAL, margin),
                lambda: self.ops.forward_lse(q, k, v, *CAUSAL, margin),
                lambda: self.ops.backward(o, None, q, k, v, o, lse, *CAUSAL, False, margin),
            ):
                with self.assertRaisesRegex(RuntimeError, f"{words}; allowed: 0 and above.*HATTN_ERROR_VALUE"):
                    call()

    def test_gradients_are_copied_where_they_must_be(self):
        q, k, v = self.tensors(2, 5, 3, 8)
        saved = (q, k, v, *self.ops.forward_lse(q, k, v, *FULL))
        d_o, d_lse = torch.randn(2, 5, 3, 8), torch.randn(2, 3, 5)
        want = self.ops.backward(d_o, d_lse, *saved, *FULL, False)
        wide, transposed = torch.zeros(2, 5, 3, 16), d_o.transpose(1, 3).contiguous().transpose(1, 3)
        wide[..., ::2] = d_o
        odd = torch.zeros(241)[1:].view(2, 5, 3, 8).copy_(d_o)
        for name, one in {
            "every second element": wide[..., ::2],
            "head dim first": transposed,
            "odd address": odd,
        }.items():
            with self.subTest(name):
                for got, exact in zip(self.ops.backward(one, d_lse.mT.contiguous().mT, *saved, *FULL, False), want):
                    self.assertTrue(torch.equal(got, exact))
        ones = torch.ones(()).expand(2, 5, 3, 8)
        for got, exact in zip(
            self.ops.backward(ones, None, *saved, *FULL, False),
            self.ops.backward(ones.contiguous(), None, *saved, *FULL, False),
        ):
            self.assertTrue(torch.equal(got, exact))

    def test_refusals(self):
        q, k, v = self.tensors(1, 4, 2, 8)
        cases = {
            "HATTN_ERROR_SHAPE": lambda: self.ops.forward(q[0], k, v, *FULL),
            "5 dimensions": lambda: self.ops.forward(q[None], k, v, *FULL),
            "HATTN_ERROR_DTYPE": lambda: self.ops.forward(q.double(), k.double(), v.double(), *FULL),
            "HATTN_ERROR_LAYOUT": lambda: self.ops.forward(
                q.transpose(1, 3).contiguous().transpose(1, 3), k, v, *FULL
            ),
            "HATTN_ERROR_VALUE": lambda: self.ops.forward(q, k, v, -1.0, 0, 0, 0, 0),
            "HATTN_ERROR_ARGUMENT": lambda: self.ops.forward(q, k, v, 0.0, 9, 0, 0, 0),
        }
        for words, call in cases.items():
            with self.subTest(words), self.assertRaisesRegex(RuntimeError, words):
                call()
        with self.assertRaisesRegex(RuntimeError, "HATTN_ERROR"):
            self.ops.forward(q, k.half(), v, *FULL)
        o, lse = self.ops.forward_lse(q, k, v, *FULL)
        with self.assertRaisesRegex(RuntimeError, "lse: 2 dimensions.*HATTN_ERROR_SHAPE"):
            self.ops.backward(o, None, q, k, v, o, lse[0], *FULL, False)
        with self.assertRaisesRegex(RuntimeError, "d_o: allowed element types.*HATTN_ERROR_DTYPE"):
            self.ops.backward(o.double(), None, q, k, v, o, lse, *FULL, False)

    def test_more_shapes_than_plans_are_kept(self):
        """Each call gets the plan of its own shape, while 8 threads drive others out of the cache."""
        wrong = []

        def work(first):
            with torch._C._AutoDispatchBelowAutograd():
                for seqlen in range(first, first + 120):
                    k, v = (
                        torch.zeros(1, seqlen, 1, 8),
                        torch.arange(float(seqlen))[None, :, None, None].expand(1, seqlen, 1, 8),
                    )
                    o = self.ops.forward(torch.ones(1, 1, 1, 8), k, v.contiguous(), *FULL)
                    if not torch.allclose(o, torch.full((1, 1, 1, 8), (seqlen - 1) / 2)):
                        wrong.append(seqlen)

        threads = [threading.Thread(target=work, args=(1 + 60 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_nothing_is_left_behind(self):
        """Tensors, optional values, and what a call that is refused had taken."""
        q, k, v = self.tensors(1, 64, 1, 64)
        big = torch.randn(1, 64, 1, 128)[..., ::2]

        def some():
            for _ in range(300):
                o, lse = self.ops.forward_lse(q, k, v, *CAUSAL)
                self.ops.backward(big, lse, q, k, v, o, lse, *CAUSAL, False)
                with self.assertRaises(RuntimeError):
                    self.ops.backward(q[0], lse.clone(), *(t.clone() for t in (q, k, v, o)), lse[0, 0], *CAUSAL, False)
                with self.assertRaises(RuntimeError):
                    self.ops.forward(q.clone()[None], k.clone(), v.clone(), *CAUSAL)

        # One tensor of each call would be 5 MB.
        self.assertLess(growth(some), 3 << 20)

    def test_registering_again(self):
        register = ctypes.CDLL(self.path).hattn_torch_register
        register.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
        text = ctypes.create_string_buffer(1000)
        self.assertEqual(register(os.fsencode(abi.load().path), text, len(text)), 0)
        self.assertEqual(register(b"/nowhere.so", text, len(text)), 1)
        self.assertIn(b"not again with /nowhere.so", text.value)

    def test_what_cannot_be_registered(self):
        """In processes of their own, in which nothing is registered yet."""
        program = (
            "import ctypes, sys\n"
            "if sys.argv[3] == 'torch': import torch\n"
            "text = ctypes.create_string_buffer(1000)\n"
            "register = ctypes.CDLL(sys.argv[1]).hattn_torch_register\n"
            "register.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]\n"
            "print(register(sys.argv[2].encode(), text, len(text)), text.value.decode())\n"
        )
        library = abi.load().path
        cases = [
            ("/nowhere.so", "torch", "1 /nowhere.so: cannot open"),
            (library, "", "1 libtorch_cpu.so is not loaded"),
            ("libc.so.6", "torch", "1 libc.so.6 has no function hattn_abi_version"),
            (library, "torch", "0 "),
        ]
        for path, module, want in cases:
            with self.subTest(path=path, module=module):
                done = subprocess.run(
                    [sys.executable, "-c", program, self.path, path, module],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                self.assertTrue(done.stdout.startswith(want), done.stdout)


class CompiledOnGpu(unittest.TestCase):
    """Streams, graphs, alignment and memory, which only a GPU has."""

    setUp_of_both = Compiled.setUp

    def setUp(self):
        self.setUp_of_both()
        if not torch.cuda.is_available():
            self.skipTest("no GPU")
        # Not the current one, where there are several.
        self.device = torch.device("cuda", torch.cuda.device_count() - 1)

    def tensors(self, *shape, count=3, dtype=None):
        return [torch.randn(*shape, device=self.device).to(dtype or torch.bfloat16) for _ in range(count)]

    def test_the_same_as_through_ctypes(self):
        for dtype in (torch.float16, torch.bfloat16):
            q, k, v, d_o = self.tensors(2, 200, 4, 64, count=4, dtype=dtype)
            for numbers in (FULL, CAUSAL, (0.3, 2, 1, 40, 2)):
                with self.subTest(dtype=dtype, numbers=numbers):
                    o, lse = self.ops.forward_lse(q, k, v, *numbers)
                    for got, want in zip((o, lse), _torch._forward_lse(q, k, v, *numbers)):
                        self.assertTrue(torch.equal(got, want))
                    saved = (q, k, v, o, lse)
                    for got, want in zip(
                        self.ops.backward(d_o, lse, *saved, *numbers, True),
                        _torch._backward(d_o, lse, *saved, *numbers, True),
                    ):
                        self.assertTrue(torch.equal(got, want))

    def test_the_current_stream(self):
        q, k, v = self.tensors(2, 256, 4, 64)
        want = self.ops.forward(q, k, v, *CAUSAL)
        late = torch.zeros_like(q)
        torch.cuda.synchronize(self.device)
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            # The stream is busy for a while, and only then has the queries.
            torch.cuda._sleep(100_000_000)
            late.copy_(q)
            got = self.ops.forward(late, k, v, *CAUSAL)
        stream.synchronize()
        self.assertTrue(torch.equal(got, want))

    def test_a_graph(self):
        q, k, v, d_o = self.tensors(2, 256, 4, 64, count=4)

        def both():
            o, lse = self.ops.forward_lse(q, k, v, *CAUSAL)
            return o, *self.ops.backward(d_o, None, q, k, v, o, lse, *CAUSAL, True)

        both()
        graph = torch.cuda.CUDAGraph()
        # torch keeps one stream for captures, of the GPU that was the current one at its first capture.
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.graph(graph, stream=stream):
            captured = both()
        for _ in range(3):
            q.copy_(torch.randn_like(q))
            torch.cuda.synchronize(self.device)
            with torch.cuda.device(self.device):
                graph.replay()
            torch.cuda.synchronize(self.device)
            for got, want in zip(captured, both()):
                self.assertTrue(torch.equal(got, want))

    def test_gradients_are_copied_where_they_must_be(self):
        q, k, v, d_o = self.tensors(2, 100, 3, 64, count=4)
        saved = (q, k, v, *self.ops.forward_lse(q, k, v, *FULL))
        want = self.ops.backward(d_o, None, *saved, *FULL, True)
        wide = torch.zeros(2, 100, 3, 128, device=self.device, dtype=d_o.dtype)
        wide[..., ::2] = d_o
        padded = torch.zeros(2, 100, 3, 65, device=self.device, dtype=d_o.dtype)[..., :64].copy_(d_o)
        odd = torch.zeros(d_o.numel() + 1, device=self.device, dtype=d_o.dtype)[1:].view(d_o.shape).copy_(d_o)
        heads_first = d_o.transpose(1, 2).contiguous().transpose(1, 2)
        for name, one in {
            "every second": wide[..., ::2],
            "65 apart": padded,
            "odd address": odd,
            "heads first": heads_first,
        }.items():
            with self.subTest(name):
                for got, exact in zip(self.ops.backward(one, None, *saved, *FULL, True), want):
                    self.assertTrue(torch.equal(got, exact))
        ones = torch.ones((), device=self.device, dtype=d_o.dtype).expand(d_o.shape)
        for got, exact in zip(
            self.ops.backward(ones, None, *saved, *FULL, True),
            self.ops.backward(ones.contiguous(), None, *saved, *FULL, True),
        ):
            self.assertTrue(torch.equal(got, exact))

    def test_tensors_in_other_places(self):
        q, k, v = self.tensors(1, 16, 2, 64)
        with self.assertRaisesRegex(RuntimeError, "HATTN_ERROR"):
            self.ops.forward(q, k.cpu(), v, *FULL)
        if torch.cuda.device_count() > 1:
            with self.assertRaisesRegex(RuntimeError, "HATTN_ERROR"):
                self.ops.forward(q, k.to("cuda:0"), v, *FULL)

    def test_memory(self):
        q, k, v, d_o = self.tensors(2, 256, 4, 64, count=4)
        self.ops.backward(d_o, None, q, k, v, *self.ops.forward_lse(q, k, v, *FULL), *FULL, False)
        before = torch.cuda.memory_allocated(self.device)
        for _ in range(100):
            self.ops.backward(d_o, None, q, k, v, *self.ops.forward_lse(q, k, v, *FULL), *FULL, False)
        self.assertEqual(torch.cuda.memory_allocated(self.device), before)
        large = self.tensors(8, 4096, 16, 64)
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(self.device) / total, self.device)
        try:
            with self.assertRaisesRegex(RuntimeError, "out of memory"):
                for _ in range(100):
                    large.append(self.ops.forward(*large[:3], *FULL))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)


if __name__ == "__main__":
    unittest.main()
