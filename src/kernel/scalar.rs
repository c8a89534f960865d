//! The portable backend: safe code, one element after another, which the others are held to.

use super::lanes::{Facts, Group, Lanes, Staged, lowest_of, scatter_all};
use super::rows::{Tables, word};

/// No vector unit is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scalar;

impl Lanes for Scalar {
    fn stage(self, group: &Group, staged: &mut Staged) -> Facts {
        let mut facts = Facts {
            largest: 0,
            smallest_less_one: u32::MAX,
            or: 0,
        };
        for (pair, words) in group.as_chunks::<2>().0.iter().zip(&mut staged.0) {
            let [one, other] = pair.map(|x| x.to_bits() & 0x7FFF_FFFF);
            for magnitude in [one, other] {
                facts.largest = facts.largest.max(magnitude);
                facts.smallest_less_one = facts.smallest_less_one.min(magnitude.wrapping_sub(1));
                facts.or |= magnitude;
            }
            *words = u64::from(word(one)) | u64::from(word(other)) << 32;
        }
        facts
    }

    fn stage_and_scatter<const TURNS: usize>(
        self,
        group: &Group,
        staged: &mut Staged,
        before: &Staged,
        tables: &mut Tables,
    ) -> Facts {
        self.scatter::<TURNS>(before, tables);
        self.stage(group, staged)
    }

    fn scatter<const TURNS: usize>(self, staged: &Staged, tables: &mut Tables) {
        scatter_all::<TURNS>(staged, tables);
    }

    fn lowest(self, group: &Group) -> u32 {
        lowest_of(group)
    }
}
