//! Block-sparse masks on the CPU through the public API: results against the oracle, and the oracle against dense masks.

use hopper_attention::reference::{self, BackwardExpected, Expected, Modifiers, Tensor};
use hopper_attention::{
    Args, BackwardProblem, BlockLists, BlockMask, DType, Device, Dims, Element, Float, ForwardProblem, Lengths,
    MASK_BLOCK, MASK_BLOCK_WORDS, Mask, Slot, Stream, TensorMut, TensorRef, Workspace, bf16, f16,
};

mod common;

use common::{dense, values, widened};

/// Lists of a problem, as a run takes them.
#[derive(Clone, Debug)]
struct Lists {
    counts: Vec<i32>,
    indices: Vec<i32>,
    bits: Vec<i32>,
    full: Option<(Vec<i32>, Vec<i32>)>,
    mask: BlockMask,
}

impl Lists {
    /// Lists that keep the pairs that `keep` keeps: `keep(b, h, query, key)`. Blocks that keep all of their pairs are full.
    fn of(dims: Dims, per_batch: bool, per_head: bool, full: bool, keep: impl Fn([usize; 4]) -> bool) -> Self {
        let (batch, heads) = (if per_batch { dims.batch } else { 1 }, if per_head { dims.heads_q } else { 1 });
        let [queries, keys] = [dims.seqlen_q, dims.seqlen_kv].map(|len| len.div_ceil(MASK_BLOCK));
        let mut rows = Vec::new();
        for row in 0..batch * heads * queries {
            let (b, h, q) = (row / queries / heads, row / queries % heads, row % queries);
            let (mut partial, mut all) = (Vec::new(), Vec::new());
            // From the last on: a list need not be sorted.
            for k in (0..keys).rev() {
                let mut words = vec![0i32; MASK_BLOCK_WORDS];
                let mut kept = 0;
                for (i, j) in (0..MASK_BLOCK).flat_map(|i| (0..MASK_BLOCK).map(move |j| (i, j))) {
                    if keep([b, h, q * MASK_BLOCK + i, k * MASK_BLOCK + j]) {
                        words[i * 4 + j / 32] |= (1u32 << (j % 32)) as i32;
                        kept += 1;
                    }
                }
                if kept == MASK_BLOCK * MASK_BLOCK && full {
                    all.push(k as i32);
                } else if kept > 0 {
                    partial.push((k as i32, words));
                }
            }
            rows.push((partial, all));
        }
        let most_partial = rows.iter().map(|row| row.0.len()).max().unwrap_or(0);
        let padded = |list: Vec<i32>, len: usize, fill: i32| list.into_iter().chain(std::iter::repeat(fill)).take(len);
        let mut lists = Self {
            counts: rows.iter().map(|row| row.0.len() as i32).collect(),
            indices: Vec::new(),
            bits: Vec::new(),
            full: full.then(|| (rows.iter().map(|row| row.1.len() as i32).collect(), Vec::new())),
            mask: BlockMask::new(most_partial).per_batch(per_batch).per_head(per_head).full_blocks(full),
        };
        for (partial, all) in rows {
            // What is past the count is never read.
            lists.indices.extend(padded(partial.iter().map(|block| block.0).collect(), keys, i32::MIN));
            let words = partial.into_iter().flat_map(|block| block.1).collect();
            lists.bits.extend(padded(words, most_partial * MASK_BLOCK_WORDS, -1));
            if let Some((_, indices)) = &mut lists.full {
                indices.extend(padded(all, keys, i32::MAX));
            }
        }
        lists
    }

    fn borrowed(&self) -> BlockLists<'_> {
        let full = self.full.as_ref().map(|(counts, indices)| (&counts[..], &indices[..]));
        BlockLists { counts: &self.counts, indices: &self.indices, bits: &self.bits, full }
    }

    fn modifiers(&self) -> Modifiers<'_> {
        Modifiers { blocks: Some(self.borrowed()), ..Modifiers::default() }
    }

    fn add_to<'a>(&'a self, mut args: Args<'a>, problem: &ForwardProblem) -> Args<'a> {
        let operands = problem.operands();
        let shape = |slot| operands.find(slot).unwrap().shape().to_vec();
        let of_counts: [usize; 3] = shape(Slot::MaskBlockCnt).try_into().unwrap();
        let of_indices: [usize; 4] = shape(Slot::MaskBlockIdx).try_into().unwrap();
        let of_bits: [usize; 4] = shape(Slot::MaskBits).try_into().unwrap();
        args = args.read(Slot::MaskBlockCnt, TensorRef::host(&self.counts, dense(of_counts)).unwrap());
        args = args.read(Slot::MaskBlockIdx, TensorRef::host(&self.indices, dense(of_indices)).unwrap());
        args = args.read(Slot::MaskBits, TensorRef::host(&self.bits, dense(of_bits)).unwrap());
        if let Some((counts, indices)) = &self.full {
            args = args.read(Slot::FullBlockCnt, TensorRef::host(counts, dense(of_counts)).unwrap());
            args = args.read(Slot::FullBlockIdx, TensorRef::host(indices, dense(of_indices)).unwrap());
        }
        args
    }
}

/// Inputs of a problem, and what a run made of them.
struct Run<T> {
    problem: BackwardProblem,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    o: Vec<T>,
    lse: Vec<f32>,
    d_o: Vec<T>,
    gradients: [Vec<T>; 3],
}

fn tensor<T: Element>(data: &[T], shape: [usize; 4]) -> Tensor {
    Tensor::from_strided(data, &dense(shape))
}

impl<T: Float> Run<T> {
    fn new(
        problem: &ForwardProblem,
        lists: Option<&Lists>,
        edit: impl Fn(&str, &mut Vec<T>),
    ) -> hopper_attention::Result<Self> {
        let problem = BackwardProblem::builder(problem).build()?;
        let forward = problem.forward().clone();
        let of = |name, shape: [usize; 4], seed| {
            let mut values = values(shape.iter().product(), seed);
            edit(name, &mut values);
            values
        };
        let nan = |shape: [usize; 4]| vec![T::from_f32(f32::NAN); shape.iter().product()];
        let shapes = [forward.q_shape(), forward.k_shape(), forward.v_shape()];
        let mut run = Self {
            q: of("q", shapes[0], 1),
            k: of("k", shapes[1], 2),
            v: of("v", shapes[2], 3),
            o: nan(forward.o_shape()),
            lse: vec![f32::NAN; forward.lse_shape().iter().product()],
            d_o: of("d_o", forward.o_shape(), 4),
            gradients: shapes.map(nan),
            problem,
        };
        let mut workspace = Workspace::alloc(&Stream::Cpu, 0).unwrap();
        let read = |data, shape| TensorRef::host(data, dense(shape)).unwrap();
        let with_lists = |args| lists.map_or(Args::new(), |lists| lists.add_to(args, &forward));
        let args =
            with_lists(Args::new()).read(Slot::Q, read(&run.q, shapes[0])).read(Slot::K, read(&run.k, shapes[1]));
        let args = args.read(Slot::V, read(&run.v, shapes[2]));
        let args = args.write(Slot::O, TensorMut::host(&mut run.o, dense(forward.o_shape())).unwrap());
        let args = args.write(Slot::Lse, TensorMut::host(&mut run.lse, dense(forward.lse_shape())).unwrap());
        forward.plan(&Device::cpu())?.run(&Stream::Cpu, &mut workspace, args)?;

        let args =
            with_lists(Args::new()).read(Slot::Q, read(&run.q, shapes[0])).read(Slot::K, read(&run.k, shapes[1]));
        let args = args.read(Slot::V, read(&run.v, shapes[2])).read(Slot::O, read(&run.o, forward.o_shape()));
        let args = args.read(Slot::Lse, TensorRef::host(&run.lse, dense(forward.lse_shape())).unwrap());
        let mut args = args.read(Slot::DO, read(&run.d_o, forward.o_shape()));
        for ((slot, data), shape) in [Slot::DQ, Slot::DK, Slot::DV].into_iter().zip(&mut run.gradients).zip(shapes) {
            args = args.write(slot, TensorMut::host(data, dense(shape)).unwrap());
        }
        run.problem.plan(&Device::cpu())?.run(&Stream::Cpu, &mut workspace, args)?;
        Ok(run)
    }

    fn inputs(&self) -> [Tensor; 3] {
        let forward = self.problem.forward();
        [(&self.q, forward.q_shape()), (&self.k, forward.k_shape()), (&self.v, forward.v_shape())]
            .map(|(data, shape)| tensor(data, shape))
    }

    fn check(&self, modifiers: Modifiers<'_>) {
        let [q, k, v] = &self.inputs();
        let (problem, forward) = (&self.problem, self.problem.forward());
        let expected = Expected::with(forward, &Lengths::default(), [q, k, v], modifiers, 1.0, None).unwrap();
        let report = expected.check(&tensor(&self.o, forward.o_shape()), Some(&widened(&self.lse))).unwrap();
        assert!(report.passed(), "{forward}: {report}");
        let d_o = &tensor(&self.d_o, forward.o_shape());
        let inputs = [q, k, v, d_o];
        let expected = BackwardExpected::with(problem, &Lengths::default(), inputs, None, modifiers, None).unwrap();
        let shapes = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()];
        let [d_q, d_k, d_v] = &[0, 1, 2].map(|i| tensor(&self.gradients[i], shapes[i]));
        let report = expected.check(d_q, d_k, d_v).unwrap();
        assert!(report.passed(), "{problem}: {report}");
    }
}

/// A number from 0 to 99 for each place, without a generator.
fn percent(place: [usize; 4]) -> usize {
    let mixed = place.iter().fold(7u32, |mixed, &at| (mixed ^ at as u32).wrapping_mul(2_654_435_761).rotate_left(11));
    mixed as usize % 100
}

fn problem(dtype: DType, dims: Dims, mask: Mask, lists: &Lists) -> ForwardProblem {
    ForwardProblem::builder(dtype, dims).mask(mask).lse(true).block_mask(Some(lists.mask)).build().unwrap()
}

const DIMS: Dims = Dims::new(2, 300, 4, 16).with_seqlen_kv(450).with_heads_kv(2).with_head_dim_vo(8);

#[test]
fn both_passes_keep_the_tolerance_at_every_density() {
    for (i, density) in [0, 10, 50, 90, 100].into_iter().enumerate() {
        // Blocks of a density, some of them partial.
        let keep = |[b, h, q, k]: [usize; 4]| {
            let of_block = percent([b, h + 100, q / MASK_BLOCK, k / MASK_BLOCK]);
            of_block < density && (!of_block.is_multiple_of(3) || percent([b, h, q, k]) < 60)
        };
        let lists = Lists::of(DIMS, i % 2 == 0, i != 1, i != 3, keep);
        let mask = [Mask::Full, Mask::causal(), Mask::window(Some(100), Some(30))][i % 3];
        Run::<f32>::new(&problem(DType::F32, DIMS, mask, &lists), Some(&lists), |_, _| {})
            .unwrap()
            .check(lists.modifiers());
        Run::<bf16>::new(&problem(DType::BF16, DIMS, mask, &lists), Some(&lists), |_, _| {})
            .unwrap()
            .check(lists.modifiers());
    }
    // Head dims whose tasks are smaller than a block.
    let wide = Dims::new(1, 130, 1, 600).with_seqlen_kv(140);
    let lists = Lists::of(wide, false, false, true, |place| percent(place) < 50);
    Run::<f16>::new(&problem(DType::F16, wide, Mask::Full, &lists), Some(&lists), |_, _| {})
        .unwrap()
        .check(lists.modifiers());
}

/// Documents as lists, and a causal mask as lists, give what the masks give.
#[test]
fn lists_of_a_mask_give_its_results() {
    let dims = Dims::new(1, 400, 2, 16);
    let causal = Lists::of(dims, false, false, true, |[_, _, q, k]| k <= q);
    let by_lists = Run::<f32>::new(&problem(DType::F32, dims, Mask::Full, &causal), Some(&causal), |_, _| {}).unwrap();
    let plain = ForwardProblem::builder(DType::F32, dims).mask(Mask::causal()).lse(true).build().unwrap();
    by_lists.check(causal.modifiers());
    // The oracle of lists and that of the mask agree exactly.
    let [q, k, v] = &by_lists.inputs();
    let lists_problem = problem(DType::F32, dims, Mask::Full, &causal);
    let of_lists = reference::forward_with(&lists_problem, &Lengths::default(), [q, k, v], causal.modifiers()).unwrap();
    let of_mask = reference::forward(&plain, q, k, v).unwrap();
    assert_eq!((of_lists.o.data(), &of_lists.lse), (of_mask.o.data(), &of_mask.lse));
    let by_mask = Run::<f32>::new(&plain, None, |_, _| {}).unwrap();
    assert!(by_lists.lse.iter().zip(&by_mask.lse).all(|(a, b)| (a - b).abs() < 1e-5));

    let document = |token: usize| token / 150;
    let documents = Lists::of(dims, false, false, true, |[_, _, q, k]| document(q) == document(k));
    let run = Run::<bf16>::new(&problem(DType::BF16, dims, Mask::causal(), &documents), Some(&documents), |_, _| {});
    run.unwrap().check(documents.modifiers());
}

#[test]
fn nothing_leaks_from_what_the_lists_hide() {
    let dims = Dims::new(1, 260, 2, 16).with_seqlen_kv(300).with_heads_kv(1);
    // Keys from 200 on are hidden, and queries from 140 to 150 have none at all.
    let keep = |[_, _, q, k]: [usize; 4]| k < 200 && !(140..150).contains(&q);
    let lists = Lists::of(dims, false, false, true, keep);
    let bad = |name: &str, values: &mut Vec<f32>| match name {
        "k" | "v" => values[200 * 16..].fill(f32::NAN),
        "q" | "d_o" => values[140 * 32..150 * 32].fill(f32::INFINITY),
        _ => {}
    };
    let run = Run::<f32>::new(&problem(DType::F32, dims, Mask::Full, &lists), Some(&lists), bad).unwrap();
    let finite = |values: &[f32]| values.iter().all(|x| x.is_finite());
    assert!(finite(&run.o) && run.gradients.iter().all(|values| finite(values)));
    let row = |query: usize| (&run.o[query * 32..(query + 1) * 32], run.lse[query]);
    assert_eq!(row(145), (&[0.0; 32][..], f32::NEG_INFINITY));
    assert!(run.gradients[1][200 * 16..].iter().chain(&run.gradients[2][200 * 16..]).all(|&x| x == 0.0));
    run.check(lists.modifiers());
}

#[test]
fn wrong_lists_are_refused_before_anything_is_written() {
    let dims = Dims::new(1, 130, 1, 8).with_seqlen_kv(300);
    let lists = Lists::of(dims, false, false, true, |[_, _, q, k]| k <= q || k >= 256);
    let refused = |change: &dyn Fn(&mut Lists)| {
        let mut lists = lists.clone();
        change(&mut lists);
        Run::<f32>::new(&problem(DType::F32, dims, Mask::Full, &lists), Some(&lists), |_, _| {})
            .err()
            .unwrap()
            .to_string()
    };
    assert_eq!(refused(&|lists| lists.counts[1] = 9), "mask_block_cnt: 9 at [0, 0, 1]; allowed: 0 to 1");
    assert!(refused(&|lists| lists.indices[0] = 3).starts_with("mask_block_idx: 3 at [0, 0, 0], 0; allowed: 0 to 2"));
    assert!(refused(&|lists| lists.full.as_mut().unwrap().0[0] = -1).starts_with("full_block_cnt: -1 at [0, 0, 0]"));
    let missing = Run::<f32>::new(&problem(DType::F32, dims, Mask::Full, &lists), None, |_, _| {}).err().unwrap();
    assert!(missing.to_string().starts_with("mask_block_cnt: missing"), "{missing}");
    let plain = ForwardProblem::builder(DType::F32, dims).build().unwrap();
    let [q, k, v] = [plain.q_shape(), plain.k_shape(), plain.v_shape()].map(Tensor::zeros);
    let given = reference::forward_with(&plain, &Lengths::default(), [&q, &k, &v], lists.modifiers());
    assert!(given.unwrap_err().to_string().starts_with("mask_block_idx: given"));
    let mask = problem(DType::F32, dims, Mask::Full, &lists);
    let missing = reference::forward(&mask, &q, &k, &v).unwrap_err().to_string();
    assert_eq!(missing, "block lists: missing; allowed: the lists, which the problem reads");
}
