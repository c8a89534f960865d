//! The policies against loss scales that real GPU runs printed (`tests/data/gpu_runs`).

#[path = "common/placement.rs"]
mod placement;

use gradscale::scaling::policy::{Defaults, Observed, Policy, PolicySpec};
use placement::{Placed, Seen, by_run, number, place, rows, seen};
use std::path::Path;

fn policy(text: &str) -> Box<dyn Policy> {
    PolicySpec::parse(text)
        .unwrap()
        .build(Defaults::Class)
        .unwrap()
}

fn step(policy: &mut dyn Policy, found_inf: bool) {
    policy
        .update(Observed {
            found_inf,
            amax: None,
        })
        .unwrap();
}

#[test]
fn mask_rcnn_ran_at_the_predicted_scale_at_all_195_overflows() {
    let mut equal = 0;
    for name in [
        "mlperf07_maskrcnn_v100x16.csv",
        "mlperf07_maskrcnn_a100x32.csv",
        "mlperf07_maskrcnn_a100x256.csv",
    ] {
        for run in by_run(name) {
            let mut policy = policy("apex-fp16-utils:init_scale=65536,scale_window=1000");
            let mut at = 0.0;
            for row in run.iter().filter(|row| row["found_inf"] == "1") {
                while at < number(row, "step") {
                    step(policy.as_mut(), false);
                    at += 1.0;
                }
                assert_eq!(
                    policy.loss_scale(),
                    number(row, "loss_scale"),
                    "{name} {row:?}"
                );
                equal += 1;
                step(policy.as_mut(), true);
                at += 1.0;
            }
        }
    }
    assert_eq!(equal, 195);
}

#[test]
fn rnn_t_fell_to_32_in_all_ten_runs_and_its_cap_not_its_gradients_holds_it() {
    let mut equal = 0;
    for run in by_run("mlperf10_rnnt_a100x8.csv") {
        let mut policy = policy("apex-amp:init_scale=256,max_loss_scale=512");
        let mut at = 0.0;
        for row in run.iter().filter(|row| row["found_inf"] == "1") {
            while at < number(row, "step") {
                step(policy.as_mut(), false);
                at += 1.0;
            }
            step(policy.as_mut(), true);
            at += 1.0;
            assert_eq!(policy.loss_scale(), number(row, "loss_scale_after"));
            equal += 1;
        }
        while at < 8005.0 {
            step(policy.as_mut(), false);
            at += 1.0;
        }
        assert_eq!(
            policy.loss_scale(),
            512.0,
            "the cap is reached at step 8005"
        );
    }
    assert_eq!(equal, 30);
}

#[test]
fn megatron_reproduces_400_of_400_samples_with_17_skips_and_no_other_number() {
    let rows = rows("megatron_gpt3_345m_fp16.csv");
    let equal = |skips: u32| {
        let mut policy = policy("megatron:initial_scale=2^32,growth_interval=1000,hysteresis=2");
        let mut at = 0;
        rows.iter()
            .filter(|row| {
                while f64::from(at) < number(row, "step") {
                    at += 1;
                    step(policy.as_mut(), at <= skips);
                }
                policy.loss_scale() == number(row, "loss_scale")
            })
            .count()
    };
    assert_eq!((equal(16), equal(17), equal(18)), (4, 400, 4));
}

#[test]
fn megatron_ends_where_the_recorded_flags_put_it() {
    for run in by_run("megatron_gpt12l_fp16_perstep.csv") {
        let mut policy = policy("megatron:initial_scale=2^32,growth_interval=1000,hysteresis=2");
        for row in &run {
            assert_eq!(
                policy.loss_scale(),
                number(row, "implied_loss_scale"),
                "{row:?}"
            );
            step(policy.as_mut(), row["found_inf"] == "1");
        }
        let flags: Vec<usize> = (1..=run.len())
            .filter(|&i| run[i - 1]["found_inf"] == "1")
            .collect();
        // The first overflow is forgiven, every later one halves, also an isolated one: no growth has refilled it.
        assert_eq!(policy.loss_scale(), 2f64.powi(32 - flags.len() as i32 + 1));
    }
}

#[test]
fn megatron_gives_the_printed_scale_in_67_of_67_windows() {
    let mut equal = 0;
    for run in by_run("bigscience_megatron_gpt2_startup.csv") {
        let mut policy = policy("megatron:initial_scale=2^32,growth_interval=1000,hysteresis=2");
        let mut at = 0.0;
        for row in &run {
            let (end, skipped) = (number(row, "step"), number(row, "skipped_in_window"));
            // Where in the window the skips lie makes no difference before the first growth.
            for i in 0..(end - at) as u32 {
                step(policy.as_mut(), f64::from(i) < skipped);
            }
            at = end;
            assert_eq!(policy.loss_scale(), number(row, "loss_scale"), "{row:?}");
            equal += 1;
        }
    }
    assert_eq!(equal, 67);
}

#[test]
fn deepspeed_reproduces_the_scales_of_129_overflows_and_the_abort() {
    let mut equal = 0;
    let mut aborted = 0;
    for run in by_run("deepspeed_gpt2_a100.csv") {
        let first = &run[0];
        let text = format!(
            "deepspeed:init_scale={},scale_window={},delayed_shift={},min_scale=1",
            first["init_scale"], first["window"], first["hysteresis"]
        );
        let mut policy = policy(&text);
        for row in run.iter().filter(|row| row["found_inf"] == "1") {
            assert_eq!(policy.loss_scale(), number(row, "loss_scale"), "{row:?}");
            step(policy.as_mut(), true);
            assert_eq!(
                policy.loss_scale(),
                number(row, "loss_scale_after"),
                "{row:?}"
            );
            equal += 1;
        }
        if policy.loss_scale() == 1.0 {
            // The run that diverged: its next overflow ends it, and no growth interval can help.
            assert!(policy.update(Observed::OVERFLOW).is_err());
            aborted += 1;
        }
    }
    assert_eq!((equal, aborted), (129, 1));
}

/// How much of a set of runs fits a window, and the placements, each replayed by the policy itself.
fn fitted(
    name: &str,
    scale: &str,
    first: f64,
    window: i64,
    policy_name: &str,
) -> [(usize, usize); 2] {
    let mut sums = [(0, 0); 2];
    for run in by_run(name) {
        let rows = seen(&run, scale);
        let Placed {
            steps,
            overflows,
            readings,
        } = place(&rows, first, window);
        for (sum, (fits, all)) in sums.iter_mut().zip([overflows, readings]) {
            sum.0 += fits;
            sum.1 += all;
        }
        if overflows.0 == overflows.1 {
            let mut policy = policy(&format!(
                "{policy_name}:init_scale={first},scale_window={window}"
            ));
            let afters = rows.iter().filter_map(|row| match row {
                Seen::Overflow { after, .. } => Some(*after),
                Seen::Reading { .. } => None,
            });
            let mut at = 0;
            for (place, after) in steps.iter().zip(afters) {
                while at < *place {
                    step(policy.as_mut(), false);
                    at += 1;
                }
                step(policy.as_mut(), true);
                at += 1;
                assert_eq!(policy.loss_scale(), after, "{name} at step {place}");
            }
        }
    }
    sums
}

#[test]
fn gnmt_ran_with_a_window_of_128_at_all_560_overflows() {
    let v100x8 = fitted(
        "mlperf06_gnmt_v100x8.csv",
        "loss_scale_after",
        512.0,
        128,
        "apex-amp",
    );
    let v100x16 = fitted(
        "mlperf06_gnmt_v100x16.csv",
        "loss_scale_after",
        512.0,
        128,
        "apex-amp",
    );
    assert_eq!((v100x8[0], v100x16[0]), ((429, 429), (131, 131)));
    // Another window does not fit.
    let other = fitted(
        "mlperf06_gnmt_v100x8.csv",
        "loss_scale_after",
        512.0,
        256,
        "apex-amp",
    );
    assert!(other[0].0 < 400, "{other:?}");
}

#[test]
fn transformer_tells_its_window_and_that_the_documented_one_of_v07_is_not_it() {
    let fit = |name: &str, window: i64| fitted(name, "loss_scale", 128.0, window, "fairseq");
    assert_eq!(
        fit("mlperf05_transformer_v100x8.csv", 2000),
        [(71, 71), (132, 132)]
    );
    assert_eq!(
        fit("mlperf06_transformer_v100x8.csv", 2000),
        [(59, 59), (64, 64)]
    );
    assert_eq!(
        fit("mlperf07_transformer_a100x8.csv", 1000),
        [(73, 73), (62, 62)]
    );
    let documented = fit("mlperf07_transformer_a100x8.csv", 2000);
    assert!(
        documented[0].0 < 73 && documented[1].0 < 62,
        "{documented:?}"
    );
    for near in [900, 1100] {
        assert_eq!(
            fit("mlperf07_transformer_a100x8.csv", near),
            [(73, 73), (62, 62)]
        );
    }
    assert!(fit("mlperf07_transformer_a100x8.csv", 750) != [(73, 73), (62, 62)]);
    assert!(fit("mlperf07_transformer_a100x8.csv", 1250) != [(73, 73), (62, 62)]);
}

#[test]
fn means_of_scales_are_no_scales_and_are_not_replayed() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/gpu_runs/eva01_epoch_mean_scale.csv");
    let error = gradscale::tally::series::read(&path)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("mean_loss_scale") && error.contains("mean of loss scales"),
        "{error}"
    );
}
