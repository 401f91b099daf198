//! One query in each sequence, as a decoder has for each new token: the query heads of a KV head become the queries of one head.
//! That is called *gathering* here.
//!
//! A tile has queries of one head. With one query in a sequence, each query head would have a tile of its own, with one row of many
//! in use, and each would read the keys and values of its KV head. Where a query sees all keys, its place does not matter. So the
//! kernels may take the query heads of a KV head for the queries of one head, which then reads its keys and values once. Nothing
//! moves in memory. The stride from one query to the next is the one from head to head.

use std::borrow::Cow;

use super::fitting::mask_class;
use crate::arch::MaskClass;
use crate::dtype::DType;
use crate::problem::{Dims, ForwardProblem};

/// The problem that kernels compute for this one: the same, or one with the query heads of a KV head as the queries of one head.
///
/// The latter needs one query in each sequence, several query heads for each KV head, and a mask that keeps all keys of that query
/// (as a causal one does at the bottom right). Lengths in memory and lists of blocks are not gathered. Nothing else may depend on
/// the query head: not the sinks, ALiBi slopes, the bias, dropout or the maximum logits. Nor are e4m3 operands gathered: those
/// kernels write the LSE of neighbouring queries side by side. (With a stride there, the compiler has too few registers for one of
/// them.)
pub(super) fn of_kernels(problem: &ForwardProblem) -> Cow<'_, ForwardProblem> {
    let of_heads = problem.sinks().is_some()
        || problem.alibi().is_some()
        || problem.bias().is_some()
        || problem.drops().is_some()
        || problem.wants_max_logits()
        || problem.dtype() == DType::E4M3;
    let dims = problem.dims();
    let is_one = dims.seqlen_q == 1 && !problem.has_lengths() && problem.block_mask().is_none();
    if of_heads || !is_one || dims.group_size() == 1 || mask_class(problem) != MaskClass::Full {
        return Cow::Borrowed(problem);
    }
    // (Queries and keys together may be too many then.)
    problem.unmasked(gathered(dims, dims.group_size())).map_or(Cow::Borrowed(problem), Cow::Owned)
}

/// The sizes with every `heads` query heads as the queries of one head.
pub(crate) fn gathered(dims: Dims, heads: usize) -> Dims {
    dims.with_seqlen_q(dims.seqlen_q * heads).with_heads_q(dims.heads_q / heads)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::{Corner, Mask};
    use crate::problem::{AlibiSlopes, Bias, Dropout, ForwardProblemBuilder};

    const DIMS: Dims = Dims::new(2, 1, 8, 64).with_heads_kv(2).with_seqlen_kv(1000);

    fn is_gathered(builder: ForwardProblemBuilder) -> bool {
        let problem = builder.build().unwrap();
        match of_kernels(&problem) {
            Cow::Borrowed(same) => {
                assert_eq!(same, &problem);
                false
            }
            Cow::Owned(other) => {
                let dims = problem.dims();
                assert_eq!(other.dims(), dims.with_seqlen_q(dims.group_size()).with_heads_q(dims.heads_kv));
                let unmasked = problem.to_builder().mask(Mask::Full).build().unwrap();
                assert_eq!(other.unmasked(dims), Some(unmasked), "all but the sizes and the mask is as it was");
                true
            }
        }
    }

    #[test]
    fn one_query_that_sees_all_keys_is_gathered() {
        let problem = |dims| ForwardProblem::builder(DType::BF16, dims).lse(true).softcap(30.0).softmax_scale(0.5);
        assert!(is_gathered(problem(DIMS)));
        assert!(is_gathered(problem(DIMS.with_heads_kv(1)).mask(Mask::causal())));
        assert!(is_gathered(problem(DIMS).mask(Mask::window(Some(999), None))));
        assert!(!is_gathered(problem(DIMS).mask(Mask::window(Some(998), None))));
        assert!(!is_gathered(problem(DIMS).mask(Mask::Causal { corner: Corner::TopLeft })));
        assert!(!is_gathered(problem(DIMS.with_heads_kv(8))));
        assert!(!is_gathered(problem(DIMS.with_seqlen_q(2))));
        assert!(!is_gathered(problem(DIMS.with_seqlen_q(0))));
        // Four queries and so many keys would be too many.
        assert!(!is_gathered(problem(DIMS.with_seqlen_kv((1 << 30) - 4))));
    }

    #[test]
    fn what_depends_on_the_query_head_stays_as_it_is() {
        let problem = |dtype| ForwardProblem::builder(dtype, DIMS);
        assert!(!is_gathered(problem(DType::E4M3)) && is_gathered(problem(DType::F16)));
        let problem = || problem(DType::F16);
        assert!(!is_gathered(problem().sinks(DType::F32)));
        assert!(!is_gathered(problem().alibi(AlibiSlopes::PerHead)));
        assert!(!is_gathered(problem().bias(Some(Bias::new(DType::F32)))));
        assert!(!is_gathered(problem().max_logits(true)));
        assert!(!is_gathered(problem().dropout(Some(Dropout::new(0.1).unwrap()))));
        assert!(!is_gathered(problem().used_kv(true)));
        assert!(is_gathered(problem()));
    }
}
