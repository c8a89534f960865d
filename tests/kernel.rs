//! Every backend against counting one value at a time.
//!
//! With `GRADSCALE_NEED_BACKENDS=avx2,avx512` set, a backend that this machine lacks is a failure and no skip. `cuda` is tested only
//! where it is named there: `tests/cuda.rs` runs this program with a driver that has no GPU, `tests/gpu.sh` with a real one.

#[path = "kernel/cuda.rs"]
mod cuda;

#[path = "common/xorshift.rs"]
mod xorshift;

use gradscale::analysis::{Analysis, By, Group, Options, analyze};
use gradscale::float::{FORMATS, FP16, Format};
use gradscale::gradients;
use gradscale::input::{Input, Silent};
use gradscale::kernel::{Backend, Counter};
use gradscale::tally::{Accumulator, SUB_BIN_EDGES, Sketch};
use half::{bf16, f16};
use std::path::Path;
use xorshift::Random;

/// The backends to test; says which are left out.
fn backends() -> Vec<Backend> {
    let needed = std::env::var("GRADSCALE_NEED_BACKENDS").unwrap_or_default();
    ["scalar", "avx2", "avx512", "cuda"]
        .into_iter()
        .filter(|&name| name != "cuda" || needed.split(',').any(|need| need == name))
        .filter_map(|name| match Backend::parse(name) {
            Ok(backend) => Some(backend),
            Err(unavailable) => {
                assert!(
                    !needed.split(',').any(|need| need == name),
                    "{name} is needed here: {unavailable}"
                );
                eprintln!("SKIPPED: backend {name}: {unavailable}");
                None
            }
        })
        .collect()
}

/// One value at a time, by the definition.
fn naive(values: &[f32]) -> Sketch {
    let mut accumulator = Accumulator::new();
    for value in values {
        accumulator.add_repeated(value.to_bits(), 1);
    }
    accumulator.finish()
}

fn check(name: &str, values: &[f32]) {
    let expected = naive(values);
    for backend in backends() {
        let mut counter = Counter::new(backend);
        counter.add(values);
        assert_eq!(counter.finish(), expected, "{name} on {}", backend.name());
        // Once more in the same counter: nothing may be left behind.
        counter.add(values);
        assert_eq!(
            counter.finish(),
            expected,
            "{name} again on {}",
            backend.name()
        );
    }
}

/// Every sub-bin edge of every binade and its neighbours, both signs, zeros, subnormals, infinities, NaN.
fn edges() -> Vec<f32> {
    let mut values = Vec::new();
    for exponent in 0u32..=255 {
        for edge in SUB_BIN_EDGES {
            for offset in -1i64..=1 {
                let magnitude = (i64::from(exponent << 23) + i64::from(edge) + offset)
                    .clamp(0, 0x7FFF_FFFF) as u32;
                values.push(f32::from_bits(magnitude));
                values.push(f32::from_bits(magnitude | 1 << 31));
            }
        }
    }
    for bit in 0..23 {
        values.push(f32::from_bits(1 << bit));
        values.push(-f32::from_bits((2 << bit) - 1));
    }
    values
}

#[test]
fn every_edge_of_every_binade_counts_as_one_by_one() {
    let mut values = edges();
    check("edges in order", &values);
    let mut random = Random(7);
    for i in (1..values.len()).rev() {
        values.swap(i, (random.next() % (i as u64 + 1)) as usize);
    }
    check("edges shuffled", &values);
    let normal: Vec<f32> = values.iter().copied().filter(|x| x.is_normal()).collect();
    check("normal edges", &normal);
}

#[test]
fn a_seed_at_any_offset_and_length_counts_as_one_by_one() {
    let mut random = Random(42);
    let background: Vec<f32> = (0..1500).map(|_| random.normal() as f32).collect();
    let seeds = [
        0.0,
        -0.0,
        1.0,
        1.8125,
        f32::from_bits(0x3F7F_F000),
        f32::from_bits(0x3F7F_DFFF),
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        -f32::from_bits(0x7F_FFFF),
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
    ];
    for (n, seed) in seeds.into_iter().enumerate() {
        for offset in 0..64 {
            let mut values = background.clone();
            for at in [offset, 500 + offset, 1499 - offset] {
                values[at] = seed;
            }
            let values = &values[offset..1500 - (offset * (n + 3)) % 97];
            let expected = naive(values);
            for backend in backends() {
                let mut counter = Counter::new(backend);
                counter.add(values);
                assert_eq!(
                    counter.finish(),
                    expected,
                    "{seed:e} at {offset} on {}",
                    backend.name()
                );
            }
        }
    }
}

#[test]
fn any_length_counts_as_one_by_one() {
    let mut random = Random(3);
    let values: Vec<f32> = (0..2100).map(|_| (random.normal() * 1e-4) as f32).collect();
    for length in (0..2100)
        .step_by(13)
        .chain([255, 256, 257, 511, 512, 513, 767, 768, 769])
    {
        let expected = naive(&values[..length]);
        for backend in backends() {
            let mut counter = Counter::new(backend);
            counter.add(&values[..length]);
            assert_eq!(counter.finish(), expected, "{length} on {}", backend.name());
        }
    }
}

#[test]
fn random_bits_count_as_one_by_one() {
    let mut random = Random(1);
    let values: Vec<f32> = (0..300_000)
        .map(|_| f32::from_bits(random.next() as u32))
        .collect();
    check("random bits", &values);
    let finite: Vec<f32> = values.iter().copied().filter(|x| x.is_normal()).collect();
    check("random normal numbers", &finite);
}

#[test]
fn skewed_data_counts_as_one_by_one() {
    let mut random = Random(11);
    let mut fill = |n: usize, f: &mut dyn FnMut(usize, &mut Random) -> f32| {
        (0..n).map(|i| f(i, &mut random)).collect::<Vec<f32>>()
    };
    // More elements than a row can hold before its table is emptied.
    let many = 700_000;
    check("ones", &vec![1.0; many]);
    check("zeros", &vec![0.0; 70_000]);
    check("negative zeros", &vec![-0.0; 3_000]);
    check("half and an ulp", &vec![0.5f32.next_up(); 3_000]);
    check("infinity", &vec![f32::INFINITY; 3_000]);
    check("NaN", &vec![f32::NAN; 3_000]);
    check("smallest", &vec![f32::from_bits(1); 3_000]);
    check("largest", &vec![-f32::MAX; 3_000]);
    let two = fill(many, &mut |_, r| {
        if r.next() >> 40 & 1 == 0 { 1.25 } else { -0.3 }
    });
    check("two values", &two);
    let extremes = fill(many, &mut |i, _| {
        if i % 2 == 0 {
            f32::MAX
        } else {
            f32::MIN_POSITIVE
        }
    });
    check("alternating extremes", &extremes);
    let beyond = fill(5_000, &mut |i, _| {
        if i % 2 == 0 {
            f32::MAX
        } else {
            f32::from_bits(1)
        }
    });
    check("alternating with a subnormal", &beyond);
    let sparse = fill(40_000, &mut |i, r| {
        if i % 97 == 0 { r.normal() as f32 } else { 0.0 }
    });
    check("sparse", &sparse);
    let flagged = fill(40_000, &mut |i, _| if i % 3 == 0 { 0.75 } else { 0.0 });
    check("zero or one magnitude", &flagged);
    let binade = fill(60_000, &mut |_, r| (1.0 + r.unit()) as f32);
    check("one binade", &binade);
    let normal = fill(many, &mut |_, r| r.normal() as f32);
    check("normal", &normal);
    let wide = fill(60_000, &mut |_, r| (r.normal() * 30.0).exp2() as f32);
    check("log-normal", &wide);
    let subnormal = fill(20_000, &mut |_, r| {
        f32::from_bits(r.next() as u32 & 0x807F_FFFF)
    });
    check("subnormal", &subnormal);
    let falling = fill(100_000, &mut |i, _| {
        let odd = if (80_000..90_000).contains(&i) { 1 } else { 2 };
        f32::from_bits(if i % 2 == 0 { 0x3F80_0000 } else { 0x3FA0_0000 } + odd)
    });
    check("a lowest bit that falls by one", &falling);
    let captured = fill(60_000, &mut |_, r| {
        f16::from_f32((r.normal() * 1e-3) as f32).to_f32() / 1024.0
    });
    check("captured in FP16", &captured);
    let powers = fill(60_000, &mut |_, r| {
        ((r.next() >> 20) as f32 % 40.0).floor().exp2()
    });
    check("powers of two", &powers);
    let holes = fill(20_000, &mut |i, r| match i % 1000 {
        0 => f32::NAN,
        1 => f32::NEG_INFINITY,
        2 => f32::from_bits(77),
        _ => r.normal() as f32,
    });
    check("a few odd ones", &holes);
}

#[test]
fn chunks_of_any_size_add_up() {
    let mut random = Random(5);
    let mut values: Vec<f32> = (0..50_000)
        .map(|_| (random.normal() * 3.0).exp2() as f32)
        .collect();
    values.extend(edges());
    let expected = naive(&values);
    for backend in backends() {
        let mut counter = Counter::new(backend);
        let mut rest = &values[..];
        while !rest.is_empty() {
            let (chunk, more) = rest.split_at((random.next() as usize % 4000).min(rest.len()));
            counter.add(chunk);
            rest = more;
        }
        assert_eq!(counter.finish(), expected, "{}", backend.name());
    }
}

#[test]
fn halves_count_as_the_floats_that_they_are() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let mut random = Random(9);
    let some: Vec<u16> = (0..100_000).map(|_| random.next() as u16).collect();
    // More of one pattern than 16 bits can count.
    let one = vec![0xBE00; 140_000];
    let two: Vec<u16> = (0..140_000).map(|i| [0x3E00, 0xBE00][i % 2]).collect();
    let with_zeros: Vec<u16> = (0..300_000)
        .map(|i| if i % 8 == 0 { 0x8000 } else { 0xBE00 })
        .collect();
    for bits in [
        &with_zeros,
        &all[..],
        &all[..1000],
        &all[0x7000..0x7C80],
        &some,
        &one,
        &two,
        &[],
    ] {
        let f16s: Vec<f16> = bits.iter().map(|&b| f16::from_bits(b)).collect();
        let bf16s: Vec<bf16> = bits.iter().map(|&b| bf16::from_bits(b)).collect();
        let from_f16 = naive(&f16s.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
        let from_bf16 = naive(&bf16s.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
        for backend in backends() {
            let mut counter = Counter::new(backend);
            for _ in 0..2 {
                counter.add_f16(&f16s);
                assert_eq!(counter.finish(), from_f16, "f16 on {}", backend.name());
                counter.add_bf16(&bf16s);
                assert_eq!(counter.finish(), from_bf16, "bf16 on {}", backend.name());
            }
        }
    }
}

#[test]
fn a_nan_of_any_payload_is_one_nan() {
    let values: Vec<f32> = (0..2000u32)
        .map(|i| f32::from_bits((0x7F80_0001 + i * 4001) | (i << 31)))
        .collect();
    check("NaN payloads", &values);
}

/// Writes an `.npy` of one dimension.
fn write_npy(path: &Path, dtype: &str, elements: usize, bytes: &[u8]) {
    let mut header =
        format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({elements},), }}");
    header.extend(std::iter::repeat_n(' ', 117 - header.len()));
    let mut file = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    file.extend(header.bytes());
    file.push(b'\n');
    file.extend(bytes);
    std::fs::write(path, file).expect("the temporary directory can be written");
}

/// What replays a dump at many scales, and how far rounding is off there.
fn replayed(
    path: &Path,
    format: Format,
    scales: &[f32],
    flush: bool,
    backend: Backend,
) -> Vec<Group> {
    let reading = gradients::Options::new();
    let options = Options {
        format,
        scales: scales.to_vec(),
        by: By::All,
        errors: true,
        flush_subnormals: flush,
        backend,
    };
    let input = Input::open(path, &reading, false).expect("it was written");
    analyze(&[input], &options, &reading, &Silent)
        .expect("it can be read")
        .groups
}

#[test]
fn replays_and_errors_are_the_same_bits_on_every_backend() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let path = folder.path().join("values.npy");
    let mut random = Random(77);
    let mut values = edges();
    values.extend((0..30_000).map(|_| f32::from_bits(random.next() as u32)));
    values.extend((0..30_000).map(|_| (random.normal() * 1e-3) as f32));
    for i in (1..values.len()).rev() {
        values.swap(i, (random.next() % (i as u64 + 1)) as usize);
    }
    let some = [2f32.powi(-40), 0.3, 1.0, 777.5, 65536.0, 2f32.powi(40)];
    let powers: Vec<f32> = (-8..=32).map(|k| 2f32.powi(k)).collect();
    // More than there is room for in a block's shared memory.
    let many: Vec<f32> = (0..3000).map(|k| 1.0 + k as f32 / 7.0).collect();
    let lengths = [1, 3, 511, 512, 513, 8_191, 8_193, values.len()];
    let scalar = Backend::scalar();
    let mut cases = Vec::new();
    for format in FORMATS {
        cases.push((format, &some[..], format == FP16, values.len()));
    }
    cases.extend(lengths.map(|length| (FP16, &some[..], false, length)));
    cases.push((FP16, &powers[..], false, values.len()));
    cases.push((FP16, &many[..], false, 2_000));
    for (format, scales, flush, length) in cases {
        let bytes: Vec<u8> = values[..length]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        write_npy(&path, "<f4", length, &bytes);
        let expected = replayed(&path, format, scales, flush, scalar);
        for backend in backends() {
            let found = replayed(&path, format, scales, flush, backend);
            assert_eq!(
                found,
                expected,
                "{} at {} scales, {length} elements, on {}",
                format.name,
                scales.len(),
                backend.name()
            );
        }
    }
}

fn analysis_of(path: &Path, threads: usize, backend: Backend, divisor: Option<f64>) -> Analysis {
    let mut reading = gradients::Options::new();
    if let Some(divisor) = divisor {
        reading = reading
            .with_dump_scale(gradients::DumpScale::Value(divisor))
            .expect("a scale");
    }
    let options = Options {
        format: FP16,
        scales: vec![1.0, 777.5, 65536.0],
        by: By::All,
        errors: true,
        flush_subnormals: false,
        backend,
    };
    let input = Input::open(path, &reading, false).expect("it was written");
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .expect("threads")
        .install(|| analyze(&[input], &options, &reading, &Silent).expect("it can be read"))
}

#[test]
fn a_large_tensor_gives_the_same_bits_on_any_number_of_threads_and_any_backend() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let mut random = Random(21);
    // More than one range of 16 MiB, and a last one that is short and odd.
    let some: Vec<f32> = (0..100_003)
        .map(|i| match i % 5000 {
            0 => f32::NAN,
            1 => 0.0,
            _ => (random.normal() * 6.0 - 12.0).exp2() as f32,
        })
        .collect();
    let values: Vec<f32> = some.iter().copied().cycle().take(4_600_001).collect();
    let wide = folder.path().join("wide.npy");
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    write_npy(&wide, "<f4", values.len(), &bytes);
    let halves: Vec<f16> = values
        .iter()
        .map(|&x| f16::from_f32(x))
        .cycle()
        .take(9_000_001)
        .collect();
    let narrow = folder.path().join("narrow.npy");
    let bytes: Vec<u8> = halves.iter().flat_map(|x| x.to_le_bytes()).collect();
    write_npy(&narrow, "<f2", halves.len(), &bytes);
    let halves: Vec<f32> = halves.iter().map(|x| x.to_f32()).collect();
    for (path, values) in [(&wide, &values), (&narrow, &halves)] {
        for divisor in [None, Some(3.0)] {
            let one = analysis_of(path, 1, Backend::scalar(), divisor);
            let scaled: Vec<f32> = match divisor {
                Some(divisor) => values
                    .iter()
                    .map(|&x| (f64::from(x) / divisor) as f32)
                    .collect(),
                None => values.clone(),
            };
            assert_eq!(one.groups[0].sketch, naive(&scaled), "{path:?} {divisor:?}");
            for backend in backends() {
                let many = analysis_of(path, 3, backend, divisor);
                assert_eq!(many.groups, one.groups, "{path:?} {divisor:?}");
            }
        }
    }
}

#[cfg(feature = "cli")]
#[test]
fn the_flag_chooses_the_backend_the_result_names_it_and_a_missing_one_is_refused() {
    let run = |backend: &str| {
        std::process::Command::new(env!("CARGO_BIN_EXE_gradscale"))
            .args([
                "analyze",
                "tests/data/dumps/npy/f32.npy",
                "--json",
                "--backend",
                backend,
            ])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .expect("the program runs")
    };
    let json = |backend: &str| -> serde_json::Value {
        let output = run(backend);
        assert_eq!(output.status.code(), Some(0), "{backend}");
        serde_json::from_slice(&output.stdout).expect("one document")
    };
    let scalar = json("scalar");
    assert_eq!(scalar["backend"], "scalar");
    for backend in backends() {
        let found = json(backend.name());
        assert_eq!(found["backend"], backend.name());
        assert_eq!(found["groups"], scalar["groups"]);
    }
    assert_eq!(json("auto")["backend"], Backend::auto().name());
    assert_eq!(json("cpu")["backend"], Backend::auto().name());
    let output = run("abacus");
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        message.contains("abacus") && message.contains("no such backend"),
        "{message}"
    );
}
