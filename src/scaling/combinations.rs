//! Every combination of several settings, replayed over one run.
//!
//! ```text
//!   growth_interval=1..,hysteresis=1..4        every interval under each of four hystereses
//!   init_scale=2^8..2^16,growth_factor=1.5,2   nine starts under each of two factors
//! ```

use super::policy::{Defaults, PolicyError, PolicySpec, parse_number};
use super::simulate::{Cost, Timeline, cost_with_bounds};
use super::{Measure, Run};
use crate::float::{exact_log2, exp2};
use rayon::prelude::*;

/// The most combinations of settings other than the growth interval.
pub const MOST_SETTINGS: usize = 10_000;
/// The most values one key may take, but for the growth interval.
const MOST_VALUES: i64 = 100_000;

/// One key of a sweep and its values.
#[derive(Debug, Clone, PartialEq)]
pub struct SweptKey {
    /// The key, as it was given.
    pub name: String,
    /// Its values, in the order given.
    pub values: Values,
}

/// The values of one key.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// From a number up to the length of the run.
    From(i64),
    /// These.
    These(Vec<f64>),
}

/// Why a sweep cannot be made.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SweepError {
    /// It is not written as a sweep is.
    #[error(
        "found {found}, expected keys with values such as growth_interval=1..,hysteresis=1..4 or init_scale=2^8..2^16"
    )]
    Syntax {
        /// The part at fault.
        found: String,
    },
    /// More combinations than anybody can wait for.
    #[error(
        "found {found} combinations besides the growth interval, expected at most {MOST_SETTINGS}"
    )]
    TooMany {
        /// How many.
        found: usize,
    },
    /// A key or value that the policy does not take.
    #[error(transparent)]
    Policy(#[from] PolicyError),
}

/// Reads `key=values,…`: `low..high` of integers or of powers of two (`2^8..2^16`), `low..` up to the run's length, or
/// single values with commas between.
///
/// # Errors
/// When a part is neither, a range is empty, or a key stands twice.
pub fn parse(text: &str) -> Result<Vec<SweptKey>, SweepError> {
    let bad = |found: String| SweepError::Syntax { found };
    let mut keys: Vec<SweptKey> = Vec::new();
    for part in text.split(',') {
        let value = match part.split_once('=') {
            Some((name, value)) => {
                let name = name.trim().to_owned();
                if name.is_empty() {
                    return Err(bad(format!("{part:?}")));
                }
                if keys.iter().any(|key| key.name == name) {
                    return Err(bad(format!("key {name:?} twice")));
                }
                keys.push(SweptKey {
                    name,
                    values: Values::These(Vec::new()),
                });
                value
            }
            None => part,
        };
        let Some(key) = keys.last_mut() else {
            return Err(bad(format!("{part:?} without a key")));
        };
        let Values::These(values) = &mut key.values else {
            return Err(bad(format!("{part:?} after an open range")));
        };
        match value.trim().split_once("..") {
            None => values.push(parse_number(value).ok_or_else(|| bad(format!("{value:?}")))?),
            Some((low, "")) => {
                let low = parse_number(low).filter(|low| low.fract() == 0.0 && *low >= 1.0);
                let low = low.ok_or_else(|| bad(format!("{value:?}")))?;
                if !values.is_empty() {
                    return Err(bad(format!("{part:?} after other values")));
                }
                key.values = Values::From(low as i64);
            }
            Some((low, high)) => {
                let powers = low.contains('^') || high.contains('^');
                let end = |text: &str| {
                    let number = parse_number(text)?;
                    match powers {
                        true => exact_log2(number).map(i64::from),
                        false => (number.fract() == 0.0).then_some(number as i64),
                    }
                };
                let (low, high) = (end(low), end(high));
                let (Some(low), Some(high)) = (low, high) else {
                    return Err(bad(format!("{value:?}")));
                };
                if low > high || high - low > MOST_VALUES {
                    return Err(bad(format!("the range {value:?}")));
                }
                values.extend((low..=high).map(|n| if powers { exp2(n as i32) } else { n as f64 }));
            }
        }
    }
    Ok(keys)
}

/// One combination's replay.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The values, in the order of the keys.
    pub values: Vec<f64>,
    /// What it costs.
    pub cost: Cost,
    /// Least and most skips where the record leaves steps undecided; equal otherwise.
    pub skipped_bounds: (u64, u64),
}

/// What a sweep comes to.
#[derive(Debug, Clone, PartialEq)]
pub struct Swept {
    /// The keys.
    pub keys: Vec<String>,
    /// How many combinations were replayed. An interval without any growth stands for all larger ones.
    pub rows: u64,
    /// The combination that costs least, the first of equals.
    pub best: Row,
    /// For each combination of the other keys the interval that costs least, in the sweep's order; all rows where the
    /// growth interval is not swept. At most 10,000.
    pub by_setting: Vec<Row>,
    /// The policy's own settings.
    pub own: Row,
}

/// Replays every combination; `visit` sees each row, in order, while the sweep goes on.
///
/// # Errors
/// When the policy lacks a key, a value cannot be used, or there are too many; and whatever `visit` returns.
pub fn combinations<E: From<SweepError>>(
    timeline: &Timeline<'_>,
    spec: &PolicySpec,
    keys: &[SweptKey],
    measure: Measure,
    visit: &mut dyn FnMut(&Row) -> Result<(), E>,
) -> Result<Swept, E> {
    let run = timeline.run();
    let is_interval = |key: &SweptKey| {
        let probe = spec.with(&key.name, 17i64);
        probe.is_ok_and(|probe| probe.growth_interval(Defaults::Framework) == Some(17))
    };
    let interval_at = keys.iter().position(is_interval);
    let values: Vec<Vec<f64>> = keys.iter().map(|key| expand(key, run, spec)).collect();
    let settings: usize = values
        .iter()
        .enumerate()
        .filter(|(at, _)| Some(*at) != interval_at)
        .map(|(_, values)| values.len())
        .try_fold(1usize, usize::checked_mul)
        .unwrap_or(usize::MAX);
    if settings > MOST_SETTINGS {
        return Err(SweepError::TooMany { found: settings }.into());
    }
    let price = |row: &Row| {
        let extra = row.skipped_bounds.1.saturating_sub(row.cost.skipped);
        row.cost.j(measure) + crate::tally::fraction(extra, row.cost.steps)
    };
    let mut best: Option<Row> = None;
    let mut by_setting = Vec::new();
    let mut rows = 0;
    for setting in 0..settings {
        let mut fixed = vec![0.0; keys.len()];
        let mut left = setting;
        for (at, values) in values.iter().enumerate().rev() {
            if Some(at) != interval_at {
                fixed[at] = values[left % values.len()];
                left /= values.len();
            }
        }
        let intervals: &[f64] = interval_at.map_or(&[0.0], |at| &values[at]);
        let mut here: Option<Row> = None;
        // In batches, so that the sweep can end early; the batch's size does not reach the result.
        for batch in intervals.chunks(512) {
            let replayed: Vec<Row> = batch
                .par_iter()
                .map(|&interval| {
                    let mut row = fixed.clone();
                    if let Some(at) = interval_at {
                        row[at] = interval;
                    }
                    replay(timeline, spec, keys, row)
                })
                .collect::<Result<_, PolicyError>>()
                .map_err(SweepError::from)?;
            let ascending =
                interval_at.is_some_and(|at| matches!(keys[at].values, Values::From(_)));
            let end = replayed
                .iter()
                .position(|row| ascending && row.cost.growths == 0);
            for row in replayed
                .into_iter()
                .take(end.map_or(usize::MAX, |end| end + 1))
            {
                rows += 1;
                visit(&row)?;
                if here.as_ref().is_none_or(|least| price(&row) < price(least)) {
                    here = Some(row);
                }
            }
            if end.is_some() {
                break;
            }
        }
        if let Some(row) = here {
            if best.as_ref().is_none_or(|least| price(&row) < price(least)) {
                best = Some(row.clone());
            }
            by_setting.push(row);
        }
    }
    let own = replay(timeline, spec, &[], Vec::new()).map_err(SweepError::from)?;
    let Some(best) = best else {
        let found = "no value".to_owned();
        return Err(SweepError::Syntax { found }.into());
    };
    Ok(Swept {
        keys: keys.iter().map(|key| key.name.clone()).collect(),
        rows,
        best,
        by_setting,
        own,
    })
}

fn expand(key: &SweptKey, run: &Run, spec: &PolicySpec) -> Vec<f64> {
    match &key.values {
        Values::These(values) => values.clone(),
        Values::From(low) => {
            let default = spec.growth_interval(Defaults::Framework).unwrap_or(2000);
            let longest = run.len().max(default) as i64;
            (*low..=longest.max(*low)).map(|n| n as f64).collect()
        }
    }
}

fn replay(
    timeline: &Timeline<'_>,
    spec: &PolicySpec,
    keys: &[SweptKey],
    values: Vec<f64>,
) -> Result<Row, PolicyError> {
    let mut spec = spec.clone();
    for (key, &value) in keys.iter().zip(&values) {
        // Counts are integers, factors and scales are not; the policy knows which it takes.
        let whole = (value.fract() == 0.0).then(|| spec.with(&key.name, value as i64));
        spec = match whole {
            Some(Ok(spec)) => spec,
            _ => spec.with(&key.name, value)?,
        };
    }
    let policy = spec.build(Defaults::Framework)?;
    let (cost, bounds) = cost_with_bounds(timeline, policy.as_ref());
    Ok(Row {
        values,
        cost,
        skipped_bounds: (bounds.low, bounds.high),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scaling::RunOptions;
    use crate::scaling::simulate::cost;
    use crate::tally::{TensorInfo, Trace};

    fn run() -> Run {
        let mut trace = Trace {
            tensors: vec![TensorInfo {
                name: "amax".to_owned(),
                shape: vec![1],
                elements: 1,
                role: crate::tally::Role::Parameter,
                produced_in: None,
                reduction: None,
                backward_order: None,
            }],
            ..Trace::default()
        };
        for step in 0..600u64 {
            trace.steps.push(crate::tally::Step {
                step,
                loss_scale: None,
                found_inf: None,
                loss: None,
            });
            trace.amax.push(if step % 97 == 50 { 4.0 } else { 0.5 });
            trace.nonfinite.push(0);
        }
        Run::new(&trace, RunOptions::default())
    }

    #[test]
    fn every_combination_is_what_its_policy_alone_costs() {
        let run = run();
        let timeline = Timeline::new(&run);
        let spec = PolicySpec::named("megatron").expect("a policy");
        let keys =
            parse("growth_interval=1..,hysteresis=1..3,init_scale=2^14..2^16").expect("valid");
        let mut seen = Vec::new();
        let swept =
            combinations::<SweepError>(&timeline, &spec, &keys, Measure::Elements, &mut |row| {
                seen.push(row.clone());
                Ok(())
            })
            .expect("swept");
        assert_eq!(swept.rows as usize, seen.len());
        assert_eq!(swept.by_setting.len(), 9);
        for row in seen.iter().step_by(29) {
            let text = format!(
                "megatron:growth_interval={},hysteresis={},init_scale={}",
                row.values[0], row.values[1], row.values[2]
            );
            let policy = PolicySpec::parse(&text)
                .and_then(|spec| spec.build(Defaults::Framework))
                .expect("valid");
            assert_eq!(row.cost, cost(&timeline, policy.as_ref()), "{text}");
        }
        let least = seen.iter().map(|row| row.cost.skipped).min().expect("some");
        assert_eq!(swept.best.cost.skipped, least);
    }

    #[test]
    fn sweeps_are_read_as_written_or_refused_with_the_part_at_fault() {
        let keys = parse("growth_interval=100,500,growth_factor=1.5,2").expect("valid");
        assert_eq!(keys[0].values, Values::These(vec![100.0, 500.0]));
        assert_eq!(keys[1].values, Values::These(vec![1.5, 2.0]));
        for (text, part) in [
            ("", "without a key"),
            ("growth_interval", "without a key"),
            ("growth_interval=", "\"\""),
            ("growth_interval=5..2", "5..2"),
            ("growth_interval=1..,2", "after an open range"),
            ("hysteresis=1,hysteresis=2", "twice"),
            ("init_scale=2^0..3", "2^0..3"),
            ("hysteresis=one", "one"),
            ("hysteresis=1..99999999999", "range"),
            ("=3", "=3"),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
