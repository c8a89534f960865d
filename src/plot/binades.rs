//! The gradient's binades with the window of FP16 at a scale.

use super::{Axis, Canvas, Dash, Draw, DrawError, Legend, Ticks, palette};
use crate::tally::Sketch;
use crate::text;
use plotters::prelude::DrawingBackend;

/// How many elements lie in each binade, and which of them FP16 holds at a scale.
#[derive(Debug, Clone)]
pub struct Binades {
    /// Which input.
    pub label: String,
    /// The elements.
    pub sketch: Sketch,
    /// The scale whose window is drawn.
    pub loss_scale: f64,
    /// What that scale is.
    pub scale_is: String,
}

impl Binades {
    /// Exponent and count of each binade that holds an element, ascending.
    fn counts(&self) -> Vec<(i32, u64)> {
        let mut counts: Vec<(i32, u64)> = Vec::new();
        for bin in self.sketch.bins() {
            match counts.last_mut() {
                Some((exponent, count)) if *exponent == bin.exponent() => *count += bin.count,
                _ => counts.push((bin.exponent(), bin.count)),
            }
        }
        counts
    }
}

impl Draw for Binades {
    fn title(&self) -> String {
        match (self.sketch.smallest_nonzero(), self.sketch.amax()) {
            (Some(smallest), Some(amax)) => {
                let span = f64::from(amax).log2() - f64::from(smallest).log2();
                format!(
                    "The gradients span {span:.0} binades; FP16 holds 40, the upper 30 of them in full precision"
                )
            }
            _ => "No nonzero gradient was recorded".to_owned(),
        }
    }

    fn caption(&self) -> String {
        format!(
            "{}: {} finite nonzero gradient elements by binade [2^e, 2^(e+1)), and {} zeros, which are not drawn. The window is that of FP16 at loss scale {} ({}): below 2^-25/S elements become zero, below 2^-14/S they are subnormal, from 65520/S they overflow. gradscale plot --kind binades",
            self.label,
            text::count(self.sketch.finite_nonzero()),
            text::count(self.sketch.zeros()),
            text::scale(self.loss_scale),
            self.scale_is
        )
    }

    fn csv(&self) -> String {
        let mut csv = String::from("exponent,elements\n");
        for (exponent, count) in self.counts() {
            csv.push_str(&format!("{exponent},{count}\n"));
        }
        csv
    }

    fn draw<B: DrawingBackend>(&self, canvas: &mut Canvas<'_, B>) -> Result<(), DrawError> {
        let counts = self.counts();
        let total = self.sketch.finite_nonzero().max(1) as f64;
        let shift = self.loss_scale.log2();
        let (to_zero, normal, over) = (-25.0 - shift, -14.0 - shift, 65520f64.log2() - shift);
        canvas.legend(&[
            Legend::Box("becomes zero".to_owned(), palette::UNDERFLOW),
            Legend::Box("subnormal".to_owned(), palette::SUBNORMAL),
            Legend::Box("normal".to_owned(), palette::GOOD),
            Legend::Box("overflows".to_owned(), palette::OVERFLOW),
        ])?;
        let first = counts.first().map_or(-30.0, |(e, _)| f64::from(*e));
        let last = counts.last().map_or(0.0, |(e, _)| f64::from(*e + 1));
        let (low, high) = (first.min(to_zero - 2.0), last.max(over + 2.0));
        let least = counts
            .iter()
            .map(|(_, n)| *n as f64 / total)
            .fold(1.0, f64::min)
            .log10()
            .floor()
            - 0.5;
        canvas.frame(
            Axis::new(
                "absolute value of the unscaled gradient",
                low.floor(),
                high.ceil(),
                Ticks::PowersOfTwo,
            ),
            Axis::new(
                "share of the finite nonzero elements",
                least.max(-9.0),
                0.0,
                Ticks::Percent,
            ),
            (0.0, 1.0),
        )?;
        for (exponent, count) in counts {
            let (from, to) = (f64::from(exponent), f64::from(exponent + 1));
            let share = (count as f64 / total).log10();
            // A binade that an edge cuts is drawn in two colours, split where the edge is.
            let edges = [
                (low - 1000.0, to_zero, palette::UNDERFLOW),
                (to_zero, normal, palette::SUBNORMAL),
                (normal, over, palette::GOOD),
                (over, high + 1000.0, palette::OVERFLOW),
            ];
            for (start, end, color) in edges {
                let (a, b) = (from.max(start), to.min(end));
                if a < b {
                    canvas.fill((a, least), (b, share), color, 0.85)?;
                }
            }
        }
        for (row, (at, name)) in [
            (to_zero, "2^-25/S: zero below"),
            (normal, "2^-14/S: subnormal below"),
            (over, "65520/S: overflow"),
        ]
        .into_iter()
        .enumerate()
        {
            canvas.vertical(at, name, row as i32, palette::MAIN, Dash::Short)?;
        }
        Ok(())
    }
}
