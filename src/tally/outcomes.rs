//! What a sketch says about one format at one scale.

use super::Sketch;
use crate::float::{Cuts, Format, exact_log2};

/// Counts of the six outcomes; they add up to the number of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outcomes {
    /// ±0 in.
    pub zero_in: u64,
    /// ±inf or NaN in.
    pub nonfinite_in: u64,
    /// Nonzero in, ±0 out.
    pub underflow_to_zero: u64,
    /// Below the smallest normal value.
    pub subnormal: u64,
    /// Normal.
    pub normal: u64,
    /// Finite in, infinity (or NaN) out.
    pub overflow_to_infinity: u64,
}

impl Outcomes {
    /// Finite nonzero elements: the four outcomes that a scale decides.
    pub fn finite_nonzero(&self) -> u64 {
        self.underflow_to_zero + self.subnormal + self.normal + self.overflow_to_infinity
    }

    /// All elements.
    pub fn elements(&self) -> u64 {
        self.zero_in + self.nonfinite_in + self.finite_nonzero()
    }

    /// Share of the finite nonzero elements that became zero; 0 where there are none.
    pub fn underflow_fraction(&self) -> f64 {
        fraction(self.underflow_to_zero, self.finite_nonzero())
    }

    /// Share of the finite nonzero elements that overflowed; 0 where there are none.
    pub fn overflow_fraction(&self) -> f64 {
        fraction(self.overflow_to_infinity, self.finite_nonzero())
    }
}

/// `part / whole`, 0 where `whole` is 0.
pub(crate) fn fraction(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

/// How much of the gradient's norm was flushed to zero; of the finite elements, x being the f32 input.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Lost {
    /// Share of the nonzero elements.
    pub elements: f64,
    /// Σ|lost| / Σ|x|.
    pub l1: f64,
    /// sqrt(Σ lost² / Σ x²).
    pub l2: f64,
}

/// Why counts at a scale are a point between bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhyNotExact {
    /// The scale cuts through a sub-bin.
    NotPowerOfTwo,
    /// The product itself is rounded as an f32 subnormal before the format rounds it again.
    F32SubnormalProduct,
    /// The counts come from a histogram with bins of its own.
    Histogram,
}

impl WhyNotExact {
    /// The word in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            WhyNotExact::NotPowerOfTwo => "not_power_of_two",
            WhyNotExact::F32SubnormalProduct => "f32_subnormal_product",
            WhyNotExact::Histogram => "histogram",
        }
    }
}

/// The outcomes of one sketch, or of raw data, at one scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Replayed {
    /// The f32 that was multiplied by.
    pub loss_scale: f32,
    /// The counts; a point estimate where `why_not_exact` is set.
    pub outcomes: Outcomes,
    /// Least and most of each count, equal to `outcomes` where those are exact.
    pub bounds: (Outcomes, Outcomes),
    /// What was flushed.
    pub lost: Lost,
    /// `None` where the counts are exact.
    pub why_not_exact: Option<WhyNotExact>,
}

impl Sketch {
    /// Replays every element through `format` at `loss_scale`, from the counts alone.
    ///
    /// Exact at every power of two (but see [`WhyNotExact::F32SubnormalProduct`]); elsewhere wherever no nonempty bin is
    /// cut. `flush_subnormals` counts subnormal results as zero, as some accelerators do.
    pub fn replay(&self, format: Format, loss_scale: f32, flush_subnormals: bool) -> Replayed {
        let mut cuts = Cuts::new(format, loss_scale);
        if flush_subnormals {
            cuts.first_nonzero = cuts.first_normal;
        }
        // Class 0 underflows, 1 is subnormal, 2 normal, 3 overflows; the cuts are ordered except at the far ends.
        let class = |magnitude: u32| {
            if magnitude >= cuts.first_overflow {
                3
            } else {
                usize::from(magnitude >= cuts.first_nonzero)
                    + usize::from(magnitude >= cuts.first_normal && magnitude >= cuts.first_nonzero)
            }
        };
        let (mut low, mut point, mut high) = ([0u64; 4], [0u64; 4], [0u64; 4]);
        let (mut l1, mut l2, mut lost_l1, mut lost_l2) = (0.0, 0.0, 0.0, 0.0);
        let mut exact = true;
        for bin in &self.bins {
            let Some((first, last)) = bin.limits() else {
                continue;
            };
            let (first, last) = (first.max(self.smallest_nonzero), last.min(self.largest));
            let (bin_l1, bin_l2) = (bin.l1(), bin.l2());
            l1 += bin_l1;
            l2 += bin_l2;
            let (from, to) = (class(first), class(last));
            if from == to {
                low[from] += bin.count;
                point[from] += bin.count;
                high[from] += bin.count;
                if from == 0 {
                    lost_l1 += bin_l1;
                    lost_l2 += bin_l2;
                }
                continue;
            }
            exact = false;
            // The share of the bin's magnitudes below each cut stands for the share of its elements.
            let width = f64::from(last - first) + 1.0;
            let below = |cut: u32| {
                ((f64::from(cut.clamp(first, last + 1) - first) / width) * bin.count as f64) as u64
            };
            let zero = below(cuts.first_nonzero.min(cuts.first_overflow));
            let subnormal = below(
                cuts.first_normal
                    .max(cuts.first_nonzero)
                    .min(cuts.first_overflow),
            )
            .max(zero);
            let normal = below(cuts.first_overflow).max(subnormal);
            for (class, n) in [
                zero,
                subnormal - zero,
                normal - subnormal,
                bin.count - normal,
            ]
            .into_iter()
            .enumerate()
            {
                point[class] += n;
            }
            for count in &mut high[from..=to] {
                *count += bin.count;
            }
            let share = zero as f64 / bin.count as f64;
            lost_l1 += share * bin_l1;
            lost_l2 += share * bin_l2;
        }
        let outcomes =
            |[underflow_to_zero, subnormal, normal, overflow_to_infinity]: [u64; 4]| Outcomes {
                zero_in: self.zeros,
                nonfinite_in: self.nonfinite(),
                underflow_to_zero,
                subnormal,
                normal,
                overflow_to_infinity,
            };
        let counts = outcomes(point);
        Replayed {
            loss_scale,
            outcomes: counts,
            bounds: (outcomes(low), outcomes(high)),
            lost: Lost {
                elements: counts.underflow_fraction(),
                l1: if l1 > 0.0 { lost_l1 / l1 } else { 0.0 },
                l2: if l2 > 0.0 { (lost_l2 / l2).sqrt() } else { 0.0 },
            },
            why_not_exact: match (exact, exact_log2(f64::from(loss_scale))) {
                (true, _) => None,
                (false, None) => Some(WhyNotExact::NotPowerOfTwo),
                (false, Some(_)) => Some(WhyNotExact::F32SubnormalProduct),
            },
        }
    }
}
