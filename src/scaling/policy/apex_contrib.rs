//! `apex-contrib-fp16-optimizer`: the scaling inside `apex.contrib.optimizers.FP16_Optimizer`.
//!
//! The rule of `apex-fp16-utils` with init 2^16, factor 2 and window 1000. The class takes no arguments for them
//! (`dynamic_loss_args` raises `SystemError`); the keys here are the attributes that one can overwrite. `state_dict` holds
//! scale, both counters, factor and window.

use super::apex_fp16_utils::ModuloScaler;
use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::{Policy, PolicyError};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "apex-contrib-fp16-optimizer",
    aliases: &["apex-contrib"],
    scale_type: ScaleType::F64,
    keys: &[
        Key::new("cur_scale", &["init_scale", "scale"], Kind::Scale, Value::Real(65536.0), "scale of the first step"),
        Key::new("scale_window", &["growth_interval"], Kind::Integer { least: 1 }, Value::Integer(1000), "clean steps in a row that bring growth"),
    ],
    summary: "apex.contrib FP16_Optimizer: as apex-fp16-utils from 2^16",
    explanation: "\
Halves at every overflow, never below 1; doubles whenever the steps since the last overflow are a multiple of
scale_window. The class accepts no arguments for its scaling; the keys are its attributes.",
    source: "NVIDIA/apex tag 24.04.01 apex/contrib/optimizers/fp16_optimizer.py",
    exceptions: &[
        Exception { law: "growth_is_guarded", reason: "a Python float without a ceiling; the scaled loss is infinite long before, and that overflow brings it back" },
        Exception { law: "no_livelock_at_ceiling", reason: "from an infinite float no division comes back" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(ModuloScaler::new(
        INFO.name,
        settings.f64("cur_scale"),
        2.0,
        settings.i64("scale_window"),
    )))
}
