//! Why a histogram file cannot be used.

use std::path::PathBuf;

/// What can go wrong with histograms and statistics.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HistogramError {
    /// The system refused.
    #[error("reading histograms {path:?}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
    /// Nothing in the file or its name says what it is.
    #[error(
        "reading histograms {path:?}: found nothing that is known, expected TensorBoard events, a W&B summary or history, or per-tensor statistics"
    )]
    Unknown {
        /// The file.
        path: PathBuf,
    },
    /// An event file that ends inside a record.
    #[error(
        "reading events {path:?}, byte {offset}: found {found} bytes, expected {expected}; the file was cut short or is still being written: copy it again, or take what comes before with --skip-bad"
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Where the record begins.
        offset: u64,
        /// Bytes from there.
        found: u64,
        /// Bytes that the record needs.
        expected: u64,
    },
    /// A record that claims a length no summary has.
    #[error(
        "reading events {path:?}, byte {offset}: found a record of {found} bytes, expected at most {limit}; the file is damaged or holds no summaries"
    )]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Where the record begins.
        offset: u64,
        /// Its length.
        found: u64,
        /// What is read at most.
        limit: u64,
    },
    /// Bytes that are not those that were written.
    #[error(
        "reading events {path:?}, byte {offset}: found the CRC-32C {found:#010x} of a record's {what}, expected {expected:#010x}; the file is damaged: copy it again, or take what comes before with --skip-bad"
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// Where what was summed begins.
        offset: u64,
        /// `length` or `data`.
        what: &'static str,
        /// The checksum of what was read.
        found: u32,
        /// The checksum in the file.
        expected: u32,
    },
    /// A message inside a record that is none.
    #[error(
        "reading events {path:?}, byte {offset}: found {found}, expected {expected}; the file was not written by a TensorBoard writer"
    )]
    Message {
        /// The file.
        path: PathBuf,
        /// Where.
        offset: u64,
        /// What stands there.
        found: String,
        /// What belongs there.
        expected: &'static str,
    },
    /// JSON that is none, or holds something else.
    #[error("reading histograms {path:?}, {place}: found {found}, expected {expected}")]
    Json {
        /// The file.
        path: PathBuf,
        /// Line, column or key.
        place: String,
        /// What stands there.
        found: String,
        /// What belongs there.
        expected: String,
    },
    /// A file larger than is read at once.
    #[error(
        "reading histograms {path:?}: found {found} bytes, expected at most {limit}; split it by step"
    )]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        found: u64,
        /// What is read at most.
        limit: u64,
    },
    /// A row of a table.
    #[error("reading histograms {path:?}, line {line}: found {found}, expected {expected}")]
    Row {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// What was found.
        found: String,
        /// What belongs there.
        expected: String,
    },
    /// A file without any gradient.
    #[error(
        "reading histograms {path:?}: found {found}, expected histograms or statistics with \"grad\" in their name; --tensors GLOB chooses others"
    )]
    NoGradients {
        /// The file.
        path: PathBuf,
        /// What there is.
        found: String,
    },
    /// Shares of elements lost to FP8.
    #[error(
        "reading {path:?}: found shares of elements lost to FP8 with block scaling, expected FP16 gradients; FP8 has its own scale for each tensor or block, and no loss scale can be read from them. They show where underflow lies: {shape}. Record the gradients themselves for a loss scale"
    )]
    Fp8 {
        /// The file.
        path: PathBuf,
        /// Which layers hold most.
        shape: String,
    },
}
