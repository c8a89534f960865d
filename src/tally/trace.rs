//! A run's record: what happened at each step, tensor by tensor.

use super::{Capture, Sketch};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What a recorded tensor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The gradient of a parameter.
    #[default]
    Parameter,
    /// The gradient of an activation.
    ActivationGradient,
    /// A forward activation.
    Activation,
}

/// The format in which a tensor's values were produced, read off the values themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProducedIn {
    /// At most 11 significant bits in FP16's range.
    Fp16,
    /// At most 8 significant bits.
    Bf16,
    /// More significant bits than FP16 has.
    Fp32,
}

/// Whether a gradient was recorded before or after the sum over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reduction {
    /// Each rank's own gradient: this is where an overflow happens.
    Unreduced,
    /// After the all-reduce.
    Reduced,
}

/// One recorded tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorInfo {
    /// Its name, as in `named_parameters()`.
    pub name: String,
    /// Its shape; empty where it is not known.
    #[serde(default)]
    pub shape: Vec<u64>,
    /// How many elements it has.
    #[serde(default)]
    pub elements: u64,
    /// What it is.
    #[serde(default)]
    pub role: Role,
    /// The format that produced its values, where they tell.
    #[serde(default)]
    pub produced_in: Option<ProducedIn>,
    /// Before or after the reduction, in a distributed run.
    #[serde(default)]
    pub reduction: Option<Reduction>,
    /// Its place in the order in which backward reached the tensors.
    #[serde(default)]
    pub backward_order: Option<u64>,
}

/// What is known of one step as a whole.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// The optimizer step, from 0.
    pub step: u64,
    /// The loss scale the step ran at.
    pub loss_scale: Option<f64>,
    /// Whether the framework found inf or NaN in it.
    pub found_inf: Option<bool>,
    /// The loss.
    pub loss: Option<f64>,
}

/// Bits of [`Trace::nonfinite`].
pub mod nonfinite {
    /// An inf was seen.
    pub const INF: u8 = 1;
    /// A NaN was seen.
    pub const NAN: u8 = 2;
    /// No element was finite.
    pub const NONE_FINITE: u8 = 4;
}

/// The sketches of one sampled step, one a tensor, in the trace's order; empty for a tensor without a gradient.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Index into [`Trace::steps`].
    pub row: usize,
    /// One sketch a tensor.
    pub sketches: Vec<Sketch>,
}

/// A run: every step's amax, tensor by tensor, and sketches at the sampled steps.
///
/// Values are kept as they were recorded. Where `scaled` is set they are those of the backward pass, multiplied by the
/// step's `loss_scale`; [`unscaled_amax`](Trace::unscaled_amax) and [`unscaled_sample`](Trace::unscaled_sample) divide
/// it out.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Trace {
    /// What the chunks of one run share.
    pub run_id: String,
    /// Free facts: framework, device, precision, model.
    pub facts: Map<String, Value>,
    /// The tensors, in recorded order.
    pub tensors: Vec<TensorInfo>,
    /// Whether the values are multiplied by the step's loss scale.
    pub scaled: bool,
    /// The steps, ascending.
    pub steps: Vec<Step>,
    /// `steps × tensors`: the largest finite magnitude; NaN where the tensor had no gradient in that step.
    pub amax: Vec<f32>,
    /// `steps × tensors`: bits of [`nonfinite`].
    pub nonfinite: Vec<u8>,
    /// Sketches at the sampled steps, ascending by row.
    pub samples: Vec<Sample>,
    /// Sketches of the same steps' backward repeated in FP32; always unscaled.
    pub probes: Vec<Sample>,
}

/// Why two traces are not parts of one run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MergeError {
    /// They carry different run identifiers.
    #[error(
        "merging traces: found run_id {found:?} beside {expected:?}, expected one run; give each run on its own, or --as-ranks to join them"
    )]
    RunId {
        /// The second trace's.
        found: String,
        /// The first's.
        expected: String,
    },
    /// One holds scaled values and the other unscaled ones.
    #[error("merging traces: found scaled values beside unscaled ones, expected one kind in a run")]
    Scaled,
    /// A tensor was recorded before the reduction in one and after it in the other.
    #[error(
        "merging traces, tensor {tensor:?}: found reduced gradients beside unreduced ones, which must not be added"
    )]
    Reduction {
        /// The tensor.
        tensor: String,
    },
    /// The ranks of one step ran at different scales.
    #[error(
        "merging traces, step {step}: found loss_scale {found} beside {expected}, expected equal scales on all ranks"
    )]
    Scale {
        /// The step.
        step: u64,
        /// The second rank's.
        found: String,
        /// The first's.
        expected: String,
    },
}

impl Trace {
    /// amax of a tensor in a row, as recorded; `None` where it had no gradient.
    pub fn amax_at(&self, row: usize, tensor: usize) -> Option<f32> {
        let amax = self.amax[row * self.tensors.len() + tensor];
        (!amax.is_nan()).then_some(amax)
    }

    /// The nonfinite bits of a tensor in a row.
    pub fn nonfinite_at(&self, row: usize, tensor: usize) -> u8 {
        self.nonfinite[row * self.tensors.len() + tensor]
    }

    /// The scale that the recorded values of a row are multiplied by: 1 where they are not.
    pub fn scale_of_values(&self, row: usize) -> f64 {
        if self.scaled {
            self.steps[row].loss_scale.unwrap_or(1.0)
        } else {
            1.0
        }
    }

    /// amax of the unscaled gradient: the recorded one divided by the step's scale, rounded to f32 once.
    pub fn unscaled_amax(&self, row: usize, tensor: usize) -> Option<f32> {
        let scale = self.scale_of_values(row);
        self.amax_at(row, tensor)
            .map(|amax| (f64::from(amax) / scale) as f32)
    }

    /// The sketch of a sampled tensor in units of the unscaled gradient.
    ///
    /// Exact for a power-of-two scale; for another scale, and where the quotient would leave f32, `None`.
    pub fn unscaled_sample(&self, sample: &Sample, tensor: usize) -> Option<Sketch> {
        let exponent = crate::float::exact_log2(self.scale_of_values(sample.row))?;
        sample.sketches[tensor].shifted(-exponent)
    }

    /// First and last step, where there is one.
    pub fn span(&self) -> Option<(u64, u64)> {
        Some((self.steps.first()?.step, self.steps.last()?.step))
    }

    /// What the sampled values say about the format that produced each tensor.
    pub fn captures(&self) -> Vec<Capture> {
        let mut captures = vec![Capture::Undecided; self.tensors.len()];
        for sample in &self.samples {
            for (capture, sketch) in captures.iter_mut().zip(&sample.sketches) {
                *capture = capture.and(Capture::of(sketch));
            }
        }
        captures
    }

    /// Adds another part of the same run: later chunks of a rank, or other ranks' records of the same steps.
    ///
    /// Equal steps are joined: amax is the larger, flags are OR-ed, sketches add up. Tensors are matched by name.
    ///
    /// # Errors
    /// When the two are not parts of one run.
    pub fn merge(&mut self, other: &Trace) -> Result<(), MergeError> {
        if self.steps.is_empty() && self.tensors.is_empty() {
            *self = other.clone();
            return Ok(());
        }
        if self.run_id != other.run_id {
            return Err(MergeError::RunId {
                found: other.run_id.clone(),
                expected: self.run_id.clone(),
            });
        }
        if self.scaled != other.scaled && !other.steps.is_empty() {
            return Err(MergeError::Scaled);
        }
        let mut tensors = self.tensors.clone();
        let mut place = Vec::with_capacity(other.tensors.len());
        let known: std::collections::HashMap<&str, usize> = self
            .tensors
            .iter()
            .enumerate()
            .map(|(i, t)| (t.name.as_str(), i))
            .collect();
        for tensor in &other.tensors {
            match known.get(tensor.name.as_str()) {
                Some(&i) => {
                    let mine = &mut tensors[i];
                    if mine.reduction != tensor.reduction
                        && mine.reduction.is_some()
                        && tensor.reduction.is_some()
                    {
                        return Err(MergeError::Reduction {
                            tensor: tensor.name.clone(),
                        });
                    }
                    mine.produced_in = match (mine.produced_in, tensor.produced_in) {
                        (Some(ProducedIn::Fp32), _) | (_, Some(ProducedIn::Fp32)) => {
                            Some(ProducedIn::Fp32)
                        }
                        (Some(ProducedIn::Fp16), _) | (_, Some(ProducedIn::Fp16)) => {
                            Some(ProducedIn::Fp16)
                        }
                        (mine, theirs) => mine.or(theirs),
                    };
                    place.push(i);
                }
                None => {
                    place.push(tensors.len());
                    tensors.push(tensor.clone());
                }
            }
        }
        let (old, width) = (self.tensors.len(), tensors.len());
        let follows = self.steps.last().map(|s| s.step) < other.steps.first().map(|s| s.step);
        if follows && width == old && place.iter().copied().eq(0..old) {
            // The next chunk of the same rank: nothing to interleave.
            let rows = self.steps.len();
            let moved = |sample: &Sample| Sample {
                row: sample.row + rows,
                ..sample.clone()
            };
            self.samples.extend(other.samples.iter().map(moved));
            self.probes.extend(other.probes.iter().map(moved));
            self.steps.extend_from_slice(&other.steps);
            self.amax.extend_from_slice(&other.amax);
            self.nonfinite.extend_from_slice(&other.nonfinite);
            self.tensors = tensors;
            return Ok(());
        }
        let mut steps: Vec<Step> = Vec::with_capacity(self.steps.len() + other.steps.len());
        let mut amax = Vec::new();
        let mut nonfinite = Vec::new();
        let (mut rows_mine, mut rows_other) =
            (vec![0; self.steps.len()], vec![0; other.steps.len()]);
        let (mut i, mut j) = (0, 0);
        while i < self.steps.len() || j < other.steps.len() {
            let mine = self.steps.get(i);
            let theirs = other.steps.get(j);
            let next = mine
                .map_or(u64::MAX, |s| s.step)
                .min(theirs.map_or(u64::MAX, |s| s.step));
            let start = amax.len();
            amax.resize(start + width, f32::NAN);
            nonfinite.resize(start + width, 0u8);
            let mut step = Step {
                step: next,
                loss_scale: None,
                found_inf: None,
                loss: None,
            };
            if let Some(mine) = mine.filter(|s| s.step == next) {
                step = *mine;
                amax[start..start + old].copy_from_slice(&self.amax[i * old..(i + 1) * old]);
                nonfinite[start..start + old]
                    .copy_from_slice(&self.nonfinite[i * old..(i + 1) * old]);
                rows_mine[i] = steps.len();
                i += 1;
            }
            if let Some(theirs) = theirs.filter(|s| s.step == next) {
                if let (Some(a), Some(b)) = (step.loss_scale, theirs.loss_scale)
                    && a.to_bits() != b.to_bits()
                {
                    return Err(MergeError::Scale {
                        step: next,
                        found: b.to_string(),
                        expected: a.to_string(),
                    });
                }
                step.loss_scale = step.loss_scale.or(theirs.loss_scale);
                step.found_inf = match (step.found_inf, theirs.found_inf) {
                    (Some(a), Some(b)) => Some(a || b),
                    (a, b) => a.or(b),
                };
                step.loss = step.loss.or(theirs.loss);
                for (n, &to) in place.iter().enumerate() {
                    let (from, to) = (j * place.len() + n, start + to);
                    let (mine, theirs) = (nonfinite[to], other.nonfinite[from]);
                    // A rank without a gradient of this tensor has nothing to say about it.
                    let nothing_finite = match (amax[to].is_nan(), other.amax[from].is_nan()) {
                        (true, _) => theirs,
                        (_, true) => mine,
                        (false, false) => mine & theirs,
                    } & nonfinite::NONE_FINITE;
                    nonfinite[to] = (mine | theirs) & !nonfinite::NONE_FINITE | nothing_finite;
                    amax[to] = amax[to].max(other.amax[from]); // f32::max ignores NaN: no gradient on one rank
                }
                rows_other[j] = steps.len();
                j += 1;
            }
            steps.push(step);
        }
        let join = |mine: &[Sample], theirs: &[Sample]| {
            let mut joined = std::collections::BTreeMap::<usize, Vec<Sketch>>::new();
            for sample in mine {
                let mut sketches = sample.sketches.clone();
                sketches.resize_with(width, Sketch::default);
                joined.insert(rows_mine[sample.row], sketches);
            }
            for sample in theirs {
                let sketches = joined
                    .entry(rows_other[sample.row])
                    .or_insert_with(|| vec![Sketch::default(); width]);
                for (sketch, &to) in sample.sketches.iter().zip(&place) {
                    sketches[to].merge(sketch);
                }
            }
            joined
                .into_iter()
                .map(|(row, sketches)| Sample { row, sketches })
                .collect()
        };
        let (samples, probes) = (
            join(&self.samples, &other.samples),
            join(&self.probes, &other.probes),
        );
        for (key, value) in &other.facts {
            self.facts
                .entry(key.clone())
                .or_insert_with(|| value.clone());
        }
        self.tensors = tensors;
        self.steps = steps;
        self.amax = amax;
        self.nonfinite = nonfinite;
        self.samples = samples;
        self.probes = probes;
        Ok(())
    }

    /// Keeps the tensors whose name passes.
    pub fn retain_tensors(&mut self, keep: impl Fn(&str) -> bool) {
        let kept: Vec<usize> = (0..self.tensors.len())
            .filter(|&n| keep(&self.tensors[n].name))
            .collect();
        if kept.len() == self.tensors.len() {
            return;
        }
        let width = self.tensors.len();
        let rows = self.steps.len();
        let pick = |n: usize| kept.iter().map(move |&k| n * width + k);
        self.amax = (0..rows).flat_map(pick).map(|i| self.amax[i]).collect();
        self.nonfinite = (0..rows)
            .flat_map(pick)
            .map(|i| self.nonfinite[i])
            .collect();
        for sample in self.samples.iter_mut().chain(&mut self.probes) {
            sample.sketches = kept
                .iter()
                .map(|&k| std::mem::take(&mut sample.sketches[k]))
                .collect();
        }
        self.tensors = kept.iter().map(|&k| self.tensors[k].clone()).collect();
    }
}
