//! The command line: flags to library calls, results to words and an exit code.

pub mod check;
pub mod policies;

use std::io::Write;

use clap::Parser;

/// What was typed.
#[derive(Debug, Parser)]
#[command(name = "gradscale", version)]
enum Command {
    /// Hold a loss scaler to the laws, or to recorded traces
    Check(check::CheckArgs),
    /// List the loss-scaling policies, or explain one
    Policies(policies::PoliciesArgs),
}

/// Runs the program on the process's own arguments.
pub fn main() -> std::process::ExitCode {
    let (mut out, mut err) = (std::io::stdout().lock(), std::io::stderr().lock());
    let status = match Command::parse() {
        Command::Check(args) => check::run(&args, &mut out, &mut err).map_err(|e| e.to_string()),
        Command::Policies(args) => {
            policies::run(&args, &mut out, &mut err).map_err(|e| e.to_string())
        }
    };
    let status = status.unwrap_or_else(|message| {
        if out.flush().is_err() {
            return 0; // nobody reads on
        }
        let _ = writeln!(err, "error: {message}");
        2
    });
    status.into()
}
