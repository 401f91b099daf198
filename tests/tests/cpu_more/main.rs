//! The CPU backend, under the tolerance: what is added to attention, and inputs at the edges. (`scripts/sanitize.sh` takes `cpu`
//! without these.)

mod alibi;
mod bias;
mod blocks;
mod dropout;
mod edges;
mod sinks;
mod softcap;
