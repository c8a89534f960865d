//! `openseq2seq-logmax`: OpenSeq2Seq's statistical scaler. It looks at amax, not at overflows.
//!
//! ```text
//! x   = log2(amax) where finite, else 2^log_max
//! m   = b1 m + (1-b1) x;    c1 = c1 b1;   mu = m / (1 - c1)
//! m2  = b2 m2 + (1-b2) x;   q = b2 q + (1-b2) x^2;   c2 = c2 b2
//! var = q/(1-c2) - (m2/(1-c2))^2;   sd = sqrt(max(var, 0))
//! S   = clip(2^(16 - (mu + k sd)), min, max)
//! ```
//!
//! log2 amax is taken as normal, and S chosen so that amax * S passes 2^16 with probability 0.1 %. Three bugs are followed:
//! a non-finite step feeds 65536 (2^log_max) into averages of *log2* values, so that one inf holds the scale at its
//! minimum for hundreds of steps; `log_max` is ignored in the target, where 16 is hard-wired; and amax = 0 gives log -inf, after
//! which the scale is NaN for ever. Everything is f32, and `log` and `pow` differ between libraries: equal to within
//! 2e-5, not bit for bit.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "openseq2seq-logmax",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::new("scale_min", &["min_scale"], Kind::Scale, Value::Real(1.0), "floor"),
        Key::new("scale_max", &["max_scale"], Kind::Scale, Value::Real(16384.0), "ceiling"),
        Key::new("log_max", &[], Kind::Within(-100.0, 100.0), Value::Real(16.0), "log2 of what a non-finite step counts as"),
        Key::new("beta1", &[], Kind::Within(0.0, 0.999999), Value::Real(0.99), "decay of the mean"),
        Key::new("beta2", &[], Kind::Within(0.0, 0.999999), Value::Real(0.999), "decay of the variance"),
        Key::new("overflow_std_dev", &[], Kind::Real, Value::Real(3.09), "standard deviations of room"),
    ],
    summary: "OpenSeq2Seq LogMax: statistical, from amax instead of overflows",
    explanation: "\
Follows the mean and spread of log2 amax and sets the scale so that amax times scale passes 2^16 with probability 0.1 %, in
[scale_min, scale_max]. Needs amax at each step. Starts at 1.
Quirks, all of the original: one inf or NaN holds the scale at scale_min for hundreds of steps; log_max does not
move the target; amax = 0 makes the scale NaN for ever.",
    source: "NVIDIA/OpenSeq2Seq 8681d381 open_seq2seq/optimizers/automatic_loss_scaler.py",
    exceptions: &[
        Exception { law: "grows_when_clean", reason: "the scale follows amax, not a count of clean steps" },
        Exception { law: "recovers_after_burst", reason: "one inf feeds 65536 into averages of log2 values: the scale stays at its minimum for hundreds of steps" },
        Exception { law: "no_livelock_at_floor", reason: "one inf feeds 65536 into averages of log2 values: the scale stays at its minimum for hundreds of steps" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    let (scale_min, scale_max) = (settings.f32("scale_min")?, settings.f32("scale_max")?);
    if scale_min > scale_max {
        return Err(settings.bad("scale_min", "at most scale_max"));
    }
    Ok(Box::new(LogMax {
        scale: 1.0,
        iteration: 0,
        x_hat: 0.0,
        slow_x_hat: 0.0,
        xsquared_hat: 0.0,
        b1_correction: 1.0,
        b2_correction: 1.0,
        scale_min,
        scale_max,
        log_max: settings.f64("log_max") as f32,
        beta1: settings.f64("beta1"),
        beta2: settings.f64("beta2"),
        overflow_std_dev: settings.f64("overflow_std_dev") as f32,
    }))
}

#[derive(Debug, Clone)]
struct LogMax {
    scale: f32,
    iteration: i64,
    x_hat: f32,
    slow_x_hat: f32,
    xsquared_hat: f32,
    b1_correction: f32,
    b2_correction: f32,
    scale_min: f32,
    scale_max: f32,
    log_max: f32,
    beta1: f64,
    beta2: f64,
    overflow_std_dev: f32,
}

/// What an amax-driven policy says to a clean step without amax.
pub(super) fn missing_amax() -> Terminal {
    Terminal {
        kind: "ValueError",
        message: "amax drives this policy, and this step has none".to_owned(),
    }
}

impl Policy for LogMax {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.scale;
        let x = match observed.amax {
            _ if observed.found_inf => self.log_max.exp2(),
            Some(amax) if !amax.is_finite() => self.log_max.exp2(),
            Some(amax) => amax.log2(),
            None => return Err(missing_amax()),
        };
        let skipped = observed.found_inf || observed.amax.is_some_and(|a| !a.is_finite());
        // The weights are Python floats, rounded to f32 each.
        let weights = |beta: f64| (beta as f32, (1.0 - beta) as f32);
        let ((b1, one_minus_b1), (b2, one_minus_b2)) = (weights(self.beta1), weights(self.beta2));
        self.x_hat = b1 * self.x_hat + one_minus_b1 * x;
        self.b1_correction *= b1;
        let mean = self.x_hat / (1.0 - self.b1_correction);
        self.slow_x_hat = b2 * self.slow_x_hat + one_minus_b2 * x;
        self.xsquared_hat = b2 * self.xsquared_hat + one_minus_b2 * (x * x);
        self.b2_correction *= b2;
        let slow_mean = self.slow_x_hat / (1.0 - self.b2_correction);
        let variance = self.xsquared_hat / (1.0 - self.b2_correction) - slow_mean * slow_mean;
        // Written with comparisons because a NaN must stay one, as in TensorFlow's maximum.
        let deviation = if variance < 0.0 { 0.0 } else { variance.sqrt() };
        let target = (16.0 - (mean + self.overflow_std_dev * deviation)).exp2();
        self.scale = if target.is_nan() {
            target
        } else {
            target.clamp(self.scale_min, self.scale_max)
        };
        self.iteration += 1;
        Ok(Update {
            skipped,
            ..Update::of(
                Observed {
                    found_inf: false,
                    ..observed
                },
                before,
                self.scale,
            )
        })
    }

    fn save(&self) -> State {
        let mut saved = self.counters();
        saved.insert("scale".to_owned(), number(self.scale.into()));
        saved
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(INFO.name, saved);
        self.iteration = fields.i64("iteration")?;
        self.x_hat = fields.f32("x_hat")?;
        self.slow_x_hat = fields.f32("slow_x_hat")?;
        self.xsquared_hat = fields.f32("xsquared_hat")?;
        self.b1_correction = fields.f32("b1_correction")?;
        self.b2_correction = fields.f32("b2_correction")?;
        self.scale = fields.f32("scale")?;
        Ok(())
    }

    fn counters(&self) -> State {
        state([
            ("iteration", self.iteration.into()),
            ("x_hat", number(self.x_hat.into())),
            ("slow_x_hat", number(self.slow_x_hat.into())),
            ("xsquared_hat", number(self.xsquared_hat.into())),
            ("b1_correction", number(self.b1_correction.into())),
            ("b2_correction", number(self.b2_correction.into())),
        ])
    }

    fn needs_amax(&self) -> bool {
        true
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
