//! `hattn random --packed`, and packed sequences and used lengths in `hattn run` and `hattn check`, on the CPU.

mod common;

use std::path::Path;

use common::{Folder, bytes, hattn_on};
use safetensors::{Dtype, SafeTensors};

const SHAPE: &[usize] = &[7, 2, 8];

fn numbers(list: &[i32]) -> Vec<u8> {
    list.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// A file with packed q, k and v of f32, and these lists of i32.
fn file(folder: &Folder, lists: &[(&str, &[i32])]) -> std::path::PathBuf {
    let values: Vec<f32> = (0..7 * 2 * 8).map(|i| (i * 37 % 64) as f32 / 32.0 - 1.0).collect();
    let shapes: Vec<[usize; 1]> = lists.iter().map(|(_, list)| [list.len()]).collect();
    let mut tensors: Vec<(&str, Dtype, &[usize], Vec<u8>)> =
        ["q", "k", "v", "d_o"].map(|name| (name, Dtype::F32, SHAPE, bytes(&values))).into();
    for ((name, list), shape) in lists.iter().zip(&shapes) {
        tensors.push((name, Dtype::I32, shape, numbers(list)));
    }
    folder.typed("packed.safetensors", Some("thd"), &tensors)
}

#[test]
fn what_random_makes_is_checked() {
    let folder = Folder::new();
    let input =
        folder.random("random.safetensors", "--packed --batch 5 --seqlen-q 300 --heads-q 4 --heads-kv 2 --backward");
    for line in
        ["--mask causal --backward", "--mask window:9,2", "--fp8 per-block", "--fp8 per-head --mask causal", "--fp8"]
    {
        let text = hattn_on(&format!("check --device cpu {line}"), &input, None).fine();
        assert!(text.contains("packed q kv") && text.contains("passed: the largest error is 0."), "{text}");
    }
    let other = folder.random("other.safetensors", "--packed --batch 3 --seqlen-q 90 --seqlen-kv 200 --dtype f32");
    hattn_on("check --device cpu --mask causal", &other, None).fine();
}

#[test]
fn rows_of_no_sequence_are_zeros_in_the_output() {
    let folder = Folder::new();
    let lists: [(&str, &[i32]); 3] =
        [("cu_seqlens_q", &[1, 3, 6]), ("cu_seqlens_kv", &[0, 4, 7]), ("seqused_kv", &[2, 3])];
    let (input, output) = (file(&folder, &lists), folder.path("out.safetensors"));
    let text = hattn_on("check --device cpu --backward", &input, Some(&output)).fine();
    assert!(text.contains("used kv") && text.contains("passed"), "{text}");
    let written = read(&output, "o");
    assert_eq!((&written.0[..], written.1.len()), (SHAPE, 112));
    let is_zero = |row: usize| written.1[row * 16..(row + 1) * 16].iter().all(|&x| x == 0.0);
    assert_eq!((0..7).filter(|&row| is_zero(row)).collect::<Vec<_>>(), [0, 6]);
    let lse = read(&output, "lse");
    assert!(lse.0 == [2, 7] && lse.1[0] == f32::NEG_INFINITY && lse.1[1].is_finite(), "{lse:?}");
}

/// The shape and the numbers of a tensor of f32.
fn read(path: &Path, name: &str) -> (Vec<usize>, Vec<f32>) {
    let bytes = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = tensors.tensor(name).unwrap();
    let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    (tensor.shape().to_vec(), tensor.data().chunks_exact(4).map(number).collect())
}

#[test]
fn wrong_lengths_are_refused_by_name() {
    let folder = Folder::new();
    let refused = |lists: &[(&str, &[i32])], part: &str| {
        let input = file(&folder, lists);
        hattn_on("check --device cpu", &input, None).refused(&["packed.safetensors", part]);
    };
    let q: (&str, &[i32]) = ("cu_seqlens_q", &[0, 3, 7]);
    refused(&[q], "tensor `cu_seqlens_kv` is missing");
    refused(
        &[q, ("cu_seqlens_kv", &[0, 5, 3])],
        "cu_seqlens_kv: 3 at 2, after 5; allowed: offsets that do not decrease",
    );
    refused(&[q, ("cu_seqlens_kv", &[0, 3, 8])], "cu_seqlens_kv: 8 at 2; allowed: 0 to 7, the number of rows");
    refused(&[q, ("cu_seqlens_kv", &[i32::MIN, 3, 7])], "cu_seqlens_kv: -2147483648 at 0");
    refused(&[q, ("cu_seqlens_kv", &[0, 7])], "tensor `cu_seqlens_kv` has shape [2]; allowed: [3], [batch + 1]");
    refused(&[q, ("cu_seqlens_kv", &[0, 3, 7]), ("seqused_q", &[4, 0])], "seqused_q: 4 at 0; allowed: 0 to 3");
}
