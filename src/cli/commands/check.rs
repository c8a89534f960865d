//! `gradscale check`: a scaler against the laws, or a golden file against our policies.

use std::fs::File;
use std::io::{self, BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde_json::{Value as Json, json};

use crate::scaling::exec::{Program, SILENCE};
use crate::scaling::golden::{self, CaseResult, GoldenError};
use crate::scaling::laws::{
    self, Case, Excuse, Failure, HistoryError, Interval, LAWS, Options, Report, Subject, WhenKept,
};
use crate::scaling::policy::{Defaults, PolicyError, PolicySpec};

/// The growth interval that a program without `--policy` is asked to use.
const ASKED_INTERVAL: u64 = 8;

/// Hold a loss scaler to the laws, or to recorded traces
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  gradscale check --policy pytorch
  gradscale check --exec 'python my_scaler.py'
  gradscale check --exec 'python my_scaler.py' --policy pytorch:growth_interval=20
  gradscale check --golden torch-amp.jsonl

The program of --exec reads JSON Lines on stdin and answers each with one line on stdout:
  {\"op\":\"reset\",\"config\":{...}}    -> {\"scale\":65536}, with \"config\":null if it takes no configuration
  {\"op\":\"step\",\"found_inf\":true}  -> {\"scale\":32768,\"skipped\":true}
  {\"op\":\"save\"}                   -> {\"state\":...}
  {\"op\":\"load\",\"state\":...}       -> {\"scale\":...}
  {\"error\":\"...\"} in answer to any of them is a terminal state.

Exit status: 0 every law kept, 1 a counterexample or a difference, 2 could not be checked.")]
pub struct CheckArgs {
    /// A policy by name: alone it is held to the laws, beside --exec the program must equal it
    #[arg(
        long,
        value_name = "P",
        help = "Policy to check, or that --exec must equal (pytorch:growth_interval=20)"
    )]
    pub policy: Option<String>,
    /// A program that answers JSON Lines on its standard input, run through the shell
    #[arg(
        long,
        value_name = "CMD",
        conflicts_with = "golden",
        help = "Program to check, over JSON Lines"
    )]
    pub exec: Option<String>,
    /// A file of recorded traces, one JSON object a line
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "policy",
        help = "Recorded traces to replay"
    )]
    pub golden: Option<PathBuf>,
    /// Histories tried for each law (default 256; with --exec 100, fewer for long intervals)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help = "Histories tried for each law")]
    pub cases: Option<u32>,
    /// Seed of the search; the same seed tries the same histories
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        help = "Seed of the search"
    )]
    pub seed: u64,
    /// A law that the scaler is meant to break; it is an error if it does not (repeatable)
    #[arg(
        long = "except",
        value_name = "LAW",
        help = "Law that the scaler is meant to break (repeatable)"
    )]
    pub except: Vec<String>,
    /// One history instead of a search, as a report prints it: "0x20 1 0x19", or 0001000
    #[arg(
        long,
        value_name = "HISTORY",
        conflicts_with = "golden",
        help = "Try one history, such as \"0x20 1 0x19\""
    )]
    pub replay: Option<String>,
    /// Seconds that the program may say nothing
    #[arg(long, value_name = "SECONDS", default_value_t = SILENCE.as_secs_f64(), help = "Seconds of silence before giving up")]
    pub silence: f64,
    /// Print one JSON document
    #[arg(long, help = "Print one JSON document")]
    pub json: bool,
}

/// Why `check` could not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// Nothing to check was named.
    #[error(
        "check: found neither --policy, --exec nor --golden, expected one of them, such as --policy pytorch"
    )]
    Nothing,
    /// --except names no law.
    #[error("parsing --except \"{found}\": found no law of that name, expected one of {expected}")]
    UnknownLaw {
        /// What was given.
        found: String,
        /// All laws.
        expected: String,
    },
    /// --silence is no duration.
    #[error("parsing --silence \"{found}\": found no time, expected seconds from 0.1 to 3600")]
    Silence {
        /// What was given.
        found: f64,
    },
    /// A policy's text is wrong.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A history's text is wrong.
    #[error(transparent)]
    History(#[from] HistoryError),
    /// The program never answered.
    #[error("{0}; `gradscale check --help` shows the protocol")]
    Program(Box<Failure>),
    /// The golden file cannot be opened.
    #[error("opening golden traces \"{}\": {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The golden file is not one.
    #[error("\"{}\": {source}", path.display())]
    Golden {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: Box<GoldenError>,
    },
    /// The answer could not be written.
    #[error("writing the answer: {0}")]
    Write(#[from] io::Error),
}

fn gone(failure: Failure) -> CheckError {
    CheckError::Program(Box::new(failure))
}

/// Runs `check`: the answer to `out`, warnings to `err`; 0 where all is well, 1 where something is broken.
///
/// # Errors
/// When the check could not be made: exit status 2.
pub fn run(args: &CheckArgs, out: &mut dyn Write, err: &mut dyn Write) -> Result<u8, CheckError> {
    for law in &args.except {
        if !LAWS.iter().any(|l| l.name == law) {
            let expected = LAWS.iter().map(|l| l.name).collect::<Vec<_>>().join(", ");
            return Err(CheckError::UnknownLaw {
                found: law.clone(),
                expected,
            });
        }
    }
    if !(0.1..=3600.0).contains(&args.silence) {
        return Err(CheckError::Silence {
            found: args.silence,
        });
    }
    let replay = args.replay.as_deref().map(str::parse::<Case>).transpose()?;
    let spec = args.policy.as_deref().map(PolicySpec::parse).transpose()?;
    if let Some(path) = &args.golden {
        return check_golden(path, args.json, out);
    }
    let mut excuses: Vec<Excuse> = args
        .except
        .iter()
        .map(|law| Excuse {
            law: law.clone(),
            reason: "declared with --except".to_owned(),
            when_kept: WhenKept::Fail,
        })
        .collect();
    let declared = spec.iter().flat_map(|s| s.info().exceptions);
    let when_kept = if args.exec.is_some() {
        WhenKept::NotTried
    } else {
        WhenKept::Note
    };
    for exception in declared {
        if !excuses.iter().any(|e| e.law == exception.law) {
            excuses.push(Excuse {
                law: exception.law.to_owned(),
                reason: exception.reason.to_owned(),
                when_kept,
            });
        }
    }
    let options = Options {
        seed: args.seed,
        excuses,
        replay,
        ..Options::default()
    };
    let (subject, report) = match (&args.exec, spec) {
        (Some(command), spec) => (
            command.clone(),
            check_program(args, command, spec, options)?,
        ),
        (None, Some(spec)) => {
            let options = Options {
                cases: args.cases.unwrap_or(256),
                ..options
            };
            let build = || spec.build(Defaults::Class).expect("a parsed spec builds");
            (spec.canonical(), laws::check_policy(build, &options))
        }
        (None, None) => return Err(CheckError::Nothing),
    };
    for warning in &report.warnings {
        writeln!(err, "warning: {warning}")?;
    }
    if args.json {
        writeln!(out, "{}", report_json(&subject, &report))?;
    } else {
        write_report(out, &subject, &report)?;
    }
    // A program that stopped answering could not be checked, however far it came.
    let unanswered = report
        .failed()
        .any(|property| property.name == laws::ANSWERS);
    Ok(match (report.passed(), unanswered) {
        (true, _) => 0,
        (false, false) => 1,
        (false, true) => 2,
    })
}

/// What a policy's own setting says of its growth: learnt, unless it is not to grow within reach.
fn interval_of(spec: &PolicySpec, reach: usize) -> Interval {
    match spec.growth_interval(Defaults::Class) {
        Some(n) if n <= reach as u64 => Interval::Learnt,
        None if !spec.has("growth_interval") => Interval::Learnt,
        _ => Interval::Never,
    }
}

fn check_program(
    args: &CheckArgs,
    command: &str,
    spec: Option<PolicySpec>,
    mut options: Options,
) -> Result<Report, CheckError> {
    let silence = Duration::from_secs_f64(args.silence);
    let config = match &spec {
        Some(spec) => spec.config(Defaults::Class),
        None => [("growth_interval".to_owned(), ASKED_INTERVAL.into())]
            .into_iter()
            .collect(),
    };
    // A program costs some 20 microseconds a step, a thousand times what a policy costs.
    options.drive = 40_000;
    options.reach = 20_000;
    options.shrinks = 300;
    let mut first = Program::start(command, Some(config.clone()), silence).map_err(gone)?;
    first.reset().map_err(gone)?;
    let interval = match &spec {
        Some(spec) => spec.growth_interval(Defaults::Class),
        None if first.took_config() => takes_interval(&mut first),
        None => None,
    };
    options.interval = match (&spec, interval) {
        (Some(spec), _) => interval_of(spec, options.reach),
        (None, Some(n)) => Interval::OrOneMore(n),
        (None, None) => Interval::Learnt,
    };
    let steps_a_case = interval
        .unwrap_or(20)
        .saturating_mul(60)
        .clamp(500, 1_000_000);
    options.cases = args
        .cases
        .unwrap_or((2_000_000 / steps_a_case).clamp(8, 100) as u32);
    options.reference = spec;
    let mut waiting = Some(first);
    let mut make = || -> Result<Box<dyn Subject>, Failure> {
        match waiting.take() {
            Some(program) => Ok(Box::new(program)),
            None => Ok(Box::new(Program::start(
                command,
                Some(config.clone()),
                silence,
            )?)),
        }
    };
    laws::check(&mut make, &options).map_err(gone)
}

/// Whether a program that did not decline the configuration follows it. One that grows nowhere near the interval it was
/// asked for evidently ignores it, and its own is learnt; one that comes close is held to it.
fn takes_interval(program: &mut Program) -> Option<u64> {
    // A failure here is found again, and reported, by the search.
    let Ok(mut scale) = program.reset() else {
        return None;
    };
    for n in 1..=2 * ASKED_INTERVAL {
        match program.step(false) {
            Ok(laws::Step::Done { scale: next, .. }) if next > scale => {
                return (n > 1).then_some(ASKED_INTERVAL);
            }
            Ok(laws::Step::Done { scale: next, .. }) => scale = next,
            _ => return None,
        }
    }
    None
}

fn check_golden(path: &Path, json: bool, out: &mut dyn Write) -> Result<u8, CheckError> {
    let file = File::open(path).map_err(|source| CheckError::Open {
        path: path.to_path_buf(),
        source,
    })?;
    let results = golden::check(BufReader::new(file)).map_err(|source| CheckError::Golden {
        path: path.to_path_buf(),
        source: Box::new(source),
    })?;
    let failed = results.iter().filter(|r| !r.passed).count();
    if json {
        let document = json!({
            "schema": "gradscale.check/1",
            "subject": path.display().to_string(),
            "passed": failed == 0,
            "cases": results.iter().map(case_json).collect::<Vec<Json>>(),
        });
        writeln!(out, "{document}")?;
    } else {
        for result in results.iter().filter(|r| !r.passed) {
            writeln!(out, "BROKEN  {}", result.case)?;
            if let Some(d) = &result.first_difference {
                writeln!(
                    out,
                    "        step {}, {}: expected {}, seen {}",
                    d.step, d.what, d.expected, d.seen
                )?;
            }
        }
        writeln!(
            out,
            "{} of {} cases reproduced",
            results.len() - failed,
            results.len()
        )?;
    }
    Ok(u8::from(failed > 0))
}

fn case_json(result: &CaseResult) -> Json {
    let difference = result
        .first_difference
        .as_ref()
        .map(|d| json!({"step": d.step, "expected": d.expected, "seen": d.seen, "what": d.what}));
    json!({"case": result.case, "passed": result.passed, "first_difference": difference})
}

fn report_json(subject: &str, report: &Report) -> Json {
    let properties: Vec<Json> = report
        .properties
        .iter()
        .map(|p| {
            let counterexample = p.counterexample.as_ref().map(|c| {
                json!({
                    "found_inf": c.found_inf.iter().map(|&f| u8::from(f)).collect::<Vec<u8>>(),
                    "at": c.at,
                    "expected": c.expected,
                    "seen": c.seen,
                })
            });
            json!({
                "name": p.name,
                "passed": p.passed,
                "cases": p.cases,
                "counterexample": counterexample,
                "exception": p.exception,
            })
        })
        .collect();
    json!({
        "schema": "gradscale.check/1",
        "subject": subject,
        "passed": report.passed(),
        "properties": properties,
        "warnings": report.warnings,
    })
}

fn write_report(out: &mut dyn Write, subject: &str, report: &Report) -> io::Result<()> {
    let broken = report.failed().count();
    let verdict = match broken {
        0 => "keeps the laws".to_owned(),
        1 => "breaks a law".to_owned(),
        n => format!("breaks {n} laws"),
    };
    writeln!(out, "{subject} {verdict}")?;
    let laws_only = Report {
        warnings: Vec::new(),
        ..report.clone()
    };
    write!(out, "{laws_only}")?;
    for property in report.failed() {
        if let Some(law) = LAWS.iter().find(|l| l.name == property.name) {
            writeln!(
                out,
                "{}: {}. It finds bugs such as: {}.",
                law.name, law.statement, law.bug
            )?;
        }
    }
    if let Some(c) = report.failed().find_map(|p| p.counterexample.as_ref()) {
        let case = Case {
            found_inf: c.found_inf.clone(),
            at: 0,
        };
        writeln!(
            out,
            "try it again: --replay \"{case}\"; if it is meant to be so: --except LAW"
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        check: CheckArgs,
    }

    fn check(args: &[&str]) -> Result<(u8, Json), CheckError> {
        let cli = Cli::parse_from(["check", "--json"].iter().chain(args));
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let status = run(&cli.check, &mut out, &mut err)?;
        Ok((
            status,
            serde_json::from_slice(&out).expect("one JSON document"),
        ))
    }

    #[test]
    fn a_policy_keeps_the_laws_but_for_what_it_declares() {
        let (status, json) =
            check(&["--policy", "pytorch:growth_interval=20", "--cases", "50"]).expect("checks");
        assert_eq!((status, &json["passed"]), (0, &json!(true)));
        assert_eq!(json["subject"], "pytorch:growth_interval=20");
        let positive = json["properties"]
            .as_array()
            .expect("list")
            .iter()
            .find(|p| p["name"] == "scale_stays_positive")
            .expect("law");
        assert!(
            positive["exception"]
                .as_str()
                .expect("declared")
                .contains("166")
        );
        assert_eq!(
            positive["counterexample"]["found_inf"]
                .as_array()
                .expect("flags")
                .len(),
            166
        );
    }

    #[test]
    fn a_declaration_without_a_break_fails() {
        let (status, json) = check(&[
            "--policy",
            "tf-keras:growth_interval=20",
            "--except",
            "deterministic",
            "--cases",
            "20",
        ])
        .expect("checks");
        assert_eq!((status, &json["passed"]), (1, &json!(false)));
    }

    #[test]
    fn a_replay_tries_one_history() {
        let (status, json) = check(&[
            "--policy",
            "pytorch:growth_interval=4",
            "--replay",
            "0x4 1 0x4",
        ])
        .expect("checks");
        assert_eq!(status, 0);
        assert!(
            json["properties"]
                .as_array()
                .expect("list")
                .iter()
                .all(|p| p["cases"] == 1)
        );
    }

    #[test]
    fn what_cannot_be_checked_says_why() {
        let message = |args: &[&str]| check(args).expect_err("refused").to_string();
        assert!(message(&[]).contains("--policy pytorch"));
        assert!(message(&["--policy", "pytroch"]).contains("pytorch"));
        assert!(message(&["--policy", "pytorch", "--except", "gravity"]).contains("deterministic"));
        assert!(message(&["--policy", "pytorch", "--replay", "012"]).contains("012"));
        assert!(message(&["--golden", "/no/such/file.jsonl"]).contains("/no/such/file.jsonl"));
        assert!(message(&["--exec", "exit 3"]).contains("exit status 3"));
    }

    /// A scaler in shell: halves down to 1, doubles up to 2^24 after 5 clean steps; apex.amp's rule with a floor.
    const SHELL_SCALER: &str = r#"
k=16; c=0
while read -r line; do
  case $line in
    *'"reset"'*) k=16; c=0; echo "{\"scale\":$((1<<k)),\"config\":null}" ;;
    *'"step"'*true*) [ $k -gt 0 ] && k=$((k-1)); c=0; echo "{\"scale\":$((1<<k)),\"skipped\":true}" ;;
    *'"step"'*) c=$((c+1)); if [ $c -ge 5 ]; then c=0; [ $k -lt 24 ] && k=$((k+1)); fi; echo "{\"scale\":$((1<<k)),\"skipped\":false}" ;;
    *'"save"'*) echo "{\"state\":[$k,$c]}" ;;
    *'"load"'*) s=${line#*\[}; s=${s%%\]*}; k=${s%,*}; c=${s#*,}; echo "{\"scale\":$((1<<k))}" ;;
  esac
done
"#;
    const ITS_POLICY: &str = "apex-amp:growth_interval=5,min_scale=1";

    fn broken(json: &Json) -> Vec<&str> {
        let properties = json["properties"].as_array().expect("a list");
        properties
            .iter()
            .filter(|p| p["passed"] == false)
            .map(|p| p["name"].as_str().expect("a name"))
            .collect()
    }

    #[test]
    #[cfg(unix)]
    fn a_right_program_passes_with_and_without_its_policy() {
        for policy in [&["--policy", ITS_POLICY][..], &[]] {
            let args = [&["--exec", SHELL_SCALER, "--cases", "20"], policy].concat();
            let (status, json) = check(&args).expect("checks");
            assert_eq!((status, broken(&json)), (0, vec![]), "{json}");
        }
    }

    #[test]
    #[cfg(unix)]
    fn wrong_programs_are_found() {
        for (right, wrong, law, longest) in [
            // Its interval is learnt, and an overflow does not reset the count.
            ("k=$((k-1)); c=0;", "k=$((k-1));", "never_grows_early", 7),
            (
                "\"skipped\\\":true",
                "\"skipped\\\":false",
                "skips_exactly_on_overflow",
                1,
            ),
            ("c=${s#*,};", "c=0;", "save_load_continues", 6),
            (
                "echo \"{\\\"state\\\":[$k,$c]}\"",
                "echo '{\"error\":\"no\"}'",
                "save_load_continues",
                0,
            ),
        ] {
            let program = SHELL_SCALER.replace(right, wrong);
            assert_ne!(program, SHELL_SCALER, "{right}");
            let (status, json) = check(&["--exec", &program, "--cases", "20"]).expect("checks");
            assert_eq!((status, broken(&json)), (1, vec![law]), "{json}");
            let property = json["properties"]
                .as_array()
                .expect("list")
                .iter()
                .find(|p| p["name"] == law)
                .expect("found");
            let steps = property["counterexample"]["found_inf"]
                .as_array()
                .expect("flags")
                .len();
            assert!(steps <= longest, "{law}: {steps} steps");
        }
        let (status, json) = check(&[
            "--exec",
            SHELL_SCALER,
            "--policy",
            "apex-amp:growth_interval=6,min_scale=1",
            "--cases",
            "5",
        ])
        .expect("checks");
        assert!(
            status == 1 && broken(&json).contains(&"same_as_policy"),
            "{json}"
        );
    }

    #[test]
    #[cfg(unix)]
    fn a_program_that_dies_on_the_way_could_not_be_checked_and_its_history_is_shown() {
        let dies = "read x; echo '{\"scale\":1}'; read x; read x; echo '{\"scale\":1}'";
        let (status, json) = check(&["--exec", dies, "--silence", "1"]).expect("reports");
        assert_eq!((status, broken(&json)), (2, vec![laws::ANSWERS]), "{json}");
    }
}
