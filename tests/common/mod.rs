//! Shared by the integration tests and the experiments.

pub mod synthetic;
