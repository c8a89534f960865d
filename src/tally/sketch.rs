//! The sketch itself: filling, merging, and the facts beside its bins.

use super::bins::{BINS, Bin, MIN_EXPONENT, SUB_BIN_BASES, SUB_BINS, bin_of, split};

const MAGNITUDE: u32 = 0x7FFF_FFFF;
const INFINITY: u32 = 0x7F80_0000;

/// Exact counts of one tensor (or of several, merged): which binade and sub-bin each element lies in.
///
/// Only nonempty bins are kept, in ascending order. Two sketches of the same elements are equal, in whatever order,
/// chunks or threads the elements came.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sketch {
    pub(crate) bins: Vec<Bin>,
    pub(crate) zeros: u64,
    pub(crate) inf_positive: u64,
    pub(crate) inf_negative: u64,
    pub(crate) nan: u64,
    /// f32 bits; 0 where no finite nonzero element was seen.
    pub(crate) smallest_nonzero: u32,
    /// f32 bits; 0 where no finite nonzero element was seen.
    pub(crate) largest: u32,
    /// OR of the 23-bit significand fields of all finite nonzero elements.
    pub(crate) significand_or: u32,
    /// Every finite nonzero element is a multiple of 2^this.
    pub(crate) lowest_bit: Option<i16>,
}

/// The parts of a stored sketch that contradict each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SketchError {
    /// A bin index beyond the last, or not above the one before it.
    #[error("bin {index} at place {place}: expected ascending bins below 6094")]
    Order {
        /// Place in the list.
        place: usize,
        /// The index found.
        index: u16,
    },
    /// A bin without elements, or whose sum its elements cannot have.
    #[error("bin {index}: a sum of {sum} is impossible for {count} elements")]
    Sum {
        /// The bin.
        index: u16,
        /// Its count.
        count: u64,
        /// Its sum.
        sum: u64,
    },
    /// The smallest or largest magnitude is not in the first or last bin.
    #[error("extremes {smallest:#010x} and {largest:#010x} do not lie in the first and last bin")]
    Extremes {
        /// f32 bits of the smallest magnitude.
        smallest: u32,
        /// f32 bits of the largest.
        largest: u32,
    },
    /// The counts add up to more than 2^63 elements.
    #[error("the counts add up to more than 2^63 elements")]
    TooMany,
}

/// What a stored sketch holds beside its bins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Beside {
    pub zeros: u64,
    pub inf_positive: u64,
    pub inf_negative: u64,
    pub nan: u64,
    pub smallest_nonzero: u32,
    pub largest: u32,
    pub significand_or: u32,
    pub lowest_bit: Option<i16>,
}

impl Sketch {
    /// A sketch of `values`: any length, order does not matter.
    pub fn of(values: &[f32]) -> Sketch {
        let mut accumulator = Accumulator::new();
        accumulator.add(values);
        accumulator.finish()
    }

    /// A sketch of the elements of any view, strided or not, in any memory order.
    pub fn of_view<D: ndarray::Dimension>(view: &ndarray::ArrayRef<f32, D>) -> Sketch {
        let mut accumulator = Accumulator::new();
        match view.as_slice_memory_order() {
            Some(slice) => accumulator.add(slice),
            None => view.iter().for_each(|&value| accumulator.add(&[value])),
        }
        accumulator.finish()
    }

    /// Puts a stored sketch together again.
    ///
    /// # Errors
    /// When the parts contradict each other.
    pub(crate) fn from_parts(bins: Vec<Bin>, beside: Beside) -> Result<Sketch, SketchError> {
        let mut elements = [
            beside.zeros,
            beside.inf_positive,
            beside.inf_negative,
            beside.nan,
        ]
        .iter()
        .try_fold(0u64, |sum, &n| sum.checked_add(n))
        .ok_or(SketchError::TooMany)?;
        let mut previous = None;
        for (place, bin) in bins.iter().enumerate() {
            if usize::from(bin.index) >= BINS || previous.is_some_and(|p| bin.index <= p) {
                return Err(SketchError::Order {
                    place,
                    index: bin.index,
                });
            }
            previous = Some(bin.index);
            let sub = bin.sub_bin();
            let (first, last) = (
                super::SUB_BIN_EDGES[sub] - SUB_BIN_BASES[sub],
                super::SUB_BIN_EDGES[sub + 1] - 1 - SUB_BIN_BASES[sub],
            );
            let possible = u128::from(bin.count) * u128::from(first)
                ..=u128::from(bin.count) * u128::from(last);
            if bin.count == 0 || !possible.contains(&u128::from(bin.sum)) {
                return Err(SketchError::Sum {
                    index: bin.index,
                    count: bin.count,
                    sum: bin.sum,
                });
            }
            elements = elements
                .checked_add(bin.count)
                .ok_or(SketchError::TooMany)?;
        }
        if elements > 1 << 63 {
            return Err(SketchError::TooMany);
        }
        let lies_in = |bits: u32, bin: Option<&Bin>| match bin {
            Some(bin) => bits != 0 && bits < INFINITY && bin_of(bits) == usize::from(bin.index),
            None => bits == 0,
        };
        if !lies_in(beside.smallest_nonzero, bins.first()) || !lies_in(beside.largest, bins.last())
        {
            return Err(SketchError::Extremes {
                smallest: beside.smallest_nonzero,
                largest: beside.largest,
            });
        }
        let Beside {
            zeros,
            inf_positive,
            inf_negative,
            nan,
            smallest_nonzero,
            largest,
            significand_or,
            lowest_bit,
        } = beside;
        Ok(Sketch {
            bins,
            zeros,
            inf_positive,
            inf_negative,
            nan,
            smallest_nonzero,
            largest,
            significand_or,
            lowest_bit,
        })
    }

    /// The nonempty bins, ascending in magnitude.
    pub fn bins(&self) -> &[Bin] {
        &self.bins
    }

    /// Finite nonzero elements: what fractions are of.
    pub fn finite_nonzero(&self) -> u64 {
        self.bins.iter().map(|bin| bin.count).sum()
    }

    /// All elements.
    pub fn elements(&self) -> u64 {
        self.finite_nonzero() + self.zeros + self.nonfinite()
    }

    /// Elements that are ±0.
    pub fn zeros(&self) -> u64 {
        self.zeros
    }

    /// Elements that are +inf or −inf.
    pub fn inf(&self) -> u64 {
        self.inf_positive + self.inf_negative
    }

    /// Elements that are +inf, and that are −inf.
    pub fn inf_by_sign(&self) -> (u64, u64) {
        (self.inf_positive, self.inf_negative)
    }

    /// Elements that are NaN.
    pub fn nan(&self) -> u64 {
        self.nan
    }

    /// Elements that are inf or NaN.
    pub fn nonfinite(&self) -> u64 {
        self.inf() + self.nan
    }

    /// The largest finite magnitude; 0 where every finite element is zero, `None` where no element is finite.
    pub fn amax(&self) -> Option<f32> {
        (self.finite_nonzero() + self.zeros > 0).then(|| f32::from_bits(self.largest))
    }

    /// The smallest finite nonzero magnitude.
    pub fn smallest_nonzero(&self) -> Option<f32> {
        (self.smallest_nonzero != 0).then(|| f32::from_bits(self.smallest_nonzero))
    }

    /// OR of the 23-bit significand fields (f32 subnormals normalised): which significand bits the data really uses.
    pub fn significand_or(&self) -> u32 {
        self.significand_or
    }

    /// The exponent of the lowest set bit over all elements: each is a multiple of 2^this.
    pub fn lowest_bit(&self) -> Option<i32> {
        self.lowest_bit.map(i32::from)
    }

    /// Σ |x| over the finite elements, to within a few roundings.
    pub fn l1(&self) -> f64 {
        self.bins.iter().map(|bin| bin.l1()).sum()
    }

    /// Adds the elements of `other`.
    pub fn merge(&mut self, other: &Sketch) {
        if other.bins.is_empty() {
            // nothing to interleave
        } else if self.bins.is_empty() {
            self.bins.clone_from(&other.bins);
        } else {
            let mut merged = Vec::with_capacity(self.bins.len().max(other.bins.len()) + 8);
            let (mut left, mut right) = (self.bins.iter().peekable(), other.bins.iter().peekable());
            while let (Some(&&a), Some(&&b)) = (left.peek(), right.peek()) {
                match a.index.cmp(&b.index) {
                    std::cmp::Ordering::Less => merged.push(*left.next().expect("peeked")),
                    std::cmp::Ordering::Greater => merged.push(*right.next().expect("peeked")),
                    std::cmp::Ordering::Equal => {
                        merged.push(Bin {
                            index: a.index,
                            count: a.count + b.count,
                            sum: a.sum + b.sum,
                        });
                        left.next();
                        right.next();
                    }
                }
            }
            merged.extend(left.chain(right));
            self.bins = merged;
        }
        self.zeros += other.zeros;
        self.inf_positive += other.inf_positive;
        self.inf_negative += other.inf_negative;
        self.nan += other.nan;
        self.smallest_nonzero = match (self.smallest_nonzero, other.smallest_nonzero) {
            (0, bits) | (bits, 0) => bits,
            (a, b) => a.min(b),
        };
        self.largest = self.largest.max(other.largest);
        self.significand_or |= other.significand_or;
        self.lowest_bit = match (self.lowest_bit, other.lowest_bit) {
            (None, bit) | (bit, None) => bit,
            (a, b) => a.min(b),
        };
    }

    /// The same elements, each multiplied by 2^`exponent`, or `None` where that product would not be exact for one of
    /// them (it would overflow f32 or lose bits below 2^-149).
    ///
    /// This is how a dump taken before unscaling has its loss scale divided out.
    pub fn shifted(&self, exponent: i32) -> Option<Sketch> {
        let Some(lowest) = self.lowest_bit else {
            return Some(self.clone());
        };
        let scale = crate::float::exp2(exponent);
        let moved = |bits: u32| (f64::from(f32::from_bits(bits)) * scale) as f32;
        if i32::from(lowest) + exponent < MIN_EXPONENT || !moved(self.largest).is_finite() {
            return None;
        }
        let step = exponent * SUB_BINS as i32;
        let bins = self
            .bins
            .iter()
            .map(|b| Bin {
                index: (i32::from(b.index) + step) as u16,
                ..*b
            })
            .collect();
        Some(Sketch {
            bins,
            smallest_nonzero: moved(self.smallest_nonzero).to_bits(),
            largest: moved(self.largest).to_bits(),
            lowest_bit: Some((i32::from(lowest) + exponent) as i16),
            ..self.clone()
        })
    }
}

/// Dense counts that a sketch is filled into; one a thread, merged at the end.
#[derive(Debug, Clone)]
pub struct Accumulator {
    counts: Box<[u64; BINS]>,
    sums: Box<[u64; BINS]>,
    zeros: u64,
    inf_positive: u64,
    inf_negative: u64,
    nan: u64,
    smallest_nonzero: u32,
    largest: u32,
    significand_or: u32,
    lowest_bit: i32,
}

impl Default for Accumulator {
    fn default() -> Self {
        Accumulator::new()
    }
}

impl Accumulator {
    /// Empty counts.
    pub fn new() -> Accumulator {
        let zeroed = || {
            vec![0u64; BINS]
                .into_boxed_slice()
                .try_into()
                .expect("the length is BINS")
        };
        Accumulator {
            counts: zeroed(),
            sums: zeroed(),
            zeros: 0,
            inf_positive: 0,
            inf_negative: 0,
            nan: 0,
            smallest_nonzero: u32::MAX,
            largest: 0,
            significand_or: 0,
            lowest_bit: i32::MAX,
        }
    }

    /// Counts `values`, one after another: slow and obvious. [`kernel`](crate::kernel) does the same, fast.
    pub fn add(&mut self, values: &[f32]) {
        for value in values {
            self.add_repeated(value.to_bits(), 1);
        }
    }

    /// Counts `times` elements that all have these f32 bits.
    pub fn add_repeated(&mut self, bits: u32, times: u64) {
        if times == 0 {
            return;
        }
        let magnitude = bits & MAGNITUDE;
        if magnitude == 0 {
            self.zeros += times;
        } else if magnitude >= INFINITY {
            match (magnitude == INFINITY, bits == magnitude) {
                (true, true) => self.inf_positive += times,
                (true, false) => self.inf_negative += times,
                (false, _) => self.nan += times,
            }
        } else {
            let (exponent, field) = split(magnitude);
            let sub = super::bins::sub_bin_of(field);
            let bin = (exponent - MIN_EXPONENT) as usize * SUB_BINS + sub;
            self.counts[bin] += times;
            self.sums[bin] += u64::from(field - SUB_BIN_BASES[sub]) * times;
            self.smallest_nonzero = self.smallest_nonzero.min(magnitude);
            self.largest = self.largest.max(magnitude);
            self.significand_or |= field;
            let lowest = if field == 0 {
                exponent
            } else {
                exponent - 23 + field.trailing_zeros() as i32
            };
            self.lowest_bit = self.lowest_bit.min(lowest);
        }
    }

    /// Adds elements of one bin: their count, and the sum of their fields above the bin's base.
    pub(crate) fn add_bin(&mut self, bin: usize, count: u64, sum: u64) {
        self.counts[bin] += count;
        self.sums[bin] += sum;
    }

    /// Adds zeros.
    pub(crate) fn add_zeros(&mut self, zeros: u64) {
        self.zeros += zeros;
    }

    /// Adds infinities of either sign, and NaN.
    pub(crate) fn add_nonfinite(&mut self, positive: u64, negative: u64, nan: u64) {
        self.inf_positive += positive;
        self.inf_negative += negative;
        self.nan += nan;
    }

    /// Notes what else is known of the elements of [`add_bin`](Accumulator::add_bin), of which there is at least one.
    pub(crate) fn add_facts(
        &mut self,
        smallest_nonzero: u32,
        largest: u32,
        significand_or: u32,
        lowest_bit: i32,
    ) {
        self.smallest_nonzero = self.smallest_nonzero.min(smallest_nonzero);
        self.largest = self.largest.max(largest);
        self.significand_or |= significand_or;
        self.lowest_bit = self.lowest_bit.min(lowest_bit);
    }

    /// The sketch of all that was counted; the counts are empty afterwards and can be filled again.
    pub fn finish(&mut self) -> Sketch {
        let mut bins = Vec::new();
        let any = self.largest != 0;
        if any {
            for bin in bin_of(self.smallest_nonzero)..=bin_of(self.largest) {
                if self.counts[bin] != 0 {
                    bins.push(Bin {
                        index: bin as u16,
                        count: self.counts[bin],
                        sum: self.sums[bin],
                    });
                    self.counts[bin] = 0;
                    self.sums[bin] = 0;
                }
            }
        }
        let sketch = Sketch {
            bins,
            zeros: self.zeros,
            inf_positive: self.inf_positive,
            inf_negative: self.inf_negative,
            nan: self.nan,
            smallest_nonzero: if any { self.smallest_nonzero } else { 0 },
            largest: self.largest,
            significand_or: self.significand_or,
            lowest_bit: any.then_some(self.lowest_bit as i16),
        };
        self.zeros = 0;
        self.inf_positive = 0;
        self.inf_negative = 0;
        self.nan = 0;
        self.smallest_nonzero = u32::MAX;
        self.largest = 0;
        self.significand_or = 0;
        self.lowest_bit = i32::MAX;
        sketch
    }
}
