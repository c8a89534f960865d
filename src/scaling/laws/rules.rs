//! The laws, each with the real bug that it guards against.

use super::{Case, Counterexample, Facts, Failure, SAME_AS_POLICY, Step, Subject};
use crate::scaling::policy::{Defaults, PolicySpec};

/// A property that every loss scaler keeps.
pub struct Law {
    /// Its name, as in reports and `--except`.
    pub name: &'static str,
    /// What it asks for.
    pub statement: &'static str,
    /// A bug of a real scaler that it finds.
    pub bug: &'static str,
    /// The most histories that it is worth trying: some laws hardly depend on what went before.
    pub(super) most_cases: u32,
    pub(super) rule: Rule,
}

/// `None` where the law is kept on this history.
pub(super) type Rule = fn(&mut Bench<'_, '_>, &Case) -> Result<Option<Counterexample>, Failure>;

impl std::fmt::Debug for Law {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Law")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// The subject on the bench, a second copy where a law needs one, and what is known of it.
pub(super) struct Bench<'b, 'a> {
    pub subject: Box<dyn Subject + 'a>,
    pub second: Option<Box<dyn Subject + 'a>>,
    pub make: &'b mut dyn FnMut() -> Result<Box<dyn Subject + 'a>, Failure>,
    pub facts: Facts,
    pub reference: Option<PolicySpec>,
    /// The longest drive to the ceiling.
    pub drive: usize,
}

impl<'a> Bench<'_, 'a> {
    fn both(&mut self) -> Result<(&mut (dyn Subject + 'a), &mut (dyn Subject + 'a)), Failure> {
        if self.second.is_none() {
            self.second = Some((self.make)()?);
        }
        let second = self.second.as_mut().expect("made above");
        Ok((self.subject.as_mut(), second.as_mut()))
    }
}

/// Every law, in the order in which they are tried.
pub const LAWS: &[Law] = &[
    Law {
        name: SAME_AS_POLICY,
        statement: "beside a reference policy: the same scale, skip and terminal error at every step",
        bug: "a port that halves twice on one overflow, or counts W + 1 steps where its original counts W",
        most_cases: u32::MAX,
        rule: same_as_policy,
    },
    Law {
        name: "scale_stays_positive",
        statement: "no overflow, however many, takes the scale to zero, below, or to NaN",
        bug: "torch.amp.GradScaler reaches exactly 0 after 166 overflows in a row and stays there: training is dead without a word",
        most_cases: u32::MAX,
        rule: scale_stays_positive,
    },
    Law {
        name: "growth_is_guarded",
        statement: "no clean stretch, however long, takes the scale to infinity",
        bug: "Megatron's, Keras 3's and Paddle's scalers grow to inf, and inf * 0.5 is inf: every step is skipped from then on",
        most_cases: 64,
        rule: growth_is_guarded,
    },
    Law {
        name: "skips_exactly_on_overflow",
        statement: "a step is left out when it overflowed, and only then",
        bug: "apex.amp with a constant scale does not check, and inf and NaN reach the weights",
        most_cases: u32::MAX,
        rule: skips_exactly_on_overflow,
    },
    Law {
        name: "never_grows_early",
        statement: "the scale grows only after its interval of clean steps in a row",
        bug: "a counter that overflow does not reset: growth right after a backoff, and a sawtooth of skipped steps",
        most_cases: u32::MAX,
        rule: never_grows_early,
    },
    Law {
        name: "grows_when_clean",
        statement: "after its interval of clean steps the scale grows, below its ceiling",
        bug: "metaseq's window doubles with every growth, and a scaler whose counter is compared with == after it passed the interval never grows again",
        most_cases: u32::MAX,
        rule: grows_when_clean,
    },
    Law {
        name: "backs_off_on_overflow",
        statement: "overflows in a row lower the scale, each one or as many as the hysteresis, above the floor",
        bug: "a hysteresis that every clean step refills never lowers the scale when overflows alternate with clean steps",
        most_cases: u32::MAX,
        rule: backs_off_on_overflow,
    },
    Law {
        name: "moves_the_right_way",
        statement: "an overflow never raises the scale, except to its floor, and a clean step never lowers it",
        bug: "a start below the floor jumps UP at the first overflow in tf-keras, jmp and DeepSpeed",
        most_cases: u32::MAX,
        rule: moves_the_right_way,
    },
    Law {
        name: "recovers_after_burst",
        statement: "after a burst of overflows, clean steps bring the scale back to where it was",
        bug: "OpenSeq2Seq's LogMax averages 65536 into log2 values on one inf and stays at its minimum for 600 steps and more",
        most_cases: u32::MAX,
        rule: recovers_after_burst,
    },
    Law {
        name: "no_livelock_at_floor",
        statement: "from the lowest scale that overflows can bring about, clean steps still bring growth",
        bug: "torch's scale of 0 doubles to 0; with a backoff of 0.7 it sticks at 2^-149",
        most_cases: 12,
        rule: no_livelock_at_floor,
    },
    Law {
        name: "no_livelock_at_ceiling",
        statement: "from the highest scale that clean steps can bring about, overflows still bring backoff",
        bug: "an infinite scale (Megatron, Keras 3, Paddle) overflows at every step and never comes back",
        most_cases: 8,
        rule: no_livelock_at_ceiling,
    },
    Law {
        name: "save_load_continues",
        statement: "saving and loading anywhere changes nothing that follows",
        bug: "fairseq saves the scale alone and ColossalAI leaves out both counters: a resume restarts the window",
        most_cases: u32::MAX,
        rule: save_load_continues,
    },
    Law {
        name: "replicas_agree",
        statement: "two replicas that see the same merged flags keep the same scale",
        bug: "ranks that start from different scales divide the same gradients by different numbers (pytorch issue 136009)",
        most_cases: u32::MAX,
        rule: replicas_agree,
    },
    Law {
        name: "replicas_out_of_step_show",
        statement: "two replicas of which one missed an overflow part within two intervals, so that comparing scales finds it",
        bug: "found_inf that is not all-reduced: one rank skips, the other steps, and the weights drift apart",
        most_cases: u32::MAX,
        rule: replicas_out_of_step_show,
    },
    Law {
        name: "deterministic",
        statement: "the same history gives the same scales, whenever it runs",
        bug: "OpenSeq2Seq's graph increments its counter in a race with the branch that reads it",
        most_cases: u32::MAX,
        rule: deterministic,
    },
];

fn broken(
    flags: &[bool],
    at: Option<usize>,
    expected: impl Into<String>,
    seen: impl Into<String>,
) -> Result<Option<Counterexample>, Failure> {
    Ok(Some(Counterexample {
        found_inf: flags.to_vec(),
        at,
        expected: expected.into(),
        seen: seen.into(),
    }))
}

/// Runs a history from the start and shows each step to `look`: index, flag, scale before, scale after, skipped. It
/// stops at a terminal state or where `look` returns something.
fn walk<T>(
    subject: &mut dyn Subject,
    flags: &[bool],
    mut look: impl FnMut(usize, bool, f64, f64, bool) -> Option<T>,
) -> Result<Option<T>, Failure> {
    let mut before = subject.reset()?;
    for (i, &flag) in flags.iter().enumerate() {
        match ask(subject, flags, i)? {
            Step::Terminal(_) => return Ok(None),
            Step::Done { scale, skipped } => {
                if let Some(found) = look(i, flag, before, scale, skipped) {
                    return Ok(Some(found));
                }
                before = scale;
            }
        }
    }
    Ok(None)
}

/// One step of a history; a failure carries the history up to it.
fn ask(subject: &mut dyn Subject, flags: &[bool], i: usize) -> Result<Step, Failure> {
    subject.step(flags[i]).map_err(|f| Failure {
        found_inf: flags[..=i].to_vec(),
        ..f
    })
}

/// The trajectory laws: a walk in which a step may be wrong.
fn each_step(
    bench: &mut Bench<'_, '_>,
    flags: &[bool],
    mut wrong: impl FnMut(bool, f64, f64, bool) -> Option<(String, String)>,
) -> Result<Option<Counterexample>, Failure> {
    let found = walk(
        bench.subject.as_mut(),
        flags,
        |i, flag, before, after, skipped| {
            wrong(flag, before, after, skipped).map(|words| (i, words))
        },
    )?;
    Ok(found.map(|(i, (expected, seen))| Counterexample {
        found_inf: flags[..=i].to_vec(),
        at: None,
        expected,
        seen,
    }))
}

fn scale_stays_positive(
    bench: &mut Bench<'_, '_>,
    case: &Case,
) -> Result<Option<Counterexample>, Failure> {
    each_step(bench, &case.found_inf, |_, _, after, _| {
        (after.is_nan() || after <= 0.0)
            .then(|| ("a scale above 0".to_owned(), format!("scale {after:?}")))
    })
}

fn growth_is_guarded(
    bench: &mut Bench<'_, '_>,
    case: &Case,
) -> Result<Option<Counterexample>, Failure> {
    let to_infinity = |_, before: f64, after: f64, _| {
        (after.is_infinite()).then(|| {
            (
                "a finite scale".to_owned(),
                format!("scale {before:?}, then {after:?}"),
            )
        })
    };
    if let Some(found) = each_step(bench, &case.found_inf, to_infinity)? {
        return Ok(Some(found));
    }
    // The long way up, once: from the shortest of the histories.
    if case.at != case.found_inf.len() {
        return Ok(None);
    }
    let (patience, drive) = (bench.facts.patience(), bench.drive);
    let Some(mut run) = Run::after(bench.subject.as_mut(), &case.found_inf)? else {
        return Ok(None);
    };
    let (steps, top) = drive_up(run.subject, run.scale, patience, drive)?;
    if !top.is_infinite() {
        return Ok(None);
    }
    run.flags.resize(run.flags.len() + steps, false);
    broken(&run.flags, None, "a finite scale", format!("scale {top:?}"))
}

fn skips_exactly_on_overflow(
    bench: &mut Bench<'_, '_>,
    case: &Case,
) -> Result<Option<Counterexample>, Failure> {
    each_step(bench, &case.found_inf, |flag, _, _, skipped| {
        let expected = if flag {
            "the overflowing step skipped"
        } else {
            "the clean step taken"
        };
        (flag != skipped).then(|| (expected.to_owned(), format!("skipped {skipped}")))
    })
}

fn never_grows_early(
    bench: &mut Bench<'_, '_>,
    case: &Case,
) -> Result<Option<Counterexample>, Failure> {
    // Without a growth to learn from there is nothing to be early for.
    let Some(earliest) = bench.facts.earliest_growth else {
        return Ok(None);
    };
    let mut run = 0;
    each_step(bench, &case.found_inf, |flag, before, after, _| {
        run = if flag { 0 } else { run + 1 };
        let grew = !flag && after > before;
        let wrong = (grew && run < earliest).then(|| {
            (
                format!("growth after {earliest} clean steps in a row"),
                format!("growth from {before:?} to {after:?} after {run}"),
            )
        });
        if grew {
            run = 0;
        }
        wrong
    })
}

fn grows_when_clean(
    bench: &mut Bench<'_, '_>,
    case: &Case,
) -> Result<Option<Counterexample>, Failure> {
    let Some(latest) = bench.facts.latest_growth else {
        return Ok(None);
    };
    let (ratio, ceiling) = (bench.facts.growth_ratio, bench.facts.ceiling);
    let mut run = 0;
    each_step(bench, &case.found_inf, |flag, before, after, _| {
        run = if flag { 0 } else { run + 1 };
        if flag || run < latest {
            if after > before {
                run = 0;
            }
            return None;
        }
        let due = before > 0.0 && before * ratio <= ceiling && before.is_finite();
        run = 0;
        (due && after <= before).then(|| {
            (
                format!("growth after {latest} clean steps in a row"),
                format!("scale {before:?}, then {after:?}"),
            )
        })
    })
}

fn backs_off_on_overflow(
    bench: &mut Bench<'_, '_>,
    case: &Case,
) -> Result<Option<Counterexample>, Failure> {
    let (patience, floor) = (bench.facts.overflows(), bench.facts.floor);
    let mut since_fall = 0;
    each_step(bench, &case.found_inf, |flag, before, after, _| {
        since_fall = if flag && after >= before {
            since_fall + 1
        } else {
            0
        };
        // A NaN or infinite scale is another law's.
        let above_floor = before > floor && before.is_finite();
        let wrong = (since_fall >= patience && above_floor).then(|| {
            let expected = if patience == 1 {
                "a lower scale after the overflow".to_owned()
            } else {
                format!("a lower scale after {patience} overflows in a row")
            };
            (expected, format!("scale {before:?}, then {after:?}"))
        });
        if !above_floor {
            since_fall = 0;
        }
        wrong
    })
}

fn moves_the_right_way(
    bench: &mut Bench<'_, '_>,
    case: &Case,
) -> Result<Option<Counterexample>, Failure> {
    let floor = bench.facts.floor;
    each_step(bench, &case.found_inf, |flag, before, after, _| {
        let expected = match flag {
            true if after > before && after > floor => "a scale that an overflow does not raise",
            false if after < before => "a scale that a clean step does not lower",
            _ => return None,
        };
        Some((
            expected.to_owned(),
            format!("scale {before:?}, then {after:?}"),
        ))
    })
}

/// A run that a law steers as it goes: the flags so far and the scale.
struct Run<'s, 'a> {
    subject: &'s mut (dyn Subject + 'a),
    flags: Vec<bool>,
    scale: f64,
}

impl<'s, 'a> Run<'s, 'a> {
    /// Plays `flags` from the start; `None` where that ends in a terminal state.
    fn after(subject: &'s mut (dyn Subject + 'a), flags: &[bool]) -> Result<Option<Self>, Failure> {
        let scale = subject.reset()?;
        let mut run = Run {
            subject,
            flags: Vec::with_capacity(flags.len()),
            scale,
        };
        for &flag in flags {
            if !run.step(flag)? {
                return Ok(None);
            }
        }
        Ok(Some(run))
    }

    /// One more step; false in a terminal state.
    fn step(&mut self, flag: bool) -> Result<bool, Failure> {
        self.flags.push(flag);
        let last = self.flags.len() - 1;
        match ask(self.subject, &self.flags, last)? {
            Step::Done { scale, .. } => self.scale = scale,
            Step::Terminal(_) => return Ok(false),
        }
        Ok(true)
    }
}

fn recovers_after_burst(
    bench: &mut Bench<'_, '_>,
    case: &Case,
) -> Result<Option<Counterexample>, Failure> {
    let Some(patience) = bench.facts.growth_within else {
        return Ok(None);
    };
    let patience = usize::try_from(patience).unwrap_or(usize::MAX);
    // A scaler that was never seen to grow has no ceiling to excuse it.
    let grows = bench.facts.latest_growth.is_some();
    let (ratio, ceiling) = (
        bench.facts.growth_ratio,
        if grows {
            bench.facts.ceiling
        } else {
            f64::INFINITY
        },
    );
    let Some(mut run) = Run::after(bench.subject.as_mut(), &case.found_inf[..case.at])? else {
        return Ok(None);
    };
    let (before, burst) = (run.scale, 1 + (case.found_inf.len() - case.at) % 8);
    for _ in 0..burst {
        if !run.step(true)? {
            return Ok(None);
        }
    }
    let low = run.scale;
    if !(low < before && low > 0.0 && before.is_finite() && before <= ceiling) {
        return Ok(None);
    }
    // One growth more than the ratio asks for: a growth may have been a step away when the burst came.
    let growths = ((before / low).ln() / ratio.ln())
        .ceil()
        .clamp(1.0, 200_000.0) as usize
        + 1;
    let limit = growths.saturating_mul(patience).min(200_000);
    for _ in 0..limit {
        // The last growth may be refused where it would pass the ceiling.
        if !run.step(false)? || run.scale >= before || run.scale * ratio > ceiling {
            return Ok(None);
        }
    }
    let expected = format!("scale {before:?} again, {limit} clean steps after a burst of {burst}");
    broken(
        &run.flags,
        None,
        expected,
        format!("scale {low:?} after the burst, {:?} now", run.scale),
    )
}

fn no_livelock_at_floor(
    bench: &mut Bench<'_, '_>,
    case: &Case,
) -> Result<Option<Counterexample>, Failure> {
    // A scaler that grows nowhere is caught by other laws, or is a constant.
    if bench.facts.latest_growth.is_none() {
        return Ok(None);
    }
    let (patience, still) = (bench.facts.patience(), 2 * bench.facts.overflows() + 2);
    let Some(mut run) = Run::after(bench.subject.as_mut(), &case.found_inf[..case.at])? else {
        return Ok(None);
    };
    let mut unchanged = 0;
    for _ in 0..1300 {
        let before = run.scale;
        if !run.step(true)? {
            return Ok(None);
        }
        unchanged = if run.scale == before {
            unchanged + 1
        } else {
            0
        };
        if unchanged >= still {
            break;
        }
    }
    let (floor, limit) = (run.scale, 3 * patience + 3);
    for _ in 0..limit {
        if !run.step(false)? || run.scale > floor {
            return Ok(None);
        }
    }
    broken(
        &run.flags,
        None,
        format!("growth from the floor, {floor:?}"),
        format!("scale {:?} after {limit} clean steps", run.scale),
    )
}

fn no_livelock_at_ceiling(
    bench: &mut Bench<'_, '_>,
    case: &Case,
) -> Result<Option<Counterexample>, Failure> {
    if bench.facts.hysteresis.is_none() {
        return Ok(None);
    }
    let (patience, drive, floor) = (bench.facts.patience(), bench.drive, bench.facts.floor);
    let limit = 2 * bench.facts.overflows() + 2;
    let Some(mut run) = Run::after(bench.subject.as_mut(), &case.found_inf[..case.at])? else {
        return Ok(None);
    };
    let (steps, top) = drive_up(run.subject, run.scale, patience, drive)?;
    run.flags.resize(run.flags.len() + steps, false);
    run.scale = top;
    // Stuck at the bottom is the other livelock.
    if top.is_nan() || top <= 0.0 || top <= floor {
        return Ok(None);
    }
    for _ in 0..limit {
        if !run.step(true)? || run.scale < top {
            return Ok(None);
        }
    }
    broken(
        &run.flags,
        None,
        format!("backoff from the ceiling, {top:?}"),
        format!("scale {:?} after {limit} overflows", run.scale),
    )
}

/// Clean steps until the scale stands still or is infinite, at most `most`: how many, and the scale then.
pub(super) fn drive_up(
    subject: &mut dyn Subject,
    scale: f64,
    patience: usize,
    most: usize,
) -> Result<(usize, f64), Failure> {
    let (mut scale, mut unchanged, mut steps) = (scale, 0, 0);
    while steps < most && unchanged <= 2 * patience + 1 && !scale.is_infinite() {
        let step = subject.step(false).map_err(|f| Failure {
            found_inf: vec![false; steps + 1],
            ..f
        })?;
        let Step::Done { scale: next, .. } = step else {
            break;
        };
        steps += 1;
        unchanged = if next > scale { 0 } else { unchanged + 1 };
        scale = next;
    }
    Ok((steps, scale))
}

/// A scale and a skip as words, equal where the behaviour is.
fn words(step: &Step) -> String {
    match step {
        Step::Done { scale, skipped } => format!("scale {scale:?}, skipped {skipped}"),
        Step::Terminal(error) => format!("the error {error:?}"),
    }
}

/// Equality of behaviour: scales by value, NaN like NaN; terminal errors whatever their words.
fn same(a: &Step, b: &Step) -> bool {
    match (a, b) {
        (
            Step::Done {
                scale: a,
                skipped: x,
            },
            Step::Done {
                scale: b,
                skipped: y,
            },
        ) => same_scale(*a, *b) && x == y,
        (Step::Terminal(_), Step::Terminal(_)) => true,
        _ => false,
    }
}

fn same_scale(a: f64, b: f64) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

fn save_load_continues(
    bench: &mut Bench<'_, '_>,
    case: &Case,
) -> Result<Option<Counterexample>, Failure> {
    // Long enough that a forgotten counter shows: the growth after the history.
    let mut flags = case.found_inf.clone();
    flags.resize(
        flags.len() + 2 * bench.facts.patience().min(4000) + 1,
        false,
    );
    let subject = bench.subject.as_mut();
    let mut whole = vec![];
    let first = subject.reset()?;
    for i in 0..flags.len() {
        let step = ask(subject, &flags, i)?;
        let ended = matches!(step, Step::Terminal(_));
        whole.push(step);
        if ended {
            break;
        }
    }
    let mut scale = subject.reset()?;
    if !same_scale(scale, first) {
        return broken(
            &[],
            Some(0),
            format!("scale {first:?} after every reset"),
            format!("scale {scale:?}"),
        );
    }
    for (i, expected) in whole.iter().enumerate() {
        if i == case.at {
            let loaded = subject.save().and_then(|state| {
                subject.reset()?;
                subject.load(&state)
            });
            let loaded = match loaded {
                Ok(loaded) => loaded,
                // A refusal is an answer, and the wrong one; a dead program is not.
                Err(f) if f.refused => {
                    return broken(
                        &flags[..i],
                        Some(i),
                        "the state to be saved and loaded",
                        f.found,
                    );
                }
                Err(f) => return Err(f),
            };
            if !same_scale(loaded, scale) {
                return broken(
                    &flags[..i],
                    Some(i),
                    format!("scale {scale:?} after loading"),
                    format!("scale {loaded:?}"),
                );
            }
        }
        let seen = ask(subject, &flags, i)?;
        if !same(expected, &seen) {
            return broken(
                &flags[..=i],
                Some(case.at),
                format!("{}, as without saving", words(expected)),
                words(&seen),
            );
        }
        if let Step::Done { scale: next, .. } = seen {
            scale = next;
        }
    }
    Ok(None)
}

fn replicas_agree(
    bench: &mut Bench<'_, '_>,
    case: &Case,
) -> Result<Option<Counterexample>, Failure> {
    let (a, b) = bench.both()?;
    let (first_a, first_b) = (a.reset()?, b.reset()?);
    if !same_scale(first_a, first_b) {
        return broken(
            &[],
            None,
            "replicas with the same first scale",
            format!("{first_a:?} and {first_b:?}"),
        );
    }
    // What the all-reduce hands to both: whether either rank overflowed.
    let flags = &case.found_inf;
    for i in 0..flags.len() {
        let (x, y) = (ask(a, flags, i)?, ask(b, flags, i)?);
        if !same(&x, &y) {
            return broken(
                &flags[..=i],
                None,
                "two replicas that agree",
                format!("{} and {}", words(&x), words(&y)),
            );
        }
        if matches!(x, Step::Terminal(_)) {
            break;
        }
    }
    Ok(None)
}

fn replicas_out_of_step_show(
    bench: &mut Bench<'_, '_>,
    case: &Case,
) -> Result<Option<Counterexample>, Failure> {
    let mut flags = case.found_inf[..case.at].to_vec();
    let (patience, ceiling) = (bench.facts.patience(), bench.facts.ceiling);
    let ratio = bench.facts.growth_ratio;
    let grows = bench.facts.latest_growth.is_some();
    let (a, b) = bench.both()?;
    let mut scale = a.reset()?;
    b.reset()?;
    for i in 0..flags.len() {
        match (ask(a, &flags, i)?, ask(b, &flags, i)?) {
            (Step::Done { scale: next, .. }, Step::Done { .. }) => scale = next,
            _ => return Ok(None),
        }
    }
    // At 0, at infinity or at the ceiling two replicas may well do the same.
    if scale.is_nan() || scale <= 0.0 || (grows && scale * ratio * ratio > ceiling) {
        return Ok(None);
    }
    flags.push(true);
    let (missed, saw) = (a.step(false)?, b.step(true)?);
    let (Step::Done { scale: mut x, .. }, Step::Done { scale: mut y, .. }) = (missed, saw) else {
        return Ok(None);
    };
    let parting = flags.len();
    while same_scale(x, y) && flags.len() < parting + 2 * patience + 2 {
        flags.push(false);
        match (
            ask(a, &flags, flags.len() - 1)?,
            ask(b, &flags, flags.len() - 1)?,
        ) {
            (Step::Done { scale: p, .. }, Step::Done { scale: q, .. }) => (x, y) = (p, q),
            _ => return Ok(None),
        }
    }
    if !same_scale(x, y) {
        return Ok(None);
    }
    broken(
        &flags,
        Some(parting - 1),
        "replicas that part after one of them missed an overflow",
        format!("the same scale {x:?} {} steps later", flags.len() - parting),
    )
}

fn deterministic(
    bench: &mut Bench<'_, '_>,
    case: &Case,
) -> Result<Option<Counterexample>, Failure> {
    let flags = &case.found_inf;
    let subject = bench.subject.as_mut();
    let mut runs: [Vec<Step>; 2] = [Vec::new(), Vec::new()];
    for run in &mut runs {
        subject.reset()?;
        for i in 0..flags.len() {
            let step = ask(subject, flags, i)?;
            let ended = matches!(step, Step::Terminal(_));
            run.push(step);
            if ended {
                break;
            }
        }
    }
    let [first, second] = &runs;
    match first.iter().zip(second).position(|(x, y)| !same(x, y)) {
        None => Ok(None),
        Some(i) => broken(
            &flags[..=i],
            None,
            format!("{}, as in the first run", words(&first[i])),
            words(&second[i]),
        ),
    }
}

fn same_as_policy(
    bench: &mut Bench<'_, '_>,
    case: &Case,
) -> Result<Option<Counterexample>, Failure> {
    let Some(spec) = bench.reference.clone() else {
        return Ok(None);
    };
    let build = || spec.build(Defaults::Class).expect("a parsed spec builds");
    let mut reference = super::PolicySubject::new(&build);
    let mut flags = case.found_inf.clone();
    flags.resize(flags.len() + bench.facts.patience().min(4000) + 1, false);
    let subject = bench.subject.as_mut();
    let (mine, theirs) = (reference.reset()?, subject.reset()?);
    if !same_scale(mine, theirs) {
        return broken(
            &[],
            None,
            format!("first scale {mine:?}, as {spec}"),
            format!("scale {theirs:?}"),
        );
    }
    for i in 0..flags.len() {
        let expected = reference.step(flags[i])?;
        let seen = ask(subject, &flags, i)?;
        if !same(&expected, &seen) {
            return broken(
                &flags[..=i],
                None,
                format!("{}, as {spec}", words(&expected)),
                words(&seen),
            );
        }
        if matches!(seen, Step::Terminal(_)) {
            break;
        }
    }
    Ok(None)
}
