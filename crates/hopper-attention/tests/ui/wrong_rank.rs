//! The LSE is [batch, heads_q, seqlen_q]; it has no head dim.
use hopper_attention::{ForwardArgs, TensorMut};

fn with_lse<'a>(args: ForwardArgs<'a>, lse: TensorMut<'a, f32, 4>) -> ForwardArgs<'a> {
    args.lse(lse)
}

fn main() {
    let _ = with_lse;
}
