#!/usr/bin/env bash
# Compiles the op: python/torch_op/build.sh OUTPUT (for instance python/hopper_attention/_torch_op.so).
# It needs a C++17 compiler ($CXX, or g++), and no torch: the op finds torch's functions when it is loaded.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
output=${1:?usage: build.sh OUTPUT}
# Exceptions that a kernel throws are caught by torch. So the file shares libstdc++ with torch.
"${CXX:-g++}" -std=c++17 -O2 -Wall -Wextra -Werror -fPIC -shared -fvisibility=hidden -Wl,-z,defs -Wl,-z,now \
  "-Wl,--version-script=$here/op.map" \
  -I "$here/../../crates/hopper-attention-capi/include" "$here/op.cc" -o "$output" -ldl
