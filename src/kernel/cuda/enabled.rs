//! Counting on the device: elements go into one of two pinned buffers, and when that is full it is copied and counted while the
//! other one is filled.
//!
//! ```text
//!   this thread   fill A │ fill B │ fill A …           waits for A's copy before it fills A again
//!   copies               │ copy A │ copy B …           waits for the work on the device's A before it copies into it
//!   work                          │ count A │ count B …
//! ```
#![allow(unsafe_code)] // launches kernels with raw arguments

use super::driver::{
    Argument, Buffer, Device, ERRORS_SHARED_BYTES, Event, Pinned, SKETCH_SHARED_BYTES, Stream,
    pattern_window, replay_shared_bytes,
};
use super::{DeviceError, Replayed};
use crate::kernel::backend::Unavailable;
use crate::kernel::replay::Replay;
use crate::kernel::rounding::BLOCK;
use crate::tally::BINS;
use half::{bf16, f16};
use std::sync::{Arc, OnceLock};
use zerocopy::IntoBytes;

/// Proof that a GPU was found and has the kernels: only [`Cuda::new`] makes one.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernel) struct Cuda(&'static Device);

impl PartialEq for Cuda {
    fn eq(&self, other: &Cuda) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for Cuda {}

impl Cuda {
    /// The first GPU. It is looked for once a process.
    pub fn new() -> Result<Cuda, Unavailable> {
        static FOUND: OnceLock<Result<Device, Unavailable>> = OnceLock::new();
        match FOUND.get_or_init(Device::find) {
            Ok(device) => Ok(Cuda(device)),
            Err(unavailable) => Err(unavailable.clone()),
        }
    }

    /// Buffers and streams of its own, for one thread at a time.
    pub fn counting(self) -> Result<Counting, DeviceError> {
        Counting::new(self.0)
    }
}

/// Bytes that are copied and counted together. Large enough that a launch and a copy's start weigh little (a copy of 4 MiB takes
/// about 100 µs), and two of them in pinned memory for each thread are no burden. A whole number of blocks of errors.
const STAGED_BYTES: usize = 4 << 20;
/// Elements that a thread block should have at least, so that emptying its table does not outweigh them.
const WORTH_A_BLOCK: u64 = 1 << 14;

/// Words before the bins in a result, as `kernels.cu` has them.
pub(in crate::kernel) const HEAD: usize = 8;
/// A head that nothing was added to.
const EMPTY_HEAD: [u64; HEAD] = [0, 0, 0, 0, 0, 0x7FFF_FFFF, 0, 32767];
const PATTERNS: usize = 1 << 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    F32,
    F16,
    Bf16,
}

impl Kind {
    fn bytes(self) -> usize {
        match self {
            Kind::F32 => 4,
            Kind::F16 | Kind::Bf16 => 2,
        }
    }
}

/// A pinned buffer and the device's buffer that it is copied to.
#[derive(Debug)]
struct Stage {
    pinned: Pinned,
    copied: Event,
    worked: Event,
    buffer: Buffer,
}

impl Stage {
    fn new(device: &'static Device) -> Result<Stage, DeviceError> {
        Ok(Stage {
            pinned: Pinned::new(device, STAGED_BYTES)?,
            copied: Event::new(device)?,
            worked: Event::new(device)?,
            buffer: Buffer::new(device, STAGED_BYTES)?,
        })
    }
}

/// Counts of 16-bit patterns, made when the first such element comes.
#[derive(Debug, Default)]
struct Patterns {
    counts: Option<Buffer>,
    elements: u64,
}

/// A replay beside the sketch.
#[derive(Debug)]
struct Replaying {
    plan: Arc<Replay>,
    edges: Buffer,
    first: Buffer,
    roundings: Buffer,
    sums: Buffer,
    /// Of one stage.
    block_errors: Buffer,
    errors: Buffer,
    /// Whether what comes now is to be replayed.
    on: bool,
}

/// Counts that are being made on the device.
#[derive(Debug)]
pub(in crate::kernel) struct Counting {
    // Dropped in this order: the streams first, which waits for their work.
    copies: Stream,
    work: Stream,
    stages: [Stage; 2],
    /// The stage being filled, how far, and with what.
    at: usize,
    filled: usize,
    kind: Kind,
    row: Buffer,
    /// Whether something was added to the row.
    counted: bool,
    f16: Patterns,
    bf16: Patterns,
    replaying: Option<Replaying>,
    device: &'static Device,
}

/// What was counted.
#[derive(Debug)]
pub(in crate::kernel) struct Counts {
    /// A head, then a count and then a sum for each bin.
    pub sketch: Option<Vec<u64>>,
    /// Counts by pattern.
    pub f16: Option<Vec<u64>>,
    pub bf16: Option<Vec<u64>>,
    pub replayed: Option<Replayed>,
}

impl Counting {
    fn new(device: &'static Device) -> Result<Counting, DeviceError> {
        let counting = Counting {
            copies: Stream::new(device)?,
            work: Stream::new(device)?,
            stages: [Stage::new(device)?, Stage::new(device)?],
            at: 0,
            filled: 0,
            kind: Kind::F32,
            row: Buffer::new(device, (HEAD + 2 * BINS) * 8)?,
            counted: false,
            f16: Patterns::default(),
            bf16: Patterns::default(),
            replaying: None,
            device,
        };
        counting.reset_row()?;
        Ok(counting)
    }

    pub fn add(&mut self, values: &[f32]) -> Result<(), DeviceError> {
        self.stage(Kind::F32, values.as_bytes())
    }

    pub fn add_f16(&mut self, values: &[f16]) -> Result<(), DeviceError> {
        self.stage(Kind::F16, values.as_bytes())
    }

    pub fn add_bf16(&mut self, values: &[bf16]) -> Result<(), DeviceError> {
        self.stage(Kind::Bf16, values.as_bytes())
    }

    /// From now on, until it is finished, f32 elements are replayed too.
    pub fn replay(&mut self, plan: &Arc<Replay>) -> Result<(), DeviceError> {
        self.device.enter("starting a replay")?;
        let same = |replaying: &Replaying| Arc::ptr_eq(&replaying.plan, plan);
        if !self.replaying.as_ref().is_some_and(same) {
            self.replaying = Some(Replaying::new(self.device, &self.work, plan)?);
        }
        let replaying = self.replaying.as_mut().expect("made above");
        replaying.on = true;
        self.work.clear(&replaying.sums)?;
        self.work.clear(&replaying.errors)
    }

    pub fn replays(&self) -> bool {
        self.replaying
            .as_ref()
            .is_some_and(|replaying| replaying.on)
    }

    fn stage(&mut self, kind: Kind, mut bytes: &[u8]) -> Result<(), DeviceError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.device.enter("counting")?;
        if kind != self.kind {
            self.submit()?;
            self.kind = kind;
        }
        while !bytes.is_empty() {
            let stage = &mut self.stages[self.at];
            if self.filled == 0 {
                stage.copied.wait()?;
            }
            let room = &mut stage.pinned.bytes_mut()[self.filled..];
            let (now, later) = bytes.split_at(bytes.len().min(room.len()));
            room[..now.len()].copy_from_slice(now);
            self.filled += now.len();
            bytes = later;
            if self.filled == STAGED_BYTES {
                self.submit()?;
            }
        }
        Ok(())
    }

    /// Has what is staged copied and counted, and turns to the other stage.
    fn submit(&mut self) -> Result<(), DeviceError> {
        if self.filled == 0 {
            return Ok(());
        }
        let stage = &self.stages[self.at];
        self.copies.wait_for(&stage.worked)?;
        self.copies
            .upload(&stage.pinned, self.filled, &stage.buffer)?;
        stage.copied.record(&self.copies)?;
        self.work.wait_for(&stage.copied)?;
        let elements = (self.filled / self.kind.bytes()) as u64;
        match self.kind {
            Kind::F32 => {
                self.sketch(&stage.buffer, elements)?;
                self.counted = true;
                if let Some(replaying) = self.replaying.as_ref().filter(|replaying| replaying.on) {
                    replaying.launch(self.device, &self.work, &stage.buffer, elements)?;
                }
            }
            Kind::F16 => self
                .f16
                .count(self.device, &self.work, &stage.buffer, elements)?,
            Kind::Bf16 => self
                .bf16
                .count(self.device, &self.work, &stage.buffer, elements)?,
        }
        stage.worked.record(&self.work)?;
        self.at = 1 - self.at;
        self.filled = 0;
        Ok(())
    }

    fn sketch(&self, data: &Buffer, elements: u64) -> Result<(), DeviceError> {
        let kernel = self.device.sketch_f32;
        let blocks = blocks_for(elements, kernel.fills);
        let arguments: [Argument<'_>; 4] = [data, &elements, &self.row, &0u32];
        // SAFETY: data, elements, row, packed: the buffer holds that many elements, the row a head and two tables.
        unsafe {
            self.work
                .launch(kernel, blocks, SKETCH_SHARED_BYTES, &arguments)
        }
    }

    fn reset_row(&self) -> Result<(), DeviceError> {
        self.work.clear(&self.row)?;
        self.work.upload_now(&EMPTY_HEAD, &self.row)
    }

    /// Hands over all that was counted; the counts are empty afterwards, and nothing is replayed any more.
    pub fn finish(&mut self) -> Result<Counts, DeviceError> {
        self.device.enter("finishing")?;
        self.submit()?;
        let mut sketch = None;
        if std::mem::take(&mut self.counted) {
            let mut row = vec![0; HEAD + 2 * BINS];
            self.work.download(&self.row, &mut row)?;
            self.reset_row()?;
            sketch = Some(row);
        }
        let replayed = match &mut self.replaying {
            Some(replaying) if replaying.on => {
                replaying.on = false;
                Some(replaying.finish(&self.work)?)
            }
            _ => None,
        };
        Ok(Counts {
            sketch,
            f16: self.f16.finish(&self.work)?,
            bf16: self.bf16.finish(&self.work)?,
            replayed,
        })
    }
}

impl Patterns {
    fn count(
        &mut self,
        device: &'static Device,
        work: &Stream,
        data: &Buffer,
        elements: u64,
    ) -> Result<(), DeviceError> {
        if self.counts.is_none() {
            let counts = Buffer::new(device, PATTERNS * 8)?;
            work.clear(&counts)?;
            self.counts = Some(counts);
        }
        self.elements += elements;
        let counts = self.counts.as_ref().expect("made above");
        let blocks = blocks_for(elements, device.patterns.fills);
        let window = pattern_window(device.shared_bytes);
        for first in (0..1u32 << 15).step_by(window as usize) {
            let arguments: [Argument<'_>; 5] = [data, &elements, counts, &first, &window];
            // SAFETY: data, elements, patterns, first, window: the buffer holds that many elements, the counts all patterns.
            unsafe { work.launch(device.patterns, blocks, window * 4, &arguments) }?;
        }
        Ok(())
    }

    fn finish(&mut self, work: &Stream) -> Result<Option<Vec<u64>>, DeviceError> {
        let Some(buffer) = self.counts.as_ref().filter(|_| self.elements > 0) else {
            return Ok(None);
        };
        let mut counts = vec![0u64; PATTERNS];
        work.download(buffer, &mut counts)?;
        work.clear(buffer)?;
        // Positive zeros are not counted on the device: they are the rest.
        counts[0] = self.elements - counts.iter().sum::<u64>();
        self.elements = 0;
        Ok(Some(counts))
    }
}

impl Replaying {
    fn new(
        device: &'static Device,
        work: &Stream,
        plan: &Arc<Replay>,
    ) -> Result<Replaying, DeviceError> {
        let scales = plan.roundings.len();
        // No buffer of nothing: the driver refuses it.
        let buffer = |bytes: usize| Buffer::new(device, bytes.max(8));
        let replaying = Replaying {
            plan: plan.clone(),
            edges: buffer(plan.edges.len() * 4)?,
            first: buffer(plan.first.len() * 4)?,
            roundings: buffer(scales * 40)?,
            sums: buffer(plan.edges.len() * 32)?,
            block_errors: buffer(scales * 16 * (STAGED_BYTES / 4 / BLOCK))?,
            errors: buffer(scales * 16)?,
            on: false,
        };
        work.upload_now(&plan.edges, &replaying.edges)?;
        work.upload_now(&plan.first, &replaying.first)?;
        let roundings: Vec<f64> = plan.roundings.iter().flat_map(|r| r.parts()).collect();
        work.upload_now(&roundings, &replaying.roundings)?;
        Ok(replaying)
    }

    fn launch(
        &self,
        device: &Device,
        work: &Stream,
        data: &Buffer,
        elements: u64,
    ) -> Result<(), DeviceError> {
        let intervals = self.plan.edges.len() as u32;
        let copies = copies_that_fit(intervals, replay_shared_bytes(device.shared_bytes));
        let shared_bytes = intervals * REPLAY_TABLE_BYTES * copies;
        let blocks = blocks_for(elements, device.replay.fills);
        let arguments: [Argument<'_>; 7] = [
            data,
            &elements,
            &self.edges,
            &self.first,
            &intervals,
            &copies,
            &self.sums,
        ];
        // SAFETY: data, elements, edges, first, intervals, copies, sums: the buffers were made for this plan.
        unsafe { work.launch(device.replay, blocks, shared_bytes, &arguments) }?;
        let scales = self.plan.roundings.len() as u32;
        if scales == 0 {
            return Ok(());
        }
        let error_blocks = elements.div_ceil(BLOCK as u64);
        // Each block of threads takes sixteen blocks of elements at a time.
        let blocks = error_blocks
            .div_ceil(16)
            .clamp(1, device.errors.fills.into()) as u32;
        let arguments: [Argument<'_>; 5] = [
            data,
            &elements,
            &self.roundings,
            &scales,
            &self.block_errors,
        ];
        // SAFETY: data, elements, roundings, scales, sums: a stage holds no more elements than there is room for sums of blocks.
        unsafe { work.launch(device.errors, blocks, ERRORS_SHARED_BYTES, &arguments) }?;
        let arguments: [Argument<'_>; 4] =
            [&self.block_errors, &error_blocks, &scales, &self.errors];
        // SAFETY: sums, blocks, scales, errors: the sums were written by the launch before.
        unsafe {
            work.launch(
                device.errors_in_order,
                (2 * scales).div_ceil(256),
                0,
                &arguments,
            )
        }
    }

    fn finish(&self, work: &Stream) -> Result<Replayed, DeviceError> {
        let mut sums = vec![0u64; self.plan.edges.len() * 4];
        work.download(&self.sums, &mut sums)?;
        let mut errors = vec![0f64; self.plan.roundings.len() * 2];
        work.download(&self.errors, &mut errors)?;
        Ok(Replayed {
            intervals: sums.as_chunks().0.to_vec(),
            errors: errors.as_chunks().0.to_vec(),
        })
    }
}

/// Bytes of shared memory an interval takes: `INTERVAL_WORDS` of `kernels.cu`.
const REPLAY_TABLE_BYTES: u32 = 7 * 4;

/// How many tables of intervals a block has: a power of two up to 8, or 0 where not even one fits.
fn copies_that_fit(intervals: u32, bytes: u32) -> u32 {
    let fit = bytes / (intervals * REPLAY_TABLE_BYTES);
    if fit == 0 { 0 } else { 1 << fit.min(8).ilog2() }
}

/// Blocks of threads for so many elements: as many as run side by side, and no more than have something to do.
fn blocks_for(elements: u64, fills: u32) -> u32 {
    elements.div_ceil(WORTH_A_BLOCK).clamp(1, fills.into()) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_intervals_are_as_many_as_fit() {
        assert_eq!(copies_that_fit(400, 116_224), 8);
        assert_eq!(copies_that_fit(400, 49_152), 4);
        assert_eq!(copies_that_fit(1_755, 49_152), 1);
        assert_eq!(copies_that_fit(1_756, 49_152), 0);
    }

    #[test]
    fn a_grid_is_never_empty_and_never_larger_than_the_gpu() {
        assert_eq!(blocks_for(1, 264), 1);
        assert_eq!(blocks_for(WORTH_A_BLOCK + 1, 264), 2);
        assert_eq!(blocks_for(u64::MAX, 264), 264);
    }

    #[test]
    fn a_stage_is_whole_blocks_of_errors() {
        assert_eq!(STAGED_BYTES % (4 * BLOCK), 0);
    }
}
