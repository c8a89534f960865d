//! A reader of the pickles that `torch.save` writes. It builds values and calls nothing.
//!
//! A pickle is a program for a stack machine. This machine knows the instructions that torch writes and no other; names
//! come from the table in [`globals`](super::globals). Objects live in an arena and refer to one another by index, so
//! sharing costs nothing, nothing recurses, and dropping is flat. Every instruction costs budget, and so does every
//! element that an instruction touches.

use std::collections::HashMap;

use super::globals::{Element, Global, TRANSFORMER_ENGINE, lookup};
use crate::gradients::error::shortened;
use crate::gradients::source::Source;
use crate::gradients::{GradientsError, Kind};

/// About 130,000 tensors' worth; a hostile file gets no further than some 300 MB of values.
const MAX_OPCODES: u64 = 4_000_000;
/// All text of a pickle together.
const MAX_TEXT_BYTES: u64 = 32 << 20;
/// One name in a GLOBAL.
const MAX_GLOBAL_BYTES: usize = 512;
/// torch's own limit.
const MAX_DIMS: usize = 64;

/// A value on the stack or in a container, 24 bytes. Copying one never copies what it refers to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// An integer of more than 64 bits, by index.
    Long(u32),
    Float(f64),
    /// By index.
    Text(u32),
    /// Bytes, and anything else that can't matter.
    Opaque,
    Global(Global),
    Object(u32),
}

/// What lies in the arena.
#[derive(Debug)]
pub(super) enum Object {
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    Storage(Box<Storage>),
    Tensor(Box<Tensor>),
    /// A kind of tensor that is not read, by what would rebuild it.
    Packed(&'static str),
    /// Another library's object, such as a NumPy array.
    Foreign(&'static str),
    Inert,
}

/// A storage as a tensor refers to it.
#[derive(Clone, Debug)]
pub(super) struct Storage {
    pub key: String,
    pub element: &'static Element,
    /// Elements of the whole storage.
    pub elements: u64,
    /// The part of it that is meant: first element and count (old files only).
    pub part: Option<(u64, u64)>,
}

/// A tensor: a view of a storage.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub storage: Storage,
    pub element: &'static Element,
    pub offset: u64,
    pub shape: Vec<u64>,
    pub strides: Vec<u64>,
}

/// Everything the pickles of one file built.
#[derive(Debug, Default)]
pub(super) struct Arena {
    pub objects: Vec<Object>,
    /// All text in one piece, and where each begins and ends: millions of tiny strings would cost 50 bytes each.
    text: String,
    texts: Vec<(u32, u32)>,
    pub longs: Vec<i128>,
}

impl Arena {
    pub fn object(&self, value: Value) -> Option<&Object> {
        match value {
            Value::Object(index) => self.objects.get(index as usize),
            _ => None,
        }
    }

    pub fn text(&self, value: Value) -> Option<&str> {
        match value {
            Value::Text(index) => {
                let &(from, to) = self.texts.get(index as usize)?;
                self.text.get(from as usize..to as usize)
            }
            _ => None,
        }
    }

    /// The entry of a dict, the last of equal keys.
    pub fn entry(&self, dict: Value, key: &str) -> Option<Value> {
        let Object::Dict(entries) = self.object(dict)? else {
            return None;
        };
        entries
            .iter()
            .rev()
            .find(|(k, _)| self.text(*k) == Some(key))
            .map(|(_, v)| *v)
    }
}

/// Reads pickles one after another from a part of a file.
pub(super) struct Machine<'a> {
    source: &'a Source,
    pub arena: Arena,
    /// Where the next byte is, and where the part ends.
    pub position: u64,
    end: u64,
    buffer: Vec<u8>,
    buffer_at: u64,
    opcodes: u64,
    text_bytes: u64,
    /// Where the current instruction stands.
    at: u64,
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: HashMap<u32, Value>,
}

impl<'a> Machine<'a> {
    pub fn new(source: &'a Source, position: u64, end: u64) -> Machine<'a> {
        Machine {
            source,
            arena: Arena::default(),
            position,
            end,
            buffer: Vec::new(),
            buffer_at: 0,
            opcodes: 0,
            text_bytes: 0,
            at: position,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        }
    }

    /// What was built; stack and memo are given back.
    pub fn into_arena(self) -> Arena {
        self.arena
    }

    fn bad(&self, found: impl Into<String>, expected: &'static str) -> GradientsError {
        self.source.bad(Kind::Pt, self.at, found, expected)
    }

    fn charge(&mut self, steps: u64) -> Result<(), GradientsError> {
        self.opcodes = self.opcodes.saturating_add(steps);
        if self.opcodes <= MAX_OPCODES {
            return Ok(());
        }
        Err(GradientsError::PickleBudget {
            path: self.source.path.clone(),
            offset: self.at,
            what: "pickle instructions",
            limit: MAX_OPCODES,
        })
    }

    // Bytes.

    fn byte(&mut self) -> Result<u8, GradientsError> {
        let [byte] = self.bytes::<1>()?;
        Ok(byte)
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], GradientsError> {
        let mut bytes = [0u8; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, into: &mut [u8]) -> Result<(), GradientsError> {
        let wanted = into.len() as u64;
        let there = self.end.saturating_sub(self.position);
        if there < wanted {
            return Err(GradientsError::Truncated {
                path: self.source.path.clone(),
                tensor: None,
                offset: self.position,
                found: there,
                expected: wanted,
            });
        }
        const BLOCK: u64 = 64 * 1024;
        if wanted > BLOCK {
            self.source.read_exact_at(self.position, into, None)?;
        } else {
            let inside = self.position >= self.buffer_at
                && self.position + wanted <= self.buffer_at + self.buffer.len() as u64;
            if !inside {
                self.buffer.resize(there.min(BLOCK) as usize, 0);
                self.buffer_at = self.position;
                self.source
                    .read_exact_at(self.position, &mut self.buffer, None)?;
            }
            let from = (self.position - self.buffer_at) as usize;
            into.copy_from_slice(&self.buffer[from..from + into.len()]);
        }
        self.position += wanted;
        Ok(())
    }

    /// Text or bytes of a stated length: it must be there, and in the budget, before it is allocated.
    fn counted(&mut self, length: u64) -> Result<Vec<u8>, GradientsError> {
        self.text_bytes = self.text_bytes.saturating_add(length);
        if self.text_bytes > MAX_TEXT_BYTES {
            return Err(GradientsError::PickleBudget {
                path: self.source.path.clone(),
                offset: self.at,
                what: "bytes of text",
                limit: MAX_TEXT_BYTES,
            });
        }
        let there = self.end.saturating_sub(self.position);
        if there < length {
            return Err(GradientsError::Truncated {
                path: self.source.path.clone(),
                tensor: None,
                offset: self.position,
                found: there,
                expected: length,
            });
        }
        let mut bytes = vec![0u8; length as usize];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// Passes over bytes that can't matter.
    fn pass(&mut self, length: u64) -> Result<(), GradientsError> {
        let there = self.end.saturating_sub(self.position);
        if there < length {
            return Err(GradientsError::Truncated {
                path: self.source.path.clone(),
                tensor: None,
                offset: self.position,
                found: there,
                expected: length,
            });
        }
        self.position += length;
        Ok(())
    }

    fn line(&mut self) -> Result<String, GradientsError> {
        let mut line = Vec::new();
        loop {
            match self.byte()? {
                b'\n' => break,
                _ if line.len() == MAX_GLOBAL_BYTES => {
                    return Err(self.bad("a line without end", "a short one"));
                }
                byte => line.push(byte),
            }
        }
        String::from_utf8(line).map_err(|_| self.bad("a line that is not text", "UTF-8"))
    }

    // The stack.

    fn push(&mut self, value: Value) {
        self.stack.push(value);
    }

    fn push_object(&mut self, object: Object) {
        self.arena.objects.push(object);
        // At most one object an instruction, so the budget keeps this far below 2^32.
        self.stack
            .push(Value::Object((self.arena.objects.len() - 1) as u32));
    }

    fn push_text(&mut self, bytes: Vec<u8>) {
        match String::from_utf8(bytes) {
            Ok(text) => {
                // The budget of text keeps this far below 2^32.
                let from = self.arena.text.len() as u32;
                self.arena.text.push_str(&text);
                self.arena.texts.push((from, self.arena.text.len() as u32));
                self.stack
                    .push(Value::Text((self.arena.texts.len() - 1) as u32));
            }
            Err(_) => self.stack.push(Value::Opaque),
        }
    }

    /// Where the values above the last mark begin.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Value, GradientsError> {
        if self.stack.len() <= self.floor() {
            return Err(self.bad("an empty stack", "a value on it"));
        }
        self.stack
            .pop()
            .ok_or_else(|| self.bad("an empty stack", "a value on it"))
    }

    fn top(&self) -> Result<Value, GradientsError> {
        match self.stack.last() {
            Some(&value) if self.stack.len() > self.floor() => Ok(value),
            _ => Err(self.bad("an empty stack", "a value on it")),
        }
    }

    /// All values above the last mark, and the mark.
    fn pop_mark(&mut self) -> Result<Vec<Value>, GradientsError> {
        let Some(mark) = self.marks.pop() else {
            return Err(self.bad("no mark", "one on the stack"));
        };
        Ok(self.stack.split_off(mark.min(self.stack.len())))
    }

    fn pop_many(&mut self, n: usize) -> Result<Vec<Value>, GradientsError> {
        if self.stack.len() < self.floor() + n {
            return Err(self.bad("too short a stack", "the values of a tuple"));
        }
        Ok(self.stack.split_off(self.stack.len() - n))
    }

    fn tuple(&self, value: Value) -> Option<&[Value]> {
        match self.arena.object(value) {
            Some(Object::Tuple(items) | Object::List(items)) => Some(items),
            _ => None,
        }
    }

    // The machine.

    /// Runs one pickle to its STOP and gives what it built. The memo does not outlive it; budgets do.
    pub fn run(&mut self) -> Result<Value, GradientsError> {
        self.stack.clear();
        self.marks.clear();
        self.memo.clear();
        loop {
            self.at = self.position;
            let opcode = self.byte()?;
            self.charge(1)?;
            match opcode {
                b'.' => {
                    let value = self.pop()?;
                    if !self.stack.is_empty() || !self.marks.is_empty() {
                        return Err(self.bad("values left on the stack", "just one at the end"));
                    }
                    return Ok(value);
                }
                0x80 => {
                    let version = self.byte()?;
                    if version > 5 {
                        return Err(self.bad(format!("pickle protocol {version}"), "1 to 5"));
                    }
                }
                0x95 => {
                    // FRAME: only a hint for readers that buffer.
                    self.bytes::<8>()?;
                }
                b'(' => self.marks.push(self.stack.len()),
                b'N' => self.push(Value::None),
                0x88 => self.push(Value::Bool(true)),
                0x89 => self.push(Value::Bool(false)),
                b'J' => {
                    let int = i32::from_le_bytes(self.bytes()?);
                    self.push(Value::Int(int.into()));
                }
                b'K' => {
                    let int = self.byte()?;
                    self.push(Value::Int(int.into()));
                }
                b'M' => {
                    let int = u16::from_le_bytes(self.bytes()?);
                    self.push(Value::Int(int.into()));
                }
                0x8a => {
                    let length = self.byte()?;
                    self.long(length.into())?;
                }
                0x8b => {
                    let length = u32::from_le_bytes(self.bytes()?);
                    self.long(length.into())?;
                }
                b'I' | b'L' => {
                    let line = self.line()?;
                    let value = match line.as_str() {
                        "00" => Value::Bool(false),
                        "01" => Value::Bool(true),
                        text => match text.strip_suffix('L').unwrap_or(text).parse::<i64>() {
                            Ok(int) => Value::Int(int),
                            Err(_) => {
                                return Err(
                                    self.bad(format!("{:?}", shortened(text)), "an integer")
                                );
                            }
                        },
                    };
                    self.push(value);
                }
                b'F' => {
                    let line = self.line()?;
                    let Ok(float) = line.parse::<f64>() else {
                        return Err(self.bad(format!("{:?}", shortened(&line)), "a number"));
                    };
                    self.push(Value::Float(float));
                }
                b'G' => {
                    let float = f64::from_be_bytes(self.bytes()?);
                    self.push(Value::Float(float));
                }
                b'U' | 0x8c => {
                    let length = self.byte()?;
                    let text = self.counted(length.into())?;
                    self.push_text(text);
                }
                b'T' | b'X' => {
                    let length = u32::from_le_bytes(self.bytes()?);
                    let text = self.counted(length.into())?;
                    self.push_text(text);
                }
                0x8d => {
                    let length = u64::from_le_bytes(self.bytes()?);
                    let text = self.counted(length)?;
                    self.push_text(text);
                }
                b'C' => {
                    let length = self.byte()?;
                    self.pass(length.into())?;
                    self.push(Value::Opaque);
                }
                b'B' => {
                    let length = u32::from_le_bytes(self.bytes()?);
                    self.pass(length.into())?;
                    self.push(Value::Opaque);
                }
                0x8e | 0x96 => {
                    let length = u64::from_le_bytes(self.bytes()?);
                    self.pass(length)?;
                    self.push(Value::Opaque);
                }
                b')' => self.push_object(Object::Tuple(Vec::new())),
                b't' => {
                    let items = self.pop_mark()?;
                    self.push_object(Object::Tuple(items));
                }
                0x85..=0x87 => {
                    let items = self.pop_many(usize::from(opcode - 0x84))?;
                    self.push_object(Object::Tuple(items));
                }
                b']' | 0x8f => self.push_object(Object::List(Vec::new())),
                b'l' | 0x91 => {
                    let items = self.pop_mark()?;
                    self.push_object(Object::List(items));
                }
                b'}' => self.push_object(Object::Dict(Vec::new())),
                b'd' => {
                    let items = self.pop_mark()?;
                    let entries = self.pairs(&items)?;
                    self.push_object(Object::Dict(entries));
                }
                b'a' => {
                    let item = self.pop()?;
                    self.extend(&[item])?;
                }
                b'e' | 0x90 => {
                    let items = self.pop_mark()?;
                    self.extend(&items)?;
                }
                b's' => {
                    let items = self.pop_many(2)?;
                    self.set(&items)?;
                }
                b'u' => {
                    let items = self.pop_mark()?;
                    self.set(&items)?;
                }
                b'q' => {
                    let key = self.byte()?;
                    let value = self.top()?;
                    self.memo.insert(key.into(), value);
                }
                b'r' => {
                    let key = u32::from_le_bytes(self.bytes()?);
                    let value = self.top()?;
                    self.memo.insert(key, value);
                }
                0x94 => {
                    let value = self.top()?;
                    self.memo.insert(self.memo.len() as u32, value);
                }
                b'h' => {
                    let key = self.byte()?;
                    self.recall(key.into())?;
                }
                b'j' => {
                    let key = u32::from_le_bytes(self.bytes()?);
                    self.recall(key)?;
                }
                b'c' => {
                    let module = self.line()?;
                    let name = self.line()?;
                    self.global(&module, &name)?;
                }
                0x93 => {
                    let name = self.pop()?;
                    let module = self.pop()?;
                    let text = |value| self.arena.text(value).map(str::to_string);
                    match (text(module), text(name)) {
                        (Some(module), Some(name)) => self.global(&module, &name)?,
                        _ => {
                            return Err(
                                self.bad("a global that is not named by text", "module and name")
                            );
                        }
                    }
                }
                b'R' => {
                    let arguments = self.pop()?;
                    let callee = self.pop()?;
                    let value = self.reduce(callee, arguments)?;
                    self.push(value);
                }
                0x81 => {
                    let arguments = self.pop()?;
                    let class = self.pop()?;
                    match class {
                        Value::Global(
                            Global::Dict | Global::Same | Global::Inert | Global::Foreign(_),
                        ) => {
                            let value = self.reduce(class, arguments)?;
                            self.push(value);
                        }
                        _ => return Err(self.bad("a new object of another type", "a dict")),
                    }
                }
                b'b' => {
                    // The attributes of an OrderedDict (a state_dict's versions), of a NumPy array, of a tensor:
                    // none holds a gradient. What can't have attributes shows a pickle that is not torch's.
                    self.pop()?;
                    match self.arena.object(self.top()?) {
                        Some(Object::Storage(_) | Object::Tuple(_) | Object::List(_)) | None => {
                            return Err(self.bad(
                                "attributes of something that has none",
                                "those of a dict or tensor",
                            ));
                        }
                        Some(_) => {}
                    }
                }
                b'Q' => {
                    let id = self.pop()?;
                    let storage = self.storage(id)?;
                    self.push_object(Object::Storage(Box::new(storage)));
                }
                opcode => {
                    let path = self.source.path.clone();
                    return Err(GradientsError::PickleOpcode {
                        path,
                        offset: self.at,
                        opcode,
                    });
                }
            }
        }
    }

    fn long(&mut self, length: u64) -> Result<(), GradientsError> {
        if length > 16 {
            return Err(self.bad(format!("an integer of {length} bytes"), "at most 16"));
        }
        let bytes = self.counted(length)?;
        let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
        let mut wide = [if negative { 0xff } else { 0 }; 16];
        wide[..bytes.len()].copy_from_slice(&bytes);
        let int = i128::from_le_bytes(wide);
        match i64::try_from(int) {
            Ok(int) => self.push(Value::Int(int)),
            Err(_) => {
                self.arena.longs.push(int);
                self.push(Value::Long((self.arena.longs.len() - 1) as u32));
            }
        }
        Ok(())
    }

    fn recall(&mut self, key: u32) -> Result<(), GradientsError> {
        match self.memo.get(&key) {
            Some(&value) => {
                self.push(value);
                Ok(())
            }
            None => Err(self.bad(format!("memo {key}, which was never put"), "one that was")),
        }
    }

    fn global(&mut self, module: &str, name: &str) -> Result<(), GradientsError> {
        match lookup(module, name) {
            Some(global) => {
                self.push(Value::Global(global));
                Ok(())
            }
            None => self.forbidden(module, name),
        }
    }

    fn forbidden<T>(&self, module: &str, name: &str) -> Result<T, GradientsError> {
        Err(GradientsError::ForbiddenGlobal {
            path: self.source.path.clone(),
            offset: self.at,
            global: shortened(&format!("{module}.{name}")),
        })
    }

    /// What a TransformerEngine class or object is called; no other library's has methods here.
    fn foreign(&self, value: Value) -> Option<&'static str> {
        let name = match (value, self.arena.object(value)) {
            (Value::Global(Global::Foreign(name)), _) => name,
            (_, Some(&Object::Foreign(name))) => name,
            _ => return None,
        };
        (name == TRANSFORMER_ENGINE).then_some(TRANSFORMER_ENGINE)
    }

    fn pairs(&self, items: &[Value]) -> Result<Vec<(Value, Value)>, GradientsError> {
        if !items.len().is_multiple_of(2) {
            return Err(self.bad("a key without a value", "pairs"));
        }
        Ok(items
            .chunks_exact(2)
            .map(|pair| (pair[0], pair[1]))
            .collect())
    }

    fn extend(&mut self, items: &[Value]) -> Result<(), GradientsError> {
        if let Value::Object(index) = self.top()? {
            match self.arena.objects.get_mut(index as usize) {
                Some(Object::List(list)) => {
                    list.extend_from_slice(items);
                    return Ok(());
                }
                Some(Object::Inert | Object::Foreign(_)) => return Ok(()),
                _ => {}
            }
        }
        Err(self.bad("items for something that is no list", "a list"))
    }

    fn set(&mut self, items: &[Value]) -> Result<(), GradientsError> {
        let entries = self.pairs(items)?;
        if let Value::Object(index) = self.top()? {
            match self.arena.objects.get_mut(index as usize) {
                Some(Object::Dict(dict)) => {
                    dict.extend(entries);
                    return Ok(());
                }
                Some(Object::Inert | Object::Foreign(_)) => return Ok(()),
                _ => {}
            }
        }
        Err(self.bad("entries for something that is no dict", "a dict"))
    }

    /// What calling `callee` would give, for the few that may be called.
    fn reduce(&mut self, callee: Value, arguments: Value) -> Result<Value, GradientsError> {
        if !matches!(callee, Value::Global(_)) && self.foreign(callee).is_some() {
            // A method of a foreign class gives a foreign object.
            self.arena.objects.push(Object::Foreign(TRANSFORMER_ENGINE));
            return Ok(Value::Object((self.arena.objects.len() - 1) as u32));
        }
        let Value::Global(global) = callee else {
            return Err(self.bad(
                "a call of something that is not a known name",
                "a name from torch's list",
            ));
        };
        let Some(Object::Tuple(items)) = self.arena.object(arguments) else {
            return Err(self.bad("arguments that are no tuple", "a tuple"));
        };
        let first = items.first().copied();
        let count = items.len();
        let object = match global {
            Global::Dict => match first.map(|value| (value, self.arena.object(value))) {
                // A copy of a dict would be the same entries: it is that dict.
                Some((value, Some(Object::Dict(_)))) => return Ok(value),
                // Python 2 wrote an OrderedDict as a list of pairs.
                Some((_, Some(Object::List(items) | Object::Tuple(items)))) => {
                    let steps = items.len() as u64;
                    let mut entries = Vec::new();
                    for &item in items {
                        match self.tuple(item) {
                            Some(&[key, value]) => entries.push((key, value)),
                            _ => return Err(self.bad("a dict made of something else", "pairs")),
                        }
                    }
                    self.charge(steps)?;
                    Object::Dict(entries)
                }
                _ => Object::Dict(Vec::new()),
            },
            Global::Same => match first {
                Some(value @ Value::Object(_)) => return Ok(value),
                Some(_) => {
                    return Err(self.bad("a container made of something else", "a list or tuple"));
                }
                None => Object::List(Vec::new()),
            },
            Global::Tensor | Global::TensorOfType => Object::Tensor(Box::new(
                self.tensor(arguments, global == Global::TensorOfType)?,
            )),
            Global::Parameter => match first {
                Some(value)
                    if matches!(
                        self.arena.object(value),
                        Some(Object::Tensor(_) | Object::Packed(_))
                    ) =>
                {
                    return Ok(value);
                }
                _ => return Err(self.bad("a parameter made of something else", "a tensor")),
            },
            Global::FromType => match items[..] {
                // One level only: what is rebuilt is a tensor, not another of these.
                [inner @ Value::Global(inner_global), _, inner_arguments, ..]
                    if inner_global != Global::FromType =>
                {
                    return self.reduce(inner, inner_arguments);
                }
                _ => {
                    return Err(self.bad(
                        format!("{count} arguments of another kind"),
                        "a function, a type and arguments",
                    ));
                }
            },
            Global::Packed(name) => Object::Packed(name),
            Global::Foreign(name) => Object::Foreign(name),
            Global::GetAttr => match items.first().map(|&owner| self.foreign(owner)) {
                Some(Some(name)) if count == 2 => Object::Foreign(name),
                _ => return self.forbidden("builtins", "getattr"),
            },
            Global::Inert => Object::Inert,
            Global::Storage(_) | Global::Dtype(_) => {
                return Err(self.bad("a call of a type", "a call of what rebuilds a tensor"));
            }
        };
        self.arena.objects.push(object);
        Ok(Value::Object((self.arena.objects.len() - 1) as u32))
    }

    fn count(&self, value: Option<&Value>, what: &'static str) -> Result<u64, GradientsError> {
        match value {
            Some(&Value::Int(int)) => {
                u64::try_from(int).map_err(|_| self.bad(int.to_string(), what))
            }
            _ => Err(self.bad("something else", what)),
        }
    }

    fn sizes(&self, value: Option<&Value>, what: &'static str) -> Result<Vec<u64>, GradientsError> {
        match value.and_then(|&value| self.tuple(value)) {
            Some(items) if items.len() <= MAX_DIMS => items
                .iter()
                .map(|item| self.count(Some(item), what))
                .collect(),
            Some(items) => Err(self.bad(format!("{} dimensions", items.len()), "at most 64")),
            None => Err(self.bad("something else", what)),
        }
    }

    /// `storage, offset, size, stride, requires_grad, hooks[, dtype]`.
    fn tensor(&mut self, arguments: Value, has_type: bool) -> Result<Tensor, GradientsError> {
        let items = self.tuple(arguments).unwrap_or_default();
        let storage = match items.first().and_then(|&value| self.arena.object(value)) {
            Some(Object::Storage(storage)) => Storage::clone(storage),
            _ => return Err(self.bad("a tensor without a storage", "a storage")),
        };
        let offset = self.count(items.get(1), "an offset of at least 0")?;
        let shape = self.sizes(items.get(2), "a shape")?;
        let strides = self.sizes(items.get(3), "strides of at least 0")?;
        if shape.len() != strides.len() {
            return Err(self.bad(
                format!("{} strides", strides.len()),
                "one for each dimension",
            ));
        }
        let element = match (has_type, items.get(6)) {
            (true, Some(&Value::Global(Global::Dtype(element)))) => element,
            (true, _) => return Err(self.bad("no element type", "one")),
            (false, _) if storage.element.untyped => {
                return Err(self.bad("bytes without a type", "a typed storage"));
            }
            (false, _) => storage.element,
        };
        // Shapes and keys are copied here, beyond one value an instruction.
        self.charge(shape.len() as u64)?;
        self.counted_text(storage.key.len())?;
        Ok(Tensor {
            storage,
            element,
            offset,
            shape,
            strides,
        })
    }

    fn counted_text(&mut self, length: usize) -> Result<(), GradientsError> {
        self.text_bytes = self.text_bytes.saturating_add(length as u64);
        if self.text_bytes <= MAX_TEXT_BYTES {
            return Ok(());
        }
        Err(GradientsError::PickleBudget {
            path: self.source.path.clone(),
            offset: self.at,
            what: "bytes of text",
            limit: MAX_TEXT_BYTES,
        })
    }

    /// `'storage', type, key, location, elements[, view]`.
    fn storage(&mut self, id: Value) -> Result<Storage, GradientsError> {
        let items = self.tuple(id).unwrap_or_default();
        if items.first().and_then(|&value| self.arena.text(value)) != Some("storage") {
            return Err(self.bad("a reference to something that is no storage", "a storage"));
        }
        let Some(&Value::Global(Global::Storage(element))) = items.get(1) else {
            return Err(self.bad("a storage of another type", "a storage type"));
        };
        let key = match items.get(2) {
            Some(Value::Int(key)) => key.to_string(),
            Some(&value) => match self.arena.text(value) {
                Some(key) => key.to_string(),
                None => return Err(self.bad("a storage whose key is not text", "text")),
            },
            None => return Err(self.bad("a storage without a key", "a key")),
        };
        let elements = self.count(items.get(4), "a number of elements")?;
        let part = match items.get(5) {
            None | Some(Value::None) => None,
            Some(&view) => {
                let view = self.tuple(view).unwrap_or_default();
                let offset = self.count(view.get(1), "the offset of a part")?;
                let size = self.count(view.get(2), "the size of a part")?;
                if offset.checked_add(size).is_none_or(|end| end > elements) {
                    return Err(self.bad(
                        format!("{size} elements at {offset}"),
                        "a part of its storage",
                    ));
                }
                Some((offset, size))
            }
        };
        self.counted_text(key.len())?;
        Ok(Storage {
            key,
            element,
            elements,
            part,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_objects_stay_as_small_as_the_budget_counts_on() {
        assert!(size_of::<Value>() <= 24 && size_of::<Object>() <= 32);
    }
}
