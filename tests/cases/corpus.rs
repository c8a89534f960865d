//! The fuzzing corpus, replayed: what a fuzzer found interesting, or what once crashed.

use std::path::{Path, PathBuf};

use crate::build::{Pickle, small};
use crate::fuzz_check;

const TARGETS: [&str; 7] = [
    "npy",
    "npz",
    "safetensors",
    "pt",
    "pickle",
    "step_pattern",
    "histograms",
];

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fuzz/corpus")
        .join(target)
}

#[test]
fn the_fuzzing_corpus_holds() {
    for target in TARGETS {
        let mut inputs: Vec<PathBuf> = std::fs::read_dir(corpus(target))
            .unwrap_or_else(|e| panic!("{target}: {e}"))
            .map(|entry| entry.expect("an entry").path())
            .collect();
        inputs.sort();
        assert!(!inputs.is_empty(), "{target} has no corpus");
        for input in inputs {
            // The name is on stderr if a check panics.
            eprintln!("{}", input.display());
            fuzz_check::target(target, &std::fs::read(&input).expect("read"));
        }
    }
}

/// Seeds are the small honest files, the files that are wrong in one thing, and pickles taken out of archives.
#[test]
#[ignore = "writes into tests/fuzz/corpus"]
fn write_the_fuzz_seeds() {
    let write = |target: &str, name: &str, bytes: &[u8]| {
        std::fs::create_dir_all(corpus(target)).expect("a folder");
        std::fs::write(corpus(target).join(format!("seed-{name}")), bytes).expect("written");
    };
    let wrong = crate::refusals::files()
        .into_iter()
        .map(|(name, bytes, _)| (name, bytes));
    for (name, bytes) in small()
        .into_iter()
        .chain(wrong)
        .filter(|(_, bytes)| bytes.len() < 2048)
    {
        let Some((_, extension)) = name.rsplit_once('.').filter(|(_, e)| TARGETS.contains(e))
        else {
            continue;
        };
        write(extension, name, &bytes);
        if extension == "pt"
            && bytes.starts_with(b"PK\x03\x04")
            && bytes[30..].starts_with(b"a/data.pkl")
        {
            let size = u32::from_le_bytes([bytes[18], bytes[19], bytes[20], bytes[21]]) as usize;
            write("pickle", name, &bytes[40..40 + size]);
        }
    }
    for (kind, elements) in [
        ("FloatStorage", 16),
        ("HalfStorage", 32),
        ("DoubleStorage", 8),
        ("LongStorage", 8),
    ] {
        let pickle =
            Pickle::new()
                .raw(b"}(")
                .text("w")
                .tensor(kind, "0", elements, 1, &[2, 3], &[1, 2]);
        let pickle = pickle
            .text("v")
            .raw(b"](")
            .tensor(kind, "0", elements, 0, &[3, 2, 2], &[0, 3, 1])
            .raw(b"e");
        write("pickle", kind, &pickle.raw(b"u").stop());
    }
    for (name, text) in [
        ("words", "it{step}/r{rank}_*\nit20/r3_x.npz"),
        ("deep", "**{step}.npz\na/b/c7.npz"),
        ("tensor", "{tensor}@{step}\nfc@3.npy"),
    ] {
        write("step_pattern", name, text.as_bytes());
    }
}
