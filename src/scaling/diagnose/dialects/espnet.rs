//! ESPnet.
//!
//! ```text
//! 2epoch:train:81-100batch: … loss=nan, … grad_norm=nan, … loss_scale=8.470e-23, …
//! The grad norm is nan. Skipping updating the model.
//! ```
//!
//! The scale (`grad_scale` in older forks) is a mean over the valid steps of the interval, four significant digits. Each
//! refused step has a line, without a value.

use super::{Dialect, Line, Processes, Weight, progress_of};
use crate::scaling::diagnose::seen::{Overflow, Printed, Prints, Reading, Record, Seen};
use crate::scaling::diagnose::text::{self, Cursor, Miss, has, key};

pub const DIALECT: Dialect = Dialect {
    format: "espnet",
    framework: "ESPnet",
    prints: Prints::Mean,
    processes: Processes::One,
    weight: Weight::Own,
    family: "espnet",
    policy: Some("pytorch"),
    lines: &[
        Line {
            needle: "loss_scale=",
            read: progress,
        },
        Line {
            needle: "grad_scale=",
            read: progress,
        },
        Line {
            needle: "Skipping updating the model",
            read: refused,
        },
        Line {
            needle: "The gradients at all steps are invalid in this epoch",
            read: |_| Ok(Seen::Mention),
        },
    ],
    ..Dialect::PLAIN
};

fn progress(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let line = cursor.text;
    if !has(line, key!("batch: ")) || !has(line, key!("epoch:")) {
        return Err(Miss::Other);
    }
    let scale = cursor.number()?;
    let mut record = progress_of(cursor);
    // `2epoch:train:81-100batch:`: the last batch of the interval.
    if let Some(at) = key!("batch: ").find(line) {
        let digits = line[..at]
            .iter()
            .rev()
            .take_while(|b| b.is_ascii_digit())
            .count();
        record.step = Cursor::new(line, at - digits, false).integer().ok();
        record.of = None;
    }
    if let Some(at) = key!("epoch:").find(line) {
        let digits = line[..at]
            .iter()
            .rev()
            .take_while(|b| b.is_ascii_digit())
            .count();
        record.epoch = Cursor::new(line, at - digits, false).integer().ok();
    }
    if let Some((norm, _)) = text::field(line, key!("grad_norm"), cursor.cut) {
        record.norm_nonfinite = !norm.value.is_finite();
    }
    if has(line, key!("epoch:valid:")) {
        return Err(Miss::Other);
    }
    cursor.at = line.len();
    Ok(Seen::Record(Record {
        scale: Some((Printed::rounded(scale), Reading::Mean)),
        ..record
    }))
}

fn refused(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    if !has(&cursor.text[..cursor.at], key!("The grad norm is ")) {
        return Err(Miss::Other);
    }
    Ok(Seen::Overflow(Overflow::default()))
}
