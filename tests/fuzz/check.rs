// What every input must keep, whatever its bytes: no panic, no more than is promised, and a message with both sides.

use std::fs;
use std::path::{Path, PathBuf};

use gradscale::gradients::{Dump, Options, StepPattern};

/// One file a process and kind, written over and over.
fn scratch(extension: &str) -> PathBuf {
    std::env::temp_dir().join(format!("gradscale-fuzz-{}.{extension}", std::process::id()))
}

/// Reads `bytes` as a file of this extension.
pub fn file(extension: &str, bytes: &[u8]) {
    let path = scratch(extension);
    fs::write(&path, bytes).expect("the scratch file is writable");
    at(&path);
    let _ = fs::remove_file(&path);
}

fn at(path: &Path) {
    let options = Options::new();
    let opened =
        Dump::open(path, &options).and_then(|dump| dump.steps()[0].files[0].open(&options));
    let open = match opened {
        Ok(open) => open,
        Err(e) => {
            let message = e.to_string();
            assert!(message.contains("found"), "{message}");
            assert!(message.len() < 4096, "a message of {} bytes", message.len());
            return;
        }
    };
    let mut budget = 1u64 << 20;
    for (i, tensor) in open.tensors().iter().enumerate() {
        assert!(
            open.tensors()[..i]
                .iter()
                .rev()
                .take(100)
                .all(|t| t.name != tensor.name),
            "one name twice"
        );
        if tensor.elements > budget {
            continue;
        }
        budget -= tensor.elements;
        let mut whole = Vec::new();
        let read = open.read(i, &mut |chunk| {
            assert!(!chunk.is_empty());
            whole.extend(chunk.to_f32().iter().map(|x| x.to_bits()));
        });
        assert!(
            whole.len() as u64 <= tensor.elements,
            "more elements than promised"
        );
        if read.is_err() {
            continue;
        }
        assert_eq!(whole.len() as u64, tensor.elements);
        let middle = tensor.elements / 2;
        let mut half = Vec::new();
        open.read_range(i, middle..tensor.elements, &mut |chunk| {
            half.extend(chunk.to_f32().iter().map(|x| x.to_bits()));
        })
        .expect("a part of what was read whole");
        assert_eq!(half, whole[middle as usize..]);
    }
}

/// Reads `pickle` as the `data.pkl` of an archive of `torch.save` with one storage, `0`, of 64 bytes.
#[allow(dead_code)] // Not every target uses all of this file.
pub fn pickle(pickle: &[u8]) {
    let data: Vec<u8> = (0..64).collect();
    let mut bytes = Vec::new();
    let mut directory = Vec::new();
    for (name, content) in [("a/data.pkl", pickle), ("a/data/0", &data[..])] {
        let at = bytes.len() as u32;
        let size = content.len() as u32;
        let mut common = vec![0u8; 14];
        common[0] = 20;
        common.extend(size.to_le_bytes());
        common.extend(size.to_le_bytes());
        common.extend((name.len() as u16).to_le_bytes());
        common.extend([0, 0]);
        bytes.extend(b"PK\x03\x04");
        bytes.extend(&common);
        bytes.extend(name.as_bytes());
        bytes.extend(content);
        directory.extend(b"PK\x01\x02\x14\x00");
        directory.extend(&common);
        directory.extend([0u8; 10]);
        directory.extend(at.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let start = bytes.len() as u32;
    bytes.extend(&directory);
    bytes.extend(b"PK\x05\x06\0\0\0\0\x02\0\x02\0");
    bytes.extend((directory.len() as u32).to_le_bytes());
    bytes.extend(start.to_le_bytes());
    bytes.extend([0, 0]);
    file("pt", &bytes);
}

/// A pattern on the first line, a path on the second.
#[allow(dead_code)]
pub fn step_pattern(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let (pattern, path) = text
        .split_once('\n')
        .unwrap_or((&text, "step_1/rank_2.npz"));
    // Work grows as path^wildcards; a path is as long as a file system allows, a pattern as a person writes.
    let path: String = path.chars().take(64).collect();
    if let Ok(pattern) = StepPattern::parse(pattern) {
        let _ = pattern.find(&path);
    }
}

/// A record of an event file around `data`, with its checksums.
fn record(data: &[u8]) -> Vec<u8> {
    let masked = |bytes: &[u8]| {
        let crc = !bytes.iter().fold(!0u32, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |crc, _| {
                (crc >> 1) ^ (0x82F6_3B78 & (crc & 1).wrapping_neg())
            })
        });
        crc.rotate_right(15).wrapping_add(0xA282_EAD8)
    };
    let length = (data.len() as u64).to_le_bytes();
    let mut bytes = length.to_vec();
    bytes.extend(masked(&length).to_le_bytes());
    bytes.extend(data);
    bytes.extend(masked(data).to_le_bytes());
    bytes
}

/// Histograms: the first byte says which kind of file the rest is. What is read replays to bounds that contain a point.
#[allow(dead_code)]
pub fn histograms(bytes: &[u8]) {
    const NAMES: [&str; 5] = [
        "events",
        "wandb-summary.json",
        "wandb-history.jsonl",
        "dump.json",
        "table.csv",
    ];
    let Some((kind, bytes)) = bytes.split_first() else {
        return;
    };
    // The sixth kind is one event inside a whole record: a fuzzer does not find checksums.
    let framed: Vec<u8>;
    let (name, bytes) = match usize::from(*kind) % 6 {
        5 => {
            framed = record(bytes);
            (NAMES[0], &framed[..])
        }
        kind => (NAMES[kind], bytes),
    };
    let runs = match gradscale::histograms::parse(bytes, name) {
        Ok(runs) => runs,
        Err(e) => {
            let message = e.to_string();
            assert!(message.contains("found"), "{message}");
            assert!(message.len() < 8192, "a message of {} bytes", message.len());
            return;
        }
    };
    for run in runs {
        for placed in run.histograms.iter().take(100) {
            for scale in [2f32.powi(-20), 1.0, 65536.0, 1e30] {
                let spread = placed
                    .histogram
                    .replay(gradscale::float::FP16, scale, false);
                let (low, point, high) = (spread.low, spread.point, spread.high);
                assert!(low.underflow_to_zero <= high.underflow_to_zero);
                assert!(low.overflow_to_infinity <= high.overflow_to_infinity);
                assert!(
                    (low.underflow_to_zero..=high.underflow_to_zero)
                        .contains(&point.underflow_to_zero)
                );
                assert_eq!(point.elements(), placed.histogram.elements());
                for (least, most) in [
                    spread.underflow_fraction(),
                    spread.overflow_fraction(),
                    spread.l1_fraction(),
                    spread.l2_fraction(),
                ] {
                    assert!(
                        0.0 <= least && least <= most && most <= 1.0,
                        "{least}..{most}"
                    );
                }
            }
        }
    }
}

/// The check of one target.
#[allow(dead_code)]
pub fn target(name: &str, bytes: &[u8]) {
    match name {
        "pickle" => pickle(bytes),
        "step_pattern" => step_pattern(bytes),
        "histograms" => histograms(bytes),
        extension => file(extension, bytes),
    }
}
