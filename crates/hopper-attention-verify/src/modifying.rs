//! What modifies the scores and the weights of a case, as the oracle reads it.

use hopper_attention::ForwardProblem;
use hopper_attention::reference::{DropoutMask, Modifiers};

use crate::alibi::AlibiImage;
use crate::bias::BiasImage;
use crate::blocks::BlocksImage;
use crate::sinks::SinksImage;

/// The numbers of a case's images. It borrows none of them, so that what must come out can be computed later.
pub(crate) struct Modifying {
    sinks: Option<Vec<f64>>,
    slopes: Option<Vec<f64>>,
    bias: Option<Vec<f64>>,
    blocks: Option<BlocksImage>,
    dropout_state: Option<[i32; 4]>,
}

impl Modifying {
    /// Those of these images, where the case has them.
    pub(crate) fn of(
        sinks: Option<&SinksImage>,
        alibi: Option<&AlibiImage>,
        bias: Option<&BiasImage>,
        blocks: Option<&BlocksImage>,
        dropout_state: Option<[i32; 4]>,
    ) -> Self {
        Self {
            sinks: sinks.map(SinksImage::values),
            slopes: alibi.map(AlibiImage::values),
            bias: bias.map(BiasImage::values),
            blocks: blocks.cloned(),
            dropout_state,
        }
    }

    /// As the reference takes them.
    pub(crate) fn modifiers(&self, problem: &ForwardProblem) -> Modifiers<'_> {
        Modifiers {
            sinks: self.sinks.as_deref(),
            alibi_slopes: self.slopes.as_deref(),
            bias: self.bias.as_deref(),
            blocks: self.blocks.as_ref().map(BlocksImage::borrowed),
            dropout: DropoutMask::of(problem, self.dropout_state),
        }
    }
}
