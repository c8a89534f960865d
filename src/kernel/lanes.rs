//! What a backend has to do, and the parts of it that are plain code, compiled once for each vector unit.

use super::rounding::{Block, Rounding};
use super::rows::{LOW_BITS, ONE, Rows, Tables};

/// Elements that are looked at together.
pub(super) const GROUP: usize = 256;
/// A group of elements.
pub(super) type Group = [f32; GROUP];

/// How many elements ahead memory is asked for: a page. The hardware looks ahead too, but not past the end of a page; a
/// tenth was gained. Staging alone is no slower than memory, and asks for nothing.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
pub(super) const AHEAD: usize = 1024;

/// The words of a group.
#[derive(Debug, Clone)]
#[repr(align(64))]
pub(super) struct Staged(pub [u32; GROUP]);

/// What staging learns about a group on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Facts {
    /// The largest magnitude's bits, infinities and NaN too.
    pub largest: u32,
    /// The smallest nonzero magnitude's bits, less one; where all are zero, something at least `0x7FFFFFFF`.
    pub smallest_less_one: u32,
    /// OR of the magnitudes' bits.
    pub or: u32,
}

/// A vector unit, or none. The methods of all implementations give the same results.
pub(super) trait Lanes: Copy {
    /// Counts `values` in `rows`: [`Rows::add_in`], inside code that is compiled for this unit.
    fn add(self, rows: &mut Rows, values: &[f32]);

    /// Writes the [`word`](super::rows::word) of each element; the words of subnormals, infinities and NaN mean nothing.
    fn stage(self, group: &Group, staged: &mut Staged) -> Facts;

    /// Stages a group and scatters the words of another.
    fn stage_and_scatter<const TURNS: usize>(
        self,
        group: &Group,
        staged: &mut Staged,
        before: &Staged,
        tables: &mut Tables,
    ) -> Facts;

    /// [`Rounding::errors_in`], in code that is compiled for this unit.
    fn errors(self, rounding: &Rounding, block: &mut Block) -> [f64; 2];
}

/// Adds words to their rows. A row is 14 bits, so no index needs a check.
#[inline(always)]
pub(super) fn scatter<const TURNS: usize>(words: &[u32], tables: &mut Tables) {
    for (place, &word) in words.iter().enumerate() {
        tables[place % TURNS][(word >> LOW_BITS) as usize] += u64::from(word) + ONE;
    }
}

/// The lowest set bit over the nonzero elements of a group of zeros and normal numbers: exponent field plus 127 plus the
/// significand's trailing zeros, or `u32::MAX`.
///
/// The trailing zeros are read off the exponent of a float that is a single bit, which every vector unit can make.
#[inline(always)]
pub(super) fn lowest_bit(group: &Group) -> u32 {
    let mut lowest = i32::MAX;
    for x in group {
        let magnitude = x.to_bits() & 0x7FFF_FFFF;
        let significand = (magnitude & 0x7F_FFFF | 0x80_0000) as i32;
        let lone = (significand & significand.wrapping_neg()) as f32;
        let bit = (magnitude >> 23) as i32 + (lone.to_bits() >> 23) as i32;
        lowest = lowest.min(if magnitude == 0 { i32::MAX } else { bit });
    }
    if lowest == i32::MAX {
        u32::MAX
    } else {
        lowest as u32
    }
}

/// How many zeros a group holds.
#[inline(always)]
pub(super) fn zeros(group: &Group) -> u64 {
    let zeros: u32 = group.iter().map(|x| u32::from(*x == 0.0)).sum();
    zeros.into()
}
