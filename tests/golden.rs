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
    assert_eq!(cases, 767);
}

/// Doubles the middle value of a list, or of its middle run.
fn double_middle(list: &mut Json) {
    let at = match list {
        Json::Array(values) => {
            let middle = values.len() / 2;
            &mut values[middle]
        }
        runs => {
            let runs = runs["rle"].as_array_mut().expect("runs");
            let middle = runs.len() / 2;
            &mut runs[middle][0]
        }
    };
    *at = match at.as_f64() {
        Some(x) if x != 0.0 => json!(x * 2.0),
        _ => json!(12345.0),
    };
}

/// Flips the first value of a list, or of its first run.
fn flip_first(list: &mut Json) {
    let at = if list.is_array() {
        &mut list[0]
    } else {
        &mut list["rle"][0][0]
    };
    *at = json!(1 - at.as_i64().expect("0 or 1"));
}

#[test]
fn a_bent_trace_fails_in_the_bent_case_and_only_there() {
    type Bend = (&'static str, fn(&mut Json));
    let bends: [Bend; 5] = [
        ("scale", |case| double_middle(&mut case["scale"])),
        ("skipped", |case| flip_first(&mut case["skipped"])),
        ("scale_after", |case| {
            case["scale_after"] = json!(case["scale_after"].as_f64().unwrap_or(1.0) * 2.0 + 1.0)
        }),
        ("state_after", |case| {
            for (_, counter) in case["state_after"].as_object_mut().expect("counters") {
                *counter = json!("bent");
            }
        }),
        (
            "error",
            |case| case["error"] = json!({"step": 0, "kind": "Exception", "message": "bent"}),
        ),
    ];
    for path in files() {
        let lines = lines(&path);
        for (what, bend) in bends {
            let at = lines.len() / 2;
            let mut bent = lines.clone();
            if bent[at].get(what).is_none() {
                continue; // te-delayed-scaling skips nothing and records no `skipped`
            }
            bend(&mut bent[at]);
            let results = check_lines(&bent).expect("still a golden file");
            let failed: Vec<usize> = (0..results.len()).filter(|&i| !results[i].passed).collect();
            assert_eq!(failed, [at], "{} with a bent {what}", path.display());
            let difference = results[at]
                .first_difference
                .as_ref()
                .expect("failed cases say where");
            // A bent error shows in `skipped` first where the step is clean: an update that raises counts as skipped.
            assert!(
                difference.what.starts_with(what) || what == "error",
                "{what}: {difference:?}"
            );
        }
    }
}

#[test]
fn what_is_no_golden_file_is_an_error_that_names_the_line() {
    let message = |text: &str| check(text.as_bytes()).expect_err("not golden").to_string();
    assert!(message("").contains("no case"));
    assert!(message("{}\n").contains("line 1, field \"case\": found nothing"));
    assert!(message("\nnonsense\n").contains("line 2"));
    let with = |change: fn(&mut Json)| {
        let mut case = json!({"case": "c", "policy": "pytorch", "config": {"growth_interval": 2}, "steps": 3,
            "found_inf": [0, 0, 0], "scale": [65536, 65536, 131072], "skipped": [0, 0, 0]});
        change(&mut case);
        check_lines(&[case])
    };
    assert!(with(|_| ()).expect("golden")[0].passed);
    let error = |change: fn(&mut Json)| with(change).expect_err("bent").to_string();
    assert!(error(|c| c["policy"] = json!("pytroch")).contains("pytorch"));
    assert!(error(|c| c["config"] = json!({"window": 1})).contains("window"));
    assert!(error(|c| c["steps"] = json!(4)).contains("a list of one value a step"));
    assert!(error(|c| c["steps"] = json!(1e12)).contains("at most"));
    assert!(
        error(|c| c["scale"] = json!({"rle": [[1, 18446744073709551615_u64], [1, 4]]}))
            .contains("scale")
    );
    assert!(error(|c| c["scale"][1] = json!("big")).contains("numbers"));
    assert!(error(|c| c["found_inf"] = json!([0, 2, 0])).contains("0 or 1"));
    assert!(error(|c| c["found_inf"] = json!(null)).contains("found_inf or amax"));
    assert!(error(|c| c["error"] = json!("boom")).contains("null or"));
}
