//! Philox-4x32: random bits of a counter and a key.
//!
//! From Salmon, Moraes, Dror and Shaw, *Parallel random numbers: as easy as 1, 2, 3* (2011). The same counter and key always
//! give the same bits. So nobody has to keep a state, and the bits of any place can be made alone.

/// What the two halves of a counter are multiplied by in each round.
const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
/// What is added to the two words of the key after each round.
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// The four words of a counter and a key, after so many rounds.
pub(crate) const fn philox<const ROUNDS: usize>(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut low, mut high]) = (counter, key);
    let mut round = 0;
    while round < ROUNDS {
        let first = MULTIPLIERS[0] as u64 * a as u64;
        let second = MULTIPLIERS[1] as u64 * c as u64;
        [a, b, c, d] = [(second >> 32) as u32 ^ b ^ low, second as u32, (first >> 32) as u32 ^ d ^ high, first as u32];
        (low, high) = (low.wrapping_add(WEYL[0]), high.wrapping_add(WEYL[1]));
        round += 1;
    }
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of Random123, the authors' library (`kat_vectors`), with 10 rounds and with 7.
    #[test]
    fn known_answers() {
        let ones = u32::MAX;
        let pi = ([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]);
        for ((counter, key), ten, seven) in [
            (
                ([0; 4], [0; 2]),
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
                [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48],
            ),
            (
                ([ones; 4], [ones; 2]),
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
                [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662],
            ),
            (
                pi,
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
                [0x4dfc_caba, 0x190a_87f0, 0xc473_62ba, 0xb6b5_242a],
            ),
        ] {
            assert_eq!(philox::<10>(counter, key), ten);
            assert_eq!(philox::<7>(counter, key), seven);
            assert_eq!(philox::<0>(counter, key), counter);
        }
    }
}
