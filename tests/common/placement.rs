//! Series that know an overflow only to a bracket of steps: whether a policy can have run them, and one way it can.
//!
//! ```text
//!   bracket      [  lo ......... hi  ]            the overflow lies in here
//!   scale        s before, s/2 after              so g = log2(s / scale left by the last overflow) growths lie between
//!   steps        last + g·W + 1 ... last + (g + 1)·W
//! ```
//!
//! The steps at which the last overflow can lie are an interval; so are those of the next. Carrying the interval forward
//! finds out whether there is a way; going back from its end finds one.

use std::collections::BTreeMap;
use std::path::Path;

/// A row of a CSV: its cells by their columns.
pub type Row = BTreeMap<String, String>;

/// The rows of a file of `tests/data/gpu_runs`.
pub fn rows(file: &str) -> Vec<Row> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/gpu_runs")
        .join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
    let row = |line: &str| {
        header
            .iter()
            .zip(line.split(','))
            .map(|(k, v)| ((*k).to_owned(), v.to_owned()))
            .collect()
    };
    lines.map(row).collect()
}

/// The same, run by run.
pub fn by_run(file: &str) -> Vec<Vec<Row>> {
    let mut runs: Vec<Vec<Row>> = Vec::new();
    for row in rows(file) {
        match runs.last_mut() {
            Some(last) if last[0].get("run") == row.get("run") => last.push(row),
            _ => runs.push(vec![row]),
        }
    }
    runs
}

/// A number in a row.
pub fn number(row: &Row, column: &str) -> f64 {
    let cell = &row[column];
    cell.parse()
        .unwrap_or_else(|_| panic!("{column}: {cell:?} is no number"))
}

/// What a bracketed series saw. A last row without a scale only says how long the run is.
pub fn seen(run: &[Row], scale: &str) -> Vec<Seen> {
    run.iter()
        .filter(|row| !row[scale].is_empty())
        .map(|row| match row["found_inf"].as_str() {
            "1" => Seen::Overflow {
                low: number(row, "step_lo") as i64,
                high: number(row, "step_hi") as i64,
                after: number(row, scale),
            },
            _ => Seen::Reading {
                step: number(row, "step_hi") as i64,
                scale: number(row, scale),
            },
        })
        .collect()
}

/// A row of such a series.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Seen {
    /// An overflow between two steps, the scale halved to `after`.
    Overflow { low: i64, high: i64, after: f64 },
    /// The scale that was used at a step.
    Reading { step: i64, scale: f64 },
}

/// What became of a series.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    /// A step for each overflow that fits.
    pub steps: Vec<i64>,
    /// Overflows that fit, and all.
    pub overflows: (usize, usize),
    /// Readings that fit, and all.
    pub readings: (usize, usize),
}

/// Places overflows for the rule that doubles after `window` clean steps and halves at an overflow, from `first`.
///
/// What does not fit is counted and passed over: the scale is then taken from the row itself.
pub fn place(rows: &[Seen], first: f64, window: i64) -> Placed {
    let mut placed = Placed {
        steps: Vec::new(),
        overflows: (0, 0),
        readings: (0, 0),
    };
    // The last change and the scale it left: at the start as if an overflow lay before step 0.
    let (mut from, mut to, mut scale) = (-1i64, -1i64, first);
    // Intervals of the overflows so far and the growths before each, for the way back.
    let mut chain: Vec<(i64, i64, i64)> = Vec::new();
    for row in rows {
        match *row {
            Seen::Overflow { low, high, after } => {
                placed.overflows.1 += 1;
                let growths = (2.0 * after / scale).log2();
                let fits = growths >= 0.0 && growths.fract() == 0.0;
                let growths = growths as i64;
                let earliest = (from + growths * window + 1).max(low);
                let latest = (to + (growths + 1) * window).min(high);
                if fits && earliest <= latest {
                    placed.overflows.0 += 1;
                    chain.push((earliest, latest, growths));
                    (from, to) = (earliest, latest);
                } else {
                    backwards(&mut chain, window, &mut placed.steps);
                    (from, to) = (low, high);
                    chain.push((low, high, 0));
                }
                scale = after;
            }
            Seen::Reading { step, scale: read } => {
                placed.readings.1 += 1;
                let growths = (read / scale).log2();
                if growths < 0.0 || growths.fract() != 0.0 {
                    continue;
                }
                // Growth number g takes effect at step last + g·W + 1.
                let growths = growths as i64;
                let earliest = (step - (growths + 1) * window).max(from);
                let latest = (step - growths * window - 1).min(to);
                let latest = if growths == 0 {
                    (step - 1).min(to)
                } else {
                    latest
                };
                if earliest <= latest {
                    placed.readings.0 += 1;
                    (from, to) = (earliest, latest);
                    if let Some(last) = chain.last_mut() {
                        (last.0, last.1) = (earliest, latest);
                    }
                }
            }
        }
    }
    backwards(&mut chain, window, &mut placed.steps);
    placed
}

/// One placement, from the last overflow back: each as late as the next allows.
fn backwards(chain: &mut Vec<(i64, i64, i64)>, window: i64, steps: &mut Vec<i64>) {
    let mut found = Vec::new();
    let mut next: Option<(i64, i64)> = None;
    for &(from, to, growths) in chain.iter().rev() {
        let at = match next {
            None => to,
            // The next lies g·W + 1 to (g + 1)·W after this one.
            Some((step, growths)) => (step - growths * window - 1).min(to),
        };
        found.push(at.max(from));
        next = Some((at.max(from), growths));
    }
    found.reverse();
    steps.append(&mut found);
    chain.clear();
}
