//! An additive bias of a problem: the option, and the operand.

use super::bias::Bias;
use super::forward::{ForwardProblem, ForwardProblemBuilder};
use crate::dtype::DType;
use crate::operand::{Operand, Slot};

impl ForwardProblemBuilder {
    /// A bias that is added to the scores (default: none). [`Bias`] says what it means. A run reads the operand [`Slot::Bias`].
    ///
    /// A backward pass made from this problem reads the bias, too. Its [`d_bias`](crate::BackwardProblemBuilder::d_bias) asks for the
    /// gradient.
    pub fn bias(mut self, bias: Option<Bias>) -> Self {
        self.bias = bias;
        self
    }
}

impl ForwardProblem {
    /// The form of the bias. `None` where there is none.
    pub fn bias(&self) -> Option<Bias> {
        self.bias
    }

    /// The shape of the bias and of its gradient: `[1 or batch, 1 or heads_q, 1 or seqlen_q, seqlen_kv]`, with what the bias
    /// [covers](Bias::covering) in place of `seqlen_q` and `seqlen_kv` where it says so. `[0, 0, 0, 0]` where there is none.
    pub fn bias_shape(&self) -> [usize; 4] {
        self.bias.map_or([0; 4], |bias| bias.shape(&self.dims()))
    }

    /// The element type of the bias, or f32 where there is none.
    pub(super) fn bias_dtype(&self) -> DType {
        self.bias.map_or(DType::F32, |bias| bias.dtype())
    }

    /// The operand, which every pass of the problem reads.
    pub(super) fn bias_operand(&self) -> Operand {
        Operand::read(Slot::Bias, self.bias_dtype(), self.bias_shape()).when(self.bias.is_some(), "bias")
    }

    /// The text of the bias, where there is one.
    pub(super) fn bias_text(&self) -> String {
        self.bias.map_or(String::new(), |bias| bias.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Result;
    use crate::mask::Mask;
    use crate::operand::{Access, Presence};
    use crate::problem::{BackwardProblem, Dims};
    use crate::sequences::Side;

    fn options(dtype: DType) -> ForwardProblemBuilder {
        ForwardProblem::builder(dtype, Dims::new(2, 5, 6, 16).with_seqlen_kv(9).with_heads_kv(2))
    }

    #[test]
    fn the_bias_is_an_operand_of_both_passes() {
        for (bias, shape, text) in [
            (Bias::new(DType::F32), [1, 1, 1, 9], "bias f32"),
            (Bias::new(DType::F16).per_batch(true), [2, 1, 1, 9], "bias f16 per batch"),
            (Bias::new(DType::BF16).per_head(true), [1, 6, 1, 9], "bias bf16 per head"),
            (Bias::new(DType::F32).per_head(true).per_query(true), [1, 6, 5, 9], "bias f32 per head per query"),
        ] {
            let problem = options(DType::BF16).mask(Mask::causal()).bias(Some(bias)).build().unwrap();
            assert_eq!((problem.to_builder().build().unwrap(), problem.bias()), (problem.clone(), Some(bias)));
            let row = *problem.operands().find(Slot::Bias).unwrap();
            assert_eq!((row.shape(), row.dtype(), row.access()), (&shape[..], bias.dtype(), Access::Read));
            assert_eq!((row.presence(), problem.bias_shape()), (Presence::Required, shape));
            assert!(problem.to_string().contains(&format!("causal {text} scale")), "{problem}");
            // Another problem, which other measurements are filed under.
            let plain = problem.to_builder().bias(None).build().unwrap();
            assert!(plain != problem && plain.shape() != problem.shape());
            assert_eq!(plain.operands().find(Slot::Bias).unwrap().presence(), Presence::Refused);
            let backward = BackwardProblem::builder(&problem).build().unwrap();
            assert_eq!(backward.operands().find(Slot::Bias), Some(&row));
            assert_eq!(backward.operands().find(Slot::DBias).unwrap().presence(), Presence::Refused);
            let with = BackwardProblem::builder(&problem).d_bias(true).build().unwrap();
            let row = *with.operands().find(Slot::DBias).unwrap();
            assert_eq!((row.shape(), row.dtype(), row.access()), (&shape[..], bias.dtype(), Access::Write));
            assert!(row.presence() == Presence::Required && with.wants_d_bias() && !backward.wants_d_bias());
            assert!(with.to_string().contains(&text.to_string()) && with.to_string().contains(" d_bias"), "{with}");
            assert_eq!(with.to_builder().build().unwrap(), with);
            assert!(with != backward);
        }
    }

    #[test]
    fn what_a_bias_does_not_go_with_is_refused_by_name() {
        let refused = |problem: Result<ForwardProblem>| problem.unwrap_err().to_string();
        let bias = Some(Bias::new(DType::F32));
        let text = refused(options(DType::E4M3).bias(bias).build());
        let nearest = "bf16, f16 or f32 operands, or no bias";
        assert_eq!(text, format!("unsupported: a bias with e4m3 operands; nearest: {nearest}"));
        // Sides that are not packed are covered whole.
        let own = Bias::new(DType::F32).per_query(true);
        for (options, bias, text) in [
            (options(DType::F32), own.covering(5, 8), "covering 8 keys; allowed: 9, since they are not packed"),
            (options(DType::F32), own.covering(6, 9), "covering 6 queries; allowed: 5, since they are not packed"),
            (
                options(DType::F32).used_q(true),
                own.covering(4, 9),
                "covering 4 queries; allowed: 5, since they are not packed",
            ),
            (
                options(DType::F32).packed_q(true),
                own.covering(2, 7),
                "covering 7 keys; allowed: 9, since they are not packed",
            ),
        ] {
            assert_eq!(refused(options.bias(Some(bias)).build()), format!("bias: {text}"));
        }
        for dtype in [DType::E4M3, DType::I32] {
            let text = refused(options(DType::BF16).bias(Some(Bias::new(dtype))).build());
            assert_eq!(text, format!("bias: dtype {dtype}; allowed: f32, bf16, f16"));
        }
        let plain = options(DType::BF16).build().unwrap();
        let text = BackwardProblem::builder(&plain).d_bias(true).build().unwrap_err().to_string();
        assert_eq!(text, "d_bias: asked for; allowed: with a forward problem that was made with a bias only");
        let by_name = options(DType::BF16).operand(Slot::Bias, true).build().unwrap_err().to_string();
        assert!(by_name.starts_with("bias: asked for; allowed: "), "{by_name}");
    }

    #[test]
    fn a_bias_of_packed_sequences_covers_what_it_says() {
        let own = Bias::new(DType::F16).per_batch(true).per_query(true);
        for (options, bias, shape, most, text) in [
            (options(DType::BF16).packed(true), own, [2, 1, 5, 9], [5, 9], "bias f16 per batch per query scale"),
            (options(DType::BF16).packed(true), own.covering(3, 20), [2, 1, 3, 20], [3, 20], "per query covering 3 20"),
            (options(DType::BF16).packed_q(true), own.covering(3, 9), [2, 1, 3, 9], [3, 9], "per query covering 3 9"),
            // Queries that share their numbers may be as many as there are.
            (
                options(DType::BF16).packed(true),
                own.per_query(false).covering(3, 4),
                [2, 1, 1, 4],
                [5, 4],
                "covering 4",
            ),
            (
                options(DType::BF16).used_q(true).used_kv(true),
                own,
                [2, 1, 5, 9],
                [5, 9],
                "bias f16 per batch per query scale",
            ),
        ] {
            let problem = options.bias(Some(bias)).build().unwrap();
            assert_eq!((problem.bias_shape(), problem.bias()), (shape, Some(bias)));
            assert_eq!(Side::BOTH.map(|side| side.most_rows(&problem)), most, "{problem}");
            assert!(problem.to_string().contains(text), "{problem}");
            let one = problem.of_sequence(2, 4);
            let queries = if bias.is_per_query() { 2 } else { 1 };
            assert_eq!((one.bias_shape(), one.bias().unwrap().covered()), ([1, 1, queries, 4], None));
        }
    }

    #[test]
    fn a_gradient_that_batches_share_is_written_without_any_batch() {
        let empty = |dims: Dims, bias: Bias| {
            let forward = ForwardProblem::builder(DType::F32, dims).bias(Some(bias)).build().unwrap();
            let of = |d_bias| BackwardProblem::builder(&forward).d_bias(d_bias).build().unwrap().is_empty();
            (of(false), of(true))
        };
        let dims = Dims::new(0, 4, 2, 8);
        assert_eq!(empty(dims, Bias::new(DType::F32)), (true, false));
        assert_eq!(empty(dims, Bias::new(DType::F32).per_batch(true)), (true, true));
        assert_eq!(empty(Dims::new(2, 0, 2, 8), Bias::new(DType::F32)), (true, true));
    }
}
