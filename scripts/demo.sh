#!/usr/bin/env bash
# The main job, from nothing: builds hattn, computes attention of a tensor file, and checks it against an f64 computation.
#
#     scripts/demo.sh                            q, k, v of a real transformer layer (fixtures/README.md)
#     scripts/demo.sh FILE [hattn options]       your own, for instance: scripts/demo.sh qkv.safetensors --mask causal
#
# On a machine with a GPU of compute capability 8.0 or later it builds the kernels first (minutes, the first time). Anywhere
# else, or with HATTN_DEMO_DEVICE=cpu, it uses the CPU at once. Then it needs neither CUDA nor a C++ compiler.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
input=fixtures/minilm_layer3.safetensors
if [ $# -gt 0 ]; then
  input=$(realpath -m -- "$1")
  shift
fi
cd "$root"

say() { echo "demo: $*"; }
command -v cargo >/dev/null || { echo "demo: cargo is missing: install Rust 1.88 or newer (rustup.rs)." >&2; exit 1; }

# Prints the compute capabilities of the GPUs, one a line. Prints nothing if it cannot find them out.
gpus() {
  if command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null; then return; fi
  # Without nvidia-smi, as in slim containers, a driver and a device node are taken for a Hopper GPU.
  if ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1' && compgen -G '/dev/nvidia[0-9]*' >/dev/null; then echo 9.0; fi
}

features=()
found=$(gpus)
if [ "${HATTN_DEMO_DEVICE:-auto}" = cpu ]; then
  say "using the CPU, as asked"
elif grep -qE '^([89]|[1-9][0-9]+)\.[0-9]+$' <<<"$found"; then
  say "compute capability of the GPU: $(echo $found). Building with the kernels (the first time takes minutes)"
  scripts/bootstrap.sh
  features=(--features cuda)
elif [ -n "$found" ]; then
  say "compute capability of the GPU: $(echo $found). The kernels need 8.0 or later: using the CPU"
else
  say "no GPU here: using the CPU"
fi

say "building hattn (a minute or two, the first time)"
quiet=()
[ -t 2 ] || quiet=(--quiet)
cargo build --release --locked "${quiet[@]}" --package hopper-attention-cli "${features[@]}"
output=${CARGO_TARGET_DIR:-target}/demo/o.safetensors
mkdir -p "$(dirname "$output")"
options=(--input "$input" --output "$output")
[ "${HATTN_DEMO_DEVICE:-auto}" = cpu ] && options+=(--device cpu)
say "hattn check ${options[*]}${*:+ $*}"
cargo run --release --locked --quiet --package hopper-attention-cli "${features[@]}" -- check "${options[@]}" "$@"
