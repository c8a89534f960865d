//! `mindspore-cell`: MindSpore's `nn.DynamicLossScaleUpdateCell`, what the manager hands to training.
//!
//! ```text
//! due = (it - last >= W)
//! overflow:       S = max(S * r32(1/F), 1)
//! clean and due:  S = S * F
//! then:           if overflow or due: last = it;   it = it + 1        (it from 1, last from 0)
//! ```
//!
//! A growth resets `last`. No ceiling: the f32 scale grows to inf. The state lives in Parameters named
//! `current_iterator_step` and `last_overflow_iterator_step`.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "mindspore-cell",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::mandatory("init_loss_scale", &["init_scale", "scale"], Kind::Scale, Value::Real(16777216.0), "scale of the first step"),
        Key::mandatory("scale_factor", &["growth_factor"], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth; its inverse on overflow"),
        Key::mandatory("scale_window", &["growth_interval"], Kind::Integer { least: 1 }, Value::Integer(2000), "clean steps in a row that bring growth"),
    ],
    summary: "MindSpore DynamicLossScaleUpdateCell: halve with floor 1, no ceiling",
    explanation: "\
Multiplies by the rounded inverse of scale_factor at every overflow, never below 1; by scale_factor after scale_window
clean steps. Never raises. No ceiling: the scale grows to infinity. Arguments are mandatory in the class; those shown are
the manager's.",
    source: "mindspore 2.10 nn.DynamicLossScaleUpdateCell",
    exceptions: &[
        Exception { law: "growth_is_guarded", reason: "growth has no finite check: the scale reaches infinity" },
        Exception { law: "no_livelock_at_ceiling", reason: "an infinite scale halves to infinity, for ever" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(UpdateCell {
        loss_scale: settings.f32("init_loss_scale")?,
        cur_iter: 1,
        last_overflow_iter: 0,
        scale_factor: settings.f32("scale_factor")?,
        scale_window: settings.i64("scale_window"),
    }))
}

#[derive(Debug, Clone)]
struct UpdateCell {
    loss_scale: f32,
    cur_iter: i64,
    last_overflow_iter: i64,
    scale_factor: f32,
    scale_window: i64,
}

impl Policy for UpdateCell {
    fn loss_scale(&self) -> f64 {
        self.loss_scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.loss_scale;
        let due = self.cur_iter - self.last_overflow_iter >= self.scale_window;
        if observed.found_inf {
            self.loss_scale = (self.loss_scale * (1.0 / self.scale_factor)).max(1.0);
        } else if due {
            self.loss_scale *= self.scale_factor;
        }
        if observed.found_inf || due {
            self.last_overflow_iter = self.cur_iter;
        }
        self.cur_iter += 1;
        Ok(Update::of(observed, before, self.loss_scale))
    }

    fn quiet_steps(&self) -> u64 {
        let left = self.scale_window - (self.cur_iter - self.last_overflow_iter);
        u64::try_from(left).unwrap_or(0)
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.cur_iter += steps as i64;
    }

    fn fingerprint(&self) -> [u64; 2] {
        [
            self.loss_scale.to_bits().into(),
            (self.cur_iter - self.last_overflow_iter) as u64,
        ]
    }

    fn save(&self) -> State {
        state([
            ("loss_scale", number(self.loss_scale.into())),
            ("current_iterator_step", self.cur_iter.into()),
            (
                "last_overflow_iterator_step",
                self.last_overflow_iter.into(),
            ),
        ])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(INFO.name, saved);
        self.loss_scale = fields.f32("loss_scale")?;
        self.cur_iter = fields.i64("current_iterator_step")?;
        self.last_overflow_iter = fields.i64("last_overflow_iterator_step")?;
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
