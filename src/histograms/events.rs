//! TensorBoard event files: framed records, each an `Event` message with summaries.
//!
//! ```text
//!   record    u64 length | masked CRC-32C of it | data | masked CRC-32C of the data        little endian
//!   Event     1 wall_time  2 step  5 summary
//!   Summary   1 value*
//!   Value     1 tag  2 simple_value  5 histo  8 tensor  9 metadata { 1 plugin_data { 1 plugin_name } }
//!   histo     1 min  2 max  3 num  4 sum  5 sum_squares  6 bucket_limit*  7 bucket*
//!   tensor    1 dtype  2 shape { 2 dim { 1 size } }  4 tensor_content  5 float_val*  6 double_val*
//! ```
//!
//! (Source: tensorflow's `event.proto`, `summary.proto`, `histogram.proto`, `tensor.proto` and `record_writer.cc`.)
//! Bucket i of a `HistogramProto` lies between limits i−1 and i; the first begins at `min`. `min` and `max` are elements.
//! Elements beyond all buckets count in `num` alone: they are infinite or NaN where `max` or `min` is, else anywhere
//! between the two. The histogram plugin of TF2 writes an n×3 tensor of left edge, right edge and count.

use super::run::{Again, Builder};
use super::wire::{Message, Value, Wrong};
use super::{Edges, HistogramError, HistogramRun, between, count_of, is_gradient};
use crate::gradients;
use crate::tally::{Histogram, Role};
use crate::warning::{Kind, Warning};
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

/// A record longer than this holds no summaries that are wanted (a graph, an embedding).
const LONGEST_RECORD: u64 = 256 << 20;
/// Bins of one histogram.
const MOST_BINS: usize = 1 << 20;

/// CRC-32C (Castagnoli), bit by bit for each byte once.
const TABLE: [u32; 256] = {
    let mut table = [0u32; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (0x82F6_3B78 & (crc & 1).wrapping_neg());
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// The masked CRC-32C of a record's part, as the framing stores it.
fn masked_crc(bytes: &[u8]) -> u32 {
    let crc = !bytes.iter().fold(!0u32, |crc, &byte| {
        TABLE[usize::from(crc as u8 ^ byte)] ^ (crc >> 8)
    });
    crc.rotate_right(15).wrapping_add(0xA282_EAD8)
}

/// Whether the first twelve bytes of a file are the head of a record.
pub(super) fn is_record(head: &[u8]) -> bool {
    let Some((length, rest)) = head.split_at_checked(8) else {
        return false;
    };
    rest.first_chunk::<4>()
        .is_some_and(|crc| u32::from_le_bytes(*crc) == masked_crc(length))
}

/// Reads runs of event files, each in the order of the files' names.
pub(super) fn read(
    path: &Path,
    runs: &[(PathBuf, Vec<PathBuf>)],
    reading: &gradients::Options,
    skip_bad: bool,
) -> Result<Vec<HistogramRun>, HistogramError> {
    let mut read = Vec::new();
    let mut empty = None;
    for (directory, files) in runs {
        let mut builder = Builder::default();
        for file in files {
            if let Err(error) = read_file(file, reading, &mut builder) {
                if !skip_bad {
                    return Err(error);
                }
                builder.warnings.push(Warning::new(
                    Kind::PassedOver,
                    error.to_string(),
                    "what comes after it in that file is missing",
                    "without --skip-bad this ends the run",
                ));
            }
        }
        let name = directory
            .strip_prefix(path)
            .map(|below| below.display().to_string())
            .unwrap_or_default();
        // Of several runs those without gradients (an evaluation beside the training) are passed over.
        match builder.finish(&name, directory, reading) {
            Ok(run) => read.push(run),
            Err(error) => empty = empty.or(Some(error)),
        }
    }
    match (read.is_empty(), empty) {
        (true, Some(error)) => Err(error),
        _ => Ok(read),
    }
}

fn read_file(
    path: &Path,
    reading: &gradients::Options,
    builder: &mut Builder,
) -> Result<(), HistogramError> {
    let io = |source| HistogramError::Io {
        path: path.to_owned(),
        source,
    };
    let file = std::fs::File::open(path).map_err(io)?;
    let length = file.metadata().map_err(io)?.len();
    parse(BufReader::new(file), length, path, reading, builder)
}

/// Parses one event file from memory.
pub(super) fn parse_one(
    bytes: &[u8],
    path: &Path,
    reading: &gradients::Options,
) -> Result<Vec<HistogramRun>, HistogramError> {
    let mut builder = Builder::default();
    parse(bytes, bytes.len() as u64, path, reading, &mut builder)?;
    Ok(vec![builder.finish("", path, reading)?])
}

/// Parses records until the file ends.
fn parse(
    mut reader: impl Read,
    length: u64,
    path: &Path,
    reading: &gradients::Options,
    builder: &mut Builder,
) -> Result<(), HistogramError> {
    let mut offset = 0u64;
    let mut data = Vec::new();
    // As many bytes as there are, up to `wanted`.
    let mut fill = |data: &mut Vec<u8>, wanted: u64| {
        data.clear();
        reader
            .by_ref()
            .take(wanted)
            .read_to_end(data)
            .map_err(|source| HistogramError::Io {
                path: path.to_owned(),
                source,
            })
    };
    let truncated = |offset: u64, found: u64, expected: u64| HistogramError::Truncated {
        path: path.to_owned(),
        offset,
        found,
        expected,
    };
    let checked = |offset: u64, what: &'static str, bytes: &[u8], expected: u32| {
        let found = masked_crc(bytes);
        if found == expected {
            Ok(())
        } else {
            Err(HistogramError::Checksum {
                path: path.to_owned(),
                offset,
                what,
                found,
                expected,
            })
        }
    };
    loop {
        let read = fill(&mut data, 12)? as u64;
        if read == 0 {
            return Ok(());
        }
        let (Some(&head), Some(&crc)) = (data.first_chunk::<8>(), data.last_chunk::<4>()) else {
            return Err(truncated(offset, read, 12));
        };
        if read < 12 {
            return Err(truncated(offset, read, 12));
        }
        checked(offset, "length", &head, u32::from_le_bytes(crc))?;
        let size = u64::from_le_bytes(head);
        // Before the length of the file is asked: a length that nothing has says what is wrong.
        if size > LONGEST_RECORD {
            return Err(HistogramError::TooLong {
                path: path.to_owned(),
                offset,
                found: size,
                limit: LONGEST_RECORD,
            });
        }
        let needed = 12 + size + 4;
        let left = length.saturating_sub(offset);
        if needed > left {
            return Err(truncated(offset, left, needed));
        }
        let read = fill(&mut data, size + 4)? as u64;
        if read < size + 4 {
            return Err(truncated(offset, 12 + read, needed));
        }
        let (body, crc) = data.split_at(size as usize);
        let crc = u32::from_le_bytes(crc.try_into().expect("four bytes are left"));
        checked(offset + 12, "data", body, crc)?;
        event(Message::new(body, offset + 12), reading, builder).map_err(|wrong| {
            HistogramError::Message {
                path: path.to_owned(),
                offset: wrong.offset,
                found: wrong.found,
                expected: wrong.expected,
            }
        })?;
        offset += needed;
    }
}

fn event(
    message: Message<'_>,
    reading: &gradients::Options,
    builder: &mut Builder,
) -> Result<(), Wrong> {
    let mut step = 0u64;
    let mut summaries = Vec::new();
    message.fields(&mut |number, value| {
        match (number, value) {
            (2, Value::Varint(found)) => step = found,
            (5, Value::Bytes(summary)) => summaries.push(summary),
            _ => {}
        }
        Ok(())
    })?;
    if summaries.is_empty() {
        return Ok(());
    }
    if step > i64::MAX as u64 {
        return Err(message.wrong(format!("the step {}", step as i64), "a step from 0"));
    }
    for summary in summaries {
        summary.fields(&mut |number, value| match (number, value) {
            (1, Value::Bytes(value)) => summary_value(value, step, reading, builder),
            _ => Ok(()),
        })?;
    }
    Ok(())
}

fn summary_value(
    message: Message<'_>,
    step: u64,
    reading: &gradients::Options,
    builder: &mut Builder,
) -> Result<(), Wrong> {
    let (mut tag, mut simple, mut histo, mut tensor) = (String::new(), None, None, None);
    message.fields(&mut |number, value| {
        match (number, value) {
            (1, Value::Bytes(text)) => tag = text.text(),
            (2, Value::Fixed32(bits)) => simple = Some(f64::from(f32::from_bits(bits))),
            (5, Value::Bytes(found)) => histo = Some(found),
            (8, Value::Bytes(found)) => tensor = Some(found),
            _ => {}
        }
        Ok(())
    })?;
    if let Some(value) = simple {
        builder.scalar(step, &tag, value);
        return Ok(());
    }
    let histogram = if let Some(found) = histo {
        if !is_gradient(&tag, reading) {
            builder.leave_out(&tag);
            return Ok(());
        }
        Some(histogram_proto(found)?)
    } else if let Some(found) = tensor {
        let wanted = is_gradient(&tag, reading);
        match tensor_proto(found, wanted)? {
            Tensor::Scalar(value) => {
                builder.scalar(step, &tag, value);
                None
            }
            Tensor::Histogram(histogram) => Some(histogram),
            Tensor::Unwanted => {
                builder.leave_out(&tag);
                None
            }
            Tensor::Other => None,
        }
    } else {
        None
    };
    if let Some(histogram) = histogram.filter(|histogram| histogram.elements() > 0) {
        // A run that was restarted writes a step again: the later one counts.
        builder.add(
            step,
            &tag,
            Role::Parameter,
            Vec::new(),
            histogram,
            Again::Replaces,
        );
    }
    Ok(())
}

const COUNT: &str = "a whole number of elements from 0 to 2^53";

fn counts_of(message: Message<'_>, counts: &[f64]) -> Result<Vec<u64>, Wrong> {
    counts
        .iter()
        .map(|&count| {
            count_of(count).ok_or_else(|| message.wrong(format!("the count {count}"), COUNT))
        })
        .collect()
}

fn histogram_proto(message: Message<'_>) -> Result<Histogram, Wrong> {
    let (mut min, mut max, mut num) = (0.0, 0.0, 0.0);
    let (mut limits, mut counts) = (Vec::new(), Vec::new());
    message.fields(&mut |number, value| {
        match (number, value) {
            (1, Value::Fixed64(bits)) => min = f64::from_bits(bits),
            (2, Value::Fixed64(bits)) => max = f64::from_bits(bits),
            (3, Value::Fixed64(bits)) => num = f64::from_bits(bits),
            (6, Value::Bytes(packed)) => packed.doubles(&mut limits)?,
            (6, Value::Fixed64(bits)) => limits.push(f64::from_bits(bits)),
            (7, Value::Bytes(packed)) => packed.doubles(&mut counts)?,
            (7, Value::Fixed64(bits)) => counts.push(f64::from_bits(bits)),
            _ => {}
        }
        Ok(())
    })?;
    if limits.len() != counts.len() || limits.len() > MOST_BINS {
        return Err(message.wrong(
            format!(
                "{} bucket limits beside {} buckets",
                limits.len(),
                counts.len()
            ),
            "as many of each, and at most 2^20",
        ));
    }
    if !limits.is_sorted_by(|a, b| a <= b) || limits.iter().any(|limit| limit.is_nan()) {
        return Err(message.wrong("bucket limits out of order", "ascending ones"));
    }
    let counts = counts_of(message, &counts)?;
    let too_many = |_| message.wrong("more than 2^63 elements in all", "fewer");
    let total = counts
        .iter()
        .try_fold(0u64, |sum, &count| sum.checked_add(count))
        .filter(|&sum| sum <= 1 << 63)
        .ok_or_else(|| too_many(()))?;
    let num = match count_of(num) {
        Some(0) => total,
        Some(num) if num >= total => num,
        _ => {
            return Err(message.wrong(
                format!("a num of {num}, and {total} elements in the buckets"),
                "at least as many as the buckets hold",
            ));
        }
    };
    let unplaced = num - total;
    let left = |i: usize| {
        if i == 0 {
            f64::NEG_INFINITY
        } else {
            limits[i - 1]
        }
    };
    let ends = (min.is_finite() && max.is_finite() && min <= max).then_some((min, max));
    // Where a bucket with elements lies outside of min and max, whoever wrote it set neither.
    let ends = ends.filter(|&(min, max)| {
        unplaced > 0
            || (0..counts.len())
                .filter(|&i| counts[i] > 0)
                .all(|i| left(i) <= max && limits[i] >= min)
    });
    let clip = |low: f64, high: f64| match ends {
        Some((min, max)) if unplaced == 0 => (low.max(min), high.min(max)),
        // Cut at f32's largest value when it is added.
        _ => (low.max(-f64::MAX), high.min(f64::MAX)),
    };
    let bins: Vec<(f64, f64, u64)> = (0..counts.len())
        .filter(|&i| counts[i] > 0)
        .map(|i| {
            let (low, high) = clip(left(i), limits[i]);
            (low, high, counts[i])
        })
        .collect();
    let pinned = ends
        .filter(|_| unplaced == 0)
        .map(|(min, max)| [(min, min), (max, max)]);
    let mut histogram = Histogram::from_bins(&bins, pinned)
        .map_err(|error| message.wrong(error.to_string(), "buckets of elements"))?;
    if unplaced > 0 {
        let nan = min.is_nan() || max.is_nan();
        let added = match ends {
            Some((min, max)) => histogram.add(min, max, unplaced),
            None if nan => histogram.add_nonfinite(0, unplaced),
            None => histogram.add_nonfinite(unplaced, 0),
        };
        added.map_err(|_| too_many(()))?;
    }
    Ok(histogram)
}

/// What a tensor of a summary is.
enum Tensor {
    Scalar(f64),
    Histogram(Histogram),
    /// A histogram of something else than a gradient.
    Unwanted,
    Other,
}

const FLOAT: u64 = 1;
const DOUBLE: u64 = 2;

fn tensor_proto(message: Message<'_>, wanted: bool) -> Result<Tensor, Wrong> {
    let (mut dtype, mut dims, mut content) = (0, Vec::new(), None);
    let (mut floats, mut doubles) = (Vec::new(), Vec::new());
    message.fields(&mut |number, value| {
        match (number, value) {
            (1, Value::Varint(found)) => dtype = found,
            (2, Value::Bytes(shape)) => shape.fields(&mut |number, value| {
                if let (2, Value::Bytes(dim)) = (number, value) {
                    let mut size = 0;
                    dim.fields(&mut |number, value| {
                        if let (1, Value::Varint(found)) = (number, value) {
                            size = found;
                        }
                        Ok(())
                    })?;
                    dims.push(size);
                }
                Ok(())
            })?,
            (4, Value::Bytes(bytes)) => content = Some(bytes),
            (5, Value::Bytes(packed)) => packed.floats(&mut floats)?,
            (5, Value::Fixed32(bits)) => floats.push(f64::from(f32::from_bits(bits))),
            (6, Value::Bytes(packed)) => packed.doubles(&mut doubles)?,
            (6, Value::Fixed64(bits)) => doubles.push(f64::from_bits(bits)),
            _ => {}
        }
        Ok(())
    })?;
    let scalar = dims.is_empty();
    let bins = match dims.as_slice() {
        [] => 0,
        [bins, 3] => *bins,
        _ => return Ok(Tensor::Other),
    };
    if dtype != FLOAT && dtype != DOUBLE {
        return Ok(Tensor::Other);
    }
    if !scalar && !wanted {
        return Ok(Tensor::Unwanted);
    }
    let mut values = if dtype == FLOAT { floats } else { doubles };
    if let Some(bytes) = content.filter(|content| !content.bytes().is_empty()) {
        values.clear();
        match dtype {
            FLOAT => bytes.floats(&mut values)?,
            _ => bytes.doubles(&mut values)?,
        }
    }
    if scalar {
        return Ok(values
            .first()
            .map_or(Tensor::Other, |&value| Tensor::Scalar(value)));
    }
    if bins > MOST_BINS as u64 || values.len() as u64 != bins * 3 {
        return Err(message.wrong(
            format!("{} numbers for a shape of {bins}×3", values.len()),
            "left edge, right edge and count of each of at most 2^20 bins",
        ));
    }
    let (rows, _) = values.as_chunks::<3>();
    let counts: Vec<f64> = rows.iter().map(|row| row[2]).collect();
    let counts = counts_of(message, &counts)?;
    let neighbours = rows.windows(2).all(|pair| pair[0][1] == pair[1][0]);
    let wrong = || message.wrong("bins out of order", "ascending finite edges");
    // One bin of width 1 around it stands for a tensor of one value: its edges are no elements.
    if neighbours && rows.len() > 1 {
        let edges: Vec<f64> = std::iter::once(rows[0][0])
            .chain(rows.iter().map(|row| row[1]))
            .collect();
        return between(&edges, &counts, Edges::Listed)
            .map(Tensor::Histogram)
            .ok_or_else(wrong);
    }
    let bins: Vec<(f64, f64, u64)> = rows
        .iter()
        .zip(counts)
        .map(|(row, count)| (row[0], row[1], count))
        .collect();
    Histogram::from_bins(&bins, None)
        .map(Tensor::Histogram)
        .map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_castagnolis_and_masked() {
        // RFC 3720, B.4: 32 bytes of zeros have the CRC-32C 0x8A9136AA.
        let unmasked = masked_crc(&[0; 32])
            .wrapping_sub(0xA282_EAD8)
            .rotate_left(15);
        assert_eq!(unmasked, 0x8A91_36AA);
    }
}
