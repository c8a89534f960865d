//! `gradscale sketch` and `gradscale merge`: traces in and out.

use super::{Reading, only_counts, print};
use crate::cli::args::{MergeArgs, SketchArgs};
use crate::cli::{CliError, DONE};
use crate::input::Input;
use crate::tally::{Trace, store};
use std::path::Path;

/// Steps a chunk.
const CHUNK_STEPS: usize = 1000;

pub fn sketch(args: &SketchArgs) -> Result<u8, CliError> {
    let reading = Reading::new(&args.reading)?;
    let mut traces = reading.traces(&args.inputs, None)?;
    if traces.len() > 1 {
        return Err(CliError::SeveralRuns {
            doing: "sketching",
            found: traces.len(),
        });
    }
    let Some(trace) = traces.pop() else {
        return Err(CliError::SeveralRuns {
            doing: "sketching",
            found: 0,
        });
    };
    only_counts("sketching", &trace)?;
    reading.warn(&trace.warnings);
    write(&trace.trace, &args.output)
}

pub fn merge(args: &MergeArgs) -> Result<u8, CliError> {
    let reading = Reading::new(&args.reading)?;
    let mut whole = Trace::default();
    for (index, path) in args.inputs.iter().enumerate() {
        let Input::Trace(mut trace) = Input::open(path, &reading.options, reading.skip_bad)? else {
            return Err(crate::tally::TraceError::Empty { path: path.clone() }.into());
        };
        reading.warn(&trace.warnings);
        if reading.as_ranks && index > 0 {
            trace.trace.run_id.clone_from(&whole.run_id);
        }
        whole
            .merge(&trace.trace)
            .map_err(|source| crate::tally::TraceError::Merge {
                path: path.clone(),
                source,
            })?;
    }
    write(&whole, &args.output)
}

fn write(trace: &Trace, output: &Path) -> Result<u8, CliError> {
    store::write(trace, output, CHUNK_STEPS)?;
    print(&format!(
        "{}: {} steps, {} tensors, {} sampled steps\n",
        output.display(),
        trace.steps.len(),
        trace.tensors.len(),
        trace.samples.len()
    ))?;
    Ok(DONE)
}
