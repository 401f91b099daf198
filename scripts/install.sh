#!/usr/bin/env bash
# Builds the C and C++ library and installs it: headers, a shared and a static library, a CMake package, pkg-config files.
#   scripts/install.sh PREFIX [--cpu] [--dlpack] [CMake options]
#     --cpu     leaves the CUDA kernels out. Then no part of CUDA is needed or fetched.
#     --dlpack  installs dlpack/dlpack.h as well, from a pinned package. hopper_attention_dlpack.hpp needs it.
# The CMake options are those of crates/hopper-attention-capi/CMakeLists.txt, for example
# -DHATTN_FEATURES='sm90;bf16;hdim128' for fewer kernels. The libraries go to PREFIX/lib. Afterwards PREFIX may be moved.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
  exit "$1"
}
case ${1:-} in
  -h | --help) usage 0 ;;
  "" | -*) usage 1 >&2 ;;
esac
prefix=$1 toolchain=${HATTN_TOOLCHAIN_DIR:-$root/.toolchain}
cuda=ON bootstrap=() options=()
shift
for option in "$@"; do
  case $option in
    --cpu) cuda=OFF bootstrap+=(--cpu) ;;
    --dlpack) bootstrap+=(--dlpack) options+=("-DHATTN_DLPACK_INCLUDE=$toolchain/dlpack/include") ;;
    --*) usage 1 >&2 ;;
    *) options+=("$option") ;;
  esac
done
case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac

"$root/scripts/bootstrap.sh" "${bootstrap[@]}"
own_cmake=$(command -v cmake || true)
# The pinned CMake and ninja, where the machine has none of its own.
PATH=$PATH:$toolchain/cmake/bin:$toolchain/bin
if [ -x "$toolchain/cmake/bin/cmake" ]; then PATH=$toolchain/cmake/bin:$PATH; fi

target=${CARGO_TARGET_DIR:-$root/target}
case $target in /*) ;; *) target=$PWD/$target ;; esac
build=$target/capi-$([ $cuda = ON ] && echo cuda || echo cpu)
# Fresh: options of an earlier call are not those of this one. CMake would choose lib64 on some systems: with lib, the
# paths of docs/ and of scripts/wheel.sh hold everywhere.
CARGO_TARGET_DIR=$target cmake --fresh -S "$root/crates/hopper-attention-capi" -B "$build" -G Ninja "-DHATTN_CUDA=$cuda" \
  -DCMAKE_INSTALL_LIBDIR=lib "${options[@]}"
cmake --build "$build"
cmake --install "$build" --prefix "$prefix" >/dev/null
lib=""
echo
echo "installed in $prefix:"
while IFS= read -r file || [ -n "$file" ]; do
  case $file in */libhopper_attention.a) lib=$(dirname "$file") ;; esac
  if [ -L "$file" ]; then
    echo "  ${file#"$prefix"/} -> $(readlink "$file")"
  else
    echo "  ${file#"$prefix"/} ($(stat -c %s "$file") bytes)"
  fi
done <"$build/install_manifest.txt"
fetched=""
[ -n "$own_cmake" ] || fetched="
              export PATH=$toolchain/cmake/bin:\$PATH   (this machine has no other cmake)"
cat <<USE

to use it (docs/c.md and docs/cpp.md say more):
  CMake       cmake -DCMAKE_PREFIX_PATH=$prefix ...$fetched
  pkg-config  export PKG_CONFIG_PATH=$lib/pkgconfig
  a program that was linked without CMake finds the shared library by one of
              -Wl,-rpath,$lib   (when it is linked)
              export LD_LIBRARY_PATH=$lib   (when it is started)
USE
