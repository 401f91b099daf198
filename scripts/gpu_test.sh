#!/usr/bin/env bash
# The suite that needs a Hopper GPU, and nothing but a driver beside it. In the archive too, which needs no Rust where it runs.
#   scripts/gpu_test.sh                  builds and runs it here
#   scripts/gpu_test.sh --pack [DIR]     builds it and packs the binaries into DIR (default dist/gpu), to be carried to a GPU
#   DIR/gpu_test.sh --from DIR           runs such a folder
# Options for a run: --memcheck (under compute-sanitizer, with a reduced grid), --log FILE (default gpu_test.log in the folder;
# the suite's own record goes beside it, as .json).
# A missing GPU is a failure here, not a skip. The last line sums the tests: "N passed, N failed, N skipped".
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
  echo "gpu_test: $*" >&2
  exit 1
}
usage() {
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
  exit "$1"
}

pack="" from="" memcheck=0 log=""
while [ $# -gt 0 ]; do
  case $1 in
    --pack)
      pack=dist/gpu
      if [ $# -gt 1 ] && [ "${2#--}" = "$2" ]; then pack=$2 && shift; fi
      ;;
    --from) from=${2:?--from takes a folder} && shift ;;
    --memcheck) memcheck=1 ;;
    --log) log=${2:?--log takes a file} && shift ;;
    -h | --help) usage 0 ;;
    *) usage 1 >&2 ;;
  esac
  shift
done

# Builds the test binaries and copies them into a folder, with what is needed to run them and to say what they are.
pack_into() {
  local folder=$1 name executable
  cd "$here/.."
  scripts/bootstrap.sh
  mkdir -p "$folder"
  rm -f "$folder"/*.test "$folder"/*.log "$folder/about.txt"
  # The audit and the doors read the checkout, and the grid on the CPU needs no GPU: what is left is the GPU's.
  local targets=()
  for name in tests/tests/*.rs tests/tests/*/main.rs; do
    [ -e "$name" ] || continue
    name=$(basename "${name%/main.rs}" .rs)
    case $name in cpu | doors | disassembly) ;; *) targets+=(--test "$name") ;; esac
  done
  [ ${#targets[@]} -gt 0 ] || fail "tests/tests holds no GPU tests."
  cargo test --no-run --profile gputest --features cuda -p hopper-attention-tests "${targets[@]}" \
    --message-format json-render-diagnostics |
    sed -n 's/.*"target":{"kind":\["test"\].*"name":"\([^"]*\)".*"executable":"\([^"]*\)".*/\1 \2/p' |
    while read -r name executable; do
      cp "$executable" "$folder/$name.test"
    done
  compgen -G "$folder/*.test" >/dev/null || fail "cargo named no test binary."
  cp "$here/gpu_test.sh" "$here/count_tests.awk" "$folder/"
  {
    echo "commit: $(git rev-parse HEAD 2>/dev/null || echo unknown)$(git diff --quiet HEAD 2>/dev/null || echo ', with changes')"
    echo "built: $(date -u +%Y-%m-%dT%H:%M:%SZ) with $(cargo --version)"
  } >"$folder/about.txt"
}

# Runs the binaries of a folder, one test at a time: they share one GPU.
run_from() {
  local folder=$1 binary status=0
  cd "$folder"
  log=${log:-$PWD/gpu_test.log}
  compgen -G "*.test" >/dev/null || fail "$folder holds no *.test: pack it with scripts/gpu_test.sh --pack."
  local wrap=()
  if [ $memcheck = 1 ]; then
    command -v compute-sanitizer >/dev/null || PATH=$PATH:/usr/local/cuda/bin
    command -v compute-sanitizer >/dev/null || fail "compute-sanitizer is missing: it comes with the CUDA toolkit."
    wrap=(compute-sanitizer --tool memcheck --error-exitcode 1)
    export HATTN_TEST_GRID=${HATTN_TEST_GRID:-small}
  fi
  export HATTN_REQUIRE_GPU=1 HATTN_TEST_RECORD=${HATTN_TEST_RECORD:-${log%.log}.json}
  {
    cat about.txt
    echo "ran: $(date -u +%Y-%m-%dT%H:%M:%SZ), grid ${HATTN_TEST_GRID:-full}${wrap[*]:+, under ${wrap[*]}}"
    nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv,noheader 2>/dev/null || echo "no nvidia-smi"
  } | tee "$log"
  for binary in *.test; do
    echo "== $binary" | tee -a "$log"
    chmod +x "$binary"
    "${wrap[@]}" "./$binary" --test-threads=1 --nocapture 2>&1 | tee -a "$log" || status=1
  done
  local passed failed skipped
  read -r passed failed skipped < <(awk -f count_tests.awk "$log")
  # A binary that died printed no result line: that is a failure too, and so is a run without a test.
  [ $status = 0 ] || [ "$failed" -gt 0 ] || failed=1
  [ "$passed" -gt 0 ] || status=1
  ! grep -q 'skipped: no GPU' "$log" || status=1
  echo "$passed passed, $failed failed, $skipped skipped" | tee -a "$log"
  exit $status
}

if [ -n "$pack" ]; then
  case $pack in /*) ;; *) pack=$PWD/$pack ;; esac
  pack_into "$pack"
  echo "gpu_test: packed $(du -sh "$pack" | cut -f1) into $pack; there: $pack/gpu_test.sh --from $pack"
elif [ -n "$from" ]; then
  run_from "$from"
else
  command -v cargo >/dev/null || fail "cargo is missing: pack a folder elsewhere (--pack) and run it here (--from)."
  pack_into "$here/../dist/gpu"
  run_from "$here/../dist/gpu"
fi
