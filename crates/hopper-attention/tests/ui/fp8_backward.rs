//! e4m3 operands have no backward pass.
use hopper_attention::{BackwardArgs, E4M3, TensorMut, TensorRef};

fn args<'a>(
    x: TensorRef<'a, E4M3, 4>,
    lse: TensorRef<'a, f32, 3>,
    gradients: [TensorMut<'a, E4M3, 4>; 3],
) -> BackwardArgs<'a> {
    BackwardArgs::new([x.clone(), x.clone(), x.clone()], x.clone(), lse, x, gradients)
}

fn main() {
    let _ = args;
}
