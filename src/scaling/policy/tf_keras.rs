//! `tf-keras`: the `LossScaleOptimizer` of Keras 2 (V3; V1 holds the same state class).
//!
//! ```text
//! overflow:           S = max(S / 2, 1);  t = 0
//! clean, t + 1 >= W:  v = r32(S * 2);  if finite(v): S = v;  t = 0
//! clean:              t = t + 1
//! ```
//!
//! `>=`, so W = 0 grows at every clean step. A start below 1 jumps up to 1. On a skipped step the inner optimizer's
//! `iterations` still advances, so learning-rate schedules and Adam's bias correction count skipped steps (Keras 3's do not).
//! `dynamic=False` is a constant that is not checked. Checkpoints hold both variables (current_loss_scale, good_steps).

use super::registry::{Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "tf-keras",
    aliases: &["keras2"],
    scale_type: ScaleType::F32,
    keys: &[
        Key::new("initial_scale", &["init_scale", "scale"], Kind::Scale, Value::Real(32768.0), "scale of the first step"),
        Key::new("dynamic_growth_steps", &["growth_interval"], Kind::Integer { least: i64::MIN }, Value::Integer(2000), "clean steps in a row that bring growth"),
        Key::new("dynamic", &[], Kind::Flag, Value::Flag(true), "false: a constant that is not checked"),
    ],
    summary: "TensorFlow Keras 2: halve on overflow with floor 1, double after 2000 clean steps",
    explanation: "\
Halves at every overflow, never below 1; doubles after dynamic_growth_steps clean steps, unless that gives infinity.
Quirks: a start below 1 jumps up to 1. On a skipped step the inner optimizer's iterations still advances, so schedules and
Adam's bias correction count it. dynamic=false needs initial_scale, never changes it and checks nothing.",
    source: "keras-team/tf-keras tf_keras/mixed_precision/loss_scale_optimizer.py; tf-keras 2.21",
    exceptions: &[],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(TfKeras {
        scale: settings.f32("initial_scale")?,
        dynamic_counter: 0,
        inner_iterations: 0,
        dynamic_growth_steps: settings.i64("dynamic_growth_steps"),
        dynamic: settings.flag("dynamic"),
    }))
}

#[derive(Debug, Clone)]
struct TfKeras {
    scale: f32,
    dynamic_counter: i64,
    inner_iterations: i64,
    dynamic_growth_steps: i64,
    dynamic: bool,
}

impl Policy for TfKeras {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.scale;
        self.inner_iterations += 1;
        let observed = Observed {
            found_inf: observed.found_inf && self.dynamic,
            ..observed
        };
        if !self.dynamic {
            return Ok(Update::of(observed, before, self.scale));
        }
        if observed.found_inf {
            self.scale = (self.scale / 2.0).max(1.0);
            self.dynamic_counter = 0;
        } else if self.dynamic_counter + 1 >= self.dynamic_growth_steps {
            let grown = self.scale * 2.0;
            if grown.is_finite() {
                self.scale = grown;
            }
            self.dynamic_counter = 0;
        } else {
            self.dynamic_counter += 1;
        }
        Ok(Update::of(observed, before, self.scale))
    }

    fn quiet_steps(&self) -> u64 {
        match self.dynamic {
            true => {
                super::quiet::counts_to_at_least(self.dynamic_counter, self.dynamic_growth_steps)
            }
            false => u64::MAX,
        }
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.inner_iterations += steps as i64;
        if self.dynamic {
            self.dynamic_counter += steps as i64;
        }
    }

    fn fingerprint(&self) -> [u64; 2] {
        [self.scale.to_bits().into(), self.dynamic_counter as u64]
    }

    fn save(&self) -> State {
        state([
            ("current_loss_scale", number(self.scale.into())),
            ("good_steps", self.dynamic_counter.into()),
            ("iterations", self.inner_iterations.into()),
        ])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(INFO.name, saved);
        self.scale = fields.f32("current_loss_scale")?;
        self.dynamic_counter = fields.i64("good_steps")?;
        self.inner_iterations = fields.i64("iterations")?;
        Ok(())
    }

    fn counters(&self) -> State {
        state([
            ("dynamic_counter", self.dynamic_counter.into()),
            ("inner_iterations", self.inner_iterations.into()),
        ])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
