//! e4m3 operands have no backward pass.
use hopper_attention::{BackwardArgs, E4M3};

fn run(_: BackwardArgs<'_, E4M3>) {}

fn main() {
    let _ = run;
}
