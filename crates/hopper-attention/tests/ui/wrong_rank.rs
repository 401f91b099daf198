//! The LSE is [batch, heads_q, seqlen_q]; it has no head dim.
use hopper_attention::{ForwardArgs, TensorMut, TensorRef};

type Lse<'a> = Option<TensorMut<'a, f32, 4>>;

fn args<'a>(q: TensorRef<'a, f32, 4>, o: TensorMut<'a, f32, 4>, lse: Lse<'a>) -> ForwardArgs<'a, f32> {
    ForwardArgs { q: q.clone(), k: q.clone(), v: q, o, lse }
}

fn main() {
    let _ = args;
}
