//! What a dump holds: names, shapes, element types, and the elements as chunks.

use std::fmt;

use half::{bf16, f16};

/// An element type that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE binary32.
    F32,
    /// IEEE binary64; rounded to f32 (to nearest, ties to even) before anything else happens.
    F64,
    /// OCP 8-bit, 4 exponent bits, no infinity; widened to f32, which holds every value.
    Fp8E4m3fn,
    /// OCP 8-bit, 5 exponent bits; widened to f32.
    Fp8E5m2,
    /// 8-bit, 4 exponent bits, bias 8, no infinity and no negative zero (AMD, Graphcore); widened to f32.
    Fp8E4m3fnuz,
    /// 8-bit, 5 exponent bits, bias 16, no infinity and no negative zero; widened to f32.
    Fp8E5m2fnuz,
}

impl Dtype {
    /// Bytes an element takes in the file.
    pub const fn size_bytes(self) -> u64 {
        match self {
            Dtype::F64 => 8,
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::Fp8E4m3fn | Dtype::Fp8E5m2 | Dtype::Fp8E4m3fnuz | Dtype::Fp8E5m2fnuz => 1,
        }
    }

    /// The name in messages and JSON: `f16`, `bf16`, `f32`, `f64`, `fp8-e4m3fn`, …
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::F32 => "f32",
            Dtype::F64 => "f64",
            Dtype::Fp8E4m3fn => "fp8-e4m3fn",
            Dtype::Fp8E5m2 => "fp8-e5m2",
            Dtype::Fp8E4m3fnuz => "fp8-e4m3fnuz",
            Dtype::Fp8E5m2fnuz => "fp8-e5m2fnuz",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A tensor that can be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMeta {
    /// Its name: the stem of an `.npy`, the member of an `.npz`, the key of a `.safetensors`, the keys and indices
    /// that lead to it in a `.pt`, joined with dots.
    pub name: String,
    /// The element type in the file.
    pub dtype: Dtype,
    /// The shape; empty for a single number.
    pub shape: Vec<u64>,
    /// The product of the shape: what [`read`](super::OpenDump::read) hands out.
    pub elements: u64,
}

/// A tensor, or something like one, that is left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Its name.
    pub name: String,
    /// Its element type, in the file's own words.
    pub dtype: String,
    /// Why it is left out.
    pub why: SkippedBecause,
}

/// Why a tensor is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SkippedBecause {
    /// Integers or booleans have no gradient.
    Integer,
    /// Complex numbers.
    Complex,
    /// Text, dates, raw bytes, structured records.
    NotNumbers,
    /// A float that is not read: long double, 4- and 6-bit floats, scale exponents.
    UnreadFloat,
    /// A sparse, quantized or otherwise packed tensor, or one of another library inside a `.pt`.
    Packed,
    /// Bytes behind the array of an `.npy`, or a member of an `.npz` that is not an array.
    Trailing,
}

impl fmt::Display for SkippedBecause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SkippedBecause::Integer => "integers and booleans have no gradient",
            SkippedBecause::Complex => "complex numbers are not read",
            SkippedBecause::NotNumbers => "it holds no numbers",
            SkippedBecause::UnreadFloat => "this float type is not read",
            SkippedBecause::Packed => "this kind of tensor is not read",
            SkippedBecause::Trailing => "it is not an array",
        })
    }
}

/// A bounded run of a tensor's elements, in any order.
///
/// f64 is rounded to f32 first; fp8 is widened to f32. A chunk is never empty.
#[derive(Clone, Copy, Debug)]
pub enum Chunk<'a> {
    /// f32, f64 or fp8 elements.
    F32(&'a [f32]),
    /// f16 elements as they are.
    F16(&'a [f16]),
    /// bf16 elements as they are.
    Bf16(&'a [bf16]),
}

impl Chunk<'_> {
    /// How many elements it holds.
    pub fn len(&self) -> usize {
        match self {
            Chunk::F32(values) => values.len(),
            Chunk::F16(values) => values.len(),
            Chunk::Bf16(values) => values.len(),
        }
    }

    /// Whether it holds none; no reader hands out such a chunk.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements widened to f32, exactly.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Chunk::F32(values) => values.to_vec(),
            Chunk::F16(values) => values.iter().map(|x| x.to_f32()).collect(),
            Chunk::Bf16(values) => values.iter().map(|x| x.to_f32()).collect(),
        }
    }
}

/// How the elements lie in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Encoding {
    pub dtype: Dtype,
    pub big_endian: bool,
}

impl Encoding {
    pub fn little(dtype: Dtype) -> Encoding {
        Encoding {
            dtype,
            big_endian: false,
        }
    }
}

/// Product of a shape, `None` where it or its bytes pass 2^63. A zero anywhere makes it 0, whatever the rest.
pub(crate) fn elements_of(shape: &[u64], size_bytes: u64) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d))?;
    let bytes = elements.checked_mul(size_bytes.max(1))?;
    (bytes < 1 << 63).then_some(elements)
}

/// An 8-bit float with `mantissa` fraction bits and this bias, as f32; every value is exact.
///
/// `fnuz`: the code of negative zero is the only NaN. Otherwise E4M3FN has NaN at all ones and E5M2 follows IEEE.
pub(crate) fn widen_fp8(code: u8, dtype: Dtype) -> f32 {
    let (fraction_bits, bias, fnuz) = match dtype {
        Dtype::Fp8E4m3fn => (3u32, 7i32, false),
        Dtype::Fp8E4m3fnuz => (3, 8, true),
        Dtype::Fp8E5m2fnuz => (2, 16, true),
        _ => return f16::from_bits(u16::from(code) << 8).to_f32(), // E5M2 is the upper byte of binary16
    };
    if (fnuz && code == 0x80) || (!fnuz && code & 0x7f == 0x7f) {
        return f32::NAN;
    }
    let exponent = i32::from((code & 0x7f) >> fraction_bits);
    let fraction = f32::from(code & ((1 << fraction_bits) - 1)) / (1u32 << fraction_bits) as f32;
    let magnitude = if exponent == 0 {
        fraction * f32::powi(2.0, 1 - bias)
    } else {
        (1.0 + fraction) * f32::powi(2.0, exponent - bias)
    };
    if code & 0x80 != 0 {
        -magnitude
    } else {
        magnitude
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_codes_have_their_published_values() {
        // OCP OFP8 table 2: largest, smallest normal, smallest subnormal.
        assert_eq!(widen_fp8(0x7e, Dtype::Fp8E4m3fn), 448.0);
        assert_eq!(widen_fp8(0x08, Dtype::Fp8E4m3fn), f32::powi(2.0, -6));
        assert_eq!(widen_fp8(0x01, Dtype::Fp8E4m3fn), f32::powi(2.0, -9));
        assert!(widen_fp8(0xff, Dtype::Fp8E4m3fn).is_nan());
        assert_eq!(widen_fp8(0x7b, Dtype::Fp8E5m2), 57344.0);
        assert_eq!(widen_fp8(0x7c, Dtype::Fp8E5m2), f32::INFINITY);
        assert_eq!(widen_fp8(0x01, Dtype::Fp8E5m2), f32::powi(2.0, -16));
        assert_eq!(widen_fp8(0x7f, Dtype::Fp8E4m3fnuz), 240.0);
        assert_eq!(widen_fp8(0x7f, Dtype::Fp8E5m2fnuz), 57344.0);
        assert!(widen_fp8(0x80, Dtype::Fp8E5m2fnuz).is_nan());
        assert_eq!(
            widen_fp8(0x80, Dtype::Fp8E4m3fn).to_bits(),
            (-0.0f32).to_bits()
        );
    }

    #[test]
    fn a_shape_beyond_63_bits_is_refused_unless_a_zero_empties_it() {
        assert_eq!(elements_of(&[1 << 62, 2], 1), None);
        assert_eq!(elements_of(&[1 << 60], 8), None);
        assert_eq!(elements_of(&[u64::MAX, u64::MAX, 0], 8), Some(0));
        assert_eq!(elements_of(&[], 4), Some(1));
        assert_eq!(elements_of(&[3, 5], 4), Some(15));
    }
}
