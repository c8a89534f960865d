//! Hostile files: each is refused by name, and nothing else happens.

use crate::counts::{counts_of, data, json};

#[test]
fn hostile_files_are_refused_and_run_nothing() {
    let root = data("hostile");
    let spec = json(&root.join("hostile.json"));
    let marker = spec["marker"].as_str().expect("marker");
    for case in spec["cases"].as_array().expect("cases") {
        let file = case["file"].as_str().expect("file");
        if file.ends_with(".csv") {
            continue;
        }
        let may_pass = case["exit"]
            .as_array()
            .expect("exit")
            .iter()
            .any(|code| code == 0);
        match counts_of(&[&root.join(file)], "all") {
            Ok(_) => assert!(may_pass, "{file} ({}) was read", case["what"]),
            Err(e) => {
                let message = e.to_string();
                assert!(message.contains(file), "{message}");
                assert!(
                    message.contains("found") && message.contains("expected"),
                    "{message}"
                );
            }
        }
    }
    assert!(
        !std::path::Path::new(marker).exists() && !root.join(marker).exists(),
        "a pickle was run"
    );
}
