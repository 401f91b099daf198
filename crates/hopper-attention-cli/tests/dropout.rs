//! `hattn run --dropout-mask`: the pairs that dropout keeps are written, and replaying them gives the output.

mod common;

use std::path::Path;

use common::{Folder, hattn_on};
use safetensors::{Dtype, SafeTensors};

/// A tensor of a file: its shape, and its numbers, whatever they are.
fn read(path: &Path, name: &str) -> (Vec<usize>, Vec<f64>) {
    let file = std::fs::read(path).expect("a file");
    let tensors = SafeTensors::deserialize(&file).expect("a safetensors file");
    let tensor = tensors.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    let number = |bytes: &[u8]| match tensor.dtype() {
        Dtype::U8 => f64::from(bytes[0]),
        Dtype::F32 => f64::from(f32::from_le_bytes(bytes.try_into().expect("four bytes"))),
        Dtype::I32 => f64::from(i32::from_le_bytes(bytes.try_into().expect("four bytes"))),
        other => panic!("{name} of {other}"),
    };
    let width = if tensor.dtype() == Dtype::U8 { 1 } else { 4 };
    (tensor.shape().to_vec(), tensor.data().chunks_exact(width).map(number).collect())
}

/// Heads and head dim of the files.
const HEADS: usize = 4;
const HEADS_KV: usize = 2;
const DIM: usize = 8;

/// The probability 0.3 is this number of 32768.
const DROPPED: f64 = 9830.0;

/// The output of causal attention with the written mask, and the share of the pairs that it keeps.
///
/// `sequences` has the batch entry of the tensors, and the first row and the number of rows, of queries and of keys.
fn replayed(input: &Path, output: &Path, layout: &str, sequences: &[(usize, [(usize, usize); 2])]) -> (Vec<f64>, f64) {
    let [q, k, v] = ["q", "k", "v"].map(|name| read(input, name));
    let (shape, mask) = read(output, "dropout_mask");
    assert_eq!((shape[0], shape[1]), (sequences.len(), HEADS));
    assert!(mask.iter().all(|&kept| kept == 0.0 || kept == 1.0));
    let (most_q, most_kv) = (shape[2], shape[3]);
    let at = |shape: &[usize], heads: usize, entry: usize, row: usize, head: usize| match layout {
        "bhsd" => ((entry * heads + head) * shape[2] + row) * DIM,
        "bshd" => ((entry * shape[1] + row) * heads + head) * DIM,
        _ => (row * heads + head) * DIM,
    };
    let mut o = vec![0.0; q.1.len()];
    let (mut kept, mut all) = (0.0, 0.0);
    for (number, &(entry, [(first_q, queries), (first_kv, keys)])) in sequences.iter().enumerate() {
        for (head, query) in (0..HEADS).flat_map(|head| (0..queries).map(move |query| (head, query))) {
            let row = at(&q.0, HEADS, entry, first_q + query, head);
            let of_key = |key: usize| at(&k.0, HEADS_KV, entry, first_kv + key, head / (HEADS / HEADS_KV));
            let seen = (0..keys).filter(|&key| key + queries <= query + keys);
            let weight = |key: usize| {
                let product: f64 = (0..DIM).map(|dim| q.1[row + dim] * k.1[of_key(key) + dim]).sum();
                (product / (DIM as f64).sqrt()).exp()
            };
            let sum: f64 = seen.clone().map(weight).sum();
            for key in seen {
                let stays = mask[((number * HEADS + head) * most_q + query) * most_kv + key];
                (kept, all) = (kept + stays, all + 1.0);
                let weight = weight(key) / sum * stays * 32768.0 / (32768.0 - DROPPED);
                (0..DIM).for_each(|dim| o[row + dim] += weight * v.1[of_key(key) + dim]);
            }
        }
    }
    (o, kept / all)
}

fn is_the_output(output: &Path, (o, share): (Vec<f64>, f64)) {
    let (_, got) = read(output, "o");
    let worst = got.iter().zip(&o).map(|(got, o)| (got - o).abs()).fold(0.0, f64::max);
    assert!(worst < 1e-5 && got.len() == o.len(), "off by {worst}");
    assert!((0.6..0.8).contains(&share), "{share} of the pairs are kept");
}

#[test]
fn a_replay_of_the_mask_gives_the_output() {
    let folder = Folder::new();
    let sizes = format!("--heads-q {HEADS} --heads-kv {HEADS_KV} --head-dim {DIM} --dtype f32 --dropout 0.3 --seed 5");
    let output = folder.path("output.safetensors");
    for layout in ["bshd", "bhsd"] {
        let line = format!("--batch 2 --seqlen-q 19 --seqlen-kv 41 --layout {layout} {sizes}");
        let input = folder.random("qkv.safetensors", &line);
        let text = hattn_on("run --device cpu --mask causal --dropout-mask", &input, Some(&output)).fine();
        assert!(text.contains("dropout_mask u8 [2, 4, 19, 41]"), "{text}");
        let sequences: Vec<_> = (0..2).map(|entry| (entry, [(0, 19), (0, 41)])).collect();
        is_the_output(&output, replayed(&input, &output, layout, &sequences));
    }
    let input = folder.random("packed.safetensors", &format!("--packed --batch 3 --seqlen-q 70 {sizes}"));
    let offsets =
        |name| read(&input, name).1.windows(2).map(|pair| (pair[0] as usize, (pair[1] - pair[0]) as usize)).collect();
    let (q, kv): (Vec<_>, Vec<_>) = (offsets("cu_seqlens_q"), offsets("cu_seqlens_kv"));
    let sequences: Vec<_> = q.iter().zip(&kv).map(|(&q, &kv)| (0, [q, kv])).collect();
    let longest = q.iter().map(|&(_, len)| len).max().expect("three sequences");
    let text = hattn_on("run --device cpu --mask causal --dropout-mask", &input, Some(&output)).fine();
    assert!(text.contains(&format!("dropout_mask u8 [3, 4, {longest}, {longest}]")), "{text}");
    is_the_output(&output, replayed(&input, &output, "thd", &sequences));
}

#[test]
fn a_mask_is_written_where_there_is_dropout() {
    let folder = Folder::new();
    let input = folder.random("qkv.safetensors", "--seqlen-q 8 --heads-q 2 --head-dim 8 --dtype f32 --dropout 0.3");
    let output = folder.path("output.safetensors");
    hattn_on("run --device cpu", &input, Some(&output)).fine();
    let file = std::fs::read(&output).expect("an output");
    assert!(SafeTensors::deserialize(&file).expect("a safetensors file").tensor("dropout_mask").is_err());
    std::fs::remove_file(&output).expect("a file of the test's own");

    let allowed = "--dropout-mask without dropout; allowed: --dropout above 0, or an input whose metadata has it";
    hattn_on("run --device cpu --dropout 0 --dropout-mask", &input, Some(&output)).refused(&[allowed]);
    let plain = folder.random("plain.safetensors", "--seqlen-q 8 --heads-q 2 --head-dim 8 --dtype f32");
    hattn_on("run --device cpu --dropout-mask", &plain, Some(&output)).refused(&[allowed]);
    hattn_on("run --device cpu --dropout 0.5 --dropout-mask", &plain, Some(&output)).fine();
    let (shape, mask) = read(&output, "dropout_mask");
    assert_eq!((shape, mask.len()), (vec![1, 2, 8, 8], 128));
    std::fs::remove_file(&output).expect("a file of the test's own");

    // So many pairs that no mask of them is made. The file has 2^17 queries and keys of one element.
    let long =
        folder.random("long.safetensors", "--seqlen-q 131072 --heads-q 1 --head-dim 1 --dtype f32 --dropout 0.3");
    let refused = hattn_on("run --device cpu --dropout-mask --mask window:1,0", &long, Some(&output));
    assert!(refused.code == Some(1) && !output.exists(), "{refused:?}");
    let part = "--dropout-mask of [1, 1, 131072, 131072]; allowed: up to 2^32 pairs of query and key";
    assert!(refused.stderr.contains(part), "{refused:?}");
}
