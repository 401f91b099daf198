//! The rotation of a query or a key before it is quantised: signs, then a Hadamard transform.
//! [`Quantizer`](crate::Quantizer) defines it (incoherent processing).

use super::memory::reserved;
use crate::error::Result;

/// A rotation for one head dim and seed.
pub(super) struct Rotation {
    /// 1 or -1 for each element.
    signs: Vec<f32>,
    /// For each element `size^-0.5` of its block.
    norms: Vec<f32>,
}

impl Rotation {
    pub(super) fn new(seed: u64, head_dim: usize) -> Result<Self> {
        let (mut signs, mut norms) = (reserved(head_dim)?, reserved(head_dim)?);
        signs.extend((0..head_dim as u64).map(|dim| if negative(seed, dim) { -1.0 } else { 1.0 }));
        for size in (0..usize::BITS).rev().map(|bit| 1usize << bit).filter(|size| head_dim & size != 0) {
            let norm = 1.0 / (size as f64).sqrt();
            norms.resize(norms.len() + size, norm as f32);
        }
        Ok(Self { signs, norms })
    }

    /// Rotates a vector.
    pub(super) fn apply(&self, row: &mut [f32]) {
        row.iter_mut().zip(&self.signs).for_each(|(x, sign)| *x *= sign);
        let mut half = 1;
        while 2 * half <= row.len() {
            // Blocks begin at multiples of their size, largest first. So a whole run of 2 * half elements lies in one block.
            for run in row.chunks_exact_mut(2 * half) {
                let (low, high) = run.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        row.iter_mut().zip(&self.norms).for_each(|(x, norm)| *x *= norm);
    }
}

/// Whether element `dim` is negated: the top bit of number `dim` of SplitMix64.
fn negative(seed: u64, dim: u64) -> bool {
    splitmix64(seed, dim) >> 63 == 1
}

/// Number `number` (from 0) of the SplitMix64 generator that was started with `seed`.
fn splitmix64(seed: u64, number: u64) -> u64 {
    let z = seed.wrapping_add((number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers for seed 1234567, as the generator's authors and others publish them.
    #[test]
    fn signs_are_those_of_splitmix64() {
        let published = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821_u64,
        ];
        for (number, output) in published.into_iter().enumerate() {
            assert_eq!(splitmix64(1_234_567, number as u64), output);
        }
        assert_eq!(splitmix64(0, 0), 0xe220_a839_7b1d_cdaf);
        let signs = Rotation::new(1_234_567, 5).unwrap().signs;
        assert_eq!(signs, [1.0, 1.0, -1.0, 1.0, -1.0]);
    }

    /// The fast transform against a product with the matrix, element by element.
    #[test]
    fn a_row_is_multiplied_by_the_matrix() {
        let blocks = |head_dim| match head_dim {
            1 => vec![1],
            7 => vec![4, 2, 1],
            16 => vec![16],
            48 => vec![32, 16],
            80 => vec![64, 16],
            96 => vec![64, 32],
            112 => vec![64, 32, 16],
            128 => vec![128],
            136 => vec![128, 8],
            192 => vec![128, 64],
            256 => vec![256],
            328 => vec![256, 64, 8],
            512 => vec![512],
            _ => unreachable!("not in the list"),
        };
        for head_dim in [1, 7, 16, 48, 80, 96, 112, 128, 136, 192, 256, 328, 512_usize] {
            let rotation = Rotation::new(99, head_dim).unwrap();
            let input: Vec<f32> = (0..head_dim).map(|i| ((i * 37 % 101) as f32 - 50.0) / 16.0).collect();
            let mut got = input.clone();
            rotation.apply(&mut got);
            let mut first = 0;
            for size in blocks(head_dim) {
                for i in 0..size {
                    let term = |j: usize| {
                        let sign = if (i & j).count_ones() % 2 == 1 { -1.0 } else { 1.0 };
                        sign * f64::from(input[first + j]) * f64::from(rotation.signs[first + j])
                    };
                    let want = (0..size).map(term).sum::<f64>() / (size as f64).sqrt();
                    assert!((f64::from(got[first + i]) - want).abs() < 1e-5, "{head_dim}: {i} of the block at {first}");
                }
                first += size;
            }
            assert_eq!(first, head_dim);
        }
    }

    #[test]
    fn products_stay_and_outliers_spread() {
        for head_dim in [16, 32, 48, 64, 80, 96, 112, 128, 136, 192, 256, 328, 512] {
            let rotation = Rotation::new(7, head_dim).unwrap();
            let vector = |step: usize| (0..head_dim).map(|i| ((i * step % 23) as f32 - 11.0) / 8.0).collect::<Vec<_>>();
            let (mut q, mut k) = (vector(5), vector(7));
            let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
            let before = product(&q, &k);
            rotation.apply(&mut q);
            rotation.apply(&mut k);
            assert!((product(&q, &k) - before).abs() < 1e-4, "{head_dim}");
            let mut outlier = vec![0.0; head_dim];
            outlier[3] = 100.0;
            rotation.apply(&mut outlier);
            let largest = outlier.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
            let block = (1 << head_dim.ilog2()) as f32;
            assert!((largest - 100.0 / block.sqrt()).abs() < 1e-4, "{head_dim}: {largest}");
        }
    }
}
