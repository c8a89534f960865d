//! What is learnt from a scaler before it is held to the laws: interval, hysteresis, floor, ceiling.

use super::{Failure, Interval, Options, Step, Subject};

/// The quantities that the laws need.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// The fewest clean steps in a row that brought growth; `None` where none was seen.
    pub earliest_growth: Option<u64>,
    /// The most that it took.
    pub latest_growth: Option<u64>,
    /// The smallest factor of a growth.
    pub growth_ratio: f64,
    /// Clean steps after which a scale that fell may be asked to have risen; `None` where it is not to grow.
    pub growth_within: Option<u64>,
    /// How many overflows in a row brought the first backoff; `None` where none came within 64.
    pub hysteresis: Option<u64>,
    /// Where overflows leave the scale.
    pub floor: f64,
    /// Where clean steps leave it.
    pub ceiling: f64,
    /// The scale of the first step.
    pub first_scale: f64,
}

/// More overflows in a row than any real hysteresis.
const HYSTERESIS: u64 = 64;

impl Facts {
    /// Nothing known: the subject failed while it was learnt from.
    pub(super) fn unknown() -> Facts {
        Facts {
            earliest_growth: None,
            latest_growth: None,
            growth_within: None,
            growth_ratio: 2.0,
            hysteresis: None,
            floor: 0.0,
            ceiling: f64::INFINITY,
            first_scale: f64::NAN,
        }
    }

    /// The clean stretch around which histories are drawn, at least 2.
    pub(super) fn stretch(&self) -> usize {
        self.earliest_growth.unwrap_or(8).clamp(2, 20_000) as usize
    }

    /// The most clean steps after which growth may be asked for.
    pub(super) fn patience(&self) -> usize {
        self.latest_growth.unwrap_or(64).clamp(1, 40_000) as usize
    }

    /// Overflows in a row after which backoff may be asked for.
    pub(super) fn overflows(&self) -> usize {
        self.hysteresis.unwrap_or(8) as usize
    }
}

/// Clean steps until `growths` growths or `steps` steps: how many clean steps each growth took, and its factor.
fn climb(
    subject: &mut dyn Subject,
    scale: f64,
    growths: usize,
    steps: usize,
) -> Result<Vec<(u64, f64)>, Failure> {
    let (mut seen, mut scale, mut run) = (Vec::new(), scale, 0);
    for _ in 0..steps {
        let Step::Done { scale: next, .. } = subject.step(false)? else {
            break;
        };
        run += 1;
        if next > scale {
            seen.push((run, next / scale));
            run = 0;
        }
        scale = next;
        if seen.len() == growths {
            break;
        }
    }
    Ok(seen)
}

/// Overflows until the scale falls; how many it took, and the scale then.
fn fall(subject: &mut dyn Subject, scale: f64) -> Result<Option<(u64, f64)>, Failure> {
    for n in 1..=HYSTERESIS {
        match subject.step(true)? {
            Step::Done { scale: next, .. } if next < scale => return Ok(Some((n, next))),
            Step::Done { .. } => {}
            Step::Terminal(_) => break,
        }
    }
    Ok(None)
}

/// Learns from `subject`, or takes from `options` what is given there.
pub(super) fn learn(subject: &mut dyn Subject, options: &Options) -> Result<Facts, Failure> {
    let first_scale = subject.reset()?;
    let reach = match options.interval {
        Interval::Learnt | Interval::Never => options.reach,
        Interval::Exactly(n) | Interval::OrOneMore(n) => options
            .reach
            .min(usize::try_from(n).unwrap_or(usize::MAX).saturating_mul(8)),
    };
    let mut growths = climb(subject, first_scale, 3, reach)?;
    if growths.is_empty() {
        // It may stand at its ceiling: from below, then.
        let scale = subject.reset()?;
        if let Some((_, below)) = fall(subject, scale)? {
            growths = climb(subject, below, 1, reach)?;
        }
    }
    let scale = subject.reset()?;
    let mut hysteresis = fall(subject, scale)?.map(|(n, _)| n);
    if hysteresis.is_none() && !growths.is_empty() {
        // It may start at its floor: from above, then.
        let mut scale = subject.reset()?;
        for _ in 0..growths.iter().map(|g| g.0 as usize).sum() {
            let Step::Done { scale: next, .. } = subject.step(false)? else {
                break;
            };
            scale = next;
        }
        hysteresis = fall(subject, scale)?.map(|(n, _)| n);
    }

    let mut floor = subject.reset()?;
    let mut unchanged = 0;
    for _ in 0..1300 {
        let Step::Done { scale: next, .. } = subject.step(true)? else {
            break;
        };
        unchanged = if next == floor { unchanged + 1 } else { 0 };
        floor = next;
        if unchanged > HYSTERESIS {
            break;
        }
    }

    let (earliest_growth, latest_growth) = match options.interval {
        Interval::Learnt | Interval::Never => (
            growths.iter().map(|g| g.0).min(),
            growths.iter().map(|g| g.0).max(),
        ),
        Interval::Exactly(n) => (Some(n), Some(n)),
        Interval::OrOneMore(n) => (Some(n), Some(n.saturating_add(1))),
    };
    let mut facts = Facts {
        earliest_growth,
        latest_growth,
        growth_within: match options.interval {
            Interval::Never => None,
            _ => latest_growth.or(Some(options.reach as u64)),
        },
        growth_ratio: growths.iter().map(|g| g.1).fold(f64::INFINITY, f64::min),
        hysteresis: options.hysteresis.or(hysteresis),
        floor,
        ceiling: f64::INFINITY,
        first_scale,
    };
    if !facts.growth_ratio.is_finite() {
        facts.growth_ratio = 2.0;
    }
    // Where growth is due by what was given, a scaler that never grew stands at no ceiling.
    if !growths.is_empty() || matches!(options.interval, Interval::Learnt | Interval::Never) {
        let scale = subject.reset()?;
        facts.ceiling = super::rules::drive_up(subject, scale, facts.patience(), options.drive)?.1;
    }
    Ok(facts)
}
