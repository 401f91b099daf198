//! The command line: what can be asked, and how each word is read.

mod bench;
mod words;

pub use bench::{BenchArgs, HarnessArg, PlotArgs, TuneArgs};
pub use words::{ArchArg, DTypeArg, DeviceArg, FileLayout, ScalingArg};

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use hopper_attention::Mask;

use words::parse_mask;

/// Exact attention on tensor files: O = softmax(mask(scale * Q K^T)) V, and its gradients.
#[derive(Debug, Parser)]
#[command(name = "hattn", version, propagate_version = true, max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Compute attention of q, k, v in a safetensors file and write o and lse, with --backward also the gradients
    Run(RunArgs),
    /// Compute, then compare with an f64 computation; fails past the tolerance
    Check(CheckArgs),
    /// List the devices of this machine and the kernels of this build
    Info(InfoArgs),
    /// Write a safetensors file with normally distributed q, k, v, with --backward also gradients of o and lse
    Random(RandomArgs),
    /// Time the forward, or the backward, beside every peer on this machine, in turn
    Bench(Box<BenchArgs>),
    /// Draw the charts of a report of `bench`, and the README's section on speed
    Plot(PlotArgs),
    /// Time the kernels that compute a shape against each other on this card, and note the fastest for `--tuning`
    Tune(Box<TuneArgs>),
}

#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub compute: ComputeArgs,
    /// Safetensors file to write: o in the input's type and layout, lse as f32 [batch, heads_q, seqlen_q]; with
    /// --backward also d_q, d_k and d_v, as q, k and v
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    #[command(flatten)]
    pub compute: ComputeArgs,
    /// Safetensors file to write as `run` does, when wanted; written whether or not the check passes
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct ComputeArgs {
    /// Safetensors file with q, k and v (and d_o with --backward), each bf16, f16 or f32
    #[arg(long, short, value_name = "FILE")]
    pub input: PathBuf,
    /// Also compute d_q, d_k and d_v, from d_o in the input, of o's shape and q's type, and from d_lse, f32
    /// [batch, heads_q, seqlen_q], where the input has one
    #[arg(long)]
    pub backward: bool,
    /// Gradients that are the same bits on every run, at some cost on a GPU
    #[arg(long, requires = "backward")]
    pub deterministic: bool,
    /// full, causal[:CORNER] or window:LEFT,RIGHT[:CORNER]. LEFT and RIGHT are counts of keys, `-` or `inf` for no
    /// bound; CORNER is bottom-right (the last query meets the last key, the default) or top-left
    #[arg(long, default_value = "full", value_parser = parse_mask)]
    pub mask: Mask,
    /// Softmax scale [default: 1/sqrt(head_dim of q)]
    #[arg(long, allow_negative_numbers = true)]
    pub scale: Option<f32>,
    /// How the file's 4-d tensors are laid out [default: what the file's metadata says under `layout`]
    #[arg(long)]
    pub layout: Option<FileLayout>,
    /// auto, cpu or cuda:N. auto takes a GPU that supports the problem, else the CPU, and says why
    #[arg(long, default_value = "auto")]
    pub device: DeviceArg,
    /// Compute with kernels for this instruction set alone [default: the GPU's own]
    #[arg(long)]
    pub arch: Option<ArchArg>,
    /// What `hattn tune` wrote: its choice of kernel where it knows the shape and the card, else the built-in rule
    #[arg(long, value_name = "FILE")]
    pub tuning: Option<PathBuf>,
    /// Convert q, k, v and d_o to this type first [default: compute in the file's type]
    #[arg(long)]
    pub dtype: Option<DTypeArg>,
    /// Quantise q, k and v (bf16 or f16) to e4m3 on the way and compute in FP8, with factors per-tensor (the default),
    /// per-head (of k and v, for each sequence) or per-block (128 rows of a head); o has the type of the input.
    /// They are quantised on the CPU
    #[arg(
        long,
        value_name = "SCALING",
        num_args = 0..=1,
        default_missing_value = "per-tensor",
        conflicts_with = "backward"
    )]
    pub fp8: Option<ScalingArg>,
    /// Before they are quantised, rotate q and k by the signs of this seed and a Hadamard transform, which leaves their
    /// products as they are and spreads outliers
    #[arg(long, value_name = "SEED", requires = "fp8")]
    pub hadamard: Option<u64>,
    /// Quantise q and k to 14 in magnitude at most, in place of 448, so that a GPU may sum scores in f16, which is faster
    #[arg(long, requires = "fp8")]
    pub half_scores: bool,
    /// Runs to time, the median counts [default: 1 on a CPU, 10 on a GPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub repeat: Option<u32>,
}

#[derive(Debug, Args)]
pub struct InfoArgs {
    /// Print only the table of supported problems, as Markdown
    #[arg(long)]
    pub markdown: bool,
    /// Put that table between the markers of this file instead of printing it
    #[arg(long, value_name = "FILE", requires = "markdown")]
    pub update: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct RandomArgs {
    /// Safetensors file to write
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
    /// Number of sequences
    #[arg(long, default_value_t = 1)]
    pub batch: usize,
    /// Queries in each sequence
    #[arg(long, default_value_t = 1024)]
    pub seqlen_q: usize,
    /// Keys in each sequence [default: seqlen_q]
    #[arg(long)]
    pub seqlen_kv: Option<usize>,
    /// Query heads
    #[arg(long, default_value_t = 8)]
    pub heads_q: usize,
    /// Key and value heads [default: heads_q]
    #[arg(long)]
    pub heads_kv: Option<usize>,
    /// Width of a head of q and k
    #[arg(long, default_value_t = 64)]
    pub head_dim: usize,
    /// Width of a head of v [default: head_dim]
    #[arg(long)]
    pub head_dim_vo: Option<usize>,
    /// Element type
    #[arg(long, default_value = "bf16")]
    pub dtype: DTypeArg,
    /// Layout of the tensors in the file, noted in its metadata
    #[arg(long, default_value = "bshd")]
    pub layout: FileLayout,
    /// Also d_o and d_lse, for `run --backward`
    #[arg(long)]
    pub backward: bool,
    /// The same seed gives the same file, and the same q, k and v with and without --backward
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
