//! Records of one long sequence as charts: our rate by length, the clock taken out.
//!
//! Such a record is a text called `growth.txt` with a line a problem, as `benches/record/h100/2026-11-25-growth` has them: the pass, the
//! head dim, the mask, the tokens, query heads / KV heads, TFLOP/s, and the clock of the SMs meanwhile. What follows is not read.
//!
//! ```text
//! bwd d64 causal 8k h16/4: hopper-attention 570 (1980.0 MHz); 0.5 s
//! ```
//!
//! A chart shows the problems of one pass and one mask. A line is one head dim and one number of query heads that share a KV head.

use std::path::Path;

use anyhow::{Context as _, Result, anyhow, ensure};

use crate::chart::{Chart, draw_ratios};
use crate::{Direction, distinct};

/// The length that the others are held against.
const BASE: &str = "16k";

/// A problem's line.
#[derive(Debug, PartialEq)]
struct Entry {
    pass: Direction,
    head_dim: String,
    mask: String,
    tokens: String,
    /// Query heads that share a KV head.
    group: usize,
    /// TFLOP/s for each MHz.
    rate: f64,
}

/// Whether a record is such a text.
pub fn is_record(record: &Path) -> bool {
    record.file_name().is_some_and(|name| name == "growth.txt")
}

/// The charts of a record: `growth-backward-causal.svg` and others.
///
/// # Errors
/// When there is no such line, or a line's problem is not there at 16k tokens.
pub fn charts(text: &str) -> Result<Vec<Chart>> {
    let entries: Vec<Entry> = text.lines().filter_map(entry).collect();
    ensure!(
        !entries.is_empty(),
        "growth.txt has no line such as `bwd d64 causal 8k h16/4: hopper-attention 570 (1980.0 MHz)`"
    );
    distinct(entries.iter().map(|entry| (entry.pass, entry.mask.clone())))
        .into_iter()
        .map(|(pass, mask)| {
            let own: Vec<&Entry> = entries.iter().filter(|e| (e.pass, &e.mask) == (pass, &mask)).collect();
            chart(pass, &mask, &own)
        })
        .collect()
}

/// The chart of a pass and a mask.
fn chart(pass: Direction, mask: &str, entries: &[&Entry]) -> Result<Chart> {
    let mut tokens = distinct(entries.iter().map(|entry| entry.tokens.clone()));
    tokens.sort_by_key(|tokens| thousands(tokens));
    let line = |(head_dim, group): (String, usize)| {
        let of_line: Vec<_> = entries.iter().filter(|e| (&e.head_dim, e.group) == (&head_dim, group)).collect();
        let base = of_line.iter().find(|entry| entry.tokens == BASE);
        let base =
            base.with_context(|| format!("growth.txt: {pass} d{head_dim} {mask} has no line of {BASE} tokens"))?;
        let place = |of: &str| tokens.iter().position(|tokens| tokens == of);
        let mut points: Vec<(usize, f64)> =
            of_line.iter().filter_map(|entry| Some((place(&entry.tokens)?, entry.rate / base.rate))).collect();
        points.sort_unstable_by_key(|&(at, _)| at);
        let shared = if group == 1 { String::new() } else { format!(", GQA {group}") };
        Ok((format!("d{head_dim}{shared}"), points))
    };
    let lines: Vec<_> =
        distinct(entries.iter().map(|e| (e.head_dim.clone(), e.group))).into_iter().map(line).collect::<Result<_>>()?;
    let title = format!("Attention {}, bf16, one long sequence, {mask} mask", pass.word());
    let about = format!("TFLOP/s for each MHz of the clock, over those at {BASE} tokens");
    let svg = draw_ratios(&title, &about, &tokens, &lines, "rate per MHz / that at 16k")
        .map_err(|error| anyhow!("drawing {title}: {error}"))?;
    Ok(Chart { file: format!("growth-{}-{mask}.svg", pass.word()), title, svg })
}

/// The number before the k.
fn thousands(tokens: &str) -> Option<usize> {
    tokens.strip_suffix('k')?.parse().ok()
}

/// The problem of a line.
fn entry(line: &str) -> Option<Entry> {
    let (problem, measured) = line.split_once(": hopper-attention ")?;
    let [pass, head_dim, mask, tokens, heads] = problem.split_whitespace().collect::<Vec<_>>().try_into().ok()?;
    let pass = Direction::ALL.into_iter().find(|direction| direction.to_string() == pass)?;
    let (queries, keys) = heads.strip_prefix('h')?.split_once('/')?;
    let [queries, keys]: [usize; 2] = [queries.parse().ok()?, keys.parse().ok()?];
    let (rate, clock) = measured.split_once(" (")?;
    let [rate, clock]: [f64; 2] = [rate.parse().ok()?, clock.split_once(" MHz)")?.0.parse().ok()?];
    let sound = keys > 0 && queries % keys.max(1) == 0 && rate > 0.0 && clock > 0.0 && thousands(tokens).is_some();
    sound.then(|| Entry {
        pass,
        head_dim: head_dim.trim_start_matches('d').into(),
        mask: mask.into(),
        tokens: tokens.into(),
        group: queries / keys,
        rate: rate / clock,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "bwd d64 causal 16k h16/4: hopper-attention 600 (2000.0 MHz); 0.1 s\n\
        bwd d64 causal 8k h16/4: hopper-attention 540 (2000.0 MHz); 0.5 s\n\
        bwd d64 causal 256k h8/2: hopper-attention 450 (1500.0 MHz); 1.4 s\n\
        bwd d128 causal 16k h16/16: hopper-attention 700 (1750.0 MHz); 0.1 s\n\
        fwd d64 full 16k h16/16: hopper-attention 1 (1.0 MHz)\nwords: and more\n";

    #[test]
    fn a_chart_shows_rates_without_the_clock() {
        let charts = charts(TEXT).unwrap();
        let files: Vec<&str> = charts.iter().map(|chart| chart.file.as_str()).collect();
        assert_eq!(files, ["growth-backward-causal.svg", "growth-forward-full.svg"]);
        assert_eq!(charts[0].title, "Attention backward, bf16, one long sequence, causal mask");
        let document = roxmltree::Document::parse(&charts[0].svg).expect("well-formed XML");
        let texts: Vec<&str> = document.descendants().filter_map(|node| node.text()).map(str::trim).collect();
        // 450 at 1500 MHz is the rate of 600 at 2000.
        for text in ["d64, GQA 4 1.00", "d128 1.00", "8k", "16k", "256k"] {
            assert!(texts.contains(&text), "{text}: {texts:?}");
        }
        let rates: Vec<f64> = TEXT.lines().filter_map(entry).map(|entry| entry.rate).collect();
        assert_eq!(rates, [0.3, 0.27, 0.3, 0.4, 1.0]);
    }

    #[test]
    fn other_texts_have_none() {
        assert!(charts("words\n").is_err());
        let lost = charts("fwd d64 full 8k h4/4: hopper-attention 5 (9 MHz)\n").map(|_| ()).unwrap_err().to_string();
        assert_eq!(lost, "growth.txt: fwd d64 full has no line of 16k tokens");
        for wrong in ["h4/0", "h4/3", "4/4", "h4"] {
            assert_eq!(entry(&format!("fwd d64 full 8k {wrong}: hopper-attention 5 (9 MHz)")), None, "{wrong}");
        }
        assert!(is_record(Path::new("a/growth.txt")) && !is_record(Path::new("a/fa4-growth.txt")));
    }
}
