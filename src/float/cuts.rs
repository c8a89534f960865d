//! The three magnitudes at which the outcome changes, for one format and one scale.

use super::{Format, Outcome};

const MAGNITUDE: u32 = 0x7FFF_FFFF;
const INFINITY: u32 = 0x7F80_0000;

/// Where the outcome of `|x|` changes at one scale, as f32 bit patterns of `|x|` (which are ordered as the magnitudes).
///
/// Multiplying by a positive scale, rounding the product to f32 and rounding that to the format are all monotone in
/// `|x|`. So there is one first magnitude that no longer becomes zero, one first that becomes normal and one first that
/// overflows, and an element's outcome follows from three integer comparisons, at any scale, power of two or not.
/// Products that are f32 subnormals, and so rounded twice, are covered as well, because the cuts are found with the
/// product itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cuts {
    /// Bits of the smallest `|x|` whose result is not zero; `0x7F800000` where every finite one underflows.
    pub first_nonzero: u32,
    /// Bits of the smallest `|x|` whose result is normal.
    pub first_normal: u32,
    /// Bits of the smallest `|x|` whose result overflows; `0x7F800000` where no finite one does.
    pub first_overflow: u32,
}

impl Cuts {
    /// Finds the cuts by bisection over all magnitudes, 31 products each.
    ///
    /// `loss_scale` is positive; zero and infinity are taken at their word (all underflow, all overflow).
    pub fn new(format: Format, loss_scale: f32) -> Cuts {
        let first = |threshold: u32| {
            let (mut low, mut high) = (1u32, INFINITY);
            while low < high {
                let middle = low + (high - low) / 2;
                let product = (f32::from_bits(middle) * loss_scale).to_bits() & MAGNITUDE;
                if product >= threshold {
                    high = middle
                } else {
                    low = middle + 1
                }
            }
            low
        };
        Cuts {
            first_nonzero: first(format.last_zero_bits() + 1),
            first_normal: first(format.first_normal_bits()),
            first_overflow: first(format.first_overflow_bits()),
        }
    }

    /// The outcome of one value.
    #[inline]
    pub fn outcome(self, value: f32) -> Outcome {
        let magnitude = value.to_bits() & MAGNITUDE;
        if magnitude >= INFINITY {
            Outcome::NonfiniteIn
        } else if magnitude == 0 {
            Outcome::ZeroIn
        } else if magnitude >= self.first_overflow {
            Outcome::OverflowToInfinity
        } else if magnitude < self.first_nonzero {
            Outcome::UnderflowToZero
        } else if magnitude < self.first_normal {
            Outcome::Subnormal
        } else {
            Outcome::Normal
        }
    }
}
