//! `metaseq`: fairseq's scaler with a window that follows the scale.
//!
//! ```text
//! growth:    as fairseq;  and W = W * F                      (W becomes a float; the modulo is a float modulo)
//! overflow:  as fairseq;  and W = max(int(W / F), 1)         before the threshold clamp
//!            if S < min:  S = prev                           strict, and it never raises
//! ```
//!
//! Without overflows growth comes after W, 2W, 4W, ... clean steps: the scale is proportional to the number of clean steps
//! since the last overflow. At the floor training goes on, skipping, though the option's help still says that it stops.
//! **Only `loss_scale` is saved**; a resume falls back to the configured window.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "metaseq",
    aliases: &[],
    scale_type: ScaleType::F64,
    keys: &[
        Key::new("init_scale", &["scale"], Kind::Scale, Value::Real(4.0), "scale of the first step"),
        Key::new("scale_factor", &["growth_factor"], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth, divisor on overflow, of scale and window"),
        Key::new("scale_window", &["growth_interval"], Kind::Integer { least: 1 }, Value::Integer(256), "clean steps that bring the first growth"),
        Key::new("tolerance", &[], Kind::Within(0.0, f64::INFINITY), Value::Real(0.0), "share of overflows since the last rescale that is forgiven"),
        Key::new("threshold", &[], Kind::OptionalScale, Value::None, "clamp below which no overflow divides"),
        Key::new("min_loss_scale", &["min_scale"], Kind::Within(0.0, f64::INFINITY), Value::Real(0.03125), "the scale never falls below this"),
    ],
    summary: "metaseq: fairseq from 4, with a window that doubles at each growth",
    explanation: "\
As fairseq, but a growth also multiplies the window by scale_factor and a cut divides it (never below 1), so growth comes
after W, 2W, 4W, ... clean steps. A cut that would pass below min_loss_scale is taken back: training goes on, skipping, and
the window keeps shrinking to 1. A checkpoint holds the scale alone; the window falls back to the configured one.",
    source: "facebookresearch/metaseq f7ffa5f metaseq/optim/dynamic_loss_scaler.py",
    exceptions: &[
        Exception { law: "never_grows_early", reason: "a cut halves the window too, so the next growth comes sooner" },
        Exception { law: "grows_when_clean", reason: "a growth doubles the window, so growths come after W, 2W, 4W clean steps" },
        Exception { law: "save_load_continues", reason: "only loss_scale is saved: the window falls back to the configured one" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(Metaseq {
        loss_scale: settings.f64("init_scale"),
        iter: 0,
        last_overflow_iter: -1,
        last_rescale_iter: -1,
        overflows_since_rescale: 0,
        scale_factor: settings.f64("scale_factor"),
        scale_window: settings.i64("scale_window") as f64,
        tolerance: settings.f64("tolerance"),
        threshold: settings.optional("threshold"),
        min_loss_scale: settings.f64("min_loss_scale"),
    }))
}

#[derive(Debug, Clone)]
struct Metaseq {
    loss_scale: f64,
    iter: i64,
    last_overflow_iter: i64,
    last_rescale_iter: i64,
    overflows_since_rescale: i64,
    scale_factor: f64,
    scale_window: f64,
    tolerance: f64,
    threshold: Option<f64>,
    min_loss_scale: f64,
}

impl Policy for Metaseq {
    fn loss_scale(&self) -> f64 {
        self.loss_scale
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.loss_scale;
        if observed.found_inf {
            let since = self.iter - self.last_rescale_iter;
            self.last_overflow_iter = self.iter;
            self.overflows_since_rescale += 1;
            if self.overflows_since_rescale as f64 / since as f64 >= self.tolerance {
                self.loss_scale /= self.scale_factor;
                self.scale_window = (self.scale_window / self.scale_factor).trunc().max(1.0);
                if let Some(threshold) = self.threshold {
                    self.loss_scale = self.loss_scale.max(threshold);
                }
                self.last_rescale_iter = self.iter;
                self.overflows_since_rescale = 0;
            }
            if self.loss_scale < self.min_loss_scale {
                self.loss_scale = before;
            }
        } else if (self.iter - self.last_overflow_iter) as f64 % self.scale_window == 0.0 {
            self.loss_scale *= self.scale_factor;
            self.scale_window *= self.scale_factor;
            self.last_rescale_iter = self.iter;
        }
        self.iter += 1;
        Ok(Update::of(observed, before, self.loss_scale))
    }

    fn quiet_steps(&self) -> u64 {
        // A fractional window is met where the floating-point remainder happens to be zero: step by step.
        if self.scale_window.fract() != 0.0 || self.scale_window > 9e15 {
            return 0;
        }
        super::quiet::to_multiple(
            self.iter - self.last_overflow_iter,
            self.scale_window as i64,
        )
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.iter += steps as i64;
    }

    fn save(&self) -> State {
        state([("loss_scale", number(self.loss_scale))])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        self.loss_scale = Fields::new(INFO.name, saved).f64("loss_scale")?;
        Ok(())
    }

    fn counters(&self) -> State {
        state([
            ("iter", self.iter.into()),
            ("last_overflow_iter", self.last_overflow_iter.into()),
            ("last_rescale_iter", self.last_rescale_iter.into()),
            (
                "overflows_since_rescale",
                self.overflows_since_rescale.into(),
            ),
            ("scale_window", number(self.scale_window)),
        ])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
