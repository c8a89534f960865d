//! Overflow histories that find trouble: bursts, spacings one off the interval, droughts, save and load anywhere.
//!
//! Uniform random flags almost never hold an interval's worth of clean steps, so histories are drawn as *runs*: a flag and
//! a length, the length from where off-by-ones live.

use std::fmt;
use std::str::FromStr;

use proptest::prelude::*;
use proptest::strategy::Union;

use super::Facts;

/// One history: overflow or not, step by step, and a step where something else happens (save and load, a fork).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// Overflow or not.
    pub found_inf: Vec<bool>,
    /// At most the number of steps.
    pub at: usize,
}

/// Why a history could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "parsing the history \"{text}\": found \"{found}\", expected runs such as 0x20 1 0x19, plain flags such as 0001000, and at most one S where the state is saved and loaded"
)]
pub struct HistoryError {
    /// The user's text.
    pub text: String,
    /// The part that cannot be read.
    pub found: String,
}

/// The longest history that `--replay` takes.
const REPLAY_STEPS: usize = 10_000_000;

impl FromStr for Case {
    type Err = HistoryError;

    /// Reads `0001000`, `0,0,1`, `[0, 0, 1]`, or runs as reports print them: `0x20 1 0x19`. An `S` marks where the state is
    /// saved and loaded (the middle, where there is none).
    fn from_str(text: &str) -> Result<Case, HistoryError> {
        let bad = |found: &str| HistoryError {
            text: text.to_owned(),
            found: found.to_owned(),
        };
        let (mut found_inf, mut at) = (Vec::new(), None);
        for word in text
            .split([',', ' ', '[', ']', '\t', '\n'])
            .filter(|w| !w.is_empty())
        {
            if let Some((flag, count)) = word.split_once('x') {
                let flag = match flag {
                    "0" => false,
                    "1" => true,
                    _ => return Err(bad(word)),
                };
                let count: usize = count.parse().map_err(|_| bad(word))?;
                if count > REPLAY_STEPS - found_inf.len().min(REPLAY_STEPS) {
                    return Err(bad(word));
                }
                found_inf.resize(found_inf.len() + count, flag);
                continue;
            }
            for letter in word.chars() {
                match letter {
                    '0' => found_inf.push(false),
                    '1' => found_inf.push(true),
                    'S' | 's' if at.is_none() => at = Some(found_inf.len()),
                    _ => return Err(bad(word)),
                }
            }
        }
        if found_inf.is_empty() {
            return Err(bad(text));
        }
        let at = at.unwrap_or(found_inf.len() / 2);
        Ok(Case { found_inf, at })
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&compact(&self.found_inf))
    }
}

/// The history as runs, `0x20 1 0x19`: what a report prints and `--replay` reads.
pub(crate) fn compact(found_inf: &[bool]) -> String {
    let mut words: Vec<String> = Vec::new();
    for run in found_inf.chunk_by(|a, b| a == b) {
        let flag = u8::from(run[0]);
        words.push(if run.len() == 1 {
            flag.to_string()
        } else {
            format!("{flag}x{}", run.len())
        });
    }
    words.join(" ")
}

/// The histories that every search begins with.
pub(super) fn classics(facts: &Facts) -> Vec<Case> {
    let w = facts.stretch();
    let clean = |n: usize| vec![false; n];
    let overflow = |n: usize| vec![true; n];
    let join = |parts: &[Vec<bool>]| parts.concat();
    let mut histories = vec![
        // Seven intervals: a window that doubles at each growth shows in the third.
        clean(7 * w + 4),
        // Long enough to see an f64 reach 0 from 2^16.
        overflow(1200),
        (0..2 * w + 6).map(|i| i % 2 == 0).collect(),
        (0..2 * w + 6).map(|i| i % 2 == 1).collect(),
        // One overflow at each spacing around the interval, then a full stretch.
        join(&[clean(w.saturating_sub(1)), overflow(1), clean(w + 2)]),
        join(&[clean(w), overflow(1), clean(w + 2)]),
        join(&[clean(w + 1), overflow(1), clean(w + 2)]),
        join(&[
            clean(w / 2),
            overflow(1),
            clean(w.saturating_sub(1)),
            overflow(1),
            clean(2 * w + 2),
        ]),
        join(&[
            overflow(3),
            clean(w + 2),
            overflow(2),
            clean(w + 2),
            overflow(4),
            clean(2 * w + 2),
        ]),
        join(&[overflow(20), clean(3 * w + 3)]),
    ];
    // Isolated overflows a little less than an interval apart: the drought in which a hysteresis must not refill.
    histories.push(
        (0..6)
            .flat_map(|_| join(&[clean(w.saturating_sub(1)), overflow(1)]))
            .collect(),
    );
    histories
        .into_iter()
        .map(|found_inf| Case {
            at: found_inf.len() * 2 / 3,
            found_inf,
        })
        .collect()
}

/// The histories that a search draws.
pub(super) fn strategy(facts: &Facts) -> impl Strategy<Value = Case> + use<> {
    let w = facts.stretch();
    let clean = Union::new_weighted(vec![
        (4, (1..=6_usize).boxed()),
        (3, (w.saturating_sub(2).max(1)..=w + 2).boxed()),
        (2, (1..=w + 2).boxed()),
        (1, (2 * w - 1..=2 * w + 2).boxed()),
    ]);
    let overflow = Union::new_weighted(vec![
        (6, (1..=3_usize).boxed()),
        (3, (1..=10_usize).boxed()),
        (1, (20..=130_usize).boxed()),
    ]);
    let run = prop_oneof![
        clean.prop_map(|n| (false, n)),
        overflow.prop_map(|n| (true, n)),
    ];
    (prop::collection::vec(run, 1..8), 0..=100_usize).prop_map(|(runs, share)| {
        let found_inf: Vec<bool> = runs
            .into_iter()
            .flat_map(|(flag, n)| std::iter::repeat_n(flag, n))
            .collect();
        Case {
            at: found_inf.len() * share / 100,
            found_inf,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_reads_as_it_was_printed() {
        let case: Case = "0x20 1 0x3 S 11".parse().expect("a history");
        assert_eq!(case.at, 24);
        assert_eq!(compact(&case.found_inf), "0x20 1 0x3 1x2");
        assert_eq!(
            "[0, 0, 1]".parse::<Case>().expect("a list").found_inf,
            [false, false, true]
        );
        for bad in ["", "2", "0x", "1x99999999999", "0SS1", "yes"] {
            assert!(bad.parse::<Case>().is_err(), "{bad}");
        }
    }
}
