//! Lost update against the growth interval.

use super::{Axis, Canvas, Dash, Draw, DrawError, Legend, Marker, Ticks, palette};
use crate::scaling::Recommendation;
use crate::text;
use plotters::prelude::DrawingBackend;

/// One interval's cost: shares of the updates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// The interval.
    pub growth_interval: u64,
    /// Skipped.
    pub skipped: f64,
    /// Flushed to zero, where it is known.
    pub flushed: Option<f64>,
    /// The 95 % interval of the sum, where it was computed.
    pub confidence: Option<(f64, f64)>,
}

impl Point {
    fn lost(&self) -> f64 {
        self.skipped + self.flushed.unwrap_or(0.0)
    }
}

/// The trade-off of a run: skips fall and flushed updates rise with the interval.
#[derive(Debug, Clone)]
pub struct Tradeoff {
    /// Which input.
    pub label: String,
    /// The policy.
    pub policy: String,
    /// Steps of the run.
    pub steps: u64,
    /// By ascending interval.
    pub points: Vec<Point>,
    /// The as-good stretch.
    pub as_good: Option<(u64, Option<u64>)>,
    /// The recommended interval.
    pub recommended: Option<u64>,
    /// The default interval.
    pub default: u64,
    /// The best static scale's loss.
    pub best_static: Option<f64>,
    /// The headline.
    pub headline: String,
}

impl Tradeoff {
    /// From a recommendation's sweep, thinned to what a picture can show.
    pub fn of(label: &str, answer: &Recommendation) -> Tradeoff {
        let measure = answer.measure;
        let all = &answer.choice.candidates;
        let steps = answer.steps.max(1) as f64;
        let mut points: Vec<Point> = Vec::new();
        let mut last = f64::NEG_INFINITY;
        for (i, candidate) in all.iter().enumerate() {
            let at = (candidate.growth_interval as f64).log2();
            let kept =
                i == answer.choice.recommended || i == answer.choice.default || i + 1 == all.len();
            if at - last < 1.0 / 48.0 && !kept {
                continue;
            }
            last = at;
            points.push(Point {
                growth_interval: candidate.growth_interval,
                skipped: match (candidate.cost.lost_update, candidate.cost.underflow) {
                    // Steps after a terminal error are lost as well.
                    (Some(all), Some(flushed)) => (all.elements - flushed.elements).max(0.0),
                    _ => candidate.cost.skipped as f64 / steps,
                },
                flushed: candidate.cost.underflow.map(|lost| measure.of(lost)),
                confidence: candidate.confidence,
            });
        }
        // The last replay never grows and stands for every larger interval.
        if let Some(&end) = points.last()
            && end.growth_interval < answer.default_interval
        {
            points.push(Point {
                growth_interval: answer.default_interval,
                ..end
            });
        }
        Tradeoff {
            label: label.to_owned(),
            policy: answer.policy.clone(),
            steps: answer.steps,
            points,
            as_good: answer.interval,
            recommended: answer.growth_interval,
            default: answer.default_interval,
            best_static: answer
                .best_static
                .as_ref()
                .and_then(|(_, cost)| cost.lost_update.map(|lost| measure.of(lost))),
            headline: format!(
                "{} {}",
                answer.headline(),
                answer.as_good().unwrap_or_default()
            )
            .trim()
            .to_owned(),
        }
    }
}

/// One of a point's shares.
type Share = fn(&Point) -> f64;

/// Shares below this lie on the axis.
const LEAST: f64 = 1e-6;

impl Draw for Tradeoff {
    fn title(&self) -> String {
        self.headline.clone()
    }

    fn caption(&self) -> String {
        format!(
            "{}: {} replayed with every growth interval over {} steps. Lost update: mean over the steps of 1 where the step was skipped, else the share flushed to zero. Green: as good as the best. Exactly zero is not drawn. gradscale plot --kind tradeoff",
            self.label,
            self.policy,
            text::count(self.steps)
        )
    }

    fn csv(&self) -> String {
        let mut csv = String::from(
            "growth_interval,skipped_fraction,flushed_fraction,lost_update,low,high\n",
        );
        for point in &self.points {
            let flushed = point.flushed.map_or(String::new(), |f| f.to_string());
            let (low, high) = point
                .confidence
                .map_or((String::new(), String::new()), |(l, h)| {
                    (l.to_string(), h.to_string())
                });
            csv.push_str(&format!(
                "{},{},{flushed},{},{low},{high}\n",
                point.growth_interval,
                point.skipped,
                point.lost()
            ));
        }
        csv
    }

    fn draw<B: DrawingBackend>(&self, canvas: &mut Canvas<'_, B>) -> Result<(), DrawError> {
        let measured = self.points.iter().any(|p| p.flushed.is_some());
        let mut legend = vec![Legend::Line(
            if measured {
                "lost update"
            } else {
                "skipped steps"
            }
            .to_owned(),
            palette::MAIN,
            Dash::Solid,
        )];
        if measured {
            legend.push(Legend::Line(
                "skipped".to_owned(),
                palette::OVERFLOW,
                Dash::Long,
            ));
            legend.push(Legend::Line(
                "flushed to zero".to_owned(),
                palette::UNDERFLOW,
                Dash::Short,
            ));
        }
        if self.as_good.is_some() {
            legend.push(Legend::Box("as good as the best".to_owned(), palette::GOOD));
        }
        if self.best_static.is_some() {
            legend.push(Legend::Line(
                "best static scale".to_owned(),
                palette::OTHER,
                Dash::Dots,
            ));
        }
        canvas.legend(&legend)?;
        let log2 = |n: u64| (n.max(1) as f64).log2();
        let last = self
            .points
            .last()
            .map_or(2000, |p| p.growth_interval)
            .max(self.default);
        let y = |share: f64| share.clamp(LEAST, 1.0).log10();
        let shares = || {
            self.points
                .iter()
                .flat_map(|p| [p.lost(), p.skipped, p.flushed.unwrap_or(0.0)])
        };
        let least = shares()
            .filter(|s| *s > 0.0)
            .fold(1.0, f64::min)
            .max(LEAST)
            .log10();
        canvas.frame(
            Axis::new("growth interval (steps)", 0.0, log2(last), Ticks::Doublings),
            Axis::new(
                "share of the updates",
                (least - 0.2).floor(),
                0.0,
                Ticks::Percent,
            ),
            (0.0, 1.0),
        )?;
        if let Some((low, high)) = self.as_good {
            let high = high.unwrap_or(last);
            canvas.fill(
                (log2(low), LEAST.log10()),
                (log2(high), 0.0),
                palette::GOOD,
                0.18,
            )?;
        }
        for pair in self.points.windows(2) {
            if let (Some(a), Some(b)) = (pair[0].confidence, pair[1].confidence) {
                let (from, to) = (log2(pair[0].growth_interval), log2(pair[1].growth_interval));
                canvas.fill(
                    (from, y(a.0.min(b.0))),
                    (to, y(a.1.max(b.1))),
                    palette::MAIN,
                    0.12,
                )?;
            }
        }
        let lines: [(Share, _, _); 3] = [
            (
                |p| p.flushed.unwrap_or(0.0),
                palette::UNDERFLOW,
                Dash::Short,
            ),
            (|p| p.skipped, palette::OVERFLOW, Dash::Long),
            (Point::lost, palette::MAIN, Dash::Solid),
        ];
        for (i, (share, color, dash)) in lines.into_iter().enumerate() {
            if i < 2 && !measured {
                continue;
            }
            let mut stretch = Vec::new();
            for point in &self.points {
                match share(point) {
                    0.0 => canvas.line(&std::mem::take(&mut stretch), color, dash)?,
                    value => stretch.push((log2(point.growth_interval), y(value))),
                }
            }
            canvas.line(&stretch, color, dash)?;
        }
        if let Some(best) = self.best_static.filter(|b| *b > 0.0) {
            canvas.line(
                &[(0.0, y(best)), (log2(last), y(best))],
                palette::OTHER,
                Dash::Dots,
            )?;
        }
        let at = |n: u64| self.points.iter().rev().find(|p| p.growth_interval <= n);
        canvas.vertical(
            log2(self.default),
            &format!("default {}", self.default),
            0,
            palette::DEFAULT,
            Dash::Short,
        )?;
        if let Some(n) = self.recommended {
            if n != self.default {
                canvas.vertical(
                    log2(n),
                    &format!("recommended {n}"),
                    1,
                    palette::GOOD,
                    Dash::Solid,
                )?;
            }
            if let Some(point) = at(n) {
                canvas.mark((log2(n), y(point.lost())), palette::GOOD, Marker::Circle)?;
            }
        }
        if let Some(point) = at(self.default) {
            canvas.mark(
                (log2(self.default), y(point.lost())),
                palette::DEFAULT,
                Marker::Triangle,
            )?;
        }
        Ok(())
    }
}
