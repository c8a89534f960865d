//! Policies side by side.

use super::{Axis, Canvas, Draw, DrawError, Legend, Ticks, palette};
use crate::scaling::policy::{Defaults, PolicyError, PolicySpec};
use crate::scaling::{Measure, Timeline, cost};
use crate::text;
use plotters::prelude::DrawingBackend;

/// One policy's cost.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyBar {
    /// The policy, with its settings.
    pub policy: String,
    /// Share of the steps that was skipped.
    pub skipped: f64,
    /// Steps skipped.
    pub skipped_steps: u64,
    /// Share of the updates that was flushed, where it is known.
    pub flushed: Option<f64>,
}

/// What each policy would have lost over one run, as bars.
#[derive(Debug, Clone)]
pub struct Policies {
    /// Which input.
    pub label: String,
    /// Steps of the run.
    pub steps: u64,
    /// Top to bottom.
    pub bars: Vec<PolicyBar>,
}

impl Policies {
    /// Replays each named policy over a run.
    pub fn of(
        label: &str,
        timeline: &Timeline<'_>,
        specs: &[(String, PolicySpec)],
        measure: Measure,
    ) -> Result<Policies, PolicyError> {
        let steps = timeline.run().len();
        let bars = specs
            .iter()
            .map(|(name, spec)| {
                let cost = cost(timeline, spec.build(Defaults::Framework)?.as_ref());
                let flushed = cost.underflow.map(|lost| measure.of(lost));
                let skipped = match cost.lost_update {
                    Some(lost) => (measure.of(lost) - flushed.unwrap_or(0.0)).max(0.0),
                    None => cost.skipped as f64 / steps.max(1) as f64,
                };
                Ok(PolicyBar {
                    policy: name.clone(),
                    skipped,
                    skipped_steps: cost.skipped,
                    flushed,
                })
            })
            .collect::<Result<Vec<_>, PolicyError>>()?;
        Ok(Policies {
            label: label.to_owned(),
            steps,
            bars,
        })
    }
}

impl PolicyBar {
    fn lost(&self) -> f64 {
        self.skipped + self.flushed.unwrap_or(0.0)
    }
}

impl Draw for Policies {
    fn title(&self) -> String {
        let best = self
            .bars
            .iter()
            .min_by(|a, b| a.lost().total_cmp(&b.lost()));
        match best {
            Some(best) => format!(
                "{} loses least on this run: {} of the updates",
                text::shortened(&best.policy, 40),
                crate::scaling::percent(best.lost())
            ),
            None => "No policy was replayed".to_owned(),
        }
    }

    fn caption(&self) -> String {
        format!(
            "{}: each policy at its framework's own defaults (or as named), replayed over the same {} steps. Skipped steps and updates flushed to zero, as shares of all updates. gradscale plot --kind policies",
            self.label,
            text::count(self.steps)
        )
    }

    fn csv(&self) -> String {
        let mut csv =
            String::from("policy,skipped_steps,skipped_fraction,flushed_fraction,lost_update\n");
        for bar in &self.bars {
            csv.push_str(&format!(
                "{},{},{},{},{}\n",
                crate::text::csv_field(&bar.policy),
                bar.skipped_steps,
                bar.skipped,
                bar.flushed.map_or(String::new(), |f| f.to_string()),
                bar.lost()
            ));
        }
        csv
    }

    fn draw<B: DrawingBackend>(&self, canvas: &mut Canvas<'_, B>) -> Result<(), DrawError> {
        canvas.legend(&[
            Legend::Box("skipped".to_owned(), palette::OVERFLOW),
            Legend::Box("flushed to zero".to_owned(), palette::UNDERFLOW),
        ])?;
        let rows = self.bars.len();
        let named = self
            .bars
            .iter()
            .enumerate()
            .map(|(i, bar)| {
                (
                    rows as f64 - i as f64 - 0.5,
                    text::shortened(&bar.policy, 34),
                )
            })
            .collect();
        let most = self
            .bars
            .iter()
            .map(PolicyBar::lost)
            .fold(0.0, f64::max)
            .max(1e-6);
        // Room on the right for the figures.
        canvas.frame(
            Axis::new(
                "share of the updates that is lost",
                0.0,
                most * 1.6,
                Ticks::LinearPercent,
            ),
            Axis::new("", 0.0, rows.max(1) as f64, Ticks::Named(named)),
            (0.0, 1.0),
        )?;
        for (i, bar) in self.bars.iter().enumerate() {
            let (top, bottom) = (rows as f64 - i as f64 - 0.2, rows as f64 - i as f64 - 0.8);
            canvas.fill((0.0, bottom), (bar.skipped, top), palette::OVERFLOW, 1.0)?;
            canvas.fill(
                (bar.skipped, bottom),
                (bar.lost(), top),
                palette::UNDERFLOW,
                1.0,
            )?;
            let figures = format!(
                "{} ({} skipped, {} flushed)",
                crate::scaling::percent(bar.lost()),
                bar.skipped_steps,
                bar.flushed
                    .map_or("unknown".to_owned(), crate::scaling::percent)
            );
            canvas.label(
                (bar.lost() + most * 0.01, (top + bottom) / 2.0),
                &figures,
                palette::TEXT,
                false,
            )?;
        }
        Ok(())
    }
}
