//! Built without the feature `cuda`: there is no such backend, and so no value of its type.

use super::{DeviceError, Replayed};
use crate::kernel::backend::Unavailable;
use crate::kernel::replay::Replay;
use half::{bf16, f16};
use std::sync::Arc;

/// Cannot be made here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::kernel) enum Cuda {}

impl Cuda {
    pub fn new() -> Result<Cuda, Unavailable> {
        Err(Unavailable::new(
            "cuda",
            "this build was made without the feature cuda",
        ))
    }

    pub fn counting(self) -> Result<Counting, DeviceError> {
        match self {}
    }
}

/// Cannot be made here.
#[derive(Debug)]
pub(in crate::kernel) enum Counting {}

impl Counting {
    pub fn add(&mut self, _: &[f32]) -> Result<(), DeviceError> {
        match *self {}
    }

    pub fn add_f16(&mut self, _: &[f16]) -> Result<(), DeviceError> {
        match *self {}
    }

    pub fn add_bf16(&mut self, _: &[bf16]) -> Result<(), DeviceError> {
        match *self {}
    }

    pub fn replay(&mut self, _: &Arc<Replay>) -> Result<(), DeviceError> {
        match *self {}
    }

    pub fn replays(&self) -> bool {
        match *self {}
    }

    pub fn finish(&mut self) -> Result<Counts, DeviceError> {
        match *self {}
    }
}

/// Words before the bins in a result.
pub(in crate::kernel) const HEAD: usize = 8;

/// Cannot be made here.
#[derive(Debug)]
pub(in crate::kernel) struct Counts {
    pub sketch: Option<Vec<u64>>,
    pub f16: Option<Vec<u64>>,
    pub bf16: Option<Vec<u64>>,
    pub replayed: Option<Replayed>,
}
