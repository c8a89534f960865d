//! Where figures draw: a title above, a legend band, a plotting frame with axes, and simple marks in data coordinates.

use super::axis::Axis;
use super::{Size, Theme, palette};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Drawing failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("drawing a figure: {0}")]
pub struct DrawError(pub String);

impl<E: std::error::Error + Send + Sync> From<DrawingAreaErrorKind<E>> for DrawError {
    fn from(error: DrawingAreaErrorKind<E>) -> Self {
        DrawError(error.to_string())
    }
}

/// How a line is broken, so that it can be told without colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dash {
    /// Unbroken.
    Solid,
    /// Long strokes.
    Long,
    /// Short strokes.
    Short,
    /// Dots.
    Dots,
}

/// A mark at a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Marker {
    /// A filled circle.
    Circle,
    /// A cross.
    Cross,
    /// A triangle.
    Triangle,
}

/// One entry of a legend.
#[derive(Debug, Clone, PartialEq)]
pub enum Legend {
    /// A line.
    Line(String, RGBColor, Dash),
    /// A filled box.
    Box(String, RGBColor),
    /// A mark.
    Mark(String, RGBColor, Marker),
}

/// A frame in pixels with its two axes.
#[derive(Debug, Clone)]
struct Frame {
    left: i32,
    top: i32,
    right: i32,
    bottom: i32,
    x: Axis,
    y: Axis,
}

/// The drawing surface of one figure.
pub struct Canvas<'a, B: DrawingBackend> {
    area: &'a DrawingArea<B, Shift>,
    size: Size,
    theme: Theme,
    /// The next free row of pixels from the top.
    used: i32,
    frame: Option<Frame>,
}

const MARGIN: i32 = 14;
const TEXT: i32 = 14;

impl<'a, B: DrawingBackend> Canvas<'a, B> {
    pub(super) fn new(area: &'a DrawingArea<B, Shift>, size: Size, theme: Theme) -> Self {
        Canvas {
            area,
            size,
            theme,
            used: MARGIN,
            frame: None,
        }
    }

    fn grid(&self) -> RGBColor {
        match self.theme {
            Theme::Screen => palette::GRID,
            Theme::Print => RGBColor(190, 190, 190),
        }
    }

    fn stroke(&self) -> u32 {
        match self.theme {
            Theme::Screen => 2,
            Theme::Print => 3,
        }
    }

    /// Width of a text in pixels.
    fn width(&self, text: &str, size: i32) -> i32 {
        let font = ("sans-serif", size).into_font();
        self.area
            .estimate_text_size(text, &font.into())
            .map_or(text.len() as i32 * size / 2, |(w, _)| w as i32)
    }

    pub(super) fn title(&mut self, title: &str) -> Result<(), DrawError> {
        self.area.fill(&WHITE)?;
        let available = self.size.0 as i32 - 2 * MARGIN;
        let mut line = String::new();
        for word in title.split(' ') {
            let longer = if line.is_empty() {
                word.to_owned()
            } else {
                format!("{line} {word}")
            };
            if !line.is_empty() && self.width(&longer, 18) > available {
                self.text(
                    &line,
                    (MARGIN, self.used),
                    18,
                    palette::TEXT,
                    HPos::Left,
                    VPos::Top,
                )?;
                self.used += 24;
                line = word.to_owned();
            } else {
                line = longer;
            }
        }
        self.text(
            &line,
            (MARGIN, self.used),
            18,
            palette::TEXT,
            HPos::Left,
            VPos::Top,
        )?;
        self.used += 30;
        Ok(())
    }

    /// A row (or rows) of legend entries under the title, where they cover no data.
    ///
    /// # Errors
    /// When the backend refuses.
    pub fn legend(&mut self, entries: &[Legend]) -> Result<(), DrawError> {
        let mut x = MARGIN;
        for entry in entries {
            let text = match entry {
                Legend::Line(text, ..) | Legend::Box(text, _) | Legend::Mark(text, ..) => text,
            };
            let needed = 34 + self.width(text, TEXT) + 20;
            if x > MARGIN && x + needed > self.size.0 as i32 - MARGIN {
                x = MARGIN;
                self.used += 22;
            }
            let y = self.used + 8;
            match entry {
                Legend::Line(_, color, dash) => {
                    self.dashed(&[(x, y), (x + 28, y)], *color, *dash, self.stroke())?
                }
                Legend::Box(_, color) => {
                    self.area.draw(&Rectangle::new(
                        [(x + 4, y - 7), (x + 24, y + 7)],
                        color.filled(),
                    ))?;
                }
                Legend::Mark(_, color, marker) => self.mark_at((x + 14, y), *color, *marker)?,
            }
            self.text(
                text,
                (x + 34, y),
                TEXT,
                palette::TEXT,
                HPos::Left,
                VPos::Center,
            )?;
            x += needed;
        }
        self.used += 28;
        Ok(())
    }

    fn text(
        &self,
        text: &str,
        at: (i32, i32),
        size: i32,
        color: RGBColor,
        h: HPos,
        v: VPos,
    ) -> Result<(), DrawError> {
        let style = TextStyle::from(("sans-serif", size).into_font())
            .color(&color)
            .pos(Pos::new(h, v));
        Ok(self.area.draw(&Text::new(text.to_owned(), at, style))?)
    }

    /// Draws a frame with axes over all the room that is left (or the part `rows` of it, from 0 to 1) and makes it the
    /// one that marks are drawn in.
    ///
    /// # Errors
    /// When the backend refuses.
    pub fn frame(&mut self, x: Axis, y: Axis, rows: (f64, f64)) -> Result<(), DrawError> {
        let (width, height) = (self.size.0 as i32, self.size.1 as i32);
        let room = f64::from(height - MARGIN - self.used);
        let label_width = y
            .ticks()
            .iter()
            .map(|(_, label)| self.width(label, TEXT - 1))
            .max()
            .unwrap_or(0)
            .min(width / 3);
        let side = if y.name.is_empty() { 0 } else { 22 };
        let frame = Frame {
            left: MARGIN + side + label_width + 8,
            right: width - MARGIN - 16,
            top: self.used + (rows.0 * room) as i32 + 4,
            bottom: self.used + (rows.1 * room) as i32 - 44,
            x,
            y,
        };
        for (value, label) in frame.x.ticks() {
            let x = frame.x.pixel(value, frame.left, frame.right);
            self.area.draw(&PathElement::new(
                [(x, frame.top), (x, frame.bottom)],
                self.grid(),
            ))?;
            self.text(
                &label,
                (x, frame.bottom + 5),
                TEXT - 1,
                palette::TEXT,
                HPos::Center,
                VPos::Top,
            )?;
        }
        for (value, label) in frame.y.ticks() {
            let y = frame.y.pixel(value, frame.bottom, frame.top);
            self.area.draw(&PathElement::new(
                [(frame.left, y), (frame.right, y)],
                self.grid(),
            ))?;
            self.text(
                &label,
                (frame.left - 6, y),
                TEXT - 1,
                palette::TEXT,
                HPos::Right,
                VPos::Center,
            )?;
        }
        self.area.draw(&Rectangle::new(
            [(frame.left, frame.top), (frame.right, frame.bottom)],
            palette::TEXT,
        ))?;
        let middle = ((frame.left + frame.right) / 2, frame.bottom + 23);
        self.text(
            &frame.x.name,
            middle,
            TEXT,
            palette::TEXT,
            HPos::Center,
            VPos::Top,
        )?;
        if !frame.y.name.is_empty() {
            let style = TextStyle::from(("sans-serif", TEXT).into_font())
                .color(&palette::TEXT)
                .pos(Pos::new(HPos::Center, VPos::Top))
                .transform(FontTransform::Rotate270);
            let at = (MARGIN - 4, (frame.top + frame.bottom) / 2);
            self.area
                .draw(&Text::new(frame.y.name.clone(), at, style))?;
        }
        self.frame = Some(frame);
        Ok(())
    }

    fn now(&self) -> Result<&Frame, DrawError> {
        self.frame
            .as_ref()
            .ok_or_else(|| DrawError("marks before a frame".to_owned()))
    }

    fn at(&self, (x, y): (f64, f64)) -> Result<(i32, i32), DrawError> {
        let frame = self.now()?;
        Ok((
            frame.x.pixel(x, frame.left, frame.right),
            frame.y.pixel(y, frame.bottom, frame.top),
        ))
    }

    /// A broken or unbroken line; points outside the frame are drawn at its edge.
    ///
    /// # Errors
    /// When the backend refuses.
    pub fn line(
        &self,
        points: &[(f64, f64)],
        color: RGBColor,
        dash: Dash,
    ) -> Result<(), DrawError> {
        let pixels = points
            .iter()
            .map(|&point| self.at(point))
            .collect::<Result<Vec<_>, _>>()?;
        self.dashed(&pixels, color, dash, self.stroke())
    }

    /// A line that keeps its value until the next point.
    ///
    /// # Errors
    /// When the backend refuses.
    pub fn steps(
        &self,
        points: &[(f64, f64)],
        color: RGBColor,
        dash: Dash,
    ) -> Result<(), DrawError> {
        let mut corners = Vec::with_capacity(2 * points.len());
        for pair in points.windows(2) {
            corners.push(pair[0]);
            corners.push((pair[1].0, pair[0].1));
        }
        corners.extend(points.last());
        self.line(&corners, color, dash)
    }

    fn dashed(
        &self,
        pixels: &[(i32, i32)],
        color: RGBColor,
        dash: Dash,
        stroke: u32,
    ) -> Result<(), DrawError> {
        let pattern: &[f64] = match dash {
            Dash::Solid => {
                self.area.draw(&PathElement::new(
                    pixels.to_vec(),
                    color.stroke_width(stroke),
                ))?;
                return Ok(());
            }
            Dash::Long => &[10.0, 5.0],
            Dash::Short => &[5.0, 4.0],
            Dash::Dots => &[2.0, 4.0],
        };
        // Walks along the line, drawing every other stretch.
        let (mut stretch, mut left) = (0, pattern[0]);
        let mut piece: Vec<(i32, i32)> = pixels.first().copied().into_iter().collect();
        for pair in pixels.windows(2) {
            let (mut from, to) = (
                (f64::from(pair[0].0), f64::from(pair[0].1)),
                (f64::from(pair[1].0), f64::from(pair[1].1)),
            );
            loop {
                let length = (to.0 - from.0).hypot(to.1 - from.1);
                if length <= left {
                    left -= length;
                    if stretch % 2 == 0 {
                        piece.push(pair[1]);
                    }
                    break;
                }
                let t = left / length;
                from = (from.0 + t * (to.0 - from.0), from.1 + t * (to.1 - from.1));
                let point = (from.0.round() as i32, from.1.round() as i32);
                if stretch % 2 == 0 {
                    piece.push(point);
                    self.area.draw(&PathElement::new(
                        std::mem::take(&mut piece),
                        color.stroke_width(stroke),
                    ))?;
                } else {
                    piece = vec![point];
                }
                stretch += 1;
                left = pattern[stretch % 2];
            }
        }
        if piece.len() > 1 {
            self.area
                .draw(&PathElement::new(piece, color.stroke_width(stroke)))?;
        }
        Ok(())
    }

    /// A filled band over points of (x, low, high); `opacity` from 0 to 1. Fewer than two points show nothing.
    ///
    /// # Errors
    /// When the backend refuses.
    pub fn band(
        &self,
        points: &[(f64, f64, f64)],
        color: RGBColor,
        opacity: f64,
    ) -> Result<(), DrawError> {
        if points.len() < 2 {
            return Ok(());
        }
        let there = points.iter().map(|&(x, _, high)| (x, high));
        let back = points.iter().rev().map(|&(x, low, _)| (x, low));
        let outline = there
            .chain(back)
            .map(|point| self.at(point))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(self
            .area
            .draw(&Polygon::new(outline, color.mix(opacity).filled()))?)
    }

    /// A filled box between two corners, clipped to the frame; `opacity` from 0 to 1.
    ///
    /// # Errors
    /// When the backend refuses.
    pub fn fill(
        &self,
        from: (f64, f64),
        to: (f64, f64),
        color: RGBColor,
        opacity: f64,
    ) -> Result<(), DrawError> {
        let corners = [self.at(from)?, self.at(to)?];
        Ok(self
            .area
            .draw(&Rectangle::new(corners, color.mix(opacity).filled()))?)
    }

    /// A vertical line over the whole frame, with a label at its top on the side where there is room.
    ///
    /// # Errors
    /// When the backend refuses.
    pub fn vertical(
        &self,
        x: f64,
        label: &str,
        row: i32,
        color: RGBColor,
        dash: Dash,
    ) -> Result<(), DrawError> {
        let frame = self.now()?;
        let px = frame.x.pixel(x, frame.left, frame.right);
        self.dashed(
            &[(px, frame.top), (px, frame.bottom)],
            color,
            dash,
            self.stroke(),
        )?;
        let side = if px + self.width(label, TEXT - 1) + 8 > frame.right {
            HPos::Right
        } else {
            HPos::Left
        };
        let offset = if matches!(side, HPos::Left) { 5 } else { -5 };
        // A light ground keeps the label readable where it lies over another mark.
        let (top, wide) = (frame.top + 2 + 17 * row, self.width(label, TEXT - 1) + 6);
        let left = if matches!(side, HPos::Left) {
            px + offset - 3
        } else {
            px + offset - wide + 3
        };
        self.area.draw(&Rectangle::new(
            [(left, top), (left + wide, top + 17)],
            WHITE.mix(0.85).filled(),
        ))?;
        self.text(
            label,
            (px + offset, frame.top + 4 + 17 * row),
            TEXT - 1,
            color,
            side,
            VPos::Top,
        )
    }

    /// A text at a point.
    ///
    /// # Errors
    /// When the backend refuses.
    pub fn label(
        &self,
        at: (f64, f64),
        text: &str,
        color: RGBColor,
        centred: bool,
    ) -> Result<(), DrawError> {
        let h = if centred { HPos::Center } else { HPos::Left };
        self.text(text, self.at(at)?, TEXT - 1, color, h, VPos::Center)
    }

    /// A text at the left of the frame beside a row: names of bars.
    ///
    /// # Errors
    /// When the backend refuses.
    pub fn note(&mut self, text: &str) -> Result<(), DrawError> {
        self.text(
            text,
            (MARGIN, self.used),
            TEXT - 1,
            palette::TEXT,
            HPos::Left,
            VPos::Top,
        )?;
        self.used += 22;
        Ok(())
    }

    /// A mark at a point.
    ///
    /// # Errors
    /// When the backend refuses.
    pub fn mark(&self, at: (f64, f64), color: RGBColor, marker: Marker) -> Result<(), DrawError> {
        self.mark_at(self.at(at)?, color, marker)
    }

    fn mark_at(
        &self,
        (x, y): (i32, i32),
        color: RGBColor,
        marker: Marker,
    ) -> Result<(), DrawError> {
        match marker {
            Marker::Circle => self.area.draw(&Circle::new((x, y), 4, color.filled()))?,
            Marker::Cross => {
                for (from, to) in [
                    ((x - 4, y - 4), (x + 4, y + 4)),
                    ((x - 4, y + 4), (x + 4, y - 4)),
                ] {
                    self.area
                        .draw(&PathElement::new([from, to], color.stroke_width(2)))?;
                }
            }
            Marker::Triangle => {
                let corners = vec![(x, y - 5), (x - 5, y + 4), (x + 5, y + 4)];
                self.area.draw(&Polygon::new(corners, color.filled()))?;
            }
        }
        Ok(())
    }
}
