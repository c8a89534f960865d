//! The portable backend: safe code, one element after another, which the others are held to.

use super::lanes::{Facts, Group, Lanes, Staged, scatter};
use super::rounding::{Block, Rounding};
use super::rows::{Rows, Tables, word};

/// No vector unit is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scalar;

impl Lanes for Scalar {
    fn add(self, rows: &mut Rows, values: &[f32]) {
        rows.add_in(self, values);
    }

    #[inline(always)]
    fn stage(self, group: &Group, staged: &mut Staged) -> Facts {
        // Signed, which the smallest vector units can compare; no magnitude uses the sign bit.
        let (mut largest, mut smallest_less_one, mut or) = (0i32, i32::MAX, 0i32);
        for (x, to) in group.iter().zip(&mut staged.0) {
            let magnitude = x.to_bits() & 0x7FFF_FFFF;
            *to = word(magnitude);
            largest = largest.max(magnitude as i32);
            let less_one = (magnitude as i32).wrapping_sub(1) & i32::MAX;
            smallest_less_one = smallest_less_one.min(less_one);
            or |= magnitude as i32;
        }
        Facts {
            largest: largest as u32,
            smallest_less_one: smallest_less_one as u32,
            or: or as u32,
        }
    }

    #[inline(always)]
    fn stage_and_scatter<const TURNS: usize>(
        self,
        group: &Group,
        staged: &mut Staged,
        before: &Staged,
        tables: &mut Tables,
    ) -> Facts {
        scatter::<TURNS>(&before.0, tables);
        self.stage(group, staged)
    }

    fn errors(self, rounding: &Rounding, block: &mut Block) -> [f64; 2] {
        rounding.errors_in(block)
    }
}
