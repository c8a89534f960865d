//! The readers of dumps: values against brute force, hostile files against clean refusals.

#[path = "cases/counts.rs"]
mod counts;
#[path = "cases/dumps.rs"]
mod dumps;
#[path = "cases/hostile.rs"]
mod hostile;
#[path = "cases/real_files.rs"]
mod real_files;
