//! The built program as a person uses it: answers on stdout, talk on stderr, exit statuses, files.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(path)
}

fn gradscale(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gradscale"))
        .args(args)
        .env("NO_COLOR", "1")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Runs it, expects `status`, and gives stdout and stderr.
fn ran(status: i32, args: &[&str]) -> (String, String) {
    let output = gradscale(args);
    let (out, err) = (
        text(&output.stdout).to_owned(),
        text(&output.stderr).to_owned(),
    );
    assert_eq!(output.status.code(), Some(status), "{args:?}\n{out}\n{err}");
    assert!(!err.contains("panicked"), "{err}");
    (out, err)
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&ran(0, args).0).unwrap()
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Every wrong input ends with status 2, an empty stdout and one message that names what is wrong.
#[track_caller]
fn refused(args: &[&str], parts: &[&str]) {
    let (out, err) = ran(2, args);
    assert!(out.is_empty(), "{args:?}: {out}");
    assert!(
        parts.iter().all(|part| err.contains(part)),
        "{args:?}: {err}"
    );
    assert_eq!(
        err.lines()
            .filter(|line| line.starts_with("gradscale: "))
            .count(),
        1,
        "{args:?}: {err}"
    );
}

#[test]
fn wrong_inputs_end_with_2_and_one_message() {
    let directory = tempfile::tempdir().unwrap();
    let inside = |name: &str| directory.path().join(name);
    let empty = inside("empty");
    std::fs::create_dir(&empty).unwrap();
    let fake = inside("fake.npy");
    std::fs::write(&fake, "this is a text file\n").unwrap();
    let csv = data("closed_loop/cnn_fp32_amax_params.csv");
    let npy = data("dumps/npy/f32.npy");
    let cut = inside("cut.npy");
    std::fs::write(&cut, &std::fs::read(&npy).unwrap()[..1000]).unwrap();
    let short = inside("short.csv");
    std::fs::write(&short, "step,amax\n0,1\n1,2\n").unwrap();

    refused(&["analyze", "no-such-file.npy"], &["no-such-file.npy"]);
    refused(&["recommend", "no-such-file.csv"], &["no-such-file.csv"]);
    refused(&["analyze", path(&empty)], &["empty"]);
    refused(&["analyze", path(&fake)], &["fake.npy"]);
    refused(&["analyze", path(&cut)], &["cut.npy"]);
    refused(
        &["analyze", path(&npy), "--scales", "-4"],
        &["--scales", "\"-4\"", "positive"],
    );
    refused(
        &["analyze", path(&npy), "--scales", "2^0..0"],
        &["--scales", "empty range"],
    );
    refused(
        &["analyze", path(&npy), "--format", "fp17"],
        &["fp17", "fp8-e4m3fn"],
    );
    refused(&["analyze", path(&csv)], &["series", "recommend"]);
    refused(
        &["analyze", path(&npy), "--backend", "tpu"],
        &["--backend", "tpu"],
    );
    refused(&["analyze", path(&npy), "--max-underflow", "1%"], &["--at"]);
    refused(
        &["analyze", path(&npy), "--dump-scale", "0"],
        &["--dump-scale", "0"],
    );
    refused(&["analyze", path(&npy), "--tensors", "[a"], &["[a"]);
    refused(
        &["simulate", path(&csv), "--policy", "pytorhc"],
        &["pytorhc", "pytorch"],
    );
    refused(
        &[
            "simulate",
            path(&csv),
            "--policy",
            "pytorch:growth_intervall=5",
        ],
        &["growth_intervall", "growth_interval"],
    );
    refused(
        &[
            "simulate",
            path(&csv),
            "--policy",
            "pytorch:growth_interval=x",
        ],
        &["growth_interval", "\"x\""],
    );
    refused(
        &["recommend", path(&csv), "--tolerance", "2"],
        &["--tolerance", "\"2\""],
    );
    refused(
        &["recommend", path(&csv), "--init-scale", "-1"],
        &["--init-scale", "-1"],
    );
    refused(
        &["recommend", path(&short)],
        &["short.csv", "2 recorded steps", "100"],
    );
    refused(
        &["report", path(&csv), "-o", path(&csv)],
        &["cnn_fp32_amax_params.csv"],
    );
    refused(
        &["report", path(&csv), "-o", "/proc/nowhere"],
        &["/proc/nowhere"],
    );
    refused(
        &[
            "plot",
            path(&csv),
            "--kind",
            "rates",
            "-o",
            path(&inside("x.svg")),
        ],
        &["rates", "sketches"],
    );
    refused(
        &[
            "plot",
            path(&csv),
            "--kind",
            "tradeoff",
            "-o",
            path(&inside("x.jpg")),
        ],
        &["x.jpg", ".svg"],
    );
    refused(
        &[
            "plot",
            path(&csv),
            "--kind",
            "tradeoff",
            "-o",
            path(&inside("x.svg")),
            "--size",
            "1x1",
        ],
        &["--size", "1x1"],
    );
    refused(
        &["merge", path(&empty), "-o", path(&inside("out"))],
        &["empty"],
    );
    refused(
        &["compare", path(&npy), "no-such-file.npy"],
        &["no-such-file.npy"],
    );
    assert!(
        !inside("x.svg").exists() && !inside("out").exists(),
        "nothing is left behind"
    );
}

#[test]
fn unknown_flags_and_commands_end_with_2() {
    for args in [
        &["frobnicate"][..],
        &["analyze"],
        &["analyze", "x.npy", "--frobnicate"],
        &["simulate", "x.csv"],
        &[],
    ] {
        let output = gradscale(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty());
    }
    assert_eq!(gradscale(&["--help"]).status.code(), Some(0));
    assert_eq!(gradscale(&["--version"]).status.code(), Some(0));
}

#[test]
fn help_begins_with_what_the_person_has() {
    let (help, _) = ran(0, &["--help"]);
    let order = [
        "training log",
        "gradients or a trace",
        "CSV of step,amax",
        "two runs",
        "scaler of your own",
        "nothing yet",
        "Recorder",
        "Usage",
    ];
    let places: Vec<usize> = order
        .iter()
        .map(|part| help.find(part).unwrap_or_else(|| panic!("{part}: {help}")))
        .collect();
    assert!(places.is_sorted(), "{help}");
}

#[test]
fn every_dump_gives_the_expected_counts() {
    let expected: Value =
        serde_json::from_slice(&std::fs::read(data("dumps/expected.json")).unwrap()).unwrap();
    let columns: Vec<&str> = ["columns", "error_columns"]
        .iter()
        .flat_map(|key| expected[key].as_array().unwrap())
        .map(|name| name.as_str().unwrap())
        .collect();
    let mut compared = 0;
    for case in expected["cases"].as_array().unwrap() {
        let inputs: Vec<String> = case["inputs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|input| path(&data("dumps").join(input.as_str().unwrap())).to_owned())
            .collect();
        let mut args = vec!["analyze"];
        args.extend(inputs.iter().map(String::as_str));
        let word = |key: &str| case[key].as_str().unwrap();
        args.extend([
            "--by",
            word("by"),
            "--format",
            word("format"),
            "--scales",
            word("scales"),
            "--json",
        ]);
        if case["errors"] == true {
            args.push("--errors");
        }
        let answer = json(&args);
        let groups = answer["groups"].as_array().unwrap();
        for want in case["groups"].as_array().unwrap() {
            let at = format!("{args:?} {} {}", want["tensor"], want["step"]);
            let got = groups
                .iter()
                .find(|g| g["tensor"] == want["tensor"] && g["step"] == want["step"])
                .unwrap_or_else(|| panic!("{at} is missing"));
            for key in [
                "elements",
                "zeros",
                "inf",
                "nan",
                "amax",
                "smallest_nonzero",
            ] {
                assert_eq!(got[key], want[key], "{key} {at}");
            }
            if want["captured_in"] != "any" {
                let seen = &got["captured_in"];
                assert_eq!(
                    seen["scale_at_least"], want["captured_in"]["scale_at_least"],
                    "{at}"
                );
            }
            let rates = got["rates"].as_array().unwrap();
            assert_eq!(rates.len(), want["rates"].as_array().unwrap().len());
            for (row, rate) in want["rates"].as_array().unwrap().iter().zip(rates) {
                assert_eq!(rate["exact"], true, "dumps are replayed raw: {at}");
                for (name, value) in columns.iter().zip(row.as_array().unwrap()) {
                    let (a, b) = (rate[*name].as_f64(), value.as_f64());
                    let tolerance = match *name {
                        "underflow_l2_fraction" => 1e-3,
                        "mean_relative_error" | "sqnr_db" => 1e-9,
                        name if name.ends_with("fraction") => 1e-12,
                        _ => 0.0,
                    };
                    let same = match (a, b) {
                        (Some(a), Some(b)) => {
                            a == b || (a - b).abs() <= tolerance * a.abs().max(b.abs())
                        }
                        (a, b) => a == b,
                    };
                    assert!(
                        same,
                        "{name} {a:?}, expected {b:?} at scale {}: {at}",
                        rate["scale"]
                    );
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 10_000, "{compared}");
}

#[test]
fn results_do_not_depend_on_threads() {
    let run = data("dumps/run");
    let args = [
        "analyze",
        path(&run),
        "--json",
        "--errors",
        "--scales",
        "1,1000,65536",
        "--by",
        "tensor",
    ];
    let one = ran(0, &[&args[..], &["--threads", "1"]].concat()).0;
    let many = ran(0, &[&args[..], &["--threads", "7"]].concat()).0;
    assert_eq!(one, many);
}

#[test]
fn a_dump_scale_is_divided_out() {
    let scaled = data("dumps/safetensors/f16.safetensors");
    let plain = json(&["analyze", path(&scaled), "--scales", "1", "--json"]);
    let divided = json(&[
        "analyze",
        path(&scaled),
        "--scales",
        "4096",
        "--dump-scale",
        "4096",
        "--json",
    ]);
    let (a, b) = (
        &plain["groups"][0]["rates"][0],
        &divided["groups"][0]["rates"][0],
    );
    for key in [
        "underflow_to_zero",
        "subnormal",
        "normal",
        "overflow_to_infinity",
    ] {
        assert_eq!(a[key], b[key], "{key}");
    }
    let amax = |v: &Value| v["groups"][0]["amax"].as_f64().unwrap();
    assert_eq!(amax(&plain), amax(&divided) * 4096.0);
}

#[test]
fn data_captured_in_fp16_is_said_and_bounded() {
    let captured = data("dumps/captured/cnn_fp16_scale1024.safetensors");
    let answer = json(&[
        "analyze",
        path(&captured),
        "--scales",
        "256,512,1024",
        "--json",
    ]);
    let group = &answer["groups"][0];
    assert_eq!(group["captured_in"]["scale_at_least"], 512.0);
    let zeros = group["zeros"].as_u64().unwrap();
    for rate in group["rates"].as_array().unwrap() {
        let count = rate["underflow_to_zero"].as_u64().unwrap();
        let bounds = &rate["bounds"]["underflow_to_zero"];
        assert_eq!(bounds[1].as_u64().unwrap(), count + zeros);
        assert!(bounds[0].as_u64().unwrap() <= count);
    }
    assert!(answer["warnings"].to_string().contains("captured in FP16"));
}

#[test]
fn the_gate_passes_fails_and_cannot_tell() {
    let npy = data("dumps/npy/f32.npy");
    let gate =
        |status, more: &[&str]| ran(status, &[&["analyze", path(&npy), "-q"][..], more].concat()).1;
    gate(
        0,
        &[
            "--max-underflow",
            "1%",
            "--max-overflow",
            "0",
            "--at",
            "1024",
        ],
    );
    let err = gate(1, &["--max-underflow", "0.1%", "--at", "0.00390625"]);
    assert!(
        err.contains("gate crossed") && err.contains("0.358 %"),
        "{err}"
    );
    gate(1, &["--max-overflow", "0", "--at", "2^30"]);
    let captured = data("dumps/captured/cnn_fp16_scale1024.safetensors");
    let err = ran(
        2,
        &[
            "analyze",
            path(&captured),
            "-q",
            "--max-underflow",
            "0.01%",
            "--at",
            "2^16",
        ],
    )
    .1;
    assert!(err.contains("cannot tell"), "{err}");
    gate(2, &["--max-underflow", "1%", "--at", "used"]);
}

#[test]
fn sketching_and_merging_give_the_analysis_of_the_dump() {
    let directory = tempfile::tempdir().unwrap();
    let (trace, merged) = (
        directory.path().join("trace"),
        directory.path().join("merged"),
    );
    let run = data("dumps/run");
    ran(0, &["sketch", path(&run), "-o", path(&trace)]);
    ran(0, &["merge", path(&trace), "-o", path(&merged)]);
    for by in ["all", "tensor", "step"] {
        let groups =
            |input: &Path| json(&["analyze", path(input), "--json", "--by", by])["groups"].clone();
        assert_eq!(groups(&run), groups(&trace), "{by}");
        assert_eq!(groups(&run), groups(&merged), "{by}");
    }
    refused(
        &["sketch", path(&run), "-o", path(&trace)],
        &["found a trace there"],
    );
    refused(
        &[
            "sketch",
            path(&run),
            path(&run),
            "-o",
            path(&directory.path().join("x")),
        ],
        &["--as-ranks"],
    );
}

#[test]
fn two_inputs_are_two_runs_unless_joined() {
    let (a, b) = (data("dumps/npy/f32.npy"), data("dumps/npy/f64.npy"));
    let apart = json(&["analyze", path(&a), path(&b), "--json"]);
    assert_eq!(apart["groups"].as_array().unwrap().len(), 2);
    assert_eq!(
        (&apart["groups"][0]["run"], &apart["groups"][1]["run"]),
        (&0.into(), &1.into())
    );
    let joined = json(&["analyze", path(&a), path(&b), "--json", "--as-ranks"]);
    assert_eq!(joined["groups"].as_array().unwrap().len(), 1);
}

#[test]
fn simulate_writes_every_steps_scale() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("t.csv");
    let csv = data("closed_loop/cnn_fp32_amax_params.csv");
    let answer = json(&[
        "simulate",
        path(&csv),
        "--policy",
        "pytorch:growth_interval=50",
        "--trajectory",
        path(&file),
        "--json",
    ]);
    let rows = std::fs::read_to_string(&file).unwrap();
    assert_eq!(rows.lines().count(), 1201);
    let skipped = rows
        .lines()
        .skip(1)
        .filter(|row| row.ends_with(",1"))
        .count() as u64;
    assert_eq!(answer["runs"][0]["skipped"].as_u64(), Some(skipped));
    assert_eq!(answer["runs"][0]["policy"], "pytorch:growth_interval=50");
    assert_eq!(
        answer["runs"][0]["lost_update"],
        Value::Null,
        "only amax is known"
    );
}

#[test]
fn recommend_has_every_key_of_the_contract() {
    let answer = json(&["recommend", "--demo", "cnn", "--json"]);
    for key in [
        "schema",
        "policy",
        "basis",
        "measure",
        "verdict",
        "why",
        "growth_interval",
        "interval",
        "default_is_fine",
        "init_scale",
        "lost_update",
        "skipped",
        "best_static_scale",
        "steps",
        "candidates",
        "settings",
        "warnings",
    ] {
        assert!(answer.get(key).is_some(), "{key}");
    }
    for key in [
        "pytorch",
        "pytorch_static",
        "deepspeed",
        "megatron",
        "fairseq",
        "accelerate",
        "lightning",
    ] {
        assert!(answer["settings"][key].is_string(), "{key}");
    }
    for key in ["recommended", "default", "best_static", "settings"] {
        assert!(!answer["lost_update"][key].is_null(), "{key}");
    }
    let intervals: Vec<u64> = answer["candidates"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["growth_interval"].as_u64().unwrap())
        .collect();
    assert!(
        intervals.len() >= 12 && intervals.is_sorted(),
        "{intervals:?}"
    );
    assert_eq!(answer["basis"], "lost_update");
    assert_eq!(answer["steps"], 8000);
}

#[test]
fn several_runs_are_answered_one_by_one_and_together() {
    let (a, b) = (
        data("closed_loop/cnn_fp32_amax_params.csv"),
        data("closed_loop/cnn_fp32_amax_params_and_activations.csv"),
    );
    let answer = json(&["recommend", path(&a), path(&b), "--json"]);
    assert_eq!(answer["runs"].as_array().unwrap().len(), 2);
    assert!(answer["common"]["growth_interval"].is_u64());
}

#[test]
fn the_report_is_whole_and_the_same_twice() {
    let directory = tempfile::tempdir().unwrap();
    let out = |name: &str| directory.path().join(name);
    for name in ["a", "b"] {
        ran(0, &["report", "-o", path(&out(name))]);
    }
    let mut names: Vec<String> = std::fs::read_dir(out("a"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(
        names,
        [
            "binades.svg",
            "headroom.svg",
            "policies.svg",
            "rates.svg",
            "report.html",
            "report.json",
            "tradeoff.svg",
            "trajectory.svg"
        ]
    );
    for name in &names {
        let read = |folder: &str| std::fs::read(out(folder).join(name)).unwrap();
        assert_eq!(read("a"), read("b"), "{name}");
    }
    let html = std::fs::read_to_string(out("a").join("report.html")).unwrap();
    for foreign in ["src=\"http", "href=\"http", "url(", "@import"] {
        assert!(!html.contains(foreign), "{foreign}");
    }
    assert!(html.contains("growth_interval") && html.matches("<svg").count() == 6);
    let report: Value =
        serde_json::from_slice(&std::fs::read(out("a").join("report.json")).unwrap()).unwrap();
    assert_eq!(report["schema"], "gradscale.report/1");
    assert_eq!(
        report["runs"][0]["recommend"]["schema"],
        "gradscale.recommend/1"
    );
}

#[test]
fn a_hostile_tensor_name_is_escaped_in_the_report() {
    let directory = tempfile::tempdir().unwrap();
    let dump = directory.path().join("step_000001.safetensors");
    let name = "<script>alert(1)</script>&\"'";
    let values: Vec<u8> = (0..8)
        .flat_map(|i| (i as f32 * 0.01).to_le_bytes())
        .collect();
    let view =
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![8], &values).unwrap();
    std::fs::write(&dump, safetensors::serialize([(name, view)], None).unwrap()).unwrap();
    let out = directory.path().join("report");
    ran(0, &["report", path(&dump), "-o", path(&out)]);
    for file in ["report.html", "headroom.svg"] {
        let page = std::fs::read_to_string(out.join(file)).unwrap();
        assert!(!page.contains("<script>alert"), "{file}");
        assert!(page.contains("&lt;script&gt;"), "{file}");
    }
    let report: Value =
        serde_json::from_slice(&std::fs::read(out.join("report.json")).unwrap()).unwrap();
    assert_eq!(
        report["runs"][0]["verdict"], "cannot_tell",
        "one step carries no recommendation"
    );
}

#[test]
fn plots_hold_their_landmarks_and_their_data() {
    let directory = tempfile::tempdir().unwrap();
    for (kind, labels, rows) in [
        ("rates", vec!["underflow to zero", "2^16", "loss scale"], 42),
        ("binades", vec!["2^-25/S", "2^-14/S", "65520/S"], 20),
        ("headroom", vec!["step", "over 16"], 100),
        ("trajectory", vec!["65520 / scale", "skipped step"], 100),
        (
            "tradeoff",
            vec!["growth interval (steps)", "default 2000"],
            20,
        ),
        ("policies", vec!["megatron", "fairseq", "skipped"], 9),
    ] {
        let (svg, png, csv) = (
            format!("{kind}.svg"),
            format!("{kind}.png"),
            format!("{kind}.csv"),
        );
        let at = |name: &str| directory.path().join(name);
        ran(
            0,
            &[
                "plot",
                "--demo",
                "cnn",
                "--kind",
                kind,
                "-o",
                path(&at(&svg)),
                "--data",
                path(&at(&csv)),
                "-q",
            ],
        );
        ran(
            0,
            &[
                "plot",
                "--demo",
                "cnn",
                "--kind",
                kind,
                "-o",
                path(&at(&png)),
                "-q",
                "--theme",
                "print",
                "--size",
                "800x450",
            ],
        );
        let picture = std::fs::read_to_string(at(&svg)).unwrap();
        for label in labels {
            assert!(picture.contains(label), "{kind}: {label}");
        }
        assert_eq!(&std::fs::read(at(&png)).unwrap()[..8], b"\x89PNG\r\n\x1a\n");
        let table = std::fs::read_to_string(at(&csv)).unwrap();
        let width = table.lines().next().unwrap().split(',').count();
        assert!(
            table.lines().count() >= rows,
            "{kind}: {}",
            table.lines().count()
        );
        assert!(
            kind == "policies" || table.lines().all(|line| line.split(',').count() == width),
            "{kind}"
        );
    }
}

#[test]
fn compare_says_what_moved() {
    let (a, b) = (data("dumps/npz/stored.npz"), data("dumps/npz/deflated.npz"));
    let answer = json(&["compare", path(&a), path(&b), "--json"]);
    assert_eq!(answer["schema"], "gradscale.compare/1");
    assert_eq!(answer["at"], 1.0);
    assert!(answer["tensors"].as_array().unwrap().len() <= 10);
    assert_eq!(answer["skipped"], Value::Null, "plain dumps have no steps");
    let same = json(&[
        "compare",
        path(&a),
        path(&a),
        "--json",
        "--fail-if-worse",
        "0",
    ]);
    assert_eq!(same["worse"], false);
    // Raised far enough, one of the two overflows more.
    let output = gradscale(&[
        "compare",
        path(&a),
        path(&b),
        "--at",
        "2^22",
        "--fail-if-worse",
        "0",
        "--json",
    ]);
    let back = gradscale(&[
        "compare",
        path(&b),
        path(&a),
        "--at",
        "2^22",
        "--fail-if-worse",
        "0",
        "--json",
    ]);
    let mut statuses = [output.status.code(), back.status.code()];
    statuses.sort();
    assert_eq!(statuses[1], Some(1), "one direction is worse");
}

#[test]
fn a_closed_pipe_ends_quietly() {
    use std::process::Stdio;
    let mut child = Command::new(env!("CARGO_BIN_EXE_gradscale"))
        .args(["policies"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
}

#[test]
fn formats_and_policies_and_completions_answer() {
    assert_eq!(
        json(&["formats", "--json"])["formats"][0]["first_overflow"],
        65520.0
    );
    assert!(ran(0, &["formats"]).0.contains("fp8-e4m3fn"));
    assert!(ran(0, &["policies", "megatron"]).0.contains("hysteresis"));
    assert!(ran(0, &["completions", "bash"]).0.contains("gradscale"));
}

#[test]
fn a_sweep_writes_every_combination_and_names_the_best() {
    let folder = tempfile::tempdir().unwrap();
    let csv = folder.path().join("sweep.csv");
    let keys = "growth_interval=1..,init_scale=2^12..2^14";
    let answer = json(&[
        "recommend",
        "--demo",
        "cnn",
        "--sweep",
        keys,
        "--csv",
        path(&csv),
        "--json",
        "--quiet",
    ]);
    let sweep = &answer["sweep"];
    let rows = std::fs::read_to_string(&csv).unwrap();
    assert_eq!(
        rows.lines().count() as u64,
        1 + sweep["combinations"].as_u64().unwrap()
    );
    assert_eq!(sweep["by_setting"].as_array().unwrap().len(), 3);
    let least = rows
        .lines()
        .skip(1)
        .map(|row| row.split(',').nth(8).unwrap().parse::<f64>().unwrap())
        .fold(f64::INFINITY, f64::min);
    assert_eq!(sweep["best"]["lost_update"].as_f64().unwrap(), least);
    // To stdout the rows are the result, and nothing else is.
    let (out, _) = ran(
        0,
        &[
            "recommend",
            "--demo",
            "cnn",
            "--sweep",
            keys,
            "--csv",
            "-",
            "--quiet",
        ],
    );
    assert_eq!(out, rows);
    refused(
        &[
            "recommend",
            "--demo",
            "cnn",
            "--sweep",
            "hysteresis=1..4",
            "--quiet",
        ],
        &["hysteresis", "growth_interval", "policies pytorch"],
    );
    refused(
        &[
            "recommend",
            "--demo",
            "cnn",
            "--sweep",
            "growth_interval=9..2",
            "--quiet",
        ],
        &["9..2", "growth_interval=1.."],
    );
}

#[test]
fn a_horizon_is_marked_as_extrapolated() {
    let answer = json(&[
        "recommend",
        "--demo",
        "cnn",
        "--horizon",
        "50000",
        "--json",
        "--quiet",
    ]);
    let horizon = &answer["horizon"];
    assert_eq!(horizon["steps"], 50_000);
    assert_eq!(horizon["extrapolated"], true);
    for at in horizon["intervals"].as_array().unwrap() {
        let of = |key: &str| at[key].as_f64().unwrap();
        assert!(of("low") <= of("lost_update") && of("lost_update") <= of("high"));
    }
    let warned = answer["warnings"].as_array().unwrap();
    assert!(warned.iter().any(|w| w["kind"] == "extrapolated"));
}

#[test]
fn a_run_that_bends_is_told_phase_by_phase() {
    let answer = json(&["recommend", "--demo", "cnn", "--json", "--quiet"]);
    let phases = answer["phases"].as_array().unwrap();
    // The gradients of the built-in run fall fast while it warms up.
    assert!(phases.len() >= 2, "{phases:?}");
    let drift = |phase: &Value| phase["drift_log2_per_1000_steps"].as_f64().unwrap();
    assert!(drift(&phases[0]) < 5.0 * drift(&phases[1]));
}

#[test]
fn a_report_of_a_log_begins_with_its_verdict() {
    let folder = tempfile::tempdir().unwrap();
    let report = |log: &str| {
        let out = folder.path().join(Path::new(log).file_stem().unwrap());
        let (said, _) = ran(
            0,
            &["report", path(&data(log)), "-o", path(&out), "--quiet"],
        );
        let page = std::fs::read_to_string(out.join("report.html")).unwrap();
        let json: Value =
            serde_json::from_slice(&std::fs::read(out.join("report.json")).unwrap()).unwrap();
        (said, page, json["runs"][0].clone())
    };
    let (said, page, run) = report("logs/megatron-bert-ramp.log");
    assert!(said.contains("Normal: overflows at the start"), "{said}");
    let heading = page.split("<h2").nth(1).unwrap();
    assert!(heading.contains("Normal: overflows at the start"));
    assert!(page.contains("id=\"history\"") && page.contains("id=\"tradeoff\""));
    assert_eq!(run["diagnosis"]["verdict"], "RAMP_UP_HARMLESS");
    // A log is replayed with the policy of the framework that wrote it.
    assert_eq!(run["recommend"]["policy"], "megatron");
    // One whose steps cannot be told still has its verdict and its picture.
    let (said, page, run) = report("logs/apex-to-zero.log");
    assert!(said.contains("Failure: inf or NaN"), "{said}");
    assert!(page.contains("id=\"history\""));
    assert_eq!(run["diagnosis"]["verdict"], "GENUINE_NONFINITE");
    assert!(run["recommend"].is_null());
}

#[test]
fn a_static_scale_was_recommended_that_no_step_had_seen() {
    let log = data("logs/apex-every-2000.log");
    let answer = json(&["recommend", path(&log), "--json", "--quiet"]);
    assert_eq!(answer["policy"], "apex-amp");
    assert_eq!(answer["growth_interval"], 2000);
    // Nothing is known above the largest scale that a clean step was seen at.
    assert!(answer["best_static_scale"].as_f64().unwrap() <= 524_288.0);
}
