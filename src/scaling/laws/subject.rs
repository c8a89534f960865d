//! What the laws are asked of: a policy in this process, or a program behind a pipe.

use serde_json::Value as Json;

use crate::scaling::policy::{Observed, Policy};

/// What a step came to.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// The scale that the next step uses, and whether this one was left out.
    Done {
        /// The scale after the update.
        scale: f64,
        /// Whether the optimizer step was left out.
        skipped: bool,
    },
    /// The scaler's own end.
    Terminal(String),
}

/// Why a subject could not be asked: it died, hung, answered nonsense, or refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{doing}: found {found}, expected {expected}")]
pub struct Failure {
    /// What was being asked.
    pub doing: String,
    /// What came back.
    pub found: String,
    /// What should have come.
    pub expected: String,
    /// The history up to there, where there was one.
    pub found_inf: Vec<bool>,
    /// Whether the subject had ever answered.
    pub had_answered: bool,
    /// Whether it answered now, in the protocol's words, that it will not.
    pub refused: bool,
}

/// A loss scaler that can be started over, stepped, saved and loaded.
pub trait Subject {
    /// Puts it into its first state; the scale of the first step.
    ///
    /// # Errors
    /// When it gives no proper answer.
    fn reset(&mut self) -> Result<f64, Failure>;

    /// Ends a step.
    ///
    /// # Errors
    /// When it gives no proper answer.
    fn step(&mut self, found_inf: bool) -> Result<Step, Failure>;

    /// Its saved state, whatever that looks like.
    ///
    /// # Errors
    /// When it gives no proper answer.
    fn save(&mut self) -> Result<Json, Failure>;

    /// Loads a saved state after a [`reset`](Subject::reset); the scale of the next step.
    ///
    /// # Errors
    /// When it gives no proper answer.
    fn load(&mut self, state: &Json) -> Result<f64, Failure>;
}

/// A [`Policy`] as a subject.
pub struct PolicySubject<'a> {
    build: &'a dyn Fn() -> Box<dyn Policy>,
    policy: Box<dyn Policy>,
}

impl std::fmt::Debug for PolicySubject<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PolicySubject")
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}

impl<'a> PolicySubject<'a> {
    /// A subject that `build` makes anew at every reset.
    pub fn new(build: &'a dyn Fn() -> Box<dyn Policy>) -> Self {
        PolicySubject {
            build,
            policy: build(),
        }
    }
}

/// amax of a clean step, for policies that look at it: gradients around 2^-6.
const AMAX: f32 = 0.015_625;

impl Subject for PolicySubject<'_> {
    fn reset(&mut self) -> Result<f64, Failure> {
        self.policy = (self.build)();
        Ok(self.policy.loss_scale())
    }

    fn step(&mut self, found_inf: bool) -> Result<Step, Failure> {
        let amax = Some(if found_inf { f32::INFINITY } else { AMAX });
        match self.policy.update(Observed { found_inf, amax }) {
            Ok(update) => Ok(Step::Done {
                scale: self.policy.loss_scale(),
                skipped: update.skipped,
            }),
            Err(terminal) => Ok(Step::Terminal(terminal.to_string())),
        }
    }

    fn save(&mut self) -> Result<Json, Failure> {
        Ok(Json::Object(self.policy.save()))
    }

    fn load(&mut self, state: &Json) -> Result<f64, Failure> {
        let refused = |found: String| Failure {
            doing: "loading a state that the scaler saved".to_owned(),
            found,
            expected: "the scaler to take it".to_owned(),
            found_inf: Vec::new(),
            had_answered: true,
            refused: true,
        };
        match state {
            Json::Object(state) => self
                .policy
                .load(state)
                .map_err(|e| refused(e.to_string()))?,
            _ => return Err(refused("a state that is no object".to_owned())),
        }
        Ok(self.policy.loss_scale())
    }
}
