//! Golden traces: the scale sequences that real implementations produced, replayed by ours.
//!
//! A file holds one JSON object a line:
//!
//! | field | meaning |
//! | --- | --- |
//! | `case`, `policy`, `config` | name; which policy; its arguments under the implementation's own names |
//! | `steps`, `restore_at` | length; before which step the state was saved and loaded into a fresh object |
//! | `found_inf`, `scale`, `skipped` | a value a step; `scale` is the one *used*, before that step's update |
//! | `amax`, `limit` | closed loop: the step overflows where `scale * amax > limit`; without `limit`, amax drives the policy |
//! | `scale_after`, `state_after` | after the last step |
//! | `error` | `{step, kind, message}`: the update of that step raised and the trace ends |
//! | `has_nan`, `tolerance_rel` | amax-driven: steps flagged as NaN; compare with this relative tolerance |
//!
//! A long list is `{"rle": [[value, count], ...]}`; `"inf"`, `"-inf"` and `"nan"` are text. Numbers compare for equality.

use std::io::{BufRead, Read};

use serde_json::{Map, Value as Json};

use super::policy::{Defaults, Observed, PolicyError, PolicySpec, as_number};

/// The longest line that is read: the longest real trace has 30 KB.
const LINE_BYTES: u64 = 64 << 20;
/// The most steps of a case, so that a short file cannot ask for years of replay.
const STEPS: u64 = 100_000_000;

/// Recorded messages are cut at this many characters, and so are ours before they are compared.
const MESSAGE_CHARS: usize = 100;

/// How one case came out.
#[derive(Debug, Clone, PartialEq)]
pub struct CaseResult {
    /// The case's name.
    pub case: String,
    /// Whether every number agreed.
    pub passed: bool,
    /// Where they first parted.
    pub first_difference: Option<Difference>,
}

/// The first place where a replay and its trace part.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The step, counted from 0; the number of steps for what is compared after the last one.
    pub step: u64,
    /// What the trace says.
    pub expected: Json,
    /// What our policy did.
    pub seen: Json,
    /// Which field it is: `scale`, `skipped`, `found_inf`, `error`, `scale_after` or `state_after.NAME`.
    pub what: String,
}

/// Why a golden file could not be replayed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GoldenError {
    /// Reading failed.
    #[error("reading golden traces, line {line}: {source}")]
    Read {
        /// The line, from 1.
        line: u64,
        /// The cause.
        source: std::io::Error,
    },
    /// The line is not a JSON object.
    #[error("reading golden traces, line {line}: found {found}, expected one JSON object a line")]
    NotJson {
        /// The line, from 1.
        line: u64,
        /// What is wrong.
        found: String,
    },
    /// A field is missing or of the wrong shape.
    #[error(
        "reading golden traces, line {line}, field \"{field}\": found {found}, expected {expected}"
    )]
    Field {
        /// The line, from 1.
        line: u64,
        /// The field.
        field: String,
        /// What was found.
        found: String,
        /// What would do.
        expected: &'static str,
    },
    /// The policy or its configuration is none of ours.
    #[error("reading golden traces, line {line}: {source}")]
    Policy {
        /// The line, from 1.
        line: u64,
        /// The cause.
        source: PolicyError,
    },
    /// The file has no case.
    #[error("reading golden traces: found no case, expected one JSON object a line")]
    Empty,
}

/// Replays every case of a golden file and compares scale, skip, error, final scale and counters.
///
/// # Errors
/// When the text is not a golden file or names a policy or an argument that does not exist. A difference is a result.
pub fn check(mut reader: impl BufRead) -> Result<Vec<CaseResult>, GoldenError> {
    let mut results = Vec::new();
    let mut bytes = Vec::new();
    for line in 1.. {
        bytes.clear();
        let length = (&mut reader)
            .take(LINE_BYTES)
            .read_until(b'\n', &mut bytes)
            .map_err(|source| GoldenError::Read { line, source })?;
        if length == 0 {
            break;
        }
        if length as u64 == LINE_BYTES {
            return Err(GoldenError::NotJson {
                line,
                found: format!("a line of more than {LINE_BYTES} bytes"),
            });
        }
        if bytes.trim_ascii().is_empty() {
            continue;
        }
        let record: Map<String, Json> =
            serde_json::from_slice(&bytes).map_err(|e| GoldenError::NotJson {
                line,
                found: e.to_string(),
            })?;
        results.push(replay(&Record {
            line,
            record: &record,
        })?);
    }
    if results.is_empty() {
        Err(GoldenError::Empty)
    } else {
        Ok(results)
    }
}

/// One line of the file with typed access.
struct Record<'a> {
    line: u64,
    record: &'a Map<String, Json>,
}

impl Record<'_> {
    fn get(&self, field: &str) -> Option<&Json> {
        self.record.get(field).filter(|v| !v.is_null())
    }

    fn bad(&self, field: &str, expected: &'static str) -> GoldenError {
        let found = match self.record.get(field) {
            None => "nothing".to_owned(),
            Some(json) => json.to_string().chars().take(80).collect(),
        };
        GoldenError::Field {
            line: self.line,
            field: field.to_owned(),
            found,
            expected,
        }
    }

    fn text(&self, field: &str) -> Result<&str, GoldenError> {
        self.get(field)
            .and_then(Json::as_str)
            .ok_or_else(|| self.bad(field, "text"))
    }

    /// The list's runs, which must hold `steps` values.
    fn list(&self, field: &str, steps: u64) -> Result<Option<Runs<'_>>, GoldenError> {
        let Some(json) = self.get(field) else {
            return Ok(None);
        };
        let bad = || {
            self.bad(
                field,
                "a list of one value a step, or {\"rle\": [[value, count], ...]}",
            )
        };
        let runs: Vec<(&Json, u64)> = match (json, json.get("rle")) {
            (Json::Array(values), _) => values.iter().map(|v| (v, 1)).collect(),
            (_, Some(Json::Array(pairs))) => pairs
                .iter()
                .map(|pair| match pair.as_array().map(Vec::as_slice) {
                    Some([value, count]) => count.as_u64().map(|n| (value, n)),
                    _ => None,
                })
                .collect::<Option<_>>()
                .ok_or_else(bad)?,
            _ => return Err(bad()),
        };
        let total = runs
            .iter()
            .try_fold(0_u64, |sum, (_, n)| sum.checked_add(*n));
        if total == Some(steps) {
            Ok(Some(Runs {
                runs,
                at: 0,
                used: 0,
            }))
        } else {
            Err(bad())
        }
    }
}

/// A cursor over a list's runs.
struct Runs<'a> {
    runs: Vec<(&'a Json, u64)>,
    at: usize,
    used: u64,
}

impl<'a> Iterator for Runs<'a> {
    type Item = &'a Json;
    fn next(&mut self) -> Option<&'a Json> {
        loop {
            let (value, count) = *self.runs.get(self.at)?;
            if self.used < count {
                self.used += 1;
                return Some(value);
            }
            self.at += 1;
            self.used = 0;
        }
    }
}

fn truth(json: &Json) -> Option<bool> {
    match json {
        Json::Bool(b) => Some(*b),
        _ => match json.as_f64() {
            Some(0.0) => Some(false),
            Some(1.0) => Some(true),
            _ => None,
        },
    }
}

/// Equality of two JSON values, numbers by value (26 is 26.0), within a relative tolerance where there is one.
fn same(expected: &Json, seen: &Json, tolerance_rel: f64, floor: f64) -> bool {
    if let (Json::Array(a), Json::Array(b)) = (expected, seen) {
        return a.len() == b.len()
            && a.iter()
                .zip(b)
                .all(|(a, b)| same(a, b, tolerance_rel, floor));
    }
    match (as_number(expected), as_number(seen)) {
        (Some(a), Some(b)) => {
            let size = a.abs().max(b.abs()).max(floor);
            let near = a.is_finite() && b.is_finite() && (a - b).abs() <= tolerance_rel * size;
            a == b || (a.is_nan() && b.is_nan()) || near
        }
        _ => expected == seen,
    }
}

fn replay(record: &Record<'_>) -> Result<CaseResult, GoldenError> {
    let policy_error = |source| GoldenError::Policy {
        line: record.line,
        source,
    };
    let case = record.text("case")?.to_owned();
    let empty = Map::new();
    let config = match record.get("config") {
        None => &empty,
        Some(json) => json
            .as_object()
            .ok_or_else(|| record.bad("config", "an object of arguments"))?,
    };
    let spec = PolicySpec::from_config(record.text("policy")?, config).map_err(policy_error)?;
    let mut policy = spec.build(Defaults::Class).map_err(policy_error)?;

    let steps = record
        .get("steps")
        .and_then(Json::as_u64)
        .filter(|n| *n <= STEPS);
    let steps =
        steps.ok_or_else(|| record.bad("steps", "the number of steps, at most 100000000"))?;
    let mut scales = record
        .list("scale", steps)?
        .ok_or_else(|| record.bad("scale", "the scale of each step"))?;
    let mut skips = record.list("skipped", steps)?;
    let mut flags = record.list("found_inf", steps)?;
    let mut amaxes = record.list("amax", steps)?;
    if flags.is_none() && amaxes.is_none() {
        return Err(record.bad("found_inf", "found_inf or amax of each step"));
    }
    let number = |field: &'static str| match record.get(field) {
        None => Ok(None),
        Some(json) => as_number(json)
            .map(Some)
            .ok_or_else(|| record.bad(field, "a number")),
    };
    let limit = number("limit")?;
    let tolerance_rel = number("tolerance_rel")?.unwrap_or(0.0);
    let index = |field: &'static str| match record.get(field) {
        None => Ok(None),
        Some(json) => json
            .as_u64()
            .map(Some)
            .ok_or_else(|| record.bad(field, "a step")),
    };
    let restore_at = index("restore_at")?;
    let nan_steps: Vec<u64> = match record.get("has_nan") {
        None => Vec::new(),
        Some(json) => {
            let list = json
                .as_array()
                .and_then(|l| l.iter().map(Json::as_u64).collect());
            list.ok_or_else(|| record.bad("has_nan", "a list of steps"))?
        }
    };
    let error = match record.get("error") {
        None => None,
        Some(json) => {
            let parts = (
                json.get("step").and_then(Json::as_u64),
                json.get("kind"),
                json.get("message"),
            );
            match parts {
                (Some(step), Some(Json::String(kind)), Some(Json::String(message))) => {
                    Some((step, kind, message))
                }
                _ => return Err(record.bad("error", "null or {step, kind, message}")),
            }
        }
    };

    let parted = |step, what: &str, expected: Json, seen: Json| {
        let difference = Difference {
            step,
            expected,
            seen,
            what: what.to_owned(),
        };
        Ok(CaseResult {
            case: case.clone(),
            passed: false,
            first_difference: Some(difference),
        })
    };
    for step in 0..steps {
        if restore_at == Some(step) {
            let saved = policy.save();
            policy = spec.build(Defaults::Class).map_err(policy_error)?;
            policy.load(&saved).map_err(policy_error)?;
        }
        let expected = scales
            .next()
            .ok_or_else(|| record.bad("scale", "a value a step"))?;
        let seen = super::policy::number(policy.loss_scale());
        if as_number(expected).is_none() {
            return Err(record.bad("scale", "numbers"));
        }
        if !same(expected, &seen, tolerance_rel, 0.0) {
            return parted(step, "scale", expected.clone(), seen);
        }

        let amax = match &mut amaxes {
            None => None,
            Some(list) => Some(
                list.next()
                    .and_then(as_number)
                    .ok_or_else(|| record.bad("amax", "numbers"))?,
            ),
        };
        let flag = match &mut flags {
            None => None,
            Some(list) => Some(
                list.next()
                    .and_then(truth)
                    .ok_or_else(|| record.bad("found_inf", "0 or 1 a step"))?,
            ),
        };
        let found_inf = match (amax, limit) {
            (Some(amax), Some(limit)) => policy.loss_scale() * amax > limit,
            (Some(amax), None) if flag.is_none() => !amax.is_finite() || nan_steps.contains(&step),
            _ => flag.unwrap_or(false),
        };
        if let Some(flag) = flag.filter(|f| *f != found_inf) {
            return parted(
                step,
                "found_inf",
                u8::from(flag).into(),
                u8::from(found_inf).into(),
            );
        }

        let result = policy.update(Observed {
            found_inf,
            amax: amax.map(|a| a as f32),
        });
        let skipped = result.as_ref().map_or(true, |u| u.skipped);
        if let Some(list) = &mut skips {
            let expected = list
                .next()
                .and_then(truth)
                .ok_or_else(|| record.bad("skipped", "0 or 1 a step"))?;
            if expected != skipped {
                return parted(
                    step,
                    "skipped",
                    u8::from(expected).into(),
                    u8::from(skipped).into(),
                );
            }
        }
        let expected = error
            .as_ref()
            .filter(|(at, ..)| *at == step)
            .map(|(_, kind, message)| format!("{kind}: {message}"));
        let seen = result.err().map(|e| {
            // The recorder cut messages at this length.
            let message: String = e.message.chars().take(MESSAGE_CHARS).collect();
            format!("{}: {message}", e.kind)
        });
        if expected != seen {
            return parted(step, "error", expected.into(), seen.into());
        }
        if seen.is_some() && step + 1 != steps {
            return parted(step + 1, "steps", steps.into(), (step + 1).into());
        }
    }
    if let Some((step, kind, message)) = error.filter(|(at, ..)| *at >= steps) {
        return parted(
            step,
            "error",
            format!("{kind}: {message}").into(),
            Json::Null,
        );
    }
    if let Some(expected) = record.get("scale_after") {
        let seen = super::policy::number(policy.loss_scale());
        if !same(expected, &seen, tolerance_rel, 0.0) {
            return parted(steps, "scale_after", expected.clone(), seen);
        }
    }
    if let Some(json) = record.get("state_after") {
        let expected = json
            .as_object()
            .ok_or_else(|| record.bad("state_after", "an object of counters"))?;
        let counters = policy.counters();
        for (name, expected) in expected {
            // Averages of log2 values pass through zero: there the tolerance is relative to one binade.
            let seen = counters.get(name).cloned().unwrap_or(Json::Null);
            if !same(expected, &seen, tolerance_rel, 1.0) {
                return parted(
                    steps,
                    &format!("state_after.{name}"),
                    expected.clone(),
                    seen,
                );
            }
        }
    }
    Ok(CaseResult {
        case,
        passed: true,
        first_difference: None,
    })
}
