//! Question: does the replay agree with what a renewal argument says?
//! Command: `cargo run --release --example renewal > experiments/renewal.csv`
//!
//! Steady ceiling: PyTorch's policy doubles after N clean steps, overflows in the next, halves, and begins again; a cycle
//! has N + 1 steps and one skip, so 1/(N + 1) of the steps are skipped.
//!
//! Spikes: in each step, with probability p, the gradients are a binade and a half larger. Such a step overflows at the
//! ceiling and a binade below it, not two below. A Markov chain over these three levels, each left upwards after N clean
//! steps or downwards at a spike, gives the share of skipped steps in closed form; q = (1 − p)^N is the chance of N clean
//! steps in a row. The longer N, the longer a spike's loss of a binade lasts: its cost grows with N.

#[path = "../tests/common/mod.rs"]
mod common;

use common::synthetic::{CEILING_LOG2, Shape, run};
use gradscale::scaling::policy::{Defaults, PolicySpec};
use gradscale::scaling::statistics::Random;
use gradscale::scaling::{Limits, Timeline, cost};

fn main() {
    println!("case,growth_interval,spikes_per_1000,replayed_skip_rate,renewal_skip_rate,ratio");
    let steps = 1_000_000;
    for (case, rate) in [("steady", 0.0), ("spiky", 1e-4), ("spiky", 1e-3)] {
        let mut run = run(Shape::Steady, steps, 1e-3, 1);
        // A ceiling without noise, and spikes of one binade and a half.
        let mut random = Random::new(7);
        let mut spikes = 0;
        for limits in &mut run.limits {
            let spike = random.unit() < rate;
            spikes += u64::from(spike);
            let over = if spike { 1.5 } else { 0.0 };
            *limits = Limits::of_amax((15.4 - CEILING_LOG2 + over).exp2() as f32);
        }
        let p = spikes as f64 / steps as f64;
        let timeline = Timeline::new(&run);
        for n in [10u64, 30, 100, 300, 1000, 3000, 10_000] {
            let policy = PolicySpec::named("pytorch")
                .and_then(|spec| spec.with("growth_interval", n as i64))
                .and_then(|spec| spec.build(Defaults::Framework))
                .expect("valid");
            let replayed = cost(&timeline, policy.as_ref());
            let replayed = replayed.skipped as f64 / steps as f64;
            let renewal = renewal(n as f64, p);
            println!(
                "{case},{n},{:.3},{replayed:.4e},{renewal:.4e},{:.3}",
                1000.0 * p,
                replayed / renewal
            );
        }
    }
}

/// Skips per step of the chain: levels below the ceiling, each left upwards after N clean steps or downwards at a spike
/// that its scale cannot hold. A spike of a binade and a half overflows at the ceiling and one binade below it, not two.
fn renewal(n: f64, p: f64) -> f64 {
    let q = (1.0 - p).powf(n);
    // Mean steps until N clean ones in a row or a spike, the spike's own step included.
    let stay = if p > 0.0 { (1.0 - q) / p } else { n };
    // At the ceiling (0): N clean steps, then the probe's skip, back at 0; or a spike, skip, to 1.
    // At 1: N clean steps to 0; or a spike, skip, to 2. At 2: spikes pass; N steps to 1.
    // Stationary flow per visit: visits v0, v1, v2 with v1 = (1 − q)·v0 + v2, v2 = (1 − q)·v1.
    let v0 = 1.0;
    let v1 = (1.0 - q) * v0 / q;
    let v2 = (1.0 - q) * v1;
    let steps = v0 * (stay + q) + v1 * stay + v2 * n;
    let skips = v0 * (q + (1.0 - q)) + v1 * (1.0 - q);
    skips / steps
}
