//! NVIDIA DLLogger.
//!
//! ```text
//! DLL 2020-03-26 06:32:24.441546 - PARAMETER loss_scale : 32768.0
//! DLL … - Training Epoch: 0 Training Iteration: 10  average_loss : 9.1  step_loss : 9.0  learning_rate : 1e-05
//! ```
//!
//! A `PARAMETER` line follows each change, up or down.

use super::{Dialect, Line, Processes, Weight};
use crate::scaling::diagnose::seen::{Printed, Prints, Reading, Record, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss, has, key};

pub const DIALECT: Dialect = Dialect {
    format: "dll",
    framework: "DLLogger",
    prints: Prints::After,
    processes: Processes::One,
    weight: Weight::Progress,
    family: "dll",
    every_change: true,
    policy: Some("pytorch"),
    lines: &[Line {
        needle: "loss_scale",
        read: parameter,
    }],
    ..Dialect::PLAIN
};

fn parameter(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    if !has(cursor.text, key!("DLL ")) || !has(cursor.text, key!("PARAMETER")) {
        return Err(Miss::Other);
    }
    cursor.expect(" :")?;
    let scale = cursor.number()?;
    Ok(Seen::Record(Record {
        scale: Some((Printed::exact(scale), Reading::Value)),
        ..Record::default()
    }))
}
