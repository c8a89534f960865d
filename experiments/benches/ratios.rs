//! Speed, as ratios within one run: `cargo bench --bench ratios [-- PART…]`.
//!
//! On a machine that others use too, a time says little; a ratio of times taken in turns says more. So each contender gets the
//! next window of the same memory in turn, round after round, and what is printed is the median over the windows, with the
//! quartiles. Windows are far apart, so none finds its data in a cache that another filled.
//!
//! Parts: `sketch` (in memory, against reading), `halves`, `replay` (against the loop of `torch_loop.py`), `file` (the
//! program on a 1 GB file against plain passes over it). Without any: all but `file`, which needs a gigabyte of disk.

#![allow(clippy::type_complexity)] // closures side by side in a table read better than their named types

use std::hint::black_box;
use std::time::Instant;

use gradscale::kernel::{Backend, Counter};

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

/// xorshift64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.unit()).ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    fn sign(&mut self) -> f64 {
        if self.next() >> 40 & 1 == 0 {
            1.0
        } else {
            -1.0
        }
    }
}

/// The data sets: gradients as they are, and as they are at their worst.
const DATA: [(&str, fn(&mut Random, usize) -> f32); 12] = [
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

/// Times contenders in turns over the windows of `values`; the first is what the others are measured by.
fn contest<T>(values: &[T], contenders: &mut [(&str, Box<dyn FnMut(&[T]) + '_>)]) {
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
            "  {name:12} {:6.1} GB/s  ({:.1} to {:.1})  {:5.1} %",
            gigabytes / median,
            gigabytes / slow,
            gigabytes / fast,
            100.0 * all[0].0 / median
        );
    }
}

fn sketch() {
    println!("sketch of f32 in memory, one core; percent of the speed of reading (XOR)");
    for (name, make) in DATA {
        let mut random = Random(88172645463325252);
        let values: Vec<f32> = (0..WINDOW * WINDOWS / 16)
            .map(|i| make(&mut random, i))
            .collect();
        let values = values.repeat(16);
        println!("{name}");
        let mut counters: Vec<Counter> =
            Backend::available().into_iter().map(Counter::new).collect();
        let mut contenders: Vec<(&str, Box<dyn FnMut(&[f32]) + '_>)> = vec![(
            "read",
            Box::new(|values| {
                black_box(xor(values));
            }),
        )];
        for counter in &mut counters {
            contenders.push((
                counter.backend().name(),
                Box::new(move |values| {
                    counter.add(values);
                    black_box(counter.finish());
                }),
            ));
        }
        contest(&values, &mut contenders);
    }
}

fn main() {
    let parts: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .collect();
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|p| p == part);
    if wanted("sketch") {
        sketch();
    }
}
