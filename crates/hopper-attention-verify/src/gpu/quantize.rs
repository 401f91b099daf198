//! Tensors to quantise in device memory, and what the CPU makes of the same: whole buffers, so that what lies between and
//! around the elements is compared too.

use std::sync::Arc;

use hopper_attention::cudarc::driver::{CudaSlice, CudaStream};
use hopper_attention::{
    Args, Device, E4M3, Float, Layout, QuantizePlan, Quantizer, Slot, Stream, TensorMut, Workspace,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;

use super::{Lists, given_read, given_read_numbers, given_write, given_write_numbers, read};
use crate::data::GUARD;
use crate::fp8::{packed, shapes};
use crate::layouts::Placement;
use crate::packing::{self, Packing, Rows};

/// What no run writes: a code of e4m3 in gaps and bands.
const POISON: E4M3 = E4M3::from_bits(0x5a);

/// Of q, k and v: the operands with the values, with what is stored, with the factors that are made, and with those that are given.
const SLOTS: [[Slot; 4]; 3] = [
    [Slot::QValues, Slot::QStored, Slot::QDescale, Slot::QDescaleGiven],
    [Slot::KValues, Slot::KStored, Slot::KDescale, Slot::KDescaleGiven],
    [Slot::VValues, Slot::VStored, Slot::VDescale, Slot::VDescaleGiven],
];

/// What the elements are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Like {
    /// Numbers of sizes that differ from row to row by some powers of ten.
    Uneven,
    /// The same, with a few that are not finite.
    NotFinite,
    /// The least that the type has.
    Tiny,
    /// So large that sums overflow.
    Huge,
    /// Zeros.
    Zero,
}

impl Like {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Uneven, Self::NotFinite, Self::Tiny, Self::Huge, Self::Zero];
}

/// A quantiser with tensors for it.
pub struct Sample<T> {
    /// What is done.
    pub quantizer: Quantizer,
    /// q, k and v.
    pub tensors: [Option<One<T>>; 3],
    /// Whether it is counted.
    pub counts: bool,
    /// Offsets and used lengths.
    pub packing: Packing,
}

/// One tensor, in memory with bands around it.
pub struct One<T> {
    values: Vec<T>,
    of_values: Layout<4>,
    of_stored: Layout<4>,
    /// Factors that are given, or NaN.
    descale: Vec<f32>,
    of_descale: Layout<3>,
    given: bool,
}

/// How a tensor of a sample is made.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// How values lie.
    pub values: Placement,
    /// How what is stored lies.
    pub stored: Placement,
    /// Whether factors are given.
    pub given: bool,
    /// What the elements are like.
    pub like: Like,
}

/// The buffers that a run wrote, bit for bit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Of q, k and v; empty where there is none.
    pub stored: [Vec<u8>; 3],
    /// Likewise.
    pub descale: [Vec<u32>; 3],
    /// As counted, or NaN.
    pub counts: [u32; 6],
}

impl Outcome {
    /// Where it differs from what the CPU made, in words.
    pub fn difference(&self, cpu: &Self) -> String {
        let mut text = String::new();
        for (i, name) in ["q", "k", "v"].into_iter().enumerate() {
            let stored: Vec<_> =
                (0..cpu.stored[i].len()).filter(|&at| self.stored[i][at] != cpu.stored[i][at]).collect();
            let descale: Vec<_> =
                (0..cpu.descale[i].len()).filter(|&at| self.descale[i][at] != cpu.descale[i][at]).collect();
            if let Some(&at) = stored.first() {
                let (got, want) = (self.stored[i][at], cpu.stored[i][at]);
                text += &format!("{name}: {} bytes, at {at} {got:#x} for {want:#x}; ", stored.len());
            }
            if let Some(&at) = descale.first() {
                let (got, want) = (f32::from_bits(self.descale[i][at]), f32::from_bits(cpu.descale[i][at]));
                text += &format!("{name}: {} factors, at {at} {got:e} for {want:e}; ", descale.len());
            }
        }
        if self.counts != cpu.counts {
            text += &format!("counts {:?} for {:?}", self.counts.map(f32::from_bits), cpu.counts.map(f32::from_bits));
        }
        text
    }
}

/// Layouts of what is stored: 16 bytes are 16 elements there.
fn stored_layout(placement: Placement, shape: [usize; 4]) -> Layout<4> {
    let halves = placement.layout([shape[0], shape[1], shape[2], shape[3] / 2], false);
    let [batch, seqlen, heads, _] = halves.stride();
    Layout::with_strides(shape, [2 * batch, 2 * seqlen, 2 * heads, 1]).expect("a small layout")
}

impl<T: Float> One<T> {
    fn new(kind: Kind, shape: [usize; 4], factors: [usize; 3], belongs: Option<&Rows>, rng: &mut StdRng) -> Self {
        let (of_values, of_stored) = (kind.values.layout(shape, true), stored_layout(kind.stored, shape));
        let of_descale = Layout::contiguous(factors).expect("a small layout");
        let mut values = vec![T::from_f32(f32::NAN); of_values.span() + 2 * GUARD];
        let half = size_of::<T>() == 2 && T::DTYPE == hopper_attention::DType::F16;
        let mut size = 1.0;
        for (i, value) in values[GUARD..GUARD + of_values.span()].iter_mut().enumerate() {
            if i % 64 == 0 {
                size = (2.0 * rng.sample::<f32, _>(StandardNormal)).exp();
            }
            let x = size * rng.sample::<f32, _>(StandardNormal);
            *value = T::from_f32(match kind.like {
                Like::Uneven => x,
                Like::NotFinite => match rng.random_range(0..500) {
                    0 => f32::NAN,
                    1 => f32::INFINITY,
                    2 => f32::NEG_INFINITY,
                    _ => x,
                },
                Like::Tiny => x * if half { 1e-7 } else { 1e-39 },
                Like::Huge => x.clamp(-3.0, 3.0) * if half { 2e4 } else { 1e38 },
                Like::Zero => 0.0 * x,
            });
        }
        if let Some(rows) = belongs {
            // What belongs to no sequence is NaN, and must reach nobody.
            let index = |row: usize, at: usize| [row / shape[1], row % shape[1], at / shape[3], at % shape[3]];
            for row in (0..shape[0] * shape[1]).filter(|&row| !rows.belongs(row)) {
                for at in 0..shape[2] * shape[3] {
                    values[GUARD + of_values.offset(index(row, at)).expect("within the tensor")] =
                        T::from_f32(f32::NAN);
                }
            }
        }
        let mut descale = vec![f32::NAN; of_descale.span() + 2 * GUARD];
        if kind.given {
            for factor in &mut descale[GUARD..GUARD + of_descale.span()] {
                // Now and then one whose inverse is infinite.
                let size = [1.0, 1e-3, 1e10, 1e-40][rng.random_range(0..4)];
                *factor = size * rng.sample::<f32, _>(StandardNormal).abs().clamp(0.1, 10.0);
            }
        }
        Self { values, of_values, of_stored, descale, of_descale, given: kind.given }
    }

    fn stored(&self) -> Vec<E4M3> {
        vec![POISON; self.of_stored.span() + 2 * GUARD]
    }
}

impl<T: Float> Sample<T> {
    /// Of a seed; `kinds` says how q, k and v are made, or that there is none.
    pub fn new(quantizer: Quantizer, kinds: [Option<Kind>; 3], counts: bool, seed: u64) -> Self {
        Self::packed(quantizer, Packing::default(), kinds, counts, seed)
    }

    /// The same of a problem with these offsets and used lengths.
    pub fn packed(quantizer: Quantizer, packing: Packing, kinds: [Option<Kind>; 3], counts: bool, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let shapes = shapes(quantizer.problem());
        let belonging = packing.belonging(quantizer.problem());
        let mut index = 0;
        let tensors = kinds.map(|kind| {
            let (shape, factors) = shapes[index];
            let belongs = belonging.as_ref().map(|sides| &sides[index.min(1)]);
            index += 1;
            kind.map(|kind| One::new(kind, shape, factors, belongs, &mut rng))
        });
        Self { quantizer, tensors, counts, packing }
    }

    /// What the CPU makes of it.
    pub fn on_cpu(&self) -> Outcome {
        let plan = self.quantizer.plan(&Device::cpu()).expect("a plan for the CPU");
        let mut stored = self.tensors.each_ref().map(|one| one.as_ref().map_or(Vec::new(), One::stored));
        let mut descale = self.tensors.each_ref().map(|one| one.as_ref().map_or(Vec::new(), |one| one.descale.clone()));
        let mut counts = [f32::NAN; 6];
        let mut args = self.packing.host_args(Args::new());
        let packed = packed(self.quantizer.problem());
        for (i, ((one, stored), descale)) in self.tensors.iter().zip(&mut stored).zip(&mut descale).enumerate() {
            let Some(one) = one else { continue };
            let [of_values, of_stored, of_descale, of_given] = SLOTS[i];
            args = packing::read(args, of_values, inner(&one.values), one.of_values, packed[i].rows);
            args = packing::write(args, of_stored, inner_mut(stored), one.of_stored, packed[i].rows);
            args = if one.given {
                packing::read_numbers(args, of_given, inner(descale), one.of_descale, packed[i].blocks)
            } else {
                packing::write_numbers(args, of_descale, inner_mut(descale), one.of_descale, packed[i].blocks)
            };
        }
        if self.counts {
            let of_counts = Layout::contiguous([3, 2]).expect("a small layout");
            args = args.write(Slot::Counts, TensorMut::host(&mut counts, of_counts).expect("a fitting layout"));
        }
        let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes()).expect("nothing to allocate");
        plan.run(&Stream::Cpu, &mut workspace, args).expect("a result");
        Outcome { stored: stored.map(bytes), descale: descale.map(bits), counts: counts.map(f32::to_bits) }
    }
}

fn bytes(values: Vec<E4M3>) -> Vec<u8> {
    values.into_iter().map(|x| x.to_bits()).collect()
}

fn bits(values: Vec<f32>) -> Vec<u32> {
    values.into_iter().map(f32::to_bits).collect()
}

/// What lies between the bands.
fn inner<T>(values: &[T]) -> &[T] {
    &values[GUARD..values.len() - GUARD]
}

fn inner_mut<T>(values: &mut [T]) -> &mut [T] {
    let end = values.len() - GUARD;
    &mut values[GUARD..end]
}

/// A sample's memory on the GPU.
pub struct OnDevice<T> {
    tensors: [Option<Memory<T>>; 3],
    counts: Option<CudaSlice<f32>>,
    lists: Lists,
}

struct Memory<T> {
    values: CudaSlice<T>,
    stored: CudaSlice<E4M3>,
    descale: CudaSlice<f32>,
}

impl<T: Float> OnDevice<T> {
    /// Values, and poison where something is to be written.
    pub fn new(stream: &Arc<CudaStream>, sample: &Sample<T>) -> Self {
        Self {
            tensors: sample.tensors.each_ref().map(|one| {
                one.as_ref().map(|one| Memory {
                    values: stream.clone_htod(&one.values).expect("a copy"),
                    stored: stream.clone_htod(&one.stored()).expect("a copy"),
                    descale: stream.clone_htod(&one.descale).expect("a copy"),
                })
            }),
            counts: sample.counts.then(|| stream.clone_htod(&[f32::NAN; 6]).expect("a copy")),
            lists: Lists::new(stream, &sample.packing),
        }
    }

    /// Writes another sample of the same layouts into the same memory. Offsets and used lengths stay as they are.
    pub fn write(&mut self, stream: &Arc<CudaStream>, sample: &Sample<T>) {
        for (memory, one) in self.tensors.iter_mut().zip(&sample.tensors) {
            if let (Some(memory), Some(one)) = (memory, one) {
                stream.memcpy_htod(&one.values, &mut memory.values).expect("a copy");
                stream.memcpy_htod(&one.stored(), &mut memory.stored).expect("a copy");
                stream.memcpy_htod(&one.descale, &mut memory.descale).expect("a copy");
            }
        }
        if let Some(counts) = &mut self.counts {
            stream.memcpy_htod(&[f32::NAN; 6], counts).expect("a copy");
        }
    }

    /// The arguments of a run.
    pub fn args(&mut self, sample: &Sample<T>) -> Args<'_> {
        self.lists.add_to(given(&mut self.tensors, &mut self.counts, sample))
    }

    /// The same without offsets and used lengths.
    pub fn args_without_lists(&mut self, sample: &Sample<T>) -> Args<'_> {
        given(&mut self.tensors, &mut self.counts, sample)
    }

    /// Runs a plan.
    ///
    /// # Errors
    /// What was refused or failed.
    pub fn run(
        &mut self,
        stream: &Arc<CudaStream>,
        workspace: &mut Workspace<'_>,
        plan: &QuantizePlan,
        sample: &Sample<T>,
    ) -> hopper_attention::Result<()> {
        plan.run(&Stream::Cuda(stream.clone()), workspace, self.args(sample))
    }

    /// The buffers, after what is enqueued on the stream.
    pub fn outcome(&self, stream: &Arc<CudaStream>) -> Outcome {
        let down = |i: usize| {
            let memory = self.tensors[i].as_ref();
            let (stored, descale) = memory
                .map(|memory| {
                    let stored = stream.clone_dtoh(&memory.stored).expect("a copy");
                    (stored, stream.clone_dtoh(&memory.descale).expect("a copy"))
                })
                .unwrap_or_default();
            (bytes(stored), bits(descale))
        };
        let [(stored_q, descale_q), (stored_k, descale_k), (stored_v, descale_v)] = [down(0), down(1), down(2)];
        let mut counts = [f32::NAN; 6];
        if let Some(from) = &self.counts {
            stream.memcpy_dtoh(from, &mut counts).expect("a copy");
            stream.synchronize().expect("the GPU works");
        }
        Outcome {
            stored: [stored_q, stored_k, stored_v],
            descale: [descale_q, descale_k, descale_v],
            counts: counts.map(f32::to_bits),
        }
    }

    /// What was stored, and the factors, as the operands of a forward pass. Only of dense samples of all three.
    ///
    /// # Panics
    /// Where one is missing.
    pub fn operands(&self, sample: &Sample<T>) -> super::fp8::Inputs<'_> {
        let of = |i: usize| match (&self.tensors[i], &sample.tensors[i]) {
            (Some(memory), Some(one)) => (read(&memory.stored, one.of_stored), read(&memory.descale, one.of_descale)),
            _ => panic!("tensor {i} of the sample is missing"),
        };
        let [(q, descale_q), (k, descale_k), (v, descale_v)] = [of(0), of(1), of(2)];
        super::fp8::Inputs { stored: [q, k, v], descale: [descale_q, descale_k, descale_v] }
    }
}

fn given<'a, T: Float>(
    tensors: &'a mut [Option<Memory<T>>; 3],
    counts: &'a mut Option<CudaSlice<f32>>,
    sample: &Sample<T>,
) -> Args<'a> {
    let mut args = Args::new();
    let packed = packed(sample.quantizer.problem());
    for (i, (memory, one)) in tensors.iter_mut().zip(&sample.tensors).enumerate() {
        let (Some(Memory { values, stored, descale }), Some(one)) = (memory, one) else { continue };
        let [of_values, of_stored, of_descale, of_given] = SLOTS[i];
        args = given_read(args, of_values, values, one.of_values, packed[i].rows);
        args = given_write(args, of_stored, stored, one.of_stored, packed[i].rows);
        args = if one.given {
            given_read_numbers(args, of_given, descale, one.of_descale, packed[i].blocks)
        } else {
            given_write_numbers(args, of_descale, descale, one.of_descale, packed[i].blocks)
        };
    }
    if let Some(counts) = counts {
        let of_counts = Layout::contiguous([3, 2]).expect("a small layout");
        args = args.write(Slot::Counts, TensorMut::cuda(counts.slice_mut(..), of_counts).expect("a fitting layout"));
    }
    args
}
