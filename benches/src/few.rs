//! Records of few heads as charts: another library's time over ours.
//!
//! Such a record is a text with a line a problem, as `benches/record/h100/2026-11-25-clusters` has them: query heads / KV heads,
//! batch x queries x keys, head dim, mask, and medians in microseconds (in brackets TFLOP/s, which are not read).
//!
//! ```text
//! 8/1 1x2048x2048 d128 c: new=65.9(326) fa4=93.3(230)
//! ```
//!
//! A chart shows the problems of one sequence, with as many queries as keys, of one head dim and one mask. A line is one number
//! of heads. Other lines of the text have no chart.

use std::path::Path;

use anyhow::{Context as _, Result, anyhow, ensure};

use crate::chart::{Chart, draw_ratios};
use crate::text::thousands;
use crate::{Report, distinct, growth};

/// Query heads and KV heads that count as few: a model on several cards, or a small one.
const FEW: [&str; 5] = ["8/1", "16/4", "32/8", "4/4", "16/16"];

/// A problem's line.
#[derive(Debug, PartialEq)]
struct Entry {
    heads: String,
    tokens: usize,
    head_dim: String,
    mask: char,
    /// Of ours and of the other library, in microseconds.
    times: [f64; 2],
}

/// Whether a record is such a text.
pub fn is_text(record: &Path) -> bool {
    record.extension().is_some_and(|extension| extension == "txt")
}

/// The charts of a record of any kind: a report of `hattn bench`, such a text, or one of long sequences.
///
/// # Errors
/// When the record cannot be read, or has nothing to draw.
pub fn charts_of(record: &Path) -> Result<Vec<Chart>> {
    if growth::is_record(record) {
        growth::charts(&crate::text::read(record)?)
    } else if is_text(record) {
        charts(record, &crate::text::read(record)?)
    } else {
        crate::chart::charts(&Report::load(record)?)
    }
}

/// The charts of a record, whose name says the pass: `fa4-backward.txt` gives `fa4-backward-d128-causal.svg` and others.
///
/// # Errors
/// When the name says no pass, or when no line has a chart.
pub fn charts(record: &Path, text: &str) -> Result<Vec<Chart>> {
    let stem = record.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let named = stem.split_once('-').filter(|(_, pass)| ["forward", "backward"].contains(pass));
    let (peer, pass) = named.with_context(|| format!("{}: no name such as fa4-backward.txt", record.display()))?;
    let entries: Vec<Entry> = text.lines().filter_map(|line| entry(line, peer)).collect();
    ensure!(!entries.is_empty(), "{} has no line of few heads and {peer}", record.display());
    let families = distinct(entries.iter().map(|entry| (entry.head_dim.clone(), entry.mask)));
    let chart = |(head_dim, mask): &(String, char)| {
        let own: Vec<&Entry> = entries.iter().filter(|e| e.head_dim == *head_dim && e.mask == *mask).collect();
        let mut tokens = distinct(own.iter().map(|entry| entry.tokens));
        tokens.sort_unstable();
        let mask = if *mask == 'c' { "causal" } else { "full" };
        let lines: Vec<(String, Vec<(usize, f64)>)> = FEW
            .iter()
            .map(|heads| {
                let of_heads = own.iter().filter(|entry| entry.heads == *heads);
                let place = |tokens_of: usize| tokens.iter().position(|&tokens| tokens == tokens_of);
                let ratio = |entry: &&Entry| Some((place(entry.tokens)?, entry.times[1] / entry.times[0]));
                let mut points: Vec<(usize, f64)> = of_heads.filter_map(ratio).collect();
                points.sort_unstable_by_key(|&(at, _)| at);
                (format!("{heads} heads"), points)
            })
            .filter(|(_, points)| !points.is_empty())
            .collect();
        let title = format!("Attention {pass}, bf16, few heads, head dim {head_dim}, {mask} mask");
        let about = format!("time of {peer} over ours, one sequence; query heads / KV heads");
        let labels: Vec<String> = tokens.iter().copied().map(thousands).collect();
        let svg = draw_ratios(&title, &about, &labels, &lines, "their time / ours")
            .map_err(|error| anyhow!("drawing {title}: {error}"))?;
        Ok(Chart { file: format!("{stem}-d{head_dim}-{mask}.svg"), title, svg })
    };
    families.iter().map(chart).collect()
}

/// The problem of a line that has a chart.
fn entry(line: &str, peer: &str) -> Option<Entry> {
    let (problem, times) = line.split_once(": ")?;
    let [heads, sizes, head_dim, mask] = problem.split_whitespace().collect::<Vec<_>>().try_into().ok()?;
    let sizes: Vec<usize> = sizes.split('x').map(|size| size.parse().ok()).collect::<Option<_>>()?;
    let [1, queries, keys] = sizes[..] else { return None };
    if queries != keys || !FEW.contains(&heads) || !["c", "f"].contains(&mask) {
        return None;
    }
    let time = |name: &str| {
        let value = times.split_whitespace().find_map(|part| part.strip_prefix(name)?.strip_prefix('='))?;
        value.split('(').next()?.parse::<f64>().ok().filter(|time| *time > 0.0)
    };
    Some(Entry {
        heads: heads.into(),
        tokens: queries,
        head_dim: head_dim.strip_prefix('d')?.into(),
        mask: mask.chars().next()?,
        times: [time("new")?, time(peer)?],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "8/1 1x512x512 d128 c: new=26.0(52) fa4=39.0(34)\n4/4 1x512x512 d128 c: new=10 fa4=9\n\
        8/1 1x2048x2048 d128 c: new=60.0(326) fa4=90.0(230)\n8/1 1x512x512 d64 f: new=10 fa4=12\n\
        32/32 32x512x512 d128 c: new=1 fa4=1\n8/1 1x128x512 d128 c: new=1 fa4=1\n# words: and more\n";

    #[test]
    fn lines_of_other_problems_have_no_chart() {
        let entries: Vec<Entry> = TEXT.lines().filter_map(|line| entry(line, "fa4")).collect();
        let of = |heads: &str, tokens, head_dim: &str, mask, times| Entry {
            heads: heads.into(),
            tokens,
            head_dim: head_dim.into(),
            mask,
            times,
        };
        assert_eq!(
            entries,
            [
                of("8/1", 512, "128", 'c', [26.0, 39.0]),
                of("4/4", 512, "128", 'c', [10.0, 9.0]),
                of("8/1", 2048, "128", 'c', [60.0, 90.0]),
                of("8/1", 512, "64", 'f', [10.0, 12.0]),
            ]
        );
    }

    #[test]
    fn a_chart_shows_the_ratios() {
        let charts = charts(Path::new("x/fa4-backward.txt"), TEXT).unwrap();
        let files: Vec<&str> = charts.iter().map(|chart| chart.file.as_str()).collect();
        assert_eq!(files, ["fa4-backward-d128-causal.svg", "fa4-backward-d64-full.svg"]);
        assert_eq!(charts[0].title, "Attention backward, bf16, few heads, head dim 128, causal mask");
        let document = roxmltree::Document::parse(&charts[0].svg).expect("well-formed XML");
        let texts: Vec<&str> = document.descendants().filter_map(|node| node.text()).map(str::trim).collect();
        for text in ["8/1 heads 1.50", "4/4 heads 0.90", "512", "2k"] {
            assert!(texts.contains(&text), "{text}: {texts:?}");
        }
        assert!(super::charts(Path::new("final.txt"), TEXT).is_err());
        assert!(super::charts(Path::new("fa4-forward.txt"), "nothing\n").is_err());
    }
}
