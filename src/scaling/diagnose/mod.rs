//! Training logs: what the loss scale did, and whether it matters.
//!
//! ```text
//!  bytes --decode--> text --lines--> pieces --dialects--> messages --history--> events, progress
//!         (gzip, UTF-16)   (needles)          (one file each)      (copies joined)     |
//!                                                                                      v
//!                           diagnosis  <--advice--  verdict  <--rules--  shape (bursts, quiet, rises)
//! ```
//!
//! A log is read once, in bounded memory. What it does not say (growths, mostly) is inferred and marked so.
//!
//! ```
//! use gradscale::scaling::diagnose::{Log, Verdict};
//!
//! let mut text = String::new();
//! for scale in [32768, 16384] {
//!     text += &format!("Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {scale}.0\n");
//! }
//! for step in 1..20 {
//!     text += &format!("step {} | loss {}\n", 10 * step, 4.0 - 0.01 * step as f64);
//! }
//! let log = Log::read(text.as_bytes(), "train.log")?;
//! assert_eq!(log.diagnose().verdict(), Verdict::RampUpHarmless);
//! # Ok::<(), gradscale::scaling::diagnose::DiagnoseError>(())
//! ```

mod advice;
mod decode;
mod dialects;
mod history;
mod infer;
mod lines;
mod replay;
mod seen;
mod shape;
mod text;
mod verdict;

use std::io::{self, Read};

pub use history::History;
pub use infer::Interval;
pub use replay::{Fit, WhatIf};
pub use shape::{Filled, FilledKind, Shape};
pub use verdict::{Held, Verdict};

use crate::warning::{Kind, Warning};
use dialects::{ALL, Dialect, Reader, Weight};
use lines::Lines;

/// Why a log cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiagnoseError {
    /// The file cannot be opened or read.
    #[error("reading log {log:?}: {source}; expected a text file that can be read, or - for stdin")]
    Read {
        /// The log.
        log: String,
        /// The system's word.
        source: io::Error,
    },
    /// It is packed in a way that is not unpacked here.
    #[error(
        "reading log {log:?}: found {found} data, expected text or gzip; unpack it and pipe it in: gradscale diagnose -"
    )]
    Packed {
        /// The log.
        log: String,
        /// The packing.
        found: &'static str,
    },
}

/// Whether a file's name is one that logs have: `.log`, `.out`, `.err` or `.txt`, or one of these with `.gz`.
pub fn is_log(path: &std::path::Path) -> bool {
    let name = path
        .file_name()
        .map(|name| name.to_string_lossy().to_ascii_lowercase())
        .unwrap_or_default();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    [".log", ".out", ".err", ".txt"]
        .iter()
        .any(|ending| name.ends_with(ending))
}

/// A log that was read.
#[derive(Debug, Clone)]
pub struct Log {
    /// Its path, as given.
    pub path: String,
    /// What it says.
    pub history: History,
    /// The compressed data broke off, and how.
    pub broken: Option<String>,
}

impl Log {
    /// Reads a log to its end.
    ///
    /// # Errors
    /// When the reader fails, or the log is packed in a way that is not known. A gzip file that breaks off is read as
    /// far as it goes.
    pub fn read(reader: impl Read, path: &str) -> Result<Log, DiagnoseError> {
        let failed = |source| DiagnoseError::Read {
            log: path.to_owned(),
            source,
        };
        let decoded =
            decode::open(reader)
                .map_err(failed)?
                .map_err(|packed| DiagnoseError::Packed {
                    log: path.to_owned(),
                    found: packed.0,
                })?;
        let mut messages = Reader::new();
        let mut collector = history::Collector::new();
        let (facts, error) = Lines::get().scan(decoded.reader, &mut |piece| {
            messages.read(piece, &mut |message| collector.add(&message))
        });
        messages.finish(&mut |message| collector.add(&message));
        let broken = match error {
            Some(error) if decoded.packing == decode::Packing::Gzip => Some(error.to_string()),
            Some(error) => return Err(failed(error)),
            None => None,
        };
        Ok(Log {
            path: path.to_owned(),
            history: collector.finish(facts),
            broken,
        })
    }

    /// Judges it, and replays policies over it: which one fits, and what others would have skipped.
    pub fn diagnose(&self) -> Diagnosis {
        let mut diagnosis = self.judge();
        if let Some(policy) = diagnosis.policy
            && diagnosis.verdict() != Verdict::RankDesync
        {
            diagnosis.fit = replay::fit(&diagnosis, policy);
            diagnosis.what_if = replay::what_if(&diagnosis);
        }
        diagnosis
    }

    /// Judges it, without replays.
    pub fn judge(&self) -> Diagnosis {
        Diagnosis::new(self)
    }
}

/// What a log comes to.
#[derive(Debug, Clone)]
pub struct Diagnosis {
    /// The log's path.
    pub path: String,
    /// The format's name; `none` where no line of any was found.
    pub format: &'static str,
    /// The framework, in words.
    pub framework: &'static str,
    /// Everything that holds, the verdict first.
    pub held: Vec<Held>,
    /// Steps that the log shows to be skipped; `None` where only a lower bound can be had.
    pub skipped_steps: Option<u64>,
    /// The lower bound.
    pub skipped_min: Option<u64>,
    /// The first scale that the log prints.
    pub first_scale: Option<f64>,
    /// The last.
    pub last_scale: Option<f64>,
    /// The growth interval, where it follows from the log.
    pub growth_interval: Option<Interval>,
    /// The values are base-2 logarithms.
    pub log2: bool,
    /// Events, growths and restarts in order.
    pub events: Vec<Filled>,
    /// Why, in a sentence or three.
    pub why: String,
    /// What to do.
    pub advice: Vec<String>,
    /// What to know about the log.
    pub warnings: Vec<Warning>,
    /// Lines in the log.
    pub lines: u64,
    /// The shape behind it.
    pub shape: Shape,
    /// Whether the format prints growths; else they are inferred.
    pub growth_printed: bool,
    /// The framework's policy, by its name here.
    pub policy: Option<&'static str>,
    /// The settings of that policy that the events fit.
    pub fit: Option<Fit>,
    /// What PyTorch's policy with other intervals, and constant scales, would have skipped in the same run.
    pub what_if: Vec<WhatIf>,
}

impl Diagnosis {
    fn new(log: &Log) -> Diagnosis {
        let history = &log.history;
        let dialect = dialect_of(history);
        let families = event_families(history);
        let mixed = families.len() > 1;
        let silent_framework = silent_framework(history);
        let any_format = dialect.format != "none";
        let last = history.last;
        let facts = verdict::Facts {
            mixed,
            any_format,
            silent: silent_framework.is_some(),
            reaches_inf: last.is_some_and(|p| p.value == f64::INFINITY),
            rounded_zero: last.is_some_and(|p| p.value == 0.0 && p.half_unit > 0.0),
        };
        // Several scalers are judged one by one; the worst is the verdict.
        let (shape, held) = scalers(history)
            .into_iter()
            .map(|scaler| {
                let shape = shape::shape(history, dialect, scaler);
                let held = verdict::judge(history, &shape, facts);
                (shape, held)
            })
            .min_by_key(|(_, held)| held.first().map(|held| held.verdict))
            .expect("there is at least one");
        let (skipped_steps, skipped_min) = skipped(history, &shape, dialect, mixed);
        let growth_interval = if mixed {
            None
        } else {
            infer::interval(history, &shape)
        };
        let framework = match (any_format, silent_framework) {
            (false, Some(name)) => name,
            _ => dialect.framework,
        };
        let mut diagnosis = Diagnosis {
            path: log.path.clone(),
            format: dialect.format,
            framework,
            held,
            skipped_steps,
            skipped_min,
            first_scale: history.first.map(|p| p.value),
            last_scale: last.map(|p| p.value),
            growth_interval,
            log2: dialect.log2,
            events: shape.filled.clone(),
            why: String::new(),
            advice: Vec::new(),
            warnings: Vec::new(),
            lines: history.facts.lines,
            shape,
            growth_printed: dialect.growth_printed,
            policy: dialect.policy.filter(|_| !mixed),
            fit: None,
            what_if: Vec::new(),
        };
        diagnosis.why = advice::why(&diagnosis);
        diagnosis.advice = advice::advice(&diagnosis);
        diagnosis.warnings = warnings(log, &diagnosis, &families);
        diagnosis
    }

    /// One diagnosis of the logs of one run's ranks: that of the rank which tells most, with what the others add. Ranks
    /// whose scales part at one and the same event are several scalers. `None` without a log.
    pub fn of_ranks(logs: &[Log]) -> Option<Diagnosis> {
        let all: Vec<Diagnosis> = logs.iter().map(Log::diagnose).collect();
        // Rank 0 often prints events that the others do not; a worse verdict of any rank comes first.
        let best = (0..all.len()).min_by_key(|&at| {
            let one = &all[at];
            let silent = matches!(
                one.verdict(),
                Verdict::NotLossScaling | Verdict::InsufficientEvidence
            );
            (silent, one.verdict(), usize::MAX - one.events.len(), at)
        })?;
        let mut whole = all[best].clone();
        whole.path = all
            .iter()
            .map(|one| one.path.as_str())
            .collect::<Vec<_>>()
            .join(" + ");
        whole.lines = all.iter().map(|one| one.lines).sum();
        let apart = all
            .iter()
            .enumerate()
            .filter(|(at, _)| *at != best)
            .find_map(|(at, other)| Some((at, parting(&all[best], other)?)));
        if let Some((at, (line, step))) = apart {
            whole.held.insert(
                0,
                Held {
                    verdict: Verdict::RankDesync,
                    because: format!(
                        "at step {step} the scale of {:?} (line {line}) is another than that of {:?}",
                        all[at].path, all[best].path
                    ),
                    line: Some(line),
                },
            );
            whole.held.sort_by_key(|held| held.verdict);
            whole.why = advice::why(&whole);
            whole.advice = advice::advice(&whole);
        }
        for (at, other) in all.iter().enumerate() {
            if at != best {
                whole.warnings.extend(
                    other
                        .warnings
                        .iter()
                        .filter(|w| w.kind == Kind::PassedOver)
                        .cloned(),
                );
            }
        }
        Some(whole)
    }

    /// The verdict.
    pub fn verdict(&self) -> Verdict {
        self.held
            .first()
            .map_or(Verdict::InsufficientEvidence, |held| held.verdict)
    }

    /// The history as a trace of scales and overflow flags, for replays; `None` where steps or scales cannot be told.
    pub fn to_trace(&self) -> Option<crate::tally::Trace> {
        replay::to_trace(self)
    }

    /// What else holds.
    pub fn also(&self) -> Vec<Verdict> {
        let mut also: Vec<Verdict> = Vec::new();
        for held in self.held.iter().skip(1) {
            if held.verdict != self.verdict() && !also.contains(&held.verdict) {
                also.push(held.verdict);
            }
        }
        also
    }

    /// Whether this is a real failure.
    pub fn is_bad_news(&self) -> bool {
        match self.verdict() {
            Verdict::GenuineNonfinite
            | Verdict::StepsNotSkipped
            | Verdict::DivergenceEvent
            | Verdict::RankDesync
            | Verdict::PinnedAtFloor => true,
            Verdict::ScaleSaturatedHigh => self.last_scale == Some(f64::INFINITY),
            _ => false,
        }
    }
}

/// The dialect that a log is called by: event lines before progress lines before prints.
fn dialect_of(history: &History) -> &'static Dialect {
    let mut best: Option<(Weight, u64, usize)> = None;
    for (at, dialect) in ALL.iter().enumerate() {
        let messages = history.messages[at];
        if messages == 0 || dialect.weight == Weight::Plain {
            continue;
        }
        let events = history.events_by_dialect[at];
        // Progress lines with an event line of the same format count as its event lines.
        let weight = dialect.weight;
        let better = best.is_none_or(|(w, n, _)| (weight, events.max(1)) > (w, n.max(1)));
        if better {
            best = Some((weight, events, at));
        }
    }
    best.map_or(&Dialect::PLAIN, |(.., at)| ALL[at])
}

/// The first event at a step known in both logs that left different scales: its line in the second, and the step.
fn parting(one: &Diagnosis, other: &Diagnosis) -> Option<(u64, u64)> {
    use std::collections::HashMap;
    let known = |event: &&Filled| {
        event.kind != FilledKind::Growth && event.count == 1 && event.step.is_some()
    };
    let mut after: HashMap<u64, f64> = HashMap::new();
    for event in one.events.iter().filter(known) {
        if let (Some(step), Some(value)) = (event.step, event.after) {
            after.insert(step, value);
        }
    }
    other.events.iter().filter(known).find_map(|event| {
        let (step, value) = (event.step?, event.after?);
        let expected = *after.get(&step)?;
        ((expected - value).abs() > 1e-6 * expected.abs().max(value.abs()))
            .then_some((event.line, step))
    })
}

/// The scalers that events name; one without a name where there is only one.
fn scalers(history: &History) -> Vec<Option<u64>> {
    let mut names: Vec<Option<u64>> = Vec::new();
    for entry in &history.entries {
        if let history::Entry::Event(event) = entry
            && event.overflow.scaler.is_some()
            && !names.contains(&event.overflow.scaler)
            && names.len() < 16
        {
            names.push(event.overflow.scaler);
        }
    }
    match names.len() {
        0 | 1 => vec![None],
        _ => names,
    }
}

/// Families whose event lines stand in the log; our own recorder's lines go with any.
fn event_families(history: &History) -> Vec<&'static str> {
    let mut families: Vec<&'static str> = Vec::new();
    for (at, dialect) in ALL.iter().enumerate() {
        if history.events_by_dialect[at] > 0
            && dialect.family != "gradscale"
            && !families.contains(&dialect.family)
        {
            families.push(dialect.family);
        }
    }
    families
}

/// A framework that prints no scale, told by its signs.
fn silent_framework(history: &History) -> Option<&'static str> {
    if history.bf16 {
        return None;
    }
    history
        .framework
        .or(history.order_warning.map(|_| "PyTorch"))
}

/// Steps that the log shows to be skipped, and a lower bound where it does not tell.
fn skipped(
    history: &History,
    shape: &Shape,
    dialect: &Dialect,
    mixed: bool,
) -> (Option<u64>, Option<u64>) {
    let all: u64 = history.events_by_dialect.iter().sum();
    let printed = all
        .saturating_sub(history.still_updated)
        .saturating_sub(shape.repeats);
    let inferred: u64 = shape
        .filled
        .iter()
        .filter(|f| f.inferred && !shape.event_lines && f.kind == FilledKind::Overflow)
        .map(|f| f.count)
        .sum();
    if mixed || shape.impossible_rises >= 3 {
        return (None, None);
    }
    let counted = history.counted.unwrap_or(0);
    let counted_in_all = history
        .counted_in_all
        .map_or(0, |[(step, first), (_, last)]| {
            // A counter that was already running before the log began counts from there.
            if first <= step && step <= 1000 {
                last
            } else {
                last.saturating_sub(first)
            }
        });
    if shape.event_lines {
        return (Some(printed.max(counted).max(counted_in_all)), None);
    }
    if history.still_updated > 0 {
        return (Some(0), None);
    }
    if history.counted.is_some() {
        // A counter that lies is no count; one of 0 beside a steady scale is.
        return if inferred > 0 && counted == 0 {
            (None, Some(inferred))
        } else {
            (Some(counted), None)
        };
    }
    if history.counted_in_all.is_some() {
        return (Some(counted_in_all), None);
    }
    if dialect.every_change && history.first.is_some() {
        return (Some(inferred), None);
    }
    if history.first.is_some() {
        return (None, Some(inferred));
    }
    (None, None)
}

fn warnings(log: &Log, diagnosis: &Diagnosis, families: &[&str]) -> Vec<Warning> {
    let history = &log.history;
    let mut warnings = Vec::new();
    let mut warn = |kind, seen: String, may_mean: &str, try_next: &str| {
        warnings.push(Warning::new(kind, seen, may_mean, try_next));
    };
    if history.facts.bytes == 0 {
        warn(
            Kind::ShortRun,
            "the log is empty".to_owned(),
            "there is nothing to judge",
            "the file that the training process writes to",
        );
    }
    if history.facts.binary {
        warn(
            Kind::PassedOver,
            "the file starts with control characters that no log prints".to_owned(),
            "it is no text, and what was found in it is chance",
            "the log itself, as text or gzip",
        );
    }
    if let Some(broken) = &log.broken {
        warn(
            Kind::PassedOver,
            format!("the compressed data breaks off ({broken})"),
            "the end of the log is missing",
            "the whole file",
        );
    }
    if families.len() > 1 {
        warn(
            Kind::PassedOver,
            format!("overflow lines of {} stand in one log", families.join(", ")),
            "several runs were concatenated, and their scales have nothing to do with each other",
            "one log a run",
        );
    }
    if let Some(line) = history.cut {
        warn(
            Kind::PassedOver,
            format!("line {line} breaks off within a number"),
            "the file was cut, and that number was not used",
            "the log up to its end",
        );
    } else if history.facts.unfinished && diagnosis.verdict() == Verdict::InsufficientEvidence {
        warn(
            Kind::PassedOver,
            "the last line has no end".to_owned(),
            "the log was cut, or the run still goes on",
            "the log up to its end",
        );
    }
    if let Some((line, understood)) = history.localized {
        warn(
            Kind::NotExact,
            format!("line {line} writes its numbers with the separators of another country"),
            if understood {
                "they were read with the point between thousands and the comma before decimals, or the other way round, as fits"
            } else {
                "a number such as 65,536 may be either, and was left out"
            },
            "the log as the training process wrote it",
        );
    }
    for line in &diagnosis.shape.unrestored {
        warn(
            Kind::NotExact,
            format!("at line {line} the scale is back at its start"),
            "the run was taken up again and the scaler's state was not restored",
            "saving and loading the scaler's state_dict with the checkpoint",
        );
    }
    if history.left_out.1 > 0 {
        warn(
            Kind::NotExact,
            format!(
                "{} changes beyond the first {} are only counted",
                history.left_out.1,
                history::MOST_ENTRIES
            ),
            "the verdict is about the part before them",
            "the log in parts",
        );
    }
    match diagnosis.verdict() {
        Verdict::InsufficientEvidence => warn(
            Kind::ShortRun,
            diagnosis
                .held
                .first()
                .map_or("too little to tell".to_owned(), |held| held.because.clone()),
            "whether the scaler works cannot be told from this log",
            "the lines named in the advice",
        ),
        Verdict::NotLossScaling => warn(
            Kind::NotExact,
            "no scale of gradients was found".to_owned(),
            "this is no FP16 run, or its framework prints nothing about its scale",
            "printing scaler.get_scale() once an optimizer step",
        ),
        _ => {}
    }
    warnings
}
