//! What histograms say of a run: bounds of every rate, and the scales at which every tensor fits.

use crate::float::{FP16, Format, exp2};
use crate::histograms::{Placed, flushed_at_one, largest, representable_from};
use crate::tally::{Histogram, Role, Spread, Trace};

/// Elements of histograms, added up at each scale.
#[derive(Debug, Clone, PartialEq)]
pub struct Bounded {
    /// All elements.
    pub elements: u64,
    /// Elements that are infinite.
    pub inf: u64,
    /// Elements that are NaN.
    pub nan: u64,
    /// The least and the most that amax can be; `None` where no element is finite, or nothing says how large.
    pub amax: Option<(f32, f32)>,
    /// One entry a scale.
    pub spreads: Vec<Spread>,
}

impl Bounded {
    /// No elements.
    pub fn new(scales: &[f32]) -> Bounded {
        Bounded {
            elements: 0,
            inf: 0,
            nan: 0,
            amax: None,
            spreads: scales.iter().copied().map(Spread::at).collect(),
        }
    }

    /// Adds the elements of a histogram.
    pub fn add(&mut self, histogram: &Histogram, format: Format, flush_subnormals: bool) {
        self.elements += histogram.elements();
        let (inf, nan) = histogram.nonfinite();
        self.inf += inf;
        self.nan += nan;
        self.amax = match (self.amax, histogram.amax()) {
            (Some(a), Some(b)) => Some((a.0.max(b.0), a.1.max(b.1))),
            (a, b) => a.or(b),
        };
        for spread in &mut self.spreads {
            spread.add(&histogram.replay(format, spread.loss_scale, flush_subnormals));
        }
    }

    /// amax where it is known to within 2^-10, else the most that it can be.
    pub fn largest(&self) -> Option<f32> {
        self.amax.map(|(_, most)| most)
    }

    /// Elements that are zero, least and most.
    pub fn zeros(&self) -> (u64, u64) {
        // Which elements are zeros does not depend on the scale; underflows do, and a tensor's sums bound both together.
        self.spreads
            .iter()
            .fold((0, u64::MAX), |(low, high), spread| {
                (low.max(spread.low.zero_in), high.min(spread.high.zero_in))
            })
    }
}

/// Fractions at one scale, each as least and most; of the finite nonzero elements, or of their norms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shares {
    /// Share that becomes zero.
    pub underflow: (f64, f64),
    /// Share that overflows.
    pub overflow: (f64, f64),
    /// Share of the L1 norm that becomes zero.
    pub l1: (f64, f64),
    /// Share of the L2 norm that becomes zero.
    pub l2: (f64, f64),
}

impl Shares {
    /// Those of a spread.
    pub fn of(spread: &Spread) -> Shares {
        Shares {
            underflow: spread.underflow_fraction(),
            overflow: spread.overflow_fraction(),
            l1: spread.l1_fraction(),
            l2: spread.l2_fraction(),
        }
    }
}

/// One tensor of a run of histograms, all steps together.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorSummary {
    /// Its name.
    pub name: String,
    /// What it is.
    pub role: Role,
    /// Its elements and their bounds at the summary's scales.
    pub bounded: Bounded,
    /// Where its largest element becomes zero at scale 1: the power of two from which it is representable.
    pub flushed_until_log2: Option<i32>,
}

/// What histograms say of a run, all steps together.
#[derive(Debug, Clone, PartialEq)]
pub struct HistogramSummary {
    /// All gradients.
    pub all: Bounded,
    /// Each tensor, as recorded.
    pub tensors: Vec<TensorSummary>,
    /// The smallest power of two, as its exponent, at which every tensor's largest element reaches 2^-24; `None` where
    /// there is no nonzero element.
    pub fits_from_log2: Option<i32>,
    /// The largest power of two, as its exponent, at which nothing can overflow; `None` where there is no nonzero
    /// element.
    pub fits_until_log2: Option<i32>,
    /// Steps with inf or NaN.
    pub nonfinite_steps: u64,
}

impl HistogramSummary {
    /// Gathers the histograms of a run, replayed in FP16 at `scales`; `None` where there are none.
    pub fn of(trace: &Trace, histograms: &[Placed], scales: &[f32]) -> Option<HistogramSummary> {
        if histograms.is_empty() {
            return None;
        }
        let mut all = Bounded::new(scales);
        let mut tensors: Vec<TensorSummary> = trace
            .tensors
            .iter()
            .map(|tensor| TensorSummary {
                name: tensor.name.clone(),
                role: tensor.role,
                bounded: Bounded::new(scales),
                flushed_until_log2: None,
            })
            .collect();
        let mut nonfinite_rows = std::collections::BTreeSet::new();
        // The least that a tensor's amax can have been: from there on its largest element is surely representable.
        let mut least = vec![0.0f32; tensors.len()];
        for placed in histograms {
            let tensor = &mut tensors[placed.tensor];
            if tensor.role == Role::Activation {
                continue;
            }
            tensor.bounded.add(&placed.histogram, FP16, false);
            all.add(&placed.histogram, FP16, false);
            if placed.histogram.nonfinite() != (0, 0) {
                nonfinite_rows.insert(placed.row);
            }
            if let Some((low, _)) = placed.histogram.amax() {
                least[placed.tensor] = least[placed.tensor].max(low);
            }
        }
        let largest = largest(trace, histograms);
        for (name, amax) in flushed_at_one(trace, &largest) {
            if let Some(tensor) = tensors.iter_mut().find(|tensor| tensor.name == name) {
                tensor.flushed_until_log2 = Some(representable_from(amax));
            }
        }
        tensors.retain(|tensor| tensor.role != Role::Activation && tensor.bounded.elements > 0);
        let smallest = least
            .into_iter()
            .filter(|amax| *amax > 0.0)
            .reduce(f32::min);
        let amax = all.largest().filter(|amax| *amax > 0.0);
        Some(HistogramSummary {
            fits_from_log2: smallest.map(representable_from),
            fits_until_log2: amax.map(no_overflow_until),
            nonfinite_steps: nonfinite_rows.len() as u64,
            all,
            tensors,
        })
    }

    /// The tensors that become zero as a whole at scale 1, the smallest first.
    pub fn wholly_flushed(&self) -> Vec<&TensorSummary> {
        let mut flushed: Vec<&TensorSummary> = self
            .tensors
            .iter()
            .filter(|tensor| tensor.flushed_until_log2.is_some())
            .collect();
        flushed.sort_by(|a, b| {
            let amax = |t: &TensorSummary| t.bounded.largest().unwrap_or(0.0);
            amax(a)
                .total_cmp(&amax(b))
                .then_with(|| a.name.cmp(&b.name))
        });
        flushed
    }
}

/// The largest exponent k at which `amax`·2^k rounds to a finite FP16.
fn no_overflow_until(amax: f32) -> i32 {
    let over = f64::from(f32::from_bits(FP16.first_overflow_bits()));
    let mut exponent = (over / f64::from(amax)).log2().ceil() as i32 + 1;
    while f64::from(amax) * exp2(exponent) >= over {
        exponent -= 1;
    }
    exponent
}
