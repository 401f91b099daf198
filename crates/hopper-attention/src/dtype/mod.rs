//! Element types: the run-time tag [`DType`], and sealed traits that tie each tag to a Rust type.

#[cfg(feature = "cuda")]
mod cuda;

use std::fmt;

#[cfg(feature = "cuda")]
pub(crate) use cuda::{AnyView, AnyViewMut, event};
pub use float8::F8E4M3 as E4M3;
pub use half::{bf16, f16};

/// The largest value of [`E4M3`]: 448.
///
/// The `float8` crate has a constant of its own, 416, which is wrong. Nothing here reads that constant.
pub const E4M3_MAX: f32 = 448.0;

/// The largest magnitude of a stored element of Q and K for which scores may be summed in f16: 14, which is 448 / 32.
///
/// It belongs to [`half_scores`](crate::ForwardProblemBuilder::half_scores). A sum of 128 products of two such numbers is at
/// most 25088, and one of 256 products at most 50176. The largest f16 is 65504, so these sums fit.
///
/// The smaller range costs little precision, because the precision of [`E4M3`] is relative. Elements lose mantissa bits only
/// below 1/896 of the largest magnitude that shares their descale factor. With a largest value of 448, this limit would be
/// 1/28672.
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
    /// 32-bit integer with sign, for the lengths and offsets of sequences ([`Slot::CuSeqlensQ`](crate::Slot::CuSeqlensQ) and
    /// others). Q, K and V never have it.
    I32,
}

impl DType {
    /// Size of one element, in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::E4M3 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::F32 | Self::I32 => 4,
        }
    }

    /// The name that [`Display`](fmt::Display) prints: `f16`, `bf16`, `e4m3`, `f32` or `i32`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::E4M3 => "e4m3",
            Self::F32 => "f32",
            Self::I32 => "i32",
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

    /// What the feature `cuda` needs of an element type. Without `cuda` every type satisfies it.
    #[cfg(feature = "cuda")]
    pub use super::cuda::Device;
    #[cfg(not(feature = "cuda"))]
    pub trait Device {}
    #[cfg(not(feature = "cuda"))]
    impl<T> Device for T {}
}

/// A type that the elements of a tensor may have.
///
/// The trait is sealed, so that [`DTYPE`](Self::DTYPE) always agrees with the bytes of the type.
pub trait Element: sealed::Sealed + sealed::Device + Copy + Default + Send + Sync + fmt::Debug + 'static {
    /// The run-time tag of this type.
    const DTYPE: DType;

    /// The value as f32. Exact for every float type here. An `i32` above 2^24 is rounded.
    fn to_f32(self) -> f32;

    /// The nearest value of this type, ties to even. A NaN stays a NaN.
    ///
    /// [`E4M3`] has no infinities. It saturates as the hardware's conversion does: magnitudes above 448, infinities
    /// included, become 448. `i32` saturates too, and has no NaN: a NaN becomes 0.
    fn from_f32(value: f32) -> Self;
}

/// The types of Q, K and V that have gradients: `f16`, `bf16`, and on the CPU `f32`. [`E4M3`] has none.
pub trait Float: Element + OutputOf<Self> {}

/// The types that O may have where Q, K and V have type `T`.
///
/// For [`E4M3`] these are `bf16`, `f16` and [`E4M3`]. For any other type it is the type itself.
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
            fn from_f32(value: f32) -> Self { ($from)(value) }
        }
    )*};
}

element! {
    f16 => F16, |x| x.to_f32(), f16::from_f32;
    bf16 => BF16, |x| x.to_f32(), bf16::from_f32;
    f32 => F32, |x| x, std::convert::identity;
    i32 => I32, |x| x as f32, |x: f32| x.round_ties_even() as i32;
    // By path: `E4M3`'s own method takes a reference, so `x.to_f32()` would call this trait method again, without end.
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
        assert_eq!((i32::DTYPE.bytes(), i32::DTYPE.to_string()), (size_of::<i32>(), "i32".into()));
        let round = |x: f32| <i32 as Element>::from_f32(x);
        assert_eq!([1.5, 2.5, -1e20, f32::NAN].map(round), [2, 2, i32::MIN, 0]);
    }

    /// The value of a code by the definition of e4m3: 4 exponent bits with bias 7, 3 mantissa bits, no infinities. A code
    /// whose exponent and mantissa bits are all set is NaN.
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
            // And back, including the sign of a zero. Either NaN is accepted.
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
