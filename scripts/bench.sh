#!/usr/bin/env bash
# Times our attention beside every peer on this machine and draws charts: builds hattn and runs `hattn bench`.
#   scripts/bench.sh [options of hattn bench, such as --quick, --gqa 8, --peer libfa3.so, --compare OLD.json, --output DIR]
# bench.json, bench.csv and the charts go to the target folder's bench/ unless --output says otherwise. On a machine with an
# NVIDIA driver the kernels are built too (minutes, the first time); anywhere else, or with HATTN_BENCH_DEVICE=cpu, the sweep
# runs small sizes on the CPU backend against the naive computation and needs neither CUDA nor a C++ compiler.
# With --dtypes e4m3 and a Python that has PyTorch it fetches NVIDIA's cuDNN frontend, pinned in benches/peers/requirements.txt,
# into the toolchain's folder, because PyTorch does not call cuDNN's FP8 attention. Without it the sweep reports cuDNN as missing.
# HATTN_BENCH_PROGRAM=FILE skips the build, for a machine without cargo. FILE is a hattn with libhopper_attention_benches.so beside it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "bench: $*" >&2; }
target=${CARGO_TARGET_DIR:-target}
options=(--output "$target/bench")
commit=$(git rev-parse --short HEAD 2>/dev/null || true)
if [ -n "$commit" ]; then
  [ -z "$(git status --porcelain --untracked-files=no 2>/dev/null)" ] || commit+=-dirty
  options+=(--commit "$commit")
fi

# fetch_frontend OPTION...: fetches cuDNN's frontend if the sweep has e4m3 points and Python has PyTorch, but not the frontend.
fetch_frontend() {
  local python=python3 e4m3="" tag place
  while [ $# -gt 0 ]; do
    case $1 in
      --python) python=${2:-} ;;
      --python=*) python=${1#*=} ;;
      *e4m3*) e4m3=1 ;;
    esac
    shift
  done
  [ -n "$e4m3" ] && tag=$("$python" -c 'import sys, torch; print("cp%d%d" % sys.version_info[:2])' 2>/dev/null) || return 0
  place=${HATTN_TOOLCHAIN_DIR:-$PWD/.toolchain}/python/$tag
  export PYTHONPATH=$place${PYTHONPATH:+:$PYTHONPATH}
  "$python" -c 'import cudnn' 2>/dev/null && return
  say "fetching NVIDIA's cuDNN frontend into $place (12 MB)"
  "$python" -m pip install --disable-pip-version-check --quiet --require-hashes --no-deps --only-binary :all: --target "$place" \
    --requirement benches/peers/requirements.txt || say "pip could not fetch it: cuDNN will be missing at e4m3 points"
}
fetch_frontend "$@"

program=${HATTN_BENCH_PROGRAM:-}
if [ -z "$program" ]; then
  command -v cargo >/dev/null || { say "cargo is missing: install Rust 1.88 or newer (rustup.rs), or set HATTN_BENCH_PROGRAM."; exit 1; }
  build=(--package hopper-attention-cli)
  if [ "${HATTN_BENCH_DEVICE:-auto}" = cpu ]; then
    say "using the CPU, as asked"
    options+=(--device cpu)
  elif compgen -G '/dev/nvidia[0-9]*' >/dev/null || { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }; then
    say "an NVIDIA GPU is here: building with the kernels (the first time takes minutes)"
    scripts/bootstrap.sh
    # The library too: the script in PyTorch loads it.
    build+=(--package hopper-attention-benches --features hopper-attention-cli/cuda,hopper-attention-benches/cuda)
  else
    say "no NVIDIA GPU here: small sizes on the CPU"
  fi
  quiet=()
  [ -t 2 ] || quiet=(--quiet)
  cargo build --release --locked "${quiet[@]}" "${build[@]}"
  program=$target/release/hattn
fi
exec "$program" bench "${options[@]}" "$@"
