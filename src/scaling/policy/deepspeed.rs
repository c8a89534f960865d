//! `deepspeed` and `deepspeed-legacy`: DeepSpeed's `DynamicLossScaler` (ZeRO 1, 2 and 3).
//!
//! ```text
//! overflow:  if H0 == 1 or h == 1:  if S == min and raise: raise Exception;  S = max(S / F, min)
//!            else:                  h = h - 1
//!            last = it
//! clean:     if consecutive: h = H0
//!            if due(it - last):  if not consecutive: h = H0;  S = S * F
//! then:      it = it + 1                                                     (it from 0, last from -1)
//!
//! due(k), legacy:         k mod W == 0
//! due(k), from v0.17.1:   k - 1 > 0 and (k - 1) mod W == 0
//! ```
//!
//! So a growth needs W + 1 clean steps at the start and after an overflow, then every W; before v0.17.1 (commit e440506be)
//! it was W. The hysteresis is refilled **only at a growth** unless `consecutive_hysteresis`: the first overflow after a
//! growth is forgiven, every later one cuts, however far apart. A forgiven overflow is still a skipped step and delays growth.
//! At the floor the next cut raises a plain `Exception`; the comparison is equality, so a start below the floor first
//! jumps up to it. The object is pickled whole.
//!
//! `deepspeed` is 0.19.8, whose class makes every argument but the raise flag mandatory and fixes the factor to 2.
//! `deepspeed-legacy` is the class of 2025-02.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Doubling, Floor, Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry of `deepspeed`.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "deepspeed",
    aliases: &[],
    scale_type: ScaleType::F64,
    keys: &[
        Key::mandatory("init_scale", &["scale"], Kind::Scale, Value::Real(65536.0), "scale of the first step; initial_scale_power 16 in the config"),
        Key::mandatory("scale_window", &["growth_interval", "loss_scale_window"], Kind::Integer { least: 1 }, Value::Integer(1000), "growth after W + 1 clean steps, then every W"),
        Key::mandatory("min_scale", &["min_loss_scale"], Kind::Within(0.0, f64::INFINITY), Value::Real(1.0), "floor"),
        Key::mandatory("delayed_shift", &["hysteresis"], Kind::Integer { least: 1 }, Value::Integer(2), "overflows since the last growth until one cuts; hysteresis in the config"),
        Key::new("consecutive_hysteresis", &[], Kind::Flag, Value::Flag(false), "refill the hysteresis at every clean step instead of at a growth"),
        Key::new("raise_error_at_min_scale", &[], Kind::Flag, Value::Flag(true), "raise at the floor instead of clamping; the config cannot reach it"),
    ],
    summary: "DeepSpeed ZeRO from v0.17.1: hysteresis 2, growth after W + 1 clean steps, raises at the floor",
    explanation: "\
The first delayed_shift - 1 overflows after a growth are forgiven (skipped, but the scale stays), every later one halves.
A growth comes W + 1 clean steps after the start or an overflow, then every W steps. The floor raises Exception: with
the config's defaults at the 18th overflow in a row.
Quirks: the forgiveness is refilled only at a growth, unless consecutive_hysteresis (then at every clean step). A start
below min_scale jumps up to it at the first cut. No ceiling. The scaler is pickled whole into checkpoints.",
    source: "deepspeed 0.19.8 deepspeed/runtime/fp16/loss_scaler.py",
    exceptions: &[
        Exception { law: "growth_is_guarded", reason: "a Python float without a ceiling; the scaled loss is infinite long before, and that overflow brings it back" },
        Exception { law: "no_livelock_at_ceiling", reason: "from an infinite float no division comes back" },
    ],
    build: build_current,
};

/// The registry's entry of `deepspeed-legacy`.
pub(crate) const LEGACY: PolicyInfo = PolicyInfo {
    name: "deepspeed-legacy",
    aliases: &[],
    scale_type: ScaleType::F64,
    keys: &[
        Key::two(
            "init_scale",
            &["scale"],
            Kind::Scale,
            Value::Real(4294967296.0),
            Value::Real(65536.0),
            "scale of the first step",
        ),
        Key::new(
            "scale_factor",
            &["growth_factor"],
            Kind::Between(1.0, f64::INFINITY),
            Value::Real(2.0),
            "multiplier on growth, divisor on backoff",
        ),
        Key::new(
            "scale_window",
            &["growth_interval", "loss_scale_window"],
            Kind::Integer { least: 1 },
            Value::Integer(1000),
            "clean steps in a row that bring growth",
        ),
        Key::new(
            "min_scale",
            &["min_loss_scale"],
            Kind::Within(0.0, f64::INFINITY),
            Value::Real(1.0),
            "floor",
        ),
        Key::two(
            "delayed_shift",
            &["hysteresis"],
            Kind::Integer { least: 1 },
            Value::Integer(1),
            Value::Integer(2),
            "overflows since the last growth until one cuts; hysteresis in the config",
        ),
        Key::new(
            "consecutive_hysteresis",
            &[],
            Kind::Flag,
            Value::Flag(false),
            "refill the hysteresis at every clean step instead of at a growth",
        ),
        Key::new(
            "raise_error_at_min_scale",
            &[],
            Kind::Flag,
            Value::Flag(true),
            "raise at the floor instead of clamping; the config cannot reach it",
        ),
    ],
    summary: "DeepSpeed ZeRO before v0.17.1: growth after W clean steps",
    explanation: "\
As deepspeed, but a growth comes whenever the steps since the last overflow are a multiple of scale_window, like apex.",
    source: "microsoft/DeepSpeed 38327e07f (2025-02) deepspeed/runtime/fp16/loss_scaler.py",
    exceptions: &[
        Exception {
            law: "growth_is_guarded",
            reason: "a Python float without a ceiling; the scaled loss is infinite long before, and that overflow brings it back",
        },
        Exception {
            law: "no_livelock_at_ceiling",
            reason: "from an infinite float no division comes back",
        },
    ],
    build: build_legacy,
};

fn build_current(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(build(settings, INFO.name, 2.0))
}

fn build_legacy(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(build(settings, LEGACY.name, settings.f64("scale_factor")))
}

fn build(settings: &Settings<'_>, name: &'static str, scale_factor: f64) -> Box<dyn Policy> {
    let delayed_shift = settings.i64("delayed_shift");
    Box::new(DeepSpeed {
        name,
        cur_scale: settings.f64("init_scale"),
        cur_iter: 0,
        last_overflow_iter: -1,
        cur_hysteresis: delayed_shift,
        scale_factor,
        scale_window: settings.i64("scale_window"),
        min_scale: settings.f64("min_scale"),
        delayed_shift,
        consecutive_hysteresis: settings.flag("consecutive_hysteresis"),
        raise_error_at_min_scale: settings.flag("raise_error_at_min_scale"),
    })
}

#[derive(Debug, Clone)]
struct DeepSpeed {
    name: &'static str,
    cur_scale: f64,
    cur_iter: i64,
    last_overflow_iter: i64,
    cur_hysteresis: i64,
    scale_factor: f64,
    scale_window: i64,
    min_scale: f64,
    delayed_shift: i64,
    consecutive_hysteresis: bool,
    raise_error_at_min_scale: bool,
}

/// The rule of DeepSpeed from v0.17.1 on, and of its fused optimizers since 2020: one clean step more than the window.
pub(super) fn is_due(since_overflow: i64, scale_window: i64) -> bool {
    since_overflow > 1 && (since_overflow - 1) % scale_window == 0
}

impl Policy for DeepSpeed {
    fn loss_scale(&self) -> f64 {
        self.cur_scale
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.cur_scale;
        if observed.found_inf {
            if self.delayed_shift == 1 || self.cur_hysteresis == 1 {
                if self.cur_scale == self.min_scale && self.raise_error_at_min_scale {
                    let message = "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.";
                    return Err(Terminal {
                        kind: "Exception",
                        message: message.to_owned(),
                    });
                }
                self.cur_scale = (self.cur_scale / self.scale_factor).max(self.min_scale);
            } else {
                self.cur_hysteresis -= 1;
            }
            self.last_overflow_iter = self.cur_iter;
        } else {
            if self.consecutive_hysteresis {
                self.cur_hysteresis = self.delayed_shift;
            }
            let since_overflow = self.cur_iter - self.last_overflow_iter;
            let due = if self.name == LEGACY.name {
                since_overflow % self.scale_window == 0
            } else {
                is_due(since_overflow, self.scale_window)
            };
            if due {
                self.cur_hysteresis = self.delayed_shift;
                self.cur_scale *= self.scale_factor;
            }
        }
        self.cur_iter += 1;
        Ok(Update::of(observed, before, self.cur_scale))
    }

    fn quiet_steps(&self) -> u64 {
        let since = self.cur_iter - self.last_overflow_iter;
        if since < 1 {
            return 0;
        }
        let window = self.scale_window;
        let (into, first) = match self.name == LEGACY.name {
            true => (since % window, false),
            false => ((since - 1) % window, since == 1),
        };
        let left = if into == 0 && !first {
            0
        } else {
            window - into
        };
        left as u64
    }

    fn pass_quietly(&mut self, steps: u64) {
        if self.consecutive_hysteresis && steps > 0 {
            self.cur_hysteresis = self.delayed_shift;
        }
        self.cur_iter += steps as i64;
    }

    fn doubling(&self) -> Option<Doubling> {
        let plain = self.scale_factor == 2.0 && !self.consecutive_hysteresis;
        let fresh = self.cur_iter == 0
            && self.last_overflow_iter == -1
            && self.cur_hysteresis == self.delayed_shift;
        let interval = self.scale_window as u64;
        let late = u64::from(self.name != LEGACY.name);
        (plain && fresh).then(|| Doubling {
            after_overflow: interval + late,
            hysteresis: self.delayed_shift as u64,
            floor: match self.raise_error_at_min_scale {
                true => Floor::StopsAt(self.min_scale),
                false => Floor::Stays(self.min_scale),
            },
            ..Doubling::plain(interval, f64::INFINITY)
        })
    }

    fn fingerprint(&self) -> [u64; 2] {
        // Only the place within the window counts, once the first window after an overflow is over.
        let since = self.cur_iter - self.last_overflow_iter;
        let window = self.scale_window;
        let place = if since <= window {
            since
        } else {
            window + 1 + (since - 1) % window
        };
        [
            self.cur_scale.to_bits(),
            (place as u64) << 16 | self.cur_hysteresis as u64 & 0xFFFF,
        ]
    }

    fn save(&self) -> State {
        state([
            ("cur_scale", number(self.cur_scale)),
            ("cur_iter", self.cur_iter.into()),
            ("last_overflow_iter", self.last_overflow_iter.into()),
            ("scale_factor", number(self.scale_factor)),
            ("scale_window", self.scale_window.into()),
            ("min_scale", number(self.min_scale)),
            ("delayed_shift", self.delayed_shift.into()),
            ("cur_hysteresis", self.cur_hysteresis.into()),
            (
                "raise_error_at_min_scale",
                self.raise_error_at_min_scale.into(),
            ),
            ("consecutive_hysteresis", self.consecutive_hysteresis.into()),
        ])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(self.name, saved);
        *self = DeepSpeed {
            name: self.name,
            cur_scale: fields.f64("cur_scale")?,
            cur_iter: fields.i64("cur_iter")?,
            last_overflow_iter: fields.i64("last_overflow_iter")?,
            cur_hysteresis: fields.i64("cur_hysteresis")?,
            scale_factor: fields.f64("scale_factor")?,
            scale_window: fields.window("scale_window")?,
            min_scale: fields.f64("min_scale")?,
            delayed_shift: fields.i64("delayed_shift")?,
            consecutive_hysteresis: fields.flag("consecutive_hysteresis")?,
            raise_error_at_min_scale: fields.flag("raise_error_at_min_scale")?,
        };
        Ok(())
    }

    fn counters(&self) -> State {
        state([
            ("cur_iter", self.cur_iter.into()),
            ("last_overflow_iter", self.last_overflow_iter.into()),
            ("cur_hysteresis", self.cur_hysteresis.into()),
        ])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
