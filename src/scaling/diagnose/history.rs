//! A run's history as its log tells it: events with their copies joined, progress in between, in bounded memory.
//!
//! ```text
//!  line   overflow  32768 ┐ copies of one event (eight ranks, or two lines of one framework)
//!  line   overflow  32768 ┘
//!  line   loss 6.1  step 4 ┐ one calm stretch: first and last step, least and greatest loss
//!  line   loss 5.9  step 5 ┘
//!  line   overflow  16384    the next event
//! ```

use super::dialects::{ALL, Message, Processes, Weight};
use super::lines::Facts;
use super::seen::{Clock, Loss, Overflow, Printed, Prints, Reading, Record, Seen};
use super::text::{MOST_COUNT, Style};

/// Clocks: the four of [`Clock`], and the number of prints.
pub const CLOCKS: usize = 5;
/// The place of the print counter.
pub const PRINTS: usize = 4;

/// The last step that each clock showed, counted on over epochs and restarts; `None` before its first.
pub type Place = [Option<u64>; CLOCKS];

/// Losses of a stretch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Losses {
    /// The first.
    pub first: f64,
    /// The last.
    pub last: f64,
    /// The least.
    pub least: f64,
    /// The greatest.
    pub greatest: f64,
}

impl Losses {
    fn add(into: &mut Option<Losses>, value: f64) {
        if !value.is_finite() {
            return;
        }
        match into {
            None => {
                *into = Some(Losses {
                    first: value,
                    last: value,
                    least: value,
                    greatest: value,
                });
            }
            Some(losses) => {
                losses.last = value;
                losses.least = losses.least.min(value);
                losses.greatest = losses.greatest.max(value);
            }
        }
    }
}

/// Progress without an event between: lines of one scale, one after the other.
#[derive(Debug, Clone, PartialEq)]
pub struct Calm {
    /// The first line.
    pub line: u64,
    /// The last line.
    pub last_line: u64,
    /// Progress lines.
    pub records: u64,
    /// Progress bar ticks.
    pub ticks: u64,
    /// The first step that each clock shows in it; `None` where it shows none.
    pub from: Place,
    /// Where the last line stands.
    pub to: Place,
    /// The scale they print.
    pub scale: Option<(Printed, Reading)>,
    /// Training losses.
    pub train: Option<Losses>,
    /// Validation losses.
    pub validation: Option<Losses>,
    /// Lines with a non-finite training loss.
    pub nonfinite: u64,
    /// Steps skipped in this window, by the framework's counter; such a stretch is one line.
    pub skipped: u64,
    /// A warning that the scale is small came with it.
    pub small: bool,
}

/// One event, its copies joined.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The first line that reports it.
    pub line: u64,
    /// The last.
    pub last_line: u64,
    /// Where the clocks stood.
    pub place: Place,
    /// The step the log names for it.
    pub iteration: Option<u64>,
    /// What is printed of it.
    pub overflow: Overflow,
    /// Which scale its values are.
    pub prints: Prints,
    /// How many lines of one kind report it.
    pub copies: u32,
    /// Seconds within the day.
    pub time: Option<f64>,
    /// Index of its dialect.
    pub dialect: usize,
}

/// What a log says, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Entry {
    /// Progress.
    Calm(Calm),
    /// An overflow.
    Event(Event),
    /// A printed growth.
    Growth {
        /// The line.
        line: u64,
        /// Where the clocks stood.
        place: Place,
        /// The scale before.
        before: Option<f64>,
        /// The scale after.
        after: Option<f64>,
    },
    /// The framework ended the run at its minimum scale.
    Stopped {
        /// The line.
        line: u64,
    },
    /// A new run begins, or an old one is taken up again.
    Restart {
        /// The line.
        line: u64,
    },
}

/// How many entries are kept; what comes later is only counted.
pub const MOST_ENTRIES: usize = 400_000;

/// Everything a log says about its scale.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// What happened, in order.
    pub entries: Vec<Entry>,
    /// Entries beyond the most that are kept: events among them, and all.
    pub left_out: (u64, u64),
    /// What the file is.
    pub facts: Facts,
    /// Messages by dialect.
    pub messages: Vec<u64>,
    /// Events by dialect, copies joined.
    pub events_by_dialect: Vec<u64>,
    /// The first scale printed.
    pub first: Option<Printed>,
    /// The last scale printed.
    pub last: Option<Printed>,
    /// Progress lines with a loss or a scale.
    pub records: u64,
    /// The longest row of non-finite training losses, and the line where it began.
    pub nonfinite_run: (u64, u64),
    /// A line from which on two losses in a row were ten times the best before them.
    pub blown_up: Option<u64>,
    /// Whether any event came in copies.
    pub copies: bool,
    /// The most copies of one event.
    pub most_copies: u32,
    /// A rounded print stands for another value: the line.
    pub rounded: Option<u64>,
    /// A framework's counter of skipped steps contradicts what the log shows: the line.
    pub counters_lie: Option<u64>,
    /// Steps skipped, by a counter within windows; `None` where no line has one.
    pub counted: Option<u64>,
    /// The first and the last of a counter since the beginning of the run, with their steps.
    pub counted_in_all: Option<[(u64, u64); 2]>,
    /// Growth intervals that lines state.
    pub intervals_said: Vec<u64>,
    /// Warnings that the scale is small.
    pub small: u64,
    /// Lines that say the step was made in spite of the overflow.
    pub still_updated: u64,
    /// The key has a text as its value.
    pub other_meaning: Option<u64>,
    /// The scheduler's order warning.
    pub order_warning: Option<u64>,
    /// A framework that prints no scale, by its lines.
    pub framework: Option<&'static str>,
    /// The log says that the run is in bf16.
    pub bf16: bool,
    /// Numbers with separators of another country: the line, and whether they were understood.
    pub localized: Option<(u64, bool)>,
    /// A message is cut off by the end of the file: the line.
    pub cut: Option<u64>,
    /// Distinct steps each clock showed.
    pub advances: [u64; CLOCKS],
    /// The first and second step of each clock, as printed.
    pub first_steps: [(Option<u64>, Option<u64>); CLOCKS],
    /// The first epoch printed, and the line.
    pub first_epoch: Option<u64>,
    /// Two ranks show different scales at one step: the line.
    pub ranks_differ: Option<u64>,
}

/// Clocks of one kind: steps that start again with each epoch are counted on.
#[derive(Debug, Clone, Copy, Default)]
struct Hand {
    last: Option<u64>,
    of: Option<u64>,
    offset: u64,
}

/// An event that later lines may be copies of.
#[derive(Debug, Clone)]
struct Open {
    kinds: Vec<(usize, usize, u32)>,
    ranks: Vec<(usize, u64)>,
    moved: bool,
}

/// Builds a history from messages.
#[derive(Debug)]
pub struct Collector {
    history: History,
    calm: Option<Calm>,
    event: Option<(Event, Open)>,
    hands: [Hand; CLOCKS],
    place: Place,
    epoch: Option<u64>,
    bars: Vec<(u64, u64)>,
    bar: Option<u64>,
    events: u64,
    events_since_record: u64,
    run_of_nonfinite: (u64, u64),
    best: Option<f64>,
    above_best: u32,
    last_value: Option<Printed>,
    last_after: Option<f64>,
    prints: u64,
    perhaps: Option<Box<Collector>>,
    perhaps_facts: PerhapsFacts,
    rank_scales: Vec<(u64, f64)>,
    ranks_apart: u32,
}

#[derive(Debug, Clone, Copy, Default)]
struct PerhapsFacts {
    prints: u64,
    powers: u64,
    greatest: f64,
}

impl Default for Collector {
    fn default() -> Self {
        Collector::new()
    }
}

impl Collector {
    /// An empty history.
    pub fn new() -> Collector {
        Collector {
            history: History {
                messages: vec![0; ALL.len()],
                events_by_dialect: vec![0; ALL.len()],
                ..History::default()
            },
            calm: None,
            event: None,
            hands: [Hand::default(); CLOCKS],
            place: [None; CLOCKS],
            epoch: None,
            bars: Vec::new(),
            bar: None,
            events: 0,
            events_since_record: 0,
            run_of_nonfinite: (0, 0),
            best: None,
            above_best: 0,
            last_value: None,
            last_after: None,
            prints: 0,
            perhaps: None,
            perhaps_facts: PerhapsFacts::default(),
            rank_scales: Vec::new(),
            ranks_apart: 0,
        }
    }

    /// Takes the next message.
    pub fn add(&mut self, message: &Message) {
        self.history.messages[message.dialect] += 1;
        let line = message.line;
        match message.seen {
            Seen::Overflow(overflow) => self.overflow(message, overflow),
            Seen::Growth {
                before,
                after,
                interval,
            } => {
                if let Some(interval) = interval {
                    self.history.intervals_said.push(interval);
                }
                self.growth(line, before, after);
            }
            Seen::GrowthInterval(interval) => {
                if self.history.intervals_said.len() < 1000 {
                    self.history.intervals_said.push(interval);
                }
            }
            Seen::Record(record) => self.record(line, record),
            Seen::Step(step) => {
                let clock = Clock::Loop as usize;
                self.step(line, clock, step, &Record::default());
                if let Some(calm) = &mut self.calm {
                    calm.from[clock] = calm.from[clock].or(self.place[clock]);
                    calm.to = self.place;
                }
            }
            Seen::Scale(printed) => {
                self.record(
                    line,
                    Record {
                        scale: Some((printed, Reading::Value)),
                        ..Record::default()
                    },
                );
            }
            Seen::PerhapsScale(printed) => self.perhaps(line, printed),
            Seen::Small(printed) => {
                self.history.small += 1;
                self.record(
                    line,
                    Record {
                        scale: Some((printed, Reading::Value)),
                        ..Record::default()
                    },
                );
                if let Some(calm) = &mut self.calm {
                    calm.small = true;
                }
            }
            Seen::Window(window) => self.history.intervals_said.push(window),
            Seen::Stopped(printed) => {
                // fairseq prints its limit, not the scale; icefall prints the scale it gave up at.
                if let Some(printed) = printed
                    && ALL[message.dialect].format == "icefall"
                {
                    self.printed(line, printed);
                }
                self.close();
                self.push(Entry::Stopped { line });
            }
            Seen::Start => self.restart(line),
            Seen::OrderWarning => {
                self.history.order_warning.get_or_insert(line);
            }
            Seen::OtherMeaning => {
                self.history.other_meaning.get_or_insert(line);
            }
            Seen::Framework(name) => {
                self.history.framework.get_or_insert(name);
            }
            Seen::Bf16 => self.history.bf16 = true,
            Seen::Mention => {}
        }
        if let Some(perhaps) = &mut self.perhaps
            && !matches!(message.seen, Seen::PerhapsScale(_))
        {
            perhaps.add(message);
        }
    }

    /// The whole history.
    pub fn finish(mut self, facts: Facts) -> History {
        self.close();
        let believed = self.perhaps_facts.prints >= 3
            && self.perhaps_facts.greatest >= 256.0
            && self.perhaps_facts.powers * 10 >= self.perhaps_facts.prints * 9;
        if let Some(perhaps) = self.perhaps.take()
            && believed
            && self.history.first.is_none()
            && self.events == 0
        {
            let mut history = perhaps.finish(facts);
            let print = ALL.iter().position(|d| d.format == "torch-print");
            history.messages = self.history.messages;
            if let Some(print) = print {
                history.messages[print] = history.messages[print].max(self.perhaps_facts.prints);
            }
            return history;
        }
        // Bare `scale` and `tensor([…])` that were not believed say nothing.
        if let Some(print) = ALL.iter().position(|d| d.format == "torch-print") {
            self.history.messages[print] =
                self.history.messages[print].saturating_sub(self.perhaps_facts.prints);
        }
        self.history.facts = facts;
        self.history
    }

    fn perhaps(&mut self, line: u64, printed: Printed) {
        let facts = &mut self.perhaps_facts;
        facts.prints += 1;
        let power = printed.value == f64::INFINITY
            || printed.value > 0.0 && {
                let nearest = printed.value.log2().round().exp2();
                (nearest - printed.value).abs() <= printed.half_unit.max(nearest * 1e-12)
            };
        facts.powers += u64::from(power);
        facts.greatest = facts.greatest.max(printed.value);
        // The company of such prints is kept beside the history, until it is known whether they are to be believed.
        let perhaps = self
            .perhaps
            .get_or_insert_with(|| Box::new(Collector::new()));
        if power {
            perhaps.record(
                line,
                Record {
                    scale: Some((printed, Reading::Value)),
                    ..Record::default()
                },
            );
        }
    }

    fn push(&mut self, entry: Entry) {
        if self.history.entries.len() < MOST_ENTRIES {
            self.history.entries.push(entry);
        } else {
            self.history.left_out.0 += u64::from(matches!(entry, Entry::Event(_)));
            self.history.left_out.1 += 1;
        }
    }

    /// Ends the open stretch and the open event.
    fn close(&mut self) {
        self.close_event();
        if let Some(calm) = self.calm.take() {
            self.push(Entry::Calm(calm));
        }
    }

    fn close_event(&mut self) {
        if let Some((event, _)) = self.event.take() {
            self.history.copies |= event.copies > 1;
            self.history.most_copies = self.history.most_copies.max(event.copies);
            self.push(Entry::Event(event));
        }
    }

    /// A scale was printed.
    fn printed(&mut self, line: u64, printed: Printed) {
        match printed.style {
            Style::Plain => {}
            style => {
                self.history
                    .localized
                    .get_or_insert((line, style == Style::Localized));
            }
        }
        if printed.style == Style::Ambiguous || printed.cut || printed.value.is_nan() {
            return;
        }
        let short = printed.half_unit > 0.0
            && (printed.value == 0.0
                || printed.half_unit > 0.5
                || self.history.last.is_some_and(|last| {
                    last.half_unit == 0.0 && last.agrees(&printed) && last.value != printed.value
                }));
        if short {
            self.history.rounded.get_or_insert(line);
        }
        self.history.first.get_or_insert(printed);
        let known = self
            .history
            .last
            .is_some_and(|last| last.half_unit < printed.half_unit && last.agrees(&printed));
        if !known {
            self.history.last = Some(printed);
        }
    }

    fn restart(&mut self, line: u64) {
        let anything = self.events > 0 || self.history.records > 0;
        if anything {
            self.close();
            // Overflows since the last progress line already belong to the new run.
            let entries = &mut self.history.entries;
            let at = entries
                .iter()
                .rposition(|entry| !matches!(entry, Entry::Event(_)))
                .map_or(0, |last| last + 1);
            let line = match entries.get(at) {
                Some(Entry::Event(event)) => event.line,
                _ => line,
            };
            if at > 0 && entries.len() < MOST_ENTRIES {
                entries.insert(at, Entry::Restart { line });
            }
        }
        self.last_after = None;
    }

    fn growth(&mut self, line: u64, before: Option<Printed>, after: Option<Printed>) {
        for printed in [before, after].into_iter().flatten() {
            self.printed(line, printed);
        }
        let after = after.map(|p| p.value);
        // Every rank prints it.
        if let Some(Entry::Growth { after: last, .. }) = self.history.entries.last()
            && self.calm.is_none()
            && self.event.is_none()
            && *last == after
            && after.is_some()
        {
            self.history.copies = true;
            return;
        }
        self.close();
        self.last_after = after.or(self.last_after);
        self.push(Entry::Growth {
            line,
            place: self.place,
            before: before.map(|p| p.value),
            after,
        });
    }

    fn overflow(&mut self, message: &Message, mut overflow: Overflow) {
        let dialect = ALL[message.dialect];
        let line = message.line;
        for value in [&mut overflow.before, &mut overflow.after] {
            if value.is_some_and(|p| p.value.is_nan() || p.style == Style::Ambiguous) {
                if let Some(printed) = *value {
                    self.printed(line, printed);
                }
                *value = None;
            }
        }
        // A number that the end of the file may have cut is believed where it is what a halving gives.
        if let Some(after) = overflow.after
            && after.cut
        {
            let old = overflow.before.map(|b| b.value).or(self.last_after);
            if old.is_some_and(|old| after.value == old / 2.0 || after.value == old) {
                overflow.after = Some(Printed {
                    cut: false,
                    ..after
                });
            } else {
                overflow.after = None;
                self.history.cut = Some(line);
            }
        }
        if let Some(before) = overflow.before
            && before.cut
        {
            overflow.before = None;
            self.history.cut = Some(line);
        }
        if let (Some(rank), Some(after)) = (overflow.rank, overflow.after) {
            let known = self
                .rank_scales
                .iter()
                .position(|(known, _)| *known == rank);
            match known {
                Some(at) => self.rank_scales[at].1 = after.value,
                None if self.rank_scales.len() < 4096 => self.rank_scales.push((rank, after.value)),
                None => {}
            }
        }
        self.history.still_updated += u64::from(overflow.still_updated);
        if self.join(message, &overflow) {
            return;
        }
        self.close();
        for printed in [overflow.before, overflow.after].into_iter().flatten() {
            self.printed(line, printed);
        }
        self.events += 1;
        self.events_since_record += 1;
        self.history.events_by_dialect[message.dialect] += 1;
        if let Some(after) = overflow.after {
            self.last_after = Some(after.value);
        }
        let event = Event {
            line,
            last_line: line,
            place: self.place,
            iteration: overflow.iteration,
            overflow,
            prints: dialect.prints,
            copies: 1,
            time: message.time,
            dialect: message.dialect,
        };
        let open = Open {
            kinds: vec![(message.dialect, message.kind, 1)],
            ranks: overflow.rank.iter().map(|r| (message.kind, *r)).collect(),
            moved: false,
        };
        self.event = Some((event, open));
    }

    /// Whether a message is another report of the open event; then it is added to it.
    fn join(&mut self, message: &Message, overflow: &Overflow) -> bool {
        let dialect = ALL[message.dialect];
        let most = self.history.most_copies;
        let earlier = self.events > 1;
        let Some((event, open)) = &mut self.event else {
            return false;
        };
        if ALL[event.dialect].family != dialect.family
            || event.overflow.scaler != overflow.scaler
            || dialect.processes == Processes::One
        {
            return false;
        }
        let (a, b) = (&event.overflow, overflow);
        let same = |x: Option<Printed>, y: Option<Printed>| match (x, y) {
            (Some(x), Some(y)) => x.value == y.value,
            _ => true,
        };
        if a.hysteresis != b.hysteresis && a.before.is_some() && b.before.is_some()
            || !same(a.before, b.before)
            || !same(a.after, b.after)
        {
            return false;
        }
        let kind = (message.dialect, message.kind);
        let seen = open
            .kinds
            .iter()
            .find(|(d, k, _)| (*d, *k) == kind)
            .map_or(0, |(.., n)| *n);
        match (event.iteration, b.iteration) {
            (Some(x), Some(y)) if x != y => return false,
            (Some(_), Some(_)) => {}
            _ if seen > 0 && event.iteration.is_none() => {
                let (before, after) = (b.before.map(|p| p.value), b.after.map(|p| p.value));
                let falls = match (before, after) {
                    (Some(before), Some(after)) => after < before,
                    (Some(_), None) => true,
                    // A value that a scaler can fall to only once, unless it is at its end.
                    (None, Some(after)) => after > 1.0 || dialect.log2,
                    (None, None) => b.rank.is_none(),
                };
                let apart = match (event.time, message.time) {
                    (Some(x), Some(y)) => (y - x).rem_euclid(86_400.0) > 2.0,
                    _ => false,
                };
                if apart {
                    return false;
                }
                let same_rank = b
                    .rank
                    .is_some_and(|rank| open.ranks.contains(&(message.kind, rank)));
                // At a floor, only ranks, or copies seen before, tell a copy from the next step.
                if (same_rank || b.rank.is_none()) && !falls {
                    let room = if earlier { most } else { 1 };
                    if seen >= room {
                        return false;
                    }
                }
            }
            _ => {}
        }
        if open.moved && seen == 0 && event.iteration.is_none() {
            // Lines of another kind that come after progress belong to the next step.
            return false;
        }
        event.last_line = message.line;
        let printed: Vec<Printed> = [(a.before, b.before), (a.after, b.after)]
            .into_iter()
            .filter_map(|(old, new)| if old.is_none() { new } else { None })
            .collect();
        event.overflow.before = event.overflow.before.or(b.before);
        event.overflow.after = event.overflow.after.or(b.after);
        event.overflow.hysteresis |= b.hysteresis;
        event.overflow.at_floor |= b.at_floor;
        event.iteration = event.iteration.or(b.iteration);
        if b.before.is_some() && (dialect.prints == Prints::Before) {
            event.prints = Prints::Before;
        }
        match open.kinds.iter_mut().find(|(d, k, _)| (*d, *k) == kind) {
            Some((.., n)) => *n += 1,
            None => open.kinds.push((kind.0, kind.1, 1)),
        }
        if let Some(rank) = b.rank {
            open.ranks.push((message.kind, rank));
        }
        event.copies = open.kinds.iter().map(|(.., n)| *n).max().unwrap_or(1);
        if dialect.weight == Weight::Own {
            event.dialect = message.dialect;
        }
        if open.kinds.len() > 1 && dialect.family == "paddle" {
            event.copies = event.copies.max(2);
        }
        let after = event.overflow.after;
        if let Some(after) = after {
            self.last_after = Some(after.value);
        }
        for printed in printed {
            self.printed(message.line, printed);
        }
        true
    }

    fn record(&mut self, line: u64, mut record: Record) {
        if let Some((printed, _)) = record.scale {
            self.printed(line, printed);
            if printed.style == Style::Ambiguous || printed.cut || printed.value.is_nan() {
                record.scale = None;
            }
        }
        if self.rank_scales.len() > 1 {
            let first = self.rank_scales[0].1;
            if self.rank_scales.iter().any(|(_, value)| *value != first) {
                self.ranks_apart += 1;
                // Once may be a line that came late.
                if self.ranks_apart >= 2 {
                    self.history.ranks_differ.get_or_insert(line);
                }
            }
        }
        self.rank_scales.clear();
        let clock = record.clock as usize;
        if record.clock == Clock::Bar {
            let of = record.of.unwrap_or(0);
            let ticks = match self.bars.iter_mut().find(|(known, _)| *known == of) {
                Some((_, n)) => {
                    *n += 1;
                    *n
                }
                None => {
                    if self.bars.len() < 64 {
                        self.bars.push((of, 1));
                    }
                    1
                }
            };
            let main = self
                .bar
                .and_then(|bar| self.bars.iter().find(|(known, _)| *known == bar))
                .map_or(0, |(_, n)| *n);
            if self.bar != Some(of) {
                if ticks <= main {
                    if record.loss == Loss::None {
                        return;
                    }
                    record.step = None;
                } else {
                    self.bar = Some(of);
                    let hand = &mut self.hands[clock];
                    hand.offset = hand.offset.saturating_add(hand.last.unwrap_or(0));
                    hand.last = None;
                }
            }
        }
        let tick = record.clock == Clock::Bar && record.loss == Loss::None;
        if self.history.first_epoch.is_none() {
            self.history.first_epoch = record.epoch;
        }
        if let Some(step) = record.step {
            let step = match record.clock {
                Clock::Applied => step + self.events,
                _ => step,
            };
            self.step(line, clock, step, &record);
        }
        if let Some((printed, _)) = record.scale {
            self.prints += 1;
            self.place[PRINTS] = Some(self.prints);
            self.history.advances[PRINTS] += 1;
            if record.skipped == Some(0)
                && self
                    .last_value
                    .is_some_and(|last| last.value > printed.value && !last.agrees(&printed))
            {
                self.history.counters_lie.get_or_insert(line);
            }
            self.last_value = Some(printed);
            self.last_after = Some(printed.value);
        }
        if record.skipped == Some(0)
            && (self.events_since_record > 0 || record.loss == Loss::LeftOut)
        {
            self.history.counters_lie.get_or_insert(line);
        }
        if record.skipped.is_some() || record.clock == Clock::Counter {
            self.events_since_record = 0;
        }
        if let Some(skipped) = record.skipped {
            let counted = self.history.counted.get_or_insert(0);
            *counted = counted.saturating_add(skipped);
        }
        if let (Some(all), Some(step)) = (record.skipped_in_all, record.step) {
            match &mut self.history.counted_in_all {
                Some(seen) => seen[1] = (step, all),
                none => *none = Some([(step, all); 2]),
            }
        }
        if !tick {
            self.history.records += 1;
        }
        self.loss(line, record.loss);

        if let Some((_, open)) = &mut self.event {
            open.moved = true;
        }
        // The event may still get copies if this is its own step's line; a second one closes it.
        self.close_event();
        let nonfinite = record.loss.is_nonfinite();
        let skipped = record.skipped.unwrap_or(0);
        let fits = self.calm.as_ref().is_some_and(|calm| {
            let scale = match (calm.scale, record.scale) {
                (_, None) => true,
                (Some(a), Some(b)) => a.0.value == b.0.value,
                (None, Some(_)) => false,
            };
            scale && calm.skipped == 0 && skipped == 0 && (calm.nonfinite > 0) == nonfinite
        });
        if !fits {
            if let Some(calm) = self.calm.take() {
                self.push(Entry::Calm(calm));
            }
            self.calm = Some(Calm {
                line,
                last_line: line,
                records: 0,
                ticks: 0,
                from: [None; CLOCKS],
                to: self.place,
                scale: record.scale,
                train: None,
                validation: None,
                nonfinite: 0,
                skipped,
                small: false,
            });
        }
        if let Some(calm) = &mut self.calm {
            calm.last_line = line;
            calm.to = self.place;
            if record.step.is_some() {
                calm.from[clock] = calm.from[clock].or(self.place[clock]);
            }
            if record.scale.is_some() {
                calm.from[PRINTS] = calm.from[PRINTS].or(self.place[PRINTS]);
            }
            if calm.scale.is_none() {
                calm.scale = record.scale;
            }
            if tick {
                calm.ticks += 1;
            } else {
                calm.records += 1;
            }
            calm.nonfinite += u64::from(nonfinite);
            if let Loss::Value(value) = record.loss {
                Losses::add(&mut calm.train, value);
            }
            if let Some(value) = record.validation {
                Losses::add(&mut calm.validation, value);
            }
        }
    }

    /// Moves a clock on; a step that goes back begins a new epoch, or a new run.
    fn step(&mut self, line: u64, clock: usize, step: u64, record: &Record) {
        let hand = self.hands[clock];
        let back = hand.last.is_some_and(|last| step < last);
        if back {
            let new_epoch = match (self.epoch, record.epoch) {
                (Some(old), Some(new)) => new > old,
                // A bar or a loop within an epoch starts again at its total.
                _ => hand.of.is_some() && hand.of == hand.last || clock == Clock::Bar as usize,
            };
            let hand = &mut self.hands[clock];
            let whole = if new_epoch {
                hand.of.or(hand.last)
            } else {
                hand.last
            };
            hand.offset = hand.offset.saturating_add(whole.unwrap_or(0));
            if !new_epoch && record.clock != Clock::Bar {
                self.restart(line);
            }
        }
        let hand = &mut self.hands[clock];
        hand.last = Some(step);
        hand.of = record.of;
        if record.epoch.is_some() {
            self.epoch = record.epoch;
        }
        // So many steps no run has; sums of them stay sums.
        let absolute = hand.offset.saturating_add(step).min(1000 * MOST_COUNT);
        if self.place[clock] != Some(absolute) {
            self.history.advances[clock] += 1;
            let firsts = &mut self.history.first_steps[clock];
            if firsts.0.is_none() {
                firsts.0 = Some(absolute);
            } else if firsts.1.is_none() {
                firsts.1 = Some(absolute);
            }
        }
        self.place[clock] = Some(absolute);
    }

    fn loss(&mut self, line: u64, loss: Loss) {
        if loss.is_nonfinite() {
            if self.run_of_nonfinite.0 == 0 {
                self.run_of_nonfinite.1 = line;
            }
            self.run_of_nonfinite.0 += 1;
            if self.run_of_nonfinite.0 > self.history.nonfinite_run.0 {
                self.history.nonfinite_run = self.run_of_nonfinite;
            }
            return;
        }
        let Loss::Value(value) = loss else { return };
        self.run_of_nonfinite.0 = 0;
        match self.best {
            Some(best) if best > 0.0 && value >= 10.0 * best => {
                self.above_best += 1;
                if self.above_best >= 2 {
                    self.history.blown_up.get_or_insert(line);
                }
            }
            _ => {
                self.above_best = 0;
                self.best = Some(self.best.map_or(value, |best| best.min(value)));
            }
        }
    }
}
