//! Reading what people log instead of gradients: histograms and per-tensor statistics.
//!
//! | file | what is read |
//! |---|---|
//! | TensorBoard | `*tfevents*`, one file or a directory with some; `HistogramProto` (torch, TF1) and the n×3 tensors of TF2; scalars that name a loss scale or found_inf |
//! | W&B | `wandb-summary.json`, `wandb-history.jsonl`: `"_type": "histogram"` with `bins` or `packedBins`; and CSV with `param,n,bin_lo,bin_hi,counts` |
//! | statistics | msprobe's `dump.json`, or a directory of them by step and rank; CSV with `name,n,max,min` and, where known, `mean,l2_norm` |
//!
//! All become [`Histogram`]s, and so bounds: which elements a scale flushes is known only up to the bin. What each
//! writer is trusted with:
//!
//! - **torch's `add_histogram`** (and TF1) bins every finite element, and gives the smallest and the largest exactly.
//!   The edges of a bin belong to it on either side.
//! - **W&B** drops inf and NaN before it counts, so a step that overflowed looks clean. `torch.histc` places elements in
//!   f32, so inner edges are taken as 2^-20 of the largest edge wider on both sides; `packedBins` gives the last edge only
//!   to within the rounding of its bin size, 2^-17 of the largest edge. Where the first and the last bin hold elements,
//!   the outer edges are the smallest and the largest element, as `wandb.watch` and `wandb.Histogram(sequence)` make
//!   them. Counts are f32: a bin of 2^24 elements or more is not known to hold just as many.
//! - **statistics** give n, max and min; mean and norm tighten the bounds (see [`Moments`](crate::tally::Moments)).
//!
//! Tags and keys with "grad" in their name are gradients; `--tensors` chooses others. The rest is left out with a note.
//! Shares of elements lost to FP8, as Transformer Engine's statistics have them, are recognised and refused: FP8 has a
//! scale of its own for each tensor or block, and no loss scale can be read from them.
//!
//! Files are not trusted: lengths are checked before anything is allocated, and nothing recurses on a file's say-so.

mod csv;
mod error;
mod events;
mod fp8;
mod json;
mod msprobe;
mod run;
mod wandb;
mod wire;

pub use error::HistogramError;
pub use fp8::{Fp8Share, read as read_fp8};
pub use run::{HistogramRun, Placed};
pub(crate) use run::{flushed_at_one, largest, representable_from};

use crate::gradients::{self, Kind};
use crate::tally::Histogram;
use std::io::Read;
use std::path::{Path, PathBuf};

/// What a path holds.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Form {
    /// Directories with event files, each a run; or one file.
    Events(Vec<(PathBuf, Vec<PathBuf>)>),
    WandbSummary,
    WandbHistory,
    Table(csv::Table),
    Msprobe(Vec<PathBuf>),
}

/// Bytes that are looked at to tell what a file is.
const LOOK: usize = 1 << 20;
/// Directories below the one that was named are looked into so far.
const DEPTH: usize = 4;

/// Whether `path` is a file or directory that [`read`] reads.
pub fn is_histograms(path: &Path) -> bool {
    recognise(path).is_some()
}

/// Reads the histograms of `path`: one run, or several where a column or directories keep them apart.
///
/// With `skip_bad` an event file that breaks off or is damaged gives what comes before, with a warning.
///
/// # Errors
/// When the file is damaged, holds no gradient histogram, or only shares of FP8.
pub fn read(
    path: &Path,
    reading: &gradients::Options,
    skip_bad: bool,
) -> Result<Vec<HistogramRun>, HistogramError> {
    let whole = |path: &Path| {
        std::fs::read(path).map_err(|source| HistogramError::Io {
            path: path.to_owned(),
            source,
        })
    };
    match recognise(path) {
        Some(Form::Events(runs)) => events::read(path, &runs, reading, skip_bad),
        Some(Form::WandbSummary) => wandb::read_summary(&json::load(path)?, path, reading),
        Some(Form::WandbHistory) => wandb::read_history(path, reading),
        Some(Form::Table(csv::Table::Fp8)) => Err(fp8::refusal(path)?),
        Some(Form::Table(table)) => csv::read(&whole(path)?, table, path, reading),
        Some(Form::Msprobe(files)) => msprobe::read(path, &files, reading),
        None => Err(HistogramError::Unknown {
            path: path.to_owned(),
        }),
    }
}

/// Parses bytes as the file named `name` would be, for a fuzzer: no file is opened.
#[doc(hidden)]
pub fn parse(bytes: &[u8], name: &str) -> Result<Vec<HistogramRun>, HistogramError> {
    let path = Path::new(name);
    let reading = gradients::Options::new();
    match name {
        "events" => events::parse_one(bytes, path, &reading),
        "wandb-summary.json" => wandb::read_summary(bytes, path, &reading),
        "wandb-history.jsonl" => wandb::parse_history(bytes, path, &reading),
        "dump.json" => msprobe::parse_one(bytes, path, &reading),
        _ => match csv::table_of(bytes) {
            Some(csv::Table::Fp8) => {
                fp8::parse(bytes, path).map(|rows| Err(fp8::refused(path, &rows)))?
            }
            Some(table) => csv::read(bytes, table, path, &reading),
            None => Err(HistogramError::Unknown {
                path: path.to_owned(),
            }),
        },
    }
}

fn name_of(path: &Path) -> String {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

fn is_event_name(name: &str) -> bool {
    name.contains("tfevents") && !name.ends_with(".profile-empty")
}

fn recognise(path: &Path) -> Option<Form> {
    let metadata = std::fs::metadata(path).ok()?;
    if metadata.is_dir() {
        return recognise_directory(path);
    }
    // Opening a pipe would wait for its writer.
    if !metadata.is_file() {
        return None;
    }
    let name = name_of(path);
    if is_event_name(&name) {
        return Some(Form::Events(vec![(path.to_owned(), vec![path.to_owned()])]));
    }
    let lower = name.to_ascii_lowercase();
    let ending = lower.rsplit_once('.').map_or("", |(_, ending)| ending);
    let mut head = Vec::new();
    let looked = |head: &mut Vec<u8>, limit: usize| {
        let file = std::fs::File::open(path).ok()?;
        file.take(limit as u64).read_to_end(head).ok()
    };
    match ending {
        "csv" | "tsv" => {
            looked(&mut head, LOOK)?;
            csv::table_of(&head).map(Form::Table)
        }
        "jsonl" | "ndjson" => {
            looked(&mut head, LOOK)?;
            (lower.starts_with("wandb-history") || wandb::looks_like(&head))
                .then_some(Form::WandbHistory)
        }
        "json" if lower.ends_with(".index.json") => None,
        "json" => {
            looked(&mut head, LOOK)?;
            if lower == "wandb-summary.json" || wandb::looks_like(&head) {
                Some(Form::WandbSummary)
            } else if lower == "dump.json" || msprobe::looks_like(&head) {
                Some(Form::Msprobe(vec![path.to_owned()]))
            } else {
                None
            }
        }
        _ if Kind::of_extension(path).is_some() => None,
        _ => {
            looked(&mut head, 12)?;
            events::is_record(&head)
                .then(|| Form::Events(vec![(path.to_owned(), vec![path.to_owned()])]))
        }
    }
}

/// What was found under a directory.
#[derive(Default)]
struct Found {
    events: Vec<(PathBuf, Vec<PathBuf>)>,
    msprobe: Vec<PathBuf>,
    dumps: bool,
    seen: usize,
}

/// Entries that are looked at before a directory is given up as something else.
const MOST_ENTRIES: usize = 100_000;

fn recognise_directory(path: &Path) -> Option<Form> {
    let mut found = Found::default();
    look(path, 0, &mut found)?;
    let direct = found.events.iter().any(|(directory, _)| directory == path);
    if direct || (!found.events.is_empty() && !found.dumps) {
        // A directory's own events are the run; without any, each directory below is one.
        if direct {
            found.events.retain(|(directory, _)| directory == path);
        }
        return Some(Form::Events(found.events));
    }
    (!found.msprobe.is_empty() && !found.dumps).then_some(Form::Msprobe(found.msprobe))
}

/// Looks into a directory, in the order of names; links to directories are not followed.
fn look(path: &Path, depth: usize, found: &mut Found) -> Option<()> {
    let mut entries: Vec<std::fs::DirEntry> = std::fs::read_dir(path)
        .ok()?
        .collect::<Result<_, _>>()
        .ok()?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    let mut events = Vec::new();
    let mut below = Vec::new();
    for entry in entries {
        found.seen += 1;
        if found.seen > MOST_ENTRIES {
            return None;
        }
        let (name, at) = (name_of(&entry.path()), entry.path());
        if name.starts_with('.') {
            continue;
        }
        let kind = entry.file_type().ok()?;
        if kind.is_dir() {
            below.push(at);
        } else if is_event_name(&name) {
            events.push(at);
        } else if name == "dump.json" {
            found.msprobe.push(at);
        } else if Kind::of_extension(&at).is_some() {
            found.dumps = true;
        }
    }
    if !events.is_empty() {
        found.events.push((path.to_owned(), events));
    }
    if depth < DEPTH {
        for directory in below {
            look(&directory, depth + 1, found)?;
        }
    }
    Some(())
}

/// Whether a tag names a gradient: by the globs where some were given, else by "grad" in it.
fn is_gradient(name: &str, reading: &gradients::Options) -> bool {
    reading.selects(name) && (reading.chooses() || name.to_ascii_lowercase().contains("grad"))
}

/// A count in a file: a whole number that is not negative.
fn count_of(value: f64) -> Option<u64> {
    (value.fract() == 0.0 && (0.0..=9_007_199_254_740_992.0).contains(&value))
        .then_some(value as u64)
}

/// Inner edges are this share of the largest edge wider on both sides: `torch.histc` places in f32.
const PLACED_WITHIN: f64 = 1.0 / (1 << 20) as f64;
/// `packedBins` adds up a bin size that was rounded to f32.
const PACKED_WITHIN: f64 = 1.0 / (1 << 17) as f64;

/// How the edges of a histogram were written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Edges {
    /// Each of them.
    Listed,
    /// The first, and the size of a bin.
    Packed,
}

/// A histogram of neighbouring bins, `counts.len() + 1` ascending edges, whose outer edges are elements where the outer
/// bins hold any. `None` where edges are out of order or no numbers, or counts are too many.
fn between(edges: &[f64], counts: &[u64], written: Edges) -> Option<Histogram> {
    let (&first, &last) = (edges.first()?, edges.last()?);
    if edges.len() != counts.len() + 1 || edges.iter().any(|edge| !edge.is_finite()) {
        return None;
    }
    let largest = first.abs().max(last.abs());
    let (slack, end) = match (first == last, written) {
        (true, _) => (0.0, 0.0),
        (_, Edges::Listed) => (PLACED_WITHIN * largest, 0.0),
        (_, Edges::Packed) => (PACKED_WITHIN * largest, PACKED_WITHIN * largest),
    };
    let mut bins = Vec::with_capacity(counts.len());
    for (pair, &count) in edges.windows(2).zip(counts) {
        if pair[0] > pair[1] {
            return None;
        }
        let low = (pair[0] - slack).max(first);
        let high = (pair[1] + slack).min(last + end);
        bins.push((low, high, count));
    }
    let attained = counts.first()? > &0 && counts.last()? > &0;
    let ends = attained.then_some([(first, first), (last - end, last + end)]);
    Histogram::from_bins(&bins, ends).ok()
}
