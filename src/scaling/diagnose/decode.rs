//! Bytes of a log file to bytes of UTF-8: gzip by its magic number, UTF-16 by its byte order mark or its zeros.

use std::io::{self, BufRead, BufReader, Read};

/// How a log's bytes were packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// As they are.
    Plain,
    /// gzip.
    Gzip,
}

/// A compressed form that is recognised and not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unreadable(pub &'static str);

/// A log opened for reading as UTF-8.
pub struct Decoded<'a> {
    /// The text.
    pub reader: Box<dyn Read + 'a>,
    /// How it was packed.
    pub packing: Packing,
}

const BUFFER: usize = 256 << 10;

/// Opens a log's bytes.
///
/// # Errors
/// The reader's own errors; the name of a packing that is not read, such as xz.
pub fn open<'a>(reader: impl Read + 'a) -> io::Result<Result<Decoded<'a>, Unreadable>> {
    let mut reader = BufReader::with_capacity(BUFFER, reader);
    let head = peek(&mut reader)?;
    for (magic, name) in [
        (&b"\xFD7zXZ\0"[..], "xz"),
        (b"\x28\xB5\x2F\xFD", "zstd"),
        (b"BZh", "bzip2"),
        (b"PK\x03\x04", "zip"),
    ] {
        if head.starts_with(magic) {
            return Ok(Err(Unreadable(name)));
        }
    }
    let (inner, packing): (Box<dyn BufRead + 'a>, Packing) = if head.starts_with(b"\x1F\x8B") {
        let inflated = flate2::bufread::MultiGzDecoder::new(reader);
        (
            Box::new(BufReader::with_capacity(BUFFER, inflated)),
            Packing::Gzip,
        )
    } else {
        (Box::new(reader), Packing::Plain)
    };
    let mut inner = inner;
    // A gzip file may break off within its first bytes; that is said when the text is read.
    let head = inner.fill_buf().map(<[u8]>::to_vec).unwrap_or_default();
    let reader: Box<dyn Read + 'a> = match byte_order(&head) {
        Some((little, mark)) => {
            inner.consume(mark);
            Box::new(Utf16::new(inner, little))
        }
        None => {
            if head.starts_with(b"\xEF\xBB\xBF") {
                inner.consume(3);
            }
            inner
        }
    };
    Ok(Ok(Decoded { reader, packing }))
}

/// The first bytes; a pipe may hand them out one by one.
fn peek<R: Read>(reader: &mut BufReader<R>) -> io::Result<Vec<u8>> {
    Ok(reader.fill_buf()?.iter().take(1024).copied().collect())
}

/// Whether the text is UTF-16, little endian or not, and how long its mark is.
fn byte_order(head: &[u8]) -> Option<(bool, usize)> {
    if head.starts_with(b"\xFF\xFE") {
        return Some((true, 2));
    }
    if head.starts_with(b"\xFE\xFF") {
        return Some((false, 2));
    }
    let head = &head[..head.len().min(1024)];
    let zeros = |first: usize| {
        head.iter()
            .skip(first)
            .step_by(2)
            .filter(|b| **b == 0)
            .count()
    };
    let half = head.len() / 2;
    if half < 8 {
        return None;
    }
    match (zeros(0), zeros(1)) {
        (even, odd) if odd * 10 >= half * 7 && even * 10 < half => Some((true, 0)),
        (even, odd) if even * 10 >= half * 7 && odd * 10 < half => Some((false, 0)),
        _ => None,
    }
}

/// UTF-16 read as UTF-8; what is no character becomes U+FFFD.
struct Utf16<R> {
    inner: R,
    little: bool,
    raw: Vec<u8>,
    units: Vec<u16>,
    out: Vec<u8>,
    given: usize,
}

impl<R: Read> Utf16<R> {
    fn new(inner: R, little: bool) -> Self {
        Utf16 {
            inner,
            little,
            raw: Vec::new(),
            units: Vec::new(),
            out: Vec::new(),
            given: 0,
        }
    }

    fn refill(&mut self) -> io::Result<()> {
        self.out.clear();
        self.given = 0;
        while self.out.is_empty() {
            let kept = self.raw.len();
            self.raw.resize(BUFFER, 0);
            let read = self.inner.read(&mut self.raw[kept..])?;
            self.raw.truncate(kept + read);
            let last = read == 0;
            let whole = self.raw.len() / 2 * 2;
            let word = |pair: &[u8]| {
                let pair = [pair[0], pair[1]];
                if self.little {
                    u16::from_le_bytes(pair)
                } else {
                    u16::from_be_bytes(pair)
                }
            };
            self.units
                .extend(self.raw[..whole].chunks_exact(2).map(word));
            self.raw.drain(..whole);
            // The first half of a pair waits for its second.
            let waits = !last
                && self
                    .units
                    .last()
                    .is_some_and(|unit| (0xD800..0xDC00).contains(unit));
            let ready = self.units.len() - usize::from(waits);
            let mut bytes = [0; 4];
            for character in char::decode_utf16(self.units.drain(..ready)) {
                let character = character.unwrap_or(char::REPLACEMENT_CHARACTER);
                self.out
                    .extend_from_slice(character.encode_utf8(&mut bytes).as_bytes());
            }
            if last {
                self.units.clear();
                return Ok(());
            }
        }
        Ok(())
    }
}

impl<R: Read> Read for Utf16<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.given == self.out.len() {
            self.refill()?;
        }
        let ready = &self.out[self.given..];
        let length = ready.len().min(buffer.len());
        buffer[..length].copy_from_slice(&ready[..length]);
        self.given += length;
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(bytes: &[u8]) -> String {
        let mut decoded = open(bytes).expect("readable").expect("a known packing");
        let mut text = String::new();
        decoded.reader.read_to_string(&mut text).expect("UTF-8");
        text
    }

    #[test]
    fn sixteen_bits_with_and_without_a_mark_become_utf8() {
        let said = "Gradient overflow. 缩放 \u{1F600}\r\n";
        for little in [true, false] {
            let bytes = |unit: u16| {
                if little {
                    unit.to_le_bytes()
                } else {
                    unit.to_be_bytes()
                }
            };
            let plain: Vec<u8> = said.encode_utf16().flat_map(bytes).collect();
            let mut marked = bytes(0xFEFF).to_vec();
            marked.extend(&plain);
            assert_eq!(text(&marked), said);
            assert_eq!(text(&plain), said);
            // A lone half of a pair and a lone byte.
            let mut torn = marked.clone();
            torn.extend(bytes(0xD83D));
            torn.push(7);
            assert_eq!(text(&torn), format!("{said}\u{FFFD}"));
        }
        assert_eq!(text(b"\xEF\xBB\xBFx"), "x");
        assert_eq!(text(b""), "");
    }

    #[test]
    fn packed_logs_are_inflated_or_named() {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut packed, b"loss scale").expect("in memory");
        assert_eq!(text(&packed.finish().expect("in memory")), "loss scale");
        let found = open(&b"\xFD7zXZ\0\0"[..]).expect("readable").err();
        assert_eq!(found, Some(Unreadable("xz")));
    }
}
