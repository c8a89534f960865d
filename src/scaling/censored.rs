//! Bounds on the skips of PyTorch's policy where the record decides some steps only at some scales.
//!
//! ```text
//!   level   2^17  |        r=8 . .          a state is its level and the step of its last reset;
//!           2^16  |  r=0 . . . r=9 . . .    a clean step moves nothing, growth takes the oldest of a level,
//!           2^15  |      r=3 . . .          an overflow the level as a whole
//! ```
//!
//! Following every reachable state costs a step as much as there are states, up to a growth interval's worth a level.
//! Here it costs the levels in use, and a run of a million steps takes well under a second.

use super::policy::Doubling;
use super::run::{Limits, Verdict};
use std::collections::VecDeque;

/// One level of the grid: when its scaler was last reset, and the least and most skips on the way there.
///
/// Between two resets nothing but time passes, so a state is its level and the step of its last reset. States wait in a
/// queue, oldest first; the least and the most over a level are kept as in a sliding window.
#[derive(Debug, Default)]
struct Level {
    states: VecDeque<(u64, u64, u64)>,
    least: VecDeque<(u64, u64)>,
    most: VecDeque<(u64, u64)>,
}

impl Level {
    fn push(&mut self, reset: u64, low: u64, high: u64) {
        if let Some(last) = self.states.back_mut()
            && last.0 == reset
        {
            last.1 = last.1.min(low);
            last.2 = last.2.max(high);
        } else {
            self.states.push_back((reset, low, high));
        }
        while self.least.back().is_some_and(|(_, kept)| *kept >= low) {
            self.least.pop_back();
        }
        self.least.push_back((reset, low));
        while self.most.back().is_some_and(|(_, kept)| *kept <= high) {
            self.most.pop_back();
        }
        self.most.push_back((reset, high));
    }

    fn pop(&mut self, reset: u64) -> Option<(u64, u64)> {
        self.states
            .front()
            .filter(|(oldest, ..)| *oldest == reset)?;
        let (_, low, high) = self.states.pop_front()?;
        while self.least.front().is_some_and(|(at, _)| *at <= reset) {
            self.least.pop_front();
        }
        while self.most.front().is_some_and(|(at, _)| *at <= reset) {
            self.most.pop_front();
        }
        Some((low, high))
    }

    /// The least and the most skips over its states.
    fn range(&self) -> Option<(u64, u64)> {
        Some((self.least.front()?.1, self.most.front()?.1))
    }

    fn clear(&mut self) {
        self.states.clear();
        self.least.clear();
        self.most.clear();
    }
}

/// The least and the most skips over all readings of the undecided steps, from a fresh state at `first`; `None` where the
/// scale leaves the grid, far below anything that a run comes back from.
pub(super) fn bounds(limits: &[Limits], first: f32, rule: Doubling) -> Option<(u64, u64)> {
    if !first.is_normal() {
        return None;
    }
    // The start with its halvings, as long as they are exact, and its doublings up to infinity.
    let mut scales = vec![first];
    while scales[0] / 2.0 >= f32::MIN_POSITIVE {
        scales.insert(0, scales[0] / 2.0);
    }
    let start = scales.len() - 1;
    while scales[scales.len() - 1].is_finite() {
        scales.push(scales[scales.len() - 1] * 2.0);
    }
    let mut levels: Vec<Level> = scales.iter().map(|_| Level::default()).collect();
    // Steps are counted so that a state reset at step r grows after step r + interval.
    levels[start].push(0, 0, 0);
    let (mut bottom, mut top) = (start, start);
    for (at, limits) in limits.iter().enumerate() {
        let now = at as u64 + 1 + rule.tracker;
        let mut moved: Vec<(usize, u64, u64)> = Vec::new();
        for level in bottom..=top {
            let overflowed = match limits.at(scales[level]) {
                Verdict::Clean => None,
                Verdict::Unknown => levels[level].range(),
                Verdict::Overflow => {
                    let range = levels[level].range();
                    levels[level].clear();
                    range
                }
            };
            if let Some((low, high)) = overflowed {
                moved.push((level.checked_sub(1)?, low + 1, high + 1));
            }
            if let Some(reset) = now.checked_sub(rule.interval)
                && let Some((low, high)) = levels[level].pop(reset)
            {
                // PyTorch never grows to infinity.
                let finite = scales[level + 1].is_finite();
                moved.push((level + usize::from(finite), low, high));
            }
        }
        for (level, low, high) in moved {
            bottom = bottom.min(level);
            top = top.max(level);
            levels[level].push(now, low, high);
        }
    }
    levels
        .iter()
        .filter_map(Level::range)
        .reduce(|(a, b), (c, d)| (a.min(c), b.max(d)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scaling::policy::{Defaults, PolicySpec};
    use crate::scaling::simulate::follow;
    use crate::scaling::{Run, RunOptions};
    use crate::tally::{Step, Trace};

    #[test]
    fn bounds_are_those_of_following_every_state() {
        let mut seed = 7u64;
        let mut dice = |n: u64| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % n
        };
        for _ in 0..80 {
            let mut trace = Trace::default();
            for step in 0..10 + dice(60) {
                trace.steps.push(Step {
                    step,
                    loss_scale: Some(2f64.powi(dice(6) as i32 + 4)),
                    found_inf: Some(dice(4) == 0),
                    loss: None,
                });
            }
            let run = Run::new(&trace, RunOptions::default());
            for interval in [1, 2, 3, 7, 50] {
                let spec = format!("pytorch:growth_interval={interval},init_scale=64");
                let policy = PolicySpec::parse(&spec)
                    .and_then(|spec| spec.build(Defaults::Framework))
                    .expect("valid");
                let slow = follow(&run, policy.as_ref());
                assert!(slow.tight);
                let fast = bounds(&run.limits, 64.0, policy.doubling().expect("doubles"));
                assert_eq!(fast, Some((slow.low, slow.high)), "{interval} {trace:?}");
            }
        }
    }
}
