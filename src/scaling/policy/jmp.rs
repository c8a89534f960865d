//! `jmp` and `jmp-jit`: DeepMind's `jmp.DynamicLossScale`, eager and across a jit boundary.
//!
//! ```text
//! overflow:  S = max(min, S / F);  t = 0
//! clean:     if t == W - 1:  v = S * F;  if finite(v): S = v
//!            t = (t + 1) mod W
//! ```
//!
//! Flattening the object as a pytree drops `min_loss_scale`: after any jit, pmap or tree_map **the floor is 1 whatever was
//! given**. Across jit, the division by a constant is compiled to a product with r32(1/F), which differs in the last bit
//! for factors that are no power of two. A start below the floor jumps up to it. The class does not skip by itself. A
//! checkpoint is the flattened pytree: no floor.

use super::registry::{Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry of eager use.
pub(crate) const EAGER: PolicyInfo = PolicyInfo {
    name: "jmp",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::mandatory("loss_scale", &["init_scale", "scale"], Kind::Scale, Value::Real(32768.0), "scale of the first step"),
        Key::new("period", &["growth_interval"], Kind::Integer { least: 1 }, Value::Integer(2000), "clean steps in a row that bring growth"),
        Key::new("factor", &["growth_factor"], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth, divisor on overflow"),
        Key::new("min_loss_scale", &["min_scale"], Kind::Scale, Value::Real(1.0), "floor; lost at the first jit, pmap or tree_map"),
    ],
    summary: "jmp DynamicLossScale, eager: halve on overflow with floor 1",
    explanation: "\
Divides by factor at every overflow, never below min_loss_scale; multiplies after period clean steps, unless that gives
infinity. Quirks: saving and loading (and any jit or tree_map, see jmp-jit) loses min_loss_scale: the floor is then 1. A
start below the floor jumps up to it. The caller must select the old parameters on overflow; that is taken as done.
loss_scale is mandatory, the documentation uses 2^15.",
    source: "google-deepmind/jmp 9c1cdbb jmp/_src/loss_scale.py; jmp 0.0.4, jax 0.10.2",
    exceptions: &[],
    build: build_eager,
};

/// The registry's entry of use across jit.
pub(crate) const JIT: PolicyInfo = PolicyInfo {
    name: "jmp-jit",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::mandatory("loss_scale", &["init_scale", "scale"], Kind::Scale, Value::Real(32768.0), "scale of the first step"),
        Key::new("period", &["growth_interval"], Kind::Integer { least: 1 }, Value::Integer(2000), "clean steps in a row that bring growth"),
        Key::new("factor", &["growth_factor"], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth, divisor on overflow"),
        Key::new("min_loss_scale", &["min_scale"], Kind::Scale, Value::Real(1.0), "floor; lost at the first jit, pmap or tree_map"),
    ],
    summary: "jmp DynamicLossScale across jit: the floor is 1 whatever was given",
    explanation: "\
As jmp, where the state crosses a jit boundary each step: min_loss_scale is lost and 1 in its place, and the division
is compiled to a product with the rounded inverse of factor.",
    source: "google-deepmind/jmp 9c1cdbb jmp/_src/loss_scale.py; jmp 0.0.4, jax 0.10.2",
    exceptions: &[],
    build: build_jit,
};

fn build_eager(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    let min_loss_scale = settings.f32("min_loss_scale")?;
    build(settings, EAGER.name, min_loss_scale)
}

fn build_jit(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    build(settings, JIT.name, 1.0)
}

fn build(
    settings: &Settings<'_>,
    name: &'static str,
    min_loss_scale: f32,
) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(Jmp {
        name,
        loss_scale: settings.f32("loss_scale")?,
        counter: 0,
        period: settings.i64("period"),
        factor: settings.f32("factor")?,
        min_loss_scale,
    }))
}

#[derive(Debug, Clone)]
struct Jmp {
    name: &'static str,
    loss_scale: f32,
    counter: i64,
    period: i64,
    factor: f32,
    min_loss_scale: f32,
}

impl Policy for Jmp {
    fn loss_scale(&self) -> f64 {
        self.loss_scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.loss_scale;
        if observed.found_inf {
            let cut = if self.name == JIT.name {
                before * (1.0 / self.factor)
            } else {
                before / self.factor
            };
            self.loss_scale = cut.max(self.min_loss_scale);
            self.counter = 0;
        } else {
            if self.counter == self.period - 1 {
                let grown = self.loss_scale * self.factor;
                if grown.is_finite() {
                    self.loss_scale = grown;
                }
            }
            self.counter = (self.counter + 1) % self.period;
        }
        Ok(Update::of(observed, before, self.loss_scale))
    }

    fn quiet_steps(&self) -> u64 {
        super::quiet::counts_to(self.counter, self.period)
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.counter += steps as i64;
    }

    fn save(&self) -> State {
        state([
            ("loss_scale", number(self.loss_scale.into())),
            ("counter", self.counter.into()),
            ("period", self.period.into()),
            ("factor", number(self.factor.into())),
        ])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(self.name, saved);
        self.loss_scale = fields.f32("loss_scale")?;
        self.counter = fields.i64("counter")?;
        self.period = fields.window("period")?;
        self.factor = fields.f64("factor")? as f32;
        // The floor is no part of the pytree: unflattening gives the class's default.
        self.min_loss_scale = 1.0;
        Ok(())
    }

    fn counters(&self) -> State {
        state([
            ("counter", self.counter.into()),
            ("min_loss_scale", number(self.min_loss_scale.into())),
        ])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
