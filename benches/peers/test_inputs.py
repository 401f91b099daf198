"""Tests of points whose inputs are those of a file. `python3 -m unittest discover benches/peers`."""

import array
import importlib.util
import os
import sys
import tempfile
import types
import unittest
from unittest import mock

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import backward
import entry
import flash3
import inputs
import sweep

SIZES = {"dtype": "bf16", "heads_q": 4, "heads_kv": 2, "head_dim": 16, "causal": False, "seqlen": 7, "queries": 5, "batch": 5}
POINT = {**SIZES, "direction": "fwd", "file": {"name": "layer3", "sequences": 2, "scale": 0.5, "tensors": {}}}


class Words(unittest.TestCase):
    def test_a_file_is_named(self):
        other = {**POINT, "file": {"name": "layer4", "sequences": 1}}
        self.assertEqual(inputs.words([POINT, other, POINT]), "inputs of files, repeated along the batch: layer3, layer4")
        self.assertEqual((inputs.is_normal(POINT), inputs.is_normal({}), inputs.is_normal({"inputs": "late"})), (False, True, False))
        # A file may be called as a class.
        self.assertIsNone(inputs.nan_rows({**POINT, "file": {"name": "nan", "sequences": 1}}))

    def test_the_scale_of_a_file_reaches_libraries(self):
        plain = {**POINT, "file": {"name": "layer4", "sequences": 1}}
        self.assertEqual([entry.scale(p) for p in (POINT, plain, SIZES)], [0.5, 0.25, 0.25])
        tensor = types.SimpleNamespace(data_ptr=lambda: 0, stride=lambda: (3, 2, 1, 1))
        scales = [entry.filled(entry.Args, p, dict.fromkeys("qkvo", tensor), tensor, None).softmax_scale for p in (POINT, plain)]
        self.assertEqual(scales, [0.5, 0.25])
        self.assertEqual(flash3.keywords(POINT, None)["softmax_scale"], 0.5)
        self.assertNotIn("softmax_scale", flash3.keywords(plain, None))
        peer = sweep.Flash("fa4", lambda: None, "flash_attn.cute", "4")
        for p, keywords in ((POINT, {"causal": False, "softmax_scale": 0.5}), (plain, {"causal": False})):
            peer.prepare(p, None, None, None)
            self.assertEqual(peer.keywords, keywords)


@unittest.skipUnless(importlib.util.find_spec("torch"), "this Python has no PyTorch")
class Tensors(unittest.TestCase):
    """On the CPU."""

    def setUp(self):
        import torch

        torch.manual_seed(1)
        self.torch, folder = torch, tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tensors, self.file = {}, {}
        for name, shape in (("q", (2, 5, 4, 16)), ("k", (2, 7, 2, 16)), ("v", (2, 7, 2, 16)), ("d_o", (2, 5, 4, 16))):
            x = torch.randn(shape).bfloat16().float()
            path = os.path.join(folder.name, name)
            with open(path, "wb") as file:
                array.array("f", x.flatten().tolist()).tofile(file)
            self.tensors[name], self.file[name] = x, {"path": path, "shape": list(shape)}
        self.point = {**POINT, "file": {**POINT["file"], "tensors": self.file}}

    def of_file(self, p, name, layout="bshd"):
        return inputs.of_file(p, name, layout, self.torch, "cpu")

    def test_sequences_are_repeated_in_either_order(self):
        for name, x in self.tensors.items():
            dense, heads_first = (self.of_file(self.point, name, layout) for layout in ("bshd", "bhsd"))
            self.assertTrue(self.torch.equal(dense, x[[0, 1, 0, 1, 0]]) and self.torch.equal(dense, heads_first))
            self.assertTrue(dense.is_contiguous() and heads_first.transpose(1, 2).is_contiguous())
        self.assertIsNone(self.of_file({**self.point, "file": {**POINT["file"], "tensors": {}}}, "d_o"))
        self.assertIsNone(self.of_file(SIZES, "q"))

    def test_operands_are_those_of_the_file(self):
        of_file = inputs.of_file
        with mock.patch.object(inputs, "of_file", lambda *given: of_file(*given, device="cpu")):
            for dtype, kind in (("bf16", self.torch.bfloat16), ("f16", self.torch.float16)):
                operands = sweep.operands({**self.point, "dtype": dtype}, "bhsd", self.torch)
                for name, x in zip("qkv", operands):
                    self.assertEqual(x.dtype, kind)
                    self.assertTrue(self.torch.equal(x.float()[:2], self.tensors[name].to(kind).float()))

    def test_a_backward_takes_the_gradient_of_the_file_or_draws_one(self):
        of_file, ones = inputs.of_file, self.torch.ones(1)
        forward = types.SimpleNamespace(qkv=(ones, ones, ones), bias=None)
        without = {**self.point, "file": {**self.point["file"], "tensors": {k: x for k, x in self.file.items() if k != "d_o"}}}
        with (
            mock.patch.object(sweep, "ForwardPoint", lambda *given: forward),
            mock.patch.object(inputs, "of_file", lambda *given: of_file(*given, device="cpu")),
            mock.patch.object(sweep, "drawn", lambda *given: 7 * ones),
            mock.patch.multiple(backward, saved=lambda *given: (ones, ones), oracle=lambda *given: []),
        ):
            found = [sweep.BackwardPoint(p, "bshd", [], self.torch).given["d_o"] for p in (self.point, without)]
        self.assertTrue(self.torch.equal(found[0][:2].float(), self.tensors["d_o"]))
        self.assertEqual(float(found[1]), 7.0)

    def test_gradients_in_f64_have_the_scale(self):
        torch, p = self.torch, {**self.point, "batch": 2}
        q, k, v, d_o = (self.of_file(p, name).double() for name in ("q", "k", "v", "d_o"))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        wide = [x.repeat_interleave(2, dim=2) for x in (k, v)]
        heads_first = (x.transpose(1, 2) for x in (q, *wide))
        o = torch.nn.functional.scaled_dot_product_attention(*heads_first, scale=0.5).transpose(1, 2)
        expected = torch.autograd.grad(o, (q, k, v), d_o)
        for b, kv, heads, d_q, d_k, d_v in backward.oracle(p, *(x.detach() for x in (q, k, v)), d_o, torch):
            of_heads = expected[0][b, :, heads.start : heads.stop].transpose(0, 1)
            for found, exact in ((d_q, of_heads), (d_k, expected[1][b, :, kv]), (d_v, expected[2][b, :, kv])):
                self.assertLess(float((found - exact).abs().max()), 1e-12)


if __name__ == "__main__":
    unittest.main()
