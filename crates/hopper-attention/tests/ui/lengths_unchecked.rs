//! Lengths that nobody has checked are the caller's promise.
use hopper_attention::{Args, Slot, TensorRef};

fn with_lengths<'a>(args: Args<'a>, lengths: TensorRef<'a, i32, 1>) -> Args<'a> {
    args.lengths_unchecked(Slot::CuSeqlensQ, lengths)
}

fn main() {
    let _ = with_lengths;
}
