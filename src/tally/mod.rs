//! Exact integer counts of a run's gradients.
