//! What a path on the command line is: a dump, a trace, a series, a log, histograms or a built-in run. Each input is one run.

use crate::gradients::{self, Dump, DumpFile, GradientsError};
use crate::histograms::{self, HistogramError, HistogramRun, Placed};
use crate::kernel::{Backend, Nothing, Pool, read_files, read_tensor};
use crate::scaling::diagnose::{self, DiagnoseError, Diagnosis, Log};
use crate::tally::series::{self, SeriesError};
use crate::tally::store::{self, TraceError};
use crate::tally::{Sample, Sketch, Step, TensorInfo, Trace, nonfinite};
use crate::warning::{Kind, Warning};
use rayon::prelude::*;
use std::path::{Path, PathBuf};

/// Long work reports to one of these; the command line turns it into a bar.
pub trait Progress: Sync {
    /// A piece of work of `total` parts begins.
    fn begin(&self, what: &str, total: u64);
    /// Some parts are done.
    fn advance(&self, parts: u64);
    /// The piece is done.
    fn end(&self);
}

/// Reports nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _: &str, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}
}

/// A trace with where it came from and what was noticed.
#[derive(Debug, Clone)]
pub struct NamedTrace {
    /// The path, or the built-in run's name.
    pub label: String,
    /// The kind's word: `trace`, `series`, `log`, `dump`, `histogram` or `built-in`.
    pub kind: &'static str,
    /// The record.
    pub trace: Trace,
    /// Histograms of its steps, where that is what was logged; then the trace holds no sketches.
    pub histograms: Vec<Placed>,
    /// What was noticed while reading.
    pub warnings: Vec<Warning>,
    /// What a log comes to, beside its history. The trace is empty where the log does not tell it.
    pub diagnosis: Option<Box<Diagnosis>>,
}

impl NamedTrace {
    /// # Errors
    /// When this is a log that does not tell its steps and scales, so that nothing can be replayed over it.
    pub fn with_history(self) -> Result<NamedTrace, InputError> {
        match &self.diagnosis {
            Some(diagnosis) if self.trace.steps.is_empty() => Err(InputError::NoHistory {
                path: PathBuf::from(&self.label),
                found: format!("{} ({})", diagnosis.verdict().as_str(), diagnosis.why),
            }),
            _ => Ok(self),
        }
    }
}

/// One run.
#[derive(Debug)]
pub enum Input {
    /// Dumps of one run; several where `--as-ranks` joined them.
    Dump(Vec<Dump>),
    /// A recorded trace.
    Trace(Box<NamedTrace>),
    /// A series; one trace a value of its `run` column.
    Series {
        /// The file.
        path: PathBuf,
        /// Its runs.
        traces: Vec<Trace>,
    },
    /// Histograms or statistics of gradients; one a run of the file or directory.
    Histograms {
        /// The file or directory.
        path: PathBuf,
        /// Its runs.
        runs: Vec<NamedTrace>,
    },
}

/// Why an input cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InputError {
    /// A dump.
    #[error(transparent)]
    Gradients(#[from] GradientsError),
    /// A trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A series.
    #[error(transparent)]
    Series(#[from] SeriesError),
    /// Histograms or statistics.
    #[error(transparent)]
    Histograms(#[from] HistogramError),
    /// Histograms where counts are needed.
    #[error(
        "{doing} {path:?}: found histograms, which only bound the counts, expected gradients (a dump or a trace); analyze, report and plot --kind rates take histograms"
    )]
    OnlyBounds {
        /// What was being done.
        doing: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// Two inputs that cannot be joined.
    #[error("joining {second:?} to {first:?} as ranks: found {found}, expected inputs of one kind")]
    Join {
        /// The first.
        first: String,
        /// The second.
        second: String,
        /// What differs.
        found: String,
    },
    /// A series where gradients are needed.
    #[error(
        "analyzing {path:?}: found a series, which holds only amax, expected gradients (a dump or a trace); recommend, simulate and report take a series"
    )]
    NoGradients {
        /// The file.
        path: PathBuf,
    },
    /// A log that cannot be opened.
    #[error(transparent)]
    Log(#[from] DiagnoseError),
    /// A log without steps or without scales.
    #[error(
        "replaying log {path:?}: found {found}, expected steps with their scales; gradscale diagnose says what the log does tell"
    )]
    NoHistory {
        /// The log.
        path: PathBuf,
        /// Its verdict, and why.
        found: String,
    },
    /// A dump that says no steps where steps are needed.
    #[error(
        "reading dump {path:?}: found {found}, expected gradients of several steps; a directory of step files (step_000100.safetensors), a trace or a series carries steps"
    )]
    NoSteps {
        /// The dump.
        path: PathBuf,
        /// What it holds.
        found: String,
    },
}

impl Input {
    /// Finds out what `path` is and opens it. Dumps are opened only as far as their names.
    ///
    /// # Errors
    /// When there is no such file, or it is nothing that can be read.
    pub fn open(
        path: &Path,
        reading: &gradients::Options,
        skip_bad: bool,
    ) -> Result<Input, InputError> {
        if path.is_dir() && store::is_trace(path) {
            let (mut trace, passed) = store::read(path, skip_bad)?;
            trace.retain_tensors(|name| reading.selects(name));
            let mut warnings = Vec::new();
            for leftover in passed.leftovers {
                warnings.push(Warning::new(
                    Kind::PassedOver,
                    format!("{} is a chunk that was never finished", leftover.display()),
                    "its writer was killed, and the steps in it are lost",
                    "nothing, or remove the file",
                ));
            }
            for (_, error) in passed.skipped {
                warnings.push(Warning::new(
                    Kind::PassedOver,
                    error.to_string(),
                    "its steps are missing",
                    "without --skip-bad this ends the run",
                ));
            }
            let label = path.display().to_string();
            return Ok(Input::Trace(Box::new(NamedTrace {
                label,
                kind: "trace",
                trace,
                histograms: Vec::new(),
                warnings,
                diagnosis: None,
            })));
        }
        if histograms::is_histograms(path) {
            return Ok(Input::Histograms {
                path: path.to_owned(),
                runs: open_histograms(path, reading, skip_bad)?,
            });
        }
        if !path.is_dir() && series::is_series(path) {
            return Ok(Input::Series {
                path: path.to_owned(),
                traces: series::read(path)?,
            });
        }
        if !path.is_dir() && diagnose::is_log(path) {
            return open_log(path);
        }
        Ok(Input::Dump(vec![Dump::open(path, reading)?]))
    }

    /// Joins inputs that are ranks of one run.
    ///
    /// # Errors
    /// When they are of different kinds, or their records contradict each other.
    pub fn join(inputs: Vec<Input>) -> Result<Input, InputError> {
        let mut inputs = inputs.into_iter();
        let Some(mut all) = inputs.next() else {
            return Ok(Input::Dump(Vec::new()));
        };
        for next in inputs {
            let (first, second) = (all.label(), next.label());
            match (&mut all, next) {
                (Input::Dump(dumps), Input::Dump(more)) => dumps.extend(more),
                (Input::Trace(trace), Input::Trace(mut more)) => {
                    more.trace.run_id.clone_from(&trace.trace.run_id);
                    trace
                        .trace
                        .merge(&more.trace)
                        .map_err(|source| TraceError::Merge {
                            path: second.into(),
                            source,
                        })?;
                    trace.warnings.extend(more.warnings);
                }
                (Input::Series { traces, .. }, Input::Series { traces: more, .. }) => {
                    for (trace, mut more) in traces.iter_mut().zip(more) {
                        more.run_id.clone_from(&trace.run_id);
                        trace.merge(&more).map_err(|source| TraceError::Merge {
                            path: second.clone().into(),
                            source,
                        })?;
                    }
                }
                (Input::Histograms { path, .. }, Input::Histograms { .. }) => {
                    return Err(InputError::OnlyBounds {
                        doing: "joining as ranks",
                        path: path.clone(),
                    });
                }
                (a, b) => {
                    let found = format!("a {} beside a {}", a.kind(), b.kind());
                    return Err(InputError::Join {
                        first,
                        second,
                        found,
                    });
                }
            }
        }
        Ok(all)
    }

    /// The path as given.
    pub fn label(&self) -> String {
        match self {
            Input::Dump(dumps) => dumps
                .iter()
                .map(|d| d.path().display().to_string())
                .collect::<Vec<_>>()
                .join(" + "),
            Input::Trace(trace) => trace.label.clone(),
            Input::Series { path, .. } | Input::Histograms { path, .. } => {
                path.display().to_string()
            }
        }
    }

    /// The kind's word.
    pub fn kind(&self) -> &'static str {
        match self {
            Input::Dump(dumps) => dumps.first().map_or("dump", |dump| dump.kind().name()),
            Input::Trace(trace) => trace.kind,
            Input::Series { .. } => "series",
            Input::Histograms { .. } => "histogram",
        }
    }

    /// The loss scale that the run used: that of the last recorded step, or what the first dump's own metadata says.
    ///
    /// # Errors
    /// When a dump cannot be read.
    pub fn used_scale(&self, reading: &gradients::Options) -> Result<Option<f64>, InputError> {
        match self {
            Input::Trace(trace) => Ok(trace
                .trace
                .steps
                .iter()
                .rev()
                .find_map(|step| step.loss_scale)),
            Input::Series { traces, .. } => Ok(traces
                .iter()
                .flat_map(|trace| trace.steps.iter().rev())
                .find_map(|step| step.loss_scale)),
            Input::Histograms { runs, .. } => Ok(runs
                .iter()
                .flat_map(|run| run.trace.steps.iter().rev())
                .find_map(|step| step.loss_scale)),
            Input::Dump(dumps) => {
                let first = dumps
                    .iter()
                    .flat_map(|dump| dump.steps())
                    .flat_map(|step| &step.files)
                    .next();
                Ok(first
                    .map(|file| file.open(reading))
                    .transpose()?
                    .and_then(|open| open.loss_scale()))
            }
        }
    }

    /// The runs in it as traces: a dump is sketched step by step, a series gives one trace a run.
    ///
    /// # Errors
    /// When a dump cannot be read.
    pub fn into_traces(
        self,
        reading: &gradients::Options,
        backend: Backend,
        progress: &dyn Progress,
    ) -> Result<Vec<NamedTrace>, InputError> {
        let label = self.label();
        match self {
            Input::Trace(trace) => Ok(vec![*trace]),
            Input::Histograms { runs, .. } => Ok(runs),
            Input::Series { traces, .. } => {
                let several = traces.len() > 1;
                let named = |trace: Trace| NamedTrace {
                    label: if several {
                        format!("{label} run {}", trace.run_id)
                    } else {
                        label.clone()
                    },
                    kind: "series",
                    trace,
                    histograms: Vec::new(),
                    warnings: Vec::new(),
                    diagnosis: None,
                };
                Ok(traces.into_iter().map(named).collect())
            }
            Input::Dump(dumps) => {
                let mut whole = Trace {
                    run_id: label.clone(),
                    ..Trace::default()
                };
                let mut warnings = Vec::new();
                let pool = Pool::new(backend);
                for dump in &dumps {
                    let trace = sketch_dump(dump, &label, reading, &pool, progress, &mut warnings)?;
                    whole.merge(&trace).map_err(|source| TraceError::Merge {
                        path: dump.path().to_owned(),
                        source,
                    })?;
                }
                Ok(vec![NamedTrace {
                    label,
                    kind: "dump",
                    trace: whole,
                    histograms: Vec::new(),
                    warnings,
                    diagnosis: None,
                }])
            }
        }
    }
}

/// What a file of a dump held.
struct FileRead {
    /// Which of the dump's steps it belongs to.
    place: usize,
    left_out: u64,
    trace: Trace,
}

/// Histograms as traces without sketches, each with its histograms beside it.
fn open_histograms(
    path: &Path,
    reading: &gradients::Options,
    skip_bad: bool,
) -> Result<Vec<NamedTrace>, HistogramError> {
    let named = |run: HistogramRun| NamedTrace {
        label: if run.name.is_empty() {
            path.display().to_string()
        } else {
            format!("{} {}", path.display(), run.name)
        },
        kind: "histogram",
        trace: run.trace,
        histograms: run.histograms,
        warnings: run.warnings,
        diagnosis: None,
    };
    let runs = histograms::read(path, reading, skip_bad)?;
    Ok(runs.into_iter().map(named).collect())
}

/// A log as a trace: the scale of each step and whether it overflowed. Its verdict comes along as a warning.
fn open_log(path: &Path) -> Result<Input, InputError> {
    let label = path.display().to_string();
    let file = std::fs::File::open(path).map_err(|source| DiagnoseError::Read {
        log: label.clone(),
        source,
    })?;
    let diagnosis = Log::read(file, &label)?.diagnose();
    let mut warnings = vec![Warning::new(
        Kind::Diagnosis,
        format!("the log shows {}", diagnosis.verdict().as_str()),
        diagnosis.why.trim_end_matches('.'),
        diagnosis.advice.join("; "),
    )];
    warnings.extend(diagnosis.warnings.iter().cloned());
    Ok(Input::Trace(Box::new(NamedTrace {
        label,
        kind: "log",
        trace: diagnosis.to_trace().unwrap_or_default(),
        histograms: Vec::new(),
        warnings,
        diagnosis: Some(Box::new(diagnosis)),
    })))
}

/// Sketches a dump: one sampled row a step; files without a step are rows 0, 1, ….
fn sketch_dump(
    dump: &Dump,
    run_id: &str,
    reading: &gradients::Options,
    pool: &Pool,
    progress: &dyn Progress,
    warnings: &mut Vec<Warning>,
) -> Result<Trace, InputError> {
    let empty = || Trace {
        run_id: run_id.to_owned(),
        ..Trace::default()
    };
    let merge = |into: &mut Trace, part: &Trace| {
        into.merge(part).map_err(|source| TraceError::Merge {
            path: dump.path().to_owned(),
            source,
        })
    };
    // A step's ranks and shards are merged first, steps follow each other.
    let (mut whole, mut of_step, mut current) = (empty(), empty(), 0);
    let mut left_out = 0u64;
    let files: Vec<(usize, Option<u64>, &DumpFile)> = dump
        .steps()
        .iter()
        .enumerate()
        .flat_map(|(place, step)| step.files.iter().map(move |file| (place, step.step, file)))
        .collect();
    progress.begin("sketching", dump.steps().len() as u64);
    let read = |&(place, step, file): &(usize, Option<u64>, &DumpFile)| {
        sketch_file(place, step, file, run_id, reading, pool)
    };
    read_files(&files, read, |file: FileRead| {
        if file.place != current {
            merge(&mut whole, &std::mem::replace(&mut of_step, empty()))?;
            progress.advance((file.place - current) as u64);
            current = file.place;
        }
        left_out += file.left_out;
        merge(&mut of_step, &file.trace)?;
        Ok::<(), InputError>(())
    })?;
    merge(&mut whole, &of_step)?;
    progress.end();
    if left_out > 0 {
        warnings.push(Warning::new(
            Kind::TensorsLeftOut,
            format!(
                "{left_out} integer, boolean or unread tensors left out in {}",
                dump.path().display()
            ),
            "they are no gradients, and count nowhere",
            "nothing, if that is so",
        ));
    }
    Ok(whole)
}

/// Sketches one file, as a trace of one step.
fn sketch_file(
    place: usize,
    step: Option<u64>,
    file: &DumpFile,
    run_id: &str,
    reading: &gradients::Options,
    pool: &Pool,
) -> Result<FileRead, InputError> {
    let open = file.open(reading)?;
    let step = step.or(open.step()).unwrap_or(0);
    let sketches: Vec<Sketch> = (0..open.tensors().len())
        .into_par_iter()
        .map(|tensor| Ok(read_tensor(&open, tensor, pool, &|| None::<Nothing>)?.0))
        .collect::<Result<_, GradientsError>>()?;
    let tensors: Vec<TensorInfo> = open
        .tensors()
        .iter()
        .map(|meta| TensorInfo {
            name: meta.name.clone(),
            shape: meta.shape.clone(),
            elements: meta.elements,
            role: crate::tally::Role::Parameter,
            produced_in: None,
            reduction: None,
            backward_order: None,
        })
        .collect();
    let bits = |sketch: &Sketch| {
        let bit = |seen: bool, bit: u8| if seen { bit } else { 0 };
        bit(sketch.inf() > 0, nonfinite::INF)
            | bit(sketch.nan() > 0, nonfinite::NAN)
            | bit(
                sketch.amax().is_none() && sketch.elements() > 0,
                nonfinite::NONE_FINITE,
            )
    };
    let trace = Trace {
        run_id: run_id.to_owned(),
        facts: serde_json::Map::new(),
        tensors,
        scaled: false,
        steps: vec![Step {
            step,
            loss_scale: None,
            found_inf: None,
            loss: None,
        }],
        amax: sketches
            .iter()
            .map(|sketch| sketch.amax().unwrap_or(0.0))
            .collect(),
        nonfinite: sketches.iter().map(bits).collect(),
        samples: vec![Sample { row: 0, sketches }],
        probes: Vec::new(),
    };
    Ok(FileRead {
        place,
        left_out: open.skipped().len() as u64,
        trace,
    })
}
