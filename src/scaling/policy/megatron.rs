//! `megatron`: Megatron-LM's `DynamicGradScaler`.
//!
//! ```text
//! overflow:  t = 0;  h = h - 1;  if h <= 0: S = max(r32(S * backoff), min)
//! clean:     t = t + 1;  if t == W:  t = 0;  h = H0;  S = r32(S * growth)
//! ```
//!
//! Everything is f32, the factors too. The docstring says that the hysteresis counts *consecutive* NaNs; the code refills it
//! only at a growth, so separated ones add up, and after the first cut every overflow cuts until the next growth. There is
//! **no finite check**: the scale grows to inf, and inf * 0.5 stays inf. `state_dict` holds scale and both trackers.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Doubling, Floor, Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "megatron",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::mandatory("initial_scale", &["init_scale", "scale", "initial_loss_scale"], Kind::Scale, Value::Real(4294967296.0), "scale of the first step"),
        Key::mandatory("min_scale", &["min_loss_scale"], Kind::Scale, Value::Real(1.0), "floor"),
        Key::mandatory("growth_factor", &[], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth"),
        Key::mandatory("backoff_factor", &[], Kind::Between(0.0, 1.0), Value::Real(0.5), "multiplier on backoff"),
        Key::mandatory("growth_interval", &["loss_scale_window"], Kind::Integer { least: 1 }, Value::Integer(1000), "clean steps in a row that bring growth"),
        Key::mandatory("hysteresis", &[], Kind::Integer { least: 1 }, Value::Integer(2), "overflows since the last growth until one backs off"),
    ],
    summary: "Megatron-LM: hysteresis 2 refilled at a growth, floor 1, grows without a ceiling",
    explanation: "\
The first hysteresis - 1 overflows after a growth are forgiven, every later one backs off, never below min_scale; growth
after growth_interval clean steps.
Quirks: the docstring calls the hysteresis consecutive, but only a growth refills it. No finite check: the scale can
grow to infinity and then stays there. Options: --initial-loss-scale, --min-loss-scale, --loss-scale-window, --hysteresis; the
factors are fixed by the caller.",
    source: "NVIDIA/Megatron-LM d98e8a64dd megatron/core/optimizer/grad_scaler.py; megatron-core 0.16.1",
    exceptions: &[
        Exception { law: "growth_is_guarded", reason: "growth has no finite check: the scale reaches infinity" },
        Exception { law: "no_livelock_at_ceiling", reason: "an infinite scale halves to infinity, for ever" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    let hysteresis = settings.i64("hysteresis");
    let (scale, min_scale) = (settings.f32("initial_scale")?, settings.f32("min_scale")?);
    if min_scale > scale {
        return Err(settings.bad(
            "min_scale",
            "at most initial_scale, which the constructor asserts",
        ));
    }
    Ok(Box::new(Megatron {
        scale,
        growth_tracker: 0,
        hysteresis_tracker: hysteresis,
        min_scale,
        growth_factor: settings.f32("growth_factor")?,
        backoff_factor: settings.f32("backoff_factor")?,
        growth_interval: settings.i64("growth_interval"),
        hysteresis,
    }))
}

#[derive(Debug, Clone)]
struct Megatron {
    scale: f32,
    growth_tracker: i64,
    hysteresis_tracker: i64,
    min_scale: f32,
    growth_factor: f32,
    backoff_factor: f32,
    growth_interval: i64,
    hysteresis: i64,
}

impl Policy for Megatron {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.scale;
        if observed.found_inf {
            self.growth_tracker = 0;
            self.hysteresis_tracker = self.hysteresis_tracker.saturating_sub(1);
            if self.hysteresis_tracker <= 0 {
                self.scale = (self.scale * self.backoff_factor).max(self.min_scale);
            }
        } else {
            self.growth_tracker += 1;
            if self.growth_tracker == self.growth_interval {
                self.growth_tracker = 0;
                self.hysteresis_tracker = self.hysteresis;
                self.scale *= self.growth_factor;
            }
        }
        Ok(Update::of(observed, before, self.scale))
    }

    fn quiet_steps(&self) -> u64 {
        super::quiet::counts_to(self.growth_tracker, self.growth_interval)
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.growth_tracker += steps as i64;
    }

    fn doubling(&self) -> Option<Doubling> {
        let plain = self.growth_factor == 2.0 && self.backoff_factor == 0.5;
        let fresh = self.growth_tracker == 0 && self.hysteresis_tracker == self.hysteresis;
        (plain && fresh).then(|| Doubling {
            hysteresis: self.hysteresis.max(1) as u64,
            floor: Floor::Stays(self.min_scale.into()),
            in_f32: true,
            ..Doubling::plain(self.growth_interval as u64, f64::INFINITY)
        })
    }

    fn fingerprint(&self) -> [u64; 2] {
        // Below zero every overflow cuts, however far below.
        let hysteresis = self.hysteresis_tracker.max(0) as u64;
        [
            u64::from(self.scale.to_bits()) | hysteresis << 32,
            self.growth_tracker as u64,
        ]
    }

    fn save(&self) -> State {
        state([
            ("scale", number(self.scale.into())),
            ("growth_tracker", self.growth_tracker.into()),
            ("hysteresis_tracker", self.hysteresis_tracker.into()),
        ])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(INFO.name, saved);
        self.scale = fields.f32("scale")?;
        self.growth_tracker = fields.i64("growth_tracker")?;
        self.hysteresis_tracker = fields.i64("hysteresis_tracker")?;
        Ok(())
    }

    fn counters(&self) -> State {
        state([
            ("growth_tracker", self.growth_tracker.into()),
            ("hysteresis_tracker", self.hysteresis_tracker.into()),
        ])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
