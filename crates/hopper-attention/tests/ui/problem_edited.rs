//! A problem that was checked stays as it was.
use hopper_attention::{BackwardProblem, DType, Dims, ForwardProblem};

fn main() -> hopper_attention::Result<()> {
    let mut problem = ForwardProblem::builder(DType::BF16, Dims::new(1, 2, 1, 8)).build()?;
    problem.dims.batch = 2;
    let mut backward = BackwardProblem::builder(&problem).build()?;
    backward.forward = problem;
    Ok(())
}
