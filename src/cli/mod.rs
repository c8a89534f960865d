//! The command line: flags to library calls, results to words and an exit code.
//!
//! Nothing outside this room and `main.rs` prints, exits or reads the environment. Results go to stdout, progress and
//! warnings to stderr. Exit status: 0 done; 1 done and the answer is bad news; 2 could not do what was asked.

mod args;
mod commands;
mod terminal;
mod values;

use clap::Parser;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Done; bad news; could not.
const DONE: u8 = 0;
const BAD_NEWS: u8 = 1;
const COULD_NOT: u8 = 2;

/// Why a command could not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CliError {
    /// A value behind a flag.
    #[error("parsing {flag} {text:?}: found {found}, expected {expected}")]
    Value {
        /// The flag.
        flag: String,
        /// What was typed.
        text: String,
        /// What is wrong in it.
        found: String,
        /// What belongs there.
        expected: String,
    },
    /// A format's name.
    #[error(transparent)]
    Format(#[from] crate::float::ParseFormatError),
    /// A policy.
    #[error(transparent)]
    Policy(#[from] crate::scaling::policy::PolicyError),
    /// An input.
    #[error(transparent)]
    Input(#[from] crate::input::InputError),
    /// A dump's options.
    #[error(transparent)]
    Gradients(#[from] crate::gradients::GradientsError),
    /// A trace.
    #[error(transparent)]
    Trace(#[from] crate::tally::TraceError),
    /// A log.
    #[error(transparent)]
    Diagnose(#[from] crate::scaling::diagnose::DiagnoseError),
    /// No recommendation.
    #[error("{input}: {source}")]
    Recommend {
        /// The input.
        input: String,
        /// Why.
        source: crate::scaling::RecommendError,
    },
    /// A sweep that cannot be made.
    #[error("sweeping {text:?}: {source}")]
    Sweep {
        /// What was typed.
        text: String,
        /// What is wrong.
        source: crate::scaling::SweepError,
    },
    /// A gate without a scale, or a scale without a gate.
    #[error(
        "setting a gate: found {found}, expected --max-underflow or --max-overflow together with --at SCALE (or --at used, where all inputs recorded one and the same)"
    )]
    Gate {
        /// What was given.
        found: String,
    },
    /// A check that cannot be made.
    #[error(transparent)]
    Check(#[from] commands::check::CheckError),
    /// Policies that cannot be shown.
    #[error(transparent)]
    Policies(#[from] commands::policies::PoliciesError),
    /// A report that cannot be made.
    #[error(transparent)]
    Report(#[from] crate::report::page::ReportError),
    /// An output that cannot be written.
    #[error("writing {path:?}: {source}; choose a folder that can be written with -o")]
    Output {
        /// The file or folder.
        path: PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
    /// stdout.
    #[error("writing the result: {0}")]
    Stdout(#[from] std::io::Error),
    /// A backend that this machine or build has not.
    #[error(
        "choosing --backend {:?}: {}; --backend auto takes what there is, and all give the same integers", .0.name, .0.reason
    )]
    Backend(#[from] crate::kernel::Unavailable),
    /// Several inputs where one run is needed.
    #[error(
        "{doing}: found {found} inputs, expected one run; each input is a run of its own, and --as-ranks joins the ranks of one"
    )]
    SeveralRuns {
        /// What was being done.
        doing: &'static str,
        /// How many.
        found: usize,
    },
    /// A picture's ending.
    #[error("drawing {path:?}: found no ending that says how, expected .svg or .png")]
    PictureEnding {
        /// The output.
        path: PathBuf,
    },
    /// A figure that the input does not carry.
    #[error("drawing {kind}: found {found}, expected {expected}")]
    NothingToDraw {
        /// The figure.
        kind: &'static str,
        /// What the input holds.
        found: String,
        /// What the figure needs.
        expected: &'static str,
    },
    /// The picture could not be drawn.
    #[error("drawing {path:?}: {reason}")]
    Drawing {
        /// The output.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// Runs the program on the process's own arguments.
pub fn main() -> ExitCode {
    // An interrupted run removes its temporary files; 130 is what a shell reports for SIGINT.
    let _ = ctrlc::set_handler(|| {
        crate::atomic::remove_open_files();
        std::process::exit(130);
    });
    let cli = match args::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { COULD_NOT } else { DONE });
        }
    };
    match commands::run(&cli.command) {
        Ok(status) => ExitCode::from(status),
        // A reader that has seen enough closes the pipe, and that is no failure.
        Err(error) if broken_pipe(&error) => ExitCode::from(DONE),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "gradscale: {error}");
            ExitCode::from(COULD_NOT)
        }
    }
}

/// Whether an error, or what caused it, is a closed pipe.
fn broken_pipe(error: &CliError) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return io.kind() == std::io::ErrorKind::BrokenPipe;
        }
        cause = error.source();
    }
    match error {
        // A transparent variant passes on its inner error's source, not the inner error itself.
        CliError::Stdout(io)
        | CliError::Check(commands::check::CheckError::Write(io))
        | CliError::Policies(commands::policies::PoliciesError::Write(io)) => {
            io.kind() == std::io::ErrorKind::BrokenPipe
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        super::args::Cli::command().debug_assert();
    }
}
