//! `.safetensors`: a length, a JSON header, the data.
//!
//! The header is read here and not by the `safetensors` crate because that one lets the last of two equal names win,
//! and a dump that names a tensor twice can't say which is meant. The rest is as strict as the crate: offsets tile the
//! buffer exactly, and each tensor has as many bytes as its shape needs.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde::Deserialize;
use serde::de::{self, MapAccess, Visitor};

use super::error::{escaped, quoted, shortened};
use super::source::Source;
use super::tensor::{Dtype, Skipped, SkippedBecause};
use super::{GradientsError, Kind};

/// The limit of the `safetensors` crate.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// A header that holds together.
#[derive(Debug)]
pub(crate) struct Header {
    pub metadata: BTreeMap<String, String>,
    pub tensors: Vec<Tensor>,
    pub skipped: Vec<Skipped>,
}

/// A float tensor and where its data begins in the file.
#[derive(Debug)]
pub(crate) struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub elements: u64,
    pub offset: u64,
}

#[derive(Deserialize)]
struct Info {
    dtype: String,
    shape: Shape,
    data_offsets: (u64, u64),
}

/// A shape; more dimensions than NumPy or torch allow are refused while they are read.
struct Shape(Vec<u64>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Shape, D::Error> {
        struct Dims;
        impl<'de> Visitor<'de> for Dims {
            type Value = Shape;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a shape")
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut dims = Vec::new();
                while let Some(dim) = seq.next_element()? {
                    if dims.len() == 64 {
                        return Err(de::Error::custom("more than 64 dimensions"));
                    }
                    dims.push(dim);
                }
                Ok(Shape(dims))
            }
        }
        deserializer.deserialize_seq(Dims)
    }
}

/// The header's entries in order, equal names kept apart.
struct Entries {
    metadata: Option<BTreeMap<String, String>>,
    tensors: Vec<(String, Info)>,
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Entries, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Entries;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors by name")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Entries {
                    metadata: None,
                    tensors: Vec::new(),
                };
                while let Some(name) = map.next_key::<String>()? {
                    if name != "__metadata__" {
                        let info = map.next_value()?;
                        entries.tensors.push((name, info));
                    } else if entries.metadata.is_none() {
                        entries.metadata = Some(map.next_value::<Option<_>>()?.unwrap_or_default());
                    } else {
                        return Err(de::Error::custom("__metadata__ twice"));
                    }
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// Reads and checks the header.
pub(crate) fn header(source: &Source) -> Result<Header, GradientsError> {
    let kind = Kind::Safetensors;
    source.check_inside(None, 0, 8)?;
    let mut length = [0u8; 8];
    source.read_exact_at(0, &mut length, None)?;
    let len = u64::from_le_bytes(length);
    if len > MAX_HEADER_BYTES {
        let (path, limit) = (source.path.clone(), MAX_HEADER_BYTES);
        return Err(GradientsError::HeaderTooLong {
            path,
            kind,
            offset: 0,
            found: len,
            limit,
        });
    }
    source.check_inside(None, 8, len)?;
    let mut json = vec![0u8; len as usize];
    source.read_exact_at(8, &mut json, None)?;
    if json.first() != Some(&b'{') {
        let found = escaped(&json);
        return Err(GradientsError::Magic {
            path: source.path.clone(),
            kind,
            offset: 8,
            found,
            expected: "{ and a JSON header",
        });
    }
    let text = std::str::from_utf8(&json).map_err(|e| {
        let at = e.valid_up_to();
        source.bad(kind, 8 + at as u64, quoted(&json[at..]), "UTF-8")
    })?;
    let entries: Entries = serde_json::from_str(text).map_err(|e| {
        let line_start: usize = text
            .split_inclusive('\n')
            .take(e.line().saturating_sub(1))
            .map(str::len)
            .sum();
        let at = (line_start + e.column()).saturating_sub(1) as u64;
        source.bad(
            kind,
            8 + at,
            shortened(&e.to_string()),
            "a header of the safetensors format",
        )
    })?;
    // The text may be as large as the limit; what was made of it is enough.
    drop(json);
    check(source, 8 + len, entries)
}

fn check(source: &Source, data: u64, entries: Entries) -> Result<Header, GradientsError> {
    let mut names = HashSet::with_capacity(entries.tensors.len());
    for (name, _) in &entries.tensors {
        if !names.insert(name.as_str()) {
            return Err(GradientsError::DuplicateName {
                path: source.path.clone(),
                tensor: name.clone(),
            });
        }
    }
    drop(names);
    let mut order: Vec<usize> = (0..entries.tensors.len()).collect();
    order.sort_by_key(|&i| entries.tensors[i].1.data_offsets);
    let mut end = 0u64;
    for &i in &order {
        let (name, info) = &entries.tensors[i];
        let (from, to) = info.data_offsets;
        if from != end || to < from {
            return Err(GradientsError::Offsets {
                path: source.path.clone(),
                tensor: name.clone(),
                found: (from, to),
                expected: end,
            });
        }
        end = to;
    }
    // The buffer is exactly the tensors; what is missing is named by the tensor it belongs to.
    let there = source.len - data;
    if end > there {
        let cut = order
            .iter()
            .map(|&i| &entries.tensors[i])
            .find(|(_, info)| info.data_offsets.1 > there);
        let (name, from) = cut.map_or((None, 0), |(name, info)| {
            (Some(name.clone()), info.data_offsets.0)
        });
        return Err(GradientsError::Truncated {
            path: source.path.clone(),
            tensor: name,
            offset: data.saturating_add(from),
            found: there.saturating_sub(from),
            expected: end.saturating_sub(from),
        });
    }
    if end < there {
        let found = format!("{} bytes behind the last tensor", there - end);
        return Err(source.bad(Kind::Safetensors, data + end, found, "the file's end"));
    }
    let mut header = Header {
        metadata: entries.metadata.unwrap_or_default(),
        tensors: Vec::new(),
        skipped: Vec::new(),
    };
    for (name, info) in entries.tensors {
        let (from, to) = info.data_offsets;
        let kind = dtype(&info.dtype);
        if let Some(bits) = kind.bits {
            let elements = info
                .shape
                .0
                .iter()
                .try_fold(1u64, |n, &d| n.checked_mul(d))
                .and_then(|n| {
                    let bits = n.checked_mul(bits)?;
                    (bits < 1 << 63).then_some((n, bits.div_ceil(8)))
                });
            let Some((elements, expected)) = elements else {
                return Err(GradientsError::ShapeOverflow {
                    path: source.path.clone(),
                    tensor: name,
                    shape: info.shape.0,
                });
            };
            if to - from != expected {
                return Err(GradientsError::SizeMismatch {
                    path: source.path.clone(),
                    tensor: name,
                    offset: data + from,
                    found: to - from,
                    expected,
                });
            }
            if let Ok(dtype) = kind.read {
                let offset = data + from;
                header.tensors.push(Tensor {
                    name,
                    dtype,
                    shape: info.shape.0,
                    elements,
                    offset,
                });
                continue;
            }
        }
        let why = kind.read.err().unwrap_or(SkippedBecause::NotNumbers);
        header.skipped.push(Skipped {
            name,
            dtype: shortened(&info.dtype),
            why,
        });
    }
    Ok(header)
}

struct Named {
    /// Bits an element takes; `None` where the name is not known.
    bits: Option<u64>,
    read: Result<Dtype, SkippedBecause>,
}

fn dtype(name: &str) -> Named {
    use SkippedBecause::{Complex, Integer, NotNumbers, UnreadFloat};
    let (bits, read) = match name {
        "F16" => (16, Ok(Dtype::F16)),
        "BF16" => (16, Ok(Dtype::Bf16)),
        "F32" => (32, Ok(Dtype::F32)),
        "F64" => (64, Ok(Dtype::F64)),
        "F8_E4M3" => (8, Ok(Dtype::Fp8E4m3fn)),
        "F8_E5M2" => (8, Ok(Dtype::Fp8E5m2)),
        "F8_E4M3FNUZ" => (8, Ok(Dtype::Fp8E4m3fnuz)),
        "F8_E5M2FNUZ" => (8, Ok(Dtype::Fp8E5m2fnuz)),
        "F8_E8M0" => (8, Err(UnreadFloat)),
        "F6_E2M3" | "F6_E3M2" => (6, Err(UnreadFloat)),
        "F4" => (4, Err(UnreadFloat)),
        "C64" => (64, Err(Complex)),
        "C128" => (128, Err(Complex)),
        "BOOL" | "I8" | "U8" => (8, Err(Integer)),
        "I16" | "U16" => (16, Err(Integer)),
        "I32" | "U32" => (32, Err(Integer)),
        "I64" | "U64" => (64, Err(Integer)),
        _ => {
            return Named {
                bits: None,
                read: Err(NotNumbers),
            };
        }
    };
    Named {
        bits: Some(bits),
        read,
    }
}
