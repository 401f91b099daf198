//! A layout that was checked against memory stays as it was.
use hopper_attention::{Layout, TensorRef};

fn main() -> hopper_attention::Result<()> {
    let data = vec![0f32; 16];
    let mut layout = Layout::contiguous([2, 8])?;
    let mut tensor = TensorRef::host(&data, layout)?;
    layout.shape[0] = 1000;
    tensor.layout = layout;
    Ok(())
}
