//! `te-delayed-scaling`: Transformer Engine's delayed scaling of one FP8 tensor. No loss scaler: it follows amax.
//!
//! ```text
//! a = max(history) or history[0];   rotate left by one, slot 0 = 0
//! S = (fp8_max / a) / 2^margin where a is finite and > 0, else unchanged; an infinite S becomes f32 max
//! ```
//!
//! Slot 0 of the history holds the current step's amax. The first step runs at scale 1. An inf in the window freezes the scale
//! until it has left, up to `amax_history_len` steps; a NaN poisons the maximum here, while the CUDA kernel's fmaxf ignores
//! it. Nothing is skipped, and the scale is no power of two.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, as_number, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "te-delayed-scaling",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::new("amax_history_len", &[], Kind::Integer { least: 1 }, Value::Integer(1024), "steps that amax is remembered"),
        Key::new("amax_compute_algo", &[], Kind::Choice(&["max", "most_recent"]), Value::Word(std::borrow::Cow::Borrowed("max")), "which amax of the history counts"),
        Key::new("margin", &[], Kind::Integer { least: -1000 }, Value::Integer(0), "binades of room"),
        Key::new("fp8_max", &[], Kind::Scale, Value::Real(448.0), "largest number of the format: 448 for E4M3, 57344 for E5M2"),
    ],
    summary: "Transformer Engine FP8 delayed scaling, per tensor: follows amax, skips nothing",
    explanation: "\
Sets the scale of an FP8 tensor so that the largest amax of the last amax_history_len steps fills the format, with
margin binades of room. Needs amax at each step. Not a loss scaler: overflows are clipped and no step is skipped.
Quirks: an inf freezes the scale until it leaves the window; a NaN does too on the Python path recorded here.",
    source: "NVIDIA/TransformerEngine d0067d0da transformer_engine/pytorch/quantization.py",
    exceptions: &[
        Exception { law: "skips_exactly_on_overflow", reason: "FP8 clips: no step is ever left out" },
        Exception { law: "grows_when_clean", reason: "the scale follows amax, not a count of clean steps" },
        Exception { law: "backs_off_on_overflow", reason: "an inf in the window freezes the scale" },
        Exception { law: "no_livelock_at_floor", reason: "an inf freezes the scale until it has left the window" },
    ],
    build,
};

/// The longest history that is kept; the default is 1024.
const HISTORY_LEN: i64 = 1 << 20;

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    let length = settings.i64("amax_history_len");
    if length > HISTORY_LEN {
        return Err(settings.bad("amax_history_len", "at most 1048576"));
    }
    Ok(Box::new(DelayedScaling {
        scale: 1.0,
        amax_history: vec![0.0; length as usize],
        most_recent: settings.word("amax_compute_algo") == "most_recent",
        margin: settings.i64("margin").clamp(-1000, 1000) as i32,
        fp8_max: settings.f32("fp8_max")?,
    }))
}

#[derive(Debug, Clone)]
struct DelayedScaling {
    scale: f32,
    amax_history: Vec<f32>,
    most_recent: bool,
    margin: i32,
    fp8_max: f32,
}

impl Policy for DelayedScaling {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.scale;
        let amax = match observed.amax {
            Some(amax) => amax,
            None if observed.found_inf => f32::INFINITY,
            None => return Err(super::openseq2seq_logmax::missing_amax()),
        };
        self.amax_history[0] = amax;
        let chosen = if self.most_recent {
            amax
        } else {
            // torch.amax hands a NaN on.
            self.amax_history.iter().fold(f32::NEG_INFINITY, |max, &a| {
                if max.is_nan() || a <= max { max } else { a }
            })
        };
        self.amax_history.rotate_left(1);
        self.amax_history[0] = 0.0;
        if chosen.is_finite() && chosen > 0.0 {
            // torch divides a number by a tensor as reciprocal times number: two roundings.
            let scale = (1.0 / chosen) * self.fp8_max / super::registry::exp2(self.margin) as f32;
            self.scale = if scale.is_infinite() { f32::MAX } else { scale };
        }
        let change = Update::of(
            Observed {
                found_inf: false,
                ..observed
            },
            before,
            self.scale,
        )
        .change;
        Ok(Update {
            skipped: false,
            change,
        })
    }

    fn save(&self) -> State {
        let mut saved = self.counters();
        saved.insert("scale".to_owned(), number(self.scale.into()));
        saved
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(INFO.name, saved);
        let history = saved.get("amax_history").and_then(|j| j.as_array());
        let history = history.and_then(|l| {
            l.iter()
                .map(|x| as_number(x).map(|x| x as f32))
                .collect::<Option<Vec<f32>>>()
        });
        self.amax_history = history
            .filter(|h| h.len() == self.amax_history.len())
            .ok_or_else(|| fields.bad("amax_history", "a list of amax_history_len numbers"))?;
        self.scale = fields.f32("scale")?;
        Ok(())
    }

    fn counters(&self) -> State {
        let history: Vec<_> = self
            .amax_history
            .iter()
            .map(|&a| number(a.into()))
            .collect();
        state([("amax_history", history.into())])
    }

    fn needs_amax(&self) -> bool {
        true
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
