//! ALiBi slopes of a case, in guarded memory.

use std::fmt;
use std::str::FromStr;

use hopper_attention::{AlibiSlopes, Args, Layout, Slot, TensorRef};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;
use serde::{Deserialize, Serialize};

use crate::data::Image;
use crate::packing::without_batch;

/// The slopes that models have: `2^(-8 h / heads)` of head `h`, from 1 on.
pub fn standard(heads: usize) -> impl Iterator<Item = f64> {
    (1..=heads).map(move |head| (-8.0 * head as f64 / heads as f64).exp2())
}

/// What the ALiBi slopes of a case hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Alibi {
    /// The problem has none.
    #[default]
    None,
    /// Those of models: `2^(-8 h / heads)` of head `h`, from 1 on. All batches share them.
    Standard,
    /// The same times a random factor around 1 for each batch and head.
    PerBatch,
    /// 8 to 64: only the nearest keys of a query have a weight. All batches share them.
    Large,
    /// The standard ones with the other sign: the farthest keys have the largest scores. All batches share them.
    Negative,
    /// From head to head and batch to batch: 0, 0.5, -0.25, 30, 1e-6, 1.25.
    Mixed,
}

impl Alibi {
    /// All kinds that there are.
    pub const ALL: [Self; 6] = [Self::None, Self::Standard, Self::PerBatch, Self::Large, Self::Negative, Self::Mixed];

    /// Whether the problem has none.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }

    /// Which slopes the problem has. `None` where there are none.
    pub fn option(self) -> Option<AlibiSlopes> {
        match self {
            Self::None => None,
            Self::PerBatch | Self::Mixed => Some(AlibiSlopes::PerBatch),
            Self::Standard | Self::Large | Self::Negative => Some(AlibiSlopes::PerHead),
        }
    }

    /// The slopes of `heads` heads, of `batch` batches where each has its own. The same seed gives the same slopes on every
    /// machine.
    pub fn image(self, batch: usize, heads: usize, seed: u64) -> Option<AlibiImage> {
        let per_batch = self.option()? == AlibiSlopes::PerBatch;
        let mut rng = StdRng::seed_from_u64(seed ^ 0xa11b_1000);
        let mut slope = |batch: usize, head: usize, standard: f64| {
            let normal: f64 = rng.sample(StandardNormal);
            match self {
                Self::None => 0.0,
                Self::Standard => standard,
                Self::PerBatch => standard * (1.0 + 0.25 * normal),
                Self::Large => 8.0 * (1.0 + normal.abs()).min(8.0),
                Self::Negative => -standard,
                Self::Mixed => [0.0, 0.5, -0.25, 30.0, 1e-6, 1.25][(batch + head) % 6],
            }
        };
        let batches = if per_batch { batch } else { 1 };
        let places =
            (0..batches).flat_map(|batch| standard(heads).enumerate().map(move |(head, of)| (batch, head, of)));
        let values: Vec<f64> = places.map(|(batch, head, standard)| slope(batch, head, standard)).collect();
        let layout = Layout::contiguous([batches, heads]).expect("a short list");
        Some(AlibiImage { image: Image::holding(&values, layout), per_batch })
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Standard => "standard",
            Self::PerBatch => "per-batch",
            Self::Large => "large",
            Self::Negative => "negative",
            Self::Mixed => "mixed",
        }
    }
}

impl fmt::Display for Alibi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Alibi {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            let allowed: Vec<_> = Self::ALL.iter().map(|kind| kind.name()).collect();
            format!("slopes `{text}`; allowed: {}", allowed.join(", "))
        })
    }
}

/// Memory of slopes.
#[derive(Clone, Debug)]
pub struct AlibiImage {
    image: Image<f32, 2>,
    per_batch: bool,
}

impl AlibiImage {
    /// The memory. Slopes that all batches share have a batch of 1.
    pub fn image(&self) -> &Image<f32, 2> {
        &self.image
    }

    /// Whether each batch has its own.
    pub fn is_per_batch(&self) -> bool {
        self.per_batch
    }

    /// The slopes as the oracle reads them.
    pub fn values(&self) -> Vec<f64> {
        self.image.values()
    }

    /// Adds them to the arguments of a run in host memory.
    pub fn add_to<'a>(&'a self, args: Args<'a>) -> Args<'a> {
        let (data, layout) = (self.image.inner(), self.image.layout());
        match self.per_batch {
            true => args.read(Slot::AlibiSlopes, host(data, layout)),
            false => args.read(Slot::AlibiSlopes, host(data, without_batch::<2, 1>(layout))),
        }
    }

    /// Whether the memory is still what it was in `before`.
    ///
    /// # Errors
    /// Where it is not.
    pub fn check_unchanged(&self, before: &Self) -> Result<(), String> {
        before.image.check_unchanged(self.image.data())
    }
}

fn host<const R: usize>(data: &[f32], layout: Layout<R>) -> TensorRef<'_, f32, R> {
    TensorRef::host(data, layout).expect("a fitting layout")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_follow_from_the_seed() {
        for kind in Alibi::ALL {
            let of = |seed| kind.image(3, 5, seed).map(|image| image.values());
            assert_eq!(of(4), of(4));
            assert_eq!((of(4).is_none(), kind.option().is_none()), (kind.is_none(), kind.is_none()));
            assert_eq!(kind.name().parse(), Ok(kind));
            if let Some(image) = kind.image(3, 5, 4) {
                assert_eq!(image.values().len(), if image.is_per_batch() { 15 } else { 5 });
            }
        }
        assert_eq!(Alibi::Standard.image(2, 8, 0).unwrap().values()[..2], [0.5, 0.25]);
        assert!(Alibi::Large.image(1, 64, 0).unwrap().values().iter().all(|slope| (8.0..=64.0).contains(slope)));
        let text = "slopes `x`; allowed: none, standard, per-batch, large, negative, mixed";
        assert_eq!("x".parse::<Alibi>(), Err(text.into()));
    }
}
