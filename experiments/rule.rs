//! Question: what does the rule recommend where the truth is known?
//! Command: `cargo run --release --example rule > experiments/rule.csv`
//!
//! Synthetic runs: steady, spiky, drifting; 0 to 1e-2 of the elements underflow at the ceiling; 1,500 to 200,000 steps;
//! four neighbouring seeds each.

#[path = "../tests/common/mod.rs"]
mod common;

use common::synthetic::{Shape, run};
use gradscale::scaling::{Options, recommend};

fn main() {
    println!(
        "shape,underflow_at_ceiling,steps,seed,verdict,growth_interval,low,high,lost_with_it,lost_with_default"
    );
    let options = Options::new().expect("built in");
    for shape in [Shape::Steady, Shape::Spiky, Shape::Drifting] {
        for underflow in [0.0, 1e-6, 1e-4, 1e-3, 1e-2] {
            for steps in [1_500, 5_000, 20_000, 200_000] {
                for seed in 1..=4 {
                    let answer = recommend(&run(shape, steps, underflow, seed), &options)
                        .expect("long enough");
                    let (low, high) = answer.interval.expect("a recommendation");
                    let lost = |cost: &gradscale::scaling::Cost| cost.j(answer.measure);
                    println!(
                        "{shape:?},{underflow},{steps},{seed},{},{},{low},{},{:.3e},{:.3e}",
                        answer.verdict.as_str(),
                        answer.growth_interval.expect("a recommendation"),
                        high.map_or("none".to_owned(), |high| high.to_string()),
                        answer
                            .recommended
                            .as_ref()
                            .map_or(f64::NAN, |c| lost(&c.cost)),
                        lost(&answer.default.cost),
                    );
                }
            }
        }
    }
}
