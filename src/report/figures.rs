//! The figures of one run.

use crate::analysis::HistogramSummary;
use crate::float::{FP16, exp2};
use crate::plot::{Bands, Binades, Headroom, Policies, Rates, Tradeoff, Trajectory};
use crate::scaling::policy::{Defaults, PolicySpec};
use crate::scaling::{Options, RecommendError, Recommendation, Run, Timeline, recommend};
use crate::tally::{Role, Sketch, Trace};

/// A run and its record.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// Its name.
    pub label: &'a str,
    /// The record.
    pub trace: &'a Trace,
    /// What its histograms say, where it holds some.
    pub histograms: Option<&'a HistogramSummary>,
    /// The record, ready to be replayed.
    pub run: &'a Run,
    /// What the same run did in FP16, where it is known.
    pub real: Option<&'a Trace>,
}

/// Everything that can be drawn of a run.
#[derive(Debug, Clone)]
pub struct Figures {
    /// The recommendation, where the record carries one.
    pub answer: Option<Recommendation>,
    /// All sampled gradients of parameters, merged and unscaled.
    pub sketch: Option<Sketch>,
    /// The scale that figures are drawn at, and what it is.
    pub scale: (f64, String),
    /// Outcomes against the scale.
    pub rates: Option<Rates>,
    /// The same as bands, where only histograms are known.
    pub bands: Option<Bands>,
    /// Binades under the FP16 window.
    pub binades: Option<Binades>,
    /// Headroom of tensors over steps.
    pub headroom: Option<Headroom>,
    /// amax and the recommended policy's scale.
    pub trajectory: Trajectory,
    /// Lost update against the interval.
    pub tradeoff: Option<Tradeoff>,
    /// Policies side by side.
    pub policies: Policies,
}

/// The policies that are compared when none is named: each framework as its users get it.
const COMPARED: [&str; 8] = [
    "pytorch",
    "deepspeed",
    "megatron",
    "fairseq",
    "tf-keras",
    "flax",
    "apex-amp",
    "paddle",
];

/// The scales of the figures and the report: 2^-8 to 2^32.
pub fn scales() -> Vec<f32> {
    (-8..=32).map(|e| exp2(e) as f32).collect()
}

impl Figures {
    /// Replays and gathers what the figures show. `specs`, where given, are the policies to draw.
    ///
    /// # Errors
    /// When the policy cannot be swept; a run too short for a recommendation has figures all the same.
    pub fn new(
        subject: Subject<'_>,
        options: &Options,
        specs: &[PolicySpec],
    ) -> Result<Figures, RecommendError> {
        let Subject {
            label,
            trace,
            histograms,
            run,
            real,
        } = subject;
        let answer = match recommend(run, options) {
            Ok(answer) => Some(answer),
            Err(RecommendError::TooShort(_)) => None,
            Err(error) => return Err(error),
        };
        let timeline = Timeline::new(run);
        let sketch = merged(trace);
        let best_static = answer
            .as_ref()
            .and_then(|a| a.best_static.as_ref())
            .map(|(scale, _)| *scale);
        let scale = match best_static {
            Some(scale) => (scale, "the best static scale".to_owned()),
            None => (65536.0, "PyTorch's start".to_owned()),
        };
        let scales = scales();
        let mut marks = vec![(65536.0, "PyTorch's start, 2^16".to_owned())];
        let bands = histograms.map(|summary| Bands {
            label: label.to_owned(),
            format: FP16.name,
            elements: summary.all.elements,
            spreads: summary.all.spreads.clone(),
            marks: fits(summary)
                .into_iter()
                .filter(|(scale, _)| (exp2(-8)..=exp2(32)).contains(scale))
                .chain(marks.clone())
                .collect(),
        });
        if let Some(scale) = best_static {
            marks.push((scale, format!("best static, {}", super::text::scale(scale))));
        }
        let recommended = match &answer {
            Some(Recommendation {
                growth_interval: Some(n),
                init_scale,
                ..
            }) => options
                .policy
                .with("growth_interval", *n as i64)?
                .with("init_scale", *init_scale)?,
            _ => options.policy.clone(),
        };
        let drawn = match specs.first() {
            Some(spec) => spec.clone(),
            // Beside a real run the policy that it really ran is drawn.
            None if real.is_some() => options.policy.clone(),
            None => recommended.clone(),
        };
        let drawn_policy = drawn.build(Defaults::Framework)?;
        let trajectory = Trajectory::of(
            label,
            &timeline,
            drawn_policy.as_ref(),
            &drawn.canonical(),
            real,
        );
        let mut compared: Vec<(String, PolicySpec)> = specs
            .iter()
            .map(|spec| (spec.canonical(), spec.clone()))
            .collect();
        if compared.is_empty() {
            if let Some(n) = answer
                .as_ref()
                .and_then(|a| a.growth_interval)
                .filter(|_| recommended != options.policy)
            {
                compared.push((
                    format!("recommended ({}, {n})", options.policy.info().json_name()),
                    recommended,
                ));
            }
            let named = COMPARED
                .iter()
                .filter_map(|name| PolicySpec::named(name).ok());
            compared.extend(named.map(|spec| (spec.canonical(), spec)));
            if let Some(scale) = best_static {
                let spec = PolicySpec::named("static")?.with("scale", scale)?;
                compared.push((format!("best static ({})", super::text::scale(scale)), spec));
            }
        }
        let nonzero = sketch.as_ref().filter(|sketch| sketch.finite_nonzero() > 0);
        Ok(Figures {
            bands,
            rates: nonzero.map(|sketch| Rates::of(label, sketch, FP16, &scales, marks)),
            binades: nonzero.map(|sketch| Binades {
                label: label.to_owned(),
                sketch: sketch.clone(),
                loss_scale: scale.0,
                scale_is: scale.1.clone(),
            }),
            headroom: Headroom::of(label, trace, scale.0),
            trajectory,
            tradeoff: answer.as_ref().map(|answer| Tradeoff::of(label, answer)),
            policies: Policies::of(label, &timeline, &compared, options.measure)?,
            scale,
            sketch,
            answer,
        })
    }
}

/// Where every tensor's largest element fits, as marks.
fn fits(summary: &HistogramSummary) -> Vec<(f64, String)> {
    let mark = |exponent: Option<i32>, what: &str| {
        exponent.map(|e| (exp2(e), format!("{what} {}", super::text::scale(exp2(e)))))
    };
    [
        mark(
            summary.fits_from_log2,
            "largest elements representable from",
        ),
        mark(summary.fits_until_log2, "nothing overflows up to"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// All sampled parameter gradients, unscaled, in one sketch.
fn merged(trace: &Trace) -> Option<Sketch> {
    let mut all: Option<Sketch> = None;
    for sample in &trace.samples {
        for (n, tensor) in trace.tensors.iter().enumerate() {
            if tensor.role == Role::Parameter
                && let Some(sketch) = trace.unscaled_sample(sample, n)
            {
                all.get_or_insert_default().merge(&sketch);
            }
        }
    }
    all
}
