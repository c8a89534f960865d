//! Shares of elements that FP8 flushed, as Transformer Engine's statistics print them: recognised, and refused.
//!
//! FP8 with block scaling gives each tensor or block a scale of its own, so its underflow says nothing about a loss
//! scale. What such a table does show is where underflow lies: a few layers at the boundary to a wider format hold
//! nearly all of it.

use super::HistogramError;
use super::csv::{Header, rows};
use std::path::Path;

/// One row.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8Share {
    /// The run.
    pub run: String,
    /// The layer or GEMM, and the tensor of it.
    pub tensor: String,
    /// The iteration, where the table has one a row.
    pub iteration: Option<u64>,
    /// Elements flushed to zero, as a fraction of all.
    pub fraction: f64,
    /// The largest fraction seen, where the table has one.
    pub largest: Option<f64>,
}

impl Fp8Share {
    /// Whether it is of a gradient.
    pub fn is_gradient(&self) -> bool {
        self.iteration.is_some() || self.tensor.contains("grad")
    }
}

/// Reads a table of such shares.
///
/// # Errors
/// When a row is none.
pub fn read(path: &Path) -> Result<Vec<Fp8Share>, HistogramError> {
    let bytes = std::fs::read(path).map_err(|source| HistogramError::Io {
        path: path.to_owned(),
        source,
    })?;
    parse(&bytes, path)
}

pub(super) fn parse(bytes: &[u8], path: &Path) -> Result<Vec<Fp8Share>, HistogramError> {
    let first = bytes
        .split(|&byte| byte == b'\n')
        .find(|line| !line.trim_ascii().is_empty())
        .unwrap_or_default();
    let header = Header::parse(&String::from_utf8_lossy(first));
    let Some(place) = header.percents() else {
        return Err(HistogramError::Unknown {
            path: path.to_owned(),
        });
    };
    let mut shares = Vec::new();
    rows(bytes, path, &mut |row| {
        let text = row.at(place);
        let percent = |text: &str| {
            text.parse::<f64>()
                .ok()
                .filter(|percent| (0.0..=100.0).contains(percent))
                .map(|percent| percent / 100.0)
        };
        let fraction = percent(text).ok_or_else(|| {
            let shown: String = text.chars().take(80).collect();
            row.wrong(format!("{shown:?}"), "a percentage from 0 to 100")
        })?;
        // A layer is a bare number.
        let layer = row.text(&["layer"]).map(|layer| format!("layer {layer}"));
        let parts = [
            row.text(&["layer_gemm"]),
            layer.as_deref(),
            row.text(&["tensor", "name"]),
        ];
        shares.push(Fp8Share {
            run: row.text(&["run"]).unwrap_or_default().to_owned(),
            tensor: parts
                .iter()
                .flatten()
                .copied()
                .collect::<Vec<_>>()
                .join(" "),
            iteration: row.whole(&["iteration", "step"])?,
            fraction,
            largest: row.text(&["max_underflow_pct"]).and_then(percent),
        });
        Ok(())
    })?;
    Ok(shares)
}

/// The refusal of such a file, with what it does show.
pub(super) fn refusal(path: &Path) -> Result<HistogramError, HistogramError> {
    Ok(refused(path, &read(path)?))
}

pub(super) fn refused(path: &Path, shares: &[Fp8Share]) -> HistogramError {
    HistogramError::Fp8 {
        path: path.to_owned(),
        shape: shape(shares),
    }
}

/// Runs that are spoken of.
const RUNS: usize = 4;
/// Tensors of each that are named.
const NAMED: usize = 3;

/// Where the underflow of gradients lies, in a sentence.
fn shape(shares: &[Fp8Share]) -> String {
    let mut runs: Vec<&str> = Vec::new();
    for share in shares {
        if !runs.contains(&share.run.as_str()) && runs.len() <= RUNS {
            runs.push(&share.run);
        }
    }
    let mut said = Vec::new();
    for run in runs.iter().take(RUNS) {
        let of_run = || shares.iter().filter(|s| s.run == *run && s.is_gradient());
        let first = of_run().filter_map(|s| s.iteration).min();
        let last = of_run().filter_map(|s| s.iteration).max();
        let mean = |at: Option<u64>| {
            let (mut sum, mut n) = (0.0, 0u32);
            for share in of_run().filter(|s| s.iteration == at) {
                sum += share.fraction;
                n += 1;
            }
            sum / f64::from(n.max(1))
        };
        let label = if run.is_empty() {
            String::new()
        } else {
            format!("run {} ", crate::text::shortened(run, 40))
        };
        if let (Some(first), Some(last)) = (first, last) {
            said.push(format!(
                "{label}{} at iteration {first} and {} at {last}, on average",
                crate::text::fraction(mean(Some(first))),
                crate::text::fraction(mean(Some(last)))
            ));
            continue;
        }
        let mut worst: Vec<&Fp8Share> = of_run().collect();
        if worst.is_empty() {
            said.push(format!("{label}no gradients"));
            continue;
        }
        worst.sort_by(|a, b| b.fraction.total_cmp(&a.fraction));
        let named: Vec<String> = worst
            .iter()
            .take(NAMED)
            .map(|share| {
                format!(
                    "{} in {}",
                    crate::text::fraction(share.fraction),
                    crate::text::shortened(&share.tensor, 40)
                )
            })
            .collect();
        said.push(format!(
            "{label}{}, against a median of {} over {} gradients",
            named.join(", "),
            crate::text::fraction(worst[worst.len() / 2].fraction),
            worst.len()
        ));
    }
    if said.is_empty() {
        "no row".to_owned()
    } else {
        said.join("; ")
    }
}
