//! What is written is not read before the arguments are gone.
use hopper_attention::{Args, Layout, Slot, TensorMut, TensorRef};

fn main() -> hopper_attention::Result<()> {
    let layout = Layout::contiguous([1, 2, 1, 8])?;
    let mut data = vec![0f32; 16];
    let args = Args::new().write(Slot::O, TensorMut::host(&mut data, layout)?);
    let args = args.read(Slot::Q, TensorRef::host(&data, layout)?);
    drop(args);
    Ok(())
}
