//! What a replay needs to know of a run: for each step, at which scales it overflows; and what each scale flushes.

use super::underflow::Underflow;
use crate::float::FP16;
use crate::tally::{Capture, Captured, Role, Sketch, Trace, nonfinite};
use crate::warning::{Kind, Warning};

/// What is known of one step's overflow, as two scales.
///
/// ```text
///   scale   0 ........ clean_below ........... overflow_from ........ ∞
///             clean               unknown                  overflows
/// ```
///
/// A finite amax decides exactly, and the two are equal. A step that was only seen at one scale leaves a gap.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// The step is known to be clean at every scale below this.
    pub clean_below: f32,
    /// The step is known to overflow at this scale and above.
    pub overflow_from: f32,
}

/// What a step does at a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Every gradient stays finite.
    Clean,
    /// A gradient becomes inf or NaN.
    Overflow,
    /// The record does not tell; a point estimate calls it clean.
    Unknown,
}

impl Limits {
    /// Nothing is known, or nothing can overflow.
    pub const NEVER: Limits = Limits {
        clean_below: f32::INFINITY,
        overflow_from: f32::INFINITY,
    };
    /// Overflows at every scale: an inf or NaN that no scale cures.
    pub const ALWAYS: Limits = Limits {
        clean_below: 0.0,
        overflow_from: 0.0,
    };

    /// The limit of a step whose largest gradient is `amax` (finite): the smallest scale at which fl32(amax·s) rounds
    /// above FP16's largest value.
    pub fn of_amax(amax: f32) -> Limits {
        let over = f32::from_bits(FP16.first_overflow_bits());
        if amax == 0.0 {
            return Limits::NEVER;
        }
        // The quotient is within an ulp of the limit; walk to the first scale whose product overflows.
        let mut scale = over / amax;
        while scale > 0.0 && amax * scale.next_down() >= over {
            scale = scale.next_down();
        }
        while scale.is_finite() && amax * scale < over {
            scale = scale.next_up();
        }
        Limits {
            clean_below: scale,
            overflow_from: scale,
        }
    }

    /// The step at a scale; scales are used as the f32 that multiplies the loss.
    #[inline]
    pub fn at(self, scale: f32) -> Verdict {
        if scale >= self.overflow_from {
            Verdict::Overflow
        } else if scale < self.clean_below {
            Verdict::Clean
        } else {
            Verdict::Unknown
        }
    }

    /// Whether the step overflows at every scale.
    pub fn is_always(self) -> bool {
        self.overflow_from == 0.0
    }
}

/// How a run is read for replaying.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RunOptions {
    /// Replay the tensors that a mixed run produced in f32 as if FP16 had produced them.
    pub all_as_fp16: bool,
}

/// A run, ready to be replayed under any policy.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// The first step's number.
    pub first_step: u64,
    /// One entry a step from the first to the last; a step that was not recorded holds what the one before it held.
    pub limits: Vec<Limits>,
    /// How many of them were recorded.
    pub recorded: u64,
    /// The largest unscaled gradient of each step, for display: `None` where it is not finite or was not recorded.
    pub amax: Vec<Option<f32>>,
    /// The scale each recorded step really ran at, and whether it overflowed.
    pub recorded_scale: Vec<Option<f64>>,
    /// What each scale flushes; `None` where only amax is known.
    pub underflow: Option<Underflow>,
    /// Tensors whose amax lies below 2^-20 of the median tensor's: their gradient is zero but for rounding noise.
    pub without_signal: Vec<String>,
    /// The first tensor, in backward order, that is non-finite where no scale was recorded, and the step.
    pub first_nonfinite: Option<(String, u64)>,
    /// Tensors left out because a mixed run produced them in f32.
    pub left_out: Vec<String>,
    /// Whether any gradient was captured in FP16, so that what it flushed cannot be seen.
    pub captured: Option<Captured>,
    /// Whether FP32 probes stand in for what FP16 flushed.
    pub probed: bool,
    /// What to know about the record.
    pub warnings: Vec<Warning>,
}

impl Run {
    /// Reads a trace for replaying.
    pub fn new(trace: &Trace, options: RunOptions) -> Run {
        let mut warnings = Vec::new();
        let captures = trace.captures();
        let counted = trace
            .tensors
            .iter()
            .zip(&captures)
            .filter(|(t, _)| t.role != Role::Activation);
        let captured = Captured::over(counted.map(|(_, &capture)| capture));
        let mixed = captured.believed();
        let is_gradient = |n: usize| trace.tensors[n].role != Role::Activation;
        let left = |n: usize| mixed && !options.all_as_fp16 && captures[n] == Capture::Wider;
        let used: Vec<usize> = (0..trace.tensors.len())
            .filter(|&n| is_gradient(n) && !left(n))
            .collect();
        let left_out: Vec<String> = (0..trace.tensors.len())
            .filter(|&n| is_gradient(n) && left(n))
            .map(|n| trace.tensors[n].name.clone())
            .collect();
        if !left_out.is_empty() {
            warnings.push(Warning::new(
                Kind::MixedPrecision,
                format!(
                    "{} of {} tensors were produced in f32 beside {} in FP16",
                    left_out.len(),
                    left_out.len() + used.len(),
                    captured.fp16_tensors
                ),
                "they neither overflow at 65520 nor underflow, and are left out of the replay",
                "--all-as-fp16 to put them in",
            ));
        }

        let (first_step, last_step) = trace.span().unwrap_or((0, 0));
        let length = if trace.steps.is_empty() {
            0
        } else {
            (last_step - first_step + 1) as usize
        };
        let mut limits: Vec<Limits> = Vec::with_capacity(length);
        let mut amax = Vec::with_capacity(length);
        let mut recorded_scale = Vec::with_capacity(length);
        let mut first_nonfinite = None;
        let mut holding = Limits::NEVER;
        for (row, step) in trace.steps.iter().enumerate() {
            // A step that was not recorded is taken as the last one that was clean: an overflow is one step's event.
            while ((step.step - first_step) as usize) > limits.len() {
                limits.push(holding);
                amax.push(None);
                recorded_scale.push(None);
            }
            let mut largest: Option<f32> = None;
            let mut nonfinite_tensor: Option<usize> = None;
            for &n in &used {
                if trace.nonfinite_at(row, n) & (nonfinite::INF | nonfinite::NAN) != 0
                    && nonfinite_tensor.is_none_or(|best| order(trace, n) < order(trace, best))
                {
                    nonfinite_tensor = Some(n);
                }
                if let Some(value) = trace.unscaled_amax(row, n) {
                    largest = Some(largest.map_or(value, |l| l.max(value)));
                }
            }
            let overflowed = nonfinite_tensor.is_some() || step.found_inf == Some(true);
            let of_amax = largest
                .filter(|_| trace.nonfinite_at_all(row, &used) & nonfinite::NONE_FINITE == 0);
            let mut limit = match (of_amax, step.loss_scale) {
                (Some(amax), _) => Limits::of_amax(amax),
                (None, Some(scale)) if !overflowed => Limits {
                    clean_below: (scale as f32).next_up(),
                    overflow_from: f32::INFINITY,
                },
                _ => Limits {
                    clean_below: 0.0,
                    overflow_from: f32::INFINITY,
                },
            };
            if overflowed {
                limit = match step.loss_scale {
                    Some(scale) => Limits {
                        clean_below: 0.0,
                        overflow_from: limit.overflow_from.min(scale as f32),
                    },
                    None => Limits::ALWAYS,
                };
                if first_nonfinite.is_none()
                    && let Some(n) = nonfinite_tensor
                {
                    first_nonfinite = Some((trace.tensors[n].name.clone(), step.step));
                }
            } else {
                holding = limit;
            }
            limits.push(limit);
            amax.push(if overflowed { None } else { largest });
            recorded_scale.push(step.loss_scale);
        }
        let recorded = trace.steps.len() as u64;
        if recorded > 0 && recorded < length as u64 {
            warnings.push(Warning::new(
                Kind::MissingSteps,
                format!("{recorded} of {length} steps are recorded"),
                "spikes between them are unseen; each value holds until the next",
                "record every step (amax is cheap)",
            ));
        }

        let parameters: Vec<usize> = used
            .iter()
            .copied()
            .filter(|&n| trace.tensors[n].role == Role::Parameter)
            .collect();
        let without_signal = without_signal(trace, &parameters);
        let probed = !trace.probes.is_empty();
        let underflow = Underflow::of_trace(trace, &parameters, &without_signal);
        if mixed && !probed {
            warnings.push(Warning::new(
                Kind::CapturedInFp16,
                format!(
                    "{} tensors were captured in FP16, at a scale of at least {}",
                    captured.fp16_tensors,
                    crate::float::exp2(-24 - captured.lowest_bit.unwrap_or(-24))
                ),
                "what had already been flushed to zero is invisible, so underflow is a lower bound",
                "record probes (Recorder.probe) or an FP32 run of the same model",
            ));
        }
        if let Some(underflow) = &underflow
            && length as u64 > 200
            && (underflow.samples() as u64) * 200 < length as u64
        {
            warnings.push(Warning::new(
                Kind::SampledThinly,
                format!("{} sketches in {length} steps", underflow.samples()),
                "underflow between them is taken from the nearest one",
                "every=50 in the recorder",
            ));
        }
        Run {
            first_step,
            limits,
            recorded,
            amax,
            recorded_scale,
            underflow,
            without_signal: without_signal
                .iter()
                .map(|&n| trace.tensors[n].name.clone())
                .collect(),
            first_nonfinite,
            left_out,
            captured: mixed.then_some(captured),
            probed,
            warnings,
        }
    }

    /// Number of steps replayed: last − first + 1.
    pub fn len(&self) -> u64 {
        self.limits.len() as u64
    }

    /// Whether there is no step.
    pub fn is_empty(&self) -> bool {
        self.limits.is_empty()
    }

    /// Steps that overflow at every scale.
    pub fn always_overflowing(&self) -> u64 {
        self.limits
            .iter()
            .filter(|limits| limits.is_always())
            .count() as u64
    }

    /// Whether some step is undecided at some scale.
    pub fn censored(&self) -> bool {
        self.limits
            .iter()
            .any(|limits| limits.clean_below < limits.overflow_from)
    }
}

/// A tensor's place in backward order; recorded order, reversed, where it is not known.
fn order(trace: &Trace, tensor: usize) -> u64 {
    trace.tensors[tensor]
        .backward_order
        .unwrap_or((trace.tensors.len() - tensor) as u64 + (1 << 32))
}

/// Tensors whose largest amax over the run lies below 2^-20 of the median tensor's.
fn without_signal(trace: &Trace, tensors: &[usize]) -> Vec<usize> {
    let largest: Vec<f32> = tensors
        .iter()
        .map(|&n| {
            (0..trace.steps.len())
                .filter_map(|row| trace.unscaled_amax(row, n))
                .fold(0.0, f32::max)
        })
        .collect();
    let mut sorted = largest.clone();
    sorted.sort_by(f32::total_cmp);
    let Some(&median) = sorted.get(sorted.len() / 2) else {
        return Vec::new();
    };
    let floor = median * 2f32.powi(-20);
    tensors
        .iter()
        .zip(&largest)
        .filter(|(_, amax)| **amax < floor && **amax > 0.0)
        .map(|(&n, _)| n)
        .collect()
}

impl Trace {
    /// OR of the nonfinite bits over some tensors of a row, except that "nothing finite" needs all of them.
    fn nonfinite_at_all(&self, row: usize, tensors: &[usize]) -> u8 {
        let (mut any, mut all) = (0, nonfinite::NONE_FINITE);
        for &n in tensors {
            let bits = self.nonfinite_at(row, n);
            any |= bits;
            all &= bits;
        }
        any & !nonfinite::NONE_FINITE | if tensors.is_empty() { 0 } else { all }
    }
}

/// The merged sketch of some tensors of one sampled step, unscaled; `None` where it cannot be unscaled exactly.
pub(super) fn merged(
    trace: &Trace,
    sample: &crate::tally::Sample,
    tensors: &[usize],
    scaled: bool,
) -> Option<Sketch> {
    let mut all = Sketch::default();
    for &n in tensors {
        if scaled {
            all.merge(&trace.unscaled_sample(sample, n)?);
        } else {
            all.merge(&sample.sketches[n]);
        }
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_an_amax_is_the_first_scale_whose_product_overflows() {
        let mut seed = 1u32;
        let mut amaxes = vec![
            1.0,
            65504.0,
            65520.0,
            f32::MAX,
            f32::MIN_POSITIVE,
            1e-40,
            1e-45,
            3.0,
            0.1,
        ];
        for _ in 0..10_000 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            amaxes.push(f32::from_bits(seed & 0x7F7F_FFFF));
        }
        for amax in amaxes {
            let limits = Limits::of_amax(amax);
            let scale = limits.overflow_from;
            assert_eq!(limits.clean_below.to_bits(), scale.to_bits());
            if scale.is_finite() {
                assert!(amax * scale >= 65520.0, "{amax:e} {scale:e}");
            }
            if scale > 0.0 {
                assert!(amax * scale.next_down() < 65520.0, "{amax:e} {scale:e}");
            }
        }
        assert_eq!(Limits::of_amax(0.0), Limits::NEVER);
    }
}
