#!/usr/bin/env bash
# Tests what is written in C++ for torch: the operators of the Python package (python/torch_op) and examples/libtorch.
#
#   scripts/torch_test.sh PREFIX
#     PREFIX  where scripts/install.sh has installed the library
#
# The sources are compiled with the headers of a pinned torch, which are fetched. What runs them needs an installed torch:
# of the Python that HATTN_TORCH_PYTHON names, or of python3. Without one those checks print why they were skipped.
#
# Prints a line for each check. Logs are in torch-test/ in the target folder.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
prefix=$(cd "${1:?usage: torch_test.sh PREFIX}" && pwd) || exit 1
target=${CARGO_TARGET_DIR:-$root/target}
case $target in /*) ;; *) target=$PWD/$target ;; esac
toolchain=${HATTN_TOOLCHAIN_DIR:-$root/.toolchain}
PATH=$PATH:$toolchain/cmake/bin:$toolchain/bin
python=${HATTN_TORCH_PYTHON:-python3}
work=$target/torch-test
rm -rf "$work"
mkdir -p "$work"

# The wheel for macOS is a tenth of the one for Linux. The headers are the same.
torch="torch==2.11.0 --hash=sha256:4b5866312ee6e52ea625cd211dcb97d6a2cdc1131a5f15cc0d87eec948f6dd34"
headers=$target/torch-headers
fetch_headers() {
  [ "$(cat "$headers/stamp" 2>/dev/null)" != "$torch" ] || return 0
  rm -rf "$headers"
  mkdir -p "$headers"
  echo "$torch" >"$headers/wanted.txt"
  PIP_REQUIRE_VIRTUALENV=0 python3 -m pip download --disable-pip-version-check --quiet --require-hashes --no-deps --only-binary :all: \
    --python-version 3.12 --implementation cp --platform macosx_11_0_arm64 --dest "$headers" --requirement "$headers/wanted.txt" &&
    python3 - "$headers" <<'PYTHON' && rm "$headers"/*.whl && echo "$torch" >"$headers/stamp"
import pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
    wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("torch/include/")])
PYTHON
}

logs=$work
source "$root/scripts/checks.sh"

cxx=${CXX:-c++}
includes=(-isystem "$headers/torch/include" -I "$prefix/include")
shim() { "$cxx" -std=c++17 -Wall -Wextra -Werror -fsyntax-only "${includes[@]}" "$root/python/torch_op/shim_check.cc"; }
compile_example() {
  "$cxx" -std=c++17 -Wall -Wextra -Werror -fsyntax-only -DTORCH_TARGET_VERSION=0x020a000000000000 "$@" "${includes[@]}" \
    "$root/examples/libtorch/attention.cpp"
}
# The file names no library of torch: a loader would look for it where it is not.
op() {
  CXX=$cxx "$root/python/torch_op/build.sh" "$work/_torch_op.so" || return 1
  ! readelf -dW "$work/_torch_op.so" | grep NEEDED | grep -E 'torch|c10|cuda'
}
op_symbols() {
  [ "$(nm -D --defined-only "$work/_torch_op.so" | awk '{ print $3 }' | sort | xargs)" = "hattn_torch_register hattn_torch_register_recorded" ]
}
example() {
  cmake -S "$root/examples/libtorch" -B "$work/example" -G Ninja "-DCMAKE_PREFIX_PATH=$prefix" \
    "-DPython3_EXECUTABLE=$(command -v "$python")" && cmake --build "$work/example" &&
    ctest --test-dir "$work/example" --output-on-failure --no-tests=error
}

check "python/torch_op compiles without torch" op && check "python/torch_op exports its two functions" op_symbols
if fetch_headers >"$work/headers.log" 2>&1; then
  check "python/torch_op declares what torch's header declares" shim
  check "examples/libtorch compiles" compile_example
  check "examples/libtorch compiles with CUDA" compile_example -DUSE_CUDA -DEXAMPLE_CUDA
else
  tail -n 3 "$work/headers.log"
  for name in "python/torch_op declares what torch's header declares" "examples/libtorch compiles"; do
    skip "$name" "torch's headers could not be fetched"
  done
fi
if "$python" -c 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)' 2>/dev/null; then
  check "examples/libtorch runs" example
else
  skip "examples/libtorch runs" "$python has no torch of version 2.10 or later"
fi
result
