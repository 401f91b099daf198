#!/usr/bin/env bash
# Compiles one row of fp8.def, of this tree or another one, into a shared object for variants.cu, and says what ptxas says of it.
#   benches/variants/build.sh OUT.so MASK HEAD_DIM TILE_M STAGES SCORES [nvcc's options]   (TREE=DIR: another worktree)
#   benches/variants/build.sh variants                                                     the program that times them
# There: LENS=512,16384 ./variants HEAD_DIM ROUNDS f:./a.so d:./b.so c:./causal.so C:./causal.so
# (a.so+b.so: with b.so launched behind it; f: full, d: full in drawn order, c: causal, F, D and C with factors per block; the first of a mask is compared with)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
tools=${HATTN_TOOLCHAIN_DIR:-$root/.toolchain}
tree=${TREE:-$root}
sys=$tree/crates/hopper-attention-sys
nvcc=("$tools/cuda/bin/nvcc" -std=c++17 -O3 -DNDEBUG "-I$sys/include" "-I$sys/kernels" -isystem "$tools/cutlass/include")
if [ -e "$sys/src/params.rs" ]; then
  # The header that cxx makes of the launch parameters; this compiles no kernel.
  (cd "$tree" && HATTN_NO_KERNELS=1 cargo check -q -p hopper-attention-sys)
  nvcc+=("-I${CARGO_TARGET_DIR:-$tree/target}/cxxbridge")
fi
if [ "$1" = variants ]; then
  exec "${nvcc[@]}" -gencode arch=compute_90,code=sm_90 -o variants "$root/benches/variants/variants.cu" -ldl
fi
out=$1 row="E4M3, $2, $3, $3, $4, 128, $5, $6"
shift 6
source=$(mktemp --suffix=.cu)
trap 'rm -f "$source"' EXIT
cat >"$source" <<END
#include "sm90/fp8/launch.hpp"
HATTN_FP8_SM90_INSTANCE($row)
extern "C" hattn::FwdRow variant_row() { return hattn::HATTN_FP8_SM90_ROW($row)(); }
END
"${nvcc[@]}" -shared -Xcompiler -fPIC --use_fast_math --expt-relaxed-constexpr \
  --expt-extended-lambda -Xptxas -v -gencode arch=compute_90a,code=sm_90a "$@" -o "$out" "$source" "$sys/kernels/common/fill.cu" 2>&1 |
  grep -E "error|spill|C75" | sed "s|^|$out: |"
