//! The true counts lie within the bounds: of the fixtures beside their raw gradients, and of random tensors.

use crate::data;
use gradscale::analysis::{Analysis, By, Group, Options, analyze};
use gradscale::float::{FORMATS, FP16, Format, Outcome};
use gradscale::gradients;
use gradscale::input::{Input, Silent};
use gradscale::kernel::Backend;
use gradscale::tally::{Histogram, Moments, Outcomes, Spread};
use proptest::prelude::*;

fn analyzed(name: &str, by: By, format: Format, scales: &[f32]) -> Analysis {
    let reading = gradients::Options::new();
    let input = Input::open(&data(name), &reading, false).unwrap();
    let options = Options {
        format,
        scales: scales.to_vec(),
        by,
        errors: false,
        flush_subnormals: false,
        backend: Backend::parse("auto").unwrap(),
    };
    analyze(&[input], &options, &reading, &Silent).unwrap()
}

fn classes(o: &Outcomes) -> [u64; 5] {
    [
        o.zero_in,
        o.underflow_to_zero,
        o.subnormal,
        o.normal,
        o.overflow_to_infinity,
    ]
}

/// What of a raw group's name a fixture calls it.
fn named(kind: &str, tensor: &str) -> String {
    if kind != "msprobe" {
        return tensor.to_owned();
    }
    let (layer, parameter) = tensor
        .strip_prefix("gradients/")
        .unwrap()
        .split_once('.')
        .unwrap();
    format!("Module.{layer}.Layer.parameters_grad.{parameter}[0]")
}

#[track_caller]
fn within(truth: &Group, bounded: &Group, what: &str) {
    for (truth, bounds) in truth.rates.iter().zip(&bounded.rates) {
        let what = format!("{what} at {}", truth.loss_scale);
        let (low, high) = bounds.bounds.unwrap();
        let (low, high) = (classes(&low), classes(&high));
        let point = classes(&bounds.outcomes);
        for (class, count) in classes(&truth.outcomes).into_iter().enumerate() {
            assert!(
                (low[class]..=high[class]).contains(&count),
                "{what}, class {class}: {count} of {low:?}..{high:?}"
            );
            assert!(
                class == 0 || (low[class]..=high[class]).contains(&point[class]),
                "{what}: point {point:?} of {low:?}..{high:?}"
            );
        }
        let shares = bounds.shares.unwrap();
        // The raw L2 share is within 1e-3 of the truth; the other shares are quotients of the same sums.
        for (share, (least, most), error) in [
            (truth.outcomes.underflow_fraction(), shares.underflow, 1e-12),
            (truth.outcomes.overflow_fraction(), shares.overflow, 1e-12),
            (truth.lost.l1, shares.l1, 1e-9),
            (truth.lost.l2, shares.l2, 1e-3),
        ] {
            assert!(
                share >= least - error && share <= most + error,
                "{what}: {share} of {least}..{most}"
            );
        }
    }
}

const FIXTURES: [&str; 5] = [
    "tensorboard",
    "tensorboard_tf2",
    "wandb-history.jsonl",
    "wandb-summary.json",
    "msprobe",
];

#[test]
fn what_a_scale_really_does_lies_within_the_bounds_of_every_kind_of_file() {
    let mut scales: Vec<f32> = (-30..=40).map(|e| 2f32.powi(e)).collect();
    scales.extend([0.003, 1000.0, 65520.0, 3.3e7]);
    let mut compared = 0;
    for format in FORMATS {
        for by in [By::Tensor, By::Step] {
            let raw = analyzed("raw", by, format, &scales);
            for kind in FIXTURES {
                let histograms = analyzed(kind, by, format, &scales);
                assert!(!histograms.groups.is_empty(), "{kind}");
                for bounded in &histograms.groups {
                    let truth = raw.groups.iter().find(|group| match &group.tensor {
                        Some(tensor) => Some(named(kind, tensor)) == bounded.tensor,
                        None => group.step == bounded.step,
                    });
                    let truth = truth.unwrap_or_else(|| panic!("{kind}: {:?}", bounded.tensor));
                    // A summary is one step, and the plugin's fixture leaves out the tensor with an inf.
                    let whole = bounded.bounded.as_ref().unwrap().elements;
                    let lost = truth.sketch.elements() - whole;
                    if lost > truth.sketch.nonfinite() {
                        assert!(matches!(kind, "wandb-summary.json" | "tensorboard_tf2"));
                        continue;
                    }
                    within(
                        truth,
                        bounded,
                        &format!("{kind} {} {:?}", format.name, bounded.tensor),
                    );
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 150, "{compared}");
}

/// TensorBoard's bins are a tenth wide, so its bounds are close; nothing else than the zeros is left open at scale 2^10.
#[test]
fn torchs_histograms_bound_underflow_closely() {
    let histograms = analyzed("tensorboard", By::Tensor, FP16, &[1024.0]);
    let wide = histograms
        .groups
        .iter()
        .find(|group| group.tensor.as_deref() == Some("gradients/wide.weight"))
        .unwrap();
    let (low, high) = wide.rates[0].shares.unwrap().underflow;
    assert!(low > 0.0 && high - low < 0.002, "{low}..{high}");
}

#[test]
fn scalars_of_scale_and_flag_are_those_of_their_steps() {
    let reading = gradients::Options::new();
    let input = Input::open(&data("tensorboard"), &reading, false).unwrap();
    assert_eq!(input.used_scale(&reading).unwrap(), Some(32768.0));
    let Input::Histograms { runs, .. } = input else {
        panic!("no histograms");
    };
    let steps = &runs[0].trace.steps;
    assert_eq!(steps.len(), 2);
    assert_eq!(
        (steps[0].loss_scale, steps[0].found_inf, steps[0].loss),
        (Some(65536.0), Some(false), Some(0.5))
    );
    assert_eq!(
        (steps[1].loss_scale, steps[1].found_inf),
        (Some(32768.0), Some(true))
    );
    let said: Vec<&str> = runs[0].warnings.iter().map(|w| w.seen.as_str()).collect();
    assert!(
        said.iter()
            .any(|s| s.contains("amp/loss_scale") && s.contains("amp/found_inf")),
        "{said:?}"
    );
    assert!(
        said.iter().any(|s| s.contains("weights/conv.weight")),
        "{said:?}"
    );
}

#[test]
fn tags_are_chosen_by_glob_and_a_dump_scale_is_divided_out() {
    let reading = gradients::Options::new()
        .with_tensors(["weights/*"])
        .unwrap();
    let Input::Histograms { runs, .. } =
        Input::open(&data("tensorboard"), &reading, false).unwrap()
    else {
        panic!("no histograms");
    };
    assert_eq!(runs[0].trace.tensors.len(), 1);
    assert_eq!(runs[0].trace.tensors[0].name, "weights/conv.weight");
    let amax = |reading: &gradients::Options| {
        let Input::Histograms { runs, .. } =
            Input::open(&data("tensorboard"), reading, false).unwrap()
        else {
            panic!("no histograms");
        };
        let trace = &runs[0].trace;
        let tensor = trace
            .tensors
            .iter()
            .position(|tensor| tensor.name == "gradients/conv.weight")
            .unwrap();
        [
            trace.amax_at(0, tensor).unwrap(),
            trace.amax_at(1, tensor).unwrap(),
        ]
    };
    let plain = amax(&gradients::Options::new());
    let by_eight = gradients::Options::new()
        .with_dump_scale(gradients::DumpScale::Value(8.0))
        .unwrap();
    assert_eq!(amax(&by_eight), plain.map(|amax| amax / 8.0));
    let auto = gradients::Options::new()
        .with_dump_scale(gradients::DumpScale::Auto)
        .unwrap();
    assert_eq!(amax(&auto), [plain[0] / 65536.0, plain[1] / 32768.0]);
}

/// Outcomes and lost norms of values, one by one.
fn truth(values: &[f32], format: Format, scale: f32) -> (Outcomes, f64, f64) {
    let mut counts = Outcomes::default();
    let (mut l1, mut l2) = ((0.0, 0.0), (0.0, 0.0));
    for &value in values {
        let size = f64::from(value).abs();
        l1.1 += size;
        l2.1 += size * size;
        match format.outcome(value, scale) {
            Outcome::ZeroIn => counts.zero_in += 1,
            Outcome::NonfiniteIn => counts.nonfinite_in += 1,
            Outcome::UnderflowToZero => {
                counts.underflow_to_zero += 1;
                l1.0 += size;
                l2.0 += size * size;
            }
            Outcome::Subnormal => counts.subnormal += 1,
            Outcome::Normal => counts.normal += 1,
            Outcome::OverflowToInfinity => counts.overflow_to_infinity += 1,
        }
    }
    let share = |(part, whole): (f64, f64)| if whole > 0.0 { part / whole } else { 0.0 };
    (counts, share(l1), share(l2).sqrt())
}

fn holds(values: &[f32], histogram: &Histogram, format: Format, scale: f32) {
    let spread: Spread = histogram.replay(format, scale, false);
    let (counts, l1, l2) = truth(values, format, scale);
    let (low, high) = (classes(&spread.low), classes(&spread.high));
    for (class, count) in classes(&counts).into_iter().enumerate() {
        assert!(
            (low[class]..=high[class]).contains(&count),
            "{} at {scale}, class {class}: {count} of {low:?}..{high:?}",
            format.name
        );
    }
    let close = |value: f64, (least, most): (f64, f64)| {
        assert!(
            value >= least * (1.0 - 1e-9) - 1e-12 && value <= most * (1.0 + 1e-9) + 1e-12,
            "{} at {scale}: {value} of {least}..{most}",
            format.name
        );
    };
    close(counts.underflow_fraction(), spread.underflow_fraction());
    close(counts.overflow_fraction(), spread.overflow_fraction());
    close(l1, spread.l1_fraction());
    close(l2, spread.l2_fraction());
    assert_eq!(spread.point.elements(), values.len() as u64);
}

/// Magnitudes over the whole range, thresholds at scale 1 among them, and many zeros.
fn value() -> impl Strategy<Value = f32> {
    let magnitude = prop_oneof![
        6 => (-60f32..30.0).prop_map(f32::exp2),
        2 => (-30i32..20).prop_map(|e| 2f32.powi(e)),
        1 => Just(65520.0f32),
        2 => Just(0.0f32),
    ];
    (magnitude, any::<bool>()).prop_map(|(x, negative)| if negative { -x } else { x })
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: Some(Box::new(prop::test_runner::FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::with_cases(400)
    })]

    #[test]
    fn bins_of_any_edges_hold_the_truth(
        mut values in prop::collection::vec(value(), 1..60),
        mut edges in prop::collection::vec(value(), 0..12),
        exponent in -20i32..40,
        odd in 1f32..2.0,
    ) {
        values.sort_by(f32::total_cmp);
        let (min, max) = (values[0], values[values.len() - 1]);
        edges.push(min);
        edges.push(max);
        edges.retain(|edge| (min..=max).contains(edge));
        edges.sort_by(f32::total_cmp);
        // Left-closed and right-closed bins, as different writers fill them.
        for right in [false, true] {
            let mut bins: Vec<(f64, f64, u64)> = edges
                .windows(2)
                .map(|pair| (f64::from(pair[0]), f64::from(pair[1]), 0))
                .collect();
            if bins.is_empty() {
                bins.push((min.into(), max.into(), 0));
            }
            for &value in &values {
                let x = f64::from(value);
                let fits = |bin: &(f64, f64, u64)| bin.0 <= x && x <= bin.1;
                let place = if right { bins.iter().position(fits) } else { bins.iter().rposition(fits) };
                bins[place.unwrap()].2 += 1;
            }
            let ends = [(min.into(), min.into()), (max.into(), max.into())];
            for ends in [None, Some(ends)] {
                let histogram = Histogram::from_bins(&bins, ends).unwrap();
                for format in FORMATS {
                    holds(&values, &histogram, format, 2f32.powi(exponent));
                    holds(&values, &histogram, format, 2f32.powi(exponent) * odd);
                }
            }
        }
    }

    #[test]
    fn statistics_alone_hold_the_truth(
        values in prop::collection::vec(value(), 1..60),
        few in any::<bool>(),
        exponent in -20i32..40,
    ) {
        // Elements of nearly one size are where the inequalities bite.
        let values: Vec<f32> = if few { values.iter().map(|x| x.signum() * (1.0 + x.abs().min(1.0))).collect() } else { values };
        let min = values.iter().copied().fold(f32::INFINITY, f32::min);
        let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = values.iter().map(|&x| f64::from(x)).sum();
        let squares: f64 = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let range = (f64::from(min), f64::from(max));
        let bins = [(range.0, range.1, values.len() as u64)];
        let ends = [(range.0, range.0), (range.1, range.1)];
        let histogram = Histogram::from_bins(&bins, Some(ends)).unwrap().with_moments(Moments {
            range,
            sum: Some(sum),
            squares: Some(squares),
        });
        for format in FORMATS {
            holds(&values, &histogram, format, 2f32.powi(exponent));
        }
    }
}

#[test]
fn a_norm_near_its_largest_leaves_few_elements_to_underflow() {
    // 100 elements of at most 1 whose squares add up to 99: at most one of them is tiny.
    let histogram = Histogram::from_bins(&[(-1.0, 1.0, 100)], None)
        .unwrap()
        .with_moments(Moments {
            range: (-1.0, 1.0),
            sum: None,
            squares: Some(99.0),
        });
    let spread = histogram.replay(FP16, 1.0, false);
    assert_eq!(spread.high.underflow_to_zero, 1);
    // And a norm far below n·t² leaves few to be large: 100 elements, squares 10^-20, t = 2^-25.
    let histogram = Histogram::from_bins(&[(-1e-10, 1e-10, 100)], None)
        .unwrap()
        .with_moments(Moments {
            range: (-1.0, 1.0),
            sum: None,
            squares: Some(1e-20),
        });
    assert_eq!(histogram.replay(FP16, 1.0, false).high.normal, 0);
}
