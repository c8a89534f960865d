//! Reading dumps: named tensors, handed out in bounded chunks.
//!
//! ```text
//! Dump::open(path) ── steps() ──► DumpFile ── open() ──► OpenDump ── tensors(), read(i, visit) ──► Chunk, Chunk, …
//!      paths only                                header only                    positioned reads, 128 KiB each
//! ```
//!
//! | format | what is read |
//! |---|---|
//! | `.npy` | versions 1 to 3, f16 f32 f64 bf16 in either byte order, C or Fortran order |
//! | `.npz` | members stored or deflated, lengths and checksums verified |
//! | `.safetensors` | F16 BF16 F32 F64 and the 8-bit floats; metadata `loss_scale`, `step`, `rank` |
//! | `.pt`, `.pth` | `torch.save`, both containers; a pickle is *read*, never run |
//!
//! ```
//! use gradscale::gradients::{Dump, Options};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("step_000100.npy");
//! # std::fs::write(&path, b"\x93NUMPY\x01\x00\x3a\x00{'descr': '<f2', 'fortran_order': False, 'shape': (1,), }\n\x00\x3c")?;
//! let options = Options::new().with_exclude(["*.embed.*"])?;
//! let dump = Dump::open(&path, &options)?;
//! for step in dump.steps() {
//!     for file in &step.files {
//!         let open = file.open(&options)?;
//!         for (i, tensor) in open.tensors().iter().enumerate() {
//!             let mut zeros = 0;
//!             open.read(i, &mut |chunk| zeros += chunk.to_f32().iter().filter(|x| **x == 0.0).count())?;
//!             println!("step {:?}: {} of {} are zero in {}", step.step, zeros, tensor.elements, tensor.name);
//! #           assert_eq!((step.step, zeros, tensor.elements), (Some(100), 0, 1));
//!         }
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Integers, booleans, complex numbers and text are left out and listed ([`OpenDump::skipped`]). Object arrays are
//! refused, because they are pickles; so is a file without any tensor, and one that names a tensor twice.
//!
//! Files are not trusted: lengths are checked before anything is allocated, headers have limits, nothing recurses on
//! a file's say-so, and no memory is mapped unless asked for (a mapped file that shrinks kills the process). An `.npz`'s header offset
//! in a message counts from the beginning of the unpacked member.
//!
//! # Directories
//!
//! One directory is one run. Files named `.npy .npz .safetensors .pt .pth` count, in directories inside it too; names that
//! begin with a dot and all other files don't. A directory reached twice through links is read once. Step and rank come
//! from each path (the usual names, or [`StepPattern`]); files of one step are read together, whatever their rank or
//! shard, and equal names in them are one tensor. The order of files, and so of all results, is by step, rank and path.
//! Only paths are listed up front; headers are read when a [`DumpFile`] is opened.

mod archive;
mod dump;
mod error;
mod mmap;
mod npy;
mod npz;
mod open;
mod options;
mod pt;
mod safetensors;
mod source;
mod step_pattern;
mod tensor;
mod view;

use std::fmt;
use std::path::Path;

pub use dump::{Dump, DumpFile, StepFiles, looks_like_trace};
pub use error::GradientsError;
pub use open::OpenDump;
pub use options::{DumpScale, Options};
pub use step_pattern::StepPattern;
pub use tensor::{Chunk, Dtype, Skipped, SkippedBecause, TensorMeta};

/// What an input is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// One NumPy array.
    Npy,
    /// A zip archive of NumPy arrays.
    Npz,
    /// A safetensors file, or the index of a sharded one.
    Safetensors,
    /// What `torch.save` writes.
    Pt,
    /// A directory of these.
    Directory,
}

impl Kind {
    /// The format that a file's extension claims.
    pub fn of_extension(path: &Path) -> Option<Kind> {
        let extension = path.extension()?.to_str()?;
        let known = [
            ("npy", Kind::Npy),
            ("npz", Kind::Npz),
            ("safetensors", Kind::Safetensors),
            ("pt", Kind::Pt),
            ("pth", Kind::Pt),
        ];
        known
            .iter()
            .find(|(name, _)| extension.eq_ignore_ascii_case(name))
            .map(|&(_, kind)| kind)
    }

    /// The name in messages and JSON: `npy`, `npz`, `safetensors`, `pt`, `directory`.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Npy => "npy",
            Kind::Npz => "npz",
            Kind::Safetensors => "safetensors",
            Kind::Pt => "pt",
            Kind::Directory => "directory",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
