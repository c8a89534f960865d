//! A diagnosis as JSON (`gradscale.diagnose/1`) and as text: three lines that say it, then the evidence.

use super::json;
use super::text::{self, count};
use crate::scaling::diagnose::{Diagnosis, Filled, FilledKind};
use crate::warning::Warning;
use serde_json::{Value, json};

/// Events shown of a long log: the first and the last of this many.
const MOST_EVENTS: usize = 2000;
/// Rows of the evidence table.
const MOST_ROWS: usize = 8;

/// `gradscale.diagnose/1`.
pub fn to_json(diagnoses: &[Diagnosis]) -> Value {
    json!({
        "schema": "gradscale.diagnose/1",
        "logs": diagnoses.iter().map(log).collect::<Vec<_>>(),
    })
}

/// One log's part of it.
pub fn log(diagnosis: &Diagnosis) -> Value {
    let scale = |value: Option<f64>| value.map(json::scale);
    let (head, tail) = shown(&diagnosis.events, MOST_EVENTS);
    json!({
        "path": diagnosis.path,
        "format": diagnosis.format,
        "verdict": diagnosis.verdict().as_str(),
        "also": diagnosis.also().iter().map(|v| v.as_str()).collect::<Vec<_>>(),
        "skipped_steps": diagnosis.skipped_steps,
        "first_scale": scale(diagnosis.first_scale),
        "last_scale": scale(diagnosis.last_scale),
        "growth_interval": diagnosis.growth_interval.map(|interval| interval.steps),
        "unit": if diagnosis.log2 { "log2" } else { "scale" },
        "skipped_min": diagnosis.skipped_min,
        "bad_news": diagnosis.is_bad_news(),
        "runs": diagnosis.shape.runs,
        "lines": diagnosis.lines,
        "events": head.iter().chain(tail).map(event).collect::<Vec<_>>(),
        "events_left_out": diagnosis.events.len() - head.len() - tail.len(),
        "evidence": diagnosis.held.iter().map(|held| json!({
            "verdict": held.verdict.as_str(), "because": held.because, "line": held.line,
        })).collect::<Vec<_>>(),
        "growth_printed": diagnosis.growth_printed,
        "fit": diagnosis.fit,
        "what_if": diagnosis.what_if,
        "why": diagnosis.why,
        "advice": diagnosis.advice,
        "warnings": json::warnings(&diagnosis.warnings),
    })
}

/// The first and the last of many.
fn shown(events: &[Filled], most: usize) -> (&[Filled], &[Filled]) {
    if events.len() <= most {
        (events, &[])
    } else {
        (&events[..most / 2], &events[events.len() - most / 2..])
    }
}

fn event(event: &Filled) -> Value {
    json!({
        "line": event.line,
        "step": event.step,
        "steps": event.steps.map(|(low, high)| [low, high]),
        "kind": event.kind.as_str(),
        "scale_before": event.before.map(json::scale),
        "scale_after": event.after.map(json::scale),
        "inferred": event.inferred,
        "implied": event.implied.iter().zip(["scale_before", "scale_after"]).filter(|(implied, _)| **implied).map(|(_, name)| name).collect::<Vec<_>>(),
        "count": event.count,
        "copies": event.copies,
    })
}

/// What follows from a log beside its verdict, each with what it is about: its interval, the policy it fits, what others
/// would have skipped.
pub(super) fn facts(diagnosis: &Diagnosis) -> Vec<(&'static str, String)> {
    let mut facts = Vec::new();
    if let Some(interval) = diagnosis.growth_interval {
        let how = match interval.said {
            true => "stated in the log",
            false => "from the distances between changes",
        };
        facts.push((
            "Interval",
            format!("growth interval {} ({how})", count(interval.steps)),
        ));
    }
    if let Some(fit) = &diagnosis.fit {
        let seen = match fit.interval_seen {
            true => "",
            false => " (no growth is seen, so the interval is the default)",
        };
        facts.push((
            "Policy",
            format!(
                "these lines fit {} at {} of {} events{seen}",
                fit.policy,
                count(fit.agreed),
                count(fit.events)
            ),
        ));
    }
    for other in &diagnosis.what_if {
        let bounds = match (other.skipped_low, other.skipped_high) {
            (low, high) if low == high => count(low),
            (low, high) => format!("{} to {}", count(low), count(high)),
        };
        facts.push((
            "What if",
            format!("{} would have skipped {bounds}", other.policy),
        ));
    }
    facts
}

/// One log as text. Control characters of the log never reach a terminal: only numbers and our own words are printed.
pub fn to_text(diagnosis: &Diagnosis) -> String {
    let mut out = String::new();
    let mut say = |line: &str| {
        out.push_str(line);
        out.push('\n');
    };
    say(&diagnosis.headline());
    say(&format!("Why: {}", diagnosis.why));
    match diagnosis.advice.split_first() {
        None => {}
        Some((first, rest)) => {
            say(&format!("Do: {first}"));
            for more in rest {
                say(&format!("    {more}"));
            }
        }
    }
    say("");
    let runs = if diagnosis.shape.runs > 1 {
        format!(", {} runs", diagnosis.shape.runs)
    } else {
        String::new()
    };
    say(&format!(
        "{}: {} ({}), {} lines{runs}; verdict {}{}",
        text::shortened(&diagnosis.path, 60),
        diagnosis.format,
        diagnosis.framework,
        count(diagnosis.lines),
        diagnosis.verdict().as_str(),
        match diagnosis.also().as_slice() {
            [] => String::new(),
            also => format!(
                ", also {}",
                also.iter()
                    .map(|v| v.as_str())
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
        }
    ));
    for (_, fact) in facts(diagnosis) {
        say(&fact);
    }
    if !diagnosis.events.is_empty() {
        say("");
        out.push_str(&table(diagnosis));
    }
    out
}

fn table(diagnosis: &Diagnosis) -> String {
    let (head, tail) = shown(&diagnosis.events, MOST_ROWS);
    let left_out = diagnosis.events.len() - head.len() - tail.len();
    let row = |event: &Filled| {
        // What no line prints stands in brackets.
        let scale = |value: Option<f64>, implied: bool| match value {
            None => "?".to_owned(),
            Some(value) if implied => format!("({})", diagnosis.shown_scale(value)),
            Some(value) => diagnosis.shown_scale(value),
        };
        let step = match (event.step, event.steps) {
            (Some(step), _) => count(step),
            (None, Some((low, high))) if low == high => count(low),
            (None, Some((low, high))) => format!("{}..{}", count(low), count(high)),
            (None, None) => String::new(),
        };
        let mut what = match event.kind {
            FilledKind::Overflow => "overflow".to_owned(),
            FilledKind::Kept => "overflow, scale kept".to_owned(),
            FilledKind::StillUpdated => "overflow, step made".to_owned(),
            FilledKind::Growth => "growth".to_owned(),
            FilledKind::Restart => "run begins again".to_owned(),
            FilledKind::Stopped => "stopped at minimum".to_owned(),
        };
        if event.count > 1 {
            what.push_str(&format!(" x{}", event.count));
        }
        if event.inferred {
            what.push_str(" (inferred)");
        }
        let marks = matches!(event.kind, FilledKind::Restart | FilledKind::Stopped);
        vec![
            what,
            count(event.line),
            step,
            if marks {
                String::new()
            } else {
                scale(event.before, event.implied[0])
            },
            if marks {
                String::new()
            } else {
                scale(event.after, event.implied[1])
            },
        ]
    };
    let mut rows: Vec<Vec<String>> = head.iter().map(row).collect();
    if left_out > 0 {
        rows.push(vec![
            format!("… {} more", count(left_out as u64)),
            String::new(),
            String::new(),
            String::new(),
            String::new(),
        ]);
        rows.extend(tail.iter().map(row));
    }
    text::table(&["event", "line", "step", "scale before", "after"], &rows)
}

/// All warnings of some diagnoses.
pub fn warnings(diagnoses: &[Diagnosis]) -> Vec<Warning> {
    diagnoses
        .iter()
        .flat_map(|d| d.warnings.iter().cloned())
        .collect()
}
