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

/// A log of apex's lines with progress, for the tests below.
fn ramp() -> String {
    let mut log = String::new();
    for scale in ["32768.0", "16384.0", "8192.0"] {
        log += &format!(
            "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {scale}\n"
        );
    }
    for step in 1..30 {
        log += &format!(
            "step {} | loss {:.3} | lr 5e-05\n",
            10 * step,
            4.0 - 0.01 * f64::from(step)
        );
    }
    log
}

#[test]
fn a_log_reads_the_same_in_any_packing_and_with_any_breaks() {
    let plain = ramp();
    let crlf = plain.replace('\n', "\r\n");
    let colours = plain
        .replace("Gradient", "\x1b[31mGradient\x1b[0m")
        .replace("loss scale", "loss \x1b[1mscale\x1b[0m");
    let prefixed: String = plain
        .lines()
        .map(|line| format!("node03: [rank0]: 2024-01-01 10:00:00,123 INFO {line}\n"))
        .collect();
    let wide: Vec<u8> = std::iter::once(0xFEFF)
        .chain(crlf.encode_utf16())
        .flat_map(u16::to_le_bytes)
        .collect();
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut packed, plain.as_bytes()).expect("in memory");
    let packed = packed.finish().expect("in memory");
    let returns = plain.replace('\n', "\r");
    for (name, bytes) in [
        ("crlf", crlf.as_bytes()),
        ("colours", colours.as_bytes()),
        ("prefixed", prefixed.as_bytes()),
        ("utf-16", &wide[..]),
        ("gzip", &packed[..]),
        ("carriage returns", returns.as_bytes()),
    ] {
        let found = Log::read(bytes, "log").expect(name).diagnose();
        assert_eq!(found.verdict(), Verdict::RampUpHarmless, "{name}");
        assert_eq!(found.skipped_steps, Some(3), "{name}");
        assert_eq!(
            (found.first_scale, found.last_scale),
            (Some(32768.0), Some(8192.0)),
            "{name}"
        );
    }
    // A gzip file that breaks off is read as far as it goes, and that is said.
    let broken = Log::read(&packed[..packed.len() - 12], "log")
        .expect("readable")
        .diagnose();
    assert!(
        broken
            .warnings
            .iter()
            .any(|w| w.seen.contains("breaks off")),
        "{:?}",
        broken.warnings
    );
    let xz = Log::read(&b"\xFD7zXZ\0\0\0"[..], "log.xz").expect_err("not read");
    assert!(xz.to_string().contains("\"log.xz\": found xz data"), "{xz}");
}

#[test]
fn nothing_in_a_log_makes_it_panic() {
    let mut dice = generate::Dice::new(11);
    let seeds: Vec<Vec<u8>> = std::fs::read_dir(folder())
        .expect("committed")
        .map(|entry| entry.expect("readable").path())
        .filter(|path| path.extension().is_some_and(|e| e == "log"))
        .map(|path| std::fs::read(path).expect("readable"))
        .collect();
    let odd: [&[u8]; 12] = [
        b"1e999",
        b"-0",
        b"nan",
        b"18446744073709551616",
        b"\xFF\xFE",
        b"\0",
        b"\x1b[",
        b"\r",
        b"1.2.3,4",
        b"\xEF\xBC\xBE",
        b"0.0",
        b"inf",
    ];
    for round in 0..3000 {
        let seed = &seeds[dice.within(0, seeds.len() as u64 - 1) as usize];
        let from = dice.within(0, seed.len() as u64 - 1) as usize;
        let length = dice.within(1, 4000) as usize;
        let mut bytes = seed[from..seed.len().min(from + length)].to_vec();
        for _ in 0..dice.within(0, 8) {
            let at = dice.within(0, bytes.len() as u64 - 1) as usize;
            match dice.within(0, 4) {
                0 => bytes[at] = dice.next() as u8,
                1 => bytes.truncate(at.max(1)),
                2 => {
                    bytes.splice(at..at, odd[dice.within(0, 11) as usize].iter().copied());
                }
                3 => {
                    let piece: Vec<u8> = bytes[at..bytes.len().min(at + 300)].to_vec();
                    bytes.splice(at..at, piece);
                }
                _ => {
                    // A number becomes another one.
                    if let Some(digit) = bytes[at..].iter().position(u8::is_ascii_digit) {
                        bytes.splice(
                            at + digit..at + digit + 1,
                            odd[dice.within(0, 11) as usize].iter().copied(),
                        );
                    }
                }
            }
        }
        let found = Log::read(&bytes[..], "log").expect("readable");
        let found = if round % 10 == 0 {
            found.diagnose()
        } else {
            found.judge()
        };
        let json = gradscale::report::diagnosis::to_json(std::slice::from_ref(&found));
        assert!(serde_json::to_string(&json).is_ok());
        let text = gradscale::report::diagnosis::to_text(&found);
        assert!(
            !text.chars().any(|c| c.is_control() && c != '\n'),
            "{text:?}"
        );
    }
}

#[test]
fn ranks_of_one_run_are_one_log_and_are_compared() {
    let log = |scale: u32| {
        let text = format!(
            "gradscale: step 4 overflow, loss_scale {scale}.0 -> {}.0, first non-finite tensor a\n",
            scale / 2
        ) + &(1..40)
            .map(|n| format!("step {n} loss 2.5\n"))
            .collect::<String>();
        Log::read(text.as_bytes(), &format!("rank{scale}")).expect("text")
    };
    let together = Diagnosis::of_ranks(&[log(65536), log(65536)]).expect("two logs");
    assert_eq!(
        (together.verdict(), together.skipped_steps),
        (Verdict::RampUpHarmless, Some(1))
    );
    let apart = Diagnosis::of_ranks(&[log(65536), log(1024)]).expect("two logs");
    assert_eq!(apart.verdict(), Verdict::RankDesync);
    assert!(Diagnosis::of_ranks(&[]).is_none());
}

#[test]
fn the_command_says_it_with_its_words_and_its_status() {
    let run = |args: &[&str], stdin: &[u8]| {
        use std::io::Write;
        use std::process::{Command, Stdio};
        let mut child = Command::new(env!("CARGO_BIN_EXE_gradscale"))
            .arg("diagnose")
            .args(args)
            .current_dir(folder())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("starts");
        // The program may end before it has read everything.
        let _ = child.stdin.take().expect("piped").write_all(stdin);
        let done = child.wait_with_output().expect("ends");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        (done.status.code(), text(done.stdout), text(done.stderr))
    };
    let (status, out, err) = run(&["-"], ramp().as_bytes());
    assert_eq!((status, err.as_str()), (Some(0), ""));
    assert!(out.starts_with("Normal: overflows at the start"), "{out}");
    let (status, out, _) = run(&["apex-to-zero.log"], b"");
    assert_eq!(status, Some(1));
    assert!(out.starts_with("Failure: "), "{out}");
    let (status, out, err) = run(
        &["-"],
        b"{'loss': 2.0, 'learning_rate': 0, 'epoch': 0.01}\n",
    );
    assert_eq!(status, Some(0));
    assert!(out.starts_with("cannot tell"), "{out}");
    assert!(
        out.contains("trainer.accelerator.scaler.get_scale()"),
        "{out}"
    );
    assert!(err.starts_with("warning: "), "{err}");
    let (status, out, err) = run(&["nowhere.log"], b"");
    assert_eq!((status, out.as_str()), (Some(2), ""));
    assert!(err.contains("\"nowhere.log\""), "{err}");
    let (status, out, _) = run(&["apex-to-zero.log", "apex-every-2000.log", "--json"], b"");
    assert_eq!(status, Some(1));
    let json: Json = serde_json::from_str(&out).expect("one document");
    assert_eq!(json["schema"], "gradscale.diagnose/1");
    assert_eq!(json["logs"][1]["verdict"], "SAWTOOTH_AT_CEILING");
    assert_eq!(
        json["logs"][1]["fit"]["policy"],
        "apex-amp:scale_window=2000"
    );
}

#[test]
fn a_floor_is_told_from_copies_of_one_event() {
    for ranks in [1, 4] {
        let mut log = String::new();
        for power in (0..=5).rev() {
            log += &format!(
                "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {}.0\n",
                1 << power
            )
            .repeat(ranks);
        }
        log += &"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 1.0\n"
            .repeat(40 * ranks);
        let found = text(&log);
        assert_eq!(
            (found.verdict(), found.skipped_steps),
            (Verdict::PinnedAtFloor, Some(46)),
            "{ranks}"
        );
    }
}

#[test]
fn logarithms_grow_a_thousandth_a_step() {
    let (mut lg, mut log) = (20.0, String::new());
    for n in 1..=8000 {
        if n <= 3 || n % 1000 == 0 {
            lg -= 1.0;
            log += &format!("Found NaN, decreased lg_loss_scale to {lg}\n");
        } else {
            lg += 0.001;
        }
        if n % 100 == 0 {
            log += &format!(
                "| lg_loss_scale | {lg:.1} |\n| loss | {:.3} |\n",
                1.0 - f64::from(n) / 20_000.0
            );
        }
    }
    let found = text(&log);
    assert_eq!(
        (found.verdict(), found.skipped_steps),
        (Verdict::SawtoothAtCeiling, Some(11)),
        "{}",
        found.why
    );
}

#[test]
fn a_scaler_that_was_not_restored_is_no_growth() {
    let overflow = |scale: u64| {
        format!(
            "[INFO] [loss_scaler.py:181:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {scale}, reducing to {}\n",
            scale / 2
        )
    };
    let mut log = String::new();
    let mut skipped = 0;
    for start in [0, 5000] {
        for power in (9..=16).rev() {
            log += &overflow(1 << power);
            skipped += 1;
        }
        for n in 1..50 {
            log += &format!(
                "[Rank 0] step={}, skipped={skipped}, lr=[1e-05], mom=[(0.9, 0.95)]\n",
                start + 100 * n
            );
        }
    }
    let found = text(&log);
    assert_eq!(
        (found.verdict(), found.skipped_steps),
        (Verdict::RampUpHarmless, Some(16)),
        "{}",
        found.why
    );
    assert!(
        found.advice.iter().any(|a| a.contains("scaler's state")),
        "{:?}",
        found.advice
    );
    assert_eq!(found.growth_interval, None);
}
