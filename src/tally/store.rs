//! Traces on disk: a directory of safetensors chunks, one writer a rank, merged when read.
//!
//! Each chunk `rankRRRR-CCCCCC.safetensors` is written to a temporary name, synced and renamed, so a killed run loses at
//! most the open chunk. Its metadata holds one key, `gradscale`, whose value is JSON (`schema`, `run_id`, `tensors`, …).
//! With T steps, N tensors and K sampled steps it holds, little endian:
//!
//! | tensor | type, shape | what |
//! |---|---|---|
//! | `step` | I64 \[T] | optimizer step, ascending |
//! | `loss_scale`, `loss` | F64 \[T] | NaN where not recorded |
//! | `found_inf` | U8 \[T] | 0, 1; 255 where not recorded |
//! | `amax` | F32 \[T,N] | largest finite magnitude; NaN where the tensor had no gradient |
//! | `nonfinite` | U8 \[T,N] | bit 0 an inf, bit 1 a NaN, bit 2 nothing finite |
//! | `sampled` | I64 \[K] | rows that carry sketches |
//! | `zeros`, `inf_positive`, `inf_negative`, `nan` | U64 \[K,N] | counts |
//! | `smallest_nonzero`, `significand_or` | U32 \[K,N] | f32 bits; OR of significand fields |
//! | `lowest_bit` | I16 \[K,N] | exponent of the lowest set bit; 32767 where there is none |
//! | `indptr` | I64 \[K·N+1] | row starts of the bins; row k·N+n |
//! | `bins`, `counts`, `sums` | U16, U64, U64 \[nnz] | the nonempty bins (see [`Bin`]) |
//!
//! Probes are the same arrays under `probe_`, with `probe_amax` and `probe_nonfinite` \[Kp,N].

use super::sketch::Beside;
use super::{Bin, MergeError, Sample, Sketch, SketchError, Step, TensorInfo, Trace};
use safetensors::tensor::{Dtype, TensorView};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The schema that this version reads and writes.
pub const SCHEMA: &str = "gradscale.trace/1";
/// A chunk file larger than this is refused: its writer bounds the steps of a chunk.
const LARGEST_CHUNK: u64 = 4 << 30;
const NO_BIT: i16 = i16::MAX;

/// What can go wrong with a trace on disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The system refused.
    #[error("{doing} trace {path:?}: {source}")]
    Io {
        /// `reading`, `writing`, …
        doing: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
    /// The directory holds no chunk.
    #[error(
        "reading trace {path:?}: found no chunk (rank0000-000000.safetensors, …), expected at least one; the recorder closes its first chunk right after the first step"
    )]
    Empty {
        /// The directory.
        path: PathBuf,
    },
    /// The file is no chunk of a trace.
    #[error("reading trace chunk {path:?}: {reason}; pass --skip-bad to go on without it")]
    NotAChunk {
        /// The file.
        path: PathBuf,
        /// What was found instead.
        reason: String,
    },
    /// A tensor of the chunk is missing, or of another type or shape.
    #[error(
        "reading trace chunk {path:?}, tensor {tensor:?}: found {found}, expected {expected}; pass --skip-bad to go on without it"
    )]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type and shape.
        found: String,
        /// The contract's.
        expected: String,
    },
    /// A stored sketch contradicts itself.
    #[error(
        "reading trace chunk {path:?}, tensor {tensor:?}, sampled row {sample}: {source}; pass --skip-bad to go on without it"
    )]
    Sketch {
        /// The file.
        path: PathBuf,
        /// The recorded tensor.
        tensor: String,
        /// Which sampled row of the chunk.
        sample: usize,
        /// What contradicts.
        source: SketchError,
    },
    /// Two chunks are not parts of one run.
    #[error("reading trace {path:?}: {source}")]
    Merge {
        /// The second chunk.
        path: PathBuf,
        /// Why.
        source: MergeError,
    },
}

#[derive(Serialize, Deserialize)]
struct Metadata {
    schema: String,
    run_id: String,
    #[serde(default)]
    rank: u32,
    #[serde(default = "one")]
    world_size: u32,
    #[serde(default)]
    chunk: u64,
    tensors: Vec<TensorInfo>,
    #[serde(default)]
    values: Values,
    #[serde(default)]
    facts: Map<String, Value>,
}

fn one() -> u32 {
    1
}

#[derive(Serialize, Deserialize, Default, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Values {
    Scaled,
    #[default]
    Unscaled,
}

/// What reading a trace directory gives beside the trace.
#[derive(Debug, Default)]
pub struct Passed {
    /// Temporary files that a killed writer left behind.
    pub leftovers: Vec<PathBuf>,
    /// Files that were skipped on request, with the reason.
    pub skipped: Vec<(PathBuf, TraceError)>,
}

/// Whether `path` is a directory that holds trace chunks (finished or being written).
pub fn is_trace(path: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(path) else {
        return false;
    };
    entries
        .flatten()
        .any(|entry| is_chunk_name(&entry.file_name().to_string_lossy()))
}

/// `rankRRRR-CCCCCC.safetensors`, or the temporary name of one.
fn is_chunk_name(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("rank") else {
        return false;
    };
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let Some(rest) = rest[digits..].strip_prefix('-') else {
        return false;
    };
    let chunk = rest.bytes().take_while(u8::is_ascii_digit).count();
    digits > 0 && chunk > 0 && matches!(&rest[chunk..], ".safetensors" | ".safetensors.tmp")
}

/// Reads a trace directory: every chunk of every rank, merged into one run.
///
/// A torn or foreign file ends it with an error that names the file, or is passed over where `skip_bad` asks for it.
///
/// # Errors
/// When there is no chunk, a chunk is unreadable or contradicts itself, or chunks of two runs lie side by side.
pub fn read(directory: &Path, skip_bad: bool) -> Result<(Trace, Passed), TraceError> {
    let io = |source| TraceError::Io {
        doing: "reading",
        path: directory.to_owned(),
        source,
    };
    let mut paths = Vec::new();
    let mut passed = Passed::default();
    for entry in std::fs::read_dir(directory).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        if name.ends_with(".tmp") {
            passed.leftovers.push(path);
        } else if name.ends_with(".safetensors") {
            paths.push(path);
        }
    }
    paths.sort();
    passed.leftovers.sort();
    if paths.is_empty() {
        return Err(TraceError::Empty {
            path: directory.to_owned(),
        });
    }
    let mut parts = Vec::new();
    for path in paths {
        let part = read_bytes(&path).and_then(|bytes| decode(&bytes, &path));
        match part {
            Ok(part) => parts.push((path, part)),
            Err(error) if skip_bad => passed.skipped.push((path, error)),
            Err(error) => return Err(error),
        }
    }
    if parts.is_empty() {
        return Err(TraceError::Empty {
            path: directory.to_owned(),
        });
    }
    Ok((join(parts)?, passed))
}

/// Merges decoded chunks; those of one rank follow each other, so they are joined by appending where that is right.
fn join(parts: Vec<(PathBuf, Trace)>) -> Result<Trace, TraceError> {
    let mut whole = Trace::default();
    for (path, part) in parts {
        whole
            .merge(&part)
            .map_err(|source| TraceError::Merge { path, source })?;
    }
    Ok(whole)
}

/// Reads a trace from chunks held in memory, as the built-in runs are.
///
/// # Errors
/// As [`read`].
pub fn read_chunks<'a>(
    chunks: impl IntoIterator<Item = (&'a str, &'a [u8])>,
) -> Result<Trace, TraceError> {
    let mut parts = Vec::new();
    for (name, bytes) in chunks {
        let path = PathBuf::from(name);
        parts.push((path.clone(), decode(bytes, &path)?));
    }
    join(parts)
}

fn read_bytes(path: &Path) -> Result<Vec<u8>, TraceError> {
    let io = |source| TraceError::Io {
        doing: "reading",
        path: path.to_owned(),
        source,
    };
    let length = std::fs::metadata(path).map_err(io)?.len();
    if length > LARGEST_CHUNK {
        return Err(TraceError::NotAChunk {
            path: path.to_owned(),
            reason: format!("found {length} bytes, expected at most {LARGEST_CHUNK}"),
        });
    }
    std::fs::read(path).map_err(io)
}

/// One chunk's tensors, with the checks that every access needs.
struct Chunk<'a> {
    path: &'a Path,
    tensors: safetensors::SafeTensors<'a>,
}

impl<'a> Chunk<'a> {
    fn view(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&'a [u8], TraceError> {
        let expected = || format!("{dtype:?} {shape:?}");
        let wrong = |found: String| TraceError::Tensor {
            path: self.path.to_owned(),
            tensor: name.to_owned(),
            found,
            expected: expected(),
        };
        let view = self
            .tensors
            .tensor(name)
            .map_err(|_| wrong("none".to_owned()))?;
        if view.dtype() != dtype || view.shape() != shape {
            return Err(wrong(format!("{:?} {:?}", view.dtype(), view.shape())));
        }
        Ok(view.data())
    }

    fn length(&self, name: &str) -> Option<usize> {
        let view = self.tensors.tensor(name).ok()?;
        (view.shape().len() == 1).then(|| view.shape()[0])
    }
}

macro_rules! numbers {
    ($name:ident, $type:ty, $dtype:ident) => {
        fn $name(chunk: &Chunk<'_>, name: &str, shape: &[usize]) -> Result<Vec<$type>, TraceError> {
            let bytes = chunk.view(name, Dtype::$dtype, shape)?;
            let (numbers, _) = bytes.as_chunks();
            Ok(numbers.iter().map(|&b| <$type>::from_le_bytes(b)).collect())
        }
    };
}
numbers!(i64s, i64, I64);
numbers!(u64s, u64, U64);
numbers!(f64s, f64, F64);
numbers!(f32s, f32, F32);
numbers!(u32s, u32, U32);
numbers!(u16s, u16, U16);
numbers!(i16s, i16, I16);

/// Decodes one chunk. `path` only names it in errors.
///
/// # Errors
/// When it is no chunk, or its parts contradict each other.
pub fn decode(bytes: &[u8], path: &Path) -> Result<Trace, TraceError> {
    let not = |reason: String| TraceError::NotAChunk {
        path: path.to_owned(),
        reason,
    };
    let (_, header) = safetensors::SafeTensors::read_metadata(bytes).map_err(|e| {
        not(format!(
            "found no readable safetensors header ({e}), expected a finished chunk"
        ))
    })?;
    let text = header
        .metadata()
        .as_ref()
        .and_then(|m| m.get("gradscale"))
        .ok_or_else(|| {
            not(
                "found no metadata key \"gradscale\", expected a chunk of a gradscale trace"
                    .to_owned(),
            )
        })?;
    let metadata: Metadata = serde_json::from_str(text).map_err(|e| {
        not(format!(
            "found metadata that does not parse ({e}), expected schema {SCHEMA}"
        ))
    })?;
    if metadata.schema != SCHEMA {
        return Err(not(format!(
            "found schema {:?}, expected {SCHEMA:?}",
            metadata.schema
        )));
    }
    let tensors = safetensors::SafeTensors::deserialize(bytes).map_err(|e| {
        not(format!(
            "found a torn file ({e}), expected a finished chunk"
        ))
    })?;
    let chunk = Chunk { path, tensors };
    let n = metadata.tensors.len();
    let t = chunk.length("step").ok_or_else(|| TraceError::Tensor {
        path: path.to_owned(),
        tensor: "step".to_owned(),
        found: "none".to_owned(),
        expected: "I64 [T]".to_owned(),
    })?;
    let mut names = std::collections::HashSet::new();
    if let Some(twice) = metadata
        .tensors
        .iter()
        .find(|tensor| !names.insert(tensor.name.as_str()))
    {
        return Err(not(format!(
            "found tensor {:?} twice, expected each name once",
            twice.name
        )));
    }
    let bad = |tensor: &str, found: String, expected: &str| TraceError::Tensor {
        path: path.to_owned(),
        tensor: tensor.to_owned(),
        found,
        expected: expected.to_owned(),
    };

    let numbers = i64s(&chunk, "step", &[t])?;
    if let Some(pair) = numbers.windows(2).find(|w| w[1] <= w[0]) {
        return Err(bad(
            "step",
            format!("{} after {}", pair[1], pair[0]),
            "ascending steps",
        ));
    }
    if let Some(step) = numbers.iter().find(|&&s| s < 0) {
        return Err(bad("step", step.to_string(), "steps from 0"));
    }
    let loss_scales = f64s(&chunk, "loss_scale", &[t])?;
    if let Some(scale) = loss_scales.iter().find(|s| **s < 0.0) {
        return Err(bad(
            "loss_scale",
            scale.to_string(),
            "scales that are not negative",
        ));
    }
    let losses = f64s(&chunk, "loss", &[t])?;
    let flags = chunk.view("found_inf", Dtype::U8, &[t])?;
    if let Some(flag) = flags.iter().find(|f| !matches!(f, 0 | 1 | 255)) {
        return Err(bad("found_inf", flag.to_string(), "0, 1 or 255"));
    }
    let recorded = |value: f64| (!value.is_nan()).then_some(value);
    let steps: Vec<Step> = (0..t)
        .map(|i| Step {
            step: numbers[i] as u64,
            loss_scale: recorded(loss_scales[i]),
            found_inf: (flags[i] != 255).then_some(flags[i] == 1),
            loss: recorded(losses[i]),
        })
        .collect();
    let amax = f32s(&chunk, "amax", &[t, n])?;
    if let Some(amax) = amax.iter().find(|a| **a < 0.0 || a.is_infinite()) {
        return Err(bad(
            "amax",
            amax.to_string(),
            "finite magnitudes, or NaN for no gradient",
        ));
    }
    let nonfinite = chunk.view("nonfinite", Dtype::U8, &[t, n])?.to_vec();

    let names: Vec<&str> = metadata
        .tensors
        .iter()
        .map(|tensor| tensor.name.as_str())
        .collect();
    let samples = decode_samples(&chunk, "", t, &names, |row, _| {
        amax[row * n..(row + 1) * n].to_vec()
    })?;
    let probes = match chunk.length("probe_sampled") {
        None => Vec::new(),
        Some(k) => {
            let probe_amax = f32s(&chunk, "probe_amax", &[k, n])?;
            decode_samples(&chunk, "probe_", t, &names, |_, k| {
                probe_amax[k * n..(k + 1) * n].to_vec()
            })?
        }
    };
    Ok(Trace {
        run_id: metadata.run_id,
        facts: metadata.facts,
        tensors: metadata.tensors,
        scaled: metadata.values == Values::Scaled,
        steps,
        amax,
        nonfinite,
        samples,
        probes,
    })
}

fn decode_samples(
    chunk: &Chunk<'_>,
    prefix: &str,
    t: usize,
    names: &[&str],
    amax_of: impl Fn(usize, usize) -> Vec<f32>,
) -> Result<Vec<Sample>, TraceError> {
    let n = names.len();
    let name = |what: &str| format!("{prefix}{what}");
    let bad = |what: &str, found: String, expected: &str| TraceError::Tensor {
        path: chunk.path.to_owned(),
        tensor: name(what),
        found,
        expected: expected.to_owned(),
    };
    let k = chunk
        .length(&name("sampled"))
        .ok_or_else(|| bad("sampled", "none".to_owned(), "I64 [K]"))?;
    let sampled = i64s(chunk, &name("sampled"), &[k])?;
    if sampled.iter().any(|&row| row < 0 || row as usize >= t)
        || sampled.windows(2).any(|w| w[1] <= w[0])
    {
        return Err(bad(
            "sampled",
            format!("{sampled:?}"),
            "ascending rows of this chunk",
        ));
    }
    let rows = k
        .checked_mul(n)
        .and_then(|rows| rows.checked_add(1))
        .ok_or_else(|| bad("sampled", format!("{k} rows"), "fewer rows"))?;
    let counts_of = |what: &str| u64s(chunk, &name(what), &[k, n]);
    let (zeros, inf_positive) = (counts_of("zeros")?, counts_of("inf_positive")?);
    let (inf_negative, nan) = (counts_of("inf_negative")?, counts_of("nan")?);
    let smallest = u32s(chunk, &name("smallest_nonzero"), &[k, n])?;
    let significand_or = u32s(chunk, &name("significand_or"), &[k, n])?;
    let lowest_bit = i16s(chunk, &name("lowest_bit"), &[k, n])?;
    let indptr = i64s(chunk, &name("indptr"), &[rows])?;
    let stored = chunk
        .length(&name("bins"))
        .ok_or_else(|| bad("bins", "none".to_owned(), "U16 [nnz]"))?;
    let bins = u16s(chunk, &name("bins"), &[stored])?;
    let counts = u64s(chunk, &name("counts"), &[stored])?;
    let sums = u64s(chunk, &name("sums"), &[stored])?;
    if indptr[0] != 0 || indptr[rows - 1] != stored as i64 || indptr.windows(2).any(|w| w[1] < w[0])
    {
        return Err(bad(
            "indptr",
            "starts that do not ascend from 0 to nnz".to_owned(),
            "row starts",
        ));
    }
    let mut samples = Vec::with_capacity(k);
    for (sample, &row) in sampled.iter().enumerate() {
        let row = row as usize;
        let amax = amax_of(row, sample);
        let mut sketches = Vec::with_capacity(n);
        for tensor in 0..n {
            let i = sample * n + tensor;
            let range = indptr[i] as usize..indptr[i + 1] as usize;
            let held: Vec<Bin> = range
                .map(|b| Bin {
                    index: bins[b],
                    count: counts[b],
                    sum: sums[b],
                })
                .collect();
            let beside = Beside {
                zeros: zeros[i],
                inf_positive: inf_positive[i],
                inf_negative: inf_negative[i],
                nan: nan[i],
                smallest_nonzero: smallest[i],
                largest: if held.is_empty() {
                    0
                } else {
                    amax[tensor].to_bits()
                },
                significand_or: significand_or[i],
                lowest_bit: (lowest_bit[i] != NO_BIT).then_some(lowest_bit[i]),
            };
            let sketch = Sketch::from_parts(held, beside).map_err(|source| TraceError::Sketch {
                path: chunk.path.to_owned(),
                tensor: names[tensor].to_owned(),
                sample,
                source,
            })?;
            sketches.push(sketch);
        }
        samples.push(Sample { row, sketches });
    }
    Ok(samples)
}

/// Encodes a trace, or a part of one, as one chunk; the same trace gives the same bytes.
///
/// # Errors
/// When the format cannot hold it.
pub fn encode(
    trace: &Trace,
    rank: u32,
    chunk: u64,
) -> Result<Vec<u8>, safetensors::SafeTensorError> {
    let (t, n) = (trace.steps.len(), trace.tensors.len());
    let metadata = Metadata {
        schema: SCHEMA.to_owned(),
        run_id: trace.run_id.clone(),
        rank,
        world_size: 1,
        chunk,
        tensors: trace.tensors.clone(),
        values: if trace.scaled {
            Values::Scaled
        } else {
            Values::Unscaled
        },
        facts: trace.facts.clone(),
    };
    let mut held: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    let mut put = |name: String, dtype: Dtype, shape: &[usize], bytes: Vec<u8>| {
        held.push((name, dtype, shape.to_vec(), bytes));
    };
    fn bytes<const W: usize>(numbers: impl Iterator<Item = [u8; W]>) -> Vec<u8> {
        numbers.flatten().collect()
    }
    let steps = &trace.steps;
    put(
        "step".into(),
        Dtype::I64,
        &[t],
        bytes(steps.iter().map(|s| (s.step as i64).to_le_bytes())),
    );
    let or_nan = |value: Option<f64>| value.unwrap_or(f64::NAN).to_le_bytes();
    put(
        "loss_scale".into(),
        Dtype::F64,
        &[t],
        bytes(steps.iter().map(|s| or_nan(s.loss_scale))),
    );
    put(
        "loss".into(),
        Dtype::F64,
        &[t],
        bytes(steps.iter().map(|s| or_nan(s.loss))),
    );
    put(
        "found_inf".into(),
        Dtype::U8,
        &[t],
        steps
            .iter()
            .map(|s| s.found_inf.map_or(255, u8::from))
            .collect(),
    );
    put(
        "amax".into(),
        Dtype::F32,
        &[t, n],
        bytes(trace.amax.iter().map(|a| a.to_le_bytes())),
    );
    put(
        "nonfinite".into(),
        Dtype::U8,
        &[t, n],
        trace.nonfinite.clone(),
    );
    for (prefix, samples) in [("", &trace.samples), ("probe_", &trace.probes)] {
        if samples.is_empty() && !prefix.is_empty() {
            continue;
        }
        let k = samples.len();
        let name = |what: &str| format!("{prefix}{what}");
        let sketches = || samples.iter().flat_map(|s| &s.sketches);
        put(
            name("sampled"),
            Dtype::I64,
            &[k],
            bytes(samples.iter().map(|s| (s.row as i64).to_le_bytes())),
        );
        put(
            name("zeros"),
            Dtype::U64,
            &[k, n],
            bytes(sketches().map(|s| s.zeros.to_le_bytes())),
        );
        put(
            name("inf_positive"),
            Dtype::U64,
            &[k, n],
            bytes(sketches().map(|s| s.inf_positive.to_le_bytes())),
        );
        put(
            name("inf_negative"),
            Dtype::U64,
            &[k, n],
            bytes(sketches().map(|s| s.inf_negative.to_le_bytes())),
        );
        put(
            name("nan"),
            Dtype::U64,
            &[k, n],
            bytes(sketches().map(|s| s.nan.to_le_bytes())),
        );
        put(
            name("smallest_nonzero"),
            Dtype::U32,
            &[k, n],
            bytes(sketches().map(|s| s.smallest_nonzero.to_le_bytes())),
        );
        put(
            name("significand_or"),
            Dtype::U32,
            &[k, n],
            bytes(sketches().map(|s| s.significand_or.to_le_bytes())),
        );
        let lowest = sketches().map(|s| s.lowest_bit.unwrap_or(NO_BIT).to_le_bytes());
        put(name("lowest_bit"), Dtype::I16, &[k, n], bytes(lowest));
        let starts = std::iter::once(0).chain(sketches().scan(0i64, |end, s| {
            *end += s.bins.len() as i64;
            Some(*end)
        }));
        put(
            name("indptr"),
            Dtype::I64,
            &[k * n + 1],
            bytes(starts.map(i64::to_le_bytes)),
        );
        let bins = || sketches().flat_map(|s| &s.bins);
        let stored = bins().count();
        put(
            name("bins"),
            Dtype::U16,
            &[stored],
            bytes(bins().map(|b| b.index.to_le_bytes())),
        );
        put(
            name("counts"),
            Dtype::U64,
            &[stored],
            bytes(bins().map(|b| b.count.to_le_bytes())),
        );
        put(
            name("sums"),
            Dtype::U64,
            &[stored],
            bytes(bins().map(|b| b.sum.to_le_bytes())),
        );
        if !prefix.is_empty() {
            let amax = |s: &Sketch| s.amax().map_or(f32::NAN.to_le_bytes(), f32::to_le_bytes);
            put(
                name("amax"),
                Dtype::F32,
                &[k, n],
                bytes(sketches().map(amax)),
            );
            let flags = |s: &Sketch| u8::from(s.inf() > 0) | u8::from(s.nan > 0) << 1;
            put(
                name("nonfinite"),
                Dtype::U8,
                &[k, n],
                sketches().map(flags).collect(),
            );
        }
    }
    let views = held
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            Ok((
                name.as_str(),
                TensorView::new(*dtype, shape.clone(), bytes)?,
            ))
        })
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    let text = serde_json::to_string(&metadata).expect("strings and numbers always serialise");
    safetensors::serialize(views, Some(HashMap::from([("gradscale".to_owned(), text)])))
}

/// Writes a trace into `directory` as chunks of at most `chunk_steps` steps, each by rename.
///
/// # Errors
/// When the directory cannot be made or written, or already holds a trace.
pub fn write(trace: &Trace, directory: &Path, chunk_steps: usize) -> Result<(), TraceError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| TraceError::Io {
            doing: "writing",
            path,
            source,
        }
    };
    std::fs::create_dir_all(directory).map_err(io(directory))?;
    if is_trace(directory) {
        let source = std::io::Error::new(
            std::io::ErrorKind::AlreadyExists,
            "found a trace there, expected none; remove it or choose another directory",
        );
        return Err(io(directory)(source));
    }
    for (chunk, part) in split(trace, chunk_steps.max(1)).into_iter().enumerate() {
        let path = directory.join(format!("rank0000-{chunk:06}.safetensors"));
        let bytes = encode(&part, 0, chunk as u64).map_err(|e| TraceError::NotAChunk {
            path: path.clone(),
            reason: e.to_string(),
        })?;
        crate::atomic::write(&path, &bytes).map_err(io(&path))?;
    }
    Ok(())
}

/// Cuts a trace into parts of at most `chunk_steps` steps.
fn split(trace: &Trace, chunk_steps: usize) -> Vec<Trace> {
    let n = trace.tensors.len();
    let starts = (0..trace.steps.len().max(1)).step_by(chunk_steps);
    let part = |start: usize| {
        let end = (start + chunk_steps).min(trace.steps.len());
        let within = |samples: &[Sample]| {
            let inside = samples.iter().filter(|s| (start..end).contains(&s.row));
            inside
                .map(|s| Sample {
                    row: s.row - start,
                    sketches: s.sketches.clone(),
                })
                .collect()
        };
        Trace {
            run_id: trace.run_id.clone(),
            facts: trace.facts.clone(),
            tensors: trace.tensors.clone(),
            scaled: trace.scaled,
            steps: trace.steps[start..end].to_vec(),
            amax: trace.amax[start * n..end * n].to_vec(),
            nonfinite: trace.nonfinite[start * n..end * n].to_vec(),
            samples: within(&trace.samples),
            probes: within(&trace.probes),
        }
    };
    starts.map(part).collect()
}
