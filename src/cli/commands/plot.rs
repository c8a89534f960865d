//! `gradscale plot`.

use crate::cli::args::PlotArgs;
use crate::cli::{CliError, DONE};

pub fn run(_args: &PlotArgs) -> Result<u8, CliError> {
    Ok(DONE)
}
