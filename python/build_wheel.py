#!/usr/bin/env python3
"""Writes the wheel of hopper-attention with the standard library alone. scripts/wheel.sh calls it.

    python3 python/build_wheel.py --library FILE --tag TAG [--op FILE] --licences FOLDER --out FOLDER

One wheel serves every Python: the package has no extension module. The library and the operator for torch are data
files.
"""

import argparse
import base64
import hashlib
import os
import re
import sys
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
# The time of every file in the wheel, so that the same contents give the same bytes.
TIME = (2020, 1, 1, 0, 0, 0)

METADATA = """\
Metadata-Version: 2.4
Name: hopper-attention
Version: {version}
Summary: Exact fused attention for NVIDIA Hopper, with kernels for GPUs since compute capability 8.0, and for the CPU
License-Expression: MIT OR Apache-2.0
{licences}Requires-Python: >=3.9
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3
Classifier: Environment :: GPU :: NVIDIA CUDA
Provides-Extra: torch
Requires-Dist: torch>=2.8; extra == "torch"
Provides-Extra: transformers
Requires-Dist: torch>=2.8; extra == "transformers"
Requires-Dist: transformers>=5.17; extra == "transformers"
Description-Content-Type: text/markdown

{description}"""

WHEEL = """\
Wheel-Version: 1.0
Generator: hopper-attention build_wheel.py
Root-Is-Purelib: false
Tag: py3-none-{tag}
"""


def read(*path):
    with open(os.path.join(*path), "rb") as file:
        return file.read()


def version():
    """The version of the workspace."""
    return re.search(r'^version = "(.+)"$', read(ROOT, "Cargo.toml").decode(), re.M).group(1)


def contents(options):
    """The name and the bytes of every file, RECORD aside."""
    package, info = "hopper_attention", f"hopper_attention-{version()}.dist-info"
    for name in sorted(os.listdir(os.path.join(HERE, package))):
        if name.endswith(".py") or name == "py.typed":
            yield f"{package}/{name}", read(HERE, package, name)
    yield f"{package}/libhopper_attention.so", read(options.library)
    if options.op:
        yield f"{package}/_torch_op.so", read(options.op)
    licences = sorted(os.listdir(options.licences))
    for name in licences:
        yield f"{info}/licenses/{name}", read(options.licences, name)
    listed = "".join(f"License-File: {name}\n" for name in licences)
    description = read(ROOT, "docs", "python.md").decode()
    yield f"{info}/METADATA", METADATA.format(version=version(), licences=listed, description=description).encode()
    yield f"{info}/WHEEL", WHEEL.format(tag=options.tag).encode()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libhopper_attention.so")
    parser.add_argument("--op", help="_torch_op.so, the operator for torch")
    parser.add_argument("--tag", required=True, help="the platform, such as manylinux_2_28_x86_64")
    parser.add_argument("--licences", required=True, help="a folder of licence texts")
    parser.add_argument("--out", required=True, help="the folder for the wheel")
    options = parser.parse_args()
    os.makedirs(options.out, exist_ok=True)
    path = os.path.join(options.out, f"hopper_attention-{version()}-py3-none-{options.tag}.whl")
    rows = []
    with zipfile.ZipFile(path + ".part", "w", zipfile.ZIP_DEFLATED) as wheel:

        def add(name, data, mode=0o644):
            info = zipfile.ZipInfo(name, TIME)
            info.external_attr, info.compress_type = (0o100000 | mode) << 16, zipfile.ZIP_DEFLATED
            wheel.writestr(info, data)

        for name, data in contents(options):
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(data)}\n")
            add(name, data, 0o755 if name.endswith(".so") else 0o644)
            print(f"  {name} ({len(data)} bytes)")
        record = f"hopper_attention-{version()}.dist-info/RECORD"
        add(record, "".join(rows) + f"{record},,\n")
    os.replace(path + ".part", path)
    print(f"{path} ({os.path.getsize(path)} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
