//! Question: what would other growth intervals have cost real GPU runs?
//! Command: `cargo run --release --example gpu_runs` (writes `experiments/gpu_runs.csv` and `plots/gpu-runs.svg`)
//!
//! The runs' logs tell the scale and the overflows, not the gradients: a clean step at scale s says that no gradient
//! reached 65520/s, an overflow that one did. So the skips of another interval are bounds, from both sides, by following
//! every state that PyTorch's rule can reach. Where a log knows an overflow to a bracket of steps only, it is put at one
//! step that fits the rule the run followed.

#[path = "../tests/common/placement.rs"]
mod placement;

use gradscale::plot::{
    Axis, Canvas, DEFAULT_SIZE, Dash, Draw, DrawError, Legend, Theme, Ticks, palette, svg,
};
use gradscale::scaling::policy::{Defaults, Observed, PolicySpec};
use gradscale::scaling::{Run, RunOptions, Timeline, simulate};
use gradscale::tally::{Step, Trace};
use placement::{Row, by_run, number, place, seen};
use plotters::prelude::DrawingBackend;
use std::path::Path;

/// Intervals that are tried.
const INTERVALS: [u64; 17] = [
    50, 70, 100, 128, 200, 280, 400, 500, 700, 1000, 1400, 2000, 2800, 4000, 5600, 10_000, 20_000,
];

/// A set of runs.
struct Set {
    file: &'static str,
    what: &'static str,
    /// The policy that they ran.
    policy: &'static str,
    /// Steps of a run, where its rows do not say.
    steps: u64,
    column: &'static str,
}

const SETS: [Set; 9] = [
    Set {
        file: "mlperf07_maskrcnn_v100x16",
        what: "Mask R-CNN, 16 V100",
        policy: "apex-fp16-utils:init_scale=65536,scale_window=1000",
        steps: 0,
        column: "loss_scale",
    },
    Set {
        file: "mlperf07_maskrcnn_a100x32",
        what: "Mask R-CNN, 32 A100",
        policy: "apex-fp16-utils:init_scale=65536,scale_window=1000",
        steps: 0,
        column: "loss_scale",
    },
    Set {
        file: "mlperf07_maskrcnn_a100x256",
        what: "Mask R-CNN, 256 A100",
        policy: "apex-fp16-utils:init_scale=65536,scale_window=1000",
        steps: 0,
        column: "loss_scale",
    },
    Set {
        file: "mlperf06_gnmt_v100x8",
        what: "GNMT, 8 V100",
        policy: "apex-amp:init_scale=512,scale_window=128",
        steps: 7745,
        column: "loss_scale_after",
    },
    Set {
        file: "mlperf06_gnmt_v100x16",
        what: "GNMT, 16 V100",
        policy: "apex-amp:init_scale=512,scale_window=128",
        steps: 7745,
        column: "loss_scale_after",
    },
    Set {
        file: "mlperf05_transformer_v100x8",
        what: "Transformer, 8 V100 (2018)",
        policy: "fairseq:init_scale=128,scale_window=2000",
        steps: 0,
        column: "loss_scale",
    },
    Set {
        file: "mlperf06_transformer_v100x8",
        what: "Transformer, 8 V100 (2019)",
        policy: "fairseq:init_scale=128,scale_window=2000",
        steps: 0,
        column: "loss_scale",
    },
    Set {
        file: "mlperf07_transformer_a100x8",
        what: "Transformer, 8 A100",
        policy: "fairseq:init_scale=128,scale_window=1000",
        steps: 0,
        column: "loss_scale",
    },
    Set {
        file: "mlperf10_rnnt_a100x8",
        what: "RNN-T, 8 A100",
        policy: "apex-amp:init_scale=256,scale_window=2000,max_loss_scale=512",
        steps: 16_320,
        column: "loss_scale_after",
    },
];

/// The steps that overflowed, and the number of steps.
fn overflows(set: &Set, rows: &[Row]) -> (Vec<u64>, u64) {
    let bracketed = !rows[0].contains_key("step");
    let place_of = if bracketed { "step_hi" } else { "step" };
    let last = rows.iter().map(|row| number(row, place_of) as u64).max();
    let steps = set.steps.max(last.map_or(0, |last| last + 1));
    let found: Vec<u64> = if bracketed {
        let spec = PolicySpec::parse(set.policy).expect("a policy");
        let first = spec
            .build(Defaults::Class)
            .map_or(65_536.0, |policy| policy.loss_scale());
        let window = spec.growth_interval(Defaults::Class).unwrap_or(2000) as i64;
        let placed = place(&seen(rows, set.column), first, window);
        placed.steps.into_iter().map(|step| step as u64).collect()
    } else {
        rows.iter()
            .filter(|row| row["found_inf"] == "1")
            .map(|row| number(row, "step") as u64)
            .collect()
    };
    (found, steps)
}

/// A run's steps with the scale that its own policy used.
fn trace(set: &Set, overflows: &[u64], steps: u64) -> Trace {
    let mut policy = PolicySpec::parse(set.policy)
        .and_then(|spec| spec.build(Defaults::Class))
        .expect("a policy");
    let mut trace = Trace::default();
    for step in 0..steps {
        let found_inf = overflows.binary_search(&step).is_ok();
        trace.steps.push(Step {
            step,
            loss_scale: Some(policy.loss_scale()),
            found_inf: Some(found_inf),
            loss: None,
        });
        let _ = policy.update(Observed {
            found_inf,
            amax: None,
        });
    }
    trace
}

struct Bounds {
    what: &'static str,
    /// Steps and skips of the runs themselves, and their own interval.
    own: (u64, u64, u64),
    /// Interval, least and most skips over all runs.
    others: Vec<(u64, u64, u64)>,
}

fn main() {
    let mut csv = String::from(
        "set,run,steps,own_policy,own_skipped,growth_interval,skipped_low,skipped_high\n",
    );
    let mut all = Vec::new();
    for set in &SETS {
        let mut bounds = Bounds {
            what: set.what,
            own: (
                0,
                0,
                PolicySpec::parse(set.policy)
                    .ok()
                    .and_then(|s| s.growth_interval(Defaults::Class))
                    .unwrap_or(0),
            ),
            others: INTERVALS.iter().map(|&n| (n, 0, 0)).collect(),
        };
        for (index, rows) in by_run(&format!("{}.csv", set.file)).iter().enumerate() {
            let (found, steps) = overflows(set, rows);
            let trace = trace(set, &found, steps);
            bounds.own.0 += steps;
            bounds.own.1 += found.len() as u64;
            let run = Run::new(&trace, RunOptions::default());
            let timeline = Timeline::new(&run);
            // The others start where the run did.
            let start = trace.steps[0].loss_scale.unwrap_or(65_536.0);
            for other in &mut bounds.others {
                let policy = PolicySpec::named("pytorch")
                    .and_then(|spec| spec.with("growth_interval", other.0 as i64))
                    .and_then(|spec| spec.with("init_scale", start))
                    .and_then(|spec| spec.build(Defaults::Framework))
                    .expect("valid");
                let skipped = simulate(&timeline, policy.as_ref()).skipped;
                other.1 += skipped.low;
                other.2 += skipped.high;
                csv.push_str(&format!(
                    "{},{index},{steps},{},{},{},{},{}\n",
                    set.file,
                    set.policy.replace(',', ";"),
                    found.len(),
                    other.0,
                    skipped.low,
                    skipped.high
                ));
            }
        }
        println!(
            "{}: {} of {} steps skipped at {}",
            bounds.what, bounds.own.1, bounds.own.0, bounds.own.2
        );
        for (n, low, high) in &bounds.others {
            println!("  {n:6}: {low} to {high}");
        }
        all.push(bounds);
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let figure = svg(&Bands(all), (DEFAULT_SIZE.0, 1500), Theme::Screen).expect("it can be drawn");
    std::fs::write(folder.join("experiments/gpu_runs.csv"), csv)
        .expect("the folder can be written");
    std::fs::write(folder.join("plots/gpu-runs.svg"), figure.svg)
        .expect("the folder can be written");
}

/// Bands of skipped steps against the interval, a row of the figure each set.
struct Bands(Vec<Bounds>);

/// Rates below this lie on the axis.
const LEAST: f64 = 1e-5;

impl Draw for Bands {
    fn title(&self) -> String {
        "What other growth intervals would have skipped in real GPU runs, at least and at most"
            .to_owned()
    }

    fn caption(&self) -> String {
        "Bounds from the runs' scales and overflows alone (cargo run --release --example gpu_runs). Circle: what the run itself skipped, at its own interval.".to_owned()
    }

    fn csv(&self) -> String {
        let mut csv = String::from("runs,growth_interval,skipped_low,skipped_high,steps\n");
        for set in &self.0 {
            for (n, low, high) in &set.others {
                csv.push_str(&format!(
                    "\"{}\",{n},{low},{high},{}\n",
                    set.what, set.own.0
                ));
            }
        }
        csv
    }

    fn draw<B: DrawingBackend>(&self, canvas: &mut Canvas<'_, B>) -> Result<(), DrawError> {
        canvas.legend(&[
            Legend::Box("least to most".to_owned(), palette::SUBNORMAL),
            Legend::Mark(
                "the run itself".to_owned(),
                palette::OVERFLOW,
                gradscale::plot::Marker::Cross,
            ),
        ])?;
        let rows = self.0.len() as f64;
        let log2 = |n: u64| (n as f64).log2();
        for (row, set) in self.0.iter().enumerate() {
            canvas.frame(
                Axis::new(
                    "growth interval (steps)",
                    log2(INTERVALS[0]),
                    log2(INTERVALS[INTERVALS.len() - 1]),
                    Ticks::Doublings,
                ),
                Axis::new("", LEAST.log10(), 0.0, Ticks::Percent),
                (row as f64 / rows, (row as f64 + 1.0) / rows),
            )?;
            let rate = |skipped: u64| (skipped as f64 / set.own.0 as f64).max(LEAST).log10();
            for pair in set.others.windows(2) {
                let ((a, low, high), (b, low_b, high_b)) = (pair[0], pair[1]);
                canvas.fill(
                    (log2(a), rate(low.min(low_b))),
                    (log2(b), rate(high.max(high_b))),
                    palette::SUBNORMAL,
                    0.5,
                )?;
            }
            canvas.line(
                &set.others
                    .iter()
                    .map(|(n, low, _)| (log2(*n), rate(*low)))
                    .collect::<Vec<_>>(),
                palette::UNDERFLOW,
                Dash::Solid,
            )?;
            canvas.line(
                &set.others
                    .iter()
                    .map(|(n, _, high)| (log2(*n), rate(*high)))
                    .collect::<Vec<_>>(),
                palette::UNDERFLOW,
                Dash::Solid,
            )?;
            canvas.mark(
                (log2(set.own.2), rate(set.own.1)),
                palette::OVERFLOW,
                gradscale::plot::Marker::Cross,
            )?;
            canvas.label(
                (log2(INTERVALS[0]) + 0.1, -0.9),
                set.what,
                palette::TEXT,
                false,
            )?;
        }
        Ok(())
    }
}
