//! PaddleNLP's pretraining scripts.
//!
//! ```text
//! global step 20, loss: 10.5, … learning rate: 1e-05, loss_scaling: 32768.0, incr_count: 20, decr_count: 0
//! ```
//!
//! `incr_count` is the number of good steps since the last change or overflow.

use super::{Dialect, Line, Processes, Weight, progress_of};
use crate::scaling::diagnose::seen::{Printed, Prints, Reading, Record, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss};

pub const DIALECT: Dialect = Dialect {
    format: "paddlenlp-pretrain",
    framework: "Paddle",
    prints: Prints::After,
    processes: Processes::One,
    weight: Weight::Progress,
    family: "paddle",
    policy: Some("paddle"),
    lines: &[Line {
        needle: "loss_scaling:",
        read: progress,
    }],
    ..Dialect::PLAIN
};

fn progress(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let scale = cursor.number()?;
    let record = progress_of(cursor);
    cursor.at = cursor.text.len();
    Ok(Seen::Record(Record {
        scale: Some((Printed::exact(scale), Reading::Value)),
        ..record
    }))
}
