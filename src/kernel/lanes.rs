//! What a backend has to do.

use super::rows::{LOW_BITS, ONE, Tables};

/// Elements that are looked at together.
pub(super) const GROUP: usize = 256;
/// A group of elements.
pub(super) type Group = [f32; GROUP];

/// The words of a group, two in each: the earlier element's below.
#[derive(Debug, Clone)]
#[repr(align(64))]
pub(super) struct Staged(pub [u64; GROUP / 2]);

impl Staged {
    pub fn new() -> Staged {
        Staged([0; GROUP / 2])
    }
}

/// What staging learns about a group on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Facts {
    /// The largest magnitude's bits, infinities and NaN too.
    pub largest: u32,
    /// The least of the magnitudes' bits less one, in wrapping arithmetic: zeros come last.
    pub smallest_less_one: u32,
    /// OR of the magnitudes' bits.
    pub or: u32,
}

/// A vector unit, or none. The methods of all implementations give the same results.
pub(super) trait Lanes: Copy {
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

    /// Adds each word of a group to its row.
    fn scatter<const TURNS: usize>(self, staged: &Staged, tables: &mut Tables);

    /// The lowest set bit over the nonzero elements of a group of zeros and normal numbers: exponent field plus 127 plus
    /// the significand's trailing zeros, or `u32::MAX`.
    fn lowest(self, group: &Group) -> u32;
}

/// Adds two words to their rows. The row is 14 bits, so no index needs a check.
#[inline(always)]
pub(super) fn scatter_pair<const TURNS: usize>(pair: u64, place: usize, tables: &mut Tables) {
    let (one, other) = (2 * place % TURNS, (2 * place + 1) % TURNS);
    tables[one][(pair as u32 >> LOW_BITS) as usize] += (pair & 0xFFFF_FFFF) + ONE;
    tables[other][(pair >> (32 + LOW_BITS)) as usize] += (pair >> 32) + ONE;
}

/// [`Lanes::scatter`] in plain code, to be compiled for each vector unit.
#[inline(always)]
pub(super) fn scatter_all<const TURNS: usize>(staged: &Staged, tables: &mut Tables) {
    for (place, &pair) in staged.0.iter().enumerate() {
        scatter_pair::<TURNS>(pair, place, tables);
    }
}

/// [`Lanes::lowest`] in plain code, to be compiled for each vector unit.
///
/// The trailing zeros are read off the exponent of a float that is a single bit, which every vector unit can make.
#[inline(always)]
pub(super) fn lowest_of(group: &Group) -> u32 {
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
