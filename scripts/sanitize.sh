#!/usr/bin/env bash
# Runs the tests of the CPU backend, of its threads and of the C ABI under a tool that finds undefined behaviour.
#   scripts/sanitize.sh address | thread | miri | all
#
# address  AddressSanitizer: accesses outside of an allocation, uses after a free, leaks.
# thread   ThreadSanitizer: data races.
# miri     the interpreter Miri: also uninitialised memory, misaligned or invalid references, and slices that cover what another
#          thread writes. It is a thousand times slower than the hardware, so it runs the tests that are made for it.
#
# The standard library is compiled with the sanitizer too. Otherwise ThreadSanitizer does not see its synchronisation, and
# reports races that are none. This needs the sources of the library: `rustup component add rust-src`.
# Miri needs a nightly toolchain: `rustup toolchain install nightly --component miri,rust-src`. Without it that part is skipped.
#
# Logs and builds are in sanitize/ of the target folder. The last line sums the tests: "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

case ${1:-} in
  address | thread | miri) wanted=("$1") ;;
  all) wanted=(address thread miri) ;;
  *)
    sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | head -n 2 >&2
    exit 2
    ;;
esac

folder=$(realpath -m "${CARGO_TARGET_DIR:-target}")/sanitize
mkdir -p "$folder"
failed_parts=()
skipped_parts=0
# Nothing is edited between builds here, so incremental compilation only costs time.
export CARGO_INCREMENTAL=0

# run LOG COMMAND...: runs it, keeps its output in the folder, and shows a line for each program of tests and each complaint.
run() {
  local log=$folder/$1.log since=$SECONDS
  shift
  echo "== $(basename "$log" .log): $(echo "$*" | cut -c 1-120)"
  "$@" 2>&1 | tee -a "$log" | awk -v terminal=0 -f scripts/progress.awk
  if [ "${PIPESTATUS[0]}" -eq 0 ]; then
    echo "== $(basename "$log" .log): ok ($((SECONDS - since)) s)"
    return
  fi
  failed_parts+=("$(basename "$log" .log)")
  echo "== $(basename "$log" .log): FAILED ($((SECONDS - since)) s), from $log:"
  { grep -m 3 -A 30 -E 'WARNING: ThreadSanitizer|ERROR: (Address|Leak)Sanitizer|Undefined Behavior|^error|panicked at' "$log" ||
    tail -n 40 "$log"; } | head -n 100
}

# sanitizer NAME: the tests with that sanitizer in all Rust code, the standard library included.
sanitizer() {
  local host sources
  host=$(rustc --version --verbose | sed -n 's/^host: //p')
  sources=$(rustc --print sysroot)/lib/rustlib/src/rust/library/Cargo.lock
  if [ ! -e "$sources" ]; then
    echo "== $1: FAILED, there is no $sources; it comes with: rustup component add rust-src"
    failed_parts+=("$1")
    return
  fi
  # A case takes some ten times as long as without a sanitizer. So there are fewer of the grid and fewer random ones. The tests
  # that break results (`broken_...`) are about the tolerance, and take longest.
  run "$1" env RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=$1" \
    HATTN_TEST_GRID="${HATTN_TEST_GRID:-small}" PROPTEST_CASES="${PROPTEST_CASES:-16}" \
    cargo test -Zbuild-std --target "$host" --target-dir "$folder/$1" --no-fail-fast \
    -p hopper-attention -p hopper-attention-capi -p hopper-attention-tests --lib \
    --test api --test raw --test run --test backward --test fp8 --test quantize --test shared_buffer --test uninitialised \
    --test cpu --test capi --test capi_fp8 -- --show-output --skip broken_
}

miri() {
  local toolchain
  for toolchain in "" +nightly; do
    if cargo ${toolchain:+"$toolchain"} miri --version >/dev/null 2>&1; then
      # - Addresses become numbers in RawArgs and pointers again in a run: provenance is permissive.
      # - The threads of rayon outlive the tests.
      # - crossbeam, below rayon, keeps to tree borrows, but not to the older stacked borrows.
      # - Results of the same numbers are compared, so `exp` and `ln` must not vary.
      # - A slice of uninitialised elements is an error, though nothing reads them.
      local flags=(-permissive-provenance -ignore-leaks -tree-borrows -deterministic-floats -recursive-validation
        -disable-isolation)
      local miri=(env MIRIFLAGS="${flags[*]/#/-Zmiri}" PROPTEST_CASES=1
        cargo ${toolchain:+"$toolchain"} miri test --target-dir "$folder/miri" --no-fail-fast)
      run miri "${miri[@]}" -p hopper-attention -p hopper-attention-capi --lib -- \
        cpu::host cpu::matmul layout tensor workspace abi handle status
      # The random problems of tests/run.rs take too long.
      run miri "${miri[@]}" -p hopper-attention --test raw --test run --test shared_buffer --test uninitialised -- \
        --skip results_keep_the_tolerance
      return
    fi
  done
  echo "== miri: skipped: there is no cargo-miri"
  skipped_parts=$((skipped_parts + 1))
}

for part in "${wanted[@]}"; do
  : >"$folder/$part.log"
  case $part in
    miri) miri ;;
    *) sanitizer "$part" ;;
  esac
done

logs=("${wanted[@]/%/.log}")
read -r passed failed skipped < <(cat "${logs[@]/#/"$folder"/}" | awk -f scripts/count_tests.awk)
[ "$failed" -gt 0 ] || failed=${#failed_parts[@]}
echo "$passed passed, $failed failed, $((skipped + skipped_parts)) skipped"
[ ${#failed_parts[@]} -eq 0 ]
