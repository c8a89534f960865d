//! The bins of a sketch: 277 binades of 22 sub-bins.

/// Exponent of the smallest positive f32, 2^-149; f32 subnormals are normalised by their leading bit.
pub const MIN_EXPONENT: i32 = -149;
/// Binades from 2^-149 to 2^127.
pub const BINADES: usize = 277;
/// Sub-bins a binade.
pub const SUB_BINS: usize = 22;
/// All bins.
pub const BINS: usize = BINADES * SUB_BINS;

/// First significand field of each sub-bin, and one past the last field at the end.
///
/// Sub-bin `i` holds the fields in `SUB_BIN_EDGES[i]..SUB_BIN_EDGES[i + 1]`.
pub const SUB_BIN_EDGES: [u32; SUB_BINS + 1] = [
    0x00_0000, 0x00_0001, 0x08_0000, 0x10_0000, 0x18_0000, 0x20_0000, 0x28_0000, 0x30_0000,
    0x38_0000, 0x40_0000, 0x48_0000, 0x50_0000, 0x58_0000, 0x60_0000, 0x68_0000, 0x68_0001,
    0x70_0000, 0x78_0000, 0x7F_0000, 0x7F_8000, 0x7F_E000, 0x7F_F000, 0x80_0000,
];

/// The lower edge that a bin's sum is counted from: sub-bins 1 and 15 count from the sixteenth they belong to.
pub(crate) const SUB_BIN_BASES: [u32; SUB_BINS] = {
    let mut bases = [0; SUB_BINS];
    let mut i = 0;
    while i < SUB_BINS {
        bases[i] = SUB_BIN_EDGES[i];
        i += 1;
    }
    bases[1] = 0;
    bases[15] = 0x68_0000;
    bases
};

/// Splits the bits of a positive finite magnitude into exponent and 23-bit significand field: `2^e * (1 + field/2^23)`.
///
/// Subnormals are normalised. `magnitude` is nonzero.
#[inline]
pub fn split(magnitude: u32) -> (i32, u32) {
    if magnitude >= 1 << 23 {
        ((magnitude >> 23) as i32 - 127, magnitude & 0x7F_FFFF)
    } else {
        let leading = 31 - magnitude.leading_zeros();
        (
            leading as i32 + MIN_EXPONENT,
            (magnitude << (23 - leading)) & 0x7F_FFFF,
        )
    }
}

/// The sub-bin of a significand field.
#[inline]
pub(crate) fn sub_bin_of(field: u32) -> usize {
    match field {
        0 => 0,
        0x7F_F000.. => 21,
        0x7F_E000.. => 20,
        0x7F_8000.. => 19,
        0x7F_0000.. => 18,
        0x78_0000.. => 17,
        0x70_0000.. => 16,
        0x68_0001.. => 15,
        0x68_0000 => 14,
        _ => (field >> 19) as usize + 1,
    }
}

/// The bin of a positive finite magnitude, given by its f32 bits (nonzero, below `0x7F800000`).
#[inline]
pub fn bin_of(magnitude: u32) -> usize {
    let (exponent, field) = split(magnitude);
    (exponent - MIN_EXPONENT) as usize * SUB_BINS + sub_bin_of(field)
}

/// One nonempty bin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bin {
    /// `(e + 149) * 22 + sub-bin`.
    pub index: u16,
    /// Elements in it.
    pub count: u64,
    /// Sum over them of the significand field minus the sub-bin's lower edge.
    pub sum: u64,
}

impl Bin {
    /// Exponent of the bin's binade.
    pub fn exponent(self) -> i32 {
        i32::from(self.index) / SUB_BINS as i32 + MIN_EXPONENT
    }

    /// Sub-bin within the binade.
    pub fn sub_bin(self) -> usize {
        usize::from(self.index) % SUB_BINS
    }

    /// f32 bits of the smallest and the largest magnitude that the bin can hold.
    ///
    /// Below 2^-126 an f32 has fewer significand bits; the limits are then those of the f32 values that exist, and a bin
    /// in which none exists gives `None`.
    pub fn limits(self) -> Option<(u32, u32)> {
        let (exponent, sub) = (self.exponent(), self.sub_bin());
        let (first, last) = (SUB_BIN_EDGES[sub], SUB_BIN_EDGES[sub + 1] - 1);
        if exponent >= -126 {
            let high = ((exponent + 127) as u32) << 23;
            return Some((high | first, high | last));
        }
        // A subnormal's field keeps only its top (exponent + 149) bits.
        let dropped = (23 - (exponent - MIN_EXPONENT)) as u32;
        let low = (1 << 23 | first).div_ceil(1 << dropped);
        let high = (1 << 23 | last) >> dropped;
        (low <= high).then_some((low, high))
    }

    /// Σ |x| over the bin, to within one rounding.
    pub fn l1(self) -> f64 {
        self.significands() as f64 * crate::float::exp2(self.exponent() - 23)
    }

    /// Σ of the 24-bit significands, exact.
    pub fn significands(self) -> u128 {
        u128::from(self.count) * u128::from(1 << 23 | SUB_BIN_BASES[self.sub_bin()])
            + u128::from(self.sum)
    }

    /// Σ x² over the bin, within 7e-4 of the truth; exact for one element and for the one-valued sub-bins.
    ///
    /// The mean is exact. The spread around it is taken as that of a uniform density over the sub-bin, at most a
    /// sixteenth of the binade wide: w²/12, which is wrong by at most w²/6 of the mean square.
    pub fn l2(self) -> f64 {
        let (n, unit) = (self.count as f64, crate::float::exp2(self.exponent() - 23));
        let sub = self.sub_bin();
        let width = f64::from(SUB_BIN_EDGES[sub + 1] - SUB_BIN_EDGES[sub] - 1);
        let mean = self.significands() as f64 / n;
        (n * mean * mean + (n - 1.0) * width * width / 12.0) * unit * unit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sub_bins_tile_the_field_in_order() {
        for sub in 0..SUB_BINS {
            assert!(SUB_BIN_EDGES[sub] < SUB_BIN_EDGES[sub + 1]);
            assert_eq!(sub_bin_of(SUB_BIN_EDGES[sub]), sub);
            assert_eq!(sub_bin_of(SUB_BIN_EDGES[sub + 1] - 1), sub);
        }
    }

    #[test]
    fn limits_are_the_first_and_last_magnitude_of_each_bin() {
        let mut next = 1;
        for index in 0..BINS as u16 {
            let Some((low, high)) = (Bin {
                index,
                count: 1,
                sum: 0,
            })
            .limits() else {
                continue;
            };
            assert_eq!(low, next, "bin {index}");
            assert_eq!(bin_of(low), usize::from(index));
            assert_eq!(bin_of(high), usize::from(index));
            next = high + 1;
        }
        assert_eq!(next, 0x7F80_0000);
    }

    #[test]
    fn every_rounding_threshold_is_a_bin_edge() {
        for format in crate::float::FORMATS {
            let over = format.first_overflow_bits();
            for first in [
                format.last_zero_bits() + 1,
                format.first_normal_bits(),
                over,
            ] {
                assert_ne!(
                    bin_of(first),
                    bin_of(first - 1),
                    "{} {first:#x}",
                    format.name
                );
            }
        }
    }
}
