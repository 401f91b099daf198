#!/usr/bin/env bash
# Tests the C and C++ library as users get it. CMake builds, installs and moves it. Projects outside the tree link it in every
# way that we promise. Needs no GPU. scripts/test.sh runs this script.
#
#   scripts/capi_test.sh [--cpu] [--only PART]
#     --cpu        the library without CUDA
#     --only PART  one of two parts. `installed`: the library is installed and found. `sources`: it is built beside its user.
#
# Environment:
#   CARGO_TARGET_DIR            as for cargo
#   HATTN_TEST_CARGO_FLAGS      more arguments for cargo build, so that scripts/test.sh can reuse what it has built
#   HATTN_TEST_CPU_CARGO_FLAGS  the same for libraries without CUDA
#
# Prints a line for each check. Logs are in capi-test/ in the target folder.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cuda=ON parts="installed sources"
while [ $# -gt 0 ]; do
  case $1 in
    --cpu) cuda=OFF ;;
    --only) parts=${2:?--only takes a part} && shift ;;
    *) echo "capi_test: unknown option $1" >&2 && exit 1 ;;
  esac
  shift
done

target=${CARGO_TARGET_DIR:-$root/target}
case $target in /*) ;; *) target=$PWD/$target ;; esac
toolchain=${HATTN_TOOLCHAIN_DIR:-$root/.toolchain}
PATH=$PATH:$toolchain/cmake/bin:$toolchain/bin
capi=$root/crates/hopper-attention-capi
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/Cargo.toml" | head -n 1)
work=$target/capi-test/${parts// /-and-}
build=$work/build-$cuda
prefix=$work/moved/prefix # where the installed files are moved to, and used
consumers=$work/consumers # the projects of users: copies of our examples and tests
logs=$work/logs
rm -rf "$work/installed" "$work/installed-top" "$work/moved" "$consumers" "$logs"
mkdir -p "$work/moved" "$consumers" "$logs"
export CARGO_TARGET_DIR=$target
unset CFLAGS CXXFLAGS LDFLAGS LD_LIBRARY_PATH

# No `grep -q` after a pipe: it ends early, and the writer fails.

source "$root/scripts/checks.sh"
finish() {
  result
  exit
}

# -- build, install, move

# DLPack's header, if scripts/bootstrap.sh has fetched it, is installed as `scripts/install.sh PREFIX --dlpack` does.
dlpack=() installed_dlpack=()
if [ -d "$toolchain/dlpack/include" ]; then
  dlpack=("-DHATTN_DLPACK_INCLUDE=$toolchain/dlpack/include") installed_dlpack=(./include/dlpack/dlpack.h)
fi
build_and_install() {
  cmake -S "$capi" -B "$build" -G Ninja -DHATTN_CUDA=$cuda -DHATTN_CARGO_PROFILE=dev "${dlpack[@]}" \
    "-DHATTN_CARGO_FLAGS=${HATTN_TEST_CARGO_FLAGS:-}" && cmake --build "$build" &&
    cmake --install "$build" --prefix "$work/installed" && mv "$work/installed" "$prefix"
}
# A second build leaves the library as it is, so that its users are not linked again.
build_again() {
  local before
  before=$(stat -c %y "$build"/lib/libhopper_attention.{a,so.*.*})
  cmake --build "$build" && [ "$before" = "$(stat -c %y "$build"/lib/libhopper_attention.{a,so.*.*})" ]
}
# install_tree PREFIX FILE...: exactly these files are installed, and no others than the ones below.
install_tree() {
  diff <(cd "$1" && find . -not -type d | sort) <(printf '%s\n' "${@:2}" | cat - <(expected_tree) | sed '/^$/d' | sort)
}
expected_tree() {
  cat <<TREE
./include/hopper_attention.h
./include/hopper_attention.hpp
./include/hopper_attention_dlpack.hpp
./include/hopper_attention_fp8.hpp
./include/hopper_attention_lists.h
./include/hopper_attention_lists.hpp
./include/hopper_attention_tensor.hpp
./lib/cmake/hopper_attention/hopper_attentionConfig.cmake
./lib/cmake/hopper_attention/hopper_attentionConfigVersion.cmake
./lib/libhopper_attention.a
./lib/libhopper_attention.so
./lib/libhopper_attention.so.$version
./lib/libhopper_attention.so.1
./lib/pkgconfig/hopper_attention-static.pc
./lib/pkgconfig/hopper_attention.pc
./share/doc/hopper_attention/LICENSE-APACHE
./share/doc/hopper_attention/LICENSE-MIT
./share/doc/hopper_attention/THIRD-PARTY-LICENSES.txt
TREE
}
# No installed text file names a folder of the build machine.
relocatable() { ! grep -rIn -e "$work" -e "$root" "$prefix/lib/cmake" "$prefix/lib/pkgconfig" "$prefix/include"; }
licences() {
  local file=$prefix/share/doc/hopper_attention/THIRD-PARTY-LICENSES.txt name
  for name in "matrixmultiply " "rayon " "the Rust standard library" $([ $cuda = ON ] && echo "CUTLASS"); do
    grep -q "^==== $name" "$file" || { echo "no '$name' in $file" && return 1; }
  done
}
archive() {
  (cd "$build" && cpack -G TGZ -B "$work/packages" && tar tzf "$work"/packages/*.tar.gz | grep 'lib/libhopper_attention.so.1$') &&
    rm -r "$work/packages"
}

# -- what the libraries are

so=$prefix/lib/libhopper_attention.so
a=$prefix/lib/libhopper_attention.a
dynamic() { readelf -dW "$so"; }
# The shared library exports exactly the committed list, under the version node. The archive has the same global symbols.
so_symbols() {
  diff <(nm -D --defined-only "$so" | awk '$2 != "A" { print $3 }' | sort) <(sed 's/$/@@HATTN_1/' "$capi/abi/symbols.txt" | sort)
}
a_symbols() { diff <(nm -g --defined-only "$a" | awk 'NF == 3 { print $3 }' | sort) <(sort "$capi/abi/symbols.txt"); }
header_symbols() {
  diff <(grep -ohE '\bhattn_[a-z_]+\(' "$prefix"/include/hopper_attention{,_lists}.h | tr -d '(' | sort -u) <(sort "$capi/abi/symbols.txt") | grep '^>' && return 1
  return 0
}
so_name() { dynamic | grep 'SONAME.*\[libhopper_attention\.so\.1\]'; }
so_hardened() {
  dynamic | grep 'FLAGS.*NOW' && readelf -lW "$so" | grep GNU_RELRO && readelf -lW "$so" | grep GNU_STACK | grep -v 'RWE' &&
    readelf -nW "$so" | grep 'Build ID' && ! dynamic | grep -E 'TEXTREL|RPATH|RUNPATH'
}
# The library needs only libraries that every Linux with glibc has. It loads the CUDA driver at run time.
so_needs() { ! dynamic | grep NEEDED | grep -vE '\[(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)|ld-linux-[a-z0-9_-]+)\.so\.[0-9]+\]'; }
undefined() {
  ! { nm -D --undefined-only "$so" && nm --undefined-only "$a"; } | awk '{ print $NF }' |
    grep -E '^(hattn_|cu[A-Z]|cuda|__cuda|_R|_ZN|__rust|rust_)' | grep -vE '^_ZN?K?St|^_ZNS'
}
# linked_archive NAME: the path at which CMake found an archive.
linked_archive() { tr '; ' '\n\n' <"$build/libraries.stamp" | grep "/$1\$"; }
# sections FILE NAME...: the total size in bytes of the sections with these names, in an object, an archive or a library.
sections() {
  local file=$1 names
  shift
  names=$(printf '|%s' "$@")
  readelf -SW "$file" | sed 's/^ *\[ *[0-9]*\] *//' | awk -v names="$names|" 'index(names, "|" $1 "|") { print "0x" $5 }' |
    while read -r size; do echo $((size)); done | awk '{ sum += $1 } END { print sum + 0 }'
}
# Kernels are registered by constructors that nothing refers to. The links must have kept all of them.
registration() {
  local kernels bytes file
  kernels=$(linked_archive libhattn_kernels.a)
  bytes=$(sections "$kernels" .nvFatBinSegment)
  [ "$bytes" -gt 0 ] || { echo "$kernels holds no kernels" && return 1; }
  for file in "$so" "$a"; do
    for section in .nvFatBinSegment .nv_fatbin; do
      echo "$file $section: $(sections "$file" $section), in the kernels' archive $(sections "$kernels" $section)"
      [ "$(sections "$file" $section)" -ge "$(sections "$kernels" $section)" ] || return 1
    done
    echo "$file constructors: $(sections "$file" .init_array), in the kernels' archive $(sections "$kernels" .init_array)"
    [ "$(sections "$file" .init_array)" -ge "$(sections "$kernels" .init_array)" ] || return 1
  done
}

# -- compilers

strict=(-Wall -Wextra -Wpedantic -Werror -I "$prefix/include")
header_as() { printf '#include <hopper_attention.h>\nint main(void) { return hattn_abi_version() != HATTN_ABI_VERSION; }\n' | "$@" "${strict[@]}" -fsyntax-only -; }
hpp_as() { printf '#include <hopper_attention.hpp>\nint main() { return 0; }\n' | "$@" "${strict[@]}" -fsyntax-only -; }

# -- projects out of the tree

# copy NAME FOLDER: copies a folder of the repository, as a user would.
copy() { mkdir -p "$consumers/$1" && (cd "$root/$2" && cp -r . "$consumers/$1"); }
# project NAME FOLDER OPTION...: copies a project, configures it with the moved prefix, builds it, and runs its ctest.
project() {
  local name=$1 folder=$2
  shift 2
  copy "$name" "$folder" && cd "$consumers/$name" &&
    cmake -S . -B build -G Ninja "-DCMAKE_PREFIX_PATH=$prefix" -DCMAKE_BUILD_TYPE=RelWithDebInfo "$@" &&
    cmake --build build && ctest --test-dir build --output-on-failure --no-tests=error
}
makefile() {
  local name=$1
  shift
  copy "$name" examples/cpp && cd "$consumers/$name" && PKG_CONFIG_PATH=$prefix/lib/pkgconfig make check "$@"
}
# ldd shows which library a program loads. A static program loads none of ours.
linked() { ldd "$consumers/$1" | grep "$prefix/lib/libhopper_attention.so.1"; }
not_linked() { ! ldd "$consumers/$1" | grep hopper_attention; }

version_of() {
  mkdir -p "$consumers/version" && cd "$consumers/version" &&
    printf 'cmake_minimum_required(VERSION 3.20)\nproject(version C)\nfind_package(hopper_attention ${WANT} COMPONENTS shared static)\nif(NOT hopper_attention_FOUND STREQUAL EXPECT)\nmessage(FATAL_ERROR "found: ${hopper_attention_FOUND}")\nendif()\n' >CMakeLists.txt &&
    cmake -S . -B build -G Ninja "-DCMAKE_PREFIX_PATH=$prefix" -DWANT="$1" -DEXPECT="$2"
}
pkg_config() {
  export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
  [ "$(pkg-config --modversion hopper_attention)" = "$version" ] && pkg-config --static --libs hopper_attention | grep -e -lm &&
    [ "$(realpath "$(pkg-config --variable=libdir hopper_attention)")" = "$prefix/lib" ]
}
# Options for a library without CUDA. Under scripts/test.sh, Cargo has built it already.
cpu_only=(-DHATTN_CUDA=OFF -DHATTN_CARGO_PROFILE=dev "-DHATTN_CARGO_FLAGS=${HATTN_TEST_CPU_CARGO_FLAGS:-}")
# from_sources NAME LINE...: a project whose CMakeLists.txt brings our sources in by these lines. CMake builds the library with it.
# The project links both kinds of library.
from_sources() {
  local name=$1
  shift
  copy "$name" examples/cpp && cd "$consumers/$name" &&
    { printf '%s\n' 'cmake_minimum_required(VERSION 3.24)' 'project(consumer LANGUAGES C CXX)' "$@" && cat <<'CMAKE'; } >CMakeLists.txt &&
set(CMAKE_CXX_STANDARD 14) # too old: the targets must ask for C++17
enable_testing()
foreach(kind shared static)
  add_executable(attention_${kind} attention.cpp)
  target_link_libraries(attention_${kind} PRIVATE hopper_attention::${kind})
  add_test(NAME attention_${kind} COMMAND attention_${kind})
endforeach()
CMAKE
    cmake -S . -B build -G Ninja "-DSOURCES=$root" "${cpu_only[@]}" && cmake --build build && ctest --test-dir build --output-on-failure
}
# The CMakeLists.txt at the top of the repository installs the same files as the crate's.
from_the_top() {
  cmake -S "$root" -B "$work/build-top" -G Ninja "${cpu_only[@]}" && cmake --build "$work/build-top" &&
    cmake --install "$work/build-top" --prefix "$work/installed-top" && install_tree "$work/installed-top"
}
# A program may hold another Rust archive and another CUDA runtime beside ours.
beside_others() {
  mkdir -p "$consumers/beside" && cd "$consumers/beside" || return 1
  printf '#[unsafe(no_mangle)]\npub extern "C" fn other() -> usize {\n    std::thread::spawn(|| format!("{}", std::env::args().count()).len()).join().unwrap_or(0)\n}\n' >other.rs
  printf '#include <hopper_attention.h>\n#include <stddef.h>\nsize_t other(void);\n#ifdef CUDART\nint cudaRuntimeGetVersion(int *);\n#endif\nint main(void) {\n  int32_t gpus = -1;\n#ifdef CUDART\n  int version = 0;\n  if (cudaRuntimeGetVersion(&version) != 0 || version < 12000) return 3;\n#endif\n  if (other() != 1) return 1;\n  return hattn_device_count(&gpus) != HATTN_OK || gpus < 0 ? 2 : 0;\n}\n' >main.c
  local cudart=() libs order
  if [ $cuda = ON ]; then
    cudart=("$(linked_archive libcudart_static.a)" -DCUDART)
  fi
  libs="-lstdc++ -lgcc_s -lpthread -ldl -lrt -lm"
  rustc --edition 2024 --crate-type staticlib -O other.rs -o libother.a || return 1
  # In both orders, since the linker takes the first of two equal symbols.
  for order in "$a libother.a" "libother.a $a"; do
    # shellcheck disable=SC2086 # lists of words
    cc -I "$prefix/include" main.c $order "${cudart[@]}" $libs -o "beside" -Wl,--fatal-warnings && ./beside || return 1
  done
}
# Without the header of DLPack, or with one that is too old, the compiler's message says how to get one.
dlpack_messages() {
  local old=$consumers/old-dlpack
  mkdir -p "$old/dlpack" && : >"$old/dlpack/dlpack.h" || return 1
  # says TEXT OPTION...: the compiler refuses the header with this text.
  says() {
    ! echo '#include <hopper_attention_dlpack.hpp>' | c++ -std=c++17 -I "$capi/include" "${@:2}" -fsyntax-only -x c++ - &>message &&
      grep "#error.*$1: 'scripts/install.sh PREFIX --dlpack' installs" message
  }
  cd "$old" && says 'not of version 1.x' -I "$old" || return 1
  if echo '#include <dlpack/dlpack.h>' | c++ -fsyntax-only -x c++ - 2>/dev/null; then
    echo "skipped: the message without a header, since this machine has one"
  else
    says 'no dlpack/dlpack.h'
  fi
}

# block FILE LANGUAGE PATTERN: the first block of this language that has the pattern, of a Markdown file.
block() {
  awk -v start="\`\`\`$2" -v pattern="$3" '
    /^```/ && !inside { inside = 1; wanted = $0 == start; text = ""; next }
    /^```/ { if (wanted && text ~ pattern && !done) { printf "%s", text; done = 1 } inside = 0; next }
    inside { text = text $0 "\n" }' "$root/$1"
}
# page LANGUAGE PATTERN: the program of docs/c.md or docs/cpp.md, by the commands there that have the pattern. It prints 1.
page() {
  mkdir -p "$consumers/page-$1-$2" && cd "$consumers/page-$1-$2" || return 1
  block "docs/$1.md" "$1" 'int main' >"attention.$1"
  block "docs/$1.md" cmake find_package >CMakeLists.txt
  block "docs/$1.md" sh "$2" >commands.sh
  cat commands.sh && prefix=$prefix CMAKE_GENERATOR=Ninja bash -euo pipefail commands.sh | tee printed && [ "$(tail -n 1 printed)" = 1 ]
}
# fragments LANGUAGE LEAST FLAG...: the parts of programs in docs/c.md or docs/cpp.md compile. There are LEAST at least.
fragments() {
  mkdir -p "$consumers/page-$1" && cd "$consumers/page-$1" || return 1
  { cat && awk -v start="\`\`\`$1" '
    /^```/ && !inside { inside = 1; part = $0 == start && seen++; if (part) print "void part_" seen "(void) {"; next }
    /^```/ { if (part) print "}"; inside = part = 0; next }
    part' "$root/docs/$1.md"; } >"fragments.$1"
  [ "$(grep -c '^void part_' "fragments.$1")" -ge "$2" ] && "${@:3}" "${strict[@]}" -fsyntax-only "fragments.$1"
}
c_fragments() {
  fragments c 3 cc -std=c99 <<'DECLARATIONS'
#include <hopper_attention_lists.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
extern hattn_tensor q;
extern const int32_t* ids;
extern hattn_forward_problem problem;
extern hattn_forward_args args;
extern hattn_forward_plan* plan;
extern struct CUstream_st* stream;
extern int64_t batch, seqlen, heads, head_dim;
enum { cudaSuccess };
int cudaMalloc(void** memory, size_t bytes);
DECLARATIONS
}
cpp_fragments() {
  fragments cpp 6 c++ -std=c++17 <<'DECLARATIONS'
#include <algorithm>
#include <cstdio>
#include <hopper_attention_dlpack.hpp>
#include <hopper_attention_lists.hpp>
extern const std::int32_t* ids;
extern float *pointer, *lse, *d_o, *d_q, *d_k, *d_v;
extern void *address, *workspace;
void* allocate(std::size_t bytes);
extern std::size_t bytes;
extern std::int64_t batch, seqlen, heads, head_dim;
extern CUstream_st* stream;
extern hattn::Extents shape, strides;
extern hattn::Device device;
extern const hattn::ForwardProblem problem;
extern const hattn::ForwardPlan plan;
extern hattn::ForwardArgs args;
extern DLManagedTensorVersioned *managed_tensor, *output_tensor;
DECLARATIONS
}
# The ctypes binding of the Python package. scripts/python_test.sh has the rest of its tests.
python_test() { HOPPER_ATTENTION_LIBRARY=$so python3 "$root/python/tests/run.py" test_abi; }

case $parts in *sources*)
  check "add_subdirectory, shared and static, CPU only" from_sources subdirectory \
    'add_subdirectory("${SOURCES}/crates/hopper-attention-capi" hopper_attention)'
  check "FetchContent, shared and static, CPU only" from_sources fetch 'include(FetchContent)' \
    'FetchContent_Declare(hopper_attention SOURCE_DIR "${SOURCES}")' 'FetchContent_MakeAvailable(hopper_attention)'
  check "the repository's CMakeLists.txt builds and installs the same" from_the_top
  ;;
esac
case $parts in *installed*) ;; *) finish ;; esac
check "cmake builds and installs" build_and_install || finish
check "a second build changes nothing" build_again
check "install tree" install_tree "$prefix" "${installed_dlpack[@]}"
check "nothing installed names a folder of the build" relocatable
check "licences of what is linked" licences
check "cpack makes an archive" archive
check "exported symbols of the shared library" so_symbols
check "global symbols of the static library" a_symbols
check "every symbol is in the header" header_symbols
check "soname" so_name
check "relro, build id, no executable stack, no rpath" so_hardened
check "needed libraries" so_needs
check "undefined symbols" undefined
if [ $cuda = ON ]; then
  check "kernels are registered" registration
else
  ignore "kernels are registered" "there are none without CUDA"
fi
for compiler in gcc clang; do
  if command -v $compiler >/dev/null; then
    check "header as C99: $compiler" header_as $compiler -std=c99 -x c
    check "header as C++17: $compiler" header_as $compiler -std=c++17 -x c++
    check "C++ header as C++17: $compiler" hpp_as $compiler -std=c++17 -x c++
  else
    ignore "headers: $compiler" "it is not installed"
  fi
done

# The options of the C and C++ tests: folders that a copy of tests/c lacks.
tests=(crates/hopper-attention-capi/tests/c "-DHATTN_ABI_DIR=$capi/abi")
tests+=("${dlpack[@]}")
# With the toolkit, programs link a static CUDA runtime of their own beside the library's.
toolkit=()
if [ $cuda = ON ]; then toolkit=("-DCUDAToolkit_ROOT=$(dirname "$(dirname "$(linked_archive libcudart_static.a)")")"); fi
sanitize=(-DCMAKE_C_FLAGS=-fsanitize=address,undefined -DCMAKE_CXX_FLAGS=-fsanitize=address,undefined)
export UBSAN_OPTIONS=halt_on_error=1
check "ctest: C and C++ tests, shared" project tests-shared "${tests[@]}" "${toolkit[@]}"
check "ctest: C and C++ tests, static, address and undefined-behaviour sanitizers" project tests-sanitized \
  "${tests[@]}" -DCMAKE_BUILD_TYPE=Debug -DHATTN_TEST_LINK=static "-DHATTN_TEST_SANITIZE=address,undefined" -DHATTN_TEST_FUZZ_SECONDS=5
# What the random calls were: their seed (HATTN_FUZZ_SEED sets another one) and their number.
grep -h '^fuzz: ' "$consumers"/tests-*/build/Testing/Temporary/LastTest.log
# Each of these programs holds all kernels: together they are more than a gigabyte.
find "$consumers/tests-sanitized" -type f -perm -u+x -size +10M -delete
# Too old a C++: the targets must ask for C++17.
check "find_package, shared: examples/cpp" project cpp-shared examples/cpp -DCMAKE_CXX_STANDARD=14
check "it uses the shared library" linked cpp-shared/build/attention
check "find_package, static: examples/cpp" project cpp-static examples/cpp -DHATTN_LINK=static "${toolkit[@]}"
check "it needs no library" not_linked cpp-static/build/attention
check "find_package, shared, sanitizers: examples/cpp" project cpp-sanitized examples/cpp "${sanitize[@]}"
check "find_package, shared: examples/multithread" project threads-shared examples/multithread "${toolkit[@]}"
check "find_package, static, sanitizers: examples/multithread" project threads-sanitized examples/multithread -DHATTN_LINK=static "${sanitize[@]}"
minor=${version#*.} minor=${minor%%.*}
check "find_package of version ${version%%.*}.$minor" version_of "${version%%.*}.$minor" 1
check "find_package refuses version ${version%%.*}.$((minor + 1))" version_of "${version%%.*}.$((minor + 1))" 0
check "find_package refuses version ${version%%.*}.$((minor - 1))" version_of "${version%%.*}.$((minor - 1))" 0
if command -v pkg-config >/dev/null; then
  check "pkg-config" pkg_config
  check "pkg-config, shared: examples/cpp" makefile make-shared
  check "pkg-config, static: examples/cpp" makefile make-static STATIC=1
  check "it needs no library either" not_linked make-static/attention
  for language in c cpp; do
    check "docs/$language.md: pkg-config" page $language pkg-config
  done
else
  ignore "pkg-config" "it is not installed"
fi
if command -v valgrind >/dev/null; then
  check "valgrind: C and C++ tests" project tests-valgrind "${tests[@]}" -DHATTN_TEST_VALGRIND=ON -DHATTN_TEST_FUZZ_SECONDS=5
  for program in cpp-shared/build/attention "threads-shared/build/threads 1"; do
    # shellcheck disable=SC2086 # a program and its arguments
    check "valgrind: ${program%% *}" valgrind --quiet --error-exitcode=97 --leak-check=full --show-leak-kinds=definite \
      --errors-for-leak-kinds=definite "$consumers"/$program
  done
else
  ignore "valgrind" "it is not installed"
fi
for language in c cpp; do
  check "docs/$language.md: CMake" page $language cmake
done
check "docs/c.md: parts of programs" c_fragments
check "what the DLPack header says where DLPack is missing" dlpack_messages
if [ ${#dlpack[@]} -gt 0 ]; then
  check "docs/cpp.md: parts of programs" cpp_fragments
else
  ignore "docs/cpp.md: parts of programs" "DLPack's header was not fetched"
fi
check "beside another Rust archive and another CUDA runtime" beside_others
check "ctypes: python/hopper_attention" python_test
finish
