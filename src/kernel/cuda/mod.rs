//! NVIDIA's GPUs: asked for at run time, through the driver alone.
//!
//! # What is shipped
//!
//! `kernels.cu` is the source. `kernels.ptx` beside it is what NVRTC 12.0 makes of it for the oldest GPU meant, compute
//! capability 7.0: the driver translates it for the GPU that it finds. So users need a driver (525 or newer) and nothing of the
//! CUDA toolkit; a container without libnvrtc is fine. The recorder carries a copy of it. `tests/nvrtc.py`, part of the whole check,
//! compiles the source again and compares the bytes, and compiles it for newer GPUs with newer compilers too; with `--write` it
//! writes both copies anew. `tests/cuda_shim` runs the source on the host.
//!
//! # The kernels
//!
//! Every count and sum is an integer, so neither the number of blocks nor their order can change a bit. What bounds a sketch
//! is memory: each element is read once (4 or 2 bytes), 16 bytes a load, four loads in flight a thread, and nothing is written but a
//! table of 98 kB at the end. Against that stand, for each f32:
//!
//! ```text
//!   about 20 instructions      max, min, OR, the row; the edges take a branch that one element in 128 needs
//!   2 atomic additions         to the block's table in shared memory: a count, and the field's low bits
//! ```
//!
//! *The table.* One row for each sixteenth of a binade, for the single fields {0} and {0x680000}, and for the four sub-bins
//! of a binade's last 128th: 5632 rows, a 32-bit count and a 32-bit sum each, 45 kB. So it fits the shared memory that every GPU
//! gives without asking, five blocks of 512 threads share an H200's multiprocessor, and registers (64 a thread) let two run. A
//! 64-bit word a row would need a compare-and-swap loop: there is no 64-bit addition in shared memory. Counts are added by
//! an instruction that joins equal addresses in a warp. A sum's carry is seen in the old value that the addition gives back, and goes
//! to the result at once (one element in 8192 or fewer); the old values of a batch of 16 are looked at together, so no addition waits for
//! another. Copies a warp would cost 45 kB each; that neighbours meet in a row is met otherwise: normal
//! data spreads over sixteen rows a binade, and a thread whose 16 elements are one magnitude and zeros makes one addition.
//!
//! *Facts.* Largest, smallest and OR are registers. The lowest set bit is looked for only where it could be news to the block.
//! Subnormals, infinities and NaN take a slow path, batch by batch.
//!
//! *16-bit floats* are counted by pattern in 128 kB of shared memory: positive and negative ones in the two halves of
//! a word, emptied when a half reaches 32,768. Where a GPU gives a block less, it takes several passes over the data. One atomic
//! addition an element; 70 % of 4.8 TB/s leaves 4.4 clocks for the 32 of a warp, which meet in about 3.5 a bank.
//!
//! *Replay.* An element's interval is found through a table of its upper 16 bits; count, Σ significand and Σ significand² are
//! integers, in several copies of the table, lane by lane, as few intervals are hit by many. Errors are summed in the order of
//! [`Rounding`](crate::kernel::Rounding): sixteen threads are the sixteen lanes, and one more kernel adds up the blocks in order.
//!
//! Expected on an H200 (4.8 TB/s): at 132 multiprocessors and 1.75 GHz, 80 % of that is 4.1 f32 a clock and multiprocessor, so there
//! are 7.7 clocks for the 32 of a warp: about 20 of 31 instructions that could be issued in them, and two atomic additions whose
//! 32 lanes meet in about 3.5 lanes a bank, about 7 clocks. That is near the limit, and it is reckoned, **not measured**:
//! `tests/gpu.sh` measures it. A dump on disk is bounded by the bus: copies from two pinned buffers overlap with counting.

#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda")]
mod enabled;
#[cfg(feature = "cuda")]
pub(super) use enabled::*;

#[cfg(not(feature = "cuda"))]
mod disabled;
#[cfg(not(feature = "cuda"))]
pub(super) use disabled::*;

use super::replay::Replayed;

/// A GPU that failed while it was counting.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{doing} on the CUDA device: found {found}, expected success; --backend cpu gives the same integers"
)]
pub struct DeviceError {
    /// What was being done.
    pub doing: &'static str,
    /// The driver's function and what it answered.
    pub found: String,
}
