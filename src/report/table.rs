//! Results as tables for a terminal, at most 100 columns wide.

use super::text::{self, fraction, share, short_count, shortened};
use crate::analysis::{Analysis, Bounded, Group};
use crate::float::FP16_OVERFLOW;
use crate::scaling::{
    Answer, Basis, Measure, Recommendation, Row, Simulated, Swept, SweptKey, percent,
};
use crate::warning::Warning;

/// Warnings as lines for stderr, each once.
pub fn warnings(warnings: &[Warning]) -> String {
    let mut shown: Vec<&Warning> = Vec::new();
    let mut text = String::new();
    for warning in warnings {
        if !shown.contains(&warning) {
            text.push_str(&format!("warning: {warning}\n"));
            shown.push(warning);
        }
    }
    text
}

/// The scales of a table: a few of those analyzed, so that the lines fit.
fn columns(group: &Group) -> Vec<usize> {
    let all: Vec<usize> = (0..group.rates.len()).collect();
    if all.len() <= if group.bounded.is_some() { 3 } else { 6 } {
        return all;
    }
    // Intervals are wide: three of them fit.
    let wanted: &[f64] = if group.bounded.is_some() {
        &[1.0, 65536.0, 1_048_576.0]
    } else {
        &[1.0, 256.0, 4096.0, 65536.0, 1_048_576.0, 16_777_216.0]
    };
    let found: Vec<usize> = wanted
        .iter()
        .filter_map(|w| {
            group
                .rates
                .iter()
                .position(|r| f64::from(r.loss_scale) == *w)
        })
        .collect();
    if found.len() >= 3 {
        found
    } else {
        (0..6).map(|i| i * (all.len() - 1) / 5).collect()
    }
}

/// A table of groups, worst first: those that lose most at 2^16 (or at the middle scale).
pub fn analysis(analysis: &Analysis) -> String {
    let mut out = String::new();
    for input in &analysis.inputs {
        out.push_str(&format!(
            "{}: {}, {} tensors, {} elements\n",
            shortened(&input.path, 60),
            input.kind,
            input.tensors,
            text::count(input.elements)
        ));
    }
    let Some(first) = analysis.groups.first() else {
        return out + "no gradients\n";
    };
    let columns = columns(first);
    let judged = columns
        .iter()
        .copied()
        .find(|&c| first.rates[c].loss_scale == 65536.0)
        .or(columns.get(columns.len() / 2).copied());
    let mut groups: Vec<&Group> = analysis.groups.iter().collect();
    if let Some(judged) = judged
        && groups.iter().any(|g| g.tensor.is_some())
    {
        let badness = |g: &Group| {
            let rate = &g.rates[judged];
            match rate.shares {
                Some(shares) => (shares.overflow.1, shares.underflow.1),
                None => (
                    rate.outcomes.overflow_fraction(),
                    rate.outcomes.underflow_fraction(),
                ),
            }
        };
        groups.sort_by(|a, b| {
            badness(b)
                .partial_cmp(&badness(a))
                .unwrap_or(std::cmp::Ordering::Equal)
        });
    }
    let headings: Vec<String> = ["", "elements", "zeros", "amax", "headroom"]
        .into_iter()
        .map(str::to_owned)
        .chain(
            columns
                .iter()
                .map(|&c| format!("at {}", text::scale(first.rates[c].loss_scale.into()))),
        )
        .collect();
    let headings: Vec<&str> = headings.iter().map(String::as_str).collect();
    let rows: Vec<Vec<String>> = groups
        .iter()
        .map(|group| {
            let sketch = &group.sketch;
            let name = match (&group.tensor, group.step) {
                (Some(tensor), _) => shortened(tensor, 30),
                (None, Some(step)) => format!("step {step}"),
                (None, None) => "all".to_owned(),
            };
            if let Some(bounded) = &group.bounded {
                let name = if analysis.inputs.len() > 1 {
                    format!("{}: {name}", group.run)
                } else {
                    name
                };
                return bounded_row(name, bounded, group, &columns);
            }
            let headroom = match sketch.amax() {
                Some(amax) if amax > 0.0 => format!("2^{:.1}", (FP16_OVERFLOW / amax).log2()),
                _ => "-".to_owned(),
            };
            let mut row = vec![
                name,
                short_count(sketch.elements()),
                share(sketch.zeros(), sketch.elements()),
                sketch
                    .amax()
                    .map_or("-".to_owned(), |amax| text::significant(amax.into(), 3)),
                headroom,
            ];
            row.extend(columns.iter().map(|&c| {
                let outcomes = &group.rates[c].outcomes;
                let mark = if group.rates[c].why_not_exact.is_some() {
                    "~"
                } else {
                    ""
                };
                match outcomes.overflow_to_infinity {
                    0 => format!("{mark}{}", fraction(outcomes.underflow_fraction())),
                    n => format!("{mark}inf {}", short_count(n)),
                }
            }));
            row
        })
        .collect();
    out.push('\n');
    out.push_str(&text::table(&headings, &rows));
    if groups.iter().any(|group| group.bounded.is_some()) {
        out.push_str("\na..b: histograms leave open where between them the share or count lies; zeros are of all elements.");
    }
    let counted = analysis.backend.map_or(String::new(), |backend| {
        format!("Counted by {}.\n", backend.name())
    });
    out.push_str(&format!(
        "\nat S: share of the finite nonzero elements that {} flushes to zero at loss scale S; \"inf n\": n elements overflow.\nheadroom: the scale at which amax overflows FP16.\n{counted}",
        analysis.format.name
    ));
    out
}

/// amax of histograms: a number where it is known, else what it can be at most.
pub fn bounded_amax(bounded: &Bounded) -> String {
    match bounded.amax {
        None => "-".to_owned(),
        Some((least, most)) => {
            let known = most - least <= most / 1024.0;
            let shown = text::significant(most.into(), 3);
            if known { shown } else { format!("≤{shown}") }
        }
    }
}

/// A row of intervals.
fn bounded_row(name: String, bounded: &Bounded, group: &Group, columns: &[usize]) -> Vec<String> {
    let headroom = match bounded.largest() {
        Some(amax) if amax > 0.0 => format!("2^{:.1}", (FP16_OVERFLOW / amax).log2()),
        _ => "-".to_owned(),
    };
    let (low, high) = bounded.zeros();
    let whole = bounded.elements.max(1) as f64;
    let mut row = vec![
        shortened(&name, 24),
        short_count(bounded.elements),
        text::interval(low as f64 / whole, high as f64 / whole),
        bounded_amax(bounded),
        headroom,
    ];
    row.extend(columns.iter().map(|&c| {
        let rate = &group.rates[c];
        let (low, high) = rate.bounds.unwrap_or((rate.outcomes, rate.outcomes));
        let shares = rate.shares.map_or((0.0, 1.0), |shares| shares.underflow);
        match (low.overflow_to_infinity, high.overflow_to_infinity) {
            (0, 0) => text::interval(shares.0, shares.1),
            (a, b) if a == b => format!("inf {}", short_count(a)),
            (a, b) => format!("inf {}..{}", short_count(a), short_count(b)),
        }
    }));
    row
}

/// A table of policies over a run.
pub fn simulation(runs: &[(usize, String, Simulated)], labels: &[String]) -> String {
    let rows: Vec<Vec<String>> = runs
        .iter()
        .map(|(run, policy, simulated)| {
            let cost = &simulated.cost;
            let skipped = if simulated.skipped.low == simulated.skipped.high {
                cost.skipped.to_string()
            } else {
                format!(
                    "{} ({}..{})",
                    cost.skipped, simulated.skipped.low, simulated.skipped.high
                )
            };
            let name = if labels.len() > 1 {
                format!("{run}: {policy}")
            } else {
                policy.clone()
            };
            vec![
                shortened(&name, 40),
                skipped,
                cost.skipped_at_start.to_string(),
                cost.growths.to_string(),
                text::scale(cost.first_scale),
                text::scale(cost.last_scale),
                cost.underflow
                    .map_or("-".to_owned(), |lost| fraction(lost.elements)),
                cost.lost_update
                    .map_or("-".to_owned(), |lost| fraction(lost.elements)),
            ]
        })
        .collect();
    let mut out = String::new();
    for (i, label) in labels.iter().enumerate() {
        if labels.len() > 1 {
            out.push_str(&format!("{i}: {label}\n"));
        }
    }
    out.push_str(&text::table(
        &[
            "policy",
            "skipped",
            "at start",
            "growths",
            "first scale",
            "last scale",
            "flushed",
            "lost update",
        ],
        &rows,
    ));
    for (_, policy, simulated) in runs {
        if let Some(stopped) = &simulated.cost.terminal {
            out.push_str(&format!(
                "{policy} ends the run at step {}: {}\n",
                stopped.step, stopped.reason
            ));
        }
    }
    out
}

/// What is lost now and what would be.
pub fn losses(answer: &Recommendation) -> String {
    let measure = answer.measure;
    let now = &answer.default.cost;
    let one = |cost: &crate::scaling::Cost| match cost.lost_update {
        Some(lost) => format!(
            "{} of the updates ({} skipped, {} flushed to zero)",
            percent(measure.of(lost)),
            text::steps(cost.skipped),
            percent(cost.underflow.map_or(0.0, |lost| measure.of(lost)))
        ),
        None => format!("{} skipped steps of {}", cost.skipped, cost.steps),
    };
    match &answer.recommended {
        Some(recommended) if answer.verdict == Answer::Change => format!(
            "With {} you lose {}; with {} {}.",
            answer.default_interval,
            one(now),
            answer.growth_interval.unwrap_or(answer.default_interval),
            one(&recommended.cost)
        ),
        _ => format!("With {} you lose {}.", answer.default_interval, one(now)),
    }
}

/// The best static scale's distance to the first overflow, as the end of a list.
pub fn margin(answer: &Recommendation) -> String {
    match answer.best_static_headroom_log2 {
        Some(binades) if binades > 0.0 => {
            format!(", {binades:.1} binades below the first overflow")
        }
        Some(binades) => format!(
            ", and its largest gradient overflows by {:.1} binades",
            -binades
        ),
        None => String::new(),
    }
}

/// How sure the answer is, a sentence each.
pub fn sureness(answer: &Recommendation) -> Vec<String> {
    let mut lines = Vec::new();
    if let (Some(bootstrap), Some((low, high))) = (
        answer.bootstrap,
        answer.recommended.as_ref().and_then(|c| c.confidence),
    ) {
        lines.push(format!(
            "How sure: {} to {} with 95 % confidence ({} resamplings in blocks of {:.0} steps); late skips in at most {} of the steps.",
            percent(low),
            percent(high),
            bootstrap.resamplings,
            bootstrap.block_length,
            percent(bootstrap.skip_rate_at_most.0)
        ));
    }
    if let Some(test) = answer.backtest {
        lines.push(format!(
            "Backtest: the first half alone says {}; over the second half that loses {}, the default {}, the best in hindsight {}.",
            test.growth_interval,
            percent(test.chosen),
            percent(test.default),
            percent(test.best)
        ));
    }
    if let Some(horizon) = &answer.horizon {
        let each: Vec<String> = horizon
            .intervals
            .iter()
            .map(|at| {
                let (mean, low, high) = at.lost_update;
                format!(
                    "{} loses {} ({} to {})",
                    at.growth_interval,
                    percent(mean),
                    percent(low),
                    percent(high)
                )
            })
            .collect();
        lines.push(format!(
            "Over {} steps (extrapolated from {} resamplings): {}.",
            text::count(horizon.steps),
            horizon.resamplings,
            each.join(", ")
        ));
    }
    if !answer.phases.is_empty() {
        let each: Vec<String> = answer
            .phases
            .iter()
            .map(|phase| {
                format!(
                    "steps {} to {}: amax drifts {:+.2} binades per 1000, {} loses least ({}, the default {})",
                    phase.from,
                    phase.to,
                    phase.drift,
                    phase.best,
                    percent(phase.lost_update.0),
                    percent(phase.lost_update.1)
                )
            })
            .collect();
        let common = match crate::scaling::in_common(&answer.phases).is_empty() {
            true => "no one interval suits them all",
            false => "one interval can suit them all",
        };
        lines.push(format!("Phases: {}; {common}.", each.join("; ")));
    }
    if let Some((recommended, default)) = answer.stress {
        lines.push(format!(
            "Stress: with a burst of 8 overflows planted in every 10,000 steps it would lose {}, the default {}.",
            percent(recommended),
            percent(default)
        ));
    }
    lines
}

/// A sweep for a terminal: the best row of each combination of the other keys, cheapest first.
pub fn swept(swept: &Swept, measure: Measure) -> String {
    let lost = |row: &Row| {
        row.cost
            .lost_update
            .map_or("-".to_owned(), |lost| fraction(measure.of(lost)))
    };
    let skipped = |row: &Row| match row.skipped_bounds {
        (low, high) if low == high => low.to_string(),
        (low, high) => format!("{low}..{high}"),
    };
    let mut headings: Vec<&str> = swept.keys.iter().map(String::as_str).collect();
    headings.extend(["skipped", "lost update", ""]);
    let mut rows: Vec<&Row> = swept.by_setting.iter().collect();
    rows.sort_by(|a, b| a.cost.j(measure).total_cmp(&b.cost.j(measure)));
    let hidden = rows.len().saturating_sub(MOST_SWEPT);
    let mut shown: Vec<Vec<String>> = rows
        .iter()
        .take(MOST_SWEPT)
        .map(|row| {
            let mut cells: Vec<String> = row.values.iter().map(|&v| text::scale(v)).collect();
            let best = **row == swept.best;
            cells.extend([
                skipped(row),
                lost(row),
                if best { "best" } else { "" }.to_owned(),
            ]);
            cells
        })
        .collect();
    let mut own: Vec<String> = swept.keys.iter().map(|_| "own".to_owned()).collect();
    own.extend([skipped(&swept.own), lost(&swept.own), String::new()]);
    shown.push(own);
    let mut out = format!(
        "\nSweep: {} combinations; the best of each setting, cheapest first:\n",
        text::count(swept.rows)
    );
    out.push_str(&text::table(&headings, &shown));
    if hidden > 0 {
        out.push_str(&format!("… {hidden} more; --csv writes them all\n"));
    }
    out
}

/// Rows of a sweep that a terminal shows.
const MOST_SWEPT: usize = 30;

/// The heading of a sweep's CSV.
pub fn swept_heading(keys: &[SweptKey]) -> String {
    let mut line: String = keys.iter().map(|key| format!("{},", key.name)).collect();
    line.push_str("skipped,skipped_low,skipped_high,skipped_at_start,growths,last_scale,lost_update_elements,lost_update_l1,lost_update_l2\n");
    line
}

/// One row of a sweep's CSV.
pub fn swept_line(row: &Row) -> String {
    let mut line: String = row.values.iter().map(|value| format!("{value},")).collect();
    let cost = &row.cost;
    line.push_str(&format!(
        "{},{},{},{},{},{}",
        cost.skipped,
        row.skipped_bounds.0,
        row.skipped_bounds.1,
        cost.skipped_at_start,
        cost.growths,
        cost.last_scale
    ));
    match cost.lost_update {
        Some(lost) => line.push_str(&format!(",{},{},{}\n", lost.elements, lost.l1, lost.l2)),
        None => line.push_str(",,,\n"),
    }
    line
}

/// The whole recommendation for a terminal.
pub fn recommendation(answer: &Recommendation, label: &str) -> String {
    let mut out = format!("{label}: {} steps\n\n{}\n", answer.steps, answer.headline());
    if let Some(line) = answer.as_good() {
        out.push_str(&line);
        out.push('\n');
    }
    out.push_str(&losses(answer));
    out.push('\n');
    out.push_str(&format!("Why: {}\n", answer.because));
    for line in sureness(answer) {
        out.push_str(&line);
        out.push('\n');
    }
    if answer.basis == Basis::SkipBudget {
        out.push_str("Only amax is known, so this judges skipped steps alone.\n");
    }
    if let Some((scale, cost)) = &answer.best_static {
        out.push_str(&format!(
            "Best static scale: {} ({}{} skipped{}).\n",
            text::scale(*scale),
            cost.lost_update.map_or(String::new(), |lost| format!(
                "{} lost, ",
                percent(answer.measure.of(lost))
            )),
            cost.skipped,
            margin(answer),
        ));
    }
    out.push('\n');
    let rows: Vec<Vec<String>> = super::json::shown_candidates(answer)
        .into_iter()
        .map(|candidate| {
            let mark = if Some(candidate.growth_interval) == answer.growth_interval {
                "recommended"
            } else if std::ptr::eq(candidate, answer.choice.default()) {
                "default"
            } else {
                ""
            };
            let bounds = candidate.skipped_bounds;
            vec![
                candidate.growth_interval.to_string(),
                if bounds.0 == bounds.1 {
                    candidate.cost.skipped.to_string()
                } else {
                    format!("{}..{}", bounds.0, bounds.1)
                },
                candidate
                    .cost
                    .underflow
                    .map_or("-".to_owned(), |lost| fraction(answer.measure.of(lost))),
                candidate
                    .cost
                    .lost_update
                    .map_or("-".to_owned(), |lost| fraction(answer.measure.of(lost))),
                mark.to_owned(),
            ]
        })
        .collect();
    out.push_str(&text::table(
        &["growth_interval", "skipped", "flushed", "lost update", ""],
        &rows,
    ));
    if answer.growth_interval.is_some() {
        out.push_str("\nSettings:\n");
        for setting in &answer.settings {
            out.push_str(&format!(
                "  {:12} {}\n",
                setting.framework.label(),
                setting.text
            ));
            if setting.framework.key() == "pytorch"
                && let Some(line) = &answer.pytorch_static
            {
                out.push_str(&format!("  {:12} {line}\n", "static"));
            }
        }
    }
    out
}

/// The formats and their thresholds.
pub fn formats(formats: &[crate::float::Format]) -> String {
    let number = |value: f32| match crate::float::exact_log2(value.into()) {
        Some(e) if !(-3..=20).contains(&e) => format!("2^{e}"),
        _ => text::significant(value.into(), 6),
    };
    let rows: Vec<Vec<String>> = formats
        .iter()
        .map(|f| {
            vec![
                f.name.to_owned(),
                f.significand_bits.to_string(),
                format!("{}..{}", f.min_exponent, f.max_exponent),
                number(f32::from_bits(f.last_zero_bits())),
                number(f.smallest_subnormal()),
                number(f.smallest_normal()),
                number(f.largest_finite()),
                number(f32::from_bits(f.first_overflow_bits())),
            ]
        })
        .collect();
    let headings = [
        "format",
        "significand",
        "exponents",
        "to zero ≤",
        "subnormal",
        "normal",
        "largest",
        "overflow ≥",
    ];
    text::table(&headings, &rows)
        + "\nRounding is to nearest, ties to even. fp8-e4m3fn has no infinity: above 464 it gives NaN.\n"
}

/// One limit that is not kept, as a line for stderr.
pub fn crossing(crossing: &crate::analysis::Crossing) -> String {
    let (low, high) = crossing.fraction;
    let seen = if low == high {
        fraction(low)
    } else {
        format!("between {} and {}", fraction(low), fraction(high))
    };
    let word = match crossing.passage {
        crate::analysis::Passage::CannotTell => "cannot tell",
        _ => "gate crossed",
    };
    format!(
        "{word}: {} has {} of {seen} at scale {}, the limit is {}\n",
        shortened(&crossing.group, 60),
        crossing.what,
        text::scale(crossing.loss_scale.into()),
        if crossing.limit == 0.0 {
            "0".to_owned()
        } else {
            fraction(crossing.limit)
        }
    )
}
