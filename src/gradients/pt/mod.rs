//! `.pt` and `.pth`: what `torch.save` writes, in both of its containers.
//!
//! ```text
//! zip (since torch 1.6)      <root>/data.pkl   <root>/byteorder   <root>/data/0   <root>/data/1   …
//! legacy                     pickles: magic, 1001, system, object, storage keys | n, data | n, data | …
//! ```
//!
//! A pickle is a program, and a hostile one runs whatever it likes when Python loads it. Here it is read by a
//! [machine](pickle) that knows torch's instructions and a [short list of names](globals), and calls nothing.
//!
//! A file of TransformerEngine's DumpTensors (keys `high_precision` and perhaps `quantized`) names its tensor itself, by its
//! stem without the step; the quantized twin is left out.
//!
//! Views are delivered element by element as they show them, whatever their strides; tensors that share a storage are
//! read from it each. Integer tensors, NumPy arrays and the like are left out and listed; sparse and quantized tensors
//! are refused by name, as leaving them out would leave out gradients.

mod globals;
mod pickle;
mod walk;

use std::collections::HashMap;

use self::pickle::{Arena, Machine, Object, Tensor, Value};
use super::archive::{self, Member, Method};
use super::error::{escaped, quoted};
use super::source::Source;
use super::step_pattern::without_step;
use super::tensor::{Encoding, Skipped, SkippedBecause, TensorMeta};
use super::view::View;
use super::{GradientsError, Kind};

/// The number every legacy file begins with.
const LEGACY_MAGIC: i128 = 0x1950_a86a_20f9_469c_fc6c;
const LEGACY_PROTOCOL: i64 = 1001;
/// Views may show this many elements for each byte of the file, and `FREE_ELEMENTS` in any case.
const ELEMENTS_PER_BYTE: u64 = 64;
const FREE_ELEMENTS: u64 = 1 << 28;

/// A tensor, and where its elements are.
#[derive(Debug)]
pub(crate) struct Array {
    pub meta: TensorMeta,
    pub encoding: Encoding,
    /// Byte offset of its first element.
    pub offset: u64,
    pub view: View,
}

/// What a checkpoint holds.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub tensors: Vec<Array>,
    pub skipped: Vec<Skipped>,
    pub loss_scale: Option<f64>,
    pub step: Option<u64>,
}

/// Reads either container. `alone`: the name of a lone tensor.
pub(crate) fn open(
    source: &Source,
    alone: &str,
    selects: &dyn Fn(&str) -> bool,
) -> Result<Found, GradientsError> {
    let head = source.head::<8>()?;
    if head.starts_with(b"PK\x03\x04") {
        return open_zip(source, alone, selects);
    }
    // Only protocols from 2 on begin with their number, and torch never wrote a container with an older one.
    if let [0x80, 1..=5, ..] = head[..] {
        return open_legacy(source, alone, selects);
    }
    Err(GradientsError::Magic {
        path: source.path.clone(),
        kind: Kind::Pt,
        offset: 0,
        found: escaped(&head),
        expected: "a zip archive or a pickle of torch.save",
    })
}

/// Where storages lie: key → byte offset and length.
type Storages = HashMap<String, (u64, u64)>;
/// Finds one; `None` where there is no such key.
type Place<'a> = dyn FnMut(&str) -> Result<Option<(u64, u64)>, GradientsError> + 'a;

fn open_zip(
    source: &Source,
    alone: &str,
    selects: &dyn Fn(&str) -> bool,
) -> Result<Found, GradientsError> {
    let members = archive::directory(source, Kind::Pt)?;
    let root = members
        .first()
        .and_then(|m| m.name.split_once('/'))
        .map(|(root, _)| format!("{root}/"))
        .unwrap_or_default();
    let below = |member: &Member| member.name.strip_prefix(&root).map(str::to_string);
    if let Some(script) = members
        .iter()
        .find(|m| below(m).is_some_and(|name| name == "constants.pkl" || name.starts_with("code/")))
    {
        return Err(GradientsError::TorchScript {
            path: source.path.clone(),
            found: script.name.clone(),
        });
    }
    let find = |name: &str| members.iter().find(|m| below(m).as_deref() == Some(name));
    let Some(pickle) = find("data.pkl") else {
        return Err(source.bad(
            Kind::Pt,
            0,
            "an archive without data.pkl",
            "one that torch.save wrote",
        ));
    };
    let big_endian = match find("byteorder") {
        None => false,
        Some(member) => {
            let offset = stored(source, member)?;
            let mut order = vec![0u8; member.size.min(16) as usize];
            source.read_exact_at(offset, &mut order, Some(&member.name))?;
            match order.as_slice() {
                b"little" => false,
                b"big" => true,
                other => {
                    return Err(source.bad(Kind::Pt, offset, quoted(other), "little or big"));
                }
            }
        }
    };
    let at = stored(source, pickle)?;
    let mut machine = Machine::new(source, at, at + pickle.size);
    let root_value = machine.run()?;
    let arena = machine.into_arena();
    let mut by_key: HashMap<String, &Member> = HashMap::new();
    for member in &members {
        if let Some(key) = below(member)
            .as_deref()
            .and_then(|name| name.strip_prefix("data/"))
        {
            by_key.insert(key.to_string(), member);
        }
    }
    let mut known: Storages = HashMap::new();
    let mut place = |key: &str| -> Result<Option<(u64, u64)>, GradientsError> {
        if let Some(&place) = known.get(key) {
            return Ok(Some(place));
        }
        let Some(member) = by_key.get(key) else {
            return Ok(None);
        };
        let place = (stored(source, member)?, member.size);
        known.insert(key.to_string(), place);
        Ok(Some(place))
    };
    collect(
        source, &arena, root_value, alone, big_endian, selects, &mut place,
    )
}

/// Where a member's bytes are; torch never compresses.
fn stored(source: &Source, member: &Member) -> Result<u64, GradientsError> {
    if member.method != Method::Stored {
        return Err(member.unread(
            source,
            "a compressed member".to_string(),
            "stored, as torch.save writes it",
        ));
    }
    member.data_offset(source, Kind::Pt)
}

fn open_legacy(
    source: &Source,
    alone: &str,
    selects: &dyn Fn(&str) -> bool,
) -> Result<Found, GradientsError> {
    let mut machine = Machine::new(source, 0, source.len);
    let magic = machine.run()?;
    let is_magic = matches!(magic, Value::Long(long) if machine.arena.longs.get(long as usize) == Some(&LEGACY_MAGIC));
    if !is_magic {
        return Err(source.bad(
            Kind::Pt,
            0,
            "a pickle that does not begin with torch's number",
            "what torch.save writes",
        ));
    }
    let at = machine.position;
    if !matches!(machine.run()?, Value::Int(LEGACY_PROTOCOL)) {
        return Err(source.bad(
            Kind::Pt,
            at,
            "another version",
            "version 1001 of torch's legacy container",
        ));
    }
    let at = machine.position;
    let system = machine.run()?;
    if !matches!(
        machine.arena.entry(system, "little_endian"),
        Some(Value::Bool(true))
    ) {
        return Err(source.bad(
            Kind::Pt,
            at,
            "a file of a big-endian machine",
            "a little-endian one",
        ));
    }
    let root = machine.run()?;
    let at = machine.position;
    let keys = machine.run()?;
    let position = machine.position;
    let arena = machine.into_arena();
    let Some(Object::List(keys)) = arena.object(keys) else {
        return Err(source.bad(Kind::Pt, at, "something else", "the list of storage keys"));
    };
    // The data of each storage follows, in the order of the keys; its element type stands with the tensors.
    let mut types: HashMap<&str, (u64, u64)> = HashMap::new();
    for object in &arena.objects {
        if let Object::Storage(storage) = object {
            types.insert(&storage.key, (storage.element.size, storage.elements));
        }
    }
    let mut storages: Storages = HashMap::new();
    let mut at = position;
    for &key in keys {
        let text = match key {
            Value::Int(int) => int.to_string(),
            other => arena.text(other).unwrap_or("?").to_string(),
        };
        let Some(&(size, expected)) = types.get(text.as_str()) else {
            return Err(source.bad(
                Kind::Pt,
                at,
                format!("a storage {text:?} of no tensor"),
                "one that a tensor uses",
            ));
        };
        source.check_inside(None, at, 8)?;
        let mut count = [0u8; 8];
        source.read_exact_at(at, &mut count, None)?;
        let count = u64::from_le_bytes(count);
        if count != expected {
            return Err(source.bad(
                Kind::Pt,
                at,
                format!("a storage of {count} elements"),
                format!("{expected}, as its tensors say"),
            ));
        }
        let Some(bytes) = count.checked_mul(size) else {
            return Err(source.bad(
                Kind::Pt,
                at,
                format!("a storage of {count} elements"),
                "fewer bytes than 2^64",
            ));
        };
        source.check_inside(None, at + 8, bytes)?;
        if storages.insert(text.clone(), (at + 8, bytes)).is_some() {
            return Err(source.bad(
                Kind::Pt,
                at,
                format!("the storage {text:?} twice"),
                "each key once",
            ));
        }
        at += 8 + bytes;
    }
    collect(source, &arena, root, alone, false, selects, &mut |key| {
        Ok(storages.get(key).copied())
    })
}

/// Names the tensors and finds their elements.
fn collect(
    source: &Source,
    arena: &Arena,
    root: Value,
    alone: &str,
    big_endian: bool,
    selects: &dyn Fn(&str) -> bool,
    place: &mut Place<'_>,
) -> Result<Found, GradientsError> {
    let mut found = Found {
        loss_scale: loss_scale(arena, root),
        step: step(arena, root),
        ..Found::default()
    };
    let limit = source
        .len
        .saturating_mul(ELEMENTS_PER_BYTE)
        .saturating_add(FREE_ELEMENTS);
    let mut shown = 0u64;
    let of_one_file = names_one_tensor(arena, root);
    walk::walk(source, arena, root, alone, &mut |name, object| {
        let name = match of_one_file {
            true if name == HIGH_PRECISION => without_step(alone),
            true => format!("{}.{name}", without_step(alone)),
            false => name,
        };
        let skip = |name, dtype: &str, why| Skipped {
            name,
            dtype: dtype.to_string(),
            why,
        };
        match object {
            Object::Tensor(tensor) => match tensor.element.read {
                Ok(dtype) => {
                    let encoding = Encoding { dtype, big_endian };
                    let array = array(source, name, tensor, encoding, place)?;
                    if selects(&array.meta.name) {
                        shown = shown.saturating_add(array.meta.elements);
                        if shown > limit {
                            let (path, tensor) = (source.path.clone(), array.meta.name);
                            return Err(GradientsError::ViewTooLarge {
                                path,
                                tensor,
                                found: shown,
                                limit,
                            });
                        }
                    }
                    found.tensors.push(array);
                }
                Err(SkippedBecause::Packed) if selects(&name) => {
                    let (path, found) = (source.path.clone(), tensor.element.name.to_string());
                    return Err(GradientsError::PackedTensor {
                        path,
                        tensor: name,
                        found,
                    });
                }
                Err(why) => found.skipped.push(skip(name, tensor.element.name, why)),
            },
            Object::Packed(by) if selects(&name) => {
                let path = source.path.clone();
                return Err(GradientsError::PackedTensor {
                    path,
                    tensor: name,
                    found: by.to_string(),
                });
            }
            Object::Packed(by) | Object::Foreign(by) => {
                found.skipped.push(skip(name, by, SkippedBecause::Packed))
            }
            _ => {}
        }
        Ok(())
    })?;
    Ok(found)
}

/// TransformerEngine's DumpTensors writes a file for each tensor and step, `<layer>_<tensor>_iter_000100.pt`, that holds
/// `high_precision` and perhaps `quantized`: there the file names the tensor.
const HIGH_PRECISION: &str = "high_precision";

fn names_one_tensor(arena: &Arena, root: Value) -> bool {
    let Some(Object::Dict(entries)) = arena.object(root) else {
        return false;
    };
    let known = [HIGH_PRECISION, "quantized", "internals"];
    arena.entry(root, HIGH_PRECISION).is_some()
        && entries
            .iter()
            .all(|(key, _)| arena.text(*key).is_some_and(|key| known.contains(&key)))
}

/// Checks a tensor against its storage, and the storage against the file.
fn array(
    source: &Source,
    name: String,
    tensor: &Tensor,
    encoding: Encoding,
    place: &mut Place<'_>,
) -> Result<Array, GradientsError> {
    let storage = &tensor.storage;
    let Some((at, bytes)) = place(&storage.key)? else {
        let key = super::error::shortened(&storage.key);
        return Err(GradientsError::MissingStorage {
            path: source.path.clone(),
            tensor: name,
            storage: key,
        });
    };
    match storage.elements.checked_mul(storage.element.size) {
        Some(expected) if expected == bytes => {}
        expected => {
            return Err(GradientsError::SizeMismatch {
                path: source.path.clone(),
                tensor: name,
                offset: at,
                found: bytes,
                expected: expected.unwrap_or(u64::MAX),
            });
        }
    }
    let Some(view) = View::new(&tensor.shape, &tensor.strides) else {
        let shape = tensor.shape.clone();
        return Err(GradientsError::ShapeOverflow {
            path: source.path.clone(),
            tensor: name,
            shape,
        });
    };
    let size = encoding.dtype.size_bytes();
    let (first, part_bytes) = match storage.part {
        Some((first, count)) => (first * storage.element.size, count * storage.element.size),
        None => (0, bytes),
    };
    let there = part_bytes / size;
    let reach = view.reach().unwrap_or(u64::MAX);
    // A view of nothing may stand anywhere.
    let needed = if reach == 0 {
        Some(0)
    } else {
        tensor.offset.checked_add(reach)
    };
    if needed.is_none_or(|needed| needed > there) {
        let expected = needed.unwrap_or(u64::MAX);
        return Err(GradientsError::ViewBeyondStorage {
            path: source.path.clone(),
            tensor: name,
            found: there,
            expected,
        });
    }
    let offset = if reach == 0 {
        at
    } else {
        at + first + tensor.offset * size
    };
    // View::new has checked that the product fits.
    let elements = if tensor.shape.contains(&0) {
        0
    } else {
        tensor.shape.iter().product()
    };
    let meta = TensorMeta {
        name,
        dtype: encoding.dtype,
        shape: tensor.shape.clone(),
        elements,
    };
    Ok(Array {
        meta,
        encoding,
        offset,
        view,
    })
}

/// A GradScaler's state beside the gradients, or a number of that name.
fn loss_scale(arena: &Arena, root: Value) -> Option<f64> {
    let number = |value| match value {
        Value::Float(scale) => Some(scale),
        Value::Int(scale) => Some(scale as f64),
        _ => None,
    };
    let direct = arena.entry(root, "loss_scale").and_then(number);
    let of_scaler = [
        "scaler",
        "grad_scaler",
        "amp_scaler",
        "native_amp_scaling_state",
    ]
    .iter()
    .filter_map(|name| arena.entry(root, name))
    .find_map(|scaler| arena.entry(scaler, "scale").and_then(number));
    direct
        .or(of_scaler)
        .filter(|scale| scale.is_finite() && *scale > 0.0)
}

fn step(arena: &Arena, root: Value) -> Option<u64> {
    ["step", "global_step", "iteration"]
        .iter()
        .find_map(|name| match arena.entry(root, name) {
            Some(Value::Int(step)) => u64::try_from(step).ok(),
            _ => None,
        })
}
