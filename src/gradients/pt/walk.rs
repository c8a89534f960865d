//! From what a pickle built to named tensors.
//!
//! Names are the keys and indices on the way, joined with dots. Containers are entered once: what is shared bears the
//! first of its names only, so a list that holds itself, or one that is shared 2^60 times, costs nothing. A tensor
//! in two entered containers has two names and counts for both, as tied weights do in a state_dict.

use super::pickle::{Arena, Object, Value};
use crate::gradients::GradientsError;
use crate::gradients::source::Source;

/// All names together.
const MAX_NAME_BYTES: u64 = 16 << 20;

/// More than any checkpoint has.
const MAX_TENSORS: u64 = 1 << 18;

/// Where a walk stands: the way there is a chain of parents.
struct Step {
    parent: Option<usize>,
    key: Key,
    /// Length of the name up to here.
    length: u64,
}

#[derive(Clone, Copy)]
enum Key {
    Value(Value),
    Index(usize),
}

/// Calls `found` for each tensor below `root` with its name; a lone one is called `alone`.
pub(super) fn walk(
    source: &Source,
    arena: &Arena,
    root: Value,
    alone: &str,
    found: &mut dyn FnMut(String, &Object) -> Result<(), GradientsError>,
) -> Result<(), GradientsError> {
    let Value::Object(root) = root else {
        return Ok(());
    };
    let mut steps: Vec<Step> = Vec::new();
    let mut entered = vec![false; arena.objects.len()];
    let (mut name_bytes, mut tensors) = (0u64, 0u64);
    // (object, next item, its step); depth first and in order, with a stack of our own.
    let mut stack: Vec<(u32, usize, Option<usize>)> = Vec::new();
    let mut next = Some((root, None));
    loop {
        if let Some((object, step)) = next.take() {
            match &arena.objects[object as usize] {
                Object::List(_) | Object::Tuple(_) | Object::Dict(_) => {
                    if !std::mem::replace(&mut entered[object as usize], true) {
                        stack.push((object, 0, step));
                    }
                }
                tensor @ (Object::Tensor(_) | Object::Packed(_) | Object::Foreign(_)) => {
                    let length = step.map_or(alone.len() as u64, |step: usize| steps[step].length);
                    name_bytes = name_bytes.saturating_add(length);
                    tensors += 1;
                    let over = [
                        ("bytes of tensor names", name_bytes, MAX_NAME_BYTES),
                        ("tensors", tensors, MAX_TENSORS),
                    ];
                    if let Some(&(what, _, limit)) = over.iter().find(|(_, n, limit)| n > limit) {
                        let path = source.path.clone();
                        return Err(GradientsError::PickleBudget {
                            path,
                            offset: 0,
                            what,
                            limit,
                        });
                    }
                    found(name(arena, &steps, step, alone), tensor)?;
                }
                Object::Storage(_) | Object::Inert => {}
            }
        }
        let Some((object, at, step)) = stack.last_mut() else {
            return Ok(());
        };
        let item = match &arena.objects[*object as usize] {
            Object::List(items) | Object::Tuple(items) => {
                items.get(*at).map(|&value| (Key::Index(*at), value))
            }
            Object::Dict(entries) => entries
                .get(*at)
                .map(|&(key, value)| (Key::Value(key), value)),
            _ => None,
        };
        *at += 1;
        let parent = *step;
        match item {
            None => {
                stack.pop();
            }
            Some((key, Value::Object(child))) if matters(arena, child, &entered) => {
                let before = parent.map_or(0, |step| steps[step].length + 1);
                steps.push(Step {
                    parent,
                    key,
                    length: before.saturating_add(text(arena, key).len() as u64),
                });
                next = Some((child, Some(steps.len() - 1)));
            }
            Some(_) => {}
        }
    }
}

/// Whether anything can come of looking at it.
fn matters(arena: &Arena, object: u32, entered: &[bool]) -> bool {
    match &arena.objects[object as usize] {
        Object::List(items) | Object::Tuple(items) => {
            !items.is_empty() && !entered[object as usize]
        }
        Object::Dict(entries) => !entries.is_empty() && !entered[object as usize],
        Object::Tensor(_) | Object::Packed(_) | Object::Foreign(_) => true,
        Object::Storage(_) | Object::Inert => false,
    }
}

fn name(arena: &Arena, steps: &[Step], step: Option<usize>, alone: &str) -> String {
    let Some(mut step) = step else {
        return alone.to_string();
    };
    let mut keys = vec![steps[step].key];
    while let Some(parent) = steps[step].parent {
        keys.push(steps[parent].key);
        step = parent;
    }
    let keys: Vec<_> = keys.iter().rev().map(|&key| text(arena, key)).collect();
    keys.join(".")
}

fn text(arena: &Arena, key: Key) -> std::borrow::Cow<'_, str> {
    match key {
        Key::Index(index) => index.to_string().into(),
        Key::Value(value @ Value::Text(_)) => arena.text(value).unwrap_or_default().into(),
        Key::Value(Value::Int(int)) => int.to_string().into(),
        Key::Value(Value::Bool(true)) => "True".into(),
        Key::Value(Value::Bool(false)) => "False".into(),
        Key::Value(Value::None) => "None".into(),
        Key::Value(Value::Float(float)) => float.to_string().into(),
        Key::Value(Value::Long(long)) => arena
            .longs
            .get(long as usize)
            .copied()
            .unwrap_or_default()
            .to_string()
            .into(),
        Key::Value(Value::Opaque | Value::Global(_) | Value::Object(_)) => "?".into(),
    }
}
