//! Figures: pure functions from results to a picture. No file access, no clock, no randomness: the same data gives the
//! same bytes, as SVG and as PNG.
//!
//! Each figure is one file that implements [`Draw`]: it says what it shows (title, caption), draws itself on a
//! [`Canvas`], and gives what is drawn as CSV. The palette is that of Okabe and Ito, safe for colour-blind readers; a
//! line's dash pattern or marker repeats what its colour says. Text is measured and, in a PNG, drawn with DejaVu Sans,
//! which is part of the program, so no font library of the system is needed.

mod axis;
mod bands;
mod binades;
mod canvas;
mod headroom;
mod history;
mod policies;
mod rates;
mod tradeoff;
mod trajectory;

pub use axis::{Axis, Ticks};
pub use bands::Bands;
pub use binades::Binades;
pub use canvas::{Canvas, Dash, DrawError, Legend, Marker};
pub use headroom::Headroom;
pub use history::History;
pub use policies::{Policies, PolicyBar};
pub use rates::Rates;
pub use tradeoff::{Point, Tradeoff};
pub use trajectory::Trajectory;

use plotters::prelude::*;
use plotters::style::FontStyle;
use std::sync::Once;

/// Colours for a screen or for paper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Theme {
    /// Soft grid on white.
    #[default]
    Screen,
    /// Black on white, heavier lines.
    Print,
}

/// Width and height in pixels.
pub type Size = (u32, u32);

/// The size of a figure in the report.
pub const DEFAULT_SIZE: Size = (960, 540);

/// Colours by what they stand for.
pub mod palette {
    use plotters::style::RGBColor;
    /// Flushed to zero.
    pub const UNDERFLOW: RGBColor = RGBColor(0, 114, 178);
    /// Subnormal.
    pub const SUBNORMAL: RGBColor = RGBColor(86, 180, 233);
    /// Normal values; what is recommended.
    pub const GOOD: RGBColor = RGBColor(0, 158, 115);
    /// Overflow and skipped steps.
    pub const OVERFLOW: RGBColor = RGBColor(213, 94, 0);
    /// The default.
    pub const DEFAULT: RGBColor = RGBColor(204, 121, 167);
    /// The sum, the main line.
    pub const MAIN: RGBColor = RGBColor(30, 30, 30);
    /// A second line.
    pub const OTHER: RGBColor = RGBColor(230, 159, 0);
    /// Grid and frames.
    pub const GRID: RGBColor = RGBColor(222, 222, 222);
    /// Text.
    pub const TEXT: RGBColor = RGBColor(40, 40, 40);
}

/// A finished figure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Figure {
    /// What the figure says or asks.
    pub title: String,
    /// Which input, how many elements, how it was made.
    pub caption: String,
    /// The picture.
    pub svg: String,
    /// What is drawn, one observation a row.
    pub csv: String,
}

/// A figure that can be drawn.
pub trait Draw {
    /// The finding or the question, one line.
    fn title(&self) -> String;
    /// Which input, how many elements, which scale.
    fn caption(&self) -> String;
    /// What is drawn as CSV: a header, then one observation a row.
    fn csv(&self) -> String;
    /// Draws everything below the title.
    ///
    /// # Errors
    /// When the backend refuses.
    fn draw<B: DrawingBackend>(&self, canvas: &mut Canvas<'_, B>) -> Result<(), DrawError>;
}

/// Makes the bundled font known to plotters, once a process.
fn fonts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for (style, bytes) in [
            (FontStyle::Normal, dejavu::sans::regular()),
            (FontStyle::Bold, dejavu::sans::bold()),
        ] {
            // The bytes are a constant of a dependency; a test draws with both.
            let _ = plotters::style::register_font("sans-serif", style, bytes);
        }
    });
}

/// Draws a figure as SVG.
///
/// # Errors
/// When drawing fails, which is a bug of ours: nothing outside the figure is touched.
pub fn svg(figure: &impl Draw, size: Size, theme: Theme) -> Result<Figure, DrawError> {
    fonts();
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        let mut canvas = Canvas::new(&area, size, theme);
        canvas.title(&figure.title())?;
        figure.draw(&mut canvas)?;
        area.present().map_err(|e| DrawError(e.to_string()))?;
    }
    // Let the page scale the picture: a viewBox is there, fixed sizes only get in the way.
    let (width, height) = size;
    let svg = svg.replacen(
        &format!("<svg width=\"{width}\" height=\"{height}\" "),
        &format!(
            "<svg role=\"img\" aria-label=\"{}\" width=\"{width}\" height=\"{height}\" ",
            crate::text::escape(&figure.title())
        ),
        1,
    );
    Ok(Figure {
        title: figure.title(),
        caption: figure.caption(),
        svg,
        csv: figure.csv(),
    })
}

/// Draws a figure as the bytes of a PNG file.
///
/// # Errors
/// When drawing or encoding fails.
pub fn png(figure: &impl Draw, size: Size, theme: Theme) -> Result<Vec<u8>, DrawError> {
    fonts();
    let (width, height) = size;
    let mut pixels = vec![0u8; width as usize * height as usize * 3];
    {
        let area = BitMapBackend::with_buffer(&mut pixels, size).into_drawing_area();
        let mut canvas = Canvas::new(&area, size, theme);
        canvas.title(&figure.title())?;
        figure.draw(&mut canvas)?;
        area.present().map_err(|e| DrawError(e.to_string()))?;
    }
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let encoded = encoder
        .write_header()
        .and_then(|mut writer| writer.write_image_data(&pixels));
    encoded.map_err(|e| DrawError(e.to_string()))?;
    Ok(bytes)
}
