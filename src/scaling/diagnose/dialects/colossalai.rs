//! ColossalAI: a bare sentence without any value.
//!
//! ```text
//! Found overflow. Skip step
//! ```

use super::{Dialect, Line, Processes, Weight};
use crate::scaling::diagnose::seen::{Overflow, Prints, Seen};

pub const DIALECT: Dialect = Dialect {
    format: "colossalai",
    framework: "ColossalAI",
    prints: Prints::Nothing,
    processes: Processes::One,
    weight: Weight::Events,
    family: "colossalai",
    policy: Some("colossalai"),
    lines: &[Line {
        needle: "Found overflow. Skip step",
        read: |_| Ok(Seen::Overflow(Overflow::default())),
    }],
    ..Dialect::PLAIN
};
