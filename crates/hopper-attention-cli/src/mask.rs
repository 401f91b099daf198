//! `hattn mask`: which keys each query keeps, as a picture.

use std::fmt::Write as _;

use anyhow::{Result, ensure};
use hopper_attention::Mask;

use crate::args::MaskArgs;
use crate::output::AtomicFile;
use crate::report;

/// The most rows and columns that are drawn. Of more, each stands for several.
const MOST: usize = 64;
/// The most queries and keys of a picture in a file.
const MOST_PIXELS: usize = 1 << 26;

/// `hattn mask`.
pub fn mask(args: &MaskArgs) -> Result<()> {
    let (queries, keys) = (args.seqlen_q, args.seqlen_kv.unwrap_or(args.seqlen_q));
    match &args.pgm {
        None => report::plain(&picture(args.mask, queries, keys)),
        Some(path) => {
            let pixels = queries.checked_mul(keys).filter(|&pixels| pixels <= MOST_PIXELS);
            ensure!(pixels.is_some(), "--pgm takes up to 2^26 pairs of query and key, not {queries} x {keys}");
            let picture = pgm(args.mask, queries, keys);
            AtomicFile::create(path)?.finish(|writer| writer.write_all(&picture))?;
            report::line("written", path.display());
        }
    }
    Ok(())
}

/// A row of text for each query, or for several: `#` where all pairs are kept, `+` where some are, `.` where none is.
fn picture(mask: Mask, queries: usize, keys: usize) -> String {
    let band = mask.band(queries, keys);
    let (rows, columns) = (queries.div_ceil(MOST).max(1), keys.div_ceil(MOST).max(1));
    let kept: u64 = (0..queries).map(|q| band.keys(q, keys)).map(|(first, end)| (end - first) as u64).sum();
    let mut text = format!("{mask}, {queries} queries, {keys} keys, {kept} pairs kept\n");
    if rows > 1 || columns > 1 {
        writeln!(text, "a character is {rows} queries and {columns} keys").expect("memory takes all");
    }
    for first_row in (0..queries).step_by(rows) {
        let of_rows: Vec<_> = (first_row..(first_row + rows).min(queries)).map(|q| band.keys(q, keys)).collect();
        for first_key in (0..keys).step_by(columns) {
            let end_key = (first_key + columns).min(keys);
            let count = |&(first, end): &(usize, usize)| end.min(end_key).saturating_sub(first.max(first_key));
            let kept: usize = of_rows.iter().map(count).sum();
            text.push(match kept {
                0 => '.',
                all if all == of_rows.len() * (end_key - first_key) => '#',
                _ => '+',
            });
        }
        text.push('\n');
    }
    text
}

/// A picture in the format PGM, a byte for each pair.
fn pgm(mask: Mask, queries: usize, keys: usize) -> Vec<u8> {
    let band = mask.band(queries, keys);
    let mut bytes = format!("P5\n{keys} {queries}\n255\n").into_bytes();
    for q in 0..queries {
        let (first, end) = band.keys(q, keys);
        bytes.extend((0..keys).map(|key| if (first..end).contains(&key) { 0 } else { 255 }));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_for_each_pair() {
        let drawn = picture(Mask::chunked(3), 4, 5);
        assert_eq!(drawn, "chunk 3, 4 queries, 5 keys, 8 pairs kept\n##...\n###..\n...#.\n...##\n");
        assert!(picture(Mask::prefix(2), 2, 4).ends_with(" kept\n###.\n####\n"));
        assert_eq!(picture(Mask::Full, 0, 3), "full, 0 queries, 3 keys, 0 pairs kept\n");
    }

    #[test]
    fn long_sequences_are_drawn_smaller() {
        let drawn = picture(Mask::causal(), 128, 192);
        let lines: Vec<&str> = drawn.lines().collect();
        assert_eq!(lines[1], "a character is 2 queries and 3 keys");
        assert!(lines.len() == 66 && lines[2..].iter().all(|line| line.len() == 64), "{drawn}");
        assert!(lines[65].ends_with("#+"), "{drawn}");
    }

    #[test]
    fn a_pixel_for_each_pair() {
        assert_eq!(pgm(Mask::causal(), 2, 2), b"P5\n2 2\n255\n\x00\xff\x00\x00");
    }
}
