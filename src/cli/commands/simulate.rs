//! `gradscale simulate`.

use super::{Reading, print, print_json};
use crate::atomic::AtomicFile;
use crate::cli::args::SimulateArgs;
use crate::cli::{CliError, DONE};
use crate::report::{csv, json, table};
use crate::scaling::policy::{Defaults, PolicySpec};
use crate::scaling::{Timeline, simulate};
use std::io::Write;

pub fn run(args: &SimulateArgs) -> Result<u8, CliError> {
    let reading = Reading::new(&args.reading)?;
    let specs = args
        .policy
        .iter()
        .map(|text| PolicySpec::parse(text))
        .collect::<Result<Vec<_>, _>>()?;
    let mut trajectory = match &args.trajectory {
        None => None,
        Some(path) => {
            let output = |source| CliError::Output {
                path: path.clone(),
                source,
            };
            let mut file = AtomicFile::create(path).map_err(output)?;
            file.write_all(csv::TRAJECTORY_HEADER.as_bytes())
                .map_err(output)?;
            Some((file, path))
        }
    };
    let traces = reading.traces(&args.inputs, args.demo)?;
    let mut results = Vec::new();
    let mut warnings = Vec::new();
    let mut steps = 0;
    for (index, trace) in traces.iter().enumerate() {
        let run = reading.run_of(trace);
        let timeline = Timeline::new(&run);
        steps = steps.max(run.len());
        for spec in &specs {
            let policy = spec.build(Defaults::Framework)?;
            if let Some((file, path)) = &mut trajectory {
                csv::trajectory(&timeline, policy.as_ref(), index, &spec.canonical(), file)
                    .map_err(|source| CliError::Output {
                        path: path.to_path_buf(),
                        source,
                    })?;
            }
            results.push((
                index,
                spec.canonical(),
                simulate(&timeline, policy.as_ref()),
            ));
        }
        warnings.extend(run.warnings);
    }
    if let Some((file, path)) = trajectory {
        file.commit().map_err(|source| CliError::Output {
            path: path.clone(),
            source,
        })?;
    }
    if args.json {
        print_json(&json::simulation(steps, &results, &warnings))?;
    } else {
        let labels: Vec<String> = traces.iter().map(|trace| trace.label.clone()).collect();
        print(&table::simulation(&results, &labels))?;
    }
    reading.warn(&warnings);
    Ok(DONE)
}
