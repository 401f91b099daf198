//! What is told of a tensor that was judged.

use std::fmt;

/// How one tensor compares with the tolerance.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Figures {
    /// The largest error as a fraction of its bound. At most 1 within the tolerance. Infinite where a NaN or infinity does not
    /// match.
    pub worst_ratio: f64,
    /// The bound that `worst_ratio` is a fraction of.
    pub worst_bound: Bound,
    /// The index of that error if the bound is for one element: `[batch, token, head, dim]` for an output or a gradient,
    /// `[batch, head, query]` for an LSE. Empty for the other bounds, and if the tensor is empty or has no error.
    pub worst_at: Vec<usize>,
    /// The value that was found there.
    pub worst_got: f64,
    /// The exact value there.
    pub worst_exact: f64,
    /// The largest error.
    pub max: f64,
    /// The largest error of the plain computation.
    pub plain_max: f64,
    /// The root mean square of the errors.
    pub rms: f64,
    /// The root mean square of the plain computation's errors.
    pub plain_rms: f64,
    /// The common factor of the tensor minus 1: `sum (got - exact) * exact / sum exact^2`.
    pub common: f64,
    /// For each kind of bound the largest error as a fraction of it.
    pub ratios: Ratios,
}

/// For each kind of bound the largest error as a fraction of it.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Ratios {
    /// The bounds on the largest error of a row.
    pub row: f64,
    /// The bound on the largest error of the tensor.
    pub tensor: f64,
    /// The bounds on the root mean square.
    pub rms: f64,
    /// The bounds on the common factor.
    pub common: f64,
}

impl Ratios {
    /// The larger of both, kind by kind.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            row: self.row.max(other.row),
            tensor: self.tensor.max(other.tensor),
            rms: self.rms.max(other.rms),
            common: self.common.max(other.common),
        }
    }
}

/// A bound of the tolerance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bound {
    /// The largest error of a row.
    #[default]
    Row,
    /// The largest error of the tensor.
    Tensor,
    /// The root mean square of the errors of a group.
    Rms(Group),
    /// The common factor of a group.
    Common(Group),
}

/// Elements that are judged together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Group {
    /// All of the tensor.
    Tensor,
    /// A head, in all batch elements.
    Head(usize),
    /// One element of the vectors of a head, in all batch elements.
    Column {
        /// The head.
        head: usize,
        /// The element.
        dim: usize,
    },
    /// Neighbouring tokens of one batch element and head.
    Block {
        /// The batch element.
        batch: usize,
        /// The head.
        head: usize,
        /// The first of the tokens.
        first: usize,
    },
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { worst_ratio, worst_at, worst_got, worst_exact, max, plain_max, rms, plain_rms, common, .. } = self;
        write!(f, "error {worst_ratio:.3} of tolerance ({})", self.worst_bound)?;
        if !worst_at.is_empty() {
            write!(f, " at {worst_at:?}: got {worst_got:e}, exact {worst_exact:e}")?;
        }
        write!(f, "; max {max:.2e} (plain {plain_max:.2e}), rms {rms:.2e} (plain {plain_rms:.2e})")?;
        write!(f, ", common factor 1{common:+.1e}")
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Row => f.write_str("largest of its row"),
            Self::Tensor => f.write_str("largest of the tensor"),
            Self::Rms(group) => write!(f, "root mean square of {group}"),
            Self::Common(group) => write!(f, "common factor of {group}"),
        }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensor => f.write_str("the tensor"),
            Self::Head(head) => write!(f, "head {head}"),
            Self::Column { head, dim } => write!(f, "element {dim} of head {head}"),
            Self::Block { batch, head, first } => {
                write!(f, "the tokens from {first} on of batch element {batch}, head {head}")
            }
        }
    }
}
