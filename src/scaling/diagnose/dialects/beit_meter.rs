//! The meters of BEiT, ConvNeXt, VideoMAE and the MAE family.
//!
//! ```text
//! Epoch: [115]  [  10/1299]  eta: …  loss: 6.6 (6.6)  loss_scale: 16384.0000 (16384.0000)  … grad_norm: 0.39 (nan)
//! ```
//!
//! The first number is the median of the last 20 iterations, so it shows a change up to 10 iterations late; in brackets
//! stands the mean since the epoch began. `Averaged stats:` closes an epoch.

use super::{Dialect, Line, Processes, Weight, progress_of};
use crate::scaling::diagnose::seen::{Printed, Prints, Reading, Record, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss, has, key};

pub const DIALECT: Dialect = Dialect {
    format: "beit-meter",
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
    if !has(line, key!("Epoch: [")) && !has(line, key!("Averaged stats:")) {
        return Err(Miss::Other);
    }
    cursor.expect(":")?;
    let value = cursor.number()?;
    let mean = cursor.number_behind(" (")?;
    let record = progress_of(cursor);
    cursor.at = line.len();
    Ok(Seen::Record(Record {
        scale: Some((Printed::rounded(value), Reading::Median)),
        mean: mean.map(|m| m.value),
        ..record
    }))
}
