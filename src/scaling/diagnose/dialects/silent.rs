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
use crate::scaling::diagnose::text::{Miss, has, key};

pub const DIALECT: Dialect = Dialect {
    framework: "PyTorch",
    lines: &[
        Line {
            needle: "lr_scheduler.step()` before `optimizer.step()",
            read: |_| Ok(Seen::OrderWarning),
        },
        Line {
            needle: "{'loss': ",
            read: |cursor| match has(cursor.text, key!("'learning_rate': ")) {
                true => Ok(Seen::Framework("Hugging Face Trainer")),
                false => Err(Miss::Other),
            },
        },
        Line {
            needle: "it/s, v_num=",
            read: |_| Ok(Seen::Framework("Lightning")),
        },
        Line {
            needle: "mmengine - INFO - Epoch(train)",
            read: |_| Ok(Seen::Framework("MMEngine")),
        },
        Line {
            needle: "bf16=True",
            read: |_| Ok(Seen::Bf16),
        },
        Line {
            needle: "torch.bfloat16",
            read: |_| Ok(Seen::Bf16),
        },
        Line {
            needle: "loss_scale_map",
            read: |_| Ok(Seen::OtherMeaning),
        },
        Line {
            needle: "loss_scale='",
            read: |cursor| match cursor.rest().first() {
                Some(b'0'..=b'9') => Err(Miss::Other),
                _ => Ok(Seen::OtherMeaning),
            },
        },
    ],
    ..Dialect::PLAIN
};
