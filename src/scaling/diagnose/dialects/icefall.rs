//! icefall (Zipformer, ZipVoice, VALL-E).
//!
//! ```text
//! Epoch 1, batch 14000, loss[loss=0.6584, …], tot_loss[…], batch size: 130, lr: 2.73e-02, grad_scale: 0.001953125
//! Grad scale is small: 0.0009765625
//! RuntimeError: grad_scale is too small, exiting: 7.62939453125e-06
//! ```
//!
//! The recipe doubles a small scale every 100 batches; the warning shows the value before that, the progress line the
//! one after.

use super::{Dialect, Line, Processes, Weight};
use crate::scaling::diagnose::seen::{Clock, Loss, Printed, Prints, Reading, Record, Seen};
use crate::scaling::diagnose::text::{self, Cursor, Miss, has, key};

pub const DIALECT: Dialect = Dialect {
    format: "icefall",
    framework: "icefall",
    prints: Prints::After,
    processes: Processes::Every,
    weight: Weight::Progress,
    family: "icefall",
    floor: Some(1e-5),
    policy: Some("pytorch"),
    lines: &[
        Line {
            needle: "grad_scale:",
            read: progress,
        },
        Line {
            needle: "Grad scale is small:",
            read: |cursor| Ok(Seen::Small(Printed::exact(cursor.number()?))),
        },
        Line {
            needle: "grad_scale is too small, exiting",
            read: |cursor| {
                Ok(Seen::Stopped(
                    cursor.number_behind(":")?.map(Printed::exact),
                ))
            },
        },
    ],
    ..Dialect::PLAIN
};

fn progress(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let line = cursor.text;
    if !has(line, key!("batch ")) || !has(line, key!("loss[")) {
        return Err(Miss::Other);
    }
    let scale = cursor.number()?;
    let step = text::field(line, key!("batch"), cursor.cut).map(|(n, _)| n.count());
    let epoch = text::field(line, key!("Epoch"), cursor.cut).map(|(n, _)| n.count());
    let loss = key!("loss[loss=")
        .find(line)
        .and_then(|at| Cursor::new(line, at + 10, cursor.cut).number().ok());
    cursor.at = line.len();
    Ok(Seen::Record(Record {
        step,
        epoch,
        clock: Clock::Loop,
        loss: loss.map_or(Loss::None, |n| Loss::Value(n.value)),
        scale: Some((Printed::exact(scale), Reading::Value)),
        ..Record::default()
    }))
}
