//! fairseq2, which says everything, growths and its window included.
//!
//! ```text
//! float16 loss scale window set to 2000.
//! Overflow detected, ignoring gradient, decreasing loss scale from 128 to 64.
//! No gradient overflow detected in the last 2000 step(s), increasing loss scale from 64 to 128.
//! ```

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
            needle: "verflow detected, loss scale is already at minimum",
            read: floor,
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

/// The number, without the full stop of its sentence.
fn sentence_number(cursor: &mut Cursor<'_>, words: &str) -> Result<Option<Printed>, Miss> {
    Ok(cursor.number_behind(words)?.map(Printed::exact))
}

fn overflow(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let mut event = Overflow::default();
    if let Some(before) = sentence_number(cursor, ", decreasing loss scale from")? {
        event.before = Some(before);
        event.after = sentence_number(cursor, " to")?;
        event.at_floor = cursor.take(" (minimum)");
    } else if let Some(at) = sentence_number(cursor, ", loss scale is already at minimum (")? {
        event.before = Some(at);
        event.after = Some(at);
        event.at_floor = true;
    }
    Ok(Seen::Overflow(event))
}

fn floor(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let at = sentence_number(cursor, " (")?;
    Ok(Seen::Overflow(Overflow {
        before: at,
        after: at,
        at_floor: true,
        ..Overflow::default()
    }))
}

fn growth(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let interval = cursor.integer()?;
    cursor.expect(" step")?;
    cursor.take("(s)");
    cursor.take("s");
    let before = sentence_number(cursor, ", increasing loss scale from")?;
    Ok(Seen::Growth {
        before,
        after: sentence_number(cursor, " to")?,
        interval: Some(interval),
    })
}
