//! The options that only a problem with e4m3 operands has: the output type, the scaling of its inputs, scores in f16.

use std::fmt;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::scaling::Scaling;

/// The options of a problem with e4m3 operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Fp8 {
    pub output: DType,
    pub scaling: Scaling,
    pub half_scores: bool,
}

impl Fp8 {
    /// The options for operands of type `dtype`, with defaults filled in. `None` for operands that are not e4m3.
    ///
    /// # Errors
    /// For operands that are not e4m3: any option, except the operands' own type as the output type. For e4m3 operands: an
    /// f32 output.
    pub fn checked(
        dtype: DType,
        output: Option<DType>,
        scaling: Option<Scaling>,
        amax: bool,
        half_scores: bool,
    ) -> Result<Option<Self>> {
        let refuse_output = |got, allowed: String| Err(Error::Dtype { what: "o", got, allowed });
        if dtype == DType::E4M3 {
            let output = output.unwrap_or(DType::BF16);
            if output == DType::F32 {
                return refuse_output(output, "bf16, f16, e4m3".into());
            }
            return Ok(Some(Self { output, scaling: scaling.unwrap_or_default(), half_scores }));
        }
        if let Some(output) = output.filter(|&output| output != dtype) {
            return refuse_output(output, format!("{dtype}, the operands'"));
        }
        let asked_for = [
            ("scaling", scaling.map(Scaling::name)),
            ("amax", amax.then_some("asked for")),
            ("half_scores", half_scores.then_some("asked for")),
        ];
        match asked_for.into_iter().find_map(|(what, got)| Some((what, got?))) {
            None => Ok(None),
            Some((what, got)) => {
                let got = format!("{got}, with {dtype} operands");
                Err(Error::Value { what, got, allowed: "with e4m3 operands only".into() })
            }
        }
    }
}

impl fmt::Display for Fp8 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let half_scores = if self.half_scores { " half-scores" } else { "" };
        write!(f, " {}{half_scores} to {}", self.scaling, self.output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operand::Slot;
    use crate::problem::{Dims, ForwardProblem, ForwardProblemBuilder};

    const DIMS: Dims =
        Dims { batch: 2, seqlen_q: 129, seqlen_kv: 256, heads_q: 6, heads_kv: 2, head_dim_qk: 16, head_dim_vo: 8 };

    fn options(dtype: DType) -> ForwardProblemBuilder {
        ForwardProblem::builder(dtype, DIMS)
    }

    #[test]
    fn the_scaling_gives_the_shapes_of_the_factors() {
        let shapes = |scaling| {
            let problem = options(DType::E4M3).scaling(scaling).build().unwrap();
            assert_eq!(problem.scaling(), Some(scaling));
            [problem.descale_q_shape(), problem.descale_k_shape(), problem.descale_v_shape()]
        };
        assert_eq!(shapes(Scaling::PerTensor), [[1, 1, 1]; 3]);
        assert_eq!(shapes(Scaling::PerHead), [[2, 2, 1]; 3]);
        assert_eq!(shapes(Scaling::PerBlock), [[2, 6, 2], [2, 2, 2], [2, 2, 2]]);
        // Sequences that are packed have blocks of their own: floor((129 + 127 * 2) / 128) of them.
        let packed = options(DType::E4M3).packed_q(true).scaling(Scaling::PerBlock).build().unwrap();
        assert_eq!((packed.descale_q_shape(), packed.descale_k_shape()), ([1, 6, 2], [2, 2, 2]));
        let operands = packed.operands();
        let row = |slot| operands.find(slot).unwrap();
        assert_eq!((row(Slot::DescaleQ).shape(), row(Slot::DescaleQ).axes()), (&[6, 2][..], "[heads, blocks]"));
        assert_eq!(row(Slot::DescaleK).shape(), [2, 2, 2]);
        let packed = options(DType::E4M3).packed(true).scaling(Scaling::PerHead).build().unwrap();
        assert_eq!(packed.operands().find(Slot::DescaleQ).unwrap().shape(), [2, 2, 1]);
        let wide = options(DType::BF16).build().unwrap();
        assert_eq!((wide.scaling(), wide.descale_q_shape()), (None, [0, 0, 0]));
    }

    #[test]
    fn outputs_are_chosen_for_e4m3_operands_only() {
        let e4m3 = options(DType::E4M3).build().unwrap();
        assert_eq!((e4m3.output_dtype(), e4m3.takes_scale_o(), e4m3.wants_amax()), (DType::BF16, false, false));
        for output in [DType::BF16, DType::F16, DType::E4M3] {
            let problem = options(DType::E4M3).output(output).build().unwrap();
            assert_eq!((problem.output_dtype(), problem.takes_scale_o()), (output, output == DType::E4M3));
        }
        let refused = |options: ForwardProblemBuilder| options.build().unwrap_err().to_string();
        assert_eq!(refused(options(DType::E4M3).output(DType::F32)), "o: dtype f32; allowed: bf16, f16, e4m3");
        let bf16 = || options(DType::BF16);
        assert_eq!(bf16().output(DType::BF16).build().unwrap(), bf16().build().unwrap());
        assert_eq!(refused(bf16().output(DType::F16)), "o: dtype f16; allowed: bf16, the operands'");
        assert_eq!(
            refused(bf16().scaling(Scaling::PerHead)),
            "scaling: per-head, with bf16 operands; allowed: with e4m3 operands only"
        );
        assert!(refused(bf16().amax(true)).starts_with("amax: asked for, with bf16 operands"));
        assert!(refused(bf16().half_scores(true)).starts_with("half_scores: asked for, with bf16 operands"));
        assert!(!bf16().half_scores(false).amax(false).build().unwrap().allows_half_scores());
    }

    #[test]
    fn display() {
        let text = options(DType::E4M3).scaling(Scaling::PerBlock).amax(true).build().unwrap().to_string();
        let want = "forward e4m3 per-block to bf16 amax batch 2 seqlen 129x256 heads 6/2 head_dim 16/8 full scale 0.25";
        assert_eq!(text, want);
    }

    #[test]
    fn half_scores_make_another_problem() {
        let plain = options(DType::E4M3).scaling(Scaling::PerHead).build().unwrap();
        let half = plain.to_builder().half_scores(true).build().unwrap();
        assert!(half.allows_half_scores() && !plain.allows_half_scores() && half != plain);
        let want =
            "forward e4m3 per-head half-scores to f16 batch 2 seqlen 129x256 heads 6/2 head_dim 16/8 full scale 0.25";
        assert_eq!(half.to_builder().output(DType::F16).build().unwrap().to_string(), want);
        // `Tuning` files measurements under the text of `shape`, so the two problems must have different texts.
        assert_ne!(half.shape(), plain.shape());
        assert_eq!(half.to_builder().half_scores(false).build().unwrap(), plain);
    }
}
