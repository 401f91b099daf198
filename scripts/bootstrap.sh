#!/usr/bin/env bash
# Makes this machine ready to build. Runs the script of the sys crate, which is part of its package. Options: --cpu, --test.
exec "$(dirname "${BASH_SOURCE[0]}")/../crates/hopper-attention-sys/toolchain/bootstrap.sh" "$@"
