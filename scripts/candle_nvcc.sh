#!/usr/bin/env bash
# Stands in for nvcc where candle's kernels are compiled (NVCC=$PWD/scripts/candle_nvcc.sh), since candle has no switch that
# leaves them out.
# - By default it makes empty files. That is enough for lints of what is written in Rust around the kernels.
# - With CANDLE_REAL_NVCC=FILE that nvcc compiles the kernels that candle loads as PTX. Those of quantised models and of
#   mixtures of experts are left out: they are large, and no test of ours calls them. A call would end the program.
# Give Cargo a --target-dir of its own with it: Cargo does not compile the kernels again where NVCC has changed.
set -euo pipefail
arguments=("$@") output="" folder="" what="" source=""
while [ $# -gt 0 ]; do
  case $1 in
    --version) echo "Cuda compilation tools, release 13.0, none" && exit ;;
    --ptx | -c | --lib) what=${1##*-} ;;
    --output-directory) folder=$2 && shift ;;
    -o) output=$2 && shift ;;
    *.cu) source=$1 ;;
  esac
  shift
done
case $what in
  ptx)
    if [ -n "${CANDLE_REAL_NVCC:-}" ] && [ "$(basename "$source")" != quantized.cu ]; then
      exec "$CANDLE_REAL_NVCC" "${arguments[@]}"
    fi
    : >"$folder/$(basename "${source%.cu}").ptx"
    ;;
  c) : >"$output" ;;
  lib)
    # The archive has the names that candle's Rust code calls. The build script runs in the folder of candle-kernels.
    grep -oE 'pub fn [A-Za-z0-9_]+' src/ffi.rs | sort -u |
      awk 'BEGIN { print "#include <stdlib.h>" } { print "void " $3 "(void) { abort(); }" }' >"$output.c"
    "${CC:-cc}" -fPIC -c -o "$output.o" "$output.c"
    rm -f "$output"
    "${AR:-ar}" crs "$output" "$output.o"
    ;;
esac
