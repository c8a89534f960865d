//! What each scale flushes to zero, at every step: the sampled sketches, and the nearest one between them.

use super::run::merged;
use crate::float::{FP16, exact_log2};
use crate::tally::{Lost, Replayed, Sketch, Trace};
use serde::{Deserialize, Serialize};

/// How a lost update is weighed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Measure {
    /// The share of nonzero elements: Adam-like optimizers normalise every element.
    #[default]
    Elements,
    /// The share of the L1 norm.
    L1,
    /// The share of the L2 norm: SGD-like optimizers.
    L2,
}

impl Measure {
    /// Picks the measure.
    pub fn of(self, lost: Lost) -> f64 {
        match self {
            Measure::Elements => lost.elements,
            Measure::L1 => lost.l1,
            Measure::L2 => lost.l2,
        }
    }

    /// The word in flags and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Measure::Elements => "elements",
            Measure::L1 => "l1",
            Measure::L2 => "l2",
        }
    }
}

const LOWEST: i32 = -60;
const HIGHEST: i32 = 127;
const EXPONENTS: usize = (HIGHEST - LOWEST + 1) as usize;

/// Share of the update that each power-of-two scale flushes, at every step.
///
/// A step takes the nearest sampled sketch (the earlier of two equally near). Sums over stretches of steps come from
/// prefix sums over the samples, so a replay that jumps over a clean stretch pays for it once.
#[derive(Debug, Clone, PartialEq)]
pub struct Underflow {
    /// One past the last step (from 0, the run's first) that each sample stands for.
    ends: Vec<usize>,
    /// The sampled step that each sample was taken at, from the run's first.
    at: Vec<usize>,
    sketches: Vec<Sketch>,
    /// `[exponent][sample]`: what one step loses, and the sum over all steps before the sample's stretch.
    lost: Vec<Vec<Lost>>,
    before: Vec<Vec<Lost>>,
    /// What one sketch loses when tensors without signal are left out, by exponent: mean over the samples.
    with_signal: Option<Vec<Lost>>,
}

fn plus(a: Lost, b: Lost, times: f64) -> Lost {
    Lost {
        elements: a.elements + times * b.elements,
        l1: a.l1 + times * b.l1,
        l2: a.l2 + times * b.l2,
    }
}

fn flushed(sketch: &Sketch, scale: f32) -> Replayed {
    sketch.replay(FP16, scale, false)
}

impl Underflow {
    /// From the sketches of a trace: those of its probes where it has them, else its samples.
    ///
    /// `None` where there is none, or none can be unscaled.
    pub(super) fn of_trace(
        trace: &Trace,
        tensors: &[usize],
        without_signal: &[usize],
    ) -> Option<Underflow> {
        let first = trace.steps.first()?.step;
        let last = trace.steps.last()?.step;
        let (samples, scaled) = if trace.probes.is_empty() {
            (&trace.samples, true)
        } else {
            (&trace.probes, false)
        };
        let signal: Vec<usize> = tensors
            .iter()
            .copied()
            .filter(|n| !without_signal.contains(n))
            .collect();
        let (mut at, mut sketches, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        for sample in samples {
            // A sample of a step that overflowed shows infinities, not what a clean step flushes.
            let overflowed = sample.sketches.iter().any(|s| s.nonfinite() > 0);
            if overflowed {
                continue;
            }
            let Some(sketch) = merged(trace, sample, tensors, scaled) else {
                continue;
            };
            if sketch.finite_nonzero() + sketch.zeros() == 0 {
                continue;
            }
            at.push((trace.steps[sample.row].step - first) as usize);
            sketches.push(sketch);
            if !without_signal.is_empty() {
                kept.extend(merged(trace, sample, &signal, scaled));
            }
        }
        let length = (last - first + 1) as usize;
        let mut underflow = Underflow::new(at, sketches, length)?;
        if !kept.is_empty() {
            let mean = |exponent: usize| {
                let scale = crate::float::exp2(exponent as i32 + LOWEST) as f32;
                let sum = kept.iter().fold(Lost::default(), |sum, s| {
                    plus(sum, flushed(s, scale).lost, 1.0)
                });
                plus(Lost::default(), sum, 1.0 / kept.len() as f64)
            };
            underflow.with_signal = Some((0..EXPONENTS).map(mean).collect());
        }
        Some(underflow)
    }

    /// From sketches taken `at` ascending steps of a run of `length` steps.
    pub fn new(at: Vec<usize>, sketches: Vec<Sketch>, length: usize) -> Option<Underflow> {
        if sketches.is_empty() {
            return None;
        }
        let mut ends: Vec<usize> = at
            .windows(2)
            .map(|pair| (pair[0] + pair[1]) / 2 + 1)
            .collect();
        ends.push(length.max(at[at.len() - 1] + 1));
        let mut underflow = Underflow {
            ends,
            at,
            sketches,
            lost: Vec::new(),
            before: Vec::new(),
            with_signal: None,
        };
        use rayon::prelude::*;
        underflow.lost = (0..EXPONENTS)
            .into_par_iter()
            .map(|exponent| {
                let scale = crate::float::exp2(exponent as i32 + LOWEST) as f32;
                underflow
                    .sketches
                    .iter()
                    .map(|sketch| flushed(sketch, scale).lost)
                    .collect()
            })
            .collect();
        underflow.before = underflow
            .lost
            .iter()
            .map(|lost| {
                let mut sum = Lost::default();
                let mut start = 0;
                let mut before = Vec::with_capacity(lost.len());
                for (&one, &end) in lost.iter().zip(&underflow.ends) {
                    before.push(sum);
                    sum = plus(sum, one, (end - start) as f64);
                    start = end;
                }
                before
            })
            .collect();
        Some(underflow)
    }

    /// Number of samples.
    pub fn samples(&self) -> usize {
        self.sketches.len()
    }

    /// The sampled steps (from the run's first) and their merged sketches.
    pub fn sampled(&self) -> impl Iterator<Item = (usize, &Sketch)> {
        self.at.iter().copied().zip(&self.sketches)
    }

    /// What `step` (from the run's first) loses at `scale`.
    pub fn at(&self, step: usize, scale: f64) -> Lost {
        let sample = self.sample_of(step);
        match column(scale) {
            Some(exponent) => self.lost[exponent][sample],
            None => flushed(&self.sketches[sample], scale as f32).lost,
        }
    }

    /// The sum of what the steps `from..to` lose at a constant `scale`.
    pub fn sum(&self, from: usize, to: usize, scale: f64) -> Lost {
        if from >= to {
            return Lost::default();
        }
        let Some(exponent) = column(scale) else {
            return (from..to).fold(Lost::default(), |sum, step| {
                plus(sum, self.at(step, scale), 1.0)
            });
        };
        let until = |step: usize| {
            let sample = self.sample_of(step);
            let start = if sample == 0 {
                0
            } else {
                self.ends[sample - 1]
            };
            plus(
                self.before[exponent][sample],
                self.lost[exponent][sample],
                (step - start) as f64,
            )
        };
        // `to` may be one past the last step, which the last sample stands for as well.
        plus(until(to), until(from), -1.0)
    }

    /// The mean over the samples of what is lost at a power-of-two `scale` when tensors without signal are left out.
    pub fn without_noise(&self, scale: f64) -> Option<Lost> {
        Some(self.with_signal.as_ref()?[column(scale)?])
    }

    /// The largest loss of one step among `from..to`, by each measure.
    pub fn worst(&self, from: usize, to: usize, scale: f64) -> Lost {
        let mut worst = Lost::default();
        let mut step = from;
        while step < to {
            let sample = self.sample_of(step);
            let one = self.at(step, scale);
            worst.elements = worst.elements.max(one.elements);
            worst.l1 = worst.l1.max(one.l1);
            worst.l2 = worst.l2.max(one.l2);
            step = self.ends[sample].max(step + 1);
            if sample + 1 == self.ends.len() {
                break;
            }
        }
        worst
    }

    fn sample_of(&self, step: usize) -> usize {
        self.ends
            .partition_point(|&end| end <= step)
            .min(self.ends.len() - 1)
    }
}

/// The column of a power-of-two scale.
fn column(scale: f64) -> Option<usize> {
    exact_log2(scale)
        .filter(|e| (LOWEST..=HIGHEST).contains(e))
        .map(|e| (e - LOWEST) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_over_stretches_equal_sums_over_steps() {
        let sketches: Vec<Sketch> = (0..4)
            .map(|i| Sketch::of(&[2f32.powi(-20 - i), 2f32.powi(-30), 1.0, 0.0]))
            .collect();
        let underflow = Underflow::new(vec![0, 10, 25, 60], sketches, 80).unwrap();
        for scale in [1.0, 4.0, 1024.0, 3.0, 2f64.powi(-70)] {
            for (from, to) in [(0, 80), (0, 0), (3, 4), (5, 6), (7, 31), (59, 80), (79, 80)] {
                let slow = (from..to).fold(Lost::default(), |sum, step| {
                    plus(sum, underflow.at(step, scale), 1.0)
                });
                let fast = underflow.sum(from, to, scale);
                for (a, b) in [
                    (slow.elements, fast.elements),
                    (slow.l1, fast.l1),
                    (slow.l2, fast.l2),
                ] {
                    assert!((a - b).abs() <= 1e-9, "{scale} {from}..{to}: {a} {b}");
                }
            }
        }
    }

    #[test]
    fn a_step_takes_the_nearest_sample_and_the_earlier_of_two() {
        let sketches = vec![Sketch::of(&[2f32.powi(-30)]), Sketch::of(&[1.0])];
        let underflow = Underflow::new(vec![0, 10], sketches, 20).unwrap();
        assert_eq!(underflow.at(5, 1.0).elements, 1.0);
        assert_eq!(underflow.at(6, 1.0).elements, 0.0);
        assert_eq!(underflow.at(19, 1.0).elements, 0.0);
    }
}
