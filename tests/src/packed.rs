//! Cases of packed sequences and used lengths.

use hopper_attention::{Corner, Mask};
use proptest::strategy::{Strategy as _, ValueTree as _};

use crate::case::random::{case_of_kernels, packed, packing, runner};
use crate::data::{Garbage, Input, Values};
use crate::inputs::Class;
use crate::layouts::Placement;
use crate::packing::{Kind, Packing};
use crate::problems::{Case, Grid};

const NEITHER: [bool; 2] = [false; 2];
const BOTH: [bool; 2] = [true; 2];

/// Which sides are packed, which have used lengths, and whether gaps are filled.
const KINDS: [Kind; 8] = [
    Kind { packed: BOTH, used: NEITHER, fill_gaps: false },
    Kind { packed: BOTH, used: NEITHER, fill_gaps: true },
    Kind { packed: BOTH, used: BOTH, fill_gaps: false },
    Kind { packed: BOTH, used: [false, true], fill_gaps: true },
    Kind { packed: [true, false], used: NEITHER, fill_gaps: false },
    Kind { packed: [false, true], used: [true, false], fill_gaps: true },
    Kind { packed: NEITHER, used: BOTH, fill_gaps: true },
    Kind { packed: NEITHER, used: [false, true], fill_gaps: false },
];

/// Every kind with every mask, numbers of heads, and numbers of sequences, some of which are empty.
pub fn cases(grid: Grid) -> Vec<Case> {
    let masks = [
        Mask::Full,
        Mask::causal(),
        Mask::Causal { corner: Corner::TopLeft },
        Mask::window(Some(70), Some(9)),
        Mask::window(None, Some(5)),
        Mask::Window { left: Some(33), right: Some(0), corner: Corner::TopLeft },
        Mask::chunked(40),
        Mask::Chunked { chunk: 128, corner: Corner::TopLeft },
        Mask::prefix(100),
        Mask::Prefix { keys: 30, corner: Corner::TopLeft },
    ];
    let mut cases = Vec::new();
    let small = [(64, 64), (128, 128), (256, 256)];
    let full = [(64, 64), (128, 128), (72, 72), (8, 8), (192, 128), (136, 192), (256, 256)];
    for &(head_dim, head_dim_vo) in grid.pick(&small[..], &full) {
        for mask in masks {
            for kind in KINDS {
                let turn = cases.len();
                let pick = |of: &[usize]| of[turn / KINDS.len() % of.len()];
                let whole = kind.packed == BOTH;
                let batch = if whole { pick(&[4, 1, 13, 70]) } else { pick(&[2, 5]) };
                let rows = |packed: bool, turn: usize| match packed {
                    true => [700, 1500, 333][turn % 3],
                    false => [150, 260, 64][turn % 3],
                };
                let [packed_q, packed_kv] = kind.packed;
                let (seqlen_q, seqlen_kv) = (rows(packed_q, turn), rows(packed_kv, turn / 2));
                let mut case = Case::new(seqlen_q, seqlen_kv, head_dim, mask).head_dim_vo(head_dim_vo);
                let (heads_q, heads_kv) = [(2, 1), (4, 2), (6, 1), (3, 3)][turn % 4];
                case = case.heads(batch, heads_q, heads_kv);
                case.seed = turn as u64;
                case.lse = turn % 3 != 0;
                // Five shares no divisor with the numbers of kinds and of masks.
                case.values = [
                    Values::Normal,
                    Values::Like(Class::Peaky),
                    Values::Garbage(Input::ALL[turn / 5 % 4], Garbage::ALL[turn / 20 % 4]),
                    Values::Uneven,
                    Values::Like(Class::Nan),
                ][turn % 5];
                case.placement = [Placement::Bshd, Placement::Bhsd][turn % 2];
                // Hints change nothing but speed, right or wrong. They take turns of their own.
                case.packing = Packing::random(kind, batch, [seqlen_q, seqlen_kv], case.seed).hinted(case.seed / 3);
                cases.push(case);
            }
        }
    }
    cases
}

/// One sequence of `long` rows between two times `short` sequences of one row, and the number of the long one.
pub fn one_long_among_short(long: usize, short: usize, head_dim: usize, head_dim_vo: usize) -> (Case, usize) {
    let lengths = (0..2 * short + 1).map(|i| if i == short { long } else { 1 });
    let mut offsets = vec![0];
    lengths.for_each(|len| offsets.push(offsets[offsets.len() - 1] + len as i32));
    let rows = long + 2 * short;
    let case = Case::new(rows, rows, head_dim, Mask::window(Some(40), Some(3))).head_dim_vo(head_dim_vo);
    let packing = Packing { cu_seqlens_q: Some(offsets.clone()), cu_seqlens_kv: Some(offsets), ..Packing::default() };
    (Case { packing, seed: 3, ..case.heads(2 * short + 1, 1, 1) }, short)
}

/// Tensors with rows, of which all sequences of a side are empty: at the first row, in the middle, and behind the last one.
pub fn all_empty(head_dim: usize, head_dim_vo: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let sides = [[true, true], [true, false], [false, true]];
    for (is_empty, fill_gaps) in sides.into_iter().flat_map(|sides| [(sides, false), (sides, true)]) {
        for (rows, place) in [(70, 0), (210, 97), (130, 130)] {
            let case = Case::new(rows, rows, head_dim, Mask::Full).head_dim_vo(head_dim_vo).heads(3, 4, 2);
            let offsets = [0, 1].map(|side| {
                if is_empty[side] { vec![place; 4] } else { vec![0, rows as i32 / 2, rows as i32, rows as i32] }
            });
            let [cu_seqlens_q, cu_seqlens_kv] = offsets.map(Some);
            let packing = Packing { cu_seqlens_q, cu_seqlens_kv, fill_gaps, ..Packing::default() };
            cases.push(Case { packing, seed: cases.len() as u64, ..case.clone() });
            // And by used lengths of 0.
            let used = [0, 1].map(|side| is_empty[side].then(|| vec![0; 3]));
            let [seqused_q, seqused_kv] = used;
            let packing = Packing { seqused_q, seqused_kv, fill_gaps, ..Packing::default() };
            cases.push(Case { packing, seed: cases.len() as u64, ..case });
        }
    }
    cases
}

/// Random cases, of which about a third are packed or have used lengths: the others are left out.
pub fn drawn(seed: u64, head_dim: usize, count: usize) -> Vec<Case> {
    let mut proptest = runner(seed);
    let strategy = (case_of_kernels(head_dim), packing());
    let cases = std::iter::repeat_with(|| {
        let (case, packing) = strategy.new_tree(&mut proptest).expect("a case").current();
        packed(case, packing)
    });
    // Kernels find a sequence by its row: a batch stride must be a whole number of them. Other placements are refused.
    let is_legal = |case: &Case| {
        let packed_sides = case.packing.cu_seqlens_q.is_some() && case.packing.cu_seqlens_kv.is_some();
        packed_sides || matches!(case.placement, Placement::Bshd | Placement::Bhsd | Placement::SharedHeads)
    };
    cases.filter(|case| !case.packing.is_none() && is_legal(case)).take(count).collect()
}
