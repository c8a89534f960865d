//! Outcome rates against the loss scale.

use super::{Axis, Canvas, Dash, Draw, DrawError, Legend, Ticks, palette};
use crate::float::Format;
use crate::tally::{Replayed, Sketch};
use crate::text;
use plotters::prelude::DrawingBackend;

/// Shares of the finite nonzero elements by outcome, at each scale.
#[derive(Debug, Clone)]
pub struct Rates {
    /// Which input.
    pub label: String,
    /// The format's name.
    pub format: &'static str,
    /// Finite nonzero elements.
    pub elements: u64,
    /// The outcomes, by ascending scale.
    pub rates: Vec<Replayed>,
    /// Scales to mark, with what they are.
    pub marks: Vec<(f64, String)>,
}

impl Rates {
    /// Replays a sketch at each scale.
    pub fn of(
        label: &str,
        sketch: &Sketch,
        format: Format,
        scales: &[f32],
        marks: Vec<(f64, String)>,
    ) -> Rates {
        Rates {
            label: label.to_owned(),
            format: format.name,
            elements: sketch.finite_nonzero(),
            rates: scales
                .iter()
                .map(|&scale| sketch.replay(format, scale, false))
                .collect(),
            marks,
        }
    }
}

/// Shares below this are drawn at the axis' foot; exactly zero is not drawn at all.
pub(super) const LEAST: f64 = 1e-7;

impl Draw for Rates {
    fn title(&self) -> String {
        let clean: Vec<f64> = self
            .rates
            .iter()
            .filter(|r| r.outcomes.overflow_to_infinity == 0)
            .map(|r| f64::from(r.loss_scale))
            .collect();
        match clean.last() {
            Some(&scale) => {
                let at = self.rates.iter().find(|r| f64::from(r.loss_scale) == scale);
                let lost = at.map_or(0.0, |r| r.outcomes.underflow_fraction());
                format!(
                    "In the sampled steps nothing overflows up to scale {}, where {} of the nonzero gradients still become zero",
                    text::scale(scale),
                    if lost == 0.0 {
                        "none".to_owned()
                    } else {
                        text::fraction(lost)
                    }
                )
            }
            None => "Every scale shown overflows".to_owned(),
        }
    }

    fn caption(&self) -> String {
        format!(
            "{}: outcomes of {} finite nonzero gradient elements in {} at each loss scale, all recorded steps together. Exactly zero is not drawn; shares below 1e-5 % lie on the axis. gradscale plot --kind rates",
            self.label,
            text::count(self.elements),
            self.format
        )
    }

    fn csv(&self) -> String {
        let mut csv = String::from(
            "loss_scale,underflow_to_zero,subnormal,normal,overflow_to_infinity,underflow_fraction,overflow_fraction,exact\n",
        );
        for rate in &self.rates {
            let o = &rate.outcomes;
            csv.push_str(&format!(
                "{},{},{},{},{},{},{},{}\n",
                f64::from(rate.loss_scale),
                o.underflow_to_zero,
                o.subnormal,
                o.normal,
                o.overflow_to_infinity,
                o.underflow_fraction(),
                o.overflow_fraction(),
                rate.why_not_exact.is_none()
            ));
        }
        csv
    }

    fn draw<B: DrawingBackend>(&self, canvas: &mut Canvas<'_, B>) -> Result<(), DrawError> {
        let lines = [
            ("underflow to zero", palette::UNDERFLOW, Dash::Solid),
            ("subnormal", palette::SUBNORMAL, Dash::Short),
            ("normal", palette::GOOD, Dash::Dots),
            ("overflow to infinity", palette::OVERFLOW, Dash::Long),
        ];
        let legend: Vec<Legend> = lines
            .iter()
            .map(|(name, color, dash)| Legend::Line((*name).to_owned(), *color, *dash))
            .collect();
        canvas.legend(&legend)?;
        let log2 = |rate: &Replayed| f64::from(rate.loss_scale).log2();
        let low = self.rates.first().map_or(0.0, log2);
        let high = self.rates.last().map_or(1.0, log2);
        over_scales(canvas, low, high)?;
        for (i, (_, color, dash)) in lines.iter().enumerate() {
            let share = |rate: &Replayed| {
                let o = &rate.outcomes;
                let part = [
                    o.underflow_to_zero,
                    o.subnormal,
                    o.normal,
                    o.overflow_to_infinity,
                ][i];
                crate::tally::fraction(part, o.finite_nonzero())
            };
            // A stretch of exact zeros breaks the line.
            let mut stretch = Vec::new();
            for rate in &self.rates {
                match share(rate) {
                    0.0 => {
                        canvas.line(&std::mem::take(&mut stretch), *color, *dash)?;
                    }
                    share => stretch.push((log2(rate), share.max(LEAST).log10())),
                }
            }
            canvas.line(&stretch, *color, *dash)?;
        }
        mark_scales(canvas, &self.marks)
    }
}

/// A frame of shares, by powers of ten, over loss scales whose log2 lies between `low` and `high`.
pub(super) fn over_scales<B: DrawingBackend>(
    canvas: &mut Canvas<'_, B>,
    low: f64,
    high: f64,
) -> Result<(), DrawError> {
    canvas.frame(
        Axis::new("loss scale", low, high, Ticks::PowersOfTwo),
        Axis::new(
            "share of the finite nonzero elements",
            LEAST.log10(),
            0.0,
            Ticks::Percent,
        ),
        (0.0, 1.0),
    )
}

/// Named scales in such a frame.
pub(super) fn mark_scales<B: DrawingBackend>(
    canvas: &mut Canvas<'_, B>,
    marks: &[(f64, String)],
) -> Result<(), DrawError> {
    for (row, (scale, name)) in marks.iter().enumerate() {
        canvas.vertical(scale.log2(), name, row as i32, palette::MAIN, Dash::Dots)?;
    }
    Ok(())
}
