//! One output tensor cannot be in two calls at once; `reborrow` lends it to one.
use hopper_attention::{ForwardArgs, Layout, TensorMut, TensorRef};

fn main() -> hopper_attention::Result<()> {
    let layout = Layout::contiguous([1, 2, 1, 8])?;
    let (data, mut out) = (vec![0f32; 16], vec![0f32; 16]);
    let q = TensorRef::host(&data, layout)?;
    let mut o = TensorMut::host(&mut out, layout)?;
    let first = ForwardArgs::new(q.clone(), q.clone(), q.clone(), o.reborrow());
    let second = ForwardArgs::new(q.clone(), q.clone(), q.clone(), o.reborrow());
    drop((first, second));
    Ok(())
}
