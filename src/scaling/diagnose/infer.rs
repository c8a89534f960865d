//! The growth interval, where it follows from the log.

use super::history::History;
use super::shape::{Burst, Item, Rise, Shape};

/// A growth interval and how it is known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// The steps.
    pub steps: u64,
    /// The least that fits.
    pub low: f64,
    /// The most that fits.
    pub high: f64,
    /// A line states it.
    pub said: bool,
}

/// Steps between growths: stated, or from rises in a row, or from equal distances of ceiling hits.
pub fn interval(history: &History, shape: &Shape) -> Option<Interval> {
    if let Some(&last) = history.intervals_said.last() {
        let same = history
            .intervals_said
            .iter()
            .filter(|n| **n == last)
            .count();
        if same * 2 > history.intervals_said.len() {
            return Some(Interval {
                steps: last,
                low: last as f64,
                high: last as f64,
                said: true,
            });
        }
    }
    rises(shape).or_else(|| ceilings(shape))
}

/// Rises in a row, without an overflow between.
fn rises(shape: &Shape) -> Option<Interval> {
    // Nothing follows from a rise to infinity: it is the last one, and of no size.
    let finite: Vec<&Rise> = shape.rises.iter().filter(|r| r.octaves < 500.0).collect();
    let mut best: Option<(f64, f64, f64)> = None;
    let mut start = 0;
    for at in 1..=finite.len() {
        if at < finite.len() && finite[at].bursts == finite[start].bursts {
            continue;
        }
        let row = &finite[start..at];
        start = at;
        if row.len() < 2 {
            continue;
        }
        let (Some(first), Some(last)) = (row[0].steps, row[row.len() - 1].steps) else {
            continue;
        };
        let octaves: f64 = row[1..].iter().map(|rise| rise.octaves).sum();
        let low = (last.0 as f64 - first.1 as f64) / octaves;
        let high = (last.1 as f64 - first.0 as f64) / octaves;
        if octaves >= 2.0 && best.is_none_or(|(_, _, most)| octaves > most) {
            best = Some((low, high, octaves));
        }
    }
    let (low, high, _) = best?;
    round(low, high)
}

/// Distances between bursts that growth lies between, the steps skipped there taken off. Each growth is taken to be
/// followed by the overflow at once, as at a ceiling.
fn ceilings(shape: &Shape) -> Option<Interval> {
    let bursts: Vec<&Burst> = shape
        .items
        .iter()
        .filter_map(|item| match item {
            Item::Burst(burst) if !burst.inferred => Some(burst),
            _ => None,
        })
        .collect();
    let mut gaps: Vec<(f64, f64, f64)> = Vec::new();
    let (mut steps, mut octaves) = (None, 0.0);
    for pair in bursts.windows(2) {
        let growth = pair[1].growth.round();
        let (Some(before), Some(after)) = (pair[0].steps, pair[1].steps) else {
            return None;
        };
        if growth < 1.0 || pair[0].run != pair[1].run {
            continue;
        }
        // From the last overflow before to the first one after: N clean steps a growth.
        let low = after[0].0 as f64 - before[1].1 as f64 - 1.0;
        let high = after[0].1 as f64 - before[1].0 as f64 - 1.0;
        gaps.push((low / growth, high / growth, growth));
        octaves += growth;
        // Windows end to end tell more than each alone.
        if pair[1].count == 1 && growth == 1.0 {
            let (first, n, skipped) = steps.unwrap_or((before[1], 0.0, 0.0));
            let _ = first;
            steps = Some((first, n + 1.0, skipped + 1.0));
            let (low, high) = (
                (after[0].0 as f64 - first.1 as f64 - (skipped + 1.0)) / (n + 1.0),
                (after[0].1 as f64 - first.0 as f64 - (skipped + 1.0)) / (n + 1.0),
            );
            if n >= 1.0 {
                gaps.push((low, high, growth));
            }
        } else {
            steps = None;
        }
    }
    if octaves < 3.0 {
        return None;
    }
    let low = gaps.iter().fold(0.0, |low: f64, gap| low.max(gap.0));
    let high = gaps
        .iter()
        .fold(f64::INFINITY, |high: f64, gap| high.min(gap.1));
    round(low, high)
}

/// The roundest whole number in a range: people choose round ones.
fn round(low: f64, high: f64) -> Option<Interval> {
    let first = low.max(1.0).ceil();
    let last = high.floor();
    if !(first <= last && last.is_finite() && last <= first * 1.25 + 2.0) {
        return None;
    }
    let (first, last) = (first as u64, last as u64);
    let mut unit = 1_000_000;
    let steps = loop {
        let multiple = (last / unit) * unit;
        if multiple >= first && multiple > 0 {
            break multiple;
        }
        let power = last.checked_ilog2().map_or(1, |log| 1 << log);
        if unit <= 100 && power >= first {
            break power;
        }
        unit = match unit {
            1 => break first,
            unit if unit.to_string().starts_with('5') => unit / 5 * 2,
            unit if unit.to_string().starts_with('2') => unit / 2,
            unit => unit / 2,
        };
    };
    Some(Interval {
        steps,
        low,
        high,
        said: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_roundest_number_in_a_range_is_taken() {
        let of = |low, high| round(low, high).map(|i| i.steps);
        assert_eq!(of(1985.0, 2013.0), Some(2000));
        assert_eq!(of(98.0, 100.4), Some(100));
        assert_eq!(of(1.0, 1.0), Some(1));
        assert_eq!(of(255.0, 257.0), Some(256));
        assert_eq!(of(20.0, 20.0), Some(20));
        assert_eq!(of(100.0, 200.0), None);
        assert_eq!(of(7.2, 7.9), None);
    }
}
