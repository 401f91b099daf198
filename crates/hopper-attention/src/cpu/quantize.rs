//! Quantisation to e4m3: one pass over a tensor for the factors, unless the caller gives them, and one for the elements.
//! [`Quantizer`](crate::Quantizer) has the formulas.

use super::hadamard::Rotation;
use super::{HostMut, HostRef, Task, each_task, load};
use crate::dtype::{E4M3, Element, Float};
use crate::scaling::Scaling;

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
    /// Heads of this tensor for each key head: `heads_q / heads_kv` for Q, 1 for K and V.
    pub group: usize,
    /// The seed of the rotation. `None` for a tensor that is not rotated.
    pub rotation: Option<u64>,
    /// The largest magnitude that may be stored: 448, or 448 divided by a power of two.
    pub most: f32,
}

/// The descale factors of a tensor.
pub(crate) enum Factors<'a> {
    /// To be made and written.
    FromAmax(HostMut<'a, f32, 3>),
    /// To be read.
    Given(HostRef<'a, f32, 3>),
}

/// Quantises a tensor. Returns the number of elements that were saturated, and the number that were not finite.
pub(crate) fn quantize<T: Float>(task: QuantizeTask<'_, T>) -> [u64; 2] {
    let QuantizeTask { values, mut stored, descale, scaling, group, rotation, most } = task;
    let [batch, seqlen, heads, dim] = values.layout().shape();
    let rotation = rotation.map(|seed| Rotation::new(seed, dim));
    let rows = |task: &Task, rows: &mut Vec<f32>| {
        load(&values, task.batch, task.head, task.tokens.clone(), rows);
        if let Some(rotation) = &rotation {
            rows.chunks_exact_mut(dim).for_each(|row| rotation.apply(row));
        }
    };
    // All tokens of a task share one factor.
    let index = |task: &Task| scaling.index(task.batch, task.head, group, task.tokens.start);

    let mut written;
    let descale = match descale {
        Factors::Given(descale) => descale,
        Factors::FromAmax(descale) => {
            written = descale;
            let [batches, groups, blocks] = written.layout().shape();
            let places = (0..batches).flat_map(|b| (0..groups).flat_map(move |h| (0..blocks).map(move |i| [b, h, i])));
            places.clone().for_each(|place| written.set(place, 0.0));
            let compute = |scratch: &mut Vec<f32>, task: &Task| {
                rows(task, scratch);
                scratch.iter().map(|x| x.abs()).filter(|x| x.is_finite()).fold(0.0, f32::max)
            };
            each_task(batch, heads, seqlen, compute, |task, amax: f32| {
                // SAFETY: every factor was set to 0 above.
                let largest = unsafe { written.as_ref() }.at(index(task));
                written.set(index(task), largest.max(amax));
            });
            for place in places {
                // SAFETY: as above.
                let largest = unsafe { written.as_ref() }.at(place);
                written.set(place, (largest / most).max(f32::MIN_POSITIVE));
            }
            // SAFETY: as above.
            unsafe { written.as_ref() }
        }
    };

    let mut counts = [0; 2];
    let compute = |scratch: &mut Vec<f32>, task: &Task| {
        rows(task, scratch);
        let factor = 1.0 / descale.at(index(task));
        let mut counts = [0; 2];
        let rows: Vec<E4M3> = scratch.iter().map(|&x| one(x, factor, most, &mut counts)).collect();
        (rows, counts)
    };
    each_task(batch, heads, seqlen, compute, |task, (rows, [saturated, not_finite])| {
        stored.store(task, &rows);
        counts[0] += saturated;
        counts[1] += not_finite;
    });
    counts
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
