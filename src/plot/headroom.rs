//! Headroom of each tensor over the steps.

use super::{Axis, Canvas, Draw, DrawError, Legend, Ticks};
use crate::tally::{Role, Trace};
use crate::text;
use plotters::prelude::DrawingBackend;
use plotters::style::RGBColor;

/// log2(65520 / (amax · scale)) of each tensor in each stretch of steps: how many doublings the scale could still take.
#[derive(Debug, Clone)]
pub struct Headroom {
    /// Which input.
    pub label: String,
    /// The scale that headroom is measured from.
    pub loss_scale: f64,
    /// The tensors, top to bottom.
    pub tensors: Vec<String>,
    /// First and last step.
    pub steps: (u64, u64),
    /// `tensors × columns`: the least headroom in each stretch, `None` where the tensor had no nonzero gradient.
    pub cells: Vec<Vec<Option<f64>>>,
}

impl Headroom {
    /// From a trace's unscaled amax: the tightest 40 tensors, in recorded order, over stretches of steps.
    ///
    /// `None` where the trace has no tensors or no step.
    pub fn of(label: &str, trace: &Trace, loss_scale: f64) -> Option<Headroom> {
        let steps = trace.span()?;
        let gradients: Vec<usize> = (0..trace.tensors.len())
            .filter(|&n| trace.tensors[n].role != Role::Activation)
            .collect();
        if gradients.is_empty() {
            return None;
        }
        let span = (steps.1 - steps.0 + 1) as usize;
        let columns = span.min(MOST_COLUMNS);
        let headroom = |amax: f32| (65520.0 / (f64::from(amax) * loss_scale)).log2();
        let mut rows: Vec<(usize, Vec<Option<f64>>)> = gradients
            .into_iter()
            .map(|n| {
                let mut cells: Vec<Option<f64>> = vec![None; columns];
                for (row, step) in trace.steps.iter().enumerate() {
                    let column = ((step.step - steps.0) as usize * columns) / span;
                    if let Some(amax) = trace.unscaled_amax(row, n).filter(|amax| *amax > 0.0) {
                        let value = headroom(amax);
                        let cell = &mut cells[column];
                        *cell = Some(cell.map_or(value, |least: f64| least.min(value)));
                    }
                }
                (n, cells)
            })
            .collect();
        if rows.len() > MOST_ROWS {
            let least = |cells: &[Option<f64>]| {
                cells
                    .iter()
                    .flatten()
                    .copied()
                    .fold(f64::INFINITY, f64::min)
            };
            rows.sort_by(|a, b| least(&a.1).total_cmp(&least(&b.1)));
            rows.truncate(MOST_ROWS);
            rows.sort_by_key(|(n, _)| *n);
        }
        Some(Headroom {
            label: label.to_owned(),
            loss_scale,
            tensors: rows
                .iter()
                .map(|(n, _)| trace.tensors[*n].name.clone())
                .collect(),
            steps,
            cells: rows.into_iter().map(|(_, cells)| cells).collect(),
        })
    }
}

/// Colours from overflow (below 0) over tight to ample.
const BANDS: [(f64, RGBColor, &str); 6] = [
    (0.0, RGBColor(213, 94, 0), "overflows"),
    (1.0, RGBColor(230, 159, 0), "under 1 binade"),
    (4.0, RGBColor(240, 228, 66), "1 to 4"),
    (8.0, RGBColor(153, 210, 190), "4 to 8"),
    (16.0, RGBColor(86, 180, 233), "8 to 16"),
    (f64::INFINITY, RGBColor(0, 114, 178), "over 16"),
];

/// Rows and columns that are drawn at most; more are merged before.
pub const MOST_ROWS: usize = 40;
/// Columns that are drawn at most.
pub const MOST_COLUMNS: usize = 160;

impl Draw for Headroom {
    fn title(&self) -> String {
        let least =
            |row: &Vec<Option<f64>>| row.iter().flatten().copied().fold(f64::INFINITY, f64::min);
        let tightest = self
            .tensors
            .iter()
            .zip(&self.cells)
            .map(|(name, row)| (name, least(row)))
            .min_by(|a, b| a.1.total_cmp(&b.1));
        match tightest {
            Some((name, least)) if least.is_finite() => format!(
                "At scale {} the tightest tensor is {}: {}",
                text::scale(self.loss_scale),
                text::shortened(name, 40),
                match least {
                    ..=0.0 => format!("it overflows, by {:.1} binades at most", -least),
                    _ => format!("{least:.1} binades to overflow"),
                }
            ),
            _ => "No nonzero gradient was recorded".to_owned(),
        }
    }

    fn caption(&self) -> String {
        format!(
            "{}: least headroom log2(65520 / (amax · S)) of each tensor in each stretch of steps, at loss scale S = {}. White: no nonzero gradient. gradscale plot --kind headroom",
            self.label,
            text::scale(self.loss_scale)
        )
    }

    fn csv(&self) -> String {
        let columns = self.cells.first().map_or(0, Vec::len);
        let span = (self.steps.1 - self.steps.0 + 1) as f64;
        let mut csv = String::from("tensor,first_step,headroom_log2\n");
        for (name, row) in self.tensors.iter().zip(&self.cells) {
            for (column, cell) in row.iter().enumerate() {
                let step = self.steps.0 + (span * column as f64 / columns as f64) as u64;
                let value = cell.map_or(String::new(), |value| value.to_string());
                csv.push_str(&format!(
                    "{},{step},{value}\n",
                    crate::text::csv_field(name)
                ));
            }
        }
        csv
    }

    fn draw<B: DrawingBackend>(&self, canvas: &mut Canvas<'_, B>) -> Result<(), DrawError> {
        let legend: Vec<Legend> = BANDS
            .iter()
            .map(|(_, color, name)| Legend::Box((*name).to_owned(), *color))
            .collect();
        canvas.legend(&legend)?;
        let rows = self.tensors.len();
        let named = self
            .tensors
            .iter()
            .enumerate()
            .map(|(i, name)| (rows as f64 - i as f64 - 0.5, text::shortened(name, 28)))
            .collect();
        let (first, last) = (self.steps.0 as f64, self.steps.1 as f64 + 1.0);
        canvas.frame(
            Axis::new("step", first, last, Ticks::Plain),
            Axis::new("", 0.0, rows.max(1) as f64, Ticks::Named(named)),
            (0.0, 1.0),
        )?;
        for (i, row) in self.cells.iter().enumerate() {
            let top = (rows - i) as f64;
            let columns = row.len() as f64;
            // Neighbouring cells of one colour are one box.
            let band = |cell: &Option<f64>| {
                cell.map(|value| {
                    BANDS
                        .iter()
                        .position(|(limit, ..)| value <= *limit)
                        .unwrap_or(BANDS.len() - 1)
                })
            };
            let mut start = 0;
            while start < row.len() {
                let color = band(&row[start]);
                let end = (start..row.len())
                    .find(|&j| band(&row[j]) != color)
                    .unwrap_or(row.len());
                if let Some(color) = color {
                    let x = |column: usize| first + (last - first) * column as f64 / columns;
                    canvas.fill(
                        (x(start), top - 0.06),
                        (x(end), top - 0.94),
                        BANDS[color].1,
                        1.0,
                    )?;
                }
                start = end;
            }
        }
        Ok(())
    }
}
