//! Loss-scaling policies and what follows from replaying them.

mod censored;
mod combinations;
mod confidence;
pub mod diagnose;
pub mod exec;
pub mod golden;
mod horizon;
pub mod laws;
mod phases;
pub mod policy;
mod recommend;
mod run;
mod settings;
mod simulate;
pub mod statistics;
mod sweep;
mod underflow;

pub use combinations::{
    Row, SweepError, Swept, SweptKey, Values, combinations, parse as parse_sweep,
};
pub use confidence::{Backtest, Bootstrap};
pub use horizon::{AtHorizon, Horizon, horizon};
pub use phases::{Phase, in_common, phases};
pub use recommend::{
    Answer, Basis, FEWEST_STEPS, Options, RecommendError, Recommendation, Setting, TooShort,
    character, common_interval, percent, recommend,
};
pub use run::{Limits, Run, RunOptions, Verdict};
pub use settings::Framework;
pub use simulate::{
    Bounds, Cost, Segment, Simulated, Stopped, Timeline, cost, replay, replay_stepping, simulate,
};
pub use sweep::{Candidate, Choice, Density, Rule, choose, headroom_log2, octaves, static_scales};
pub use underflow::{Measure, Underflow};
