//! A tensor does not outlive its memory.
use hopper_attention::{Layout, TensorRef};

fn dangling() -> TensorRef<'static, f32, 2> {
    let data = vec![0f32; 16];
    TensorRef::host(&data, Layout::contiguous([2, 8]).unwrap()).unwrap()
}

fn main() {
    dangling();
}
