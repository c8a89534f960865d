//! NVIDIA apex (amp).
//!
//! ```text
//! Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0
//! ```
//!
//! The value is the one after the halving. Every process prints, unless the script sees to it; the scale is a Python
//! float and goes on down through subnormal doubles to 0.

use super::{Dialect, Line, Processes, Weight};
use crate::scaling::diagnose::seen::{Overflow, Printed, Prints, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss};

pub const DIALECT: Dialect = Dialect {
    format: "apex",
    framework: "apex",
    prints: Prints::After,
    processes: Processes::Every,
    weight: Weight::Events,
    family: "apex",
    policy: Some("apex-amp"),
    lines: &[
        Line {
            needle: "Gradient overflow.",
            read: overflow,
        },
        Line {
            needle: "OVERFLOW within closure!",
            read: overflow,
        },
    ],
    ..Dialect::PLAIN
};

fn overflow(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let needle = if cursor.text[..cursor.at].ends_with(b"!") {
        "OVERFLOW within closure!"
    } else {
        "Gradient overflow."
    };
    let mut rank = None;
    // `Rank 3 :: Gradient overflow.  …`
    let head = &cursor.text[..cursor.at - needle.len()];
    if let Some(head) = head.strip_suffix(b" :: ") {
        let digits = head.iter().rev().take_while(|b| b.is_ascii_digit()).count();
        if head[..head.len() - digits].ends_with(b"Rank ") {
            rank = Cursor::new(head, head.len() - digits, false).integer().ok();
        }
    }
    cursor.expect(" Skipping step")?;
    cursor.take(",");
    let mut event = Overflow {
        rank,
        ..Overflow::default()
    };
    if let Some(id) = cursor.number_behind(" loss scaler ")? {
        event.scaler = Some(id.count());
        cursor.take(",");
    }
    event.after = cursor
        .number_behind(" reducing loss scale to")?
        .map(Printed::exact);
    Ok(Seen::Overflow(event))
}
