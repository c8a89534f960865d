//! What can be wrong with a dump, as facts.

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;

use super::Kind;

/// Why a dump could not be read.
///
/// Every variant carries what was found and what was expected; offsets are bytes from the start of the file (of the
/// uncompressed member, where the text says so).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GradientsError {
    /// The operating system refused.
    #[error(
        "{doing} {path:?}: found \"{source}\", expected a readable file or directory; check the path and its permissions"
    )]
    Io {
        /// What was being done: `opening`, `reading`, `listing`.
        doing: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The GPU that counted failed.
    #[error("counting {path:?}, tensor \"{tensor}\": {reason}")]
    Device {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What failed, and what to do.
        reason: String,
    },
    /// Neither a file nor a directory (a socket, a device, a pipe).
    #[error(
        "opening {path:?}: found something that is neither a file nor a directory, expected a dump; copy it into a file first"
    )]
    NotAFile {
        /// Where it is.
        path: PathBuf,
    },
    /// A file of no bytes.
    #[error(
        "reading {path:?}: found an empty file (0 bytes), expected a dump; was the program that wrote it killed?"
    )]
    EmptyFile {
        /// The file.
        path: PathBuf,
    },
    /// A text file that stands for a file kept by Git LFS.
    #[error(
        "reading {path:?}: found a Git LFS pointer, expected the file it stands for; run `git lfs pull`"
    )]
    GitLfsPointer {
        /// The file.
        path: PathBuf,
    },
    /// The name says nothing and the first bytes belong to no format that is read.
    #[error(
        "reading {path:?}: found a file that begins with \"{found}\", expected .npy, .npz, .safetensors, .pt or .pth"
    )]
    UnknownKind {
        /// The file.
        path: PathBuf,
        /// Its first bytes as escaped text.
        found: String,
    },
    /// A directory without a dump in it.
    #[error(
        "listing {path:?}: found no dump among {found} files, expected .npy, .npz, .safetensors, .pt or .pth; give the directory that holds them"
    )]
    EmptyDirectory {
        /// The directory.
        path: PathBuf,
        /// How many other files it holds.
        found: u64,
    },
    /// No file of the directory fits the step pattern.
    #[error(
        "listing {path:?} by --step-pattern {pattern:?}: found {found} dumps that do not fit it, such as {example:?}, expected at least one that does"
    )]
    NothingFitsPattern {
        /// The directory.
        path: PathBuf,
        /// The pattern.
        pattern: String,
        /// How many files did not fit.
        found: u64,
        /// One of them.
        example: PathBuf,
    },
    /// A directory that gradscale recorded itself.
    #[error(
        "opening {path:?} as a dump: found gradscale's own trace chunks, expected gradients; a trace is read as a trace"
    )]
    TraceDirectory {
        /// The directory or chunk.
        path: PathBuf,
    },
    /// More directories inside one another than are followed.
    #[error(
        "listing {path:?}: found more than {limit} directories inside one another, expected a shallower tree; give the directory that holds the dumps"
    )]
    TooDeep {
        /// Where it stopped.
        path: PathBuf,
        /// The depth that is still followed.
        limit: u32,
    },
    /// A step pattern that says nothing or contradicts itself.
    #[error(
        "parsing --step-pattern {pattern:?}: found {found}, expected text with {{step}}, such as \"it{{step}}/rank{{rank}}_*\""
    )]
    StepPattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        found: String,
    },
    /// A glob that does not parse.
    #[error(
        "parsing the glob {glob:?}: found {found}, expected a pattern such as \"layer*.weight\""
    )]
    Glob {
        /// The glob.
        glob: String,
        /// What is wrong with it.
        found: String,
    },
    /// `--dump-scale` that is not a scale.
    #[error("parsing --dump-scale: found {found:?}, expected a positive finite number or auto")]
    DumpScale {
        /// What was given.
        found: String,
    },
    /// `--dump-scale auto` and a file that does not say.
    #[error(
        "reading {path:?} with --dump-scale auto: found no loss_scale in its metadata and no `scaler` entry, expected one; give the number itself"
    )]
    NoLossScale {
        /// The file.
        path: PathBuf,
    },
    /// The file does not begin as its format does.
    #[error(
        "reading {path:?} as {kind}, byte {offset}: found \"{found}\", expected {expected}; is it another format under this name?"
    )]
    Magic {
        /// The file.
        path: PathBuf,
        /// The format its name claims.
        kind: Kind,
        /// Where.
        offset: u64,
        /// The bytes there as escaped text.
        found: String,
        /// What belongs there.
        expected: &'static str,
    },
    /// A header that claims a length nobody needs.
    #[error(
        "reading {path:?} as {kind}, byte {offset}: found a header of {found} bytes, expected at most {limit}; the file is damaged or not a dump"
    )]
    HeaderTooLong {
        /// The file.
        path: PathBuf,
        /// Its format.
        kind: Kind,
        /// Where the length stands.
        offset: u64,
        /// The length.
        found: u64,
        /// What is read at most.
        limit: u64,
    },
    /// A header that does not follow its format.
    #[error(
        "reading {path:?} as {kind}{}, byte {offset}: found {found}, expected {expected}; the file is damaged or was not written by its format's own library",
        of(tensor)
    )]
    Header {
        /// The file.
        path: PathBuf,
        /// Its format.
        kind: Kind,
        /// The tensor or member, where one is known.
        tensor: Option<String>,
        /// Where.
        offset: u64,
        /// What stands there.
        found: String,
        /// What belongs there.
        expected: Cow<'static, str>,
    },
    /// The file ends before its data does.
    #[error(
        "reading {path:?}{}, byte {offset}: found {found} bytes, expected {expected}; the file was cut short, copy or write it again",
        of(tensor)
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The tensor, where one is known.
        tensor: Option<String>,
        /// Where the data begins.
        offset: u64,
        /// How many bytes are there.
        found: u64,
        /// How many the header promises.
        expected: u64,
    },
    /// A tensor whose header and data disagree about its size.
    #[error(
        "reading {path:?}, tensor {tensor:?}, byte {offset}: found {found} bytes, expected {expected} for its shape; the file is damaged"
    )]
    SizeMismatch {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where its data begins.
        offset: u64,
        /// Bytes of data.
        found: u64,
        /// Bytes that shape and dtype need.
        expected: u64,
    },
    /// A shape with more elements than 64 bits can count.
    #[error(
        "reading {path:?}, tensor {tensor:?}: found the shape {shape:?}, expected fewer than 2^63 bytes; the file is damaged"
    )]
    ShapeOverflow {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape.
        shape: Vec<u64>,
    },
    /// Tensors of a `.safetensors` that overlap or leave a hole.
    #[error(
        "reading {path:?}, tensor {tensor:?}: found data at {found:?} of the buffer, expected it to begin at {expected}, where the tensor before it ends; the file is damaged"
    )]
    Offsets {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its begin and end in the data buffer.
        found: (u64, u64),
        /// Where it must begin.
        expected: u64,
    },
    /// One name twice in a file.
    #[error(
        "reading {path:?}: found the name {tensor:?} twice, expected it once; a dump with two tensors of one name can't say which is meant"
    )]
    DuplicateName {
        /// The file.
        path: PathBuf,
        /// The name.
        tensor: String,
    },
    /// An object array, which is a pickle in disguise.
    #[error(
        "reading {path:?}, tensor {tensor:?}: found an object array, expected numbers; a pickle is never run here: save it as floats, or leave it out with --exclude"
    )]
    ObjectArray {
        /// The file.
        path: PathBuf,
        /// The array.
        tensor: String,
    },
    /// Nothing in the file is a tensor.
    #[error("reading {path:?}: found no tensor in it, expected at least one")]
    NoTensor {
        /// The file.
        path: PathBuf,
    },
    /// Only things that are neither floats nor integers.
    #[error(
        "reading {path:?}: found no float tensor but {found}, expected f16, bf16, f32, f64 or fp8; convert it before saving"
    )]
    NoFloatTensor {
        /// The file.
        path: PathBuf,
        /// What there is, by dtype.
        found: String,
    },
    /// A member of an archive that is encrypted, packed by a method that is not read, or spread over disks.
    #[error(
        "reading {path:?}, member {member:?}, byte {offset}: found {found}, expected a member that is {expected}; save it again with numpy or torch"
    )]
    Member {
        /// The archive.
        path: PathBuf,
        /// The member.
        member: String,
        /// Where it begins.
        offset: u64,
        /// How it is packed.
        found: String,
        /// What is read.
        expected: &'static str,
    },
    /// Members of an archive that share bytes, as only a zip bomb's do.
    #[error(
        "reading {path:?}, member {member:?}, byte {offset}: found {found} bytes of it before the next begins, expected {expected}; overlapping members are a zip bomb's"
    )]
    MembersOverlap {
        /// The archive.
        path: PathBuf,
        /// The member.
        member: String,
        /// Where it begins.
        offset: u64,
        /// How many bytes there are before the next thing.
        found: u64,
        /// How many it claims.
        expected: u64,
    },
    /// A member that does not unpack.
    #[error(
        "inflating {path:?}, member {member:?}, byte {offset} of its data: found {found}, expected {expected}; the archive is damaged"
    )]
    Inflate {
        /// The archive.
        path: PathBuf,
        /// The member.
        member: String,
        /// How many bytes had come out by then.
        offset: u64,
        /// What went wrong.
        found: String,
        /// What belongs there.
        expected: Cow<'static, str>,
    },
    /// A member whose bytes are not those that were written.
    #[error(
        "reading {path:?}, member {member:?}: found the CRC-32 {found:#010x}, expected {expected:#010x}; the archive is damaged"
    )]
    Checksum {
        /// The archive.
        path: PathBuf,
        /// The member.
        member: String,
        /// The checksum of what was read.
        found: u32,
        /// The checksum in the directory.
        expected: u32,
    },
    /// A pickle that names something that is neither a tensor nor a plain container.
    #[error(
        "reading {path:?} as pt, byte {offset}: found the global {global:?}, expected only what torch.save writes for tensors in dicts and lists; a pickle is never run here: save the state_dict instead"
    )]
    ForbiddenGlobal {
        /// The file.
        path: PathBuf,
        /// Where it is named.
        offset: u64,
        /// `module.name`.
        global: String,
    },
    /// A pickle instruction that torch.save does not write.
    #[error(
        "reading {path:?} as pt, byte {offset}: found the pickle instruction {opcode:#04x}, expected one that torch.save writes; a pickle is never run here: save it again with torch.save"
    )]
    PickleOpcode {
        /// The file.
        path: PathBuf,
        /// Where it stands.
        offset: u64,
        /// The instruction.
        opcode: u8,
    },
    /// More instructions, text or names than any checkpoint has.
    #[error(
        "reading {path:?} as pt, byte {offset}: found more than {limit} {what}, expected fewer; the file is damaged or hostile"
    )]
    PickleBudget {
        /// The file.
        path: PathBuf,
        /// Where it was too much.
        offset: u64,
        /// What there is too much of.
        what: &'static str,
        /// What is read at most.
        limit: u64,
    },
    /// A view that reaches past its storage.
    #[error(
        "reading {path:?}, tensor {tensor:?}: found a storage of {found} elements, expected at least {expected} for its shape, strides and offset; the file is damaged"
    )]
    ViewBeyondStorage {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Elements of the storage.
        found: u64,
        /// Elements that the view reaches over.
        expected: u64,
    },
    /// Views that show far more elements than the file holds.
    #[error(
        "reading {path:?}, tensor {tensor:?}: found views of {found} elements, expected at most {limit} for a file of this size; save .contiguous() copies of what is meant, or leave it out with --exclude"
    )]
    ViewTooLarge {
        /// The file.
        path: PathBuf,
        /// The tensor at which it was too much.
        tensor: String,
        /// Elements that all views up to it show.
        found: u64,
        /// What is read at most.
        limit: u64,
    },
    /// A tensor without its storage.
    #[error(
        "reading {path:?}, tensor {tensor:?}: found no data for its storage {storage:?}, expected some; the file is damaged"
    )]
    MissingStorage {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The storage's key.
        storage: String,
    },
    /// A sparse, quantized or otherwise packed tensor.
    #[error(
        "reading {path:?}, tensor {tensor:?}: found a tensor made by {found}, expected a dense one; save .to_dense() or .dequantize() of it, or leave it out with --exclude"
    )]
    PackedTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What would rebuild it.
        found: String,
    },
    /// A program, not a dump.
    #[error(
        "reading {path:?}: found a TorchScript archive (it holds {found:?}), expected what torch.save writes; save the state_dict instead"
    )]
    TorchScript {
        /// The file.
        path: PathBuf,
        /// The member that tells.
        found: String,
    },
    /// A tensor index that the file does not have, or a range beyond its elements.
    #[error(
        "reading {path:?}: found a request for elements {found:?} of tensor number {tensor}, expected a range within {expected} elements"
    )]
    OutOfRange {
        /// The file.
        path: PathBuf,
        /// The index that was asked for.
        tensor: usize,
        /// The elements that were asked for.
        found: std::ops::Range<u64>,
        /// How many elements that tensor has (0 where there is no such tensor).
        expected: u64,
    },
}

/// `, tensor "name"` where there is one.
fn of(tensor: &Option<String>) -> String {
    match tensor {
        Some(name) => format!(", tensor {name:?}"),
        None => String::new(),
    }
}

/// At most 16 bytes as escaped text, for messages.
pub(crate) fn escaped(bytes: &[u8]) -> String {
    bytes[..bytes.len().min(16)].escape_ascii().to_string()
}

/// The same in quotes.
pub(crate) fn quoted(bytes: &[u8]) -> String {
    format!("\"{}\"", escaped(bytes))
}

/// At most 120 characters of a stranger's text, for messages.
pub(crate) fn shortened(text: &str) -> String {
    match text.char_indices().nth(120) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_string(),
    }
}
