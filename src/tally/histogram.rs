//! Histograms that others made: counts in bins with edges of their own, and what they bound.
//!
//! A bin with the closed edges `low..=high` says how many elements lie between them, and nothing of where. So a scale
//! gives no counts but bounds of counts:
//!
//! ```text
//!   |x|  0 ···· threshold / scale ···· amax
//!        [ a ]      [   b   ]    [ c ]      a: becomes zero, or is zero already      b: may, or may not      c: does not
//! ```
//!
//! What is known beyond the bins is kept as bins, too: the smallest and the largest element are bins of one element and
//! no width. So overflow at a scale, a question about amax alone, is answered by yes or no, while underflow is an
//! interval; and a tensor whose amax underflows is known to be flushed whole.
//!
//! # Statistics
//!
//! Of some tensors only n, max, min, the mean and the L2 norm are known: one bin, with [`Moments`]. They tighten it.
//! Let A be amax, t the largest magnitude that becomes zero, k the elements with |x| ≤ t, and S = Σx² (the norm's
//! square). Those k elements have squares of at most t², the others of at most A², and of more than t²:
//!
//! ```text
//!   S ≤ k·t² + (n − k)·A²     so   k ≤ (n·A² − S) / (A² − t²)
//!   S ≥ (n − k)·t²            so   k ≥ n − S / t²
//! ```
//!
//! and in the same way for the sum, where M is the largest element of its sign: k ≤ (n·M − |Σx|) / (M − t). For m
//! elements at or above the overflow threshold T: m ≤ S / T² and m ≥ (S − n·T²) / (A² − T²). The lost share of the L2
//! norm is at most t·√k / √S, which is small even where k is not known at all. Norms and means were summed in f32 by
//! whoever wrote them, so S is taken as known within [`NORM_ERROR`], and the sum within that part of n·A.

use super::outcomes::fraction;
use super::{Lost, Outcomes};
use crate::float::{Cuts, Format};
use std::collections::HashMap;

/// Relative error that a norm or a sum in f32 may carry: a thousand times what a pairwise sum of 10^8 elements has.
pub const NORM_ERROR: f64 = 1e-3;

const INFINITY: u32 = 0x7F80_0000;

/// Elements whose magnitude lies between two f32, both included; 0 stands for a zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MagnitudeBin {
    /// f32 bits of the least magnitude.
    pub first: u32,
    /// f32 bits of the largest.
    pub last: u32,
    /// How many.
    pub count: u64,
}

/// Sums over all finite elements, as far as they are known.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Moments {
    /// The smallest and the largest element.
    pub range: (f64, f64),
    /// Σx.
    pub sum: Option<f64>,
    /// Σx².
    pub squares: Option<f64>,
}

/// A histogram of one tensor's elements.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Histogram {
    bins: Vec<MagnitudeBin>,
    finite: u64,
    inf: u64,
    nan: u64,
    moments: Option<Moments>,
}

/// What a bin cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BinError {
    /// An edge that is no number, or edges out of order.
    #[error("edges that are not ascending numbers")]
    Edges,
    /// More than 2^63 elements.
    #[error("more than 2^63 elements")]
    TooMany,
}

impl Histogram {
    /// No elements.
    pub fn new() -> Histogram {
        Histogram::default()
    }

    /// Adds `count` elements that lie in `low..=high`. Edges beyond f32 are its largest value.
    ///
    /// The edges are rounded to f32 as the elements were: rounding keeps the order, so the elements stay between them.
    ///
    /// # Errors
    /// For edges that are NaN or out of order, and more than 2^63 elements.
    pub fn add(&mut self, low: f64, high: f64, count: u64) -> Result<(), BinError> {
        if low.is_nan() || high.is_nan() || low > high {
            return Err(BinError::Edges);
        }
        if count == 0 {
            return Ok(());
        }
        let all = self.elements().checked_add(count);
        if all.is_none_or(|all| all > 1 << 63) {
            return Err(BinError::TooMany);
        }
        let bits = |edge: f64| (edge.abs() as f32).to_bits().min(INFINITY - 1);
        let (a, b) = (bits(low), bits(high));
        let first = if low <= 0.0 && high >= 0.0 {
            0
        } else {
            a.min(b)
        };
        self.bins.push(MagnitudeBin {
            first,
            last: a.max(b),
            count,
        });
        self.finite += count;
        Ok(())
    }

    /// Adds elements that are infinite, and that are NaN.
    ///
    /// # Errors
    /// For more than 2^63 elements.
    pub fn add_nonfinite(&mut self, inf: u64, nan: u64) -> Result<(), BinError> {
        let all = [inf, nan]
            .iter()
            .try_fold(self.elements(), |all, &n| all.checked_add(n));
        if all.is_none_or(|all| all > 1 << 63) {
            return Err(BinError::TooMany);
        }
        self.inf += inf;
        self.nan += nan;
        Ok(())
    }

    /// A histogram of bins in ascending order, and the smallest and the largest element where they are known, each as
    /// the edges that it lies between.
    ///
    /// The smallest element was counted in the lowest bin that is not empty, the largest in the highest; there they are
    /// taken out and put where they are known to be.
    ///
    /// # Errors
    /// As [`add`](Histogram::add).
    pub fn from_bins(
        bins: &[(f64, f64, u64)],
        ends: Option<[(f64, f64); 2]>,
    ) -> Result<Histogram, BinError> {
        let mut histogram = Histogram::new();
        let mut counts: Vec<u64> = bins.iter().map(|bin| bin.2).collect();
        if let Some([least, most]) = ends {
            if let Some(lowest) = counts.iter().position(|&count| count > 0) {
                counts[lowest] -= 1;
                histogram.add(least.0, least.1, 1)?;
            }
            if let Some(highest) = counts.iter().rposition(|&count| count > 0) {
                counts[highest] -= 1;
                histogram.add(most.0, most.1, 1)?;
            }
        }
        for (&(low, high, _), count) in bins.iter().zip(counts) {
            histogram.add(low, high, count)?;
        }
        histogram.compact();
        Ok(histogram)
    }

    /// Adds the elements of another histogram. Sums over elements are given up: they were sums of one tensor.
    ///
    /// # Errors
    /// For more than 2^63 elements.
    pub fn merge(&mut self, other: &Histogram) -> Result<(), BinError> {
        let all = self.elements().checked_add(other.elements());
        if all.is_none_or(|all| all > 1 << 63) {
            return Err(BinError::TooMany);
        }
        self.bins.extend_from_slice(&other.bins);
        self.finite += other.finite;
        self.inf += other.inf;
        self.nan += other.nan;
        self.moments = None;
        self.compact();
        Ok(())
    }

    /// The same with sums over its elements.
    pub fn with_moments(mut self, moments: Moments) -> Histogram {
        self.moments = Some(moments);
        self
    }

    /// Divides every element by a positive finite scale.
    pub fn divide(&mut self, scale: f64) {
        let moved = |bits: u32| {
            ((f64::from(f32::from_bits(bits)) / scale) as f32)
                .to_bits()
                .min(INFINITY - 1)
        };
        for bin in &mut self.bins {
            bin.first = moved(bin.first);
            bin.last = moved(bin.last);
        }
        if let Some(moments) = &mut self.moments {
            moments.range = (moments.range.0 / scale, moments.range.1 / scale);
            moments.sum = moments.sum.map(|sum| sum / scale);
            moments.squares = moments.squares.map(|squares| squares / scale / scale);
        }
    }

    /// Joins bins with the same edges.
    pub fn compact(&mut self) {
        let mut joined: HashMap<(u32, u32), u64> = HashMap::with_capacity(self.bins.len());
        for bin in &self.bins {
            *joined.entry((bin.first, bin.last)).or_default() += bin.count;
        }
        self.bins = joined
            .into_iter()
            .map(|((first, last), count)| MagnitudeBin { first, last, count })
            .collect();
        self.bins.sort_unstable();
        self.bins.shrink_to_fit();
    }

    /// The bins, by magnitude.
    pub fn bins(&self) -> &[MagnitudeBin] {
        &self.bins
    }

    /// All elements.
    pub fn elements(&self) -> u64 {
        self.finite() + self.inf + self.nan
    }

    /// Elements that are finite.
    pub fn finite(&self) -> u64 {
        self.finite
    }

    /// Elements that are infinite, and that are NaN.
    pub fn nonfinite(&self) -> (u64, u64) {
        (self.inf, self.nan)
    }

    /// The least and the most that amax can be; `None` where no element is finite, and where inf or NaN hides it.
    pub fn amax(&self) -> Option<(f32, f32)> {
        let least = self.bins.iter().map(|bin| bin.first).max()?;
        let most = self.bins.iter().map(|bin| bin.last).max()?;
        if most == INFINITY - 1 && self.inf + self.nan > 0 {
            return None;
        }
        Some((f32::from_bits(least), f32::from_bits(most)))
    }

    /// What `format` does to the elements at `loss_scale`: bounds, and a point between them.
    ///
    /// `flush_subnormals` counts subnormal results as zero.
    pub fn replay(&self, format: Format, loss_scale: f32, flush_subnormals: bool) -> Spread {
        let mut cuts = Cuts::new(format, loss_scale);
        if flush_subnormals {
            cuts.first_nonzero = cuts.first_normal;
        }
        // 0 is a zero, 1 underflows, 2 is subnormal, 3 normal, 4 overflows; ascending with the magnitude.
        let class = |magnitude: u32| match magnitude {
            0 => 0,
            m if m >= cuts.first_overflow => 4,
            m if m < cuts.first_nonzero => 1,
            m if m >= cuts.first_normal => 3,
            _ => 2,
        };
        let mut spread = Spread {
            loss_scale,
            inf: self.inf,
            nan: self.nan,
            elements: self.elements(),
            ..Spread::default()
        };
        let value = |bits: u32| f64::from(f32::from_bits(bits));
        let last_zero = value(cuts.first_nonzero - 1);
        let (mut low, mut high, mut point) = ([0u64; 5], [0u64; 5], [0u64; 5]);
        // Bins that can hold a zero or an underflow, that hold nothing else, and that can hold a zero.
        let (mut small_high, mut small_low, mut zero_high) = (0u64, 0u64, 0u64);
        let mut overflow_low = 0u64;
        for bin in &self.bins {
            let (from, to) = (class(bin.first), class(bin.last));
            let (a, b, n) = (value(bin.first), value(bin.last), bin.count as f64);
            if from == to {
                low[from] += bin.count;
            }
            for count in &mut high[from..=to] {
                *count += bin.count;
            }
            if from <= 1 {
                small_high += bin.count;
                spread.l1.lost.1 += n * b.min(last_zero);
                spread.l2.lost.1 += n * b.min(last_zero).powi(2);
            } else {
                spread.l1.kept.0 += n * a;
                spread.l2.kept.0 += n * a * a;
            }
            if to <= 1 {
                small_low += bin.count;
                spread.l1.lost.0 += n * a;
                spread.l2.lost.0 += n * a * a;
            } else {
                spread.l1.kept.1 += n * b;
                spread.l2.kept.1 += n * b * b;
            }
            zero_high += if from == 0 { bin.count } else { 0 };
            overflow_low += if from == 4 { bin.count } else { 0 };
            // The point spreads a bin's elements evenly; no element is called a zero that may be none.
            let mut before = 0u64;
            let below = |cut: u32| {
                if cut > bin.last {
                    bin.count
                } else if cut <= bin.first {
                    0
                } else {
                    (((value(cut) - a) / (b - a)).clamp(0.0, 1.0) * n) as u64
                }
            };
            let nonzero = cuts.first_nonzero.min(cuts.first_overflow);
            let normal = cuts.first_normal.max(nonzero).min(cuts.first_overflow);
            for (class, until) in [
                (1, below(nonzero)),
                (2, below(normal)),
                (3, below(cuts.first_overflow)),
                (4, bin.count),
            ] {
                let until = until.max(before);
                let class = if bin.last == 0 { 0 } else { class };
                point[class] += until - before;
                before = until;
            }
        }
        let n = self.finite();
        let overflow_high = high[4];
        let mut bounds = Small {
            small: (small_low, small_high),
            overflow: (overflow_low, overflow_high),
        };
        if let Some(moments) = self.moments.as_ref().filter(|_| self.inf + self.nan == 0) {
            let first_overflow =
                (cuts.first_overflow < INFINITY).then(|| value(cuts.first_overflow));
            bounds.tighten(moments, n, last_zero, first_overflow);
            moments.tighten_norms(n, last_zero, bounds.small.1, &mut spread);
        }
        let Small { small, overflow } = bounds;
        low[1] = low[1].max(small.0.saturating_sub(zero_high));
        high[1] = high[1].min(small.1);
        high[0] = high[0].min(small.1);
        low[4] = overflow.0;
        high[4] = overflow.1;
        // A point outside its own bounds would be no estimate at all.
        for (class, other) in [(1, 3), (4, 3)] {
            let excess = point[class].saturating_sub(high[class]);
            point[class] -= excess;
            point[other] += excess;
            let lack = low[class].saturating_sub(point[class]);
            let moved = lack.min(point[3]);
            point[3] -= moved;
            let more = (lack - moved).min(point[2]);
            point[2] -= more;
            point[class] += moved + more;
        }
        let outcomes = |counts: [u64; 5]| Outcomes {
            zero_in: counts[0],
            nonfinite_in: self.inf + self.nan,
            underflow_to_zero: counts[1],
            subnormal: counts[2],
            normal: counts[3],
            overflow_to_infinity: counts[4],
        };
        spread.low = outcomes(low);
        spread.high = outcomes(high);
        spread.point = outcomes(point);
        spread.kept = (n - small.1, n - small.0);
        let surely_clean: u64 = self
            .bins
            .iter()
            .filter(|bin| bin.first > 0 && class(bin.last) < 4)
            .map(|bin| bin.count)
            .sum();
        spread.within = (surely_clean.min(n - overflow.1), n - overflow.0 - low[0]);
        spread
    }
}

/// Bounds of two counts: elements that are zero or underflow, and elements that overflow.
struct Small {
    small: (u64, u64),
    overflow: (u64, u64),
}

impl Small {
    /// Applies the inequalities of the module's head.
    fn tighten(&mut self, moments: &Moments, n: u64, t: f64, first_overflow: Option<f64>) {
        let whole = n as f64;
        let amax = moments.amax();
        let at_most = |bound: f64, limit: &mut u64| {
            if bound >= 0.0 && bound < *limit as f64 {
                *limit = bound as u64;
            }
        };
        let at_least = |bound: f64, limit: &mut u64| {
            if bound > *limit as f64 {
                *limit = (bound.ceil() as u64).min(n);
            }
        };
        if let Some((least, most)) = moments.squares_between() {
            if amax > t {
                let bound = (whole * amax * amax - least) / (amax * amax - t * t);
                at_most(bound.max(0.0), &mut self.small.1);
            }
            if t > 0.0 {
                at_least(whole - most / (t * t), &mut self.small.0);
            }
            if let Some(first) = first_overflow {
                at_most(most / (first * first), &mut self.overflow.1);
                if amax > first {
                    let bound = (least - whole * first * first) / (amax * amax - first * first);
                    at_least(bound, &mut self.overflow.0);
                }
            }
        }
        if let Some(sum) = moments.sum {
            let least = (sum.abs() - NORM_ERROR * whole * amax).max(0.0);
            let largest = if sum < 0.0 {
                -moments.range.0
            } else {
                moments.range.1
            };
            if largest > t {
                let bound = (whole * largest - least) / (largest - t);
                at_most(bound.max(0.0), &mut self.small.1);
            }
        }
        // Numbers that contradict each other bound nothing.
        if self.small.0 > self.small.1 {
            self.small = (0, n);
        }
        if self.overflow.0 > self.overflow.1 {
            self.overflow = (0, n);
        }
    }
}

impl Moments {
    fn amax(&self) -> f64 {
        self.range.0.abs().max(self.range.1.abs())
    }

    /// Least and most of Σx².
    fn squares_between(&self) -> Option<(f64, f64)> {
        self.squares
            .map(|squares| (squares * (1.0 - NORM_ERROR), squares * (1.0 + NORM_ERROR)))
    }

    /// What the sums say about the norms that are lost and kept.
    fn tighten_norms(&self, n: u64, t: f64, small: u64, spread: &mut Spread) {
        let lost = (small as f64 * t, small as f64 * t * t);
        spread.l1.lost.1 = spread.l1.lost.1.min(lost.0);
        spread.l2.lost.1 = spread.l2.lost.1.min(lost.1);
        let mut l1_least = 0.0f64;
        if let Some((least, most)) = self.squares_between() {
            spread.l2.kept.0 = spread.l2.kept.0.max(least - spread.l2.lost.1);
            spread.l2.kept.1 = spread.l2.kept.1.min(most);
            // Σx² ≤ A·Σ|x|, and Σ|x| ≤ √(n·Σx²).
            if self.amax() > 0.0 {
                l1_least = least / self.amax();
            }
            spread.l1.kept.1 = spread.l1.kept.1.min((n as f64 * most).sqrt());
        }
        if let Some(sum) = self.sum {
            l1_least = l1_least.max(sum.abs() - NORM_ERROR * n as f64 * self.amax());
        }
        spread.l1.kept.0 = spread.l1.kept.0.max(l1_least - spread.l1.lost.1);
    }
}

/// A norm's lost and kept parts, each as least and most.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Parts {
    lost: (f64, f64),
    kept: (f64, f64),
}

impl Parts {
    fn add(&mut self, other: &Parts) {
        self.lost.0 += other.lost.0;
        self.lost.1 += other.lost.1;
        self.kept.0 += other.kept.0;
        self.kept.1 += other.kept.1;
    }

    /// Least and most of the lost share.
    fn share(&self) -> (f64, f64) {
        let of = |lost: f64, kept: f64| {
            if lost > 0.0 {
                (lost / (lost + kept.max(0.0))).min(1.0)
            } else {
                0.0
            }
        };
        let (least, most) = (of(self.lost.0, self.kept.1), of(self.lost.1, self.kept.0));
        (least.min(most), most)
    }
}

/// Bounds of what a scale does to the elements of one histogram, or of several added up.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Spread {
    /// The scale that was multiplied by.
    pub loss_scale: f32,
    /// All elements.
    pub elements: u64,
    /// Infinite ones.
    pub inf: u64,
    /// NaN.
    pub nan: u64,
    /// Least of each count.
    pub low: Outcomes,
    /// Most of each count.
    pub high: Outcomes,
    /// Elements spread evenly over their bins: a number between the bounds, and no claim.
    pub point: Outcomes,
    /// Nonzero elements that do not underflow, least and most.
    kept: (u64, u64),
    /// Nonzero elements that do not overflow, least and most.
    within: (u64, u64),
    l1: Parts,
    l2: Parts,
}

impl Spread {
    /// No elements at this scale.
    pub fn at(loss_scale: f32) -> Spread {
        Spread {
            loss_scale,
            ..Spread::default()
        }
    }

    /// Adds the elements of another histogram at the same scale.
    pub fn add(&mut self, other: &Spread) {
        self.loss_scale = other.loss_scale;
        self.elements += other.elements;
        self.inf += other.inf;
        self.nan += other.nan;
        for (mine, theirs) in [
            (&mut self.low, &other.low),
            (&mut self.high, &other.high),
            (&mut self.point, &other.point),
        ] {
            mine.zero_in += theirs.zero_in;
            mine.nonfinite_in += theirs.nonfinite_in;
            mine.underflow_to_zero += theirs.underflow_to_zero;
            mine.subnormal += theirs.subnormal;
            mine.normal += theirs.normal;
            mine.overflow_to_infinity += theirs.overflow_to_infinity;
        }
        self.kept = (self.kept.0 + other.kept.0, self.kept.1 + other.kept.1);
        self.within = (
            self.within.0 + other.within.0,
            self.within.1 + other.within.1,
        );
        self.l1.add(&other.l1);
        self.l2.add(&other.l2);
    }

    /// Least and most share of the finite nonzero elements that become zero; unknown zeros are counted against either.
    pub fn underflow_fraction(&self) -> (f64, f64) {
        let (low, high) = (self.low.underflow_to_zero, self.high.underflow_to_zero);
        (
            fraction(low, low + self.kept.1),
            fraction(high, high + self.kept.0),
        )
    }

    /// Least and most share of the finite nonzero elements that overflow.
    pub fn overflow_fraction(&self) -> (f64, f64) {
        let (low, high) = (
            self.low.overflow_to_infinity,
            self.high.overflow_to_infinity,
        );
        (
            fraction(low, low + self.within.1),
            fraction(high, high + self.within.0),
        )
    }

    /// Least and most of Σ|lost| / Σ|x|.
    pub fn l1_fraction(&self) -> (f64, f64) {
        self.l1.share()
    }

    /// Least and most of sqrt(Σ lost² / Σ x²).
    pub fn l2_fraction(&self) -> (f64, f64) {
        let (low, high) = self.l2.share();
        (low.sqrt(), high.sqrt())
    }

    /// Fractions of the point, inside their bounds.
    pub fn point_lost(&self) -> Lost {
        let middle = |(low, high): (f64, f64)| low + (high - low) / 2.0;
        let (low, high) = self.underflow_fraction();
        Lost {
            elements: self.point.underflow_fraction().clamp(low, high),
            l1: middle(self.l1_fraction()),
            l2: middle(self.l2_fraction()),
        }
    }
}
