//! Phases of a run: stretches within which the gradients' size drifts evenly, and what each interval costs in them.
//!
//! ```text
//!   log2 amax   ‾‾\__                     warm-up: falls fast
//!                    ‾‾‾‾----____         then slowly
//!                                ‾‾‾‾‾    then not at all
//! ```
//!
//! Medians over short stretches are fitted by lines; where a new one begins is found by dynamic programming over all
//! partitions (Bellman 1961, as Bai & Perron 2003 use it for structural breaks), the number of lines by the Bayesian
//! information criterion.

use super::policy::{Defaults, PolicyError, PolicySpec};
use super::run::Run;
use super::simulate::Timeline;
use super::sweep::octaves;
use super::underflow::Measure;
use rayon::prelude::*;

/// Medians that the run is summed up in.
const UNITS: usize = 300;
/// Steps that a median needs.
const LEAST_UNIT: usize = 10;
/// The most phases.
const MOST_PHASES: usize = 5;
/// A phase holds at least this share of the run.
const LEAST_SHARE: f64 = 0.08;
/// Lines whose drifts differ by less than this, in binades over the shorter one, and that meet, are one phase.
const SAME_DRIFT: f64 = 1.0;

/// One phase.
#[derive(Debug, Clone, PartialEq)]
pub struct Phase {
    /// First step, by its number in the record.
    pub from: u64,
    /// Last step.
    pub to: u64,
    /// How fast amax drifts: binades per 1000 steps.
    pub drift: f64,
    /// The interval that loses least within it, the smallest of equals.
    pub best: u64,
    /// J of that interval within the phase, and of the default.
    pub lost_update: (f64, f64),
    /// The intervals of the grid that are as good within it.
    pub as_good: Vec<u64>,
}

/// Cuts a run into phases and prices intervals in each; empty where the run has only one, or cannot be told.
///
/// J is that of the whole run's replay, its steps added up phase by phase; the start-up's skips are left out.
///
/// # Errors
/// When the policy has no growth interval.
pub fn phases(
    run: &Run,
    timeline: &Timeline<'_>,
    spec: &PolicySpec,
    measure: Measure,
    tolerance: f64,
) -> Result<Vec<Phase>, PolicyError> {
    if run.censored() {
        return Ok(Vec::new());
    }
    let cuts = cuts(run);
    if cuts.len() < 3 {
        return Ok(Vec::new());
    }
    let steps = run.limits.len();
    let default = spec.growth_interval(Defaults::Framework).unwrap_or(2000);
    let mut grid: Vec<u64> = octaves(2, (steps as u64).max(default))
        .chain([default])
        .collect();
    grid.sort_unstable();
    grid.dedup();
    let lost: Vec<Vec<f64>> = grid
        .par_iter()
        .map(|&n| lost_by_phase(run, timeline, spec, n, measure, &cuts))
        .collect::<Result<_, PolicyError>>()?;
    let default_at = grid.iter().position(|&n| n == default).unwrap_or(0);
    Ok(cuts
        .windows(2)
        .enumerate()
        .map(|(phase, ends)| {
            let of = |n: usize| lost[n][phase] / (ends[1] - ends[0]) as f64;
            let least = (0..grid.len()).map(of).fold(f64::INFINITY, f64::min);
            let best = (0..grid.len()).find(|&n| of(n) == least).unwrap_or(0);
            Phase {
                from: run.first_step + ends[0] as u64,
                to: run.first_step + ends[1] as u64 - 1,
                drift: 1000.0 * slope(run, ends[0], ends[1]),
                best: grid[best],
                lost_update: (least, of(default_at)),
                as_good: (0..grid.len())
                    .filter(|&n| of(n) <= least + tolerance)
                    .map(|n| grid[n])
                    .collect(),
            }
        })
        .collect())
}

/// The intervals as good in every phase.
pub fn in_common(phases: &[Phase]) -> Vec<u64> {
    let Some((first, rest)) = phases.split_first() else {
        return Vec::new();
    };
    first
        .as_good
        .iter()
        .copied()
        .filter(|n| rest.iter().all(|phase| phase.as_good.contains(n)))
        .collect()
}

fn lost_by_phase(
    run: &Run,
    timeline: &Timeline<'_>,
    spec: &PolicySpec,
    interval: u64,
    measure: Measure,
    cuts: &[usize],
) -> Result<Vec<f64>, PolicyError> {
    let policy = spec
        .with("growth_interval", interval as i64)?
        .build(Defaults::Framework)?;
    let mut lost = vec![0.0; cuts.len() - 1];
    let mut started = false;
    timeline.replay(policy.clone_box().as_mut(), &mut |segment| {
        started |= !segment.skipped;
        let mut phase = cuts.partition_point(|&cut| cut <= segment.from) - 1;
        let mut from = segment.from;
        while from < segment.to {
            let to = cuts[phase + 1].min(segment.to);
            if segment.is_lost() {
                if started {
                    lost[phase] += (to - from) as f64;
                }
            } else if let Some(underflow) = &run.underflow {
                lost[phase] += measure.of(underflow.sum(from, to, segment.scale)).max(0.0);
            }
            from = to;
            phase += 1;
        }
    });
    Ok(lost)
}

fn log2_amax(run: &Run, step: usize) -> Option<f64> {
    run.amax[step]
        .filter(|amax| *amax > 0.0)
        .map(|amax| f64::from(amax).log2())
}

/// Medians of log2 amax over stretches of equal length: the stretch's middle and the median.
fn medians(run: &Run) -> Vec<(f64, f64)> {
    let steps = run.limits.len();
    let unit = steps.div_ceil(UNITS).max(LEAST_UNIT);
    (0..steps)
        .step_by(unit)
        .filter_map(|from| {
            let to = (from + unit).min(steps);
            let mut seen: Vec<f64> = (from..to).filter_map(|step| log2_amax(run, step)).collect();
            if seen.is_empty() {
                return None;
            }
            seen.sort_by(f64::total_cmp);
            Some(((from + to) as f64 / 2.0, seen[seen.len() / 2]))
        })
        .collect()
}

/// Sums that give the squared error of the best line through any stretch at once.
struct Sums(Vec<[f64; 5]>);

impl Sums {
    fn new(points: &[(f64, f64)]) -> Sums {
        let mut sums = vec![[0.0; 5]];
        let (x0, y0) = points.first().copied().unwrap_or((0.0, 0.0));
        let span = points.last().map_or(1.0, |(x, _)| (x - x0).max(1.0));
        for (x, y) in points {
            let (x, y) = ((x - x0) / span, y - y0);
            let last = sums[sums.len() - 1];
            let next = [x, y, x * x, x * y, y * y];
            sums.push(std::array::from_fn(|i| last[i] + next[i]));
        }
        Sums(sums)
    }

    fn error(&self, from: usize, to: usize) -> f64 {
        let n = (to - from) as f64;
        let [x, y, xx, xy, yy] = std::array::from_fn(|i| self.0[to][i] - self.0[from][i]);
        let (sxx, sxy, syy) = (xx - x * x / n, xy - x * y / n, yy - y * y / n);
        let explained = if sxx > 1e-12 { sxy * sxy / sxx } else { 0.0 };
        (syy - explained).max(0.0)
    }
}

/// Where phases begin, as steps from the run's first, with 0 and the length.
fn cuts(run: &Run) -> Vec<usize> {
    let steps = run.limits.len();
    let points = medians(run);
    let n = points.len();
    let least = ((LEAST_SHARE * n as f64).ceil() as usize).max(5);
    if n < 2 * least {
        return vec![0, steps];
    }
    let sums = Sums::new(&points);
    // best[k][to]: the least error of k + 1 lines over the first `to` medians, and where the last begins.
    let mut best: Vec<Vec<(f64, usize)>> = vec![
        (0..=n)
            .map(|to| match to >= least {
                true => (sums.error(0, to), 0),
                false => (f64::INFINITY, 0),
            })
            .collect(),
    ];
    while best.len() < MOST_PHASES {
        let fewer = &best[best.len() - 1];
        let row = (0..=n)
            .map(|to| {
                (least..=to.saturating_sub(least))
                    .map(|cut| (fewer[cut].0 + sums.error(cut, to), cut))
                    .fold((f64::INFINITY, 0), |a, b| if b.0 < a.0 { b } else { a })
            })
            .collect();
        best.push(row);
    }
    // Errors below the medians' own grain are no news.
    let grain = 1e-4 * n as f64;
    let criterion = |k: usize| {
        let parameters = 3.0 * (k as f64 + 1.0);
        let size = n as f64;
        size * ((best[k][n].0 + grain) / size).ln() + 2.0 * parameters * size.ln()
    };
    let mut chosen = 0;
    for (k, lines) in best.iter().enumerate() {
        if lines[n].0.is_finite() && criterion(k) < criterion(chosen) {
            chosen = k;
        }
    }
    let mut places = vec![n];
    let mut to = n;
    for k in (0..=chosen).rev() {
        to = best[k][to].1;
        places.push(to);
    }
    places.reverse();
    let mut cuts: Vec<usize> = places
        .iter()
        .map(|&place| match place {
            0 => 0,
            place if place == n => steps,
            place => ((points[place - 1].0 + points[place].0) / 2.0) as usize,
        })
        .collect();
    // A bend too slight to matter, without a jump, is none.
    let mut at = 1;
    while at + 1 < cuts.len() {
        let (a, b, c) = (cuts[at - 1], cuts[at], cuts[at + 1]);
        let shorter = (b - a).min(c - b) as f64;
        let (before, after) = (slope(run, a, b), slope(run, b, c));
        let jump = level(run, b, c)
            - level(run, a, b)
            - before * (b - a) as f64 / 2.0
            - after * (c - b) as f64 / 2.0;
        if ((after - before) * shorter).abs() < SAME_DRIFT && jump.abs() < SAME_DRIFT {
            cuts.remove(at);
        } else {
            at += 1;
        }
    }
    cuts
}

/// Mean log2 amax over a stretch.
fn level(run: &Run, from: usize, to: usize) -> f64 {
    let (sum, n) = (from..to)
        .filter_map(|step| log2_amax(run, step))
        .fold((0.0, 0.0), |(sum, n), y| (sum + y, n + 1.0));
    if n > 0.0 { sum / n } else { 0.0 }
}

/// Binades per step over a stretch, by least squares.
fn slope(run: &Run, from: usize, to: usize) -> f64 {
    let middle = (from + to) as f64 / 2.0;
    let mean = level(run, from, to);
    let (mut xx, mut xy) = (0.0, 0.0);
    for step in from..to {
        if let Some(y) = log2_amax(run, step) {
            let x = step as f64 - middle;
            xx += x * x;
            xy += x * (y - mean);
        }
    }
    if xx > 0.0 { xy / xx } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scaling::RunOptions;
    use crate::tally::series;

    fn run(amax: impl Fn(usize) -> f64, steps: usize) -> Run {
        let mut csv = String::from("step,amax\n");
        let mut seed = 9u64;
        for step in 0..steps {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let noise = (seed >> 40) as f64 / f64::from(1 << 24) - 0.5;
            csv.push_str(&format!("{step},{}\n", (amax(step) + noise).exp2()));
        }
        let trace = series::parse(csv.as_bytes(), std::path::Path::new("run.csv"))
            .expect("a series")
            .remove(0);
        Run::new(&trace, RunOptions::default())
    }

    #[test]
    fn a_run_that_bends_is_cut_where_it_bends() {
        // Falls by 10 binades in 2000 steps, then stays.
        let bent = run(|step| -(step.min(2000) as f64) / 200.0, 8000);
        let cuts = cuts(&bent);
        assert_eq!(cuts.len(), 3, "{cuts:?}");
        assert!(cuts[1].abs_diff(2000) < 200, "{cuts:?}");
    }

    #[test]
    fn an_even_run_is_one_phase() {
        for drift in [0.0, -0.002, 0.001] {
            let even = run(|step| drift * step as f64, 8000);
            assert_eq!(cuts(&even), [0, 8000], "drift {drift}");
        }
    }

    #[test]
    fn a_falling_phase_wants_a_shorter_interval_than_a_flat_one() {
        // A binade every 40 steps leaves the scale behind; afterwards nothing moves.
        let bent = run(|step| -(step.min(1600) as f64) / 40.0, 8000);
        let timeline = Timeline::new(&bent);
        let spec = PolicySpec::named("pytorch").expect("a policy");
        let phases = phases(&bent, &timeline, &spec, Measure::Elements, 0.0005).expect("phases");
        assert_eq!(phases.len(), 2, "{phases:?}");
        assert!(phases[0].drift < -15.0 && phases[1].drift.abs() < 1.0);
        assert!(phases[0].best <= phases[1].best);
    }
}
