//! AVX-512 where it is x86-64. The loop is explained in the [room's](crate::kernel) docs.
#![allow(unsafe_code)] // loads and stores by pointer, and calls into code compiled for the unit

use crate::kernel::backend::Unavailable;
use crate::kernel::lanes::{AHEAD, Facts, GROUP, Group, Lanes, Staged, scatter};
use crate::kernel::rounding::{Block, Rounding};
use crate::kernel::rows::{FINER, LAST_128TH, PLAIN, Rows, SIXTEENTH, Tables};
use std::arch::x86_64::*;

/// Proof that the CPU has AVX-512 and BMI2: only [`Avx512::new`] makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::kernel) struct Avx512(());

impl Avx512 {
    pub fn new() -> Result<Avx512, Unavailable> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512cd")
            && is_x86_feature_detected!("bmi2");
        if found {
            Ok(Avx512(()))
        } else {
            Err(Unavailable::new(
                "avx512",
                "this CPU has no AVX-512 (F, BW, CD, DQ and VL) with BMI2",
            ))
        }
    }
}

impl Lanes for Avx512 {
    fn add(self, rows: &mut Rows, values: &[f32]) {
        // SAFETY: `self` exists only if `new` found these features.
        unsafe { add(self, rows, values) }
    }

    #[inline(always)]
    fn stage(self, group: &Group, staged: &mut Staged) -> Facts {
        // SAFETY: `self` exists only if `new` found these features.
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
        // SAFETY: `self` exists only if `new` found these features.
        unsafe { stage_and_scatter::<TURNS>(group, staged, before, tables) }
    }

    fn errors(self, rounding: &Rounding, block: &mut Block) -> [f64; 2] {
        // SAFETY: `self` exists only if `new` found these features.
        unsafe { errors(rounding, block) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,bmi2")]
fn add(lanes: Avx512, rows: &mut Rows, values: &[f32]) {
    rows.add_in(lanes, values);
}

#[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,bmi2")]
fn errors(rounding: &Rounding, block: &mut Block) -> [f64; 2] {
    rounding.errors_in(block)
}

const LANES: usize = 16;

/// The running facts of a group, lane by lane.
#[derive(Clone, Copy)]
struct Running {
    largest: __m512i,
    smallest_less_one: __m512i,
    or: __m512i,
}

impl Running {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,bmi2")]
    fn new() -> Running {
        Running {
            largest: _mm512_setzero_si512(),
            smallest_less_one: _mm512_set1_epi32(-1),
            or: _mm512_setzero_si512(),
        }
    }

    /// The words of sixteen elements.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,bmi2")]
    fn words(&mut self, values: __m512i) -> __m512i {
        let constant = |bits: u32| _mm512_set1_epi32(bits as i32);
        let magnitude = _mm512_and_si512(values, constant(!PLAIN));
        self.largest = _mm512_max_epu32(self.largest, magnitude);
        self.smallest_less_one = _mm512_min_epu32(
            self.smallest_less_one,
            _mm512_add_epi32(magnitude, constant(u32::MAX)),
        );
        self.or = _mm512_or_si512(self.or, magnitude);
        let exact = _mm512_testn_epi32_mask(magnitude, constant(SIXTEENTH));
        let field = _mm512_slli_epi32::<9>(magnitude);
        let last = _mm512_cmpge_epu32_mask(field, constant(LAST_128TH));
        // 0xD8 is "third ? second : first", bit by bit.
        let moved = _mm512_mask_ternarylogic_epi32::<0xD8>(
            magnitude,
            last,
            _mm512_slli_epi32::<7>(magnitude),
            constant(FINER),
        );
        _mm512_mask_or_epi32(moved, !(exact | last), moved, constant(PLAIN))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,bmi2")]
    fn facts(self) -> Facts {
        Facts {
            largest: _mm512_reduce_max_epu32(self.largest),
            smallest_less_one: _mm512_reduce_min_epu32(self.smallest_less_one),
            or: _mm512_reduce_or_epi32(self.or) as u32,
        }
    }
}

/// The elements and the staged words of step `i`, `LANES` each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,bmi2")]
fn step(group: &Group, staged: &mut Staged, i: usize, running: &mut Running) {
    debug_assert!(i < GROUP / LANES);
    // SAFETY: i < GROUP / LANES, so `LANES` floats from `i * LANES` on lie inside the group.
    let values = unsafe { _mm512_loadu_si512(group.as_ptr().add(i * LANES).cast()) };
    let words = running.words(values);
    // SAFETY: i < GROUP / LANES, so `LANES` words from `i * LANES` on lie inside the staged ones, which are aligned to 64 bytes.
    unsafe { _mm512_store_si512(staged.0.as_mut_ptr().add(i * LANES).cast(), words) };
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,bmi2")]
fn stage(group: &Group, staged: &mut Staged) -> Facts {
    let mut running = Running::new();
    for i in 0..GROUP / LANES {
        step(group, staged, i, &mut running);
    }
    running.facts()
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,bmi2")]
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
