//! DeepSpeed without ZeRO: the fused and unfused FP16 optimizers.
//!
//! ```text
//! Grad overflow on iteration 0
//! Reducing dynamic loss scale from 64 to 32.0
//! [Rank 0] Overflow detected. Skipping step. Attempted loss scale: 64, reducing to 32.0
//! No Grad overflow for 1000 iterations
//! Increasing dynamic loss scale from 32.0 to 64.0
//! ```
//!
//! The first two come from every rank, the third from rank 0 only: all are one event. The iteration counts optimizer
//! steps from 0.

use super::deepspeed::attempted;
use super::{Dialect, Line, Processes, Weight};
use crate::scaling::diagnose::seen::{Overflow, Printed, Prints, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss};

pub const DIALECT: Dialect = Dialect {
    format: "deepspeed-fused",
    framework: "DeepSpeed",
    prints: Prints::OldToNew,
    growth_printed: true,
    processes: Processes::Every,
    weight: Weight::Own,
    family: "deepspeed",
    floor: Some(1.0),
    policy: Some("deepspeed-fp16-fused"),
    lines: &[
        Line {
            needle: "Grad overflow on iteration",
            read: iteration,
        },
        Line {
            needle: "Reducing dynamic loss scale from",
            read: reducing,
        },
        Line {
            needle: "Increasing dynamic loss scale from",
            read: increasing,
        },
        Line {
            needle: "Overflow detected. Skipping step.",
            read: summary,
        },
        Line {
            needle: "No Grad overflow for",
            read: |cursor| cursor.integer().map(Seen::GrowthInterval),
        },
    ],
    ..Dialect::PLAIN
};

fn iteration(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    cursor.take(":");
    Ok(Seen::Overflow(Overflow {
        iteration: Some(cursor.integer()?),
        ..Overflow::default()
    }))
}

fn reducing(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let before = cursor.number()?;
    let after = cursor.number_behind(" to")?;
    Ok(Seen::Overflow(Overflow {
        before: Some(Printed::exact(before)),
        after: after.map(Printed::exact),
        ..Overflow::default()
    }))
}

fn increasing(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let before = cursor.number()?;
    let after = cursor.number_behind(" to")?;
    Ok(Seen::Growth {
        before: Some(Printed::exact(before)),
        after: after.map(Printed::exact),
        interval: None,
    })
}

fn summary(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    Ok(Seen::Overflow(Overflow {
        rank: Some(0),
        ..attempted(cursor)?
    }))
}
