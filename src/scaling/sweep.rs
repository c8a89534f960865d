//! Every growth interval replayed over one run, and the rule that picks one.

use super::policy::{Defaults, PolicyError, PolicySpec};
use super::simulate::{Cost, Timeline, cost, cost_with_bounds};
use super::{Measure, Run};
use crate::float::exp2;
use rayon::prelude::*;

/// What one growth interval costs.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The interval.
    pub growth_interval: u64,
    /// Its replay.
    pub cost: Cost,
    /// Least and most skips where the record leaves steps undecided; equal otherwise.
    pub skipped_bounds: (u64, u64),
    /// The 95 % interval of J, where it was computed.
    pub confidence: Option<(f64, f64)>,
}

/// How intervals are judged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// As good as the least J, up to a tolerance.
    LostUpdate {
        /// How J weighs what is flushed.
        measure: Measure,
        /// Of an update: 0.0005 is one in 2000.
        tolerance: f64,
    },
    /// Skips (not those of the start-up, nor those of any scale) within a share of the steps: what amax alone can carry.
    SkipBudget {
        /// Of the steps.
        budget: f64,
    },
}

/// The intervals of one policy, judged.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// All intervals that were replayed, ascending. The last stands for every larger one where it never grows.
    pub candidates: Vec<Candidate>,
    /// Whether each is as good as the best.
    pub good: Vec<bool>,
    /// Index of the one that costs least, the smallest of equals.
    pub best: usize,
    /// Index of the recommended one.
    pub recommended: usize,
    /// Index of the policy's default.
    pub default: usize,
    /// The default itself; the candidate that stands for it may be smaller.
    pub default_interval: u64,
    /// The stretch of as-good intervals around the recommended one.
    pub low: u64,
    /// Its upper end; `None` where no upper limit was seen.
    pub high: Option<u64>,
    /// Whether the default is as good.
    pub default_is_fine: bool,
    /// Whether any interval keeps the budget; the least skips were taken where none does.
    pub any_fits: bool,
}

impl Choice {
    /// The recommended candidate.
    pub fn recommended(&self) -> &Candidate {
        &self.candidates[self.recommended]
    }

    /// The default's candidate.
    pub fn default(&self) -> &Candidate {
        &self.candidates[self.default]
    }

    /// The candidate that stands for an interval.
    pub fn at(&self, growth_interval: u64) -> &Candidate {
        let place = self
            .candidates
            .partition_point(|c| c.growth_interval <= growth_interval);
        &self.candidates[place.saturating_sub(1)]
    }
}

/// Which intervals a sweep replays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Density {
    /// Every one.
    Every,
    /// Every one up to 64, then one in about 50 a factor of e: within 2 % of any.
    Fine,
}

/// Intervals at equal parts of an octave from 1 up to `longest`, rounded; the first may repeat.
pub fn octaves(parts: u32, longest: u64) -> impl Iterator<Item = u64> {
    (0..)
        .map(move |i| 2f64.powf(f64::from(i) / f64::from(parts)).round() as u64)
        .take_while(move |&n| n <= longest)
}

/// Intervals in equal ratios, with the common ones and the ends.
fn grid(ratio: f64, longest: u64, default: u64) -> Vec<u64> {
    let mut grid: Vec<u64> = (0..)
        .map(|i| ratio.powi(i).round() as u64)
        .take_while(|&n| n < longest)
        .collect();
    grid.extend([100, 500, 1000, 2000, default, longest]);
    grid.retain(|&n| (1..=longest).contains(&n));
    grid.sort_unstable();
    grid.dedup();
    grid
}

/// Replays `spec` with the growth intervals from 1 to max(T, default) and picks one by `rule`.
///
/// A replay that never grows is the replay of every larger interval, so the sweep ends there.
///
/// # Errors
/// When the policy has no growth interval.
pub fn choose(
    timeline: &Timeline<'_>,
    spec: &PolicySpec,
    rule: Rule,
    density: Density,
) -> Result<Choice, PolicyError> {
    let run = timeline.run();
    let default = spec.growth_interval(Defaults::Framework).unwrap_or(2000);
    let longest = run.len().max(default).max(1);
    let replay = |n: u64| -> Result<Candidate, PolicyError> {
        let policy = spec
            .with("growth_interval", n as i64)?
            .build(Defaults::Framework)?;
        let (cost, bounds) = cost_with_bounds(timeline, policy.as_ref());
        Ok(Candidate {
            growth_interval: n,
            cost,
            skipped_bounds: (bounds.low, bounds.high),
            confidence: None,
        })
    };
    let mut candidates: Vec<Candidate> = Vec::new();
    if run.censored() {
        // A censored run is replayed with bounds, which is dear.
        candidates = grid(1.26, longest, default)
            .into_par_iter()
            .map(replay)
            .collect::<Result<_, _>>()?;
    } else {
        let intervals = match density {
            Density::Every => (1..=longest).collect(),
            Density::Fine => grid(1.02, longest, default),
        };
        // In batches, so that the sweep can end early; the batch's size does not reach the result.
        for batch in intervals.chunks(512) {
            let replayed: Vec<Candidate> = batch
                .par_iter()
                .map(|&n| replay(n))
                .collect::<Result<_, _>>()?;
            let end = replayed.iter().position(|c| c.cost.growths == 0);
            candidates.extend(
                replayed
                    .into_iter()
                    .take(end.map_or(usize::MAX, |end| end + 1)),
            );
            if end.is_some() {
                break;
            }
        }
    }
    let default_at = candidates
        .partition_point(|c| c.growth_interval <= default)
        .saturating_sub(1);
    let steps = run.len().max(1) as f64;
    let late_skips = |c: &Candidate| {
        // Judged at the worse end of the bounds.
        let extra = c.skipped_bounds.1.saturating_sub(c.cost.skipped);
        (c.cost.skipped_by_interval() + extra) as f64 / steps
    };
    let badness: Vec<f64> = match rule {
        Rule::LostUpdate { measure, .. } => candidates.iter().map(|c| c.cost.j(measure)).collect(),
        Rule::SkipBudget { .. } => candidates.iter().map(late_skips).collect(),
    };
    let least = badness.iter().copied().fold(f64::INFINITY, f64::min);
    let limit = match rule {
        Rule::LostUpdate { tolerance, .. } => least + tolerance,
        Rule::SkipBudget { budget } => budget,
    };
    let any_fits = least <= limit;
    let limit = limit.max(least);
    let good: Vec<bool> = badness.iter().map(|&b| b <= limit).collect();
    let best = badness
        .iter()
        .position(|&b| b == least)
        .unwrap_or(default_at);
    let mut choice = Choice {
        candidates,
        good,
        best,
        default: default_at,
        default_interval: default,
        recommended: default_at,
        low: 1,
        high: None,
        default_is_fine: false,
        any_fits,
    };
    choice.settle();
    Ok(choice)
}

impl Choice {
    /// Picks the as-good candidate nearest to the default, and the as-good stretch around it.
    pub(super) fn settle(&mut self) {
        let good = &self.good;
        let distance = |&i: &usize| {
            (self.candidates[i].growth_interval as f64 / self.default_interval as f64)
                .log2()
                .abs()
        };
        self.recommended = if good[self.default] {
            self.default
        } else {
            (0..good.len())
                .filter(|&i| good[i])
                .min_by(|a, b| distance(a).total_cmp(&distance(b)))
                .unwrap_or(self.default)
        };
        let at = self.recommended;
        let first = (0..=at).rev().take_while(|&i| good[i]).last().unwrap_or(at);
        let last = (at..good.len())
            .take_while(|&i| good[i])
            .last()
            .unwrap_or(at);
        self.low = self.candidates[first].growth_interval;
        self.high = (last + 1 < good.len()).then(|| self.candidates[last].growth_interval);
        self.default_is_fine = good[self.default] && self.any_fits;
    }
}

/// More late skips than this share of the steps, and a static scale is out of the question.
const HOPELESS: f64 = 0.05;

/// The cost of the static power-of-two scales from 2^-24 on, ascending, up to the first that skips hopelessly often: a
/// larger one skips every step that a smaller one does.
pub fn static_scales(timeline: &Timeline<'_>) -> Result<Vec<(f64, Cost)>, PolicyError> {
    let spec = PolicySpec::named("static")?;
    let mut scales = Vec::new();
    for exponent in -24..=60 {
        let scale = exp2(exponent);
        let policy = spec.with("scale", scale)?.build(Defaults::Framework)?;
        let cost = cost(timeline, policy.as_ref());
        let late = cost.skipped.saturating_sub(cost.skipped_anyway);
        let hopeless = crate::tally::fraction(late, cost.steps) > HOPELESS;
        scales.push((scale, cost));
        if hopeless {
            break;
        }
    }
    Ok(scales)
}

/// log2 of how far the run's amax lies below the first overflow at `scale`: its least headroom over the steps that do
/// not overflow at any scale.
pub fn headroom_log2(run: &Run, scale: f64) -> Option<f64> {
    run.limits
        .iter()
        .filter(|limits| !limits.is_always() && limits.overflow_from.is_finite())
        .map(|limits| (f64::from(limits.overflow_from) / scale).log2())
        .reduce(f64::min)
}
