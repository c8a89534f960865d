//! The built-in runs: real training runs of small models, recorded with `experiments/record_run.py`.
//!
//! Each archive holds the trace of an FP32 run, the steps of the same run in real FP16 (`fp16.csv`), and a note of what,
//! where and how (`about.json`).

use crate::input::NamedTrace;
use crate::tally::{Trace, series, store};
use crate::warning::{Kind, Warning};
use serde_json::{Map, Value};
use std::io::{Cursor, Read};

/// A built-in run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Run {
    /// A small convolutional network on scikit-learn's digits.
    Cnn,
    /// A small transformer language model on text that ships with Python.
    Transformer,
}

/// What a built-in archive holds.
#[derive(Debug, Clone)]
pub struct BuiltIn {
    /// The FP32 run.
    pub trace: NamedTrace,
    /// What really happened in FP16: scale, overflow and amax of each step.
    pub real: Trace,
    /// What, where and how.
    pub about: Map<String, Value>,
}

impl Run {
    fn bytes(self) -> &'static [u8] {
        match self {
            Run::Cnn => include_bytes!("../experiments/runs/cnn.zip"),
            Run::Transformer => include_bytes!("../experiments/runs/transformer.zip"),
        }
    }

    /// The name behind `--demo`.
    pub fn name(self) -> &'static str {
        match self {
            Run::Cnn => "cnn",
            Run::Transformer => "transformer",
        }
    }

    /// Reads the archive that is part of the program.
    pub fn read(self) -> BuiltIn {
        // The archive is part of this program and a test reads it: an error here is a bug of ours.
        let mut zip =
            zip::ZipArchive::new(Cursor::new(self.bytes())).expect("the built-in archive is whole");
        let mut members: Vec<(String, Vec<u8>)> = Vec::new();
        for index in 0..zip.len() {
            let mut member = zip.by_index(index).expect("the built-in archive is whole");
            let mut bytes = Vec::new();
            member
                .read_to_end(&mut bytes)
                .expect("the built-in archive is whole");
            let name = member
                .name()
                .expect("the built-in names are text")
                .into_owned();
            members.push((name, bytes));
        }
        members.sort();
        let member = |name: &str| -> &[u8] {
            members
                .iter()
                .find(|(n, _)| n == name)
                .map(|(_, b)| b.as_slice())
                .expect("the built-in archive is whole")
        };
        let chunks = members
            .iter()
            .filter(|(n, _)| n.starts_with("trace/"))
            .map(|(n, b)| (n.as_str(), b.as_slice()));
        let trace = store::read_chunks(chunks).expect("the built-in trace is whole");
        let real = series::parse(member("fp16.csv"), std::path::Path::new("fp16.csv"))
            .expect("the built-in series is whole")
            .remove(0);
        let about: Map<String, Value> =
            serde_json::from_slice(member("about.json")).expect("the built-in note is whole");
        let device = about
            .get("device")
            .and_then(Value::as_str)
            .unwrap_or("cpu")
            .to_owned();
        let mut warnings = Vec::new();
        if device.starts_with("cpu") {
            warnings.push(Warning::new(
                Kind::BuiltInRun,
                format!("the built-in {} run was recorded on a CPU", self.name()),
                "its gradients are real, those of a small model; a large model on a GPU may differ",
                "record your own run: from gradscale import Recorder",
            ));
        }
        let label = format!("built-in {} run", self.name());
        BuiltIn {
            trace: NamedTrace {
                label,
                kind: "built-in",
                trace,
                histograms: Vec::new(),
                warnings,
                diagnosis: None,
            },
            real,
            about,
        }
    }
}
