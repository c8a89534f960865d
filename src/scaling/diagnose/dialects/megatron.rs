//! Megatron-LM's training lines, also those of Megatron-DeepSpeed, NeMo and Megatron-Bridge.
//!
//! ```text
//!  iteration  20/ 1000 | … | lm loss: 1.0E+01 | loss scale: 32768.0 | grad norm: 217.2 | number of skipped iterations: 8 | …
//! ```
//!
//! The scale is that after the last step of the interval; the counters count within the interval. A window whose steps
//! were all skipped has no loss field, and that is no NaN; under DeepSpeed the counters stay 0.

use super::{Dialect, Line, Processes, Weight, progress_of};
use crate::scaling::diagnose::seen::{Loss, Printed, Prints, Reading, Record, Seen};
use crate::scaling::diagnose::text::{self, Cursor, Miss, has, key};

pub const DIALECT: Dialect = Dialect {
    format: "megatron",
    framework: "Megatron-LM",
    prints: Prints::After,
    processes: Processes::One,
    weight: Weight::Progress,
    family: "megatron",
    floor: Some(1.0),
    policy: Some("megatron"),
    lines: &[Line {
        needle: "loss scale:",
        read: progress,
    }],
    ..Dialect::PLAIN
};

fn progress(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let line = cursor.text;
    if !has(line, key!("iteration")) || !has(line, key!("|")) {
        return Err(Miss::Other);
    }
    let scale = cursor.number()?;
    let mut record = progress_of(cursor);
    record.skipped =
        text::field(line, key!("number of skipped iterations"), cursor.cut).map(|(n, _)| n.count());
    if let Some((norm, _)) = text::field(line, key!("grad norm"), cursor.cut) {
        record.norm_nonfinite = !norm.value.is_finite();
        if record.loss == Loss::None && record.norm_nonfinite {
            record.loss = Loss::LeftOut;
        }
    }
    cursor.at = line.len();
    Ok(Seen::Record(Record {
        scale: Some((Printed::exact(scale), Reading::Value)),
        ..record
    }))
}
