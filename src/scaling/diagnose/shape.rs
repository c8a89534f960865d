//! The shape of a history: bursts of overflows, quiet stretches between them, rises and falls in octaves.
//!
//! ```text
//!   scale  ──┐                 ┌──┐        ┌──┐
//!            └┐                │  └─ burst │  └─ burst       falls are events, seen or implied
//!             └─ burst ────────┘  ─────────┘                 rises are growths, nearly always implied
//! ```
//!
//! What the log does not say is inferred here, and marked: a value of `after` formats stands for one octave more before
//! it; the next value that is higher than the last one left behind means growth between; a sample that is lower than the
//! one before it means as many overflows as octaves lie between, at least.

use super::dialects::{Dialect, Weight};
use super::history::{CLOCKS, Calm, Entry, Event, History, Losses, PRINTS};
use super::seen::{Clock, Prints, Reading};

/// Steps that count as the start of a run.
pub const START_STEPS: u64 = 100;

/// Overflows without a clean step between them.
#[derive(Debug, Clone, PartialEq)]
pub struct Burst {
    /// The first line.
    pub line: u64,
    /// The last line.
    pub last_line: u64,
    /// How many.
    pub count: u64,
    /// Only a lower bound, from two samples.
    pub inferred: bool,
    /// Counted by the framework within a window, without lines of their own.
    pub counted: bool,
    /// The first and last step, each as a range; `None` where steps cannot be told.
    pub steps: Option<[(u64, u64); 2]>,
    /// Octaves of growth since the burst before.
    pub growth: f64,
    /// Octaves of backoff within it.
    pub fall: f64,
    /// The scale that overflowed first, as log2.
    pub before: Option<f64>,
    /// The scale left behind, as log2.
    pub after: Option<f64>,
    /// The most events in a row that left the scale at the framework's floor.
    pub pinned: u64,
    /// In the start region.
    pub at_start: bool,
    /// Which run of the log, from 0.
    pub run: usize,
}

/// Progress between bursts.
#[derive(Debug, Clone, PartialEq)]
pub struct Quiet {
    /// The first line.
    pub line: u64,
    /// Clean steps, at least.
    pub clean: u64,
    /// Progress lines.
    pub records: u64,
    /// The most steps between two of them.
    pub span: u64,
    /// Training losses.
    pub train: Option<Losses>,
    /// Validation losses.
    pub validation: Option<Losses>,
    /// Non-finite training losses.
    pub nonfinite: u64,
    /// Which run.
    pub run: usize,
}

/// A part of the history.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    /// Overflows.
    Burst(Burst),
    /// Progress.
    Quiet(Quiet),
}

/// A change of the scale, printed or implied.
#[derive(Debug, Clone, PartialEq)]
pub struct Rise {
    /// The line that shows it.
    pub line: u64,
    /// The steps between which it happened.
    pub steps: Option<(u64, u64)>,
    /// Octaves.
    pub octaves: f64,
    /// The scale after it, as log2.
    pub after: f64,
    /// Not printed.
    pub inferred: bool,
    /// How many bursts had happened.
    pub bursts: usize,
}

/// One event as the history has it, values filled in.
#[derive(Debug, Clone, PartialEq)]
pub struct Filled {
    /// The line.
    pub line: u64,
    /// The step, where it is known.
    pub step: Option<u64>,
    /// The steps between which it lies.
    pub steps: Option<(u64, u64)>,
    /// What happened.
    pub kind: FilledKind,
    /// The scale before, as the log's unit has it.
    pub before: Option<f64>,
    /// The scale after.
    pub after: Option<f64>,
    /// No line reports it.
    pub inferred: bool,
    /// The scale before is not printed, or the one after.
    pub implied: [bool; 2],
    /// How many lines report it.
    pub copies: u32,
    /// How many steps it stands for.
    pub count: u64,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FilledKind {
    /// The step was skipped and the scale fell.
    Overflow,
    /// The step was skipped and the scale kept.
    Kept,
    /// The step was made in spite of the overflow.
    StillUpdated,
    /// The scale grew.
    Growth,
    /// A run begins again.
    Restart,
    /// The framework gave up.
    Stopped,
}

impl FilledKind {
    /// The word in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            FilledKind::Overflow => "overflow",
            FilledKind::Kept => "overflow_scale_kept",
            FilledKind::StillUpdated => "overflow_not_skipped",
            FilledKind::Growth => "growth",
            FilledKind::Restart => "restart",
            FilledKind::Stopped => "stopped_at_minimum",
        }
    }
}

/// The shape of a log.
#[derive(Debug, Clone, Default)]
pub struct Shape {
    /// Bursts and quiet stretches, in order.
    pub items: Vec<Item>,
    /// Growths.
    pub rises: Vec<Rise>,
    /// Events, growths, restarts.
    pub filled: Vec<Filled>,
    /// Runs in the log.
    pub runs: usize,
    /// Lines where a run begins again with the scale of the first one.
    pub unrestored: Vec<u64>,
    /// Events that are copies of others although they do not stand beside them.
    pub repeats: u64,
    /// Events in an `after` format whose value rose where nothing can have grown.
    pub impossible_rises: u64,
    /// The clock that steps are told by.
    pub clock: Option<usize>,
    /// Steps of the run that the log spans.
    pub span: Option<(u64, u64)>,
    /// The last scale, as log2.
    pub last: Option<f64>,
    /// The least scale seen, as log2, no rounded 0 among them, and its line.
    pub least: Option<(f64, u64)>,
    /// The framework gave up at its minimum: the line.
    pub stopped: Option<u64>,
    /// Whether events have lines of their own.
    pub event_lines: bool,
    /// Whether events were counted by windows.
    pub windows: bool,
}

/// Stands for the logarithm of 0: below that of every double.
const ZERO: f64 = -1100.0;

/// A scale as log2; a zero is below every double.
pub fn lg(value: f64, dialect: &Dialect) -> f64 {
    if dialect.log2 {
        value
    } else if value <= 0.0 {
        ZERO
    } else {
        value.log2().min(-ZERO)
    }
}

/// Octaves that rounding or a printed digit may make.
const NOISE: f64 = 0.02;

struct Builder<'a> {
    dialect: &'a Dialect,
    shape: Shape,
    clock: Option<usize>,
    base: u64,
    run: usize,
    run_base: u64,
    known: Option<u64>,
    since: u64,
    records_in_run: u64,
    start_region: bool,
    now: Option<f64>,
    first: Option<f64>,
    burst: Option<Burst>,
    quiet: Option<Quiet>,
    last_event: Option<LastEvent>,
    pinned: u64,
    next_known: Vec<Option<u64>>,
    bursts: usize,
    risen: f64,
    window_left: (u64, bool),
    values: Vec<u64>,
    impossible: u64,
}

/// How often each value stands in a list, where all stand equally often and more than once.
fn repeated(values: &[u64]) -> Option<u64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let mut times = None;
    for group in sorted.chunk_by(|a, b| a == b) {
        if *times.get_or_insert(group.len()) != group.len() {
            return None;
        }
    }
    times.filter(|times| *times > 1).map(|times| times as u64)
}

struct LastEvent {
    kept: bool,
    step: Option<(u64, u64)>,
    time: Option<f64>,
    records_since: u64,
}

/// Finds the shape of a history. `scaler` picks one of several.
pub fn shape(history: &History, dialect: &Dialect, scaler: Option<u64>) -> Shape {
    let clock = main_clock(history, dialect);
    let base = clock.map_or(0, |clock| match history.first_steps[clock] {
        (Some(first), Some(second)) => first.saturating_sub(second.saturating_sub(first).max(1)),
        (Some(first), None) if first > START_STEPS => first - 1,
        _ => 0,
    });
    let event_lines = history
        .entries
        .iter()
        .any(|entry| matches!(entry, Entry::Event(_)));
    let windows = !event_lines && history.counted.is_some_and(|all| all > 0);
    // The next step shown behind each entry, for a range around an event.
    let mut next_known = vec![None; history.entries.len()];
    let mut next = None;
    for (at, entry) in history.entries.iter().enumerate().rev() {
        next_known[at] = next;
        if let (Some(clock), Entry::Calm(calm)) = (clock, entry)
            && calm.from[clock].is_some()
        {
            next = calm.from[clock];
        }
    }
    let mut builder = Builder {
        dialect,
        shape: Shape {
            clock,
            event_lines,
            windows,
            runs: 1,
            ..Shape::default()
        },
        clock,
        base,
        run: 0,
        run_base: 0,
        known: None,
        since: 0,
        records_in_run: 0,
        start_region: history.first_epoch.is_none_or(|epoch| epoch < 2),
        now: None,
        first: None,
        burst: None,
        quiet: None,
        last_event: None,
        pinned: 0,
        next_known,
        bursts: 0,
        risen: 0.0,
        window_left: (0, false),
        values: Vec::new(),
        impossible: 0,
    };
    for (at, entry) in history.entries.iter().enumerate() {
        builder.entry(at, entry, scaler);
    }
    builder.end_burst();
    builder.end_quiet(None);
    builder.shape.last = builder.now;
    if clock.is_some() {
        builder.shape.span = builder.known.map(|known| (builder.base.min(known), known));
    }
    builder.shape
}

/// The clock that shows most: a framework's own steps before a progress bar, prints last.
fn main_clock(history: &History, dialect: &Dialect) -> Option<usize> {
    let advances = &history.advances;
    let order = [
        Clock::Loop as usize,
        Clock::Applied as usize,
        Clock::Counter as usize,
    ];
    let best = order
        .into_iter()
        .max_by_key(|clock| (advances[*clock], CLOCKS - clock))?;
    let bar = Clock::Bar as usize;
    if advances[best] >= 2 || advances[best] == 1 && advances[bar] < 2 {
        return Some(best);
    }
    if advances[bar] >= 1 {
        return Some(bar);
    }
    // Prints count steps where hardly anything else is printed.
    let prints = advances[PRINTS] >= 3 && history.records <= 3 * advances[PRINTS];
    (dialect.weight == Weight::Print && prints).then_some(PRINTS)
}

impl Builder<'_> {
    fn entry(&mut self, at: usize, entry: &Entry, scaler: Option<u64>) {
        match entry {
            Entry::Calm(calm) => self.calm(calm),
            Entry::Event(event) => {
                if scaler.is_some()
                    && event.overflow.scaler.is_some()
                    && event.overflow.scaler != scaler
                {
                    return;
                }
                self.event(at, event);
            }
            Entry::Growth {
                line,
                before,
                after,
                ..
            } => {
                self.end_burst();
                let to = after.map(|a| lg(a, self.dialect));
                let from = before.map(|b| lg(b, self.dialect)).or(self.now);
                if let (Some(from), Some(to)) = (from, to) {
                    self.rise(*line, to - from, to, false);
                    self.shape.filled.push(Filled {
                        line: *line,
                        step: None,
                        steps: self.here(),
                        kind: FilledKind::Growth,
                        before: *before,
                        after: *after,
                        inferred: false,
                        implied: [false; 2],
                        copies: 1,
                        count: 1,
                    });
                }
                self.scale(*line, to);
                // A growth follows clean steps.
                self.quiet_at(*line).clean += 1;
            }
            Entry::Stopped { line } => {
                self.shape.stopped.get_or_insert(*line);
                self.shape
                    .filled
                    .push(self.mark(*line, FilledKind::Stopped));
            }
            Entry::Restart { line } => self.restart(*line),
        }
    }

    fn mark(&self, line: u64, kind: FilledKind) -> Filled {
        Filled {
            line,
            step: None,
            steps: self.here(),
            kind,
            before: None,
            after: None,
            inferred: false,
            implied: [false; 2],
            copies: 1,
            count: 1,
        }
    }

    fn restart(&mut self, line: u64) {
        self.end_burst();
        self.end_quiet(None);
        self.risen = 0.0;
        self.run += 1;
        self.shape.runs += 1;
        self.run_base = self.known.unwrap_or(0);
        self.records_in_run = 0;
        self.start_region = true;
        self.last_event = None;
        self.pinned = 0;
        self.now = None;
        self.shape.filled.push(self.mark(line, FilledKind::Restart));
    }

    /// Where the run stands, as a range of steps.
    fn here(&self) -> Option<(u64, u64)> {
        self.clock?;
        let at = self.known.unwrap_or(self.base);
        Some((at, at))
    }

    fn quiet_at(&mut self, line: u64) -> &mut Quiet {
        let run = self.run;
        self.quiet.get_or_insert(Quiet {
            line,
            clean: 0,
            records: 0,
            span: 0,
            train: None,
            validation: None,
            nonfinite: 0,
            run,
        })
    }

    fn end_burst(&mut self) {
        let values = std::mem::take(&mut self.values);
        let impossible = std::mem::take(&mut self.impossible);
        if let Some(mut burst) = self.burst.take() {
            // Each value equally often: every process wrote its whole ladder, one after the other.
            if impossible > 0
                && let Some(times) = repeated(&values)
            {
                burst.count /= times;
                burst.fall /= times as f64;
                self.shape.repeats += values.len() as u64 / times * (times - 1);
                self.shape.impossible_rises -= impossible;
            }
            // Up to the very first scale and down again at once: the scaler's state was not restored.
            let first = self.first.zip(burst.before);
            if burst.growth >= 2.0
                && burst.fall >= (burst.growth / 2.0).max(2.0)
                && first.is_some_and(|(first, before)| (first - before).abs() < NOISE)
            {
                burst.at_start = true;
                burst.growth = 0.0;
                self.shape.rises.pop();
                self.shape.unrestored.push(burst.line);
                for filled in self.shape.filled.iter_mut().rev() {
                    if filled.line < burst.line {
                        break;
                    }
                    if filled.kind == FilledKind::Growth {
                        filled.kind = FilledKind::Restart;
                    }
                }
            }
            self.shape.items.push(Item::Burst(burst));
            self.bursts += 1;
        }
    }

    /// Ends the quiet stretch; `clean` steps are known to lie in it.
    fn end_quiet(&mut self, clean: Option<u64>) {
        let tail = match (&self.last_event, self.known, clean) {
            (_, _, Some(clean)) => clean,
            (
                Some(LastEvent {
                    step: Some(step), ..
                }),
                Some(known),
                None,
            ) => known.saturating_sub(step.1),
            (Some(event), ..) => event.records_since.saturating_sub(1),
            (None, Some(known), None) => known.saturating_sub(self.base),
            _ => self.quiet.as_ref().map_or(0, |quiet| quiet.records),
        };
        if let Some(mut quiet) = self.quiet.take() {
            quiet.clean = quiet.clean.max(tail);
            self.shape.items.push(Item::Quiet(quiet));
        }
    }

    fn rise(&mut self, line: u64, octaves: f64, after: f64, inferred: bool) {
        let bursts = self.bursts;
        self.risen += octaves.min(64.0);
        let to = self.known.unwrap_or(self.base);
        self.shape.rises.push(Rise {
            line,
            steps: self.clock.map(|_| (to, to)),
            octaves,
            after,
            inferred,
            bursts,
        });
    }

    /// The scale is this from here on.
    fn scale(&mut self, line: u64, lg: Option<f64>) {
        let Some(lg) = lg else { return };
        self.now = Some(lg);
        self.first.get_or_insert(lg);
        if (lg > ZERO || self.dialect.log2) && self.shape.least.is_none_or(|(least, _)| lg < least)
        {
            self.shape.least = Some((lg, line));
        }
    }

    fn event(&mut self, at: usize, event: &Event) {
        self.since += 1;
        let overflow = &event.overflow;
        let of = |value: Option<super::seen::Printed>| value.map(|p| lg(p.value, self.dialect));
        let (printed_before, printed_after) = (of(overflow.before), of(overflow.after));
        let steps = self.steps_of(at, event);
        let clean = self.clean_before(steps);
        let bare = self
            .last_event
            .as_ref()
            .is_some_and(|last| last.records_since == 0);
        let timed = match (self.last_event.as_ref().and_then(|l| l.time), event.time) {
            (Some(a), Some(b)) => (b - a).rem_euclid(86_400.0) > 2.0,
            _ => false,
        };
        let now = self.now;
        let kept_by_hysteresis = overflow.hysteresis || overflow.at_floor;
        let (before, after) = match (event.prints, printed_before, printed_after) {
            (_, Some(a), Some(b)) => (Some(a), Some(b)),
            (Prints::Before, Some(a), None) => (Some(a), Some(a - 1.0)),
            (_, Some(a), None) => (Some(a), None),
            (_, None, Some(b)) => {
                let before = match now {
                    // The same value again without a clean step between: it is held, by a floor or a tolerance.
                    Some(now) if (b - now).abs() < NOISE && clean == Some(0) => b,
                    Some(now) if kept_by_hysteresis => now.max(b),
                    _ => b + 1.0,
                };
                (Some(before), Some(b))
            }
            (_, None, None) => (None, None),
        };
        let growth = match (now, before) {
            (Some(now), Some(before)) if before > now + NOISE => before - now,
            _ => 0.0,
        };
        // A value that rises where there was no room for growth comes from another process.
        let impossible = printed_before.is_none()
            && event.prints == Prints::After
            && bare
            && !timed
            && now
                .zip(printed_after)
                .is_some_and(|(now, after)| after > now + NOISE);
        self.shape.impossible_rises += u64::from(impossible);
        let rose = u64::from(impossible);
        // Back at the very first scale after a fall, with a fall right behind: the scaler's state was not restored.
        let room = clean.unwrap_or(u64::MAX);
        let restored = self.first.zip(before).is_some_and(|(first, before)| {
            growth >= 2.0 && (first - before).abs() < NOISE && (room as f64) < growth * 10.0
        }) && !impossible
            && printed_before.is_some();
        if restored {
            self.restart(event.line);
            self.shape.unrestored.push(event.line);
        }
        let fresh = self.burst.is_none()
            || clean.is_some_and(|clean| clean > 0)
            || growth > 0.0 && !impossible
            || restored;
        if fresh {
            self.end_burst();
            self.end_quiet(clean);
            self.pinned = 0;
        }
        if growth > 0.0 && !impossible && !restored {
            let from = self.last_event.as_ref().and_then(|l| l.step).map(|s| s.1);
            if let Some(before) = before {
                self.rise(event.line, growth, before, true);
                if let (Some(rise), Some((_, to))) = (self.shape.rises.last_mut(), steps) {
                    rise.steps = Some((from.unwrap_or(self.base), to));
                }
                let unit = |value: f64| {
                    if self.dialect.log2 {
                        value
                    } else {
                        value.exp2()
                    }
                };
                self.shape.filled.push(Filled {
                    line: event.line,
                    step: None,
                    steps: steps.map(|s| (from.unwrap_or(self.base), s.1)),
                    kind: FilledKind::Growth,
                    before: now.map(unit),
                    after: Some(unit(before)),
                    inferred: true,
                    implied: [false; 2],
                    copies: 1,
                    count: growth.round() as u64,
                });
            }
        }
        let fall = match (before, after) {
            (Some(before), Some(after)) => (before - after).max(0.0),
            _ => 0.0,
        };
        let floor = self
            .dialect
            .floor
            .map_or(0.0, |floor| lg(floor, self.dialect).max(0.0));
        let held = match (before, after) {
            (Some(before), Some(after)) => {
                (before - after).abs() < NOISE && after <= floor + NOISE && !overflow.hysteresis
            }
            _ => overflow.at_floor,
        };
        self.pinned = if held { self.pinned + 1 } else { 0 };
        let at_start = self.at_start(steps);
        if self.burst.is_none() {
            self.burst = Some(Burst {
                line: event.line,
                last_line: event.last_line,
                count: 0,
                inferred: false,
                counted: false,
                steps: steps.map(|s| [s, s]),
                growth: std::mem::take(&mut self.risen),
                fall: 0.0,
                before,
                after,
                pinned: 0,
                at_start,
                run: self.run,
            });
        }
        self.impossible += rose;
        if let Some(after) = printed_after
            && self.values.len() < 100_000
        {
            self.values.push(after.to_bits());
        }
        if let Some(burst) = &mut self.burst {
            burst.last_line = event.last_line;
            burst.count += 1;
            burst.fall += fall;
            if let (Some(both), Some(steps)) = (&mut burst.steps, steps) {
                both[1] = steps;
            }
            if after.is_some() {
                burst.after = after;
            }
            if burst.before.is_none() {
                burst.before = before;
            }
            burst.pinned = burst.pinned.max(self.pinned);
            burst.at_start &= at_start;
        }
        let unit = |value: f64| {
            if self.dialect.log2 {
                value
            } else {
                value.exp2()
            }
        };
        self.shape.filled.push(Filled {
            line: event.line,
            step: event
                .iteration
                .or_else(|| steps.filter(|s| s.0 == s.1).map(|s| s.0)),
            steps,
            kind: if overflow.still_updated {
                FilledKind::StillUpdated
            } else if fall > 0.0 || after.is_none() {
                FilledKind::Overflow
            } else {
                FilledKind::Kept
            },
            before: overflow.before.map(|p| p.value).or(before.map(unit)),
            after: overflow.after.map(|p| p.value).or(after.map(unit)),
            inferred: false,
            implied: [overflow.before.is_none(), overflow.after.is_none()],
            copies: event.copies,
            count: 1,
        });
        self.scale(event.line, before);
        // A value that is only implied is no evidence of how low the scale went.
        self.now = after.or(self.now);
        if let Some(after) = printed_after {
            self.scale(event.line, Some(after));
        }
        self.last_event = Some(LastEvent {
            kept: overflow.hysteresis || before.is_some() && before == after && after > Some(floor),
            step: steps,
            time: event.time,
            records_since: 0,
        });
    }

    /// The step of an event, as a range.
    fn steps_of(&self, at: usize, event: &Event) -> Option<(u64, u64)> {
        let Some(clock) = self.clock else {
            return event.iteration.map(|n| (n + 1, n + 1));
        };
        let shown = event.place[clock].unwrap_or(self.base);
        let low = shown + self.since;
        let high = self.next_known[at].map_or(u64::MAX, |next| next.max(low));
        // One step between two shown: that is it.
        Some((low, if high == u64::MAX { low } else { high }))
    }

    /// Clean steps between the event before and this one, at least; `None` before the first.
    fn clean_before(&self, steps: Option<(u64, u64)>) -> Option<u64> {
        let last = self.last_event.as_ref()?;
        if let (Some(before), Some(now)) = (last.step, steps) {
            // Where hysteresis was spent, the fall belongs to it if the two may be neighbours; other events are taken
            // as far apart as the lines between them say.
            let from = if last.kept { before.1 } else { before.0 };
            return Some(now.0.saturating_sub(from + 1));
        }
        Some(last.records_since.saturating_sub(1))
    }

    fn at_start(&self, steps: Option<(u64, u64)>) -> bool {
        if !self.start_region {
            return false;
        }
        match (self.clock, steps) {
            (None, _) => self.records_in_run < 2,
            (Some(_), Some((low, _))) => low.saturating_sub(self.run_base) <= START_STEPS,
            (Some(_), None) => self.records_in_run < 2,
        }
    }

    fn calm(&mut self, calm: &Calm) {
        let (from, to) = match self.clock {
            Some(clock) => (calm.from[clock], calm.to[clock]),
            None => (None, None),
        };
        let reached = self.known.unwrap_or(self.base);
        if from.is_some() {
            self.known = from;
            self.since = 0;
        }
        let value = calm
            .scale
            .map(|(printed, reading)| (lg(printed.value, self.dialect), printed, reading));
        if self.shape.windows && calm.skipped > 0 {
            self.window(calm, reached, from, value.map(|v| v.0));
        } else if let Some((now, printed, reading)) = value {
            self.sample(calm, now, printed.half_unit, reading, reached, from);
        }
        if let Some(last) = &mut self.last_event {
            last.records_since += calm.records + calm.ticks;
        }
        self.records_in_run += calm.records;
        let span = to.map_or(0, |to| to.saturating_sub(reached) / calm.records.max(1));
        let quiet = self.quiet_at(calm.line);
        quiet.records += calm.records;
        quiet.span = quiet.span.max(span);
        quiet.nonfinite += calm.nonfinite;
        for (all, new) in [
            (&mut quiet.train, calm.train),
            (&mut quiet.validation, calm.validation),
        ] {
            match (all.as_mut(), new) {
                (Some(all), Some(new)) => {
                    all.last = new.last;
                    all.least = all.least.min(new.least);
                    all.greatest = all.greatest.max(new.greatest);
                }
                (None, new) => *all = new,
                _ => {}
            }
        }
        if from.is_some() && to.is_some() {
            self.known = to;
            self.since = 0;
        }
    }

    /// A window in which the framework counted skipped steps.
    fn window(&mut self, calm: &Calm, reached: u64, from: Option<u64>, now: Option<f64>) {
        let length = from.map(|from| from.saturating_sub(reached).max(calm.skipped));
        let first = (
            reached + 1,
            from.map_or(reached + 1, |from| {
                (from + 1).saturating_sub(calm.skipped).max(reached + 1)
            }),
        );
        let last = (
            reached + calm.skipped,
            from.unwrap_or(reached + calm.skipped),
        );
        let clean_since = self.last_event.as_ref().map(|last| {
            last.step
                .map_or(last.records_since, |s| reached.saturating_sub(s.1))
        });
        let steps = self.clock.map(|_| [first, last]);
        let before = self.now;
        let change = match (self.now, now) {
            (Some(before), Some(now)) => before - now,
            _ => 0.0,
        };
        // The skips of neighbouring windows are one burst where no step between them was clean, or where the first
        // spent hysteresis and the second is the fall.
        let (left, kept) = self.window_left;
        let joins =
            self.burst.is_some() && clean_since == Some(0) && (left == 0 || kept && change > NOISE);
        let room = length.is_some_and(|length| length > calm.skipped);
        let at_start = self.at_start(Some(first));
        if !joins {
            self.end_burst();
            self.end_quiet(clean_since);
        }
        if self.burst.is_none() {
            self.burst = Some(Burst {
                line: calm.line,
                last_line: calm.line,
                count: 0,
                inferred: false,
                counted: true,
                steps,
                // As many octaves as came back: the same scale after a fall means one growth before it, where the
                // window leaves room for one.
                growth: match std::mem::take(&mut self.risen) {
                    0.0 if before.is_some() && change <= NOISE && room => 1.0,
                    risen => risen,
                },
                fall: 0.0,
                before,
                after: now,
                pinned: 0,
                at_start,
                run: self.run,
            });
        }
        if let Some(burst) = &mut self.burst {
            burst.count += calm.skipped;
            burst.fall += change.max(0.0);
            burst.last_line = calm.line;
            burst.after = now.or(burst.after);
            burst.at_start &= at_start;
            if let (Some(both), Some(steps)) = (&mut burst.steps, steps) {
                both[1] = steps[1];
            }
        }
        self.shape.filled.push(Filled {
            line: calm.line,
            step: None,
            steps: steps.map(|s| (s[0].0, s[1].1)),
            kind: if change > NOISE {
                FilledKind::Overflow
            } else {
                FilledKind::Kept
            },
            before: before.map(|b| self.unit(b)),
            after: now.map(|n| self.unit(n)),
            inferred: true,
            implied: [false; 2],
            copies: 1,
            count: calm.skipped,
        });
        self.scale(calm.line, now);
        self.last_event = Some(LastEvent {
            kept: false,
            step: Some(last),
            time: None,
            records_since: 0,
        });
        // Steps of the window that were not skipped are clean.
        let clean = length.map_or(0, |length| length.saturating_sub(calm.skipped));
        self.window_left = (clean, change <= NOISE);
        if clean > 0 {
            self.quiet_at(calm.line).clean = clean;
        }
    }

    fn unit(&self, value: f64) -> f64 {
        if self.dialect.log2 {
            value
        } else {
            value.exp2()
        }
    }

    /// A progress line's scale against the one before.
    fn sample(
        &mut self,
        calm: &Calm,
        now: f64,
        half_unit: f64,
        reading: Reading,
        reached: u64,
        from: Option<u64>,
    ) {
        let Some(before) = self.now else {
            self.scale(
                calm.line,
                Some(now).filter(|_| !(half_unit > 0.0 && now <= ZERO)),
            );
            self.now = Some(now);
            return;
        };
        let printed = self.unit(now);
        let old = self.unit(before);
        let rounding = half_unit * (1.0 + 1e-9);
        if (printed - old).abs() <= rounding || (now - before).abs() < NOISE {
            return;
        }
        let mean = reading == Reading::Mean;
        let steps = self.clock.map(|_| (reached, from.unwrap_or(reached)));
        if now > before {
            // A mean moves before the scale has gone all the way.
            if mean && now - before < 0.9 || self.dialect.log2 {
                return;
            }
            self.end_burst();
            self.rise(calm.line, now - before, now, true);
            if let Some(rise) = self.shape.rises.last_mut() {
                rise.steps = steps;
            }
            self.shape.filled.push(Filled {
                line: calm.line,
                step: None,
                steps,
                kind: FilledKind::Growth,
                before: Some(old),
                after: Some(printed),
                inferred: true,
                implied: [false; 2],
                copies: 1,
                count: (now - before).round().max(1.0) as u64,
            });
            self.scale(calm.line, Some(now));
            return;
        }
        if self.shape.event_lines {
            // Events have lines of their own; a lower sample shows one that the log has not.
            if !mean {
                self.scale(calm.line, Some(now).filter(|now| *now > ZERO));
            }
            return;
        }
        // A printed 0 stands for anything below half a unit.
        let low = if printed <= 0.0 && half_unit > 0.0 && !self.dialect.log2 {
            half_unit.log2()
        } else {
            now
        };
        let count = (before - low - NOISE).ceil().max(1.0) as u64;
        let last = self.last_event.take();
        let clean = last.as_ref().map(|last| {
            last.step
                .map_or(last.records_since, |s| reached.saturating_sub(s.1))
        });
        // A median of twenty steps follows a fall at half its speed.
        let lag = if reading == Reading::Median { 20 } else { 0 };
        let joins = self.burst.is_some() && clean.is_some_and(|clean| clean <= lag);
        let first = (reached + 1, from.unwrap_or(reached + 1).max(reached + 1));
        let at_start = self.at_start(Some(first));
        self.last_event = last;
        if !joins {
            self.end_burst();
            self.end_quiet(clean);
        }
        if self.burst.is_none() {
            let growth = std::mem::take(&mut self.risen);
            self.burst = Some(Burst {
                line: calm.line,
                last_line: calm.line,
                count: 0,
                inferred: true,
                counted: false,
                steps: steps.map(|_| [first, first]),
                growth,
                fall: 0.0,
                before: Some(before),
                after: Some(now),
                pinned: 0,
                at_start,
                run: self.run,
            });
        }
        if let Some(burst) = &mut self.burst {
            burst.count += count;
            burst.fall += before - low;
            burst.last_line = calm.line;
            burst.after = Some(now);
        }
        self.shape.filled.push(Filled {
            line: calm.line,
            step: None,
            steps,
            kind: FilledKind::Overflow,
            before: Some(old),
            after: Some(printed),
            inferred: true,
            implied: [false; 2],
            copies: 1,
            count,
        });
        self.scale(calm.line, Some(now).filter(|now| *now > ZERO));
        self.now = Some(now);
        self.last_event = Some(LastEvent {
            kept: false,
            step: self.clock.map(|_| {
                let at = from.unwrap_or(reached);
                (at.min(reached + count), at.min(reached + count))
            }),
            time: None,
            records_since: 0,
        });
    }
}
