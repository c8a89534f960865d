//! Which growth interval, why, and what to paste.
//!
//! Every interval from 1 to max(T, default) is replayed. All whose lost update lies within a tolerance of the least are
//! *as good*, and the one nearest to the policy's default (in log2) is recommended: nobody should change a setting for
//! nothing. Taking the least alone would always answer "the whole run", where FP16 has room to spare. Where only amax is
//! known, the flushed part is unknown, and an interval is as good when its skips keep a budget.

use super::confidence::{self, Backtest, Bootstrap};
use super::horizon::{Horizon, horizon};
use super::phases::{Phase, in_common, phases};
use super::policy::{Defaults, PolicyError, PolicySpec};
use super::run::{Limits, Run};
use super::settings::{Framework, pytorch_static};
use super::simulate::{Cost, Timeline, cost};
use super::sweep::{Candidate, Choice, Density, Rule, choose, headroom_log2, static_scales};
use super::underflow::Measure;
use crate::float::exp2;
use crate::warning::{Kind, Warning};
use std::collections::BTreeMap;

/// Fewer recorded steps than this carry no recommendation.
pub const FEWEST_STEPS: u64 = 100;

/// What to recommend for, and how to judge.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// The policy.
    pub policy: PolicySpec,
    /// How the flushed part is weighed.
    pub measure: Measure,
    /// An interval within this of the least lost update is as good; of an update, 0.0005 is one in 2000.
    pub tolerance: f64,
    /// Skips that an interval may cost where only amax is known; of the steps.
    pub skip_budget: f64,
    /// A start to replay from instead of the policy's own.
    pub init_scale: Option<f64>,
    /// Seed of the bootstrap.
    pub seed: u64,
    /// Also say what so many steps would cost, from resampled blocks.
    pub horizon: Option<u64>,
}

impl Options {
    /// The defaults: PyTorch's policy, elements, 0.0005, 0.001.
    ///
    /// # Errors
    /// Never for the built-in policy.
    pub fn new() -> Result<Options, PolicyError> {
        Ok(Options {
            policy: PolicySpec::named("pytorch")?,
            measure: Measure::Elements,
            tolerance: 0.0005,
            skip_budget: 0.001,
            init_scale: None,
            seed: 0,
            horizon: None,
        })
    }
}

/// What a recommendation rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// Skips and flushed elements.
    LostUpdate,
    /// Skips alone.
    SkipBudget,
}

impl Basis {
    /// The word in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Basis::LostUpdate => "lost_update",
            Basis::SkipBudget => "skip_budget",
        }
    }
}

/// The first word of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The default costs nothing that another interval would save.
    KeepDefault,
    /// Another interval is better.
    Change,
    /// The record does not carry an answer.
    CannotTell,
    /// Gradients are inf or NaN at any scale.
    NotAScaleProblem,
}

impl Answer {
    /// The word in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Answer::KeepDefault => "keep_default",
            Answer::Change => "change",
            Answer::CannotTell => "cannot_tell",
            Answer::NotAScaleProblem => "not_a_scale_problem",
        }
    }
}

/// One framework's own answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// Which.
    pub framework: Framework,
    /// Its recommended interval.
    pub growth_interval: u64,
    /// Its recommended start.
    pub init_scale: f64,
    /// The two replayed together.
    pub cost: Cost,
    /// The lines to paste.
    pub text: String,
}

/// The answer for one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Recommendation {
    /// The policy's JSON name.
    pub policy: String,
    /// What it rests on.
    pub basis: Basis,
    /// How J weighs what is flushed.
    pub measure: Measure,
    /// The first word.
    pub verdict: Answer,
    /// Why, in a sentence or two: what is lost, then what about the run makes it so.
    pub why: String,
    /// The second half of `why` alone.
    pub because: String,
    /// The recommended interval; `None` where there is none to recommend.
    pub growth_interval: Option<u64>,
    /// The policy's default interval.
    pub default_interval: u64,
    /// The as-good stretch around it.
    pub interval: Option<(u64, Option<u64>)>,
    /// Whether the default is as good.
    pub default_is_fine: bool,
    /// The recommended start, a power of two.
    pub init_scale: f64,
    /// Steps of the run.
    pub steps: u64,
    /// The recommended interval replayed.
    pub recommended: Option<Candidate>,
    /// The default replayed.
    pub default: Candidate,
    /// The best power-of-two static scale and its cost.
    pub best_static: Option<(f64, Cost)>,
    /// Its margin to the first overflow, in binades.
    pub best_static_headroom_log2: Option<f64>,
    /// Phases of the run, where it has several.
    pub phases: Vec<Phase>,
    /// What a longer run would cost, where it was asked and can be told.
    pub horizon: Option<Horizon>,
    /// The whole sweep.
    pub choice: Choice,
    /// How sure the sweep is; `None` where the record leaves steps undecided.
    pub bootstrap: Option<Bootstrap>,
    /// Chosen on the first half, scored on the second; `None` for a run too short to halve.
    pub backtest: Option<Backtest>,
    /// What a planted burst costs, for the recommended and the default interval.
    pub stress: Option<(f64, f64)>,
    /// What to paste.
    pub settings: Vec<Setting>,
    /// A static scale for PyTorch.
    pub pytorch_static: Option<String>,
    /// What to know.
    pub warnings: Vec<Warning>,
}

impl Recommendation {
    /// The verdict and the recommended interval in a line.
    pub fn headline(&self) -> String {
        let default = self.default_interval;
        match (self.verdict, self.growth_interval) {
            (Answer::KeepDefault, _) => format!("Keep growth_interval {default}."),
            (Answer::Change, Some(n)) if n == default => {
                format!(
                    "No growth_interval keeps the skips within the budget; {n} skips the fewest."
                )
            }
            (Answer::Change, Some(n)) => format!("Change growth_interval {default} → {n}."),
            (Answer::NotAScaleProblem, _) => {
                "Not a scale problem: gradients are inf or NaN at any scale.".to_owned()
            }
            _ => "Cannot tell from this record.".to_owned(),
        }
    }

    /// What is as good, in a sentence.
    pub fn as_good(&self) -> Option<String> {
        let (low, high) = self.interval?;
        Some(match high {
            Some(high) if high == low => format!("Only {low} is as good."),
            Some(high) => format!("Anything from {low} to {high} is as good."),
            None if low == 1 => "Any interval is as good.".to_owned(),
            None => format!("Anything from {low} up is as good; no upper limit was seen."),
        })
    }
}

/// Too little was recorded for a recommendation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "recommending a growth interval: found {recorded} recorded steps, expected at least {FEWEST_STEPS}; record a longer run"
)]
pub struct TooShort {
    /// Steps that were recorded.
    pub recorded: u64,
}

/// Why there is no recommendation.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RecommendError {
    /// Too few steps.
    #[error(transparent)]
    TooShort(#[from] TooShort),
    /// The policy cannot be swept.
    #[error(transparent)]
    Policy(#[from] PolicyError),
}

/// Recommends a growth interval for a run.
///
/// # Errors
/// When fewer than [`FEWEST_STEPS`] steps were recorded, or the policy has no growth interval.
pub fn recommend(run: &Run, options: &Options) -> Result<Recommendation, RecommendError> {
    if run.recorded < FEWEST_STEPS {
        return Err(TooShort {
            recorded: run.recorded,
        }
        .into());
    }
    let timeline = Timeline::new(run);
    let spec = match options.init_scale {
        Some(scale) => options.policy.with("init_scale", scale)?,
        None => options.policy.clone(),
    };
    let (basis, rule) = match run.underflow {
        Some(_) => (
            Basis::LostUpdate,
            Rule::LostUpdate {
                measure: options.measure,
                tolerance: options.tolerance,
            },
        ),
        None => (
            Basis::SkipBudget,
            Rule::SkipBudget {
                budget: options.skip_budget,
            },
        ),
    };
    let mut choice = choose(&timeline, &spec, rule, Density::Every)?;
    let bootstrap = confidence::resample(&mut choice, &timeline, &spec, rule, options.seed)?;
    let default_interval = spec.growth_interval(Defaults::Framework).unwrap_or(2000);
    let growth_interval = interval_of(&choice, default_interval);
    let init_scale = start(&timeline, &spec, growth_interval, rule, options)?;
    let statics = static_scales(&timeline)?;
    let best_static = best_static(run, &statics, rule);
    let best_static_headroom_log2 = best_static
        .as_ref()
        .and_then(|(scale, _)| headroom_log2(run, *scale));
    let mut warnings = run.warnings.clone();

    let always = run.always_overflowing();
    let sick = always >= 3 && always as f64 >= 0.01 * run.len() as f64;
    let undecided_default = choice.default().skipped_bounds.0 != choice.default().skipped_bounds.1;
    let verdict = if sick {
        Answer::NotAScaleProblem
    } else if !choice.any_fits && undecided_default {
        Answer::CannotTell
    } else if choice.default_is_fine {
        Answer::KeepDefault
    } else {
        Answer::Change
    };
    if always > 0 {
        let first = match &run.first_nonfinite {
            Some((tensor, step)) => format!("; the first is tensor {tensor:?} in step {step}"),
            None => String::new(),
        };
        warnings.push(Warning::new(
            Kind::NotAScaleProblem,
            format!("{always} of {} steps hold inf or NaN at any scale{first}", run.len()),
            "an inf or NaN of the forward pass or of the data, which no loss scale cures",
            "find the first operation that gives one (torch.autograd.set_detect_anomaly), a smaller learning rate, clean data",
        ));
    }
    if run.len() < default_interval {
        warnings.push(Warning::new(
            Kind::ShortRun,
            format!(
                "the run has {} steps, fewer than the default interval of {default_interval}",
                run.len()
            ),
            "the default never grows within it, so nothing here says what its growth would cost",
            "record a run of several intervals",
        ));
    }
    if basis == Basis::SkipBudget && !choice.any_fits {
        warnings.push(Warning::new(
            Kind::BudgetNotMet,
            format!(
                "no interval keeps skips within {} of the steps",
                options.skip_budget
            ),
            "the interval with the fewest skips is given",
            "--skip-budget, a lower init_scale, gradient clipping",
        ));
    }
    if undecided_default {
        warnings.push(Warning::new(
            Kind::Censored,
            format!(
                "at the default interval between {} and {} steps are skipped, depending on what the record does not show",
                choice.default().skipped_bounds.0,
                choice.default().skipped_bounds.1
            ),
            "the record holds only scales and overflows of some steps",
            "record amax at every step",
        ));
    }
    if let Some(underflow) = &run.underflow
        && !run.without_signal.is_empty()
    {
        let without =
            underflow.without_noise(best_static.as_ref().map_or(65536.0, |(scale, _)| *scale));
        warnings.push(Warning::new(
            Kind::NoSignal,
            format!(
                "{} tensors carry no signal (amax below 2^-20 of the median tensor's): {}",
                run.without_signal.len(),
                first_few(&run.without_signal)
            ),
            match without {
                Some(share) => format!(
                    "their true gradient is zero, and what they lose is noise; without them {} of the elements underflow at the best static scale",
                    percent(options.measure.of(share))
                ),
                None => "their true gradient is zero, and what they lose is noise".to_owned(),
            },
            "--exclude to leave them out",
        ));
    }
    let phases = phases(run, &timeline, &spec, options.measure, options.tolerance)?;
    if !phases.is_empty() && in_common(&phases).is_empty() {
        let each: Vec<String> = phases
            .iter()
            .map(|phase| format!("{} in steps {}..{}", phase.best, phase.from, phase.to))
            .collect();
        warnings.push(Warning::new(
            Kind::Phases,
            "no one growth interval suits all phases of the run",
            format!("best would be {}", each.join(", ")),
            "changing the interval when the phase ends (GradScaler.set_growth_interval), or a better start",
        ));
    }
    let horizon = match options.horizon {
        None => None,
        Some(steps) => {
            let mut intervals = vec![growth_interval, default_interval];
            intervals.dedup();
            let far = horizon(run, &spec, &intervals, options.measure, steps, options.seed)?;
            warnings.push(match &far {
                Some(_) => Warning::new(
                    Kind::Extrapolated,
                    format!("{steps} steps are strung together from blocks of {} recorded ones", run.len()),
                    "a gradient that changes beyond the record is not in it",
                    "recording a longer run",
                ),
                None => Warning::new(
                    Kind::Extrapolated,
                    format!("{steps} steps cannot be extrapolated"),
                    "some steps' overflow is unknown at some scales, so no block can be replayed elsewhere",
                    "recording amax at every step",
                ),
            });
            far
        }
    };
    let (settings, pasted_warnings) = settings(
        &timeline,
        rule,
        options,
        default_interval,
        growth_interval,
        init_scale,
    )?;
    warnings.extend(pasted_warnings);
    let (why, because) = why(
        run,
        &choice,
        verdict,
        basis,
        options,
        best_static.as_ref(),
        default_interval,
        growth_interval,
    );
    let recommended = choice.recommended().clone();
    let sickly = verdict == Answer::NotAScaleProblem || verdict == Answer::CannotTell;
    Ok(Recommendation {
        policy: spec.info().json_name().to_owned(),
        basis,
        measure: options.measure,
        verdict,
        why,
        because,
        growth_interval: (!sickly).then_some(growth_interval),
        default_interval,
        interval: (!sickly).then_some((choice.low, choice.high)),
        default_is_fine: choice.default_is_fine,
        init_scale,
        steps: run.len(),
        recommended: (!sickly).then_some(recommended),
        default: choice.default().clone(),
        pytorch_static: best_static
            .as_ref()
            .map(|(scale, _)| pytorch_static(*scale)),
        best_static,
        best_static_headroom_log2,
        phases,
        horizon,
        bootstrap,
        backtest: confidence::backtest(run, &spec, rule)?,
        stress: confidence::stress(run, &spec, rule, growth_interval, default_interval)?,
        choice,
        settings,
        warnings,
    })
}

/// The interval that is as good for every run, nearest to the default, with the stretch around it; `None` where there is
/// none, or a run has no recommendation.
pub fn common_interval<'a>(
    answers: impl Iterator<Item = &'a Recommendation>,
) -> Option<(u64, u64, Option<u64>)> {
    let mut common: Option<(u64, u64, Option<u64>)> = None;
    for answer in answers {
        let (low, high) = answer.interval?;
        let default = answer.default_interval;
        let (_, seen_low, seen_high) = common.unwrap_or((default, 1, None));
        let low = low.max(seen_low);
        let high = match (high, seen_high) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        if high.is_some_and(|high| high < low) {
            return None;
        }
        common = Some((default.clamp(low, high.unwrap_or(u64::MAX)), low, high));
    }
    common
}

/// The recommended interval; the default's own number where its replay stands for it.
fn interval_of(choice: &Choice, default_interval: u64) -> u64 {
    if choice.recommended == choice.default {
        default_interval
    } else {
        choice.recommended().growth_interval
    }
}

/// The start that costs nothing, a power of two: the policy's own unless it loses steps at once or updates on the climb.
fn start(
    timeline: &Timeline<'_>,
    spec: &PolicySpec,
    growth_interval: u64,
    rule: Rule,
    options: &Options,
) -> Result<f64, PolicyError> {
    let spec = spec.with("growth_interval", growth_interval as i64)?;
    let at = |scale: f64| -> Result<Cost, PolicyError> {
        Ok(cost(
            timeline,
            spec.with("init_scale", scale)?
                .build(Defaults::Framework)?
                .as_ref(),
        ))
    };
    let own = spec.init_scale(Defaults::Framework);
    let own_cost = cost(timeline, spec.build(Defaults::Framework)?.as_ref());
    let mut best = exp2(own.log2().floor() as i32);
    let lost_at_start = |cost: &Cost| cost.skipped_at_start.saturating_sub(cost.skipped_anyway);
    if lost_at_start(&own_cost) > 0 {
        for _ in 0..60 {
            best /= 2.0;
            if lost_at_start(&at(best)?) == 0 {
                break;
            }
        }
    } else if best != own {
        // A start that is no power of two: the power below it starts as cleanly.
    }
    if let Rule::LostUpdate { measure, .. } = rule {
        let higher: Vec<(f64, f64)> = (0..24)
            .map(|binades| {
                let scale = best * exp2(binades);
                Ok((scale, at(scale)?))
            })
            .collect::<Result<Vec<_>, PolicyError>>()?
            .into_iter()
            .take_while(|(_, cost)| lost_at_start(cost) == 0)
            .map(|(scale, cost)| (scale, cost.j(measure)))
            .collect();
        let least = higher.iter().map(|(_, j)| *j).fold(f64::INFINITY, f64::min);
        if let Some((scale, _)) = higher.iter().find(|(_, j)| *j <= least + options.tolerance) {
            best = *scale;
        }
    }
    Ok(best)
}

/// The static scale with the least J, the smallest of equals; by budget, the largest that keeps it and at which some step
/// is known to be clean: of larger ones the record says nothing.
fn best_static(run: &Run, statics: &[(f64, Cost)], rule: Rule) -> Option<(f64, Cost)> {
    let best = match rule {
        Rule::LostUpdate { measure, .. } => statics
            .iter()
            .min_by(|a, b| a.1.j(measure).total_cmp(&b.1.j(measure))),
        Rule::SkipBudget { budget } => statics.iter().rev().find(|(scale, cost)| {
            let seen = |limits: &Limits| f64::from(limits.clean_below) > *scale;
            if !run.limits.iter().any(seen) {
                return false;
            }
            let skips = cost.skipped - cost.skipped_anyway.min(cost.skipped);
            crate::tally::fraction(skips, cost.steps) <= budget
        }),
    };
    best.cloned()
}

/// Each framework's own answer, from replaying its policy at its own defaults.
fn settings(
    timeline: &Timeline<'_>,
    rule: Rule,
    options: &Options,
    default_interval: u64,
    growth_interval: u64,
    init_scale: f64,
) -> Result<(Vec<Setting>, Vec<Warning>), PolicyError> {
    let mut answers: BTreeMap<&'static str, (u64, f64, Cost)> = BTreeMap::new();
    let mut borrowed = Vec::new();
    let mut settings = Vec::new();
    for framework in Framework::ALL {
        let name = framework.policy();
        if !answers.contains_key(name) {
            let own = options.policy.info().name == name;
            let spec = if own {
                options.policy.clone()
            } else {
                match PolicySpec::named(name) {
                    Ok(spec) => spec,
                    Err(_) => {
                        borrowed.push(framework.label());
                        PolicySpec::named("torch-amp")?
                    }
                }
            };
            let (interval, start) = if own {
                (growth_interval, init_scale)
            } else {
                let choice = choose(timeline, &spec, rule, Density::Fine)?;
                let default = spec
                    .growth_interval(Defaults::Framework)
                    .unwrap_or(default_interval);
                let interval = interval_of(&choice, default);
                (interval, start(timeline, &spec, interval, rule, options)?)
            };
            let pair = spec
                .with("growth_interval", interval as i64)?
                .with("init_scale", start)?;
            let cost = cost(timeline, pair.build(Defaults::Framework)?.as_ref());
            answers.insert(name, (interval, start, cost));
        }
        let (interval, start, cost) = answers[name].clone();
        settings.push(Setting {
            framework,
            growth_interval: interval,
            init_scale: start,
            cost,
            text: framework.paste(interval, start),
        });
    }
    let warnings = if borrowed.is_empty() {
        Vec::new()
    } else {
        vec![Warning::new(
            Kind::BorrowedSettings,
            format!("no policy for {}", borrowed.join(", ")),
            "their settings are PyTorch's answer in their words",
            "check them with `simulate`",
        )]
    };
    Ok((settings, warnings))
}

/// A share as a percentage of three digits; a bare 0 % would claim too much.
pub fn percent(share: f64) -> String {
    let value = 100.0 * share;
    if value == 0.0 {
        "none".to_owned()
    } else if value < 0.001 {
        "under 0.001 %".to_owned()
    } else if value < 0.1 {
        format!("{value:.3} %")
    } else if value < 10.0 {
        format!("{value:.2} %")
    } else {
        format!("{value:.1} %")
    }
}

/// "1 step", "2 steps".
fn counted(steps: u64) -> String {
    format!("{steps} step{}", if steps == 1 { "" } else { "s" })
}

/// The first names of a list, and how many more there are.
fn first_few(names: &[String]) -> String {
    let shown = names
        .iter()
        .take(3)
        .map(|n| format!("{n:?}"))
        .collect::<Vec<_>>()
        .join(", ");
    match names.len().saturating_sub(3) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Spikes per 1000 steps (amax above 4 times the median of its 101 neighbours) and drift in binades per 1000 steps.
pub fn character(run: &Run) -> Option<(f64, f64)> {
    let amax: Vec<f32> = run
        .amax
        .iter()
        .flatten()
        .copied()
        .filter(|a| *a > 0.0)
        .collect();
    if amax.len() < FEWEST_STEPS as usize {
        return None;
    }
    let median = |values: &[f32]| {
        let mut sorted = values.to_vec();
        sorted.sort_by(f32::total_cmp);
        sorted[sorted.len() / 2]
    };
    // A median for each block of 101 steps is near enough to the running one, and linear.
    let blocks: Vec<f32> = amax.chunks(101).map(median).collect();
    let spikes = amax
        .iter()
        .enumerate()
        .filter(|(i, a)| **a > 4.0 * blocks[i / 101])
        .count();
    let tenth = (amax.len() / 10).max(1);
    let (early, late) = (median(&amax[..tenth]), median(&amax[amax.len() - tenth..]));
    let drift = f64::from(late / early).log2() / (0.9 * amax.len() as f64) * 1000.0;
    Some((1000.0 * spikes as f64 / amax.len() as f64, drift))
}

#[expect(
    clippy::too_many_arguments,
    reason = "the sentence is about all of them"
)]
fn why(
    run: &Run,
    choice: &Choice,
    verdict: Answer,
    basis: Basis,
    options: &Options,
    best_static: Option<&(f64, Cost)>,
    default_interval: u64,
    growth_interval: u64,
) -> (String, String) {
    let steps = run.len();
    let measure = options.measure;
    let (default, recommended) = (&choice.default().cost, &choice.recommended().cost);
    let mut parts = Vec::new();
    match (verdict, basis) {
        (Answer::NotAScaleProblem, _) => {
            parts.push(format!("{} of {steps} steps hold inf or NaN at any scale", run.always_overflowing()));
        }
        (Answer::CannotTell, _) => {
            parts.push("what the record leaves open decides the answer".to_owned());
        }
        (Answer::KeepDefault, Basis::LostUpdate) => parts.push(format!(
            "with {default_interval} {} of the updates are lost ({} skipped, {} flushed to zero), and no interval saves more than {} of them",
            percent(default.j(measure)),
            counted(default.skipped),
            percent(default.underflow.map_or(0.0, |lost| measure.of(lost))),
            percent(options.tolerance),
        )),
        (Answer::Change, Basis::LostUpdate) => parts.push(format!(
            "with {default_interval} {} of the updates are lost ({} skipped, {} flushed to zero), with {growth_interval} {} ({} skipped, {} flushed)",
            percent(default.j(measure)),
            counted(default.skipped),
            percent(default.underflow.map_or(0.0, |lost| measure.of(lost))),
            percent(recommended.j(measure)),
            recommended.skipped,
            percent(recommended.underflow.map_or(0.0, |lost| measure.of(lost))),
        )),
        (Answer::KeepDefault, Basis::SkipBudget) => parts.push(format!(
            "with {default_interval} {} of {steps} steps are skipped after the start, within the budget of {}",
            default.skipped_by_interval(),
            percent(options.skip_budget),
        )),
        (Answer::Change, Basis::SkipBudget) => parts.push(format!(
            "with {default_interval} {} of {steps} steps are skipped after the start, with {growth_interval} {}; the budget is {}",
            default.skipped_by_interval(),
            recommended.skipped_by_interval(),
            percent(options.skip_budget),
        )),
    }
    if let Some((spikes, drift)) = character(run) {
        let direction = if drift < 0.0 { "falls" } else { "rises" };
        parts.push(format!(
            "amax has {spikes:.1} spikes per 1000 steps and {direction} by {:.2} binades per 1000",
            drift.abs()
        ));
    }
    if let (Some((scale, _)), Some(underflow)) = (best_static, &run.underflow) {
        let mean =
            |scale: f64| measure.of(underflow.sum(0, steps as usize, scale)) / steps.max(1) as f64;
        let worth = mean(scale / 2.0) - mean(*scale);
        parts.push(format!(
            "one binade of scale is worth {} of the updates",
            percent(worth.max(0.0))
        ));
    }
    let sentence = |parts: &[String]| {
        let text = parts.join("; ");
        let mut characters = text.chars();
        characters.next().map_or(String::new(), |first| {
            first.to_uppercase().chain(characters).collect::<String>() + "."
        })
    };
    (sentence(&parts), sentence(&parts[1..]))
}
