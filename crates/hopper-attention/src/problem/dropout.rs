//! How many weights dropout makes 0: [`Dropout`].

use std::fmt;

use crate::dtype::DType;
use crate::error::{Error, Result};

/// The parts that a probability is a whole number of.
const PARTS: u32 = 1 << 15;

/// Dropout of the weights: the probability with which a weight becomes 0.
///
/// [`ForwardProblemBuilder::dropout`](crate::ForwardProblemBuilder::dropout) says what it does.
///
/// The probability is held as a whole number of parts of 32768. So the one in force is that of
/// [`probability`](Self::probability), which may differ from the one asked for by 1/65536.
///
/// ```
/// use hopper_attention::Dropout;
///
/// let dropout = Dropout::new(0.1)?;
/// assert_eq!((dropout.dropped(), dropout.probability()), (3277, 3277.0 / 32768.0));
/// # Ok::<(), hopper_attention::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dropout {
    /// Below [`PARTS`].
    dropped: u16,
}

impl Dropout {
    /// Dropout with this probability, from 0 to below 1. It is rounded to a multiple of 1/32768.
    ///
    /// # Errors
    /// [`Error::Value`] for other numbers, NaN among them, and for one that is rounded to 1.
    pub fn new(probability: f32) -> Result<Self> {
        let refuse = |allowed: &str| {
            Err(Error::Value { what: "dropout", got: probability.to_string(), allowed: allowed.into() })
        };
        if !(0.0..1.0).contains(&probability) {
            return refuse("0 to below 1");
        }
        let dropped = (probability * PARTS as f32).round() as u32;
        if dropped == PARTS {
            return refuse("up to 1 - 1/32768, since probabilities are rounded to multiples of 1/32768");
        }
        Ok(Self { dropped: dropped as u16 })
    }

    /// How many of 32768 weights are dropped, on average.
    pub fn dropped(self) -> u32 {
        self.dropped.into()
    }

    /// The probability in force: [`dropped`](Self::dropped) divided by 32768.
    pub fn probability(self) -> f32 {
        f32::from(self.dropped) / PARTS as f32
    }

    /// What the other weights are multiplied by: `1 / (1 - probability)`.
    pub fn factor(self) -> f64 {
        f64::from(PARTS) / f64::from(PARTS - self.dropped())
    }

    /// Refuses dropout with operands that do not have it.
    pub(super) fn check(self, dtype: DType) -> Result<()> {
        if dtype == DType::E4M3 {
            let nearest = "bf16, f16 or f32 operands, or no dropout".into();
            return Err(Error::Unsupported { wanted: "dropout with e4m3 operands".into(), nearest });
        }
        Ok(())
    }
}

impl fmt::Display for Dropout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dropout {}", self.probability())
    }
}

/// The operand [`Slot::DropoutState`](crate::Slot::DropoutState) of a seed and an offset: both as two words of 32 bits, the low
/// one first.
///
/// In the memory of a little-endian machine these are the two 64-bit numbers `[seed, offset]`.
///
/// ```
/// assert_eq!(hopper_attention::dropout_state(7, 3 << 32), [7, 0, 0, 3]);
/// ```
pub const fn dropout_state(seed: u64, offset: u64) -> [i32; 4] {
    [seed as i32, (seed >> 32) as i32, offset as i32, (offset >> 32) as i32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_rounded() {
        let parts = |probability| Dropout::new(probability).unwrap().dropped();
        assert_eq!([0.0, -0.0, 1e-6, 0.6 / 32768.0, 0.5, 0.1].map(parts), [0, 0, 0, 1, 16384, 3277]);
        assert_eq!(parts(32767.0 / 32768.0), 32767);
        let (none, half) = (Dropout::new(0.0).unwrap(), Dropout::new(0.5).unwrap());
        assert_eq!((none.probability(), none.factor(), none.to_string()), (0.0, 1.0, "dropout 0".into()));
        assert_eq!((half.probability(), half.factor(), half.to_string()), (0.5, 2.0, "dropout 0.5".into()));
        assert_eq!(Dropout::new(32767.0 / 32768.0).unwrap().factor(), 32768.0);
    }

    #[test]
    fn what_no_probability_can_be_is_refused_by_name() {
        for (probability, got) in [(1.0, "1"), (-0.1, "-0.1"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
            let text = format!("dropout: {got}; allowed: 0 to below 1");
            assert_eq!(Dropout::new(probability).unwrap_err().to_string(), text);
        }
        let text =
            "dropout: 0.99999; allowed: up to 1 - 1/32768, since probabilities are rounded to multiples of 1/32768";
        assert_eq!(Dropout::new(0.99999).unwrap_err().to_string(), text);
    }

    #[test]
    fn a_state_has_the_words_of_both_numbers() {
        let state = dropout_state(0x0123_4567_89ab_cdef, u64::MAX - 1);
        assert_eq!(state, [0x89ab_cdef_u32 as i32, 0x0123_4567, -2, -1]);
        if cfg!(target_endian = "little") {
            let bytes: Vec<u8> = state.iter().flat_map(|word| word.to_ne_bytes()).collect();
            assert_eq!(bytes[..8], 0x0123_4567_89ab_cdef_u64.to_ne_bytes());
            assert_eq!(bytes[8..], (u64::MAX - 1).to_ne_bytes());
        }
    }
}
