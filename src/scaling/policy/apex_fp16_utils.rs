//! `apex-fp16-utils`: the `DynamicLossScaler` of `apex.fp16_utils`, much copied.
//!
//! ```text
//! overflow:                        S = max(S / F, 1);  last = it
//! clean, (it - last) mod W == 0:   S = S * F
//! then:                            it = it + 1                        (it from 0, last from -1)
//! ```
//!
//! A growth resets nothing. The floor is 1, so a start below 1 jumps *up* to 1 at the first overflow. No ceiling: the
//! Python float passes the f32 range. Copies live in mmdetection (init 512), old Megatron and DeepSpeed; `FP16_Optimizer` of
//! the same apex builds the amp scaler instead.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "apex-fp16-utils",
    aliases: &[],
    scale_type: ScaleType::F64,
    keys: &[
        Key::new("init_scale", &["scale"], Kind::Scale, Value::Real(4294967296.0), "scale of the first step"),
        Key::new("scale_factor", &["growth_factor"], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth, divisor on overflow"),
        Key::new("scale_window", &["growth_interval"], Kind::Integer { least: 1 }, Value::Integer(1000), "clean steps in a row that bring growth"),
    ],
    summary: "apex.fp16_utils: divide on overflow, floor 1, multiply every 1000 clean steps",
    explanation: "\
Divides by scale_factor at every overflow, never below 1; multiplies whenever the steps since the last overflow are a
multiple of scale_window. The object is pickled whole.
Quirks: an initial scale under 1 jumps up to 1 at the first overflow. No ceiling: the scale leaves the f32 range, the
scaled loss becomes infinite, and the next overflow brings it back.",
    source: "NVIDIA/apex tag 24.04.01 apex/fp16_utils/loss_scaler.py",
    exceptions: &[
        Exception { law: "growth_is_guarded", reason: "a Python float without a ceiling; the scaled loss is infinite long before, and that overflow brings it back" },
        Exception { law: "no_livelock_at_ceiling", reason: "from an infinite float no division comes back" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(ModuloScaler::new(
        INFO.name,
        settings.f64("init_scale"),
        settings.f64("scale_factor"),
        settings.i64("scale_window"),
    )))
}

/// The state machine that `apex-fp16-utils` and `apex-contrib-fp16-optimizer` share.
#[derive(Debug, Clone)]
pub(super) struct ModuloScaler {
    name: &'static str,
    cur_scale: f64,
    cur_iter: i64,
    last_overflow_iter: i64,
    scale_factor: f64,
    scale_window: i64,
}

impl ModuloScaler {
    pub(super) fn new(
        name: &'static str,
        cur_scale: f64,
        scale_factor: f64,
        scale_window: i64,
    ) -> Self {
        ModuloScaler {
            name,
            cur_scale,
            cur_iter: 0,
            last_overflow_iter: -1,
            scale_factor,
            scale_window,
        }
    }
}

impl Policy for ModuloScaler {
    fn loss_scale(&self) -> f64 {
        self.cur_scale
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.cur_scale;
        if observed.found_inf {
            self.cur_scale = (self.cur_scale / self.scale_factor).max(1.0);
            self.last_overflow_iter = self.cur_iter;
        } else if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0 {
            self.cur_scale *= self.scale_factor;
        }
        self.cur_iter += 1;
        Ok(Update::of(observed, before, self.cur_scale))
    }

    fn quiet_steps(&self) -> u64 {
        super::quiet::to_multiple(self.cur_iter - self.last_overflow_iter, self.scale_window)
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.cur_iter += steps as i64;
    }

    fn fingerprint(&self) -> [u64; 2] {
        let since = (self.cur_iter - self.last_overflow_iter).rem_euclid(self.scale_window);
        [self.cur_scale.to_bits(), since as u64]
    }

    fn save(&self) -> State {
        state([
            ("cur_scale", number(self.cur_scale)),
            ("cur_iter", self.cur_iter.into()),
            ("last_overflow_iter", self.last_overflow_iter.into()),
            ("scale_factor", number(self.scale_factor)),
            ("scale_window", self.scale_window.into()),
        ])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(self.name, saved);
        self.cur_scale = fields.f64("cur_scale")?;
        self.cur_iter = fields.i64("cur_iter")?;
        self.last_overflow_iter = fields.i64("last_overflow_iter")?;
        self.scale_factor = fields.f64("scale_factor")?;
        self.scale_window = fields.window("scale_window")?;
        Ok(())
    }

    fn counters(&self) -> State {
        state([
            ("cur_iter", self.cur_iter.into()),
            ("last_overflow_iter", self.last_overflow_iter.into()),
        ])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
