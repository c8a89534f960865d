//! One file a command: validated arguments in, library calls, words out.

mod analyze;
pub(crate) mod check;
mod compare;
mod diagnose;
mod formats;
mod plot;
pub(crate) mod policies;
mod recommend;
mod report;
mod simulate;
mod trace;

use super::args::{ChoosingArgs, Cli, Command, Demo, MeasureArg, ReadingArgs};
use super::terminal::Bar;
use super::{CliError, DONE, values};
use crate::builtin;
use crate::gradients::{self, DumpScale, StepPattern};
use crate::input::{Input, InputError, NamedTrace};
use crate::kernel::Backend;
use crate::report::table;
use crate::scaling::policy::PolicySpec;
use crate::scaling::{Measure, Options, Run, RunOptions};
use crate::warning::Warning;
use std::io::Write;
use std::path::PathBuf;

/// Runs a command; the status of one that did what was asked.
pub fn run(command: &Command) -> Result<u8, CliError> {
    match command {
        Command::Report(args) => report::run(args),
        Command::Analyze(args) => analyze::run(args),
        Command::Recommend(args) => recommend::run(args),
        Command::Simulate(args) => simulate::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Sketch(args) => trace::sketch(args),
        Command::Merge(args) => trace::merge(args),
        Command::Diagnose(args) => diagnose::run(args),
        Command::Plot(args) => plot::run(args),
        Command::Check(args) => Ok(check::run(
            args,
            &mut std::io::stdout(),
            &mut std::io::stderr(),
        )?),
        Command::Policies(args) => Ok(policies::run(
            args,
            &mut std::io::stdout(),
            &mut std::io::stderr(),
        )?),
        Command::Formats(args) => formats::run(args),
        Command::Completions(args) => {
            let mut command = <Cli as clap::CommandFactory>::command();
            let mut script = Vec::new();
            clap_complete::generate(args.shell, &mut command, "gradscale", &mut script);
            std::io::stdout().write_all(&script)?;
            Ok(DONE)
        }
    }
}

/// The reading flags, validated.
struct Reading {
    options: gradients::Options,
    backend: Backend,
    run_options: RunOptions,
    as_ranks: bool,
    skip_bad: bool,
    quiet: bool,
    bar: Bar,
}

impl Reading {
    fn new(args: &ReadingArgs) -> Result<Reading, CliError> {
        let mut options = gradients::Options::new()
            .with_tensors(&args.tensors)?
            .with_exclude(&args.exclude)?
            .with_mmap(args.mmap);
        if let Some(pattern) = &args.step_pattern {
            options = options.with_step_pattern(StepPattern::parse(pattern)?);
        }
        options = options.with_dump_scale(match args.dump_scale.as_deref() {
            None => DumpScale::None,
            Some("auto") => DumpScale::Auto,
            Some(text) => DumpScale::Value(values::scale("--dump-scale", text)?),
        })?;
        let backend = Backend::parse(&args.backend)?;
        // Only the first call in a process counts, and there is one command in a process.
        let _ = rayon::ThreadPoolBuilder::new()
            .num_threads(args.threads)
            .build_global();
        Ok(Reading {
            options,
            backend,
            run_options: RunOptions {
                all_as_fp16: args.all_as_fp16,
            },
            as_ranks: args.as_ranks,
            skip_bad: args.skip_bad,
            quiet: args.quiet,
            bar: Bar::new(args.quiet),
        })
    }

    /// Opens the inputs, each a run of its own, or one built-in run.
    fn inputs(&self, paths: &[PathBuf], demo: Option<Demo>) -> Result<Vec<Input>, CliError> {
        if let Some(demo) = demo {
            return Ok(vec![Input::Trace(Box::new(built_in(demo).read().trace))]);
        }
        let inputs = paths
            .iter()
            .map(|path| Input::open(path, &self.options, self.skip_bad))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(if self.as_ranks && inputs.len() > 1 {
            vec![Input::join(inputs)?]
        } else {
            inputs
        })
    }

    /// The inputs as traces to replay; a series may hold several.
    fn traces(&self, paths: &[PathBuf], demo: Option<Demo>) -> Result<Vec<NamedTrace>, CliError> {
        let records = self.records(paths, demo)?.into_iter();
        Ok(records
            .map(NamedTrace::with_history)
            .collect::<Result<_, _>>()?)
    }

    /// The inputs as traces, and logs even where they tell no history.
    fn records(&self, paths: &[PathBuf], demo: Option<Demo>) -> Result<Vec<NamedTrace>, CliError> {
        let mut traces = Vec::new();
        for input in self.inputs(paths, demo)? {
            traces.extend(input.into_traces(&self.options, self.backend, &self.bar)?);
        }
        Ok(traces)
    }

    /// A trace ready to be replayed, its reader's warnings first.
    fn run_of(&self, trace: &NamedTrace) -> Run {
        let mut run = Run::new(&trace.trace, self.run_options);
        run.warnings.splice(0..0, trace.warnings.iter().cloned());
        run
    }

    /// Says warnings on stderr, unless asked not to.
    fn warn(&self, warnings: &[Warning]) {
        if !self.quiet {
            // Nobody can be told where stderr is closed.
            let _ = std::io::stderr().write_all(table::warnings(warnings).as_bytes());
        }
    }
}

fn built_in(demo: Demo) -> builtin::Run {
    match demo {
        Demo::Cnn => builtin::Run::Cnn,
        Demo::Transformer => builtin::Run::Transformer,
    }
}

/// The choosing flags, validated.
fn choosing(args: &ChoosingArgs) -> Result<Options, CliError> {
    Ok(Options {
        policy: PolicySpec::parse(args.policy.as_deref().unwrap_or("pytorch"))?,
        measure: match args.measure {
            MeasureArg::Elements => Measure::Elements,
            MeasureArg::L1 => Measure::L1,
            MeasureArg::L2 => Measure::L2,
        },
        tolerance: values::share("--tolerance", &args.tolerance)?,
        skip_budget: values::share("--skip-budget", &args.skip_budget)?,
        seed: args.seed,
        init_scale: args
            .init_scale
            .as_deref()
            .map(|text| values::scale("--init-scale", text))
            .transpose()?,
        horizon: None,
    })
}

/// The options for one input: where no policy was named, a log is replayed with its own framework's.
fn choosing_for(args: &ChoosingArgs, options: &Options, trace: &NamedTrace) -> Options {
    let own = trace
        .diagnosis
        .as_ref()
        .filter(|_| args.policy.is_none())
        .and_then(|diagnosis| PolicySpec::named(diagnosis.policy?).ok())
        .filter(|spec| spec.with("growth_interval", 1000i64).is_ok());
    Options {
        policy: own.unwrap_or_else(|| options.policy.clone()),
        ..options.clone()
    }
}

/// Refuses histograms where counts are needed.
fn only_counts(doing: &'static str, trace: &NamedTrace) -> Result<(), InputError> {
    if trace.histograms.is_empty() {
        return Ok(());
    }
    Err(InputError::OnlyBounds {
        doing,
        path: PathBuf::from(&trace.label),
    })
}

/// Prints one JSON document.
fn print_json(value: &serde_json::Value) -> Result<(), CliError> {
    let mut text = serde_json::to_string_pretty(value).expect("our results are plain values");
    text.push('\n');
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

fn print(text: &str) -> Result<(), CliError> {
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}
