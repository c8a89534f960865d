//! A gate for continuous integration: does a scale keep underflow and overflow within limits?

use super::{Analysis, Group, Rate};

/// The limits, as fractions of the finite nonzero elements.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Limits {
    /// Elements flushed to zero.
    pub underflow: Option<f64>,
    /// Elements that overflow.
    pub overflow: Option<f64>,
}

/// What a gate says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Passage {
    /// Within every limit, also at the worse end of the bounds.
    Open,
    /// A limit lies inside the bounds.
    CannotTell,
    /// A limit is crossed, also at the better end.
    Shut,
}

/// One limit that is not kept, or not surely.
#[derive(Debug, Clone, PartialEq)]
pub struct Crossing {
    /// The group's name.
    pub group: String,
    /// `underflow` or `overflow`.
    pub what: &'static str,
    /// The scale.
    pub loss_scale: f32,
    /// Least and largest fraction that the record allows.
    pub fraction: (f64, f64),
    /// The limit.
    pub limit: f64,
    /// How sure it is.
    pub passage: Passage,
}

/// Holds every group's rate at `loss_scale` to the limits. Groups without that scale are passed over.
pub fn gate(analysis: &Analysis, loss_scale: f32, limits: Limits) -> Vec<Crossing> {
    let mut crossings = Vec::new();
    for group in &analysis.groups {
        let Some(rate) = group
            .rates
            .iter()
            .find(|rate| rate.loss_scale == loss_scale)
        else {
            continue;
        };
        let parts: [(&'static str, Option<f64>, (f64, f64)); 2] = [
            ("underflow", limits.underflow, fractions(rate, true)),
            ("overflow", limits.overflow, fractions(rate, false)),
        ];
        for (what, limit, (low, high)) in parts {
            let Some(limit) = limit else { continue };
            let passage = if low > limit {
                Passage::Shut
            } else if high > limit {
                Passage::CannotTell
            } else {
                continue;
            };
            let group = name(group, analysis);
            crossings.push(Crossing {
                group,
                what,
                loss_scale,
                fraction: (low, high),
                limit,
                passage,
            });
        }
    }
    crossings
}

fn name(group: &Group, analysis: &Analysis) -> String {
    match (&group.tensor, group.step) {
        (Some(tensor), _) => tensor.clone(),
        (None, Some(step)) => format!("step {step}"),
        (None, None) => analysis
            .inputs
            .get(group.run)
            .map_or("all".to_owned(), |input| input.path.clone()),
    }
}

/// Least and largest fraction. Zeros that may be underflows of a capture count in both parts of the largest.
fn fractions(rate: &Rate, underflow: bool) -> (f64, f64) {
    if let Some(shares) = rate.shares {
        return if underflow {
            shares.underflow
        } else {
            shares.overflow
        };
    }
    let n = rate.outcomes.finite_nonzero();
    let of = |part: u64, whole: u64| crate::tally::fraction(part, whole);
    let (low, high) = rate.bounds.unwrap_or((rate.outcomes, rate.outcomes));
    if !underflow {
        return (
            of(low.overflow_to_infinity, n),
            of(high.overflow_to_infinity, n),
        );
    }
    (
        of(low.underflow_to_zero, n),
        of(high.underflow_to_zero, n + rate.captured_zeros),
    )
}
