//! Loss-scaling policies and what follows from replaying them.

pub mod exec;
pub mod golden;
pub mod laws;
pub mod policy;
