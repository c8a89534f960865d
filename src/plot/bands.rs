//! Outcome rates against the loss scale where only histograms are known: bands instead of lines.

use super::rates::{LEAST, mark_scales, over_scales};
use super::{Canvas, Dash, Draw, DrawError, Legend, palette};
use crate::tally::Spread;
use crate::text;
use plotters::prelude::DrawingBackend;

/// Shares of the finite nonzero elements that become zero or overflow, each between two bounds, at each scale.
#[derive(Debug, Clone)]
pub struct Bands {
    /// Which input.
    pub label: String,
    /// The format's name.
    pub format: &'static str,
    /// All elements.
    pub elements: u64,
    /// The bounds, by ascending scale.
    pub spreads: Vec<Spread>,
    /// Scales to mark, with what they are.
    pub marks: Vec<(f64, String)>,
}

/// `3 %`, or `0 to 3 %`.
fn between((low, high): (f64, f64)) -> String {
    if low == high {
        text::fraction(low)
    } else {
        format!("{} to {}", text::fraction(low), text::fraction(high))
    }
}

impl Draw for Bands {
    fn title(&self) -> String {
        let clean = self
            .spreads
            .iter()
            .rfind(|spread| spread.high.overflow_to_infinity == 0);
        match clean {
            Some(spread) => format!(
                "Nothing logged overflows up to scale {}, where {} of the nonzero gradients become zero",
                text::scale(spread.loss_scale.into()),
                between(spread.underflow_fraction())
            ),
            None => "At every scale shown something may overflow".to_owned(),
        }
    }

    fn caption(&self) -> String {
        format!(
            "{}: what histograms of {} gradient elements say of {} at each loss scale, all logged steps together. A band reaches from the least to the most that the bins allow; the truth lies in it, and nothing says where. Shares below 1e-5 % lie on the axis. gradscale plot --kind rates",
            self.label,
            text::count(self.elements),
            self.format
        )
    }

    fn csv(&self) -> String {
        let mut csv = String::from(
            "loss_scale,underflow_to_zero_low,underflow_to_zero_high,overflow_to_infinity_low,overflow_to_infinity_high,underflow_fraction_low,underflow_fraction_high,overflow_fraction_low,overflow_fraction_high\n",
        );
        for spread in &self.spreads {
            let (low, high) = (&spread.low, &spread.high);
            let (under, over) = (spread.underflow_fraction(), spread.overflow_fraction());
            csv.push_str(&format!(
                "{},{},{},{},{},{},{},{},{}\n",
                f64::from(spread.loss_scale),
                low.underflow_to_zero,
                high.underflow_to_zero,
                low.overflow_to_infinity,
                high.overflow_to_infinity,
                under.0,
                under.1,
                over.0,
                over.1
            ));
        }
        csv
    }

    fn draw<B: DrawingBackend>(&self, canvas: &mut Canvas<'_, B>) -> Result<(), DrawError> {
        type Share = fn(&Spread) -> (f64, f64);
        let bands: [(&str, _, Dash, Share); 2] = [
            (
                "underflow to zero",
                palette::UNDERFLOW,
                Dash::Solid,
                Spread::underflow_fraction,
            ),
            (
                "overflow to infinity",
                palette::OVERFLOW,
                Dash::Long,
                Spread::overflow_fraction,
            ),
        ];
        let legend: Vec<Legend> = bands
            .iter()
            .flat_map(|(name, color, dash, _)| {
                [
                    Legend::Line(format!("{name}: at most"), *color, *dash),
                    Legend::Line(format!("{name}: at least"), *color, Dash::Dots),
                ]
            })
            .collect();
        canvas.note(&format!(
            "{}: histograms or statistics of {} elements",
            text::shortened(&self.label, 80),
            text::count(self.elements)
        ))?;
        canvas.legend(&legend)?;
        let log2 = |spread: &Spread| f64::from(spread.loss_scale).log2();
        let low = self.spreads.first().map_or(0.0, log2);
        let high = self.spreads.last().map_or(1.0, log2);
        over_scales(canvas, low, high)?;
        let height = |share: f64| share.max(LEAST).log10();
        for (_, color, dash, share) in bands {
            // A stretch at which surely nothing happens breaks the band.
            let mut stretch: Vec<(f64, f64, f64)> = Vec::new();
            let flush = |stretch: &mut Vec<(f64, f64, f64)>| {
                let band = std::mem::take(stretch);
                let line = |of: fn(&(f64, f64, f64)) -> (f64, f64)| -> Vec<(f64, f64)> {
                    band.iter().map(of).collect()
                };
                canvas.band(&band, color, 0.22)?;
                canvas.line(&line(|p| (p.0, p.2)), color, dash)?;
                let least: Vec<(f64, f64)> = line(|p| (p.0, p.1))
                    .into_iter()
                    .filter(|point| point.1 > LEAST.log10())
                    .collect();
                canvas.line(&least, color, Dash::Dots)
            };
            for spread in &self.spreads {
                match share(spread) {
                    (_, 0.0) => flush(&mut stretch)?,
                    (least, most) => stretch.push((log2(spread), height(least), height(most))),
                }
            }
            flush(&mut stretch)?;
        }
        mark_scales(canvas, &self.marks)
    }
}
