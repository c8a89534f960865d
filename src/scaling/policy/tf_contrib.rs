//! `tf-contrib-exponential`: TensorFlow 1.x's `ExponentialUpdateLossScaleManager`.
//!
//! ```text
//! overflow:  if bad + 1 >= K:   S = max(1, r32(S * decr));           good = bad = 0
//!            else:              bad = bad + 1;  good = 0
//! clean:     if good + 1 >= W:  S = r32(S * incr) if finite;         good = bad = 0
//!            else:              good = good + 1
//! ```
//!
//! Unlike Paddle's, overflows *accumulate*: only a change of the scale clears them. The docstring says that an update below
//! 1 is not applied; it is clamped to 1. Initial scale and interval are mandatory; 2^15 and 2000 stand in.

use super::registry::{Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "tf-contrib-exponential",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::mandatory("init_loss_scale", &["init_scale", "scale"], Kind::Scale, Value::Real(32768.0), "scale of the first step"),
        Key::mandatory("incr_every_n_steps", &["growth_interval"], Kind::Integer { least: i64::MIN }, Value::Integer(2000), "clean steps in a row that bring growth"),
        Key::new("decr_every_n_nan_or_inf", &["hysteresis"], Kind::Integer { least: i64::MIN }, Value::Integer(2), "overflows since the last change that bring backoff"),
        Key::new("incr_ratio", &["growth_factor"], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth"),
        Key::new("decr_ratio", &["backoff_factor"], Kind::Between(0.0, 1.0), Value::Real(0.8), "multiplier on backoff"),
    ],
    summary: "TensorFlow 1 contrib: cut to 0.8 after 2 accumulated overflows, floor 1",
    explanation: "\
Backs off when decr_every_n_nan_or_inf overflows have come since the last change of the scale, in a row or not; grows after
incr_every_n_steps clean steps, unless that gives infinity. Floor 1. init_loss_scale and incr_every_n_steps are mandatory
in the class; those shown stand in.",
    source: "tensorflow/tensorflow 1.x contrib/mixed_precision/python/loss_scale_manager.py",
    exceptions: &[],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(TfContribExponential {
        scale: settings.f32("init_loss_scale")?,
        good: 0,
        bad: 0,
        incr_ratio: settings.f32("incr_ratio")?,
        decr_ratio: settings.f32("decr_ratio")?,
        incr_every_n_steps: settings.i64("incr_every_n_steps"),
        decr_every_n_nan_or_inf: settings.i64("decr_every_n_nan_or_inf"),
    }))
}

#[derive(Debug, Clone)]
struct TfContribExponential {
    scale: f32,
    good: i64,
    bad: i64,
    incr_ratio: f32,
    decr_ratio: f32,
    incr_every_n_steps: i64,
    decr_every_n_nan_or_inf: i64,
}

impl Policy for TfContribExponential {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.scale;
        if observed.found_inf {
            self.good = 0;
            self.bad += 1;
            if self.bad >= self.decr_every_n_nan_or_inf {
                self.scale = (self.scale * self.decr_ratio).max(1.0);
                self.bad = 0;
            }
        } else {
            self.good += 1;
            if self.good >= self.incr_every_n_steps {
                let grown = self.scale * self.incr_ratio;
                if grown.is_finite() {
                    self.scale = grown;
                }
                (self.good, self.bad) = (0, 0);
            }
        }
        Ok(Update::of(observed, before, self.scale))
    }

    fn quiet_steps(&self) -> u64 {
        super::quiet::counts_to_at_least(self.good, self.incr_every_n_steps)
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.good += steps as i64;
    }

    fn save(&self) -> State {
        state([
            ("loss_scale", number(self.scale.into())),
            ("good", self.good.into()),
            ("bad", self.bad.into()),
        ])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(INFO.name, saved);
        self.scale = fields.f32("loss_scale")?;
        self.good = fields.i64("good")?;
        self.bad = fields.i64("bad")?;
        Ok(())
    }

    fn counters(&self) -> State {
        state([("good", self.good.into()), ("bad", self.bad.into())])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
