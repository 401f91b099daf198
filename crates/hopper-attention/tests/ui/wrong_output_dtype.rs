//! bf16 operands give a bf16 output.
use hopper_attention::{ForwardArgs, TensorMut, TensorRef, bf16};

fn args<'a>(q: TensorRef<'a, bf16, 4>, o: TensorMut<'a, f32, 4>) -> ForwardArgs<'a> {
    ForwardArgs::new(q.clone(), q.clone(), q, o)
}

fn main() {
    let _ = args;
}
