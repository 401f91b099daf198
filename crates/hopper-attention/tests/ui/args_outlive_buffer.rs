//! Arguments without a type borrow as long as those with one.
use hopper_attention::{Args, Layout, Slot, TensorMut};

fn dangling() -> Args<'static> {
    let mut data = vec![0f32; 16];
    Args::new().write(Slot::O, TensorMut::host(&mut data, Layout::contiguous([1, 2, 1, 8]).unwrap()).unwrap())
}

fn main() {
    dangling();
}
