//! A run of dumps: one file, or the files of a directory by step.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::open::OpenDump;
use super::source::Source;
use super::step_pattern::{PathFacts, shard, usual};
use super::{GradientsError, Kind, Options, safetensors};

/// Directories inside one another that are followed.
const MAX_DEPTH: u32 = 16;

/// One run's dumps. Only paths are known so far, so a directory of 10,000 files costs 10,000 names.
///
/// See the [module](super) for which files of a directory count, and how their steps and ranks are found.
#[derive(Debug)]
pub struct Dump {
    path: PathBuf,
    kind: Kind,
    steps: Vec<StepFiles>,
    left_out: Vec<PathBuf>,
    missing_shards: Vec<PathBuf>,
}

/// The files of one step, by rank and path.
#[derive(Clone, Debug)]
pub struct StepFiles {
    /// The step; `None` where the paths say nothing.
    pub step: Option<u64>,
    /// Its files: ranks, shards and single tensors. Equal names in them are one tensor, whose counts add up.
    pub files: Vec<DumpFile>,
}

/// A file that has not been opened yet.
#[derive(Clone, Debug)]
pub struct DumpFile {
    /// Where it is.
    pub path: PathBuf,
    /// The step in its path. The file itself may state one that its path doesn't: [`OpenDump::step`].
    pub step: Option<u64>,
    /// The rank in its path.
    pub rank: Option<u32>,
    /// Number and count of a shard, `model-00001-of-00006`.
    pub shard: Option<(u32, u32)>,
    /// The name of an array that has none of its own: the file's stem, or the pattern's `{tensor}`.
    name: String,
}

impl DumpFile {
    /// Reads the file's header.
    ///
    /// # Errors
    ///
    /// Whatever is wrong with the file; it names the file, and the tensor and the byte offset where there are any.
    pub fn open(&self, options: &Options) -> Result<OpenDump, GradientsError> {
        OpenDump::open(&self.path, &self.name, options)
    }

    fn new(path: PathBuf, facts: PathFacts) -> DumpFile {
        let stem = path
            .file_stem()
            .map(|stem| stem.to_string_lossy().into_owned())
            .unwrap_or_default();
        let shard = shard(&stem).map(|(_, index, count)| (index, count));
        DumpFile {
            path,
            step: facts.step,
            rank: facts.rank,
            shard,
            name: facts.tensor.unwrap_or(stem),
        }
    }
}

impl Dump {
    /// Finds the files of `path`: a file, a directory, or the `.safetensors.index.json` of a sharded checkpoint.
    ///
    /// # Errors
    ///
    /// A path that cannot be read, a directory without dumps, one that is a trace, one where nothing fits the step
    /// pattern. Files are not opened here.
    pub fn open(path: impl AsRef<Path>, options: &Options) -> Result<Dump, GradientsError> {
        let path = path.as_ref();
        let meta = fs::metadata(path).map_err(|source| io("opening", path, source))?;
        if meta.is_dir() {
            return Dump::open_directory(path, options);
        }
        if !meta.is_file() {
            return Err(GradientsError::NotAFile {
                path: path.to_path_buf(),
            });
        }
        if is_index(path) {
            return Dump::open_index(path, options);
        }
        let name = path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        let facts = match options.step_pattern() {
            // A single file is read whether or not the pattern fits: it was named itself.
            Some(pattern) => pattern
                .facts(&slashed(path))
                .or_else(|| pattern.facts(&name))
                .unwrap_or_default(),
            None => usual(&name, None),
        };
        let kind = match Kind::of_extension(path) {
            Some(kind) => kind,
            None => OpenDump::open(path, &name, options)?.kind(),
        };
        let files = vec![DumpFile::new(path.to_path_buf(), facts)];
        let steps = vec![StepFiles {
            step: files[0].step,
            files,
        }];
        Ok(Dump {
            path: path.to_path_buf(),
            kind,
            steps,
            left_out: Vec::new(),
            missing_shards: Vec::new(),
        })
    }

    fn open_directory(path: &Path, options: &Options) -> Result<Dump, GradientsError> {
        if looks_like_trace(path) {
            return Err(GradientsError::TraceDirectory {
                path: path.to_path_buf(),
            });
        }
        let mut listing = Listing::default();
        listing.walk(path)?;
        if listing.dumps.is_empty() {
            return Err(GradientsError::EmptyDirectory {
                path: path.to_path_buf(),
                found: listing.others,
            });
        }
        listing.dumps.sort();
        let missing_shards = missing_shards(&listing)?;
        let root = path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned());
        let mut steps: BTreeMap<Option<u64>, Vec<DumpFile>> = BTreeMap::new();
        let mut left_out = Vec::new();
        for file in listing.dumps {
            let below = slashed(file.strip_prefix(path).unwrap_or(&file));
            let facts = match options.step_pattern() {
                Some(pattern) => pattern.facts(&below),
                None => Some(usual(&below, root.as_deref())),
            };
            match facts {
                Some(facts) => {
                    let file = DumpFile::new(file, facts);
                    steps.entry(file.step).or_default().push(file);
                }
                None => left_out.push(file),
            }
        }
        if steps.is_empty()
            && let (Some(pattern), Some(example)) = (options.step_pattern(), left_out.first())
        {
            return Err(GradientsError::NothingFitsPattern {
                path: path.to_path_buf(),
                pattern: pattern.text().to_string(),
                found: left_out.len() as u64,
                example: example.clone(),
            });
        }
        let steps = steps
            .into_iter()
            .map(|(step, mut files)| {
                files.sort_by(|a, b| (a.rank, &a.path).cmp(&(b.rank, &b.path)));
                StepFiles { step, files }
            })
            .collect();
        Ok(Dump {
            path: path.to_path_buf(),
            kind: Kind::Directory,
            steps,
            left_out,
            missing_shards,
        })
    }

    fn open_index(path: &Path, options: &Options) -> Result<Dump, GradientsError> {
        let folder = path.parent().unwrap_or(Path::new(""));
        let mut files = Vec::new();
        let mut missing_shards = Vec::new();
        for name in index_files(path)? {
            let file = folder.join(&name);
            if file.is_file() {
                let facts = options
                    .step_pattern()
                    .map_or_else(|| Some(usual(&name, None)), |p| p.facts(&name));
                files.push(DumpFile::new(file, facts.unwrap_or_default()));
            } else {
                missing_shards.push(file);
            }
        }
        let Some(step) = files.first().map(|file| file.step) else {
            return Err(GradientsError::EmptyDirectory {
                path: path.to_path_buf(),
                found: 0,
            });
        };
        let steps = vec![StepFiles { step, files }];
        Ok(Dump {
            path: path.to_path_buf(),
            kind: Kind::Safetensors,
            steps,
            left_out: Vec::new(),
            missing_shards,
        })
    }

    /// The path that was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A file's format, or [`Kind::Directory`].
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The files by step, ascending; those without a step come first. Never empty.
    pub fn steps(&self) -> &[StepFiles] {
        &self.steps
    }

    /// Dumps that the step pattern does not fit: worth a warning.
    pub fn left_out(&self) -> &[PathBuf] {
        &self.left_out
    }

    /// Shards that an index or another shard's name promises and that are not there: worth a warning.
    pub fn missing_shards(&self) -> &[PathBuf] {
        &self.missing_shards
    }
}

/// Whether `path` is a trace that gradscale recorded: a directory of chunks such as `rank0000-000000.safetensors` that
/// carry the metadata key `gradscale`, or one such chunk.
///
/// A directory that holds only chunks which cannot be read, or unfinished ones (`.tmp`), is a trace too: the reader of
/// traces can say what is wrong with it. Never fails; what cannot be read at all is not a trace.
pub fn looks_like_trace(path: impl AsRef<Path>) -> bool {
    let path = path.as_ref();
    if path.is_file() {
        return is_chunk(path) == Some(true);
    }
    let Ok(entries) = fs::read_dir(path) else {
        return false;
    };
    let mut chunks: Vec<PathBuf> = Vec::new();
    let mut unfinished = false;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        match chunk_name(name) {
            Some(".safetensors") => chunks.push(entry.path()),
            Some(".safetensors.tmp") => unfinished = true,
            _ => {}
        }
    }
    if chunks.is_empty() {
        return unfinished;
    }
    chunks.sort();
    // The first chunks that can be read decide; a trace may begin with torn ones.
    let mut readable = chunks
        .iter()
        .take(16)
        .filter_map(|chunk| is_chunk(chunk))
        .peekable();
    readable.peek().is_none() || readable.any(|is| is)
}

/// What follows `rank0000-000000` in a name, `None` where it does not begin so.
fn chunk_name(name: &str) -> Option<&str> {
    let rest = name.strip_prefix("rank")?;
    let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
    let rank = digits(rest);
    let rest = rest.get(rank..)?.strip_prefix('-')?;
    let chunk = digits(rest);
    (rank >= 4 && chunk >= 6).then(|| &rest[chunk..])
}

/// `None` where the header cannot be read.
fn is_chunk(path: &Path) -> Option<bool> {
    if Kind::of_extension(path) != Some(Kind::Safetensors) {
        return Some(false);
    }
    let source = Source::open(path, false).ok()?;
    safetensors::header(&source)
        .ok()
        .map(|header| header.metadata.contains_key("gradscale"))
}

#[derive(Default)]
struct Listing {
    dumps: Vec<PathBuf>,
    indexes: Vec<PathBuf>,
    others: u64,
}

impl Listing {
    /// Walks without recursion; a directory that links lead to twice is entered once, so a loop of links ends.
    fn walk(&mut self, root: &Path) -> Result<(), GradientsError> {
        let mut entered: HashSet<PathBuf> = HashSet::new();
        let mut waiting = vec![(root.to_path_buf(), 0u32)];
        while let Some((folder, depth)) = waiting.pop() {
            if depth > MAX_DEPTH {
                return Err(GradientsError::TooDeep {
                    path: folder,
                    limit: MAX_DEPTH,
                });
            }
            let real =
                fs::canonicalize(&folder).map_err(|source| io("listing", &folder, source))?;
            if !entered.insert(real) {
                continue;
            }
            for entry in fs::read_dir(&folder).map_err(|source| io("listing", &folder, source))? {
                let entry = entry.map_err(|source| io("listing", &folder, source))?;
                let name = entry.file_name();
                if name.to_string_lossy().starts_with('.') {
                    continue;
                }
                let path = entry.path();
                let mut kind = entry
                    .file_type()
                    .map_err(|source| io("listing", &path, source))?;
                if kind.is_symlink() {
                    match fs::metadata(&path) {
                        Ok(meta) => kind = meta.file_type(),
                        // A link to nowhere that is named as a dump is a dump that cannot be read.
                        Err(source) if Kind::of_extension(&path).is_some() => {
                            return Err(io("opening", &path, source));
                        }
                        Err(_) => continue,
                    }
                }
                if kind.is_dir() {
                    waiting.push((path, depth + 1));
                } else if !kind.is_file() {
                    self.others += 1;
                } else if Kind::of_extension(&path).is_some() {
                    self.dumps.push(path);
                } else if is_index(&path) {
                    self.indexes.push(path);
                } else {
                    self.others += 1;
                }
            }
        }
        Ok(())
    }
}

/// Shards that are promised and not there, by index files and by names such as `model-00001-of-00006`.
fn missing_shards(listing: &Listing) -> Result<Vec<PathBuf>, GradientsError> {
    let there: HashSet<&Path> = listing.dumps.iter().map(PathBuf::as_path).collect();
    let mut missing = BTreeSet::new();
    for index in &listing.indexes {
        let folder = index.parent().unwrap_or(Path::new(""));
        missing.extend(
            index_files(index)?
                .iter()
                .map(|name| folder.join(name))
                .filter(|p| !there.contains(p.as_path())),
        );
    }
    // One family of shards has its folder, name and count in common.
    struct Family {
        have: BTreeSet<u32>,
        width: usize,
        extension: String,
    }
    let mut families: BTreeMap<(PathBuf, String, u32), Family> = BTreeMap::new();
    for path in &listing.dumps {
        let (Some(stem), Some(extension)) =
            (path.file_stem().and_then(|s| s.to_str()), path.extension())
        else {
            continue;
        };
        let Some((name, index, count)) = shard(stem) else {
            continue;
        };
        let folder = path.parent().unwrap_or(Path::new("")).to_path_buf();
        let width = stem.rsplit_once("-of-").map_or(0, |(_, count)| count.len());
        let family = families
            .entry((folder, name.to_string(), count))
            .or_insert_with(|| Family {
                have: BTreeSet::new(),
                width,
                extension: extension.to_string_lossy().into_owned(),
            });
        family.have.insert(index);
    }
    for (
        (folder, name, count),
        Family {
            have,
            width,
            extension,
        },
    ) in families
    {
        // Some count from 0. No more are named than there are files, lest a name of 4 billion shards fill memory.
        let first = u32::from(!have.contains(&0));
        let last = count - 1 + first;
        let absent = (first..=last).filter(|i| !have.contains(i)).take(1000);
        missing
            .extend(absent.map(|i| {
                folder.join(format!("{name}-{i:0width$}-of-{count:0width$}.{extension}"))
            }));
    }
    Ok(missing.into_iter().collect())
}

fn is_index(path: &Path) -> bool {
    path.file_name()
        .is_some_and(|name| name.to_string_lossy().ends_with(".safetensors.index.json"))
}

/// The shard files an index names; plain names only, so that an index cannot lead elsewhere.
fn index_files(path: &Path) -> Result<BTreeSet<String>, GradientsError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    const MAX_INDEX_BYTES: u64 = 100_000_000;
    let source = Source::open(path, false)?;
    if source.len > MAX_INDEX_BYTES {
        return Err(GradientsError::HeaderTooLong {
            path: source.path,
            kind: Kind::Safetensors,
            offset: 0,
            found: source.len,
            limit: MAX_INDEX_BYTES,
        });
    }
    let mut json = vec![0u8; source.len as usize];
    source.read_exact_at(0, &mut json, None)?;
    let index: Index = serde_json::from_slice(&json).map_err(|e| {
        let found = super::error::shortened(&e.to_string());
        source.bad(
            Kind::Safetensors,
            e.column() as u64,
            found,
            "an index with a weight_map",
        )
    })?;
    let files: BTreeSet<String> = index.weight_map.into_values().collect();
    match files
        .iter()
        .find(|name| name.contains(['/', '\\']) || name.is_empty() || *name == "..")
    {
        Some(name) => Err(source.bad(
            Kind::Safetensors,
            0,
            format!("the shard {name:?}"),
            "the name of a file beside it",
        )),
        None => Ok(files),
    }
}

fn io(doing: &'static str, path: &Path, source: std::io::Error) -> GradientsError {
    GradientsError::Io {
        doing,
        path: path.to_path_buf(),
        source,
    }
}

/// A path with `/` between its parts on every system.
fn slashed(path: &Path) -> String {
    let parts: Vec<_> = path
        .components()
        .map(|part| part.as_os_str().to_string_lossy())
        .collect();
    parts.join("/")
}
