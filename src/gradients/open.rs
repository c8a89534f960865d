//! One open file: what it holds, and its elements.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::Path;

use super::archive::{Member, Method, Unpacked};
use super::error::escaped;
use super::source::{Bytes, Region, Source, decode};
use super::tensor::{Chunk, Encoding, Skipped, SkippedBecause, TensorMeta};
use super::view::{View, ViewBytes};
use super::{DumpScale, GradientsError, Kind, Options, npy, npz, pt, safetensors};

/// A dump file with its header read and checked; elements are read when asked for.
///
/// Several threads may read different tensors at once, or ranges of one ([`read_range`](OpenDump::read_range)).
#[derive(Debug)]
pub struct OpenDump {
    source: Source,
    kind: Kind,
    tensors: Vec<TensorMeta>,
    layouts: Vec<Layout>,
    skipped: Vec<Skipped>,
    loss_scale: Option<f64>,
    step: Option<u64>,
    rank: Option<u32>,
    dump_scale: DumpScale,
}

/// Where a tensor's elements are.
#[derive(Debug)]
enum Layout {
    /// One run of bytes in the file.
    Run { offset: u64, encoding: Encoding },
    /// A view of a storage whose first element is at `offset`.
    View {
        offset: u64,
        encoding: Encoding,
        view: View,
    },
    /// A member of an archive that has a checksum, and the length of its `.npy` header.
    Member {
        member: Member,
        header_len: u64,
        encoding: Encoding,
    },
}

/// Everything a reader found, before names are selected.
#[derive(Default)]
struct Found {
    tensors: Vec<(TensorMeta, Layout)>,
    skipped: Vec<Skipped>,
    loss_scale: Option<f64>,
    step: Option<u64>,
    rank: Option<u32>,
}

impl OpenDump {
    /// Opens a file: by its extension, or by its first bytes where the extension says nothing.
    ///
    /// `name` is the name of an array that has none of its own (an `.npy`; a lone tensor in a `.pt`).
    ///
    /// # Errors
    ///
    /// Whatever is wrong with the file; a file without any tensor; a name twice. A file that holds only integers and
    /// booleans is fine: [`tensors`](OpenDump::tensors) is empty and [`skipped`](OpenDump::skipped) says why.
    pub(crate) fn open(
        path: &Path,
        name: &str,
        options: &Options,
    ) -> Result<OpenDump, GradientsError> {
        let source = Source::open(path, options.mmap())?;
        let kind = match Kind::of_extension(path) {
            Some(kind) => kind,
            None => sniff(&source)?,
        };
        let selects = |name: &str| options.selects(name);
        let found = match kind {
            Kind::Npy => open_npy(&source, name, &selects)?,
            Kind::Npz => open_npz(&source, &selects)?,
            Kind::Safetensors => open_safetensors(&source)?,
            Kind::Pt => open_pt(&source, name, &selects)?,
            Kind::Directory => return Err(GradientsError::NoTensor { path: source.path }),
        };
        if found.tensors.is_empty()
            && found
                .skipped
                .iter()
                .all(|s| s.why == SkippedBecause::Trailing)
        {
            return Err(GradientsError::NoTensor { path: source.path });
        }
        // Integers alone are left out with a note; complex numbers or records alone are a mistake worth an error.
        if found.tensors.is_empty()
            && found
                .skipped
                .iter()
                .all(|s| s.why != SkippedBecause::Integer)
        {
            return Err(GradientsError::NoFloatTensor {
                path: source.path,
                found: kinds(&found.skipped),
            });
        }
        let mut names = HashSet::new();
        let all = found.tensors.iter().map(|(meta, _)| &meta.name);
        let others = found
            .skipped
            .iter()
            .filter(|s| s.why != SkippedBecause::Trailing)
            .map(|s| &s.name);
        for name in all.chain(others) {
            if !names.insert(name) {
                let tensor = name.clone();
                return Err(GradientsError::DuplicateName {
                    path: source.path,
                    tensor,
                });
            }
        }
        let (tensors, layouts) = found
            .tensors
            .into_iter()
            .filter(|(meta, _)| selects(&meta.name))
            .unzip();
        let skipped = found
            .skipped
            .into_iter()
            .filter(|s| selects(&s.name))
            .collect();
        let Found {
            loss_scale,
            step,
            rank,
            ..
        } = Found {
            tensors: Vec::new(),
            skipped: Vec::new(),
            ..found
        };
        Ok(OpenDump {
            source,
            kind,
            tensors,
            layouts,
            skipped,
            loss_scale,
            step,
            rank,
            dump_scale: options.dump_scale(),
        })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.source.path
    }

    /// The file's format.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The float tensors that the options select, in the file's order.
    pub fn tensors(&self) -> &[TensorMeta] {
        &self.tensors
    }

    /// What the options select and is not read: integers, booleans, complex numbers, text, …
    pub fn skipped(&self) -> &[Skipped] {
        &self.skipped
    }

    /// The loss scale the file itself states: metadata `loss_scale` of a `.safetensors`, or a GradScaler's state in a
    /// `.pt`.
    pub fn loss_scale(&self) -> Option<f64> {
        self.loss_scale
    }

    /// The step the file itself states (metadata `step`).
    pub fn step(&self) -> Option<u64> {
        self.step
    }

    /// The rank the file itself states (metadata `rank`).
    pub fn rank(&self) -> Option<u32> {
        self.rank
    }

    /// The loss scale that the values are multiplied by and that the caller divides out, by the options.
    ///
    /// # Errors
    ///
    /// [`DumpScale::Auto`] and a file that states no loss scale.
    pub fn dump_scale(&self) -> Result<Option<f64>, GradientsError> {
        match self.dump_scale {
            DumpScale::None => Ok(None),
            DumpScale::Value(scale) => Ok(Some(scale)),
            DumpScale::Auto => match self.loss_scale {
                Some(scale) => Ok(Some(scale)),
                None => Err(GradientsError::NoLossScale {
                    path: self.source.path.clone(),
                }),
            },
        }
    }

    /// Whether [`read_range`](OpenDump::read_range) of this tensor begins where it is told without reading what is
    /// before: not so for a deflated member.
    pub fn splittable(&self, tensor: usize) -> bool {
        match self.layouts.get(tensor) {
            Some(Layout::Run { .. } | Layout::View { .. }) => true,
            Some(Layout::Member { member, .. }) => member.method == Method::Stored,
            None => false,
        }
    }

    /// Hands all elements of a tensor to `visit` in bounded chunks.
    ///
    /// A checksum, where the format has one, is verified at the end.
    ///
    /// # Errors
    ///
    /// A file that was shortened meanwhile, a damaged member, an index beyond [`tensors`](OpenDump::tensors). `visit`
    /// may have seen elements by then.
    pub fn read(
        &self,
        tensor: usize,
        visit: &mut dyn FnMut(Chunk<'_>),
    ) -> Result<(), GradientsError> {
        let Some((meta, layout)) = self.tensors.get(tensor).zip(self.layouts.get(tensor)) else {
            return Err(self.out_of_range(tensor, 0..0));
        };
        match layout {
            Layout::Run { .. } | Layout::View { .. } => {
                self.read_range(tensor, 0..meta.elements, visit)
            }
            Layout::Member {
                member,
                header_len,
                encoding,
            } => {
                let mut bytes = Unpacked::new(&self.source, self.kind, member)?;
                bytes.skip(*header_len)?;
                decode(&mut bytes, *encoding, meta.elements, visit)?;
                bytes.finish()
            }
        }
    }

    /// Hands a range of a tensor's elements to `visit`, counted as they lie in the file, so that several threads can
    /// share a large tensor. The ranges of a partition hand out each element once. No checksum is verified.
    ///
    /// # Errors
    ///
    /// As [`read`](OpenDump::read), and a range beyond the elements.
    pub fn read_range(
        &self,
        tensor: usize,
        elements: Range<u64>,
        visit: &mut dyn FnMut(Chunk<'_>),
    ) -> Result<(), GradientsError> {
        let Some((meta, layout)) = self.tensors.get(tensor).zip(self.layouts.get(tensor)) else {
            return Err(self.out_of_range(tensor, elements));
        };
        if elements.start > elements.end || elements.end > meta.elements {
            return Err(self.out_of_range(tensor, elements));
        }
        let count = elements.end - elements.start;
        let run = |offset: u64, encoding: Encoding, visit: &mut dyn FnMut(Chunk<'_>)| {
            // Offsets and sizes were checked against the file's length when it was opened.
            let size = encoding.dtype.size_bytes();
            let position = offset + elements.start * size;
            let end = position + count * size;
            let mut region = Region {
                source: &self.source,
                position,
                end,
                tensor: Some(&meta.name),
            };
            decode(&mut region, encoding, count, visit)
        };
        match layout {
            Layout::Run { offset, encoding } => run(*offset, *encoding, visit),
            Layout::View {
                offset,
                encoding,
                view,
            } => {
                let size = encoding.dtype.size_bytes();
                let first = elements.start;
                let mut bytes =
                    ViewBytes::new(&self.source, view, &meta.name, size, *offset, first);
                decode(&mut bytes, *encoding, count, visit)
            }
            Layout::Member {
                member,
                header_len,
                encoding,
            } if member.method == Method::Stored => run(
                member.data_offset(&self.source, self.kind)? + header_len,
                *encoding,
                visit,
            ),
            Layout::Member {
                member,
                header_len,
                encoding,
            } => {
                let mut bytes = Unpacked::new(&self.source, self.kind, member)?;
                bytes.skip(header_len + elements.start * encoding.dtype.size_bytes())?;
                decode(&mut bytes as &mut dyn Bytes, *encoding, count, visit)
            }
        }
    }

    fn out_of_range(&self, tensor: usize, found: Range<u64>) -> GradientsError {
        let expected = self.tensors.get(tensor).map_or(0, |meta| meta.elements);
        GradientsError::OutOfRange {
            path: self.source.path.clone(),
            tensor,
            found,
            expected,
        }
    }
}

fn open_npy(
    source: &Source,
    name: &str,
    selects: &dyn Fn(&str) -> bool,
) -> Result<Found, GradientsError> {
    let (array, trailing) = npy::open(source, name, selects(name))?;
    let mut found = Found::default();
    match array {
        npy::Array::Float {
            encoding,
            shape,
            elements,
            data_offset: offset,
        } => {
            let meta = TensorMeta {
                name: name.to_string(),
                dtype: encoding.dtype,
                shape,
                elements,
            };
            found.tensors.push((meta, Layout::Run { offset, encoding }));
        }
        npy::Array::Skipped(skipped) => found.skipped.push(skipped),
    }
    found.skipped.extend(trailing);
    Ok(found)
}

fn open_npz(source: &Source, selects: &dyn Fn(&str) -> bool) -> Result<Found, GradientsError> {
    let (arrays, skipped) = npz::open(source, selects)?;
    let tensors = arrays.into_iter().map(|array| {
        let npz::Array {
            name,
            encoding,
            shape,
            elements,
            member,
            header_len,
        } = array;
        (
            TensorMeta {
                name,
                dtype: encoding.dtype,
                shape,
                elements,
            },
            Layout::Member {
                member,
                header_len,
                encoding,
            },
        )
    });
    Ok(Found {
        tensors: tensors.collect(),
        skipped,
        ..Found::default()
    })
}

fn open_pt(
    source: &Source,
    name: &str,
    selects: &dyn Fn(&str) -> bool,
) -> Result<Found, GradientsError> {
    let pt::Found {
        tensors,
        skipped,
        loss_scale,
        step,
    } = pt::open(source, name, selects)?;
    let tensors = tensors.into_iter().map(
        |pt::Array {
             meta,
             encoding,
             offset,
             view,
         }| {
            let layout = if view.is_run() {
                Layout::Run { offset, encoding }
            } else {
                Layout::View {
                    offset,
                    encoding,
                    view,
                }
            };
            (meta, layout)
        },
    );
    Ok(Found {
        tensors: tensors.collect(),
        skipped,
        loss_scale,
        step,
        rank: None,
    })
}

fn open_safetensors(source: &Source) -> Result<Found, GradientsError> {
    let header = safetensors::header(source)?;
    if header.metadata.contains_key("gradscale") {
        return Err(GradientsError::TraceDirectory {
            path: source.path.clone(),
        });
    }
    let tensors = header.tensors.into_iter().map(|t| {
        let layout = Layout::Run {
            offset: t.offset,
            encoding: Encoding::little(t.dtype),
        };
        (
            TensorMeta {
                name: t.name,
                dtype: t.dtype,
                shape: t.shape,
                elements: t.elements,
            },
            layout,
        )
    });
    let text = |key: &str| header.metadata.get(key).map(|value| value.trim());
    Ok(Found {
        tensors: tensors.collect(),
        skipped: header.skipped,
        loss_scale: text("loss_scale")
            .and_then(|s| s.parse().ok())
            .filter(|s| plausible_scale(*s)),
        step: text("step").and_then(|s| s.parse().ok()),
        rank: text("rank").and_then(|s| s.parse().ok()),
    })
}

/// Only then can it be divided out.
fn plausible_scale(scale: f64) -> bool {
    scale.is_finite() && scale > 0.0
}

/// `2 of <c16, 1 of |S3`, by first appearance, at most four kinds.
fn kinds(skipped: &[Skipped]) -> String {
    let mut counts: Vec<(&str, u64)> = Vec::new();
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for s in skipped {
        let at = *seen.entry(&s.dtype).or_insert_with(|| {
            counts.push((&s.dtype, 0));
            counts.len() - 1
        });
        counts[at].1 += 1;
    }
    let mut text: Vec<String> = counts
        .iter()
        .take(4)
        .map(|(dtype, n)| format!("{n} of {dtype}"))
        .collect();
    if counts.len() > 4 {
        text.push("others".to_string());
    }
    text.join(", ")
}

/// The format by the first bytes.
fn sniff(source: &Source) -> Result<Kind, GradientsError> {
    let head = source.head::<16>()?;
    if head.starts_with(b"\x93NUMPY") {
        return Ok(Kind::Npy);
    }
    if head.starts_with(b"PK\x03\x04") || head.starts_with(b"PK\x05\x06") {
        let is_pt = super::archive::directory(source, Kind::Npz)?
            .iter()
            .any(|member| member.name == "data.pkl" || member.name.ends_with("/data.pkl"));
        return Ok(if is_pt { Kind::Pt } else { Kind::Npz });
    }
    if let [0x80, 2..=5, ..] = head[..] {
        return Ok(Kind::Pt);
    }
    if head.len() > 8 && head[8] == b'{' {
        return Ok(Kind::Safetensors);
    }
    Err(GradientsError::UnknownKind {
        path: source.path.clone(),
        found: escaped(&head),
    })
}
