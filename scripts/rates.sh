#!/usr/bin/env bash
# Measures what Hopper's SMs do in a clock (benches/README.md, "Rates"): compiles the bench, compares its disassembly with what
# it counts, and runs it if there is a GPU.
#   scripts/rates.sh [--build-only | options of the bench: --only WORD, --json FILE]
# The program is rates/rates of the target folder, and what the compiler said is beside it as rates.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "rates: $*" >&2; }
build_only=0
if [ "${1:-}" = --build-only ]; then
  build_only=1
  shift
fi

scripts/bootstrap.sh >&2
cuda=$(scripts/bootstrap.sh --where)
cuobjdump=$cuda/bin/cuobjdump
[ -x "$cuobjdump" ] || cuobjdump=${HATTN_TOOLCHAIN_DIR:-.toolchain}/cuda/bin/cuobjdump
folder=${CARGO_TARGET_DIR:-target}/rates
program=$folder/rates
mkdir -p "$folder"
if [ ! -e "$program" ] || [ -n "$(find benches/rates "$cuda/bin/nvcc" -newer "$program")" ]; then
  say "compiling benches/rates (less than a minute)"
  "$cuda/bin/nvcc" -std=c++17 -gencode arch=compute_90a,code=sm_90a -O3 -Xptxas -v -cudart static \
    benches/rates/rates.cu -o "$program.new" >"$folder/rates.log" 2>&1 || { cat "$folder/rates.log" >&2; exit 1; }
  mv "$program.new" "$program"
fi
python3 benches/rates/check_sass.py "$cuobjdump" "$program" >&2

if [ $build_only = 1 ]; then exit; fi
if compgen -G '/dev/nvidia[0-9]*' >/dev/null || { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }; then
  exec "$program" "$@"
fi
say "compiled and checked; there is no GPU to run it on"
