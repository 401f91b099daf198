#!/usr/bin/env bash
# Times our attention beside every peer on this machine and draws charts: builds hattn and runs `hattn bench`.
#   scripts/bench.sh [options of hattn bench, such as --quick, --gqa 8, --peer libfa3.so, --compare OLD.json, --output DIR]
# bench.json, bench.csv and the charts go to the target folder's bench/ unless --output says otherwise. On a machine with an
# NVIDIA driver the kernels are built too (minutes, the first time); anywhere else, or with HATTN_BENCH_DEVICE=cpu, the sweep
# runs small sizes on the CPU backend against the naive computation and needs neither CUDA nor a C++ compiler.
# Three peers are Python packages that PyTorch does not bring. If the Python has PyTorch and lacks such a peer, the script fetches
# its wheels from PyPI into the toolchain's folder. third_party/README.md has their versions and licences.
# - FlashAttention-3, in a wheel of xformers: 112 MB. For bf16 and f16 points, on a GPU, with PyTorch 2.10 or later.
# - FlashAttention-4, with NVIDIA's CUTLASS DSL: 100 MB. For bf16 and f16 points, on a GPU, with a PyTorch for CUDA 13.
#   It compiles its kernels during the sweep, before each timing. That takes seconds for each kind of problem.
# - NVIDIA's cuDNN frontend: 12 MB. For e4m3 points, because PyTorch does not call cuDNN's FP8 attention.
# HATTN_BENCH_NO_FETCH=1 leaves them out, also when an earlier run has fetched them. The report names the peers that are missing.
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

# fetch PYTHON FOLDER WHAT REQUIREMENTS...: makes FOLDER hold the packages that these files pin. Fails if pip does.
fetch() {
  local python=$1 folder=$2 what=$3
  shift 3
  [ "$(cat "$@")" != "$(cat "$folder/pins.txt" 2>/dev/null)" ] || return 0
  say "fetching $what into $folder; HATTN_BENCH_NO_FETCH=1 leaves it out"
  rm -rf "$folder.part"
  if ! "$python" -m pip install --disable-pip-version-check --quiet --require-hashes --no-deps --only-binary :all: \
    --target "$folder.part" "${@/#/--requirement=}"; then
    rm -rf "$folder.part"
    say "pip could not fetch it: it will be missing. The hashes are of the files for Linux x86_64 and Python 3.10 to 3.14."
    return 1
  fi
  cat "$@" >"$folder.part/pins.txt" && rm -rf "$folder" && mv "$folder.part" "$folder"
}

# find_in FOLDER...: puts these folders in front of PYTHONPATH, the first of them foremost.
find_in() {
  local IFS=:
  export PYTHONPATH="$*${PYTHONPATH:+:$PYTHONPATH}"
}

# fetch_peers OPTION...: fetches what a sweep with these options times and Python lacks, and puts it on PYTHONPATH.
fetch_peers() {
  local python=python3 dtypes="" about tag cuda folder toolchain=${HATTN_TOOLCHAIN_DIR:-$PWD/.toolchain}
  [ "${HATTN_BENCH_NO_FETCH:-0}" != 1 ] && [ "${HATTN_BENCH_DEVICE:-auto}" != cpu ] || return 0
  while [ $# -gt 0 ]; do
    case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
    case $1 in
      --python) python=${2:-} ;;
      --dtypes) dtypes+=,${2:-} ;;
      --device | --harness) case ${2:-} in cpu | rust) return 0 ;; esac ;;
      --no-python-peers | --from | --help | -h) return 0 ;;
    esac
    shift
  done
  # Two words: "cp312 13.0", or "cp312 False" without a GPU.
  about='import sys, torch; print("cp%d%d" % sys.version_info[:2], torch.cuda.is_available() and torch.version.cuda)'
  read -r tag cuda < <("$python" -c "$about" 2>/dev/null) || return 0
  if [[ $dtypes == *e4m3* ]] && ! "$python" -c 'import cudnn' >/dev/null 2>&1; then
    folder=$toolchain/python/cudnn-$tag
    if fetch "$python" "$folder" "NVIDIA's cuDNN frontend (12 MB)" benches/peers/requirements.txt; then
      find_in "$folder"
    fi
  fi
  if [[ ${dtypes:-bf16,f16} == *f16* && $cuda != False ]] && ! "$python" -c 'import flash_attn_interface' >/dev/null 2>&1 &&
    ! "$python" -c 'import xformers' >/dev/null 2>&1; then
    folder=$toolchain/python/fa3
    if fetch "$python" "$folder" "xformers, for the FlashAttention-3 that it has compiled (112 MB)" benches/peers/requirements-fa3.txt; then
      find_in "$folder"
    fi
  fi
  if [[ ${dtypes:-bf16,f16} == *f16* && $cuda == 13.* ]] && ! "$python" -c 'import flash_attn.cute' >/dev/null 2>&1; then
    folder=$toolchain/python/fa4-$tag
    local files=(benches/peers/requirements-fa4.txt)
    "$python" -c 'import einops' >/dev/null 2>&1 || files+=(benches/peers/requirements-einops.txt)
    if fetch "$python" "$folder" "FlashAttention-4 and NVIDIA's CUTLASS DSL (100 MB)" "${files[@]}"; then
      # With this file, Python takes the folder before an installed FlashAttention-2, whose package has the same name.
      touch "$folder/flash_attn/__init__.py"
      # The second folder is what the DSL's .pth file names. Python does not read .pth files of PYTHONPATH.
      find_in "$folder" "$folder/nvidia_cutlass_dsl/dsl_packages"
    fi
  fi
}
fetch_peers "$@"

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
