#!/usr/bin/env bash
# The tests of integrations/ that need a GPU: candle's tensors, candle-transformers' models and a training.
#   scripts/candle_gpu_test.sh --pack [DIR]     builds them and packs them into DIR (default dist/candle), to be carried to a GPU
#   DIR/candle_gpu_test.sh --from DIR           runs such a folder
# Needs for --pack: cargo, python3, a C++ compiler, and what scripts/bootstrap.sh brings. Needs for --from: the driver, and the
# CUDA libraries libcublas, libcurand and libnvrtc of CUDA 13, on the loader's path or in a Python package of nvidia's.
# Options for --from: --log FILE (default candle_gpu_test.log in the folder).
# A missing GPU is a failure here, not a skip. The last line sums the tests: "N passed, N failed, N skipped".
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
  echo "candle_gpu_test: $*" >&2
  exit 1
}
usage() {
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
  exit "$1"
}

pack="" from="" log=""
while [ $# -gt 0 ]; do
  case $1 in
    --pack)
      pack=dist/candle
      if [ $# -gt 1 ] && [ "${2#--}" = "$2" ]; then pack=$2 && shift; fi
      ;;
    --from) from=${2:?--from takes a folder} && shift ;;
    --log) log=$(realpath -m -- "${2:?--log takes a file}") && shift ;;
    -h | --help) usage 0 ;;
    *) usage 1 >&2 ;;
  esac
  shift
done

# stubs FOLDER: libraries to link with. candle has cudarc link the CUDA libraries, which a machine without a GPU lacks. The stubs
# have their names and the names of their functions. Where the tests run, the loader takes the real ones.
stubs() {
  local folder=$1 sources name soname library
  sources=$(cargo metadata --manifest-path integrations/Cargo.toml --format-version 1 --locked |
    python3 -c 'import json, os, sys
print(next(os.path.dirname(p["manifest_path"]) for p in json.load(sys.stdin)["packages"] if p["name"] == "cudarc"))')/src
  mkdir -p "$folder"
  while read -r name library soname; do
    grep -hoE '^pub unsafe fn [A-Za-z0-9_]+\(' "$sources/$name/sys/mod.rs" | sed 's/pub unsafe fn //;s/($//' | sort -u |
      awk '{ print "void " $1 "(void) {}" }' >"$folder/$library.c"
    [ -s "$folder/$library.c" ] || fail "cudarc's sources name no function of $library."
    "${CC:-cc}" -shared -fPIC -w -fno-builtin -Wl,-soname,"$soname" -o "$folder/$library.so" "$folder/$library.c"
  done <<'LIBRARIES'
driver libcuda libcuda.so.1
cublas libcublas libcublas.so.13
cublaslt libcublasLt libcublasLt.so.13
curand libcurand libcurand.so.10
nvrtc libnvrtc libnvrtc.so.13
LIBRARIES
}

# Builds the test binary and copies it into a folder, with the model and what is needed to run both.
pack_into() {
  local folder=$1 toolkit package kind name executable
  cd "$here/.."
  scripts/bootstrap.sh
  toolkit=${HATTN_TOOLCHAIN_DIR:-$PWD/.toolchain}/cuda
  if [ -x "$toolkit/bin/nvcc" ]; then
    export PATH=$toolkit/bin:$PATH LIBRARY_PATH=$toolkit/lib64${LIBRARY_PATH:+:$LIBRARY_PATH}
  fi
  command -v nvcc >/dev/null || fail "nvcc is missing: candle's kernels are compiled with it."
  stubs "$PWD/target/candle-stubs"
  export LIBRARY_PATH=$PWD/target/candle-stubs${LIBRARY_PATH:+:$LIBRARY_PATH}
  CANDLE_REAL_NVCC=$(command -v nvcc)
  # Without kernels that no test calls. What is made without them must not be taken for a whole build: hence the target folder.
  export CANDLE_REAL_NVCC NVCC=$PWD/scripts/candle_nvcc.sh
  export CUDA_COMPUTE_CAP=90 CUDARC_CUDA_VERSION=13000 HATTN_KERNELS_DIR=${HATTN_KERNELS_DIR:-$PWD/target/kernels}
  mkdir -p "$folder"
  rm -rf "${folder:?}"/{*.test.gz,*.log,minilm,about.txt}
  cargo test --no-run --manifest-path integrations/Cargo.toml -p hopper-attention-integration-tests --features cuda \
    --test gpu --locked --target-dir "${CARGO_TARGET_DIR:-target}/candle-gpu" \
    --message-format json-render-diagnostics | python3 scripts/built_programs.py |
    while IFS=$'\t' read -r package kind name executable; do
      if [ "$kind-$name" = test-gpu ]; then cp "$executable" "$folder/candle.test"; fi
    done
  [ -e "$folder/candle.test" ] || fail "cargo did not name the test binary."
  strip "$folder/candle.test"
  gzip -9 -f "$folder/candle.test" # candle's code and PTX, a quarter of the size
  cp "$here/candle_gpu_test.sh" "$here/count_tests.awk" "$folder/"
  python3 scripts/make_fixture.py --model "$folder/minilm" --small
  {
    echo "commit: $(git rev-parse HEAD 2>/dev/null || echo unknown)$(git diff --quiet HEAD 2>/dev/null || echo ', with changes')"
    echo "built: $(date -u +%Y-%m-%dT%H:%M:%SZ) with $(cargo --version)"
  } >"$folder/about.txt"
}

# The folders of the CUDA libraries in the Python packages of nvidia's, with colons between.
python_libraries() {
  python3 -c 'import glob, site
roots = site.getsitepackages() + [site.getusersitepackages()]
print(":".join(sorted(folder for root in roots for folder in glob.glob(root + "/nvidia/*/lib"))))' 2>/dev/null || true
}

# Runs the tests of a folder, one at a time: they share one GPU.
run_from() {
  local status=0 libraries passed failed skipped
  cd "$1"
  log=${log:-$PWD/candle_gpu_test.log}
  mkdir -p "$(dirname "$log")"
  [ -e candle.test.gz ] || fail "$1 holds no candle.test.gz: pack it with scripts/candle_gpu_test.sh --pack."
  program=$(mktemp) # the folder may be read-only
  trap 'rm -f "$program"' EXIT
  gzip -dc candle.test.gz >"$program"
  chmod +x "$program"
  libraries=$(python_libraries)
  export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64${libraries:+:$libraries}
  export HATTN_REQUIRE_GPU=1 HATTN_MINILM_DIR=$PWD/minilm
  {
    cat about.txt
    echo "ran: $(date -u +%Y-%m-%dT%H:%M:%SZ)"
    nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv,noheader 2>/dev/null || echo "no nvidia-smi"
  } | tee "$log"
  "$program" --test-threads=1 --nocapture 2>&1 | tee -a "$log" || status=1
  read -r passed failed skipped < <(awk -f count_tests.awk "$log")
  # A binary that crashed prints no result line. That is a failure, and so is a run without a test.
  [ $status = 0 ] || [ "$failed" -gt 0 ] || failed=1
  [ "$passed" -gt 0 ] && [ "$failed" = 0 ] || status=1
  echo "$passed passed, $failed failed, $skipped skipped" | tee -a "$log"
  exit $status
}

if [ -n "$pack" ]; then
  case $pack in /*) ;; *) pack=$PWD/$pack ;; esac
  pack_into "$pack"
  echo "candle_gpu_test: packed $(du -sh "$pack" | cut -f1) into $pack; there: $pack/candle_gpu_test.sh --from $pack"
elif [ -n "$from" ]; then
  run_from "$from"
else
  usage 1 >&2
fi
