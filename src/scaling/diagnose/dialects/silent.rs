//! Frameworks that print no scale: Hugging Face Trainer, Accelerate, Lightning, MMEngine.
//!
//! ```text
//! {'loss': 2.3, 'learning_rate': 0, 'epoch': 0.0}
//! UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`. …
//! ```
//!
//! The signs of skipped steps are all there is: a learning rate that stays 0, the order warning of the first step.

use super::{Dialect, Line};
use crate::scaling::diagnose::seen::Seen;

pub const DIALECT: Dialect = Dialect {
    framework: "PyTorch",
    lines: &[
        Line {
            needle: "lr_scheduler.step()` before `optimizer.step()",
            read: |_| Ok(Seen::OrderWarning),
        },
        Line {
            needle: "loss_scale_map",
            read: |_| Ok(Seen::OtherMeaning),
        },
        Line {
            needle: "loss_scale='",
            read: |cursor| match cursor.rest().first() {
                Some(b'0'..=b'9') => Err(crate::scaling::diagnose::text::Miss::Other),
                _ => Ok(Seen::OtherMeaning),
            },
        },
    ],
    ..Dialect::PLAIN
};
