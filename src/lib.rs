//! gradscale answers one question for people who train in FP16: *what loss scale, and what growth interval?*
//!
//! It measures gradients once, replays them through FP16 at every scale, replays loss-scaling policies over the
//! run, and says what to set, why, and how sure it is.
//!
//! ```text
//!  dumps --> gradients --chunks of f32--> kernel --counts--> tally::Sketch      training logs
//!                                                                |                  |
//!  series ----------------------------------------------> tally::Trace              |
//!                                                                |                  |
//!                                        +-----------------------+--------------+   |
//!                                        v                                      v   v
//!                                    analysis                                 scaling
//!                         (outcomes at every scale)        (policies, simulate, recommend, diagnose, laws)
//!                                        \                                      /
//!                                         '-----------> plot, report <---------'
//! ```

pub mod analysis;
pub mod atomic;
pub mod builtin;
pub mod float;
pub mod gradients;
pub mod histograms;
pub mod input;
pub mod kernel;
pub mod plot;
pub mod report;
pub mod scaling;
pub mod tally;
pub mod text;
pub mod warning;

#[cfg(feature = "cli")]
pub mod cli;
