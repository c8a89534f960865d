//! How sure a sweep is: the bootstrap, a walk-forward backtest, and a planted burst.

use super::policy::{Defaults, PolicyError, PolicySpec};
use super::run::{Limits, Run};
use super::simulate::{Segment, Timeline, cost};
use super::statistics::{
    Random, block_length, quantile, rate_at_most, resampled_means, student_quantile,
};
use super::sweep::{Choice, Density, Rule, choose, octaves};
use rayon::prelude::*;

/// Candidates that are resampled at most.
const MOST_CANDIDATES: usize = 24;
/// Resamplings.
const RESAMPLINGS: usize = 999;
/// A block is at least so many of the best interval long: climbing back after a spike takes one for each binade it cost.
const MEMORY: f64 = 1.0;
/// But so many blocks the run has at least.
const FEWEST_BLOCKS: f64 = 20.0;
/// A longer run is resampled in units of several steps, so that the work stays bounded; a block is at least one unit.
const MOST_UNITS: usize = 4096;

/// How the intervals of J were found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bootstrap {
    /// Resamplings.
    pub resamplings: usize,
    /// Mean block length, in steps.
    pub block_length: f64,
    /// Seed.
    pub seed: u64,
    /// Candidates that were resampled.
    pub candidates: usize,
    /// Steps that count as independent: the run's, over the mean block length.
    pub effective_steps: f64,
    /// Upper ends of the one-sided 95 % intervals of the rate of late skips, for the recommended and the default
    /// interval: a bare 0 would claim too much.
    pub skip_rate_at_most: (f64, f64),
}

/// What each step cost: 1 where it was skipped (or came after the run's end), else what was flushed.
fn step_costs(
    timeline: &Timeline<'_>,
    spec: &PolicySpec,
    interval: u64,
    rule: Rule,
) -> Result<Vec<f64>, PolicyError> {
    let run = timeline.run();
    let mut costs = vec![1.0; run.limits.len()];
    let mut policy = spec
        .with("growth_interval", interval as i64)?
        .build(Defaults::Framework)?;
    timeline.replay(policy.as_mut(), &mut |segment: &Segment| {
        if segment.is_lost() {
            return;
        }
        match (rule, &run.underflow) {
            (Rule::LostUpdate { measure, .. }, Some(underflow)) => {
                for (at, cost) in costs[segment.from..segment.to].iter_mut().enumerate() {
                    *cost = measure.of(underflow.at(segment.from + at, segment.scale));
                }
            }
            _ => costs[segment.from..segment.to].fill(0.0),
        }
    });
    Ok(costs)
}

/// Sums of the means of units of `unit` steps, from the start; what is left over at the end (less than a unit) is not
/// resampled.
fn prefix_sums(costs: &[f64], unit: usize) -> Vec<f64> {
    let mut prefix = Vec::with_capacity(costs.len() / unit + 1);
    let mut sum = 0.0;
    prefix.push(sum);
    for steps in costs.chunks_exact(unit) {
        sum += steps.iter().sum::<f64>() / unit as f64;
        prefix.push(sum);
    }
    prefix
}

/// The candidates worth resampling: the best, the recommended, the default, and a logarithmic grid over those near the
/// least.
fn near_the_least(choice: &Choice, rule: Rule) -> Vec<usize> {
    let all = &choice.candidates;
    let badness = |i: usize| match rule {
        Rule::LostUpdate { measure, .. } => all[i].cost.j(measure),
        Rule::SkipBudget { .. } => {
            crate::tally::fraction(all[i].cost.skipped_by_interval(), all[i].cost.steps)
        }
    };
    let slack = match rule {
        Rule::LostUpdate { tolerance, .. } => tolerance,
        Rule::SkipBudget { budget } => budget,
    };
    let limit = 1.5 * badness(choice.best) + 2.0 * slack;
    let near: Vec<usize> = (0..all.len()).filter(|&i| badness(i) <= limit).collect();
    let mut chosen = vec![choice.best, choice.recommended, choice.default];
    if let (Some(&first), Some(&last)) = (near.first(), near.last()) {
        let (low, high) = (
            all[first].growth_interval as f64,
            all[last].growth_interval as f64,
        );
        let points = MOST_CANDIDATES - 3;
        for point in 0..points {
            let n = low * (high / low).powf(point as f64 / (points - 1) as f64);
            let at = near
                .partition_point(|&i| (all[i].growth_interval as f64) < n - 0.5)
                .min(near.len() - 1);
            chosen.push(near[at]);
        }
    }
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

/// Resamples the candidates near the least with the same blocks, fills in their intervals, and counts those that cannot
/// be told from the best as good too.
///
/// # Errors
/// When the policy cannot be built.
pub(super) fn resample(
    choice: &mut Choice,
    timeline: &Timeline<'_>,
    spec: &PolicySpec,
    rule: Rule,
    seed: u64,
) -> Result<Option<Bootstrap>, PolicyError> {
    let steps = timeline.run().limits.len();
    if timeline.run().censored() || steps < super::FEWEST_STEPS as usize {
        return Ok(None);
    }
    let chosen = near_the_least(choice, rule);
    let unit = steps.div_ceil(MOST_UNITS);
    let intervals: Vec<u64> = choice
        .candidates
        .iter()
        .map(|c| c.growth_interval)
        .collect();
    let interval = |i: usize| intervals[i];
    // The longest dependence among the three that matter decides for all, because they share their blocks.
    let mut length: f64 = 1.0;
    let mut leading = vec![choice.best, choice.recommended, choice.default];
    leading.dedup();
    for &i in &leading {
        length = length.max(block_length(&step_costs(
            timeline,
            spec,
            interval(i),
            rule,
        )?));
    }
    // A spike keeps the scale down for several intervals; a block that is shorter cuts its cost in pieces.
    let memory = (MEMORY * interval(choice.best) as f64).min(steps as f64 / FEWEST_BLOCKS);
    let length = length.max(memory).max(unit as f64);
    let in_units = length / unit as f64;
    let prefixes: Vec<Vec<f64>> = chosen
        .par_iter()
        .map(|&i| {
            Ok(prefix_sums(
                &step_costs(timeline, spec, interval(i), rule)?,
                unit,
            ))
        })
        .collect::<Result<_, PolicyError>>()?;
    // One draw of blocks serves every candidate: their differences are then those of the intervals alone.
    let draws: Vec<Vec<f64>> = (0..RESAMPLINGS)
        .into_par_iter()
        .map(|b| {
            let mut random = Random::new(seed.wrapping_mul(0x9E37_79B9).wrapping_add(b as u64));
            resampled_means(&prefixes, in_units, &mut random)
        })
        .collect();
    let means: Vec<Vec<f64>> = (0..chosen.len())
        .map(|c| draws.iter().map(|draw| draw[c]).collect())
        .collect();
    let points: Vec<f64> = prefixes
        .iter()
        .map(|prefix| prefix[prefix.len() - 1] / (prefix.len() - 1).max(1) as f64)
        .collect();
    let as_good = indistinguishable(&points, &draws);
    for ((&i, means_of), &point) in chosen.iter().zip(&means).zip(&points) {
        choice.candidates[i].confidence =
            Some(interval_of_a_mean(point, means_of, steps as f64 / length));
    }
    if matches!(rule, Rule::LostUpdate { .. }) {
        for (place, &i) in chosen.iter().enumerate() {
            if as_good[place] {
                choice.good[i] = true;
                // Between two neighbours that are as good, so is what lies between.
                if place > 0 && as_good[place - 1] {
                    choice.good[chosen[place - 1]..=i].fill(true);
                }
            }
        }
        choice.settle();
    }
    let effective_steps = steps as f64 / length;
    let late = |i: usize| -> Result<f64, PolicyError> {
        // Skips depend on each other in their own way, not as the flushed shares do.
        let skips = step_costs(
            timeline,
            spec,
            interval(i),
            Rule::SkipBudget { budget: 0.0 },
        )?;
        let independent = steps as f64 / block_length(&skips);
        let events =
            choice.candidates[i].cost.skipped_by_interval() as f64 * independent / steps as f64;
        Ok(rate_at_most(events.ceil(), independent))
    };
    let skip_rate_at_most = (late(choice.recommended)?, late(choice.default)?);
    Ok(Some(Bootstrap {
        resamplings: RESAMPLINGS,
        block_length: length,
        seed,
        candidates: chosen.len(),
        effective_steps,
        skip_rate_at_most,
    }))
}

/// The 95 % interval of a mean from its resampled values, which come from so many blocks.
///
/// Costs are skewed: a run that met few spikes has a low mean and shows little spread, so percentiles miss the truth on one
/// side. The interval is therefore Student's, with the resampled standard deviation, on a logarithmic scale, where the
/// spread does not grow with the mean; and what few blocks tell is uncertain, which its degrees of freedom allow for.
fn interval_of_a_mean(mean: f64, resampled: &[f64], blocks: f64) -> (f64, f64) {
    let n = resampled.len() as f64;
    let centre = resampled.iter().sum::<f64>() / n;
    let variance = resampled.iter().map(|x| (x - centre).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
    if mean <= 0.0 || variance <= 0.0 {
        return (mean, mean);
    }
    let reach = student_quantile(0.975, (blocks - 1.0).max(1.0)) * variance.sqrt() / mean;
    (mean * (-reach).exp(), (mean * reach.exp()).min(1.0))
}

/// Which means cannot be told from the least, at 95 %.
///
/// The least of several means is low by luck as well, so each mean is held against all the others at once: it stays unless
/// it trails the least by more than the largest lead that chance alone brings about in 95 % of the resamplings (the
/// centred maximum of White 2000, each candidate in turn taking the place of the benchmark).
fn indistinguishable(means: &[f64], draws: &[Vec<f64>]) -> Vec<bool> {
    let least = means.iter().copied().fold(f64::INFINITY, f64::min);
    means
        .iter()
        .enumerate()
        .map(|(c, &mean)| {
            let mut chance: Vec<f64> = draws
                .iter()
                .map(|draw| {
                    let behind = |other: usize| (draw[c] - mean) - (draw[other] - means[other]);
                    (0..means.len()).map(behind).fold(0.0, f64::max)
                })
                .collect();
            chance.sort_by(f64::total_cmp);
            mean - least <= quantile(&chance, 0.95)
        })
        .collect()
}

/// An interval chosen on the first half of a run and scored on the second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backtest {
    /// Chosen on the first half.
    pub growth_interval: u64,
    /// Mean cost of the second half's steps: with the chosen interval, with the default, with the best in hindsight.
    pub chosen: f64,
    /// The default's.
    pub default: f64,
    /// The least over all intervals tried.
    pub best: f64,
}

/// Chooses on the first half, scores on the second: all replayed from the start, scored where the choice had not seen.
///
/// # Errors
/// When the policy cannot be built.
pub(super) fn backtest(
    run: &Run,
    spec: &PolicySpec,
    rule: Rule,
) -> Result<Option<Backtest>, PolicyError> {
    let half = run.limits.len() / 2;
    if half < super::FEWEST_STEPS as usize || run.censored() {
        return Ok(None);
    }
    let default = spec.growth_interval(Defaults::Framework).unwrap_or(2000);
    let mut first = run.clone();
    first.limits.truncate(half);
    first.amax.truncate(half);
    first.recorded_scale.truncate(half);
    let choice = choose(&Timeline::new(&first), spec, rule, Density::Fine)?;
    let chosen = if choice.recommended == choice.default {
        default
    } else {
        choice.recommended().growth_interval
    };
    let timeline = Timeline::new(run);
    let score = |interval: u64| -> Result<f64, PolicyError> {
        let costs = step_costs(&timeline, spec, interval, rule)?;
        Ok(costs[half..].iter().sum::<f64>() / (costs.len() - half) as f64)
    };
    let grid: Vec<u64> = octaves(4, run.len()).chain([chosen, default]).collect();
    let scores = grid
        .into_par_iter()
        .map(score)
        .collect::<Result<Vec<_>, _>>()?;
    let best = scores.into_iter().fold(f64::INFINITY, f64::min);
    Ok(Some(Backtest {
        growth_interval: chosen,
        chosen: score(chosen)?,
        default: score(default)?,
        best,
    }))
}

/// Overflows in a row that are planted, and how far apart.
const BURST: usize = 8;
const BURST_EVERY: usize = 10_000;

/// J with one burst of [`BURST`] overflows in a row planted in every [`BURST_EVERY`] steps, for the recommended and the
/// default interval: what a large interval costs when a run is less kind than the record.
///
/// # Errors
/// When the policy cannot be built.
pub(super) fn stress(
    run: &Run,
    spec: &PolicySpec,
    rule: Rule,
    recommended: u64,
    default: u64,
) -> Result<Option<(f64, f64)>, PolicyError> {
    let Rule::LostUpdate { measure, .. } = rule else {
        return Ok(None);
    };
    let mut burst = run.clone();
    let steps = burst.limits.len();
    let every = BURST_EVERY.min(steps);
    for start in (every / 2..steps).step_by(every.max(1)) {
        burst.limits[start..(start + BURST).min(steps)].fill(Limits::ALWAYS);
    }
    let timeline = Timeline::new(&burst);
    let j = |interval: u64| -> Result<f64, PolicyError> {
        let policy = spec
            .with("growth_interval", interval as i64)?
            .build(Defaults::Framework)?;
        Ok(cost(&timeline, policy.as_ref()).j(measure))
    };
    Ok(Some((j(recommended)?, j(default)?)))
}
