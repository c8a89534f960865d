//! The history as a run: steps with a scale and an overflow flag, for replaying policies over it.
//!
//! ```text
//!   log      overflow 2^16 ... (growth implied somewhere) ... overflow 2^16
//!   steps    x . . . . . . . . . . . . . . . . . . . . . . . x        x overflow, . clean
//!   scale    2^16 2^15 2^15 2^15 2^15 ... 2^15 2^15 2^15 2^15 2^16   a growth is put as late as it can have been
//! ```
//!
//! A clean step at scale s says that no gradient reached 65520/s, an overflow that one did. That is all a log tells, so
//! every other policy's skips are bounds.

use super::Diagnosis;
use super::shape::{Filled, FilledKind};
use crate::scaling::policy::{Defaults, Observed, Policy, PolicySpec};
use crate::scaling::{Run, RunOptions, Timeline, Verdict, simulate};
use crate::tally::{Step, Trace};
use serde::Serialize;

/// The most steps that are replayed.
const MOST_STEPS: u64 = 1_000_000;

/// One overflow of the log, as a replay needs it.
#[derive(Debug, Clone, Copy)]
struct Met {
    low: u64,
    high: u64,
    before: Option<f64>,
    after: Option<f64>,
}

/// A policy that the log's events fit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Fit {
    /// The policy, with its settings.
    pub policy: String,
    /// Events whose scales it gives.
    pub agreed: u64,
    /// Events compared.
    pub events: u64,
    /// Whether the log shows growth, so that its interval is more than a default.
    pub interval_seen: bool,
}

/// What another policy would have skipped in the same run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WhatIf {
    /// The policy, with its settings.
    pub policy: String,
    /// The least.
    pub skipped_low: u64,
    /// The most.
    pub skipped_high: u64,
}

/// The events that have lines or exact prints of their own.
fn met(diagnosis: &Diagnosis) -> Option<Vec<Met>> {
    if diagnosis.log2 || diagnosis.shape.runs > 1 || !diagnosis.shape.unrestored.is_empty() {
        return None;
    }
    let mut met: Vec<Met> = Vec::new();
    for event in &diagnosis.events {
        match event.kind {
            FilledKind::Overflow | FilledKind::Kept => {}
            FilledKind::StillUpdated => return None,
            FilledKind::Growth | FilledKind::Restart | FilledKind::Stopped => continue,
        }
        let (low, high) = event.steps.or(event.step.map(|step| (step, step)))?;
        if event.count != 1 {
            // Several between two lines: as many steps, their scales halving from the one to the other.
            met.extend(several(event, low, high)?);
            continue;
        }
        met.push(Met {
            low,
            high,
            before: event.before,
            after: event.after,
        });
    }
    (!met.is_empty()).then_some(met)
}

/// Overflows counted within a window, one a step from its first.
fn several(event: &Filled, low: u64, high: u64) -> Option<Vec<Met>> {
    let after = event.after?;
    let count = event.count.min(1000);
    (high + 1 >= low + count).then(|| {
        (0..count)
            .map(|n| Met {
                low: low + n,
                high: high + 1 + n - count,
                before: None,
                after: (n + 1 == count).then_some(after),
            })
            .collect()
    })
}

fn same(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-6 * a.abs().max(b.abs())
}

/// Replays a policy over the events, each at a step where it fits if there is one; how many fit, and their steps.
fn follow(spec: &PolicySpec, first: f64, met: &[Met]) -> Option<(u64, u64, Vec<u64>)> {
    let fresh = |scale: f64| -> Option<Box<dyn Policy>> {
        spec.with("init_scale", scale)
            .ok()?
            .build(Defaults::Framework)
            .ok()
    };
    let mut policy = fresh(first)?;
    let (mut at, mut agreed, mut compared) = (0, 0, 0);
    let mut steps = Vec::with_capacity(met.len());
    for event in met {
        let low = event.low.max(at + 1);
        let high = event.high.max(low);
        // The first event only says where the scale stands when the log begins.
        let seed = steps.is_empty();
        if !seed {
            pass(policy.as_mut(), low - 1 - at);
        }
        at = low - 1;
        if let Some(before) = event.before.filter(|_| !seed) {
            while at < high - 1 && !same(policy.loss_scale(), before) {
                let jump = (policy.quiet_steps() + 1).min(high - 1 - at);
                pass(policy.as_mut(), jump);
                at += jump;
            }
        }
        let mut fits = event
            .before
            .is_none_or(|before| same(policy.loss_scale(), before));
        if !fits && let Some(before) = event.before {
            policy = fresh(before)?;
        }
        at += 1;
        steps.push(at);
        let ended = policy.update(Observed::OVERFLOW).is_err();
        if let Some(after) = event.after
            && (ended || !same(policy.loss_scale(), after))
        {
            fits = false;
            policy = fresh(after)?;
        }
        if !seed && (event.before.is_some() || event.after.is_some()) {
            compared += 1;
            agreed += u64::from(fits);
        }
    }
    Some((agreed, compared, steps))
}

/// Clean steps.
fn pass(policy: &mut dyn Policy, mut steps: u64) {
    while steps > 0 {
        let quiet = policy.quiet_steps().min(steps);
        if quiet > 0 {
            policy.pass_quietly(quiet);
            steps -= quiet;
        } else {
            if policy.update(Observed::CLEAN).is_err() {
                return;
            }
            steps -= 1;
        }
    }
}

/// The policy, of the framework's, that explains most of the events.
pub fn fit(diagnosis: &Diagnosis, policy: &str) -> Option<Fit> {
    let met = met(diagnosis)?;
    if met.len() < 3 || met.last()?.high > 100 * MOST_STEPS {
        return None;
    }
    let first = met
        .iter()
        .find_map(|event| event.before.or(event.after.map(|a| 2.0 * a)))?;
    let named = PolicySpec::named(policy).ok()?;
    let default = named.growth_interval(Defaults::Framework);
    let name = named
        .info()
        .key("growth_interval")
        .map_or("growth_interval", |key| key.name);
    let seen = diagnosis.shape.rises.iter().any(|rise| rise.octaves > 0.5);
    let mut intervals: Vec<Option<u64>> = Vec::new();
    if let Some(interval) = diagnosis.growth_interval {
        intervals.push(Some(interval.steps));
    }
    intervals.push(default);
    if seen {
        for n in [
            1, 10, 20, 50, 64, 100, 128, 200, 250, 256, 400, 500, 512, 1000, 1024, 2000, 2048,
            4096, 5000, 10_000,
        ] {
            intervals.push(Some(n));
        }
    }
    let kept = diagnosis.events.iter().any(|e| e.kind == FilledKind::Kept);
    let mut best: Option<(u64, u64, PolicySpec)> = None;
    for interval in intervals {
        let mut spec = named.clone();
        if let Some(n) = interval.filter(|n| Some(*n) != default)
            && let Ok(with) = spec.with(name, n)
        {
            spec = with;
        }
        let mut variants = vec![spec.clone()];
        if spec.has("hysteresis") {
            for hysteresis in if kept { [2_u64, 3] } else { [1, 2] } {
                variants.extend(spec.with("hysteresis", hysteresis));
            }
        }
        for variant in variants {
            if let Some((agreed, compared, _)) = follow(&variant, first, &met)
                && compared >= 2
                && best.as_ref().is_none_or(|(most, ..)| agreed > *most)
            {
                best = Some((agreed, compared, variant));
            }
        }
    }
    let (agreed, events, spec) = best?;
    // An interval that the log shows is said even where it is the default.
    let key = spec.info().key("growth_interval").map(|key| key.name);
    let spec = match (key, spec.growth_interval(Defaults::Framework)) {
        (Some(key), Some(n)) if seen => spec.with(key, n).unwrap_or(spec),
        _ => spec,
    };
    (2 * agreed >= events).then(|| Fit {
        policy: spec.canonical(),
        agreed,
        events,
        interval_seen: seen,
    })
}

/// The history as a trace of scales and overflow flags; `None` where steps or scales cannot be told.
pub fn to_trace(diagnosis: &Diagnosis) -> Option<Trace> {
    let met = met(diagnosis)?;
    let (_, last) = diagnosis.shape.span?;
    let first = diagnosis.shape.span.map_or(0, |span| span.0);
    let end = last.max(met.last()?.low);
    if end - first > MOST_STEPS || end <= first {
        return None;
    }
    let mut scale = met
        .iter()
        .find_map(|event| event.before.or(event.after.map(|a| 2.0 * a)))?;
    let mut trace = Trace {
        run_id: diagnosis.path.clone(),
        ..Trace::default()
    };
    let mut push = |step: u64, scale: f64, overflow: bool| {
        trace.steps.push(Step {
            step: step - first - 1,
            loss_scale: Some(scale),
            found_inf: Some(overflow),
            loss: None,
        });
    };
    let mut at = first;
    for event in &met {
        let step = event.low.max(at + 1);
        // Until the event that shows a growth, steps are only known to be clean at the scale before it.
        for clean in at + 1..step {
            push(clean, scale, false);
        }
        let used = event.before.unwrap_or(scale);
        push(step, used, true);
        scale = event.after.unwrap_or(used);
        at = step;
    }
    for clean in at + 1..=end {
        push(clean, scale, false);
    }
    Some(trace)
}

/// What PyTorch's policy would have skipped in this run with other growth intervals, and what constant scales would.
pub fn what_if(diagnosis: &Diagnosis) -> Vec<WhatIf> {
    let Some(trace) = to_trace(diagnosis) else {
        return Vec::new();
    };
    let Some(first) = trace.steps.first().and_then(|step| step.loss_scale) else {
        return Vec::new();
    };
    let run = Run::new(&trace, RunOptions::default());
    let timeline = Timeline::new(&run);
    let mut all: Vec<WhatIf> = [100, 500, 1000, 2000, 10_000]
        .into_iter()
        .filter_map(|interval| {
            let spec = format!("pytorch:growth_interval={interval},init_scale={first}");
            let policy = PolicySpec::parse(&spec)
                .ok()?
                .build(Defaults::Framework)
                .ok()?;
            let skipped = simulate(&timeline, policy.as_ref()).skipped;
            skipped.tight.then_some(WhatIf {
                policy: spec,
                skipped_low: skipped.low,
                skipped_high: skipped.high,
            })
        })
        .collect();
    // The least scale that the run left behind, and one octave on either side of it.
    let least = trace
        .steps
        .iter()
        .filter_map(|step| step.loss_scale)
        .fold(f64::INFINITY, f64::min);
    for scale in [least / 2.0, least, 2.0 * least] {
        let at = |verdict: Verdict| {
            run.limits
                .iter()
                .filter(|limits| limits.at(scale as f32) == verdict)
                .count() as u64
        };
        let skipped_low = at(Verdict::Overflow);
        all.push(WhatIf {
            policy: format!("static:scale={scale}"),
            skipped_low,
            skipped_high: skipped_low + at(Verdict::Unknown),
        });
    }
    all
}
