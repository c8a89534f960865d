//! Series: CSV or JSON Lines with one row a step, what people log when they log no gradients.
//!
//! Columns: `step`, with `amax` (the largest absolute *unscaled* gradient), or with `loss_scale` and `found_inf` (then
//! only bounds are known), or all of them; `loss` and `run` are optional, other columns are passed over. Each value of
//! `run` is a run of its own. An amax of `inf` or `nan` says that the step overflowed.

use super::{Role, Step, TensorInfo, Trace, nonfinite};
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

/// A line longer than this is refused: no row of numbers is.
const LONGEST_LINE: usize = 1 << 20;

/// What can go wrong with a series.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SeriesError {
    /// The system refused.
    #[error("reading series {path:?}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
    /// No row, or no header.
    #[error(
        "reading series {path:?}: found no row, expected a header such as step,amax and a row a step"
    )]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Scales that were averaged.
    #[error(
        "reading series {path:?}, line {line}: found column {found:?}, a mean of loss scales, which is no scale and cannot be replayed; expected step with loss_scale, the scale of that one step, and found_inf"
    )]
    Means {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The column.
        found: String,
    },
    /// The columns do not make a series.
    #[error(
        "reading series {path:?}, line {line}: found columns {found}, expected step with amax, or step with loss_scale and found_inf"
    )]
    Columns {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The header's columns.
        found: String,
    },
    /// A value that is not what its column holds.
    #[error(
        "reading series {path:?}, line {line}, column {column:?}: found {found:?}, expected {expected}"
    )]
    Value {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The column.
        column: &'static str,
        /// The text there.
        found: String,
        /// What belongs there.
        expected: &'static str,
    },
    /// A line that is no row.
    #[error("reading series {path:?}, line {line}: found {found}, expected {expected}")]
    Line {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// What was found.
        found: String,
        /// What a row looks like.
        expected: String,
    },
}

/// One parsed row and the line that it stood on.
#[derive(Default)]
struct Row {
    line: usize,
    run: String,
    step: u64,
    amax: Option<f64>,
    loss_scale: Option<f64>,
    found_inf: Option<bool>,
    loss: Option<f64>,
}

const COLUMNS: [&str; 6] = ["run", "step", "amax", "loss_scale", "found_inf", "loss"];

/// Whether a name looks like a series.
pub fn is_series(path: &Path) -> bool {
    let extension = path
        .extension()
        .map(|e| e.to_string_lossy().to_ascii_lowercase());
    matches!(
        extension.as_deref(),
        Some("csv" | "tsv" | "jsonl" | "ndjson")
    )
}

/// Reads a series file: one trace a run, in the order of their first rows.
///
/// # Errors
/// When a line is no row, with file, line and column.
pub fn read(path: &Path) -> Result<Vec<Trace>, SeriesError> {
    let file = std::fs::File::open(path).map_err(|source| SeriesError::Io {
        path: path.to_owned(),
        source,
    })?;
    parse(std::io::BufReader::new(file), path)
}

/// Parses a series; `path` names it in errors.
///
/// # Errors
/// As [`read`].
pub fn parse(mut reader: impl BufRead, path: &Path) -> Result<Vec<Trace>, SeriesError> {
    let mut runs: Vec<(String, Vec<Row>)> = Vec::new();
    let mut header: Option<Header> = None;
    let mut buffer = Vec::new();
    for line in 1.. {
        buffer.clear();
        let read = reader
            .by_ref()
            .take(LONGEST_LINE as u64 + 1)
            .read_until(b'\n', &mut buffer)
            .map_err(|source| SeriesError::Io {
                path: path.to_owned(),
                source,
            })?;
        if read == 0 {
            break;
        }
        let at = At { path, line };
        if read > LONGEST_LINE {
            return Err(at.line(
                format!("more than {LONGEST_LINE} bytes"),
                "a row of numbers",
            ));
        }
        let text = std::str::from_utf8(&buffer).map_err(|e| {
            at.line(
                format!("bytes that are no UTF-8 at byte {}", e.valid_up_to()),
                "text",
            )
        })?;
        let text = text.trim_start_matches('\u{feff}').trim();
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        let row = match &header {
            None if text.starts_with('{') => at.json(text)?,
            None => {
                header = Some(at.header(text)?);
                continue;
            }
            Some(header) => at.csv(text, header)?,
        };
        let rows = match runs.iter().position(|(run, _)| *run == row.run) {
            Some(place) => &mut runs[place].1,
            None => {
                runs.push((row.run.clone(), Vec::new()));
                &mut runs.last_mut().expect("just pushed").1
            }
        };
        if let Some(last) = rows.last()
            && row.step <= last.step
        {
            return Err(at.line(
                format!(
                    "step {} after step {} of line {}",
                    row.step, last.step, last.line
                ),
                "ascending steps; a column named run keeps runs apart",
            ));
        }
        rows.push(row);
    }
    if runs.is_empty() {
        return Err(SeriesError::Empty {
            path: path.to_owned(),
        });
    }
    Ok(runs
        .into_iter()
        .map(|(run, rows)| trace_of(run, &rows))
        .collect())
}

/// Where each of our columns stands in a CSV.
struct Header {
    places: [Option<usize>; 6],
    width: usize,
    separator: char,
}

/// A place in the file, to name in errors.
#[derive(Clone, Copy)]
struct At<'a> {
    path: &'a Path,
    line: usize,
}

impl At<'_> {
    fn line(self, found: String, expected: &str) -> SeriesError {
        SeriesError::Line {
            path: self.path.to_owned(),
            line: self.line,
            found,
            expected: expected.to_owned(),
        }
    }

    fn value(self, column: &'static str, found: &str, expected: &'static str) -> SeriesError {
        let found = found.chars().take(80).collect();
        SeriesError::Value {
            path: self.path.to_owned(),
            line: self.line,
            column,
            found,
            expected,
        }
    }

    fn header(self, text: &str) -> Result<Header, SeriesError> {
        let separator = ['\t', ';']
            .into_iter()
            .find(|s| text.contains(*s))
            .unwrap_or(',');
        let names: Vec<&str> = text.split(separator).map(unquoted).collect();
        let places = COLUMNS.map(|column| names.iter().position(|name| *name == column));
        if places[1].is_none()
            || (places[2].is_none() && (places[3].is_none() || places[4].is_none()))
        {
            let mean = |name: &&&str| {
                name.contains("scale") && (name.contains("mean") || name.contains("avg"))
            };
            if let Some(found) = names.iter().find(mean) {
                return Err(SeriesError::Means {
                    path: self.path.to_owned(),
                    line: self.line,
                    found: crate::text::shortened(found, 60),
                });
            }
            let found = format!("{:?}", text.chars().take(200).collect::<String>());
            return Err(SeriesError::Columns {
                path: self.path.to_owned(),
                line: self.line,
                found,
            });
        }
        Ok(Header {
            places,
            width: names.len(),
            separator,
        })
    }

    fn csv(self, text: &str, header: &Header) -> Result<Row, SeriesError> {
        let cells: Vec<&str> = text.split(header.separator).map(unquoted).collect();
        if cells.len() != header.width {
            let expected = format!("{} as in the header", header.width);
            return Err(self.line(format!("{} columns", cells.len()), &expected));
        }
        self.row(|column| {
            header.places[column]
                .map(|place| cells[place])
                .filter(|cell| !cell.is_empty())
        })
    }

    fn json(self, text: &str) -> Result<Row, SeriesError> {
        let object: serde_json::Map<String, serde_json::Value> = serde_json::from_str(text)
            .map_err(|e| {
                self.line(
                    format!("no JSON object ({e})"),
                    "one object a line, such as {\"step\":0,\"amax\":0.5}",
                )
            })?;
        let cells: [Option<String>; 6] = COLUMNS.map(|column| {
            object
                .get(column)
                .filter(|value| !value.is_null())
                .map(|value| match value {
                    serde_json::Value::String(text) => text.clone(),
                    other => other.to_string(),
                })
        });
        if cells[2].is_none() && (cells[3].is_none() || cells[4].is_none()) {
            let found = object
                .keys()
                .take(8)
                .map(String::as_str)
                .collect::<Vec<_>>()
                .join(", ");
            return Err(SeriesError::Columns {
                path: self.path.to_owned(),
                line: self.line,
                found,
            });
        }
        self.row(|column| cells[column].as_deref())
    }

    fn row<'c>(self, cell: impl Fn(usize) -> Option<&'c str>) -> Result<Row, SeriesError> {
        let magnitude = |column: usize, expected| {
            let Some(text) = cell(column) else {
                return Ok(None);
            };
            match text.parse::<f64>() {
                Ok(value) if value.is_nan() || value >= 0.0 => Ok(Some(value)),
                _ => Err(self.value(COLUMNS[column], text, expected)),
            }
        };
        let step = cell(1).unwrap_or_default();
        let number = step.parse::<u64>().ok().or_else(|| {
            step.parse::<f64>()
                .ok()
                .filter(|s| s.fract() == 0.0 && (0.0..9e15).contains(s))
                .map(|s| s as u64)
        });
        Ok(Row {
            line: self.line,
            run: cell(0).unwrap_or_default().to_owned(),
            step: number.ok_or_else(|| self.value("step", step, "an optimizer step, from 0"))?,
            amax: magnitude(
                2,
                "a magnitude that is not negative (inf or nan where the step overflowed)",
            )?,
            loss_scale: magnitude(3, "a scale that is not negative")?
                .filter(|scale| !scale.is_nan()),
            found_inf: match cell(4) {
                None => None,
                Some("0" | "0.0" | "false" | "False") => Some(false),
                Some("1" | "1.0" | "true" | "True") => Some(true),
                Some(text) => return Err(self.value("found_inf", text, "0 or 1")),
            },
            loss: match cell(5) {
                None => None,
                Some(text) => Some(
                    text.parse()
                        .map_err(|_| self.value("loss", text, "a number"))?,
                ),
            },
        })
    }
}

fn unquoted(cell: &str) -> &str {
    let cell = cell.trim();
    cell.strip_prefix('"')
        .and_then(|cell| cell.strip_suffix('"'))
        .unwrap_or(cell)
}

fn trace_of(run: String, rows: &[Row]) -> Trace {
    let measured = rows.iter().any(|row| row.amax.is_some());
    let tensor = TensorInfo {
        name: "amax".to_owned(),
        shape: Vec::new(),
        elements: 0,
        role: Role::Parameter,
        produced_in: None,
        reduction: None,
        backward_order: None,
    };
    let mut trace = Trace {
        run_id: run,
        tensors: if measured { vec![tensor] } else { Vec::new() },
        ..Trace::default()
    };
    for row in rows {
        trace.steps.push(Step {
            step: row.step,
            loss_scale: row.loss_scale,
            found_inf: row.found_inf,
            loss: row.loss,
        });
        if measured {
            let amax = row.amax.map(|amax| amax as f32);
            let (amax, bits) = match amax {
                None => (f32::NAN, 0),
                Some(amax) if amax.is_nan() => (0.0, nonfinite::NAN | nonfinite::NONE_FINITE),
                Some(amax) if amax.is_infinite() => (0.0, nonfinite::INF | nonfinite::NONE_FINITE),
                Some(amax) => (amax, 0),
            };
            trace.amax.push(amax);
            trace.nonfinite.push(bits);
        }
    }
    trace
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<Trace>, SeriesError> {
        parse(text.as_bytes(), Path::new("run.csv"))
    }

    #[test]
    fn columns_may_stand_in_any_order_and_runs_keep_apart() {
        let traces = parsed("amax,run,step,extra\n0.5,a,0,x\n0.25,b,0,y\ninf,a,3,\n").unwrap();
        assert_eq!(traces.len(), 2);
        assert_eq!(traces[0].span(), Some((0, 3)));
        assert_eq!(
            traces[0].nonfinite,
            [0, nonfinite::INF | nonfinite::NONE_FINITE]
        );
        assert_eq!(traces[1].amax, [0.25]);
    }

    #[test]
    fn json_lines_hold_the_same_as_csv() {
        let csv = parsed("step,loss_scale,found_inf\n0,65536,1\n1,32768,0\n").unwrap();
        let json = parsed("{\"step\":0,\"loss_scale\":65536.0,\"found_inf\":true}\n\n{\"step\":1,\"loss_scale\":32768,\"found_inf\":0}\n").unwrap();
        assert_eq!(csv, json);
        assert!(csv[0].tensors.is_empty());
    }

    #[test]
    fn errors_name_file_line_and_column() {
        for (text, parts) in [
            (
                "step,amax\n0,abc\n",
                vec!["run.csv", "line 2", "amax", "abc"],
            ),
            ("step,amax\n0,-1\n", vec!["line 2", "amax", "-1"]),
            ("step,amax\n0,1,2\n", vec!["line 2", "3 columns"]),
            (
                "step,amax\n1,1\n1,1\n",
                vec!["line 3", "step 1 after step 1"],
            ),
            ("step,loss\n1,1\n", vec!["line 1", "step,loss"]),
            (
                "step,amax,found_inf\n1,1,maybe\n",
                vec!["found_inf", "maybe"],
            ),
            ("{\"step\":1}\n", vec!["line 1", "found columns step"]),
            ("{\"step\":1,\n", vec!["no JSON object"]),
            ("step,amax\nx,1\n", vec!["step", "\"x\""]),
            ("", vec!["run.csv", "no row"]),
        ] {
            let message = parsed(text).unwrap_err().to_string();
            assert!(
                parts.iter().all(|part| message.contains(part)),
                "{text:?}: {message}"
            );
        }
        let message = parse(&b"step,amax\n\xFF\n"[..], Path::new("x"))
            .unwrap_err()
            .to_string();
        assert!(message.contains("UTF-8"), "{message}");
    }
}
