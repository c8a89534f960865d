//! The one door to a memory map.
//!
//! memmap2's constructor is unsafe because the map changes underfoot when another process writes to the file, and
//! reading past the end of a shortened file is a fatal signal. That is why maps are an option and not the default.
#![allow(unsafe_code)] // memmap2's constructor, the one call below

use std::fs::File;
use std::io;

/// Maps a whole file for reading.
pub(crate) fn map(file: &File) -> io::Result<memmap2::Mmap> {
    // SAFETY: the map is read as plain bytes and numbers, for which every bit pattern is valid, and its length is fixed
    // when it is made. What remains is another process that changes the file: writers of dumps write a temporary
    // file and rename it, and `Options::with_mmap` tells the caller, who has to ask for this.
    unsafe { memmap2::Mmap::map(file) }
}
