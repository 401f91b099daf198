#!/usr/bin/env bash
# Everything that a machine without a GPU can check, from a bare checkout: tools, formatting, lints, licences, documentation, the
# tests without CUDA, the kernels' build, the tests with CUDA and the disassembly audit, the C library and what links it, the
# bench of instruction rates, the packages. Logs are in the target folder's test-logs/.
# Its last line sums the tests: "N passed, N failed, N skipped". Tests that need a GPU say so and count as skipped.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

logs=${CARGO_TARGET_DIR:-target}/test-logs
started=$SECONDS
failed_steps=()
terminal=0
[ ! -t 1 ] || terminal=1
# Nothing is edited between builds here: incremental compilation only costs.
export CARGO_INCREMENTAL=0

# step NAME COMMAND...: runs it, keeps its output, and notes a failure without stopping.
step() {
  local name=$1 since=$SECONDS
  shift
  echo
  echo "== $name: $(echo "$*" | cut -c 1-120)"
  "$@" 2>&1 | tee "$logs/$name.log" | awk -v terminal="$terminal" -f scripts/progress.awk
  if [ "${PIPESTATUS[0]}" -eq 0 ]; then
    echo "== $name: ok ($((SECONDS - since)) s)"
    return
  fi
  failed_steps+=("$name")
  echo "== $name: FAILED ($((SECONDS - since)) s), from $logs/$name.log:"
  complaint "$name" 100
}

# complaint NAME LINES: what a failed step said of it.
complaint() {
  if grep -q '^failures:' "$logs/$1.log"; then
    sed -n '/^failures:/,/^test result/p' "$logs/$1.log" | tail -n "$2"
  else
    { grep -A 60 -E '^test .* FAILED|^error|panicked at' "$logs/$1.log" || cat "$logs/$1.log"; } | tail -n "$2"
  fi
}

# clang-format's versions disagree with each other: the one that the sources were formatted with, or none.
check_clang_format() {
  local version=14 have
  if ! command -v clang-format >/dev/null; then
    echo "== clang-format: skipped, it is not installed"
    return
  fi
  have=$(clang-format --version | grep -oE '[0-9]+' | head -n 1)
  if [ "$have" != $version ]; then
    echo "== clang-format: skipped, it is version $have and the sources are formatted with $version"
    return
  fi
  local files
  mapfile -t files < <(find crates examples benches -name target -prune -o -regex '.*\.\(h\|hpp\|cu\|c\|cc\|cpp\)' -print |
    grep -v 'include/hopper_attention\.h$') # made by cbindgen
  step clang-format clang-format --dry-run --Werror "${files[@]}"
}

scripts/bootstrap.sh --test || exit 1
mkdir -p "$logs"
rm -f "$logs"/*.log

step format cargo fmt --all --check
check_clang_format
deny=${HATTN_TOOLCHAIN_DIR:-.toolchain}/bin/cargo-deny
if [ -x "$deny" ]; then
  step fetch cargo fetch --locked
  step licences "$deny" --offline check licenses bans sources
else
  echo "== licences: skipped, there is no cargo-deny for this machine"
fi

# Without CUDA: nothing here asks for a C++ compiler.
step clippy cargo clippy --workspace --exclude hopper-attention-sys --all-targets -- -D warnings
step test cargo test --workspace --exclude hopper-attention-sys --no-fail-fast -- --show-output

# With CUDA, always for the whole workspace: another selection of packages is another set of features to Cargo, and would
# compile the kernels again. The grid on the CPU, the training and the dependency rules do not change with the feature, and have
# just run.
targets=()
for name in $(for file in {crates/*,benches,tests,examples/*}/tests/{*.rs,*/main.rs}; do
  [ ! -e "$file" ] || basename "${file%/main.rs}" .rs
done | sort -u); do
  case $name in cpu | cpu_backward | dependencies | training) ;; *) targets+=(--test "$name") ;; esac
done
step clippy-cuda cargo clippy --workspace --features cuda --all-targets -- -D warnings
step test-cuda cargo test --workspace --features cuda --lib --bins "${targets[@]}" --no-fail-fast -- --show-output
step test-cuda-doc cargo test --workspace --features cuda --doc --no-fail-fast
# The library for C and C++ of what is built by now: the same packages and targets again, so that nothing is compiled twice.
step test-capi env HATTN_TEST_CARGO_FLAGS="--workspace ${targets[*]}" \
  HATTN_TEST_CPU_CARGO_FLAGS="--workspace --exclude hopper-attention-sys --tests" scripts/capi_test.sh
# The bench of instruction rates, as far as a machine without a GPU can judge it.
step rates scripts/rates.sh --build-only
# As docs.rs does it, which has no CUDA: looking for a toolkit would fail here. hattn's comments are its help text, not rustdoc.
step docs env DOCS_RS=1 HATTN_CUDA_HOME=/nonexistent RUSTDOCFLAGS="-D warnings" \
  cargo doc --workspace --exclude hopper-attention-cli --features cuda --no-deps
# What would be published: each package builds from its own files. The kernels are compiled from the checkout only.
# Cargo takes a packed crate that it has once unpacked or compiled to be the same for ever, as it would be had it come from a
# registry: what earlier runs left of ours goes first, or the packages would be checked against an older commit's.
packages=${CARGO_TARGET_DIR:-target}/packages
rm -rf "${CARGO_HOME:-$HOME/.cargo}"/registry/src/-*/hopper-attention-*
rm -rf "$packages"/debug/.fingerprint/hopper-attention-*
unpublished=(--exclude hopper-attention-tests --exclude hopper-attention-example-cudarc)
step package env HATTN_NO_KERNELS=1 cargo package --workspace "${unpublished[@]}" --locked --allow-dirty --target-dir "$packages"

read -r passed failed skipped < <(cat "$logs"/test*.log | awk -f scripts/count_tests.awk)
gpu=$(cat "$logs"/test*.log | grep -c 'skipped: no GPU')
echo
echo "took $((SECONDS - started)) s"
[ "$gpu" -eq 0 ] || echo "$gpu tests need a GPU and were skipped: run scripts/gpu_test.sh on a machine with one"
status=0
if [ ${#failed_steps[@]} -gt 0 ]; then
  # Once more where a long log ends.
  for name in "${failed_steps[@]}"; do
    echo "== $name failed:"
    complaint "$name" 40
  done
  echo "failed: ${failed_steps[*]}"
  status=1
  # A step that failed without a test's result line (a lint, a build) is a failure all the same.
  [ "$failed" -gt 0 ] || failed=${#failed_steps[@]}
fi
if [ "$passed" -le 0 ]; then
  echo "no test ran"
  status=1
fi
echo "$passed passed, $failed failed, $skipped skipped"
exit $status
