//! A log's loss scale, as its lines tell it: falls, growths, restarts.

use super::{Axis, Canvas, Dash, Draw, DrawError, Legend, Marker, Ticks, palette};
use crate::scaling::diagnose::{Diagnosis, Filled, FilledKind};
use crate::text;
use plotters::prelude::DrawingBackend;

/// The most events that are drawn one by one; of more, every so many-th.
const MOST_EVENTS: usize = 4000;

/// One change or overflow, at its place on the axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// The step, or the line where steps cannot be told.
    pub at: u64,
    /// What happened.
    pub kind: FilledKind,
    /// The scale before, where it is known.
    pub before: Option<f64>,
    /// The scale after, where it is known.
    pub after: Option<f64>,
    /// Inferred, not printed.
    pub inferred: bool,
}

/// The scale over a log.
#[derive(Debug, Clone, PartialEq)]
pub struct History {
    /// Which log.
    pub label: String,
    /// The verdict, as the log's first words say it.
    pub headline: String,
    /// Whether the places are steps; else lines.
    pub steps: bool,
    /// The last place.
    pub end: u64,
    /// The scale at the log's beginning.
    pub first: f64,
    /// What happened, in order.
    pub points: Vec<Point>,
    /// How many events were left out of the drawing.
    pub left_out: usize,
}

impl History {
    /// What a log tells; `None` where it prints no scale.
    pub fn of(diagnosis: &Diagnosis) -> Option<History> {
        let value = |value: f64| {
            if diagnosis.log2 { value.exp2() } else { value }
        };
        let place = |event: &Filled| event.step.or(event.steps.map(|(_, high)| high));
        // Steps only where every event has one, in order.
        let places: Option<Vec<u64>> = diagnosis.events.iter().map(place).collect();
        let places = places.filter(|at| at.is_sorted());
        let steps = places.is_some() && !diagnosis.events.is_empty();
        let points: Vec<Point> = diagnosis
            .events
            .iter()
            .enumerate()
            .map(|(n, event)| Point {
                at: places.as_ref().map_or(event.line, |places| places[n]),
                kind: event.kind,
                before: event.before.map(value),
                after: event.after.map(value),
                inferred: event.inferred,
            })
            .collect();
        let first = points
            .iter()
            .find_map(|point| point.before.or(point.after))
            .or(diagnosis.first_scale.map(value))
            .filter(|scale| scale.is_finite() && *scale > 0.0)?;
        let last = points.last().map_or(0, |point| point.at);
        let end = if steps {
            let recorded = diagnosis
                .to_trace()
                .and_then(|trace| trace.steps.last().map(|step| step.step));
            recorded.unwrap_or(last).max(last)
        } else {
            diagnosis.lines.max(last)
        };
        let every = points.len().div_ceil(MOST_EVENTS).max(1);
        let all = points.len();
        let points: Vec<Point> = points.into_iter().step_by(every).collect();
        Some(History {
            label: diagnosis.path.clone(),
            headline: diagnosis.headline(),
            steps,
            end,
            first,
            left_out: all - points.len(),
            points,
        })
    }

    /// The scale from each place on.
    fn scales(&self) -> Vec<(f64, f64)> {
        let mut line = vec![(0.0, self.first)];
        for point in &self.points {
            for scale in [point.before, point.after].into_iter().flatten() {
                line.push((point.at as f64, scale));
            }
        }
        line
    }
}

impl Draw for History {
    fn title(&self) -> String {
        self.headline.clone()
    }

    fn caption(&self) -> String {
        let left_out = match self.left_out {
            0 => String::new(),
            n => format!(", {} of them left out", text::count(n as u64)),
        };
        format!(
            "{}: the loss scale as the lines tell it, with {} events{left_out}. A growth that no line prints stands where it is first noticed. gradscale plot --kind history",
            self.label,
            text::count((self.points.len() + self.left_out) as u64)
        )
    }

    fn csv(&self) -> String {
        let mut csv = format!(
            "{},kind,scale_before,scale_after,inferred\n",
            if self.steps { "step" } else { "line" }
        );
        let cell = |scale: Option<f64>| scale.map_or(String::new(), |scale| scale.to_string());
        for point in &self.points {
            csv.push_str(&format!(
                "{},{},{},{},{}\n",
                point.at,
                point.kind.as_str(),
                cell(point.before),
                cell(point.after),
                point.inferred
            ));
        }
        csv
    }

    fn draw<B: DrawingBackend>(&self, canvas: &mut Canvas<'_, B>) -> Result<(), DrawError> {
        let overflow = |point: &Point| {
            matches!(
                point.kind,
                FilledKind::Overflow | FilledKind::Kept | FilledKind::StillUpdated
            )
        };
        let begins = |point: &Point| point.kind == FilledKind::Restart;
        let mut legend = vec![
            Legend::Line("loss scale".to_owned(), palette::MAIN, Dash::Solid),
            Legend::Mark("overflow".to_owned(), palette::OVERFLOW, Marker::Cross),
        ];
        if self.points.iter().any(begins) {
            legend.push(Legend::Line(
                "the run begins again".to_owned(),
                palette::OTHER,
                Dash::Dots,
            ));
        }
        canvas.legend(&legend)?;
        let log2 = |scale: f64| scale.clamp(2f64.powi(-149), f64::MAX).log2();
        let scales = self.scales();
        let seen = || scales.iter().map(|(_, scale)| log2(*scale));
        let high = seen().fold(f64::NEG_INFINITY, f64::max);
        let low = seen().fold(f64::INFINITY, f64::min).max(high - 300.0);
        let axis = if self.steps {
            "step"
        } else {
            "line of the log"
        };
        canvas.frame(
            Axis::new(axis, 0.0, self.end as f64 + 1.0, Ticks::Plain),
            Axis::new(
                "loss scale",
                (low - 1.0).floor(),
                (high + 1.0).ceil(),
                Ticks::PowersOfTwo,
            ),
            (0.0, 1.0),
        )?;
        let (bottom, top) = ((low - 1.0).floor(), (high + 1.0).ceil());
        for point in self.points.iter().filter(|point| begins(point)) {
            let at = point.at as f64;
            canvas.line(&[(at, bottom), (at, top)], palette::OTHER, Dash::Dots)?;
        }
        let mut line: Vec<(f64, f64)> = scales
            .iter()
            .map(|(at, scale)| (*at, log2(*scale).max(low)))
            .collect();
        if let Some(&(_, last)) = line.last() {
            line.push((self.end as f64 + 1.0, last));
        }
        canvas.steps(&line, palette::MAIN, Dash::Solid)?;
        let mut scale = self.first;
        for point in &self.points {
            let at = point.before.unwrap_or(scale);
            if overflow(point) {
                canvas.mark(
                    (point.at as f64, log2(at).max(low)),
                    palette::OVERFLOW,
                    Marker::Cross,
                )?;
            }
            scale = point.after.unwrap_or(at);
        }
        Ok(())
    }
}
