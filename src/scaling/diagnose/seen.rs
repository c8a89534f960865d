//! What one message of a log says, whatever the framework.

use super::text::{Number, Style};

/// A scale as a log prints it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Printed {
    /// The value.
    pub value: f64,
    /// What rounding may hide: the true value lies within this of `value`. 0 where the print is exact.
    pub half_unit: f64,
    /// How it was written.
    pub style: Style,
    /// More digits may be missing: the file ends here.
    pub cut: bool,
}

impl Printed {
    /// A print that shows every digit, such as Python's of a float.
    pub fn exact(number: Number) -> Printed {
        Printed {
            value: number.value,
            half_unit: 0.0,
            style: number.style,
            cut: number.cut,
        }
    }

    /// A print of C's `%g`: exact, unless the value takes more than six digits.
    pub fn general(number: Number) -> Printed {
        match number.scientific {
            true => Printed::rounded(number),
            false => Printed::exact(number),
        }
    }

    /// A print with a fixed number of digits.
    pub fn rounded(number: Number) -> Printed {
        Printed {
            value: number.value,
            half_unit: number.half_unit,
            style: number.style,
            cut: number.cut,
        }
    }

    /// Whether both may be prints of one value.
    pub fn agrees(&self, other: &Printed) -> bool {
        self.value == other.value
            || (self.value - other.value).abs() <= (self.half_unit + other.half_unit) * (1.0 + 1e-9)
    }
}

/// Which scale a message prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prints {
    /// The one that overflowed and the one after the update.
    OldToNew,
    /// The one after the update.
    After,
    /// The one that overflowed.
    Before,
    /// A mean over the steps since the last print.
    Mean,
    /// None.
    Nothing,
}

/// What kind of number a progress line shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// The scale itself.
    Value,
    /// The median of the last few steps: a change shows late.
    Median,
    /// A mean over steps.
    Mean,
}

/// An optimizer step that overflowed.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Overflow {
    /// The scale in force.
    pub before: Option<Printed>,
    /// The scale after the update.
    pub after: Option<Printed>,
    /// The message says that the scale was kept because hysteresis was spent instead.
    pub hysteresis: bool,
    /// The message says that the update was made all the same.
    pub still_updated: bool,
    /// The message says that the scale is at its floor.
    pub at_floor: bool,
    /// Only repeats an event that another message reports in full.
    pub rank: Option<u64>,
    /// Which of several scalers.
    pub scaler: Option<u64>,
    /// The optimizer step, where the message counts it.
    pub iteration: Option<u64>,
}

/// A training loss in a progress line.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Loss {
    /// The line has none.
    #[default]
    None,
    /// A value, finite or not.
    Value(f64),
    /// The line leaves it out and its gradient norm is NaN: its mean was NaN.
    LeftOut,
}

impl Loss {
    /// Whether this counts as a non-finite loss.
    pub fn is_nonfinite(self) -> bool {
        match self {
            Loss::None => false,
            Loss::Value(value) => !value.is_finite(),
            Loss::LeftOut => true,
        }
    }
}

/// Whose step numbers a line carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, PartialOrd, Ord, Hash)]
pub enum Clock {
    /// The training loop's own, in lines with a loss or a scale.
    #[default]
    Loop,
    /// Updates that were applied: skipped steps do not count.
    Applied,
    /// A framework's counter lines.
    Counter,
    /// A progress bar.
    Bar,
}

/// A progress line.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Record {
    /// Its step.
    pub step: Option<u64>,
    /// How many steps there are, in the epoch or in all.
    pub of: Option<u64>,
    /// Whose step that is.
    pub clock: Clock,
    /// Its epoch.
    pub epoch: Option<u64>,
    /// The training loss.
    pub loss: Loss,
    /// The validation loss.
    pub validation: Option<f64>,
    /// The scale, and what kind of number that is.
    pub scale: Option<(Printed, Reading)>,
    /// The mean that a meter prints beside the scale.
    pub mean: Option<f64>,
    /// Steps skipped since the last such line, by the framework's counter.
    pub skipped: Option<u64>,
    /// Steps skipped since the run began, by the framework's counter.
    pub skipped_in_all: Option<u64>,
    /// The gradient norm is NaN or inf.
    pub norm_nonfinite: bool,
}

/// One message.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Seen {
    /// An overflow.
    Overflow(Overflow),
    /// The scale grew.
    Growth {
        /// The scale before.
        before: Option<Printed>,
        /// The scale after.
        after: Option<Printed>,
        /// After how many clean steps, where the message says it.
        interval: Option<u64>,
    },
    /// Only "no overflow for N steps": the growth itself follows.
    GrowthInterval(u64),
    /// A progress line.
    Record(Record),
    /// The step, in a line of its own.
    Step(u64),
    /// The scale, printed by itself.
    Scale(Printed),
    /// A number called `scale` and nothing more: believed where its company is right.
    PerhapsScale(Printed),
    /// A warning that the scale is small.
    Small(Printed),
    /// The window, as the framework states it.
    Window(u64),
    /// The framework ended the run because the scale was at its minimum.
    Stopped(Option<Printed>),
    /// A new run begins.
    Start,
    /// The optimizer or scheduler order warning, a sign of a skipped first step.
    OrderWarning,
    /// A line of a framework that prints no scale.
    Framework(&'static str),
    /// The run is in bf16.
    Bf16,
    /// The key is there, with a text or a list as its value: it is something else's name.
    OtherMeaning,
    /// A line of a format that says nothing about a step.
    Mention,
}
