//! MindYOLO and other MindSpore training loops.
//!
//! ```text
//! overflow, still update, loss scale adjust to 1024.0
//! overflow, drop step, loss scale adjust to 512.0
//! overflow, loss scale adjust to  512.0
//! ```
//!
//! `still update` means what it says: the step was made with inf or NaN in it. Only overflows that fall on a logged step
//! have a line.

use super::{Dialect, Line, Processes, Weight};
use crate::scaling::diagnose::seen::{Overflow, Printed, Prints, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss};

pub const DIALECT: Dialect = Dialect {
    format: "mindyolo",
    framework: "MindSpore",
    prints: Prints::After,
    processes: Processes::Every,
    weight: Weight::Events,
    family: "mindyolo",
    policy: Some("mindspore-dynamic-loss-scaler"),
    lines: &[
        Line {
            needle: "overflow, still update, loss scale adjust to",
            read: |cursor| event(cursor, true),
        },
        Line {
            needle: "overflow, drop step, loss scale adjust to",
            read: |cursor| event(cursor, false),
        },
        Line {
            needle: "overflow, loss scale adjust to",
            read: adjusted,
        },
    ],
    ..Dialect::PLAIN
};

/// Without a word on the step: one widespread fork prints it when the gradients are *finite*, so the line only shows
/// the scale; a fall of it shows the overflow.
fn adjusted(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    Ok(Seen::Scale(Printed::exact(cursor.number()?)))
}

fn event(cursor: &mut Cursor<'_>, still_updated: bool) -> Result<Seen, Miss> {
    Ok(Seen::Overflow(Overflow {
        after: cursor.number_behind("")?.map(Printed::exact),
        still_updated,
        ..Overflow::default()
    }))
}
