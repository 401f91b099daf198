"""What the tests of modified points share: a library made of C, and oracles beside the definition."""

import contextlib
import os
import subprocess
import types
import unittest

import backward
import entry
import flex

HERE = os.path.dirname(os.path.abspath(__file__))


def library(source, folder):
    out = os.path.join(folder, "out.so")
    subprocess.run(["cc", "-I", HERE, "-x", "c", "-", "-o", out, "-shared", "-fPIC"], input=source.encode(), check=True)
    return entry.Library(out)


class OracleCase(unittest.TestCase):
    """Four query heads, two key heads, head dim 16. A test class has SEQLEN, and exact(point): O by the definition."""

    def setUp(self):
        try:
            import torch
        except ImportError as error:
            self.skipTest(str(error))
        self.torch = torch
        torch.manual_seed(1)
        of = lambda heads: torch.randn(1, self.SEQLEN, heads, 16, dtype=torch.float64, requires_grad=True)
        self.q, self.k, self.v, self.d_o = of(4), of(2), of(2), of(4).detach()

    def on_the_cpu(self):
        """PyTorch, whose new tensors are on the CPU."""
        here = lambda make: lambda *args, device=None, **keywords: make(*args, **keywords)
        replaced = {name: here(getattr(self.torch, name)) for name in ("arange", "randint", "tensor")}
        return types.SimpleNamespace(**{**vars(self.torch), **replaced})

    def gradients_are_exact(self, p):
        want = self.torch.autograd.grad(self.exact(p), (self.q, self.k, self.v), self.d_o)
        with self.torch.no_grad():
            made = backward.oracle(p, self.q, self.k, self.v, self.d_o, self.torch)
        self.same_gradients(made, want)

    def same_gradients(self, made, want):
        """`made`: of backward.oracle. `want`: of autograd, of Q, K and V first."""
        for b, kv, heads, d_q, d_k, d_v in made:
            for mine, exact in ((d_q, want[0][b, :, heads].transpose(0, 1)), (d_k, want[1][b, :, kv]), (d_v, want[2][b, :, kv])):
                self.torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-12)

    def flex_is_exact(self, points):
        """`points`: each alone, or with its bias."""
        peer = object.__new__(flex.Flex)
        with contextlib.suppress(ImportError):
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            peer.torch, peer.block_mask, peer.attend = self.torch, create_block_mask, flex_attention
            with self.torch.no_grad():
                for p in points:
                    p, *bias = p if isinstance(p, tuple) else (p,)
                    peer.prepare(p, *(x.float() for x in (self.q, self.k, self.v)), *bias)
                    self.torch.testing.assert_close(peer.call().double(), self.exact(p, *bias), rtol=1e-4, atol=1e-5)
            return
        self.skipTest("torch has no FlexAttention")
