//! The example of the README for the CPU.

use hopper_attention::*;

fn main() -> Result<()> {
    let dims = Dims::new(1, 128, 8, 64).with_heads_kv(2); // batch, seqlen, heads, head dim; 8 query heads, 2 KV heads
    let problem = ForwardProblem::builder(DType::BF16, dims).mask(Mask::causal()).build()?;
    let plan = problem.plan(&Device::cpu())?; // once for many runs
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
    let (q_layout, kv_layout) = (Layout::contiguous(problem.q_shape())?, Layout::contiguous(problem.k_shape())?);
    let (q, kv) = (vec![bf16::ONE; q_layout.span()], vec![bf16::ONE; kv_layout.span()]); // span(): elements in memory
    let mut o = vec![bf16::ZERO; q_layout.span()];
    let [k, v] = [TensorRef::host(&kv, kv_layout)?, TensorRef::host(&kv, kv_layout)?];
    let args = ForwardArgs::new(TensorRef::host(&q, q_layout)?, k, v, TensorMut::host(&mut o, q_layout)?);
    plan.run(&Stream::Cpu, &mut workspace, args)?;
    println!("{}", o[0]); // 1: a mean of ones
    Ok(())
}
