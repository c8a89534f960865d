//! Question: how long does it take to replay every growth interval of a long run?
//! Command: `cargo bench --bench sweep` (add `-- 10000000` for ten million steps).
//!
//! One thread. The series is log-normal noise on a slow drift with rare spikes; in the second case one step in 10,000
//! overflows at any scale. Intervals sampled from the sweep are replayed step by step and must agree.

#[path = "../../tests/common/mod.rs"]
mod common;

use common::synthetic::gauss;
use gradscale::scaling::policy::{Defaults, PolicySpec};
use gradscale::scaling::statistics::Random;
use gradscale::scaling::{
    Density, Limits, Rule, Run, RunOptions, Timeline, choose, replay_stepping,
};
use gradscale::tally::Trace;
use std::time::Instant;

fn run(steps: usize, nonfinite: f64) -> Run {
    let mut random = Random::new(1);
    let mut drift = -6.0;
    let mut run = Run::new(&Trace::default(), RunOptions::default());
    for _ in 0..steps {
        drift += 0.004 * gauss(&mut random) - 0.0005 * (drift + 6.5);
        let mut amax = (drift + 0.35 * gauss(&mut random)).exp2();
        if random.unit() < 0.002 {
            amax *= (2.0 + 7.0 * random.unit()).exp2();
        }
        let limits = if random.unit() < nonfinite {
            Limits::ALWAYS
        } else {
            Limits::of_amax(amax as f32)
        };
        run.limits.push(limits);
        run.amax.push(Some(amax as f32));
    }
    run.recorded = steps as u64;
    run.recorded_scale = vec![None; steps];
    run
}

fn main() {
    let steps = std::env::args()
        .filter_map(|a| a.parse().ok())
        .next()
        .unwrap_or(1_000_000);
    rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build_global()
        .expect("the first pool");
    let spec = PolicySpec::named("pytorch").expect("built in");
    println!(
        "{:>12} {:>10} {:>10} {:>12} {:>12}",
        "steps", "nonfinite", "seconds", "intervals", "ns/interval"
    );
    for nonfinite in [0.0, 1e-4] {
        let run = run(steps, nonfinite);
        let mut seconds = Vec::new();
        let mut intervals = 0;
        for _ in 0..3 {
            let start = Instant::now();
            let timeline = Timeline::new(&run);
            let choice = choose(
                &timeline,
                &spec,
                Rule::SkipBudget { budget: 0.001 },
                Density::Every,
            )
            .expect("pytorch has an interval");
            seconds.push(start.elapsed().as_secs_f64());
            intervals = choice.candidates.len();
            for n in [1u64, 7, 100, 2000, 12_345] {
                let spec = spec.with("growth_interval", n as i64).expect("an interval");
                let mut policy = spec.build(Defaults::Framework).expect("built in");
                let mut skipped = 0;
                replay_stepping(&run.limits, policy.as_mut(), &mut |s| {
                    skipped += u64::from(s.skipped)
                })
                .expect("torch never ends a run");
                assert_eq!(choice.at(n).cost.skipped, skipped, "interval {n}");
            }
        }
        seconds.sort_by(f64::total_cmp);
        println!(
            "{steps:>12} {nonfinite:>10} {:>10.2} {intervals:>12} {:>12.0}",
            seconds[1],
            1e9 * seconds[1] / intervals as f64
        );
    }
}
