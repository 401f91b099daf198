"""Tests of points with an additive bias: who gets it and in which form, who is named as having none, and what the oracles make of it."""

import contextlib
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
import additive
import backward
import entry
import flex
import sweep
from oracle_case import OracleCase, library

POINT = {"direction": "fwd", "dtype": "bf16", "heads_q": 4, "heads_kv": 2, "head_dim": 16, "causal": True, "seqlen": 40, "batch": 1}
BIASED = {**POINT, "bias": "f32:hq"}
KINDS = ("f32", "f32:h", "bf16:q", "f16:bhq", "f32:hq:hidden", "f32:h:hidden", "bf16:bq:mask", "f16::mask")
# Its forward answers with the dimensions and the type, if it was given the numbers.
ADDS = """
#include "hattn_peer.h"
int hattn_peer_fwd(hattn_peer_fwd_args const* args) { return args->bias ? 10 * args->bias_dims + args->bias_dtype : 0; }
char const* hattn_peer_name(void) { return "stub"; }
"""


class Peers(unittest.TestCase):
    def test_a_library_gets_it_if_it_says_that_it_takes_it(self):
        numbers = types.SimpleNamespace(data_ptr=lambda: 64)
        with tempfile.TemporaryDirectory() as folder:
            own = library(ADDS + "int hattn_peer_adds(void) { return 1; }", folder)
            for text, told in (("f32:hq", 63), ("bf16:b", 11), ("f16", 0)):
                args = entry.Args()
                additive.give(args, POINT, None, own)
                self.assertEqual(own.forward(args), 0)
                additive.give(args, {**POINT, "bias": text}, numbers, own)
                self.assertEqual(own.forward(args), told)
        with tempfile.TemporaryDirectory() as folder:
            other = library(ADDS, folder)
            additive.give(entry.Args(), POINT, None, other)
            with self.assertRaisesRegex(RuntimeError, "unsupported problem: stub exports no hattn_peer_adds"):
                additive.give(entry.Args(), BIASED, numbers, other)

    def test_who_has_none_says_so(self):
        peer = sweep.Flash("fa4", lambda q, k, v, causal: None, "package", "1")
        flash = object.__new__(sweep.SdpaFlash)
        flash.name = "fa2"
        for x in (peer, flash):
            with self.assertRaisesRegex(RuntimeError, f"{entry.STATUS[2]}: .* has no bias"):
                x.prepare(BIASED, 1, 2, 3, 4)
        with self.assertRaisesRegex(RuntimeError, "it has no bias"):
            backward.flash_saved(BIASED, 1, 2, 3, None)

    def test_two_more_peers_take_part(self):
        backends = types.SimpleNamespace(EFFICIENT_ATTENTION=1)
        nn = types.SimpleNamespace(attention=types.SimpleNamespace(SDPBackend=backends, sdpa_kernel=None))
        nn.functional = types.SimpleNamespace(scaled_dot_product_attention=None)
        torch = types.SimpleNamespace(__version__="1", nn=nn)
        named = types.SimpleNamespace(name="flex")
        with mock.patch.object(sweep, "python_peers", lambda torch: {}), mock.patch.object(flex, "Flex", lambda torch: named):
            for p, names in ((POINT, []), (BIASED, ["flex", "efficient"])):
                job = {"ours": [], "peers": [], "python_peers": True, "points": [p]}
                self.assertEqual([x.name for x in sweep.load(job, torch)[0]], names)


class Oracles(OracleCase):
    SEQLEN = 40

    def points(self, **more):
        for kind in KINDS:
            p = {**POINT, "bias": kind, **more}
            yield p, additive.made(p, self.torch, "cpu")

    def exact(self, p, bias):
        torch = self.torch
        q, k, v = (x.transpose(1, 2) for x in (self.q, *(x.repeat_interleave(2, 2) for x in (self.k, self.v))))
        scores = q @ k.mT / math.sqrt(16) + bias.double()
        if p["causal"]:
            scores = scores.masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -math.inf)
        gone = (scores == -math.inf).all(-1, keepdim=True)
        # A row without a key has neither an output nor a gradient.
        return (scores.masked_fill(gone, 0.0).softmax(-1).masked_fill(gone, 0.0) @ v).transpose(1, 2)

    def test_numbers_are_what_the_text_says(self):
        for p, bias in self.points():
            dtype, letters, holds = additive.form(p)
            sizes = zip("bhq", (1, 4, 40))
            self.assertEqual(bias.shape, (*(size if letter in letters else 1 for letter, size in sizes), 40))
            self.assertEqual(str(bias.dtype).removeprefix("torch."), {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[dtype])
            hidden, nan = bias == -math.inf, bias.isnan()
            self.assertEqual((bool(hidden.any()), bool((bias == 0).any())), (holds != "normal", holds == "mask"), p)
            if holds == "hidden" and "q" in letters:
                self.assertTrue(self.torch.equal(nan[0, 0], ~self.torch.ones(40, 40, dtype=self.torch.bool).tril()))
            else:
                self.assertFalse(nan.any())
        self.assertIsNone(additive.made(POINT, self.torch, "cpu"))

    def test_outputs_are_those_of_biased_scores(self):
        torch = self.torch
        with torch.no_grad():
            for p, bias in [*self.points(), *self.points(causal=False)]:
                exact = self.exact(p, bias)
                made = sweep.oracle(p, self.q, self.k, self.v, self.on_the_cpu(), None, bias)
                for b, h, rows, o, lse in made:
                    torch.testing.assert_close(o, exact[b, rows, h], rtol=1e-10, atol=1e-12)
                x = types.SimpleNamespace(lse=torch.full((1, 4, 40), math.nan))
                for b, h, rows, _, lse in made:
                    x.lse[b, h, rows] = lse.float()
                x.lse[x.lse.isnan()] = 0.0
                right = sweep.check(x, exact.float(), made, None, sweep.BOUNDS["bf16"], torch)
                self.assertIsNone(right[1], p)

    def gradients(self, p, bias):
        leaf = bias.double().requires_grad_()
        return self.torch.autograd.grad(self.exact(p, leaf), (self.q, self.k, self.v, leaf), self.d_o)

    def test_gradients_are_those_of_biased_scores(self):
        torch = self.torch
        for p, bias in [*self.points(), *self.points(causal=False)]:
            want = self.gradients(p, bias)
            with torch.no_grad():
                made = backward.oracle(p, self.q, self.k, self.v, self.d_o, torch, None, bias)
                of_bias = backward.of_bias(p, self.q, self.k, self.v, self.d_o, bias, torch)
            self.same_gradients(made, want)
            for b, h, rows, d_bias in of_bias:
                exact = want[3][b, h].nan_to_num()
                torch.testing.assert_close(d_bias, exact if rows is None else exact[rows], rtol=1e-10, atol=1e-12)
            check = lambda gradients: backward.check(p, gradients, made, want, backward.BOUNDS["bf16"], torch, True, of_bias)
            clean = (*want[:3], want[3].nan_to_num())
            want = clean
            self.assertIsNone(check(clean)[1], p)
            for wrong, word in ((1.1 * clean[3], "d_bias"), (clean[3].float().fill_(math.nan), "are NaN")):
                self.assertIn(word, check((*clean[:3], wrong))[1])
            self.assertEqual(backward.changed(p, clean, (*clean[:3], 1.1 * clean[3]), torch), ["d_bias"])

    def test_rows_at_both_ends_are_looked_at(self):
        p, torch = {**POINT, "bias": "f32:hq"}, self.torch
        bias = additive.made(p, torch, "cpu")
        want = self.gradients(p, bias)[3]
        with mock.patch.object(additive, "CHUNK", 16), torch.no_grad():
            made = backward.of_bias(p, self.q, self.k, self.v, self.d_o, bias, torch)
        self.assertEqual([(b, h, int(rows[0]), int(rows[-1])) for b, h, rows, _ in made], [(0, h, first, first + 15) for h in (0, 3) for first in (0, 24)])
        for b, h, rows, d_bias in made:
            torch.testing.assert_close(d_bias, want[b, h, rows], rtol=1e-10, atol=1e-12)

    def peers(self):
        """SDPA with a mask as the sweep calls it, and FlexAttention without a compiler."""
        torch = self.torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        peer = object.__new__(flex.Flex)
        peer.name, peer.torch, peer.block_mask, peer.attend = "flex", torch, create_block_mask, flex_attention
        yield peer, False
        yield sweep.Sdpa("efficient", torch.nn.attention.SDPBackend.MATH, torch), True

    def test_peers_compute_it_in_both_passes(self):
        torch = self.torch
        with contextlib.suppress(ImportError):
            q, k, v, d_o = (x.detach().float() for x in (self.q, self.k, self.v, self.d_o))
            for peer, has_gradients in self.peers():
                for p, bias in [*self.points(), *self.points(causal=False)]:
                    exact = self.exact(p, bias.masked_fill(bias.isnan(), 0.0))
                    seen = (exact != 0).any(-1)  # MATH makes NaN of a row without a key
                    with torch.no_grad():
                        peer.prepare(p, q, k, v, bias)
                        o = peer.call().double()
                    torch.testing.assert_close(o[seen], exact[seen], rtol=1e-4, atol=1e-5)
                    if not (has_gradients and bool(seen.all())):
                        continue
                    want = self.gradients(p, bias.masked_fill(bias.isnan(), 0.0))
                    runner = backward.contestant(peer, torch)
                    runner.prepare(p, {"q": q, "k": k, "v": v, "d_o": d_o, "bias": bias})
                    for mine, right in zip(runner.call(), want, strict=True):
                        torch.testing.assert_close(mine.double(), right, rtol=1e-3, atol=1e-4)
            return
        self.skipTest("torch has no FlexAttention")

    def test_a_mask_has_the_type_of_q(self):
        torch, p = self.torch, {**POINT, "bias": "f32:h"}
        bias, q = additive.made(p, torch, "cpu"), self.q.detach().bfloat16()
        peer = sweep.Sdpa("cudnn", None, torch)
        peer.prepare(p, q, q, q, bias)
        mask = peer.keywords["attn_mask"]
        self.assertEqual((mask.dtype, tuple(mask.shape), "is_causal" in peer.keywords), (torch.bfloat16, (1, 4, 40, 40), False))
        full = {**p, "causal": False}
        peer.prepare(full, q, q, q, bias)
        self.assertEqual(tuple(peer.keywords["attn_mask"].shape), (1, 4, 1, 40))

    def test_a_backend_without_a_gradient_of_its_mask_says_so(self):
        torch = self.torch

        def refused():
            raise RuntimeError("No available kernel. Aborting execution.")

        inner = types.SimpleNamespace(name="cudnn", role="peer", prepare=lambda *_: None, context=contextlib.nullcontext, call=refused)
        runner = backward.AutogradBackward(inner, torch)
        given = {"q": self.q, "k": self.k, "v": self.v, "d_o": self.d_o}
        with self.assertRaisesRegex(RuntimeError, "^No available kernel"):
            runner.prepare(POINT, given)
        with self.assertRaisesRegex(RuntimeError, "unsupported problem: with a gradient of attn_mask: No available kernel"):
            runner.prepare(BIASED, {**given, "bias": additive.made(BIASED, torch, "cpu")})


if __name__ == "__main__":
    unittest.main()
