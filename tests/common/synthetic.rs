//! Runs with a known truth: a ceiling that the scale cannot pass, and a share of elements that underflows at it.

#![allow(dead_code)] // Not every program that brings in this module needs all of it.

use gradscale::scaling::statistics::Random;
use gradscale::scaling::{Limits, Run, RunOptions, Underflow};
use gradscale::tally::{Accumulator, Sketch, Trace};

/// How the ceiling behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Noise around one level.
    Steady,
    /// The same, with one step in 200 up to 9 binades larger.
    Spiky,
    /// The level falls by 6 binades over the run: gradients shrink.
    Drifting,
}

/// The level of the ceiling at the start: scales up to about 2^18 are clean.
pub const CEILING_LOG2: f64 = 18.0;

pub fn gauss(random: &mut Random) -> f64 {
    (-2.0 * random.unit().ln()).sqrt() * (std::f64::consts::TAU * random.unit()).cos()
}

/// A run of `steps` steps in which `underflow` of the elements is flushed at the ceiling, twice as many a binade below,
/// and so on down to a half.
pub fn run(shape: Shape, steps: usize, underflow: f64, seed: u64) -> Run {
    run_with_noise(shape, steps, underflow, 0.12, seed)
}

/// The same, with another standard deviation of log2 amax.
pub fn run_with_noise(shape: Shape, steps: usize, underflow: f64, noise: f64, seed: u64) -> Run {
    let mut random = Random::new(seed);
    let mut run = Run::new(&Trace::default(), RunOptions::default());
    let mut samples = (Vec::new(), Vec::new());
    for step in 0..steps {
        let fallen = match shape {
            Shape::Drifting => 6.0 * step as f64 / steps as f64,
            _ => 0.0,
        };
        let mut amax_log2 = 16.0 - CEILING_LOG2 - 0.6 - fallen + noise * gauss(&mut random);
        if shape == Shape::Spiky && random.below(200) == 0 {
            amax_log2 += 1.0 + 8.0 * random.unit();
        }
        let amax = amax_log2.exp2() as f32;
        run.limits.push(Limits::of_amax(amax));
        run.amax.push(Some(amax));
        if step % 50 == 0 {
            samples.0.push(step);
            samples.1.push(sketch(underflow, fallen));
        }
    }
    run.recorded = steps as u64;
    run.recorded_scale = vec![None; steps];
    run.underflow = Underflow::new(samples.0, samples.1, steps);
    run
}

/// A billion elements: `underflow` of them lies below 2^-25/ceiling, and each binade above doubles what lies below it.
fn sketch(underflow: f64, fallen: f64) -> Sketch {
    const ELEMENTS: f64 = 1e9;
    let mut accumulator = Accumulator::new();
    let mut below = 0.0;
    let mut edge = -25.0 - CEILING_LOG2 - fallen;
    let mut next = underflow;
    while next > 0.0 && next < 0.5 {
        // 1.5·2^(e−1) lies in the binade below the edge.
        let value = (1.5 * (edge - 1.0).exp2()) as f32;
        accumulator.add_repeated(value.to_bits(), (ELEMENTS * (next - below)) as u64);
        below = next;
        next *= 2.0;
        edge += 1.0;
    }
    accumulator.add_repeated(2f32.powi(-20).to_bits(), (ELEMENTS * (1.0 - below)) as u64);
    accumulator.finish()
}
