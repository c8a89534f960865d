//! Counting fast: what fills a [`Sketch`], at about the speed at which memory is read.
//!
//! [`Accumulator::add_repeated`] says what a sketch is, one element at a time. Here the same integers are found many elements
//! at a time, on whatever vector unit the machine has ([`Backend`]). This is the one room with `unsafe` in it: loads and stores of
//! vectors, and the calls into code that is compiled for a vector unit.
//!
//! # The loop
//!
//! A sketch asks of each element: which bin, and how much above the bin's edge? Both are in the bits of a float. An
//! integer table indexed by the upper bits of the magnitude, where each entry holds a count above and a sum of the magnitudes
//! below, answers both with one addition in memory:
//!
//! ```text
//!                  table[magnitude >> 18] += 1 << 48 | magnitude
//!
//!   entry:   | count, 16 bits | sum of words, 48 bits |      emptied before 65,536 elements could have met in it
//! ```
//!
//! The upper bits of all elements of a row are the same, so the sum of their lower ones is found when the table is emptied.
//! Two kinds of bins are no rows of such a table: the single values {0} and {0x680000}, and the narrow ones in the last 128th of a
//! binade. Elements that lie there are given another row: the element's *word* is its magnitude, with the upper bits changed
//! where it lies on an edge (`rows.rs` has the picture). Making words is work for the vector unit, without a branch:
//!
//! ```text
//!   magnitude = bits & 0x7FFFFFFF                 on the way: largest, smallest nonzero, OR of all
//!   exact     = magnitude & 0x7FFFF == 0
//!   last      = magnitude << 9 >= 0x7F0000 << 9
//!   word      = last ? magnitude with bits 22…19 from bits 15…12 : magnitude
//!   word     |= exact or last ? 0 : 0x80000000
//! ```
//!
//! The additions are work for the load and store units, one element at a time: no vector unit adds to scattered places faster
//! than that. So a group of 256 elements is made into words while the words of the group before are added to the tables.
//! Several tables take turns, so that an element need not wait for the sum that its neighbour is still adding to.
//!
//! What a group's words cannot say is decided a group at a time, from the facts gathered on the way: a group of one magnitude
//! (zeros, mostly) needs no table; infinities and NaN are counted apart; subnormals are multiplied by 2^64 and counted in tables
//! of their own; and the lowest set bit is looked for only where it could be news.
//!
//! 16-bit floats are counted by pattern, 65,536 counters, and widened once a pattern.
//!
//! A GPU counts in tables of its own (`cuda`), the same integers.

mod avx2;
mod avx512;
mod backend;
mod cuda;
mod halves;
mod lanes;
mod replay;
mod rounding;
mod rows;
mod scalar;
mod tensor;

pub use backend::{Backend, Unavailable};
pub use cuda::DeviceError;
pub(crate) use replay::{Replay, Replayed};
pub use rounding::{BLOCK, Block, Rounding};
pub(crate) use tensor::{Beside, Nothing, read_files, read_tensor};

use crate::tally::{Accumulator, BINS, Sketch};
use backend::Which;
use cuda::{Counting, Cuda};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use halves::Halves;
use lanes::Lanes;
use rows::Rows;
use std::sync::{Arc, Mutex};

/// Fewer elements than this are counted one by one: emptying the tables would cost more.
const FEW: usize = 512;
/// From this many 16-bit elements on it pays to count patterns.
const MANY_HALVES: usize = 1 << 14;

/// Fills sketches, one after another, on one backend.
///
/// It holds about a megabyte of tables, so it is worth keeping: [`finish`](Counter::finish) empties it for the next.
///
/// # Examples
/// ```
/// use gradscale::kernel::{Backend, Counter};
/// let mut counter = Counter::new(Backend::auto());
/// counter.add(&[1.0, -0.5, 0.0]);
/// counter.add(&[f32::INFINITY]);
/// let sketch = counter.finish();
/// assert_eq!((sketch.elements(), sketch.zeros(), sketch.inf()), (4, 1, 1));
/// ```
#[derive(Debug)]
pub struct Counter {
    backend: Backend,
    accumulator: Accumulator,
    rows: Rows,
    f16: Option<Halves>,
    bf16: Option<Halves>,
    /// Buffers on a GPU, made when they are first needed.
    counting: Option<Counting>,
    /// What the GPU failed with; nothing more is counted until it was told.
    failed: Option<DeviceError>,
    /// What the GPU replayed beside the last sketch.
    replayed: Option<Replayed>,
}

impl Counter {
    /// An empty one.
    pub fn new(backend: Backend) -> Counter {
        Counter {
            backend,
            accumulator: Accumulator::new(),
            rows: Rows::new(),
            f16: None,
            bf16: None,
            counting: None,
            failed: None,
            replayed: None,
        }
    }

    /// The backend that counts.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// Counts `values`: any length, in any order.
    pub fn add(&mut self, values: &[f32]) {
        if values.len() < FEW && !self.replays() {
            return self.accumulator.add(values);
        }
        match self.backend.0 {
            Which::Scalar => scalar::Scalar.add(&mut self.rows, values),
            Which::Avx2(lanes) => lanes.add(&mut self.rows, values),
            Which::Avx512(lanes) => lanes.add(&mut self.rows, values),
            Which::Cuda(cuda) => self.on_device(cuda, |counting| counting.add(values)),
        }
    }

    /// Has the GPU do something, unless it has failed already.
    fn on_device(
        &mut self,
        cuda: Cuda,
        work: impl FnOnce(&mut Counting) -> Result<(), DeviceError>,
    ) {
        if self.failed.is_some() {
            return;
        }
        let made = match self.counting.take() {
            Some(counting) => Ok(counting),
            None => cuda.counting(),
        };
        self.failed = made
            .and_then(|counting| work(self.counting.insert(counting)))
            .err();
    }

    /// Has f32 elements replayed by the backend, beside the sketch and until it is finished, where it can do that: says whether.
    pub(crate) fn replay(&mut self, plan: &Arc<Replay>) -> bool {
        let Which::Cuda(cuda) = self.backend.0 else {
            return false;
        };
        self.on_device(cuda, |counting| counting.replay(plan));
        true
    }

    fn replays(&self) -> bool {
        self.counting.as_ref().is_some_and(Counting::replays)
    }

    /// What was replayed beside the sketch that was finished last.
    pub(crate) fn take_replayed(&mut self) -> Option<Replayed> {
        self.replayed.take()
    }

    /// Counts f16 `values`, as the f32 that they are.
    pub fn add_f16(&mut self, values: &[f16]) {
        if values.len() >= MANY_HALVES {
            self.count_f16(values);
        } else {
            self.add_widened(values);
        }
    }

    /// Counts bf16 `values`, as the f32 that they are.
    pub fn add_bf16(&mut self, values: &[bf16]) {
        if values.len() >= MANY_HALVES {
            self.count_bf16(values);
        } else {
            self.add_widened(values);
        }
    }

    fn count_f16(&mut self, values: &[f16]) {
        if let Which::Cuda(cuda) = self.backend.0 {
            return self.on_device(cuda, |counting| counting.add_f16(values));
        }
        let halves = self.f16.get_or_insert_with(Halves::new);
        halves.add(values.reinterpret_cast());
    }

    fn count_bf16(&mut self, values: &[bf16]) {
        if let Which::Cuda(cuda) = self.backend.0 {
            return self.on_device(cuda, |counting| counting.add_bf16(values));
        }
        let halves = self.bf16.get_or_insert_with(Halves::new);
        halves.add(values.reinterpret_cast());
    }

    fn add_widened<T>(&mut self, values: &[T])
    where
        [T]: HalfFloatSliceExt,
    {
        let mut block = [0f32; 2048];
        for values in values.chunks(block.len()) {
            let block = &mut block[..values.len()];
            values.convert_to_f32_slice(block);
            self.add(block);
        }
    }

    /// Counts `times` elements that all have these f32 bits.
    pub fn add_repeated(&mut self, bits: u32, times: u64) {
        self.accumulator.add_repeated(bits, times);
    }

    /// The sketch of all that was counted; the counts are empty afterwards and can be filled again.
    ///
    /// # Panics
    /// When the backend is `cuda` and the GPU failed meanwhile; [`try_finish`](Counter::try_finish) returns that as an error.
    pub fn finish(&mut self) -> Sketch {
        self.try_finish().expect("the GPU did not fail")
    }

    /// The sketch of all that was counted; the counts are empty afterwards and can be filled again.
    ///
    /// # Errors
    /// When the backend is `cuda` and the GPU failed meanwhile. Other backends cannot fail.
    pub fn try_finish(&mut self) -> Result<Sketch, DeviceError> {
        self.finish_with(|value| value, |_, _| ())
    }

    /// Finishes; 16-bit floats that were counted by pattern become what `read_as` makes of them, and are shown with how often
    /// they came.
    fn finish_with(
        &mut self,
        read_as: impl Fn(f32) -> f32,
        mut show: impl FnMut(f32, u64),
    ) -> Result<Sketch, DeviceError> {
        self.rows.finish(&mut self.accumulator);
        let counts = match (&mut self.counting, self.failed.take()) {
            (Some(counting), None) => counting.finish().map(Some),
            (None, None) => Ok(None),
            (_, Some(failed)) => Err(failed),
        };
        let counts = match counts {
            Ok(counts) => counts,
            Err(failed) => {
                // What it counted is lost, and so is the rest: everything begins anew.
                self.counting = None;
                self.accumulator.finish();
                return Err(failed);
            }
        };
        let accumulator = &mut self.accumulator;
        if let Some(row) = counts.as_ref().and_then(|counts| counts.sketch.as_ref()) {
            add_row(accumulator, row);
        }
        let mut each = |value: f32, times: u64| {
            let value = read_as(value);
            accumulator.add_repeated(value.to_bits(), times);
            show(value, times);
        };
        if let Some(halves) = &mut self.f16 {
            halves.take(|bits, times| each(f16::from_bits(bits).to_f32(), times));
        }
        if let Some(halves) = &mut self.bf16 {
            halves.take(|bits, times| each(bf16::from_bits(bits).to_f32(), times));
        }
        if let Some(counts) = counts {
            for (patterns, widened) in [
                (
                    counts.f16,
                    (|bits| f16::from_bits(bits).to_f32()) as fn(u16) -> f32,
                ),
                (counts.bf16, |bits| bf16::from_bits(bits).to_f32()),
            ] {
                let seen = patterns.iter().flatten().enumerate();
                for (pattern, &times) in seen.filter(|(_, times)| **times > 0) {
                    each(widened(pattern as u16), times);
                }
            }
            self.replayed = counts.replayed;
        }
        Ok(self.accumulator.finish())
    }
}

/// Adds what a GPU counted: a head, then a count and then a sum for each bin.
fn add_row(accumulator: &mut Accumulator, row: &[u64]) {
    let (head, bins) = row.split_at(cuda::HEAD);
    let (counts, sums) = bins.split_at(BINS);
    accumulator.add_zeros(head[0]);
    accumulator.add_nonfinite(head[1], head[2], head[3]);
    if head[4] > 0 {
        for (bin, (&count, &sum)) in counts.iter().zip(sums).enumerate() {
            accumulator.add_bin(bin, count, sum);
        }
        accumulator.add_facts(
            head[5] as u32,
            head[4] as u32,
            head[6] as u32,
            head[7] as i32,
        );
    }
}

impl Backend {
    /// How far a block's elements are off: Σ |y − x·s| / |x| and Σ (y − x·s)², weighted, over the finite nonzero elements that
    /// stay finite. The same on every backend, bit for bit.
    pub fn errors(self, rounding: &Rounding, block: &mut Block) -> [f64; 2] {
        match self.0 {
            Which::Scalar => scalar::Scalar.errors(rounding, block),
            Which::Avx2(lanes) => lanes.errors(rounding, block),
            Which::Avx512(lanes) => lanes.errors(rounding, block),
            // Blocks in host memory; those on a GPU are rounded there.
            Which::Cuda(_) => Backend::auto().errors(rounding, block),
        }
    }
}

/// The sketch of `values` on a given backend.
///
/// # Panics
/// When the backend is `cuda` and the GPU failed meanwhile.
pub fn sketch(backend: Backend, values: &[f32]) -> Sketch {
    let mut counter = Counter::new(backend);
    counter.add(values);
    counter.finish()
}

/// Counters at rest between tensors, for threads to borrow.
#[derive(Debug, Default)]
pub struct Pool {
    backend: Backend,
    resting: Mutex<Vec<Counter>>,
}

impl Pool {
    /// No counters yet; they are made as they are needed, at most one a thread at a time.
    pub fn new(backend: Backend) -> Pool {
        Pool {
            backend,
            resting: Mutex::new(Vec::new()),
        }
    }

    /// The backend of the counters.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// Lends an empty counter to `work`.
    pub fn with<T>(&self, work: impl FnOnce(&mut Counter) -> T) -> T {
        let resting = || self.resting.lock().expect("nobody panics holding it");
        let mut counter = resting()
            .pop()
            .unwrap_or_else(|| Counter::new(self.backend));
        let result = work(&mut counter);
        resting().push(counter);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small enough for an interpreter that watches every access; `tests/kernel.rs` is the real test.
    #[test]
    fn each_backend_counts_odd_lengths_and_odd_values_as_one_by_one() {
        let mut values: Vec<f32> = (0..1333u32)
            .map(|i| f32::from_bits(0x3800_0000 + i * 0x1_2345))
            .collect();
        values.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-40]);
        values.extend([1.0; 300]);
        let mut accumulator = Accumulator::new();
        accumulator.add(&values);
        let expected = accumulator.finish();
        for backend in Backend::available() {
            let mut counter = Counter::new(backend);
            for _ in 0..2 {
                counter.add(&values);
                assert_eq!(counter.finish(), expected, "{}", backend.name());
            }
        }
    }
}
