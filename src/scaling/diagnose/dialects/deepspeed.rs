//! DeepSpeed's `loss_scaler.py`, ZeRO stages, and their companions.
//!
//! ```text
//! [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, but hysteresis is 2. Reducing hysteresis to 1
//! [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768
//! [Rank 0] step=10, skipped=6, lr=[9.6e-06], mom=[(0.9, 0.95)]
//! ```
//!
//! The scale that overflowed and the one after it are both printed; a growth never is. Old ZeRO versions print
//! `reducing to` the same value where hysteresis was spent. `skipped` counts from the beginning of the run.

use super::{Dialect, Line, Processes, Weight};
use crate::scaling::diagnose::seen::{Clock, Overflow, Printed, Prints, Record, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss};

pub const DIALECT: Dialect = Dialect {
    format: "deepspeed",
    framework: "DeepSpeed",
    prints: Prints::OldToNew,
    processes: Processes::Every,
    weight: Weight::Events,
    family: "deepspeed",
    floor: Some(1.0),
    policy: Some("deepspeed"),
    lines: &[
        Line {
            needle: "OVERFLOW! Rank ",
            read: ranked,
        },
        Line {
            needle: "OVERFLOW! Skipping step. Gradients are non-finite",
            read: |_| Ok(Seen::Overflow(Overflow::default())),
        },
        Line {
            needle: "dynamic loss scale overflow!",
            read: other_wording,
        },
        Line {
            needle: "skipped=",
            read: counters,
        },
        Line {
            needle: "Current loss scale already at minimum",
            read: |_| Ok(Seen::Stopped(None)),
        },
    ],
    ..Dialect::PLAIN
};

fn ranked(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let rank = cursor.integer()?;
    cursor.expect(" Skipping step.")?;
    let mut event = attempted(cursor)?;
    event.rank = Some(rank);
    Ok(Seen::Overflow(event))
}

fn other_wording(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let mut rank = None;
    let mut here = cursor.clone();
    if here.take(" [Rank ")
        && let Ok(found) = here.integer()
        && here.take("]")
    {
        rank = Some(found);
        *cursor = here;
    }
    cursor.expect(" Skipping step.")?;
    let mut event = attempted(cursor)?;
    event.rank = rank;
    Ok(Seen::Overflow(event))
}

/// `Attempted loss scale: A, …`, up to the last number.
pub fn attempted(cursor: &mut Cursor<'_>) -> Result<Overflow, Miss> {
    let mut event = Overflow {
        before: cursor
            .number_behind(" Attempted loss scale:")?
            .map(Printed::exact),
        ..Overflow::default()
    };
    if event.before.is_none() {
        return Ok(event);
    }
    if let Some(after) = cursor.number_behind(", reducing to")? {
        event.after = Some(Printed::exact(after));
    } else if cursor.number_behind(", but hysteresis is")?.is_some() {
        event.hysteresis = true;
        event.after = event.before;
        cursor.number_behind(". Reducing hysteresis to")?;
    }
    Ok(event)
}

/// `step=n, skipped=k, lr=[…]`: the engine's own count, the best cross-check there is.
fn counters(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let head = &cursor.text[..cursor.at - "skipped=".len()];
    let head = head.strip_suffix(b", ").ok_or(Miss::Other)?;
    let start = head.iter().rposition(|b| *b == b'=').ok_or(Miss::Other)? + 1;
    if !head[..start].ends_with(b"step=") {
        return Err(Miss::Other);
    }
    let step = Cursor::new(head, start, false).integer()?;
    Ok(Seen::Record(Record {
        step: Some(step),
        clock: Clock::Counter,
        skipped_in_all: Some(cursor.integer()?),
        ..Record::default()
    }))
}
