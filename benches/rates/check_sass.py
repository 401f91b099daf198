#!/usr/bin/env python3
"""Holds the loops of the rates bench against what it divides by: needs a disassembler and no GPU.

    check_sass.py CUOBJDUMP PROGRAM

A rate is a count over a time, and the compiler may merge, drop or move what was counted. `PROGRAM --expect` names the
opcodes of each kernel's loops; the disassembly must have an innermost loop with as many of each and with hardly anything
else, products must not be serialised, and no kernel may touch local memory. Then every loop is judged once more with one of
its instructions taken out, which must be refused: a check that cannot fail would check nothing.
"""

import collections
import os
import re
import subprocess
import sys

# Instructions of a loop beside those that are counted: its own counter and branch, moves, descriptors of operands.
MOST_OTHERS = 32
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")


def disassemble(cuobjdump, program):
    """The instructions of each kernel: address, opcode, operands."""
    kernels = {}
    for line in run(cuobjdump, "-sass", program).splitlines():
        if name := re.match(r"\s*Function : (\S+)", line):
            kernel = kernels.setdefault(name[1], [])
        elif found := LINE.match(line):
            kernel.append((int(found[1], 16), found[2], found[3]))
    return kernels


def run(*command):
    # cuobjdump starts nvdisasm by name.
    path = os.path.dirname(os.path.abspath(command[0])) + os.pathsep + os.environ["PATH"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path})
    if done.returncode != 0:
        sys.exit(f"check_sass: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def innermost_loops(instructions):
    """The opcodes of each loop that holds no other one."""
    ranges = []
    for address, opcode, operands in instructions:
        target = re.search(r"0x([0-9a-f]+)", operands) if opcode.split(".")[0] == "BRA" else None
        if target and int(target[1], 16) < address:
            ranges.append((int(target[1], 16), address))
    for first, last in ranges:
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in ranges):
            yield [opcode for address, opcode, _ in instructions if first <= address <= last]


def is_a(opcode, wanted):
    """Whether it is the wanted instruction, with any modifiers; an IMAD.MOV only moves."""
    return opcode == wanted or opcode.startswith(wanted + ".") and not opcode.startswith(wanted + ".MOV")


def complaints(loop, expected):
    found = {wanted: sum(is_a(opcode, wanted) for opcode in loop) for wanted in expected}
    for wanted, count in expected.items():
        if found[wanted] < count:
            yield f"{found[wanted]} {wanted} instead of {count}"
    others = len(loop) - sum(found.values())
    if others > MOST_OTHERS:
        yield f"{others} other instructions"
    waits = sum(opcode.startswith("WARPGROUP.DEPBAR") for opcode in loop)
    if waits > 1:
        yield f"{waits} waits for products: they are serialised"


def closest(loops, expected):
    """The loop that holds most of what is expected."""
    held = lambda loop: sum(min(count, sum(is_a(opcode, wanted) for opcode in loop)) for wanted, count in expected.items())
    return max(loops, key=held, default=[])


def parse(line):
    kernel, *opcodes = line.split()
    expected = collections.Counter()
    for opcode, count in (word.split("=") for word in opcodes):
        expected[opcode] += int(count)
    return kernel, expected


def without_one(loop, wanted):
    at = next(i for i, opcode in enumerate(loop) if is_a(opcode, wanted))
    return loop[:at] + loop[at + 1 :]


def main(cuobjdump, program):
    kernels = disassemble(cuobjdump, program)
    expectations = [parse(line) for line in run(os.path.abspath(program), "--expect").splitlines()]
    wrong = [f"{name}: nothing is expected of it" for name in kernels.keys() - {name for name, _ in expectations}]
    for kernel, expected in expectations:
        loop = closest(innermost_loops(kernels.get(kernel, [])), expected)
        found = list(complaints(loop, expected))
        wrong += [f"{kernel}: {complaint}" for complaint in found]
        if not found:
            accepted = (wanted for wanted in expected if not list(complaints(without_one(loop, wanted), expected)))
            wrong += [f"{kernel}: the check accepts one {wanted} less" for wanted in accepted]

    usage = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", run(cuobjdump, "--dump-resource-usage", program))
    wrong += [f"{name}: its resource usage is not known" for name in kernels.keys() - {name for name, _, _ in usage}]
    wrong += [f"{name}: {stack} bytes of stack, {local} of local memory" for name, stack, local in usage if int(stack) or int(local)]
    if wrong:
        sys.exit("\n".join(f"check_sass: {line}" for line in wrong))
    print(f"check_sass: {len(expectations)} loops of {len(kernels)} kernels hold what is counted, without local memory;")
    print("check_sass: each was refused with one of its instructions less")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: check_sass.py CUOBJDUMP PROGRAM")
    main(*sys.argv[1:])
