//! The old `FP16_Optimizer` of apex and its copies.
//!
//! ```text
//! OVERFLOW! Skipping step. Attempted loss scale: 65536
//! Grad overflow on iteration 3
//! Using dynamic loss scale of 32768
//! ```
//!
//! The value is the one that overflowed; the halving follows the print.

use super::{Dialect, Line, Processes, Weight};
use crate::scaling::diagnose::seen::{Overflow, Printed, Prints, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss};

pub const DIALECT: Dialect = Dialect {
    format: "fp16-optimizer-legacy",
    framework: "apex",
    prints: Prints::Before,
    processes: Processes::Every,
    weight: Weight::Own,
    family: "deepspeed",
    policy: Some("apex-fp16-utils"),
    lines: &[
        Line {
            needle: "OVERFLOW! Skipping step.",
            read: attempted,
        },
        Line {
            needle: "Using dynamic loss scale of",
            read: using,
        },
    ],
    ..Dialect::PLAIN
};

fn attempted(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    cursor.expect(" Attempted loss scale:")?;
    let before = cursor.number()?;
    // The message ends here; newer ones go on with the scale after.
    let after = cursor.number_behind(", reducing to").unwrap_or(None);
    Ok(Seen::Overflow(Overflow {
        before: Some(Printed::exact(before)),
        after: after.map(Printed::exact),
        ..Overflow::default()
    }))
}

fn using(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    Ok(Seen::Overflow(Overflow {
        before: Some(Printed::exact(cursor.number()?)),
        ..Overflow::default()
    }))
}
