//! `gradscale plot`.

use super::{Reading, built_in, choosing, choosing_for};
use crate::analysis::HistogramSummary;
use crate::atomic;
use crate::cli::args::{PlotArgs, PlotKind, ThemeArg};
use crate::cli::{CliError, DONE, values};
use crate::input::NamedTrace;
use crate::plot::{Draw, DrawError, History, Size, Theme, png, svg};
use crate::report::figures::{self, Figures, Subject};
use crate::scaling::policy::PolicySpec;
use std::path::Path;

pub fn run(args: &PlotArgs) -> Result<u8, CliError> {
    let reading = Reading::new(&args.reading)?;
    let options = choosing(&args.choosing)?;
    let size = values::size("--size", &args.size)?;
    let theme = match args.theme {
        ThemeArg::Screen => Theme::Screen,
        ThemeArg::Print => Theme::Print,
    };
    let specs = args
        .with
        .iter()
        .map(|text| PolicySpec::parse(text))
        .collect::<Result<Vec<_>, _>>()?;
    let form = match args.output.extension().and_then(|e| e.to_str()) {
        Some("svg") => Form::Svg,
        Some("png") => Form::Png,
        _ => {
            return Err(CliError::PictureEnding {
                path: args.output.clone(),
            });
        }
    };
    let (trace, real) = match args.demo {
        Some(demo) => {
            let run = built_in(demo).read();
            (run.trace, Some(run.real))
        }
        None => {
            let mut traces: Vec<NamedTrace> = reading.records(&args.inputs, None)?;
            if traces.len() != 1 {
                return Err(CliError::SeveralRuns {
                    doing: "drawing",
                    found: traces.len(),
                });
            }
            (traces.remove(0), None)
        }
    };
    let out = Out {
        path: &args.output,
        data: args.data.as_deref(),
        form,
        size,
        theme,
    };
    if let (PlotKind::History, Some(diagnosis)) = (args.kind, &trace.diagnosis) {
        return out.write(&History::of(diagnosis).ok_or(CliError::NothingToDraw {
            kind: "history",
            found: format!("a log without scales ({})", diagnosis.verdict().as_str()),
            expected: "a log that prints scales",
        })?);
    }
    let trace = trace.with_history()?;
    let options = choosing_for(&args.choosing, &options, &trace);
    let run = reading.run_of(&trace);
    reading.warn(&run.warnings);
    let histograms = HistogramSummary::of(&trace.trace, &trace.histograms, &figures::scales());
    let subject = Subject {
        label: &trace.label,
        trace: &trace.trace,
        histograms: histograms.as_ref(),
        run: &run,
        real: real.as_ref(),
    };
    let figures =
        Figures::new(subject, &options, &specs).map_err(|source| CliError::Recommend {
            input: trace.label.clone(),
            source,
        })?;
    let missing = |kind: &'static str, expected: &'static str| CliError::NothingToDraw {
        kind,
        found: format!(
            "a {} of {} steps with {} sketches",
            trace.kind,
            run.len(),
            trace.trace.samples.len()
        ),
        expected,
    };
    match args.kind {
        PlotKind::Rates => match figures.bands {
            Some(bands) => out.write(&bands),
            None => out.write(
                &figures
                    .rates
                    .ok_or_else(|| missing("rates", "sketches or histograms of gradients"))?,
            ),
        },
        PlotKind::Binades => out.write(
            &figures
                .binades
                .ok_or_else(|| missing("binades", "sketches of gradients"))?,
        ),
        PlotKind::Headroom => out.write(
            &figures
                .headroom
                .ok_or_else(|| missing("headroom", "amax of tensors"))?,
        ),
        PlotKind::Trajectory => out.write(&figures.trajectory),
        PlotKind::Tradeoff => out.write(
            &figures
                .tradeoff
                .ok_or_else(|| missing("tradeoff", "at least 100 recorded steps"))?,
        ),
        PlotKind::Policies => out.write(&figures.policies),
        PlotKind::History => Err(missing("history", "a training log")),
    }
}

#[derive(Clone, Copy)]
enum Form {
    Svg,
    Png,
}

struct Out<'a> {
    path: &'a Path,
    data: Option<&'a Path>,
    form: Form,
    size: Size,
    theme: Theme,
}

impl Out<'_> {
    fn write(&self, figure: &impl Draw) -> Result<u8, CliError> {
        let drawing = |error: DrawError| CliError::Drawing {
            path: self.path.to_owned(),
            reason: error.to_string(),
        };
        let bytes = match self.form {
            Form::Svg => svg(figure, self.size, self.theme)
                .map_err(drawing)?
                .svg
                .into_bytes(),
            Form::Png => png(figure, self.size, self.theme).map_err(drawing)?,
        };
        let write = |path: &Path, bytes: &[u8]| {
            atomic::write(path, bytes).map_err(|source| CliError::Output {
                path: path.to_owned(),
                source,
            })
        };
        write(self.path, &bytes)?;
        if let Some(path) = self.data {
            write(path, figure.csv().as_bytes())?;
        }
        super::print(&format!("{}: {}\n", self.path.display(), figure.title()))?;
        Ok(DONE)
    }
}
