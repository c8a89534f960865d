//! `apex-update-scale-hysteresis`: apex's CUDA kernel `update_scale_hysteresis`.
//!
//! ```text
//! overflow:  h = h - 1;  t = 0;  if h <= 0: S = r32(S * backoff)
//! clean:     torch-amp's growth branch;  h = hysteresis
//! ```
//!
//! *Every* clean step refills the hysteresis, so it counts overflows in a row; Megatron refills only at a growth. Once
//! used up, each further overflow of the burst cuts. No floor. The kernel has no defaults of its own: those of
//! `torch-amp` with a hysteresis of 2 stand in.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "apex-update-scale-hysteresis",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::mandatory("init_scale", &["scale"], Kind::Scale, Value::Real(65536.0), "scale of the first step"),
        Key::mandatory("growth_factor", &[], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth"),
        Key::mandatory("backoff_factor", &[], Kind::Between(0.0, 1.0), Value::Real(0.5), "multiplier on backoff"),
        Key::mandatory("growth_interval", &[], Kind::Integer { least: i64::MIN }, Value::Integer(2000), "clean steps in a row that bring growth"),
        Key::mandatory("hysteresis", &[], Kind::Integer { least: i64::MIN }, Value::Integer(2), "overflows in a row that bring backoff"),
    ],
    summary: "apex CUDA kernel: torch-amp, backing off only after hysteresis overflows in a row",
    explanation: "\
As torch-amp, but only the hysteresis-th overflow in a row backs off, and every later one of the same burst. A single
clean step forgives all. No floor: from 65536 the scale is 0 after 167 overflows in a row with hysteresis 2. The kernel has
no defaults; those shown are torch-amp's, with hysteresis 2.",
    source: "NVIDIA/apex 6424da3b csrc/update_scale_hysteresis.cu",
    exceptions: &[
        Exception { law: "scale_stays_positive", reason: "there is no floor: the scale is exactly 0 after 167 overflows in a row with hysteresis 2" },
        Exception { law: "no_livelock_at_floor", reason: "a scale of 0 doubles to 0, for ever" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    let hysteresis = settings.i64("hysteresis");
    Ok(Box::new(Hysteresis {
        scale: settings.f32("init_scale")?,
        growth_tracker: 0,
        hysteresis_tracker: hysteresis,
        growth_factor: settings.f64("growth_factor"),
        backoff_factor: settings.f64("backoff_factor"),
        growth_interval: settings.i64("growth_interval"),
        hysteresis,
    }))
}

#[derive(Debug, Clone)]
struct Hysteresis {
    scale: f32,
    growth_tracker: i64,
    hysteresis_tracker: i64,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: i64,
    hysteresis: i64,
}

impl Policy for Hysteresis {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.scale;
        if observed.found_inf {
            self.hysteresis_tracker = self.hysteresis_tracker.saturating_sub(1);
            self.growth_tracker = 0;
            if self.hysteresis_tracker <= 0 {
                self.scale = (f64::from(self.scale) * self.backoff_factor) as f32;
            }
        } else {
            super::torch_amp::grow(
                &mut self.scale,
                &mut self.growth_tracker,
                self.growth_factor,
                self.growth_interval,
            );
            self.hysteresis_tracker = self.hysteresis;
        }
        Ok(Update::of(observed, before, self.scale))
    }

    fn quiet_steps(&self) -> u64 {
        super::quiet::counts_to(self.growth_tracker, self.growth_interval)
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.growth_tracker += steps as i64;
        if steps > 0 {
            self.hysteresis_tracker = self.hysteresis;
        }
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
