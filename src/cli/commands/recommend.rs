//! `gradscale recommend`.

use super::{Reading, choosing, choosing_for, print, print_json};
use crate::atomic::AtomicFile;
use crate::cli::args::RecommendArgs;
use crate::cli::{CliError, DONE};
use crate::report::{json, table};
use crate::scaling::{Timeline, combinations, common_interval, parse_sweep, recommend};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

pub fn run(args: &RecommendArgs) -> Result<u8, CliError> {
    let reading = Reading::new(&args.reading)?;
    let mut options = choosing(&args.choosing)?;
    options.horizon = args.horizon;
    let sweep = args.sweep.as_deref().map(parse_sweep).transpose();
    let sweep = sweep.map_err(|source| CliError::Sweep {
        text: args.sweep.clone().unwrap_or_default(),
        source,
    })?;
    let mut rows = Rows::create(args)?;
    let mut answers = Vec::new();
    let mut warnings = Vec::new();
    for trace in reading.traces(&args.inputs, args.demo)? {
        let run = reading.run_of(&trace);
        let options = choosing_for(&args.choosing, &options, &trace);
        let answer = recommend(&run, &options).map_err(|source| CliError::Recommend {
            input: trace.label.clone(),
            source,
        })?;
        let swept = match &sweep {
            None => None,
            Some(keys) => {
                rows.line::<CliError>(&table::swept_heading(keys))?;
                let timeline = Timeline::new(&run);
                let (policy, measure) = (&options.policy, options.measure);
                let swept = combinations(&timeline, policy, keys, measure, &mut |row| {
                    rows.line(&table::swept_line(row))
                })
                .map_err(|failed: Failed| failed.about(args))?;
                Some(swept)
            }
        };
        warnings.extend(answer.warnings.iter().cloned());
        answers.push((trace.label, run, answer, swept));
    }
    let to_stdout = rows.finish()?;
    let common = common_interval(answers.iter().map(|(_, _, answer, _)| answer));
    if to_stdout {
        // The rows are the result.
    } else if args.json {
        let mut each: Vec<serde_json::Value> = answers
            .iter()
            .map(|(_, run, answer, swept)| {
                let mut value = json::recommendation(answer, run);
                if let Some(swept) = swept {
                    value["sweep"] = json::swept(swept, answer.measure);
                }
                value
            })
            .collect();
        if each.len() == 1 {
            print_json(&each.remove(0))?;
        } else {
            for (value, (label, ..)) in each.iter_mut().zip(&answers) {
                value["input"] = json!(label);
            }
            print_json(&json!({
                "schema": "gradscale.recommend/1",
                "runs": each,
                "common": common.map(|(n, low, high)| json!({"growth_interval": n, "interval": {"low": low, "high": high}})),
                "warnings": json::warnings(&warnings),
            }))?;
        }
    } else {
        for (i, (label, _, answer, swept)) in answers.iter().enumerate() {
            print(&format!(
                "{}{}",
                if i > 0 { "\n" } else { "" },
                table::recommendation(answer, label)
            ))?;
            if let Some(swept) = swept {
                print(&table::swept(swept, answer.measure))?;
            }
        }
        if answers.len() > 1 {
            print(&match common {
                Some((n, low, high)) => {
                    let end = high.map_or("up".to_owned(), |high| format!("to {high}"));
                    format!(
                        "\nFor all of them: growth_interval {n} (from {low} {end} is as good for each).\n"
                    )
                }
                None => "\nNo interval is as good for all of them.\n".to_owned(),
            })?;
        }
    }
    reading.warn(&warnings);
    Ok(DONE)
}

/// Where the rows of a sweep go while it goes on.
enum Rows {
    Nowhere,
    Stdout(std::io::BufWriter<std::io::Stdout>),
    File(PathBuf, std::io::BufWriter<AtomicFile>),
}

/// Why a sweep ended early: its own reason, or nobody takes its rows.
enum Failed {
    Sweep(crate::scaling::SweepError),
    Cli(Box<CliError>),
}

impl From<crate::scaling::SweepError> for Failed {
    fn from(source: crate::scaling::SweepError) -> Failed {
        Failed::Sweep(source)
    }
}

impl From<CliError> for Failed {
    fn from(error: CliError) -> Failed {
        Failed::Cli(Box::new(error))
    }
}

impl Failed {
    fn about(self, args: &RecommendArgs) -> CliError {
        match self {
            Failed::Cli(error) => *error,
            Failed::Sweep(source) => CliError::Sweep {
                text: args.sweep.clone().unwrap_or_default(),
                source,
            },
        }
    }
}

fn output(path: &Path) -> impl FnOnce(std::io::Error) -> CliError {
    let path = path.to_owned();
    move |source| CliError::Output { path, source }
}

impl Rows {
    fn create(args: &RecommendArgs) -> Result<Rows, CliError> {
        Ok(match &args.csv {
            None => Rows::Nowhere,
            Some(path) if path.as_os_str() == "-" => {
                Rows::Stdout(std::io::BufWriter::new(std::io::stdout()))
            }
            Some(path) => {
                let file = AtomicFile::create(path).map_err(output(path))?;
                Rows::File(path.clone(), std::io::BufWriter::new(file))
            }
        })
    }

    fn line<E: From<CliError>>(&mut self, line: &str) -> Result<(), E> {
        match self {
            Rows::Nowhere => Ok(()),
            Rows::Stdout(out) => out.write_all(line.as_bytes()).map_err(CliError::from),
            Rows::File(path, out) => out.write_all(line.as_bytes()).map_err(output(path)),
        }
        .map_err(E::from)
    }

    /// Writes what is left; whether the rows went to stdout.
    fn finish(self) -> Result<bool, CliError> {
        match self {
            Rows::Nowhere => Ok(false),
            Rows::Stdout(mut out) => {
                out.flush()?;
                Ok(true)
            }
            Rows::File(path, out) => {
                let file = out
                    .into_inner()
                    .map_err(|error| output(&path)(error.into_error()))?;
                file.commit().map_err(output(&path))?;
                Ok(false)
            }
        }
    }
}
