#!/usr/bin/env bash
# The tests that need a Hopper GPU. Packed, they need only a driver where they run: no Rust and no toolkit. This script is in the
# pack, too.
#   scripts/gpu_test.sh                  builds and runs them here
#   scripts/gpu_test.sh --pack [DIR]     builds them and packs the binaries into DIR (default dist/gpu), to be carried to a GPU
#   DIR/gpu_test.sh --from DIR           runs such a folder
# Option for a pack: --with FILE (repeatable) adds a file that was built elsewhere, and runs it too. FILE is libhopper_attention.so
# (which the Python package uses, if python3 has torch), or a program such as those of examples/cpp and examples/multithread.
# Options for a run: --memcheck (under compute-sanitizer, with a reduced grid, without Python), --log FILE (default
# gpu_test.log in the folder; the suite's figures go beside it as .json, the comparison with torch as .sdpa.json), --jobs N (N tests
# at a time, each in a process of its own: the oracle takes most of the time, on the CPU. 12 on 16 cores take about 18 minutes. Beside
# the log, .results has a line for each test: binary, test, exit status, seconds. If the run is broken off and begun again, tests
# that have passed are not run again).
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

pack="" from="" memcheck=0 log="" jobs=1 with=()
while [ $# -gt 0 ]; do
  case $1 in
    --pack)
      pack=dist/gpu
      if [ $# -gt 1 ] && [ "${2#--}" = "$2" ]; then pack=$2 && shift; fi
      ;;
    --with) with+=("$(realpath -e -- "${2:?--with takes a file}")") && shift ;;
    --from) from=${2:?--from takes a folder} && shift ;;
    --memcheck) memcheck=1 ;;
    --jobs)
      jobs=${2:?--jobs takes a number} && shift
      [[ $jobs =~ ^[1-9][0-9]*$ ]] || fail "--jobs $jobs; allowed: whole numbers from 1 on."
      ;;
    --log) log=$(realpath -m -- "${2:?--log takes a file}") && shift ;;
    -h | --help) usage 0 ;;
    *) usage 1 >&2 ;;
  esac
  shift
done

# Builds the test binaries and copies them into a folder, with what is needed to run them and to say what they are.
pack_into() {
  local folder=$1 source package kind name executable
  cd "$here/.."
  scripts/bootstrap.sh
  mkdir -p "$folder/pytorch"
  # (Results are of the binaries that go: with them --jobs would pass over tests of the new ones.)
  rm -rf "$folder"/{*.test,*.log,*.json,*.results,*.outputs,*.so*,example_*,hattn,about.txt}
  # Whatever needs a GPU is in a test target of this name, in whichever package.
  local packages=()
  for source in {tests,crates/*,examples/*}/tests/gpu{.rs,/main.rs}; do
    [ -e "$source" ] || continue
    packages+=(-p "$(sed -n 's/^name = "\(.*\)"/\1/p' "${source%%/tests/gpu*}/Cargo.toml" | head -n 1)")
  done
  cargo test --no-run --profile gputest --features cuda "${packages[@]}" --test gpu \
    --message-format json-render-diagnostics | python3 scripts/built_programs.py |
    while IFS=$'\t' read -r package kind name executable; do
      # Of the binaries, the tests run hattn alone.
      case $kind-$name in
        test-gpu) cp "$executable" "$folder/$package.test" ;;
        bin-hattn) cp "$executable" "$folder/hattn" ;;
      esac
    done
  [ "$(compgen -G "$folder/*.test" | wc -l)" = $((${#packages[@]} / 2)) ] || fail "cargo did not name every test binary."
  [ -e "$folder/hattn" ] || fail "cargo did not name hattn."
  cp "$here/gpu_test.sh" "$here/count_tests.awk" fixtures/minilm_layer3.safetensors "$folder/"
  python3 "$here/make_fixture.py" --layers "$folder/layers"
  cp examples/pytorch/*.py "$folder/pytorch/"
  rm -rf "$folder/python"
  mkdir -p "$folder/python/hopper_attention"
  cp python/hopper_attention/*.py "$folder/python/hopper_attention/"
  cp -r python/tests "$folder/python/"
  [ ! -e python/torch_op/build.sh ] || python/torch_op/build.sh "$folder/python/hopper_attention/_torch_op.so"
  for source in "${with[@]}"; do
    name=$(basename "$source")
    case $name in
      libhopper_attention.so*) name=libhopper_attention.so ;;
      *) name=example_${name#example_} ;;
    esac
    cp -L "$source" "$folder/$name"
    # What travels is small; a file without symbols is as good.
    strip --strip-unneeded "$folder/$name" 2>/dev/null || true
  done
  {
    echo "commit: $(git rev-parse HEAD 2>/dev/null || echo unknown)$(git diff --quiet HEAD 2>/dev/null || echo ', with changes')"
    echo "built: $(date -u +%Y-%m-%dT%H:%M:%SZ) with $(cargo --version)"
  } >"$folder/about.txt"
}

# program COMMAND...: runs a program as one test. Its exit code decides. The last line has Cargo's form, so that it is counted. The
# log's folder is left out of what is printed, since logs are committed as records.
program() {
  echo "== ${*//"${log%/*}/"/}"
  if "$@" 2>&1; then
    echo "test result: ok. 1 passed; 0 failed"
  else
    echo "test result: FAILED. 0 passed; 1 failed"
  fi
}

# Runs the files that --with added.
run_programs() {
  local name
  if [ -e libhopper_attention.so ]; then
    # The name that the loader looks for. It is made here, because not every way of copying a pack keeps links.
    ln -sf libhopper_attention.so libhopper_attention.so.1
  fi
  export LD_LIBRARY_PATH=$PWD${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} HOPPER_ATTENTION_LIBRARY=$PWD/libhopper_attention.so
  for name in example_*; do
    [ -e "$name" ] || continue
    chmod +x "$name"
    program "$@" "./$name"
  done
  if [ ! -e libhopper_attention.so ]; then
    echo "no libhopper_attention.so in the pack: the Python package was not run"
  elif [ $# -gt 0 ]; then
    echo "the Python package is not run under $1"
  elif ! python3 -c 'import torch' 2>/dev/null; then
    echo "python3 has no torch here: the Python package was not run"
  else
    # Prints a result line of its own. The second one counts a run that ended without.
    python3 python/tests/run.py --need torch 2>&1 || echo "test result: FAILED. 0 passed; 1 failed"
    PYTHONPATH=$PWD/python program python3 pytorch/compare_sdpa.py --device cuda --gradients --json "${log%.log}.sdpa.json"
  fi
}

# These look at all of the GPU's memory, of which other tests take some.
alone=(allocations::runs_allocate_no_device_memory)

# run_one BINARY TEST: runs a test in a process of its own, and notes what came of it.
run_one() {
  local since=$SECONDS status=0
  # (A command's words, or none.)
  # shellcheck disable=SC2086
  $wrapped "./$1" --exact "$2" --nocapture >"$outputs/$1.${2//::/.}.txt" 2>&1 || status=$?
  echo "$1 $2 $status $((SECONDS - since))" >>"$results"
}

# run_side_by_side BINARY: runs the tests that have not passed yet, $jobs at a time. Fails if one fails.
run_side_by_side() {
  local left name
  touch "$results"
  left=$("./$1" --list 2>/dev/null | sed -n 's/: test$//p' |
    grep -vxF -f <(awk -v binary="$1" '$1 == binary && $3 == 0 { print $2 }' "$results") || true)
  grep -vxF -f <(printf '%s\n' "${alone[@]}") <<<"$left" | xargs -r -P "$jobs" -I{} bash -c 'run_one "$@"' _ "$1" {}
  for name in "${alone[@]}"; do
    ! grep -qxF "$name" <<<"$left" || run_one "$1" "$name"
  done
  cat "$outputs/$1".*.txt
  # Of a test that ran twice the later line counts.
  ! awk -v binary="$1" '$1 == binary { status[$2] = $3 } END { for (name in status) if (status[name]) print binary, name, "failed" }' \
    "$results" | grep .
}

# Runs the binaries of a folder, one test at a time where --jobs does not say otherwise: they share one GPU.
run_from() {
  local folder=$1 binary status=0
  cd "$folder"
  log=${log:-$PWD/gpu_test.log}
  mkdir -p "$(dirname "$log")"
  compgen -G "*.test" >/dev/null || fail "$folder holds no *.test: pack it with scripts/gpu_test.sh --pack."
  local wrap=()
  if [ $memcheck = 1 ]; then
    command -v compute-sanitizer >/dev/null || PATH=$PATH:/usr/local/cuda/bin
    command -v compute-sanitizer >/dev/null || fail "compute-sanitizer is missing: it comes with the CUDA toolkit."
    wrap=(compute-sanitizer --tool memcheck --error-exitcode 1)
    export HATTN_TEST_GRID=${HATTN_TEST_GRID:-small}
  fi
  export HATTN_REQUIRE_GPU=1 HATTN_LAYERS=$PWD/layers HATTN_TEST_PACK=$PWD HATTN_TEST_RECORD=${HATTN_TEST_RECORD:-${log%.log}.json}
  {
    cat about.txt
    echo "ran: $(date -u +%Y-%m-%dT%H:%M:%SZ), grid ${HATTN_TEST_GRID:-full}${wrap[*]:+, under ${wrap[*]}}"
    nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv,noheader 2>/dev/null || echo "no nvidia-smi"
  } | tee "$log"
  chmod +x ./*.test hattn
  if [ "$jobs" -gt 1 ]; then
    export results=${log%.log}.results outputs=${log%.log}.outputs wrapped=${wrap[*]}
    # Somewhat more threads than cores, as a test waits for the GPU, too.
    export RAYON_NUM_THREADS=$((($(nproc) * 3 / 2 + jobs - 1) / jobs))
    export -f run_one
    mkdir -p "$outputs"
  fi
  for binary in *.test; do
    echo "== $binary" | tee -a "$log"
    if [ "$jobs" -gt 1 ]; then
      run_side_by_side "$binary" 2>&1 | tee -a "$log" || status=1
    else
      "${wrap[@]}" "./$binary" --test-threads=1 --nocapture 2>&1 | tee -a "$log" || status=1
    fi
  done
  run_programs "${wrap[@]}" | tee -a "$log" || status=1
  local passed failed skipped
  read -r passed failed skipped < <(awk -f count_tests.awk "$log")
  # A binary that crashed prints no result line. That is a failure, and so is a run without a test.
  [ $status = 0 ] || [ "$failed" -gt 0 ] || failed=1
  [ "$passed" -gt 0 ] && [ "$failed" = 0 ] || status=1
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
