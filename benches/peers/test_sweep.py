"""Tests of what sweep.py computes without a GPU: `python3 -m unittest discover benches/peers`."""

import os
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import card
import entry
import stats
import sweep


class Flops(unittest.TestCase):
    def test_the_papers_point(self):
        p = stats.point(16384, 128, False)
        self.assertEqual((p["batch"], p["heads_q"], p["heads_kv"]), (1, 16, 16))
        self.assertEqual(stats.forward_flops(p), 4 * 16384 * 16384 * 128 * 16)
        self.assertEqual(stats.forward_flops(stats.point(16384, 128, True)) * 2, stats.forward_flops(p))

    def test_every_point_has_the_tokens_and_the_bytes(self):
        for head_dim in (64, 128):
            for seqlen in sweep.SEQLENS:
                p = stats.point(seqlen, head_dim, True)
                self.assertEqual(p["batch"] * seqlen, 16384)
                self.assertEqual(stats.forward_bytes(p), 4 * 16384 * 2048 * 2)

    def test_refuses_what_does_not_divide(self):
        self.assertRaises(ValueError, stats.point, 512, 96, False)
        self.assertRaises(ValueError, stats.point, 512, 128, False, 5)


class Statistics(unittest.TestCase):
    def test_quantiles(self):
        self.assertEqual(stats.quantile([4, 1, 3, 2], 0.5), 2.5)
        self.assertEqual(stats.quantile([5], 0.25), 5)
        self.assertEqual([stats.quantile(range(101), q) for q in (0.25, 0.75, 1)], [25, 75, 100])

    def test_rate(self):
        s = stats.summarise([1.0, 2.0, 3.0], 2 * 10**12)
        self.assertAlmostEqual(s["tflops"], 1000.0)  # 2e12 operations in 2 ms
        self.assertAlmostEqual(s["iqr_percent"], 50.0)

    def test_ratios_leave_wrong_runs_and_variants_out(self):
        def run(name, role, tflops, status="ok"):
            return {"name": name, "role": role, "status": status, "tflops": tflops, "iqr_percent": 1.0, "error": ""}

        p = stats.point(512, 64, True)
        runs = [run("a", "ours", 600.0), run("b", "ours", 900.0), run("fa3", "peer", 500.0), run("fa2", "peer", 300.0), run("x", "peer", 999.0, "wrong")]
        result = {"point": p, "runs": runs}
        self.assertEqual(stats.ratios(result, "a"), {"best_peer": 1.2, "fa2": 2.0})
        empty = {"point": p, "runs": [{"name": "a", "role": "ours", "status": "failed", "error": ""}]}
        s = stats.summary([result, result, empty], "a")["best_peer"]
        self.assertEqual((s["points"], s["of"], s["min"]), (2, 3, 1.2))
        self.assertAlmostEqual(s["geomean"], 1.2)
        text = stats.table([result, empty], ["a", "b", "fa3", "fa2", "x"], "a")
        self.assertIn("999.0!wrong", text)
        self.assertIn("failed", text)
        self.assertIn("absent", text)


class Entry(unittest.TestCase):
    def test_struct_matches_the_header(self):
        names = [name for name, _ in entry.Args._fields_]
        asked = ["sizeof(hattn_peer_fwd_args)"] + [f"offsetof(hattn_peer_fwd_args, {name})" for name in names]
        lines = "".join(f'printf("%zu\\n", (size_t)({x}));' for x in asked)
        source = f'#include "hattn_peer.h"\n#include <stdio.h>\n#include <stddef.h>\nint main(void) {{ {lines} return 0; }}\n'
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "layout")
            subprocess.run(["cc", "-I", HERE, "-x", "c", "-", "-o", program], input=source.encode(), check=True)
            told = [int(x) for x in subprocess.run([program], stdout=subprocess.PIPE, check=True).stdout.split()]
        self.assertEqual(told[0], entry.ctypes.sizeof(entry.Args))
        self.assertEqual(told[1:], [getattr(entry.Args, name).offset for name in names])

    def test_constants_match_the_header(self):
        with open(os.path.join(HERE, "hattn_peer.h")) as file:
            header = dict(re.findall(r"HATTN_PEER_(\w+) = (\d+)", file.read()))
        for name, value in list(entry.DTYPES.items()) + list(entry.MASKS.items()):
            self.assertEqual(int(header[name.upper()]), value)
        self.assertEqual({int(header[x]) for x in ("OK", "INVALID", "UNSUPPORTED", "FAILED")}, set(entry.STATUS))

    def test_labels(self):
        self.assertEqual(entry.label_and_path("fa3=/a/b=c.so"), ("fa3", "/a/b=c.so"))
        self.assertEqual(entry.label_and_path("/a/b=c.so"), (None, "/a/b=c.so"))
        self.assertEqual(entry.label_and_path("x.so"), (None, "x.so"))

    def test_a_library_without_the_entry_is_refused(self):
        self.assertRaises((OSError, AttributeError), entry.Library, "libm.so.6")


class Options(unittest.TestCase):
    def test_defaults_are_the_papers_sweep(self):
        o = sweep.arguments([])
        self.assertEqual((o.seqlens, o.dims, o.iters, o.causal), ([512, 1024, 2048, 4096, 8192, 16384], [64, 128], 20, "both"))
        self.assertEqual(sweep.arguments(["--quick"]).iters, 12)

    def test_reasons(self):
        self.assertEqual(card.reasons_text(0), "none")
        self.assertEqual(card.reasons_text(0x24), "power_cap+sw_thermal")
        self.assertEqual(card.reasons_text(0x1000), "0x1000")


if __name__ == "__main__":
    unittest.main()
