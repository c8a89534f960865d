//! What a longer run would cost, from resampled blocks of the recorded one.
//!
//! The stationary bootstrap (Politis & Romano 1994) strings blocks of the run together until the horizon is reached, and
//! policies are replayed over that. Gradients that keep changing beyond the record are not in it: this is an extrapolation.

use super::policy::{Defaults, PolicyError, PolicySpec};
use super::run::{Run, RunOptions};
use super::simulate::Timeline;
use super::statistics::{Random, block_length, blocks, quantile};
use super::underflow::Measure;
use crate::tally::Trace;
use rayon::prelude::*;

/// The longest horizon.
pub const MOST_STEPS: u64 = 1_000_000_000;
/// Steps that all resamplings may have together.
const STEPS_BUDGET: u64 = 100_000_000;
/// The most resamplings, and the fewest.
const RESAMPLINGS: std::ops::RangeInclusive<u64> = 9..=199;

/// What one interval costs over the horizon.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AtHorizon {
    /// The interval.
    pub growth_interval: u64,
    /// J: the mean over the resamplings, and its 2.5 % and 97.5 % quantiles.
    pub lost_update: (f64, f64, f64),
    /// Skipped steps, likewise.
    pub skipped: (f64, f64, f64),
}

/// An extrapolation.
#[derive(Debug, Clone, PartialEq)]
pub struct Horizon {
    /// Steps.
    pub steps: u64,
    /// Resampled runs.
    pub resamplings: u64,
    /// Mean length of a block.
    pub block_length: f64,
    /// The intervals, as asked.
    pub intervals: Vec<AtHorizon>,
}

/// Replays `intervals` over resampled runs of `steps` steps; `None` where the record leaves steps undecided, or there is
/// no step to resample.
///
/// # Errors
/// When the policy has no growth interval.
pub fn horizon(
    run: &Run,
    spec: &PolicySpec,
    intervals: &[u64],
    measure: Measure,
    steps: u64,
    seed: u64,
) -> Result<Option<Horizon>, PolicyError> {
    if run.is_empty() || run.censored() || steps == 0 || steps > MOST_STEPS {
        return Ok(None);
    }
    let levels: Vec<f64> = run
        .limits
        .iter()
        .map(|limits| f64::from(limits.overflow_from).clamp(1e-30, 1e30).log2())
        .collect();
    let block_length = block_length(&levels).max(1.0);
    let resamplings = (STEPS_BUDGET / steps).clamp(*RESAMPLINGS.start(), *RESAMPLINGS.end());
    let policies = intervals
        .iter()
        .map(|&n| {
            spec.with("growth_interval", n as i64)?
                .build(Defaults::Framework)
        })
        .collect::<Result<Vec<_>, _>>()?;
    let drawn: Vec<Vec<Price>> = (0..resamplings)
        .into_par_iter()
        .map(|draw| {
            let seed = seed.wrapping_mul(0x9E37_79B9).wrapping_add(draw + 1);
            let resampled = Resampled::new(run, steps as usize, block_length, seed);
            let timeline = Timeline::new(&resampled.run);
            policies
                .iter()
                .map(|policy| resampled.price(run, &timeline, policy.as_ref(), measure))
                .collect()
        })
        .collect();
    let summary = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        (mean, quantile(&values, 0.025), quantile(&values, 0.975))
    };
    Ok(Some(Horizon {
        steps,
        resamplings,
        block_length,
        intervals: intervals
            .iter()
            .enumerate()
            .map(|(at, &growth_interval)| AtHorizon {
                growth_interval,
                lost_update: summary(drawn.iter().map(|draw| draw[at].0).collect()),
                skipped: summary(drawn.iter().map(|draw| draw[at].1).collect()),
            })
            .collect(),
    }))
}

/// J and the skipped steps of one policy over one resampled run.
type Price = (f64, f64);

/// A run strung together from blocks of another.
struct Resampled {
    /// Limits alone; what is flushed is looked up in the source.
    run: Run,
    /// Where each block begins, here and in the source; ascending. None wraps around the source's end.
    blocks: Vec<(usize, usize)>,
}

impl Resampled {
    fn new(source: &Run, steps: usize, block_length: f64, seed: u64) -> Resampled {
        let n = source.limits.len();
        let mut random = Random::new(seed);
        let mut limits = Vec::with_capacity(steps);
        let mut starts = Vec::new();
        // Blocks are drawn a source's length at a time, so that a wrapped block is cut in two.
        while limits.len() < steps {
            blocks(
                n,
                block_length,
                &mut random,
                &mut |mut start, mut length| {
                    while length > 0 && limits.len() < steps {
                        let piece = length.min(n - start).min(steps - limits.len());
                        starts.push((limits.len(), start));
                        limits.extend_from_slice(&source.limits[start..start + piece]);
                        length -= piece;
                        start = 0;
                    }
                },
            );
        }
        Resampled {
            run: Run {
                amax: vec![None; limits.len()],
                recorded_scale: vec![None; limits.len()],
                recorded: limits.len() as u64,
                limits,
                ..Run::new(&Trace::default(), RunOptions::default())
            },
            blocks: starts,
        }
    }

    /// J and the skipped steps of one policy.
    fn price(
        &self,
        source: &Run,
        timeline: &Timeline<'_>,
        policy: &dyn super::policy::Policy,
        measure: Measure,
    ) -> Price {
        let (mut skipped, mut lost, mut flushed, mut done) = (0, 0, 0.0, 0);
        timeline.replay(policy.clone_box().as_mut(), &mut |segment| {
            done = segment.to;
            let length = segment.to - segment.from;
            if segment.skipped {
                skipped += length;
            }
            if segment.is_lost() {
                lost += length;
            } else if let Some(underflow) = &source.underflow {
                let mut at = self
                    .blocks
                    .partition_point(|(begin, _)| *begin <= segment.from)
                    - 1;
                let mut from = segment.from;
                while from < segment.to {
                    let (begin, start) = self.blocks[at];
                    let end = self
                        .blocks
                        .get(at + 1)
                        .map_or(usize::MAX, |(next, _)| *next);
                    let to = end.min(segment.to);
                    let sum =
                        underflow.sum(start + from - begin, start + to - begin, segment.scale);
                    flushed += measure.of(sum).max(0.0);
                    from = to;
                    at += 1;
                }
            }
        });
        let steps = self.run.limits.len();
        // Steps after a terminal error are lost too.
        lost += steps - done;
        ((lost as f64 + flushed) / steps as f64, skipped as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scaling::simulate::cost;
    use crate::tally::series;

    fn steady() -> Run {
        // A ceiling at 2^16: amax 0.75, so 65520/0.75 lies between 2^16 and 2^17.
        let mut csv = String::from("step,amax\n");
        for step in 0..4000 {
            csv.push_str(&format!("{step},{}\n", 0.75 + 0.0001 * f64::from(step % 7)));
        }
        let trace = series::parse(csv.as_bytes(), std::path::Path::new("steady.csv"))
            .expect("a series")
            .remove(0);
        Run::new(&trace, RunOptions::default())
    }

    #[test]
    fn a_steady_run_costs_over_ten_times_its_length_what_it_costs_now() {
        let run = steady();
        let spec = PolicySpec::named("pytorch").expect("a policy");
        let far = horizon(&run, &spec, &[50, 500], Measure::Elements, 40_000, 0)
            .expect("valid")
            .expect("decided");
        for at in &far.intervals {
            let policy = spec
                .with("growth_interval", at.growth_interval as i64)
                .and_then(|spec| spec.build(Defaults::Framework))
                .expect("valid");
            let now = cost(&Timeline::new(&run), policy.as_ref());
            // The run's end cuts its last stretch short: a skip more or less.
            let skipped = at.skipped.0 / 10.0;
            assert!(
                (skipped - now.skipped as f64).abs() <= 1.0,
                "{at:?} {now:?}"
            );
        }
        let again = horizon(&run, &spec, &[50, 500], Measure::Elements, 40_000, 0).expect("valid");
        assert_eq!(again, Some(far));
    }
}
