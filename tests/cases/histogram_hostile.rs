//! Files that lie: exit status 2, one message with file and place, and memory that stays within bounds.

use crate::{data, run};
use gradscale::gradients::Options;
use gradscale::histograms::{HistogramError, read};
use std::path::Path;

/// CRC-32C and its mask, written anew: bit by bit.
fn masked(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 {
                (crc >> 1) ^ 0x82F6_3B78
            } else {
                crc >> 1
            };
        }
    }
    crc = !crc;
    crc.rotate_right(15).wrapping_add(0xA282_EAD8)
}

fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut bytes = length.to_vec();
    bytes.extend(masked(&length).to_le_bytes());
    bytes.extend(data);
    bytes.extend(masked(data).to_le_bytes());
    bytes
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

fn field(number: u64, data: &[u8]) -> Vec<u8> {
    [
        varint(number << 3 | 2),
        varint(data.len() as u64),
        data.to_vec(),
    ]
    .concat()
}

fn double(number: u64, value: f64) -> Vec<u8> {
    [varint(number << 3 | 1), value.to_le_bytes().to_vec()].concat()
}

fn packed(number: u64, values: &[f64]) -> Vec<u8> {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    field(number, &bytes)
}

/// An event with one histogram of a gradient.
fn event(histo: &[u8]) -> Vec<u8> {
    let value = [field(1, b"grad/w"), field(5, histo)].concat();
    let summary = field(1, &value);
    [varint(2 << 3), varint(7), field(5, &summary)].concat()
}

fn histo(min: f64, max: f64, num: f64, limits: &[f64], counts: &[f64]) -> Vec<u8> {
    [
        double(1, min),
        double(2, max),
        double(3, num),
        packed(6, limits),
        packed(7, counts),
    ]
    .concat()
}

fn read_bytes(bytes: &[u8], name: &str) -> Result<usize, HistogramError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    read(&path, &Options::new(), false).map(|runs| runs.len())
}

const NAME: &str = "events.out.tfevents.1.host";

#[track_caller]
fn refused(bytes: &[u8], parts: &[&str]) {
    let message = read_bytes(bytes, NAME).unwrap_err().to_string();
    assert!(message.contains(NAME), "{message}");
    for part in parts {
        assert!(message.contains(part), "{part:?}: {message}");
    }
}

fn fixture() -> Vec<u8> {
    let folder = data("tensorboard");
    let file = std::fs::read_dir(folder).unwrap().next().unwrap().unwrap();
    std::fs::read(file.path()).unwrap()
}

#[test]
fn an_event_file_cut_at_any_byte_is_refused_with_the_record_it_breaks_in() {
    let one = event(&histo(-1.0, 1.0, 3.0, &[-1.0, 0.0, 1.0], &[0.0, 1.0, 2.0]));
    cut_anywhere(&[record(b""), record(&one), record(&one)].concat(), true);
    cut_anywhere(&fixture(), false);
}

fn cut_anywhere(whole: &[u8], small: bool) {
    let mut boundaries = vec![0usize];
    while let Some(head) = whole
        .get(boundaries[boundaries.len() - 1]..)
        .and_then(|r| r.first_chunk::<8>())
    {
        let next = boundaries[boundaries.len() - 1] + 16 + u64::from_le_bytes(*head) as usize;
        boundaries.push(next);
    }
    assert_eq!(boundaries.last(), Some(&whole.len()));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(NAME);
    // Every byte of a small file; of the fixture those around each record and one in a hundred between.
    for cut in 0..whole.len() {
        let near = boundaries.iter().any(|b| cut.abs_diff(*b) < 20);
        if !small && !near && cut % 101 != 0 {
            continue;
        }
        std::fs::write(&path, &whole[..cut]).unwrap();
        let result = read(&path, &Options::new(), false);
        if boundaries.contains(&cut) {
            // Whole records are a file of their own; without a histogram among them there is nothing to say.
            assert!(
                matches!(&result, Ok(_) | Err(HistogramError::NoGradients { .. })),
                "{cut}: {result:?}"
            );
            continue;
        }
        let begin = boundaries.iter().rfind(|b| **b < cut).unwrap();
        match result {
            Err(HistogramError::Truncated {
                offset,
                found,
                expected,
                ..
            }) => {
                assert_eq!(offset, *begin as u64);
                assert!(found < expected, "{found} {expected}");
            }
            other => panic!("{cut}: {other:?}"),
        }
    }
}

#[test]
fn the_program_says_it_in_one_line_and_takes_what_comes_before_only_if_asked() {
    let whole = fixture();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(NAME);
    std::fs::write(&path, &whole[..whole.len() - 3]).unwrap();
    let path = path.to_str().unwrap();
    for command in ["analyze", "report", "recommend"] {
        let out = folder.path().join("out");
        let mut args = vec![command, path];
        if command == "report" {
            args.extend(["-o", out.to_str().unwrap()]);
        }
        let (status, stdout, err) = run(&args);
        assert_eq!(status, Some(2), "{err}");
        assert!(stdout.is_empty());
        assert_eq!(err.lines().count(), 1, "{err}");
        assert!(
            err.contains(path) && err.contains("byte ") && err.contains("--skip-bad"),
            "{err}"
        );
    }
    let (status, stdout, err) = run(&["analyze", path, "--skip-bad"]);
    assert_eq!(status, Some(0), "{err}");
    assert!(stdout.contains("9 tensors"), "{stdout}");
    assert!(err.contains("cut short"), "{err}");
}

#[test]
fn every_bit_that_flips_is_seen() {
    let whole = record(&event(&histo(
        -1.0,
        1.0,
        3.0,
        &[-1.0, 0.0, 1.0],
        &[0.0, 1.0, 2.0],
    )));
    assert_eq!(read_bytes(&whole, NAME).unwrap(), 1);
    for bit in 0..whole.len() * 8 {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let error = read_bytes(&bytes, NAME).unwrap_err();
        assert!(
            matches!(error, HistogramError::Checksum { .. }),
            "bit {bit}: {error}"
        );
    }
}

#[test]
fn lengths_that_lie_are_refused_before_anything_is_allocated() {
    for length in [1u64 << 63, u64::MAX, 1 << 40, (256 << 20) + 1] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(masked(&length.to_le_bytes()).to_le_bytes());
        bytes.extend([0; 64]);
        refused(
            &bytes,
            &["byte 0", &length.to_string(), "at most 268435456"],
        );
    }
    let length = 1u64 << 20;
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend(masked(&length.to_le_bytes()).to_le_bytes());
    refused(&bytes, &["byte 0", "found 12 bytes", "expected 1048592"]);
}

#[test]
fn messages_that_lie_are_refused_with_their_place() {
    let good = histo(-1.0, 1.0, 3.0, &[-1.0, 0.0, 1.0], &[0.0, 1.0, 2.0]);
    for (data, parts) in [
        // A summary, a value, a histogram and packed doubles longer than what holds them.
        (vec![0x2A, 0x7F, 0x00], vec!["byte 14", "a length of 127"]),
        (field(5, &[0x0A, 0x50]), vec!["byte 16", "a length of 80"]),
        (field(5, &field(1, &[0x2A, 0x09, 1])), vec!["a length of 9"]),
        (event(&[0x32, 0x40, 0, 0]), vec!["a length of 64"]),
        (
            field(
                5,
                &[0x0A, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F],
            ),
            vec!["a length of 9223372036854775807"],
        ),
        (
            vec![
                0x10, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x02,
            ],
            vec!["more than 64 bits"],
        ),
        (vec![0x10, 0x80], vec!["cuts off"]),
        (vec![0x00, 0x00], vec!["field number 0"]),
        (vec![0x0B], vec!["wire type 3"]),
        (vec![0x09, 1, 2], vec!["a length of 8"]),
        (event(&field(6, &[0; 7])), vec!["7 bytes of packed doubles"]),
        // A negative step is ten bytes of ones.
        (
            [
                vec![0x10],
                varint(u64::MAX),
                field(5, &field(1, &[field(1, b"grad"), field(5, &good)].concat())),
            ]
            .concat(),
            vec!["step -1"],
        ),
        (
            event(&histo(0.0, 1.0, 1.0, &[0.0, 1.0], &[1.0])),
            vec!["2 bucket limits beside 1 buckets"],
        ),
        (
            event(&histo(0.0, 1.0, 1.0, &[1.0, 0.0], &[0.0, 1.0])),
            vec!["out of order"],
        ),
        (
            event(&histo(0.0, 1.0, 1.0, &[f64::NAN, 0.0], &[0.0, 1.0])),
            vec!["out of order"],
        ),
        (
            event(&histo(0.0, 1.0, 1.0, &[0.0, 1.0], &[0.0, 0.5])),
            vec!["the count 0.5"],
        ),
        (
            event(&histo(0.0, 1.0, 1.0, &[0.0, 1.0], &[0.0, -1.0])),
            vec!["the count -1"],
        ),
        (
            event(&histo(0.0, 1.0, 1.0, &[0.0, 1.0], &[0.0, 1e300])),
            vec!["the count"],
        ),
        (
            event(&histo(0.0, 1.0, 1.0, &[0.0, 1.0], &[0.0, 2.0])),
            vec!["a num of 1, and 2 elements"],
        ),
    ] {
        refused(&record(&data), &parts);
    }
}

#[test]
fn odd_but_legal_histograms_are_read() {
    for (data, elements) in [
        // TF1's outer limits are those of a double; min and max cut them.
        (
            histo(
                -1.0,
                2.0,
                3.0,
                &[-f64::MAX, 0.0, f64::MAX],
                &[0.0, 1.0, 2.0],
            ),
            3,
        ),
        // Neither min, max nor num were set.
        (histo(0.0, 0.0, 0.0, &[0.0, 1.0], &[0.0, 5.0]), 5),
        // Three elements are NaN.
        (histo(f64::NAN, f64::NAN, 5.0, &[0.0, 1.0], &[0.0, 2.0]), 5),
        // One lies beyond all buckets.
        (histo(0.0, 1e25, 3.0, &[0.0, 1.0], &[0.0, 2.0]), 3),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NAME);
        std::fs::write(&path, record(&event(&data))).unwrap();
        let runs = read(&path, &Options::new(), false).unwrap();
        assert_eq!(runs[0].trace.steps[0].step, 7);
        assert_eq!(runs[0].histograms[0].histogram.elements(), elements);
    }
}

#[test]
fn events_are_known_by_content_under_any_name() {
    let bytes = fixture();
    assert_eq!(read_bytes(&bytes, "renamed.bin").unwrap(), 1);
    assert!(matches!(
        read_bytes(b"nothing of the kind", "renamed.bin"),
        Err(HistogramError::Unknown { .. })
    ));
}

#[test]
fn an_event_file_of_scalars_says_what_it_holds() {
    let value = [field(1, b"train/accuracy"), vec![0x15, 0, 0, 0x80, 0x3F]].concat();
    let bytes = record(&field(5, &field(1, &value)));
    refused(&bytes, &["scalars alone", "train/accuracy", "--tensors"]);
}

#[test]
fn json_that_lies_is_refused_with_its_place() {
    let histogram = |inside: &str| {
        format!("{{\"gradients/w\": {{\"_type\": \"histogram\", {inside}}}, \"_step\": 3}}")
    };
    let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
    for (text, parts) in [
        (
            histogram("\"values\": [1, 2], \"bins\": [0, 1"),
            vec!["line 1", "no JSON"],
        ),
        (
            histogram("\"values\": [1, 2], \"bins\": [0, 1]"),
            vec!["gradients/w", "2 edges for 2 counts"],
        ),
        (
            histogram("\"values\": [1, 2], \"bins\": [1, 0, 2]"),
            vec!["gradients/w", "edges"],
        ),
        (
            histogram("\"values\": [1, -2], \"bins\": [0, 1, 2]"),
            vec!["the count -2"],
        ),
        (
            histogram("\"values\": [1, 1.5], \"bins\": [0, 1, 2]"),
            vec!["the count 1.5"],
        ),
        (
            histogram("\"values\": [1, \"x\"], \"bins\": [0, 1, 2]"),
            vec!["no list of counts"],
        ),
        (histogram("\"bins\": [0, 1]"), vec!["no list of counts"]),
        (histogram("\"values\": [1]"), vec!["no edges"]),
        (
            histogram("\"values\": [1], \"packedBins\": {\"min\": 0, \"size\": 1}"),
            vec!["packedBins"],
        ),
        (
            histogram(
                "\"values\": [1], \"packedBins\": {\"min\": 0, \"size\": 1, \"count\": 1e18}",
            ),
            vec!["packedBins of 1000000000000000000 bins"],
        ),
        (
            histogram("\"values\": [1], \"packedBins\": {\"min\": 0, \"size\": NaN, \"count\": 1}"),
            vec!["packedBins"],
        ),
        (
            histogram("\"values\": [1], \"bins\": [0, 1e999]"),
            vec!["line 1"],
        ),
        (
            "{\"_type\": \"histogram\"}".to_owned(),
            vec!["no histogram"],
        ),
        ("[1, 2]".to_owned(), vec!["no object"]),
        (deep, vec!["line 1", "recursion"]),
        ("{\"_step\": -1}".to_owned(), vec!["_step"]),
        (String::new(), vec!["line 1"]),
    ] {
        let message = read_bytes(text.as_bytes(), "wandb-summary.json")
            .unwrap_err()
            .to_string();
        let shown = &text[..text.len().min(80)];
        assert!(message.contains("wandb-summary.json"), "{message}");
        for part in parts {
            assert!(message.contains(part), "{shown}: {part:?}: {message}");
        }
    }
    let line = histogram("\"values\": [2], \"bins\": [0, 1]");
    let history = format!("{line}\n\n{}\n", &line[..40]);
    let message = read_bytes(history.as_bytes(), "wandb-history.jsonl")
        .unwrap_err()
        .to_string();
    assert!(message.contains("line 3"), "{message}");
}

#[test]
fn statistics_that_lie_are_refused_with_their_line() {
    let csv = |row: &str| format!("step,kind,name,tensor,dtype,n,max,min,mean,l2_norm\n{row}\n");
    let bins = |row: &str| format!("param,n,bin_lo,bin_hi,counts\n{row}\n");
    for (text, parts) in [
        (
            csv("0,weight_grad,a,w,float32,0,1,0,0,1"),
            vec!["line 2", "n 0"],
        ),
        (
            csv("0,weight_grad,a,w,float32,4,0,1,0,1"),
            vec!["line 2", "max 0, min 1"],
        ),
        (
            csv("0,weight_grad,a,w,float32,x,1,0,0,1"),
            vec!["line 2", "\"x\"", "\"n\""],
        ),
        (
            csv("0,weight_grad,a,w,float32,4,,0,0,1"),
            vec!["line 2", "max"],
        ),
        (
            csv("0,weight_grad,a,w,float32,4,1"),
            vec!["line 2", "7 columns"],
        ),
        (csv("-1,weight_grad,a,w,float32,4,1,0,0,1"), vec!["\"-1\""]),
        (
            csv("0,weight_grad,a,w,float32,4,1,0,0,1\n0,weight_grad,a,w,float32,4,1,0,0,1"),
            vec!["line 3", "again"],
        ),
        (
            csv("0,activation,a,w,float32,4,1,0,0,1"),
            vec!["no gradient"],
        ),
        (csv(""), vec!["no row"]),
        (bins("a,3,0,1,1 1"), vec!["line 2", "add up to n = 3"]),
        (bins("a,2,0,1,1 x"), vec!["the counts"]),
        (bins("a,2,1,0,1 1"), vec!["bins from 1 to 0"]),
        (bins("a,2,0,nan,1 1"), vec!["bins from 0 to NaN"]),
        (bins("a,0,0,1,0 0"), vec!["no element"]),
        (bins("a,2,0,1,18446744073709551615 3"), vec!["add up"]),
    ] {
        let message = match read_bytes(text.as_bytes(), "gradients.csv") {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{text}"),
        };
        for part in parts {
            assert!(message.contains(part), "{text}: {part:?}: {message}");
        }
    }
}

#[test]
fn a_dump_of_msprobe_that_lies_is_refused_and_its_directory_is_one_run() {
    let tensor = |inside: &str| {
        format!(
            "{{\"data\": {{\"Module.a.parameters_grad\": {{\"w\": [{{\"dtype\": \"torch.float32\", {inside}}}]}}}}}}"
        )
    };
    for (text, part) in [
        (
            tensor("\"shape\": [2, -1], \"Max\": 1, \"Min\": 0"),
            "no shape",
        ),
        (
            tensor("\"shape\": [9007199254740992, 9007199254740992], \"Max\": 1, \"Min\": 0"),
            "the shape",
        ),
        (
            tensor("\"shape\": [2], \"Max\": 0, \"Min\": 1"),
            "max 0, min 1",
        ),
        (
            tensor("\"shape\": [2], \"Max\": null, \"Min\": 1"),
            "no gradient",
        ),
        ("{\"data\": 3}".to_owned(), "no calls"),
        ("{".to_owned(), "no JSON"),
    ] {
        let message = read_bytes(text.as_bytes(), "dump.json")
            .unwrap_err()
            .to_string();
        assert!(
            message.contains(part) && message.contains("dump.json"),
            "{message}"
        );
    }
    let runs = read(&data("msprobe"), &Options::new(), false).unwrap();
    let steps: Vec<u64> = runs[0].trace.steps.iter().map(|s| s.step).collect();
    assert_eq!(steps, [0, 1]);
    // Inf and NaN are no JSON, and are what an overflowed step is dumped as.
    let text = tensor("\"shape\": [2], \"Max\": Infinity, \"Min\": NaN");
    assert_eq!(read_bytes(text.as_bytes(), "dump.json").unwrap(), 1);
}

#[test]
fn runs_in_directories_below_are_runs_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a/train", "b"] {
        let at = folder.path().join(name);
        std::fs::create_dir_all(&at).unwrap();
        std::fs::write(at.join(NAME), fixture()).unwrap();
    }
    std::fs::create_dir_all(folder.path().join("evaluation")).unwrap();
    let value = [field(1, b"accuracy"), vec![0x15, 0, 0, 0x80, 0x3F]].concat();
    let scalars = record(&field(5, &field(1, &value)));
    std::fs::write(folder.path().join("evaluation").join(NAME), scalars).unwrap();
    let runs = read(folder.path(), &Options::new(), false).unwrap();
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    assert_eq!(names, [Path::new("a/train").to_str().unwrap(), "b"]);
    // A checkpoint beside them makes it a directory of dumps.
    std::fs::write(folder.path().join("model.pt"), b"x").unwrap();
    assert!(!gradscale::histograms::is_histograms(folder.path()));
}

#[test]
fn a_step_that_is_written_again_replaces_the_first() {
    let one = event(&histo(0.0, 1.0, 1.0, &[0.0, 1.0], &[0.0, 1.0]));
    let five = event(&histo(0.0, 1.0, 5.0, &[0.0, 1.0], &[0.0, 5.0]));
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("events.out.tfevents.1.h"), record(&one)).unwrap();
    std::fs::write(folder.path().join("events.out.tfevents.2.h"), record(&five)).unwrap();
    let runs = read(folder.path(), &Options::new(), false).unwrap();
    assert_eq!(runs[0].histograms.len(), 1);
    assert_eq!(runs[0].histograms[0].histogram.elements(), 5);
}
