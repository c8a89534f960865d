//! AVX2 where it is x86-64. The loop is explained in the [room's](crate::kernel) docs.
#![allow(unsafe_code)] // loads and stores by pointer, and calls into code compiled for the unit

use crate::kernel::backend::Unavailable;
use crate::kernel::lanes::{AHEAD, Facts, GROUP, Group, Lanes, Staged, scatter};
use crate::kernel::rounding::{Block, Rounding};
use crate::kernel::rows::{FINER, LAST_128TH, PLAIN, Rows, SIXTEENTH, Tables};
use std::arch::x86_64::*;

/// Proof that the CPU has AVX2 and BMI2: only [`Avx2::new`] makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::kernel) struct Avx2(());

impl Avx2 {
    pub fn new() -> Result<Avx2, Unavailable> {
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi2") {
            Ok(Avx2(()))
        } else {
            Err(Unavailable::new("avx2", "this CPU has no AVX2 with BMI2"))
        }
    }
}

impl Lanes for Avx2 {
    fn add(self, rows: &mut Rows, values: &[f32]) {
        // SAFETY: `self` exists only if `new` found AVX2 and BMI2.
        unsafe { add(self, rows, values) }
    }

    #[inline(always)]
    fn stage(self, group: &Group, staged: &mut Staged) -> Facts {
        // SAFETY: `self` exists only if `new` found AVX2 and BMI2.
        unsafe { stage(group, staged) }
    }

    #[inline(always)]
    fn stage_and_scatter<const TURNS: usize>(
        self,
        group: &Group,
        staged: &mut Staged,
        before: &Staged,
        tables: &mut Tables,
    ) -> Facts {
        // SAFETY: `self` exists only if `new` found AVX2 and BMI2.
        unsafe { stage_and_scatter::<TURNS>(group, staged, before, tables) }
    }

    fn errors(self, rounding: &Rounding, block: &mut Block) -> [f64; 2] {
        // SAFETY: `self` exists only if `new` found AVX2 and BMI2.
        unsafe { errors(rounding, block) }
    }
}

#[target_feature(enable = "avx2,bmi2")]
fn add(lanes: Avx2, rows: &mut Rows, values: &[f32]) {
    rows.add_in(lanes, values);
}

#[target_feature(enable = "avx2,bmi2")]
fn errors(rounding: &Rounding, block: &mut Block) -> [f64; 2] {
    rounding.errors_in(block)
}

const LANES: usize = 8;

/// The running facts of a group, lane by lane.
#[derive(Clone, Copy)]
struct Running {
    largest: __m256i,
    smallest_less_one: __m256i,
    or: __m256i,
}

impl Running {
    #[inline]
    #[target_feature(enable = "avx2,bmi2")]
    fn new() -> Running {
        Running {
            largest: _mm256_setzero_si256(),
            smallest_less_one: _mm256_set1_epi32(-1),
            or: _mm256_setzero_si256(),
        }
    }

    /// The words of eight elements.
    #[inline]
    #[target_feature(enable = "avx2,bmi2")]
    fn words(&mut self, values: __m256i) -> __m256i {
        let constant = |bits: u32| _mm256_set1_epi32(bits as i32);
        let magnitude = _mm256_and_si256(values, constant(!PLAIN));
        self.largest = _mm256_max_epu32(self.largest, magnitude);
        self.smallest_less_one = _mm256_min_epu32(
            self.smallest_less_one,
            _mm256_add_epi32(magnitude, constant(u32::MAX)),
        );
        self.or = _mm256_or_si256(self.or, magnitude);
        let low = _mm256_and_si256(magnitude, constant(SIXTEENTH));
        let exact = _mm256_cmpeq_epi32(low, _mm256_setzero_si256());
        // Without a sign bit in the way, the signed comparison will do.
        let field = _mm256_and_si256(magnitude, constant(0x7F_FFFF));
        let last = _mm256_cmpgt_epi32(field, constant((LAST_128TH >> 9) - 1));
        let plain = _mm256_andnot_si256(_mm256_or_si256(exact, last), constant(PLAIN));
        let finer = _mm256_and_si256(last, constant(FINER));
        let moved = _mm256_and_si256(
            _mm256_xor_si256(magnitude, _mm256_slli_epi32::<7>(magnitude)),
            finer,
        );
        _mm256_or_si256(_mm256_xor_si256(magnitude, moved), plain)
    }

    #[inline]
    #[target_feature(enable = "avx2,bmi2")]
    fn facts(self) -> Facts {
        let [largest, smallest, or] =
            [self.largest, self.smallest_less_one, self.or].map(|lanes| {
                let mut out = [0u32; LANES];
                // SAFETY: `out` is 32 bytes, and the store asks for no alignment.
                unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), lanes) };
                out
            });
        Facts {
            largest: largest.into_iter().fold(0, u32::max),
            smallest_less_one: smallest.into_iter().fold(u32::MAX, u32::min),
            or: or.into_iter().fold(0, |all, x| all | x),
        }
    }
}

/// The elements and the staged words of step `i`, `LANES` each.
#[inline]
#[target_feature(enable = "avx2,bmi2")]
fn step(group: &Group, staged: &mut Staged, i: usize, running: &mut Running) {
    debug_assert!(i < GROUP / LANES);
    // SAFETY: i < GROUP / LANES, so `LANES` floats from `i * LANES` on lie inside the group.
    let values = unsafe { _mm256_loadu_si256(group.as_ptr().add(i * LANES).cast()) };
    let words = running.words(values);
    // SAFETY: i < GROUP / LANES, so `LANES` words from `i * LANES` on lie inside the staged ones, which are aligned to 64 bytes.
    unsafe { _mm256_store_si256(staged.0.as_mut_ptr().add(i * LANES).cast(), words) };
}

#[inline]
#[target_feature(enable = "avx2,bmi2")]
fn stage(group: &Group, staged: &mut Staged) -> Facts {
    let mut running = Running::new();
    for i in 0..GROUP / LANES {
        step(group, staged, i, &mut running);
    }
    running.facts()
}

#[inline]
#[target_feature(enable = "avx2,bmi2")]
fn stage_and_scatter<const TURNS: usize>(
    group: &Group,
    staged: &mut Staged,
    before: &Staged,
    tables: &mut Tables,
) -> Facts {
    let mut running = Running::new();
    let (before, _) = before.0.as_chunks::<LANES>();
    for (i, words) in before.iter().enumerate() {
        let ahead = group.as_ptr().wrapping_add(i * LANES + AHEAD);
        // SAFETY: a prefetch reads nothing that could be seen, and never faults, wherever it points. (Later compilers know.)
        #[allow(unused_unsafe)]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(ahead.cast())
        };
        step(group, staged, i, &mut running);
        scatter::<TURNS>(words, tables);
    }
    running.facts()
}
