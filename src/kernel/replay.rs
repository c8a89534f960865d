//! What a replay asks of a backend that does it beside the sketch, and what comes back.

use super::rounding::Rounding;

/// The cuts of some scales, and what rounds there.
#[derive(Debug)]
pub(crate) struct Replay {
    /// Where each interval begins, as f32 bits, ascending; the last entry is infinity.
    pub edges: Vec<u32>,
    /// For each value of a magnitude's upper 16 bits, up to those of infinity, the interval in which the first such
    /// magnitude lies.
    pub first: Vec<u32>,
    /// Where errors are asked for, each scale's rounding.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code))]
    pub roundings: Vec<Rounding>,
}

/// The elements of one range, replayed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Replayed {
    /// Of each interval: count, Σ significand, and the sums of the lower and of the upper 24 bits of significand².
    pub intervals: Vec<[u64; 4]>,
    /// Of each scale: Σ |y − x·s| / |x| and Σ (y − x·s)², in the order of the elements.
    pub errors: Vec<[f64; 2]>,
}
