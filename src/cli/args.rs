//! The command line as clap reads it.

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// What the person has decides the command.
const START: &str = "\
What do you have?
  a training log              gradscale diagnose train.log       is \"overflow, skipping step\" normal?
  gradients or a trace        gradscale report grads/            the whole answer, as a page
  histograms of gradients     gradscale report runs/exp1         TensorBoard, W&B, msprobe: bounds
  a CSV of step,amax          gradscale recommend run.csv        which growth interval
  two runs                    gradscale compare a/ b/
  a scaler of your own        gradscale check --exec ./my_scaler
  nothing yet                 gradscale report                   a real run; then record your own:

      from gradscale import Recorder
      recorder = Recorder(model, \"trace/\")
      recorder.step(scaler=scaler)        # once an optimizer step

Exit status: 0 done; 1 done and the answer is bad news; 2 could not do what was asked.";

/// Which FP16 loss scale and growth interval? Answered from measured gradients.
#[derive(Debug, Parser)]
#[command(name = "gradscale", version, about, before_help = START, max_term_width = 100, help_expected = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// The whole answer as one page, its data and its plots
    Report(ReportArgs),
    /// What each scale flushes and overflows, from gradients
    Analyze(AnalyzeArgs),
    /// Which growth interval, how sure, and what to paste
    Recommend(RecommendArgs),
    /// Replay policies over a run
    Simulate(SimulateArgs),
    /// What changed between two dumps or two runs
    Compare(CompareArgs),
    /// Sketch dumps into a trace
    Sketch(SketchArgs),
    /// Join the traces of one run's ranks
    Merge(MergeArgs),
    /// What a training log says about its loss scale
    Diagnose(DiagnoseArgs),
    /// Draw one figure
    Plot(PlotArgs),
    /// Hold a loss scaler to the laws, or to recorded traces
    Check(super::commands::check::CheckArgs),
    /// The policies, their keys and defaults; one explained
    Policies(super::commands::policies::PoliciesArgs),
    /// The number formats and their thresholds
    Formats(FormatsArgs),
    /// Shell completions on stdout
    Completions(CompletionsArgs),
}

/// A built-in run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Demo {
    /// A small convolutional network, trained long past a loss of 1e-4.
    Cnn,
    /// A small transformer language model.
    Transformer,
}

/// How inputs are read.
#[derive(Debug, Clone, Default, Args)]
pub struct ReadingArgs {
    /// Only tensors whose name matches; may be given several times
    #[arg(long, value_name = "GLOB")]
    pub tensors: Vec<String>,
    /// No tensor whose name matches; may be given several times
    #[arg(long, value_name = "GLOB")]
    pub exclude: Vec<String>,
    /// Where step and rank stand in a path, such as `it{step}_r{rank}`
    #[arg(long, value_name = "PATTERN")]
    pub step_pattern: Option<String>,
    /// The loss scale that a dump still carries, divided out; `auto` takes it from the file
    #[arg(long, value_name = "S|auto")]
    pub dump_scale: Option<String>,
    /// The inputs are ranks of one run, and are merged
    #[arg(long)]
    pub as_ranks: bool,
    /// Go on without files that cannot be read; each is named in a warning
    #[arg(long)]
    pub skip_bad: bool,
    /// Map files into memory instead of reading them; faster on some disks, but a file cut short meanwhile ends the program
    #[arg(long)]
    pub mmap: bool,
    /// Replay tensors that a mixed run produced in f32 as if FP16 had produced them
    #[arg(long)]
    pub all_as_fp16: bool,
    /// Which code counts: auto, cpu, scalar, avx2, avx512 or cuda; all give the same integers
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub backend: String,
    /// Threads; 0 takes one a core
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub threads: usize,
    /// No progress and no warnings on stderr; errors stay
    #[arg(long, short)]
    pub quiet: bool,
}

/// `report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Dumps, traces, series, logs or histograms; each is one run. Without: the built-in run
    pub inputs: Vec<PathBuf>,
    /// A built-in run
    #[arg(long, conflicts_with = "inputs")]
    pub demo: Option<Demo>,
    /// The folder to write into
    #[arg(long, short, value_name = "DIR", default_value = "gradscale-report")]
    pub output: PathBuf,
    /// How the recommendation is made
    #[command(flatten)]
    pub choosing: ChoosingArgs,
    /// How inputs are read
    #[command(flatten)]
    pub reading: ReadingArgs,
}

/// `analyze`.
#[derive(Debug, Args)]
pub struct AnalyzeArgs {
    /// Dumps, traces or histograms; each is one run
    #[arg(required_unless_present = "demo")]
    pub inputs: Vec<PathBuf>,
    /// A built-in run
    #[arg(long, conflicts_with = "inputs")]
    pub demo: Option<Demo>,
    /// What is kept apart; by tensor in the table, all in JSON
    #[arg(long, value_enum)]
    pub by: Option<ByArg>,
    /// The format that gradients are rounded to
    #[arg(long, default_value = "fp16")]
    pub format: String,
    /// Loss scales: `1,1024,65536` or powers `2^0..2^24`
    #[arg(
        long,
        value_name = "LIST",
        default_value = "2^-8..2^32",
        allow_hyphen_values = true
    )]
    pub scales: String,
    /// Rounding errors too: mean relative error and SQNR (needs the gradients themselves)
    #[arg(long)]
    pub errors: bool,
    /// Count subnormal results as zero, as some accelerators do
    #[arg(long)]
    pub flush_subnormals: bool,
    /// Gate: exit 1 where more than this share of the finite nonzero elements becomes zero
    #[arg(long, value_name = "SHARE", allow_hyphen_values = true)]
    pub max_underflow: Option<String>,
    /// Gate: exit 1 where more than this share of the finite nonzero elements overflows
    #[arg(long, value_name = "SHARE", allow_hyphen_values = true)]
    pub max_overflow: Option<String>,
    /// The gate's scale; `used` is the one that the run recorded
    #[arg(long, value_name = "SCALE|used", allow_hyphen_values = true)]
    pub at: Option<String>,
    /// The gate holds for every tensor, not only for all together
    #[arg(long)]
    pub any_tensor: bool,
    /// One JSON document on stdout
    #[arg(long)]
    pub json: bool,
    /// How inputs are read
    #[command(flatten)]
    pub reading: ReadingArgs,
}

/// What is kept apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ByArg {
    /// One group a run.
    All,
    /// One group a tensor.
    Tensor,
    /// One group a step.
    Step,
}

/// How a recommendation is made.
#[derive(Debug, Clone, Args)]
pub struct ChoosingArgs {
    /// The policy whose interval is asked for
    ///
    /// By default pytorch; for a log, that of the framework that wrote it.
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<String>,
    /// How flushed updates are weighed: elements (Adam-like), l1 or l2 (SGD-like)
    #[arg(long, value_enum, default_value = "elements")]
    pub measure: MeasureArg,
    /// An interval within this share of the least lost update is as good
    #[arg(
        long,
        value_name = "SHARE",
        default_value = "0.0005",
        allow_hyphen_values = true
    )]
    pub tolerance: String,
    /// Skipped steps allowed where only amax is known, as a share of the steps
    #[arg(
        long,
        value_name = "SHARE",
        default_value = "0.001",
        allow_hyphen_values = true
    )]
    pub skip_budget: String,
    /// Start from this scale instead of the policy's own
    #[arg(long, value_name = "SCALE", allow_hyphen_values = true)]
    pub init_scale: Option<String>,
    /// Seed of the bootstrap; the same seed gives the same answer
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

/// A measure of what is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MeasureArg {
    /// Share of nonzero elements.
    Elements,
    /// Share of the L1 norm.
    L1,
    /// Share of the L2 norm.
    L2,
}

/// `recommend`.
#[derive(Debug, Args)]
pub struct RecommendArgs {
    /// Traces, series or directories of step files; each is one run
    #[arg(required_unless_present = "demo")]
    pub inputs: Vec<PathBuf>,
    /// A built-in run
    #[arg(long, conflicts_with = "inputs")]
    pub demo: Option<Demo>,
    /// How the recommendation is made
    #[command(flatten)]
    pub choosing: ChoosingArgs,
    /// Replay every combination of settings, such as growth_interval=1..,hysteresis=1..4 or init_scale=2^8..2^16
    #[arg(long, value_name = "KEY=VALUES,…")]
    pub sweep: Option<String>,
    /// Write each combination of the sweep as a row of CSV (- is stdout)
    #[arg(long, value_name = "FILE.csv", requires = "sweep")]
    pub csv: Option<PathBuf>,
    /// Say what this many steps would cost, from resampled blocks of the run (an extrapolation)
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u64).range(100..=1_000_000_000))]
    pub horizon: Option<u64>,
    /// One JSON document on stdout
    #[arg(long)]
    pub json: bool,
    /// How inputs are read
    #[command(flatten)]
    pub reading: ReadingArgs,
}

/// `simulate`.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// Traces, series or directories of step files; each is one run
    #[arg(required_unless_present = "demo")]
    pub inputs: Vec<PathBuf>,
    /// A built-in run
    #[arg(long, conflicts_with = "inputs")]
    pub demo: Option<Demo>,
    /// A policy, such as `pytorch:growth_interval=500`; may be given several times
    #[arg(long, required = true, value_name = "POLICY")]
    pub policy: Vec<String>,
    /// Write every step's scale and skip as CSV
    #[arg(long, value_name = "FILE.csv")]
    pub trajectory: Option<PathBuf>,
    /// One JSON document on stdout
    #[arg(long)]
    pub json: bool,
    /// How inputs are read
    #[command(flatten)]
    pub reading: ReadingArgs,
}

/// `compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// The first dump, trace or series
    pub a: PathBuf,
    /// The second
    pub b: PathBuf,
    /// The scale to compare at; by default the one that the run used, 1 for plain dumps
    #[arg(long, value_name = "SCALE", allow_hyphen_values = true)]
    pub at: Option<String>,
    /// Exit 1 where a fraction or the skips grew by more than this share of A's
    #[arg(long, value_name = "SHARE", allow_hyphen_values = true)]
    pub fail_if_worse: Option<String>,
    /// One JSON document on stdout
    #[arg(long)]
    pub json: bool,
    /// How the recommendation is made
    #[command(flatten)]
    pub choosing: ChoosingArgs,
    /// How inputs are read
    #[command(flatten)]
    pub reading: ReadingArgs,
}

/// `sketch`.
#[derive(Debug, Args)]
pub struct SketchArgs {
    /// Dumps of one run
    #[arg(required = true)]
    pub inputs: Vec<PathBuf>,
    /// The trace directory to write
    #[arg(long, short, value_name = "TRACE")]
    pub output: PathBuf,
    /// How inputs are read
    #[command(flatten)]
    pub reading: ReadingArgs,
}

/// `merge`.
#[derive(Debug, Args)]
pub struct MergeArgs {
    /// Traces of one run
    #[arg(required = true)]
    pub inputs: Vec<PathBuf>,
    /// The trace directory to write
    #[arg(long, short, value_name = "TRACE")]
    pub output: PathBuf,
    /// How inputs are read
    #[command(flatten)]
    pub reading: ReadingArgs,
}

/// `diagnose`.
#[derive(Debug, Args)]
pub struct DiagnoseArgs {
    /// Training logs, plain or gzip; `-` is stdin. Each is one run
    #[arg(required = true, value_name = "LOG")]
    pub logs: Vec<PathBuf>,
    /// The logs are ranks of one run: one diagnosis, and their scales are compared
    #[arg(long)]
    pub as_ranks: bool,
    /// One JSON document on stdout
    #[arg(long)]
    pub json: bool,
    /// No warnings on stderr; errors stay
    #[arg(long, short)]
    pub quiet: bool,
}

/// `plot`.
#[derive(Debug, Args)]
pub struct PlotArgs {
    /// Dumps, traces, series, logs or histograms
    #[arg(required_unless_present = "demo")]
    pub inputs: Vec<PathBuf>,
    /// A built-in run
    #[arg(long, conflicts_with = "inputs")]
    pub demo: Option<Demo>,
    /// What to draw
    #[arg(long, value_enum)]
    pub kind: PlotKind,
    /// The picture; its ending, .svg or .png, decides the form
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
    /// Write what is drawn as CSV
    #[arg(long, value_name = "FILE.csv")]
    pub data: Option<PathBuf>,
    /// Width and height in pixels
    #[arg(long, value_name = "WxH", default_value = "960x540")]
    pub size: String,
    /// Colours
    #[arg(long, value_enum, default_value = "screen")]
    pub theme: ThemeArg,
    /// Policies to draw, for `policies` and `trajectory`
    #[arg(long = "with", value_name = "POLICY")]
    pub with: Vec<String>,
    /// How the recommendation is made
    #[command(flatten)]
    pub choosing: ChoosingArgs,
    /// How inputs are read
    #[command(flatten)]
    pub reading: ReadingArgs,
}

/// The figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PlotKind {
    /// Outcome rates against the scale.
    Rates,
    /// The gradient's binades under the FP16 window.
    Binades,
    /// Headroom of each tensor over the steps.
    Headroom,
    /// amax with the scale over it and skipped steps marked.
    Trajectory,
    /// Lost update against the growth interval.
    Tradeoff,
    /// Policies side by side.
    Policies,
    /// A log's loss scale, as its lines tell it.
    History,
}

/// Colours for a screen or for paper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ThemeArg {
    /// On a light page.
    Screen,
    /// Black on white.
    Print,
}

/// `formats`.
#[derive(Debug, Args)]
pub struct FormatsArgs {
    /// One JSON document on stdout
    #[arg(long)]
    pub json: bool,
}

/// `completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    pub shell: clap_complete::Shell,
}
