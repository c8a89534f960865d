//! The verdict: the first rule that holds, the others beside it, and the numbers each stands on.
//!
//! | word | holds when |
//! |---|---|
//! | `GENUINE_NONFINITE` | three NaN losses in a row; or the scale is below 2^-24, where no finite FP16 gradient overflows; or 60 events in a row |
//! | `STEPS_NOT_SKIPPED` | the log says that the update was made in spite of the overflow |
//! | `DIVERGENCE_EVENT` | four overflows in a row after the start, with a loss 1.5 times the best before them |
//! | `RANK_DESYNC` | values rise where there was no room for growth: several scalers write to one stream |
//! | `PINNED_AT_FLOOR` | the framework gave up at its minimum; three events in a row at the floor; two small-scale warnings |
//! | `SCALE_SATURATED_HIGH` | the scale reaches inf, or 2^24 and more, without resistance |
//! | `SAWTOOTH_AT_CEILING` | three times growth and one or two overflows, at ceilings within a factor 4 |
//! | `RAMP_UP_HARMLESS` | overflows at the start only, then clean steps |
//! | `OVERFLOW_OUTPACES_GROWTH` | the scale falls faster than it climbs, loss finite |
//! | `HEALTHY` | scale known, at most two isolated bursts |
//! | `NOT_LOSS_SCALING` | no line of any format, or 1.0 throughout |
//! | `INSUFFICIENT_EVIDENCE` | anything else |

use super::history::{History, Losses};
use super::shape::{Burst, Item, Quiet, Shape};
use serde::Serialize;

/// What a log shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Verdict {
    /// inf or NaN is made where no scale can help.
    GenuineNonfinite,
    /// Updates were made with inf or NaN in them.
    StepsNotSkipped,
    /// The loss blew up in mid-run and the scale followed.
    DivergenceEvent,
    /// Several scalers with different scales.
    RankDesync,
    /// The scale is at its floor and overflows go on.
    PinnedAtFloor,
    /// Growth meets no resistance.
    ScaleSaturatedHigh,
    /// One overflow a growth window, by design.
    SawtoothAtCeiling,
    /// Overflows while the scale finds its level.
    RampUpHarmless,
    /// The scale falls faster than it climbs.
    OverflowOutpacesGrowth,
    /// Nothing to see.
    Healthy,
    /// Copies were joined.
    RankDuplicates,
    /// A rounded print is no zero.
    DisplayRounding,
    /// A counter contradicts the scale or the loss.
    CountersUnreliable,
    /// No scale of gradients is printed.
    NotLossScaling,
    /// Too little to tell.
    InsufficientEvidence,
}

impl Verdict {
    /// The word.
    pub fn as_str(self) -> &'static str {
        match self {
            Verdict::GenuineNonfinite => "GENUINE_NONFINITE",
            Verdict::StepsNotSkipped => "STEPS_NOT_SKIPPED",
            Verdict::DivergenceEvent => "DIVERGENCE_EVENT",
            Verdict::RankDesync => "RANK_DESYNC",
            Verdict::PinnedAtFloor => "PINNED_AT_FLOOR",
            Verdict::ScaleSaturatedHigh => "SCALE_SATURATED_HIGH",
            Verdict::SawtoothAtCeiling => "SAWTOOTH_AT_CEILING",
            Verdict::RampUpHarmless => "RAMP_UP_HARMLESS",
            Verdict::OverflowOutpacesGrowth => "OVERFLOW_OUTPACES_GROWTH",
            Verdict::Healthy => "HEALTHY",
            Verdict::RankDuplicates => "RANK_DUPLICATES",
            Verdict::DisplayRounding => "DISPLAY_ROUNDING",
            Verdict::CountersUnreliable => "COUNTERS_UNRELIABLE",
            Verdict::NotLossScaling => "NOT_LOSS_SCALING",
            Verdict::InsufficientEvidence => "INSUFFICIENT_EVIDENCE",
        }
    }
}

/// A verdict that holds, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Held {
    /// The word.
    pub verdict: Verdict,
    /// What it stands on, in a sentence.
    pub because: String,
    /// The line to look at.
    pub line: Option<u64>,
}

/// What the rules look at besides shape and history.
#[derive(Debug, Clone, Copy)]
pub struct Facts {
    /// Events of incompatible frameworks stand in one log.
    pub mixed: bool,
    /// A line of some format was found.
    pub any_format: bool,
    /// A framework that prints no scale was recognised.
    pub silent: bool,
    /// The last scale printed is infinite.
    pub reaches_inf: bool,
    /// The last printed value is a 0 that rounding may explain.
    pub rounded_zero: bool,
}

/// Steps or records that make a quiet stretch count.
const CLEAN_STEPS: u64 = 10;
const CLEAN_RECORDS: u64 = 2;

fn is_clean(quiet: &Quiet) -> bool {
    let span = quiet.records > 0 && quiet.span >= CLEAN_STEPS;
    quiet.nonfinite == 0 && (quiet.clean >= CLEAN_STEPS || quiet.records >= CLEAN_RECORDS || span)
}

/// Every rule that holds, the first first. Modifiers come last.
pub fn judge(history: &History, shape: &Shape, facts: Facts) -> Vec<Held> {
    let mut held = Vec::new();
    let mut hold = |verdict, line: Option<u64>, because: String| {
        held.push(Held {
            verdict,
            because,
            line,
        });
    };
    if !facts.mixed {
        for rule in [
            nonfinite,
            not_skipped,
            divergence,
            desync,
            pinned,
            saturated,
            sawtooth,
            ramp_up,
        ] {
            if let Some((verdict, line, because)) = rule(history, shape, facts) {
                hold(verdict, line, because);
            }
        }
    }
    let has = |held: &Vec<Held>, verdict| held.iter().any(|h: &Held| h.verdict == verdict);
    if !facts.mixed {
        if history.still_updated == 0
            && !has(&held, Verdict::SawtoothAtCeiling)
            && !has(&held, Verdict::RampUpHarmless)
            && let Some((verdict, line, because)) = outpaced(history, shape, facts)
        {
            held.push(Held {
                verdict,
                because,
                line,
            });
        }
        if let Some((verdict, line, because)) = healthy(history, shape, facts)
            && held.is_empty()
        {
            held.push(Held {
                verdict,
                because,
                line,
            });
        }
    }
    // Beside a failure, what would be harmless alone is no comfort.
    if held
        .first()
        .is_some_and(|h| h.verdict < Verdict::ScaleSaturatedHigh)
    {
        held.retain(|h| {
            !matches!(
                h.verdict,
                Verdict::SawtoothAtCeiling | Verdict::RampUpHarmless
            )
        });
    }
    let sense = !held.is_empty();
    let mut modifiers = Vec::new();
    let mut modify = |verdict, line: Option<u64>, because: &str| {
        modifiers.push(Held {
            verdict,
            because: because.to_owned(),
            line,
        });
    };
    if history.copies {
        modify(
            Verdict::RankDuplicates,
            None,
            "one event stands in several lines; they were joined",
        );
    }
    if let Some(line) = history.rounded {
        modify(
            Verdict::DisplayRounding,
            Some(line),
            "a printed value is short of digits and no exact one",
        );
    }
    if let Some(line) = history.counters_lie {
        modify(
            Verdict::CountersUnreliable,
            Some(line),
            "the counter of skipped steps says 0 where scale, events or loss say otherwise",
        );
    }
    if let Some((verdict, line, because)) = no_scaling(history, shape, facts) {
        if sense {
            modifiers.push(Held {
                verdict,
                because,
                line,
            });
        } else {
            held.push(Held {
                verdict,
                because,
                line,
            });
        }
    } else if !sense {
        held.push(Held {
            verdict: Verdict::InsufficientEvidence,
            because: insufficient(history, shape, facts),
            line: None,
        });
    }
    held.extend(modifiers);
    held
}

type Finding = Option<(Verdict, Option<u64>, String)>;

/// Log2 of a scale of 0.
const ZERO: f64 = -1100.0;

fn bursts(shape: &Shape) -> impl DoubleEndedIterator<Item = &Burst> {
    shape.items.iter().filter_map(|item| match item {
        Item::Burst(burst) => Some(burst),
        Item::Quiet(_) => None,
    })
}

fn quiets(shape: &Shape) -> impl DoubleEndedIterator<Item = &Quiet> {
    shape.items.iter().filter_map(|item| match item {
        Item::Quiet(quiet) => Some(quiet),
        Item::Burst(_) => None,
    })
}

/// 2^x, as people write it.
fn power(lg: f64) -> String {
    if lg == ZERO {
        "0".to_owned()
    } else if (lg - lg.round()).abs() < 1e-6 {
        format!("2^{}", lg.round())
    } else {
        format!("2^{lg:.2}")
    }
}

/// 1: no finite gradient can be to blame.
fn nonfinite(history: &History, shape: &Shape, facts: Facts) -> Finding {
    let (run, line) = history.nonfinite_run;
    if run >= 3 {
        return Some((
            Verdict::GenuineNonfinite,
            Some(line),
            format!(
                "the training loss itself is NaN or inf in {run} records in a row, from line {line} on"
            ),
        ));
    }
    if let Some((least, line)) = shape.least
        && least < -24.0 - 1e-9
        && bursts(shape).next().is_some()
    {
        return Some((
            Verdict::GenuineNonfinite,
            Some(line),
            format!(
                "the scale falls to {}, below 2^-24: at such a scale no finite FP16-range gradient can overflow",
                power(least)
            ),
        ));
    }
    let _ = facts;
    // Without a floor that holds the scale up.
    let long = bursts(shape).find(|b| b.count >= 60 && b.pinned == 0 && !b.inferred)?;
    Some((
        Verdict::GenuineNonfinite,
        Some(long.line),
        format!(
            "{} steps in a row overflow without one clean step: 56 halvings already take 2^32 to 2^-24",
            long.count
        ),
    ))
}

/// 2: the line says so.
fn not_skipped(history: &History, _: &Shape, _: Facts) -> Finding {
    (history.still_updated > 0).then(|| {
        (
            Verdict::StepsNotSkipped,
            None,
            format!(
                "{} lines say that the update was made in spite of the overflow",
                history.still_updated
            ),
        )
    })
}

/// 3: the loss went first.
fn divergence(history: &History, shape: &Shape, _: Facts) -> Finding {
    for (at, item) in shape.items.iter().enumerate() {
        let Item::Burst(burst) = item else { continue };
        if burst.at_start || burst.count < 4 {
            continue;
        }
        for (name, of) in [
            (
                "training",
                (|q: &Quiet| q.train) as fn(&Quiet) -> Option<Losses>,
            ),
            ("validation", |q: &Quiet| q.validation),
        ] {
            let earlier: Vec<Losses> = shape.items[..at]
                .iter()
                .filter_map(|item| match item {
                    Item::Quiet(quiet) if quiet.run == burst.run => of(quiet),
                    _ => None,
                })
                .collect();
            let Some(last_before) = earlier.last().map(|l| l.last) else {
                continue;
            };
            let best = earlier
                .iter()
                .fold(f64::INFINITY, |best, l| best.min(l.least));
            let later = shape.items[at..]
                .iter()
                .filter_map(|item| match item {
                    Item::Quiet(quiet) if quiet.run == burst.run => of(quiet),
                    _ => None,
                })
                .fold(f64::NEG_INFINITY, |worst, l| worst.max(l.greatest));
            let worst = last_before.max(later);
            if best > 0.0 && worst >= 1.5 * best {
                return Some((
                    Verdict::DivergenceEvent,
                    Some(burst.line),
                    format!(
                        "{} overflows in a row from line {} on, long after the start, and the {name} loss goes to {} from {} at best ({:.1} times)",
                        burst.count,
                        burst.line,
                        short(worst),
                        short(best),
                        worst / best
                    ),
                ));
            }
        }
    }
    let overflows = bursts(shape).next().is_some();
    match history.blown_up {
        Some(line) if overflows => Some((
            Verdict::DivergenceEvent,
            Some(line),
            format!("from line {line} on the loss is ten times its best and more, with overflows"),
        )),
        _ => None,
    }
}

/// A number of four digits or so.
fn short(value: f64) -> String {
    if value.abs() >= 1000.0 {
        format!("{value:.0}")
    } else {
        let text = format!("{value:.4}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    }
}

/// 4: one scaler cannot do that.
fn desync(history: &History, shape: &Shape, _: Facts) -> Finding {
    if let Some(line) = history.ranks_differ {
        return Some((
            Verdict::RankDesync,
            Some(line),
            format!("at line {line} two ranks show different scales at one step"),
        ));
    }
    (shape.impossible_rises >= 3).then(|| {
        (
            Verdict::RankDesync,
            None,
            format!(
                "{} times the scale of neighbouring overflow lines rises with nothing between them: one scaler cannot grow there, so several with different scales write to one stream",
                shape.impossible_rises
            ),
        )
    })
}

/// 5: nothing left to give.
fn pinned(history: &History, shape: &Shape, _: Facts) -> Finding {
    if let Some(line) = shape.stopped {
        return Some((
            Verdict::PinnedAtFloor,
            Some(line),
            format!("at line {line} the framework gave up: its minimum scale was reached"),
        ));
    }
    if let Some(burst) = bursts(shape).find(|b| b.pinned >= 3) {
        return Some((
            Verdict::PinnedAtFloor,
            Some(burst.line),
            format!(
                "{} overflows in a row leave the scale where it is, at {}: it cannot fall any more and no step is applied",
                burst.pinned,
                burst.after.map_or("its floor".to_owned(), power)
            ),
        ));
    }
    (history.small >= 2).then(|| {
        (
            Verdict::PinnedAtFloor,
            None,
            format!("{} warnings that the scale is too small", history.small),
        )
    })
}

/// 6: no resistance.
fn saturated(history: &History, shape: &Shape, facts: Facts) -> Finding {
    if bursts(shape).any(|b| !b.at_start) {
        return None;
    }
    if facts.reaches_inf {
        return Some((
            Verdict::ScaleSaturatedHigh,
            None,
            "the scale reaches inf, from which no halving comes back".to_owned(),
        ));
    }
    let last = shape.last?;
    let quiet_end = match shape.items.last() {
        Some(Item::Quiet(quiet)) => is_clean(quiet),
        _ => false,
    };
    let _ = history;
    (last >= 24.0 && quiet_end).then(|| {
        (
            Verdict::ScaleSaturatedHigh,
            None,
            format!(
                "the scale ends at {} and nothing overflowed after the start: growth meets no resistance, the scale no longer measures anything",
                power(last)
            ),
        )
    })
}

/// A growth and the one or two overflows that end it.
fn is_tooth(burst: &Burst) -> bool {
    burst.growth > 0.5 && burst.count <= 2
}

/// Whether the log ends in clean steps, or with a tooth after clean steps.
fn settles(shape: &Shape) -> bool {
    let mut items = shape.items.iter().rev().peekable();
    if let Some(Item::Quiet(quiet)) = items.peek() {
        if is_clean(quiet) {
            return true;
        }
        items.next();
    }
    let tooth = matches!(items.next(), Some(Item::Burst(burst)) if is_tooth(burst));
    tooth && matches!(items.next(), Some(Item::Quiet(quiet)) if is_clean(quiet))
}

/// 7: one overflow a window.
fn sawtooth(history: &History, shape: &Shape, _: Facts) -> Finding {
    if history.nonfinite_run.0 > 0 || history.still_updated > 0 {
        return None;
    }
    let teeth: Vec<&Burst> = bursts(shape)
        .filter(|b| is_tooth(b) && b.before.is_some())
        .collect();
    let ceilings = || teeth.iter().filter_map(|b| b.before);
    let spread =
        ceilings().fold(f64::NEG_INFINITY, f64::max) - ceilings().fold(f64::INFINITY, f64::min);
    // A scale that sinks from tooth to tooth is another story.
    let sinking = bursts(shape).filter(|b| !b.at_start && b.count > 2).count() > teeth.len() / 2;
    if teeth.len() >= 3 && spread <= 2.0 + 1e-9 && !sinking {
        return Some((
            Verdict::SawtoothAtCeiling,
            Some(teeth[0].line),
            format!(
                "{} times the scale grew and then overflowed once or twice, always near {}: that is how the scaler finds its ceiling",
                teeth.len(),
                power(ceilings().fold(f64::NEG_INFINITY, f64::max))
            ),
        ));
    }
    // Windows of a counter, at equal distances, the same scale after each.
    let windows: Vec<&Burst> = bursts(shape)
        .filter(|b| (b.counted || b.before.is_none()) && !b.at_start && b.count <= 4)
        .collect();
    if windows.len() < 3 {
        return None;
    }
    let same = windows
        .windows(2)
        .all(|pair| match (pair[0].after, pair[1].after) {
            (Some(a), Some(b)) => (a - b).abs() < 0.02,
            // Events without values: their distances must do.
            (None, None) => true,
            _ => false,
        });
    // The middle of each, and how far off it may be: a window tells no more.
    let at: Vec<(f64, f64)> = windows
        .iter()
        .filter_map(|b| b.steps)
        .map(|s| (s[0].0 as f64, s[1].1 as f64))
        .map(|(low, high)| ((low + high) / 2.0, (high - low) / 2.0))
        .collect();
    let gaps: Vec<(f64, f64)> = at
        .windows(2)
        .map(|pair| (pair[1].0 - pair[0].0, pair[1].1 + pair[0].1))
        .collect();
    let mean = gaps.iter().map(|gap| gap.0).sum::<f64>() / gaps.len().max(1) as f64;
    let equal = gaps.len() >= 2
        && gaps
            .iter()
            .all(|(gap, off)| (gap - mean).abs() <= 0.1 * mean + off && mean > 2.0 * off);
    (same && equal).then(|| {
        (
            Verdict::SawtoothAtCeiling,
            Some(windows[0].line),
            format!(
                "{} times a few skipped steps, about every {mean:.0} steps: one growth, one overflow, the same again",
                windows.len()
            ),
        )
    })
}

/// 8: the scale found its level.
fn ramp_up(history: &History, shape: &Shape, facts: Facts) -> Finding {
    if history.nonfinite_run.0 > 0 || history.still_updated > 0 || shape.stopped.is_some() {
        return None;
    }
    let all: Vec<&Burst> = bursts(shape).collect();
    if !all.iter().any(|b| b.at_start) {
        return None;
    }
    let later: Vec<&&Burst> = all.iter().filter(|b| !b.at_start).collect();
    if later.len() > 2
        || later
            .iter()
            .any(|b| b.growth < 0.5 && !(b.before.is_none() && b.count <= 2))
    {
        return None;
    }
    let settled = settles(shape);
    let high_enough = shape.last.is_none_or(|last| last >= -10.0 - 1e-9) && !facts.rounded_zero;
    if !settled || !high_enough {
        return None;
    }
    let count: u64 = all.iter().filter(|b| b.at_start).map(|b| b.count).sum();
    let first = all.iter().find_map(|b| b.before);
    let level = all
        .iter()
        .filter(|b| b.at_start)
        .filter_map(|b| b.after)
        .next_back();
    let way = match (first, level) {
        (Some(first), Some(level)) if first > level => {
            format!(
                ", while the scale fell from {} to {}",
                power(first),
                power(level)
            )
        }
        _ => String::new(),
    };
    Some((
        Verdict::RampUpHarmless,
        Some(all[0].line),
        format!("{count} overflows at the start{way}; then clean steps"),
    ))
}

/// 9: falls faster than it climbs.
fn outpaced(history: &History, shape: &Shape, _: Facts) -> Finding {
    if history.nonfinite_run.0 >= 3 {
        return None;
    }
    let groups: Vec<&Burst> = bursts(shape).collect();
    let falls: f64 = groups.iter().map(|b| b.fall).sum();
    let rises: f64 = shape.rises.iter().map(|r| r.octaves).sum::<f64>() + 0.0;
    (groups.len() >= 4 && falls - rises >= 4.0 - 1e-9).then(|| {
        (
            Verdict::OverflowOutpacesGrowth,
            Some(groups[0].line),
            format!(
                "{falls:.0} halvings against {rises:.0} doublings in {} groups with clean steps between, loss finite: the policy lowers the scale faster than it raises it",
                groups.len()
            ),
        )
    })
}

/// 10: nothing to see.
fn healthy(history: &History, shape: &Shape, _: Facts) -> Finding {
    shape.last?;
    if history.nonfinite_run.0 > 0
        || shape.stopped.is_some()
        || shape.last == Some(0.0) && shape.rises.is_empty() && bursts(shape).next().is_none()
    {
        return None;
    }
    let groups: Vec<&Burst> = bursts(shape).collect();
    let clean: u64 = quiets(shape).map(|q| q.clean).sum();
    let records: u64 = quiets(shape).map(|q| q.records).sum();
    let settled = groups.is_empty() || settles(shape);
    // A log that begins in mid-run may begin with the scale finding its level again.
    let resumed = |burst: &Burst| {
        let mut before = shape
            .items
            .iter()
            .take_while(|item| !matches!(item, Item::Burst(first) if first.line == burst.line));
        !before.any(|item| match item {
            Item::Quiet(quiet) => is_clean(quiet),
            Item::Burst(_) => true,
        })
    };
    let odd = groups.iter().filter(|b| !is_tooth(b)).count();
    let isolated = odd <= 2 && groups.iter().all(|b| b.count <= 3 || resumed(b));
    if !(settled && isolated && (clean >= CLEAN_STEPS || records >= CLEAN_RECORDS)) {
        return None;
    }
    let because = match groups.iter().map(|b| b.count).sum::<u64>() {
        0 => "no step overflowed".to_owned(),
        1 => format!(
            "one isolated overflow, at line {}, and clean steps after it",
            groups[0].line
        ),
        n => format!("{n} isolated overflows and clean steps after them"),
    };
    Some((Verdict::Healthy, groups.first().map(|b| b.line), because))
}

/// 12: another thing by that name.
fn no_scaling(history: &History, shape: &Shape, facts: Facts) -> Finding {
    if facts.mixed || history.facts.bytes == 0 {
        return None;
    }
    let nothing =
        history.first.is_none() && bursts(shape).next().is_none() && shape.stopped.is_none();
    if nothing && let Some(line) = history.other_meaning {
        return Some((
            Verdict::NotLossScaling,
            Some(line),
            format!(
                "at line {line} loss_scale is the name of something else: its value is a text or a list"
            ),
        ));
    }
    if !facts.any_format && nothing && !facts.silent && !history.facts.binary {
        return Some((
            Verdict::NotLossScaling,
            None,
            "no line of any known format prints a scale of gradients or an overflow".to_owned(),
        ));
    }
    let one = |value: Option<super::seen::Printed>| value.is_some_and(|p| p.value == 1.0);
    if one(history.first)
        && one(history.last)
        && shape.rises.is_empty()
        && bursts(shape).next().is_none()
        && shape.stopped.is_none()
    {
        return Some((
            Verdict::NotLossScaling,
            None,
            "the scale is 1.0 throughout and nothing overflows: bf16 and fp32 runs print it without scaling anything".to_owned(),
        ));
    }
    None
}

/// 13: what is missing.
fn insufficient(history: &History, shape: &Shape, facts: Facts) -> String {
    if history.facts.bytes == 0 {
        return "the log is empty".to_owned();
    }
    if facts.mixed {
        return "lines of several frameworks stand in one log, and no single scaler wrote them"
            .to_owned();
    }
    if history.facts.binary {
        return "the file does not look like text".to_owned();
    }
    if facts.silent && bursts(shape).next().is_none() {
        return "this framework prints no loss scale".to_owned();
    }
    if history.nonfinite_run.0 > 0 {
        return format!(
            "the loss is NaN or inf at line {}, but not three times in a row",
            history.nonfinite_run.1
        );
    }
    match shape.items.last() {
        Some(Item::Burst(burst)) => format!(
            "nothing follows the last overflow, at line {}: whether steps go on is not in the log",
            burst.last_line
        ),
        None => "there are too few lines to tell".to_owned(),
        Some(Item::Quiet(_)) if bursts(shape).next().is_none() => {
            "no overflow and no change of the scale within too few lines".to_owned()
        }
        Some(Item::Quiet(_)) => "the overflows fit none of the known patterns".to_owned(),
    }
}
