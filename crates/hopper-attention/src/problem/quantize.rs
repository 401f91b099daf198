//! How Q, K and V are quantised to e4m3: [`Quantizer`].

use std::fmt;

use super::forward::ForwardProblem;
use crate::dtype::{DType, E4M3_HALF_SCORES_MAX, E4M3_MAX};
use crate::error::{Error, Result};
use crate::operand::{Operand, Operands, Slot};

/// Quantises Q, K and V of a problem with e4m3 operands, from bf16, f16 or f32 tensors.
///
/// Elements that share a descale factor (the problem's [`Scaling`](crate::Scaling) says which) are stored as follows. `amax` is
/// the largest finite magnitude among them. `limit` is the largest magnitude that may be stored.
///
/// ```text
/// descale = max(amax / limit, the smallest normal f32)
/// stored  = e4m3(x * (1 / descale))                       to nearest even; both divisions and the product in f32
/// ```
///
/// - The caller may give the factors instead. The first line is then left out.
/// - `limit` is 448. For Q and K of a problem with [`half_scores`](crate::ForwardProblemBuilder::half_scores) it is 14, also
///   where the caller gives the factors.
/// - An element is *saturated* if its magnitude would round to more than `limit`. The stored value is then `limit`, with the sign
///   of the element. Only given factors can lead to this.
/// - An element that is not finite is stored as NaN, because e4m3 has no infinity. Attention carries a NaN on to the rows that
///   it touches.
/// - [`counts`](crate::QuantizeArgs::counts) gives the number of saturated elements and of elements that are not finite.
///
/// The CPU takes any head dims and all three types. A GPU gives the same bytes. GPU kernels read bf16 and f16, and take head
/// dims that are multiples of 16 up to 256. A kernel reads a tensor once, or twice if too many rows share a factor: on 132
/// multiprocessors more than about 57,000 rows, or 38,000 with incoherent processing. (At head dims up to 64 these limits are
/// twice as high, above 128 half as high.)
///
/// # Sequences of different lengths
///
/// Where the problem has packed tensors or used lengths, only the rows of sequences are read and written, and counted. A run
/// is given the offsets and used lengths of each side that it quantises. With the problem's
/// [`fill_gaps`](crate::ForwardProblemBuilder::fill_gaps) zeros are stored in the other rows, and a factor per block that
/// belongs to no sequence is that of zeros. Otherwise these are not written. A sequence without rows has a factor per head all
/// the same: that of zeros.
///
/// A GPU reads the lengths when the work runs. So one plan, and one captured graph, serve all lengths. The kernels read a tensor
/// with lengths of its own twice, unless factors are per block or given.
///
/// # Incoherent processing
///
/// With [`hadamard`](QuantizerBuilder::hadamard), each query and key is rotated before it is quantised: its elements are
/// multiplied by random signs that follow from a seed, then a Hadamard transform is applied over the head dim. Signs and
/// transform together are one orthonormal matrix, the same for Q and K, so `Q K^T` stays the same. The rotation spreads an
/// outlier over its whole vector, so that rounding errors average out. V is not rotated.
///
/// *Signs.* SplitMix64 with the seed gives a sequence of 64-bit numbers. If the top bit of number `d` (from 0) is set, element
/// `d` of every query and key is negated. In 64-bit integers that wrap, number `d` is
///
/// ```text
/// z = seed + (d + 1) * 0x9e3779b97f4a7c15
/// z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;  z = (z ^ z >> 27) * 0x94d049bb133111eb;  z ^ z >> 31
/// ```
///
/// *Transform.* A head dim is cut into blocks whose sizes are the powers of two of its binary representation, largest first:
/// 128 is one block, 80 is 64 and 16, 112 is 64, 32 and 16, 192 is 128 and 64. Each block is multiplied by the Hadamard
/// matrix of its size in Sylvester's order, `(-1)^popcount(i & j) / sqrt(size)`. The arithmetic is f32, in this order:
///
/// 1. For `h` = 1, 2, 4, ..: cut the vector into runs of `2 h` elements, without a last run that is shorter. In each run,
///    elements `i` and `i + h` become their sum and their difference.
/// 2. Multiply each element by `size^-0.5` of its block, rounded to f32.
///
/// ```
/// use hopper_attention::*;
///
/// # fn main() -> Result<()> {
/// let problem = ForwardProblem::builder(DType::E4M3, Dims::new(1, 2, 1, 4)).build()?;
/// let plan = Quantizer::builder(&problem, DType::BF16).build()?.plan(&Device::cpu())?;
///
/// let (v, layout) = ([-0.5, 0.0, 7.0, 1.0].map(bf16::from_f32).repeat(2), Layout::contiguous(problem.v_shape())?);
/// let (mut stored, mut descale) = ([E4M3::from_bits(0); 8], [0.0]);
/// let of_descale = Layout::contiguous(problem.descale_v_shape())?;
/// let args = QuantizeArgs::new().v(
///     TensorRef::host(&v, layout)?,
///     TensorMut::host(&mut stored, layout)?,
///     Descale::FromAmax(TensorMut::host(&mut descale, of_descale)?),
/// );
/// plan.run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?, args)?;
/// assert_eq!((descale, stored[2].to_f64()), ([7.0 / 448.0], 448.0));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Quantizer {
    problem: ForwardProblem,
    source: DType,
    hadamard: Option<u64>,
}

/// The options of a [`Quantizer`]. [`build`](Self::build) checks them.
#[derive(Clone, Debug)]
#[must_use]
pub struct QuantizerBuilder {
    problem: ForwardProblem,
    source: DType,
    hadamard: Option<u64>,
}

impl QuantizerBuilder {
    /// Rotates Q and K before they are quantised, with the signs of this seed (default: no rotation).
    ///
    /// Queries and keys of one forward pass must be rotated with the same seed.
    pub fn hadamard(self, seed: u64) -> Self {
        Self { hadamard: Some(seed), ..self }
    }

    /// Checks the options and makes the quantiser.
    ///
    /// # Errors
    /// [`Error::Dtype`] when the problem's operands are not e4m3, and when the source type is not bf16, f16 or f32.
    pub fn build(self) -> Result<Quantizer> {
        let Self { problem, source, hadamard } = self;
        if problem.dtype() != DType::E4M3 {
            let allowed = "e4m3, the type that the quantiser makes".into();
            return Err(Error::Dtype { what: "forward problem", got: problem.dtype(), allowed });
        }
        if !matches!(source, DType::BF16 | DType::F16 | DType::F32) {
            return Err(Error::Dtype { what: "source", got: source, allowed: "bf16, f16, f32".into() });
        }
        Ok(Quantizer { problem, source, hadamard })
    }
}

impl Quantizer {
    /// A builder for a quantiser that makes the operands of `problem` from tensors of type `source`.
    pub fn builder(problem: &ForwardProblem, source: DType) -> QuantizerBuilder {
        QuantizerBuilder { problem: problem.clone(), source, hadamard: None }
    }

    /// A builder with the options of this quantiser, to make a similar one.
    pub fn to_builder(&self) -> QuantizerBuilder {
        let Self { problem, source, hadamard } = self.clone();
        QuantizerBuilder { problem, source, hadamard }
    }

    /// The tensors that a run reads and writes.
    ///
    /// Each of q, k and v that is quantised has its values, its stored elements and its factors. The factors are either
    /// written or given.
    pub fn operands(&self) -> Operands {
        let [q, k, v] = TENSORS.map(|tensor| tensor.operands(self));
        let [[q0, q1, q2, q3], [k0, k1, k2, k3], [v0, v1, v2, v3]] = [q, k, v];
        let counts = Operand::write(Slot::Counts, DType::F32, [3, 2]).optional();
        // A run that does not quantise Q reads no lengths of Q. `check_together` says when they must be given.
        let [c0, c1, u0, u1] =
            self.problem.lengths().map(|row| if self.problem.wants(row.slot()) { row.optional() } else { row });
        Operands::of([q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, counts, c0, c1, u0, u1])
    }

    /// The largest magnitude that may be stored of a tensor: `limit` in the formula above.
    pub(crate) fn largest_stored(&self, tensor: &Source) -> f32 {
        if tensor.scored && self.problem.allows_half_scores() { E4M3_HALF_SCORES_MAX } else { E4M3_MAX }
    }

    /// The problem whose operands the quantiser makes.
    pub fn problem(&self) -> &ForwardProblem {
        &self.problem
    }

    /// The element type of the tensors that the quantiser reads.
    pub fn source(&self) -> DType {
        self.source
    }

    /// The seed of the signs. `None` where Q and K are not rotated.
    pub fn hadamard(&self) -> Option<u64> {
        self.hadamard
    }
}

impl fmt::Display for Quantizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scaling = self.problem.scaling().unwrap_or_default();
        let half_scores = if self.problem.allows_half_scores() { " half-scores" } else { "" };
        write!(f, "quantise {} to e4m3 {scaling}{half_scores}", self.source)?;
        self.hadamard.map_or(Ok(()), |seed| write!(f, " hadamard {seed}"))
    }
}

/// The four operands of one tensor that is quantised, and how a problem gives their shapes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub values: Slot,
    pub stored: Slot,
    /// The factors, where the quantiser makes and writes them.
    pub descale: Slot,
    /// The factors, where the caller gives them.
    pub given: Slot,
    /// The shape of the values and of the stored elements.
    pub shape: fn(&ForwardProblem) -> [usize; 4],
    /// The shape of the factors.
    pub factors: fn(&ForwardProblem) -> [usize; 3],
    /// Whether the sequences of the tensor are packed.
    pub packed: fn(&ForwardProblem) -> bool,
    /// The operands with the offsets and with the used lengths of the tensor's sequences.
    pub lengths: [Slot; 2],
    /// Whether scores are computed from the tensor: true for Q and K. These may be rotated, and are stored with smaller
    /// magnitudes for scores in f16.
    pub scored: bool,
}

impl Source {
    fn operands(&self, quantizer: &Quantizer) -> [Operand; 4] {
        let problem = &quantizer.problem;
        let (shape, factors, packed) = ((self.shape)(problem), (self.factors)(problem), (self.packed)(problem));
        let packed_blocks = packed && problem.has_factors_per_block();
        [
            Operand::read(self.values, quantizer.source, shape).packed(packed).optional(),
            Operand::write(self.stored, DType::E4M3, shape).packed(packed).optional(),
            Operand::write(self.descale, DType::F32, factors).packed(packed_blocks).optional(),
            Operand::read(self.given, DType::F32, factors).packed(packed_blocks).optional(),
        ]
    }
}

/// The tensors that can be quantised: Q, K and V.
pub(crate) const TENSORS: [Source; 3] = [
    Source {
        values: Slot::QValues,
        stored: Slot::QStored,
        descale: Slot::QDescale,
        given: Slot::QDescaleGiven,
        shape: ForwardProblem::q_shape,
        factors: ForwardProblem::descale_q_shape,
        packed: ForwardProblem::is_packed_q,
        lengths: [Slot::CuSeqlensQ, Slot::SequsedQ],
        scored: true,
    },
    Source {
        values: Slot::KValues,
        stored: Slot::KStored,
        descale: Slot::KDescale,
        given: Slot::KDescaleGiven,
        shape: ForwardProblem::k_shape,
        factors: ForwardProblem::descale_k_shape,
        packed: ForwardProblem::is_packed_kv,
        lengths: [Slot::CuSeqlensKv, Slot::SequsedKv],
        scored: true,
    },
    Source {
        values: Slot::VValues,
        stored: Slot::VStored,
        descale: Slot::VDescale,
        given: Slot::VDescaleGiven,
        shape: ForwardProblem::v_shape,
        factors: ForwardProblem::descale_v_shape,
        packed: ForwardProblem::is_packed_kv,
        lengths: [Slot::CuSeqlensKv, Slot::SequsedKv],
        scored: false,
    },
];
