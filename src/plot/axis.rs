//! Axes: a range, where its ticks are and how they read.

/// Where the ticks of an axis are and how they read.
#[derive(Debug, Clone, PartialEq)]
pub enum Ticks {
    /// Values are log2 of what is shown: `2^k`.
    PowersOfTwo,
    /// Values are log2 of what is shown: plain numbers, `1024`.
    Doublings,
    /// Values are log10 of a fraction: `1 %`.
    Percent,
    /// Values are fractions: `1 %`.
    LinearPercent,
    /// Values are plain numbers.
    Plain,
    /// Given places and names.
    Named(Vec<(f64, String)>),
}

/// One axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    /// What it shows and in which unit.
    pub name: String,
    low: f64,
    high: f64,
    ticks: Ticks,
}

impl Axis {
    /// An axis from `low` to `high`; an empty range is widened by one on each side.
    pub fn new(name: impl Into<String>, low: f64, high: f64, ticks: Ticks) -> Axis {
        let finite = |value: f64, or: f64| if value.is_finite() { value } else { or };
        let (low, high) = (finite(low, 0.0), finite(high, 1.0));
        let (low, high) = if high > low {
            (low, high)
        } else {
            (low - 1.0, low + 1.0)
        };
        Axis {
            name: name.into(),
            low,
            high,
            ticks,
        }
    }

    /// The pixel of a value, between that of `low` and that of `high`; values outside go to the edge.
    pub(super) fn pixel(&self, value: f64, at_low: i32, at_high: i32) -> i32 {
        let t = ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
        at_low + (t * f64::from(at_high - at_low)).round() as i32
    }

    /// At most a dozen ticks with their labels.
    pub(super) fn ticks(&self) -> Vec<(f64, String)> {
        let inside = |value: &f64| *value >= self.low - 1e-9 && *value <= self.high + 1e-9;
        let whole = |label: &dyn Fn(i64) -> String| {
            let span = self.high - self.low;
            let step = [1, 2, 4, 8, 16, 32, 64]
                .into_iter()
                .find(|&s| span / f64::from(s) <= 11.0)
                .unwrap_or(128);
            let step = i64::from(step);
            let first = (self.low / step as f64).ceil() as i64 * step;
            (0..200)
                .map(|i| first + i * step)
                .filter(|&k| inside(&(k as f64)))
                .map(|k| (k as f64, label(k)))
                .collect()
        };
        match &self.ticks {
            Ticks::PowersOfTwo => whole(&|k| format!("2^{k}")),
            Ticks::Doublings => whole(&|k| 2f64.powi(k as i32).to_string()),
            Ticks::Percent => whole(&|k| match k {
                -2..=0 => format!("{} %", 10f64.powi(k as i32 + 2)),
                -5..=-3 => format!("{:.*} %", (-2 - k) as usize, 10f64.powi(k as i32 + 2)),
                _ => format!("1e{} %", k + 2),
            }),
            Ticks::LinearPercent => {
                let text = |v: f64| format!("{} %", crate::text::significant(100.0 * v, 3));
                self.plain().into_iter().map(|v| (v, text(v))).collect()
            }
            Ticks::Plain => self
                .plain()
                .into_iter()
                .map(|v| (v, crate::text::significant(v, 6)))
                .collect(),
            Ticks::Named(named) => named.iter().filter(|(v, _)| inside(v)).cloned().collect(),
        }
    }

    /// Round numbers over the range.
    fn plain(&self) -> Vec<f64> {
        let rough = (self.high - self.low) / 8.0;
        let magnitude = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .into_iter()
            .map(|m| m * magnitude)
            .find(|s| *s >= rough)
            .unwrap_or(rough);
        let first = (self.low / step).ceil() as i64;
        (0..20)
            .map(|i| (first + i) as f64 * step)
            .filter(|v| *v <= self.high + step * 1e-9)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_read_in_their_unit_and_are_few() {
        let labels = |axis: &Axis| {
            axis.ticks()
                .into_iter()
                .map(|(_, label)| label)
                .collect::<Vec<_>>()
        };
        let scales = labels(&Axis::new("loss scale", -8.0, 32.0, Ticks::PowersOfTwo));
        assert_eq!(scales[0], "2^-8");
        assert!(scales.len() <= 12, "{scales:?}");
        assert_eq!(
            labels(&Axis::new("share", -4.0, 0.0, Ticks::Percent)),
            ["0.01 %", "0.1 %", "1 %", "10 %", "100 %"]
        );
        assert_eq!(
            labels(&Axis::new("interval", 0.0, 3.0, Ticks::Doublings)),
            ["1", "2", "4", "8"]
        );
        assert!(labels(&Axis::new("step", 0.0, 8000.0, Ticks::Plain)).contains(&"4000".to_owned()));
    }

    #[test]
    fn an_empty_or_infinite_range_is_widened() {
        let axis = Axis::new("x", 3.0, 3.0, Ticks::Plain);
        assert_eq!(axis.pixel(3.0, 0, 100), 50);
        assert!(
            !Axis::new("x", f64::NAN, f64::INFINITY, Ticks::Plain)
                .ticks()
                .is_empty()
        );
    }
}
