//! bf16 operands give a bf16 output.
use hopper_attention::{ForwardArgs, TensorMut, TensorRef, bf16};

fn args<'a>(q: TensorRef<'a, bf16, 4>, o: TensorMut<'a, f32, 4>) -> ForwardArgs<'a, bf16> {
    ForwardArgs { q: q.clone(), k: q.clone(), v: q, o, lse: None }
}

fn main() {
    let _ = args;
}
