//! The real loss-scaling policies as small state machines.
//!
//! One file a policy. Each follows its framework's *code*, in the number type that the framework uses; its docs say
//! where the framework's documentation parts from it. `tests/data/golden` holds traces recorded from the real
//! implementations, and every policy reproduces its own bit for bit.
//!
//! A policy is named and configured by text, `name[:key=value,...]`:
//!
//! ```
//! use gradscale::scaling::policy::{Defaults, Observed, PolicySpec};
//!
//! let spec = PolicySpec::parse("pytorch:growth_interval=2")?;
//! let mut policy = spec.build(Defaults::Framework)?;
//! for observed in [Observed::CLEAN, Observed::CLEAN, Observed::OVERFLOW] {
//!     policy.update(observed).expect("torch-amp ends only without an interval");
//! }
//! assert_eq!(policy.loss_scale(), 65536.0); // grown once, backed off once
//! # Ok::<(), gradscale::scaling::policy::PolicyError>(())
//! ```

use serde_json::{Map, Value as Json};

mod quiet;
mod registry;
mod spec;
mod state;

mod apex_amp;
mod apex_contrib;
mod apex_fp16_utils;
mod apex_hysteresis;
mod chainer;
mod colossalai;
mod deepspeed;
mod deepspeed_fp16;
mod fairseq;
mod fixed;
mod flax;
mod fsdp;
mod guided_diffusion;
mod jmp;
mod keras3;
mod megatron;
mod metaseq;
mod mindspore_cell;
mod mindspore_manager;
mod mindspore_scaler;
mod openseq2seq_backoff;
mod openseq2seq_logmax;
mod paddle;
mod paddle_static_op;
mod te_delayed_scaling;
mod tf_contrib;
mod tf_keras;
mod torch_amp;

pub(in crate::scaling) use registry::parse_number;
pub use registry::{Exception, Key, Kind, PolicyInfo, ScaleType, Value, find, policies};
pub(crate) use state::{as_number, number};

pub use spec::{Defaults, PolicySpec};

/// What one optimizer step tells a policy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Observed {
    /// A gradient of this step was inf or NaN.
    pub found_inf: bool,
    /// Largest absolute value of the *unscaled* gradients, where the caller knows it. Only amax-driven policies look at it.
    pub amax: Option<f32>,
}

impl Observed {
    /// A step in which every gradient was finite.
    pub const CLEAN: Observed = Observed {
        found_inf: false,
        amax: None,
    };
    /// A step in which a gradient was inf or NaN.
    pub const OVERFLOW: Observed = Observed {
        found_inf: true,
        amax: None,
    };
}

/// What a policy did with its scale after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The scale is what it was.
    Kept,
    /// The policy's growth rule fired and the scale rose.
    Grown,
    /// The policy's backoff rule fired and the scale fell (or was raised to its floor).
    BackedOff,
}

/// The rule that most policies share: so many clean steps in a row double the scale, an overflow halves it.
///
/// It speaks of a fresh policy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Doubling {
    /// Clean steps from one growth to the next.
    pub interval: u64,
    /// Clean steps from the start or an overflow to a growth: `interval`, or one more.
    pub after_overflow: u64,
    /// Overflows since the last growth until one halves; 1 where each does.
    pub hysteresis: u64,
    /// What holds the scale up.
    pub floor: Floor,
    /// No growth leads above this.
    pub ceiling: f64,
    /// Whether doubling 2^127 gives infinity, from where no halving leads back; else a scale at which every step overflows.
    pub in_f32: bool,
}

impl Doubling {
    /// Every overflow halves, nothing holds the scale but a ceiling.
    pub fn plain(interval: u64, ceiling: f64) -> Doubling {
        Doubling {
            interval,
            after_overflow: interval,
            hysteresis: 1,
            floor: Floor::None,
            ceiling,
            in_f32: false,
        }
    }
}

/// What an overflow does at the lower end of the scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Floor {
    /// There is no lower end.
    None,
    /// Half of it or less becomes this scale.
    Stays(f64),
    /// A halving of this scale ends the training.
    StopsAt(f64),
    /// A halving to this scale or below ends the training.
    StopsBelow(f64),
}

/// The result of one [`Policy::update`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Update {
    /// Whether the optimizer step was left out.
    pub skipped: bool,
    /// What happened to the scale.
    pub change: Change,
}

impl Update {
    /// What an update did, from the scale before and after it. A change in a step that overflowed is a backoff, also
    /// where it raised the scale to its floor.
    pub(crate) fn of(observed: Observed, before: impl Into<f64>, after: impl Into<f64>) -> Update {
        let (before, after) = (before.into(), after.into());
        let change = if before == after || (before.is_nan() && after.is_nan()) {
            Change::Kept
        } else if !observed.found_inf && after > before {
            Change::Grown
        } else {
            Change::BackedOff
        };
        Update {
            skipped: observed.found_inf,
            change,
        }
    }
}

/// A policy's own end: the framework raises an error here and training stops.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind}: {message}")]
pub struct Terminal {
    /// The exception's class in the original, such as `FloatingPointError`.
    pub kind: &'static str,
    /// The original's message, in its words.
    pub message: String,
}

/// A saved state: just the fields that the original saves, under the original's names.
pub type State = Map<String, Json>;

/// A loss-scaling policy: a state machine that sets the next loss scale from whether this step overflowed.
pub trait Policy: std::fmt::Debug + Send + Sync {
    /// The scale that the next step uses. Policies that keep an f32 return it widened, which is exact.
    fn loss_scale(&self) -> f64;

    /// Ends a step that ran at [`loss_scale`](Policy::loss_scale).
    ///
    /// # Errors
    /// The implementation's own terminal error; the state is then what the original leaves behind.
    fn update(&mut self, observed: Observed) -> Result<Update, Terminal>;

    /// How many clean steps from here on change nothing but counters: the scale stays, and so does everything that a
    /// replay reports. A replay jumps over them; 0, the default, makes it step.
    fn quiet_steps(&self) -> u64 {
        0
    }

    /// Does at once what `steps` clean updates would do; `steps` is at most [`quiet_steps`](Policy::quiet_steps).
    fn pass_quietly(&mut self, steps: u64) {
        debug_assert_eq!(steps, 0, "a policy with quiet steps passes them itself");
    }

    /// Where a fresh policy follows the rule of doubling and halving: its settings. Bounds over undecided steps are then
    /// found without following every state.
    fn doubling(&self) -> Option<Doubling> {
        None
    }

    /// A key of the whole state: two policies of one configuration that have the same one behave alike from here on.
    fn fingerprint(&self) -> [u64; 2] {
        use std::hash::{Hash, Hasher};
        let text = format!("{self:?}");
        [0u8, 1].map(|salt| {
            let mut hasher = std::hash::DefaultHasher::new();
            (salt, &text).hash(&mut hasher);
            hasher.finish()
        })
    }

    /// The state as the original checkpoints it.
    fn save(&self) -> State;

    /// Loads a state into a freshly built policy, as the original's resume does. Fields that the original does not
    /// save keep their constructed values.
    ///
    /// # Errors
    /// When a field is missing or of the wrong type.
    fn load(&mut self, state: &State) -> Result<(), PolicyError>;

    /// Counters after the last step, in the implementation's own words (golden traces compare them).
    fn counters(&self) -> State {
        State::new()
    }

    /// Whether [`Observed::amax`] drives this policy: a clean step without it is then an error.
    fn needs_amax(&self) -> bool {
        false
    }

    /// A copy of the whole state, saved or not.
    fn clone_box(&self) -> Box<dyn Policy>;
}

impl<P: Policy + 'static> From<P> for Box<dyn Policy> {
    fn from(policy: P) -> Self {
        Box::new(policy)
    }
}

impl Clone for Box<dyn Policy> {
    fn clone(&self) -> Self {
        self.clone_box()
    }
}

/// What is wrong with a policy's text, key, value or saved state.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// No policy has this name.
    #[error(
        "parsing policy \"{text}\": found the name \"{found}\", expected {expected}; `gradscale policies` lists all"
    )]
    UnknownPolicy {
        /// The user's whole text.
        text: String,
        /// The name in it.
        found: String,
        /// The nearest names.
        expected: String,
    },
    /// A setting is not of the form `key=value`.
    #[error(
        "parsing policy \"{text}\": found \"{found}\", expected key=value such as growth_interval=500; settings are separated by commas"
    )]
    NotASetting {
        /// The user's whole text.
        text: String,
        /// The part that is not a setting.
        found: String,
    },
    /// The policy has no such key.
    #[error(
        "configuring policy \"{policy}\": found the key \"{found}\", expected {expected}; `gradscale policies {policy}` explains them"
    )]
    UnknownKey {
        /// The policy's name.
        policy: String,
        /// The key as written.
        found: String,
        /// The nearest key, then all of them.
        expected: String,
    },
    /// A key was given twice, perhaps once under another of its names.
    #[error(
        "configuring policy \"{policy}\": found \"{key}\" twice, expected it once; leave one out"
    )]
    RepeatedKey {
        /// The policy's name.
        policy: String,
        /// The implementation's name of the key.
        key: String,
    },
    /// A key's value cannot be used.
    #[error(
        "configuring policy \"{policy}\", key \"{key}\": found \"{found}\", expected {expected}; `gradscale policies {policy}` gives the defaults"
    )]
    BadValue {
        /// The policy's name.
        policy: String,
        /// The key as written.
        key: String,
        /// The value as written.
        found: String,
        /// What would do.
        expected: String,
    },
    /// A saved state lacks a field or has one of another type.
    #[error(
        "loading a state into policy \"{policy}\", field \"{field}\": found {found}, expected {expected}; load a state that the same policy saved"
    )]
    BadState {
        /// The policy's name.
        policy: &'static str,
        /// The field.
        field: String,
        /// The value found, as JSON, or `nothing`.
        found: String,
        /// What would do.
        expected: &'static str,
    },
}
