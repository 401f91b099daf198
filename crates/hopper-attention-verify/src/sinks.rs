//! Attention sinks of a case, in guarded memory.

use hopper_attention::{Args, DType, Layout, Slot, TensorRef, bf16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;
use serde::{Deserialize, Serialize};

use crate::data::Image;

/// What the sinks of a case hold. Their type is f32 for even seeds, and bf16 for odd ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sinks {
    /// The problem has none.
    #[default]
    None,
    /// Standard normal.
    Normal,
    /// 0.
    Zero,
    /// -inf, which changes nothing.
    Nothing,
    /// 10, which has most of the weight in most rows.
    Ten,
    /// Some hundreds above any score, or below it, from head to head.
    Large,
    /// From head to head: -inf, 0, 10, normal, NaN, inf.
    Mixed,
}

impl Sinks {
    /// All kinds that there are.
    pub const ALL: [Self; 7] =
        [Self::None, Self::Normal, Self::Zero, Self::Nothing, Self::Ten, Self::Large, Self::Mixed];

    /// Whether the problem has none.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }

    /// Their type in a case of this seed. `None` where there are none.
    pub fn dtype(self, seed: u64) -> Option<DType> {
        let dtype = if seed.is_multiple_of(2) { DType::F32 } else { DType::BF16 };
        (!self.is_none()).then_some(dtype)
    }

    /// The sinks of `heads` heads. The same seed gives the same sinks on every machine.
    pub fn image(self, heads: usize, seed: u64) -> Option<SinksImage> {
        let mut rng = StdRng::seed_from_u64(!seed);
        let mut sink = |head: usize| {
            let normal: f64 = rng.sample(StandardNormal);
            match self {
                Self::None | Self::Nothing => f64::NEG_INFINITY,
                Self::Normal => normal,
                Self::Zero => 0.0,
                Self::Ten => 10.0,
                Self::Large => normal.signum() * 700.0,
                Self::Mixed => [f64::NEG_INFINITY, 0.0, 10.0, normal, f64::NAN, f64::INFINITY][head % 6],
            }
        };
        let values: Vec<f64> = (0..heads).map(&mut sink).collect();
        let layout = Layout::contiguous([heads]).expect("a short list");
        self.dtype(seed).map(|dtype| match dtype {
            DType::F32 => SinksImage::F32(Image::holding(&values, layout)),
            _ => SinksImage::Bf16(Image::holding(&values, layout)),
        })
    }
}

/// Memory of sinks, of either type.
#[derive(Clone, Debug)]
pub enum SinksImage {
    /// In f32.
    F32(Image<f32, 1>),
    /// In bf16.
    Bf16(Image<bf16, 1>),
}

impl SinksImage {
    /// The sinks as the oracle reads them.
    pub fn values(&self) -> Vec<f64> {
        match self {
            Self::F32(image) => image.values(),
            Self::Bf16(image) => image.values(),
        }
    }

    /// Adds them to the arguments of a run in host memory.
    pub fn add_to<'a>(&'a self, args: Args<'a>) -> Args<'a> {
        match self {
            Self::F32(image) => args.read(Slot::Sinks, host(image.inner(), image.layout())),
            Self::Bf16(image) => args.read(Slot::Sinks, host(image.inner(), image.layout())),
        }
    }

    /// Whether the memory is still what it was in `before`.
    ///
    /// # Errors
    /// Where it is not.
    pub fn check_unchanged(&self, before: &Self) -> Result<(), String> {
        match (before, self) {
            (Self::F32(before), Self::F32(now)) => before.check_unchanged(now.data()),
            (Self::Bf16(before), Self::Bf16(now)) => before.check_unchanged(now.data()),
            _ => Err("sinks of another type".into()),
        }
    }
}

fn host<T: hopper_attention::Element>(data: &[T], layout: Layout<1>) -> TensorRef<'_, T, 1> {
    TensorRef::host(data, layout).expect("a fitting layout")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sinks_follow_from_the_seed() {
        for kind in Sinks::ALL {
            let of = |seed| kind.image(7, seed).map(|image| image.values());
            let bits =
                |values: Option<Vec<f64>>| values.map(|values| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
            assert_eq!(bits(of(4)), bits(of(4)));
            assert_eq!((of(4).is_none(), kind.dtype(4).is_none()), (kind.is_none(), kind.is_none()));
        }
        assert_eq!((Sinks::Ten.dtype(4), Sinks::Ten.dtype(5)), (Some(DType::F32), Some(DType::BF16)));
        let mixed = Sinks::Mixed.image(6, 2).unwrap().values();
        assert!(mixed[0] == f64::NEG_INFINITY && mixed[4].is_nan() && mixed[5] == f64::INFINITY);
    }
}
