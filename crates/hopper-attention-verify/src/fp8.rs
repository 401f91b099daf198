//! Problems with e4m3 operands: quantised inputs, results of the CPU backend, and ways in which a kernel may get the
//! factors wrong.

use hopper_attention::reference::{Expected, Modifiers, Tensor};
use hopper_attention::{
    Args, DType, Device, E4M3, Element, ForwardProblem, KernelInfo, Layout, OutputOf, Quantizer, SCALE_BLOCK, Scaling,
    SequenceRows, Slot, Stream, Workspace, bf16, f16,
};

use crate::blocks::BlocksImage;
use crate::case::Case;
use crate::data::Input;
use crate::packing::{Packing, read, read_numbers, write, write_numbers};
use crate::sinks::{Sinks, SinksImage};

/// Operands without gaps, and their factors.
#[derive(Clone, Debug)]
pub struct Operands {
    problem: ForwardProblem,
    /// Of q, k and v.
    stored: [Vec<E4M3>; 3],
    /// Likewise, `[batch, heads, blocks]`.
    descale: [Vec<f32>; 3],
    packing: Packing,
    sinks: Option<SinksImage>,
    blocks: Option<BlocksImage>,
}

impl Operands {
    /// Quantised from these values, rounded to bf16 before, Q and K rotated by the signs of a seed where there is one.
    pub fn quantised(problem: &ForwardProblem, inputs: [&Tensor; 3], hadamard: Option<u64>) -> Self {
        Self::quantised_of(problem, &Packing::default(), inputs, hadamard)
    }

    /// The same of packed sequences and used lengths. Rows of no sequence are NaN.
    pub fn quantised_of(
        problem: &ForwardProblem,
        packing: &Packing,
        inputs: [&Tensor; 3],
        hadamard: Option<u64>,
    ) -> Self {
        let values =
            inputs.map(|x| x.data().iter().map(|&x| <bf16 as Element>::from_f32(x as f32)).collect::<Vec<_>>());
        let shapes = shapes(problem);
        let mut stored = inputs.map(|x| vec![E4M3::from_bits(0x7f); x.data().len()]);
        let mut descale = shapes.map(|(_, factors)| vec![f32::NAN; factors.iter().product()]);
        let options = Quantizer::builder(problem, DType::BF16);
        let options = match hadamard {
            Some(seed) => options.hadamard(seed),
            None => options,
        };
        let plan = options.build().expect("e4m3 operands").plan(&Device::cpu()).expect("a plan for the CPU");
        let mut args = packing.host_args(Args::new());
        let slots = [
            [Slot::QValues, Slot::QStored, Slot::QDescale],
            [Slot::KValues, Slot::KStored, Slot::KDescale],
            [Slot::VValues, Slot::VStored, Slot::VDescale],
        ];
        let tensors = values.iter().zip(&mut stored).zip(&mut descale).zip(shapes).zip(slots).zip(packed(problem));
        for (((((values, stored), descale), (shape, factors)), [of_values, of_stored, of_descale]), packed) in tensors {
            args = read(args, of_values, values, dense(shape), packed.rows);
            args = write(args, of_stored, stored, dense(shape), packed.rows);
            args = write_numbers(args, of_descale, descale, dense(factors), packed.blocks);
        }
        plan.run(&Stream::Cpu, &mut no_workspace(), args).expect("operands");
        // Operands of a problem with sinks have some.
        let sinks = problem.sinks().and_then(|dtype| {
            let seed = u64::from(dtype != DType::F32);
            Sinks::Normal.image(problem.dims().heads_q, seed)
        });
        Self { problem: problem.clone(), stored, descale, packing: packing.clone(), sinks, blocks: None }
    }

    /// The same with the sinks of a case. Their type must be the problem's.
    pub fn with_sinks(mut self, case: &Case) -> Self {
        self.sinks = case.sinks.image(case.dims.heads_q, case.seed);
        self
    }

    /// The same with these lists of blocks. Their form must be the problem's.
    pub fn with_blocks(mut self, blocks: Option<BlocksImage>) -> Self {
        self.blocks = blocks;
        self
    }

    /// Their lists of blocks, where the problem has any.
    pub fn blocks(&self) -> Option<&BlocksImage> {
        self.blocks.as_ref()
    }

    /// Their sinks, where the problem has any.
    pub fn sinks(&self) -> Option<&SinksImage> {
        self.sinks.as_ref()
    }

    /// The same with another factor at `[batch, head, block]` of one operand.
    pub fn with_factor(mut self, input: Input, at: [usize; 3], factor: f32) -> Self {
        let (_, factors) = shapes(&self.problem)[input as usize];
        self.descale[input as usize][dense(factors).offset(at).expect("within the factors")] = factor;
        self
    }

    /// The same with all factors of one operand multiplied by this.
    pub fn with_factors_times(mut self, input: Input, by: f32) -> Self {
        self.descale[input as usize].iter_mut().for_each(|factor| *factor *= by);
        self
    }

    /// The real values that the operands stand for.
    pub fn real(&self) -> [Tensor; 3] {
        self.real_by(|_, index| index)
    }

    /// Real values with other factors than their own: `place` says which, by `[batch, head, block]`.
    pub fn real_by(&self, place: impl Fn(Input, [usize; 3]) -> [usize; 3]) -> [Tensor; 3] {
        let shapes = shapes(&self.problem);
        [(0, Input::Q), (1, Input::K), (2, Input::V)].map(|(i, input)| {
            let (shape, factors) = shapes[i];
            let group = shape[2] / self.problem.dims().heads_kv;
            let owners = self.owners(input, shape);
            Tensor::from_strided(&self.stored[i], &dense(shape)).descaled(|row| {
                let owner = owners.get(row[0] * shape[1] + row[1]).copied().flatten();
                let Some(own) = self.place_in(owner, input, row, group) else { return 1.0 };
                let mut index = place(input, own);
                // Round about, so that a neighbour is always there.
                index.iter_mut().zip(factors).for_each(|(i, size)| *i %= size);
                self.descale[i][dense(factors).offset(index).expect("within the factors")]
            })
        })
    }

    /// Where the factor of a row `[batch, token, head]` is, with `group` heads to a key head. `None` for a row of no sequence.
    pub fn place(&self, input: Input, [batch, token, head]: [usize; 3], group: usize) -> Option<[usize; 3]> {
        let side = usize::from(input != Input::Q);
        let sequences = self.packing.lengths();
        let own = sequences.sequences(&self.problem).map(|rows| rows[side]);
        let own = own.filter(|rows| rows.batch == batch && rows.range().contains(&token)).last();
        self.place_in(own, input, [batch, token, head], group)
    }

    /// The sequence of each row `batch * seqlen + token` of an operand. Empty where all sequences are alike. (A search
    /// for each row takes long where there are many sequences.)
    fn owners(&self, input: Input, [batch, seqlen, ..]: [usize; 4]) -> Vec<Option<SequenceRows>> {
        if self.packing.is_none() {
            return Vec::new();
        }
        let mut owners = vec![None; batch * seqlen];
        for rows in self.packing.lengths().sequences(&self.problem) {
            let rows = rows[usize::from(input != Input::Q)];
            owners[rows.batch * seqlen..][rows.range()].fill(Some(rows));
        }
        owners
    }

    /// As [`place`](Self::place), of a row whose sequence is known.
    fn place_in(
        &self,
        own: Option<SequenceRows>,
        input: Input,
        [batch, token, head]: [usize; 3],
        group: usize,
    ) -> Option<[usize; 3]> {
        let scaling = self.problem.scaling().expect("e4m3 operands");
        if self.packing.is_none() {
            return Some(match scaling {
                Scaling::PerTensor => [0, 0, 0],
                Scaling::PerHead => [batch, head / group, 0],
                _ => [batch, head, token / SCALE_BLOCK],
            });
        }
        let (own, side) = (own?, usize::from(input != Input::Q));
        let block = (own.begin + 127 * own.sequence) / 128;
        Some(match scaling {
            Scaling::PerTensor => [0, 0, 0],
            Scaling::PerHead => [own.sequence, head / group, 0],
            _ if packed(&self.problem)[side].rows => [0, head, block + (token - own.begin) / SCALE_BLOCK],
            _ => [batch, head, token / SCALE_BLOCK],
        })
    }

    /// What the CPU makes of it: O, and the log-sum-exp.
    pub fn run(&self) -> Output {
        match self.problem.output_dtype() {
            DType::F16 => self.run_as::<f16>(),
            _ => self.run_as::<bf16>(),
        }
    }

    fn run_as<O: OutputOf<E4M3>>(&self) -> Output {
        let problem = self.problem.to_builder().lse(true).build().expect("the same numbers");
        let mut o = vec![O::from_f32(f32::NAN); problem.o_shape().iter().product()];
        let mut lse = vec![f32::NAN; problem.lse_shape().iter().product()];
        let mut args = self.packing.host_args(Args::new());
        let slots = [(Slot::Q, Slot::DescaleQ), (Slot::K, Slot::DescaleK), (Slot::V, Slot::DescaleV)];
        for (i, ((slot, of_factors), packed)) in slots.into_iter().zip(packed(&problem)).enumerate() {
            let (shape, factors) = shapes(&problem)[i];
            args = read(args, slot, &self.stored[i], dense(shape), packed.rows);
            args = read_numbers(args, of_factors, &self.descale[i], dense(factors), packed.blocks);
        }
        if let Some(sinks) = &self.sinks {
            args = sinks.add_to(args);
        }
        if let Some(blocks) = &self.blocks {
            args = blocks.add_to(args);
        }
        let packed = problem.is_packed_q();
        args = write(args, Slot::O, &mut o, dense(problem.o_shape()), packed);
        args = write_numbers(args, Slot::Lse, &mut lse, dense(problem.lse_shape()), packed);
        let plan = problem.plan(&Device::cpu()).expect("a plan for the CPU");
        plan.run(&Stream::Cpu, &mut no_workspace(), args).expect("a result");
        (Tensor::from_strided(&o, &dense(problem.o_shape())), lse.into_iter().map(f64::from).collect())
    }

    /// What must come out.
    pub fn expected(&self) -> Expected {
        let [q, k, v] = self.real();
        let sinks = self.sinks.as_ref().map(SinksImage::values);
        let blocks = self.blocks.as_ref().map(BlocksImage::borrowed);
        let modifiers = Modifiers { sinks: sinks.as_deref(), blocks, ..Modifiers::default() };
        let lengths = self.packing.lengths();
        Expected::with(&self.problem, &lengths, [&q, &k, &v], modifiers, 1.0, None).expect("matching shapes")
    }

    /// What q, k and v are stored as.
    pub fn stored(&self) -> &[Vec<E4M3>; 3] {
        &self.stored
    }

    /// Their factors.
    pub fn descale(&self) -> &[Vec<f32>; 3] {
        &self.descale
    }

    /// Puts another element of Q (0), K (1) or V (2) in its place.
    pub fn put(&mut self, which: usize, index: [usize; 4], element: E4M3) {
        let at = dense(shapes(&self.problem)[which].0).offset(index).expect("within the tensor");
        self.stored[which][at] = element;
    }

    /// The same with an element in all rows of the other sequences, and with a factor for all their blocks, where each sequence has
    /// factors of its own. Rows and factors of no sequence stay as they are.
    pub fn beside(&self, own: usize, element: E4M3, factor: f32) -> Self {
        let mut spoiled = self.clone();
        for (other, sides) in self.packing.lengths().sequences(&self.problem).enumerate() {
            if other == own {
                continue;
            }
            for (i, input) in [Input::Q, Input::K, Input::V].into_iter().enumerate() {
                let (shape, factors) = shapes(&self.problem)[i];
                let group = shape[2] / self.problem.dims().heads_kv;
                let rows = &sides[usize::from(input != Input::Q)];
                for (token, head) in rows.range().flat_map(|token| (0..shape[2]).map(move |head| (token, head))) {
                    let place = self.place(input, [rows.batch, token, head], group).expect("a row of a sequence");
                    if self.problem.scaling() != Some(Scaling::PerTensor) {
                        spoiled.descale[i][dense(factors).offset(place).expect("within the factors")] = factor;
                    }
                    (0..shape[3]).for_each(|column| spoiled.put(i, [rows.batch, token, head, column], element));
                }
            }
        }
        spoiled
    }

    /// A sequence of packed operands as a problem of its own, with the same elements, factors and sinks.
    pub fn alone(&self, own: usize) -> Self {
        let sides = self.packing.lengths().sequences(&self.problem).nth(own).expect("a sequence");
        let dims = self.problem.dims().with_batch(1).with_seqlen_q(sides[0].len).with_seqlen_kv(sides[1].len);
        let options = ForwardProblem::builder(DType::E4M3, dims).mask(self.problem.mask());
        let options = options.softmax_scale(self.problem.softmax_scale()).softcap(self.problem.softcap()).lse(true);
        let options = options.output(self.problem.output_dtype()).half_scores(self.problem.allows_half_scores());
        let options = options.scaling(self.problem.scaling().expect("e4m3 operands"));
        let options = match self.problem.sinks() {
            Some(dtype) => options.sinks(dtype),
            None => options,
        };
        let problem = options.build().expect("a part of a legal problem");
        let inputs = [Input::Q, Input::K, Input::V];
        let tensor = |i: usize, shape: [usize; 4]| {
            let (rows, from) = (&sides[usize::from(inputs[i] != Input::Q)], shapes(&self.problem)[i].0);
            let at = |row: usize| {
                let first = dense(from).offset([rows.batch, rows.begin + row, 0, 0]).expect("within the tensor");
                self.stored[i][first..][..shape[2] * shape[3]].iter().copied()
            };
            (0..shape[1]).flat_map(at).collect()
        };
        let factors = |i: usize, [_, heads, blocks]: [usize; 3]| {
            let (rows, from) = (&sides[usize::from(inputs[i] != Input::Q)], shapes(&self.problem)[i].1);
            let first = match self.problem.scaling() {
                Some(Scaling::PerTensor) => [0; 3],
                Some(Scaling::PerHead) => [rows.sequence, 0, 0],
                _ => [rows.batch, 0, rows.first_block],
            };
            let at = |head: usize, block: usize| [first[0], first[1] + head, first[2] + block];
            let places = (0..heads).flat_map(|head| (0..blocks).map(move |block| at(head, block)));
            places.map(|place| self.descale[i][dense(from).offset(place).expect("within the factors")]).collect()
        };
        let [q, k, v] = shapes(&problem);
        Self {
            stored: [tensor(0, q.0), tensor(1, k.0), tensor(2, v.0)],
            descale: [factors(0, q.1), factors(1, k.1), factors(2, v.1)],
            packing: Packing::default(),
            sinks: self.sinks.clone(),
            blocks: None,
            problem,
        }
    }

    /// The problem.
    pub fn problem(&self) -> &ForwardProblem {
        &self.problem
    }

    /// Their offsets and used lengths.
    pub fn packing(&self) -> &Packing {
        &self.packing
    }

    /// The operands of a case, of other sizes from block to block and head to head, so that factors differ.
    pub fn of_case(case: &Case, problem: &ForwardProblem, hadamard: Option<u64>) -> Self {
        let belonging = case.packing.belonging(problem);
        let input = |input, shape: [usize; 4]| {
            let tensor = case.values.tensor(input, shape, case.seed);
            let belongs = |batch: usize, token: usize| {
                let rows = belonging.as_ref().map(|rows| &rows[usize::from(input != Input::Q)]);
                rows.is_none_or(|rows| rows.belongs(batch * shape[1] + token))
            };
            let power = |token: usize, head: usize| (token / 128 * 3 + head * 2 + input as usize) % 5;
            // What belongs to no sequence is NaN, and must reach nobody.
            let uneven = |[b, s, h, d]: [usize; 4]| match belongs(b, s) {
                true => tensor.row(b, s, h)[d] * [1.0, 0.4, 2.0, 0.7, 1.5][power(s, h)],
                false => f64::NAN,
            };
            Tensor::from_fn(shape, uneven)
        };
        let (q, k) = (input(Input::Q, problem.q_shape()), input(Input::K, problem.k_shape()));
        let v = input(Input::V, problem.v_shape());
        let operands = Self::quantised_of(problem, &case.packing, [&q, &k, &v], hadamard);
        let operands = operands.with_blocks(case.block_lists());
        if case.sinks.is_none() { operands } else { operands.with_sinks(case) }
    }

    /// Those of a case, but for Q and K of zeros, which have the smallest factors.
    pub fn of_zeros(case: &Case, problem: &ForwardProblem) -> Self {
        let [q, k] = [problem.q_shape(), problem.k_shape()].map(Tensor::zeros);
        Self::quantised(problem, [&q, &k, &case.values.tensor(Input::V, problem.v_shape(), case.seed)], None)
    }
}

/// The problem that a row is for: with scores in f16 where its are.
pub fn for_row(problem: ForwardProblem, row: &KernelInfo) -> ForwardProblem {
    problem.to_builder().half_scores(row.scores() == DType::F16).build().expect("e4m3 operands")
}

/// Whether rows have scores in f16: both, where there are rows of both kinds.
pub fn half_scores_of(rows: &[KernelInfo]) -> Vec<bool> {
    let of_rows = |half: &bool| rows.iter().any(|row| (row.scores() == DType::F16) == *half);
    [false, true].into_iter().filter(of_rows).collect()
}

/// The shapes of q, k and v, and of their factors.
pub fn shapes(problem: &ForwardProblem) -> [([usize; 4], [usize; 3]); 3] {
    [
        (problem.q_shape(), problem.descale_q_shape()),
        (problem.k_shape(), problem.descale_k_shape()),
        (problem.v_shape(), problem.descale_v_shape()),
    ]
}

/// Of q, k or v: whether its rows are packed, and whether its factors are packed with them.
#[derive(Clone, Copy)]
pub(crate) struct Packed {
    pub(crate) rows: bool,
    pub(crate) blocks: bool,
}

pub(crate) fn packed(problem: &ForwardProblem) -> [Packed; 3] {
    let per_block = problem.scaling() == Some(Scaling::PerBlock);
    let of = |rows| Packed { rows, blocks: rows && per_block };
    [problem.is_packed_q(), problem.is_packed_kv(), problem.is_packed_kv()].map(of)
}

/// The layout without gaps.
///
/// # Panics
/// When the shape is too large for a layout.
pub fn dense<const R: usize>(shape: [usize; R]) -> Layout<R> {
    Layout::contiguous(shape).expect("a legal layout")
}

fn no_workspace() -> Workspace<'static> {
    Workspace::alloc(&Stream::Cpu, 0).expect("nothing to allocate")
}

/// An output and its log-sum-exp.
pub type Output = (Tensor, Vec<f64>);
