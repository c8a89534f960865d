//! amax with the largest gradient that the scale admits, and the skipped steps.

use super::{Axis, Canvas, Dash, Draw, DrawError, Legend, Marker, Ticks, palette};
use crate::scaling::Timeline;
use crate::scaling::policy::Policy;
use crate::tally::Trace;
use crate::text;
use plotters::prelude::DrawingBackend;

/// One policy's way through a run.
#[derive(Debug, Clone)]
pub struct Trajectory {
    /// Which input.
    pub label: String,
    /// The policy.
    pub policy: String,
    /// First and last step.
    pub steps: (u64, u64),
    /// Steps that one stretch of `amax` stands for.
    pub stretch: u64,
    /// Least and largest amax of each stretch of steps, by the stretch's first step.
    pub amax: Vec<(u64, f64, f64)>,
    /// The scale from each step on.
    pub scales: Vec<(u64, f64)>,
    /// Steps that were skipped, with the scale they ran at.
    pub skipped: Vec<(u64, f64)>,
    /// What the same run really did in FP16, where it is known.
    pub real: Option<Vec<(u64, f64)>>,
    /// How many steps it really skipped.
    pub real_skipped: Option<u64>,
}

impl Trajectory {
    /// Replays `policy` over a run; `real` is what the same run did in FP16: scale and overflow of each step.
    pub fn of(
        label: &str,
        timeline: &Timeline<'_>,
        policy: &dyn Policy,
        name: &str,
        real: Option<&Trace>,
    ) -> Trajectory {
        let run = timeline.run();
        let steps = (run.first_step, run.first_step + run.len().saturating_sub(1));
        let stretch = run.amax.len().div_ceil(MOST_POINTS).max(1);
        let amax = run
            .amax
            .chunks(stretch)
            .enumerate()
            .filter_map(|(i, values)| {
                let seen = || values.iter().flatten().copied().map(f64::from);
                let (least, largest) = (seen().reduce(f64::min)?, seen().reduce(f64::max)?);
                Some((run.first_step + (i * stretch) as u64, least, largest))
            })
            .collect();
        let mut scales: Vec<(u64, f64)> = Vec::new();
        let mut skipped = Vec::new();
        timeline.replay(policy.clone_box().as_mut(), &mut |segment| {
            let step = run.first_step + segment.from as u64;
            if scales
                .last()
                .is_none_or(|(_, scale)| *scale != segment.scale)
            {
                scales.push((step, segment.scale));
            }
            if segment.skipped {
                skipped.push((step, segment.scale));
            }
        });
        let real_scales = real.map(|real| {
            let mut scales: Vec<(u64, f64)> = Vec::new();
            for step in &real.steps {
                if let Some(scale) = step.loss_scale
                    && scales.last().is_none_or(|(_, last)| *last != scale)
                {
                    scales.push((step.step, scale));
                }
            }
            scales
        });
        let real_skipped = real.map(|real| {
            real.steps
                .iter()
                .filter(|step| step.found_inf == Some(true))
                .count() as u64
        });
        Trajectory {
            label: label.to_owned(),
            policy: name.to_owned(),
            steps,
            stretch: stretch as u64,
            amax,
            scales,
            skipped,
            real: real_scales,
            real_skipped,
        }
    }
}

/// The most points that are drawn; longer runs are cut into stretches.
pub const MOST_POINTS: usize = 800;

impl Draw for Trajectory {
    fn title(&self) -> String {
        let last = self.scales.last().map_or(f64::NAN, |(_, scale)| *scale);
        let real = match self.real_skipped {
            Some(n) => format!("; the same run in FP16 really skipped {n}"),
            None => String::new(),
        };
        format!(
            "{} skips {} of {} steps and ends at scale {}{real}",
            text::shortened(&self.policy, 50),
            self.skipped.len(),
            text::count(self.steps.1 - self.steps.0 + 1),
            text::scale(last)
        )
    }

    fn caption(&self) -> String {
        format!(
            "{}: the largest absolute gradient of each step (from the least to the largest within {} steps) under 65520/scale, the first gradient that overflows FP16 at the policy's scale. Where the two meet, the step is skipped (crosses). gradscale plot --kind trajectory",
            self.label, self.stretch
        )
    }

    fn csv(&self) -> String {
        let mut csv = String::from("what,step,value\n");
        for (step, least, largest) in &self.amax {
            csv.push_str(&format!(
                "amax_least,{step},{least}\namax_largest,{step},{largest}\n"
            ));
        }
        for (what, points) in [
            ("loss_scale", &self.scales),
            ("skipped_at_scale", &self.skipped),
        ] {
            for (step, scale) in points {
                csv.push_str(&format!("{what},{step},{scale}\n"));
            }
        }
        for (step, scale) in self.real.iter().flatten() {
            csv.push_str(&format!("real_loss_scale,{step},{scale}\n"));
        }
        csv
    }

    fn draw<B: DrawingBackend>(&self, canvas: &mut Canvas<'_, B>) -> Result<(), DrawError> {
        let mut legend = vec![
            Legend::Box("largest gradient (amax)".to_owned(), palette::SUBNORMAL),
            Legend::Line(
                "65520 / scale: overflow from here".to_owned(),
                palette::MAIN,
                Dash::Solid,
            ),
            Legend::Mark("skipped step".to_owned(), palette::OVERFLOW, Marker::Cross),
        ];
        if self.real.is_some() {
            legend.push(Legend::Line(
                "the same, really run in FP16".to_owned(),
                palette::OTHER,
                Dash::Short,
            ));
        }
        canvas.legend(&legend)?;
        let log2 = |value: f64| value.max(2f64.powi(-149)).log2();
        let limit = |scale: f64| log2(65520.0 / scale.max(1e-300));
        let limits = || {
            self.scales
                .iter()
                .chain(self.real.iter().flatten())
                .map(|(_, scale)| limit(*scale))
        };
        let positive = || self.amax.iter().filter(|(_, _, largest)| *largest > 0.0);
        let low = positive()
            .map(|(_, least, _)| log2(*least))
            .chain(limits())
            .fold(f64::INFINITY, f64::min);
        let high = positive()
            .map(|(_, _, largest)| log2(*largest))
            .chain(limits())
            .fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = (low.max(high - 60.0), high);
        canvas.frame(
            Axis::new(
                "step",
                self.steps.0 as f64,
                self.steps.1 as f64 + 1.0,
                Ticks::Plain,
            ),
            Axis::new(
                "absolute gradient",
                (low - 1.0).floor(),
                (high + 1.0).ceil(),
                Ticks::PowersOfTwo,
            ),
            (0.0, 1.0),
        )?;
        let ends = self
            .amax
            .iter()
            .skip(1)
            .map(|(step, ..)| *step)
            .chain([self.steps.1 + 1]);
        for ((step, least, largest), end) in self.amax.iter().zip(ends) {
            if *largest > 0.0 {
                // A lone value is a box of a visible height, from it downwards.
                let top = log2(*largest);
                let bottom = log2(*least).min(top - (high - low) / 80.0);
                canvas.fill(
                    (*step as f64, bottom),
                    (end as f64, top),
                    palette::SUBNORMAL,
                    1.0,
                )?;
            }
        }
        let line = |points: &[(u64, f64)]| {
            let mut line: Vec<(f64, f64)> = points
                .iter()
                .map(|(step, scale)| (*step as f64, limit(*scale)))
                .collect();
            if let Some(&(_, last)) = line.last() {
                line.push((self.steps.1 as f64 + 1.0, last));
            }
            line
        };
        if let Some(real) = &self.real {
            canvas.steps(&line(real), palette::OTHER, Dash::Short)?;
        }
        canvas.steps(&line(&self.scales), palette::MAIN, Dash::Solid)?;
        for (step, scale) in &self.skipped {
            canvas.mark(
                (*step as f64, limit(*scale)),
                palette::OVERFLOW,
                Marker::Cross,
            )?;
        }
        Ok(())
    }
}
