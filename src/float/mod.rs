//! Number formats as data.
