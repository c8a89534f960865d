//! Data that was itself captured in FP16 gives itself away.
//!
//! What FP16 produced at scale S and somebody divided by S has at most 11 significant bits, is a multiple of 2^L with
//! 2^L ≥ 2^-24/S, and spans at most the 40 binades of FP16. Then some of its zeros are underflows that nobody can see
//! any more, and S was at least 2^(−24−L).

use super::Sketch;
use crate::float::exp2;

/// Elements that the FP16 tensors of a run need together before the rule is believed.
pub const BELIEVED_FROM: u64 = 1000;

/// What one tensor's values say about the format that produced them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capture {
    /// No finite nonzero element.
    Undecided,
    /// Every significand fits in 8 bits: BF16, or a tensor too simple to tell. It decides nothing; its neighbours do.
    EightBits,
    /// Obeys the rule of FP16.
    Fp16 {
        /// Exponent of the lowest set bit.
        lowest_bit: i32,
        /// Finite nonzero elements.
        elements: u64,
    },
    /// Significands or a range that FP16 has not.
    Wider,
}

impl Capture {
    /// Applies the rule to one tensor of one step.
    pub fn of(sketch: &Sketch) -> Capture {
        let Some(lowest_bit) = sketch.lowest_bit() else {
            return Capture::Undecided;
        };
        let significands = sketch.significand_or();
        let amax = f64::from(sketch.amax().unwrap_or(0.0));
        if significands & 0x1FFF != 0 || amax >= exp2(lowest_bit + 40) {
            Capture::Wider
        } else if significands & 0xFFFF == 0 {
            Capture::EightBits
        } else {
            Capture::Fp16 {
                lowest_bit,
                elements: sketch.finite_nonzero(),
            }
        }
    }

    /// The verdict on a tensor over two steps or ranks: it obeys only where it always does.
    pub fn and(self, other: Capture) -> Capture {
        match (self, other) {
            (Capture::Wider, _) | (_, Capture::Wider) => Capture::Wider,
            (
                Capture::Fp16 {
                    lowest_bit: a,
                    elements: n,
                },
                Capture::Fp16 {
                    lowest_bit: b,
                    elements: m,
                },
            ) => Capture::Fp16 {
                lowest_bit: a.min(b),
                elements: n + m,
            },
            (fp16 @ Capture::Fp16 { .. }, _) | (_, fp16 @ Capture::Fp16 { .. }) => fp16,
            (Capture::EightBits, _) | (_, Capture::EightBits) => Capture::EightBits,
            (Capture::Undecided, Capture::Undecided) => Capture::Undecided,
        }
    }
}

/// What a group of tensors says together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Captured {
    /// Tensors that obey the rule.
    pub fp16_tensors: u64,
    /// Their finite nonzero elements.
    pub fp16_elements: u64,
    /// The lowest bit over them.
    pub lowest_bit: Option<i32>,
    /// Tensors with values that FP16 has not.
    pub wider_tensors: u64,
}

impl Captured {
    /// Sums up the verdicts on the tensors of a group.
    pub fn over(tensors: impl IntoIterator<Item = Capture>) -> Captured {
        let mut all = Captured::default();
        for capture in tensors {
            match capture {
                Capture::Fp16 {
                    lowest_bit,
                    elements,
                } => {
                    all.fp16_tensors += 1;
                    all.fp16_elements += elements;
                    all.lowest_bit =
                        Some(all.lowest_bit.map_or(lowest_bit, |low| low.min(lowest_bit)));
                }
                Capture::Wider => all.wider_tensors += 1,
                Capture::Undecided | Capture::EightBits => {}
            }
        }
        all
    }

    /// Whether enough elements obey the rule for it to be believed.
    pub fn believed(&self) -> bool {
        self.fp16_elements >= BELIEVED_FROM
    }

    /// The scale at which the whole group was at least captured, where every tensor of it obeys the rule.
    pub fn scale_at_least(&self) -> Option<f64> {
        (self.believed() && self.wider_tensors == 0)
            .then(|| self.lowest_bit.map(|low| exp2(-24 - low)))?
    }
}
