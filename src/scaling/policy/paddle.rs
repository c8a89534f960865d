//! `paddle`: `paddle.amp.GradScaler` in dynamic graphs.
//!
//! ```text
//! overflow:  good = 0;  bad = bad + 1;   if bad == K:   S = r32(S * decr);  bad = 0
//! clean:     bad = 0;   good = good + 1; if good == W:  S = r32(S * incr);  good = 0
//! ```
//!
//! K counts overflows *in a row for each cut* (the docs say accumulated): overflows that alternate with clean steps never
//! cut where K is 2. The ratios act as f32. No floor (0 after 166 skips from 65536) and no ceiling (inf, for ever). The
//! static graph's kernel differs in both: `paddle-static-op`. `state_dict` is complete.
//!
//! Not followed: with numpy 2.4 the real class raises `TypeError` at its first cut, in a message's formatting.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "paddle",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::new("init_loss_scaling", &["init_scale", "scale"], Kind::Scale, Value::Real(65536.0), "scale of the first step"),
        Key::new("incr_ratio", &["growth_factor"], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth"),
        Key::new("decr_ratio", &["backoff_factor"], Kind::Between(0.0, 1.0), Value::Real(0.5), "multiplier on backoff"),
        Key::new("incr_every_n_steps", &["growth_interval"], Kind::Integer { least: i64::MIN }, Value::Integer(2000), "clean steps in a row that bring growth"),
        Key::new("decr_every_n_nan_or_inf", &["hysteresis"], Kind::Integer { least: i64::MIN }, Value::Integer(1), "overflows in a row that bring each backoff"),
        Key::new("use_dynamic_loss_scaling", &[], Kind::Flag, Value::Flag(true), "false: a constant; overflowing steps are still skipped"),
    ],
    summary: "Paddle dygraph GradScaler: cut after K overflows in a row, no floor, no ceiling",
    explanation: "\
Backs off when decr_every_n_nan_or_inf overflows came in a row, for each cut anew; grows after incr_every_n_steps clean
steps. A clean step clears the overflow counter. No floor: 0 after 166 overflows in a row. No ceiling: the scale
becomes infinite and every step is then skipped. The documentation calls the overflows accumulated; they are
consecutive. The base class AmpScaler has other defaults (2^15, 1000).",
    source: "PaddlePaddle/Paddle python/paddle/amp/grad_scaler.py; paddlepaddle 3.3.1",
    exceptions: &[
        Exception { law: "scale_stays_positive", reason: "there is no floor: the scale is exactly 0 after 166 overflows in a row" },
        Exception { law: "no_livelock_at_floor", reason: "a scale of 0 doubles to 0, for ever" },
        Exception { law: "growth_is_guarded", reason: "growth has no finite check: the scale reaches infinity" },
        Exception { law: "no_livelock_at_ceiling", reason: "an infinite scale halves to infinity, for ever" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(Paddle {
        scale: settings.f32("init_loss_scaling")?,
        incr_count: 0,
        decr_count: 0,
        incr_ratio: settings.f32("incr_ratio")?,
        decr_ratio: settings.f32("decr_ratio")?,
        incr_every_n_steps: settings.i64("incr_every_n_steps"),
        decr_every_n_nan_or_inf: settings.i64("decr_every_n_nan_or_inf"),
        dynamic: settings.flag("use_dynamic_loss_scaling"),
    }))
}

#[derive(Debug, Clone)]
struct Paddle {
    scale: f32,
    incr_count: i64,
    decr_count: i64,
    incr_ratio: f32,
    decr_ratio: f32,
    incr_every_n_steps: i64,
    decr_every_n_nan_or_inf: i64,
    dynamic: bool,
}

impl Policy for Paddle {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.scale;
        if !self.dynamic {
            return Ok(Update::of(observed, before, before));
        }
        if observed.found_inf {
            self.incr_count = 0;
            self.decr_count += 1;
            if self.decr_count == self.decr_every_n_nan_or_inf {
                self.scale *= self.decr_ratio;
                self.decr_count = 0;
            }
        } else {
            self.decr_count = 0;
            self.incr_count += 1;
            if self.incr_count == self.incr_every_n_steps {
                self.scale *= self.incr_ratio;
                self.incr_count = 0;
            }
        }
        Ok(Update::of(observed, before, self.scale))
    }

    fn quiet_steps(&self) -> u64 {
        match self.dynamic {
            true => super::quiet::counts_to(self.incr_count, self.incr_every_n_steps),
            false => u64::MAX,
        }
    }

    fn pass_quietly(&mut self, steps: u64) {
        if self.dynamic && steps > 0 {
            self.incr_count += steps as i64;
            self.decr_count = 0;
        }
    }

    fn save(&self) -> State {
        state([
            ("scale", number(self.scale.into())),
            ("incr_ratio", number(self.incr_ratio.into())),
            ("decr_ratio", number(self.decr_ratio.into())),
            ("incr_every_n_steps", self.incr_every_n_steps.into()),
            (
                "decr_every_n_nan_or_inf",
                self.decr_every_n_nan_or_inf.into(),
            ),
            ("incr_count", self.incr_count.into()),
            ("decr_count", self.decr_count.into()),
            ("use_dynamic_loss_scaling", self.dynamic.into()),
        ])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(INFO.name, saved);
        *self = Paddle {
            scale: fields.f32("scale")?,
            incr_count: fields.i64("incr_count")?,
            decr_count: fields.i64("decr_count")?,
            incr_ratio: fields.f64("incr_ratio")? as f32,
            decr_ratio: fields.f64("decr_ratio")? as f32,
            incr_every_n_steps: fields.i64("incr_every_n_steps")?,
            decr_every_n_nan_or_inf: fields.i64("decr_every_n_nan_or_inf")?,
            dynamic: fields.flag("use_dynamic_loss_scaling")?,
        };
        Ok(())
    }

    fn counters(&self) -> State {
        state([
            ("incr_count", self.incr_count.into()),
            ("decr_count", self.decr_count.into()),
        ])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
