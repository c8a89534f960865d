//! What changed between two dumps or two runs.

use super::text::{self, fraction, shortened};
use crate::float::FP16;
use crate::scaling::policy::{Defaults, PolicyError};
use crate::scaling::{Options, Run, RunOptions, Timeline, cost, recommend};
use crate::tally::{Outcomes, Role, Sketch, Trace};
use crate::warning::Warning;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A and B.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair<T> {
    /// The first input's.
    pub a: T,
    /// The second's.
    pub b: T,
}

/// One tensor in both.
#[derive(Debug, Clone, PartialEq)]
pub struct Moved {
    /// Its name.
    pub name: String,
    /// log2(amax of B / amax of A); `None` where one has no nonzero gradient.
    pub amax_shift_log2: Option<f64>,
    /// Share of the finite nonzero elements flushed to zero.
    pub underflow: Pair<f64>,
}

/// The comparison.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// The inputs' names.
    pub labels: Pair<String>,
    /// The scale compared at.
    pub at: f64,
    /// Whether a fraction or the skips grew by more than the allowed share.
    pub worse: bool,
    /// Shares of the finite nonzero elements.
    pub underflow: Pair<f64>,
    /// Shares of the finite nonzero elements.
    pub overflow: Pair<f64>,
    /// Steps that the default policy skips, where both have steps.
    pub skipped: Option<Pair<u64>>,
    /// Recommended intervals, where both carry one.
    pub growth_interval: Option<Pair<u64>>,
    /// The ten tensors that moved most.
    pub tensors: Vec<Moved>,
    /// What to know.
    pub warnings: Vec<Warning>,
}

/// Tensors shown.
const SHOWN: usize = 10;

/// Compares two records at a scale; `allowed` is the share of A's value by which B's may be larger.
///
/// # Errors
/// When the policy cannot be built.
pub fn compare(
    labels: Pair<String>,
    traces: Pair<&Trace>,
    run_options: RunOptions,
    options: &Options,
    at: f64,
    allowed: f64,
) -> Result<Comparison, PolicyError> {
    let tensors = Pair {
        a: by_tensor(traces.a),
        b: by_tensor(traces.b),
    };
    let outcomes = |tensors: &BTreeMap<String, Sketch>| {
        let mut all = Sketch::default();
        tensors.values().for_each(|sketch| all.merge(sketch));
        all.replay(FP16, at as f32, false).outcomes
    };
    let all = Pair {
        a: outcomes(&tensors.a),
        b: outcomes(&tensors.b),
    };
    let share = |of: fn(&Outcomes) -> f64| Pair {
        a: of(&all.a),
        b: of(&all.b),
    };
    let (underflow, overflow) = (
        share(Outcomes::underflow_fraction),
        share(Outcomes::overflow_fraction),
    );

    let mut moved: Vec<Moved> = tensors
        .a
        .iter()
        .filter_map(|(name, a)| {
            let b = tensors.b.get(name)?;
            let shift = match (a.amax(), b.amax()) {
                (Some(a), Some(b)) if a > 0.0 && b > 0.0 => {
                    Some(f64::from(b).log2() - f64::from(a).log2())
                }
                _ => None,
            };
            let flushed = |sketch: &Sketch| sketch.replay(FP16, at as f32, false).lost.elements;
            Some(Moved {
                name: name.clone(),
                amax_shift_log2: shift,
                underflow: Pair {
                    a: flushed(a),
                    b: flushed(b),
                },
            })
        })
        .collect();
    let distance = |moved: &Moved| {
        let shift = moved.amax_shift_log2.unwrap_or(0.0).abs();
        (shift, (moved.underflow.b - moved.underflow.a).abs())
    };
    moved.sort_by(|x, y| {
        distance(y)
            .partial_cmp(&distance(x))
            .unwrap_or(std::cmp::Ordering::Equal)
    });
    moved.truncate(SHOWN);

    let runs = Pair {
        a: Run::new(traces.a, run_options),
        b: Run::new(traces.b, run_options),
    };
    let steps = |run: &Run| run.recorded > 1;
    let mut skipped = None;
    let mut growth_interval = None;
    if steps(&runs.a) && steps(&runs.b) {
        let policy = options.policy.build(Defaults::Framework)?;
        let skips = |run: &Run| cost(&Timeline::new(run), policy.as_ref()).skipped;
        skipped = Some(Pair {
            a: skips(&runs.a),
            b: skips(&runs.b),
        });
        let interval = |run: &Run| {
            recommend(run, options)
                .ok()
                .and_then(|answer| answer.growth_interval)
        };
        growth_interval = interval(&runs.a)
            .zip(interval(&runs.b))
            .map(|(a, b)| Pair { a, b });
    }
    let grew = |pair: Pair<f64>| pair.b > pair.a * (1.0 + allowed);
    let worse = grew(underflow)
        || grew(overflow)
        || skipped.is_some_and(|s| {
            grew(Pair {
                a: s.a as f64,
                b: s.b as f64,
            })
        });
    let mut warnings = runs.a.warnings;
    warnings.extend(runs.b.warnings);
    Ok(Comparison {
        labels,
        at,
        worse,
        underflow,
        overflow,
        skipped,
        growth_interval,
        tensors: moved,
        warnings,
    })
}

/// All sampled gradients by tensor, unscaled.
fn by_tensor(trace: &Trace) -> BTreeMap<String, Sketch> {
    let mut tensors: BTreeMap<String, Sketch> = BTreeMap::new();
    for sample in &trace.samples {
        for (n, tensor) in trace.tensors.iter().enumerate() {
            if tensor.role != Role::Activation
                && let Some(sketch) = trace.unscaled_sample(sample, n)
            {
                tensors
                    .entry(tensor.name.clone())
                    .or_default()
                    .merge(&sketch);
            }
        }
    }
    tensors
}

impl Comparison {
    /// `gradscale.compare/1`.
    pub fn json(&self) -> Value {
        let pair = |pair: Pair<f64>| json!({"a": pair.a, "b": pair.b});
        let counts = |pair: Option<Pair<u64>>| pair.map(|pair| json!({"a": pair.a, "b": pair.b}));
        json!({
            "schema": "gradscale.compare/1",
            "a": self.labels.a,
            "b": self.labels.b,
            "at": self.at,
            "worse": self.worse,
            "underflow_fraction": pair(self.underflow),
            "overflow_fraction": pair(self.overflow),
            "skipped": counts(self.skipped),
            "growth_interval": counts(self.growth_interval),
            "tensors": self.tensors.iter().map(|moved| json!({
                "name": moved.name,
                "amax_shift_log2": moved.amax_shift_log2,
                "underflow_fraction": pair(moved.underflow),
            })).collect::<Vec<_>>(),
            "warnings": super::json::warnings(&self.warnings),
        })
    }

    /// The comparison for a terminal.
    pub fn table(&self) -> String {
        let mut rows = vec![
            vec![
                "underflow".to_owned(),
                fraction(self.underflow.a),
                fraction(self.underflow.b),
            ],
            vec![
                "overflow".to_owned(),
                fraction(self.overflow.a),
                fraction(self.overflow.b),
            ],
        ];
        if let Some(skipped) = self.skipped {
            rows.push(vec![
                "skipped steps".to_owned(),
                skipped.a.to_string(),
                skipped.b.to_string(),
            ]);
        }
        if let Some(n) = self.growth_interval {
            rows.push(vec![
                "growth_interval to set".to_owned(),
                n.a.to_string(),
                n.b.to_string(),
            ]);
        }
        let mut out = format!(
            "A: {}\nB: {}\nB is {} at loss scale {}.\n\n{}",
            self.labels.a,
            self.labels.b,
            if self.worse { "worse" } else { "not worse" },
            text::scale(self.at),
            text::table(&["", "A", "B"], &rows)
        );
        if !self.tensors.is_empty() {
            let rows: Vec<Vec<String>> = self
                .tensors
                .iter()
                .map(|moved| {
                    vec![
                        shortened(&moved.name, 48),
                        moved
                            .amax_shift_log2
                            .map_or("-".to_owned(), |shift| format!("{shift:+.2}")),
                        fraction(moved.underflow.a),
                        fraction(moved.underflow.b),
                    ]
                })
                .collect();
            out.push_str("\nMoved most:\n");
            out.push_str(&text::table(
                &["tensor", "amax, binades", "flushed in A", "in B"],
                &rows,
            ));
        }
        out
    }
}
