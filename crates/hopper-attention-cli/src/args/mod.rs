//! The command line: what can be asked, and how each word is read.

mod bench;
mod words;

pub use bench::{BenchArgs, HarnessArg, PlotArgs, TuneArgs};
pub use words::{ArchArg, BlockMaskArg, DTypeArg, DeviceArg, FileLayout, ScalingArg, parse_dropout};

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use hopper_attention::{Dropout, Mask};
use hopper_attention_verify::alibi::Alibi;
use hopper_attention_verify::bias::Bias;
use hopper_attention_verify::blocks::Blocks;
use hopper_attention_verify::inputs::Class;
use hopper_attention_verify::sinks::Sinks;

use words::{parse_mask, parse_share, parse_sinks, parse_softcap};

/// Exact attention on tensor files: O = softmax(mask(scale * Q K^T)) V, and its gradients.
#[derive(Debug, Parser)]
#[command(
    name = "hattn",
    bin_name = "hattn",
    version,
    propagate_version = true,
    max_term_width = 110,
    after_help = MORE_HELP
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// Below the help of `hattn` itself.
const MORE_HELP: &str = "\
Examples:
  hattn random --output qkv.safetensors                       make an input
  hattn check --input qkv.safetensors --mask causal           compute, and compare with f64
  hattn run --input qkv.safetensors --output o.safetensors    compute, and write o and lse

Exit codes:
  0   done
  1   refused or failed; one sentence on stderr says why
  2   the command line cannot be read
A signal ends hattn as it ends any program; the shell shows 128 and the signal's number. A file that was to be
overwritten is then as it was.";

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Compute attention of q, k and v in a safetensors file, and write o and lse (with --backward the gradients too)
    Run(RunArgs),
    /// Compute as `run` does, and compare with an f64 computation. Fails if an error exceeds the tolerance
    Check(CheckArgs),
    /// Say what the kernels of this build compute, and list the devices of this machine
    Info(InfoArgs),
    /// Write a safetensors file with random q, k and v (with --backward also gradients of o and lse)
    Random(RandomArgs),
    /// Time forward or backward passes, alternating with every other attention library on this machine
    Bench(Box<BenchArgs>),
    /// Draw the charts of a report of `bench`; with --update also write its section of a page, such as docs/speed.md
    Plot(PlotArgs),
    /// Compute random problems and judge each, until one is wrong or the time is over. A wrong one is made smaller and written
    Fuzz(FuzzArgs),
    /// Draw which keys each query keeps under a mask
    Mask(MaskArgs),
    /// Find the fastest kernel for each shape on this GPU by timing all that compute it, for `run --tuning`
    Tune(Box<TuneArgs>),
}

#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub compute: ComputeArgs,
    /// Safetensors file to write
    ///
    /// It gets o in the input's layout and the type that was computed in, and lse, the log-sum-exp of the scores, as f32
    /// [batch, heads_q, seqlen_q]. With --backward also d_q, d_k and d_v, each like the tensor that it is the gradient of.
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
    /// Also write dropout_mask, u8 [batch, heads_q, seqlen_q, seqlen_kv]: 1 for each pair of query and key that dropout keeps, else 0
    ///
    /// Of packed sequences it is [sequences, heads_q, longest, longest], with queries and keys counted from the first of their
    /// sequence. It takes a byte a pair, up to 2^32 of them.
    #[arg(long)]
    pub dropout_mask: bool,
}

#[derive(Debug, Args)]
pub struct MaskArgs {
    /// The mask, as `run` takes it [default: causal, or full beside lists of blocks]. Of packed sequences it is that of each
    #[arg(long, value_parser = parse_mask)]
    pub mask: Option<Mask>,
    /// Lists of blocks beside the mask, as `random` takes them (of seed 0)
    #[arg(long, value_name = "KIND")]
    pub block_mask: Option<BlockMaskArg>,
    /// Lists of blocks beside the mask: those of a safetensors file. Its q and k say how many queries and keys there are
    ///
    /// With layout thd the file has no lists: what is drawn are all of its sequences, one after the other.
    #[arg(long, short, value_name = "FILE", conflicts_with_all = ["block_mask", "seqlen_q", "seqlen_kv"])]
    pub input: Option<PathBuf>,
    /// The batch entry whose lists are drawn
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub batch_entry: usize,
    /// The query head whose lists are drawn
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub head: usize,
    /// Number of queries
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub seqlen_q: usize,
    /// Number of keys [default: as many as queries]
    #[arg(long, value_name = "N")]
    pub seqlen_kv: Option<usize>,
    /// Write a picture to this file (PNG, a pixel for each pair: black where the query keeps the key), and draw nothing
    #[arg(long, value_name = "FILE")]
    pub png: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    #[command(flatten)]
    pub compute: ComputeArgs,
    /// Also write the results, as `run` does, whether or not the check passes
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct ComputeArgs {
    /// Safetensors file with 4-d tensors q, k and v (with --backward also d_o), all bf16, all f16 or all f32
    ///
    /// With layout thd sequences are packed: the tensors are 3-d, and cu_seqlens_q and cu_seqlens_kv (i32 [batch + 1]) say where
    /// each sequence begins. With any layout seqused_q and seqused_kv (i32 [batch]) may say how many rows of each are used.
    ///
    /// A tensor `sinks` (f32 or bf16 [heads_q]) has the attention sinks: a logit for each query head, which takes part in the
    /// softmax of all its rows and has no value. A tensor `alibi_slopes` (f32 [heads_q] or [batch, heads_q]) has the slopes of
    /// linear biases: see --alibi.
    ///
    /// A tensor `bias` (f32, bf16 or f16 [1 or batch, 1 or heads_q, 1 or seqlen_q, seqlen_kv], whatever the layout) is added to the
    /// scores, after the cap. -inf hides a pair. With layout thd it is [1 or batch, 1 or heads_q, 1 or QUERIES, KEYS], for so many
    /// rows of each sequence, and no sequence may be longer.
    ///
    /// Tensors mask_block_cnt, mask_block_idx and mask_bits, and full_block_cnt and full_block_idx for full blocks, all i32, are the
    /// lists of a block-sparse mask, beside --mask. docs/hattn.md has their shapes.
    ///
    /// A tensor `dropout_state` (i32 [4]) has the seed and the offset of dropout, low words first: see --dropout.
    #[arg(long, short, value_name = "FILE")]
    pub input: PathBuf,
    /// Also compute the gradients d_q, d_k and d_v
    ///
    /// The input must hold d_o, the gradient of o, with o's shape and q's type. If it holds d_lse, the gradient of lse (f32
    /// [batch, heads_q, seqlen_q]), this is used too. With sinks their gradient d_sinks (f32 [heads_q]) is computed, too, and with
    /// a bias its gradient dbias, in its shape and type.
    #[arg(long)]
    pub backward: bool,
    /// Make the gradients bitwise the same on every run. On a GPU this costs time
    #[arg(long, requires = "backward")]
    pub deterministic: bool,
    /// Which keys a query attends to: full, causal, window:LEFT,RIGHT, chunk:KEYS or prefix:KEYS, all but the first with :CORNER
    ///
    /// LEFT and RIGHT are how many keys before and after a query's own key are kept; `-` or `inf` means all. chunk keeps the keys
    /// of the own key's chunk up to the own key, where chunks have KEYS keys each, from key 0 on. prefix keeps the first KEYS
    /// keys, and all up to the own key. CORNER says which
    /// key is a query's own if there are more or fewer keys than queries: with bottom-right (the default) the last query's
    /// own key is the last key, with top-left the first query's own key is the first key.
    #[arg(long, default_value = "full", value_parser = parse_mask)]
    pub mask: Mask,
    /// Factor on Q K^T before the softmax, finite and above 0 [default: 1/sqrt(head_dim of q)]
    #[arg(long, allow_negative_numbers = true)]
    pub scale: Option<f32>,
    /// Cap C of the scores: C * tanh(scale * q k / C), before the mask. Finite and above 0; 0: no cap
    #[arg(long, value_name = "C", default_value_t = 0.0, allow_negative_numbers = true)]
    pub softcap: f32,
    /// Attention with linear biases (ALiBi), with the slopes of models: 2^(-8 h / heads_q) of head h, from 1 on
    ///
    /// The score of query i and key j loses slope * |i + seqlen_kv - seqlen_q - j|, after the cap and before the mask. A file with
    /// a tensor alibi_slopes has its own slopes, and needs no option. Not with --fp8.
    #[arg(long)]
    pub alibi: bool,
    /// Also compute max_logits, f32 [heads_q]: the largest score of each query head, after scale, cap and biases. Not with --fp8
    #[arg(long)]
    pub max_logits: bool,
    /// Dropout: the probability with which a weight becomes 0, from 0 to below 1. Not with --fp8
    /// [default: what the file's metadata says under `dropout`, or 0]
    ///
    /// It is rounded to a multiple of 1/32768. The other weights are multiplied by 1 / (1 - P). A file may have the seed and the
    /// offset, in a tensor dropout_state. Without it both are 0.
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = parse_dropout)]
    pub dropout: Option<Dropout>,
    /// Order of the dimensions of the file's 4-d tensors [default: what the file's metadata says under `layout`]
    #[arg(long)]
    pub layout: Option<FileLayout>,
    /// Where to compute: auto, cpu or cuda:N. auto takes the first GPU that supports the problem, else the CPU, and prints why
    #[arg(long, default_value = "auto")]
    pub device: DeviceArg,
    /// Use only kernels written for this instruction set [default: the newest that the GPU runs]
    #[arg(long)]
    pub arch: Option<ArchArg>,
    /// How many multiprocessors of a GPU to leave to others, such as kernels of NCCL. Kernels for sm80 leave none
    ///
    /// Kernels for sm90 then have at most as many thread blocks as the GPU has other multiprocessors. The CPU ignores it. So do
    /// the quantiser of --fp8 and the small kernels before and after the main kernel of gradients.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub sm_margin: usize,
    /// The most bytes that the workspace of each pass may have [default: any number]
    ///
    /// A GPU then cuts tiles less, which may be slower. A pass is refused if it needs more even without that. The CPU needs
    /// none. The quantiser of --fp8 ignores it.
    #[arg(long, value_name = "BYTES")]
    pub workspace_limit: Option<u64>,
    /// A file that `hattn tune` wrote. Its kernel is used if it has this shape and this GPU, else the built-in choice
    #[arg(long, value_name = "FILE")]
    pub tuning: Option<PathBuf>,
    /// Convert q, k, v and d_o to this type before computing [default: the file's type]
    #[arg(long)]
    pub dtype: Option<DTypeArg>,
    /// Compute in FP8: quantise q, k and v (bf16 or f16) to e4m3 first. SCALING says which elements share a descale factor
    ///
    /// The device that computes also quantises: a GPU with the kernels of the library's quantiser, the CPU with the same
    /// arithmetic, bit for bit. o has the type that q, k and v had before. --fp8 without SCALING means per-tensor.
    #[arg(
        long,
        value_name = "SCALING",
        num_args = 0..=1,
        default_missing_value = "per-tensor",
        conflicts_with = "backward"
    )]
    pub fp8: Option<ScalingArg>,
    /// Rotate q and k before they are quantised, by random signs (from SEED) and a Hadamard transform
    ///
    /// The rotation leaves Q K^T as it is, and spreads outliers over the head dim, so that less is lost by quantising.
    #[arg(long, value_name = "SEED", requires = "fp8")]
    pub hadamard: Option<u64>,
    /// Allow f16 score accumulation, which is faster on a GPU. q and k are then quantised to at most 14 in magnitude, not 448
    #[arg(long, requires = "fp8")]
    pub half_scores: bool,
    /// How many runs to time; the median is printed [default: 1 on a CPU, 10 on a GPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub repeat: Option<u32>,
}

#[derive(Debug, Args)]
pub struct FuzzArgs {
    /// Where to compute: auto, cpu or cuda:N. auto takes the first GPU if there is one, else the CPU
    #[arg(long, default_value = "auto")]
    pub device: DeviceArg,
    /// How long to go on
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub seconds: u64,
    /// How many problems to compute at most
    #[arg(long, value_name = "N")]
    pub problems: Option<usize>,
    /// Seed of the problems. The same seed gives the same problems [default: a random one, which is printed]
    #[arg(long, value_name = "SEED")]
    pub seed: Option<u64>,
    /// The cap of the scores of all problems but those of e4m3 operands; 0: none [default: drawn, one problem in four has one]
    #[arg(long, value_name = "C", allow_negative_numbers = true, value_parser = parse_softcap)]
    pub softcap: Option<f32>,
    /// The ALiBi slopes of all problems but those of e4m3 operands: none, standard, per-batch, large, negative or mixed
    /// [default: drawn, one problem in four has some]
    #[arg(long, value_name = "KIND")]
    pub alibi: Option<Alibi>,
    /// The lists of blocks of all problems but those of packed sequences or used lengths: none, random:PERCENT, documents, all,
    /// nothing or striped [default: drawn, one problem in four or more has some]
    #[arg(long, value_name = "KIND")]
    pub block_mask: Option<Blocks>,
    /// The bias of all problems but those of e4m3 operands: none, or as `random` has it [default: drawn, one problem in three has
    /// one]
    #[arg(long, value_name = "KIND")]
    pub bias: Option<Bias>,
    /// The mask of all problems, as `run` takes it [default: drawn]
    #[arg(long, value_parser = parse_mask)]
    pub mask: Option<Mask>,
    /// The attention sinks of all problems: none, normal, zero, nothing (-inf), ten, large (700 and -700) or mixed (also NaN and
    /// inf) [default: drawn, one problem in two has none]
    #[arg(long, value_name = "KIND", value_parser = parse_sinks)]
    pub sinks: Option<Sinks>,
    /// The probability of dropout of all problems but those of e4m3 operands; 0: none [default: drawn, one problem in four
    /// has some]
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = parse_dropout)]
    pub dropout: Option<Dropout>,
    /// Ask all problems but those of e4m3 operands for the maximum logits [default: drawn, one problem in five has them]
    #[arg(long)]
    pub max_logits: bool,
    /// Go on after a wrong problem, and make the first one smaller at the end
    #[arg(long)]
    pub keep_going: bool,
    /// Print also the problems with an error of at least this share of its bound, such as 0.77
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    pub near: Option<f64>,
    /// Print also how many problems with each pair of features were judged right, wrong and refused, and which pairs were not judged
    #[arg(long)]
    pub pairs: bool,
    /// Run the problem of this file again, which an earlier run wrote
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "seconds", "problems", "seed", "softcap", "alibi", "block_mask", "bias", "mask", "sinks", "dropout", "max_logits",
        "keep_going", "near", "pairs", "output",
    ])]
    pub replay: Option<PathBuf>,
    /// Where a wrong problem is written, as JSON
    #[arg(long, short, value_name = "FILE", default_value = "hattn-fuzz.json")]
    pub output: PathBuf,
}

#[derive(Debug, Args)]
pub struct InfoArgs {
    /// Print only the kernels of this build, one a line
    #[arg(long, conflicts_with_all = ["markdown", "update"])]
    pub kernels: bool,
    /// Print only the table of supported problems, as Markdown
    #[arg(long)]
    pub markdown: bool,
    /// Write the table into this file, between its markers, instead of printing it
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
    /// Pack the sequences: tensors are [total, heads, head_dim], and cu_seqlens_q and cu_seqlens_kv say where each begins
    ///
    /// --seqlen-q and --seqlen-kv are then the rows of all sequences together. Their lengths are random. The layout is thd.
    #[arg(long)]
    pub packed: bool,
    /// Element type
    #[arg(long, default_value = "bf16")]
    pub dtype: DTypeArg,
    /// Order of the dimensions of the tensors. The file's metadata states it
    #[arg(long, default_value = "bshd")]
    pub layout: FileLayout,
    /// Also write d_o and d_lse, for `run --backward`
    #[arg(long)]
    pub backward: bool,
    /// Also write sinks, f32 [heads_q]: a logit for each query head
    #[arg(long)]
    pub sinks: bool,
    /// Also write alibi_slopes, f32 [heads_q]: 2^(-8 h / heads_q) of head h, from 1 on
    #[arg(long)]
    pub alibi: bool,
    /// Also write the lists of a block-sparse mask: none, random:PERCENT, documents, all, nothing, striped, slices:FILE,
    /// prefixes:N,N or spans:A-B,A-B [default: none]
    ///
    /// random lists so many in a hundred blocks. documents: tokens attend to those of their own document. striped: every second
    /// block of queries has no block. The seed says whether batch entries and heads have lists of their own, and whether full
    /// blocks have lists.
    ///
    /// slices: a text file has a slice a line, five numbers Q0 Q1 K0 K1 TYPE: queries Q0 to below Q1 and keys K0 to below K1, of
    /// type 0 (full), 1 (causal: the diagonal ends in the bottom right corner), 2 (inverse causal: the diagonal begins in the top
    /// left corner) or 3 (both). prefixes: causal behind a prefix that all queries see, of so many keys for each batch entry.
    /// spans: causal, and the tokens of a span, keys A to below B, see each other in both directions, as those of an image do.
    #[arg(long, value_name = "KIND", conflicts_with = "packed")]
    pub block_mask: Option<BlockMaskArg>,
    /// Also write bias: none, or DTYPE, DTYPE:DIMENSIONS or DTYPE:DIMENSIONS:NUMBERS, such as f32:bhq or bf16:h:hidden
    ///
    /// DTYPE is f32, bf16 or f16. DIMENSIONS are those that the bias has beside the keys: some of the letters b (batch), h (heads)
    /// and q (queries). NUMBERS are normal (of deviation 2), hidden (the same, with -inf in many places and in whole rows), lowest
    /// (the same with -1e30 or -60000) or mask (0 and -inf).
    #[arg(long, value_name = "KIND", default_value_t = Bias::NONE)]
    pub bias: Bias,
    /// Also write dropout_state, i32 [4]: a seed and an offset for dropout with this probability, which the metadata states
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = parse_dropout)]
    pub dropout: Option<Dropout>,
    /// Class of inputs: normal, peaky, sink, late or nan
    ///
    /// All begin as normal numbers with mean 0 and deviation 1. peaky: q and k times 3. sink: the first key scores 15 for every
    /// query on average. late: one key in 64 scores up to 25. nan: one query in 128 is NaN. Scores are at the default scale.
    #[arg(long, value_name = "CLASS", default_value_t = Class::Normal)]
    pub like: Class,
    /// Seed of the random numbers. The same seed gives the same file; --backward does not change q, k and v
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
