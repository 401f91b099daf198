//! The command lines of `hattn bench`, `hattn plot` and `hattn tune`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use hopper_attention_benches::{Direction, Order, PointMask, Precision, Sweep};

use super::words::{ArchArg, DeviceArg};

#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    pub points: PointArgs,
    /// auto, cpu or cuda:N. auto takes a GPU if there is one and this build has kernels; the CPU runs small sizes
    /// against the naive computation
    #[arg(long, default_value = "auto")]
    pub device: DeviceArg,
    /// Time our kernels for this instruction set [default: the GPU's own]
    #[arg(long)]
    pub arch: Option<ArchArg>,
    /// Who times on a GPU: the script in PyTorch, which alone can call peers that live in Python, or the Rust harness
    #[arg(long, value_enum, default_value_t = HarnessArg::Auto)]
    pub harness: HarnessArg,
    /// The Python that has PyTorch
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    pub python: PathBuf,
    /// Our shared object with the C entry, repeatable: the ratios are the first one's, others are variants [default: the
    /// one beside this program]
    #[arg(long, value_name = "[NAME=]FILE")]
    pub ours: Vec<String>,
    /// A peer's shared object with the C entry of benches/peers/README.md, repeatable
    #[arg(long, value_name = "[NAME=]FILE")]
    pub peer: Vec<String>,
    /// Leave out the peers that live in Python: cuDNN (its FP8 too), FlashAttention-2, -3 and -4
    #[arg(long)]
    pub no_python_peers: bool,
    /// Timings of each library at a point [default: 20 on a GPU, 12 with --quick, 5 on a CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(3..=100_000))]
    pub iters: Option<u32>,
    /// Seed of the inputs [default: from the clock, and recorded]
    #[arg(long)]
    pub seed: Option<u64>,
    /// The commit measured, for the record
    #[arg(long)]
    pub commit: Option<String>,
    /// Folder for bench.json, bench.csv and the charts; made if it is not there, rewritten after every point
    #[arg(long, short, value_name = "DIR", overrides_with = "output")]
    pub output: Option<PathBuf>,
    /// A report to compare with: points that moved beyond noise are told, and a slower or lost one fails the command
    #[arg(long, value_name = "OLD.json")]
    pub compare: Option<PathBuf>,
    /// Changes up to so many percent are noise, however alike the samples are
    #[arg(long, value_name = "PERCENT", default_value_t = 2.0, requires = "compare")]
    pub noise: f64,
    /// Measure nothing: show (and compare) this report
    #[arg(long, value_name = "NEW.json", conflicts_with_all = ["output", "ours", "peer"])]
    pub from: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct PointArgs {
    /// Passes: fwd, bwd
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [Direction::Fwd])]
    pub directions: Vec<Direction>,
    /// Types of Q, K, V, O and the gradients; e4m3: FP8 operands, whose O is bf16, in forwards that the script in PyTorch times
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [Precision::Bf16, Precision::F16])]
    pub dtypes: Vec<Precision>,
    /// Query heads that share a key head
    #[arg(long, value_delimiter = ',', default_values_t = [1])]
    pub gqa: Vec<usize>,
    /// Head dims
    #[arg(long, value_delimiter = ',', default_values_t = [64, 128])]
    pub dims: Vec<usize>,
    /// Masks: full, causal, or window:N for a query's own key and N before it
    #[arg(long, value_delimiter = ',', default_values = ["full", "causal"])]
    pub masks: Vec<PointMask>,
    /// Sequence lengths [default: 512 to 16384 on a GPU, 64 to 256 on a CPU]
    #[arg(long, value_delimiter = ',', value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    pub seqlens: Vec<usize>,
    /// Tokens a batch: the batch is tokens / seqlen, at least 1 [default: 16384 on a GPU, 256 on a CPU]
    #[arg(long, conflicts_with = "batch", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    pub tokens: Option<usize>,
    /// Sequences in a batch, whatever their length
    #[arg(long, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    pub batch: Option<usize>,
    /// Hidden size, the query heads times the head dim [default: 2048 on a GPU, 256 on a CPU]
    #[arg(long, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    pub hidden: Option<usize>,
    /// Only points whose name has all these words, such as causal/d64 or s512/f16; repeatable, any of them counts. A
    /// point is called fwd/bf16/d64/causal/s512/b32/h32/kv32, or bwd/ and so on
    #[arg(long, value_name = "WORD/WORD")]
    pub filter: Vec<String>,
    /// Three lengths, one type and 12 timings
    #[arg(long)]
    pub quick: bool,
    /// Storage order of Q, K, V, O and the gradients
    #[arg(long, value_enum, default_value_t = Order::Bshd)]
    pub layout: Order,
}

impl PointArgs {
    /// The sweep, with the defaults of a GPU or a CPU.
    pub fn sweep(&self, on_cpu: bool) -> Sweep {
        let base = if on_cpu { Sweep::small() } else { Sweep::papers() };
        let quick: &[usize] = if on_cpu { &[64, 128] } else { &[512, 2048, 8192] };
        Sweep {
            directions: self.directions.clone(),
            dtypes: self.dtypes[..if self.quick { 1 } else { self.dtypes.len() }].to_vec(),
            gqa: self.gqa.clone(),
            dims: self.dims.clone(),
            masks: self.masks.clone(),
            seqlens: match (&self.seqlens[..], self.quick) {
                ([], true) => quick.to_vec(),
                ([], false) => base.seqlens,
                (given, _) => given.to_vec(),
            },
            tokens: self.tokens.unwrap_or(base.tokens),
            batch: self.batch,
            hidden: self.hidden.unwrap_or(base.hidden),
            filters: self.filter.clone(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HarnessArg {
    /// PyTorch where python3 has it with a GPU, else Rust
    Auto,
    /// Only PyTorch
    Pytorch,
    /// Only Rust
    Rust,
}

#[derive(Debug, Args)]
pub struct PlotArgs {
    /// A report of `hattn bench`
    #[arg(value_name = "bench.json")]
    pub report: PathBuf,
    /// Folder for the charts [default: the report's]
    #[arg(long, short, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Also put the section on speed between the markers of this file, whose folder must hold the report and the charts
    #[arg(long, value_name = "README.md", conflicts_with = "output")]
    pub update: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct TuneArgs {
    #[command(flatten)]
    pub points: PointArgs,
    /// The GPU, cuda:N
    #[arg(long, default_value = "cuda:0")]
    pub device: DeviceArg,
    /// Timings of each kernel at a point
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(3..=100_000))]
    pub iters: u32,
    /// Seed of the inputs
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// File for the choices; what it holds of other shapes, cards and versions stays
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
}
