//! Points whose Q, K and V are those of a file.

use std::cmp::Ordering;
use std::fmt;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use super::Point;

/// Characters of a file's name in names of points.
const LONGEST: usize = 60;

/// What a point says of the file that its Q, K and V are from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputFile {
    /// The file's name without its folder and ending. Letters, digits, `-`, `_` and `.`: see [`InputFile::word`].
    pub name: String,
    /// Sequences of the file. Sequence `i` of the point is sequence `i % sequences` of the file.
    pub sequences: usize,
    /// The softmax scale, where the file states another than 1 / sqrt(head dim).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<Scale>,
}

impl InputFile {
    /// The name of a file as a word in names of points and charts. Other characters become `-`.
    pub fn word(name: &str) -> String {
        let kept = name.chars().take(LONGEST).map(|c| if is_plain(c) { c } else { '-' });
        let word: String = kept.collect();
        if word.is_empty() { "-".into() } else { word }
    }

    /// Whether the name is a word, and the numbers are such that they can be used. A report may come from anywhere.
    pub(super) fn check(&self) -> Result<()> {
        ensure!(
            Self::word(&self.name) == self.name,
            "inputs of a file called {}; allowed: up to {LONGEST} letters, digits, `-`, `_` and `.`",
            crate::text::excerpt(&self.name, LONGEST)
        );
        ensure!(self.sequences > 0, "inputs of a file with 0 sequences; allowed: 1 and above");
        let scale = self.scale.map_or(1.0, |Scale(scale)| scale);
        ensure!(scale.is_finite() && scale > 0.0, "softmax scale {scale}; allowed: finite and above 0");
        Ok(())
    }
}

fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')
}

/// A softmax scale. Numbers of any kind are in one order, so that points can be compared.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Scale(pub f32);

impl PartialEq for Scale {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Scale {}

impl PartialOrd for Scale {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scale {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl fmt::Display for Scale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Point {
    /// Whether Q, K and V are normal numbers.
    pub fn is_normal(&self) -> bool {
        self.inputs.is_normal() && self.file.is_none()
    }

    /// What Q, K and V are: the name of their file, or the class that they are drawn of.
    pub fn inputs_name(&self) -> &str {
        self.file.as_ref().map_or(self.inputs.name(), |file| &file.name)
    }

    /// The same after a separator, or nothing where inputs are normal.
    pub fn named_inputs(&self, separator: &str) -> String {
        if self.is_normal() { String::new() } else { format!("{separator}{}", self.inputs_name()) }
    }

    /// The softmax scale where it is not the default.
    pub(super) fn own_scale(&self) -> Option<f32> {
        self.file.as_ref()?.scale.map(|Scale(scale)| scale)
    }

    /// The softmax scale, in f64 where it is the default.
    pub(crate) fn scale(&self) -> f64 {
        self.own_scale().map_or_else(|| 1.0 / (self.head_dim as f64).sqrt(), f64::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sweep;

    fn point(scale: Option<f32>) -> Point {
        let file = InputFile { name: "layer3".into(), sequences: 2, scale: scale.map(Scale) };
        Point { file: Some(file), ..Sweep::small().points().unwrap().remove(0) }
    }

    #[test]
    fn a_point_is_named_after_its_file() {
        let point = point(None);
        point.check().unwrap();
        assert_eq!(point.to_string(), "fwd/bf16/d64/full/s64/b4/h4/kv4/layer3");
        assert_eq!((point.family().as_str(), point.is_normal()), ("fwd-bf16-d64-full-layer3", false));
        assert!(point.matches("layer3/full") && !point.matches("layer"));
        let text = serde_json::to_string(&point).unwrap();
        assert!(text.contains(r#""file":{"name":"layer3","sequences":2}"#), "{text}");
        assert_eq!(serde_json::from_str::<Point>(&text).unwrap(), point);
        assert!(!serde_json::to_string(&Point { file: None, ..point }).unwrap().contains("file"));
    }

    #[test]
    fn names_are_words() {
        assert_eq!(InputFile::word("minilm_layer3"), "minilm_layer3");
        assert_eq!((InputFile::word("a b/ü\n").as_str(), InputFile::word("").as_str()), ("a-b---", "-"));
        assert_eq!(InputFile::word(&"x".repeat(1000)).len(), LONGEST);
        let named = |name: &str| {
            let file = InputFile { name: name.into(), ..point(None).file.unwrap() };
            Point { file: Some(file), ..point(None) }.check().is_ok()
        };
        assert!(named("a-b_c.1") && !named("../x") && !named("") && !named(&"x".repeat(1000)));
    }

    #[test]
    fn the_scale_is_that_of_the_file() {
        assert_eq!(point(None).scale(), 1.0 / 8.0);
        let other = point(Some(0.5));
        assert_eq!((other.scale(), other.problem().unwrap().softmax_scale()), (0.5, 0.5));
        assert_eq!(other.score(3.0, [0, 0, 0]), [1.5, 1.0]);
        assert!(serde_json::to_string(&other).unwrap().contains(r#""scale":0.5"#));
        assert!(point(Some(0.0)).check().is_err() && point(Some(f32::NAN)).check().is_err());
        assert_eq!(point(Some(f32::NAN)), point(Some(f32::NAN)));
    }
}
