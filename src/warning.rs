//! Warnings are values: what was seen, what it may mean, what to try. The library returns them and never prints.

use serde::Serialize;

/// What a warning is about, to match on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    /// Values were captured in FP16: some zeros are underflows.
    CapturedInFp16,
    /// Some tensors were produced in f32 beside FP16 ones.
    MixedPrecision,
    /// Integer, boolean or complex tensors were left out.
    TensorsLeftOut,
    /// Some steps are not recorded.
    MissingSteps,
    /// Sketches are far apart.
    SampledThinly,
    /// The run is shorter than the policy's interval, or too short to say anything.
    ShortRun,
    /// A growth interval within the skip budget does not exist.
    BudgetNotMet,
    /// Tensors without signal.
    NoSignal,
    /// Part of a file or a whole file was passed over.
    PassedOver,
    /// A setting was derived from another policy's replay.
    BorrowedSettings,
    /// Steps overflow at any scale.
    NotAScaleProblem,
    /// The counts are bounds or estimates.
    NotExact,
    /// The input is a built-in run.
    BuiltInRun,
    /// Some steps' overflow is unknown at some scales.
    Censored,
    /// No one interval suits all phases of the run.
    Phases,
    /// A number is extrapolated beyond the record, or cannot be.
    Extrapolated,
    /// What a training log shows.
    Diagnosis,
    /// Tensors that become zero as a whole.
    WhollyFlushed,
    /// A logged scalar was taken as the loss scale.
    LoggedScale,
}

/// Something a reader of the result has to know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// What it is about.
    pub kind: Kind,
    /// The fact.
    pub seen: String,
    /// What it may mean.
    pub may_mean: String,
    /// What to try next.
    #[serde(rename = "try")]
    pub try_next: String,
}

impl Warning {
    /// A warning.
    pub fn new(
        kind: Kind,
        seen: impl Into<String>,
        may_mean: impl Into<String>,
        try_next: impl Into<String>,
    ) -> Self {
        Warning {
            kind,
            seen: seen.into(),
            may_mean: may_mean.into(),
            try_next: try_next.into(),
        }
    }
}

impl std::fmt::Display for Warning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}: {}. Try: {}.",
            self.seen, self.may_mean, self.try_next
        )
    }
}
