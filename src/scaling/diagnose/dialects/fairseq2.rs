//! fairseq2, which says everything, growths and its window included.
//!
//! ```text
//! fp16 loss scale window set to 2000.
//! Overflow detected at step 3, ignoring gradient, decreasing loss scale from 128 to 64.
//! No gradient overflow detected in the last 2000 step(s) after step 2003, increasing loss scale from 64 to 128.
//! ```
//!
//! Older versions name no steps. Scales are printed with six digits.

use super::{Dialect, Line, Processes, Weight};
use crate::scaling::diagnose::seen::{Overflow, Printed, Prints, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss};

pub const DIALECT: Dialect = Dialect {
    format: "fairseq2",
    framework: "fairseq2",
    prints: Prints::OldToNew,
    growth_printed: true,
    processes: Processes::One,
    weight: Weight::Events,
    family: "fairseq2",
    policy: Some("pytorch"),
    lines: &[
        Line {
            needle: "Overflow detected, ignoring gradient",
            read: overflow,
        },
        Line {
            needle: "Overflow detected at step",
            read: overflow_at,
        },
        Line {
            needle: "verflow detected, loss scale is already at minimum",
            read: |cursor| floor(cursor, Overflow::default()),
        },
        Line {
            needle: "No gradient overflow detected in the last",
            read: growth,
        },
        Line {
            needle: "loss scale window set to",
            read: |cursor| cursor.integer().map(Seen::Window),
        },
    ],
    ..Dialect::PLAIN
};

fn scale(cursor: &mut Cursor<'_>, words: &str) -> Result<Option<Printed>, Miss> {
    Ok(cursor.number_behind(words)?.map(Printed::general))
}

fn overflow_at(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let step = cursor.integer()?;
    cursor.expect(", ignoring gradient")?;
    event(
        cursor,
        Overflow {
            // Steps are counted from 1.
            iteration: Some(step.saturating_sub(1)),
            ..Overflow::default()
        },
    )
}

fn overflow(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    event(cursor, Overflow::default())
}

fn event(cursor: &mut Cursor<'_>, mut event: Overflow) -> Result<Seen, Miss> {
    if let Some(before) = scale(cursor, ", decreasing loss scale from")? {
        event.before = Some(before);
        event.after = scale(cursor, " to")?;
        event.at_floor = cursor.take(" (minimum)");
    } else if cursor.take(", loss scale is already at minimum") {
        return floor(cursor, event);
    }
    Ok(Seen::Overflow(event))
}

fn floor(cursor: &mut Cursor<'_>, event: Overflow) -> Result<Seen, Miss> {
    let at = scale(cursor, " (")?;
    Ok(Seen::Overflow(Overflow {
        before: at,
        after: at,
        at_floor: true,
        ..event
    }))
}

fn growth(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let interval = cursor.integer()?;
    cursor.expect(" step")?;
    cursor.take("(s)");
    cursor.take("s");
    cursor.number_behind(" after step")?;
    let before = scale(cursor, ", increasing loss scale from")?;
    Ok(Seen::Growth {
        before,
        after: scale(cursor, " to")?,
        interval: Some(interval),
    })
}
