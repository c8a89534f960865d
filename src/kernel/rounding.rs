//! How far rounded values are off, many scales over one block of elements.
//!
//! For each element x, what becomes of it at scale s is y = round(fl32(x·s)), and the error is y − x·s. The product of two
//! f32 is exact in an f64, and so is the difference, so no error is lost on the way to the sums:
//!
//! ```text
//!   product = f64(x) · f64(s)                                  exact
//!   v       = f64(fl32(x · s))
//!   E       = max(exponent of v, the format's smallest)
//!   y       = (v + c) − c,  c = 1.5 · 2^(E + 53 − significand bits)       rounds v to nearest, ties to even
//!   error   = y − product                                      0 where x is zero, not finite, or overflows
//!   Σ |error| / |x|   and   Σ error²                           over eight lanes, joined in one fixed order
//! ```
//!
//! Adding and subtracting c rounds at the place where the format's last bit is, because an f64 near c has its own last bit
//! there. This is plain code, compiled once for each vector unit; multiplications and additions are not fused. So the
//! sums are the same on every backend, bit for bit.

use crate::float::{Cuts, Format};

/// Elements of a block: it stays in the first-level cache over all scales.
pub const BLOCK: usize = 1024;
const LANES: usize = 8;
const MAGNITUDE: u32 = 0x7FFF_FFFF;
const INFINITY: u32 = 0x7F80_0000;
const F64_EXPONENT: u64 = 0x7FF0_0000_0000_0000;

/// Elements with weights, up to [`BLOCK`] of them.
#[derive(Debug, Clone)]
#[repr(align(64))]
pub struct Block {
    values: [f32; BLOCK],
    /// Weight over magnitude.
    inverse: [f64; BLOCK],
    weights: [f64; BLOCK],
    len: usize,
}

impl Default for Block {
    fn default() -> Block {
        Block {
            values: [0.0; BLOCK],
            inverse: [0.0; BLOCK],
            weights: [0.0; BLOCK],
            len: 0,
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
        let places = self.values[to.clone()]
            .iter_mut()
            .zip(&mut self.inverse[to.clone()])
            .zip(&mut self.weights[to]);
        for (((value, inverse), weight), &x) in places.zip(taken) {
            let counts = x.to_bits() & MAGNITUDE != 0 && x.to_bits() & MAGNITUDE < INFINITY;
            *value = if counts { x } else { 0.0 };
            *inverse = if counts {
                1.0 / f64::from(x.abs())
            } else {
                0.0
            };
            *weight = 1.0;
        }
        self.len += taken.len();
        // What is summed with the last eight must count nothing.
        let end = self.len.next_multiple_of(LANES);
        self.values[self.len..end].fill(0.0);
        self.inverse[self.len..end].fill(0.0);
        rest
    }

    /// Takes a value that stands for `times` elements; the block is not full.
    pub fn take_repeated(&mut self, value: f32, times: u64) {
        self.take(&[value]);
        let at = self.len - 1;
        self.weights[at] = times as f64;
        self.inverse[at] *= times as f64;
    }

    /// Empties it.
    pub fn clear(&mut self) {
        self.len = 0;
    }
}

/// A format at a scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rounding {
    scale: f32,
    /// 53 less the significand bits, where an f64's exponent is.
    up: u64,
    /// The format's smallest exponent, as that of an f64.
    smallest: u64,
    first_nonzero: u32,
    first_overflow: u32,
}

impl Rounding {
    /// `cuts` are the format's at `scale`, perhaps with subnormals flushed.
    pub fn new(format: Format, scale: f32, cuts: Cuts) -> Rounding {
        Rounding {
            scale,
            up: u64::from(53 - format.significand_bits) << 52,
            smallest: ((format.min_exponent + 1023) as u64) << 52,
            first_nonzero: cuts.first_nonzero,
            first_overflow: cuts.first_overflow.min(INFINITY),
        }
    }

    /// Σ |y − x·s| / |x| and Σ (y − x·s)², weighted, over the finite nonzero elements that stay finite.
    #[inline(always)]
    pub(super) fn errors_in(&self, block: &Block) -> [f64; 2] {
        let (mut relative, mut squares) = ([0f64; LANES], [0f64; LANES]);
        let end = block.len.next_multiple_of(LANES);
        let values = block.values[..end].as_chunks::<LANES>().0;
        let inverse = block.inverse[..end].as_chunks::<LANES>().0;
        let weights = block.weights[..end].as_chunks::<LANES>().0;
        let scale = f64::from(self.scale);
        for ((values, inverse), weights) in values.iter().zip(inverse).zip(weights) {
            let mut error = [0f64; LANES];
            for (error, &x) in error.iter_mut().zip(values) {
                let magnitude = x.to_bits() & MAGNITUDE;
                let v = f64::from(x * self.scale);
                let exponent = (v.to_bits() & F64_EXPONENT).max(self.smallest);
                let c = f64::from_bits(exponent.wrapping_add(self.up) | 1 << 51);
                let y = (v + c) - c;
                let y = if magnitude < self.first_nonzero {
                    0.0
                } else {
                    y
                };
                let off = y - f64::from(x) * scale;
                let counts = magnitude.wrapping_sub(1) < self.first_overflow - 1;
                *error = if counts { off } else { 0.0 };
            }
            for lane in 0..LANES {
                relative[lane] += error[lane].abs() * inverse[lane];
                squares[lane] += error[lane] * error[lane] * weights[lane];
            }
        }
        let joined =
            |[a, b, c, d, e, f, g, h]: [f64; LANES]| ((a + b) + (c + d)) + ((e + f) + (g + h));
        [joined(relative), joined(squares)]
    }
}
