//! `mindspore-manager`: MindSpore's `DynamicLossScaleManager.update_loss_scale`, on the host.
//!
//! ```text
//! overflow:  S = max(S * (1/F), 1);  last = it;  bad = bad + 1
//! clean:     if (it - last) mod W == 0: S = S * F;   bad = 0
//! then:      if bad > 1000: raise RuntimeError (it is not advanced);  it = it + 1      (it from 1, last from 0)
//! ```
//!
//! A Python float, floor 1, no ceiling. What the manager hands to training is a cell that counts by itself
//! (`mindspore-cell`); the manager's own counters are then never touched. MindSpore checkpoints nothing of the manager;
//! saving here is pickling the object whole.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "mindspore-manager",
    aliases: &["mindspore"],
    scale_type: ScaleType::F64,
    keys: &[
        Key::new("init_loss_scale", &["init_scale", "scale"], Kind::Within(1.0, f64::INFINITY), Value::Real(16777216.0), "scale of the first step"),
        Key::new("scale_factor", &["growth_factor"], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth; its inverse on overflow"),
        Key::new("scale_window", &["growth_interval"], Kind::Integer { least: 1 }, Value::Integer(2000), "clean steps in a row that bring growth"),
    ],
    summary: "MindSpore DynamicLossScaleManager: halve with floor 1; stops after 1001 overflows in a row",
    explanation: "\
Multiplies by 1 / scale_factor at every overflow, never below 1; by scale_factor whenever the steps since the last
overflow are a multiple of scale_window. The 1001st overflow in a row raises RuntimeError. No ceiling. MindSpore saves
nothing of it; saving here keeps the object whole.",
    source: "mindspore 2.10 DynamicLossScaleManager",
    exceptions: &[
        Exception { law: "growth_is_guarded", reason: "a Python float without a ceiling; the scaled loss is infinite long before, and that overflow brings it back" },
        Exception { law: "no_livelock_at_ceiling", reason: "from an infinite float no division comes back" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(Manager {
        loss_scale: settings.f64("init_loss_scale"),
        cur_iter: 1,
        last_overflow_iter: 0,
        bad_step: 0,
        scale_factor: settings.f64("scale_factor"),
        scale_window: settings.i64("scale_window"),
    }))
}

#[derive(Debug, Clone)]
struct Manager {
    loss_scale: f64,
    cur_iter: i64,
    last_overflow_iter: i64,
    bad_step: i64,
    scale_factor: f64,
    scale_window: i64,
}

/// `bad_step_max`: one overflow more in a row raises.
const BAD_STEP_MAX: i64 = 1000;

impl Policy for Manager {
    fn loss_scale(&self) -> f64 {
        self.loss_scale
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.loss_scale;
        if observed.found_inf {
            self.loss_scale = (self.loss_scale * (1.0 / self.scale_factor)).max(1.0);
            self.last_overflow_iter = self.cur_iter;
            self.bad_step += 1;
        } else {
            if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0 {
                self.loss_scale *= self.scale_factor;
            }
            self.bad_step = 0;
        }
        if self.bad_step > BAD_STEP_MAX {
            let message = format!(
                "('Dynamic loss scale Continuous overflow ', {}, ' times, has exceeded maximum threshold.')",
                self.bad_step
            );
            return Err(Terminal {
                kind: "RuntimeError",
                message,
            });
        }
        self.cur_iter += 1;
        Ok(Update::of(observed, before, self.loss_scale))
    }

    fn quiet_steps(&self) -> u64 {
        super::quiet::to_multiple(self.cur_iter - self.last_overflow_iter, self.scale_window)
    }

    fn pass_quietly(&mut self, steps: u64) {
        if steps > 0 {
            self.cur_iter += steps as i64;
            self.bad_step = 0;
        }
    }

    fn fingerprint(&self) -> [u64; 2] {
        let since = (self.cur_iter - self.last_overflow_iter).rem_euclid(self.scale_window);
        [
            self.loss_scale.to_bits(),
            (since as u64) << 16 | self.bad_step as u64,
        ]
    }

    fn save(&self) -> State {
        state([
            ("loss_scale", number(self.loss_scale)),
            ("cur_iter", self.cur_iter.into()),
            ("last_overflow_iter", self.last_overflow_iter.into()),
            ("bad_step", self.bad_step.into()),
        ])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(INFO.name, saved);
        self.loss_scale = fields.f64("loss_scale")?;
        self.cur_iter = fields.i64("cur_iter")?;
        self.last_overflow_iter = fields.i64("last_overflow_iter")?;
        self.bad_step = fields.i64("bad_step")?;
        Ok(())
    }

    fn counters(&self) -> State {
        state([
            ("cur_iter", self.cur_iter.into()),
            ("last_overflow_iter", self.last_overflow_iter.into()),
            ("bad_step", self.bad_step.into()),
        ])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
