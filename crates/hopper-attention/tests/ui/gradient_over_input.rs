//! A gradient is not written over the tensor that it is a gradient of.
use hopper_attention::{BackwardArgs, Layout, TensorMut, TensorRef};

fn main() -> hopper_attention::Result<()> {
    let layout = Layout::contiguous([1, 2, 1, 8])?;
    let (mut q, rows, mut d_k, mut d_v) = (vec![0f32; 16], vec![0f32; 2], vec![0f32; 16], vec![0f32; 16]);
    let read = TensorRef::host(&q, layout)?;
    let d_q = TensorMut::host(&mut q, layout)?;
    let _ = BackwardArgs::new(
        [read.clone(), read.clone(), read.clone()],
        read.clone(),
        TensorRef::host(&rows, Layout::contiguous([1, 1, 2])?)?,
        read,
        [d_q, TensorMut::host(&mut d_k, layout)?, TensorMut::host(&mut d_v, layout)?],
    );
    Ok(())
}
