//! Attention sinks of a problem: their type, and the operand.

use std::fmt;

use super::forward::{ForwardProblem, ForwardProblemBuilder};
use crate::dtype::DType;
use crate::operand::{Operand, Slot};

impl ForwardProblemBuilder {
    /// Attention sinks (default: none): one logit `s` for each query head, of this type, f32 or bf16.
    ///
    /// A sink takes part in the softmax of every row of its head, and has no value:
    ///
    /// ```text
    /// LSE' = log(exp(LSE) + exp(s))        O' = O * exp(LSE - LSE')
    /// ```
    ///
    /// where LSE and O are those without sinks, and LSE' and O' are what a run writes. The softmax scale does not multiply a
    /// sink, and no mask hides it. (gpt-oss has such sinks. The formula is that of MagiAttention's `attn_sink.md`.)
    ///
    /// - A query without keys has O' = 0 and LSE' = s.
    /// - s = -inf changes nothing. s = inf gives O' = 0 and LSE' = inf.
    /// - A sink that is NaN makes NaN of all rows of its head.
    /// - Rows that belong to no sequence have no sink: see [`fill_gaps`](Self::fill_gaps).
    ///
    /// A run reads the operand [`Slot::Sinks`]. A backward pass takes O' and LSE', and its gradients of Q, K and V are those of
    /// the softmax with sinks. [`BackwardProblemBuilder::d_sinks`](crate::BackwardProblemBuilder::d_sinks) adds that of the
    /// sinks.
    pub fn sinks(self, dtype: DType) -> Self {
        let mut with_sinks = self.operand(Slot::Sinks, true);
        with_sinks.sinks = dtype;
        with_sinks
    }
}

impl ForwardProblem {
    /// The element type of the attention sinks. `None` where there are none.
    pub fn sinks(&self) -> Option<DType> {
        self.sinks
    }

    /// The operand with the sinks.
    pub(super) fn sinks_operand(&self) -> Operand {
        Operand::read(Slot::Sinks, self.sinks.unwrap_or(DType::F32), [self.dims().heads_q])
    }

    /// Prints the type of the sinks, if there are any.
    pub(super) fn write_sinks(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.sinks.map_or(Ok(()), |dtype| write!(f, " sinks {dtype}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::Mask;
    use crate::problem::Dims;

    #[test]
    fn sinks_are_f32_or_bf16_and_one_for_each_query_head() {
        let options = || ForwardProblem::builder(DType::F16, Dims::new(2, 5, 6, 16)).mask(Mask::causal());
        let problem = options().sinks(DType::BF16).build().unwrap();
        let row = *problem.operands().find(Slot::Sinks).unwrap();
        assert_eq!((row.shape(), row.dtype(), problem.sinks()), (&[6][..], DType::BF16, Some(DType::BF16)));
        assert!(problem.to_string().ends_with("scale 0.25 sinks bf16"), "{problem}");
        assert_eq!(problem.to_builder().build().unwrap(), problem);
        let plain = options().build().unwrap();
        assert_eq!(problem.to_builder().operand(Slot::Sinks, false).build().unwrap(), plain);
        assert_eq!((plain.sinks(), problem.shape()), (None, plain.shape()));
        let by_name = options().operand(Slot::Sinks, true).build().unwrap();
        assert_eq!(by_name, options().sinks(DType::F32).build().unwrap());
        assert_eq!(problem.of_sequence(3, 2).sinks(), Some(DType::BF16));
        let text = options().sinks(DType::F16).build().unwrap_err().to_string();
        assert_eq!(text, "sinks: dtype f16; allowed: f32, bf16");
    }
}
