//! Not x86-64: there is no such backend, and so no value of its type.

use crate::kernel::backend::Unavailable;
use crate::kernel::lanes::{Facts, Group, Lanes, Staged};
use crate::kernel::rounding::{Block, Rounding};
use crate::kernel::rows::{Rows, Tables};

/// Cannot be made here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::kernel) enum Avx2 {}

impl Avx2 {
    pub fn new() -> Result<Avx2, Unavailable> {
        Err(Unavailable::new("avx2", "this is no x86-64 machine"))
    }
}

impl Lanes for Avx2 {
    fn add(self, _: &mut Rows, _: &[f32]) {
        match self {}
    }

    fn stage(self, _: &Group, _: &mut Staged) -> Facts {
        match self {}
    }

    fn stage_and_scatter<const TURNS: usize>(
        self,
        _: &Group,
        _: &mut Staged,
        _: &Staged,
        _: &mut Tables,
    ) -> Facts {
        match self {}
    }

    fn errors(self, _: &Rounding, _: &mut Block) -> [f64; 2] {
        match self {}
    }
}
