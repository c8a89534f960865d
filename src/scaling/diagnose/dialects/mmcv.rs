//! MMCV's own FP16 hook.
//!
//! ```text
//! Check overflow, downscale loss scale to 32768.0
//! ```

use super::{Dialect, Line, Processes, Weight};
use crate::scaling::diagnose::seen::{Overflow, Printed, Prints, Seen};

pub const DIALECT: Dialect = Dialect {
    format: "mmcv",
    framework: "MMCV",
    prints: Prints::After,
    processes: Processes::Every,
    weight: Weight::Events,
    family: "mmcv",
    policy: Some("apex-fp16-utils"),
    lines: &[Line {
        needle: "Check overflow, downscale loss scale to",
        read: |cursor| {
            Ok(Seen::Overflow(Overflow {
                after: cursor.number_behind("")?.map(Printed::exact),
                ..Overflow::default()
            }))
        },
    }],
    ..Dialect::PLAIN
};
