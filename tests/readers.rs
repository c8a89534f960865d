//! The readers of dumps: values against brute force, hostile files against clean refusals.

#[path = "cases/build.rs"]
mod build;
#[path = "cases/corpus.rs"]
mod corpus;
#[path = "cases/counts.rs"]
mod counts;
#[path = "cases/dumps.rs"]
mod dumps;
#[path = "fuzz/check.rs"]
mod fuzz_check;
#[path = "cases/hostile.rs"]
mod hostile;
#[path = "cases/reading.rs"]
mod reading;
#[path = "cases/real_files.rs"]
mod real_files;
#[path = "cases/refusals.rs"]
mod refusals;
