//! Histograms and statistics that others logged: what is said of them holds of the gradients they were made from.

#[path = "cases/histogram_bounds.rs"]
mod bounds;
#[path = "cases/histogram_facts.rs"]
mod facts;
#[path = "cases/histogram_hostile.rs"]
mod hostile;

use std::path::{Path, PathBuf};
use std::process::Command;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/histograms")
        .join(name)
}

/// Runs the program: its status, stdout and stderr.
fn run(args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_gradscale"))
        .args(args)
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}
