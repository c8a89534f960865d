//! Number formats as data, and what rounding into one does to a value.
//!
//! A [`Format`] is a record: significand bits, exponent range, what happens above the largest finite value. Every
//! threshold is derived from it. Rounding is to nearest, ties to even (IEEE 754-2019 §4.3.1).
//!
//! What happens to a gradient `x` at loss scale `s` is
//!
//! ```text
//! y = round_to_format(fl32(x * s))        x an f32, s an f32; the product is rounded to f32 first, as hardware does
//! ```
//!
//! and `y` falls in exactly one [`Outcome`]. For FP16:
//!
//! ```text
//!        0        2^-25          2^-14 - 2^-25            65520
//!  zero_in | underflow | subnormal      |     normal        | overflow_to_infinity
//!          |  (tie at 2^-25 goes to 0)  |                   |
//! ```
//!
//! Two independent ways say the same and are tested against each other: [`Format::quantize`] rounds a value with
//! integer arithmetic, and [`Cuts`] finds the three values of `|x|` where the outcome changes at a scale. The product
//! and the rounding are monotone in `|x|`, so three cuts decide every element without multiplying.

mod cuts;
mod format;
mod outcome;

pub use cuts::Cuts;
pub use format::{BF16, FORMATS, FP8_E4M3FN, FP8_E5M2, FP16, Format, ParseFormatError, Top};
pub use outcome::Outcome;

/// The largest finite FP16 value, (2 − 2^-10)·2^15.
pub const FP16_MAX: f32 = 65504.0;
/// The smallest magnitude that FP16 rounds to infinity, (2 − 2^-11)·2^15: halfway between 65504 and 2^16, and the tie
/// goes to the even code, which is infinity. Its f32 bits are `0x477FF000`.
pub const FP16_OVERFLOW: f32 = 65520.0;
/// The smallest positive normal FP16 value, 2^-14.
pub const FP16_MIN_NORMAL: f32 = 6.103_515_6e-5;
/// The smallest positive FP16 value, 2^-24, a subnormal.
pub const FP16_MIN_SUBNORMAL: f32 = 5.960_464_5e-8;
/// The largest magnitude that FP16 rounds to zero, 2^-25: halfway between 0 and 2^-24, and the tie goes to zero.
pub const FP16_UNDERFLOW: f32 = 2.980_232_2e-8;

/// 2^`exponent` as an f64, exactly, for −1074 ≤ `exponent` ≤ 1023; 0 below, infinity above.
pub fn exp2(exponent: i32) -> f64 {
    match exponent {
        ..=-1075 => 0.0,
        -1074..=-1023 => f64::from_bits(1 << (exponent + 1074)),
        -1022..=1023 => f64::from_bits(((exponent + 1023) as u64) << 52),
        1024.. => f64::INFINITY,
    }
}

/// log2 of `value` where it is a power of two (f64 subnormals included), else `None`.
pub fn exact_log2(value: f64) -> Option<i32> {
    if value.is_nan() || value <= 0.0 || value.is_infinite() {
        return None;
    }
    let bits = value.to_bits();
    let (field, fraction) = ((bits >> 52) as i32, bits & ((1 << 52) - 1));
    match field {
        0 => fraction
            .is_power_of_two()
            .then(|| fraction.trailing_zeros() as i32 - 1074),
        _ => (fraction == 0).then_some(field - 1023),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp16_constants_are_the_derived_thresholds() {
        assert_eq!(FP16_MAX, FP16.largest_finite());
        assert_eq!(FP16_OVERFLOW.to_bits(), FP16.first_overflow_bits());
        assert_eq!(FP16_OVERFLOW.to_bits(), 0x477F_F000);
        assert_eq!(FP16_UNDERFLOW.to_bits(), FP16.last_zero_bits());
        assert_eq!(FP16_MIN_NORMAL, FP16.smallest_normal());
        assert_eq!(FP16_MIN_SUBNORMAL, FP16.smallest_subnormal());
    }

    #[test]
    fn exp2_and_exact_log2_are_inverse() {
        for exponent in -1074..=1023 {
            assert_eq!(exact_log2(exp2(exponent)), Some(exponent));
            if exponent > -1022 {
                assert_eq!(exp2(exponent), 2f64.powi(exponent));
            }
        }
        for value in [0.0, -1.0, 3.0, f64::NAN, f64::INFINITY, 1.5e-323] {
            assert_eq!(exact_log2(value), None);
        }
    }
}
