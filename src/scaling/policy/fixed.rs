//! `static`: a constant loss scale.
//!
//! Rule: the scale never changes. What differs between frameworks is whether an overflow is noticed at all: DeepSpeed's
//! `LossScaler`, Megatron's `ConstantGradScaler`, Paddle with `use_dynamic_loss_scaling=False` and MindSpore's
//! `FixedLossScaleManager` check and skip; apex.amp with a number does not check, and inf or NaN reach the weights; jmp
//! leaves it to the user. `skip_on_overflow=false` is the second kind.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{number, state};
use super::{Change, Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "static",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::new("scale", &["init_scale", "loss_scale"], Kind::Scale, Value::Real(65536.0), "the constant, any positive f32"),
        Key::new("skip_on_overflow", &[], Kind::Flag, Value::Flag(true), "check the gradients, and leave out a step that overflowed"),
    ],
    summary: "a constant; overflowing steps are skipped unless told otherwise",
    explanation: "\
The scale never changes. With skip_on_overflow=true (DeepSpeed LossScaler, Megatron ConstantGradScaler, Paddle and
MindSpore fixed) an overflowing step is found and left out. With skip_on_overflow=false nothing is checked, as in
apex.amp with a number: inf and NaN reach the weights.",
    source: "the common behaviour of deepspeed LossScaler, megatron ConstantGradScaler, apex.amp with a number",
    exceptions: &[
        Exception { law: "replicas_out_of_step_show", reason: "a constant scale is the same on every rank, whatever each saw" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(Static {
        scale: settings.f32("scale")?,
        skip_on_overflow: settings.flag("skip_on_overflow"),
    }))
}

#[derive(Debug, Clone)]
struct Static {
    scale: f32,
    skip_on_overflow: bool,
}

impl Policy for Static {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        Ok(Update {
            skipped: observed.found_inf && self.skip_on_overflow,
            change: Change::Kept,
        })
    }

    fn quiet_steps(&self) -> u64 {
        u64::MAX
    }

    fn pass_quietly(&mut self, _: u64) {}

    fn save(&self) -> State {
        state([("scale", number(self.scale.into()))])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        self.scale = super::state::Fields::new(INFO.name, saved).f32("scale")?;
        Ok(())
    }

    fn counters(&self) -> State {
        State::new()
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
