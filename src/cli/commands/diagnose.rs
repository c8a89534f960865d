//! `gradscale diagnose`.

use super::{print, print_json};
use crate::cli::args::DiagnoseArgs;
use crate::cli::{BAD_NEWS, CliError, DONE};
use crate::report::{diagnosis, table};
use crate::scaling::diagnose::{DiagnoseError, Diagnosis, Log};
use std::fs::File;
use std::io::Write;
use std::path::Path;

pub fn run(args: &DiagnoseArgs) -> Result<u8, CliError> {
    let mut logs = Vec::new();
    for path in &args.logs {
        logs.push(open(path)?);
    }
    let diagnoses: Vec<Diagnosis> = if args.as_ranks {
        Diagnosis::of_ranks(&logs).into_iter().collect()
    } else {
        logs.iter().map(Log::diagnose).collect()
    };
    if args.json {
        print_json(&diagnosis::to_json(&diagnoses))?;
    } else {
        for (index, one) in diagnoses.iter().enumerate() {
            if index > 0 {
                print("\n")?;
            }
            print(&diagnosis::to_text(one))?;
        }
    }
    if !args.quiet {
        let text = table::warnings(&diagnosis::warnings(&diagnoses));
        // Nobody can be told where stderr is closed.
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
    Ok(if diagnoses.iter().any(|d| d.is_bad_news()) {
        BAD_NEWS
    } else {
        DONE
    })
}

fn open(path: &Path) -> Result<Log, DiagnoseError> {
    if path == Path::new("-") {
        return Log::read(std::io::stdin().lock(), "-");
    }
    let name = path.display().to_string();
    let file = File::open(path).map_err(|source| DiagnoseError::Read {
        log: name.clone(),
        source,
    })?;
    Log::read(file, &name)
}
