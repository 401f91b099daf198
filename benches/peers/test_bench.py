"""Tests of scripts/bench.sh: which peers it fetches, and when. A stand-in for Python and for hattn; no network and no GPU."""

import os
import re
import subprocess
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
# What goes on PYTHONPATH, below the toolchain's folder.
FA4_PLACES = ["fa4-cp312", "fa4-cp312/nvidia_cutlass_dsl/dsl_packages"]
CUDNN, FA3, FA4, EINOPS = (f"benches/peers/requirements{x}.txt" for x in ("", "-fa3", "-fa4", "-einops"))

# It has the modules that HAS lists, answers with ABOUT what it is, and makes a folder where pip would install.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  -c\\ "import sys, torch"*) [ -n "$ABOUT" ] && echo "$ABOUT" ;;
  -c*) case " $HAS " in *" ${2#import } "*) exit 0 ;; *) exit 1 ;; esac ;;
  *"-m pip install"*)
    echo "$*" >>"$LOG"
    [ -z "${PIP_FAILS:-}" ] || exit 1
    while [ "$1" != --target ]; do shift; done
    mkdir -p "$2/flash_attn" ;;
esac
"""
PROGRAM = """#!/usr/bin/env bash
echo "$PYTHONPATH"
"""


def read(*path):
    with open(os.path.join(ROOT, *path)) as file:
        return file.read()


def pins(path):
    """The versions and hashes of a requirements file, by name."""
    text = re.sub(r"^#.*\n", "", read(path), flags=re.M).replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line]
    return {name.split("==")[0]: (name.split("==")[1], hashes) for name, *hashes in lines}


class Pins(unittest.TestCase):
    def test_every_pin_has_its_hashes(self):
        for path in (CUDNN, FA3, FA4, EINOPS):
            for name, (_, hashes) in pins(path).items():
                self.assertEqual(len(set(hashes)), len(hashes))
                # One file for all versions of Python, or one for each from 3.10 to 3.14.
                self.assertIn(len(hashes), (1, 5), name)
                for x in hashes:
                    self.assertRegex(x, r"^--hash=sha256:[0-9a-f]{64}$")

    def test_third_party_lists_every_pin(self):
        rows = [line.split(" | ") for line in read("third_party", "README.md").splitlines() if line.startswith("| ")]
        listed = {(name, row[1]) for row in rows for name in row[0].removeprefix("| ").split(", ")}
        for path in (CUDNN, FA3, FA4, EINOPS):
            for name, (version, _) in pins(path).items():
                self.assertIn((name, version), listed)


class Fetch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        for name, text in (("python", PYTHON), ("hattn", PROGRAM)):
            with open(os.path.join(self.folder, name), "w") as file:
                file.write(text)
            os.chmod(os.path.join(self.folder, name), 0o755)

    def bench(self, *options, about="cp312 13.0", has="einops xformers", **more):
        """The requirements that pip is asked for, the folders that are on PYTHONPATH, and what the script says."""
        log = os.path.join(self.folder, "log")
        open(log, "w").close()
        tools = os.path.join(self.folder, "toolchain")
        given = {k: x for k, x in os.environ.items() if k != "PYTHONPATH" and not k.startswith("HATTN_")}
        given.update(HATTN_BENCH_PROGRAM=os.path.join(self.folder, "hattn"), HATTN_TOOLCHAIN_DIR=tools)
        given.update(ABOUT=about, HAS=has, LOG=log, **more)
        command = [os.path.join(ROOT, "scripts", "bench.sh"), "--python", os.path.join(self.folder, "python"), *options]
        out = subprocess.run(command, env=given, check=True, capture_output=True, text=True)
        with open(log) as file:
            asked = [re.findall(r"--requirement=(\S+)", line) for line in file]
        places = [x.removeprefix(tools + "/python/") for x in out.stdout.strip().split(":") if x]
        return asked, places, out.stderr

    def test_flash_attention_4_is_fetched_once(self):
        asked, places, said = self.bench("--quick")
        self.assertEqual((asked, places), ([[FA4]], FA4_PLACES))
        for word in ("FlashAttention-4", "100 MB", "HATTN_BENCH_NO_FETCH=1"):
            self.assertIn(word, said)
        self.assertTrue(os.path.exists(os.path.join(self.folder, "toolchain/python/fa4-cp312/flash_attn/__init__.py")))
        self.assertEqual(self.bench(), ([], FA4_PLACES, ""))
        # Other pins than those that were fetched.
        with open(os.path.join(self.folder, "toolchain/python/fa4-cp312/pins.txt"), "a") as file:
            file.write("old==1\n")
        self.assertEqual(self.bench()[:2], ([[FA4]], FA4_PLACES))

    def test_what_python_lacks_is_fetched(self):
        self.assertEqual(self.bench(has="xformers")[0], [[FA4, EINOPS]])
        self.assertEqual(self.bench(has="flash_attn.cute xformers"), ([], [], ""))

    def test_flash_attention_3_is_for_16_bit_points_on_a_gpu(self):
        asked, places, said = self.bench(has="flash_attn.cute")
        self.assertEqual((asked, places), ([[FA3]], ["fa3"]))
        self.assertIn("112 MB", said)
        for options in ({"has": "flash_attn.cute flash_attn_interface"}, {"about": "cp312 False", "has": ""}):
            self.assertEqual(self.bench(**options), ([], [], ""))
        self.assertEqual(self.bench("--dtypes", "e4m3", has="cudnn"), ([], [], ""))
        self.assertEqual(self.bench(about="cp312 12.8", has="")[1], ["fa3"])

    def test_flash_attention_4_is_for_16_bit_points_on_a_gpu_with_cuda_13(self):
        for about in ("cp312 12.8", "cp312 False", ""):
            self.assertEqual(self.bench(about=about), ([], [], ""))
        for options in (["--dtypes", "e4m3"], ["--dtypes=e4m3"]):
            self.assertEqual(self.bench(*options, has="cudnn"), ([], [], ""))
        for options in (["--dtypes", "f16"], ["--dtypes=bf16"], ["--peer", "fa3=libfa3_e4m3.so"]):
            self.assertEqual(self.bench(*options)[1], FA4_PLACES)

    def test_both_are_fetched(self):
        asked, places, _ = self.bench("--dtypes", "bf16,e4m3")
        self.assertEqual((asked, places), ([[CUDNN], [FA4]], [*FA4_PLACES, "cudnn-cp312"]))
        self.assertEqual(self.bench("--dtypes", "e4m3", about="cp311 12.8")[:2], ([[CUDNN]], ["cudnn-cp311"]))

    def test_nothing_is_fetched_where_nobody_would_call_it(self):
        sweeps = (["--no-python-peers"], ["--device", "cpu"], ["--device=cpu"], ["--harness=rust"], ["--from", "bench.json"], ["--help"])
        for options in sweeps:
            self.assertEqual(self.bench(*options), ([], [], ""))
        self.assertEqual(self.bench(HATTN_BENCH_DEVICE="cpu")[:2], ([], []))
        self.bench()
        self.assertEqual(self.bench(HATTN_BENCH_NO_FETCH="1"), ([], [], ""))
        self.assertEqual(self.bench("--device", "cuda:0", "--harness", "auto")[1], FA4_PLACES)

    def test_without_a_network_the_sweep_goes_on(self):
        asked, places, said = self.bench(PIP_FAILS="1")
        self.assertEqual((asked, places), ([[FA4]], []))
        self.assertIn("pip could not fetch it", said)


if __name__ == "__main__":
    unittest.main()
