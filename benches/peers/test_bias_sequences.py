"""Tests of a bias beside packed sequences and beside lists of blocks: its size, who reads which number, and what the oracles make of it."""

import math
import os
import sys
import unittest
from unittest import mock

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import additive
import backward
import entry
import sweep
from oracle_case import OracleCase

LENGTHS = [17, 40, 3]
POINT = {"direction": "fwd", "dtype": "bf16", "heads_q": 4, "heads_kv": 2, "head_dim": 16, "causal": True, "batch": 1}
PACKED = {**POINT, "seqlen": 60, "packed": {"kind": "long", "lengths": LENGTHS, "dense": [2, 30]}}
LISTED = {**POINT, "causal": False, "seqlen": 300, "blocks": 2}
KINDS = ("f32", "f32:h", "bf16:q", "f16:bhq", "f32:b:hidden", "f32:bhq:hidden", "f32:h:hidden", "bf16:bq:mask", "f16::mask")


class Biased(OracleCase):
    """SEQLEN, points() and kept(p, n): of a sequence, which pairs its mask and its lists keep."""

    def sides(self, p):
        return [own for _, own, _ in additive.sides(p)]

    def exact(self, p, bias):
        """O by the definition, one sequence after the other. A row without a key has neither an output nor a gradient."""
        q, k, v = (x.transpose(1, 2) for x in (self.q, *(x.repeat_interleave(2, 2) for x in (self.k, self.v))))
        parts = []
        for n, own in enumerate(self.sides(p)):
            length = own.stop - own.start
            numbers = bias[min(n, bias.size(0) - 1), :, :length, :length].double()
            scores = q[:, :, own] @ k[:, :, own].mT / math.sqrt(16) + numbers
            scores = scores.masked_fill(~self.kept(p, length), -math.inf)
            gone = (scores == -math.inf).all(-1, keepdim=True)
            parts.append(scores.masked_fill(gone, 0.0).softmax(-1).masked_fill(gone, 0.0) @ v[:, :, own])
        return self.torch.cat(parts, 2).transpose(1, 2)

    def outputs_are_exact(self):
        torch = self.torch
        with torch.no_grad():
            for p, bias in self.points():
                exact = self.exact(p, bias)
                made = sweep.oracle(p, self.q, self.k, self.v, self.on_the_cpu(), None, bias)
                for b, h, rows, o, _ in made:
                    torch.testing.assert_close(o, exact[b, rows, h], rtol=1e-10, atol=1e-12)

    def gradients_of_both_are_exact(self):
        torch = self.torch
        for p, bias in self.points():
            leaf = bias.double().requires_grad_()
            want = torch.autograd.grad(self.exact(p, leaf), (self.q, self.k, self.v, leaf), self.d_o)
            with torch.no_grad():
                made = backward.oracle(p, self.q, self.k, self.v, self.d_o, torch, None, bias)
                of_bias = backward.of_bias(p, self.q, self.k, self.v, self.d_o, bias, torch)
            self.same_gradients(made, want)
            # Of packed sequences the longest two.
            first, last = (0, bias.size(0) - 1) if bias.size(0) < 3 else (0, 1)
            self.assertEqual({(b, h) for b, h, *_ in of_bias}, {(first, 0), (last, bias.size(1) - 1)})
            for b, h, rows, d_bias in of_bias:
                exact = want[3][b, h].nan_to_num()
                torch.testing.assert_close(d_bias, exact if rows is None else exact[rows], rtol=1e-10, atol=1e-12)


class PackedSequences(Biased):
    SEQLEN = 60

    def points(self):
        for kind in KINDS:
            for more in ({}, {"causal": False}, {"window": 5}):
                p = {**PACKED, "bias": kind, **more}
                yield p, additive.made(p, self.torch, "cpu")

    def kept(self, p, length):
        distance = self.torch.arange(length)[:, None] - self.torch.arange(length)[None, :]
        return ((distance >= 0) & (distance <= p.get("window", length))) | (not p["causal"])

    def test_it_covers_the_longest(self):
        for p, bias in self.points():
            _, letters, holds = additive.form(p)
            sizes = zip("bhq", (3, 4, 40))
            self.assertEqual(bias.shape, (*(size if letter in letters else 1 for letter, size in sizes), 40))
            if holds != "hidden":
                self.assertFalse(bias.isnan().any())
                continue
            for n, length in enumerate(LENGTHS if "b" in letters else [40]):
                kept = self.torch.zeros(40, 40, dtype=self.torch.bool)
                kept[:length, :length] = self.kept(p, length)
                self.assertTrue(self.torch.equal(bias[n, 0].isnan(), ~(kept if "q" in letters else kept.any(0, keepdim=True))), p)

    def test_outputs(self):
        self.outputs_are_exact()

    def test_gradients(self):
        # In parts, of which the last reaches back.
        with mock.patch.object(additive, "CHUNK", 16):
            self.gradients_of_both_are_exact()

    def test_the_dense_batch_has_numbers_of_its_own(self):
        p = entry.dense({**PACKED, "bias": "f32:bhq"})
        self.assertEqual(additive.shape(p), (2, 4, 30, 30))


class Lists(Biased):
    SEQLEN = 300

    def points(self):
        for kind in KINDS:
            p = {**LISTED, "bias": kind}
            yield p, additive.made(p, self.torch, "cpu")

    def kept(self, p, length):
        listed = [[entry.is_listed(p["blocks"], query // 128, key // 128) for key in range(length)] for query in range(length)]
        return self.torch.tensor(listed)

    def test_what_is_not_listed_may_be_nan(self):
        p, bias = next(pair for pair in self.points() if pair[0]["bias"] == "f32:bhq:hidden")
        self.assertTrue(self.torch.equal(bias[0, 0].isnan(), ~self.kept(p, 300)))

    def test_outputs(self):
        self.outputs_are_exact()

    def test_gradients(self):
        self.gradients_of_both_are_exact()

    def test_flex_attention_computes_both(self):
        points = [pair for pair in self.points() if pair[0]["bias"] in KINDS[:4]]
        with self.torch.no_grad():
            self.flex_is_exact(points)


if __name__ == "__main__":
    unittest.main()
