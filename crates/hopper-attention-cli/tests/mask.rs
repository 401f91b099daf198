//! `hattn mask`, and lists of blocks of slices and prefixes: drawn, written by `hattn random`, computed, and refused.

mod common;

use std::path::Path;

use common::{Folder, hattn, hattn_on};

/// The pixels of a picture: whether each pair is kept. Row after row.
fn pixels(path: &Path) -> Vec<Vec<bool>> {
    let file = std::io::BufReader::new(std::fs::File::open(path).expect("the picture"));
    let mut reader = png::Decoder::new(file).read_info().expect("a PNG");
    let (width, height) = (reader.info().width as usize, reader.info().height as usize);
    assert_eq!((reader.info().bit_depth, reader.info().color_type), (png::BitDepth::One, png::ColorType::Grayscale));
    let mut rows = Vec::new();
    while let Some(row) = reader.next_row().expect("a row") {
        rows.push((0..width).map(|at| row.data()[at / 8] >> (7 - at % 8) & 1 == 0).collect());
    }
    assert_eq!(rows.len(), height);
    rows
}

fn pairs(rows: &[Vec<bool>]) -> usize {
    rows.iter().flatten().filter(|&&kept| kept).count()
}

#[test]
fn a_mask_is_drawn_and_written() {
    let folder = Folder::new();
    let path = folder.path("mask.png");
    let png = path.to_str().expect("a UTF-8 path");
    let text = hattn(["mask", "--seqlen-q", "3", "--seqlen-kv", "5"]).fine();
    assert_eq!(text, "causal, 3 queries, 5 keys, 12 pairs kept\n###..\n####.\n#####\n");
    let line = format!("mask --mask window:4,2:top-left --seqlen-q 21 --seqlen-kv 30 --png {png}");
    let text = hattn(line.split_whitespace()).fine();
    assert!(text.starts_with("written "), "{text}");
    let rows = pixels(&path);
    for (q, row) in rows.iter().enumerate() {
        for (kv, &kept) in row.iter().enumerate() {
            assert_eq!(kept, kv + 4 >= q && kv <= q + 2, "query {q}, key {kv}");
        }
    }
    assert_eq!((rows.len(), rows[0].len()), (21, 30));
    let refused = |line: &str, text: &str| hattn(line.split_whitespace()).refused(&[text]);
    refused(&format!("mask --seqlen-q 0 --png {png}"), "--png takes 1 to 2^26 pairs of query and key, not 0 x 0");
    refused(&format!("mask --seqlen-q 8193 --png {png}"), "not 8193 x 8193");
    refused("mask --block-mask prefixes:3 --batch-entry 1", "--batch-entry 1; allowed: 0 to below 1");
    refused("mask --block-mask all --head 99999999", "--block-mask takes up to 2^30 pairs");
    refused("mask --block-mask all --seqlen-q 9999999999", "--block-mask takes up to 2^30 pairs");
    // Nothing came in the place of the first picture.
    assert_eq!(pixels(&path), rows);
}

/// Slices of a file: what `mask` draws of them, what `random` writes, and what `mask` draws of that is the definition's.
#[test]
fn slices_are_drawn_written_and_computed() {
    let folder = Folder::new();
    let file = folder.path("slices.txt");
    let text = "0 140 0 140 1  # causal\n140 200 0 100 0\n140 200 100 210 3\n# no pair: more queries than keys\n0 140 200 205 3\n";
    std::fs::write(&file, text).expect("a folder of the test's own");
    let kind = format!("slices:{}", file.display());
    let keep = |q: usize, kv: usize| match q {
        ..140 => kv <= q,
        _ => kv < 100 || (q - 140 <= kv - 100 && kv - 100 <= q - 140 + 110 - 60),
    };
    let path = folder.path("mask.png");
    let png = path.to_str().expect("a UTF-8 path");
    let sizes = "--seqlen-q 200 --seqlen-kv 210";
    hattn(format!("mask {sizes} --block-mask {kind} --png {png}").split_whitespace()).fine();
    let rows = pixels(&path);
    for (q, row) in rows.iter().enumerate() {
        for (kv, &kept) in row.iter().enumerate() {
            assert_eq!(kept, keep(q, kv), "query {q}, key {kv}");
        }
    }
    let drawn = hattn(format!("mask {sizes} --block-mask {kind}").split_whitespace()).fine();
    assert!(
        drawn.starts_with(&format!("full and lists of blocks, 200 queries, 210 keys, {} pairs kept\n", pairs(&rows)))
    );

    for layout in ["bshd", "bhsd"] {
        let options = format!("--batch 2 {sizes} --heads-q 2 --head-dim 8 --dtype f32 --backward --layout {layout}");
        let input = folder.random("qkv.safetensors", &format!("{options} --block-mask {kind}"));
        hattn_on(&format!("mask --png {png} --batch-entry 1 --head 1"), &input, None).fine();
        assert_eq!(pixels(&path), rows);
        let checked = hattn_on("check --backward --device cpu", &input, None).fine();
        assert!(checked.contains("block_mask") && checked.contains("passed"), "{checked}");
    }
    let plain = folder.random("plain.safetensors", "--seqlen-q 20 --heads-q 1 --head-dim 8");
    hattn_on("mask", &plain, None).refused(&["no lists of a block mask"]);
    let packed = folder.random("packed.safetensors", "--seqlen-q 20 --heads-q 1 --head-dim 8 --packed");
    hattn_on("mask", &packed, None).refused(&["packed sequences; allowed: dense ones"]);

    let refused = |text: &str, error: &str| {
        std::fs::write(&file, text).expect("a folder of the test's own");
        hattn(format!("mask {sizes} --block-mask {kind}").split_whitespace()).refused(&["slices.txt", error]);
    };
    refused("0 5 0 5", "line 1: `0 5 0 5`; allowed: five numbers, Q0 Q1 K0 K1 TYPE");
    refused("0 5 0 5 9", "line 1: type of a slice: 9");
    refused("0 201 0 5 0", "slices: queries 0 to 201 of slice 0; allowed: 0 to 200");
    refused(
        "0 9 0 9 0\n3 4 8 9 1",
        "slice 0 (full queries 0 to 9 keys 0 to 9) and slice 1 (causal queries 3 to 4 keys 8 to 9)",
    );
    hattn(["mask", "--block-mask", "slices:/no/such/file"]).refused(&["slices /no/such/file", "cannot be opened"]);
}

#[test]
fn prefixes_differ_between_batch_entries() {
    let folder = Folder::new();
    let options = "--batch 3 --seqlen-q 150 --heads-q 2 --head-dim 8 --dtype f32 --backward";
    let input = folder.random("qkv.safetensors", &format!("{options} --block-mask prefixes:0,70,150"));
    let path = folder.path("mask.png");
    for (entry, prefix) in [0, 70, 150].into_iter().enumerate() {
        let line = format!("mask --batch-entry {entry} --png {}", path.display());
        hattn_on(&line, &input, None).fine();
        let rows = pixels(&path);
        assert!((0..150).all(|q| (0..150).all(|kv| rows[q][kv] == (kv < prefix || kv <= q))), "{entry}");
        let line = format!(
            "mask --block-mask prefixes:0,70,150 --seqlen-q 150 --batch-entry {entry} --png {}",
            path.display()
        );
        hattn(line.split_whitespace()).fine();
        assert_eq!(pixels(&path), rows);
    }
    let checked = hattn_on("check --backward --device cpu", &input, None).fine();
    assert!(checked.contains("per batch") && checked.contains("passed"), "{checked}");
    let line = format!("random --output {} {options} --block-mask prefixes:0,70", path.display());
    hattn(line.split_whitespace()).refused(&["prefixes: shape [2], expected [3] [batch]"]);
}
