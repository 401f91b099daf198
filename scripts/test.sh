#!/usr/bin/env bash
# Everything that a machine without a GPU can check, from a bare checkout: tools, formatting, lints, licences, documentation, the
# tests without CUDA, the adapters of integrations/, the kernels' build, the tests with CUDA and the disassembly audit, the C
# library and what links it, the Python package and its wheel, the bench of instruction rates, the packages. Logs are in the
# target folder's test-logs/.
# Its last line sums the tests: "N passed, N failed, N skipped". Tests that need a GPU say so and count as skipped.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

target=${CARGO_TARGET_DIR:-target}
logs=$target/test-logs
started=$SECONDS
failed_steps=()
terminal=0
[ ! -t 1 ] || terminal=1
# The oracle takes most of the time of the CPU's tests: of their longest lists a fifth is enough here. The tests on a GPU take
# every case, and so does `HATTN_TEST_EVERY=1`.
export HATTN_TEST_EVERY=${HATTN_TEST_EVERY:-5}
# No machine here runs sm80's machine code for GPUs of 8.x, which is a quarter of that kernels' compilation. It is of the same PTX.
export HATTN_SM80_CODES=${HATTN_SM80_CODES:-sm_90,compute_80}
# Nothing is edited between builds here, so incremental compilation only costs time.
export CARGO_INCREMENTAL=0

# read_times: sets `spent`, the seconds of processor time that finished commands have taken.
read_times() {
  times >"$logs/times" # counts this shell's children; in a subshell it would count the subshell's
  spent=$(awk 'NR == 2 { split($0, t, /[ms ]+/); print int(t[1] * 60 + t[2] + t[3] * 60 + t[4]) }' "$logs/times")
}

# step NAME COMMAND...: runs it, keeps its output, and notes a failure without stopping.
step() {
  local name=$1 since=$SECONDS before
  read_times
  before=$spent
  shift
  echo
  echo "== $name: $(echo "$*" | cut -c 1-120)"
  "$@" 2>&1 | tee "$logs/$name.log" | awk -v terminal="$terminal" -f scripts/progress.awk
  if [ "${PIPESTATUS[0]}" -eq 0 ]; then
    read_times
    echo "== $name: ok ($((SECONDS - since)) s, $((spent - before)) s of processor time)"
    return
  fi
  failed_steps+=("$name")
  echo "== $name: FAILED ($((SECONDS - since)) s), from $logs/$name.log:"
  complaint "$name" 100
}

# complaint NAME LINES: prints the last lines that say why a step failed.
complaint() {
  if grep -q '^failures:' "$logs/$1.log"; then
    sed -n '/^failures:/,/^test result/p' "$logs/$1.log" | tail -n "$2"
  else
    { grep -A 60 -E '^test .* FAILED|^error|panicked at' "$logs/$1.log" || cat "$logs/$1.log"; } | tail -n "$2"
  fi
}

# free_disk: the megabytes that the disk has left.
free_disk() { df --output=avail -m "$target" | tail -n 1 | tr -d ' '; }
# spare_disk FOLDER...: where the disk has less than HATTN_TEST_FREE_MB megabytes left, removes these folders' test programs, which have
# run, and lints' results. Another run of this script makes them again.
spare_disk() {
  local before
  before=$(free_disk)
  [ "$before" -lt "${HATTN_TEST_FREE_MB:-20000}" ] || return 0
  rm -rf "$target/integrations-lint"
  find "$@" -maxdepth 1 -type f -perm -u+x ! -name '*.so' -size +1M -delete
  echo "== disk: it had $before MB left, and has $(free_disk) MB without programs that have run"
}

# Versions of clang-format disagree with each other. So only the one that the sources were formatted with is used.
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
  mapfile -t files < <(find crates examples benches python -name target -prune -o -regex '.*\.\(h\|hpp\|cu\|c\|cc\|cpp\)' -print |
    grep -v 'include/hopper_attention\(_lists\)\?\.h$') # made by cbindgen
  step clang-format clang-format --dry-run --Werror "${files[@]}"
}

scripts/bootstrap.sh --test || exit 1
mkdir -p "$logs"
rm -f "$logs"/*.log
touch "$logs/started"

step format cargo fmt --all --check
step format-integrations cargo fmt --manifest-path integrations/Cargo.toml --all --check
check_clang_format
deny=${HATTN_TOOLCHAIN_DIR:-.toolchain}/bin/cargo-deny
if [ -x "$deny" ]; then
  step fetch cargo fetch --locked
  step licences "$deny" --offline check licenses bans sources
  step fetch-integrations cargo fetch --locked --manifest-path integrations/Cargo.toml
  step licences-integrations "$deny" --manifest-path integrations/Cargo.toml --offline --config deny.toml \
    check licenses bans sources
else
  echo "== licences: skipped, there is no cargo-deny for this machine"
fi

# Without CUDA: these steps need no C++ compiler. The lints with CUDA, below, take the tests, too.
step clippy cargo clippy --workspace --exclude hopper-attention-sys -- -D warnings
# Q, K and V of the layers of a trained model, for the tests of accuracy.
step layers python3 scripts/make_fixture.py --layers "$target/layers"
step test env HATTN_LAYERS="$(realpath "$target")/layers" \
  cargo test --workspace --exclude hopper-attention-sys --no-fail-fast -- --show-output

# The command of the README, and what it installs. It has the tests' profile and target folder, for which most crates
# have been compiled. They are here, so it asks no registry.
install_cli() {
  local root=$target/installed files
  files=$(mktemp -d) || return
  rm -rf "$root"
  cargo install --path crates/hopper-attention-cli --root "$root" --locked --offline --debug --target-dir "$target" &&
    "$root/bin/hattn" info &&
    "$root/bin/hattn" random --output "$files/qkv.safetensors" --seqlen-q 128 --heads-q 2 --backward &&
    "$root/bin/hattn" run --input "$files/qkv.safetensors" --output "$files/o.safetensors" --backward &&
    "$root/bin/hattn" check --input "$files/qkv.safetensors" --mask causal --backward &&
    "$root/bin/hattn" bench --device cpu --tokens 32 --hidden 64 --seqlens 32 --dims 32 --dtypes bf16 --iters 3
  local status=$?
  rm -rf "$files"
  return $status
}
step install-cli install_cli
# The C and C++ library, made of what is built by now. The flags select the same packages and targets, so nothing is compiled twice.
step test-capi-sources env HATTN_TEST_CPU_CARGO_FLAGS="--workspace --exclude hopper-attention-sys --tests" \
  scripts/capi_test.sh --only sources

# The adapters for candle, a workspace of their own, with the weights of a real model. The lints take candle's and our CUDA code,
# and no nvcc.
integrations=(--manifest-path integrations/Cargo.toml --workspace --locked)
step model python3 scripts/make_fixture.py --model "$target/minilm"
step test-integrations env HATTN_MINILM_DIR="$(realpath "$target")/minilm" \
  cargo test "${integrations[@]}" --no-default-features --no-fail-fast -- --show-output
step clippy-integrations env HATTN_NO_KERNELS=1 NVCC="$PWD/scripts/candle_nvcc.sh" CUDA_COMPUTE_CAP=90 CUDARC_CUDA_VERSION=13000 \
  cargo clippy "${integrations[@]}" --features hopper-attention-integration-tests/cuda --all-targets \
  --target-dir "$target/integrations-lint" -- -D warnings

spare_disk "$target/debug/deps" "$target/debug/examples" integrations/target/debug/deps

# With CUDA. Always for the whole workspace: to Cargo another selection of packages is another set of features, and it would
# compile the crates again. Left out are tests that have just run and do the same with the feature: what runs on the CPU, what must
# not compile, the dependency rules. Each test program with the feature holds all kernels: a small disk does not hold more.
# Lints need no kernels. (To Cargo, Clippy's build script is not that of the tests, so the variable does not disturb them.)
targets=()
for name in $(for file in {crates/*,benches,tests,examples/*}/tests/{*.rs,*/main.rs}; do
  [ ! -e "$file" ] || basename "${file%/main.rs}" .rs
done | sort -u); do
  case $name in
    accuracy | capi | capi_fp8 | capi_packed | cpu | cpu_* | edges | fp8_accuracy | fp8_long | training | visits) ;; # tests/
    backward | empty | raw | run) ;; # crates/hopper-attention
    alibi | bias | block_lists | blocks | compile_fail | dropout | no_memory | packed_fp8 | processes) ;;
    quantize | range | shared_buffer | sinks | softcap | uninitialised) ;;
    dependencies | fuzz_files) ;;
    *) targets+=(--test "$name") ;;
  esac
done
step clippy-cuda env HATTN_NO_KERNELS=1 cargo clippy --workspace --features cuda --all-targets -- -D warnings
step test-cuda cargo test --workspace --features cuda --lib --bins "${targets[@]}" --no-fail-fast -- --show-output
step test-cuda-doc cargo test --workspace --features cuda --doc --no-fail-fast
spare_disk "$target/debug/deps"
# One test of the workspace stands for all: with it Cargo selects the features that the tests had, and compiles nothing again.
step test-capi env HATTN_TEST_CARGO_FLAGS="--workspace --test header" scripts/capi_test.sh --only installed
# What is written in C++ for torch, with the library that the step before has installed.
step test-torch scripts/torch_test.sh "$target/capi-test/installed/moved/prefix"
# The Python package and its wheel, made of the library that the last step installed.
step test-python scripts/python_test.sh "$target/capi-test/installed/moved/prefix"
# The bench of instruction rates. Without a GPU it is compiled and its disassembly is checked.
step rates scripts/rates.sh --build-only
# Documentation as docs.rs makes it, without CUDA: with this CUDA home, a search for a toolkit fails. The CLI is left out because
# its comments are its help text. The wrapper does nothing; with one, Cargo keeps these build scripts' results apart from the tests'.
step docs env DOCS_RS=1 HATTN_CUDA_HOME=/nonexistent RUSTDOCFLAGS="-D warnings" RUSTC_WORKSPACE_WRAPPER="$(command -v env)" \
  cargo doc --workspace --exclude hopper-attention-cli --features cuda --no-deps
# What would be published: each package builds from its own files, without kernels.
# Cargo assumes that a packed crate of one version never changes. So what earlier runs left is removed first: else the packages
# would be checked against those of an older commit.
packages=$target/packages
rm -rf "${CARGO_HOME:-$HOME/.cargo}"/registry/src/-*/hopper-attention-*
rm -rf "$packages"/debug/.fingerprint/hopper-attention-*
unpublished=(--exclude hopper-attention-tests --exclude hopper-attention-example-cudarc)
step package env HATTN_NO_KERNELS=1 CARGO_PROFILE_DEV_DEBUG=false cargo package --workspace "${unpublished[@]}" --locked --allow-dirty --target-dir "$packages"

# No kernel was compiled more than once by the steps above. nvcc's log lies beside every object.
compiled_once() {
  local objects folders again
  objects=$(find "$(realpath "$target")" ${HATTN_KERNELS_DIR:+"$HATTN_KERNELS_DIR"} -name '*.cu.o.log' -newer "$logs/started" | sort -u)
  folders=$(sed -n 's|/CMakeFiles/.*||p' <<<"$objects" | sort -u)
  echo "$(grep -c . <<<"$objects") sources of kernels were compiled, in $(grep -c . <<<"$folders") build folders"
  again=$(sed -n 's|.*/||p' <<<"$objects" | sort | uniq -d)
  [ -z "$again" ] || { printf 'error: compiled more than once, in the folders\n%s\nthe sources\n%s\n' "$folders" "$again" && return 1; }
}
step kernels-once compiled_once

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
