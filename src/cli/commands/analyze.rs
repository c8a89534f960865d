//! `gradscale analyze`.

use super::{Reading, print, print_json};
use crate::analysis::{By, Options, analyze};
use crate::cli::args::{AnalyzeArgs, ByArg};
use crate::cli::{CliError, DONE, values};
use crate::float::Format;
use crate::report::{json, table};

pub fn run(args: &AnalyzeArgs) -> Result<u8, CliError> {
    let reading = Reading::new(&args.reading)?;
    let options = Options {
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
    };
    let inputs = reading.inputs(&args.inputs, args.demo)?;
    let analysis = analyze(&inputs, &options, &reading.options, &reading.bar)?;
    if args.json {
        print_json(&json::analysis(&analysis))?;
    } else {
        print(&table::analysis(&analysis))?;
    }
    reading.warn(&analysis.warnings);
    Ok(DONE)
}
