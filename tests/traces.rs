//! Traces on disk: there and back, torn, foreign, merged.

use gradscale::tally::store::{self, TraceError};
use gradscale::tally::{Sample, Sketch, Step, TensorInfo, Trace, nonfinite};
use std::path::Path;

fn tensor(name: &str) -> TensorInfo {
    serde_json::from_value(serde_json::json!({"name": name, "shape": [4], "elements": 4})).unwrap()
}

/// Two tensors, `steps` steps, a sketch at every third and a probe at every sixth.
fn trace(steps: u64) -> Trace {
    let mut trace = Trace {
        run_id: "abc".to_owned(),
        scaled: true,
        ..Trace::default()
    };
    trace.tensors = vec![tensor("w"), tensor("b")];
    trace.facts.insert("device".to_owned(), "cpu".into());
    for step in 0..steps {
        let found_inf = step % 7 == 5;
        trace.steps.push(Step {
            step,
            loss_scale: Some(65536.0),
            found_inf: (step % 2 == 0).then_some(found_inf),
            loss: (step % 2 == 1).then_some(0.5),
        });
        let values = [
            [step as f32, 1.5, 0.0, -2f32.powi(-140)],
            [0.0, 0.0, f32::NAN, f32::INFINITY],
        ];
        trace.amax.extend([
            values[0].iter().fold(0.0f32, |a, x| a.max(x.abs())),
            if step == 3 { f32::NAN } else { 0.0 },
        ]);
        trace.nonfinite.extend([0, nonfinite::INF | nonfinite::NAN]);
        let row = step as usize;
        let sketches = || values.iter().map(|v| Sketch::of(v)).collect();
        if step % 3 == 0 {
            trace.samples.push(Sample {
                row,
                sketches: sketches(),
            });
        }
        if step % 6 == 0 {
            trace.probes.push(Sample {
                row,
                sketches: sketches(),
            });
        }
    }
    trace
}

/// Equality where NaN in amax (no gradient) equals itself.
fn assert_same(a: &Trace, b: &Trace) {
    let bits = |t: &Trace| t.amax.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(a), bits(b));
    let without = |t: &Trace| Trace {
        amax: Vec::new(),
        ..t.clone()
    };
    assert_eq!(without(a), without(b));
}

#[test]
fn a_trace_comes_back_as_it_was_in_one_chunk_or_many() {
    for chunk_steps in [1, 5, 1000] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace");
        let trace = trace(20);
        store::write(&trace, &path, chunk_steps).unwrap();
        let (back, passed) = store::read(&path, false).unwrap();
        assert_same(&back, &trace);
        assert!(passed.leftovers.is_empty() && passed.skipped.is_empty());
    }
}

#[test]
fn the_same_trace_gives_the_same_bytes() {
    assert_eq!(
        store::encode(&trace(9), 0, 0).unwrap(),
        store::encode(&trace(9), 0, 0).unwrap()
    );
}

#[test]
fn a_chunk_cut_anywhere_is_an_error_that_names_the_file() {
    let bytes = store::encode(&trace(3), 0, 0).unwrap();
    for length in 0..bytes.len() {
        let error =
            store::decode(&bytes[..length], Path::new("rank0000-000000.safetensors")).unwrap_err();
        assert!(
            error.to_string().contains("rank0000-000000.safetensors"),
            "{length}: {error}"
        );
    }
}

#[test]
fn a_chunk_with_any_byte_changed_never_panics() {
    let bytes = store::encode(&trace(2), 0, 0).unwrap();
    for at in 0..bytes.len() {
        for change in [0x01, 0x80, 0xFF] {
            let mut bent = bytes.clone();
            bent[at] ^= change;
            // Many changes give another valid trace; what matters is that it is read or refused.
            let _ = store::decode(&bent, Path::new("x"));
        }
    }
}

#[test]
fn a_torn_file_ends_the_reading_or_is_passed_over_on_request() {
    let directory = tempfile::tempdir().unwrap();
    store::write(&trace(10), directory.path(), 5).unwrap();
    std::fs::write(
        directory.path().join("rank0000-000001.safetensors"),
        b"torn",
    )
    .unwrap();
    std::fs::write(
        directory.path().join("rank0000-000002.safetensors.tmp"),
        b"half",
    )
    .unwrap();
    let error = store::read(directory.path(), false)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("rank0000-000001.safetensors") && error.contains("--skip-bad"),
        "{error}"
    );
    let (rest, passed) = store::read(directory.path(), true).unwrap();
    assert_eq!(rest.steps.len(), 5);
    assert_eq!((passed.skipped.len(), passed.leftovers.len()), (1, 1));
}

#[test]
fn a_directory_without_a_finished_chunk_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(
        directory.path().join("rank0000-000000.safetensors.tmp"),
        b"half",
    )
    .unwrap();
    assert!(store::is_trace(directory.path()));
    assert!(matches!(
        store::read(directory.path(), false),
        Err(TraceError::Empty { .. })
    ));
}

#[test]
fn a_trace_is_never_written_over_another() {
    let directory = tempfile::tempdir().unwrap();
    store::write(&trace(2), directory.path(), 10).unwrap();
    let error = store::write(&trace(2), directory.path(), 10)
        .unwrap_err()
        .to_string();
    assert!(error.contains("found a trace there"), "{error}");
}

#[test]
fn ranks_of_one_step_add_up_and_flags_are_joined() {
    let mut whole = trace(4);
    let mut other = trace(4);
    other.amax.iter_mut().for_each(|a| *a *= 2.0);
    whole.merge(&other).unwrap();
    assert_eq!(whole.steps.len(), 4);
    assert_eq!(whole.amax_at(2, 0), Some(4.0));
    assert_eq!(whole.amax_at(3, 1), None, "no gradient on either rank");
    assert_eq!(whole.samples[0].sketches[0].elements(), 8);
}

/// A rank without a gradient used to clear the bit that says that nothing was finite on the other.
#[test]
fn a_rank_without_a_gradient_hid_that_nothing_was_finite() {
    let all = nonfinite::INF | nonfinite::NONE_FINITE;
    for (first, second) in [((0.0, all), (f32::NAN, 0)), ((f32::NAN, 0), (0.0, all))] {
        let of = |(amax, bits)| {
            let mut one = trace(1);
            (one.amax, one.nonfinite) = (vec![amax; 2], vec![bits; 2]);
            one
        };
        let mut whole = of(first);
        whole.merge(&of(second)).unwrap();
        assert_eq!(whole.nonfinite, [all; 2]);
    }
}

#[test]
fn traces_of_two_runs_are_not_merged() {
    let mut whole = trace(2);
    let other = Trace {
        run_id: "other".to_owned(),
        ..trace(2)
    };
    let error = whole.merge(&other).unwrap_err().to_string();
    assert!(error.contains("other") && error.contains("abc"), "{error}");
    let unscaled = Trace {
        scaled: false,
        ..trace(2)
    };
    assert!(whole.merge(&unscaled).is_err());
}
