//! Every way to fail is provoked, by files that are wrong in one thing.

use std::collections::BTreeSet;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use gradscale::gradients::{Chunk, Dump, DumpScale, GradientsError, Options, StepPattern};

use crate::build::*;
use crate::counts::counts_of;

const F4: &str = "{'descr': '<f4', 'fortran_order': False, 'shape': ";

fn variant(e: &GradientsError) -> String {
    format!("{e:?}")
        .split([' ', '{'])
        .next()
        .unwrap_or_default()
        .to_string()
}

fn read(path: &Path) -> Result<(), GradientsError> {
    counts_of(&[path], "all").map(drop)
}

/// Name, bytes, the variant that must come.
pub fn files() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let one = f32s(&[1.0]);
    let good = npy_of("<f4", "(1,)", &one);
    let tensor = |elements, offset, shape: &[i32], strides: &[i32]| {
        Pickle::new()
            .tensor("FloatStorage", "0", elements, offset, shape, strides)
            .stop()
    };
    let pt_of = |pickle| pt(pickle, &[("0", &one)]);
    let member = |change: &dyn Fn(&mut Member)| {
        let mut members = vec![deflated("a.npy", &good), stored("b.npy", &good)];
        members.iter_mut().for_each(change);
        zip(&members, false)
    };
    let deep_json = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let st = |header: &str, n: usize| safetensors(header, &vec![0u8; n]);
    let bomb = npy_of("<f4", "(25000000,)", &vec![0u8; 100_000_000]);
    let object = Pickle::new()
        .raw(b"}(")
        .text("a")
        .tensor("FloatStorage", "0", 1, 0, &[1], &[1]);
    vec![
        ("empty.pt", vec![], "EmptyFile"),
        (
            "lfs.npz",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n".to_vec(),
            "GitLfsPointer",
        ),
        ("what.bin", b"what is this thing".to_vec(), "UnknownKind"),
        ("noise", vec![7; 100], "UnknownKind"),
        // npy
        ("not.npy", b"PK\x03\x04 and so on".to_vec(), "Magic"),
        ("short.npy", b"\x93NUM".to_vec(), "Truncated"),
        (
            "version.npy",
            b"\x93NUMPY\x04\x00\x00\x00\x00\x00".to_vec(),
            "Header",
        ),
        (
            "long.npy",
            b"\x93NUMPY\x02\x00\xff\xff\xff\xff".to_vec(),
            "HeaderTooLong",
        ),
        (
            "lying.npy",
            b"\x93NUMPY\x01\x00\xff\xff{}".to_vec(),
            "Truncated",
        ),
        ("keys.npy", npy("{'descr': '<f4'}", &one), "Header"),
        ("negative.npy", npy(&format!("{F4}(-1,)}}"), &one), "Header"),
        (
            "huge.npy",
            npy(&format!("{F4}(9223372036854775808, 3)}}"), &one),
            "ShapeOverflow",
        ),
        (
            "bytes.npy",
            npy(&format!("{F4}(4611686018427387904,)}}"), &one),
            "ShapeOverflow",
        ),
        (
            "dims.npy",
            npy(&format!("{F4}({})}}", "1,".repeat(65)), &one),
            "Header",
        ),
        ("deep.npy", npy(&"(".repeat(60_000), &[]), "Header"),
        ("cut.npy", npy_of("<f4", "(2,)", &one), "Truncated"),
        (
            "object.npy",
            npy_of("|O", "(1,)", b"cposix\nsystem\n"),
            "ObjectArray",
        ),
        (
            "complex.npy",
            npy_of("<c8", "(1,)", &[0; 8]),
            "NoFloatTensor",
        ),
        ("text.npy", npy_of("<U1", "(1,)", &[0; 4]), "NoFloatTensor"),
        ("void.npy", npy_of("|V2", "(1,)", &[0; 2]), "NoFloatTensor"),
        // npz
        (
            "not.npz",
            b"\x93NUMPY and so on, for long enough".to_vec(),
            "Header",
        ),
        ("nothing.npz", zip(&[], false), "NoTensor"),
        (
            "readme.npz",
            zip(&[stored("readme.txt", b"hello")], false),
            "NoTensor",
        ),
        (
            "twice.npz",
            zip(&[stored("a.npy", &good), stored("a.npy", &good)], false),
            "DuplicateName",
        ),
        ("method.npz", member(&|m| m.method = 12), "Member"),
        ("encrypted.npz", member(&|m| m.flags = 1), "Member"),
        ("crc.npz", member(&|m| m.crc ^= 1), "Checksum"),
        (
            "name.npz",
            member(&|m| m.local_name = "c.npy".into()),
            "Header",
        ),
        (
            "overlap.npz",
            member(&|m| m.header = Some(0)),
            "MembersOverlap",
        ),
        (
            "beyond.npz",
            member(&|m| m.header = Some(u32::MAX - 1)),
            "MembersOverlap",
        ),
        (
            "garbage.npz",
            member(&|m| m.packed.iter_mut().for_each(|b| *b = 0xff)),
            "Inflate",
        ),
        (
            "short.npz",
            member(&|m| {
                m.packed.truncate(m.packed.len() / 2);
                m.method = 8;
            }),
            "Inflate",
        ),
        (
            "stored_short.npz",
            zip(
                &[Member {
                    size: 4,
                    ..stored("a.npy", &good)
                }],
                false,
            ),
            "Inflate",
        ),
        (
            "promise.npz",
            zip(
                &[Member {
                    size: u32::MAX - 1,
                    ..deflated("a.npy", &good)
                }],
                false,
            ),
            "Inflate",
        ),
        (
            "shape.npz",
            zip(&[deflated("a.npy", &npy_of("<f4", "(2,)", &one))], false),
            "SizeMismatch",
        ),
        (
            "tail.npz",
            zip(&[stored("a.npy", &[&good[..], b"more"].concat())], false),
            "SizeMismatch",
        ),
        // Says 1000 bytes, inflates to 100 MB: stopped where the header's own size ends.
        (
            "bomb.npz",
            zip(
                &[Member {
                    size: 1000,
                    ..deflated("a.npy", &bomb)
                }],
                false,
            ),
            "SizeMismatch",
        ),
        (
            "object.npz",
            zip(
                &[
                    stored("a.npy", &good),
                    stored("o.npy", &npy_of("|O", "()", b".")),
                ],
                false,
            ),
            "ObjectArray",
        ),
        (
            "member.npz",
            zip(&[stored("a.npy", b"PK\x03\x04....")], false),
            "Magic",
        ),
        (
            "parts.npz",
            {
                let mut z = zip(&[stored("a.npy", &good)], false);
                let at = z.len() - 18;
                z[at] = 1;
                z
            },
            "Header",
        ),
        (
            "count.npz",
            {
                let mut z = zip(&[stored("a.npy", &good)], false);
                let at = z.len() - 14;
                z[at] = 2;
                z[at + 2] = 2;
                z
            },
            "Header",
        ),
        // safetensors
        ("short.safetensors", b"1234".to_vec(), "Truncated"),
        (
            "max.safetensors",
            [u64::MAX.to_le_bytes().as_slice(), b"{}"].concat(),
            "HeaderTooLong",
        ),
        (
            "lying.safetensors",
            [1000u64.to_le_bytes().as_slice(), b"{}"].concat(),
            "Truncated",
        ),
        ("array.safetensors", st("[]", 0), "Magic"),
        ("no.safetensors", st("{}", 0), "NoTensor"),
        ("json.safetensors", st("{\"a\":}", 0), "Header"),
        ("deep.safetensors", st(&deep_json, 0), "Header"),
        (
            "utf8.safetensors",
            [3u64.to_le_bytes().as_slice(), b"{\xff}"].concat(),
            "Header",
        ),
        (
            "negative.safetensors",
            st(
                r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#,
                4,
            ),
            "Header",
        ),
        (
            "tail.safetensors",
            st(
                r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
                5,
            ),
            "Header",
        ),
        (
            "cut.safetensors",
            st(
                r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#,
                5,
            ),
            "Truncated",
        ),
        (
            "size.safetensors",
            st(
                r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#,
                4,
            ),
            "SizeMismatch",
        ),
        (
            "hole.safetensors",
            st(
                r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
                8,
            ),
            "Offsets",
        ),
        (
            "back.safetensors",
            st(
                r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,0]},"b":{"dtype":"F32","shape":[1],"data_offsets":[9,0]}}"#,
                4,
            ),
            "Offsets",
        ),
        (
            "overlap.safetensors",
            st(
                r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
                8,
            ),
            "Offsets",
        ),
        (
            "far.safetensors",
            st(
                r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]}}"#,
                8,
            ),
            "Truncated",
        ),
        (
            "huge.safetensors",
            st(
                r#"{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}}"#,
                4,
            ),
            "ShapeOverflow",
        ),
        (
            "twice.safetensors",
            st(
                r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
                4,
            ),
            "DuplicateName",
        ),
        (
            "complex.safetensors",
            st(
                r#"{"a":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}}"#,
                8,
            ),
            "NoFloatTensor",
        ),
        (
            "rank0000-000000.safetensors",
            st(
                r#"{"__metadata__":{"gradscale":"{}"},"step":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}"#,
                8,
            ),
            "TraceDirectory",
        ),
        // pt
        ("not.pt", b"abc".to_vec(), "Magic"),
        ("plain.pt", Pickle::new().raw(b"}").stop(), "Header"),
        (
            "system.pt",
            pt_of(
                Pickle::new()
                    .global("posix", "system")
                    .raw(b"(")
                    .text("touch x")
                    .raw(b"tR")
                    .stop(),
            ),
            "ForbiddenGlobal",
        ),
        (
            "getattr.pt",
            pt_of(
                Pickle::new()
                    .global("builtins", "getattr")
                    .global("torch", "Tensor")
                    .text("x")
                    .raw(b"\x86R")
                    .stop(),
            ),
            "ForbiddenGlobal",
        ),
        (
            "torch_load.pt",
            pt_of(Pickle::new().global("torch", "load").stop()),
            "ForbiddenGlobal",
        ),
        (
            "stack_global.pt",
            pt_of(Pickle::new().text("os").text("system").raw(b"\x93").stop()),
            "ForbiddenGlobal",
        ),
        (
            "extension.pt",
            pt_of(Pickle::new().raw(b"\x82\x01").stop()),
            "PickleOpcode",
        ),
        (
            "inst.pt",
            pt_of(Pickle::new().raw(b"(iposix\nsystem\n").stop()),
            "PickleOpcode",
        ),
        (
            "call_text.pt",
            pt_of(Pickle::new().text("x").raw(b")R").stop()),
            "Header",
        ),
        (
            "call_storage.pt",
            pt_of(
                Pickle::new()
                    .global("torch", "FloatStorage")
                    .raw(b")R")
                    .stop(),
            ),
            "Header",
        ),
        ("underflow.pt", pt_of(b"\x80\x02R.".to_vec()), "Header"),
        ("no_mark.pt", pt_of(b"\x80\x02t.".to_vec()), "Header"),
        ("memo.pt", pt_of(b"\x80\x02h\x09.".to_vec()), "Header"),
        (
            "short_tuple.pt",
            pt_of(
                Pickle::new()
                    .global("torch._utils", "_rebuild_tensor_v2")
                    .raw(b")R")
                    .stop(),
            ),
            "Header",
        ),
        ("no_stop.pt", pt_of(b"\x80\x02}".to_vec()), "Truncated"),
        (
            "long_text.pt",
            pt_of(b"\x80\x02X\xff\xff\xff\x01ab".to_vec()),
            "Truncated",
        ),
        (
            "longer_text.pt",
            pt_of(b"\x80\x02X\xff\xff\xff\xffab".to_vec()),
            "PickleBudget",
        ),
        (
            "opcodes.pt",
            pt_of([b"\x80\x02(".as_slice(), &b"N".repeat(5_000_000), b"t."].concat()),
            "PickleBudget",
        ),
        ("names.pt", pt_of(long_names()), "PickleBudget"),
        ("tensors.pt", pt_of(many_tensors()), "PickleBudget"),
        (
            "texts.pt",
            pt_of(b"X\x01\0\0\0x".repeat(4_000_001)),
            "PickleBudget",
        ),
        (
            "lists.pt",
            pt_of(b"]\x94".repeat(2_000_001)),
            "PickleBudget",
        ),
        (
            "nothing.pt",
            pt_of(Pickle::new().raw(b"}").stop()),
            "NoTensor",
        ),
        ("number.pt", pt_of(Pickle::new().int(3).stop()), "NoTensor"),
        (
            "itself.pt",
            pt_of(b"\x80\x02]q\x00h\x00a.".to_vec()),
            "NoTensor",
        ),
        (
            "view.pt",
            pt_of(tensor(1, 0, &[1000], &[1])),
            "ViewBeyondStorage",
        ),
        (
            "offset.pt",
            pt_of(tensor(1, 1, &[1], &[1])),
            "ViewBeyondStorage",
        ),
        ("minus.pt", pt_of(tensor(1, -1, &[1], &[1])), "Header"),
        ("strides.pt", pt_of(tensor(1, 0, &[1, 1], &[1])), "Header"),
        (
            "expanded.pt",
            pt_of(tensor(1, 0, &[i32::MAX, 9], &[0, 0])),
            "ViewTooLarge",
        ),
        (
            "overflow.pt",
            pt_of(tensor(1, 0, &[i32::MAX, i32::MAX, i32::MAX], &[0, 0, 0])),
            "ShapeOverflow",
        ),
        (
            "storage.pt",
            pt_of(tensor(9, 0, &[1], &[1])),
            "SizeMismatch",
        ),
        (
            "missing.pt",
            pt(tensor(1, 0, &[1], &[1]), &[]),
            "MissingStorage",
        ),
        (
            "sparse.pt",
            pt_of(
                Pickle::new()
                    .global("torch._utils", "_rebuild_sparse_tensor")
                    .raw(b")R")
                    .stop(),
            ),
            "PackedTensor",
        ),
        (
            "quantized.pt",
            pt(
                Pickle::new()
                    .tensor("QInt8Storage", "0", 1, 0, &[1], &[1])
                    .stop(),
                &[("0", &[1])],
            ),
            "PackedTensor",
        ),
        (
            "twice.pt",
            pt_of(
                object
                    .clone()
                    .text("a")
                    .tensor("FloatStorage", "0", 1, 0, &[1], &[1])
                    .raw(b"u")
                    .stop(),
            ),
            "DuplicateName",
        ),
        (
            "members.pt",
            zip(
                &[stored("a/data.pkl", b"N."), stored("a/data.pkl", b"N.")],
                false,
            ),
            "DuplicateName",
        ),
        (
            "packed.pt",
            zip(
                &[
                    deflated("a/data.pkl", &tensor(1, 0, &[1], &[1])),
                    stored("a/data/0", &one),
                ],
                false,
            ),
            "Member",
        ),
        (
            "no_pickle.pt",
            zip(&[stored("a/data/0", &one)], false),
            "Header",
        ),
        (
            "order.pt",
            zip(
                &[
                    stored("a/data.pkl", b"\x80\x02N."),
                    stored("a/byteorder", b"middle"),
                ],
                false,
            ),
            "Header",
        ),
        (
            "script.pt",
            zip(
                &[
                    stored("a/data.pkl", b"N."),
                    stored("a/code/__torch__.py", b""),
                ],
                false,
            ),
            "TorchScript",
        ),
        (
            "complex.pt",
            pt(
                Pickle::new()
                    .tensor("ComplexFloatStorage", "0", 1, 0, &[1], &[1])
                    .stop(),
                &[("0", &[0; 8])],
            ),
            "NoFloatTensor",
        ),
        (
            "big.pt",
            legacy(false, tensor(1, 0, &[1], &[1]), &[("0", 1, &one)]),
            "Header",
        ),
        (
            "keys.pt",
            legacy(true, tensor(1, 0, &[1], &[1]), &[("9", 1, &one)]),
            "Header",
        ),
        (
            "count.pt",
            legacy(true, tensor(1, 0, &[1], &[1]), &[("0", u64::MAX, &one)]),
            "Header",
        ),
        (
            "absent.pt",
            legacy(true, tensor(1, 0, &[1], &[1]), &[]),
            "MissingStorage",
        ),
        (
            "legacy_cut.pt",
            legacy(true, tensor(1, 0, &[1], &[1]), &[("0", 1, &one[..3])]),
            "Truncated",
        ),
    ]
}

/// 2,000 tensors below one key of 16 KiB: 32 MiB of names from 200 KiB of file.
fn long_names() -> Vec<u8> {
    let pickle = Pickle::new()
        .raw(b"}")
        .text(&"k".repeat(16 << 10))
        .raw(b"](");
    let pickle = pickle
        .tensor("FloatStorage", "0", 1, 0, &[1], &[1])
        .raw(b"q\x00");
    (0..2000)
        .fold(pickle, |pickle, _| pickle.raw(b"h\x00"))
        .raw(b"es")
        .stop()
}

/// 300,000 names of one tensor.
fn many_tensors() -> Vec<u8> {
    let pickle = Pickle::new()
        .raw(b"](")
        .tensor("FloatStorage", "0", 1, 0, &[1], &[1])
        .raw(b"q\x00");
    pickle.raw(&b"h\x00".repeat(300_000)).raw(b"e").stop()
}

#[test]
fn every_way_to_fail_is_provoked() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let mut seen = BTreeSet::new();
    let mut wrong = Vec::new();
    let mut expect = |what: &str, got: Result<(), GradientsError>, want: &str| match got {
        Ok(()) => wrong.push(format!("{what} was read, expected {want}")),
        Err(e) => {
            let message = e.to_string();
            if variant(&e) != want || !message.contains("found") {
                wrong.push(format!("{what}: {message} ({e:?}), expected {want}"));
            }
            seen.insert(variant(&e));
        }
    };
    for (name, bytes, want) in files() {
        let got = read(&write(folder, name, &bytes));
        if let Err(e) = &got {
            assert!(e.to_string().contains(name), "{name} is not named: {e}");
        }
        expect(name, got, want);
    }

    // What is wrong outside files.
    expect("missing", read(&folder.join("missing.npy")), "Io");
    std::fs::create_dir(folder.join("folder.npy")).expect("a folder");
    expect(
        "a directory named .npy",
        read(&folder.join("folder.npy")),
        "EmptyDirectory",
    );
    let run = folder.join("run");
    write(
        &run,
        "step_1.npz",
        &zip(
            &[stored("a.npy", &npy_of("<f4", "(1,)", &f32s(&[1.0])))],
            false,
        ),
    );
    let pattern = StepPattern::parse("it{step}").expect("a pattern");
    let options = Options::new().with_step_pattern(pattern);
    expect(
        "no fit",
        Dump::open(&run, &options).map(drop),
        "NothingFitsPattern",
    );
    expect(
        "a pattern",
        StepPattern::parse("{x}").map(drop),
        "StepPattern",
    );
    expect(
        "a glob",
        Options::new().with_tensors(["["]).map(drop),
        "Glob",
    );
    for scale in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        expect(
            "a scale",
            Options::new()
                .with_dump_scale(DumpScale::Value(scale))
                .map(drop),
            "DumpScale",
        );
    }
    let auto = Options::new()
        .with_dump_scale(DumpScale::Auto)
        .expect("auto");
    let dump = Dump::open(run.join("step_1.npz"), &auto).expect("a dump");
    let open = dump.steps()[0].files[0].open(&auto).expect("opens");
    expect("no scale", open.dump_scale().map(drop), "NoLossScale");
    let ignore = &mut |_: Chunk<'_>| {};
    expect("index", open.read(1, ignore), "OutOfRange");
    expect("range", open.read_range(0, 0..2, ignore), "OutOfRange");
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = 1..0;
    expect(
        "backwards",
        open.read_range(0, backwards, ignore),
        "OutOfRange",
    );
    let mut deep = folder.join("deep");
    for _ in 0..18 {
        deep = deep.join("d");
    }
    write(&deep, "a.npy", b"");
    expect(
        "deep",
        Dump::open(folder.join("deep"), &Options::new()).map(drop),
        "TooDeep",
    );
    let trace = folder.join("trace");
    write(&trace, "rank0000-000000.safetensors.tmp", b"");
    expect(
        "trace",
        Dump::open(&trace, &Options::new()).map(drop),
        "TraceDirectory",
    );
    #[cfg(unix)]
    {
        expect(
            "a device",
            Dump::open("/dev/null", &Options::new()).map(drop),
            "NotAFile",
        );
        let looped = folder.join("loop.npy");
        std::os::unix::fs::symlink("loop.npy", &looped).expect("a link");
        expect("a loop", read(&looped), "Io");
    }
    #[cfg(not(unix))]
    seen.insert("NotAFile".to_string());
    // A GPU that fails while it counts: provoked by tests/kernel/cuda.rs.
    seen.insert("Device".to_string());

    assert!(
        wrong.is_empty(),
        "{} differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    // The enum itself says which ways there are.
    let source = include_str!("../../src/gradients/error.rs");
    let body = source
        .split("pub enum GradientsError {")
        .nth(1)
        .and_then(|s| s.split("\n}").next())
        .expect("the enum");
    let all: BTreeSet<String> = body
        .lines()
        .filter_map(|line| line.strip_prefix("    ")?.strip_suffix(" {"))
        .filter(|name| name.starts_with(|c: char| c.is_ascii_uppercase()))
        .map(str::to_string)
        .collect();
    assert_eq!(
        seen, all,
        "variants that no test provokes, or that are gone"
    );
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, bytes) in small() {
        let path = write(folder.path(), name, &bytes);
        read(&path).unwrap_or_else(|e| panic!("{name} whole: {e}"));
        // Shortened in place, from the end on: writing each anew takes a hundred times as long.
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .expect("opened");
        for cut in (0..bytes.len()).rev() {
            file.set_len(cut as u64).expect("cut");
            assert!(
                read(&path).is_err(),
                "{name} cut to {cut} of {} bytes was read",
                bytes.len()
            );
        }
    }
}

#[test]
fn a_file_with_any_byte_changed_never_panics() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, bytes) in small() {
        let path = write(folder.path(), name, &bytes);
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .expect("opened");
        for (at, &old) in bytes.iter().enumerate() {
            for to in [0x00, 0xff, old ^ 1, old] {
                file.seek(SeekFrom::Start(at as u64)).expect("sought");
                file.write_all(&[to]).expect("written");
                let _ = read(&path);
            }
        }
    }
}

#[cfg(unix)]
#[test]
fn unreadable_files_and_links_to_nowhere_are_named() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = tempfile::tempdir().expect("a folder");
    let good = npy_of("<f4", "(1,)", &f32s(&[1.0]));
    write(folder.path(), "a.npy", &good);
    symlink(folder.path(), folder.path().join("again")).expect("a link");
    let (groups, _) = counts_of(&[folder.path()], "tensor").expect("a loop of directories ends");
    assert_eq!(groups.len(), 1);
    symlink("nowhere.npy", folder.path().join("b.npy")).expect("a link");
    let e = read(folder.path()).expect_err("a dump that is a link to nowhere");
    assert!(e.to_string().contains("b.npy"), "{e}");
    std::fs::remove_file(folder.path().join("b.npy")).expect("removed");
    let locked = write(folder.path(), "locked.npy", &good);
    std::fs::set_permissions(&locked, std::fs::Permissions::from_mode(0o000)).expect("locked");
    match std::fs::read(&locked) {
        Ok(_) => eprintln!("SKIPPED: this user may read everything, so no file is unreadable"),
        Err(_) => assert!(matches!(
            read(folder.path()),
            Err(GradientsError::Io { .. })
        )),
    }
}
