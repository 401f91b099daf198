#!/usr/bin/env bash
# Times our forward against peers on this machine's GPU: builds the shared library of the benches package, then runs benches/peers/sweep.py on it.
#   scripts/bench.sh [sweep.py's options, such as --peer libfa3.so --json sweep.json --quick]
# HATTN_BENCH_LIBRARY=path/to/libhopper_attention_benches.so skips the build (a machine with a GPU and without cargo).
set -euo pipefail
cd "$(dirname "$0")/.."

library=${HATTN_BENCH_LIBRARY:-}
if [ -z "$library" ]; then
  cargo build --locked -p hopper-attention-benches --release --features cuda --lib
  library=${CARGO_TARGET_DIR:-target}/release/libhopper_attention_benches.so
fi
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
if [ -n "$(git status --porcelain --untracked-files=no 2>/dev/null)" ]; then commit+=-dirty; fi

exec "${PYTHON:-python3}" benches/peers/sweep.py --ours "$library" --commit "$commit" "$@"
