//! `fairseq`: `DynamicLossScaler` of fairseq.
//!
//! ```text
//! overflow:  prev = S;  since = it - last_rescale;  last = it;  ov = ov + 1
//!            if ov / since >= tolerance:  S = S / F;  if threshold: S = max(S, threshold);  last_rescale = it;  ov = 0
//!            if S <= min:  S = prev;  raise FloatingPointError                      (it is not advanced)
//! clean:     if (it - last) mod W == 0:  S = S * F;  last_rescale = it              (ov is not cleared)
//! then:      it = it + 1                                  (it from 0, last and last_rescale from -1)
//! ```
//!
//! With tolerance 0 every overflow divides. A swallowed overflow still moves `last` and so delays growth. Reaching the floor
//! ends training: from 2^7 at the 21st overflow in a row. A `threshold` above `min_loss_scale` clamps instead; one below it
//! is useless. **Only `loss_scale` is saved**: a resume restarts the window.
//!
//! The command line's window is `2^14 / world_size / update_freq`: 16384 on one GPU without accumulation. `gradscale`
//! cannot know those; set `scale_window`.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Doubling, Floor, Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "fairseq",
    aliases: &[],
    scale_type: ScaleType::F64,
    keys: &[
        Key::two("init_scale", &["scale"], Kind::Scale, Value::Real(32768.0), Value::Real(128.0), "scale of the first step"),
        Key::new("scale_factor", &["growth_factor"], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth, divisor on overflow"),
        Key::two("scale_window", &["growth_interval"], Kind::Integer { least: 1 }, Value::Integer(2000), Value::Integer(16384), "clean steps in a row that bring growth; 2^14 / GPUs / update_freq"),
        Key::new("tolerance", &[], Kind::Within(0.0, f64::INFINITY), Value::Real(0.0), "share of overflows since the last rescale that is forgiven"),
        Key::new("threshold", &[], Kind::OptionalScale, Value::None, "clamp below which no overflow divides"),
        Key::new("min_loss_scale", &["min_scale"], Kind::Within(0.0, f64::INFINITY), Value::Real(0.0001), "reaching this ends training"),
    ],
    summary: "fairseq: divide on overflow, multiply every window, stop training at the floor",
    explanation: "\
Divides by scale_factor when the share of overflows since the last rescale is at least tolerance (0: always), multiplies
whenever the steps since the last overflow are a multiple of scale_window. A scale at or below min_loss_scale raises
FloatingPointError and training stops: from 128 at the 21st overflow in a row.
Quirks: a forgiven overflow still delays growth. threshold above min_loss_scale clamps and never raises. A checkpoint
holds the scale alone, so a resume restarts the window. The command line starts at 2^7 with window 2^14 / GPUs /
update_freq, the class at 2^15 with 2000.",
    source: "facebookresearch/fairseq 3d262bb2 fairseq/optim/dynamic_loss_scaler.py, fp16_optimizer.py",
    exceptions: &[
        Exception { law: "growth_is_guarded", reason: "a Python float without a ceiling; the scaled loss is infinite long before, and that overflow brings it back" },
        Exception { law: "no_livelock_at_ceiling", reason: "from an infinite float no division comes back" },
        Exception { law: "save_load_continues", reason: "only loss_scale is saved: a resume restarts the window" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(Fairseq {
        loss_scale: settings.f64("init_scale"),
        iter: 0,
        last_overflow_iter: -1,
        last_rescale_iter: -1,
        overflows_since_rescale: 0,
        scale_factor: settings.f64("scale_factor"),
        scale_window: settings.i64("scale_window"),
        tolerance: settings.f64("tolerance"),
        threshold: settings.optional("threshold"),
        min_loss_scale: settings.f64("min_loss_scale"),
    }))
}

#[derive(Debug, Clone)]
struct Fairseq {
    loss_scale: f64,
    iter: i64,
    last_overflow_iter: i64,
    last_rescale_iter: i64,
    overflows_since_rescale: i64,
    scale_factor: f64,
    scale_window: i64,
    tolerance: f64,
    threshold: Option<f64>,
    min_loss_scale: f64,
}

impl Policy for Fairseq {
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
                if let Some(threshold) = self.threshold {
                    self.loss_scale = self.loss_scale.max(threshold);
                }
                self.last_rescale_iter = self.iter;
                self.overflows_since_rescale = 0;
            }
            if self.loss_scale <= self.min_loss_scale {
                self.loss_scale = before;
                let message = format!(
                    "Minimum loss scale reached ({}). Your loss is probably exploding. Try lowering the learning rate, using gradient clipping or increasing the batch size.",
                    python_float(self.min_loss_scale)
                );
                return Err(Terminal {
                    kind: "FloatingPointError",
                    message,
                });
            }
        } else if (self.iter - self.last_overflow_iter) % self.scale_window == 0 {
            self.loss_scale *= self.scale_factor;
            self.last_rescale_iter = self.iter;
        }
        self.iter += 1;
        Ok(Update::of(observed, before, self.loss_scale))
    }

    fn quiet_steps(&self) -> u64 {
        super::quiet::to_multiple(self.iter - self.last_overflow_iter, self.scale_window)
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.iter += steps as i64;
    }

    fn doubling(&self) -> Option<Doubling> {
        let plain = self.scale_factor == 2.0 && self.tolerance <= 0.0 && self.threshold.is_none();
        let fresh = self.iter == 0 && self.last_overflow_iter == -1;
        (plain && fresh).then(|| Doubling {
            floor: Floor::StopsBelow(self.min_loss_scale),
            ..Doubling::plain(self.scale_window as u64, f64::INFINITY)
        })
    }

    fn fingerprint(&self) -> [u64; 2] {
        let place = (self.iter - self.last_overflow_iter).rem_euclid(self.scale_window);
        if self.tolerance <= 0.0 {
            return [self.loss_scale.to_bits(), place as u64];
        }
        let since_rescale = (self.iter - self.last_rescale_iter) as u64;
        let overflows = self.overflows_since_rescale as u64;
        [
            self.loss_scale.to_bits(),
            since_rescale << 32 ^ overflows << 20 ^ (place as u64).rotate_left(50),
        ]
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
            ("scale_window", self.scale_window.into()),
        ])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}

/// A float as Python's `str` writes it: 0.0001 and 1.0, but 1e-05.
fn python_float(x: f64) -> String {
    if x != 0.0 && x.abs() < 1e-4 {
        let text = format!("{x:e}");
        match text.split_once("e-") {
            Some((digits, power)) if power.len() == 1 => format!("{digits}e-0{power}"),
            _ => text,
        }
    } else {
        format!("{x:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_in_messages_read_as_in_python() {
        assert_eq!(python_float(0.0001), "0.0001");
        assert_eq!(python_float(0.00001), "1e-05");
        assert_eq!(python_float(1.0), "1.0");
    }
}
