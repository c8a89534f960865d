//! `mindspore-dynamic-loss-scaler`: MindSpore's `amp.DynamicLossScaler`.
//!
//! ```text
//! overflow:  S = max(S / F, 1);  t = 0
//! clean:     if t == W - 1:  v = S * F;  if finite(v): S = v
//!            t = (t + 1) mod W
//! ```
//!
//! jmp's rule with a fixed floor of 1, in f32. All three arguments are mandatory.

use super::registry::{Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "mindspore-dynamic-loss-scaler",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::mandatory("scale_value", &["init_scale", "scale"], Kind::Scale, Value::Real(16777216.0), "scale of the first step"),
        Key::mandatory("scale_factor", &["growth_factor"], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth, divisor on overflow"),
        Key::mandatory("scale_window", &["growth_interval"], Kind::Integer { least: 1 }, Value::Integer(2000), "clean steps in a row that bring growth"),
    ],
    summary: "MindSpore amp.DynamicLossScaler: halve with floor 1, growth to infinity refused",
    explanation: "\
Divides by scale_factor at every overflow, never below 1; multiplies after scale_window clean steps, unless that gives
infinity. All arguments are mandatory in the class; those shown are the manager's.",
    source: "mindspore 2.10 amp.DynamicLossScaler",
    exceptions: &[],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(DynamicLossScaler {
        scale_value: settings.f32("scale_value")?,
        counter: 0,
        scale_factor: settings.f32("scale_factor")?,
        scale_window: settings.i64("scale_window"),
    }))
}

#[derive(Debug, Clone)]
struct DynamicLossScaler {
    scale_value: f32,
    counter: i64,
    scale_factor: f32,
    scale_window: i64,
}

impl Policy for DynamicLossScaler {
    fn loss_scale(&self) -> f64 {
        self.scale_value.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.scale_value;
        if observed.found_inf {
            self.scale_value = (self.scale_value / self.scale_factor).max(1.0);
            self.counter = 0;
        } else {
            if self.counter == self.scale_window - 1 {
                let grown = self.scale_value * self.scale_factor;
                if grown.is_finite() {
                    self.scale_value = grown;
                }
            }
            self.counter = (self.counter + 1) % self.scale_window;
        }
        Ok(Update::of(observed, before, self.scale_value))
    }

    fn quiet_steps(&self) -> u64 {
        super::quiet::counts_to(self.counter, self.scale_window)
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.counter += steps as i64;
    }

    fn save(&self) -> State {
        state([
            ("scale_value", number(self.scale_value.into())),
            ("counter", self.counter.into()),
        ])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(INFO.name, saved);
        self.scale_value = fields.f32("scale_value")?;
        self.counter = fields.i64("counter")?;
        Ok(())
    }

    fn counters(&self) -> State {
        state([("counter", self.counter.into())])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
