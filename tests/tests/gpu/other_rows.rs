//! What one query does to the results of others. A NaN changes no bit of them. An infinity or a large score may change the last bits of
//! the other rows of its warp, and nothing else (docs/numerics.md). With scores in f16 a NaN has everything computed again.
//!
//! Each case runs with several contents of one query. What the others get is compared with what they get beside a query of zeros. Such a
//! query gives equal weights, so that its row never moves its reference, and its warp never stops for it. A query of normal numbers
//! seldom stops its warp, but it may.

use std::ops::Range;

use hopper_attention::internal::{plan_with_shares, plan_with_splits};
use hopper_attention::reference::Tensor;
use hopper_attention::{Arch, DType, E4M3, Element, KernelInfo, Mask, MaskClass, Scaling, Workspace, bf16, f16};
use hopper_attention_tests::blocks::Blocks;
use hopper_attention_tests::data::{Input, Poison, Values};
use hopper_attention_tests::fp8::{Operands, for_row};
use hopper_attention_tests::gpu::fp8::{OnDevice as Fp8OnDevice, Written};
use hopper_attention_tests::gpu::{Gpu, OnDevice};
use hopper_attention_tests::inputs::Class;
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::{Outputs, Prepared, Ready, Runner, Verdict};
use hopper_attention_tests::say;
use rayon::prelude::*;

/// The first of 16 queries of one warp.
const WARP: usize = 80;
/// The query: the eighth of them.
const QUERY: usize = WARP + 7;
const HEAD: usize = 1;
const QUERIES: usize = 200;

/// What the query holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// The row that the others are compared beside.
    Zeros,
    /// What was drawn.
    Drawn,
    /// NaN.
    Nan,
    /// Infinity in all columns. Scores are sums of infinities of both signs: NaN.
    Infinities,
    /// Infinity in one column. Scores are infinite, some of each sign.
    Infinity,
    /// A hundred times what was drawn. With e4m3 operands: the largest numbers, with the signs of a key.
    Spike,
}

impl Content {
    const ALL: [Self; 6] = [Self::Zeros, Self::Drawn, Self::Nan, Self::Infinities, Self::Infinity, Self::Spike];
    /// Those of e4m3, which has no infinity.
    const E4M3: [Self; 4] = [Self::Zeros, Self::Drawn, Self::Nan, Self::Spike];

    fn put(self, row: &mut [f64]) {
        match self {
            Self::Zeros => row.fill(0.0),
            Self::Drawn => {}
            Self::Nan => row.fill(f64::NAN),
            Self::Infinities => row.fill(f64::INFINITY),
            Self::Infinity => row[0] = f64::INFINITY,
            Self::Spike => row.iter_mut().for_each(|x| *x *= 100.0),
        }
    }

    /// Whether every score of the query is NaN.
    fn is_nan(self) -> bool {
        matches!(self, Self::Nan | Self::Infinities)
    }

    /// Operands whose `queries` hold this. Factors stay as they are, so that the other queries do too.
    fn put_into(self, queries: &Range<usize>, operands: &Operands) -> Operands {
        let mut changed = operands.clone();
        let dims = operands.problem().dims();
        // Scores in f16 have no larger operands.
        let most = if operands.problem().allows_half_scores() { 14.0 } else { 448.0 };
        // Of a key that the query sees under each mask, and that is visited late.
        let key = (dims.seqlen_kv - dims.seqlen_q) * dims.heads_kv * dims.head_dim_qk;
        for column in 0..dims.head_dim_qk {
            let element = match self {
                Self::Zeros => E4M3::from_f32(0.0),
                Self::Nan => E4M3::from_bits(0x7f),
                Self::Spike => E4M3::from_f32(f32::copysign(most, operands.stored()[1][key + column].to_f32())),
                _ => continue,
            };
            queries.clone().for_each(|query| changed.put(0, [0, query, HEAD, column], element));
        }
        changed
    }
}

/// The bits of O, `[batch, queries, heads, columns]`, and of the LSE, `[batch, heads, queries]`.
#[derive(Clone)]
struct Bits {
    shape: [usize; 4],
    o: Vec<u32>,
    lse: Vec<u32>,
}

impl Bits {
    fn of<T: Poison>(outputs: &Outputs<T>) -> Self {
        let o = outputs.o.elements_of_rows(1, |_| true).into_iter().map(Poison::bits).collect();
        let lse = outputs.lse.as_ref().expect("a case with an LSE").elements_of_rows(2, |_| true);
        Self { shape: outputs.o.layout().shape(), o, lse: lse.into_iter().map(f32::to_bits).collect() }
    }

    /// O as f32, which is exact.
    fn of_written(written: &Written<bf16>, shape: [usize; 4]) -> Self {
        let o = written.o.iter().map(|o| o.to_f32().to_bits()).collect();
        Self { shape, o, lse: written.lse.iter().map(|lse| lse.to_bits()).collect() }
    }

    fn rows(&self) -> impl Iterator<Item = [usize; 3]> + use<> {
        let [batch, queries, heads, _] = self.shape;
        (0..batch * queries * heads).map(move |i| [i / heads / queries, i / heads % queries, i % heads])
    }

    /// Where a row of O begins, and where its LSE is.
    fn places(&self, [batch, query, head]: [usize; 3]) -> (usize, usize) {
        let [_, queries, heads, columns] = self.shape;
        (((batch * queries + query) * heads + head) * columns, (batch * heads + head) * queries + query)
    }

    fn row(&self, row: [usize; 3]) -> (&[u32], u32) {
        let (o, lse) = self.places(row);
        (&self.o[o..][..self.shape[3]], self.lse[lse])
    }

    /// The rows with other bits.
    fn differing(&self, other: &Self) -> Vec<[usize; 3]> {
        assert_eq!((self.shape, self.lse.len()), (other.shape, other.lse.len()));
        self.rows().filter(|&row| self.row(row) != other.row(row)).collect()
    }

    /// Flips a bit in the last column of a row, or in its LSE. Then `differing` names the row, and no other.
    fn check_comparison(&self) {
        assert!(self.differing(self).is_empty());
        for row in [[0, QUERY - 1, HEAD], [0, QUERY, HEAD], [0, QUERY, 0], [0, self.shape[1] - 1, self.shape[2] - 1]] {
            let (o, lse) = self.places(row);
            let [mut of_o, mut of_lse] = [self.clone(), self.clone()];
            of_o.o[o + self.shape[3] - 1] ^= 1;
            of_lse.lse[lse] ^= 1;
            assert_eq!([self.differing(&of_o), self.differing(&of_lse)], [vec![row], vec![row]]);
        }
    }
}

/// Which rows may get other bits.
enum Allowed {
    Nobody,
    Warp(Range<usize>),
    Anybody,
}

impl Allowed {
    fn holds(&self, [batch, query, head]: [usize; 3]) -> bool {
        match self {
            Self::Nobody => false,
            Self::Warp(queries) => [batch, head] == [0, HEAD] && queries.contains(&query),
            Self::Anybody => true,
        }
    }
}

/// The queries of the warp that has the query: 16, or 32 where an sm80 kernel's warp has two strips (sm80/fwd/traits.hpp).
fn warp_of(row: &KernelInfo) -> Range<usize> {
    let has_strips = row.arch() == Arch::Sm80 && row.tile_m() > 64 && row.head_dim_vo() <= 128;
    let rows = if has_strips { 32 } else { 16 };
    let first = QUERY / rows * rows;
    first..first + rows
}

/// For each content how many runs there were, how many other rows they had, and how many of these got other bits.
#[derive(Default)]
struct Counts([[usize; 3]; 6]);

impl Counts {
    /// Takes the rows that differ from those beside zeros. What is wrong with them, if anything is. `queries` are those with the content.
    fn take(
        &mut self,
        content: Content,
        queries: &Range<usize>,
        zeros: &Bits,
        bits: &Bits,
        allowed: &Allowed,
    ) -> Result<(), String> {
        let mut differing = zeros.differing(bits);
        let rows = differing.len();
        differing.retain(|&[batch, query, head]| [batch, head] != [0, HEAD] || !queries.contains(&query));
        if rows - differing.len() < queries.len() {
            return Err(format!("{content:?}: a row of {queries:?} is that of zeros"));
        }
        let count = &mut self.0[content as usize];
        *count = [count[0] + 1, count[1] + zeros.rows().count() - queries.len(), count[2] + differing.len()];
        let wrong: Vec<_> = differing.into_iter().filter(|&row| !allowed.holds(row)).collect();
        match wrong.first() {
            Some(first) => {
                Err(format!("{content:?}: {} other rows have other bits, the first is {first:?}", wrong.len()))
            }
            None => Ok(()),
        }
    }

    /// Prints what there was.
    fn say(&self, what: &str) {
        for content in Content::ALL {
            let [runs, rows, differing] = self.0[content as usize];
            if runs > 0 {
                say(&format!("{what}, {content:?}: {runs} runs, {differing} of {rows} other rows have other bits"));
            }
        }
    }
}

/// The cases of a row. The first has a ragged end, and up to 8 blocks of 128 keys, which are few for an sm90 kernel. The second has whole
/// blocks of each size without a mask, and keys that stand out, so that other rows stop their warps.
fn cases(row: &KernelInfo) -> Vec<Case> {
    let mask = match row.mask() {
        MaskClass::Causal => Mask::causal(),
        MaskClass::Window => Mask::window(Some(700), Some(40)),
        _ => Mask::Full,
    };
    let long = (1920, Values::Like(Class::Late));
    let all = Grid::from_env().pick(vec![(300, Values::Normal)], vec![(1000, Values::Normal), long]);
    let case = |(seqlen_kv, values)| {
        let case = Case::new(QUERIES, seqlen_kv, row.head_dim_qk(), mask).head_dim_vo(row.head_dim_vo());
        // Lists of all blocks. (A row whose key comes in a block without masked keys stops its warp, one of zeros too.)
        let blocks = if row.mask() == MaskClass::Blocks { Blocks::All } else { Blocks::None };
        Case { values, blocks, ..case }
    };
    all.into_iter().map(case).collect()
}

/// Rows that take the same cases.
fn kinds(rows: &[KernelInfo], dtype: DType) -> Vec<Vec<(usize, KernelInfo)>> {
    let of = |row: &KernelInfo| (row.mask(), row.head_dim_qk(), row.head_dim_vo(), row.needs_modifiers());
    let mut kinds: Vec<Vec<(usize, KernelInfo)>> = Vec::new();
    for (i, row) in rows.iter().enumerate().filter(|(_, row)| row.dtype() == dtype) {
        match kinds.iter_mut().find(|kind| of(&kind[0].1) == of(row)) {
            Some(kind) => kind.push((i, *row)),
            None => kinds.push(vec![(i, *row)]),
        }
    }
    kinds
}

fn forwards<T: Poison>(gpu: &Gpu, rows: &[KernelInfo], runner: &mut Runner, counts: &mut Counts) {
    for kind in kinds(rows, T::DTYPE) {
        for case in cases(&kind[0].1) {
            // Of what such rows compute alone, this changes no score.
            let case = case.max_logits(kind[0].1.needs_modifiers());
            let edit = |content: Content, input: Input, tensor: &mut Tensor| {
                if input == Input::Q {
                    content.put(tensor.row_mut(0, QUERY, HEAD));
                }
            };
            let prepare = |content: &Content| {
                let prepared = Prepared::<T>::edited(&case, |input, tensor| edit(*content, input, tensor));
                if !content.is_nan() {
                    prepared.expected.compute();
                }
                prepared
            };
            let all: Vec<_> = Content::ALL.par_iter().with_max_len(1).map(prepare).collect();
            let mut on_device = OnDevice::new(&gpu.stream, &all[0]);
            for (i, row) in &kind {
                for shares in 1..=row.most_shares().min(2) {
                    let plan = plan_with_splits(&all[0].problem, &gpu.device, row, shares, 1);
                    let plan = plan.expect("a plan of the row");
                    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).expect("device memory");
                    let mut run = |prepared: &Prepared<T>| {
                        on_device.write_inputs(&gpu.stream, prepared);
                        on_device.run(&gpu.stream, &mut workspace, &plan, prepared)
                    };
                    let outputs = run(&all[0]).unwrap_or_else(|why| panic!("{plan}: {why}"));
                    let zeros = Bits::of(&outputs);
                    zeros.check_comparison();
                    runner.take(*i, &case, T::DTYPE, all[0].verdict(&outputs));
                    for (content, prepared) in Content::ALL.into_iter().zip(&all).skip(1) {
                        let allowed = if content.is_nan() { Allowed::Nobody } else { Allowed::Warp(warp_of(row)) };
                        let verdict = run(prepared).and_then(|outputs| {
                            let bits = Bits::of(&outputs);
                            counts.take(content, &(QUERY..QUERY + 1), &zeros, &bits, &allowed)?;
                            if content.is_nan() {
                                is_nan::<T>(&outputs).map(|()| Verdict::default())
                            } else {
                                Ok(prepared.verdict(&outputs))
                            }
                        });
                        let named = |why| Verdict::failed(format!("{plan}: {why}"));
                        runner.take(*i, &case, T::DTYPE, verdict.unwrap_or_else(named));
                    }
                }
            }
        }
    }
}

/// Whether the query's row of O and its LSE are NaN: the test has changed the query that it means.
fn is_nan<T: Poison>(outputs: &Outputs<T>) -> Result<(), String> {
    let o = outputs.o.tensor();
    let [_, queries, ..] = o.shape();
    let lse = outputs.lse.as_ref().expect("a case with an LSE").values()[HEAD * queries + QUERY];
    let all = o.row(0, QUERY, HEAD).iter().all(|o| o.is_nan()) && lse.is_nan();
    if all { Ok(()) } else { Err("the row of a query whose scores are NaN is not NaN".into()) }
}

/// A bit that differs is noticed where it is not allowed: beside the warp's rows, in another head, and in any row where nobody may differ.
/// So is a query that was not changed at all.
#[test]
fn other_bits_are_noticed() {
    let zeros = Bits { shape: [1, QUERIES, 2, 8], o: vec![0; QUERIES * 16], lse: vec![0; QUERIES * 2] };
    let take = |rows: &[[usize; 3]], allowed: Allowed| {
        let mut bits = zeros.clone();
        rows.iter().for_each(|&row| bits.lse[zeros.places(row).1] = 1);
        let mut counts = Counts::default();
        let queries = QUERY..QUERY + 1;
        counts.take(Content::Nan, &queries, &zeros, &bits, &allowed).map(|()| counts.0[Content::Nan as usize])
    };
    let own = [0, QUERY, HEAD];
    let warp = || Allowed::Warp(80..96);
    assert_eq!(take(&[own], Allowed::Nobody), Ok([1, 2 * QUERIES - 1, 0]));
    assert_eq!(take(&[own, [0, 80, HEAD], [0, 95, HEAD]], warp()), Ok([1, 2 * QUERIES - 1, 2]));
    assert_eq!(take(&[own, [0, 3, 0]], Allowed::Anybody), Ok([1, 2 * QUERIES - 1, 1]));
    assert!(take(&[own, [0, QUERY + 1, HEAD]], Allowed::Nobody).is_err());
    for other in [[0, 79, HEAD], [0, 96, HEAD], [0, QUERY, 0]] {
        assert!(take(&[own, other], warp()).is_err(), "{other:?}");
    }
    assert!(take(&[], Allowed::Anybody).is_err());
}

/// A NaN in one query changes no bit of another row, whatever else the rows of its warp do. Everything else that a query may hold changes
/// bits of its own warp alone, and all results keep the tolerance.
#[test]
fn a_nan_in_one_query_changes_no_other_row() {
    let Some(gpu) = Gpu::open("a_nan_in_one_query_changes_no_other_row") else { return };
    let modified = [gpu.modified_rows(), gpu.listed_modified_rows()].concat();
    let needing = modified.into_iter().filter(KernelInfo::needs_modifiers).collect();
    let rows = [gpu.rows(), gpu.listed_rows(), needing].concat();
    let mut runner = Runner::new(&rows);
    let mut counts = Counts::default();
    forwards::<bf16>(&gpu, &rows, &mut runner, &mut counts);
    forwards::<f16>(&gpu, &rows, &mut runner, &mut counts);
    counts.say("bf16 and f16");
    runner.finish();
}

/// The same with e4m3 operands, and with NaN in all of the warp's first eight queries: those of which a thread has the first of its two
/// rows. But where a row has scores in f16, a NaN has everything computed again with scores in f32.
#[test]
fn a_query_of_e4m3_changes_no_row_of_another_warp() {
    let Some(gpu) = Gpu::open("a_query_of_e4m3_changes_no_row_of_another_warp") else { return };
    let rows = [gpu.all_fp8_rows(), gpu.listed_fp8_rows()].concat();
    let mut runner = Runner::new(&rows);
    let mut counts = Counts::default();
    let changes = [(QUERY..QUERY + 1, &Content::E4M3[..]), (WARP..WARP + 8, &[Content::Zeros, Content::Nan][..])];
    for (i, row) in rows.iter().enumerate() {
        for case in cases(row) {
            let case = case.softcap(if row.needs_modifiers() { 30.0 } else { 0.0 });
            let options = case.options(DType::E4M3).scaling(Scaling::ALL[i % 3]);
            let drawn = Operands::of_case(&case, &for_row(options.build().expect("e4m3 operands"), row), None);
            for (queries, contents) in &changes {
                let prepare = |content: &Content| {
                    let operands = content.put_into(queries, &drawn);
                    let expected = operands.expected();
                    (*content, operands, expected)
                };
                let all: Vec<_> = contents.par_iter().with_max_len(1).map(prepare).collect();
                for shares in 1..=row.most_shares().min(2) {
                    let plan = plan_with_shares(drawn.problem(), &gpu.device, row, shares).expect("a plan of the row");
                    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).expect("device memory");
                    let mut zeros: Option<Bits> = None;
                    for (content, operands, expected) in &all {
                        let on_device = Fp8OnDevice::new(&gpu.stream, operands);
                        let allowed = match content {
                            Content::Nan if row.scores() == DType::F16 => Allowed::Anybody,
                            // (docs/numerics.md)
                            Content::Nan if queries.len() > 1 && row.head_dim_vo() > 128 => Allowed::Warp(warp_of(row)),
                            Content::Nan => Allowed::Nobody,
                            _ => Allowed::Warp(warp_of(row)),
                        };
                        let ran = on_device.run::<bf16>(&gpu.stream, &mut workspace, &plan, None);
                        let verdict = ran.and_then(|written| {
                            let bits = Bits::of_written(&written, drawn.problem().o_shape());
                            match &zeros {
                                Some(zeros) => counts.take(*content, queries, zeros, &bits, &allowed)?,
                                None => bits.check_comparison(),
                            }
                            zeros.get_or_insert(bits);
                            let (o, lse) = written.output(drawn.problem());
                            Ok(Verdict::from(&expected.check(&o, Some(&lse)).expect("matching shapes")))
                        });
                        let named = |why| Verdict::failed(format!("{plan}: {why}"));
                        runner.take(i, &case, DType::E4M3, verdict.unwrap_or_else(named));
                    }
                }
            }
        }
    }
    counts.say("e4m3");
    runner.finish();
}
