//! What the tests of the public API share: sizes, numbers, layouts and masks.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use hopper_attention::reference::Tensor;
use hopper_attention::{Args, Corner, Dims, Element, Layout, Mask, Slot, Stream, TensorMut, TensorRef, Workspace};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

pub const DIMS: Dims = Dims::new(2, 5, 4, 16).with_seqlen_kv(7).with_heads_kv(2).with_head_dim_vo(8);

/// proptest's defaults, but that it keeps the seed of what failed in a file beside the test.
pub fn kept() -> ProptestConfig {
    let file = FileFailurePersistence::WithSource("regressions");
    ProptestConfig { failure_persistence: Some(Box::new(file)), ..ProptestConfig::default() }
}

/// Numbers between -1 and 1 that differ from place to place, without a generator.
pub fn values<T: Element>(count: usize, seed: u32) -> Vec<T> {
    let mixed = |i: u32| i.wrapping_add(seed).wrapping_mul(2_654_435_761).rotate_left(13).wrapping_mul(2_246_822_519);
    (0..count as u32).map(|i| T::from_f32(mixed(i) as f32 / (u32::MAX / 2) as f32 - 1.0)).collect()
}

/// Row-major without gaps.
pub fn dense<const R: usize>(shape: [usize; R]) -> Layout<R> {
    Layout::contiguous(shape).unwrap()
}

/// A tensor in host memory to read, row-major without gaps.
pub fn of<T: Element, const R: usize>(data: &[T], shape: [usize; R]) -> TensorRef<'_, T, R> {
    TensorRef::host(data, dense(shape)).unwrap()
}

/// The same to write.
pub fn into<T: Element, const R: usize>(data: &mut [T], shape: [usize; R]) -> TensorMut<'_, T, R> {
    TensorMut::host(data, dense(shape)).unwrap()
}

/// Adds a tensor of any rank to read, row-major without gaps.
pub fn read<'a, T: Element>(args: Args<'a>, slot: Slot, data: &'a [T], shape: &[usize]) -> Args<'a> {
    match *shape {
        [a] => args.read(slot, TensorRef::host(data, dense([a])).unwrap()),
        [a, b] => args.read(slot, TensorRef::host(data, dense([a, b])).unwrap()),
        [a, b, c] => args.read(slot, TensorRef::host(data, dense([a, b, c])).unwrap()),
        [a, b, c, d] => args.read(slot, TensorRef::host(data, dense([a, b, c, d])).unwrap()),
        _ => unreachable!("{shape:?}"),
    }
}

/// The same to write.
pub fn write<'a, T: Element>(args: Args<'a>, slot: Slot, data: &'a mut [T], shape: &[usize]) -> Args<'a> {
    match *shape {
        [a, b] => args.write(slot, TensorMut::host(data, dense([a, b])).unwrap()),
        [a, b, c] => args.write(slot, TensorMut::host(data, dense([a, b, c])).unwrap()),
        [a, b, c, d] => args.write(slot, TensorMut::host(data, dense([a, b, c, d])).unwrap()),
        _ => unreachable!("{shape:?}"),
    }
}

/// The same for the oracle.
pub fn wide<T: Element>(data: &[T], shape: [usize; 4]) -> Tensor {
    Tensor::from_strided(data, &dense(shape))
}

pub fn widened(data: &[f32]) -> Vec<f64> {
    data.iter().map(|&x| f64::from(x)).collect()
}

/// The CPU needs none.
pub fn workspace() -> Workspace<'static> {
    Workspace::alloc(&Stream::Cpu, 0).unwrap()
}

/// Strides that put the dimensions in some order and leave gaps after heads and sequences.
pub fn spread(shape: [usize; 4], heads_outside: bool, gap: usize) -> Layout<4> {
    let [b, s, h, d] = shape.map(|size| size as i64);
    let row = d + gap as i64;
    let stride = if heads_outside { [h * s * row, row, s * row, 1] } else { [s * h * row, h * row, row, 1] };
    let outer = if b > 1 { stride[0] + gap as i64 } else { stride[0] };
    Layout::with_strides(shape, [outer, stride[1], stride[2], 1]).unwrap()
}

/// Masks of every kind, with bounds around the lengths of the tests.
pub fn masks() -> impl Strategy<Value = Mask> {
    let corner = || prop_oneof![Just(Corner::BottomRight), Just(Corner::TopLeft)];
    let bound = || proptest::option::of(0usize..50);
    prop_oneof![
        Just(Mask::Full),
        corner().prop_map(|corner| Mask::Causal { corner }),
        (bound(), bound(), corner()).prop_map(|(left, right, corner)| Mask::Window { left, right, corner }),
        (1usize..50, corner()).prop_map(|(chunk, corner)| Mask::Chunked { chunk, corner }),
        (0usize..50, corner()).prop_map(|(keys, corner)| Mask::Prefix { keys, corner }),
    ]
}
