//! A row of the launch table stays as it was: a launch goes by its index.
use hopper_attention::kernels;

fn main() {
    let mut kernel = kernels()[0];
    kernel.row = 7;
    kernel.head_dim_qk = 256;
}
