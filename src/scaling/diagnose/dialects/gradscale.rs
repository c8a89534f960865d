//! gradscale's own recorder.
//!
//! ```text
//! gradscale: step 123 overflow, loss_scale 65536.0 -> 32768.0, first non-finite tensor layer.weight
//! ```

use super::{Dialect, Line, Processes, Weight};
use crate::scaling::diagnose::seen::{Overflow, Printed, Prints, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss};

pub const DIALECT: Dialect = Dialect {
    format: "gradscale",
    framework: "PyTorch",
    prints: Prints::OldToNew,
    processes: Processes::Every,
    weight: Weight::Events,
    family: "gradscale",
    policy: Some("pytorch"),
    lines: &[Line {
        needle: "overflow, loss_scale ",
        read: overflow,
    }],
    ..Dialect::PLAIN
};

fn overflow(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let head = &cursor.text[..cursor.at - "overflow, loss_scale ".len()];
    let start = memchr::memmem::rfind(head, b"gradscale: step ").ok_or(Miss::Other)?;
    let step = Cursor::new(head, start + "gradscale: step ".len(), false).integer()?;
    let mut event = Overflow {
        iteration: Some(step),
        before: cursor.perhaps(cursor.clone().number())?.map(Printed::exact),
        ..Overflow::default()
    };
    if event.before.is_some() {
        cursor.number()?;
        event.after = cursor.number_behind(" ->")?.map(Printed::exact);
    }
    Ok(Seen::Overflow(event))
}
