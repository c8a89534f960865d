//! `gradscale analyze`.

use super::{Reading, print, print_json};
use crate::analysis::{Analysis, By, Limits, Options, Passage, analyze, gate};
use crate::cli::args::{AnalyzeArgs, ByArg};
use crate::cli::{BAD_NEWS, COULD_NOT, CliError, DONE, values};
use crate::float::Format;
use crate::input::Input;
use crate::report::{json, table};
use std::io::Write;

pub fn run(args: &AnalyzeArgs) -> Result<u8, CliError> {
    let reading = Reading::new(&args.reading)?;
    let mut options = Options {
        format: Format::parse(&args.format)?,
        scales: values::scales("--scales", &args.scales)?,
        by: match args.by {
            Some(ByArg::All) => By::All,
            Some(ByArg::Tensor) => By::Tensor,
            Some(ByArg::Step) => By::Step,
            None if args.json => By::All,
            None => By::Tensor,
        },
        errors: args.errors,
        flush_subnormals: args.flush_subnormals,
        backend: reading.backend,
    };
    let inputs = reading.inputs(&args.inputs, args.demo)?;
    let limits = Limits {
        underflow: args
            .max_underflow
            .as_deref()
            .map(|t| values::share("--max-underflow", t))
            .transpose()?,
        overflow: args
            .max_overflow
            .as_deref()
            .map(|t| values::share("--max-overflow", t))
            .transpose()?,
    };
    let gated = match (limits.underflow.or(limits.overflow), args.at.as_deref()) {
        (None, None) => None,
        (None, Some(_)) => {
            return Err(CliError::Gate {
                found: "--at alone".to_owned(),
            });
        }
        (Some(_), None) => {
            return Err(CliError::Gate {
                found: "no --at".to_owned(),
            });
        }
        (Some(_), Some("used")) => Some(used_scale(&inputs, &reading)?),
        (Some(_), Some(text)) => Some(values::scale("--at", text)? as f32),
    };
    let mut analysis = analyze(&inputs, &options, &reading.options, &reading.bar)?;
    if args.json {
        print_json(&json::analysis(&analysis))?;
    } else {
        print(&table::analysis(&analysis))?;
    }
    reading.warn(&analysis.warnings);
    let Some(scale) = gated else { return Ok(DONE) };
    // The gate has its own scale and its own groups.
    options.scales = vec![scale];
    options.by = if args.any_tensor { By::Tensor } else { By::All };
    analysis = analyze(&inputs, &options, &reading.options, &reading.bar)?;
    Ok(judge(&analysis, scale, limits))
}

/// Says on stderr which limits are not kept; 1 where one is crossed, 2 where one lies inside the bounds.
fn judge(analysis: &Analysis, scale: f32, limits: Limits) -> u8 {
    let crossings = gate(analysis, scale, limits);
    let mut err = std::io::stderr();
    for crossing in &crossings {
        // Nobody can be told where stderr is closed; the status still says it.
        let _ = err.write_all(table::crossing(crossing).as_bytes());
    }
    match crossings.iter().map(|crossing| crossing.passage).max() {
        None | Some(Passage::Open) => DONE,
        Some(Passage::Shut) => BAD_NEWS,
        Some(Passage::CannotTell) => COULD_NOT,
    }
}

/// The scale that the inputs were recorded at: the last step's, or what a dump's own metadata says.
fn used_scale(inputs: &[Input], reading: &Reading) -> Result<f32, CliError> {
    let mut scales = Vec::new();
    for input in inputs {
        scales.push(input.used_scale(&reading.options)?);
    }
    match scales.as_slice() {
        [Some(first), rest @ ..] if rest.iter().all(|scale| *scale == Some(*first)) => {
            Ok(*first as f32)
        }
        _ => Err(CliError::Gate {
            found: format!("recorded scales {scales:?}"),
        }),
    }
}
