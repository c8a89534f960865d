//! Where an element lands.

/// Where an element lands when it is multiplied by a loss scale and rounded, judged on the *rounded result*.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// ±0 went in; it is no underflow.
    ZeroIn,
    /// ±inf or NaN went in; no scale cures it.
    NonfiniteIn,
    /// A nonzero value came out as ±0.
    UnderflowToZero,
    /// The result is below the format's smallest normal value, with fewer significand bits.
    Subnormal,
    /// The result is a normal value.
    Normal,
    /// A finite value came out as ±inf (as NaN in a format that has no infinity).
    OverflowToInfinity,
}
