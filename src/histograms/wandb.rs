//! W&B: histograms in a run's summary (the last logged state) or its history (one JSON object a line).
//!
//! `{"gradients/layer.weight": {"_type": "histogram", "values": [counts], "bins": [edges]}, "_step": 19}`, with
//! `"packedBins": {"min", "size", "count"}` in place of `bins` where all bins are equally wide. Keys may be nested.

use super::json::{self, LARGEST, Node};
use super::run::{Again, Builder};
use super::{Edges, HistogramError, HistogramRun, between, count_of, is_gradient};
use crate::gradients;
use crate::tally::{Histogram, Role};
use crate::warning::{Kind, Warning};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// Bins of one histogram; W&B itself allows 512.
const MOST_BINS: usize = 1 << 16;
/// Nested keys.
const DEPTH: usize = 8;
/// Counts are f32, which above this cannot count by one.
const SATURATED: u64 = 1 << 24;

/// Whether the first bytes of a file hold a histogram of W&B.
pub(super) fn looks_like(head: &[u8]) -> bool {
    let find = |text: &[u8]| memchr::memmem::find(head, text).is_some();
    find(b"\"_type\"") && find(b"\"histogram\"")
}

/// A summary: one state.
pub(super) fn read_summary(
    bytes: &[u8],
    path: &Path,
    reading: &gradients::Options,
) -> Result<Vec<HistogramRun>, HistogramError> {
    let mut builder = Builder::default();
    let mut state = State::default();
    state.take(
        &json::parse(bytes, path, 1)?,
        path,
        None,
        reading,
        &mut builder,
    )?;
    state.finish(builder, path, reading)
}

/// A history: a state a line.
pub(super) fn read_history(
    path: &Path,
    reading: &gradients::Options,
) -> Result<Vec<HistogramRun>, HistogramError> {
    let file = std::fs::File::open(path).map_err(|source| HistogramError::Io {
        path: path.to_owned(),
        source,
    })?;
    parse_history(BufReader::new(file), path, reading)
}

pub(super) fn parse_history(
    mut reader: impl BufRead,
    path: &Path,
    reading: &gradients::Options,
) -> Result<Vec<HistogramRun>, HistogramError> {
    let mut builder = Builder::default();
    let mut state = State::default();
    let mut buffer = Vec::new();
    let mut rows = 0u64;
    for line in 1.. {
        buffer.clear();
        let read = reader
            .by_ref()
            .take(LARGEST + 1)
            .read_until(b'\n', &mut buffer)
            .map_err(|source| HistogramError::Io {
                path: path.to_owned(),
                source,
            })?;
        if read == 0 {
            break;
        }
        if read as u64 > LARGEST {
            return Err(HistogramError::Json {
                path: path.to_owned(),
                place: format!("line {line}"),
                found: format!("more than {LARGEST} bytes"),
                expected: "one object a line".to_owned(),
            });
        }
        if buffer.trim_ascii().is_empty() {
            continue;
        }
        let node = json::parse(buffer.trim_ascii_end(), path, line)?;
        state.take(&node, path, Some((line, rows)), reading, &mut builder)?;
        rows += 1;
    }
    state.finish(builder, path, reading)
}

/// What is noticed on the way.
#[derive(Default)]
struct State {
    saturated: u64,
}

impl State {
    /// Takes one object; in a history with its line, and the row that counts as its step if it names none.
    fn take(
        &mut self,
        node: &Node,
        path: &Path,
        line: Option<(usize, u64)>,
        reading: &gradients::Options,
        builder: &mut Builder,
    ) -> Result<(), HistogramError> {
        let place = |key: &str| match line {
            Some((line, _)) => format!("line {line}, key {key:?}"),
            None => format!("key {key:?}"),
        };
        let wrong = |key: &str, found: String, expected: &str| HistogramError::Json {
            path: path.to_owned(),
            place: place(&key.chars().take(120).collect::<String>()),
            found,
            expected: expected.to_owned(),
        };
        let Node::Map(entries) = node else {
            return Err(wrong("", "no object".to_owned(), "an object"));
        };
        let step = match node.get("_step").or(node.get("step")) {
            None => line.map_or(0, |(_, row)| row),
            Some(found) => found
                .number()
                .and_then(count_of)
                .ok_or_else(|| wrong("_step", "no step".to_owned(), "a whole number from 0"))?,
        };
        // An explicit stack, so that nothing recurses on a file's say-so.
        let mut left: Vec<(String, &Node, usize)> = entries
            .iter()
            .rev()
            .map(|(key, value)| (key.clone(), value, 1))
            .collect();
        while let Some((key, value, depth)) = left.pop() {
            match value {
                Node::Number(number) => {
                    builder.scalar(step, &key, *number);
                }
                Node::Map(_) if value.get("_type").and_then(Node::text) == Some("histogram") => {
                    if !is_gradient(&key, reading) {
                        builder.leave_out(&key);
                        continue;
                    }
                    let histogram = self
                        .histogram(value)
                        .map_err(|(found, expected)| wrong(&key, found, expected))?;
                    if histogram.elements() > 0 {
                        builder.add(
                            step,
                            &key,
                            Role::Parameter,
                            Vec::new(),
                            histogram,
                            Again::Replaces,
                        );
                    }
                }
                Node::Map(inner) if depth < DEPTH => left.extend(
                    inner
                        .iter()
                        .rev()
                        .map(|(name, value)| (format!("{key}/{name}"), value, depth + 1)),
                ),
                _ => {}
            }
        }
        Ok(())
    }

    fn histogram(&mut self, node: &Node) -> Result<Histogram, (String, &'static str)> {
        const VALUES: &str = "values: the counts of at most 65536 bins, whole numbers";
        const BINS: &str =
            "bins: one edge more than counts, ascending; or packedBins with min, size and count";
        let counts = node
            .get("values")
            .and_then(Node::numbers)
            .filter(|values| values.len() <= MOST_BINS)
            .ok_or_else(|| ("no list of counts".to_owned(), VALUES))?;
        let counts = counts
            .iter()
            .map(|&count| count_of(count).ok_or_else(|| (format!("the count {count}"), VALUES)))
            .collect::<Result<Vec<u64>, _>>()?;
        self.saturated += counts.iter().filter(|&&count| count >= SATURATED).count() as u64;
        if counts.is_empty() {
            return Ok(Histogram::new());
        }
        let (edges, written) = if let Some(bins) = node.get("bins").and_then(Node::numbers) {
            (bins.to_vec(), Edges::Listed)
        } else if let Some(packed) = node.get("packedBins") {
            let field = |name: &str| packed.get(name).and_then(Node::number);
            let (Some(min), Some(size), Some(count)) =
                (field("min"), field("size"), field("count"))
            else {
                return Err(("packedBins without all of its numbers".to_owned(), BINS));
            };
            if count != counts.len() as f64 || size.is_nan() || size < 0.0 {
                return Err((
                    format!(
                        "packedBins of {count} bins of {size} beside {} counts",
                        counts.len()
                    ),
                    BINS,
                ));
            }
            let edges = (0..=counts.len()).map(|i| min + i as f64 * size).collect();
            (edges, Edges::Packed)
        } else {
            return Err(("no edges".to_owned(), BINS));
        };
        between(&edges, &counts, written).ok_or_else(|| {
            (
                format!("{} edges for {} counts", edges.len(), counts.len()),
                BINS,
            )
        })
    }

    fn finish(
        self,
        mut builder: Builder,
        path: &Path,
        reading: &gradients::Options,
    ) -> Result<Vec<HistogramRun>, HistogramError> {
        if self.saturated > 0 && !builder.is_empty() {
            builder.warnings.push(Warning::new(
                Kind::NotExact,
                format!("{} bins hold 2^24 elements or more", self.saturated),
                "their counts were made in f32, which stops counting there; shares may be off",
                "a dump of the gradients, or gradscale's recorder",
            ));
        }
        Ok(vec![builder.finish("", path, reading)?])
    }
}
