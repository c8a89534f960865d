//! `deepspeed-fp16-fused` and `deepspeed-fp16-unfused`: DeepSpeed's FP16 optimizers without ZeRO.
//!
//! ```text
//! overflow:  S = max(S / 2, min);  last = it
//! clean:     k = it - last;  if k - 1 > 0 and (k - 1) mod W == 0:  S = S * 2
//! then:      it = it + 1                                              (it from 0, last from -1)
//! ```
//!
//! They do not use `DynamicLossScaler`: no hysteresis (the config's is ignored), no error at the floor. Without a config
//! the fused one starts at 2^32 with floor 1, the unfused at 2^16 with floor 0.25. The floor is not saved.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Doubling, Floor, Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry of the fused optimizer.
pub(crate) const FUSED: PolicyInfo = PolicyInfo {
    name: "deepspeed-fp16-fused",
    aliases: &[],
    scale_type: ScaleType::F64,
    keys: &[
        Key::two("init_scale", &["scale"], Kind::Scale, Value::Real(4294967296.0), Value::Real(65536.0), "scale of the first step"),
        Key::new("scale_window", &["growth_interval", "loss_scale_window"], Kind::Integer { least: 1 }, Value::Integer(1000), "growth after W + 1 clean steps, then every W"),
        Key::new("min_scale", &["min_loss_scale"], Kind::Within(0.0, f64::INFINITY), Value::Real(1.0), "floor; not saved"),
    ],
    summary: "DeepSpeed fused FP16 optimizer without ZeRO: no hysteresis, clamps at the floor",
    explanation: "\
Halves at every overflow, never below min_scale, and never raises. A growth comes W + 1 clean steps after the start or an
overflow, then every W steps. Quirks: the hysteresis of the JSON config is ignored here. A checkpoint holds scale,
counters, factor and window, but not the floor.",
    source: "deepspeed 0.19.8 deepspeed/runtime/fp16/fused_optimizer.py",
    exceptions: &[
        Exception { law: "growth_is_guarded", reason: "a Python float without a ceiling; the scaled loss is infinite long before, and that overflow brings it back" },
        Exception { law: "no_livelock_at_ceiling", reason: "from an infinite float no division comes back" },
    ],
    build: build_fused,
};

/// The registry's entry of the unfused optimizer.
pub(crate) const UNFUSED: PolicyInfo = PolicyInfo {
    name: "deepspeed-fp16-unfused",
    aliases: &[],
    scale_type: ScaleType::F64,
    keys: &[
        Key::new("init_scale", &["scale"], Kind::Scale, Value::Real(65536.0), "scale of the first step"),
        Key::new("scale_window", &["growth_interval", "loss_scale_window"], Kind::Integer { least: 1 }, Value::Integer(1000), "growth after W + 1 clean steps, then every W"),
        Key::two("min_scale", &["min_loss_scale"], Kind::Within(0.0, f64::INFINITY), Value::Real(0.25), Value::Real(1.0), "floor; not saved"),
    ],
    summary: "DeepSpeed unfused FP16 optimizer without ZeRO: as the fused one, class floor 0.25",
    explanation: "\
Halves at every overflow, never below min_scale, and never raises. A growth comes W + 1 clean steps after the start or an
overflow, then every W steps. Quirks: the hysteresis of the JSON config is ignored here. A checkpoint holds scale,
counters, factor and window, but not the floor.",
    source: "deepspeed 0.19.8 deepspeed/runtime/fp16/unfused_optimizer.py",
    exceptions: &[
        Exception { law: "growth_is_guarded", reason: "a Python float without a ceiling; the scaled loss is infinite long before, and that overflow brings it back" },
        Exception { law: "no_livelock_at_ceiling", reason: "from an infinite float no division comes back" },
    ],
    build: build_unfused,
};

fn build_fused(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(build(settings, FUSED.name))
}

fn build_unfused(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(build(settings, UNFUSED.name))
}

fn build(settings: &Settings<'_>, name: &'static str) -> Box<dyn Policy> {
    Box::new(Fp16Optimizer {
        name,
        cur_scale: settings.f64("init_scale"),
        cur_iter: 0,
        last_overflow_iter: -1,
        scale_factor: 2.0,
        scale_window: settings.i64("scale_window"),
        min_scale: settings.f64("min_scale"),
    })
}

#[derive(Debug, Clone)]
struct Fp16Optimizer {
    name: &'static str,
    cur_scale: f64,
    cur_iter: i64,
    last_overflow_iter: i64,
    scale_factor: f64,
    scale_window: i64,
    min_scale: f64,
}

impl Policy for Fp16Optimizer {
    fn loss_scale(&self) -> f64 {
        self.cur_scale
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.cur_scale;
        if observed.found_inf {
            self.cur_scale = (self.cur_scale / self.scale_factor).max(self.min_scale);
            self.last_overflow_iter = self.cur_iter;
        } else if super::deepspeed::is_due(
            self.cur_iter - self.last_overflow_iter,
            self.scale_window,
        ) {
            self.cur_scale *= self.scale_factor;
        }
        self.cur_iter += 1;
        Ok(Update::of(observed, before, self.cur_scale))
    }

    fn quiet_steps(&self) -> u64 {
        let since = self.cur_iter - self.last_overflow_iter;
        match since {
            1 => self.scale_window as u64,
            _ => super::quiet::to_multiple(since - 1, self.scale_window),
        }
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.cur_iter += steps as i64;
    }

    fn doubling(&self) -> Option<Doubling> {
        let fresh = self.cur_iter == 0 && self.last_overflow_iter == -1;
        let interval = self.scale_window as u64;
        (self.scale_factor == 2.0 && fresh).then(|| Doubling {
            after_overflow: interval + 1,
            floor: Floor::Stays(self.min_scale),
            ..Doubling::plain(interval, f64::INFINITY)
        })
    }

    fn fingerprint(&self) -> [u64; 2] {
        // The first step after an overflow differs from those a whole window later.
        let since = self.cur_iter - self.last_overflow_iter;
        let place = if since <= self.scale_window {
            since
        } else {
            self.scale_window + 1 + (since - 1) % self.scale_window
        };
        [self.cur_scale.to_bits(), place as u64]
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
