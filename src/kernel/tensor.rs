//! Reading one tensor of a dump into a sketch, on as many threads as there are.

use super::{Counter, DeviceError, MANY_HALVES, Pool, Replay, Replayed};
use crate::gradients::{Chunk, GradientsError, Kind, OpenDump};
use crate::tally::Sketch;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that a thread takes at a time. A large tensor is cut at fixed places, whatever the number of threads.
const RANGE_BYTES: u64 = 16 << 20;

/// Sees nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Nothing;

impl Beside for Nothing {
    fn add(&mut self, _: &[f32]) {}
    fn add_repeated(&mut self, _: f32, _: u64) {}
    fn end(&mut self) {}
    fn replay(&self) -> Option<Arc<Replay>> {
        None
    }
    fn take_replayed(&mut self, _: Replayed) {}
    fn join(&mut self, _: Nothing) {}
}

/// What else wants to see the elements.
pub(crate) trait Beside: Send {
    /// Some elements, in order.
    fn add(&mut self, values: &[f32]);
    /// A value that stands for several elements.
    fn add_repeated(&mut self, value: f32, times: u64);
    /// The range ends here.
    fn end(&mut self);
    /// What a backend needs to know that replays a whole range by itself.
    fn replay(&self) -> Option<Arc<Replay>>;
    /// What such a backend made of the elements that [`add`](Beside::add) was not shown.
    fn take_replayed(&mut self, replayed: Replayed);
    /// Adds what the next range gave.
    fn join(&mut self, next: Self);
}

/// Sketches tensor number `tensor`, its loss scale divided out, and shows it to what `beside` makes, where it makes any.
///
/// # Errors
/// When the file cannot be read.
pub(crate) fn read_tensor<B: Beside>(
    open: &OpenDump,
    tensor: usize,
    pool: &Pool,
    beside: &(impl Fn() -> Option<B> + Sync),
) -> Result<(Sketch, Option<B>), GradientsError> {
    let divisor = open.dump_scale()?;
    let elements = open.tensors().get(tensor).map_or(0, |meta| meta.elements);
    let size = open
        .tensors()
        .get(tensor)
        .map_or(1, |meta| meta.dtype.size_bytes());
    let step = RANGE_BYTES / size;
    let one = |range: Option<Range<u64>>| {
        pool.with(|counter| {
            let halves = elements >= MANY_HALVES as u64;
            let beside = beside();
            let replays = beside
                .as_ref()
                .and_then(B::replay)
                .is_some_and(|plan| counter.replay(&plan));
            let mut filling = Filling {
                counter,
                beside,
                replays,
                divisor,
                halves,
                values: Vec::new(),
            };
            let visit = &mut |chunk: Chunk<'_>| filling.take(chunk);
            let read = match range {
                Some(range) => open.read_range(tensor, range, visit),
                None => open.read(tensor, visit),
            };
            // Emptied in any case, as the counter is lent again.
            let finished = filling.finish();
            read?;
            finished.map_err(|source| GradientsError::Device {
                path: open.path().to_owned(),
                tensor: open
                    .tensors()
                    .get(tensor)
                    .map(|meta| meta.name.clone())
                    .unwrap_or_default(),
                reason: source.to_string(),
            })
        })
    };
    // Only a whole read can hold the checksums of an .npz to its members.
    if open.kind() == Kind::Npz || !open.splittable(tensor) || elements <= step {
        return one(None);
    }
    let ranges: Vec<Range<u64>> = (0..elements.div_ceil(step))
        .map(|n| n * step..(n * step + step).min(elements))
        .collect();
    let parts: Vec<(Sketch, Option<B>)> = ranges
        .into_par_iter()
        .map(|range| one(Some(range)))
        .collect::<Result<_, GradientsError>>()?;
    let mut parts = parts.into_iter();
    let (mut sketch, mut beside) = parts.next().unwrap_or_default();
    for (more, next) in parts {
        sketch.merge(&more);
        if let (Some(beside), Some(next)) = (&mut beside, next) {
            beside.join(next);
        }
    }
    Ok((sketch, beside))
}

/// A range being read.
struct Filling<'a, B> {
    counter: &'a mut Counter,
    beside: Option<B>,
    /// Whether the backend replays f32 elements by itself.
    replays: bool,
    divisor: Option<f64>,
    /// Whether 16-bit elements are counted by pattern.
    halves: bool,
    values: Vec<f32>,
}

impl<B: Beside> Filling<'_, B> {
    fn take(&mut self, chunk: Chunk<'_>) {
        let values = match chunk {
            Chunk::F16(values) if self.halves => return self.counter.count_f16(values),
            Chunk::Bf16(values) if self.halves => return self.counter.count_bf16(values),
            Chunk::F32(values) if self.divisor.is_none() => values,
            chunk => {
                self.values.clear();
                match chunk {
                    Chunk::F32(values) => self.values.extend_from_slice(values),
                    Chunk::F16(values) => self.values.extend(values.iter().map(|x| x.to_f32())),
                    Chunk::Bf16(values) => self.values.extend(values.iter().map(|x| x.to_f32())),
                }
                if let Some(divisor) = self.divisor {
                    for value in &mut self.values {
                        *value = unscaled(*value, divisor);
                    }
                }
                &self.values
            }
        };
        self.counter.add(values);
        if let Some(beside) = self.beside.as_mut().filter(|_| !self.replays) {
            beside.add(values);
        }
    }

    fn finish(mut self) -> Result<(Sketch, Option<B>), DeviceError> {
        let divisor = self.divisor;
        let sketch = self.counter.finish_with(
            |value| divisor.map_or(value, |divisor| unscaled(value, divisor)),
            |value, times| {
                if let Some(beside) = &mut self.beside {
                    beside.add_repeated(value, times);
                }
            },
        );
        let replayed = self.counter.take_replayed();
        if let Some(beside) = &mut self.beside {
            beside.end();
            if let Some(replayed) = replayed {
                beside.take_replayed(replayed);
            }
        }
        Ok((sketch?, self.beside))
    }
}

/// A value without its loss scale.
fn unscaled(value: f32, divisor: f64) -> f32 {
    (f64::from(value) / divisor) as f32
}

/// Reads the files of a dump in their order and hands each to `done`; several are read side by side.
///
/// # Errors
/// The first file's that cannot be read, in their order.
pub(crate) fn read_files<F: Sync, T: Send, E: Send>(
    files: &[F],
    read: impl Fn(&F) -> Result<T, E> + Sync,
    mut done: impl FnMut(T) -> Result<(), E>,
) -> Result<(), E> {
    // Enough that no thread waits for the last of them, and few enough that their results weigh nothing.
    for window in files.chunks(4 * rayon::current_num_threads()) {
        let read: Vec<Result<T, E>> = window.par_iter().map(&read).collect();
        for file in read {
            done(file?)?;
        }
    }
    Ok(())
}
