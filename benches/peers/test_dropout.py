"""Tests of points with dropout: which pairs are kept, who is asked for it, and what is said of peers that draw their own pairs."""

import contextlib
import math
import os
import sys
import tempfile
import types
import unittest

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import backward
import dropout
import entry
import flex
import sweep
from oracle_case import OracleCase, library

POINT = {"direction": "fwd", "dtype": "bf16", "heads_q": 4, "heads_kv": 2, "head_dim": 16, "causal": True, "seqlen": 40, "batch": 1}
DROPPED = {**POINT, "dropout": 30}
# Its forward answers with the percentage, if it was given the state.
DROPS = """
#include "hattn_peer.h"
int hattn_peer_fwd(hattn_peer_fwd_args const* args) { return args->dropout_state ? (int)(100 * args->dropout + 0.5F) : 0; }
char const* hattn_peer_name(void) { return "stub"; }
"""


class Peers(unittest.TestCase):
    def test_a_library_gets_it_if_it_says_that_it_takes_it(self):
        tensor = types.SimpleNamespace(data_ptr=lambda: 64, stride=lambda: (3, 2, 1, 1))
        args = [entry.filled(entry.Args, DROPPED, dict.fromkeys("qkvo", tensor), tensor, None, state=x) for x in (None, tensor)]
        made = types.SimpleNamespace(tensor=lambda numbers, **_: numbers, int32=None)
        with tempfile.TemporaryDirectory() as folder:
            own = library(DROPS + "int hattn_peer_drops(void) { return 1; }", folder)
            self.assertEqual([own.forward(a) for a in args], [0, 30])
            self.assertEqual((own.state(POINT, made), own.state(DROPPED, made)), (None, [42, 0, 7, 0]))
        with tempfile.TemporaryDirectory() as folder:
            other = library(DROPS, folder)
            self.assertIsNone(other.state(POINT, made))
            with self.assertRaisesRegex(RuntimeError, "unsupported problem: stub exports no hattn_peer_drops"):
                other.state(DROPPED, made)

    def test_packages_get_it_if_their_function_has_it(self):
        def with_dropout(q, k, v, causal=False, dropout_p=0.0):
            return causal, dropout_p

        peer = sweep.Flash("fa4", with_dropout, "package", "1")
        peer.prepare(DROPPED, 1, 2, 3)
        self.assertEqual(peer.keywords, {"causal": True, "dropout_p": 9830 / 32768})
        peer.prepare(POINT, 1, 2, 3)
        self.assertEqual(peer.keywords, {"causal": True})
        view = types.SimpleNamespace(transpose=lambda *_: None)
        for kind in (sweep.Sdpa, sweep.SdpaFlash):
            peer = object.__new__(kind)
            peer.name = "cudnn"
            peer.prepare(DROPPED, view, view, view)
            self.assertEqual(peer.keywords, {"is_causal": True, "enable_gqa": True, "dropout_p": 9830 / 32768})
        without = sweep.Flash("fa4", lambda q, k, v, causal: None, "package", "1")
        for x, what in ((without, "dropout_p"), (object.__new__(flex.Flex), "dropout")):
            with self.assertRaisesRegex(RuntimeError, f"{entry.STATUS[2]}: .* has no {what}"):
                x.prepare(DROPPED, 1, 2, 3)

    def test_who_draws_the_pairs(self):
        package, shared = types.SimpleNamespace(), types.SimpleNamespace(library=None)
        self.assertEqual([dropout.is_own(p, x) for p in (POINT, DROPPED) for x in (package, shared)], [False, False, True, False])


class Oracles(OracleCase):
    SEQLEN = 40

    def setUp(self):
        super().setUp()
        torch = self.torch
        # The library's own statement of which pairs are kept.
        sys.path.insert(0, os.path.join(HERE, "..", "..", "python"))
        with contextlib.suppress(ImportError):
            from hopper_attention._philox import dropout_mask

            self.mask = dropout_mask(torch, {}, round(0.3 * 32768), dropout.SEED, dropout.OFFSET, 3, 4, 40, 40)
            return
        self.skipTest("the package hopper_attention does not load")

    def exact(self, p, kept=None):
        torch = self.torch
        q, k, v = (x.transpose(1, 2) for x in (self.q, *(x.repeat_interleave(2, 2) for x in (self.k, self.v))))
        scores = (q @ k.mT / math.sqrt(16)).masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -math.inf)
        kept = self.mask[:1] if kept is None else kept
        return (scores.softmax(-1) * kept / (1 - dropout.probability(p)) @ v).transpose(1, 2)

    def test_pairs_are_those_of_the_library(self):
        torch, rows, factor = self.torch, self.torch.arange(40), 1 / (1 - dropout.probability(DROPPED))
        for head in range(4):
            made = dropout.kept_rows(DROPPED, 2, head, rows, None, None, torch)
            torch.testing.assert_close(made, self.mask[2, head].double() * factor)
        # Packed: sequences of 15 and 25 rows.
        numbers, starts = torch.tensor([0] * 15 + [1] * 25), torch.tensor([0, 15])
        made = dropout.kept_rows(DROPPED, 0, 1, rows, numbers, starts, torch)
        torch.testing.assert_close(made[:15, :15], self.mask[0, 1, :15, :15].double() * factor)
        torch.testing.assert_close(made[15:, 15:], self.mask[1, 1, :25, :25].double() * factor)

    def on_the_cpu(self):
        """PyTorch, whose new tensors are on the CPU."""
        here = lambda make: lambda *args, device=None, **keywords: make(*args, **keywords)
        replaced = {name: here(getattr(self.torch, name)) for name in ("arange", "randint", "tensor")}
        return types.SimpleNamespace(**{**vars(self.torch), **replaced})

    def test_outputs_are_those_of_the_kept_pairs(self):
        with self.torch.no_grad():
            exact = self.exact(DROPPED)
            for b, h, rows, o, _ in sweep.oracle(DROPPED, self.q, self.k, self.v, self.on_the_cpu()):
                self.torch.testing.assert_close(o, exact[b, rows, h], rtol=1e-10, atol=1e-12)

    def test_gradients_are_those_of_the_kept_pairs(self):
        self.gradients_are_exact(DROPPED)

    def held(self):
        """What outputs and gradients of random pairs are held against: means and variances."""
        with self.torch.no_grad():
            of_o, of_gradients = [], []
            o = sweep.oracle(DROPPED, self.q, self.k, self.v, self.on_the_cpu(), of_o)
            gradients = backward.oracle(DROPPED, self.q, self.k, self.v, self.d_o, self.torch, of_gradients)
        return o, of_o, gradients, of_gradients

    def drawn_of(self, held, chance=0.3, factor=1.0):
        """Outputs and gradients of random pairs, each beside its mean and its variance."""
        torch, (mean, of_o, means, of_gradients) = self.torch, held
        o = self.exact(DROPPED, (torch.rand(1, 4, 40, 40) >= chance).double() * factor)
        gradients = torch.autograd.grad(o, (self.q, self.k, self.v), self.d_o)
        pairs = [(o[b, at, h].detach(), exact, of) for (b, h, at, exact, _), of in zip(mean, of_o)]
        return pairs, list(backward.drawn(gradients, means, of_gradients))

    def test_variances_are_those_of_draws(self):
        held, sums, draws = self.held(), None, 200
        for _ in range(draws):
            misses = [(got - mean).square() for part in self.drawn_of(held) for got, mean, _ in part]
            sums = misses if sums is None else [a + b for a, b in zip(sums, misses)]
        variances = [of for part in self.drawn_of(held) for *_, of in part]
        for measured, of in zip(sums, variances):
            self.assertAlmostEqual(float((measured / draws).sum() / of.sum()), 1, delta=0.1)

    def test_wrong_draws_are_told(self):
        self.torch.manual_seed(5)
        held = self.held()
        complaints = lambda **how: [dropout.check(DROPPED, pairs, [], self.torch)[1] for pairs in self.drawn_of(held, **how)]
        self.assertEqual(complaints(), [None, None])
        for how, word in (({"chance": 0.0, "factor": 0.7}, "variance"), ({"factor": 0.7}, "mean"), ({"chance": 0.7, "factor": 7 / 3}, "variance")):
            for complaint in complaints(**how):
                self.assertIn(word, complaint or "none")
        nan = self.torch.tensor([1.0, math.nan, math.inf])
        self.assertIn("2 elements are NaN", dropout.check(DROPPED, self.drawn_of(held)[0], [nan], self.torch)[1])


if __name__ == "__main__":
    unittest.main()
