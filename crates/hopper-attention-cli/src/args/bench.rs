//! The command lines of `hattn bench`, `hattn plot` and `hattn tune`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use hopper_attention_benches::{Class, Direction, HeadDims, Order, PointMask, Precision, Sweep};
use hopper_attention_verify::bias::Bias;

use super::words::{ArchArg, DeviceArg, parse_density, parse_percent};

#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    pub points: PointArgs,
    /// Where to time: auto, cpu or cuda:N. auto takes a GPU if there is one and this build has kernels
    ///
    /// On the CPU the sizes are small, and the only peer is a naive computation.
    #[arg(long, default_value = "auto")]
    pub device: DeviceArg,
    /// Time our kernels for this instruction set [default: the newest that the GPU runs]
    #[arg(long)]
    pub arch: Option<ArchArg>,
    /// How many multiprocessors of the GPU ours leaves to others. Peers leave none
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub sm_margin: usize,
    /// Which program times on a GPU: a script in PyTorch, or hattn itself. Only the script can call Python packages
    ///
    /// The script loads ours from the shared library that scripts/bench.sh builds, and times all libraries in turn.
    /// Without that library `auto` times ours with hattn first, and then the peers with the script.
    #[arg(long, value_enum, default_value_t = HarnessArg::Auto)]
    pub harness: HarnessArg,
    /// The Python interpreter that has PyTorch
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    pub python: PathBuf,
    /// A build of ours to time: a shared object with the C entry of benches/peers/README.md [default: the one beside
    /// hattn, else hattn itself]
    ///
    /// It may be given several times. Ratios to peers are those of the first; the others are variants to compare it with.
    #[arg(long, value_name = "[NAME=]FILE")]
    pub ours: Vec<String>,
    /// A peer to time: a shared object with the C entry of benches/peers/README.md. May be given several times
    #[arg(long, value_name = "[NAME=]FILE")]
    pub peer: Vec<String>,
    /// Leave out the peers that are Python packages: cuDNN (also its FP8), FlashAttention-2, -3 and -4
    #[arg(long)]
    pub no_python_peers: bool,
    /// How often each library is timed at a point [default: 20 on a GPU, 12 with --quick, 5 on a CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(3..=100_000))]
    pub iters: Option<u32>,
    /// Seed of the random inputs [default: from the clock; the report has it]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Classes of inputs to time: normal, peaky, sink, late, nan. nan has forwards only
    ///
    /// All begin as normal numbers with mean 0 and deviation 1. peaky: q and k times 3. sink: the first key scores 15 for every
    /// query on average. late: one key in 64 scores up to 25. nan: one query in 128 is NaN. Every library gets the same inputs.
    #[arg(long, value_name = "CLASS", value_delimiter = ',', default_values_t = [Class::Normal])]
    pub inputs: Vec<Class>,
    /// Time q, k and v of this safetensors file in place of drawn inputs. May be given several times
    ///
    /// The file has q, k and v in bf16, f16 or f32, [batch, seqlen, heads, head_dim] or heads first, as its metadata says under
    /// `layout`: such as fixtures/minilm_layer3.safetensors. They are converted to each of --dtypes, bf16 or f16. The file's
    /// sequences are repeated in turn along the batch, in whole rounds, as many as --tokens hold; --batch says how many sequences
    /// there are in all. Masks are those of --masks, else that of the metadata (`mask`), else full. The metadata may state the
    /// softmax scale (`scale`). A backward takes d_o of the file, if it has one, and draws a normal one otherwise. The name of a
    /// point ends with the file's: fwd/bf16/d32/full/s197/b82/h12/kv12/minilm_layer3.
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "inputs", "draws", "gqa", "dims", "seqlens", "hidden", "few_heads", "lopsided", "quarter", "packed", "bias", "dropout",
        "block_mask",
    ])]
    pub input: Vec<PathBuf>,
    /// On how many draws of the inputs the error of o is measured. The mean is reported; the first draw is the timed one
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub draws: u32,
    /// The commit that is measured. It is only written into the report
    #[arg(long)]
    pub commit: Option<String>,
    /// Folder for bench.json, bench.csv and the charts. It is made if it does not exist
    ///
    /// bench.json is rewritten after every point, so that a sweep that stops loses nothing.
    #[arg(long, short, value_name = "DIR", overrides_with = "output")]
    pub output: Option<PathBuf>,
    /// An older report to compare with: prints which points changed. Fails if a point got slower or is missing
    #[arg(long, value_name = "OLD.json")]
    pub compare: Option<PathBuf>,
    /// The smallest change that counts, in percent. More is needed where the timings scatter
    #[arg(long, value_name = "PERCENT", default_value_t = 2.0, requires = "compare")]
    pub noise: f64,
    /// Measure nothing. Show this report instead, and compare it if --compare is given
    #[arg(long, value_name = "NEW.json", conflicts_with_all = ["output", "ours", "peer", "input"])]
    pub from: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct PointArgs {
    /// Passes to time
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [Direction::Fwd])]
    pub directions: Vec<Direction>,
    /// Element types to time
    ///
    /// e4m3 is FP8: Q, K and V are e4m3, O is bf16. It has forwards only, and only the script in PyTorch times it. With
    /// --packed the default is bf16.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [Precision::Bf16, Precision::F16],
          default_value_if("packed", "true", "bf16"))]
    pub dtypes: Vec<Precision>,
    /// How many query heads share one KV head
    #[arg(long, value_delimiter = ',', default_values_t = [1])]
    pub gqa: Vec<usize>,
    /// Head dims. 192x128: 192 of Q and K, 128 of V and O
    #[arg(long, value_name = "DIM", value_delimiter = ',', default_values = ["64", "128"])]
    pub dims: Vec<HeadDims>,
    /// Masks: full, causal, or window:N (a query attends to its own key and the N keys before it) [default: full,causal]
    #[arg(long, value_delimiter = ',')]
    pub masks: Vec<PointMask>,
    /// Sequence lengths [default: 512 to 16384 on a GPU, 64 to 256 on a CPU]
    #[arg(long, value_delimiter = ',', value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    pub seqlens: Vec<usize>,
    /// Tokens in a batch, so that it has tokens / seqlen sequences, at least 1 [default: 16384 on a GPU, 256 on a CPU]
    #[arg(long, conflicts_with = "batch", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    pub tokens: Option<usize>,
    /// Sequences in a batch, whatever their length, in place of --tokens
    #[arg(long, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    pub batch: Option<usize>,
    /// Hidden size: the number of query heads times the head dim of V, a power of two of heads where that divides nothing [default: 2048 on a GPU, 256 on a CPU]
    #[arg(long, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    pub hidden: Option<usize>,
    /// Time few heads: 32, 16, 8 and 4 query heads on 16 to 1 KV heads, with one sequence of 512 to 32768 tokens or four of 2048
    #[arg(long, conflicts_with_all = ["gqa", "seqlens", "tokens", "batch", "hidden", "quick"])]
    pub few_heads: bool,
    /// Time 68 short and lopsided problems: sequences of 77 to 4097 tokens, and queries that are not as many as keys
    #[arg(long, conflicts_with_all = ["gqa", "seqlens", "tokens", "batch", "hidden", "quick", "few_heads", "quarter"])]
    pub lopsided: bool,
    /// A quarter as many queries as keys. A causal mask lets the last query see the last key
    #[arg(long)]
    pub quarter: bool,
    /// Time packed sequences: the batches of --seqlens, and ragged batches of --tokens and of four times as many
    /// (--quick: of --tokens)
    ///
    /// Lengths of ragged batches, with 16384 tokens: log-normal of mean 512, 2k and 8k (lognormal512, lognormal2048,
    /// lognormal8192); one with half of the tokens among ones of 64 to 512 (long); log-normal of mean 2k, cut at 4k
    /// (documents4096). With other tokens they are as many times longer or shorter. Ours also computes a dense batch
    /// with as many operations, in turn with the others. A point has a name such as
    /// fwd/bf16/d64/causal/lognormal512/t16384/b32/h32/kv32, with the sequences after b.
    #[arg(long, conflicts_with_all = ["batch", "few_heads", "lopsided", "quarter"])]
    pub packed: bool,
    /// Time capped scores: C * tanh(scale * q k / C), with a whole number C. Peers that have no cap are named as such
    #[arg(long, value_name = "C", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub softcap: Option<u32>,
    /// Time scores with linear biases (ALiBi), with slopes of 2^(-8 h / heads). Peers that have none are named as such
    #[arg(long)]
    pub alibi: bool,
    /// Time FP8 with scores in f32. Else ours is told that f16 holds them, and the plan takes what it estimates to be faster
    ///
    /// With --dtypes e4m3 alone. A point is named f32scores.
    #[arg(long, conflicts_with = "packed")]
    pub f32_scores: bool,
    /// Time an additive bias of the scores: DTYPE, DTYPE:DIMENSIONS or DTYPE:DIMENSIONS:NUMBERS, such as f32:bhq or bf16:h:hidden
    ///
    /// As `hattn random --bias` has it, but for NUMBERS of lowest. A backward also computes the gradient of the bias. FLOPs are those
    /// without it. A point of f32:bhq is named bias-f32-bhq. Peers in PyTorch get the numbers rounded to the type of Q. Peers that have
    /// no bias are named as such. With --packed it covers the longest sequence. Not with --dtypes e4m3. No backward with --softcap.
    #[arg(long, value_name = "KIND", default_value_t = Bias::NONE)]
    pub bias: Bias,
    /// Time dropout: the probability with which a weight becomes 0, in whole percent, from 0.01 to 0.99
    ///
    /// Ours and shared objects keep the same pairs of a query and a key, and the whole check uses these. A package in Python
    /// draws its own. Its outputs are only checked for NaN, and for the mean and the scatter that dropout has around the
    /// definition without it. A point is named dropout10 for 0.1. Peers that have none are named as such.
    #[arg(long, value_name = "P", value_parser = parse_percent)]
    pub dropout: Option<u32>,
    /// Time block-sparse masks in place of --masks: lists of full blocks of 128 queries and 128 keys. DENSITY is 1 or 1/N
    ///
    /// The blocks of the diagonal are listed, and one in N of the others, at random. The same lists are for all batch entries and
    /// heads. Operations are those of the listed blocks. A point is named blocks16 for 1/16. Peers that have no lists are named as
    /// such.
    #[arg(long, value_name = "DENSITY", value_delimiter = ',', value_parser = parse_density, conflicts_with = "masks")]
    pub block_mask: Vec<u32>,
    /// Only points with all these words in their names, such as causal/d64 or s512/f16
    ///
    /// A point has a name such as fwd/bf16/d64/causal/s512/b32/h32/kv32: pass, type, head dim, mask, sequence length, batch,
    /// query heads, KV heads. If the option is given several times, a point that fits one of them is timed.
    #[arg(long, value_name = "WORD/WORD")]
    pub filter: Vec<String>,
    /// A short sweep: three sequence lengths and the first type (`bench` also times each point less often)
    #[arg(long)]
    pub quick: bool,
    /// Order of the dimensions of Q, K, V, O and the gradients in memory
    #[arg(long, value_enum, default_value_t = Order::Bshd)]
    pub layout: Order,
}

impl PointArgs {
    /// The sweep of normal inputs, with the defaults of a GPU or a CPU.
    pub fn sweep(&self, on_cpu: bool) -> Sweep {
        let base = if on_cpu { Sweep::small() } else { Sweep::papers() };
        let tokens = self.tokens.unwrap_or(base.tokens);
        let quick: &[usize] = if on_cpu { &[64, 128] } else { &[512, 2048, 8192] };
        Sweep {
            inputs: vec![Class::Normal],
            directions: self.directions.clone(),
            dtypes: self.dtypes[..if self.quick { 1 } else { self.dtypes.len() }].to_vec(),
            gqa: self.gqa.clone(),
            dims: self.dims.clone(),
            masks: match &self.masks[..] {
                [] => vec![PointMask::Full, PointMask::Causal],
                given => given.to_vec(),
            },
            seqlens: match (&self.seqlens[..], self.quick) {
                ([], true) => quick.to_vec(),
                ([], false) => base.seqlens,
                (given, _) => given.to_vec(),
            },
            tokens,
            batch: self.batch,
            hidden: self.hidden.unwrap_or(base.hidden),
            few_heads: self.few_heads,
            lopsided: self.lopsided,
            quarter: self.quarter,
            packed: match (self.packed, self.quick) {
                (false, _) => vec![],
                (true, true) => vec![tokens],
                (true, false) => vec![tokens, tokens.saturating_mul(4)],
            },
            softcap: self.softcap,
            alibi: self.alibi,
            f32_scores: self.f32_scores,
            bias: self.bias,
            dropout: self.dropout,
            block_mask: self.block_mask.clone(),
            filters: self.filter.clone(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HarnessArg {
    /// PyTorch if --python has it and it sees a GPU, else Rust. Both, one after the other, without a shared library of
    /// ours
    Auto,
    /// The script in PyTorch, or fail
    Pytorch,
    /// hattn itself
    Rust,
}

#[derive(Debug, Args)]
pub struct PlotArgs {
    /// A report of `hattn bench`, or a text of few heads such as fa4-backward.txt
    #[arg(value_name = "bench.json")]
    pub report: PathBuf,
    /// Folder for the charts [default: the report's]
    #[arg(long, short, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Also write the report's section and charts into this page, between the markers that name the report, or the only ones
    #[arg(long, value_name = "PAGE.md", conflicts_with = "output")]
    pub update: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct TuneArgs {
    #[command(flatten)]
    pub points: PointArgs,
    /// The GPU to tune for: cuda:N
    #[arg(long, default_value = "cuda:0")]
    pub device: DeviceArg,
    /// How often each kernel is timed at a point
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(3..=100_000))]
    pub iters: u32,
    /// Seed of the random inputs
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// File to write the choices to. What it already holds for other shapes, GPUs and versions is kept
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
}
