//! AudioCraft (flashy).
//!
//! ```text
//! Train | Epoch 1 | 200/2000 | 1.5 it/sec | ce 5.1 | grad_norm 1.2 | grad_scale 65536.0
//! Train Summary | Epoch 1 | ce=5.0 | grad_norm=INF | grad_scale=60000.0
//! ```
//!
//! Every number is a mean over the interval or the epoch.

use super::{Dialect, Line, Processes, Weight, progress_of};
use crate::scaling::diagnose::seen::{Loss, Printed, Prints, Reading, Record, Seen};
use crate::scaling::diagnose::text::{self, Cursor, Miss, has, key};

pub const DIALECT: Dialect = Dialect {
    format: "audiocraft",
    framework: "AudioCraft",
    prints: Prints::Mean,
    processes: Processes::One,
    weight: Weight::Progress,
    family: "audiocraft",
    policy: Some("pytorch"),
    lines: &[
        Line {
            needle: "| grad_scale ",
            read: progress,
        },
        Line {
            needle: "| grad_scale=",
            read: progress,
        },
    ],
    ..Dialect::PLAIN
};

fn progress(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let line = cursor.text;
    if !has(line, key!("Train")) || !has(line, key!("Epoch")) {
        return Err(Miss::Other);
    }
    let scale = cursor.number()?;
    let mut record = progress_of(cursor);
    if record.loss == Loss::None
        && let Some((ce, _)) = text::field(line, key!("ce"), cursor.cut)
    {
        record.loss = Loss::Value(ce.value);
    }
    // `Epoch 1 | 200/2000 |`
    if let Some(at) = key!("| Epoch ").find(line) {
        let mut here = Cursor::new(line, at + 8, cursor.cut);
        record.epoch = here.integer().ok();
        if here.take(" |")
            && let Ok(step) = here.number()
            && here.take("/")
        {
            record.step = Some(step.count());
            record.of = here.integer().ok();
        }
    }
    if has(line, key!("Train Summary")) {
        record.step = None;
    }
    cursor.at = line.len();
    Ok(Seen::Record(Record {
        scale: Some((Printed::rounded(scale), Reading::Mean)),
        ..record
    }))
}
