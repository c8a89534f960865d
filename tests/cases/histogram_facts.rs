//! What the numbers of real GPU runs say, and what a tool must conclude from them.

use crate::{data, run};
use gradscale::analysis::HistogramSummary;
use gradscale::gradients;
use gradscale::histograms::{HistogramError, read, read_fp8};
use gradscale::input::{Input, NamedTrace};
use gradscale::scaling::policy::{Defaults, Observed, PolicySpec};
use gradscale::scaling::{Limits, Verdict};
use gradscale::tally::Role;
use serde_json::Value;

fn runs(name: &str) -> Vec<NamedTrace> {
    let reading = gradients::Options::new();
    match Input::open(&data(name), &reading, false).unwrap() {
        Input::Histograms { runs, .. } => runs,
        other => panic!("{name} is a {}", other.kind()),
    }
}

fn summary(run: &NamedTrace, scales: &[f32]) -> HistogramSummary {
    HistogramSummary::of(&run.trace, &run.histograms, scales).unwrap()
}

/// log2 of amax of every tensor at a step, of some role.
fn amax_log2(run: &NamedTrace, row: usize, role: Role) -> Vec<f64> {
    let tensors = run.trace.tensors.iter().enumerate();
    tensors
        .filter(|(_, tensor)| tensor.role == role)
        .filter_map(|(n, _)| run.trace.amax_at(row, n))
        .filter(|amax| *amax > 0.0)
        .map(|amax| f64::from(amax).log2())
        .collect()
}

fn range(values: &[f64]) -> (f64, f64) {
    let fold = |f: fn(f64, f64) -> f64| values.iter().copied().reduce(f).unwrap();
    (fold(f64::min), fold(f64::max))
}

/// To one decimal, as the facts are written.
fn tenth(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// The rows of a W&B table: name, edges and counts, read anew.
fn rows(name: &str) -> Vec<(String, f64, f64, Vec<u64>)> {
    let text = std::fs::read_to_string(data(name)).unwrap();
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().unwrap().split(',').collect();
    let at = |column: &str| header.iter().position(|c| *c == column).unwrap();
    lines
        .map(|line| {
            let cells: Vec<&str> = line.split(',').collect();
            let counts = cells[at("counts_64_equal_bins")]
                .split(' ')
                .map(|count| count.parse().unwrap())
                .collect();
            let run = header
                .first()
                .filter(|c| **c == "run")
                .map_or("", |_| cells[0]);
            (
                format!("{run} {}", cells[at("param")]).trim().to_owned(),
                cells[at("bin_lo")].parse().unwrap(),
                cells[at("bin_hi")].parse().unwrap(),
                counts,
            )
        })
        .collect()
}

#[test]
fn speech_separation_is_usable_up_to_2_to_15_and_its_underflow_is_an_interval() {
    let runs = runs("wandb_speechsep_grad_hist.csv");
    let [run] = runs.as_slice() else {
        panic!("one run");
    };
    let summary = summary(run, &[1.0, 32768.0, 65536.0]);
    assert_eq!(summary.tensors.len(), 292);
    assert_eq!(summary.all.elements, 7_561_985);
    let (low, high) = range(&amax_log2(run, 0, Role::Parameter));
    assert_eq!((tenth(low), tenth(high)), (-13.5, 1.0));
    assert_eq!(summary.fits_until_log2, Some(15));
    assert!(summary.wholly_flushed().is_empty());
    // The bin that holds zero holds 63 % of the elements, and at scale 1 little else can underflow.
    let (low, high) = summary.all.spreads[0].underflow_fraction();
    assert!(low == 0.0 && (0.63..0.64).contains(&high), "{low}..{high}");
    let rows = rows("wandb_speechsep_grad_hist.csv");
    let widths: Vec<f64> = rows
        .iter()
        .filter(|row| row.1 < row.2)
        .map(|row| ((row.2 - row.1) / 64.0).log2())
        .collect();
    let (narrow, wide) = range(&widths);
    assert_eq!((tenth(narrow), tenth(wide)), (-18.6, -4.3));
    // Overflow is certain from 2^16: the largest element is known.
    assert_eq!(summary.all.spreads[1].high.overflow_to_infinity, 0);
    assert!(summary.all.spreads[2].low.overflow_to_infinity > 0);
}

/// For each tensor: at least none becomes zero, at most all of the bins that reach at or below 2^-25 / scale.
#[test]
fn the_upper_bound_is_the_count_of_all_bins_that_reach_below_the_threshold() {
    for name in ["wandb_speechsep_grad_hist.csv", "wandb_cnn_grad_hist.csv"] {
        let rows = rows(name);
        let mut compared = 0;
        for run in runs(name) {
            let scales: Vec<f32> = (0..=18).map(|e| 2f32.powi(e)).collect();
            let summary = summary(&run, &scales);
            for tensor in &summary.tensors {
                let number = run.label.rsplit_once(" run ").map_or("", |(_, run)| run);
                let wanted = format!("{number} {}", tensor.name);
                let row = rows.iter().find(|row| row.0 == wanted.trim()).unwrap();
                let size = (row.2 - row.1) / 64.0;
                let amax = row.1.abs().max(row.2.abs());
                for spread in &tensor.bounded.spreads {
                    let threshold = 2f64.powi(-25) / f64::from(spread.loss_scale);
                    let reach = |i: usize| {
                        let (a, b) = (row.1 + i as f64 * size, row.1 + (i + 1) as f64 * size);
                        if a <= 0.0 && b >= 0.0 {
                            0.0
                        } else {
                            a.abs().min(b.abs())
                        }
                    };
                    let counted: u64 = (0..64)
                        .filter(|&i| reach(i) <= threshold)
                        .map(|i| row.3[i])
                        .sum();
                    let high = spread.high.underflow_to_zero;
                    // The smallest and the largest element are known, and are no zeros: up to two fewer.
                    assert!(
                        high + 2 >= counted,
                        "{wanted} at {}: {high} of {counted}",
                        spread.loss_scale
                    );
                    // Edges are widened by what f32 may misplace: more only where an edge lies that near.
                    if high > counted {
                        let near = (0..64).any(|i| {
                            reach(i) > threshold
                                && reach(i) <= threshold + amax / f64::from(1 << 20)
                        });
                        assert!(
                            near,
                            "{wanted} at {}: {high} of {counted}",
                            spread.loss_scale
                        );
                    }
                    if amax > threshold && reach(0) > threshold && reach(63) > threshold {
                        let whole = (0..64).any(|i| {
                            let (a, b) = (row.1 + i as f64 * size, row.1 + (i + 1) as f64 * size);
                            a.abs().max(b.abs()) <= threshold * 1.01
                        });
                        assert!(whole || spread.low.underflow_to_zero == 0, "{wanted}");
                    }
                    compared += 1;
                }
            }
        }
        assert!(compared > 2000, "{name}: {compared}");
    }
}

#[test]
fn the_cnn_loses_20_and_12_biases_at_scale_1_and_is_usable_from_2_to_11_and_2_to_14() {
    let runs = runs("wandb_cnn_grad_hist.csv");
    let steps: Vec<u64> = runs.iter().map(|run| run.trace.steps[0].step).collect();
    assert_eq!(steps, [0, 19, 459]);
    let expected = [
        // tensors, amax range, flushed at scale 1, usable from and to
        (64, (-35.0, -2.8), 20, (11, 18)),
        (40, (-37.8, -2.9), 12, (14, 18)),
        (28, (-18.6, -6.3), 0, (-5, 22)),
    ];
    let scales: Vec<f32> = (0..=22).map(|e| 2f32.powi(e)).collect();
    for (run, (tensors, amax, flushed, (from, until))) in runs.iter().zip(expected) {
        let summary = summary(run, &scales);
        assert_eq!(summary.tensors.len(), tensors, "{}", run.label);
        let (low, high) = range(&amax_log2(run, 0, Role::Parameter));
        assert_eq!((tenth(low), tenth(high)), amax, "{}", run.label);
        let named = summary.wholly_flushed();
        assert_eq!(named.len(), flushed, "{}", run.label);
        assert!(named.iter().all(|tensor| tensor.name.ends_with("bias")));
        for tensor in named {
            // Whole means every nonzero element, with nothing left open; and none at the usable scale's largest.
            assert_eq!(tensor.bounded.spreads[0].underflow_fraction(), (1.0, 1.0));
            let at = &tensor.bounded.spreads[from as usize];
            assert!(at.underflow_fraction().0 < 1.0, "{}", tensor.name);
        }
        assert_eq!(summary.fits_from_log2, Some(from), "{}", run.label);
        assert_eq!(summary.fits_until_log2, Some(until), "{}", run.label);
        let over = |e: usize| &summary.all.spreads[e];
        assert_eq!(over(until as usize).high.overflow_to_infinity, 0);
        if let Some(next) = summary.all.spreads.get(until as usize + 1) {
            assert!(next.low.overflow_to_infinity > 0);
        }
    }
}

#[test]
fn resnet_overflows_above_2_to_13_and_then_2_to_15_so_a_start_at_2_to_16_halves_three_times() {
    let runs = runs("msprobe_resnet50_gpu_grad_stats.csv");
    let [run] = runs.as_slice() else {
        panic!("one run");
    };
    let tensors = |role: Role| run.trace.tensors.iter().filter(|t| t.role == role).count();
    // A weight gradient bears the number of its call, and so two names in two steps.
    assert_eq!(tensors(Role::Parameter), 2 * 161);
    assert_eq!(tensors(Role::ActivationGradient), 645);
    let weights = amax_log2(run, 0, Role::Parameter);
    let (low, high) = range(&weights);
    assert_eq!((tenth(low), tenth(high)), (-9.8, 2.8));
    assert_eq!(tenth(range(&amax_log2(run, 1, Role::Parameter)).1), 0.2);
    let backward: Vec<f64> = (0..2)
        .flat_map(|row| amax_log2(run, row, Role::ActivationGradient))
        .collect();
    let (low, high) = range(&backward);
    assert_eq!((tenth(low), tenth(high)), (-16.0, 2.8));
    let amax = |row: usize| {
        let all = (0..run.trace.tensors.len()).filter_map(|n| run.trace.amax_at(row, n));
        all.reduce(f32::max).unwrap()
    };
    let until = |row: usize| {
        let limits = Limits::of_amax(amax(row));
        (0..32)
            .rfind(|&e| limits.at(2f32.powi(e)) == Verdict::Clean)
            .unwrap()
    };
    assert_eq!((until(0), until(1)), (13, 15));
    let mut policy = PolicySpec::parse("pytorch")
        .unwrap()
        .build(Defaults::Framework)
        .unwrap();
    let limits = Limits::of_amax(amax(0));
    let mut halvings = 0;
    while limits.at(policy.loss_scale() as f32) == Verdict::Overflow {
        policy
            .update(Observed {
                found_inf: true,
                amax: None,
            })
            .unwrap();
        halvings += 1;
    }
    assert_eq!((halvings, policy.loss_scale()), (3, 8192.0));
}

/// The root mean squares, read anew, as the statistics have them: amax/√n ≤ rms ≤ amax in all 1612 rows.
#[test]
fn resnets_root_mean_squares_lie_between_their_bounds() {
    let text = std::fs::read_to_string(data("msprobe_resnet50_gpu_grad_stats.csv")).unwrap();
    let (mut weights, mut backward, mut checked) = (Vec::new(), Vec::new(), 0);
    for line in text.lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        let number = |i: usize| cells[i].parse::<f64>().unwrap();
        let (n, amax) = (number(5), number(6).abs().max(number(7).abs()));
        let rms = number(9) / n.sqrt();
        assert!(
            amax / n.sqrt() <= rms * 1.0001 && rms <= amax * 1.0001,
            "{line}"
        );
        checked += 1;
        if rms > 0.0 {
            match (cells[1], cells[0]) {
                ("weight_grad", "0") => weights.push(rms.log2()),
                ("activation_grad", _) => backward.push(rms.log2()),
                _ => {}
            }
        }
    }
    assert_eq!(checked, 1612);
    let (low, high) = range(&weights);
    assert_eq!((tenth(low), tenth(high)), (-11.9, 0.6));
    assert_eq!(tenth(range(&backward).0), -17.2);
}

/// Amax decides overflow of each tensor, exactly: some element does, or none.
#[test]
fn statistics_decide_overflow_by_yes_or_no() {
    for run in runs("msprobe_resnet50_gpu_grad_stats.csv") {
        for placed in &run.histograms {
            let amax = run.trace.amax_at(placed.row, placed.tensor).unwrap();
            for exponent in 0..32 {
                let scale = 2f32.powi(exponent);
                let spread = placed
                    .histogram
                    .replay(gradscale::float::FP16, scale, false);
                let overflows = Limits::of_amax(amax).at(scale) == Verdict::Overflow;
                assert_eq!(spread.high.overflow_to_infinity > 0, overflows);
                assert_eq!(spread.low.overflow_to_infinity > 0, overflows);
            }
        }
    }
}

#[test]
fn fp8_percentages_are_refused_with_what_they_do_show() {
    let name = "te_fp8_llama7b_h100_underflow.csv";
    let refused = read(&data(name), &gradients::Options::new(), false).unwrap_err();
    assert!(matches!(refused, HistogramError::Fp8 { .. }), "{refused}");
    let shares = read_fp8(&data(name)).unwrap();
    let fc1 = |run: &str| -> Vec<f64> {
        let of_run = shares
            .iter()
            .filter(|s| s.run == run && s.tensor.ends_with("fc1_gradient"));
        let mut percents: Vec<f64> = of_run.map(|s| 100.0 * s.fraction).collect();
        percents.sort_by(f64::total_cmp);
        percents
    };
    let two = fc1("bf16_edges_2");
    let (rest, last) = two.split_at(two.len() - 2);
    // Nearly all layers.
    let usual = rest
        .iter()
        .filter(|p| (0.026..=0.0605).contains(*p))
        .count();
    assert!(usual * 10 >= rest.len() * 8, "{rest:?}");
    assert!((last[0] - 0.44).abs() < 0.005, "{last:?}");
    assert!((last[1] - 3.8).abs() < 0.05, "{last:?}");
    let four = fc1("bf16_edges_4");
    assert!((four[four.len() - 1] - 4.6).abs() < 0.05, "{four:?}");
    assert!(shares.iter().any(|s| s.largest > Some(0.03)));

    for (name, parts) in [
        (
            name,
            [
                "3.83 % in layer 30 fc1_gradient, 0.443 %",
                "4.65 %",
                "bf16_edges_4",
            ],
        ),
        (
            "te_fp8_small_runs_underflow.csv",
            ["21.5 % at iteration 0", "at 240", "79"],
        ),
    ] {
        let path = data(name);
        for command in ["analyze", "report"] {
            let folder = tempfile::tempdir().unwrap();
            let mut args = vec![command, path.to_str().unwrap()];
            if command == "report" {
                args.extend(["-o", folder.path().to_str().unwrap()]);
            }
            let (status, out, err) = run(&args);
            assert_eq!(status, Some(2), "{err}");
            assert!(out.is_empty());
            assert!(
                err.contains("FP8") && err.contains("no loss scale"),
                "{err}"
            );
            for part in parts {
                assert!(err.contains(part), "{part}: {err}");
            }
        }
    }
}

#[test]
fn fp8_underflow_falls_from_the_first_iteration_to_the_last() {
    let shares = read_fp8(&data("te_fp8_small_runs_underflow.csv")).unwrap();
    let at = |run: &str, iteration: u64| -> Vec<f64> {
        let of_run = shares
            .iter()
            .filter(|s| s.run == run && s.iteration == Some(iteration));
        of_run.map(|s| 100.0 * s.fraction).collect()
    };
    let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
    let first = at("esm2", 0);
    assert_eq!(first.len(), 6);
    assert!(
        first.iter().all(|p| (p - 21.4681).abs() < 1e-9),
        "{first:?}"
    );
    assert!((mean(at("llama3", 0)) - 79.0).abs() < 1.0);
    assert!((mean(at("esm2", 240)) - 0.06).abs() < 0.01);
    assert!((mean(at("llama3", 240)) - 0.46).abs() < 0.01);
    assert_eq!(shares.len(), (6 + 2) * 25);
}

#[test]
fn the_report_names_what_is_flushed_says_what_is_usable_and_cannot_tell_the_interval() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let path = data("wandb_cnn_grad_hist.csv");
    let (status, said, err) = run(&["report", path.to_str().unwrap(), "-o", out]);
    assert_eq!(status, Some(0), "{err}");
    assert!(said.contains("Usable scales: 2^11 to 2^18"), "{said}");
    let text = std::fs::read_to_string(folder.path().join("report.json")).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    let first = &json["runs"][0];
    assert_eq!(first["verdict"], "cannot_tell");
    assert!(first["growth_interval"].is_null());
    assert!(first["why"].as_str().unwrap().contains("step,amax"));
    let histograms = &first["histograms"];
    assert_eq!(histograms["usable_scales"]["from"], 2048.0);
    assert_eq!(histograms["usable_scales"]["to"], 262144.0);
    let flushed = histograms["flushed_wholly"].as_array().unwrap();
    assert_eq!(flushed.len(), 20);
    let page = std::fs::read_to_string(folder.path().join("report.html")).unwrap();
    for tensor in flushed {
        let name = tensor["tensor"].as_str().unwrap();
        assert!(page.contains(name) && err.contains(name), "{name}");
    }
    assert!(page.contains("normalisation layer"));
    assert!(page.contains("underflow to zero: at most"), "bands");
    assert!(!page.contains("Replays"), "one step is no run to replay");
    for index in 0..3 {
        assert!(folder.path().join(format!("run{index}-rates.svg")).exists());
    }
}

#[test]
fn a_hostile_name_in_a_histogram_is_escaped_on_the_page() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("gradients.csv");
    let rows = "step,param,n,bin_lo,bin_hi,counts\n0,<script>alert(1)</script>,2,-1e-9,1e-9,1 1\n1,<script>alert(1)</script>,2,-1e-9,1e-9,1 1\n";
    std::fs::write(&table, rows).unwrap();
    let out = folder.path().join("report");
    let args = [
        "report",
        table.to_str().unwrap(),
        "-o",
        out.to_str().unwrap(),
    ];
    assert_eq!(run(&args).0, Some(0));
    for file in ["report.html", "headroom.svg"] {
        let page = std::fs::read_to_string(out.join(file)).unwrap();
        assert!(!page.contains("<script>alert"), "{file}");
        assert!(page.contains("&lt;script&gt;"), "{file}");
    }
}

#[test]
fn analyze_prints_intervals_and_gives_bounds_in_json() {
    let path = data("wandb_speechsep_grad_hist.csv");
    let path = path.to_str().unwrap();
    let (_, table, _) = run(&["analyze", path, "--by", "all"]);
    assert!(table.contains("0..63.3 %"), "{table}");
    let (status, json, _) = run(&["analyze", path, "--json", "--scales", "1,65536"]);
    assert_eq!(status, Some(0));
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["inputs"][0]["kind"], "histogram");
    let rate = &json["groups"][0]["rates"][0];
    assert_eq!(rate["exact"], false);
    assert_eq!(rate["why_not_exact"], "histogram");
    let count = rate["underflow_to_zero"].as_u64().unwrap();
    let bounds = &rate["bounds"]["underflow_to_zero"];
    assert!(bounds[0].as_u64().unwrap() <= count && count <= bounds[1].as_u64().unwrap());
    for class in ["subnormal", "normal", "overflow_to_infinity", "zero_in"] {
        assert_eq!(rate["bounds"][class].as_array().unwrap().len(), 2);
    }
    let outcomes = [
        "underflow_to_zero",
        "subnormal",
        "normal",
        "overflow_to_infinity",
    ];
    let counted: u64 = outcomes.iter().map(|o| rate[*o].as_u64().unwrap()).sum();
    let zeros = json["groups"][0]["zeros"].as_u64().unwrap();
    assert_eq!(counted + zeros, 7_561_985, "counts add up");
}

/// A gate whose limit lies inside the bounds cannot be told (2); one that the bounds keep or break, can.
#[test]
fn a_gate_cannot_tell_where_the_limit_lies_inside_the_bounds() {
    let path = data("wandb_speechsep_grad_hist.csv");
    let path = path.to_str().unwrap();
    let gate = |args: &[&str]| run(&[&["analyze", "-q", path], args].concat()).0;
    assert_eq!(gate(&["--max-underflow", "1%", "--at", "1024"]), Some(2));
    assert_eq!(gate(&["--max-underflow", "70%", "--at", "1024"]), Some(0));
    assert_eq!(gate(&["--max-overflow", "0", "--at", "32768"]), Some(0));
    assert_eq!(gate(&["--max-overflow", "0", "--at", "65536"]), Some(1));
}

/// Unknown zeros do not hide that every nonzero element of a tensor is flushed; a run without the tensor is passed over.
#[test]
fn a_gate_is_shut_by_a_tensor_that_is_flushed_as_a_whole() {
    let path = data("wandb_cnn_grad_hist.csv");
    let path = path.to_str().unwrap();
    let gate = |glob: &str, scale: &str| {
        let args = ["analyze", "-q", path, "--tensors", glob, "--any-tensor"];
        run(&[&args[..], &["--max-underflow", "99%", "--at", scale]].concat())
    };
    assert_eq!(gate("layer2.1.first_conv.bias", "1").0, Some(1));
    assert_eq!(gate("layer5.1.norm.bias", "1").0, Some(0));
    let (status, _, err) = gate("nothing.at.all", "1");
    assert_eq!(status, Some(2));
    assert!(err.contains("no gradient"), "{err}");
}

#[test]
fn what_needs_counts_refuses_histograms() {
    let path = data("wandb_cnn_grad_hist.csv");
    let path = path.to_str().unwrap();
    let summary = data("wandb-summary.json");
    let summary = summary.to_str().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("trace");
    let out = out.to_str().unwrap();
    for args in [
        vec!["sketch", summary, "-o", out],
        vec!["compare", summary, summary],
        vec!["analyze", summary, summary, "--as-ranks"],
    ] {
        let (status, stdout, err) = run(&args);
        assert_eq!(status, Some(2), "{args:?}: {err}");
        assert!(stdout.is_empty());
        assert!(err.contains("only bound the counts"), "{args:?}: {err}");
    }
    assert_eq!(run(&["recommend", path]).0, Some(2), "too few steps");
    assert_eq!(run(&["compare", path, path]).0, Some(2), "three runs");
}
