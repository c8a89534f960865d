//! Dumps with known answers: `tests/data/dumps/expected.json` was computed by brute force elsewhere.

use std::collections::BTreeMap;

use crate::counts::{Counts, Key, counts_of, data, json};

#[test]
fn elements_and_names_are_those_that_brute_force_found() {
    let root = data("dumps");
    let expected = json(&root.join("expected.json"));
    let mut compared = 0;
    for case in expected["cases"].as_array().expect("cases") {
        let inputs: Vec<_> = case["inputs"]
            .as_array()
            .expect("inputs")
            .iter()
            .map(|i| root.join(i.as_str().expect("a path")))
            .collect();
        let inputs: Vec<_> = inputs.iter().map(|path| path.as_path()).collect();
        let by = case["by"].as_str().expect("by");
        let (got, _) = counts_of(&inputs, by).unwrap_or_else(|e| panic!("{e}"));
        let want: BTreeMap<Key, Counts> = case["groups"]
            .as_array()
            .expect("groups")
            .iter()
            .map(|group| {
                (
                    (
                        group["tensor"].as_str().map(str::to_string),
                        group["step"].as_u64(),
                    ),
                    Counts::of(group),
                )
            })
            .collect();
        assert_eq!(got, want, "{inputs:?} by {by}");
        compared += 1;
    }
    assert!(compared > 40, "only {compared} cases");
}
