//! What the report says of a run, gathered once for the page and for `report.json`.

use super::figures::{self, Figures, Subject};

use super::{json, text};
use crate::analysis::HistogramSummary;
use crate::builtin::BuiltIn;
use crate::float::{FP16, exp2};
use crate::input::NamedTrace;
use crate::plot::{DEFAULT_SIZE, DrawError, Figure, History, Theme, svg};
use crate::scaling::diagnose::Diagnosis;
use crate::scaling::policy::{Defaults, PolicyError};
use crate::scaling::{
    Answer, FEWEST_STEPS, Options, RecommendError, Run, RunOptions, Segment, Simulated, Timeline,
    simulate,
};
use crate::tally::{Capture, Role, Sketch, Trace};
use crate::warning::{Kind, Warning};
use serde_json::{Map, Value, json};

/// Whether FP16 can hold what the run produced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fits {
    /// `yes`, `no`, `gradients only` or `unknown`.
    pub word: &'static str,
    /// Why.
    pub reason: String,
}

/// One tensor's row: what each scale does to it over all sampled steps.
#[derive(Debug, Clone)]
pub struct TensorRow {
    /// Its name.
    pub name: String,
    /// All its sampled elements, unscaled.
    pub sketch: Sketch,
    /// The largest amax over all recorded steps.
    pub amax: Option<f32>,
    /// Share of finite nonzero elements flushed at each of the report's scales.
    pub underflow: Vec<f64>,
    /// Headroom at the report's scale, in binades.
    pub headroom_log2: Option<f64>,
    /// Whether its amax lies below 2^-20 of the median tensor's.
    pub without_signal: bool,
}

/// Everything the report says of one run.
#[derive(Debug, Clone)]
pub struct RunReport {
    /// The input's name.
    pub label: String,
    /// Its kind's word.
    pub kind: &'static str,
    /// The record, ready to be replayed.
    pub run: Run,
    /// What can be drawn, and the recommendation.
    pub figures: Figures,
    /// The default and the recommended policy, replayed with bounds.
    pub simulated: Vec<(String, Simulated)>,
    /// The scales of the tensor table.
    pub scales: Vec<f64>,
    /// One row a tensor, worst first.
    pub tensors: Vec<TensorRow>,
    /// What histograms say, where that is what was logged.
    pub histograms: Option<HistogramSummary>,
    /// Whether FP16 fits.
    pub fits: Fits,
    /// The first step that the default policy skips after the start, and the tensor that overflows.
    pub first_overflow: Option<(u64, f64, Option<String>)>,
    /// What the same run did in FP16, where it is known.
    pub real: Option<Trace>,
    /// What, where and how, for a built-in run.
    pub about: Option<Map<String, Value>>,
    /// What a log comes to.
    pub diagnosis: Option<Box<Diagnosis>>,
    /// What to know.
    pub warnings: Vec<Warning>,
}

/// Why a report cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// The policy cannot be swept.
    #[error("{input}: {source}")]
    Recommend {
        /// The input.
        input: String,
        /// Why.
        source: RecommendError,
    },
    /// A policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A figure.
    #[error(transparent)]
    Draw(#[from] DrawError),
}

impl RunReport {
    /// Gathers what the report says of a trace.
    ///
    /// # Errors
    /// When the policy cannot be swept. A record too short for a recommendation is reported all the same.
    pub fn new(
        trace: NamedTrace,
        run_options: RunOptions,
        options: &Options,
    ) -> Result<RunReport, ReportError> {
        // A log is the record of what the run itself did.
        let real = (trace.kind == "log").then(|| trace.trace.clone());
        RunReport::gather(trace, real, None, run_options, options)
    }

    /// Gathers what the report says of a built-in run.
    ///
    /// # Errors
    /// As [`new`](RunReport::new).
    pub fn built_in(
        run: BuiltIn,
        run_options: RunOptions,
        options: &Options,
    ) -> Result<RunReport, ReportError> {
        RunReport::gather(
            run.trace,
            Some(run.real),
            Some(run.about),
            run_options,
            options,
        )
    }

    fn gather(
        named: NamedTrace,
        real: Option<Trace>,
        about: Option<Map<String, Value>>,
        run_options: RunOptions,
        options: &Options,
    ) -> Result<RunReport, ReportError> {
        let NamedTrace {
            label,
            kind,
            trace,
            histograms,
            mut warnings,
            diagnosis,
        } = named;
        if diagnosis.is_some() {
            // The page itself begins with it.
            warnings.retain(|warning| warning.kind != Kind::Diagnosis);
        }
        let histograms = HistogramSummary::of(&trace, &histograms, &figures::scales());
        // A record that carries its own scales is what really happened.
        let real = real.or_else(|| {
            trace
                .steps
                .iter()
                .any(|s| s.loss_scale.is_some())
                .then(|| steps_of(&trace))
        });
        let mut run = Run::new(&trace, run_options);
        run.warnings.splice(0..0, warnings);
        let subject = Subject {
            label: &label,
            trace: &trace,
            histograms: histograms.as_ref(),
            run: &run,
            real: real.as_ref(),
        };
        let figures =
            Figures::new(subject, options, &[]).map_err(|source| ReportError::Recommend {
                input: label.clone(),
                source,
            })?;
        let mut warnings = match &figures.answer {
            Some(answer) => answer.warnings.clone(),
            None => run.warnings.clone(),
        };
        if figures.answer.is_none() && !run.is_empty() {
            warnings.push(Warning::new(
                Kind::ShortRun,
                format!("{} recorded, fewer than {FEWEST_STEPS}", text::steps(run.recorded)),
                "too few for a recommendation; what is here says what each scale does to these gradients",
                "record a run of several growth intervals",
            ));
        }
        let timeline = Timeline::new(&run);
        let default = &options.policy;
        let mut simulated = vec![(
            default.canonical(),
            simulate(&timeline, default.build(Defaults::Framework)?.as_ref()),
        )];
        if let Some(answer) = &figures.answer
            && let Some(n) = answer.growth_interval
            && answer.verdict == Answer::Change
        {
            let spec = default.with("growth_interval", n as i64)?;
            simulated.push((
                spec.canonical(),
                simulate(&timeline, spec.build(Defaults::Framework)?.as_ref()),
            ));
        }
        let scale = figures.scale.0;
        let mut scales = vec![1.0, 256.0, 65536.0];
        if !scales.contains(&scale) {
            scales.push(scale);
        }
        let mut tensors = tensor_rows(&trace, &run, &scales, scale);
        if histograms.is_some() {
            // They have a table of their own, of intervals.
            tensors.clear();
        }
        let first_overflow = first_overflow(
            &timeline,
            &trace,
            default.build(Defaults::Framework)?.as_ref(),
        );
        let fits = match &histograms {
            Some(summary) => fits_of_histograms(summary),
            None => fits(&trace, &figures, options),
        };
        Ok(RunReport {
            label,
            kind,
            figures,
            simulated,
            scales,
            tensors,
            histograms,
            fits,
            first_overflow,
            real,
            about,
            diagnosis,
            warnings,
            run,
        })
    }

    /// The figures, each with the name of its file.
    ///
    /// # Errors
    /// When drawing fails.
    pub fn draw(&self) -> Result<Vec<(&'static str, Figure)>, DrawError> {
        let (size, theme) = (DEFAULT_SIZE, Theme::Screen);
        let figures = &self.figures;
        let mut drawn = Vec::new();
        if let Some(figure) = self.diagnosis.as_deref().and_then(History::of) {
            drawn.push(("history", svg(&figure, size, theme)?));
        }
        if let Some(figure) = &figures.tradeoff {
            drawn.push(("tradeoff", svg(figure, size, theme)?));
        }
        // A handful of logged steps is no run to replay policies over.
        let replayed = !self.run.is_empty() && !self.only_bounds();
        if replayed {
            drawn.push(("trajectory", svg(&figures.trajectory, size, theme)?));
        }
        if let Some(figure) = &figures.bands {
            drawn.push(("rates", svg(figure, size, theme)?));
        }
        if let Some(figure) = &figures.rates {
            drawn.push(("rates", svg(figure, size, theme)?));
        }
        if let Some(figure) = &figures.binades {
            drawn.push(("binades", svg(figure, size, theme)?));
        }
        if let Some(figure) = figures
            .headroom
            .as_ref()
            .filter(|_| self.run.recorded > 1 || self.histograms.is_none())
        {
            drawn.push(("headroom", svg(figure, size, theme)?));
        }
        if replayed {
            drawn.push(("policies", svg(&figures.policies, size, theme)?));
        }
        Ok(drawn)
    }

    /// This run's part of `report.json`.
    pub fn json(&self) -> Value {
        let answer = self.figures.answer.as_ref();
        let sketch = self.figures.sketch.as_ref();
        json!({
            "input": self.label,
            "kind": self.kind,
            "steps": self.run.len(),
            "recorded_steps": self.run.recorded,
            "verdict": answer.map_or("cannot_tell", |answer| answer.verdict.as_str()),
            "growth_interval": answer.and_then(|answer| answer.growth_interval),
            "why": self.cannot_tell(),
            "recommend": answer.map(|answer| json::recommendation(answer, &self.run)),
            "simulate": self.simulated.iter().map(|(policy, s)| json::simulated_run(0, policy, s)).collect::<Vec<_>>(),
            "fits_fp16": {"answer": self.fits.word, "reason": self.fits.reason},
            "first_overflow": self.first_overflow.as_ref().map(|(step, scale, tensor)| json!({
                "step": step, "scale": json::scale(*scale), "tensor": tensor,
            })),
            "gradients": sketch.map(|sketch| json!({
                "elements": sketch.elements(),
                "zeros": sketch.zeros(),
                "inf": sketch.inf(),
                "nan": sketch.nan(),
                "amax": sketch.amax().map(f64::from),
                "smallest_nonzero": sketch.smallest_nonzero().map(f64::from),
                "rates": (-8..=32).map(|e| {
                    let replayed = sketch.replay(FP16, exp2(e) as f32, false);
                    json!({
                        "scale": exp2(e),
                        "underflow_to_zero": replayed.outcomes.underflow_to_zero,
                        "subnormal": replayed.outcomes.subnormal,
                        "normal": replayed.outcomes.normal,
                        "overflow_to_infinity": replayed.outcomes.overflow_to_infinity,
                        "underflow_fraction": replayed.lost.elements,
                        "underflow_l1_fraction": replayed.lost.l1,
                        "underflow_l2_fraction": replayed.lost.l2,
                    })
                }).collect::<Vec<_>>(),
            })),
            "histograms": self.histograms.as_ref().map(json::histograms),
            "tensors": self.tensors.iter().map(|row| json!({
                "name": row.name,
                "elements": row.sketch.elements(),
                "zeros": row.sketch.zeros(),
                "inf": row.sketch.inf(),
                "nan": row.sketch.nan(),
                "amax": row.amax.map(f64::from),
                "headroom_log2": row.headroom_log2,
                "underflow_fraction": self.scales.iter().zip(&row.underflow).map(|(scale, share)| json!({
                    "scale": scale, "fraction": share,
                })).collect::<Vec<_>>(),
                "without_signal": row.without_signal,
            })).collect::<Vec<_>>(),
            "real_run": self.real.as_ref().map(|real| json!({
                "steps": real.steps.len(),
                "skipped": real.steps.iter().filter(|step| step.found_inf == Some(true)).count(),
                "first_scale": real.steps.first().and_then(|step| step.loss_scale),
                "last_scale": real.steps.last().and_then(|step| step.loss_scale),
            })),
            "diagnosis": self.diagnosis.as_deref().map(super::diagnosis::log),
            "about": self.about,
            "warnings": json::warnings(&self.warnings),
        })
    }

    /// The first words: what the log comes to, or which interval to set.
    pub fn headline(&self) -> String {
        match (&self.diagnosis, &self.figures.answer) {
            (Some(diagnosis), _) => diagnosis.headline(),
            (None, Some(answer)) => answer.headline(),
            (None, None) => self.cannot_tell().unwrap_or_default(),
        }
    }

    /// Whether all there is are bounds of a few steps: histograms, too few for a recommendation.
    pub fn only_bounds(&self) -> bool {
        self.histograms.is_some() && self.figures.answer.is_none()
    }

    /// Why there is no recommendation, and what to record; `None` where there is one.
    pub fn cannot_tell(&self) -> Option<String> {
        if self.figures.answer.is_some() {
            return None;
        }
        let Some(summary) = &self.histograms else {
            return Some("Cannot tell: the record is too short for a recommendation.".to_owned());
        };
        let logged = text::steps(self.run.recorded);
        Some(format!(
            "Cannot tell the growth interval: histograms of {logged} bound what a scale does, and say nothing of how gradients move. {} To learn the interval, record step,amax at every step, or a trace with gradscale's Recorder.",
            usable(summary)
        ))
    }

    /// One line on what the run is.
    pub fn summary(&self) -> String {
        let tensors = match &self.histograms {
            Some(summary) => summary.tensors.len(),
            None => self.tensors.len(),
        };
        let mut line = format!("{}, {}", self.kind, text::steps(self.run.len()));
        if tensors > 0 {
            line.push_str(&format!(", {tensors} tensors"));
        }
        if let Some(summary) = &self.histograms {
            line.push_str(&format!(
                ", {} elements in histograms",
                text::count(summary.all.elements)
            ));
        }
        if let Some(sketch) = &self.figures.sketch {
            line.push_str(&format!(
                ", {} sampled elements",
                text::count(sketch.elements())
            ));
        }
        if let Some(about) = &self.about {
            let word = |key: &str| {
                about
                    .get(key)
                    .and_then(Value::as_str)
                    .unwrap_or("?")
                    .to_owned()
            };
            line.push_str(&format!(
                ". {}; {}; {}",
                word("model"),
                word("data"),
                word("optimizer")
            ));
            line.push_str(&format!("; recorded on {}", word("device")));
        }
        line
    }
}

/// The steps of a trace alone.
fn steps_of(trace: &Trace) -> Trace {
    Trace {
        run_id: trace.run_id.clone(),
        steps: trace.steps.clone(),
        ..Trace::default()
    }
}

/// All runs of a report as `gradscale.report/1`.
pub fn report_json(runs: &[RunReport]) -> Value {
    json!({
        "schema": "gradscale.report/1",
        "gradscale": env!("CARGO_PKG_VERSION"),
        "runs": runs.iter().map(RunReport::json).collect::<Vec<_>>(),
    })
}

fn tensor_rows(trace: &Trace, run: &Run, scales: &[f64], scale: f64) -> Vec<TensorRow> {
    let mut rows: Vec<TensorRow> = trace
        .tensors
        .iter()
        .enumerate()
        .filter(|(_, tensor)| tensor.role != Role::Activation)
        .map(|(n, tensor)| {
            let mut sketch = Sketch::default();
            for sample in &trace.samples {
                if let Some(unscaled) = trace.unscaled_sample(sample, n) {
                    sketch.merge(&unscaled);
                }
            }
            let amax = (0..trace.steps.len())
                .filter_map(|row| trace.unscaled_amax(row, n))
                .reduce(f32::max);
            TensorRow {
                name: tensor.name.clone(),
                amax,
                underflow: scales
                    .iter()
                    .map(|&s| sketch.replay(FP16, s as f32, false).lost.elements)
                    .collect(),
                headroom_log2: amax
                    .filter(|amax| *amax > 0.0)
                    .map(|amax| (65520.0 / (f64::from(amax) * scale)).log2()),
                without_signal: run.without_signal.contains(&tensor.name),
                sketch,
            }
        })
        .collect();
    if trace.samples.is_empty() {
        rows.retain(|row| row.amax.is_some() && row.name != "amax");
    }
    let judged = scales.len() - 1;
    rows.sort_by(|a, b| {
        b.underflow[judged]
            .total_cmp(&a.underflow[judged])
            .then_with(|| a.name.cmp(&b.name))
    });
    rows
}

/// The first step that a policy skips after its start, its scale, and the tensor whose gradient is largest there.
fn first_overflow(
    timeline: &Timeline<'_>,
    trace: &Trace,
    policy: &dyn crate::scaling::policy::Policy,
) -> Option<(u64, f64, Option<String>)> {
    let mut first: Option<(u64, f64)> = None;
    timeline.replay(policy.clone_box().as_mut(), &mut |segment: &Segment| {
        if segment.overflowed && first.is_none() {
            first = Some((
                timeline.run().first_step + segment.from as u64,
                segment.scale,
            ));
        }
    });
    let (step, scale) = first?;
    let row = trace.steps.iter().position(|s| s.step == step)?;
    let largest = (0..trace.tensors.len())
        .filter(|&n| trace.tensors[n].role != Role::Activation)
        .map(|n| {
            (
                n,
                if trace.nonfinite_at(row, n) & 3 != 0 {
                    f32::INFINITY
                } else {
                    trace.amax_at(row, n).unwrap_or(0.0)
                },
            )
        })
        .reduce(|best, next| if next.1 > best.1 { next } else { best });
    let named = largest
        .map(|(n, _)| trace.tensors[n].name.clone())
        .filter(|name| name != "amax");
    Some((step, scale, named))
}

/// Which scales every tensor's largest element fits at, in a sentence.
pub fn usable(summary: &HistogramSummary) -> String {
    let scale = |exponent: i32| text::scale(exp2(exponent));
    match (summary.fits_from_log2, summary.fits_until_log2) {
        (Some(from), Some(until)) if from <= until => format!(
            "Usable scales: {} to {}, at which the largest element of every tensor is representable and none overflows.",
            scale(from),
            scale(until)
        ),
        (Some(from), Some(until)) => format!(
            "No one scale fits every tensor: the largest element of each is representable from {}, and nothing overflows up to {}.",
            scale(from),
            scale(until)
        ),
        _ => "No nonzero gradient was logged.".to_owned(),
    }
}

fn fits_of_histograms(summary: &HistogramSummary) -> Fits {
    let until = summary.fits_until_log2.map_or(0, |exponent| exponent);
    let at = summary
        .all
        .spreads
        .iter()
        .find(|spread| f64::from(spread.loss_scale) == exp2(until));
    let lost = at.map_or(String::new(), |spread| {
        let (low, high) = spread.underflow_fraction();
        let (_, norm) = spread.l2_fraction();
        format!(
            " At {} between {} and {} of the nonzero elements become zero, at most {} of the L2 norm.",
            text::scale(exp2(until)),
            text::fraction(low),
            text::fraction(high),
            text::fraction(norm)
        )
    });
    Fits {
        word: "unknown",
        reason: format!(
            "histograms bound underflow, they do not count it. {}{lost}",
            usable(summary)
        ),
    }
}

/// Lost updates below this share count as fitting.
const FITS_BELOW: f64 = 0.01;

fn fits(trace: &Trace, figures: &Figures, options: &Options) -> Fits {
    let lost = figures
        .answer
        .as_ref()
        .and_then(|answer| {
            answer
                .recommended
                .as_ref()
                .unwrap_or(&answer.default)
                .cost
                .lost_update
        })
        .map(|lost| options.measure.of(lost));
    let forward: Vec<(&str, f32)> = trace
        .tensors
        .iter()
        .enumerate()
        .filter(|(_, tensor)| tensor.role == Role::Activation)
        .filter_map(|(n, tensor)| {
            let largest = (0..trace.steps.len())
                .filter_map(|row| trace.amax_at(row, n))
                .reduce(f32::max)?;
            Some((tensor.name.as_str(), largest))
        })
        .collect();
    let largest = forward
        .iter()
        .copied()
        .reduce(|a, b| if b.1 > a.1 { b } else { a });
    let captured = trace
        .captures()
        .iter()
        .any(|c| matches!(c, Capture::Fp16 { .. }))
        && trace.probes.is_empty();
    if figures.answer.is_none() {
        let reason = "too few steps were recorded to say what a scale would lose".to_owned();
        return Fits {
            word: "unknown",
            reason,
        };
    }
    let Some(lost) = lost else {
        let reason =
            "underflow was not recorded: it takes sketches, of gradients in FP32 or of probes"
                .to_owned();
        return Fits {
            word: "unknown",
            reason,
        };
    };
    let share = crate::scaling::percent(lost);
    match largest {
        Some((name, amax)) if amax >= 65520.0 => Fits {
            word: "no",
            reason: format!(
                "the forward pass reaches {} in {name}, beyond FP16's 65504; no loss scale helps there",
                text::significant(amax.into(), 3)
            ),
        },
        _ if lost > FITS_BELOW => Fits {
            word: "no",
            reason: format!("{share} of the updates are lost even with the recommended interval"),
        },
        _ if captured => Fits {
            word: "unknown",
            reason: format!(
                "{share} of the updates are lost in what was recorded, but FP16 captured it, and what was flushed before cannot be seen"
            ),
        },
        Some((name, amax)) => Fits {
            word: "yes",
            reason: format!(
                "{share} of the updates are lost, and the forward pass stays within {} ({name})",
                text::significant(amax.into(), 3)
            ),
        },
        None => Fits {
            word: "gradients only",
            reason: format!(
                "{share} of the updates are lost with the recommended interval; the forward pass was not recorded"
            ),
        },
    }
}
