//! `.npy`: NumPy's own format, versions 1 to 3.
//!
//! ```text
//! \x93NUMPY | major minor | header length (2 bytes in version 1, else 4) | a Python dict as text | the elements
//! ```
//!
//! The dict has three known keys, so a strict reader of just those does: nothing recurses, and 60,000 open
//! parentheses are an error at the second. `'<V2'` is what NumPy writes for ml_dtypes' bfloat16 (a plain two-byte void
//! is `'|V2'`, which is left alone). Fortran order changes nothing for counts: the same elements in another order.

use super::error::{escaped, quoted, shortened};
use super::source::{Bytes, Region, Source};
use super::tensor::{Dtype, Encoding, Skipped, SkippedBecause, elements_of};
use super::{GradientsError, Kind};

/// NumPy itself refuses headers above 10,000 bytes unless told otherwise.
const MAX_HEADER_BYTES: u64 = 64 * 1024;

/// What the header says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub element: Element,
    pub shape: Vec<u64>,
    pub elements: u64,
    /// From the magic to the first element.
    pub len: u64,
}

/// What an element is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Element {
    Float(Encoding),
    Object,
    Other { descr: String, why: SkippedBecause },
}

/// Reads the header from the beginning of `bytes`. `at` is the file offset of the magic, for messages.
pub(crate) fn header(
    source: &Source,
    kind: Kind,
    tensor: &str,
    at: u64,
    bytes: &mut dyn Bytes,
) -> Result<Header, GradientsError> {
    let bad = |offset: u64, found: String, expected: &'static str| GradientsError::Header {
        path: source.path.clone(),
        kind,
        tensor: Some(tensor.to_string()),
        offset: at + offset,
        found,
        expected: expected.into(),
    };
    let mut magic = [0u8; 8];
    bytes.fill(&mut magic)?;
    if &magic[..6] != b"\x93NUMPY" {
        return Err(GradientsError::Magic {
            path: source.path.clone(),
            kind: Kind::Npy,
            offset: at,
            found: escaped(&magic),
            expected: "\\x93NUMPY",
        });
    }
    let (length_bytes, len) = match (magic[6], magic[7]) {
        (1, 0) => {
            let mut length = [0u8; 2];
            bytes.fill(&mut length)?;
            (2, u64::from(u16::from_le_bytes(length)))
        }
        (2 | 3, 0) => {
            let mut length = [0u8; 4];
            bytes.fill(&mut length)?;
            (4, u64::from(u32::from_le_bytes(length)))
        }
        (major, minor) => {
            return Err(bad(
                6,
                format!("version {major}.{minor}"),
                "1.0, 2.0 or 3.0",
            ));
        }
    };
    if len > MAX_HEADER_BYTES {
        return Err(GradientsError::HeaderTooLong {
            path: source.path.clone(),
            kind,
            offset: at + 8,
            found: len,
            limit: MAX_HEADER_BYTES,
        });
    }
    let start = 8 + length_bytes;
    let mut text = vec![0u8; len as usize];
    bytes.fill(&mut text)?;
    let mut parser = Parser { text: &text, at: 0 };
    let (descr, shape) = parser.dict().map_err(|(offset, expected)| {
        let there = &text[offset.min(text.len())..];
        let found = if there.is_empty() {
            "the header's end".to_string()
        } else {
            quoted(there)
        };
        bad(start + offset as u64, found, expected)
    })?;
    let element = element(&descr);
    let size = match &element {
        Element::Float(encoding) => encoding.dtype.size_bytes(),
        _ => 1,
    };
    let Some(elements) = elements_of(&shape, size) else {
        return Err(GradientsError::ShapeOverflow {
            path: source.path.clone(),
            tensor: tensor.to_string(),
            shape,
        });
    };
    Ok(Header {
        element,
        shape,
        elements,
        len: start + len,
    })
}

/// What one array is, once its header is understood.
pub(crate) enum Array {
    Float {
        encoding: Encoding,
        shape: Vec<u64>,
        elements: u64,
        data_offset: u64,
    },
    Skipped(Skipped),
}

/// Opens an `.npy` file of which `source` is the whole. The second half is bytes behind the array.
pub(crate) fn open(
    source: &Source,
    name: &str,
    selected: bool,
) -> Result<(Array, Option<Skipped>), GradientsError> {
    let mut bytes = Region {
        source,
        position: 0,
        end: source.len,
        tensor: Some(name),
    };
    let header = header(source, Kind::Npy, name, 0, &mut bytes)?;
    match header.element {
        Element::Float(encoding) => {
            // elements_of has checked that this fits.
            let expected = header.elements * encoding.dtype.size_bytes();
            source.check_inside(Some(name), header.len, expected)?;
            let behind = source.len - header.len - expected;
            let trailing = (behind > 0).then(|| Skipped {
                name: name.to_string(),
                dtype: format!("{behind} bytes behind the array"),
                why: SkippedBecause::Trailing,
            });
            let (shape, elements, data_offset) = (header.shape, header.elements, header.len);
            Ok((
                Array::Float {
                    encoding,
                    shape,
                    elements,
                    data_offset,
                },
                trailing,
            ))
        }
        Element::Object if selected => Err(GradientsError::ObjectArray {
            path: source.path.clone(),
            tensor: name.to_string(),
        }),
        Element::Object => Ok((
            skipped(name, "|O".to_string(), SkippedBecause::NotNumbers),
            None,
        )),
        Element::Other { descr, why } => Ok((skipped(name, descr, why), None)),
    }
}

fn skipped(name: &str, dtype: String, why: SkippedBecause) -> Array {
    Array::Skipped(Skipped {
        name: name.to_string(),
        dtype,
        why,
    })
}

/// What a `descr` means.
fn element(descr: &str) -> Element {
    let other = |why| Element::Other {
        descr: shortened(descr),
        why,
    };
    let named = match descr {
        "bfloat16" => Some(Dtype::Bf16),
        "float8_e4m3fn" => Some(Dtype::Fp8E4m3fn),
        "float8_e5m2" => Some(Dtype::Fp8E5m2),
        "float8_e4m3fnuz" => Some(Dtype::Fp8E4m3fnuz),
        "float8_e5m2fnuz" => Some(Dtype::Fp8E5m2fnuz),
        _ => None,
    };
    if let Some(dtype) = named {
        return Element::Float(Encoding::little(dtype));
    }
    let (order, rest) = match descr.split_at_checked(1) {
        Some((order @ ("<" | ">" | "|" | "="), rest)) => (order, rest),
        _ => ("", descr),
    };
    let float = match rest {
        "f2" => Some(Dtype::F16),
        "f4" => Some(Dtype::F32),
        "f8" => Some(Dtype::F64),
        "V2" if matches!(order, "<" | ">") => Some(Dtype::Bf16),
        _ => None,
    };
    if let Some(dtype) = float
        && (order == "<" || order == ">")
    {
        return Element::Float(Encoding {
            dtype,
            big_endian: order == ">",
        });
    }
    match rest.bytes().next() {
        Some(b'O') => Element::Object,
        Some(b'i' | b'u' | b'b') => other(SkippedBecause::Integer),
        Some(b'c') => other(SkippedBecause::Complex),
        Some(b'f') => other(SkippedBecause::UnreadFloat),
        _ => other(SkippedBecause::NotNumbers),
    }
}

/// Reads the one dict that a header is. Errors are (offset in the header, what belongs there).
struct Parser<'a> {
    text: &'a [u8],
    at: usize,
}

type Parsed<T> = Result<T, (usize, &'static str)>;

impl Parser<'_> {
    fn dict(&mut self) -> Parsed<(String, Vec<u64>)> {
        let (mut descr, mut order, mut shape) = (None, None, None);
        self.expect(b'{', "{")?;
        while !self.eats(b'}') {
            let key_at = self.at;
            let key = self.quoted()?;
            self.expect(b':', ":")?;
            let new = match key.as_str() {
                "descr" => descr.replace(self.descr()?).is_none(),
                "fortran_order" => order.replace(self.boolean()?).is_none(),
                "shape" => shape.replace(self.shape()?).is_none(),
                _ => return Err((key_at, "'descr', 'fortran_order' or 'shape'")),
            };
            if !new {
                return Err((key_at, "each key once"));
            }
            if !self.eats(b',') {
                self.expect(b'}', ", or }")?;
                break;
            }
        }
        self.skip_space();
        if self.at < self.text.len() {
            return Err((self.at, "nothing but spaces behind the dict"));
        }
        match (descr, order, shape) {
            (Some(descr), Some(_), Some(shape)) => Ok((descr, shape)),
            _ => Err((self.at, "the keys 'descr', 'fortran_order' and 'shape'")),
        }
    }

    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while self.peek().is_some_and(|c| c.is_ascii_whitespace()) {
            self.at += 1;
        }
    }

    fn eats(&mut self, c: u8) -> bool {
        self.skip_space();
        let there = self.peek() == Some(c);
        self.at += usize::from(there);
        there
    }

    fn expect(&mut self, c: u8, what: &'static str) -> Parsed<()> {
        if self.eats(c) {
            Ok(())
        } else {
            Err((self.at, what))
        }
    }

    /// `'text'`, `"text"`, and Python 2's `u'text'`, without escapes: no key or dtype has any.
    fn quoted(&mut self) -> Parsed<String> {
        self.skip_space();
        let start = self.at;
        if matches!(self.peek(), Some(b'u' | b'b')) {
            self.at += 1;
        }
        let Some(quote @ (b'\'' | b'"')) = self.peek() else {
            return Err((start, "quoted text"));
        };
        self.at += 1;
        let begin = self.at;
        while let Some(c) = self.peek() {
            if c == quote {
                let text = String::from_utf8_lossy(&self.text[begin..self.at]).into_owned();
                self.at += 1;
                return Ok(text);
            }
            if c == b'\\' {
                return Err((self.at, "text without escapes"));
            }
            self.at += 1;
        }
        Err((start, "quoted text that ends"))
    }

    fn boolean(&mut self) -> Parsed<bool> {
        self.skip_space();
        for (word, value) in [("True", true), ("False", false)] {
            if self.text[self.at..].starts_with(word.as_bytes()) {
                self.at += word.len();
                return Ok(value);
            }
        }
        Err((self.at, "True or False"))
    }

    /// `()`, `(3,)`, `(3, 5)`, `(3L, 5L)`.
    fn shape(&mut self) -> Parsed<Vec<u64>> {
        self.expect(b'(', "( and the shape")?;
        let mut shape = Vec::new();
        while !self.eats(b')') {
            // NumPy's own limit is 64; an array of 64 dimensions is a mistake or an attack.
            if shape.len() == 64 {
                return Err((self.at, "at most 64 dimensions"));
            }
            self.skip_space();
            let begin = self.at;
            while self.peek().is_some_and(|c| c.is_ascii_digit()) {
                self.at += 1;
            }
            let digits = std::str::from_utf8(&self.text[begin..self.at]).unwrap_or_default();
            shape.push(
                digits
                    .parse::<u64>()
                    .map_err(|_| (begin, "a dimension of at most 64 bits, or )"))?,
            );
            if self.peek() == Some(b'L') {
                self.at += 1;
            }
            if !self.eats(b',') {
                self.expect(b')', ", or )")?;
                break;
            }
        }
        Ok(shape)
    }

    /// A dtype: text, or a structured one in brackets, which is skipped as a whole and kept as text.
    fn descr(&mut self) -> Parsed<String> {
        self.skip_space();
        let begin = self.at;
        if !matches!(self.peek(), Some(b'[' | b'(' | b'{')) {
            return self.quoted();
        }
        let mut depth = 0u32;
        loop {
            match self.peek() {
                None => return Err((begin, "a dtype whose brackets close")),
                Some(b'\'' | b'"') => {
                    self.quoted()?;
                    continue;
                }
                Some(b'[' | b'(' | b'{') => depth += 1,
                Some(b']' | b')' | b'}') => depth = depth.saturating_sub(1),
                Some(_) => {}
            }
            self.at += 1;
            if depth == 0 {
                return Ok(String::from_utf8_lossy(&self.text[begin..self.at]).into_owned());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Parsed<(String, Vec<u64>)> {
        Parser {
            text: text.as_bytes(),
            at: 0,
        }
        .dict()
    }

    #[test]
    fn headers_of_every_age_are_read() {
        let shape = |text| parse(text).map(|(_, shape)| shape);
        assert_eq!(
            shape("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 5), }   \n"),
            Ok(vec![3, 5])
        );
        assert_eq!(
            shape("{'shape': (), 'descr': u'>f8', 'fortran_order': True}"),
            Ok(vec![])
        );
        assert_eq!(
            shape("{\"descr\":\"|O\",\"fortran_order\":False,\"shape\":(2L,)}\r\n"),
            Ok(vec![2])
        );
        assert_eq!(
            parse("{'descr': [('a', '<i4'), ('b]', '<f4', (2,))], 'fortran_order': False, 'shape': (1,)}").map(|p| p.0),
            Ok("[('a', '<i4'), ('b]', '<f4', (2,))]".to_string())
        );
    }

    #[test]
    fn headers_that_are_not_quite_right_are_refused() {
        for text in [
            "",
            "{",
            "{'descr'",
            "{'descr': '<f4'}",
            "{'descr': '<f4', 'fortran_order': 0, 'shape': ()}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (18446744073709551616,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1 2)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': ((1,),)}",
            "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': ()}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (), 'x': 1}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': ()} import os",
            "{'descr': [[[[, 'fortran_order': False, 'shape': ()}",
            "{'descr': '\\x3cf4', 'fortran_order': False, 'shape': ()}",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert!(parse(&"(".repeat(60_000)).is_err());
        assert!(parse(&format!("{{'descr': {}", "[".repeat(60_000))).is_err());
    }

    #[test]
    fn dtypes_are_told_apart() {
        let float = |dtype, big_endian| Element::Float(Encoding { dtype, big_endian });
        assert_eq!(element("<f2"), float(Dtype::F16, false));
        assert_eq!(element(">f8"), float(Dtype::F64, true));
        assert_eq!(element("<V2"), float(Dtype::Bf16, false));
        assert_eq!(element("bfloat16"), float(Dtype::Bf16, false));
        assert_eq!(element("|O8"), Element::Object);
        for (descr, why) in [
            ("<i8", SkippedBecause::Integer),
            ("|b1", SkippedBecause::Integer),
            ("<c16", SkippedBecause::Complex),
            ("<f16", SkippedBecause::UnreadFloat),
            ("|V2", SkippedBecause::NotNumbers),
            ("|S3", SkippedBecause::NotNumbers),
            ("<M8[ns]", SkippedBecause::NotNumbers),
            ("", SkippedBecause::NotNumbers),
            ("[('a', '<f4')]", SkippedBecause::NotNumbers),
        ] {
            assert_eq!(
                element(descr),
                Element::Other {
                    descr: descr.to_string(),
                    why
                }
            );
        }
    }
}
