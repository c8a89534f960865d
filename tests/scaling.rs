//! Replays: the jumping one against the stepping one, bounds against enumeration, real runs against their record.

use gradscale::scaling::policy::{Change, Defaults, Observed, Policy, PolicySpec};
use gradscale::scaling::{
    Limits, Options, Run, RunOptions, Segment, Timeline, Verdict, cost, recommend, simulate,
};
use gradscale::tally::{Sample, Sketch, Step, TensorInfo, Trace, series};
use proptest::prelude::*;
use std::path::Path;

fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: Some(Box::new(
            prop::test_runner::FileFailurePersistence::WithSource("regressions"),
        )),
        ..ProptestConfig::with_cases(256)
    }
}

fn run_of(limits: Vec<Limits>) -> Run {
    let amax = vec![None; limits.len()];
    let mut run = Run::new(&Trace::default(), RunOptions::default());
    run.recorded = limits.len() as u64;
    run.recorded_scale = vec![None; limits.len()];
    run.amax = amax;
    run.limits = limits;
    run
}

/// A step that overflows from some power of two on, never, always, or is undecided in between.
fn limits() -> impl Strategy<Value = Limits> {
    prop_oneof![
        10 => (10i32..26).prop_map(|k| Limits { clean_below: 2f32.powi(k), overflow_from: 2f32.powi(k) }),
        6 => Just(Limits::NEVER),
        1 => Just(Limits::ALWAYS),
        1 => (0i32..20, 0i32..8).prop_map(|(k, gap)| Limits {
            clean_below: 2f32.powi(k),
            overflow_from: 2f32.powi(k + gap),
        }),
        1 => (0i32..20).prop_map(|k| Limits { clean_below: 0.0, overflow_from: 2f32.powi(k) }),
    ]
}

fn policy() -> impl Strategy<Value = String> {
    let interval = 1u64..40;
    prop_oneof![
        (interval.clone(), 8i32..24).prop_map(|(n, s)| format!("pytorch:growth_interval={n},init_scale=2^{s}")),
        (interval.clone(), 1i64..4, any::<bool>()).prop_map(|(n, h, c)| format!(
            "deepspeed:scale_window={n},delayed_shift={h},consecutive_hysteresis={c},raise_error_at_min_scale={}", n % 2 == 0)),
        (interval.clone(), 1i64..4).prop_map(|(n, h)| format!("deepspeed-legacy:scale_window={n},delayed_shift={h}")),
        (interval.clone(), 1i64..4).prop_map(|(n, h)| format!("megatron:growth_interval={n},hysteresis={h}")),
        (interval.clone(), 0u32..3).prop_map(|(n, t)| format!("fairseq:scale_window={n},tolerance={}", f64::from(t) / 10.0)),
        (8i32..24, any::<bool>()).prop_map(|(s, skip)| format!("static:scale=2^{s},skip_on_overflow={skip}")),
        // Every other policy that has an interval, at its own defaults beside it.
        (interval, prop::sample::select(gradscale::scaling::policy::policies().to_vec())).prop_map(|(n, info)| {
            let spec = PolicySpec::named(info.name).unwrap();
            match spec.has("growth_interval") && spec.with("growth_interval", n as i64).is_ok() {
                true => format!("{}:growth_interval={n}", info.name),
                false => info.name.to_owned(),
            }
        }),
    ]
}

/// (step, scale, overflowed, skipped, change) of every step.
type History = Vec<(usize, u64, bool, bool, Change)>;

fn stepped(limits: &[Limits], policy: &mut dyn Policy) -> History {
    let mut history = History::new();
    for (at, limits) in limits.iter().enumerate() {
        let scale = policy.loss_scale();
        let overflowed = limits.at(scale as f32) == Verdict::Overflow;
        match policy.update(Observed {
            found_inf: overflowed,
            amax: None,
        }) {
            Ok(update) => history.push((
                at,
                scale.to_bits(),
                overflowed,
                update.skipped,
                update.change,
            )),
            Err(_) => {
                history.push((at, scale.to_bits(), overflowed, true, Change::Kept));
                break;
            }
        }
    }
    history
}

fn jumped(timeline: &Timeline<'_>, policy: &mut dyn Policy) -> History {
    let mut history = History::new();
    timeline.replay(policy, &mut |segment: &Segment| {
        for at in segment.from..segment.to {
            history.push((
                at,
                segment.scale.to_bits(),
                segment.overflowed,
                segment.skipped,
                segment.change,
            ));
        }
    });
    history
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn jumping_replays_what_stepping_replays(limits in prop::collection::vec(limits(), 1..400), policy in policy()) {
        let spec = PolicySpec::parse(&policy).unwrap();
        let run = run_of(limits);
        let timeline = Timeline::new(&run);
        let mut slow = spec.build(Defaults::Framework).unwrap();
        let mut fast = spec.build(Defaults::Framework).unwrap();
        prop_assert_eq!(stepped(&run.limits, slow.as_mut()), jumped(&timeline, fast.as_mut()));
        prop_assert_eq!(slow.loss_scale().to_bits(), fast.loss_scale().to_bits());
        prop_assert_eq!(slow.counters(), fast.counters());
    }

    #[test]
    fn bounds_equal_those_of_all_readings(limits in prop::collection::vec(limits(), 1..60), policy in policy()) {
        let unknown = |scale: f64, at: usize, limits: &[Limits]| limits[at].at(scale as f32) == Verdict::Unknown;
        let spec = PolicySpec::parse(&policy).unwrap();
        let run = run_of(limits.clone());
        let simulated = simulate(&Timeline::new(&run), spec.build(Defaults::Framework).unwrap().as_ref());
        // Every reading, depth first; histories with too many undecided steps are left to the other cases.
        let (mut low, mut high, mut leaves) = (u64::MAX, 0, 0);
        let mut open = vec![(0usize, spec.build(Defaults::Framework).unwrap(), 0u64)];
        while let Some((at, policy, skips)) = open.pop() {
            if at == limits.len() {
                low = low.min(skips);
                high = high.max(skips);
                leaves += 1;
                if leaves > 4096 {
                    return Ok(());
                }
                continue;
            }
            let readings = match limits[at].at(policy.loss_scale() as f32) {
                Verdict::Overflow => vec![true],
                _ if unknown(policy.loss_scale(), at, &limits) => vec![false, true],
                _ => vec![false],
            };
            for found_inf in readings {
                let mut next = policy.clone();
                match next.update(Observed { found_inf, amax: None }) {
                    Ok(update) => open.push((at + 1, next, skips + u64::from(update.skipped))),
                    Err(_) => {
                        low = low.min(skips + 1);
                        high = high.max(skips + 1);
                    }
                }
            }
        }
        prop_assert!(simulated.skipped.tight);
        prop_assert_eq!((simulated.skipped.low, simulated.skipped.high), (low, high));
    }

    #[test]
    fn a_replay_that_never_grows_is_that_of_every_larger_interval(limits in prop::collection::vec(limits(), 1..200), n in 1u64..200, more in 1u64..200) {
        let run = run_of(limits);
        let timeline = Timeline::new(&run);
        for name in ["pytorch", "deepspeed", "megatron", "fairseq"] {
            let at = |n: u64| {
                let spec = PolicySpec::named(name).unwrap().with("growth_interval", n as i64).unwrap();
                cost(&timeline, spec.build(Defaults::Framework).unwrap().as_ref())
            };
            let small = at(n);
            if small.growths == 0 {
                prop_assert_eq!(small, at(n + more));
            }
        }
    }
}

fn series_run(name: &str) -> Run {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/closed_loop")
        .join(name);
    Run::new(&series::read(&path).unwrap()[0], RunOptions::default())
}

#[test]
fn a_real_run_replayed_at_its_own_interval_gives_its_own_skips() {
    for interval in [10, 25, 50, 100] {
        let run = series_run(&format!("cnn_fp16_interval{interval}.csv"));
        let spec = PolicySpec::parse(&format!("pytorch:growth_interval={interval}")).unwrap();
        let simulated = simulate(
            &Timeline::new(&run),
            spec.build(Defaults::Framework).unwrap().as_ref(),
        );
        let real = run
            .limits
            .iter()
            .filter(|l| l.clean_below < l.overflow_from)
            .count() as u64;
        assert_eq!(simulated.cost.skipped, real, "interval {interval}");
        assert!(simulated.skipped.low <= real && real <= simulated.skipped.high);
    }
}

#[test]
fn predicted_skips_of_a_real_run_equal_the_reference_replay() {
    let text = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/closed_loop/expected.json"),
    )
    .unwrap();
    let expected: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut compared = 0;
    for case in expected["cases"].as_array().unwrap() {
        let run = series_run(case["series"].as_str().unwrap());
        let timeline = Timeline::new(&run);
        for one in case["runs"].as_array().unwrap() {
            let spec = PolicySpec::parse(one["policy"].as_str().unwrap()).unwrap();
            let cost = cost(&timeline, spec.build(Defaults::Framework).unwrap().as_ref());
            assert_eq!(cost.skipped, one["skipped"].as_u64().unwrap());
            assert_eq!(cost.growths, one["growths"].as_u64().unwrap());
            assert_eq!(cost.first_scale, one["first_scale"].as_f64().unwrap());
            assert_eq!(cost.last_scale, one["last_scale"].as_f64().unwrap());
            compared += 1;
        }
    }
    assert_eq!(compared, 8);
}

/// A trace of one tensor: its amax at each step, and a sketch of these elements at every 50th.
fn trace(amax: &[f32], elements: impl Fn(usize) -> Vec<f32>) -> Trace {
    let tensor: TensorInfo = serde_json::from_str(r#"{"name":"w"}"#).unwrap();
    let step = |step: usize| Step {
        step: step as u64,
        loss_scale: None,
        found_inf: None,
        loss: None,
    };
    let sample = |row: usize| Sample {
        row,
        sketches: vec![Sketch::of(&elements(row))],
    };
    Trace {
        run_id: "test".to_owned(),
        tensors: vec![tensor],
        steps: (0..amax.len()).map(step).collect(),
        amax: amax.to_vec(),
        nonfinite: vec![0; amax.len()],
        samples: (0..amax.len()).step_by(50).map(sample).collect(),
        ..Trace::default()
    }
}

#[test]
fn nothing_lost_keeps_the_default() {
    let trace = trace(&[0.01; 5000], |_| vec![0.01, 0.001, 1e-4]);
    let answer = recommend(
        &Run::new(&trace, RunOptions::default()),
        &Options::new().unwrap(),
    )
    .unwrap();
    assert_eq!(answer.verdict.as_str(), "keep_default");
    assert_eq!(answer.growth_interval, Some(2000));
    assert_eq!(answer.interval.unwrap().1, None, "no upper limit was seen");
}

#[test]
fn an_interval_far_too_long_for_what_underflows_is_changed() {
    // amax leaves room for 2^30, and a tenth of the elements needs 2^24 or more.
    let small = 2f32.powi(-48);
    let trace = trace(&[2f32.powi(-16); 20_000], |_| {
        [2f32.powi(-16), small, 0.01 * 2f32.powi(-12)].repeat(3)
    });
    let answer = recommend(
        &Run::new(&trace, RunOptions::default()),
        &Options::new().unwrap(),
    )
    .unwrap();
    assert_eq!(answer.verdict.as_str(), "change");
    assert!(
        answer.growth_interval.unwrap() < 2000,
        "{:?}",
        answer.growth_interval
    );
    assert!(answer.init_scale > 65536.0, "{}", answer.init_scale);
}

#[test]
fn inf_at_any_scale_is_not_a_scale_problem() {
    let mut trace = trace(&[0.01; 500], |_| vec![0.01]);
    for row in 200..300 {
        trace.nonfinite[row] = gradscale::tally::nonfinite::NAN;
    }
    let answer = recommend(
        &Run::new(&trace, RunOptions::default()),
        &Options::new().unwrap(),
    )
    .unwrap();
    assert_eq!(answer.verdict.as_str(), "not_a_scale_problem");
    assert_eq!(answer.growth_interval, None);
    let warning = answer
        .warnings
        .iter()
        .find(|w| w.seen.contains("inf or NaN"))
        .unwrap();
    assert!(
        warning.seen.contains("\"w\"") && warning.seen.contains("step 200"),
        "{}",
        warning.seen
    );
}

#[test]
fn fewer_than_100_recorded_steps_carry_no_recommendation() {
    let trace = trace(&[0.01; 99], |_| vec![0.01]);
    let error = recommend(
        &Run::new(&trace, RunOptions::default()),
        &Options::new().unwrap(),
    )
    .unwrap_err();
    assert!(error.to_string().contains("99 recorded steps"), "{error}");
}

#[test]
fn only_amax_is_judged_by_the_skip_budget() {
    let run = series_run("cnn_fp32_amax_params.csv");
    let answer = recommend(&run, &Options::new().unwrap()).unwrap();
    assert_eq!(answer.basis.as_str(), "skip_budget");
    assert!(answer.default.cost.lost_update.is_none());
    let tight = Options {
        skip_budget: 0.0,
        policy: PolicySpec::parse("pytorch:growth_interval=10").unwrap(),
        ..Options::new().unwrap()
    };
    let answer = recommend(&run, &tight).unwrap();
    assert_eq!(answer.verdict.as_str(), "change");
    assert!(answer.recommended.unwrap().cost.skipped_by_interval() == 0);
}

#[test]
fn a_step_that_was_not_recorded_holds_the_last_clean_one() {
    let text = "step,amax\n0,1\n3,inf\n5,2\n";
    let traces = series::parse(text.as_bytes(), Path::new("x.csv")).unwrap();
    let run = Run::new(&traces[0], RunOptions::default());
    assert_eq!(run.len(), 6);
    let one = Limits::of_amax(1.0);
    assert_eq!(
        run.limits,
        [one, one, one, Limits::ALWAYS, one, Limits::of_amax(2.0)]
    );
    assert!(run.warnings.iter().any(|w| w.seen.contains("3 of 6 steps")));
}
