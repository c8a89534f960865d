//! Exact replay of the elements themselves: any scale, and how far the rounded values are off.
//!
//! At any scale an element's outcome follows from three comparisons of its magnitude ([`Cuts`]). Over all scales these are one
//! sorted list of cuts. Between two neighbouring cuts all elements share their fate at every scale, so one pass that puts each
//! element between its cuts answers all scales at once, however many:
//!
//! ```text
//!   cuts of   2^0    3·2^5   2^10    …   and the powers of two
//!    |    |      |    |     |  |        |     |    |
//!  ──┴────┴──────┴────┴─────┴──┴────────┴─────┴────┴──►  magnitude
//!      n, Σ significand, Σ significand² between each two, as integers
//! ```
//!
//! A power of two is a cut too, so that between two cuts all significands have one unit, and their sums and the sums of their
//! squares are integers. Integers add up to the same in any order. Rounding errors are floats, and taken block by block
//! ([`kernel::Block`]) in the order of the elements.

use crate::float::{Cuts, Format, exp2};
use crate::kernel::{BLOCK, Backend, Beside, Block, Replay, Replayed, Rounding};
use crate::tally::{Lost, Outcomes, fraction};
use std::sync::Arc;

const MAGNITUDE: u32 = 0x7FFF_FFFF;
const INFINITY: u32 = 0x7F80_0000;
const FIRST_NORMAL: u32 = 0x80_0000;

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

/// What to replay: a format and scales, and the sorted list of all their cuts.
#[derive(Debug)]
pub struct Plan {
    scales: Vec<(f32, Cuts, Rounding)>,
    /// The intervals between the cuts; with the roundings where errors are asked for.
    replay: Arc<Replay>,
    with_errors: bool,
    backend: Backend,
}

/// Bits of a magnitude that [`Replay::first`] does not look at.
const BELOW: u32 = 16;

impl Plan {
    /// Sorts the cuts. `flush_subnormals` counts subnormal results as zero.
    pub fn new(
        format: Format,
        scales: &[f32],
        flush_subnormals: bool,
        with_errors: bool,
        backend: Backend,
    ) -> Plan {
        let cuts = |&scale: &f32| {
            let mut cuts = Cuts::new(format, scale);
            if flush_subnormals {
                cuts.first_nonzero = cuts.first_normal;
            }
            // Far from 1 a class can be empty; its cuts then coincide.
            cuts.first_nonzero = cuts.first_nonzero.min(cuts.first_overflow);
            cuts.first_normal = cuts
                .first_normal
                .clamp(cuts.first_nonzero, cuts.first_overflow);
            (scale, cuts, Rounding::new(format, scale, cuts))
        };
        let scales: Vec<_> = scales.iter().map(cuts).collect();
        let mut edges: Vec<u32> = (0..23)
            .map(|bit| 1 << bit)
            .chain((1..=255).map(|exponent| exponent << 23))
            .chain(scales.iter().flat_map(|(_, cuts, _)| {
                [cuts.first_nonzero, cuts.first_normal, cuts.first_overflow]
            }))
            .collect();
        edges.sort_unstable();
        edges.dedup();
        let mut interval = 0;
        let first = (0..=INFINITY >> BELOW)
            .map(|upper| {
                while edges[interval as usize + 1..]
                    .first()
                    .is_some_and(|&next| next <= upper << BELOW)
                {
                    interval += 1;
                }
                interval
            })
            .collect();
        let roundings = scales.iter().map(|&(_, _, rounding)| rounding);
        Plan {
            replay: Arc::new(Replay {
                edges,
                first,
                roundings: roundings.filter(|_| with_errors).collect(),
            }),
            scales,
            with_errors,
            backend,
        }
    }

    /// The interval of a finite nonzero magnitude.
    #[inline]
    fn interval(&self, magnitude: u32) -> usize {
        let upper = (magnitude >> BELOW) as usize;
        let Replay { edges, first, .. } = &*self.replay;
        let (from, to) = (first[upper] as usize, first[upper + 1] as usize);
        if from == to {
            return from;
        }
        from + edges[from + 1..=to].partition_point(|&edge| edge <= magnitude)
    }
}

/// The elements between two cuts.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Interval {
    count: u64,
    /// Σ significand, and of its square; f32 subnormals have fewer bits and the same unit as the smallest normal.
    sum: u64,
    squares: u128,
}

/// Replays elements at the scales of a plan.
#[derive(Debug, Clone)]
pub struct Raw {
    plan: Arc<Plan>,
    intervals: Vec<Interval>,
    /// Σ |y − x·s| / |x| and Σ (y − x·s)² of each scale.
    errors: Vec<[f64; 2]>,
    block: Option<Box<Block>>,
}

impl Raw {
    /// Nothing replayed yet.
    pub fn new(plan: Arc<Plan>) -> Raw {
        Raw {
            intervals: vec![Interval::default(); plan.replay.edges.len()],
            errors: vec![[0.0; 2]; plan.scales.len()],
            block: plan.with_errors.then(Box::default),
            plan,
        }
    }

    /// Replays `values` at every scale.
    pub fn add(&mut self, values: &[f32]) {
        for x in values {
            self.count(x.to_bits() & MAGNITUDE, 1);
        }
        if self.block.is_some() {
            let mut rest = values;
            while !rest.is_empty() {
                let block = self.block.as_mut().expect("asked above");
                rest = block.take(rest);
                if block.len() == BLOCK {
                    self.round();
                }
            }
        }
    }

    /// Replays a value that stands for `times` elements.
    pub fn add_repeated(&mut self, value: f32, times: u64) {
        self.count(value.to_bits() & MAGNITUDE, times);
        if let Some(block) = &mut self.block {
            block.take_repeated(value, times);
            if block.len() == BLOCK {
                self.round();
            }
        }
    }

    #[inline]
    fn count(&mut self, magnitude: u32, times: u64) {
        if magnitude.wrapping_sub(1) >= INFINITY - 1 {
            return;
        }
        let interval = &mut self.intervals[self.plan.interval(magnitude)];
        let significand = u64::from(significand(magnitude));
        interval.count += times;
        interval.sum += significand * times;
        interval.squares += u128::from(significand * significand) * u128::from(times);
    }

    /// Rounds the block at every scale.
    fn round(&mut self) {
        let Some(block) = self.block.as_mut().filter(|block| !block.is_empty()) else {
            return;
        };
        for ((_, _, rounding), sums) in self.plan.scales.iter().zip(&mut self.errors) {
            let more = self.plan.backend.errors(rounding, block);
            sums[0] += more[0];
            sums[1] += more[1];
        }
        block.clear();
    }

    /// Adds what another part of the same group gave; both are at their end.
    pub fn merge(&mut self, other: &Raw) {
        for (a, b) in self.intervals.iter_mut().zip(&other.intervals) {
            a.count += b.count;
            a.sum += b.sum;
            a.squares += b.squares;
        }
        for (a, b) in self.errors.iter_mut().zip(&other.errors) {
            a[0] += b[0];
            a[1] += b[1];
        }
    }

    /// The results, in the order of the scales.
    pub fn rates(&mut self) -> Vec<RawRate> {
        self.round();
        // Sums over all intervals below each edge.
        let mut below = Vec::with_capacity(self.intervals.len() + 1);
        let mut all = (0u64, 0f64, 0f64);
        for (interval, &edge) in self.intervals.iter().zip(&self.plan.replay.edges) {
            below.push(all);
            let unit = exp2((edge >> 23).max(1) as i32 - 150);
            all.0 += interval.count;
            all.1 += interval.sum as f64 * unit;
            all.2 += interval.squares as f64 * unit * unit;
        }
        let at = |magnitude: u32| {
            let interval = self
                .plan
                .replay
                .edges
                .partition_point(|&edge| edge < magnitude);
            below.get(interval).copied().unwrap_or(all)
        };
        let rate = |((scale, cuts, _), errors): (&(f32, Cuts, Rounding), &[f64; 2])| {
            let zero = at(cuts.first_nonzero);
            let (subnormal, finite) = (at(cuts.first_normal), at(cuts.first_overflow));
            let outcomes = Outcomes {
                zero_in: 0,
                nonfinite_in: 0,
                underflow_to_zero: zero.0,
                subnormal: subnormal.0 - zero.0,
                normal: finite.0 - subnormal.0,
                overflow_to_infinity: all.0 - finite.0,
            };
            let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
            let scale = f64::from(*scale);
            let squares = errors[1] / scale / scale;
            RawRate {
                outcomes,
                lost: Lost {
                    elements: fraction(zero.0, all.0),
                    l1: share(zero.1, all.1),
                    l2: share(zero.2, all.2).sqrt(),
                },
                errors: self.plan.with_errors.then(|| Errors {
                    mean_relative_error: (finite.0 > 0)
                        .then(|| errors[0] / scale / finite.0 as f64),
                    sqnr_db: (finite.0 > 0 && squares > 0.0)
                        .then(|| 10.0 * (finite.2 / squares).log10()),
                }),
            }
        };
        self.plan
            .scales
            .iter()
            .zip(&self.errors)
            .map(rate)
            .collect()
    }
}

/// The significand as an integer, in the unit of the magnitude's binade.
fn significand(magnitude: u32) -> u32 {
    if magnitude < FIRST_NORMAL {
        magnitude
    } else {
        magnitude & (FIRST_NORMAL - 1) | FIRST_NORMAL
    }
}

impl Beside for Raw {
    fn add(&mut self, values: &[f32]) {
        Raw::add(self, values);
    }

    fn add_repeated(&mut self, value: f32, times: u64) {
        Raw::add_repeated(self, value, times);
    }

    fn end(&mut self) {
        self.round();
    }

    fn replay(&self) -> Option<Arc<Replay>> {
        Some(self.plan.replay.clone())
    }

    fn take_replayed(&mut self, replayed: Replayed) {
        for (interval, [count, sum, low, high]) in self.intervals.iter_mut().zip(replayed.intervals)
        {
            interval.count += count;
            interval.sum += sum;
            interval.squares += u128::from(low) + (u128::from(high) << 24);
        }
        for (sums, more) in self.errors.iter_mut().zip(replayed.errors) {
            sums[0] += more[0];
            sums[1] += more[1];
        }
    }

    fn join(&mut self, next: Raw) {
        self.merge(&next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::float::{FORMATS, FP16, Outcome};

    /// By the definition, one element and one scale at a time.
    fn naive(values: &[f32], format: Format, scale: f32, flush: bool) -> ([u64; 4], [f64; 3]) {
        let (mut counts, mut sums) = ([0; 4], [0.0; 3]);
        for &x in values {
            let outcome = match format.outcome(x, scale) {
                Outcome::Subnormal if flush => Outcome::UnderflowToZero,
                outcome => outcome,
            };
            let class = match outcome {
                Outcome::ZeroIn | Outcome::NonfiniteIn => continue,
                Outcome::UnderflowToZero => 0,
                Outcome::Subnormal => 1,
                Outcome::Normal => 2,
                Outcome::OverflowToInfinity => 3,
            };
            counts[class] += 1;
            if class < 3 {
                let (x, s) = (f64::from(x), f64::from(scale));
                let y = if class == 0 {
                    0.0
                } else {
                    f64::from(format.quantize((x as f32) * scale))
                };
                sums[0] += ((y / s - x) / x).abs();
                sums[1] += (y / s - x) * (y / s - x);
                sums[2] += x * x;
            }
        }
        (counts, sums)
    }

    fn values() -> Vec<f32> {
        let mut state = 12345u64;
        let mut values = Vec::new();
        for i in 0..6000u32 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            values.push(match i % 50 {
                0 => 0.0,
                1 => f32::from_bits(state as u32),
                2 => f32::from_bits(state as u32 & 0x807F_FFFF),
                3 => f32::from_bits(state as u32 & 0xFF80_0000),
                _ => f32::from_bits((state as u32 & 0x83FF_FFFF) | 0x3600_0000),
            });
        }
        for format in FORMATS {
            for bits in [
                format.last_zero_bits(),
                format.first_normal_bits(),
                format.first_overflow_bits(),
            ] {
                values.extend([bits - 1, bits, bits + 1].map(f32::from_bits));
            }
        }
        values
    }

    #[test]
    fn every_scale_and_format_equals_one_element_at_a_time() {
        let values = values();
        let scales = [
            2f32.powi(-40),
            0.3,
            1.0,
            1.0000001,
            3.0,
            1024.0,
            24576.25,
            65536.0,
            1e9,
            2f32.powi(40),
            1e30,
        ];
        for format in FORMATS {
            for flush in [false, true] {
                for backend in Backend::available() {
                    let plan = Arc::new(Plan::new(format, &scales, flush, true, backend));
                    let mut raw = Raw::new(plan);
                    raw.add(&values[..777]);
                    raw.add(&values[777..]);
                    for (&scale, rate) in scales.iter().zip(raw.rates()) {
                        let (counts, sums) = naive(&values, format, scale, flush);
                        let o = rate.outcomes;
                        let ours = [
                            o.underflow_to_zero,
                            o.subnormal,
                            o.normal,
                            o.overflow_to_infinity,
                        ];
                        assert_eq!(ours, counts, "{} at {scale}", format.name);
                        let n = counts[0] + counts[1] + counts[2];
                        let errors = rate.errors.expect("asked for");
                        let close = |a: Option<f64>, b: f64| {
                            let a = a.expect("some stay finite");
                            assert!((a - b).abs() <= 1e-11 * b.abs(), "{a} {b} {}", format.name);
                        };
                        close(errors.mean_relative_error, sums[0] / n as f64);
                        close(errors.sqnr_db, 10.0 * (sums[2] / sums[1]).log10());
                    }
                }
            }
        }
    }

    #[test]
    fn backends_agree_on_every_bit_of_the_errors() {
        let values = values();
        let scales = [0.3, 1.0, 777.0, 65536.0];
        for format in FORMATS {
            let rates = |backend| {
                let mut raw = Raw::new(Arc::new(Plan::new(format, &scales, false, true, backend)));
                raw.add(&values);
                raw.rates()
            };
            for backend in Backend::available() {
                assert_eq!(
                    rates(backend),
                    rates(Backend::scalar()),
                    "{}",
                    backend.name()
                );
            }
        }
    }

    #[test]
    fn a_value_that_stands_for_many_counts_as_many() {
        let scales = [1.0, 1000.0, 1e6];
        let plan = Arc::new(Plan::new(FP16, &scales, false, true, Backend::auto()));
        let (mut one, mut many) = (Raw::new(plan.clone()), Raw::new(plan));
        for (i, &x) in values().iter().enumerate() {
            let times = i as u64 % 4;
            many.add_repeated(x, times);
            for _ in 0..times {
                one.add(&[x]);
            }
        }
        for (one, many) in one.rates().into_iter().zip(many.rates()) {
            assert_eq!(one.outcomes, many.outcomes);
            assert_eq!(one.lost, many.lost);
            let (one, many) = (one.errors.unwrap(), many.errors.unwrap());
            for (a, b) in [
                (one.mean_relative_error, many.mean_relative_error),
                (one.sqnr_db, many.sqnr_db),
            ] {
                let (a, b) = (a.unwrap(), b.unwrap());
                assert!((a - b).abs() <= 1e-12 * a.abs(), "{a} {b}");
            }
        }
    }

    #[test]
    fn nothing_is_lost_of_nothing() {
        let plan = Plan::new(FP16, &[1.0], false, true, Backend::auto());
        let mut raw = Raw::new(Arc::new(plan));
        raw.add(&[0.0, f32::NAN, f32::INFINITY]);
        let rate = raw.rates()[0];
        assert_eq!(rate.outcomes, Outcomes::default());
        assert_eq!((rate.lost.l1, rate.lost.l2), (0.0, 0.0));
        assert_eq!(rate.errors.unwrap().mean_relative_error, None);
        assert_eq!(rate.errors.unwrap().sqnr_db, None);
    }
}
