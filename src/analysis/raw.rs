//! Exact replay of the elements themselves: any scale, and how far the rounded values are off.

use crate::float::{Cuts, Format};
use crate::tally::{Lost, Outcomes, fraction};

const MAGNITUDE: u32 = 0x7FFF_FFFF;
const INFINITY: u32 = 0x7F80_0000;

/// How far the values that stay finite are off, y/s against x.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Errors {
    /// Mean of |y/s − x| / |x| over the finite nonzero elements that stay finite; a flushed one counts 1. `None` where
    /// there is none.
    pub mean_relative_error: Option<f64>,
    /// 10·log10(Σx² / Σ(y/s − x)²) over the same elements; `None` where there is no error or no element.
    pub sqnr_db: Option<f64>,
}

/// One scale's result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RawRate {
    /// Counts of the finite nonzero elements; zeros and nonfinite ones are the sketch's.
    pub outcomes: Outcomes,
    /// What was flushed.
    pub lost: Lost,
    /// Rounding errors, where they were asked for.
    pub errors: Option<Errors>,
}

/// Sums of one scale.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Sums {
    underflow: u64,
    subnormal: u64,
    normal: u64,
    overflow: u64,
    lost_l1: f64,
    lost_l2: f64,
    relative: f64,
    error_2: f64,
    finite_2: f64,
}

/// Replays elements at several scales of one format.
///
/// Sums of floats are for display: they are taken block by block in the order of the elements, so they do not depend on
/// threads, and two partial results are joined in the order of the tensors.
#[derive(Debug, Clone)]
pub struct Raw {
    format: Format,
    scales: Vec<(f32, Cuts)>,
    sums: Vec<Sums>,
    with_errors: bool,
    l1: f64,
    l2: f64,
}

/// Elements of a block: it stays in the cache over all scales.
const BLOCK: usize = 4096;

impl Raw {
    /// Nothing replayed yet. `flush_subnormals` counts subnormal results as zero.
    pub fn new(format: Format, scales: &[f32], flush_subnormals: bool, with_errors: bool) -> Raw {
        let cuts = |&scale: &f32| {
            let mut cuts = Cuts::new(format, scale);
            if flush_subnormals {
                cuts.first_nonzero = cuts.first_normal;
            }
            (scale, cuts)
        };
        Raw {
            format,
            scales: scales.iter().map(cuts).collect(),
            sums: vec![Sums::default(); scales.len()],
            with_errors,
            l1: 0.0,
            l2: 0.0,
        }
    }

    /// Replays `values` at every scale.
    pub fn add(&mut self, values: &[f32]) {
        for block in values.chunks(BLOCK) {
            let (mut l1, mut l2) = (0.0, 0.0);
            for &x in block.iter().filter(|x| x.is_finite()) {
                let x = f64::from(x.abs());
                l1 += x;
                l2 += x * x;
            }
            self.l1 += l1;
            self.l2 += l2;
            for ((scale, cuts), sums) in self.scales.iter().zip(&mut self.sums) {
                let mut one = count(block, *cuts);
                if self.with_errors {
                    errors(block, self.format, *scale, *cuts, &mut one);
                }
                sums.join(&one);
            }
        }
    }

    /// Adds what another part of the same group gave.
    pub fn merge(&mut self, other: &Raw) {
        self.l1 += other.l1;
        self.l2 += other.l2;
        for (sums, more) in self.sums.iter_mut().zip(&other.sums) {
            sums.join(more);
        }
    }

    /// The results, in the order of the scales.
    pub fn rates(&self) -> Vec<RawRate> {
        self.sums
            .iter()
            .map(|sums| sums.rate(self.l1, self.l2, self.with_errors))
            .collect()
    }
}

impl Sums {
    fn join(&mut self, other: &Sums) {
        self.underflow += other.underflow;
        self.subnormal += other.subnormal;
        self.normal += other.normal;
        self.overflow += other.overflow;
        self.lost_l1 += other.lost_l1;
        self.lost_l2 += other.lost_l2;
        self.relative += other.relative;
        self.error_2 += other.error_2;
        self.finite_2 += other.finite_2;
    }

    fn rate(&self, l1: f64, l2: f64, with_errors: bool) -> RawRate {
        let outcomes = Outcomes {
            zero_in: 0,
            nonfinite_in: 0,
            underflow_to_zero: self.underflow,
            subnormal: self.subnormal,
            normal: self.normal,
            overflow_to_infinity: self.overflow,
        };
        let finite = self.underflow + self.subnormal + self.normal;
        RawRate {
            outcomes,
            lost: Lost {
                elements: fraction(self.underflow, outcomes.finite_nonzero()),
                l1: if l1 > 0.0 { self.lost_l1 / l1 } else { 0.0 },
                l2: if l2 > 0.0 {
                    (self.lost_l2 / l2).sqrt()
                } else {
                    0.0
                },
            },
            errors: with_errors.then(|| Errors {
                mean_relative_error: (finite > 0).then(|| self.relative / finite as f64),
                sqnr_db: (finite > 0 && self.error_2 > 0.0)
                    .then(|| 10.0 * (self.finite_2 / self.error_2).log10()),
            }),
        }
    }
}

/// Counts one block at one scale: comparisons of integers only, which compilers turn into vector code.
fn count(block: &[f32], cuts: Cuts) -> Sums {
    let overflow_from = cuts.first_overflow;
    let nonzero_from = cuts.first_nonzero.min(overflow_from);
    let normal_from = cuts.first_normal.clamp(nonzero_from, overflow_from);
    let (mut any, mut nonzero, mut normal, mut overflow, mut nonfinite) =
        (0u32, 0u32, 0u32, 0u32, 0u32);
    for &x in block {
        let magnitude = x.to_bits() & MAGNITUDE;
        any += u32::from(magnitude != 0);
        nonzero += u32::from(magnitude >= nonzero_from);
        normal += u32::from(magnitude >= normal_from);
        overflow += u32::from(magnitude >= overflow_from);
        nonfinite += u32::from(magnitude >= INFINITY);
    }
    let mut sums = Sums {
        underflow: u64::from(any - nonzero),
        subnormal: u64::from(nonzero - normal),
        normal: u64::from(normal - overflow),
        overflow: u64::from(overflow - nonfinite),
        ..Sums::default()
    };
    if sums.underflow > 0 {
        for &x in block {
            let magnitude = x.to_bits() & MAGNITUDE;
            if magnitude < nonzero_from {
                let x = f64::from(f32::from_bits(magnitude));
                sums.lost_l1 += x;
                sums.lost_l2 += x * x;
            }
        }
    }
    sums
}

/// Adds one block's rounding errors at one scale.
fn errors(block: &[f32], format: Format, scale: f32, cuts: Cuts, sums: &mut Sums) {
    let s = f64::from(scale);
    for &x in block {
        let magnitude = x.to_bits() & MAGNITUDE;
        if magnitude == 0 || magnitude >= cuts.first_overflow.min(INFINITY) {
            continue;
        }
        let x_64 = f64::from(x);
        let y = if magnitude < cuts.first_nonzero {
            0.0
        } else {
            quantize(format, x * scale)
        };
        let error = f64::from(y) / s - x_64;
        sums.relative += (error / x_64).abs();
        sums.error_2 += error * error;
        sums.finite_2 += x_64 * x_64;
    }
}

/// The rounded value; `half` converts the two 16-bit formats, with the CPU's instruction where it has one, and is
/// proven equal to [`Format::quantize`] on all 2^32 inputs.
#[inline]
fn quantize(format: Format, value: f32) -> f32 {
    match format.name {
        "fp16" => half::f16::from_f32(value).to_f32(),
        "bf16" => half::bf16::from_f32(value).to_f32(),
        _ => format.quantize(value),
    }
}
