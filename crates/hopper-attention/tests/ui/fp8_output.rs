//! The output of e4m3 operands is bf16, f16 or e4m3.
use hopper_attention::{E4M3, ForwardArgs, TensorMut, TensorRef};

fn args<'a>(q: TensorRef<'a, E4M3, 4>, o: TensorMut<'a, f32, 4>) -> ForwardArgs<'a> {
    ForwardArgs::new(q.clone(), q.clone(), q, o)
}

fn main() {
    let _ = args;
}
