#!/usr/bin/env bash
# Makes this machine ready to build: the real script travels in the sys crate. Options as there: --cpu, --test.
exec "$(dirname "${BASH_SOURCE[0]}")/../crates/hopper-attention-sys/toolchain/bootstrap.sh" "$@"
