//! Tables: one row a tensor and step, a header always; commas, tabs or semicolons, fields in quotes where needed.

use super::run::{Again, Builder};
use super::{Edges, HistogramError, HistogramRun, between, is_gradient};
use crate::gradients;
use crate::tally::{Histogram, Moments, Role};
use std::path::Path;

/// What a table holds, by its columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Table {
    /// `param,n,bin_lo,bin_hi,counts`.
    Histograms,
    /// `name,n,max,min`.
    Statistics,
    /// `…underflow_pct`.
    Fp8,
}

/// A line longer than this is no row.
const LONGEST_LINE: usize = 1 << 20;
/// Bins of one row.
const MOST_BINS: usize = 1 << 16;

const NAMES: [&str; 3] = ["param", "name", "tensor"];
const STEPS: [&str; 3] = ["step", "wandb_step", "_step"];
const COUNTS: &str = "counts";
const ELEMENTS: [&str; 3] = ["n", "numel", "elements"];
const NORMS: [&str; 4] = ["l2_norm", "norm", "l2", "Norm"];

/// The fields of a line.
pub(super) fn fields(line: &str, separator: char) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut quoted = false;
    let mut characters = line.chars().peekable();
    while let Some(character) = characters.next() {
        let field = fields.last_mut().expect("never empty");
        match character {
            '"' if quoted && characters.peek() == Some(&'"') => {
                field.push('"');
                characters.next();
            }
            '"' => quoted = !quoted,
            c if c == separator && !quoted => fields.push(String::new()),
            c => field.push(c),
        }
    }
    fields
}

/// A header's columns.
pub(super) struct Header {
    columns: Vec<String>,
    separator: char,
}

impl Header {
    pub fn parse(line: &str) -> Header {
        let line = line.trim_start_matches('\u{feff}').trim();
        let separator = ['\t', ';']
            .into_iter()
            .find(|s| line.contains(*s))
            .unwrap_or(',');
        let columns = fields(line, separator)
            .into_iter()
            .map(|column| column.trim().to_owned())
            .collect();
        Header { columns, separator }
    }

    fn place(&self, names: &[&str]) -> Option<usize> {
        names
            .iter()
            .find_map(|name| self.columns.iter().position(|column| column == name))
    }

    fn counts(&self) -> Option<usize> {
        self.columns
            .iter()
            .position(|column| column.starts_with(COUNTS))
    }

    pub fn percents(&self) -> Option<usize> {
        let ends = |ending: &str| {
            self.columns
                .iter()
                .position(|column| column.ends_with(ending))
        };
        self.place(&["mean_underflow_pct"])
            .or(ends("underflow_pct"))
    }

    fn table(&self) -> Option<Table> {
        let has = |names: &[&str]| self.place(names).is_some();
        if self.counts().is_some() && has(&["bin_lo"]) && has(&["bin_hi"]) && has(&NAMES) {
            Some(Table::Histograms)
        } else if self.percents().is_some() {
            Some(Table::Fp8)
        } else if has(&["max"]) && has(&["min"]) && has(&ELEMENTS) && has(&NAMES) {
            Some(Table::Statistics)
        } else {
            None
        }
    }
}

/// What the first line of a file says that it is.
pub(super) fn table_of(head: &[u8]) -> Option<Table> {
    let line = head
        .split(|&byte| byte == b'\n')
        .find(|line| !line.trim_ascii().is_empty())?;
    Header::parse(std::str::from_utf8(line).ok()?).table()
}

/// A row and where it stands.
pub(super) struct Row<'a> {
    path: &'a Path,
    pub line: usize,
    header: &'a Header,
    fields: Vec<String>,
}

impl Row<'_> {
    pub fn wrong(&self, found: impl Into<String>, expected: impl Into<String>) -> HistogramError {
        HistogramError::Row {
            path: self.path.to_owned(),
            line: self.line,
            found: found.into(),
            expected: expected.into(),
        }
    }

    /// The text of a column; `None` where there is no such column or nothing in it.
    pub fn text(&self, names: &[&str]) -> Option<&str> {
        let place = self.header.place(names)?;
        Some(self.fields[place].trim()).filter(|text| !text.is_empty())
    }

    pub fn at(&self, place: usize) -> &str {
        self.fields[place].trim()
    }

    fn parsed<T: std::str::FromStr>(
        &self,
        names: &[&str],
        expected: &str,
    ) -> Result<Option<T>, HistogramError> {
        let Some(text) = self.text(names) else {
            return Ok(None);
        };
        text.parse().map(Some).map_err(|_| {
            let shown: String = text.chars().take(80).collect();
            self.wrong(format!("{shown:?} in column {:?}", names[0]), expected)
        })
    }

    pub fn number(&self, names: &[&str]) -> Result<Option<f64>, HistogramError> {
        self.parsed(names, "a number")
    }

    pub fn whole(&self, names: &[&str]) -> Result<Option<u64>, HistogramError> {
        self.parsed(names, "a whole number from 0")
    }

    fn needed<T>(&self, value: Option<T>, names: &[&str]) -> Result<T, HistogramError> {
        value.ok_or_else(|| {
            self.wrong(
                format!("nothing in column {:?}", names[0]),
                "a number in every row",
            )
        })
    }
}

/// Calls `see` with each row.
pub(super) fn rows(
    bytes: &[u8],
    path: &Path,
    see: &mut dyn FnMut(Row<'_>) -> Result<(), HistogramError>,
) -> Result<Header, HistogramError> {
    let mut header: Option<Header> = None;
    let wrong = |line: usize, found: String, expected: String| HistogramError::Row {
        path: path.to_owned(),
        line,
        found,
        expected,
    };
    for (at, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
        let number = at + 1;
        if line.len() > LONGEST_LINE {
            return Err(wrong(
                number,
                format!("more than {LONGEST_LINE} bytes"),
                "a row of numbers".to_owned(),
            ));
        }
        let text = std::str::from_utf8(line).map_err(|error| {
            wrong(
                number,
                format!("bytes that are no UTF-8 at byte {}", error.valid_up_to()),
                "text".to_owned(),
            )
        })?;
        if text.trim().is_empty() {
            continue;
        }
        let Some(header) = &header else {
            header = Some(Header::parse(text));
            continue;
        };
        let fields = fields(text.trim_end_matches('\r'), header.separator);
        if fields.len() != header.columns.len() {
            return Err(wrong(
                number,
                format!("{} columns", fields.len()),
                format!("{} as in the header", header.columns.len()),
            ));
        }
        see(Row {
            path,
            line: number,
            header,
            fields,
        })?;
    }
    header.ok_or_else(|| {
        wrong(
            1,
            "no row".to_owned(),
            "a header and a row for each tensor".to_owned(),
        )
    })
}

/// Reads a table of histograms or statistics: one run, or one for each value of its `run` column.
pub(super) fn read(
    bytes: &[u8],
    table: Table,
    path: &Path,
    reading: &gradients::Options,
) -> Result<Vec<HistogramRun>, HistogramError> {
    let mut runs: Vec<(String, Builder)> = Vec::new();
    rows(bytes, path, &mut |row| {
        let run = row.text(&["run"]).unwrap_or_default().to_owned();
        let place = match runs.iter().position(|(name, _)| *name == run) {
            Some(place) => place,
            None => {
                if runs.len() == 1 << 16 {
                    return Err(row.wrong("more than 65536 runs", "fewer"));
                }
                runs.push((run, Builder::default()));
                runs.len() - 1
            }
        };
        let builder = &mut runs[place].1;
        let step = row.whole(&STEPS)?.unwrap_or(0);
        let (name, role, histogram) = match table {
            Table::Histograms => histogram(&row)?,
            _ => statistics(&row)?,
        };
        // In such a table every row is a gradient, whatever its name, but what says that it is something else.
        let wanted = if reading.chooses() || role != Role::Activation {
            reading.selects(&name)
        } else {
            is_gradient(&name, reading)
        };
        if !wanted {
            builder.leave_out(&name);
        } else if !builder.add(step, &name, role, Vec::new(), histogram, Again::Fails) {
            return Err(row.wrong(
                format!("{name:?} at step {step} again"),
                "each tensor once a step; columns named run and step keep runs and steps apart",
            ));
        }
        Ok(())
    })?;
    if runs.is_empty() {
        return Err(HistogramError::Row {
            path: path.to_owned(),
            line: 2,
            found: "no row".to_owned(),
            expected: "a row for each tensor".to_owned(),
        });
    }
    let several = runs.len() > 1;
    let (mut read, mut empty) = (Vec::new(), None);
    for (run, builder) in runs {
        let name = if several {
            format!("run {run}")
        } else {
            String::new()
        };
        // Where globs leave nothing of one run, the others are still there.
        match builder.finish(&name, path, reading) {
            Ok(run) => read.push(run),
            Err(error) => empty = empty.or(Some(error)),
        }
    }
    match (read.is_empty(), empty) {
        (true, Some(error)) => Err(error),
        _ => Ok(read),
    }
}

fn histogram(row: &Row<'_>) -> Result<(String, Role, Histogram), HistogramError> {
    let name = row
        .text(&NAMES)
        .ok_or_else(|| row.wrong("no name", "a tensor's name in every row"))?
        .to_owned();
    let low = row.needed(row.number(&["bin_lo"])?, &["bin_lo"])?;
    let high = row.needed(row.number(&["bin_hi"])?, &["bin_hi"])?;
    let text = row.at(row.header.counts().expect("the header has the column"));
    let counts = text
        .split_ascii_whitespace()
        .take(MOST_BINS + 1)
        .map(str::parse::<u64>)
        .collect::<Result<Vec<u64>, _>>()
        .ok()
        .filter(|counts| !counts.is_empty() && counts.len() <= MOST_BINS)
        .ok_or_else(|| {
            let shown: String = text.chars().take(60).collect();
            row.wrong(
                format!("the counts {shown:?}"),
                "whole numbers with blanks between them, at most 65536",
            )
        })?;
    let total = counts
        .iter()
        .try_fold(0u64, |sum, &count| sum.checked_add(count));
    let n = row.whole(&ELEMENTS)?;
    if let Some(n) = n.filter(|&n| total != Some(n)) {
        return Err(row.wrong(
            format!("counts that do not add up to n = {n}"),
            "a count for every element",
        ));
    }
    if total == Some(0) {
        return Err(row.wrong("no element in any bin", "at least one"));
    }
    let size = (high - low) / counts.len() as f64;
    let edges: Vec<f64> = (0..=counts.len())
        .map(|i| match i {
            // The last edge is the number in the file, not a sum of sizes.
            i if i == counts.len() => high,
            i => (low + i as f64 * size).min(high),
        })
        .collect();
    let ascending = low <= high;
    let histogram = between(&edges, &counts, Edges::Listed)
        .filter(|_| ascending)
        .ok_or_else(|| {
            row.wrong(
                format!("bins from {low} to {high}"),
                "finite ascending edges and at most 2^63 elements",
            )
        })?;
    Ok((name, Role::Parameter, histogram))
}

/// A row of n, max, min and, where known, mean and norm.
fn statistics(row: &Row<'_>) -> Result<(String, Role, Histogram), HistogramError> {
    let parts = [
        row.text(&["param"]),
        row.text(&["name"]),
        row.text(&["tensor"]),
    ];
    let name = parts
        .iter()
        .flatten()
        .copied()
        .collect::<Vec<_>>()
        .join(".");
    if name.is_empty() {
        return Err(row.wrong("no name", "a tensor's name in every row"));
    }
    let role = match row.text(&["kind"]) {
        None | Some("weight_grad" | "grad" | "gradient") => Role::Parameter,
        Some("activation_grad") => Role::ActivationGradient,
        Some(_) => Role::Activation,
    };
    let known = Statistics {
        n: row.needed(row.whole(&ELEMENTS)?, &ELEMENTS)?,
        max: row.needed(row.number(&["max"])?, &["max"])?,
        min: row.needed(row.number(&["min"])?, &["min"])?,
        mean: row.number(&["mean"])?,
        norm: row.number(&NORMS)?,
    };
    let histogram = known
        .histogram()
        .ok_or_else(|| row.wrong(known.to_string(), Statistics::EXPECTED))?;
    Ok((name, role, histogram))
}

/// What is known of a tensor where only a few numbers are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Statistics {
    pub n: u64,
    pub max: f64,
    pub min: f64,
    pub mean: Option<f64>,
    pub norm: Option<f64>,
}

impl std::fmt::Display for Statistics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "n {}, max {}, min {}", self.n, self.max, self.min)
    }
}

impl Statistics {
    pub const EXPECTED: &'static str =
        "at least one and at most 2^63 elements, and a max that is not below min";

    /// One bin from min to max, with both ends and the sums; `None` where the numbers contradict each other.
    pub fn histogram(&self) -> Option<Histogram> {
        let Statistics {
            n,
            max,
            min,
            mean,
            norm,
        } = *self;
        if n == 0 || n > 1 << 63 {
            return None;
        }
        let mut histogram = Histogram::new();
        // An inf or NaN hides the rest: one element is known to be it, and nothing is known of the others.
        if min.is_nan() || max.is_nan() {
            histogram.add_nonfinite(0, 1).ok()?;
            histogram.add(-f64::MAX, f64::MAX, n - 1).ok()?;
            return Some(histogram);
        }
        if min > max {
            return None;
        }
        if min == f64::INFINITY || max == f64::NEG_INFINITY {
            histogram.add_nonfinite(n, 0).ok()?;
            return Some(histogram);
        }
        if min.is_infinite() || max.is_infinite() {
            let ends = u64::from(min.is_infinite()) + u64::from(max.is_infinite());
            let inf = ends.min(n);
            histogram.add_nonfinite(inf, 0).ok()?;
            let (low, high) = (min.max(-f64::MAX), max.min(f64::MAX));
            histogram.add(low, high, n - inf).ok()?;
            return Some(histogram);
        }
        let bins = [(min, max, n)];
        let histogram = Histogram::from_bins(&bins, Some([(min, min), (max, max)])).ok()?;
        let finite = |value: Option<f64>| value.filter(|value| value.is_finite());
        Some(
            histogram.with_moments(Moments {
                range: (min, max),
                sum: finite(mean).map(|mean| mean * n as f64),
                // A norm of 0 beside elements that are not 0 was lost itself.
                squares: finite(norm)
                    .filter(|&norm| norm > 0.0)
                    .map(|norm| norm * norm),
            }),
        )
    }
}
