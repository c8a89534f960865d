//! What a file of histograms becomes: a trace without sketches, and histograms beside it.

use super::HistogramError;
use crate::float::exp2;
use crate::gradients::{self, DumpScale};
use crate::tally::{Histogram, Role, Step, TensorInfo, Trace, nonfinite};
use crate::warning::{Kind, Warning};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The histogram of one tensor at one step.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    /// Index into the trace's steps.
    pub row: usize,
    /// Index into its tensors.
    pub tensor: usize,
    /// The counts.
    pub histogram: Histogram,
}

/// One run's histograms.
#[derive(Debug, Clone, PartialEq)]
pub struct HistogramRun {
    /// What tells it from other runs of the same file or directory; empty where it is the only one.
    pub name: String,
    /// Its steps and tensors, with amax where that is known; no sketches.
    pub trace: Trace,
    /// The histograms, by step.
    pub histograms: Vec<Placed>,
    /// What was noticed.
    pub warnings: Vec<Warning>,
}

/// Magnitudes up to this become zero in FP16 at scale 1.
const FLUSHED: f32 = 2.980_232_2e-8; // 2^-25
/// Names in one warning.
const NAMED: usize = 64;

/// A run being read.
#[derive(Debug, Default)]
pub(super) struct Builder {
    tensors: Vec<TensorInfo>,
    known: HashMap<String, usize>,
    cells: BTreeMap<(u64, usize), Histogram>,
    scales: BTreeMap<u64, f64>,
    found_inf: BTreeMap<u64, bool>,
    losses: BTreeMap<u64, f64>,
    /// Tags that scales and flags came from.
    scalar_tags: Vec<String>,
    /// Names that are no gradients: how many, and one of them.
    left_out: (u64, Option<String>),
    left_out_names: std::collections::HashSet<String>,
    /// A scalar tag that says nothing here, for the message where there is nothing else.
    other_scalar: Option<String>,
    pub warnings: Vec<Warning>,
}

/// What happens where a step already holds a histogram of that name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Again {
    /// The later one counts, as when a run was restarted.
    Replaces,
    /// They are ranks of one step.
    Adds,
    /// It is an error of the file.
    Fails,
}

impl Builder {
    /// Whether anything was read.
    pub fn is_empty(&self) -> bool {
        self.cells.is_empty()
    }

    /// Adds a histogram; `false` where it must not stand there twice.
    pub fn add(
        &mut self,
        step: u64,
        name: &str,
        role: Role,
        shape: Vec<u64>,
        histogram: Histogram,
        again: Again,
    ) -> bool {
        let tensor = match self.known.get(name) {
            Some(&tensor) => tensor,
            None => {
                self.tensors.push(TensorInfo {
                    name: name.to_owned(),
                    shape,
                    elements: histogram.elements(),
                    role,
                    produced_in: None,
                    reduction: None,
                    backward_order: None,
                });
                self.known.insert(name.to_owned(), self.tensors.len() - 1);
                self.tensors.len() - 1
            }
        };
        match self.cells.get_mut(&(step, tensor)) {
            None => {
                self.cells.insert((step, tensor), histogram);
            }
            Some(_) if again == Again::Fails => return false,
            Some(there) if again == Again::Replaces => *there = histogram,
            Some(there) => return there.merge(&histogram).is_ok(),
        }
        true
    }

    /// Notes that something of this name was passed over.
    pub fn leave_out(&mut self, name: &str) {
        // The names are kept to count each once; a file with more tags than this gets a lower bound.
        if self.left_out_names.len() < 1 << 16 && self.left_out_names.insert(name.to_owned()) {
            self.left_out.0 += 1;
            self.left_out.1.get_or_insert_with(|| name.to_owned());
        }
    }

    /// Takes a scalar if its name says that it is a loss scale, a flag of overflow or the loss.
    pub fn scalar(&mut self, step: u64, name: &str, value: f64) {
        let lower = name.to_ascii_lowercase().replace(['-', ' ', '.'], "_");
        let named = |parts: &[&str]| parts.iter().any(|part| lower.contains(part));
        let last = lower.rsplit('/').next().unwrap_or_default().to_owned();
        if named(&[
            "loss_scale",
            "lossscale",
            "grad_scale",
            "gradscale",
            "amp_scale",
            "scaler",
        ]) && !named(&["log2", "log_2", "exponent"])
        {
            if value.is_finite() && value > 0.0 {
                self.scales.insert(step, value);
                self.note(name);
            }
        } else if named(&["found_inf", "overflow"]) {
            if value == 0.0 || value == 1.0 {
                self.found_inf.insert(step, value == 1.0);
                self.note(name);
            }
        } else if last == "loss" || last == "train_loss" {
            self.losses.insert(step, value);
        } else if self.other_scalar.is_none() {
            self.other_scalar = Some(name.to_owned());
        }
    }

    fn note(&mut self, tag: &str) {
        if !self.scalar_tags.iter().any(|known| known == tag) && self.scalar_tags.len() < 8 {
            self.scalar_tags.push(tag.to_owned());
        }
    }

    /// The run, once everything is read.
    pub fn finish(
        mut self,
        name: &str,
        path: &Path,
        reading: &gradients::Options,
    ) -> Result<HistogramRun, HistogramError> {
        if self.cells.is_empty() {
            let short = |name: &str| format!("{:?}", crate::text::shortened(name, 80));
            let found = match (&self.left_out, &self.other_scalar) {
                ((n, Some(example)), _) => {
                    format!("no gradient but {}, such as {}", tags(*n), short(example))
                }
                (_, Some(scalar)) => format!("scalars alone, such as {}", short(scalar)),
                _ => "no histogram".to_owned(),
            };
            return Err(HistogramError::NoGradients {
                path: path.to_owned(),
                found,
            });
        }
        self.divide(reading.dump_scale());
        let mut steps: Vec<u64> = self.cells.keys().map(|&(step, _)| step).collect();
        steps.extend(self.found_inf.keys());
        steps.sort_unstable();
        steps.dedup();
        let width = self.tensors.len();
        let mut trace = Trace {
            run_id: name.to_owned(),
            tensors: std::mem::take(&mut self.tensors),
            steps: steps
                .iter()
                .map(|&step| Step {
                    step,
                    loss_scale: self.scales.get(&step).copied(),
                    found_inf: self.found_inf.get(&step).copied(),
                    loss: self.losses.get(&step).copied(),
                })
                .collect(),
            amax: vec![f32::NAN; steps.len() * width],
            nonfinite: vec![0; steps.len() * width],
            ..Trace::default()
        };
        let mut histograms = Vec::with_capacity(self.cells.len());
        let mut rows = steps.iter().enumerate().peekable();
        for ((step, tensor), histogram) in std::mem::take(&mut self.cells) {
            while rows.next_if(|&(_, &at)| at < step).is_some() {}
            let row = rows.peek().map_or(0, |&(row, _)| row);
            let cell = row * width + tensor;
            trace.amax[cell] = amax_of(&histogram);
            trace.nonfinite[cell] = nonfinite_of(&histogram);
            histograms.push(Placed {
                row,
                tensor,
                histogram,
            });
        }
        self.warn(path, &trace, &histograms);
        Ok(HistogramRun {
            name: name.to_owned(),
            trace,
            histograms,
            warnings: self.warnings,
        })
    }

    /// Divides the loss scale out of histograms that still carry it.
    fn divide(&mut self, dump_scale: DumpScale) {
        for ((step, _), histogram) in &mut self.cells {
            let scale = match dump_scale {
                DumpScale::Value(scale) => Some(scale),
                DumpScale::Auto => self.scales.range(..=*step).next_back().map(|(_, &s)| s),
                DumpScale::None => None,
            };
            if let Some(scale) = scale {
                histogram.divide(scale);
            }
        }
        if dump_scale == DumpScale::Auto && self.scales.is_empty() {
            self.warnings.push(Warning::new(
                Kind::LoggedScale,
                "--dump-scale auto, and no scalar tag of a loss scale",
                "the histograms are taken as they are",
                "--dump-scale with the number",
            ));
        }
    }

    fn warn(&mut self, path: &Path, trace: &Trace, histograms: &[Placed]) {
        let shown = path.display();
        self.warnings.push(Warning::new(
            Kind::NotExact,
            format!("{shown} holds histograms or statistics, not gradients"),
            "counts are bounds: an element lies anywhere in its bin, zeros are not told from tiny values, and gradients logged before unscaling still carry the loss scale",
            "a dump of the gradients or gradscale's recorder for exact counts; --dump-scale S if the loss scale is still in them",
        ));
        if let (n @ 1.., Some(example)) = &self.left_out {
            self.warnings.push(Warning::new(
                Kind::TensorsLeftOut,
                format!(
                    "{} left out in {shown} that no name says are gradients, such as {example:?}",
                    tags(*n)
                ),
                "they are taken for something else than gradients, and count nowhere",
                "--tensors GLOB, if they are gradients",
            ));
        }
        if !self.scalar_tags.is_empty() {
            self.warnings.push(Warning::new(
                Kind::LoggedScale,
                format!(
                    "the scalar tags {} are taken as the scale and overflow flag of their steps",
                    self.scalar_tags
                        .iter()
                        .map(|t| format!("{t:?}"))
                        .collect::<Vec<_>>()
                        .join(", ")
                ),
                "a tag that means something else would mislead",
                "nothing, if that is what they are",
            ));
        }
        if let Some(warning) = wholly_flushed(trace, histograms) {
            self.warnings.push(warning);
        }
    }
}

/// "1 tag", "2 tags".
fn tags(n: u64) -> String {
    format!("{n} tag{}", if n == 1 { "" } else { "s" })
}

/// amax as the trace has it: NaN where the histogram does not say it to within 2^-10.
fn amax_of(histogram: &Histogram) -> f32 {
    match histogram.amax() {
        None if histogram.elements() > 0 => 0.0,
        Some((least, most)) if most - least <= most / 1024.0 => most,
        _ => f32::NAN,
    }
}

fn nonfinite_of(histogram: &Histogram) -> u8 {
    let (inf, nan) = histogram.nonfinite();
    let bit = |set: bool, bit: u8| if set { bit } else { 0 };
    bit(inf > 0, nonfinite::INF)
        | bit(nan > 0, nonfinite::NAN)
        | bit(
            histogram.finite() == 0 && histogram.elements() > 0,
            nonfinite::NONE_FINITE,
        )
}

/// The largest magnitude that each tensor can have reached over all steps; `None` where it was never seen.
pub(crate) fn largest(trace: &Trace, histograms: &[Placed]) -> Vec<Option<f32>> {
    let mut all = vec![None::<f32>; trace.tensors.len()];
    for placed in histograms {
        if let Some((_, most)) = placed.histogram.amax() {
            let seen = &mut all[placed.tensor];
            *seen = Some(seen.map_or(most, |seen| seen.max(most)));
        }
    }
    all
}

/// The tensors whose largest element becomes zero at scale 1, by name, with their amax; smallest first.
pub(crate) fn flushed_at_one<'a>(trace: &'a Trace, largest: &[Option<f32>]) -> Vec<(&'a str, f32)> {
    let mut flushed: Vec<(&str, f32)> = trace
        .tensors
        .iter()
        .zip(largest)
        .filter(|(tensor, _)| tensor.role != Role::Activation)
        .filter_map(|(tensor, amax)| Some((tensor.name.as_str(), (*amax)?)))
        .filter(|&(_, amax)| amax > 0.0 && amax <= FLUSHED)
        .collect();
    flushed.sort_by(|a, b| a.1.total_cmp(&b.1).then_with(|| a.0.cmp(b.0)));
    flushed
}

/// The smallest power-of-two exponent at which a magnitude reaches 2^-24, the smallest value of FP16.
pub(crate) fn representable_from(amax: f32) -> i32 {
    let mut exponent = (-24.0 - f64::from(amax).log2()).floor() as i32 - 1;
    while f64::from(amax) * exp2(exponent) < exp2(-24) {
        exponent += 1;
    }
    exponent
}

fn wholly_flushed(trace: &Trace, histograms: &[Placed]) -> Option<Warning> {
    let flushed = flushed_at_one(trace, &largest(trace, histograms));
    let (_, smallest) = *flushed.first()?;
    let mut names: Vec<String> = flushed
        .iter()
        .take(NAMED)
        .map(|(name, _)| (*name).to_owned())
        .collect();
    if flushed.len() > NAMED {
        names.push(format!("and {} more", flushed.len() - NAMED));
    }
    Some(Warning::new(
        Kind::WhollyFlushed,
        format!(
            "{} of {} tensors become zero entirely in FP16 at scale 1, no element of them is above 2^-25: {}",
            flushed.len(),
            trace.tensors.len(),
            names.join(", ")
        ),
        "in a bias in front of a normalisation layer the true gradient is zero and what is lost is rounding noise, which is harmless; any other such tensor does not train",
        format!(
            "a scale of 2^{} or more, at which the largest element of each is representable",
            representable_from(smallest)
        ),
    ))
}
