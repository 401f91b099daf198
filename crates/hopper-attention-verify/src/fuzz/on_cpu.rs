//! Problems on the CPU.

use hopper_attention::{DType, bf16, f16};

use super::{Outcome, Pass, Problem};
use crate::fp8::Operands;
use crate::ready::{Ready, Verdict};
use crate::{backward, forward};

pub(super) fn run(problem: &Problem) -> Outcome {
    match (problem.pass, problem.dtype) {
        (Pass::Forward, DType::BF16) => judged::<forward::Prepared<bf16>>(problem),
        (Pass::Forward, DType::F16) => judged::<forward::Prepared<f16>>(problem),
        (Pass::Forward, _) => judged::<forward::Prepared<f32>>(problem),
        (Pass::Backward, DType::BF16) => judged::<backward::Prepared<bf16>>(problem),
        (Pass::Backward, DType::F16) => judged::<backward::Prepared<f16>>(problem),
        (Pass::Backward, _) => judged::<backward::Prepared<f32>>(problem),
        (Pass::Fp8, _) => {
            let operands = Operands::of_case(&problem.case, &problem.forward(), problem.fp8.hadamard);
            let (o, lse) = operands.run();
            let report = operands.expected().check(&o, Some(&lse)).expect("matching shapes");
            Outcome::Judged(Verdict::from(&report))
        }
        (Pass::Quantize, _) => Outcome::Refused("the CPU's quantiser is what a GPU's is compared with".into()),
    }
}

fn judged<P: Ready>(problem: &Problem) -> Outcome {
    Outcome::Judged(P::of(&problem.case).verdict_on_cpu())
}
