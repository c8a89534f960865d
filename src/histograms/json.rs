//! JSON of strangers: only numbers, lists of numbers and maps are kept, and no file is larger than [`LARGEST`].

use super::HistogramError;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::path::Path;

/// Bytes of a file or line. In memory they take a dozen times as much at worst.
pub(super) const LARGEST: u64 = 64 << 20;

/// A JSON value, as far as it matters here.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Node {
    Number(f64),
    Text(String),
    /// A list in which everything is a number.
    Numbers(Vec<f64>),
    /// Another list.
    List(Vec<Node>),
    Map(Vec<(String, Node)>),
    Other,
}

impl Node {
    pub fn get(&self, key: &str) -> Option<&Node> {
        match self {
            // The last of equal keys counts, as in most readers.
            Node::Map(entries) => entries.iter().rev().find(|(k, _)| k == key).map(|(_, v)| v),
            _ => None,
        }
    }

    pub fn number(&self) -> Option<f64> {
        match self {
            Node::Number(number) => Some(*number),
            // msprobe writes what JSON has no number for as text.
            Node::Text(text) => text
                .parse::<f64>()
                .ok()
                .filter(|number| !number.is_finite()),
            _ => None,
        }
    }

    pub fn numbers(&self) -> Option<&[f64]> {
        match self {
            Node::Numbers(numbers) => Some(numbers),
            _ => None,
        }
    }

    pub fn text(&self) -> Option<&str> {
        match self {
            Node::Text(text) => Some(text),
            _ => None,
        }
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Node, E> {
        Ok(Node::Other)
    }

    fn visit_i64<E>(self, number: i64) -> Result<Node, E> {
        Ok(Node::Number(number as f64))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Node, E> {
        Ok(Node::Number(number as f64))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Node, E> {
        Ok(Node::Number(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Node, E> {
        // Long texts are notes or tables, and never looked at.
        Ok(if text.len() <= 4096 {
            Node::Text(text.to_owned())
        } else {
            Node::Other
        })
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Node, A::Error> {
        let mut numbers = Vec::new();
        while let Some(item) = list.next_element::<Node>()? {
            if let Node::Number(number) = item {
                numbers.push(number);
                continue;
            }
            let mut nodes: Vec<Node> = numbers.into_iter().map(Node::Number).collect();
            nodes.push(item);
            while let Some(item) = list.next_element::<Node>()? {
                nodes.push(item);
            }
            return Ok(Node::List(nodes));
        }
        Ok(Node::Numbers(numbers))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            // Python's NaN and Infinity are no JSON; the error of the parser says where.
            if key.len() > 4096 {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            entries.push((key, map.next_value::<Node>()?));
        }
        Ok(Node::Map(entries))
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Node, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

/// The bytes of a file of at most [`LARGEST`].
pub(super) fn load(path: &Path) -> Result<Vec<u8>, HistogramError> {
    let io = |source| HistogramError::Io {
        path: path.to_owned(),
        source,
    };
    let found = std::fs::metadata(path).map_err(io)?.len();
    if found > LARGEST {
        return Err(HistogramError::TooLarge {
            path: path.to_owned(),
            found,
            limit: LARGEST,
        });
    }
    std::fs::read(path).map_err(io)
}

/// Parses one document; `line` is its first line in the file, from 1.
pub(super) fn parse(bytes: &[u8], path: &Path, line: usize) -> Result<Node, HistogramError> {
    let bare = without_nonfinite(bytes);
    serde_json::from_slice(&bare).map_err(|error| HistogramError::Json {
        path: path.to_owned(),
        place: format!(
            "line {}, column {}",
            line + error.line().saturating_sub(1),
            error.column()
        ),
        found: format!("no JSON ({error})"),
        expected: "a whole JSON document, as its writer leaves it".to_owned(),
    })
}

/// Python writes NaN, Infinity and -Infinity, which JSON has not: outside of text they become text of the same length.
fn without_nonfinite(bytes: &[u8]) -> std::borrow::Cow<'_, [u8]> {
    let needed = memchr::memmem::find(bytes, b"NaN").is_some()
        || memchr::memmem::find(bytes, b"Infinity").is_some();
    if !needed {
        return bytes.into();
    }
    let mut out = Vec::with_capacity(bytes.len() + 64);
    let (mut quoted, mut at) = (false, 0);
    while at < bytes.len() {
        let rest = &bytes[at..];
        let word = [&b"-Infinity"[..], b"Infinity", b"NaN"]
            .into_iter()
            .find(|word| !quoted && rest.starts_with(word));
        match (word, rest[0]) {
            (Some(word), _) => {
                out.push(b'"');
                out.extend_from_slice(word);
                out.push(b'"');
                at += word.len();
                continue;
            }
            (None, b'\\') if quoted => {
                out.extend_from_slice(&rest[..rest.len().min(2)]);
                at += 2;
                continue;
            }
            (None, b'"') => quoted = !quoted,
            _ => {}
        }
        out.push(rest[0]);
        at += 1;
    }
    out.into()
}
