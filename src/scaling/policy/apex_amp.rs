//! `apex-amp`: NVIDIA apex's `LossScaler` behind `amp.initialize` (legacy amp).
//!
//! ```text
//! start:     S = min(max_scale, init)
//! overflow:  S = S / 2;  if min_scale: S = max(min_scale, S);  u = 0
//! clean:     u = u + 1
//! then, after both branches:  if u == W: S = min(max_scale, 2 S);  u = 0
//! ```
//!
//! The factor 2 is hard-wired both ways; the constructor's `scale_factor` is never used. The scale is a Python float
//! without a floor: from 65536 it is 0 after 1091 halvings, and the next step divides by it. With a number for
//! `loss_scale` nothing is checked and inf and NaN reach the weights. `amp.state_dict` saves the scale and `unskipped`;
//! window and limits come from the new constructor.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Doubling, Floor, Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "apex-amp",
    aliases: &["apex"],
    scale_type: ScaleType::F64,
    keys: &[
        Key::mandatory("loss_scale", &[], Kind::ScaleOrDynamic, Value::Word(std::borrow::Cow::Borrowed("dynamic")), "dynamic, or a constant that is never checked"),
        Key::new("init_scale", &["scale"], Kind::Scale, Value::Real(65536.0), "scale of the first step where dynamic"),
        Key::new("scale_factor", &[], Kind::Between(0.0, f64::INFINITY), Value::Real(2.0), "accepted by the constructor and never used"),
        Key::new("scale_window", &["growth_interval"], Kind::Integer { least: i64::MIN }, Value::Integer(2000), "clean steps in a row that bring growth"),
        Key::new("min_loss_scale", &["min_scale"], Kind::OptionalScale, Value::None, "floor; none and 0 are no floor"),
        Key::new("max_loss_scale", &["max_scale"], Kind::Scale, Value::Real(16777216.0), "ceiling"),
    ],
    summary: "legacy apex.amp: halve on overflow, double after 2000 clean steps, at most 2^24",
    explanation: "\
Halves at every overflow and doubles after scale_window clean steps, clamped to max_loss_scale (2^24), also at the start.
Quirks: scale_factor is ignored, the factor is 2. No floor by default: after 1091 overflows in a row from 65536 the scale
is 0 and the next step raises ZeroDivisionError. With a number for loss_scale the class checks nothing: steps are not
skipped, inf and NaN reach the weights. A checkpoint holds the scale and the clean-step counter.",
    source: "NVIDIA/apex tag 24.04.01 apex/amp/scaler.py, handle.py, frontend.py",
    exceptions: &[
        Exception { law: "scale_stays_positive", reason: "there is no floor: the float is 0 after 1091 overflows in a row, and the next step raises ZeroDivisionError" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    let max_scale = settings.f64("max_loss_scale");
    let constant = settings.optional("loss_scale");
    Ok(Box::new(ApexAmp {
        scale: constant.unwrap_or(settings.f64("init_scale").min(max_scale)),
        dynamic: constant.is_none(),
        unskipped: 0,
        scale_window: settings.i64("scale_window"),
        min_scale: settings.optional("min_loss_scale"),
        max_scale,
    }))
}

#[derive(Debug, Clone)]
struct ApexAmp {
    scale: f64,
    dynamic: bool,
    unskipped: i64,
    scale_window: i64,
    min_scale: Option<f64>,
    max_scale: f64,
}

impl Policy for ApexAmp {
    fn loss_scale(&self) -> f64 {
        self.scale
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        if self.scale == 0.0 {
            return Err(Terminal {
                kind: "ZeroDivisionError",
                message: "float division by zero".to_owned(),
            });
        }
        // The static scaler sees no overflow: it does not look.
        let observed = Observed {
            found_inf: observed.found_inf && self.dynamic,
            ..observed
        };
        let before = self.scale;
        if observed.found_inf {
            self.scale /= 2.0;
            if let Some(min_scale) = self.min_scale {
                self.scale = self.scale.max(min_scale);
            }
            self.unskipped = 0;
        } else {
            self.unskipped += 1;
        }
        if self.unskipped == self.scale_window && self.dynamic {
            self.scale = (self.scale * 2.0).min(self.max_scale);
            self.unskipped = 0;
        }
        Ok(Update::of(observed, before, self.scale))
    }

    fn quiet_steps(&self) -> u64 {
        match (self.scale == 0.0, self.dynamic) {
            (true, _) => 0,
            (false, true) => super::quiet::counts_to(self.unskipped, self.scale_window),
            (false, false) => u64::MAX,
        }
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.unskipped += steps as i64;
    }

    fn doubling(&self) -> Option<Doubling> {
        let interval = u64::try_from(self.scale_window).ok().filter(|n| *n > 0)?;
        (self.dynamic && self.unskipped == 0 && self.scale > 0.0).then(|| Doubling {
            floor: self.min_scale.map_or(Floor::None, Floor::Stays),
            ..Doubling::plain(interval, self.max_scale)
        })
    }

    fn save(&self) -> State {
        state([
            ("loss_scale", number(self.scale)),
            ("unskipped", self.unskipped.into()),
        ])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(INFO.name, saved);
        self.scale = fields.f64("loss_scale")?;
        self.unskipped = fields.i64("unskipped")?;
        Ok(())
    }

    fn counters(&self) -> State {
        state([("unskipped", self.unskipped.into())])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
