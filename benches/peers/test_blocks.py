"""Tests of points with lists of blocks: which blocks are listed, who gets the lists, and what the oracles make of them."""

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

POINT = {"direction": "fwd", "dtype": "bf16", "heads_q": 4, "heads_kv": 2, "head_dim": 16, "causal": False, "seqlen": 300, "batch": 1}
LISTED = {**POINT, "blocks": 2}
# Its forward answers whether it was given the lists.
LISTS = """
#include "hattn_peer.h"
int hattn_peer_fwd(hattn_peer_fwd_args const* args) {
  return args->full_block_cnt == (int32_t*)1 && args->full_block_idx == (int32_t*)2 && args->mask_block_cnt == (int32_t*)3;
}
char const* hattn_peer_name(void) { return "stub"; }
"""


class Peers(unittest.TestCase):
    def test_lists_are_those_of_the_points(self):
        # benches/src/point/blocks.rs has the same numbers.
        listed = lambda one_in, query: [key for key in range(20) if entry.is_listed(one_in, query, key)]
        self.assertEqual(listed(2, 0), [0, 1, 2, 3, 5, 6, 10, 11, 12, 16])
        self.assertEqual((listed(4, 7), listed(16, 19)), ([5, 7, 19], [5, 19]))
        self.assertEqual(listed(1, 3), list(range(20)))

    def test_a_library_gets_lists_if_it_says_that_it_takes_them(self):
        tensor = types.SimpleNamespace(data_ptr=lambda: 64, stride=lambda: (3, 2, 1, 1))
        lists = [types.SimpleNamespace(data_ptr=lambda at=at: at) for at in (1, 2, 3)]
        args = [entry.filled(entry.Args, LISTED, dict.fromkeys("qkvo", tensor), tensor, None, lists=x) for x in (None, lists)]
        with tempfile.TemporaryDirectory() as folder:
            own = library(LISTS + "int hattn_peer_lists(void) { return 1; }", folder)
            self.assertEqual([own.forward(a) for a in args], [0, 1])
            with mock.patch.object(entry, "lists", lambda p, torch: p.get("blocks")):
                self.assertEqual((own.lists(POINT, None), own.lists(LISTED, None)), (None, 2))
        with tempfile.TemporaryDirectory() as folder:
            other = library(LISTS, folder)
            self.assertIsNone(other.lists(POINT, None))
            with self.assertRaisesRegex(RuntimeError, "unsupported problem: stub exports no hattn_peer_lists"):
                other.lists(LISTED, None)

    def test_packages_without_lists_are_named(self):
        flash = sweep.Flash("fa4", lambda q, k, v, causal: None, "package", "1")
        for peer in (flash, object.__new__(sweep.Sdpa)):
            with self.assertRaisesRegex(RuntimeError, f"{entry.STATUS[2]}: .* no blocks"):
                peer.prepare(LISTED, 1, 2, 3)
        made = []
        with mock.patch.object(sweep, "python_peers", lambda torch: {}), mock.patch.object(flex, "Flex", made.append):
            for p in (POINT, LISTED):
                job = {"ours": [], "peers": [], "python_peers": True, "points": [p]}
                self.assertEqual(len(sweep.load(job, "torch")[0]), int(p is LISTED))
        self.assertEqual(made, ["torch"])


class Oracles(OracleCase):
    SEQLEN = 300

    def exact(self, p):
        q, k, v = (x.transpose(1, 2) for x in (self.q, *(x.repeat_interleave(2, 2) for x in (self.k, self.v))))
        keep = [[entry.is_listed(p["blocks"], query // 128, key // 128) for key in range(300)] for query in range(300)]
        scores = (q @ k.mT / math.sqrt(16)).masked_fill(~self.torch.tensor(keep), -math.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2)

    def test_lists_are_counts_and_indices(self):
        counts, indices, none = entry.lists({"seqlen": 20 * 128, "blocks": 4}, self.torch, "cpu")
        self.assertEqual((counts.dtype, indices.dtype, none.tolist()), (self.torch.int32, self.torch.int32, [0] * 20))
        self.assertEqual((tuple(indices.shape), indices.is_contiguous()), ((20, 20), True))
        self.assertEqual(indices[7, : counts[7]].tolist(), [5, 7, 19])

    def test_gradients_are_those_of_listed_blocks(self):
        self.gradients_are_exact(LISTED)

    def test_flex_attention_computes_them(self):
        self.flex_is_exact([LISTED])


if __name__ == "__main__":
    unittest.main()
