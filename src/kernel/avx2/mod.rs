//! AVX2 and BMI2: x86-64 only, and asked for at run time.

#[cfg(target_arch = "x86_64")]
mod enabled;
#[cfg(target_arch = "x86_64")]
pub(super) use enabled::*;

#[cfg(not(target_arch = "x86_64"))]
mod disabled;
#[cfg(not(target_arch = "x86_64"))]
pub(super) use disabled::*;
