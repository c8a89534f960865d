//! Speed, as ratios within one run: `cargo bench --bench ratios [-- PART…]`.
//!
//! On a machine that others use too, a time says little; a ratio of times taken in turns says more. So each contender gets the
//! next window of the same memory in turn, round after round, and what is printed is the median over the windows, with the
//! quartiles. Windows are far apart, so none finds its data in a cache that another filled.
//!
//! | part | what |
//! |---|---|
//! | `sketch` | f32 in memory, each data set and backend, against reading the same bytes (XOR) and a bare table of counts |
//! | `halves` | f16 and bf16 in memory, against reading the same bytes |
//! | `replay` | exact replay of 41 scales, with and without errors, against the loops of `torch_loop.py` |
//! | `file` | the program on a 1 GB `.npy` in the page cache, process included, against plain passes over it |
//!
//! Without a part: all. `file` writes a gigabyte into the temporary directory and removes it. `replay` and `file` run
//! `torch_loop.py` with the Python that `GRADSCALE_PYTHON` names, where it is set; or take what it printed before from
//! `GRADSCALE_TORCH_LOOP`.

#![allow(clippy::type_complexity)] // closures side by side in a table read better than their named types
#![allow(unsafe_code)] // maps a file, to read it that way too

#[path = "../../tests/common/xorshift.rs"]
mod xorshift;

use std::fs::File;
use std::hint::black_box;
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use gradscale::analysis::{Plan, Raw};
use gradscale::float::FP16;
use gradscale::kernel::{Backend, Counter};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use xorshift::Random;

/// Elements of a window: 16 MiB of f32.
const WINDOW: usize = 4 << 20;
/// Windows: 512 MiB of f32, far more than any cache.
const WINDOWS: usize = 32;

/// Reads every element and does next to nothing with it: the ceiling.
fn xor(values: &[f32]) -> u32 {
    let mut lanes = [0u32; 64];
    let (chunks, rest) = values.as_chunks::<64>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane ^= x.to_bits();
        }
    }
    for x in rest {
        lanes[0] ^= x.to_bits();
    }
    lanes.into_iter().fold(0, |all, x| all ^ x)
}

/// Counts the upper sixteen bits of every element in a table, and nothing else: what a table costs at the least, one addition
/// in memory an element, whatever is made of it. Two tables take turns.
fn table(values: &[f32], counts: &mut [Vec<u32>; 2]) {
    let [even, odd] = counts;
    let (pairs, _) = values.as_chunks::<2>();
    for [a, b] in pairs {
        even[(a.to_bits() >> 16) as usize] += 1;
        odd[(b.to_bits() >> 16) as usize] += 1;
    }
}

/// Makes the n-th value.
type Make = fn(&mut Random, usize) -> f32;

/// The data sets: gradients as they are, and as they are at their worst.
const DATA: [(&str, Make); 12] = [
    ("normal", |r, _| r.normal() as f32),
    ("log-normal, 2 binades", |r, _| {
        ((r.normal() * 2.0 - 12.0).exp2() * r.sign()) as f32
    }),
    ("log-normal, 4 binades", |r, _| {
        ((r.normal() * 4.0 - 12.0).exp2() * r.sign()) as f32
    }),
    ("one binade", |r, _| (1.0 + r.unit()) as f32),
    ("all 1.0", |_, _| 1.0),
    ("all 0.5 + ulp", |_, _| 0.5f32.next_up()),
    ("all zero", |_, _| 0.0),
    ("alternating extremes", |_, i| {
        if i % 2 == 0 {
            f32::MAX
        } else {
            f32::MIN_POSITIVE
        }
    }),
    ("alternating, subnormal", |_, i| {
        if i % 2 == 0 {
            f32::MAX
        } else {
            f32::from_bits(1)
        }
    }),
    ("two values at random", |r, _| {
        if r.next() >> 40 & 1 == 0 { 1.25 } else { -0.3 }
    }),
    ("captured in FP16", |r, _| {
        half::f16::from_f32((r.normal() * 1e-2) as f32).to_f32() / 1024.0
    }),
    ("random bits", |r, _| f32::from_bits(r.next() as u32)),
];

/// Median and quartiles.
fn quartiles(mut times: Vec<f64>) -> (f64, f64, f64) {
    times.sort_by(f64::total_cmp);
    let at = |share: usize| times[(times.len() * share / 4).min(times.len() - 1)];
    (at(2), at(1), at(3))
}

/// A contender: a name, and what it does with a window.
type Contender<'a, T> = (String, Box<dyn FnMut(&[T]) + 'a>);

/// Times contenders in turns over the windows of `values`; the first is what the others are measured by. Returns the median
/// seconds an element.
fn contest<T>(values: &[T], contenders: &mut [Contender<'_, T>]) -> Vec<f64> {
    let window = values.len() / WINDOWS;
    let mut times = vec![Vec::new(); contenders.len()];
    for round in 0..3 {
        for at in 0..WINDOWS {
            for (n, (_, run)) in contenders.iter_mut().enumerate() {
                let start = (at + n * 5) % WINDOWS * window;
                let begun = Instant::now();
                run(&values[start..start + window]);
                if round > 0 {
                    times[n].push(begun.elapsed().as_secs_f64());
                }
            }
        }
    }
    let gigabytes = size_of_val(&values[..window]) as f64 / 1e9;
    let all: Vec<_> = times.into_iter().map(quartiles).collect();
    for ((name, _), (median, fast, slow)) in contenders.iter().zip(&all) {
        println!(
            "  {name:22} {:6.2} GB/s  ({:.2} to {:.2})  {:6.1} %",
            gigabytes / median,
            gigabytes / slow,
            gigabytes / fast,
            100.0 * all[0].0 / median
        );
    }
    all.iter()
        .map(|(median, ..)| median / window as f64)
        .collect()
}

/// A small number of values, as often as fills all windows.
fn fill<T: Copy>(make: impl FnMut(usize) -> T) -> Vec<T> {
    let some: Vec<T> = (0..WINDOW * WINDOWS / 16).map(make).collect();
    some.repeat(16)
}

fn contender<'a, T>(name: &str, run: impl FnMut(&[T]) + 'a) -> Contender<'a, T> {
    (name.to_owned(), Box::new(run))
}

fn sketch() {
    println!("\nsketch of f32 in memory, one core; percent of the speed of reading (XOR)");
    for (name, make) in DATA {
        let mut random = Random(88172645463325252);
        let values = fill(|i| make(&mut random, i));
        println!("{name}");
        let mut counters: Vec<Counter> =
            Backend::available().into_iter().map(Counter::new).collect();
        let mut counts = [vec![0; 1 << 16], vec![0; 1 << 16]];
        let mut contenders = vec![contender("read", |values: &[f32]| {
            black_box(xor(values));
        })];
        contenders.push(contender("bare table", |values: &[f32]| {
            table(values, &mut counts);
            black_box(&counts);
        }));
        for counter in &mut counters {
            contenders.push(contender(counter.backend().name(), |values: &[f32]| {
                counter.add(values);
                black_box(counter.finish());
            }));
        }
        contest(&values, &mut contenders);
    }
}

/// As [`xor`], for 16-bit elements.
fn xor_halves(values: &[u16]) -> u16 {
    let mut lanes = [0u16; 128];
    for chunk in values.as_chunks::<128>().0 {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane ^= x;
        }
    }
    lanes.into_iter().fold(0, |all, x| all ^ x)
}

fn halves() {
    println!(
        "\nsketch of 16-bit floats in memory, one core; percent of the speed of reading (XOR)"
    );
    for (name, make) in DATA {
        let mut random = Random(88172645463325252);
        let values = fill(|i| f16::from_f32(make(&mut random, i)));
        let mut random = Random(88172645463325252);
        let bf16s = fill(|i| bf16::from_f32(make(&mut random, i)));
        println!("{name}");
        let (mut one, mut other) = (Counter::new(Backend::auto()), Counter::new(Backend::auto()));
        contest(
            &values,
            &mut [
                contender("read", |values: &[f16]| {
                    black_box(xor_halves(values.reinterpret_cast()));
                }),
                contender("f16", |values: &[f16]| {
                    one.add_f16(values);
                    black_box(one.finish());
                }),
            ],
        );
        contest(
            &bf16s,
            &mut [
                contender("read", |values: &[bf16]| {
                    black_box(xor_halves(values.reinterpret_cast()));
                }),
                contender("bf16", |values: &[bf16]| {
                    other.add_bf16(values);
                    black_box(other.finish());
                }),
            ],
        );
    }
}

/// What the Python loops need, in nanoseconds an element: torch, numpy.
fn python_loops() -> Option<(f64, f64)> {
    let printed = match (
        std::env::var("GRADSCALE_TORCH_LOOP"),
        std::env::var("GRADSCALE_PYTHON"),
    ) {
        (Ok(printed), _) => printed,
        (_, Ok(python)) => {
            let script = concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/experiments/benches/torch_loop.py"
            );
            let output = Command::new(python).arg(script).output().ok()?;
            String::from_utf8(output.stdout).ok()?
        }
        _ => return None,
    };
    println!("  {}", printed.trim());
    let found: serde_json::Value = serde_json::from_str(&printed).ok()?;
    Some((
        found["torch_ns_per_element"].as_f64()?,
        found["numpy_ns_per_element"].as_f64()?,
    ))
}

fn replay(loops: Option<(f64, f64)>) {
    println!("\nexact replay of 41 scales of log-normal f32 in memory, one core");
    let mut random = Random(88172645463325252);
    let values = fill(|_| ((random.normal() * 2.0 - 12.0).exp2() * random.sign()) as f32);
    let values = &values[..values.len() / 8];
    let scales: Vec<f32> = (-8..=32).map(|k| 2f32.powi(k)).collect();
    let odd: Vec<f32> = scales.iter().map(|scale| scale * 1.37).collect();
    let mut contenders = Vec::new();
    let mut add = |name: &str, scales: &[f32], errors: bool, backend: Backend| {
        let plan = Arc::new(Plan::new(FP16, scales, false, errors, backend));
        contenders.push(contender(name, move |values: &[f32]| {
            let mut raw = Raw::new(plan.clone());
            raw.add(values);
            black_box(raw.rates());
        }));
    };
    add("counts and norms", &scales, false, Backend::auto());
    add("same, 1.37 times 2^k", &odd, false, Backend::auto());
    for backend in Backend::available() {
        add(
            &format!("errors too, {}", backend.name()),
            &scales,
            true,
            backend,
        );
    }
    let times = contest(values, &mut contenders);
    if let Some((torch, numpy)) = loops {
        for ((name, _), seconds) in contenders.iter().zip(times) {
            let ns = seconds * 1e9;
            println!(
                "  {name:22} {ns:7.2} ns an element: {:.0} times faster than torch's loop, {:.0} than numpy's",
                torch / ns,
                numpy / ns
            );
        }
    }
}

/// Runs the program on `path` and returns the seconds it took.
fn program(path: &Path, arguments: &[&str]) -> f64 {
    let begun = Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_gradscale"))
        .arg("analyze")
        .arg(path)
        .args(["--json", "--quiet"])
        .args(arguments)
        .output()
        .expect("the program runs");
    let seconds = begun.elapsed().as_secs_f64();
    assert!(output.status.success());
    seconds
}

/// A plain pass: the file in blocks of `block` bytes, XORed.
fn buffered(path: &Path, block: usize) -> f64 {
    let begun = Instant::now();
    let mut file = File::open(path).expect("it was written");
    let mut buffer = vec![0f32; block / 4];
    file.seek(std::io::SeekFrom::Start(128))
        .expect("it is longer");
    let mut all = 0;
    loop {
        let bytes = zerocopy::IntoBytes::as_mut_bytes(&mut buffer[..]);
        let n = file.read(bytes).expect("it can be read");
        if n == 0 {
            break;
        }
        all ^= xor(&buffer[..n / 4]);
    }
    black_box(all);
    begun.elapsed().as_secs_f64()
}

/// A plain pass over a map.
fn mapped(path: &Path) -> f64 {
    let begun = Instant::now();
    let file = File::open(path).expect("it was written");
    // SAFETY: the file is ours, and nobody else writes to it.
    let map = unsafe { memmap2::Mmap::map(&file) }.expect("it can be mapped");
    let floats: &[f32] =
        zerocopy::FromBytes::ref_from_bytes(&map[128..]).expect("the header is 128 bytes");
    black_box(xor(floats));
    begun.elapsed().as_secs_f64()
}

fn file(loops: Option<(f64, f64)>) {
    const ELEMENTS: usize = 250_000_000;
    println!("\nthe program on a 1 GB .npy of log-normal f32 in the page cache, process included");
    let folder = tempfile::tempdir().expect("a temporary directory");
    let path = folder.path().join("gradients.npy");
    let mut random = Random(88172645463325252);
    let some: Vec<f32> = (0..ELEMENTS / 50)
        .map(|_| ((random.normal() * 2.0 - 12.0).exp2() * random.sign()) as f32)
        .collect();
    let mut out = File::create(&path).expect("it can be written");
    let mut header =
        format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({ELEMENTS},), }}");
    header.extend(std::iter::repeat_n(' ', 117 - header.len()));
    out.write_all(b"\x93NUMPY\x01\x00\x76\x00").expect("space");
    out.write_all(header.as_bytes()).expect("space");
    out.write_all(b"\n").expect("space");
    for _ in 0..50 {
        out.write_all(zerocopy::IntoBytes::as_bytes(&some[..]))
            .expect("space");
    }
    drop(out);
    type Pass<'a> = (String, Box<dyn Fn() -> f64 + 'a>);
    let path = &path;
    let mut passes: Vec<Pass<'_>> = Vec::new();
    for kib in [64, 128, 256, 1024, 4096] {
        passes.push((
            format!("read, {kib} KiB"),
            Box::new(move || buffered(path, kib << 10)),
        ));
    }
    passes.push(("read, map".into(), Box::new(move || mapped(path))));
    for arguments in [
        &["--threads", "1"][..],
        &["--threads", "1", "--mmap"],
        &["--threads", "1", "--backend", "avx2"],
        &["--threads", "1", "--backend", "scalar"],
        &[],
        &["--mmap"],
        &["--threads", "1", "--errors"],
        &["--errors"],
    ] {
        if let Some(name) = arguments.iter().skip_while(|a| **a != "--backend").nth(1)
            && Backend::parse(name).is_err()
        {
            continue;
        }
        let name = format!("gradscale {}", arguments.join(" "));
        passes.push((name, Box::new(move || program(path, arguments))));
    }
    let mut times = vec![Vec::new(); passes.len()];
    for round in 0..10 {
        for ((_, pass), times) in passes.iter().zip(&mut times) {
            let seconds = pass();
            if round > 0 {
                times.push(seconds);
            }
        }
    }
    let times: Vec<_> = times.into_iter().map(quartiles).collect();
    let plain = passes
        .iter()
        .zip(&times)
        .filter(|((name, _), _)| name.starts_with("read"))
        .map(|(_, (median, ..))| *median)
        .fold(f64::MAX, f64::min);
    for ((name, _), (median, fast, slow)) in passes.iter().zip(&times) {
        let times_torch = loops.map_or(String::new(), |(torch, _)| {
            format!(
                "  {:8.0} times torch's loop",
                torch * 1e-9 * ELEMENTS as f64 / median
            )
        });
        println!(
            "  {name:36} {median:6.3} s ({fast:.3} to {slow:.3})  {:5.1} % of the fastest plain pass{times_torch}",
            100.0 * plain / median
        );
    }
}

fn main() {
    let parts: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .collect();
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|p| p == part);
    let names: Vec<&str> = Backend::available().iter().map(|b| b.name()).collect();
    println!(
        "{} threads; backends {}",
        rayon::current_num_threads(),
        names.join(", ")
    );
    if wanted("sketch") {
        sketch();
    }
    if wanted("halves") {
        halves();
    }
    let loops = (wanted("replay") || wanted("file"))
        .then(python_loops)
        .flatten();
    if wanted("replay") {
        replay(loops);
    }
    if wanted("file") {
        file(loops);
    }
}
