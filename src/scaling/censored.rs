//! Bounds on the skips of policies that double and halve, where the record decides some steps only at some scales.
//!
//! ```text
//!   level   2^17  |        r=8 . .          a state is its level and the step of its last reset;
//!           2^16  |  r=0 . . . r=9 . . .    a clean step moves nothing, growth takes the oldest of a level,
//!           2^15  |      r=3 . . .          an overflow the level as a whole
//! ```
//!
//! Following every reachable state costs a step as much as there are states, up to a growth interval's worth a level.
//! Here it costs the levels in use, and a run of a million steps takes well under a second.

use super::policy::{Doubling, Floor};
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

/// Scales of the grid: f32's normal ones.
const GRID: std::ops::RangeInclusive<f64> = f32::MIN_POSITIVE as f64..=f32::MAX as f64;

/// The least and the most skips over all readings of the undecided steps, from a fresh state at `first`; `None` where a
/// floor or ceiling moves the scale off the grid. At the grid's lower end halving stops.
pub(super) fn bounds(limits: &[Limits], first: f64, rule: Doubling) -> Option<(u64, u64)> {
    if !GRID.contains(&first) || rule.hysteresis == 0 {
        return None;
    }
    // The start with its halvings, as long as they are exact, and its doublings.
    let mut scales = vec![first];
    while GRID.contains(&(scales[0] / 2.0)) {
        scales.insert(0, scales[0] / 2.0);
    }
    let start = scales.len() - 1;
    while GRID.contains(&scales[scales.len() - 1]) {
        scales.push(scales[scales.len() - 1] * 2.0);
    }
    // Where a growth leads beyond f32's range, every step overflows.
    let beyond = scales.len() - 1;
    let up = |level: usize| -> Option<usize> {
        let grown = scales[level] * 2.0;
        match (grown <= rule.ceiling, scales[level] == rule.ceiling) {
            (true, _) => Some((level + 1).min(beyond)),
            (false, true) => Some(level),
            // PyTorch stays where doubling would reach infinity.
            (false, false) => (rule.ceiling == f64::from(f32::MAX)).then_some(level),
        }
    };
    // Where a halving leads: a level, or the end of the training.
    let down = |level: usize| -> Option<Option<usize>> {
        let (scale, halved) = (scales[level], scales[level] / 2.0);
        if level == beyond && rule.in_f32 {
            return Some(Some(level));
        }
        match rule.floor {
            Floor::StopsAt(floor) if scale == floor => return Some(None),
            Floor::StopsBelow(floor) if halved <= floor => return Some(None),
            Floor::Stays(floor) if scale == floor => return Some(Some(level)),
            Floor::Stays(floor) | Floor::StopsAt(floor) if halved < floor => return None,
            _ => {}
        }
        // Far below anything that a run comes back from, a step more or less tells nothing.
        Some(Some(level.saturating_sub(1)))
    };
    // A node is a level and the overflows that are still forgiven there, plus one.
    let forgiving = rule.hysteresis as usize;
    let mut nodes: Vec<Level> = (0..scales.len() * forgiving)
        .map(|_| Level::default())
        .collect();
    let late = rule.after_overflow.checked_sub(rule.interval)?;
    // Steps are counted so that a state reset at step r grows after step r + interval.
    nodes[start * forgiving + forgiving - 1].push(late, 0, 0);
    let (mut bottom, mut top) = (start, start);
    let mut ended: Option<(u64, u64)> = None;
    let mut moved: Vec<(u64, usize, u64, u64)> = Vec::new();
    for (at, limits) in limits.iter().enumerate() {
        let now = at as u64 + 1;
        moved.clear();
        for (level, &scale) in scales.iter().enumerate().take(top + 1).skip(bottom) {
            let verdict = match level == beyond {
                true => Verdict::Overflow,
                false => limits.at(scale as f32),
            };
            for left in 0..forgiving {
                let node = level * forgiving + left;
                let overflowed = match verdict {
                    Verdict::Clean => None,
                    Verdict::Unknown => nodes[node].range(),
                    Verdict::Overflow => {
                        let range = nodes[node].range();
                        nodes[node].clear();
                        range
                    }
                };
                if let Some((low, high)) = overflowed {
                    let (low, high) = (low + 1, high + 1);
                    let to = if left > 0 {
                        Some(node - 1)
                    } else {
                        down(level)?.map(|level| level * forgiving)
                    };
                    match to {
                        Some(node) => moved.push((now + late, node, low, high)),
                        None => {
                            let (least, most) = ended.unwrap_or((u64::MAX, 0));
                            ended = Some((least.min(low), most.max(high)));
                        }
                    }
                }
                if let Some(reset) = now.checked_sub(rule.interval)
                    && let Some((low, high)) = nodes[node].pop(reset)
                {
                    moved.push((now, up(level)? * forgiving + forgiving - 1, low, high));
                }
            }
        }
        // A queue takes its states in the order of their resets.
        moved.sort_by_key(|(reset, ..)| *reset);
        for &(reset, node, low, high) in &moved {
            bottom = bottom.min(node / forgiving);
            top = top.max(node / forgiving);
            nodes[node].push(reset, low, high);
        }
    }
    nodes
        .iter()
        .filter_map(Level::range)
        .chain(ended)
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
            let mut policies = vec![
                "pytorch:init_scale=64",
                "apex-amp:init_scale=64,max_loss_scale=256,min_loss_scale=8",
                "apex-amp:init_scale=64",
                "megatron:init_scale=64",
                "megatron:init_scale=64,min_scale=16,hysteresis=3",
                "deepspeed:init_scale=64,min_scale=4",
                "deepspeed:init_scale=64,min_scale=8,hysteresis=1,raise_error_at_min_scale=false",
                "deepspeed-legacy:init_scale=64,hysteresis=2",
                "deepspeed-fp16-fused:init_scale=64",
                "fairseq:init_scale=64,min_loss_scale=8",
            ];
            // Up to the end of f32's range, where nothing is known of any step.
            let far = trace.steps.len() > 30;
            if far {
                for step in &mut trace.steps {
                    (step.loss_scale, step.found_inf) = (Some(64.0), Some(false));
                }
                policies = vec![
                    "pytorch:init_scale=1.329227995784916e36",
                    "megatron:init_scale=1.329227995784916e36",
                    "deepspeed:init_scale=1.329227995784916e36",
                    "fairseq:init_scale=1.329227995784916e36",
                ];
            }
            let run = Run::new(&trace, RunOptions::default());
            for (spec, interval) in policies
                .iter()
                .flat_map(|p| [1, 2, 3, 7, 50].map(|n| (p, n)))
            {
                let spec = format!("{spec},growth_interval={interval}");
                let policy = PolicySpec::parse(&spec)
                    .and_then(|spec| spec.build(Defaults::Framework))
                    .expect("valid");
                let slow = follow(&run, policy.as_ref());
                assert!(slow.tight);
                let fast = bounds(
                    &run.limits,
                    policy.loss_scale(),
                    policy.doubling().expect("doubles"),
                );
                assert_eq!(fast, Some((slow.low, slow.high)), "{spec} {trace:?}");
            }
        }
    }
}
