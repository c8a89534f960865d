//! How far rounded values are off, many scales over one block of elements.
//!
//! For each element x, what becomes of it at scale s is y = round(fl32(x·s)), and the error is y − x·s. The product of two
//! f32 is exact in an f64, and so is the difference, so no error is lost on the way to the sums:
//!
//! ```text
//!   product = x · s                                            exact
//!   v       = product, rounded to f32
//!   b       = max(|v| rounded down to a power of two, the format's smallest normal)
//!   c       = b · 1.5 · 2^(53 − significand bits)
//!   y       = (v + c) − c                                      v to nearest, ties to even
//!   error   = y − product                                      0 where x is zero, not finite, or overflows
//!   Σ |error| / |x|   and   Σ error²                           over sixteen lanes, joined in one fixed order
//! ```
//!
//! Adding and subtracting c rounds at the place where the format's last bit is, because an f64 near c has its own last bit
//! there. This is plain code, compiled once for each vector unit; multiplications and additions are not fused. So the
//! sums are the same on every backend, bit for bit.

use crate::float::{Cuts, Format};

/// Elements of a block: it stays in the first-level cache over all scales.
pub const BLOCK: usize = 512;
/// Sums that run side by side, so that none waits for the last addition to end.
const LANES: usize = 16;
const MAGNITUDE: u32 = 0x7FFF_FFFF;
const INFINITY: u32 = 0x7F80_0000;
const F64_EXPONENT: u64 = 0x7FF0_0000_0000_0000;

/// One number an element. Aligned, so that vectors of it do not straddle cache lines.
#[derive(Debug, Clone)]
#[repr(align(64))]
struct Each([f64; BLOCK]);

/// Elements with weights, up to [`BLOCK`] of them.
#[derive(Debug, Clone)]
pub struct Block {
    values: Each,
    /// Weight over magnitude.
    inverse: Each,
    weights: Each,
    len: usize,
    /// Whether all weights are 1.
    plain: bool,
    /// Each element's error, on the way to the sums.
    errors: Each,
}

impl Default for Block {
    fn default() -> Block {
        let zeros = || Each([0.0; BLOCK]);
        Block {
            values: zeros(),
            inverse: zeros(),
            weights: zeros(),
            len: 0,
            plain: true,
            errors: zeros(),
        }
    }
}

impl Block {
    /// How many it holds.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes as many of `values` as there is room for, each with weight 1, and returns the rest.
    pub fn take<'a>(&mut self, values: &'a [f32]) -> &'a [f32] {
        let (taken, rest) = values.split_at(values.len().min(BLOCK - self.len));
        let to = self.len..self.len + taken.len();
        let places = self.values.0[to.clone()]
            .iter_mut()
            .zip(&mut self.inverse.0[to.clone()])
            .zip(&mut self.weights.0[to]);
        for (((value, inverse), weight), &x) in places.zip(taken) {
            let counts = x.to_bits() & MAGNITUDE != 0 && x.to_bits() & MAGNITUDE < INFINITY;
            *value = if counts { x.into() } else { 0.0 };
            *inverse = if counts { 1.0 / value.abs() } else { 0.0 };
            *weight = 1.0;
        }
        self.len += taken.len();
        // What is summed with the last lanes must count nothing.
        let end = self.len.next_multiple_of(LANES);
        self.values.0[self.len..end].fill(0.0);
        self.inverse.0[self.len..end].fill(0.0);
        rest
    }

    /// Takes a value that stands for `times` elements; the block is not full.
    pub fn take_repeated(&mut self, value: f32, times: u64) {
        self.take(&[value]);
        let at = self.len - 1;
        self.plain = false;
        self.weights.0[at] = times as f64;
        self.inverse.0[at] *= times as f64;
    }

    /// Empties it.
    pub fn clear(&mut self) {
        self.len = 0;
        self.plain = true;
    }
}

/// A format at a scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rounding {
    scale: f64,
    /// 1.5 · 2^(53 − significand bits).
    up: f64,
    smallest_normal: f64,
    first_nonzero: f64,
    first_overflow: f64,
}

impl Rounding {
    /// `cuts` are the format's at `scale`, perhaps with subnormals flushed.
    pub fn new(format: Format, scale: f32, cuts: Cuts) -> Rounding {
        let magnitude = |bits: u32| f64::from(f32::from_bits(bits.min(INFINITY)));
        Rounding {
            scale: scale.into(),
            up: 1.5 * crate::float::exp2(53 - format.significand_bits as i32),
            smallest_normal: format.smallest_normal().into(),
            first_nonzero: magnitude(cuts.first_nonzero),
            first_overflow: magnitude(cuts.first_overflow),
        }
    }

    /// Its numbers, in the order in which `kernels.cu` has them.
    #[cfg(feature = "cuda")]
    pub(super) fn parts(&self) -> [f64; 5] {
        [
            self.scale,
            self.up,
            self.smallest_normal,
            self.first_nonzero,
            self.first_overflow,
        ]
    }

    /// Σ |y − x·s| / |x| and Σ (y − x·s)², weighted, over the finite nonzero elements that stay finite.
    #[inline(always)]
    pub(super) fn errors_in(&self, block: &mut Block) -> [f64; 2] {
        let end = block.len.next_multiple_of(LANES);
        // Loops of which a compiler makes vector code: one without a sum, and two that only sum.
        let errors = &mut block.errors.0[..end];
        for (error, &x) in errors.iter_mut().zip(&block.values.0[..end]) {
            let product = x * self.scale;
            let v = f64::from(product as f32);
            let binade = f64::from_bits(v.to_bits() & F64_EXPONENT);
            let c = self.up
                * if binade > self.smallest_normal {
                    binade
                } else {
                    self.smallest_normal
                };
            let y = (v + c) - c;
            let y = if x.abs() < self.first_nonzero { 0.0 } else { y };
            let off = y - product;
            *error = if x.abs() < self.first_overflow {
                off
            } else {
                0.0
            };
        }
        let (inverse, weights) = (&block.inverse.0[..end], &block.weights.0[..end]);
        let relative = lane_sum(errors, inverse, |error, inverse| error.abs() * inverse);
        let squares = if block.plain {
            lane_sum(errors, errors, |error, same| error * same)
        } else {
            lane_sum(errors, weights, |error, weight| error * error * weight)
        };
        [relative, squares]
    }
}

/// The sum over pairs, whole lanes of them: lane by lane, then over the lanes.
#[inline(always)]
fn lane_sum(errors: &[f64], others: &[f64], part: impl Fn(f64, f64) -> f64) -> f64 {
    let mut lanes = [0f64; LANES];
    let (errors, others) = (errors.as_chunks::<LANES>().0, others.as_chunks::<LANES>().0);
    for (errors, others) in errors.iter().zip(others) {
        for lane in 0..LANES {
            lanes[lane] += part(errors[lane], others[lane]);
        }
    }
    let mut apart = LANES / 2;
    while apart > 0 {
        for lane in 0..apart {
            lanes[lane] += lanes[lane + apart];
        }
        apart /= 2;
    }
    lanes[0]
}
