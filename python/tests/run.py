#!/usr/bin/env python3
"""Runs the tests of the Python package.

    HOPPER_ATTENTION_LIBRARY=FILE python3 python/tests/run.py [--need torch,numpy] [--installed] [NAME ...]

A test that cannot run prints "skipped: why". The tests of the GPU run where torch shows one. --need names what must be
there: without it the run fails. NAME is a file such as test_torch, or a part of a test's name. The last line has the
counts.
"""

import argparse
import importlib.util
import os
import sys
import unittest

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
FILES = sorted(name[:-3] for name in os.listdir(HERE) if name.startswith("test_"))


class Result(unittest.TextTestResult):
    def addSkip(self, test, reason):
        unittest.TestResult.addSkip(self, test, reason)
        # In the words that scripts/count_tests.awk looks for.
        self.stream.writeln(f"skipped: {reason}")


def tests_of(suite):
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from tests_of(one)
        else:
            yield one


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--need", default="", help="modules that must be there, separated by commas")
    parser.add_argument(
        "--installed", action="store_true", help="test the installed package, and not the one beside the tests"
    )
    parser.add_argument("names", nargs="*", help="files, or parts of names of tests")
    options = parser.parse_args()
    if not options.installed:
        sys.path.insert(0, os.path.dirname(HERE))
    sys.path.insert(0, HERE)
    missing = [name for name in options.need.split(",") if name and importlib.util.find_spec(name) is None]
    if missing:
        print(f"error: python has no {', '.join(missing)}")
        return 1
    import hopper_attention

    print(f"hopper_attention {hopper_attention.version()} from {os.path.dirname(hopper_attention.__file__)}")
    print(f"library {hopper_attention.abi.load().path}, {hopper_attention.device_count()} GPUs")
    loaded = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromName(name) for name in FILES)
    chosen = [t for t in tests_of(loaded) if not options.names or any(name in t.id() for name in options.names)]
    result = unittest.TextTestRunner(sys.stdout, verbosity=2, resultclass=Result).run(unittest.TestSuite(chosen))
    failed, skipped = len(result.failures) + len(result.errors), len(result.skipped)
    passed = result.testsRun - failed - skipped
    # What scripts/count_tests.awk reads, as cargo prints it: a test that says "skipped: why" counts as passed there.
    print(f"test result: {'FAILED' if failed else 'ok'}. {passed + skipped} passed; {failed} failed; 0 ignored")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
