#!/usr/bin/env bash
# Makes the wheel of the Python package from an installed library. Compiles no kernel.
#   scripts/wheel.sh PREFIX [--out FOLDER] [--as-installed]
# PREFIX is what scripts/install.sh wrote. The wheel goes to FOLDER (default dist).
# The static library is linked into a shared one again, against glibc 2.28 or newer, with the linker of the PyPI
# package ziglang. The operator for torch (python/torch_op) is compiled.
#   --as-installed  takes the installed shared library instead, and needs no network. The tag then says the glibc of
#                   this machine.
# Needs g++ (or $CXX), readelf and objdump, and python3 with pip and a network, to fetch ziglang.
# Prints the contents of the wheel, its size, and the newest glibc that it asks for.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# A wheel a line, with the hash of the Linux x86_64 file.
zig_pin='ziglang==0.17.1 --hash=sha256:ea6cc5d87b033cf0aedfbc8f9549a908cae6c50ac31f1698188fa48a74524b54'
glibc=2.28

fail() {
  echo "wheel: $*" >&2
  exit 1
}
usage() {
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
  exit "$1"
}
prefix="" out=$root/dist as_installed=0
while [ $# -gt 0 ]; do
  case $1 in
    --out) out=${2:?--out takes a folder} && shift ;;
    --as-installed) as_installed=1 ;;
    -h | --help) usage 0 ;;
    -*) usage 1 >&2 ;;
    *) prefix=$1 ;;
  esac
  shift
done
[ -n "$prefix" ] || usage 1 >&2
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "wheels are made for Linux x86_64 only."
for file in lib/libhopper_attention.so lib/libhopper_attention.a share/doc/hopper_attention/LICENSE-MIT; do
  [ -e "$prefix/$file" ] || fail "$prefix has no $file: run scripts/install.sh $prefix first."
done

target=${CARGO_TARGET_DIR:-$root/target}
work=$target/wheel
rm -rf "$work/build"
mkdir -p "$work/build"
library=$work/build/libhopper_attention.so
op=$work/build/_torch_op.so
source=$root/python/torch_op
compile_op=("${CXX:-g++}" -std=c++17 -O2 -Wall -Wextra -Werror -fPIC -fvisibility=hidden -I "$root/crates/hopper-attention-capi/include")

# gcc 11 and newer call this function of libstdc++, which the libstdc++ of the oldest systems does not have. So each file brings
# its own.
compat=$work/build/compat.o
compile_compat() {
  "${CXX:-g++}" -std=c++17 -O2 -fPIC -fvisibility=hidden -x c++ -c - -o "$compat" <<'CPP'
#include <new>
namespace std {
[[noreturn]] void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
CPP
}
# Where the compiler's own runtime libraries are.
runtime() { "${CXX:-g++}" -print-file-name="$1"; }
# section FILE NAME: the size in bytes of the sections of that name.
section() {
  readelf -SW "$1" | sed 's/^ *\[ *[0-9]*\] *//' | awk -v name="$2" '$1 == name { print "0x" $5 }' |
    while read -r size; do echo $((size)); done | awk '{ sum += $1 } END { print sum + 0 }'
}
# link OUTPUT MAP ARGUMENT...: links against an old glibc. Runtime libraries stay shared with the process, as
# exceptions need it.
link() {
  local output=$1 map=$2
  shift 2
  PYTHONPATH=$work/zig ZIG_GLOBAL_CACHE_DIR=$work/zig-cache python3 -m ziglang cc -target "x86_64-linux-gnu.$glibc" -shared -s -o "$output" \
    "$@" "$compat" "-Wl,--version-script=$map" -Wl,--build-id -Wl,-z,relro -Wl,-z,now -Wl,-z,defs -Wl,-z,noexecstack \
    -Wl,--as-needed "$(runtime libstdc++.so.6)" "$(runtime libgcc_s.so.1)" -lpthread -ldl -lrt -lm
}
fetch_zig() {
  [ "$(cat "$work/zig/pin" 2>/dev/null)" != "$zig_pin" ] || return 0
  rm -rf "$work/zig"
  echo "$zig_pin" >"$work/build/zig.txt"
  PIP_REQUIRE_VIRTUALENV=0 python3 -m pip install --disable-pip-version-check --quiet --require-hashes --no-deps --only-binary :all: \
    --target "$work/zig" --requirement "$work/build/zig.txt" ||
    fail "pip could not fetch ziglang. --as-installed does without it."
  echo "$zig_pin" >"$work/zig/pin"
}

if [ $as_installed = 1 ]; then
  cp -L "$prefix/lib/libhopper_attention.so" "$library"
  [ ! -e "$source/build.sh" ] || "$source/build.sh" "$op"
else
  fetch_zig
  compile_compat
  link "$library" "$root/crates/hopper-attention-capi/abi/hopper_attention.map" -Wl,-soname,libhopper_attention.so.1 \
    -Wl,--whole-archive "$prefix/lib/libhopper_attention.a" -Wl,--no-whole-archive
  # Kernels are registered by constructors that nothing refers to. The link must have kept all of them.
  for name in .nv_fatbin .nvFatBinSegment .init_array; do
    [ "$(section "$library" $name)" -ge "$(section "$prefix/lib/libhopper_attention.a" $name)" ] || fail "the link lost parts of $name."
  done
  if [ -e "$source/op.cc" ]; then
    "${compile_op[@]}" -c "$source/op.cc" -o "$work/build/op.o"
    link "$op" "$source/op.map" "$work/build/op.o"
  fi
fi

files=("$library")
[ ! -e "$op" ] || files+=("$op")
newest=$(objdump -T "${files[@]}" | grep -oE 'GLIBC_2\.[0-9]+' | sort -uV | tail -n 1)
minor=${newest#GLIBC_2.}
# The oldest glibc that has a tag.
[ "$minor" -ge 17 ] || minor=17
[ $as_installed = 1 ] || [ "$minor" -le "${glibc#2.}" ] || fail "the library asks for $newest."
[ $as_installed = 1 ] || minor=${glibc#2.}
options=()
[ ! -e "$op" ] || options=(--op "$op")
python3 "$root/python/build_wheel.py" --library "$library" "${options[@]}" --tag "manylinux_2_${minor}_x86_64" \
  --licences "$prefix/share/doc/hopper_attention" --out "$out"
echo "newest symbol of glibc: $newest; of libstdc++: $(objdump -T "${files[@]}" | grep -oE 'GLIBCXX_[0-9.]+' | sort -uV | tail -n 1 || true)"
[ -e "$op" ] || echo "without _torch_op.so: calls from torch go through ctypes"
