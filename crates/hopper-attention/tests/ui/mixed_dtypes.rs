//! Q, K and V have one type.
use hopper_attention::{ForwardArgs, TensorMut, TensorRef, bf16, f16};

fn args<'a>(q: TensorRef<'a, bf16, 4>, k: TensorRef<'a, f16, 4>, o: TensorMut<'a, bf16, 4>) -> ForwardArgs<'a> {
    ForwardArgs::new(q.clone(), k, q, o)
}

fn main() {
    let _ = args;
}
