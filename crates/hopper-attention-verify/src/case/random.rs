//! Random cases: small lengths, everything else free.

use hopper_attention::{Corner, Dims, Mask};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::Case;
use crate::alibi::Alibi;
use crate::bias::Bias;
use crate::blocks::Blocks;
use crate::data::{Garbage, Input, Values};
use crate::inputs::Class;
use crate::layouts::Placement;
use crate::packing::{Kind, Packing};
use crate::sinks::Sinks;

/// Cases with head dims up to `head_dim` in steps of `step`.
pub fn case(head_dim: usize, step: usize) -> impl Strategy<Value = Case> {
    let length = || prop_oneof![1usize..20, 60usize..70, 1usize..300, 120usize..140, 185usize..200];
    let dim = move || (1..=head_dim / step).prop_map(move |steps| steps * step);
    // Now and then few heads with long sequences, or few queries with many keys: several CTAs then share a tile.
    let sizes = prop_oneof![
        19 => (1usize..4, length(), prop_oneof![9 => length(), 1 => Just(0)], 1usize..4, 1usize..5, dim(), dim()),
        1 => (Just(1), 300usize..900, 300usize..900, 1usize..3, 1usize..17, dim(), dim()),
        1 => (1usize..3, 1usize..200, 500usize..3000, 1usize..3, 1usize..9, dim(), dim()),
    ];
    let scale = prop_oneof![2 => Just(None), 1 => (0.005f32..2.0).prop_map(Some)];
    let placement = proptest::sample::select(Placement::ALL.to_vec());
    let slope = || proptest::sample::select(vec![-150i16, -40, -10, 0, 10, 40, 150]);
    let values = prop_oneof![
        2 => Just(Values::Normal),
        1 => Just(Values::Offset),
        1 => Just(Values::Uneven),
        1 => (slope(), slope()).prop_map(|(first, last)| Values::Sloped { first, last }),
        2 => proptest::sample::select(Class::ALL.to_vec()).prop_map(Values::Like),
        2 => (proptest::sample::select(Input::ALL.to_vec()), proptest::sample::select(Garbage::ALL.to_vec()))
            .prop_map(|(input, garbage)| Values::Garbage(input, garbage)),
    ];
    (sizes, mask(), scale, any::<bool>(), placement, values, any::<u32>(), any::<bool>()).prop_map(
        |(sizes, mask, scale, lse, placement, values, seed, square)| {
            let (batch, seqlen_q, seqlen_kv, heads_kv, group, head_dim_qk, head_dim_vo) = sizes;
            let dims = Dims::new(batch, seqlen_q, heads_kv * group, head_dim_qk)
                .with_seqlen_kv(seqlen_kv)
                .with_heads_kv(heads_kv)
                .with_head_dim_vo(if square { head_dim_qk } else { head_dim_vo });
            let packing = Packing::default();
            let (seed, sinks, softcap) = (seed.into(), Sinks::None, 0.0);
            let (alibi, max_logits, blocks, bias, dropout) = (Alibi::None, false, Blocks::None, Bias::NONE, 0.0);
            Case {
                dims,
                mask,
                scale,
                lse,
                placement,
                values,
                seed,
                packing,
                sinks,
                softcap,
                alibi,
                max_logits,
                blocks,
                bias,
                dropout,
            }
        },
    )
}

/// Cases with head dims up to `head_dim` in steps of 8, half of them up to 128: most kernels take no larger ones.
pub fn case_of_kernels(head_dim: usize) -> impl Strategy<Value = Case> {
    prop_oneof![case(head_dim.min(128), 8), case(head_dim, 8)]
}

/// The largest head dim of [`case_on_cpu`].
pub const WIDEST: usize = 512;

/// Cases for the CPU, which takes any head dim: one in four has head dims up to 512, and shorter sequences.
pub fn case_on_cpu() -> impl Strategy<Value = Case> {
    prop_oneof![3 => case(128, 8), 1 => case(WIDEST, 8).prop_map(shorter)]
}

/// A case that has no more scores of a head and no more heads than a computation on the CPU does in a moment.
fn shorter(mut case: Case) -> Case {
    let Dims { seqlen_q, seqlen_kv, heads_q, heads_kv, .. } = case.dims;
    let group = (heads_q / heads_kv).min(3);
    let heads_kv = heads_kv.min(2);
    case.dims = case.dims.with_seqlen_q(seqlen_q.min(130)).with_seqlen_kv(seqlen_kv.min(600));
    case.dims = case.dims.with_heads_q(group * heads_kv).with_heads_kv(heads_kv);
    case
}

/// What a case may have beside its sizes: nothing, or packed sequences and used lengths of `2 * batch` sequences and more.
/// Give it to [`packed`].
pub fn packing() -> impl Strategy<Value = (Kind, usize)> {
    let sides = || any::<[bool; 2]>();
    let kind = (sides(), sides(), any::<bool>()).prop_map(|(packed, used, fill_gaps)| Kind {
        packed,
        used: [used[0] && used[1], used[1]],
        fill_gaps,
    });
    prop_oneof![2 => Just((Kind::default(), 0)), 1 => (kind, 0usize..9)]
}

/// The sinks of a case: none in half of the cases.
pub fn sinks() -> impl Strategy<Value = Sinks> {
    prop_oneof![1 => Just(Sinks::None), 1 => proptest::sample::select(Sinks::ALL.to_vec())]
}

/// The lists of blocks of a case: none in two of three cases. Give it to [`listed`].
pub fn blocks() -> impl Strategy<Value = Blocks> {
    prop_oneof![2 => Just(Blocks::None), 1 => proptest::sample::select(Blocks::ALL.to_vec())]
}

/// A case with lists of blocks, if it has no packed sequences and used lengths.
#[must_use]
pub fn listed(case: Case, blocks: Blocks) -> Case {
    if case.packing.is_none() { case.blocks(blocks) } else { case }
}

/// The additive bias of a case: none in two of three cases.
pub fn bias() -> impl Strategy<Value = Bias> {
    prop_oneof![2 => Just(Bias::NONE), 1 => proptest::sample::select(Bias::all().collect::<Vec<_>>())]
}

/// The caps that are drawn. Models have 30 and 50.
pub const CAPS: [f32; 4] = [1.0, 15.0, 30.0, 50.0];

/// The cap of a case: none in three of four cases; and whether the scores are to be far above it. Give it to [`capped`].
pub fn softcap() -> impl Strategy<Value = (f32, bool)> {
    prop_oneof![3 => Just((0.0, false)), 1 => (proptest::sample::select(CAPS.to_vec()), any::<bool>())]
}

/// A case with a cap. Scores that are to be far above it get a scale with which most of them are, of normal inputs.
#[must_use]
pub fn capped(case: Case, (softcap, saturated): (f32, bool)) -> Case {
    // A product of normal inputs has a standard deviation of `sqrt(head_dim)`.
    let scale = saturated.then(|| 4.0 * softcap / (case.dims.head_dim_qk as f32).sqrt());
    Case { scale: scale.or(case.scale), ..case.softcap(softcap) }
}

/// The ALiBi slopes of a case, and whether it has the maximum logits: most cases have neither.
pub fn biases() -> impl Strategy<Value = (Alibi, bool)> {
    let alibi = prop_oneof![1 => Just(Alibi::None), 3 => proptest::sample::select(Alibi::ALL.to_vec())];
    prop_oneof![3 => Just((Alibi::None, false)), 2 => (alibi, any::<bool>())]
}

/// The probabilities of dropout that are drawn. Models have 0.1. The last one drops nothing.
pub const DROPOUTS: [f32; 5] = [0.1, 0.5, 0.9, 0.999, 1e-6];

/// The dropout of a case: none in three of four cases.
pub fn dropout() -> impl Strategy<Value = f32> {
    prop_oneof![3 => Just(0.0), 1 => proptest::sample::select(DROPOUTS.to_vec())]
}

/// A case with packed sequences and used lengths. Its rows stay as many, and are cut into sequences. A side that is not packed
/// keeps its batch, so that the other side has as many sequences. Most have hints of the longest sequence, which may be wrong.
#[must_use]
pub fn packed(mut case: Case, (kind, more): (Kind, usize)) -> Case {
    if kind.packed == [true; 2] {
        case.dims.batch = case.dims.batch * 2 + more;
    }
    let Dims { batch, seqlen_q, seqlen_kv, .. } = case.dims;
    case.packing = Packing::random(kind, batch, [seqlen_q, seqlen_kv], case.seed).hinted(case.seed);
    case
}

fn mask() -> impl Strategy<Value = Mask> {
    let corner = || prop_oneof![Just(Corner::BottomRight), Just(Corner::TopLeft)];
    let bound = || prop_oneof![Just(None), (0usize..8).prop_map(Some), (0usize..300).prop_map(Some)];
    let chunk = prop_oneof![1usize..8, 1usize..300, Just(64usize), Just(128usize)];
    prop_oneof![
        1 => Just(Mask::Full),
        1 => corner().prop_map(|corner| Mask::Causal { corner }),
        2 => (bound(), bound(), corner()).prop_map(|(left, right, corner)| Mask::Window { left, right, corner }),
        1 => (chunk, corner()).prop_map(|(chunk, corner)| Mask::Chunked { chunk, corner }),
        1 => (0usize..300, corner()).prop_map(|(keys, corner)| Mask::Prefix { keys, corner }),
    ]
}

/// What draws: a seed gives the same cases on every machine.
pub fn runner(seed: u64) -> TestRunner {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { failure_persistence: None, ..Config::default() };
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
}
