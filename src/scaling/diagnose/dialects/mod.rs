//! The dialects: one file a framework's way of printing.
//!
//! A dialect declares its lines (a literal to look for and a function that reads what follows) and what the printed
//! number means. Adding one is adding a file, a line in [`ALL`] and a fixture under `tests/data/logs`.

use super::lines::{Piece, is_number};
use super::seen::{Printed, Prints, Record, Seen};
use super::text::{Cursor, Miss, has, is_word, key};
use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};
use std::borrow::Cow;
use std::sync::LazyLock;

mod apex;
mod audiocraft;
mod beit_meter;
mod colossalai;
mod deepspeed;
mod deepspeed_fused;
mod dll;
mod espnet;
mod fairseq;
mod fairseq2;
mod fp16_optimizer_legacy;
mod gradscale;
mod guided_diffusion;
mod icefall;
mod insightface;
mod megatron;
mod metaseq;
mod mindyolo;
mod minillm;
mod mmcv;
mod paddle;
mod paddlenlp_pretrain;
mod progress;
mod sat;
mod silent;
mod swin_meter;
mod torch_print;

/// Who prints an event's line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Processes {
    /// One process: a repeated line is a repeated event.
    One,
    /// Perhaps every process: a repeated line may be a copy.
    Every,
}

/// What a line is for; decides which format a log is called by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Weight {
    /// Says nothing about loss scaling.
    Plain,
    /// Whatever a user prints.
    Print,
    /// Progress lines that show the scale.
    Progress,
    /// Event lines.
    Events,
    /// Lines that only this format has, beside another's events.
    Own,
}

/// A literal and how to read the message that it begins.
#[derive(Debug, Clone, Copy)]
pub struct Line {
    /// What to look for.
    pub needle: &'static str,
    /// Reads the message; the cursor stands behind the needle and is left behind the message.
    pub read: fn(&mut Cursor<'_>) -> Result<Seen, Miss>,
}

/// A framework's way of printing.
#[derive(Debug, Clone, Copy)]
pub struct Dialect {
    /// The format's name.
    pub format: &'static str,
    /// The framework, for advice.
    pub framework: &'static str,
    /// Which scale its event lines print.
    pub prints: Prints,
    /// Whether a growth has a line of its own.
    pub growth_printed: bool,
    /// Who prints events.
    pub processes: Processes,
    /// What its lines are for.
    pub weight: Weight,
    /// Event lines of dialects in one family report the same events.
    pub family: &'static str,
    /// The framework's own minimum, where it has one.
    pub floor: Option<f64>,
    /// The values are base-2 logarithms.
    pub log2: bool,
    /// Every change of the scale has a line, so that falls can be counted.
    pub every_change: bool,
    /// The policy, by its name here.
    pub policy: Option<&'static str>,
    /// Its lines.
    pub lines: &'static [Line],
}

impl Dialect {
    /// What most dialects have in common.
    pub const PLAIN: Dialect = Dialect {
        format: "none",
        framework: "the framework",
        prints: Prints::Nothing,
        growth_printed: false,
        processes: Processes::One,
        weight: Weight::Plain,
        family: "",
        floor: None,
        log2: false,
        every_change: false,
        policy: None,
        lines: &[],
    };
}

/// Every dialect, those whose lines say more first: of two that could read a line, the earlier does.
pub const ALL: [&Dialect; 27] = [
    &deepspeed::DIALECT,
    &deepspeed_fused::DIALECT,
    &apex::DIALECT,
    &fp16_optimizer_legacy::DIALECT,
    &metaseq::DIALECT,
    &fairseq::DIALECT,
    &fairseq2::DIALECT,
    &megatron::DIALECT,
    &sat::DIALECT,
    &swin_meter::DIALECT,
    &beit_meter::DIALECT,
    &insightface::DIALECT,
    &espnet::DIALECT,
    &icefall::DIALECT,
    &guided_diffusion::DIALECT,
    &mindyolo::DIALECT,
    &paddle::DIALECT,
    &paddlenlp_pretrain::DIALECT,
    &minillm::DIALECT,
    &audiocraft::DIALECT,
    &colossalai::DIALECT,
    &dll::DIALECT,
    &mmcv::DIALECT,
    &gradscale::DIALECT,
    &silent::DIALECT,
    &torch_print::DIALECT,
    &progress::DIALECT,
];

/// Place of [`progress::DIALECT`] in [`ALL`].
const PROGRESS: usize = ALL.len() - 1;

/// One message, and where it stands.
#[derive(Debug, Clone, Copy)]
pub struct Message {
    /// The line, from 1.
    pub line: u64,
    /// Index into [`ALL`].
    pub dialect: usize,
    /// Which of the dialect's lines.
    pub kind: usize,
    /// Seconds within the day, where the line carries a time.
    pub time: Option<f64>,
    /// What it says.
    pub seen: Seen,
}

/// The literals of all dialects, and who reads what follows each.
#[derive(Debug)]
struct Needles {
    search: AhoCorasick,
    readers: Vec<Vec<(usize, usize)>>,
}

/// Built once a process.
static NEEDLES: LazyLock<Needles> = LazyLock::new(|| {
    let mut literals: Vec<&str> = Vec::new();
    let mut readers: Vec<Vec<(usize, usize)>> = Vec::new();
    for (d, dialect) in ALL.iter().enumerate() {
        for (l, line) in dialect.lines.iter().enumerate() {
            match literals.iter().position(|known| *known == line.needle) {
                Some(known) => readers[known].push((d, l)),
                None => {
                    literals.push(line.needle);
                    readers.push(vec![(d, l)]);
                }
            }
        }
    }
    Needles {
        search: AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .kind(Some(AhoCorasickKind::DFA))
            .build(&literals)
            .expect("a few hundred literals fit"),
        readers,
    }
});

/// Reads pieces into messages; holds a torn message until the next piece.
#[derive(Debug, Default)]
pub struct Reader {
    torn: Vec<u8>,
    torn_line: u64,
    found: Vec<(usize, Message)>,
    other: Vec<(usize, Message)>,
}

/// The longest torn message that is kept.
const TORN: usize = 512;

impl Reader {
    /// A reader at the start of a log.
    pub fn new() -> Reader {
        Reader::default()
    }

    /// Reads a piece and shows its messages to `see`; true where a message may go on in the next piece.
    pub fn read(&mut self, piece: Piece<'_>, see: &mut dyn FnMut(Message)) -> bool {
        let text = cleaned(piece.text);
        if !self.torn.is_empty() {
            let torn = std::mem::take(&mut self.torn);
            let head = torn.len();
            let line = self.torn_line;
            let rest = &text[first_word(&text)..];
            for between in [&b" "[..], b""] {
                let joined = [&torn, between, rest].concat();
                self.messages(&joined, line, piece.cut, true);
                let whole = self
                    .found
                    .iter()
                    .any(|(at, m)| *at < head && is_full(&m.seen));
                if whole {
                    for (at, mut message) in self.found.drain(..) {
                        if at >= head {
                            message.line = piece.line;
                        }
                        see(message);
                    }
                    return false;
                }
            }
            self.messages(&torn, line, false, true);
            self.found.drain(..).for_each(|(_, message)| see(message));
        }
        let bare = text.trim_ascii();
        if is_number(bare)
            && let Ok(number) = Cursor::new(bare, 0, piece.cut).number()
        {
            // `print(scaler.get_scale())`, perhaps.
            see(Message {
                line: piece.line,
                dialect: PROGRESS - 1,
                kind: 0,
                time: None,
                seen: Seen::PerhapsScale(Printed::exact(number)),
            });
            return false;
        }
        self.messages(&text, piece.line, piece.cut, false);
        if let Some(unwrapped) = unwrapped(&text) {
            // A terminal's wrapping left a run of blanks inside words: keep the reading that shows more events.
            let events =
                |found: &[(usize, Message)]| found.iter().filter(|(_, m)| is_full(&m.seen)).count();
            std::mem::swap(&mut self.found, &mut self.other);
            let torn = std::mem::take(&mut self.torn);
            self.messages(&unwrapped, piece.line, piece.cut, false);
            if events(&self.found) <= events(&self.other) {
                std::mem::swap(&mut self.found, &mut self.other);
                self.torn = torn;
            }
        }
        self.found.drain(..).for_each(|(_, message)| see(message));
        !self.torn.is_empty()
    }

    /// Shows what a message that was still torn at the end says.
    pub fn finish(&mut self, see: &mut dyn FnMut(Message)) {
        let torn = std::mem::take(&mut self.torn);
        if !torn.is_empty() {
            self.messages(&torn, self.torn_line, true, true);
            self.found.drain(..).for_each(|(_, message)| see(message));
        }
    }

    /// Fills `found` with the messages of a text.
    fn messages(&mut self, text: &[u8], line: u64, cut: bool, last: bool) {
        self.found.clear();
        let mut behind = 0;
        let mut record = None;
        let mut loss = false;
        let mut from = 0;
        let needles = &*NEEDLES;
        while let Some(needle) = needles
            .search
            .find(aho_corasick::Input::new(text).range(from..))
        {
            from = needle.end();
            if needle.start() < behind {
                // Inside a message that was read: look on behind it.
                from = from.max(behind.min(text.len()));
                continue;
            }
            for &(d, kind) in &needles.readers[needle.pattern().as_usize()] {
                if d == PROGRESS {
                    loss = true;
                    continue;
                }
                let mut cursor = Cursor::new(text, needle.end(), cut);
                cursor.last |= last;
                match (ALL[d].lines[kind].read)(&mut cursor) {
                    Ok(seen) => {
                        // A sign of a framework may be a progress line all the same.
                        loss |= matches!(seen, Seen::Framework(_));
                        if let Seen::Record(_) = seen {
                            if record.is_some() {
                                continue;
                            }
                            record = Some(d);
                        }
                        behind = cursor.at.max(needle.end());
                        from = behind.min(text.len());
                        self.found.push((
                            needle.start(),
                            Message {
                                line,
                                dialect: d,
                                kind,
                                time: None,
                                seen,
                            },
                        ));
                        break;
                    }
                    Err(Miss::Short) if !last && !cut && text.len() - needle.start() <= TORN => {
                        self.torn.clear();
                        self.torn.extend_from_slice(&text[needle.start()..]);
                        self.torn_line = line;
                    }
                    Err(_) => {}
                }
            }
        }
        if !self.torn.is_empty() {
            // What stands within a torn message is read with the rest of it.
            let start = text.len() - self.torn.len();
            self.found.retain(|(at, _)| *at < start);
        }
        if behind > 0
            && !self.torn.is_empty()
            && self.torn.len() > text.len().saturating_sub(behind)
        {
            // What looked torn was read by another dialect after all.
            self.torn.clear();
        }
        if loss
            && record.is_none()
            && let Some((at, seen)) = progress::read(text, cut)
        {
            self.found.push((
                at,
                Message {
                    line,
                    dialect: PROGRESS,
                    kind: 0,
                    time: None,
                    seen: Seen::Record(seen),
                },
            ));
        }
        if self.found.len() > 1 {
            self.found.sort_by_key(|(at, _)| *at);
        }
        if self
            .found
            .iter()
            .any(|(_, m)| matches!(m.seen, Seen::Overflow(_) | Seen::Growth { .. }))
        {
            let mut last = 0;
            for (at, message) in &mut self.found {
                message.time = time(&text[last..*at]);
                last = *at;
            }
        }
    }
}

/// The progress line that a whole text is, without a scale: loss, step, epoch. Dialects add what they know.
fn progress_of(cursor: &Cursor<'_>) -> Record {
    progress::read(cursor.text, cursor.cut)
        .map(|(_, record)| record)
        .unwrap_or_else(|| progress::position(cursor.text))
}

/// Whether a message is an event with its values.
fn is_full(seen: &Seen) -> bool {
    match seen {
        Seen::Overflow(event) => event.before.is_some() || event.after.is_some(),
        Seen::Growth { .. } => true,
        _ => false,
    }
}

fn first_word(text: &[u8]) -> usize {
    text.iter()
        .position(|b| *b != b' ' && *b != b'\t')
        .unwrap_or(text.len())
}

/// The text without colour codes, its full-width signs as plain ones.
fn cleaned(text: &[u8]) -> Cow<'_, [u8]> {
    if memchr::memchr3(0x1B, 8, 0xEF, text).is_none() {
        return Cow::Borrowed(text);
    }
    let mut clean = Vec::with_capacity(text.len());
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        match byte {
            0x1B => {
                at += 1;
                match text.get(at) {
                    Some(b'[') => {
                        at += 1;
                        while at < text.len() && !(0x40..=0x7E).contains(&text[at]) {
                            at += 1;
                        }
                        at += 1;
                    }
                    Some(b']') => {
                        while at < text.len() && text[at] != 7 && text[at] != 0x1B {
                            at += 1;
                        }
                        at += 1;
                    }
                    _ => at += 1,
                }
            }
            8 => at += 1,
            // U+FF01 … U+FF5E are the printable ASCII characters, wide.
            0xEF if text.get(at + 1) == Some(&0xBC)
                && text.get(at + 2).is_some_and(|b| (0x81..=0xBF).contains(b)) =>
            {
                clean.push(text[at + 2] - 0x60);
                at += 3;
            }
            0xEF if text.get(at + 1) == Some(&0xBD)
                && text.get(at + 2).is_some_and(|b| (0x80..=0x9E).contains(b)) =>
            {
                clean.push(text[at + 2] - 0x20);
                at += 3;
            }
            _ => {
                clean.push(byte);
                at += 1;
            }
        }
    }
    Cow::Owned(clean)
}

/// The text with long runs of blanks inside sentences taken out, where there are any.
fn unwrapped(text: &[u8]) -> Option<Vec<u8>> {
    const RUN: usize = 8;
    let inside = |start: usize, end: usize| {
        start > 0
            && end < text.len()
            && (is_word(text[start - 1]) || matches!(text[start - 1], b',' | b':' | b'.' | b'!'))
            && (is_word(text[end]) || matches!(text[end], b',' | b':' | b'.' | b'!'))
    };
    // Only events are worth it; most lines with blanks in a row are tables and progress bars.
    let event = [key!("        "), key!("cal")]
        .iter()
        .all(|word| has(text, word))
        && [
            key!("verflow"),
            key!("VERFLOW"),
            key!("educing"),
            key!("kipping"),
        ]
        .iter()
        .any(|word| has(text, word));
    if !event {
        return None;
    }
    let mut out: Option<Vec<u8>> = None;
    let mut at = 0;
    let mut kept = 0;
    while at < text.len() {
        if text[at] != b' ' {
            at += 1;
            continue;
        }
        let start = at;
        while at < text.len() && text[at] == b' ' {
            at += 1;
        }
        if at - start >= RUN && inside(start, at) {
            out.get_or_insert_default()
                .extend_from_slice(&text[kept..start]);
            kept = at;
        }
    }
    let mut out = out?;
    out.extend_from_slice(&text[kept..]);
    Some(out)
}

/// The last time of day in a text, `12:34:56` with or without a fraction, in seconds.
fn time(text: &[u8]) -> Option<f64> {
    let digits = |at: usize| {
        let pair = text.get(at..at + 2)?;
        pair.iter()
            .all(u8::is_ascii_digit)
            .then(|| f64::from((pair[0] - b'0') * 10 + (pair[1] - b'0')))
    };
    let mut at = text.len().saturating_sub(7);
    while at > 0 {
        at -= 1;
        if text.get(at + 2) != Some(&b':') || text.get(at + 5) != Some(&b':') {
            continue;
        }
        // A progress bar's elapsed time stands in front of `<` or behind it.
        let bar = at > 0 && matches!(text[at - 1], b'<' | b'[') || text.get(at + 8) == Some(&b'<');
        let (Some(h), Some(m), Some(s)) = (digits(at), digits(at + 3), digits(at + 6)) else {
            continue;
        };
        if bar {
            continue;
        }
        let mut seconds = h * 3600.0 + m * 60.0 + s;
        if let Some(b',' | b'.') = text.get(at + 8) {
            let mut unit = 0.1;
            for digit in text[at + 9..]
                .iter()
                .take_while(|b| b.is_ascii_digit())
                .take(6)
            {
                seconds += f64::from(digit - b'0') * unit;
                unit /= 10.0;
            }
        }
        return Some(seconds);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_and_wide_signs_go_and_wrapping_is_undone() {
        assert_eq!(
            &*cleaned("\x1b[1;31mloss\x1b[0m_scale： １６ \x1b]0;t\x07x".as_bytes()),
            b"loss_scale: 16 x"
        );
        assert_eq!(
            unwrapped(b"OVERFLOW! loss scal            e: 8192").as_deref(),
            Some(&b"OVERFLOW! loss scale: 8192"[..])
        );
        assert_eq!(unwrapped(b"| loss            | nan        |"), None);
        assert_eq!(unwrapped(b"loss 3          "), None);
    }

    #[test]
    fn times_of_day_are_found_and_elapsed_ones_are_not() {
        assert_eq!(time(b"[2023-05-04 10:00:01,500] [INFO]"), Some(36001.5));
        assert_eq!(time(b"x 00:00:59 y"), Some(59.0));
        assert_eq!(time(b"3/4 [11:00:01<91:10:10, 132.9s/it]"), None);
        assert_eq!(time(b"none"), None);
    }

    #[test]
    fn every_needle_passes_the_first_look() {
        let lines = super::super::lines::Lines::get();
        for dialect in ALL {
            for line in dialect.lines {
                let mut shown = false;
                lines.scan(line.needle.as_bytes(), &mut |_| {
                    shown = true;
                    false
                });
                assert!(shown, "{}: {:?}", dialect.format, line.needle);
            }
        }
    }
}
