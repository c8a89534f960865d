//! The meters of Swin Transformer and its children.
//!
//! ```text
//! Train: [0/300][4050/5004]  eta … lr …  time v (m)  loss v (m)  grad_norm v (m)  loss_scale v (m)  mem …
//! ```
//!
//! Tabs stand between the fields. The value is the current one, in brackets stands the mean since the epoch began: no power of two, and one NaN
//! poisons it to the end of the epoch.

use super::{Dialect, Line, Processes, Weight, progress_of};
use crate::scaling::diagnose::seen::{Printed, Prints, Reading, Record, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss, has, key};

pub const DIALECT: Dialect = Dialect {
    format: "swin-meter",
    framework: "PyTorch",
    prints: Prints::After,
    processes: Processes::One,
    weight: Weight::Progress,
    family: "meter",
    policy: Some("pytorch"),
    lines: &[Line {
        needle: "loss_scale",
        read: progress,
    }],
    ..Dialect::PLAIN
};

fn progress(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let line = cursor.text;
    if !has(line, key!("Train: [")) || cursor.text.get(cursor.at) != Some(&b' ') {
        return Err(Miss::Other);
    }
    let value = cursor.number()?;
    let mean = cursor.number_behind(" (")?;
    let record = progress_of(cursor);
    cursor.at = line.len();
    Ok(Seen::Record(Record {
        scale: Some((Printed::rounded(value), Reading::Value)),
        mean: mean.map(|m| m.value),
        ..record
    }))
}
