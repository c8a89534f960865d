//! `paddle-static-op`: Paddle's `update_loss_scaling` kernel, what static graphs run.
//!
//! ```text
//! overflow:  good = 0;  bad = bad + 1;   if bad == K:   S = max(r32(S * decr), 1);  bad = 0
//! clean:     bad = 0;   good = good + 1; if good == W:  v = r32(S * incr);  if finite(v): S = v;  good = 0
//! ```
//!
//! The rule of `paddle` with a floor of 1 and a ceiling, and other defaults. The kernel also zeroes the gradients on
//! overflow.

use super::registry::{Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "paddle-static-op",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::mandatory("init_loss_scaling", &["init_scale", "scale"], Kind::Scale, Value::Real(32768.0), "scale of the first step"),
        Key::mandatory("incr_ratio", &["growth_factor"], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth"),
        Key::mandatory("decr_ratio", &["backoff_factor"], Kind::Between(0.0, 1.0), Value::Real(0.8), "multiplier on backoff"),
        Key::mandatory("incr_every_n_steps", &["growth_interval"], Kind::Integer { least: i64::MIN }, Value::Integer(1000), "clean steps in a row that bring growth"),
        Key::mandatory("decr_every_n_nan_or_inf", &["hysteresis"], Kind::Integer { least: i64::MIN }, Value::Integer(2), "overflows in a row that bring each backoff"),
    ],
    summary: "Paddle static graph kernel: cut to 0.8 after 2 overflows in a row, floor 1",
    explanation: "\
As paddle, but with a floor of 1 and growth that is refused where it would give infinity, and with the static graph's
defaults: 2^15, 1000 clean steps, 2 overflows in a row, ratios 2 and 0.8.",
    source: "PaddlePaddle/Paddle paddle/phi/kernels/impl/amp_kernel_impl.h; paddlepaddle 3.3.1",
    exceptions: &[],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(PaddleStaticOp {
        scale: settings.f32("init_loss_scaling")?,
        good: 0,
        bad: 0,
        incr_ratio: settings.f32("incr_ratio")?,
        decr_ratio: settings.f32("decr_ratio")?,
        incr_every_n_steps: settings.i64("incr_every_n_steps"),
        decr_every_n_nan_or_inf: settings.i64("decr_every_n_nan_or_inf"),
    }))
}

#[derive(Debug, Clone)]
struct PaddleStaticOp {
    scale: f32,
    good: i64,
    bad: i64,
    incr_ratio: f32,
    decr_ratio: f32,
    incr_every_n_steps: i64,
    decr_every_n_nan_or_inf: i64,
}

impl Policy for PaddleStaticOp {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.scale;
        if observed.found_inf {
            self.good = 0;
            self.bad += 1;
            if self.bad == self.decr_every_n_nan_or_inf {
                self.scale = (self.scale * self.decr_ratio).max(1.0);
                self.bad = 0;
            }
        } else {
            self.bad = 0;
            self.good += 1;
            if self.good == self.incr_every_n_steps {
                let grown = self.scale * self.incr_ratio;
                if grown.is_finite() {
                    self.scale = grown;
                }
                self.good = 0;
            }
        }
        Ok(Update::of(observed, before, self.scale))
    }

    fn quiet_steps(&self) -> u64 {
        super::quiet::counts_to(self.good, self.incr_every_n_steps)
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.good += steps as i64;
        if steps > 0 {
            self.bad = 0;
        }
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
