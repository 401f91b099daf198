//! Memory that is read cannot be written in the same call.
use hopper_attention::{ForwardArgs, Layout, TensorMut, TensorRef};

fn main() -> hopper_attention::Result<()> {
    let layout = Layout::contiguous([1, 2, 1, 8])?;
    let mut data = vec![0f32; 16];
    let q = TensorRef::host(&data, layout)?;
    let o = TensorMut::host(&mut data, layout)?;
    let _ = ForwardArgs::new(q.clone(), q.clone(), q, o);
    Ok(())
}
