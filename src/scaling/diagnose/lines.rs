//! The fast first look: which pieces of a log may say something.
//!
//! ```text
//!   buffer  ....\n..........\n...loss...\r...it/s]...\n.......
//!                             ^^^^^^^^^  ^^^^^^^^^^^         only pieces with a needle are cut out and read
//! ```
//!
//! Most lines of a large log say nothing about the scale. A handful of short literals, searched for with vector
//! instructions over the whole buffer, decides which pieces (between line feeds or carriage returns) are looked at;
//! line feeds are counted the same way. Memory is one buffer, whatever the log's size.

use aho_corasick::{AhoCorasick, MatchKind, packed};
use memchr::{memchr_iter, memchr2, memrchr2};
use std::io::{self, Read};
use std::sync::LazyLock;

/// Every line of every dialect holds one of these. (Few and short: the search is as fast as its weakest literal.)
const NEEDLES: [&str; 19] = [
    "oss",
    "scal",
    "Scal",
    "SCAL",
    "verflow",
    "VERFLOW",
    "kipp",
    "tensor(",
    "it/s",
    "s/it",
    "\u{7F29}\u{653E}",
    "gradients at all",
    "begin training",
    "| epoch ",
    "bf16=",
    "bfloat16",
    "Epoch(train)",
    "lr_scheduler.step",
    "| step ",
];

/// Room for one piece; longer ones are cut.
const BUFFER: usize = 1 << 20;
const LONGEST: usize = 64 << 10;

/// A piece of the log that may say something.
#[derive(Debug, Clone, Copy)]
pub struct Piece<'a> {
    /// The line it stands in, from 1; carriage returns do not count.
    pub line: u64,
    /// What stands between the breaks.
    pub text: &'a [u8],
    /// It ends where the file ends, without a line feed, or where it was cut for its length.
    pub cut: bool,
}

/// What a look over the whole log found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Facts {
    /// Bytes of text.
    pub bytes: u64,
    /// Line feeds, and one more where the last line has none.
    pub lines: u64,
    /// The first bytes are no text.
    pub binary: bool,
    /// The last line has no line feed.
    pub unfinished: bool,
}

/// The search.
#[derive(Debug)]
pub struct Lines {
    packed: Option<packed::Searcher>,
    any: AhoCorasick,
}

/// Built once a process.
static LINES: LazyLock<Lines> = LazyLock::new(|| Lines {
    packed: packed::Searcher::new(NEEDLES),
    any: AhoCorasick::builder()
        .match_kind(MatchKind::LeftmostFirst)
        .build(NEEDLES)
        .expect("a dozen literals fit"),
});

impl Lines {
    /// The search.
    pub fn get() -> &'static Lines {
        &LINES
    }

    fn find(&self, text: &[u8]) -> Option<usize> {
        match &self.packed {
            Some(packed) => packed.find(text).map(|found| found.start()),
            None => self.any.find(text).map(|found| found.start()),
        }
    }

    /// Shows each piece that may say something to `see`; where it returns true, the next piece is shown in any case.
    ///
    /// # Errors
    /// The reader's own, after everything that was read has been shown; the facts come with it.
    pub fn scan(
        &self,
        mut reader: impl Read,
        see: &mut dyn FnMut(Piece<'_>) -> bool,
    ) -> (Facts, Option<io::Error>) {
        let mut buffer = vec![0; BUFFER];
        let mut held = 0;
        let mut facts = Facts::default();
        let mut line = 1;
        let mut wanted = false;
        let mut error = None;
        // Lines that are numbers and nothing else hold no literal: where they are many, every line is shown.
        let mut every = false;
        loop {
            let read = match reader.read(&mut buffer[held..]) {
                Ok(read) => read,
                Err(found) if found.kind() == io::ErrorKind::Interrupted => continue,
                Err(found) => {
                    error = Some(found);
                    0
                }
            };
            if facts.bytes == 0 {
                facts.binary = is_binary(&buffer[..read]);
                every = is_mostly_numbers(&buffer[..read]);
                wanted |= every;
            }
            facts.bytes += read as u64;
            let filled = held + read;
            if read > 0 {
                facts.unfinished = buffer[filled - 1] != b'\n';
            }
            let ended = read == 0;
            let whole = if ended {
                filled
            } else if let Some(last) = memrchr2(b'\n', b'\r', &buffer[held..filled]) {
                held + last + 1
            } else if filled >= LONGEST {
                // Without a break in sight: cut at a blank, so that no word is torn.
                let from = filled.saturating_sub(4096);
                buffer[from..filled]
                    .iter()
                    .rposition(|b| *b == b' ')
                    .map_or(filled, |blank| from + blank + 1)
            } else {
                held = filled;
                continue;
            };
            self.block(
                &buffer[..whole],
                ended,
                &mut line,
                &mut wanted,
                &mut |piece| see(piece) || every,
            );
            if ended {
                break;
            }
            buffer.copy_within(whole..filled, 0);
            held = filled - whole;
        }
        facts.lines = line - 1 + u64::from(facts.unfinished);
        (facts, error)
    }

    /// Looks through a block that ends with a break, or where the file ends.
    fn block(
        &self,
        block: &[u8],
        ended: bool,
        line: &mut u64,
        wanted: &mut bool,
        see: &mut dyn FnMut(Piece<'_>) -> bool,
    ) {
        let mut at = 0;
        while at < block.len() {
            let start = if *wanted {
                // Breaks in a row hold nothing between them.
                let skipped = block[at..]
                    .iter()
                    .take_while(|b| matches!(b, b'\n' | b'\r'))
                    .count();
                at + skipped
            } else {
                match self.find(&block[at..]) {
                    None => break,
                    Some(found) => {
                        memrchr2(b'\n', b'\r', &block[at..at + found]).map_or(at, |b| at + b + 1)
                    }
                }
            };
            if start >= block.len() {
                break;
            }
            let end = memchr2(b'\n', b'\r', &block[start..]).map_or(block.len(), |e| start + e);
            *line += memchr_iter(b'\n', &block[at..start]).count() as u64;
            let mut from = start;
            *wanted = false;
            // A piece without a break within reach is shown in parts, cut at blanks.
            while end - from > LONGEST {
                let near = &block[from..from + LONGEST];
                let length = near
                    .iter()
                    .rposition(|b| *b == b' ')
                    .map_or(LONGEST, |b| b + 1);
                *wanted = see(Piece {
                    line: *line,
                    text: &block[from..from + length],
                    cut: true,
                });
                from += length;
            }
            *wanted = see(Piece {
                line: *line,
                text: &block[from..end],
                cut: end == block.len() && ended,
            });
            at = end;
        }
        *line += memchr_iter(b'\n', &block[at.min(block.len())..]).count() as u64;
    }
}

/// Whether at least a third of the first lines are a number and nothing else.
fn is_mostly_numbers(head: &[u8]) -> bool {
    let (mut lines, mut numbers) = (0, 0);
    for line in head[..head.len().min(16 << 10)].split(|b| *b == b'\n') {
        let line = line.trim_ascii();
        lines += usize::from(!line.is_empty());
        numbers += usize::from(is_number(line));
    }
    numbers >= 3 && numbers * 3 >= lines
}

/// Whether a line is a number with a decimal point and nothing else.
pub fn is_number(line: &[u8]) -> bool {
    line.first().is_some_and(u8::is_ascii_digit)
        && line.contains(&b'.')
        && std::str::from_utf8(line).is_ok_and(|text| text.parse::<f64>().is_ok())
}

/// Whether more than a tenth of the bytes are control characters that no log prints, or any is zero.
fn is_binary(head: &[u8]) -> bool {
    let head = &head[..head.len().min(64 << 10)];
    let odd = head
        .iter()
        .filter(|b| **b < 32 && !matches!(**b, b'\n' | b'\r' | b'\t' | 8 | 12 | 27))
        .count();
    odd * 10 > head.len() || head.iter().filter(|b| **b == 0).count() * 100 > head.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader that hands out a few bytes at a time.
    struct Drops<'a>(&'a [u8], usize);
    impl Read for Drops<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let length = self.1.min(self.0.len()).min(buffer.len());
            buffer[..length].copy_from_slice(&self.0[..length]);
            self.0 = &self.0[length..];
            Ok(length)
        }
    }

    fn pieces(text: &[u8], drop: usize) -> (Vec<(u64, String, bool)>, Facts) {
        let mut seen = Vec::new();
        let (facts, error) = Lines::get().scan(Drops(text, drop), &mut |piece| {
            seen.push((
                piece.line,
                String::from_utf8_lossy(piece.text).into_owned(),
                piece.cut,
            ));
            false
        });
        assert!(error.is_none());
        (seen, facts)
    }

    #[test]
    fn pieces_are_the_same_however_the_bytes_arrive() {
        let text = b"nothing\nloss 1\r 3/4 [1s, 2it/s]\r\n\nmore\nGradient overflow. \r\rend loss";
        let (all, facts) = pieces(text, usize::MAX);
        assert_eq!(
            all,
            [
                (2, "loss 1".to_owned(), false),
                (2, " 3/4 [1s, 2it/s]".to_owned(), false),
                (5, "Gradient overflow. ".to_owned(), false),
                (5, "end loss".to_owned(), true),
            ]
        );
        assert_eq!((facts.lines, facts.unfinished), (5, true));
        for drop in 1..20 {
            assert_eq!(pieces(text, drop), (all.clone(), facts), "{drop}");
        }
    }

    #[test]
    fn a_line_without_end_is_shown_in_parts() {
        let mut text = b"loss 1 ".repeat(100_000);
        let (all, facts) = pieces(&text, usize::MAX);
        assert!(all.len() > 5 && all.iter().all(|p| p.0 == 1 && p.1.len() <= LONGEST));
        let shown: usize = all.iter().map(|p| p.1.len()).sum();
        assert_eq!((shown, facts.lines), (text.len(), 1));
        text.push(b'\n');
        assert_eq!(pieces(&text, usize::MAX).1.lines, 1);
        assert_eq!(pieces(b"", 1).1.lines, 0);
    }

    #[test]
    fn the_next_piece_is_shown_where_it_is_asked_for() {
        let mut seen = Vec::new();
        Lines::get().scan(&b"reducing loss\n\nto 3\nrest\n"[..], &mut |piece| {
            seen.push((piece.line, piece.text.to_vec()));
            seen.len() == 1
        });
        assert_eq!(
            seen,
            [(1, b"reducing loss".to_vec()), (3, b"to 3".to_vec())]
        );
    }
}
