//! msprobe's statistics: `dump.json` of one step and rank, or a directory of them.
//!
//! `data` maps the name of each call to its tensors: `Module.conv1.Conv2d.parameters_grad` to those of its parameters,
//! `….backward…` to `input` and `output`. Each has `dtype`, `shape`, `Max`, `Min`, `Mean` and `Norm`. Forward calls are
//! left out. Step and rank stand in the path: `step0/rank0/dump.json`, `step0/proc2016/dump.json`.

use super::csv::Statistics;
use super::json::{self, Node};
use super::run::{Again, Builder};
use super::{HistogramError, HistogramRun, count_of, is_gradient};
use crate::gradients;
use crate::tally::Role;
use std::path::{Path, PathBuf};

/// Lists in lists of a call's arguments.
const DEPTH: usize = 8;

/// Whether the first bytes of a file are such a dump.
pub(super) fn looks_like(head: &[u8]) -> bool {
    let find = |text: &[u8]| memchr::memmem::find(head, text).is_some();
    find(b"\"Max\"") && find(b"\"Min\"") && find(b"\"shape\"") && find(b"\"data\"")
}

/// The step in a path: the last component of the form `step12`.
fn step_of(path: &Path) -> Option<u64> {
    path.iter().rev().find_map(|part| {
        part.to_str()?
            .strip_prefix("step")?
            .trim_start_matches('_')
            .parse()
            .ok()
    })
}

/// Reads the dumps of one run; ranks of a step add up.
pub(super) fn read(
    path: &Path,
    files: &[PathBuf],
    reading: &gradients::Options,
) -> Result<Vec<HistogramRun>, HistogramError> {
    let mut builder = Builder::default();
    for file in files {
        let step = step_of(file).unwrap_or(0);
        parse(&json::load(file)?, file, step, reading, &mut builder)?;
    }
    Ok(vec![builder.finish("", path, reading)?])
}

pub(super) fn parse_one(
    bytes: &[u8],
    path: &Path,
    reading: &gradients::Options,
) -> Result<Vec<HistogramRun>, HistogramError> {
    let mut builder = Builder::default();
    parse(bytes, path, 0, reading, &mut builder)?;
    Ok(vec![builder.finish("", path, reading)?])
}

fn parse(
    bytes: &[u8],
    path: &Path,
    step: u64,
    reading: &gradients::Options,
    builder: &mut Builder,
) -> Result<(), HistogramError> {
    let document = json::parse(bytes, path, 1)?;
    let Some(Node::Map(calls)) = document.get("data") else {
        return Err(HistogramError::Json {
            path: path.to_owned(),
            place: "key \"data\"".to_owned(),
            found: "no calls".to_owned(),
            expected: "an object with the statistics of each call".to_owned(),
        });
    };
    for (call, tensors) in calls {
        let role = if call.contains("parameters_grad") {
            Role::Parameter
        } else if call.contains("backward") {
            Role::ActivationGradient
        } else {
            Role::Activation
        };
        let mut left: Vec<(String, &Node, usize)> = vec![(call.clone(), tensors, 0)];
        while let Some((name, node, depth)) = left.pop() {
            if let Some(shape) = node.get("shape") {
                // Chosen by name, a forward tensor is read too.
                let wanted = match role {
                    Role::Activation => reading.chooses() && is_gradient(&name, reading),
                    _ => reading.selects(&name),
                };
                let float = node
                    .get("dtype")
                    .and_then(Node::text)
                    .is_none_or(|dtype| dtype.contains("float") || dtype.contains("bf"));
                if !wanted || !float {
                    builder.leave_out(&name);
                    continue;
                }
                let wrong = |found: String| HistogramError::Json {
                    path: path.to_owned(),
                    place: format!("call {name:?}"),
                    found,
                    expected: Statistics::EXPECTED.to_owned(),
                };
                let shape = shape_of(shape).ok_or_else(|| wrong("no shape".to_owned()))?;
                let number = |key: &str| node.get(key).and_then(Node::number);
                let (Some(max), Some(min)) = (number("Max"), number("Min")) else {
                    builder.leave_out(&name);
                    continue;
                };
                let n = shape
                    .iter()
                    .try_fold(1u64, |n, &size| n.checked_mul(size))
                    .ok_or_else(|| wrong(format!("the shape {shape:?}")))?;
                if n == 0 {
                    continue;
                }
                let known = Statistics {
                    n,
                    max,
                    min,
                    mean: number("Mean"),
                    norm: number("Norm"),
                };
                let histogram = known.histogram().ok_or_else(|| wrong(known.to_string()))?;
                if !builder.add(step, &name, role, shape, histogram, Again::Adds) {
                    return Err(wrong("more than 2^63 elements".to_owned()));
                }
                continue;
            }
            if depth == DEPTH {
                continue;
            }
            match node {
                Node::Map(entries) => left.extend(
                    entries
                        .iter()
                        .rev()
                        .map(|(key, value)| (format!("{name}.{key}"), value, depth + 1)),
                ),
                Node::List(items) => left.extend(
                    items
                        .iter()
                        .enumerate()
                        .rev()
                        .map(|(i, value)| (format!("{name}[{i}]"), value, depth + 1)),
                ),
                _ => {}
            }
        }
    }
    Ok(())
}

fn shape_of(node: &Node) -> Option<Vec<u64>> {
    node.numbers()?.iter().map(|&size| count_of(size)).collect()
}
