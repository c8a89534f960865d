//! `fsdp`: PyTorch's `ShardedGradScaler`.
//!
//! On CUDA the kernel is `torch-amp`'s. On the CPU the class has its own update:
//!
//! ```text
//! overflow:           S = S * backoff;  t = 0
//! clean, t + 1 == W:  S = S * growth;   t = 0          no finite check: it grows to inf
//! clean:              t = t + 1
//! ```
//!
//! There the f32 tensor is multiplied in place by a Python number, which acts as an f32. The class all-reduces found-inf
//! itself, so ranks agree. Read, not recorded.

use super::registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Settings, Value};
use super::state::{Fields, number, state};
use super::{Observed, Policy, PolicyError, State, Terminal, Update};

/// The registry's entry.
pub(crate) const INFO: PolicyInfo = PolicyInfo {
    name: "fsdp",
    aliases: &[],
    scale_type: ScaleType::F32,
    keys: &[
        Key::new("device", &[], Kind::Choice(&["cuda", "cpu"]), Value::Word(std::borrow::Cow::Borrowed("cuda")), "whose update runs"),
        Key::new("init_scale", &["scale"], Kind::Scale, Value::Real(65536.0), "scale of the first step"),
        Key::new("growth_factor", &[], Kind::Between(1.0, f64::INFINITY), Value::Real(2.0), "multiplier on growth"),
        Key::new("backoff_factor", &[], Kind::Between(0.0, 1.0), Value::Real(0.5), "multiplier on overflow"),
        Key::new("growth_interval", &[], Kind::Integer { least: i64::MIN }, Value::Integer(2000), "clean steps in a row that bring growth; 0 and below: never"),
    ],
    summary: "PyTorch ShardedGradScaler (FSDP): torch-amp, without a finite check on the CPU",
    explanation: "\
On device=cuda the rule is torch-amp's. On device=cpu growth is not checked, so the scale reaches infinity after 2^127 and
stays there, and the factors act as f32. The class all-reduces found-inf over the process group.",
    source: "pytorch/pytorch torch/distributed/fsdp/sharded_grad_scaler.py",
    exceptions: &[
        Exception { law: "scale_stays_positive", reason: "there is no floor: the scale is exactly 0 after 166 overflows in a row from 65536" },
        Exception { law: "no_livelock_at_floor", reason: "a scale of 0 doubles to 0, for ever" },
    ],
    build,
};

fn build(settings: &Settings<'_>) -> Result<Box<dyn Policy>, PolicyError> {
    Ok(Box::new(Sharded {
        on_cpu: settings.word("device") == "cpu",
        scale: settings.f32("init_scale")?,
        growth_factor: settings.f64("growth_factor"),
        backoff_factor: settings.f64("backoff_factor"),
        growth_interval: settings.i64("growth_interval"),
        growth_tracker: 0,
    }))
}

#[derive(Debug, Clone)]
struct Sharded {
    on_cpu: bool,
    scale: f32,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: i64,
    growth_tracker: i64,
}

impl Policy for Sharded {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let before = self.scale;
        match (observed.found_inf, self.on_cpu) {
            (true, false) => self.scale = (f64::from(self.scale) * self.backoff_factor) as f32,
            (true, true) => self.scale *= self.backoff_factor as f32,
            (false, false) => {
                super::torch_amp::grow(
                    &mut self.scale,
                    &mut self.growth_tracker,
                    self.growth_factor,
                    self.growth_interval,
                );
            }
            (false, true) => {
                self.growth_tracker += 1;
                if self.growth_tracker == self.growth_interval {
                    self.growth_tracker = 0;
                    self.scale *= self.growth_factor as f32;
                }
            }
        }
        if observed.found_inf {
            self.growth_tracker = 0;
        }
        Ok(Update::of(observed, before, self.scale))
    }

    fn quiet_steps(&self) -> u64 {
        super::quiet::counts_to(self.growth_tracker, self.growth_interval)
    }

    fn pass_quietly(&mut self, steps: u64) {
        self.growth_tracker += steps as i64;
    }

    fn save(&self) -> State {
        state([
            ("scale", number(self.scale.into())),
            ("growth_factor", number(self.growth_factor)),
            ("backoff_factor", number(self.backoff_factor)),
            ("growth_interval", self.growth_interval.into()),
            ("_growth_tracker", self.growth_tracker.into()),
        ])
    }

    fn load(&mut self, saved: &State) -> Result<(), PolicyError> {
        let fields = Fields::new(INFO.name, saved);
        self.scale = fields.f32("scale")?;
        self.growth_factor = fields.f64("growth_factor")?;
        self.backoff_factor = fields.f64("backoff_factor")?;
        self.growth_interval = fields.i64("growth_interval")?;
        self.growth_tracker = fields.i64("_growth_tracker")?;
        Ok(())
    }

    fn counters(&self) -> State {
        state([
            ("scale", number(self.scale.into())),
            ("growth_tracker", self.growth_tracker.into()),
        ])
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}
