//! What readers promise of files that are fine.

use gradscale::gradients::{
    Chunk, Dtype, Dump, DumpScale, Kind, OpenDump, Options, SkippedBecause, StepPattern,
    looks_like_trace,
};

use crate::build::*;
use crate::counts::{counts_of, data};

fn open(path: &std::path::Path, options: &Options) -> OpenDump {
    let dump = Dump::open(path, options).unwrap_or_else(|e| panic!("{e}"));
    dump.steps()[0].files[0]
        .open(options)
        .unwrap_or_else(|e| panic!("{e}"))
}

fn bits(open: &OpenDump, tensor: usize) -> Vec<u32> {
    let mut all = Vec::new();
    open.read(tensor, &mut |chunk| {
        all.extend(chunk.to_f32().iter().map(|x| x.to_bits()))
    })
    .expect("read");
    all
}

/// All elements of every dump that is one file.
fn files() -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for folder in ["npy", "npz", "pt", "safetensors", "adversarial", "captured"] {
        for entry in std::fs::read_dir(data("dumps").join(folder)).expect("a folder") {
            files.push(entry.expect("an entry").path());
        }
    }
    files.sort();
    files
}

#[test]
fn ranges_of_any_cut_together_are_the_whole() {
    for path in files() {
        let open = open(&path, &Options::new());
        for (i, tensor) in open.tensors().iter().enumerate() {
            let whole = bits(&open, i);
            for parts in [1, 2, 7] {
                let mut joined = Vec::new();
                let cut = |p: u64| tensor.elements * p / parts;
                for part in 0..parts {
                    let visit = &mut |chunk: Chunk<'_>| {
                        joined.extend(chunk.to_f32().iter().map(|x| x.to_bits()))
                    };
                    open.read_range(i, cut(part)..cut(part + 1), visit)
                        .expect("read");
                }
                assert_eq!(joined, whole, "{} {}", path.display(), tensor.name);
            }
        }
    }
}

#[test]
fn a_map_and_several_threads_give_the_same_bits() {
    for path in files() {
        let plain = open(&path, &Options::new());
        let mapped = open(&path, &Options::new().with_mmap(true));
        std::thread::scope(|scope| {
            for i in 0..plain.tensors().len() {
                let (plain, mapped) = (&plain, &mapped);
                scope.spawn(move || assert_eq!(bits(plain, i), bits(mapped, i)));
            }
        });
    }
}

#[test]
fn chunks_are_bounded_and_of_the_files_own_type() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = write(
        folder.path(),
        "a.npy",
        &npy_of("<f8", "(100000,)", &vec![0u8; 800_000]),
    );
    let mut elements = 0;
    open(&path, &Options::new())
        .read(0, &mut |chunk| {
            assert!(matches!(chunk, Chunk::F32(values) if values.len() * 4 <= 128 * 1024));
            elements += chunk.len();
        })
        .expect("read");
    assert_eq!(elements, 100_000);
    let f16 = open(&data("dumps/npy/f16.npy"), &Options::new());
    f16.read(0, &mut |chunk| assert!(matches!(chunk, Chunk::F16(_))))
        .expect("read");
    let bf16 = open(&data("dumps/pt/bf16.pt"), &Options::new());
    bf16.read(0, &mut |chunk| assert!(matches!(chunk, Chunk::Bf16(_))))
        .expect("read");
}

#[test]
fn npy_dtypes_shapes_and_byte_orders_are_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let one = |name: &str, bytes: Vec<u8>| {
        let open = open(&write(folder.path(), name, &bytes), &Options::new());
        (
            open.tensors()[0].dtype,
            open.tensors()[0].shape.clone(),
            bits(&open, 0),
        )
    };
    let f = f32::to_bits;
    assert_eq!(
        one("a.npy", npy_of(">f2", "(1,)", &[0x3c, 0x00])),
        (Dtype::F16, vec![1], vec![f(1.0)])
    );
    assert_eq!(
        one("b.npy", npy_of("<V2", "()", &[0x80, 0x3f])),
        (Dtype::Bf16, vec![], vec![f(1.0)])
    );
    assert_eq!(
        one("c.npy", npy_of(">f8", "()", &1.5f64.to_be_bytes())),
        (Dtype::F64, vec![], vec![f(1.5)])
    );
    assert_eq!(
        one("d.npy", npy_of("float8_e5m2", "(1,)", &[0x3c])),
        (Dtype::Fp8E5m2, vec![1], vec![f(1.0)])
    );
    assert_eq!(
        one("e.npy", npy_of("<f4", "(3, 0)", &[])),
        (Dtype::F32, vec![3, 0], vec![])
    );
    // f64 is rounded to f32, ties to even: 1 + 2^-24 is a tie, and beyond it lies the next f32.
    let ties = [
        1.0 + f64::powi(2.0, -24),
        1.0 + f64::powi(2.0, -24) + f64::powi(2.0, -50),
        1e300,
    ];
    let ties: Vec<u8> = ties.iter().flat_map(|x| x.to_le_bytes()).collect();
    let want = vec![f(1.0), f(1.0) + 1, f(f32::INFINITY)];
    assert_eq!(
        one("f.npy", npy_of("<f8", "(3,)", &ties)),
        (Dtype::F64, vec![3], want)
    );
}

#[test]
fn what_is_left_out_is_listed() {
    let folder = tempfile::tempdir().expect("a folder");
    let i8 = npy_of("<i8", "()", &[0; 8]);
    let members = [
        stored("w.npy", &npy_of("<f4", "(1,)", &f32s(&[1.0]))),
        stored("step.npy", &i8),
        stored("name.npy", &npy_of("<U2", "()", &[0; 8])),
        stored("z.npy", &npy_of("<c8", "()", &[0; 8])),
        stored("q.npy", &npy_of("<f16", "()", &[0; 16])),
        stored("note.txt", b"hello"),
    ];
    let path = write(folder.path(), "a.npz", &zip(&members, false));
    let dump = open(&path, &Options::new());
    let why: Vec<_> = dump
        .skipped()
        .iter()
        .map(|s| (s.name.as_str(), s.why))
        .collect();
    use SkippedBecause::{Complex, Integer, NotNumbers, Trailing, UnreadFloat};
    let want = [
        ("step", Integer),
        ("name", NotNumbers),
        ("z", Complex),
        ("q", UnreadFloat),
        ("note.txt", Trailing),
    ];
    assert_eq!(why, want);
    let path = write(folder.path(), "ints.npy", &i8);
    let ints = open(&path, &Options::new());
    assert_eq!((ints.tensors().len(), ints.skipped().len()), (0, 1));
    let more = [npy_of("<f4", "(1,)", &f32s(&[1.0])), b"more".to_vec()].concat();
    let open = open(&write(folder.path(), "more.npy", &more), &Options::new());
    assert_eq!(
        (open.tensors()[0].elements, open.skipped()[0].why),
        (1, Trailing)
    );
}

#[test]
fn excluded_arrays_may_be_objects() {
    let folder = tempfile::tempdir().expect("a folder");
    let members = [
        stored("w.npy", &npy_of("<f4", "(1,)", &f32s(&[1.0]))),
        stored("o.npy", &npy_of("|O", "()", b".")),
    ];
    let path = write(folder.path(), "a.npz", &zip(&members, false));
    let options = Options::new().with_exclude(["o"]).expect("a glob");
    let open = open(&path, &options);
    assert_eq!((open.tensors().len(), open.skipped().len()), (1, 0));
}

#[test]
fn a_format_is_known_by_its_bytes_where_the_name_says_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, bytes) in small() {
        let kind = Kind::of_extension(std::path::Path::new(name)).expect("a kind");
        let path = write(folder.path(), &name.replace('.', "_"), &bytes);
        let dump = Dump::open(&path, &Options::new()).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(dump.kind(), kind, "{name}");
    }
}

#[test]
fn metadata_gives_step_rank_and_loss_scale() {
    let folder = tempfile::tempdir().expect("a folder");
    let header = r#"{"__metadata__":{"step":"3","rank":"1","loss_scale":"1024.0"},"a":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}"#;
    let path = write(
        folder.path(),
        "a.safetensors",
        &safetensors(header, &[0x38, 0x7f]),
    );
    let auto = Options::new()
        .with_dump_scale(DumpScale::Auto)
        .expect("auto");
    let st = open(&path, &auto);
    assert_eq!(
        (st.step(), st.rank(), st.loss_scale()),
        (Some(3), Some(1), Some(1024.0))
    );
    assert_eq!(st.dump_scale().expect("a scale"), Some(1024.0));
    assert_eq!(bits(&st, 0)[0], 1f32.to_bits());
    assert!(f32::from_bits(bits(&st, 0)[1]).is_nan());
    let pickle =
        Pickle::new()
            .raw(b"}(")
            .text("grads")
            .tensor("FloatStorage", "0", 1, 0, &[1], &[1]);
    let pickle = pickle
        .text("scaler")
        .raw(b"}(")
        .text("scale")
        .float(4096.0)
        .raw(b"u")
        .text("step")
        .int(9)
        .raw(b"u")
        .stop();
    let path = write(folder.path(), "a.pt", &pt(pickle, &[("0", &f32s(&[1.0]))]));
    let pt = open(&path, &Options::new());
    assert_eq!(
        (pt.step(), pt.loss_scale(), pt.tensors()[0].name.as_str()),
        (Some(9), Some(4096.0), "grads")
    );
}

#[test]
fn tensors_of_a_pt_are_named_by_their_path_and_shared_containers_by_the_first() {
    let folder = tempfile::tempdir().expect("a folder");
    let names = |pickle: Vec<u8>| {
        let path = write(
            folder.path(),
            "lone.pt",
            &pt(pickle, &[("0", &f32s(&[1.0, 2.0]))]),
        );
        open(&path, &Options::new())
            .tensors()
            .iter()
            .map(|t| t.name.clone())
            .collect::<Vec<_>>()
    };
    let t = |pickle: Pickle| pickle.tensor("FloatStorage", "0", 2, 0, &[2], &[1]);
    assert_eq!(names(t(Pickle::new()).stop()), ["lone"]);
    // {"m": d := {"w": t}, 7: [t, (t,)], "again": d}; the same tensor object counts once for each name.
    let pickle = Pickle::new().raw(b"}(").text("m").raw(b"}q\x01").text("w");
    let pickle = t(pickle)
        .raw(b"q\x02s")
        .int(7)
        .raw(b"](h\x02h\x02\x85e")
        .text("again")
        .raw(b"h\x01u")
        .stop();
    assert_eq!(names(pickle), ["m.w", "7.0", "7.1.0"]);
    // A parameter, and a tensor of another type, are the tensor inside.
    let pickle = Pickle::new()
        .global("torch._utils", "_rebuild_parameter")
        .raw(b"(");
    assert_eq!(names(t(pickle).raw(b"\x89N").raw(b"tR").stop()), ["lone"]);
}

#[test]
fn a_dump_of_transformer_engine_is_named_by_its_file() {
    let folder = tempfile::tempdir().expect("a folder");
    // {"high_precision": t, "quantized": Float8Tensor._make_in_reduce_ex(t, DType(7), torch.float32)}
    let module = "transformer_engine.pytorch.tensor.float8_tensor";
    let pickle = Pickle::new().raw(b"}(").text("high_precision");
    let pickle = pickle
        .tensor("FloatStorage", "0", 1, 0, &[1], &[1])
        .text("quantized");
    let pickle = pickle
        .global("__builtin__", "getattr")
        .global(module, "Float8Tensor");
    let pickle = pickle.text("_make_in_reduce_ex").raw(b"\x86R(").tensor(
        "FloatStorage",
        "0",
        1,
        0,
        &[1],
        &[1],
    );
    let pickle = pickle
        .global("transformer_engine_torch", "DType")
        .raw(b"K\x07\x85R");
    let pickle = pickle.global("torch", "float32").raw(b"tRu").stop();
    let name = "tensor_dumps/rank_1/decoder_fc1_wgrad_iter_000020.pt";
    write(folder.path(), name, &pt(pickle, &[("0", &f32s(&[1.0]))]));
    let dump = Dump::open(folder.path(), &Options::new()).expect("a dump");
    let file = &dump.steps()[0].files[0];
    assert_eq!((file.step, file.rank), (Some(20), Some(1)));
    let open = file.open(&Options::new()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(open.tensors()[0].name, "decoder_fc1_wgrad");
    assert_eq!(open.skipped()[0].name, "decoder_fc1_wgrad.quantized");
}

#[test]
fn fp8_and_big_endian_storages_are_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let pickle = Pickle::new()
        .global("torch._utils", "_rebuild_tensor_v3")
        .raw(b"(");
    let pickle = pickle
        .raw(b"(")
        .text("storage")
        .global("torch.storage", "UntypedStorage")
        .text("0")
        .text("cpu")
        .int(3);
    let pickle = pickle
        .raw(b"tQ")
        .int(1)
        .ints(&[2])
        .ints(&[1])
        .raw(b"\x89")
        .global("collections", "OrderedDict");
    let pickle = pickle
        .raw(b")R")
        .global("torch", "float8_e5m2")
        .raw(b"tR")
        .stop();
    let path = write(
        folder.path(),
        "fp8.pt",
        &pt(pickle, &[("0", &[0xff, 0x3c, 0xbc])]),
    );
    let fp8 = open(&path, &Options::new());
    assert_eq!(
        (fp8.tensors()[0].dtype, bits(&fp8, 0)),
        (Dtype::Fp8E5m2, vec![1f32.to_bits(), (-1f32).to_bits()])
    );
    let pickle = Pickle::new()
        .tensor("FloatStorage", "0", 1, 0, &[1], &[1])
        .stop();
    let members = [
        stored("a/data.pkl", &pickle),
        stored("a/byteorder", b"big"),
        stored("a/data/0", &2f32.to_be_bytes()),
    ];
    let path = write(folder.path(), "big.pt", &zip(&members, false));
    assert_eq!(bits(&open(&path, &Options::new()), 0), [2f32.to_bits()]);
}

#[test]
fn a_directory_is_grouped_by_step_rank_and_path() {
    let folder = tempfile::tempdir().expect("a folder");
    let npz = zip(
        &[stored("w.npy", &npy_of("<f4", "(1,)", &f32s(&[1.0])))],
        false,
    );
    for name in [
        "step_20/rank_1.npz",
        "step_20/rank_0.npz",
        "step_3.npz",
        "grads-100.npz",
        "extra.npz",
    ] {
        write(folder.path(), name, &npz);
    }
    for other in ["notes.txt", ".hidden.npz", "step_9.npz.tmp"] {
        write(folder.path(), other, b"x");
    }
    let dump = Dump::open(folder.path(), &Options::new()).expect("a dump");
    let got: Vec<_> = dump
        .steps()
        .iter()
        .map(|s| (s.step, s.files.iter().map(|f| f.rank).collect::<Vec<_>>()))
        .collect();
    let want = [
        (None, vec![None]),
        (Some(3), vec![None]),
        (Some(20), vec![Some(0), Some(1)]),
        (Some(100), vec![None]),
    ];
    assert_eq!(got, want);
    let options =
        Options::new().with_step_pattern(StepPattern::parse("rank_{step}").expect("a pattern"));
    let dump = Dump::open(folder.path(), &options).expect("a dump");
    assert_eq!((dump.steps().len(), dump.left_out().len()), (2, 3));
    let (groups, _) = counts_of(&[folder.path()], "tensor").expect("read");
    assert_eq!(groups.values().map(|c| c.elements).collect::<Vec<_>>(), [5]);
}

#[test]
fn shards_are_read_together_and_missing_ones_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let shard = |name: &str| {
        let header = format!(r#"{{"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#);
        safetensors(&header, &f32s(&[1.0]))
    };
    write(
        folder.path(),
        "model-00001-of-00003.safetensors",
        &shard("a"),
    );
    write(
        folder.path(),
        "model-00003-of-00003.safetensors",
        &shard("c"),
    );
    let map = r#"{"metadata":{"total_size":12},"weight_map":{"a":"model-00001-of-00003.safetensors","b":"model-00002-of-00003.safetensors"}}"#;
    let index = write(
        folder.path(),
        "model.safetensors.index.json",
        map.as_bytes(),
    );
    let missing = [folder.path().join("model-00002-of-00003.safetensors")];
    let dump = Dump::open(folder.path(), &Options::new()).expect("a dump");
    assert_eq!(dump.missing_shards(), missing);
    assert_eq!(
        dump.steps()[0]
            .files
            .iter()
            .map(|f| f.shard)
            .collect::<Vec<_>>(),
        [Some((1, 3)), Some((3, 3))]
    );
    let dump = Dump::open(&index, &Options::new()).expect("an index");
    assert_eq!(
        (dump.missing_shards(), dump.steps()[0].files.len()),
        (&missing[..], 1)
    );
    write(
        folder.path(),
        "bad.safetensors.index.json",
        br#"{"weight_map":{"a":"../../etc/passwd"}}"#,
    );
    assert!(Dump::open(folder.path(), &Options::new()).is_err());
}

#[test]
fn a_trace_is_told_from_a_dump() {
    let folder = tempfile::tempdir().expect("a folder");
    let chunk = |key: &str| {
        let header = format!(
            r#"{{"__metadata__":{{"{key}":"x"}},"a":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#
        );
        safetensors(&header, &f32s(&[1.0]))
    };
    let name = "rank0000-000000.safetensors";
    let trace = write(&folder.path().join("trace"), name, &chunk("gradscale"));
    let dump = write(&folder.path().join("dump"), name, &chunk("format"));
    let torn = write(&folder.path().join("torn"), name, b"torn");
    let is = |path: &std::path::Path| looks_like_trace(path.parent().expect("a folder"));
    assert!(is(&trace) && looks_like_trace(&trace));
    assert!(!is(&dump) && !looks_like_trace(&dump));
    assert!(is(&torn));
    assert!(!looks_like_trace(folder.path()) && !looks_like_trace(folder.path().join("missing")));
    // A torn first chunk does not make the rest a dump.
    write(
        &folder.path().join("trace"),
        "rank0000-000001.safetensors",
        b"torn",
    );
    assert!(is(&trace));
}

#[test]
fn files_of_a_directory_are_listed_and_not_opened() {
    let folder = tempfile::tempdir().expect("a folder");
    for step in 0..1000 {
        std::fs::write(
            folder.path().join(format!("step_{step}.npz")),
            b"never opened",
        )
        .expect("written");
    }
    let dump = Dump::open(folder.path(), &Options::new()).expect("a dump");
    assert!(dump.steps().iter().map(|s| s.step).eq((0..1000).map(Some)));
}
