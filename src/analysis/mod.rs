//! What each scale does to a dump or a trace: outcomes, norms lost, rounding errors, group by group.
//!
//! Each input is one run. Its tensors are sketched on the way through (one pass, bounded memory) and merged into groups:
//! everything, by tensor or by step. A sketch answers every power-of-two scale exactly; other scales, and the rounding
//! errors, need the elements themselves, which [`Raw`] replays in the same pass. Files, tensors and parts of large tensors are read on all
//! threads and joined in their order.
//! Of histograms a scale gives bounds ([`Bounded`]), which add up over tensors and steps as counts do.

mod analyze;
mod bounded;
mod gate;
mod raw;

pub use analyze::{Analysis, By, Group, InputSummary, Options, Rate, analyze};
pub use bounded::{Bounded, HistogramSummary, Shares, TensorSummary};
pub use gate::{Crossing, Limits, Passage, gate};
pub use raw::{Errors, Plan, Raw, RawRate};
