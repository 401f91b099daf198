//! Element types: the run-time tag [`DType`] and the sealed traits that tie it to Rust types.

use std::fmt;

pub use half::{bf16, f16};

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
    pub trait Device: cudarc::driver::DeviceRepr {}
    #[cfg(feature = "cuda")]
    impl<T: cudarc::driver::DeviceRepr> Device for T {}
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

    /// The nearest value of this type, ties to even.
    fn from_f32(value: f32) -> Self;
}

/// What Q, K and V may be, and what the output then is.
pub trait Operand: Element {
    /// The type of O.
    type Out: Element;
}

macro_rules! element {
    ($($type:ty => $dtype:ident, |$value:ident| $to:expr, $from:expr;)*) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
            fn to_f32(self) -> f32 { let $value = self; $to }
            fn from_f32(value: f32) -> Self { $from(value) }
        }
        impl Operand for $type { type Out = $type; }
    )*};
}

element! {
    f16 => F16, |x| x.to_f32(), f16::from_f32;
    bf16 => BF16, |x| x.to_f32(), bf16::from_f32;
    f32 => F32, |x| x, std::convert::identity;
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
        assert_eq!((DType::E4M3.bytes(), DType::E4M3.name()), (1, "e4m3"));
    }
}
