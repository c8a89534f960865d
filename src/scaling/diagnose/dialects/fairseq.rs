//! fairseq.
//!
//! ```text
//! NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: 64.0
//! | WARNING: overflow detected, setting loss scale to: 64.0
//! train_inner | epoch 001:  14 / 2100 loss=6.610, … num_updates=10, … loss_scale=8, …
//! FloatingPointError: Minimum loss scale reached (0.0001).
//! ```
//!
//! Only rank 0 prints. Events show the value after the update; the progress field rounds, and in old versions it is the
//! mean of the interval. The overflow behind the final error has no line of its own.

use super::{Dialect, Line, Processes, Weight, progress_of};
use crate::scaling::diagnose::seen::{Clock, Overflow, Printed, Prints, Reading, Record, Seen};
use crate::scaling::diagnose::text::{self, Cursor, Miss, has, key};

pub const DIALECT: Dialect = Dialect {
    format: "fairseq",
    framework: "fairseq",
    prints: Prints::After,
    processes: Processes::One,
    weight: Weight::Events,
    family: "fairseq",
    floor: Some(1e-4),
    policy: Some("fairseq"),
    lines: &[
        Line {
            needle: "overflow detected, setting loss scale to",
            read: overflow,
        },
        Line {
            needle: "overflow detected, ignoring gradient, setting loss scale to",
            read: overflow,
        },
        Line {
            needle: "loss_scale",
            read: progress,
        },
        Line {
            needle: "loss_scale=",
            read: progress,
        },
        Line {
            needle: "Minimum loss scale reached",
            read: stopped,
        },
        Line {
            needle: "begin training epoch 1",
            read: |cursor| match cursor.rest().first() {
                Some(b'0'..=b'9') => Err(Miss::Other),
                _ => Ok(Seen::Start),
            },
        },
    ],
    ..Dialect::PLAIN
};

pub fn overflow(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    Ok(Seen::Overflow(Overflow {
        after: cursor.number_behind(":")?.map(Printed::exact),
        ..Overflow::default()
    }))
}

/// A progress line, as words or as JSON; `num_updates` tells it from everybody else's `loss_scale`.
pub fn progress(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let line = cursor.text;
    let old = has(line, key!("| epoch ")) && has(line, key!("| loss_scale "));
    if !has(line, key!("num_updates")) && !old {
        return Err(Miss::Other);
    }
    let (scale, _) = text::field(line, key!("loss_scale"), cursor.cut)
        .or_else(|| text::field(line, key!("train_loss_scale"), cursor.cut))
        .ok_or(Miss::Other)?;
    let mut record = progress_of(cursor);
    if let Some((updates, _)) = text::field(line, key!("num_updates"), cursor.cut)
        .or_else(|| text::field(line, key!("train_num_updates"), cursor.cut))
    {
        record.step = Some(updates.count());
        record.of = None;
        record.clock = Clock::Applied;
    }
    cursor.at = line.len();
    Ok(Seen::Record(Record {
        scale: Some((Printed::rounded(scale), Reading::Mean)),
        ..record
    }))
}

fn stopped(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let minimum = cursor.number_behind(" (")?;
    Ok(Seen::Stopped(minimum.map(Printed::rounded)))
}
