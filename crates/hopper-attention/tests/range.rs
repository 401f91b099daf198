//! What the CPU gives where a number does not fit f32: the table of `docs/numerics.md`.

use hopper_attention::{DType, Device, Dims, ForwardArgs, ForwardProblem, Stream, TensorMut, TensorRef, Workspace};

mod common;

use common::dense;

/// O and the LSE of one query. All keys are equal. Head dims are 1.
fn attention(q: f32, k: f32, v: &[f32], softmax_scale: f32) -> (f32, f32) {
    let dims = Dims::new(1, 1, 1, 1).with_seqlen_kv(v.len());
    let problem = ForwardProblem::builder(DType::F32, dims).softmax_scale(softmax_scale).lse(true).build().unwrap();
    let (q, k, mut o, mut lse) = ([q], vec![k; v.len()], [7.0], [7.0]);
    let args = ForwardArgs::new(
        TensorRef::host(&q, dense(problem.q_shape())).unwrap(),
        TensorRef::host(&k, dense(problem.k_shape())).unwrap(),
        TensorRef::host(v, dense(problem.v_shape())).unwrap(),
        TensorMut::host(&mut o, dense(problem.o_shape())).unwrap(),
    );
    let args = args.lse(TensorMut::host(&mut lse, dense(problem.lse_shape())).unwrap());
    let plan = problem.plan(&Device::cpu()).unwrap();
    plan.run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, 0).unwrap(), args).unwrap();
    (o[0], lse[0])
}

#[test]
fn scores_end_at_the_largest_f32() {
    let v = [1.0, 3.0];
    assert_eq!(attention(1e19, 3e19, &v, 1.0), (2.0, 1e19 * 3e19));
    for softmax_scale in [1.0, 1e-38] {
        let (o, lse) = attention(2e19, 2e19, &v, softmax_scale);
        assert!(o.is_nan() && lse.is_nan(), "{o}, {lse} with scale {softmax_scale}");
    }
    assert_eq!(attention(2e19, -2e19, &v, 1.0), (0.0, f32::NEG_INFINITY));
}

#[test]
fn sums_of_values_end_at_the_largest_f32() {
    assert_eq!(attention(0.0, 0.0, &[3e38; 50], 1.0), (f32::INFINITY, 50f32.ln()));
    // A power of two below 3.4e38 / 50, so that neither the sum nor the quotient is rounded.
    let safe = 122f32.exp2();
    assert_eq!(attention(0.0, 0.0, &[safe; 50], 1.0).0, safe);
}
