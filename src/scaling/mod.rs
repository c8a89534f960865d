//! Loss-scaling policies and what follows from replaying them.

pub mod policy;
