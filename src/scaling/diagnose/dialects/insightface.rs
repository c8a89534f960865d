//! insightface (ArcFace).
//!
//! ```text
//! Training: … Loss 51.9093   LearningRate 0.0781   Epoch: 0   Global Step: 50   Fp16 Grad Scale: 100   Required: 237 hours
//! ```
//!
//! The value has no decimals: 0 means "below one half". Start and cap are multiples of the batch size, so nothing here
//! need be a power of two.

use super::{Dialect, Line, Processes, Weight, progress_of};
use crate::scaling::diagnose::seen::{Printed, Prints, Reading, Record, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss};

pub const DIALECT: Dialect = Dialect {
    format: "insightface",
    framework: "insightface",
    prints: Prints::After,
    processes: Processes::One,
    weight: Weight::Progress,
    family: "insightface",
    policy: Some("pytorch"),
    lines: &[Line {
        needle: "Fp16 Grad Scale:",
        read: progress,
    }],
    ..Dialect::PLAIN
};

fn progress(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let scale = cursor.number()?;
    let record = progress_of(cursor);
    cursor.at = cursor.text.len();
    Ok(Seen::Record(Record {
        scale: Some((Printed::rounded(scale), Reading::Value)),
        ..record
    }))
}
