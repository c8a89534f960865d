//! `keras3` and `keras3-jax`: the `LossScaleOptimizer` of Keras 3 on the torch and the jax backend.
//!
//! ```text
//! overflow:           S = S * 0.5;  t = 0
//! clean, t == W - 1:  S = S * 2;    t = 0
//! clean:              t = t + 1
//! ```
//!
//! No floor and no ceiling. On torch the scale is 0 after 165 overflows in a row from 2^15; on jax after 142, because XLA
//! on the CPU flushes subnormals. Growth reaches inf after 2^127 and stays there. Both variables are saved.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry of the torch backend.
pub(crate) const TORCH: PolicyInfo = PolicyInfo {
    name: "keras3",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::new("initial_scale", &["init_scale", "scale"], Kind::Scale, Value::Real(32768.0), "scale of the first step"),
        Key::new("dynamic_growth_steps", &["growth_interval"], Kind::Integer { least: i64::MIN }, Value::Integer(2000), "clean steps in a row that bring growth; 0 and below: never"),
    ],
    summary: "Keras 3: halve on overflow, double after 2000 clean steps, no floor, no ceiling",
    explanation: "\
Halves at every overflow and doubles after dynamic_growth_steps clean steps. No floor: 0 after 165 overflows in a row from
2^15, for ever. No ceiling: infinity after 2^127, for ever. dynamic=False is rejected by the class; a static scale is the
inner optimizer's loss_scale_factor.",
    source: "keras-team/keras keras/src/optimizers/loss_scale_optimizer.py; keras 3.15.1, torch backend",
    exceptions: &[
        Exception { law: "scale_stays_positive", reason: "there is no floor: the scale is exactly 0 after 165 overflows in a row" },
        Exception { law: "no_livelock_at_floor", reason: "a scale of 0 doubles to 0, for ever" },
        Exception { law: "growth_is_guarded", reason: "growth has no finite check: the scale reaches infinity" },
        Exception { law: "no_livelock_at_ceiling", reason: "an infinite scale halves to infinity, for ever" },
    ],
    build: build_torch,
};

/// The registry's entry of the jax backend.
pub(crate) const JAX: PolicyInfo = PolicyInfo {
    name: "keras3-jax",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::new(
            "initial_scale",
            &["init_scale", "scale"],
            Kind::Scale,
            Value::Real(32768.0),
            "scale of the first step",
        ),
        Key::new(
            "dynamic_growth_steps",
            &["growth_interval"],
            Kind::Integer { least: i64::MIN },
            Value::Integer(2000),
            "clean steps in a row that bring growth; 0 and below: never",
        ),
    ],
    summary: "Keras 3 on jax: as keras3, with subnormal scales flushed to 0",
    explanation: "\
As keras3, but XLA on the CPU flushes subnormals: 2^-126 halved is 0, after 142 overflows in a row from 2^15.",
    source: "keras-team/keras keras/src/optimizers/loss_scale_optimizer.py; keras 3.15.1, jax 0.10 backend",
    exceptions: &[
        Exception {
            law: "scale_stays_positive",
            reason: "there is no floor: the scale is exactly 0 after 142 overflows in a row, subnormals being flushed",
        },
        Exception {
            law: "no_livelock_at_floor",
            reason: "a scale of 0 doubles to 0, for ever",
        },
        Exception {
            law: "growth_is_guarded",
            reason: "growth has no finite check: the scale reaches infinity",
        },
        Exception {
            law: "no_livelock_at_ceiling",
            reason: "an infinite scale halves to infinity, for ever",
        },
    ],
    build: build_jax,
};

fn build_torch(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    build(settings, TORCH.name)
}

fn build_jax(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    build(settings, JAX.name)
}

fn build(settings: &Settings<'_>, name: &'static str) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(Keras3 {
        name,
        scale: settings.f32("initial_scale")?,
        step_counter: 0,
        dynamic_growth_steps: settings.i64("dynamic_growth_steps"),
    }))
}

#[derive(Debug, Clone)]
struct Keras3 {
    name: &'static str,
    scale: f32,
    step_counter: i64,
    dynamic_growth_steps: i64,
}

/// XLA on the CPU runs with subnormals flushed to zero.
pub(super) fn flush_subnormal(x: f32) -> f32 {
    if x.is_subnormal() { 0.0 } else { x }
}

impl Policy for Keras3 {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.scale;
        if observed.found_inf {
            self.scale *= 0.5;
            self.step_counter = 0;
        } else if self.step_counter == self.dynamic_growth_steps.saturating_sub(1) {
            self.scale *= 2.0;
            self.step_counter = 0;
        } else {
            self.step_counter += 1;
        }
        if self.name == JAX.name {
            self.scale = flush_subnormal(self.scale);
        }
        Ok(Update::of(observed, before, self.scale))
    }

    fn quiet_steps(&self) -> u64 {
        super::quiet::counts_to(self.step_counter, self.dynamic_growth_steps)
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.step_counter += steps as i64;
    }

    fn save(&self) -> State {
        state([
            ("dynamic_scale", number(self.scale.into())),
            ("step_counter", self.step_counter.into()),
        ])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(self.name, saved);
        self.scale = fields.f32("dynamic_scale")?;
        self.step_counter = fields.i64("step_counter")?;
        Ok(())
    }

    fn counters(&self) -> State {
        state([("step_counter", self.step_counter.into())])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
