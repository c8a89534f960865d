//! `gradscale report`.

use super::{Reading, built_in, choosing, choosing_for, print};
use crate::atomic;
use crate::cli::args::{Demo, ReportArgs};
use crate::cli::{CliError, DONE};
use crate::report::html;
use crate::report::page::{RunReport, report_json};
use std::path::Path;

pub fn run(args: &ReportArgs) -> Result<u8, CliError> {
    let reading = Reading::new(&args.reading)?;
    let options = choosing(&args.choosing)?;
    // The folder is made and tried before the long work.
    let output = |path: &Path| {
        let path = path.to_owned();
        move |source| CliError::Output { path, source }
    };
    std::fs::create_dir_all(&args.output).map_err(output(&args.output))?;
    drop(
        atomic::AtomicFile::create(&args.output.join("report.json"))
            .map_err(output(&args.output))?,
    );

    let demo = args.demo.or(args.inputs.is_empty().then_some(Demo::Cnn));
    let mut runs = Vec::new();
    match demo {
        Some(demo) => {
            runs.push(RunReport::built_in(
                built_in(demo).read(),
                reading.run_options,
                &options,
            )?);
        }
        None => {
            for trace in reading.records(&args.inputs, None)? {
                let options = choosing_for(&args.choosing, &options, &trace);
                runs.push(RunReport::new(trace, reading.run_options, &options)?);
            }
        }
    }
    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    let json =
        serde_json::to_vec_pretty(&report_json(&runs)).expect("our results are plain values");
    files.push(("report.json".to_owned(), json));
    let several = runs.len() > 1;
    let mut drawn = Vec::new();
    let mut said = String::new();
    for (index, run) in runs.into_iter().enumerate() {
        let figures = run.draw().map_err(|error| CliError::Drawing {
            path: args.output.clone(),
            reason: error.to_string(),
        })?;
        for (name, figure) in &figures {
            let name = if several {
                format!("run{index}-{name}.svg")
            } else {
                format!("{name}.svg")
            };
            files.push((name, figure.svg.clone().into_bytes()));
        }
        reading.warn(&run.warnings);
        let line = run.headline();
        said.push_str(&format!("{}: {line}\n", run.label));
        drawn.push((run, figures));
    }
    // The page comes last: where it is, everything it belongs to is there too.
    files.push(("report.html".to_owned(), html::page(&drawn).into_bytes()));
    for (name, bytes) in &files {
        let path = args.output.join(name);
        atomic::write(&path, bytes).map_err(output(&path))?;
    }
    print(&format!(
        "{said}{}\n",
        args.output.join("report.html").display()
    ))?;
    Ok(DONE)
}
