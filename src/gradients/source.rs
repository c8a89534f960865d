//! Bounded, positioned reads of one file, and the decoding of elements from them.
//!
//! A file that is cut short under a memory map kills the process; under a positioned read it is an error. Several
//! threads read one [`Source`] at once, as no read moves a shared position.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use half::slice::HalfBitsSliceExt;
use half::{bf16, f16};
use zerocopy::{FromBytes, IntoBytes};

use super::tensor::{Chunk, Dtype, Encoding, widen_fp8};
use super::{GradientsError, Kind};

/// Bytes a read asks for at most. 128 KiB stays in the second-level cache: measured, larger blocks were slower.
pub(crate) const BLOCK_BYTES: usize = 128 * 1024;

/// An open file and its length when it was opened.
#[derive(Debug)]
pub(crate) struct Source {
    pub path: PathBuf,
    pub len: u64,
    file: File,
    map: Option<memmap2::Mmap>,
}

impl Source {
    /// Opens a regular file that is not empty and not a Git LFS pointer.
    pub fn open(path: &Path, mmap: bool) -> Result<Source, GradientsError> {
        let io = |source| GradientsError::Io {
            doing: "opening",
            path: path.to_path_buf(),
            source,
        };
        // Asked before opening: opening a pipe would wait for a writer.
        let before = std::fs::metadata(path).map_err(io)?;
        if !before.is_file() {
            return Err(if before.is_dir() {
                io(io::Error::new(io::ErrorKind::IsADirectory, "a directory"))
            } else {
                GradientsError::NotAFile {
                    path: path.to_path_buf(),
                }
            });
        }
        let file = File::open(path).map_err(io)?;
        let len = file.metadata().map_err(io)?.len();
        let map = if mmap && len > 0 {
            Some(super::mmap::map(&file).map_err(io)?)
        } else {
            None
        };
        let source = Source {
            path: path.to_path_buf(),
            len,
            file,
            map,
        };
        if len == 0 {
            return Err(GradientsError::EmptyFile { path: source.path });
        }
        let mut head = [0u8; 32];
        let n = head.len().min(len as usize);
        source.read_exact_at(0, &mut head[..n], None)?;
        if head[..n].starts_with(b"version https://git-lfs") {
            return Err(GradientsError::GitLfsPointer { path: source.path });
        }
        Ok(source)
    }

    /// The first bytes, at most `N`.
    pub fn head<const N: usize>(&self) -> Result<Vec<u8>, GradientsError> {
        let mut head = vec![0u8; (N as u64).min(self.len) as usize];
        self.read_exact_at(0, &mut head, None)?;
        Ok(head)
    }

    /// Bytes of the map, where there is one and it reaches that far.
    fn mapped(&self, offset: u64, length: u64) -> Option<&[u8]> {
        let (from, to) = (
            usize::try_from(offset).ok()?,
            usize::try_from(offset.checked_add(length)?).ok()?,
        );
        self.map.as_ref()?.get(from..to)
    }

    /// Fills `buffer` from `offset`; a file that ends before is [`GradientsError::Truncated`].
    pub fn read_exact_at(
        &self,
        offset: u64,
        buffer: &mut [u8],
        tensor: Option<&str>,
    ) -> Result<(), GradientsError> {
        if let Some(bytes) = self.mapped(offset, buffer.len() as u64) {
            buffer.copy_from_slice(bytes);
            return Ok(());
        }
        let mut done = 0;
        while done < buffer.len() {
            match read_at(&self.file, &mut buffer[done..], offset + done as u64) {
                Ok(0) => {
                    return Err(GradientsError::Truncated {
                        path: self.path.clone(),
                        tensor: tensor.map(str::to_string),
                        offset,
                        found: done as u64,
                        expected: buffer.len() as u64,
                    });
                }
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(GradientsError::Io {
                        doing: "reading",
                        path: self.path.clone(),
                        source,
                    });
                }
            }
        }
        Ok(())
    }

    /// An error unless `offset .. offset + bytes` lies inside the file.
    pub fn check_inside(
        &self,
        tensor: Option<&str>,
        offset: u64,
        bytes: u64,
    ) -> Result<(), GradientsError> {
        let there = self.len.saturating_sub(offset);
        if bytes <= there {
            return Ok(());
        }
        Err(GradientsError::Truncated {
            path: self.path.clone(),
            tensor: tensor.map(str::to_string),
            offset,
            found: there,
            expected: bytes,
        })
    }

    /// A [`GradientsError::Header`] about this file.
    pub fn bad(
        &self,
        kind: Kind,
        offset: u64,
        found: impl Into<String>,
        expected: impl Into<std::borrow::Cow<'static, str>>,
    ) -> GradientsError {
        GradientsError::Header {
            path: self.path.clone(),
            kind,
            tensor: None,
            offset,
            found: found.into(),
            expected: expected.into(),
        }
    }
}

#[cfg(unix)]
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, buffer, offset)
}

#[cfg(windows)]
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, buffer, offset)
}

/// Bytes that come one after another: a part of a file, or what a compressed member inflates to.
pub(crate) trait Bytes {
    /// Fills `buffer` or fails.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), GradientsError>;

    /// The next `length` bytes as they lie in memory, where they are there and begin at a multiple of `align`;
    /// otherwise nothing has happened.
    fn borrow(&mut self, length: u64, align: usize) -> Option<&[u8]> {
        let _ = (length, align);
        None
    }
}

/// A part of a file, read in order.
pub(crate) struct Region<'a> {
    pub source: &'a Source,
    pub position: u64,
    pub end: u64,
    pub tensor: Option<&'a str>,
}

impl Bytes for Region<'_> {
    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), GradientsError> {
        let there = self.end.saturating_sub(self.position);
        if (buffer.len() as u64) > there {
            return Err(GradientsError::Truncated {
                path: self.source.path.clone(),
                tensor: self.tensor.map(str::to_string),
                offset: self.position,
                found: there,
                expected: buffer.len() as u64,
            });
        }
        self.source
            .read_exact_at(self.position, buffer, self.tensor)?;
        self.position += buffer.len() as u64;
        Ok(())
    }

    fn borrow(&mut self, length: u64, align: usize) -> Option<&[u8]> {
        let end = self
            .position
            .checked_add(length)
            .filter(|end| *end <= self.end)?;
        let bytes = self.source.mapped(self.position, length)?;
        if !bytes.as_ptr().addr().is_multiple_of(align) {
            return None;
        }
        self.position = end;
        Some(bytes)
    }
}

/// Hands out `elements` elements from `bytes` in chunks of at most [`BLOCK_BYTES`].
pub(crate) fn decode(
    bytes: &mut dyn Bytes,
    encoding: Encoding,
    elements: u64,
    visit: &mut dyn FnMut(Chunk<'_>),
) -> Result<(), GradientsError> {
    let size = encoding.dtype.size_bytes() as usize;
    let per_block = ((BLOCK_BYTES / size) as u64).min(elements) as usize;
    let mut left = elements;
    let swap = encoding.big_endian != cfg!(target_endian = "big");
    let next = |left: &mut u64| {
        let n = (per_block as u64).min(*left) as usize;
        *left -= n as u64;
        n
    };
    // The bytes are read straight into a slice of the element type; only the other byte order is touched again.
    match encoding.dtype {
        Dtype::F32 => {
            // A mapped file's own bytes will do where they are floats already.
            while !swap && left > 0 {
                let n = (per_block as u64).min(left);
                let Some(bytes) = bytes.borrow(n * 4, align_of::<f32>()) else {
                    break;
                };
                left -= n;
                let floats = <[f32]>::ref_from_bytes(bytes).expect("aligned, and whole floats");
                visit(Chunk::F32(floats));
            }
            let mut block = vec![0f32; (per_block as u64).min(left) as usize];
            while left > 0 {
                let block = &mut block[..next(&mut left)];
                bytes.fill(block.as_mut_bytes())?;
                if swap {
                    block
                        .iter_mut()
                        .for_each(|x| *x = f32::from_bits(x.to_bits().swap_bytes()));
                }
                visit(Chunk::F32(block));
            }
        }
        Dtype::F16 | Dtype::Bf16 => {
            let show = |halves: &[u16], visit: &mut dyn FnMut(Chunk<'_>)| {
                visit(match encoding.dtype {
                    Dtype::F16 => Chunk::F16(halves.reinterpret_cast::<f16>()),
                    _ => Chunk::Bf16(halves.reinterpret_cast::<bf16>()),
                })
            };
            while !swap && left > 0 {
                let n = (per_block as u64).min(left);
                let Some(bytes) = bytes.borrow(n * 2, align_of::<u16>()) else {
                    break;
                };
                left -= n;
                show(
                    <[u16]>::ref_from_bytes(bytes).expect("aligned, and whole halves"),
                    visit,
                );
            }
            let mut block = vec![0u16; (per_block as u64).min(left) as usize];
            while left > 0 {
                let block = &mut block[..next(&mut left)];
                bytes.fill(block.as_mut_bytes())?;
                if swap {
                    block.iter_mut().for_each(|x| *x = x.swap_bytes());
                }
                show(block, visit);
            }
        }
        Dtype::F64 => {
            let mut block = vec![0u64; per_block];
            let mut rounded = vec![0f32; per_block];
            while left > 0 {
                let n = next(&mut left);
                bytes.fill(block[..n].as_mut_bytes())?;
                for (to, &from) in rounded.iter_mut().zip(&block[..n]) {
                    *to = f64::from_bits(if swap { from.swap_bytes() } else { from }) as f32;
                }
                visit(Chunk::F32(&rounded[..n]));
            }
        }
        dtype @ (Dtype::Fp8E4m3fn | Dtype::Fp8E5m2 | Dtype::Fp8E4m3fnuz | Dtype::Fp8E5m2fnuz) => {
            let table: [f32; 256] = std::array::from_fn(|code| widen_fp8(code as u8, dtype));
            // A quarter of a block of codes widens to a block of f32.
            let mut block = vec![0u8; per_block.min(BLOCK_BYTES / 4)];
            let mut widened = vec![0f32; block.len()];
            while left > 0 {
                let n = (block.len() as u64).min(left) as usize;
                left -= n as u64;
                bytes.fill(&mut block[..n])?;
                for (to, &code) in widened.iter_mut().zip(&block[..n]) {
                    *to = table[usize::from(code)];
                }
                visit(Chunk::F32(&widened[..n]));
            }
        }
    }
    Ok(())
}
