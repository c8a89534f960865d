//! The rows that every backend counts in, and the road from a slice of floats to them.
//!
//! [`word`] says in which row an element belongs; the backends do the same to many elements at once ([`Lanes::stage`]).
//! Everything else is here, once and safe: which groups need no table at all, which hold values that a row cannot, and
//! when the tables must be emptied.

use super::lanes::{Facts, GROUP, Group, Lanes, Staged, lowest_bit, scatter, zeros};
use crate::tally::{Accumulator, MIN_EXPONENT, SUB_BIN_BASES, SUB_BINS, sub_bin_of};

/// Rows of a table: what the upper bits of a word can say.
pub(super) const ROWS: usize = 1 << (32 - LOW_BITS);
/// Bits of a word that are summed, not looked at.
pub(super) const LOW_BITS: u32 = 18;
/// One table; each entry holds a count above and a sum of words below.
pub(super) type Table = [u64; ROWS];
/// Elements take turns, so that equal neighbours do not wait for each other's sum.
pub(super) type Tables = [Table; 4];
/// One element, above the 48 bits that hold the sum of up to 65,535 words.
pub(super) const ONE: u64 = 1 << 48;

/// Set in the word of every element that lies on no edge.
pub(super) const PLAIN: u32 = 0x8000_0000;
/// The low significand bits that an exact sixteenth of a binade has not.
pub(super) const SIXTEENTH: u32 = 0x7_FFFF;
/// `magnitude << 9` from here on lies in the last 128th of its binade, where FP16 and BF16 have their edges.
pub(super) const LAST_128TH: u32 = 0x7F_0000 << 9;
/// The word bits that the last 128th takes from 7 places further down.
pub(super) const FINER: u32 = 0x78_0000;

const INFINITY: u32 = 0x7F80_0000;
const MAGNITUDE: u32 = 0x7FFF_FFFF;
const FIELD: u32 = 0x7F_FFFF;
const FIRST_NORMAL: u32 = 0x80_0000;
/// Subnormals times 2^this are normal, and exactly so.
const LIFT: i32 = 64;

/// The word of a magnitude that is zero or normal: the row in its upper 14 bits, and below them the 18 lowest bits of the
/// significand field, which are the element's own.
///
/// ```text
///                       31  30 … 23   22 … 19   18    17 … 0
///  plain                 1  exponent  field bits 22…18  field bits 17…0        32 rows a binade
///  a sixteenth, exactly  0  exponent  field bits 22…19   0   0                 {0} and {0x680000} are bins of their own
///  the last 128th        0  exponent  field bits 15…12   1   field bits 17…0   bits 22…16 are ones; cut at 0x8000, 0xE000,
///                                                                              0xF000
/// ```
#[inline(always)]
pub(super) fn word(magnitude: u32) -> u32 {
    let last = magnitude << 9 >= LAST_128TH;
    let exact = magnitude & SIXTEENTH == 0;
    let finer = if last { FINER } else { 0 };
    let edge = if last | exact { 0 } else { PLAIN };
    (magnitude & !finer) | (magnitude << 7 & finer) | edge
}

/// Which bin a row belongs to: exponent field, sub-bin, and what an element's significand field is beyond the 18 bits
/// that its word carries.
fn bin_of_row(row: usize) -> (u32, usize, u32) {
    let code = row as u32 & 31;
    let exponent = row as u32 >> 5 & 0xFF;
    let (upper, sample) = if row >= ROWS / 2 {
        (code << LOW_BITS, code << LOW_BITS | 1)
    } else if code & 1 == 0 {
        (code << LOW_BITS, code << LOW_BITS)
    } else {
        (0x7C_0000, 0x7F_0000 | code >> 1 << 12)
    };
    (exponent, sub_bin_of(sample), upper)
}

/// Counts and sums of the elements seen so far, on their way into an [`Accumulator`].
#[derive(Debug, Clone)]
pub(super) struct Rows {
    tables: Box<Tables>,
    /// How many of the tables take turns: 2, or 4 where few binades are used and neighbours often meet in a row.
    turns: usize,
    /// Groups that the tables can still take before a count could run over.
    room: usize,
    /// The magnitudes in the tables lie between these.
    fresh: (u32, u32),
    /// What was taken out of the tables: counts, and sums of the low bits.
    counts: Box<Table>,
    sums: Box<Table>,
    zeros: u64,
    /// Zeros that were counted and are no elements: they fill up groups.
    padding: u64,
    nonfinite: [u64; 3],
    smallest: u32,
    largest: u32,
    significand_or: u32,
    /// Lowest set bit over all elements, as [`lowest_bit`] has it.
    lowest: u32,
    /// Subnormals, times 2^64.
    lifted: Option<Box<Rows>>,
}

fn zeroed<const N: usize>() -> Box<[u64; N]> {
    // From the system zeroed, and touched only where it is used.
    vec![0u64; N]
        .into_boxed_slice()
        .try_into()
        .expect("the length is N")
}

/// Groups until some table's row could reach 65,536: each table takes `GROUP / turns` of a group.
const fn room(turns: usize) -> usize {
    (ONE.wrapping_neg() >> 48) as usize * turns / GROUP
}

impl Rows {
    pub fn new() -> Rows {
        let tables = vec![[0u64; ROWS]; 4]
            .into_boxed_slice()
            .try_into()
            .expect("the length is 4");
        Rows {
            tables,
            turns: 2,
            room: room(2),
            fresh: (u32::MAX, 0),
            counts: zeroed(),
            sums: zeroed(),
            zeros: 0,
            padding: 0,
            nonfinite: [0; 3],
            smallest: u32::MAX,
            largest: 0,
            significand_or: 0,
            lowest: u32::MAX,
            lifted: None,
        }
    }

    /// Counts `values`, in whatever code it is inlined into.
    ///
    /// A group is staged while the words of the one before it are scattered into the tables: the one is work for the vector
    /// unit, the other for the load and store units.
    #[inline(always)]
    pub fn add_in<L: Lanes>(&mut self, lanes: L, values: &[f32]) {
        let (groups, rest) = values.as_chunks::<GROUP>();
        let (mut one, mut other) = (Staged([0; GROUP]), Staged([0; GROUP]));
        let (mut now, mut next) = (&mut one, &mut other);
        let mut pending = false;
        let mut padded = [0f32; GROUP];
        let last = (!rest.is_empty()).then(|| {
            padded[..rest.len()].copy_from_slice(rest);
            self.padding += (GROUP - rest.len()) as u64;
            &padded
        });
        for group in groups.iter().chain(last) {
            let facts = match (pending, self.turns) {
                (false, _) => lanes.stage(group, next),
                (true, 2) => lanes.stage_and_scatter::<2>(group, next, now, &mut self.tables),
                (true, _) => lanes.stage_and_scatter::<4>(group, next, now, &mut self.tables),
            };
            pending = self.takes(group, facts) || self.odd_group(lanes, group, facts, next);
            std::mem::swap(&mut now, &mut next);
        }
        if pending {
            self.scatter(now);
        }
    }

    /// Notes the facts of an ordinary group, whose words then have to be scattered into the tables; or says no.
    #[inline(always)]
    fn takes(&mut self, group: &Group, facts: Facts) -> bool {
        let smallest = facts.smallest_less_one.wrapping_add(1);
        let ordinary =
            smallest >= FIRST_NORMAL && facts.largest < INFINITY && facts.largest > smallest;
        if ordinary {
            self.make_room();
            self.note(group, facts, smallest);
        }
        ordinary
    }

    /// Takes a group's facts over.
    #[inline(always)]
    fn note(&mut self, group: &Group, facts: Facts, smallest: u32) {
        self.fresh = (self.fresh.0.min(smallest), self.fresh.1.max(facts.largest));
        self.smallest = self.smallest.min(smallest);
        self.largest = self.largest.max(facts.largest);
        self.significand_or |= facts.or;
        // No element's lowest bit lies below that of the smallest exponent with the lowest field bit in use. Only where
        // that would be news is each element asked.
        let possible = (smallest >> 23) + 127 + (facts.or & FIELD | FIRST_NORMAL).trailing_zeros();
        if possible < self.lowest {
            self.lowest = self.lowest.min(lowest_bit(group));
        }
    }

    /// Counts a group that is not as others; says whether words are left in `staged` that have to be scattered.
    #[inline(always)]
    fn odd_group<L: Lanes>(
        &mut self,
        lanes: L,
        group: &Group,
        facts: Facts,
        staged: &mut Staged,
    ) -> bool {
        if self.one_magnitude(group, facts) {
            return false;
        }
        // Infinities, NaN and subnormals are set to zero and counted apart: the first two here, the subnormals as the normal
        // numbers that they are times 2^64.
        let (mut normal, mut lifted) = ([0f32; GROUP], [0f32; GROUP]);
        let [positive, negative, nan, subnormals] = part(group, &mut normal, &mut lifted);
        for (count, more) in self.nonfinite.iter_mut().zip([positive, negative, nan]) {
            *count += u64::from(more);
        }
        self.padding += u64::from(positive + negative + nan + subnormals);
        if subnormals > 0 {
            let rows = self.lifted.get_or_insert_with(|| Box::new(Rows::new()));
            rows.padding += u64::from(GROUP as u32 - subnormals);
            let facts = lanes.stage(&lifted, staged);
            if rows.takes(&lifted, facts) {
                rows.scatter(staged);
            } else {
                rows.one_magnitude(&lifted, facts);
            }
        }
        let facts = lanes.stage(&normal, staged);
        self.takes(&normal, facts) || {
            self.one_magnitude(&normal, facts);
            false
        }
    }

    /// Counts a group that is all zero, or all zero and one normal magnitude, without a table; or says no.
    #[inline(always)]
    fn one_magnitude(&mut self, group: &Group, facts: Facts) -> bool {
        let magnitude = facts.largest;
        if magnitude == 0 {
            self.zeros += GROUP as u64;
            return true;
        }
        let one = magnitude == facts.smallest_less_one.wrapping_add(1)
            && (FIRST_NORMAL..INFINITY).contains(&magnitude);
        if one {
            self.note(group, facts, magnitude);
            let zeros = zeros(group);
            let times = GROUP as u64 - zeros;
            let word = word(magnitude);
            let row = (word >> LOW_BITS) as usize;
            self.zeros += zeros;
            self.counts[row] += times;
            self.sums[row] += times * u64::from(word & ((1 << LOW_BITS) - 1));
        }
        one
    }

    /// Scatters one group's words into the tables.
    #[inline(always)]
    fn scatter(&mut self, staged: &Staged) {
        match self.turns {
            2 => scatter::<2>(&staged.0, &mut self.tables),
            _ => scatter::<4>(&staged.0, &mut self.tables),
        }
    }

    /// Empties the tables where one group more could make a count run over. Nothing is staged meanwhile.
    #[inline(always)]
    fn make_room(&mut self) {
        if self.room == 0 {
            self.settle();
        }
        self.room -= 1;
    }

    /// Takes counts and sums out of the tables.
    #[inline(never)]
    fn settle(&mut self) {
        let (low, high) = self.fresh;
        let (turns, counts, sums) = (self.turns, &mut *self.counts, &mut *self.sums);
        for rows in rows_between(low, high) {
            for table in &mut self.tables[..turns] {
                let rows = rows.clone();
                let entries = table[rows.clone()].chunks_mut(32);
                let counts = counts[rows.clone()].chunks_mut(32);
                let sums = sums[rows.clone()].chunks_mut(32);
                let mut upper = (rows.start as u64) << LOW_BITS;
                for ((entries, counts), sums) in entries.zip(counts).zip(sums) {
                    // Most are empty where the magnitudes lie far apart.
                    if entries.iter().fold(0, |any, entry| any | entry) != 0 {
                        let mut upper = upper;
                        for ((entry, count), sum) in entries.iter_mut().zip(counts).zip(sums) {
                            let n = *entry >> 48;
                            *count += n;
                            *sum += (*entry & (ONE - 1)) - n * upper;
                            *entry = 0;
                            upper += 1 << LOW_BITS;
                        }
                    }
                    upper += 32 << LOW_BITS;
                }
            }
        }
        // Few binades: neighbours often meet in a row, and four tables of them still fit the first-level cache.
        self.turns = if high >> 23 > (low >> 23).saturating_add(FEW_BINADES) {
            2
        } else {
            4
        };
        self.room = room(self.turns);
        self.fresh = (u32::MAX, 0);
    }

    /// Hands everything to `accumulator` and is empty again.
    pub fn finish(&mut self, accumulator: &mut Accumulator) {
        self.finish_lifted(accumulator, 0);
        self.turns = 2;
        self.room = room(2);
    }

    fn finish_lifted(&mut self, accumulator: &mut Accumulator, lift: i32) {
        self.settle();
        // Row 0 is zero itself.
        let zeros = std::mem::take(&mut self.counts[0]) + std::mem::take(&mut self.zeros);
        accumulator.add_zeros(zeros - std::mem::take(&mut self.padding));
        let [positive, negative, nan] = std::mem::take(&mut self.nonfinite);
        accumulator.add_nonfinite(positive, negative, nan);
        if self.largest != 0 {
            for row in rows_between(self.smallest, self.largest)
                .into_iter()
                .flatten()
            {
                let count = std::mem::take(&mut self.counts[row]);
                if count == 0 {
                    continue;
                }
                let (exponent, sub, upper) = bin_of_row(row);
                let binade = exponent as i32 - 127 - lift - MIN_EXPONENT;
                // In wrapping arithmetic, as what is beyond the 18 bits can lie below the bin's base.
                let beyond = u64::from(upper).wrapping_sub(SUB_BIN_BASES[sub].into());
                let sum =
                    std::mem::take(&mut self.sums[row]).wrapping_add(count.wrapping_mul(beyond));
                accumulator.add_bin(binade as usize * SUB_BINS + sub, count, sum);
            }
            let lowered =
                |bits: u32| (f64::from(f32::from_bits(bits)) * crate::float::exp2(-lift)) as f32;
            accumulator.add_facts(
                lowered(self.smallest).to_bits(),
                lowered(self.largest).to_bits(),
                self.significand_or & FIELD,
                self.lowest as i32 - 2 * 127 - 23 - lift,
            );
        }
        self.smallest = u32::MAX;
        self.largest = 0;
        self.significand_or = 0;
        self.lowest = u32::MAX;
        if let Some(lifted) = &mut self.lifted {
            lifted.finish_lifted(accumulator, LIFT);
        }
    }
}

/// Binades up to which four tables take turns.
const FEW_BINADES: u32 = 8;

/// The rows that magnitudes between `low` and `high` can be in: zero, edges, plain.
fn rows_between(low: u32, high: u32) -> [std::ops::Range<usize>; 3] {
    if low > high {
        return [0..1, 0..0, 0..0];
    }
    let (first, last) = ((low >> LOW_BITS) as usize, (high >> LOW_BITS) as usize);
    [
        0..1,
        (first & !31).max(1)..(last | 31) + 1,
        ROWS / 2 + first..ROWS / 2 + last + 1,
    ]
}

/// Parts a group into its normal numbers and its subnormals times 2^64, each with zeros in the place of all others; counts
/// +inf, −inf, NaN and the subnormals.
#[inline(always)]
fn part(group: &Group, normal: &mut Group, lifted: &mut Group) -> [u32; 4] {
    let (mut positive, mut negative, mut nan, mut subnormals) = (0u32, 0u32, 0u32, 0u32);
    let lift = crate::float::exp2(LIFT) as f32;
    for ((&x, normal), lifted) in group.iter().zip(normal).zip(lifted) {
        let magnitude = x.to_bits() & MAGNITUDE;
        let subnormal = magnitude.wrapping_sub(1) < FIRST_NORMAL - 1;
        positive += u32::from(x.to_bits() == INFINITY);
        negative += u32::from(x.to_bits() == INFINITY | !MAGNITUDE);
        nan += u32::from(magnitude > INFINITY);
        subnormals += u32::from(subnormal);
        let finite = if magnitude < INFINITY { x } else { 0.0 };
        *normal = if subnormal { 0.0 } else { finite };
        *lifted = if subnormal { finite * lift } else { 0.0 };
    }
    [positive, negative, nan, subnormals]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tally::{SUB_BIN_EDGES, split};

    /// Around every edge of every binade, and in between.
    fn magnitudes() -> impl Iterator<Item = u32> {
        let fields = SUB_BIN_EDGES
            .into_iter()
            .flat_map(|edge| (-2i64..=2).map(move |off| (i64::from(edge) + off) as u32 & FIELD))
            .chain((0..0x80_0000).step_by(if cfg!(miri) { 0x70_2345 } else { 0x1_2345 }));
        let fields: Vec<u32> = fields.collect();
        let every = if cfg!(miri) { 50 } else { 1 };
        (1u32..255).step_by(every).flat_map(move |exponent| {
            fields
                .clone()
                .into_iter()
                .map(move |field| exponent << 23 | field)
        })
    }

    #[test]
    fn a_word_leads_to_the_bin_of_its_magnitude_and_keeps_its_field() {
        for magnitude in magnitudes() {
            let word = word(magnitude);
            let (exponent, sub, upper) = bin_of_row((word >> LOW_BITS) as usize);
            let (e, field) = split(magnitude);
            assert_eq!(exponent as i32 - 127, e, "{magnitude:#x}");
            assert_eq!(sub, sub_bin_of(field), "{magnitude:#x}");
            assert_eq!(
                upper + (word & ((1 << LOW_BITS) - 1)),
                field,
                "{magnitude:#x}"
            );
            let row = (word >> LOW_BITS) as usize;
            let ranges = rows_between(magnitude, magnitude);
            assert!(
                ranges.iter().any(|rows| rows.contains(&row)),
                "{magnitude:#x}"
            );
        }
    }

    #[test]
    fn zero_has_a_row_of_its_own() {
        assert_eq!(word(0), 0);
        assert!(rows_between(1 << 23, 0x7F7F_FFFF)[1].start > 0);
    }

    #[test]
    fn a_full_table_does_not_run_over() {
        for turns in [2, 4] {
            assert!(room(turns) * GROUP / turns <= 0xFFFF);
        }
        assert!(0xFFFF * u64::from(u32::MAX) < ONE);
    }
}
