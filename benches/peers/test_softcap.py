"""Tests of points with a cap of the scores: who gets it, who is named as not having one, and what the oracles make of it."""

import math
import os
import sys
import tempfile
import types
import unittest
from unittest import mock

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import entry
import flex
import sweep
from oracle_case import OracleCase, library

POINT = {"direction": "fwd", "dtype": "bf16", "heads_q": 4, "heads_kv": 2, "head_dim": 16, "causal": True, "seqlen": 12, "batch": 1}
CAPPED = {**POINT, "softcap": 2}
BIASED = {**POINT, "alibi": True}
BOTH = {**CAPPED, "alibi": True}
# Its forward answers with the cap.
CAPS = """
#include "hattn_peer.h"
int hattn_peer_fwd(hattn_peer_fwd_args const* args) { return (int)args->softcap; }
char const* hattn_peer_name(void) { return "stub"; }
"""


class Peers(unittest.TestCase):
    def test_a_library_gets_the_cap_if_it_says_that_it_takes_one(self):
        tensor = types.SimpleNamespace(data_ptr=lambda: 0, stride=lambda: (3, 2, 1, 1))
        args = [entry.filled(entry.Args, p, dict.fromkeys("qkvo", tensor), tensor, None) for p in (POINT, CAPPED)]
        with tempfile.TemporaryDirectory() as folder:
            own = library(CAPS + "int hattn_peer_caps(void) { return 1; }", folder)
            self.assertEqual([own.forward(a) for a in args], [0, 2])
            self.assertIsNone(own.offsets(CAPPED, None))
        with tempfile.TemporaryDirectory() as folder:
            other = library(CAPS, folder)
            self.assertIsNone(other.offsets(POINT, None))
            with self.assertRaisesRegex(RuntimeError, "unsupported problem: stub exports no hattn_peer_caps"):
                other.offsets(CAPPED, None)

    def test_a_library_gets_slopes_if_it_says_that_it_takes_them(self):
        source = CAPS.replace("(int)args->softcap", "args->alibi_slopes == (float const*)64")
        tensor = types.SimpleNamespace(data_ptr=lambda: 64, stride=lambda: (3, 2, 1, 1))
        args = [entry.filled(entry.Args, BIASED, dict.fromkeys("qkvo", tensor), tensor, None, None, x) for x in (None, tensor)]
        made = types.SimpleNamespace(tensor=lambda numbers, **_: numbers, float32=None)
        with tempfile.TemporaryDirectory() as folder:
            own = library(source + "int hattn_peer_biases(void) { return 1; }", folder)
            self.assertEqual([own.forward(a) for a in args], [0, 1])
            self.assertEqual((own.slopes(POINT, made), own.slopes(BIASED, made)), (None, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]))
        with tempfile.TemporaryDirectory() as folder:
            other = library(source, folder)
            self.assertIsNone(other.slopes(POINT, made))
            with self.assertRaisesRegex(RuntimeError, "unsupported problem: stub exports no hattn_peer_biases"):
                other.slopes(BIASED, made)

    def test_packages_get_it_if_their_function_has_it(self):
        def with_cap(q, k, v, causal=False, softcap=0.0):
            return causal, softcap

        peer = sweep.Flash("fa4", with_cap, "package", "1")
        peer.prepare(CAPPED, 1, 2, 3)
        self.assertEqual(peer.keywords, {"causal": True, "softcap": 2.0})
        peer.prepare(POINT, 1, 2, 3)
        self.assertEqual(peer.keywords, {"causal": True})
        without = sweep.Flash("fa4", lambda q, k, v, causal: None, "package", "1")
        for x in (without, object.__new__(sweep.Sdpa), object.__new__(sweep.SdpaFlash)):
            with self.assertRaisesRegex(RuntimeError, f"{entry.STATUS[2]}: .* has no softcap"):
                x.prepare(CAPPED, 1, 2, 3)
            with self.assertRaisesRegex(RuntimeError, f"{entry.STATUS[2]}: .* has no alibi"):
                x.prepare(BIASED, 1, 2, 3)

    def test_flex_attention_takes_part_where_there_is_a_cap(self):
        made = []
        with mock.patch.object(sweep, "python_peers", lambda torch: {}), mock.patch.object(flex, "Flex", made.append):
            for p in (POINT, CAPPED, BIASED):
                job = {"ours": [], "peers": [], "python_peers": True, "points": [p]}
                self.assertEqual(len(sweep.load(job, "torch")[0]), int(p is not POINT))
        self.assertEqual(made, ["torch"] * 2)
        kept = flex.Flex.kept(3, None), flex.Flex.kept(3, 2)
        self.assertEqual([[key for key in range(9) if keeps(0, 0, 1, key)] for keeps in kept], [[0, 1, 2, 3, 4], [2, 3, 4]])


class Oracles(OracleCase):
    SEQLEN = 12

    def exact(self, p):
        torch = self.torch
        q, k, v = (x.transpose(1, 2) for x in (self.q, *(x.repeat_interleave(2, 2) for x in (self.k, self.v))))
        scores = q @ k.mT / math.sqrt(16)
        if "softcap" in p:
            scores = 2 * torch.tanh(scores / 2)
        if "alibi" in p:
            distance = (torch.arange(12)[:, None] - torch.arange(12)[None, :]).abs()
            scores = scores - torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None, None] * distance
        keep = torch.ones(12, 12, dtype=torch.bool).tril()
        return (scores.masked_fill(~keep, -math.inf).softmax(-1) @ v).transpose(1, 2)

    def test_gradients_are_those_of_capped_scores(self):
        for p in (POINT, CAPPED, BIASED, BOTH):
            self.gradients_are_exact(p)

    def test_flex_attention_computes_them(self):
        self.flex_is_exact((CAPPED, BIASED, BOTH))


if __name__ == "__main__":
    unittest.main()
