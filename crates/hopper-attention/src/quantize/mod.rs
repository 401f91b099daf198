//! From 16-bit and 32-bit tensors to e4m3 operands: [`Quantizer`].

#[cfg(feature = "cuda")]
mod cuda;
mod plan;
mod select;

use std::fmt;

use crate::{
    DType, E4M3, E4M3_HALF_SCORES_MAX, E4M3_MAX, Error, ForwardProblem, Operand, Result, TensorMut, TensorRef, checks,
};

pub use plan::QuantizePlan;
pub(crate) use plan::check_counts;
#[cfg(feature = "cuda")]
pub(crate) use select::Row;
pub(crate) use select::{Choice, NAMES, Name, check_tensor};

/// Takes Q, K and V of a problem with e4m3 operands to e4m3, with the factors that its [`Scaling`](crate::Scaling) asks for.
///
/// ```text
/// descale = max(amax / most, the smallest normal f32)     amax: the largest finite magnitude that shares the factor
/// stored  = e4m3(x * (1 / descale))                       to nearest even; both divisions and the product in f32
/// ```
///
/// or with factors that are given. `most` is 448, but 14 for Q and K of a problem with
/// [`half_scores`](ForwardProblem::half_scores), for which the operands are small enough with any factors. A magnitude that rounding
/// would take beyond `most`, as is possible with given ones only, is stored as `most`. What is not finite becomes NaN, which
/// attention carries on to the rows that it touches; e4m3 has no infinity. How often either happens can be
/// [counted](QuantizeArgs::counts).
///
/// A GPU does the same, bit for bit: one pass over a tensor, but two where a factor is of more rows than the GPU
/// takes at a time: some 33,000 of a head. Its kernels read bf16 and f16 and take head dims that are multiples of 16 up to 128.
///
/// # Incoherent processing
///
/// With [`hadamard`](Self::hadamard), Q and K are rotated over the head dim before: signs of a seed, then a Hadamard
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
/// let dims = Dims { batch: 1, seqlen_q: 2, seqlen_kv: 2, heads_q: 1, heads_kv: 1, head_dim_qk: 4, head_dim_vo: 4 };
/// let problem = ForwardProblem::new(DType::E4M3, dims)?;
/// let plan = Quantizer::of(&problem, DType::BF16)?.plan(&Device::cpu())?;
///
/// let (v, layout) = ([-0.5, 0.0, 7.0, 1.0].map(bf16::from_f32).repeat(2), Layout::contiguous(problem.v_shape())?);
/// let (mut stored, mut descale) = ([E4M3::from_bits(0); 8], [0.0]);
/// let args = QuantizeArgs {
///     q: None,
///     k: None,
///     v: Some(Quantize {
///         values: TensorRef::host(&v, layout)?,
///         stored: TensorMut::host(&mut stored, layout)?,
///         descale: Descale::FromAmax(TensorMut::host(&mut descale, Layout::contiguous(problem.descale_v_shape())?)?),
///     }),
///     counts: None,
/// };
/// plan.run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?, args)?;
/// assert_eq!((descale, stored[2].to_f64()), ([7.0 / 448.0], 448.0));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Quantizer {
    problem: ForwardProblem,
    source: DType,
    hadamard: Option<u64>,
}

impl Quantizer {
    /// For the operands of this problem, from tensors of this type, without incoherent processing.
    ///
    /// # Errors
    /// [`Error::Dtype`] for a problem whose operands are not e4m3, and for a source that is not bf16, f16 or f32.
    pub fn of(problem: &ForwardProblem, source: DType) -> Result<Self> {
        checks::dtype("problem", problem.dtype(), DType::E4M3, "which is what there is to quantise to")?;
        if !matches!(source, DType::BF16 | DType::F16 | DType::F32) {
            return Err(Error::Dtype { what: "source", got: source, allowed: "bf16, f16, f32".into() });
        }
        Ok(Self { problem: problem.clone(), source, hadamard: None })
    }

    /// The same with Q and K rotated by the signs of this seed and a Hadamard transform. Queries and keys that meet must
    /// have been rotated with the same seed.
    #[must_use]
    pub fn hadamard(self, seed: u64) -> Self {
        Self { hadamard: Some(seed), ..self }
    }

    /// The largest magnitude that it stores of an operand.
    pub(crate) fn most(&self, of: &Name) -> f32 {
        if of.scored && self.problem.half_scores_value() { E4M3_HALF_SCORES_MAX } else { E4M3_MAX }
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
    pub fn hadamard_value(&self) -> Option<u64> {
        self.hadamard
    }
}

impl fmt::Display for Quantizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scaling = self.problem.scaling_value().unwrap_or_default();
        let half_scores = if self.problem.half_scores_value() { " half-scores" } else { "" };
        write!(f, "quantise {} to e4m3 {scaling}{half_scores}", self.source)?;
        self.hadamard.map_or(Ok(()), |seed| write!(f, " hadamard {seed}"))
    }
}

/// What is quantised: any of Q, K and V.
pub struct QuantizeArgs<'a, T: Operand> {
    /// Queries.
    pub q: Option<Quantize<'a, T>>,
    /// Keys.
    pub k: Option<Quantize<'a, T>>,
    /// Values.
    pub v: Option<Quantize<'a, T>>,
    /// Where to count, `[3, 2]`: for q, k and v, the elements whose magnitude was too large and was stored as 448 (or 14, see
    /// [`Quantizer`]), and those that were not finite and were stored as NaN (with incoherent processing, after the rotation). In f32, so exact up to
    /// 2^24. 0 for what was not quantised.
    pub counts: Option<TensorMut<'a, f32, 2>>,
}

/// One tensor: `[batch, seqlen, heads, head_dim]` in the shape that the problem has for it.
pub struct Quantize<'a, T: Operand> {
    /// What is read.
    pub values: TensorRef<'a, T, 4>,
    /// What is written.
    pub stored: TensorMut<'a, E4M3, 4>,
    /// Its factors, `[batch, heads, blocks]` as [`Scaling`](crate::Scaling) says.
    pub descale: Descale<'a>,
}

/// Where factors come from.
pub enum Descale<'a> {
    /// From the largest finite magnitude that shares each: written.
    FromAmax(TensorMut<'a, f32, 3>),
    /// From the caller: read. Finite and above 0, which the CPU checks and a GPU takes for granted.
    Given(TensorRef<'a, f32, 3>),
}
