//! A workspace of the caller's memory borrows it alone.
use hopper_attention::Workspace;

fn main() {
    let mut memory = vec![0u8; 64];
    let workspace = Workspace::host(&mut memory);
    memory[0] = 1;
    drop(workspace);
}
