//! The few rules of the protobuf wire format that summaries need: fields one after another, no recursion of its own.
//!
//! A message is a run of (number, type, value). Unknown fields are passed over by their type; a length is held against
//! what is left of the enclosing message before anything is made of it. Groups, long out of use, are refused.
//! (Source: the encoding page of the Protocol Buffers documentation.)

/// The value of one field.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Value<'a> {
    /// An integer.
    Varint(u64),
    /// Eight bytes: a double.
    Fixed64(u64),
    /// Four bytes: a float.
    Fixed32(u32),
    /// Text, a message inside, or packed numbers.
    Bytes(Message<'a>),
}

/// Bytes and where they stand in the file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Message<'a> {
    bytes: &'a [u8],
    /// Offset of `bytes` in the file.
    offset: u64,
}

/// What is wrong, and where.
#[derive(Debug, PartialEq)]
pub(super) struct Wrong {
    pub offset: u64,
    pub found: String,
    pub expected: &'static str,
}

impl<'a> Message<'a> {
    pub fn new(bytes: &'a [u8], offset: u64) -> Message<'a> {
        Message { bytes, offset }
    }

    pub fn bytes(self) -> &'a [u8] {
        self.bytes
    }

    pub fn text(self) -> String {
        String::from_utf8_lossy(self.bytes).into_owned()
    }

    pub fn wrong(self, found: impl Into<String>, expected: &'static str) -> Wrong {
        Wrong {
            offset: self.offset,
            found: found.into(),
            expected,
        }
    }

    /// Calls `see` with each field.
    pub fn fields(
        self,
        see: &mut dyn FnMut(u64, Value<'a>) -> Result<(), Wrong>,
    ) -> Result<(), Wrong> {
        let mut rest = self;
        while !rest.bytes.is_empty() {
            let start = rest;
            let key = rest.varint()?;
            let (number, kind) = (key >> 3, key & 7);
            if number == 0 || number > 0x1FFF_FFFF {
                return Err(start.wrong(
                    format!("the field number {number}"),
                    "one from 1 to 536870911",
                ));
            }
            let value = match kind {
                0 => Value::Varint(rest.varint()?),
                1 => Value::Fixed64(u64::from_le_bytes(rest.fixed()?)),
                5 => Value::Fixed32(u32::from_le_bytes(rest.fixed()?)),
                2 => {
                    let length = rest.varint()?;
                    Value::Bytes(rest.take(length)?)
                }
                other => {
                    return Err(start.wrong(
                        format!("the wire type {other}"),
                        "a number or a length (0, 1, 2 or 5)",
                    ));
                }
            };
            see(number, value)?;
        }
        Ok(())
    }

    fn take(&mut self, length: u64) -> Result<Message<'a>, Wrong> {
        let Some((head, tail)) = usize::try_from(length)
            .ok()
            .and_then(|length| self.bytes.split_at_checked(length))
        else {
            return Err(self.wrong(
                format!("a length of {length}"),
                "at most what is left of its message",
            ));
        };
        let taken = Message::new(head, self.offset);
        *self = Message::new(tail, self.offset + length);
        Ok(taken)
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], Wrong> {
        let taken = self.take(N as u64)?;
        Ok(taken.bytes.try_into().expect("N bytes were taken"))
    }

    fn varint(&mut self) -> Result<u64, Wrong> {
        let mut value = 0u64;
        for (i, &byte) in self.bytes.iter().enumerate().take(10) {
            if i == 9 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7F) << (7 * i);
            if byte < 0x80 {
                *self = Message::new(&self.bytes[i + 1..], self.offset + i as u64 + 1);
                return Ok(value);
            }
        }
        let found = if self.bytes.len() < 10 {
            "an integer that its message cuts off"
        } else {
            "an integer of more than 64 bits"
        };
        Err(self.wrong(found, "an integer of at most ten bytes"))
    }

    /// Packed doubles, appended to `all`.
    pub fn doubles(self, all: &mut Vec<f64>) -> Result<(), Wrong> {
        let (chunks, rest) = self.bytes.as_chunks::<8>();
        if !rest.is_empty() {
            return Err(self.wrong(
                format!("{} bytes of packed doubles", self.bytes.len()),
                "a multiple of 8",
            ));
        }
        all.extend(chunks.iter().map(|chunk| f64::from_le_bytes(*chunk)));
        Ok(())
    }

    /// Packed floats, appended to `all`.
    pub fn floats(self, all: &mut Vec<f64>) -> Result<(), Wrong> {
        let (chunks, rest) = self.bytes.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(self.wrong(
                format!("{} bytes of packed floats", self.bytes.len()),
                "a multiple of 4",
            ));
        }
        all.extend(
            chunks
                .iter()
                .map(|chunk| f64::from(f32::from_le_bytes(*chunk))),
        );
        Ok(())
    }
}
