//! Training logs are read as what they are: committed logs with their verdicts, and generated histories in every dialect.

#[path = "diagnose/generate.rs"]
mod generate;

use generate::{Run, Story, WRITERS, tell};
use gradscale::scaling::diagnose::{DiagnoseError, Diagnosis, Log, Verdict};
use rayon::prelude::*;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/logs")
}

fn expectations(folder: &Path) -> Vec<Json> {
    let text = std::fs::read_to_string(folder.join("expected.jsonl")).expect("reads");
    text.lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

fn open(path: &Path) -> Result<Diagnosis, DiagnoseError> {
    Log::read(
        File::open(path).expect("opens"),
        &path.display().to_string(),
    )
    .map(|log| log.diagnose())
}

fn text(text: &str) -> Diagnosis {
    Log::read(text.as_bytes(), "log").expect("text").judge()
}

fn scale(value: Option<f64>) -> Json {
    match value {
        Some(value) if value.is_infinite() => Json::from("inf"),
        value => Json::from(value),
    }
}

fn same(found: &Json, expected: &Json) -> bool {
    match (found.as_f64(), expected.as_f64()) {
        (Some(a), Some(b)) => a == b || (a - b).abs() <= 1e-12 * a.abs().max(b.abs()),
        _ => found == expected,
    }
}

/// Everything in which a diagnosis parts from what is expected of its log.
fn faults(found: &Diagnosis, expected: &Json) -> Vec<String> {
    let mut faults = Vec::new();
    let mut fault = |what: &str, found: &dyn std::fmt::Debug| {
        faults.push(format!("{what} is {found:?}, expected {}", expected[what]));
    };
    let word = found.verdict().as_str();
    if expected["verdict"] != word {
        fault("verdict", &word);
    }
    if expected["format"] != found.format {
        fault("format", &found.format);
    }
    if !same(&Json::from(found.skipped_steps), &expected["skipped_steps"]) {
        fault("skipped_steps", &found.skipped_steps);
    }
    if !same(&scale(found.first_scale), &expected["first_scale"]) {
        fault("first_scale", &found.first_scale);
    }
    if !same(&scale(found.last_scale), &expected["last_scale"]) {
        fault("last_scale", &found.last_scale);
    }
    let interval = found.growth_interval.map(|i| i.steps);
    if !same(&Json::from(interval), &expected["growth_interval"]) {
        fault("growth_interval", &interval);
    }
    if let Some(least) = expected["skipped_min"].as_u64()
        && found.skipped_min.is_none_or(|n| n < least)
    {
        fault("skipped_min", &found.skipped_min);
    }
    let unit = if found.log2 { "log2" } else { "scale" };
    if expected.get("unit").is_some_and(|u| u != unit) {
        fault("unit", &unit);
    }
    if expected["exit"] != i32::from(found.is_bad_news()) {
        fault("exit", &found.is_bad_news());
    }
    for also in found.also() {
        let free = matches!(
            also,
            Verdict::Healthy
                | Verdict::InsufficientEvidence
                | Verdict::DisplayRounding
                | Verdict::RankDuplicates
                | Verdict::CountersUnreliable
        );
        let listed = expected["also"]
            .as_array()
            .is_some_and(|words| words.iter().any(|w| w == also.as_str()));
        if !free && !listed {
            fault("also", &also);
        }
    }
    faults
}

#[test]
fn every_committed_log_gets_its_verdict_and_its_numbers() {
    let mut all = Vec::new();
    for folder in [folder(), folder().join("real")] {
        if !folder.join("expected.jsonl").exists() {
            continue;
        }
        for expected in expectations(&folder) {
            let file = expected["file"].as_str().expect("a name");
            let found = open(&folder.join(file)).expect("readable");
            all.extend(
                faults(&found, &expected)
                    .into_iter()
                    .map(|fault| format!("{file}: {fault}")),
            );
        }
    }
    assert!(all.is_empty(), "{}", all.join("\n"));
}

#[test]
fn bad_logs_are_read_with_caution() {
    let folder = folder().join("bad");
    for expected in expectations(&folder) {
        let file = expected["file"].as_str().expect("a name");
        let found = open(&folder.join(file)).expect("readable");
        let word = Json::from(found.verdict().as_str());
        let among = |key: &str, value: Json| {
            expected[key]
                .as_array()
                .is_none_or(|any| any.iter().any(|e| same(e, &value)))
        };
        assert!(among("verdict_any_of", word.clone()), "{file}: {word}");
        assert!(
            among("skipped_steps_any_of", Json::from(found.skipped_steps)),
            "{file}: {:?}",
            found.skipped_steps
        );
        assert!(
            among("first_scale_any_of", scale(found.first_scale)),
            "{file}: {:?}",
            found.first_scale
        );
        assert!(
            among("last_scale_any_of", scale(found.last_scale)),
            "{file}: {:?}",
            found.last_scale
        );
        assert!(
            expected["warn"] != true || !found.warnings.is_empty(),
            "{file}"
        );
    }
}

/// Runs a story through every dialect's writer, many times; the first seeds of each fault are shown.
fn stories(
    story: Story,
    histories: u64,
    right: impl Fn(&Diagnosis, &Run) -> Result<(), String> + Sync,
) {
    let wrong: Vec<(&str, u64, String)> = WRITERS
        .par_iter()
        .flat_map(|writer| {
            (0..histories)
                .into_par_iter()
                .filter_map(|seed| {
                    let (log, run) = tell(writer, story, seed);
                    let found = text(&log);
                    Some((writer.name, seed, right(&found, &run).err()?))
                })
                .collect::<Vec<_>>()
        })
        .collect();
    let mut by_writer: BTreeMap<&str, Vec<&(&str, u64, String)>> = BTreeMap::new();
    for fault in &wrong {
        by_writer.entry(fault.0).or_default().push(fault);
    }
    if let Ok(keep) = std::env::var("GRADSCALE_KEEP_LOGS") {
        for (name, faults) in &by_writer {
            let writer = WRITERS.iter().find(|w| w.name == *name).expect("known");
            let (log, _) = tell(writer, story, faults[0].1);
            let _ = std::fs::write(
                Path::new(&keep).join(format!("{name}-{}.log", faults[0].1)),
                log,
            );
        }
    }
    let said: Vec<String> = by_writer
        .iter()
        .map(|(name, faults)| {
            format!(
                "{name}: {} of {histories}, such as seed {}: {}",
                faults.len(),
                faults[0].1,
                faults[0].2
            )
        })
        .collect();
    assert!(said.is_empty(), "{story:?}\n{}", said.join("\n"));
}

/// A failure's sentence where a fact does not hold.
fn need(holds: bool, found: &Diagnosis, what: &str) -> Result<(), String> {
    if holds {
        Ok(())
    } else {
        Err(format!(
            "{what}: {} {:?} {:?} {:?}: {}",
            found.verdict().as_str(),
            found.skipped_steps,
            found.skipped_min,
            found.growth_interval,
            found.why
        ))
    }
}

#[test]
fn a_healthy_history_is_never_called_a_failure() {
    stories(Story::Healthy, 1000, |found, run| {
        need(!found.is_bad_news(), found, "a failure")?;
        let fine = matches!(
            found.verdict(),
            Verdict::RampUpHarmless | Verdict::SawtoothAtCeiling | Verdict::Healthy
        );
        // Where nothing ever overflowed at 2^24 and more, that is said instead.
        let high = found.verdict() == Verdict::ScaleSaturatedHigh
            && run
                .steps
                .last()
                .is_some_and(|step| step.after >= 2f64.powi(24));
        // Where the log ends with its only overflow, nothing can be told of it.
        let last = run.steps.iter().rev().find(|step| step.overflow);
        let at_end = found.verdict() == Verdict::InsufficientEvidence
            && last.is_some_and(|last| last.n + run.window.max(10) >= run.steps.len() as u64);
        // Without a scale, two overflows are too few to tell.
        let bare = found.first_scale.is_none() && found.skipped_steps.is_some_and(|n| n <= 2);
        let few = high || at_end || bare || !run.steps.iter().any(|step| step.overflow);
        need(fine || few, found, "not seen to be fine")?;
        let skipped = run.steps.iter().filter(|step| step.overflow).count() as u64;
        // A counter has not shown its last, unfinished window.
        let whole = run.steps.len() as u64 / run.window * run.window;
        let shown = run
            .steps
            .iter()
            .filter(|step| step.overflow && step.n <= whole)
            .count() as u64;
        if let Some(found_skipped) = found.skipped_steps {
            need(
                found_skipped == skipped || found.format == "megatron" && found_skipped == shown,
                found,
                &format!("{skipped} steps were skipped"),
            )?;
        }
        need(
            found.skipped_min.is_none_or(|least| least <= skipped),
            found,
            &format!("only {skipped} were skipped"),
        )?;
        let interval = run.interval as f64;
        need(
            found.growth_interval.is_none_or(|i| {
                (i.steps as f64 - interval).abs() <= (0.1 * interval).max(run.window as f64)
            }),
            found,
            &format!("the interval was {}", run.interval),
        )
    });
}

#[test]
fn a_planted_collapse_is_never_missed() {
    stories(Story::Collapse, 1000, |found, _| {
        need(found.is_bad_news(), found, "missed")
    });
}
