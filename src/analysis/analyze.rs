//! The analysis of one or several inputs, group by group.

use super::bounded::{Bounded, Shares};
use super::raw::{Errors, Plan, Raw, RawRate};
use crate::float::{Format, exact_log2, exp2};
use crate::gradients::{self, Dump, DumpFile, GradientsError};
use crate::input::{Input, InputError, NamedTrace, Progress};
use crate::kernel::{Backend, Pool, read_files, read_tensor};
use crate::tally::{
    Capture, Captured, Lost, Outcomes, Replayed, Role, Sketch, Spread, Trace, WhyNotExact,
};
use crate::warning::{Kind, Warning};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What is kept apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum By {
    /// Nothing: one group a run.
    #[default]
    All,
    /// One group a tensor name, steps merged.
    Tensor,
    /// One group a step, tensors merged.
    Step,
}

/// How to analyze.
#[derive(Debug, Clone)]
pub struct Options {
    /// The format that gradients are rounded to.
    pub format: Format,
    /// The scales, as the f32 values that are multiplied by.
    pub scales: Vec<f32>,
    /// What is kept apart.
    pub by: By,
    /// Whether rounding errors are wanted; they need raw data.
    pub errors: bool,
    /// Whether subnormal results count as zero.
    pub flush_subnormals: bool,
    /// Which code counts; all give the same integers.
    pub backend: Backend,
}

/// One group at one scale.
#[derive(Debug, Clone, PartialEq)]
pub struct Rate {
    /// The scale that was multiplied by.
    pub loss_scale: f32,
    /// Counts; a point estimate where `why_not_exact` is set.
    pub outcomes: Outcomes,
    /// Least and most of each count, where the counts are no exact answer: of the data, or before it was captured.
    pub bounds: Option<(Outcomes, Outcomes)>,
    /// What was flushed.
    pub lost: Lost,
    /// `None` where the counts are exact for the numbers given.
    pub why_not_exact: Option<WhyNotExact>,
    /// Zeros that may be underflows of the capture; 0 where the group was not captured in FP16.
    pub captured_zeros: u64,
    /// Rounding errors, where they were asked for and raw data was there.
    pub errors: Option<Errors>,
    /// Least and most of each fraction, where only histograms are known.
    pub shares: Option<Shares>,
}

/// Some elements of a run that belong together.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// Index of the input.
    pub run: usize,
    /// The tensor, where groups are by tensor.
    pub tensor: Option<String>,
    /// The step, where groups are by step and it is known.
    pub step: Option<u64>,
    /// All its elements; empty where only histograms of them are known.
    pub sketch: Sketch,
    /// What histograms say of its elements, where that is all there is.
    pub bounded: Option<Bounded>,
    /// Whether its tensors were captured in FP16.
    pub captured: Captured,
    /// One entry a scale.
    pub rates: Vec<Rate>,
}

/// What an input was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputSummary {
    /// Its path, as given.
    pub path: String,
    /// Its kind's word.
    pub kind: String,
    /// Distinct tensors.
    pub tensors: u64,
    /// Elements, all steps and ranks together.
    pub elements: u64,
}

/// The whole answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Analysis {
    /// The format.
    pub format: Format,
    /// The inputs, in order.
    pub inputs: Vec<InputSummary>,
    /// The groups, by input, then step or tensor.
    pub groups: Vec<Group>,
    /// The backend that counted, where there was anything to count: a trace holds counts already.
    pub backend: Option<Backend>,
    /// What to know.
    pub warnings: Vec<Warning>,
}

/// A group being filled.
struct Filling {
    sketch: Sketch,
    raw: Option<Raw>,
    captures: BTreeMap<String, Capture>,
}

type Key = (Option<u64>, Option<String>);

/// Analyzes inputs; each is a run of its own.
///
/// # Errors
/// When an input cannot be read, or holds no gradients (a series has only amax).
pub fn analyze(
    inputs: &[Input],
    options: &Options,
    reading: &gradients::Options,
    progress: &dyn Progress,
) -> Result<Analysis, InputError> {
    let mut analysis = Analysis {
        format: options.format,
        inputs: Vec::new(),
        groups: Vec::new(),
        backend: None,
        warnings: Vec::new(),
    };
    let pool = Pool::new(options.backend);
    let plan = needs_raw(options).then(|| Arc::new(plan(options)));
    for input in inputs {
        let mut groups: BTreeMap<Key, Filling> = BTreeMap::new();
        match input {
            Input::Dump(dumps) => {
                analysis.backend = Some(options.backend);
                for dump in dumps {
                    read_dump(
                        dump,
                        options,
                        reading,
                        (&pool, plan.as_ref()),
                        &mut groups,
                        &mut analysis.warnings,
                        progress,
                    )?;
                }
            }
            Input::Trace(trace) => {
                read_trace(
                    &trace.trace,
                    options,
                    reading,
                    &mut groups,
                    &mut analysis.warnings,
                );
                analysis.warnings.extend(trace.warnings.iter().cloned());
            }
            Input::Histograms { runs, .. } => {
                for run in runs {
                    analyze_histograms(run, options, &mut analysis);
                }
                warn_no_errors(options, input, &mut analysis.warnings);
                continue;
            }
            Input::Series { path, .. } => {
                return Err(InputError::NoGradients { path: path.clone() });
            }
        }
        // A file of several runs of histograms is several inputs of the answer.
        let run = analysis.inputs.len();
        let names: std::collections::BTreeSet<&String> = groups
            .values()
            .flat_map(|filling| filling.captures.keys())
            .collect();
        analysis.inputs.push(InputSummary {
            path: input.label(),
            kind: input.kind().to_owned(),
            tensors: names.len() as u64,
            elements: groups
                .values()
                .map(|filling| filling.sketch.elements())
                .sum(),
        });
        if groups.is_empty() && options.by == By::All {
            let nothing = Filling {
                sketch: Sketch::default(),
                raw: None,
                captures: BTreeMap::new(),
            };
            groups.insert((None, None), nothing);
        }
        warn_captured(&groups, &mut analysis.warnings);
        let finished = groups
            .into_iter()
            .map(|((step, tensor), filling)| finish(run, step, tensor, filling, options));
        analysis.groups.extend(finished);
        warn_no_errors(options, input, &mut analysis.warnings);
    }
    Ok(analysis)
}

/// Says that rounding errors were asked for in vain.
fn warn_no_errors(options: &Options, input: &Input, warnings: &mut Vec<Warning>) {
    if !options.errors || matches!(input, Input::Dump(_)) {
        return;
    }
    let held = match input {
        Input::Histograms { .. } => "histograms",
        _ => "sketches",
    };
    warnings.push(Warning::new(
        Kind::NotExact,
        format!(
            "{} holds {held}, not the gradients themselves",
            input.label()
        ),
        "rounding errors need raw data and are left out",
        "a dump of the gradients (.safetensors, .npy, .pt)",
    ));
}

/// Analyzes one run of histograms; an input of its own in the answer.
fn analyze_histograms(run: &NamedTrace, options: &Options, analysis: &mut Analysis) {
    let index = analysis.inputs.len();
    let mut groups: BTreeMap<Key, Bounded> = BTreeMap::new();
    let mut seen = vec![false; run.trace.tensors.len()];
    let mut elements = 0;
    for placed in &run.histograms {
        let tensor = &run.trace.tensors[placed.tensor];
        if tensor.role == Role::Activation {
            continue;
        }
        seen[placed.tensor] = true;
        elements += placed.histogram.elements();
        let key = match options.by {
            By::All => (None, None),
            By::Tensor => (None, Some(tensor.name.clone())),
            By::Step => (Some(run.trace.steps[placed.row].step), None),
        };
        groups
            .entry(key)
            .or_insert_with(|| Bounded::new(&options.scales))
            .add(&placed.histogram, options.format, options.flush_subnormals);
    }
    analysis.inputs.push(InputSummary {
        path: run.label.clone(),
        kind: run.kind.to_owned(),
        tensors: seen.iter().filter(|seen| **seen).count() as u64,
        elements,
    });
    analysis
        .groups
        .extend(groups.into_iter().map(|((step, tensor), bounded)| Group {
            run: index,
            tensor,
            step,
            sketch: Sketch::default(),
            captured: Captured::over(std::iter::empty()),
            rates: bounded.spreads.iter().map(bounded_rate).collect(),
            bounded: Some(bounded),
        }));
    analysis.warnings.extend(run.warnings.iter().cloned());
}

fn bounded_rate(spread: &Spread) -> Rate {
    Rate {
        loss_scale: spread.loss_scale,
        outcomes: spread.point,
        bounds: Some((spread.low, spread.high)),
        lost: spread.point_lost(),
        why_not_exact: Some(WhyNotExact::Histogram),
        captured_zeros: 0,
        errors: None,
        shares: Some(Shares::of(spread)),
    }
}

/// Fills groups with the unscaled sketches of a trace's sampled steps.
fn read_trace(
    trace: &Trace,
    options: &Options,
    reading: &gradients::Options,
    groups: &mut BTreeMap<Key, Filling>,
    warnings: &mut Vec<Warning>,
) {
    let mut inexact = 0u64;
    for sample in &trace.samples {
        let step = trace.steps[sample.row].step;
        for (n, tensor) in trace.tensors.iter().enumerate() {
            if tensor.role == Role::Activation || !reading.selects(&tensor.name) {
                continue;
            }
            match trace.unscaled_sample(sample, n) {
                Some(sketch) if sketch.elements() > 0 => {
                    fill(groups, options, Some(step), &tensor.name, &sketch, None);
                }
                Some(_) => {}
                None => inexact += 1,
            }
        }
    }
    if inexact > 0 {
        warnings.push(Warning::new(
            Kind::NotExact,
            format!("{inexact} sketches were recorded at a scale that is no power of two, and are left out"),
            "a sketch can only be unscaled exactly by a power of two",
            "a power-of-two scale, or a dump of the gradients",
        ));
    }
}

/// Whether the elements themselves are needed: for errors, and where a sketch may not be exact.
fn needs_raw(options: &Options) -> bool {
    let double_rounding = |scale: f32| options.format.min_exponent <= -126 && scale < 1.0;
    options.errors
        || options
            .scales
            .iter()
            .any(|&scale| exact_log2(scale.into()).is_none() || double_rounding(scale))
}

/// What to replay.
fn plan(options: &Options) -> Plan {
    Plan::new(
        options.format,
        &options.scales,
        options.flush_subnormals,
        options.errors,
        options.backend,
    )
}

/// What a file held.
struct FileRead {
    step: Option<u64>,
    /// Element type and reason, and a name.
    left_out: Vec<(String, String)>,
    tensors: Vec<(String, Sketch, Option<Raw>)>,
}

fn read_dump(
    dump: &Dump,
    options: &Options,
    reading: &gradients::Options,
    (pool, plan): (&Pool, Option<&Arc<Plan>>),
    groups: &mut BTreeMap<Key, Filling>,
    warnings: &mut Vec<Warning>,
    progress: &dyn Progress,
) -> Result<(), InputError> {
    let mut left_out: BTreeMap<String, (u64, String)> = BTreeMap::new();
    let files: Vec<(Option<u64>, &DumpFile)> = dump
        .steps()
        .iter()
        .flat_map(|step| step.files.iter().map(|file| (step.step, file)))
        .collect();
    progress.begin("reading", files.len() as u64);
    let read = |&(step, file): &(Option<u64>, &DumpFile)| {
        let open = file.open(reading)?;
        let left_out = open
            .skipped()
            .iter()
            .map(|skipped| {
                let what = format!("{}: {}", skipped.dtype, skipped.why);
                (what, skipped.name.clone())
            })
            .collect();
        // Tensors side by side, joined in their order: the result does not depend on the threads.
        let tensors = (0..open.tensors().len())
            .into_par_iter()
            .map(|tensor| {
                let raw = || plan.map(|plan| Raw::new(plan.clone()));
                let (sketch, raw) = read_tensor(&open, tensor, pool, &raw)?;
                Ok((open.tensors()[tensor].name.clone(), sketch, raw))
            })
            .collect::<Result<_, GradientsError>>()?;
        Ok(FileRead {
            step: step.or(open.step()),
            left_out,
            tensors,
        })
    };
    read_files(&files, read, |file: FileRead| {
        for (what, name) in file.left_out {
            let entry = left_out.entry(what).or_default();
            entry.0 += 1;
            entry.1 = name;
        }
        for (name, sketch, raw) in file.tensors {
            fill(groups, options, file.step, &name, &sketch, raw);
        }
        progress.advance(1);
        Ok::<(), InputError>(())
    })?;
    progress.end();
    for (what, (count, name)) in left_out {
        warnings.push(Warning::new(
            Kind::TensorsLeftOut,
            format!(
                "{count} tensors left out in {}, such as {name:?} ({what})",
                dump.path().display()
            ),
            "they are no gradients, and count nowhere",
            "nothing, if that is so",
        ));
    }
    for path in dump.left_out().iter().chain(dump.missing_shards()) {
        warnings.push(Warning::new(
            Kind::PassedOver,
            format!("{} was not read", path.display()),
            "part of the run may be missing",
            "--step-pattern, or name the file itself",
        ));
    }
    Ok(())
}

fn fill(
    groups: &mut BTreeMap<Key, Filling>,
    options: &Options,
    step: Option<u64>,
    name: &str,
    sketch: &Sketch,
    raw: Option<Raw>,
) {
    let key = match options.by {
        By::All => (None, None),
        By::Tensor => (None, Some(name.to_owned())),
        By::Step => (step, None),
    };
    let capture = Capture::of(sketch);
    let filling = groups.entry(key).or_insert_with(|| Filling {
        sketch: Sketch::default(),
        raw: None,
        captures: BTreeMap::new(),
    });
    filling.sketch.merge(sketch);
    match (&mut filling.raw, raw) {
        (Some(all), Some(raw)) => all.merge(&raw),
        (Some(_), None) => {}
        (none, raw) => *none = raw,
    }
    match filling.captures.get_mut(name) {
        Some(seen) => *seen = seen.and(capture),
        None => {
            filling.captures.insert(name.to_owned(), capture);
        }
    }
}

fn warn_captured(groups: &BTreeMap<Key, Filling>, warnings: &mut Vec<Warning>) {
    let mut tensors: BTreeMap<&str, Capture> = BTreeMap::new();
    for filling in groups.values() {
        for (name, &capture) in &filling.captures {
            tensors
                .entry(name)
                .and_modify(|seen| *seen = seen.and(capture))
                .or_insert(capture);
        }
    }
    let total = tensors.len();
    let all = Captured::over(tensors.into_values());
    let Some(lowest_bit) = all.lowest_bit.filter(|_| all.believed()) else {
        return;
    };
    warnings.push(Warning::new(
        Kind::CapturedInFp16,
        format!(
            "{} of {total} tensors look captured in FP16, at a scale of at least {}",
            all.fp16_tensors,
            exp2(-24 - lowest_bit)
        ),
        "some of their zeros are underflows that happened before the capture, and scales are relative to the dump's own",
        "--dump-scale S if the values still carry the loss scale; an FP32 run or a probe to see what was flushed",
    ));
}

fn finish(
    run: usize,
    step: Option<u64>,
    tensor: Option<String>,
    filling: Filling,
    options: &Options,
) -> Group {
    let Filling {
        sketch,
        raw,
        captures,
    } = filling;
    let captured = Captured::over(captures.into_values());
    let raw: Vec<Option<RawRate>> = match raw {
        Some(mut raw) => raw.rates().into_iter().map(Some).collect(),
        None => vec![None; options.scales.len()],
    };
    let rates = options
        .scales
        .iter()
        .zip(raw)
        .map(|(&scale, raw)| {
            let replayed = sketch.replay(options.format, scale, options.flush_subnormals);
            rate(&sketch, &captured, replayed, raw)
        })
        .collect();
    Group {
        run,
        tensor,
        step,
        sketch,
        bounded: None,
        captured,
        rates,
    }
}

fn rate(sketch: &Sketch, captured: &Captured, replayed: Replayed, raw: Option<RawRate>) -> Rate {
    let Replayed {
        loss_scale,
        mut outcomes,
        bounds,
        mut lost,
        mut why_not_exact,
    } = replayed;
    let mut bounds = why_not_exact.map(|_| bounds);
    let errors = raw.and_then(|raw| raw.errors);
    if let Some(raw) = raw
        && why_not_exact.is_some()
    {
        outcomes = Outcomes {
            zero_in: outcomes.zero_in,
            nonfinite_in: outcomes.nonfinite_in,
            ..raw.outcomes
        };
        lost = raw.lost;
        why_not_exact = None;
        bounds = None;
    }
    let mut captured_zeros = 0;
    if let Some(scale) = captured.scale_at_least() {
        captured_zeros = sketch.zeros();
        // Some zeros are underflows of the capture. Below its scale the tie itself may have been on either side.
        let (mut low, mut high) = bounds.unwrap_or((outcomes, outcomes));
        if f64::from(loss_scale) < scale {
            low.underflow_to_zero -= sketch.at_the_tie(loss_scale).min(low.underflow_to_zero);
        }
        high.underflow_to_zero += sketch.zeros();
        bounds = Some((low, high));
    }
    Rate {
        loss_scale,
        outcomes,
        bounds,
        lost,
        why_not_exact,
        captured_zeros,
        errors,
        shares: None,
    }
}

impl Sketch {
    /// Elements that a power-of-two scale puts exactly on FP16's underflow tie, 2^-25.
    fn at_the_tie(&self, loss_scale: f32) -> u64 {
        let Some(log2) = exact_log2(loss_scale.into()) else {
            return 0;
        };
        let at = |bin: &&crate::tally::Bin| bin.sub_bin() == 0 && bin.exponent() == -25 - log2;
        self.bins().iter().find(at).map_or(0, |bin| bin.count)
    }
}
