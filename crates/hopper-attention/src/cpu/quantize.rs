//! Quantisation to e4m3: one pass over a tensor for the factors, unless the caller gives them, and one for the elements.
//! [`Quantizer`](crate::Quantizer) has the formulas.

use super::hadamard::Rotation;
use super::memory::reserved;
use super::sequences::Sequences;
use super::tasks;
use super::{BLOCK, HostMut, HostRef, Task, Tasks, Team, fill_gaps, load};
use crate::dtype::{E4M3, Element, Float};
use crate::error::Result;
use crate::scaling::{SCALE_BLOCK, Scaling};
use crate::sequences::Side;

/// `most` (the largest magnitude that may be stored) divided by half a step. A step is the distance between neighbouring e4m3
/// numbers. At 448 half a step is 16. At 14, which is 448 / 32, it is 0.5.
const HALF_STEPS: f32 = 28.0;
/// The code of a NaN.
const NAN: E4M3 = E4M3::from_bits(0x7f);

/// One tensor to quantise. The caller has checked shapes and types.
pub(crate) struct QuantizeTask<'a, T> {
    pub values: HostRef<'a, T, 4>,
    pub stored: HostMut<'a, E4M3, 4>,
    pub descale: Factors<'a>,
    pub scaling: Scaling,
    /// Heads of this tensor for each KV head: `heads_q / heads_kv` for Q, 1 for K and V.
    pub group: usize,
    /// The seed of the rotation. `None` for a tensor that is not rotated.
    pub rotation: Option<u64>,
    /// The largest magnitude that may be stored: 448, or 448 divided by a power of two.
    pub most: f32,
    /// The sequences whose rows are quantised, and the side of the problem that the tensor is of.
    pub sequences: &'a Sequences,
    pub side: Side,
    /// Whether zeros are stored in rows of no sequence.
    pub fills_gaps: bool,
}

/// The descale factors of a tensor.
pub(crate) enum Factors<'a> {
    /// To be made and written.
    FromAmax(HostMut<'a, f32, 3>),
    /// To be read.
    Given(HostRef<'a, f32, 3>),
}

/// What was found of a tensor: the number of elements that were saturated, and the number that were not finite.
pub(crate) type Counts = [u64; 2];

/// Buffers that a thread uses again for its next task. They are large enough for the largest task, so that a task allocates nothing.
struct Scratch {
    /// The values, rotated if the tensor is to be rotated.
    rows: Vec<f32>,
    /// The result of a task of the first pass: the largest finite magnitude.
    amax: f32,
    /// The results of a task of the second pass.
    stored: Vec<E4M3>,
    counts: Counts,
}

impl<'a, T: Float> QuantizeTask<'a, T> {
    fn tasks(&self) -> Result<Tasks<'a>> {
        let [_, _, heads, _] = self.values.layout().shape();
        Tasks::new(self.sequences, self.side, heads, self.tokens_of_a_task())
    }

    fn tokens_of_a_task(&self) -> usize {
        let [.., dim] = self.values.layout().shape();
        tasks::tokens(BLOCK, dim)
    }

    fn rotation(&self) -> Result<Option<Rotation>> {
        let [.., dim] = self.values.layout().shape();
        self.rotation.filter(|_| !self.values.layout().is_empty()).map(|seed| Rotation::new(seed, dim)).transpose()
    }

    /// Elements in the largest of the tasks.
    fn largest_task(&self) -> usize {
        let [_, seqlen, _, dim] = self.values.layout().shape();
        self.tokens_of_a_task().min(seqlen) * dim
    }
}

/// Quantises tensors. Returns what was found of each.
///
/// # Errors
/// [`Error::Memory`](crate::Error::Memory) and [`Error::Threads`](crate::Error::Threads), before an output is written.
pub(crate) fn quantize<T: Float, const N: usize>(tensors: [Option<QuantizeTask<'_, T>>; N]) -> Result<[Counts; N]> {
    let some = || tensors.iter().flatten();
    let elements = some().map(QuantizeTask::largest_task).max().unwrap_or(0);
    let make = || Ok(Scratch { rows: reserved(elements)?, amax: 0.0, stored: reserved(elements)?, counts: [0; 2] });
    let mut tasks = [const { None }; N];
    for (tasks, tensor) in tasks.iter_mut().zip(&tensors) {
        *tasks = tensor.as_ref().map(QuantizeTask::tasks).transpose()?;
    }
    let mut team = Team::new(tasks.iter().flatten().map(Tasks::count).max().unwrap_or(0), make)?;
    let mut rotations = [const { None }; N];
    for (rotation, tensor) in rotations.iter_mut().zip(&tensors) {
        *rotation = tensor.as_ref().map(QuantizeTask::rotation).transpose()?.flatten();
    }
    let mut counts = [[0; 2]; N];
    for (((counts, tensor), tasks), rotation) in counts.iter_mut().zip(tensors).zip(&tasks).zip(&rotations) {
        if let (Some(tensor), Some(tasks)) = (tensor, tasks) {
            *counts = one_tensor(tensor, tasks, rotation.as_ref(), &mut team)?;
        }
    }
    Ok(counts)
}

fn one_tensor<T: Float>(
    tensor: QuantizeTask<'_, T>,
    tasks: &Tasks<'_>,
    rotation: Option<&Rotation>,
    team: &mut Team<Scratch>,
) -> Result<Counts> {
    let QuantizeTask { values, mut stored, descale, scaling, group, most, sequences, side, fills_gaps, .. } = tensor;
    let [.., dim] = values.layout().shape();
    let load_rows = |task: &Task, rows: &mut Vec<f32>| {
        load(&values, &task.rows, task.head, task.tokens.clone(), rows);
        if let Some(rotation) = rotation {
            rows.chunks_exact_mut(dim).for_each(|row| rotation.apply(row));
        }
    };
    // All tokens of a task share one factor.
    const { assert!(SCALE_BLOCK.is_multiple_of(BLOCK)) };
    let index = |task: &Task| task.rows.factor(scaling, task.head, group, task.tokens.start);

    let mut written;
    let descale = match descale {
        Factors::Given(descale) => descale,
        Factors::FromAmax(descale) => {
            written = descale;
            let factors = written.layout();
            // A block of no sequence has no factor, unless gaps are filled.
            let each_factor = |set: &mut dyn FnMut([usize; 3])| {
                if scaling != Scaling::PerBlock || !sequences.differ() || fills_gaps {
                    return factors.indices().for_each(set);
                }
                for own in (0..sequences.count()).map(|number| sequences.get(number).side(side)) {
                    for head in 0..factors.shape()[1] {
                        (0..own.len).step_by(SCALE_BLOCK).for_each(|token| set(own.factor(scaling, head, 1, token)));
                    }
                }
            };
            each_factor(&mut |place| written.set(place, 0.0));
            let compute = |scratch: &mut Scratch, task: &Task| {
                load_rows(task, &mut scratch.rows);
                scratch.amax = scratch.rows.iter().map(|x| x.abs()).filter(|x| x.is_finite()).fold(0.0, f32::max);
            };
            team.each(tasks, compute, |task, scratch| {
                // SAFETY: every factor of a row was set to 0 above.
                let largest = unsafe { written.as_ref() }.at(index(task));
                written.set(index(task), largest.max(scratch.amax));
            })?;
            each_factor(&mut |place| {
                // SAFETY: as above.
                let largest = unsafe { written.as_ref() }.at(place);
                written.set(place, (largest / most).max(f32::MIN_POSITIVE));
            });
            // SAFETY: as above.
            unsafe { written.as_ref() }
        }
    };

    let mut counts = [0; 2];
    let compute = |Scratch { rows, stored, counts, .. }: &mut Scratch, task: &Task| {
        load_rows(task, rows);
        let factor = 1.0 / descale.at(index(task));
        *counts = [0; 2];
        stored.clear();
        stored.extend(rows.iter().map(|&x| one(x, factor, most, counts)));
    };
    team.each(tasks, compute, |task, scratch| {
        stored.store(task, &scratch.stored);
        for (sum, found) in counts.iter_mut().zip(scratch.counts) {
            *sum += found;
        }
    })?;
    if fills_gaps {
        fill_gaps(sequences, side, &mut stored);
    }
    Ok(counts)
}

/// Quantises one element. `factor` is 1 / descale.
fn one(x: f32, factor: f32, most: f32, [saturated, not_finite]: &mut [u64; 2]) -> E4M3 {
    if !x.is_finite() {
        *not_finite += 1;
        return NAN;
    }
    let scaled = x * factor;
    if scaled.is_nan() {
        // x is 0, and a given descale factor is so small that its inverse is infinite. The sign of this NaN differs between
        // machines, so return a fixed one.
        return NAN;
    }
    // More than half a step above `most`: rounding to nearest would give more than `most`.
    if scaled.abs() > most + most / HALF_STEPS {
        *saturated += 1;
    }
    <E4M3 as Element>::from_f32(scaled.clamp(-most, most))
}
