//! `openseq2seq-backoff`: OpenSeq2Seq's `BackoffScaler`.
//!
//! ```text
//! start:     S = max
//! overflow:  S = clip(S / F, min, max);  last = it
//! clean:     if (it - last) mod W == 0:  S = clip(S * F, min, max)          (it from 0, last from -1)
//! ```
//!
//! The original graph has a race: it increments `it` with no ordering against the branch that reads it, and both orders
//! were seen in one run. This follows *increment first*, as the recorded traces that were kept do; really, growth
//! after an overflow comes after W clean steps and now and then after W - 1 or W + 1. TensorFlow's optimizer turns the
//! division into a product with r32(1/F).

use super::registry::{Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "openseq2seq-backoff",
    aliases: &["openseq2seq"],
    scale_type: ScaleType::F32,
    keys: &[
        Key::new("scale_min", &["min_scale"], Kind::Scale, Value::Real(1.0), "floor"),
        Key::new("scale_max", &["max_scale"], Kind::Scale, Value::Real(16384.0), "ceiling, and the scale of the first step"),
        Key::new("step_factor", &["growth_factor"], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth, divisor on overflow"),
        Key::new("step_window", &["growth_interval"], Kind::Integer { least: 1 }, Value::Integer(2000), "clean steps in a row that bring growth"),
    ],
    summary: "OpenSeq2Seq Backoff: starts at its ceiling of 2^14",
    explanation: "\
Starts at scale_max, divides by step_factor at every overflow and multiplies whenever the steps since the last overflow
are a multiple of step_window, clamped to [scale_min, scale_max].
Quirk: the original counts with a race, so that its growth now and then comes a step early or late; this follows the order
count first, then compare.",
    source: "NVIDIA/OpenSeq2Seq 8681d381 open_seq2seq/optimizers/automatic_loss_scaler.py",
    exceptions: &[],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    let (scale_min, scale_max) = (settings.f32("scale_min")?, settings.f32("scale_max")?);
    if scale_min > scale_max {
        return Err(settings.bad("scale_min", "at most scale_max"));
    }
    Ok(Box::new(Backoff {
        scale: scale_max,
        iteration: 0,
        last_overflow_iteration: -1,
        scale_min,
        scale_max,
        step_factor: settings.f32("step_factor")?,
        step_window: settings.i64("step_window"),
    }))
}

#[derive(Debug, Clone)]
struct Backoff {
    scale: f32,
    iteration: i64,
    last_overflow_iteration: i64,
    scale_min: f32,
    scale_max: f32,
    step_factor: f32,
    step_window: i64,
}

impl Policy for Backoff {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.scale;
        self.iteration += 1;
        if observed.found_inf {
            self.scale =
                (self.scale * (1.0 / self.step_factor)).clamp(self.scale_min, self.scale_max);
            self.last_overflow_iteration = self.iteration;
        } else if (self.iteration - self.last_overflow_iteration) % self.step_window == 0 {
            self.scale = (self.scale * self.step_factor).clamp(self.scale_min, self.scale_max);
        }
        Ok(Update::of(observed, before, self.scale))
    }

    fn quiet_steps(&self) -> u64 {
        // The iteration is counted before it is compared.
        super::quiet::to_multiple(
            self.iteration + 1 - self.last_overflow_iteration,
            self.step_window,
        )
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.iteration += steps as i64;
    }

    fn fingerprint(&self) -> [u64; 2] {
        let since = (self.iteration - self.last_overflow_iteration).rem_euclid(self.step_window);
        [self.scale.to_bits().into(), since as u64]
    }

    fn save(&self) -> State {
        self.counters()
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(INFO.name, saved);
        self.scale = fields.f32("scale")?;
        self.iteration = fields.i64("iteration")?;
        self.last_overflow_iteration = fields.i64("last_overflow_iteration")?;
        Ok(())
    }

    fn counters(&self) -> State {
        state([
            ("iteration", self.iteration.into()),
            (
                "last_overflow_iteration",
                self.last_overflow_iteration.into(),
            ),
            ("scale", number(self.scale.into())),
        ])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
