//! Files from public repositories, kept beside the project and not in it.

use std::path::Path;

use crate::counts::{Counts, counts_of, json};

#[test]
fn real_files_hold_what_their_own_libraries_find_in_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/real_files");
    let root = if root.is_dir() {
        root
    } else {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/real_files")
    };
    if !root.is_dir() {
        eprintln!(
            "SKIPPED: {} is not here, so the real files were not read",
            root.display()
        );
        assert!(
            std::env::var_os("GRADSCALE_REQUIRE_REAL_FILES").is_none(),
            "real files are required and absent"
        );
        return;
    }
    let spec = json(&root.join("expected.json"));
    let mut wrong = Vec::new();
    let cases = spec["cases"].as_array().expect("cases");
    for case in cases {
        let file = case["file"].as_str().expect("file");
        let outcome = case["outcome"].as_str().expect("outcome");
        let got = counts_of(&[&root.join(file)], "all");
        let mut fail = |what: String| wrong.push(format!("{file} ({outcome}): {what}"));
        match (got, outcome) {
            (Err(e), "ok") => fail(e.to_string()),
            (Ok(_), "refused") => fail("was read".to_string()),
            (Ok((groups, skipped)), "no_float") => {
                if !groups.is_empty() || skipped == 0 {
                    fail(format!("{groups:?}, {skipped} skipped"));
                }
            }
            (Ok((groups, skipped)), "ok" | "ok_or_refused") => {
                let got = groups.into_values().next().unwrap_or_default();
                let want = Counts::of(&case["expected"]);
                if got != want {
                    fail(format!("{got:?}, expected {want:?}"));
                }
                let others = case["other_tensors"].as_u64().unwrap_or(0);
                if others > 0 && skipped == 0 {
                    fail(format!("{others} others, none noted"));
                }
            }
            (Err(e), _) => {
                let name = Path::new(file)
                    .file_name()
                    .and_then(|n| n.to_str())
                    .expect("a name");
                let message = e.to_string();
                if !message.contains(name)
                    || !message.contains("found")
                    || !message.contains("expected")
                {
                    fail(message);
                } else {
                    eprintln!("{message}");
                }
            }
            (Ok(_), _) => {}
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {} differ:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}
