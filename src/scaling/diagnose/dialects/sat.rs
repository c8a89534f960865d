//! SwissArmyTransformer: CogVideo, GLM. DeepSpeed's event lines stand between.
//!
//! ```text
//!  iteration  100/ 2000 | elapsed … | total loss 1.2E-01 | loss 1.2E-01 | loss scale 65536.0 |speed …
//! ```

use super::{Dialect, Line, Processes, Weight, progress_of};
use crate::scaling::diagnose::seen::{Printed, Prints, Reading, Record, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss, has, key};

pub const DIALECT: Dialect = Dialect {
    format: "sat",
    framework: "DeepSpeed",
    prints: Prints::After,
    processes: Processes::One,
    weight: Weight::Own,
    family: "deepspeed",
    floor: Some(1.0),
    policy: Some("deepspeed"),
    lines: &[Line {
        needle: "| loss scale ",
        read: progress,
    }],
    ..Dialect::PLAIN
};

fn progress(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    if !has(cursor.text, key!("iteration")) {
        return Err(Miss::Other);
    }
    let scale = cursor.number()?;
    let record = progress_of(cursor);
    cursor.at = cursor.text.len();
    Ok(Seen::Record(Record {
        scale: Some((Printed::exact(scale), Reading::Value)),
        ..record
    }))
}
