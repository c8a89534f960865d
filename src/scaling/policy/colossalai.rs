//! `colossalai`: ColossalAI's `DynamicGradScaler`.
//!
//! ```text
//! overflow:  h = h + 1;  t = 0;  if h >= H: S = r32(S * backoff), at least min
//! clean:     t = t + 1;  if t == W:  t = 0;  h = 0;  S = r32(S * growth), at most max
//! ```
//!
//! Megatron's rule with an optional ceiling, counting up; H = 0 acts as 1; a min or max of 0 counts as none. Without a max
//! there is no finite check. `state_dict` holds scale, factors and the hysteresis *setting*, but **neither counter**: a
//! resume restarts the window and refills the hysteresis; interval, min and max are not saved either.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "colossalai",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::new("initial_scale", &["init_scale", "scale"], Kind::Scale, Value::Real(65536.0), "scale of the first step"),
        Key::new("growth_factor", &[], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth"),
        Key::new("backoff_factor", &[], Kind::Between(0.0, 1.0), Value::Real(0.5), "multiplier on backoff"),
        Key::new("growth_interval", &[], Kind::Integer { least: i64::MIN }, Value::Integer(1000), "clean steps in a row that bring growth"),
        Key::two("min_scale", &[], Kind::OptionalScale, Value::None, Value::Real(1.0), "floor; none and 0 are no floor"),
        Key::two("max_scale", &[], Kind::OptionalScale, Value::None, Value::Real(4294967296.0), "ceiling; none and 0 are no ceiling"),
        Key::new("hysteresis", &[], Kind::Integer { least: 0 }, Value::Integer(2), "overflows since the last growth until one backs off"),
    ],
    summary: "ColossalAI: Megatron with an optional ceiling; checkpoints lose the counters",
    explanation: "\
The first hysteresis - 1 overflows after a growth are forgiven, every later one backs off; growth after growth_interval
clean steps. The class has neither floor nor ceiling (the scale reaches 0 or infinity); the mixed-precision mixin sets 1
and 2^32. Plugins differ: hybrid parallel has interval 2000.
Quirks: a checkpoint saves neither the clean-step counter nor the overflow counter, so a resume restarts the window and
refills the hysteresis.",
    source: "hpcaitech/ColossalAI 4f9953be3 colossalai/amp/naive_amp/grad_scaler/dynamic_grad_scaler.py",
    exceptions: &[
        Exception { law: "scale_stays_positive", reason: "there is no floor: the scale is exactly 0 after 167 overflows in a row without min_scale" },
        Exception { law: "no_livelock_at_floor", reason: "a scale of 0 doubles to 0, for ever" },
        Exception { law: "growth_is_guarded", reason: "growth has no finite check: the scale reaches infinity" },
        Exception { law: "no_livelock_at_ceiling", reason: "an infinite scale halves to infinity, for ever" },
        Exception { law: "save_load_continues", reason: "neither counter is saved: a resume restarts the window and refills the hysteresis" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    let limit = |key: &str| match settings.optional(key) {
        None => Ok(None),
        Some(_) => settings.f32(key).map(Some),
    };
    Ok(Box::new(Colossal {
        scale: settings.f32("initial_scale")?,
        growth_step: 0,
        hysteresis_step: 0,
        growth_factor: settings.f32("growth_factor")?,
        backoff_factor: settings.f32("backoff_factor")?,
        growth_interval: settings.i64("growth_interval"),
        min_scale: limit("min_scale")?,
        max_scale: limit("max_scale")?,
        hysteresis: settings.i64("hysteresis"),
    }))
}

#[derive(Debug, Clone)]
struct Colossal {
    scale: f32,
    growth_step: i64,
    hysteresis_step: i64,
    growth_factor: f32,
    backoff_factor: f32,
    growth_interval: i64,
    min_scale: Option<f32>,
    max_scale: Option<f32>,
    hysteresis: i64,
}

impl Policy for Colossal {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.scale;
        if observed.found_inf {
            self.hysteresis_step += 1;
            self.growth_step = 0;
            if self.hysteresis_step >= self.hysteresis {
                self.scale *= self.backoff_factor;
                if let Some(min_scale) = self.min_scale {
                    self.scale = self.scale.max(min_scale);
                }
            }
        } else {
            self.growth_step += 1;
            if self.growth_step == self.growth_interval {
                self.growth_step = 0;
                self.hysteresis_step = 0;
                self.scale *= self.growth_factor;
                if let Some(max_scale) = self.max_scale {
                    self.scale = self.scale.min(max_scale);
                }
            }
        }
        Ok(Update::of(observed, before, self.scale))
    }

    fn quiet_steps(&self) -> u64 {
        super::quiet::counts_to(self.growth_step, self.growth_interval)
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.growth_step += steps as i64;
    }

    fn save(&self) -> State {
        state([
            ("scale", number(self.scale.into())),
            ("growth_factor", number(self.growth_factor.into())),
            ("backoff_factor", number(self.backoff_factor.into())),
            ("hysteresis", self.hysteresis.into()),
        ])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(INFO.name, saved);
        self.scale = fields.f32("scale")?;
        self.growth_factor = fields.f64("growth_factor")? as f32;
        self.backoff_factor = fields.f64("backoff_factor")? as f32;
        self.hysteresis = fields.i64("hysteresis")?;
        Ok(())
    }

    fn counters(&self) -> State {
        state([
            ("growth_step", self.growth_step.into()),
            ("hysteresis_step", self.hysteresis_step.into()),
        ])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
