//! A row of the launch table is not made by hand.
use hopper_attention::{Arch, DType, KernelInfo, MaskClass, Pass, kernels};

fn main() {
    let _ = KernelInfo {
        row: 7,
        pass: Pass::Forward,
        arch: Arch::Sm90,
        dtype: DType::BF16,
        mask: MaskClass::Full,
        head_dim_qk: 64,
        head_dim_vo: 64,
        tile_m: 128,
        tile_n: 128,
        stages: 2,
        threads: 384,
        smem_bytes: 0,
        scores: DType::F32,
        split_bytes: 0,
        most_shares: 1,
        sums_bytes: 0,
        packs: false,
        drops: [false; 2],
        adds_bias: [false; 2],
        modifiers: todo!(),
    };
    let _ = KernelInfo { smem_bytes: 0, ..kernels()[0] };
}
