//! `guided-diffusion`: OpenAI's log2 scaler, `MixedPrecisionTrainer`.
//!
//! ```text
//! overflow:  lg = lg - 1
//! clean:     lg = lg + growth            S = 2^lg
//! ```
//!
//! No floor, no ceiling, no counters. 0.001 a step doubles every 1000 clean steps, and the share of overflows settles at
//! growth / (1 + growth), about 0.1 %. `lg` gathers f64 rounding errors, so it is replayed by adding, step by step.
//! **Nothing is saved**: a resume starts at the initial lg.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "guided-diffusion",
    aliases: &[],
    scale_type: ScaleType::F64,
    keys: &[
        Key::new("initial_lg_loss_scale", &["init_scale"], Kind::Within(-1000.0, 1000.0), Value::Real(20.0), "log2 of the first scale; init_scale takes the scale itself"),
        Key::new("fp16_scale_growth", &[], Kind::Between(0.0, f64::INFINITY), Value::Real(0.001), "added to log2 of the scale at every clean step"),
    ],
    summary: "guided-diffusion: halve on overflow, multiply by 2^0.001 at every clean step",
    explanation: "\
Keeps log2 of the scale: an overflow subtracts 1, a clean step adds fp16_scale_growth (0.001 doubles in 1000 clean steps).
No floor, no ceiling. About one step in 1000 overflows for ever, by design. A checkpoint holds nothing: a resume starts at
initial_lg_loss_scale. The classifier script starts at 16.",
    source: "openai/guided-diffusion 22e0df8 guided_diffusion/fp16_util.py",
    exceptions: &[
        Exception { law: "scale_stays_positive", reason: "there is no floor: the float is 0 after 1095 overflows in a row" },
        Exception { law: "growth_is_guarded", reason: "there is no ceiling; the scaled loss is infinite long before, and that overflow brings it back" },
        Exception { law: "no_livelock_at_floor", reason: "2^-1080 is 0 in a float, and so is a little more than that" },
        Exception { law: "save_load_continues", reason: "nothing is saved: a resume starts at the initial scale" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(GuidedDiffusion {
        lg_loss_scale: settings.f64("initial_lg_loss_scale"),
        fp16_scale_growth: settings.f64("fp16_scale_growth"),
    }))
}

#[derive(Debug, Clone)]
struct GuidedDiffusion {
    lg_loss_scale: f64,
    fp16_scale_growth: f64,
}

impl Policy for GuidedDiffusion {
    fn loss_scale(&self) -> f64 {
        // As in `chainer`: pow, not exp2.
        std::hint::black_box(2.0_f64).powf(self.lg_loss_scale)
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.lg_loss_scale;
        if observed.found_inf {
            self.lg_loss_scale -= 1.0;
        } else {
            self.lg_loss_scale += self.fp16_scale_growth;
        }
        Ok(Update::of(observed, before, self.lg_loss_scale))
    }

    fn save(&self) -> State {
        State::new()
    }

    fn load(&mut self, _saved: &State) -> Result<(), PolicyError> {
        Ok(())
    }

    fn counters(&self) -> State {
        state([("lg_loss_scale", number(self.lg_loss_scale))])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
