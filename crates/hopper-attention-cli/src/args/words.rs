//! The words of the command line, which several commands share, and what each of them stands for.

use std::path::PathBuf;
use std::str::FromStr;

use clap::ValueEnum;
use hopper_attention::{Arch, Corner, DType, Dropout, Mask, Scaling};
use hopper_attention_verify::blocks::Blocks;
use hopper_attention_verify::sinks::Sinks;

/// The order of the dimensions in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FileLayout {
    /// [batch, seqlen, heads, head_dim]
    Bshd,
    /// [batch, heads, seqlen, head_dim]
    Bhsd,
    /// [total, heads, head_dim], packed sequences
    Thd,
}

impl FileLayout {
    pub fn name(self) -> &'static str {
        match self {
            Self::Bshd => "bshd",
            Self::Bhsd => "bhsd",
            Self::Thd => "thd",
        }
    }
}

/// Element types that the command line may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DTypeArg {
    /// bfloat16
    Bf16,
    /// IEEE half precision
    F16,
    /// IEEE single precision (CPU only)
    F32,
}

impl From<DTypeArg> for DType {
    fn from(arg: DTypeArg) -> Self {
        match arg {
            DTypeArg::Bf16 => Self::BF16,
            DTypeArg::F16 => Self::F16,
            DTypeArg::F32 => Self::F32,
        }
    }
}

/// Instruction sets that the command line may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ArchArg {
    /// Compute capability 8.0 (Ampere) and later
    Sm80,
    /// Compute capability 9.0 (Hopper) only
    Sm90,
}

impl From<ArchArg> for Arch {
    fn from(arg: ArchArg) -> Self {
        match arg {
            ArchArg::Sm80 => Self::Sm80,
            ArchArg::Sm90 => Self::Sm90,
        }
    }
}

/// How many elements share a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScalingArg {
    /// One factor for each of q, k and v
    #[value(name = "per-tensor")]
    Tensor,
    /// One for each sequence and KV head; of q, one for all query heads that read a KV head
    #[value(name = "per-head")]
    Head,
    /// One for each 128 tokens of a head
    #[value(name = "per-block")]
    Block,
}

impl From<ScalingArg> for Scaling {
    fn from(arg: ScalingArg) -> Self {
        match arg {
            ScalingArg::Tensor => Self::PerTensor,
            ScalingArg::Head => Self::PerHead,
            ScalingArg::Block => Self::PerBlock,
        }
    }
}

/// Where to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceArg {
    /// A GPU that supports the problem if there is one, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU with this ordinal.
    Cuda(usize),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|ordinal| ordinal.parse().ok())
                .map(Self::Cuda)
                .ok_or_else(|| "allowed: auto, cpu, cuda:N".into()),
        }
    }
}

/// `1` or `1/16`: the number below the line.
pub fn parse_density(text: &str) -> Result<u32, String> {
    let below = if text == "1" { Some("1") } else { text.strip_prefix("1/") };
    below
        .and_then(|number| number.parse().ok())
        .filter(|&number| number > 0)
        .ok_or_else(|| "1, or 1/N such as 1/16".into())
}

/// The masks that options take.
pub const MASKS: &str =
    "full, causal[:top-left], window:LEFT,RIGHT[:top-left], chunk:KEYS[:top-left], prefix:KEYS[:top-left]";

pub fn parse_mask(text: &str) -> Result<Mask, String> {
    let mut parts = text.split(':');
    let kind = parts.next().unwrap_or_default();
    let rest: Vec<&str> = parts.collect();
    match (kind, rest.as_slice()) {
        ("full", []) => Ok(Mask::Full),
        ("causal", []) => Ok(Mask::causal()),
        ("causal", [corner]) => Ok(Mask::Causal { corner: parse_corner(corner)? }),
        ("window", [bounds]) => parse_window(bounds, Corner::default()),
        ("window", [bounds, corner]) => parse_window(bounds, parse_corner(corner)?),
        ("chunk", [keys]) => parse_chunk(keys, Corner::default()),
        ("chunk", [keys, corner]) => parse_chunk(keys, parse_corner(corner)?),
        ("prefix", [keys]) => parse_prefix(keys, Corner::default()),
        ("prefix", [keys, corner]) => parse_prefix(keys, parse_corner(corner)?),
        _ => Err(format!("allowed: {MASKS}")),
    }
}

/// Lists of blocks of a command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockMaskArg {
    /// Drawn at random, or none.
    Kind(Blocks),
    /// Of the slices in a file.
    Slices(PathBuf),
    /// Causal behind a prefix of so many keys for each batch entry.
    Prefixes(Vec<i32>),
    /// Causal, and tokens of a span see each other: its first key, and the one after its last.
    Spans(Vec<[i32; 2]>),
}

impl FromStr for BlockMaskArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("slices", file)) if !file.is_empty() => Ok(Self::Slices(file.into())),
            Some(("prefixes", lengths)) => {
                let length = |text: &str| text.parse::<u32>().ok().and_then(|length| i32::try_from(length).ok());
                let lengths = lengths.split(',').map(length).collect::<Option<Vec<i32>>>();
                let wrong =
                    || format!("prefixes `{text}`; allowed: prefixes:N,N with a count of keys for each batch entry");
                lengths.map(Self::Prefixes).ok_or_else(wrong)
            }
            Some(("spans", spans)) => {
                let key = |text: &str| text.parse::<u32>().ok().and_then(|key| i32::try_from(key).ok());
                let span = |text: &str| text.split_once('-').and_then(|(first, end)| Some([key(first)?, key(end)?]));
                let spans = spans.split(',').map(span).collect::<Option<Vec<[i32; 2]>>>();
                let wrong = || format!("spans `{text}`; allowed: spans:A-B,A-B with keys A to below B of each");
                spans.map(Self::Spans).ok_or_else(wrong)
            }
            _ => text
                .parse()
                .map(Self::Kind)
                .map_err(|error| format!("{error}, slices:FILE, prefixes:N,N, spans:A-B,A-B")),
        }
    }
}

/// A share of a bound: a number from 0 to 1.
pub fn parse_share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| format!("share `{text}`; allowed: 0 to 1"))
}

/// A cap that is legal with every scale that `hattn fuzz` draws.
pub fn parse_softcap(text: &str) -> Result<f32, String> {
    let softcap = text.parse().ok().filter(|cap| *cap == 0.0 || (1e-3..=1e6).contains(cap));
    softcap.ok_or_else(|| format!("softcap `{text}`; allowed: 0, or 0.001 to 1000000"))
}

/// A kind of attention sinks, by the name of its variant in lower case.
pub fn parse_sinks(text: &str) -> Result<Sinks, String> {
    let name = |kind: &Sinks| format!("{kind:?}").to_lowercase();
    let named = Sinks::ALL.into_iter().find(|kind| name(kind) == text);
    named.ok_or_else(|| format!("sinks `{text}`; allowed: {}", Sinks::ALL.each_ref().map(name).join(", ")))
}

/// A probability of dropout as whole percent.
pub fn parse_percent(text: &str) -> Result<u32, String> {
    let allowed = || format!("dropout `{text}`; allowed: whole percent, 0.01 to 0.99");
    let percent = text.parse::<f64>().map_err(|_| allowed())? * 100.0;
    if !(0.5..99.5).contains(&percent) || (percent - percent.round()).abs() > 1e-9 {
        return Err(allowed());
    }
    Ok(percent.round() as u32)
}

/// A probability of dropout.
pub fn parse_dropout(text: &str) -> Result<Dropout, String> {
    let probability: f32 = text.parse().map_err(|_| format!("dropout `{text}`; allowed: 0 to below 1"))?;
    Dropout::new(probability).map_err(|error| error.to_string())
}

fn parse_corner(text: &str) -> Result<Corner, String> {
    match text {
        "bottom-right" => Ok(Corner::BottomRight),
        "top-left" => Ok(Corner::TopLeft),
        _ => Err(format!("corner `{text}`; allowed: bottom-right, top-left")),
    }
}

fn parse_chunk(text: &str, corner: Corner) -> Result<Mask, String> {
    let chunk = text.parse().ok().filter(|&keys: &usize| keys > 0);
    let chunk = chunk.ok_or_else(|| format!("chunk `{text}`; allowed: a count of keys, 1 or more"))?;
    Ok(Mask::Chunked { chunk, corner })
}

fn parse_prefix(text: &str, corner: Corner) -> Result<Mask, String> {
    let keys = text.parse().map_err(|_| format!("prefix `{text}`; allowed: a count of keys"))?;
    Ok(Mask::Prefix { keys, corner })
}

fn parse_window(text: &str, corner: Corner) -> Result<Mask, String> {
    let bound = |text: &str| match text {
        "-" | "inf" => Ok(None),
        _ => text.parse().map(Some).map_err(|_| format!("bound `{text}`; allowed: a count of keys, `-` or `inf`")),
    };
    match text.split_once(',') {
        Some((left, right)) => Ok(Mask::Window { left: bound(left)?, right: bound(right)?, corner }),
        None => Err(format!("window `{text}`; allowed: LEFT,RIGHT")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn block_masks() {
        assert_eq!("random:7".parse(), Ok(BlockMaskArg::Kind(Blocks::Random(7))));
        assert_eq!("slices:a:b.txt".parse(), Ok(BlockMaskArg::Slices("a:b.txt".into())));
        assert_eq!("prefixes:0,17".parse(), Ok(BlockMaskArg::Prefixes(vec![0, 17])));
        for wrong in ["prefixes:", "prefixes:-1", "prefixes:3;4", "prefixes:4294967295"] {
            assert!(wrong.parse::<BlockMaskArg>().unwrap_err().ends_with("for each batch entry"), "{wrong}");
        }
        assert_eq!("spans:3-9,20-20".parse(), Ok(BlockMaskArg::Spans(vec![[3, 9], [20, 20]])));
        for wrong in ["spans:", "spans:3", "spans:3-", "spans:-3-5", "spans:3-9;", "spans:0-4294967295"] {
            assert!(wrong.parse::<BlockMaskArg>().unwrap_err().ends_with("with keys A to below B of each"), "{wrong}");
        }
        for wrong in ["slices:", "slices", "some"] {
            assert!(
                wrong
                    .parse::<BlockMaskArg>()
                    .unwrap_err()
                    .ends_with("striped, slices:FILE, prefixes:N,N, spans:A-B,A-B"),
                "{wrong}"
            );
        }
    }

    #[test]
    fn sinks() {
        assert_eq!([parse_sinks("none"), parse_sinks("ten")], [Ok(Sinks::None), Ok(Sinks::Ten)]);
        for wrong in ["", "Ten", "some"] {
            let allowed = "allowed: none, normal, zero, nothing, ten, large, mixed";
            assert!(parse_sinks(wrong).unwrap_err().ends_with(allowed), "{wrong}");
        }
    }

    #[test]
    fn percents() {
        assert_eq!(["0.01", "0.1", "0.29", ".5", "0.99"].map(parse_percent), [Ok(1), Ok(10), Ok(29), Ok(50), Ok(99)]);
        for wrong in ["", "0", "1", "10", "-0.1", "0.125", "nan", "0.999"] {
            assert!(parse_percent(wrong).unwrap_err().ends_with("allowed: whole percent, 0.01 to 0.99"), "{wrong}");
        }
    }

    #[test]
    fn densities() {
        assert_eq!(["1", "1/2", "1/16"].map(parse_density), [Ok(1), Ok(2), Ok(16)]);
        for wrong in ["", "2", "0.5", "1/0", "1/-2", "1/", "1/99999999999"] {
            assert!(parse_density(wrong).unwrap_err().starts_with("1, or 1/N"), "{wrong}");
        }
    }

    #[test]
    fn masks() {
        let top_left = Corner::TopLeft;
        assert_eq!(parse_mask("full"), Ok(Mask::Full));
        assert_eq!(parse_mask("causal"), Ok(Mask::causal()));
        assert_eq!(parse_mask("causal:bottom-right"), Ok(Mask::causal()));
        assert_eq!(parse_mask("causal:top-left"), Ok(Mask::Causal { corner: top_left }));
        assert_eq!(parse_mask("window:64,0"), Ok(Mask::window(Some(64), Some(0))));
        assert_eq!(parse_mask("window:-,inf"), Ok(Mask::window(None, None)));
        let expected = Mask::Window { left: Some(1), right: None, corner: top_left };
        assert_eq!(parse_mask("window:1,-:top-left"), Ok(expected));
        assert_eq!(parse_mask("chunk:8192"), Ok(Mask::chunked(8192)));
        assert_eq!(parse_mask("chunk:1:top-left"), Ok(Mask::Chunked { chunk: 1, corner: top_left }));
        assert_eq!(parse_mask("prefix:0"), Ok(Mask::prefix(0)));
        assert_eq!(parse_mask("prefix:7:top-left"), Ok(Mask::Prefix { keys: 7, corner: top_left }));
        for text in ["chunk", "chunk:", "chunk:0", "chunk:-1", "chunk:1,2", "prefix", "prefix:x", "prefix:1:left"] {
            assert!(parse_mask(text).is_err(), "{text:?} was read as a mask");
        }
        let bad = ["", "Full", "full:top-left", "causal:", "causal:left", "window", "window:1", "window:1,2,3"];
        for text in bad.into_iter().chain(["window:-1,0", "window:1,x", "window:1,2:top-left:x"]) {
            assert!(parse_mask(text).is_err(), "{text:?} was read as a mask");
        }
    }

    #[test]
    fn devices() {
        assert_eq!("auto".parse(), Ok(DeviceArg::Auto));
        assert_eq!("cpu".parse(), Ok(DeviceArg::Cpu));
        assert_eq!("cuda:3".parse(), Ok(DeviceArg::Cuda(3)));
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x"] {
            assert!(text.parse::<DeviceArg>().is_err(), "{text:?} was read as a device");
        }
    }
}
