//! What a problem may do to its scores or read of them, as it holds it: ALiBi's slopes and the maximum logit.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::operand::{Slot, SlotSet};

/// Which ALiBi slopes a problem has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AlibiSlopes {
    /// One for each query head, which all batches share: `[heads_q]`.
    #[default]
    PerHead,
    /// One for each batch and query head: `[batch, heads_q]`. Where sequences are packed, a batch is a sequence.
    PerBatch,
}

/// The slopes as a problem holds them.
///
/// # Errors
/// [`Error::Unsupported`] for slopes with e4m3 operands.
pub(super) fn alibi(asked_for: SlotSet, slopes: AlibiSlopes, dtype: DType) -> Result<Option<AlibiSlopes>> {
    let alibi = asked_for.contains(Slot::AlibiSlopes).then_some(slopes);
    if alibi.is_some() && dtype == DType::E4M3 {
        let nearest = "bf16, f16 or f32 operands, or no alibi".into();
        return Err(Error::Unsupported { wanted: "alibi with e4m3 operands".into(), nearest });
    }
    Ok(alibi)
}

/// Refuses the output for operands that do not have it.
pub(super) fn max_logits(asked_for: SlotSet, dtype: DType) -> Result<()> {
    if asked_for.contains(Slot::MaxLogits) && dtype == DType::E4M3 {
        let nearest = "bf16, f16 or f32 operands, or no max_logits".into();
        return Err(Error::Unsupported { wanted: "max_logits with e4m3 operands".into(), nearest });
    }
    Ok(())
}
