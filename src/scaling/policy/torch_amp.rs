//! `torch-amp` (also `pytorch`): `torch.amp.GradScaler`; and `fsdp`, its sharded sibling.
//!
//! ```text
//! overflow:                S = r32(S * backoff);  t = 0
//! clean, t + 1 == W:       v = r32(S * growth);   if finite(v): S = v;   t = 0
//! clean:                   t = t + 1
//! ```
//!
//! The scale is an f32 tensor but the factors are f64: the product is taken in f64 and rounded once. There is no floor:
//! from 65536 the scale is 0 after 166 overflows in a row, and with a backoff above 0.5 it sticks at a subnormal. At 2^-128
//! and below 1/S is inf in f32, and a *clean* step writes inf or NaN into the weights. `growth_interval=None` is accepted by
//! the constructor and raises `TypeError` at the first update; it is no static mode.
//!
//! Not followed: a backoff of 0 or below, which the constructor lets through, is refused here.

use serde_json::Value as Json;

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Doubling, Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry of `torch-amp`.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "torch-amp",
    aliases: &["pytorch", "torch"],
    scale_type: ScaleType::F32,
    keys: &[
        Key::new("init_scale", &["scale"], Kind::Scale, Value::Real(65536.0), "scale of the first step"),
        Key::new("growth_factor", &[], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth"),
        Key::new("backoff_factor", &[], Kind::Between(0.0, 1.0), Value::Real(0.5), "multiplier on overflow"),
        Key::new("growth_interval", &[], Kind::OptionalInteger, Value::Integer(2000), "clean steps in a row that bring growth; 0 and below: never"),
    ],
    summary: "PyTorch's GradScaler: halve on overflow, double after 2000 clean steps",
    explanation: "\
Grows after growth_interval clean steps, backs off at every overflow; both reset the tracker. The scale is f32, the
factors f64. Growth that would give infinity is refused (powers of two stop at 2^127), the tracker is reset all the same.
Quirks: no floor, so 166 overflows in a row from 65536 give a scale of exactly 0, for ever; below 2^-127 the inverse
scale is infinite and a clean step writes inf or NaN into the weights (144 overflows in a row). growth_interval=none does
not make the scale static: the first update raises TypeError. Accelerate and Lightning hold this scaler.",
    source: "pytorch/pytorch torch/amp/grad_scaler.py, aten/src/ATen/native/cpu/AmpGradScalerKernels.cpp; torch 2.15.0",
    exceptions: &[
        Exception { law: "scale_stays_positive", reason: "there is no floor: the scale is exactly 0 after 166 overflows in a row from 65536" },
        Exception { law: "no_livelock_at_floor", reason: "a scale of 0 doubles to 0, for ever" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(TorchAmp {
        scale: settings.f32("init_scale")?,
        growth_factor: settings.f64("growth_factor"),
        backoff_factor: settings.f64("backoff_factor"),
        growth_interval: settings.optional_integer("growth_interval"),
        growth_tracker: 0,
        steps_that_wrote_nonfinite_params: 0,
    }))
}

#[derive(Debug, Clone)]
struct TorchAmp {
    scale: f32,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: Option<i64>,
    growth_tracker: i64,
    /// Clean steps at a scale whose inverse is infinite. No state of torch's: what it does to the weights.
    steps_that_wrote_nonfinite_params: i64,
}

impl Policy for TorchAmp {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let Some(interval) = self.growth_interval else {
            return Err(Terminal {
                kind: "TypeError",
                message: "_amp_update_scale_(): argument 'growth_interval' (position 6) must be int, not NoneType".to_owned(),
            });
        };
        let before = self.scale;
        if observed.found_inf {
            self.scale = (f64::from(self.scale) * self.backoff_factor) as f32;
            self.growth_tracker = 0;
            return Ok(Update::of(observed, before, self.scale));
        }
        // unscale_ multiplies by the f64 reciprocal rounded to f32.
        if ((1.0 / f64::from(self.scale)) as f32).is_infinite() {
            self.steps_that_wrote_nonfinite_params += 1;
        }
        grow(
            &mut self.scale,
            &mut self.growth_tracker,
            self.growth_factor,
            interval,
        );
        Ok(Update::of(observed, before, self.scale))
    }

    fn quiet_steps(&self) -> u64 {
        match self.growth_interval {
            // The inverse of a smaller scale is infinite, and a clean step then writes into the weights.
            Some(interval) if self.scale > 2f32.powi(-127) => {
                super::quiet::counts_to(self.growth_tracker, interval)
            }
            _ => 0,
        }
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.growth_tracker += steps as i64;
    }

    fn doubling(&self) -> Option<Doubling> {
        let plain = self.growth_factor == 2.0 && self.backoff_factor == 0.5 && self.scale > 0.0;
        let interval = u64::try_from(self.growth_interval?)
            .ok()
            .filter(|n| *n > 0)?;
        // It never grows to infinity.
        let largest = f64::from(f32::MAX);
        (plain && self.growth_tracker == 0).then(|| Doubling::plain(interval, largest))
    }

    fn fingerprint(&self) -> [u64; 2] {
        [self.scale.to_bits().into(), self.growth_tracker as u64]
    }

    fn save(&self) -> State {
        state([
            ("scale", number(self.scale.into())),
            ("growth_factor", number(self.growth_factor)),
            ("backoff_factor", number(self.backoff_factor)),
            (
                "growth_interval",
                self.growth_interval.map_or(Json::Null, Json::from),
            ),
            ("_growth_tracker", self.growth_tracker.into()),
        ])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(INFO.name, saved);
        self.scale = fields.f32("scale")?;
        self.growth_factor = fields.f64("growth_factor")?;
        self.backoff_factor = fields.f64("backoff_factor")?;
        self.growth_interval = match saved.get("growth_interval") {
            Some(Json::Null) => None,
            _ => Some(fields.i64("growth_interval")?),
        };
        self.growth_tracker = fields.i64("_growth_tracker")?;
        Ok(())
    }

    fn counters(&self) -> State {
        state([
            ("scale", number(self.scale.into())),
            ("growth_tracker", self.growth_tracker.into()),
            (
                "steps_that_wrote_nonfinite_params",
                self.steps_that_wrote_nonfinite_params.into(),
            ),
        ])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}

/// A clean step of `_amp_update_scale_`: equality with the interval, and a growth that must stay finite.
pub(super) fn grow(scale: &mut f32, growth_tracker: &mut i64, growth_factor: f64, interval: i64) {
    *growth_tracker += 1;
    if *growth_tracker == interval {
        *growth_tracker = 0;
        let grown = (f64::from(*scale) * growth_factor) as f32;
        if grown.is_finite() {
            *scale = grown;
        }
    }
}
