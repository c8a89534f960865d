//! `gradscale formats`.

use super::{print, print_json};
use crate::cli::args::FormatsArgs;
use crate::cli::{CliError, DONE};
use crate::float::FORMATS;
use crate::report::{json, table};

pub fn run(args: &FormatsArgs) -> Result<u8, CliError> {
    if args.json {
        print_json(&json::formats(&FORMATS))?;
    } else {
        print(&table::formats(&FORMATS))?;
    }
    Ok(DONE)
}
