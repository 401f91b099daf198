use super::*;
use proptest::prelude::*;

const DIMS: Dims =
    Dims { batch: 2, seqlen_q: 5, seqlen_kv: 7, heads_q: 6, heads_kv: 2, head_dim_qk: 16, head_dim_vo: 8 };

fn refused(dims: Dims) -> String {
    ForwardProblem::builder(DType::BF16, dims).build().unwrap_err().to_string()
}

#[test]
fn shapes_follow_the_dims() {
    let problem = ForwardProblem::builder(DType::F16, DIMS).build().unwrap();
    assert_eq!((problem.q_shape(), problem.k_shape()), ([2, 5, 6, 16], [2, 7, 2, 16]));
    assert_eq!((problem.v_shape(), problem.o_shape()), ([2, 7, 2, 8], [2, 5, 6, 8]));
    assert_eq!((problem.lse_shape(), problem.group_size()), ([2, 6, 5], 3));
    assert_eq!((problem.softmax_scale(), problem.wants_lse()), (0.25, false));
}

#[test]
fn bad_numbers_are_refused_by_name() {
    assert_eq!(refused(Dims { heads_q: 5, ..DIMS }), "heads_q: 5 with heads_kv 2; allowed: a multiple of heads_kv");
    assert_eq!(refused(Dims { heads_kv: 0, ..DIMS }), "heads_kv: 0; allowed: 1 and above");
    assert!(refused(Dims { head_dim_qk: 0, ..DIMS }).starts_with("head_dim_qk: 0"));
    assert!(refused(Dims { head_dim_vo: 1 << 31, ..DIMS }).starts_with("head_dim_vo: 2147483648"));
    assert!(refused(Dims { seqlen_q: 1 << 29, seqlen_kv: 1 << 29, ..DIMS }).contains("below 2^30"));
    assert!(refused(Dims { seqlen_q: usize::MAX, ..DIMS }).contains("below 2^30"));
    assert!(refused(Dims { batch: 1 << 29, ..DIMS }).starts_with("batch * heads_q: 536870912 * 6"));
}

#[test]
fn the_scale_is_finite_and_above_zero() {
    let scaled = |scale| ForwardProblem::builder(DType::F32, DIMS).softmax_scale(scale).build();
    assert_eq!(scaled(2.0).unwrap().softmax_scale(), 2.0);
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(scaled(scale).is_err(), "{scale}");
    }
}

#[test]
fn a_problem_is_a_key_and_comes_back_from_its_builder() {
    use std::collections::HashMap;
    let options = ForwardProblem::builder(DType::E4M3, DIMS).mask(Mask::causal()).softmax_scale(0.3).lse(true);
    let problem = options.scaling(Scaling::PerHead).output(DType::F16).amax(true).half_scores(true);
    let problem = problem.arch(Arch::Sm90).sm_margin(16).workspace_limit(Some(9)).build().unwrap();
    assert_eq!(problem.to_builder().build().unwrap(), problem);
    let others = [
        problem.to_builder().softmax_scale(f32::from_bits(0.3f32.to_bits() + 1)),
        problem.to_builder().lse(false),
        problem.to_builder().mask(Mask::Full),
        problem.to_builder().amax(false),
        problem.to_builder().half_scores(false),
        problem.to_builder().arch(Arch::Sm80),
        problem.to_builder().sm_margin(0),
        problem.to_builder().workspace_limit(None),
        problem.to_builder().workspace_limit(Some(0)),
        problem.to_builder().output(DType::BF16),
    ];
    let mut plans = HashMap::from([(problem.clone(), 0)]);
    for (i, other) in others.into_iter().enumerate() {
        plans.insert(other.build().unwrap(), i + 1);
    }
    assert_eq!((plans.len(), plans[&problem]), (11, 0));
}

#[test]
fn optional_operands_are_asked_for_by_name() {
    let options = ForwardProblem::builder(DType::BF16, DIMS);
    let problem = options.clone().operand(Slot::Lse, true).build().unwrap();
    assert_eq!(problem, options.clone().lse(true).build().unwrap());
    assert!(problem.wants(Slot::Lse) && !problem.wants(Slot::Amax));
    let text = options.operand(Slot::DQ, true).build().unwrap_err().to_string();
    assert_eq!(
        text,
        "d_q: asked for; allowed: lse, amax, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, sinks, alibi_slopes, \
         max_logits"
    );
}

#[test]
fn operands_are_there_as_the_options_say() {
    use crate::operand::Presence::{Refused, Required};
    let presence = |problem: &ForwardProblem| problem.operands().iter().map(|row| row.presence()).collect::<Vec<_>>();
    let plain = ForwardProblem::builder(DType::BF16, DIMS).build().unwrap();
    assert_eq!(presence(&plain)[..4], [Required; 4]);
    assert_eq!(presence(&plain)[4..], [Refused; 20]);
    let fp8 = ForwardProblem::builder(DType::E4M3, DIMS).lse(true).amax(true).output(DType::E4M3).build().unwrap();
    assert_eq!(presence(&fp8)[..10], [Required; 10]);
    assert_eq!(presence(&fp8)[10..], [Refused; 14]);
    let row = |slot| *fp8.operands().find(slot).unwrap();
    assert_eq!((row(Slot::O).dtype(), row(Slot::Lse).shape()), (DType::E4M3, &[2, 6, 5][..]));
}

#[test]
fn packed_tensors_have_no_batch() {
    use crate::operand::Presence::{Refused, Required};
    let problem = ForwardProblem::builder(DType::BF16, DIMS).packed(true).lse(true).build().unwrap();
    assert_eq!((problem.q_shape(), problem.v_shape()), ([1, 5, 6, 16], [1, 7, 2, 8]));
    let row = |problem: &ForwardProblem, slot| *problem.operands().find(slot).unwrap();
    let shape = |slot| row(&problem, slot).shape().to_vec();
    assert_eq!((shape(Slot::Q), shape(Slot::K)), (vec![5, 6, 16], vec![7, 2, 16]));
    assert_eq!((shape(Slot::V), shape(Slot::O), shape(Slot::Lse)), (vec![7, 2, 8], vec![5, 6, 8], vec![6, 5]));
    assert_eq!((shape(Slot::CuSeqlensQ), row(&problem, Slot::CuSeqlensKv).dtype()), (vec![3], DType::I32));
    assert_eq!(row(&problem, Slot::CuSeqlensKv).presence(), Required);
    assert_eq!(row(&problem, Slot::SequsedQ).presence(), Refused);
    assert_eq!(row(&problem, Slot::Q).axes(), "[total, heads, head_dim]");
    assert_eq!(row(&problem, Slot::Lse).axes(), "[heads, total]");

    let mixed = ForwardProblem::builder(DType::BF16, DIMS).packed_q(true).used_kv(true).build().unwrap();
    assert!(mixed.is_packed_q() && !mixed.is_packed_kv() && mixed.has_lengths());
    assert_eq!((row(&mixed, Slot::Q).shape(), row(&mixed, Slot::K).shape()), (&[5, 6, 16][..], &[2, 7, 2, 16][..]));
    assert_eq!((row(&mixed, Slot::SequsedKv).shape(), row(&mixed, Slot::K).axes()), (&[2][..], Slot::K.axes()));
    assert_eq!(mixed.to_builder().build().unwrap(), mixed);
    assert!(!mixed.to_builder().packed_q(false).used_kv(false).build().unwrap().has_lengths());
}

#[test]
fn options_for_lengths_need_lengths() {
    let options = || ForwardProblem::builder(DType::BF16, DIMS);
    let refused = |options: ForwardProblemBuilder| options.build().unwrap_err().to_string();
    let text = "fill_gaps: asked for; allowed: with packed tensors or used lengths only";
    assert_eq!(refused(options().fill_gaps(true)), text);
    let text = "max_seqlen_q: 3; allowed: with packed queries, or used_q only";
    assert_eq!(refused(options().packed_kv(true).max_seqlen_q(3)), text);
    assert!(refused(options().packed_q(true).max_seqlen_kv(3)).starts_with("max_seqlen_kv: 3"));
    let hinted = options().packed_q(true).used_kv(true).fill_gaps(true).max_seqlen_q(3).max_seqlen_kv(4);
    let hinted = hinted.build().unwrap();
    assert_eq!((hinted.max_seqlen_q(), hinted.max_seqlen_kv(), hinted.fills_gaps()), (Some(3), Some(4), true));
    let text = "forward bf16 batch 2 seqlen 5x7 packed q used kv max_seqlen_q 3 max_seqlen_kv 4 heads 6/2 \
                head_dim 16/8 full scale 0.25 fill_gaps";
    assert_eq!((hinted.to_string(), &hinted.to_builder().build().unwrap()), (text.into(), &hinted));
    let both = options().packed(true).used_q(true).used_kv(true).build().unwrap();
    assert!(both.to_string().contains("seqlen 5x7 packed q kv used q kv heads"), "{both}");
    assert!(both.to_builder().fill_gaps(true).build().unwrap() != both);
}

#[test]
fn operands_of_integers_are_refused() {
    let text = ForwardProblem::builder(DType::I32, DIMS).build().unwrap_err().to_string();
    assert_eq!(text, "q, k and v: dtype i32; allowed: f16, bf16, e4m3, f32");
}

#[test]
fn empty_means_no_output_rows() {
    let empty = |dims| ForwardProblem::builder(DType::F16, dims).build().unwrap().is_empty();
    assert!(empty(Dims { batch: 0, ..DIMS }) && empty(Dims { seqlen_q: 0, ..DIMS }));
    assert!(!empty(Dims { seqlen_kv: 0, ..DIMS }));
    // Without sequences all rows of packed tensors are a gap.
    let packed = ForwardProblem::builder(DType::F16, Dims { batch: 0, ..DIMS }).packed(true);
    assert!(packed.clone().build().unwrap().is_empty() && !packed.fill_gaps(true).build().unwrap().is_empty());
}

#[test]
fn display() {
    let options = ForwardProblem::builder(DType::BF16, DIMS).mask(Mask::causal()).lse(true);
    let problem = options.clone().build().unwrap();
    let text = "forward bf16 batch 2 seqlen 5x7 heads 6/2 head_dim 16/8 causal scale 0.25 lse";
    assert_eq!(problem.to_string(), text);
    let sm80 = options.clone().arch(Arch::Sm80);
    assert_eq!(sm80.clone().build().unwrap().to_string(), format!("{text} on sm80"));
    assert_eq!(sm80.sm_margin(7).build().unwrap().to_string(), format!("{text} on sm80 sm_margin 7"));
    let with_margin = options.clone().sm_margin(16).build().unwrap();
    assert_eq!(with_margin.to_string(), format!("{text} sm_margin 16"));
    assert_eq!((with_margin.sm_margin(), problem.sm_margin(), with_margin.shape()), (16, 0, problem.shape()));
    let limited = options.workspace_limit(Some(0)).build().unwrap();
    assert_eq!(limited.to_string(), format!("{text} workspace_limit 0"));
    let limits = (limited.workspace_limit(), problem.workspace_limit());
    assert_eq!((limits, limited.shape()), ((Some(0), None), problem.shape()));
}

proptest! {
    #[test]
    fn any_numbers_give_a_problem_or_an_error(n in any::<[usize; 7]>(), shift in 0u32..64) {
        let n = n.map(|n| n >> shift);
        let dims = Dims { batch: n[0], seqlen_q: n[1], seqlen_kv: n[2], heads_q: n[3], heads_kv: n[4],
                          head_dim_qk: n[5], head_dim_vo: n[6] };
        if let Ok(problem) = ForwardProblem::builder(DType::BF16, dims).build() {
            prop_assert_eq!(problem.dims(), dims);
            prop_assert!(dims.heads_q.is_multiple_of(dims.heads_kv));
            prop_assert!(problem.softmax_scale() > 0.0);
        }
    }
}
