//! `hattn random --packed`, and packed sequences and used lengths in `hattn run` and `hattn check`, on the CPU.

mod common;

use std::path::Path;

use common::{Folder, bytes, hattn, hattn_on};
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

/// Heads and head dim of the files below.
const HEADS: usize = 2;
const DIM: usize = 8;

/// A number of q, k, v or d_o, which has no other place.
fn number(tensor: usize, row: usize, head: usize, dim: usize) -> f32 {
    ((((row * HEADS + head) * DIM + dim) * 4 + tensor) * 7919 % 1009) as f32 / 504.0 - 1.0
}

/// The index of an element of a tensor of so many rows an entry.
fn index(layout: &str, rows: usize, [entry, row, head, dim]: [usize; 4]) -> usize {
    match layout {
        "bhsd" => ((entry * HEADS + head) * rows + row) * DIM + dim,
        _ => ((entry * rows + row) * HEADS + head) * DIM + dim,
    }
}

/// A file with q, k, v and d_o. `sides` has the numbers of the rows of each entry, of queries and of keys.
fn numbered(
    folder: &Folder,
    name: &str,
    layout: &str,
    sides: [&[Vec<usize>]; 2],
    lists: &[(&str, &[i32])],
) -> std::path::PathBuf {
    let [queries, keys] = sides.map(|entries| entries[0].len());
    let shape = |entries: usize, rows: usize| match layout {
        "thd" => vec![rows, HEADS, DIM],
        "bhsd" => vec![entries, HEADS, rows, DIM],
        _ => vec![entries, rows, HEADS, DIM],
    };
    let shapes = [(sides[0], queries), (sides[1], keys)].map(|(entries, rows)| shape(entries.len(), rows));
    let values = |tensor: usize, side: usize| {
        let (entries, rows) = (sides[side], [queries, keys][side]);
        let mut values = vec![0.0; entries.len() * rows * HEADS * DIM];
        for (entry, of_entry) in entries.iter().enumerate() {
            for (row, &of) in of_entry.iter().enumerate() {
                for (head, dim) in (0..HEADS).flat_map(|head| (0..DIM).map(move |dim| (head, dim))) {
                    values[index(layout, rows, [entry, row, head, dim])] = number(tensor, of, head, dim);
                }
            }
        }
        bytes(&values)
    };
    let named = [("q", 0), ("k", 1), ("v", 1), ("d_o", 0)];
    let mut tensors: Vec<(&str, Dtype, &[usize], Vec<u8>)> = Vec::new();
    for (tensor, (name, side)) in named.into_iter().enumerate() {
        tensors.push((name, Dtype::F32, &shapes[side], values(tensor, side)));
    }
    let lengths: Vec<[usize; 1]> = lists.iter().map(|(_, list)| [list.len()]).collect();
    for ((name, list), length) in lists.iter().zip(&lengths) {
        tensors.push((name, Dtype::I32, length, numbers(list)));
    }
    folder.typed(name, Some(layout), &tensors)
}

/// What `run` makes of a file is what it makes of each of these sequences in a file of its own, and zeros in all other rows. A
/// sequence is its entry, and its rows of queries and of keys.
fn runs_each_alone(
    folder: &Folder,
    layout: &str,
    sides: [&[Vec<usize>]; 2],
    lists: &[(&str, &[i32])],
    sequences: &[(usize, [std::ops::Range<usize>; 2])],
) {
    let input = numbered(folder, "input.safetensors", layout, sides, lists);
    let [output, other] = ["output.safetensors", "other.safetensors"].map(|name| folder.path(name));
    let line = "run --device cpu --backward --mask causal";
    hattn_on(line, &input, Some(&output)).fine();
    let rows = sides.map(|entries| entries[0].len());
    for (name, side) in [("o", 0), ("d_q", 0), ("d_k", 1), ("d_v", 1)] {
        let (_, got) = read(&output, name);
        let mut left: std::collections::BTreeSet<usize> = (0..got.len()).collect();
        for (entry, ranges) in sequences {
            let own = [0, 1].map(|side| vec![sides[side][*entry][ranges[side].clone()].to_vec()]);
            let alone = numbered(folder, "alone.safetensors", "bshd", [&own[0], &own[1]], &[]);
            hattn_on(line, &alone, Some(&other)).fine();
            let (_, wanted) = read(&other, name);
            for (i, wanted) in wanted.iter().enumerate() {
                let place = [*entry, ranges[side].start + i / HEADS / DIM, i / DIM % HEADS, i % DIM];
                let at = index(layout, rows[side], place);
                assert!((got[at] - wanted).abs() < 1e-5, "{name} {place:?}, {layout}: {} {wanted}", got[at]);
                left.remove(&at);
            }
            if name == "o" {
                let (lse, queries) = (read(&output, "lse").1, ranges[0].len());
                for (i, wanted) in read(&other, "lse").1.iter().enumerate() {
                    let at = (entry * HEADS + i / queries) * rows[0] + ranges[0].start + i % queries;
                    assert!(lse[at] == *wanted || (lse[at] - wanted).abs() < 1e-5, "{at}: {} {wanted}", lse[at]);
                }
            }
        }
        assert!(left.iter().all(|&at| got[at] == 0.0), "{name}, {layout}: rows of no sequence");
    }
    let (_, lse) = read(&output, "lse");
    let in_some = |i: usize| {
        let (entry, row) = (i / rows[0] / HEADS, i % rows[0]);
        sequences.iter().any(|(of, [queries, _])| *of == entry && queries.contains(&row))
    };
    assert!((0..lse.len()).all(|i| in_some(i) || lse[i] == f32::NEG_INFINITY), "{layout}: {lse:?}");
}

#[test]
fn run_computes_packed_sequences_as_each_alone() {
    let folder = Folder::new();
    let [q, kv] = [9, 11].map(|rows| vec![(0..rows).collect::<Vec<usize>>()]);
    let offsets: [(&str, &[i32]); 2] = [("cu_seqlens_q", &[1, 4, 4, 9]), ("cu_seqlens_kv", &[0, 5, 7, 10])];
    let sequences = [(0, [1..4, 0..5]), (0, [4..9, 7..10])];
    runs_each_alone(&folder, "thd", [&q, &kv], &offsets, &sequences);
    let used: [(&str, &[i32]); 4] = [offsets[0], offsets[1], ("seqused_q", &[2, 0, 5]), ("seqused_kv", &[5, 1, 2])];
    runs_each_alone(&folder, "thd", [&q, &kv], &used, &[(0, [1..3, 0..5]), (0, [4..9, 7..9])]);
}

#[test]
fn used_lengths_of_dense_files_are_those_of_shorter_ones() {
    let folder = Folder::new();
    let [q, kv] = [5, 7].map(|rows| (0..2).map(|entry| (entry * 50..entry * 50 + rows).collect()).collect::<Vec<_>>());
    let [of_q, of_kv]: [(&str, &[i32]); 2] = [("seqused_q", &[3, 5]), ("seqused_kv", &[7, 2])];
    for layout in ["bshd", "bhsd"] {
        let run = |lists: &[_], sequences: &[_]| runs_each_alone(&folder, layout, [&q, &kv], lists, sequences);
        run(&[], &[(0, [0..5, 0..7]), (1, [0..5, 0..7])]);
        run(&[of_q], &[(0, [0..3, 0..7]), (1, [0..5, 0..7])]);
        run(&[of_kv], &[(0, [0..5, 0..7]), (1, [0..5, 0..2])]);
        run(&[of_q, of_kv], &[(0, [0..3, 0..7]), (1, [0..5, 0..2])]);
        let input = numbered(&folder, "input.safetensors", layout, [&q, &kv], &[of_q, of_kv]);
        let text = hattn_on("check --device cpu --backward --mask causal", &input, None).fine();
        assert!(text.contains("used q kv") && text.contains("passed"), "{text}");
        let input = numbered(&folder, "input.safetensors", layout, [&q, &kv], &[("seqused_kv", &[7, 8])]);
        let output = folder.path("refused.safetensors");
        hattn_on("run --device cpu", &input, Some(&output)).refused(&["seqused_kv: 8 at 1; allowed: 0 to 7"]);
        assert!(!output.exists());
    }
}

#[test]
fn what_random_makes_is_run() {
    let folder = Folder::new();
    let input = folder.random("random.safetensors", "--packed --batch 4 --seqlen-q 120 --seqlen-kv 150 --heads-q 2");
    let output = folder.path("out.safetensors");
    let text = hattn_on("run --device cpu --mask window:9,2", &input, Some(&output)).fine();
    assert!(text.contains("o bf16 [120, 2, 64] thd, lse f32 [2, 120]"), "{text}");
    assert_eq!(read(&output, "lse").0, [2, 120]);
    // The output is no input.
    let path = output.to_str().expect("a UTF-8 path");
    hattn(["check", "--device", "cpu", "--input", path]).refused(&["tensor `q` is missing"]);
}
