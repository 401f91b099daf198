#!/usr/bin/env bash
# An nvcc for lints: it makes empty files, so that Cargo can check what is written in Rust around candle's kernels.
# candle has no switch for that. `NVCC=$PWD/scripts/nvcc_of_nothing.sh CUDA_COMPUTE_CAP=90 CUDARC_CUDA_VERSION=13000
# cargo clippy ...`
set -euo pipefail
output="" folder="" ptx=0 source=""
while [ $# -gt 0 ]; do
  case $1 in
    --version) echo "Cuda compilation tools, release 13.0, none" && exit ;;
    --ptx) ptx=1 ;;
    --output-directory) folder=$2 && shift ;;
    -o) output=$2 && shift ;;
    *.cu) source=$1 ;;
  esac
  shift
done
if [ $ptx = 1 ]; then
  output=$folder/$(basename "${source%.cu}").ptx
fi
[ -z "$output" ] || : >"$output"
