//! guided-diffusion, improved-diffusion and forks.
//!
//! ```text
//! Found NaN, decreased lg_loss_scale to 19.123
//! | lg_loss_scale | 19.1     |
//! ```
//!
//! The value is the base-2 logarithm of the scale: a good step adds 0.001, an overflow takes 1. The table shows three
//! digits of the interval's mean.

use super::{Dialect, Line, Processes, Weight};
use crate::scaling::diagnose::seen::{Overflow, Printed, Prints, Reading, Record, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss};

pub const DIALECT: Dialect = Dialect {
    format: "guided-diffusion",
    framework: "guided-diffusion",
    prints: Prints::After,
    processes: Processes::Every,
    weight: Weight::Events,
    family: "guided-diffusion",
    log2: true,
    policy: Some("guided-diffusion"),
    lines: &[
        Line {
            needle: "Found NaN, decreased lg_loss_scale to",
            read: overflow,
        },
        Line {
            needle: "lg_loss_scale",
            read: table,
        },
        Line {
            needle: "| step ",
            read: step,
        },
    ],
    ..Dialect::PLAIN
};

fn overflow(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let after = cursor.number()?;
    Ok(Seen::Overflow(Overflow {
        after: Some(Printed::rounded(after)),
        ..Overflow::default()
    }))
}

/// `| step          | 1.53e+05  |`, three digits of it.
fn step(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let alone = cursor.text.trim_ascii_start().starts_with(b"| step ");
    cursor.expect(" |")?;
    let step = cursor.number()?;
    cursor.expect(" |")?;
    if !alone || !cursor.rest().trim_ascii().is_empty() {
        return Err(Miss::Other);
    }
    Ok(Seen::Step(step.count()))
}

fn table(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let head = &cursor.text[..cursor.at - "lg_loss_scale".len()];
    if !head.ends_with(b"| ") {
        return Err(Miss::Other);
    }
    cursor.expect(" |")?;
    let mean = cursor.number()?;
    Ok(Seen::Record(Record {
        scale: Some((Printed::rounded(mean), Reading::Mean)),
        ..Record::default()
    }))
}
