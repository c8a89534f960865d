//! MiniLLM (LMOps) and BMTrain's examples; DeepSpeed's event lines stand between.
//!
//! ```text
//! train | … global iter: 10/ 5000| tot_loss: 2.1 | … lr: 1e-05 | scale: 65536.0 | …
//! ```

use super::{Dialect, Line, Processes, Weight, progress_of};
use crate::scaling::diagnose::seen::{Printed, Prints, Reading, Record, Seen};
use crate::scaling::diagnose::text::{Cursor, Miss, has, key};

pub const DIALECT: Dialect = Dialect {
    format: "minillm",
    framework: "DeepSpeed",
    prints: Prints::After,
    processes: Processes::One,
    weight: Weight::Own,
    family: "deepspeed",
    floor: Some(1.0),
    policy: Some("deepspeed"),
    lines: &[Line {
        needle: "| scale:",
        read: progress,
    }],
    ..Dialect::PLAIN
};

fn progress(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    if !has(cursor.text, key!("loss")) || !has(cursor.text, key!("ter:")) {
        return Err(Miss::Other);
    }
    let scale = cursor.number()?;
    let record = progress_of(cursor);
    cursor.at = cursor.text.len();
    Ok(Seen::Record(Record {
        scale: Some((Printed::rounded(scale), Reading::Value)),
        ..record
    }))
}
