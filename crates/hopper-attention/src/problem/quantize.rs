//! How Q, K and V are taken to e4m3: [`Quantizer`].

use std::fmt;

use super::forward::ForwardProblem;
use crate::dtype::{DType, E4M3_HALF_SCORES_MAX, E4M3_MAX};
use crate::error::{Error, Result};
use crate::operand::{Operand, Operands, Slot};

/// Takes Q, K and V of a problem with e4m3 operands to e4m3, with the factors that its [`Scaling`](crate::Scaling) asks for.
///
/// ```text
/// descale = max(amax / most, the smallest normal f32)     amax: the largest finite magnitude that shares the factor
/// stored  = e4m3(x * (1 / descale))                       to nearest even; both divisions and the product in f32
/// ```
///
/// or with factors that are given. `most` is 448, but 14 for Q and K of a problem with
/// [`half_scores`](crate::ForwardProblemBuilder::half_scores), for which the operands are small enough with any factors. A magnitude that rounding
/// would take beyond `most`, as is possible with given ones only, is stored as `most`. What is not finite becomes NaN, which
/// attention carries on to the rows that it touches; e4m3 has no infinity. How often either happens can be
/// [counted](crate::QuantizeArgs::counts).
///
/// A GPU does the same, bit for bit: one pass over a tensor, but two where a factor is of more rows than the GPU
/// takes at a time: some 33,000 of a head. Its kernels read bf16 and f16 and take head dims that are multiples of 16 up to 128.
///
/// # Incoherent processing
///
/// With [`hadamard`](QuantizerBuilder::hadamard), Q and K are rotated over the head dim before: signs of a seed, then a Hadamard
/// transform. It leaves `Q K^T` as it is, since the same orthonormal matrix is on both sides, and spreads outliers over
/// a vector, so that their rounding errors average out. V is not touched.
///
/// *Signs.* Element `d` of every query and key is negated where the top bit is set of output `d` (from 0) of SplitMix64
/// started with the seed, in 64-bit integers that wrap:
///
/// ```text
/// z = seed + (d + 1) * 0x9e3779b97f4a7c15
/// z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;  z = (z ^ z >> 27) * 0x94d049bb133111eb;  z ^ z >> 31
/// ```
///
/// *Transform.* A head dim is cut into blocks, the powers of two of its binary representation, largest first: 128 is one
/// block, 80 is 64 and 16, 112 is 64, 32 and 16. Each block is multiplied by the Hadamard matrix of its size in Sylvester's
/// order, `(-1)^popcount(i & j) / sqrt(size)`, in f32: for `h` = 1, 2, 4, .. the pairs `i`, `i + h` of each run of `2 h`
/// elements that ends within the head dim become their sum and difference, and at the end each element is multiplied by
/// its block's `size^-0.5`, rounded to f32.
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

/// The options of a [`Quantizer`], which [`build`](Self::build) checks.
#[derive(Clone, Debug)]
#[must_use]
pub struct QuantizerBuilder {
    problem: ForwardProblem,
    source: DType,
    hadamard: Option<u64>,
}

impl QuantizerBuilder {
    /// Rotates Q and K by the signs of this seed and a Hadamard transform (default: it does not). Queries and keys that meet
    /// must have been rotated with the same seed.
    pub fn hadamard(self, seed: u64) -> Self {
        Self { hadamard: Some(seed), ..self }
    }

    /// Checks everything.
    ///
    /// # Errors
    /// [`Error::Dtype`] for a problem whose operands are not e4m3, and for a source that is not bf16, f16 or f32.
    pub fn build(self) -> Result<Quantizer> {
        let Self { problem, source, hadamard } = self;
        if problem.dtype() != DType::E4M3 {
            let allowed = "e4m3, which is what there is to quantise to".into();
            return Err(Error::Dtype { what: "problem", got: problem.dtype(), allowed });
        }
        if !matches!(source, DType::BF16 | DType::F16 | DType::F32) {
            return Err(Error::Dtype { what: "source", got: source, allowed: "bf16, f16, f32".into() });
        }
        Ok(Quantizer { problem, source, hadamard })
    }
}

impl Quantizer {
    /// Of the operands of this problem, from tensors of this type.
    pub fn builder(problem: &ForwardProblem, source: DType) -> QuantizerBuilder {
        QuantizerBuilder { problem: problem.clone(), source, hadamard: None }
    }

    /// The options of this quantizer, to make another one of them.
    pub fn to_builder(&self) -> QuantizerBuilder {
        let Self { problem, source, hadamard } = self.clone();
        QuantizerBuilder { problem, source, hadamard }
    }

    /// What it reads and writes: for each of q, k and v that is quantised its values, what is stored, and its factors, which
    /// are written or given.
    pub fn operands(&self) -> Operands {
        let [q, k, v] = TENSORS.map(|tensor| tensor.operands(self));
        let [[q0, q1, q2, q3], [k0, k1, k2, k3], [v0, v1, v2, v3]] = [q, k, v];
        let counts = Operand::write(Slot::Counts, DType::F32, [3, 2]).optional();
        Operands::of([q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, counts])
    }

    /// The largest magnitude that it stores of an operand.
    pub(crate) fn largest_stored(&self, tensor: &Source) -> f32 {
        if tensor.scored && self.problem.allows_half_scores() { E4M3_HALF_SCORES_MAX } else { E4M3_MAX }
    }

    /// The problem whose operands it makes.
    pub fn problem(&self) -> &ForwardProblem {
        &self.problem
    }

    /// The element type that it reads.
    pub fn source(&self) -> DType {
        self.source
    }

    /// The seed of the signs, where Q and K are rotated.
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

/// The operands that belong to one tensor that is quantised, and where their shapes are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub values: Slot,
    pub stored: Slot,
    /// Its factors, written.
    pub descale: Slot,
    /// Its factors, read.
    pub given: Slot,
    pub shape: fn(&ForwardProblem) -> [usize; 4],
    pub factors: fn(&ForwardProblem) -> [usize; 3],
    /// Whether scores are made of it: Q and K, which are rotated, and smaller for scores in f16.
    pub scored: bool,
}

impl Source {
    fn operands(&self, quantizer: &Quantizer) -> [Operand; 4] {
        let (shape, factors) = ((self.shape)(&quantizer.problem), (self.factors)(&quantizer.problem));
        [
            Operand::read(self.values, quantizer.source, shape).optional(),
            Operand::write(self.stored, DType::E4M3, shape).optional(),
            Operand::write(self.descale, DType::F32, factors).optional(),
            Operand::read(self.given, DType::F32, factors).optional(),
        ]
    }
}

/// Q, K and V.
pub(crate) const TENSORS: [Source; 3] = [
    Source {
        values: Slot::QValues,
        stored: Slot::QStored,
        descale: Slot::QDescale,
        given: Slot::QDescaleGiven,
        shape: ForwardProblem::q_shape,
        factors: ForwardProblem::descale_q_shape,
        scored: true,
    },
    Source {
        values: Slot::KValues,
        stored: Slot::KStored,
        descale: Slot::KDescale,
        given: Slot::KDescaleGiven,
        shape: ForwardProblem::k_shape,
        factors: ForwardProblem::descale_k_shape,
        scored: true,
    },
    Source {
        values: Slot::VValues,
        stored: Slot::VStored,
        descale: Slot::VDescale,
        given: Slot::VDescaleGiven,
        shape: ForwardProblem::v_shape,
        factors: ForwardProblem::descale_v_shape,
        scored: false,
    },
];
