//! Every policy reproduces the traces recorded from its real implementation, and a bent trace is caught where it was bent.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use gradscale::scaling::golden::{CaseResult, GoldenError, check};
use serde_json::{Value as Json, json};

fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .expect("the golden folder is part of the repository")
        .map(|entry| entry.expect("readable").path())
        .filter(|p| p.extension().is_some_and(|e| e == "jsonl"))
        .collect();
    files.sort();
    files
}

fn check_file(path: &Path) -> Vec<CaseResult> {
    check(BufReader::new(File::open(path).expect("opens")))
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn check_lines(lines: &[Json]) -> Result<Vec<CaseResult>, GoldenError> {
    let text: String = lines.iter().map(|l| format!("{l}\n")).collect();
    check(text.as_bytes())
}

fn lines(path: &Path) -> Vec<Json> {
    let text = std::fs::read_to_string(path).expect("reads");
    text.lines()
        .map(|l| serde_json::from_str(l).expect("JSON"))
        .collect()
}

#[test]
fn every_recorded_trace_is_reproduced() {
    let (mut cases, mut bad) = (0, Vec::new());
    for path in files() {
        for result in check_file(&path) {
            cases += 1;
            if !result.passed {
                let name = path
                    .file_stem()
                    .expect("named")
                    .to_string_lossy()
                    .into_owned();
                bad.push(format!(
                    "{name} {}: {:?}",
                    result.case, result.first_difference
                ));
            }
        }
    }
    assert!(
        bad.is_empty(),
        "{} of {cases} cases part:\n{}",
        bad.len(),
        bad.join("\n")
    );
    assert_eq!(cases, 32);
}
