//! Progress lines of any training loop: a loss, a step, an epoch; progress bars.
//!
//! ```text
//! step 100 | loss 5.5779 | lr 5.000e-05
//! Validation loss 6312:  0.149928
//! {'loss': 1.89, 'learning_rate': 0.0002, 'epoch': 0.18}
//! 8%|#    | 240/2724 [9:01:12<91:10:10, 132.9s/it, loss=2.1]
//! ```
//!
//! They show no scale, but they show that steps were made, which steps, and whether the loss is a number.

use super::{Dialect, Line};
use crate::scaling::diagnose::seen::{Clock, Loss, Record, Seen};
use crate::scaling::diagnose::text::{self, Cursor, Miss, has, is_word, key};
use memchr::memmem::Finder;

const NOTHING: fn(&mut Cursor<'_>) -> Result<Seen, Miss> = |_| Err(Miss::Other);

/// Its needles only say that the whole piece is worth a look: [`read`] reads it.
pub const DIALECT: Dialect = Dialect {
    lines: &[
        Line {
            needle: "loss",
            read: NOTHING,
        },
        Line {
            needle: "Loss",
            read: NOTHING,
        },
        Line {
            needle: "it/s",
            read: NOTHING,
        },
        Line {
            needle: "s/it",
            read: NOTHING,
        },
    ],
    ..Dialect::PLAIN
};

/// The progress line that a text is, and where its first number stands; `None` without a loss and without a bar.
pub fn read(line: &[u8], cut: bool) -> Option<(usize, Record)> {
    let mut record = position(line);
    let mut first = if record.clock == Clock::Bar {
        0
    } else {
        line.len()
    };
    let mut best = u8::MAX;
    let mut from = 0;
    while let Some(found) = key!("oss").find(&line[from..]) {
        let end = from + found + 3;
        from = end;
        let Some(loss) = loss_at(line, end, cut) else {
            continue;
        };
        first = first.min(loss.at);
        if loss.validation {
            if record.validation.is_none() {
                record.validation = Some(loss.value);
                if record.step.is_none() {
                    record.step = loss.step;
                }
            }
        } else if loss.rank < best {
            best = loss.rank;
            record.loss = Loss::Value(loss.value);
        }
    }
    if record.loss == Loss::None && record.validation.is_none() && record.clock != Clock::Bar {
        return None;
    }
    Some((first.min(line.len()), record))
}

struct FoundLoss {
    at: usize,
    value: f64,
    validation: bool,
    rank: u8,
    step: Option<u64>,
}

/// The loss whose key ends at `end`.
fn loss_at(line: &[u8], end: usize, cut: bool) -> Option<FoundLoss> {
    let mut start = end;
    while start > 0 && (is_word(line[start - 1]) || matches!(line[start - 1], b'/' | b'-')) {
        start -= 1;
    }
    let key = &line[start..end];
    if !key.ends_with(b"loss") && !key.ends_with(b"Loss") {
        return None;
    }
    // `loss_D` and its like, but not `loss_scale`.
    let tail = line[end..].iter().take_while(|b| is_word(**b)).count();
    if tail > 0 && (line[end] != b'_' || has(&line[end..end + tail], key!("cal"))) {
        return None;
    }
    let end = end + tail;
    let mut cursor = Cursor::new(line, end, cut);
    let mut number = text::value(&mut cursor)?;
    let mut step = None;
    // `Validation loss 6312:  0.149928`
    let mut here = cursor.clone();
    if here.take(":")
        && let Ok(second) = here.number()
        && number.value.fract() == 0.0
    {
        step = Some(number.count());
        number = second;
    }
    if number.style == text::Style::Ambiguous {
        return None;
    }
    let before = &line[start.saturating_sub(24)..start];
    let contains = |bytes: &[u8], word: &str| {
        bytes
            .windows(word.len())
            .any(|window| window.eq_ignore_ascii_case(word.as_bytes()))
    };
    let words = |word: &str| contains(key, word) || contains(before, word);
    if contains(key, "best") || contains(before, "packet") {
        return None;
    }
    let validation = ["valid", "eval", "test"].iter().any(|word| words(word))
        || contains(key, "val")
        || contains(before, "val ")
        || contains(before, "dev ")
        || contains(key, "dev_");
    let rank = match key {
        _ if tail > 0 => 3,
        b"loss" | b"Loss" | b"train_loss" | b"tot_loss" | b"total_loss" | b"step_loss" => 0,
        b"average_loss" | b"nll_loss" => 2,
        _ => 1,
    };
    Some(FoundLoss {
        at: start,
        value: number.value,
        validation,
        rank,
        step,
    })
}

/// Where in the run a text says it stands: step, steps in all, epoch.
pub fn position(line: &[u8]) -> Record {
    let mut record = Record::default();
    if let Some((step, of)) = bar(line) {
        record.step = Some(step);
        record.of = Some(of);
        record.clock = Clock::Bar;
        return record;
    }
    for key in [
        key!("Train: ["),
        key!("Epoch: ["),
        key!("Epoch ["),
        key!("epoch: ["),
        key!("epoch ["),
    ] {
        if let Some(found) = key.find(line) {
            let mut cursor = Cursor::new(line, found + key.needle().len(), false);
            record.epoch = cursor.integer().ok();
            if cursor.take("/") {
                let _ = cursor.integer();
            }
            if cursor.take("]") {
                cursor.blanks();
                if let Some((step, of)) = bracketed(&mut cursor) {
                    record.step = Some(step);
                    record.of = Some(of);
                    return record;
                }
            }
            break;
        }
    }
    if let Some(found) = key!("epoch ").find(line) {
        // fairseq's `epoch 001:    14 / 2100`
        let mut cursor = Cursor::new(line, found + 6, false);
        if let Ok(epoch) = cursor.integer() {
            record.epoch = Some(epoch);
            if cursor.take(":")
                && let Ok(step) = cursor.integer()
                && cursor.take(" /")
                && let Ok(of) = cursor.integer()
            {
                record.step = Some(step);
                record.of = Some(of);
                return record;
            }
        }
    }
    if record.epoch.is_none() {
        record.epoch = [key!("epoch"), key!("Epoch")]
            .iter()
            .find_map(|key| whole(line, key))
            .map(|(epoch, _)| epoch);
    }
    for key in [
        key!("global_step"),
        key!("global step"),
        key!("Global Step"),
        key!("global iter"),
        key!("iteration"),
        key!("Iteration"),
        key!("step"),
        key!("Step"),
        key!("steps"),
        key!("iter"),
        key!("Iter"),
        key!("update"),
        key!("batch"),
        key!("Batch"),
    ] {
        if let Some((step, of)) = whole(line, key) {
            record.step = Some(step);
            record.of = of;
            break;
        }
    }
    record
}

/// A whole number behind a key, and the one behind a slash.
fn whole(line: &[u8], key: &Finder<'_>) -> Option<(u64, Option<u64>)> {
    let mut from = 0;
    while let Some(found) = key.find(&line[from..]) {
        let at = from + found;
        from = at + key.needle().len();
        if at > 0 && (is_word(line[at - 1]) || matches!(line[at - 1], b'-' | b'.' | b'/')) {
            continue;
        }
        let mut cursor = Cursor::new(line, from, false);
        if cursor.text.get(from).copied().is_some_and(is_word) {
            continue;
        }
        if let Some(b'"' | b'\'') = line.get(cursor.at) {
            cursor.at += 1;
        }
        cursor.blanks();
        if let Some(b':' | b'=' | b'#') = line.get(cursor.at) {
            cursor.at += 1;
        }
        cursor.blanks();
        if let Some(b'"' | b'\'') = line.get(cursor.at) {
            cursor.at += 1;
        }
        let bracket = cursor.take("[");
        let _ = bracket;
        let Ok(step) = cursor.integer() else { continue };
        let mut of = None;
        let mut here = cursor.clone();
        if here.take("/") || here.take(" /") {
            of = here.integer().ok();
        }
        // `0.05` is no count.
        let fraction = line.get(cursor.at) == Some(&b'.')
            && line.get(cursor.at + 1).is_some_and(u8::is_ascii_digit);
        if fraction || line.get(cursor.at).is_some_and(u8::is_ascii_alphabetic) {
            continue;
        }
        return Some((step, of));
    }
    None
}

/// `[  10/1299]`
fn bracketed(cursor: &mut Cursor<'_>) -> Option<(u64, u64)> {
    cursor.expect("[").ok()?;
    let step = cursor.integer().ok()?;
    cursor.expect(" /").ok()?;
    let of = cursor.integer().ok()?;
    cursor.expect("]").ok()?;
    Some((step, of))
}

/// `240/2724 [9:01:12<91:10:10, 132.9s/it]`
fn bar(line: &[u8]) -> Option<(u64, u64)> {
    let rate = key!("s/it")
        .find(line)
        .or_else(|| key!("it/s").find(line))?;
    let open = memchr::memrchr(b'[', &line[..rate])?;
    let head = line[..open].strip_suffix(b" ")?;
    let slash = memchr::memrchr(b'/', head)?;
    let digits = |bytes: &[u8]| {
        bytes
            .iter()
            .rev()
            .take_while(|b| b.is_ascii_digit())
            .count()
    };
    let total = &head[slash + 1..];
    if total.is_empty() || digits(total) != total.len() {
        return None;
    }
    let done = &head[..slash];
    let length = digits(done);
    let step = Cursor::new(done, done.len() - length, false)
        .integer()
        .ok()?;
    let of = Cursor::new(total, 0, false).integer().ok()?;
    Some((step, of))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Record {
        read(line.as_bytes(), false).expect("a progress line").1
    }

    #[test]
    fn lines_of_many_loops_are_read() {
        let record = of("step 100 | loss 5.5779 | lr 5.000e-05 | 1.92 it/sec");
        assert_eq!((record.step, record.loss), (Some(100), Loss::Value(5.5779)));
        let record = of("Validation loss 6312:  0.149928  ");
        assert_eq!(
            (record.step, record.validation),
            (Some(6312), Some(0.149928))
        );
        let record = of("{'loss': 11.0, 'learning_rate': 0, 'epoch': 0.05}");
        assert_eq!((record.step, record.loss), (None, Loss::Value(11.0)));
        let record = of("  8%|#    | 240/2724 [9:01:12<91:10:10, 132.9s/it, loss=2.1]");
        assert_eq!((record.step, record.of), (Some(240), Some(2724)));
        assert_eq!(record.clock, Clock::Bar);
        let record =
            of("Train: [3/300][3900/5004]\teta 0:17:06\tloss 3.5 (3.3)\tgrad_norm 0.9 (1.1)");
        assert_eq!(
            (record.epoch, record.step, record.of),
            (Some(3), Some(3900), Some(5004))
        );
        let record =
            of("Epoch 1/200, Step 300/3995, imgsize (640, 640), loss: 8712.5, lcls: 8705.2");
        assert_eq!(
            (record.epoch, record.step, record.of),
            (Some(1), Some(300), Some(3995))
        );
        let record = of(
            "| epoch 025 | valid on 'valid' subset | valid_loss 4.46376 | valid_nll_loss 2.7 | best 4.4",
        );
        assert_eq!(
            (record.validation, record.loss),
            (Some(4.46376), Loss::None)
        );
        let record = of("epoch 001:    14 / 2100 loss=6.610, temp=2, loss_0=6.460");
        assert_eq!((record.step, record.loss), (Some(14), Loss::Value(6.61)));
        assert!(of("loss nan").loss.is_nonfinite());
    }

    #[test]
    fn other_losses_are_left_alone() {
        for line in [
            "packet loss: 0.0%, scale: 1",
            "Skipping step, reducing loss scale to 3",
            "'loss_scale': 4",
            "glossy 3",
            "the loss of quality is 0.02",
        ] {
            assert!(read(line.as_bytes(), false).is_none(), "{line}");
        }
    }
}
