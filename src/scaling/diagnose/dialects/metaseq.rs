//! metaseq: fairseq's words, and a window that moves with the scale.
//!
//! ```text
//! *** SCALE_WINDOW: 256, loss scale: 4.0 ***
//! NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: 0.03125
//! ```
//!
//! At its minimum 2^-5 it goes on printing the same value.

use super::{Dialect, Line, Processes, Weight};
use crate::scaling::diagnose::seen::{Printed, Prints, Reading, Record, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss};

pub const DIALECT: Dialect = Dialect {
    format: "metaseq",
    framework: "metaseq",
    prints: Prints::After,
    processes: Processes::One,
    weight: Weight::Own,
    family: "fairseq",
    floor: Some(0.03125),
    policy: Some("metaseq"),
    lines: &[Line {
        needle: "SCALE_WINDOW",
        read: window,
    }],
    ..Dialect::PLAIN
};

fn window(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    cursor.expect(":")?;
    cursor.number()?;
    let scale = cursor.number_behind(", loss scale:")?.ok_or(Miss::Other)?;
    Ok(Seen::Record(Record {
        scale: Some((Printed::exact(scale), Reading::Value)),
        ..Record::default()
    }))
}
