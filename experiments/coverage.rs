//! Question: does the 95 % interval of J hold what it promises, and is the true best interval among the as-good ones?
//! Command: `cargo run --release --example coverage > experiments/coverage.csv`
//!
//! Synthetic runs whose truth is known: the expected J of every interval of a grid is the mean over many independent runs
//! of the same kind, and the true best interval is where that is least. Fresh runs are then recommended for. A row a kind:
//! how often the interval that `recommend` prints at the true best N covers the expected J, and how often the as-good
//! stretch holds the true best N. Kinds with fewer than 20 growths at the true best N, drifting and short runs stand
//! beside the others without a target.

#[path = "../tests/common/mod.rs"]
mod common;

use common::synthetic::{Shape, run_with_noise};
use gradscale::scaling::policy::{Defaults, PolicySpec};
use gradscale::scaling::{Measure, Options, Timeline, cost, octaves, recommend};
use rayon::prelude::*;

/// Runs that the truth is the mean of, and runs that are recommended for.
const TRUTH: u64 = 100;
const TRIALS: u64 = 100;

fn main() {
    println!(
        "shape,noise_log2,underflow_at_ceiling,steps,true_best_n,growths,expected_lost_update,covered,best_is_as_good,trials"
    );
    let options = Options::new().expect("built in");
    // A word chooses the kinds of that shape alone.
    let only = std::env::args().nth(1);
    for (shape, noise, underflow, steps) in [
        (Shape::Steady, 0.3, 1e-3, 20_000),
        (Shape::Steady, 0.3, 1e-2, 20_000),
        (Shape::Steady, 0.5, 1e-3, 50_000),
        (Shape::Spiky, 0.12, 1e-3, 20_000),
        (Shape::Spiky, 0.12, 1e-2, 20_000),
        (Shape::Spiky, 0.3, 1e-2, 50_000),
        (Shape::Drifting, 0.12, 1e-3, 20_000),
        (Shape::Drifting, 0.12, 1e-2, 20_000),
        (Shape::Steady, 0.3, 1e-2, 2_000),
        (Shape::Spiky, 0.12, 1e-2, 2_000),
    ] {
        if only
            .as_ref()
            .is_some_and(|only| *only != format!("{shape:?}"))
        {
            continue;
        }
        let grid: Vec<u64> = octaves(4, steps as u64).collect();
        let policies: Vec<_> = grid
            .iter()
            .map(|&n| {
                PolicySpec::named("pytorch")
                    .and_then(|spec| spec.with("growth_interval", n as i64))
                    .and_then(|spec| spec.build(Defaults::Framework))
                    .expect("valid")
            })
            .collect();
        let prices: Vec<Vec<(f64, u64)>> = (0..TRUTH)
            .into_par_iter()
            .map(|seed| {
                let run = run_with_noise(shape, steps, underflow, noise, 1_000_000 + seed);
                let timeline = Timeline::new(&run);
                policies
                    .iter()
                    .map(|policy| {
                        let cost = cost(&timeline, policy.as_ref());
                        (cost.j(Measure::Elements), cost.growths)
                    })
                    .collect()
            })
            .collect();
        let expected: Vec<f64> = (0..grid.len())
            .map(|n| prices.iter().map(|run| run[n].0).sum::<f64>() / TRUTH as f64)
            .collect();
        let best = (0..grid.len())
            .min_by(|&a, &b| expected[a].total_cmp(&expected[b]))
            .expect("a grid");
        let growths = prices.iter().map(|run| run[best].1).sum::<u64>() / TRUTH;
        let tried: Vec<(bool, bool)> = (0..TRIALS)
            .into_par_iter()
            .map(|seed| {
                let run = run_with_noise(shape, steps, underflow, noise, seed + 1);
                let answer = recommend(&run, &options).expect("long enough");
                // The candidate that has an interval and lies nearest to the true best.
                let near = answer
                    .choice
                    .candidates
                    .iter()
                    .filter(|c| c.confidence.is_some())
                    .min_by_key(|c| c.growth_interval.abs_diff(grid[best]))
                    .expect("intervals were computed");
                let (low, high) = near.confidence.expect("filtered");
                let (from, to) = answer.interval.expect("a recommendation");
                let as_good = from <= grid[best] && to.is_none_or(|to| grid[best] <= to);
                (low <= expected[best] && expected[best] <= high, as_good)
            })
            .collect();
        let share = |of: fn(&(bool, bool)) -> bool| {
            tried.iter().filter(|one| of(one)).count() as f64 / TRIALS as f64
        };
        println!(
            "{shape:?},{noise},{underflow},{steps},{},{growths},{:.3e},{:.3},{:.3},{TRIALS}",
            grid[best],
            expected[best],
            share(|one| one.0),
            share(|one| one.1),
        );
    }
}
