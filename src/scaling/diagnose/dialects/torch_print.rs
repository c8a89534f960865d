//! Whatever people print of a `torch.amp.GradScaler`.
//!
//! ```text
//! tensor([65536.], device='cuda:0')
//! tensor(65536.)
//! step 10 loss 2.31 scale 65536.0
//! {'scale': 65536.0, 'growth_factor': 2.0, 'backoff_factor': 0.5, 'growth_interval': 2000, '_growth_tracker': 3}
//! 当前缩放因子: 65536.0
//! ```
//!
//! Whether the value is that before or after the update depends on where the print stands. A tensor shows five digits
//! from 1e8 on.

use super::{Dialect, Line, Processes, Weight, progress_of};
use crate::scaling::diagnose::seen::{Loss, Printed, Prints, Reading, Record, Seen};
use crate::scaling::diagnose::text::{self, Cursor, Miss, has, is_word, key};

pub const DIALECT: Dialect = Dialect {
    format: "torch-print",
    framework: "PyTorch",
    prints: Prints::After,
    processes: Processes::One,
    weight: Weight::Print,
    family: "torch-print",
    policy: Some("pytorch"),
    lines: &[
        Line {
            needle: "tensor(",
            read: tensor,
        },
        Line {
            needle: "loss_scale",
            read: named,
        },
        Line {
            needle: "loss_scale=",
            read: named_with_sign,
        },
        Line {
            needle: "loss scale",
            read: named,
        },
        Line {
            needle: "loss scale:",
            read: named_with_sign,
        },
        Line {
            needle: "Loss scale",
            read: named,
        },
        Line {
            needle: "Loss Scale",
            read: named,
        },
        Line {
            needle: "lossscale",
            read: named,
        },
        Line {
            needle: "grad_scale",
            read: named,
        },
        Line {
            needle: "grad_scale:",
            read: named_with_sign,
        },
        Line {
            needle: "grad_scale=",
            read: named_with_sign,
        },
        Line {
            needle: "grad scale",
            read: named,
        },
        Line {
            needle: "Grad scale",
            read: named,
        },
        Line {
            needle: "Grad Scale",
            read: named,
        },
        Line {
            needle: "scaler_scale",
            read: named,
        },
        Line {
            needle: "scaler scale",
            read: named,
        },
        Line {
            needle: "amp_scale",
            read: named,
        },
        Line {
            needle: "get_scale()",
            read: named,
        },
        Line {
            needle: "'scale'",
            read: state,
        },
        Line {
            needle: "\u{7F29}\u{653E}\u{56E0}\u{5B50}",
            read: chinese,
        },
        Line {
            needle: "\u{635F}\u{5931}\u{7F29}\u{653E}",
            read: chinese,
        },
        Line {
            needle: "\u{68AF}\u{5EA6}\u{7F29}\u{653E}",
            read: chinese,
        },
        Line {
            needle: "scale",
            read: bare,
        },
        Line {
            needle: "Scale",
            read: bare,
        },
    ],
    ..Dialect::PLAIN
};

/// `tensor([65536.], device='cuda:0')` or `tensor(65536.)`: one element, whole or in a few digits, as no loss is.
fn tensor(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let listed = cursor.take("[");
    let start = cursor.at;
    let number = cursor.number()?;
    let whole = cursor.text[start..cursor.at].ends_with(b".");
    if listed {
        cursor.expect("]")?;
    }
    let small = number.value > 0.0 && number.value < 1.0 && number.value.log2().fract() == 0.0;
    if number.value <= 0.0
        || !(whole || number.scientific || number.value == f64::INFINITY || small)
    {
        return Err(Miss::Other);
    }
    let reach = cursor.rest().iter().take(64).position(|b| *b == b')');
    let tail = &cursor.rest()[..reach.ok_or(Miss::Other)?];
    if has(tail, key!("grad_fn")) {
        return Err(Miss::Other);
    }
    cursor.at += tail.len() + 1;
    Ok(Seen::PerhapsScale(Printed::general(number)))
}

fn named(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let mut start = cursor.at;
    while start > 0
        && (is_word(cursor.text[start - 1]) || matches!(cursor.text[start - 1], b'(' | b')' | b' '))
    {
        start -= 1;
        if cursor.at - start > 24 {
            break;
        }
    }
    let place = memchr::memmem::rfind(&cursor.text[..cursor.at], b"cale").unwrap_or(0);
    // The key's first letter: what stands before it must not make another word of it.
    let mut key = place;
    while key > 0 && (is_word(cursor.text[key - 1])) {
        key -= 1;
    }
    if key > 0 && cursor.text[key - 1] == b'-' {
        return Err(Miss::Other);
    }
    let word = &cursor.text[key..place];
    if [&b"lg_"[..], b"cr_", b"am_", b"rsa_"]
        .iter()
        .any(|odd| word.starts_with(odd))
    {
        return Err(Miss::Other);
    }
    let number = text::value(cursor).ok_or(Miss::Other)?;
    Ok(scale(cursor, number))
}

/// As [`named`], the sign being part of the needle.
fn named_with_sign(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    cursor.at -= 1;
    named(cursor)
}

/// `scaler.state_dict()`.
fn state(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    if !has(cursor.text, key!("growth_factor")) {
        return Err(Miss::Other);
    }
    let number = text::value(cursor).ok_or(Miss::Other)?;
    cursor.at = cursor.text.len();
    Ok(Seen::Scale(Printed::exact(number)))
}

fn chinese(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    // `缩放因子` and words around it: the number follows within a few signs.
    while cursor.text.get(cursor.at).is_some_and(|b| *b >= 0x80) {
        cursor.at += 1;
    }
    let number = text::value(cursor).ok_or(Miss::Other)?;
    Ok(scale(cursor, number))
}

/// `scale` alone: perhaps the loss scale, perhaps any other.
fn bare(cursor: &mut Cursor<'_>) -> Result<Seen, Miss> {
    let key = cursor.at - "scale".len();
    let before = key.checked_sub(1).map(|at| cursor.text[at]);
    let mine = [&b"scaler."[..], b"scaler._", b"self._", b"amp."]
        .iter()
        .any(|owner| cursor.text[..key].ends_with(owner));
    if before.is_some_and(|b| is_word(b) || matches!(b, b'-' | b'.' | b'/')) && !mine {
        return Err(Miss::Other);
    }
    let number = text::value(cursor).ok_or(Miss::Other)?;
    let mut here = cursor.clone();
    here.blanks();
    if here.take("->") || here.take("=>") || here.take("x ") {
        return Err(Miss::Other);
    }
    let printed = Printed::exact(number);
    Ok(if mine {
        Seen::Scale(printed)
    } else {
        Seen::PerhapsScale(printed)
    })
}

/// A print inside a progress line is part of it; elsewhere it stands alone.
fn scale(cursor: &Cursor<'_>, number: text::Number) -> Seen {
    let printed = Printed::exact(number);
    let record = progress_of(cursor);
    if record.loss == Loss::None && record.step.is_none() {
        return Seen::Scale(printed);
    }
    Seen::Record(Record {
        scale: Some((printed, Reading::Value)),
        ..record
    })
}
