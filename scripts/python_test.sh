#!/usr/bin/env bash
# Tests the Python package with an installed library, and the wheel. Needs no GPU. scripts/test.sh runs this script.
#   scripts/python_test.sh PREFIX
# PREFIX is what scripts/install.sh wrote. In the target folder's python-test/:
#   venv    the pinned numpy and auditwheel, and what python3 has
#   empty   an environment of its own, in which the wheel is installed
# The tests of torch and transformers run where python3 has them, or the Python that HATTN_TORCH_PYTHON names.
# Prints a line for each check. A test that cannot run prints "skipped: why".
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
prefix=$(realpath -e -- "${1:?usage: scripts/python_test.sh PREFIX}") || exit 1
target=${CARGO_TARGET_DIR:-$root/target}
case $target in /*) ;; *) target=$PWD/$target ;; esac
work=$target/python-test
mkdir -p "$work"
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_REQUIRE_VIRTUALENV=0
unset PYTHONPATH HOPPER_ATTENTION_LIBRARY
logs=$work broken=0
source "$root/scripts/checks.sh"
# tests NAME PYTHON ARGUMENT...: the package's tests, which print a result line of their own.
tests() {
  local log=$work/$1.log python=$2
  echo "== $1"
  shift 2
  (cd "$work" && "$python" "$root/python/tests/run.py" "$@") 2>&1 | tee "$log"
  if [ "${PIPESTATUS[0]}" -ne 0 ]; then
    broken=1
    # A run that crashed has no result line.
    grep -q '^test result: ' "$log" || echo "test result: FAILED. 0 passed; 1 failed; 0 ignored"
  fi
}
environment() {
  python3 -m venv --system-site-packages "$work/venv" &&
    "$work/venv/bin/python" -m pip install --quiet --require-hashes --no-deps --only-binary :all: -r "$root/python/tests/requirements.txt"
}
wheel() {
  rm -rf "$work/dist"
  CARGO_TARGET_DIR=$target "$root/scripts/wheel.sh" "$prefix" --out "$work/dist"
}
tag() {
  local text
  text=$("$work/venv/bin/python" -m auditwheel show "$work"/dist/*.whl) && echo "$text" && tr '\n' ' ' <<<"$text" | grep -F '"manylinux_2_28_x86_64"'
}
# What the package looks for in its operator. It loads it where there is torch, which no test with the wheel has.
operator() {
  local op=$work/unpacked/hopper_attention/_torch_op.so name
  python3 -m zipfile -e "$work"/dist/*.whl "$work/unpacked" || return 1
  for name in $(grep -oE 'hattn_torch_[a-z_]+' "$root/python/hopper_attention/_torch.py" | sort -u); do
    nm -D --defined-only "$op" | grep -qE " T $name\$" || { echo "_torch_op.so has no $name" && return 1; }
  done
}
install_wheel() {
  rm -rf "$work/empty"
  python3 -m venv "$work/empty" && "$work/empty/bin/python" -m pip install --no-index "$work"/dist/*.whl
}

if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
  skip "the Python package" "python3 has no venv (Debian: apt-get install python3-venv)"
  result
  exit
fi
check "the environment of the tests" environment || exit 1
HOPPER_ATTENTION_LIBRARY=$prefix/lib/libhopper_attention.so tests "from the sources" "$work/venv/bin/python" --need numpy
with_torch=${HATTN_TORCH_PYTHON:-$work/venv/bin/python}
if [ -n "${HATTN_TORCH_PYTHON:-}" ]; then
  HOPPER_ATTENTION_LIBRARY=$prefix/lib/libhopper_attention.so tests "from the sources, with torch" "$with_torch" --need torch
fi
example() { (cd "$work" && HOPPER_ATTENTION_LIBRARY=$prefix/lib/libhopper_attention.so PYTHONPATH=$root/python "$with_torch" "$@"); }
if "$with_torch" -c 'import torch' 2>/dev/null; then
  check "examples/pytorch: train.py" example "$root/examples/pytorch/train.py" --steps 60
  check "examples/pytorch: compare_sdpa.py" example "$root/examples/pytorch/compare_sdpa.py" --device cpu --gradients
else
  skip "examples/pytorch" "no torch"
fi
if check "the wheel" wheel; then
  grep -E '\.whl|\.so|^newest|^without' "$work/the_wheel.log"
  check "auditwheel show says manylinux_2_28" tag
  check "the wheel's operator has what the package looks for" operator
  if check "pip installs the wheel into an empty environment" install_wheel; then
    tests "from the wheel" "$work/empty/bin/python" --installed test_abi
  fi
fi
result && [ $broken = 0 ]
