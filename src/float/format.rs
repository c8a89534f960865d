//! A small floating-point format as a record, its thresholds and its exact conversion.

use super::Outcome;

/// What a format does above its largest finite value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Top {
    /// IEEE 754: the top exponent field holds infinity and NaN.
    Infinity,
    /// OCP "FN": the top exponent field holds normal values, its last significand is NaN and there is no infinity;
    /// what does not fit turns into NaN (the non-saturating rule), counted as overflow.
    Nan,
}

/// A binary floating-point format with at most 16 bits, as data.
///
/// All thresholds are f32 values, which hold every value and every rounding boundary of the four formats exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    /// The name in flags and JSON.
    pub name: &'static str,
    /// Bits of a code.
    pub bits: u32,
    /// Significand bits, the hidden one included: 11 in FP16.
    pub significand_bits: u32,
    /// Exponent of the smallest normal value: −14 in FP16.
    pub min_exponent: i32,
    /// Exponent of the largest finite value: 15 in FP16.
    pub max_exponent: i32,
    /// What lies above the largest finite value.
    pub top: Top,
}

/// IEEE 754 binary16.
pub const FP16: Format = Format {
    name: "fp16",
    bits: 16,
    significand_bits: 11,
    min_exponent: -14,
    max_exponent: 15,
    top: Top::Infinity,
};
/// bfloat16: the upper half of an f32.
pub const BF16: Format = Format {
    name: "bf16",
    bits: 16,
    significand_bits: 8,
    min_exponent: -126,
    max_exponent: 127,
    top: Top::Infinity,
};
/// OCP 8-bit E5M2 (Micikevicius et al. 2022, arXiv 2209.05433, table 1).
pub const FP8_E5M2: Format = Format {
    name: "fp8-e5m2",
    bits: 8,
    significand_bits: 3,
    min_exponent: -14,
    max_exponent: 15,
    top: Top::Infinity,
};
/// OCP 8-bit E4M3, the variant without infinity (same source): its largest value is 448, and above 464 lies NaN.
pub const FP8_E4M3FN: Format = Format {
    name: "fp8-e4m3fn",
    bits: 8,
    significand_bits: 4,
    min_exponent: -6,
    max_exponent: 8,
    top: Top::Nan,
};

/// Every format, in the order in which `gradscale formats` lists them.
pub const FORMATS: [Format; 4] = [FP16, BF16, FP8_E5M2, FP8_E4M3FN];

/// A format's name that is none of ours.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "parsing format {found:?}: found no such format, expected one of fp16, bf16, fp8-e5m2, fp8-e4m3fn"
)]
pub struct ParseFormatError {
    /// The text given.
    pub found: String,
}

const F32_SIGNIFICAND_FIELD: u32 = 0x007F_FFFF;
const F32_MAGNITUDE: u32 = 0x7FFF_FFFF;
const F32_INFINITY: u32 = 0x7F80_0000;

impl Format {
    /// Finds a format by its name.
    ///
    /// # Errors
    /// When no format has that name.
    pub fn parse(name: &str) -> Result<Format, ParseFormatError> {
        FORMATS
            .into_iter()
            .find(|f| f.name == name)
            .ok_or_else(|| ParseFormatError {
                found: name.to_owned(),
            })
    }

    /// The largest finite value: 65504 in FP16, 448 in E4M3FN.
    pub fn largest_finite(self) -> f32 {
        let all_ones = (1u32 << self.significand_bits) - 1;
        let significand = match self.top {
            Top::Infinity => all_ones,
            Top::Nan => all_ones - 1,
        };
        (f64::from(significand) * super::exp2(self.max_exponent - self.significand_bits as i32 + 1))
            as f32
    }

    /// The smallest positive normal value, 2^`min_exponent`.
    pub fn smallest_normal(self) -> f32 {
        super::exp2(self.min_exponent) as f32
    }

    /// The smallest positive value, a subnormal: 2^-24 in FP16.
    pub fn smallest_subnormal(self) -> f32 {
        super::exp2(self.min_exponent - self.significand_bits as i32 + 1) as f32
    }

    /// f32 bits of the largest magnitude that rounds to zero: half the smallest subnormal, where the tie goes to the
    /// even code, zero. 2^-25 in FP16.
    pub fn last_zero_bits(self) -> u32 {
        (super::exp2(self.min_exponent - self.significand_bits as i32) as f32).to_bits()
    }

    /// f32 bits of the smallest magnitude that rounds to a normal value: half a subnormal step below `smallest_normal`,
    /// where the tie goes up because the smallest normal's code is even. 2^-14 − 2^-25 in FP16.
    pub fn first_normal_bits(self) -> u32 {
        let half_step = super::exp2(self.min_exponent - self.significand_bits as i32);
        ((f64::from(self.smallest_normal()) - half_step) as f32).to_bits()
    }

    /// f32 bits of the smallest magnitude that rounds above the largest finite value.
    ///
    /// With infinity: half a step above the largest value, and the tie goes to infinity, whose code is even (65520 in
    /// FP16). Without (E4M3FN): the largest value's code is even and takes the tie at 464, so the next f32 is the first.
    pub fn first_overflow_bits(self) -> u32 {
        let half_step = super::exp2(self.max_exponent - self.significand_bits as i32);
        let halfway = ((f64::from(self.largest_finite()) + half_step) as f32).to_bits();
        match self.top {
            Top::Infinity => halfway,
            Top::Nan => halfway + 1,
        }
    }

    /// The code of `value` rounded to nearest, ties to even: the slow reference, in integers.
    ///
    /// NaN becomes the quiet NaN of the format, with the sign kept; where there is no infinity, what does not fit
    /// becomes NaN as well.
    pub fn code(self, value: f32) -> u16 {
        let bits = value.to_bits();
        let magnitude = bits & F32_MAGNITUDE;
        let sign = ((bits >> 31) as u16) << (self.bits - 1);
        let field_bits = self.significand_bits - 1;
        let infinity = ((self.max_exponent - self.min_exponent + 2) as u16) << field_bits;
        let (over, nan) = match self.top {
            Top::Infinity => (infinity, infinity | 1 << (field_bits - 1)),
            Top::Nan => ((1 << (self.bits - 1)) - 1, (1 << (self.bits - 1)) - 1),
        };
        if magnitude > F32_INFINITY {
            return sign | nan;
        }
        if magnitude == F32_INFINITY {
            return sign | over;
        }
        if magnitude == 0 {
            return sign;
        }
        // |value| = significand * 2^exponent, the significand an integer below 2^24.
        let (significand, exponent) = match magnitude >> 23 {
            0 => (magnitude, -149),
            e => (magnitude & F32_SIGNIFICAND_FIELD | 1 << 23, e as i32 - 150),
        };
        // One unit in the last place of the result is 2^ulp: that of its binade, or of the subnormals below.
        let binade = 31 - significand.leading_zeros() as i32 + exponent;
        let ulp = binade.max(self.min_exponent) - field_bits as i32;
        let shift = ulp - exponent;
        let steps = match shift {
            ..=0 => u64::from(significand) << -shift,
            26.. => 0, // the significand is below 2^24, less than half a step
            1..=25 => {
                let kept = u64::from(significand) >> shift;
                let rest = u64::from(significand) & ((1 << shift) - 1);
                let half = 1u64 << (shift - 1);
                kept + u64::from(rest > half || (rest == half && kept & 1 == 1))
            }
        };
        // `steps` counts units of 2^ulp, the hidden bit included. Adding it to the exponent field below its binade's
        // carries by itself: a subnormal that rounds up becomes the smallest normal, 1.11… becomes 10.0….
        let exponent_field = (binade.max(self.min_exponent) - self.min_exponent) as u64;
        let code = (exponent_field << field_bits) + steps;
        if code >= u64::from(over) {
            sign | over
        } else {
            sign | code as u16
        }
    }

    /// The value of a code; exact, every value of these formats is an f32.
    pub fn value(self, code: u16) -> f32 {
        let field_bits = self.significand_bits - 1;
        let magnitude = code & ((1u32 << (self.bits - 1)) - 1) as u16;
        let sign = if code >> (self.bits - 1) & 1 == 1 {
            -1.0
        } else {
            1.0
        };
        let (exponent_field, field) = (
            i32::from(magnitude >> field_bits),
            u32::from(magnitude) & ((1 << field_bits) - 1),
        );
        let top_field = self.max_exponent - self.min_exponent + 2;
        match self.top {
            Top::Infinity if exponent_field == top_field => {
                return if field == 0 {
                    f32::INFINITY.copysign(sign)
                } else {
                    f32::NAN.copysign(sign)
                };
            }
            Top::Nan if u32::from(magnitude) == (1 << (self.bits - 1)) - 1 => {
                return f32::NAN.copysign(sign);
            }
            _ => {}
        }
        let (significand, exponent) = match exponent_field {
            0 => (field, self.min_exponent),
            e => (field | 1 << field_bits, self.min_exponent + e - 1),
        };
        sign * (f64::from(significand) * super::exp2(exponent - field_bits as i32)) as f32
    }

    /// `value` rounded into the format and back: the slow reference that everything fast is tested against.
    pub fn quantize(self, value: f32) -> f32 {
        self.value(self.code(value))
    }

    /// The outcome of `value` at `loss_scale`, by multiplying and rounding it.
    ///
    /// `loss_scale` is positive and finite; the product is rounded to f32 before it is rounded to the format.
    pub fn outcome(self, value: f32, loss_scale: f32) -> Outcome {
        if !value.is_finite() {
            return Outcome::NonfiniteIn;
        }
        if value == 0.0 {
            return Outcome::ZeroIn;
        }
        let result = self.quantize(value * loss_scale);
        if !result.is_finite() {
            Outcome::OverflowToInfinity
        } else if result == 0.0 {
            Outcome::UnderflowToZero
        } else if result.abs() < self.smallest_normal() {
            Outcome::Subnormal
        } else {
            Outcome::Normal
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_finds_each_and_names_the_choices() {
        for format in FORMATS {
            assert_eq!(Format::parse(format.name), Ok(format));
        }
        let message = Format::parse("fp17").unwrap_err().to_string();
        assert!(
            message.contains("fp17") && message.contains("fp8-e4m3fn"),
            "{message}"
        );
    }

    #[test]
    fn e4m3fn_keeps_464_and_loses_the_next_f32() {
        assert_eq!(FP8_E4M3FN.largest_finite(), 448.0);
        assert_eq!(FP8_E4M3FN.quantize(464.0), 448.0);
        assert!(FP8_E4M3FN.quantize(464.0f32.next_up()).is_nan());
        assert_eq!(FP8_E4M3FN.first_overflow_bits(), 464.0f32.to_bits() + 1);
    }

    #[test]
    fn ties_go_to_the_even_code() {
        assert_eq!(FP16.quantize(2f32.powi(-25)), 0.0);
        assert_eq!(FP16.quantize(2f32.powi(-25).next_up()), 2f32.powi(-24));
        assert_eq!(FP16.quantize(3.0 * 2f32.powi(-25)), 2f32.powi(-23));
        assert_eq!(FP16.quantize(65520.0f32.next_down()), 65504.0);
        assert_eq!(FP16.quantize(65520.0), f32::INFINITY);
        assert_eq!(FP16.quantize(-65520.0), f32::NEG_INFINITY);
    }
}
