//! Results as JSON: stable keys, counts as integers, `null` for what is not known, `"inf"` for an infinite scale.

use crate::analysis::{Analysis, Group, HistogramSummary, Rate, Shares};
use crate::scaling::{Bounds, Candidate, Recommendation, Row, Run, Simulated, Swept, octaves};
use crate::tally::{Lost, Outcomes, Spread};
use crate::warning::Warning;
use serde_json::{Map, Value, json};

/// A scale: a number, or the text `"inf"`.
pub fn scale(value: f64) -> Value {
    if value.is_infinite() {
        json!("inf")
    } else if value.is_nan() {
        json!("nan")
    } else {
        json!(value)
    }
}

/// Warnings as the contract has them: `seen`, `may_mean`, `try`, with their kind.
pub fn warnings(warnings: &[Warning]) -> Value {
    let mut shown: Vec<&Warning> = Vec::new();
    for warning in warnings {
        if !shown.contains(&warning) {
            shown.push(warning);
        }
    }
    serde_json::to_value(shown).expect("warnings hold only text")
}

/// The three measures of what was lost.
pub fn lost(lost: Lost) -> Value {
    json!({"elements": lost.elements, "l1": lost.l1, "l2": lost.l2})
}

/// `gradscale.analyze/1`.
pub fn analysis(analysis: &Analysis) -> Value {
    json!({
        "schema": "gradscale.analyze/1",
        "format": analysis.format.name,
        "backend": analysis.backend.map(|backend| backend.name()),
        "inputs": analysis.inputs.iter().map(|input| json!({
            "path": input.path, "kind": input.kind, "tensors": input.tensors, "elements": input.elements,
        })).collect::<Vec<_>>(),
        "groups": analysis.groups.iter().map(group).collect::<Vec<_>>(),
        "warnings": warnings(&analysis.warnings),
    })
}

/// What histograms say of a run, in `gradscale.report/1`.
pub fn histograms(summary: &HistogramSummary) -> Value {
    let log2_scale = |exponent: Option<i32>| exponent.map(crate::float::exp2);
    json!({
        "elements": summary.all.elements,
        "usable_scales": {
            "from": log2_scale(summary.fits_from_log2),
            "to": log2_scale(summary.fits_until_log2),
        },
        "flushed_wholly": summary.wholly_flushed().iter().map(|tensor| json!({
            "tensor": tensor.name,
            "amax": tensor.bounded.largest().map(f64::from),
            "representable_from": log2_scale(tensor.flushed_until_log2),
        })).collect::<Vec<_>>(),
        "nonfinite_steps": summary.nonfinite_steps,
        "rates": summary.all.spreads.iter().map(spread).collect::<Vec<_>>(),
        "tensors": summary.tensors.iter().map(|tensor| json!({
            "name": tensor.name,
            "elements": tensor.bounded.elements,
            "zeros": [tensor.bounded.zeros().0, tensor.bounded.zeros().1],
            "amax": tensor.bounded.largest().map(f64::from),
            "underflow_fraction": tensor.bounded.spreads.iter().map(|spread| json!({
                "scale": f64::from(spread.loss_scale),
                "bounds": [spread.underflow_fraction().0, spread.underflow_fraction().1],
            })).collect::<Vec<_>>(),
        })).collect::<Vec<_>>(),
    })
}

/// The bounds at one scale.
fn spread(spread: &Spread) -> Value {
    let shares = Shares::of(spread);
    let mut object = Map::new();
    object.insert("scale".to_owned(), json!(f64::from(spread.loss_scale)));
    object.insert(
        "bounds".to_owned(),
        bounds(&spread.low, &spread.high, Some(shares)),
    );
    Value::Object(object)
}

/// Least and most of each count, and of the fractions where those are not simply counts over a known number.
fn bounds(low: &Outcomes, high: &Outcomes, shares: Option<Shares>) -> Value {
    let pair = |of: fn(&Outcomes) -> u64| json!([of(low), of(high)]);
    let mut bounds = Map::new();
    let mut put = |key: &str, value: Value| {
        bounds.insert(key.to_owned(), value);
    };
    put("underflow_to_zero", pair(|o| o.underflow_to_zero));
    put("subnormal", pair(|o| o.subnormal));
    put("normal", pair(|o| o.normal));
    put("overflow_to_infinity", pair(|o| o.overflow_to_infinity));
    if let Some(shares) = shares {
        let share = |(low, high): (f64, f64)| json!([low, high]);
        put("zero_in", pair(|o| o.zero_in));
        put("underflow_fraction", share(shares.underflow));
        put("overflow_fraction", share(shares.overflow));
        put("underflow_l1_fraction", share(shares.l1));
        put("underflow_l2_fraction", share(shares.l2));
    }
    Value::Object(bounds)
}

/// One group of `gradscale.analyze/1`.
pub fn group(group: &Group) -> Value {
    if let Some(bounded) = &group.bounded {
        let (low, high) = bounded.zeros();
        return json!({
            "run": group.run,
            "tensor": group.tensor,
            "step": group.step,
            "elements": bounded.elements,
            // The least: no element is called a zero that may be none.
            "zeros": low,
            "zeros_at_most": high,
            "inf": bounded.inf,
            "nan": bounded.nan,
            "amax": bounded.largest().map(f64::from),
            "smallest_nonzero": null,
            "captured_in": null,
            "rates": group.rates.iter().map(rate).collect::<Vec<_>>(),
        });
    }
    let sketch = &group.sketch;
    json!({
        "run": group.run,
        "tensor": group.tensor,
        "step": group.step,
        "elements": sketch.elements(),
        "zeros": sketch.zeros(),
        "inf": sketch.inf(),
        "nan": sketch.nan(),
        "amax": sketch.amax().map(f64::from),
        "smallest_nonzero": sketch.smallest_nonzero().map(f64::from),
        "captured_in": group.captured.scale_at_least().map(|scale| json!({
            "format": "fp16", "scale_at_least": scale, "tensors": group.captured.fp16_tensors,
        })),
        "rates": group.rates.iter().map(rate).collect::<Vec<_>>(),
    })
}

fn rate(rate: &Rate) -> Value {
    let outcomes = &rate.outcomes;
    let mut object = Map::new();
    let mut put = |key: &str, value: Value| {
        object.insert(key.to_owned(), value);
    };
    put("scale", json!(f64::from(rate.loss_scale)));
    put("exact", json!(rate.why_not_exact.is_none()));
    put("underflow_to_zero", json!(outcomes.underflow_to_zero));
    put("subnormal", json!(outcomes.subnormal));
    put("normal", json!(outcomes.normal));
    put("overflow_to_infinity", json!(outcomes.overflow_to_infinity));
    put("underflow_fraction", json!(outcomes.underflow_fraction()));
    put("overflow_fraction", json!(outcomes.overflow_fraction()));
    put("underflow_l1_fraction", json!(rate.lost.l1));
    put("underflow_l2_fraction", json!(rate.lost.l2));
    if let Some(why) = rate.why_not_exact {
        put("why_not_exact", json!(why.as_str()));
    }
    if let Some((low, high)) = &rate.bounds {
        put("bounds", bounds(low, high, rate.shares));
    }
    if let Some(errors) = rate.errors {
        put("mean_relative_error", json!(errors.mean_relative_error));
        put("sqnr_db", json!(errors.sqnr_db));
    }
    Value::Object(object)
}

/// `gradscale.simulate/1`.
pub fn simulation(steps: u64, runs: &[(usize, String, Simulated)], all: &[Warning]) -> Value {
    json!({
        "schema": "gradscale.simulate/1",
        "steps": steps,
        "runs": runs.iter().map(|(run, policy, simulated)| simulated_run(*run, policy, simulated)).collect::<Vec<_>>(),
        "warnings": warnings(all),
    })
}

/// One run of `gradscale.simulate/1`.
pub fn simulated_run(run: usize, policy: &str, simulated: &Simulated) -> Value {
    let Simulated {
        cost,
        skipped: Bounds { low, high, tight },
        worst_underflow,
    } = simulated;
    json!({
        "run": run,
        "policy": policy,
        "steps": cost.steps,
        "skipped": cost.skipped,
        "skipped_low": low,
        "skipped_high": high,
        "skipped_bounds_tight": tight,
        "skipped_at_start": cost.skipped_at_start,
        "skipped_at_any_scale": cost.skipped_anyway,
        "growths": cost.growths,
        "first_scale": scale(cost.first_scale),
        "last_scale": scale(cost.last_scale),
        "longest_burst": cost.longest_burst,
        "terminal": cost.terminal.as_ref().map(|stopped| json!({"step": stopped.step, "reason": stopped.reason.to_string()})),
        "lost_update": cost.lost_update.map(lost),
        "underflow": cost.underflow.map(lost),
        "worst_underflow": worst_underflow.map(lost),
    })
}

/// `gradscale.recommend/1` of one run.
pub fn recommendation(answer: &Recommendation, run: &Run) -> Value {
    let measure = answer.measure;
    let measured = answer.default.cost.lost_update.is_some();
    let j = |cost: &crate::scaling::Cost| cost.lost_update.map(|lost| measure.of(lost));
    let settings_lost: Map<String, Value> = answer
        .settings
        .iter()
        .map(|s| (s.framework.key().to_owned(), json!(j(&s.cost))))
        .collect();
    let mut settings = Map::new();
    for setting in &answer.settings {
        settings.insert(setting.framework.key().to_owned(), json!(setting.text));
        if setting.framework.key() == "pytorch" {
            settings.insert("pytorch_static".to_owned(), json!(answer.pytorch_static));
        }
    }
    json!({
        "schema": "gradscale.recommend/1",
        "policy": answer.policy,
        "basis": answer.basis.as_str(),
        "measure": measure.as_str(),
        "verdict": answer.verdict.as_str(),
        "why": answer.why,
        "growth_interval": answer.growth_interval,
        "default_growth_interval": answer.default_interval,
        "interval": answer.interval.map(|(low, high)| json!({"low": low, "high": high, "confidence": 0.95})),
        "default_is_fine": answer.default_is_fine,
        "init_scale": answer.init_scale,
        "lost_update": {
            "recommended": answer.recommended.as_ref().and_then(|c| j(&c.cost)),
            "default": j(&answer.default.cost),
            "best_static": answer.best_static.as_ref().filter(|_| measured).and_then(|(_, cost)| j(cost)),
            "settings": if measured { Value::Object(settings_lost) } else { Value::Null },
        },
        "skipped": {
            "recommended": answer.recommended.as_ref().map(|c| c.cost.skipped),
            "default": answer.default.cost.skipped,
            "at_start": answer.default.cost.skipped_at_start,
        },
        "best_static_scale": answer.best_static.as_ref().map(|(scale, _)| *scale),
        "best_static_headroom_log2": answer.best_static_headroom_log2,
        "steps": answer.steps,
        "recorded_steps": run.recorded,
        "candidates": shown_candidates(answer).into_iter().map(|c| candidate(c, measure)).collect::<Vec<_>>(),
        "bootstrap": answer.bootstrap.map(|b| json!({
            "resamplings": b.resamplings,
            "block_length": b.block_length,
            "seed": b.seed,
            "candidates": b.candidates,
            "effective_steps": b.effective_steps,
            "skip_rate_at_most": {"recommended": b.skip_rate_at_most.0, "default": b.skip_rate_at_most.1},
        })),
        "backtest": answer.backtest.map(|b| json!({
            "chosen_on_first_half": b.growth_interval,
            "second_half": {"chosen": b.chosen, "default": b.default, "best": b.best},
        })),
        "stress": answer.stress.map(|(recommended, default)| json!({
            "planted": "8 overflows in a row in every 10000 steps",
            "lost_update": {"recommended": recommended, "default": default},
        })),
        "phases": answer.phases.iter().map(|phase| json!({
            "from": phase.from,
            "to": phase.to,
            "drift_log2_per_1000_steps": phase.drift,
            "growth_interval": phase.best,
            "as_good": phase.as_good,
            "lost_update": {"best": phase.lost_update.0, "default": phase.lost_update.1},
        })).collect::<Vec<_>>(),
        "horizon": answer.horizon.as_ref().map(|horizon| json!({
            "steps": horizon.steps,
            "extrapolated": true,
            "resamplings": horizon.resamplings,
            "block_length": horizon.block_length,
            "intervals": horizon.intervals.iter().map(|at| json!({
                "growth_interval": at.growth_interval,
                "lost_update": at.lost_update.0,
                "low": at.lost_update.1,
                "high": at.lost_update.2,
                "skipped": {"mean": at.skipped.0, "low": at.skipped.1, "high": at.skipped.2},
            })).collect::<Vec<_>>(),
        })),
        "settings": settings,
        "warnings": warnings(&answer.warnings),
    })
}

/// What a sweep comes to, as a part of `gradscale.recommend/1`.
pub fn swept(swept: &Swept, measure: crate::scaling::Measure) -> Value {
    json!({
        "keys": swept.keys,
        "combinations": swept.rows,
        "best": swept_row(swept, &swept.best, measure),
        "own": swept_row(swept, &swept.own, measure),
        "by_setting": swept.by_setting.iter().map(|row| swept_row(swept, row, measure)).collect::<Vec<_>>(),
    })
}

fn swept_row(swept: &Swept, row: &Row, measure: crate::scaling::Measure) -> Value {
    let settings: Map<String, Value> = swept
        .keys
        .iter()
        .zip(&row.values)
        .map(|(key, &value)| (key.clone(), json!(value)))
        .collect();
    json!({
        "settings": settings,
        "skipped": row.cost.skipped,
        "skipped_low": row.skipped_bounds.0,
        "skipped_high": row.skipped_bounds.1,
        "skipped_at_start": row.cost.skipped_at_start,
        "lost_update": row.cost.lost_update.map(|lost| measure.of(lost)),
    })
}

fn candidate(candidate: &Candidate, measure: crate::scaling::Measure) -> Value {
    json!({
        "growth_interval": candidate.growth_interval,
        "skipped": candidate.cost.skipped,
        "skipped_low": candidate.skipped_bounds.0,
        "skipped_high": candidate.skipped_bounds.1,
        "lost_update": candidate.cost.lost_update.map(|lost| measure.of(lost)),
        "low": candidate.confidence.map(|(low, _)| low),
        "high": candidate.confidence.map(|(_, high)| high),
    })
}

/// An ascending grid of the sweep: quarter octaves, with the recommended interval and the default.
pub fn shown_candidates(answer: &Recommendation) -> Vec<&Candidate> {
    let all = &answer.choice.candidates;
    let mut places: Vec<usize> = octaves(2, all[all.len() - 1].growth_interval)
        .map(|n| {
            all.partition_point(|c| c.growth_interval <= n)
                .saturating_sub(1)
        })
        .chain([
            answer.choice.recommended,
            answer.choice.default,
            all.len() - 1,
        ])
        .collect();
    places.sort_unstable();
    places.dedup();
    places.into_iter().map(|i| &all[i]).collect()
}

/// `gradscale.formats/1`.
pub fn formats(formats: &[crate::float::Format]) -> Value {
    json!({
        "schema": "gradscale.formats/1",
        "formats": formats.iter().map(|f| json!({
            "name": f.name,
            "bits": f.bits,
            "significand_bits": f.significand_bits,
            "min_exponent": f.min_exponent,
            "max_exponent": f.max_exponent,
            "largest_finite": f64::from(f.largest_finite()),
            "smallest_normal": f64::from(f.smallest_normal()),
            "smallest_subnormal": f64::from(f.smallest_subnormal()),
            "last_to_zero": f64::from(f32::from_bits(f.last_zero_bits())),
            "first_normal": f64::from(f32::from_bits(f.first_normal_bits())),
            "first_overflow": f64::from(f32::from_bits(f.first_overflow_bits())),
            "has_infinity": f.top == crate::float::Top::Infinity,
        })).collect::<Vec<_>>(),
    })
}
