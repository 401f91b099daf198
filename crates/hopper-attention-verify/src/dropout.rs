//! Dropout of a case: the seed and the offset in memory.

use hopper_attention::{Args, Dropout, Layout, Slot, TensorRef, dropout_state};

/// The dropout of a case with this probability. `None` for 0, which stands for none.
///
/// # Panics
/// If it is no probability.
pub fn option(probability: f32) -> Option<Dropout> {
    (probability != 0.0).then(|| Dropout::new(probability).expect("a probability"))
}

/// The words of the seed and the offset of a case with dropout. All four differ from seed to seed.
pub fn state(probability: f32, seed: u64) -> Option<[i32; 4]> {
    // The increment and the multiplier of a common generator: odd numbers with bits in both halves.
    let mixed = |salt: u64| (seed ^ salt).wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
    option(probability).map(|_| dropout_state(mixed(0), mixed(1 << 40)))
}

/// Adds the words to the arguments of a run in host memory.
pub fn add_to<'a>(state: &'a [i32; 4], args: Args<'a>) -> Args<'a> {
    let layout = Layout::contiguous([4]).expect("a short list");
    args.read(Slot::DropoutState, TensorRef::host(state, layout).expect("a fitting layout"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_follow_from_the_seed() {
        assert_eq!((state(0.0, 3), option(0.0)), (None, None));
        let [a, again, b] = [3, 3, 4].map(|seed| state(0.5, seed).unwrap());
        assert!(a == again && a.iter().zip(b).all(|(a, b)| *a != b), "{a:?} {b:?}");
    }
}
