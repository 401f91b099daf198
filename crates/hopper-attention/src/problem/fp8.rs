//! What a problem with e4m3 operands has more: factors of its inputs, a choice of outputs.

use std::fmt;

use super::ForwardProblem;
use crate::{DType, Error, Result, Scaling};

/// The options of a problem with e4m3 operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Fp8 {
    output: DType,
    scaling: Scaling,
    half_scores: bool,
    amax: bool,
}

impl Fp8 {
    /// Of operands of this type: none where they are not e4m3.
    pub fn of(dtype: DType) -> Option<Self> {
        let fp8 = Self { output: DType::BF16, scaling: Scaling::PerTensor, half_scores: false, amax: false };
        (dtype == DType::E4M3).then_some(fp8)
    }
}

impl fmt::Display for Fp8 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let half_scores = if self.half_scores { " half-scores" } else { "" };
        write!(f, " {}{half_scores} to {}{}", self.scaling, self.output, if self.amax { " amax" } else { "" })
    }
}

/// Problems with e4m3 operands (FP8). A real value of Q, K or V is what is stored times its descale factor; for O see
/// [`output`](Self::output). They run with [`run_fp8`](crate::ForwardPlan::run_fp8) and have no backward pass.
///
/// ```
/// use hopper_attention::{DType, Dims, ForwardProblem, Scaling};
/// # fn main() -> hopper_attention::Result<()> {
/// let dims = Dims { batch: 2, seqlen_q: 300, seqlen_kv: 512, heads_q: 8, heads_kv: 2, head_dim_qk: 64, head_dim_vo: 64 };
/// let problem = ForwardProblem::new(DType::E4M3, dims)?.scaling(Scaling::PerBlock)?.output(DType::F16)?;
/// assert_eq!((problem.descale_q_shape(), problem.descale_k_shape()), ([2, 8, 3], [2, 2, 4]));
/// # Ok(()) }
/// ```
impl ForwardProblem {
    /// The same problem with an output of this type: for e4m3 operands bf16 (the default), f16, or e4m3, where what is
    /// stored is O times the argument `scale_o`; for others their own type.
    ///
    /// # Errors
    /// [`Error::Dtype`] for any other type.
    pub fn output(self, dtype: DType) -> Result<Self> {
        match self.fp8 {
            Some(fp8) if dtype != DType::F32 => Ok(Self { fp8: Some(Fp8 { output: dtype, ..fp8 }), ..self }),
            None if dtype == self.dtype => Ok(self),
            fp8 => {
                let allowed =
                    if fp8.is_some() { "bf16, f16, e4m3".into() } else { format!("{}, the operands'", self.dtype) };
                Err(Error::Dtype { what: "o", got: dtype, allowed })
            }
        }
    }

    /// The same problem with descale factors of Q, K and V shared by so many elements (default: per tensor).
    ///
    /// # Errors
    /// [`Error::Value`] for operands that are not e4m3, which have no factors.
    pub fn scaling(self, scaling: Scaling) -> Result<Self> {
        let fp8 = self.e4m3("scaling", scaling.name())?;
        Ok(Self { fp8: Some(Fp8 { scaling, ..fp8 }), ..self })
    }

    /// The same problem with or without the largest magnitude of O as an output: f32, `[1]`, of O before it is scaled
    /// and rounded to its type. 0 where O is empty, NaN where an element of O is NaN.
    ///
    /// # Errors
    /// [`Error::Value`] for operands that are not e4m3.
    pub fn amax(self, wanted: bool) -> Result<Self> {
        let fp8 = self.e4m3("amax", "asked for")?;
        Ok(Self { fp8: Some(Fp8 { amax: wanted, ..fp8 }), ..self })
    }

    /// The same problem with or without scores in f16, which the tensor cores of a GPU sum faster than in f32. They hold
    /// where no stored element of Q or K is larger in magnitude than
    /// [`E4M3_HALF_SCORES_MAX`](crate::E4M3_HALF_SCORES_MAX), 14, and a [`Quantizer`](crate::Quantizer) of such a problem makes
    /// no larger ones.
    ///
    /// Results are right either way: the kernel looks at every element of Q and K that it reads, and where one is larger, or
    /// a NaN, the kernel with scores in f32 that is launched behind it, [`Choice::fallback`](crate::plan::Choice::fallback), computes
    /// all again, and the problem takes twice as long and more. The CPU sums in f32 anyway.
    ///
    /// # Errors
    /// [`Error::Value`] for operands that are not e4m3.
    pub fn half_scores(self, wanted: bool) -> Result<Self> {
        let fp8 = self.e4m3("half_scores", "asked for")?;
        Ok(Self { fp8: Some(Fp8 { half_scores: wanted, ..fp8 }), ..self })
    }

    fn e4m3(&self, what: &'static str, got: &str) -> Result<Fp8> {
        self.fp8.ok_or_else(|| Error::Value {
            what,
            got: format!("{got}, with {} operands", self.dtype),
            allowed: "with e4m3 operands only".into(),
        })
    }

    /// The element type of O: that of the operands, or what [`output`](Self::output) chose.
    pub fn output_dtype(&self) -> DType {
        self.fp8.map_or(self.dtype, |fp8| fp8.output)
    }

    /// How many elements share a descale factor; `None` for operands that are not e4m3.
    pub fn scaling_value(&self) -> Option<Scaling> {
        self.fp8.map(|fp8| fp8.scaling)
    }

    /// Whether the largest magnitude of O is an output.
    pub fn wants_amax(&self) -> bool {
        self.fp8.is_some_and(|fp8| fp8.amax)
    }

    /// Whether scores may be in f16.
    pub fn half_scores_value(&self) -> bool {
        self.fp8.is_some_and(|fp8| fp8.half_scores)
    }

    /// Whether the factor of a stored O is an input: where the output is e4m3.
    pub fn takes_scale_o(&self) -> bool {
        self.output_dtype() == DType::E4M3
    }

    /// `[batch, heads, blocks]` of Q's factors, as [`Scaling`] says; `[0, 0, 0]` where there are none.
    pub fn descale_q_shape(&self) -> [usize; 3] {
        self.descale_shape(self.q_shape())
    }

    /// `[batch, heads, blocks]` of K's factors, as [`Scaling`] says; `[0, 0, 0]` where there are none.
    pub fn descale_k_shape(&self) -> [usize; 3] {
        self.descale_shape(self.k_shape())
    }

    /// `[batch, heads, blocks]` of V's factors, as [`Scaling`] says; `[0, 0, 0]` where there are none.
    pub fn descale_v_shape(&self) -> [usize; 3] {
        self.descale_shape(self.v_shape())
    }

    fn descale_shape(&self, of: [usize; 4]) -> [usize; 3] {
        self.fp8.map_or([0; 3], |fp8| fp8.scaling.shape(of, self.dims.heads_kv))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dims;

    const DIMS: Dims =
        Dims { batch: 2, seqlen_q: 129, seqlen_kv: 256, heads_q: 6, heads_kv: 2, head_dim_qk: 16, head_dim_vo: 8 };

    fn problem(dtype: DType) -> ForwardProblem {
        ForwardProblem::new(dtype, DIMS).unwrap()
    }

    #[test]
    fn the_scaling_gives_the_shapes_of_the_factors() {
        let shapes = |scaling| {
            let problem = problem(DType::E4M3).scaling(scaling).unwrap();
            assert_eq!(problem.scaling_value(), Some(scaling));
            [problem.descale_q_shape(), problem.descale_k_shape(), problem.descale_v_shape()]
        };
        assert_eq!(shapes(Scaling::PerTensor), [[1, 1, 1]; 3]);
        assert_eq!(shapes(Scaling::PerHead), [[2, 2, 1]; 3]);
        assert_eq!(shapes(Scaling::PerBlock), [[2, 6, 2], [2, 2, 2], [2, 2, 2]]);
        let wide = problem(DType::BF16);
        assert_eq!((wide.scaling_value(), wide.descale_q_shape()), (None, [0, 0, 0]));
    }

    #[test]
    fn outputs_are_chosen_for_e4m3_operands_only() {
        let e4m3 = problem(DType::E4M3);
        assert_eq!((e4m3.output_dtype(), e4m3.takes_scale_o(), e4m3.wants_amax()), (DType::BF16, false, false));
        for output in [DType::BF16, DType::F16, DType::E4M3] {
            let problem = e4m3.clone().output(output).unwrap();
            assert_eq!((problem.output_dtype(), problem.takes_scale_o()), (output, output == DType::E4M3));
        }
        let text = e4m3.output(DType::F32).unwrap_err().to_string();
        assert_eq!(text, "o: dtype f32; allowed: bf16, f16, e4m3");
        let bf16 = problem(DType::BF16);
        assert_eq!(bf16.clone().output(DType::BF16).unwrap(), bf16);
        let text = bf16.clone().output(DType::F16).unwrap_err().to_string();
        assert_eq!(text, "o: dtype f16; allowed: bf16, the operands'");
        let text = bf16.clone().scaling(Scaling::PerHead).unwrap_err().to_string();
        assert_eq!(text, "scaling: per-head, with bf16 operands; allowed: with e4m3 operands only");
        assert!(bf16.clone().amax(true).unwrap_err().to_string().starts_with("amax: asked for"));
        for wanted in [true, false] {
            let text = bf16.clone().half_scores(wanted).unwrap_err().to_string();
            assert_eq!(text, "half_scores: asked for, with bf16 operands; allowed: with e4m3 operands only");
        }
        assert!(!bf16.half_scores_value());
    }

    #[test]
    fn display() {
        let text = problem(DType::E4M3).scaling(Scaling::PerBlock).unwrap().amax(true).unwrap().to_string();
        let want = "forward e4m3 per-block to bf16 amax batch 2 seqlen 129x256 heads 6/2 head_dim 16/8 full scale 0.25";
        assert_eq!(text, want);
    }

    #[test]
    fn half_scores_make_another_problem() {
        let plain = problem(DType::E4M3).scaling(Scaling::PerHead).unwrap();
        let half = plain.clone().half_scores(true).unwrap();
        assert!(half.half_scores_value() && !plain.half_scores_value() && half != plain);
        let want =
            "forward e4m3 per-head half-scores to f16 batch 2 seqlen 129x256 heads 6/2 head_dim 16/8 full scale 0.25";
        assert_eq!(half.clone().output(DType::F16).unwrap().to_string(), want);
        // What is measured to be the fastest is noted by shape.
        assert_ne!(half.shape(), plain.shape());
        assert_eq!(half.half_scores(false).unwrap(), plain);
    }
}
