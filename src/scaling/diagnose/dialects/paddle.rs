//! Paddle's scaler and the PaddleNLP trainer, which both report the same step.
//!
//! ```text
//! Found inf or nan, current scale is: 32768.0, decrease to: 32768.0*0.5
//! optimizer not run, scale_before: 32768.0, scale_after: 16384.0
//! ```

use super::{Dialect, Line, Processes, Weight};
use crate::scaling::diagnose::seen::{Overflow, Printed, Prints, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss};

pub const DIALECT: Dialect = Dialect {
    format: "paddle",
    framework: "Paddle",
    prints: Prints::OldToNew,
    processes: Processes::Every,
    weight: Weight::Events,
    family: "paddle",
    policy: Some("paddle"),
    lines: &[
        Line {
            needle: "Found inf or nan, current scale is:",
            read: found,
        },
        Line {
            needle: "optimizer not run, scale_before:",
            read: not_run,
        },
    ],
    ..Dialect::PLAIN
};

fn found(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let before = cursor.number()?;
    let mut event = Overflow {
        before: Some(Printed::exact(before)),
        ..Overflow::default()
    };
    if let Some(after) = cursor.number_behind(", decrease to:")? {
        let factor = cursor.number_behind("*")?;
        event.after = Some(Printed {
            value: after.value * factor.map_or(1.0, |f| f.value),
            ..Printed::exact(after)
        });
        if factor.is_none() && after.value == before.value {
            event.after = None;
        }
    }
    Ok(Seen::Overflow(event))
}

fn not_run(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let before = cursor.number()?;
    Ok(Seen::Overflow(Overflow {
        before: Some(Printed::exact(before)),
        after: cursor.number_behind(", scale_after:")?.map(Printed::exact),
        ..Overflow::default()
    }))
}
