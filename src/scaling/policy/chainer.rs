//! `chainer`: Chainer's `Optimizer.loss_scaling`.
//!
//! ```text
//! start:  S = 1
//! step:   m = 0.5 if overflow; else 2^(1/interval) if an overflow was ever seen; else 2
//!         S = clamp(S * m, 1, 65504)
//! ```
//!
//! It doubles at *every* step until the first overflow, then creeps. The ceiling is FP16's largest number, no power of
//! two. **Nothing is saved**: a resume starts again at 1, doubling.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::state;
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "chainer",
    aliases: &[],
    scale_type: ScaleType::F64,
    keys: &[
        Key::new("interval", &["growth_interval"], Kind::Integer { least: 1 }, Value::Integer(1000), "clean steps that double the scale, a little at each"),
    ],
    summary: "Chainer: double each step up to the first overflow, then a little each step",
    explanation: "\
Starts at 1 and doubles at every step until the first overflow; from then on an overflow halves and every clean step
multiplies by 2^(1/interval). Clamped to [1, 65504]. A checkpoint holds nothing: a resume starts again at 1 and doubles.",
    source: "chainer/chainer a8e15cbe55 chainer/optimizer.py; chainer 7.8.1",
    exceptions: &[
        Exception { law: "recovers_after_burst", reason: "it doubles at every step up to the first overflow and creeps from then on" },
        Exception { law: "save_load_continues", reason: "nothing is saved: a resume starts again at 1" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    // `black_box` keeps the compiler from turning pow(2, x) into exp2(x), whose last bit may differ.
    let multiplier = std::hint::black_box(2.0_f64).powf(1.0 / settings.i64("interval") as f64);
    Ok(Box::new(Chainer {
        loss_scale: 1.0,
        seen_nonfinite: false,
        multiplier,
    }))
}

#[derive(Debug, Clone)]
struct Chainer {
    loss_scale: f64,
    seen_nonfinite: bool,
    multiplier: f64,
}

impl Policy for Chainer {
    fn loss_scale(&self) -> f64 {
        self.loss_scale
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.loss_scale;
        let multiplier = match (observed.found_inf, self.seen_nonfinite) {
            (true, _) => 0.5,
            (false, true) => self.multiplier,
            (false, false) => 2.0,
        };
        self.seen_nonfinite |= observed.found_inf;
        self.loss_scale = (self.loss_scale * multiplier).clamp(1.0, 65504.0);
        Ok(Update::of(observed, before, self.loss_scale))
    }

    fn save(&self) -> State {
        State::new()
    }

    fn load(&mut self, _saved: &State) -> Result<(), PolicyError> {
        Ok(())
    }

    fn counters(&self) -> State {
        state([("seen_nonfinite", self.seen_nonfinite.into())])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
