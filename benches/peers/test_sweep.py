"""Tests of what needs no GPU: the C entry as Python sees it, and the sweep's own pieces. `python3 -m unittest discover benches/peers`."""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import entry
import sweep

# A peer that answers every call with the status that the batch says, and notes the stream that it was given.
PEER = """
#include "hattn_peer.h"
static char text[] = "too many heads";
int hattn_peer_fwd(hattn_peer_fwd_args const* args) { return args->struct_bytes == sizeof(*args) ? args->batch : HATTN_PEER_INVALID; }
char const* hattn_peer_last_error(void) { return text; }
char const* hattn_peer_name(void) { return "stub"; }
"""


def compiled(source, folder, *options):
    out = os.path.join(folder, "out.so")
    subprocess.run(["cc", "-I", HERE, "-x", "c", "-", "-o", out, *options], input=source.encode(), check=True)
    return out


class Entry(unittest.TestCase):
    def test_struct_matches_the_header(self):
        names = [name for name, _ in entry.Args._fields_]
        asked = ["sizeof(hattn_peer_fwd_args)"] + [f"offsetof(hattn_peer_fwd_args, {name})" for name in names]
        lines = "".join(f'printf("%zu\\n", (size_t)({x}));' for x in asked)
        source = f'#include "hattn_peer.h"\n#include <stdio.h>\n#include <stddef.h>\nint main(void) {{ {lines} return 0; }}\n'
        with tempfile.TemporaryDirectory() as folder:
            told = [int(x) for x in subprocess.run([compiled(source, folder)], stdout=subprocess.PIPE, check=True).stdout.split()]
        self.assertEqual(told[0], entry.ctypes.sizeof(entry.Args))
        self.assertEqual(told[1:], [getattr(entry.Args, name).offset for name in names])

    def test_constants_match_the_header(self):
        with open(os.path.join(HERE, "hattn_peer.h")) as file:
            header = dict(re.findall(r"HATTN_PEER_(\w+) = (\d+)", file.read()))
        for name, value in list(entry.DTYPES.items()) + list(entry.MASKS.items()):
            self.assertEqual(int(header[name.upper()]), value)
        self.assertEqual({int(header[x]) for x in ("OK", "INVALID", "UNSUPPORTED", "FAILED")}, set(entry.STATUS))

    def test_a_library_is_called_and_its_words_are_told(self):
        with tempfile.TemporaryDirectory() as folder:
            library = entry.Library(compiled(PEER, folder, "-shared", "-fPIC"))
            self.assertEqual(library.name, "stub")
            args = entry.Args()
            args.struct_bytes = entry.ctypes.sizeof(args)
            self.assertEqual(library.forward(args), 0)
            args.batch = 2
            self.assertEqual(library.complaint(library.forward(args)), "unsupported problem: too many heads")

    def test_labels(self):
        self.assertEqual(entry.label_and_path("fa3=/a/b=c.so"), ("fa3", "/a/b=c.so"))
        self.assertEqual(entry.label_and_path("/a/b=c.so"), (None, "/a/b=c.so"))
        self.assertEqual(entry.label_and_path("x.so"), (None, "x.so"))

    def test_a_library_without_the_entry_is_refused(self):
        self.assertRaises((OSError, AttributeError), entry.Library, "libm.so.6")


class Sweep(unittest.TestCase):
    def test_missing_libraries_are_named(self):
        job = {"ours": ["hopper-attention=nowhere/lib.so"], "peers": ["libm.so.6"], "python_peers": False}
        found, missing = sweep.load(job, torch=None)
        self.assertEqual(found, [])
        self.assertEqual([(x["name"], x["role"]) for x in missing], [("hopper-attention", "ours"), ("libm.so.6", "peer")])
        self.assertIn("OSError", missing[0]["error"])

    def test_python_peers_that_do_not_import_are_named(self):
        def broken():
            raise ImportError("no module\n  of that name")

        original = sweep.python_peers
        sweep.python_peers = lambda torch: {"fa4": broken}
        try:
            _, missing = sweep.load({"ours": [], "peers": [], "python_peers": True}, torch=None)
        finally:
            sweep.python_peers = original
        self.assertEqual(missing, [{"name": "fa4", "role": "peer", "error": "ImportError: no module of that name"}])

    def test_outputs_in_tuples(self):
        for answer in ("o", ("o", "lse"), ["o", None]):
            peer = sweep.Flash("fa3", lambda *qkv, causal: answer, "package", "1")
            peer.prepare({"causal": True}, 1, 2, 3)
            self.assertEqual(peer.call(), "o")

    def test_windows_reach_the_peers_that_have_them(self):
        peer = sweep.Flash("fa3", lambda *qkv, **keywords: keywords, "package", "1")
        peer.prepare({"causal": True, "window": 1024}, 1, 2, 3)
        self.assertEqual(peer.call(), {"causal": True, "window_size": (1024, 0)})
        with self.assertRaisesRegex(RuntimeError, entry.STATUS[2]):
            object.__new__(sweep.Sdpa).prepare({"causal": True, "window": 1024}, 1, 2, 3)

    @unittest.skipIf(__import__("importlib.util").util.find_spec("torch"), "this Python has PyTorch: hattn bench itself is the test")
    def test_without_pytorch_it_says_so_and_succeeds(self):
        job = {"ordinal": 0}
        out = subprocess.run([sys.executable, os.path.join(HERE, "sweep.py")], input=json.dumps(job).encode(), stdout=subprocess.PIPE, check=True)
        event = json.loads(out.stdout)
        self.assertEqual(event["event"], "absent")
        self.assertIn("no PyTorch", event["error"])


if __name__ == "__main__":
    unittest.main()
