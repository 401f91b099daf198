//! `hattn mask`, and lists of blocks of slices and prefixes: drawn, written by `hattn random`, computed, and refused.

mod common;

use std::path::Path;

use common::{Folder, bytes, hattn, hattn_on};
use safetensors::Dtype;

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

/// A query of a packed sequence keeps keys of its own sequence alone, as the mask has it for so many queries and keys.
#[test]
fn packed_sequences_are_drawn() {
    let folder = Folder::new();
    let list = |numbers: &[i32]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    let file = |used: &[(&'static str, Dtype, &'static [usize], Vec<u8>)]| {
        let tensors: [(&str, Dtype, &[usize], Vec<u8>); 4] = [
            ("q", Dtype::F32, &[7, 1, 2], bytes(&[0.0; 14])),
            ("k", Dtype::F32, &[9, 1, 2], bytes(&[0.0; 18])),
            ("cu_seqlens_q", Dtype::I32, &[4], list(&[1, 3, 3, 7])),
            ("cu_seqlens_kv", Dtype::I32, &[4], list(&[0, 4, 5, 9])),
        ];
        folder.typed("packed.safetensors", Some("thd"), &[&tensors[..], used].concat())
    };
    let rows = [".........", "###......", "####.....", ".....#...", ".....##..", ".....###.", ".....####"];
    let text = |what: &str, pairs: usize, rows: &[&str]| {
        format!("{what} of 3 packed sequences, 7 queries, 9 keys, {pairs} pairs kept\n{}\n", rows.join("\n"))
    };
    let input = file(&[]);
    assert_eq!(hattn_on("mask", &input, None).fine(), text("causal", 17, &rows));
    let window = [".........", "..##.....", "...#.....", ".....##..", "......##.", ".......##", "........#"];
    assert_eq!(hattn_on("mask --mask window:0,1", &input, None).fine(), text("window left 0 right 1", 10, &window));
    let path = folder.path("mask.png");
    hattn_on(&format!("mask --png {}", path.display()), &input, None).fine();
    let drawn = pixels(&path);
    let of_row = |row: &&str| row.chars().map(|kept| kept == '#').collect::<Vec<_>>();
    assert_eq!(drawn, rows.iter().map(of_row).collect::<Vec<_>>());
    hattn_on("mask --head 1", &input, None).refused(&["--head with packed sequences"]);

    let input = file(&[("seqused_kv", Dtype::I32, &[3], list(&[4, 0, 2]))]);
    let used = [".........", "###......", "####.....", ".........", ".........", ".....#...", ".....##.."];
    assert_eq!(hattn_on("mask", &input, None).fine(), text("causal", 10, &used));
    let input = file(&[("seqused_kv", Dtype::I32, &[3], list(&[4, 0, 5]))]);
    hattn_on("mask", &input, None).refused(&["packed.safetensors", "seqused_kv: 5 at 2"]);
    let random = folder.random("random.safetensors", "--seqlen-q 20 --heads-q 1 --head-dim 8 --packed");
    assert!(
        hattn_on("mask", &random, None).fine().starts_with("causal of 1 packed sequences, 20 queries, 20 keys, 210")
    );
}

/// Tokens of a span see each other in both directions, and others the keys up to their own.
#[test]
fn spans_are_drawn_written_and_computed() {
    let folder = Folder::new();
    let keep = |q: usize, kv: usize| {
        let span = |range: std::ops::Range<usize>| range.contains(&q) && range.contains(&kv);
        kv <= q || span(3..9) || span(120..150)
    };
    let path = folder.path("mask.png");
    let line = format!("mask --seqlen-q 160 --block-mask spans:3-9,120-150 --png {}", path.display());
    hattn(line.split_whitespace()).fine();
    let rows = pixels(&path);
    assert!((0..160).all(|q| (0..160).all(|kv| rows[q][kv] == keep(q, kv))));
    let options = "--batch 2 --seqlen-q 160 --heads-q 2 --head-dim 8 --dtype f32 --backward";
    let input = folder.random("qkv.safetensors", &format!("{options} --block-mask spans:3-9,120-150"));
    hattn_on(&format!("mask --batch-entry 1 --png {}", path.display()), &input, None).fine();
    assert_eq!(pixels(&path), rows);
    let checked = hattn_on("check --backward --device cpu", &input, None).fine();
    assert!(checked.contains("block_mask") && checked.contains("passed"), "{checked}");
    hattn("mask --seqlen-q 20 --block-mask spans:3-21".split(' ')).refused(&["spans: 3 to 21, span 0"]);
    let ran = hattn("mask --block-mask spans:3".split(' '));
    assert!(ran.code == Some(2) && ran.stderr.contains("allowed: spans:A-B,A-B"), "{ran:?}");
}
