//! The problems that every kernel has to compute.

use hopper_attention::{Corner, KernelInfo, Mask};

use crate::data::{Garbage, Input, Values};
use crate::inputs::Class;
use crate::layouts::Placement;
use crate::packing::{Kind, Packing};
use crate::say;

pub use hopper_attention_verify::case::Case;

/// How large the grid is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// A few dozen small cases: what a sanitizer gets through.
    Small,
    /// Everything.
    Full,
}

impl Grid {
    /// `HATTN_TEST_GRID=small` asks for the small one.
    pub fn from_env() -> Self {
        match std::env::var("HATTN_TEST_GRID").as_deref() {
            Ok("small") => Self::Small,
            Ok("full") | Err(_) => Self::Full,
            Ok(other) => panic!("HATTN_TEST_GRID is {other:?}; allowed: small, full"),
        }
    }

    /// `full` or, for the small grid, `small`.
    pub fn pick<T>(self, small: T, full: T) -> T {
        match self {
            Self::Small => small,
            Self::Full => full,
        }
    }
}

/// Sizes of tiles, around which the lengths are chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Distinct numbers of queries in a tile.
    pub m: Vec<usize>,
    /// Distinct numbers of keys in a block.
    pub n: Vec<usize>,
}

impl Tiles {
    /// Those of a kernel table.
    pub fn of(rows: &[KernelInfo]) -> Self {
        let distinct = |size: fn(&KernelInfo) -> usize| {
            let mut sizes: Vec<_> = rows.iter().map(size).collect();
            sizes.sort_unstable();
            sizes.dedup();
            sizes
        };
        Self { m: distinct(|row| row.tile_m()), n: distinct(|row| row.tile_n()) }
    }
}

const CAUSAL_TOP_LEFT: Mask = Mask::Causal { corner: Corner::TopLeft };

/// One mask of every kind that bites on lengths of a few hundred.
fn masks() -> [Mask; 4] {
    [Mask::Full, Mask::causal(), CAUSAL_TOP_LEFT, Mask::window(Some(70), Some(9))]
}

/// The grid.
pub fn cases(grid: Grid, tiles: &Tiles) -> Vec<Case> {
    let mut cases = match grid {
        Grid::Small => small(tiles),
        Grid::Full => {
            let mut cases = head_dims();
            cases.extend(lengths(tiles));
            cases.extend(windows());
            cases.extend(heads());
            cases.extend(placements());
            cases.extend(numbers());
            cases.extend(classes(1100));
            cases.extend(extremes(&[64, 96, 128, 256]));
            cases.extend(long());
            cases
        }
    };
    cases.extend(empty());
    cases.extend(chunks_and_prefixes(grid, tiles));
    cases
}

fn small(tiles: &Tiles) -> Vec<Case> {
    let mut cases = classes(300);
    let tile = tiles.m.iter().copied().max().unwrap_or(128);
    for mask in masks() {
        for head_dim in [64, 72, 96, 128, 200, 256] {
            cases.push(Case::new(tile + 1, 130, head_dim, mask));
        }
        cases.push(Case::new(tile + 1, 130, 192, mask).head_dim_vo(128));
        cases.push(Case::new(1, 129, 64, mask));
        cases.push(Case::new(200, 64, 24, mask).heads(2, 4, 2));
        cases.push(Case { placement: Placement::BshdGaps, ..Case::new(65, 257, 128, mask).heads(2, 2, 2) });
        cases.push(Case { placement: Placement::Bhsd, ..Case::new(100, 100, 64, mask).heads(2, 3, 1) });
    }
    cases
}

/// Every multiple of 8 up to 256, and pairs of different ones.
fn head_dims() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, mask) in masks().into_iter().enumerate() {
        for head_dim in (8..=256).step_by(8) {
            // Over one tile of queries and one block of keys in every table so far, by a prime.
            cases.push(Case::new(197 + 2 * i, 229, head_dim, mask));
        }
        for (qk, vo) in [(64, 128), (128, 64), (40, 72), (128, 8), (8, 128), (64, 8), (8, 64)] {
            cases.push(Case::new(131, 263, qk, mask).head_dim_vo(vo));
        }
        for (qk, vo) in [(96, 64), (64, 96), (96, 72), (80, 96), (8, 96), (104, 96), (96, 104)] {
            cases.push(Case::new(163 + i, 271, qk, mask).head_dim_vo(vo));
        }
        for (qk, vo) in WIDE_PAIRS {
            cases.push(Case::new(151 + i, 263, qk, mask).head_dim_vo(vo));
        }
    }
    cases
}

/// Pairs of head dims of which one is above 128: those of kernels, their neighbours, and a small one beside a large one.
const WIDE_PAIRS: [(usize, usize); 16] = [
    (192, 128),
    (128, 192),
    (184, 120),
    (136, 128),
    (128, 136),
    (160, 96),
    (136, 8),
    (8, 136),
    (64, 192),
    (192, 200),
    (200, 192),
    (256, 128),
    (128, 256),
    (256, 8),
    (8, 256),
    (248, 216),
];

/// Around the edges of tiles, and primes; more queries than keys; no keys.
fn lengths(tiles: &Tiles) -> Vec<Case> {
    let around = |sizes: &[usize]| sizes.iter().flat_map(|&size| [size - 1, size, size + 1]).collect::<Vec<_>>();
    let (mut q, mut kv) = (around(&tiles.m), around(&tiles.n));
    q.extend([1, 7, 251, 2 * tiles.m.last().copied().unwrap_or(128) + 1]);
    kv.extend([0, 1, 61, 2 * tiles.n.last().copied().unwrap_or(128), 509]);
    let mut cases = Vec::new();
    for mask in masks() {
        for &seqlen_q in &q {
            for &seqlen_kv in &kv {
                // 64 goes through every row, those of larger head dims too.
                cases.push(Case::new(seqlen_q, seqlen_kv, 64, mask));
            }
        }
        for (seqlen_q, seqlen_kv) in [(127, 129), (128, 128), (129, 127), (257, 384), (383, 131), (1, 509), (191, 0)] {
            cases.push(Case::new(seqlen_q, seqlen_kv, 96, mask));
            cases.push(Case::new(seqlen_q, seqlen_kv, 128, mask));
            cases.push(Case::new(seqlen_q, seqlen_kv, 192, mask));
            cases.push(Case::new(seqlen_q, seqlen_kv, 256, mask));
        }
        for (seqlen_q, seqlen_kv) in [(700, 300), (300, 700), (577, 1021)] {
            for head_dim in [64, 96, 128, 256] {
                cases.push(Case::new(seqlen_q, seqlen_kv, head_dim, mask));
            }
            cases.push(Case::new(seqlen_q, seqlen_kv, 192, mask).head_dim_vo(128));
        }
    }
    cases
}

fn windows() -> Vec<Case> {
    let bounds = [
        (Some(0), Some(0)),
        (Some(1), Some(0)),
        (Some(0), Some(1)),
        (Some(5), Some(3)),
        (Some(63), Some(64)),
        (Some(128), Some(0)),
        (Some(0), Some(128)),
        (Some(127), Some(127)),
        (Some(17), None),
        (None, Some(5)),
        (None, Some(0)),
        (Some(130), Some(7)),
        (Some(200), Some(100_000)),
        (Some(100_000), Some(200)),
        (Some(100_000), Some(100_000)),
        (Some(usize::MAX), Some(3)),
    ];
    let mut cases = Vec::new();
    for (left, right) in bounds {
        for corner in [Corner::BottomRight, Corner::TopLeft] {
            for (seqlen_q, seqlen_kv, head_dim) in [
                (200, 200, 64),
                (150, 333, 64),
                (333, 150, 64),
                (400, 450, 128),
                (450, 140, 128),
                (333, 300, 256),
                (400, 333, 96),
            ] {
                cases.push(Case::new(seqlen_q, seqlen_kv, head_dim, Mask::Window { left, right, corner }));
            }
        }
    }
    cases
}

/// Chunks that end in a block, with it, and many in one; prefixes that end before and behind the diagonal. Both corners.
/// Differences of the lengths are no multiples of a chunk.
fn chunks_and_prefixes(grid: Grid, tiles: &Tiles) -> Vec<Case> {
    let tile = tiles.m.iter().copied().max().unwrap_or(128);
    let mut cases = Vec::new();
    for mask in [Mask::chunked(48), Mask::chunked(3), Mask::prefix(90), Mask::prefix(tile + 10)] {
        for head_dim in [64, 96, 128, 192, 256] {
            cases.push(Case::new(tile + 1, 230, head_dim, mask));
            cases.push(Case::new(tile + 130, 150, head_dim, mask));
        }
        cases.push(Case::new(200, 300, 128, mask).heads(2, 4, 2));
        let values = Values::Garbage(Input::V, Garbage::Nan);
        cases.push(Case { values, ..Case::new(tile + 9, 210, 64, mask) });
    }
    if grid == Grid::Small {
        return cases;
    }
    let lengths = [
        (200, 200, 64),
        (150, 333, 64),
        (333, 150, 64),
        (400, 450, 128),
        (450, 140, 128),
        (333, 300, 256),
        (400, 333, 96),
        (300, 400, 192),
    ];
    for corner in [Corner::BottomRight, Corner::TopLeft] {
        let chunks = [1, 3, 16, 40, 64, 100, 128, 129, 200, 256].map(|chunk| Mask::Chunked { chunk, corner });
        let prefixes = [1, 2, 63, 64, 100, 129, 256, 310].map(|keys| Mask::Prefix { keys, corner });
        for mask in chunks.into_iter().chain(prefixes) {
            cases.extend(lengths.map(|(seqlen_q, seqlen_kv, head_dim)| Case::new(seqlen_q, seqlen_kv, head_dim, mask)));
            cases.push(Case::new(131, 300, 64, mask).heads(2, 4, 2));
        }
    }
    // Long ones, of which tiles visit few blocks; and a chunk's end far from both ends of the sequence.
    for mask in [Mask::chunked(1000), Mask::chunked(1024), Mask::prefix(1500)] {
        cases.push(Case::new(2000, 2500, 64, mask));
        cases.push(Case::new(1700, 1300, 128, mask));
    }
    cases
}

/// MHA, GQA, MQA, batches; more heads than multiprocessors, so that a persistent grid comes round again; few heads with long sequences
/// and wide groups, whose tiles are fewer than multiprocessors.
fn heads() -> Vec<Case> {
    let mut cases = Vec::new();
    for (heads_q, heads_kv, seqlen, head_dim) in
        [(8, 1, 1536, 64), (8, 1, 1500, 128), (16, 1, 777, 128), (12, 1, 900, 96), (4, 2, 1601, 256)]
    {
        cases.push(Case::new(seqlen, seqlen, head_dim, Mask::causal()).heads(1, heads_q, heads_kv));
        // Few of the keys, and many of them for few queries.
        let window = Mask::window(Some(200), Some(0));
        cases.push(Case::new(seqlen, seqlen + 77, head_dim, window).heads(1, heads_q, heads_kv));
        cases.push(Case::new(70, 2 * seqlen, head_dim, Mask::Full).heads(1, heads_q, heads_kv));
    }
    for mask in masks() {
        for (batch, heads_q, heads_kv) in [(1, 1, 1), (2, 4, 4), (3, 6, 2), (2, 8, 1), (1, 12, 3), (5, 3, 1)] {
            cases.push(Case::new(131, 193, 64, mask).heads(batch, heads_q, heads_kv));
            cases.push(Case::new(193, 131, 128, mask).heads(batch, heads_q, heads_kv));
        }
        cases.push(Case::new(200, 140, 64, mask).heads(9, 20, 4));
        cases.push(Case::new(140, 200, 128, mask).heads(20, 9, 9));
        cases.push(Case::new(200, 300, 96, mask).heads(9, 20, 20));
        cases.push(Case::new(1, 300, 128, mask).heads(16, 32, 8));
        cases.push(Case::new(140, 200, 256, mask).heads(20, 9, 9));
        cases.push(Case::new(200, 140, 192, mask).head_dim_vo(128).heads(9, 20, 4));
        // Heads that begin in the middle of a sector of memory, of either operand or of both; and those of 160.
        for (head_dim, head_dim_vo) in [(72, 72), (88, 88), (72, 88), (80, 72), (88, 8), (160, 160), (136, 152)] {
            for (batch, heads_q, heads_kv) in [(2, 4, 4), (1, 12, 3), (2, 2, 1), (1, 3, 3)] {
                let case = Case::new(200, 260, head_dim, mask).head_dim_vo(head_dim_vo);
                cases.push(case.heads(batch, heads_q, heads_kv));
            }
            let values = Values::Garbage(Input::V, Garbage::Nan);
            cases.push(Case { values, ..Case::new(140, 260, head_dim, mask).head_dim_vo(head_dim_vo).heads(9, 20, 4) });
        }
    }
    cases
}

fn placements() -> Vec<Case> {
    let mut cases = Vec::new();
    for placement in Placement::ALL {
        for mask in masks() {
            for (head_dim, head_dim_vo, heads) in [
                (64, 64, (2, 4, 2)),
                (96, 96, (2, 4, 2)),
                (72, 88, (2, 4, 2)),
                (128, 128, (2, 4, 2)),
                (56, 56, (3, 3, 1)),
                (64, 64, (1, 1, 1)),
                (256, 256, (2, 4, 2)),
                (184, 120, (3, 3, 1)),
            ] {
                let (batch, heads_q, heads_kv) = heads;
                let case = Case::new(137, 211, head_dim, mask).head_dim_vo(head_dim_vo).heads(batch, heads_q, heads_kv);
                cases.push(Case { placement, lse: head_dim != 56, ..case });
            }
        }
        cases.push(Case { placement, ..Case::new(1, 1, 64, Mask::Full).heads(2, 2, 2) });
        // One query: plans for a GPU take the query heads of a KV head for the queries of one head.
        for mask in [Mask::Full, Mask::causal()] {
            for (head_dim, (batch, heads_q, heads_kv)) in [(64, (3, 8, 1)), (128, (2, 8, 2)), (72, (2, 6, 2))] {
                let case = Case::new(1, 300, head_dim, mask).heads(batch, heads_q, heads_kv);
                cases.push(Case { placement, ..case });
            }
        }
    }
    cases
}

/// Scales and values.
fn numbers() -> Vec<Case> {
    let mut cases = Vec::new();
    for mask in masks() {
        for head_dim in [64, 96, 128, 256] {
            let case = Case::new(203, 301, head_dim, mask).heads(2, 2, 1);
            for scale in [0.001, 0.02, 0.131, 1.0, 3.7] {
                cases.push(Case { scale: Some(scale), ..case.clone() });
            }
            for values in [Values::Large, Values::Tiny, Values::Offset, Values::Uneven, Values::Constant] {
                cases.push(Case { values, ..case.clone() });
            }
            for (first, last) in
                [(40, 40), (-40, -40), (150, 150), (-150, -150), (-150, 150), (150, -150), (-40, 0), (0, -40)]
            {
                cases.push(Case { values: Values::Sloped { first, last }, ..case.clone() });
            }
            for values in [Values::NanQuery, Values::NanKey] {
                cases.push(Case { values, ..case.clone() });
            }
            for class in Class::ALL {
                cases.push(Case { values: Values::Like(class), ..case.clone() });
            }
            cases.extend(garbage(&case));
            for seed in 1..4 {
                cases.push(Case { seed, lse: seed != 2, ..case.clone() });
            }
        }
    }
    cases
}

/// Garbage in each input, each time of another kind, with the diagonal elsewhere in the blocks.
fn garbage(case: &Case) -> Vec<Case> {
    if case.mask == Mask::Full {
        return Vec::new();
    }
    let inputs = Input::ALL.into_iter().enumerate();
    let all = inputs
        .flat_map(|(i, input)| Garbage::ALL.into_iter().enumerate().map(move |(j, garbage)| (i, j, input, garbage)));
    let picked = all.filter(|(i, j, ..)| (i + j + case.dims.head_dim_qk / 64).is_multiple_of(2));
    let of = |(i, j, input, garbage): (usize, usize, Input, Garbage)| {
        let seqlen_kv = case.dims.seqlen_q + [0, 1, 63, 64, 65, 127][(i + 4 * j) % 6];
        let dims = case.dims.with_seqlen_kv(seqlen_kv);
        Case { dims, values: Values::Garbage(input, garbage), seed: (4 * i + j) as u64, ..case.clone() }
    };
    picked.map(of).collect()
}

/// Log-sum-exps beyond what f32's exponential takes, of both signs, at lengths where a last tile or block has one row or a half.
pub fn extremes(head_dims: &[usize]) -> Vec<Case> {
    let lengths = [(1, 1), (1, 64), (1, 192), (64, 64), (192, 192), (192, 320), (320, 192)];
    let mut cases = Vec::new();
    for mask in masks() {
        for &head_dim in head_dims {
            for (i, (seqlen_q, seqlen_kv)) in lengths.into_iter().enumerate() {
                for score in [100, -100, 1000, -1000] {
                    let values = Values::Sloped { first: score, last: score };
                    // Without a gradient of the LSE in each second one.
                    let case = Case::new(seqlen_q, seqlen_kv, head_dim, mask);
                    cases.push(Case { values, lse: i % 2 == 0, ..case });
                }
            }
        }
    }
    cases
}

/// Every class of inputs at a length of several blocks, so that a row's largest score comes after others, or before them.
fn classes(seqlen: usize) -> Vec<Case> {
    let classes = Class::ALL.into_iter().enumerate().flat_map(move |(i, class)| {
        [(Mask::Full, 64), (Mask::causal(), 96), (Mask::causal(), 128), (Mask::causal(), 256)].map(
            |(mask, head_dim)| {
                // Other lengths are other late keys.
                let case = Case::new(seqlen / 2, seqlen + i, head_dim, mask);
                Case { values: Values::Like(class), ..case }
            },
        )
    });
    classes.collect()
}

/// A few long ones; the oracle is what limits them.
fn long() -> Vec<Case> {
    let one_head = |seqlen_q, seqlen_kv, head_dim, mask| Case::new(seqlen_q, seqlen_kv, head_dim, mask).heads(1, 1, 1);
    vec![
        one_head(4096, 4096, 64, Mask::causal()),
        one_head(2048, 2048, 96, Mask::Full),
        one_head(2048, 2048, 96, Mask::causal()),
        one_head(2048, 2048, 128, Mask::Full),
        one_head(2048, 2048, 128, Mask::causal()),
        one_head(2048, 2048, 256, Mask::causal()),
        one_head(2048, 2048, 192, Mask::causal()).head_dim_vo(128),
        one_head(2500, 2500, 256, Mask::window(Some(512), Some(0))),
        one_head(4096, 4096, 128, Mask::window(Some(256), Some(0))),
        one_head(1, 4096, 128, Mask::Full),
        one_head(3, 4001, 64, Mask::causal()),
        one_head(4001, 3, 64, Mask::causal()),
        one_head(1500, 3001, 64, Mask::window(Some(1000), Some(1000))),
        one_head(1999, 1024, 128, CAUSAL_TOP_LEFT),
    ]
}

/// Nothing to write: legal, and nothing may be touched.
fn empty() -> Vec<Case> {
    vec![
        Case::new(0, 5, 64, Mask::Full),
        Case::new(0, 0, 128, Mask::causal()),
        Case::new(5, 5, 64, Mask::Full).heads(0, 2, 1),
        Case::new(5, 0, 64, Mask::causal()),
    ]
}

/// The cases that some of these rows take by their head dims. The oracle's side of the others would be made for nothing.
pub fn fitting(rows: &[KernelInfo], cases: Vec<Case>) -> Vec<Case> {
    let fits = |case: &Case| {
        let dims = case.dims;
        rows.iter().any(|row| row.head_dim_qk() >= dims.head_dim_qk && row.head_dim_vo() >= dims.head_dim_vo)
    };
    cases.into_iter().filter(fits).collect()
}

/// The largest head dim of these rows, of which one has it on both sides.
///
/// # Panics
/// Without a row.
pub fn largest_head_dim(rows: &[KernelInfo]) -> usize {
    rows.iter().map(|row| row.head_dim_qk().min(row.head_dim_vo())).max().expect("a row")
}

/// Head dims that no kernel takes, and some that kernels take: the CPU computes them all.
pub const HEAD_DIMS: [usize; 17] = [1, 2, 3, 5, 7, 9, 12, 31, 33, 65, 100, 127, 129, 192, 256, 300, 520];

/// Every multiple of 8 above 128 up to 512, and pairs of a small and a large one. For the CPU: kernels take none above 256.
///
/// Few queries and keys, as a vector has many elements. Still a block of keys more than one, for the CPU and the oracle.
pub fn wide() -> Vec<Case> {
    let mut cases = Vec::new();
    let turn = |i: usize, case: Case| {
        let values =
            [Values::Normal, Values::Offset, Values::Like(Class::Peaky), Values::Uneven, Values::Like(Class::Late)];
        let (batch, heads_q, heads_kv) = [(1, 2, 1), (2, 3, 3), (1, 4, 2)][i % 3];
        let case = case.heads(batch, heads_q, heads_kv);
        Case { placement: Placement::ALL[i % Placement::ALL.len()], values: values[i % 5], lse: i % 4 != 3, ..case }
    };
    for (i, head_dim) in (136..=random::WIDEST).step_by(8).enumerate() {
        cases.push(turn(i, Case::new(9 + i % 7, 70 + i % 5, head_dim, masks()[i % 4])));
    }
    let pairs = [(192, 128), (128, 192), (256, 128), (72, 264), (576, 512), (512, 8), (8, 512), (512, 512), (256, 256)];
    for (i, (qk, vo)) in pairs.into_iter().enumerate() {
        for (j, mask) in masks().into_iter().enumerate() {
            let mut case = turn(4 * i + j, Case::new(67, 259 + j, qk, mask));
            case.dims.head_dim_vo = vo;
            cases.push(case);
        }
    }
    cases
}

/// Packed sequences and used lengths of such head dims: every kind of them, with a rotating mask.
pub fn wide_packed() -> Vec<Case> {
    let pairs = [(192, 128), (256, 256), (512, 512), (8, 512), (136, 72)];
    let kinds =
        [([true; 2], [false; 2]), ([true, false], [false, true]), ([false; 2], [true; 2]), ([true; 2], [true; 2])];
    let mut cases = Vec::new();
    for (i, (qk, vo)) in pairs.into_iter().enumerate() {
        for (j, (packed, used)) in kinds.into_iter().enumerate() {
            let mut case = Case::new(90, 150, qk, masks()[(i + j) % 4]).heads(3, 2, 1);
            case.dims.head_dim_vo = vo;
            let kind = Kind { packed, used, fill_gaps: (i + j) % 2 == 0 };
            case.packing = Packing::random(kind, 3, [90, 150], case.seed);
            cases.push(case);
        }
    }
    cases
}

/// Random cases, for fuzzing: small lengths, everything else free.
pub mod random {
    use proptest::strategy::{Strategy as _, ValueTree as _};
    use proptest::test_runner::{Config, FileFailurePersistence};

    use super::*;

    pub use hopper_attention_verify::case::random::{WIDEST, case, case_of_kernels, case_on_cpu, runner};

    /// proptest's defaults, but that it keeps the seed of what failed in a file beside the test.
    pub fn kept() -> Config {
        let file = FileFailurePersistence::WithSource("regressions");
        Config { failure_persistence: Some(Box::new(file)), ..Config::default() }
    }

    /// The seed of random cases, from `HATTN_TEST_SEED`, or 0. Prints it.
    ///
    /// # Panics
    /// When the variable holds no number.
    pub fn seed() -> u64 {
        let seed = match std::env::var("HATTN_TEST_SEED") {
            Ok(seed) => seed.parse().unwrap_or_else(|_| panic!("HATTN_TEST_SEED is {seed:?}; allowed: 0 to 2^64 - 1")),
            Err(_) => 0,
        };
        say(&format!("random cases of seed {seed}; HATTN_TEST_SEED sets another"));
        seed
    }

    /// Cases that follow from [`seed`], with head dims up to `head_dim` in steps of 8: `small` of them on the small grid, else
    /// `full` or as many more as `PROPTEST_CASES` asks for.
    pub fn drawn(head_dim: usize, small: u32, full: u32) -> Vec<Case> {
        let count = Grid::from_env().pick(small, Config::default().cases.max(full));
        let mut proptest = runner(seed());
        let strategy = case_of_kernels(head_dim);
        (0..count).map(|_| strategy.new_tree(&mut proptest).expect("a case").current()).collect()
    }

    /// Every second case, and the others.
    pub fn halves(cases: impl IntoIterator<Item = Case>) -> [Vec<Case>; 2] {
        let mut halves = [vec![], vec![]];
        cases.into_iter().enumerate().for_each(|(i, case)| halves[i % 2].push(case));
        halves
    }
}
