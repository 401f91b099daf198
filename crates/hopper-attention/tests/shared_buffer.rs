//! Two threads run at the same time on one buffer, through the raw layer. The rows of their tensors alternate in memory, as
//! those of two heads do. So the gaps of each thread's tensors hold what the other thread reads and writes.
//!
//! A run may touch only elements that its layouts reach. What each test sees by itself are wrong results and stray writes.
//! `scripts/sanitize.sh` shows the rest: ThreadSanitizer reports an access to a gap, and Miri reports a slice that covers one.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Barrier;

use hopper_attention::raw::{Place, RawArgs, RawTensor};
use hopper_attention::{
    Access, BackwardProblem, DType, Device, Dims, E4M3, Element, ForwardProblem, Layout, Mask, Operand, Presence,
    Quantizer, Result, Scaling, Slot, bf16, f16,
};

/// No stream: the CPU looks at none.
const NO_STREAM: *mut c_void = null_mut();
/// All bits set: NaN in every type.
const POISON: u32 = u32::MAX;
/// How often both threads run at the same time.
const ROUNDS: usize = if cfg!(miri) { 1 } else { 20 };

/// Small lengths for Miri, which needs seconds for a task. The others have several tasks and blocks of factors.
fn dims() -> Dims {
    let (batch, seqlen_q, seqlen_kv) = if cfg!(miri) { (1, 2, 3) } else { (2, 150, 140) };
    Dims::new(batch, seqlen_q, 2, 6).with_seqlen_kv(seqlen_kv).with_heads_kv(1).with_head_dim_vo(3)
}

/// An operand of a run, as rows along its innermost dimension.
struct Rows {
    operand: Operand,
    /// The words of each row. The last one of a row may be used in part.
    rows: Vec<Vec<u32>>,
}

impl Rows {
    /// Numbers for an operand that is read, and poison for one that is written.
    fn new(operand: &Operand, seed: u32) -> Self {
        let (&columns, outer) = operand.shape().split_last().unwrap();
        let bytes = operand.dtype().bytes();
        let words = (columns * bytes).div_ceil(4);
        let mut state = seed.wrapping_add(operand.slot() as u32).wrapping_mul(0x9e37_79b9);
        let mut number = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32
        };
        let row = |_| {
            let mut row = vec![POISON; words];
            if operand.access() == Access::Read {
                // Tensors with fewer than four dimensions are factors, which are above 0, or statistics of rows.
                let four = outer.len() == 3;
                for column in 0..columns {
                    if operand.dtype() == DType::I32 {
                        // Offsets: sequences of 60 rows, and of 1 for Miri.
                        row[column] = column as u32 * if cfg!(miri) { 1 } else { 60 };
                        continue;
                    }
                    let value = if four { 2.0 * number() - 1.0 } else { 0.5 + number() };
                    put(&mut row, column * bytes, &element(operand.dtype(), value));
                }
            }
            row
        };
        Self { operand: *operand, rows: (0..outer.iter().product()).map(row).collect() }
    }

    fn words(&self) -> usize {
        self.rows.first().map_or(0, Vec::len)
    }

    /// The tensor whose row `r` is at `address + step * r`, in bytes.
    fn tensor(&self, address: u64, step: usize) -> RawTensor {
        fn place<const R: usize>(operand: &Operand, address: u64, step: usize) -> RawTensor {
            let shape: [usize; R] = operand.shape().try_into().unwrap();
            let mut stride = [1; R];
            let mut rows = 1;
            for axis in (0..R - 1).rev() {
                stride[axis] = (rows * step / operand.dtype().bytes()) as i64;
                rows *= shape[axis];
            }
            let layout = Layout::with_strides(shape, stride).unwrap();
            RawTensor::new(address, operand.dtype(), Place::Cpu, layout)
        }
        let place = match self.operand.shape().len() {
            1 => place::<1>,
            2 => place::<2>,
            3 => place::<3>,
            _ => place::<4>,
        };
        place(&self.operand, address, step)
    }
}

/// The bytes of an element.
fn element(dtype: DType, value: f32) -> Vec<u8> {
    match dtype {
        DType::F16 => f16::from_f32(value).to_bits().to_ne_bytes().into(),
        DType::BF16 => bf16::from_f32(value).to_bits().to_ne_bytes().into(),
        DType::E4M3 => vec![<E4M3 as Element>::from_f32(value).to_bits()],
        _ => value.to_ne_bytes().into(),
    }
}

/// Writes bytes that lie within a word.
fn put(words: &mut [u32], at: usize, bytes: &[u8]) {
    let mut word = words[at / 4].to_ne_bytes();
    word[at % 4..][..bytes.len()].copy_from_slice(bytes);
    words[at / 4] = u32::from_ne_bytes(word);
}

/// Memory in which the rows of one or two operands alternate.
struct Shared {
    memory: Vec<u32>,
    /// The words of a row of each operand, one after the other.
    widths: Vec<usize>,
}

impl Shared {
    fn new(lanes: &[&Rows]) -> Self {
        let widths: Vec<usize> = lanes.iter().map(|lane| lane.words()).collect();
        let rows = lanes.iter().map(|lane| lane.rows.len()).max().unwrap();
        let mut shared = Self { memory: vec![POISON; rows * widths.iter().sum::<usize>()], widths };
        for (lane, operand) in lanes.iter().enumerate() {
            for (row, words) in operand.rows.iter().enumerate() {
                let start = shared.start(lane, row);
                shared.memory[start..][..words.len()].copy_from_slice(words);
            }
        }
        shared
    }

    /// The first word of a row.
    fn start(&self, lane: usize, row: usize) -> usize {
        row * self.widths.iter().sum::<usize>() + self.widths[..lane].iter().sum::<usize>()
    }

    /// The tensors in this memory. Nothing else may use the memory as long as a run uses them.
    fn tensors<const N: usize>(&mut self, lanes: [&Rows; N]) -> [RawTensor; N] {
        let address = self.memory.as_mut_ptr() as u64;
        let step = 4 * self.widths.iter().sum::<usize>();
        std::array::from_fn(|lane| lanes[lane].tensor(address + 4 * self.start(lane, 0) as u64, step))
    }
}

/// A plan's operands, and how it runs.
struct Pass<'p> {
    operands: Vec<Operand>,
    run: &'p (dyn Fn(&RawArgs) -> Result<()> + Sync),
}

impl Pass<'_> {
    fn rows(&self, seed: u32) -> Vec<Rows> {
        self.operands.iter().map(|operand| Rows::new(operand, seed)).collect()
    }

    /// The memory of each operand after a run on its own, without gaps between rows.
    fn alone(&self, rows: &[Rows]) -> Vec<Vec<u32>> {
        let mut memory: Vec<Shared> = rows.iter().map(|rows| Shared::new(&[rows])).collect();
        let mut args = RawArgs::new();
        for (rows, memory) in rows.iter().zip(&mut memory) {
            let [tensor] = memory.tensors([rows]);
            args = args.with(rows.operand.slot(), tensor);
        }
        (self.run)(&args).unwrap();
        for (rows, shared) in rows.iter().zip(&memory) {
            assert!(shared.memory.iter().all(|&word| word != POISON), "all of {} is written", rows.operand.slot());
        }
        memory.into_iter().map(|shared| shared.memory).collect()
    }

    /// Runs on two threads at the same time. Operand `i` of one thread shares memory with operand `partner(i)` of the other.
    fn at_the_same_time(&self, partner: impl Fn(usize) -> usize) {
        let threads = [self.rows(1), self.rows(2)];
        let expected = threads.each_ref().map(|rows| self.alone(rows));
        let pairs = || (0..self.operands.len()).map(|i| [i, partner(i)]);
        for _ in 0..ROUNDS {
            let mut args = [RawArgs::new(), RawArgs::new()];
            let lanes = |[i, j]: [usize; 2]| [&threads[0][i], &threads[1][j]];
            let mut memory: Vec<Shared> = pairs().map(|pair| Shared::new(&lanes(pair))).collect();
            for (pair, shared) in pairs().zip(&mut memory) {
                let tensors = shared.tensors(lanes(pair));
                for ((args, rows), tensor) in args.iter_mut().zip(lanes(pair)).zip(tensors) {
                    *args = args.clone().with(rows.operand.slot(), tensor);
                }
            }
            let start = Barrier::new(2);
            std::thread::scope(|scope| {
                for args in &args {
                    scope.spawn(|| {
                        start.wait();
                        (self.run)(args).unwrap();
                    });
                }
            });
            for (pair, shared) in pairs().zip(&memory) {
                // A thread that has fewer rows leaves the others as they were.
                let mut want = vec![POISON; shared.memory.len()];
                for (lane, (rows, expected)) in lanes(pair).into_iter().zip(&expected).enumerate() {
                    for (row, words) in expected[pair[lane]].chunks_exact(rows.words()).enumerate() {
                        want[shared.start(lane, row)..][..words.len()].copy_from_slice(words);
                    }
                }
                let [first, second] = lanes(pair).map(|rows| rows.operand.slot());
                assert!(shared.memory == want, "the memory of {first} and {second}");
            }
        }
    }

    fn check(&self) {
        // Operands share memory with those of their own name, as the heads of one tensor do.
        self.at_the_same_time(|i| i);
        // Inputs share memory with outputs: one thread reads between rows that the other one writes.
        self.at_the_same_time(|i| self.operands.len() - 1 - i);
    }
}

fn required(operands: &[Operand]) -> Vec<Operand> {
    operands.iter().filter(|operand| operand.presence() == Presence::Required).copied().collect()
}

fn forward(problem: &ForwardProblem) {
    let plan = problem.plan(&Device::cpu()).unwrap();
    // SAFETY: the memory of the arguments lives, and nothing else uses their elements during the run.
    let run = |args: &RawArgs| unsafe { plan.run_raw(args, NO_STREAM) };
    Pass { operands: required(plan.operands()), run: &run }.check();
}

#[test]
fn forward_passes() {
    for dtype in [DType::F32, DType::BF16] {
        forward(&ForwardProblem::builder(dtype, dims()).mask(Mask::causal()).lse(true).build().unwrap());
    }
}

/// Each thread has offsets of its own. Rows of no sequence are filled, so that every element is written.
#[test]
fn packed_sequences() {
    let options = ForwardProblem::builder(DType::BF16, dims()).packed(true).fill_gaps(true).lse(true);
    forward(&options.clone().mask(Mask::causal()).build().unwrap());
    let problem = BackwardProblem::builder(&options.build().unwrap()).d_lse(true).build().unwrap();
    let plan = problem.plan(&Device::cpu()).unwrap();
    // SAFETY: the memory of the arguments lives, and nothing else uses their elements during the run.
    let run = |args: &RawArgs| unsafe { plan.run_raw(args, NO_STREAM) };
    Pass { operands: required(plan.operands()), run: &run }.check();
}

#[test]
fn forward_passes_of_e4m3() {
    for (scaling, output) in [(Scaling::PerHead, DType::BF16), (Scaling::PerBlock, DType::E4M3)] {
        let options = ForwardProblem::builder(DType::E4M3, dims()).scaling(scaling).output(output).lse(true).amax(true);
        forward(&options.build().unwrap());
    }
}

#[test]
fn gradients() {
    for dtype in [DType::F32, DType::F16] {
        let options = ForwardProblem::builder(dtype, dims()).mask(Mask::causal()).lse(true);
        let problem = BackwardProblem::builder(&options.build().unwrap()).d_lse(true).build().unwrap();
        let plan = problem.plan(&Device::cpu()).unwrap();
        // SAFETY: the memory of the arguments lives, and nothing else uses their elements during the run.
        let run = |args: &RawArgs| unsafe { plan.run_raw(args, NO_STREAM) };
        Pass { operands: required(plan.operands()), run: &run }.check();
    }
}

#[test]
fn quantisers() {
    for scaling in Scaling::ALL {
        let problem = ForwardProblem::builder(DType::E4M3, dims()).scaling(scaling).build().unwrap();
        let quantizer = Quantizer::builder(&problem, DType::BF16).hadamard(7).build().unwrap();
        let plan = quantizer.plan(&Device::cpu()).unwrap();
        // The factors of Q and K are written, those of V are given.
        let left_out = [Slot::QDescaleGiven, Slot::KDescaleGiven, Slot::VDescale];
        let operands = plan.operands().iter().filter(|operand| !left_out.contains(&operand.slot()));
        let operands = operands.filter(|operand| operand.presence() != Presence::Refused);
        // SAFETY: the memory of the arguments lives, and nothing else uses their elements during the run.
        let run = |args: &RawArgs| unsafe { plan.run_raw(args, NO_STREAM) };
        Pass { operands: operands.copied().collect(), run: &run }.check();
    }
}
