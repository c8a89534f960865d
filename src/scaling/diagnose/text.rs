//! A piece of a log and a cursor that reads words and numbers from it.
//!
//! Pieces are bytes: logs hold torn characters, and nothing here may trip over one. Numbers keep how they were printed,
//! because `0.062` may stand for 0.0625 and `65.536,0` for sixty-five thousand.

use memchr::memmem::Finder;

/// A search for a literal, prepared once a process.
macro_rules! key {
    ($word:literal) => {{
        static FINDER: std::sync::LazyLock<memchr::memmem::Finder<'static>> =
            std::sync::LazyLock::new(|| memchr::memmem::Finder::new($word));
        &*FINDER
    }};
}
pub(super) use key;

/// Why a message was not read.
#[derive(Debug, Clone, PartialEq)]
pub enum Miss {
    /// Something else stands here.
    Other,
    /// The piece ends before the message does; the next piece may go on.
    Short,
}

/// How a number was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// As programs print it.
    Plain,
    /// With thousands separators or a decimal comma; it was understood.
    Localized,
    /// `65,536`: sixty-five thousand, or sixty-five and a half.
    Ambiguous,
}

/// A number as printed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Number {
    /// The value; NaN and infinities are values.
    pub value: f64,
    /// Half of the last printed digit's unit: what rounding may hide.
    pub half_unit: f64,
    /// It has an exponent: only a few digits are shown.
    pub scientific: bool,
    /// How it was written.
    pub style: Style,
    /// The file ends right behind its last digit, without a line feed: more digits may be missing.
    pub cut: bool,
}

/// No count in a log is larger; a larger number is taken for this, so that sums stay sums.
pub const MOST_COUNT: u64 = 1_000_000_000_000;

impl Number {
    /// As a count; what is no count is 0.
    pub fn count(self) -> u64 {
        (self.value.max(0.0) as u64).min(MOST_COUNT)
    }
}

/// A place in a piece.
#[derive(Debug, Clone)]
pub struct Cursor<'a> {
    /// The whole piece.
    pub text: &'a [u8],
    /// The next byte.
    pub at: usize,
    /// The piece ends where the file ends, without a line feed.
    pub cut: bool,
    /// Nothing goes on behind this piece: what is missing stays missing.
    pub last: bool,
}

/// A byte that belongs to a word.
pub fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

fn is_blank(byte: u8) -> bool {
    byte == b' ' || byte == b'\t'
}

impl<'a> Cursor<'a> {
    /// A cursor at `at`.
    pub fn new(text: &'a [u8], at: usize, cut: bool) -> Cursor<'a> {
        Cursor {
            text,
            at,
            cut,
            last: cut,
        }
    }

    /// `None` for what does not stand here, and for what is torn off for good.
    ///
    /// # Errors
    /// [`Miss::Short`] where the next piece may go on.
    pub fn perhaps<T>(&self, found: Result<T, Miss>) -> Result<Option<T>, Miss> {
        match found {
            Ok(found) => Ok(Some(found)),
            Err(Miss::Short) if !self.last => Err(Miss::Short),
            Err(_) => Ok(None),
        }
    }

    /// The number behind `words`, or `None` where the message is torn or goes on otherwise.
    ///
    /// # Errors
    /// [`Miss::Short`] where the next piece may go on.
    pub fn number_behind(&mut self, words: &str) -> Result<Option<Number>, Miss> {
        let mut here = self.clone();
        let found = here.expect(words).and_then(|()| here.number());
        let found = self.perhaps(found)?;
        if found.is_some() {
            self.at = here.at;
        }
        Ok(found)
    }

    /// What lies ahead.
    pub fn rest(&self) -> &'a [u8] {
        &self.text[self.at.min(self.text.len())..]
    }

    /// Passes blanks.
    pub fn blanks(&mut self) {
        while self.text.get(self.at).copied().is_some_and(is_blank) {
            self.at += 1;
        }
    }

    /// Passes `word`; a blank in it stands for any number of blanks.
    pub fn expect(&mut self, word: &str) -> Result<(), Miss> {
        let mut here = self.clone();
        for &byte in word.as_bytes() {
            if byte == b' ' {
                here.blanks();
                continue;
            }
            match here.text.get(here.at) {
                None => return Err(Miss::Short),
                Some(&found) if found == byte => here.at += 1,
                Some(_) => return Err(Miss::Other),
            }
        }
        self.at = here.at;
        Ok(())
    }

    /// Passes `word` if it stands here.
    pub fn take(&mut self, word: &str) -> bool {
        self.expect(word).is_ok()
    }

    /// The number that stands here, blanks before it passed.
    pub fn number(&mut self) -> Result<Number, Miss> {
        self.blanks();
        let (number, length) = match number(self.rest()) {
            Some(found) => found,
            None if self.rest().is_empty() => return Err(Miss::Short),
            None => return Err(Miss::Other),
        };
        self.at += length;
        Ok(Number {
            cut: self.cut && self.at == self.text.len(),
            ..number
        })
    }

    /// The whole number that stands here.
    pub fn integer(&mut self) -> Result<u64, Miss> {
        self.blanks();
        let start = self.at;
        let mut value: u64 = 0;
        while let Some(digit) = self.text.get(self.at).filter(|b| b.is_ascii_digit()) {
            value = value
                .saturating_mul(10)
                .saturating_add(u64::from(digit - b'0'));
            self.at += 1;
        }
        match self.at > start {
            true => Ok(value.min(MOST_COUNT)),
            false if self.at == self.text.len() => Err(Miss::Short),
            false => Err(Miss::Other),
        }
    }
}

/// A number at the start of `text`, and its length.
fn number(text: &[u8]) -> Option<(Number, usize)> {
    let mut at = usize::from(matches!(text.first(), Some(b'-' | b'+')));
    let negative = text.first() == Some(&b'-');
    for (word, value) in [
        (&b"infinity"[..], f64::INFINITY),
        (b"inf", f64::INFINITY),
        (b"nan", f64::NAN),
    ] {
        if text.len() >= at + word.len()
            && text[at..at + word.len()].eq_ignore_ascii_case(word)
            && !text.get(at + word.len()).copied().is_some_and(is_word)
        {
            let value = if negative { -value } else { value };
            return Some((plain(value, 0.0), at + word.len()));
        }
    }
    let start = at;
    while at < text.len() && at < start + 40 && text[at].is_ascii_digit() {
        at += 1;
    }
    let digits = at - start;
    let mut decimals = 0;
    if text.get(at) == Some(&b'.') {
        let point = at;
        at += 1;
        while at < text.len() && at < point + 40 && text[at].is_ascii_digit() {
            at += 1;
        }
        decimals = at - point - 1;
    }
    if digits + decimals == 0 {
        return None;
    }
    if let Some(year) = date_behind(text, at) {
        // Two messages without a line feed between: `128.0` and `2021-05-05 10:00:00`.
        if decimals > 4 || decimals == 0 && digits > 4 {
            at -= year;
            decimals = decimals.saturating_sub(year);
        }
    }
    if matches!(text.get(at), Some(b',' | b'.'))
        && text.get(at + 1).is_some_and(u8::is_ascii_digit)
        && let Some(found) = localized(text, start, negative)
    {
        return Some(found);
    }
    let mut exponent: i32 = 0;
    if let Some(b'e' | b'E') = text.get(at) {
        let mut behind = at + 1;
        if let Some(b'-' | b'+') = text.get(behind) {
            behind += 1;
        }
        let first = behind;
        while text.get(behind).is_some_and(u8::is_ascii_digit) && behind < first + 5 {
            behind += 1;
        }
        if behind > first {
            exponent = parse::<i32>(&text[at + 1..behind])?;
            at = behind;
        }
    }
    let value = parse::<f64>(&text[..at])?;
    let unit = exponent.saturating_sub(decimals as i32);
    let scientific = text[..at].iter().any(|b| matches!(b, b'e' | b'E'));
    let number = Number {
        scientific,
        ..plain(value, 0.5 * 10f64.powi(unit))
    };
    Some((number, at))
}

/// How many of the digits before `at` are the year of a date that goes on there.
fn date_behind(text: &[u8], at: usize) -> Option<usize> {
    let digits = |from: usize, length: usize| {
        let part = text.get(from..from + length)?;
        part.iter().all(u8::is_ascii_digit).then_some(part)
    };
    let year = digits(at.checked_sub(4)?, 4)?;
    let dash = |at: usize| matches!(text.get(at), Some(b'-' | b'/'));
    let date =
        dash(at) && digits(at + 1, 2).is_some() && dash(at + 3) && digits(at + 4, 2).is_some();
    (date && (year.starts_with(b"20") || year.starts_with(b"19"))).then_some(4)
}

fn plain(value: f64, half_unit: f64) -> Number {
    Number {
        value,
        half_unit,
        scientific: false,
        style: Style::Plain,
        cut: false,
    }
}

fn parse<T: std::str::FromStr>(bytes: &[u8]) -> Option<T> {
    std::str::from_utf8(bytes).ok()?.parse().ok()
}

/// `131.072,0`, `131,072.0`, `8,9E+00`: digits with both separators, or with a decimal comma.
fn localized(text: &[u8], start: usize, negative: bool) -> Option<(Number, usize)> {
    let mut end = start;
    while end < text.len()
        && end < start + 40
        && (text[end].is_ascii_digit()
            || (matches!(text[end], b'.' | b',')
                && text.get(end + 1).is_some_and(u8::is_ascii_digit)))
    {
        end += 1;
    }
    let body = &text[start..end];
    let points = body.iter().filter(|b| **b == b'.').count();
    let commas = body.iter().filter(|b| **b == b',').count();
    let groups_of_three = |separator: u8, whole: &[u8]| {
        let mut parts = whole.split(|b| *b == separator);
        let head = parts.next().map_or(0, <[u8]>::len);
        (1..=3).contains(&head) && parts.all(|part| part.len() == 3)
    };
    let (decimal, thousands) = match (points, commas) {
        (0, 1) => (b',', b'.'),
        (_, 1) => {
            let comma = body.iter().position(|b| *b == b',')?;
            match body.iter().rposition(|b| *b == b'.') {
                Some(point) if point > comma => (b'.', b','),
                _ => (b',', b'.'),
            }
        }
        (1, _) => (b'.', b','),
        (0, _) => (0, b','),
        _ => return None,
    };
    let (whole, fraction) = match body.iter().rposition(|b| *b == decimal) {
        Some(place) => (&body[..place], &body[place + 1..]),
        None => (body, &body[..0]),
    };
    if whole.contains(&thousands) && !groups_of_three(thousands, whole)
        || whole.contains(&decimal)
        || fraction.contains(&thousands)
    {
        return None;
    }
    let style = if points == 0 && commas == 1 && fraction.len() == 3 && whole.len() <= 3 {
        Style::Ambiguous
    } else {
        Style::Localized
    };
    let mut digits: Vec<u8> = if negative { vec![b'-'] } else { Vec::new() };
    digits.extend(whole.iter().filter(|b| b.is_ascii_digit()));
    digits.push(b'.');
    digits.extend(fraction);
    if let Some(b'e' | b'E') = text.get(end) {
        let mut behind = end + 1;
        if let Some(b'-' | b'+') = text.get(behind) {
            behind += 1;
        }
        let first = behind;
        while text.get(behind).is_some_and(u8::is_ascii_digit) && behind < first + 5 {
            behind += 1;
        }
        if behind > first {
            digits.extend(&text[end..behind]);
            end = behind;
        }
    }
    let number = Number {
        value: parse::<f64>(&digits)?,
        half_unit: 0.5 * 10f64.powi(-(fraction.len() as i32)),
        scientific: false,
        style,
        cut: false,
    };
    Some((number, end))
}

/// The number behind the next `key` that stands as a word of its own: `key 1`, `key: 1`, `key=1`, `"key": "1"`, `key | 1`.
pub fn field<'a>(text: &'a [u8], key: &Finder<'_>, cut: bool) -> Option<(Number, Cursor<'a>)> {
    let mut from = 0;
    while let Some(found) = key.find(&text[from..]) {
        let at = from + found;
        from = at + key.needle().len();
        if at > 0 && (is_word(text[at - 1]) || matches!(text[at - 1], b'-' | b'.' | b'/')) {
            continue;
        }
        let mut cursor = Cursor::new(text, from, cut);
        if let Some(number) = value(&mut cursor) {
            return Some((number, cursor));
        }
    }
    None
}

/// The number behind a key, over quotes, blanks and one of `:`, `=`, `|`.
pub fn value(cursor: &mut Cursor<'_>) -> Option<Number> {
    let mut here = cursor.clone();
    if here.text.get(here.at).copied().is_some_and(is_word) {
        return None;
    }
    let quote = |here: &mut Cursor<'_>| {
        if let Some(b'"' | b'\'') = here.text.get(here.at) {
            here.at += 1;
        }
    };
    let start = here.at;
    quote(&mut here);
    here.blanks();
    if let Some(b':' | b'=' | b'|') = here.text.get(here.at) {
        here.at += 1;
    }
    here.blanks();
    quote(&mut here);
    if here.at == start {
        return None;
    }
    let number = here.number().ok()?;
    if let Some(b'%') = here.text.get(here.at) {
        return None;
    }
    *cursor = here;
    Some(number)
}

/// Whether `word` stands anywhere in `text`.
pub fn has(text: &[u8], word: &Finder<'_>) -> bool {
    word.find(text).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<(f64, Style, usize)> {
        number(text.as_bytes()).map(|(n, length)| (n.value, n.style, length))
    }

    #[test]
    fn numbers_read_as_printed() {
        assert_eq!(read("65536,"), Some((65536.0, Style::Plain, 5)));
        assert_eq!(read("65536., x"), Some((65536.0, Style::Plain, 6)));
        assert_eq!(read("1.3422e+08]"), Some((134_220_000.0, Style::Plain, 10)));
        assert_eq!(read("-16189.354"), Some((-16189.354, Style::Plain, 10)));
        assert_eq!(
            read("6.103515625e-05"),
            Some((6.103515625e-5, Style::Plain, 15))
        );
        assert_eq!(read("INF|").map(|n| n.0), Some(f64::INFINITY));
        assert_eq!(read("Infinity").map(|n| n.2), Some(8));
        assert!(read("nan,").is_some_and(|n| n.0.is_nan()));
        assert_eq!(read("nano"), None);
        assert_eq!(read("."), None);
        assert_eq!(read("128.02021-05-05 10:00").map(|n| n.0), Some(128.0));
        assert_eq!(read("327682021/05/05").map(|n| n.0), Some(32768.0));
        assert_eq!(read("0.06252021-05-05").map(|n| n.0), Some(0.0625));
        assert_eq!(read("2021-05-05").map(|n| n.0), Some(2021.0));
        assert_eq!(read("5 e"), Some((5.0, Style::Plain, 1)));
    }

    #[test]
    fn separators_of_other_countries_are_understood_or_called_ambiguous() {
        assert_eq!(read("131.072,0 |"), Some((131_072.0, Style::Localized, 9)));
        assert_eq!(read("131,072.0 |"), Some((131_072.0, Style::Localized, 9)));
        assert_eq!(
            read("1.048.576,0"),
            Some((1_048_576.0, Style::Localized, 11))
        );
        assert_eq!(read("8,9E+00"), Some((8.9, Style::Localized, 7)));
        assert_eq!(read("65,536 "), Some((65.536, Style::Ambiguous, 6)));
        assert_eq!(read("8,train"), Some((8.0, Style::Plain, 1)));
    }

    #[test]
    fn fields_are_words_of_their_own() {
        let of = |text: &'static str, key: &str| {
            field(text.as_bytes(), &Finder::new(key), false).map(|(n, _)| n.value)
        };
        assert_eq!(of("a loss_scale=8, b", "loss_scale"), Some(8.0));
        assert_eq!(of("{\"loss_scale\": \"4\"}", "loss_scale"), Some(4.0));
        assert_eq!(of("cr-loss_scale: 0.2", "loss_scale"), None);
        assert_eq!(of("lg_loss_scale 3", "loss_scale"), None);
        assert_eq!(of("loss_scale='half'", "loss_scale"), None);
        assert_eq!(of("loss 0.0%, loss 3", "loss"), Some(3.0));
    }
}
