//! Replaying a policy over a run.
//!
//! Between two events nothing but counters changes, so a replay jumps: it asks the policy how many quiet steps lie
//! ahead and finds the next step that overflows at the current scale under block minima of the steps' limits, in
//! O(log). Policies without quiet steps are stepped.

use super::policy::{Change, Observed, Policy, Terminal};
use super::run::{Limits, Run, Verdict};
use crate::tally::Lost;
use std::collections::HashMap;

/// Where the framework itself would have ended the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stopped {
    /// The step whose update raised.
    pub step: u64,
    /// The implementation's own error.
    pub reason: Terminal,
}

/// A stretch of steps that a replay treats alike.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Segment {
    /// First step, from the run's first.
    pub from: usize,
    /// One past the last.
    pub to: usize,
    /// The scale they ran at.
    pub scale: f64,
    /// Whether they overflowed.
    pub overflowed: bool,
    /// Whether the optimizer step was left out.
    pub skipped: bool,
    /// What happened to the scale at the end.
    pub change: Change,
}

impl Segment {
    /// Whether the steps' updates are lost as a whole: left out, or taken all the same with the infinities of an overflow.
    pub fn is_lost(&self) -> bool {
        self.skipped || self.overflowed
    }
}

/// Minima over blocks of blocks of steps: finds the next step at or below a value in O(log).
#[derive(Debug, Clone)]
struct Minima {
    levels: Vec<Vec<f32>>,
}

const BLOCK: usize = 16;

impl Minima {
    fn new(values: impl Iterator<Item = f32>) -> Minima {
        let mut levels = vec![values.collect::<Vec<f32>>()];
        while levels[levels.len() - 1].len() > BLOCK {
            let below = &levels[levels.len() - 1];
            levels.push(
                below
                    .chunks(BLOCK)
                    .map(|block| block.iter().copied().fold(f32::INFINITY, f32::min))
                    .collect(),
            );
        }
        Minima { levels }
    }

    /// The first index in `from..to` whose value is at most `limit`, else `to`.
    fn next(&self, from: usize, to: usize, limit: f32) -> usize {
        let (mut level, mut index) = (0, from);
        loop {
            if index << (4 * level) >= to {
                return to;
            }
            let values = &self.levels[level];
            if index >= values.len() {
                return to;
            }
            if values[index] <= limit {
                if level == 0 {
                    return index;
                }
                level -= 1;
                index *= BLOCK;
            } else {
                index += 1;
                while index % BLOCK == 0 && level + 1 < self.levels.len() {
                    level += 1;
                    index /= BLOCK;
                }
            }
        }
    }
}

/// The same search for power-of-two scales, which is most of them: one byte a step, 64 to a block, compared many at once.
///
/// A step's byte is 128 + the smallest k at which 2^k overflows, kept within 0 (always) and 255 (never).
#[derive(Debug, Clone)]
struct Exponents {
    levels: Vec<Vec<u8>>,
}

const LINE: usize = 64;

impl Exponents {
    fn new(limits: &[Limits]) -> Exponents {
        let byte = |limits: &Limits| -> u8 {
            let limit = limits.overflow_from;
            if limit == 0.0 {
                return 0;
            }
            if limit.is_infinite() {
                return u8::MAX;
            }
            let (exponent, field) = crate::tally::split(limit.to_bits());
            (exponent + i32::from(field != 0) + 128).clamp(1, 254) as u8
        };
        let mut levels = vec![limits.iter().map(byte).collect::<Vec<u8>>()];
        while levels[levels.len() - 1].len() > LINE {
            let below = &levels[levels.len() - 1];
            levels.push(
                below
                    .chunks(LINE)
                    .map(|line| line.iter().copied().fold(u8::MAX, u8::min))
                    .collect(),
            );
        }
        Exponents { levels }
    }

    /// The byte that a scale is compared with: a step overflows where its own is at most this. `None` for other scales
    /// than powers of two, and for those so far out that their bytes were clamped.
    fn limit(scale: f32) -> Option<u8> {
        let exponent = crate::float::exact_log2(scale.into())?;
        (-126..=125)
            .contains(&exponent)
            .then(|| (exponent + 128) as u8)
    }

    /// The first index in `from..to` whose byte is at most `limit`, else `to`.
    #[inline]
    fn next(&self, from: usize, to: usize, limit: u8) -> usize {
        let (mut level, mut at) = (0u32, from);
        loop {
            let values = self.levels[level as usize].as_slice();
            // One past the last place on this level that holds a step before `to`.
            let last = (((to - 1) >> (6 * level)) + 1).min(values.len());
            if at >= last {
                return to;
            }
            let line_end = last.min((at / LINE + 1) * LINE);
            match first_at_most(&values[at..line_end], limit) {
                Some(found) if level == 0 => return at + found,
                Some(found) => {
                    level -= 1;
                    at = (at + found) * LINE;
                }
                None if line_end == last => return to,
                None => {
                    // A whole line was passed: the level above knows which of the next ones matter.
                    at = line_end;
                    if level as usize + 1 < self.levels.len() {
                        level += 1;
                        at /= LINE;
                    }
                }
            }
        }
    }
}

/// The first place whose byte is at most `limit`: the least of 32 bytes at a time, which compilers turn into vector code.
#[inline]
fn first_at_most(bytes: &[u8], limit: u8) -> Option<usize> {
    let (chunks, rest) = bytes.as_chunks::<32>();
    for (i, chunk) in chunks.iter().enumerate() {
        if chunk.iter().copied().fold(u8::MAX, u8::min) <= limit {
            return chunk
                .iter()
                .position(|&byte| byte <= limit)
                .map(|found| i * 32 + found);
        }
    }
    rest.iter()
        .position(|&byte| byte <= limit)
        .map(|found| chunks.len() * 32 + found)
}

/// A run with what makes replaying it fast; build it once and replay many policies.
#[derive(Debug, Clone)]
pub struct Timeline<'a> {
    run: &'a Run,
    exponents: Exponents,
    overflow_from: Minima,
    clean_below: Option<Minima>,
}

impl<'a> Timeline<'a> {
    /// Prepares a run.
    pub fn new(run: &'a Run) -> Timeline<'a> {
        let censored = run.censored();
        Timeline {
            run,
            exponents: Exponents::new(&run.limits),
            overflow_from: Minima::new(run.limits.iter().map(|limits| limits.overflow_from)),
            clean_below: censored
                .then(|| Minima::new(run.limits.iter().map(|limits| limits.clean_below.next_up()))),
        }
    }

    /// The run.
    pub fn run(&self) -> &'a Run {
        self.run
    }

    /// Replays `policy` from its present state, undecided steps read as clean, and shows each stretch to `visit`.
    ///
    /// Returns where the policy ended the run, if it did, and whether an undecided step was met.
    pub fn replay(
        &self,
        policy: &mut dyn Policy,
        visit: &mut dyn FnMut(&Segment),
    ) -> (Option<Stopped>, bool) {
        let length = self.run.limits.len();
        let mut undecided = false;
        let mut at = 0;
        while at < length {
            let scale = policy.loss_scale();
            let used = scale as f32;
            let quiet = policy.quiet_steps();
            if quiet > 0 {
                let end =
                    length.min(at.saturating_add(usize::try_from(quiet).unwrap_or(usize::MAX)));
                let event = match Exponents::limit(used) {
                    // `quiet` is not 0, so there is a step before `end`.
                    Some(limit) => self.exponents.next(at, end, limit),
                    None => self.overflow_from.next(at, end, used),
                };
                if event > at {
                    if let Some(clean_below) = &self.clean_below
                        && !undecided
                    {
                        // clean_below <= scale, stored one ulp up so that the search may ask for "at most".
                        undecided = clean_below.next(at, event, used.next_up()) < event;
                    }
                    policy.pass_quietly((event - at) as u64);
                    visit(&Segment {
                        from: at,
                        to: event,
                        scale,
                        overflowed: false,
                        skipped: false,
                        change: Change::Kept,
                    });
                    at = event;
                    continue;
                }
            }
            let verdict = self.run.limits[at].at(used);
            undecided |= verdict == Verdict::Unknown;
            let overflowed = verdict == Verdict::Overflow;
            match policy.update(Observed {
                found_inf: overflowed,
                amax: self.run.amax[at],
            }) {
                Ok(update) => {
                    visit(&Segment {
                        from: at,
                        to: at + 1,
                        scale,
                        overflowed,
                        skipped: update.skipped,
                        change: update.change,
                    });
                    at += 1;
                }
                Err(reason) => {
                    visit(&Segment {
                        from: at,
                        to: at + 1,
                        scale,
                        overflowed,
                        skipped: true,
                        change: Change::Kept,
                    });
                    return (
                        Some(Stopped {
                            step: self.run.first_step + at as u64,
                            reason,
                        }),
                        undecided,
                    );
                }
            }
        }
        (None, undecided)
    }
}

/// Replays step by step: the slow, obvious version that [`Timeline::replay`] is tested against.
pub fn replay_stepping(
    limits: &[Limits],
    policy: &mut dyn Policy,
    visit: &mut dyn FnMut(&Segment),
) -> Result<(), (usize, Terminal)> {
    for (at, limits) in limits.iter().enumerate() {
        let scale = policy.loss_scale();
        let overflowed = limits.at(scale as f32) == Verdict::Overflow;
        let observed = Observed {
            found_inf: overflowed,
            amax: None,
        };
        let update = policy.update(observed).map_err(|reason| (at, reason))?;
        let (skipped, change) = (update.skipped, update.change);
        visit(&Segment {
            from: at,
            to: at + 1,
            scale,
            overflowed,
            skipped,
            change,
        });
    }
    Ok(())
}

/// Least and most over all readings of the undecided steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// The least.
    pub low: u64,
    /// The most.
    pub high: u64,
    /// Whether every reading was followed; else the bounds are wider than they need be.
    pub tight: bool,
}

/// What came of replaying one policy over one run, undecided steps read as clean.
#[derive(Debug, Clone, PartialEq)]
pub struct Cost {
    /// Steps replayed.
    pub steps: u64,
    /// Steps left out.
    pub skipped: u64,
    /// Those before the first step that was not left out.
    pub skipped_at_start: u64,
    /// Steps left out although no scale would have saved them.
    pub skipped_anyway: u64,
    /// How often the scale grew.
    pub growths: u64,
    /// The scale of the first step.
    pub first_scale: f64,
    /// The scale after the last update.
    pub last_scale: f64,
    /// The most steps in a row that were left out after the start-up: how long the worst spike takes to recover from.
    pub longest_burst: u64,
    /// Where the framework would have ended the run.
    pub terminal: Option<Stopped>,
    /// Mean over the steps of 1 where skipped, else what was flushed; steps after a terminal error count as skipped.
    /// `None` where only amax is known.
    pub lost_update: Option<Lost>,
    /// The part of `lost_update` that was flushed.
    pub underflow: Option<Lost>,
    /// Whether the replay met a step that the record does not decide at its scale.
    pub undecided: bool,
}

impl Cost {
    /// Skipped steps that the growth interval answers for: not the start-up's, not those that overflow at any scale.
    pub fn skipped_by_interval(&self) -> u64 {
        self.skipped
            .saturating_sub(self.skipped_at_start.max(self.skipped_anyway))
    }

    /// J by one measure; where only amax is known, the share of skipped steps.
    pub fn j(&self, measure: super::Measure) -> f64 {
        match self.lost_update {
            Some(lost) => measure.of(lost),
            None => crate::tally::fraction(self.skipped, self.steps),
        }
    }
}

/// Replays `policy` over the run and sums up what it cost.
pub fn cost(timeline: &Timeline<'_>, policy: &dyn Policy) -> Cost {
    let run = timeline.run();
    let first_scale = policy.loss_scale();
    let mut replayed = policy.clone_box();
    let (mut skipped, mut at_start, mut anyway, mut growths, mut lost_steps) = (0, 0, 0, 0, 0);
    let (mut burst, mut longest_burst) = (0u64, 0);
    let mut started = false;
    let mut flushed = Lost::default();
    let mut done = 0;
    let (terminal, undecided) = timeline.replay(replayed.as_mut(), &mut |segment| {
        done = segment.to;
        growths += u64::from(segment.change == Change::Grown);
        let length = (segment.to - segment.from) as u64;
        if segment.skipped {
            skipped += length;
            at_start += if started { 0 } else { length };
            anyway += u64::from(run.limits[segment.from].is_always());
            burst += length;
            if started {
                longest_burst = longest_burst.max(burst);
            }
        } else {
            started = true;
            burst = 0;
        }
        if segment.is_lost() {
            lost_steps += length;
        } else if let Some(underflow) = &run.underflow {
            let sum = underflow.sum(segment.from, segment.to, segment.scale);
            flushed.elements += sum.elements.max(0.0);
            flushed.l1 += sum.l1.max(0.0);
            flushed.l2 += sum.l2.max(0.0);
        }
    });
    lost_steps += run.len() - done as u64;
    let steps = run.len();
    let mean = |sum: f64| if steps == 0 { 0.0 } else { sum / steps as f64 };
    let measured = run.underflow.is_some();
    let underflow = Lost {
        elements: mean(flushed.elements),
        l1: mean(flushed.l1),
        l2: mean(flushed.l2),
    };
    let lost = mean(lost_steps as f64);
    let all = Lost {
        elements: lost + underflow.elements,
        l1: lost + underflow.l1,
        l2: lost + underflow.l2,
    };
    Cost {
        steps,
        skipped,
        skipped_at_start: at_start,
        skipped_anyway: anyway,
        growths,
        first_scale,
        last_scale: replayed.loss_scale(),
        longest_burst,
        terminal,
        lost_update: measured.then_some(all),
        underflow: measured.then_some(underflow),
        undecided,
    }
}

/// A [`Cost`] with its bounds: what `simulate` reports.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulated {
    /// The point: undecided steps read as clean.
    pub cost: Cost,
    /// Skips over all readings of the undecided steps.
    pub skipped: Bounds,
    /// The worst step's flushed share among those not skipped.
    pub worst_underflow: Option<Lost>,
}

/// What `policy` costs over the run, and its skips over all readings of the steps that the record leaves undecided.
pub(super) fn cost_with_bounds(timeline: &Timeline<'_>, policy: &dyn Policy) -> (Cost, Bounds) {
    let cost = cost(timeline, policy);
    let skipped = if cost.undecided {
        let bounds = bounds(timeline.run(), policy);
        Bounds {
            low: bounds.low.min(cost.skipped),
            high: bounds.high.max(cost.skipped),
            ..bounds
        }
    } else {
        Bounds {
            low: cost.skipped,
            high: cost.skipped,
            tight: true,
        }
    };
    (cost, skipped)
}

/// Replays `policy` over the run, with bounds where the record leaves steps undecided.
pub fn simulate(timeline: &Timeline<'_>, policy: &dyn Policy) -> Simulated {
    let (cost, skipped) = cost_with_bounds(timeline, policy);
    let mut worst = Lost::default();
    if let Some(underflow) = &timeline.run().underflow {
        timeline.replay(policy.clone_box().as_mut(), &mut |segment| {
            if !segment.is_lost() {
                let one = underflow.worst(segment.from, segment.to, segment.scale);
                worst.elements = worst.elements.max(one.elements);
                worst.l1 = worst.l1.max(one.l1);
                worst.l2 = worst.l2.max(one.l2);
            }
        });
    }
    let measured = cost.lost_update.is_some();
    Simulated {
        cost,
        skipped,
        worst_underflow: measured.then_some(worst),
    }
}

/// State updates that following all readings may cost before it settles for wider bounds.
const READINGS_BUDGET: usize = 20_000_000;

/// Least and most skips over all readings of the undecided steps, by following the set of reachable states.
///
/// Reading every undecided step as clean is not the least: a scale that climbs higher meets more overflows later. States
/// that behave alike from here on are kept once, with the least and the most skips on any way to them.
fn bounds(run: &Run, policy: &dyn Policy) -> Bounds {
    let quick = policy
        .doubling()
        .and_then(|rule| super::censored::bounds(&run.limits, policy.loss_scale(), rule));
    match quick {
        Some((low, high)) => Bounds {
            low,
            high,
            tight: true,
        },
        None => follow(run, policy),
    }
}

/// [`bounds`] by following every state: the slow, obvious version.
pub(super) fn follow(run: &Run, policy: &dyn Policy) -> Bounds {
    type Reached = (Box<dyn Policy>, u64, u64);
    let mut states: HashMap<[u64; 2], Reached> = HashMap::new();
    states.insert(policy.fingerprint(), (policy.clone_box(), 0, 0));
    let mut ended: Option<(u64, u64)> = None;
    let mut work = 0;
    for (at, limits) in run.limits.iter().enumerate() {
        work += states.len();
        if work > READINGS_BUDGET {
            let always = run.always_overflowing();
            return Bounds {
                low: always.min(run.len()),
                high: run.len(),
                tight: false,
            };
        }
        let mut next: HashMap<[u64; 2], Reached> = HashMap::with_capacity(states.len());
        // The states of one step do not act on each other, so the map's order cannot reach the result.
        for (state, low, high) in states.into_values() {
            let verdict = limits.at(state.loss_scale() as f32);
            let readings: &[bool] = match verdict {
                Verdict::Clean => &[false],
                Verdict::Overflow => &[true],
                Verdict::Unknown => &[false, true],
            };
            for &found_inf in readings {
                let mut state = state.clone_box();
                match state.update(Observed {
                    found_inf,
                    amax: run.amax[at],
                }) {
                    Ok(update) => {
                        let skips = u64::from(update.skipped);
                        let entry = next
                            .entry(state.fingerprint())
                            .or_insert((state, u64::MAX, 0));
                        entry.1 = entry.1.min(low + skips);
                        entry.2 = entry.2.max(high + skips);
                    }
                    Err(_) => {
                        let (least, most) = ended.unwrap_or((u64::MAX, 0));
                        ended = Some((least.min(low + 1), most.max(high + 1)));
                    }
                }
            }
        }
        states = next;
    }
    let ends = states
        .into_values()
        .map(|(_, low, high)| (low, high))
        .chain(ended);
    let (low, high) = ends.fold((u64::MAX, 0), |(low, high), (l, h)| {
        (low.min(l), high.max(h))
    });
    Bounds {
        low,
        high,
        tight: true,
    }
}

/// Replays a policy over a run, the run prepared on the way.
pub fn replay(run: &Run, policy: &dyn Policy, visit: &mut dyn FnMut(&Segment)) -> Option<Stopped> {
    Timeline::new(run)
        .replay(policy.clone_box().as_mut(), visit)
        .0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minima_find_what_a_scan_finds() {
        let mut seed = 3u32;
        let values: Vec<f32> = (0..5000)
            .map(|_| {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (seed >> 8) as f32
            })
            .collect();
        let minima = Minima::new(values.iter().copied());
        for from in (0..5000).step_by(37) {
            for to in [from, from + 1, from + 17, 4999, 5000] {
                let to = to.min(5000).max(from);
                for limit in [0.0, 100.0, 30_000.0, 1e6, 1.7e7] {
                    let slow = (from..to).find(|&i| values[i] <= limit).unwrap_or(to);
                    assert_eq!(minima.next(from, to, limit), slow, "{from}..{to} {limit}");
                }
            }
        }
    }

    #[test]
    fn bytes_find_the_same_step_as_limits() {
        let mut seed = 5u32;
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            seed >> 8
        };
        let limits: Vec<Limits> = (0..30_000)
            .map(|i| match next() % 50 {
                0 if i % 3 == 0 => Limits::ALWAYS,
                1..40 => Limits::NEVER,
                _ => Limits::of_amax(f32::from_bits(next() % 0x7F80_0000)),
            })
            .collect();
        let exponents = Exponents::new(&limits);
        for from in (0..30_000).step_by(811) {
            for to in [from, from + 1, from + 63, from + 200, from + 5000, 30_000] {
                let to = to.min(30_000);
                if from == to {
                    continue;
                }
                for k in [-126, -100, -20, 0, 1, 16, 24, 60, 125] {
                    let scale = 2f32.powi(k);
                    let slow = (from..to)
                        .find(|&i| limits[i].at(scale) == Verdict::Overflow)
                        .unwrap_or(to);
                    let limit = Exponents::limit(scale).unwrap();
                    assert_eq!(exponents.next(from, to, limit), slow, "{from}..{to} 2^{k}");
                }
            }
        }
        assert_eq!(Exponents::limit(3.0), None);
        assert_eq!(Exponents::limit(2f32.powi(126)), None);
    }
}
