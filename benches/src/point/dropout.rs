//! Which weights of a point dropout makes 0.

use hopper_attention::reference::DropoutMask;
use hopper_attention::{Dropout, dropout_state};

use super::Point;

/// The seed and the offset of all points. `peers/dropout.py` has the same.
const SEED: u64 = 42;
const OFFSET: u64 = 7;

impl Point {
    /// The probability of a point with dropout.
    pub(super) fn probability(&self) -> hopper_attention::Result<Option<Dropout>> {
        self.dropout.map(|percent| Dropout::new(percent as f32 / 100.0)).transpose()
    }

    /// The operand with the seed and the offset. `None` where there is no dropout.
    pub(crate) fn dropout_state(&self) -> Option<[i32; 4]> {
        self.dropout.map(|_| dropout_state(SEED, OFFSET))
    }

    /// What the weight of a query and a key of a head is multiplied by: 0 or `1 / (1 - p)`, and 1 without dropout. From the
    /// definition of the pairs that ours keeps, [`DropoutMask`].
    pub(crate) fn kept(&self, pair: [usize; 4]) -> f64 {
        let (Ok(Some(dropout)), Some(state)) = (self.probability(), self.dropout_state()) else { return 1.0 };
        let [batch, head, query, key] = self.in_sequence(pair);
        let mask = DropoutMask::new(dropout, self.heads_q, state);
        if mask.keeps(batch, head, query, key) { dropout.factor() } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use hopper_attention::Dropout;

    use crate::{Packed, Sweep};

    #[test]
    fn packed_sequences_count_from_their_own_first_row() {
        let dense = Sweep { dropout: Some(50), seqlens: vec![20], batch: Some(3), ..Sweep::small() };
        let dense = dense.points().unwrap().remove(0);
        let mut packed = dense.clone();
        (packed.batch, packed.seqlen, packed.packed) = (1, 60, Some(Packed::equal(3, 20)));
        let mut dropped = 0;
        for (batch, query, key) in (0..3).flat_map(|b| (0..20).flat_map(move |q| (0..20).map(move |k| (b, q, k)))) {
            let factor = dense.kept([batch, 1, query, key]);
            assert_eq!(packed.kept([0, 1, batch * 20 + query, batch * 20 + key]), factor);
            assert!(factor == 0.0 || factor == Dropout::new(0.5).unwrap().factor());
            dropped += usize::from(factor == 0.0);
        }
        assert!((500..700).contains(&dropped), "{dropped} of 1200");
        let without = crate::Point { dropout: None, ..dense };
        assert!((0..20).all(|key| without.kept([0, 0, 3, key]) == 1.0));
    }
}
