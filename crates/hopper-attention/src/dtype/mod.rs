//! Element types: the run-time tag [`DType`] and the sealed traits that tie it to Rust types.

#[cfg(feature = "cuda")]
mod cuda;

use std::fmt;

#[cfg(feature = "cuda")]
pub(crate) use cuda::{AnyView, AnyViewMut};
pub use float8::F8E4M3 as E4M3;
pub use half::{bf16, f16};

/// The largest value of [`E4M3`]. (Its crate's own constant is 416, which is wrong; nothing here reads that.)
pub const E4M3_MAX: f32 = 448.0;

/// The largest magnitude of Q and K, as they are stored, of a problem with
/// [`half_scores`](crate::ForwardProblemBuilder::half_scores): 448 / 32. A sum of 128 products of two such numbers is at most 25088,
/// within f16, whose largest value is 65504. It costs next to nothing, since the precision of [`E4M3`] is relative: it is
/// what is below 1/896 of the largest magnitude that shares a factor, in place of 1/28672, that keeps less than three bits.
pub const E4M3_HALF_SCORES_MAX: f32 = 14.0;

/// The element types that tensors may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 half precision: 5 exponent bits, 10 mantissa bits.
    F16,
    /// bfloat16: 8 exponent bits, 7 mantissa bits.
    BF16,
    /// 8-bit float with 4 exponent and 3 mantissa bits, no infinities, largest value 448.
    E4M3,
    /// IEEE 754 single precision.
    F32,
}

impl DType {
    /// Bytes an element takes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::E4M3 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
        }
    }

    /// The name that [`Display`](fmt::Display) prints: `f16`, `bf16`, `e4m3` or `f32`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::E4M3 => "e4m3",
            Self::F32 => "f32",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

mod sealed {
    pub trait Sealed {}

    /// What the GPU side asks of an element; nothing when there is no GPU side.
    #[cfg(feature = "cuda")]
    pub use super::cuda::Device;
    #[cfg(not(feature = "cuda"))]
    pub trait Device {}
    #[cfg(not(feature = "cuda"))]
    impl<T> Device for T {}
}

/// A type that a tensor may hold. Sealed, so that [`DTYPE`](Self::DTYPE) can never disagree with the type's bytes.
pub trait Element: sealed::Sealed + sealed::Device + Copy + Default + Send + Sync + fmt::Debug + 'static {
    /// The run-time tag of this type.
    const DTYPE: DType;

    /// The value as f32 (exact for every type here).
    fn to_f32(self) -> f32;

    /// The nearest value of this type, ties to even. [`E4M3`], which has no infinities, saturates: what is beyond 448
    /// becomes 448, infinities included, as the hardware's conversion does. A NaN stays one.
    fn from_f32(value: f32) -> Self;
}

/// The types of Q, K and V that have gradients: `f16`, `bf16`, and on the CPU `f32`. ([`E4M3`] operands have none.)
pub trait Float: Element + OutputOf<Self> {}

/// What O may be where Q, K and V are of type `T`: of [`E4M3`] operands `bf16`, `f16` or [`E4M3`], of others their own type.
pub trait OutputOf<T: Element>: Element {}

macro_rules! float {
    ($($type:ty),*) => {$(
        impl Float for $type {}
        impl OutputOf<$type> for $type {}
    )*};
}

float!(f16, bf16, f32);

impl OutputOf<E4M3> for bf16 {}
impl OutputOf<E4M3> for f16 {}
impl OutputOf<E4M3> for E4M3 {}

macro_rules! element {
    ($($type:ty => $dtype:ident, |$value:ident| $to:expr, $from:expr;)*) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
            fn to_f32(self) -> f32 { let $value = self; $to }
            fn from_f32(value: f32) -> Self { $from(value) }
        }
    )*};
}

element! {
    f16 => F16, |x| x.to_f32(), f16::from_f32;
    bf16 => BF16, |x| x.to_f32(), bf16::from_f32;
    f32 => F32, |x| x, std::convert::identity;
    // By path: its own takes a reference, so that `x.to_f32()` would be this one again.
    E4M3 => E4M3, |x| E4M3::to_f32(&x), E4M3::from_f32;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_agree_with_the_types() {
        fn check<T: Element>(name: &str) {
            assert_eq!(T::DTYPE.bytes(), size_of::<T>());
            assert_eq!(T::DTYPE.to_string(), name);
            assert_eq!(T::from_f32(1.5).to_f32(), 1.5);
        }
        check::<f16>("f16");
        check::<bf16>("bf16");
        check::<f32>("f32");
        check::<E4M3>("e4m3");
    }

    /// e4m3 by its definition: 4 exponent bits of bias 7, 3 mantissa bits, no infinities, NaN where all of them are set.
    fn defined(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = match (exponent, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => mantissa * 2f64.powi(-9),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        if code >> 7 == 1 { -magnitude } else { magnitude }
    }

    #[test]
    fn every_code_of_e4m3_is_what_the_format_says() {
        for code in 0..=u8::MAX {
            let (got, want) = (E4M3::from_bits(code), defined(code));
            assert!(f64::from(Element::to_f32(got)) == want || (got.is_nan() && want.is_nan()), "{code:#x}");
            // And back, the sign of a zero included; one NaN is as good as the other.
            let back = <E4M3 as Element>::from_f32(Element::to_f32(got));
            assert!(back.to_bits() == code || (back.is_nan() && want.is_nan()), "{code:#x}");
        }
        assert_eq!((defined(0x7e), defined(0x08), defined(0x01)), (448.0, 2f64.powi(-6), 2f64.powi(-9)));
        assert_eq!(f64::from(E4M3_MAX), defined(0x7e));
    }

    #[test]
    fn e4m3_rounds_to_nearest_even_and_saturates() {
        let round = |x: f32| <E4M3 as Element>::from_f32(x);
        for code in 0..0x7e {
            let (below, above) = (defined(code), defined(code + 1));
            let middle = ((below + above) / 2.0) as f32; // exact: it has five significant bits
            let even = if code % 2 == 0 { code } else { code + 1 };
            for (value, want) in [(middle, even), (middle.next_down(), code), (middle.next_up(), code + 1)] {
                assert_eq!(round(value).to_bits(), want, "{value}");
                assert_eq!(round(-value).to_bits(), want | 0x80, "-{value}");
            }
        }
        for beyond in [448.1, 463.9, 464.0, 480.0, 1e30, f32::MAX, f32::INFINITY] {
            assert_eq!((round(beyond).to_bits(), round(-beyond).to_bits()), (0x7e, 0xfe), "{beyond}");
        }
        assert!(round(f32::NAN).is_nan() && round(-f32::NAN).is_nan());
        assert_eq!(round(f32::MIN_POSITIVE).to_bits(), 0);
    }
}
