//! Cases with block-sparse masks, and contents of lists that should not be.

use hopper_attention::{KernelInfo, Mask, Slot};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::alibi::Alibi;
use crate::data::{Garbage, Input, Values};
use crate::inputs::Class;
use crate::problems::{Case, Grid};
use crate::sinks::Sinks;

pub use hopper_attention_verify::blocks::{Blocks, BlocksImage};

/// Every kind of lists with every kind of mask: one block and many, ragged ends, fewer keys than queries and many more.
pub fn cases(grid: Grid) -> Vec<Case> {
    let masks = [Mask::Full, Mask::causal(), Mask::window(Some(150), Some(40)), Mask::prefix(170), Mask::chunked(90)];
    let sizes = [(128, 128), (1, 300), (70, 1), (300, 520), (513, 260), (256, 1100), (200, 200)];
    let values = [
        Values::Normal,
        Values::Offset,
        Values::Uneven,
        Values::Sloped { first: -40, last: 40 },
        Values::Sloped { first: 150, last: -150 },
        Values::Large,
        Values::Like(Class::ALL[1]),
        Values::Like(Class::ALL[2]),
    ];
    let mut cases = Vec::new();
    for &head_dim in grid.pick(&[64, 128, 256][..], &[64, 128, 40, 96, 256, 160]) {
        for (mask, blocks) in masks.into_iter().flat_map(|mask| kinds().map(move |kind| (mask, kind))) {
            for (seqlen_q, seqlen_kv) in sizes {
                let turn = cases.len();
                let heads = [(1, 2, 1), (2, 4, 2), (1, 6, 2), (3, 2, 2)][turn % 4];
                let mut case = Case::new(seqlen_q, seqlen_kv, head_dim, mask).heads(heads.0, heads.1, heads.2);
                case.seed = turn as u64;
                case.lse = turn % 5 != 0;
                case.values = values[turn % values.len()];
                cases.push(case.blocks(blocks));
            }
        }
    }
    for (i, garbage) in Garbage::ALL.into_iter().enumerate() {
        for (input, blocks) in Input::ALL.into_iter().flat_map(|input| kinds().map(move |kind| (input, kind))) {
            let mut case = Case::new(290, 410, [64, 128, 256][i % 3], masks[i / 2 % 3]).heads(2, 4, 2).blocks(blocks);
            case.values = Values::Garbage(input, garbage);
            case.seed = (i * 100 + cases.len()) as u64;
            cases.push(case);
        }
    }
    cases
}

/// The same cases with what rows for modified scores compute: each modifier alone, pairs of them, and all at once.
pub fn modified_cases(grid: Grid) -> Vec<Case> {
    let modified = |(turn, case): (usize, Case)| match turn % 11 {
        0 => case.softcap(15.0),
        1 => case.alibi(Alibi::Standard),
        2 => case.max_logits(true),
        3 => case.dropout(0.5),
        4 => case.softcap(50.0).alibi(Alibi::PerBatch),
        5 => case.softcap(30.0).dropout(0.1),
        6 => case.alibi(Alibi::Large).dropout(0.9),
        7 => case.alibi(Alibi::Negative).max_logits(true),
        8 => case.softcap(1.0).max_logits(true).dropout(0.1),
        9 => case.alibi(Alibi::Mixed).dropout(0.1).max_logits(true),
        _ => Case { sinks: Sinks::ALL[turn % Sinks::ALL.len()], ..case.softcap(30.0).alibi(Alibi::Standard) }
            .dropout(0.5)
            .max_logits(true),
    };
    // (The number of modifiers has no divisor in common with those of the other turns.)
    cases(grid).into_iter().enumerate().map(modified).collect()
}

/// Cases of a row with lists, without end: every kind in turn, with seeds that give lists per batch entry, per head and of full
/// blocks. Rows for modified scores have a cap.
pub fn cases_of_row(row: &KernelInfo) -> impl Iterator<Item = Case> + use<> {
    let masks = [Mask::Full, Mask::causal(), Mask::window(Some(100), Some(20))];
    let (qk, vo) = (row.head_dim_qk(), row.head_dim_vo());
    let softcap = if row.needs_modifiers() { 20.0 } else { 0.0 };
    kinds().cycle().enumerate().map(move |(i, blocks)| {
        let case = Case::new(300, 700, qk, masks[i % 3]).head_dim_vo(vo).heads(2, 4, 2);
        Case { seed: i as u64, ..case.blocks(blocks).softcap(softcap) }
    })
}

/// The kinds of lists that are there.
pub fn kinds() -> impl Iterator<Item = Blocks> + Clone {
    Blocks::ALL.into_iter().filter(|kind| !kind.is_none())
}

/// Puts numbers into the counts and indices that should not be there. Bits may be anything.
pub fn spoil(lists: &mut BlocksImage, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    for slot in [Slot::MaskBlockCnt, Slot::MaskBlockIdx, Slot::FullBlockCnt, Slot::FullBlockIdx, Slot::MaskBits] {
        for number in lists.inner_mut(slot).unwrap_or(&mut []) {
            let choice = rng.random_range(0..12);
            *number = match choice {
                0 => i32::MIN,
                1 => i32::MAX,
                2 => -1,
                3 => rng.random(),
                4..7 => rng.random_range(-2..12),
                _ => *number,
            };
        }
    }
}
