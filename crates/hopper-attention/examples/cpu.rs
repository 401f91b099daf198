//! The example of the README for the CPU.

use hopper_attention::*;

fn main() -> Result<()> {
    let dims = Dims::new(1, 128, 8, 64).with_heads_kv(2); // batch, seqlen, heads, head dim; 8 query heads read 2 key heads
    let problem = ForwardProblem::builder(DType::BF16, dims).mask(Mask::causal()).build()?;
    let plan = problem.plan(&Device::cpu())?; // once for many runs
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
    let (of_q, of_kv) = (Layout::contiguous(problem.q_shape())?, Layout::contiguous(problem.k_shape())?);
    let (q, kv, mut o) = (vec![bf16::ONE; of_q.span()], vec![bf16::ONE; of_kv.span()], vec![bf16::ZERO; of_q.span()]);
    let [q, k, v] = [TensorRef::host(&q, of_q)?, TensorRef::host(&kv, of_kv)?, TensorRef::host(&kv, of_kv)?];
    plan.run(&Stream::Cpu, &mut workspace, ForwardArgs::new(q, k, v, TensorMut::host(&mut o, of_q)?))?;
    assert!(o.iter().all(|&o| o == bf16::ONE)); // a mean of ones
    Ok(())
}
