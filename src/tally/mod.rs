//! Exact integer counts of a run's gradients: the [`Sketch`] of a tensor and the [`Trace`] of a run.
//!
//! Multiplying by 2^k moves a binade as a whole. So one pass that counts how many elements lie in each binade, split at
//! the few significands where some format's rounding decides otherwise, gives the exact outcomes at every power-of-two
//! scale and for every format, without another look at the data:
//!
//! ```text
//!  one binade [2^e, 2^(e+1)), by the 23-bit significand field        what decides there
//!
//!   0    {0}                     | exactly 2^e                       the underflow tie of every format
//!   1    (0, 0x080000)           |
//!   2…12 [k·0x080000, …)         | equal sixteenths                  nothing; they make the L2 norm tight
//!  13    [0x600000, 0x680000)    |                                   E5M2: rounds up to normal from here
//!  14    {0x680000}              | exactly 1.8125·2^e                E4M3FN: 464, the last that does not overflow
//!  15    (0x680000, 0x700000)    |
//!  16    [0x700000, 0x780000)    |                                   E5M2 overflows; E4M3FN rounds up to normal
//!  17    [0x780000, 0x7F0000)    |
//!  18    [0x7F0000, 0x7F8000)    |                                   BF16 rounds up to normal
//!  19    [0x7F8000, 0x7FE000)    |                                   BF16 overflows
//!  20    [0x7FE000, 0x7FF000)    |                                   FP16 rounds up to normal
//!  21    [0x7FF000, 0x7FFFFF]    |                                   FP16 overflows
//! ```
//!
//! Each bin also holds the exact sum of its significands, so the share of the L1 norm lost at a scale is exact and the
//! L2 share is known within 1e-3. Everything is an integer: merging is associative and commutative, and one thread,
//! sixteen or a thousand ranks give the same bits.

mod bins;
mod captured;
mod histogram;
mod outcomes;
pub mod series;
mod sketch;
pub mod store;
mod trace;

pub use bins::{BINADES, BINS, Bin, MIN_EXPONENT, SUB_BIN_EDGES, SUB_BINS, bin_of, split};
pub(crate) use bins::{SUB_BIN_BASES, sub_bin_of};
pub use captured::{Capture, Captured};
pub use histogram::{BinError, Histogram, MagnitudeBin, Moments, NORM_ERROR, Spread};
pub(crate) use outcomes::fraction;
pub use outcomes::{Lost, Outcomes, Replayed, WhyNotExact};
pub use sketch::{Accumulator, Sketch, SketchError};
pub use store::TraceError;
pub use trace::{
    MergeError, ProducedIn, Reduction, Role, Sample, Step, TensorInfo, Trace, nonfinite,
};
