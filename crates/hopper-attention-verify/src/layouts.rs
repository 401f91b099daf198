//! How the tensors of a case lie in memory.

use hopper_attention::Layout;
use serde::{Deserialize, Serialize};

/// Elements: gaps are multiples of it, so that every row starts at a multiple of 16 bytes for 16-bit types, as a GPU
/// asks.
const STEP: usize = 8;

/// A way to lay out all tensors of a case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Placement {
    /// `[batch, seqlen, heads, head_dim]` without gaps.
    #[default]
    Bshd,
    /// `[batch, heads, seqlen, head_dim]` without gaps.
    Bhsd,
    /// `[batch, seqlen, heads, head_dim]` with gaps after each head, token and sequence.
    BshdGaps,
    /// `[batch, heads, seqlen, head_dim]` with gaps after each token, head and sequence.
    BhsdGaps,
    /// `[seqlen, batch, heads, head_dim]`.
    Sbhd,
    /// Every sequence of the batch reads the same K and V (stride 0).
    SharedBatch,
    /// Every head reads the same K and V (stride 0), though the problem has several.
    SharedHeads,
    /// Dimensions of size 1 have strides that no kernel could use; they must not matter.
    WildUnits,
}

impl Placement {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Bshd,
        Self::Bhsd,
        Self::BshdGaps,
        Self::BhsdGaps,
        Self::Sbhd,
        Self::SharedBatch,
        Self::SharedHeads,
        Self::WildUnits,
    ];

    /// The layout of a tensor `[batch, seqlen, heads, head_dim]`; only `shareable` ones may use an element twice.
    pub fn layout(self, shape: [usize; 4], shareable: bool) -> Layout<4> {
        let [batch, seqlen, heads, dim] = shape;
        let (gap_dim, gap_row, gap_all) = match self {
            Self::BshdGaps | Self::BhsdGaps => (STEP, 3 * STEP, 5 * STEP),
            _ => (0, 0, 0),
        };
        let row = dim + gap_dim;
        let mut stride = match self {
            Self::Bhsd | Self::BhsdGaps => {
                let head = row * seqlen.max(1) + gap_row;
                [head * heads + gap_all, row, head, 1]
            }
            Self::Sbhd => [row * heads, row * heads * batch.max(1), row, 1],
            _ => {
                let token = row * heads + gap_row;
                [token * seqlen.max(1) + gap_all, token, row, 1]
            }
        };
        match self {
            Self::SharedBatch if shareable => stride[0] = 0,
            Self::SharedHeads if shareable => stride[2] = 0,
            Self::WildUnits => {
                for axis in 0..3 {
                    if shape[axis] == 1 {
                        stride[axis] = 12_345;
                    }
                }
            }
            _ => {}
        }
        Layout::with_strides(shape, stride.map(|step| step as i64)).expect("a small layout")
    }

    /// The layout of an LSE `[batch, heads, seqlen]`; f32 rows need no alignment.
    pub fn lse_layout(self, shape: [usize; 3]) -> Layout<3> {
        let [_, heads, seqlen] = shape;
        let (gap_row, gap_all) = if matches!(self, Self::BshdGaps | Self::BhsdGaps) { (5, 3) } else { (0, 0) };
        let head = seqlen.max(1) + gap_row;
        let stride = [head * heads + gap_all, head, 1].map(|step| step as i64);
        Layout::with_strides(shape, stride).expect("a small layout")
    }
}
