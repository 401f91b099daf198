//! Sizes are made by `Dims::new`, which another field would not break.
use hopper_attention::Dims;

fn main() {
    let _ = Dims { batch: 1, seqlen_q: 2, seqlen_kv: 2, heads_q: 1, heads_kv: 1, head_dim_qk: 8, head_dim_vo: 8 };
    let _ = Dims { batch: 2, ..Dims::new(1, 2, 1, 8) };
    let Dims { batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim_qk, head_dim_vo } = Dims::new(1, 2, 1, 8);
    let _ = (batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim_qk, head_dim_vo);
}
