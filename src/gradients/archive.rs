//! The zip container under `.npz` and `.pt`: its directory, checked, and members read in order.
//!
//! The directory is read here and not by the `zip` crate because that one lets the last of two equal names win, shares
//! one seek position, and hides where members lie; a dump needs to see doubles, to be read by several threads at
//! once, and to refuse members that share bytes (the trick of a zip bomb).
//!
//! ```text
//! local header | data | local header | data | … | directory | [zip64 end] | end of directory
//! ```

use std::collections::HashSet;
use std::io::{self, BufReader, Read};

use flate2::Crc;
use flate2::bufread::DeflateDecoder;

use super::error::{quoted, shortened};
use super::source::{BLOCK_BYTES, Bytes, Source};
use super::{GradientsError, Kind};

/// The directory's size at most; at 46 bytes and more an entry, over a million members.
const MAX_DIRECTORY_BYTES: u64 = 64 << 20;
/// No deflate stream grows more than this: a stored length beyond it is a lie.
const MAX_DEFLATE_RATIO: u64 = 1032;
const LOCAL_HEADER_BYTES: u64 = 30;
const DIRECTORY_ENTRY_BYTES: usize = 46;
const END_BYTES: u64 = 22;

/// How a member is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    Stored,
    Deflated,
    Other(u16),
}

/// A member as the directory has it.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub name: String,
    pub method: Method,
    pub encrypted: bool,
    pub crc: u32,
    /// Bytes in the archive, and unpacked.
    pub packed: u64,
    pub size: u64,
    /// Where the local header begins, and where the next thing does.
    header: u64,
    next: u64,
}

/// Reads the directory. `kind`: what the archive is, for messages.
pub(crate) fn directory(source: &Source, kind: Kind) -> Result<Vec<Member>, GradientsError> {
    let (start, size, count, end) = end_of_directory(source, kind)?;
    if size > MAX_DIRECTORY_BYTES {
        let (path, limit) = (source.path.clone(), MAX_DIRECTORY_BYTES);
        return Err(GradientsError::HeaderTooLong {
            path,
            kind,
            offset: end,
            found: size,
            limit,
        });
    }
    if start.checked_add(size) != Some(end) {
        let found = format!("a directory of {size} bytes at {start}");
        return Err(source.bad(kind, end, found, format!("one that ends here, at {end}")));
    }
    let mut bytes = vec![0u8; size as usize];
    source.read_exact_at(start, &mut bytes, None)?;
    let mut members = Vec::with_capacity((count as usize).min(bytes.len() / DIRECTORY_ENTRY_BYTES));
    let mut names: HashSet<&[u8]> = HashSet::new();
    let mut at = 0usize;
    while at < bytes.len() {
        let offset = start + at as u64;
        let entry = bytes
            .get(at..)
            .filter(|rest| rest.len() >= DIRECTORY_ENTRY_BYTES && rest.starts_with(b"PK\x01\x02"))
            .ok_or_else(|| source.bad(kind, offset, quoted(&bytes[at..]), "a directory entry"))?;
        let (name_len, extra_len, comment_len) =
            (u16_at(entry, 28), u16_at(entry, 30), u16_at(entry, 32));
        let name_end = DIRECTORY_ENTRY_BYTES + name_len as usize;
        let extra_end = name_end + extra_len as usize;
        let entry_end = extra_end + comment_len as usize;
        if entry.len() < entry_end {
            return Err(source.bad(
                kind,
                offset,
                format!("{} bytes", entry.len()),
                format!("an entry of {entry_end}"),
            ));
        }
        let raw_name = &entry[DIRECTORY_ENTRY_BYTES..name_end];
        let name = String::from_utf8_lossy(raw_name).into_owned();
        if !names.insert(raw_name) {
            return Err(GradientsError::DuplicateName {
                path: source.path.clone(),
                tensor: shortened(&name),
            });
        }
        let mut packed = u64::from(u32_at(entry, 20));
        let mut unpacked = u64::from(u32_at(entry, 24));
        let mut header = u64::from(u32_at(entry, 42));
        wide_fields(
            &entry[name_end..extra_end],
            [&mut unpacked, &mut packed, &mut header],
        )
        .ok_or_else(|| {
            source.bad(
                kind,
                offset,
                "a zip64 field that is too short",
                "64-bit sizes",
            )
        })?;
        let method = match u16_at(entry, 10) {
            0 => Method::Stored,
            8 => Method::Deflated,
            other => Method::Other(other),
        };
        // A name that is not text would only be shown, but two such names could look the same.
        if header
            .checked_add(LOCAL_HEADER_BYTES)
            .and_then(|h| h.checked_add(packed))
            .is_none_or(|end| end > start)
        {
            return Err(GradientsError::MembersOverlap {
                path: source.path.clone(),
                member: shortened(&name),
                offset: header,
                found: start
                    .saturating_sub(header)
                    .saturating_sub(LOCAL_HEADER_BYTES),
                expected: packed,
            });
        }
        let honest = match method {
            Method::Stored => packed == unpacked,
            _ => unpacked / MAX_DEFLATE_RATIO <= packed,
        };
        if !honest {
            return Err(GradientsError::Inflate {
                path: source.path.clone(),
                member: shortened(&name),
                offset: 0,
                found: format!("{packed} bytes that claim to unpack to {unpacked}"),
                expected: "what a member of that size can hold".into(),
            });
        }
        let (crc, encrypted) = (u32_at(entry, 16), u16_at(entry, 8) & 1 != 0);
        members.push(Member {
            name,
            method,
            encrypted,
            crc,
            packed,
            size: unpacked,
            header,
            next: start,
        });
        at += entry_end;
    }
    if members.len() as u64 != count {
        return Err(source.bad(
            kind,
            end,
            format!("{} members", members.len()),
            format!("{count} of them"),
        ));
    }
    // Members in the file's order must not share bytes.
    let mut order: Vec<usize> = (0..members.len()).collect();
    order.sort_unstable_by_key(|&i| members[i].header);
    for pair in order.windows(2) {
        let next = members[pair[1]].header;
        let member = &mut members[pair[0]];
        member.next = next;
        let found = next
            .saturating_sub(member.header)
            .saturating_sub(LOCAL_HEADER_BYTES);
        if found < member.packed || next - member.header < LOCAL_HEADER_BYTES {
            return Err(GradientsError::MembersOverlap {
                path: source.path.clone(),
                member: shortened(&member.name),
                offset: member.header,
                found,
                expected: member.packed,
            });
        }
    }
    Ok(members)
}

/// Start, size and number of entries of the directory, and where it must end.
fn end_of_directory(source: &Source, kind: Kind) -> Result<(u64, u64, u64, u64), GradientsError> {
    let tail_len = source.len.min(END_BYTES + u64::from(u16::MAX));
    let tail_at = source.len - tail_len;
    let mut tail = vec![0u8; tail_len as usize];
    source.read_exact_at(tail_at, &mut tail, None)?;
    // The comment comes last and may hold anything, so the end is the last mark whose comment just fills the file.
    let found = (0..tail.len().saturating_sub(END_BYTES as usize - 1))
        .rev()
        .find(|&at| {
            tail[at..].starts_with(b"PK\x05\x06")
                && usize::from(u16_at(&tail[at..], 20)) == tail.len() - at - END_BYTES as usize
        });
    let Some(at) = found else {
        return Err(source.bad(
            kind,
            source.len,
            "no end of a zip directory",
            "one; was the file cut short?",
        ));
    };
    let end = &tail[at..];
    let end_at = tail_at + at as u64;
    let (disk, directory_disk) = (u16_at(end, 4), u16_at(end, 6));
    let (here, count) = (u16_at(end, 8), u16_at(end, 10));
    let (size, start) = (u32_at(end, 12), u32_at(end, 16));
    // 20 bytes before the end may stand where the 64-bit one is; torch writes it for small archives too.
    if let Some(locator_at) = end_at.checked_sub(20) {
        let mut locator = [0u8; 20];
        source.read_exact_at(locator_at, &mut locator, None)?;
        let wide_at = u64_at(&locator, 8);
        if locator.starts_with(b"PK\x06\x07")
            && wide_at.checked_add(56).is_some_and(|end| end <= locator_at)
        {
            let mut wide = [0u8; 56];
            source.read_exact_at(wide_at, &mut wide, None)?;
            if !wide.starts_with(b"PK\x06\x06") {
                return Err(source.bad(
                    kind,
                    wide_at,
                    quoted(&wide),
                    "the 64-bit end of directory",
                ));
            }
            if u32_at(&wide, 16) != 0
                || u32_at(&wide, 20) != 0
                || u64_at(&wide, 24) != u64_at(&wide, 32)
            {
                return Err(source.bad(kind, wide_at, "an archive in several parts", "one file"));
            }
            return Ok((
                u64_at(&wide, 48),
                u64_at(&wide, 40),
                u64_at(&wide, 32),
                wide_at,
            ));
        }
    }
    if disk != 0 || directory_disk != 0 || here != count {
        return Err(source.bad(kind, end_at, "an archive in several parts", "one file"));
    }
    Ok((u64::from(start), u64::from(size), u64::from(count), end_at))
}

/// Replaces those of `fields` that are all ones by their 64-bit values, in order. `None` where they are missing.
fn wide_fields(mut extra: &[u8], fields: [&mut u64; 3]) -> Option<()> {
    let mut wide: Option<&[u8]> = None;
    while extra.len() >= 4 {
        let (id, len) = (u16_at(extra, 0), usize::from(u16_at(extra, 2)));
        // Padding that is no proper field (zipalign writes some) ends the search.
        let Some(body) = extra.get(4..4 + len) else {
            break;
        };
        if id == 1 {
            wide = Some(body);
            break;
        }
        extra = &extra[4 + len..];
    }
    for field in fields {
        if *field == u64::from(u32::MAX) {
            let body = wide?;
            *field = u64_at(body.get(..8)?, 0);
            wide = Some(&body[8..]);
        }
    }
    Some(())
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

impl Member {
    /// Where the data begins, from the member's own header, which must agree with the directory.
    pub fn data_offset(&self, source: &Source, kind: Kind) -> Result<u64, GradientsError> {
        if self.encrypted {
            return Err(self.unread(source, "an encrypted member".to_string(), "not encrypted"));
        }
        let mut local = [0u8; LOCAL_HEADER_BYTES as usize];
        source.read_exact_at(self.header, &mut local, Some(&self.name))?;
        if !local.starts_with(b"PK\x03\x04") {
            return Err(source.bad(kind, self.header, quoted(&local), "a member's header"));
        }
        let mut name = vec![0u8; usize::from(u16_at(&local, 26))];
        source.read_exact_at(
            self.header + LOCAL_HEADER_BYTES,
            &mut name,
            Some(&self.name),
        )?;
        let name = String::from_utf8_lossy(&name);
        if name != self.name {
            let found = format!("a member named {:?}", shortened(&name));
            return Err(source.bad(
                kind,
                self.header,
                found,
                format!("{:?}, as in the directory", shortened(&self.name)),
            ));
        }
        let data = self.header
            + LOCAL_HEADER_BYTES
            + u64::from(u16_at(&local, 26))
            + u64::from(u16_at(&local, 28));
        if self.next.saturating_sub(data) < self.packed {
            return Err(GradientsError::MembersOverlap {
                path: source.path.clone(),
                member: self.name.clone(),
                offset: data,
                found: self.next.saturating_sub(data),
                expected: self.packed,
            });
        }
        Ok(data)
    }

    /// A member that is packed in a way that is not read.
    pub fn unread(&self, source: &Source, found: String, expected: &'static str) -> GradientsError {
        GradientsError::Member {
            path: source.path.clone(),
            member: self.name.clone(),
            offset: self.header,
            found,
            expected,
        }
    }
}

/// The packed bytes of a member as [`Read`]; the first error is kept, because [`io::Error`] would lose its facts.
struct Packed<'a> {
    source: &'a Source,
    position: u64,
    end: u64,
    error: Option<GradientsError>,
}

impl Read for Packed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = (self.end - self.position).min(buffer.len() as u64) as usize;
        self.source
            .read_exact_at(self.position, &mut buffer[..n], None)
            .map_err(|e| {
                self.error = Some(e);
                io::Error::other("the archive")
            })?;
        self.position += n as u64;
        Ok(n)
    }
}

/// A member's bytes from the beginning, unpacked and checked against length and checksum as they come.
pub(crate) struct Unpacked<'a> {
    member: &'a Member,
    path: &'a std::path::Path,
    inner: Inner<'a>,
    crc: Crc,
    done: u64,
}

enum Inner<'a> {
    Stored(Packed<'a>),
    Deflated(Box<DeflateDecoder<BufReader<Packed<'a>>>>),
}

impl<'a> Unpacked<'a> {
    pub fn new(
        source: &'a Source,
        kind: Kind,
        member: &'a Member,
    ) -> Result<Unpacked<'a>, GradientsError> {
        let position = member.data_offset(source, kind)?;
        let packed = Packed {
            source,
            position,
            end: position + member.packed,
            error: None,
        };
        let inner = match member.method {
            Method::Stored => Inner::Stored(packed),
            Method::Deflated => {
                let block = (member.packed as usize).clamp(1, BLOCK_BYTES);
                Inner::Deflated(Box::new(DeflateDecoder::new(BufReader::with_capacity(
                    block, packed,
                ))))
            }
            Method::Other(method) => {
                return Err(member.unread(
                    source,
                    format!("compression method {method}"),
                    "stored or deflated",
                ));
            }
        };
        Ok(Unpacked {
            member,
            path: &source.path,
            inner,
            crc: Crc::new(),
            done: 0,
        })
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, GradientsError> {
        let read = match &mut self.inner {
            Inner::Stored(packed) => packed.read(buffer),
            Inner::Deflated(inflate) => inflate.read(buffer),
        };
        read.map_err(|e| {
            let kept = match &mut self.inner {
                Inner::Stored(packed) => packed.error.take(),
                Inner::Deflated(inflate) => inflate.get_mut().get_mut().error.take(),
            };
            kept.unwrap_or_else(|| self.bad(shortened(&e.to_string()), "a deflate stream"))
        })
    }

    fn bad(
        &self,
        found: String,
        expected: impl Into<std::borrow::Cow<'static, str>>,
    ) -> GradientsError {
        GradientsError::Inflate {
            path: self.path.to_path_buf(),
            member: self.member.name.clone(),
            offset: self.done,
            found,
            expected: expected.into(),
        }
    }

    /// Passes over `bytes` bytes.
    pub fn skip(&mut self, mut bytes: u64) -> Result<(), GradientsError> {
        let mut block = vec![0u8; BLOCK_BYTES.min(bytes as usize)];
        while bytes > 0 {
            let n = bytes.min(block.len() as u64) as usize;
            self.fill(&mut block[..n])?;
            bytes -= n as u64;
        }
        Ok(())
    }

    /// Checks that the member ends here, with the bytes that were written.
    pub fn finish(mut self) -> Result<(), GradientsError> {
        let ends = self.done == self.member.size && self.read(&mut [0u8])? == 0;
        if !ends {
            return Err(self.bad(
                "more data".to_string(),
                format!("the end, after {} bytes", self.member.size),
            ));
        }
        let (found, expected) = (self.crc.sum(), self.member.crc);
        if found != expected {
            return Err(GradientsError::Checksum {
                path: self.path.to_path_buf(),
                member: self.member.name.clone(),
                found,
                expected,
            });
        }
        Ok(())
    }
}

impl Bytes for Unpacked<'_> {
    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), GradientsError> {
        let mut filled = 0;
        while filled < buffer.len() {
            let n = self.read(&mut buffer[filled..])?;
            if n == 0 {
                let at = self.done + filled as u64;
                return Err(self.bad(
                    format!("its end after {at} bytes"),
                    format!("{} bytes more", buffer.len() - filled),
                ));
            }
            filled += n;
        }
        self.crc.update(buffer);
        self.done += buffer.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_beyond_32_bits_come_from_the_zip64_field_in_order() {
        let all = u64::from(u32::MAX);
        let wide = |extra: &[u8], mut fields: [u64; 3]| {
            let [a, b, c] = &mut fields;
            wide_fields(extra, [a, b, c]).map(|()| fields)
        };
        let mut extra = b"FB\x02\x00ZZ\x01\x00\x10\x00".to_vec();
        extra.extend(5_000_000_000u64.to_le_bytes());
        extra.extend(6_000_000_000u64.to_le_bytes());
        // Only what is all ones is replaced.
        assert_eq!(
            wide(&extra, [all, 7, all]),
            Some([5_000_000_000, 7, 6_000_000_000])
        );
        assert_eq!(wide(&extra, [1, 2, 3]), Some([1, 2, 3]));
        assert_eq!(wide(&extra, [all, all, all]), None);
        assert_eq!(wide(b"", [1, all, 3]), None);
        assert_eq!(wide(b"\x01\x00\xff\xff", [1, all, 3]), None);
    }
}
