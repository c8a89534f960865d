//! `flax`: `flax.training.dynamic_scale.DynamicScale`.
//!
//! ```text
//! grow = (t == W)
//! overflow:         S = max(S * backoff, minimum_scale)           no max where minimum_scale is None
//! clean and grow:   S = min(S * growth, f32 max)
//! t = 0 if grow or overflow, else t + 1
//! ```
//!
//! **W + 1 clean steps for every growth**, not W. The ceiling is f32's largest number, no power of two. XLA flushes
//! subnormals, so without a minimum the scale falls from 2^-126 to 0. The class does not skip by itself: the user gets a flag
//! and must select. `to_state_dict` holds scale and `fin_steps`; factors and interval are static fields.

use super::registry::{Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "flax",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::new("growth_factor", &[], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth"),
        Key::new("backoff_factor", &[], Kind::Between(0.0, 1.0), Value::Real(0.5), "multiplier on backoff"),
        Key::new("growth_interval", &[], Kind::Integer { least: i64::MIN }, Value::Integer(2000), "growth after W + 1 clean steps"),
        Key::new("scale", &["init_scale"], Kind::Scale, Value::Real(65536.0), "scale of the first step"),
        Key::new("minimum_scale", &["min_scale"], Kind::OptionalScale, Value::Real(1.1754943508222875e-38), "floor, 2^-126; or none"),
    ],
    summary: "Flax DynamicScale: halve on overflow, double after 2001 clean steps",
    explanation: "\
Backs off at every overflow, never below minimum_scale (2^-126); grows after growth_interval + 1 clean steps, every time,
clamped to f32's largest number. Quirks: the period is one step longer than its name says. The step is not skipped for
you: the class returns a flag, and the caller must select the old parameters; here that is taken as done.",
    source: "google/flax 18f8f311 flax/training/dynamic_scale.py; flax 0.12.8, jax 0.10.2",
    exceptions: &[],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(Flax {
        scale: settings.f32("scale")?,
        fin_steps: 0,
        growth_factor: settings.f32("growth_factor")?,
        backoff_factor: settings.f32("backoff_factor")?,
        growth_interval: settings.i64("growth_interval"),
        minimum_scale: settings.optional("minimum_scale").map(|x| x as f32),
    }))
}

#[derive(Debug, Clone)]
struct Flax {
    scale: f32,
    fin_steps: i64,
    growth_factor: f32,
    backoff_factor: f32,
    growth_interval: i64,
    minimum_scale: Option<f32>,
}

impl Policy for Flax {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.scale;
        let grow = self.fin_steps == self.growth_interval;
        if observed.found_inf {
            self.scale = super::keras3::flush_subnormal(self.scale * self.backoff_factor);
            if let Some(minimum_scale) = self.minimum_scale {
                self.scale = self.scale.max(minimum_scale);
            }
        } else if grow {
            self.scale = (self.scale * self.growth_factor).min(f32::MAX);
        }
        self.fin_steps = if grow || observed.found_inf {
            0
        } else {
            self.fin_steps + 1
        };
        Ok(Update::of(observed, before, self.scale))
    }

    fn quiet_steps(&self) -> u64 {
        // Growth comes in the step after the interval is full.
        super::quiet::counts_to(self.fin_steps, self.growth_interval.saturating_add(1))
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.fin_steps += steps as i64;
    }

    fn save(&self) -> State {
        state([
            ("scale", number(self.scale.into())),
            ("fin_steps", self.fin_steps.into()),
        ])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(INFO.name, saved);
        self.scale = fields.f32("scale")?;
        self.fin_steps = fields.i64("fin_steps")?;
        Ok(())
    }

    fn counters(&self) -> State {
        state([("fin_steps", self.fin_steps.into())])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
